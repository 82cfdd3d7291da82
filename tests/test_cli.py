"""The command line is a frame: subcommands lie in the rooms that they serve, and print what others can read."""
import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pandas as pd
import pytest

import moe_redistribution
from moe_redistribution.evidence.table_files import ROOT
from moe_redistribution.opened.families import tiny_model
from moe_redistribution.opened.opened import open_model
from moe_redistribution.evidence.selection import recorded_rows
from moe_redistribution.models.condition import condition
from moe_redistribution.record import cli, work
from moe_redistribution.record.cli import main, parser
from moe_redistribution.record.coverage import printed_rows
from moe_redistribution.record.work import _read_trainings, _with_steps
from moe_redistribution.basics import commands
from moe_redistribution.basics.commands import COMMANDS, command
from moe_redistribution.tasks.data import STREAMS
from moe_redistribution.training import executors
from moe_redistribution.training.groups import train
from moe_redistribution.training.loop import UNTIL
from moe_redistribution.training.store import Store
from moe_redistribution.training.study import known_studies
from fresh import python
from test_kinds import MINE, OWN
from tiers import first

SUBS = parser()._actions[1].choices

@pytest.mark.parametrize("name", SUBS)
def test_each_subcommand_has_a_description_and_an_example_that_its_parser_takes(name):
    said = SUBS[name].format_help()
    assert f"example: moe-redistribution {name}" in " ".join(said.split()) and SUBS[name].description.endswith(".")
    words = shlex.split(COMMANDS[name].example)
    assert words[0] == name and parser().parse_args(words).command == name

VALUED = [(name, a) for name, p in SUBS.items() for a in p._actions if a.option_strings and a.nargs != 0]

def refused(words):
    "What is said of a command line that nobody can read."
    with pytest.raises(ValueError) as e: cli._read_arguments(words)
    return str(e.value)

