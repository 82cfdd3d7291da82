"""The package as somebody has it who installed it: imported late, typed, and plain about what needs a clone."""
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

try:
    import tomllib
except ModuleNotFoundError:                             # Python 3.10, where pytest brings it
    import tomli as tomllib

from fresh import python
from moe_redistribution.evidence.table_files import ROOT

LIB = ROOT / "moe_redistribution"
PARTS = set("basics tasks models training instruments judge evidence report language studies opened guard record".split())
PROJECT = (ROOT / "pyproject.toml").read_text()

def run(args, cwd, **env):
    "A fresh Python in a folder, told `args`."
    return subprocess.run([sys.executable, *args], cwd=cwd, env=os.environ | env, capture_output=True, text=True)

def test_the_package_imports_nothing_until_a_part_is_asked_for(tmp_path):
    out = run(["-c", """
import sys, moe_redistribution as m
print(*dir(m)); print(*[n for n in sys.modules if n.split(".")[0] in {"torch", "numpy", "pandas", m.__name__}])
print(m.basics.errors.nearest("ad7", ["add7"])); print(*dir(m.basics)); print("torch" in sys.modules)
try: m.taks
except AttributeError as e: print(e)
"""], tmp_path, PYTHONPATH=str(ROOT)).stdout.splitlines()
    assert PARTS < set(out[0].split()) and "__version__" in out[0], out
    assert out[1] == "moe_redistribution" and out[2] == "nearest: 'add7'"
    assert {"errors", "kinds", "registry"} < set(out[3].split()) and out[4] == "False"
    assert "got 'taks'; nearest: 'tasks'; fix: " in out[5]

def test_every_part_lists_its_rooms():
    import moe_redistribution as m
    assert {p.name for p in LIB.iterdir() if p.is_dir() and p.name[0] != "_"} == PARTS
    for part in PARTS:
        rooms = {p.stem for p in (LIB / part).iterdir() if p.stem[0] != "_" and p.suffix in ("", ".py")}
        assert rooms and rooms <= set(dir(getattr(m, part))), part

def test_a_command_that_needs_the_clone_says_so_at_once(tmp_path):
    "With nothing but the package, as a wheel leaves it: one message, and nothing trained, stored or written before it."
    shutil.copytree(LIB, tmp_path / "site" / LIB.name, ignore=shutil.ignore_patterns("__pycache__"))
    commands = ["reproduce --seeds 42", "record", "rows tab7.006", "ledger", "check", "check --demo",
                "check --layer answers"]
    out = python("-c", f"""
from moe_redistribution.record.cli import main
for c in {commands}: print(main(c.split()), flush=True)
""", cwd=tmp_path, env=os.environ | dict(PYTHONPATH=str(tmp_path / "site"), MOE_REDISTRIBUTION_HOME=str(tmp_path / "home")))
    assert out.stdout.split() == ["2"] * 7 and out.stderr.count("\n") >= 7, (out.stdout, out.stderr)
    for line in out.stderr.splitlines():
        assert "expected beside the package" in line and line.endswith("clone the repository, then pip install -e .")
    assert {p.name for p in tmp_path.iterdir()} == {"site"} and len([*(tmp_path / "site").iterdir()]) == 1

def test_what_is_promised_is_what_the_classifiers_and_make_say():
    project = tomllib.loads(PROJECT)["project"]
    versions = [c.rsplit(" ")[-1] for c in project["classifiers"] if "Python :: 3." in c]
    assert project["requires-python"] == f">={versions[0]},<3.{int(versions[-1][2:]) + 1}"
    made = (ROOT / "Makefile").read_text()
    assert f"{versions[0].replace('.', ', ')}) <= sys.version_info" in made
    assert f"\nVERSIONS := {versions[0]} {versions[-1]}\n" in made
    assert "$(MAKE) --no-print-directory versions ||" in made.partition("\naudit:")[2].partition("\n\n")[0]

