"""Links show what they say: each lands on something that is there, and a number beside one stands where it leads."""
import html
import re
from functools import cache

import pandas as pd
import pytest

from test_site import NBS, PAGES, ROOT, anchors, cells, options, pandoc_id

CLAIMS, SUMMARY = "claims.ipynb", "10_studies/sparsity_moves/9z_ledger.ipynb"
RESULT = r"10_studies/\w+/[1-9]\w*\.ipynb$|claims\.ipynb$"
TOLD = ["index.ipynb", *(p for p in PAGES if re.match(RESULT, p) and p != CLAIMS)]

@cache
def texts(page):
    "What a page says: its Markdown cells, and the Markdown and HTML that its cells show."
    found = []
    for c in cells(page):
        if c["cell_type"] == "markdown": found.append(c["source"])
        for o in c.get("outputs", []):
            shown = o.get("data", {})
            found += ["".join(shown[f]) for f in ("text/markdown", "text/html") if f in shown]
    return found

# ----------------------------------------------------------------------------------------------------- where links land

ADDRESS = {re.sub(r"(^|/)\d+[a-zA-Z0-9]*_([^/]+)$", r"\1\2", p).replace(".ipynb", ".html"): p for p in PAGES}

def links(page):
    "Every link of a page within the site: (as it is written, the page that it leads to or nothing, its fragment)."
    for text in texts(page):
        text = re.sub(r"^(```|~~~)(?!\{=html\}).*?^\1|(?<!`)`[^`\n]+`", "", text, flags=re.M | re.S)
        for link in re.findall(r"\]\(\s*([^)\s]+)|<a [^>]*href=\"([^\"]+)\"", text):
            link = html.unescape(next(filter(None, link)))
            if re.match(r"\w+:", link): continue
            path, _, fragment = link.partition("#")
            if path.endswith("results/ledger.md"):                          # in a clone; on the site the table of claims
                yield link, CLAIMS if ((NBS / page).parent / path).resolve() == ROOT / "results/ledger.md" else "", fragment
                continue
            if "results/" in path and not ((NBS / page).parent / path).resolve().is_file(): yield link, "", fragment
            at = ((NBS / page).parent / path).resolve() if path else NBS / page
            to = at.relative_to(NBS).as_posix() if NBS in at.parents else ""
            if (to := ADDRESS.get(to, to)) in PAGES: yield link, to, fragment
            elif not at.exists() and NBS / "rows" not in at.parents: yield link, "", fragment

def judged(page):
    "Keys of the claims that a page judges: the site's frame makes each an address there (tests/test_ways.py)."
    book = pd.read_csv(ROOT / "results/ledger.csv", usecols=["key", "page"])
    return set(book.loc[book["page"].str.partition("#")[0] == page, "key"])

@cache
def landing(page):
    "Ids of a page: those of its sources, and what its stored outputs add: headings, and ids of their own."
    found = set(anchors(page))
    for text in texts(page):
        found |= set(re.findall(r"\{#([\w:.-]+)", text)) | set(re.findall(r"\bid=\"([^\"]+)\"", text))
        found |= {pandoc_id(h) for h in re.findall(r"^#{2,6}\s+(.+?)\s*$", text, flags=re.M)}
    return found | judged(page)

def dead(page):
    return sorted({link for link, to, at in links(page) if not to or at and at not in landing(to)})

def test_a_heading_stands_on_its_own():
    "Pandoc takes a heading below a line of text for text, and what leads to it leads nowhere."
    def glued(page):
        lines = [line for text in texts(page) for line in ["", *text.split("\n")]]
        return [b for a, b in zip(lines, lines[1:]) if re.match("#{2,6} ", b) and a.strip() and not a.startswith(":::")]
    bad = {p: found for p in PAGES if (found := glued(p))}
    assert not bad, bad

def test_every_link_in_a_source_or_a_stored_output_lands():
    bad = {p: found for p in PAGES if (found := dead(p))}
    assert not bad, bad

def keys():
    return pd.read_csv(ROOT / "results/ledger.csv", usecols=["key"])["key"].tolist()

@pytest.mark.parametrize("page", [CLAIMS, SUMMARY])
def test_every_claim_has_a_line_to_land_on(page):
    assert not [k for k in keys() if k not in landing(page)]

# ------------------------------------------------------------------------------- a number stands where its link leads

NUMBER = r"(?<![\w.,])-?(\d+(?:,\d{3})*(?:\.\d+)?)"
UNIT = r"(?:%|points?\b|nats\b|NMI\b|epochs?\b)"

def plain(text):
    "A text without marks, addresses and tags; the cells of a table stay apart, and every minus is one sign."
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", text, flags=re.S)
    text = re.sub(r"<[^>]*>", lambda m: " | " if re.match(r"</?t[dhr]", m[0]) else " ", text)
    text = html.unescape(re.sub(r"\[([^][]*)\]\([^)]*\)", r"\1", text))
    return re.sub(r"[*`†+]", "", text).translate(str.maketrans("−–\u202f\u2009\xa0", "--   "))

def places(text):
    "Where a text can print numbers: its paragraphs, and every row of its tables with what stands beside the table."
    rows = re.findall(r"<tr\b.*?</tr>", text, flags=re.S) or re.findall(r"^\|.*$", text, flags=re.M)
    beside = re.sub(r"<tr\b.*?</tr>|^\|.*$", "", text, flags=re.M | re.S)
    return [plain(beside + "\n" + row) for row in rows] or [plain(part) for part in re.split(r"\n\s*\n", text)]

