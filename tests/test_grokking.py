"""Survival against plain products and closed forms; progress measures against two-dimensional Fourier transforms."""
import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import CensoredData, logrank

from moe_redistribution.models.clocks import FREQS, bilinear_clock, clock
from moe_redistribution.tasks.data import split
from moe_redistribution.instruments.grokking import (_embedding_gini, gini, _grokking_rows, growth, _keep_waves, _key_waves,
                                                     _pair_losses, progress, _split_losses, _sum_means, _sum_share,
                                                     weight_norms)
from moe_redistribution.evidence.survival import (_grokking_epochs, kaplan_meier, mann_whitney, run_times, survival,
                                                  survival_table, time_to, two_arms)
from moe_redistribution.models.population import init, loss
from moe_redistribution.tasks.task import P, get_task
from moe_redistribution.instruments.rows import ROW_COLUMNS

T = get_task("modadd")
runs = st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=15)
near = lambda a, b, eps=1e-9: torch.testing.assert_close(a, b, rtol=eps, atol=eps)

def frame(time, reached, condition="c"):
    return pd.DataFrame(dict(condition=condition, stream="authors", seed=range(len(time)), time=time, reached=reached))

def histories(tests, every=100):
    one = lambda s, t: dict(condition="c", stream="authors", seed=s, step=np.arange(1, len(t) + 1) * every, test=t)
    return pd.concat([pd.DataFrame(one(s, t)) for s, t in enumerate(tests)], ignore_index=True)

# ----------------------------------------------------------------------------------------------------------- survival

@settings(max_examples=40)
@given(runs)
def test_kaplan_meier_is_the_plain_product_over_events(drawn):
    time, reached = map(np.array, zip(*drawn))
    sf = kaplan_meier(time, reached)
    for t, got in zip(sf.quantiles, sf.probabilities):
        want = 1.0
        for u in sorted(set(time[reached])):
            if u <= t: want *= 1 - (reached & (time == u)).sum() / (time >= u).sum()
        assert math.isclose(got, want, abs_tol=1e-12)

@settings(max_examples=40)
@given(runs, st.integers(1, 12))
def test_the_restricted_mean_is_the_area_under_the_curve(drawn, until):
    time, reached = map(np.array, zip(*drawn))
    sf, until = kaplan_meier(time, reached), min(until, max(time))
    fine = np.arange(0, until, .25) + .125                                              # times are whole numbers
    want = np.select([fine >= t for t in sf.quantiles[::-1]], list(sf.probabilities[::-1]), 1.0).sum() * .25
    got = survival(time, reached, until)
    assert math.isclose(got["restricted_mean"], want, abs_tol=1e-9)
    assert got["median_lo"] <= got["median"] <= got["median_hi"] and got["restricted_mean"] <= until

@settings(max_examples=20)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=15))
def test_without_censoring_the_restricted_mean_is_the_mean(time):
    assert math.isclose(survival(time, [True] * len(time))["restricted_mean"], np.mean(time), rel_tol=1e-12)

def test_the_interval_of_the_median_covers_it_as_often_as_it_says():
    rng, true, inside = np.random.default_rng(3), 30_000 * np.log(2), []
    for x in rng.exponential(30_000, (100, 30)):
        got = survival(np.minimum(x, 40_000), x <= 40_000)
        inside.append(got["median_lo"] <= true <= got["median_hi"])
    assert .89 <= np.mean(inside) <= .995

@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 9])
def test_few_runs_that_all_arrive_do_not_bound_the_median_by_the_last_of_them(n):
    """Where all n come after the median, with chance 2⁻ⁿ, no interval between events can hold it; elsewhere this one
    does, or nearly."""
    rng, true, got = np.random.default_rng(n), 30_000 * np.log(2), []
    for x in rng.exponential(30_000, (400, n)): got.append(survival(x, [True] * n))
    inside = np.mean([g["median_lo"] <= true <= g["median_hi"] for g in got])
    assert abs(inside - (1 - .5**n)) < .05 if n < 5 else .93 <= inside <= 1
    assert {math.isinf(g["median_hi"]) for g in got} == {n < 7}

