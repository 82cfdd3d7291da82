"""The same groups reach threads, processes, a Dask cluster and a batch system, and a worker that dies costs no run."""
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest
import torch

import moe_redistribution
from moe_redistribution.basics.kinds import import_file
from moe_redistribution.training import executors
from moe_redistribution.training.executors import (JobPool, dask_client, local_executor, open_executor, processes, _Lost,
                                                   _read_spec, _try_workers, watch)
from moe_redistribution.training.groups import Training, train
from moe_redistribution.training.jobs import _carry_with
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

@pytest.mark.parametrize("spec", ["", "Local", "local:", "local:-1", "local:two", "here ", "dask://", "dask://node:",
                                  "dask://node:0", "dask://node:65536", "dask://:8786", "tls://node", "tsl://node:8786",
                                  "slurm:", 3, Executor], ids=repr)
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

class Batch:
    "A batch system that carries a job out when its result is asked for, and loses those of seed 2."
    def submit(self, f, job, what):
        def result(_):
            if what.seeds == (2,): raise OSError("no file")
            return f(job, what)
        return type("Job", (), dict(result=result, job_id=17, state="NODE_FAIL", paths=SimpleNamespace(stderr="17.err")))()

@pytest.mark.parametrize("how", ["given up", "cancelled", "own error"])
def test_a_lost_job_stops_no_other_and_one_message_names_what_was_lost(how):
    def job(what):
        if what.seeds == (2,): raise CancelledError if how == "cancelled" else KeyError("mine")
        done.append(what.seeds)
    done, jobs = [], [(SimpleNamespace(condition="add7/x", seeds=(s,)),) for s in (1, 2, 3)]
    pool = JobPool(Batch(), 2) if how == "given up" else ThreadPoolExecutor(2)
    with pool, pytest.raises(KeyError if how == "own error" else _Lost) as e: watch(pool, job, jobs)
    assert sorted(done) == [(1,), (3,)]
    if how == "own error": return
    why = "job 17, NODE_FAIL, log 17.err" if how == "given up" else "its scheduler gave it up"
    assert re.fullmatch(r"jobs: expected a result of each of 3; got 1 lost .* kept: add7/x seeds 2 \(" + why + r"\); fix: "
                        "the same command again.*", str(e.value)), e.value

def test_a_worker_given_up_by_dask_is_a_worker_that_died():
    scheduler = pytest.importorskip("distributed.scheduler")
    def job(condition):
        (last := scheduler.WorkerState.__new__(scheduler.WorkerState)).address = "tcp://node17:4242"
        raise scheduler.KilledWorker("group", last, 3)
    with pytest.raises(_Lost, match=r"1 lost .*add7/x seeds 1, 2 \(its workers died, tcp://node17:4242 last\); fix: the same"):
        watch("here", job, [(SimpleNamespace(condition="add7/x", seeds=(1, 2)),)])

# ------------------------------------------------------------------------------------------------------ this machine

def apply(f, *args): return f(*args)

def test_local_workers_have_one_thread_and_low_priority_and_are_missed_when_they_die():
    with open_executor("local:1") as pool:
        jobs = [(torch.get_num_threads,), (os.nice, 0), (signal.getsignal, signal.SIGINT)]
        assert watch(pool, apply, jobs) == [1, min(19, os.nice(0) + 5), signal.SIG_IGN]
        with pytest.raises(_Lost, match="got 2 lost .*a worker process died.*; fix: "): watch(pool, os._exit, [(1,), (1,)])
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
        def run(self, f, path, on_error): return {"tcp://near": f(path), "tcp://far": f(path.replace("store", "elsewhere"))}
    with pytest.raises(OSError, match="a folder that all workers see .* got 1 without, tcp://far first; fix: "):
        _try_workers(Client(), tmp_path / "store")
    assert not list((tmp_path / "store").iterdir())

