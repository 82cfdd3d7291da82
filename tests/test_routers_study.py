"""The study of routers: arms differ in what their names say, and in nothing else."""
import pytest
import torch

from moe_redistribution.instruments.rerouting import gradient_norms
from moe_redistribution.models.condition import condition
from moe_redistribution.models.population import init
from moe_redistribution.studies.routers.arms import ROUTER_ARMS, arm_model, arm_recipe, toy_name
from moe_redistribution.studies.routers.study import (STUDY, TextTrial, router_settings, toy_condition, toy_scores,
                                                      with_fresh_router)
from moe_redistribution.training.loop import init_members, train_interval, unflatten
from moe_redistribution.training.study import Desk, run_study

PAIRS = [("switch", "switch_frozen"), ("top2", "top2_frozen"), ("balance", "frozen_balance")]
SIZES = dict(d=16, heads=2, layers=2, T=16)
TINY = router_settings(dict(steps=4, every=2), dict(steps=4, looks=2, heldout=8), 2)


def test_all_mixtures_of_a_toy_task_have_the_width_of_the_dense_arm():
    for n in ROUTER_ARMS:
        c = condition(toy_name("add7", n, 256, "silu"))
        assert c.d_mlp == (64 if n == "narrow" else 256)


@pytest.mark.parametrize("learns,still", PAIRS)
def test_a_pair_begins_alike_and_differs_only_in_whether_its_router_moves(learns, still):
    a, b = (condition(toy_name("add7", n, 256, "silu")) for n in (learns, still))
    told = {f: (getattr(a, f), getattr(b, f)) for f in a.__dataclass_fields__ if getattr(a, f) != getattr(b, f)}
    assert told == {"router": ("learned", "frozen")}
    moved = {}
    for name, c in ((learns, a), (still, b)):
        members = init_members(c, [1], "paired")
        before = {n: v.clone() for n, v in unflatten(members.w, c).items()}
        moved[name] = train_interval(members, 3), {n for n, v in unflatten(members.w, c).items() if not v.equal(before[n])}
    assert moved[learns][1] - moved[still][1] == {"W_router"}
    models = [arm_model(n, 50, 1, 64, **SIZES) for n in (learns, still)]
    for (n, x), y in zip(models[0].state_dict().items(), models[1].state_dict().values()): assert torch.equal(x, y), n
    own, other = arm_recipe(learns), arm_recipe(still)
    assert other.pop("frozen") and {n: x for n, x in own.items() if n != "task_gradient_to_router"} == other


def test_arms_without_a_router_of_the_family_see_the_same_other_weights():
    models = {n: dict(arm_model(n, 50, 1, 64, **SIZES).named_parameters()) for n in ("switch", "hashed", "biased")}
    for n, p in models["hashed"].items(): assert torch.equal(p, models["switch"][n]) and torch.equal(p, models["biased"][n])


def test_a_fresh_router_changes_nothing_else_and_one_by_position_has_no_other():
    for arm in ("switch", "hashed", "biased", "placed"):
        members = init_members(toy_condition("add7", arm, TINY), [1, 2], "paired")
        train_interval(members, 2)
        other = with_fresh_router(members)
        if arm == "placed":
            assert other is None
            continue
        own, new = unflatten(members.w, members.c), unflatten(other.w, members.c)
        assert {n for n, v in own.items() if not v.equal(new[n])} == {"W_router"}
        assert not unflatten(other.m, members.c)["W_router"].any() and (other.step == members.step).all()
        before = toy_scores(members)["loss"].clone()
        train_interval(other, 2)
        assert torch.equal(toy_scores(members)["loss"], before)                       # the model itself did not train on


def test_rows_of_a_text_model_are_of_the_trained_model_and_not_of_its_swapped_twin(tmp_path):
    rows = run_study(STUDY, "tiny", ["book/switch"], executor="here", quiet=True, root=tmp_path)
    lost = rows[(rows["metric"] == "loss") & (rows["stratum"] == "all") & (rows["rule"] == "final")]
    by = lost.set_index(["site", "edit"])["value"]
    assert by.index.is_unique and by["router_logits", "swapped"] != by["none", "none"] != by["router_logits", "absorbed"]
    last = rows[(rows["metric"] == "loss") & (rows["rule"] == "look")].sort_values("step")["value"].iloc[-1]
    assert last == pytest.approx(by["none", "none"], abs=1e-5)


def test_a_router_without_balance_loss_has_no_gradient_of_it():
    c = condition("add7/moe-e4k2-h256-silu+biased")
    found = gradient_norms(init(c, [torch.Generator().manual_seed(1)]), c)
    assert found["balance_router"].tolist() == [0] and found["task_router"] > 0
