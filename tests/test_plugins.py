"What `pip install` brings is registered by an entry point, as a file is by `--import`."
import os
from pathlib import Path

import pytest
from fresh import python
from test_executors import OWN

# the task and the router of test_executors under other names, with a size from a file of the package
KINDS = OWN.replace('"even", ', '"NAME", ').replace('"halved"', '"halved_NAME"').replace(
    "* .5", "* HALF").replace("import pandas", "from my_tasks.size import HALF\nimport pandas")
COMMAND = '''
from moe_redistribution.basics.commands import command
@command("greet", "says hello", "greet")
def greet(args): print("hello")
'''

def install(site, dist, version="1.0", name="parity", kinds=None, package=None):
    "A distribution as pip leaves it in a folder: its modules, and a dist-info with entry points and a record."
    package = package or dist.replace("-", "_")
    (home := site / package).mkdir(parents=True)
    files = {"__init__.py": "", "size.py": "HALF = .5\n", "kinds.py": (kinds or KINDS.replace("NAME", name)).replace("my_tasks", package)}
    for file, text in files.items(): (home / file).write_text(text)
    (info := site / f"{package}-{version}.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[moe_redistribution.kinds]\nown = {package}.kinds\n")
    (info / "RECORD").write_text("".join(f"{package}/{f},,\n" for f in files))
    return home

@pytest.fixture
def site(tmp_path):
    (path := tmp_path / "site-packages").mkdir()
    return path

def run(site, *words, code=None):
    "A fresh Python that has the folder on its path: a command, or some code."
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(site), os.environ.get("PYTHONPATH", str(Path(__file__).parent.parent))]),
                            MOE_REDISTRIBUTION_HOME=str(site.parent / "home"))
    asked = ["-c", code] if code else ["-m", "moe_redistribution", *words]
    return python(*asked, env=env, cwd=site.parent)

def said(site, code):
    done = run(site, code=code)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()

def test_kinds_say_which_version_of_what_brings_a_thing_and_the_import_loads_nothing(site):
    install(site, "my-tasks", "1.2")
    (site / "my_tasks" / "kinds.py").open("a").write(COMMAND)
    done = run(site, "kinds", "--csv")
    own = {tuple(line.split(",")[:2]) for line in done.stdout.splitlines() if line.endswith(",my-tasks 1.2")}
    assert own == {("task", "parity"), ("recipe", "parity"), ("rules", "parity"), ("router", "halved_parity"), ("command", "greet")}
    assert not done.stderr and run(site, "greet").stdout == "hello\n" and "says hello" in run(site, "--help").stdout
    lazily = ("import sys, moe_redistribution, moe_redistribution.models.condition as m; print('my_tasks' in sys.modules);"
              "m.RECIPES['add7'], 'add7' in m.RECIPES; print('my_tasks' in sys.modules);"
              "print('parity' in m.RECIPES, 'my_tasks.kinds' in sys.modules)")
    assert said(site, lazily) == ["False", "False", "True", "True"]

WHOLE = ("from moe_redistribution import condition, train, registered_things; from pathlib import Path\n"
         "if __name__ == '__main__':\n"
         "    c = condition('parity/moe-e2k1-h8-silu+halved_parity'); print(c.key)\n")

def test_what_is_trained_with_a_plug_in_has_its_files_in_the_key_and_workers_load_it(site):
    home = install(site, "my-tasks")
    keys = said(site, WHOLE)
    assert said(site, "import my_tasks.kinds\n" + WHOLE) == keys                                      # however it came in
    (home / "size.py").write_text("HALF = .25\n")
    (home / "kinds.py").write_text((home / "kinds.py").read_text() + "\nimport os; os.environ.get('MY_SCALE')\n"
                                   "from pathlib import Path; (Path(__file__).parent / 'a.txt').read_text()\n")
    (home / "a.txt").write_text("one")
    keys += said(site, WHOLE)
    (home / "a.txt").write_text("two")
    keys += said(site, WHOLE)
    assert len({*keys}) == 3
    done = run(site, "train", "parity/moe-e2k1-h8-silu+halved_parity", "--seeds", "1,2", "--executor", "local", "--stream", "paired")
    assert done.returncode == 0 and "Nothing is missing" in done.stdout + done.stderr, done.stderr

