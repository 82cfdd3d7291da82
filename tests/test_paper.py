"""The two files, and that they belong together: what the paper prints, and which of our rows answer it."""
import hashlib
import os
import re
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fresh import python
from moe_redistribution.evidence import printed as paper
from moe_redistribution.evidence.claims import AGGREGATES, claims, paper_items, seed_list, statements
from moe_redistribution.evidence.registrations import _definitions, _have_pilots
from moe_redistribution.tasks.data import SEEDS
from moe_redistribution.studies.sparsity_moves.arms import TABLE1
from moe_redistribution.models.condition import condition
from moe_redistribution.instruments.instrument import instruments
from moe_redistribution.report.pages import _stored_pages
from moe_redistribution.tasks.task import get_task, spans
from moe_redistribution.training.loop import TASK_RULES

MAIN_TEXT = [item for p, (page, _) in _stored_pages().items() if p.startswith("10_studies/sparsity_moves/")
             for item in page.items.split()]

def main_paper(frame):
    "Without the companions' items: 004 …, and the contrasts of their studies."
    studies = {p.parent.name.partition("_")[0] for p in paper.study_tables("claims")} - {"sparsity"}
    others = f"^0|^contrast_(?:{'|'.join(sorted(studies))})"
    return frame[~frame["item"].str.contains(others)]
def own(bridge): return bridge["item"].str.startswith("contrast")          # questions that the paper does not ask

@pytest.fixture(scope="module")
def printed():
    return main_paper(paper.paper_values()).set_index("id")

@pytest.fixture(scope="module")
def bridge():
    return main_paper(claims())

# --- what the paper prints ------------------------------------------------------------------------

def test_every_printed_number_loads_and_is_a_fraction():
    df = paper.paper_values()
    assert len(df) and df["id"].is_unique and list(df)[:len(paper.PAPER_COLUMNS)] == paper.PAPER_COLUMNS
    percent = df["unit"].isin(["percent", "pp"])
    assert (df.loc[percent, "value"] == df.loc[percent, "mean"] / 100).all()
    assert df.loc[percent, "value"].abs().max() <= 1
    assert df.loc[~percent, "value"].equals(df.loc[~percent, "mean"])

@pytest.mark.parametrize("spoil", [lambda b: b.replace(b"44.3", b"45.3", 1), lambda b: b[:-40], lambda b: b + b"\n",
                                   lambda b: b""], ids=["changed", "truncated", "appended", "empty"])
def test_changed_paper_values_are_refused(tmp_path, spoil):
    copy = shutil.copytree(paper.DATA, tmp_path / "data") / "sparsity_moves/values.csv"
    assert paper.paper_values(copy).equals(main_paper(paper.paper_values()))
    copy.write_bytes(spoil(copy.read_bytes()))
    with pytest.raises(ValueError, match="expected sha256 .* got .* nearest valid: .* fix: git checkout"):
        paper.paper_values(copy)

def test_the_digit_of_every_print_is_its_last_place_and_an_approximate_number_has_none(printed):
    """Read from the text of the files, where 12.0 and 12 differ, and 4e-06 is no whole number; a bar read off a picture
    is as fine as the eye."""
    values, text = paper.paper_values().set_index("id"), paper.study_lines("values").set_index("id")["mean"]
    for i, row in values[values["mean"].notna()].iterrows():
        about, picture = row["note"].lower().startswith("approx"), "read-off" in row["note"]
        digits, power = re.fullmatch(r"-?\d+(?:\.(\d+))?(?:e([-+]?\d+))?", text[i]).groups("")
        want = Fraction(10) ** (int(power or 0) - len(digits)) / paper.SCALE[row["unit"]]
        assert row["digit"] == (paper.READ_OFF if picture else 0 if about else float(want)), i
    assert text.str.contains("e-").sum() > 10 and values["digit"].notna().equals(values["mean"].notna())
    assert (printed.loc["tab1.009", "digit"] == pytest.approx(.001)
            and printed.loc["appA.001", "digit"] == 1)  # 44.3 %, 1000
    shares = printed[printed["item"].isin(MAIN_TEXT) & printed["unit"].isin(["fraction", "percent", "pp"])
                     & printed["mean"].notna()]
    shares = shares[~shares["metric"].str.contains("ratio")]                    # 4 times the parameters is no share
    assert shares["digit"].max() < .05, "rounding must not swallow a whole verdict"

# --- a folder for each study ----------------------------------------------------------------------