@cache
def printed(page, at=""):
    """Places of a page, as plain text, those of figures' captions with them; of the page of claims the row of one,
    since all of them print anything."""
    own = [*texts(page), *(options(c).get("fig-cap", "") for c in cells(page, "code"))]
    if page == CLAIMS and at: own = re.findall(rf'<tr id="{re.escape(at)}".*?</tr>', "\n".join(own), flags=re.S)
    return [place for text in own for place in places(text)]

def stands(number, unit, text):
    """Does the text print this number, or one with more digits that rounds to it, as what it is: points with their
    word, an interval or an error beside them, a share with %, a bound in its interval, anything with decimals in a
    cell?"""
    digits, own = len(number.partition(".")[2]), float(number.replace(",", ""))
    word = {"[": r"[,\]]", "%": r"%|\[[^]]*%?\] ?%?", "point": r"points?|pp|\[[^]%]*\](?! ?%)"}
    word = word.get(unit.rstrip("s"), unit + r"|\[")
    for m in re.finditer(NUMBER, text):
        more, value = len(m[1].partition(".")[2]), float(m[1].replace(",", ""))
        if more < digits or (value != own if more == digits else abs(value - own) > .5001 * 10 ** -digits): continue
        after = text[m.end():m.end() + 30]
        if unit == "[" and not re.search(r"\[[^]]*$", text[max(0, m.start() - 25):m.start()]): continue
        if re.match(rf"\s*(?:{word})", after) or more and unit != "[" and re.match(r"\s*\|", after): return True
    return False

def counted(n, text):
    "Does the text print this number as one of seeds?"
    return bool(re.search(rf"(?<![\d.,]){n} (\w+ ){{0,2}}seeds?\b|\bn ?= ?{n}\b|\| *{n}( of \d+)? *\||\b{n} of {n}\b"
                          rf"|seeds \| *{n}\b", text))

def told(sentence):
    "The numbers of a sentence: (kind, number, unit) for those with a unit, bounds of intervals, seeds, and k of n."
    said = plain(sentence)
    yield from (("value", *m) for m in re.findall(rf"{NUMBER}\s*({UNIT})", said))
    for lo, hi in re.findall(rf"\[{NUMBER}, {NUMBER}\]", said): yield from (("value", x, "[") for x in (lo, hi))
    yield from (("seeds", n, "") for n in re.findall(r"(?<![\d.,])(\d+) (?:\w+ ){0,1}seeds?\b", said))
    yield from (("of", f"{k} of {n}", "") for k, n in re.findall(r"(?<![\d.,])(\d+) of (\d+)\b", said))

def sentences(text):
    "Its sentences with their links; rows of tables, headings and code are none."
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.M | re.S)
    text = "\n".join(line for line in text.split("\n") if not re.match(r"\s*([|#]|<\w)", line))
    return re.split(r"(?<=[.!?])\s+(?=[A-Z*\[§(])|(?<=\*\*)\s+(?=[A-Z\[])|\n\s*\n|\n\s*- ", text)

def unprinted(page):
    """(number, sentence) wherever no page of results that the sentence links to prints the number, and if the sentence
    says over how many seeds, in one place with these."""
    for s in (s for t in texts(page) if "<table" not in t for s in sentences(t)):
        to = []
        for link in re.findall(r"\]\(\s*([^)\s]+\.ipynb(?:#[^)\s]*)?)\)", s):
            path, _, at = link.partition("#")
            target = ((NBS / page).parent / path).resolve().relative_to(NBS).as_posix()
            if target == SUMMARY and at: target = CLAIMS                              # it passes such links on
            if re.match(RESULT, target) and target != page and (NBS / target).is_file(): to.append((target, at))
        if not to: continue
        there, said = [place for t in to for place in printed(*t)], list(told(s))
        n = {x for kind, x, _ in said if kind == "seeds"}
        within = [place for place in there if len(n) != 1 or counted(*n, place)]
        for kind, x, unit in said:
            if kind == "of": found = any(x in place for place in there)
            elif kind == "seeds": found = any(counted(x, place) for place in there)
            else: found = any(stands(x, unit, place) for place in within)
            if not found: yield f"{x} {unit}".strip(), " ".join(s.split())

@pytest.mark.parametrize("page", TOLD)
def test_the_page_that_a_sentence_links_to_prints_its_number(page):
    bad = list(unprinted(page))
    assert not bad, "\n".join(f"{n}: {s}" for n, s in bad)

def test_a_number_is_found_where_it_stands_and_not_where_a_count_does():
    row = "| MoE minus FFN | +45.3 [+42.5, +47.9] points | 64 |"
    assert stands("45", "points", row.replace("+", "")) and stands("43", "[", "[42.5, 47.9]")
    assert not stands("24", "points", "24 seeds of 64") and not stands("45", "points", "in 45 runs; 44.2 %; 145 %")
    assert not stands("0.11", "nats", "0.1 nats") and stands("12,500", "epochs", "-12500 epochs")
    assert counted("64", row) and not counted("64", "64 hidden units") and counted("5", "n = 5")
    assert list(told("It leads by 45 points [43, 48] over 64 seeds, in 118 of 128.")) == [
        ("value", "45", "points"), ("value", "43", "["), ("value", "48", "["), ("seeds", "64", ""),
        ("of", "118 of 128", "")]
