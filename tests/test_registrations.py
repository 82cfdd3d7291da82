"""Registrations: a definition that changed without an amendment is refused, and nothing is ever taken out of the
register."""
import importlib.util
import os
import shutil
import subprocess
import sys

import pandas as pd
import pytest

from moe_redistribution.evidence import planned
from moe_redistribution.evidence.claims import claims
from moe_redistribution.evidence.registrations import (ACCESS, COLUMNS, FILE, LATER, NOTES, REGISTERED_TABLES,
                                                       SEALED, SENTENCES, WHOLE_FILES, changed_late, definition_hash,
                                                       _definitions, _every_registration, registrations, registered_on,
                                                       unregistered_lines)
from moe_redistribution.evidence.table_files import ROOT, _sums, write_sums
from moe_redistribution.instruments.rows import rows
from moe_redistribution.models.condition import condition
from moe_redistribution.record.versions import history_says
from moe_redistribution.training import store
from moe_redistribution.basics.files import Damaged
from moe_redistribution.training.study import Preset, Study

FFN, MOE = "add7/ffn-h256-silu", "add7/moe-e4k1-h256-silu"
LINE = dict(protocol="audited", instrument="ablation", stream="paired", condition=MOE, versus=FFN, metric="digits",
            site="ffn_out", edit="mean", rule="first1000", unit="", position="o0-o3", stratum="all", split="all",
            aggregate="difference", seeds="1-8", over="seeds", margin="0.05", note="")
SAID, BRIDGE = dict(LINE, key="4.1-01", expects="+", statement="More is left.", quotes="",
                    page="x"), dict(LINE, id="contrast.a", null="", item="contrast_c")
WORDS = dict(statement="Less is lost.", quotes="tab1.001", page="y#z", note="corrected", section="§5", n="64", item="d")

def write(folder, said=(SAID,), bridge=(BRIDGE,)):
    for name, lines in (("statements", said), ("claims", bridge)):
        (folder / "data/mine").mkdir(exist_ok=True, parents=True)
        pd.DataFrame(list(lines)).to_csv(folder / f"data/mine/{name}.csv", index=False)

def register(folder, *lines):
    "A register of (table, key, protocol, hash), one second apart."
    frame = pd.DataFrame([(*x, f"2020-01-01T00:00:{i:02}+00:00", "abc1234", "nothing run")
                          for i, x in enumerate(lines)], columns=COLUMNS)
    frame.to_csv(folder / "registrations.csv", index=False)
    return folder / "registrations.csv"

def unsaid(*where):
    "Definitions and sentences that are not registered as they stand; notes and recipes have tests of their own."
    return unregistered_lines(*where).query("table not in @BESIDES").reset_index(drop=True)

BESIDES = [NOTES, SEALED]
OWN = [("statements", "4.1-01", "audited", definition_hash(SAID)),
       ("claims", "contrast.a", "audited", definition_hash(BRIDGE))]

# --- the hash ---------------------------------------------------------------------------------------

def test_an_n_that_counts_models_is_another_definition_and_seeds_are_what_n_counted_before():
    old = {k: v for k, v in SAID.items() if k != "over"}
    assert definition_hash(old) == definition_hash(SAID) != definition_hash(SAID | {"over": "models"})

@pytest.mark.parametrize("same", [{"margin": "0.050"}, {"null": ""}, {"null": float("nan")}, {"later": "x"},
                                  *({word: said} for word, said in WORDS.items())], ids=str)
def test_a_definition_is_its_values_however_they_are_written(same):
    assert definition_hash(SAID | same) == definition_hash(SAID)
    assert definition_hash(pd.Series(SAID | same)) == definition_hash(dict(reversed(SAID.items())))

def test_the_checked_tables_have_the_hashes_of_the_files():
    now = _definitions().set_index(["table", "key", "protocol"])["hash"]
    for c in claims().head(50).to_dict("records"):       # a printed number's margin follows from data/margins.csv
        own = {} if c["id"].startswith("contrast.") else {"margin": ""}
        assert now["claims", c["id"], c["protocol"]] == definition_hash(c | own)

