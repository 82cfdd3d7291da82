"""What a page of part 3 stands on: the rows its claims need, the runs nobody has trained, and an answer to every
printed number."""
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moe_redistribution.evidence import contrasts as answers, table_files, selection, printed as paper
from moe_redistribution.report import pages
from moe_redistribution.evidence.claims import PROTOCOLS, claims
from moe_redistribution.report.recorded_claims import deciding, recorded_ledger
from moe_redistribution.models.condition import RECIPES, condition
from moe_redistribution.tasks.data import SEEDS
from moe_redistribution.studies.sparsity_moves.facts import _fact_rows
from moe_redistribution.training.orders import expected_seconds
from moe_redistribution.studies.sparsity_moves.experiments import conditions_for
from moe_redistribution.report.pages import Page, missing_runs, page_hash, _stands_on, _stored_pages

PRINTED, BRIDGE = paper.paper_values(), claims()
PAGES = {Path(p).stem: page for p, (page, _) in _stored_pages().items() if p.startswith("10_studies/")}
TEXT = [page for page in PAGES if PAGES[page].items]
FFN, MOE = "add7/ffn-h256-silu", "add7/moe-e4k1-h256-silu"

@pytest.fixture(autouse=True)
def files_read_once(monkeypatch):
    monkeypatch.setattr(answers, "paper_values", lambda: PRINTED)
    monkeypatch.setattr(answers, "claims", lambda: BRIDGE)
    monkeypatch.setattr(selection, "claims", lambda: BRIDGE)

def trained(name, stream="authors"):
    """Seeds of a condition that a file of runs has, trained to the task's first rule or to the end; counted without
    `results`."""
    runs = pd.read_parquet(table_files.ROOT / f"results/runs/{name.split('/')[0]}.parquet").query("condition == @name")
    first = (runs[{"add7": "first256", "modadd": "first99", "hist": "best"}[name.split("/")[0]] + "_reached"]
             .astype(bool))
    done = first | runs["settled"] | runs["failed"].notna() | (runs["step"] >= RECIPES[name.split("/")[0]]["steps"])
    return set(runs.loc[done & (runs["stream"] == stream), "seed"])

PRICED = re.compile(r"missing run: (\S+), seeds ([\d, ]+)(?: and \d+ more)?, about (\S+) core-hours")

def without(line):
    """Why a line has no number, if it says so in a way that a reader can act on: a run with its price, or that none can
    be had."""
    c = BRIDGE[(BRIDGE["id"] == line.id) & (BRIDGE["protocol"] == "paper")].iloc[0]
    if c["aggregate"] == "none": return len(c["note"]) > 15 and c["note"] in line.reason
    if found := PRICED.findall(line.reason):
        return all(float(hours) > 0 and condition(name).name == name for name, _, hours in found)
    arm = r"missing run: \w+\.\w+/\S+, seeds [\d, ]+, made by moe-redistribution study \w+ --preset \w+"
    return bool(re.search(arm, line.reason))

def answered(page):
    """Every line of a page under the paper's protocol: as recorded, or computed where the record is older than the
    bridge."""
    out, rows = [], None
    for item in PAGES[page].items.split():
        path = table_files.ROOT / f"results/paper/{item}.csv"
        got = pd.read_csv(path).fillna({"reason": ""}).query("protocol == 'paper'") if path.exists() else None
        if got is None or silent(got):
            rows = quick(PAGES[page].rows) if rows is None else rows
            got = answers.compare(rows, item)
        out.append(got)
    return pd.concat(out, ignore_index=True)

def silent(compared):
    return [line.id for line in compared.itertuples() if not (np.isfinite(line.ours_mean) or without(line))]

def quick(rows):
    "The same rows, faster to select from: text as categories."
    rows = rows.astype({"value": float})                 # an object where rows of runs are among them
    texts = [c for c in rows if not pd.api.types.is_numeric_dtype(rows[c])]
    return rows.assign(**{c: rows[c].astype("category") for c in texts})

# --- every printed number ---------------------------------------------------------------------------

@pytest.fixture(scope="module")
def lines():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "paper_values", lambda: PRINTED)
        patch.setattr(answers, "claims", lambda: BRIDGE)
        return {page: answered(page) for page in TEXT}

@pytest.mark.parametrize("page", TEXT)
def test_every_printed_number_has_a_line_and_a_line_a_number_or_a_reason(lines, page):
    """Of each page 95 %: a number, or the run that is missing with its price, or why there can be none.

    And a verdict by rule."""
    mine = lines[page]
    ids = PRINTED.loc[PRINTED["item"].isin(PAGES[page].items.split()), "id"]
    assert sorted(mine["id"]) == sorted(ids)
    assert len(silent(mine)) <= .05 * len(mine), silent(mine)
    assert set(mine["verdict"]) <= {"agrees", "differs", "inconclusive", "corrected", "not attempted", answers.OTHER}
    assert (mine["reason"].str.len() > 0).all() and not mine["reason"].str.contains("no row in a claims.csv").any()
    empty = mine["ours_mean"].isna() & (mine["verdict"] != "not attempted")
    assert not empty.any(), mine.loc[empty, "id"].tolist()

