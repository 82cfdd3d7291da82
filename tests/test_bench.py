"""The floor is the arithmetic of full-batch tasks, shares are those of whole machines, and a record keeps what is not
measured again."""
import json
import numpy as np
import pandas as pd
import pytest
import torch

from moe_redistribution.training.bench import (HEADLINE, _as_row, floor_for, keep, rival_for,
                                               _share_of)
from moe_redistribution.training import bench as bench_room

from moe_redistribution.models.condition import condition
from moe_redistribution.training.engine import flops, gradients
from moe_redistribution.tasks.data import full_batch
from moe_redistribution.tasks.task import get_task

@pytest.mark.parametrize("task", HEADLINE)
def test_a_full_batch_has_as_many_examples_as_the_formula_says(task):
    from moe_redistribution.tasks.data import N_TRAIN, split
    if task == "add7": assert condition(HEADLINE[task][0]).batch
    else: assert full_batch(get_task(task)) == (N_TRAIN if task == "hist" else len(split(get_task(task), 1)[0]))

def test_tiny_products_and_long_batches_do_not_raise_the_floor(monkeypatch):
    """The floor of a full batch is its operations over the rates of its large products, whatever one example's products
    take."""
    def seconds(copies, m, k, n, _):
        return 2 * copies * m * k * n / 1e10 * (100 if copies > 64 else 2 if m * k > 2e6 else 1)
    monkeypatch.setattr(bench_room, "_bmm_seconds", seconds)
    for name in HEADLINE["modadd"] + HEADLINE["hist"]:
        got = floor_for(name, 1, 1.0)
        assert got["rate"] == pytest.approx(1e10) and got["floor"] == pytest.approx(flops(name) / 1e10)
    small = floor_for(HEADLINE["add7"][0], 5, 1.0)                        # small batches: as they are
    assert small["floor"] > 2 * flops(HEADLINE["add7"][0]) / 1e10

@pytest.mark.audit                                                    # two processes that import torch: 10 s
def test_plain_processes_all_report_their_own_time():
    got = rival_for("modadd/ffn-h8-gelu+d32", 0.3, 2, processes=2)
    assert len(got) == 2 and all(g["wall"] >= 0.3 and g["cpu"] < 1.2 * g["wall"] for g in got)
    assert 0 < _share_of(got) <= 1

def rounds(**speeds): return [dict(speeds, share=.9), dict(speeds, share=.95)]

@pytest.mark.parametrize("per_core, better", [(8., "as shipped"), (12.5, "per core")])
def test_the_better_rival_is_named_and_the_promise_is_held_against_the_one_as_shipped(per_core, better):
    floors = [dict(floor=.02, rate=9e10, wall=1., cpu=.85)] * 2
    row = _as_row(HEADLINE["hist"][1], rounds(ours=50., plain=10., per_core=per_core), floors, 1, 2)
    assert (row["times_plain"], row["target"], row["better_plain"]) == (5, 2.5, better)
    assert row["times_plain_per_core"] == pytest.approx(50 / per_core)
    assert row["times_floor"] == pytest.approx(2) and row["step_ms"] == pytest.approx(40) and row["share"] == .85

def test_a_record_keeps_rows_that_were_not_measured_this_time_and_replaces_those_that_were(tmp_path):
    path = tmp_path / "results" / "bench.csv"
    old = dict(condition=HEADLINE["add7"][0], times_plain=3.0, target=2.3)
    keep(old, path)
    keep(dict(condition=HEADLINE["modadd"][1], times_plain=5.5, target=5.0, gflops=95.0), path)
    keep(dict(condition="add7/ffn-h8-silu", times_plain=9.0, target=2.3), path)
    keep(dict(condition=HEADLINE["modadd"][1], times_plain=6.5, target=5.0, gflops=96.0), path)
    frame = pd.read_csv(path)
    assert frame["condition"].tolist() == [HEADLINE["add7"][0], HEADLINE["modadd"][1], "add7/ffn-h8-silu"]
    assert frame["times_plain"].tolist() == [3.0, 6.5, 9.0] and frame["gflops"].tolist()[1] == 96.0

def test_the_command_line_keeps_rows_in_the_file_it_is_given(monkeypatch, capsys):
    from moe_redistribution.record import cli, costs
    seen = []
    def bench(**asked): return seen.append(asked) or print("a sentence") or pd.DataFrame({"times_plain": [6.5]})
    monkeypatch.setattr(costs, "bench", bench)
    assert cli.main(["bench", "--task", "hist", "--record", "rows.csv"]) == cli.main(["bench"]) == 0
    assert [(asked["task"], asked["record"]) for asked in seen] == [("hist", "rows.csv"), ("add7", None)]
    assert capsys.readouterr().out == "a sentence\n" * 2 and cli.main(["bench", "--json"]) == 0
    assert [r["times_plain"] for r in json.loads(capsys.readouterr().out)] == [6.5]

@pytest.mark.audit                                                    # where jax is installed
@pytest.mark.parametrize("name", ["add7/ffn-h16-silu", "add7/glu-h16-silu", "add7/moe_glu-e4k2-h32-silu",
                                  "modadd/moe-e4k1-h16-gelu+d32", "add7/no_ffn"])
def test_the_rival_in_jax_has_our_loss_and_our_gradient(name):
    jax = pytest.importorskip("jax")
    import jax_peer
    c = condition(name)
    t, (p, *_) = c.get_task(), jax_peer.start(name, 1)
    one, tokens, targets = {k: v[0] for k, v in p.items()}, t.tokens[:64], t.targets[:64]
    (_, nll), got = jax.value_and_grad(jax_peer.loss, has_aux=True)(one, tokens.numpy(), targets.numpy(), c, t)
    loss, want = gradients({k: torch.tensor(np.array(v)) for k, v in p.items()}, tokens[None], targets[None], c)
    assert float(nll) == pytest.approx(loss.item(), rel=1e-5)
    for k in want: assert np.abs(np.array(got[k]) - want[k][0].numpy()).max() < 1e-5 * max(1, want[k].abs().max().item()), k
