// What one training step of the add-7 transformer spends its time on, as loops over linear memory.
//
// AssemblyScript. `real` is f32 in the browser; tests use the same text built with f64 (asc --use real=f64).
// Every matrix is row-major, and its rows are whole vectors: what does not fill them (12 tokens, 3 experts)
// is padded with zeros. These stay zero: so are their gradients, and weight decay leaves a zero alone.

const SIZE: i32 = sizeof<real>();
const LANES: i32 = 16 / SIZE;                   // numbers of a vector: 4 in f32, 2 in f64
const HEAD: i32 = 16, N_HEADS: i32 = 4, D: i32 = N_HEADS * HEAD;
const N_CTX: i32 = 8, D_VOCAB: i32 = 12, PADDED_VOCAB: i32 = 16, ROWS: i32 = D_VOCAB * N_CTX;
const MOST_EXPERTS: i32 = 8;
const SCALE: real = 0.25;                       // of scores, 1 / sqrt(16)
const HEAD_BYTES: i32 = HEAD * SIZE, TABLE_BYTES: i32 = ROWS * HEAD_BYTES;

@external("env", "exp") declare function exp(x: f64): f64;       // only the build in f64 asks for it
@external("env", "log") declare function log(x: f64): f64;

export function heap(): usize { return __heap_base; }

@inline function splat(x: real): v128 { return v128.splat<real>(x); }
@inline function add(a: v128, b: v128): v128 { return v128.add<real>(a, b); }
@inline function sub(a: v128, b: v128): v128 { return v128.sub<real>(a, b); }
@inline function mul(a: v128, b: v128): v128 { return v128.mul<real>(a, b); }
@inline function div(a: v128, b: v128): v128 { return v128.div<real>(a, b); }
@inline function get(p: usize, i: i32): real { return load<real>(p + i * SIZE); }

// Sum over the lanes of a vector.
@inline function total(x: v128): real {
  const two = v128.extract_lane<real>(x, 0) + v128.extract_lane<real>(x, 1);
  return SIZE == 8 ? two : two + <real>f32x4.extract_lane(x, 2) + <real>f32x4.extract_lane(x, 3);
}

// exp of each lane. In f32: 2^k times a polynomial of degree 6 (Cephes), relative error near 1e-7; in f64:
// Math.exp.
@inline function vexp(x: v128): v128 {
  if (SIZE == 8) return f64x2(exp(f64x2.extract_lane(x, 0)), exp(f64x2.extract_lane(x, 1)));
  x = f32x4.max(f32x4.min(x, f32x4.splat(87)), f32x4.splat(-87));
  const k = f32x4.nearest(f32x4.mul(x, f32x4.splat(1.44269504088896341)));
  x = f32x4.sub(x, f32x4.mul(k, f32x4.splat(0.693359375)));                     // x - k ln 2, in two parts
  x = f32x4.sub(x, f32x4.mul(k, f32x4.splat(-2.12194440e-4)));
  let y = f32x4.splat(1.9875691500e-4);
  y = f32x4.add(f32x4.mul(y, x), f32x4.splat(1.3981999507e-3));
  y = f32x4.add(f32x4.mul(y, x), f32x4.splat(8.3334519073e-3));
  y = f32x4.add(f32x4.mul(y, x), f32x4.splat(4.1665795894e-2));
  y = f32x4.add(f32x4.mul(y, x), f32x4.splat(1.6666665459e-1));
  y = f32x4.add(f32x4.mul(y, x), f32x4.splat(5.0000001201e-1));
  y = f32x4.add(f32x4.add(f32x4.mul(y, f32x4.mul(x, x)), x), f32x4.splat(1));
  return f32x4.mul(y, i32x4.shl(i32x4.add(i32x4.trunc_sat_f32x4_s(k), i32x4.splat(127)), 23));
}

// ----------------------------------------------------------------------------------------- matrix products

