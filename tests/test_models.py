"""The population transformer against plain PyTorch modules, and what an edit, a part and a gate may and may not do."""
from dataclasses import replace
import pytest
import torch
from hypothesis import given, settings, strategies as st

from moe_redistribution.models import ffn, population as models
from moe_redistribution.models.condition import condition
from moe_redistribution.models.population import (each_member, forward, init, init_one, loss,
                                                  member, predict, shapes, sites)
from moe_redistribution.tasks.task import get_task
from moe_redistribution.instruments.trace import parts, trace
from moe_redistribution.training.loop import init_members, train_interval, unflatten
from plain import PlainTransformer, load_member
from test_engine import population

ADD7 = get_task("add7")
VARIANTS = {"ffn": "add7/ffn-h40-silu", "glu": "add7/glu-h24-silu", "moe": "add7/moe-e4k1-h40-silu",
            "moe_glu": "add7/moe_glu-e4k1-h24-silu", "top-2": "add7/moe-e4k2-h40-gelu",
            "switch": "add7/moe-e4k1-h40-silu+switch", "norm": "add7/moe_glu-e4k2-h24-relu+norm",
            "no_ffn": "add7/no_ffn", "two layers": "add7/moe-e4k1-h40-silu+L2"}
each_variant = pytest.mark.parametrize("name", VARIANTS.values(), ids=VARIANTS)

def batch(n=24):
    at = torch.randint(0, 1000, (n,), generator=torch.Generator().manual_seed(2))
    return ADD7.tokens[at], ADD7.targets[at]

# ------------------------------------------------------------------------------------------- the oracle: plain modules

