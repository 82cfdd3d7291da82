"""The same groups reach threads, processes, a Dask cluster and a batch system, and a worker that dies costs no run."""
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import filelock
import pytest
import torch

import moe_redistribution
from moe_redistribution.training import executors
from moe_redistribution.training.executors import JobPool, local_executor, open_executor, _read_spec, _try_workers, watch
from moe_redistribution.training.groups import train
from moe_redistribution.training.store import Store
from same import assert_same_runs

NAMES = ["add7/ffn-h8-silu+d16", "add7/moe-e2k1-h8-silu+d16"]
PACKAGE = Path(moe_redistribution.__file__).parents[1]

def wait_until(true, seconds=60):
    "Waits for `true()` and returns what it gave."
    until = time.monotonic() + seconds
    while not (got := true()):
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.01)
    return got

# ----------------------------------------------------------------------------------------------------------- the word

@pytest.mark.parametrize("spec", ["", "locl", "Local", "local:", "local:0", "local:-1", "local:two", "here ", "dask:",
                                  "dask://", "dask://node", "dask://node:", "dask://node:0", "dask://node:65536",
                                  "dask://:8786", "tcp://node:8786", 3, ["here"], Executor], ids=repr)
def test_a_wrong_word_is_refused_in_one_line(spec):
    with pytest.raises(ValueError, match="executor: expected here, local.*; got .*(nearest|valid): .*; fix: ") as e:
        with open_executor(spec): pass
    assert "\n" not in str(e.value)

def test_what_is_nearly_an_executor_is_told_how_to_become_one():
    client = type("Client", (), dict(get_executor=None, submit=None))()
    with pytest.raises(ValueError, match=r"fix: its .get_executor\(pure=False\)"): _read_spec(client)
    with pytest.raises(ValueError, match=r"fix: JobPool\(it\)"): _read_spec(type("Slurm", (), dict(submit=None))())

def test_somebody_elses_executor_passes_through_and_stays_open():
    with ThreadPoolExecutor(1) as pool:
        with open_executor(pool) as same: assert same is pool
        assert pool.submit(divmod, 7, 2).result() == (3, 1)
        with pytest.raises(KeyError), open_executor(pool): raise KeyError
        assert pool.submit(divmod, 7, 2).result() == (3, 1)

# ------------------------------------------------------------------------------------------------------------ waiting

def test_results_come_in_the_order_of_the_jobs():
    def late(i): time.sleep(0.02 * (4 - i)); return i
    with ThreadPoolExecutor(4) as pool: assert watch(pool, late, [(i,) for i in range(4)]) == [0, 1, 2, 3]
    assert watch("here", late, [(3,), (4,)]) == [3, 4]

@pytest.mark.parametrize("place", ["show", "submit"])
def test_an_interrupt_cancels_what_has_not_begun_and_stops_the_pool(place):
    class Pool(ThreadPoolExecutor):
        def submit(self, *args):
            if place == "submit" and self._work_queue.qsize() == 3: interrupt()
            return super().submit(*args)
        def stop(self): go.set(); stopped.append(1)
    def interrupt(): raise KeyboardInterrupt
    go, begun, stopped = threading.Event(), [], []
    def job(i): begun.append(i); go.wait(20)
    with Pool(1) as pool, pytest.raises(KeyboardInterrupt):
        watch(pool, job, [(i,) for i in range(9)], interrupt, every=0.2)
    assert begun == [0] and stopped == [1]

def test_a_worker_given_up_by_dask_is_a_worker_that_died():
    scheduler = pytest.importorskip("distributed.scheduler")
    def job(): raise scheduler.KilledWorker("group", scheduler.WorkerState.__new__(scheduler.WorkerState), 3)
    with pytest.raises(RuntimeError, match="a worker process died; .*fix: "): watch("here", job, [()])

# ------------------------------------------------------------------------------------------------------ this machine

def apply(f, *args): return f(*args)

def test_local_workers_have_one_thread_and_low_priority_and_are_missed_when_they_die():
    with open_executor("local:1") as pool:
        jobs = [(torch.get_num_threads,), (os.nice, 0), (signal.getsignal, signal.SIGINT)]
        assert watch(pool, apply, jobs) == [1, min(19, os.nice(0) + 5), signal.SIG_IGN]
        with pytest.raises(RuntimeError, match="a worker process died; .*fix: "): watch(pool, os._exit, [(1,), (1,)])
    with local_executor() as pool: assert pool._max_workers == len(os.sched_getaffinity(0))    # none is started

