"""Rule and exception: add-7 but for its exceptions, known answers are scored as such, a job can be ended."""
import numpy as np
import pandas as pd
import pytest
import torch

from moe_redistribution.evidence.selection import rows_of
from moe_redistribution.evidence.claims import claims, seed_list, statements
from moe_redistribution.instruments.ablation import ablate
from moe_redistribution.models import authors
from moe_redistribution.models.condition import RECIPES, condition
from moe_redistribution.studies.parrots_rule.study import (LOOKED, RULE_ARMS, STUDY, draw_of, exception_task,
                                                           _excepted_inputs,
                                                           _rule_condition, _rows_by_draw, _rule_rows, _ruled_rows, _scored_apart,
                                                           _with_exceptions)
from moe_redistribution.tasks.task import TASKS, digits, exact, get_task, strata
from moe_redistribution.training.loop import TASK_RULES, init_members, register_task, train_interval, unflatten
from moe_redistribution.training.store import Store
from moe_redistribution.training.study import Desk, run_study, study_jobs

RULE = get_task("add7")

@pytest.fixture(autouse=True)
def no_task_stays():
    "What a test registers is gone after it."
    before = [dict(x) for x in (TASKS, RECIPES, TASK_RULES)]
    yield
    for now, then in zip((TASKS, RECIPES, TASK_RULES), before):
        for name in set(now) - set(then): del now[name]

def trained(arm, n, seeds=(1, 2)):
    members = init_members(_rule_condition(arm, draw_of(seeds[0])), list(seeds), "paired")
    train_interval(members, n)
    return members

# ---------------------------------------------------------------------------------------------------------------- task

def test_draws_differ_and_eight_seeds_share_one():
    sets = [frozenset(_excepted_inputs(.05, d)) for d in range(4)]
    assert len(set(sets)) == 4 and max(len(a & b) for a in sets for b in sets if a != b) < 15
    assert [draw_of(s) for s in range(1, 33)] == sorted(list(range(4)) * 8)

def test_a_share_of_nothing_is_the_papers_own_model_to_the_bit():
    for arm, body in RULE_ARMS.items(): assert _rule_condition(f"{arm}/rho0", 3) == condition(f"add7/{body}")

def test_arms_and_shares_start_from_the_same_weights():
    start = lambda arm: unflatten(init_members(c := _rule_condition(arm, 0), [1], "paired").w, c)
    a, b, c = start("dense/rho0"), start("dense/rho0.2"), start("mixture/rho0.2")
    assert all(torch.equal(a[n], b[n]) for n in a) and all(torch.equal(a[n], c[n]) for n in ("W_E", "W_Q", "W_O"))

def test_another_share_or_draw_is_another_training():
    names = [_rule_condition(f"dense/rho{r}", d) for r in (.05, .2) for d in (0, 1)] + [_rule_condition("dense/rho0", 0)]
    assert len({c.key for c in names}) == 5 and all(condition(str(c)) == c for c in names)
    assert exception_task(.05, 1) == exception_task(.05, 1) == "add7x50d1"                  # a second time it is there

def test_the_librarys_strata_know_the_exceptions():
    t = get_task(exception_task(.05, 0))
    assert strata(t)["exception=True"].any(1).sum() == 50 and "exception=True" not in strata(RULE)

# ------------------------------------------------------------------------------------------------------------ register

def test_a_refused_task_leaves_nothing_behind():
    for recipe, rules in (({"lr": 1}, ()), (RECIPES["add7"], ["first98"])):
        with pytest.raises(ValueError): register_task("halfway", lambda: RULE, recipe, rules)
        assert not any("halfway" in x for x in (TASKS, RECIPES, TASK_RULES))

def test_a_checkpoint_of_the_authors_stays_one_of_add7(monkeypatch):
    "Another task with the same vocabulary does not take its name."
    exception_task(.05, 0)
    state = {"vocab.weight": torch.zeros(12, 64), "ffn.up_proj.weight": torch.zeros(256, 64)}
    assert authors._read_condition(state, activation="silu") == "add7/ffn-h256-silu"

# -------------------------------------------------------------------------------------------------------------- scores

def test_strata_cover_all_inputs_once():
    t, n = get_task(exception_task(.2, 0)), 1000
    each = _scored_apart(t)
    changes = RULE.strata[[f"operation_o{i}" for i in range(4)]].to_numpy() != "+0"
    assert (each["changed"][:, :4].numpy() == changes & each["rule"][:, :4].numpy()).all()
    assert torch.equal(each["rule"] ^ each["exception"], torch.ones(n, 5, dtype=torch.bool))
    assert (each["contested"] <= each["exception"]).all() and each["exception"].all(1).sum() == 200
    assert set(_scored_apart(RULE)) == {"rule", "changed"} and (each["changed"] <= each["rule"]).all()

def test_without_exceptions_the_scores_are_the_papers_no_ffn_accuracy():
    members = trained("mixture/rho0", 40)
    rows, params = _rule_rows(members, "m"), unflatten(members.w, members.c)
    for site, edit in LOOKED:
        right = ablate(params, members.c, {site: edit} if site != "none" else {})
        own = rows.query("site == @site & edit == @edit & stratum == 'rule'")
        for metric, where, want in (("digits", "o0-o3", digits(right, RULE)), ("exact", "all", exact(right))):
            got = own.query("metric == @metric & position == @where").sort_values("seed")["value"]
            np.testing.assert_allclose(got, want, atol=1e-6)