@pytest.mark.parametrize("n", [8, 20, 24, 38, 44, 54, 62])
def test_the_median_is_where_half_have_got_there_though_one_half_is_a_product_of_roundings(n):
    time = np.arange(1, n + 1)
    assert survival(np.minimum(time, n - 1), time < n)["median"] == n // 2

def test_what_was_not_watched_is_not_averaged():
    with pytest.raises(ValueError, match="the last time watched"): survival([5, 9], [True, False], until=10)
    assert survival([5, 9], [True, True], until=10)["restricted_mean"] == 7         # everybody is there: nothing to add
    with pytest.raises(ValueError, match="a time and a flag"): survival([1, 2], [True])
    with pytest.raises(ValueError, match="a time and a flag"): survival([], [])

def test_a_table_of_arms_has_one_end_that_all_of_them_were_watched_to():
    both = pd.concat([frame([10, 20, 40], [True, True, False]), frame([5, 30], [True, False], "d")])
    got = survival_table(both).set_index("condition")
    assert (got["until"] == 30).all() and got.loc["d", "events"] == 1
    assert math.isclose(got.loc["c", "restricted_mean"], 10 + 10 * 2 / 3 + 10 / 3)

# ------------------------------------------------------------------------------------------------------------ two arms

def test_an_arm_without_runs_is_not_compared():
    for a, b in (([], [1.]), ([1.], [])):
        with pytest.raises(ValueError, match="runs on both sides"): mann_whitney(a, b)

def ranks(slow, fast, cutoff=40_000):
    return sum((s > f) + .5 * (s == f) for s in np.nan_to_num(slow, nan=cutoff)
               for f in np.nan_to_num(fast, nan=cutoff))

@settings(max_examples=30)
@given(st.lists(st.sampled_from([100., 200, 300, 400, np.nan]), min_size=2, max_size=8),
       st.lists(st.sampled_from([100., 200, 300, 400, np.nan]), min_size=2, max_size=8))
def test_u_counts_the_pairs_in_which_the_slow_arm_is_later(slow, fast):
    assert mann_whitney(np.array(slow), np.array(fast))["U"] == ranks(slow, fast)

def test_the_printed_p_follows_from_u_the_sizes_and_eight_ties():
    "U = 390 of 400, n = 20 and 20, eight tied at the end: the normal approximation, by hand."
    N, ties = 40, 8
    sd = math.sqrt(20 * 20 / 12 * (N + 1 - (ties**3 - ties) / (N * (N - 1))))
    p = .5 * math.erfc((390 - 200 - .5) / sd / math.sqrt(2))
    assert f"{p:.2e}" == "1.33e-07"
    rng = np.random.default_rng(0)
    for _ in range(200):                                                        # any data with these has that p
        fast = np.sort(rng.choice(np.arange(5_000, 14_000), 20, replace=False)).astype(float)
        slow = rng.choice(np.arange(14_001, 39_000), 12, replace=False).astype(float)
        slow[0] = (fast[9] + fast[10]) / 2                                     # ten of the fast ones are slower than it
        if slow[0] in fast: continue
        got = mann_whitney(np.r_[slow, [np.nan] * 8], fast)
        assert got["U"] == 390 and math.isclose(got["p"], p, rel_tol=1e-9)

def test_log_rank_is_scipys_and_any_common_end_will_do():
    rng = np.random.default_rng(1)
    x, y = rng.exponential(30_000, 20).astype(int) + 1, rng.exponential(9_000, 20).astype(int) + 1
    slow, fast = (frame(np.minimum(v, 40_000), v <= 40_000) for v in (x, y))
    got = two_arms(slow, fast)
    want = logrank(*[CensoredData(uncensored=v[v <= 40_000], right=np.minimum(v, 40_000)[v > 40_000]) for v in (x, y)])
    assert math.isclose(got["logrank_p"], want.pvalue, rel_tol=1e-12)
    assert got == two_arms(slow, fast, cutoff=10**7)

