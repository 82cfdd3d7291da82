"""The changes that CONTRIBUTING shows are real: made in a copy of the package, what they add works; and so are its commands."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fresh import python

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
USE = {
    "Add an arm": """
from moe_redistribution.studies.sparsity_moves.experiments import orders
assert {o.condition for o in orders("audit-two")} == {"add7/moe-e2k1-h256-silu"}""",
    "Add a router": """
from moe_redistribution.models.condition import condition
from moe_redistribution.training.loop import init_members, train_interval
members = init_members(condition("add7/moe-e4k1-h16-silu+positions"), [1, 2], "paired")
assert train_interval(members, 3).isfinite().all()""",
    "Add an event": """
from moe_redistribution.models.condition import condition
from moe_redistribution.training.loop import init_members, train_interval, unflatten
c = condition("add7/ffn-h16-silu@2:halve")
a, b = (init_members(condition(n), [1], "paired") for n in (c.name, "add7/ffn-h16-silu"))
for members in (a, b): train_interval(members, 2)
(x, y) = (unflatten(m.w, m.c)["W_down"] for m in (a, b))
assert x.equal(y / 2) and c.events[0].step == 2""",
    "Add an instrument": """
import torch
from moe_redistribution.models.population import init
from moe_redistribution.instruments.instrument import instruments_for
params = init("add7/ffn-h8-silu", [torch.Generator().manual_seed(1)])
got = instruments_for("add7/ffn-h8-silu")["norms"].rows(params, "add7/ffn-h8-silu", [1], stream="authors", rule="final")
assert len(got) == len(params) and (got["value"] >= 0).all()
assert "norms" not in instruments_for("add7/no_ffn")""",
    "Add a family of language models": """
import torch
from moe_redistribution.opened.families import FAMILIES, tiny_model
from moe_redistribution.opened.opened import open_model
s = open_model(tiny_model("apertus"))
assert s.probe.experts < 1e-5 and s.layers[0].sums and s.layers[0].absent == FAMILIES["apertus"].absent""",
}
NEW_ROOM = {"04_instruments": "import torch\nfrom .rows import rows, tidy\n\n"}

def changes(title):
    "(notebook, [(old lines, new lines)]) of the diff under a heading."
    section = re.search(rf"^## {title}$(.*?)(?=^## )", TEXT, flags=re.M | re.S)[1]
    [diff] = re.findall(r"^```diff\n(.*?)^```", section, flags=re.M | re.S)
    for name, body in re.findall(r"^--- (\S+)\n(.*?)(?=^--- |\Z)", diff, flags=re.M | re.S):
        hunks = [[line for line in part.split("\n") if line] for part in body.split("@@\n")]
        yield name, [("".join(l[1:] + "\n" for l in h if l[0] in " -"),
                      "".join(l[1:] + "\n" for l in h if l[0] in " +"))
                     for h in hunks]

def module(notebook):
    "Where a notebook's module lies in the package."
    part, _, name = notebook.removeprefix("nbs/").rpartition("/")
    return "/".join(re.sub(r"^\d+\w?_", "", p) for p in [*part.split("/"), name]).replace(".ipynb", ".py")

def as_exported(text, path):
    "Lines of a notebook as nbdev writes them into a module."
    return re.sub(r"^from moe_redistribution\.", f"from {'.' * path.count('/')}.", text, flags=re.M)

@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "The package in a folder, which every change is made in."
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "moe_redistribution", root / "moe_redistribution", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "data").symlink_to(ROOT / "data")
    return root

@pytest.mark.parametrize("title", USE)
def test_a_change_that_contributing_shows_is_a_real_one(title, copy):
    package, touched = copy / "moe_redistribution", list(changes(title))
    assert 1 <= len(touched) <= 3
    for notebook, hunks in touched:
        path = package / module(notebook)
        if not (ROOT / notebook).exists():
            path.parent.mkdir(exist_ok=True), (path.parent / "__init__.py").touch()           # as nbdev does
            path.write_text(NEW_ROOM[notebook.split("/")[1]])
            hunks = [("", new) for _, new in hunks]
        for old, new in hunks:
            text, old, new = path.read_text(encoding="utf-8"), *(as_exported(x, module(notebook)) for x in (old, new))
            assert not old or text.count(old) == 1, f"{notebook} has not got, once:\n{old}"
            path.write_text(text.replace(old, new) if old else text + new, encoding="utf-8")
    done = python("-c", USE[title], cwd=copy, env={"PYTHONPATH": str(copy), "PATH": "", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]

@pytest.mark.audit
def test_a_study_is_added_by_the_commands_as_they_stand(tmp_path):
    "In a clone of its own: nothing is edited, and every line ends well; then its answer stands in the ledger, its page is run."
    section = re.search(r"^## Add a study$(.*?)(?=^## )", TEXT, flags=re.M | re.S)[1]
    lines = re.search(r"^```\n(.*?)^```", section, flags=re.M | re.S)[1].splitlines()[1:]         # activated
    subprocess.run(["git", "clone", "-q", ROOT, clone := tmp_path / "clone"], check=True)
    bin = Path(sys.executable).parent
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"} | dict(
        PYTHONPATH=str(clone), PATH=f"{bin}:{os.environ['PATH']}", MOE_REDISTRIBUTION_HOME=str(tmp_path / "store"))
    made = {"make registrations": "python tools/registrations.py", "make outputs NB=": "python tools/outputs.py "}
    for line in lines:                                          # `make` without its setup, which would install everything
        for begins, own in made.items(): line = re.sub(f'^{begins}"?(.*?)"?$', rf"{own}\1", line)
        done = subprocess.run(line, shell=True, cwd=clone, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout[-500:]}{done.stderr[-2000:]}"
    name = lines[0].split()[-1]
    assert f"-{name}-" in (clone / "results/ledger.csv").read_text() and name in (clone / "results/contrasts.csv").read_text()
    assert "In short" in (clone / f"nbs/10_studies/{name}/41_{name}.ipynb").read_text()

def test_the_list_of_promises_is_that_of_the_tests():
    "A test that goes takes its line along, in the same commit."
    import promises
    assert (ROOT / "tests/PROMISES.md").read_text(encoding="utf-8") == promises.page(), "python tests/promises.py"
    assert {p.stem for p in promises.touched_by("guard")} >= {"test_guard", "test_site"} and "test_claims" not in {
        p.stem for p in promises.touched_by("guard")}