def test_a_worker_that_does_not_answer_is_passed_over_and_one_without_the_package_is_told(tmp_path):
    distributed = pytest.importorskip("distributed")
    class Client:
        def __init__(self, wrong): self.wrong = wrong
        def run(self, f, path, on_error): return {"tcp://near": f(path), "tcp://gone": self.wrong}
    for gone in (distributed.comm.CommClosedError("gone"), TimeoutError(), ConnectionRefusedError()):
        _try_workers(Client(gone), tmp_path)
    with pytest.raises(ImportError): _try_workers(Client(ImportError("no module")), tmp_path)

@pytest.fixture
def certificates(tmp_path):
    "What Dask's configuration names for TLS: a certificate that signs itself, and its key."
    dask = pytest.importorskip("distributed") and pytest.importorskip("dask")
    if not shutil.which("openssl"): pytest.skip("needs openssl")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
                    "-subj", "/CN=dask"], check=True, capture_output=True)
    ends = {f"distributed.comm.tls.{end}.{n}": v for end in ("client", "scheduler", "worker")
            for n, v in (("cert", cert), ("key", key))}
    with dask.config.set({"distributed.comm.tls.ca-file": cert} | ends): yield cert

def test_an_encrypted_cluster_is_reached_by_what_dasks_own_configuration_names(certificates, tmp_path):
    import distributed
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None,
                                  host="127.0.0.1", protocol="tls://", security=distributed.Security()) as cluster:
        assert (at := cluster.scheduler_address).startswith("tls://")
        with open_executor(at, tmp_path, timeout=5) as pool: assert watch(pool, divmod, [(7, 2)]) == [(3, 1)]
        with pytest.raises(OSError, match="expected a Dask scheduler that answers; got .*fix: "):
            with open_executor(at.replace("tls", "tcp"), timeout=1): pass

def test_an_encrypted_address_without_certificates_is_refused_in_one_line():
    pytest.importorskip("distributed")
    with pytest.raises(OSError, match="tls://node:8786: expected certificates in Dask's configuration; .*fix: set ") as e:
        with open_executor("tls://node:8786"): pass
    assert "\n" not in str(e.value)

OWN = '''
import pandas as pd, torch
from moe_redistribution import Router, Task, register
from moe_redistribution.models.condition import RECIPES

@register("task", "even", recipe=dict(RECIPES["add7"], d_model=16, d_head=8, batch=8, steps=20, eval_every=10), rules=("first99",))
def made():
    "Is the number of ones in four bits even?"
    bits = torch.cartesian_prod(*[torch.arange(2)] * 4)
    return Task("even", d_vocab=3, d_vocab_out=2, causal=True, tied=False, read=(4,), scored=(0,), positions=("even",),
                vocab=("0", "1", "="), tokens=torch.cat([bits, torch.full((16, 1), 2)], 1),
                targets=1 - bits.sum(1)[:, None] % 2, strata=pd.DataFrame({"ones": bits.sum(1)}))

@register("router", "halved")
class Halved(Router):
    "Logits of half the size."
    def logits(self, held, x, c): return super().logits(held, x, c) * .5
'''
OWN_NAME = "even/moe-e2k1-h8-silu+halved"

@pytest.fixture
def own(own_file, tmp_path):
    "Trains what a file of one's own brings, a group a seed, into a store of this name."
    own_file.write_text(OWN)
    import_file(own_file)
    def go(store, executor, steps=20, seeds=(1, 2)):
        return train(OWN_NAME, seeds, "paired", "full", tmp_path / store, steps=steps, group_size=1, executor=executor, quiet=True)
    return go

@contextmanager
def two_workers(**how):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None,
                                  host="127.0.0.1", silence_logs="CRITICAL", **how) as cluster: yield cluster

def test_code_of_ones_own_trains_on_two_dask_workers_as_in_one_process(own, tmp_path):
    with two_workers() as cluster: rows = own("far", cluster.scheduler_address)
    assert rows["step"].tolist() == [20, 20]
    own("near", "here")
    assert_same_runs(tmp_path / "far", tmp_path / "near", OWN_NAME, [1, 2], "paired")

