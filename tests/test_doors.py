"""A task says what it has and an instrument what it needs: a task under another name gets the same instruments and the
same rows, and no room of the library asks for a name."""
import ast
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch

from moe_redistribution.instruments.attribution import attribution
from moe_redistribution.instruments.instrument import instruments, instruments_for, misfits
from moe_redistribution.models.condition import RECIPES
from moe_redistribution.instruments.patching import patch
from moe_redistribution.models.population import forward
from moe_redistribution.tasks import task as tasks
from moe_redistribution.tasks.task import TASKS, get_task, modadd_task
from moe_redistribution.training.loop import TASK_RULES, register_task
from tiers import first
from toys import untrained

PACKAGE = Path(__file__).resolve().parent.parent / "moe_redistribution"
TWINS = {"add7": "twinadd", "modadd": "twinmod", "hist": "twinhist"}

@pytest.fixture
def twins():
    "Each of the paper's tasks under another name, and addition modulo 7 and 13."
    for name, other in TWINS.items():
        register_task(other, lambda name=name, other=other: replace(get_task(name), name=other), RECIPES[name],
                      TASK_RULES[name])
    for p in (7, 13):
        register_task(f"mod{p}", partial(modadd_task, p, f"mod{p}"), RECIPES["modadd"], TASK_RULES["modadd"])
    yield TWINS
    for name in (*TWINS.values(), "mod7", "mod13"):
        for table in (TASKS, RECIPES, TASK_RULES, tasks.made_tasks): table.pop(name, None)

@pytest.mark.parametrize("name", ["add7/moe-e2k1-h16-silu", "add7/ffn-h16-silu+hold_tens9", "add7/moe-e2k1-h16-silu+L2",
                                  "modadd/moe_glu-e2k1-h8-linear", "hist/moe-e2k1-h8-gelu", "hist/no_ffn"])
def test_a_task_under_another_name_gets_the_same_instruments(name, twins):
    own, _, body = name.partition("/")
    twin = f"{twins[own]}/{body}"
    assert list(instruments_for(twin)) == list(instruments_for(name)) and misfits(twin) == misfits(name)
    for x in instruments_for(name).values():
        assert [x.at(twin, s) for s in x.streams] == [x.at(name, s) for s in x.streams]

# Probes and live training are slow, and the same code
@pytest.mark.parametrize("name", first(["add7/ffn-h8-silu+hold_tens9+d16"], ["add7/moe-e2k1-h16-silu",
                                                                             "add7/ffn-h8-silu+hold_tens9+d16"]))
def test_and_the_same_rows(name, twins):
    twin, params = name.replace("add7", twins["add7"]), untrained(name)
    for i, x in instruments_for(name).items():
        if i in ("probes", "speed", "fourier"): continue
        a, b = (x.rows(dict(params), n, [1, 2], stream="authors", rule="final") for n in (name, twin))
        pd.testing.assert_frame_equal(a.drop(columns="condition"), b.drop(columns="condition"), check_exact=True)
        assert set(b["condition"]) == {twin}

@pytest.mark.parametrize("p", first([7], [7, 13]))
def test_addition_modulo_another_number_is_measured_by_every_instrument_for_sums(twins, p):
    name = f"mod{p}/moe_glu-e2k1-h8-linear"
    for i in ("bilinear", "fourier", "grokking", "routing"):
        got = instruments()[i].rows(untrained(name), name, [1, 2], stream="authors", rule="final")
        assert len(got) and got["value"].notna().any()
        assert got["n_examples"].max() <= 3 * p * p                      # all three places of all pairs

# Where a task enters by its name, with its recipe; and what was measured on the paper's tasks, with a rule for others
TABLES = {"tasks/task.py": ("TASKS",), "models/condition.py": ("RECIPES",), "training/loop.py": ("TASK_RULES",),
          "training/orders.py": ("STEP_SECONDS", "TYPICAL_STEPS"), "report/tables.py": ("TASK",),
          "training/bench.py": ("HEADLINE", "TARGETS", "FLOORS", "COMPILED_AIMS", "BENCH_SEEDS", "PACE", "_members"),
          "record/costs.py": ("CPU_LIMITS",), "report/figures.py": ("PLAIN",)}

def names_asked_for(tree):
    "Lines of a parsed module that compare something with the name of one of the paper's tasks, or look something up by it."
    own = re.compile(rf"^({'|'.join(TWINS)})(/.*)?$")
    literal = lambda x: isinstance(x, ast.Constant) and isinstance(x.value, str) and own.match(x.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare): found = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict): found = node.keys
        elif isinstance(node, ast.Subscript): found = [node.slice]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "get"): found = node.args
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "get_task": found = node.args
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "startswith" in node.value:
            found = re.findall(r"'([^']*)'", node.value)          # of a query
            if any(own.match(x) for x in found): yield node.lineno
            continue
        else: continue
        flat = [y for x in found for y in (getattr(x, "elts", None) or [x])]
        if any(literal(x) for x in flat if x is not None): yield node.lineno

def test_no_room_of_the_library_asks_for_a_task_by_its_name():
    rooms = [p for p in sorted(PACKAGE.rglob("*.py")) if "studies" not in p.parts and p.name != "_modidx.py"]
    found = {}
    for path in rooms:
        room, text = path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")
        lines, tree = text.splitlines(), ast.parse(text)
        tables = [n for n in tree.body if isinstance(n, ast.Assign)
                  and re.match(rf"({'|'.join(TABLES.get(room, ['-']))})\b", lines[n.lineno - 1])]
        asked = [n for n in names_asked_for(tree) if not any(x.lineno <= n <= x.end_lineno for x in tables)]
        if asked: found[room] = [f"{n}: {lines[n - 1].strip()[:90]}" for n in asked]
    assert not found, found

def test_two_layers_get_every_instrument_that_can_work_on_them_and_the_others_say_why():
    name = "add7/moe-e2k1-h16-silu+L2"
    assert ({"ablation", "attribution", "copying", "patching", "patterns", "routing", "scores", "speed"}
            <= {*instruments_for(name)})
    assert all("one layer" in misfits(name)[i] for i in ("fourier", "rerouting"))

def test_of_two_layers_the_parts_sum_to_the_logits_and_a_patch_from_oneself_changes_nothing():
    name, t = "add7/moe-e2k1-h16-silu+L2", get_task("add7")
    params = untrained(name)
    logits = forward(params, t.tokens, name)[:, :, list(t.read)]
    right = logits.gather(-1, t.targets.expand(2, -1, -1)[..., None])[..., 0]
    for by in ("component", "head", "expert", "all"):
        whole = sum(attribution(params, name, by, centred=False).values())
        torch.testing.assert_close(whole, right, atol=1e-5, rtol=1e-5)
    same = torch.arange(40)[:, None].repeat(1, 2)
    other = torch.stack([torch.arange(40), torch.arange(40).flip(0)], 1)
    said = patch(params, name, {"o1": torch.cat([same, other])})["o1"]
    assert all(x[:, :40].equal(said["none"][:, :40]) for x in said.values())
    assert said["resid_post"][:, 40:].equal(said["none"][:, 40:].flip(1))
    assert said["L0.resid_post"].shape == (2, 80) and not said["L0.resid_post"].equal(said["L1.H0"])
