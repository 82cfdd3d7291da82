"""Every printed number follows from its own line of `moe-redistribution rows`: worked out by plain pandas from the
files and columns that the line names, by code that knows nothing of claims."""
import io
import random
import re
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_ind

from moe_redistribution.evidence.selection import rows_of
from moe_redistribution.record.cli import main
from moe_redistribution.record.coverage import _in_lines, printed_rows

ROOT = Path(__file__).resolve().parent.parent
ITEMS = sorted(p.stem for p in (ROOT / "results/paper").glob("*.csv"))

@pytest.fixture(scope="module")
def said():
    "What `rows` says of every item, as the CSV has it: all text."
    whole = printed_rows(*ITEMS).to_csv(index=False)
    return pd.read_csv(io.StringIO(whole), dtype=str, keep_default_na=False)

@lru_cache(None)
def table(path, name): return pd.read_parquet(ROOT / path, filters=[("condition", "==", name)])

def seeds_of(text):
    lo, dash, hi = text.partition("-")
    return [*range(int(lo), int(hi) + 1)] if dash else [int(s) for s in text.split()]

def of_runs(line, name, path):
    "Seed → what a run has, by the columns that `how` names."
    runs = table(path, name)
    runs = runs[(runs["stream"] == line.stream) & runs["failed"].isna()].set_index("seed")
    reached = runs[f"{line.rule}_reached"].astype(float)
    return {"score": runs[f"{line.rule}_value"], "reached": reached,
            "epoch": runs[f"{line.rule}_step"].where(reached > 0)}[line.metric]

def of_rows(line, name, position, unit, files):
    "Seed → value of the rows that have in each column what the line says."
    task = name.partition("/")[0]
    path = next((f for f in files if f.endswith(f"{line.instrument}/{task}.parquet")), None)
    if line.instrument == "runs": return of_runs(line, name, path)
    call = re.search(rf'rows_of\("\S+", "{re.escape(name)}"\)', line.how)                     # of what needs no run
    rows = table(path, name) if path else eval(call[0], {"rows_of": rows_of})
    rule = "first99" if line.rule == "learned" else line.rule
    want = {c: getattr(line, c) for c in ("stream", "site", "edit", "stratum", "split")}
    want |= dict(condition=name, rule=rule, position=position, metric=line.metric.removeprefix("1 - "))
    for c, v in want.items(): rows = rows[rows[c] == v]
    found = rows[rows["unit"].fillna("").isin([unit] if unit else ["", "all", "none"])].set_index("seed")["value"]
    if line.rule == "learned":
        runs = table(next(f for f in files if f.endswith(f"runs/{task}.parquet")), name)
        runs = runs[(runs["stream"] == line.stream) & (runs["first99_value"] > .5)]
        found = found[found.index.isin(runs["seed"])]
    return 1 - found if line.metric.startswith("1 - ") else found

def side(line, names, files):
    "Seeds × cells."
    cells = product(names.split(), line.position.split(), line.unit.split() or [""])
    got = [of_rows(line, *cell, files) for cell in cells]
    assert all(x.index.is_unique for x in got), "two rows for one seed"
    return pd.concat(got, axis=1).reindex(seeds_of(line.seeds))

def worked_out(line):
    "ours, spread (None where `how` gives none of its own) and n from one line of `rows`."
    files = line.files.split()
    cells, how = side(line, line.condition, files), line.aggregate
    others = [side(line, n, files).mean(axis=1, skipna=False) for n in line.versus.split()]
    if line.scale == "log10": cells = np.log10(cells)
    x = cells.mean(axis=1, skipna=False)
    if how in ("lowest", "highest"):
        cells = cells.sub(others[0], axis=0) if others else cells
        means = cells.mean()
        x = cells.iloc[:, int(np.argmin(means) if how == "lowest" else np.argmax(means))]
    elif how == "difference": x = x - others[0]
    elif how == "welch_p": return ttest_ind(x.dropna(), others[0].dropna(), equal_var=False).pvalue, None, None
    elif how in ("ratio", "share"):
        a, b = (x, others[0]) if how == "ratio" else (x - others[1], others[0] - others[1])
        both = pd.concat([a, b], axis=1).dropna()
        return both.iloc[:, 0].mean() / both.iloc[:, 1].mean(), None, len(both)
    x = x.dropna()
    one = {"sum": x.sum, "median": x.median, "least": x.min, "most": x.max}.get(how, x.mean)()
    plain = how in ("mean", "difference", "lowest", "highest") and line.stream != "none"
    return 10 ** one if line.scale == "log10" else one, x.std() if plain else None, len(x)

def off(line):
    "In words what of a line does not follow from it; empty if all does."
    if line.aggregate == "null":
        from moe_redistribution.evidence.claims import baselines
        got = eval(re.search(r"baselines\(.*\]", line.how)[0], {"baselines": baselines}), None, None
    else: got = worked_out(line)
    want = [float(x) if x else np.nan for x in (line.ours, line.spread, line.n)]
    bad = [f"{what} {g} not {w}" for what, g, w in zip(("ours", "spread", "n"), got, want)
           if g is not None and not np.isclose(g, w, rtol=1e-7, atol=1e-9, equal_nan=True)]
    return f"{line.id} ({line.protocol}): {', '.join(bad)}" if bad else ""

