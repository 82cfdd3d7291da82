"""Routers that take the place of a transformers model's own."""
from copy import deepcopy

import pytest
import torch

from moe_redistribution.opened.opened import LanguageModel
from moe_redistribution.instruments.trace import trace
from moe_redistribution.opened.families import FAMILIES, tiny_model
from moe_redistribution.language.routers import (OWN_ROUTERS, after_step, chosen_experts, loss_with_balance, own_routers,
                                                 put_router, settle)
from moe_redistribution.language.small import next_token_loss, small_model
from moe_redistribution.language.training import _LanguageRecipe, _LanguageTraining, train_part
from moe_redistribution.training.store import Store
from moe_redistribution.training.study import Desk, Preset, Study

TOKENS = torch.randint(0, 50, (8, 13), generator=torch.Generator().manual_seed(1))

def mixture(word="", k=1):
    model = small_model("qwen3_moe", 50, 1, d=16, h=8, heads=2, E=4, k=k, T=16, norm_topk_prob=True)[0]
    return put_router(model, word, 1) if word else model

def gate(model, l=0): return model.model.layers[l].mlp.gate

def same(a, b):
    other = b.state_dict()
    for n, x in a.state_dict().items(): assert torch.equal(x, other[n]), n

@pytest.mark.parametrize("word", OWN_ROUTERS)
def test_no_router_sees_what_comes_after_a_token(word):
    model, other = mixture(word).eval(), TOKENS.clone()
    other[:, -1] = (other[:, -1] + 7) % 50
    with torch.no_grad(): a, b = (model(input_ids=x).logits for x in (TOKENS, other))
    torch.testing.assert_close(a[:, :-1], b[:, :-1])
    assert not torch.allclose(a[:, -1], b[:, -1])

@pytest.mark.parametrize("word", OWN_ROUTERS)
def test_a_training_that_was_stopped_goes_on_to_the_same_bits(word):
    def training():
        return _LanguageTraining(mixture(word), _LanguageRecipe(6, looks=1), next_token_loss, after_step)
    whole, first, second = training(), training(), training()
    for t in (whole, first):
        for _ in range(3): t.one_step(TOKENS)
        if word == "settling": settle(t.model, TOKENS[:, :-1])                          # from here on from a table
    for _ in range(3): whole.one_step(TOKENS)
    tensors, info = first.state()
    second.take_up({n: t.clone() for n, t in tensors.items()}, deepcopy(info))
    for _ in range(3): second.one_step(TOKENS)
    same(whole.model, second.model)
    if word == "settling":
        kept = [chosen_experts(t.model, TOKENS[:, :-1]) for t in (first, second)]
        assert all(torch.equal(*(k[l] for k in kept)) for l in kept[0])

@pytest.mark.parametrize("word", ["biased", "rehashed"])
def test_a_part_that_is_read_again_has_what_its_routers_remember(word, tmp_path):
    study = Study("again", "", {"small": Preset("", {"a": (1,)})}, lambda *a: None, lambda *a: 1.)
    desk, models = Desk(study.job("small", "a", (1,)), Store(tmp_path)), [mixture(word), mixture(word)]
    for m in models: train_part(desk, "main", m, lambda step: TOKENS, 3, looks=1, after_backward=after_step)
    same(*models)
    assert not torch.equal(*(next(gate(m).buffers()) for m in (models[1], mixture(word))))     # and they had moved

@pytest.mark.parametrize("word", [w for w in OWN_ROUTERS if w != "inputs"])
def test_a_token_after_a_cache_has_the_router_of_its_place_in_the_whole_text(word):
    model = mixture(word).eval()
    with torch.no_grad():
        whole, begun = model(input_ids=TOKENS).logits, model(input_ids=TOKENS[:, :-2], use_cache=True)
        rest = model(input_ids=TOKENS[:, -2:], past_key_values=begun.past_key_values, use_cache=True).logits
    torch.testing.assert_close(rest, whole[:, -2:])

def test_sigmoids_weigh_experts_as_transformers_deepseek_v3_does():
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    own, x = gate(mixture("biased", k=2)), torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(2))
    own.bias.copy_(torch.tensor([.3, -.2, .1, 0.])), own.weight.data.mul_(20)
    block = DeepseekV3MoE(DeepseekV3Config(hidden_size=16, moe_intermediate_size=8, n_routed_experts=4,
                                           num_experts_per_tok=2, n_group=1, topk_group=1, norm_topk_prob=True,
                                           routed_scaling_factor=1.))
    block.gate.weight.data, block.gate.e_score_correction_bias.data = own.weight.data.clone(), own.bias.clone()
    seen = []
    block.experts.forward = lambda hidden, index, weights: seen.append((weights, index)) or torch.zeros_like(hidden)
    with torch.no_grad(): block(x), seen.append(own(x)[1:])
    one, two = (torch.zeros(9, 4).scatter(1, index, weights) for weights, index in seen)
    torch.testing.assert_close(one, two)

def test_each_expert_takes_the_texts_that_suit_it_best_at_each_position():
    model = mixture("expert_choice")
    seen = []
    gate(model).register_forward_hook(lambda m, args, out: seen.append(out))
    with torch.no_grad(): model(input_ids=TOKENS)
    scores, weights = (x.view(8, 13, 4) for x in seen[0][:2])
    for t, e in [(3, 0), (7, 2), (12, 3)]:
        best = sorted(range(8), key=lambda b: -scores[b, t, e])[:2]
        assert weights[:, t, e].nonzero().flatten().tolist() == sorted(best)
        torch.testing.assert_close(weights[best, t, e], scores[best, t, e])

