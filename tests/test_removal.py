"""Experts of all layers removed: scores are REAP's, what is removed is really pruned, and random sets are like it."""
import json

import pandas as pd
import pytest
import torch
from transformers.utils import logging

from moe_redistribution.judge.audits import removal_table
from moe_redistribution.instruments.trace import trace
from moe_redistribution.opened.audit import audit
from moe_redistribution.opened.families import tiny_model
from moe_redistribution.opened.opened import LanguageModel, open_model
from moe_redistribution.opened.removal import (EXPERT_SCORES, keep_list, removal, _lowest, _random_set,
                                                 _random_sets, _scores, _expert_sums, _without_experts)
from moe_redistribution.opened.streaming import byte_tokens
from moe_redistribution.record.cli import main

logging.disable_progress_bar()
SIZES = dict(vocab_size=256, num_experts_per_tok=2)

@pytest.fixture(scope="module")
def s(): return open_model(tiny_model("olmoe", num_experts=8, **SIZES))

@pytest.mark.parametrize("family, count", [("mixtral", "num_local_experts"), ("olmoe", "num_experts")])
def test_a_masked_model_is_the_pruned_one_and_is_whole_again_afterwards(family, count):
    model = tiny_model(family, **SIZES | {count: 8})
    s, tokens, stay = open_model(model), torch.arange(1, 61).view(3, 20), [0, 2, 3, 4, 6, 7]
    before = s.plain(tokens)
    with _without_experts(s, [f"L{l}.E{e}" for l in range(2) for e in (1, 5)]): masked = s.plain(tokens)
    assert not masked.equal(before) and s.plain(tokens).equal(before)
    for layer in model.model.layers:
        layer.mlp.gate.weight.data = layer.mlp.gate.weight.data[stay]
        for w in layer.mlp.experts.parameters(): w.data = w.data[stay]
        layer.mlp.gate.num_experts = layer.mlp.experts.num_experts = 6
    assert (model(input_ids=tokens, use_cache=False).logits - masked).abs().max() < 1e-5

def test_the_score_of_reap_is_the_mean_of_gate_times_norm_over_an_experts_tokens(s):
    tokens = torch.arange(1, 43).view(2, 21)
    got = _scores(_expert_sums(s, [tokens], [f"L1.E{e}" for e in range(8)])[0])["reap"]
    tr = trace(s, tokens[:, :-1], keep=["L1.gates", *(f"L1.E{e}" for e in range(8))])
    for e in range(8):
        g = tr["L1.gates"][..., e].flatten()
        g = g[g != 0]
        own = (g * tr[f"L1.E{e}"][0].norm(dim=-1)).mean() if len(g) else torch.tensor(0.)
        assert got[e].item() == pytest.approx(own.item(), rel=1e-4)

def test_the_lowest_of_each_layer_go_and_random_sets_have_their_size_and_nearly_their_load():
    experts, load = {0: 8, 2: 8}, torch.arange(16.) ** 2
    low, g = _lowest(load, experts, .25), torch.Generator().manual_seed(0)
    assert low == ("L0.E0", "L0.E1", "L2.E0", "L2.E1")
    def of(names): return sum(load[int(n[1]) * 4 + int(n[-1])].item() for n in names)
    sizes, loads = ([_random_set(experts, .25, g, *more) for _ in range(20)] for more in ((), (low, load)))
    assert all(len(x) == 4 for x in sizes + loads) and not any({*x} & {*low} == {*low} for x in loads)
    assert max(map(of, loads)) < sum(map(of, sizes)) / 20

def test_an_expert_that_says_nothing_costs_nothing_and_reap_finds_it(text):
    model = tiny_model("mixtral", num_local_experts=8, **SIZES)
    for layer in model.model.layers: layer.mlp.experts.down_proj.data[[2, 5]] = 0
    s = open_model(model)
    found = removal(s, text, byte_tokens, context=16, draws=2, effects=audit(s, text, byte_tokens, 16, n_sets=0))
    gone = found[found["metric"].eq("removed")].groupby("unit")["site"].apply(set)
    assert gone["reap"] == {"L0.E2", "L0.E5", "L1.E2", "L1.E5"} and {*gone.index} == {*EXPERT_SCORES}
    assert keep_list(s, found)["model.layers.1.mlp"] == [0, 1, 3, 4, 6, 7]
    assert removal_table(found).loc["reap", "jaccard 1/1"].startswith("1.00")

