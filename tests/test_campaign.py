"""A campaign against wrong numbers: mistakes on the command line, and damaged, swapped and foreign files wherever one
is read. Counts are printed; silent answers, tracebacks and hangs are to be none."""
import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
import torch

from moe_redistribution.evidence import table_files, selection
from moe_redistribution.opened import gates_study, streaming
from moe_redistribution.opened.families import tiny_model
from moe_redistribution.instruments.rows import rows
from moe_redistribution.models.condition import RECIPES, condition
from moe_redistribution.record import check as check_room, new as new_room
from moe_redistribution.record import cli, coverage, models, recording, work
from moe_redistribution.studies.sparsity_moves import experiments
from moe_redistribution.record.entry import INTERRUPTED
from moe_redistribution.basics import kinds
from moe_redistribution.studies.language_models import zoo
from moe_redistribution.training import bench, groups, jobs
from moe_redistribution.training.groups import _group_path, pack, _train_group
from moe_redistribution.training.loop import init_members
from moe_redistribution.basics.files import Damaged, as_committed
from moe_redistribution.training.store import Store, seal, unseal
from moe_redistribution.training.jobs import run_job
from moe_redistribution.training.study import Desk, Preset, Study, find_rows, _own_file, study_jobs
from same import assert_same_runs
from tiers import first

TINY = "add7/ffn-h8-silu+d16"

@contextmanager
def at_most(seconds):
    "What takes longer hangs."
    def late(*_): raise TimeoutError(f"more than {seconds} s")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try: yield
    finally: signal.alarm(0), signal.signal(signal.SIGALRM, before)

# ------------------------------------------------------------------------------------------------------ command lines

SEEDS = ["", " ", "1-", "1,,2-", "x", "-1", "1.5", "1-4294967296", "4294967296", "1,1", "9-1", "1e3", "²"]
OUTS = ["", "rows.txt", "{file}/rows.csv", "{folder}", "{file}/a/b.parquet"]
TEXT = ["--model", "{model}", "--text", "{text}", "--bytes", "--context", "16"]
DENSE = ["--model", "{dense}", *TEXT[2:]]
GATES = ["--k", "2,4", "--steps", "2", "--tokens", "32"]
NUMBERS = {"--context": ["0", "-3", "1.5", "x", "", "99999"], "--batch": ["0", "-1", "x"], "--tokens": ["0", "-5", "x"],
           "--dtype": ["bogus", "", "int8"], "--device-map": ["cuda:9", "nowhere"], "--out": OUTS,
           "--model": ["", "{folder}", "{file}", "{broken}", "{empty}"],
           "--text": ["", "{folder}", "nothing.txt", "{model}"]}
LINES = {
    ("train", TINY): {"--seeds": SEEDS, "--stream": ["", "pair"], "--until": ["", "selectd"],
                      "--group-size": ["0", "-1", "x"], "--executor": ["", "locl", "local:0", "dask://x"],
                      "--device": ["", "tpu", "cuda:1"], "--budget": ["0", "-1", "nan", "inf", "x"],
                      "--item": ["", "tab99"]},
    ("train", ""): {None: [None]}, ("train", "add7/ffn-h8"): {None: [None]}, ("train", "../../x"): {None: [None]},
    ("measure", TINY): {"--seeds": [*SEEDS, "77"], "--stream": ["", "pair"], "--instrument": ["", "ablaton"],
                        "--out": OUTS},
    ("study", "granularity"): {"--seeds": SEEDS, "--preset": ["", "nigth"], "--arm": ["", "grid/9"],
                               "--executor": ["", "local:0"], "--device": ["", "tpu"], "--budget": ["nan", "-1"],
                               "--out": OUTS, "--import": ["", "nothing.py", "{file}", "{folder}"]},
    ("study", "granularty"): {None: [None]}, ("study",): {None: [None]},
    ("reproduce",): {"--seeds": SEEDS, "--out": ["", "{file}", "{file}/below"]},
    ("conditions",): {"--item": ["", "tab99"]}, ("ledger",): {"--item": ["", "tab99"]},
    ("bench",): {"--task": ["", "add8"], "--study": ["", "x"], "--seconds": ["0", "nan", "-1", "x"],
                 "--record": ["", "x.txt"]},
    ("record",): {"--executor": ["", "x"], "--replace": ["", "add7/ffn-h63-silu"]},
    ("scores", *TEXT): NUMBERS | {"--by": ["", "heads"]},
    ("ablate", *TEXT): NUMBERS | {"--unit": ["", "expert", "L9.E1"], "--edit": ["", "zeros", "swap:E99"]},
    ("gates", *TEXT, "--steps", "1", "--tokens", "32"): NUMBERS | {
        "--k": ["", "4,4", "0", "x", "999"], "--lr": ["inf", "nan", "0", "-1"], "--loss": ["", "mse"],
        "--unfreeze": ["", "99", "1,1"], "--steps": ["0", "-2"], "--d-gate": ["0"], "--budget": ["nan"]},
    ("nothing",): {None: [None]}}

