"""Killed, crowded or damaged: what was trained is kept, what is missing is trained, and the bits are the same."""
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import moe_redistribution
from moe_redistribution.training import groups, jobs
from moe_redistribution.models.condition import RECIPES, condition
from moe_redistribution.training.groups import Training, _group_path, split_groups, pack, train, _train_group, unpack
from moe_redistribution.training.jobs import missing_jobs
from moe_redistribution.training.store import Store, seal
from moe_redistribution.training.compiled import compiled_gradients, why_not_compiled
from moe_redistribution.training.inner_loops import CODE
from moe_redistribution.tasks.task import TASKS, get_task, made_tasks
from moe_redistribution.training.loop import TASK_RULES, evaluate, init_members, register_task, train_interval
from same import assert_same_runs

TINY, DENSE = "add7/moe-e2k1-h8-silu+d16", "add7/ffn-h8-silu+d16"
HERE = dict(until="full", executor="here", quiet=True)
PACKAGE = Path(moe_redistribution.__file__).parents[1]

@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    "An evaluation every 10 steps, so that a run has many moments to be interrupted at."
    monkeypatch.setitem(RECIPES["add7"], "eval_every", 10)

PREAMBLE = """
import json, sys
from moe_redistribution.models.condition import RECIPES
from moe_redistribution.training.groups import _train_group
RECIPES["add7"]["eval_every"] = 10
name, seeds, root, steps, save_every = json.loads(sys.argv[1])
tell = lambda members, *_: print("at", *members.step.tolist(), flush=True)
"""
TRAIN = """
manifests = _train_group(name, seeds, root=root, until="full", steps=steps, save_every=save_every, tell=tell)
print("manifests", json.dumps(manifests, sort_keys=True))
"""

def in_another_process(name, seeds, root, steps, save_every=0, before=""):
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE), "MOE_REDISTRIBUTION_HOME": str(root)}
    work = json.dumps([name, seeds, str(root), steps, save_every])
    code = PREAMBLE + before + TRAIN
    return subprocess.Popen([sys.executable, "-c", code, work], env=env, text=True, stdout=subprocess.PIPE)

def assert_same(a, b, seeds, name=TINY): assert_same_runs(a, b, name, seeds, manifests=True)

def count_training(monkeypatch):
    "A list that receives the seeds of every interval that is trained in this process from now on."
    seen, real = [], groups.train_interval
    monkeypatch.setattr(groups, "train_interval", lambda m, *how: seen.append(tuple(m.seeds)) or real(m, *how))
    return seen

# ---------------------------------------------------------------------------------------------------- kill and resume

fork = multiprocessing.get_context("fork") if hasattr(os, "fork") else None

def dies_before(n, work):
    "Runs `work` in a fork that kills itself before its `n`-th change to what lies on disk; did it come that far?"
    def child():
        count = itertools.count(1)
        def deadly(change):
            def change_or_die(*args, **kwargs):
                if next(count) == n: os.kill(os.getpid(), signal.SIGKILL)
                return change(*args, **kwargs)
            return change_or_die
        os.replace, os.unlink = deadly(os.replace), deadly(os.unlink)
        work()
    process = fork.Process(target=child)
    process.start(), process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0

@pytest.mark.skipif(fork is None, reason="needs fork")
@pytest.mark.audit
@pytest.mark.parametrize("save_every", [0, 1e9], ids=["always saved", "never saved"])
def test_a_kill_at_any_write_loses_nothing(tmp_path, save_every):
    "Three seeds that end at different steps; killed at every write in turn, each resumes to the bits of the whole."
    def work(root):
        _train_group(TINY, [1], root=root, until="full", steps=10)                   # this one is ahead of the others
        _train_group(TINY, [1, 2, 3], root=root, until="full", steps=30, save_every=save_every)
    work(tmp_path / "whole")
    whole = Store(tmp_path / "whole")
    for n in itertools.count(1):
        root = tmp_path / str(n)
        if not dies_before(n, lambda: work(root)): break
        work(root)
        assert_same(Store(root), whole, [1, 2, 3])
        assert not list((root / "groups").rglob("*.state"))                          # nothing unfinished is left over
    assert n > 8                                                                    # two files a run and more

class Interrupted(BaseException): pass

def until_one_has_left(members, *_):
    if len(members.seeds) == 2: raise Interrupted

