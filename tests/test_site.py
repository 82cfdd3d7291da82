"""The notebooks are the source of the package, the site and the README; these tests hold the four to each other."""
import ast
import configparser
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import yaml

from moe_redistribution.report.thumbnails import figure_of

ROOT = Path(__file__).resolve().parent.parent
NBS, LIB = ROOT / "nbs", ROOT / "moe_redistribution"

def is_page(path):  # what nbdev takes for a notebook: nothing that starts with a dot or an underscore
    return not any(part.startswith((".", "_")) for part in path.relative_to(NBS).parts)

PAGES = sorted(p.relative_to(NBS).as_posix() for p in NBS.rglob("*.ipynb") if is_page(p))
MODULES = sorted(p for p in LIB.rglob("*.py") if not p.name.startswith("_"))

@cache
def read(page):
    found = json.loads((NBS / page).read_text(encoding="utf-8"))["cells"]
    return [{**c, "source": "".join(c["source"])} for c in found]

def cells(page, kind=None):
    "The cells of a page, with their source as one string."
    return [c for c in read(page) if kind in (None, c["cell_type"])]

def options(cell):
    "The `#| name: value` lines of a cell."
    lines = re.findall(r"^[ \t]*#[ \t]*\|[ \t]*([\w-]+)[ \t]*:?[ \t]*(.*?)[ \t]*$", cell["source"], flags=re.M)
    return {name: value.strip("\"'") for name, value in lines}

def offenders(among, wrong):
    """A rule is one test and names all that break it: those of `among` (pages, modules) of which `wrong` finds
    something to say, with what it says."""
    return {getattr(x, "stem", x): said for x in among if (said := wrong(x))}

@cache
def prose(page):
    "The Markdown of a page without its code, in which brackets are not links."
    text = "\n\n".join(c["source"] for c in cells(page, "markdown"))
    return re.sub(r"^(```|~~~).*?^\1|`[^`\n]*`", "", text, flags=re.M | re.S)

def output_text(output):
    "Everything that an output says in words."
    texts = [t for form, t in output.get("data", {}).items() if form.startswith("text/")] + [output.get("text", "")]
    return "\n".join("".join(t) for t in texts)

# ------------------------------------------------------------------------------------------------ pages and sidebar

def sidebar():
    def walk(entries):
        for entry in entries:
            if isinstance(entry, str):
                yield entry
            else:
                yield from [entry["href"]] if "href" in entry else []
                yield from walk(entry.get("contents", []))
    return list(walk(yaml.safe_load((ROOT / "_quarto.yml").read_text())["website"]["sidebar"]["contents"]))

def test_every_page_is_in_the_sidebar():
    missing = sorted(set(PAGES) - set(sidebar()))
    assert not missing, f"add to the sidebar in _quarto.yml: {missing}"

def test_every_entry_of_the_sidebar_is_a_page():
    dead = sorted(set(sidebar()) - set(PAGES))
    assert not dead, f"no such notebook under nbs/, take out of the sidebar in _quarto.yml: {dead}"

def test_no_page_is_in_the_sidebar_twice():
    assert not [entry for entry, n in Counter(sidebar()).items() if n > 1]

def test_no_two_pages_have_one_address():
    # nbdev drops the number before a notebook's name, but not the one before its folder: 1_tasks/02_task.ipynb
    # becomes 1_tasks/task.html. Two notebooks that differ in their number only would overwrite each other.
    address = Counter(re.sub(r"(^|/)\d+[a-zA-Z0-9]*_([^/]+)\.ipynb$", r"\1\2.html", page.lower()) for page in PAGES)
    assert not [a for a, n in address.items() if n > 1]

def site():
    return yaml.safe_load((ROOT / "_quarto.yml").read_text())

def test_the_sidebar_has_a_section_a_paper_that_its_overview_opens_and_one_is_open_at_a_time():
    from moe_redistribution.evidence.printed import papers
    shown = site()["website"]["sidebar"]
    groups = {entry["section"]: entry["contents"] for entry in shown["contents"]}
    assert [*groups] == ["Start", *papers().values(), "Beyond the papers", "How we measure", "Reference"]
    assert shown["collapse-level"] == 1 and groups["Start"][0] == "index.ipynb"
    first = {name: groups[name][0] for name in papers().values()}
    assert all(x["href"].endswith("/40_overview.ipynb") for x in first.values()), first

