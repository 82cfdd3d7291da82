"""Several layers are first class: they train, resume and are measured layer by layer, or are refused beforehand."""
import multiprocessing
import os
import re
import shutil
import signal

import pandas as pd
import pytest
import torch

from moe_redistribution.instruments.ablation import ablate
from moe_redistribution.instruments.attribution import attribution_rows
from moe_redistribution.instruments.instrument import instruments, instruments_for
from moe_redistribution.instruments.patching import _after_attention
from moe_redistribution.instruments.routing import routes, saturation
from moe_redistribution.instruments.speed import speed, _speed_rows
from moe_redistribution.instruments.trace import trace
from moe_redistribution.models.condition import RECIPES, condition
from moe_redistribution.models.population import Transformer, forward, sites
from moe_redistribution.record.cli import main
from moe_redistribution.tasks.task import get_task
from moe_redistribution.training.groups import _train_group
from moe_redistribution.training.loop import init_members, unflatten
from moe_redistribution.training.store import Store
from same import assert_same_runs
from tiers import first
from toys import untrained

DENSE, MOE = "add7/ffn-h8-silu+L2", "add7/moe-e2k1-h8-silu+L2"
ASKED = ["add7/ffn-h64-gelu+L2", "add7/moe-e4k1-h64-silu+L3", "modadd/glu-h64-gelu+L2", "hist/moe_glu-e4k1-h64-silu+L2"]
OPTIONS = ["add7/moe-e2k1-h8-silu+frozen+L2", "add7/moe_glu-e4k2-h24-silu+norm+L2", "add7/glu-h8-silu+drop0.1+L3",
           "add7/ffn-h8-silu+L2@2:reset0.25,attn,fresh@4:ffnlr0.5", "add7/moe-e2k1-h8-silu+L2@2:router1@4:onlyexperts",
           "add7/moe-e2k1-h8-silu+redrawn+L2", "add7/moe-e2k1-h8-silu+tokens+L2", "add7/no_ffn+L2"]
T = get_task("add7")

@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    for task, every in {"add7": 2, "modadd": 1, "hist": 1}.items():
        monkeypatch.setitem(RECIPES[task], "eval_every", every)

def moved(params, l):
    "The same members with other weights in one layer, and in nothing else."
    g, outer = torch.Generator().manual_seed(9), ("W_E", "W_pos", "W_U", "w_ln_final")
    out = {n: v.clone() for n, v in params.items()}
    for n in out.keys() - {*outer}: out[n][:, l] += .3 * torch.randn(out[n][:, l].shape, generator=g)
    return out

def steps_of(name, n): return n * RECIPES[condition(name).task]["eval_every"]

# ------------------------------------------------------------------------------------------------ trains and resumes

@pytest.mark.parametrize("name", first([OPTIONS[3]], ASKED + OPTIONS))
def test_a_deep_run_that_is_interrupted_ends_with_the_same_bits(name, tmp_path):
    intervals = 3 if name.startswith("add7") else 2                                # on a whole set a step takes seconds
    _train_group(name, [1, 2], "paired", "full", tmp_path / "whole", steps=steps_of(name, intervals))
    for n in range(intervals):
        _train_group(name, [1, 2], "paired", "full", tmp_path / "parts", steps=steps_of(name, n + 1))
    assert_same_runs(tmp_path / "whole", tmp_path / "parts", name, (1, 2), "paired")

@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.audit
@pytest.mark.parametrize("name", [DENSE, MOE])
def test_a_deep_run_that_is_killed_ends_with_the_same_bits(name, tmp_path):
    work = ([1, 2], "paired", "full")
    def dies():
        def tell(members, *_):
            if int(members.step[0]) == steps_of(name, 2): os.kill(os.getpid(), signal.SIGKILL)
        _train_group(name, *work, tmp_path / "killed", steps=steps_of(name, 3), save_every=0, tell=tell)
    child = multiprocessing.get_context("fork").Process(target=dies)
    child.start(), child.join()
    assert child.exitcode == -signal.SIGKILL and list((tmp_path / "killed" / "groups").rglob("*.state"))
    for root in ("killed", "whole"): _train_group(name, *work, tmp_path / root, steps=steps_of(name, 3))
    assert_same_runs(tmp_path / "whole", tmp_path / "killed", name, (1, 2), "paired")

