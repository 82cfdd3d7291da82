// The front page's picture, and the trainer beside it. Recorded models are dots over the FFN's learning rate, read from
// the page's own rows; what a reader trains in this tab (trainer.js, which makes its worker) lands among them.
(() => {
"use strict";
const RATES = [.125, .25, .5, 1, 2, 4, 8], SAID = {.125: "⅛", .25: "¼", .5: "½", 1: "1", 2: "2", 4: "4", 8: "8"};
const PHONE = 620, TOLD = 400, LIMIT = 8000;      // px from which names stand at the right; steps until it is told, and at most
const byId = id => document.getElementById(id), percent = share => Math.round(100 * share) + "%";

function node(tag, attributes = {}, inside = []) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  e.append(...[inside].flat());
  return e;
}
function svg(tag, attributes, said) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  if (said !== undefined) e.textContent = said;
  return e;
}

// ---- the picture ----------------------------------------------------------------------------------------------------
function axesOf(width, phone) {                   // where a rate and a share stand, in pixels
  const left = 44, right = phone ? 10 : 200, top = phone ? 50 : 30, bottom = 46, high = phone ? 400 : 430;
  const step = (width - left - right - 50) / (RATES.length - 1), beside = {dense: -.1, narrow: 0, mixture: .1, frozen: .2};
  return {left, right, top, bottom, high, width,
    x: (rate, arm) => left + 26 + step * (Math.log2(rate) + 3 + (beside[arm] ?? 0)),
    y: share => top + (high - top - bottom) * (1 - share / 1.03)};
}

function frame(put, at, phone, nulls) {           // axes, the paper's rate, and what a guess and a copy get
  const half = phone ? 17 : 34;
  put("rect", {class: "band", x: at.x(1) - half, width: 2 * half, y: at.top - 4, height: at.high - at.top - at.bottom + 4});
  put("text", {x: at.x(1), y: at.top - 10, "text-anchor": "middle"}, "the paper's rate");
  put("text", {x: 0, y: at.top - (phone ? 30 : 10)}, "digits right without the FFN");
  for (const share of [0, .25, .5, .75, 1]) put("text", {x: at.left - 6, y: at.y(share) + 4, "text-anchor": "end"}, percent(share));
  put("line", {class: "axis", x1: at.left, x2: at.width - at.right, y1: at.y(0), y2: at.y(0)});
  for (const rate of RATES) put("text", {x: at.x(rate), y: at.high - at.bottom + 18, "text-anchor": "middle"}, SAID[rate]);
  put("text", {x: (at.left + at.width - at.right) / 2, y: at.high - 8, "text-anchor": "middle"},
      phone ? "how fast the FFN learns (1: as the rest)" : "how fast the FFN learns, beside the rest of the model (1: as fast)");
  for (const {share, long, brief, dy} of nulls) {
    put("line", {class: "null", x1: at.left, x2: at.width - at.right, y1: at.y(share), y2: at.y(share)});
    put("text", {class: "halo", x: phone ? at.width - at.right : at.width - at.right + 8, y: at.y(share) + (phone ? dy > 9 ? 15 : -4 : dy),
                 "text-anchor": phone ? "end" : "start"}, phone ? brief : long);
  }
}

function recorded(put, at, phone, arm) {          // one arm: its models as faint dots, means, intervals, a line
  let chance = 7;
  const jitter = () => (chance = (chance * 16807) % 2147483647) / 2147483647 - .5;
  for (const p of arm.points) for (const share of p.models)
    put("circle", {class: "seed " + arm.key, cx: (at.x(p.rate, arm.key) + jitter() * (phone ? 6 : 12)).toFixed(1),
                   cy: at.y(share / 100).toFixed(1), r: phone ? 1.1 : 1.7});
  put("polyline", {class: "line " + arm.key, points: arm.points.map(p => `${at.x(p.rate, arm.key)},${at.y(p.mean)}`).join(" ")});
  for (const p of arm.points) {
    put("line", {class: "ci " + arm.key, x1: at.x(p.rate, arm.key), x2: at.x(p.rate, arm.key), y1: at.y(p.lo), y2: at.y(p.hi)});
    put("circle", {class: arm.key + (p.unseen ? " full" : " open"), cx: at.x(p.rate, arm.key), cy: at.y(p.mean), r: phone ? 3.5 : 4.8});
  }
  const last = phone ? arm.points.find(p => p.rate === (arm.dy > 0 ? .25 : 2)) : arm.points.at(-1);
  put("text", {class: "word " + arm.key, x: phone ? at.x(last.rate) : at.width - at.right + 8,
               y: at.y(last.mean) + (phone ? arm.dy > 0 ? 26 : -14 : 4 + arm.dy), "text-anchor": phone ? "middle" : "start"},
      phone ? arm.key : arm.name);
}