def test_a_null_of_two_equal_arms_is_rejected_as_often_as_it_says():
    rng, p = np.random.default_rng(2), []
    for x in rng.exponential(30_000, (100, 2, 20)):
        arms = [frame(np.minimum(v, 40_000).round(), v <= 40_000) for v in x]
        got = two_arms(*arms)
        p.append([got["logrank_p"], got["mann_whitney_p"]])
    assert (np.mean(np.array(p) < .1, axis=0) < .17).all() and (np.mean(np.array(p) < .5, axis=0) > .35).all()

def test_runs_with_ends_of_their_own_are_not_ranked():
    with pytest.raises(ValueError, match="until 900 at least; got one until 500"):
        two_arms(frame([500, 100], [False, True]), frame([900, 200], [True, True]))
    with pytest.raises(ValueError, match="cutoff that nobody grokked after"): mann_whitney([50_000.], [100.])

# ----------------------------------------------------------------------------------------------------- when it grokked

def test_first_time_is_strict_and_the_order_of_rows_does_not_matter():
    h = histories([[.2, .99, .9901, .5], [.1, .2, .3, .4]])
    got = time_to(h.sample(frac=1, random_state=0))
    assert got["time"].tolist() == [300, 400] and got["reached"].tolist() == [True, False]
    assert got["after"].tolist() == [200, 300]
    assert time_to(h, level=.1)["time"].tolist() == [100, 200] and time_to(h, level=.1)["after"].tolist() == [0, 100]

def test_evaluations_without_a_value_are_no_evaluations():
    h = histories([[.2, np.nan, .995, np.nan], [.2, .3, np.nan, np.nan]])
    assert time_to(h)["time"].tolist() == [300, 200] and time_to(h)["after"].tolist() == [100, 100]
    with pytest.raises(ValueError, match="'seed': 1"): time_to(histories([[.2, .3], [np.nan, np.nan]]))

def test_thinning_a_history_only_widens_the_bracket():
    rng = np.random.default_rng(0)
    h = histories(np.clip(np.linspace(0, 1.2, 60) + rng.normal(0, .05, (6, 60)), 0, 1))
    full, thin = time_to(h), time_to(h[h["step"] % 700 == 0])
    assert (thin["time"] >= full["time"]).all()
    first_seen = thin["after"] < full["time"]
    assert first_seen.all() or full.loc[~first_seen, "reached"].all()          # it may have been up and down in between

def test_a_failed_run_is_censored_where_it_failed_and_a_rule_not_met_is_no_time():
    table = pd.DataFrame(dict(condition="c", stream="authors", seed=[1, 2, 3], step=[9000, 40000, 40000],
                              first99_step=[8400, 100, 7], failed=pd.array([None, None, 12000], "Int64"),
                              first99_reached=[True, False, False]))
    assert run_times(table)["time"].tolist() == [8400, 40000, 12000]
    with pytest.raises(ValueError, match="nearest"): run_times(table, "first98")

def test_the_epoch_of_the_best_accuracy_is_also_given_to_runs_that_never_grok():
    got = _grokking_epochs(histories([[.1, .995, .992, 1.0, .99], [.03, .01, .02, .01, .01]], every=2_000))
    assert got["first99"].tolist()[0] == 4_000 and got["running"].tolist()[0] == 5_000
    assert got["best"].tolist() == [8_000, 2_000] and got[["first99", "running"]].iloc[1].isna().all()

def test_growth_is_paired_by_seed():
    h = pd.DataFrame(dict(condition="c", stream="s", seed=[1, 1, 2, 2, 3], step=[5, 9, 5, 9, 9],
                          norm=[2., 1, 10, 30, 7]))
    assert growth(h, "norm", 5, 9)["ratio"].tolist() == [.5, 3]
    with pytest.raises(ValueError, match=r"steps with values: \[5, 9\]"): growth(h, "norm", 1, 9)

