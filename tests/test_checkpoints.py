"""What is recorded of a committed checkpoint comes out of its file: not its accuracy alone, but what instruments say of
it.

At every change one checkpoint a task, by one cheap and sensitive instrument, and every seed; all instruments of all
checkpoints, which is what `tools/comes_out.py` asks, by `make audit`."""
import copy
import importlib.util
import pickle
import re

import pandas as pd
import pytest
import torch

from moe_redistribution.evidence import table_files, checkpoints, selection
from moe_redistribution.studies.sparsity_moves.reading import _recorded_checkpoints
from moe_redistribution.instruments.ablation import ablation_rows
from moe_redistribution.models.condition import condition
from moe_redistribution.models.population import Transformer, check_population, forward, loss, predict, shapes
from moe_redistribution.instruments.fourier import _fourier_rows
from moe_redistribution.instruments.histogram import _by_count, selective_shares
from moe_redistribution.instruments.subject import subject
from moe_redistribution.training.loop import flatten
from moe_redistribution.training.store import compact, _kept_in_half, unseal
from moe_redistribution.tasks.task import ALPHABET, LENGTH, get_task
from moe_redistribution.instruments.rows import rows, tidy
from tiers import first

spec = importlib.util.spec_from_file_location("comes_out", table_files.ROOT / "tools/comes_out.py")
comes_out = importlib.util.module_from_spec(spec)
spec.loader.exec_module(comes_out)

GLU = "modadd/glu-h340-gelu"
ASKED = [("add7/moe-e4k1-h256-silu", "first256"), (GLU, "first99"), ("hist/moe-e4k1-h512-gelu", "best")]

def counted(params, c, seeds, **labels):
    """Of the histogram instrument the rows that take no probe: selective units, and accuracy by count with and without
    the FFN."""
    at, labels = (("none", "none"), ("ffn_out", "zero")), dict(condition=condition(c).name) | labels
    out = [rows(v, seeds, site="hidden", unit=unit, metric="selective_5", n_examples=ALPHABET, **labels)
           for unit, v in selective_shares(params, c).items()]
    for site, edit in at:
        each = _by_count(params, c, {} if site == "none" else {site: edit})
        out += [rows(each[:, k - 1], seeds, site=site, edit=edit, stratum=f"count={k}", metric="count_accuracy",
                     **labels) for k in range(1, LENGTH)]
    return tidy(out)

def instruments(name):
    "Instrument → the part of it that is asked here."
    c = condition(name)
    ablated = {"ablation": lambda *a, **k: ablation_rows(*a, ("zero",), **k)}
    if c.task == "hist": return {"histogram": counted}
    if c.task == "add7" or c.ffn == "no_ffn": return ablated
    return {"fourier": _fourier_rows}                                    # found every seed that bilinear found, and more

def asked(name, rule):
    "Differences of the parts asked here."
    params, seeds = checkpoints.checkpoint(name, rule), checkpoints.checkpoint_seeds(name, rule)
    found = {i: of(params, name, seeds, stream="authors", rule=rule) for i, of in instruments(name).items()}
    return pd.concat([comes_out.differences(name, rule, i, None, rows) for i, rows in found.items()])

@pytest.mark.parametrize("name, rule", ASKED)
def test_what_is_recorded_of_a_checkpoint_comes_out_of_it(name, rule):
    d = asked(name, rule)
    assert (set(d.loc[d["there"] == "both", "seed"]) == set(checkpoints.checkpoint_seeds(name, rule))
            and (d["there"] == "both").sum() >= 6 * d["seed"].nunique())
    bad = comes_out.summary(d).query("outside > 0")
    assert bad.empty, ("not what was recorded; fix: runs.withdraw, train these seeds again, "
                       f"record --replace {name}\n{bad.to_string()}")

