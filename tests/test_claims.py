"""A claim: its hash, what it reads, the values it gives, and that it is the one noun for both tables."""

import numpy as np
import pandas as pd
import pytest

from moe_redistribution.evidence.claims import (ASKS, CLAIM_COLUMNS, STATEMENT_COLUMNS, Claim, Reading, claims,
                                                each_name, readings_of, stand_in, statements)
from moe_redistribution.evidence.contrasts import MEASURE
from moe_redistribution.evidence.printed import study_tables
from moe_redistribution.evidence.table_files import ROOT
from moe_redistribution.evidence.registrations import definition_hash, registrations
from moe_redistribution.evidence import selection
from moe_redistribution.record import ledger as room
from moe_redistribution.record.counts import recorded_numbers

FFN, MOE = "add7/ffn-h256-silu", "add7/moe-e4k1-h256-silu"
TABLES = {"claims": Claim.of(claims()), "statements": Claim.of(statements())}
READING = Reading("ablation", "authors", MOE, "digits", "ffn_out", "zero", "first256", "", "o0-o3", "all", "all", "1-3")
CLAIM = Claim("made", "paper", **READING._asdict(), versus=FFN, aggregate="difference", margin=.05)

def made(condition, values, **other):
    labels = dict(instrument="ablation", stream="authors", rule="first256", split="all", site="ffn_out", edit="zero",
                  unit="", position="o0-o3", stratum="all", metric="digits") | other
    return pd.DataFrame(dict(condition=condition, seed=[1, 2, 3], value=values) | labels)

ROWS = pd.concat([made(MOE, [.5, .6, .7]), made(FFN, [.1, .2, np.nan])])

@pytest.mark.parametrize("table", TABLES)
def test_every_claim_has_the_hash_under_which_it_was_registered(table):
    "A printed number has no margin of its own: that which `claims` gives it follows from data/margins.csv."
    last = registrations().query("table == @table").set_index(["key", "protocol"])["hash"]
    for c in TABLES[table]:
        own = c if table == "statements" or c.key.startswith("contrast.") else c._replace(margin="")
        assert definition_hash(own._asdict()) == last[c.key, c.protocol], (c.key, c.protocol)
    assert len(TABLES[table]) == len(last) > 400

def test_the_columns_of_both_files_are_the_fields_of_a_claim():
    for name, columns in (("claims", CLAIM_COLUMNS), ("statements", STATEMENT_COLUMNS)):
        for path in study_tables(name): assert list(pd.read_csv(path, nrows=1)) == columns
        assert {*columns[1:], "key"} <= set(Claim._fields)
    assert set(Claim._fields) == {"key", "scale", *CLAIM_COLUMNS, *STATEMENT_COLUMNS} - {"id"}

def test_a_claim_names_reads_and_asks_the_same_whatever_order_its_conditions_stand_in():
    both = CLAIM._replace(condition=f"{MOE} {FFN}")
    assert both.question == CLAIM._replace(condition=f"{FFN} {MOE}").question != CLAIM.question
    assert CLAIM.question == CLAIM._replace(seeds="1 2 3").question != CLAIM._replace(seeds="1-4").question
    assert CLAIM.spot == CLAIM._replace(seeds="1-4").spot != CLAIM._replace(edit="mean").spot
    assert CLAIM._replace(versus=f"{FFN} site=attn_out value=.5").names == [MOE, FFN]

def test_readings_are_all_that_a_claim_reads_and_no_constant():
    c = CLAIM._replace(versus=f"{FFN} site=attn_out value=.5")
    assert [(r.condition, r.site) for r in c.readings] == [(MOE, "ffn_out"), (FFN, "ffn_out"), (MOE, "attn_out")]
    for how in ("none", "null", "quotes"): assert c._replace(aggregate=how).readings == []
    assert all(isinstance(r, Reading) and each_name(r.condition) for cs in TABLES.values() for c in cs
               for r in c.readings)

def test_only_a_reading_of_the_best_epoch_has_a_stand_in_and_one_of_a_study_has_none():
    best = READING._replace(condition="modadd/ffn-h512-gelu", rule="best")
    assert stand_in(READING) is None and stand_in(best).rule == "first99"
    assert stand_in(best._replace(condition="granularity.small/grid/8e4a")) is None

def test_a_percentage_is_refused_also_of_what_a_share_leaves():
    percent = CLAIM._replace(unit_factor=100, versus="", aggregate="mean", metric="1 - digits")
    negative = made(MOE, [-.5, .2, .3])                                     # 1 - x is 1.5, and a fraction all the same
    assert percent.values(negative)[0].tolist() == pytest.approx([1.5, .8, .7])
    with pytest.raises(ValueError, match="made .paper.: expected fractions; got values up to 70"):
        percent.values(ROWS.assign(value=100 * ROWS["value"]))

def test_a_line_that_no_row_answers_says_why():
    none = claims().query("aggregate == 'none'")
    assert len(none) > 30 and (none["note"] != "").all()

# --- one item reads its own cells -------------------------------------------------------------------

def test_the_ledger_of_an_item_reads_only_what_its_claims_and_their_families_name(monkeypatch):
    read, real = [], selection.rows_of
    monkeypatch.setattr(selection, "rows_of",
                        lambda i, names, **k: read.extend((i, n) for n in names) or real(i, names, **k))
    keys, said = room.ledger("tab1")["key"], statements()
    named = lambda f: {(r.instrument, n) for r in readings_of(f) for n in each_name(r.condition)}
    mine, every = named(said[said["key"].isin(keys)]), named(said)
    assert set(read) == mine < every and len(mine) * 10 < len(every)

@pytest.mark.parametrize("item", ["sec4.2", "004.F_grid"])
def test_an_item_says_what_the_whole_ledger_says_of_it(item):
    whole = pd.read_csv(ROOT / "results/ledger.csv").set_index("key")
    got = room.ledger(item)
    assert len(got) and got["verdict"].tolist() == whole.loc[got["key"], "verdict"].tolist()
    assert got["note"].tolist() == whole.loc[got["key"], "note"].fillna("").tolist()

def test_a_run_that_other_instruments_have_is_not_called_missing_by_an_item_that_does_not_read_them(monkeypatch):
    real = selection.rows_of
    monkeypatch.setattr(selection, "rows_of",
                        lambda i, names, **k: real(i, names, **k).iloc[:0 if i == "ablation" else None])
    notes = room.ledger("tab1")["note"]
    assert len(notes) and notes.str.contains("not measured: digits of").all()
    assert not notes.str.replace(r"missing run: block\.[^;]*", "", regex=True).str.contains("missing run").any()

def test_an_audited_number_says_another_measure_where_its_line_reads_something_else_than_the_paper_s_and_only_there():
    """So none says that it agrees with a print of another quantity, or differs from it.

    Seeds and their stream are draws of one quantity, and several instruments may write it."""
    lines = {p: {c.key: c for c in TABLES["claims"] if c.protocol == p} for p in ("paper", "audited")}
    what = [f for f in ASKS if f not in ("instrument", "stream")]
    numbers = recorded_numbers(protocol="audited").dropna(subset="ours_mean")
    for r in numbers.itertuples():
        own, theirs = (lines[p][r.id] for p in ("audited", "paper"))
        other = [f for f in what if getattr(own, f) != getattr(theirs, f)]
        assert (r.verdict == MEASURE) == bool(other), (r.id, r.verdict, other)
        assert all(f"{f} {getattr(own, f)} where" in r.reason for f in other), r.id
    assert len(numbers) > 200
