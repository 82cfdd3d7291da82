"""Ways out: hooks and other tools find in our models what our sites are, and files that leave hold the same model."""
import copy
import json
import pickle
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import safetensors.torch
import torch

from moe_redistribution.evidence.checkpoints import checkpoint
from moe_redistribution.instruments.rows import rows, table_file, write_frame
from moe_redistribution.instruments.trace import trace
from moe_redistribution.opened.opened import open_model
from moe_redistribution.language.small import small_model
from moe_redistribution.language.training import train_language
from moe_redistribution.opened.export import (_lens_state, open_member, save_member, to_transformer_lens,
                                                  to_transformers)
from moe_redistribution.models.authors import from_authors, to_authors
from moe_redistribution.models.condition import condition
from moe_redistribution.models.population import Trained, Transformer, forward, member, place_of
from moe_redistribution.basics.commands import show_table
from moe_redistribution.basics.kinds import import_file
from moe_redistribution.tasks.task import get_task
from moe_redistribution.training.store import Run, Store
from toys import untrained

MOE, DEEP = "add7/moe-e4k1-h16-silu", "add7/moe_glu-e2k2-h16-silu+norm+L2"
NAMES = [MOE, DEEP, "add7/ffn-h16-silu", "modadd/glu-h20-gelu", "hist/no_ffn", "add7/moe-e2k1-h8-silu+tokens"]

def population(name, seeds=(1, 2)):
    return Trained(untrained(name, seeds), name, seeds)

def tokens_of(name, n=9): return get_task(name.split("/")[0]).tokens[:n]

# ------------------------------------------------------------------------------------------------------ as a module

@pytest.mark.parametrize("name", NAMES)
def test_what_a_hook_sees_at_a_site_s_module_is_the_site_to_the_bit(name):
    params, tokens, seen = population(name), tokens_of(name), {}
    module = Transformer(params, name, seed=2)
    for path, at in module.named_modules():
        at.register_forward_hook(lambda m, given, out, path=path: seen.__setitem__(path, out))
    logits, of = module(tokens), trace(member(params, 1), tokens, name).activations
    assert torch.equal(logits, of["logits"][0]) and torch.equal(seen.pop(""), logits)
    assert {*seen} == {*module.paths.values()} and {*of} == {*module.paths}
    assert all(torch.equal(seen[module.paths[site]], x[0]) for site, x in of.items())

@pytest.mark.parametrize("name, path, site", [
    (MOE, "blocks.0.ffn_out", "ffn_out"), (MOE, "blocks.0.router_probs", "L0.router_probs"), (MOE, "embed", "embed"),
    (DEEP, "blocks.1.z", "L1.z"), (DEEP, "blocks.0.expert_out", "L0.expert_out"), (DEEP, "logits", "logits")])
def test_a_hook_that_returns_another_value_is_the_edit_of_that_site(name, path, site):
    params, tokens = population(name, (3,)), tokens_of(name)
    module = Transformer(params, name)
    as_it_is = module(tokens)
    handle = module.get_submodule(path).register_forward_hook(lambda m, given, out: out.flip(-1))
    hooked = module(tokens)
    handle.remove()
    wanted = forward(params, tokens, name, {site: lambda x: x.flip(-1)})[0]
    assert torch.equal(hooked, wanted) and torch.equal(module(tokens, {site: lambda x: x.flip(-1)}), wanted)
    assert not torch.equal(hooked, as_it_is) and torch.equal(module(tokens), as_it_is)

def test_an_edit_comes_before_a_hook_and_a_hook_of_another_shape_is_refused():
    module = Transformer(population(MOE, (3,)), MOE)
    module.blocks[0].ffn_out.register_forward_hook(lambda m, given, out: out + 1)
    both = module(tokens_of(MOE), {"ffn_out": torch.zeros_like})
    assert torch.equal(both, Transformer(population(MOE, (3,)), MOE)(tokens_of(MOE), {"ffn_out": torch.ones_like}))
    module.blocks[0].ffn_out.register_forward_hook(lambda m, given, out: out[:1])
    with pytest.raises(ValueError, match="edit of 'ffn_out': expected shape"): module(tokens_of(MOE))

def test_gradients_reach_a_site_s_module_and_the_parameters():
    module, seen = Transformer(population(MOE, (3,)), MOE), []
    module.blocks[0].attn_out.register_full_backward_hook(lambda m, given, grad: seen.append(grad[0]))
    module(tokens_of(MOE))[:, -1].logsumexp(-1).sum().backward()
    assert seen[0].shape == (9, 8, 64) and seen[0].abs().max() > 0 and module.W_E.grad.abs().max() > 0