// C (m, n) = start + A (m, k) B (k, n). A and B are read by strides, so that either may be a transpose: A[i,
// q] lies a_i * i + a_q * q numbers behind A. Row i of `start` lies start_i * i behind it: a bias has stride
// 0, and C itself may be the start. m is rounded up to a multiple of 4: room for those rows must be there,
// and nobody reads them. n is a multiple of 8. `panel` is room for two vectors of columns of B, which the
// inner loop reads in one piece.
export function matmul(A: usize, a_i: i32, a_q: i32, B: usize, b_q: i32, b_j: i32, C: usize, m: i32, k: i32,
                       n: i32, start: usize, start_i: i32, panel: usize): void {
  a_i *= SIZE; a_q *= SIZE; b_q *= SIZE; b_j *= SIZE; start_i *= SIZE;
  const c_i = n * SIZE;
  for (let j = 0; j < n; j += 2 * LANES) {
    pack(B + j * b_j, b_q, b_j, k, panel);
    for (let i = 0; i < m; i += 4) {
      let s = start + i * start_i + j * SIZE;
      let c00 = v128.load(s), c01 = v128.load(s, 16); s += start_i;
      let c10 = v128.load(s), c11 = v128.load(s, 16); s += start_i;
      let c20 = v128.load(s), c21 = v128.load(s, 16); s += start_i;
      let c30 = v128.load(s), c31 = v128.load(s, 16);
      let a0 = A + i * a_i, a1 = a0 + a_i, a2 = a1 + a_i, a3 = a2 + a_i;
      for (let b = panel, end = panel + k * 32; b < end; b += 32) {
        const b0 = v128.load(b), b1 = v128.load(b, 16);
        let a = v128.load_splat<real>(a0); a0 += a_q;
        c00 = add(c00, mul(a, b0)); c01 = add(c01, mul(a, b1));
        a = v128.load_splat<real>(a1); a1 += a_q;
        c10 = add(c10, mul(a, b0)); c11 = add(c11, mul(a, b1));
        a = v128.load_splat<real>(a2); a2 += a_q;
        c20 = add(c20, mul(a, b0)); c21 = add(c21, mul(a, b1));
        a = v128.load_splat<real>(a3); a3 += a_q;
        c30 = add(c30, mul(a, b0)); c31 = add(c31, mul(a, b1));
      }
      let c = C + i * c_i + j * SIZE;
      v128.store(c, c00); v128.store(c, c01, 16); c += c_i;
      v128.store(c, c10); v128.store(c, c11, 16); c += c_i;
      v128.store(c, c20); v128.store(c, c21, 16); c += c_i;
      v128.store(c, c30); v128.store(c, c31, 16);
    }
  }
}

function pack(B: usize, b_q: i32, b_j: i32, k: i32, panel: usize): void {
  for (let q = 0; q < k; q++, B += b_q, panel += 32) {
    if (b_j == SIZE) { v128.store(panel, v128.load(B)); v128.store(panel, v128.load(B, 16), 16); }
    else for (let j = 0; j < 2 * LANES; j++) store<real>(panel + j * SIZE, load<real>(B + j * b_j));
  }
}

// ---------------------------------------------------------------------------------------------------- rows

// y[i] = x[index[i]] for rows of D numbers.
export function gather(x: usize, index: usize, y: usize, n: i32): void {
  const row = D * SIZE;
  for (let i = 0; i < n; i++) memory.copy(y + i * row, x + load<i32>(index + i * 4) * row, row);
}

// y[index[i]] += x[i] for rows of D numbers.
export function scatter_add(x: usize, index: usize, y: usize, n: i32): void {
  for (let i = 0; i < n; i++) {
    const from = x + i * D * SIZE, to = y + load<i32>(index + i * 4) * D * SIZE;
    for (let d = 0; d < D * SIZE; d += 16) v128.store(to + d, add(v128.load(to + d), v128.load(from + d)));
  }
}

// out += the n columns' sums of x (m, n): the gradient of a bias.
export function add_columns(x: usize, out: usize, m: i32, n: i32): void {
  for (let i = 0; i < m; i++) add_to(out, x + i * n * SIZE, n);
}

// x[i] += row, for m rows of n numbers.
export function add_row(row: usize, x: usize, m: i32, n: i32): void {
  for (let i = 0; i < m; i++) add_to(x + i * n * SIZE, row, n);
}

@inline function add_to(y: usize, x: usize, n: i32): void {
  for (let j = 0; j < n * SIZE; j += 16) v128.store(y + j, add(v128.load(y + j), v128.load(x + j)));
}

// The distinct inputs: embed[token * 8 + position] = W_E[token] + W_pos[position].
export function embed(W_E: usize, W_pos: usize, out: usize): void {
  const row = D * SIZE;
  for (let r = 0; r < ROWS; r++) {
    memory.copy(out + r * row, W_E + r / N_CTX * row, row);
    add_to(out + r * row, W_pos + r % N_CTX * row, D);
  }
}

export function embed_back(grad: usize, W_E: usize, W_pos: usize): void {
  const row = D * SIZE;
  for (let r = 0; r < ROWS; r++) {
    add_to(W_E + r / N_CTX * row, grad + r * row, D);
    add_to(W_pos + r % N_CTX * row, grad + r * row, D);
  }
}

// ----------------------------------------------------------------------------------------------- attention
// q, k and v are tables (head, row of `embed`, 16), since a batch has 96 distinct inputs and no more. `rows`
// (batch, 8) says which row stands at each position. Positions from `first` on ask; z has (batch, 8 - first)
// rows of D numbers. Of a pattern (batch, position, head, 8) only the positions up to its own are read.

