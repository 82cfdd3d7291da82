"""Every family that can be built here opens without a line of its own: our pass says what the model says, an edit that
changes nothing changes exactly nothing, and an expert that is silent or barred is so."""
from functools import cache

import pytest
import torch
from transformers.utils import logging

from moe_redistribution.instruments.ablation import combine_edits
from moe_redistribution.instruments.trace import trace
from moe_redistribution.opened.families import DENSE, FAMILIES, MIXTURES, Family, tiny_model
from moe_redistribution.opened import layers
from moe_redistribution.opened.layers import READ_ONLY, layers_of, probe_model
from moe_redistribution.opened.loads import text_loads
from moe_redistribution.opened.opened import open_model
from moe_redistribution.opened.streaming import byte_tokens
from moe_redistribution.opened.watched import WATCHED
from tiers import first

logging.disable_progress_bar()
TOKENS = torch.randint(50, (2, 10), generator=torch.Generator().manual_seed(3))
HASHED = {"deepseek_v4"}                                       # its first layers choose experts by the token's number
# One of each mechanism: gates and their scores, groups, biases, shared and hashed experts, attention, stream, names
MIXED = ["olmoe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "deepseek_v4", "qwen2_moe", "qwen3_next", "gemma4_text",
         "kimi_linear", "granitemoehybrid", "phimoe", "lfm2_moe", "nemotron_h", "zaya", "cohere2_moe", "beam", "jamba"]
SOME = [*MIXED, "llama", "olmo2", "gpt_neox", "gemma3_text", "granite"]

@cache
def opened(family):
    "In single precision, under the library's own loop over experts and its eager attention. Change a copy of it."
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    if family in MIXTURES: model.set_experts_implementation("eager")
    return open_model(model)

def alone(s):
    with torch.no_grad(): return s.model(input_ids=TOKENS, use_cache=False).logits

def last_mixture(s): return max(l for l, x in enumerate(s.layers) if x.experts is not None)

@pytest.mark.parametrize("family", first(SOME, FAMILIES))
def test_a_pass_that_is_watched_everywhere_says_what_the_model_says(family):
    s = opened(family)
    assert s.probe.experts <= 1e-6 and s.probe.attention < 1e-6 and s.probe.elsewhere == 0
    tr = trace(s, TOKENS)
    assert {*tr.activations} == {*s.sites}
    assert (tr["logits"][0] - alone(s)).abs().max() < 1e-4 * alone(s).abs().max().clamp(min=1)

@pytest.mark.parametrize("family", first(SOME, FAMILIES))
def test_an_edit_that_changes_nothing_changes_exactly_nothing(family):
    s = opened(family)
    plain = s.run(TOKENS)
    for site in s.sites:
        inner = site.split(".")[-1]
        if inner in (*READ_ONLY, "routes"): continue                          # edits of routes: test_verbs
        same = s.run(TOKENS, {site: torch.clone})
        if inner in ("v", "pattern"): assert (same - plain).abs().max() < 1e-5, site       # values are mixed once more
        else: assert torch.equal(same, plain), site

@pytest.mark.parametrize("family", first(MIXED, MIXTURES))
def test_a_silent_expert_is_one_without_weights_and_a_barred_one_has_no_token(family):
    s = opened.__wrapped__(family)
    l = last_mixture(s)
    unit, x = f"L{l}.E1", s.layers[l]
    silent = s.run(TOKENS, {unit: torch.zeros_like})
    if s.layers[l].gate is not None and family not in HASHED:
        around = trace(s, TOKENS, edits=combine_edits(s, {unit: "route_around"}))
        assert (around[f"L{l}.routes"] != 1).all() and around[unit].shape[1] == 0
    biased = getattr(x.experts, "down_proj_bias", None)
    with torch.no_grad():
        x.experts.down_proj[1] = 0
        if biased is not None: biased[1] = 0
    assert (silent - s.run(TOKENS)).abs().max() < 1e-6

@pytest.mark.parametrize("family", first(["qwen2_moe", "deepseek_v4", "gemma4_text"], FAMILIES))
def test_a_folder_that_save_pretrained_wrote_opens_as_the_model_that_it_was(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "kept")
    s, own = open_model(tmp_path / "kept"), open_model(model)
    assert [*s.sites] == [*own.sites] and s.sites.absent == own.sites.absent
    assert (s.run(TOKENS) - own.run(TOKENS)).abs().max() < 1e-5

