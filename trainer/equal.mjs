// node equal.mjs KERNEL < jobs.json: takes the steps that a test asks for, in the precision of the kernel,
// and prints losses and final weights. A job: {arm, experts, rate, weights: name -> base64 of float64, or
// seed for those that a tab draws, batches: a list of sums for each step, read: true for what it then can
// do}.
import fs from "node:fs";
import {Model} from "./model.js";

const kernel = new WebAssembly.Module(fs.readFileSync(process.argv[2]));
const Real = process.argv[2].endsWith("64.wasm") ? Float64Array : Float32Array;
const pack = values => Buffer.from(Float64Array.from(values).buffer).toString("base64");
const unpack = text => new Float64Array(Uint8Array.from(Buffer.from(text, "base64")).buffer);

const answers = JSON.parse(fs.readFileSync(0)).map(job => {
  const model = new Model(kernel, job, Real);
  if (job.seed) model.draw(job.seed);
  else for (const n in model.shapes) model.set(n, unpack(job.weights[n]));
  const losses = job.batches.map(sums => model.step(sums));
  const weights = Object.fromEntries(Object.keys(model.shapes).map(n => [n, pack(model.get(n))]));
  const {digits, left, exact} = job.read ? model.read() : {};
  return {condition: model.condition, losses, weights, digits, left, exact: exact?.filter(x => x).length};
});
process.stdout.write(JSON.stringify(answers));
