"""Oracles and properties of the evidence room: no statistic is compared with itself."""
from itertools import product
from math import comb, inf
import shutil

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings, strategies as st
from scipy import stats

from moe_redistribution import evidence as ev, paper

FFN, MOE = "add7/ffn-h256-silu", "add7/moe-e4k1-h256-silu"
SEEDS = [42, 137, 256, 512, 1024]
unit = st.floats(0, 1, allow_nan=False).map(lambda x: round(x, 3))
quick = settings(max_examples=60, deadline=None)


def made(condition, values, seeds=SEEDS, rule="first256", site="ffn_out", edit="zero", unit=""):
    stream = "authors" if set(seeds) <= set(SEEDS) else "paired"
    return pd.DataFrame(dict(condition=condition, stream=stream, seed=list(seeds), rule=rule, step=400, split="all", site=site,
                             edit=edit, unit=unit, position="o0-o3", stratum="all", metric="digits", value=values,
                             n_examples=4000))


def table1(protocol="paper", seed=0):
    "Rows for every mean that the bridge asks for, with quarters as values so that means are exact."
    rng = np.random.default_rng(seed)
    c = ev.claims().query("protocol == @protocol and aggregate == 'mean'")
    c = c.drop_duplicates(["condition", "site", "edit"])
    return pd.concat([made(x.condition, rng.integers(0, 5, int(x.n)) / 4, ev.seed_list(x.seeds), x.rule, x.site, x.edit)
                      for x in c.itertuples()], ignore_index=True)


# --- the two files --------------------------------------------------------------------------------

def test_every_printed_number_loads_and_is_a_fraction():
    df = ev.paper_values()
    assert len(df) and df["id"].is_unique and list(df)[:len(paper.PAPER_COLUMNS)] == paper.PAPER_COLUMNS
    percent = df["unit"].isin(["percent", "pp"])
    assert (df.loc[percent, "value"] == df.loc[percent, "mean"] / 100).all()
    assert df.loc[percent, "value"].abs().max() <= 1
    assert df.loc[~percent, "value"].equals(df.loc[~percent, "mean"])


@pytest.mark.parametrize("spoil", [lambda b: b.replace(b"44.3", b"45.3", 1), lambda b: b[:-40], lambda b: b + b"\n",
                                   lambda b: b""], ids=["changed", "truncated", "appended", "empty"])
def test_changed_paper_values_are_refused(tmp_path, spoil):
    copy = shutil.copytree(paper.DATA, tmp_path / "data") / "paper_values.csv"
    assert ev.paper_values(copy).equals(ev.paper_values())
    copy.write_bytes(spoil(copy.read_bytes()))
    with pytest.raises(ValueError, match="expected sha256 .* got .* nearest valid: .* fix: git checkout"):
        ev.paper_values(copy)


def test_claims_answer_every_id_of_table_1_and_figure_1():
    c, paper = ev.claims(), ev.paper_values()
    for protocol in ("paper", "audited"):
        mine = c[c["protocol"] == protocol]
        for item, n in (("tab1", 18), ("fig1", 9)):
            ids = paper.loc[paper["item"] == item, "id"]
            assert len(ids) == n and set(ids) == set(mine.loc[mine["item"] == item, "id"])
    assert (c["margin"] == .05).all()
    fixed = c[c["item"] == "contrast"]
    assert (fixed["n"] == fixed["edit"].map({"mean": 64, "zero": 128})).all() and (fixed["rule"] == "first1000").all()
    assert fixed["id"].str.startswith("contrast.").all() and fixed.groupby("edit").size().nunique() == 1
    assert set(c.loc[c["protocol"] == "paper", "rule"]) == {"first256"}
    assert ev.seed_list(c["seeds"][0]) == sorted(paper.loc[paper["metric"] == "seed", "mean"].astype(int))


@pytest.mark.parametrize("column, value", [("id", "tab1.999"), ("unit_factor", "1"), ("n", "6"),
                                           ("aggregate", "median"), ("protocol", "papers"), ("margin", "-1")])
def test_claims_that_contradict_the_paper_are_refused(tmp_path, column, value):
    raw = pd.read_csv(paper.DATA / "claims.csv", dtype=str, keep_default_na=False)
    raw.loc[4, column] = value
    raw.to_csv(tmp_path / "claims.csv", index=False)
    with pytest.raises(ValueError, match="tab1.005" if column != "id" else "tab1.999"):
        ev.claims(tmp_path / "claims.csv")


