"""The fast loss is the plain loss, to rounding in double precision, for every variant and every routing."""
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch.utils.flop_counter import FlopCounterMode

from moe_redistribution.training import engine
from moe_redistribution.models import ffn as experts, population as models
from moe_redistribution.models.condition import condition
from moe_redistribution.training.engine import fast_loss, flops, products
from moe_redistribution.models.ffn import dispatch, ffn_shapes
from moe_redistribution.models.population import init
from moe_redistribution.tasks.data import full_batch
from moe_redistribution.tasks.task import get_task
from tiers import first

ADD7 = get_task("add7")
VARIANTS = {"ffn": "add7/ffn-h40-silu", "glu": "add7/glu-h24-silu", "moe": "add7/moe-e4k1-h40-silu",
            "moe_glu": "add7/moe_glu-e4k1-h24-silu", "top-2": "add7/moe-e4k2-h40-silu",
            "switch": "add7/moe-e4k1-h40-silu+switch", "top-2 switch": "add7/moe-e4k2-h40-silu+switch",
            "frozen": "add7/moe-e4k1-h40-silu+frozen", "by token": "add7/moe-e4k1-h40-silu+tokens",
            "by token, top-2": "add7/moe_glu-e4k2-h24-silu+tokens+norm", "by input": "add7/moe-e4k1-h40-silu+inputs",
            "shuffled": "add7/moe-e4k1-h40-silu+shuffled", "redrawn": "add7/moe-e4k1-h40-silu+redrawn",
            "by input, norm": "add7/moe_glu-e4k1-h24-silu+inputs+norm", "one expert": "add7/moe-e1k1-h40-silu",
            "norm": "add7/ffn-h40-silu+norm", "norm moe": "add7/moe-e4k1-h40-silu+norm", "gelu": "add7/glu-h24-gelu",
            "relu": "add7/moe_glu-e4k2-h24-relu", "no_ffn": "add7/no_ffn", "wide": "add7/ffn-h40-silu+d96",
            "layers": "add7/moe-e2k1-h8-silu+L2"}

def population(name, n_seeds=2):
    "Weights in double precision. Norms and biases are drawn too, or errors in them would hide behind ones."
    c, g = condition(name), torch.Generator().manual_seed(1)
    params = {n: v.double() for n, v in init(c, [torch.Generator().manual_seed(s) for s in range(n_seeds)]).items()}
    return {n: v + .1 * torch.randn(v.shape, generator=g).double() for n, v in params.items()}

@pytest.mark.parametrize("name", VARIANTS.values(), ids=VARIANTS)
def test_eliminated_model_is_naive_model(name):
    "Both losses and every gradient, each seed on batches of its own."
    params = population(name, 3)
    for v in params.values(): v.requires_grad_()
    at = torch.randint(0, 1000, (3, 40), generator=torch.Generator().manual_seed(2))
    weight = torch.tensor([1., .5, 2.]).double()                         # or a gradient could land in another seed
    def losses_and_gradients(f):
        task, aux = f(params, ADD7.tokens[at], ADD7.targets[at], name)
        objective = (weight * (task + .3 * aux)).sum()
        return task, aux, torch.autograd.grad(objective, [*params.values()], allow_unused=True, materialize_grads=True)
    (task, aux, gradients), (task_plain, aux_plain, plain) = map(losses_and_gradients, (fast_loss, models.loss))
    torch.testing.assert_close(task, task_plain, rtol=0, atol=1e-10)
    torch.testing.assert_close(aux, aux_plain, rtol=0, atol=1e-10)
    for n, a, b in zip(params, gradients, plain):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=lambda m: f"{n}: {m}")

OTHERS = [f"{task}/{v}" for task in ("modadd", "hist") for v in
          ("ffn-h24-gelu+d32", "glu-h24-silu+d32+norm", "moe-e4k1-h24-gelu+d32", "moe-e4k1-h24-gelu+d32+switch",
           "moe_glu-e4k2-h24-gelu+d32", "moe-e2k1-h8-relu+d32+norm", "no_ffn+d32")]

@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("chunk", [10**9, 70])
def test_gradients_of_a_full_batch_are_those_of_the_naive_model_whole_or_in_chunks(name, chunk, monkeypatch):
    "The balance loss too, at a λ where a wrong count of tokens in a chunk would show."
    monkeypatch.setattr(engine, "CHUNK", dict(dense=chunk, routed=chunk))
    c = condition(name + ("+lambda1" if "moe" in name else ""))
    t, params = get_task(c.task), population(name, 1)
    at = torch.randperm(len(t), generator=torch.Generator().manual_seed(3))[:57][None]
    loss, grads = engine.gradients(params, t.tokens[at], t.targets[at], c)
    for v in params.values(): v.requires_grad_()
    task_loss, aux = models.loss(params, t.tokens[at], t.targets[at], c)
    plain = torch.autograd.grad((task_loss + c.balance * aux).sum(), [*params.values()], allow_unused=True)
    torch.testing.assert_close(loss, task_loss.detach(), rtol=0, atol=1e-10)
    for (n, a), b in zip(grads.items(), plain):
        assert (a is None) == (b is None), n
        if a is not None: torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=lambda m: f"{n}: {m}")