def trained(name, root, steps):
    _train_group(name, [1], "paired", "full", root, steps=steps)
    start = unflatten(init_members(condition(name), [1], "paired").w, condition(name))
    run = Store(root).load(name, 1, "paired")
    return run, {n: v[0] for n, v in start.items()}

@pytest.mark.parametrize("name, held", [
    (MOE, ()), ("add7/moe-e2k1-h8-silu+norm+L3", ()), ("add7/moe-e2k1-h8-silu+frozen+L2", ("W_router",)),
    ("add7/ffn-h8-silu+freeze_attn+L2", ("W_Q", "W_K", "W_V", "W_O", "b_O"))])
def test_what_a_name_holds_is_held_in_every_layer_and_all_else_learns_in_every_layer(name, held, tmp_path):
    run, start = trained(name, tmp_path, 2)
    for n in start.keys() - {"W_E", "W_pos", "w_ln_final"}:
        same = [torch.equal(a, b) for a, b in zip(run.weights["final"][n], start[n])]
        assert same == [n in held] * condition(name).n_layers, n

def test_an_event_happens_in_every_layer(tmp_path):
    run, start = trained("add7/ffn-h8-silu+L2@2:reset0.5", tmp_path, 2)
    for l in range(2):
        back = (run.weights["final"]["W_up"][l, 0] == start["W_up"][l, 0]).all(0)
        assert back.tolist() == [True] * 4 + [False] * 4

