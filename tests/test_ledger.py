"""The ledger: every verdict from invented rows, every statement checked, and the committed table against its
recomputation."""
from collections import namedtuple

import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from moe_redistribution.evidence import contrasts as answers, printed as paper
from moe_redistribution.record import ledger as room
from moe_redistribution.record.ledger import _registered_test, decision, ledger_text
from moe_redistribution.record.coverage import _by_id, coverage
from moe_redistribution.judge.verdicts import (AS_MUCH, FAILS, FEW, FLIPS, FORCED_HERE, HOLDS, MORE, NO, NOT_WHEN,
                                               NOTHING_TO_WIN, OPEN, TIE, UNTESTABLE, VERDICTS, WAITS, YES, Decision,
                                               Registered, as_much, decide, _in_force, judge, kind_of)
from moe_redistribution.evidence.claims import (REST, Claim, Measured, cells_of, claims, first_learners, readings_of,
                                                seed_list, statements)
from moe_redistribution.evidence.printed import study_lines
from moe_redistribution.judge.statistics import interval, seeds_needed, tost
from moe_redistribution.evidence.table_files import ROOT
from moe_redistribution.evidence.selection import rows_behind, rows_of
from moe_redistribution.report.recorded_claims import THREE_ANSWERS, deciding, former_verdicts

FFN, MOE = "add7/ffn-h256-silu", "add7/moe-e4k1-h256-silu"
SEEDS = [42, 137, 256, 512, 1024]
SAID, PRINTED = statements(), paper.paper_values().set_index("id")
SENTENCES = {(c.key, c.protocol): c for c in Claim.of(SAID)}

@pytest.fixture(scope="module")
def rows():
    return rows_behind(readings_of())

TEXT = {*"key asked section statement expects quotes numbers verdict why was page rows note".split(),
        *(f"{a}{f}" for a in THREE_ANSWERS for f in ("", "_by", "_read", "_rule", "_seeds")),
        *(f"{k}_{f}" for k in room.PROTOCOLS for f in ("says", "test", "access"))}

@pytest.fixture(scope="module")
def table():
    """The committed ledger.

    That it is what the rows give is shown for two items below, and for all of it by `make audit`."""
    texts = {c: str for c in room.LEDGER_COLUMNS if c in TEXT}
    numbers = {c: [""] for c in room.LEDGER_COLUMNS if c not in TEXT}
    return pd.read_csv(ROOT / "results/ledger.csv", dtype=texts, keep_default_na=False, na_values=numbers)

def assert_recorded(made, table):
    same = dict(check_dtype=False, rtol=1e-6, atol=1e-9)
    pd.testing.assert_frame_equal(table.reset_index(drop=True), made.reset_index(drop=True),
                                  obj="results/ledger.csv; run make record", **same)

def made(condition, got, seeds=SEEDS, stream="authors", rule="first256", edit="zero", position="o0-o3", site="ffn_out",
         metric="digits"):
    return pd.DataFrame(dict(condition=condition, stream=stream, seed=list(seeds), rule=rule, split="all",
                             site=site, edit=edit, unit="", position=position, stratum="all", metric=metric, value=got,
                             instrument="ablation"))

def said(key, protocol="paper", **other):
    "One line of the statements, with columns changed."
    return SENTENCES[key, protocol]._replace(**other)

def says(word, note="", test="", p_same=np.nan):
    return Decision(.1, .05, .15, .1, 5, .06, p_same, test, word, note)

# --- the rule ---------------------------------------------------------------------------------------

def test_the_same_two_models_are_never_a_control():
    "Whatever is done to them: the kind of a reading is computed from its arms."
    kinds = {k: kind_of(s, SENTENCES[k[0], "paper"]) for k, s in SENTENCES.items() if k[1] != "power"}
    for (key, protocol), kind in kinds.items():
        s, paper = SENTENCES[key, protocol], SENTENCES[key, "paper"]
        if {*s.arms} == {*paper.arms}: assert kind != "control", (key, protocol)
        if kind == "control":                                                                       # it brings in a model
            assert s.arms[1] - paper.arms[0] - paper.arms[1] and s.expects[0] in "+-", (key, protocol)
    controls = {k for (k, p), kind in kinds.items() if kind == "control"}
    assert {"4.2-05", "4.2-06", "4.2-24", "4.2-27", "001-R2a", "5-02"} <= controls
    # the same models, read otherwise; and the same question of other models
    assert not controls & {"abs-01", "abs-08", "1-04", "4.3-02", "E-08", "G-06", "G-07", "4.2-07", "4.2-03", "003-A6", "003-F6", "000-Q9"}

