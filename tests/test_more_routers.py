"""Routers of other papers do what those papers say."""
import pytest
import torch
from moe_redistribution.models.routers import Router

from moe_redistribution.instruments.subject import subject
from moe_redistribution.instruments.trace import trace
from moe_redistribution.language.small import with_transformers
from moe_redistribution.models.condition import condition
from moe_redistribution.models.ffn import gates, route
from moe_redistribution.models.population import forward, init, loss
from moe_redistribution.tasks.task import get_task
from moe_redistribution.training.engine import fast_loss
from moe_redistribution.training.loop import activations_of, init_members, train_interval, unflatten
from toys import untrained

WORDS = ("hashed", "placed", "biased", "expert_choice")

def test_a_biased_router_weighs_experts_as_transformers_deepseek_v3_does():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    hf, c, g = with_transformers(), condition("add7/moe-e4k2-h256-silu+biased"), torch.Generator().manual_seed(0)
    x, W, bias = torch.randn(1, 1, 50, 64, generator=g), torch.randn(64, 4, generator=g), torch.randn(4, generator=g)
    config = hf.DeepseekV3Config(hidden_size=64, moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2,
                                 n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.)
    block = DeepseekV3MoE(config)
    block.gate.weight.data, block.gate.e_score_correction_bias.data = W.T.contiguous(), bias
    seen = []
    block.experts.forward = lambda hidden, index, weights: seen.append((index, weights)) or torch.zeros_like(hidden)
    with torch.no_grad(): block(x[0])
    index, weights = seen[0]
    _, own, balance = route(torch.cat([W, bias[None]])[None], x, c)
    torch.testing.assert_close(own[0, 0], torch.zeros(50, 4).scatter(1, index, weights))
    assert balance.tolist() == [0] and (own[0, 0] > 0).sum(1).eq(2).all()

def test_the_bias_of_an_expert_with_too_much_falls_at_every_layer_and_nothing_else_moves():
    c = condition("add7/moe-e4k1-h256-silu+biased+L2")
    params, tokens = untrained(c), get_task("add7").tokens[None, :200].expand(2, -1, -1)
    before = {n: v.clone() for n, v in params.items()}
    forward(params, tokens, c, sink=(sink := {}))
    c.routing.after(params, lambda: activations_of(params, tokens, c), c)
    for l in range(2):
        load = (sink[f"L{l}.gates"] > 0).float().mean((1, 2))
        moved = (params["W_router"] - before["W_router"])[:, l, -1]
        torch.testing.assert_close(moved, .001 * (load.mean(1, keepdim=True) - load).sign())
    before["W_router"][:, :, -1] = params["W_router"][:, :, -1]
    assert all(torch.equal(v, before[n]) for n, v in params.items())

def test_an_expert_that_chooses_takes_the_inputs_that_suit_it_best_at_each_position():
    c = condition("add7/moe-e4k1-h256-silu+expert_choice")
    forward(untrained(c), get_task("add7").tokens[:40], c, sink=(sink := {}))
    probs, own = sink["router_probs"], sink["gates"]
    for s, t, e in [(0, 3, 0), (1, 4, 2), (0, 6, 3)]:           # before, inputs are alike
        best = sorted(range(40), key=lambda b: -probs[s, b, t, e])[:10]
        assert own[s, :, t, e].nonzero().flatten().tolist() == sorted(best)
        torch.testing.assert_close(own[s, best, t, e], probs[s, best, t, e])

def test_a_place_gives_every_token_one_expert():
    t, c = get_task("add7"), condition("add7/moe-e4k1-h256-silu+placed")
    forward(untrained(c), t.tokens, c, sink=(sink := {}))
    assert (sink["gates"].argmax(-1) == torch.arange(t.n_ctx) % 4).all()

@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("word", WORDS)
def test_each_is_trained_by_the_gradient_of_the_plain_pass(word, k):
    c, t = condition(f"add7/moe-e4k{k}-h256-silu+{word}"), get_task("add7")
    params, at = untrained(c), (t.tokens[None, :64].expand(2, -1, -1), t.targets[None, :64].expand(2, -1, -1))
    for a, b in zip(fast_loss(params, *at, c), loss(params, *at, c)): torch.testing.assert_close(a, b)
    members = init_members(c, [1, 2], "paired")
    first = unflatten(members.w.clone(), c)["W_router"]
    before, after = train_interval(members, 5), train_interval(members, 5)
    moved = (unflatten(members.w, c)["W_router"] - first).abs()
    assert (after < before).all() and moved.any() == (word in WORDS[2:])
    if word in WORDS[2:]: assert moved[:, 0, :64].any()                            # the map learns, not the bias alone

def test_a_token_that_no_expert_takes_gets_nothing_from_the_ffn():
    c = condition("add7/moe-e4k1-h256-silu+expert_choice")
    forward(untrained(c), get_task("add7").tokens[:40], c, sink=(sink := {}))
    none = (sink["gates"] == 0).all(-1)
    assert none.any() and not sink["ffn_out"][none].any() and sink["ffn_out"][~none].any(-1).all()
    assert not gates(sink["router_probs"], c)[none].eq(0).all(-1).any()                  # the usual rule gives each one

