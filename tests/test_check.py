"""What `check` sees in a clone that somebody changed."""
import csv
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest

from moe_redistribution.evidence.registrations import FILE, unregistered_lines
from moe_redistribution.evidence.table_files import ROOT, manifest_of, _sums, witness, write_sums, write_table
from moe_redistribution.instruments.rows import rows, tidy
from moe_redistribution.models.condition import RECIPES
from moe_redistribution.record import check, versions as room
from moe_redistribution.record.check import FORGED, LAYERS, _check_clone, _demonstrate
from moe_redistribution.record.cli import main
from moe_redistribution.record.versions import Versions, _rewritten_lines
from moe_redistribution.basics.files import as_it_lies, _listed_hashes

PARTS = ("README", "data", "results", "checkpoints", "nbs")

def test_all_layers_find_nothing_in_this_clone_and_no_table_of_a_paper_has_another_verdict(monkeypatch, capsys):
    "All but two tables of verdicts, which take half a minute: an item of these is decided anew in test_claims.py."
    names = [n for n in check.answer_names() if n not in ("ledger", "contrasts")]
    made = check.answer_tables
    monkeypatch.setattr(check, "answer_names", lambda: names)
    monkeypatch.setattr(check, "answer_tables", lambda clone, some=names: made(clone, some))
    status, said = main(["check"]), capsys.readouterr().out
    assert status == 0 and f"answers: {len(names) + 1} tables, as it should be" in said and len(names) > 99, said

@pytest.mark.audit
@pytest.mark.parametrize("threads", ["1", "2"])
def test_the_whole_command_finds_nothing_in_this_clone_whatever_the_number_of_threads(threads):
    done = subprocess.run([sys.executable, "-m", "moe_redistribution", "check"], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, "OMP_NUM_THREADS": threads})
    assert done.returncode == 0 and "answers: " in done.stdout, done.stdout + done.stderr

@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    "What a clone holds, with a register of all that is in data/, as `make registrations` leaves it."
    root = tmp_path_factory.mktemp("clone")
    for part in (*PARTS[1:], "README_files"): shutil.copytree(ROOT / part, root / part)
    for name in ("SHA256SUMS", "README.md"): shutil.copy(ROOT / name, root)
    with as_it_lies(): new = unregistered_lines(root / FILE, root / "data")
    with open(root / FILE, "a", newline="") as f:
        for r in new.itertuples():
            csv.writer(f, lineterminator="\n").writerow([*r[1:5], "2100-01-01T00:00:00+00:00", "abc1234+", "no rows"])
    return write_sums(root).parent

@pytest.fixture
def forged(copied):
    "Changes files of this copy, takes the sums of what is there then, and puts all back."
    was = {}
    def change(name, data):
        was.setdefault(name, (copied / name).read_bytes())
        (copied / name).write_bytes(data(was[name]) if callable(data) else data)
    yield change
    for name, data in was.items(): (copied / name).write_bytes(data)
    write_sums(copied)

def found_by(root, layer): return _check_clone(root, ["bytes", layer]).query("layer == @layer")["what"].tolist()

def change(path, luck):
    "Flips a bit, takes a byte out, puts one in, cuts the file or removes it."
    good = bytearray(path.read_bytes())
    at, new = luck.randrange(len(good)), luck.randrange(256)
    how = luck.choice(["flip", "out", "in", "cut", "remove"])
    if how == "flip": good[at] ^= 1 << luck.randrange(8)
    if how == "out": del good[at]
    if how == "in": good.insert(at, new)
    if how == "cut": del good[at:]
    if how == "remove": path.unlink()
    else: path.write_bytes(good)

@pytest.mark.parametrize("n", [15, pytest.param(200, marks=pytest.mark.audit)])
def test_each_of_many_random_changes_to_data_results_and_pages_is_found_and_named(copied, n):
    luck, listed = random.Random(n), _listed_hashes(copied / "SHA256SUMS")
    names = sorted(x for x, (digest,) in listed.items() if digest[0] != "#")          # of these only what they show
    kinds = [[x for x in names if x.startswith(part)] for part in PARTS]
    assert all(kinds) and _check_clone(copied, ["bytes"]).empty
    for i in range(n):
        name = luck.choice(kinds[i % len(kinds)])
        was = (copied / name).read_bytes()
        change(copied / name, luck)
        found = _check_clone(copied, ["bytes"])
        (copied / name).write_bytes(was)
        assert found["what"].tolist() == [name]