def test_what_a_label_excludes_does_not_matter_to_the_kind():
    "Another stream, other seeds, the block's name or another instrument make no other reading; another model does."
    s = said("4.2-05", "audited")
    for other in (dict(stream="authors"), dict(seeds="1 2 3"), dict(instrument="block"), dict(note="x"), dict(edit="zero")):
        assert kind_of(s._replace(**other), said("4.2-05")) == "control"
    assert kind_of(said("4.2-05", stream="paired", seeds="7", note="y"), said("4.2-05")) == "seen"
    assert kind_of(said("4.2-05", condition=f"block.ends/{MOE}", versus=f"block.ends/{FFN}"), said("4.2-05")) == "seen"

def _draws(truth, n, trials, seed):
    return np.random.default_rng(seed).normal(truth, .1, (trials, n))

def _worst_errors(n, trials, flips, method="t"):
    """At a true difference that just counts a reading may say neither yes nor no, at zero not *more than nothing*, and at
    what just counts no tie: each in 5 of 100 draws at most (two standard errors of the draws allowed)."""
    margin, test = .05, Registered(FLIPS) if flips else None
    def share(truth, expects, words, seed):
        found = [decide(v, expects, margin, interval(v, method), test)[0] for v in _draws(truth, n, trials, seed)]
        return np.mean([f in words for f in found])
    most = .05 + 2 * np.sqrt(.05 * .95 / trials)
    assert share(margin, "+", [YES], 0) <= most and share(margin, "+", [NO], 1) <= most
    assert share(0, "+", [YES, MORE], 2) <= most and share(-margin, "-", [YES], 3) <= most
    assert share(margin, "0", [YES], 4) <= most and share(margin, "0", [NO], 5) <= most
    if n == 64: assert share(margin + .1, "+", [YES], 6) > .95 and share(0, "0", [YES], 7) > .9           # and it can say them

@pytest.mark.parametrize("n", [5, 8, 16, 64])
def test_each_word_is_wrong_at_its_boundary_in_at_most_five_of_a_hundred_readings(n):
    _worst_errors(n, 150, flips=n != 16)

@pytest.mark.audit
@pytest.mark.parametrize("n, method", [(5, "t"), (8, "t"), (16, "t"), (64, "t"), (64, "BCa")])
@pytest.mark.parametrize("flips", [False, True])
def test_the_same_of_every_kind_of_test_with_ten_times_the_draws(n, method, flips):
    _worst_errors(n, 400 if method == "BCa" else 1500, flips, method)

def test_a_control_does_as_much_by_tost_or_beyond_what_counts_and_its_error_is_held_at_both_ends():
    "At a difference that just counts it is said of 5 in 100 at most; where both do the same, or the control more, it can be said."
    s, margin = said("4.2-05", "audited"), .05
    def share(truth, n, trials=150):
        each = []
        for v in _draws(truth, n, trials, 1000 + int(1000 * truth) + n):
            i = interval(v, "t")
            says, by, p, same = decide(v, "+", margin, i)
            each.append(as_much(s, Decision(i.mean, i.lo, i.hi, .1, n, p, same, by, says, "")))
        return each.count(YES) / trials, each.count(NO) / trials
    for n in (5, 8, 64):
        assert max(*share(margin, n), share(0., n)[1]) <= .05 + 2 * .018
    assert share(0., 64)[0] > .9 and share(-.15, 64)[0] > .95 and share(.15, 64)[1] > .95