function draw(box, data, yours) {
  const width = Math.max(300, box.clientWidth), phone = width < PHONE, at = axesOf(width, phone);
  const picture = svg("svg", {viewBox: `0 0 ${width} ${at.high}`, role: "img", "aria-label": data.says});
  const put = (...a) => picture.append(svg(...a));
  frame(put, at, phone, data.nulls);
  for (const arm of data.arms) recorded(put, at, phone, arm);
  for (const {arm, rate, dx, dy} of data.numbers) {
    const p = data.arms.find(a => a.key === arm).points.find(p => p.rate === rate);
    put("text", {class: "number " + arm, x: at.x(rate, arm) + (phone ? dx / 2 : dx), y: at.y(p.mean) + dy, "text-anchor": dx < 0 ? "end" : "start"}, percent(p.mean));
  }
  for (const m of yours) {
    const x = at.x(m.rate, m.arm), y = at.y(m.left), d = phone ? 6 : 8;
    put("path", {class: "yours " + m.arm, d: `M${x} ${y - d}L${x + d} ${y}L${x} ${y + d}L${x - d} ${y}Z`});
    const usual = !routed(m) || m.experts === 4, last = m === yours.at(-1);
    if (last || !usual) put("text", {class: "yours", x: x + 13, y: y + 5}, usual ? "yours" : `yours, ${m.experts}`);
  }
  box.replaceChildren(picture);
}

// ---- the trainer ----------------------------------------------------------------------------------------------------
const ARMS = {dense: "dense", mixture: "mixture", frozen: "frozen router", narrow: "narrow"};
const CHOSEN = [{arm: "dense", rate: 1, experts: 4}, {arm: "mixture", rate: 1, experts: 4}, {arm: "dense", rate: .125, experts: 4}];
const routed = job => ["mixture", "frozen"].includes(job.arm);
const called = job => `${job.rate < 1 ? "slow " : job.rate > 1 ? "fast " : ""}${ARMS[job.arm]}` + (job.rate !== 1 && job.rate !== .125 ?
  ` at ${SAID[job.rate]}` : "") + (routed(job) && job.experts !== 4 ? `, ${job.experts} expert${job.experts > 1 ? "s" : ""}` : "");
const same = (a, b) => a.arm === b.arm && a.rate === b.rate && (!routed(a) || a.experts === b.experts);

function curve(job, seen) {                       // what is right with the FFN and without, every 50 steps
  const W = 320, H = 72, most = Math.max(TOLD, ...seen.map(m => m.step)), now = seen.at(-1);
  const says = now ? `${called(job)}, step ${now.step}: right with its FFN ${percent(now.digits)}, without ${percent(now.left)}` : "no curve yet";
  const s = svg("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": says});
  const x = m => 4 + (W - 66) * m.step / most, y = share => H - 8 - (H - 16) * share;
  for (const share of [0, 1]) s.append(svg("line", {class: share ? "null" : "axis", x1: 4, x2: W - 62, y1: y(share), y2: y(share)}));
  if (!now) return s;
  const path = what => seen.map(m => `${x(m)},${y(m[what])}`).join(" "), far = Math.abs(now.digits - now.left) > .25;
  s.append(svg("polyline", {class: "with", points: path("digits")}), svg("polyline", {class: "line " + job.arm, points: path("left")}),
           svg("text", {x: x(now) + 5, y: y(now.digits) + (far ? 4 : 0)}, "with"),
           svg("text", {class: "word " + job.arm, x: x(now) + 5, y: y(now.left) + (far ? 4 : 13)}, "without"));
  return s;
}

