"""The page "Your own question": its file is right about its tasks and routers, and its code is short."""
from pathlib import Path

import pytest
import torch

from moe_redistribution.models.condition import condition
from moe_redistribution.models.population import forward
from moe_redistribution.basics import kinds
from moe_redistribution.basics.kinds import import_file
from moe_redistribution.tasks.task import get_task
from moe_redistribution.training.engine import gradients
from toys import untrained

NBS = Path(__file__).parent.parent / "nbs"
ARMS = ["ffn-h64-silu", "bilinear-h64-silu", "moe-e4k2-h64-silu", "moe-e4k2-h64-silu+cosine", "moe-e4k2-h64-silu+relu"]

@pytest.fixture(autouse=True)
def own():
    "The page's file, which no later test knows."
    yield import_file(NBS / "own.py")
    kinds._forget(str(NBS / "own.py")), kinds.FILES.pop(str(NBS / "own.py"))

def some(task, n=32):
    t, g = get_task(task), torch.Generator().manual_seed(0)
    at = torch.randint(0, len(t), (2, n), generator=g)
    return t.tokens[at], t.targets[at]

def test_the_tasks_of_the_page_are_sums_and_sorted_letters():
    add, sort = get_task("add4"), get_task("sort")
    number = lambda digits: (digits * 10 ** torch.arange(digits.shape[1])).sum(1)
    assert torch.equal(number(add.tokens[:, :4]) + number(add.tokens[:, 4:8]), number(add.targets))
    assert torch.equal(sort.tokens[:, :6].sort().values, sort.targets)
    for t in (add, sort):                                        # teacher forced, and read where it is asked
        assert torch.equal(t.tokens[:, t.read[0] + 1:], t.targets[:, :-1])
        assert (t.tokens[:, t.read[0]] == t.d_vocab - 1).all()

@pytest.mark.parametrize("task", ["sort", "add4"])
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_of_the_page_learns_from_every_weight(task, arm):
    name = f"{task}/{arm}"
    params = untrained(name, (1, 2))
    loss, grads = gradients(params, *some(task), condition(name))
    assert loss.isfinite().all() and {n for n, g in grads.items() if g is None or not g.any()} <= {"b_up"}

def test_a_cosine_hears_no_length_and_a_relu_gives_tokens_as_many_experts_as_they_need():
    for arm in ARMS[3:]:
        c = condition(f"sort/{arm}")
        params = untrained(c, (1, 2))
        forward(params, some("sort")[0], c, sink=(sink := {}))
        x, W = sink["resid_mid"], params["W_router"][:, 0]
        one, two = (c.routing.logits(W, a * x, c) for a in (1., 2.))
        torch.testing.assert_close(two, one if "cosine" in arm else 2 * one)
        taken = (sink["gates"] > 0).sum(-1)
        assert (taken == 2).all() if "cosine" in arm else len(taken.unique()) > 2 and sink["gates"].min() == 0
