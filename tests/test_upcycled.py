"""A dense model upcycled to equal experts is a mixture whose truth is known: which expert is asked decides nothing."""
import pytest
import torch

from moe_redistribution.instruments.ablation import combine_edits
from moe_redistribution.instruments.trace import trace
from moe_redistribution.opened.families import tiny_model
from moe_redistribution.opened.opened import open_model
from moe_redistribution.opened.upcycled import MIXTURE_OF, upcycled_model

TOKENS = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(3))
SIZES = {"mistral": dict(sliding_window=4), "llama": dict(tie_word_embeddings=True, head_dim=16)}
every_family = pytest.mark.parametrize("family", MIXTURE_OF)

def dense(family, **sizes): return tiny_model(family, dtype=torch.float64, **SIZES.get(family, {}) | sizes)

def mixture(model, *args, **kwargs):
    "With the library's own loop over experts: its faster ways are single precision."
    new = upcycled_model(model, *args, **kwargs)
    new.set_experts_implementation("eager")
    return new

@torch.no_grad()
def said(model): return model(input_ids=TOKENS, use_cache=False).logits

@every_family
@pytest.mark.parametrize("E, k", [(4, 2), (4, 1), (3, 3), (1, 1)])
def test_a_mixture_of_equal_experts_says_what_the_dense_model_says(family, E, k):
    model = dense(family)
    torch.testing.assert_close(said(mixture(model, E, k)), said(model), rtol=1e-5, atol=1e-5)     # weights are single

@every_family
def test_only_an_expert_that_nobody_replaces_is_missed(family):
    s = open_model(mixture(dense(family)))
    before = s.run(TOKENS)
    change = lambda edits: ((s.run(TOKENS, edits) - before).norm() / before.norm()).item()
    for how in ("route_around", "swap:E0"): assert change(combine_edits(s, {"L1.E2": how})) < 1e-6
    assert s.moved and change(combine_edits(s, {"L1.E2": "zero"})) > 1e-2
    assert (trace(s, TOKENS, keep=["L1.routes"])["L1.routes"] == 2).any()                # else nobody had been moved

@every_family
def test_without_all_its_experts_a_layer_is_the_dense_one_without_its_ffn(family):
    model = dense(family)
    s, d = open_model(mixture(model)), open_model(model)
    gone = s.run(TOKENS, combine_edits(s, {f"L1.E{e}": "zero" for e in range(4)}))
    torch.testing.assert_close(gone, d.run(TOKENS, combine_edits(d, {"L1.ffn_out": "zero"})), rtol=1e-5, atol=1e-5)

def test_routers_are_drawn_from_the_seed_and_loads_differ():
    one, same, other = (mixture(dense("llama"), seed=n) for n in (1, 1, 2))
    assert torch.equal(said(one), said(same))
    gate = lambda m: m.model.layers[0].mlp.gate.weight
    assert torch.equal(gate(one), gate(same)) and not torch.equal(gate(one), gate(other))
    routes = trace(open_model(one), TOKENS, keep=["L0.routes"])["L0.routes"]
    assert len(set(routes.flatten().bincount(minlength=4).tolist())) > 1

def test_the_dense_model_stays_as_it_was_and_the_experts_are_copies():
    model = dense("llama")
    before = said(model)
    new = mixture(model)
    with torch.no_grad(): new.model.layers[0].mlp.experts.down_proj[1] = 0
    assert torch.equal(said(model), before) and new.model.layers[0].mlp.experts.down_proj[0].any()

def test_attention_of_two_kinds_is_refused():
    model = tiny_model("qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.raises(ValueError, match="one kind of atten"): upcycled_model(model)

@pytest.mark.parametrize("E, k", [(4, 0), (0, 0)])
def test_a_token_has_some_of_the_experts(E, k):
    with pytest.raises(ValueError, match="k: expected 1 to"): upcycled_model(dense("llama"), E, k)
