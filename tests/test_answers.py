"""From rows to the paper's numbers: every aggregate against hand arithmetic, and what is said where no row answers."""
import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from moe_redistribution.evidence import contrasts as answers, printed as paper
from moe_redistribution.judge import statistics as ev
from moe_redistribution.evidence.claims import REST, baselines, claims, seed_list
from moe_redistribution.evidence.contrasts import compare
from moe_redistribution.studies.sparsity_moves.facts import _fact_rows
from moe_redistribution.training.orders import expected_seconds
from moe_redistribution.tasks.task import get_task

FFN, MOE, NARROW = "add7/ffn-h256-silu", "add7/moe-e4k1-h256-silu", "add7/ffn-h64-silu"
SEEDS = [42, 137, 256, 512, 1024]
PRINTED, BRIDGE = paper.paper_values(), claims()

@pytest.fixture(autouse=True)
def files_read_once(monkeypatch):
    monkeypatch.setattr(answers, "paper_values", lambda: PRINTED)
    monkeypatch.setattr(answers, "claims", lambda: BRIDGE)

def made(condition, values, seeds=SEEDS, rule="first256", site="ffn_out", edit="zero", **more):
    "Invented rows of one cell; `more` are further row columns."
    stream = "authors" if set(seeds) <= set(SEEDS) else "paired"
    columns = dict(condition=condition, stream=stream, seed=list(seeds), rule=rule, step=400, split="all", site=site,
                   edit=edit, unit="", position="o0-o3", stratum="all", metric="digits", value=values, n_examples=4000)
    return pd.DataFrame(columns | more)

def claim(i, protocol="paper"):
    return BRIDGE[(BRIDGE["id"] == i) & (BRIDGE["protocol"] == protocol)].iloc[0]

def answering(i, values, seeds=SEEDS, protocol="paper", names=None):
    "Rows that answer claim `i`: `values` (condition, position, unit, seed) for its cells, in the claim's order."
    c = claim(i, protocol)
    names, metric = names or c["condition"].split(), c["metric"].removeprefix(REST)
    cells = [(n, p, u) for n in names for p in c["position"].split() for u in c["unit"].split() or [""]]
    values = np.asarray(values, float).reshape(len(cells), len(seeds))
    return pd.concat([made(n, v, seeds, c["rule"], c["site"], c["edit"], position=p,
                           metric=metric, stratum=c["stratum"], unit=u, instrument=c["instrument"], stream=c["stream"])
                      for (n, p, u), v in zip(cells, values)], ignore_index=True)

def answer(rows, i, protocol="paper", **how):
    "One line of `compare`, which is told that its item holds nothing else."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "paper_values", lambda: PRINTED[PRINTED["id"] == i])
        return compare(rows, claim(i, protocol)["item"], protocol, **how).set_index("id").loc[i]

def table1(protocol="paper", seed=0):
    """Rows for every mean that the bridge asks for in Table 1 and Figure 1, with quarters as values so that means are
    exact."""
    rng, c = np.random.default_rng(seed), BRIDGE
    c = c[(c["protocol"] == protocol) & c["item"].isin(["tab1", "fig1"]) & (c["aggregate"] == "mean")]
    c = c.drop_duplicates(["condition", "site", "edit"])
    return pd.concat([made(x.condition, rng.integers(0, 5, int(x.n)) / 4, seed_list(x.seeds), x.rule, x.site,
                           x.edit)
                      for x in c.itertuples()], ignore_index=True)

# --- a table ---------------------------------------------------------------------------------------

def test_compare_gives_exact_means_for_every_cell_of_table_1():
    rows = table1()
    out = compare(rows, "tab1")
    assert list(out) == answers.COMPARE_COLUMNS and len(out) == 18 and (out["ours_n"] == 5).all()
    where = {"normal_acc": ("none", "none"), "no_attn_acc": ("attn_out", "zero"), "no_ffn_acc": ("ffn_out", "zero")}
    for line in out.itertuples():
        site, edit = where[line.metric]
        mine = rows.query("condition == @line.condition and site == @site and edit == @edit")["value"]
        assert line.ours_mean == mine.mean() and line.ours_std == pytest.approx(mine.std())
    printed = PRINTED.set_index("id")
    assert (out["paper_mean"].to_numpy() == printed.loc[out["id"], "value"].to_numpy()).all()

