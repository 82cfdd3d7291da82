"""Models in the authors' form, computed here from their state dictionaries alone, say what ours say once they are
read."""
import pytest
import torch
import torch.nn.functional as F

from moe_redistribution.models.authors import from_authors, _read_condition, to_authors
from moe_redistribution.models.condition import condition
from moe_redistribution.models.population import forward, init
from moe_redistribution.models.routers import Router
from moe_redistribution.models.variants import Variant
from moe_redistribution.basics.registry import all_or_nothing, register
from moe_redistribution.tasks.task import get_task

NAMES = [f"{task}/{shape}-{act}{norm}" for task, widths in (("add7", (24, 12)), ("modadd", (16, 20)), ("hist", (8, 4)))
         for shape, act in ((f"ffn-h{widths[0]}", "silu"), (f"glu-h{widths[1]}", "gelu"),
                            (f"moe-e4k1-h{widths[0]}", "gelu"),
                            (f"moe-e4k2-h{widths[0]}", "silu"), (f"moe_glu-e2k1-h{widths[1]}", "relu"))
         for norm in ("", "+norm")]

def state_of(name, seed=0):
    """A state dictionary with random weights, shaped as their classes shape it: linear layers (out, in), one list of
    experts."""
    c, t, g = condition(name), get_task(name.split("/")[0]), torch.Generator().manual_seed(seed)
    d, w = c.d_model, c.d_expert
    shapes = {"vocab.weight": (t.d_vocab, d), "pos_embed.weight": (128 if t.name == "add7" else t.n_ctx, d)}
    shapes |= {f"atn.{p}_proj.weight": (d, d) for p in "qkvo"} | {"atn.o_proj.bias": (d,)}
    if not t.tied:
        shapes["unembed.weight"] = (t.d_vocab_out, d)
    if c.norm:
        shapes |= {f"{n}_norm.weight": (d,) for n in ("atn", "ffn", "out")}
    if c.routed:
        shapes["ffn.router.weight"] = (c.n_experts, d)
    for prefix in [f"ffn.experts.{e}." for e in range(c.n_experts)] if c.routed else ["ffn."]:
        layers = ({"gate_proj": (w, d), "up_proj": (w, d), "down_proj": (d, w)} if c.gated
                  else {"up_proj": (w, d), "down_proj": (d, w)})
        shapes |= {f"{prefix}{n}.weight": s for n, s in layers.items()}
        if not c.gated:
            shapes |= {f"{prefix}{n}.bias": s[:1] for n, s in layers.items()}
    return {n: torch.randn(s, generator=g) * .3 for n, s in shapes.items()}

def logits_of(s, tokens, c, causal):
    "Their forward pass in a few lines, from the names alone."
    lin = lambda n, x: F.linear(x, s[n + ".weight"], s.get(n + ".bias"))
    norm = lambda n, x: F.rms_norm(x, x.shape[-1:], s[n + ".weight"]) if n + ".weight" in s else x
    act = getattr(F, c.activation)

    def expert(p, x):
        h = act(lin(p + "gate_proj", x)) * lin(p + "up_proj", x) if c.gated else act(lin(p + "up_proj", x))
        return lin(p + "down_proj", h)
    x = s["vocab.weight"][tokens] + s["pos_embed.weight"][:tokens.shape[1]]
    q, k, v = (lin(f"atn.{p}_proj", norm("atn_norm", x)).unflatten(-1, (c.n_heads, -1)).transpose(1, 2) for p in "qkv")
    x = x + lin("atn.o_proj", F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))
    y = norm("ffn_norm", x)
    if c.routed:
        p, chosen = lin("ffn.router", y).softmax(-1).topk(c.top_k)
        weight = torch.zeros(*y.shape[:-1], c.n_experts).scatter(-1, chosen, p / p.sum(-1, keepdim=True))
        x = x + sum(weight[..., e:e + 1] * expert(f"ffn.experts.{e}.", y) for e in range(c.n_experts))
    else:
        x = x + expert("ffn.", y)
    return F.linear(norm("out_norm", x), s.get("unembed.weight", s["vocab.weight"]))

@pytest.mark.parametrize("name", NAMES)
def test_a_model_read_from_their_form_computes_what_their_form_computes(name):
    c, t = condition(name), get_task(name.split("/")[0])
    states, tokens = [state_of(name, seed) for seed in (0, 1)], t.tokens[:200]
    params, said = from_authors(states, c.activation, c.top_k)
    assert said == name
    for mine, state in zip(forward(params, tokens, name), states):
        theirs = logits_of(state, tokens, c, t.causal)
        assert mine.shape == theirs.shape and (mine - theirs).abs().max() < 2e-4 * theirs.abs().max()

def test_an_activation_comes_from_the_config_and_neither_none_nor_a_contradiction_goes_through():
    state = state_of("add7/ffn-h24-silu")
    assert _read_condition(state, "gelu", 1, "+freeze_ffn") == "add7/ffn-h24-gelu+freeze_ffn"
    kept = {"model_state_dict": state, "config": {"activation": "gelu"}}
    assert from_authors(kept)[1] == from_authors([kept, kept], "gelu")[1] == "add7/ffn-h24-gelu"
    with pytest.raises(ValueError, match="expected one, since weights do not show it; got None"): from_authors(state)
    with pytest.raises(ValueError, match="got 'silu', and 'gelu' from .*nearest valid: 'gelu'"):
        from_authors(kept, "silu")

@pytest.mark.parametrize("spoil, message", [
    (lambda s: s | {"ffn.up_proj.bias": torch.zeros(3)}, "expected .* got"),
    (lambda s: [s, state_of("add7/ffn-h12-silu")], "expected one condition")], ids=["another shape", "two conditions"])
def test_files_that_are_not_a_population_of_the_paper_are_refused(spoil, message):
    with pytest.raises(ValueError, match=message): from_authors(spoil(state_of("add7/ffn-h24-silu")), "silu")

class Sharp(Router):
    def logits(self, held, x, c): return 9 * super().logits(held, x, c)

class Doubled(Variant):
    def hidden(self, product, act, at): return at("hidden", 2 * act(product("W_up")))

@pytest.fixture
def own_things():
    with pytest.raises(InterruptedError), all_or_nothing():                 # taken back after the test
        register("router", "sharp", Sharp)
        register("variant", "doubled", Doubled("doubled", True))
        yield
        raise InterruptedError

@pytest.mark.parametrize("made, said, message", [
    # one expert would be kept
    ("add7/moe-e4k1-h16-silu", "add7/ffn-h4-silu", r"expected W_up \(1, 1, 64, 4\) per seed .* got \(1, 4, 64, 4\)"),
    ("add7/ffn-h8-silu+L2", "add7/ffn-h8-silu+L2", "expected one layer with an FFN"),
    ("add7/no_ffn", "add7/no_ffn", "expected one layer with an FFN"),
    ("add7/moe-e4k1-h16-silu+tokens", "add7/moe-e4k1-h16-silu+tokens", "its routes from a map of the stream"),
    *((f"add7/moe-e4k2-h16-silu{own}", f"add7/moe-e4k2-h16-silu{own}", "by the usual rules and with weights that sum")
      for own in ("+biased", "+expert_choice", "+switch", "+sharp")),
    ("add7/doubled-e4k1-h16-silu", "add7/doubled-e4k1-h16-silu", r"\(ffn, glu, moe, moe_glu\)")])
def test_what_their_classes_cannot_hold_is_not_written(made, said, message, own_things):
    with pytest.raises(ValueError, match=message): to_authors(init(made, [torch.Generator()]), said)

