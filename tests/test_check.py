"""What `check` sees in a clone that somebody changed."""
import os
import random
import shutil
import subprocess
import sys

import pandas as pd
import pytest

from moe_redistribution.evidence.table_files import ROOT, sums, write_sums
from moe_redistribution.record import versions as room
from moe_redistribution.record.check import FORGED, LAYERS, check_clone, demonstrate
from moe_redistribution.record.cli import main
from moe_redistribution.record.versions import Versions, rewritten_lines
from moe_redistribution.training.store import listed_hashes
from tiers import first

PARTS = ("data", "results", "checkpoints", "nbs")


@pytest.mark.parametrize("threads", first(["1"], ["1", "2"]))
def test_the_whole_command_finds_nothing_in_this_clone_whatever_the_number_of_threads(threads):
    done = subprocess.run([sys.executable, "-m", "moe_redistribution", "check"], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": threads})
    assert done.returncode == 0 and "answers: " in done.stdout, done.stdout + done.stderr


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    root = tmp_path_factory.mktemp("clone")
    for part in PARTS: shutil.copytree(ROOT / part, root / part)
    shutil.copy(ROOT / "SHA256SUMS", root)
    return root


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
    luck, names = random.Random(n), sorted(listed_hashes(copied / "SHA256SUMS"))
    kinds = [[x for x in names if x.startswith(f"{part}/")] for part in PARTS]
    assert all(kinds) and check_clone(copied, ["bytes"]).empty
    for i in range(n):
        name = luck.choice(kinds[i % len(kinds)])
        was = (copied / name).read_bytes()
        change(copied / name, luck)
        found = check_clone(copied, ["bytes"])
        (copied / name).write_bytes(was)
        assert found["what"].tolist() == [name]


def test_a_file_that_nobody_recorded_is_named(copied):
    (copied / "results/more.csv").write_text("a\n1\n")
    found = check_clone(copied, ["bytes"])
    (copied / "results/more.csv").unlink()
    assert found[["what", "expected"]].values.tolist() == [["results/more.csv", "no such file"]]


@pytest.mark.audit
def test_every_forgery_of_the_demonstration_is_seen_and_a_row_or_claim_also_with_new_sums():
    found = demonstrate()
    assert len(found) == len(FORGED) and found["seen by"].eq("bytes").all()
    history = "history" if (ROOT / ".git").exists() else "history not checked"
    again = found["seen by, with new sums"]
    assert again[2].startswith(history) and again.drop(2).tolist() == ["manifest", "registrations", "git diff alone"]


def test_a_claim_that_was_changed_after_it_was_registered_is_named_though_the_sums_are_written_again(tmp_path):
    for part in ("data", "results"): shutil.copytree(ROOT / part, tmp_path / part)
    shutil.copy(ROOT / "SHA256SUMS", tmp_path)
    path = tmp_path / "data/language_models/claims.csv"
    lines = pd.read_csv(path, dtype=str, keep_default_na=False)
    lines.assign(margin=["0.2", *lines["margin"][1:]]).to_csv(path, index=False)
    write_sums(tmp_path)
    found = check_clone(tmp_path, ["bytes", "registrations"])
    assert found["layer"].tolist() == ["registrations"] and lines["id"][0] in found["what"][0]


def git(root, *args):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    subprocess.run(["git", *who, *args], cwd=root, check=True, capture_output=True)


def test_a_register_that_lost_or_changed_a_line_is_named_and_one_that_grows_is_not(tmp_path, monkeypatch):
    def changed(): return [x for x in rewritten_lines(Versions(tmp_path, "r.csv")) if x]
    known = pd.DataFrame(columns=["covers"], dtype=str)
    monkeypatch.setattr(room, "deviations", lambda root: known)
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


@pytest.mark.audit
def test_a_verdict_that_the_rows_do_not_give_is_found_though_the_sums_are_written_again(copied):
    path = copied / "results/ledger.csv"
    was = path.read_text()
    path.write_text(was.replace("reproduced on new seeds", "not reproduced", 1))
    write_sums(copied)
    found = check_clone(copied, ["bytes", "answers"])
    path.write_text(was), write_sums(copied)
    assert found["layer"].tolist() == ["answers"] and found["what"].tolist() == ["results/ledger.csv"]
    assert sums(copied) == (copied / "SHA256SUMS").read_text()


def test_the_command_says_which_layer_it_is_at_and_ends_with_2_where_something_does_not_fit(capsys, monkeypatch):
    assert main(["check", "--layer", "bytes", "--layer", "registrations"]) == 0
    assert "definitions, as it should be" in (said := capsys.readouterr().out) and said.endswith("All fits.\n")
    monkeypatch.setitem(LAYERS, "bytes", (lambda root: [], "files"))
    assert main(["check", "--layer", "bytes"]) == 0 and "not checked: bytes.\n" in capsys.readouterr().out
    monkeypatch.setitem(LAYERS, "bytes", (lambda root: [("data/x.csv", "sha256 1", "2")], "files"))
    assert main(["check", "--layer", "bytes"]) == 2
    out = capsys.readouterr()
    assert "data/x.csv" in out.out and "git checkout" in out.err
    assert main(["check", "--layer", "byte"]) == 2 and "nearest: 'bytes'" in capsys.readouterr().err