# --- a changed line needs an amendment --------------------------------------------------------------

def test_a_line_that_is_registered_as_it_stands_is_left_alone(tmp_path):
    write(tmp_path, [SAID | WORDS])
    assert unsaid(register(tmp_path, *OWN), tmp_path / "data").empty

@pytest.mark.parametrize("column, to",
                         [("margin", "0.02"), ("expects", "0"), ("seeds", "1-9"), ("edit", "zero"), ("versus", "")])
def test_a_changed_line_without_an_amendment_is_refused(tmp_path, column, to):
    write(tmp_path, [SAID | {column: to}])
    left = unsaid(register(tmp_path, *OWN), tmp_path / "data")
    assert left[["table", "key", "registered"]].values.tolist() == [["statements", "4.1-01", definition_hash(SAID)]]
    amended = register(tmp_path, *OWN, ("statements", "4.1-01", "audited", definition_hash(SAID | {column: to})))
    assert unsaid(amended, tmp_path / "data").empty
    assert registered_on("statements", amended).loc[("4.1-01", "audited"), "date"].endswith(":02+00:00")
    assert registrations(amended).set_index("key")["amended"].to_dict() == {"contrast.a": 0, "4.1-01": 1}

def test_a_line_that_went_back_to_an_older_definition_needs_an_amendment_too(tmp_path):
    write(tmp_path)
    path = register(tmp_path, *OWN, ("statements", "4.1-01", "audited", definition_hash(SAID | {"margin": "0.1"})))
    assert unsaid(path, tmp_path / "data")["key"].tolist() == ["4.1-01"]

def test_a_new_line_is_refused_and_one_that_was_taken_out_keeps_its_registration(tmp_path):
    write(tmp_path, bridge=[BRIDGE | {"id": "contrast.b"}])
    assert unsaid(register(tmp_path, *OWN),
                              tmp_path / "data")[["key", "registered"]].values.tolist() == [["contrast.b", ""]]
    assert "contrast.a" in set(registrations(tmp_path / "registrations.csv")["key"])

def test_a_key_that_two_lines_have_is_refused_before_anything_is_registered(tmp_path):
    write(tmp_path, bridge=(BRIDGE, BRIDGE | dict(metric="loss")))
    with pytest.raises(ValueError, match="one line of each id and protocol.*contrast.a.*rename one"):
        _definitions(tmp_path / "data")

def test_without_a_register_nothing_is_registered(tmp_path):
    write(tmp_path)
    assert len(unsaid(tmp_path / "none.csv", tmp_path / "data")) == 2

@pytest.mark.parametrize("spoil", [lambda f: f.iloc[::-1], lambda f: f.assign(access="not looked"),
                                   lambda f: f.drop(columns="hash")])
def test_a_register_that_somebody_wrote_by_hand_is_refused(tmp_path, spoil):
    path = register(tmp_path, *OWN)
    spoil(pd.read_csv(path)).to_csv(path, index=False)
    with pytest.raises(ValueError, match="make registrations"): registrations(path)

# --- the committed register -------------------------------------------------------------------------

def test_words_of_access_are_known_and_lines_are_in_order_of_date_and_key():
    lines = pd.read_csv(ROOT / FILE, dtype=str, keep_default_na=False)
    assert (list(lines) == COLUMNS and set(lines["access"]) <= set(ACCESS)
            and {*REGISTERED_TABLES, SENTENCES, SEALED} <= set(lines["table"])
            and set(lines["table"]) <= {*REGISTERED_TABLES, SENTENCES, SEALED, NOTES, WHOLE_FILES})
    assert (lines["date"].str.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00").all()
            and lines["hash"].str.fullmatch("[0-9a-f]{12}").all())
    assert lines["commit"].str.fullmatch(r"[0-9a-f]{7,40}[+~]?").all()
    lines = lines[~lines["commit"].str.endswith(LATER)]               # the others were read from git later
    order = list(lines[["date", "key"]].itertuples(index=False, name=None))
    assert order == sorted(order)

