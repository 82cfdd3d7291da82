"""The task's models and their training as one would write them in PyTorch without an idea of this project's.

One model, `nn.Module`s with their own defaults, `scaled_dot_product_attention`, boolean masks for the experts, `AdamW`.
It shares with the package only the task's data and the names of conditions: an oracle for the tests, the rival of
`moe-redistribution bench`. As a program it measures itself: `python tests/plain.py NAME --seconds 10`."""
import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from moe_redistribution.models.condition import condition
from moe_redistribution.tasks.data import histogram_sets, split, training_pool
from moe_redistribution.tasks.task import counts, get_task

ACTIVATION = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "linear": nn.Identity()}
CHUNK = 200                                       # batches drawn at a time

class Attention(nn.Module):
    def __init__(self, d, n_heads, causal):
        super().__init__()
        self.n_heads, self.causal = n_heads, causal
        self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.o = nn.Linear(d, d)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(z.transpose(1, 2).flatten(2))

class FFN(nn.Module):
    "Two layers with biases, or a gated unit without."
    def __init__(self, d, width, activation, gated):
        super().__init__()
        self.activation = ACTIVATION[activation]
        self.gate = nn.Linear(d, width, bias=False) if gated else None
        self.up = nn.Linear(d, width, bias=not gated)
        self.down = nn.Linear(width, d, bias=not gated)

    def forward(self, x):
        hidden = self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x)
        return self.down(hidden)

class MoE(nn.Module):
    "Top-k of E experts, dispatched with boolean masks; returns the output and the load-balancing loss."
    def __init__(self, c):
        super().__init__()
        self.top_k, self.gate = c.top_k, c.gate
        self.router = nn.Linear(c.d_model, c.n_experts, bias=False)
        self.experts = nn.ModuleList(FFN(c.d_model, c.d_expert, c.activation, c.gated) for _ in range(c.n_experts))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        probs = self.router(tokens).softmax(-1)
        kept, chosen = probs.topk(self.top_k, dim=-1)
        if self.gate == "renorm": kept = kept / kept.sum(-1, keepdim=True)
        out, loads = torch.zeros_like(tokens), []
        for e, expert in enumerate(self.experts):
            hit = chosen == e
            mine = hit.any(-1)
            loads.append(mine.to(x.dtype).mean())
            if mine.any(): out[mine] += (kept * hit).sum(-1)[mine][:, None] * expert(tokens[mine])
        return out.view_as(x), len(self.experts) * (torch.stack(loads) * probs.mean(0)).sum()

class Block(nn.Module):
    def __init__(self, c, causal):
        super().__init__()
        norm = lambda: nn.RMSNorm(c.d_model) if c.norm else nn.Identity()
        self.attention = Attention(c.d_model, c.n_heads, causal)
        if c.ffn == "no_ffn": self.ffn = None
        else: self.ffn = MoE(c) if c.routed else FFN(c.d_model, c.d_mlp, c.activation, c.gated)
        self.norm1, self.norm2 = norm(), norm()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        if self.ffn is None: return x, x.new_zeros(())
        out = self.ffn(self.norm2(x))
        out, aux = out if isinstance(out, tuple) else (out, x.new_zeros(()))
        return x + out, aux