def test_a_module_s_state_is_a_member_and_copies_keep_their_sites():
    params = population(DEEP)
    module = Transformer(params, DEEP, member=1)
    assert {*module.state_dict()} == {*params}
    assert all(torch.equal(v, params[n][1]) for n, v in module.state_dict().items())
    other = Transformer(params, DEEP, seed=1)
    other.load_state_dict(module.state_dict())
    for again in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        again.blocks[1].ffn_out.register_forward_hook(lambda m, given, out: 0 * out)
        wanted = forward(member(params, 1), tokens_of(DEEP), DEEP, {"L1.ffn_out": torch.zeros_like})[0]
        assert torch.equal(again(tokens_of(DEEP)), wanted)

def test_a_module_prints_a_line_for_each_site_with_its_shape_in_the_order_of_the_pass():
    lines = [x.strip() for x in repr(Transformer(population(DEEP), DEEP, seed=1)).splitlines()]
    wanted = ["(embed): Site(b, 8, 64)", "(0-1): 2 x ModuleDict(", "(pattern): Site(b, 4, 8, 8)",
              "(gates): Site(b, 8, 2)", "(ffn_out): Site(b, 8, 64)", "(logits): Site(b, 8, 12)"]
    at = [lines.index(x) for x in wanted]
    assert at == sorted(at) and len([x for x in lines if "Site(" in x]) == 16 + 2

# ------------------------------------------------------------------------------------------------- seeds are seeds

def test_a_committed_checkpoint_is_written_in_the_authors_form_by_its_seeds():
    name = "add7/moe-e4k1-h256-silu"
    params = checkpoint(name)
    assert params.seeds == [42, 137, 256, 512, 1024]
    again, _ = from_authors(to_authors(params, name, 256), "silu")
    assert all(torch.equal(v, params[n][2:3]) for n, v in again.items())
    assert torch.equal(to_authors(params, name, member=2)["vocab.weight"], params["W_E"][2])

def test_a_population_of_the_store_is_asked_by_its_seeds(tmp_path):
    name, store = "add7/ffn-h8-silu", Store(tmp_path)
    for seed in (137, 42):
        weights = {n: v[0] for n, v in population(name, (seed,)).items()}
        store.save(Run(condition(name), seed, "authors", {"final": weights}, pd.DataFrame({"step": [1]}),
                       dict(seed=seed, stream="authors", step=1, failed=None)))
    params = store.population(name, [42, 137], "final")
    assert params.seeds == [42, 137] and place_of(params, 137) == 1
    assert torch.equal(to_authors(params, name, 137)["vocab.weight"], population(name, (137,))["W_E"][0])

@pytest.mark.parametrize("how, says", [(dict(seed=0), r"expected one of the seeds \[1, 2\]; got 0"),
                                       (dict(seed=1, member=0), "expected a seed or a place; got both")])
def test_a_seed_or_place_that_is_not_there_is_refused_with_those_that_are(how, says):
    params = population("add7/ffn-h8-silu")
    for out in (to_authors, Transformer):
        with pytest.raises(ValueError, match=says): out(params, "add7/ffn-h8-silu", **how)

def test_a_seed_that_two_members_have_is_no_place():
    with pytest.raises(ValueError, match=r"the seeds \[7, 7\]; got 7"): place_of(population(MOE, (7, 7)), 7)

# ------------------------------------------------------------------------------------------------------ plain files

@pytest.mark.parametrize("name", NAMES)
def test_a_member_in_a_plain_file_is_that_member_and_the_file_says_which(name, tmp_path):
    params = population(name, (7, 8))
    path = save_member(tmp_path / "m.safetensors", params, name, seed=8)
    again, said = open_member(path)
    assert said == name and again.seeds == [8] and again.condition.name == name
    assert all(torch.equal(again[n], v[1:]) for n, v in params.items()) and len(again) == len(params)
    assert (forward(again, tokens_of(name), said) - forward(params, tokens_of(name), name)[1]).abs().max() < 1e-5

