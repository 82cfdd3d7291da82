"""Oracles and properties of the evidence room: no statistic is compared with itself."""
from itertools import product
from math import inf
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from scipy import stats

from moe_redistribution.judge import statistics as ev

unit = st.floats(0, 1, allow_nan=False).map(lambda x: round(x, 3))
quick = settings(max_examples=60)

# --- intervals ------------------------------------------------------------------------------------

def test_interval_is_t_below_twenty_and_bca_from_there():
    x = np.random.default_rng(0).normal(.5, .1, 20)
    assert ev.interval(x[:19]).method == "t" and ev.interval(x).method == "BCa"
    half = 2.0930240544082634 * x[:20].std(ddof=1) / np.sqrt(20)   # t.ppf(.975, 19), from a printed table
    assert np.allclose(ev.interval(x, "t")[1:3], (x.mean() - half, x.mean() + half))
    assert np.allclose(ev.interval(x)[1:3], ev.interval(x, "t")[1:3], atol=.01)

@given(st.lists(unit, min_size=20, max_size=40), st.randoms())
@settings(max_examples=25)
def test_bca_is_finite_ordered_and_blind_to_the_order_of_seeds(values, random):
    i, shuffled = ev.interval(values), random.sample(values, len(values))
    assert np.isfinite([i.lo, i.hi]).all() and i.lo <= i.hi
    assert ev.interval(shuffled) == i

@pytest.mark.parametrize("n", [20, 64, 500])
def test_bca_in_batches_is_bca_at_once_to_the_bit(n):
    for x in (np.random.default_rng(n).normal(size=n), np.random.default_rng(n).integers(0, 2, n) * 1.):
        mean = lambda x, axis: x.mean(axis).round(12)                     # equal means tie, whatever their last bit
        whole = stats.bootstrap((np.sort(x),), mean, method="BCa", rng=np.random.default_rng(0)).confidence_interval
        assert ev.interval(x)[1:3] == tuple(whole)

def test_bounds_of_bca_move_with_a_shift():
    x = np.random.default_rng(1).choice([0, .25, .5], 64)                 # many resampled means equal the observed one
    assert np.allclose(np.subtract(ev.interval(x + .1)[1:3], ev.interval(x)[1:3]), .1, atol=1e-9)

def test_an_interval_of_many_values_takes_no_more_memory_and_too_many_are_refused():
    x = np.random.default_rng(0).normal(size=4_000)                       # 320 MB of draws, were they there at once
    tracemalloc.start()
    found, peak = ev.interval(x), tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 160e6 and np.allclose(found[1:3], ev.interval(x, "t")[1:3], atol=.002)
    with pytest.raises(ValueError, match="expected at most 20,000 values for BCa.*got 20001.*method='t'"):
        ev.interval(np.arange(20_001.))
    assert ev.interval(np.arange(20_001.), "t").mean == 10_000

@pytest.mark.parametrize("bad", [[.1, np.nan], [np.inf, 1], [], [[.1, .2]]], ids=str)
def test_nan_and_wrong_shapes_are_refused(bad):
    for ask in (ev.interval, ev.holm, lambda v: ev.welch(v, [.1, .2]), lambda v: ev.paired_permutation([.1, .2], v),
                lambda v: ev.tost(v, [.1, .2], .05)):
        with pytest.raises(ValueError, match="expected finite numbers.* got .* nearest valid: .* fix:"):
            ask(bad)

# --- tests ----------------------------------------------------------------------------------------

@given(st.lists(st.tuples(unit, unit), min_size=1, max_size=8))
@quick
def test_paired_permutation_is_brute_force_enumeration(pairs):
    a, b = np.array(pairs).T
    means = [np.mean(np.array(signs) * (a - b)) for signs in product([1, -1], repeat=len(pairs))]
    assert ev.paired_permutation(a, b).p == pytest.approx(np.mean(np.abs(means) >= abs(np.mean(a - b)) - 1e-12))