@pytest.mark.parametrize("page", TEXT)
def test_a_run_called_missing_is_not_there(lines, page):
    for line in lines[page].itertuples():
        for name, seeds, hours in PRICED.findall(line.reason):
            assert not {int(s) for s in seeds.split(",")} & trained(name), (line.id, name)
            steps = {"add7": 700, "modadd": 20_000, "hist": 1_000}[name.split("/")[0]]
            full = expected_seconds(name, steps * len(seeds.split(","))) / 3600
            assert .3 * full < float(hours) < 3.1 * full, line.id                # a slow learning rate takes longer

def test_no_trained_run_of_the_paper_s_lacks_a_measurement_that_the_text_needs(lines):
    """The sentence that `compare` makes of a gap, not the note of a line that says why there is no such measurement;
    what is read at another checkpoint says so in its verdict."""
    gap = re.compile(r"not measured: \S+ of (\S+/\S+) at (\w+), [^;]* seeds ([\d, ]+)")
    found = [(line.id, *m) for mine in lines.values() for line in mine.itertuples() if line.verdict != answers.OTHER
             for m in gap.findall(line.reason)]
    def stopped_early(name, rule, seeds):
        runs = table_files.read_table("runs", name, ["authors"]).set_index("seed")
        own = runs.loc[[int(s) for s in seeds.split(",") if s.strip()]]
        return (rule in ("best", "final") and not own["settled"].any()
                and (own["step"] < RECIPES[name.split("/")[0]]["steps"]).all())
    gaps = [f for f in found if not stopped_early(*f[1:])]
    assert not gaps, gaps

# --- what a page needs ------------------------------------------------------------------------------

def test_a_page_needs_what_its_claims_name_and_then_its_own_list(monkeypatch):
    claim = lambda i, protocol, **k: dict(id=i, item=i.split(".")[0], protocol=protocol, versus="", stream="authors",
                                          aggregate="mean") | k
    monkeypatch.setattr(selection, "claims", lambda: pd.DataFrame([
        claim("one.1", "paper", instrument="ablation", condition=f"{MOE} {FFN}"),
        claim("one.2", "audited", instrument="patching", condition=MOE, versus=f"{FFN} {MOE}+frozen"),
        claim("one.3", "paper", instrument="none", condition=FFN, aggregate="none"),
        claim("one.4", "paper", instrument="ablation", condition="add7/ffn-h64-silu", aggregate="null"),
        claim("two.1", "paper", instrument="probes", condition=FFN)]))
    made = Page("one", ablation=[FFN, "add7/ffn-h64-silu"])
    own = [("ablation", MOE), ("ablation", FFN), ("patching", MOE), ("patching", FFN), ("patching", MOE + "+frozen")]
    assert made.own == own and made.needs == [*own, ("ablation", "add7/ffn-h64-silu")]
    with pytest.raises(ValueError, match="nearest: 'one'"): Page("onee")

@pytest.mark.parametrize("page", ["9c1_norm", "9c4_ablation", "51_replicates", "30_setup", "43_glu"])
def test_the_rows_of_a_page_are_those_of_its_files_and_their_instrument_is_named(page):
    rows, need = PAGES[page].rows, PAGES[page].needs
    assert not rows.duplicated([c for c in rows if c not in ("value", "n_examples", "step")]).any()
    size, lines = rows.groupby(["instrument", "condition"]).size(), table_files.manifest()
    lines = lines[lines["stream"].isin(PAGES[page].streams)].groupby(["kind", "condition"])["rows"].sum()
    for instrument, name in need:
        if instrument not in ("facts", "runs"):
            assert size.get((instrument, name), 0) == lines.get((instrument, name), 0), (instrument, name)
    assert (set(zip(rows["instrument"], rows["condition"])) <= set(need)
            and set(rows["stream"]) <= set(PAGES[page].streams))
    for name in {n for i, n in need if i == "facts"}: assert size["facts", name] == len(_fact_rows(name))
    again = Page(**PAGES[page].wish)
    assert table_files.fingerprint(again.rows) == table_files.fingerprint(rows)
    assert page_hash(again) == page_hash(PAGES[page])

def test_a_page_without_any_recorded_run_has_no_rows_and_all_the_columns(tmp_path):
    none, some = Page(**PAGES["9c4_ablation"].wish, root=tmp_path).rows, PAGES["9c4_ablation"].rows
    assert none.empty and list(none.columns) == list(some.columns)
    assert (answers.compare(none, "fig12")["verdict"] == "not attempted").all()

