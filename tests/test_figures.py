"""A figure draws what its rows say and the nulls of its own task: what the page shows of add-7 holds for the other
tasks."""
import warnings

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from moe_redistribution.instruments.ablation import null_rows, whole_answer
from moe_redistribution.report.figures import null_lines, trajectories, two_ablations
from moe_redistribution.tasks.task import get_task
from moe_redistribution.instruments.rows import rows

TASKS = {"add7": "add7/ffn-h256-silu", "modadd": "modadd/ffn-h512-gelu", "hist": "hist/ffn-h512-gelu"}

@pytest.fixture(autouse=True)
def nothing_left_open():
    yield
    plt.close("all")

def named(ax): return {text.get_text(): text.xy[1] for text in ax.texts}

def accuracies(task):
    whole = null_rows(get_task(task)).query("stratum == 'all' and position == @whole_answer(@get_task(@task))")
    return whole.set_index("unit")["value"].to_dict()

@pytest.mark.parametrize("task, name", TASKS.items())
def test_every_task_s_figures_have_its_own_nulls_and_its_own_dots(task, name):
    where = dict(rule="first256", site="ffn_out", metric="digits", position=whole_answer(get_task(task)))
    table = pd.concat([rows([.2, .3, .4], [1, 2, 3], condition=name, edit=edit, **where) for edit in ("zero", "mean")])
    first, last = two_ablations(table, [name]).axes
    assert (first.get_title(), last.get_title()) == ("FFN at zero", "FFN at its mean")
    assert any(list(line.get_ydata()) == [.2, .3, .4] for line in last.lines)
    want = accuracies(task)
    assert set(named(last)) == {"copy", "uniform", "most frequent", "pass-through"} & set(want)
    assert all(np.isclose(level, want[n]) for n, level in named(last).items())
    history = pd.DataFrame(dict(condition=name, seed=[1, 1, 2, 2], step=[1, 2, 1, 2], acc=[.1, .2, .3, .4]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        along = trajectories(history, [name], ["acc"], ["course"]).axes[0]
    dotted = [line.get_ydata()[0] for line in along.lines if line.get_linestyle() == ":"]           # names stand beside curves
    assert sorted(dotted) == sorted(level for n, level in named(last).items() if n != "uniform")

def test_a_null_that_the_task_has_not_got_and_two_tasks_in_one_figure_are_refused():
    ax = plt.subplots()[1]
    with pytest.raises(ValueError, match="null: expected one of .*; got 'copy'"): null_lines(ax, "hist", ("copy",))
    for draw in (lambda names: two_ablations(pd.DataFrame(), names),
                 lambda names: trajectories(pd.DataFrame(), names, ["acc"], [""])):
        with pytest.raises(ValueError, match="conditions of one task; got add7, hist"):
            draw([TASKS["add7"], TASKS["hist"]])