# ---------------------------------------------------------------------------------------------------- progress measures

def logits_of(seed=0): return torch.randn(2, P * P, P + 1, generator=torch.Generator().manual_seed(seed))

def test_keeping_waves_of_the_sum_is_a_mask_in_two_dimensional_fourier_space():
    "The way Nanda et al. write it: all (f, g) but (0, 0) and ±(k, k) of the key frequencies are set to zero."
    x, keys = logits_of()[:1], torch.zeros(1, 56, dtype=torch.bool)
    keys[0, [0, 20, 55]] = True
    flat = torch.fft.fft2(x.unflatten(1, (P, P)).double(), dim=(1, 2))
    mask = torch.zeros(1, P, P, 1)
    mask[:, 0, 0] = 1
    for f in keys[0].nonzero()[:, 0] + 1: mask[:, f, f] = mask[:, P - f, P - f] = 1
    want = torch.fft.ifft2(flat * mask, dim=(1, 2)).real.flatten(1, 2)
    got = _keep_waves(_sum_means(x), keys)[:, T.targets[:, 0]]
    near(got.double(), want, 1e-5)
    parts = _split_losses(x, keys)
    nll = lambda y: -y.log_softmax(-1).gather(-1, T.targets[None].expand(1, -1, -1))[..., 0]
    near(parts["restricted"].double(), nll(want), 1e-4)
    mask[:, 0, 0] = 0
    near(parts["excluded"].double(), nll(x - torch.fft.ifft2(flat * mask, dim=(1, 2)).real.flatten(1, 2)), 1e-4)
    near(parts["full"].double(), nll(x.double()), 1e-5)

def test_full_loss_is_the_training_loss():
    name, params = "modadd/moe-e4k1-h16-gelu+d32", init("modadd/moe-e4k1-h16-gelu+d32",
                                                        [torch.Generator().manual_seed(0)])
    near(_pair_losses(params, name)["full"].mean(1), loss(params, T.tokens, T.targets, name)[0], 1e-5)

def test_key_waves_are_the_fewest_that_hold_the_share():
    power = torch.rand(6, 56, generator=torch.Generator().manual_seed(0), dtype=torch.double)**8
    for share in (.3, .9, .999):
        keys = _key_waves(power, share)
        for p, k in zip(power, keys):
            n = int(k.sum())
            best = p.sort(descending=True).values
            assert best[:n].sum() >= share * p.sum() > best[:n - 1].sum() and p[k].min() >= best[n - 1]

def test_restricted_to_its_own_keys_a_rule_with_quiet_waves_is_still_that_rule():
    "One loud wave ties classes that quiet ones tell apart: with 90 % of the power it would be another model."
    turn = lambda f: (2 * math.pi * f * (torch.arange(P)[:, None] - torch.arange(P + 1)) / P).cos()
    logits = (20 * turn(18) + 4.5 * turn(37) + 3 * turn(36))[None][:, T.targets[:, 0]]
    parts = _split_losses(logits)
    assert set((parts["keys"][0].nonzero()[:, 0] + 1).tolist()) == {18, 36, 37}
    near(parts["restricted"].mean(), parts["full"].mean(), 1e-3)

