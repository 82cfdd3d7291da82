// Four trained models that a reader looks into, computed here. Tested equal to torch on all 1,000 numbers
// (tests/test_toy.py). First the model, which knows nothing of pages; then what is shown.
(() => {
"use strict";
// ---- the model ------------------------------------------------------------------------------------------------------
// One layer, width 64, four heads, no norm. It reads eight tokens, ones first: three digits, an end sign, and the four
// digits of the answer; at the fourth token it must say the first digit of the answer, and so on.
const WIDTH = 64, HEADS = 4, KEYS = 16, END = 11, READ = [3, 4, 5, 6];

const digits = (n, width) => Array.from({length: width}, (_, i) => Math.floor(n / 10 ** i) % 10);
const sum = x => x.reduce((a, b) => a + b, 0);
const dot = (x, y) => { let total = 0; for (let i = 0; i < x.length; i++) total += x[i] * y[i]; return total; };
const plus = (x, y) => x.map((v, i) => v + y[i]);
const best = x => x.indexOf(Math.max(...x));
const row = (W, i, width) => W.subarray(i * width, (i + 1) * width);
const silu = v => v / (1 + Math.exp(-v));

function softmax(x) {
  const top = Math.max(...x), e = x.map(v => Math.exp(v - top)), total = sum(e);
  return e.map(v => v / total);
}

function times(x, W, n, from = 0) {               // x times a matrix of n columns that begins at `from`
  const y = new Float64Array(n);
  for (let i = 0; i < x.length; i++) for (let j = 0; j < n; j++) y[j] += x[i] * W[from + i * n + j];
  return y;
}

function attention(w, x) {                        // x: a vector for each token
  const patterns = [], out = x.map(() => Float64Array.from(w.b_O));
  for (let h = 0; h < HEADS; h++) {
    const [q, k, v] = [w.W_Q, w.W_K, w.W_V].map(W => x.map(t => times(t, W, KEYS, h * WIDTH * KEYS)));
    const pattern = q.map((asks, i) => softmax(k.slice(0, i + 1).map(key => dot(asks, key) / Math.sqrt(KEYS))));
    pattern.forEach((shares, i) => {
      const seen = shares.map((share, j) => v[j].map(c => share * c)).reduce(plus);
      out[i] = plus(out[i], times(seen, w.W_O, WIDTH, h * KEYS * WIDTH));
    });
    patterns.push(pattern);
  }
  return [patterns, out];
}

function expert(w, x, e) {                        // a dense FFN is one expert
  const n = w.b_up.length / w.experts, up = times(x, w.W_up, n, e * WIDTH * n);
  const hidden = plus(up, row(w.b_up, e, n)).map(silu);
  return plus(times(hidden, w.W_down, WIDTH, e * n * WIDTH), row(w.b_down, e, WIDTH));
}

function forward(w, n, ffn = "on") {              // ffn: "on", "zero", "mean"
  const tokens = [...digits(n, 3), END, ...digits(n + 7, 4)];
  const embedded = tokens.map((t, i) => plus(row(w.W_E, t, WIDTH), row(w.W_pos, i, WIDTH)));
  const [patterns, attended] = attention(w, embedded);
  const middle = embedded.map((x, i) => plus(x, attended[i]));
  const experts = middle.map(x => w.W_router ? best(times(x, w.W_router, w.experts)) : 0);
  const last = middle.map((x, i) => ffn === "zero" ? x
    : plus(x, ffn === "mean" ? row(w.ffn_mean, i, WIDTH) : expert(w, x, experts[i])));
  const logits = last.map(x => Array.from({length: 12}, (_, t) => dot(x, row(w.W_E, t, WIDTH))));
  return {tokens, patterns, experts, logits};
}

function answer({tokens, logits}, copies = "allowed") {         // four digits, ones first
  return READ.map((i, place) => {
    const right = digits(sum(tokens.slice(0, 3).map((d, p) => d * 10 ** p)) + 7, 4)[place];
    const p = softmax(logits[i].map((v, t) => copies === "out" && t === tokens[i] ? -Infinity : v)), says = best(p);
    return {says, p: p[says], wanted: right, right: says === right, asked: copies !== "out" || tokens[i] !== right};
  });
}

// ---- its weights ----------------------------------------------------------------------------------------------------
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));

function half(bits) {                             // a float16: sign, five bits of exponent, ten of fraction
  const sign = bits >> 15 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
  return sign * (exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction);
}

