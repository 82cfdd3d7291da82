"""Claims about add-7 derived a second time, from the committed weights, by code that knows nothing of the instruments.

It reads `checkpoints/add7/*.safetensors` with the safetensors library and what is claimed with pandas, writes the task
out in digits, builds every seed's model by itself in float64, head by head and expert by expert, and imports nothing of
the package. As a program it draws ten claims by lot: `python tests/rederive.py [--seed N] [--all] [ID ...]`."""
import argparse
import random
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Callable

import numpy as np
import pandas as pd
import torch
from safetensors import safe_open
from scipy.stats import ttest_ind
from sklearn.metrics import normalized_mutual_info_score

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (42, 137, 256, 512, 1024)
FFN, NARROW, GLU = "ffn-h256-silu", "ffn-h64-silu", "glu-h170-silu"
MOE, FROZEN, TOP2 = "moe-e4k1-h256-silu", "moe-e4k1-h256-silu+frozen", "moe-e4k2-h256-silu"
MOE_GLU, MOE_GLU_FROZEN = "moe_glu-e4k1-h256-silu", "moe_glu-e4k1-h256-silu+frozen"
SLOW, FAST = "ffn-h256-silu+ffnlr0.25", "moe-e4k1-h256-silu+ffnlr4"
ONES, TENS, HUNDREDS, OVERFLOW = range(4)                        # answer digits, in the order in which they are written
EVERY = (ONES, TENS, HUNDREDS, OVERFLOW)
EOS, READ = 11, 3                                                # answer digit i is predicted at position READ + i

# ------------------------------------------------------------------------------------------------------- task