def test_an_option_given_twice_or_two_dashes_for_a_value_are_refused_in_one_message_by_every_command(capsys):
    once = [(name, a) for name, a in VALUED if type(a).__name__ == "_StoreAction"]
    assert len({name for name, _ in once}) > 10
    for name, a in once:
        word, flag = next(iter(a.choices)) if a.choices else "1", a.option_strings[0]
        assert refused([name, flag, word, flag, word]).startswith(f"{flag}: expected to be given once; got"), name
    for name, a in VALUED:
        said = refused([name, f"{a.option_strings[0]}=--"])
        assert said.startswith(f"{a.option_strings[0]}: expected a value; got --"), name
    assert main(["train", "add7/ffn-h8-silu", "--seeds", "1", "--seeds=2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1

WORDS = {"--until": UNTIL, "--stream": STREAMS}

def test_the_words_of_an_option_are_explained_wherever_it_is_one():
    asked = [(name, flag) for name, p in SUBS.items() for flag in WORDS if flag in p._option_string_actions]
    assert {("train", "--until"), ("train", "--stream"), ("measure", "--stream")} <= {*asked}
    for name, flag in asked:
        said = " ".join(SUBS[name].format_help().split()).lower()
        assert all(f"{w}: " in said for w in WORDS[flag]), name

def test_a_room_of_ones_own_adds_a_subcommand():
    @command("hello", "says hello", "hello")
    def run_hello(args): print("hello")
    try: assert main(["hello"]) == 0 and "hello" in parser().format_help()
    finally: COMMANDS.put("hello", None, None)

OWN_COMMAND = """
from moe_redistribution.basics.commands import command
def add(p): p.add_argument("--context"), p.add_argument("--device", default="mine")
@command("mine", "does what is mine", "mine --context 3", add=add)
def run_mine(args): print("mine", args.context, args.device)
"""

@pytest.mark.parametrize("words, said", [
    (["mine", "--import", "{file}"], "mine None mine"), (["mine", "--import", "{file}", "--context", "x"], "mine x"),
    (["--import", "{file}", "mine", "--context", "train"], "mine train"),
    (["--import", "{file}", "--help"], "does what is mine"),
    (["--help", "--import", "{file}"], "does what is mine"), (["mine", "--help", "--import", "{file}"], "--context"),
    (["kinds", "command", "--import", "{file}"], "does what is mine")])
def test_a_command_of_a_users_file_runs_and_is_in_the_help(words, said, tmp_path, capsys):
    "The parser was made before the file was imported, and knew no such command."
    (file := tmp_path / "mine.py").write_text(OWN_COMMAND)
    try:
        with contextlib.suppress(SystemExit): assert main([w.replace("{file}", str(file)) for w in words]) == 0
    finally: COMMANDS.put("mine", None, None)
    assert said in capsys.readouterr().out

@pytest.mark.parametrize("text, says", [
    (OWN_COMMAND.replace("--context", "--import"), "beside --help and --import; got argument --import: conflicting"),
    (OWN_COMMAND.replace('"mine --context 3", ', ""), "missing 1 required positional argument: 'example'"),
    ("import sys; sys.exit(0)", "got SystemExit: 0"), ("import sys; sys.exit(3)", "got SystemExit: 3"),
    ("raise GeneratorExit", "got GeneratorExit"), ("class Mine(BaseException): pass\nraise Mine", "got Mine")])
def test_a_users_file_that_leaves_or_takes_what_is_not_its_own_is_refused_in_one_line(text, says, tmp_path, capsys):
    "`sys.exit(0)` where it is imported ended the command with 0 and nothing done."
    (tmp_path / "own.py").write_text(text)
    assert main(["kinds", "--import", str(tmp_path / "own.py")]) == 2
    err = capsys.readouterr().err
    assert says in err and err.startswith("moe-redistribution: import own.py: ") and err.count("\n") == 1

ENTRY = "from moe_redistribution.record.entry import enter; enter()"                      # what the console script does

@pytest.mark.parametrize("words", first(["-m moe_redistribution"], ["-m moe_redistribution", f"-c '{ENTRY}'"]))
def test_the_package_is_a_program_and_knows_its_version(words):
    done = python(*shlex.split(words), "--version")
    assert done.stdout.strip() == f"moe-redistribution {moe_redistribution.__version__}", done.stderr

TABLES = [["conditions", "--item", "tab1"], ["ledger", "--item", "sec5"], ["kinds"], ["rows", "tab1"],
          ["study", "--list"]]

@pytest.mark.parametrize("words", TABLES, ids=" ".join)
def test_what_prints_a_table_prints_it_as_json_and_csv_with_the_same_records(words, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_REDISTRIBUTION_HOME", str(tmp_path))
    few = {n: s for n, s in known_studies().items() if n in ("granularity", "parrots")}             # all take seconds
    monkeypatch.setattr(work, "STUDIES", SimpleNamespace(every=lambda: few))
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
        for page in " ".join(found["page"]).split(): assert (ROOT / "nbs" / page).exists(), page

LOOPS = ["v1/add7/ffn-h8-silu+d16+steps200", "v1/add7", "v1", "progress", "."]

@pytest.mark.parametrize("place", LOOPS)
def test_a_link_to_itself_in_the_store_is_one_message_with_a_fix(place, tmp_path, capsys, home):
    (loop := tmp_path / "home" / place).parent.mkdir(parents=True, exist_ok=True)
    loop.symlink_to(loop.name)
    words = ["train", "add7/ffn-h8-silu+d16", "--steps", "200", "--seeds", "1", "--until", "full", "--executor", "here"]
    assert main(words) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"/home.*: expected a .* folder.*; got (File exists|Too many levels.*); fix: \w", err), err

def test_a_runs_file_that_is_a_link_to_itself_is_trained_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MOE_REDISTRIBUTION_HOME", str(tmp_path))
    path = Store(tmp_path).path("add7/ffn-h8-silu+d16+steps200", 1)
    path.parent.mkdir(parents=True), path.symlink_to(path.name)
    words = ["train", "add7/ffn-h8-silu+d16", "--steps", "200", "--seeds", "1", "--until", "full", "--executor", "here"]
    assert main(words) == 0 and path.is_file() and not path.is_symlink()

# ----------------------------------------------------------------------------------------------------------- completion

@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    "What bash offers for a line that is being written, as a set; by the script, without Python."
    if not (bash := shutil.which("bash")): pytest.skip("no bash")
    (script := tmp_path_factory.mktemp("shell") / "script").write_text(cli._completion("bash"))
    def offered(line):
        words = line.split(" ")
        ask = (f"source {script}; COMP_WORDS=({' '.join(w or chr(39) * 2 for w in words)}); "
               f"COMP_CWORD={len(words) - 1}; "
               "_moe_redistribution; echo ${COMPREPLY[@]}; complete -p moe-redistribution")
        done = subprocess.run([bash, "-c", ask], capture_output=True, text=True, env={})
        said, _, bound = done.stdout.partition("\n")
        assert not done.stderr and bound == "complete -o default -F _moe_redistribution moe-redistribution\n"
        return {*said.split()}
    return offered

def test_bash_completes_commands_their_options_and_what_an_option_may_be(shell):
    assert shell("moe-redistribution tr") == {"train"} and shell("moe-redistribution c") == {
        "check", "compare", "conditions", "completion"}
    assert shell("moe-redistribution ") == {*SUBS, "--help", "--version"}
    for name, p in SUBS.items():
        assert {f for f in p._option_string_actions if f[:2] == "--"} <= shell(f"moe-redistribution {name} --"), name
    assert shell("moe-redistribution train a/b --st") == {"--stream", "--steps"}
    assert shell("moe-redistribution train --stream pa") == {"paired"}
    assert "router" in shell("moe-redistribution kinds ")
    # where a file is asked for, bash is left to offer files
    assert shell("moe-redistribution kinds --import ") == shell("moe-redistribution loads --text ") == set()

def test_the_script_for_zsh_is_that_for_bash_in_its_own_frame(capsys):
    assert main(["completion", "zsh"]) == 0
    said = capsys.readouterr().out
    assert said.endswith(cli._completion("bash") + "\n") and "bashcompinit" in said.splitlines()[0]

# ------------------------------------------------------------------------------------------------- steps, measured

SMALL = "add7/ffn-h64-silu"

def test_steps_are_the_option_of_the_name_and_nothing_else(home, capsys):
    name, own = "add7/ffn-h8-silu+d16", "add7/ffn-h8-silu+d16+steps200"
    assert main(["train", name, "--steps", "200", "--seeds", "1", "--until", "full", "--executor", "here"]) == 0
    assert f"--steps 200: {own}" in capsys.readouterr().err
    assert (run := Store().load(own, 1)).step == 200 and run.condition.key != condition(name).key
    assert main(["train", own, "--seeds", "1", "--until", "full", "--dry-run"]) == 0
    assert "Nothing is missing" in capsys.readouterr().out
    ask = ["measure", name, "--steps", "200", "--seeds", "1", "--instrument", "attribution", "--out", "a.csv"]
    assert main(ask) == 0 and set(pd.read_csv("a.csv")["condition"]) == {own}

def test_steps_lengthen_what_an_item_asks_for_condition_by_condition(home):
    asked = [parser().parse_args(["train", "--item", "tab1", *more]) for more in ([], ["--steps", "20000"])]
    usual, longer = map(_read_trainings, asked)
    assert [t.condition for t in longer] == [_with_steps(t.condition, 20_000) for t in usual] and len(longer) > 3
    assert {t.steps for t in longer} == {20_000} and [t.seeds for t in longer] == [t.seeds for t in usual]
    assert not {t.key for t in longer} & {t.key for t in usual}

@pytest.mark.parametrize("command", ["train", "measure"])
@pytest.mark.parametrize("name, steps, says", [
    (f"{SMALL}@400:fresh", "400", "events between step 0 and the end of the schedule"), (SMALL, "0", "from 1 on")])
def test_steps_that_cannot_be_are_refused_in_one_line(command, name, steps, says, home, capsys):
    assert main([command, name, "--steps", steps]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1 and not home.exists()

RECORDED = ["measure", SMALL, "--instrument", "attribution", "--seeds", "42,137", "--out", "rows.csv"]

def test_what_is_recorded_is_shown_where_one_has_no_run_and_nothing_is_trained(home, capsys):
    assert main(RECORDED) == 0
    said = capsys.readouterr()
    assert f"{SMALL}: no stored run of yours; recorded, commit data: results/rows/attribution/add7.parquet" in said.err
    got = pd.read_csv("rows.csv")
    there = recorded_rows(SMALL, "attribution", stream="authors").query("seed in (42, 137)")
    assert said.out == f"{len(there):,} rows in rows.csv\n" and len(got) == len(there) > 100
    assert sorted(got["value"].dropna()) == pytest.approx(sorted(there["value"].dropna()))
    assert not list(home.rglob("*.safetensors"))

def test_the_examples_of_train_and_measure_hold_on_an_empty_store(home, capsys):
    for name, says in (("measure", "rows in out/rows.parquet"), ("train", "Missing: up to 32 runs")):
        assert main(shlex.split(COMMANDS[name].example)) == 0 and says in capsys.readouterr().out

def test_ones_own_runs_come_before_recorded_ones_and_both_are_named(home, capsys):
    train(SMALL, [42], steps=200, executor="here", quiet=True)
    assert main(RECORDED) == 0
    said = capsys.readouterr().err
    assert f"{SMALL}: your own runs are measured; what is recorded of it stays in results/rows/attribution" in said
    assert "no stored run of seeds 137" in said
    got = pd.read_csv("rows.csv")
    assert {*got["seed"]} == {42} and {*got["step"]} == {200}

def test_what_nobody_has_is_refused_with_the_seeds_that_are_recorded(home, capsys):
    assert main([*RECORDED[:5], "7", "--out", "rows.csv"]) == 2
    said = capsys.readouterr().err
    assert f"none of seeds 7; fix: moe-redistribution train {SMALL}, or --seeds 42," in said

# --------------------------------------------------------------------------------------------------- files of one's own

@pytest.fixture
def mine(own_file, home):
    own_file.write_text(MINE)
    return str(own_file)

@pytest.mark.parametrize("executor", first(["here"], ["here", "local:2"]))
def test_what_a_file_registers_is_trained_and_measured_from_the_command_line(executor, mine, tmp_path, capsys):
    ask, own = [OWN[0], OWN[1], "--import", mine, "--seeds", "1,2", "--steps", "50"], [f"{n}+steps50" for n in OWN[:2]]
    assert main(["train", *ask, "--until", "full", "--executor", executor]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == "Now: Nothing is missing."
    assert f"{own[1]} takes the plain way" in said.err and f"{own[0]} takes" not in said.err
    for i in ("norms", "ablation"):
        assert main(["measure", *ask, "--instrument", i, "--out", str(tmp_path / f"{i}.csv")]) == 0
        assert set(pd.read_csv(tmp_path / f"{i}.csv")["condition"]) == set(own)
    assert main(["measure", *ask, "--instrument", "scores"]) == 2
    assert f"scores of {own[1]}: expected the usual routing rules" in capsys.readouterr().err

def test_kinds_lists_what_a_file_registers_and_a_study_needs_no_name(mine, capsys, tmp_path):
    assert main(["kinds", "router", "--import", mine, "--csv"]) == 0
    assert "router,cosine," in (said := capsys.readouterr().out) and said.count("mine.py") == 2
    assert main(["study", "--import", mine, "--executor", "here", "--out", str(tmp_path / "rows.csv")]) == 0
    assert pd.read_csv(tmp_path / "rows.csv")["value"].tolist() == [3, 3]

def test_every_command_takes_files_of_ones_own(mine, capsys):
    assert all("--import" in p._option_string_actions for p in SUBS.values())
    assert main(["conditions", "--item", "tab1", "--import", mine, "--csv"]) == 0
    assert main(["bench", "--instruments", "--task", "histogram", "--import", mine + "x"]) == 2
    assert "mine.pyx" in (said := capsys.readouterr().err) and said.count("\n") == 1

def test_without_its_file_a_name_is_unknown_in_one_line(capsys, home):
    assert main(["train", OWN[0]]) == 2
    assert "task: expected one of" in (said := capsys.readouterr().err) and said.count("\n") == 1

# ---------------------------------------------------------------------------------------------------------- real models

REAL = [n for n, p in SUBS.items() if "--model" in p._option_string_actions]
MORE = {"compare": ["--with", "{model}"], "gates": ["--steps", "1", "--k", "2"], "ablate": ["--unit", "L0.E1"],
        "audit": ["--unit", "L0.E1", "--sets", "1"], "specialise": ["--text", "config={model}/config.json"],
        "removal": ["--draws", "1"]}

@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    tiny_model("mixtral", vocab_size=256).save_pretrained(folder / "toy")
    (folder / "text.txt").write_text("how many letters has a word? " * 40)
    of = "--bytes --context 16 --batch 4 --tokens 200".split()
    return [str(folder / "toy"), "--text", str(folder / "text.txt"), *of]

@pytest.mark.parametrize("name", first(["gates", "loads"], REAL))
def test_every_command_for_a_real_model_says_first_how_far_it_opens(name, model, home, capsys):
    ask = [name, "--model", *model, *(w.format(model=model[0]) for w in MORE.get(name, ()))]
    form = ["--json"] * ("--json" in SUBS[name]._option_string_actions)
    assert main([*ask, *form]) == 0
    said = capsys.readouterr()
    first, headline = said.err.partition("\n")[0], open_model(model[0]).report().headline
    assert first == headline and "toy (MixtralForCausalLM): 2 layers, 2 with experts" in headline
    if form: assert len(json.loads(said.out)) > 0                           # nothing but records, whatever is said
    else: assert " rows in out/toy." in said.out and headline not in said.out

@pytest.mark.audit
def test_gates_of_a_model_that_does_not_open_are_trained_and_that_is_said(model, home, capsys, monkeypatch):
    def refused(*_, **__): raise ValueError("experts of another kind")
    monkeypatch.setattr(cli, "LanguageModel", refused)
    assert main(["gates", "--model", *model, *MORE["gates"]]) == 0
    assert capsys.readouterr().err.startswith("toy is not opened, and gates need its attention alone: experts of ano")

# ------------------------------------------------------------------------------------------------------------- progress

class Clock:
    "A clock that a test moves; whoever asks for the time is told by it."
    now = 0.
    def monotonic(self): return self.now
    time = staticmethod(time.time)

class Group:
    "A group whose seeds train `ends` steps, a step in so many seconds of so many seeds; played, not trained."
    def __init__(self, folder, name, ends, expected, whole, pace=lambda n: .2 + .1 * n):
        self.work = SimpleNamespace(seeds=tuple(range(len(ends))), each=expected, condition="add7/ffn-h8-silu",
                                    seconds=expected * len(ends) * .1)
        self.tell, self.whole, self.pace = executors.Progress(folder / f"{name}.json", self.work), whole, pace
        self.ends, self.step, self.at = ends, 0, 0.
    def interval(self, step): return 100 * self.pace(sum(end > step for end in self.ends))
    def left(self): return sum(map(self.interval, range(self.step, max(self.ends), 100)))
    def run(self, clock):
        "Trains an interval and tells; whether seeds are left."
        clock.now = self.at = self.at + self.interval(self.step)
        self.step += 100
        seeds = [s for s, end in enumerate(self.ends) if end > self.step]
        self.tell(SimpleNamespace(seeds=seeds, step=[self.step] * len(seeds), history=[[dict(loss=.5)]] * len(seeds)),
                  "", self.whole)
        return len(seeds)

def play(groups, clock, show, until, at_once=1):
    "Trains groups, so many at a time, each to its next interval in the order of the clock, `until` something holds."
    waiting, going = [*groups], []
    while (waiting or going) and not until():
        while waiting and len(going) < at_once:
            going.append(waiting.pop(0))
            going[-1].at = clock.now
        first = min(going, key=lambda g: g.at + g.interval(g.step))
        if not first.run(clock): going.remove(first)
        show()

@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for room in (executors, commands): monkeypatch.setattr(room, "time", clock)
    return clock

@pytest.fixture
def in_a_log(monkeypatch):
    "As in a pipe, outside of tests and CI."
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(commands, "progress_place", lambda: "log")
    monkeypatch.setattr(executors, "progress_place", lambda: "log")

def words_left(said):
    "Seconds in a line such as `… about 4 min left`."
    n, unit = re.search(r"(?:about|at most) ([\d.]+) (s|min|h) left$", said).groups()
    return float(n) * dict(s=1, min=60, h=3600)[unit]

def test_when_one_of_eight_seeds_is_left_the_time_left_is_its_own(clock, in_a_log, tmp_path):
    "Whoever divides by the mean speed of all says half of the truth here, or less."
    said, group = [], Group(tmp_path, "a", [700] * 7 + [8000], expected=8000, whole=8000)
    bars = executors._Bars([group.tell], say=said.append, at_once=1)
    play([group], clock, bars.show, lambda: group.step >= 1000)
    assert abs(words_left(said[-1]) / group.left() - 1) < .2 and "7/8 runs" in said[-1]
    share = bars.whole.n / bars.whole.total
    assert clock.now * (1 - share) / share < .5 * group.left()

def test_when_seven_of_eight_groups_have_ended_two_processes_do_not_halve_the_last(clock, in_a_log, tmp_path):
    groups = [Group(tmp_path, str(i), [n], expected=n, whole=4000) for i, n in enumerate([400] * 7 + [4000])]
    said = []
    bars = executors._Bars([g.tell for g in groups], say=said.append, at_once=2)
    play(groups, clock, bars.show, lambda: groups[-1].step >= 1000, at_once=2)
    assert abs(words_left(said[-1]) / groups[-1].left() - 1) < .2 and "7/8 runs" in said[-1]

@pytest.mark.parametrize("at_once", [1, 2])
def test_groups_that_wait_take_their_turn_at_the_speed_that_was_seen(at_once, clock, in_a_log, tmp_path):
    groups = [Group(tmp_path, str(i), [1000], 1000, 1000, pace=lambda n: .5) for i in range(4)]     # five times as slow
    said = []
    bars = executors._Bars([g.tell for g in groups], say=said.append, at_once=at_once)
    play(groups, clock, bars.show, lambda: groups[0].step >= 500, at_once)
    truth = {1: 250 + 3 * 500, 2: 250 + 500}[at_once]
    assert abs(words_left(said[-1]) / truth - 1) < .2, said[-1]

def test_a_seed_past_its_expected_end_is_said_to_be_and_when_its_schedule_ends(clock, in_a_log, tmp_path):
    said, group = [], Group(tmp_path, "a", [700, 3000], expected=700, whole=10_000)
    bars = executors._Bars([group.tell], say=said.append, at_once=1)
    play([group], clock, bars.show, lambda: group.step >= 1500)
    assert "longer than expected, at most" in said[-1]
    assert abs(words_left(said[-1]) / ((10_000 - 1500) * .3) - 1) < .2

def test_a_log_gets_a_line_a_minute_from_the_process_that_trains_too(clock, in_a_log, tmp_path):
    def said_of(steps):
        said, clock.now = [], 0.
        group = Group(tmp_path, str(steps), [steps, steps], expected=steps, whole=steps, pace=lambda n: .02)
        work = lambda tell: play([group], clock, lambda: None, lambda: False)
        executors.submit(work, [[(group.tell,)]], [group.tell], executor="here", say=said.append)
        return said
    assert not said_of(2000)                                                                              # 40 seconds
    long = said_of(20_000)
    assert 5 <= len(long) <= 7 and long[0].startswith("15% after 60 s, 0/2 runs, loss 0.500–0.500, about 6 min left")

@pytest.mark.parametrize("silent", [dict(CI="true"), dict(PYTEST_CURRENT_TEST="x")])
def test_tests_and_ci_are_told_nothing_and_a_terminal_all(silent, monkeypatch, clock, capsys):
    for name in ("CI", "PYTEST_CURRENT_TEST"): monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert commands.progress_place() == "log"
    with monkeypatch.context() as m:
        for name, value in silent.items(): m.setenv(name, value)
        assert commands.progress_place() == "nowhere"
        line = commands.Line()
        for clock.now in range(0, 600, 10): line("far")
        assert not sys.stderr.getvalue()
        sys.stderr.isatty = lambda: True
        assert commands.progress_place() == "terminal"
    line = commands.Line()
    for _ in range(3): line("far")
    line.close()
    assert sys.stderr.getvalue().count("\rfar") == 3 and sys.stderr.getvalue().endswith("\n")

def test_a_notebook_has_one_line_that_refreshes(monkeypatch, clock):
    "What a kernel's shell is known by; its display is played."
    shown = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(("update", data["text/plain"])))
    def display(data, raw, display_id): return shown.append(("display", data["text/plain"])) or handle
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1)))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    line = commands.Line()
    for i in range(3): line(f"{i} of 3")
    assert shown == [("display", "0 of 3"), ("update", "1 of 3"), ("update", "2 of 3")]

def test_a_new_study_with_a_name_that_is_taken_leaves_nothing_behind(capsys):
    def there(): return (ROOT / "_quarto.yml").read_bytes(), sorted((ROOT / "nbs/10_studies").iterdir())
    before = there()
    assert main(["new", "study", "routers"]) == 2 and "taken: nbs/10_studies/routers" in capsys.readouterr().err
    assert there() == before
