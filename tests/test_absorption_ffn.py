"""Routing absorption in the FFN: a fork is a run of its own, only what is named learns, and known answers come out."""
import pandas as pd
import pytest
import torch

from moe_redistribution.evidence.claims import claims, seed_list, statements
from moe_redistribution.models.condition import condition
from moe_redistribution.models.events import MODEL_PARTS
from moe_redistribution.models.population import forward, predict
from moe_redistribution.studies.absorption_ffn import study as room
from moe_redistribution.studies.absorption_ffn.deployed import (CachedExperts, affine_logits, answer_scores,
                                                                best_factor, _fit_linear,
                                                                _imitation, oracle, router_of)
from moe_redistribution.studies.absorption_ffn.study import (ABSORBING, DEPLOYED, NOISED, STUDY, SWAPPED,
                                                             _absorbed_rows, by_edit, _fork_name, _fork_of, looks, loss_of,
                                                             _measures_of)
from moe_redistribution.training.loop import init_members, train_interval, unflatten
from moe_redistribution.training.store import Store
from moe_redistribution.training.study import Desk, run_study, study_jobs

SEEDS = [1, 2]

def trained(name, n, seeds=SEEDS):
    members = init_members(condition(name), seeds, "paired")
    train_interval(members, n)
    return members

def opened(members): return CachedExperts(unflatten(members.w, members.c), members.c)

@pytest.fixture(scope="module")
def bases(): return {arm: trained(name, 6) for arm, name in ABSORBING.items()}

@pytest.fixture(scope="module")
def dense(): return opened(trained(ABSORBING["dense"], 60))

@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return by_edit(run_study(STUDY, "tiny", ["frozen", "dense"], root=tmp_path_factory.mktemp("s"), executor="here", quiet=True))

# --------------------------------------------------------------------------------------------------------------- forks

@pytest.mark.parametrize("arm, edit", [("frozen", "swap+experts"), ("learned", "swap+all"), ("soft", "swap+router"),
                                       ("top2_frozen", "swap+all+router"), ("top2", "attn"), ("frozen", "all")])
def test_a_fork_is_the_run_from_scratch_under_its_name_to_the_bit(bases, arm, edit):
    before = bases[arm].w.clone()
    fork = _fork_of(bases[arm], edit, arm)
    train_interval(fork, 4)
    whole = trained(_fork_name(arm, 6, edit), 10)
    for n in ("w", "m", "v"): assert torch.equal(getattr(fork, n), getattr(whole, n)), n
    assert torch.equal(bases[arm].w, before) and bases[arm].step.tolist() == [6, 6]       # others fork from it, too

@pytest.mark.parametrize("arm", SWAPPED)
def test_only_what_an_edit_names_moves_and_all_else_keeps_its_bits(bases, arm):
    for edit in looks(arm, dict(after=[1], long=[1])):
        fork, words = _fork_of(bases[arm], edit, arm), edit.split("+")
        began = {n: v.clone() for n, v in unflatten(fork.w, fork.c).items()}
        train_interval(fork, 2)
        moved = {n for n, v in unflatten(fork.w, fork.c).items() if not torch.equal(v, began[n])}
        parts = {"experts", "attn", "embed", "router"} if "all" in words else set(words) - {"swap", "noise"}
        if "router" not in words and not condition(ABSORBING[arm]).routing.learns: parts -= {"router"}
        assert moved == {n for p in parts for n in MODEL_PARTS[p] if n in began}, edit

@pytest.mark.audit
@pytest.mark.parametrize("arm", NOISED)
def test_noise_costs_what_the_swap_costs_and_moves_experts_alone(arm):
    base = trained(ABSORBING[arm], 250)
    noisy, swapped = (_fork_of(base, e, arm) for e in ("noise", "swap"))
    a, b, own = (loss_of(x.w, x.c) for x in (noisy, swapped, base))
    torch.testing.assert_close(a, b, rtol=.02, atol=.02)
    moved = {n for n, v in unflatten(noisy.w - base.w, base.c).items() if v.abs().max() > 0}
    assert (b > own).all() and moved == {"W_up", "b_up", "W_down", "b_down"}

