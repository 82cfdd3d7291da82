"""What a real mixture of experts must not be told wrongly: nothing changes unless it is edited, every edit does what it
says, and the model is left as it was found."""
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from moe_redistribution.instruments.ablation import ablate, ablation_rows, edits_for, combine_edits
from moe_redistribution.opened.families import tiny_model
from moe_redistribution.opened.watched import OURS
from moe_redistribution.opened.router_pass import dense_gates, route_again

from moe_redistribution.opened.opened import open_model, sum_of_parts
from moe_redistribution.instruments.patterns import patterns
from moe_redistribution.instruments.routing import coactivation, effective_experts, loads, overlap
from moe_redistribution.opened.streaming import tokenizer_of
from moe_redistribution.instruments.trace import Kept, trace
from tiers import first
from toys import eager_model

logging.disable_progress_bar()
TOKENS = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(3))
MOE = ("olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")   # others: test_families
every_family = pytest.mark.parametrize("family", MOE)

def opened(family, dtype=torch.float64, **sizes): return open_model(eager_model(family, dtype, **sizes), TOKENS)

def alone(s, tokens=None):
    with torch.no_grad(): return s.model(input_ids=s.task.tokens if tokens is None else tokens, use_cache=False).logits

def hooks(s): return [m for m in s.model.modules() if m._forward_hooks or m._forward_pre_hooks]

@pytest.mark.parametrize("family", [*MOE, "llama", "mistral", "olmo", "qwen2", "qwen3"])
def test_a_watched_pass_says_what_the_model_says_and_leaves_it_as_it_was(family):
    s = opened(family)
    before = (alone(s), s.model.config._attn_implementation, s.model.config._experts_implementation)
    tr = trace(s, s.task.tokens)
    assert set(tr.activations) == set(s.sites)
    torch.testing.assert_close(tr["logits"][0], before[0], rtol=1e-9, atol=1e-9)
    assert (s.model.config._attn_implementation, s.model.config._experts_implementation) == before[1:]
    assert torch.equal(alone(s), before[0]) and not hooks(s)

@every_family
def test_weighted_experts_and_shared_ones_sum_to_the_ffn(family):
    s = opened(family)
    tr = trace(s, s.task.tokens)
    for l, x in enumerate(s.layers):
        if x.gate is not None: assert sum_of_parts(s, tr, l) < 1e-12
    mid = tr["L1.resid_mid"] if "L1.resid_mid" in tr.activations else None
    torch.testing.assert_close(mid + tr["L1.ffn_out"], tr["L1.resid_post"])

@every_family
def test_heads_sum_to_attention_and_patterns_mix_values(family):
    s = opened(family)
    tr, o = trace(s, s.task.tokens), s.layers[1].o
    heads = torch.einsum("bthk,dhk->bthd", tr["L1.z"][0], o.weight.unflatten(1, (s.n_heads, -1)))
    bias = 0 if o.bias is None else o.bias
    torch.testing.assert_close(heads.sum(2) + bias, tr["L1.attn_out"][0])
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", tr["L1.pattern"][0], tr["L1.v"][0]), tr["L1.z"][0])
    assert torch.equal(patterns(s), torch.cat([tr[f"L{l}.pattern"] for l in range(2)], 2))

@every_family
def test_the_same_logits_are_routed_as_the_family_routes_them(family):
    s = opened(family)
    tr, x = trace(s, s.task.tokens), s.layers[1]
    hidden = x.norm(tr["L1.resid_mid"][0]).flatten(0, 1)
    own = route_again(x.gate, (hidden,), {}, x.experts.num_experts, tr["L1.router_logits"][0].flatten(0, 1))
    _, weights, index = own.out
    assert torch.equal(index.sort(1)[0], tr["L1.routes"][0].flatten(0, 1).sort(1)[0])
    E = tr["L1.gates"].shape[-1]
    torch.testing.assert_close(dense_gates(weights, index, E), tr["L1.gates"][0].flatten(0, 1))
    same = s.run(s.task.tokens, {"L1.router_logits": torch.clone})
    torch.testing.assert_close(same[0], alone(s))

# Routers that are no softmax of a linear map: a softcap, biases that come as arguments, a sigmoid in groups
RULES = ("laguna", "minimax_m2", "hy_v3", "ernie4_5_moe", "glm4_moe")