@pytest.fixture
def newcomer(tmp_path, monkeypatch):
    "The tables of a study of paper 003 that nobody has heard of, beside those of all others."
    shutil.copytree(paper.DATA, tmp_path / "data")
    (folder := tmp_path / "data/newcomer").mkdir()
    said = dict(paper="paper,title\n003,Routing absorption\n",
                pilots="begins,seeds,seen,where\n003-N1,,one seed,a note\n",
                values=",".join(paper.PAPER_COLUMNS) + "\n003.Table99.001,003.Table99,,,,accuracy,50,,3,percent,\n")
    for name, text in said.items(): (folder / f"{name}.csv").write_text(text)
    (folder / "SHA256SUMS").write_text(f"{hashlib.sha256(said['values'].encode()).hexdigest()}  values.csv\n")
    for name, key in (("claims", "id"), ("statements", "key")):
        lines = paper.study_lines(name, tmp_path / "data")[-2:]
        lines.assign(**{key: lines[key] + ".new"}).to_csv(folder / f"{name}.csv", index=False)
    monkeypatch.setattr(paper, "DATA", tmp_path / "data")
    return folder

def test_a_study_that_brings_its_folder_is_read_and_no_room_is_touched(newcomer):
    assert paper.paper_values().set_index("id").loc["003.Table99.001", "value"] == .5
    assert claims()["id"].str.endswith(".new").sum() == 2 == statements()["key"].str.endswith(".new").sum()
    assert _have_pilots(["003-N1"]).all() and _definitions()["key"].str.endswith(".new").sum() >= 4
    assert paper.papers()["003"] == "Routing absorption" and len(paper.papers()) == 5

def test_studies_stand_by_the_number_of_their_paper_and_one_of_no_paper_is_last(newcomer):
    names = [p.parent.name for p in paper.study_tables("claims")]
    assert names == ["sparsity_moves", "block", "head_loss", "language_models", "recipes", "routers", "standing_routes",
                     "tuned_routers", "routing_scores", "parrots", "parrots_rule", "absorption", "newcomer", "absorption_ffn",
                     "granularity"]
    (newcomer / "paper.csv").unlink()
    assert [p.parent.name for p in paper.study_tables("claims")][-1] == "newcomer"

@pytest.mark.parametrize("table, read", [("claims", claims), ("statements", statements),
                                         ("values", paper.paper_values)])
def test_an_id_that_two_studies_have_is_refused(newcomer, table, read):
    lines = paper.study_lines(table)[:1]
    lines.to_csv(newcomer / f"{table}.csv", index=False)
    digest = hashlib.sha256((newcomer / "values.csv").read_bytes()).hexdigest()
    (newcomer / "SHA256SUMS").write_text(f"{digest}  values.csv\n")
    with pytest.raises(ValueError, match=f"over all studies; got .*{lines.iloc[0, 0]}.*fix: rename one"): read()

# --- the bridge -----------------------------------------------------------------------------------

def test_claims_answer_every_id_of_table_1_and_figure_1(bridge):
    printed = paper.paper_values()
    for protocol in ("paper", "audited"):
        mine = bridge[bridge["protocol"] == protocol]
        for item, n in (("tab1", 18), ("fig1", 9)):
            ids = printed.loc[printed["item"] == item, "id"]
            assert len(ids) == n and set(ids) == set(mine.loc[mine["item"] == item, "id"])
    fixed = bridge[bridge["item"] == "contrast"]
    assert (fixed["n"] == fixed["edit"].map({"mean": 64, "zero": 128})).all() and (fixed["rule"] == "first1000").all()
    assert fixed["id"].str.startswith("contrast.").all() and fixed.groupby("edit").size().nunique() == 1

def test_every_printed_id_has_one_claim_under_the_paper_s_protocol(bridge, printed):
    for item in (i for i in paper_items() if i in set(bridge["item"])):
        mine = bridge[(bridge["item"] == item) & (bridge["protocol"] == "paper")]
        assert sorted(mine["id"]) == sorted(printed.index[printed["item"] == item]) and len(mine), item
        audited = bridge[(bridge["item"] == item) & (bridge["protocol"] == "audited")]
        assert set(audited["id"]) <= set(mine["id"]), item

def test_every_item_of_the_paper_is_bridged_and_stands_on_one_page(bridge, printed):
    mine = bridge[~own(bridge)]
    assert len(MAIN_TEXT) == len(set(MAIN_TEXT)) and set(MAIN_TEXT) == set(mine["item"])
    assert set(mine["item"]) == {i for i in printed["item"] if not i.startswith("repo:")}
    assert (mine["item"] == mine["id"].map(printed["item"])).all()

