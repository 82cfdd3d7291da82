"""What the rendered site still lacks: `make docs` runs it on _docs/, after Quarto.

    python tools/after.py [FOLDER]      the site's folder, _docs by default

- **Pages for readers that are programs.** Quarto writes each page as Markdown under the notebook's name, and lists
  those that lie under the page's; nbdev's pages drop the number, so four of all would be listed. Here every page gets
  its Markdown beside it, and llms.txt lists all of them in the order of the sidebar.
- **Words that search finds.** Quarto's index knows titles and headings of the second level. What the glossary explains
  and the sections of the sidebar get entries of their own, since this is what a reader types.
- **Heads that say nothing.** A corner of a table that is empty is a cell, not a head that a screen reader announces.
- **Parts that are what they say.** Quarto calls the bar of a callout a toggle and not a button, and how to cite a page
  an item of a list that is not there.
- **Pictures that can be read.** On a phone a picture is shown at no less than the part of its size (`ticks.SHRUNK`) at
  which its labels were measured, and scrolls.
- **A card.** With `git_url` of GitHub in settings.ini, links to the site show tools/card.py's picture: such a picture
  needs a whole address, which is that of GitHub Pages.
"""
import configparser
import json
import re
import sys
from html import unescape
from pathlib import Path

import yaml

from ticks import SHRUNK

ROOT = Path(__file__).resolve().parent.parent


def address(notebook):
    "Where nbdev's page of a notebook lies."
    return re.sub(r"(^|/)\d+[a-zA-Z0-9]*_([^/]+)$", r"\1\2", notebook.removesuffix(".ipynb")) + ".html"


def entries(contents, section=""):
    "(section, notebook) of a sidebar, in order."
    for entry in contents:
        if isinstance(entry, str): yield section, entry
        else:
            of = entry.get("section", "") if "href" not in entry else section      # of a section in a section, the inner
            if "href" in entry: yield section, entry["href"]
            yield from entries(entry.get("contents", []), of or section)


def said(html, pattern):
    found = re.search(pattern, html, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]+>", "", found[1])).split()) if found else ""


def llms(folder, site):
    "Markdown beside every page of the sidebar, and llms.txt, which lists them; how many."
    lines, last, n = [f"# {site['title']}", "", f"> {site['description']}"], None, 0
    for section, notebook in entries(site["sidebar"]["contents"]):
        page = folder / address(notebook)
        if not page.is_file(): continue
        text, old = page.with_suffix(".llms.md"), (folder / notebook).with_suffix(".llms.md")
        if old.is_file() and old != text: old.replace(text)
        if not text.is_file(): raise SystemExit(f"{notebook}: Quarto wrote no Markdown; expected {old}")
        html = page.read_text(encoding="utf-8")
        if section != last: lines += ["", f"## {section}", ""]
        title = said(html, r'<h1 class="title">(.*?)</h1>') or said(html, r"<title>(.*?)</title>")
        about = said(html, r'<div class="description">(.*?)</div>')
        lines.append(f"- [{title}]({text.relative_to(folder).as_posix()})" + (f": {about}" if about else ""))
        last, n = section, n + 1
    (folder / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return n


def finds(folder, site):
    "search.json with an entry for each word of the glossary and each section of the sidebar; how many."
    path, glossary = folder / "search.json", folder / "glossary.html"
    index = [e for e in json.loads(path.read_text(encoding="utf-8")) if not e.get("ours")]
    first, new = {}, []
    for section, notebook in entries(site["sidebar"]["contents"]): first.setdefault(section, address(notebook))
    for section, href in first.items():
        about = next((e["text"][:300] for e in index if e["href"] == href), "")
        new.append({"href": f"{href}#", "title": section, "section": "", "text": about, "crumbs": [section]})
    html = glossary.read_text(encoding="utf-8") if glossary.is_file() else ""
    for anchor, body in re.findall(r'<section id="([^"]+)" class="level3[^"]*">(.*?)</section>', html, flags=re.S):
        word, text = said(body, r"<h3[^>]*>(.*?)</h3>"), said(body, r"</h3>(.*)")
        new.append({"href": f"glossary.html#{anchor}", "title": "Glossary", "section": word, "text": text,
                    "crumbs": ["Look up", "Glossary"]})
    path.write_text(json.dumps([{"objectID": e["href"], "ours": True, **e} for e in new] + index, ensure_ascii=False,
                               indent=1), encoding="utf-8")
    return len(new)


def home(git_url):
    "Where GitHub Pages puts the site of a repository, or nothing."
    found = re.fullmatch(r"https://github\.com/([^/]+)/([^/]+?)(\.git)?/?", git_url)
    return f"https://{found[1].lower()}.github.io/{found[2]}/" if found else ""


def mended(html, base=""):
    "A page in which parts are what they say, with the card of the site at `base`."
    html = re.sub(r'(<div [^>]*quarto-appendix-citeas"[^>]*?) role="listitem"', r"\1", html)
    if base:
        html = re.sub(r'<meta [^>]*"(?:og|twitter):image(?::\w+)?"[^>]*>\n?', "", html)
        card = "".join(f'<meta {kind}:image" content="{base}card.png">\n' for kind in ('property="og', 'name="twitter'))
        html = html.replace("</head>", card + "</head>", 1)
    html = re.sub(r'<img (?![^>]*\bstyle=)(?=[^>]* width="(\d+)")(?=[^>]*"figure-img")',
                  lambda m: f'<img style="--least: {round(SHRUNK * int(m[1]))}px" ', html)
    html = re.sub(r"<th\b([^>]*)>(\s|&nbsp;)*</th>", lambda m: f"<td{m[1]}></td>", html)
    return re.sub(r'(<div class="callout-header(?:(?!role=)[^>])*?) (aria-label="Toggle callout"(?![^>]*role=))',
                  r'\1 role="button" tabindex="0" \2', html)


def main(args=()):
    folder = Path(args[0] if args else ROOT / "_docs")
    settings = configparser.ConfigParser()
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    base = home(settings["DEFAULT"].get("git_url", "").strip())
    pages = [p for p in folder.rglob("*.html") if "site_libs" not in p.parts]
    for path in pages:
        html = path.read_text(encoding="utf-8")
        if (new := mended(html, base)) != html: path.write_text(new, encoding="utf-8")
    site = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]
    print(f"{len(pages)} pages, {llms(folder, site)} of them as Markdown in llms.txt, "
          f"{finds(folder, site)} words more for search")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