@pytest.mark.audit
@pytest.mark.parametrize("name, rule", _recorded_checkpoints())
def test_what_every_instrument_recorded_of_a_checkpoint_comes_out_of_it(name, rule):
    d = pd.concat([comes_out.summary(comes_out.differences(name, rule, i)) for i in comes_out.fitting(name, rule)])
    bad = d.query("outside > 0")
    assert bad.empty, ("not what was recorded; fix: runs.withdraw, train these seeds again, "
                       f"record --replace {name}\n{bad.to_string()}")

def test_eight_lost_units_are_noticed_though_accuracy_is_not_changed():
    seed = 256                                                    # none of its neurons is silent
    i = checkpoints.checkpoint_seeds(GLU, "first99").index(seed)
    whole = {n: v[i:i + 1] for n, v in checkpoints.checkpoint(GLU, "first99").items()}
    faint = whole["W_gate"][0, 0, 0].norm(dim=0).argsort()[:8]
    without = whole | {"W_gate": whole["W_gate"].index_fill(-1, faint, 0)}
    d = comes_out.differences(GLU, "first99", "fourier", None, _fourier_rows(without, GLU, [seed], rule="first99"))
    bad = comes_out.outside(d)
    assert "dead_share_paper" in set(bad["metric"]) and (bad["there"] == "both").all()
    right = [checkpoints.right_answers(p, GLU, [seed])["right"].item() for p in (whole, without)]
    assert abs(right[0] - right[1]) <= .001 * right[0]

def test_a_row_that_the_file_no_longer_gives_is_lost_and_one_that_is_new_is_not_held_against_it(monkeypatch):
    name, rule = "add7/ffn-h64-silu", "first256"
    was = comes_out.recorded_rows(name, "copying")
    there = (was["rule"] == rule) & (was["stream"] == "authors") & (was["seed"] == 42) & (was["edit"] == "zero")
    moved = pd.concat([was[~there], was[there].assign(site="attic")])
    monkeypatch.setattr(comes_out, "recorded_rows", lambda *a: moved)
    d = comes_out.differences(name, rule, "copying")
    assert (d["there"] == "since").sum() == (d["there"] == "lost").sum() == there.sum() > 0
    assert len(comes_out.outside(d)) == there.sum() and (comes_out.outside(d)["site"] == "attic").all()
    assert comes_out.summary(d)[["outside", "lost", "since"]].sum().tolist() == [there.sum()] * 3

def test_rows_that_an_instrument_has_learned_to_give_are_filled_in_where_recording_puts_them_and_no_other_moves(
    tmp_path):
    name, rule = "add7/ffn-h64-silu", "first256"
    was = selection.recorded_rows(name, "copying")
    lacking = was[~((was["stream"] == "authors") & (was["rule"] == rule) & (was["edit"] == "zero"))]
    table_files.write_table(lacking, "copying", "add7", tmp_path)
    (tmp_path / "checkpoints").symlink_to(table_files.ROOT / "checkpoints")
    d = comes_out.differences(name, rule, "copying", tmp_path)
    assert comes_out.fill(d, name, rule, "copying", tmp_path) == (d["there"] == "since").sum() > 0
    pd.testing.assert_frame_equal(selection.recorded_rows(name, "copying", tmp_path), was)

@pytest.mark.parametrize("metric, largest, n, rounded, least, most", [
    ("digits", .5, 4000, False, 2 / 4000, 3 / 4000), ("dead_share_paper", .2, 0, True, 1 / 340, 2 / 340),
    ("dead_share_paper", .2, 0, False, 0, 1e-9),
    ("logit", 80., 0, True, .01, .1), ("concentration_paper", .3, 0, True, .002, .004),
    ("kept_accuracy", .9, 0, True, .005, .02), ("concentration_paper", .3, 0, False, 0, 1e-4)])
def test_a_tolerance_is_as_wide_as_its_kind_of_number_needs(metric, largest, n, rounded, least, most):
    assert least <= comes_out.tolerance(metric, largest, n, rounded) <= most

