"""What a run costs is written down, adds up, and may only become less."""
import re
import subprocess

import pytest

import cpu
from cpu import BUDGET, HERE, durations, said_by_times
from test_notebooks import NOTEBOOKS

def test_every_file_of_tests_and_every_notebook_has_its_seconds_and_nothing_else_has():
    assert {*durations()} ^ {*NOTEBOOKS, *(f"tests/{p.name}" for p in HERE.glob("test_*.py") if p.stem != "test_notebooks")} == set(), \
        "make durations"
    assert [*durations().values()] == sorted(durations().values(), reverse=True)

def test_what_takes_longest_goes_first_and_the_tests_of_a_file_stay_together(request):
    took, names = durations(), [*dict.fromkeys(map(cpu.counted_as, request.session.items))]
    assert names == sorted(names, key=lambda n: -took.get(n, 0))

def test_what_a_shell_says_of_its_children_is_counted():
    assert said_by_times("0m0.500s 0m0.250s\n12m1.25s 1m0.000s\n") == 782

@pytest.mark.parametrize("ratio, fails", [(.9, False), (1.1, False), (1.5, True)])
def test_a_ci_that_takes_more_than_its_budget_fails_and_another_run_does_not(ratio, fails, tmp_path, monkeypatch):
    (a := tmp_path / "a").write_text("0m0s 0m0s"), (b := tmp_path / "b").write_text("0m0s 0m0s")
    class Session: exitstatus = 0
    for ci in (True, False):
        own, session = cpu.Sum(), Session()
        own.workers = [dict(took=float(BUDGET.read_text()) * 1e6 * ratio / 2, steps=1e6)] * 2        # beside which this process is nothing
        monkeypatch.setenv("CPU_BEFORE", f"{a} {b}") if ci else monkeypatch.delenv("CPU_BEFORE")
        own.pytest_sessionfinish(session)
        assert bool(session.exitstatus) == (fails and ci)

def test_the_budget_has_never_risen():
    done = subprocess.run(["git", "log", "--format=", "-p", "--", ".ci/budget"], cwd=HERE.parent, capture_output=True, text=True)
    was = [float(x) for x in re.findall(r"^\+(\d[\d.]*)$", done.stdout, re.M)]                                        # newest first
    assert [float(BUDGET.read_text()), *was] == sorted([float(BUDGET.read_text()), *was])