@pytest.mark.audit
def test_code_of_ones_own_trains_as_jobs_of_a_batch_system_as_in_one_process(own, tmp_path):
    "submitit for real, by the file that --executor names, each job a process of its own on this machine."
    pytest.importorskip("submitit")
    (path := tmp_path / "jobs.json").write_text('{"cluster": "local", "at_once": 2, "timeout_min": 3}')
    assert own("far", f"slurm:{path}")["step"].tolist() == [20, 20]
    assert len(list((tmp_path / "far" / "slurm").glob("*_result.pkl"))) == 2
    own("near", "here")
    assert_same_runs(tmp_path / "far", tmp_path / "near", OWN_NAME, [1, 2], "paired")

@pytest.mark.audit
def test_code_of_ones_own_given_to_two_workers_is_trained_once_though_one_is_killed_in_the_middle(own, tmp_path):
    "The same group on both workers of a real cluster at once; whoever has its lock is killed, and the other goes on."
    job, far = Training(OWN_NAME, (1, 2), "paired", "full", 2, 600), Store(tmp_path / "far")
    with two_workers() as cluster, dask_client("127.0.0.1", int(cluster.scheduler_address.rpartition(":")[2]), far.root) as c:
        both = [c.submit(_carry_with, job.files, job, str(far.root), None, None, .1, "cpu", workers=[w], pure=False,
                         allow_other_workers=True) for w in c.scheduler_info()["workers"]]
        wait_until(lambda: list(far.root.glob("groups/**/*.state")) and sum(map(len, c.processing().values())) == 2)
        said, = {p.read_text() for p in far.root.glob("v1/**/*.lock")}
        os.kill(int(re.match(r"process (\d+) on ", said)[1]), signal.SIGKILL)
        assert not any(x.done() for x in both)                                      # in the middle of it
        assert c.gather(both) == [True, True]
    train(OWN_NAME, [1, 2], "paired", "full", tmp_path / "near", steps=600, group_size=2, executor="here", quiet=True)
    assert_same_runs(far, tmp_path / "near", OWN_NAME, [1, 2], "paired")
    assert not list(far.root.glob("groups/**/*.state"))

@pytest.mark.audit
def test_a_machine_that_is_lost_while_the_cluster_is_opened_is_no_wrong_version(tmp_path):
    "One of two workers falls silent, and is gone two seconds after it was asked: the runs are there in the end."
    with two_workers() as cluster:
        with open_executor(cluster.scheduler_address) as pool: pid, = watch(pool, eval, [("__import__('os').getpid()",)])
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(2, os.kill, (pid, signal.SIGKILL)).start()
        rows = train(NAMES, [1, 2], "paired", "full", tmp_path / "far", steps=200, quiet=True, executor=cluster.scheduler_address)
    assert len(rows) == 4
    train(NAMES, [1, 2], "paired", "full", tmp_path / "near", steps=200, executor="here", quiet=True)
    assert_same_runs(tmp_path / "far", tmp_path / "near", NAMES, [1, 2], "paired")

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

@pytest.mark.parametrize("said, says", [
    (None, "a file in JSON; got .*No such file"), ("{", "a file in JSON"), ("[1]", "a file in JSON; got list"),
    ({"mem": 4}, "'mem'; nearest: 'mem_gb'; fix: "), ({"slurm_partiton": "gpu"}, "nearest: 'slurm_partition'; fix: "),
    ({"nodes": 2}, "'nodes'; nearest: "), ({"mem_gb": "4"}, "expected a number above 0; got '4'; nearest valid: 4.0; fix: "),
    ({"timeout_min": 1.5}, "a whole number from 1 on; got 1.5"), ({"at_once": True}, "a whole number from 1 on; got True"),
    ({"mem_gb": 0}, "a number above 0; got 0"), ({"gpus_per_node": 2}, "0 or 1, for a group uses one card; got 2"),
    ({"cluster": "locl"}, "got 'locl'; nearest: 'local'; fix: "), ({"name": 3}, "a word; got 3")], ids=repr)
