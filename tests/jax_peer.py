"""The same populations in JAX, as somebody who likes it would write them: the loss of one seed, `grad`, `jit`, a scan over
steps, and the seeds by `vmap` or one after another, whichever is faster here.

It shares with the package the task's data, the names of conditions and the weights to begin with: a rival of
`moe-redistribution bench --rivals jax`. As a program it measures itself: `python tests/jax_peer.py NAME --seeds 5`."""
import argparse
import json
import os
import time
from functools import partial

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
import jax
import jax.numpy as jnp
import numpy as np
import torch

from moe_redistribution.models.condition import condition
from moe_redistribution.models.population import init
from plain import examples, waited

ACTIVATION = {"silu": jax.nn.silu, "relu": jax.nn.relu, "gelu": partial(jax.nn.gelu, approximate=False)}
STEPS = {"add7": 20, "modadd": 5, "hist": 1}                                     # of one scan

def attention(p, x, queries, causal):
    "Attention's output (b, q, d) at the places in `queries`, a slice."
    q, k, v = (jnp.einsum("btd,hdk->bhtk", at, p[n]) for n, at in dict(W_Q=x[:, queries], W_K=x, W_V=x).items())
    scores = q @ k.swapaxes(-1, -2) / k.shape[-1]**.5
    if causal: scores = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2, bool))[queries], scores, -jnp.inf)
    return jnp.einsum("bhtk,hkd->btd", jax.nn.softmax(scores, -1) @ v, p["W_O"]) + p["b_O"]

def ffn(p, x, gates, c):
    "The FFN's output (b, t, d): every expert on every token, times its gate (b, t, E)."
    up, act = jnp.einsum("btd,edh->bteh", x, p["W_up"]), ACTIVATION[c.activation]
    hidden = act(jnp.einsum("btd,edh->bteh", x, p["W_gate"])) * up if c.gated else act(up + p["b_up"])
    out = jnp.einsum("bteh,ehd->btd", hidden * gates[..., None], p["W_down"])
    return out if c.gated else out + gates @ p["b_down"]

def routes(probs, c):
    "Gates (b, t, E) of the k best experts, and the load-balancing loss."
    kept, chosen = jax.lax.top_k(probs, c.top_k)
    if c.gate == "renorm": kept = kept / kept.sum(-1, keepdims=True)
    on = jax.nn.one_hot(chosen, c.n_experts)
    return ((on * kept[..., None]).sum(-2),
            c.n_experts * (on.sum(-2).mean((0, 1)) * probs.mean((0, 1))).sum())

def loss(p, tokens, targets, c, t):
    "What is minimised for one seed, and the task's own loss in nats."
    p = {n: v if n in ("W_E", "W_pos", "W_U") else v[0] for n, v in p.items()}                # its one layer
    read, balance, x = slice(t.read[0], t.read[-1] + 1), 0., p["W_E"][tokens] + p["W_pos"]
    queries = slice(None) if c.routed else read                                  # the balance is over all places
    mid = x[:, queries] + attention(p, x, queries, t.causal)
    if c.ffn == "no_ffn": end = mid
    else:
        gates = jnp.ones((*mid.shape[:2], 1))
        if c.routed:
            gates, balance = routes(jax.nn.softmax(mid @ p["W_router"], -1), c)
            mid, gates = mid[:, read], gates[:, read]
        end = mid + ffn(p, mid, gates, c)
    logits = end @ (p["W_U"] if "W_U" in p else p["W_E"].T)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits, -1), targets[..., None], -1).mean()
    return nll + c.balance * balance, nll

