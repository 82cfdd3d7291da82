"""The public list: every name of it resolves, late, and the page's table is the list."""
import importlib
import inspect
import json
import os
import re
import traceback
from pathlib import Path

import pandas as pd
import pytest
from fastcore.docments import docments

from fresh import python
import moe_redistribution as mr
from moe_redistribution.evidence.table_files import Clone
from moe_redistribution.record import cli
from moe_redistribution.record.outputs import _imported_rooms
from moe_redistribution.basics.kinds import import_file

ROOT = Path(__file__).resolve().parent.parent
PAGE = json.loads((ROOT / "nbs" / "all_you_can_call.ipynb").read_text(encoding="utf-8"))["cells"]

@pytest.mark.parametrize("name", mr.PUBLIC)
def test_a_public_name_is_the_object_of_its_room_and_says_what_it_is(name):
    room = importlib.import_module(f"moe_redistribution.{mr.PUBLIC[name]}")
    assert getattr(mr, name) is getattr(room, name) and name in room.__all__ and name in dir(mr)
    assert len(getattr(mr, name).__doc__.split()) > 4                            # of a class, too: none is inherited

def unexplained(thing):
    "Parameters of which nothing is said where they stand, and `return`, of a function or of what makes an object of a class."
    own = [x for x in (thing.__mro__ if inspect.isclass(thing) else [thing]) if x.__module__.startswith(("moe_", __name__))]
    said = {n: text for x in own[::-1] for n, text in docments(x, args_kwargs=True).items() if text}
    return [n for n in [*inspect.signature(thing).parameters, *["return"] * inspect.isfunction(thing)] if n not in said]

def test_what_nothing_is_said_of_is_seen():
    def half(
        x,  # what it is
        y=1, *rest, **more): pass
    assert unexplained(half) == ["y", "rest", "more", "return"]

def test_every_public_function_explains_each_of_its_arguments_and_what_comes_back():
    lost = {n: some for n in mr.PUBLIC if (some := unexplained(getattr(mr, n)))}
    assert not lost, f"{len(lost)} of {len(mr.PUBLIC)}: {lost}"

def test_up_to_fifty_names_each_once_and_none_is_a_part_of_the_package():
    named = [n for rooms in mr.LISTED.values() for names in rooms.values() for n in names.split()]
    parts = {p.name for p in (ROOT / "moe_redistribution").iterdir() if p.is_dir()}
    assert sorted(named) == sorted({*named}) == sorted(mr.__all__) and len(named) <= 50
    assert not {*named} & parts

def test_the_page_has_a_line_for_each_name_in_the_order_of_the_list():
    text = "".join("".join(o.get("data", {}).get("text/markdown", [])) for c in PAGE for o in c.get("outputs", []))
    assert re.findall(r"^\| \[`(\w+)`\]\(", text, flags=re.M) == list(mr.PUBLIC)

def fresh(script): return python("-c", script)

def test_a_star_gives_the_list():
    done = fresh("from moe_redistribution import *; print(*sorted(n for n in dir() if n[0] != '_'))")
    assert done.stdout.split() == sorted(mr.PUBLIC), done.stderr

@pytest.mark.parametrize("wrong, near", [("trian", "train"), ("ablte", "ablate"), ("reprot", "report"),
                                         ("store", "Store")])
def test_a_wrong_name_is_refused_with_the_nearest_however_it_is_asked_for(wrong, near):
    with pytest.raises(AttributeError, match=f"got '{wrong}'; nearest: '{near}'; fix: "): getattr(mr, wrong)
    with pytest.raises(ImportError, match=f"got '{wrong}'; nearest: '{near}'; fix: "):
        exec(f"from moe_redistribution import {wrong}")
    with pytest.raises(ImportError, match="nearest: 'errors'"): exec("from moe_redistribution.basics import erors")
    assert not hasattr(mr, wrong) and not hasattr(mr, "__wrapped__")

def test_a_page_that_imports_from_the_list_is_made_of_the_rooms_behind_it():
    "`check` asks whether these have changed: names of the list, and of `report`, led it to no room."
    def rooms(source): return {p[19:] for p in _imported_rooms(source) if (ROOT / p).is_file()}
    two = "from moe_redistribution import (train,\n  ablate)"
    assert rooms(two) == {"__init__.py", "training/groups.py", "instruments/ablation.py"}
    assert rooms("import moe_redistribution as mr\nmr.train()") == {"__init__.py", "training/groups.py"}
    assert rooms("from moe_redistribution import *\ntrain()") == {"__init__.py", "training/groups.py"}
    assert rooms("from moe_redistribution.report import *") == {"report/__init__.py"}