class PlainTransformer(nn.Module):
    """One model of a condition. `forward(tokens (b, t))` gives logits (b, t, vocab) and the balance loss ().

    Modules are made in the order in which the authors' code draws its weights, so `torch.manual_seed(s)` before it
    gives the weights of seed s in the `authors` stream, to rounding."""
    def __init__(self, c):
        super().__init__()
        self.c = c = condition(c)
        self.task = t = get_task(c.task)
        self.embed, self.position = nn.Embedding(t.d_vocab, c.d_model), nn.Embedding(max(t.n_pos, t.n_ctx), c.d_model)
        self.unembed = None if t.tied else nn.Linear(c.d_model, t.d_vocab, bias=False)
        self.blocks = nn.ModuleList(Block(c, t.causal) for _ in range(c.n_layers))
        self.norm = nn.RMSNorm(c.d_model) if c.norm else nn.Identity()
        if not t.tied and t.d_vocab_out != t.d_vocab: self.unembed = nn.Linear(c.d_model, t.d_vocab_out, bias=False)
        if c.router == "frozen":
            for b in self.blocks: b.ffn.router.requires_grad_(False)
        for b in self.blocks:
            if c.freeze: (b.attention if c.freeze == "attn" else b.ffn).requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        total = 0.0
        for b in self.blocks:
            x, aux = b(x)
            total = total + aux
        x = self.norm(x)
        return (x @ self.embed.weight.T if self.unembed is None else self.unembed(x)), total

    def loss(self, tokens, targets):
        "Cross-entropy on the read-out positions and balance loss, for tokens (b, t) and targets (b, read)."
        logits, aux = self(tokens)
        return F.cross_entropy(logits[:, list(self.task.read)].flatten(0, 1), targets.flatten()), aux

    # ------------------------------------------------------------------------------------- the population's own layout

    def views(self, of=lambda parameter: parameter.detach()):
        """Name of a population's parameter → `of` of the parameters here, in the population's shape without its seed
        axis."""
        H, linear = self.c.n_heads, lambda m: of(m.weight).T
        heads = lambda m: of(m.weight).unflatten(0, (H, -1)).mT                             # (h k) d → h d k
        layers = []
        for b in self.blocks:
            a = b.attention
            layer = {"W_Q": heads(a.q), "W_K": heads(a.k), "W_V": heads(a.v), "b_O": of(a.o.bias),
                     "W_O": of(a.o.weight).T.unflatten(0, (H, -1))}                         # d (h k) → h k d
            if b.ffn is not None:
                experts = list(b.ffn.experts) if self.c.routed else [b.ffn]
                if self.c.routed: layer["W_router"] = linear(b.ffn.router)
                if self.c.gated: layer["W_gate"] = [linear(e.gate) for e in experts]
                layer |= {"W_up": [linear(e.up) for e in experts], "W_down": [linear(e.down) for e in experts]}
                if not self.c.gated:
                    layer |= {"b_up": [of(e.up.bias) for e in experts], "b_down": [of(e.down.bias) for e in experts]}
            if self.c.norm: layer |= {"w_ln1": of(b.norm1.weight), "w_ln2": of(b.norm2.weight)}
            layers.append(layer)
        out = {"W_E": of(self.embed.weight), "W_pos": of(self.position.weight)[:self.task.n_ctx]}
        if self.unembed is not None: out["W_U"] = linear(self.unembed)
        out |= {n: [layer[n] for layer in layers] for n in layers[0]}
        if self.c.norm: out["w_ln_final"] = of(self.norm.weight)
        return out

    def load_member(self, params, member=0):
        "Copies member `member` of a population's `params` (seed axis first) into this model; returns the model."
        def copy(to, value):
            if isinstance(to, list):
                for t, v in zip(to, value, strict=True): copy(t, v)
            else: to.copy_(value)
        views = self.views()
        if set(views) != set(params): raise ValueError(f"expected {sorted(views)}, got {sorted(params)}")
        for name, to in views.items(): copy(to, params[name][member].detach())
        return self

    def as_member(self, of=lambda parameter: parameter.detach().clone()):
        """A population of one: name → tensor with a seed axis of 1.

        With `of=lambda p: p.grad` the gradients, so laid out."""
        stack = lambda v: torch.stack([stack(x) for x in v]) if isinstance(v, list) else v
        return {name: stack(v)[None].contiguous() for name, v in self.views(of).items()}

def load_member(params, member, c):
    "A `PlainTransformer` of condition `c` with the weights (and dtype) of one member of a population."
    return PlainTransformer(c).to(params["W_E"].dtype).load_member(params, member)