def test_more_seeds_in_the_block_take_the_place_of_what_they_repeat_and_of_nothing_else():
    both = {k: SENTENCES["1-04", k] for k in ("paper", "audited", "uncopied", "confirmed", "confirmed_audited", "confirmed_uncopied")}
    both["power"] = said("abs-06", "power")
    found = {k: says(YES) for k in both} | {"audited": says(NO)}
    assert set(_in_force(both, found)) == {"confirmed", "confirmed_audited", "confirmed_uncopied"}
    assert judge(both, found).verdict == HOLDS                                  # the old reading decides no more
    late = found | {"confirmed_audited": says(WAITS)}
    assert judge(both, late).verdict == NOT_WHEN                                 # until its own successor is in, it does

def test_a_tie_holds_only_where_an_arm_shows_that_something_was_to_be_won(table):
    "Each claim of no difference between two arms that holds has a reading of power, and that reading shows a difference."
    both = {"paper": said("abs-06"), "power": said("abs-06", "power")}
    got = [judge(both, {"paper": says(YES), "power": says(w)._replace(mean=.01)})[:2] for w in (YES, NO, MORE, OPEN, WAITS)]
    assert got == [(HOLDS, ""), *[(OPEN, NOTHING_TO_WIN)] * 3, (OPEN, WAITS)]
    tied = table[(table["expects"] == "0") & (table["verdict"] == HOLDS)].set_index("key", drop=False)
    tied = tied.drop(index=[k for k in tied.index if not said(k).arms[1]])
    assert len(tied) > 6 and (tied["power_says"] == YES).all(), tied.loc[tied["power_says"] == ""].index

def test_a_question_of_our_own_has_the_same_words(table):
    own = table[table["statement"].str.startswith("Asked here: ")]
    assert len(own) > 15 and (own["asked"] == "here").all() and own["verdict"].isin(VERDICTS).all()
    assert (table.drop(own.index)["asked"] == "paper").all()

def test_what_counts_is_one_rule_on_both_sides():
    x = np.array([.24, .31, .34, .40, .49])
    assert [decide(x, e, .05)[0] for e in "+-0"] == [YES, NO, NO] and [decide(-x, e, .05)[0] for e in "+-0"] == [NO, YES, NO]
    wide = np.array([-.1, .2, .05, -.15, .12])
    assert [decide(wide, e, .05)[0] for e in "+-0"] == [OPEN] * 3
    small = np.array([.01, .02, .015, .012, .018])
    # shown to lie within the margin
    assert [decide(small, e, .05)[0] for e in "+-0"] == [NO, NO, YES] and [decide(small, e, 0)[0] for e in "+-"] == [YES, NO]
    assert decide(small, "0", .05)[1:] == ("TOST", .0625, tost(small, np.zeros(5), .05).p)
    assert [decide(x, e, .05)[1] for e in "+-0"] == ["t interval"] * 3 and decide(wide, "+", .05)[1] == ""
    assert decide(np.tile(x, 5), "+", .05)[1] == "BCa interval"                               # from twenty seeds on
    low = np.array([-.30, .02, -.20, -.25, -.05])                         # surely no .05 above 0, however far below
    assert decide(low, "+", .05)[0] == NO and tost(low, np.zeros(5), .05).p > .5
    assert [decide(np.array([.24, .31, .34]), e, .05)[0] for e in ("+~", "-~")] == [YES, NO]         # words of size: by their sign

def test_a_tie_is_between_two_readings_and_never_with_a_constant():
    "Both at 0 says that the measure cannot part them; a share of 0 where more is claimed says that there is none."
    same = pd.concat([made(MOE, [.3] * 5), made(FFN, [.3] * 5)])
    assert decision(same, said("4.2-01"))[7:9] == (TIE, NO)
    none = decision(made(MOE, [0.] * 5), said("4.2-01", versus="value=0", margin=.05))
    assert (none.says, none.test) == (NO, "t interval")

@pytest.mark.parametrize("mean, sd, expects, margin",
                         [(.03, .1, "+", 0), (.2, .1, "-", .05), (.01, .1, "0", .05), (.2, .3, "0", .05)])