def test_a_python_that_is_not_there_is_said_not_to_be_and_one_that_fails_is_an_error(tmp_path):
    def versions(*said):
        return subprocess.run(["make", "-s", "versions", *said], cwd=ROOT, capture_output=True, text=True)
    absent = versions("VERSIONS=3.98 3.99")
    assert absent.returncode == 0 and absent.stdout.splitlines() == [
        f"Python {v}: not there, nothing ran on it" for v in ("3.98", "3.99")], absent.stderr
    (tmp_path / "python3.98").write_text("#!/bin/sh\n[ \"$1\" = -V ]\n"), (tmp_path / "python3.98").chmod(0o755)
    wrong = versions("VERSIONS=3.98", f"PATH={tmp_path}:{os.environ['PATH']}")
    assert wrong.returncode and "Tests failed on Python: 3.98" in wrong.stderr

def test_what_the_package_runs_with_has_no_bound_that_only_nbdev_needs():
    project = tomllib.loads(PROJECT)["project"]
    assert "fastcore>=1.12.3" in project["dependencies"] and "fastcore<2" in project["optional-dependencies"]["dev"]

@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "What pip makes of the tree: the files of the wheel, unpacked."
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"): shutil.copy(ROOT / name, folder)
    shutil.copytree(LIB, folder / LIB.name, ignore=shutil.ignore_patterns("__pycache__"))
    made = run("-m pip wheel -q --no-deps --no-build-isolation -w out .".split(), folder)
    assert made.returncode == 0, made.stderr
    zipfile.ZipFile(next((folder / "out").glob("*.whl"))).extractall(folder / "site")
    return folder / "site"

@pytest.mark.audit
def test_the_wheel_has_every_module_and_file_of_the_package(wheel):
    def files(at): return {p.relative_to(at).as_posix() for p in at.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert files(wheel / LIB.name) == files(LIB) and "py.typed" in files(LIB)

@pytest.mark.audit
@pytest.mark.parametrize("commands, said", [
    (["--version"], "moe-redistribution "), (["--help"], "reproduce"), (["kinds"], "expert"),
    (["conditions --item tab1"], "add7"), (["study --list"], "granularity"),
    (["train add7/ffn-h16-gelu --seeds 1 --steps 200 --executor here",
      "measure add7/ffn-h16-gelu --seeds 1 --steps 200"], "rows")], ids=lambda x: x[-1] if isinstance(x, list) else "")
def test_commands_of_the_wheel_work_in_an_empty_folder(commands, said, wheel, tmp_path):
    (tmp_path / "empty").mkdir()
    for command in commands:
        out = run(["-m", "moe_redistribution", *command.split()], tmp_path / "empty", PYTHONPATH=str(wheel),
                  MOE_REDISTRIBUTION_HOME=str(tmp_path / "home"))
        assert out.returncode == 0, out.stderr
    assert said in out.stdout, out.stdout[-500:]
    assert [p.name for p in wheel.iterdir() if p.suffix != ".dist-info"] == [LIB.name]

@pytest.mark.audit
def test_nbdev_of_today_exports_the_same_modules(tmp_path):
    "nbdev 3 reads `[tool.nbdev]` of pyproject.toml and no settings.ini; its index differs in the word for no address."
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "of_today")], check=True)
    tool = tmp_path / "of_today" / "bin"
    got = subprocess.run([tool / "pip", "install", "-q", "nbdev>=3,<4"], capture_output=True, text=True)
    if got.returncode: pytest.skip("no network: nbdev 3 is not to be had")
    subprocess.run([tool / "nbdev-export"], cwd=tmp_path / "clone", check=True)
    diff = subprocess.run(["git", "diff", "-U0"], cwd=tmp_path / "clone", capture_output=True, text=True).stdout
    changed = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert [line.replace("'doc_baseurl': '/'", "'doc_baseurl': ''")[1:] for line in changed[1:]] == [changed[0][1:]], changed