# --- runs -------------------------------------------------------------------------------------------

def runs(**columns):
    "Invented lines of results/runs: four seeds of modular addition."
    base = dict(condition="modadd/ffn-h512-gelu", stream="authors", seed=[42, 137, 256, 512],
                step=[9000, 8000, 40_000, 3000], settled=[True, False, False, False],
                failed=pd.array([None] * 4, dtype="Int64"), first99_reached=[True, True, False, False],
                first99_step=[7600, 5000, 20_000, 3000], first99_value=.5, best_reached=[True, False, False, False],
                best_step=[9000, 8000, 30_000, 3000], best_value=.9)
    return pd.DataFrame(base | columns)

def said(rows, metric, rule="first99"):
    return rows[(rows["metric"] == metric) & (rows["rule"] == rule)].set_index("seed")["value"]

def test_a_run_says_whether_and_when_it_reached_a_rule_and_not_when_it_did_not():
    rows = selection.run_rows(runs())
    assert said(rows, "reached").loc[[42, 137]].tolist() == [1, 1] and said(rows, "reached", "best").loc[42] == 1
    assert (said(rows, "epoch").loc[[42, 137]].tolist() == [7600, 5000]
            and (said(rows, "score").loc[[42, 137]] == .5).all())
    assert 137 not in said(rows, "reached", "best").index, "it stopped at its first rule and says nothing of the other"
    assert 512 not in said(rows, "reached").index, "on its way, so that nothing is known yet"
    assert set(rows["condition"]) == {"modadd/ffn-h512-gelu"} and set(rows["rule"]) == {"first99", "best"}
    failed = selection.run_rows(runs(failed=pd.array([100, None, None, None], dtype="Int64")))
    assert 42 not in said(failed, "reached").index and 137 in said(failed, "reached").index

def test_a_run_that_ended_without_reaching_a_rule_counts_as_one_that_did_not():
    "`3 of 5 grok` is a count over five finished runs, two of which never settle."
    rows = selection.run_rows(runs())
    assert said(rows, "reached").to_dict() == {42: 1, 137: 1, 256: 0} and np.isnan(said(rows, "epoch").loc[256])
    assert said(rows, "epoch_restricted").to_dict() == {42: 7600, 137: 5000,
                                                        256: 40_000}, "restricted to the end of the schedule"

def test_missing_runs_are_the_paper_s_seeds_that_no_file_has(monkeypatch):
    have = {("modadd/glu-h512-gelu", "authors"): {42, 1024}, ("modadd/moe_glu-e4k1-h512-gelu", "paired"): set(SEEDS)}
    monkeypatch.setattr(pages, "far_enough", lambda: {"first": have, "selected": {}, "full": {}})
    left = missing_runs(PAGES["9b_methods"]).set_index("condition")
    assert left["seeds"].to_dict() == {"modadd/glu-h512-gelu": 3, "modadd/moe_glu-e4k1-h512-gelu": 5}
    for name, line in left.iterrows():
        assert line["hours"] == pytest.approx(expected_seconds(name, 20_000 * line["seeds"]) / 3600, abs=.06)
    assert missing_runs(PAGES["30_setup"]).empty, "facts need no run"
    drawn = set(missing_runs(PAGES["9c1_norm"])["condition"])
    asked = {n for _, n in PAGES["9c1_norm"].own}
    assert (drawn == asked | set(conditions_for("fig6"))), "a figure that prints no number needs its runs all the same"

@pytest.mark.parametrize("page", ["9b_methods", "43_glu", "9c4_ablation", "30_setup"])
def test_the_sentence_that_opens_a_page_says_what_is_there_and_what_is_not(page):
    rows, text = PAGES[page].rows, _stands_on(PAGES[page])
    if len(rows):
        assert text.startswith(f"This page stands on {len(rows):,} rows with hash `{page_hash(PAGES[page])}`")
    else:
        assert text.startswith("None of this page's runs is recorded.") and "hash" not in text
    wanted = {n for i, n in PAGES[page].own if i != "facts"}
    missing = {n: len(set(SEEDS) - trained(n)) for n in wanted if set(SEEDS) - trained(n)}
    assert ("still missing" in text) == bool(missing)
    if missing:
        assert f"{sum(missing.values())} runs of {len(missing)} conditions are still missing" in text
        names = re.search(r"`moe-redistribution train (.*) --until first`", text)[1].split()
        assert set(names) == set(missing) and re.search(r"about \d+ core-hours", text)
    n = len(rows[rows["stream"] != "none"].drop_duplicates(["condition", "stream", "seed"]))
    assert (f"made by `make record` from {n:,} runs." in text) if n else ("made by" not in text)

