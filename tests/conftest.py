"""One empty store, one thread, no screen and an ear for Ctrl-C, set before anything imports torch or matplotlib."""
import atexit
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

_home = tempfile.mkdtemp(prefix="moe_redistribution-")
atexit.register(shutil.rmtree, _home, ignore_errors=True)

os.environ.setdefault("HOME_OF_NOTEBOOKS", _home)  # one for all, of whoever starts the workers
os.environ["MOE_REDISTRIBUTION_HOME"] = _home  # never the user's own store
os.environ["OMP_NUM_THREADS"] = "1"  # one thread per process, as everywhere in this project
os.environ["MPLBACKEND"] = "Agg"
signal.signal(signal.SIGINT, signal.default_int_handler)  # `nohup` and a shell's background jobs are born deaf to it

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

import cpu  # noqa: E402

# Every core runs tests at once, and a first example may build a task: how long one takes says nothing about what it
# claims. A clean clone is judged by the same examples every time; `make audit` looks for new ones.
settings.register_profile("same", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=False,
                          max_examples=500)
settings.load_profile("same")

def pytest_addoption(parser):
    parser.addoption("--write-durations", action="store_true", help="write what each file took to tests/durations.csv")

    parser.addoption("--touched", help="only what a change of this part, or the changes since this commit, can break")

def pytest_configure(config):
    config.pluginmanager.register(cpu.Worker(config))
    if not hasattr(config, "workerinput"): config.pluginmanager.register(cpu.Sum())

def kept(config, path) -> bool:
    "Is a file of tests, or a notebook, among what was asked for?"
    if not (what := config.getoption("touched")): return True
    import promises
    return path in promises.touched(what)

def pytest_ignore_collect(collection_path, config):
    if re.match("test_(?!notebooks)", collection_path.name) and not kept(config, collection_path): return True

def pytest_collection_modifyitems(config, items):
    items[:] = [x for x in items if kept(config, x.path) or kept(config, cpu.HERE.parent / cpu.counted_as(x))]

@pytest.fixture(autouse=True)
def same_draws():
    "A test that draws without a seed draws the same whichever tests its worker had before."
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)

@pytest.fixture(autouse=True)
def same_numbers():
    "What a test, or a file that it imports, says of precision is said for that test."
    precision, dtype, threads = torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)

@pytest.fixture
def text(tmp_path):
    "A file of 1,650 characters."
    path = tmp_path / "text.txt"
    path.write_text("And God said, Let there be light: and there was light. " * 30)
    return path

@pytest.fixture
def home(tmp_path, monkeypatch):
    "A store of one's own, and a place where rows may be written."
    monkeypatch.setenv("MOE_REDISTRIBUTION_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"

@pytest.fixture
def own_file(tmp_path, monkeypatch):
    "Where a user's file may be written; what is registered in its folder no later test knows."
    from moe_redistribution.basics import kinds
    monkeypatch.setattr(sys, "path", list(sys.path))
    (path := tmp_path / "own" / "mine.py").parent.mkdir()
    yield path
    for file in list(kinds.FILES):
        if Path(file).parent == path.parent: kinds._forget(file), kinds.FILES.pop(file)