def test_nothing_is_taken_out_of_the_register():
    head = (subprocess.run(["git", "show", f"HEAD:{FILE}"], cwd=ROOT, capture_output=True, text=True)
            if shutil.which("git") else None)
    if head is None or head.returncode: pytest.skip("no clone of the repository, or no register in it yet")
    before, now = head.stdout.splitlines(), iter((ROOT / FILE).read_text().splitlines())
    gone = [line for line in before if line not in now]               # an iterator: found in order, or not at all
    assert not gone, f"git checkout -- {FILE}, then make registrations: {gone[:3]}"

# --- the tool ---------------------------------------------------------------------------------------

@pytest.fixture
def tool(tmp_path, monkeypatch):
    "The tool, in a repository of its own."
    if not shutil.which("git"): pytest.skip("no git")
    spec = importlib.util.spec_from_file_location("registering", ROOT / "tools" / "registrations.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(planned, "of_studies", lambda *a: {})                               # nor what the house's studies plan
    monkeypatch.setattr(module, "check_tables", lambda real=module.check_tables: None)      # lines of a test are few
    (tmp_path / "results").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return module

def commit(folder, hour):
    date = f"2020-01-01T{hour:02}:00:00+00:00"
    who = {f"GIT_{w}_{k}": v for w in ("AUTHOR", "COMMITTER")
           for k, v in (("NAME", "a"), ("EMAIL", "a@b"), ("DATE", date))}
    subprocess.run("git add -A && git commit -qm x", shell=True, cwd=folder, check=True, env=os.environ | who)
    return date

def measure(folder, name, seeds=(1, 2), edit="mean"):
    path = folder / f"results/rows/ablation/{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows([.5] * len(seeds), list(seeds), condition=name, stream="paired", rule="first1000", metric="digits",
         site="ffn_out", edit=edit).to_parquet(path)

def registered(tool, folder, *lines):
    "Lines that are committed in the first hour, and registered."
    write(folder, *lines), commit(folder, 1), tool.main([])

def found(folder): return {r.key: (r.date, r.access) for r in lines_of(folder).itertuples(index=False)}
def lines_of(folder): return registrations(folder / FILE).query("table not in @BESIDES")

def test_a_definition_has_the_date_since_which_it_has_stood(tool, tmp_path):
    write(tmp_path, [SAID | {"margin": "0.1"}])
    first = commit(tmp_path, 1)
    measure(tmp_path, FFN)
    commit(tmp_path, 2)
    write(tmp_path)                                                # another margin, when one of two conditions is there
    second = commit(tmp_path, 3)
    measure(tmp_path, MOE)
    write(tmp_path, [SAID, SAID | {"key": "late"}, SAID | {"key": "none", "aggregate": "none"},
                     SAID | {"key": "other", "edit": "zero"}])
    third = commit(tmp_path, 4)                                     # a line that came with the last of its rows
    write(tmp_path, [SAID | WORDS] + [SAID | {"key": k, **c} for k, c in (
        ("late", {}), ("none", {"aggregate": "none"}), ("other", {"edit": "zero"}))])
    commit(tmp_path, 5)
    assert tool.main([]) == 0
    assert found(tmp_path) == {"contrast.a": (first, "nothing run"), "4.1-01": (second, "in part"),
                               "late": (third, "results seen"), "none": (third, "no rows"),
                               "other": (third, "other measures seen")}

@pytest.mark.parametrize("seed, word", [(3, "runs not opened"), (99, "nothing run")])
def test_runs_that_lie_in_the_store_unrecorded_are_said(tool, tmp_path, monkeypatch, seed, word):
    write(tmp_path)
    register(tmp_path, OWN[0])
    (tmp_path / "results").mkdir(exist_ok=True), shutil.move(tmp_path / "registrations.csv", tmp_path / FILE)
    commit(tmp_path, 1)
    monkeypatch.setenv("MOE_REDISTRIBUTION_HOME", str(tmp_path / "home"))
    run = store.Store().path(condition(MOE), seed, "paired")
    run.parent.mkdir(parents=True), run.touch()
    tool.main([])
    assert found(tmp_path)["contrast.a"][1] == word

