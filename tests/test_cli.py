"""The command line is a frame: subcommands lie in the rooms that they serve, and print what others can read."""
import ast
import io
import json
import shlex
import subprocess
import sys
import time
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

import moe_redistribution
from moe_redistribution.evidence.table_files import ROOT
from moe_redistribution.instruments.rows import table_file, write_frame
from moe_redistribution.models.population import Transformer, init
from moe_redistribution.record.cli import main, parser
from moe_redistribution.record.coverage import printed_rows
from moe_redistribution.tasks import kinds
from moe_redistribution.tasks.commands import COMMANDS, command
from moe_redistribution.training import executors
from test_kinds import MINE, OWN

SUBS = parser()._actions[1].choices


@pytest.mark.parametrize("name", SUBS)
def test_each_subcommand_has_a_description_and_an_example_that_its_parser_takes(name):
    said = SUBS[name].format_help()
    assert f"example: moe-redistribution {name}" in " ".join(said.split()) and SUBS[name].description.endswith(".")
    words = shlex.split(COMMANDS[name].example)
    assert words[0] == name and parser().parse_args(words).command == name


@pytest.mark.parametrize("name, words", [("train", ("selected", "paired", "crossed")),
                                         ("measure", ("paired", "crossed"))])
def test_the_words_that_stand_in_names_of_runs_are_explained_where_they_are_asked_for(name, words):
    said = " ".join(SUBS[name].format_help().split()).lower()
    assert all(f"{w}: " in said for w in words)


def test_a_subcommand_lies_in_the_room_that_it_serves_and_the_frame_asks_for_none_by_name():
    rooms = {n: c.run.__module__.removeprefix("moe_redistribution.") for n, c in COMMANDS.items()}
    assert rooms["measure"] == "instruments.measuring" and rooms["ledger"] == rooms["rows"] == "record.coverage"
    assert rooms["kinds"] == "tasks.commands" and rooms["train"] == rooms["study"] == "record.work"
    text = (ROOT / "moe_redistribution/record/cli.py").read_text(encoding="utf-8")
    functions = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    said = ast.unparse(functions["parser"]) + ast.unparse(functions["run"]) + ast.unparse(functions["main"])
    assert not [n for n in COMMANDS if f"'{n}'" in said]


def test_a_room_of_ones_own_adds_a_subcommand():
    @command("hello", "says hello", "hello")
    def run_hello(args): print("hello")
    try: assert main(["hello"]) == 0 and "hello" in parser().format_help()
    finally: COMMANDS.put("hello", None, None)


@pytest.mark.parametrize("words", [["-m", "moe_redistribution", "--version"],
                                   ["-c", "from moe_redistribution.record.entry import enter; enter()", "--version"]])
def test_the_package_is_a_program_and_knows_its_version(words):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.stdout.strip() == f"moe-redistribution {moe_redistribution.__version__}", done.stderr


TABLES = [["conditions", "--item", "tab1"], ["ledger", "--item", "tab7"], ["kinds"], ["rows", "tab1"],
          ["study", "--list"]]