def test_compare_answers_figure_1_with_its_delta_its_p_and_its_chance_line():
    rows = table1()
    out = compare(rows, "fig1").set_index("id")
    learned, frozen = (rows.query("condition == @c and site == 'ffn_out'").sort_values("seed")["value"].to_numpy()
                       for c in (MOE, MOE + "+frozen"))
    assert out.loc["fig1.007", "ours_mean"] == pytest.approx((frozen - learned).mean())
    assert out.loc["fig1.007", "ours_std"] == pytest.approx((frozen - learned).std(ddof=1))
    assert out.loc["fig1.008", "ours_mean"] == pytest.approx(stats.ttest_ind(learned, frozen, equal_var=False).pvalue)
    assert out.loc["fig1.009", "ours_mean"] == .32325 and out.loc["fig1.009", "verdict"] == "differs"
    assert (out["baseline"][:6] == .07325).all() and np.isnan(out.loc["fig1.008", "baseline"])

def test_the_nulls_beside_our_numbers_are_counted_on_the_task():
    """Digits of add-7 that copying, and that one constant a position, would get right, counted on strings; a sum mod
    113; the count 1."""
    said = {t: baselines(t) for t in ("add7", "modadd", "hist")}
    text = [f"{n:03d}"[::-1] + "E" + f"{n + 7:04d}"[::-1] for n in range(1000)]
    often = [max(map(column.count, column)) / 1000 for column in zip(*(s[4:] for s in text))]
    assert said["add7"]["copy"] == np.mean([s[3 + i] == s[4 + i] for s in text for i in range(4)])
    assert said["add7"]["most frequent"] == pytest.approx(np.mean(often), abs=1e-9)
    assert said["modadd"]["most frequent"] == pytest.approx(1 / 113, abs=1e-6)
    assert said["hist"]["most frequent"] == pytest.approx((get_task("hist").targets == 0).double().mean().item(),
                                                          abs=1e-6)

def test_audited_rows_answer_the_same_ids_with_other_edits_and_seeds():
    rows = table1("audited")
    out = compare(rows, "tab1", protocol="audited")
    assert list(out["id"]) == list(compare(rows, "tab1")["id"]) and set(out["protocol"]) == {"audited"}
    assert set(out.loc[out["metric"] != "normal_acc", "ours_n"]) == {64}
    five = compare(rows, "tab1", protocol="audited", seeds=[1, 2, 3, 4, 5])
    assert (five["ours_n"] == 5).all()
    assert (compare(table1(), "tab1")["verdict"] != "not attempted").all()
    assert (compare(table1(), "tab1", rule="final")["verdict"] == "not attempted").all()

def test_an_audited_table_has_lines_for_what_the_audit_asks_and_the_paper_s_for_every_printed_id():
    nothing = table1()[:0]
    for item in ("sec4.2", "appB"):
        ids = PRINTED.query("item == @item")["id"]
        mine = BRIDGE.query("item == @item and protocol == 'audited'")["id"]
        assert (list(compare(nothing, item)["id"]) == sorted(ids)
                and list(compare(nothing, item, "audited")["id"]) == sorted(mine))
        assert len(mine) < len(ids)

def test_other_measurements_in_the_frame_do_not_leak_in():
    rows = table1().assign(instrument="ablation")
    elsewhere = [{"rule": "final"}, {"position": "o3"}, {"stratum": "carry=2"}, {"split": "train"}, {"metric": "exact"},
                 {"seed": 7}, {"unit": "E1"}, {"edit": "resample"}, {"stream": "paired"}, {"instrument": "rerouting"}]
    noise = [rows.assign(value=.9, **change) for change in elsewhere]
    assert compare(pd.concat([rows, *noise]), "tab1").to_csv() == compare(rows, "tab1").to_csv()
    assert compare(rows.drop(columns="instrument"), "tab1").to_csv() == compare(rows, "tab1").to_csv()

