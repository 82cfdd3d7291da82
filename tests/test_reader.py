"""What a stranger sees: the processed pages say their answer first, their tables can be read, and every figure leads to
its rows."""
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from moe_redistribution.evidence.table_files import ROOT
from moe_redistribution.record.counts import recorded_claims, recorded_numbers
from moe_redistribution.studies.sparsity_moves.reading import progress, section_of, section_runs
from test_links import plain, texts
from test_site import offenders

NBS, PROC = ROOT / "nbs", ROOT / "_proc"
RESULTS = sorted(p.relative_to(NBS).as_posix() for p in NBS.glob("6_studies/*/[1-9]*.ipynb"))
FIRST = ["index.ipynb", "figures_tables.ipynb", "status.ipynb"]

@pytest.fixture(scope="module")
def processed(tmp_path_factory):
    """Folder of the pages as nbdev hands them to Quarto: those of `make check`, if no notebook is younger, else made
    here."""
    made, notebooks = sorted(PROC.rglob("*.ipynb")), sorted(NBS.rglob("*.ipynb"))
    oldest, youngest = min((p.stat().st_mtime for p in made), default=0), max(p.stat().st_mtime for p in notebooks)
    if len(made) == len(notebooks) and oldest > youngest: return PROC
    folder = tmp_path_factory.mktemp("site")
    for name in ("settings.ini", "nbs", "moe_redistribution", "_quarto.yml"): (folder / name).symlink_to(ROOT / name)
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
    run = "from nbdev.serve import proc_nbs; proc_nbs(n_workers=0, force=True)"
    done = subprocess.run([sys.executable, "-c", run], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "_proc"

def shown(folder, page):
    "The cells of a processed page that show something, in order: (what is read first of each, the cell)."
    out = []
    for cell in json.loads((folder / page).read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "raw" or not source.strip(): continue
        silent = cell["cell_type"] == "code" and re.search(r"^#\|\s*echo:\s*false", source, flags=re.M)
        said = ["".join(o.get("data", {}).get("text/markdown", "")) for o in cell.get("outputs", [])]
        text = "\n".join(filter(None, said if silent else [source, *said]))
        if re.sub(r"<!--.*?-->", "", text, flags=re.S).strip(): out.append((text, cell))
    return out

def sentences(text):
    "The sentences of a Markdown text, links and marks taken off."
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)|[*_`]", lambda m: m[1] or "", text)
    parts = re.split(r"(?<=[.!?])\s+(?=[A-Z0-9–+−-])|\n\s*\n|\n[-|#]", text)
    return [p for p in (re.sub(r"\s+", " ", x).strip(" -|") for x in parts) if len(p.split()) > 2]

def test_a_page_of_results_says_its_answer_first_in_three_or_four_lines_and_with_a_number(processed):
    def wrong(page):
        texts = [text for text, _ in shown(processed, page)]
        # first whose it is, and the finding in words
        text = next((x for x in texts[:6] if x.startswith("**In short**")), texts[0])
        lines = [line for line in text.split("\n") if line.startswith("- ")]
        good = text.startswith("**In short**") and 3 <= len(lines) <= 4 and any(c.isdigit() for c in text)
        return "" if good else text[:80]
    bad = offenders([*RESULTS, "figures_tables.ipynb", "status.ipynb"], wrong)
    assert not bad, f"page, and how it opens: {bad}"

class Table(HTMLParser):
    "Caption and first column of a table of results."
    def __init__(self, text):
        super().__init__()
        self.caption, self.rows, self.at = "", [], None
        self.feed(text)
    def handle_starttag(self, tag, attrs):
        if tag == "tr": self.rows.append([])
        self.at = tag if tag in ("td", "caption", "summary") else self.at
        if tag == "td": self.rows[-1].append("")
    def handle_endtag(self, tag):
        self.at = None if tag == self.at else self.at
    def handle_data(self, data):
        if self.at in ("caption", "summary"): self.caption += data
        elif self.at == "td": self.rows[-1][-1] += data

def tables(folder, page):
    found = []
    for cell in json.loads((folder / page).read_text(encoding="utf-8"))["cells"]:
        for o in cell.get("outputs", []):
            text = ("".join(o.get("data", {}).get("text/html", ""))
                    or "".join(o.get("data", {}).get("text/markdown", "")))
            if 'class="shown' in text or "dataframe shown" in text: found.append(Table(text))
    return found

def test_every_row_of_a_comparison_can_be_told_from_every_other(processed):
    def alike(table): return not 0 < len(named := [row[0] for row in table.rows if row]) == len(set(named))
    bad = offenders(RESULTS, lambda page: [t.caption for t in tables(processed, page) if alike(t)])
    assert not bad, f"page, and the captions of its tables with two rows of one name: {bad}"

def test_comparisons_are_shown_in_this_form_all_over_the_site(processed):
    assert sum(len(tables(processed, page)) for page in RESULTS) > 40

def test_the_index_has_every_figure_and_table_and_its_links_lead_somewhere(processed):
    text = "\n".join(t for t, _ in shown(processed, "figures_tables.ipynb"))
    rows = re.findall(r"^\| \[(Figure|Table) (\d+)\]\(([^)#]+)(?:#([^)]*))?\) [^|]+\|(.*)$", text, flags=re.M)
    assert ([(k, int(n)) for k, n, *_ in rows]
            == [("Figure", i) for i in range(1, 27)] + [("Table", i) for i in range(1, 14)])
    for kind, n, page, anchor, rest in rows:
        assert (NBS / page).is_file() and anchor, f"{kind} {n}: {page}#{anchor}"
        files = re.findall(r"\(rows/([\w.]+)\.csv\)", rest)
        assert all((ROOT / f"results/paper/{f}.csv").is_file() for f in files), files
        assert re.search(r"`(moe-redistribution|make) [^`]+`", rest), f"{kind} {n} has no command"
    waiting = [r for r in rows if "▲" in r[4]]
    assert 0 < len(waiting) < len(rows), "runs that are missing are marked"

def cells_of(page, start):
    "The rows of a page's Markdown tables whose first cell begins so, as lists of cells."
    return [[c.strip() for c in row.strip("|").split("|")] for t in texts(page)
            for row in re.findall(r"^\| ?.*$", t, flags=re.M) if re.match(rf"\| ?\[?{start}", row)]

def test_the_state_of_the_work_counts_runs_once_and_calls_nothing_done_that_waits():
    "§4.3, B and F were *complete* with claims pending, and grokking missed 20 runs in one table and 111 in the other."
    ran, book = section_runs(), recorded_claims().query("paper == '000'")
    pending = book[book["verdict"] == "pending"]["section"].map(section_of).value_counts()
    for k, r in ran.iterrows():
        row, = cells_of("status.ipynb", re.escape(f"{k}: "))
        left = r["needed"] - r["recorded"] + r["audit_needed"] - r["audit_recorded"]
        said = {word: int(m[1]) for word in ("claim", "run") if (m := re.search(rf"(\d+) {word}s?\b", row[1]))}
        assert said == {w: n for w, n in (("claim", pending.get(k, 0)), ("run", left)) if n}, row
        assert row[4] == f"{r['recorded']} of {r['needed']}" and ("nothing" in row[1]) == (not said)
    assert "complete" not in " ".join(texts("status.ipynb"))
    for item in ("fig15", "tab7", "tab13"):
        p, kind = progress(item), {"fig": "Figure", "tab": "Table"}[item[:3]]
        row, = cells_of("figures_tables.ipynb", rf"{kind} {item[3:]}\]")
        assert row[2] == f"{p['recorded']} of {p['needed']}" + " ▲" * (p["recorded"] < p["needed"])

@pytest.mark.parametrize("page", ["index.ipynb", "status.ipynb", "figures_tables.ipynb", "claims.ipynb",
                                  "6_studies/sparsity_moves/9z_ledger.ipynb",
                                  "6_studies/sparsity_moves/9y_readings.ipynb"])
def test_a_count_of_claims_or_numbers_says_of_which_paper(page):
    book, numbers = recorded_claims(), recorded_numbers()
    whose = {n: words for found in (book, numbers)
             for n, words in ((len(found), r"\ball\b|five papers|rows"),
                              ((found["paper"] == "000").sum(), "main paper"))}
    bare = [s for t in texts(page) if "<table" not in t for s in re.split(r"(?<=[.?!])\s|\n- |\n\n", plain(t))
            for n, words in whose.items()
            if re.search(rf"(?<![\d,.]){n:,} (printed )?(claims|numbers|rows)\b", s) and not re.search(words, s)]
    assert not bare, bare
