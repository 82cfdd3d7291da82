"""What others measured stands beside our claims by a rule, with an address, a place and a command; five papers are cited."""
import importlib
import json
import re
from pathlib import Path

import pandas as pd
import pytest
import yaml

from moe_redistribution.evidence.printed import papers
from moe_redistribution.evidence.table_files import ROOT
from moe_redistribution.record.elsewhere import (
    COMPARED, _READ, _contrast_sign, _our_sign, _word_by_rule, elsewhere_link, recorded_elsewhere)
from moe_redistribution.report.recorded_claims import recorded_ledger
from moe_redistribution.record.ways import ways_out
from test_shown_commands import complaint, words_of

ROWS = recorded_elsewhere()
CLAIMS = {c.key: c for c in recorded_ledger().itertuples(index=False)}
CONTRASTS = {r.id: r for r in pd.read_csv(ROOT / "results/contrasts.csv").itertuples(index=False)}
PAGE = "".join("".join(o.get("data", {}).get("text/html", ""))
               for c in json.loads((ROOT / "nbs/others.ipynb").read_text(encoding="utf-8"))["cells"]
               for o in c.get("outputs", []))

def test_every_claim_is_one_of_the_ledger_and_leads_to_its_row():
    assert {*ROWS["claim"]} <= {*CLAIMS, *CONTRASTS} and len({*ROWS["claim"]} & {*CLAIMS}) >= 20
    for k in {*ROWS["claim"]}:
        assert elsewhere_link(k) and PAGE.count(f'id="on-{k}"') == 1
        assert k in CONTRASTS or elsewhere_link(k) in ways_out(k)

def test_a_contrast_stands_where_no_claim_asks_the_same_and_has_a_sign_where_it_is_decided():
    claimed = {tuple(str(c.rows).split()) for c in CLAIMS.values()}
    asked = {k for k, r in CONTRASTS.items() if tuple(f"{x.split('.')[0]}/{x}" for x in (r.a, r.b)) in claimed}
    assert asked and not asked & {*ROWS["claim"]}
    undecided = [r for r in CONTRASTS.values() if r.outcome in ("inconclusive", "not attempted")]
    assert undecided and {_contrast_sign(r) for r in undecided} == {"?"}

def test_the_rival_is_first_and_leads_to_the_study_that_asks_the_same():
    first = ROWS.iloc[0]
    assert first["claim"] == "000-head_loss-one.mixture-dense" and "2601.08383" in first["work"]
    shown = PAGE.partition("<tbody>")[2].partition("</tr>")[0]
    assert first["contrast"] == "same" and 'href="10_studies/head_loss/41_head_loss.ipynb"' in shown

def test_an_abstract_is_not_read_first_hand():
    assert not ((ROWS["read"] == "first-hand") & ROWS["place"].str.startswith("abstract")).any()
    assert (ROWS["read"] == "words only").any()

def test_every_row_has_an_address_and_a_place_or_says_that_it_was_not_read():
    assert ROWS["source"].str.fullmatch(r"https?://\S+").all()
    assert {*ROWS["read"]} <= {*_READ}
    assert ((ROWS["place"] != "") | (ROWS["read"] == "unread")).all()
    assert (ROWS.loc[ROWS["read"] == "second-hand", "via"] != "").all()

def test_every_word_is_made_by_the_rule_and_none_is_written_in_the_file():
    head = (ROOT / "data/others.csv").read_text(encoding="utf-8").splitlines()[0]
    assert not {"word", "ours", "reading"} & {*head.split(",")}
    ours = [_our_sign(CLAIMS[k]) if k in CLAIMS else _contrast_sign(CONTRASTS[k]) for k in ROWS["claim"]]
    assert [_word_by_rule(r.contrast, r.sign, x) for r, x in zip(ROWS.itertuples(), ours)] == [*ROWS["word"]]
    assert ROWS["word"].map(COMPARED.index).is_monotonic_increasing

@pytest.mark.parametrize("command", sorted({*ROWS["command"]}))
def test_every_command_parses(command):
    assert command.startswith("moe-redistribution ")
    assert not complaint(words_of(command.removeprefix("moe-redistribution ")))

def test_the_citation_has_what_the_format_asks_for_and_names_all_five_papers():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= {*cited} and cited["type"] == "software"
    assert len(cited["references"]) == len(papers()) == 5
    for r in cited["references"]:
        assert {"type", "title", "authors", "url"} <= {*r} and r["url"].startswith("https://")
        assert all("name" in a or {"family-names", "given-names"} <= {*a} for a in r["authors"])

def test_every_command_in_agents_parses_and_every_link_leads_somewhere():
    lines = (Path(ROOT) / "AGENTS.md").read_text(encoding="utf-8").splitlines()
    shown = [x.partition("  #")[0].strip() for x in lines]
    ours = [x.removeprefix("moe-redistribution ") for x in shown if x.startswith("moe-redistribution ")]
    assert len(ours) >= 4 and not [x for x in ours if complaint(words_of(x))]
    named = re.findall(r"\]\(([^)#]+)\)", "\n".join(lines))
    assert named and not [x for x in named if not (ROOT / x).exists()]

def test_agents_says_how_many_numbers_the_main_paper_has_and_how_to_get_one():
    said = " ".join((Path(ROOT) / "AGENTS.md").read_text(encoding="utf-8").split())
    found = pd.concat(map(pd.read_csv, (Path(ROOT) / "results/paper").glob("*.csv")))
    of_others = found["id"].str.match(r"00[1-4]\.")
    assert f'{found.loc[of_others, "id"].nunique()} of the companions' in said
    found = found[~of_others]
    theirs, audited = (found[found["protocol"] == p] for p in ("paper", "audited"))
    assert (f"{len(theirs)} of the main paper, of which {theirs['paper_mean'].isna().sum()} are empty cells and "
            f"{len(audited)} have a second line" in said)
    room, name, id = re.search(r"`from (\S+) import (printed_rows)`, then `printed_rows\(\"(\S+)\"\)`", said).groups()
    assert (getattr(importlib.import_module(room), name)(id)["id"] == id).all()