def test_seeds_needed_is_the_first_number_that_decides(mean, sd, expects, margin):
    n = int(seeds_needed(mean, sd, expects, margin))
    def decided(n):
        error = sd / n**.5                     # for a chance of .8: of two bounds each is missed half as often
        half, reach = (sum(stats.t.ppf(level, n - 1) for level in levels) * error for levels in ((.975, .8), (.95, .9)))
        if expects == "0": return reach < margin - abs(mean) or half < abs(mean) - margin
        return half < abs((mean if expects == "+" else -mean) - margin)
    assert decided(n) and not any(decided(k) for k in range(2, n))

# --- from rows to an answer -------------------------------------------------------------------------

def test_values_of_a_difference_a_gap_of_gaps_and_the_lowest_cell_by_hand():
    a, b = np.array([.3, .4, .5, .6, .7]), np.array([.1, .1, .2, .2, .1])
    two = pd.concat([made(MOE, a), made(FFN, b)])
    assert said("4.2-01").values(two)[0].tolist() == pytest.approx(a - b)
    four = pd.concat([made(MOE, a, position="o3"), made(FFN, b, position="o3"), made(MOE, b, position="o0-o2"),
                      made(FFN, b / 2, position="o0-o2")])
    assert said("4.1-12").values(four)[0].tolist() == pytest.approx(a - b - b / 2)
    cells = pd.concat([made(n, v + k / 10, position=f"o{k}") for k in range(4)
                       for n, v in ((MOE, a - k / 10 * (k != 2)), (FFN, b))])
    # the last position has the smallest lead
    assert said("4.1-11").values(cells)[0].tolist() == pytest.approx(a - b - .3)
    alone = said("4.2-01", condition=FFN, versus="value=.1")
    assert alone.values(made(FFN, b))[0].tolist() == pytest.approx(b - .1)

def test_an_answer_waits_for_every_seed_and_leaves_failed_ones_out():
    two = pd.concat([made(MOE, [.3, .4, .5, .6, .7]), made(FFN, [.1, .1, .2, .2, .1])])
    full = decision(two, said("4.2-01"))
    assert (full.says == YES and full.n == 5
            and (full.mean, full.lo) == pytest.approx(interval([.2, .3, .3, .4, .6])[:2]))
    early = decision(two[two["seed"] != 42], said("4.2-01"))
    assert (early.says == WAITS and early.n == 4 and "interim: 4 of the 5 seeds" in early.note
            and "core-hours" in early.note)
    failed = decision(two.assign(value=two["value"].where(two["seed"] != 42)), said("4.2-01"))
    assert failed.says == YES and failed.n == 4 and "failed" in failed.note
    # nothing recorded on the other task
    assert decision(two, said("abs-02")).says == WAITS

def test_a_number_is_decided_by_the_rule_of_numbers():
    s = said("5-01", condition=MOE, versus="", aggregate="mean")
    quoted = lambda v: [dict(verdict="", margin=.05,
                             printed=pd.Series(dict(value=v, value_std=np.nan, n_seeds=5., digit=0.)))]
    rows = made(MOE, [.30, .31, .32, .33, .34])
    assert [decision(rows, s, quoted(v)).says for v in (.33, .60)] == [YES, NO]
    assert decision(made(MOE, [.1, .2, .3, .4, .6]), s, quoted(.33)).says == OPEN

def test_quoted_numbers_decide_a_table_of_settings():
    s = said("A-01")
    word = lambda *w: decision(None, s, [dict(verdict=x) for x in w]).says
    assert [word("agrees", "agrees"), word("agrees", "differs"), word("agrees", "corrected"),
            word("agrees", "inconclusive"), word("agrees", "not attempted"),
            word()] == [YES, NO, NO, OPEN, WAITS, WAITS]

# --- the statements ---------------------------------------------------------------------------------

def test_ids_and_pages_of_every_statement_exist():
    ids = set(" ".join(SAID["quotes"]).split())
    assert ids <= set(PRINTED.index)
    assert all((ROOT / "nbs" / p.partition("#")[0]).is_file() for p in SAID["page"])
    assert SAID["statement"].str.endswith(".").all()

