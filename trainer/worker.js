// One training at a time, told and telling by messages (README.md lists them).
import {Model, random, WEIGHTS, BATCHES, EVALUATION} from "./model.js";

const BATCH = 128, CURVE_EVERY = 50, LOOK_EVERY = 200;      // the library looks every 200 steps
const LIMIT = 10000;                                        // steps of the library's schedule

// Trains from nothing until a rule holds: first256 (256 drawn sums all right) or first1000 (all sums right),
// both looked at every 200 steps only. Yields a point of the curves every 50 steps, and null between them,
// for others to have their turn; returns how it ended.
export function* training(model, {seed, until = "first1000", limit = LIMIT}) {
  model.draw(seed);
  const batches = random(seed, BATCHES), evaluation = random(seed, EVALUATION);
  const draw = (n, r) => Array.from({length: n}, () => Math.floor(1000 * r()));
  const first = {first256: null, first1000: null};
  let loss = 0;
  while (model.steps < limit) {
    const now = model.step(draw(BATCH, batches)), step = model.steps;
    if (!Number.isFinite(now)) return "failed";
    loss += now / CURVE_EVERY;
    if (step % 5 === 0) yield null;
    if (step % CURVE_EVERY) continue;
    const {digits, exact, left} = model.read();
    if (step % LOOK_EVERY === 0) {
      if (draw(256, evaluation).every(n => exact[n])) first.first256 ??= step;
      if (exact.every(right => right)) { first.first1000 ??= step; first.first256 ??= step; }
    }
    yield {step, loss, digits, exact: exact.reduce((a, b) => a + b) / exact.length, left, ...first};
    loss = 0;
    if (first[until]) return until;
  }
  return "never";
}

// A model as text: its condition's name says in the library how it was made; weights are named and shaped as
// there.
export function kept(model, about) {
  const weights = {};
  for (const n in model.shapes) {
    const bytes = new Uint8Array(Float32Array.from(model.get(n)).buffer);
    let text = "";
    for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
    weights[n] = {shape: model.shapes[n][0], float32: btoa(text)};
  }
  const drawn = `sfc32(seed, ${WEIGHTS}): W_E, W_pos normal(0, 1), all else uniform within 1/sqrt(inputs); `
              + `batches sfc32(seed, ${BATCHES}): 128 of the 1,000 sums with replacement`;
  const {condition, arm, rate} = model, experts = model.routed ? model.E : null;
  return JSON.stringify({format: "moe_redistribution trainer 1", condition, arm, experts, rate, ...about,
                         steps: model.steps, stream: "browser", drawn, weights}, null, 1);
}

export function serve(scope, bytes) {
  const say = (says, more) => scope.postMessage({says, ...more});
  if (typeof WebAssembly !== "object" || !WebAssembly.validate(bytes)) return say("no simd");
  const kernel = new WebAssembly.Module(bytes), {port1, port2} = new MessageChannel();
  const turn = () => new Promise(done => { port1.onmessage = done; port2.postMessage(0); });
  let job = null, resumed = () => {};

  async function train(mine) {
    const {id, arm, experts, rate, seed} = mine, model = mine.model = new Model(kernel, {arm, experts, rate});
    const steps = training(model, mine);
    let seconds = 0, point = {};
    for (;;) {
      const begun = performance.now(), {value, done} = steps.next();
      seconds += (performance.now() - begun) / 1000;                    // a pause costs nothing
      if (done) { mine.how = value; break; }
      if (value) say("curve", point = {id, ...value, seconds});
      await turn();
      while (mine.paused) await new Promise(done => { resumed = done; });
      if (mine.stopped) { mine.how = "stopped"; break; }
    }
    say("done", {id, ...point, how: mine.how, step: model.steps, condition: model.condition, seed, seconds});
  }

  const end = old => { if (old) { old.stopped = true; old.paused = false; resumed(); } };
  const orders = {
    train(order) { end(job); train(job = order); },
    pause() {
      if (!job || job.how) return;
      job.paused = true;
      say("paused", {id: job.id, step: job.model.steps});
    },
    resume() { if (job) { job.paused = false; resumed(); say("resumed", {id: job.id}); } },
    stop() { end(job); },
    keep() {
      if (!job) return say("kept", {id: null, text: null});
      const {id, seed, how = "under way"} = job;
      say("kept", {id, text: kept(job.model, {seed, how})});
    }};
  scope.onmessage = e => orders[e.data.do]?.(e.data);
  say("ready");
}