def test_a_line_that_moves_into_the_folder_of_its_study_keeps_its_date(tool, tmp_path):
    "In the first days one file held the lines of all studies."
    write(tmp_path, [SAID], [BRIDGE, BRIDGE | {"id": "contrast.b"}])
    for name in ("statements", "claims"): shutil.move(tmp_path / f"data/mine/{name}.csv", tmp_path / "data")
    first = commit(tmp_path, 1)
    for name in ("statements", "claims"): (tmp_path / f"data/{name}.csv").unlink()
    write(tmp_path, [SAID], [BRIDGE])
    shutil.copytree(tmp_path / "data/mine", tmp_path / "data/other")
    (tmp_path / "data/other/statements.csv").unlink()
    pd.DataFrame([BRIDGE | {"id": "contrast.b"}]).to_csv(tmp_path / "data/other/claims.csv", index=False)
    commit(tmp_path, 2)
    tool.main([])
    assert {k: date for k, (date, _) in found(tmp_path).items()} == dict.fromkeys(
        ("4.1-01", "contrast.a", "contrast.b"), first)

def test_rows_that_were_on_record_once_were_seen(tool, tmp_path):
    for name in (FFN, MOE): measure(tmp_path, name)
    write(tmp_path, [SAID | {"margin": "1"}])
    commit(tmp_path, 1)
    shutil.rmtree(tmp_path / "results/rows")
    commit(tmp_path, 2)
    write(tmp_path)
    commit(tmp_path, 3)
    tool.main([])
    assert {a for _, a in found(tmp_path).values()} == {"results seen"}

def test_a_definition_that_git_held_before_the_register_is_added_with_its_own_date(tool, tmp_path, monkeypatch):
    "Its control was exchanged when its rows were there, and back: neither the first nor the second is forgotten."
    (tmp_path / "data").mkdir()
    (tmp_path / "data/deviations.csv").write_text("date,commit,what,why,covers\n")
    other = SAID | {"versus": "add7/ffn-h64-silu"}
    write(tmp_path, [other])
    first = commit(tmp_path, 1)
    for name in (FFN, MOE): measure(tmp_path, name)
    write(tmp_path)
    second = commit(tmp_path, 2)
    tool.main([])
    commit(tmp_path, 3)
    write(tmp_path, bridge=[BRIDGE, BRIDGE | {"id": "contrast.b", "seeds": "9-16"}])
    tool.main([]), commit(tmp_path, 4)
    (line, should, got), = [x for x in history_says(tmp_path) if x and "which data" in x[1]]
    assert line == "statements 4.1-01 (audited)" and definition_hash(other) in should and got == "none"
    before, last = (tmp_path / FILE).read_text(), registrations(tmp_path / FILE)
    assert tool.main(["--from-git"]) == 0
    after = (tmp_path / FILE).read_text()
    new = after.removeprefix(before).splitlines()
    assert after.startswith(before) and len(new) == 1 and new[0].startswith(
        f"statements,4.1-01,audited,{definition_hash(other)},{first}") and new[0].endswith("~,nothing run")
    assert last.drop(columns="amended").equals(registrations(tmp_path / FILE).drop(columns="amended"))
    every = _every_registration(tmp_path / FILE).query("table == 'statements'")
    assert every[["date", "amended"]].values.tolist() == [[first, 0], [second, 1]]
    assert changed_late("4.1-01", tmp_path / FILE) == "control changed once after rows were read"
    assert changed_late("4.1-02", tmp_path / FILE) == ""
    commit(tmp_path, 5)
    assert not [x for x in history_says(tmp_path) if x and "which data" in x[1]]
    tool.main(["--from-git"])
    assert (tmp_path / FILE).read_text() == after
    write(tmp_path, [SAID | {"margin": "0.9"}])
    commit(tmp_path, 6)
    write(tmp_path)
    back = commit(tmp_path, 7)                          # another definition for an hour, which nobody registered
    tool.main(["--from-git"])
    assert found(tmp_path)["4.1-01"] == (back, "results seen") and unregistered_lines(
        tmp_path / FILE, tmp_path / "data").query("table == 'statements'").empty

