"""How result pages read: what was found before any code, tables with captions and heads for people, one way to write a number.

    python tests/test_prose.py [PAGE ...]     what a page breaks, rule by rule; without a page, the counts of all
"""
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"
RESULTS = r"(index|use|tutorial|status|figures_tables|claims)\.ipynb|6_studies/\w+/(?!0)"
PAGES = sorted(p for x in NBS.rglob("[!_]*.ipynb") if re.match(RESULTS, p := x.relative_to(NBS).as_posix()))
BLOCK = r"^(```|~~~).*?^\1|<(style|script|svg|pre|code)\b.*?</\2>"

def parts(page):
    "(kind, text) of what a reader of the rendered page sees: 'prose' in Markdown, 'caption', 'html'; no code."
    cells = json.loads((NBS / page).read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield "prose", source
        if cell["cell_type"] != "code" or re.search(r"^\s*#\s*\|\s*(hide|include:\s*false)\s*$", source, re.M):
            continue
        for caption in re.findall(r"^#\| (?:fig|tbl)-cap: [\"']?(.*?)[\"']?$", source, re.M):
            yield "caption", caption
        for output in cell["outputs"]:
            data = output.get("data", {})
            for form, kind in (("text/markdown", "prose"), ("text/html", "html")):
                if form in data:
                    yield kind, "".join(data[form])
                    break

def plain(text):
    "Markdown as it is read: links by their words, no code, no tables, no headings, no marks of emphasis."
    text = re.sub(BLOCK, "", text, flags=re.M | re.S)
    text = re.sub(r"^\s*(\||#|:::|<|!\[).*$", "", text, flags=re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)(\{[^}]*\})?", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    return re.sub(r"[*_]{1,3}(?=\S)|(?<=\S)[*_]{1,3}", "", text)

def sentences(page):
    "Every sentence of a page's prose and captions."
    for kind, text in parts(page):
        if kind == "html":
            continue
        for block in re.split(r"\n\s*\n|\n\s*(?:[-*>]|\d+\.)\s+", plain(text)):
            joined = re.sub(r"\s+", " ", block.strip())
            joined = re.sub(r"\b(Fig|Figs|App|Sec|Eq|cf|vs|e\.g|i\.e|et al)\.", r"\1", joined)
            yield from filter(None, re.split(r"(?<=[.?!])[\"”)\]*]*\s+(?=\S)", joined))

def tables(page):
    "Every table that a page shows: 'html' or 'pipe', its text, and what stands right after a pipe table."
    for kind, text in parts(page):
        if kind == "html":
            if "<details><summary>" in text:        # a long table is folded behind its caption
                continue
            yield from (("html", t, "") for t in re.findall(r"<table.*?</table>", text, re.S))
        elif kind == "prose":
            text = re.sub(BLOCK, "", text, flags=re.M | re.S)
            yield from (("html", t, "") for t in re.findall(r"<table.*?</table>", text, re.S))
            for m in re.finditer(r"((?:^\|.*\n?)+)(.*(?:\n.*)?)", text, re.M):
                yield "pipe", m[1], m[2]

def uncaptioned(page):
    "Tables that do not say what they show: no <caption>, no `: caption` line, no *line in italics* below a pipe table."
    def bare(form, table, after):
        if form == "html":
            return not re.search(r"<caption[^>]*>\s*\S", table)
        return not re.match(r"\s*(:\s*\S|\*[^*\s])", after)
    return [re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", t))[:70]
            for form, t, after in tables(page) if bare(form, t, after)]

def heads_of_machines(page):
    "Names of columns that only a program would give: with an underscore, or of one repeated word."
    found = []
    for form, table, _ in tables(page):
        heads = (re.findall(r"<th[^>]*>(.*?)</th>", table, re.S) if form == "html"
                 else table.splitlines()[0].strip("|").split("|"))
        found += [h for h in map(str.strip, heads) if re.search(r"^[a-z]\w*_\w+$", h)]
    return found

def minus_in_words(page):
    "*less* as a minus sign: 'MoE less FFN'."
    found = []
    for s in sentences(page):
        found += re.findall(r"\b(?:MoE|FFN|GLU|mixture|dense|total|lowest|swap|learned|frozen|router) less "
                            r"(?!than|of|often|and|well|so)\w+", s)
    return found