@pytest.mark.parametrize("name", ["add7/ffn-h40-silu", "add7/moe-e4k1-h40-silu"])
def test_seeds_that_do_not_fit_together_go_one_after_the_other_and_get_what_they_get_alone(name, monkeypatch):
    c, params, t = condition(name), population(name, 3), get_task("add7")
    tokens, targets = (x[None, :32].expand(3, -1, -1) for x in (t.tokens, t.targets))
    monkeypatch.setattr(engine, "CHUNK", dict(dense=200, routed=200))              # of 32 · 5 read-outs one seed's fit
    losses, grads = engine.gradients(params, tokens, targets, c)
    for s in range(3):
        loss, own = engine.gradients({n: v[s:s + 1] for n, v in params.items()}, tokens[s:s + 1], targets[s:s + 1], c)
        assert losses[s] == loss[0]
        assert all(own[n] is None is grads[n] or own[n][0].equal(grads[n][s]) for n in own)

def test_dropout_leaves_the_mean_gradient_near_the_one_without_and_its_masks_come_from_the_seed():
    c = condition("modadd/ffn-h24-gelu+d32+drop0.1")
    t, params = get_task("modadd"), population("modadd/ffn-h24-gelu+d32", 2)
    tokens, targets = t.tokens[None, :500].expand(2, -1, -1), t.targets[None, :500].expand(2, -1, -1)
    draw = lambda *seeds: engine.gradients(params, tokens, targets, c,
                                           generators=[torch.Generator().manual_seed(s) for s in seeds])
    first, again, other = draw(1, 2)[0], draw(1, 2)[0], draw(1, 3)[0]
    assert torch.equal(first, again) and first[0] == other[0] and first[1] != other[1]
    clean = engine.gradients(params, tokens, targets, condition("modadd/ffn-h24-gelu+d32"))
    thinned = torch.stack([draw(2 * i, 2 * i + 1)[1]["W_U"] for i in range(40)])
    gap = lambda grad: ((grad - clean[1]["W_U"]).norm() / clean[1]["W_U"].norm()).item()
    assert gap(thinned[0]) > .02 and gap(thinned.mean(0)) < .7 * gap(thinned[0])      # forty draws average out

def every_expert(p, x, chosen, weight, c):
    "What dispatch must equal: all experts on all tokens, then a weighted sum over the chosen ones."
    up = torch.einsum("snd,sedw->snew", x, p["W_up"])
    hidden = torch.nn.functional.silu(torch.einsum("snd,sedw->snew", x, p["W_gate"])) * up if c.gated else \
        torch.nn.functional.silu(up + p["b_up"][:, None])
    out = torch.einsum("snew,sewd->sned", hidden, p["W_down"]) + (0 if c.gated else p["b_down"][:, None])
    mine = torch.nn.functional.one_hot(chosen, c.n_experts).to(x.dtype)             # (s, n, k, e)
    weight = mine.new_ones(chosen.shape) if weight is None else weight
    return torch.einsum("sned,snke,snk->snd", out, mine, weight)

@st.composite
def routings(draw):
    "Seeds, tokens, experts, k, whether gates are weighted, and which distinct experts each token is sent to."
    S, N, E = draw(st.integers(1, 3)), draw(st.integers(1, 12)), draw(st.integers(1, 5))
    k = draw(st.integers(1, E))
    order = st.permutations(range(E)).map(lambda p: p[:k])
    chosen = draw(st.lists(st.lists(order, min_size=N, max_size=N), min_size=S, max_size=S))
    return E, k, draw(st.booleans()), chosen

@settings(max_examples=60)
@given(routings(), st.sampled_from(["moe", "moe_glu"]))
@example((3, 1, False, [[[0], [2], [0], [2]]]), "moe")                              # an expert without a token
@example((4, 1, False, [[[3]] * 6, [[0], [1], [2], [3], [0], [1]]]), "moe_glu")     # one seed: all to one expert
@example((4, 2, True, [[[3, 1], [1, 3], [0, 1]]]), "moe")                           # two experts a token
def test_sorted_dispatch_is_dense_dispatch(routing, variant):
    "Output and gradients with respect to the tokens, the gate weights and every expert."
    E, k, weighted, chosen = routing
    c, chosen = condition(f"add7/{variant}-e{E}k{k}-h{3 * E}-silu+d16"), torch.tensor(chosen)
    g = torch.Generator().manual_seed(3)
    leaf = lambda *shape: torch.randn(shape, generator=g).double().requires_grad_()
    S, N = chosen.shape[:2]
    p = {n: leaf(S, *shape[1:]) for n, shape in ffn_shapes(c).items() if n != "W_router"}
    x, weight, out_grad = leaf(S, N, 16), leaf(S, N, k) if weighted else None, leaf(S, N, 16).detach()
    def outcome(f):
        out = f(p, x, chosen, weight, c)
        return out, *torch.autograd.grad(out, [x, *p.values()] + [weight] * weighted, out_grad)
    expected = outcome(every_expert)
    for way in (experts._sorted_experts, experts._dense_experts):                                  # on a CPU, on a GPU
        for a, b in zip(outcome(partial(dispatch, way=way)), expected):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)

