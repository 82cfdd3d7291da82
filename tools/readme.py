"""README.md from nbs/index.ipynb, so that the front page is run and tested like any other page.

    python tools/readme.py            write README.md and README_files/
    python tools/readme.py --check    change nothing; say what is out of date, exit status 1
"""
import base64
import re
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from moe_redistribution.evidence.table_files import write_sums
from moe_redistribution.basics.files import write_whole

ROOT = Path(__file__).resolve().parent.parent
FILES = "README_files"  # figures, named by their cell's label: a link that survives a reordering of the page
NOTE = "<!-- Made from nbs/index.ipynb by `make readme`: edit the notebook. -->\n\n"


def directives(source):
    "The `#| name: value` lines of a cell, as a dictionary; `#| hide` gives `{'hide': ''}`."
    lines = re.findall(r"^[ \t]*#[ \t]*\|[ \t]*([\w-]+)[ \t]*:?[ \t]*(.*?)[ \t]*$", source, flags=re.M)
    return {name: value.strip("\"'") for name, value in lines}


def from_root(text):
    """Links of a page are relative to nbs/, those of the README to the root; a forge shows notebooks, so they keep
    their names."""
    return re.sub(r"\]\((?!\w+:|#|/)(\.\./)?", lambda m: "](" if m[1] else "](nbs/", text)


def without_site(text):
    """Markdown without what only the site reads: attributes of links and headings, and raw HTML, in whose place stands
    what its first line `<!-- readme: ... -->` says."""
    text = re.sub(r"^```\{=html\}\n(?:<!-- readme: (.*?) -->\n)?.*?^```$", r"\1", text, flags=re.M | re.S)
    return re.sub(r"\{[.#][^}\n]*\}", "", text)


def one_form(output, options, files):
    "Reduce an output to the one form that a forge shows: Markdown, a picture, HTML, plain text, in this order."
    data = output.get("data")
    if data is None:
        return
    if "text/markdown" in data:
        data["text/markdown"] = from_root(data["text/markdown"])
    if "text/markdown" not in data and "image/png" in data:
        name = f"{FILES}/{options['label']}.png"
        files[name] = base64.b64decode(data["image/png"])
        data["text/markdown"] = f"![{options['fig-alt']}]({name})\n\n*{from_root(options['fig-cap'])}*"
    form = next(f for f in ("text/markdown", "text/html", "text/plain") if f in data)
    text = data[form]
    if form == "text/html":  # forges drop or print the style sheet that pandas puts before every table
        text = re.sub(r"<style.*?</style>\s*", "", text, flags=re.S)
    output["data"] = {form: text}


def prepare(cell, files):
    "What is left of a cell for the README, or None."
    if cell.cell_type == "markdown":
        cell.source = from_root(without_site(cell.source))
        return cell
    if cell.cell_type != "code":
        return None
    options = directives(cell.source)
    if options.keys() & {"hide", "export", "exporti", "default_exp"} or "false" in (options.get("include"), options.get("readme")):
        return None
    if options.get("output") == "false":
        cell.outputs = []
    for output in cell.outputs:
        one_form(output, options, files)
    cell.source = re.sub(r"^\s*#\s*\|.*\n?", "", cell.source, flags=re.M).strip()
    if options.get("echo") == "false" or not cell.source:
        cell.metadata["transient"] = {"remove_source": True}
    return cell


def render(notebook):
    "The README's text and its pictures: `{relative path: bytes}`."
    nb, files = nbformat.read(notebook, as_version=4), {}
    nb.cells = [c for c in (prepare(c, files) for c in nb.cells) if c is not None]
    nb.metadata["language_info"] = {"name": "python"}  # nbdev_clean takes it out; the code fences need it
    body, _ = MarkdownExporter().from_notebook_node(nb)
    parts = re.split(r"(^```.*?^```$)", body, flags=re.M | re.S)  # odd ones are code: their blank lines stay
    parts[::2] = [re.sub(r"\n\s*\n(\s*\n)+", "\n\n", p) for p in parts[::2]]
    text = "\n".join(line.rstrip() for line in "".join(parts).strip().splitlines())
    return {"README.md": (NOTE + text + "\n").encode(), **files}


def main():
    wanted = render(ROOT / "nbs" / "index.ipynb")
    there = {p.relative_to(ROOT).as_posix() for p in [ROOT / "README.md", *(ROOT / FILES).glob("*")] if p.exists()}
    stale = sorted(n for n in wanted.keys() | there
                   if n not in wanted or n not in there or (ROOT / n).read_bytes() != wanted[n])
    if "--check" in sys.argv[1:]:
        sys.exit(f"Not what nbs/index.ipynb makes: {', '.join(stale)}. Run `make readme`." if stale else 0)
    for name in stale:
        path = ROOT / name
        if name not in wanted:
            path.unlink()
            continue
        write_whole(path, wanted[name])
    if stale: write_sums(ROOT)
    print(f"wrote {', '.join(stale)}" if stale else "README.md is up to date")


if __name__ == "__main__":
    main()
