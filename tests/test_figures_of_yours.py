"""A reader draws conditions of their own: any registered task, variant, router and depth gets every figure, from the
rows that the instruments give; and what has not been measured is named instead of drawn as nothing."""
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt

from moe_redistribution.report.figures import (by_panel, colour, label, _named_once, _rows_by_name, trajectories,
                                                 two_ablations)
from moe_redistribution.instruments.instrument import instruments
from moe_redistribution.instruments.rows import rows, tidy
from moe_redistribution.models.condition import RECIPES
from moe_redistribution.models.population import init
from moe_redistribution.models.routers import ROUTERS, Router
from moe_redistribution.models.variants import VARIANTS, Gated
from moe_redistribution.basics.kinds import register
from moe_redistribution.tasks.task import TASKS, Task
from moe_redistribution.training.loop import TASK_RULES

SMALL = dict(d_model=16, d_head=8, d_mlp=16)
DENSE, MIXED, DEEP = (f"turned/{body}" for body in ("ffn-h16-silu", "moe-e4k1-h16-silu", "moe-e4k1-h16-silu+L2"))
EVERY = (DENSE, MIXED, DEEP)
RULES = ("first1000",)

def turned():
    "Three letters, and then the same from the last to the first."
    n = torch.arange(64)
    asked = torch.stack([n // 16, n // 4 % 4, n % 4], 1)
    whole = torch.cat([asked, torch.full((64, 1), 4), asked.flip(1)], 1)
    return Task("turned", d_vocab=5, d_vocab_out=5, causal=True, tied=True, read=(3, 4, 5), scored=(0, 1, 2),
                positions=("first", "second", "third"), vocab=tuple("abcd?"), tokens=whole[:, :6].contiguous(),
                targets=whole[:, 4:].contiguous(), strata=pd.DataFrame({"last": asked[:, 2]}), by=("last",))

@pytest.fixture(scope="module")
def mine():
    "A task, a variant and a router that no later test knows."
    tables = (TASKS, RECIPES, TASK_RULES, VARIANTS, ROUTERS)
    before = [(dict(t), dict(t.origins)) for t in tables]
    register("task", "turned", turned, recipe=RECIPES["add7"] | SMALL, rules=RULES)
    register("variant", "wavy_glu", Gated), register("router", "by_luck", Router)
    yield
    for table, (own, origins) in zip(tables, before):
        for name in [n for n in table if n not in own]: table.put(name, None, None)
        assert dict(table) == own and table.origins == origins

@pytest.fixture(scope="module")
def table(mine):
    "What ablation measures of three untrained models of each condition."
    def own(n): return init(n, [torch.Generator().manual_seed(s) for s in (1, 2, 3)])
    return tidy([instruments()["ablation"].rows(own(n), n, [1, 2, 3], stream="paired", rule="final") for n in EVERY])

@pytest.fixture(scope="module")
def history(mine):
    "A course of training that nobody ran."
    one = lambda n, s: pd.DataFrame(dict(condition=n, seed=s, stream="paired", step=[100, 200, 300],
                                         test=[.2, .5, .6 + .2 * s], loss=[3., 2., 1.]))
    return pd.concat([one(n, s) for n in (DENSE, MIXED, DEEP) for s in (1, 2, 3)])

@pytest.fixture(autouse=True)
def nothing_left_open():
    yield
    plt.close("all")

DRAWN = {                                      # name → what is drawn of a table, of some conditions
    "two_ablations": two_ablations,
    "by_panel": lambda t, n: by_panel(t, n, {"one": {}, "all": dict(metric="exact")}),
    "trajectories": lambda t, n: trajectories(t, n, ["test", "loss"], middle="median")}
CASES = pytest.mark.parametrize("name", DRAWN)

@pytest.fixture
def given(name, request): return request.getfixturevalue("history" if name == "trajectories" else "table")

@CASES
def test_each_figure_function_draws_a_registered_task(name, given):
    fig = DRAWN[name](given, list(EVERY))
    shown = [ax for ax in fig.axes if ax.axison and ax.get_label() != "<colorbar>"]
    assert shown and all(ax.lines or ax.images or ax.collections or ax.patches for ax in shown)
    said = " ".join(t.get_text() for t in fig.findobj(plt.Text))
    assert not any(word in said for word in ("digits", "o0", "o1", "carry")), said

@CASES
def test_a_condition_without_rows_is_named_and_never_an_empty_axis(name, given):
    lacks = DENSE.replace("-h16-", "-h32-")
    with pytest.raises(ValueError, match=f"none of {lacks}.*fix: .*{DENSE}"): DRAWN[name](given, [*EVERY, lacks])
    assert not plt.get_fignums(), "refused before anything is drawn"

@CASES
def test_numbers_that_are_none_are_not_drawn_as_an_empty_axis(name, given):
    t = given.copy()
    of = t["condition"] == DENSE
    for k in ("value", "test", "loss"):
        if k in t: t.loc[of, k] = np.nan
    with pytest.raises(ValueError, match="NaN alone"): DRAWN[name](t, list(EVERY))
    assert not plt.get_fignums()

@CASES
def test_a_name_is_drawn_once_however_its_options_are_ordered(name, given):
    with pytest.raises(ValueError, match="each once; got .* twice"): DRAWN[name](given, [*EVERY, DENSE])
    with pytest.raises(ValueError, match="twice"): _named_once([DENSE + "+L2+ffnlr2", DENSE + "+ffnlr2+L2"])

def test_a_registered_variant_keeps_its_colour_and_says_its_width_at_another_size(mine):
    name = "turned/wavy_glu-h16-silu"
    assert colour(name) == colour("turned/wavy_glu-h32-silu") == colour("add7/wavy_glu-h16-silu+d16")
    assert label("turned/wavy_glu-h32-silu") == "wavy glu h32"

def test_planted_models_are_drawn_beside_trained_ones():
    names = ["clock", "twin", "modadd/ffn-h512-gelu"]
    table = tidy([rows([.2, .4], [1, 2], condition=n, metric="n_keys") for n in names])
    fig = by_panel(table, names, {"keys": dict(metric="n_keys")})
    assert [t.get_text() for t in fig.axes[0].get_xticklabels()] == ["clock", "twin", "dense"]
    assert colour("clock") != colour("twin")

def test_a_figure_never_mixes_checkpoints_that_nobody_chose():
    a, b = "add7/ffn-h256-silu", "add7/moe-e4k1-h256-silu"
    one = lambda n, rule: rows([.1 if rule == "final" else .9] * 2, [1, 2], condition=n, rule=rule, metric="digits",
                               position="o0-o3")
    got = _rows_by_name(tidy([one(a, "first256"), one(a, "final"), one(b, "final")]), [a, b])
    assert {r for f in got.values() for r in f["rule"]} == {"final"}
    got = _rows_by_name(tidy([one(n, r) for n in (a, b) for r in ("first256", "final")]), [a, b])
    assert {r for f in got.values() for r in f["rule"]} == {"first256"}
    with pytest.raises(ValueError, match="rule of a figure: .*add7/ffn-h256-silu has first256; add7/moe.* has final"):
        _rows_by_name(tidy([one(a, "first256"), one(b, "final")]), [a, b])

def test_of_several_layers_all_are_drawn_and_not_the_first(table):
    got = _rows_by_name(table, [MIXED, DEEP], metric="digits", site="ffn_out", edit="zero")
    assert {n: set(f["site"]) for n, f in got.items()} == {MIXED: {"ffn_out"}, DEEP: {"L*.ffn_out"}}

def test_a_table_without_a_column_and_a_metric_that_nobody_measured_are_named(table, history):
    with pytest.raises(ValueError, match="column of the table: expected one of .*; got 'siet'"):
        _rows_by_name(table, [DENSE], siet="ffn_out")
    with pytest.raises(ValueError, match="metric in the rows of turned/ffn-h16-silu: .*nearest: 'exact'"):
        by_panel(table, [DENSE], {"": dict(metric="exct")})
    with pytest.raises(ValueError, match="column of the table: .*got 'tset'; nearest: 'test'"):
        trajectories(history, [DENSE], "tset")
    with pytest.raises(ValueError, match="a table without rows"): two_ablations(table[:0], [DENSE])

def test_what_a_figure_shows_is_what_the_rows_say(table):
    fig = two_ablations(table, [DENSE, DEEP])
    want = table.query("condition == @DEEP and site == 'L*.ffn_out' and edit == 'mean' and metric == 'digits' and "
                       "position == 'first-third' and stratum == 'all'")["value"]
    assert any(np.allclose(line.get_ydata(), np.sort(want)) for line in fig.axes[1].lines if len(line.get_ydata()) == 3)

def test_a_single_name_is_a_figure_of_one(table):
    said = " ".join(t.get_text() for t in two_ablations(table, DENSE).findobj(plt.Text))
    assert label(DENSE) in said and "uniform" in said