def test_rule_seeds_and_stream_can_be_overridden_together():
    rows = pd.concat([made(FFN, .1, range(1, 33), "final"), made(FFN, .2), made(FFN, .3, [1, 2], "first256")])
    assert answer(rows, "tab1.003")["ours_mean"] == pytest.approx(.2)
    other = answer(rows, "tab1.003", rule="final", seeds=range(1, 33), stream="paired")
    assert (other["ours_mean"], other["ours_n"]) == (pytest.approx(.1), 32)
    assert answer(rows, "tab1.003", seeds=[1, 2], stream="paired")["ours_mean"] == pytest.approx(.3)

@pytest.mark.audit
def test_shuffled_rows_give_the_same_bytes():
    "Five seeds under the paper's protocol; under the audit's as many as a bootstrap needs, which draws by place."
    rows, many = pd.concat([table1(), table1("audited", 1)]), range(1, 22)
    asks = [lambda r, i=i, how=how: compare(r, i, **how) for i in ("tab1", "fig1")
            for how in ({}, dict(protocol="audited", seeds=many))]
    bytes_of = lambda frame: [ask(frame).to_csv() for ask in (*asks, lambda r: answers.contrasts(r, seeds=many))]
    straight = bytes_of(rows)
    for seed in range(3): assert bytes_of(rows.sample(frac=1, random_state=seed)) == straight

@pytest.mark.parametrize("ask, says", [
    (lambda rows: compare(rows.drop(columns="seed"), "tab1"), "rows: expected columns .*; got .*; fix: add .*'seed'"),
    (lambda rows: compare(pd.concat([rows, rows]), "tab1"), "one row per seed; got 10; nearest valid: 5"),
    (lambda rows: compare(rows.assign(value=rows["value"] * 100), "tab1"), "expected fractions; got values up to"),
    (lambda rows: compare(rows, "table1"), "nearest: 'tab1'"),
    (lambda rows: compare(rows, "tab1", protocol="papers"), "protocol: expected one of paper, audited"),
    (lambda rows: answers.contrasts(rows, "resample"), "edit: expected one of mean, zero; got 'resample'"),
    (lambda rows: answers.contrasts(rows, item="contrast_cary"), "family: expected one of .*contrast_carry")])
def test_bad_rows_and_questions_are_refused_in_one_message(ask, says):
    with pytest.raises(ValueError, match=says): ask(table1())

# --- aggregates, by hand ---------------------------------------------------------------------------

def jackknife(statistic, n):
    "Standard error of `statistic(kept)` by leaving one seed out."
    each = np.array([statistic(np.delete(np.arange(n), i)) for i in range(n)])
    return np.sqrt((n - 1) / n * ((each - each.mean())**2).sum())

def bootstrap(statistic, n):
    draws = np.random.default_rng(0).integers(n, size=(4000, n))
    return np.std([statistic(d) for d in draws])

RATIO, SHARE = "sec4.1.018", "sec5.001"          # how many times the no-FFN accuracy; which part of a gap

@pytest.mark.parametrize("n, rel", [(5, .25), (200, .02)])
@pytest.mark.parametrize("i", [RATIO, SHARE])
def test_a_ratio_or_share_is_that_of_the_means_and_its_spread_what_leaving_a_seed_out_gives(i, n, rel):
    "x / y, or the part (x - y) / (z - y) of a gap; the arms of a seed go together, and the spread must know it."
    rng, seeds = np.random.default_rng(3), range(1, n + 1)
    y = rng.normal(.15, .02, n)
    if i == RATIO:
        x = .3 + 2 * y + rng.normal(0, .02, n)
        over, under, arms = x, y, {claim(i)["condition"]: x, claim(i)["versus"]: y}
    else:
        assert (claim(i)["condition"], *claim(i)["versus"].split()) == (NARROW, MOE, FFN)
        x, z = y + rng.normal(.12, .01, n), y + rng.normal(.32, .02, n)
        over, under, arms = x - y, z - y, {NARROW: x, MOE: z, FFN: y}
    rows = pd.concat([answering(i, v, seeds, names=[name]) for name, v in arms.items()])
    got = answer(rows, i, seeds=seeds)
    statistic = lambda kept: over[kept].mean() / under[kept].mean()
    assert got["ours_mean"] == pytest.approx(over.mean() / under.mean()) and got["ours_n"] == n
    if i == RATIO: assert got["ours_mean"] != pytest.approx((over / under).mean(), rel=1e-3)
    assert got["condition"] == f"{claim(i)['condition']} vs {claim(i)['versus']}"
    assert got["ours_std"] / np.sqrt(n) == pytest.approx(jackknife(statistic, n), rel=rel)
    if n > 5: assert got["ours_std"] / np.sqrt(n) == pytest.approx(bootstrap(statistic, n), rel=.05)
    assert got["ours_lo"] < got["ours_mean"] < got["ours_hi"]

