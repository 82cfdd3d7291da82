"""Killed twenty times at random moments: at most one interval per group is lost, nothing recorded, and not one bit."""
import hashlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import moe_redistribution
from moe_redistribution.training import groups, jobs
from moe_redistribution.models.condition import RECIPES, condition
from moe_redistribution.training.groups import _group_path
from moe_redistribution.training.store import Store, unseal
from same import assert_same_runs

NAMES = ["add7/ffn-h8-silu+d16", "add7/glu-h8-silu+d16", "add7/moe-e2k1-h8-silu+d16"]
SEEDS, SIZE, STEPS, EVERY, KILLS = [1, 2, 3, 4], 2, 400, 20, 20
PACKAGE = Path(moe_redistribution.__file__).parents[1]

# A process that has imported everything forks a driver when asked, in a session of its own; the driver forks two
# workers. `alive` is a pipe that all of them hold: it ends when the last one is gone. A line of the log says that an
# interval of training begins: condition, first seed, step.
DRIVER = f"""
import multiprocessing, os, signal, sys
from concurrent.futures import ProcessPoolExecutor
import torch
from moe_redistribution.training import groups
from moe_redistribution.models.condition import RECIPES

RECIPES["add7"]["eval_every"] = {EVERY}
torch.set_num_threads(1)
real = groups.train_interval

def logged(members, *how):
    os.write(log, f"{{members.c.name}} {{members.seeds[0]}} {{int(members.step[0])}}\\n".encode())
    return real(members, *how)

def work(root):
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        groups.train({NAMES}, {SEEDS}, root=root, until="full", steps={STEPS}, group_size={SIZE}, executor=pool,
                     quiet=True, save_every=0)

for line in sys.stdin:
    root = line.strip()
    ended, alive = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        log = os.open(root + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        groups.train_interval = logged
        try: work(root)
        except BaseException: sys.excepthook(*sys.exc_info()); os._exit(1)
        os._exit(0)
    os.close(alive)
    print(child, flush=True)
    os.read(ended, 1)
    os.close(ended)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

@contextmanager
def drivers(tmp_path):
    "A function that starts a driver on a store and returns (its process group, a function that waits for its end)."
    (script := tmp_path / "driver.py").write_text(DRIVER)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE)}
    parent = subprocess.Popen([sys.executable, script], env=env, text=True, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)
    started = []
    def start(root):
        parent.stdin.write(f"{root}\n"), parent.stdin.flush()
        started.append(int(parent.stdout.readline()))
        return started[-1], lambda: int(parent.stdout.readline())
    try: yield start
    finally:
        for child in started[-1:]:
            try: os.killpg(child, signal.SIGKILL)
            except ProcessLookupError: pass
        parent.kill(), parent.communicate()

def intervals(root):
    "What the log says: (condition, first seed of the group) → steps at which intervals of training began, in order."
    out, log = {}, Path(f"{root}.log")
    for line in log.read_text().splitlines() if log.exists() else []:
        c, seed, step = line.split()
        out.setdefault((c, int(seed)), []).append(int(step))
    return out

def reached(store):
    "(condition, first seed) → step that lies on disk, in the group's state or its runs; Damaged if a kill left half."
    out = {}
    for c, first in itertools.product(NAMES, SEEDS[::SIZE]):
        seeds = list(range(first, first + SIZE))
        path, runs = _group_path(store, condition(c), seeds, "authors"), [store.find(c, s) for s in seeds]
        out[c, first] = int(unseal(path)[0]["step"].min()) if path.exists() else min(r.step if r else 0 for r in runs)
    return out

def begun(root):
    "How many different intervals of training have begun."
    return sum(len(set(starts)) for starts in intervals(root).values())

def recorded(store):
    "Finished runs, by the hash of their file."
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in (store.root / "v1").rglob("*.safetensors")}

@pytest.mark.audit
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_twenty_times_at_random_moments(tmp_path):
    "SIGKILL to the driver and its workers at once, each time somewhere in an interval; every evaluation is saved."
    killed, whole, luck = Store(tmp_path / "killed"), Store(tmp_path / "whole"), random.Random()
    before, files, kills, all_intervals = Counter(), {}, 0, len(NAMES) * len(SEEDS) // SIZE * STEPS // EVERY
    with drivers(tmp_path) as start:
        for moment in sorted(luck.sample(range(1, all_intervals - 10), KILLS)):
            child, end = start(killed.root)
            until = time.monotonic() + 60
            while begun(killed.root) < moment: assert time.monotonic() < until; time.sleep(0.005)
            time.sleep(luck.uniform(0, 0.05))                                       # an interval takes about this long
            try: os.killpg(child, signal.SIGKILL)
            except ProcessLookupError:                              # a fast machine was through before the last of them
                assert end() == 0 and kills > KILLS / 2
                break
            assert end() == -signal.SIGKILL
            now, kills = reached(killed), kills + 1
            assert all(now[g] >= step for g, step in before.items())                # what is saved never goes back,
            for g, starts in intervals(killed.root).items():                        # and is where training was
                assert starts[-1] <= now[g] <= starts[-1] + EVERY, g
            assert files.items() <= recorded(killed).items()                        # what is recorded stays
            before, files = now, recorded(killed)
        assert start(killed.root)[1]() == 0 and files.items() <= recorded(killed).items()
        assert start(whole.root)[1]() == 0
    log = intervals(killed.root)
    assert all(starts == sorted(starts) and set(starts) == set(range(0, STEPS, EVERY)) for starts in log.values())
    again = sum(map(len, log.values())) - begun(killed.root)
    assert 0 < again <= 2 * kills                                                   # two groups are under way at a time
    assert_same_runs(killed, whole, NAMES, SEEDS, manifests=True)

class Killed(BaseException): pass

@pytest.mark.parametrize("evaluations", [1, 3, 4, 5, 9])
def test_a_kill_loses_no_more_than_the_time_between_saves(tmp_path, monkeypatch, evaluations):
    "An evaluation a second and a save when more than three have gone by: at most three evaluations are lost."
    monkeypatch.setitem(RECIPES["add7"], "eval_every", EVERY)
    clock = SimpleNamespace(now=0)
    fake = SimpleNamespace(monotonic=lambda: clock.now, process_time=time.process_time, time=time.time)
    for room in (groups, jobs): monkeypatch.setattr(room, "time", fake)
    def second(params, c): clock.now += 1; return {}
    def kill(members, *_):
        if clock.now == evaluations: raise Killed
    with pytest.raises(Killed):
        groups._train_group(NAMES[0], [1, 2], root=tmp_path, steps=STEPS, measures=(second,), tell=kill, save_every=3)
    assert 0 <= evaluations - reached(Store(tmp_path))[NAMES[0], 1] // EVERY <= 3