def test_copies_are_ruled_out_in_every_claim_about_digits_without_the_ffn_and_nothing_else_changes():
    pairs = SAID[~SAID["protocol"].isin(["paper", "power"])].pivot(index="key", columns="protocol", values=["condition", "versus",
        "stream", "rule", "edit", "aggregate"])
    both = pairs.dropna(how="any")
    assert len(both) > 40 and all((both[c, "audited"] == both[c, "uncopied"]).all() for c in pairs.columns.levels[0])
    third = SAID[SAID["protocol"] == "uncopied"]
    assert third["metric"].eq("digits_no_copy").all() and third["position"].eq("o1 o2").all()

@pytest.mark.parametrize("column, value", [("quotes", "tab1.999"), ("page", "10_studies/sparsity_moves/none.ipynb"),
                                           ("aggregate", "mode"), ("expects", ">"), ("n", "6"), ("stream", "crossed"),
                                           ("statement", ""), ("margin", "-1"), ("section", "§9")])
def test_a_statement_that_does_not_fit_is_refused_by_name(tmp_path, column, value):
    raw = study_lines("statements")
    raw.loc[raw.index[raw["key"] == "4.2-01"][0], column] = value
    raw.to_csv(tmp_path / "s.csv", index=False)
    with pytest.raises(ValueError, match="4.2-01"):
        statements(tmp_path / "s.csv")

def test_a_statement_needs_both_protocols_and_a_reason_where_no_rows_decide_it(tmp_path):
    raw = study_lines("statements")
    raw.drop(raw.index[raw["key"] == "4.2-02"][1]).to_csv(tmp_path / "one.csv", index=False)
    with pytest.raises(ValueError, match="4.2-02"):
        statements(tmp_path / "one.csv")
    raw.loc[raw["key"] == "B-01", "note"] = "who knows"
    raw.to_csv(tmp_path / "why.csv", index=False)
    with pytest.raises(ValueError, match="B-01"):
        statements(tmp_path / "why.csv")

# --- the table --------------------------------------------------------------------------------------

def test_every_verdict_and_answer_follows_from_what_its_own_line_says_of_each_reading(table):
    assert table["key"].tolist() == SAID["key"].drop_duplicates().tolist() and table["verdict"].isin(VERDICTS).all()
    for r in table.itertuples():
        mine = {k: SENTENCES[r.key, k] for k in room.PROTOCOLS if (r.key, k) in SENTENCES}
        at = lambda k, *fields: [getattr(r, f"{k}_{f}") for f in fields]
        notes = dict(part.split(": ", 1) for part in re.split(r"; (?=(?:" + "|".join(room.PROTOCOLS) + r"): )", r.note) if part)
        found = {k: Decision(*at(k, "mean", "lo", "hi"), np.nan, *at(k, "n", "p", "p_same", "test", "says"), notes.get(k, "")) for k in mine}
        words = [w for part in r.numbers.split(", ") if part for n, w in [part.split(" ", 1)] for _ in range(int(n))]
        got = judge(mine, found, [dict(verdict=w, stream="", printed=PRINTED_NONE, margin=.05) for w in words])
        forced = mine["paper"].aggregate == "quotes" and got.verdict == HOLDS and r.verdict == FORCED_HERE   # facts that need no run
        assert got.verdict == r.verdict or forced, r.key
        assert [(a.says, a.by) for a in got.answers] == [tuple(at(a, *[]) or (getattr(r, a), getattr(r, f"{a}_by"))) for a in THREE_ANSWERS], r.key
        assert r.why or r.verdict in (HOLDS, FAILS, FORCED_HERE, UNTESTABLE), r.key

PRINTED_NONE = pd.Series(dict(value=np.nan, value_std=np.nan, n_seeds=np.nan, digit=0.))

