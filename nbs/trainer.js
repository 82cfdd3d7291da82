// Made by build.mjs of model.js, worker.js and kernel.wasm.
const TRAINER_KERNEL = "AGFzbQEAAAABWwpgBH9/f38AYAN/f38AYAJ/fwF8YA1/f39/f39/f39/f39/AGABfAF8YAABf2AEf39/fAF8YAt/f39/f39/f39/fwBgCH9/f39/f39/AGAKf39/f398fHx8fAACCwEDZW52A2xvZwAEAxMSAgABAAEAAQMFAAEBBgcIAAAJBQMBAAAHywETBGhlYXAACQZtYXRtdWwACAZnYXRoZXIACgtzY2F0dGVyX2FkZAAEC2FkZF9jb2x1bW5zABEHYWRkX3JvdwAQBWVtYmVkAAwKZW1iZWRfYmFjawALBmF0dGVuZAAPC2F0dGVuZF9iYWNrAA4Ec2lsdQADA3N1bQACCG11bHRpcGx5AAcFcm91dGUABgpyb3V0ZV9iYWNrAAUNY3Jvc3NfZW50cm9weQANDnN1bV9vZl9zcXVhcmVzAAEFYWRhbXcAEgZtZW1vcnkCAAq8KhJMAgF7AX8DQCADIAFBAnRIBEAgAiAAIANq/QAEACICIAL95gH95AEhAiADQRBqIQMMAQsLIAL9HwAgAv0fAZIgAv0fApIgAv0fA5K7CzkBAX8DQCAEIANBAnRIBEAgAiAEaiAAIARq/QAEACABIARq/QAEAP3kAf0LBAAgBEEQaiEEDAELCwv4AwIDewJ/A0AgBiACQQJ0SARAIAAgBmoiB/0ABAAiA/3hAf0MAACuQgAArkIAAK5CAACuQv3oAf0MAACuwgAArsIAAK7CAACuwv3pASIE/Qw7qrg/O6q4PzuquD87qrg//eYB/WohBSABIAZqIAP9DAAAgD8AAIA/AACAPwAAgD/9DAAAgD8AAIA/AACAPwAAgD/9DGdpUDlnaVA5Z2lQOWdpUDkgBCAF/QwAgDE/AIAxPwCAMT8AgDE//eYB/eUBIAX9DIOAXrmDgF65g4BeuYOAXrn95gH95QEiBP3mAf0MzkO3Os5DtzrOQ7c6zkO3Ov3kASAE/eYB/QwIiQg8CIkIPAiJCDwIiQg8/eQBIAT95gH9DMGpKj3BqSo9wakqPcGpKj395AEgBP3mAf0MqqoqPqqqKj6qqio+qqoqPv3kASAE/eYB/QwAAAA/AAAAPwAAAD8AAAA//eQBIAQgBP3mAf3mASAE/eQB/QwAAIA/AACAPwAAgD8AAIA//eQBIAX9+AH9DH8AAAB/AAAAfwAAAH8AAAD9rgFBF/2rAf3mAf3kAf3nASIE/eYB/QsEACAHIAT9DAAAgD8AAIA/AACAPwAAgD8gA/0MAACAPwAAgD8AAIA/AACAPyAE/eUB/eYB/eQB/eYB/QsEACAGQRBqIQYMAQsLC2sBBX8DQCADIAVKBEAgACAFQQh0aiEGIAIgASAFQQJ0aigCAEEIdGohB0EAIQQDQCAEQYACSARAIAQgB2oiCCAI/QAEACAEIAZq/QAEAP3kAf0LBAAgBEEQaiEEDAELCyAFQQFqIQUMAQsLC5MBAgR/AX0DQCACIARKBEBDAAAAACEHQQAhAwNAIANBCEgEQCAHIANBAnQiBSAAaioCACABIAVqKgIAlJIhByADQQFqIQMMAQsLQQAhAwNAIANBCEgEQCADQQJ0IgUgAGoiBiAGKgIAIAEgBWoqAgAgB5OUOAIAIANBAWohAwwBCwsgBEEBaiEEIABBIGohAAwBCwsL/AQDAX0DfwJ7A0AgAiAHSgRAIAAqAgAhBEEAIQVBASEGA0AgAyAGSgRAIAQgACAGQQJ0aioCAF0EQCAAIAYiBUECdGoqAgAhBAsgBkEBaiEGDAELCyABIAdBAnRqIAU2AgBBACEFA0AgBUEgSARAIAAgBWoiBv0ABAAgBP0T/eUB/QwAAK5CAACuQgAArkIAAK5C/egB/QwAAK7CAACuwgAArsIAAK7C/ekBIgn9DDuquD87qrg/O6q4PzuquD/95gH9aiEIIAb9DGdpUDlnaVA5Z2lQOWdpUDkgCSAI/QwAgDE/AIAxPwCAMT8AgDE//eYB/eUBIAj9DIOAXrmDgF65g4BeuYOAXrn95gH95QEiCf3mAf0MzkO3Os5DtzrOQ7c6zkO3Ov3kASAJ/eYB/QwIiQg8CIkIPAiJCDwIiQg8/eQBIAn95gH9DMGpKj3BqSo9wakqPcGpKj395AEgCf3mAf0MqqoqPqqqKj6qqio+qqoqPv3kASAJ/eYB/QwAAAA/AAAAPwAAAD8AAAA//eQBIAkgCf3mAf3mASAJ/eQB/QwAAIA/AACAPwAAgD8AAIA//eQBIAj9+AH9DH8AAAB/AAAAfwAAAH8AAAD9rgFBF/2rAf3mAf0LBAAgBUEQaiEFDAELC0MAAAAAIQRBACEFA0AgAyAFSgRAIAQgACAFQQJ0aioCAJIhBCAFQQFqIQUMAQsLQQAhBQNAIAMgBUoEQCAAIAVBAnRqIgYgBioCACAElTgCACAFQQFqIQUMAQsLIAMhBQNAIAVBCEgEQCAAIAVBAnRqQwAAAAA4AgAgBUEBaiEFDAELCyAHQQFqIQcgAEEgaiEADAELCws4AQJ/A0AgAyACQQJ0SARAIAAgA2oiBCAE/QAEACABIANq/QAEAP3mAf0LBAAgA0EQaiEDDAELCwuKBQILewl/IAFBAnQhGSACQQJ0IRogBEECdCEdIAVBAnQhGyALQQJ0IR8gCUECdCEgA0AgCSAYSgRAIAMgGCAbbGohBCAMIQFBACEFA0AgBSAISARAIBtBBEYEQCABIAT9AAQA/QsEACABIAT9AAQQ/QsEEAVBACECA0AgAkEISARAIAEgAkECdGogBCACIBtsaioCADgCACACQQFqIQIMAQsLCyAFQQFqIQUgBCAdaiEEIAFBIGohAQwBCwtBACECA0AgAiAHSARAIAogAiAfbGogGEECdGoiAf0ABAAhDSAB/QAEECEOIAEgH2oiAf0ABAAhDyAB/QAEECEQIAEgH2oiAf0ABAAhESAB/QAEECESIAEgH2oiAf0ABAAhEyAB/QAEECEUIBkgGSAAIAIgGWxqIgRqIgVqIgsgGWohHCAMIgEgCEEFdGohHgNAIAEgHkkEQCAE/QkCACEWIAQgGmohBCANIBYgAf0ABAAiFf3mAf3kASENIA4gFiAB/QAEECIW/eYB/eQBIQ4gBf0JAgAhFyAFIBpqIQUgDyAXIBX95gH95AEhDyAQIBcgFv3mAf3kASEQIAv9CQIAIRcgCyAaaiELIBEgFyAV/eYB/eQBIREgEiAXIBb95gH95AEhEiAc/QkCACEXIBogHGohHCATIBcgFf3mAf3kASETIBQgFyAW/eYB/eQBIRQgAUEgaiEBDAELCyAGIAIgIGxqIBhBAnRqIgEgDf0LBAAgASAO/QsEECABICBqIgEgD/0LBAAgASAQ/QsEECABICBqIgEgEf0LBAAgASAS/QsEECABICBqIgEgE/0LBAAgASAU/QsEECACQQRqIQIMAQsLIBhBCGohGAwBCwsLBQBBgAgLOAEBfwNAIAMgBEoEQCACIARBCHRqIAAgASAEQQJ0aigCAEEIdGpBgAL8CgAAIARBAWohBAwBCwsLswEBBX8DQCAEQeAASARAIAEgBEEIbUEIdGohBSAAIARBCHRqIQZBACEDA0AgA0GAAkgEQCADIAVqIgcgB/0ABAAgAyAGav0ABAD95AH9CwQAIANBEGohAwwBCwsgAiAEQQhvQQh0aiEFIAAgBEEIdGohBkEAIQMDQCADQYACSARAIAMgBWoiByAH/QAEACADIAZq/QAEAP3kAf0LBAAgA0EQaiEDDAELCyAEQQFqIQQMAQsLC3gBBX8DQCADQeAASARAIAIgA0EIdGoiBSAAIANBCG1BCHRqQYAC/AoAACABIANBCG9BCHRqIQZBACEEA0AgBEGAAkgEQCAEIAVqIgcgB/0ABAAgBCAGav0ABAD95AH9CwQAIARBEGohBAwBCwsgA0EBaiEDDAELCwvvBQQFfwN7A30BfCADtv0TIQoDQCACIAZKBEACQCABIAZBAnRqKAIAIgdBAEgEQCAAQQBBwAD8CwAMAQsgACAHQQJ0aioCACEOIAAqAgAhDEEBIQQDQCAEQQxIBEAgDCAAIARBAnRqKgIAlyEMIARBAWohBAwBCwtBDCEEQQAhBQNAIAVBwABIBEAgACAFaiII/QAEACAM/RP95QH9DAAArkIAAK5CAACuQgAArkL96AH9DAAArsIAAK7CAACuwgAArsL96QEiC/0MO6q4PzuquD87qrg/O6q4P/3mAf1qIQkgCP0MZ2lQOWdpUDlnaVA5Z2lQOSALIAn9DACAMT8AgDE/AIAxPwCAMT/95gH95QEgCf0Mg4BeuYOAXrmDgF65g4Beuf3mAf3lASIL/eYB/QzOQ7c6zkO3Os5DtzrOQ7c6/eQBIAv95gH9DAiJCDwIiQg8CIkIPAiJCDz95AEgC/3mAf0MwakqPcGpKj3BqSo9wakqPf3kASAL/eYB/Qyqqio+qqoqPqqqKj6qqio+/eQBIAv95gH9DAAAAD8AAAA/AAAAPwAAAD/95AEgCyAL/eYB/eYBIAv95AH9DAAAgD8AAIA/AACAPwAAgD/95AEgCf34Af0MfwAAAH8AAAB/AAAAfwAAAP2uAUEX/asB/eYB/QsEACAFQRBqIQUMAQsLQwAAAAAhDUEAIQUDQCAFQQxIBEAgDSAAIAVBAnRqKgIAkiENIAVBAWohBQwBCwtBACEFA0AgBUEMSARAIAAgBUECdGoiCCAIKgIAIA2VOAIAIAVBAWohBQwBCwsDQCAEQRBIBEAgACAEQQJ0akMAAAAAOAIAIARBAWohBAwBCwsgDyANuxAAIAy7oCAOu6GgIQ8gACAHQQJ0aiIEIAQqAgBDAACAv5I4AgBBACEEA0AgBEHAAEgEQCAAIARqIgUgBf0ABAAgCv3mAf0LBAAgBEEQaiEEDAELCwsgBkEBaiEGIABBQGshAAwBCwsgDwveBAMJfwJ7An0DQCAJIA9KBEAgCiELA0AgC0EISARAQQAhDgNAIA5BBEgEQCAOQYAwbCIQIAMgC0ECdGooAgBBBnRqIRFDAAAAACEWQQAhDANAIAsgDE4EQCAQIAMgDEECdGooAgBBBnRqIAJqIRL9DAAAAAAAAAAAAAAAAAAAAAAhFEEAIQ0DQCANQcAASARAIBQgBSANav0ABAAgDSASav0ABAD95gH95AEhFCANQRBqIQ0MAQsLIBYgFP0fACAU/R8BkiAU/R8CkiAU/R8DkiAEIAxBAnRqKgIAlJIhFiAMQQFqIQwMAQsLQQAhDQNAIAsgDU4EQCANQQJ0IgwgBGoqAgAiF/0TIRUgECADIAxqKAIAQQZ0aiISIAJqIRP9DAAAAAAAAAAAAAAAAAAAAAAhFEEAIQwDQCAMQcAASARAIBQgBSAMav0ABAAgDCATav0ABAD95gH95AEhFCAMQRBqIQwMAQsLIBcgFP0fACAU/R8BkiAU/R8CkiAU/R8DkiAWk5RDAACAPpT9EyEUQQAhDANAIAxBwABIBEAgCCASaiAMaiITIBP9AAQAIBUgBSAMav0ABAD95gH95AH9CwQAIAcgEmogDGoiEyAT/QAEACAUIAAgEWogDGr9AAQA/eYB/eQB/QsEACAGIBFqIAxqIhMgE/0ABAAgFCABIBJqIAxq/QAEAP3mAf3kAf0LBAAgDEEQaiEMDAELCyANQQFqIQ0MAQsLIARBIGohBCAFQUBrIQUgDkEBaiEODAELCyALQQFqIQsMAQsLIA9BAWohDyADQSBqIQMMAQsLC54HAwl/AnsCfQNAIAYgDEoEQCAHIQgDQCAIQQhIBEBBACELA0AgC0EESARAIAtBgDBsIg0gAyAIQQJ0aigCAEEGdGohD0MAAID/IRNBACEJA0AgCCAJTgRAIAAgD2ohDiABIA1qIAMgCUECdGooAgBBBnRqIRD9DAAAAAAAAAAAAAAAAAAAAAAhEUEAIQoDQCAKQcAASARAIBEgCiAOav0ABAAgCiAQav0ABAD95gH95AEhESAKQRBqIQoMAQsLIAQgCUECdGogEf0fACAR/R8BkiAR/R8CkiAR/R8DkkMAAIA+lCIUOAIAIBMgFJchEyAJQQFqIQkMAQsLQQAhCQNAIAggCU4EQCAEIAlBAnRqIgr9AAQAIBP9E/3lAf0MAACuQgAArkIAAK5CAACuQv3oAf0MAACuwgAArsIAAK7CAACuwv3pASIR/Qw7qrg/O6q4PzuquD87qrg//eYB/WohEiAK/QxnaVA5Z2lQOWdpUDlnaVA5IBEgEv0MAIAxPwCAMT8AgDE/AIAxP/3mAf3lASAS/QyDgF65g4BeuYOAXrmDgF65/eYB/eUBIhH95gH9DM5DtzrOQ7c6zkO3Os5Dtzr95AEgEf3mAf0MCIkIPAiJCDwIiQg8CIkIPP3kASAR/eYB/QzBqSo9wakqPcGpKj3BqSo9/eQBIBH95gH9DKqqKj6qqio+qqoqPqqqKj795AEgEf3mAf0MAAAAPwAAAD8AAAA/AAAAP/3kASARIBH95gH95gEgEf3kAf0MAACAPwAAgD8AAIA/AACAP/3kASAS/fgB/Qx/AAAAfwAAAH8AAAB/AAAA/a4BQRf9qwH95gH9CwQAIAlBBGohCQwBCwtDAAAAACETQQAhCQNAIAggCU4EQCATIAQgCUECdGoqAgCSIRMgCUEBaiEJDAELC0EAIQkDQCAJQcAASARAIAUgCWr9DAAAAAAAAAAAAAAAAAAAAAD9CwQAIAlBEGohCQwBCwtBACEJA0AgCCAJTgRAIAIgDWogCUECdCIKIANqKAIAQQZ0aiEOIAQgCmoiCioCACATlSEUIAogFDgCAEEAIQoDQCAKQcAASARAIAUgCmoiDyAP/QAEACAU/RMgCiAOav0ABAD95gH95AH9CwQAIApBEGohCgwBCwsgCUEBaiEJDAELCyAEQSBqIQQgBUFAayEFIAtBAWohCwwBCwsgCEEBaiEIDAELCyAMQQFqIQwgA0EgaiEDDAELCwtdAQR/A0AgAiAFSgRAIAEgAyAFbEECdGohBkEAIQQDQCAEIANBAnRIBEAgBCAGaiIHIAf9AAQAIAAgBGr9AAQA/eQB/QsEACAEQRBqIQQMAQsLIAVBAWohBQwBCwsLXQEEfwNAIAIgBUoEQCAAIAMgBWxBAnRqIQZBACEEA0AgBCADQQJ0SARAIAEgBGoiByAH/QAEACAEIAZq/QAEAP3kAf0LBAAgBEEQaiEEDAELCyAFQQFqIQUMAQsLC9oCAgZ7A38gBSAIo7b9EyEKRAAAAAAAAPA/IAUgBqKhtv0TIQsgB7b9EyEMRAAAAAAAAPA/IAmfo7b9EyENA0AgECAEQQJ0SARAIAIgEGoiEf0ABAAiDv0MzczMPc3MzD3NzMw9zczMPSABIBBq/QAEACAM/eYBIg8gDv3lAf3mAf3kASEOIAMgEGoiEv0ABAD9DHe+fz93vn8/d75/P3e+fz/95gH9DG8SgzpvEoM6bxKDOm8SgzogDyAP/eYB/eYB/eQBIg8gD/0MHquCAB6rggAeq4IAHquCAP1E/U4hDyARIA4gDv3gAf0MHquCAB6rggAeq4IAHquCAP1E/U4iDv0LBAAgEiAP/QsEACAAIBBqIhEgEf0ABAAgC/3mASAKIA795gEgD/3jASAN/eYB/Qx3zCsyd8wrMnfMKzJ3zCsy/eQB/ecB/eUB/QsEACAQQRBqIRAMAQsLCw==";

