"""What is recorded of a committed checkpoint comes out of its file: not its accuracy alone, but what instruments say of it.

One cheap and sensitive instrument a task, and every seed; `tools/comes_out.py` asks all of them, which takes half an hour."""
import importlib.util

import numpy as np
import pandas as pd
import pytest
import torch

from moe_redistribution import results
from moe_redistribution.ablation import ablation_rows
from moe_redistribution.bilinear import bilinear_rows
from moe_redistribution.conditions import SEEDS, condition
from moe_redistribution.fourier import fourier_rows
from moe_redistribution.histogram import by_count, selective_shares
from moe_redistribution.store import compact, kept_in_half, seal, unseal
from moe_redistribution.tasks import ALPHABET, LENGTH
from moe_redistribution.trace import rows, tidy

spec = importlib.util.spec_from_file_location("comes_out", results.ROOT / "tools/comes_out.py")
comes_out = importlib.util.module_from_spec(spec)
spec.loader.exec_module(comes_out)

GLU = "modadd/glu-h340-gelu"
LIMIT = 35_000_000


def counted(params, c, seeds, **labels):
    "Of the histogram instrument the rows that take no probe: selective units, and accuracy by count with and without the FFN."
    at, labels = (("none", "none"), ("ffn_out", "zero"), ("ffn_out", "mean")), dict(condition=condition(c).name) | labels
    out = [rows(v, seeds, site="hidden", unit=unit, metric="selective_5", n_examples=ALPHABET, **labels) for unit, v in selective_shares(params, c).items()]
    for site, edit in at:
        each = by_count(params, c, {} if site == "none" else {site: edit})
        out += [rows(each[:, k - 1], seeds, site=site, edit=edit, stratum=f"count={k}", metric="count_accuracy", **labels) for k in range(1, LENGTH)]
    return tidy(out)


def instruments(name, rule):
    "Instrument → the part of it that is asked here."
    c = condition(name)
    ablated = {"ablation": lambda *a, **k: ablation_rows(*a, ("zero", "mean"), **k)}
    if c.task == "hist": return {"histogram": counted}
    if c.task == "add7" or c.ffn == "no_ffn": return ablated
    return {"fourier": fourier_rows} | ({"bilinear": bilinear_rows} if c.gated else {})


def asked(name, rule, root=None):
    "Differences of the parts asked here."
    params, seeds = results.checkpoint(name, rule, root), results.checkpoint_seeds(name, rule, root)
    return pd.concat([comes_out.differences(name, rule, i, root, of(params, name, seeds, stream="authors", rule=rule)) for i, of in instruments(name, rule).items()])


@pytest.mark.parametrize("name, rule", results.recorded_checkpoints())
def test_what_is_recorded_of_a_checkpoint_comes_out_of_it(name, rule):
    d = asked(name, rule)
    assert set(d.loc[d["there"] == "both", "seed"]) == set(results.checkpoint_seeds(name, rule)) and (d["there"] == "both").sum() >= 12 * d["seed"].nunique()
    bad = comes_out.summary(d).query("outside > 0")
    assert bad.empty, f"not what was recorded; fix: runs.withdraw, train these seeds again, record --replace {name}\n{bad.to_string()}"


@pytest.fixture
def broken(tmp_path, monkeypatch):
    "A root with the GLU's checkpoint, one of whose seeds has lost a few units, and the rows as they are recorded."
    seed = results.checkpoint_seeds(GLU, "first99")[1]
    tensors, info = unseal(results.checkpoint_path(GLU, "first99"))
    faint = tensors["W_gate"][1, 0, 0].float().norm(dim=0).argsort()[:8]
    tensors["W_gate"][1, 0, 0][:, faint] = 0
    seal(results.checkpoint_path(GLU, "first99", tmp_path), tensors, info)
    (tmp_path / "results").symlink_to(results.ROOT / "results")
    return tmp_path, seed


