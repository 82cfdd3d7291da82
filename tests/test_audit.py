"""Audits: passes that begin at the edit are whole ones, planted truths are found, and chance is found nowhere."""
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import torch
from transformers.utils import logging

from moe_redistribution.judge.audits import audit_map, audit_table, saliency_table, shown_audit, _sign_flip_tests
from moe_redistribution.instruments.ablation import combine_edits
from moe_redistribution.opened import watched
from moe_redistribution.opened.audit import (AuditPlan, audit, audit_forecast, audit_plan, audit_units, _drawn_pairs,
                                               _same_size)
from moe_redistribution.opened.recorded import RecordedBatch, start_of
from moe_redistribution.opened.regret import route_regret
from moe_redistribution.opened.families import MIXTURES, tiny_model
from moe_redistribution.opened.opened import LanguageModel, open_model
from moe_redistribution.opened.streaming import byte_tokens, text_ablation, text_windows
from moe_redistribution.record.cli import main
from tiers import first

logging.disable_progress_bar()

@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("And God said, Let there be light: and there was light. " * 16)
    return path

@pytest.fixture(scope="module")
def s(): return open_model(tiny_model("mixtral", vocab_size=256, num_hidden_layers=3))

def effects(rows, unit="", stratum="all"):
    own = rows[rows["metric"].eq("effect") & rows["unit"].eq(unit) & rows["stratum"].eq(stratum)]
    return own.groupby(["site", "edit"])["value"].mean()

# --------------------------------------------------------------------------------------- a pass that begins at the edit

SOME = ("mixtral", "olmoe", "deepseek_v3", "gpt_oss", "ernie4_5_moe", "kimi_linear", "deepseek_v4", "gemma4_text")

@pytest.mark.parametrize("family", first(SOME, MIXTURES))
def test_a_pass_that_begins_at_the_edit_has_the_losses_of_a_whole_one_in_every_family_or_says_that_it_has_not(family):
    s = open_model(tiny_model(family))
    b = RecordedBatch(s, torch.randint(3, 40, (5, 13), generator=torch.Generator().manual_seed(0)))
    busy = {l: int((b.gates_of(l) != 0).sum((0, 1)).argmax()) for l, x in enumerate(s.layers) if x.experts is not None}
    units = [*(f"L{l}.E{e}" for l, e in busy.items()), *(u for u in s.units if ".H1" in u)]
    units += [x for x in s.sites if x.endswith("ffn_out")]
    for how in ("zero", "route_around"):
        free = {l for l in busy if f"L{l}.router_logits" in s.sites and "Hash" not in type(s.layers[l].gate).__name__}
        here = units if how == "zero" else [f"L{l}.E{busy[l]}" for l in free]
        if not here: continue
        passes = list(AuditPlan(s, audit_units(s, here), (how,), every=2, n_sets=0).passes(b, torch.arange(5)))
        assert {p.sums for p in passes} == {"effect", "null"}
        for p in passes:
            whole, same = b.checked_losses(p.edits, p.at, p.touched)
            if (family, how) == ("inkling_text", "route_around"):
                assert not same                  # another route weighs its shared experts anew: an audit makes whole passes there
                continue
            short = b.losses(p.edits, p.at, p.touched)
            assert same and (short - whole).abs().max() <= 1e-5, (how, start_of(s, p.edits))

def test_every_edit_of_an_expert_is_that_of_an_ablation_and_sets_are_their_members_together(s, text):
    edits = ("zero", "mean", "route_around", "swap:E2")
    for units, how in ((("L1.E1", "L2.H1", "L0.ffn_out"), edits[:2]), (("L0.E1", "L2.E0"), edits)):
        own = effects(audit(s, text, byte_tokens, 16, tokens=300, units=units, edits=how, n_sets=0))
        rows = text_ablation(s, text, byte_tokens, 16, tokens=300, units=units, edits=how)
        loss = rows.query("metric == 'loss'").set_index(["site", "edit"])["value"]
        for u in units:
            for e in how: assert own[u, e] == pytest.approx(loss[u, e] - loss["none", "none"], abs=2e-6), (u, e)
    both = effects(audit(s, text, byte_tokens, 16, units=("L1.E0+E3", "L*.ffn_out"), n_sets=3))
    windows = torch.stack(list(text_windows(text, byte_tokens, 16)))
    for name, all_of in (("L1.E0+E3", {"L1.E0": "zero", "L1.E3": "zero"}), ("L*.ffn_out", {"L*.ffn_out": "zero"})):
        b = RecordedBatch(s, windows)
        rise = b.over_windows(b.losses(combine_edits(s, all_of), share=False)) - b.loss
        assert both[name, "zero"] == pytest.approx(rise.mean().item(), abs=2e-6)