function weights(model) {
  const halves = ["W_up", "b_up", "W_down", "b_down"], w = {experts: model.shapes.W_up[0]};
  const whole = Float64Array.from(new Float32Array(bytes(model.whole).buffer));
  const rest = Float64Array.from(new Uint16Array(bytes(model.half).buffer), half);
  const at = new Map([[whole, 0], [rest, 0]]);
  for (const [name, shape] of Object.entries(model.shapes)) {
    const from = halves.includes(name) ? rest : whole, size = shape.reduce((a, b) => a * b);
    w[name] = from.subarray(at.get(from), at.get(from) + size);
    at.set(from, at.get(from) + size);
  }
  return w;
}

// ---- what is shown --------------------------------------------------------------------------------------------------
const PLACES = ["ones", "tens", "hundreds", "thousands"], SHORT = ["ones", "tens", "hund.", "thou."];
const INK = "currentColor";
const FFN = {on: "on", zero: "at zero", mean: "at its mean"}, COPIES = {allowed: "allowed", out: "ruled out"};
const MODELS = {dense: "dense", "slow dense": "slow dense", mixture: "mixture", "frozen router": "mixture, frozen router"};
const percent = p => `${Math.round(100 * p)}%`;
const word = token => token === END ? "end" : token === 10 ? "pad" : String(token);
const called = m => ({dense: "the dense model", "slow dense": "the slow dense model", mixture: "the mixture",
  "frozen router": "the mixture with a frozen router"})[m.key];
const many = (x, f) => x.map(f).join("");
const text = (x, y, said, more = "") => `<text x="${x}" y="${y}" ${more}>${said}</text>`;
const picture = (width, height, label, inside) =>
  `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${label}" font-size="11" fill="${INK}">${inside}</svg>`;
const radios = (name, legend, options, chosen) => `<fieldset><legend>${legend}</legend>` +
  many(Object.entries(options), ([value, said]) => `<label><input type="radio" name="toy-${name}" value="${value}"` +
    `${value === chosen ? " checked" : ""}> ${said}</label>`) + "</fieldset>";

function whyHundreds(m, ffn, copies, data) {      // a null beats a model there: why
  if (ffn !== "mean" || m.scores.mean[copies][2] >= data.passed_on[copies][2]) return "";
  return `On hundreds repeating the digit gets ${percent(data.passed_on[copies][2])}, since only ${data.carries} of 1,000
    numbers carry into them. ` + (copies === "out" ? `Where nothing carries, ${percent(m.wrong_hundreds.out)} of what
    ${called(m)} gets wrong is one too many, a carry that is not there` : `Of what ${called(m)} gets wrong,
    ${percent(m.wrong_hundreds.allowed)} repeats the digit that it reads`) + ` (${m.seeds} seeds). `;
}

function answerTable(given, copies, scores, passed) {     // thousands first, as people read
  const places = [3, 2, 1, 0];
  const cell = a => !a.asked ? `<td class="toy-unasked"><b>–</b><small>not asked</small></td>`
    : `<td class="toy-${a.right ? "right" : "wrong"}"><b>${word(a.says)}</b><small>${percent(a.p)}, ` +
      `${a.right ? "right" : "wrong"}</small></td>`;
  const line = (head, cells) => `<tr><th scope="row">${head}</th>${cells}</tr>`;
  return `<table class="toy-digits"><caption>The four digits, with the probability that the model gives them</caption>
    <thead><tr><td></td>${many(places, i => `<th scope="col">${PLACES[i]}</th>`)}</tr></thead><tbody>` +
    line("n + 7", many(places, i => `<td>${given[i].wanted}</td>`)) +
    line("the model says", many(places, i => cell(given[i]))) +
    line(copies === "out" ? "right, of all that is asked" : "right, of 1,000 numbers",
      many(places, i => `<td>${percent(scores[i])}</td>`)) +
    line("repeating the digit", many(places, i => `<td>${percent(passed[i])}</td>`)) + "</tbody></table>";
}

function tokenTable({tokens, experts}, model, hues) {
  const badge = e => `<td><span class="toy-expert" style="background:${hues[e]}33;border-color:${hues[e]}">${e + 1}` +
    "</span></td>";
  const sent = model.shapes.W_router ? many(experts, badge) : `<td colspan="8">one FFN for all</td>`;
  return `<table class="toy-tokens"><caption>Each token, and the expert that it goes to</caption><tbody>
    <tr><th scope="row">token</th>${many(tokens, t => `<td>${word(t)}</td>`)}</tr>
    <tr class="toy-writes"><th scope="row">writes</th><td colspan="3"></td>
    ${many(SHORT, p => `<td>${p}</td>`)}<td></td></tr>
    <tr><th scope="row">expert</th>${sent}</tr></tbody></table>`;
}