def test_a_store_that_is_carried_elsewhere_gives_the_same_deep_models(tmp_path):
    _train_group(MOE, [1, 2], "paired", "full", tmp_path / "a", steps=2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    a, b = (Store(tmp_path / x).population(MOE, [1, 2], "final", "paired") for x in "ab")
    with torch.no_grad(): logits = [forward(p, T.tokens[:20], condition(MOE)) for p in (a, b)]
    assert torch.equal(*logits) and logits[0].shape[0] == 2
    torch.testing.assert_close(Transformer(b, MOE, 1)(T.tokens[:20]), logits[0][1])

# -------------------------------------------------------------------------------------- measured, every layer by name

WORDS = {"none", "head", "expert", "weights", "logits", "embed", "pattern", "resid_post"}     # of no layer, or of units

def layers_named(rows):
    return {x for k in ("site", "unit") for name in rows[k].unique() for x in re.findall(r"\bL(\d)", name)}

DEEPER = MOE.replace("+L2", "+L3")
CASES = [(n, i) for n in ("add7/ffn-h8-silu+hold_tens9+L2", MOE, "modadd/glu-h8-gelu+L2") for i in instruments_for(n)]
CASES += [(DEEPER, i) for i in ("ablation", "routing", "scores")]

@pytest.mark.parametrize("name, i", first([(DEEPER, "scores")], CASES))
def test_rows_of_an_instrument_name_every_layer_and_change_with_every_layer(name, i):
    "Not with the first one alone: that would be a model of several layers, read as one of its first."
    c, params, x = condition(name), untrained(name, [0]), instruments()[i]
    assert "one layer" not in x.needs
    def rows(p): return x.rows(dict(p), name, [1], stream="paired", rule="final")
    got = rows(params)
    own = {*sites(c), *(f"L*.{s.split('.')[-1]}" for s in sites(c)), *WORDS} | {f"L{l}.router_logits" for l in range(3)}
    assert {*got["site"]} <= own, {*got["site"]} - own
    if i not in ("heldout", "grokking"): assert layers_named(got) == {str(l) for l in range(c.n_layers)}
    if x.live: return                                                     # it trains models of its own
    for l in range(c.n_layers): assert not got["value"].equals(rows(moved(params, l))["value"]), l

@pytest.mark.parametrize("name", [DENSE, MOE])
def test_a_layers_ffn_at_zero_is_a_model_without_it(name):
    params = {n: v * (30 if n == "W_down" else 1) for n, v in untrained(name, [0]).items()}           # FFNs that matter
    said = {}
    for l in range(2):
        gone = {n: v.clone() for n, v in params.items()}
        for n in ("W_down", "b_down"): gone[n][:, l] = 0
        said[l] = ablate(params, name, {f"L{l}.ffn_out": "zero"})
        assert torch.equal(said[l], ablate(gone, name, {})) and not torch.equal(said[l], ablate(params, name, {}))
    assert not torch.equal(said[0], said[1])

def test_what_is_for_one_layer_says_so_before_any_work():
    name = "modadd/moe_glu-e2k1-h8-linear+L2"
    alone = [x for x in instruments().values() if "one layer" in x.needs]
    assert len(alone) >= 4 and not {*map(id, alone)} & {id(x) for x in instruments_for(name).values()}
    for x in alone:
        with pytest.raises(ValueError, match="one layer|expected (an? )?(task|model|modular|condition)"):
            x.rows({}, name, [1], stream="paired", rule="final")

# --------------------------------------------------------------------------------------------------- mended here

def test_an_expert_of_a_deep_model_has_a_speed():
    before = untrained(MOE)
    after = moved(before, 1)
    got, seen = speed(before, after, MOE), trace(before, T.tokens, MOE)
    for e in range(2):
        here = seen["L1.gates"][:, :, list(T.read), e] != 0
        way = trace(after, T.tokens, MOE, edits={"L1.resid_mid": seen["L1.resid_mid"]})["L1.expert_out"]
        far = (way - seen["L1.expert_out"])[:, :, list(T.read), e].square().sum(-1)
        torch.testing.assert_close(got[f"L1.E{e}"]["own"], ((far * here).sum((1, 2)) / here.sum((1, 2))).sqrt())
        assert got[f"L0.E{e}"]["own"].nan_to_num().eq(0).all() and {*got[f"L0.E{e}"]} == {"own"}

def test_speed_is_measured_of_every_layer():
    assert instruments()["speed"].fits(MOE)
    found = _speed_rows(MOE, [1], "paired", (0,))
    named = {("L0.expert_out", "L0.E0"), ("L1.expert_out", "L1.E1"), ("L1.ffn_out", "")}
    assert named <= {*zip(found["site"], found["unit"])}
    paired = instruments()["speed"].rows(None, MOE, [1], stream="paired", rule="final")
    assert {*paired["site"]} == {"L0.ffn_out", "L1.ffn_out"} and (paired["value"] > 0).all()

def test_routes_of_several_layers_are_asked_layer_by_layer():
    params = untrained(MOE)
    other = moved(params, 1)
    for ask in (lambda: routes(params, MOE), lambda: saturation(params, other, MOE)):
        with pytest.raises(ValueError, match="routes: expected a layer, of 2; got none; fix: layer=0"): ask()
    assert saturation(params, other, MOE, 0).tolist() == [1, 1] and saturation(params, other, MOE, 1).max() < 1
    assert not torch.equal(routes(params, MOE, layer=0)[1], routes(params, MOE, layer=1)[1])

def test_what_follows_the_attention_of_the_first_layer_is_not_the_answer():
    with pytest.raises(ValueError, match="after_attention: expected one layer; got 2 in .*; fix: use `patch`"):
        _after_attention(untrained(DENSE, [0]), condition(DENSE), torch.zeros(3, 64))

def test_heads_are_ranked_over_all_layers_and_the_rows_say_so():
    rows = attribution_rows(untrained("add7/no_ffn+L2", [0]), "add7/no_ffn+L2", [1]).query("metric.str.startswith('rank')")
    assert {*rows["site"]} == {"L*.z"} and {*rows["unit"]} == {"", *(f"R{r}" for r in range(1, 9))}

# ------------------------------------------------------------------------------------------------- the command line

def test_a_deep_model_is_trained_and_measured_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MOE_REDISTRIBUTION_HOME", str(tmp_path))
    name, of = DENSE + "+steps2", ["--stream", "paired", "--seeds", "1"]
    main(["train", name, *of, "--until", "full", "--executor", "here"])
    main(["measure", name, *of, "--instrument", "ablation", "--out", str(tmp_path / "rows.csv")])
    assert {"L0.ffn_out", "L1.ffn_out", "L*.ffn_out"} <= {*pd.read_csv(tmp_path / "rows.csv")["site"]}
    assert main(["measure", name, *of, "--instrument", "fourier", "--out", str(tmp_path / "no.csv")])
    assert "expected one layer" in capsys.readouterr().err and not (tmp_path / "no.csv").exists()
