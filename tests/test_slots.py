"""Another task slots in: untied, bidirectional, read at one position, and everything from loss to run works on it."""
import numpy as np
import pandas as pd
import pytest
import torch

from moe_redistribution.models import condition as conditions
from moe_redistribution.tasks import task as tasks
from moe_redistribution.training import loop as training
from moe_redistribution.training.engine import fast_loss
from moe_redistribution.training.groups import train
from moe_redistribution.models.population import init, loss, shapes
from moe_redistribution.training.store import Store

def majority_task(place=4):
    "Are there two or more ones among four tokens? Read at one position of five, bidirectional, untied."
    bits = (np.arange(16)[:, None] >> np.arange(4)) & 1
    tokens = np.insert(bits, place, 2, axis=1)
    target = (bits.sum(1) > 1).astype(int)[:, None] + 1
    return tasks.Task("majority", d_vocab=3, d_vocab_out=4, causal=False, tied=False, read=(place,), scored=(0,),
                      positions=("answer",), vocab=("0", "1", "?"), tokens=torch.tensor(tokens),
                      targets=torch.tensor(target), strata=pd.DataFrame({"ones": bits.sum(1)}))

@pytest.fixture(autouse=True)
def another_task(monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "majority", majority_task)
    monkeypatch.setitem(conditions.RECIPES, "majority", conditions.RECIPES["add7"] | dict(
        d_model=16, d_head=8, batch=8, steps=600, eval_every=50, weight_decay=0.0))
    monkeypatch.setitem(training.TASK_RULES, "majority", ("best",))
    yield
    tasks.made_tasks.pop("majority", None)

@pytest.mark.parametrize("name", ["majority/ffn-h32-gelu", "majority/moe-e4k1-h32-silu",
                                  "majority/moe_glu-e4k2-h32-silu+switch+norm",
                                  "majority/glu-h8-relu+norm", "majority/no_ffn", "majority/moe-e2k1-h8-silu+L2"])
@pytest.mark.parametrize("place", [4, 2], ids=["read last", "read in the middle"])
def test_the_engine_is_the_plain_model_on_any_task(name, place, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "majority", lambda: majority_task(place))
    c = conditions.condition(name)
    g = [torch.Generator().manual_seed(i) for i in range(3)]
    params = {n: v.double().requires_grad_() for n, v in init(c, g).items()}
    assert {n: tuple(v.shape[1:]) for n, v in params.items()} == shapes(c) and params["W_U"].shape == (3, 16, 4)
    t = tasks.get_task("majority")
    at = torch.randint(0, len(t), (3, 12), generator=g[0])
    out = []
    for f in (fast_loss, loss):
        task_loss, aux = f(params, t.tokens[at], t.targets[at], c)
        out.append([task_loss, aux,
                    *torch.autograd.grad((task_loss + .3 * aux).sum(), list(params.values()), allow_unused=True)])
    assert max((a - b).abs().max().item() for a, b in zip(*out) if a is not None) < 1e-10

def test_it_trains_and_is_stored(tmp_path):
    table = train("majority/moe-e4k1-h32-silu", seeds=[1, 2], root=tmp_path, executor="here", quiet=True, until="full")
    run = Store(tmp_path).load("majority/moe-e4k1-h32-silu", 1)
    assert (table["step"] == 600).all() and set(run.weights) == {"best", "final"}
    assert run.history["exact"].iloc[-1] > .9