def test_a_file_of_a_users_own_may_register_with_names_of_the_list(tmp_path):
    (path := tmp_path / "own_of_the_list.py").write_text(
        "from moe_redistribution import Event, register\n\n"
        "@register('event', 'stay9')\nclass Stay(Event):\n    'Nothing happens.'\n    pattern, example = 'stay9', 'stay9'\n"
        "    def apply(self, c, now, began, moments): pass\n")
    assert import_file(path).Event is mr.Event and "stay9" in [x["name"] for x in mr.registered_things("event")]

def test_help_says_what_each_argument_is_and_says_it_once():
    done = fresh("from moe_redistribution import ablate; from moe_redistribution import ablate; help(ablate)")
    assert done.stdout.count("Arguments") == 1 and "edits: site or unit" in done.stdout, done.stderr

def test_a_value_of_another_kind_than_the_rows_have_is_refused():
    rows = pd.DataFrame(dict(edit=["mean", "zero"], seed=[1, 2]))
    with pytest.raises(ValueError, match="seed of rows with edit='mean': expected one of 1; got '2'"): mr.select(rows, edit="mean", seed=2)

def test_what_a_newcomer_mistypes_is_told_at_the_door():
    moe = "add7/moe-e4k1-h256-silu"
    params, modadd = mr.checkpoint(moe), mr.get_task("modadd")
    with pytest.raises(ValueError, match="edits: expected site or unit → what takes its place; got 'ffn_out'"):
        mr.ablate(params, moe, "ffn_out")
    hits = mr.ablate(params, moe, {"ffn_out": "mean"})
    with pytest.raises(ValueError, match="nearest: 'add7'"): mr.digits(hits, "add8")
    with pytest.raises(ValueError, match="digits of modadd: expected hits at its 1 read positions"): mr.digits(hits, modadd)
    assert (mr.digits(hits, "add7") == mr.digits(hits, mr.get_task("add7"))).all()
    kept = mr.trace(params, mr.get_task("add7").tokens[:2], moe, "ffn_out")
    assert kept["ffn_out"].shape[:2] == (5, 2)

def test_the_file_on_things_of_your_own_runs_as_it_stands_there(tmp_path):
    page = json.loads((ROOT / "nbs/00_basics/05_kinds.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(c["source"]) for c in page if c["cell_type"] == "markdown")
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(.*?)```", text, re.S)[1], encoding="utf-8")
    done = python("-m", "moe_redistribution", "train", "--import", "mine.py", "--seeds", "1,2", "parity/moe-e4k1-h64-silu+halved",
                  "--executor", "here", cwd=tmp_path, env=os.environ | dict(MOE_REDISTRIBUTION_HOME=str(tmp_path)))
    assert done.returncode == 0 and "Now: Nothing is missing." in done.stdout + done.stderr, done.stderr

def test_an_error_in_a_study_s_own_module_names_its_line_from_a_worker_as_well(tmp_path):
    (room := tmp_path / "studies" / "mine").mkdir(parents=True)
    (room / "study.py").write_text("def job():\n    return {}['x']\n")
    try: exec(compile((room / "study.py").read_text(), room / "study.py", "exec"), space := {}), space["job"]()
    except KeyError as e:
        assert cli._in_a_study(e).endswith("mend studies/mine/study.py, line 2")
        sent = RuntimeError("died")
        sent.__cause__ = Exception("".join(traceback.format_exception(e)))           # as a pool's worker sends its own
        assert cli._in_a_study(sent).endswith("mend studies/mine/study.py, line 2")
    assert cli._in_a_study(ValueError("x")) == ""

def test_a_committed_table_is_found_under_a_root_that_is_relative(monkeypatch):
    monkeypatch.chdir(ROOT.parent)
    clone = Clone(ROOT.name)
    assert len(clone.frame(clone.table("runs", "add7/x"))) == len(Clone(ROOT).frame("results/runs/add7.parquet")) > 0

def test_measuring_runs_of_another_stream_says_in_which_they_are(tmp_path):
    name = mr.train("add7/ffn-h8-silu+d16+steps200", [1], "authors", "full", tmp_path, executor="here", quiet=True)["condition"][0]
    with pytest.raises(ValueError, match="got none of seeds .1.; fix: stream='authors', where they are"):
        mr.measure_all(mr.Store(tmp_path), [name], [1])