export function attend(q: usize, k: usize, v: usize, rows: usize, pattern: usize, z: usize, batch: i32,
                       first: i32): void {
  for (let b = 0; b < batch; b++, rows += N_CTX * 4) {
    for (let i = first; i < N_CTX; i++) {
      for (let h = 0; h < N_HEADS; h++) {
        const table = h * TABLE_BYTES, at = table + load<i32>(rows + i * 4) * HEAD_BYTES;
        let most = -Infinity as real;
        for (let j = 0; j <= i; j++) {
          const key = k + table + load<i32>(rows + j * 4) * HEAD_BYTES;
          const score = dot(q + at, key) * SCALE;
          store<real>(pattern + j * SIZE, score);
          most = max<real>(most, score);
        }
        for (let j = 0; j <= i; j += LANES) {
          const p = pattern + j * SIZE;
          v128.store(p, vexp(sub(v128.load(p), splat(most))));
        }
        let sum: real = 0;
        for (let j = 0; j <= i; j++) sum += get(pattern, j);
        for (let c = 0; c < HEAD_BYTES; c += 16) v128.store(z + c, splat(0));
        for (let j = 0; j <= i; j++) {
          const weight = get(pattern, j) / sum, value = v + table + load<i32>(rows + j * 4) * HEAD_BYTES;
          store<real>(pattern + j * SIZE, weight);
          for (let c = 0; c < HEAD_BYTES; c += 16)
            v128.store(z + c, add(v128.load(z + c), mul(splat(weight), v128.load(value + c))));
        }
        pattern += N_CTX * SIZE; z += HEAD_BYTES;
      }
    }
  }
}

// Of two rows of a head.
@inline function dot(a: usize, b: usize): real {
  let s = splat(0);
  for (let c = 0; c < HEAD_BYTES; c += 16) s = add(s, mul(v128.load(a + c), v128.load(b + c)));
  return total(s);
}

// Adds to the gradients of the tables, from that of z. Softmax: dscore = pattern (dpattern - mean), where the
// mean of dpattern is weighted by the pattern.
export function attend_back(q: usize, k: usize, v: usize, rows: usize, pattern: usize, dz: usize, dq: usize,
                            dk: usize, dv: usize, batch: i32, first: i32): void {
  for (let b = 0; b < batch; b++, rows += N_CTX * 4) {
    for (let i = first; i < N_CTX; i++) {
      for (let h = 0; h < N_HEADS; h++) {
        const table = h * TABLE_BYTES, at = table + load<i32>(rows + i * 4) * HEAD_BYTES;
        let mean: real = 0;
        for (let j = 0; j <= i; j++) {
          const value = table + load<i32>(rows + j * 4) * HEAD_BYTES;
          mean += dot(dz, v + value) * get(pattern, j);
        }
        for (let j = 0; j <= i; j++) {
          const there = table + load<i32>(rows + j * 4) * HEAD_BYTES, weight = get(pattern, j);
          const w = splat(weight), dscore = splat(weight * (dot(dz, v + there) - mean) * SCALE);
          for (let c = 0; c < HEAD_BYTES; c += 16) {
            const to_v = dv + there + c, to_k = dk + there + c, to_q = dq + at + c;
            v128.store(to_v, add(v128.load(to_v), mul(w, v128.load(dz + c))));
            v128.store(to_k, add(v128.load(to_k), mul(dscore, v128.load(q + at + c))));
            v128.store(to_q, add(v128.load(to_q), mul(dscore, v128.load(k + there + c))));
          }
        }
        pattern += N_CTX * SIZE; dz += HEAD_BYTES;
      }
    }
  }
}

// -------------------------------------------------------------------------------------- what is not linear

// hidden = silu(up) = up sigmoid(up); `up` becomes silu's slope there, which the way back multiplies by.
export function silu(up: usize, hidden: usize, n: i32): void {
  const one = splat(1);
  for (let i = 0; i < n * SIZE; i += 16) {
    const x = v128.load(up + i), s = div(one, add(one, vexp(v128.neg<real>(x))));
    v128.store(hidden + i, mul(x, s));
    v128.store(up + i, mul(s, add(one, mul(x, sub(one, s)))));
  }
}

// out = x + y, n numbers.
export function sum(x: usize, y: usize, out: usize, n: i32): void {
  for (let i = 0; i < n * SIZE; i += 16) v128.store(out + i, add(v128.load(x + i), v128.load(y + i)));
}

// x *= y, n numbers.
export function multiply(x: usize, y: usize, n: i32): void {
  for (let i = 0; i < n * SIZE; i += 16) v128.store(x + i, mul(v128.load(x + i), v128.load(y + i)));
}

