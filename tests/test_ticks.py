"""A figure whose ticks lie on each other, or are too small for a phone, is found while it is drawn, and its page is not
stored."""
import json
import sys

import pytest
from matplotlib import pyplot as plt

from moe_redistribution.evidence.table_files import ROOT

sys.path.append(str(ROOT / "tools"))
import outputs  # noqa: E402  scripts, and so no modules of the package
import ticks  # noqa: E402

LONG = ["one long name", "another long name", "a third, as long"]

@pytest.fixture(autouse=True)
def nothing_left_open():
    yield
    plt.close("all")

def found(fig):
    "The faults of a figure, once it is drawn."
    fig.canvas.draw()
    return ticks.faults(fig, fig.canvas.get_renderer())

def named(width, size=10, log=False, **how):
    fig, ax = plt.subplots(figsize=(width, 2.5), layout="constrained")
    if log: ax.set_xscale("log")
    ax.set_xticks([1, 2, 3], LONG, fontsize=size, **how)
    ax.set_xlim(.9, 3.1)
    return fig

@pytest.mark.parametrize("log", [False, True])
def test_labels_that_lie_on_each_other_are_found_and_the_same_ones_with_room_are_not(log):
    assert any("'one long name' and 'another long name' overlap" in f for f in found(named(2.5, log=log)))
    assert not found(named(9, log=log))

def test_slanting_labels_are_judged_along_their_own_direction():
    assert not found(named(2.5, rotation=60, ha="right", rotation_mode="anchor"))
    tight = found(named(1.6, 18, rotation=60, ha="right", rotation_mode="anchor"))
    assert any("'one long name' and 'another long name' overlap" in f for f in tight)
    fig = named(2.5, rotation=300, ha="left", rotation_mode="anchor")
    assert not found(fig) and {t.get_rotation() for t in fig.axes[0].get_xticklabels()} == {300}

def test_labels_of_two_panels_are_seen_and_what_is_not_shown_is_not():
    fig, (left, right) = plt.subplots(1, 2, figsize=(5, 2))
    fig.subplots_adjust(wspace=0)
    left.set_xticks([1], ["at the end"]), left.set_xlim(0, 1), right.set_xticks([0], ["at the start"])
    right.set_xlim(0, 1), right.set_yticks([])
    assert found(fig) == ["the ticks 'at the end' and 'at the start' overlap"]
    right.set_xlim(.1, 1)                                            # its tick is out of the picture
    assert not found(fig)
    right.set_xlim(0, 1), right.axis("off")
    assert not found(fig)

@pytest.mark.parametrize("width, size, small", [(9, 6, True), (9, 7, False), (3, 6, False), (3, 4, True)])
def test_a_label_is_legible_on_a_phone_where_a_picture_is_shrunk_by_a_third_at_most(width, size, small):
    fig, ax = plt.subplots(figsize=(width, 2))
    ax.set_xticks([0, 1], ["a", "b"], fontsize=size), ax.set_yticks([])
    assert any("px high on a phone" in f for f in found(fig)) == small

@pytest.mark.audit
def test_a_page_with_ticks_that_overlap_is_not_stored_and_the_mended_one_is(tmp_path, capfd):
    page = tmp_path / "page.ipynb"
    def write(width):
        code = f"import matplotlib.pyplot as plt\nax = plt.subplots(figsize=({width}, 2))[1]\n" \
               f"ax.set_xticks([1, 2, 3], {LONG});"
        page.write_text(json.dumps({"cells": [{"cell_type": "code", "id": "a", "metadata": {}, "outputs": [],
                                               "execution_count": None, "source": code}],
                                    "metadata": {}, "nbformat": 4, "nbformat_minor": 5}), encoding="utf-8")
        return page.read_text(encoding="utf-8")
    before = write(2)
    assert outputs.main([page]) == 1 and page.read_text(encoding="utf-8") == before
    assert "'one long name' and 'another long name' overlap" in capfd.readouterr().err
    write(9)
    assert outputs.main([page]) is None and "image/png" in page.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["page.ipynb"]