def test_when_a_seed_leaves_its_group_the_others_are_saved(tmp_path, monkeypatch):
    "Or a kill right after it would start them again in a smaller group, and bits may depend on the company."
    go = lambda root, **kw: _train_group(TINY, [1, 2, 3], root=tmp_path / root, until="full", steps=40,
                                        save_every=1e9, **kw)
    for root in ("killed", "whole"): _train_group(TINY, [1], root=tmp_path / root, until="full", steps=20)
    with pytest.raises(Interrupted): go("killed", tell=until_one_has_left)
    seen = count_training(monkeypatch)
    go("killed")
    assert seen == [(2, 3), (2, 3)]                                                 # the third and fourth interval
    go("whole")
    assert_same(Store(tmp_path / "killed"), Store(tmp_path / "whole"), [1, 2, 3])

def test_a_run_that_goes_on_began_when_it_first_did_under_the_register_of_then(tmp_path, monkeypatch):
    at = iter("abc")
    monkeypatch.setattr(groups, "has_begun", lambda: dict(began=next(at), registered="then"))
    def stop(*_): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        _train_group(TINY, [1, 2], root=tmp_path, until="full", steps=40, tell=stop, save_every=0)
    _train_group(TINY, [1, 2], root=tmp_path, until="full", steps=40)
    assert [Store(tmp_path).load(TINY, s).manifest[n] for s in (1, 2) for n in ("began", "registered")] == [
        "a", "then", "b", "then"]
    _train_group(TINY, [1], root=tmp_path, until="full", steps=60)                          # a longer schedule goes on
    assert Store(tmp_path).load(TINY, 1).manifest["began"] == "a" and next(at) == "c"

def test_a_longer_schedule_reaches_every_seed_of_a_killed_group(tmp_path):
    "Once a seed has ended, the group's state is without it; asking for more steps must find it again."
    go = lambda **kw: _train_group(TINY, [1, 2, 3], root=tmp_path, until="full", save_every=0, **kw)
    _train_group(TINY, [1], root=tmp_path, until="full", steps=20)
    with pytest.raises(Interrupted): go(steps=40, tell=until_one_has_left)
    assert _group_path(Store(tmp_path), condition(TINY), [1, 2, 3], "authors").exists()
    assert [m["step"] for m in go(steps=60).values()] == [60, 60, 60]

def test_a_group_s_old_state_never_takes_back_what_another_grouping_trained_further(tmp_path):
    ends = lambda work, *_: (_ for _ in ()).throw(KeyboardInterrupt) if max(work.step.tolist()) >= 20 else None
    with pytest.raises(KeyboardInterrupt):
        _train_group(TINY, [1, 2], root=tmp_path, until="full", steps=100, save_every=0, tell=ends)
    assert _group_path(Store(tmp_path), condition(TINY), [1, 2], "authors").exists()
    train(TINY, [1], root=tmp_path, steps=60, **HERE)
    further = Store(tmp_path).load(TINY, 1)
    train(TINY, [1, 2], root=tmp_path, steps=40, **HERE)
    assert [Store(tmp_path).load(TINY, s).step for s in (1, 2)] == [60, 40]
    assert Store(tmp_path).load(TINY, 1).manifest == further.manifest
    train(TINY, [1, 2], root=tmp_path, steps=100, **HERE)
    assert [Store(tmp_path).load(TINY, s).step for s in (1, 2)] == [100, 100]

def test_a_killed_group_s_seeds_go_on_in_groups_of_another_size(tmp_path, monkeypatch):
    """Each from where it had got furthest, whichever group's state has it; another stream's and another condition's
    states are none of its business."""
    ends = (lambda at: lambda work, *_: (_ for _ in ()).throw(KeyboardInterrupt)
            if max(work.step.tolist(), default=0) >= at else None)
    go = lambda name, seeds, at, stream="authors": _train_group(name, seeds, stream, "full", tmp_path, steps=100,
                                                               save_every=0, tell=ends(at))
    for args in ((TINY, [1, 2, 3], 40), (TINY, [3, 4], 60), (TINY, [1, 2], 30, "paired"), (DENSE, [1, 2], 50)):
        with pytest.raises(KeyboardInterrupt): go(*args)
    began, real = [], groups.train_interval
    monkeypatch.setattr(groups, "train_interval",
                        lambda members, *how: (began.append(dict(zip(members.seeds, members.step.tolist()))),
                                               real(members, *how))[1])
    assert [m["step"] for m in go(TINY, [1, 2], 999).values()] == [100, 100] and began[0] == {1: 40, 2: 40}
    began.clear()
    assert [m["step"] for m in go(TINY, [3, 4, 5], 999).values()] == [100] * 3
    assert began[0] == {3: 60, 4: 20, 5: 0}                                      # 4 joined 3 when it was at 40
    began.clear()
    go(TINY, [1, 2, 3], 999)
    assert not began                                                           # the old state is behind its stored runs

