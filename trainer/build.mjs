// npm install --no-package-lock && npm run build: makes, of kernel.ts, kernel.wasm (f32, for the page) and
// kernel64.wasm (f64, for tests) and their sums; of all this ../nbs/trainer.js, the one file that a page loads.
// node build.mjs --page: trainer.js alone, with the kernel that is there. --to FOLDER: into another folder.
import {createHash} from "node:crypto";
import fs from "node:fs";
import path from "node:path";

const asked = process.argv.slice(2), page = asked.includes("--page");
const to = path.resolve(asked.includes("--to") ? asked[asked.indexOf("--to") + 1] : ".");
process.chdir(import.meta.dirname);

const KERNELS = {"kernel.wasm": "f32", "kernel64.wasm": "f64"};
if (!page) {
  const asc = await import("assemblyscript/asc");
  for (const [file, real] of Object.entries(KERNELS)) {
    const flags = ["-O3", "--noAssert", "--runtime", "stub", "--enable", "simd", "--use", `real=${real}`];
    const {error, stderr} = await asc.main(["kernel.ts", "-o", path.join(to, file), ...flags]);
    if (error) throw Error(`${error.message}\n${stderr}`);
  }
  const sum = file => createHash("sha256").update(fs.readFileSync(path.join(to, file))).digest("hex");
  const sums = Object.keys(KERNELS).map(file => `${sum(file)}  ${file}\n`).join("");
  fs.writeFileSync(path.join(to, "kernel.wasm.sha256"), sums);
}

const body = file => fs.readFileSync(file, "utf8").replace(/^import .*\n/gm, "").replace(/^export /gm, "");
const kernel = fs.readFileSync(page ? "kernel.wasm" : path.join(to, "kernel.wasm")).toString("base64");
const text = `// Made by build.mjs of model.js, worker.js and kernel.wasm.
const TRAINER_KERNEL = "${kernel}";

function trainerSource(kernel) {
"use strict";
${body("model.js")}
${body("worker.js")}
serve(self, Uint8Array.from(atob(kernel), c => c.charCodeAt(0)));
}

// A worker that trains; README.md lists its messages.
function startTrainer() {
  const text = \`(\${trainerSource})("\${TRAINER_KERNEL}")\`, url = URL.createObjectURL(new Blob([text]));
  const worker = new Worker(url);
  URL.revokeObjectURL(url);
  return worker;
}
`;
fs.writeFileSync(asked.includes("--to") ? path.join(to, "trainer.js") : "../nbs/trainer.js", text);
