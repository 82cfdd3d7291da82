"""Every notebook of the first tier runs from top to bottom, on an empty store, and no figure of it has ticks that overlap."""
import contextlib
import io
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import pytest

from cpu import ELSEWHERE, cpu

ROOT = Path(__file__).resolve().parent.parent
# A study's pages 5x and 9x (its audit, its appendices) and the two pages that measure speed are run by `make audit`: a change only looks
# whether what they import is there, and whether the rows they show are those that are recorded.
LATER = re.compile("[59]|07_bench|04_costs")
NOTEBOOKS = [n for p in sorted((ROOT / "nbs").rglob("*.ipynb")) if not LATER.match(p.name)
             and not re.search(r"/[_.]", n := p.relative_to(ROOT).as_posix())]

@lru_cache(None)
def process():
    "One that forks for each notebook of a worker, so that what these register and import is no test's and no other notebook's."
    import matplotlib.pyplot, nbdev.test  # noqa: E401, F401
    return ProcessPoolExecutor(1, get_context("fork"))

def run(path, ticks):
    "(does it run, what it says if not, its CPU seconds), of a notebook in a process of its own"
    here, there = get_context("fork").Pipe()
    (child := get_context("fork").Process(target=lambda: there.send(run_here(path, ticks)))).start()
    there.close()
    try: return here.recv()
    except EOFError: return False, f"{path}: its process ended", 0.
    finally: child.join()

def run_here(path, ticks):
    import matplotlib
    from nbdev.test import test_nb
    if (tools := str(ROOT / "tools")) not in sys.path: sys.path.append(tools)
    os.environ |= {"TICKS": str(ticks), "MOE_REDISTRIBUTION_HOME": os.environ["HOME_OF_NOTEBOOKS"]}
    os.environ.pop("MPLBACKEND", None)
    matplotlib.rcParams["figure.hooks"], before = ["ticks:watch"], cpu()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        good, _ = test_nb(path, skip_flags=["audit"], basepath=ROOT)
    return good, said.getvalue(), cpu() - before

@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_runs(notebook, tmp_path):
    good, said, seconds = process().submit(run, ROOT / notebook, ticks := tmp_path / "ticks").result()
    ELSEWHERE.append(seconds)
    assert good, said
    if ticks.exists(): assert not {*ticks.read_text(encoding="utf-8").splitlines()}
