"""Shapes that docstrings and comments of arguments write in models, training and instruments, checked by jaxtyping:
`x (s, n, d) → (s, n)` is a promise about a call, and a dimension has one size in it."""
import importlib
import inspect
import pkgutil
import re
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from fastcore.docments import docments
from jaxtyping import Shaped, jaxtyped
from torch import Tensor

from moe_redistribution.instruments import (ablation, attribution, bilinear, copying, fourier, grokking, heldout,
                                            histogram, patching, patterns, probes, rerouting, routing, scores, speed,
                                            trace)
from moe_redistribution.language import (decomposition as stream_terms, families, gated, layers, masks, recorded, regret,
                                         routing_edits as verbs, small, watched)
from moe_redistribution.models import ffn, more_routers, population
from moe_redistribution.models.condition import condition
from moe_redistribution.models.routers import question
from moe_redistribution.training import engine, loop

# Every letter and word that is a dimension somewhere; brackets with anything else in them are prose.
DIMENSIONS = set("""s n b t d v e k h q i j w p m a g c l N T V seed batch position vocab read edit head query key place
    places rank scored label inputs groups bins neurons known chosen draws population n_pairs n_groups rows""".split())
NOT_CALLED = 64                 # functions that promise shapes and have no case below: fewer, never more
SHAPE = r"\(((?:[^()]|\(\))*)\)"

def spec(text):
    "A shape in brackets as jaxtyping has it, or None for prose: `s, p², …` → `s p**2 *rest`."
    for old, new in (("…", "..."), ("²", "**2"), (" − ", "-"), (" - ", "-"), (" + ", "+"), (" // ", "//"),
                     (" · ", "*")):
        text = text.replace(old, new)
    parts = [x for x in re.split(r",\s*|\s+", text.strip()) if x]
    words = re.findall(r"[A-Za-z_]\w*", " ".join(parts))
    plain = all(re.fullmatch(r"\.\.\.|\*?\w+([-+*/]+\w+)?", x) for x in parts)
    if not parts or not plain or not set(words) <= DIMENSIONS: return None
    return " ".join("*rest" if x == "..." else x for x in parts)

def promised(f):
    "(argument → shape, shapes of what is returned) that `f` says in comments of its arguments and in its docstring, in order."
    own = inspect.getdoc(f).partition("\n\nArguments\n")[0]                # whoever asked the package for f has its comments there
    doc, names = " ".join(own.split()), list(inspect.signature(f).parameters)
    beside = {n: [x for m in re.finditer(SHAPE, text or "") if (x := spec(m[1]))] for n, text in docments(f).items()}
    bare = [(shape, "→") for shape in beside.pop("return", ())]
    given = {n: shapes[0] for n, shapes in beside.items() if shapes}
    for m in re.finditer(SHAPE, doc):
        shape, before = spec(m[1]), doc[:m.start()].rstrip()
        if shape is None: continue
        own = next((n for n in names if re.search(rf"(?<![\w→.])`?{n}`?( [a-z]+)?$", before)), None)
        if before.endswith(" or"): continue                               # another form, of this or of the argument
        if own and not before.endswith("→"): given.setdefault(own, shape)
        else: bare.append((shape, "→" if before.endswith("→") else ":" if before.endswith(":") else ""))
    for mark in "→:":                                                     # from the first arrow on, or the last colon
        at = [i for i, (_, how) in enumerate(bare) if how == mark]
        if at: return given, [shape for shape, _ in bare[at[0]:]]
    return given, [shape for shape, _ in bare]

def leaves(x):
    if isinstance(x, dict): return [v for y in x.values() for v in leaves(y)]
    if isinstance(x, (tuple, list)): return [v for y in x for v in leaves(y)]
    return [x]