def test_every_arm_gets_the_same_router_B_which_is_not_its_own(bases):
    routers = [unflatten(_fork_of(bases[arm], "swap", arm).w, condition(ABSORBING[arm]))["W_router"] for arm in SWAPPED]
    assert all(torch.equal(x, routers[0]) for x in routers)
    B = router_of(condition(ABSORBING["frozen"]), SEEDS, "paired", 1, routers[0])
    A = unflatten(init_members(condition(ABSORBING["frozen"]), SEEDS, "paired").w,
                  condition(ABSORBING["frozen"]))["W_router"]
    assert torch.equal(B, routers[0]) and not torch.isclose(A, B).any(-1).any() and not torch.equal(B[0], B[1])

def test_experts_that_exchange_names_with_the_routers_columns_change_nothing(bases):
    params, c, perm = unflatten(bases["top2_frozen"].w, bases["top2_frozen"].c), bases["top2_frozen"].c, [2, 0, 3, 1]
    named = params | {n: params[n][:, :, perm] for n in ("W_up", "b_up", "W_down", "b_down")}
    named["W_router"] = params["W_router"][..., perm]
    a, b = (CachedExperts(p, c) for p in (params, named))
    torch.testing.assert_close(a.added(a.gates), b.added(b.gates))
    assert torch.equal(oracle(a), torch.tensor(perm)[oracle(b)]) and torch.equal(predict(params, c), predict(named, c))

# ---------------------------------------------------------------------------------------------------------- deployment

@pytest.mark.parametrize("arm", ABSORBING)
def test_cached_experts_with_the_models_own_gates_give_its_logits(bases, arm):
    x = opened(bases[arm])
    plain = forward(x.params, x.t.tokens, x.c)[:, :, list(x.t.read)]
    torch.testing.assert_close(x.logits(x.added(x.gates)), plain, rtol=1e-4, atol=1e-4)

@pytest.mark.audit
def test_the_affine_map_of_a_loud_output_finds_what_a_factor_finds(dense):
    "An affine map can undo any factor, and more steps lose no more."
    ffn = dense.added(dense.gates)
    loss = lambda logits: answer_scores(logits, dense.t)["loss"]
    fits = [loss(affine_logits(dense, 2 * ffn, ffn, steps)) for steps in (20, 100, 300)]
    assert (fits[0] > fits[1]).all() and (fits[1] > fits[2]).all()
    assert (fits[2] < loss(dense.logits(best_factor(dense, ffn)[:, None, None, None] * ffn))).all()

def test_a_map_of_the_streams_coordinates_is_as_one_to_the_logits(dense):
    "Every map to the logits is one d → d behind the unembedding, which has full rank."
    U = dense.params["W_E"].mT
    A = torch.randn(2, 64, dense.t.d_vocab_out, generator=torch.Generator().manual_seed(0))
    M = A @ torch.linalg.pinv(U)
    ffn = dense.added(dense.gates)
    own = dense.logits() + torch.einsum("s b t d, s d v -> s b t v", ffn, A)
    mapped = torch.einsum("s b t d, s d e -> s b t e", ffn, M)
    torch.testing.assert_close(dense.logits(mapped), own, rtol=1e-3, atol=1e-2)

def test_a_linear_router_learns_any_linear_choice(bases):
    x = opened(bases["frozen"])
    W = torch.randn(2, 64, 4, generator=torch.Generator().manual_seed(0))
    chosen = torch.einsum("s b t d, s d e -> s b t e", x.mid, W).argmax(-1)
    assert (_imitation(x, chosen) == chosen).float().mean() > .97

def test_a_fit_of_features_that_do_not_vary_together_stays_finite():
    x = torch.randn(1, 50, 1, generator=torch.Generator().manual_seed(0)).expand(-1, -1, 3)
    assert _fit_linear(x, (x[..., 0] > 0).long(), 2).isfinite().all()