@pytest.mark.parametrize("family", RULES)
def test_a_router_is_asked_by_its_own_forward_whatever_its_rule(family):
    """Its own scores give its own logits, a barred expert gets no token, and weights are shares of what is
    called its probabilities. Laguna was off by .9, and three ended in a traceback, while the router was copied."""
    s = opened(family, torch.float32)
    tokens = s.task.tokens
    site = [x for x in s.sites if x.endswith("router_logits")][-1]
    layer, tr = site.split(".")[0], trace(s, tokens)
    torch.testing.assert_close(s.run(tokens, {site: torch.clone})[0], alone(s), rtol=1e-6, atol=1e-6)
    around = trace(s, tokens, edits=combine_edits(s, {f"{layer}.E1": "route_around"}))
    assert (around[f"{layer}.routes"] != 1).all() and (tr[f"{layer}.routes"] == 1).any()
    gates, probs = tr[f"{layer}.gates"][0], tr[f"{layer}.router_probs"][0]
    share = probs * (gates != 0)
    torch.testing.assert_close(gates / gates.sum(-1, keepdim=True), share / share.sum(-1, keepdim=True),
                               check_dtype=False, rtol=1e-5, atol=1e-6)

@every_family
def test_edits_of_an_expert_do_what_they_say(family):
    s = opened(family)
    plain = trace(s, s.task.tokens)
    zero = s.run(s.task.tokens, combine_edits(s, {"L1.E1": "zero"}))
    moved = dict(s.moved)
    assert moved == {"L1.E1": plain["L1.E1"].shape[1]}
    closed = s.run(s.task.tokens, {"L1.gates": lambda g: g * (torch.arange(g.shape[-1]) != 1)})
    torch.testing.assert_close(zero, closed)
    assert s.moved["L1.gates"] == moved["L1.E1"]
    around = trace(s, s.task.tokens, edits=combine_edits(s, {"L1.E1": "route_around"}))
    assert (around["L1.routes"] != 1).all() and around["L1.E1"].shape == (1, 0, 32)
    assert s.moved["L1.router_logits"] == moved["L1.E1"]
    swap = trace(s, s.task.tokens, edits=combine_edits(s, {"L1.E1": "swap:E2"}))
    torch.testing.assert_close(swap["L1.gates"].sum(-1), plain["L1.gates"].sum(-1))
    assert (swap["L1.gates"][..., 1] == 0).all() and sum_of_parts(s, swap, 1) < 1e-12

@pytest.mark.parametrize("site", ["L1.router_logits", "L1.gates", "L1.pattern", "L1.v", "L1.z", "L1.attn_out", "L1.E1"])
def test_an_edit_that_writes_into_what_it_is_given_is_an_edit(site):
    s = opened("olmoe")
    def write(x):
        x[..., :1] = 0
        return x
    def give(x): return torch.cat([torch.zeros_like(x[..., :1]), x[..., 1:]], -1)
    written, given = s.run(s.task.tokens, {site: write}), s.run(s.task.tokens, {site: give})
    assert torch.equal(written, given) and s.moved[site] > 0 and not torch.equal(written[0], alone(s))

def test_a_router_that_likes_an_expert_whatever_it_scores_is_kept_from_it_too():
    s = opened("deepseek_v3")
    s.layers[1].gate.e_score_correction_bias[1] = 2.
    tr = trace(s, s.task.tokens, edits=combine_edits(s, {"L1.E1": "route_around"}))
    assert (tr["L1.routes"] != 1).all() and s.moved["L1.router_logits"] > 0

@every_family
def test_whoever_is_closed_gets_no_token_whichever_way_the_gates_are_edited(family):
    s = opened(family)
    for e in range(4):
        tr = trace(s, s.task.tokens, edits=combine_edits(s, {f"L1.E{e}": f"swap:E{(e + 1) % 4}"}))
        assert tr[f"L1.E{e}"].shape[1] == 0 and (tr["L1.routes"] != e).all() and sum_of_parts(s, tr, 1) < 1e-12
    with pytest.raises(ValueError, match="other expert"): ablate(s, {"L1.E1": "swap:E1"})

def test_a_mean_over_one_window_is_refused():
    s = opened("olmoe")
    assert len(s.predict()) == 1
    s.batch = 1
    with pytest.raises(ValueError, match="two windows or more"): ablate(s, {"L0.ffn_out": "mean"})
    s.batch = 2
    whole = ablate(s, {"L0.ffn_out": "mean"})                              # three windows in one batch, none left alone
    s.batch = None
    assert torch.equal(whole, ablate(s, {"L0.ffn_out": "mean"}))