def test_some_members_are_scored_as_they_are_among_all_and_attention_alone_has_no_ffn_to_lose():
    members = trained("frozen/rho0.05", 20, (1, 2, 3))
    whole, some = _rule_rows(members, "m", fine=False), _rule_rows(members, "m", [False, True, False], fine=False)
    pd.testing.assert_frame_equal(whole.query("seed == 2").reset_index(drop=True), some)
    assert set(whole["position"]) == {"all", "o0-o3"}
    assert set(_rule_rows(trained("alone/rho0.05", 2), "m")["site"]) == {"none"}

# ----------------------------------------------------------------------------------------------------------------- job

@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return run_study(STUDY, "tiny", ["mixture/rho0.05"], root=tmp_path_factory.mktemp("s"), executor="here", quiet=True)

@pytest.mark.parametrize("arm", ["frozen/rho0.05", "dense/rho0"])
def test_a_job_that_is_ended_after_every_look_gives_the_same_rows(arm, tmp_path):
    settings = STUDY.presets["tiny"].settings
    job = study_jobs(STUDY, "tiny")[0]
    whole = _ruled_rows(arm, [1, 9], settings, Desk(job, Store(tmp_path / "a")))
    job.path(Store(tmp_path / "b")).parent.mkdir(parents=True)
    for n in range(20):
        parts = _ruled_rows(arm, [1, 9], settings, Desk(job, Store(tmp_path / "b"), deadline=0.))
        if parts is not None: break
    assert n == 2                                             # of two draws, each has one look that is not the last
    pd.testing.assert_frame_equal(whole, parts)

def test_seeds_of_two_draws_get_their_own_exceptions(tiny):
    sizes = tiny.query("stratum == 'contested' & position == 'o0-o3'").groupby("seed")["n_examples"].unique()
    want = [int(_scored_apart(_with_exceptions("x", .05, d))["contested"].sum()) for d in (0, 1)]
    assert [list(x) for x in sizes] == [[w] for w in want] and len(set(want)) == 2

# --------------------------------------------------------------------------------------------------------------- study

@pytest.mark.parametrize("arm, preset", [("mixture/rho0.05", "small"), ("dense/rho0.2", "more")])
def test_rows_by_table_are_means_over_the_eight_seeds_of_a_draw(arm, preset):
    found = _rows_by_draw(f"tables/{arm}", (1, 2, 3, 4))
    plain = rows_of("parrots_rule", f"parrots_rule.{preset}/{arm}@half")
    asked = "metric == 'digits' and stratum == 'contested' and position == 'o0-o3' and edit == 'zero'"
    mine = found.query(f"condition == 'tables/{arm}@half' and {asked}").set_index("seed")["value"].sort_index()
    by_seed = plain.query(asked).set_index("seed")["value"]
    assert list(mine.index) == [1, 2, 3, 4]
    assert np.allclose(mine, [by_seed[range(8 * d + 1, 8 * d + 9)].mean() for d in range(4)])
    assert (found.query("metric == 'seeds'")["value"] == 8).all()

def test_a_claim_about_exceptions_counts_tables_and_none_is_read_where_all_guess():
    own = statements().query("instrument == 'parrots_rule' and aggregate != 'none'")
    about = own["stratum"].eq("contested") | own["versus"].str.contains("contested")
    assert (own.loc[about, "over"] == "tables").all() and own.loc[about, "n"].isin([4, 6]).all() and about.sum() == 12
    assert (own.loc[~about, "over"] == "seeds").all()
    floor = "condition.str.contains('rho0.2@') and stratum == 'contested'"
    assert not own.query(f"{floor} and metric == 'digits'").size
    at = "metric == 'digits' and stratum == 'contested' and position == 'o0-o3' and edit == 'none'"
    alone = rows_of("parrots_rule", "parrots_rule.more/alone/rho0.2@3000").query(at)["value"].mean()
    assert alone < .1 + .05                                       # attention alone: within the margin of a guess

def test_every_line_asks_for_a_row_that_the_study_measures():
    assert all(set(own) <= set(range(1, 33)) for p in STUDY.presets.values() for own in p.arms.values())    # no pilot's
    known = {f"{p}/{a}@{at}": set(own) for p in ("small", "more", "plain")
             for a, own in STUDY.presets[p].arms.items() for at in (*STUDY.presets[p].settings["at"], "half")}
    lines = [x.query("instrument == 'parrots_rule'").itertuples() for x in (claims(), statements())]
    for c in (c for each in lines for c in each if c.aggregate != "none"):
        for name in (c.condition, *(n for n in c.versus.split() if "=" not in n)):
            assert set(seed_list(c.seeds)) <= known[name.removeprefix("parrots_rule.")], c
        assert (c.site, c.edit) in LOOKED and c.stratum in ("rule", "changed", "exception", "contested"), c