def minus_in_notes(page):
    "The same in a cell of a table, where registered notes are shown: 'frozen less learned', 'on add-7; less what'."
    cells = [c for kind, text in parts(page) if kind == "html"
             for c in re.findall(r"<td[^>]*>(.*?)</td>|<p>(Notes: .*?)</p>", text, re.S) for c in c if c]
    with_what = (r"(?:a|an|the|one|none|no|what|with|after|that|those|dense|narrow|slow|mixture|learned|frozen|"
                 r"multiples|chance|k|loss|started)\b")
    minus = rf"\b(?!the\b)\w+[,;]? less {with_what}.{{0,20}}"
    return [m for c in cells for m in re.findall(minus, re.sub("<[^>]*>", " ", c))]

def hyphens_for_minus(page):
    "A hyphen before a digit that means minus, and a blank before a percent sign."
    text = "\n".join(plain(t) for kind, t in parts(page) if kind != "html")
    return re.findall(r"(?:^|[\s(\[])-\d[\d.]*", text) + re.findall(r"\d\s%", text)

def source_cells(page):
    "(kind, source, outputs) of a page's cells, code without its `#|` lines and blank ones."
    for cell in json.loads((NBS / page).read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            source = "\n".join(x for x in source.splitlines() if x.strip() and not x.lstrip().startswith("#|"))
        yield cell["cell_type"], source, cell.get("outputs", [])

def code_before(page, found):
    "How many lines of code stand above the first cell that `found` says yes to."
    lines = 0
    for kind, source, outputs in source_cells(page):
        if found(kind, source, outputs): return lines
        lines += len(source.splitlines()) * (kind == "code")
    return lines

def is_paragraph(kind, source, outputs):
    return kind == "markdown" and len(re.sub(r"^(#|>).*$", "", source, flags=re.M).split()) > 11

def has_number(kind, source, outputs):
    return kind == "code" and any(re.search(r"\d", "".join(o.get("data", {}).get("text/markdown", ""))) for o in outputs)

def walls(page):
    "Code before the first paragraph, or before the first number: a page opens with what was found."
    early, late = code_before(page, is_paragraph), code_before(page, has_number)
    return [f"{early} lines before a paragraph"] * (early > 3) + [f"{late} lines before a number"] * (late > 25)

def bounds_by_hand(page):
    "Text that writes an interval's bounds itself: `Values` and `Interval` have formats."
    code = "\n".join(s for kind, s, _ in source_cells(page) if kind == "code")
    return re.findall(r"\{[^{}\n]*\blo\b[^{}\n]*\},? *[^\n]{0,3}\{[^{}\n]*\bhi\b[^{}\n]*\}", code)

RULES = [uncaptioned, heads_of_machines, minus_in_words, minus_in_notes, hyphens_for_minus]
FORM = [walls, bounds_by_hand]
OF_RESULTS = [p for p in PAGES if re.match(r"6_studies/\w+/[1-9]", p)]

@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_result_pages_keep(rule):
    bad = {page: said for page in PAGES if (said := rule(page))}
    assert not bad, f"{sum(map(len, bad.values()))}: {bad}"

@pytest.mark.parametrize("rule", FORM, ids=lambda r: r.__name__)
def test_a_page_of_results_opens_with_what_was_found_and_writes_intervals_in_one_way(rule):
    bad = {page: said for page in OF_RESULTS if (said := rule(page))}
    assert not bad, f"{sum(map(len, bad.values()))}: {bad}"

if __name__ == "__main__":
    if named := sys.argv[1:]:
        for page in named:
            page = Path(page).resolve().relative_to(NBS).as_posix() if Path(page).exists() else page
            for rule in RULES + FORM:
                said = rule(page)
                print(f"\n{page}: {rule.__name__}: {len(said)}", *said, sep="\n  ")
    else:
        for page in PAGES:
            print(f"{page:55}", *(f"{rule.__name__} {len(rule(page)):3}" for rule in RULES + FORM))
        print("all", {rule.__name__: sum(len(rule(p)) for p in PAGES) for rule in RULES + FORM})