def optimiser(model, fused=None):
    "AdamW as the recipe has it, with a group for parts that learn at another speed."
    c, groups = model.c, {}
    for name, p in model.named_parameters():
        own = c.attn_lr if ".attention." in name else c.ffn_lr if ".ffn." in name and ".router." not in name else 1.0
        if p.requires_grad: groups.setdefault(c.lr * own, []).append(p)
    return torch.optim.AdamW([dict(params=p, lr=lr) for lr, p in groups.items()], weight_decay=c.weight_decay,
                             fused=fused)

def examples(c, seed, n):
    "The next `n` batches, tokens (b, t) and targets (b, read), drawn from torch's own generator where they are drawn."
    t = get_task(c.task)
    if t.source == "drawn":
        pool = training_pool(t, c.hold)
        return [(t.tokens[at], t.targets[at]) for at in pool[torch.randint(0, len(pool), (n, c.batch))]]
    if t.source == "split":
        train, _ = split(t, seed)
        return [(t.tokens[train], t.targets[train])] * n
    tokens, _ = histogram_sets(seed)
    return [(tokens, counts(tokens) - 1)] * n

def plain_train(name, seed, steps=None, seconds=None, fused=None):
    """Trains one model for `steps` optimiser steps, or until `seconds` of wall time have passed: (model, losses).

    Batches come from the generator that drew the weights, as in the `authors` stream up to its first evaluation; the
    full-batch tasks give their whole training set every time."""
    c = condition(name)
    torch.manual_seed(seed)
    model = PlainTransformer(c)
    opt, params = optimiser(model, fused), [p for p in model.parameters() if p.requires_grad]
    losses, began = [], time.perf_counter()
    while steps is None or len(losses) < steps:
        n = CHUNK if steps is None else min(CHUNK, steps - len(losses))
        for tokens, targets in examples(c, seed, n):
            loss, aux = model.loss(tokens, targets)
            opt.zero_grad(set_to_none=True)
            (loss + c.balance * aux).backward()
            if c.clip: nn.utils.clip_grad_norm_(params, c.clip)
            opt.step()
            losses.append(loss.detach())
            if seconds and time.perf_counter() - began > seconds: return model, torch.stack(losses)
    return model, torch.stack(losses)

def waited():
    "Seconds that this process's threads were ready to run and had no core, where the kernel says so (Linux), else 0."
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try: total += int(path.read_text().split()[1])
        except (OSError, IndexError): pass                      # a thread that has just ended
    return total / 1e9

def main():
    p = argparse.ArgumentParser(description="Seed-steps per second of one plain model in one process, as JSON.")
    p.add_argument("name", help="a condition, for example add7/moe-e4k1-h256-silu")
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--steps", type=int, help="stop after so many steps")
    p.add_argument("--seconds", type=float, help="or after so much wall time (default 10)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    p.add_argument("--threads", type=int, default=cores, help="all cores, unless given")
    p.add_argument("--wait", action="store_true", help="say when ready, and begin at a line on standard input")
    p.add_argument("--fused", action="store_true", help="torch's fused AdamW")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    plain_train(a.name, a.seed, 20 if condition(a.name).batch else 1, fused=a.fused or None)          # warm up
    if a.wait: print("ready", flush=True), input()
    clocks = lambda: torch.tensor([time.perf_counter(), time.process_time(), waited()], dtype=torch.float64)
    began = clocks()
    _, losses = plain_train(a.name, a.seed, a.steps, a.seconds or (None if a.steps else 10.0), a.fused or None)
    wall, cpu, wait = (clocks() - began).tolist()
    print(json.dumps(dict(condition=condition(a.name).name, steps=len(losses), per_second=len(losses) / wall,
                          cpu_seconds=cpu, wall_seconds=wall, waited_seconds=wait, threads=torch.get_num_threads(),
                          last_loss=float(losses[-1]))))

if __name__ == "__main__": main()