def test_a_ratio_and_a_difference_stand_on_the_seeds_that_both_arms_have():
    for i, hand in ((RATIO, lambda x, y: x.mean() / y.mean()), ("sec4.2.001", lambda x, y: (x - y).mean())):
        x, y = np.array([.5, .6, .7, .8, np.nan]), np.array([.1, np.nan, .2, .25, .9])
        rows = pd.concat([answering(i, x), answering(i, y, names=[claim(i)["versus"]])])
        got, both = answer(rows, i), [0, 2, 3]
        assert got["ours_n"] == 3 and got["ours_mean"] == pytest.approx(hand(x[both], y[both]))
        assert len(re.findall("1 of 5 seeds failed and left out", got["reason"])) == 2 and "seeds 137" in got["reason"]

def test_a_mean_over_several_cells_is_taken_within_each_seed():
    i, values = "sec4.1.015", np.random.default_rng(0).uniform(0, .3, (4, 5))
    assert claim(i)["position"] == "o0 o1 o2 o3" and claim(i)["aggregate"] == "mean"
    got, by_seed = answer(answering(i, values), i), values.mean(0)
    assert got["ours_mean"] == pytest.approx(values.mean()) and got["ours_std"] == pytest.approx(by_seed.std(ddof=1))
    half = stats.t.ppf(.975, 4) * by_seed.std(ddof=1) / np.sqrt(5)
    assert (got["ours_lo"], got["ours_hi"]) == pytest.approx((by_seed.mean() - half, by_seed.mean() + half))
    values[2, 1] = np.nan                                                        # a seed counts whole or not at all
    assert answer(answering(i, values), i)["ours_mean"] == pytest.approx(np.delete(values, 1, 1).mean())

@pytest.mark.parametrize("which, i, j",
                         [("lowest", "fig4_caption.001", np.argmin), ("highest", "fig4_caption.002", np.argmax),
                          ("lowest", "sec4.2.015", np.argmin), ("highest", "sec4.2.016", np.argmax)])
def test_the_ends_of_a_range_are_the_cells_with_the_lowest_and_highest_mean(which, i, j):
    "Of four positions, or of four variants: that cell's own mean and spread, not the extreme of single seeds."
    values = np.array([[.2, .3, .4, .3, .3], [.0, .9, .5, .5, .5], [.7, .6, .8, .7, .7], [.35, .35, .4, .4, .4]])
    assert claim(i)["aggregate"] == which
    got, cell = answer(answering(i, values), i), values[j(values.mean(1))]
    assert got["ours_mean"] == pytest.approx(cell.mean()) and got["ours_std"] == pytest.approx(cell.std(ddof=1))
    assert got["ours_n"] == 5 and got["ours_mean"] == pytest.approx({"lowest": .3, "highest": .7}[which])

@pytest.mark.parametrize("i", ["fig4_caption.001", "sec4.2.016"])
def test_a_range_says_nothing_while_a_cell_is_missing(i):
    rows = answering(i, np.linspace(.1, .5, 20))
    last = rows["condition"].iloc[-1], rows["position"].iloc[-1]
    got = answer(rows[(rows["condition"] != last[0]) | (rows["position"] != last[1])], i)
    assert got["verdict"] == "not attempted" and np.isnan(got["ours_mean"]) and got["ours_n"] == 0
    assert (("missing run: " if last[0] != rows["condition"].iloc[0] else "not measured: ") in got["reason"]
            and last[0] in got["reason"])