def shown_in_sidebar():
    "Page → what the sidebar calls it: its `text`, or its title."
    named = {e["href"]: e["text"] for group in site()["website"]["sidebar"]["contents"] for e in group["contents"]
             if isinstance(e, dict)}
    return {page: named.get(page) or cells(page)[0]["source"].split("\n")[0].removeprefix("# ") for page in sidebar()}

def test_no_two_entries_of_the_sidebar_read_alike():
    names = shown_in_sidebar()
    alike = [name for name, n in Counter(names.values()).items() if n > 1]
    assert not alike, {page: name for page, name in names.items() if name in alike}

def test_no_entry_of_the_sidebar_names_a_section_of_a_paper():
    refers = r"§|\b(App|Tab|Fig)\.|\b(Table|Figure)s? \d"
    bad = {page: name for page, name in shown_in_sidebar().items() if re.search(refers, name)}
    assert not bad, f"give the entry a `text` in _quarto.yml: {bad}"

def test_every_link_of_the_bar_is_a_page():
    assert {link["href"] for link in site()["website"]["navbar"]["left"]} <= set(PAGES)

def test_figures_fit_and_open_larger_and_the_site_asks_no_other_for_anything():
    html, style = site()["format"]["html"], (NBS / "styles.css").read_text()
    assert html["lightbox"] is True and html["html-math-method"] == "mathml"
    assert re.search(r"img[^{}]*\{[^}]*max-width: 100%; height: auto", style)
    assert (all((NBS / t).is_file() for t in html["theme"][1:])
            and "$web-font-path: false" in (NBS / html["theme"][1]).read_text())

def test_a_page_opens_with_its_title_and_one_line_about_it():
    def wrong(page):
        first = cells(page)[0]
        if first["cell_type"] == "markdown" and re.match(r"# \S.*\n+> \S", first["source"]): return ""
        return first["source"][:60] or "an empty cell"
    bad = offenders(PAGES, wrong)
    assert not bad, f"the first cell should be `# Title`, an empty line, `> one line about it`: {bad}"

def test_a_title_cell_holds_nothing_that_the_site_would_lose():
    # nbdev turns this cell into the page's header and drops everything else that stands in it
    bad = offenders(PAGES, lambda page: [line for line in cells(page)[0]["source"].splitlines()
                                         if line.strip() and not re.match(r"(# |> |- \w+: )", line)])
    assert not bad, f"give this text a cell of its own: {bad}"

# ------------------------------------------------------------------------------------------------------------- links

def pandoc_id(heading):
    "The anchor that pandoc gives a heading."
    explicit = re.search(r"\{[^}]*#([\w:.-]+)[^}]*\}\s*$", heading)
    if explicit:
        return explicit[1]
    text = re.sub(r"\{[^}]*\}\s*$", "", heading)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"[^\w\s.-]", "", text.strip()).lower()
    return re.sub(r"^[^a-z]+", "", re.sub(r"\s+", "-", text.strip())) or "section"

@cache
def anchors(page):
    "Where a link into a page can land: its headings, its labels, and the names that nbdev documents on it."
    text = "\n\n".join(c["source"] for c in cells(page, "markdown"))
    found = {pandoc_id(h) for h in re.findall(r"^#{2,6}\s+(.+?)\s*$", text, flags=re.M)}
    found |= set(re.findall(r"\{#([\w:.-]+)", text))
    for cell in cells(page, "code"):
        found |= {options(cell).get("label", "")}
        if options(cell).keys() & {"export", "exports"}:
            for node in ast.parse(cell["source"]).body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    found |= {node.name.lower()}
    return found - {""}

def dead_links(page):
    dead = []
    for image, link in re.findall(r"(!?)\[[^\]]*\]\(\s*([^)\s]+)[^)]*\)", prose(page)):
        if re.match(r"\w+:", link):  # the web and mail
            continue
        path, _, anchor = link.partition("#")
        target = ((NBS / page).parent / path).resolve() if path else NBS / page
        if target.parent == NBS / "rows" and target.name in {t.name for t in frame.tables(ROOT)}: continue
        if not target.is_file() or NBS not in target.parents:
            dead.append(f"{link}: no such file under nbs/, so none on the site")
        elif not image and target.suffix != ".ipynb":
            dead.append(f"{link}: link to the notebook, which the site turns into its page")
        elif anchor and anchor not in (there := anchors(target.relative_to(NBS).as_posix())):
            dead.append(f"{link}: that page has no heading #{anchor}, only {sorted(there)}")
    return dead

