"""What the tests promise, a line each, by the part of the book that a file is about.

    python tests/promises.py            writes PROMISES.md: a test that goes is a line that goes
    python tests/promises.py opened     what a change of this part can break: `make PART=opened test`
    python tests/promises.py main       what the changes since this commit can break: `make SINCE=main test`
"""
import ast
import json
import re
import subprocess
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path

from moe_redistribution.record.house import _imports_of, book_parts, closure, rooms_of

HERE = Path(__file__).resolve().parent
ROOT, PARTS, PAGES = HERE.parent, [*book_parts()], {f"nbs/{x.page}": x.room for x in rooms_of().itertuples()}
ROOMS = {*PAGES.values()}

@lru_cache(None)
def tree(path): return ast.parse(path.read_text(encoding="utf-8"))

@lru_cache(None)
def rooms_in(path) -> Counter:
    "The rooms that a file of tests names in its imports, by how many names it takes from each."
    return rooms_of_code(tree(path))

def rooms_of_code(code) -> Counter:
    found = Counter()
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moe_redistribution"):
            base = node.module.removeprefix("moe_redistribution").strip(".")
            for name in (base, *(f"{base}.{a.name}".strip(".") for a in node.names)): found[name] += 1
        if isinstance(node, ast.Import):
            for a in node.names: found[a.name.removeprefix("moe_redistribution.")] += 1
    return Counter({n: k for n, k in found.items() if n in ROOMS})

def part_of(path) -> str:
    "The part that a file is about: where most of what it imports stands; none, if it reads the house as a whole."
    count = Counter()
    for room, k in rooms_in(path).items(): count[room.partition(".")[0]] += k
    return max(PARTS, key=lambda p: (count[p], PARTS.index(p))) if count else "the house"

def reads_all(path) -> bool:
    "Does a file look through folders of the house, itself or by what it has of `test_site`?"
    return bool(re.search(r"rglob\(|from test_site", path.read_text(encoding="utf-8")))

def touched_by(part) -> list:
    "The files whose rooms, or what these import, stand in a part; and those that read the house as a whole."
    own = {*rooms_of(part).room}
    return [p for p in files() if not (rooms := rooms_in(p)) or reads_all(p) or closure(rooms) & own]

def reached(rooms) -> set:
    "Some rooms, and all that they import, at once or in a function."
    seen, todo = set(), [*rooms]
    while todo:
        if (room := todo.pop()) not in seen: seen.add(room), todo.extend(_imports_of(room, late=True))
    return seen

def found_by_name(room) -> bool:
    "Is a room reached without an import: by a hook, or because it registers something?"
    text = (ROOT / "moe_redistribution" / f"{room.replace('.', '/')}.py").read_text(encoding="utf-8")
    return room.partition(".")[0] in ("basics", "guard") or bool(re.search(r"^@?(register|instrument|command|STUDY)\b", text, re.M))

def changed_since(commit) -> list:
    def said(*how): return subprocess.check_output(["git", *how], cwd=ROOT, text=True).split()
    return [*said("diff", "--name-only", commit), *said("ls-files", "--others", "--exclude-standard")]

@lru_cache(None)
def touched(what) -> set:
    """Files of tests and notebooks that a change of a part can break, its notebooks and whatever test imports it; or that all changes
    since a commit can. A change of anything but rooms, pages and tests, and of a room that is found by name, can break all."""
    if what in PARTS: return {*touched_by(what), *book_parts()[what].rglob("*.ipynb")}
    changed, modules = changed_since(what), {f"moe_redistribution/{r.replace('.', '/')}.py": r for r in ROOMS}
    rooms = {(PAGES | modules)[n] for n in changed if n in PAGES or n in modules}
    pages = [*ROOT.glob("nbs/**/*.ipynb")]
    if (any(map(found_by_name, rooms)) or any(not re.match(r"nbs/.*\.ipynb$|tests/test_\w+\.py$|tests/PROMISES|moe_redistribution/_modidx", n)
                                              for n in changed if n not in modules)): return {*files(), *pages}
    own = {ROOT / n for n in changed}
    return {p for p in files() if p in own or not rooms_in(p) or reads_all(p) or reached(rooms_in(p)) & rooms} | {
        p for p in pages if p in own or reached(rooms_of_page(p.relative_to(ROOT))) & rooms}

def rooms_of_page(page) -> Counter:
    "The rooms that the cells of a notebook name in imports."
    cells = json.loads((ROOT / page).read_text(encoding="utf-8"))["cells"]
    return sum((rooms_of_code(ast.parse("".join(c["source"]))) for c in cells if c["cell_type"] == "code"), Counter())

def files() -> list: return sorted(HERE.glob("test_*.py"))

def promises(path) -> list:
    "The claims of a file, in words; those that `make audit` alone asks are marked."
    found = []
    for node in tree(path).body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"): continue
        late = " *(audit)*" * any("mark.audit" in ast.unparse(d) for d in node.decorator_list)
        found.append(node.name.removeprefix("test_").replace("_", " ") + late)
    return found

def page() -> str:
    lines = ["# What the tests promise", "",
             "A line for each test, by the part of the book that its file is about. `python tests/promises.py` writes this "
             "file; a test that goes is a line that goes, and its reason stands in the commit."]
    for part in [*book_parts(), "the house"]:
        own = [p for p in files() if part_of(p) == part]
        if own: lines += ["", f"## {part}"]
        for p in own:
            about = (ast.get_docstring(tree(p)) or "").partition("\n\n")[0].replace("\n", " ")
            lines += ["", f"**{p.stem}** {about}", "", *(f"- {x}" for x in promises(p))]
    return "\n".join(lines) + "\n"

if __name__ == "__main__":
    if sys.argv[1:]: print(*sorted(p.relative_to(ROOT).as_posix() for p in touched(sys.argv[1])), sep="\n")
    else: (HERE / "PROMISES.md").write_text(page(), encoding="utf-8")