def test_what_cannot_be_removed_is_refused(s, text):
    few = audit(s, text, byte_tokens, 16, tokens=64, units=("L0.E1",), n_sets=0)
    for more, says in ((dict(effects=few), "rows of `audit` for every expert"),
                       (dict(draws=0), "one random set or more; got 0; nearest valid: 1")):
        with pytest.raises(ValueError, match=says): removal(s, text, byte_tokens, context=16, **more)
    with pytest.raises(ValueError, match="dense"):
        removal(open_model(tiny_model("llama", vocab_size=256)), text, byte_tokens, context=16)

def test_the_command_prints_a_line_for_each_score_and_writes_whom_to_keep(s, text, tmp_path, capsys):
    s.model.save_pretrained(tmp_path / "a")
    ask = f"removal --model {tmp_path / 'a'} --text {text} --bytes --context 16 --draws 1".split()
    ask += ["--out", str(tmp_path / "r.csv")]
    assert main(ask) == 0 and "weight_norm" in capsys.readouterr().out
    assert [len(x) for x in json.loads((tmp_path / "r.keep.json").read_text()).values()] == [6, 6]

def test_draws_differ_from_one_another_and_from_the_set_that_they_stand_beside():
    experts, load, g = {0: 4, 1: 4}, torch.arange(8.), torch.Generator().manual_seed(0)
    low = _lowest(load, experts, .25)
    for like in (None, low):
        sets = _random_sets(9, experts, .25, g, like, load, [low])
        assert len({*sets}) == 9 and low not in sets
    one = {0: 8}
    assert len({*_random_sets(20, one, .25, g, (low := _lowest(load, one, .25)), load, [low])}) == 20
    with pytest.raises(ValueError, match="up to 3 different sets"): _random_sets(4, {0: 4}, .25, g, ("L0.E0",), load, [("L0.E0",)])

def test_a_share_that_is_no_binary_fraction_takes_as_many_as_it_says():
    assert len(_lowest(torch.arange(100.), {0: 100}, .29)) == 29 and len(_random_set({0: 100}, .29, torch.Generator())) == 29

def test_effects_and_rows_are_those_of_this_model_of_one_edit_and_of_every_expert(s, text):
    found = audit(s, text, byte_tokens, 16, n_sets=0)
    other = found.assign(condition="other")
    for wrong, says in ((other, f"rows of {s.name}"), (pd.concat([found, found.assign(edit="mean")]), "rows of one edit"),
                        (found.assign(value=found["value"].mask(found["site"] == "L1.E3")), "none for L1.E3")):
        with pytest.raises(ValueError, match=says): removal(s, text, byte_tokens, context=16, draws=1, effects=wrong)
    mixed = pd.concat([found, other.assign(value=-other["value"])])
    a, b = (removal(s, text, byte_tokens, context=16, draws=1, effects=f) for f in (found, mixed))
    pd.testing.assert_frame_equal(a, b)
    with pytest.raises(ValueError, match=f"rows of {s.name}"): keep_list(s, a.assign(condition="other"))

def test_windows_of_padding_alone_are_no_windows(s, tmp_path):
    words = "".join(map(chr, range(32, 96))) * 4
    (path := tmp_path / "a.txt").write_text(words + "~" * 256)
    with_pads = LanguageModel(s.model, pad=ord("~"), name=s.name)
    (bare := tmp_path / "b.txt").write_text(words + "~")
    a, b = (removal(with_pads, p, byte_tokens, context=16, draws=1).query("metric == 'loss_change'") for p in (path, bare))
    assert len(a) == len(b) and a["value"].to_numpy() == pytest.approx(b["value"].to_numpy(), abs=1e-6)
    (path := tmp_path / "c.txt").write_text("~" * 256)
    with pytest.raises(ValueError, match="no padding"): removal(with_pads, path, byte_tokens, context=16)