def test_word_number_seeds_and_checkpoint_come_from_one_reading(table):
    "And that is the reading that the verdict hangs on: one that says so."
    for r in table.itertuples():
        d, own = deciding(r), {AS_MUCH: "control", NOT_WHEN: "otherwise"}.get(r.verdict, "seen")
        assert d.reading == getattr(r, f"{own}_by"), r.key
        if not d.n: continue
        s = said(r.key, d.reading)
        assert (d.interval[:4], d.checkpoint) == (tuple(getattr(r, f"{d.reading}_{f}") for f in ("mean", "lo", "hi", "n")), s.rule), r.key
        assert (d.seeds == "unseen") == d.reading.startswith("confirmed") and d.n <= len(seed_list(s.seeds)), r.key
        if r.verdict in (HOLDS, FORCED_HERE): assert getattr(r, f"{d.reading}_says") == YES, r.key
        if r.verdict in (FAILS, NOT_WHEN) and own != "seen" or r.verdict == FAILS: assert getattr(r, f"{d.reading}_says") == NO, r.key

def test_every_claim_whose_word_moved_says_what_it_was_and_why(table):
    for r in table.itertuples():
        old = former_verdicts(r.key)
        assert not r.was or any(f": {r.was}. " in f and f.rstrip().endswith(".") and len(f.split(f": {r.was}. ")[1]) > 20 for f in old), r.key
    assert (table["was"] != "").sum() > 300

def decided_by(r, k, margin):
    "What one reading of a line must say if the test that it names decided it, from its numbers alone."
    lo, hi, p, p_same, test = (getattr(r, f"{k}_{f}") for f in ("lo", "hi", "p", "p_same", "test"))
    if test == "TOST": return YES if p_same < .05 and r.expects == "0" else None
    if test == TIE: return NO if lo == hi == 0 and r.expects != "0" else None
    if r.expects == "0": says = NO if (lo > margin or hi < -margin) and not p_same < .05 else None
    else:
        low, high = (lo, hi) if r.expects[0] == "+" else (-hi, -lo)
        says = NO if high < margin else YES if low > margin else MORE if low > 0 else None
        if says == NO: return says if test.endswith("interval") else None
    if test.startswith(FLIPS): return says if p < .05 else None
    return says if test.endswith("interval") else None

def test_no_verdict_stands_whose_named_test_did_not_decide_it(table):
    tests = 0
    for r in table.itertuples():
        for k in room.PROTOCOLS:
            word, test = getattr(r, f"{k}_says"), getattr(r, f"{k}_test")
            if k == "power": continue                                         # of either sign, by its interval
            if word not in (YES, MORE, NO): assert test in ("", FEW), (r.key, k)
            elif test == "rule of numbers":
                assert r.expects == "number" or said(r.key).aggregate == "quotes", (r.key, k)
            elif test == "exact interval": assert said(r.key, k).stream == "none" or said(r.key, k).aggregate == "sum"
            else: assert decided_by(r, k, said(r.key, k).margin) == word, (r.key, k)
            tests += word in (YES, NO)
            if test == "t interval": assert getattr(r, f"{k}_n") < 20
            if test == "BCa interval": assert getattr(r, f"{k}_n") >= 20
    assert tests > 200

def test_the_ledger_decides_by_the_test_that_was_registered(rows, table):
    "One question, one answer: a family of nine on six seeds cannot reject, and no interval may say that it did."
    by_question = {c.question for c in Claim.of(claims().query("item.str.startswith('contrast')"))}
    asked = [s for s in SENTENCES.values() if s.aggregate == "difference" and s.question in by_question]
    at, few = table.set_index("key"), 0
    assert len(asked) > 60
    for s in asked:
        says, test, n = (at.loc[s.key, f"{s.protocol}_{f}"] for f in ("says", "test", "n"))
        assert not (says in (YES, MORE) and s.expects != "0") or test.startswith(f"{FLIPS}, Holm"), (s.key, s.protocol)
        assert not (says == NO and s.expects == "0") or test.startswith(f"{FLIPS}, Holm"), (s.key, s.protocol)
        few += test == FEW
    assert few >= 2
    s = said("abs-01", "audited")
    assert _registered_test(rows, s).family == 6 and _registered_test(rows, said("abs-01")) is None