HOLDS = """
import sys, time, filelock
from moe_redistribution.training.executors import open_executor, watch

def hold(path):
    with filelock.FileLock(path):
        open(path + ".held", "w").close()
        time.sleep(100)

if __name__ == "__main__":
    with open_executor("local:1") as pool: watch(pool, hold, [(sys.argv[1],)] * 3)
"""

def lock_is_free(path):
    try:
        with filelock.FileLock(path, timeout=0): return True
    except filelock.Timeout: return False

@pytest.mark.audit
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_workers_end_with_who_made_them_and_at_once_on_an_interrupt(tmp_path):
    "SIGKILL to the maker alone; Ctrl-C to all, as a terminal does it. A lock a worker holds is free soon after."
    (script := tmp_path / "holds.py").write_text(HOLDS)
    env = os.environ | {"PYTHONPATH": str(PACKAGE)}
    made = {how: subprocess.Popen([sys.executable, script, tmp_path / how], env=env, start_new_session=True,
                                  stderr=subprocess.DEVNULL) for how in ("kill", "interrupt")}
    try:
        for how in made: wait_until((tmp_path / f"{how}.held").exists)
        assert not any(lock_is_free(tmp_path / how) for how in made)
        began = time.monotonic()
        os.kill(made["kill"].pid, signal.SIGKILL)
        os.killpg(made["interrupt"].pid, signal.SIGINT)
        for how in made: wait_until(lambda: lock_is_free(tmp_path / how), 20)
        assert made["interrupt"].wait(20) not in (0, -signal.SIGKILL) and time.monotonic() - began < 20
    finally:
        for process in made.values():
            try: os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError: pass
            process.wait()

def test_what_another_process_cannot_be_sent_is_refused_before_any_work():
    with local_executor(1) as pool:
        with pytest.raises(ValueError, match="another process can be sent.*<lambda>.*; fix: functions"):
            pool.submit(lambda: 1)
        assert not pool._processes

# --------------------------------------------------------------------------------------------------------------- Dask

def test_without_dask_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(RuntimeError, match=r"expected .*got .*fix: pip install 'moe_redistribution\[dask\]'"):
        with open_executor("dask://127.0.0.1:8786"): pass

@pytest.mark.parametrize("door", ["closed", "silent"])
def test_a_scheduler_that_does_not_answer_is_refused_in_time(door):
    "A port where somebody listens and says nothing would keep a client waiting for good."
    pytest.importorskip("distributed")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        if door == "silent": s.listen()
        began = time.monotonic()
        with pytest.raises(OSError, match="expected a Dask scheduler that answers; got .*fix: ") as e:
            with open_executor(f"dask://127.0.0.1:{s.getsockname()[1]}", timeout=1): pass
        assert time.monotonic() - began < 5 and "\n" not in str(e.value)

def test_workers_on_another_disk_are_refused_before_any_training(tmp_path):
    class Client:
        def run(self, f, path): return {"tcp://near": f(path), "tcp://far": f(path.replace("store", "elsewhere"))}
    with pytest.raises(OSError, match="a folder that all workers see .* got 1 without, tcp://far first; fix: "):
        _try_workers(Client(), tmp_path / "store")
    assert not list((tmp_path / "store").iterdir())