def test_a_count_of_seeds_is_exact_and_refuses_while_seeds_are_missing():
    "`All five seeds grok` is true or false of five seeds; of four it is nothing yet."
    i = "sec4.2.017"
    whole = answer(answering(i, [1, 1, 1, 0, 1]), i)
    assert claim(i)["aggregate"] == "sum" and (whole["ours_mean"], whole["ours_std"], whole["ours_n"]) == (4, 0, 5)
    assert (whole["ours_lo"] == whole["ours_hi"] == 4
            and whole["verdict"] == ("agrees" if whole["paper_mean"] == 4 else "differs"))
    all_paper = answer(answering(i, np.arange(5) < whole["paper_mean"]), i)
    assert all_paper["verdict"] == "agrees"
    for rows in (answering(i, np.ones(5))[:4], answering(i, [1, 1, np.nan, 1, 1])):
        got = answer(rows, i)
        assert (got["verdict"] == "not attempted" and np.isnan(got["ours_mean"])
                and re.search("missing run|never got there", got["reason"]))

def test_a_p_value_is_welch_s_of_the_two_arms_unpaired():
    i, rng = "sec4.2.011", np.random.default_rng(1)
    a, b = rng.normal(.4, .1, 5), rng.normal(.5, .2, 5)
    rows = pd.concat([answering(i, a), answering(i, b, names=[claim(i)["versus"]])])
    va, vb = a.var(ddof=1) / 5, b.var(ddof=1) / 5
    df = (va + vb)**2 / (va**2 / 4 + vb**2 / 4)
    p = 2 * stats.t.cdf(-abs(a.mean() - b.mean()) / np.sqrt(va + vb), df)
    assert answer(rows, i)["ours_mean"] == pytest.approx(p) and answer(rows, i)["ours_n"] == 5
    assert np.isnan(answer(rows, i)["ours_std"]) and np.isnan(answer(rows, i)["ours_lo"])
    one_arm = answer(answering(i, a), i)
    assert one_arm["verdict"] == "not attempted" and "missing run: " + claim(i)["versus"] in one_arm["reason"]

def test_a_median_and_the_first_seed_are_of_those_that_got_there_and_wait_for_the_rest():
    low, middle = "appD.2.006", "appD.2.008"
    epochs = [26000., 39000, np.nan, 31000, 25300]
    assert answer(answering(low, epochs), low)["ours_mean"] == 25300
    first = answer(answering(low, epochs), low)
    assert (first["verdict"] == "inconclusive" and np.isnan(first["ours_lo"])
            and "1 of 5 seeds never got there" in first["reason"])
    got, there = answer(answering(middle, epochs), middle), np.array([26000., 39000, 31000, 25300])
    assert got["ours_mean"] == np.median(there) and got["ours_n"] == 4
    half = stats.t.ppf(.975, 3) * there.std(ddof=1) / 2 * np.sqrt(np.pi / 2)
    assert (got["ours_hi"] - got["ours_mean"] == pytest.approx(half)
            and got["ours_mean"] - got["ours_lo"] == pytest.approx(half))
    for i in (low, middle): assert answer(answering(i, epochs)[:4], i)["verdict"] == "not attempted"

def test_a_share_of_seeds_waits_for_all_of_them_however_alike_they_are():
    i = "appD.1.010"
    seeds = seed_list(claim(i)["seeds"])
    some = answer(answering(i, np.ones(len(seeds)), seeds)[:2], i)
    assert some["verdict"] == "not attempted" and np.isnan(some["ours_mean"])
    assert answer(answering(i, np.arange(len(seeds)) < 12, seeds), i)["verdict"] != "not attempted"

def test_two_of_five_seeds_decide_nothing_however_close_they_lie():
    i = "tab4.005"
    near, far = (answering(i, np.full(5, claim_value) + [0, .001, 0, .001, 0])
                 for claim_value in (PRINTED.set_index("id").loc[i, "value"], .9))
    for rows, whole in ((near, "agrees"), (far, "differs")):
        assert answer(rows, i)["verdict"] == whole and "interim" not in answer(rows, i)["reason"]
        two = answer(rows[:2], i)
        assert (two["verdict"] == "inconclusive" and two["reason"].startswith("interim: 2 of the 5 seeds")
                and two["ours_n"] == 2)