def test_a_given_route_is_taken_whole():
    s = opened("mixtral")
    given = torch.zeros(1, 3, 11, 4)
    given[..., 3] = .7
    tr = trace(s, s.task.tokens, edits={"L0.gates": given})
    assert (tr["L0.routes"] == 3).all() and tr["L0.E3"].shape[1] == 33 and tr["L0.E0"].shape[1] == 0
    torch.testing.assert_close(tr["L0.ffn_out"][0].flatten(0, 1), given[0, 0, 0, 3] * tr["L0.E3"][0])

@every_family
def test_another_last_token_changes_nothing_before_it(family):
    s, other = opened(family), TOKENS[:, :-1].clone()
    other[:, -1] = (other[:, -1] + 1) % 50
    a, b = (s.run(t, sink=Kept({"L0.pattern"})) for t in (TOKENS[:, :-1], other))
    torch.testing.assert_close(a[:, :, :-1], b[:, :, :-1], rtol=0, atol=1e-12)
    assert (a - b)[:, :, -1].abs().max() > 1e-3

def test_padding_on_the_right_changes_no_token_before_it():
    s = opened("olmoe")
    s.pad = 0
    tokens = TOKENS[:, :8] % 49 + 1
    padded = torch.cat([tokens, torch.zeros(3, 3, dtype=torch.long)], 1)
    torch.testing.assert_close(s.run(padded)[0, :, :8], alone(s, tokens))

@pytest.mark.parametrize("family", first(["gpt_oss", "mixtral"], MOE))
def test_an_edited_pattern_reaches_the_output(family):
    s = opened(family)
    same = s.run(s.task.tokens, {"L0.pattern": torch.clone})
    torch.testing.assert_close(same[0], alone(s))
    tr = trace(s, s.task.tokens, edits={"L0.pattern": lambda p: torch.zeros_like(p)})
    assert not tr["L0.z"].any() and s.moved["L0.pattern"] == 33

def test_an_edit_of_the_middle_of_the_stream_counts_for_the_residual_too():
    s = opened("olmoe")
    tr = trace(s, s.task.tokens, edits={"L1.resid_mid": torch.zeros_like})
    torch.testing.assert_close(tr["L1.resid_post"], tr["L1.ffn_out"])

def test_a_model_is_left_as_it_was_after_an_error():
    s = opened("olmoe")
    before = alone(s)
    def fail(x): raise ZeroDivisionError
    for site in ("L0.pattern", "L1.E0", "L1.gates", "L1.resid_mid"):
        with pytest.raises(ZeroDivisionError): s.run(s.task.tokens, {site: fail})
    assert torch.equal(alone(s), before) and s.model.config._experts_implementation != OURS
    assert not hooks(s)

def test_a_model_in_training_is_read_without_dropout_and_stays_in_training():
    s = opened("olmoe", attention_dropout=.5)
    quiet = alone(s)
    s.model.train()
    s.model.model.norm.eval()
    torch.testing.assert_close(s.run(s.task.tokens)[0], quiet)
    assert s.model.training and s.layers[0].attn.training and not s.model.model.norm.training

def test_a_block_that_adds_something_of_its_own_is_found_out():
    s = opened("olmoe")
    ffn = s.layers[1].ffn
    own, ffn.forward = ffn.forward, lambda x: ffn.__class__.forward(ffn, x) + .1
    with pytest.raises(RuntimeError, match="L1.ffn_out: expected its parts to sum"): trace(s, s.task.tokens)
    ffn.forward = own
    trace(s, s.task.tokens)

def test_instruments_take_it_as_they_take_a_population():
    s = opened("qwen2_moe")
    rows = ablation_rows(s, [0], edits=("zero", "mean"))
    loss = rows[rows["metric"] == "loss"].set_index(["site", "edit"])["value"]
    assert len(loss) == 13 and loss.notna().all()
    want = torch.nn.functional.cross_entropy(alone(s).flatten(0, 1), TOKENS[:, 1:].flatten()).item()
    assert abs(loss["none", "none"] - want) < 1e-5
    right = ablate(s, {"L1.shared_out": "zero", "L0.H1": "mean", "L*.E0": "zero"})
    assert right.shape == (1, 3, 11)
    chosen = trace(s, s.task.tokens, keep=["L1.routes"])["L1.routes"]
    assert loads(chosen, 4).sum().isclose(torch.tensor(1.).double()) and 1 <= effective_experts(chosen, 4).item() <= 4
    assert coactivation(chosen, 4)[0].shape == (1, 4, 4) and overlap(chosen, chosen).item() == 1