def test_every_link_between_pages_lands():
    bad = offenders(PAGES, dead_links)
    assert not bad, bad

# ----------------------------------------------------------------------------------------------------------- figures

def is_figure(cell):
    return any(form.startswith("image/") for o in cell.get("outputs", []) for form in o.get("data", {}))

def test_no_label_is_used_twice():
    # Quarto refuses to render a site in which two cells share a label
    labels = Counter(options(c)["label"] for page in PAGES for c in cells(page, "code") if "label" in options(c))
    assert not [label for label, n in labels.items() if n > 1]

def bare_figures(page):
    bare = []
    for cell in filter(is_figure, cells(page, "code")):
        lacking = {"label", "fig-cap", "fig-alt"} - {name for name, value in options(cell).items() if value}
        if lacking or not options(cell)["label"].startswith("fig-"):
            bare.append((cell["source"][:60], sorted(lacking) or "a label that starts with fig-"))
    return bare

def test_every_figure_has_a_label_a_caption_and_words_for_those_who_cannot_see_it():
    bad = offenders(PAGES, bare_figures)
    assert not bad, f"cell, and what it lacks: {bad}"

# ------------------------------------------------------------------------------- what the frame adds to processed pages

sys.path.append(str(ROOT / "tools"))
import frame  # noqa: E402  a script, and so no module of the package

def code(source, *outputs):
    return {"cell_type": "code", "source": source, "outputs": [{"data": d} for d in outputs], "metadata": {}}

@pytest.mark.parametrize("source, page, word", [
    ("import torch\nfrom a import b", "2_models/x.ipynb", "set-up"),
    ("assert 1\ntest_eq(2, 2)\nfor x in y: assert x", "2_models/x.ipynb", "3 assertions, all hold"),
    ("x = 1\nassert x", "6_studies/sparsity_moves/x.ipynb", "1 assertion, holds"),
    ('#| code-fold: show\n#| code-summary: "Exported source"\ndef f(): assert 0', "2_models/x.ipynb", "source"),
    ("def f(): assert 0", "2_models/x.ipynb", None),       # a lesson: nothing is asserted yet
    ("def f(): return 0", "6_studies/sparsity_moves/x.ipynb", "set-up"),    # on a page of results it is in the way
    ("#| echo: false\nassert 1", "6_studies/sparsity_moves/x.ipynb", None),
    ("!moe-redistribution --help", "7_record/x.ipynb", None)])
def test_what_a_cell_holds_decides_whether_it_is_folded(source, page, word):
    assert frame.fold(code(source), page) == word
    made, = frame.framed({"cells": [code(source)]}, page)["cells"]
    assert ("".join(made["source"]).count("code-fold: true"),
            "code-fold: show" in "".join(made["source"])) == (bool(word), False)

def test_set_up_in_a_row_is_one_fold_and_what_shows_something_parts_it():
    shows = code("x", {"image/png": ""})
    cells = [code("import os"), code("#| hide_input: true\nx = 1"), shows, code("y = 2"), code("z = 3")]
    made = frame.framed({"cells": cells}, "6_studies/sparsity_moves/x.ipynb")["cells"]
    said = ["".join(c["source"]) for c in made]
    assert len(made) == 3 and "import os" in said[0] and "x = 1" in said[0] and "hide_input" not in said[0]
    assert "y = 2" in said[2] and "z = 3" in said[2] and said[2].count("code-summary") == 1

@pytest.mark.parametrize("form, word", [("image/png", "how this figure is drawn"),
                                        ("text/html", "how this table is made"),
                                        ("text/markdown", "how these words are computed")])
def test_a_page_of_results_shows_figures_tables_and_sentences_before_their_code(form, word):
    made = code("shown", {form: "x", "text/plain": "x"})
    assert frame.fold(made, "6_studies/sparsity_moves/x.ipynb") == word and frame.fold(made, "2_models/x.ipynb") is None

def test_what_a_cell_shows_keeps_its_code_in_view():
    assert frame.fold(code("x = 1\nassert x\nx", {"text/plain": "1"}), "6_studies/sparsity_moves/x.ipynb") is None