@pytest.mark.parametrize("words", TABLES, ids=" ".join)
def test_what_prints_a_table_prints_it_as_json_and_csv_with_the_same_records(words, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_REDISTRIBUTION_HOME", str(tmp_path))
    assert main([*words, "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert main([*words, "--csv"]) == 0
    table = pd.read_csv(io.StringIO(capsys.readouterr().out), keep_default_na=False)
    assert len(table) == len(records) > 0 and list(table) == list(records[0])
    assert main(words) == 0 and len(capsys.readouterr().out.splitlines()) >= len(records)


def test_a_printed_number_says_what_it_is_read_from_who_tells_of_it_and_where_its_rows_are(capsys):
    assert main(["rows", "tab7.006"]) == 0
    said = capsys.readouterr().out
    one, = printed_rows("tab7.006").itertuples()
    assert one.condition in said and one.metric in said and "results/paper/tab7.csv" in said and one.page
    for item in ("tab7", "fig9"):
        found = printed_rows(item)
        assert len(found) > 1 and found["condition"].ne("").any()
        for files in found["files"]: assert all((ROOT / f).exists() for f in files.split()), files
        for page in " ".join(found["page"]).split(): assert (ROOT / "nbs" / page).exists(), page


def test_a_number_that_is_not_printed_is_refused_with_the_nearest(capsys):
    assert main(["rows", "tab77"]) == 2
    assert "nearest" in (said := capsys.readouterr().err) and said.count("\n") == 1


# --------------------------------------------------------------------------------------------------- files of one's own

@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_REDISTRIBUTION_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (path := tmp_path / "mine.py").write_text(MINE)
    yield str(path)
    kinds._forget(str(path)), kinds.FILES.pop(str(path), None)


def test_what_a_file_registers_is_trained_by_workers_and_measured_from_the_command_line(mine, tmp_path, capsys):
    ask = [OWN[0], OWN[1], "--import", mine, "--seeds", "1,2"]
    assert main(["train", *ask, "--until", "full", "--executor", "local:2"]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == "Now: Nothing is missing."
    assert f"{OWN[1]} takes the plain way" in said.err and f"{OWN[0]} takes" not in said.err
    for i in ("norms", "ablation"):
        assert main(["measure", *ask, "--instrument", i, "--out", str(tmp_path / f"{i}.csv")]) == 0
        assert set(pd.read_csv(tmp_path / f"{i}.csv")["condition"]) == set(OWN[:2])
    assert main(["measure", *ask, "--instrument", "scores"]) == 2
    assert "scores of bits/moe-e4k2-h16-silu+biased: expected the usual routing rules" in (
        capsys.readouterr().err)


def test_kinds_lists_what_a_file_registers_and_a_study_needs_no_name(mine, capsys, tmp_path):
    assert main(["kinds", "router", "--import", mine, "--csv"]) == 0
    assert "router,biased," in (said := capsys.readouterr().out) and said.count("mine.py") == 2
    assert main(["study", "--import", mine, "--executor", "local:1", "--out", str(tmp_path / "rows.csv")]) == 0
    assert pd.read_csv(tmp_path / "rows.csv")["value"].tolist() == [3, 3]


def test_without_its_file_a_name_is_unknown_in_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_REDISTRIBUTION_HOME", str(tmp_path / "home"))
    assert main(["train", OWN[0]]) == 2
    assert "task: expected one of" in (said := capsys.readouterr().err) and said.count("\n") == 1


# ------------------------------------------------------------------------------------------------------------- progress

def bars(said, monkeypatch, tmp_path, minutes, done, quiet=None):
    "What is said off a terminal after so many minutes, of one group of two seeds."
    clock = [0.]
    monkeypatch.setattr(executors, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    work = SimpleNamespace(seeds=(1, 2), seconds=100., each=1000, condition="add7/ffn-h8-silu")
    (path := tmp_path / "a.json").write_text("{}")
    tell = SimpleNamespace(work=work, path=path, read=lambda: dict(done=done, ended=0, losses=[.5]))
    own = executors.Bars([tell], quiet, say=said.append)
    for m in range(1, 60 * minutes + 1, 20):
        clock[0] = float(m)
        own.show()
    own.close()


def test_off_a_terminal_a_line_a_minute_says_how_far_it_is(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    bars(said, monkeypatch, tmp_path, 5, 500)
    assert 4 <= len(said) <= 5 and said[0].startswith("25% after 1 min, 0/2 runs, loss 0.500")
    assert "about 4 min left" in said[0] or "about 3 min left" in said[0]


def test_it_says_no_time_that_nobody_knows_and_is_silent_when_told_to_be(tmp_path, monkeypatch):
    said, none = [], []
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    bars(said, monkeypatch, tmp_path, 2, 2000)
    bars(none, monkeypatch, tmp_path, 3, 500, quiet=True)
    assert "the rest takes longer than expected" in said[0] and not none


# --------------------------------------------------------------------------------------------------------- ways out

@pytest.mark.parametrize("suffix", ["parquet", "csv", "json"])
def test_rows_go_out_in_the_form_that_their_file_is_called_by(suffix, tmp_path):
    frame, path = pd.DataFrame({"condition": ["a", "b"], "value": [.5, 1.]}), tmp_path / f"rows.{suffix}"
    write_frame(frame, table_file(path))
    assert getattr(pd, f"read_{suffix}")(path).equals(frame)
    with pytest.raises(ValueError, match="got .*rows.txt"): table_file(tmp_path / "rows.txt")


def test_a_model_as_a_module_says_what_it_is():
    name = "add7/moe-e4k1-h16-silu+norm"
    said = repr(Transformer(init(name, [torch.Generator().manual_seed(1)]), name))
    for words in (f"{name}, ", " parameters", "attn: W_Q (1, 4, 64, 16)", "router: W_router (1, 64, 4)",
                  "experts: W_up (1, 4, 64, 4)", "norm: w_ln1 (1, 64)"): assert words in said
