"""What the site's frame adds to the pages that nbdev has processed: `make docs` runs it on _proc/, before Quarto.

    python tools/frame.py               the pages in _proc/
    python tools/frame.py --settings    write GIT_URL and BRANCH of the environment into settings.ini, and touch no page

The notebooks stay as an author wants to read them, and no cell has to repeat what follows from what it holds:

- **Folds.** Exported source, set-up and assertions come folded behind a word that says what is inside, "source",
  "set-up", "3 assertions, all hold". A cell is set-up if it only imports, or, on a page of results, if it shows nothing
  or opens the page's rows. There, what draws a figure or computes a sentence is folded, too. Assertions do hold: a
  notebook in which one fails has no outputs stored and does not pass `make test`.
- **One number a figure.** Captions carry the paper's numbers, so Quarto may not count as well. It counts what has a
label that
  starts with `fig-`; the label is kept as an anchor, and the cell gets one that is not counted.
- **Nothing from elsewhere.** Quarto loads two scripts from a CDN for every page with an HTML output, in case it is a
widget.
  Ours are tables: handed over as raw HTML in Markdown, they need none.
- **Ways out.** With `git_url` in settings.ini (the site's workflow fills it in), the bar on top links to the repository
and to
  its issues, and "source" to the line. Without one those links would be dead, so they are left out.
- **A strip.** Under the title of a page of a paper stand its other sections, by the paper's numbers.
- **The foot.** What a page stands on (`report.pages.Opening`) is read where the rows are, and said where it ends.
- **Addresses of claims.** A claim's key is an address on the page that judges it: where the page shows it, or in the
  list of all that it judges, at its foot (`record.ways`, `record.counts`).
- **Rows.** The comparisons, the ledger, the contrasts and the register lie beside the pages, in rows/, so that a
table's numbers
  are two clicks away; and every value behind each claim, in rows/claims/. In a clone a link leads to the file under
  results/, and one to results/ledger.md, which a forge shows, to the table of claims here.
"""
import ast
import configparser
import json
import os
import re
import shutil
import sys
from functools import cache
from pathlib import Path
from urllib.parse import quote

import yaml

from moe_redistribution.report.overviews import page_of
from moe_redistribution.record.counts import _judged_here, recorded_claims
from moe_redistribution.record.ways import _place_claims, _write_claim_rows

ROOT = Path(__file__).resolve().parent.parent
# pages whose subject is what came out, not how it is computed; a study's rooms begin with 0
RESULTS = r"10_studies/\w+/(?!0)"
# there, the code of what is shown stands behind these words
SHOWN = {"image/png": "how this figure is drawn", "text/html": "how this table is made",
         "text/markdown": "how these words are computed"}
STORED = "application/vnd.moe-redistribution.page+json"  # as in report.pages
DIRECTIVE = r"^[ \t]*#[ \t]*\|[ \t]*([\w-]+)[ \t]*:?[ \t]*(.*?)[ \t]*$"


def options(source):
    "The `#| name: value` lines of a cell."
    return {name: value.strip("\"'") for name, value in re.findall(DIRECTIVE, source, flags=re.M)}


def assertions(node):
    "How many assertions a statement makes; those inside a function are not made where it is defined."
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
        return 0
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith("test_")
    return isinstance(node, ast.Assert) + called + sum(assertions(n) for n in ast.iter_child_nodes(node))


def fold(cell, page):
    "The word behind which a code cell is folded, or nothing."
    source = cell["source"]
    given = options(source)
    if given.get("code-summary") == "Exported source":  # nbdev's own, which it leaves open
        return "source"
    if given.keys() & {"code-fold", "echo", "include"}:
        return None
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a shell command or a magic
        return None
    n = sum(map(assertions, body))
    if n and not cell["outputs"]:
        return f"{n} assertion{'s' * (n > 1)}, all hold" if n > 1 else "1 assertion, holds"
    if all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body):
        return "set-up" if body and "/" in page else None  # on the front pages a reader types what he sees
    if not re.match(RESULTS, page):
        return None
    forms = {form for out in cell["outputs"] for form in out.get("data", {})}
    shown = next((word for form, word in SHOWN.items() if form in forms), None)
    return shown or ("set-up" if not cell["outputs"] or "page.rows" in source else None)


def without(source, *names):
    "A cell's source without these directives."
    return "\n".join(line for line in source.split("\n")
                     if not ((m := re.match(DIRECTIVE, line)) and m[1] in names))