# --------------------------------------------------------------------------------------------------------------- study

@pytest.mark.audit
def test_every_row_is_a_number_and_every_share_one(tiny):
    assert tiny["value"].notna().all() and set(tiny["stream"]) == {"paired"}
    shares = tiny[tiny["metric"].isin(["exact", "digits", "no_ffn", "no_ffn_exact", "agreement"])]
    assert shares["value"].between(0, 1).all()

@pytest.mark.audit
def test_the_untrained_router_deployed_is_the_swap(tiny):
    own = tiny.query("condition == 'frozen' & step == 0 & metric in ['exact', 'loss']")
    a, b = (own.query(f"edit == '{e}'").set_index(["metric", "seed"])["value"] for e in ("swap", "linear"))
    pd.testing.assert_series_equal(a, b, rtol=1e-5)

@pytest.mark.audit
def test_a_frozen_router_moves_only_where_it_is_named(tiny):
    own = tiny.query("metric == 'router_moved' & condition == 'frozen'")
    moved = own.groupby("edit")["value"].agg(["min", "max"])
    assert (moved.loc[moved.index.str.contains("router"), "min"] > 0).all()
    assert (moved.loc[~moved.index.str.contains("router"), "max"] == 0).all()

@pytest.mark.audit
def test_a_job_that_is_ended_after_every_step_gives_the_same_rows(tmp_path, monkeypatch):
    "As one that is left alone; what was measured before is not measured again."
    settings = STUDY.presets["tiny"].settings
    monkeypatch.setattr(room, "REPAIRS", ("swap+experts", "swap+all"))
    monkeypatch.setitem(room.RECIPES["add7"], "eval_every", 5)
    job = study_jobs(STUDY, "tiny", "top2")[0]
    whole = _absorbed_rows("top2", SEEDS, settings, Desk(job, Store(tmp_path / "a")))
    assert whole is not None
    job.path(Store(tmp_path / "b")).parent.mkdir(parents=True)
    for n in range(20):
        parts = _absorbed_rows("top2", SEEDS, settings, Desk(job, Store(tmp_path / "b"), deadline=0.))
        if parts is not None: break
    assert n == 1 + len(_measures_of("top2", settings))
    pd.testing.assert_frame_equal(whole, parts)

def test_every_arm_has_its_measures():
    assert {*SWAPPED, *DEPLOYED} == set(ABSORBING)
    settings = STUDY.presets["small"].settings
    for arm in ABSORBING:
        names = list(_measures_of(arm, settings))
        assert ("deployed" in names) == (arm in DEPLOYED) and ("swap+experts" in names) == (arm in SWAPPED)
        for edit in looks(arm, settings): condition(_fork_name(arm, settings["fork"], edit))
    assert all(len(p.arms[a]) >= 16 for p in [STUDY.presets["small"]] for a in ABSORBING)

def test_every_line_asks_for_a_fork_that_the_study_measures():
    settings, asked = STUDY.presets["small"].settings, claims().query("instrument == 'absorption_ffn'")
    forks = {f"{a}/{e}@{n}" for a in SWAPPED for e, steps in looks(a, settings).items() for n in steps}
    at_fork = {f"{a}/{e}{more}@0" for a in ABSORBING for e in ("none", "swap") for more in ("", "+factor", "+affine")}
    known = forks | at_fork | {f"{a}/{w}{more}@0" for a in (*DEPLOYED, "slices") for more in ("", "+factor")
                               for w in ("oracle", "distilled", "linear", "random", "uniform")}
    lines = [*asked.itertuples(), *statements().query("instrument == 'absorption_ffn'").itertuples()]
    assert len(lines) > 40
    for c in lines:
        assert {n.partition("/")[2] for n in (c.condition, *c.versus.split())} <= known, c
        assert set(seed_list(c.seeds)) == set(STUDY.presets["small"].arms["frozen"])