# ---------------------------------------------------------------------------------------- what a checkpoint is read as

READ_AS = [("add7/ffn-h256-silu", "first256", "add7/ffn-h256-gelu"),                       # another activation
           ("add7/moe-e4k1-h256-silu", "first256", "add7/moe-e4k2-h256-silu"),             # another k
           ("add7/moe-e4k1-h256-silu", "first256", "add7/moe-e4k1-h256-silu+switch"),      # another gate
           ("add7/moe-e4k1-h256-silu", "first256", "add7/moe-e4k1-h256-silu+frozen"),      # rows under another name
           ("modadd/glu-h340-gelu", "first99", "modadd/glu-h340-linear")]
READS_THEM = {"predict": predict, "forward": lambda p, c: forward(p, get_task(condition(c).task).tokens[:9], c),
              "loss": lambda p, c: loss(p, (t := get_task(condition(c).task)).tokens[:9], t.targets[:9], c),
              "module": Transformer, "subject": lambda p, c: subject(p, c).predict(),
              "right": checkpoints.right_answers,
              "ablation": lambda p, c: ablation_rows(p, c, checkpoints.SEEDS, ("zero",)), "checked": check_population,
              "flatten": flatten}

@pytest.mark.parametrize("name, rule, other", READ_AS)
@pytest.mark.parametrize("way", READS_THEM)
def test_a_checkpoint_is_not_read_under_another_condition_of_the_same_shapes(name, rule, other, way):
    params = checkpoints.checkpoint(name, rule)
    assert shapes(condition(name)) == shapes(condition(other))
    with pytest.raises(ValueError, match=re.escape(f"expected those of {other}; got those of {name}; fix: give")):
        READS_THEM[way](params, other)

def test_a_dict_of_a_checkpoint_is_read_as_what_it_is_called():
    name, rule, other = READ_AS[0]
    params = checkpoints.checkpoint(name, rule)
    assert not torch.equal(predict(dict(params), other), predict(params, name))
    for again in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params)):
        with pytest.raises(ValueError, match="expected those of"): predict(again, other)

@pytest.mark.parametrize("ask", [checkpoints.checkpoint, checkpoints.checkpoint_seeds])
def test_a_checkpoint_that_is_not_committed_is_refused_with_the_nearest_however_it_is_asked_for(ask):
    with pytest.raises(ValueError, match="nearest: 'add7/moe-e4k1-h256-silu.first256'; fix: train it"):
        ask("add7/moe-e4k1-h256-silu", "first257")

def test_every_committed_checkpoint_says_whose_it_is():
    for name, rule in _recorded_checkpoints():
        info = unseal(checkpoints.checkpoint_path(name, rule))[1]
        assert (info["condition"], info["rule"]) == (name, rule) and checkpoints.checkpoint(name, rule).condition == (
            condition(name))

@pytest.mark.parametrize("wrong", first([float("inf")], [float("inf"), float("nan")]))
def test_what_is_not_finite_has_no_predictions_unless_they_are_asked_for(wrong):
    params = dict(checkpoints.checkpoint(GLU, "first99"))
    params["W_down"] = params["W_down"].clone()
    params["W_down"][1] = wrong
    for ask in (lambda: predict(params, GLU), lambda: checkpoints.right_answers(params, GLU)):
        with pytest.raises(ValueError, match="member 1: expected finite activations.* first at ffn_out"): ask()
    assert len(predict(params, GLU, finite=False)) == len(params["W_E"])

# --- what is kept in half

@pytest.mark.parametrize("wrong", [1e5, float("inf"), float("nan")])
def test_what_half_cannot_hold_is_not_put_into_it(wrong):
    x = torch.ones(2, 4, 4)
    x[1, 2, 2] = wrong
    assert (_kept_in_half(x).tolist() == [True, False] and compact(x).dtype == torch.float32
            and torch.equal(compact(x).nan_to_num(7.), x.nan_to_num(7.)))