def agree(f, args, sizes):
    "AssertionError unless what `f(**args)` takes and gives has the promised shapes, each dimension of one size."
    given, out = promised(f)
    values = leaves(f(**args))
    assert out, f"{f.__name__} promises no shape of what it gives"
    out = out * len(values) if len(out) == 1 else out
    assert len(out) == len(values), f"{f.__name__} promises {out} and gives {[tuple(v.shape) for v in values]}"
    with jaxtyped("context"):
        for name, n in sizes.items(): assert isinstance(torch.empty(n), Shaped[Tensor, name])
        for name, shape in given.items():
            if name in args and args[name] is not None:
                x = torch.as_tensor(args[name])
                assert isinstance(x, Shaped[Tensor, shape]), f"{f.__name__}: {name} ({shape}) is {tuple(x.shape)}"
        for x, shape in zip(values, out, strict=True):
            x = torch.as_tensor(x)
            assert isinstance(x, Shaped[Tensor, shape]), f"{f.__name__} gives {tuple(x.shape)}, and promises ({shape})"

# ------------------------------------------------------------------------------------------------------------- cases

C = condition("add7/moe-e4k2-h32-silu")
MOD = condition("modadd/glu-h8-linear")
T = C.get_task()
S, N, READ, E, K = 3, len(T), len(T.read), C.n_experts, C.top_k
SIZES = dict(s=S, n=N, read=READ)
HERE = dict(s=S, b=5, t=T.n_ctx, d=C.d_model)

def rand(*shape): return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)))
def ints(high, *shape): return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))
@lru_cache
def drawn(c): return population.init(c, [torch.Generator().manual_seed(i) for i in range(S)])
@lru_cache
def terms(by): return attribution.attribution(drawn(C), C, by)
@lru_cache
def pairs():
    chosen = {w: p[:7] for w, p in patching.pairs(T, "audited").items()}
    return patching.patch(drawn(C), C, chosen, ["ffn_out", "resid_post"]), chosen

def of(c, **more): return dict(params=drawn(c), c=c, **more)
def alike(site, value): return value
TOKENS, TARGETS = T.tokens[:5], T.targets[:5]
X, P = rand(S, 5, T.n_ctx, C.d_model), rand(2, 3, 6, 6).softmax(-1)
CHOSEN = ints(E, S, 9, READ, K)
EDIT = {"ffn_out": "zero"}
GATE, UP, DOWN = (rand(S, 1, 6, 4), rand(S, 1, 6, 4), rand(S, 1, 4, 6))