def test_a_file_that_nobody_recorded_is_named(copied):
    (copied / "results/more.csv").write_text("a\n1\n")
    found = _check_clone(copied, ["bytes"])
    (copied / "results/more.csv").unlink()
    assert found[["what", "expected"]].values.tolist() == [["results/more.csv", "no such file"]]

@pytest.mark.audit
def test_every_forgery_of_the_demonstration_is_seen_and_a_row_or_claim_also_with_new_sums():
    found = _demonstrate()
    assert len(found) == len(FORGED) and found["seen by"].eq("bytes").all()
    history = "history" if (ROOT / ".git").exists() else "history not checked"
    again = dict(zip(FORGED, found["seen by, with new sums"]))
    assert history in again.pop("word")
    assert {again.pop(x) for x in ("output", "picture")} <= {"outputs", "run"}             # or by a run of the page
    assert again == dict(row="manifest", claim="registrations", sentence="git diff alone", pilot="registrations")

def cell(column, to, i=0):
    "A table of data/ with one cell changed, of line i; and the bytes of it."
    def change(data):
        head, *lines = csv.reader(data.decode().splitlines())
        lines[i][head.index(column)] = to
        return "\n".join(",".join(f'"{x.replace(chr(34), chr(34) * 2)}"' if re.search('[,"]', x) else x for x in line)
                         for line in (head, *lines)).encode() + b"\n"
    return change

def test_what_was_changed_in_data_after_it_was_registered_is_named_though_sums_are_new(copied, forged):
    assert found_by(copied, "registrations") == []
    forged("data/language_models/claims.csv", lambda data: cell("margin", "0.2")(cell("note", "or more", 1)(data)))
    forged("data/sparsity_moves/claims.csv", cell("unit_factor", "1"))
    forged("data/parrots/pilots.csv", cell("seen", "nothing"))
    forged("data/margins.csv", lambda data: data + b"\n")
    forged("data/routers/pilots.csv", b"")
    (copied / "data/routers/pilots.csv").unlink()
    write_sums(copied)
    depth = "contrast.language_models.depth3.mixture"
    assert sorted(found_by(copied, "registrations")) == [
        f"claims {depth}-dense.zero (audited)", "files margins.csv (all)", "files parrots/pilots.csv (all)",
        "files routers/pilots.csv (all)", f"notes {depth}-narrow.zero (audited)", "notes tab1.001 (paper)"]

def test_a_recipe_that_was_changed_in_its_module_is_named_at_every_arm_that_it_makes(copied, monkeypatch):
    monkeypatch.setitem(RECIPES, "hist", RECIPES["hist"] | dict(lr=2e-3))
    found = found_by(copied, "registrations")
    assert len(found) > 3 and all(x.startswith("settings hist/") for x in found)

def test_a_damaged_line_of_register_claims_or_sums_is_named_and_hides_no_other(copied, forged):
    key = (copied / FILE).read_text().splitlines()[1].split(",")[1]
    forged(FILE, lambda data: b"table,key,protocol,hash,date,commit,access\nnonsense" + data[data.index(b"\n", 99):])
    forged("data/parrots/claims.csv", lambda data: data.replace(b"\n", b'\nid "\n', 1))
    forged("data/margins.csv", lambda data: data + b"\n")
    forged("SHA256SUMS", lambda data: b"nonsense\n" + data)
    found = _check_clone(copied, ["bytes", "registrations"])
    of = {layer: own["what"].tolist() for layer, own in found.groupby("layer")}
    assert of["bytes"] == ["SHA256SUMS, line 1", "data/margins.csv", "data/parrots/claims.csv", FILE]
    assert of["registrations"][:2] == [f"{FILE}, line 2", "data/parrots/claims.csv, line 2"]
    assert any(key in x for x in of["registrations"][2:]) and of["registrations"][-1] == "files margins.csv (all)"

def test_a_line_that_was_read_from_git_later_takes_its_place_by_date_and_one_of_today_may_not(copied, forged):
    line = next(x for x in (copied / FILE).read_text().splitlines() if x.startswith("claims,")).split(",")
    def more(commit): return ",".join([*line[:3], "0" * 12, "2020-01-01T00:00:00+00:00", commit, "nothing run"]).encode()
    forged(FILE, lambda data: data + more("abc1234~") + b"\n")
    assert found_by(copied, "registrations") == []
    forged(FILE, lambda data: data + more("abc1234") + b"\n")
    assert len(found_by(copied, "registrations")) == 1

