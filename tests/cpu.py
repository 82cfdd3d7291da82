"""What tests and notebooks take, in seconds of CPU: which go first, what a run costs, and whether CI may cost that.

A second is worth what the machine is, and whatever else it does. So each worker of a run also takes a thousand steps of the engine,
half before its tests and half after them, and the run is counted in these. `.ci/budget` is how many CI may take, `NOISE` aside; it may
only fall. durations.csv is what each file and notebook took when `make durations` last wrote it: what takes longest goes first, so that
no core waits for the last of the others."""
import csv
import os
import re
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
DURATIONS, BUDGET = HERE / "durations.csv", HERE.parent / ".ci/budget"
TOGETHER = {"nbs/03_training/03c_compiled.ipynb": "tests/test_groups.py"}       # one compiles the step, the other finds it
NOISE, SHOWN = .4, 20           # part of the budget by which two machines may differ: 436 on the one that has measured it

ELSEWHERE = []                  # what processes took that serve this one until it ends

def cpu(): return sum(os.times()[:4]) + sum(ELSEWHERE)  # of this process, and of its children that have ended

def durations() -> dict:
    with open(DURATIONS, newline="", encoding="utf-8") as lines: return {n: float(s) for n, s in csv.reader(lines)}

def said_by_times(text) -> float:
    "The sum of what bash's `times` prints, such as 1m2.250s, of the shell itself and of its children."
    return sum(60 * float(m) + float(s) for m, s in re.findall(r"(\d+)m([\d.]+)s", text))

def is_ci(): return "CPU_BEFORE" in os.environ          # two files of what `times` said: after set-up, and before the tests

def counted_as(item) -> str:
    "A notebook by itself, a test with its file: its tests share what fixtures make, so one worker does them all."
    return getattr(getattr(item, "callspec", None), "params", {}).get("notebook") or item.location[0]

def half_a_thousand_steps() -> float:
    from moe_redistribution.models.condition import condition
    from moe_redistribution.training.loop import init_members, train_interval
    members, before = init_members(condition("add7/moe-e4k1-h256-silu"), [1], "paired"), cpu()
    train_interval(members, 500)
    return cpu() - before

class Worker:
    "Counts what each of its items takes, and what the whole process does."
    def __init__(self, config): self.config, self.last, self.steps = config, cpu(), 0.

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        took = durations()
        for item in items: item.add_marker(pytest.mark.xdist_group(TOGETHER.get(name := counted_as(item), name)))
        items.sort(key=lambda item: -took.get(counted_as(item), 0))          # stable: the tests of a file stay together
        if hasattr(self.config, "workerinput"): self.steps = half_a_thousand_steps()
        self.last = cpu()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report, now = (yield).get_result(), cpu()
        report.took, self.last = (counted_as(item), now - self.last), now

    def pytest_sessionfinish(self):
        if not hasattr(self.config, "workeroutput"): return
        took = cpu() - self.steps
        self.config.workeroutput |= dict(took=took, steps=self.steps + half_a_thousand_steps())

class Sum:
    "Adds up what all workers took, and says it; a CI that takes more than its budget fails."
    def __init__(self): self.of, self.workers = Counter(), []

    def pytest_runtest_logreport(self, report): self.of[report.took[0]] += report.took[1]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        if "steps" in (told := getattr(node, "workeroutput", {})): self.workers.append(told)

    def counted(self) -> tuple:
        "(seconds of this run, and of what CI did before it; those of a thousand steps; their ratio)"
        began, until = (said_by_times(Path(p).read_text()) for p in os.environ["CPU_BEFORE"].split()) if is_ci() else (0, 0)
        took = until - began + sum(os.times()[:2]) + sum(w["took"] for w in self.workers)    # its children are the workers
        step = sum(w["steps"] for w in self.workers) / len(self.workers)
        return took, step, took / step

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if not self.workers or not is_ci() or session.exitstatus: return
        if self.counted()[2] > float(BUDGET.read_text()) * (1 + NOISE): session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter, config):
        if config.getoption("write_durations"):
            DURATIONS.write_text("".join(f"{n},{s:.1f}\n" for n, s in sorted(self.of.items(), key=lambda x: (-x[1], x[0]))))
        if not self.workers: return
        (took, step, ratio), say = self.counted(), terminalreporter.write_line
        terminalreporter.section(f"seconds of CPU: the {SHOWN} of {len(self.of)} files and notebooks that take most")
        for name, s in self.of.most_common(SHOWN): say(f"{s:7.1f}  {name}")
        say(f"{sum(self.of.values()):7.1f}  all of them")
        say(f"{took:7.1f}  and workers, collection" + ", and what CI did before" * is_ci())
        say(f"{step:7.2f}  a thousand steps of the engine: {ratio:.0f} of these, of which CI may take "
            f"{float(BUDGET.read_text()):.0f} and {NOISE:.0%}")