def test_half_precision_is_opened_too():
    s = opened("mixtral", torch.bfloat16)
    tr = trace(s, s.task.tokens)
    assert sum_of_parts(s, tr, 0) < .1 and tr["L0.E1"].dtype == torch.bfloat16

def test_what_cannot_be_opened_says_what_can():
    with pytest.raises(ValueError, match="expected an expert to swap, got L0.H1|an expert to swap"):
        edits_for(opened("olmoe"), "L0.H1", "swap:E2")
    with pytest.raises(ValueError, match="leave dtype, device_map"): open_model(tiny_model("llama"), dtype="bfloat16")
    with pytest.raises(ValueError, match="int64 windows"): open_model(tiny_model("llama"), TOKENS.float())

# ----------------------------------------------------------------------------------------------- a folder, whole or not

@pytest.fixture
def toy(tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path / "toy")
    return tmp_path / "toy"

def rewritten(toy, weights=lambda w: w, **config):
    "The toy's folder with other weights or another config."
    files, own = toy / "model.safetensors", toy / "config.json"
    save_file(weights(load_file(files)), files, {"format": "pt"})
    own.write_text(json.dumps(json.loads(own.read_text()) | config))
    return toy

def without(part): return lambda w: {n: v for n, v in w.items() if part not in n}

DAMAGES = {"routers": (without("gate.weight"), {}, "2 missing: model.layers.0.mlp.gate.weight"),
           "names": (lambda w: {f"x.{n}": v for n, v in w.items()}, {}, "21 missing"),
           "a head": (without("lm_head"), {}, "1 missing: lm_head.weight"),
           "an expert": (without("experts.2.w1"), {}, "expected"),
           "a width": (lambda w: w, dict(intermediate_size=32), "expected")}

@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_lacks_or_has_other_weights_is_not_opened_with_random_ones(toy, damage):
    weights, config, says = DAMAGES[damage]
    with pytest.raises(ValueError, match=f"model toy: .*{re.escape(says)}.*fix: "):
        open_model(rewritten(toy, weights, **config), TOKENS)

def test_tied_weights_are_not_missed(tmp_path):
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    assert open_model(tmp_path / "tied", TOKENS).predict().shape == (1, 3, 11)

def test_a_model_s_own_code_is_not_run_even_if_somebody_would_say_yes(toy, tmp_path, monkeypatch):
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PretrainedConfig as C\n"
    (toy / "evil.py").write_text(code)
    rewritten(toy, model_type="unheard", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M",
                                                    "AutoTokenizer": ["evil.T", None]})
    (toy / "tokenizer_config.json").write_text(json.dumps(dict(auto_map={"AutoTokenizer": ["evil.T", None]})))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for read in (open_model, lambda folder: tokenizer_of(folder, 50)):
        with pytest.raises(ValueError, match="expected .*fix: "): read(toy)
    assert not (tmp_path / "ran").exists()

@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_experts_implementation"])
def test_native_code_that_a_config_names_is_not_fetched(toy, key):
    "transformers loads `org/kernel` from the hub, and runs it."
    with pytest.raises(ValueError, match="_implementation of transformers' own, as eager; got org/kernel; .*drop"):
        open_model(rewritten(toy, **{key: "org/kernel"}))

@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hosts", "sub/x.safetensors", "absent.safetensors", 3])
def test_a_shard_index_that_points_elsewhere_is_refused(toy, name):
    (toy.parent / "outside.safetensors").write_bytes((toy / "model.safetensors").read_bytes())
    (toy / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map={"lm_head.weight": name})))
    with pytest.raises(ValueError, match="names of files in this folder"): open_model(toy)

@pytest.mark.parametrize("damage", [lambda f: f.write_bytes(f.read_bytes()[:-100]), lambda f: f.write_bytes(b"x" * 99)])
def test_broken_files_are_one_message(toy, damage):
    damage(toy / "model.safetensors")
    with pytest.raises(ValueError, match="model toy: expected .*fix: "): open_model(toy)

# ----------------------------------------------------------------------------------------- edits that have not happened