def test_a_figure_shows_one_number_and_keeps_its_anchor():
    cell = code('#| label: fig-4\n#| fig-cap: "Figure 4. It holds."\nplot()', {"image/png": ""})
    anchor, made = frame.framed({"cells": [cell]}, "6_studies/sparsity_moves/x.ipynb")["cells"]
    assert ('id="fig-4"' in "".join(anchor["source"])
            and options({"source": "".join(made["source"])})["label"] == "picture-4")
    assert all(isinstance(c["source"], list) for c in (anchor, made))       # of a string Quarto drops the ends of lines

@pytest.mark.parametrize("git_url", ["", "https://forge/a/b"])
def test_no_link_into_a_repository_that_is_not_there(git_url):
    link = f'[source]({git_url and git_url + "/"}blob/main/m.py#L1){{target="_blank" style="float:right"}}\n\n### f\n'
    made, = frame.framed({"cells": [code("show_doc(f)", {"text/markdown": link})]}, "x.ipynb")["cells"]
    assert ("[source]" in "".join(made["outputs"][0]["data"]["text/markdown"]),
            "### f" in str(made)) == (bool(git_url), True)
    assert git_url in str(frame.navbar(git_url)) and bool(frame.navbar(git_url)) == bool(git_url)

def test_a_table_asks_nobody_for_scripts():
    made, = frame.framed({"cells": [code("t", {"text/html": "<table></table>", "text/plain": "t"})]},
                         "x.ipynb")["cells"]
    data = made["outputs"][0]["data"]
    assert "text/html" not in data and data["text/markdown"] == ["```{=html}\n", "<table></table>\n", "```\n"]

# ----------------------------------------------------------------------------------------------------------- glossary

def test_a_word_of_the_glossary_has_an_anchor_of_its_own():
    heads = [re.findall(r"^### (.+?) \{#([a-z0-9-]+)\}$", c["source"], flags=re.M) for c in cells("glossary.ipynb")[1:]]
    anchors_ = [a for found in heads for _, a in found]
    assert len(anchors_) > 40 and not [a for a, n in Counter(anchors_).items() if n > 1]

def test_the_glossary_has_every_word_of_a_verdict():
    from moe_redistribution.evidence.verdicts import VERDICTS
    heads = {h.lower() for c in cells("glossary.ipynb") for h in re.findall(r"^### (.+?) \{", c["source"], flags=re.M)}
    words = {*VERDICTS, "agrees", "differs", "inconclusive", "corrected", "not attempted", "another checkpoint"}
    assert words <= heads, sorted(words - heads)

# ----------------------------------------------------------------------------------------------------------- workflows

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

def steps(path): return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]

def test_a_workflow_runs_no_text_from_outside():
    # what GitHub puts in place of ${{ … }} is text to a shell, and a branch may be called anything: pass it through env
    bad = offenders(WORKFLOWS, lambda path: [s["run"] for s in steps(path) if "${{" in s.get("run", "")])
    assert not bad, bad

def test_a_workflow_runs_no_action_that_can_move():
    pinned = r"uses: \S+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$"
    def loose(path):
        return [line for line in path.read_text().splitlines() if "uses:" in line and not re.search(pinned, line)]
    bad = offenders(WORKFLOWS, loose)
    assert not bad, f"pin it by commit, and write its version beside it: {bad}"

def test_a_workflow_has_no_right_to_write_but_in_the_job_that_needs_it():
    bad = offenders(WORKFLOWS, lambda path: "write" in str(yaml.safe_load(path.read_text())["permissions"]))
    assert not bad, bad

def test_the_workflow_of_the_site_names_its_quarto():
    version, = [s["with"]["version"]
                for s in steps(ROOT / ".github/workflows/site.yml") if "quarto" in s.get("uses", "")]
    assert tuple(map(int, version.split("."))) >= (1, 9)  # the first that writes llms.txt

def test_a_branch_of_any_name_reaches_the_settings_as_an_address():
    name = 'a"; $(touch x) &|\\1%(b)s)#c'
    made = configparser.ConfigParser()
    made.read_string(frame.pointed((ROOT / "settings.ini").read_text(), "https://forge/a/b", name))
    assert made["DEFAULT"]["git_url"] == "https://forge/a/b" and re.fullmatch(r"[\w.~%/-]+", made["DEFAULT"]["branch"])

# ------------------------------------------------------------------------------------------------- cells and outputs