@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("library", ["oneDNN", "MKL"])
def test_a_dense_layer_is_the_product_and_its_gradient_whatever_library_multiplies(library, bias, monkeypatch):
    "Strided inputs and outputs too; in double precision, where there is one library only, to 1e-12."
    if library == "MKL": monkeypatch.setattr(experts, "ONEDNN", None)
    for dtype, near in ((torch.float32, 2e-4), (torch.float64, 1e-12)):
        g = torch.Generator().manual_seed(1)
        leaf = lambda *shape: torch.randn(shape, generator=g).to(dtype).requires_grad_()
        w, b, wide, back = (leaf(24, 40), leaf(40) if bias else None, leaf(24, 500),
                            torch.randn(40, 500, generator=g).to(dtype))
        x, leaves = wide.T, [wide, w] + [b] * bias
        got, want = experts.Dense.apply(x, w, b), x @ w + (b if bias else 0)
        torch.testing.assert_close(got, want, rtol=0, atol=near)
        for mine, theirs in zip(*(torch.autograd.grad(y, leaves, back.T) for y in (got, want))):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=10 * near)

@pytest.mark.parametrize("way", [experts._sorted_experts, experts._dense_experts])
@pytest.mark.parametrize("sick", [0, 1, 2])
def test_dispatch_keeps_a_nan_in_its_seed(sick, way):
    c, g = condition("add7/moe-e4k1-h12-silu+d16"), torch.Generator().manual_seed(3)
    p = {n: torch.randn(3, *s[1:], generator=g).requires_grad_() for n, s in ffn_shapes(c).items() if n != "W_router"}
    x, chosen = torch.randn(3, 20, 16, generator=g), torch.randint(0, 3, (3, 20, 1), generator=g)     # expert 3 is idle
    x[sick] = torch.nan
    out = dispatch(p, x, chosen, None, c, way)
    gradients = torch.autograd.grad(out.square().sum(), list(p.values()))
    assert [v.isfinite().all().item() for v in out] == [s != sick for s in range(3)]
    for grad in gradients: assert [v.isfinite().all().item() for v in grad] == [s != sick for s in range(3)]

SMALL_BATCHES = [VARIANTS[v] for v in ("ffn", "glu", "no_ffn", "moe", "moe_glu", "top-2")]
FULL_BATCHES = [f"{task}/{v}" for task in ("modadd", "hist") for v in
                ("ffn-h24-gelu+d32", "glu-h24-silu+d32", "moe-e4k1-h24-gelu+d32", "moe-e4k2-h24-gelu+d32",
                 "moe_glu-e4k1-h24-gelu+d32+norm", "no_ffn+d32")]

@pytest.mark.parametrize("plain", [True, False], ids=["plain", "fast"])
@pytest.mark.parametrize("name", first([*SMALL_BATCHES, FULL_BATCHES[2], FULL_BATCHES[6]], SMALL_BATCHES + FULL_BATCHES))
def test_the_flop_formula_is_what_torch_counts(name, plain, monkeypatch):
    """Exactly for plain dense models; a router, tables and padding come on top of the floor that the formula states, and
    of a full batch scores may be fewer than one per example."""
    monkeypatch.setattr(experts, "ONEDNN", None)                    # the counter knows no operator of oneDNN
    c = condition(name)
    t, loss = get_task(c.task), models.loss if plain else fast_loss
    at, params = torch.arange(c.batch or full_batch(t))[None] % len(t), init(c, [torch.Generator().manual_seed(1)])
    with FlopCounterMode(display=False) as counter, torch.no_grad(): loss(params, t.tokens[at], t.targets[at], c)
    floor = flops(c, plain=plain) / 3                                                        # a third: no backward here
    if not (plain or c.batch):                 # the scores of all pairs of rows are fewer than those of 10,000 examples
        _, b, m, k, n = next(p for p in products(c) if p[0] == "scores")
        floor -= max(0, 2 * k * (b * m * n - c.n_heads * (t.n_ctx * t.d_vocab)**2))
    assert 1 <= counter.get_total_flops() / floor <= (1 if plain and not c.routed else 1.4)