BROKEN = {
    "an import that fails": ("import nothing_of_this_name", "No module named 'nothing_of_this_name'; fix: mend kinds.py, line 1"),
    "an exit": ("raise SystemExit(3)", "SystemExit: 3; fix: mend kinds.py, line 1"),
    "a name of the library": (KINDS.replace("NAME", "add7"), "'add7', which is taken"),
    "a function of the library": ("import moe_redistribution.tasks.data as d\nd.split = print", "tasks.data.split replaced; it is put back")}

def test_a_plug_in_that_fails_is_a_warning_that_names_it_and_all_else_goes_on(site):
    install(site, "my-tasks")
    for i, (text, _) in enumerate(BROKEN.values()): install(site, f"bad{i}-tasks", "2.0", kinds=text)
    (install(site, "gone-tasks") / "kinds.py").unlink()
    done = run(site, "kinds", "--csv")
    assert done.returncode == 0 and "parity" in done.stdout and "bad" not in done.stdout, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(BROKEN) + 1 and "plug-in gone-tasks 1.0, entry own = gone_tasks.kinds" in lines[-1], done.stderr
    for i, (line, (_, says)) in enumerate(zip(lines, BROKEN.values())):
        assert f"plug-in bad{i}-tasks 2.0, entry own = bad{i}_tasks.kinds: " in line and says in line, line
        assert f"pip uninstall bad{i}-tasks" in line, line
    assert run(site, "--version").stderr == ""

def test_what_others_code_prints_while_it_is_imported_is_no_part_of_a_table(site):
    install(site, "my-tasks")
    (site / "my_tasks" / "kinds.py").open("a").write("\nprint('loud')\n")
    (mine := site.parent / "mine.py").write_text("print('louder')\n")
    done = run(site, "kinds", "event", "--csv", "--import", str(mine))
    assert done.stdout.startswith("kind,name,") and {"loud", "louder"} <= {*done.stderr.splitlines()}, done.stdout

def test_a_name_that_two_plug_ins_bring_is_neithers_and_both_are_named(site):
    install(site, "a-tasks")
    install(site, "b-tasks", "3.1")
    install(site, "one-tasks", name="single")
    done = run(site, "kinds", "--csv")
    assert "task parity: expected one plug-in that brings it; got a-tasks 1.0 and b-tasks 3.1; neither" in done.stderr
    assert "task,parity" not in done.stdout and "task,single" in done.stdout and done.returncode == 0
    done = run(site, code="import b_tasks.kinds\nfrom moe_redistribution import get_task\nget_task('single')\nget_task('parity')")
    assert "a-tasks 1.0 and b-tasks 3.1" in (last := done.stderr.splitlines()[-1]) and "ValueError" in last, done.stderr

def test_a_file_of_ones_own_does_not_take_the_name_of_a_plug_in(site):
    install(site, "my-tasks")
    (site.parent / "mine.py").write_text(KINDS.replace("NAME", "parity").replace("my_tasks.size", "size"))
    (site.parent / "size.py").write_text("HALF = .5")
    done = run(site, "kinds", "--import", "mine.py")
    assert done.returncode == 2 and "'parity', which is taken" in done.stderr

STUDY = '''
from moe_redistribution import Preset, Study, register
from moe_redistribution.instruments.rows import rows
from pathlib import Path
MORE = float((Path(__file__).parent / "more.txt").read_text())
def run(arm, seeds, settings, desk): return rows([MORE * s for s in seeds], seeds, condition=arm, metric="letters")
register("study", "words", Study("words", "How long?", {"small": Preset("", {"a": [1, 2]})}, run, lambda *a: 1.))
'''

@pytest.mark.audit
@pytest.mark.parametrize("by", ["entry point", "--import"])
def test_a_study_that_reads_a_file_of_its_own_goes_to_workers(site, by):
    home = install(site, "my-tasks", kinds=STUDY) if by == "entry point" else site.parent
    (home / "more.txt").write_text("3")
    (home / "mine.py").write_text(STUDY)
    done = run(site, "study", "words", "--preset", "small", "--executor", "local", *["--import", "mine.py"] * (by == "--import"))
    assert done.returncode == 0 and "2 rows in out/words.small.parquet" in done.stdout, done.stderr
