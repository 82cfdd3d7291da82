"""The way of a GPU, taken on a stand-in (`standin.py`): same losses, gradients and runs, nothing on the wrong device,
and no waiting.

A stand-in looks at every operation, so one case of each claim is asked at every change and the others by
`make audit`."""
import time

import pytest
import torch

from moe_redistribution.record import cli
from moe_redistribution.instruments.ablation import ablate_each, ablation_rows
from moe_redistribution.models.condition import RECIPES, condition
from moe_redistribution.studies.granularity.study import STUDY, class_of
from moe_redistribution.training.engine import gradients
from moe_redistribution.training.groups import _left_behind, train
from moe_redistribution.models.population import predict
from moe_redistribution.training.store import Store
from moe_redistribution.tasks.task import get_task
from moe_redistribution.training.study import study_jobs
from moe_redistribution.training.loop import evaluate, init_members, train_interval, unflatten, update_rules
from standin import Away, Standin
from test_engine import OTHERS, VARIANTS, population
from tiers import first

SPECIAL = ["add7/moe-e4k1-h40-silu+drop0.1", "add7/ffn-h40-silu+ffnlr0.25+freeze_attn", "add7/moe-e4k1-h40-silu+clip0",
           "hist/moe-e2k1-h8-gelu+d32", "modadd/moe-e4k1-h24-gelu+d32+frozen", "add7/ffn-h40-silu+hold_carry2"]

@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "stand-in")
    with Standin() as log: yield log

def test_the_stand_in_refuses_what_a_gpu_refuses_and_notes_what_waits(gpu):
    x, here = torch.arange(6., device="cuda").view(2, 3), torch.ones(3)
    assert x.is_cuda and x.device.type == "cuda" and (x @ x.mT).is_cuda and not gpu.waits
    for mix in (lambda: x + here, lambda: x @ here, lambda: torch.cat([x[0], here]), lambda: here.add_(x[0]),
                lambda: x.index_select(0, torch.tensor([1]))):
        with pytest.raises(RuntimeError, match="same device"): mix()
    each = {"value": lambda: x.sum().item(), "branch": lambda: bool(x.any()), "list": lambda: x.tolist(),
            "copy": lambda: x.cpu(), "send": lambda: here.to("cuda"), "index": lambda: x[:, [0, 2]],
            "mask": lambda: x[x > 2], "search": lambda: torch.nonzero(x), "fill": lambda: x.clone().copy_(here),
            "new": lambda: torch.tensor([1., 2.], device="cuda")}
    for name, wait in each.items():
        gpu.clear()
        wait()
        assert sum(gpu.waits.values()) == 1, name
    gpu.clear()
    (x[:, 1:].mul_(2), x.gather(1, x.long() % 3), here.pin_memory().to("cuda", non_blocking=True),
     torch.where(x > 1, x, 0), x.clone().copy_(here.pin_memory(), non_blocking=True))
    assert not gpu.waits and gpu.kernels["gather.default"] == 1

@pytest.mark.parametrize("name", first([VARIANTS["moe"], VARIANTS["glu"]], [*VARIANTS.values(), *OTHERS]))
def test_gradients_on_a_gpu_are_those_on_a_cpu(name, gpu):
    params, t = population(name, 3), get_task(condition(name).task)
    at = torch.randint(0, len(t), (3, 40), generator=torch.Generator().manual_seed(2))
    loss, want = gradients(params, t.tokens[at], t.targets[at], name)
    tokens, targets, there = (t.tokens[at].to("cuda"), t.targets[at].to("cuda"),
                              {n: v.to("cuda") for n, v in params.items()})
    gpu.clear()
    loss_there, got = gradients(there, tokens, targets, name)
    assert not gpu.waits and isinstance(loss_there, Away)
    torch.testing.assert_close(loss_there.cpu(), loss, rtol=0, atol=1e-10)
    for n, g in want.items():
        assert (g is None) == (got[n] is None)
        if g is not None: torch.testing.assert_close(got[n].cpu(), g, rtol=0, atol=1e-10, msg=lambda m: f"{n}: {m}")

@pytest.mark.parametrize("name", first([VARIANTS["moe"]], [*VARIANTS.values(), *SPECIAL]))
def test_a_longer_interval_does_not_wait_more_often_for_a_gpu(name, gpu):
    members, waits = init_members(condition(name), [1] if name.startswith("hist") else [1, 2, 3], "paired", "cuda"), []
    for n in (1, 3):
        gpu.clear()
        train_interval(members, n)
        waits.append(dict(gpu.waits))
    assert waits[0] == waits[1] and 0 < sum(waits[0].values()) <= 4, waits

@pytest.mark.audit
def test_a_reset_waits_at_its_own_step_only(gpu):
    members, waits = init_members(condition("add7/ffn-h40-silu@4:reset0.25"), [1, 2], "paired", "cuda"), []
    for n in (3, 2, 3):                                                    # step 4 is in the second interval
        gpu.clear()
        train_interval(members, n)
        waits.append(sum(gpu.waits.values()))
    assert waits[0] == waits[2] < waits[1]

@pytest.mark.audit
@pytest.mark.parametrize("name", ["add7/moe-e4k1-h40-silu", "modadd/ffn-h24-gelu+d32", "hist/moe-e2k1-h8-gelu+d32"])
def test_an_evaluation_waits_as_often_for_twenty_seeds_as_for_two(name, gpu):
    waits = []
    for n in (2, 20) if name.startswith("add7") else (1, 2):
        here, there = (init_members(condition(name), list(range(n)), "paired", d) for d in ("cpu", "cuda"))
        for members in (here, there): members.step += 1                    # a sampled set belongs to a step
        gpu.clear()
        scores = evaluate(there, torch.zeros(n, device="cuda"))
        waits.append(dict(gpu.waits))
        update_rules(there, scores)
        assert dict(gpu.waits) == waits[-1]                                # choosing checkpoints needs no answer
        for metric, want in evaluate(here, torch.zeros(n)).items():
            torch.testing.assert_close(scores[metric].cpu(), want, rtol=0, atol=0)
    assert waits[0] == waits[1]