def test_rows_of_other_measures_are_known_rows(tool, tmp_path):
    "A re-analysis of measured seeds under a new name is no question that was asked before its rows."
    (tmp_path / "data").mkdir()
    (tmp_path / "data/deviations.csv").write_text("date,commit,what,why,covers\n")
    write(tmp_path, [SAID | {"key": "before"}])
    commit(tmp_path, 1)
    tool.main([]), commit(tmp_path, 2)
    for name in (FFN, MOE): measure(tmp_path, name)
    commit(tmp_path, 3)
    write(tmp_path, [SAID | {"key": "before"}, SAID | {"metric": "renamed"}, SAID | {"key": "new", "seeds": "9-16"}])
    tool.main([]), commit(tmp_path, 4)
    got = {key: word for key, (_, word) in found(tmp_path).items() if key != "deviations.csv"}
    assert got == {"before": "nothing run", "contrast.a": "nothing run", "4.1-01": "other measures seen",
                   "new": "nothing run"}
    text = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(text.replace("other measures seen", "nothing run"))        # as the register had it
    subprocess.run("git commit -qam x --amend", shell=True, cwd=tmp_path, check=True, env=os.environ | {
        f"GIT_{w}_{k}": v for w in ("AUTHOR", "COMMITTER") for k, v in (("NAME", "a"), ("EMAIL", "a@b"))})
    (line, should, got), = [x for x in history_says(tmp_path) if x and "measure" in x[1]]
    assert line == "statements 4.1-01 (audited)" and got == f"{MOE}, {FFN}"
    tool.main(["--from-git"])
    assert found(tmp_path)["4.1-01"][1] == "other measures seen" and (tmp_path / FILE).read_text().count("~,") == 1

def test_a_changed_line_is_amended_by_its_own_date_and_no_other_line_is_touched(tool, tmp_path):
    registered(tool, tmp_path)
    before, old = (tmp_path / FILE).read_text(), found(tmp_path)
    commit(tmp_path, 2)
    for name in (FFN, MOE): measure(tmp_path, name, seeds=(4,))       # not committed
    write(tmp_path, [SAID | {"margin": "0.02"}], [BRIDGE, BRIDGE | {"id": "contrast.b", "seeds": "9-16"}])
    assert tool.main(["--check"]) == 1 and (tmp_path / FILE).read_text() == before
    tool.main([])
    after = (tmp_path / FILE).read_text()
    assert after.startswith(before) and [x.split(",")[1] for x in after.removeprefix(before).splitlines()] == [
        "4.1-01", "contrast.b", "contrast.b"]                                         # and the note of the new line
    got = found(tmp_path)
    assert (got["contrast.a"] == old["contrast.a"] and got["4.1-01"][1] == "results seen"
            and got["contrast.b"][1] == "nothing run")
    assert (got["4.1-01"][0] > old["contrast.a"][0] and lines_of(tmp_path)["commit"].str.endswith("+").sum() == 2)
    assert tool.main(["--check"]) == 0
    tool.main([])
    assert (tmp_path / FILE).read_text() == after

def test_a_changed_definition_is_taken_by_registering_it_and_nothing_else_is(tool, tmp_path):
    registered(tool, tmp_path)
    write_sums(tmp_path)
    write(tmp_path, [SAID | {"margin": "0.02"}])
    with pytest.raises(Damaged, match="data/mine/statements.csv: expected"): tool.main(["--check"])
    assert tool.main([]) == 0 and (tmp_path / "SHA256SUMS").read_text() == _sums(tmp_path)
    for name in (FFN, FILE):                                          # rows, and the register itself
        if name == FFN: measure(tmp_path, FFN), write_sums(tmp_path)
        path = tmp_path / (FILE if name == FILE else f"results/rows/ablation/{FFN}.parquet")
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        write(tmp_path, [SAID | {"margin": "0.03"}])
        with pytest.raises(Damaged, match=path.name): tool.main([])
        path.write_bytes(good)