def test_welch_is_its_textbook_formula_and_certain_where_nothing_varies():
    a, b = np.array([.1, .4, .35, .8]), np.array([.5, .2, .9, .6, .65, .3])
    va, vb = a.var(ddof=1) / 4, b.var(ddof=1) / 6
    df = (va + vb)**2 / (va**2 / 3 + vb**2 / 5)
    assert ev.welch(a, b).p == pytest.approx(2 * stats.t.cdf(-abs(a.mean() - b.mean()) / np.sqrt(va + vb), df))
    for ddof in (0, 1):
        printed = a.mean(), a.std(ddof=ddof), 4, b.mean(), b.std(ddof=ddof), 6
        assert ev.welch_from_stats(*printed, ddof=ddof) == pytest.approx(ev.welch(a, b).p)
    assert ev.welch([1, 1], [1, 1]) == (0, 1, 0) and ev.welch([1, 1], [0, 0]) == (1, 0, inf)
    assert np.isnan(ev.welch([.1], [.2, .3]).p)

def test_holm_is_never_above_one_and_of_one_test_its_own_p():
    assert np.allclose(ev.holm([.5, .9]), [1, 1]) and np.allclose(ev.holm([.2]), [.2])

@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
@quick
def test_holm_rejects_what_stepping_down_rejects(p):
    alpha, left, rejected = .05, sorted(range(len(p)), key=p.__getitem__), set()
    assume(all(abs(q * k - alpha) > 1e-9 for q in p for k in range(1, len(p) + 1)))
    while left and p[left[0]] <= alpha / len(left):
        rejected.add(left.pop(0))
    assert {i for i, q in enumerate(ev.holm(p)) if q <= alpha} == rejected

def test_tost_of_unpaired_seeds_of_one_pair_and_where_nothing_varies():
    noise, zero = np.array([.012, -.02, .004, .015, -.008, .01, -.003, .006]), np.zeros(8)
    assert ev.tost(noise, zero, .05, paired=False).outcome == "equivalent"
    assert ev.tost([.3, .3], [.3, .3], .05)[1:3] == (0, 1) and ev.tost([.4, .4], [.3, .3], .05).outcome == "different"
    assert ev.tost([.3], [.3], .05).outcome == "inconclusive"

@given(st.lists(st.tuples(unit, unit), min_size=3, max_size=30), st.sampled_from([.02, .05, .2]))
@quick
def test_tost_is_the_90_percent_interval_inside_the_margin(pairs, margin):
    d = np.array(pairs) @ [1, -1]
    assume(np.ptp(d) > 1e-6)
    lo, hi = stats.t.interval(.9, len(d) - 1, loc=d.mean(), scale=stats.sem(d))
    assume(min(abs(lo + margin), abs(hi - margin)) > 1e-9)
    assert (ev.tost(*np.array(pairs).T, margin).outcome == "equivalent") == (-margin < lo and hi < margin)

# --- verdicts -------------------------------------------------------------------------------------

@pytest.mark.parametrize("case, word", [
    (dict(ours_mean=.46, ours_std=.03, ours_n=64, paper_mean=.443, paper_std=.03, paper_n=64), "agrees"),
    (dict(ours_mean=.443, ours_std=.125, ours_n=5, paper_mean=.443, paper_std=.125, paper_n=5), "inconclusive"),
    (dict(ours_mean=.10, ours_std=.03, ours_n=5, paper_mean=.443, paper_std=.125, paper_n=5), "differs"),
    (dict(ours_mean=.36, ours_std=.10, ours_n=5, paper_mean=.443, paper_std=.125, paper_n=5), "inconclusive"),
    # leaves the margin
    (dict(ours_mean=.483, ours_std=.05, ours_n=64, paper_mean=.443, paper_std=.03, paper_n=64), "inconclusive"),
    (dict(ours_mean=.46, ours_std=.001, ours_n=5, paper_mean=.443, paper_std=.001, paper_n=5), "agrees"),
    (dict(ours_mean=1., ours_std=0., ours_n=5, paper_mean=1., paper_n=5), "agrees"),
    (dict(ours_mean=.93, ours_std=0., ours_n=5, paper_mean=1., paper_n=5), "differs"),
    (dict(ours_mean=.32325, ours_std=0., ours_n=np.nan, paper_mean=.10), "differs"),
    (dict(ours_mean=np.nan, ours_std=np.nan, ours_n=0, paper_mean=.1, paper_std=.1, paper_n=5), "not attempted"),
    (dict(ours_mean=.1, ours_std=.1, ours_n=5, paper_mean=np.nan), "not attempted"),
    (dict(ours_mean=.44, ours_std=np.nan, ours_n=1, paper_mean=.443, paper_std=.125, paper_n=5), "inconclusive"),
    (dict(ours_mean=.44, ours_std=.01, ours_n=5, paper_mean=.443, paper_n=1), "agrees"),
    (dict(ours_mean=.56, ours_std=np.nan, ours_n=5, paper_mean=.56), "inconclusive"),                     # a p value
    (dict(ours_mean=33088, ours_std=0., ours_n=1, paper_mean=33088, margin=0), "agrees"),
    (dict(ours_mean=16576, ours_std=0., ours_n=1, paper_mean=16640, margin=0), "differs"),
    (dict(ours_mean=16576, ours_std=0., ours_n=1, paper_mean=16640, margin=0, corrected="16,576"), "corrected"),
    (dict(ours_mean=9000, ours_std=100, ours_n=20, paper_mean=8760, paper_std=700, paper_n=5, margin=1752), "agrees"),
])
def test_verdict_is_decided_by_rule(case, word):
    assert ev.verdict(**case).verdict == word