def test_whose_seeds_a_reading_has_is_computed_from_it(table):
    for r in table.itertuples():
        for a in THREE_ANSWERS:
            if (by := getattr(r, f"{a}_by")) in ("", "numbers"): continue
            s, whose = said(r.key, by), getattr(r, f"{a}_seeds")
            if whose == "unseen": assert s.names[0].startswith("block.") and min(seed_list(s.seeds)) > 4100, r.key
            if whose == "the paper's": assert s.stream == "authors", r.key
    assert {*table["seen_seeds"]} == {"unseen", "the paper's", "new", "none"}

def test_one_cell_has_one_verdict():
    "However often the paper prints a number of a cell, and with however many digits, it is compared once."
    bridge = claims().query("protocol == 'paper'")
    fine = answers.finest_prints(paper.paper_values(), bridge)
    files = pd.concat([pd.read_csv(p)
                       for p in sorted((ROOT / "results/paper").glob("*.csv"))]).query("protocol == 'paper'")
    verdicts = files.set_index("id")["verdict"]
    same = pd.Series({i: p.id for i, (p, _) in fine.items() if i in verdicts.index})
    words = verdicts[same.index].groupby(same).nunique()
    assert (words == 1).all(), words[words > 1]
    assert (same.groupby(same).size() > 1).sum() > 30

def test_a_number_read_at_another_checkpoint_counts_neither_for_nor_against(table):
    files = pd.concat([pd.read_csv(p)
                       for p in sorted((ROOT / "results/paper").glob("*.csv"))]).query("protocol == 'paper'")
    bridge = claims().query("protocol == 'paper'").set_index("id")
    elsewhere = files[files["verdict"] == "another checkpoint"]
    assert ((bridge.loc[elsewhere["id"], "rule"] == "best").all()
            and elsewhere["reason"].str.contains("read at first99").all())
    at = files.set_index("id")
    assert at.loc["fig26b.003", "verdict"] in ("another checkpoint", "agrees", "differs", "inconclusive")
    stopped = at[at["reason"].str.contains("read at first99")]
    assert (stopped["verdict"] == "another checkpoint").all()

def test_the_headline_is_the_difference_of_the_recorded_means(table, rows):
    r = table.set_index("key").loc["4.2-01"]
    at = lambda n: rows.query("condition == @n and stream == 'authors' and rule == 'first256' and site == 'ffn_out' "
                              "and edit == 'zero' and metric == 'digits' and position == 'o0-o3' and stratum == 'all' "
                              "and unit == '' and instrument == 'ablation'")["value"]
    assert len(at(MOE)) == 5 and r["paper_mean"] == pytest.approx(at(MOE).mean() - at(FFN).mean())
    assert r["printed"] == pytest.approx(.324) and r["audited_n"] == 64

CONTRASTS = pytest.mark.parametrize("item, protocol, keys", [("contrast_carry", "audited", ("5-02", "4.2-07")),
    ("contrast_carry_final", "audited", ("4.2-06", "4.2-08")),
    ("contrast_uncopied", "uncopied", ("abs-01", "4.2-04", "5-02", "4.2-07"))])

def agree(table, registered, protocol, keys):
    for key in keys:
        s, mine = said(key, protocol), table.set_index("key").loc[key]
        line = registered[[{a, b} == {s.condition, s.versus} for a, b in zip(registered["a"], registered["b"])]].iloc[0]
        sign = 1 if line["a"] == s.condition else -1
        assert (mine[f"{protocol}_mean"] == pytest.approx(sign * line["difference"])
                and mine[f"{protocol}_n"] == line["n"] == line["n_fixed"])
        says = {NO: ("equivalent", "equivalent and different"), YES: ("different",), MORE: ("different",)}
        assert line["outcome"] in says[mine[f"{protocol}_says"]]

@CONTRASTS
def test_registered_contrasts_say_the_same(table, item, protocol, keys):
    agree(table, pd.read_csv(ROOT / "results/contrasts.csv").query("family == @item and edit == 'mean'"),
          protocol, keys)

@pytest.mark.audit
@CONTRASTS
def test_registered_contrasts_say_the_same_when_they_are_computed_again(table, rows, item, protocol, keys):
    agree(table, answers.contrasts(rows, "mean", item=item), protocol, keys)