def test_a_claim_twice_is_refused(tmp_path):
    raw = pd.read_csv(paper.DATA / "claims.csv", dtype=str, keep_default_na=False)
    pd.concat([raw, raw[3:4]]).to_csv(tmp_path / "claims.csv", index=False)
    with pytest.raises(ValueError, match="tab1.004"):
        ev.claims(tmp_path / "claims.csv")


# --- intervals ------------------------------------------------------------------------------------

def test_interval_is_t_below_twenty_and_bca_from_there():
    x = np.random.default_rng(0).normal(.5, .1, 20)
    assert ev.interval(x[:19]).method == "t" and ev.interval(x).method == "BCa"
    half = 2.0930240544082634 * x[:20].std(ddof=1) / np.sqrt(20)   # t.ppf(.975, 19), from a printed table
    assert np.allclose(ev.interval(x, "t")[1:3], (x.mean() - half, x.mean() + half))
    assert np.allclose(ev.interval(x)[1:3], ev.interval(x, "t")[1:3], atol=.01)


@given(st.sampled_from([.1, .25, 1 / 3, 1.0, 0.0]), st.integers(2, 130))
@quick
def test_zero_variance_gives_an_interval_of_no_width(value, n):
    i = ev.interval([value] * n)
    assert i.lo == i.hi == i.mean and i.mean == pytest.approx(value) and i.n == n


@given(st.lists(unit, min_size=20, max_size=40), st.randoms())
@settings(max_examples=25, deadline=None)
def test_bca_is_finite_ordered_and_blind_to_the_order_of_seeds(values, random):
    i, shuffled = ev.interval(values), random.sample(values, len(values))
    assert np.isfinite([i.lo, i.hi]).all() and i.lo <= i.hi
    assert ev.interval(shuffled) == i


def test_one_seed_has_no_interval():
    assert ev.interval([.3]).mean == .3 and np.isnan(ev.interval([.3])[1:3]).all()


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


@given(st.lists(st.tuples(unit, unit), min_size=5, max_size=5))
@quick
def test_five_pairs_cannot_go_below_a_sixteenth(pairs):
    assert ev.paired_permutation(*np.array(pairs).T).p >= .0625 - 1e-12


def test_many_pairs_are_sampled_with_a_seed_and_order_does_not_matter():
    rng = np.random.default_rng(0)
    a, b, order = rng.normal(.03, .1, 64), rng.normal(0, .1, 64), rng.permutation(64)
    p = ev.paired_permutation(a, b).p
    assert p == ev.paired_permutation(a[order], b[order]).p
    assert p == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=.02)
    assert ev.paired_permutation(a + 9, b).p == pytest.approx(2e-4)   # never 0: the flip we saw counts, twice
    same = np.r_[np.ones(12), -np.ones(8)]                                       # only the number of plus signs matters
    exact = sum(comb(20, k) for k in range(21) if abs(2 * k - 20) >= 4) / 2**20
    assert ev.paired_permutation(same, np.zeros(20)).p == pytest.approx(exact, abs=.02)


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


def test_printed_welch_p_needs_ddof_0():
    paper = ev.paper_values().set_index("id")

    def p(x, y, ddof):
        return ev.welch_from_stats(*(paper.loc[i, c] for i in (x, y) for c in ("mean", "std", "n_seeds")), ddof)
    assert p("tab1.012", "tab1.009", 0) == pytest.approx(.559, abs=5e-4)         # protocol, section 0
    assert p("tab1.018", "tab1.015", 0) == pytest.approx(.477, abs=5e-4)
    for x, y, printed in (("tab1.012", "tab1.009", "sec4.2.008"), ("tab1.018", "tab1.015", "sec4.2.011")):
        assert round(p(x, y, 0), 2) == paper.loc[printed, "mean"] != round(p(x, y, 1), 2)


def test_holm_is_hand_arithmetic():
    assert np.allclose(ev.holm([.01, .04, .03, .005]), [.03, .06, .06, .02])
    assert np.allclose(ev.holm([.5, .9]), [1, 1]) and np.allclose(ev.holm([.2]), [.2])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
@quick
def test_holm_rejects_what_stepping_down_rejects(p):
    alpha, left, rejected = .05, sorted(range(len(p)), key=p.__getitem__), set()
    assume(all(abs(q * k - alpha) > 1e-9 for q in p for k in range(1, len(p) + 1)))
    while left and p[left[0]] <= alpha / len(left):
        rejected.add(left.pop(0))
    assert {i for i, q in enumerate(ev.holm(p)) if q <= alpha} == rejected