def test_a_comparison_holds_the_paper_s_lines_and_then_the_audit_s():
    rows = quick(PAGES["9c4_ablation"].rows)
    both = answers.comparison(rows, "fig12")
    assert list(both["protocol"]) == ["paper"] * 12 + ["audited"] * 12 and list(both) == answers.COMPARE_COLUMNS
    only = answers.comparison(PAGES["30_setup"].rows, "tab2")
    assert set(only["protocol"]) == {"paper"} and len(only) == 24

def test_the_copy_of_a_page_that_is_being_run_is_no_page(tmp_path):
    (tmp_path / "nbs").mkdir()
    for name in ("setup.ipynb", "_setup.ipynb"):
        source = pages.ROOT / "nbs/10_studies/sparsity_moves/30_setup.ipynb"
        (tmp_path / "nbs" / name).write_bytes(source.read_bytes())
    assert [*pages._stored_pages(tmp_path)] == ["setup.ipynb"]

def test_a_verdict_that_a_page_shows_is_the_ledger_s():
    """Pages that name no file of the ledger show verdicts, too, and a new record leaves them as they were run."""
    recorded = pd.read_csv(table_files.ROOT / "results/ledger.csv", index_col="key")["verdict"]
    words, shown = {*recorded}, {}
    for path in sorted((table_files.ROOT / "nbs").rglob("*.ipynb")):
        for word, key in re.findall(r"\[([^\]\[]+)\]\([^)\s]*ledger\.md#([\w.-]+)\)", path.read_text(encoding="utf-8")):
            if word in words: shown[path.name, key, word] = recorded[key]
    assert len(shown) > 100 and {where: now for where, now in shown.items() if where[2] != now} == {}

# --- word and number of one reading -----------------------------------------------------------------

INTERVAL = re.compile(r"([+−-]?[\d.,]*\d)[^\[\]\d]{0,22}\[([+−-]?[\d.,]+), ([+−-]?[\d.,]+)\]")
def plain(text): return text.replace("−", "-").replace("+", "").replace(",", "")

def spelled(i):
    "An interval as pages write it: in shares or points, of either sign, with any digits."
    bounds = [(scale * i[0], *sorted((scale * i[1], scale * i[2]))) for scale in (1, 100, -1, -100)]
    return {tuple(f"{round(v, digits) + 0:.{digits}f}" for v in each) for each in bounds for digits in range(4)}

def other_readings(line, book):
    """(key, reading) of each claim that a line links to whose interval there is of another reading than the one that
    decides it, and of that one none."""
    found = {tuple(map(plain, m.groups())) for m in INTERVAL.finditer(re.sub(r"<[^>]+>", "", line))}
    for c in (book[k] for k in {*re.findall(r"(?:ledger\.md|claims\.ipynb)#([\w.-]+)", line)} if k in book):
        d = deciding(c)
        own = spelled(d.interval) if d.interval.lo < d.interval.hi else set()
        if not own or found & own: continue
        for r in PROTOCOLS:
            if getattr(c, f"{r}_n") > 0 and any(len(re.sub(r"\D", "", "".join(x))) > 3 for x in found & (
                    spelled([getattr(c, f"{r}_{f}") for f in ("mean", "lo", "hi")]) - own)): yield c.key, r

def test_no_page_sets_the_number_of_another_reading_beside_a_verdict():
    "Front page and notes had 64 old seeds beside a word of 128 new ones; another reading may stand there, too, but not alone."
    book, said, found = {c.key: c for c in recorded_ledger().itertuples()}, 0, {}
    for path in pages.page_paths():
        for text in told(path):
            for line in re.split(r"\n|</tr>", text):
                said += "ledger.md#" in line
                if hit := [*other_readings(line, book)]: found.setdefault(path.name, []).extend(hit)
    assert said > 200 and not found, found

def told(path):
    "Every text that a notebook shows: its Markdown, and outputs that are Markdown or HTML."
    for c in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if c["cell_type"] == "markdown": yield "".join(c["source"])
        for d in (o.get("data", {}) for o in c.get("outputs", [])):
            if text := d.get("text/markdown") or d.get("text/html"): yield "".join(text)

def test_a_number_of_another_reading_alone_is_found_and_beside_the_deciding_one_is_not():
    c = next(c for c in recorded_ledger().itertuples() if c.key == "abs-01")
    own, other = f"{deciding(c).interval:points}", f"{100 * c.uncopied_mean:.0f} points [{100 * c.uncopied_lo:.0f}, {100 * c.uncopied_hi:.0f}]"
    line = "A mixture keeps {} more ([holds](../results/ledger.md#abs-01))."
    assert [[*other_readings(line.format(x), {"abs-01": c})] for x in (other, own, f"{other}; {own}")] == [[("abs-01", "uncopied")], [], []]