class Bench {                                     // three models of one seed, each in a worker of its own
  constructor(root, data, landed) {
    Object.assign(this, {root, data, landed, jobs: CHOSEN.map(job => ({...job})), trained: [], workers: [], seen: [], ended: []});
    this.build();
    document.addEventListener("visibilitychange", () => this.tell({do: document.hidden ? "pause" : "resume"}));
  }
  find(what) { return this.root.querySelector(what); }
  tell(message) { for (const w of this.workers) w.postMessage(message); }

  build() {
    const seed = node("input", {type: "number", min: 0, max: 99999, step: 1, value: 1, inputmode: "numeric"});
    this.seed = seed;
    this.go = node("button", {type: "button", class: "go"}, "Train three models");
    this.halt = node("button", {type: "button", class: "plain", hidden: ""}, "Stop");
    this.keep = node("button", {type: "button", class: "plain", hidden: "", title: "a file for each model that is trained"}, "Keep as files");
    this.said = node("p", {class: "said", role: "status", "aria-live": "polite"});
    this.cost = node("p", {class: "small"});
    this.panels = node("div", {class: "arms"}, this.jobs.map((job, i) => this.panel(job, i)));
    this.root.replaceChildren(node("div", {class: "row"}, [this.go, this.halt, this.keep, node("label", {}, ["seed ", seed])]),
                              this.panels, this.said, this.cost);
    this.go.onclick = () => this.start();
    this.halt.onclick = () => this.stop("Stopped. What is in the picture stays.");
    this.keep.onclick = () => this.tell({do: "keep"});
    seed.onchange = () => this.jobs.forEach((_, i) => this.forget(i));
  }
  panel(job, i) {
    const choice = (key, said, options) => {
      const select = node("select", {"aria-label": `${said}, model ${i + 1}`}, options.map(([value, word]) =>
        node("option", {value, ...(String(job[key]) === String(value) ? {selected: ""} : {})}, word)));
      select.onchange = () => {                   // what was trained before goes from the panel; its diamond stays
        job[key] = key === "arm" ? select.value : Number(select.value);
        this.rename(job, i), this.forget(i);
      };
      return select;
    };
    const experts = choice("experts", "number of experts", [1, 2, 3, 4, 5, 6, 7, 8].map(n => [n, `${n} expert${n > 1 ? "s" : ""}`]));
    experts.className = "experts";
    const panel = node("div", {class: "arm"}, [node("b", {}, ""), node("output"),
      node("div", {class: "choices"}, [choice("arm", "kind", Object.entries(ARMS)), experts,
        node("label", {}, ["FFN at ", choice("rate", "rate of the FFN", RATES.map(r => [r, SAID[r]])), " of the rate"])]),
      node("div", {class: "curve"}), node("div", {class: "state small"})]);
    queueMicrotask(() => { this.rename(job, i); this.show(i); });
    return panel;
  }
  rename(job, i) {
    const panel = this.panels.children[i], name = panel.querySelector("b");
    name.textContent = called(job);
    name.className = "word " + job.arm;
    const experts = panel.querySelector(".experts");
    experts.hidden = !routed(job);
    experts.options[0].disabled = job.arm === "frozen";               // one expert has no router to freeze
    if (job.arm === "frozen" && job.experts === 1) job.experts = experts.value = 4;
  }
  forget(i) {
    this.seen[i] = [], this.workers[i]?.terminate(), delete this.trained[i], this.show(i), this.state(i, "");
    this.said.textContent = this.cost.textContent = "";
    this.keep.hidden = !this.trained.some(Boolean);
  }
  show(i) { this.panels.children[i].querySelector(".curve").replaceChildren(curve(this.jobs[i], this.seen[i] ?? [])); }
  state(i, said, share = "") {
    this.panels.children[i].querySelector(".state").textContent = said;
    this.panels.children[i].querySelector("output").textContent = share;
  }

