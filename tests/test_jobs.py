"""Jobs that need jobs: what comes first, what several share, and what a change sets aside; nothing of another's is
taken for one's own."""
from dataclasses import replace

import pytest
import torch

from moe_redistribution.opened.layers import layers_of
from moe_redistribution.opened.router_pass import probabilities, route_again
from moe_redistribution.opened.families import tiny_model
from moe_redistribution.instruments.rows import rows
from moe_redistribution.models.condition import RECIPES
from moe_redistribution.record.recording import unrecorded_jobs
from moe_redistribution.tasks.task import TASKS, made_tasks, get_task
from moe_redistribution.training.groups import _Stem, Training, _stem_of, _stems
from moe_redistribution.training.jobs import begin_again, run_job, run_all, in_waves
from moe_redistribution.training.loop import TASK_RULES, register_task
from moe_redistribution.training.store import Store
from moe_redistribution.training.study import Preset, Study, TrainingStudy, run_study, study_jobs
from same import assert_same_runs

NAME = "add7/ffn-h8-silu"
HERE = dict(executor="here", quiet=True)

def forks(name=NAME, seeds=(1, 2), **how):
    how = dict(until="full", steps=600) | how
    return [Training(f"{name}@450:{e}", seeds, **how) for e in ("reset1", "reset0.5")]

@pytest.mark.audit
def test_a_stem_of_other_data_is_not_taken_up_and_again_sets_it_aside(tmp_path):
    t = replace(get_task("add7"), name="stemmed")
    register_task("stemmed", lambda: t, RECIPES["add7"], ("first1000",))
    try:
        name = "stemmed/ffn-h8-silu"
        run_all(forks(name), tmp_path / "a", **HERE)
        shuffled = replace(t, targets=t.targets[torch.randperm(len(t), generator=torch.Generator().manual_seed(1))])
        made_tasks["stemmed"] = shuffled
        assert begin_again(forks(name), tmp_path / "a") >= 6
        assert not list((tmp_path / "a" / "stems").rglob("*.safetensors"))
        run_all(forks(name), tmp_path / "a", **HERE), run_all(forks(name), tmp_path / "b", **HERE)
        for f in forks(name): assert_same_runs(tmp_path / "a", tmp_path / "b", f.condition, f.seeds)
    finally:
        for table in (TASKS, RECIPES, TASK_RULES, made_tasks): table.pop("stemmed", None)

@pytest.mark.audit
def test_a_fork_that_ends_before_its_stem_is_trained_without_it_and_a_damaged_stem_is_moved_aside(tmp_path, capsys):
    run_all(forks(), tmp_path, **HERE)
    short = Training(f"{NAME}@450:reset0.25", (1, 2), until="full", steps=200)
    run_all([short], tmp_path, **HERE)
    assert {Store(tmp_path).load(short.condition, s).step for s in (1, 2)} == {200}
    other = Training(f"{NAME}@450:reset0.75", (1, 2), until="full", steps=600)
    for p in (tmp_path / "stems").rglob("*.resume"): p.write_bytes(p.read_bytes()[:-9] + b"x" * 9)
    run_all([other], tmp_path, **HERE), run_all([other], tmp_path / "alone", **HERE)
    assert_same_runs(tmp_path, tmp_path / "alone", other.condition, other.seeds)
    assert "Moved aside; starting this seed at step 0" in capsys.readouterr().err

@pytest.mark.audit
def test_stems_of_measures_with_one_name_are_two_and_a_measure_without_a_name_is_refused(tmp_path):
    def measure(x):
        def m(params, c): return {"m": torch.full((len(params["W_E"]),), x)}
        return m
    for x in (1., 2.):
        run_all(forks(measures=(measure(x),)), tmp_path / "both", **HERE)
        for p in (tmp_path / "both").glob("v1/**/*.safetensors"):
            if x == 1.: p.unlink()
    history = Store(tmp_path / "both").load(forks()[0].condition, 1).history
    assert (history["m"] == 2.).all()
    assert forks(measures=(measure(1.),))[0].key != forks(measures=(measure(2.),))[0].key != forks()[0].key
    with pytest.raises(ValueError, match="a function with a name"): _stems(Store(tmp_path), 400, (3,))

def test_what_needs_an_arm_goes_when_the_arm_is_done_again(tmp_path):
    told = [1.]
    def run(arm, seeds, settings, desk):
        value = told[0] if arm == "b" else desk.needed[0]["value"].iloc[0] + 10
        return rows([value] * len(seeds), seeds, condition=arm, metric="m")
    study = Study("chain", "", {"small": Preset("", dict.fromkeys("bc", (1,)))}, run, lambda *a: 1.,
                  needs=lambda arm, seeds, settings: ("b",) if arm == "c" else ())
    value = lambda: dict(run_study(study, root=tmp_path, **HERE)[["condition", "value"]].values)["chain.small/c"]
    assert value() == 11.
    told[0] = 2.
    assert begin_again(study_jobs(study, arms="b"), tmp_path) == 2 and value() == 12.
    assert run_job(study_jobs(study, arms="c")[0], tmp_path)

