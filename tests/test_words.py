"""Words: a refusal is one message."""
import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "moe_redistribution"
ROOMS = {p.relative_to(PACKAGE).as_posix(): p for p in sorted(PACKAGE.rglob("*.py")) if p.name[0] != "_"}
BY_HAND = {"tasks/errors.py"}                                             # where `refuse` itself raises

def said(node) -> str:
    "The text of a message, its values left out; empty for what is no text."
    if isinstance(node, ast.JoinedStr): return "".join(said(v) for v in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""

def by_hand(source) -> list:
    "Lines that raise a message of the form that `refuse` has."
    raised = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)]
    return [n.lineno for n in raised if any(re.search(r": expected .*[,;] got", said(a)) for a in n.exc.args)]

def test_a_refusal_built_by_hand_is_seen():
    assert by_hand('raise OSError(f"store {x}: expected a folder, got {y}; fix: make one")') == [1]
    assert by_hand('if a:\n    raise ValueError("seeds: expected some; "\n        f"got {b}; fix: [42]")') == [2]
    assert not by_hand('refuse("seeds", "some", b)\nraise KeyError("no such task")')

@pytest.mark.parametrize("room", ROOMS)
def test_refusals_are_made_by_refuse(room):
    found = by_hand(ROOMS[room].read_text(encoding="utf-8"))
    assert room in BY_HAND or not found, f"{room}, lines {found}: call refuse (with error=) or choose"