def test_tost_has_three_outcomes():
    noise, zero = np.array([.012, -.02, .004, .015, -.008, .01, -.003, .006]), np.zeros(8)
    assert ev.tost(noise, zero, .05).outcome == "equivalent"
    assert ev.tost(noise + .08, zero, .05).outcome == "different"
    assert ev.tost(noise * 10, zero, .05).outcome == "inconclusive"
    assert ev.tost(noise, zero, .05, paired=False).outcome == "equivalent"
    assert ev.tost([.3, .3], [.3, .3], .05)[1:3] == (0, 1) and ev.tost([.4, .4], [.3, .3], .05).outcome == "different"
    assert ev.tost([.3], [.3], .05).outcome == "inconclusive"
    with pytest.raises(ValueError, match="a margin above 0"):
        ev.tost(noise, zero, 0)


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


# --- tables ---------------------------------------------------------------------------------------

def test_compare_gives_exact_means_for_every_cell_of_table_1():
    rows = table1()
    out = ev.compare(rows, "tab1")
    assert list(out) == ev.COMPARE_COLUMNS and len(out) == 18 and (out["ours_n"] == 5).all()
    where = {"normal_acc": ("none", "none"), "no_attn_acc": ("attn_out", "zero"), "no_ffn_acc": ("ffn_out", "zero")}
    for line in out.itertuples():
        site, edit = where[line.metric]
        mine = rows.query("condition == @line.condition and site == @site and edit == @edit")["value"]
        assert line.ours_mean == mine.mean() and line.ours_std == pytest.approx(mine.std())
    paper = ev.paper_values().set_index("id")
    assert (out["paper_mean"].to_numpy() == paper.loc[out["id"], "value"].to_numpy()).all()


def test_compare_answers_figure_1_with_its_delta_its_p_and_its_chance_line():
    rows = table1()
    nulls = {"copy": .07325, "most frequent": .32325, "current token": .32325}
    out = ev.compare(rows, "fig1", baselines=nulls).set_index("id")
    learned, frozen = (rows.query("condition == @c and site == 'ffn_out'").sort_values("seed")["value"].to_numpy()
                       for c in (MOE, MOE + "+frozen"))
    assert out.loc["fig1.007", "ours_mean"] == pytest.approx((frozen - learned).mean())
    assert out.loc["fig1.007", "ours_std"] == pytest.approx((frozen - learned).std(ddof=1))
    assert out.loc["fig1.008", "ours_mean"] == pytest.approx(stats.ttest_ind(learned, frozen, equal_var=False).pvalue)
    assert out.loc["fig1.009", "ours_mean"] == .32325 and out.loc["fig1.009", "verdict"] == "differs"
    assert (out["baseline"][:6] == .07325).all() and np.isnan(out.loc["fig1.008", "baseline"])
    assert ev.compare(rows, "fig1").set_index("id").loc["fig1.009", "verdict"] == "not attempted"
    with pytest.raises(ValueError, match="null: expected one of"):
        ev.compare(rows, "fig1", baselines={"copied": .07})


def test_audited_rows_answer_the_same_ids_with_other_edits_and_seeds():
    rows = table1("audited")
    out = ev.compare(rows, "tab1", protocol="audited")
    assert list(out["id"]) == list(ev.compare(rows, "tab1")["id"]) and set(out["protocol"]) == {"audited"}
    assert set(out.loc[out["metric"] != "normal_acc", "ours_n"]) == {64}
    five = ev.compare(rows, "tab1", protocol="audited", seeds=[1, 2, 3, 4, 5])
    assert (five["ours_n"] == 5).all()
    assert (ev.compare(table1(), "tab1")["verdict"] != "not attempted").all()
    assert (ev.compare(table1(), "tab1", rule="final")["verdict"] == "not attempted").all()


def test_missing_runs_are_named_and_failed_seeds_keep_their_row():
    rows = pd.concat([made(FFN, [.1, .1, np.nan, .2, .2]), made(MOE, [.4, .5], SEEDS[:2])])
    out = ev.compare(rows, "tab1").set_index("id")
    ffn, moe, narrow = (out.loc[i] for i in ("tab1.003", "tab1.009", "tab1.006"))
    assert ffn["ours_mean"] == pytest.approx(.15) and ffn["ours_n"] == 4 and "1 of 5 seeds failed" in ffn["reason"]
    assert "256" in ffn["reason"] and moe["ours_n"] == 2 and "seeds 256, 512, 1024" in moe["reason"]
    assert narrow["verdict"] == "not attempted" and "missing run: add7/ffn-h64-silu at first256" in narrow["reason"]
    assert narrow["ours_n"] == 0 and np.isnan(narrow["ours_mean"])


