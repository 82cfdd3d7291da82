"""What a learned router is good for: twins differ in one thing, a job can be ended, lines ask for rows that exist."""
import pandas as pd
import pytest
import torch

from moe_redistribution.evidence.claims import claims, seed_list, statements
from moe_redistribution.studies.routers.arms import routed_arm
from moe_redistribution.studies.routers.rule import RuleTrial
from moe_redistribution.studies.routers.study import STUDY, _routed_rows, _routed_settings
from moe_redistribution.studies.routers.texts import TextTrial
from moe_redistribution.training.loop import init_members, train_interval, unflatten
from moe_redistribution.training.store import Store
from moe_redistribution.training.jobs import OutOfTime
from moe_redistribution.training.study import Desk, run_study, study_jobs

from tiers import first

TINY = STUDY.presets["tiny"].settings
TWINS = {a: f"{a}_frozen" for a in ("straight", "switch", "top2")}
ASKED = claims().query("item.str.startswith('contrast_routers')")

@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return run_study(STUDY, "tiny", root=tmp_path_factory.mktemp("s"), executor="here", quiet=True)

@pytest.mark.parametrize("arm, twin", TWINS.items())
def test_a_twin_starts_as_the_learned_router_does_and_only_its_map_stands_still(arm, twin):
    ends = []
    for name in (arm, twin):
        c = routed_arm(name).condition_of("add7", lr=.002)
        members = init_members(c, [1], "paired")
        first = {n: v.clone() for n, v in unflatten(members.w, c).items()}
        train_interval(members, 5)
        last = unflatten(members.w, c)
        ends.append(first)
        assert torch.equal(first["W_router"], last["W_router"]) == (name == twin), name
        assert not torch.equal(first["W_down"], last["W_down"])
    assert all(torch.equal(v, ends[1][n]) for n, v in ends[0].items()) and {*ends[0]} == {*ends[1]}

@pytest.mark.parametrize("arm, twin", first([("top2", "top2_frozen")], TWINS.items()))
def test_so_does_a_language_model_s_twin(arm, twin, tmp_path):
    desk = Desk(study_jobs(STUDY, "tiny", "book/straight")[0], Store(tmp_path))
    desk.path.parent.mkdir(parents=True)
    a, b = (TextTrial(f"book/{name}", [1], TINY["book"], desk) for name in (arm, twin))
    start = {n: p.clone() for n, p in a.model.state_dict().items()}
    assert all(torch.equal(v, start[n]) for n, v in b.model.state_dict().items())
    b.carry_out()
    gates = {n: p for n, p in b.model.state_dict().items() if "gate.weight" in n}
    assert len(gates) == 2 and all(torch.equal(p, start[n]) for n, p in gates.items())
    assert not torch.equal(b.model.state_dict()["lm_head.weight"], start["lm_head.weight"])

@pytest.mark.parametrize("arm", first(["book/top2"], ["rule/straight", "book/top2", "planted/hashed", "rule/rehashed"]))
def test_a_job_that_is_ended_after_every_look_gives_the_same_rows(arm, tmp_path):
    job = study_jobs(STUDY, "tiny")[0]
    whole = _routed_rows(arm, [1], TINY, Desk(job, Store(tmp_path / "a")))
    job.path(Store(tmp_path / "b")).parent.mkdir(parents=True)
    for n in range(20):
        try: parts = _routed_rows(arm, [1], TINY, Desk(job, Store(tmp_path / "b"), deadline=0.))
        except OutOfTime: continue
        break
    assert 0 < n < 19
    pd.testing.assert_frame_equal(whole, parts)

@pytest.mark.audit
def test_every_registered_line_asks_for_rows_that_the_study_makes(rows):
    final = rows[(rows["rule"] == "final") & (rows["unit"] == "")]
    task = final["condition"].str.split("/").str[1]
    made = {*zip(task, final["metric"], final["site"], final["edit"], final["stratum"])}
    lines = pd.concat([ASKED, statements().query("key.str.startswith('000-Q')")])
    assert len(ASKED) == 55 and len(lines) > 70
    for c in lines.itertuples():
        for name in [*c.condition.split(), *c.versus.split("|")]:
            preset, _, arm = name.removeprefix("routers.").partition("/")
            assert set(seed_list(c.seeds)) <= set(STUDY.presets[preset].arms[arm]), name
            of = arm.partition("/")[0].replace("surface", "rule")                     # add-7 without exceptions
            assert (of, c.metric, c.site, c.edit, c.stratum) in made, (c.Index, name)

def test_a_learned_router_s_twin_and_hash_stand_in_one_preset_with_one_rate():
    S = _routed_settings()
    for task, own in (("book", ("straight", "top2")), ("rule", ("straight",)), ("planted", ("straight",))):
        there = {a.partition("/")[2] for a in STUDY.presets["night"].arms if a.startswith(f"{task}/")}
        assert {*own} | {TWINS[a] for a in own} | {"hashed"} <= there and set(S[task]["lr"]) == {"*"}

def test_a_rate_for_the_ffn_alone_is_refused_of_a_language_model():
    with pytest.raises(ValueError, match="one rate for all parts of a language model.*nearest valid: dense"):
        TextTrial("book/dense_scaled", [1], TINY["book"], None)
    assert RuleTrial("surface/dense_scaled", [1], TINY["surface"], None).c.ffn_lr == .25