@pytest.mark.parametrize("harm", ["bit", "truncated", "empty"])
def test_a_damaged_group_state_restarts_the_group(tmp_path, harm, capsys):
    members = init_members(condition(TINY), [1, 2], "authors")
    for _ in range(2): evaluate(members, train_interval(members, 10))
    path = _group_path(Store(tmp_path), members.c, [1, 2], "authors")
    seal(path, *pack(members))
    altered = bytearray(path.read_bytes())
    altered[len(altered) // 2] ^= 1
    path.write_bytes({"bit": altered, "truncated": altered[:-1], "empty": b""}[harm])
    intervals = []
    _train_group(TINY, [1, 2], root=tmp_path, until="full", steps=40, tell=lambda *_: intervals.append(1))
    _train_group(TINY, [1, 2], root=tmp_path / "clean", until="full", steps=40)
    assert len(intervals) == 4 and "starting this group again" in capsys.readouterr().err
    assert_same(Store(tmp_path), Store(tmp_path / "clean"), [1, 2])
    assert path.with_name(f"{path.name}.damaged").exists() and not path.exists()

@pytest.mark.parametrize("other", [("add7/ffn-h8-gelu+d16", [1, 2], "authors"), (TINY, [1, 2], "paired"),
                                   (TINY, [3, 4], "authors"), (TINY, [1, 2, 3], "authors")])
def test_no_group_goes_on_from_anothers_state(tmp_path, other, capsys):
    members = init_members(condition(other[0]), *other[1:])
    evaluate(members, train_interval(members, 10))
    path = _group_path(Store(tmp_path), condition(TINY), [1, 2], "authors")
    seal(path, *pack(members))
    bad = path.read_bytes()
    _train_group(TINY, [1, 2], root=tmp_path, until="full", steps=40)
    _train_group(TINY, [1, 2], root=tmp_path / "clean", until="full", steps=40)
    assert "another one" in (said := capsys.readouterr().err) and "starting this group again" in said
    assert path.with_name(f"{path.name}.damaged").read_bytes() == bad
    assert_same(Store(tmp_path), Store(tmp_path / "clean"), [1, 2])

def test_a_strangers_state_among_the_states_of_a_condition_is_passed_over(tmp_path):
    members = init_members(condition("add7/ffn-h8-gelu+d16"), [1], "authors")
    evaluate(members, train_interval(members, 10))
    seal(_group_path(Store(tmp_path), condition(TINY), [1], "authors"), *pack(members))
    _train_group(TINY, [1, 2], root=tmp_path, until="full", steps=40)
    _train_group(TINY, [1, 2], root=tmp_path / "clean", until="full", steps=40)
    assert_same(Store(tmp_path), Store(tmp_path / "clean"), [1, 2])

# ----------------------------------------------------------------------------------------------------- several at once

@pytest.mark.audit
def test_two_processes_on_one_run_train_it_once(tmp_path):
    "Two ask for seeds 1 and 2 at the same moment, a third for 2 and 3: three seeds are trained, and all three answer."
    wait = f"""
import pathlib, time
print("ready", flush=True)
while not pathlib.Path({str(tmp_path / "start")!r}).exists(): time.sleep(.002)
"""
    (root := tmp_path / "store").mkdir()
    asked = [[1, 2], [1, 2], [2, 3]]
    children = [in_another_process(TINY, seeds, root, 200, before=wait) for seeds in asked]
    for child in children: assert child.stdout.readline() == "ready\n"
    (tmp_path / "start").touch()
    lines = [child.communicate(timeout=120)[0].splitlines() for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    answers = [json.loads(out[-1].removeprefix("manifests ")) for out in lines]
    assert answers[0] == answers[1] and answers[0]["2"] == answers[2]["2"]          # their CPU seconds too
    told = [[line.split()[1:] for line in out[:-1]] for out in lines]                # steps of the members
    assert not (told[0] and told[1]) and sum(len(t[0]) for t in told if t) == 3      # three began, none twice
    assert sum(map(len, told)) == 40
    assert {s: m["step"] for a in answers for s, m in a.items()} == {"1": 200, "2": 200, "3": 200}

def test_only_what_is_missing_is_trained(tmp_path, monkeypatch):
    go = lambda names, seeds, **kw: train(names, seeds, root=tmp_path, steps=20, **HERE, **kw)
    go([TINY], [1, 2])
    seen = count_training(monkeypatch)
    go([TINY], [1, 2]), go([TINY], [2, 1], group_size=1)
    left = lambda *asked: [(j.condition, j.seeds, j.steps) for j in missing_jobs(split_groups(asked), tmp_path)]
    assert seen == [] and left(Training(TINY, (1, 2), until="full", steps=20)) == []
    assert left(*(Training(n, (1, 2, 3), until="full", group_size=2, steps=20) for n in (DENSE, TINY))) == [
        (DENSE, (1, 2), 20), (DENSE, (3,), 20), (TINY, (3,), 20)]                   # nobody is sent out for nothing
    rows = go([TINY, DENSE], [1, 2, 3])
    assert seen == [(3,), (3,), (1, 2, 3), (1, 2, 3)]
    assert rows[["condition", "seed", "step"]].values.tolist() == [[c, s, 20] for c in (TINY, DENSE) for s in (1, 2, 3)]

def test_any_executor_gives_the_same_runs(tmp_path):
    go = lambda root, executor: train([DENSE, TINY], [1, 2, 3], root=tmp_path / root, steps=20, group_size=2,
                                      **HERE | dict(executor=executor)).drop(columns="cpu_seconds")
    with ThreadPoolExecutor(1) as pool: threads = go("threads", pool)
    assert threads.equals(go("here", "here"))
    for name in (DENSE, TINY): assert_same(Store(tmp_path / "threads"), Store(tmp_path / "here"), [1, 2, 3], name)

class LosesItsFirstJob(Executor):
    def __init__(self): self.jobs = 0
    def submit(self, f, *args):
        self.jobs, future = self.jobs + 1, Future()
        try: future.set_result(f(*args)) if self.jobs > 1 else future.set_exception(RuntimeError("worker lost"))
        except Exception as e: future.set_exception(e)
        return future

def test_a_lost_worker_costs_one_group(tmp_path, monkeypatch):
    "The error is raised, but only after the others are done; the same call again trains the lost group and no other."
    def go(executor):
        return train([DENSE], [1, 2], root=tmp_path, steps=20, group_size=1, **HERE | dict(executor=executor))
    with pytest.raises(RuntimeError, match="worker lost"): go(LosesItsFirstJob())
    seen = count_training(monkeypatch)
    assert go("here")["step"].tolist() == [20, 20] and seen == [(1,), (1,)]

# ----------------------------------------------------------------------------------------------- longer and shorter

@pytest.mark.parametrize("name", [DENSE, TINY])
def test_a_longer_schedule_continues_a_shorter_one(tmp_path, name, monkeypatch):
    "Stopped at its selected checkpoint and asked for the rest later, a seed ends where it would have ended in one go."
    exact = groups.evaluate                            # a seed this small never gets there: from step 20 on, say it did
    def perfect(members, *args):
        scores = exact(members, *args)
        return scores | {m: torch.where(members.step >= 20, 1., scores[m]) for m in ("exact", "exact256")}
    monkeypatch.setattr(groups, "evaluate", perfect)
    for root, ends in (("continued", ("selected", "full")), ("straight", ("full",))):
        for until in ends: manifest = _train_group(name, [1], root=tmp_path / root, until=until, steps=50)[1]
        assert manifest["step"] == 50 and manifest["settled"] and manifest["rules"]["first256"]["step"] == 20
    assert_same(Store(tmp_path / "continued"), Store(tmp_path / "straight"), [1], name)

def test_a_seed_leaves_its_group_at_the_selected_checkpoint(tmp_path):
    "A real one: everything right on all inputs, known at the next evaluation, and not a step trained after it."
    RECIPES["add7"]["eval_every"] = 200
    name = "add7/glu-h170-silu"
    manifest = _train_group(name, [42], root=tmp_path, until="selected")[42]
    run = Store(tmp_path).load(name, 42)
    assert manifest["settled"] and manifest["step"] == run.history["step"].iloc[-1] < 2000
    assert set(run.weights) == {"first256", "first1000"} and manifest["rules"]["first1000"]["reached"]
    assert run.history["exact"].iloc[-1] == 1 and (run.history["exact"].iloc[:-1] < 1).all()

def test_a_seed_that_stops_at_its_first_rule_keeps_no_weights_of_the_others_and_goes_on_from_there(tmp_path,
    monkeypatch):
    "Above 99 % from step 20 on and never right on all pairs: what is best so far is not yet the best."
    exact, name = groups.evaluate, "modadd/ffn-h16-gelu+d32"
    def nearly(members, *args):
        scores = exact(members, *args)
        return scores | {"test": torch.where(members.step >= 20, .991 + members.step / 1e5, scores["test"])}
    monkeypatch.setattr(groups, "evaluate", nearly)
    monkeypatch.setitem(RECIPES["modadd"], "eval_every", 10)
    train = lambda root, until: _train_group(name, [1], root=tmp_path / root, until=until, steps=50)[1]
    early = train("continued", "first")
    assert early["step"] == 20 and early["rules"]["first99"] == dict(step=20, value=pytest.approx(.9912), reached=True)
    assert not early["settled"] and set(Store(tmp_path / "continued").load(name, 1).weights) == {"first99"}
    asked = Training(name, (1,), until="first", steps=50)
    assert asked.is_done(Store(tmp_path / "continued")), "nothing is left to do"
    assert replace(asked, until="selected").late(Store(tmp_path / "continued")) == [1]
    assert train("continued", "first") == early
    assert train("continued", "selected")["step"] == train("straight", "full")["step"] == 50
    assert_same(Store(tmp_path / "continued"), Store(tmp_path / "straight"), [1], name)

def test_a_task_without_rules_trains_to_its_end_whatever_was_asked_for(tmp_path):
    "Nobody ever settles there. `first` and `selected`, the default, ended in an error of torch's."
    t = replace(get_task("add7"), name="ruleless")
    register_task("ruleless", lambda: t, RECIPES["add7"])
    try:
        for until in ("first", "selected"):
            found = train("ruleless/ffn-h8-silu+steps200", [1, 2], root=tmp_path / until, **HERE | dict(until=until))
            assert found["step"].tolist() == [200, 200] and not found["settled"].any()
        assert not missing_jobs([Training("ruleless/ffn-h8-silu+steps200", (1, 2))], tmp_path / "first")
    finally:
        for table in (TASKS, RECIPES, TASK_RULES, made_tasks): table.pop("ruleless", None)

# --------------------------------------------------------------------------------------------------- NaN, bad input

def poison(seed_row):
    "A measure that spoils one member's weights at step 20."
    def measure(params, c):
        measure.calls += 1
        if measure.calls == 2: params["W_O"][seed_row] = torch.nan
        return {}
    measure.calls = 0
    return measure

@pytest.mark.parametrize("name", [DENSE, TINY])
def test_a_seed_with_nan_ends_with_a_recorded_failure_and_keeps_its_row(tmp_path, name, monkeypatch):
    go = lambda root, **kw: train([name], [1, 2, 3], root=tmp_path / root, steps=30, **HERE, **kw)
    rows, clean = go("poisoned", measures=(poison(0),)), go("clean")
    assert rows["seed"].tolist() == [1, 2, 3] and rows["step"].tolist() == [30, 30, 30]
    assert rows["failed"].fillna(0).tolist() == [21, 0, 0] and clean["failed"].isna().all()
    sick = Store(tmp_path / "poisoned").load(name, 1)
    assert sick.failed and "final" not in sick.weights and sick.history["step"].tolist() == [10, 20, 30]
    assert all(v.isfinite().all() for p in sick.weights.values() for v in p.values())  # what it had is good
    assert_same(Store(tmp_path / "poisoned"), Store(tmp_path / "clean"), [2, 3], name)
    seen = count_training(monkeypatch)
    assert go("poisoned")["failed"].fillna(0).tolist() == [21, 0, 0] and seen == []  # a failure is a result

def test_a_run_that_is_settled_early_waits_for_its_reset_and_a_shorter_request_does_not_answer_for_it(tmp_path,
    monkeypatch):
    everybody = lambda members, until=None: torch.ones(len(members.seeds), dtype=bool)
    monkeypatch.setattr("moe_redistribution.training.loop.settled_members", everybody)
    train([TINY, TINY + "@30:reset0.25"], [2], root=tmp_path, steps=100, executor="here", quiet=True)
    assert [Store(tmp_path).load(n, 2).step for n in (TINY, TINY + "@30:reset0.25")] == [10, 40]
    monkeypatch.setattr(groups, "settled_members", everybody)
    for steps, end in ((20, 20), (100, 40)):
        train(TINY + "@30:reset0.25", [1], root=tmp_path, steps=steps, executor="here", quiet=True)
        run = Store(tmp_path).load(TINY + "@30:reset0.25", 1)
        assert run.manifest["settled"] and run.step == end

def test_waiting_for_another_process_ends_with_the_budget(tmp_path):
    with Store(tmp_path).locked(TINY, [1]):
        began = time.time()
        assert _train_group(TINY, [1], root=tmp_path, steps=10, deadline=began + .5) == {}
        assert .4 < time.time() - began < 5
    assert list(_train_group(TINY, [1], root=tmp_path, steps=10, deadline=time.time() + 60)) == [1]

def test_a_run_that_is_there_and_not_done_is_not_returned(tmp_path):
    train(TINY, [1], root=tmp_path, steps=20, **HERE)
    more = dict(root=tmp_path, steps=10**4, **HERE)
    assert (train(TINY, [1], budget=.01, **more).empty
            and _train_group(TINY, [1], "authors", "full", tmp_path, steps=10**4, deadline=time.time()) == {})
    assert train(TINY, [1], root=tmp_path, steps=20, budget=60, **HERE)["step"].tolist() == [20]

def test_seeds_and_steps_may_be_numpys(tmp_path):
    got = _train_group(TINY, np.array([2, 1]), root=tmp_path, until="full", steps=np.int64(10))
    assert list(got) == [2, 1] and [m["step"] for m in got.values()] == [10, 10]

@pytest.mark.parametrize("ask", [
    dict(conditions=[TINY, "add7/fnn-h8-silu"]), dict(seeds=[]), dict(seeds=[-1]), dict(seeds=42), dict(seeds=[1.5]),
    dict(seeds="42,137"), dict(seeds=["1"]), dict(seeds=[True]), dict(seeds=[2**64]), dict(group_size=0),
    dict(group_size=2.5), dict(device="gpu"), dict(budget="5"), dict(stream="author"), dict(steps=-5),
    dict(executor="locally")], ids=str)
def test_bad_input_is_refused_before_anything_is_trained_or_written(tmp_path, ask, monkeypatch):
    seen, root = count_training(monkeypatch), tmp_path / "store"
    with pytest.raises(ValueError, match="expected .*fix: "):
        train(**dict(conditions=[TINY], seeds=[1], root=root, steps=10) | HERE | ask)
    assert seen == [] and not root.exists()

# --------------------------------------------------------------------------------------------------- budgets, other
# tasks

def test_a_budget_ends_in_time_with_whole_runs_and_states_from_which_the_rest_goes_on(tmp_path, monkeypatch):
    "A clock that each interval moves on by one second, and a budget of six: one group ends, one waits in its state."
    clock = type("Clock", (), dict(now=1000.0, time=lambda self: self.now, monotonic=lambda self: self.now,
                                   process_time=staticmethod(time.process_time)))()
    real = groups.train_interval
    def interval(members, *how):
        clock.now += 1
        return real(members, *how)
    go = lambda **kw: train([DENSE, TINY], [1, 2], root=tmp_path / "budget", steps=40, **HERE, **kw)
    with monkeypatch.context() as patch:
        for room in (groups, jobs): patch.setattr(room, "time", clock)
        patch.setattr(groups, "train_interval", interval)
        rows, store = go(budget=6), Store(tmp_path / "budget")
        assert clock.now <= 1006 and rows["condition"].tolist() == [DENSE, DENSE] and rows["step"].tolist() == [40, 40]
        state = unpack(*groups.unseal(_group_path(store, condition(TINY), [1, 2], "authors")))
        assert state.step.tolist() == [10, 10]
        assert go()["step"].tolist() == [40] * 4 and clock.now == 1008              # nothing was trained twice
    train([DENSE, TINY], [1, 2], root=tmp_path / "whole", steps=40, **HERE)
    for name in (DENSE, TINY): assert_same(store, Store(tmp_path / "whole"), [1, 2], name)

@pytest.mark.parametrize("name",
                         ["modadd/moe-e2k1-h8-gelu+d32", "hist/ffn-h8-gelu+d32", "modadd/ffn-h8-gelu+d32+drop0.1"])
def test_full_batch_runs_resume_to_the_bit_across_a_new_set_and_measures_are_taken_at_every_fifth_evaluation(tmp_path,
    name, monkeypatch):
    task, taken = name.split("/")[0], []
    monkeypatch.setitem(RECIPES[task], "eval_every", 2), monkeypatch.setitem(RECIPES[task], "measure_every", 4)
    monkeypatch.setattr("moe_redistribution.tasks.data.REFRESH", 3)
    measure = lambda params, c: (taken.append(1), {"mine": torch.ones(len(params["W_E"]))})[1]
    go = lambda root, steps: _train_group(name, [1], root=tmp_path / root, steps=steps, until="full",
                                         measures=(measure,))
    go("twice", 4), go("twice", 8)
    assert len(taken) == 2
    go("once", 8)
    assert_same(Store(tmp_path / "twice"), Store(tmp_path / "once"), [1], name)
    history = Store(tmp_path / "once").load(name, 1).history
    assert history["mine"].notna().tolist() == [False, True, False, True] and history["test"].notna().all()

# -------------------------------------------------------------------------------------------------- the compiled step

def test_a_run_by_the_compiled_step_is_the_same_run_and_says_which_code_gave_its_gradients(tmp_path):
    "It goes on from a state of the engine, and says for how many steps; what it does not do goes the engine's way."
    how = dict(quiet=True, executor="here", until="full")
    train([TINY], [1, 2], root=tmp_path, steps=20, **how)
    train([TINY], [1, 2], root=tmp_path, steps=40, device="compiled", **how)
    train([TINY], [1, 2], root=tmp_path / "engine", steps=40, **how)
    run, plain = (Store(root).load(TINY, 1) for root in (tmp_path, tmp_path / "engine"))
    assert run.manifest["compiled"] == {CODE: 20} and "compiled" not in plain.manifest
    assert run.manifest["step"] == 40 and run.history["loss"].iloc[-1] == pytest.approx(plain.history["loss"].iloc[-1], rel=1e-4)
    assert all(torch.allclose(v, plain.weights["final"][n], atol=1e-3) for n, v in run.weights["final"].items())
    train([TINY + "+norm"], [1], root=tmp_path, steps=20, device="compiled", **how)
    assert "compiled" not in Store(tmp_path).load(TINY + "+norm", 1).manifest

def test_without_numba_the_compiled_step_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"device: expected numba, .*; got none installed; .*pip install .*\[fast\]"):
        train([TINY], [1], root=tmp_path, device="compiled", quiet=True, executor="here")
    assert not [*tmp_path.rglob("*.safetensors")]

def test_experts_that_only_look_like_the_library_s_are_not_compiled():
    "A gated one with a bias, and one that denies its gate, take over `hidden`, and had wrong gradients without a word."
    from types import SimpleNamespace
    from moe_redistribution.models.variants import Gated, Variant
    class Biased(Gated): "Its weights may be others."
    class Denies(Gated): gated = False
    task, router = SimpleNamespace(read=[0], n_ctx=1), SimpleNamespace(noisy=None)
    def why(kind):
        c = dict(get_task=lambda: task, n_layers=1, routed=False, routing=router, norm=False, drop=0)
        return why_not_compiled(SimpleNamespace(**c, variant=kind("mine")))
    assert [why(k) for k in (Variant, Gated, Biased, Denies)] == ["", "", *["experts of another kind"] * 2]

def test_a_token_that_the_model_has_no_row_for_is_refused_and_not_written_somewhere():
    c, w = condition(TINY), init_members(condition(TINY), [1], "paired").w
    tokens, targets = (x[None, :4].clone() for x in (c.get_task().tokens, c.get_task().targets))
    tokens[0, 0, 0] = 99
    with pytest.raises(ValueError, match="tokens: expected numbers from 0 to 11; got 0 to 99"):
        compiled_gradients(w, torch.zeros_like(w), tokens, targets, c)