def test_other_measurements_in_the_frame_do_not_leak_in():
    rows = table1()
    elsewhere = [{"rule": "final"}, {"position": "o3"}, {"stratum": "carry=2"}, {"split": "train"}, {"metric": "exact"},
                 {"seed": 7}, {"unit": "E1"}, {"edit": "resample"}]
    noise = [rows.assign(value=.9, **change) for change in elsewhere]
    assert ev.compare(pd.concat([rows, *noise]), "tab1").to_csv() == ev.compare(rows, "tab1").to_csv()


@pytest.mark.parametrize("seed", range(3))
def test_shuffled_rows_give_the_same_bytes(seed):
    rows = pd.concat([table1(), table1("audited", 1)])
    shuffled = rows.sample(frac=1, random_state=seed)
    for item in ("tab1", "fig1"):
        for protocol in ("paper", "audited"):
            assert ev.compare(rows, item, protocol).to_csv() == ev.compare(shuffled, item, protocol).to_csv()
    assert ev.contrasts(rows).to_csv() == ev.contrasts(shuffled).to_csv()


def test_bad_rows_are_refused_in_one_message():
    rows = table1()
    with pytest.raises(ValueError, match="rows: expected columns .*; got .*; fix: add .*'seed'"):
        ev.compare(rows.drop(columns="seed"), "tab1")
    with pytest.raises(ValueError, match="one row per seed; got 10; nearest valid: 5"):
        ev.compare(pd.concat([rows, rows]), "tab1")
    with pytest.raises(ValueError, match="expected fractions; got values up to"):
        ev.compare(rows.assign(value=rows["value"] * 100), "tab1")
    with pytest.raises(ValueError, match="nearest: 'tab1'"):
        ev.compare(rows, "table1")
    with pytest.raises(ValueError, match="protocol: expected one of paper, audited"):
        ev.compare(rows, "tab1", protocol="papers")


def test_contrast_is_paired_by_seed_and_counts_against_its_fixed_n():
    rng = np.random.default_rng(0)
    base, arm = rng.normal(.4, .1, 64), rng.normal(.25, .05, 64)
    rows = pd.concat([made(FFN, base, range(1, 65), "first1000", edit="mean"),
                      made(MOE, base + arm, range(1, 65), "first1000", edit="mean")]).sample(frac=1, random_state=0)
    c = ev.contrast(rows, MOE, FFN)
    assert (c["n"], c["n_fixed"], c["reason"]) == (64, 64, "")
    assert c["difference"] == pytest.approx(arm.mean()) and c["lo"] < arm.mean() < c["hi"]
    assert c["effect"] == pytest.approx(arm.mean() / arm.std(ddof=1)) and c["outcome"] == "different"
    few = ev.contrast(rows[rows["seed"] <= 5], MOE, FFN)
    assert few["p"] == .0625 and few["outcome"] == "inconclusive" and "interim: 5 of the 64" in few["reason"]
    failed = rows.assign(value=rows["value"].where(rows["seed"] != 3))
    assert ev.contrast(failed, MOE, FFN)["n"] == 63 and "seeds 3" in ev.contrast(failed, MOE, FFN)["reason"]


def test_contrasts_hold_the_whole_family_to_holm():
    rng = np.random.default_rng(2)
    rows = pd.concat([made(c, rng.normal(.3, .1, 64), range(1, 65), "first1000", edit="mean") for c in (FFN, MOE)])
    out = ev.contrasts(rows)
    ran = out[out["n"] > 0]
    assert list(out) == ev.CONTRAST_COLUMNS and len(ran) == 1 and len(out) == 6
    assert ran["p_holm"].iloc[0] == pytest.approx(min(1, 6 * ran["p"].iloc[0]))       # contrasts not run yet count
    assert (out.loc[out["n"] == 0, "outcome"] == "not attempted").all() and out["reason"].str.len().gt(0).sum() == 5


def test_a_contrast_that_was_not_registered_is_refused():
    with pytest.raises(ValueError, match="expected one of .*register it in data/claims.csv before its runs are opened"):
        ev.contrast(table1(), FFN, "add7/glu-h170-silu")