def step(p, m, v, n, tokens, targets, c, t):
    "AdamW on one seed: weights and both moments after step n, which begins at 1, and the task's loss."
    g, nll = jax.grad(loss, has_aux=True)(p, tokens, targets, c, t)
    if c.clip:
        norm = jnp.sqrt(sum((x * x).sum() for x in g.values()))
        g = {k: x * jnp.minimum(1., c.clip / (norm + 1e-6)) for k, x in g.items()}
    m = {k: .9 * m[k] + .1 * g[k] for k in g}
    v = {k: .999 * v[k] + .001 * g[k]**2 for k in g}
    size = {k: m[k] / (1 - .9**n) / (jnp.sqrt(v[k] / (1 - .999**n)) + 1e-8) for k in g}
    return {k: p[k] * (1 - c.lr * c.weight_decay) - c.lr * size[k] for k in g}, m, v, nll

def trainer(name, over):
    "A function (state, tokens and targets (step, s, b, …)) → (state, losses (step, s)), seeds by `over`: map or vmap."
    c = condition(name)
    t = c.get_task()
    if "+" in c.name: raise ValueError(f"jax_peer: expected a recipe without options; got {c.name}; fix: leave them out")
    def all_seeds(state, batch):
        *own, n = state
        one = lambda a: step(*a[:3], n + 1, *a[3:], c, t)
        p, m, v, nll = jax.lax.map(one, (*own, *batch)) if over == "map" else jax.vmap(lambda *a: one(a))(*own, *batch)
        return (p, m, v, n + 1), nll
    return jax.jit(lambda state, batches: jax.lax.scan(all_seeds, state, batches), donate_argnums=0)

def start(name, seeds):
    "The state of `seeds` members of a condition: weights, moments, steps done."
    w = init(condition(name), [torch.Generator().manual_seed(s) for s in range(seeds)])
    p = {k: jnp.array(v.numpy()) for k, v in w.items()}
    return p, jax.tree.map(jnp.zeros_like, p), jax.tree.map(jnp.zeros_like, p), jnp.zeros(())

def train_for(f, state, drawn, seconds):
    "Trains for about so many seconds: the state, seed-steps, the last loss."
    began, done = time.perf_counter(), 0
    while not done or time.perf_counter() - began < seconds:
        state, nll = f(state, drawn[done % len(drawn)])
        done += 1
        nll.block_until_ready()
    return state, done * nll.size, float(nll[-1].mean())

def main():
    p = argparse.ArgumentParser(description="Seed-steps per second of a population in JAX, in one process, as JSON.")
    p.add_argument("name", help="a recipe, for example add7/moe-e4k1-h256-silu")
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--seconds", type=float, default=10.)
    p.add_argument("--threads", type=int, default=1, help="one: JAX's products here run on one")
    p.add_argument("--wait", action="store_true", help="say when ready, and begin at a line on standard input")
    a = p.parse_args()
    c = condition(a.name)
    few = [examples(c, s, 10 * STEPS[c.task]) for s in range(a.seeds)]           # drawn before the clock starts
    arrays = [[np.stack([np.stack([few[s][i][j].numpy() for s in range(a.seeds)]) for i in range(k, k + STEPS[c.task])])
               for j in (0, 1)] for k in range(0, len(few[0]), STEPS[c.task])]
    drawn = [tuple(jnp.array(x, jnp.int32) for x in pair) for pair in arrays]
    rates = {}
    for over in ("map", "vmap"):
        f = trainer(a.name, over)
        state, *_ = train_for(f, start(a.name, a.seeds), drawn, 0)                # compiled
        began = time.perf_counter()
        state, done, _ = train_for(f, state, drawn, 1)
        rates[over] = done / (time.perf_counter() - began), f, state
    over = max(rates, key=lambda k: rates[k][0])
    if a.wait: print("ready", flush=True), input()
    clocks = lambda: np.array([time.perf_counter(), time.process_time(), waited()])
    began = clocks()
    _, done, last = train_for(*rates[over][1:], drawn, a.seconds)
    wall, cpu, wait = (clocks() - began).tolist()
    print(json.dumps(dict(condition=c.name, steps=done, per_second=done / wall, cpu_seconds=cpu, wall_seconds=wall,
                          waited_seconds=wait, threads=1, last_loss=last, over=over)))

if __name__ == "__main__": main()