def test_what_is_not_there_says_why():
    said = {f: {n: w for x in layers_of(tiny_model(f)) for n, w in x.absent.items()}
            for f in ("qwen3_next", "cohere2_moe", "nemotron_h", "deepseek_v4", "beam", "gemma4_text")}
    assert "Qwen3NextGatedDeltaNet is not attention" in said["qwen3_next"]["pattern"]
    assert said["cohere2_moe"]["resid_mid"] == "its FFN reads what its attention reads"
    assert said["nemotron_h"]["resid_mid"] == "it has one part"
    assert said["deepseek_v4"]["resid_post"] == "its stream is (2, 8, 2, 32)"
    assert "adds no two of its modules" in said["beam"]["resid_mid"]
    assert said["gemma4_text"]["router_probs"] == "its weights are shares of no probabilities"

@pytest.mark.parametrize("family, mixer, ffn", [
    ("olmo2", "post_attention_layernorm", "post_feedforward_layernorm"), ("llama", "self_attn", "mlp"),
    ("glm4", "post_self_attn_layernorm", "post_mlp_layernorm"), ("granitemoehybrid", "mamba", "block_sparse_moe"),
    ("gpt_neox", "attention", "mlp"), ("gemma4_text", "post_attention_layernorm", "post_feedforward_layernorm")])
def test_what_enters_the_stream_is_found_by_its_sum(family, mixer, ffn):
    for x in layers_of(tiny_model(family))[:1]:
        assert (x.mixer, x.ffn) == (x.whole.get_submodule(mixer), x.whole.get_submodule(ffn))
        assert x.sums and x.scale == (.22 if "granite" in family else 1)

def test_a_stream_with_its_own_multiplier_is_told_by_a_family():
    model = tiny_model("granite")
    assert not layers_of(model, Family())[0].sums and layers_of(model, Family(scale=.22))[0].sums
    s = open_model(model, family=Family(scale=.22))
    tr = trace(s, TOKENS)
    torch.testing.assert_close(tr["embed"] + .22 * tr["L0.attn_out"], tr["L0.resid_mid"])
    assert open_model(tiny_model("olmo2"), family=Family(layers="model.layers")).n_layers == 2
    with pytest.raises(AttributeError): layers_of(model, Family(parts=dict(norm="no_such_norm")))

@pytest.mark.parametrize("family, sizes", [("llama4_text", dict(num_local_experts=4, interleave_moe_layer_step=1)),
                                           ("jetmoe", dict(num_local_experts=4, kv_channels=8))])
def test_a_mixture_that_computes_its_own_experts_is_refused_by_name(family, sizes):
    with pytest.raises(ValueError, match=f"model {family}: expected experts that transformers computes .*; got .*Exp"):
        probe_model(tiny_model(family, **sizes))

def test_a_model_of_images_and_text_is_opened_by_its_language_model():
    hf = __import__("transformers")
    text = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, intermediate_size=24,
                pad_token_id=None, bos_token_id=None, eos_token_id=None, max_position_embeddings=64,
                rope_parameters=dict(rope_type="default", mrope_section=[2, 1, 1]))
    vision = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32,
                  deepstack_visual_indexes=[0])
    config = hf.AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision)
    model = hf.AutoModelForImageTextToText.from_config(config).eval()
    own = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
    model.config.vision_config._attn_implementation = "eager"
    def ways(): return [(c._attn_implementation, getattr(c, "_experts_implementation", None)) for c in own]
    before = ways()
    s = open_model(model)
    tr = trace(s, TOKENS)
    assert ways() == before and len({*before}) > 1
    assert s.n_layers == 2 and s.probe.experts < 1e-5 and (tr["logits"][0] - alone(s)).abs().max() < 1e-5
    assert trace(s, TOKENS, edits={"L1.E0": torch.zeros_like})["L1.E0"].abs().max() == 0

def test_a_hook_of_the_user_s_works_and_is_seen_as_what_it_is():
    model = tiny_model("olmoe")
    model.model.layers[1].register_forward_hook(lambda m, args, out: out + .3)
    s = open_model(model)
    assert s.layers[0].sums and not s.layers[1].sums and "L1.resid_mid" not in s.sites
    assert torch.equal(s.run(TOKENS), s.run(TOKENS, {"L1.E0": torch.clone}))
    assert not s.run(TOKENS, {"L1.E0": torch.zeros_like}).equal(s.run(TOKENS))

def test_dense_families_have_no_experts():
    assert all(x.experts is None for f in DENSE for x in layers_of(tiny_model(f)))

# --------------------------------------------------------------------------------- what a hostile reader found, mended