@pytest.mark.audit
def test_the_committed_ledger_is_its_recomputation(table, rows):
    assert_recorded(room.ledger(rows=rows), table)

def test_no_claim_waits_for_a_row_that_its_instrument_does_not_write():
    """Where an instrument has rows of a condition by some rule, each cell that a claim reads there is among them: a
    wrong word in it would wait for ever."""
    reads = [r for c in Claim.of(claims().query("instrument != 'none'")) for r in c.readings]
    reads += [r for s in SENTENCES.values() for r in s.readings]
    cells = {(r.instrument, n, r.stream, r.rule.replace("learned", "first99"), at,
              r.metric.removeprefix(REST), r.site, r.edit, r.stratum, r.split)
             for r in reads for n, at, _ in cells_of(r)}
    found, columns = {}, ["stream", "rule", "position", "metric", "site", "edit", "stratum", "split"]
    for instrument in {c[0] for c in cells}:
        got = rows_of(instrument, {c[1] for c in cells if c[0] == instrument})[["condition", *columns]]
        for name, *spot in got.drop_duplicates().itertuples(index=False, name=None):
            found.setdefault((instrument, name), set()).add(tuple(spot))
    measured = {k: {spot[:2] for spot in spots} for k, spots in found.items()}
    assert len(cells) > 800 and len(found) > 100
    waits = {c for c in cells if c[2:4] in measured.get(c[:2], ()) and c[2:] not in found[c[:2]]}
    assert not waits, sorted(waits)

def test_what_an_item_s_claims_say_comes_out_of_the_rows_again_and_an_unknown_item_is_refused(table, rows):
    every = Measured(rows)
    for item in ("tab1", "tab9"):
        part = room.ledger(item, rows=every)
        assert set(part["key"]) == set(table["key"][table["quotes"].str.contains(rf"\b{item}\.")]) and len(part)
        assert_recorded(part, table[table["key"].isin(part["key"])])
    with pytest.raises(ValueError, match="tab99"):
        room.ledger("tab99", rows=rows)

def test_coverage_counts_every_printed_number_once():
    c = coverage()
    assert c["printed"].sum() == (~PRINTED.index.str.startswith("repo:")).sum()
    assert (c.loc[["tab1", "fig1", "sec4.2"], "share"] == 1).all()
    one = _by_id("tab1").set_index("id")
    held = pd.read_csv(ROOT / "results/paper/tab1.csv").query("protocol == 'paper'").set_index("id")
    assert (one["ours"] == held.loc[one.index, "ours_mean"]).all() and "C.4-06" in one.loc["tab1.002", "claims"]

def test_text_has_a_line_for_every_claim(table):
    text = ledger_text(table)
    assert len(text) == len(table) and (text["verdict"] != "").all()
    assert text.loc["4.2-05", "control"].startswith("yes: add7/moe-e4k1-h256-silu minus add7/ffn-h256-silu+ffnlr0.125")

@pytest.mark.parametrize("item, parts", [("fig15", {"fig15a_caption"}), ("fig1", {"fig1"}), ("tab4", {"tab4"}),
                                         ("fig4_left", {"fig4_left"})])
def test_an_item_means_its_printed_parts_and_never_another_item_that_begins_as_it_does(item, parts):
    got = set(paper.printed_items(item))
    assert parts <= got and all(i == item or i[len(item)] in "abcde_" for i in got)
    assert set(_by_id(item)["item"]) <= got

def test_a_claim_about_learners_reads_the_first_five_that_learned_and_waits_for_nobody_after():
    got = pd.Series([np.nan, 1, 2, np.nan, 3, 4, 5, 6], range(1, 9))
    class Asked(namedtuple("Asked", "seeds n")):
        def values(self, rows): return got.reindex(seed_list(self.seeds)), []
    assert first_learners(None, Asked("1-16", 5)).seeds == "1 2 3 4 5 6 7"
    assert first_learners(None, Asked("1-6", 5)).seeds == "1-6"                     # four learned: all are waited for
