"""What companion 004's study must not get wrong: its layers, its copies of a teacher, and the lines that ask about
it."""
import re

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, strategies as st

from moe_redistribution.evidence.table_files import ROOT, table_path
from moe_redistribution.evidence.claims import claims, seed_list
from moe_redistribution.studies.granularity.facts import repeated_ids
from moe_redistribution.studies.granularity.students import (init_stack, expert_weights, mixture, outputs)
from moe_redistribution.language.text import generator_of
from moe_redistribution.studies.granularity.study import HALVES, STUDY, nearest_copy, class_of, read_arm

ASKED = claims().query("item.str.startswith('004.') or item.str.startswith('contrast_granularity')")

def made(names, active=12, d=5, seeds=(0, 1)):
    stack = [mixture(n, active, floor=True) for n in names]
    return stack, {n: v.double() for n, v in init_stack(stack, d, seeds).items()}

def test_every_arm_and_student_that_is_asked_about_is_one_of_the_night():
    p = STUDY.presets["night"]
    asked = {(n, c.seeds) for c in ASKED.itertuples() if c.instrument == "granularity"
             for n in f"{c.condition} {c.versus}".split()}
    assert len(asked) > 100
    for name, seeds in asked:
        arm, _, student = name.removeprefix("granularity.night/").rpartition("/")
        assert student in {s.name for s in read_arm(arm, p.settings)[2]}, name
        assert set(seed_list(seeds)) <= {*p.arms[arm], 7, 8}, name             # two were added: study … --seeds 7-8

def test_a_registered_contrast_compares_what_its_words_say():
    k = lambda n: int(n.rpartition("e")[2].partition("a")[0])
    by_id = ASKED.set_index("id")
    for name, much in (("coarse", np.less), ("divide", lambda s, t: (s > t) & (s % t > 0))):
        cells = [c.split("/")[-2:] for c in by_id.loc[f"contrast.granularity.{name}", "condition"].split()]
        assert all(much(k(s), k(t)) for t, s in cells) and len(cells) > 5
    for _, s in (c.split("/")[-2:] for c in by_id.loc["contrast.granularity.coarse", "versus"].split()):
        assert s in HALVES

@given(st.sampled_from(["", "+sum", "+switch"]), st.integers(1, 4), st.integers(0, 5))
def test_a_layer_is_the_sum_over_its_active_experts(combine, k, seed):
    x, p = made([f"4e{k}a{combine}"], seeds=(seed,))
    X = torch.randn(1, 5, 7, generator=generator_of(seed), dtype=torch.double)
    L = p["W_router"][0] @ X[0]
    for b in range(7):
        kept = L[:, b].topk(k).indices
        weight = dict(zip(kept.tolist(), {"": L[kept, b].softmax(0), "+sum": torch.ones(k).double(),
                                          "+switch": L[:, b].softmax(0)[kept]}[combine]))
        w, says = x[0].width, 0
        for e, g in weight.items():
            h = (p["W_up"][0, e * w:(e + 1) * w] @ X[0, :, b] + p["b_up"][0, e * w:(e + 1) * w, 0]).relu()
            says = says + g * (p["W_down"][0, e * w:(e + 1) * w].T @ h + p["b_down"][0, e])
        torch.testing.assert_close(outputs(p, x, X)[0, 0, :, b], says, rtol=0, atol=1e-12)

def test_a_copy_that_does_not_fit_is_refused():
    t = mixture("8e4a", 20)
    truth = init_stack([t], 6, [0], "teacher")
    for s, says in ((mixture("16e4a", 20), "expected sparsity 4/8"), (mixture("16e8a", 8), "experts of 3 neurons")):
        with pytest.raises(ValueError, match=says): nearest_copy(truth, t, s, 6, init_stack([s], 6, [0]))

def test_a_student_begins_the_same_whoever_is_beside_it_and_seeds_differ():
    alone, together = init_stack([mixture("4e2a", 8)], 3, [5]), init_stack([mixture(n, 8) for n in ("2e1a", "4e2a")],
                                                                           3, [4, 5])
    assert (torch.equal(alone["W_up"][0], together["W_up"][1, 16:])
            and not torch.equal(together["W_up"][0], together["W_up"][1]))

def test_weights_of_kept_experts_sum_to_one_or_to_what_their_scores_say():
    L = torch.randn(2, 6, 9, generator=generator_of("weights"), dtype=torch.double)
    for name, total in (("6e3a", 1.0), ("6e3a+sum", 3.0)):
        G = expert_weights(L, mixture(name, 6))
        assert (G > 0).sum(1).eq(3).all() and torch.allclose(G.sum(1), torch.tensor(total).double())
    assert (expert_weights(L, mixture("6e3a+switch", 6)).sum(1) < 1).all()

def test_recorded_errors_are_ratios_and_the_best_look_is_no_worse_than_the_last():
    paths = sorted(table_path("granularity", "").parent.glob("*.parquet"))
    assert [p.stem for p in paths] and ROOT in paths[0].parents
    for path in paths:
        rows = pd.read_parquet(path).query("metric == 'error' and rule != 'training'")
        wide = rows.pivot(index=["condition", "seed"], columns="rule", values="value")
        assert wide.notna().all(axis=None) and (wide["best"] <= wide["final"]).all() and (wide["final"] < 1).all()

@pytest.mark.parametrize("preset", [n for n, p in STUDY.presets.items() if n not in ("gpu", "paper")])
def test_every_started_student_of_a_preset_can_be_built(preset):
    p = STUDY.presets[preset]
    for arm in [a for a in p.arms if a.startswith(("built", "near"))]:
        taught = class_of(arm, [1], p.settings)
        for x, error in zip(taught.students, taught.test_errors()[:, 0]):
            exact = arm.startswith("built") and x.k % taught.teacher.k == 0
            assert (error < 1e-10) == exact and error < 1.5, f"{arm}/{x.name}"

def test_cells_that_are_printed_twice_are_the_same_cells():
    twice, bridge = repeated_ids(), ASKED[ASKED["protocol"] == "paper"].set_index("id")["condition"]
    grid = bridge[bridge.index.str.startswith("004.F_grid_final.")]
    cell = lambda name: (re.search(r"/(\d+e\d+a)/", name)[1], name.rpartition("/")[2])        # teacher, student
    own = {cell(c) for c in grid}
    assert len(twice) == len(set(twice)) == 68 and {cell(bridge[i]) for i in twice} == own and len(own) == 64
    left = [i for i in bridge.index if re.match(r"004\.F_(grid_final|size)", i) and i not in twice]
    for i in set(left) - set(grid.index): assert "+bias" in bridge[i] or cell(bridge[i]) not in own, i