def answered(said): return [r for r in said.itertuples(index=False) if r.ours]

def test_sixty_printed_numbers_follow_from_their_own_lines(said):
    lines = random.Random(20261129).sample(answered(said), 60)
    assert not [text for r in lines if (text := off(r))]

@pytest.mark.audit
def test_every_printed_number_follows_from_its_own_line(said):
    lines = answered(said)
    bad = [text for r in lines if (text := off(r))]
    print(f"\n{len(lines)} lines of {len({r.id for r in lines})} numbers worked out again, {len(bad)} not the same")
    assert len(lines) > 1300 and not bad, "\n".join(bad[:20])

@pytest.mark.parametrize("id, column, other", [
    ("tab8.017", "split", "all"), ("fig20.009", "unit", ""), ("fig26c.003", "seeds", "42"), ("tab13.075", "seeds", "1-15"),
    ("appD.2.003", "aggregate", "mean"), ("sec4.2.008", "aggregate", "difference"), ("fig4_left.013", "position", "o1"),
    ("tab12.021", "stratum", "count=2")])
def test_and_from_nothing_less(id, column, other, said):
    line = next(r for r in answered(said) if r.id == id and r.protocol == "paper")
    assert not off(line) and off(line._replace(**{column: other}))

def test_files_are_files_and_not_the_answer_itself(said):
    for r in answered(said):
        files = r.files.split()
        assert files and all((ROOT / f).is_file() and f.endswith((".parquet", ".py")) for f in files), (r.id, files)
        assert (ROOT / r.recorded).is_file() and r.recorded not in files
    drawn = printed_rows("fig9")
    assert len(drawn) > 1 and all((ROOT / f).is_file() for files in drawn["files"] for f in files.split())

def test_a_verdict_left_open_beside_the_printed_digits_says_why(said):
    lines = said[(said["verdict"] == "inconclusive") & (said["ours"] == said["paper"])]
    assert len(lines) > 5
    for r in lines.itertuples(): assert "which do not decide here: " in r.reason, r.id
    one, = said.loc[(said["id"] == "tab12.021") & (said["protocol"] == "paper"), "reason"]
    assert "rounding sends a mixture's tokens" in one
    assert not said.loc[said["verdict"] != "inconclusive", "reason"].str.contains("do not decide here").any()

def test_several_are_asked_for_at_once_and_each_shows_both_its_readings(capsys):
    assert main(["rows", "tab7.006", "fig12.006"]) == 0
    one, other = capsys.readouterr().out.split("\n\n")
    assert "tab7.006" in one and "  audited" not in one
    assert "fig12.006" in other and re.search(r"^verdict      agrees\n  audited    another measure$", other, re.M)
    assert main(["rows", "tab1", "tab7.006", "--csv"]) == 0
    table = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert table["id"].nunique() == 19 and table["protocol"].value_counts().to_dict().keys() == {"paper", "audited"}

@pytest.mark.parametrize("words, near", [
    (["rows", "tab7.006", "fig4.001"], "fig4_left.001"), (["rows", "fig22_bars.005"], "nearest: 'fig22_bars.00"),
    (["rows", "sec4.2.099"], "nearest: 'sec4.2.0"), (["rows", "003.S5.099"], "nearest: '003.S5.0"),
    (["rows", "tab99"], "tab9"), (["rows", "004.F_grid.9"], "004.F_grid.0"),
    (["ledger", "--item", "tab13.047"], "moe-redistribution rows tab13.047")])
def test_a_number_that_there_is_not_gets_those_near_it(words, near, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert not out and near in err and "expected" in err and "fix: " in err

@pytest.mark.parametrize("item, n", [("tab1", 18), ("fig4", 35)])
def test_the_ledger_of_an_item_as_records_has_its_numbers_and_with_a_word_the_claims(item, n, capsys):
    assert main(["ledger", "--item", item, "--csv"]) == 0
    table = pd.read_csv(io.StringIO(capsys.readouterr().out)).query("protocol == 'paper'")
    assert len(table) == n and {"id", "paper", "spread", "n", "verdict"} <= {*table} and table["ours"].notna().all()
    assert main(["ledger", "--item", "sec5", "--csv", "--claims"]) == 0
    assert list(pd.read_csv(io.StringIO(capsys.readouterr().out))["key"]) == ["5-01"]

def test_a_line_has_its_interval_and_what_the_paper_says_of_the_number():
    one, = printed_rows("appF.2.002").itertuples()
    assert one.lo < one.ours < one.hi and "PCs 0,1,3,4,5 minimum" in one.printed and one.paper_n == 5
    assert not {"versus", "baseline"} & {line.split()[0] for line in _in_lines(printed_rows("appF.2.002")).splitlines()}