def test_the_sidebar_names_every_section_of_the_main_text():
    titles = "\n".join(cells(page, "markdown")[0]["source"].split("\n")[0]
                       for page in PAGES if page.startswith("6_studies/sparsity_moves/"))
    for section in ("§3", "App. A", "§4.1", "§4.2", "§4.3", "App. B", *(f"App. C.{i}" for i in range(1, 6))):
        assert re.search(rf"{re.escape(section)}(?![\d.]*\d)", titles), section

def test_every_figure_and_table_of_the_main_text_is_on_a_page():
    "A figure in a caption of its own; a table, which is an output, in a heading or a caption."
    paper = [page for page in PAGES if page.startswith("6_studies/sparsity_moves/")]
    captions = [options(c).get("fig-cap", "") for page in paper for c in cells(page, "code")]
    heads = [line for page in paper for c in cells(page, "markdown")
             for line in c["source"].split("\n") if line.startswith("#")]
    def missing(kind, number, shown):
        return not any(re.search(rf"\b{kind}s? (\d+ and )?{number}\b", text) for text in shown)
    lost = [f"Figure {i}" for i in range(1, 15) if missing("Figure", i, captions)]
    lost += [f"Table {i}" for i in range(1, 5) if missing("Table", i, captions + heads)]
    assert not lost, lost

def test_no_stored_output_is_an_error():
    def errors(page):
        return [o["evalue"] for c in cells(page, "code") for o in c["outputs"] if o["output_type"] == "error"]
    bad = offenders(PAGES, errors)
    assert not bad, bad

def test_no_page_shows_a_warning_of_a_library():
    "Deprecated calls fail with the library's next version, and a reader cannot know what a warning means for a number."
    def warned(page):
        said = ["".join(o["text"]) for c in cells(page, "code") for o in c["outputs"] if o.get("name") == "stderr"]
        return [line for text in said for line in text.splitlines() if "Warning: " in line]
    bad = offenders(PAGES, warned)
    assert not bad, f"mend the call and run the page again: {bad}"

def test_a_cell_that_shows_nothing_has_no_result():
    "A cell that was split keeps what it showed before: two pages had their first screen twice, one an old verdict."
    def stale(page):
        def silent(source):
            body = ast.parse("\n".join(x for x in source.splitlines() if not x.lstrip().startswith(("%", "!")))).body
            return not body or not isinstance(body[-1], ast.Expr)
        return [c["source"].splitlines()[0] for c in cells(page, "code")
                if any(o["output_type"] == "execute_result" for o in c["outputs"]) and silent(c["source"])]
    bad = offenders(PAGES, stale)
    assert not bad, f"clear these outputs and run the page again: {bad}"

def test_no_page_is_a_burden_to_load():
    "Half a megabyte at most, pictures included; `make outputs` reduces them to the colours that they have use for."
    bad = offenders(PAGES, lambda page: (size := (NBS / page).stat().st_size) >= 500_000 and size)
    assert not bad, f"bytes: {bad}"

def test_no_page_shows_where_it_was_made():
    # the paths of this machine; a page made elsewhere is caught there
    places = [str(p) for p in (ROOT, Path.home(), Path(tempfile.gettempdir()), Path(sys.prefix)) if len(str(p)) > 3]
    def shown(page):
        texts = [output_text(o) for c in cells(page, "code") for o in c["outputs"]]
        return [place for place in places if any(place + "/" in text for text in texts)]
    bad = offenders(PAGES, shown)
    assert not bad, f"print a name, not a path: {bad}"

# ----------------------------------------------------------------------------------------------- how code is written

def written():
    "Where it stands → source: every code cell without its `#|` lines and commands, every test, every tool."
    for page in PAGES:
        for c in cells(page, "code"):
            yield f"{page} {c['id']}", re.sub(r"^\s*(#\s*\||[%!]).*$", "", c["source"], flags=re.M)
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")

def test_ruff_finds_no_dead_name_no_trap_and_no_function_that_is_too_complex():
    ruff = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "moe_redistribution", "tools", "tests"]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

def test_no_line_of_code_is_wider_than_150_columns():
    # of a module, all but what nbdev writes above its first cell: the page's first sentence and `__all__`
    modules = ((m.relative_to(ROOT).as_posix(), m.read_text(encoding="utf-8").partition("\n# %% ../")[2])
               for m in MODULES)
    wide = [f"{where}: {len(line)} columns: {line.strip()[:60]}"
            for where, source in (*written(), *modules) for line in source.splitlines() if len(line) > 150]
    assert not wide, "\n".join(wide)