def test_a_table_of_answers_that_cannot_be_made_hides_no_other(copied, monkeypatch):
    def tables(root, names=("ledger", "contrasts")):
        for name in names:
            if name == "ledger": raise OSError("unreadable")
            yield name, pd.DataFrame(dict(id=["a"]))
    monkeypatch.setattr(check, "answer_tables", tables)
    monkeypatch.setattr(check, "answer_names", lambda: ["ledger", "contrasts"])
    found = [x for x in check._changed_answers(copied) if x]
    assert found[0] == ("results/ledger.csv", "what the rows give", "unreadable") and len(found) > 99
    assert {x[0] for x in found[1:]} == {"results/contrasts.csv"}

def test_a_damaged_line_of_the_manifest_or_file_of_rows_hides_no_other(tmp_path):
    for part in ("results", "data"): (tmp_path / part).mkdir()
    for task in ("mine", "yours", "theirs"):
        of = [rows([.5], [1], condition=f"{task}/{c}", metric="digits") for c in "ab"]
        write_table(tidy(of), "ablation", task, tmp_path)
    lines = manifest_of(tmp_path).to_csv(index=False).splitlines(keepends=True)
    (tmp_path / "results/manifest.csv").write_text("".join([lines[0], "a line\n", *lines[1:]]))
    (tmp_path / "results/rows/ablation/yours.parquet").write_bytes(b"none")
    write_table(tidy([rows([.25], [1], condition="theirs/a", metric="digits")]), "ablation", "theirs", tmp_path)
    write_sums(tmp_path)
    assert found_by(tmp_path, "manifest") == ["results/manifest.csv, line 2", "results/rows/ablation/yours.parquet",
                                              "ablation theirs/a (authors)", "ablation theirs/b (authors)"]

def test_a_page_that_cannot_be_read_hides_no_other(tmp_path):
    (tmp_path / "nbs").mkdir(), shutil.copytree(ROOT / "results", tmp_path / "results")
    for name in ("claims", "papers"): shutil.copy(ROOT / f"nbs/{name}.ipynb", tmp_path / "nbs")
    page = tmp_path / "nbs/claims.ipynb"
    page.write_bytes(page.read_bytes()[:-9])
    page = page.with_name("papers.ipynb")
    page.write_bytes(re.sub(rb'"hash": "\w+"', b'"hash": "0"', page.read_bytes()))
    write_sums(tmp_path)
    assert found_by(tmp_path, "pages") == ["nbs/claims.ipynb", "nbs/papers.ipynb"]

def of_notebook(change):
    def changed(data):
        change(nb := json.loads(data))
        return json.dumps(nb, indent=1, ensure_ascii=False).encode()
    return changed

def test_a_number_or_picture_that_any_page_shows_has_a_sum_and_the_sentences_of_a_lesson_have_none(copied, forged):
    def digit(nb):
        out = next(o for c in nb["cells"] for o in c.get("outputs", ()) if "text/plain" in o.get("data", {}))
        out["data"]["text/plain"] = ["17"]
    def sentence(nb): nb["cells"][1]["source"] = ["Another sentence."]
    for name, change, seen in (("nbs/01_tasks/01_task.ipynb", digit, 1), ("nbs/00_basics/01_errors.ipynb", sentence, 0),
                               ("nbs/index.ipynb", digit, 1)):
        forged(name, of_notebook(change))
        assert _check_clone(copied, ["bytes"])["what"].tolist() == [name] * seen
        write_sums(copied)
    picture = sorted((copied / "README_files").glob("*.png"))
    forged(f"README_files/{picture[0].name}", picture[1].read_bytes())
    assert _check_clone(copied, ["bytes"])["what"].tolist() == [f"README_files/{picture[0].name}"]

def git(root, *args):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    subprocess.run(["git", *who, *args], cwd=root, check=True, capture_output=True)