def test_eight_lost_units_of_one_seed_are_noticed_though_its_accuracy_is_not_changed(broken):
    root, seed = broken
    bad = comes_out.outside(asked(GLU, "first99", root))
    assert set(bad["seed"]) == {seed} and "dead_share_paper" in set(bad["metric"])
    right = [results.right_answers(results.checkpoint(GLU, "first99", r), GLU, [1, 2])["right"] for r in (root, None)]
    assert (right[0] - right[1]).abs().max() <= .001 * right[0].max()


def test_a_row_that_the_file_no_longer_gives_is_lost_and_one_that_is_new_is_not_held_against_it(monkeypatch):
    name, rule = "modadd/no_ffn", "best"
    was = comes_out.recorded(name)
    there = (was["rule"] == rule) & (was["seed"] == 42) & (was["site"] == "none")
    monkeypatch.setattr(comes_out, "recorded", lambda *a: pd.concat([was[~there], was[there].assign(site="attic")]))
    d = comes_out.differences(name, rule, "ablation")
    assert (d["there"] == "since").sum() == (d["there"] == "lost").sum() == there.sum()
    assert len(comes_out.outside(d)) == there.sum() and (comes_out.outside(d)["site"] == "attic").all()


@pytest.mark.parametrize("metric, largest, n, rounded, least, most", [
    ("digits", .5, 4000, False, 2 / 4000, 3 / 4000), ("dead_share_paper", .2, 0, True, 1 / 340, 2 / 340), ("dead_share_paper", .2, 0, False, 0, 1e-9),
    ("logit", 80., 0, True, .01, .1), ("concentration_paper", .3, 0, True, .002, .004), ("kept_accuracy", .9, 0, True, .005, .02), ("concentration_paper", .3, 0, False, 0, 1e-4)])
def test_a_tolerance_is_as_wide_as_its_kind_of_number_needs(metric, largest, n, rounded, least, most):
    assert least <= comes_out.tolerance(metric, largest, n, rounded) <= most


# ------------------------------------------------------------------------------------------------------------ what is kept in half

def test_a_unit_that_half_would_lose_is_kept_and_a_weight_that_happens_to_be_small_is_not_asked():
    g = torch.Generator().manual_seed(1)
    whole = torch.randn(3, 1, 2, 128, 85, generator=g) / 30
    whole[:, 0, 0, 5, 7] = 1e-9                                                 # one weight, of a unit that is used
    assert kept_in_half(whole).all() and compact(whole).dtype == torch.float16
    whole[2, 0, 1, :, 3] *= 1e-6                                                # one unit of one expert of one seed
    assert kept_in_half(whole).tolist() == [True, True, False]
    kept = compact(whole)
    assert kept.dtype == torch.float32 and torch.equal(kept[2], whole[2]) and torch.equal(kept[:2], whole[:2].half().float())


@pytest.mark.parametrize("wrong", [1e5, float("inf"), float("nan")])
def test_what_half_cannot_hold_is_not_put_into_it(wrong):
    x = torch.ones(2, 4, 4)
    x[1, 2, 2] = wrong
    assert kept_in_half(x).tolist() == [True, False] and compact(x).dtype == torch.float32 and torch.equal(compact(x).nan_to_num(7.), x.nan_to_num(7.))


def test_a_file_does_not_depend_on_the_night_in_which_a_seed_came_in():
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(2)) / 50
    x[1] *= 1e-7
    night = torch.cat([compact(x[:1]).float(), x[1:]])
    assert torch.equal(compact(night), compact(x))


def test_all_seeds_fit_into_the_limit_even_if_both_gated_models_of_modular_addition_are_kept_whole():
    size = 0
    for name, rule in results.CANONICAL:
        path = results.checkpoint_path(name, rule)
        tensors, info = unseal(path)
        one = sum(t[0].numel() for t in tensors.values())
        wide = 4 if name.startswith("add7") or (name.startswith("modadd") and condition(name).gated) else 2
        size += one * len(SEEDS) * wide + 4096
    assert size <= LIMIT and sum(p.stat().st_size for p in (results.ROOT / "checkpoints").rglob("*.safetensors")) <= LIMIT, f"{size:,} bytes"
    print(f"{size:,}")