def test_needs_that_do_not_exist_are_refused_before_any_work():
    preset = Preset("", dict(b=(1,), c=(1, 2)))
    of = lambda needs: Study("s", "", {"small": preset}, print, print, needs=needs)
    with pytest.raises(ValueError, match="needs of s: expected one of b, c"):
        study_jobs(of(lambda arm, *_: ("typo",)))
    with pytest.raises(ValueError, match=r"b with the seeds of c; got none of \[2\]"):
        study_jobs(of(lambda arm, *_: ("b",) if arm == "c" else ()), arms="c")
    with pytest.raises(ValueError, match="which gives rows"): TrainingStudy("t", "", {"small": preset})

def test_many_seeds_are_trained_in_the_groups_that_they_ask_for_also_where_they_are_needed(tmp_path):
    four = Training(NAME, range(1, 5), group_size=2, steps=200, until="full")
    assert [len(j.seeds) for j in in_waves([four], tmp_path)[0]] == [2] * 2
    run_all([four], tmp_path, **HERE)
    assert Store(tmp_path).load(NAME, 3).manifest["group"] == [3, 4]
    both = Study("s", "", {"small": Preset("", {"a": (1,)})}, print, lambda *a: 1.,
                 needs=lambda *a: forks(seeds=(1, 2, 3, 4), group_size=2))
    waves = in_waves(study_jobs(both), tmp_path / "other")
    assert [len(w) for w in waves] == [2, 4, 1] and {type(j) for j in waves[0]} == {_Stem}

def test_what_fails_does_not_keep_others_from_being_done(tmp_path):
    def run(arm, seeds, settings, desk):
        if arm == "a": raise RuntimeError("a fails")
        return rows([1.], seeds, condition=arm, metric="m")
    study = Study("s", "", {"small": Preset("", dict.fromkeys("abc", (1,)))}, run, lambda *a: 1.,
                  needs=lambda arm, *_: ("b",) if arm == "c" else ())
    with pytest.raises(ValueError, match="RuntimeError: a fails; fix: mend test_jobs.py, line"): run_study(study, root=tmp_path, **HERE)
    assert [j.is_done(Store(tmp_path)) for j in study_jobs(study)] == [False, True, True]

MINE = """
import torch
from moe_redistribution.training.study import Preset, TrainingStudy
from moe_redistribution.instruments.rows import rows
def mine(params, c): return {"mine": torch.ones(len(params["W_E"]))}
def read(name, runs):
    return rows([r.history["mine"].iloc[-1] for r in runs], [r.seed for r in runs], condition=name, metric="mine")
SMALL = Preset("", {NAME: (1,)}, 1, dict(stream="paired", until="full", steps=200))
STUDY = TrainingStudy("mine", "", {"small": SMALL}, read=read, measures=(mine,))
"""

def test_a_study_of_trainings_in_a_file_reaches_its_workers(own_file, tmp_path):
    own_file.write_text(MINE.replace("NAME", repr(NAME)))
    from moe_redistribution.training.study import study_of
    found = run_study(study_of(own_file), root=tmp_path / "store", executor="local:1", quiet=True)
    assert found["value"].tolist() == [1.]

def test_recorded_runs_answer_a_shorter_request():
    job = Training("add7/ffn-h256-silu", (42,), until="full", steps=200)
    assert not unrecorded_jobs([job]) and unrecorded_jobs([replace(job, seeds=(42, 9))])[0].seeds == (9,)

@pytest.mark.parametrize("family", ["mixtral", "olmoe", "gpt_oss", "deepseek_v3"])
def test_scores_are_not_taken_for_probabilities_where_one_expert_has_all_the_weight(family):
    one = dict(num_experts_per_tok=1) | (dict(n_group=1, topk_group=1) if family == "deepseek_v3" else {})
    x = layers_of(tiny_model(family, **one))[1]
    for seed in range(40):
        hidden = torch.randn(1, 32, generator=torch.Generator().manual_seed(seed))
        own = route_again(x.gate, (hidden,), {}, x.experts.num_experts)
        P = probabilities(own)
        wanted = own.scores.float().sigmoid() if family == "deepseek_v3" else own.scores.float().softmax(-1)
        torch.testing.assert_close(P.float(), wanted)

def test_a_condition_without_an_evaluation_before_its_first_event_has_no_stem():
    from moe_redistribution.models.condition import condition
    assert [_stem_of(condition(f"{NAME}{at}")) for at in ("", "@150:reset1", "@450:reset1")] == [None, None, (NAME, 400)]
