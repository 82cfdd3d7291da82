// node record.mjs ARM EXPERTS RATE FIRST LAST: trains these seeds until all 1,000 sums are right, one after
// another, and prints a line of recorded.csv for each as it is done. Seconds are the processor's, compiling
// and collecting, too.
import fs from "node:fs";
import {Model} from "./model.js";
import {training} from "./worker.js";

const [arm, experts, rate, first, last] = process.argv.slice(2).map(x => Number(x) || x);
const kernel = new WebAssembly.Module(fs.readFileSync(new URL("kernel.wasm", import.meta.url)));
for (let seed = first; seed <= last; seed++) {
  const begun = process.cpuUsage(), model = new Model(kernel, {arm, experts, rate});
  const steps = training(model, {seed});
  let now, point = {};
  while (!(now = steps.next()).done) point = now.value ?? point;
  const {user, system} = process.cpuUsage(begun), seconds = ((user + system) / 1e6).toFixed(1);
  const {first256, left} = point;
  console.log([model.condition, arm, rate, seed, now.value, first256, model.steps, left, seconds].join());
}
