"""Survival against plain products and closed forms; progress measures against two-dimensional Fourier transforms."""
import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import CensoredData, logrank

from moe_redistribution.tasks.data import split
from moe_redistribution.instruments.grokking import (_embedding_gini, _grokking_rows, growth, _keep_waves, _key_waves,
                                                     _pair_losses, progress, _split_losses, _sum_means, _sum_share,
                                                     weight_norms)
from moe_redistribution.judge.survival import (kaplan_meier, mann_whitney, survival,
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

@pytest.mark.parametrize("n", [8, 20, 24, 38, 44, 54, 62])
def test_the_median_is_where_half_have_got_there_though_one_half_is_a_product_of_roundings(n):
    time = np.arange(1, n + 1)
    assert survival(np.minimum(time, n - 1), time < n)["median"] == n // 2

@pytest.mark.parametrize("call, says", [
    (lambda: survival([1, 2], [True]), "a time and a flag"), (lambda: survival([], []), "a time and a flag"),
    (lambda: mann_whitney([], [1.]), "runs on both sides"), (lambda: mann_whitney([1.], []), "runs on both sides")])
def test_what_has_no_runs_or_no_flags_is_refused(call, says):
    with pytest.raises(ValueError, match=says): call()

def test_a_time_beyond_the_last_one_watched_may_be_asked_for_where_everybody_is_there():
    assert survival([5, 9], [True, True], until=10)["restricted_mean"] == 7

def test_a_table_of_arms_has_one_end_that_all_of_them_were_watched_to():
    both = pd.concat([frame([10, 20, 40], [True, True, False]), frame([5, 30], [True, False], "d")])
    got = survival_table(both).set_index("condition")
    assert (got["until"] == 30).all() and got.loc["d", "events"] == 1
    assert math.isclose(got.loc["c", "restricted_mean"], 10 + 10 * 2 / 3 + 10 / 3)

# ------------------------------------------------------------------------------------------------------------ two arms

def ranks(slow, fast, cutoff=40_000):
    return sum((s > f) + .5 * (s == f) for s in np.nan_to_num(slow, nan=cutoff)
               for f in np.nan_to_num(fast, nan=cutoff))

@settings(max_examples=30)
@given(st.lists(st.sampled_from([100., 200, 300, 400, np.nan]), min_size=2, max_size=8),
       st.lists(st.sampled_from([100., 200, 300, 400, np.nan]), min_size=2, max_size=8))
def test_u_counts_the_pairs_in_which_the_slow_arm_is_later(slow, fast):
    assert mann_whitney(np.array(slow), np.array(fast))["U"] == ranks(slow, fast)

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

def test_share_of_the_sum_is_one_for_functions_of_the_sum_and_a_113th_for_noise():
    by_sum = torch.randn(1, P, P + 1, generator=torch.Generator().manual_seed(1))[:, T.targets[:, 0]]
    near(_sum_share(by_sum), torch.ones(1).double(), 1e-6)
    a, b = T.tokens[:, 0], T.tokens[:, 1]
    difference = torch.randn(1, P, P + 1, generator=torch.Generator().manual_seed(1))[:, (a - b) % P]
    assert _sum_share(difference) < 1e-6 and abs(_sum_share(logits_of())[0] * P - 1) < .1

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
    for measure in (_pair_losses, progress):
        with pytest.raises(ValueError, match="function of a sum on a circle"): measure(params, "add7/ffn-h32-relu")
    with pytest.raises(ValueError, match="one a member of the population; got 2"):
        _grokking_rows(params, "add7/ffn-h32-relu", [1, 2])