def test_contrasts_of_our_own_have_a_margin_seeds_and_new_seeds_fixed_beforehand(bridge):
    """Every family: five points, the audit's stream (histogram's: the paper's five seeds), and one kind of question for
    each id, which no printed number has."""
    mine, count = bridge[own(bridge)], bridge[bridge["item"] == "contrast_count"]
    assert ((count["stream"] == "authors").all() and (count["rule"] == "best").all() and (count["n"] == 5).all()
            and (count["margin"] == .05).all())
    assert not count.duplicated(["condition", "versus", "metric"]).any()
    mine = mine.drop(count.index)
    assert ((mine["margin"] == .05).all() and set(mine["aggregate"]) == {"difference", "equivalence"}
            and mine["id"].is_unique)
    assert (set(mine["stream"]) == {"paired"} and set(mine["protocol"]) == {"audited"}
            and set(mine["rule"]) <= {"first1000", "final"})
    assert not mine["id"].isin(paper.paper_values()["id"]).any() and mine["id"].str.startswith("contrast.").all()
    assert ((mine["condition"] != mine["versus"]).all()
            and not mine.duplicated(["item", "condition", "versus", "edit"]).any())
    assert set(mine["seeds"]) <= {"1-32", "1-64", "1-128", "33-128", "65-128", "129-160", "129-192"}
    assert (mine["n"] == mine["seeds"].map(lambda s: len(seed_list(s)))).all()

def test_the_paper_s_protocol_reads_its_own_seeds_at_its_own_checkpoint(bridge):
    measured = bridge[(bridge["protocol"] == "paper") & ~bridge["instrument"].isin(["none", "facts"])]
    task, late = (measured["condition"].str.partition("/")[0],
                  measured["item"].isin(["tab7", "tab8", "fig23_caption", "fig23b", "fig24_right"]))
    late |= measured["id"] == "appD.2.010"                                                  # where the failed seed ends
    # Figures 5, 21, 22, Tables 5, 6
    structure = (task == "modadd") & measured["instrument"].isin(["fourier", "bilinear", "probes"])
    rules = task.map({"add7": "first256", "modadd": "first99", "hist": "best"}).mask(structure, "best")
    assert structure.sum() > 50 and (measured["rule"] == rules)[~late].all()
    # "epoch of the best accuracy"
    assert set(measured.loc[late & (task == "modadd"), "rule"]) <= {"best", "first99", "final"}
    assert set(measured.loc[measured["item"] == "tab8", "rule"]) == {"final"}          # as the authors' script reads it
    seeds = measured["seeds"].map(seed_list).map(set)
    twenty = {*SEEDS, *range(1, 16)}                                                             # of App. D.1
    assert ((measured["stream"] == "authors").all()
            and all(s == set(SEEDS) or s == twenty or len(s) == 1 and s < set(SEEDS) for s in seeds))
    facts = bridge[bridge["instrument"] == "facts"]
    assert set(zip(facts["stream"], facts["rule"], facts["seeds"], facts["n"])) == {("none", "none", "0", 1.0)}

def test_a_margin_follows_from_the_quantity_and_from_what_is_printed(bridge, printed):
    """A fifth of a printed share, five points at most; a fifth of printed epochs; nothing for counts and facts, or half
    a digit where they are rounded."""
    for c in bridge[~own(bridge)].itertuples():
        p, share = printed.loc[c.id], printed.loc[c.id, "value"]
        rounded = p["unit"] in ("percent", "fraction") or c.metric == "train_pct"
        if c.instrument == "facts": assert c.margin == pytest.approx(p["digit"] / 2 * rounded), c.id
        elif c.aggregate == "ratio" or p["unit"] == "epochs": assert c.margin == pytest.approx(.2 * p["mean"]), c.id
        elif p["unit"] == "count": assert c.margin == 0 and c.aggregate in ("sum", "none"), c.id
        elif np.isnan(share): assert c.margin <= .05, c.id
        else:
            assert c.margin <= .05 and c.margin <= max(.5 * abs(share), p["digit"],
                                                       .01 * (p["unit"] == "pp")) + 1e-12, c.id

def test_no_margin_swallows_a_small_quantity(bridge, printed):
    """Within five points of 2.6 % lies nothing at all; so where less than a tenth is printed the margin is less than a
    half of it."""
    small = bridge[~own(bridge) & bridge["id"].map(printed["unit"]).isin(["percent", "fraction"])
                   & (bridge["instrument"] != "facts")]
    value, digit = (small["id"].map(printed[c]).abs() for c in ("value", "digit"))
    tiny = (value > 0) & (value < .1)
    assert tiny.sum() > 30 and (small["margin"][tiny] <= np.maximum(.5 * value, digit)[tiny] + 1e-12).all()

def test_a_printed_number_has_no_margin_of_its_own_in_the_bridge():
    raw = paper.study_lines("claims")
    assert (raw.loc[~raw["id"].str.startswith("contrast."), "margin"] == "").all()