@pytest.fixture
def often(monkeypatch):
    "Evaluations every 20 steps: the stand-in is slow."
    monkeypatch.setitem(RECIPES["add7"], "eval_every", 20)

@pytest.mark.audit
def test_a_run_on_a_gpu_is_stored_as_one_on_a_cpu_and_either_goes_on_with_what_the_other_began(gpu, often, tmp_path):
    name, ask = "add7/moe-e4k1-h8-silu", dict(seeds=[1, 2], stream="paired", until="full", group_size=2,
                                              executor="here", quiet=True)
    def runs(first, then):
        root = tmp_path / f"{first}-{then}"
        train(name, steps=20, root=root, device=first, **ask)
        train(name, steps=40, root=root, device=then, **ask)
        return [Store(root).load(name, s, "paired") for s in (1, 2)]
    want = runs("cpu", "cpu")
    for devices in (("cuda", "cpu"), ("cpu", "cuda")):
        for run, on_cpu in zip(runs(*devices), want):
            assert run.step == 40 and (run.manifest["machine"]["processor"] == "stand-in") == (devices[1] == "cuda")
            assert not any(isinstance(v, Away) for v in run.weights["final"].values())
            for column in ("loss", "digits"):
                torch.testing.assert_close(*(torch.tensor(r.history[column]) for r in (run, on_cpu)),
                                           rtol=1e-3, atol=2e-3)

def test_a_deadline_that_a_core_could_not_keep_stops_no_gpu(gpu, often, tmp_path, monkeypatch):
    monkeypatch.setattr("moe_redistribution.training.groups.expected_seconds", lambda *_: 1e6)
    begun = lambda device: train("add7/moe-e4k1-h8-silu+d16", [1], steps=20, root=tmp_path / device, device=device,
                                 executor="here", quiet=True, budget=300.)
    assert len(begun("cpu")) == 0 and len(begun("cuda")) == 1

@pytest.mark.audit
def test_the_command_line_stacks_seeds_on_a_gpu_and_stops_within_its_budget(gpu, often, tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_REDISTRIBUTION_HOME", str(tmp_path))
    names, seeds = ["add7/no_ffn", "add7/ffn-h8-silu"], range(1, 8)
    began = time.monotonic()
    assert cli.main(["train", *names, "--seeds", "1-7", "--stream", "paired", "--until", "full", "--device", "cuda",
                     "--budget", "6"]) == 0
    assert time.monotonic() - began < 20                                   # all of it would take minutes
    assert not any(Store().find(n, s, "paired") for n in names for s in seeds)             # whole runs only,
    left = _left_behind(Store(), condition(names[0]), list(seeds), "paired", "cpu")         # and what was begun is kept:
    assert [m.seeds for m in left] == [list(seeds)] and (left[0].step > 0).all()           # seven seeds in one group

@pytest.mark.audit
def test_ablation_of_a_population_on_a_gpu_counts_the_same_digits(gpu):
    c = condition("add7/moe-e2k1-h8-silu")
    # more than are taken side by side
    params = unflatten(init_members(c, list(range(18)), "paired").w, c)
    there = {n: v.to("cuda") for n, v in params.items()}
    assert torch.equal(predict(there, c).cpu(), predict(params, c))
    edits = [{"ffn_out": "zero"}, {"attn_out": "mean"}, {"H1": "zero"}]
    assert torch.equal(ablate_each(there, c, edits).cpu(), ablate_each(params, c, edits))
    few = {n: v[:2] for n, v in there.items()}, {n: v[:2] for n, v in params.items()}
    got, want = (ablation_rows(p, c, [0, 1], stream="paired", rule="init", step=0) for p in few)
    assert got.equals(want)

@pytest.mark.audit
@pytest.mark.parametrize("name", ["add7/ffn-h256-silu", "add7/moe-e4k1-h256-silu", "modadd/moe_glu-e4k1-h340-gelu+d32",
                                  "modadd/ffn-h512-gelu+d32"])
def test_a_step_launches_as_many_kernels_for_many_seeds_as_for_two(name, gpu):
    def launched(seeds):
        members, sums = init_members(condition(name), list(range(seeds)), "paired", "cuda"), []
        for n in (1, 3):
            gpu.clear()
            train_interval(members, n)
            sums.append(sum(gpu.kernels.values()))
        return (sums[1] - sums[0]) / 2
    assert 100 < launched(2) == launched(9) < 210

def test_a_study_s_stack_learns_on_a_gpu_what_it_learns_on_a_cpu(gpu):
    job = study_jobs(STUDY, "tiny")[0]
    settings = job.settings | dict(steps=4, looks=2)
    here, there = (class_of(job.arm, [1, 2], settings, where) for where in ("cpu", "cuda"))
    assert all(isinstance(v, Away) for v in there.p.values())
    for c in (here, there): c.learn()
    on = class_of(job.arm, [1, 2], settings, "cuda").take_up(*there.state())
    for c in (here, there, on): c.learn()
    torch.testing.assert_close(there.errors[-1], here.errors[-1], rtol=1e-4, atol=1e-6)
    assert torch.equal(there.errors[-1], on.errors[-1])