def test_a_layer_that_hears_of_another_by_a_way_of_its_own_gets_whole_passes_and_a_row_says_so(text):
    model, heard = tiny_model("mixtral", vocab_size=256, num_hidden_layers=3), {}
    early, late = (model.model.layers[l].mlp for l in (0, 2))
    own_early, own_late = early.forward, late.forward
    def tell(x):
        heard["x"] = own_early(x)
        return heard["x"]
    s = open_model(model)
    early.forward, late.forward = tell, lambda x: own_late(x + heard["x"][:, :1].mean(-1, keepdim=True))
    said = []
    found = audit(s, text, byte_tokens, 16, units=("L1.E0", "L2.E1"), say=said.append)
    assert "L2" in set(found.query("metric == 'whole_pass'")["site"]) and any("passes are whole" in x for x in said)
    rows = text_ablation(s, text, byte_tokens, 16, units=("L1.E0", "L2.E1"), edits=("zero",))
    loss = rows.query("metric == 'loss'").set_index("site")["value"]
    for u in ("L1.E0", "L2.E1"):
        assert effects(found)[u, "zero"] == pytest.approx(loss[u] - loss["none"], abs=2e-6)

def test_padding_is_no_load_and_no_loss(text):
    s, padded = (LanguageModel(tiny_model("mixtral", vocab_size=256), pad=p) for p in (None, 0))
    windows = torch.stack(list(text_windows(text, byte_tokens, 16))[:3])
    longer = torch.nn.functional.pad(windows, (0, 4))
    a, b = RecordedBatch(s, windows), RecordedBatch(padded, longer)
    assert (a.loss - b.loss).abs().max() < 1e-5 and b.gates_of(1)[:, 17:].abs().max() == 0
    edits = {"L1.gates": lambda g: g.index_fill(-1, torch.tensor([1]), 0)}
    assert (a.over_windows(a.losses(edits)) - b.over_windows(b.losses(edits))).abs().max() < 1e-5

# ------------------------------------------------------------------------------------------------------- planted truths

def test_equal_experts_can_be_swapped_and_a_silent_one_closed_without_effect(text):
    model = tiny_model("mixtral", vocab_size=256)
    for layer in model.model.layers:
        for w in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj): w.data[:] = w.data[:1]
    model.model.layers[1].mlp.experts.down_proj.data[3] = 0
    s = open_model(model)
    swapped = audit(s, text, byte_tokens, 16, units=[f"L0.E{e}" for e in range(4)], edits=("swap:E2",))
    assert effects(swapped).abs().max() < 1e-6 and len(effects(swapped)) == 3
    closed = audit(s, text, byte_tokens, 16, units=("L0.E1", "L1.E3"))
    word = audit_table(closed).set_index("unit")["verdict"]
    assert word["L1.E3"] == "fails" and effects(closed)["L1.E3", "zero"] == 0
    assert abs(effects(closed)["L0.E1", "zero"]) > 1e-3

def carrier(E=8):
    "A one-layer Mixtral whose expert 0 alone knows that z follows q; other experts add a little noise."
    model = tiny_model("mixtral", vocab_size=256, num_hidden_layers=1, num_local_experts=E, num_experts_per_tok=1)
    layer, head = model.model.layers[0], model.lm_head.weight.data
    layer.self_attn.o_proj.weight.data[:] = 0
    model.model.embed_tokens.weight.data[:, 0], model.model.embed_tokens.weight.data[ord("q"), 0] = 0, 5
    gate, up, down = layer.mlp.gate.weight.data, layer.mlp.experts.gate_up_proj.data, layer.mlp.experts.down_proj.data
    gate[:, 0], gate[0] = 0, 0
    gate[0, 0] = 50
    layer.post_attention_layernorm.weight.data[:] = 1
    model.model.norm.weight.data[:] = 1
    down *= .05
    up[0], down[0] = 0, 0
    half = up.shape[1] // 2
    up[0, 0, 0] = up[0, half, 0] = 2                                    # reads what marks a q, and nothing else
    down[0, 1, 0] = 30
    head[:, 1], head[ord("z"), 1] = 0, 3
    return model