def test_gini_is_the_mean_difference_of_pairs():
    x = torch.rand(3, 20, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    near(gini(x), (x[:, :, None] - x[:, None]).abs().mean((1, 2)) / (2 * x.mean(1)))
    near(gini(x), gini(7 * x.flip(1)))

def test_share_of_the_sum_is_one_for_functions_of_the_sum_and_a_113th_for_noise():
    by_sum = torch.randn(1, P, P + 1, generator=torch.Generator().manual_seed(1))[:, T.targets[:, 0]]
    near(_sum_share(by_sum), torch.ones(1).double(), 1e-6)
    a, b = T.tokens[:, 0], T.tokens[:, 1]
    difference = torch.randn(1, P, P + 1, generator=torch.Generator().manual_seed(1))[:, (a - b) % P]
    assert _sum_share(difference) < 1e-6 and abs(_sum_share(logits_of())[0] * P - 1) < .1

@pytest.mark.parametrize("make, name", [(clock, "modadd/ffn-h105-relu"), (bilinear_clock, "modadd/glu-h64-linear")])
def test_clocks_have_their_frequencies_and_nothing_without_them(make, name):
    params = make(name)
    parts, got = _pair_losses(params, name), progress(params, name)
    assert set((parts["keys"][0].nonzero()[:, 0] + 1).tolist()) == set(FREQS)
    assert abs(got["restricted_loss"] - got["full_loss"]) < .01 and got["excluded_loss"] > math.log(P) - .05
    others = _key_waves(torch.eye(56)[:1] + 0)                                    # frequency 1 is none of theirs
    assert (progress(params, name, others)["restricted_loss"] > 4.6
            and progress(params, name, others)["excluded_loss"] < .01)

def test_weight_norms_are_those_of_the_whole_list_of_parameters():
    params = init("modadd/moe_glu-e4k1-h16-gelu+norm+d32", [torch.Generator().manual_seed(s) for s in range(2)])
    got = weight_norms(params)
    total = sum((v[1].double()**2).sum() for v in params.values())
    near(got["norm_total"][1]**2, total)
    ffn = sum((params[n][1].double()**2).sum() for n in ("W_router", "W_gate", "W_up", "W_down"))
    near(got["norm_ffn"][1]**2, ffn)
    near(got["norm_attn"][1]**2 + ffn + got["norm_embed"][1]**2, total - 3 * 32)             # the norms' own weights

def test_rows_hold_each_seeds_own_split_and_its_untrained_twin():
    name, seeds = "modadd/moe-e4k1-h16-gelu+d32", [42, 7]
    params = {n: v * 1.5 for n, v in init(name, [torch.Generator().manual_seed(s) for s in seeds]).items()}
    got = _grokking_rows(params, name, seeds, stream="paired", rule="best")
    assert list(got.columns) == list(ROW_COLUMNS) and set(got["rule"]) == {"best"} and len(got) <= 400
    value = got.set_index(["metric", "edit", "split", "seed"])["value"].sort_index()
    full = _pair_losses(params, name)["full"]
    for i, s in enumerate(seeds):
        for part, at in zip(("train", "test"), split(T, s, "paired")):
            assert math.isclose(value["full_loss", "none", part, s], full[i, at].mean(), rel_tol=1e-5)
    twin = init(name, [torch.Generator().manual_seed(42)])
    authors = _grokking_rows(params, name, seeds).set_index(["metric", "edit", "split", "seed"])["value"].sort_index()
    assert math.isclose(authors["gini_W_E", "untrained", "all", 42], _embedding_gini(twin, name)["gini_W_E"].item(),
                        rel_tol=1e-9)

def test_rows_say_over_how_many_pairs_they_are_and_weights_over_none():
    name = "modadd/ffn-h16-gelu+d32"
    n = _grokking_rows(init(name, [torch.Generator()]), name,
                      [42]).groupby(["site", "metric", "split"])["n_examples"].unique().map(list)
    assert (n["weights"].map(tuple) == (0,)).all()
    whole = n["logits"].xs("all", level="split")
    assert whole.to_dict() == {m: [P * P]
                               for m in ("full_loss", "restricted_loss", "excluded_loss", "n_keys", "sum_share")}
    assert all(n["logits", "full_loss", part] == [len(at)] for part, at in zip(("train", "test"), split(T, 42)))

def test_refusals_say_why():
    params = init("add7/ffn-h32-relu", [torch.Generator()])
    for measure in (_pair_losses, progress, _embedding_gini):
        with pytest.raises(ValueError, match="function of a sum on a circle"): measure(params, "add7/ffn-h32-relu")
    with pytest.raises(ValueError, match="one a member of the population; got 2"):
        _grokking_rows(params, "add7/ffn-h32-relu", [1, 2])
