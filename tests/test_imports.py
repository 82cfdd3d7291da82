"""What a command does not need is not imported before it: pictures, fits and real models cost more than torch."""
import re
import resource
import subprocess
import sys

import pytest

import moe_redistribution as mr
from moe_redistribution.evidence.table_files import ROOT

PARTS = "basics tasks models training instruments judge evidence language opened guard record".split()
HEAVY = {"matplotlib", "scipy", "sklearn", "transformers"}

def fresh(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
NUMBA = "inner_loops", "compiled"               # of the extra `fast`, as a whole

def test_no_room_of_the_library_imports_what_only_some_of_its_functions_need():
    rooms = [f"moe_redistribution.{p.parent.name}.{p.stem}" for part in PARTS
             for p in sorted((ROOT / "moe_redistribution" / part).glob("[!_]*.py")) if p.stem not in NUMBA]
    loaded = set(fresh(f"import sys, {', '.join(rooms)}; print(*sys.modules)").split())
    assert len(rooms) > 50 and {"torch", "moe_redistribution.record.cli"} < loaded and not HEAVY & loaded

AS_MAIN = """
import os, runpy, sys, warnings
import moe_redistribution.record.cli, matplotlib.pyplot, transformers
for name in [n for n in sys.modules if n.startswith("moe_redistribution.")]: del sys.modules[name]
warnings.simplefilter("ignore")
failed = []
for name in sys.argv[1:]:
    if not (child := os.fork()):
        sys.argv = [name, "--version"]
        try: runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as e: os._exit(e.code or 0)
        except BaseException as e: print(type(e).__name__, e, file=sys.stderr), os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]: failed.append(name)
print("failed:", *failed)
"""

def as_main(*names): return subprocess.run([sys.executable, "-c", AS_MAIN, *names], capture_output=True, text=True)

MODULES = [".".join(p.relative_to(ROOT).with_suffix("").parts)
           for p in sorted((ROOT / "moe_redistribution").rglob("*.py")) if p.stem not in ("__init__", "_modidx")]

def test_a_module_of_the_library_that_registers_something_runs_as_main():
    "`python -m` calls it `__main__`, as a user's own script is called: what it registers was taken for a user's."
    names = ["moe_redistribution.__main__", "moe_redistribution.record.cli", "moe_redistribution.basics.commands",
             "moe_redistribution.instruments.ablation", "moe_redistribution.studies.parrots.study"]
    assert {*names} < {*MODULES} and (done := as_main(*names)).stdout.endswith("failed:\n"), done.stderr

@pytest.mark.audit
def test_every_module_of_the_library_runs_as_main():
    assert len(MODULES) > 120 and (done := as_main(*MODULES)).stdout.endswith("failed:\n"), done.stderr

def cpu(script):
    "Seconds of CPU that a fresh interpreter takes, the least of three."
    def once():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        fresh(script)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return min(once() for _ in range(3))

HELP = "import sys; from moe_redistribution.record.entry import enter; sys.argv[1:] = ['--help']; sys.exit(enter())"

@pytest.mark.audit
def test_help_takes_little_more_than_the_import_of_torch():
    assert cpu(HELP) < 1.3 * cpu("import torch")

@pytest.mark.audit
def test_the_ledger_of_an_item_takes_two_seconds_beyond_its_imports():
    said = HELP.replace("'--help'", "'ledger', '--item', 'tab1'")
    assert cpu(said) < 2 + cpu("import moe_redistribution.record.cli, scipy.stats")

def test_no_page_test_or_tool_asks_for_a_room_under_an_old_name():
    old = {part: "|".join(" ".join(rooms.values()).split()) for part, rooms in mr.MOVED.items()}
    asked = re.compile("|".join(rf"moe_redistribution\.{part}(?:\.| import (?:[\w, ]*, )?)(?:{rooms})\b" for part, rooms in old.items()))
    files = [p for part, kind in (("nbs", "*.ipynb"), ("tests", "*.py"), ("tools", "*.py")) for p in sorted((ROOT / part).rglob(kind))]
    assert asked.search("from moe_redistribution.tasks import data, kinds") and asked.search("moe_redistribution.language.opened")
    found = {p.name: asked.findall(p.read_text(encoding="utf-8")) for p in files if p.name != "all_you_can_call.ipynb"}
    found["test_imports.py"] = found["test_imports.py"][2:]
    assert not {n: x for n, x in found.items() if x}