def test_a_plain_file_is_read_without_this_project(tmp_path):
    params = dict(population(MOE))
    path = save_member(tmp_path / "m.safetensors", params, MOE, member=1)
    with safetensors.safe_open(path, "pt") as f: said, names = f.metadata(), {*f.keys()}
    assert said["condition"] == MOE and "seed" not in said and names == {*params}
    assert torch.equal(safetensors.torch.load_file(path)["W_router"], params["W_router"][1])
    assert open_member(path)[0].seeds is None

@pytest.mark.parametrize("spoil, says", [
    (lambda p: p.write_bytes(p.read_bytes()[:-2] + b"\1\1"), "it was altered"),
    (lambda p: safetensors.torch.save_file({"w": torch.ones(2)}, p), "a file that save_member wrote")])
def test_a_plain_file_that_is_not_what_was_written_is_refused(spoil, says, tmp_path):
    spoil(path := save_member(tmp_path / "m.safetensors", population(MOE), MOE, seed=1))
    with pytest.raises(ValueError, match=says): open_member(path)

SCALED = """
from moe_redistribution.models.routers import Router
from moe_redistribution.basics.kinds import register

@register("router", "scaled")
class Scaled(Router):
    def logits(self, held, x, c): return super().logits(held, x, c) * 3
"""

def test_a_member_whose_own_code_was_edited_is_opened_with_a_word(own_file, tmp_path, recwarn):
    "The new rule ran on the old weights without one."
    own_file.write_text(SCALED)
    import_file(own_file)
    name = "add7/moe-e4k2-h16-silu+scaled"
    path = save_member(tmp_path / "m.safetensors", population(name), name, seed=1)
    open_member(path)
    assert not recwarn.list
    own_file.write_text(SCALED.replace("* 3", "* 4"))
    import_file(own_file)
    with pytest.warns(UserWarning, match=r"router of .*\+scaled: expected what today's code gives .*; fix: the code"):
        open_member(path)

def test_a_file_of_a_member_is_of_the_condition_that_its_parameters_are_of(tmp_path):
    with pytest.raises(ValueError, match="expected W_up"):
        save_member(tmp_path / "m.safetensors", dict(population(MOE)), "add7/moe-e4k1-h32-silu", member=0)
    assert not any(tmp_path.iterdir())

# -------------------------------------------------------------------------------------------------- TransformerLens

LENS = ["add7/ffn-h16-silu", "modadd/glu-h20-gelu", "hist/no_ffn", "add7/ffn-h16-relu+norm+L2", "hist/ffn-h8-gelu",
        "add7/moe_glu-e4k2-h16-silu+L2", "add7/moe_glu-e4k1-h16-silu+switch+frozen", "add7/no_ffn+norm",
        "modadd/moe_glu-e4k1-h16-gelu+norm"]

@pytest.mark.audit
@pytest.mark.parametrize("name", LENS)
@torch.no_grad()
def test_a_model_in_transformer_lens_gives_the_same_logits(name):
    "Of random biases and gains, too, so that none can be lost. `pip install 'transformer-lens<4'` has experts."
    pytest.importorskip("transformer_lens")
    params = Trained({n: v + .1 * torch.randn_like(v) for n, v in population(name).items()}, name, (1, 2))
    try: model = to_transformer_lens(params, name, seed=2)
    except ValueError as e:
        assert "moe_glu" in name and "whose HookedTransformer has experts; got 4 or later" in str(e)
        pytest.skip("its bridge has no experts")
    wanted = forward(params, tokens_of(name), name)[1]
    assert (model(tokens_of(name)) - wanted).abs().max() < 1e-5 * max(1, wanted.abs().max())

def test_without_transformer_lens_one_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_lens", None)
    with pytest.raises(ImportError, match="got none; fix: pip install transformer-lens"):
        to_transformer_lens(population(LENS[0]), LENS[0], seed=1)

@pytest.mark.parametrize("name", LENS)
def test_every_parameter_has_a_name_in_transformer_lens_but_a_tied_unembedding_has_two(name):
    "Each parameter's numbers are in it once; what is in it besides is zero."
    p = {n: v[0] for n, v in population(name).items()}
    state = _lens_state(p, name)
    own = sum(v.numel() for n, v in p.items() if not (n == "w_ln2" and "no_ffn" in name))
    tied = state["unembed.W_U"].numel() if get_task(name.split("/")[0]).tied else 0
    theirs = sum(v.numel() for n, v in state.items() if not n.endswith(("b_Q", "b_K", "b_V", "b_U")))
    assert theirs == own + tied and not any(v.any() for n, v in state.items() if n.endswith(("b_Q", "b_K", "b_V")))

