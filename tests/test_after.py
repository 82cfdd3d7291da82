"""What `make docs` does before and after Quarto: a page finds its Markdown, a word its entry, and nothing empty is a
head."""
import json
import sys

import pytest

from moe_redistribution.evidence.table_files import ROOT

sys.path.append(str(ROOT / "tools"))
import after  # noqa: E402  scripts, and so no modules of the package

SITE = {"title": "t", "description": "d", "sidebar": {"contents": [
    {"section": "Mixture of Parrots", "contents": ["6_a/41_memory.ipynb"]},
    {"section": "Start", "contents": [{"href": "glossary.ipynb", "text": "Words"}]}]}}
GLOSSARY = ('<h1 class="title">Glossary</h1><section id="copies-ruled-out" class="level3"><h3 data-x="1">Copies ruled '
            'out</h3><p>No <b>copies</b>.</p></section>')

@pytest.fixture
def rendered(tmp_path):
    "A folder as Quarto leaves it: Markdown under the notebook's name, the page without its number."
    (tmp_path / "6_a").mkdir()
    (tmp_path / "6_a/memory.html").write_text('<h1 class="title">Who <em>remembers</em>?</h1>\n'
                                              '<div class="description">\n One line. </div>', encoding="utf-8")
    (tmp_path / "6_a/41_memory.llms.md").write_text("# Who remembers?", encoding="utf-8")
    (tmp_path / "glossary.html").write_text(GLOSSARY, encoding="utf-8")
    (tmp_path / "glossary.llms.md").write_text("# Glossary", encoding="utf-8")
    (tmp_path / "search.json").write_text(json.dumps([
        {"objectID": "6_a/memory.html", "href": "6_a/memory.html", "title": "Who remembers?", "section": "",
         "text": "Parrots do.", "crumbs": []}]), encoding="utf-8")
    return tmp_path

def test_every_page_of_the_sidebar_is_listed_for_programs_and_its_markdown_lies_beside_it(rendered):
    assert after.llms(rendered, SITE) == 2 == after.llms(rendered, SITE)        # twice is once
    listed = (rendered / "llms.txt").read_text(encoding="utf-8")
    assert "- [Who remembers?](6_a/memory.llms.md): One line.\n" in listed and "](glossary.llms.md)" in listed
    assert (rendered / "6_a/memory.llms.md").read_text(encoding="utf-8") == "# Who remembers?"

def test_a_page_without_markdown_is_named(rendered):
    (rendered / "6_a/41_memory.llms.md").unlink()
    with pytest.raises(SystemExit, match="41_memory"): after.llms(rendered, SITE)

def test_a_word_of_the_glossary_and_a_section_of_the_sidebar_have_entries_that_stand_first_in_search(rendered):
    for _ in range(2): after.finds(rendered, SITE)                              # twice is once
    index = json.loads((rendered / "search.json").read_text(encoding="utf-8"))
    found = {e["title"] if not e["section"] else e["section"]: (e["href"], e["text"]) for e in index}
    assert found["Copies ruled out"] == ("glossary.html#copies-ruled-out", "No copies.")
    assert found["Mixture of Parrots"] == ("6_a/memory.html#", "Parrots do.")
    assert len(index) == len({e["objectID"] for e in index}) == 4 and index[-1]["title"] == "Who remembers?"

@pytest.mark.parametrize("given, made", [
    ('<th data-r="th"> </th>', '<td data-r="th"></td>'), ("<th>a</th>", "<th>a</th>"),
    ('<div class="callout-header x" aria-label="Toggle callout">',
     '<div class="callout-header x" role="button" tabindex="0" aria-label="Toggle callout">'),
    ('<div id="r" class="csl-entry quarto-appendix-citeas" role="listitem">',
     '<div id="r" class="csl-entry quarto-appendix-citeas">'),
    ('<img alt="a" width="800" class="figure-img">',
     '<img style="--least: 520px" alt="a" width="800" class="figure-img">'),
    ('<img alt="a" width="800">', '<img alt="a" width="800">')])
def test_a_part_of_a_page_is_what_it_says_and_mending_twice_is_mending_once(given, made):
    assert after.mended(given) == made == after.mended(made)

@pytest.mark.parametrize("git_url, base", [("https://github.com/Some/repo", "https://some.github.io/repo/"),
                                           ("https://forge.org/a/b", ""), ("", "")])
def test_a_card_has_a_whole_address_where_the_site_has_one(git_url, base):
    assert after.home(git_url) == base
    page = '<head><meta property="og:image" content="x.png"><meta property="og:image:alt" content="y"></head>'
    made = after.mended(page, base)
    assert ("x.png" in made, f"{base}card.png" in made) == (not base, bool(base))
    assert made == after.mended(made, base)

def test_what_the_site_names_lies_in_the_repository():
    site = after.yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    assert (ROOT / "nbs" / site["website"]["favicon"]).is_file()
    assert (ROOT / "nbs" / site["format"]["html"]["include-after-body"]).is_file()