def test_a_wrong_word_in_the_file_for_slurm_is_refused_in_one_message(said, says, tmp_path):
    pytest.importorskip("submitit")
    path = tmp_path / "jobs.json"
    if said is not None: path.write_text(said if isinstance(said, str) else json.dumps(said))
    with pytest.raises(ValueError, match=f"jobs.json.*{says}") as e: processes(f"slurm:{path}")
    assert "\n" not in str(e.value) and "fix: " in str(e.value)

def test_the_file_for_slurm_reaches_the_job_that_slurm_is_given(tmp_path, monkeypatch):
    "With a stand-in for sbatch and srun: what the script of a job asks for, one card for its group."
    pytest.importorskip("submitit")
    for name, text in (("srun", "exit 0"), ("sbatch", 'cp "$1" "$(dirname $0)/asked.sh"; echo "no such partition" >&2; exit 1')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (path := tmp_path / "jobs.json").write_text(json.dumps(dict(mem_gb=6, timeout_min=90, gpus_per_node=1, at_once=3,
                                                                slurm_partition="gpu")))
    assert processes(f"slurm:{path}") == 3
    with pytest.raises(RuntimeError, match="executor slurm: expected a machine from which srun.*fix: "):
        monkeypatch.setenv("PATH", "/nowhere")
        with open_executor(f"slurm:{path}", tmp_path / "store"): pass
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    with open_executor(f"slurm:{path}", tmp_path / "store") as pool, \
            pytest.raises(RuntimeError, match="one that the batch system takes; got .*no such partition.*; fix: "):
        watch(pool, divmod, [(7, 2)])
    asked = (tmp_path / "asked.sh").read_text()
    for line in ("mem=6GB", "time=90", "gpus-per-node=1", "partition=gpu", "nodes=1"): assert f"#SBATCH --{line}\n" in asked

@pytest.mark.audit
def test_a_job_that_the_batch_system_lost_is_named_with_its_log(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 0)
    (path := tmp_path / "jobs.json").write_text('{"cluster": "local", "at_once": 2}')
    with open_executor(f"slurm:{path}", tmp_path) as pool:
        with pytest.raises(_Lost, match=r"of 2; got 1 lost .*_exit.*job \d+, .*, log .*_0_log.err"):
            watch(pool, eval, [("__import__('os')._exit(1)",), ("7 // 2",)])

class Unsent(Exception):
    def __init__(self, a, b): super().__init__(f"{a} and {b}")

def test_an_error_comes_from_a_batch_system_as_it_was_raised():
    "The job's answer travels as submitit has it, through a file; what cannot be sent is told in words."
    class Queue:
        def submit(self, f, *args):
            sent = pickle.dumps(f(*args))
            return type("Job", (), dict(result=lambda job: pickle.loads(sent)))()
    def wrong(e): raise e
    with JobPool(Queue()) as pool:
        with pytest.raises(ValueError, match="^task: .*fix: x$") as e: watch(pool, wrong, [(ValueError("task: fix: x"),)])
        assert "in wrong" in str(e.value.__cause__)                                     # where it happened is not lost
        with pytest.raises(Exception, match="one and two$"): watch(pool, wrong, [(Unsent("one", "two"),)])

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

@pytest.mark.parametrize("where, status", [("dask://node:8786", 0), ("slurm:jobs.json", 0), ("local:2", 2)])
def test_a_machine_without_a_gpu_may_send_groups_to_those_that_have_one(where, status, monkeypatch, tmp_path, capsys):
    from moe_redistribution.record import cli, work
    monkeypatch.setenv("MOE_REDISTRIBUTION_HOME", str(tmp_path)), monkeypatch.chdir(tmp_path)
    pytest.importorskip("submitit") and Path("jobs.json").write_text('{"gpus_per_node": 1}')
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(work, "run_all", lambda todo, **how: seen.append(how["executor"]))
    seen = []
    assert cli.main(["train", NAMES[0], "--seeds", "1", "--device", "cuda", "--executor", where]) == status
    assert seen == [where] * (status == 0) and ("a GPU that torch can use" in capsys.readouterr().err) == (status == 2)

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