@each_variant
def test_population_is_plain_modules_side_by_side(name):
    "Logits, both losses and every gradient of each member, in double precision."
    params, (tokens, targets) = population(name), batch()
    for v in params.values(): v.requires_grad_()
    logits, (task, aux) = forward(params, tokens, name), loss(params, tokens, targets, name)
    (task + .3 * aux).sum().backward()
    for i in range(2):
        model = load_member(params, i, name)
        task_plain, aux_plain = model.loss(tokens, targets)
        (task_plain + .3 * aux_plain).backward()
        torch.testing.assert_close(logits[i], model(tokens)[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(task[i], task_plain, rtol=0, atol=1e-10)
        torch.testing.assert_close(aux[i], torch.as_tensor(aux_plain).double(), rtol=0, atol=1e-10)
        for n, grad in model.as_member(lambda p: torch.zeros_like(p) if p.grad is None else p.grad).items():
            torch.testing.assert_close(params[n].grad[i], grad[0], rtol=0, atol=1e-10, msg=lambda m: f"{n}: {m}")

@pytest.mark.parametrize("name", [*VARIANTS.values(), "modadd/moe_glu-e4k1-h24-gelu", "hist/ffn-h24-gelu",
                                  "hist/moe-e4k1-h24-gelu+norm"])
def test_a_seed_draws_the_weights_that_modules_made_in_the_authors_order_draw(name):
    torch.manual_seed(137)
    plain = PlainTransformer(name).as_member()
    for n, v in init_one(condition(name), torch.Generator().manual_seed(137)).items():
        torch.testing.assert_close(v, plain[n][0], rtol=1e-6, atol=1e-7, msg=lambda m: f"{n}: {m}")

@each_variant
def test_shapes_are_the_shapes_of_the_weights(name):
    drawn = init(name, [torch.Generator().manual_seed(0)])
    assert {n: tuple(v.shape[1:]) for n, v in drawn.items()} == shapes(condition(name))

@each_variant
def test_a_population_is_its_members_one_after_the_other(name):
    params, (tokens, _) = population(name, 3), batch()
    alone = torch.cat([forward(one, tokens, name) for one in each_member(params)])
    torch.testing.assert_close(alone, forward(params, tokens, name), rtol=0, atol=1e-10)
    assert len(each_member(params)) == 3 and all(len(v) == 1 for one in each_member(params) for v in one.values())
    last = member(params, 1, 2)
    assert all(torch.equal(v, params[n][1:]) for n, v in last.items()) and last.keys() == params.keys()
    assert all(torch.equal(v, params[n][2:]) for n, v in member(params, 2).items())

@settings(max_examples=15)
@given(n=st.integers(0, 999), position=st.integers(1, 7), token=st.integers(0, 11), edited=st.booleans())
def test_no_logit_depends_on_a_later_token_not_even_with_even_scores(n, position, token, edited):
    tokens = ADD7.tokens[[n, n]].clone()
    tokens[1, position] = token
    before, after = forward(PARAMS, tokens, VARIANTS["moe"], {"scores": torch.zeros_like} if edited else None).unbind(1)
    assert torch.equal(before[:, :position], after[:, :position])
    assert tokens[0].equal(tokens[1]) or not torch.equal(before[:, position:], after[:, position:])

PARAMS = population(VARIANTS["moe"])

# -------------------------------------------------------------------------------------------------------- router, gate

def test_top1_renormalised_router_gets_no_task_gradient(monkeypatch):
    "With one expert kept the authors' gate is p/p. Written out its gradient is rounding noise; ours is the constant 1."
    tokens, targets = batch(64)
    def router_gradient(name):
        params = population(name)
        params["W_router"].requires_grad_()
        task, _ = loss(params, tokens, targets, name)
        if not task.requires_grad: return torch.zeros(2)                           # no path from the router to the loss
        return torch.autograd.grad(task.sum(), params["W_router"])[0].flatten(1).norm(dim=1)
    assert (router_gradient(VARIANTS["moe"]) == 0).all()
    assert (router_gradient(VARIANTS["switch"]) > 1e-3).all()
    assert (router_gradient(VARIANTS["top-2"]) > 1e-3).all()
    def written_out(probs, c):
        kept, chosen = probs.topk(c.top_k, -1)
        return torch.zeros_like(probs).scatter(-1, chosen, kept / kept.sum(-1, keepdim=True))
    monkeypatch.setattr(ffn, "gates", written_out)
    noise = router_gradient(VARIANTS["moe"])
    assert (noise < 1e-12).all() and (noise > 0).any()                              # which Adam would turn into steps

@settings(max_examples=50)
@given(st.integers(1, 6).flatmap(lambda E: st.tuples(st.just(E), st.integers(1, E))), st.integers(0, 2**32))
def test_gates_keep_the_k_most_probable_experts(Ek, seed):
    E, k = Ek
    probs = torch.randn(40, E, generator=torch.Generator().manual_seed(seed), dtype=torch.double).softmax(-1)
    c = condition(f"add7/moe-e{E}k{k}-h{E}-silu")                   # of all experts, both gates are one condition
    renorm, switch = ffn.gates(probs, c), ffn.gates(probs, replace(c, gate="switch"))
    kept = probs >= probs.sort(-1, descending=True).values[:, [k - 1]]
    assert torch.equal(renorm > 0, kept) and torch.equal(switch, probs * kept)
    torch.testing.assert_close(renorm.sum(-1), torch.ones(40, dtype=torch.double))
    torch.testing.assert_close(renorm * switch.sum(-1, keepdim=True), switch)       # the same proportions

def test_balance_is_k_when_the_load_is_even_and_E_when_one_expert_has_all():
    even = torch.full((1, 2, 4, 4), .25)
    assert ffn.balance_loss(even, torch.eye(4).expand(1, 2, 4, 4)).item() == pytest.approx(1)
    assert ffn.balance_loss(even,
                            torch.eye(4).roll(1, 0).add(torch.eye(4)).expand(1, 2, 4, 4)).item() == pytest.approx(2)
    one = torch.tensor([1., 0, 0, 0]).expand(1, 2, 4, 4)
    assert ffn.balance_loss(one, one).item() == pytest.approx(4)

# ------------------------------------------------------------------------------------------------------ edits and parts

@each_variant
def test_an_edit_changes_its_own_site_and_what_follows_but_nothing_before_it(name):
    params, (tokens, _) = population(name), batch(4)
    clean = trace(params, tokens, name).activations
    for i, site in enumerate(order := sites(condition(name))):
        edited = trace(params, tokens, name, edits={site: lambda x: x.flip(-1)}).activations
        assert torch.equal(edited[site], clean[site].flip(-1))
        assert not torch.equal(edited["logits"], clean["logits"]), site
        assert all(torch.equal(edited[s], clean[s]) for s in order[:i]), site

@each_variant
def test_an_edit_that_gives_back_what_it_got_changes_nothing(name):
    params, (tokens, _) = population(name), batch(4)
    edits = {s: torch.clone for s in sites(condition(name))}
    assert torch.equal(forward(params, tokens, name), forward(params, tokens, name, edits))

@pytest.mark.parametrize("label", ["ffn", "glu", "moe", "moe_glu", "top-2", "switch", "norm"])
def test_zeroing_ffn_out_is_a_model_without_the_ffn(label):
    name, without = VARIANTS[label], "add7/no_ffn" + "+norm" * (label == "norm")
    params, (tokens, _) = population(name), batch()
    rest = {n: v for n, v in params.items() if n in shapes(condition(without))}
    zeroed = forward(params, tokens, name, {"ffn_out": torch.zeros_like})
    torch.testing.assert_close(zeroed, forward(rest, tokens, without), rtol=0, atol=1e-12)

@pytest.mark.parametrize("name", [*VARIANTS.values(), "add7/moe-e4k1-h40-silu+tokens",
                                  "add7/moe_glu-e4k2-h24-silu+tokens+L2", "add7/moe-e4k1-h40-silu+inputs",
                                  "add7/moe-e4k2-h40-silu+inputs+L2", "add7/moe-e4k1-h40-silu+shuffled"])
def test_predictions_are_what_the_full_forward_pass_reads_out(name):
    "Positions that nobody reads are dropped after the last attention, with and without an edit on either side of it."
    params = population(name)
    for edits in ({}, {sites(condition(name))[6]: torch.zeros_like}, {sites(condition(name))[-2]: torch.neg}):
        full = forward(params, ADD7.tokens, name, edits)[:, :, list(ADD7.read)].argmax(-1)
        assert torch.equal(predict(params, name, edits), full)

@pytest.mark.parametrize("name, site, near", [
    ("moe", "ffn_outt", "ffn_out"), ("ffn", "gates", None), ("no_ffn", "ffn_out", None),
    ("two layers", "ffn_out", "L1.ffn_out"), ("moe", "L1.ffn_out", "ffn_out"), ("moe", "L0.embed", "embed")])
def test_an_edit_that_matches_no_site_is_refused_with_the_sites(name, site, near):
    with pytest.raises(ValueError, match=f"site: expected one of embed, .*logits; got '{site}'; .*fix: ") as caught:
        forward(population(VARIANTS[name]), batch(2)[0], VARIANTS[name], {site: torch.zeros_like})
    assert near is None or f"nearest: '{near}'" in str(caught.value)

@pytest.mark.parametrize("tokens, says",
                         [([[1, 2, 3]], "[[1, 2, 3]]"), (torch.zeros(2, 3), "float32"),
                          (torch.zeros(3, dtype=int), "shape (3,)"), (torch.zeros(2, 4, dtype=int), "shape (2, 4)"),
                          (torch.tensor([[0, 0, 114]]), "to 114"), (torch.tensor([[0, -1, 113]]), "from -1"),
                          (torch.ones(2, 3, dtype=bool), "bool")])
def test_examples_that_a_task_has_not_got_are_refused_before_the_embedding(tokens, says):
    c = condition("modadd/ffn-h8-gelu+d32")
    params = init(c, [torch.Generator().manual_seed(0)])
    for use in (lambda: predict(params, c, tokens=tokens), lambda: trace(params, tokens, c)):
        with pytest.raises(ValueError, match=r"tokens: expected whole numbers from 0 to 113 of shape \(…, n, "
                           r"3\) for modadd; got .*fix: see get_task") as e:
            use()
        assert says in str(e.value)
    assert predict(params, c, tokens=torch.zeros(0, 3, dtype=int)).shape == (1, 0, 1)

@pytest.mark.parametrize("edit, got", [(lambda x: None, "() NoneType"), (lambda x: x.half(), "torch.float16"),
                                       (lambda x: x[..., :1], "(2, 2, 8, 1)")], ids=["nothing", "type", "shape"])
def test_an_edit_that_gives_another_shape_another_type_or_nothing_is_refused(edit, got):
    "Even a shape that would broadcast: the number would be wrong and nobody would know."
    with pytest.raises(ValueError,
                       match=r"edit of 'ffn_out': expected shape and type .*torch.float64; got .*; fix: ") as caught:
        forward(PARAMS, batch(2)[0], VARIANTS["moe"], {"ffn_out": edit})
    assert got in str(caught.value)

@pytest.mark.parametrize("label", [v for v in VARIANTS if v != "two layers"])
def test_parts_sum_to_logits(label):
    "Component by component, head by head, expert by expert: the terms of the residual stream add up to the read-out."
    name, (tokens, _) = VARIANTS[label], batch()
    c, params = condition(name), population(name)
    tr, n = trace(params, tokens, name), {}
    for by in ("component", "head", "expert"):
        terms = parts(tr, params, by)
        total, n[by] = sum(terms.values()), len(terms)
        if c.norm: total = models.rms_norm(total, params["w_ln_final"][:, None, None])
        torch.testing.assert_close(total @ params["W_E"].mT[:, None], forward(params, tokens, name), rtol=0, atol=1e-10)
    assert n["head"] == n["component"] + c.n_heads                                  # H0 … and b_O in place of attn_out
    assert n["expert"] == n["component"] + (c.n_experts - 1 if c.routed else 0)     # E0 … in place of ffn_out

# ------------------------------------------------------------------------------------------------- fixed tables of routes

def members_of(task, word): return init_members(condition(f"{task}/moe-e4k1-h16-silu+{word}"), [1, 2], "paired")

def routes(m, tokens=None, edits=None):
    t = m.c.get_task()
    forward(unflatten(m.w, m.c), t.tokens if tokens is None else tokens, m.c, edits, sink=(sink := {}))
    return sink["router_probs"].argmax(-1)

@pytest.mark.parametrize("task, word", [("add7", "tokens"), ("add7", "inputs"), ("add7", "shuffled"), ("modadd", "tokens"),
                                        ("modadd", "inputs"), ("modadd", "shuffled"),
                                        pytest.param("hist", "tokens", marks=pytest.mark.audit)])
def test_fixed_routes_begin_with_the_weights_of_a_frozen_router_and_no_training_moves_them_but_all_else(task, word):
    frozen, told = members_of(task, "frozen"), members_of(task, word)
    other, began = unflatten(frozen.w, frozen.c), unflatten(told.w.clone(), told.c)
    assert all(torch.equal(v, other[n]) for n, v in began.items() if n != "W_router")
    some = told.c.get_task().tokens[:200]
    before = routes(told, some)
    train_interval(told, 3)
    assert torch.equal(routes(told, some), before)
    assert {n for n, v in unflatten(told.w, told.c).items() if torch.equal(v, began[n])} == {"W_router"}

@pytest.mark.parametrize("task", ["add7", "modadd", pytest.param("hist", marks=pytest.mark.audit)])
def test_routes_by_token_are_those_of_a_frozen_router_that_cannot_see_attention(task):
    "At initialisation; then a few steps move the routes of the frozen router."
    frozen, told, tokens = members_of(task, "frozen"), members_of(task, "tokens"), get_task(task).tokens[:200]
    began = routes(frozen, tokens)
    blind, by_token = routes(frozen, tokens, {"attn_out": torch.zeros_like}), routes(told, tokens)
    assert (blind == by_token).float().mean() > .999 and not torch.equal(began, by_token)                 # ties aside
    train_interval(frozen, 3)
    assert not torch.equal(routes(frozen, tokens), began)

@pytest.mark.parametrize("task", ["add7", "modadd"])
def test_routes_by_input_are_drawn_anew_for_each_question_and_position(task):
    "Blind to token and position; answers do not change the route of their question."
    t, drawn = get_task(task), members_of(task, "inputs")
    before, read = routes(drawn), min(t.read)
    share = torch.nn.functional.one_hot(before[:, :, read:], 4).double().mean(1)
    assert (share - .25).abs().max() < 5 * (.25 * .75 / len(t)) ** .5             # five standard errors, every position
    for j in range(read):                                                           # and whatever the question's digits
        for digit in t.tokens[:, j].unique()[:10]:
            some = before[0][t.tokens[:, j] == digit][:, read:]
            assert abs((some == 0).double().mean() - .25) < 5 * (.25 * .75 / some.numel()) ** .5
    other = t.tokens.clone()
    other[:, read:] = other[:, read:].roll(1, 0)                                         # another number's answer
    assert torch.equal(routes(drawn, other), before)

@pytest.mark.parametrize("task", ["add7", "modadd"])
def test_shuffled_routes_have_the_loads_of_those_by_token_at_every_position_and_do_not_know_the_token(task):
    t, E, one_hot = get_task(task), 4, torch.nn.functional.one_hot
    a, b = (routes(members_of(task, word)) for word in ("tokens", "shuffled"))
    assert torch.equal(one_hot(a, E).sum(1), one_hot(b, E).sum(1))
    for j in range(t.n_ctx):
        digits, share = t.tokens[:, j].unique(), one_hot(b[0, :, j], E).double().mean(0)
        if len(digits) == 1: continue
        for digit in digits[:10]:
            some = one_hot(b[0][t.tokens[:, j] == digit, j], E).double()
            assert ((some.mean(0) - share).abs() <= 5 * (share * (1 - share) / len(some)) ** .5 + 1e-9).all()

@pytest.mark.parametrize("stream", ["paired", "authors"])
def test_redrawn_routes_begin_as_by_input_and_are_others_at_every_step_the_same_alone_and_in_company(stream):
    names = [f"add7/moe-e4k1-h16-silu+{o}" for o in ("inputs", "redrawn")]
    drawn, anew = (init_members(condition(n), [1, 2], stream) for n in names)
    table = lambda m: unflatten(m.w, m.c)["W_router"].clone()
    assert torch.equal(drawn.w, anew.w)
    seen = [table(anew)]
    for step in range(3):
        train_interval(anew, 1); seen.append(table(anew))
        same = torch.stack([(a.argmax(-1) == seen[-1].argmax(-1)).double().mean() for a in seen[:-1]])
        assert (same - .25).abs().max() < .02                                  # as often as four experts meet by chance
    assert not torch.equal(seen[-1][0], seen[-1][1])                           # each seed its own
    alone = init_members(condition(names[1]), [2], stream); train_interval(alone, 3)
    assert torch.equal(table(alone)[0], seen[-1][1])

def test_routes_by_input_need_a_question_before_the_answers():
    with pytest.raises(ValueError, match="a question before the answers.*hist, which is read at every position; fix: "
                       "write \\+tokens"):
        condition("hist/moe-e4k1-h64-gelu+inputs")

def test_a_trace_keeps_everything_or_what_it_is_asked_for_and_leaves_nothing_behind():
    c, tokens = VARIANTS["moe"], get_task("add7").tokens[:3]
    before = forward(PARAMS, tokens, c)
    kept = lambda **asked: list(trace(PARAMS, tokens, c, **asked).activations)
    assert kept() == sites(condition(c)) and kept(keep=[]) == []
    assert kept(keep=["ffn_out"], edits={"z": torch.zeros_like}) == ["ffn_out"]
    assert torch.equal(before, forward(PARAMS, tokens, c))