  start() {
    const seed = Number(this.seed.value);
    if (!this.seed.value || !Number.isInteger(seed) || seed < 0 || seed > 99999) {
      this.said.textContent = "Type a whole number from 0 to 99999.";
      this.cost.textContent = "";
      return;
    }
    for (const w of this.workers) w.terminate();
    this.workers = [];
    this.cost.textContent = "Training on your processor; nothing leaves this tab.";
    this.began = performance.now();
    this.seen = this.jobs.map(() => []), this.ended = [], this.trained = this.jobs.map(job => ({...job}));
    this.said.textContent = "";
    this.running(true);
    this.workers = this.jobs.map((job, i) => {
      this.state(i, "starts …"), this.show(i);
      const worker = globalThis.startTrainer(), says = {"no simd": () => this.cannot(), curve: m => this.follow(i, m), done: m => this.end(i, m),
        ready: () => worker.postMessage({do: "train", id: i, seed, until: "first1000", limit: LIMIT, ...job}), kept: m => this.save(i, m)};
      worker.onerror = () => this.cannot();
      worker.onmessage = ({data}) => says[data.says]?.(data);
      return worker;
    });
  }
  running(on) {
    this.go.disabled = on, this.halt.hidden = !on, this.keep.hidden = on || !this.ended.length;
    for (const select of this.root.querySelectorAll("select")) select.disabled = on;
  }
  stop(said) {                                    // workers stay: a model that is trained can be kept
    this.tell({do: "stop"});
    this.running(false);
    this.cost.textContent = said;
  }
  cannot() { this.stop("This browser has no WebAssembly SIMD and cannot train here. The recorded models are in the picture."); }

  follow(i, m) {
    this.seen[i].push(m), this.show(i);
    this.state(i, `step ${m.step}: ${Math.round(1000 * m.exact)} of 1,000 sums right, ${m.seconds.toFixed(1)} s`, percent(m.left));
    const last = this.seen.map(s => s.at(-1));
    if (last.every((s, k) => s && (s.step >= TOLD || this.ended[k]))) this.said.textContent = this.verdict(last);
  }
  end(i, m) {
    if (m.how === "stopped") { this.state(i, `Stopped at step ${m.step}; not in the picture.`); return; }
    this.ended[i] = m.how;
    if (m.how === "first1000") this.landed({...this.trained[i], left: m.left});
    else this.state(i, m.how === "never" ? `After ${m.step} steps it has not had every sum right, and is not in the picture.`
      : "Its loss is no number any more, and it is not in the picture.");
    if ([...this.ended].filter(Boolean).length < this.jobs.length) return;
    this.said.textContent = this.verdict(this.seen.map(s => s.at(-1)));
    const seconds = ((performance.now() - this.began) / 1000).toFixed(1);
    this.stop(`Three models in ${seconds} s; those with every sum right are diamonds in the picture. A seed draws other numbers here than in ` +
              "the package. Change the seed, a rate or a kind, and train again.");
  }
  verdict(last) {                                 // what these showed, and how the recorded seeds went
    const soon = [...this.ended].filter(Boolean).length === 3 ? "" : " so far";
    const told = `Right without the FFN${soon}: ${this.trained.map((job, i) => `${called(job)} ${percent(last[i].left)}`).join("; ")}.`;
    const [mixture, slow] = [CHOSEN[1], CHOSEN[2]].map(asked => last[this.trained.findIndex(job => same(job, asked))]);
    if (!mixture || !slow) return told;
    const {ahead, n} = this.data.slow, more = slow.left > mixture.left;
    return `${told} ${more ? "Slow dense keeps more than the mixture, as" : "Here the mixture keeps more; slow dense does"} in ${ahead} of ${n} recorded seeds.`;
  }
  save(i, {text}) {
    if (!text || !this.trained[i]) return;
    const file = URL.createObjectURL(new Blob([text], {type: "application/json"}));
    node("a", {download: `${called(this.trained[i]).replaceAll(/[ ,]+/g, "_")}.json`, href: file}).click();
    setTimeout(() => URL.revokeObjectURL(file), 1000);
    this.cost.textContent = "Kept as JSON, a file a model: moe-redistribution measure FILE.json reads it.";
  }
}

function begin() {
  const box = byId("front-picture"), source = byId("front-data");
  if (!box || !source) return;
  const data = JSON.parse(source.textContent), yours = [], still = document.querySelector("#fig-front img, #fig-front + div img");
  if (still) (still.closest("a") ?? still).replaceWith(box);     // without JavaScript the picture that was drawn stays
  box.hidden = false;
  const again = () => draw(box, data, yours);
  new ResizeObserver(again).observe(box);
  new Bench(byId("front-trainer"), data, model => { yours.push(model); again(); });
}
if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
else begin();
})();
