"""Loads and two checkpoints: each count is a plain loop's, chance stands beside it, and a stop changes nothing."""
from copy import deepcopy
from functools import wraps

import pytest
import torch
from transformers.utils import logging

from moe_redistribution.judge.audits import changes_table
from moe_redistribution.instruments.trace import trace
from moe_redistribution.opened.families import tiny_model
from moe_redistribution.opened.loads import (compare_routes, comparison_table, load_map, loads_table,
                                               stretch_of, text_loads, _add_changes, _own_routes)
from moe_redistribution.opened.opened import LanguageModel, open_model
from moe_redistribution.opened.streaming import byte_tokens, text_windows

logging.disable_progress_bar()

@pytest.fixture(scope="module")
def s(): return open_model(tiny_model("mixtral", vocab_size=256))

def value(rows, **where):
    for k, v in where.items(): rows = rows[rows[k] == v]
    return rows["value"].item()

@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_loads_and_margins_are_those_of_a_plain_loop(family, text):
    s = open_model(tiny_model(family, vocab_size=256))
    found, l = text_loads(s, text, byte_tokens, context=16, batch=8), s.n_layers - 1
    whole = torch.stack(list(text_windows(text, byte_tokens, 16)))[:, :-1]
    tr = trace(s, whole, keep=[f"L{l}.{n}" for n in ("routes", "gates", "router_logits")])
    n, here = whole.numel(), dict(site=f"L{l}.routes", rule="final")
    routes, gates, z = (tr[f"L{l}.{n}"][0].flatten(0, 1) for n in ("routes", "gates", "router_logits"))
    for e in range(gates.shape[1]):
        assert value(found, metric="load", unit=f"E{e}", **here) == pytest.approx((routes == e).sum().item() / n)
        assert value(found, metric="gate_mass", unit=f"E{e}", **here) == pytest.approx(gates[:, e].mean().item(), 1e-4)
    if family == "deepseek_v3":                                     # groups choose first: scores are not its margin
        assert not {"margin", "near_ties"} & {*found.query(f"site == 'L{l}.routes'")["metric"]}
        return
    margins = sorted(min(x[r].min().item() - max(v for e, v in enumerate(x.tolist()) if e not in r), 1e9)
                     for x, r in zip(z, routes))
    got = value(found, metric="margin", unit="", stratum="q0.50", **here)
    assert got == pytest.approx(max(margins[len(margins) // 2], 0), rel=.1, abs=1e-6)

def test_pads_and_special_tokens_do_not_count(s, text):
    padded = LanguageModel(s.model, pad=0)
    def spaced(told): return [t for c in byte_tokens(told) for t in ([c, 0] if c == 32 else [c])]
    pads, bare = text_loads(padded, text, spaced, context=16), text_loads(s, text, byte_tokens, context=16)
    def apart(told): return byte_tokens(told)
    apart.specials = {32}
    some = text_loads(s, text, apart, context=16)
    words = len(text.read_text().replace(" ", ""))
    assert abs(bare["n_examples"].max() - 1650) < 17 and abs(some["n_examples"].max() - words) < 17
    assert abs(pads["n_examples"].max() - 1650) < 17
    for rows in (pads, some):                                 # each token still goes to two
        own = rows.query("site == 'L1.routes' and metric == 'load' and rule == 'final'")
        assert own["value"].sum() == pytest.approx(2)

def test_a_router_of_equal_rows_is_all_near_ties_and_idle_experts_are_counted(text):
    model = tiny_model("mixtral", vocab_size=256)
    model.model.layers[0].mlp.gate.weight.data[:] = model.model.layers[0].mlp.gate.weight.data[:1]
    found = text_loads(open_model(model), text, byte_tokens, context=16)
    assert value(found, site="L0.routes", metric="near_ties") == 1
    assert value(found, site="L0.routes", metric="margin", unit="", stratum="q0.95") == 0
    table = loads_table(found)
    assert table.loc["L0", "idle"] == 2 and table.loc["L0", "entropy"] == pytest.approx(1)
    assert load_map(found).get_xlabel() == "expert"

class Stop(Exception): pass

def after(n):
    said = []
    def say(text):
        said.append(text)
        if len(said) == n: raise Stop
    return say

def test_loads_and_a_comparison_that_were_stopped_go_on_to_the_same_rows(s, text, tmp_path, monkeypatch):
    monkeypatch.setattr("time.monotonic", iter(range(0, 10_000, 10)).__next__)
    other = open_model(tiny_model("mixtral", seed=1, vocab_size=256))
    for ask in (text_loads, lambda a, *rest, **of: compare_routes(a, other, *rest, **of)):
        straight, part, rest = ask(s, text, byte_tokens, context=16, batch=4), tmp_path / "a.part", []
        with pytest.raises(Stop): ask(s, text, byte_tokens, context=16, batch=4, part=part, say=after(4))
        again = ask(s, text, byte_tokens, context=16, batch=4, part=part, say=rest.append)
        assert again.equals(straight) and len(rest) == 25 - 3

def test_what_a_run_holds_does_not_grow_with_the_text(s, text, tmp_path):
    long, sizes = tmp_path / "long.txt", []
    long.write_text(text.read_text() * 5)
    for path in (text, long):
        text_loads(s, path, byte_tokens, context=16, part=tmp_path / "b.part")
        sizes.append((tmp_path / "b.part").stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 64                                          # the names of numbers, no more
    assert stretch_of(3, 7) == 3 and stretch_of(9_999, 10_000) == 199

def test_unrelated_routers_agree_as_much_as_shuffled_tokens_and_a_noisy_copy_more(s, text):
    def compared(model): return compare_routes(s, open_model(model), text, byte_tokens, context=16)
    noisy = deepcopy(s.model)
    for w in noisy.parameters(): w.data += .02 * torch.randn(w.shape, generator=torch.Generator().manual_seed(1))
    near, far = compared(noisy), compared(tiny_model("mixtral", seed=5, vocab_size=256))
    for rows, more in ((near, .2), (far, None)):
        for l in range(2):
            here = dict(site=f"L{l}.routes", metric="overlap")
            gain = value(rows, unit="", **here) - value(rows, unit="permuted", **here)
            assert gain > more if more else abs(gain) < .2
    assert value(near.query("seed == 0"), metric="divergence") < value(far.query("seed == 0"), metric="divergence")
    lost = near.query("metric == 'loss'").groupby("unit")["value"].mean()
    assert near.query("metric == 'loss_difference'")["value"].mean() == pytest.approx(lost["B"] - lost["A"])
    assert list(comparison_table(near).index) == ["L0", "L1"]

class Hangs(torch.nn.Module):
    "As PEFT wraps a model: its adapter lies within the model itself."
    def __init__(self, base): super().__init__(); self.base = base

    def get_base_model(self): return self.base

def test_models_that_do_not_read_the_same_are_refused(s, text):
    for other, says in ((tiny_model("mixtral", vocab_size=256, num_local_experts=6), "routers over"),
                        (tiny_model("llama", vocab_size=256), "which is dense"),
                        (Hangs(s.model), "two models with modules of their own; got the same modules in both")):
        with pytest.raises(ValueError, match=says):
            compare_routes(s, open_model(other), text, byte_tokens, context=16)


# ------------------------------------------------------------------------------------------------ the same model twice

def changed(rows, layer=0):
    own = rows[rows["metric"].eq("changed") & rows["site"].eq(f"L{layer}.routes")]
    return own.groupby("stratum")["value"].mean()

def test_a_margin_of_zero_flips_and_a_large_one_does_not(text):
    model = tiny_model("mixtral", vocab_size=256)
    gate = model.model.layers[0].mlp.gate.weight.data
    gate[:] *= 20                                    # large margins, but for two experts whose scores are the same
    gate[2] = gate[1]
    nudged = deepcopy(model)
    nudged.model.layers[0].mlp.gate.weight.data[2] *= 1 + 1e-3
    nudged.model.layers[0].mlp.gate.weight.data[1] *= 1 - 1e-3
    at = changed(compare_routes(open_model(model), open_model(nudged), text, byte_tokens, context=16))
    assert .2 < at["margin 0"] <= 1 and at["above 1"] == 0 and at["all"] > 0
    on = torch.tensor([[True, False], [True, False]])
    state = dict(tokens=torch.zeros(1))
    _add_changes(state, 0, on, on.flip(1), torch.tensor([[1., 1], [3, 0]]), torch.zeros(2, dtype=torch.int64))
    assert state["0 changed by margin"].tolist() == [[1, 0, 0, 0, 0, 1]] * 2

@pytest.mark.parametrize("family", ["mixtral", "olmoe", "gpt_oss", "deepseek_v3"])
def test_the_same_side_twice_changes_nothing_and_its_routes_are_those_of_a_watched_pass(family, text):
    a, b = (open_model(tiny_model(family, vocab_size=256)) for _ in range(2))
    rows = compare_routes(a, b, text, byte_tokens, context=16)
    assert (rows.loc[rows["metric"] == "changed", "value"] == 0).all() and "@" not in rows["condition"][0]
    assert (rows.loc[rows["metric"].isin(["divergence", "loss_difference"]), "value"] == 0).all()
    own, tokens = [a.n_layers - 1], torch.stack(list(text_windows(text, byte_tokens, 16)))[:4, :-1]
    tr, routes = trace(a, tokens, keep=[f"L{own[0]}.routes"]), _own_routes(a, tokens, own)[1][own[0]][0]
    assert tr[f"L{own[0]}.routes"][0].flatten(0, 1).sort(1)[0].equal(routes.sort(1)[0])

def test_another_function_of_the_experts_is_really_used_and_said(text, monkeypatch):
    a, b = (open_model(tiny_model("mixtral", vocab_size=256)) for _ in range(2))
    b.model.set_experts_implementation("batched_mm")
    from transformers.integrations import moe
    calls, own = [], moe.ALL_EXPERTS_FUNCTIONS["batched_mm"]
    monkeypatch.setitem(moe.ExpertsInterface._global_mapping, "batched_mm",
                        wraps(own)(lambda *args, **more: (calls.append(1), own(*args, **more))[1]))
    rows = compare_routes(a, LanguageModel(b.model), text, byte_tokens, context=16, tokens=64)
    assert calls and rows["condition"][0].endswith("@float32/batched_mm")
    assert list(changes_table(rows).index) == ["L0", "L1"]

def test_two_models_on_a_text_without_a_token_that_counts_are_refused_and_stretches_without_one_have_no_row(s, tmp_path):
    def letters(text): return byte_tokens(text)
    letters.specials, other = {65}, LanguageModel(deepcopy(s.model), name="other")
    (path := tmp_path / "a.txt").write_text("A" * 200)
    with pytest.raises(ValueError, match="tokens that count"): compare_routes(s, other, path, letters, context=16)
    path.write_text("".join(map(chr, range(32, 96))) * 4 + "~" * 256)
    padded = [LanguageModel(m.model, pad=ord("~"), name=m.name) for m in (s, other)]
    found = compare_routes(*padded, path, byte_tokens, context=16)
    loss = found.query("metric == 'loss'")
    assert (loss["value"] > 0).all() and (loss["n_examples"] > 0).all()
