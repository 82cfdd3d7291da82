"""Of each claim a page judges: its key is an address on that page, and the rows of both sides can be had."""
import json
import re
import sys
from functools import cache

import numpy as np
import pandas as pd
import pytest

from moe_redistribution.evidence.table_files import ROOT
from moe_redistribution.report.overviews import page_of
from moe_redistribution.record.counts import claims_table, recorded_claims
from moe_redistribution.evidence.claims import PROTOCOLS, statements
from moe_redistribution.record.ways import _claim_files, claim_rows, _contrasts_of, ways_out, _write_claim_rows
from tiers import first

sys.path.insert(0, str(ROOT / "tools"))
import frame  # noqa: E402

CLAIMS = {c.key: c for c in recorded_claims().itertuples(index=False)}
JUDGES = sorted(set(map(page_of, CLAIMS.values())))
READINGS = {(s.key, s.protocol): s for s in statements().itertuples(index=False)}

@cache
def shown(page):
    "Everything that a page shows once the site's frame has made it, as one text."
    made = frame.framed(json.loads((ROOT / "nbs" / page).read_text(encoding="utf-8")), page)["cells"]
    outputs = [o["data"] for c in made for o in c.get("outputs", []) if "data" in o]
    return "\n".join(["".join(c["source"]) for c in made if c["cell_type"] == "markdown"]
                     + ["".join(d[f]) for d in outputs for f in ("text/markdown", "text/html") if f in d])

@pytest.mark.parametrize("page", JUDGES)
def test_every_claim_has_one_address_on_the_page_that_judges_it(page):
    keys = [k for k, c in CLAIMS.items() if page_of(c) == page]
    counted = {k: len(re.findall(rf'id="{re.escape(k)}"', shown(page))) for k in keys}
    assert set(counted.values()) == {1}, counted

@pytest.mark.parametrize("page", JUDGES)
def test_the_address_stands_where_the_claim_is_told_and_the_page_offers_its_rows(page):
    for k, c in CLAIMS.items():
        if page_of(c) != page: continue
        at = shown(page).index(f'id="{k}"')
        near = re.sub(r"<[^>]*>", " ", shown(page)[max(0, at - 400):at + 1500])
        means = [getattr(c, f"{r}_mean") for r in PROTOCOLS if getattr(c, f"{r}_n") > 0]
        said = [f"{abs(s * v):,.{d}f}".lstrip("0") for v in means for s in (1, 100) for d in (0, 1, 2, 3)]
        assert k in near or c.verdict in near or any(x and x in near for x in said), (k, near)
        assert all(f"rows/{f}" in shown(page) for f in _claim_files(k))

def test_the_table_of_all_claims_leads_to_the_claim_on_its_page_and_to_its_rows():
    table = claims_table()
    for k, c in CLAIMS.items():
        assert f'href="{page_of(c)}#{k}"' in table
        assert ways_out(k) in table

def test_overviews_lead_to_the_claim_on_its_page():
    for path in sorted((ROOT / "nbs/10_studies").glob("*/40_overview.ipynb")):
        told = "".join("".join(o["data"].get("text/markdown", ""))
                       for c in json.loads(path.read_text(encoding="utf-8"))["cells"] for o in c.get("outputs", [])
                       if "data" in o)
        table, = (m for m in re.findall(r"(?:^\|.*\n)+", told, re.M) if "does not count" in m)
        for row in table.splitlines()[2:]:
            key = re.search(r"results/ledger\.md#([\w.-]+)\)", row)[1]
            assert row.endswith(f"{page_of(CLAIMS[key])}#{key}) |"), row

# Every fifth at each change, all of them by `make audit`
@pytest.mark.parametrize("key", first([*CLAIMS][::5], CLAIMS))
def test_the_rows_of_both_sides_give_what_is_recorded(key):
    found, told = claim_rows(key), CLAIMS[key]
    for reading in PROTOCOLS:
        s, own = READINGS.get((key, reading)), found[found["reading"] == reading]
        if s is None or s.aggregate in ("none", "quotes"):
            assert own.empty
            continue
        each, n = own.loc[own["part"] == "averaged", "value"], getattr(told, f"{reading}_n")
        assert len(each) == n
        if not n: continue
        mean = each.sum() if s.aggregate == "sum" else each.mean()
        assert mean == pytest.approx(getattr(told, f"{reading}_mean"), rel=1e-9, abs=1e-12)
        sides = own[own["part"] != "averaged"]
        assert set(sides["part"]) >= {"claim"} and sides["part"].nunique() == 1 + len(s.versus.split())
        if s.aggregate == "difference":                      # from the cells of the two sides alone
            a, b = (sides[sides["part"] == p] for p in ("claim", "against"))
            a, b = a.groupby("seed")["value"].mean(), (b["value"].iloc[0] if b["seed"].isna().all() else
                                                       b.groupby("seed")["value"].mean())
            left = (a - b).loc[own.loc[own["part"] == "averaged", "seed"]]
            assert np.allclose(left, each, rtol=1e-9, atol=1e-12)

def test_contrasts_that_a_claim_names_are_recorded():
    known = set(pd.read_csv(ROOT / "results/contrasts.csv", usecols=["id"])["id"])
    named = {k: _contrasts_of(k) for k in CLAIMS}
    assert all(set(ids) <= known for ids in named.values()) and sum(map(bool, named.values())) > 20
    for k, ids in named.items():
        if "Holm" in str([getattr(CLAIMS[k], f"{r}_test") for r in PROTOCOLS]): assert ids, k

@pytest.mark.audit
def test_the_files_of_the_site_are_written_for_every_claim_that_reads_rows(tmp_path):
    n = _write_claim_rows(tmp_path)
    assert n == len(list(tmp_path.glob("*.csv"))) == sum(f"claims/{k}.csv" in _claim_files(k) for k in CLAIMS) > 180
    assert len(pd.read_csv(tmp_path / "4.2-05.csv")) == len(claim_rows("4.2-05"))
    silent = [k for k in CLAIMS if not _claim_files(k)]
    assert all(CLAIMS[k].paper_n == CLAIMS[k].audited_n == 0 for k in silent)