def test_every_claim_asks_for_something_that_can_exist(bridge):
    for c in bridge.itertuples():
        assert c.instrument in {*instruments(), "runs", "facts", "none"}, c.id
        assert ((c.instrument == "none") == (c.aggregate == "none")
                and (c.note or c.aggregate not in ("none", "null"))), c.id
        if c.aggregate == "none": continue
        names = f"{c.condition} {c.versus}".split()
        task = get_task(condition(names[0]).task)
        assert {condition(n).name for n in names} == set(names), c.id
        assert c.instrument == "facts" or {condition(n).task for n in names} == {task.name}, c.id
        # the last two: groups of App. C.2.1
        assert set(c.position.split()) <= {*spans(task), "all", "o1-o2", "o1-o3"}, c.id
        assert c.rule == "none" or c.rule in {*TASK_RULES[task.name], "final", "learned"}, c.id
        # as the ledger asks where structure is
        assert c.rule != "learned" or (c.protocol, task.name) == ("audited", "modadd"), c.id
        others = {"difference": 1, "ratio": 1, "welch_p": 1, "equivalence": 1, "share": 2}.get(c.aggregate, 0)
        assert len(c.versus.split()) == others, c.id
        cells = len(c.condition.split()) * len(c.position.split()) * max(1, len(c.unit.split()))
        assert ((cells > 1) if c.aggregate in ("lowest", "highest")
                else (cells == 1 or c.aggregate == "mean" or c.item.startswith("contrast"))), c.id
        assert c.metric and c.metric == c.metric.strip() and c.site and c.edit, c.id

@pytest.mark.parametrize("column, value",
                         [("id", "tab1.999"), ("unit_factor", "1"), ("n", "6"), ("aggregate", "mode"),
                          ("protocol", "papers"), ("margin", ".05"), ("stream", "author"), ("seeds", "1-4")])
def test_claims_that_contradict_the_paper_are_refused(tmp_path, column, value):
    raw = paper.study_lines("claims")
    raw.loc[4, column] = value
    raw.to_csv(tmp_path / "claims.csv", index=False)
    with pytest.raises(ValueError, match="tab1.005" if column != "id" else "tab1.999"):
        claims(tmp_path / "claims.csv")

def test_a_claim_twice_is_refused(tmp_path):
    raw = paper.study_lines("claims")
    pd.concat([raw, raw[3:4]]).to_csv(tmp_path / "claims.csv", index=False)
    with pytest.raises(ValueError, match="tab1.004"):
        claims(tmp_path / "claims.csv")

def test_a_claims_file_with_a_column_less_or_without_rows_is_refused(tmp_path):
    raw = paper.study_lines("claims")
    for spoiled in (raw.drop(columns="instrument"), raw[:0], raw[raw.columns[::-1]]):
        spoiled.to_csv(tmp_path / "claims.csv", index=False)
        with pytest.raises(ValueError, match="claims.csv: expected rows of .*; got .* fix: git checkout"):
            claims(tmp_path / "claims.csv")

def test_the_aggregates_are_explained_and_all_in_use(bridge):
    assert (set(bridge["aggregate"]) == set(AGGREGATES) and all(len(text) > 10 for text in AGGREGATES.values()))

def test_the_headline_s_claims_read_as_anyone_would_read_table_1(bridge):
    row = bridge[(bridge["id"] == "tab1.009") & (bridge["protocol"] == "paper")].iloc[0]
    assert (row["condition"], row["site"], row["edit"], row["metric"],
            row["position"]) == (TABLE1["MoE"], "ffn_out", "zero", "digits", "o0-o3")
    assert row["unit_factor"] * .443 == pytest.approx(44.3) and np.isclose(row["margin"], .05)

def test_a_package_without_its_repository_says_so_and_how_to_get_it(tmp_path):
    "Copied elsewhere, as a wheel would be: what needs recorded data names the file and the fix, what does not works."
    shutil.copytree(Path(paper.__file__).parents[1], tmp_path / "moe_redistribution",
                    ignore=shutil.ignore_patterns("__pycache__"))
    script = """
from moe_redistribution.evidence.checkpoints import checkpoint
from moe_redistribution.evidence.selection import recorded_runs
from moe_redistribution.report.pages import Page
from moe_redistribution.record.ledger import ledger
from moe_redistribution.evidence.printed import paper_values
from moe_redistribution.evidence.claims import claims
from moe_redistribution.models.population import init, predict
import torch
for ask in (recorded_runs, paper_values, claims, lambda: checkpoint("add7/ffn-h256-silu"), lambda: \
Page("tab1"), ledger):
    try: ask()
    except FileNotFoundError as e: print(e)
print(len(predict(init("add7/ffn-h8-silu", [torch.Generator().manual_seed(0)]), "add7/ffn-h8-silu")))
"""
    out = python("-c", script, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    *said, one = out.stdout.splitlines()
    assert len(said) == 6 and all("expected beside the package" in s and "fix: clone the repository" in s
                                  for s in said), out
    assert one == "1"