def digits(n, k): return [n // 10**i % 10 for i in range(k)]                                    # the ones come first

@lru_cache(None)
def task():
    """Tokens (1000, 8), answers (1000, 4), what each answer digit adds to the question's (1000, 4), number of +1
    (1000,)."""
    question, answer = (np.array([digits(n + add, k) for n in range(1000)]) for add, k in ((0, 3), (7, 4)))
    tokens = np.concatenate([question, np.full((1000, 1), EOS), answer], axis=1)
    added = (answer - np.concatenate([question, np.zeros((1000, 1), int)], axis=1)) % 10
    return tokens, answer, added, (added == 1).sum(1)

# ------------------------------------------------------------------------------------------------------ model

class Model:
    "One seed's model: the tensors of one member of a stack, in float64."
    def __init__(self, weights, top_k): self.w, self.top_k = weights, top_k

    def embed(self):
        tokens = torch.tensor(task()[0])
        return self.w["W_E"][tokens] + self.w["W_pos"][:tokens.shape[1]]

    def heads(self, x):
        "What each head writes, a list of (n, 8, 64), without the output bias."
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        out = []
        for W_Q, W_K, W_V, W_O in zip(*(self.w[n][0] for n in ("W_Q", "W_K", "W_V", "W_O"))):
            scores = ((x @ W_Q) @ (x @ W_K).transpose(1, 2) / W_Q.shape[1]**.5).masked_fill(later, -torch.inf)
            out.append(torch.softmax(scores, -1) @ (x @ W_V) @ W_O)
        return out

    def attention(self, x): return sum(self.heads(x)) + self.w["b_O"][0]

    def expert(self, e, x):
        w = {n: t[0, e] for n, t in self.w.items() if n in ("W_up", "b_up", "W_gate", "W_down", "b_down")}
        if "W_gate" in w: return (torch.nn.functional.silu(x @ w["W_gate"]) * (x @ w["W_up"])) @ w["W_down"]
        return torch.nn.functional.silu(x @ w["W_up"] + w["b_up"]) @ w["W_down"] + w["b_down"]

    def routes(self, x): return torch.softmax(x @ self.w["W_router"][0], -1)

    def ffn(self, x):
        if "W_router" not in self.w: return self.expert(0, x)
        p = self.routes(x)
        kept = torch.zeros_like(p).scatter(-1, p.topk(self.top_k).indices, 1.) * p
        gates = kept / kept.sum(-1, keepdim=True)
        return sum(gates[..., e:e + 1] * self.expert(e, x) for e in range(p.shape[-1]))

    def logits(self, x): return x @ self.w["W_E"].T
    def says(self, x): return self.logits(x).argmax(-1)

@lru_cache(None)
def models(name, folder=ROOT / "checkpoints" / "add7"):
    "The five seeds' models of a condition."
    with safe_open(folder / f"{name}.first256.safetensors", "pt") as f:
        if f'"seeds": {list(SEEDS)}' not in f.metadata()["sealed"]: raise ValueError(f"{name}: not the seeds {SEEDS}")
        stacked = {n: f.get_tensor(n).double() for n in f.keys()}
    return [Model({n: t[i] for n, t in stacked.items()}, 2 if "e4k2" in name else 1) for i in range(len(SEEDS))]

@lru_cache(None)
def run(name, i):
    "A dictionary of what one seed's model computes on all inputs: embed, attn, ffn (1000, 8, 64)."
    m = models(name)[i]
    x = m.embed()
    a = m.attention(x)
    return dict(embed=x, attn=a, ffn=m.ffn(x + a))

# ----------------------------------------------------------------------------------------- what can be derived

def per_seed(f): return lambda *args, **kw: np.array([float(f(i, *args, **kw)) for i in range(len(SEEDS))])

@lru_cache(None)
def final(i, name, without=None, instead="zero"):
    """What is unembedded (1000, 4, 64), with the attention's or the FFN's output replaced by zeros or its mean over
    inputs."""
    m, r = models(name)[i], run(name, i)
    put = torch.zeros_like if instead == "zero" else lambda part: part.mean(0, keepdim=True).expand_as(part)
    a = put(r["attn"]) if without == "attn" else r["attn"]
    f = put(r["ffn"]) if without == "ffn" else m.ffn(r["embed"] + a)
    return (r["embed"] + a + f)[:, READ:READ + 4]

@lru_cache(None)
def spoken(i, name, without=None, instead="zero"):
    "Predicted answer digits (1000, 4)."
    return models(name)[i].says(final(i, name, without, instead)).numpy()

@per_seed
def right_without_copying(i, name, at, instead="mean"):
    """Share right at digits `at`, FFN replaced, where the token just read is not the answer and may not be said; mean
    over `at`."""
    logits, read = models(name)[i].logits(final(i, name, "ffn", instead)).numpy().copy(), task()[0][:, READ:READ + 4]
    np.put_along_axis(logits, read[..., None], -np.inf, -1)
    hit, asked = logits.argmax(-1) == task()[1], read != task()[1]
    return np.mean([hit[asked[:, d], d].mean() for d in at])

@per_seed
def right(i, name, without=None, instead="zero", at=EVERY, carries=None):
    "Share of answer digits that are right."
    chosen = slice(None) if carries is None else task()[3] == carries
    return (spoken(i, name, without, instead) == task()[1])[chosen][:, list(at)].mean()

@per_seed
def exact(i, name, without=None, instead="zero"): return (spoken(i, name, without, instead) == task()[1]).all(1).mean()

@per_seed
def copies(i, name, without="ffn", instead="zero", at=EVERY):
    "Share of predictions that repeat the token just read."
    return (spoken(i, name, without, instead) == task()[0][:, READ:READ + 4])[:, list(at)].mean()

def votes(i, name, part):
    "What a part (1000, 8, 64) adds to the logit of the right digit (1000, 4)."
    wanted = models(name)[i].w["W_E"][torch.tensor(task()[1])]
    return (part[:, READ:READ + 4] * wanted).sum(-1)

@per_seed
def attention_share(i, name, at=EVERY):
    r = run(name, i)
    a, f = votes(i, name, r["attn"]).abs(), votes(i, name, r["ffn"]).abs()
    return (a / (a + f))[:, list(at)].mean()

def ffn_share(name, at=EVERY): return 1 - attention_share(name, at)

@per_seed
def first_head(i, name, at):
    """Share of the strongest head (over all four digits) in the sizes of the heads' mean votes, averaged over digits
    `at`."""
    size = torch.stack([votes(i, name, h).mean(0)
                        for h in models(name)[i].heads(run(name, i)["embed"])]).abs()  # (4, 4)
    return (size[size.sum(1).argmax()] / size.sum(0))[list(at)].mean()

def put_in(i, name, part, to, from_, digit):
    "Predictions of inputs `to` at one answer digit with one part's output there taken from inputs `from_`."
    m, r, p = models(name)[i], run(name, i), READ + digit
    base, a, f = r["embed"][to, p], r["attn"][to, p], r["ffn"][to, p]
    if part == "attn":
        a = r["attn"][from_, p]
        f = m.ffn((base + a)[None])[0]
    else: f = r["ffn"][from_, p]
    return m.says(base + a + f).numpy()

def flips(i, name, part, to, from_, digit):
    answer, before = task()[1][:, digit], spoken(i, name)[:, digit]
    return ((put_in(i, name, part, to, from_, digit) == answer[from_]) & (before[to] != answer[from_])).mean()

@per_seed
def flips25(i, name, part, digit):
    "The first five numbers without a carry into the digit, put into the first five with one."
    without, with_one = (np.flatnonzero(task()[2][:, digit] == v)[:5] for v in (0, 1))
    from_, to = (g.ravel() for g in np.meshgrid(without, with_one, indexing="ij"))
    return flips(i, name, part, to, from_, digit)

@per_seed
def flips_all(i, name, part, digit):
    "All ordered pairs that read the same digit of the question and need different answers."
    asked, added = np.array([digits(n, 4) for n in range(1000)])[:, digit], task()[2][:, digit]
    to, from_ = np.nonzero((asked[:, None] == asked) & (added[:, None] != added))
    return flips(i, name, part, to, from_, digit)

def chosen_experts(i, name):
    r = run(name, i)
    return models(name)[i].routes(r["embed"] + r["attn"])[:, READ:READ + 4].argmax(-1).numpy()

@per_seed
def nmi(i, name, average):
    return normalized_mutual_info_score(task()[2].ravel(), chosen_experts(i, name).ravel(), average_method=average)

@per_seed
def load(i, name, expert): return (chosen_experts(i, name) == expert).mean()

def count(name):
    "Parameters of the FFN layer, router included."
    own = ("W_up", "b_up", "W_gate", "W_down", "b_down", "W_router")
    return sum(t.numel() for n, t in models(name)[0].w.items() if n in own)

def shape(name, tensor, axis): return models(name)[0].w[tensor].shape[axis]

def guessing(): return np.mean([(task()[1][:, d] == np.bincount(task()[1][:, d]).argmax()).mean() for d in EVERY])

def copying(): return (task()[0][:, READ:READ + 4] == task()[1]).mean()

def welch(a, b): return ttest_ind(a, b, equal_var=False).pvalue

def lowest(name, **kw): return min((right(name, "ffn", at=(d,), **kw) for d in EVERY), key=np.mean)

# ------------------------------------------------------------------------------------------------ what is claimed

@lru_cache(None)
def table(item):
    if item == "ledger":
        held = pd.read_csv(ROOT / "results/ledger.csv").rename(columns={"paper_mean": "ours_mean"})
        return held.assign(id="ledger." + held["key"], ours_std=np.nan).set_index("id")
    return pd.read_csv(ROOT / "results" / "paper" / f"{item}.csv").query("protocol == 'paper'").set_index("id")

@lru_cache(None)
def rows(instrument, name):
    r = pd.read_parquet(ROOT / "results" / "rows" / instrument / "add7.parquet",
                        filters=[("condition", "==", f"add7/{name}")])
    return r[(r["stream"] == "authors") & (r["rule"] == "first256")]

@dataclass(frozen=True)
class Claim:
    """One recorded value and the function that derives it again.

    `find` is the id's item in `results/paper` or "ledger", or instrument, condition and columns of `results/rows`; with
    `n` predictions a seed the tolerance is two of them, else 1e-3."""
    id: str
    what: str
    derive: Callable
    find: str | tuple
    n: int | None = None

    def recorded(self):
        "Mean and standard deviation over seeds in a table, each seed's value in rows."
        if isinstance(self.find, str):
            r = table(self.find).loc[self.id]
            return np.array([r["ours_mean"], r["ours_std"]])[:1 if np.isnan(r["ours_std"]) else 2]
        instrument, name, where = self.find
        r = rows(instrument, name)
        for column, value in dict(dict(unit="", stratum="all"), **where).items(): r = r[r[column] == value]
        if sorted(r["seed"]) != sorted(SEEDS):
            raise LookupError(f"{self.id}: expected one row a seed, got {sorted(r['seed'])}")
        return r.set_index("seed")["value"].loc[list(SEEDS)].to_numpy()

    def derived(self):
        found = np.atleast_1d(np.asarray(self.derive(), float))
        if not isinstance(self.find, str): return found
        return np.array([found.mean(), found.std(ddof=1) if len(found) > 1 else 0.])[:len(self.recorded())]

    def tolerance(self):
        """Two predictions: of one seed for a seed's value, of all seeds for their mean (their spread is held to as
        much)."""
        if self.n is None: return 1e-3
        return 2 / (self.n if not isinstance(self.find, str) else self.n * len(SEEDS))

    def check(self):
        a, b = self.recorded(), self.derived()
        off = float(np.abs(a - b).max())
        show = (lambda x: x[0]) if isinstance(self.find, str) else np.mean
        return dict(id=self.id, what=self.what, recorded=show(a), derived=show(b), off=off, tolerance=self.tolerance(),
                    ok=off <= self.tolerance())

def said_in_the_ledger():
    """Key, statement and derivation of every claim of the ledger that compares digits of two committed models, as the
    authors did."""
    every = [pd.read_csv(p, keep_default_na=False) for p in sorted((ROOT / "data").glob("*/statements.csv"))]
    s = pd.concat(every, ignore_index=True).query("protocol == 'paper' "
        "and stream == 'authors' and "
        "rule == 'first256' and instrument == 'ablation' and metric == 'digits' and aggregate == 'difference'")
    there = {p.name.removesuffix(".first256.safetensors")
             for p in (ROOT / "checkpoints" / "add7").glob("*.safetensors")}
    places = {"o0-o3": (EVERY,), "o1 o2": ((TENS,), (HUNDREDS,)), **{f"o{d}": ((d,),) for d in EVERY}}
    for r in s.itertuples():
        a, b = r.condition.removeprefix("add7/"), r.versus.removeprefix("add7/")
        if not {a, b} <= there or r.position not in places or not r.stratum.startswith(("all", "carry=")): continue
        how = dict(without=r.site.removesuffix("_out"), instead=r.edit,
                   carries=None if r.stratum == "all" else int(r.stratum[-1]))
        one = lambda n, at=places[r.position], how=how: np.mean([right(n, at=p, **how) for p in at], axis=0)
        yield r.key, r.statement, lambda a=a, b=b, one=one: one(a) - one(b)

def claims():
    "All claims that can be checked here, by id."
    out = []
    def printed(id, what, derive, n=None):
        out.append(Claim(id, what, derive, "ledger" if id.startswith("ledger") else id.rsplit(".", 1)[0], n))
    def row(id, instrument, name, derive, n=None, **where):
        out.append(Claim(id, f"{name} " + " ".join(where.values()), derive, (instrument, name, where), n))
    table1 = (FFN, NARROW, MOE, FROZEN, MOE_GLU, MOE_GLU_FROZEN)
    for k, name in enumerate(table1):
        for j, without in enumerate((None, "attn", "ffn")):
            printed(f"tab1.{3 * k + j + 1:03d}", f"{name} right without {without or 'nothing'}",
                    lambda n=name, w=without: right(n, w), 4000)
    for id, name in (("fig1.002", GLU), ("fig1.004", TOP2), ("tab4.010", GLU), ("sec4.2.007", FROZEN)):
        printed(id, f"{name} right without ffn", lambda n=name: right(n, "ffn"), 4000)
    printed("tab4.007", f"{GLU} right without attn", lambda: right(GLU, "attn"), 4000)
    printed("fig1.007", "frozen minus learned router, right without ffn",
            lambda: right(FROZEN, "ffn") - right(MOE, "ffn"), 4000)
    printed("fig1.008", "Welch test of the same", lambda: welch(right(FROZEN, "ffn"), right(MOE, "ffn")))
    printed("fig1.009", "saying each position's most frequent digit", guessing, 4000)
    printed("fig3_caption.001", "MoE minus FFN, right without ffn", lambda: right(MOE, "ffn") - right(FFN, "ffn"), 4000)
    for side, without in (("left", "ffn"), ("right", "attn")):
        for first, name in ((1, FFN), (9, MOE)):
            for d in EVERY:
                printed(f"fig4_{side}.{first + d:03d}", f"{name} digit {d} right without {without}",
                        lambda n=name, w=without, d=d: right(n, w, at=(d,)), 1000)
    printed("sec4.1.013", f"{MOE} right without ffn where it is lowest", lambda: lowest(MOE), 1000)
    for k, name in enumerate((FFN, NARROW, FROZEN, MOE)):
        for d in EVERY:
            printed(f"fig11_bottom.{4 * k + d + 1:03d}", f"{name} first head's share, digit {d}",
                    lambda n=name, d=d: first_head(n, (d,)))
        printed(f"fig11_caption.{k + 1:03d}", f"{name} first head's share, three digits",
                lambda n=name: first_head(n, (TENS, HUNDREDS, OVERFLOW)))
    for L, n in enumerate((300, 630, 63)):
        for id, name in ((1, FFN), (3, MOE), (4, MOE_GLU)):
            printed(f"fig12.{4 * L + id:03d}", f"{name} right without ffn, {L} times +1",
                    lambda m=name, L=L: right(m, "ffn", carries=L), 4 * n)
    for d, first in ((TENS, 1), (HUNDREDS, 9), (OVERFLOW, 17)):
        for k, part in enumerate(("attn", "ffn")):
            for id, name in ((first, FFN), (first + 4, MOE), (first + 6, MOE_GLU)):
                printed(f"fig14.{id + k:03d}", f"{name} {part} patched at digit {d}, 25 pairs",
                        lambda n=name, p=part, d=d: flips25(n, p, d))
    printed("sec4.1.011", f"{MOE} share of attention in the right logit", lambda: attention_share(MOE))
    printed("sec4.1.012", f"{FFN} share of attention in the right logit", lambda: attention_share(FFN))
    printed("appC.3.001", f"{FFN} share of the FFN in the right logit, tens", lambda: ffn_share(FFN, (TENS,)))
    for k, name in enumerate((FFN, GLU, MOE)):
        printed(f"tab2.{2 * k + 1:03d}", f"{name} width", lambda n=name: shape(n, "W_up", -1))
        printed(f"tab2.{2 * k + 2:03d}", f"{name} parameters of the FFN", lambda n=name: count(n))
    for k, v in enumerate((7, 1, 0)):
        printed(f"appA.{k + 1:03d}", f"answer digits that add {v}", lambda v=v: (task()[2] == v).sum())
    printed("appA.013", "width of the residual stream", lambda: shape(FFN, "W_E", -1))
    printed("appA.015", "heads", lambda: shape(FFN, "W_Q", 1))
    printed("appA.016", "experts", lambda: shape(MOE, "W_up", 1))
    where = dict(site="ffn_out", position="o0-o3")
    eight = dict(ffn=FFN, narrow=NARROW, glu=GLU, moe=MOE, frozen=FROZEN, top2=TOP2, slow=SLOW, fast=FAST)
    for short, name in eight.items():
        row(f"mean.{short}", "ablation", name, lambda n=name: right(n, "ffn", "mean"), 4000,
            edit="mean", metric="digits", **where)
        row(f"copy.{short}", "ablation", name, lambda n=name: copies(n), 4000, edit="zero",
            metric="copy_share", **where)
        for d, o in ((TENS, "o1"), (HUNDREDS, "o2")):
            row(f"mean.{short}.{o}", "ablation", name, lambda n=name, d=d: right(n, "ffn", "mean", at=(d,)), 1000,
                edit="mean", metric="digits", **where | dict(position=o))
            row(f"uncopied.{short}.{o}", "copying", name, lambda n=name, d=d: right_without_copying(n, (d,)), 300,
                edit="mean", metric="digits_no_copy", **where | dict(position=o))
    for key, statement, derive in said_in_the_ledger():
        printed(f"ledger.{key}", statement, derive, 630)
    for short, name in dict(ffn=FFN, moe=MOE).items():
        row(f"mean_attn.{short}", "ablation", name, lambda n=name: right(n, "attn", "mean"), 4000,
            edit="mean", metric="digits", **where | dict(site="attn_out"))
        row(f"exact.{short}", "ablation", name, lambda n=name: exact(n), 1000, site="none", edit="none", position="all",
            metric="exact")
        for part in ("attn", "ffn"):
            row(f"all_pairs.{part}.{short}", "patching", name, lambda n=name, p=part: flips_all(n, p, TENS), 42_000,
                site=f"{part}_out", edit="patch", position="o1", metric="flip")
    for short, name in dict(moe=MOE, frozen=FROZEN, top2=TOP2, moe_glu=MOE_GLU).items():
        for average in ("arithmetic", "min"):
            row(f"nmi.{short}.{average}", "routing", name, lambda n=name, a=average: nmi(n, a),
                edit="none", metric=f"nmi_{average}", **where | dict(site="router_probs"))
    row("load.moe.E0", "routing", MOE, lambda: load(MOE, 0), 4000, edit="none", unit="E0", metric="load",
        **where | dict(site="router_probs"))
    return {c.id: c for c in out}

def report(chosen):
    "A frame with one line a claim."
    return pd.DataFrame([c.check() for c in chosen])

def main():
    p = argparse.ArgumentParser(description="Ten claims at random, derived again from the committed weights.")
    p.add_argument("ids", nargs="*", help="these claims")
    p.add_argument("--seed", type=int, default=None, help="draws the ten (default: another one every time)")
    p.add_argument("--all", action="store_true", help="all claims")
    a = p.parse_args()
    torch.set_num_threads(1)
    known = claims()
    if missing := [i for i in a.ids if i not in known]: p.error(f"no claim {missing[0]}; there are {', '.join(known)}")
    if a.ids: ids = a.ids
    elif a.all: ids = list(known)
    else:
        seed = random.SystemRandom().randrange(10**6) if a.seed is None else a.seed
        ids = random.Random(seed).sample(sorted(known), 10)
        print(f"ten of {len(known)} claims, drawn with --seed {seed}")
    found = report([known[i] for i in ids])
    print(found.to_string(index=False,
                          formatters={c: "{:.6g}".format for c in ("recorded", "derived", "off", "tolerance")}))
    print(f"{int(found['ok'].sum())} of {len(found)} agree")
    return 0 if found["ok"].all() else 1

if __name__ == "__main__": sys.exit(main())