PROGRAMS = {"tests/test_kills.py"}        # its long one is the text of a program that a process of its own runs

def f_strings(node):
    "The outermost f-strings in a tree; adjacent pieces are one."
    if isinstance(node, ast.JoinedStr):
        yield node
    else:
        for child in ast.iter_child_nodes(node):
            yield from f_strings(child)

TWICE = {"ATTENTION", "P", "PROTOCOLS", "VARIANTS", "progress"}
OF_STUDIES = {"STUDY", "CONTRASTS", "COMPUTED", "BENCH"}                  # what `of_studies` asks every folder for, by one name

def defined(path):
    "The public names that a module binds at its top level."
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if not any("patch" in ast.unparse(d) for d in node.decorator_list): yield node.name    # else a method
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (n.id for t in targets for n in ast.walk(t)
                        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))

def test_a_public_name_is_defined_in_one_module():
    homes = {}
    for path in MODULES:
        for name in {n for n in defined(path) if not n.startswith("_")}:
            homes.setdefault(name, []).append(path.relative_to(LIB).with_suffix("").as_posix().replace("/", "."))
    twice = {name: at for name, at in sorted(homes.items()) if len(at) > 1 and name not in TWICE | OF_STUDIES}
    assert not twice, f"give each a name that says what it is: {twice}"

# ------------------------------------------------------------------------------- the package is what the notebooks say

def nbdev(statement, folder):
    "Run nbdev in a copy of the project. IN_TEST would make its exporter do nothing, PYTHONPATH is its own business."
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
    done = subprocess.run([sys.executable, "-c", statement], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

@pytest.fixture
def copy(tmp_path):
    "A copy of what nbdev reads, so that no test writes into the checkout."
    shutil.copy(ROOT / "settings.ini", tmp_path)
    hidden = shutil.ignore_patterns(".*", "__pycache__")
    shutil.copytree(NBS, tmp_path / NBS.name, ignore=hidden)
    shutil.copytree(LIB, tmp_path / LIB.name, ignore=hidden)
    return tmp_path

def test_modules_are_what_the_notebooks_export(copy):
    for module in (copy / LIB.name).rglob("*.py"):
        if module.name not in ("__init__.py", "__main__.py"):                    # these two no notebook can export
            module.unlink()
    nbdev("from nbdev.doclinks import nbdev_export; nbdev_export.__wrapped__()", copy)
    made, held = ({p.relative_to(at).as_posix(): p.read_text(encoding="utf-8") for p in at.rglob("*.py")}
                  for at in (copy / LIB.name, LIB))
    assert not held.keys() - made.keys(), f"no notebook exports {sorted(held.keys() - made.keys())}: remove them"
    differing = sorted(name for name in made if made[name] != held.get(name))
    assert not differing, f"run `nbdev_export`: {differing} differ from their notebooks"

def test_notebooks_are_clean(copy):
    nbdev("from nbdev.clean import nbdev_clean; nbdev_clean.__wrapped__()", copy)
    dirty = [page for page in PAGES if (copy / NBS.name / page).read_bytes() != (NBS / page).read_bytes()]
    assert not dirty, f"run `nbdev_clean`: it would change {dirty}"

def test_package_citation_and_settings_name_one_version():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "settings.ini")
    version = settings["DEFAULT"]["version"]
    assert f'__version__ = "{version}"' in (LIB / "__init__.py").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version

@cache
def exported():
    "Module (as in `tasks.data`) → the notebook that exports it; notebooks in the order of their folders and numbers."
    found = {page: re.findall(r"^#\s*\|\s*default_exp\s+(\S+)", "\n".join(c["source"] for c in cells(page, "code")),
                              flags=re.M) for page in PAGES}
    return {names[0]: page for page, names in found.items() if names}

def test_a_folder_of_notebooks_is_a_subpackage():
    there = {m.relative_to(LIB).with_suffix("").as_posix().replace("/", ".") for m in MODULES}
    assert there == {m for m in exported() if not m.endswith("__init__")}
    apart = {m: page for m, page in exported().items()
             if Path(page).parent.as_posix().partition("_")[2] != m.rpartition(".")[0].replace(".", "/")}
    assert not apart, f"a notebook in nbs/2_models/ exports models.something: {apart}"