def test_a_register_that_lost_or_changed_a_line_is_named_and_one_that_grows_is_not(tmp_path, monkeypatch):
    def changed(): return [x for x in _rewritten_lines(Versions(tmp_path, "r.csv")) if x]
    known = pd.DataFrame(columns=["covers"], dtype=str)
    monkeypatch.setattr(room, "_deviations", lambda root: known)
    git(tmp_path, "init", "-q")
    for text in ("a\n1\n", "a\n1\n2\n"):
        (tmp_path / "r.csv").write_text(text)
        git(tmp_path, "add", "."), git(tmp_path, "commit", "-qm", "more")
    assert not changed()
    (tmp_path / "r.csv").write_text("a\n1\n")
    assert changed() == [("r.csv at now: 1 lines from 3 on", "as before", "none")]
    (tmp_path / "r.csv").write_text("a\n3\n2\n")
    assert [x[2] for x in changed()] == ["3"]
    git(tmp_path, "commit", "-qam", "forged")
    (what, *_), = changed()                                                        # committed, and seen all the same
    known.loc[0, "covers"] = what.replace("2 lines", "1 lines")                    # an excuse of another change
    assert len(changed()) == 1
    known.loc[0, "covers"] = what
    assert not changed()
    monkeypatch.setattr(room, "_claimed_before", lambda versions: [])
    def said(): return [x[0] for x in room.history_says(tmp_path) if x]
    monkeypatch.setattr(Versions.__init__, "__defaults__", (None, "r.csv"))
    assert said() == []
    known.loc[1, "covers"] = "r.csv at 01234567: 9 lines from 2 on"                # an excuse of nothing
    assert said() == ["data/deviations.csv: r.csv at 01234567: 9 lines from 2 on"]

def test_a_witness_is_found_in_a_clone_that_comes_from_its_state_and_not_in_a_history_written_anew(tmp_path):
    for part in ("results", "data"): (tmp_path / part).mkdir()
    git(tmp_path, "init", "-q")
    def commit(lines):
        (tmp_path / FILE).write_text("".join(f"{x}\n" for x in lines))
        write_sums(tmp_path)
        git(tmp_path, "add", "."), git(tmp_path, "commit", "-qm", "more")
        return witness(tmp_path)
    def found(digest): return _check_clone(tmp_path, [], digest=digest)["what"].tolist()
    first, _ = commit("a"), commit("ab")
    assert found(first) == found(first[:16]) == found(witness(tmp_path)) == []
    (tmp_path / FILE).write_text("b\n")                                            # a register that lost a line since
    assert found(first) == [FILE]
    shutil.rmtree(tmp_path / ".git")
    git(tmp_path, "init", "-q")
    commit("x"), commit("xb")
    assert found(first) == ["this clone"]                                          # fits itself, and not the witness
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(b'a' + bytes([10])).hexdigest()}  {FILE}\n")
    git(tmp_path, "commit", "-qam", "the sums of then"), commit("xbc")
    assert found(first) == [f"{FILE} at {first_of(tmp_path)}"]                     # its sums, and not its files

def first_of(root): return subprocess.check_output(["git", "rev-parse", "HEAD^"], cwd=root, text=True)[:8]

def test_the_witness_in_the_citation_is_a_state_that_this_clone_comes_from():
    digest = re.search(r"sha256:([0-9a-f]{64})", (ROOT / "CITATION.cff").read_text())[1]
    try: Versions()
    except room.NothingToLookAt as e: pytest.skip(str(e))
    assert _check_clone(layers=[], digest=digest).empty

@pytest.mark.audit
def test_a_verdict_that_the_rows_do_not_give_is_found_though_the_sums_are_written_again(copied):
    path = copied / "results/ledger.csv"
    was = path.read_text()
    path.write_text(was.replace(",holds,", ",fails,", 1))
    write_sums(copied)
    found = _check_clone(copied, ["bytes", "answers"])
    path.write_text(was), write_sums(copied)
    assert {*found["layer"]} == {"answers"} and "results/ledger.csv" in {*found["what"]}       # and what is made of it
    assert _sums(copied) == (copied / "SHA256SUMS").read_text()

def test_the_command_says_which_layer_it_is_at_and_ends_with_2_where_something_does_not_fit(capsys, monkeypatch):
    monkeypatch.setitem(LAYERS, "registrations", (lambda root: [None], "definitions"))
    assert main(["check", "--layer", "bytes", "--layer", "registrations"]) == 0
    assert f"Witness of this state: {witness()}\n" in (said := capsys.readouterr().out) and said.endswith("All fits.\n")
    monkeypatch.setitem(LAYERS, "bytes", (lambda root: [], "files"))
    assert main(["check", "--layer", "bytes"]) == 0 and "not checked: bytes.\n" in capsys.readouterr().out
    monkeypatch.setitem(LAYERS, "bytes", (lambda root: [("data/x.csv", "sha256 1", "2")], "files"))
    assert main(["check", "--layer", "bytes"]) == 2
    out = capsys.readouterr()
    assert "data/x.csv" in out.out and "git checkout" in out.err