CASES = [
    # function, what it is called with, sizes that must stand in the shapes
    (routing.routes, lambda: of(C), SIZES | dict(k=K, e=E)),
    (probes.shuffle, lambda: dict(y=ints(2, 3, 9), places=ints(2, 9)), dict(k=3, n=9)),
    (routing.entropy, lambda: dict(counts=rand(3, 2, 7)), {}),
    (routing.loads, lambda: dict(chosen=CHOSEN, n_experts=E), dict(s=S, e=E)),
    (routing.effective_experts, lambda: dict(chosen=CHOSEN, n_experts=E), dict(s=S)),
    (routing.coactivation, lambda: dict(chosen=CHOSEN, n_experts=E), dict(s=S, e=E)),
    (routing.crosstab, lambda: dict(known=ints(5, 9), chosen=ints(E, S, 9), n_known=5, n_chosen=E),
     dict(s=S, known=5, chosen=E)),
    (routing.mutual_information, lambda: dict(table=rand(3, 5, 4)), {}),
    (routing.conditional_information, lambda: dict(table=rand(3, 6, 5, 4)), {}),
    (routing.nmi, lambda: dict(table=rand(3, 5, 4)), {}),
    (routing.explained_share, lambda: dict(table=rand(3, 5, 4)), {}),
    (routing._redrawn_tables, lambda: dict(table=ints(4, 3, 5, 4), draws=2), dict(draws=2, a=5, b=4)),
    (routing.fractions, lambda: dict(table=rand(3, 5, 4)), dict(a=5, e=4)),
    (routing.overlap, lambda: dict(a=CHOSEN, b=CHOSEN), dict(s=S)),
    (routing.saturation, lambda: dict(earlier=drawn(C), later=drawn(C), c=C), dict(s=S)),
    (routing._pair_codes, lambda: dict(t=MOD.get_task()), dict(n=113 ** 2)),
    (rerouting._rerouted_answers, lambda: of(C, each=[{}, {"gates": lambda g: g}]), SIZES | dict(edit=2)),
    (rerouting.drops, lambda: dict(right=rand(3, S, N, READ) > .5, t=T), SIZES | dict(edit=3)),
    (rerouting._dominant_expert, lambda: dict(table=ints(9, S, 5, E), label=2), dict(s=S, label=5, e=E)),
    (rerouting._position_token_codes, lambda: dict(t=T), dict(n=N, read=READ)),
    (rerouting.routes_held, lambda: of(C, edits=EDIT), SIZES),
    (rerouting.gradient_norms, lambda: of(C, tokens=TOKENS, targets=TARGETS), dict(s=S, b=5)),
    (more_routers.dealt_out, lambda: dict(n=9, E=4, k=2, g=torch.Generator().manual_seed(1)), dict(n=9, k=2)),
    (more_routers.by_place, lambda: dict(T=9, E=4, k=2), dict(T=9, k=2)),
    (ablation.ablate, lambda: of(C, edits=EDIT), SIZES),
    (ablation.ablate_each, lambda: of(C, each=[{}, EDIT]), SIZES | dict(edit=2)),
    (ablation.decode, lambda: of(C, edits=EDIT), SIZES),
    (ablation.ablation_curve, lambda: of(C), dict(s=S)),
    (copying.without_copy, lambda: of(C), SIZES),
    (attribution.attribution, lambda: of(C), SIZES),
    (attribution.attention_share, lambda: dict(terms=terms("component")), SIZES),
    (attribution.ranked_heads, lambda: dict(terms=terms("head"), t=T), dict(s=S, rank=C.n_heads, scored=len(T.scored))),
    (attribution.rank1_share, lambda: dict(by_rank=attribution.ranked_heads(terms("head"), T)),
     dict(s=S, scored=len(T.scored))),
    (patterns.patterns, lambda: of(C, numbers=[1, 2, 5, 7, 9]), dict(s=S, n=5, head=C.n_heads)),
    (patterns.mean_pattern, lambda: of(C), dict(s=S, head=C.n_heads)),
    (patterns.spread, lambda: of(C), dict(s=S, head=C.n_heads)),
    (patterns.attention_between, lambda: dict(mean=patterns.mean_pattern(drawn(C), C), c=C, query="o0", key="d0"),
     dict(s=S, head=C.n_heads)),
    (patterns.by_rank, lambda: dict(x=rand(S, 4, 5), total=rand(S, 4)), dict(s=S, head=4)),
    (patterns._query_mask, lambda: dict(t=T), dict(n=N)),
    (patching.flips, lambda: dict(said=pairs()[0], task=T, chosen=pairs()[1]), dict(s=S, n_pairs=7)),
    (patching._breaks, lambda: dict(said=pairs()[0], task=T, chosen=pairs()[1]), dict(s=S, n_pairs=7)),
    (patching._copies, lambda: dict(said=pairs()[0], task=T, chosen=pairs()[1]), dict(s=S, n_pairs=7)),
    (patching._right_alone, lambda: dict(said=pairs()[0], task=T, chosen=pairs()[1]), dict(s=S, n_pairs=7)),
    (patching._pair_strata, lambda: dict(task=T, chosen=pairs()[1]), dict(n_pairs=7)),
    (probes.group_split, lambda: dict(groups=torch.arange(50)), dict(n=50)),
    (probes._fit_converged,
     lambda: dict(x=rand(2, 30, 5), y=torch.nn.functional.one_hot(ints(3, 4, 30)).to(rand(1).dtype)),
     dict(p=2, n=30, d=5, k=4, c=3)),
    (probes._whiten_features, lambda: dict(x=rand(2, 30, 5)), dict(p=2, n=30, d=5)),
    (probes.fit_adam, lambda: dict(x=rand(2, 30, 5), y=torch.nn.functional.one_hot(ints(3, 4, 30)),
                                   how=probes.SETTINGS["code"], steps=2), dict(p=2, d=5, k=4, c=3)),
    (probes._lookup_accuracy, lambda: dict(keys=ints(6, 30), y=ints(3, 4, 30), fit=torch.arange(30) < 20,
                                          score=torch.arange(30) >= 20), dict(n=30, k=4)),
    (probes.features, lambda: of(C, at_sites=("resid_mid", "resid_post")), dict(s=S, n=N, d=C.d_model)),
    (fourier.group_mean, lambda: dict(h=rand(S, 20, 6), groups=torch.arange(20) % 5), dict(s=S, groups=5, n=6)),
    (fourier.spectrum, lambda: dict(means=rand(S, 7, 6)), dict(s=S, groups=7, n=6)),
    (fourier.concentration, lambda: dict(means=rand(S, 7, 6), protocol="audited"), dict(s=S, n=6)),
    (fourier.contribution, lambda: dict(means=rand(S, 7, 6), reach=rand(S, 6)), dict(s=S, n=6)),
    (fourier.weighted_mean, lambda: dict(values=rand(S, 6), weight=rand(S, 6)), dict(s=S)),
    (fourier._live_mean, lambda: dict(values=rand(S, 6), weight=rand(S, 6), threshold=.1), dict(s=S)),
    (fourier._wave_share, lambda: dict(h=rand(S, 49, 6)), dict(s=S, p=7, n=6)),
    (fourier.frequency_share, lambda: dict(means=rand(S, 7, 6), weight=rand(6)), dict(s=S, groups=7, bins=3)),
    (fourier._principal_components, lambda: dict(h=rand(S, 20, 6), groups=torch.arange(20) % 5, k=2),
     dict(s=S, groups=5, k=2)),
    (grokking._sum_means, lambda: dict(values=rand(S, 113 ** 2, 2)), dict(p=113, s=S, v=2)),
    (grokking._wave_power, lambda: dict(x=rand(S, 113, 2)), dict(s=S)),
    (grokking._keep_waves, lambda: dict(x=rand(S, 113, 2), keys=rand(S, 56) > .5), dict(s=S, p=113, v=2)),
    (grokking._key_waves, lambda: dict(power=rand(S, 56)), dict(s=S)),
    (grokking.gini, lambda: dict(x=rand(S, 4, 9)), {}),
    (grokking._sum_share, lambda: dict(logits=rand(S, 113 ** 2, 2)), dict(s=S, p=113)),
    (grokking.weight_norms, lambda: dict(params=drawn(C)), dict(s=S)),
    (grokking._embedding_gini, lambda: of(MOD), dict(s=S)),
    (bilinear._factors, lambda: of(MOD), dict(s=S, e=1, d=MOD.d_model, w=8)),
    (bilinear._gram, lambda: dict(gate=GATE, up=UP, symmetric=True), dict(w=4)),
    (bilinear._top_singular, lambda: dict(gate=GATE, up=UP, down=DOWN, k=2), dict(w=4, k=2)),
    (bilinear._readers, lambda: of(MOD, through="embedding"), dict(s=S, p=113, d=MOD.d_model)),
    (bilinear._shares, lambda: dict(power=rand(S, 2, 56, 5), total=56 + rand(S, 2, 5)), dict(n=5)),
    (masks._mass_in_top, lambda: dict(P=P, k=2), dict(b=2, h=3, i=6)),
    (masks._entropy_ratio, lambda: dict(P=P), dict(b=2, h=3, i=6)),
    (masks._openness, lambda: dict(P=P, G=rand(2, 3, 6, 6)), dict(b=2, h=3, i=6)),
    (verbs.places_of, lambda: dict(real=ints(2, 2, 7) > 0), dict(b=2, t=7)),
    (gated.kept_entries, lambda: dict(scores=rand(2, 3, 6), k=2), dict(j=6)),
    (speed.rms_length, lambda: dict(x=rand(S, 9, READ, 6)), dict(s=S)),
    (trace.parts, lambda: dict(tr=trace.trace(drawn(C), TOKENS, C), params=drawn(C)), HERE),
    (ffn.ffn, lambda: dict(p=population.layer(drawn(C), 0), x=X, at=alike, c=C), HERE),
    (ffn._layout, lambda: dict(group=ints(4, 9), n_groups=4), dict(m=9, n_groups=4)),
    (ffn.dispatch, lambda: dict(p=population.layer(drawn(C), 0), x=rand(S, 9, C.d_model), chosen=ints(E, S, 9, K),
                                weight=rand(S, 9, K), c=C), dict(s=S, n=9, d=C.d_model, k=K)),
    (population._attention, lambda: dict(p=population.layer(drawn(C), 0), x=X, at=alike, causal=T.causal), HERE),
    (population._block, lambda: dict(p=population.layer(drawn(C), 0), x=X, c=C, at=alike, causal=T.causal), HERE),
    (population.ffn_half, lambda: dict(p=population.layer(drawn(C), 0), x=X, c=C, at=alike), HERE),
    (population.unembed, lambda: of(C, x=X), HERE | dict(v=T.d_vocab)),
    (population.forward, lambda: of(C, tokens=TOKENS, with_balance=True),
     dict(s=S, seed=S, batch=5, position=T.n_ctx, vocab=T.d_vocab)),
    (population.predict, lambda: of(C), SIZES),
    (population.loss, lambda: of(C, tokens=TOKENS, targets=TARGETS), dict(s=S, b=5, read=READ)),
    (question, lambda: dict(tokens=TOKENS, t=T), dict(t=T.n_ctx)),
    (engine.fast_loss, lambda: of(C, tokens=TOKENS.expand(S, -1, -1), targets=TARGETS.expand(S, -1, -1)),
     dict(s=S, b=5, read=READ)),
    (engine._choose_experts, lambda: dict(logits=rand(S, E, 9), c=C), dict(s=S, e=E, k=K, n=9)),
    (engine._whole_shares, lambda: dict(params=drawn(C), chunks=[TOKENS.expand(S, -1, -1)], c=C), dict(s=S, e=E)),
    (small._token_losses, lambda: dict(logits=rand(2, 6, 11), tokens=ints(11, 2, 7)), dict(n=2, T=6)),
    (loop.settled_members, lambda: dict(members=loop.init_members(C, [1, 2, 3], "paired"), until="first"), dict(s=S)),
    (loop.train_interval, lambda: dict(members=loop.init_members(C, [1, 2, 3], "paired"), n=1), dict(s=S)),
    (loop.flatten, lambda: of(C), dict(s=S)),
    (loop._optimiser_steps, lambda: dict(members=loop.init_members(C, [1, 2, 3], "paired")), dict(s=S)),
    (loop.done_members, lambda: dict(members=loop.init_members(C, [1, 2, 3], "paired"), until="full", steps=9),
     dict(s=S)),
    (engine._squeeze, lambda: dict(params=dict(W_Q=drawn(C)["W_Q"])), dict(s=S)),
    (engine._gate_weights, lambda: dict(probs=rand(S, E, 9), chosen=ints(E, S, K, 9), c=C), dict(s=S, k=K, n=9)),
    (engine._heads_out, lambda: dict(rows=SimpleNamespace(number=ints(7, S, 2, 5), size=7), pattern=rand(S, 4, 2, 3, 5),
                                    v=rand(S, 4, 7, 6)), dict(s=S, b=2, q=3, d=24)),
    (ffn._dense_experts, lambda: dict(p=population.layer(drawn(C), 0), x=rand(S, 9, C.d_model), chosen=ints(E, S, 9, K),
                                     c=C), dict(s=S, n=9, k=K, d=C.d_model)),
    (routing.iid_tables, lambda: dict(sizes=[5, 6, 7], n_experts=4, draws=2), dict(draws=2, a=3, e=4)),
    (scores._chosen_ranks, lambda: dict(logits=rand(S, 2, 5, E), routes=ints(E, S, 2, 5, K)), dict(s=S, b=2, t=5, k=K)),
    (heldout.parts_of, lambda: dict(t=T, hold=next(iter(T.rules))), dict(n=N)),
    (heldout.seen_before, lambda: dict(t=T, hold=next(iter(T.rules))), dict(n=N)),
    (histogram._lifts, lambda: dict(found={n: dict(accuracy=rand(S)) for n in ("embed", "resid_mid", "resid_post")}),
     dict(s=S)),
    (grokking._pair_logits, lambda: of(MOD), dict(s=S, p=113, v=MOD.get_task().d_vocab)),
    (patterns.relation, lambda: of(C), dict(s=S, head=C.n_heads, query=T.n_ctx)),
    (bilinear._tensor, lambda: of(MOD), dict(s=S, e=1, i=MOD.d_model, j=MOD.d_model)),
    (bilinear._units_read, lambda: dict(gate=rand(6, 4), up=rand(6, 4), read=(rand(113, 6), rand(113, 6))), dict(w=4)),
    (watched.mix_values, lambda: dict(pattern=rand(2, 3, 5, 6), v=rand(2, 6, 3, 4)), dict(b=2, i=5, h=3, d=4)),
    (layers.probe_tokens, lambda: dict(model=families.tiny_model("llama")), {}),
    (recorded._window_losses, lambda: dict(logits=rand(2, 5, 7), targets=ints(7, 2, 5)), dict(b=2, t=5)),
    (recorded._of_windows, lambda: dict(v=rand(3, 4), at=[0, 2], n=3), dict(n=2)),
    (regret._live_weights, lambda: dict(P=(P := rand(2, 5).softmax(-1)), sets=torch.tensor([[3, 4]] * 2),
                                       weights=P[:, :2], chosen=torch.tensor([[0, 1]] * 2)), dict(k=2)),
    (masks._f1_of, lambda: dict(scores=rand(2, 3, 6, 6), A=rand(2, 3, 6, 6), k=2), dict(b=2, h=3, rows=6)),
    (masks.open_under_gate, lambda: dict(seen=SimpleNamespace(A=rand(2, 3, 6, 6), G=rand(2, 3, 6, 6),
                                                              hidden=torch.ones(6, 6).triu(1) > 0)),
     dict(b=2, h=3, i=6)),
    (stream_terms.rms_of, lambda: dict(norm=None, x=rand(2, 5, 7), what="no norm"), dict(d=7)),
]

