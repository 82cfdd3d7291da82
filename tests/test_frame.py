"""What the site's frame (tools/frame.py) adds to a page: folds, one number a figure, nothing from elsewhere."""
import configparser
import re
import sys

import pytest

from moe_redistribution.evidence.table_files import ROOT
from moe_redistribution.report import pages

sys.path.append(str(ROOT / "tools"))
import frame  # noqa: E402  a script, and so no module of the package

ROOM, RESULT = "02_models/x.ipynb", "10_studies/sparsity_moves/x.ipynb"

def code(source, *outputs):
    return {"cell_type": "code", "source": source, "outputs": [{"data": d} for d in outputs], "metadata": {}}

@pytest.mark.parametrize("source, shown, page, word", [
    ("import torch\nfrom a import b", "", ROOM, "set-up"),
    ("assert 1\ntest_eq(2, 2)\nfor x in y: assert x", "", ROOM, "3 assertions, all hold"),
    ("def f(): assert 0", "", ROOM, None),                                  # a lesson: nothing is asserted yet
    ("#| echo: false\nassert 1", "", RESULT, None),
    ("shown", "image/png", RESULT, "how this figure is drawn"), ("shown", "image/png", ROOM, None),
    ("x = 1\nassert x\nx", "text/plain", RESULT, None)])                   # a value keeps its code in view
def test_what_a_cell_holds_and_shows_decides_whether_it_is_folded(source, shown, page, word):
    cell = code(source, *[{shown: "x", "text/plain": "x"}] * bool(shown))
    assert frame.fold(cell, page) == word
    if not shown:
        made = "".join(frame.framed({"cells": [cell]}, page)["cells"][0]["source"])
        assert (made.count("code-fold: true"), "code-fold: show" in made) == (bool(word), False)

@pytest.mark.parametrize("page", ["01_tasks/02_data.ipynb", "10_studies/granularity/41_grids.ipynb", "glossary.ipynb"])
def test_a_room_a_page_of_results_and_a_page_without_code_are_made_by_the_site_s_build(page, monkeypatch):
    "`make audit` makes all: what fails on the way is a cell that imports and needs another, and a rule of test_site.py has none."
    from execnb.nbio import read_nb
    from nbdev.processors import FilterDefaults
    monkeypatch.setenv("IN_TEST", "1")
    FilterDefaults()(nb := read_nb(ROOT / "nbs" / page))
    assert frame.framed(nb, str(page))["cells"]

def test_a_figure_shows_one_number_and_keeps_its_anchor():
    cell = code('#| label: fig-4\n#| fig-cap: "Figure 4. It holds."\nplot()', {"image/png": ""})
    anchor, made = frame.framed({"cells": [cell]}, RESULT)["cells"]
    assert ('id="fig-4"' in "".join(anchor["source"])
            and frame.options("".join(made["source"]))["label"] == "picture-4")
    assert all(isinstance(c["source"], list) for c in (anchor, made))       # of a string Quarto drops the ends of lines

@pytest.mark.parametrize("git_url", ["", "https://forge/a/b"])
def test_no_link_into_a_repository_that_is_not_there(git_url):
    link = f'[source]({git_url and git_url + "/"}blob/main/m.py#L1){{target="_blank" style="float:right"}}\n\n### f\n'
    made, = frame.framed({"cells": [code("show_doc(f)", {"text/markdown": link})]}, "x.ipynb")["cells"]
    assert ("[source]" in "".join(made["outputs"][0]["data"]["text/markdown"]),
            "### f" in str(made)) == (bool(git_url), True)
    assert git_url in str(frame.navbar(git_url)) and bool(frame.navbar(git_url)) == bool(git_url)

def test_a_table_asks_nobody_for_scripts():
    made, = frame.framed({"cells": [code("t", {"text/html": "<table></table>", "text/plain": "t"})]},
                         "x.ipynb")["cells"]
    data = made["outputs"][0]["data"]
    assert "text/html" not in data and data["text/markdown"] == ["```{=html}\n", "<table></table>\n", "```\n"]

def test_a_branch_of_any_name_reaches_the_settings_as_an_address():
    name = 'a"; $(touch x) &|\\1%(b)s)#c'
    made = configparser.ConfigParser()
    made.read_string(frame.pointed((ROOT / "settings.ini").read_text(), "https://forge/a/b", name))
    assert made["DEFAULT"]["git_url"] == "https://forge/a/b" and re.fullmatch(r"[\w.~%/-]+", made["DEFAULT"]["branch"])

def test_what_a_page_stands_on_is_said_at_its_foot():
    "Its notebook says so where the rows are read; a reader of the site has a question first."
    stands = {"data": {frame.STORED: {"hash": "a"}, "text/markdown": "This page stands on 9 rows.", "text/plain": ""}}
    cell = dict(cell_type="code", source="page = Page()\nOpening(page)", outputs=[stands], metadata={})
    after = dict(cell_type="markdown", source="## The question", metadata={})
    first, question, foot = frame.framed({"cells": [cell, after]}, RESULT)["cells"]
    assert first["outputs"] == [] and question["source"] == ["## The question"]
    assert "This page stands on 9 rows." in "".join(foot["source"]) and frame.STORED == pages.STORED