def test_a_hash_hears_the_tokens_of_its_own_pass_and_refuses_one_without():
    model, opened = mixture("hashed"), LanguageModel(mixture("hashed"))
    with torch.no_grad(): one = model(input_ids=TOKENS[:3]).logits
    torch.testing.assert_close(opened.run(TOKENS)[0][:3], one)                        # opened, it says the same
    with pytest.raises(RuntimeError, match="give input_ids"): model(inputs_embeds=torch.zeros(3, 13, 16))

def test_a_router_that_does_not_learn_has_no_weights_and_one_that_does_begins_as_the_familys():
    plain = mixture()
    for word in OWN_ROUTERS:
        own = dict(gate(mixture(word)).named_parameters())
        assert bool(own) == (word in ("learned", "switch", "straight", "biased", "expert_choice", "lagging", "settling",
                                 "of_token"))
        if own: assert torch.equal(own["weight"], gate(plain).weight)

def weights_of(word, k, scores):
    own = gate(mixture(word, k))
    kept, index = own.choose(scores)
    return torch.zeros_like(scores).scatter(1, index, kept)

@pytest.mark.parametrize("k", [1, 2])
def test_what_comes_straight_through_is_the_probabilitys_gradient_at_weights_that_sum_to_one(k):
    g = torch.Generator().manual_seed(3)
    scores, ask = torch.randn(9, 4, generator=g, requires_grad=True), torch.randn(9, 4, generator=g)
    straight, switch, learned = (weights_of(w, k, scores) for w in ("straight", "switch", "learned"))
    torch.testing.assert_close(straight.sum(1), torch.ones(9))
    torch.testing.assert_close(straight, learned)                                        # forwards they are the same
    mass = switch.sum(1, keepdim=True).detach()
    grads = [torch.autograd.grad(x, scores, ask, retain_graph=True)[0] for x in (straight, switch / mass)]
    torch.testing.assert_close(*grads)
    assert grads[0].abs().sum() > .1
    if k == 1: assert not learned.requires_grad                      # the main paper's router hears nothing of the task

def test_every_layer_has_a_balance_loss_of_its_own_and_even_loads_cost_one_with_any_k():
    for k in (1, 2):
        model, seen = mixture("straight", k), {}
        loss = loss_with_balance(model, .5, lambda logits, tokens: logits.new_zeros(()))
        for l, m in enumerate(own_routers(model)):
            m.weight.data.mul_(30)
            m.register_forward_hook(lambda m, args, out, l=l: seen.update({l: out}))
        own = loss(model(input_ids=TOKENS).logits, TOKENS)
        each = []
        for l, (scores, _, index) in seen.items():
            shares = torch.tensor([(index == e).sum() for e in range(4)]) / index.numel()
            each.append(4 * (shares * scores.softmax(1).mean(0)).sum())
        torch.testing.assert_close(own, .5 * sum(each) / 2)
        assert each[0] > 1.01 and own.requires_grad
        deepcopy(model)                                                          # nothing of the pass is left in it
        for m in own_routers(model): m.weight.data.zero_()
        torch.testing.assert_close(loss(model(input_ids=TOKENS).logits, TOKENS), torch.tensor(.5))

@pytest.mark.parametrize("word", ["straight", "hashed", "biased"])
def test_a_swap_sends_what_an_expert_got_to_the_next_one_and_changes_no_weight(word):
    model, seen = mixture(word).eval(), []
    if word == "biased": gate(model).bias.copy_(torch.tensor([.1, -.1, 0., 0.]))
    gate(model).register_forward_hook(lambda m, args, out: seen.append(out))
    with torch.no_grad():
        model(input_ids=TOKENS)
        for m in own_routers(model): m.swap()
        model(input_ids=TOKENS)
    torch.testing.assert_close(seen[1][2], (seen[0][2] + 1) % 4)
    torch.testing.assert_close(seen[1][1], seen[0][1])

def test_a_hash_of_the_whole_text_parts_texts_where_they_differ_and_refuses_a_cache():
    model, other, seen = mixture("inputs").eval(), TOKENS.clone(), []
    other[:, 4] = (other[:, 4] + 1) % 50
    gate(model).register_forward_hook(lambda m, args, out: seen.append(out[2].view(8, -1)))
    with torch.no_grad():
        for x in (TOKENS, other): model(input_ids=x)
        begun = model(input_ids=TOKENS[:, :-2], use_cache=True)
    assert torch.equal(seen[0][:, :4], seen[1][:, :4]) and (seen[0][:, 4:] != seen[1][:, 4:]).float().mean() > .5
    with pytest.raises(RuntimeError, match="use_cache"):
        model(input_ids=TOKENS[:, -2:], past_key_values=begun.past_key_values, use_cache=True)

@pytest.mark.parametrize("family", ["olmoe", "deepseek_v4", "gpt_oss", "afmoe",
                                    *(pytest.param(f, marks=pytest.mark.audit) for f in FAMILIES
                                      if f not in ("olmoe", "deepseek_v4", "gpt_oss", "afmoe"))])
def test_a_hash_stands_in_any_family_and_is_seen_there_or_the_family_keeps_its_routers(family):
    model, ids = tiny_model(family), torch.randint(0, 50, (3, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(): was = model(input_ids=ids).logits
    try: put_router(model, "hashed", 1)
    except ValueError as e:
        assert "model" in str(e)
        with torch.no_grad(): return torch.testing.assert_close(model(input_ids=ids).logits, was)
    l, chosen = max((said := chosen_experts(model, ids))), said
    gates = trace(LanguageModel(model), ids, keep=[f"L{l}.gates"])[f"L{l}.gates"][0].flatten(0, -2)
    sets = torch.zeros_like(gates).scatter(1, chosen[l], 1)
    assert torch.equal(gates != 0, sets != 0)
    for t in ids.unique(): assert len(sets[ids.flatten() == t].unique(dim=0)) == 1              # by the token alone