def test_the_expert_that_carries_a_class_of_tokens_is_found_and_others_are_not(tmp_path):
    g, path = np.random.default_rng(0), tmp_path / "q.txt"
    letters = [chr(97 + i) for i in g.integers(0, 16, 2_000)]
    path.write_text("".join(c + "qz" * (g.random() < .2) for c in letters))
    s = open_model(carrier())
    found = audit(s, path, byte_tokens, 24, every=1)
    table = audit_table(found).set_index("unit")
    assert table.index[0] == "L0.E0" and table.loc["L0.E0", "verdict"] == "holds"
    assert (table["verdict"].drop("L0.E0") != "holds").all()
    assert table.loc["L0.E0", "larger"] == 1 / 8 and table.loc["L0.E0", "of"] == 7
    reap = saliency_table(found).set_index("saliency")["correlation"]
    load = found.query("metric == 'saliency' and unit == 'load'").set_index("site")["value"]
    assert reap["reap"] > reap["load"] and load["L0.E0"] < load.max()           # it is not the busiest
    assert "holds" in shown_audit(table.reset_index()) and audit_map(table.reset_index()).get_xlabel()

def blind(seed, E=8):
    """A one-layer Mixtral of equal experts in which a route says nothing, and every routed term helps as much: it says
    that only the first half of the vocabulary occurs. The router reads eight numbers that nothing else reads."""
    model = tiny_model("mixtral", seed=seed, vocab_size=4_000, num_hidden_layers=1, num_local_experts=E)
    g, layer = torch.Generator().manual_seed(seed), model.model.layers[0]
    table, gate, head = model.model.embed_tokens.weight.data, layer.mlp.gate.weight.data, model.lm_head.weight.data
    up, down = layer.mlp.experts.gate_up_proj.data, layer.mlp.experts.down_proj.data
    table[:] = torch.randn(table.shape, generator=g)
    gate[:] = 0
    gate[:, :E] = 3 * torch.linalg.qr(torch.randn(E, E, generator=g))[0]
    layer.self_attn.o_proj.weight.data[:] = 0
    layer.post_attention_layernorm.weight.data[:], model.model.norm.weight.data[:] = 1, 1
    up[:], down[:], up[..., :E], head[:, :E + 2] = up[:1], down[:1], 0, 0
    half, down[:] = up.shape[1] // 2, .1 * down
    up[:, [0, half]] = 0
    up[:, 0, E] = up[:, half, E] = 2                                         # a number that is the same in all tokens …
    table[:, E], table[:, E + 1] = 4, 0
    down[..., 0], down[:, E + 1, 0], head[:2_000, E + 1] = 0, .1, 1          # … and says which half of them occurs
    return model

def chance(models, path) -> np.ndarray:
    "p that a unit is beyond its own load, for eight experts of so many blind models."
    path.write_text("any " * 2_000)
    for seed in range(models):
        drawn = torch.randint(2_000, (420,), generator=torch.Generator().manual_seed(1_000 + seed)).tolist()
        found = audit(open_model(blind(seed)), path, lambda _, drawn=drawn: drawn, 8, batch=25, every=1, tokens=400)
        assert (effects(found) > .01).all()                                  # each of them does harm when it is closed
        wide = found[found["metric"].eq("effect") & found["stratum"].eq("beside")]
        wide = wide.pivot(index="seed", columns=["site", "unit"], values="value")
        yield _sign_flip_tests([wide[f"L0.E{e}", ""] - wide[f"L0.E{e}", "own load"] for e in range(8)]), found

@pytest.mark.parametrize("models, most", [(5, .13), pytest.param(40, .08, marks=pytest.mark.audit)])
def test_of_experts_that_chance_made_no_more_than_five_in_a_hundred_look_like_more(models, most, tmp_path):
    every = [*chance(models, tmp_path / "any.txt")]
    ps = np.concatenate([p for p, _ in every])
    assert len(ps) == 8 * models and np.mean(ps < .05) <= most, np.mean(ps < .05)
    assert np.mean(ps < .5) > .35                                                    # nor are they all too large
    assert sum((audit_table(found)["verdict"] == "holds").sum() for _, found in every[:2]) <= 1