@pytest.mark.audit
def test_a_worker_killed_in_the_middle_of_its_group_costs_no_run(tmp_path):
    "A real cluster of two workers, one of them killed: every run is recorded once, with the bits of a run at home."
    distributed = pytest.importorskip("distributed")
    seeds, far, near = [1, 2, 3, 4], Store(tmp_path / "far"), Store(tmp_path / "near")
    ask = dict(seeds=seeds, steps=400, until="full", group_size=2, quiet=True)
    def through(address):
        with open_executor(f"dask://{address}", folder=far.root) as pool:
            return train(NAMES, root=far.root, executor=pool, **ask)
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None,
                                  host="127.0.0.1", silence_logs="CRITICAL") as cluster, \
            distributed.Client(cluster, set_as_default=False) as spy, ThreadPoolExecutor(1) as aside:
        pids = spy.run(os.getpid)
        spy.run(torch.set_num_threads, 2)                                           # workers set up by someone else
        done = aside.submit(through, cluster.scheduler_address.removeprefix("tcp://"))
        wait_until(lambda: done.done() or list(far.root.glob("progress/*.json")))
        victim = next(address for address, tasks in spy.processing().items() if tasks)
        os.kill(pids[victim], signal.SIGKILL)
        assert not done.done()                                                      # in the middle of it
        rows = done.result(timeout=120)
        spy.wait_for_workers(2, timeout=60)                                         # another has taken its place
        assert pids[victim] not in spy.run(os.getpid).values()
        assert set(spy.run(torch.get_num_threads).values()) == {1}                  # and is set up like the first ones
        assert all(spy.run(lambda dask_worker: "moe_redistribution" in dask_worker.plugins).values())
    assert rows[["condition", "seed", "step"]].values.tolist() == [[c, s, 400] for c in NAMES for s in seeds]
    runs = sorted(p for p in (far.root / "v1").rglob("*.safetensors"))
    assert runs == sorted(far.path(c, s) for c in NAMES for s in seeds)
    assert not list(far.root.glob("groups/**/*.state")) and not list(far.root.glob("progress/*.json"))
    train(NAMES, root=near.root, executor="here", **ask)
    assert_same_runs(far, near, NAMES, seeds)

# ------------------------------------------------------------------------------------------------------- batch systems

@pytest.mark.audit
def test_a_batch_system_trains_the_same_runs(tmp_path):
    "submitit for real, each job a process of its own on this machine, as the page shows it for Slurm."
    submitit = pytest.importorskip("submitit")
    jobs = submitit.AutoExecutor(tmp_path / "logs", cluster="local")
    jobs.update_parameters(timeout_min=2)
    ask = dict(seeds=[1, 2], steps=200, until="full", group_size=1, quiet=True)
    with JobPool(jobs, at_once=2) as pool: rows = train(NAMES[:1], root=tmp_path / "far", executor=pool, **ask)
    assert rows["step"].tolist() == [200, 200] and len(list((tmp_path / "logs").glob("*_result.pkl"))) == 2
    train(NAMES[:1], root=tmp_path / "near", executor="here", **ask)
    assert_same_runs(Store(tmp_path / "far"), Store(tmp_path / "near"), NAMES[:1], [1, 2])

@pytest.mark.parametrize("asked, got", [([], "here"), (["--executor", "local:2"], "local:2")])
def test_groups_on_a_gpu_are_trained_here_or_side_by_side_if_an_executor_is_named(asked, got, monkeypatch, tmp_path):
    from moe_redistribution.record import cli, work
    monkeypatch.setenv("MOE_REDISTRIBUTION_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = []
    monkeypatch.setattr(work, "run_all", lambda todo, **how: seen.append((todo, how)))
    assert cli.main(["train", *NAMES, "--seeds", "1-20", "--device", "cuda", *asked]) == 0
    (todo, how), = seen
    # all seeds stacked
    assert (how["executor"], how["device"]) == (got, "cuda") and [o.group_size for o in todo] == [128, 128]

def test_an_interrupt_cancels_jobs_in_the_queue():
    class Job:
        def __init__(self): self.gone = threading.Event()
        def result(self): self.gone.wait(20); raise RuntimeError("cancelled")
        def cancel(self): self.gone.set()
    class Queue:
        made = []
        def submit(self, *args): self.made.append(Job()); return self.made[-1]
    def interrupt():
        if len(Queue.made) == 2: raise KeyboardInterrupt
    began = time.monotonic()
    with JobPool(Queue(), at_once=2) as pool, pytest.raises(KeyboardInterrupt):
        watch(pool, divmod, [(7, 2)] * 5, interrupt, every=0.05)
    assert len(Queue.made) == 2 and all(job.gone.is_set() for job in Queue.made) and time.monotonic() - began < 10

def test_a_job_is_set_up_as_a_worker(monkeypatch):
    seen = []
    monkeypatch.setattr(executors, "worker", lambda nice: seen.append(nice))
    class Queue:
        def submit(self, f, *args):
            value = f(*args)
            return type("Job", (), dict(result=lambda self: value))()
    with JobPool(Queue()) as pool: assert watch(pool, divmod, [(7, 2)]) == [(3, 1)]
    assert seen == [0]                                                              # its priority is not ours to lower