def test_compiled_modules_are_refused_because_they_call_no_hooks():
    s = opened("mixtral")
    s.layers[1].experts.compile(backend="eager")
    with pytest.raises(ValueError, match="got a compiled model.layers.1.mlp.experts"):
        s.run(s.task.tokens, combine_edits(s, {"L1.E1": "zero"}))
    with pytest.raises(ValueError, match="modules that call their hooks"): trace(s, s.task.tokens)

def test_a_site_that_a_pass_does_not_reach_is_listed_whether_it_is_edited_or_kept():
    s = opened("llama")
    attn, own = s.layers[1].attn, type(s.layers[1].attn).forward
    attn.forward = lambda hidden_states, **kw: (attn.o_proj(hidden_states), None)  # as linear attention does
    for ask in (dict(keep=["L1.pattern"]), dict(edits={"L1.v": torch.zeros_like}), dict()):
        with pytest.raises(ValueError, match="llama: expected a pass through L1.(v|pattern)"):
            trace(s, s.task.tokens, **ask)
    assert trace(s, s.task.tokens, keep=["L1.attn_out", "L0.pattern"])["L0.pattern"].shape[2] == 4
    with pytest.raises(ValueError, match="expected a pass through L1.pattern"): ablate(s, {"L*.pattern": "zero"})
    attn.forward = own.__get__(attn)

@pytest.mark.parametrize("how", ["mean", "resample"])
def test_one_window_has_no_other_to_take_a_mean_or_a_sample_from(how):
    s = opened("olmoe")
    for unit in ("L0.ffn_out", "L1.H2"):
        edits = edits_for(open_model(s.model), unit, how)
        with pytest.raises(ValueError, match="two examples or more"): s.run(s.task.tokens[:1], edits)

# ----------------------------------------------------------------------------------------------------------- no numbers

@pytest.mark.parametrize("family, weight, site", [
    ("olmoe", "layers.1.mlp.experts.down_proj", "L1.E"), ("mixtral", "layers.0.self_attn.v_proj", "L0.v"),
    ("llama", "layers.1.mlp.down_proj", "L1.ffn_out"), ("mixtral", "layers.1.mlp.gate", "L1.router_logits"),
    ("llama", "lm_head", "logits")])
def test_what_is_not_finite_is_named_by_its_first_site(family, weight, site):
    s = opened(family)
    for bad in (torch.nan, torch.inf):
        with torch.no_grad(): dict((n, p) for n, p in s.model.named_parameters() if weight in n).popitem()[1][:] = bad
        for ask in (lambda: ablate(s, {}), lambda: ablate(s, {"L0.H1": "zero"}), lambda: trace(s, s.task.tokens)):
            with pytest.raises(ValueError, match=rf"{family}: expected finite .* first at {site}"): ask()
        if ".gate" in weight:
            with pytest.raises(ValueError, match=f"first at {site}"): ablate(s, {"L1.E1": "route_around"})

def test_an_edit_that_is_no_number_is_named_and_an_answer_may_be_forbidden():
    s = opened("olmoe")
    with pytest.raises(ValueError, match="first at L1.attn_out"): ablate(s, {"L1.attn_out": lambda x: x * torch.nan})
    never = s.run(s.task.tokens, {"logits": lambda x: x.index_fill(-1, torch.tensor([3]), -torch.inf)})
    assert (never.argmax(-1) != 3).all()

# -------------------------------------------------------------------------------------------------------------- padding

def padded(family, side="right"):
    "A model that pads, unequal windows of 8, 8 and 5 tokens, the same without the short one's padding, and its mask."
    s = opened(family)
    s.pad, tokens = 0, TOKENS[:, :8] % 49 + 1
    tokens[2, 5:] = 0
    return s, tokens, s.real(tokens)

@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_padding_goes_to_no_expert_and_is_in_no_count(family):
    s, tokens, real = padded(family)
    tr, k = trace(s, tokens), s.model.config.num_experts_per_tok
    experts = [u for u in s.units if u.startswith("L1.E")]
    assert real.sum() == 21 and sum(tr[u].shape[1] for u in experts) == 21 * k
    assert (tr["L1.routes"][0][~real] == -1).all() and (tr["L1.gates"][0][~real] == 0).all()
    assert sum_of_parts(s, tr, 1) < 1e-12
    share = loads(tr["L1.routes"], len(experts))[0]
    assert torch.allclose(share, torch.tensor([tr[u].shape[1] / (21 * k) for u in experts]).double())
    together_, _ = coactivation(tr["L1.routes"], len(experts))
    assert torch.allclose(together_[0].diag() / k, share) and overlap(tr["L1.routes"], tr["L1.routes"]).item() == 1
    s.run(tokens, {"L1.attn_out": torch.zeros_like, "L0.pattern": torch.zeros_like, "L1.router_logits": torch.neg})
    assert s.moved["L1.attn_out"] == s.moved["L0.pattern"] == 21 and 0 < s.moved["L1.router_logits"] <= 21