def test_delta_re_inflates_the_printed_spread_and_is_welchs_interval():
    ours, theirs = np.array([.31, .42, .44, .49, .61]), np.array([.2, .35, .3, .5, .44, .27])
    d, lo, hi = ev.delta(ours.mean(), ours.std(ddof=1), 5, theirs.mean(), theirs.std(), 6)
    oracle = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(.95)
    assert (lo, hi) == pytest.approx((oracle.low, oracle.high)) and d == pytest.approx(ours.mean() - theirs.mean())

def test_a_missing_spread_is_not_a_spread_of_zero():
    d, lo, hi = ev.delta(.5, .1, 5, .4, np.nan, 5)
    assert hi - d == pytest.approx(2.7764451051977987 * .1 * np.sqrt(2 / 5))     # t.ppf(.975, 4); ours counted twice
    assert "the paper prints no spread" in ev.verdict(.5, .1, 5, .4, np.nan, 5).reason

FIVE = np.array([.1, .1, .1, .15, .2])                     # mean .13 and ddof-0 spread .04, both as exact as they print

@pytest.mark.parametrize("change, agrees", [
    ({}, True), (dict(ours_mean=FIVE.mean() + .00049), True), (dict(ours_mean=FIVE.mean() + .00051), False),
    (dict(paper_std=.0405), True), (dict(paper_std=.041), False), (dict(paper_std=np.nan), True),
    (dict(paper_n=6), False), (dict(digit=0.0), False), (dict(ours_mean=FIVE.mean() + .004, digit=.01), True)], ids=str)
def test_the_printed_digits_themselves_agree_whatever_the_spread_and_a_digit_off_does_not(change, agrees):
    same = dict(ours_mean=FIVE.mean(), ours_std=FIVE.std(ddof=1), ours_n=5, paper_mean=.13, paper_std=.04,
                paper_n=5, digit=.001)
    got = ev.verdict(**(same | change), margin=.01)
    assert (got.verdict == "agrees") == agrees and ("the printed digits themselves" in got.reason) == agrees
    assert got.delta == pytest.approx((same | change)["ours_mean"] - .13)
    assert ev.verdict(**(same | change), margin=.01, corrected="misprint").verdict == "corrected"

def test_a_spread_of_one_seed_is_refused_and_not_divided_by_zero_and_without_one_there_is_no_interval():
    for use in (lambda: ev.welch_from_stats(.5, .1, 1, .4, .1, 5), lambda: ev.delta(.5, .1, 1, .4, .1, 5),
                lambda: ev.delta(.5, .1, 5, .4, .1, 1)):
        with pytest.raises(ValueError, match="expected two seeds or more .*; got 1; nearest valid: n = 2; fix:"): use()
    d, *bounds = ev.delta(.5, float("nan"), 1, .4, .1, 5)
    assert d == pytest.approx(.1) and np.isnan(bounds).all()