// probs (n, 8) = softmax over the first E logits of each row, in place; chosen = the most likely expert.
export function route(probs: usize, chosen: usize, n: i32, E: i32): void {
  for (let i = 0; i < n; i++, probs += MOST_EXPERTS * SIZE) {
    let most = get(probs, 0), best = 0;
    for (let e = 1; e < E; e++) if (get(probs, e) > most) { most = get(probs, e); best = e; }
    store<i32>(chosen + i * 4, best);
    softmax(probs, most, E, MOST_EXPERTS);
  }
}

// One row in place, `most` its largest; past its `n` numbers zeros. Returns the sum that it was divided by.
@inline function softmax(x: usize, most: real, n: i32, padded: i32): real {
  const bytes = padded * SIZE;
  for (let j = 0; j < bytes; j += 16) v128.store(x + j, vexp(sub(v128.load(x + j), splat(most))));
  let sum: real = 0;
  for (let j = 0; j < n; j++) sum += get(x, j);
  for (let j = 0; j < n; j++) store<real>(x + j * SIZE, get(x, j) / sum);
  for (let j = n; j < padded; j++) store<real>(x + j * SIZE, 0);
  return sum;
}

// Gradient of the balance loss, the sum over experts of weight times probability, with respect to the
// router's logits; it takes the place of the probabilities.
export function route_back(probs: usize, weight: usize, n: i32): void {
  for (let i = 0; i < n; i++, probs += MOST_EXPERTS * SIZE) {
    let mean: real = 0;
    for (let e = 0; e < MOST_EXPERTS; e++) mean += get(probs, e) * get(weight, e);
    for (let e = 0; e < MOST_EXPERTS; e++)
      store<real>(probs + e * SIZE, get(probs, e) * (get(weight, e) - mean));
  }
}

// Cross-entropy summed over n rows of logits (n, 16), which become their gradient, times `share`. A row with
// target -1 fills up a group of rows: it has no loss and no gradient.
export function cross_entropy(logits: usize, targets: usize, n: i32, share: f64): f64 {
  let loss: f64 = 0;
  const each = splat(<real>share);
  for (let i = 0; i < n; i++, logits += PADDED_VOCAB * SIZE) {
    const target = load<i32>(targets + i * 4);
    if (target < 0) { memory.fill(logits, 0, PADDED_VOCAB * SIZE); continue; }
    const right = get(logits, target);
    let most = get(logits, 0);
    for (let v = 1; v < D_VOCAB; v++) most = max<real>(most, get(logits, v));
    loss += log(<f64>softmax(logits, most, D_VOCAB, PADDED_VOCAB)) + <f64>most - <f64>right;
    store<real>(logits + target * SIZE, get(logits, target) - 1);
    for (let v = 0; v < PADDED_VOCAB * SIZE; v += 16)
      v128.store(logits + v, mul(v128.load(logits + v), each));
  }
  return loss;
}

// ----------------------------------------------------------------------------------------------- optimiser

export function sum_of_squares(x: usize, n: i32): f64 {
  let s = splat(0);
  for (let i = 0; i < n * SIZE; i += 16) s = add(s, mul(v128.load(x + i), v128.load(x + i)));
  return total(s);
}

// AdamW: w, its gradient g times `clip`, both moments m and v; `first` and `second` are 1 - beta^step of
// each. A moment below 1.2e-38 is 0, as where the library trains; smaller ones cost a processor a hundred
// times the time.
export function adamw(w: usize, g: usize, m: usize, v: usize, n: i32, rate: f64, decay: f64, clip: f64,
                      first: f64, second: f64): void {
  const step = splat(<real>(rate / first)), keep = splat(<real>(1 - rate * decay)), scale = splat(<real>clip);
  const root = splat(<real>(1 / Math.sqrt(second))), eps = splat(<real>1e-8), tiny = splat(<real>1.2e-38);
  const beta1 = splat(<real>0.1), beta2 = splat(<real>0.001), keep2 = splat(<real>0.999);
  for (let i = 0; i < n * SIZE; i += 16) {
    const grad = mul(v128.load(g + i), scale);
    let mean = v128.load(m + i), square = mul(v128.load(v + i), keep2);
    mean = add(mean, mul(beta1, sub(grad, mean)));
    square = add(square, mul(beta2, mul(grad, grad)));
    mean = v128.and(mean, v128.gt<real>(v128.abs<real>(mean), tiny));
    square = v128.and(square, v128.gt<real>(square, tiny));
    v128.store(m + i, mean);
    v128.store(v + i, square);
    const move = div(mul(step, mean), add(mul(v128.sqrt<real>(square), root), eps));
    v128.store(w + i, sub(mul(v128.load(w + i), keep), move));
  }
}