def imports(module):
    "The rooms that a module imports, as in `tasks.data`."
    here = module.relative_to(LIB).with_suffix("").parts
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from [a.name.partition(".")[2] for a in node.names if a.name.startswith(f"{LIB.name}.")]
        if isinstance(node, ast.ImportFrom):
            path = [p for p in (node.module or "").split(".") if p]
            if node.level: path = [*here[:len(here) - node.level], *path]
            elif path[:1] == [LIB.name]: path = path[1:]
            else: continue
            known = exported()
            yield from [".".join(path)] if ".".join(path) in known else [".".join([*path, a.name]) for a in node.names]

def test_nothing_flows_backwards():
    """A room imports rooms of earlier parts, and earlier rooms of its own; folders and numbers of notebooks are the
    order."""
    known = exported()
    order = {m: i for i, m in enumerate(known)}
    backwards = [(name, other) for m in MODULES
                 for name in [m.relative_to(LIB).with_suffix("").as_posix().replace("/", ".")]
                 for other in imports(m) if other in order and order[other] >= order[name]]
    assert not backwards, backwards

def test_a_room_outside_the_studies_knows_only_their_folder():
    """What a study has is asked of the registry that its folder is; only where `of_studies` is defined is the folder
    imported."""
    found = {(m.relative_to(LIB).as_posix(), other) for m in MODULES if m.relative_to(LIB).parts[0] != "studies"
             for other in imports(m) if other.split(".")[0] == "studies"}
    assert found == {("training/study.py", "studies")}, found

def test_a_module_fits_in_550_lines():
    bad = offenders(MODULES, lambda m: (n := len(m.read_text(encoding="utf-8").splitlines())) > 550 and n)
    assert not bad, bad

def test_readme_is_what_the_front_page_says():
    done = subprocess.run([sys.executable, ROOT / "tools" / "readme.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

def test_imports_stand_in_cells_of_their_own():
    """The site's build runs every cell that imports something, and no other, so it may not need names from
    elsewhere."""
    def kinds(source): return {isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(source).body}
    bad = offenders(PAGES, lambda page: [c["source"][:80] for c in cells(page, "code")
                                         if "nbdev_export" not in c["source"] and len(kinds(c["source"])) == 2])
    assert not bad, f"split these cells: {bad}"

def test_what_a_cell_imports_is_there():
    "Pages that only the second tier runs are read at every change, too."
    def missing(page):
        ours = [n for c in cells(page, "code") if "import" in c["source"] and "%" not in c["source"]
                for n in ast.parse(c["source"]).body
                if isinstance(n, ast.ImportFrom) and n.module.startswith("moe_redistribution")]
        return [f"{n.module}.{a.name}" for n in ours for a in n.names
                if not hasattr(module := importlib.import_module(n.module), a.name) and a.name != "*"
                and not importlib.util.find_spec(f"{module.__name__}.{a.name}")]
    assert not (bad := offenders([p for p in PAGES if not p.startswith("_")], missing)), bad

def unusable(block):
    "What is wrong with Python that a reader copies from the text, if anything."
    tree = ast.parse(block)
    ours = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module.startswith("moe_redistribution")]
    for n in ours:
        try: exec(ast.unparse(n), {})
        except ImportError as e: return str(e)
    named = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names}
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    lost = ({"train", "conditions_for"} & called) - named if ours else set()
    return lost and f"calls {sorted(lost)} and does not import it"

def test_code_shown_in_the_text_imports_what_is_there():
    def shown(page):
        text = "\n\n".join(c["source"] for c in cells(page, "markdown"))
        return re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    bad = offenders(PAGES, lambda page: [said for block in shown(page) if (said := unusable(block))])
    assert not bad, bad

def test_every_picture_of_the_one_screen_page_is_the_figure_that_its_page_holds():
    cells_ = json.loads((NBS / "papers.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(o.get("data", {}).get("text/markdown", [])) for c in cells_ for o in c.get("outputs", []))
    shown = re.findall(r'<img src="([^"]+)"[^>]* data-source="([^"]+)"', text)
    old = [source for picture, source in shown if figure_of(*source.split("#")) != picture]
    assert len(shown) > 20 and not old, f"make outputs NB=nbs/papers.ipynb: {old}"
