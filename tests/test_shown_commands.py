"""Every command that a page, README, CONTRIBUTING, a docstring or a message shows is one that the parser takes."""
import ast
import contextlib
import io
import json
import re
import shlex
from functools import lru_cache

import pytest

from moe_redistribution.evidence.table_files import ROOT
from moe_redistribution.record.cli import parser
from moe_redistribution.record.work import _study_of_item
from moe_redistribution.basics.commands import COMMANDS
from moe_redistribution.training.study import known_studies

SHOWN = re.compile(r"moe-redistribution((?: (?:'[^'\n]*'|\"[^\"\n]*\"|[^\s`'\";#|(){}$]+))+)")
MADE = {True: re.compile(r"`make((?: [^\s`]+)+)`"), False: re.compile(r"(?:`|^)make((?: [^\s#`]+)+)", re.M)}

def strings(code):
    "What Python code says: its strings, a field of an f-string as 1, and its comments."
    try: tree = ast.parse(re.sub(r"^[%!].*$", "", code, flags=re.M))
    except SyntaxError: return [code]
    inside = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    said = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
            and id(n) not in inside]
    said += ["".join(v.value if isinstance(v, ast.Constant) else "1" for v in n.values)
             for n in ast.walk(tree) if isinstance(n, ast.JoinedStr)]
    return [*said, *re.findall(r"#.*", code)]

def prose(text):
    "Markdown, in which code that is broken over two lines stands on one."
    return re.sub(r"(?<!`)`[^`]+`(?!`)", lambda m: m[0].replace("\n", " "), text)

def makefile():
    "Its recipes with our command's name, and without variables that are not said."
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(CLI)", "moe-redistribution")
    for _ in range(3): text = re.sub(r"\$\((?:or ,)?([^()]*)\)", lambda m: m[1] * (m[0][:5] == "$(or "), text)
    return text

SAYS = re.compile("moe-redistribution |make [a-z]")

def every_text():
    "(file, text) of all that a reader sees."
    yield "Makefile", makefile()
    for name in ("README.md", "CONTRIBUTING.md"): yield name, prose((ROOT / name).read_text(encoding="utf-8"))
    for p in sorted(ROOT.glob("moe_redistribution/**/[!_]*.py")):
        text = p.read_text(encoding="utf-8")
        for t in strings(text) if SAYS.search(text) else (): yield p.relative_to(ROOT).as_posix(), prose(t)
    for p in sorted(ROOT.glob("nbs/**/*.ipynb")):
        for c in json.loads(p.read_text(encoding="utf-8"))["cells"]:
            if not SAYS.search(source := "".join(c["source"])): continue
            for t in strings(source) if c["cell_type"] == "code" else [source]:
                yield p.relative_to(ROOT).as_posix(), prose(t)

@lru_cache
def texts(): return [*every_text()]

def words_of(shown):
    "The words of a command as it stands in a sentence: up to a comma or a full stop at a word's end."
    words = []
    for w in shlex.split(shown):
        words.append(w.rstrip(".,:"))
        if w[-1:] in ",:" or w[-1:] == "." and w[-2:] != "..": break
    return ["train" if w == "COMMAND" else w for w in words]

SUBS = next(a for a in parser()._actions if a.dest == "command").choices

@lru_cache
def shown():
    return sorted({(f, " ".join(words_of(m[1]))) for f, t in texts() for m in SHOWN.finditer(t)})

def complaint(words):
    "What is wrong with a command, or nothing. A name alone is no command, and one of a user's file is not known yet."
    if words[0] not in COMMANDS and "--import" in words or words in [["1"], *([name] for name in COMMANDS)]: return ""
    for flag, a in SUBS[words[0]]._option_string_actions.items() if words[0] in SUBS else ():
        if a.choices: words = shlex.split(re.sub(rf"{flag} 1\b", f"{flag} {[*a.choices][0]}", shlex.join(words)))
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        try: args = parser().parse_args(words)
        except SystemExit as e: return err.getvalue().strip().splitlines()[-1] if e.code else ""
    if args.command == "study" and args.study in (known := known_studies()):
        if args.preset not in (1, "1", *known[args.study].presets): return f"no preset {args.preset}"
    try: [_study_of_item(item) for item in asked_items(args) if item != "1"]
    except ValueError as e: return str(e)
    return ""

def asked_items(args):
    "The items of a paper that arguments name."
    said = getattr(args, "item", None) or []
    return [said] if isinstance(said, str) else said

def test_the_commands_are_found_wherever_they_are_shown():
    files = {f for f, _ in shown()}
    assert len(shown()) > 80 and {"README.md", "CONTRIBUTING.md", "Makefile"} < files
    assert {"moe_redistribution/training/store.py", "nbs/use.ipynb",
            "nbs/10_studies/language_models/41_language.ipynb"} < files

@pytest.mark.parametrize("text, words", [
    ('fix = f"moe-redistribution train {c.name} --seeds {s}, or another"', ["train", "1", "--seeds", "1"]),
    ('"moe-redistribution scores --model FOLDER " "--text FILE"', ["scores", "--model", "FOLDER", "--text", "FILE"])])
def test_a_command_is_read_out_of_a_message(text, words):
    assert [words_of(m[1]) for t in strings(text) for m in SHOWN.finditer(t)] == [words]

def test_every_command_that_is_shown_parses():
    "Two of the language page had `--site` and two values for one `--edit`."
    wrong = {f"{f}: {c}": said for f, c in shown() if (said := complaint(c.split()))}
    assert not wrong, "\n".join(f"{k}: {v}" for k, v in wrong.items())

def test_every_target_of_make_that_is_shown_is_there():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    asked = {(f, w) for f, t in texts() for m in MADE[f[-3:] != ".md"].finditer(t) for w in m[1].split()
             if re.fullmatch(r"[a-z]+", w)}
    assert len(asked) > 10 and {w for _, w in asked} <= targets, {a for a in asked if a[1] not in targets}