@pytest.mark.parametrize("k", [1, 2])
def test_straight_through_has_the_usual_weights_and_the_gradient_of_the_kept_probabilities(k):
    c, usual = (condition(f"add7/moe-e4k{k}-h256-silu{w}") for w in ("+straight", ""))
    params, x = untrained(c), torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(1))
    W = params["W_router"][:, 0].clone().requires_grad_()
    probs, own, _ = route(W, x, c)
    torch.testing.assert_close(own, gates(probs, usual))
    ask = torch.randn(own.shape, generator=torch.Generator().manual_seed(2))
    kept = probs * (own > 0)
    one = torch.autograd.grad(own, W, ask, retain_graph=True)[0]
    torch.testing.assert_close(one, torch.autograd.grad(kept / kept.sum(-1, keepdim=True).detach(), W, ask)[0])
    assert one.abs().sum() > .1

@pytest.mark.parametrize("name", ["moe-e4k1-h256-silu+straight", "moe_glu-e4k2-h256-silu+straight",
                                  "moe-e4k1-h64-gelu+frozen+straight"])
def test_the_short_way_has_the_loss_and_the_gradients_of_the_plain_one_for_straight_weights(name):
    c, t = condition(f"add7/{name}"), get_task("add7")
    params, at = untrained(c), (t.tokens[None, :64].expand(2, -1, -1), t.targets[None, :64].expand(2, -1, -1))
    found = []
    for f in (fast_loss, loss):
        own = {n: v.clone().requires_grad_() for n, v in params.items()}
        total = sum(x.sum() for x in f(own, *at, c))
        found.append((total, torch.autograd.grad(total, list(own.values()))))
    torch.testing.assert_close(*(x[0] for x in found))
    for n, a, b in zip(params, *(x[1] for x in found)): torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=n)

def test_a_frozen_straight_router_differs_from_a_learned_one_in_its_map_alone():
    words, moved = ("straight", "frozen+straight"), {}
    for w in words:
        members = init_members(c := condition(f"add7/moe-e4k1-h256-silu+{w}"), [1, 2], "paired")
        before = {n: x.clone() for n, x in unflatten(members.w, c).items()}
        first = train_interval(members, 1)
        moved[w] = first, {n: x - before[n] for n, x in unflatten(members.w, c).items()}
    (a, one), (b, two) = moved["straight"], moved["frozen+straight"]
    assert one["W_router"].any() and not two["W_router"].any()
    torch.testing.assert_close(a, b)
    for n in one:
        if n != "W_router": torch.testing.assert_close(one[n], two[n])
    for same in ("moe-e4k4-h256-silu+straight", "moe-e4k1-h256-silu+hashed+straight"):
        with pytest.raises(ValueError, match="one name for one training"): condition(f"add7/{same}")

def test_a_hash_that_is_drawn_again_has_one_expert_a_token_and_another_table_at_every_step():
    c = condition("add7/moe-e4k1-h256-silu+rehashed")
    members, tables = init_members(c, [1, 2], "paired"), []
    for _ in range(2):
        train_interval(members, 1)
        tables.append(unflatten(members.w, c)["W_router"].clone())
    assert not torch.equal(*tables) and not torch.equal(tables[0][0], tables[0][1])
    for table in tables: assert torch.equal(table, table[:, :, :1].expand_as(table))               # at every position

def test_several_experts_of_a_hash_have_equal_weights():
    c, t = condition("add7/moe-e4k2-h256-silu+hashed"), get_task("add7")
    forward(untrained(c), t.tokens, c, sink=(sink := {}))
    assert set(sink["gates"].unique().tolist()) == {0, .5}

def test_a_model_whose_experts_choose_is_measured_on_all_inputs_or_not_at_all():
    "On the first 500 of the 1,000 inputs 14 to 21 % of tokens of three untrained models got other experts, and nothing said so."
    c = condition("add7/moe-e4k1-h8-silu+expert_choice")
    s = subject(init(c, [torch.Generator().manual_seed(1)]), c)
    some = s.task.tokens[:500]
    for ask in (s.run, lambda x: s.predict(tokens=x), lambda x: s.read_out(tokens=x), lambda x: trace(s.params, x, c)):
        with pytest.raises(ValueError, match="expected all 1,000 inputs of add7, since its experts choose .* got 500; fix: "): ask(some)
    with pytest.raises(ValueError, match="got 500; fix: "): s.predict(tokens=some.repeat(2, 1))          # each of them twice
    two = subject(init(c, [torch.Generator().manual_seed(i) for i in (1, 2)]), c)
    each = torch.stack([s.task.tokens, some.repeat(2, 1)])                    # the second seed's own; it was not looked at
    for ask in (two.run, lambda x: two.predict(tokens=x)):
        with pytest.raises(ValueError, match="got 500; fix: "): ask(each)
    assert not s.side_by_side and s.predict().equal(s.predict(tokens=s.task.tokens))

def test_a_router_whose_map_is_another_s_goes_the_long_way_wherever_that_comes_from_unless_it_says_fast():
    "Overridden, inherited or mixed in: the engine leaves out what the usual rules do not need, and these are others."
    class Hot: logits = lambda self, held, x, c: 3 * Router.logits(self, held, x, c)
    class Own(Router): logits = Hot.logits
    class Mixed(Hot, Router): "By a base that is no router."
    class Below(Own): "Of one that has its own."
    class Plain(Router): "Nothing of its own."
    class Told(Hot, Router): fast = True
    assert [r.fast for r in (Own, Mixed, Below, Plain, Told)] == [False, False, False, True, True]