# ----------------------------------------------------------------------------------------------------- transformers

@pytest.mark.parametrize("name", ["add7/ffn-h16-silu+norm", "add7/ffn-h12-gelu+norm+L2"])
@torch.no_grad()
def test_a_normed_dense_model_is_a_folder_that_transformers_opens(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    params = Trained({n: v + .1 * torch.randn_like(v) for n, v in population(name).items()}, name, (1, 2))
    to_transformers(params, name, seed=2).save_pretrained(tmp_path)
    opened = transformers.ImageGPTForCausalImageModeling.from_pretrained(tmp_path)
    wanted = forward(params, tokens_of(name), name)[1]
    assert (opened(tokens_of(name)).logits - wanted).abs().max() < 1e-5 * max(1, wanted.abs().max())
    assert type(transformers.AutoModel.from_pretrained(tmp_path)).__name__ == "ImageGPTModel"

@pytest.mark.parametrize("family", ["olmoe", "mixtral", "llama", "gpt2"])
@torch.no_grad()
def test_a_language_model_trained_here_is_a_folder_that_transformers_and_open_model_open(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    model, _ = small_model(family, 20, seed=1, d=16, T=16)
    before = [p.clone() for p in model.parameters()]
    with torch.enable_grad(): train_language(model, lambda step: torch.arange(34).view(2, 17) % 20, steps=2, looks=1)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
    model.eval().save_pretrained(tmp_path)
    tokens = torch.arange(12)[None]
    wanted, auto = model(tokens).logits, transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(auto) is type(model) and (auto(tokens).logits - wanted).abs().max() < 1e-5
    assert (open_model(tmp_path).run(tokens)[0] - wanted).abs().max() < 1e-5

# ------------------------------------------------------------------------------------------------------------- rows

def test_rows_leave_as_csv_json_and_parquet_with_every_digit(tmp_path):
    frame = rows([1 / 3, 2e-15, float("nan")], [1, 2, 3], condition=MOE, metric="p").assign(unit=["L0.H1", "é", ""])
    for form in ("csv", "json", "parquet"): write_frame(frame, table_file(tmp_path / f"r.{form}"))
    assert write_frame(frame, tmp_path / "s.JSON").read_bytes() == (tmp_path / "r.json").read_bytes()
    said = json.loads((tmp_path / "r.json").read_text())
    assert [r["value"] for r in said][1:] == [2e-15, None] and said[0]["value"] == pytest.approx(1 / 3, abs=1e-12)
    assert [r["unit"] for r in said] == ["L0.H1", "é", ""]
    exact = dict(keep_default_na=False, na_values={"value": ""})
    for back in (pd.read_parquet(tmp_path / "r.parquet"), pd.read_csv(tmp_path / "r.csv", **exact)):
        assert back["value"].tolist()[:2] == pytest.approx([1 / 3, 2e-15], rel=1e-11) and back["value"].isna()[2]
        assert back.drop(columns="value").equals(frame.drop(columns="value"))

def test_a_printed_table_has_every_digit_in_json_too(capsys):
    "pandas' own way rounds to ten places: a p of 2e-15 is 0 there."
    show_table(pd.DataFrame(dict(p=[2e-15, 1 / 3, float("inf")], n=[1, 2, 3])), SimpleNamespace(json=True, csv=False))
    said = json.loads(capsys.readouterr().out)
    assert [r["p"] for r in said] == [2e-15, 1 / 3, None] and [r["n"] for r in said] == [1, 2, 3]

# ---------------------------------------------------- a tool that is no dependency: `pip install nnsight`, `make audit`

@pytest.mark.audit
def test_nnsight_finds_the_sites_and_edits_them():
    nnsight, params, tokens = pytest.importorskip("nnsight"), population(MOE), tokens_of(MOE)
    model = nnsight.NNsight(Transformer(params, MOE, seed=1))
    with model.trace(tokens):
        pattern, probs = model.blocks[0].pattern.output.save(), model.blocks[0].router_probs.output.save()
        model.blocks[0].ffn_out.output[:] = 0
        logits = model.logits.output.save()
    of = trace(member(params, 0), tokens, MOE, edits={"ffn_out": torch.zeros_like})
    assert torch.equal(pattern, of["pattern"][0]) and torch.equal(probs, of["router_probs"][0])
    assert torch.equal(logits, of["logits"][0])