NAMES = [f"{f.__module__.split('.')[-1]}.{f.__name__}" for f, *_ in CASES]

@pytest.mark.parametrize("f, args, sizes", CASES, ids=NAMES)
def test_shapes_are_those_of_the_docstring(f, args, sizes): agree(f, args(), sizes)

def test_a_docstring_that_lies_is_found():
    def honest(x, weight): return (x * weight).sum(1)
    def says(text): honest.__doc__ = text; agree(honest, dict(x=rand(3, 5), weight=rand(5)), dict(s=3))
    says("Sum of x (s, n) by `weight` (n,) → (s,).")
    says("Sums (s,) of x (s, n) (App. B).")
    for lie in ("Sum of x (s, n) by weight (n,) → (n,).", "Sum of x (n, s) by weight (n,) → (s,).",
                "Sum of x (s, n) by weight (s,) → (s,).", "Sum of x (s, n) → (s,), and its spread (s,).",
                "Sum of x (s, n)."):
        with pytest.raises(AssertionError): says(lie)

def test_what_is_no_shape_is_prose():
    assert spec("s, p², …") == "s p**2 *rest" and spec("s b t d") == "s b t d" and spec("edit − 1, s") == "edit-1 s"
    assert [spec(x) for x in ("App. B", "expected, got, fix", "top-1, renormalised", "default: all", "")] == [None] * 5

def test_most_of_what_is_promised_is_called():
    "A new function with shapes in its docstring gets a case, or takes the place of one that got one."
    parts = [importlib.import_module(f"moe_redistribution.{n}")
             for n in ("models", "training", "instruments", "language", "opened")]
    rooms = [importlib.import_module(f"{p.__name__}.{m.name}") for p in parts for m in pkgutil.iter_modules(p.__path__)]
    functions = {f"{room.__name__}.{n}": inspect.unwrap(f) for room in rooms for n, f in vars(room).items() if n in
                 getattr(room, "__all__", ()) and inspect.isfunction(f) and f.__doc__}
    called = {inspect.unwrap(f) for f, *_ in CASES}
    left = sorted(n for n, f in functions.items() if f not in called and promised(f)[1])
    assert len(left) <= NOT_CALLED, left