def mistakes():
    for start, options in LINES.items():
        for option, values in options.items():
            yield from ([*start] if option is None else [*start, option, v] for v in values)
            if option not in (None, "--out", "--model", "--text"): yield [*start, option]         # the value forgotten

@pytest.fixture
def places(tmp_path): return laid_out(tmp_path)

def laid_out(tmp_path):
    "Files and folders that commands are pointed at, by name."
    (tmp_path / "file").write_text("x"), (tmp_path / "folder").mkdir(), (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("And there was light. " * 60)
    tiny_model("olmoe", vocab_size=256).save_pretrained(tmp_path / "model")
    tiny_model("llama", vocab_size=256).save_pretrained(tmp_path / "dense")
    shutil.copytree(tmp_path / "model", tmp_path / "broken")
    weights = next((tmp_path / "broken").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    return {n: str(tmp_path / n) for n in ("file", "folder", "empty", "text", "model", "dense", "broken")}

@pytest.mark.audit
def test_every_mistake_on_the_command_line_ends_in_one_message_before_any_work(places, tmp_path, monkeypatch, capsys):
    def began(*args, **kwargs): raise Began
    class Began(BaseException): pass
    for room, name in ((groups, "train_interval"), (jobs, "run_job"), (streaming, "tally"), (streaming, "text_loss")):
        monkeypatch.setattr(room, name, began)
    monkeypatch.setenv("MOE_REDISTRIBUTION_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(places["folder"])
    found, bad = Counter(), []
    for words in mistakes():
        words = [w.format(**places) if "{" in w else w for w in words]
        try:
            with at_most(60): status = cli.main(words)
        except SystemExit as e: status = f"usage {e.code}"
        except Began: status = "silent"
        except TimeoutError: status = "hang"
        err = capsys.readouterr().err
        lines = [x for x in err.splitlines() if x.startswith("moe-redistribution: ")]
        fine = status == "usage 2" or status == 2 and "Traceback" not in err and len(lines) == 1
        found["refused" if fine else f"{status}"] += 1
        if not fine: bad.append((status, " ".join(words), err.strip()[-300:]))
    print(f"\n{sum(found.values())} mistakes on the command line: {dict(found)}")
    assert not bad and sum(found.values()) >= 120, "\n".join(map(str, bad))

# What a command works with, and lines that stand for all kinds of mistakes at every change; `make audit` has the rest.
WORK = {"train": (groups, "train_interval"), "reproduce": (work, "train"), "measure": (work, "measure"),
        "record": (recording, "_record_runs"), "study": (jobs, "run_job"), "scores": (streaming, "tally"),
        "ablate": (streaming, "text_loss"), "gates": (jobs, "run_job"), "conditions": (experiments, "_items_of"),
        "ledger": (selection, "rows_behind"), "bench": (bench, "_worker_processes"),
        "kinds": (kinds, "registered_things"), "rows": (coverage, "_by_line"), "loads": (models, "text_loads"),
        "compare": (models, "compare_routes"), "audit": (models, "audit_forecast"),
        "specialise": (models, "specialise"), "removal": (models, "removal"),
        "completion": (cli, "_completion"), "check": (check_room, "_check_clone"),
        "new": (new_room, "replace_file"), "zoo": (zoo, "LanguageTrial")}
PROMISE = [
    ("train", TINY, "--seeds", ""), ("train", TINY, "--seeds", "1,1"), ("train", "add7/moe-e4k5-h256-silu"),
    ("train", TINY, "--budget", "nan"), ("reproduce", "--seeds", ""), ("reproduce", "--seeds", "1-4294967296"),
    ("reproduce", "--out", "{file}"), ("measure", TINY, "--seeds", ""), ("measure", TINY, "--out", "rows.txt"),
    ("measure", TINY, "--instrument", "ablaton"), ("measure", TINY), ("record", "--executor", ""),
    ("record", "--executor", "x"), ("record", "--replace", "add7/ffn-h63-silu"),
    ("study", "granularity", "--seeds", ""),
    ("study", "granularity", "--out", "{file}/rows.csv"), ("study", "granularity", "--arm", "grid/9"),
    ("scores", *TEXT, "--out", "{folder}"), ("scores", *TEXT, "--by", ""), ("scores", *TEXT, "--tokens", "0"),
    ("ablate", *TEXT, "--out", "rows.txt"), ("ablate", *TEXT, "--unit", "L0.routes"), ("ablate", *TEXT, "--unit", ""),
    ("ablate", *DENSE, "--unit", "experts"), ("gates", *TEXT, "--out", "{file}/a/b.csv"),
    ("gates", *TEXT, "--k", "999"), ("gates", *TEXT, "--k", ""), ("gates", *TEXT, "--tokens", "999999"),
    ("conditions", "--item", ""), ("conditions", "--item", "tab99"), ("ledger", "--item", ""),
    ("ledger", "--item", "tab99"), ("bench", "--task", ""), ("bench", "--task", "add8"), ("bench", "--study", "x"),
    ("bench", "--record", "{folder}"), ("bench", "--seconds", "0"), ("kinds", "--import", "{file}"),
    ("rows", "tab99"), ("rows", ""), ("train", TINY, "--import", "{folder}"), ("measure", TINY, "--import", "{text}"),
    ("study", "granularity", "--import", "nothing.py"), ("loads", *TEXT, "--out", "rows.txt"),
    ("compare", *TEXT, "--with", "{model}", "--out", "rows.txt"), ("audit", *TEXT, "--out", "rows.txt"),
    ("specialise", *TEXT), ("specialise", *TEXT, "--text", "other={model}/config.json", "--out", "rows.txt"),
    ("audit", *TEXT, "--unit", "L9.E1"), ("removal", *TEXT, "--by", "reep"),
    ("removal", *TEXT, "--out", "rows.txt"), ("zoo", "--out", "{file}/a"), ("zoo", "--seeds", ""), ("zoo", "--arm", "mixtur"),
    ("check", "--layer", "byte"), ("completion", "bash", "--import", "{file}"),
    ("new", "study", "1x"), ("new", "study", "routers"),
    ("train", TINY, "--steps", "150"), ("measure", TINY, "--steps", "150")]

@pytest.fixture(scope="module")
def shared(tmp_path_factory): return laid_out(tmp_path_factory.mktemp("places"))

@pytest.mark.parametrize("words", PROMISE, ids=" ".join)
def test_every_command_checks_all_that_it_is_told_before_any_work(words, shared, tmp_path, monkeypatch, capsys):
    def began(*args, **kwargs): raise AssertionError("it began to work")
    for room, name in WORK.values():
        monkeypatch.setattr(room, name, began)
    monkeypatch.setenv("MOE_REDISTRIBUTION_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir(), monkeypatch.chdir(tmp_path / "here")
    before = sorted(Path(shared["file"]).parent.rglob("*"))
    assert cli.main([w.format(**shared) for w in words]) == 2
    out, err = capsys.readouterr()
    [said] = [x for x in err.splitlines() if "ForCausalLM): " not in x]                      # how far a model opens
    assert all(x in said for x in ("moe-redistribution: ", "expected", "got", "fix: ")) and not out, err
    # neither a store, nor a state, nor an output
    assert [*tmp_path.rglob("*")] == [tmp_path / "here"] and sorted(Path(shared["file"]).parent.rglob("*")) == before

@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    "A store with one run. Copy it before doing harm."
    root = tmp_path_factory.mktemp("one")
    _train_group(TINY, [1], root=root, steps=200)
    return root

@pytest.mark.parametrize("wrong", [["--executor", "x"], ["--device", "tpu"], ["--device", "cuda:1"], ["--seeds", "1,x"],
                                   ["--budget", "0"]], ids=" ".join)
def test_runs_are_not_moved_aside_by_a_command_that_is_refused(wrong, one_run, home, monkeypatch):
    "`--again` moves what is there aside, and did so before it looked at `--executor` and at the kind of device."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shutil.copytree(one_run, home)
    before = {*home.rglob("*")}
    assert cli.main(["train", TINY, "--seeds", "1", "--until", "full", "--again", *wrong]) == 2
    assert {*home.rglob("*")} == before and Store(home).path(TINY, 1) in before

def test_the_promise_is_tried_on_every_command():
    commands = {a.dest for a in next(a for a in cli.parser()._actions if a.dest == "command")._choices_actions}
    assert len(commands) >= 13 and commands == set(WORK) == {words[0] for words in PROMISE}
    with_out = {c for c in commands if "--out" in cli.parser()._actions[1].choices[c].format_help()}
    assert with_out == {words[0] for words in PROMISE if "--out" in words}
    with_seeds = {c for c in commands if "--seeds" in cli.parser()._actions[1].choices[c].format_help()}
    assert with_seeds == {words[0] for words in PROMISE if words[-2:] == ("--seeds", "")}

# --------------------------------------------------------------------------------------------------------- interrupts

ENTRY = "import sys; from moe_redistribution.record.entry import enter; print('in', flush=True); sys.exit(enter())"

@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_torch_is_imported_ends_in_one_line(sent, tmp_path):
    p = subprocess.Popen([sys.executable, "-c", ENTRY, "ledger"], cwd=tmp_path, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
    assert p.stdout.readline() == "in\n"
    time.sleep(.3), p.send_signal(sent)
    out, err = p.communicate(timeout=120)
    assert (p.returncode, out, err) == (130, "", f"{INTERRUPTED}\n")

POOLS = {"executors": "_LocalExecutor", "bench": "_worker_processes"}
POOL = """
import os, sys, time
if __name__ == "__main__":
    with globals()[sys.argv[1]](1) as pool:
        print("begun", flush=True)
        try: pool.submit(os.getpid).result() if hasattr(pool, "submit") else pool(os.getpid), time.sleep(60)
        except KeyboardInterrupt: print("heard", flush=True), os._exit(0)             # semaphores are left, says Python
"""

@pytest.mark.parametrize("room", first(["executors"], POOLS))
def test_ctrl_c_while_a_worker_imports_is_its_callers_and_no_worker_prints_a_traceback(room, tmp_path):
    "A terminal sends it to all processes at once, and each worker printed the traceback of some import."
    (script := tmp_path / "pool.py").write_text(f"from moe_redistribution.training.{room} import {POOLS[room]}\n{POOL}")
    env = os.environ | {"PYTHONPATH": str(table_files.ROOT)}
    p = subprocess.Popen([sys.executable, script, POOLS[room]], env=env, start_new_session=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert p.stdout.readline() == "begun\n"
    time.sleep(.5), os.killpg(p.pid, signal.SIGINT)
    out, err = p.communicate(timeout=120)
    assert (p.returncode, out) == (0, "heard\n") and "Traceback" not in err, err

def test_the_console_script_goes_in_by_the_light_entry():
    text = (table_files.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'moe-redistribution = "moe_redistribution.record.entry:enter"' in text

@pytest.mark.parametrize("command", ["scores", "ablate", "gates", "train"])
def test_a_real_model_gets_all_threads_that_torch_may_and_training_has_one_a_process(command, shared,
                                                                                     monkeypatch, home):
    class Seen(BaseException): pass
    def look(*args, **kwargs): raise Seen(torch.get_num_threads())
    for room, name in (WORK["scores"], WORK["ablate"], (gates_study, "_distilled_job"), WORK["train"]):
        monkeypatch.setattr(room, name, look)
    words = [command, *([TINY, "--executor", "here"] if command == "train" else TEXT)]
    torch.set_num_threads(3)
    try:
        words = [w.format(**shared) for w in words] + GATES * (command == "gates")
        with pytest.raises(Seen) as seen: cli.main(words)
        assert seen.value.args == (1 if command == "train" else 3,)
    finally: torch.set_num_threads(1)

@pytest.mark.parametrize("name", first(["distilled"], ["distilled", "unfreeze1_learned", "gates"]))
def test_a_model_may_be_called_as_an_arm_of_gates_is(name, shared, tmp_path, home):
    shutil.copytree(shared["model"], tmp_path / name)
    words = ["gates", "--model", name, *TEXT[2:], *GATES, "--unfreeze", "1", "--out", "rows.csv"]
    assert cli.main([w.format(**shared) for w in words]) == 0
    assert set(pd.read_csv("rows.csv")["condition"]) == {name, f"{name}/unfreeze1"}

@pytest.mark.parametrize("words, place", [
    (["train", TINY, "--seeds", "1", "--until", "full", "--executor", "here"], "home/groups/"),
    (["scores", *TEXT, "--out", "out/rows.csv"], "out/rows.part")], ids=["train", "scores"])
def test_a_full_disk_is_named_with_the_way_out_and_the_same_command_goes_on(words, place, shared, tmp_path, monkeypatch,
                                                                            capsys, home):
    monkeypatch.setitem(RECIPES["add7"], "steps", 200)
    def full(*_): raise OSError(errno.ENOSPC, "No space left on device")
    words = [w.format(**shared) for w in words]
    with monkeypatch.context() as m:
        m.setattr(os, "fsync", full)
        assert cli.main(words) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.count("moe-redistribution: ") == 1 and f"{tmp_path}/{place}" in said and "No space left" in said
    assert "fix: free some, or set MOE_REDISTRIBUTION_HOME" in said and "the same command goes on" in said
    assert not [*tmp_path.rglob(".*.part")] and cli.main(words) == 0

def test_a_full_disk_behind_the_output_is_one_line(tmp_path):
    if not os.path.exists("/dev/full"): pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        p = subprocess.run([sys.executable, "-c", ENTRY.replace("print('in', flush=True); ", ""), "conditions"],
                           cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert p.returncode == 2 and "No space left" in p.stderr and p.stderr.count("\n") == 1, p.stderr

# -------------------------------------------------------------------------------------------------------------- files

def words_study(): return Study("words", "", {"small": Preset("", {"a": (1, 2)}, 2)}, lambda arm, seeds, *x: ROWS[ROWS["seed"].isin(seeds)],
                              lambda *x: 1.)

ROWS = rows([.1, .2], [1, 2], condition="a", metric="letters")

@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    "Every kind of file that is read: name → (path, what reads it)."
    root = tmp_path_factory.mktemp("shelf")
    store, job, c = Store(root), study_jobs(words_study())[0], condition(TINY)
    _train_group(TINY, [1, 2], root=root, steps=200)
    run_job(job, root)
    state = _group_path(store, c, [1, 2], "authors")
    seal(state, *pack(init_members(c, [1, 2], "authors")))
    desk = Desk(job, store)
    seal(part := desk.path.with_suffix(".one.part"), {"x": torch.ones(9)}, dict(key=job.key, kind="part", part="one"))
    for name in ("results/runs/hist.parquet", "results/manifest.csv", "results/rows/heldout/add7.parquet"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(table_files.ROOT / name, root / name)
    table_files.write_sums(root)
    def run(seed): return lambda: None if (r := store.find(TINY, seed)) is None else (r.weights, r.manifest, r.history)
    return {"run 1": (store.path(TINY, 1), run(1)), "run 2": (store.path(TINY, 2), run(2)),
            "resume": (store.path(TINY, 1).with_suffix(".resume"), lambda: store.resume(TINY, 1)),
            "state": (state, lambda: [m.w for m in groups._left_behind(store, c, [1, 2], "authors", "cpu")]),
            "rows": (job.path(store), lambda: find_rows(job, store)),
            "part": (part, lambda: _own_file(part, job.key, "part", "one")),
            "runs": (root / "results/runs/hist.parquet", lambda: selection.recorded_runs(root)),
            "manifest": (root / "results/manifest.csv", lambda: table_files.manifest(root)),
            "table": (root / "results/rows/heldout/add7.parquet",
                      lambda: pd.read_parquet(as_committed(root / "results/rows/heldout/add7.parquet")))}

def damages(luck, good, others):
    "Ways to spoil a file: name → what its place then holds."
    flipped = bytearray(good)
    flipped[luck.randrange(len(good))] ^= 1 << luck.randrange(8)
    at = luck.randrange(len(good))
    return {"a bit": bytes(flipped), "cut": good[:at], "longer": good + os.urandom(luck.randrange(1, 99)), "none": b"",
            "zeros": good[:at] + bytes(len(good) - at), "text": b"not one of ours", "twice": good + good,
            "another's": luck.choice(others)}

def same(a, b):
    if isinstance(a, (tuple, list)): return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    return a.equals(b) if hasattr(a, "equals") else torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

@pytest.mark.audit
def test_no_damaged_swapped_or_foreign_file_is_believed(shelf):
    luck, found, bad = random.Random(0), Counter(), []
    originals = {n: p.read_bytes() for n, (p, _) in shelf.items()}
    right = {n: read() for n, (_, read) in shelf.items()}
    for turn, (name, (path, read)) in itertools.product(range(14), shelf.items()):
        # a state of one seed alone is a state of this seed, whoever's company it was in
        others = [b for n, b in originals.items() if n != name and {n, name} != {"state", "resume"}]
        for how, spoilt in {**damages(luck, originals[name], others), "pipe": None}.items():
            path.unlink(missing_ok=True)
            os.mkfifo(path) if spoilt is None else path.write_bytes(spoilt)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    with at_most(20): got = read()
                    fine = got is None or len(got) == 0 or same(got, right[name])
                    end = "refused" if fine else "silent"
                except (Damaged, OSError) as e: end = "hang" if isinstance(e, TimeoutError) else "refused"
                except Exception as e: end = f"traceback {type(e).__name__}"
            found[end] += 1
            if end != "refused": bad.append((end, name, how))
            for p in [*path.parent.glob(f"{path.name}.damaged*"), path]: p.unlink(missing_ok=True)
            for n, (p, _) in shelf.items():
                if not p.exists(): p.write_bytes(originals[n])
            stamp = time.time() + turn
            os.utime(path, (stamp, stamp))
    print(f"\n{sum(found.values())} damaged, swapped and foreign files: {dict(found)}")
    assert not bad and sum(found.values()) >= 1000, Counter(bad).most_common(20)

# -------------------------------------------------------------------------------------------------------------- kills

# A process that has imported everything forks a command when asked, in a session of its own, and tells its number, then
# how it ended. The child goes in as the console script does.
SERVER = """
import json, os, signal, sys

def child(asked, ready):
    os.setsid(), os.chdir(asked["folder"])
    os.environ["MOE_REDISTRIBUTION_HOME"] = asked["home"]
    for fd, name in (1, "out"), (2, "err"):
        os.dup2(os.open(asked["said"] + "." + name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    sys.argv[1:] = asked["words"]
    for s in signal.SIGINT, signal.SIGTERM: signal.signal(s, entry._leave)
    os.write(ready, b"y")
    try: status = entry.enter()
    except SystemExit as e: status = e.code
    sys.stdout.flush(), os._exit(status)

if __name__ == "__main__":                                  # its workers import this file once more, and need no more
    import torch
    from transformers.models.olmoe import modeling_olmoe
    from moe_redistribution.record import cli, entry
    for line in sys.stdin:
        ready, tell = os.pipe()
        if (pid := os.fork()) == 0: child(json.loads(line), tell)
        os.close(tell)                                       # else whoever waits for a child that is lost waits for ever
        os.read(ready, 1), print(pid, flush=True)
        _, status, used = os.wait4(pid, 0)
        print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, flush=True)
"""
RECORDED = "add7/ffn-h64-silu"
HELD = ["--tokens", "64", "--steps", "60", "--k", "2,4", "--unfreeze", "1"]
LONGER = {                                # commands that work longer than a second, and what each leaves
    "scores": (["scores", *TEXT, "--by", "head", "--out", "rows.csv"], ["rows.csv", "rows.png"]),
    "ablate": (["ablate", *TEXT, "--out", "rows.csv"], ["rows.csv", "rows.png"]),
    "gates": (["gates", *TEXT, *HELD, "--out", "rows.csv"], ["rows.csv", "rows.png"]),
    "measure": (["measure", TINY, "--seeds", "4,5", "--out", "rows.parquet"], ["rows.parquet"]),
    "study": (["study", "granularity", "--preset", "tiny", "--executor", "here", "--out", "rows.csv"], ["rows.csv"]),
    "record": (["record", "--executor", "here"], ["results", "checkpoints", "SHA256SUMS"]),
    "ledger": (["ledger", "--item", "tab7"], []),
    "train": (["train", TINY, "--seeds", "1-3", "--until", "full", "--group-size", "1", "--executor", "here"], []),
    "reproduce": (["reproduce", "--seeds", "1,2", "--out", "out"], ["out"]),
    "bench": (["bench", "--task", "hist", "--seconds", ".2", "--force", "--record", "bench.csv"], ["bench.csv"])}
SHORT, KILLS, BETWEEN = ("train", "reproduce"), 7, 4         # a shorter add-7; a command comes to its end after four kills
SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)

def a_clone(root, short=False):
    "The package without what it has recorded, in which add-7 may be short, but for what claims do at 2,000; `record` may write."
    shutil.copytree(table_files.ROOT / "moe_redistribution", root / "moe_redistribution",
                    ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(table_files.ROOT / "data", root / "data"), (root / "tests").mkdir()
    shutil.copy(table_files.ROOT / "tests/plain.py", root / "tests")
    for page in (table_files.ROOT / "nbs").rglob("*.ipynb"):             # claims name the pages that answer them
        (there := root / page.relative_to(table_files.ROOT)).parent.mkdir(parents=True, exist_ok=True), there.touch()
    sums = (table_files.ROOT / "SHA256SUMS").read_text().splitlines(keepends=True)
    (root / "SHA256SUMS").write_text("".join(x for x in sums if x[66:].startswith("data/")))
    recipes, long = root / "moe_redistribution/models/condition.py", "steps=10_000, eval_every=200"
    if short: recipes.write_text(recipes.read_text().replace(long, "steps=2_200, eval_every=200"))
    (root / "server.py").write_text(SERVER)
    return root

class Commands:
    "Commands of a clone, each in a process that is told apart from the one that imported everything."
    def __init__(self, clone):
        env = os.environ | {"PYTHONPATH": str(clone)}
        self.server = subprocess.Popen([sys.executable, clone / "server.py"], cwd=clone, env=env, text=True,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    def start(self, words, folder, home):
        said = str(home.parent / "said")
        self.server.stdin.write(json.dumps(dict(words=words, folder=str(folder), home=str(home), said=said)) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())
    def end(self):
        "(exit status, CPU seconds) of the command under way."
        status, spent = self.server.stdout.readline().split()
        return int(status), float(spent)

def spent(session):
    "CPU seconds of all processes of a session, or None if there is none any more: a busy machine shifts no moment."
    ticks = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = stat.read_text().rpartition(")")[2].split()
            if int(words[3]) == session: ticks += map(int, words[11:15])
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None

@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    "(clone, its commands) of a command; each kind of clone is made when it is asked for."
    made = {}
    def of(command):
        if (short := command in SHORT) not in made:
            clone = a_clone(tmp_path_factory.mktemp("clone") / "c", short)
            made[short] = clone, Commands(clone)
        return made[short]
    yield of
    for _, c in made.values(): c.server.kill(), c.server.communicate()

@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    "A store in which there is something to measure and to record."
    root = tmp_path_factory.mktemp("stored")
    _train_group(TINY, [4, 5], root=root, steps=200), _train_group(RECORDED, [42, 137], root=root, steps=200)
    return root

def contents(folder, outs):
    "Path below a folder → its bytes, of files and folders that a command leaves."
    found = [p for o in outs for p in (folder / o, *(folder / o).rglob("*")) if p.is_file() and p.name[0] != "."]
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}

def sealed(home): return {p: p.read_bytes() for p in home.rglob("*.safetensors")}

def no_half_file(folder, home, outs, whole, sent):
    "What an interrupt left is what a whole run leaves, or sealed and whole; temporary files only after a SIGKILL."
    for name, data in contents(folder, outs).items():
        if name in whole and not name.startswith(("results/", "SHA256SUMS", "checkpoints/", "bench")):
            assert data == whole[name], name
        if name.endswith(".parquet"): pd.read_parquet(folder / name)
        if name.endswith(".csv"): assert data.endswith(b"\n") and len(pd.read_csv(folder / name)), name
    for p in (*home.rglob("*"), *folder.glob("*.part")):
        if p.name[0] == "." and p.suffix == ".part": assert sent == signal.SIGKILL, p
        elif p.suffix in (".safetensors", ".state", ".resume", ".part"): unseal(p)

@pytest.mark.audit
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("command", LONGER)
def test_a_command_that_was_killed_gives_what_one_that_was_not_gives(command, commands, stored, places, tmp_path):
    "SIGKILL, SIGTERM and Ctrl-C in turn, at random moments; then the same command, which ends with the same bytes."
    (words, outs), (clone, run), luck, ended = LONGER[command], commands(command), random.Random(command), Counter()
    words, homes = [w.format(**places) for w in words], itertools.count()
    def fresh_home():
        shutil.copytree(stored, home := tmp_path / f"{next(homes)}" / "home")
        folder = clone if command == "record" else home.parent
        for o in outs if command == "record" else ():
            if (folder / o).is_dir(): shutil.rmtree(folder / o)
        if command == "record": shutil.copy(clone.parent / "sums", clone / "SHA256SUMS")
        if command == "bench": bench.keep(dict(condition="add7/ffn-h8-silu", times_plain=9.), folder / "bench.csv")
        return folder, home
    def left(folder, home):
        "What the end of a command is: its files, its table of text where it has none, its runs."
        got = contents(folder, outs)
        if command == "bench": got = {n: list(pd.read_csv(folder / n)["condition"]) for n in got}
        return got if outs else (home.parent / "said.out").read_bytes()
    if command == "record" and not (clone.parent / "sums").exists():
        shutil.copy(clone / "SHA256SUMS", clone.parent / "sums")
    def carried_out(folder, home):
        run.start(words, folder, home)
        status, took = run.end()
        assert status == 0, (home.parent / "said.err").read_text()[-3000:]
        return took
    place = first = fresh_home()
    took, whole = carried_out(*place), left(*place)
    place, kill = fresh_home(), 0
    while kill < (kills := 3 if command == "bench" else KILLS):
        before, sent, moment = sealed(place[1]), SENT[kill % 3], luck.uniform(0, .95 * took)
        pid = run.start(words, *place)
        while (now := spent(pid)) is not None and now < moment: time.sleep(.02)
        with contextlib.suppress(ProcessLookupError):                  # Ctrl-C reaches all of a terminal's processes
            os.killpg(pid, sent) if sent == signal.SIGINT else os.kill(pid, sent)
        (status, _), err = run.end(), (place[1].parent / "said.err").read_text()
        assert status in (0, 130, -signal.SIGKILL) and "Traceback" not in err, err[-3000:]
        assert before.items() <= sealed(place[1]).items(), "something stored was lost"
        no_half_file(*place, outs, whole if isinstance(whole, dict) else {}, sent)
        ended[f"{sent.name} {status}"] += 1
        kill += status != 0                                            # it was through before
        if status == 0 or kill in (BETWEEN, kills):
            carried_out(*place)
            assert left(*place) == whole
            if command == "train": assert_same_runs(Store(place[1]), Store(first[1]), [TINY], [1, 2, 3])
            place = fresh_home()
    print(f"\n{command}: {took:.1f} CPU s, {kills} kills, ended {dict(ended)}")