def test_the_lowest_of_several_units_is_the_one_with_the_lowest_mean():
    six, five = "appF.2.001", "appF.2.002"                             # the second is asked without the third component
    values = np.linspace(.4, .5, 5) - .02 * np.arange(6)[:, None]
    assert [answer(answering(six, values), i)["ours_mean"] for i in (six, five)] == pytest.approx([.45 - .10] * 2)
    values[2] = .1
    assert [answer(answering(six, values), i)["ours_mean"] for i in (six, five)] == pytest.approx([.1, .45 - .10])

def test_what_a_share_leaves_is_one_minus_it_seed_by_seed():
    i, share = "appC.3.001", np.array([.30, .34, .36, .42, .38])
    assert claim(i)["metric"] == "1 - attn_share"
    got = answer(answering(i, share), i)
    assert got["ours_mean"] == pytest.approx(1 - share.mean()) and got["ours_std"] == pytest.approx(share.std(ddof=1))
    low, values = "fig8_caption.001", np.linspace(.1, .8, 20)                     # the lowest rest is the highest share
    assert answer(answering(low, values), low)["ours_mean"] == pytest.approx(1 - values[15:].mean())

def test_a_unit_is_asked_for_by_name_and_the_whole_has_none():
    """A claim about one unit sees no other; a claim about the whole takes rows whose unit is empty, `all` or `none`,
    and those once."""
    facts = _fact_rows(FFN).assign(instrument="facts")
    assert claim("appC.5.001")["unit"] == "patch25" and answer(facts, "appC.5.001")["ours_mean"] == 25
    assert answer(facts[facts["unit"] != "patch25"], "appC.5.001")["verdict"] == "not attempted"
    whole = facts[facts["unit"] == "patch25"].assign(unit="", value=99)
    assert answer(pd.concat([facts, whole]), "appC.5.001")["ours_mean"] == 25
    assert [answer(facts, f"tab3.0{19 + k}")["ours_mean"] for k in range(5)] == SEEDS
    for whole in ("", "all", "none"):
        rows = pd.concat([made(FFN, .1, unit=whole), made(FFN, .9, unit="E1"), made(FFN, .8, unit="H0")])
        assert answer(rows, "tab1.003")["ours_mean"] == pytest.approx(.1)
    with pytest.raises(ValueError, match="one row per seed; got 10"):
        answer(pd.concat([made(FFN, .1), made(FFN, .1, unit="all")]), "tab1.003")

def test_a_count_that_needs_no_run_is_exact_and_one_off_is_wrong():
    "Margin 0: the number of +1 tokens agrees when it is the printed one, differs when it is not, and has no spread."
    facts = _fact_rows(FFN).assign(instrument="facts")
    got = answer(facts, "appA.002")
    assert (got["ours_mean"], got["verdict"], got["ours_std"], got["ours_n"]) == (got["paper_mean"], "agrees", 0, 1)
    assert claim("appA.002")["margin"] == 0 and got["ours_lo"] == got["ours_hi"] == got["ours_mean"]
    one_off = facts.assign(value=facts["value"] + (facts["metric"] == "n_plus1_tokens"))
    assert answer(one_off, "appA.002")["verdict"] == "differs" and answer(one_off, "appA.001")["verdict"] == "agrees"

def test_a_null_is_computed_and_a_claim_without_a_number_says_why():
    rows = table1()
    null, none = answer(rows, "fig1.009"), answer(rows, "appB.001")
    assert null["ours_mean"] == baselines()["most frequent"] == null["ours_hi"] and pd.isna(null["ours_n"])
    assert (none["verdict"] == "not attempted" and np.isnan(none["ours_mean"])
            and none["reason"] == claim("appB.001")["note"])
    assert answer(_fact_rows(FFN).assign(instrument="facts"), "tab3.013")["verdict"] == "not attempted"

# --- reasons ---------------------------------------------------------------------------------------

def test_missing_runs_are_named_with_seeds_and_cost_and_failed_seeds_keep_their_row():
    rows = pd.concat([made(FFN, [.1, .1, np.nan, .2, .2]), made(MOE, [.4, .5], SEEDS[:2])])
    out = compare(rows, "tab1").set_index("id")
    ffn, moe, narrow = (out.loc[i] for i in ("tab1.003", "tab1.009", "tab1.006"))
    assert ffn["ours_mean"] == pytest.approx(.15) and ffn["ours_n"] == 4 and "1 of 5 seeds failed" in ffn["reason"]
    assert "256" in ffn["reason"] and moe["ours_n"] == 2 and "seeds 256, 512, 1024" in moe["reason"]
    assert (narrow["verdict"] == "not attempted"
            and f"missing run: {NARROW}, seeds 42, 137, 256, 512, 1024" in narrow["reason"])
    assert narrow["ours_n"] == 0 and np.isnan(narrow["ours_mean"])
    assert "not measured: digits of add7/ffn-h256-silu at first256, none none" in out.loc["tab1.001", "reason"]