def test_a_null_of_half_the_load_would_be_seen_by_that_simulation(tmp_path, monkeypatch):
    monkeypatch.setattr("moe_redistribution.opened.audit._drawn_pairs",
                        lambda pool, n, g: _drawn_pairs(pool, n // 2, g))
    ps = np.concatenate([p for p, _ in chance(2, tmp_path / "any.txt")])
    assert np.mean(ps < .05) > .5

# ------------------------------------------------------------------------------------------------------------- the null

def test_draws_are_as_many_as_the_unit_has_in_each_window_and_noise_is_as_long(s, text):
    b = RecordedBatch(s, torch.stack(list(text_windows(text, byte_tokens, 16))[:6]))
    plan = AuditPlan(s, audit_units(s, ("L1.E0", "L1.E2", "L1.E0+E3")), ("zero",), every=2, n_sets=0)
    gates = b.gates_of(1)
    for turn in plan.turns:
        for p in plan.null_passes(b, turn, torch.arange(6)):
            closed = p.edits["L1.gates"](gates[p.at][None])[0]
            for row, (w, k) in enumerate(zip(p.at.tolist(), p.keys.tolist())):
                assert (gates[w] != 0).sum() - (closed[row] != 0).sum() == plan.pairs_of(b, k)[w].sum()
    assert sorted(k for turn in plan.turns for k in turn) == [0, 1, 2]
    x = torch.randn(1, 3, 5, 8)
    new = _same_size(lambda v: v * 0, 3)(x, None)
    assert (new - x).norm(dim=-1) == pytest.approx(x.norm(dim=-1)) and (new - x).flatten().corrcoef() < 2
    assert not torch.allclose(new, 0 * x)

def test_other_sets_are_all_others_where_they_are_audited_and_as_many_as_asked_where_not(s):
    plan = audit_plan(s, 50, ("experts",))
    assert len(plan.keys) == plan.own + 0 and all(len(x) == 3 for x in plan.others)
    few = audit_plan(s, 50, ("L1.E0+E1",), n_sets=4)
    names = [few.keys[k][0].name for k in few.others[0]]
    assert len(set(names)) == 4 and set(names) < {f"L1.E{a}+E{b}" for a, b in combinations(range(4), 2)} - {"L1.E0+E1"}
    assert [len(x) for x in audit_plan(s, 50, ("ffns",)).others] == [2, 2, 2]

# ----------------------------------------------------------------------------------------------- cost, stops, forecasts

def test_an_audit_of_64_experts_takes_40_passes_at_most_by_what_its_modules_were_given(tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    path.write_text("And God said, Let there be light: and there was light. " * 30)
    s = open_model(tiny_model("mixtral", vocab_size=256, num_hidden_layers=4, num_local_experts=16))
    seen, own = dict(attention=0, experts=0), watched._one_expert
    def counted(self, e, x):
        seen["experts"] += len(x)
        return own(self, e, x)
    monkeypatch.setattr(watched, "_one_expert", counted)
    for x in s.layers:
        x.o.register_forward_pre_hook(lambda m, args: seen.update(attention=seen["attention"] + len(args[0])))
    found = audit(s, path, byte_tokens, 8, batch=25)
    said, n = found.query("metric == 'passes'")["value"].item(), len(list(text_windows(path, byte_tokens, 8)))
    attention, experts = seen["attention"] / n / 4, seen["experts"] / n / 4 / 8 / 2
    assert len(effects(found)) == 64 and len(effects(found, "own load", "beside")) == 64
    assert attention <= said <= 40 and experts <= said, (attention, experts, said)
    assert experts > .8 * said                                                     # it does not claim more than it ran

def test_a_forecast_runs_one_batch_and_is_right_within_a_fifth(s, text):
    ask = dict(context=16, batch=8, tokens=500, units=("experts", "ffns"), edits=("zero", "mean"))
    ahead, found = audit_forecast(s, text, byte_tokens, **ask), audit(s, text, byte_tokens, **ask)
    assert ahead["passes"] == pytest.approx(found.query("metric == 'passes'")["value"].item(), rel=.2)
    assert ahead["windows"] == len(list(text_windows(text, byte_tokens, 16, 500))) and ahead["seconds"] > 0
    assert ahead["bytes"] > 8 * 16 * 256 * 4

class Stop(Exception): pass

def test_an_audit_that_was_stopped_goes_on_to_the_same_rows(s, text, tmp_path, monkeypatch):
    monkeypatch.setattr("time.monotonic", iter(range(0, 10_000, 10)).__next__)
    ask, part = dict(context=16, batch=8, units=("L1.E0", "L2.H1"), edits=("zero", "mean"), n_sets=2), tmp_path / "a"
    straight, own = audit(s, text, byte_tokens, **ask), RecordedBatch.__init__
    batches = []
    def count(self, *rest):
        batches.append(1)
        if len(batches) == 4: raise Stop
        return own(self, *rest)
    monkeypatch.setattr(RecordedBatch, "__init__", count)
    with pytest.raises(Stop): audit(s, text, byte_tokens, part=part, **ask)
    again = audit(s, text, byte_tokens, part=part, **ask)
    here = lambda f: f[f["metric"] != "passes"].reset_index(drop=True)               # a start is checked once more
    assert here(again).equals(here(straight)) and len(batches) == 7 + 1

def test_what_an_audit_keeps_does_not_grow_with_the_text(s, text, tmp_path):
    long, sizes = tmp_path / "long.txt", []
    long.write_text(text.read_text() * 8)
    for path, some in ((text, None), (long, None)):
        audit(s, path, byte_tokens, context=4, batch=64, units=("L2.E0",), n_sets=0, part=tmp_path / "p", tokens=some)
        sizes.append((tmp_path / "p").stat().st_size)
    assert sizes[1] - sizes[0] < 200

def test_units_and_edits_that_are_not_there_are_refused_before_any_pass(s, text, monkeypatch):
    monkeypatch.setattr(type(s), "run", lambda *_, **__: 1 / 0)
    for unit, edit, says in (("L0.E9", "zero", "nearest: 'L0.E"), ("L0.H1", "route_around", "edit: expected"),
                             ("L0.E1+E1", "zero", "each part once"),
                             ("L0.E1", "swap:E9", "other expert"), ("L0.E2", "swap:E2", "can have these"),
                             ("L0.routes", "zero", "one of attn_out"), ("experts", "zeros", "nearest: 'zero'")):
        with pytest.raises(ValueError, match=says): audit(s, text, byte_tokens, 16, units=(unit,), edits=(edit,))
    dense = open_model(tiny_model("llama", vocab_size=256))
    with pytest.raises(ValueError, match="experts of llama"): audit(dense, text, byte_tokens, 16)

# --------------------------------------------------------------------------------------------------------------- regret

def test_a_router_that_knows_has_less_regret_than_a_drawn_route(tmp_path):
    g, path = np.random.default_rng(1), tmp_path / "q.txt"
    path.write_text("".join("qz" if g.random() < .7 else chr(97 + int(g.integers(16))) for _ in range(600)))
    rows = route_regret(open_model(carrier()), path, byte_tokens, 16, sample=48, others=5)
    mean = rows.groupby(["metric", "unit"])["value"].mean()
    assert mean["regret", ""] < .7 * mean["regret", "random route"] and (rows["value"] >= 0).all()

@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss"])
def test_the_executed_route_by_live_weights_is_the_pass_itself(family, text, monkeypatch):
    monkeypatch.setattr("moe_redistribution.opened.regret._other_routes", lambda chosen, *_: chosen[:, None].flip(-1))
    rows = route_regret(open_model(tiny_model(family, vocab_size=256)), text, byte_tokens, 16, sample=8, others=1)
    assert rows.query("metric == 'regret'")["value"].abs().max() < 1e-5

# ------------------------------------------------------------------------------------------------------------- commands

def test_the_three_commands_print_a_table_and_write_rows_and_pictures(s, text, tmp_path, capsys):
    s.model.save_pretrained(tmp_path / "a")
    tiny_model("mixtral", seed=1, vocab_size=256, num_hidden_layers=3).save_pretrained(tmp_path / "b")
    ask = f"--model {tmp_path / 'a'} --text {text} --bytes --context 16 --out".split()
    assert main(["loads", *ask, str(tmp_path / "l.parquet")]) == 0 and "near ties" in capsys.readouterr().out
    assert main(["compare", *ask, str(tmp_path / "c.csv"), "--with", str(tmp_path / "b")]) == 0
    assert "same set" in (said := capsys.readouterr().out) and "nats a token" in said
    twice = ("--with-dtype", "bfloat16", "--experts", "eager", "--json")
    assert main(["compare", *ask, str(tmp_path / "t.csv"), *twice]) == 0
    assert '"changed"' in (said := capsys.readouterr().out) and '"above 1"' in said
    assert "a@float32/eager:a@bfloat16/eager" in (tmp_path / "t.csv").read_text()
    assert main(["audit", *ask, str(tmp_path / "u.parquet"), "--dry-run"]) == 0
    assert "passes over" in capsys.readouterr().out and not (tmp_path / "u.parquet").exists()
    assert main(["audit", *ask, str(tmp_path / "u.parquet"), "--regret", "8"]) == 0
    said = capsys.readouterr().out
    assert "verdict" in said and "saliency" in said and "regret" in said
    rows, words = pd.read_parquet(tmp_path / "u.parquet"), pd.read_csv(tmp_path / "u.verdicts.csv")
    assert {"effect", "saliency", "regret"} <= set(rows["metric"]) and len(words) == 12
    assert (words["effect_lo"] <= words["effect"]).all() and (words["effect"] <= words["effect_hi"]).all()
    assert all((tmp_path / f).exists() for f in ("l.png", "u.png", "c.csv")) and not [*tmp_path.glob("*.part")]

def test_the_commands_refuse_before_any_work(s, text, tmp_path, capsys):
    s.model.save_pretrained(tmp_path / "a")
    tiny_model("llama", vocab_size=256).save_pretrained(tmp_path / "dense")
    for command, more, says in (("audit", ["--unit", "L9.E0"], "nearest"), ("audit", ["--every", "0"], "from 1 on"),
                                ("audit", ["--every", "99999"], "every: expected 1 to "),
                                ("audit", ["--sets", "-1"], "--sets: expected a whole number from 0 on"),
                                ("audit", ["--edit", "zeros"], "'zero'"), ("loads", ["--context", "9000"], "--context"),
                                ("compare", ["--with", str(tmp_path / "dense")], "which is dense"),
                                ("compare", [], "got one model twice; nearest valid: --with-dtype bfloat16; fix"),
                                ("compare", ["--with-dtype", "bfloat"], "nearest: 'bfloat16'"),
                                ("compare", ["--with-experts", "grouped"], "nearest: 'grouped_mm'"),
                                ("compare", ["--with", " "], "--with: expected a value")):
        ask = f"{command} --model {tmp_path / 'a'} --text {text} --bytes --context 16".split()
        assert main([*ask, *more]) == 2 and says in capsys.readouterr().err, (command, more)

# -------------------------------------------------------------------------------------------- experts of several layers

def test_experts_of_several_layers_have_the_effect_of_an_ablation_draws_of_their_load_and_other_sets(s, text):
    units = ("L0.E1,L2.E3", "L*.E3")
    found = audit(s, text, byte_tokens, 16, tokens=300, units=units, edits=("zero", "route_around"), n_sets=3, every=1)
    rows = text_ablation(s, text, byte_tokens, 16, tokens=300, units=units, edits=("zero", "route_around"))
    loss = rows.query("metric == 'loss'").set_index(["site", "edit"])["value"]
    for u in units:
        for e in ("zero", "route_around"):
            assert effects(found)[u, e] == pytest.approx(loss[u, e] - loss["none", "none"], abs=2e-6), (u, e)
    assert {"own load", "other sets"} <= set(found["unit"]) and len(audit_table(found)) == 4
    assert set(found.query("metric == 'larger'")["n_examples"]) == {3}

def test_draws_over_layers_close_as_many_pairs_as_the_unit_has(s, text):
    windows = torch.stack(list(text_windows(text, byte_tokens, 16)))[:4]
    plan, b = audit_plan(s, 4, ("L0.E1+E2,L2.E3",), ("zero",), every=1), RecordedBatch(s, windows)
    closed = {}
    for l, own in ((0, [1, 2]), (2, [3])):
        edit = plan.drawn_edits(b, 0, torch.arange(4), 5)[f"L{l}.gates"]
        closed[l] = (b.gates_of(l) != 0).sum((1, 2)) - (edit(b.gates_of(l)[None])[0] != 0).sum((1, 2))
        assert closed[l].equal((b.gates_of(l)[..., own] != 0).sum((1, 2)))

def test_units_of_layers_are_spelt_in_one_way_and_wrong_ones_refused(s):
    spelt = [u.name for u in audit_units(s, ("L2.E3,L0.E2,L0.E1", "L0.E1+E2,L2.E3", "L1.E3,L1.E0"))]
    assert spelt == ["L0.E1+E2,L2.E3", "L1.E0+E3"]
    for unit, says in (("L0.E1,L9.E0", "nearest"), ("L0.E1,L0.E1", "each part once"), ("L0.E1,L1.H0", "got L1.H0")):
        with pytest.raises(ValueError, match=says): audit_units(s, (unit,))
    with pytest.raises(ValueError, match="zero, route_around"): audit_plan(s, 9, ("L*.E1",), ("mean",))