@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_a_bar_is_for_those_who_would_go_there(family):
    "A softmax over all experts used to hand the barred one's share to every token, and one word of two counted them."
    s, l = open_model(tiny_model(family)), 1
    plain = trace(s, TOKENS)
    went = (plain[f"L{l}.gates"][0][..., 1] != 0)
    around = trace(s, TOKENS, edits=combine_edits(s, {f"L{l}.E1": "route_around"}))
    assert s.moved == {f"L{l}.router_logits": int(went.sum())} and 0 < went.sum() < went.numel()
    never = trace(s, TOKENS, edits={f"L{l}.routes": "never:E1"})
    assert s.moved == {f"L{l}.routes": int(went.sum())} and never["logits"].equal(around["logits"])
    assert around[f"L{l}.gates"][0][~went].equal(plain[f"L{l}.gates"][0][~went])

@pytest.mark.parametrize("family", ["olmoe", "llama", "mixtral", "granitemoe", "gemma4_text", "qwen3_next"])
def test_the_middle_of_the_stream_can_be_silent(family):
    s = open_model(tiny_model(family))
    tr = trace(s, TOKENS, edits={"L1.resid_mid": torch.zeros_like})
    assert tr["L1.resid_mid"].abs().max() == 0 and s.moved["L1.resid_mid"] == TOKENS.numel()

def test_one_pass_at_a_time_of_a_model():
    s = open_model(tiny_model("olmoe"))
    other = open_model(s.model)
    plain = s.run(TOKENS)
    for inner in (s, other):
        def again(x, inner=inner):
            inner.run(TOKENS)
            return x
        with pytest.raises(RuntimeError, match="one at a time of a model"): s.run(TOKENS, {"L0.attn_out": again})
    assert not WATCHED and s.run(TOKENS).equal(plain)

def test_a_model_that_sees_later_tokens_is_refused():
    hf = __import__("transformers")
    config = hf.BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                           intermediate_size=24)
    for seed in range(6):                      # fresh weights hardly look: a later token moves an answer by .001
        torch.manual_seed(seed)
        with pytest.raises(ValueError, match="expected a causal language model; got one whose answers change"):
            open_model(hf.BertForMaskedLM(config).eval())

def test_a_part_that_gives_another_shape_is_not_taken_for_the_stream_s():
    hf = __import__("transformers")
    config = hf.OPTConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=24,
                          max_position_embeddings=64, word_embed_proj_dim=32, pad_token_id=None, bos_token_id=None,
                          eos_token_id=None)
    s = open_model(hf.AutoModelForCausalLM.from_config(config).eval())
    assert all(v.shape[:3] == (1, *TOKENS.shape) for n, v in trace(s, TOKENS).activations.items() if n.endswith("_out"))

def test_the_numbers_of_a_token_are_not_taken_for_a_bias():
    "With as many experts as dimensions one token's hidden state has a number an expert, too."
    s = open_model(tiny_model("zaya", num_experts=32))
    one = TOKENS[:1, :1]
    e = next(e for e in range(32) if not (trace(s, one)["L1.routes"] == e).any())
    assert s.run(one, combine_edits(s, {f"L1.E{e}": "route_around"})).equal(s.run(one))

def test_positions_are_counted_without_padding():
    s = open_model(tiny_model("gpt_neox"), pad=49)
    short = TOKENS[:, :6] % 49
    left = torch.cat([torch.full((2, 3), 49), short], 1)
    for edits in ({}, {"L0.attn_out": "zero@0"}):
        plain, padded = s.run(short, edits), s.run(left, edits)
        assert (padded[:, :, 3:] - plain).abs().max() < 1e-5

def test_no_margin_is_given_where_a_bias_takes_part_in_the_choice(text):
    for family, there in (("mixtral", True), ("deepseek_v3", False)):
        s = open_model(tiny_model(family, vocab_size=256))
        if not there: s.layers[1].gate.e_score_correction_bias.copy_(3 * torch.randn(8))
        found = text_loads(s, text, byte_tokens, 16, 4)
        assert ("margin" in set(found["metric"])) == there and "load" in set(found["metric"])

def test_choices_that_differ_under_our_attention_are_told(monkeypatch):
    "The share is the larger one of two passes; that with our attention used to be left out."
    shares = iter((.125, .25))
    monkeypatch.setattr(layers, "_sent_otherwise", lambda calls, routes: next(shares))
    assert probe_model(tiny_model("olmoe")).elsewhere == .25
