"""What a stranger sees: pages say their answer first, their tables can be read, and every figure leads to
its rows."""
import re
from html.parser import HTMLParser

import pytest

from moe_redistribution.evidence.table_files import ROOT
from moe_redistribution.record.counts import recorded_claims, recorded_numbers
from moe_redistribution.studies.sparsity_moves.reading import progress, section_of, section_runs
from test_links import plain, texts
from test_site import RESULTS, cells, offenders, options

NBS = ROOT / "nbs"

def shown(page):
    "The cells of a page that show something, in order: what is read first of each. Of the title nbdev makes the header."
    out = []
    for cell in cells(page)[1:]:
        own = options(cell)
        if "hide" in own or own.get("include") == "false" or not cell["source"].strip(): continue
        silent = cell["cell_type"] == "code" and ("hide_input" in own or own.get("echo") == "false")
        said = ["".join(o.get("data", {}).get("text/markdown", "")) for o in cell.get("outputs", [])]
        text = "\n".join(filter(None, said if silent else [cell["source"], *said]))
        if re.sub(r"<!--.*?-->", "", text, flags=re.S).strip(): out.append(text)
    return out

def test_a_page_of_results_says_its_answer_first_in_three_or_four_lines_and_with_a_number():
    def wrong(page):
        texts = shown(page)
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

def tables(page):
    found = []
    for cell in cells(page):
        for o in cell.get("outputs", []):
            text = ("".join(o.get("data", {}).get("text/html", ""))
                    or "".join(o.get("data", {}).get("text/markdown", "")))
            if 'class="shown' in text or "dataframe shown" in text: found.append(Table(text))
    return found

def test_every_row_of_a_comparison_can_be_told_from_every_other():
    def alike(table): return not 0 < len(named := [row[0] for row in table.rows if row]) == len(set(named))
    bad = offenders(RESULTS, lambda page: [t.caption for t in tables(page) if alike(t)])
    assert not bad, f"page, and the captions of its tables with two rows of one name: {bad}"
    assert sum(len(tables(page)) for page in RESULTS) > 40

def test_the_index_has_every_figure_and_table_and_its_links_lead_somewhere():
    text = "\n".join(shown("figures_tables.ipynb"))
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
    pending = book[book["why"] == "waits"]["section"].map(section_of).value_counts()
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
                                  "10_studies/sparsity_moves/9z_ledger.ipynb",
                                  "10_studies/sparsity_moves/9y_readings.ipynb"])
def test_a_count_of_claims_or_numbers_says_of_which_paper(page):
    book, numbers = recorded_claims(), recorded_numbers()
    whose = {n: words for found in (book, numbers, numbers[numbers["paper_mean"].notna()])
             for n, words in ((len(found), r"\ball\b|five papers|rows"),
                              ((found["paper"] == "000").sum(), "main paper"))}
    bare = [s for t in texts(page) if "<table" not in t for s in re.split(r"(?<=[.?!])\s|\n- |\n\n", plain(t))
            for n, words in whose.items()
            if re.search(rf"(?<![\d,.]){n:,} (printed )?(claims|numbers|rows)\b", s) and not re.search(words, s)]
    assert not bare, bare

@pytest.mark.parametrize("page", ["status.ipynb", "figures_tables.ipynb", "papers.ipynb",
                                  "10_studies/sparsity_moves/9z_ledger.ipynb"])
def test_what_papers_print_is_counted_without_cells_that_have_no_number(page):
    numbers = recorded_numbers()
    main = numbers if page == "papers.ipynb" else numbers[numbers["paper"] == "000"]
    n, said = main["paper_mean"].notna().sum(), plain(" ".join(texts(page)))
    assert n < len(main) and re.search(rf"(?<![\d,]){n:,} (printed )?numbers|prints {n:,}\b", said)
    for many in (len(main), len(numbers)):
        assert not re.search(rf"(?<![\d,]){many:,} (printed )?numbers|prints? {many:,}\b|of {many:,}\b", said), many

MORE = re.compile(r"\b[Tt]he (?:\w+er|more|less)\b[^.|!?]{2,90}?, the (?:more|less|fewer)\b")

def test_a_sentence_of_the_more_the_more_is_given_by_its_rows():
    """What is said of a dose is said by `the_more`, which refuses a dose that came out and falls within arms; captions
    and Markdown cannot ask it, and say it otherwise."""
    bad = [(page, m[0]) for page in RESULTS for c in cells(page) for m in MORE.finditer(" ".join(c["source"].split()))
           if not ("the_more(" in c["source"] and m[0] not in " ".join(re.findall(r"fig-cap: (.*)", c["source"])))]
    assert not bad, bad
    assert MORE.search("the later a model is perfect, the more is left") and not MORE.search("The upper line, the lower one")