@pytest.mark.parametrize("rule, steps", [(None, 20_000), ("final", 40_000)])
def test_a_missing_run_is_priced_at_the_steps_that_its_rule_needs(rule, steps):
    got = answer(table1(), "tab4_caption.003", rule=rule)["reason"]
    for name, price in re.findall(r"missing run: (\S+), seeds [\d, ]+, about (\S+) core-hours", got):
        assert float(price) == pytest.approx(expected_seconds(name, 5 * steps) / 3600, rel=.06)
    assert got.count("missing run: ") == 2 and "not measured" not in got

def test_a_trained_run_without_this_measurement_is_not_called_missing():
    """Seeds 42 and 137 are there with another edit; nobody has trained the other three: two sentences, each about its
    own seeds."""
    rows = made(FFN, .9, SEEDS[:2], edit="mean")
    reason = answer(rows, "tab1.003")["reason"]
    assert f"not measured: digits of {FFN} at first256, ffn_out zero, seeds 42, 137" in reason
    assert re.search(rf"missing run: {FFN}, seeds 256, 512, 1024, about \S+ core-hours", reason)
    other = made(FFN, .9, edit="mean", stream="paired")                           # another stream's runs are other runs
    assert "not measured" not in answer(other, "tab1.003")["reason"]
    whole = answer(made(FFN, .9, edit="mean"), "tab1.003")["reason"]
    assert "missing run" not in whole and "core-hours" not in whole

def printed_again(i):
    "Five values whose mean and spread are the printed ones."
    p, z = PRINTED.set_index("id").loc[i], np.array([-1, -.5, 0, .5, 1])
    return p["value"] + p["value_std"] * z / z.std()

def test_the_rule_about_printed_digits_is_for_the_paper_s_own_seeds():
    same = printed_again("tab1.003")
    assert "the printed digits themselves" in answer(made(FFN, same), "tab1.003")["reason"]
    paired = answer(made(FFN, same, [1, 2, 3, 4, 5]), "tab1.003", stream="paired", seeds=[1, 2, 3, 4, 5])
    assert "printed digits" not in paired["reason"]

def test_a_router_is_sent_down_other_paths_by_rounding_so_its_printed_digits_are_luck():
    lucky = answer(made(MOE, printed_again("tab1.009")), "tab1.009")
    assert lucky["verdict"] == "inconclusive" and "printed digits" not in lucky["reason"]

# --- contrasts -------------------------------------------------------------------------------------

def test_contrast_is_paired_by_seed_and_counts_against_its_fixed_n():
    rng = np.random.default_rng(0)
    base, arm = rng.normal(.4, .1, 64), rng.normal(.25, .05, 64)
    rows = pd.concat([made(FFN, base, range(1, 65), "first1000", edit="mean"),
                      made(MOE, base + arm, range(1, 65), "first1000", edit="mean")]).sample(frac=1, random_state=0)
    c = answers.contrast(rows, MOE, FFN)
    assert (c["n"], c["n_fixed"], c["reason"]) == (64, 64, "")
    assert c["difference"] == pytest.approx(arm.mean()) and c["lo"] < arm.mean() < c["hi"]
    assert c["effect"] == pytest.approx(arm.mean() / arm.std(ddof=1)) and c["outcome"] == "different"
    few = answers.contrast(rows[rows["seed"] <= 5], MOE, FFN)
    assert few["p"] == .0625 and few["outcome"] == "inconclusive" and "interim: 5 of the 64" in few["reason"]
    failed = rows.assign(value=rows["value"].where(rows["seed"] != 3))
    assert answers.contrast(failed, MOE, FFN)["n"] == 63 and "seeds 3" in answers.contrast(failed, MOE, FFN)["reason"]

