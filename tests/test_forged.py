"""What somebody forges and seals with new sums is named by `check` all the same."""
import base64
import json
import os
import shutil
import subprocess

import pytest

from moe_redistribution.evidence.registrations import COLUMNS, FILE, changed_late
from moe_redistribution.evidence.table_files import ROOT, Clone, summed_files, write_sums
from moe_redistribution.record import check
from moe_redistribution.record import outputs as room
from moe_redistribution.record.check import _check_clone

CODE = "from moe_redistribution.tasks.task import Task\n7 + 10"
ROOM = "moe_redistribution/tasks/task.py"

def notebook(shown, code=CODE, seal=True):
    "A page of one cell that shows some texts and pictures, as a run leaves it or, without `seal`, as somebody changed it."
    nb = dict(cells=[dict(cell_type="code", id="a", source=[code], outputs=[dict(data=x) for x in shown])], metadata={})
    if seal: nb["metadata"]["run"] = room._seal_of_run(json.dumps(nb).encode())
    return nb

def number(x): return {"text/plain": [x]}
def picture(x): return {"image/png": base64.b64encode(x).decode()}
SHOWN = [number("17"), picture(b"one"), picture(b"two")]

def git(root, *args):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *args], cwd=root, check=True, capture_output=True)

def put(root, **files):
    "Writes files, takes the sums of what is there then, and commits all."
    for name, said in files.items():
        (path := root / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(said if isinstance(said, str) else json.dumps(said))
    write_sums(root), git(root, "add", "."), git(root, "commit", "-qm", "more")

def page(shown, *args, **how): return {"nbs/a.ipynb": notebook(shown, *args, **how)}

@pytest.fixture
def small(tmp_path):
    "A clone with a front page, a page, a room behind it, and lines of a register: none of them forged."
    git(tmp_path, "init", "-q")
    head = ",".join(COLUMNS) + "\n"
    put(tmp_path, **{FILE: head, "data/deviations.csv": "date,commit,what,why,covers\n", ROOM: "a = 1\n", "README.md": "17",
                     "constraints.txt": "torch==8\n"})
    put(tmp_path, **{FILE: head + ",".join(["notes", "a", "paper", "0" * 12, "2026-01-01T00:00:00+00:00", "abc1234", "no rows"]) + "\n",
                     "nbs/index.ipynb": notebook([number("17")])})
    put(tmp_path, **page([number("16")], "7 + 9"))
    put(tmp_path, **page(SHOWN))
    assert found(tmp_path, "outputs") == []
    return tmp_path

def found(root, layer):
    every = _check_clone(root, ["bytes", layer])
    assert not every["layer"].eq("bytes").any()                                 # whoever forges takes new sums, too
    return every["what"].tolist()

OTHER, SWAPPED = [number("7"), *SHOWN[1:]], [SHOWN[0], *SHOWN[:0:-1]]

@pytest.mark.parametrize("shown", [OTHER, SWAPPED], ids=["number", "pictures"])
@pytest.mark.parametrize("also", [
    page(OTHER, "# rounded\n" + CODE), page(OTHER, CODE + "  # as before"), {ROOM: "a = 1  # one\n"}, {ROOM: '"Rooms."\na = 1\n'},
    {"constraints.txt": "torch==8  # newer\n"}], ids=["page", "line", "room", "docstring", "constraints"])
def test_a_number_or_picture_that_changed_with_a_comment_is_named_though_it_has_a_seal_and_new_sums(small, shown, also):
    code = "".join(also.get("nbs/a.ipynb", notebook(shown))["cells"][0]["source"])
    put(small, **(also | page(shown, code)))
    assert found(small, "outputs") == ["nbs/a.ipynb"]

@pytest.mark.parametrize("shown", [OTHER, SWAPPED], ids=["number", "pictures"])
@pytest.mark.parametrize("also", [page(OTHER, CODE + "\n0"), {ROOM: "a = 2\n"}, {"constraints.txt": "torch==9\n"}],
                         ids=["page", "room", "constraints"])
def test_a_number_or_picture_that_changed_with_code_is_named_where_no_run_sealed_it(small, shown, also):
    code = "".join(also.get("nbs/a.ipynb", notebook(shown))["cells"][0]["source"])
    forged = notebook(shown, code, seal=False)
    forged["metadata"] = notebook(SHOWN)["metadata"]                                     # the seal of what it showed
    put(small, **(also | {"nbs/a.ipynb": forged}))
    assert found(small, "outputs") == ["nbs/a.ipynb"]
    put(small, **(also | page(shown, code)))                                             # a run, and its seal
    assert found(small, "outputs") == []

def test_a_change_of_code_excuses_one_run_and_no_number_after_it(small):
    put(small, **({ROOM: "a = 2\n"} | page(OTHER)))
    assert found(small, "outputs") == []
    put(small, **page(SWAPPED))
    assert found(small, "outputs") == ["nbs/a.ipynb"]

def test_a_page_that_was_taken_out_and_put_back_with_another_number_is_named(small):
    git(small, "rm", "-q", "nbs/a.ipynb"), put(small, other="x")
    put(small, **page(OTHER))
    assert found(small, "outputs") == ["nbs/a.ipynb"]

def test_a_headline_that_changed_with_a_comment_on_the_front_page_is_named(small):
    put(small, **{"nbs/index.ipynb": notebook([number("71")], CODE + "  # the headline"), "README.md": "71"})
    assert found(small, "outputs") == ["nbs/index.ipynb"]

@pytest.fixture
def makers(tmp_path):
    "What README and toy are made by and of, and they; the code and the rows are this clone's."
    shutil.copytree(ROOT / "tools", tmp_path / "tools"), shutil.copytree(ROOT / "README_files", tmp_path / "README_files")
    (tmp_path / "nbs").mkdir(), os.symlink(ROOT / "moe_redistribution", tmp_path / "moe_redistribution")
    for name in ("README.md", "nbs/index.ipynb", "nbs/toy_data.js"): shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path

def made_otherwise(root): return [x[0] for x in room._made_otherwise(Clone(root)) if x]

def test_a_headline_or_picture_of_the_readme_that_the_front_page_does_not_make_is_named(makers, monkeypatch):
    monkeypatch.setattr(room, "MAKERS", room.MAKERS[:1])
    readme, one, two = makers / "README.md", *sorted((makers / "README_files").glob("*.png"))[:2]
    text = readme.read_text()
    at = next(i for i, c in enumerate(text) if c in "12345678" and text[i - 1] == ".")
    readme.write_text(text[:at] + str(int(text[at]) + 1) + text[at + 1:])
    one.write_bytes(two.read_bytes())
    front = makers / "nbs/index.ipynb"
    front.write_text(front.read_text().replace("import pandas as pd\\n", "import pandas as pd  # rows\\n", 1))
    said, = made_otherwise(makers)
    assert "README.md" in said and one.name in said and two.name not in said

@pytest.mark.audit
def test_a_datum_of_the_toy_that_checkpoints_and_rows_do_not_make_is_named(makers, monkeypatch):
    monkeypatch.setattr(room, "MAKERS", room.MAKERS[1:])
    assert made_otherwise(makers) == []
    toy = makers / "nbs/toy_data.js"
    toy.write_text(toy.read_text().replace('"left":0.1', '"left":0.9', 1))
    said, = made_otherwise(makers)
    assert "toy_data.js" in said

def test_a_number_in_the_page_of_verdicts_that_their_table_does_not_have_is_named(tmp_path, monkeypatch):
    for part in ("results", "data"): shutil.copytree(ROOT / part, tmp_path / part)
    for name in ("answer_names", "answer_tables"): monkeypatch.setattr(check, name, lambda *clone: [])    # no table is made again
    write_sums(tmp_path)
    assert found(tmp_path, "answers") == []
    path = tmp_path / "results/ledger.md"
    path.write_text(path.read_text().replace("+0.374", "+0.474", 1))
    write_sums(tmp_path)
    assert found(tmp_path, "answers") == ["results/ledger.md"]

def test_a_sentence_that_changed_when_its_rows_were_there_is_marked_though_the_register_has_a_line_for_it(tmp_path):
    line = "sentences,{},paper,{},2026-01-0{}T00:00:00+00:00,abc1234+,{}\n"
    (register := tmp_path / FILE).parent.mkdir()
    def write(*lines): register.write_text(",".join(COLUMNS) + "\n" + "".join(line.format(*x) for x in lines))
    write(("abs-01", "0" * 12, 1, "results seen"), ("abs-02", "0" * 12, 1, "nothing run"), ("abs-02", "1" * 12, 2, "nothing run"))
    assert changed_late("abs-01", register) == changed_late("abs-02", register) == ""
    write(("abs-01", "0" * 12, 1, "results seen"), ("abs-01", "1" * 12, 2, "results seen"))
    assert changed_late("abs-01", register) == "sentence changed once after rows were read"
    shutil.copy(ROOT / "results/ledger.csv", tmp_path / "results")
    text, own = check.ledger_page(tmp_path), check.ledger_page(ROOT)
    changed = [(a, b) for a, b in zip(own.split("\n"), text.split("\n"), strict=True) if a != b]
    assert [(b, b[-1]) for b in [changed[0][1]]] == [(f"{changed[0][0]} †", "†")] and len(changed) == 1

def test_a_former_verdict_or_trained_seed_that_was_taken_out_is_named(small):
    head = "key,since,commit,asked,verdict,reason\n"
    put(small, **{"results/changed.csv": head + "a,1,c,x,holds,\nb,1,c,x,fails,\n"})
    put(small, **{"results/changed.csv": head + "a,1,c,x,holds,\nb,1,c,y,fails,why\nc,2,d,x,open,\n"})
    assert found(small, "history") == []
    put(small, **{"results/changed.csv": head + "a,1,c,x,holds,\nc,2,d,x,open,\n"})
    named, = found(small, "history")
    assert named.startswith("results/changed.csv at") and named.endswith(": 1 lines")

def test_what_the_site_serves_what_machines_read_and_the_code_have_sums():
    names = {p.relative_to(ROOT).as_posix() for p in summed_files()}
    have = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not have: pytest.skip("no git to say what is committed")
    none = [x for x in have if x not in names and not x.startswith("tests/")]
    assert not [x for x in none if x.startswith(("nbs/", "machines/", "trainer/", "moe_redistribution/", "README", "CITATION"))
                and not x.endswith(".gitignore") and "/_" not in x], none
    assert names <= {*have}
