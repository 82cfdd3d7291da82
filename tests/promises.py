"""What the tests promise, a line each, by the part of the book that a file is about.

    python tests/promises.py            writes PROMISES.md: a test that goes is a line that goes
    python tests/promises.py opened     the files that a change of this part can break: `make test PART=opened`
"""
import ast
import re
import sys
from collections import Counter
from pathlib import Path

from moe_redistribution.record.house import book_parts, closure, rooms_of

HERE = Path(__file__).resolve().parent
ROOMS = {*rooms_of().room}

def tree(path): return ast.parse(path.read_text(encoding="utf-8"))

def rooms_in(path) -> Counter:
    "The rooms that a file of tests names in its imports, by how many names it takes from each."
    found = Counter()
    for node in ast.walk(tree(path)):
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
    return max(book_parts(), key=lambda p: (count[p], [*book_parts()].index(p))) if count else "the house"

def reads_all(path) -> bool:
    "Does a file look through folders of the house, itself or by what it has of `test_site`?"
    return bool(re.search(r"rglob\(|from test_site", path.read_text(encoding="utf-8")))

def touched_by(part) -> list:
    "The files whose rooms, or what these import, stand in a part; and those that read the house as a whole."
    own = {*rooms_of(part).room}
    return [p for p in files() if not (rooms := rooms_in(p)) or reads_all(p) or closure(rooms) & own]

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
    if sys.argv[1:]: print(*(p.relative_to(HERE.parent) for p in touched_by(sys.argv[1])))
    else: (HERE / "PROMISES.md").write_text(page(), encoding="utf-8")