def test_a_family_at_several_positions_is_their_mean_in_each_seed_and_adjusted_on_its_own():
    rng, seeds, pair = np.random.default_rng(6), range(1, 65), ("add7/ffn-h256-silu+ffnlr0.25", FFN)
    family = BRIDGE[(BRIDGE["item"] == "contrast_carry") & (BRIDGE["edit"] == "mean")]
    assert set(family["position"]) == {"o1 o2"} and set(family["rule"]) == {"first1000"} and len(family) > 1
    values = {(n, o): rng.normal(.4 + .1 * (n == pair[0]), .05, 64) for n in pair for o in ("o1", "o2")}
    rows = pd.concat([made(n, v, seeds, "first1000", edit="mean", position=o) for (n, o), v in values.items()])
    out = answers.contrasts(rows, item="contrast_carry")
    line = out[(out["a"] == pair[0]) & (out["b"] == pair[1])].iloc[0]
    by_seed = {n: (values[n, "o1"] + values[n, "o2"]) / 2 for n in pair}
    assert line["difference"] == pytest.approx((by_seed[pair[0]] - by_seed[pair[1]]).mean()) and line["n"] == 64
    assert line["p"] == pytest.approx(ev.paired_permutation(*by_seed.values()).p)
    assert line["p_holm"] == pytest.approx(min(1, len(family) * line["p"])) and len(out) == len(family)
    assert list(out) == answers.CONTRAST_COLUMNS and (out.loc[out["n"] == 0, "outcome"] == "not attempted").all()
    assert line["p_equivalence"] == pytest.approx(ev.tost(*by_seed.values(), line["margin"]).p)
    alike = (family["aggregate"] == line["asks"]).sum()        # equivalences are adjusted among those that ask the same
    assert line["p_equivalence_holm"] == pytest.approx(min(1, alike * line["p_equivalence"])) and alike < len(family)
    assert (answers.contrasts(rows)["n"] == 0).all(), "other positions answer no other family"
    half = rows[(rows["position"] == "o1") | (rows["seed"] > 4)]
    assert answers.contrasts(half, item="contrast_carry")["n"].max() == 60

def test_errors_that_span_powers_of_ten_are_compared_as_powers_of_ten():
    "On a linear scale with two hundredths of room, .0007 agreed with a printed .000028: 25 times as much."
    i = "004.F_grid12.5.001"
    assert claim(i)["scale"] == "log10" and PRINTED.set_index("id").loc[i, "value"] == pytest.approx(2.8e-5)
    n = int(claim(i)["n"])
    seeds = list(range(1, n + 1))
    spread = 10 ** np.linspace(-.02, .02, n)
    word = lambda v: answer(answering(i, [v * spread], seeds), i)
    assert [word(v)["verdict"] for v in (7e-4, 2.8e-5, 4e-5, 2.8e-6)] == ["differs", "agrees", "agrees", "differs"]
    assert word(4e-5)["ours_mean"] == pytest.approx(4e-5) and "powers of ten" in word(4e-5)["reason"]
    zero = PRINTED[PRINTED["id"].isin(BRIDGE.loc[BRIDGE["scale"] == "log10", "id"]) & (PRINTED["value"] == 0)].iloc[0]
    got = answer(answering(zero["id"], [1e-3 * spread], seeds), zero["id"])   # a printed 0 was rounded
    assert got["verdict"] == "differs" and np.isfinite(got["ours_lo"])

def test_a_fact_is_exact_whichever_instrument_counts_it():
    "Ten settings of companions were judged with the room that measured shares have."
    facts = BRIDGE[(BRIDGE["stream"] == "none") & BRIDGE["aggregate"].eq("mean") & BRIDGE["unit_factor"].eq(1)]
    unit = facts["id"].map(PRINTED.set_index("id")["unit"])
    whole = (unit == "count") & (facts["metric"] != "train_pct")        # a percent that is printed as a whole number
    assert (facts.loc[whole, "margin"] == 0).all() and whole.sum() > 60
    digit = facts["id"].map(PRINTED.set_index("id")["digit"])
    assert (facts.loc[unit == "fraction", "margin"] <= digit[unit == "fraction"] / 2 + 1e-12).all()