def test_a_kill_while_a_line_is_registered_leaves_the_register_as_it_was(tool, tmp_path, monkeypatch):
    registered(tool, tmp_path)
    write_sums(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    write(tmp_path, [SAID | {"margin": "0.02"}])
    def killed(*args): raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(store.os, "replace", lambda a, b, real=os.replace: (killed if FILE in str(b) else real)(a, b))
        with pytest.raises(KeyboardInterrupt): tool.main([])
    assert (tmp_path / FILE).read_bytes() == before and not list(tmp_path.rglob("*.part"))
    assert tool.main([]) == 0 and (tmp_path / FILE).read_bytes().startswith(before)
    assert (tmp_path / "SHA256SUMS").read_text() == _sums(tmp_path)

def test_rows_of_other_seeds_or_another_edit_are_not_its_rows(tool, tmp_path):
    for name in (FFN, MOE): measure(tmp_path, name, seeds=(9,)), measure(tmp_path, name + "+frozen")
    write(tmp_path, [SAID, SAID | {"key": "words", "versus": "edit=zero value=.5"}])
    commit(tmp_path, 1)
    for name in (FFN, MOE): measure(tmp_path, name)
    commit(tmp_path, 2)
    tool.main([])
    assert {a for _, a in found(tmp_path).values()} == {"nothing run"}

def test_a_new_line_that_could_decide_nothing_is_refused_and_nothing_is_written(tool, tmp_path):
    "Four seeds cannot bring sign flips below 1/8: registered all the same, such a line would read like a result."
    write(tmp_path, bridge=[BRIDGE | {"seeds": "1-4"}])
    commit(tmp_path, 1)
    with pytest.raises(SystemExit, match="contrast.a .audited. cannot reject: got n = 4.*fix: 6 seeds"): tool.main([])
    assert not (tmp_path / FILE).exists()
    write(tmp_path)
    assert tool.main([]) == 0
    write(tmp_path, bridge=[BRIDGE | {"seeds": "1-5"}])               # an amendment is written down, and listed
    assert tool.main([]) == 0 and len(lines_of(tmp_path)) == 2

def test_all_that_definitions_break_is_said_before_any_work_and_no_sum_changes(tool, tmp_path, monkeypatch):
    registered(tool, tmp_path, [SAID | {"protocol": p} for p in ("paper", "audited")])
    write_sums(tmp_path)
    before = (tmp_path / "SHA256SUMS").read_bytes(), (tmp_path / FILE).read_bytes()
    for name in ("statements.csv", "claims.csv"):
        shutil.copy(ROOT / "data/sparsity_moves" / name, tmp_path / "data/mine" / name)
    path = tmp_path / "data/mine/statements.csv"
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    table.loc[0, ["expects", "n"]], table.loc[2, "page"] = ["++", "77"], "nowhere.ipynb"
    table.to_csv(path, index=False)
    monkeypatch.setattr(tool, "check_tables", tool.check_tables.__defaults__[0])
    with pytest.raises(SystemExit) as e: tool.main([])
    lines = str(e.value).splitlines()
    assert len(lines) >= 4 and all("fix: " in line for line in lines[1:]) and lines[0] == "Nothing registered."
    for word in ("expects of", "seeds such as", "a page under"):
        assert [x for x in lines if f"expected {word}" in x and "other values at" in x], lines
    write(tmp_path, [SAID | {"margin": "0.02"}])                                # and what is only found later
    monkeypatch.setattr(tool, "check_tables", lambda: None)
    monkeypatch.setattr(tool, "new_lines", lambda now: sys.exit("a later refusal"))
    with pytest.raises(SystemExit, match="a later refusal"): tool.main([])
    assert ((tmp_path / "SHA256SUMS").read_bytes(), (tmp_path / FILE).read_bytes()) == before

def test_a_pilot_that_somebody_saw_is_said_and_a_sentence_that_changes_is_an_amendment(tool, tmp_path):
    write(tmp_path, [SAID | {"protocol": p} for p in ("paper", "audited")])
    (tmp_path / "data/mine/pilots.csv").write_text("begins,seeds,seen,where\ncontrast.a 9,,one seed,a note\n")
    commit(tmp_path, 1)
    tool.main([])
    words = registrations(tmp_path / FILE).set_index(["table", "key", "protocol"])["access"]
    assert words["sentences", "4.1-01", "paper"] == words["statements", "4.1-01", "paper"] == "nothing run"
    write(tmp_path, [SAID | {"protocol": p, "statement": "A little more is left."} for p in ("paper", "audited")])
    assert unregistered_lines(tmp_path / FILE, tmp_path / "data")["table"].tolist() == ["sentences"]
    tool.main([])
    assert registrations(tmp_path / FILE).query("table == 'sentences'")["amended"].tolist() == [1]

def test_what_pilots_had_seen_is_read_over_older_words(tmp_path):
    assert set(registered_on("claims").query("key.str.startswith('contrast.absorption.')")["access"]) <= {
        "pilot seen", "in part", "results seen"}
    dates = registered_on("claims")
    assert (dates.loc[dates.index.get_level_values(0).str.startswith("contrast.moe"), "access"] == "nothing run").any()

def test_a_contrast_beside_a_study_gets_its_lines_once_and_what_stands_there_is_never_written_over(tool, tmp_path,
    monkeypatch):
    study = Study("fresh", "", {"small": Preset("", {a: range(1, 9) for a in ("wide", "narrow")})}, None, None)
    def plan(margin=.05, seeds=range(1, 9)):
        c = planned.Contrast("wide-narrow", "wide", "narrow", "digits", seeds, margin, .1, "More is right.", "tutorial.ipynb")
        monkeypatch.setattr(planned, "_planned_lines", lambda: {"fresh": c.lines(study)})
    (tmp_path / "data").mkdir(), (tmp_path / "a").touch(), commit(tmp_path, 1), plan(seeds=range(1, 5))
    with pytest.raises(SystemExit, match="cannot reject: got n = 4"): tool.main([])
    assert not any((tmp_path / "data").iterdir())                                            # nothing is half-made
    plan()
    assert tool.main([]) == 0
    files = [tmp_path / FILE, *(tmp_path / "data/fresh" / f"{t}.csv" for t in REGISTERED_TABLES)]
    before = [p.read_bytes() for p in files]
    assert {"contrast.fresh.wide-narrow", "000-fresh-wide-narrow"} <= {*registrations(files[0])["key"]}
    assert tool.main([]) == 0 and tool.main(["--check"]) == 0 and [p.read_bytes() for p in files] == before
    plan(margin=.1)
    with pytest.raises(SystemExit, match="margin '0.05'; got '0.1' in the notebook; fix: put the notebook back"): tool.main([])
    assert [p.read_bytes() for p in files] == before

@pytest.mark.parametrize("more", [dict(power=()), dict(power="ab"), dict(power=("wide", "wide")), dict(power=("narrow", "wide")),
                                  dict(power=("a", "b", "c")), dict(power=("a", "b", "a")),
                                  dict(power=("a", "b"), expects="+"), dict(power=("a", "b"), says="")])
def test_a_tie_needs_two_other_arms_between_which_something_can_be_won(more):
    def plan(**how):
        return planned.Contrast("wide-narrow", "wide", "narrow", "digits", range(8), .05, **dict(says="No difference.", expects="0") | how)
    assert plan(power=("wide", "none")).power == ("wide", "none")
    with pytest.raises(ValueError, match="power of wide-narrow: expected of a sentence that expects 0"): plan(**more)
