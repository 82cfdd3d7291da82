"""Types and docstrings of what is public: nearly every argument has its type, every callable says what it does, and
pyright finds no contradiction (`make audit`, where it is installed)."""
import ast
import inspect
import json
import re
import shutil
import subprocess
import sys

import pytest
from fastcore.docments import docments

try:
    import tomllib
except ModuleNotFoundError:                             # Python 3.10, where pytest brings it
    import tomli as tomllib

from moe_redistribution.evidence.table_files import ROOT
from moe_redistribution.opened.opened import open_model
from moe_redistribution.training.groups import train
from moe_redistribution.training.study import run_study

LIB = ROOT / "moe_redistribution"
# What a study runs, and a router's class, is hashed with what it gave, hints and all: these are typed when they change
# for another reason, and of studies' rooms none is counted
ROOMS = {p.relative_to(LIB).as_posix(): ast.parse(p.read_text(encoding="utf-8")) for p in sorted(LIB.glob("*/*.py"))}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)

def public(tree):
    "Name → function of a module: what `__all__` has, methods of its classes, and what is patched into other classes."
    names = next((ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign)
                  and getattr(n.targets[0], "id", "") == "__all__"), [])
    for n in tree.body:
        patched = [ast.unparse(d).startswith("patch") for d in getattr(n, "decorator_list", ())]
        if isinstance(n, FUNCTION) and (n.name in names or any(patched) and n.name[0] != "_"): yield n.name, n
        if not isinstance(n, ast.ClassDef) or n.name not in names: continue
        yield n.name, n
        yield from ((f"{n.name}.{m.name}", m) for m in n.body
                    if isinstance(m, FUNCTION) and (m.name[0] != "_" or m.name == "__init__"))

def untyped(f):
    "(arguments without a type, how many there are) of a function, `self` and `*args` aside."
    own = [a for a in f.args.posonlyargs + f.args.args + f.args.kwonlyargs if a.arg not in ("self", "cls")]
    return [a.arg for a in own if a.annotation is None], len(own)

def test_seven_of_eight_public_arguments_say_their_type():
    found = {f"{room}: {name}": untyped(f) for room, tree in ROOMS.items() for name, f in public(tree)
             if isinstance(f, FUNCTION)}
    lost, n = sum(len(own) for own, _ in found.values()), sum(n for _, n in found.values())
    worst = {name: own for name, (own, _) in found.items() if own}
    assert n > 1000 and lost <= n / 8, f"{lost} of {n} arguments without a type, such as {dict([*worst.items()][:20])}"

def test_every_public_function_and_class_says_what_it_does():
    silent = [f"{room}: {name}" for room, tree in ROOMS.items() for name, f in public(tree)
              if "." not in name and not ast.get_docstring(f) and not any(
                  ast.unparse(d).startswith("patch") for d in f.decorator_list)]
    assert not silent, silent

@pytest.mark.parametrize("f", [train, run_study, open_model], ids=lambda f: f.__name__)
def test_every_argument_of_what_a_reader_calls_first_is_explained(f):
    said = docments(f, returns=False)
    lost = [n for n, text in said.items() if not text and f"`{n}`" not in inspect.getdoc(f)]
    assert len(said) > 6 and not lost, lost

CALL = re.compile(r'Argument of type "(.*)" cannot be assigned to parameter "(\w+)" of type "(.*)" in function "(\w+)"')
# what pyright does not know for sure: what libraries give, and a condition that `by_name` has read by then
UNSURE = re.compile(r"Series|DataFrame|Unknown|\bNone\b|\bAny\b|Module|Hashable|ndarray|NDArray|Subject"
                    r"|str \| Condition")

OLDEST = (3, 10)                                                               # pyproject.toml's, which few of us run

def too_new(text):
    "What the oldest Python does not read in some code: an index with a star that has no parentheses, and `except*`."
    if not re.search(r"except\s*\*|\*[\w.]+\s*[],]", text): return []                # quick, and true of most code
    try: tree = ast.parse(text, feature_version=OLDEST)
    except SyntaxError as e: return [str(e)]
    tuples = [n.slice for n in ast.walk(tree) if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Tuple)]
    starred = [t for t in tuples if any(isinstance(x, ast.Starred) for x in t.elts)]
    return [ast.unparse(t) for t in starred if ast.get_source_segment(text, t)[0] != "("]

def test_all_code_is_what_the_oldest_python_reads():
    assert too_new("a[*b, 1]") and too_new("try: f()\nexcept* E: g()") and not too_new("a[(*b, 1)], a[1, 2]")
    code = {p: [p.read_text("utf-8")] for folder in ("moe_redistribution", "tests", "tools")
            for p in (ROOT / folder).rglob("*.py")}
    code |= {p: ["".join(c["source"]) for c in json.loads(p.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
             for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts}
    bad = [f"{p.relative_to(ROOT)}: {x}" for p, texts in code.items() for text in texts for x in too_new(text)]
    assert not bad, bad

def own_contradiction(message, functions):
    "Is this about an argument of a known kind that one of our `functions` says is of another?"
    return bool((m := CALL.match(message)) and m[4] in functions and not UNSURE.search(m[1]))

@pytest.mark.audit
def test_pyright_finds_no_contradiction(tmp_path):
    if not (tool := shutil.which("basedpyright", path=f"{sys.prefix}/bin") or shutil.which("basedpyright")):
        pytest.skip("pip install basedpyright")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    settings |= dict(include=[str(LIB)], exclude=[str(LIB / "studies")], reportArgumentType="error")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    told = subprocess.run([tool, "-p", str(tmp_path), "--pythonpath", sys.executable, "--outputjson"], cwd=ROOT,
                          capture_output=True, text=True)
    said, functions = json.loads(told.stdout), {name for tree in ROOMS.values() for name, _ in public(tree)}
    wrong = [f"{d['file']}:{d['range']['start']['line'] + 1} {d['message']}" for d in said["generalDiagnostics"]
             if d["severity"] == "error" and (d.get("rule") != "reportArgumentType"
                                              or own_contradiction(d["message"].split("\n")[0], functions))]
    assert said["summary"]["filesAnalyzed"] > 90 and not wrong, "\n".join(wrong[:40])