def raw(html):
    "HTML as Markdown that pandoc passes through."
    return "```{=html}\n" + html.strip("\n") + "\n```\n"


def on_site(text, page):
    "Links of a clone's pages to its results, as the site has them."
    up = "../" * page.count("/")
    text = re.sub(r"(\]\(|href=\")(?:\.\./)+results/ledger\.md", rf"\1{up}claims.ipynb", text)
    return re.sub(r"(\]\(|href=\")(?:\.\./)+results/(?:paper/)?([\w.-]+\.csv)", rf"\1{up}rows/\2", text)


def lines(text):
    "Text as notebooks store it. Quarto reads nothing else: of one long string it drops the ends of the lines."
    return text.splitlines(keepends=True)


def output(out, page=""):
    "Change one output in place."
    data = out.get("data", {})
    for form in data.keys() & {"text/html", "text/markdown"}:
        data[form] = lines(on_site("".join(data[form]), page))
    if "text/html" in data and "text/markdown" not in data:
        data["text/markdown"] = lines(raw("".join(data.pop("text/html"))))
    # nbdev makes a "source" link relative where it knows no repository, and it leads nowhere; of a function that says
    # nothing of itself it prints what Python says of all that can be called
    if "text/markdown" in data:
        text = re.sub(r"^\*Call self as a function\.\*\n*", "", "".join(data["text/markdown"]), flags=re.M)
        # nbdev sets the first line of a docstring in italics, though its sentence may go on
        text = re.sub(r"^\*([^*\n]+)\*\n(?=\S)", r"\1\n", text, flags=re.M)
        data["text/markdown"] = lines(re.sub(r"^\[source\]\((?!\w+:)[^)]*\)(\{[^}]*\})?\s*$\n?", "", text, flags=re.M))


def joins(cell):
    "Is this cell a fold of set-up that shows nothing, as framed?"
    return cell["cell_type"] == "code" and not cell["outputs"] and '#| code-summary: "set-up"\n' in cell["source"]