@pytest.mark.parametrize("unit", ["L0.ffn_out", "L1.H1", "L1.E1", "embed", "L0.pattern", "L1.router_logits"])
@pytest.mark.parametrize("how", ["mean", "resample"])
def test_what_padding_says_is_in_no_mean_and_no_sample(unit, how):
    s, tokens, real = padded("mixtral")
    found = []
    for noise in (0., 100.):
        edits = edits_for(s, unit, how)
        def shout(x): return x + noise * ~real[None, ..., None]
        first = {} if unit == "embed" else {"embed": shout}
        if unit == "embed":
            own = edits.pop("embed")
            first = {"embed": lambda x: own(shout(x))}
        found.append(s.run(tokens, first | edits)[0][real])
        assert s.moved[unit.replace("H1", "z")] <= 21
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)

def test_open_model_takes_a_pad(tmp_path):
    tiny_model("olmoe").save_pretrained(tmp_path / "toy")
    assert open_model(tmp_path / "toy", pad=0).pad == open_model(tiny_model("olmoe"), pad=0).pad == 0

def test_what_a_swap_leaves_without_an_expert_is_not_counted_twice():
    s = opened("olmoe")
    tr = trace(s, s.task.tokens, edits=combine_edits(s, {"L1.E1": "swap:E2"}))
    routes = tr["L1.routes"]
    gates = tr["L1.gates"][0].flatten(0, 1) != 0
    share, (both, _) = loads(routes, 4)[0], coactivation(routes, 4)
    torch.testing.assert_close(share, gates.double().sum(0) / gates.sum())
    torch.testing.assert_close(both[0], (gates.double().T @ gates.double()) / len(gates))
    assert both.max() <= 1

def test_padding_that_also_ends_texts_is_not_looked_for_between_documents():
    s = open_model(tiny_model("mixtral"), pad=3)
    packed = torch.tensor([[5, 6, 3, 7, 8, 9], [4, 4, 4, 4, 3, 3]])
    assert s.run(packed).shape == (1, 2, 6, 50)                             # 3 is nothing but padding here
    for config in (s.model.config, s.model.generation_config):
        config.eos_token_id = [2, 3]
        for f in (s.run, lambda x: s.generate(x, 2), lambda x: trace(s, x)):
            with pytest.raises(ValueError, match="3 also ends a text; got one in row 0 at 2; fix: another token"):
                f(packed)
        assert s.run(packed[1:]).equal(s.run(packed[1:]))
        ends = torch.tensor([[3, 3, 5, 6, 7, 3]])
        assert not s.real(ends)[0, [0, 1, 5]].any() and s.real(ends)[0, 2:5].all()
        config.eos_token_id = None

@pytest.mark.parametrize("dtype, says", [(torch.float32, "0.0% of choices other; float32"),
                                         (torch.bfloat16, "bfloat16, by 16 tokens: near ties go elsewhere")])
def test_a_headline_says_of_how_many_tokens_and_what_half_precision_means(dtype, says):
    said = open_model(tiny_model("mixtral", dtype=dtype)).report().headline
    assert says in said and said.endswith(("float32", "the same sites"))

def test_swaps_that_meet_are_refused_and_a_permutation_of_gates_is_an_exchange():
    s = open_model(tiny_model("olmoe"))
    W = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    for e in ({"L1.E1": "swap:E2", "L1.E2": "swap:E1"}, {"L1.E1": "swap:E2", "L1.E3": "swap:E1"}):
        with pytest.raises(ValueError, match="no other swap sends tokens to; got E1 to E2, .* permute the gates"):
            combine_edits(s, e)
    both = s.run(W, {"L1.gates": lambda g: g[..., [0, 2, 1, 3]]})
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"): (p := getattr(s.layers[1].experts, name)).copy_(p[[0, 2, 1, 3]])
    torch.testing.assert_close(s.run(W), both)
    two = s.run(W, combine_edits(s, {"L1.E1": "swap:E2", "L1.E3": "swap:E0"}))
    assert s.moved["L1.gates"] and not two.equal(s.run(W))