function headPicture(pattern, tokens, head, hue) {            // the four places that write a digit; others reach nobody
  const size = 25, left = 64, top = 20, rows = READ.map(i => pattern[i]);
  const most = rows.map((shares, r) => `for the ${PLACES[r]} ${percent(Math.max(...shares))} on ` +
    `token ${best(shares) + 1}, ${word(tokens[best(shares)])}`).join("; ");
  const cell = (p, r, j) => `<rect x="${left + size * j}" y="${top + size * r}" width="${size - 1}"
      height="${size - 1}" fill="${hue}" fill-opacity="${(.03 + .67 * p).toFixed(3)}"/>` + (p < .05 ? "" :
    text(left + size * (j + .48), top + size * (r + .63), Math.round(100 * p), `text-anchor="middle" font-size="10"`));
  return `<figure><figcaption>head ${head + 1}</figcaption>` + picture(left + 8 * size, top + 4 * size,
    `Head ${head + 1} looks: ${most}.`,
    many(tokens, (t, j) => text(left + size * (j + .48), 13, word(t), `text-anchor="middle"`)) +
    many(rows, (shares, r) => text(left - 6, top + size * (r + .65), PLACES[r], `text-anchor="end"`) +
      many(shares, (p, j) => cell(p, r, j)))) + "</figure>";
}

function play(root, data) {                       // a number of the reader's in a model of his choice, from inside
  const model = Object.fromEntries(data.models.map(m => [m.key, {...m, weights: null}]));
  root.innerHTML = `<form class="toy-form"><label class="toy-number">A number, 0 to 999 <input type="number" min="0" max="999"
      step="1" value="193" inputmode="numeric" required></label>` + radios("model", "Model", MODELS, "dense") +
    radios("ffn", "The FFN", FFN, "mean") + radios("copies", "Copies of the current token", COPIES, "allowed") + `</form>
    <p class="toy-said" aria-live="polite"></p><div class="toy-answer"></div>
    <p class="toy-note"></p><div class="toy-heads"></div>`;
  const find = what => root.querySelector(what), chosen = name => find(`[name="toy-${name}"]:checked`).value;
  function update() {
    const number = find("input[type=number]"), m = model[chosen("model")], ffn = chosen("ffn"), copies = chosen("copies");
    if (!number.checkValidity()) {                // nothing of the last number stays
      find(".toy-said").textContent = "Type a whole number from 0 to 999.";
      for (const what of [".toy-answer", ".toy-heads", ".toy-note"]) find(what).replaceChildren();
      return;
    }
    const n = Number(number.value), run = forward(m.weights = m.weights || weights(m), n, ffn);
    const given = answer(run, copies), asked = given.filter(a => a.asked);
    find(".toy-said").innerHTML = `${n} + 7 = ${n + 7}. With its FFN ${FFN[ffn]} ${called(m)} writes ` +
      `<b>${given.map(a => a.asked ? word(a.says) : "–").reverse().join(" ")}</b>: ` +
      `${asked.filter(a => a.right).length} of ${asked.length} digits right.`;
    find(".toy-answer").innerHTML = answerTable(given, copies, m.scores[ffn][copies], data.passed_on[copies]) +
      tokenTable(run, m, data.hues);
    find(".toy-heads").innerHTML = `<p>Where each head looks, in percent: a row for each digit that is written, a column
      for each token.</p>` + many(run.patterns, (p, h) => headPicture(p, run.tokens, h, m.hue));
    find(".toy-note").innerHTML = whyHundreds(m, ffn, copies, data) + (copies === "out" ? `The token that the model reads
      may not be said; where it is the answer, nothing is asked. ` : "") + `Earlier digits of the right answer are given,
      ones first, as in training. Attention comes before the FFN: what replaces the FFN changes neither the patterns nor the
      experts. Shown is seed ${m.seed} of <code>${m.condition}</code>, of ${m.seeds} the nearest to their mean.`;
  }
  root.addEventListener("input", update);
  root.addEventListener("submit", event => event.preventDefault());
  update();
}

function load(box) {                              // the data are large: they come when the box is about to be seen
  if (globalThis.toyData) { play(box, globalThis.toyData); return; }
  const script = document.createElement("script");
  script.src = box.dataset.from;
  script.addEventListener("load", () => play(box, globalThis.toyData));
  document.head.append(script);
}

if (typeof document !== "undefined") document.addEventListener("DOMContentLoaded", () => {
  const box = document.getElementById("toy-inside");
  if (!box) return;
  if (typeof IntersectionObserver === "undefined") { load(box); return; }
  const seen = new IntersectionObserver(entries => {
    if (entries.some(e => e.isIntersecting)) { seen.disconnect(); load(box); }
  }, {rootMargin: "300px"});
  seen.observe(box);
});
if (typeof module !== "undefined") module.exports = {forward, answer, weights};
})();