function trainerSource(kernel) {
"use strict";
// The one-layer transformer of add-7: its weights, its equations forward and backward, one step of its
// training. The loops are in kernel.ts. Names of weights and activations are those of the library.

const D = 64, N_HEADS = 4, D_HEAD = 16, N_CTX = 8, D_VOCAB = 12, EOS = 11;
const PADDED_VOCAB = 16, MOST_EXPERTS = 8;          // rows of logits, and of a router, as the kernel has them
const READ = 3, N_READ = 5;                         // read at positions 3 to 7: four digits, then EOS
const N_ROWS = D_VOCAB * N_CTX;                     // distinct inputs of the attention: a token at a position
const LR = 1e-3, WEIGHT_DECAY = .01, CLIP = 1, BALANCE = .01, BETA1 = .9, BETA2 = .999;
const MOST = 128;                                   // sums of a batch
const FFN = ["W_up", "b_up", "W_down", "b_down"];   // what an FFN's rate is the rate of: not the router

// ------------------------------------------------------------------------------------------------ the task
// A sum: three digits of n, ones first, EOS, the four digits of n + 7, EOS. The model reads the first eight
// tokens, and at positions 3 to 7 says the one that comes next.

const digits = (n, width) => Array.from({length: width}, (_, i) => Math.floor(n / 10 ** i) % 10);
const SUMS = Array.from({length: 1000}, (_, n) => [...digits(n, 3), EOS, ...digits(n + 7, 4), EOS]);

// -------------------------------------------------------------------------------------------------- chance

function random(seed, part) {        // sfc32: numbers in [0, 1); each part of a seed has its own
  let a = seed | 0, b = part | 0, c = 0x9E3779B9 | 0, count = 1;
  const next = () => {
    const t = (a + b + count++) | 0;
    a = b ^ b >>> 9; b = (c + (c << 3)) | 0; c = ((c << 21 | c >>> 11) + t) | 0;
    return (t >>> 0) / 2 ** 32;
  };
  for (let i = 0; i < 16; i++) next();
  return next;
}
const WEIGHTS = 1, BATCHES = 2, EVALUATION = 3;

// ----------------------------------------------------------------------------------------------- the model

class Model {
  // arm: dense, narrow, mixture (learned router) or frozen (its router never moves); rate: learning-rate
  // factor of the FFN; kernel: a WebAssembly.Module. Real is Float64Array for the kernel that tests use, in
  // double precision.
  constructor(kernel, {arm = "dense", experts = 4, rate = 1} = {}, Real = Float32Array) {
    this.arm = arm; this.rate = rate; this.steps = 0;
    this.routed = arm === "mixture" || arm === "frozen";
    this.learns = arm === "mixture";
    const E = this.E = this.routed ? experts : 1;
    this.width = Math.floor((arm === "narrow" ? 64 : 256) / E);         // hidden units of an expert
    const W = this.W = Math.ceil(this.width / 8) * 8;                   // with those that fill up its vectors
    this.first = this.routed ? 0 : READ;        // the first position that asks; the balance loss looks at all
    this.kernel = new WebAssembly.Instance(kernel, {env: {exp: Math.exp, log: Math.log}}).exports;
    this.size = Real.BYTES_PER_ELEMENT;

    // name: [shape in the library, rows and columns in memory]; the last two axes are rows and columns
    this.shapes = {W_E: [[D_VOCAB, D], PADDED_VOCAB, D], W_pos: [[N_CTX, D], N_CTX, D]};
    for (const n of ["W_Q", "W_K", "W_V"]) this.shapes[n] = [[1, N_HEADS, D, D_HEAD], D, D_HEAD];
    Object.assign(this.shapes, {W_O: [[1, N_HEADS, D_HEAD, D], D_HEAD, D], b_O: [[1, D], 1, D]});
    if (this.routed) this.shapes.W_router = [[1, D, E], D, MOST_EXPERTS];
    Object.assign(this.shapes, {W_up: [[1, E, D, this.width], D, W], b_up: [[1, E, this.width], E, W],
                                W_down: [[1, E, this.width, D], W, D], b_down: [[1, E, D], E, D]});

    // memory: weights, gradients and both moments one after another, each laid out alike; then activations
    let top = this.kernel.heap() + 15 & ~15;
    const take = n => { const at = top; top += Math.ceil(n * this.size / 16) * 16; return at; };
    const parameters = () => Object.fromEntries(Object.keys(this.shapes).map(n => [n, take(this.length(n))]));
    const begin = top;
    this.w = parameters();
    this.span = (top - begin) / this.size;                              // of all weights, in numbers
    this.g = parameters(); this.m = parameters(); this.v = parameters();
    const N = MOST * N_CTX + 4, R = MOST * N_READ + 4 * E + 4;          // rows, and those that are read
    this.x = Object.fromEntries(Object.entries({
      zeros: 1024, panel: 8 * N, embed: N_ROWS * D, q: N_ROWS * D, k: N_ROWS * D, v: N_ROWS * D,
      pattern: MOST * N_CTX * N_HEADS * N_CTX, z: N * D, resid_mid: N * D, probs: N * MOST_EXPERTS,
      ffn_in: R * D, up: R * W, hidden: R * W, ffn_out: R * D, resid_post: R * D, logits: R * PADDED_VOCAB,
      d_resid_post: R * D, d_hidden: R * W, d_ffn_in: R * D, weight: MOST_EXPERTS, d_resid_mid: N * D,
      d_z: N * D, d_q: N_ROWS * D, d_k: N_ROWS * D, d_v: N_ROWS * D, d_embed: N_ROWS * D,
      rows: MOST * N_CTX, under: N, chosen: N, slots: R, targets: R,            // these are whole numbers
    }).map(([n, length]) => [n, take(length)]));
    const memory = this.kernel.memory;
    memory.grow(Math.max(0, Math.ceil((top - memory.buffer.byteLength) / 65536)));
    this.real = new Real(memory.buffer, 0, Math.floor(memory.buffer.byteLength / this.size));
    this.int = new Int32Array(memory.buffer);
  }

  length(name) {                                                        // of a weight in memory, in numbers
    const [shape, rows, columns] = this.shapes[name];
    return shape.slice(0, -2).reduce((a, b) => a * b, 1) * rows * columns;
  }

  *places(name) {                   // where its numbers lie, in the library's order, without what fills up
    const [shape, rows, columns] = this.shapes[name], [n_rows, n_columns] = shape.slice(-2);
    const at = this.w[name] / this.size, length = this.length(name);
    for (let g = 0; g < length; g += rows * columns)
      for (let r = 0; r < n_rows; r++) for (let c = 0; c < n_columns; c++) yield at + g + r * columns + c;
  }

  get(name) { return this.real.constructor.from(this.places(name), i => this.real[i]); }
  set(name, values) { let i = 0; for (const at of this.places(name)) this.real[at] = values[i++]; }

  // As the library begins: embeddings are normal, all else is uniform within 1 / sqrt(n) of 0, n its inputs.
  draw(seed) {
    const r = random(seed, WEIGHTS);
    const normal = () => Math.sqrt(-2 * Math.log(1 - r())) * Math.cos(2 * Math.PI * r());
    for (const n in this.shapes) {
      const bound = (n === "W_down" || n === "b_down" ? this.width : D) ** -.5;
      const one = n === "W_E" || n === "W_pos" ? normal : () => bound * (2 * r() - 1);
      for (const at of this.places(n)) this.real[at] = one();
    }
    return this;
  }

  // C (m, n) = start + A B. A is (m, k) and B (k, n); of A or B with a T the transpose lies in memory.
  // Without a start it is 0; start_row is the length of its rows, 0 for one that all share.
  AB(A, B, C, m, k, n, start = this.x.zeros, start_row = 0) {
    this.kernel.matmul(A, k, 1, B, n, 1, C, m, k, n, start, start_row, this.x.panel);
  }
  ATB(A, B, C, m, k, n) { this.kernel.matmul(A, 1, m, B, n, 1, C, m, k, n, this.x.zeros, 0, this.x.panel); }
  ABT(A, B, C, m, k, n, start = this.x.zeros, start_row = 0) {
    this.kernel.matmul(A, k, 1, B, 1, k, C, m, k, n, start, start_row, this.x.panel);
  }
  clear(at, n) { this.real.fill(0, at / this.size, at / this.size + n); }

  forward(sums) {
    const {kernel, w, x, first} = this, B = this.B = sums.length, N = this.N = B * (N_CTX - first);
    sums.forEach((n, b) => SUMS[n].slice(0, N_CTX).forEach((token, i) => {
      this.int[x.rows / 4 + b * N_CTX + i] = token * N_CTX + i;
      if (i >= first) this.int[x.under / 4 + b * (N_CTX - first) + i - first] = token * N_CTX + i;
    }));
    kernel.embed(w.W_E, w.W_pos, x.embed);
    for (const [W, to] of [[w.W_Q, x.q], [w.W_K, x.k], [w.W_V, x.v]])
      for (const h of this.heads()) this.AB(x.embed, W + h.weight, to + h.table, N_ROWS, D, D_HEAD);
    kernel.attend(x.q, x.k, x.v, x.rows, x.pattern, x.z, B, first);
    kernel.gather(x.embed, x.under, x.resid_mid, N);
    kernel.add_row(w.b_O, x.resid_mid, N, D);
    this.AB(x.z, w.W_O, x.resid_mid, N, D, D, x.resid_mid, D);          // resid_mid = embed + b_O + z W_O
    this.route(sums);
    kernel.gather(x.resid_mid, x.slots, x.ffn_in, this.R);
    for (const e of this.experts()) {           // the expert that is chosen has weight 1: there is no gate
      this.AB(x.ffn_in + e.row, w.W_up + e.weight, x.up + e.unit, e.n, D, this.W, w.b_up + e.b_up);
      kernel.silu(x.up + e.unit, x.hidden + e.unit, e.n * this.W);
      this.AB(x.hidden + e.unit, w.W_down + e.weight, x.ffn_out + e.row, e.n, this.W, D, w.b_down + e.b_down);
    }
    kernel.sum(x.ffn_in, x.ffn_out, x.resid_post, this.R * D);
    this.unembed(this.R);
  }

  unembed(n) { this.ABT(this.x.resid_post, this.w.W_E, this.x.logits, n, D, PADDED_VOCAB); }

  heads() {
    return Array.from({length: N_HEADS}, (_, h) => ({weight: h * D * D_HEAD * this.size,
                                                     table: h * N_ROWS * D_HEAD * this.size}));
  }

  // Sorts the places that are read by their expert: each expert has slots of its own, a multiple of four. A
  // slot that is left over shows row 0 to the expert, and has target -1: nothing comes of it.
  route(sums) {
    const {kernel, x, E} = this, S = N_CTX - this.first, by_expert = Array.from({length: E}, () => []);
    if (this.routed) {
      this.AB(x.resid_mid, this.w.W_router, x.probs, this.N, D, MOST_EXPERTS);
      kernel.route(x.probs, x.chosen, this.N, E);
    }
    for (let b = 0; b < this.B; b++) for (let j = 0; j < N_READ; j++) {
      const row = b * S + READ + j - this.first;
      const expert = this.routed ? this.int[x.chosen / 4 + row] : 0;
      by_expert[expert].push([row, b * N_READ + j, SUMS[sums[b]][READ + 1 + j]]);
    }
    this.loads = []; this.place = [];           // place: slot -> 5 * sum + which of the five answers
    for (const those of by_expert) {
      while (those.length % 4) those.push([0, -1, -1]);
      this.loads.push(those.length);
      for (const [row, place, target] of those) {
        this.int[x.slots / 4 + this.place.length] = row;
        this.int[x.targets / 4 + this.place.length] = target;
        this.place.push(place);
      }
    }
    this.R = this.place.length;
  }

  experts() {                                   // how many slots each has, and where it begins, in bytes
    const {W, size} = this;
    let slot = 0;
    return this.loads.map((n, e) => {
      const at = {n, row: slot * D * size, unit: slot * W * size,
                  weight: e * D * W * size, b_up: e * W * size, b_down: e * D * size};
      slot += n;
      return at;
    }).filter(e => e.n);
  }

  // Gradients of the task's loss plus BALANCE times the balance loss; returns the task's loss.
  backward() {
    const {kernel, w, g, x, N, R, W, E} = this;
    this.clear(g.W_E, this.span);
    const answers = this.B * N_READ;
    const loss = kernel.cross_entropy(x.logits, x.targets, R, 1 / answers) / answers;
    this.AB(x.logits, w.W_E, x.d_resid_post, R, PADDED_VOCAB, D);
    this.ATB(x.logits, x.resid_post, g.W_E, PADDED_VOCAB, R, D);
    for (const e of this.experts()) {
      const d_out = x.d_resid_post + e.row, d_up = x.d_hidden + e.unit;
      kernel.add_columns(d_out, g.b_down + e.b_down, e.n, D);
      this.ATB(x.hidden + e.unit, d_out, g.W_down + e.weight, W, e.n, D);
      this.ABT(d_out, w.W_down + e.weight, d_up, e.n, D, W);
      kernel.multiply(d_up, x.up + e.unit, e.n * W);                    // by silu's slope
      kernel.add_columns(d_up, g.b_up + e.b_up, e.n, W);
      this.ATB(x.ffn_in + e.row, d_up, g.W_up + e.weight, D, e.n, W);
      this.ABT(d_up, w.W_up + e.weight, x.d_ffn_in + e.row, e.n, W, D, d_out, D);
    }
    this.clear(x.d_resid_mid, N * D);
    kernel.scatter_add(x.d_ffn_in, x.slots, x.d_resid_mid, R);
    if (this.routed) this.balance();
    kernel.add_columns(x.d_resid_mid, g.b_O, N, D);
    this.ATB(x.z, x.d_resid_mid, g.W_O, D, N, D);
    this.ABT(x.d_resid_mid, w.W_O, x.d_z, N, D, D);
    for (const at of [x.d_q, x.d_k, x.d_v, x.d_embed]) this.clear(at, N_ROWS * D);
    kernel.attend_back(x.q, x.k, x.v, x.rows, x.pattern, x.d_z, x.d_q, x.d_k, x.d_v, this.B, this.first);
    kernel.scatter_add(x.d_resid_mid, x.under, x.d_embed, N);
    for (const [n, d] of [["W_Q", x.d_q], ["W_K", x.d_k], ["W_V", x.d_v]])
      for (const h of this.heads()) {
        this.ATB(x.embed, d + h.table, g[n] + h.weight, D, N_ROWS, D_HEAD);
        this.ABT(d + h.table, w[n] + h.weight, x.d_embed, N_ROWS, D_HEAD, D, x.d_embed, D);
      }
    kernel.embed_back(x.d_embed, g.W_E, g.W_pos);
    return loss;
  }

  // Balance loss: E times the sum over experts of f P; f is the share of all tokens that an expert gets,
  // which has no gradient, P its mean probability. It alone moves a router, and the stream before it, also of
  // a frozen one.
  balance() {
    const {kernel, w, g, x, N, E} = this, f = new Float64Array(MOST_EXPERTS);
    for (let i = 0; i < N; i++) f[this.int[x.chosen / 4 + i]] += 1 / N;
    this.real.set(f.map(share => BALANCE * E * share / N), x.weight / this.size);
    kernel.route_back(x.probs, x.weight, N);
    if (this.learns) this.ATB(x.resid_mid, x.probs, g.W_router, D, N, MOST_EXPERTS);
    this.ABT(x.probs, w.W_router, x.d_resid_mid, N, MOST_EXPERTS, D, x.d_resid_mid, D);
  }

  // One step of AdamW on a batch, the gradient clipped to norm CLIP; returns the task's loss before it.
  step(sums) {
    this.forward(sums);
    const {kernel, w, g, m, v} = this, loss = this.backward(), t = ++this.steps;
    const clip = Math.min(1, CLIP / (Math.sqrt(kernel.sum_of_squares(g.W_E, this.span)) + 1e-6));
    for (const n in w) {
      const rate = LR * (FFN.includes(n) ? this.rate : 1);
      if (n !== "W_router" || this.learns)
        kernel.adamw(w[n], g[n], m[n], v[n], this.length(n), rate, WEIGHT_DECAY, clip, 1 - BETA1 ** t,
                     1 - BETA2 ** t);
    }
    return loss;
  }

  // ---------------------------------------------------------------------------------------- what it can do

  said(slot, not = -1) {                                                // the likeliest token, but for one
    const {real} = this, at = this.x.logits / this.size + slot * PADDED_VOCAB;
    let best = not === 0 ? 1 : 0;
    for (let v = best + 1; v < D_VOCAB; v++) if (v !== not && real[at + v] > real[at + best]) best = v;
    return best;
  }

  // All 1,000 sums: digits, the share of right digits; exact, for each sum whether all of it is right, EOS
  // too; left, the share of tens and hundreds right with the FFN's output at its mean over all sums at each
  // place, where the token that stands there is not the answer and may not be said (the library's metric
  // digits_no_copy).
  read() {
    const {real, size} = this, at = n => this.x[n] / size, at_once = 125, n_sums = SUMS.length;
    const ffn_in = at("ffn_in"), ffn_out = at("ffn_out"), resid_post = at("resid_post");
    const asked = [1, 2].map(j => ({j, mid: new Float64Array(n_sums * D), mean: new Float64Array(D)}));
    const exact = new Uint8Array(n_sums).fill(1);
    let digits = 0;
    for (let s = 0; s < n_sums; s += at_once) {
      this.forward(Array.from({length: at_once}, (_, i) => s + i));
      this.place.forEach((place, slot) => {
        if (place < 0) return;
        const n = s + Math.floor(place / N_READ), j = place % N_READ;
        const right = this.said(slot) === SUMS[n][READ + 1 + j];
        if (!right) exact[n] = 0;
        else if (j < 4) digits++;
        if (j !== 1 && j !== 2) return;
        const {mid, mean} = asked[j - 1];
        for (let d = 0; d < D; d++) {
          mid[n * D + d] = real[ffn_in + slot * D + d];
          mean[d] += real[ffn_out + slot * D + d] / n_sums;
        }
      });
    }
    const shares = asked.map(({j, mid, mean}) => {
      let n_asked = 0, right = 0;
      for (let s = 0; s < n_sums; s += at_once) {
        for (let i = 0; i < at_once * D; i++) real[resid_post + i] = mid[s * D + i] + mean[i % D];
        this.unembed(at_once);
        for (let i = 0; i < at_once; i++) {
          const here = SUMS[s + i][READ + j], answer = SUMS[s + i][READ + 1 + j];
          if (here === answer) continue;
          n_asked++;
          if (this.said(i, here) === answer) right++;
        }
      }
      return right / n_asked;
    });
    return {digits: digits / (4 * n_sums), exact, left: (shares[0] + shares[1]) / 2};
  }

  // The name of what it is in the library, whose conditions say how a model is made and trained.
  get condition() {
    const body = this.routed ? `moe-e${this.E}k1-h${this.E * this.width}` : `ffn-h${this.width}`;
    const frozen = this.arm === "frozen" ? "+frozen" : "", rate = this.rate === 1 ? "" : `+ffnlr${this.rate}`;
    return `add7/${body}-silu${frozen}${rate}`;
  }
}

// One training at a time, told and telling by messages (README.md lists them).

const BATCH = 128, CURVE_EVERY = 50, LOOK_EVERY = 200;      // the library looks every 200 steps
const LIMIT = 10000;                                        // steps of the library's schedule

// Trains from nothing until a rule holds: first256 (256 drawn sums all right) or first1000 (all sums right),
// both looked at every 200 steps only. Yields a point of the curves every 50 steps, and null between them,
// for others to have their turn; returns how it ended.
function* training(model, {seed, until = "first1000", limit = LIMIT}) {
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
function kept(model, about) {
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

function serve(scope, bytes) {
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

serve(self, Uint8Array.from(atob(kernel), c => c.charCodeAt(0)));
}

// A worker that trains; README.md lists its messages.
function startTrainer() {
  const text = `(${trainerSource})("${TRAINER_KERNEL}")`, url = URL.createObjectURL(new Blob([text]));
  const worker = new Worker(url);
  URL.revokeObjectURL(url);
  return worker;
}