@cache
def strips(root=ROOT):
    "Page → the name of its paper, and (what it is called, notebook) of each page of that paper, from _quarto.yml."
    def walk(entries):
        for e in entries:
            if isinstance(e, dict) and "href" in e: yield e.get("text") or e["section"], e["href"]
            elif isinstance(e, str): yield title(root / "nbs" / e), e
            if isinstance(e, dict): yield from walk(e.get("contents", []))
    site = yaml.safe_load((root / "_quarto.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    read = next(e["contents"] for e in site if isinstance(e, dict) and e.get("section") == "Read")
    found = {e["section"]: [*walk(e["contents"])] for e in read if isinstance(e, dict) and "contents" in e}
    return {page: (paper, pages) for paper, pages in found.items() for _, page in pages}


def title(path):
    "What a notebook is called in its first line."
    return "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]).split("\n")[0].lstrip("# ")


def strip(page):
    """The line under the title of a page of a paper that leads to its other sections, by the paper's own numbers; its
    overview first, and a page without a number on its own strip alone. Nothing for other pages."""
    if page not in strips(): return ""
    paper, pages = strips()[page]
    numbered = [(m[1], words, at) for words, at in pages if (m := re.match(r"(\d(?:\.\d)?|[A-Z](?:\.\d)?) ", words))]
    named = [(words.partition(":")[0], words, at) for words, at in pages]
    at_home = {at for *_, at in [named[0], *numbered]}
    shown = [named[0], *numbered, *(n for n in named if n[2] == page not in at_home)] if numbered else named
    def link(word, words, at):
        said = words.replace('"', "'")
        return f"**{word}**" if at == page else f'[{word}]({os.path.relpath(at, os.path.dirname(page))} "{said}")'
    return f"::: {{.paper-strip}}\n{paper}: {' · '.join(link(*one) for one in shown)}\n:::\n"


def framed(notebook, page):
    "The cells of a processed notebook as Quarto gets them."
    out, foot = [], []
    judged = [c for c in recorded_claims().itertuples(index=False) if page_of(c) == page]
    cells, shown = _place_claims(notebook["cells"], judged)
    if said := strip(page):
        cells = [*cells[:1], {"cell_type": "markdown", "id": "strip", "metadata": {}, "source": said}, *cells[1:]]
    for cell in cells:
        cell = {**cell, "source": "".join(cell["source"])}
        if cell["cell_type"] == "markdown":
            cell["source"] = on_site(cell["source"], page)
        if cell["cell_type"] == "code":
            foot += [on_site("".join(o["data"].get("text/markdown", "")), page) for o in cell["outputs"]
                     if STORED in o.get("data", {})]
            cell["outputs"] = [o for o in cell["outputs"] if STORED not in o.get("data", {})]
            word = fold(cell, page)
            if word == "set-up" and not cell["outputs"] and out and joins(out[-1]):      # one fold for a run of them
                body = "\n".join(line for line in cell["source"].split("\n") if not re.match(DIRECTIVE, line))
                out[-1]["source"] += lines("\n\n" + body.strip("\n"))
                continue
            if word is not None:
                cell["source"] = f'#| code-fold: true\n#| code-summary: "{word}"\n' \
                    + without(cell["source"], "code-fold", "code-summary")
            label = options(cell["source"]).get("label", "")
            if label.startswith("fig-"):
                anchor = raw(f'<a id="{label}" class="figure-anchor"></a>')
                out.append({"cell_type": "markdown", "id": f"anchor-{label}"[:64], "metadata": {},
                            "source": lines(anchor)})
                cell["source"] = re.sub(r"^(\s*#\s*\|\s*label\s*:\s*[\"']?)fig-", r"\1picture-",
                                        cell["source"], flags=re.M)
            for o in cell["outputs"]:
                output(o, page)
        out.append({**cell, "source": lines(cell["source"])})
    if judged:
        out.append({"cell_type": "markdown", "id": "judged-here", "metadata": {},
                    "source": lines(raw(_judged_here(judged, shown, "../" * page.count("/"))))})
    if said := "\n\n".join(filter(str.strip, foot)):
        out.append({"cell_type": "markdown", "id": "standing", "metadata": {},
                    "source": lines(f"::: {{.standing}}\n{said}\n:::\n")})
    return {**notebook, "cells": out}


def navbar(git_url):
    "What _proc/_quarto.yml says besides _quarto.yml: links into the repository, if there is one."
    if not git_url:
        return {}
    return {"website": {"repo-url": git_url, "repo-actions": ["issue"], "navbar": {"right": [
        {"text": "Ask or report", "href": f"{git_url}/issues"},
        {"icon": "github", "href": git_url, "aria-label": "The repository"}]}}}


def pointed(text, git_url, branch):
    """The text of settings.ini with these values.

    A branch may be called anything: what has a meaning in an address is quoted, and so is the percent sign that this
    makes, which has one in such a file."""
    for name, value in (("git_url", git_url), ("branch", quote(branch, safe="/"))):
        value = value.replace("%", "%%")
        text = re.sub(rf"^{name} =.*$", lambda _: f"{name} = {value}", text, flags=re.M)
    return text


def tables(root):
    "The tables that pages link to as `rows/NAME.csv`."
    return [*sorted((root / "results/paper").glob("*.csv")),
            *(root / f"results/{n}.csv" for n in ("ledger", "contrasts", "registrations"))]


def rows(root, proc):
    "Copy these tables to where Quarto finds them, and write those of each claim beside them."
    (proc / "rows").mkdir(exist_ok=True)
    for path in tables(root):
        shutil.copy(path, proc / "rows" / path.name)
    return len(tables(root)) + _write_claim_rows(proc / "rows" / "claims")


def main(args=(), root=ROOT):
    if "--settings" in args:
        path = root / "settings.ini"
        return path.write_text(pointed(path.read_text(), os.environ["GIT_URL"], os.environ["BRANCH"])) and None
    settings = configparser.ConfigParser()
    settings.read(root / "settings.ini")
    git_url = settings["DEFAULT"].get("git_url", "").strip().rstrip("/")
    proc = root / "_proc"
    pages = sorted(proc.rglob("*.ipynb"))
    for path in pages:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        made = framed(notebook, path.relative_to(proc).as_posix())
        path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    site = yaml.safe_load((root / "nbs" / "_quarto.yml").read_text()) | navbar(git_url)
    (proc / "_quarto.yml").write_text(yaml.safe_dump(site, sort_keys=False))
    print(f"framed {len(pages)} pages, {rows(root, proc)} tables of rows beside them"
          + (f", with links to {git_url}" if git_url else ""))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
