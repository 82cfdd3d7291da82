"""Two tasks, two routers and an FFN of one's own, each registered by one call."""
import numpy as np, pandas as pd, torch
from moe_redistribution.models.condition import RECIPES
from moe_redistribution.models.routers import Router
from moe_redistribution.models.variants import Gated
from moe_redistribution.basics.kinds import register
from moe_redistribution.tasks.task import Task, reversed_digits

SMALL = dict(RECIPES["add7"], d_model=32, d_head=8, lr=0.003, batch=64, steps=200, eval_every=200)

def sequence(name, asked, answer, vocab, **more):
    "A task whose answer (n, m) is written from left to right after a question (n, t) and a `=`."
    n, m, t = len(asked), answer.shape[1], asked.shape[1]
    whole = torch.from_numpy(np.concatenate([asked, np.full((n, 1), len(vocab)), answer], 1))
    return Task(name, d_vocab=len(vocab) + 1, d_vocab_out=len(vocab), causal=True, tied=False, read=(*range(t, t + m),),
                scored=(*range(m),), positions=tuple(f"o{i}" for i in range(m)), vocab=(*vocab, "="),
                tokens=whole[:, :-1].contiguous(), targets=whole[:, t + 1:].contiguous(), source="split", **more)

@register("task", "add4", recipe=SMALL | dict(steps=800), rules=("first99",))
def add4():
    "Sums of two numbers of four digits, ones first."
    a, b = np.random.RandomState(0).randint(0, 10_000, (2, 4_000))
    carries = sum((a % 10**i + b % 10**i >= 10**i).astype(int) for i in (1, 2, 3, 4))
    asked = np.concatenate([reversed_digits(a, 4), reversed_digits(b, 4)], 1)
    return sequence("add4", asked, reversed_digits(a + b, 5), "0123456789",
                    strata=pd.DataFrame({"carries": carries}), by=("carries",))

@register("task", "sort", recipe=SMALL, rules=("first99",))
def sort():
    "Six letters of sixteen, to be written in order."
    asked = np.random.RandomState(0).randint(0, 16, (2_000, 6))
    return sequence("sort", asked, np.sort(asked), "abcdefghijklmnop",
                    strata=pd.DataFrame({"distinct": [len(set(x)) for x in asked.tolist()]}), by=("distinct",))

@register("router", "cosine")
class Cosine(Router):
    "Cosines of the stream with a direction for each expert, divided by a temperature (X-MoE, 2022)."
    temperature = 0.1
    def logits(self, held, x, c):
        return super().logits(held / held.norm(dim=1, keepdim=True), x / x.norm(dim=-1, keepdim=True), c) / self.temperature

@register("router", "relu")
class Rectified(Router):
    "Weights are what a ReLU leaves, so that a token has as many experts as it needs (ReMoE, 2024)."
    def probs(self, logits, held, c): return logits.relu()
    def gates(self, probs, held, c): return probs
    def balance(self, probs, g, c): return probs.mean((1, 2, 3))

@register("variant", "bilinear")
class Bilinear(Gated):
    "A gated FFN without an activation function (Noam Shazeer, 2020)."
    def hidden(self, product, act, at):
        return at("hidden", at("gate", product("W_gate")) * at("up", product("W_up")))
