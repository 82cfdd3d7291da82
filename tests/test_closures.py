"""What importing a room pulls in, in lines of code, with all that its imports import: a budget for each, which may only fall."""
from pathlib import Path

import pytest

from moe_redistribution.record.house import closure, rooms_of

PACKAGE = Path(__file__).parents[1] / "moe_redistribution"

BUDGETS = {  # rooms → lines of code; the last is what the main study takes: train, ablate, judge, page
    "basics.files": 155, "basics.registry": 186, "tasks.task": 408, "instruments.rows": 247, "models.population": 1_768,
    "judge.statistics": 285, "judge.verdicts": 437, "judge.audits": 573, "report.values": 824,
    "training.engine": 2_069, "training.groups": 3_894, "instruments.ablation": 3_082, "opened.opened": 6_821,
    "training.groups instruments.ablation judge.verdicts report.pages studies.sparsity_moves.study": 8_218}
# rooms that know what is a user's; a room of the core asks for them by a word (basics.registry.HOOKS)
USERS = {"basics.own_code", "basics.kinds"}

def lines(rooms):
    "Blank lines, comments and the marks between cells are free: a cell that is cut in two, or says why, costs nothing."
    texts = [(PACKAGE / f"{r.replace('.', '/')}.py").read_text(encoding="utf-8") for r in rooms]
    return sum(bool(x.strip()) and x.lstrip()[0] != "#" for text in texts for x in text.splitlines())

@pytest.mark.parametrize("rooms, budget", BUDGETS.items())
def test_a_room_pulls_in_no_more_than_its_budget(rooms, budget):
    pulled = closure(rooms.split())
    assert lines(pulled) <= budget, f"{lines(pulled):,} lines: {sorted(pulled)}"
    assert lines(pulled) > .9 * budget, "lower the budget"

CORE = "tasks", "models", "training", "instruments", "judge", "report"

def test_the_core_knows_no_room_that_reads_or_checks_what_is_a_users():
    rooms = [r for part in CORE for r in rooms_of(part).room]
    assert len(rooms) > 50 and not {r: closure([r]) & USERS for r in rooms if closure([r]) & USERS}

def test_what_a_verdict_needs_is_no_trainer_and_no_store():
    assert not {r for r in closure(["judge.verdicts", "report.values"]) if r.startswith(("training.", "models.", "instruments."))}

def test_no_room_imports_the_guard_but_the_guard():
    rooms, guard = {*rooms_of().room}, {*rooms_of("guard").room}
    assert len(guard) == 5 and not closure(rooms - guard) & guard
