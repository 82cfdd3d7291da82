"""What every page, module, workflow and test keeps. Each rule is a sentence; it looks at every one of its kind and
names all that break it at once."""
import ast
import builtins
import configparser
import importlib
import importlib.util
import json
import keyword
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

from moe_redistribution.judge.verdicts import VERDICTS
from moe_redistribution.report.tables import MARKS
from moe_redistribution.report.thumbnails import SHADES, SIGNS, figure_of

ROOT = Path(__file__).resolve().parent.parent
NBS, LIB = ROOT / "nbs", ROOT / "moe_redistribution"
sys.path.append(str(ROOT / "tools"))
import frame  # noqa: E402  scripts, and so no modules of the package
import readme  # noqa: E402


def is_page(path):  # what nbdev takes for a notebook: nothing that starts with a dot or an underscore
    return not any(part.startswith((".", "_")) for part in path.relative_to(NBS).parts)

PAGES = sorted(p.relative_to(NBS).as_posix() for p in NBS.rglob("*.ipynb") if is_page(p))
READ_FIRST = r"(index|use|tutorial|status|figures_tables|claims)\.ipynb|10_studies/\w+/(?!0)"
TOLD = [p for p in PAGES if re.match(READ_FIRST, p)]
RESULTS = [p for p in TOLD if re.match(r"10_studies/\w+/[1-9]", p)]
PAPER = [p for p in PAGES if p.startswith("10_studies/sparsity_moves/")]
MODULES = sorted(p for p in LIB.rglob("*.py") if not p.name.startswith("_"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SITE = ["the site"]                                             # of a rule that looks at everything together
CODE = [*sorted(LIB.rglob("*.py")), *sorted((ROOT / "tools").glob("*.py"))]

RULES = {}

def rule(among, fix=""):
    "Makes a rule of a function that says what is wrong with one of `among`, or nothing."
    def add(wrong):
        RULES[wrong.__name__] = among, wrong, fix
        return wrong
    return add

def offenders(among, wrong):
    "Those of `among` (pages, modules) of which `wrong` finds something to say, with what it says."
    return {getattr(x, "stem", x): said for x in among if (said := wrong(x))}

# ------------------------------------------------------------------------------------------------ how a page is read

@cache
def read(page):
    found = json.loads((NBS / page).read_text(encoding="utf-8"))["cells"]
    return [{**c, "source": "".join(c["source"])} for c in found]

def cells(page, kind=None):
    "The cells of a page, with their source as one string."
    return [c for c in read(page) if kind in (None, c["cell_type"])]

def options(cell):
    "The `#| name: value` lines of a cell."
    return frame.options(cell["source"])

def marked(page): return "\n\n".join(c["source"] for c in cells(page, "markdown"))

@cache
def prose(page):
    "The Markdown of a page without its code, in which brackets are not links."
    return re.sub(r"^(```|~~~).*?^\1|`[^`\n]*`", "", marked(page), flags=re.M | re.S)

def output_text(output):
    "Everything that an output says in words."
    texts = [t for form, t in output.get("data", {}).items() if form.startswith("text/")] + [output.get("text", "")]
    return "\n".join("".join(t) for t in texts)

def body(source):
    "What a cell runs, its magics and commands left out."
    return ast.parse("\n".join(x for x in source.splitlines() if not x.lstrip().startswith(("%", "!")))).body

@cache
def tree(path): return ast.parse(path.read_text(encoding="utf-8"))

# ------------------------------------------------------------------------------------------------ pages and sidebar

@cache
def site(): return yaml.safe_load((ROOT / "_quarto.yml").read_text())

def sidebar():
    def walk(entries):
        for entry in entries:
            if isinstance(entry, str): yield entry
            else:
                yield from [entry["href"]] if "href" in entry else []
                yield from walk(entry.get("contents", []))
    return list(walk(site()["website"]["sidebar"]["contents"]))

@rule(SITE, "mend the sidebar in _quarto.yml")
def the_sidebar_has_every_page_once_and_nothing_else(_):
    return sorted(set(PAGES) ^ set(sidebar())) + [entry for entry, n in Counter(sidebar()).items() if n > 1]

@rule(SITE)
def every_link_of_the_bar_is_a_page(_):
    return {link["href"] for link in site()["website"]["navbar"]["left"]} - set(PAGES)

@rule(SITE)
def no_two_pages_have_one_address(_):
    # nbdev drops the number before a notebook's name, but not the one before its folder: 01_tasks/01_task.ipynb
    # becomes 01_tasks/task.html. Two notebooks that differ in their number only would overwrite each other.
    address = Counter(re.sub(r"(^|/)\d+[a-zA-Z0-9]*_([^/]+)\.ipynb$", r"\1\2.html", page.lower()) for page in PAGES)
    return [a for a, n in address.items() if n > 1]

def shown_in_sidebar():
    "Page → what the sidebar calls it: its `text`, or its title."
    def walk(entries):
        for e in (e for e in entries if isinstance(e, dict)):
            if "href" in e: yield e["href"], e.get("text") or e["section"]
            yield from walk(e.get("contents", []))
    named = dict(walk(site()["website"]["sidebar"]["contents"]))
    return {page: named.get(page) or cells(page)[0]["source"].split("\n")[0].removeprefix("# ") for page in sidebar()}

@rule(SITE)
def no_two_entries_of_the_sidebar_read_alike(_):
    names = shown_in_sidebar()
    n = Counter(names.values())
    return {page: name for page, name in names.items() if n[name] > 1}

def test_a_reader_with_the_pdf_finds_each_section_and_appendix_by_its_number():
    names = shown_in_sidebar().values()
    for number in "2 3 4.1 4.2 4.3 5 B C.1 C.2 C.3 C.4 C.5 D E F G H I".split():
        assert [n for n in names if n.startswith(f"{number} ")], number

def test_the_site_asks_no_other_for_anything():
    html = site()["format"]["html"]
    assert html["html-math-method"] == "mathml"
    for themes in html["theme"].values():                                        # light and dark
        themes = [NBS / t for t in themes[1:]]
        assert all(t.is_file() for t in themes) and "$web-font-path: false" in themes[0].read_text()

@rule(PAGES, "the first cell should be `# Title`, an empty line, `> one line about it`")
def a_page_opens_with_its_title_and_one_line_about_it(page):
    first = cells(page)[0]
    if first["cell_type"] == "markdown" and re.match(r"# \S.*\n+> \S", first["source"]): return ""
    return first["source"][:60] or "an empty cell"

@rule(PAGES, "nbdev makes the page's header of this cell and drops what else stands in it: give it a cell of its own")
def a_title_cell_holds_nothing_that_the_site_would_lose(page):
    return [line for line in cells(page)[0]["source"].splitlines()
            if line.strip() and not re.match(r"(# |> |- \w+: )", line)]

# ------------------------------------------------------------------------------------------------------------- links

def pandoc_id(heading):
    "The anchor that pandoc gives a heading."
    if explicit := re.search(r"\{[^}]*#([\w:.-]+)[^}]*\}\s*$", heading): return explicit[1]
    text = re.sub(r"\{[^}]*\}\s*$", "", heading)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"[^\w\s.-]", "", text.strip()).lower()
    return re.sub(r"^[^a-z]+", "", re.sub(r"\s+", "-", text.strip())) or "section"

@cache
def anchors(page):
    "Where a link into a page can land: its headings, its labels, and the names that nbdev documents on it."
    found = {pandoc_id(h) for h in re.findall(r"^#{2,6}\s+(.+?)\s*$", marked(page), flags=re.M)}
    found |= set(re.findall(r"\{#([\w:.-]+)", marked(page)))
    for cell in cells(page, "code"):
        found |= {options(cell).get("label", "")}
        if options(cell).keys() & {"export", "exports"}:
            found |= {n.name.lower() for n in ast.parse(cell["source"]).body
                      if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    return found - {""}

@rule(PAGES)
def every_link_between_pages_lands(page):
    dead = []
    for image, link in re.findall(r"(!?)\[[^\]]*\]\(\s*([^)\s]+)[^)]*\)", prose(page)):
        if re.match(r"\w+:", link): continue                                                    # the web and mail
        path = link.partition("#")[0]
        target = ((NBS / page).parent / path).resolve() if path else NBS / page
        if target.parent == NBS / "rows" and target.name in {t.name for t in frame.tables(ROOT)}: continue
        if not target.is_file() or NBS not in target.parents:
            dead.append(f"{link}: no such file under nbs/, so none on the site")
        elif not image and target.suffix != ".ipynb":
            dead.append(f"{link}: link to the notebook, which the site turns into its page")
    return dead                                                    # whether its anchor is there: tests/test_links.py

# ----------------------------------------------------------------------------------------------------------- figures

@rule(SITE, "Quarto refuses to render a site in which two cells share a label")
def no_label_is_used_twice(_):
    labels = Counter(options(c)["label"] for page in PAGES for c in cells(page, "code") if "label" in options(c))
    return [label for label, n in labels.items() if n > 1]

@rule(PAGES, "cell, and what it lacks")
def every_figure_has_a_label_a_caption_and_words_for_those_who_cannot_see_it(page):
    bare = []
    for cell in cells(page, "code"):
        if not any(form.startswith("image/") for o in cell["outputs"] for form in o.get("data", {})): continue
        lacking = {"label", "fig-cap", "fig-alt"} - {name for name, value in options(cell).items() if value}
        if lacking or not options(cell)["label"].startswith("fig-"):
            bare.append((cell["source"][:60], sorted(lacking) or "a label that starts with fig-"))
    return bare

@rule(SITE)
def every_figure_and_table_of_the_main_text_is_on_a_page(_):
    "A figure in a caption of its own; a table, which is an output, in a heading or a caption."
    captions = [options(c).get("fig-cap", "") for page in PAPER for c in cells(page, "code")]
    heads = [line for page in PAPER for line in marked(page).split("\n") if line.startswith("#")]
    def missing(kind, number, shown):
        return not any(re.search(rf"\b{kind}s? (\d+ and )?{number}\b", text) for text in shown)
    return ([f"Figure {i}" for i in range(1, 15) if missing("Figure", i, captions)]
            + [f"Table {i}" for i in range(1, 5) if missing("Table", i, captions + heads)])

@rule(SITE)
def a_title_names_every_section_of_the_main_text(_):
    titles = "\n".join(cells(page)[0]["source"].split("\n")[0] for page in PAPER)
    sections = ("§3", "App. A", "§4.1", "§4.2", "§4.3", "App. B", *(f"App. C.{i}" for i in range(1, 6)))
    return [s for s in sections if not re.search(rf"{re.escape(s)}(?![\d.]*\d)", titles)]

@rule(SITE, "make outputs NB=nbs/papers.ipynb")
def every_picture_of_the_one_screen_page_is_the_figure_that_its_page_holds(_):
    text = "".join(output_text(o) for c in cells("papers.ipynb", "code") for o in c["outputs"])
    shown = {*re.findall(r'<img src="([^"]+)"[^>]* data-source="([^"]+)"', text)}
    assert len(shown) > 20
    return [source for picture, source in shown if figure_of(*source.split("#")) != picture]

# ---------------------------------------------------------------------------------------------------------- glossary

def glossary(): return re.findall(r"^### (.+?) \{#([a-z0-9-]+)\}$", marked("glossary.ipynb"), flags=re.M)

def test_a_word_of_the_glossary_has_an_anchor_of_its_own_and_every_verdict_is_a_word():
    own = [a for _, a in glossary()]
    assert len(own) > 40 and len(own) == len({*own})
    heads = {h.lower() for h in re.findall(r"^### (.+?) \{", marked("glossary.ipynb"), flags=re.M)}
    assert {*VERDICTS, *MARKS} <= heads
    assert SHADES.keys() == SIGNS.keys() == MARKS.keys() - {"not attempted"}

# --------------------------------------------------------------------------------------------------------- workflows

def steps(path): return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]

@rule(WORKFLOWS, "${{ … }} becomes text to a shell, and a branch may be called anything: pass it through env")
def a_workflow_runs_no_text_from_outside(path): return [s["run"] for s in steps(path) if "${{" in s.get("run", "")]

@rule(WORKFLOWS, "pin it by commit, and write its version beside it")
def a_workflow_runs_no_action_that_can_move(path):
    pinned = r"uses: \S+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$"
    return [line for line in path.read_text().splitlines() if "uses:" in line and not re.search(pinned, line)]

@rule(WORKFLOWS)
def a_workflow_has_no_right_to_write_but_in_the_job_that_needs_it(path):
    return "write" in str(rights := yaml.safe_load(path.read_text())["permissions"]) and rights

@rule(WORKFLOWS, "1.9 is the first that writes llms.txt")
def a_workflow_that_sets_up_quarto_names_its_version(path):
    named = [s.get("with", {}).get("version", "0") for s in steps(path) if "quarto" in s.get("uses", "")]
    assert named or path.stem != "site"
    return [v for v in named if tuple(map(int, v.split("."))) < (1, 9)]

# ------------------------------------------------------------------------------------------------- cells and outputs

@rule(PAGES)
def no_stored_output_is_an_error(page):
    return [o["evalue"] for c in cells(page, "code") for o in c["outputs"] if o["output_type"] == "error"]

@rule(PAGES, "mend the call and run the page again")
def no_page_shows_a_warning_of_a_library(page):
    "Deprecated calls fail with the library's next version, and a reader cannot know what a warning means for a number."
    said = ["".join(o["text"]) for c in cells(page, "code") for o in c["outputs"] if o.get("name") == "stderr"]
    return [line for text in said for line in text.splitlines() if "Warning: " in line]

@rule(PAGES, "clear these outputs and run the page again")
def a_cell_that_shows_nothing_has_no_result(page):
    "A cell that was split keeps what it showed before: two pages had their first screen twice, one an old verdict."
    def silent(source): return not (lines := body(source)) or not isinstance(lines[-1], ast.Expr)
    return [c["source"].splitlines()[0] for c in cells(page, "code")
            if any(o["output_type"] == "execute_result" for o in c["outputs"]) and silent(c["source"])]

@rule(PAGES, "`make outputs` reduces pictures to the colours that they have use for; bytes")
def no_page_is_a_burden_to_load(page): return (size := (NBS / page).stat().st_size) >= 500_000 and size

@rule(PAGES, "print a name, not a path")
def no_page_shows_where_it_was_made(page):
    # the paths of this machine; a page made elsewhere is caught there
    places = [str(p) for p in (ROOT, Path.home(), Path(tempfile.gettempdir()), Path(sys.prefix)) if len(str(p)) > 3]
    texts = [output_text(o) for c in cells(page, "code") for o in c["outputs"]]
    return [place for place in places if any(place + "/" in text for text in texts)]

@rule(PAGES, "the site's build runs every cell that imports something, and no other: split these cells")
def imports_stand_in_cells_of_their_own(page):
    def kinds(source): return {isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(source).body}
    return [c["source"][:80] for c in cells(page, "code")
            if "nbdev_export" not in c["source"] and len(kinds(c["source"])) == 2]

@rule(PAGES)
def what_a_cell_imports_is_there(page):
    "Pages that only the second tier runs are read at every change, too."
    ours = [n for c in cells(page, "code") if "import" in c["source"] and "%" not in c["source"]
            for n in ast.parse(c["source"]).body
            if isinstance(n, ast.ImportFrom) and n.module.startswith("moe_redistribution")]
    return [f"{n.module}.{a.name}" for n in ours for a in n.names
            if not hasattr(module := importlib.import_module(n.module), a.name) and a.name != "*"
            and not importlib.util.find_spec(f"{module.__name__}.{a.name}")]

def unusable(block):
    "What is wrong with Python that a reader copies from the text, if anything."
    nodes = [*ast.walk(ast.parse(block))]
    ours = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module.startswith("moe_redistribution")]
    for n in ours:
        try: exec(ast.unparse(n), {})
        except ImportError as e: return str(e)
    named = {a.asname or a.name for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names}
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    lost = ({"train", "conditions_for"} & called) - named if ours else set()
    return lost and f"calls {sorted(lost)} and does not import it"

@rule(PAGES)
def code_shown_in_the_text_imports_what_is_there(page):
    blocks = re.findall(r"^```python\n(.*?)^```", marked(page), flags=re.M | re.S)
    return [said for block in blocks if (said := unusable(block))]

# ----------------------------------------------------------------------------------------- how result pages are told

BLOCK = r"^(```|~~~).*?^\1|<(style|script|svg|pre|code)\b.*?</\2>"

@cache
def parts(page):
    "(kind, text) of what a reader of the rendered page sees: 'prose' in Markdown, 'caption', 'html'; no code."
    found = []
    for cell in cells(page):
        if cell["cell_type"] == "markdown": found.append(("prose", cell["source"]))
        if cell["cell_type"] != "code" or "hide" in options(cell) or options(cell).get("include") == "false": continue
        found += [("caption", x) for x in re.findall(r"^#\| (?:fig|tbl)-cap: [\"']?(.*?)[\"']?$", cell["source"], re.M)]
        for data in (o.get("data", {}) for o in cell["outputs"]):
            shown = [(kind, "".join(data[form])) for form, kind in (("text/markdown", "prose"), ("text/html", "html"))
                     if form in data]
            found += shown[:1]
    return found

def tables(page):
    "Every table that a page shows: 'html', 'folded' or 'pipe', its text, and what stands right after a pipe table."
    for kind, text in parts(page):
        if kind == "caption": continue
        if kind == "html" and "<details><summary>" in text:                               # folded behind its caption
            yield "folded", text, ""
            continue
        if kind == "prose": text = re.sub(BLOCK, "", text, flags=re.M | re.S)
        yield from (("html", t, "") for t in re.findall(r"<table.*?</table>", text, re.S))
        if kind == "prose":
            for m in re.finditer(r"((?:^\|.*\n?)+)(.*(?:\n.*)?)", text, re.M): yield "pipe", m[1], m[2]

@rule(TOLD)
def a_table_says_what_it_shows(page):
    "By a <caption>, a `: caption` line, or a *line in italics* below a pipe table."
    said = {"html": lambda t, after: re.search(r"<caption[^>]*>\s*\S", t),
            "folded": lambda t, after: re.search(r"<summary>\s*[^<\s]", t),
            "pipe": lambda t, after: re.match(r"\s*(:\s*\S|\*[^*\s])", after)}
    return [re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", t))[:70] for form, t, after in tables(page)
            if not said[form](t, after)]

# ----------------------------------------------------------------------------------------------- how code is written

def written():
    "Where it stands → source: every code cell without its `#|` lines and commands, every module, test and tool."
    for page in PAGES:
        for c in cells(page, "code"):
            yield f"{page} {c['id']}", re.sub(r"^\s*(#\s*\||[%!]).*$", "", c["source"], flags=re.M)
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for m in MODULES:        # but for what nbdev writes above the first cell: the page's first sentence and `__all__`
        yield m.relative_to(ROOT).as_posix(), m.read_text(encoding="utf-8").partition("\n# %% ../")[2]

@rule(SITE)
def ruff_finds_no_dead_name_no_trap_and_no_function_that_is_too_complex(_):
    ruff = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "moe_redistribution", "tools", "tests"]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    return done.returncode and done.stdout + done.stderr

WIDER = "10_studies/", "index", "tests/", "tools/", "moe_redistribution/studies/"       # where prose still stands in code

@rule(SITE)
def no_line_of_code_is_wider_than_120_columns_nor_one_of_a_study_than_150(_):
    return [f"{where}: {len(line)} columns: {line.strip()[:60]}" for where, source in written()
            for line in source.splitlines() if len(line) > (150 if where.startswith(WIDER) else 120)]

def room(path): return path.relative_to(LIB).with_suffix("").as_posix().replace("/", ".")

def defined(path):
    "The public names that a module binds at its top level; what is patched into a class is a method."
    for node in tree(path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if not any("patch" in ast.unparse(d) for d in node.decorator_list): yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for t in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from (n.id for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))

TWICE = {"ATTENTION", "P", "PROTOCOLS", "VARIANTS", "progress"}
TWICE |= {"STUDY", "CONTRASTS", "COMPUTED", "BENCH"}            # what `of_studies` asks every folder for, by one name

@rule(SITE, "give each a name that says what it is")
def a_public_name_is_defined_in_one_module(_):
    homes = {}
    for path in MODULES:
        for name in {n for n in defined(path) if not n.startswith("_")}: homes.setdefault(name, []).append(room(path))
    return {name: at for name, at in sorted(homes.items()) if len(at) > 1 and name not in TWICE}

@rule(MODULES)
def a_module_fits_in_550_lines(path): return (n := len(path.read_text(encoding="utf-8").splitlines())) > 550 and n

@rule(MODULES, "cut it where it begins to be about something else; lines, with signature and docstring")
def no_function_is_longer_than_30_lines(path):
    return [(f.name, n) for f in ast.walk(tree(path)) if isinstance(f, ast.FunctionDef)
            and (n := f.end_lineno - f.lineno + 1) > 30]

@rule([m for m in MODULES if room(m) != "basics.commands"], "Callable and object are types, these are functions")
def no_hint_is_a_function_of_pythons_own(path):
    hints = [getattr(n, f, None) for n in ast.walk(tree(path)) for f in ("annotation", "returns")]
    return [h.lineno for h in hints if isinstance(h, ast.Name) and h.id in ("callable", "any", "all", "iter")]

def refused_by_hand(node):
    "Does it raise a message of the form that `refuse` has?"
    def said(x):
        if isinstance(x, ast.JoinedStr): return "".join(said(v) for v in x.values)
        return x.value if isinstance(x, ast.Constant) and isinstance(x.value, str) else ""
    return (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
            and any(re.search(r": expected .*[,;] got", said(a)) for a in node.exc.args))

@rule([m for m in MODULES if room(m) != "basics.errors"], "call refuse (with error=) or choose; lines")
def a_refusal_is_one_message_and_made_by_refuse(path):
    return [n.lineno for n in ast.walk(tree(path)) if refused_by_hand(n)]

# --------------------------------------------------------------------------- names that words speak of are there, and public

# of other tools, whose names they are; a metric whose end is worked out; what a shell is told to complete
NOT_OURS = {"TransformerBridge", "retained", "prune_moe_layer", "rebalance_experts", "norm_attn", "_moe_redistribution"}
GIVEN = {"_Command", "_Busy"}                          # classes of what a function gives or raises, which nobody makes

def strings(path):
    "(text, is it a docstring, is it of something private) of every string of a module."
    def walk(node, private):
        named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        private = private or named and re.match("_(?!_)", node.name) is not None
        doc = node.body[0] if (named or isinstance(node, ast.Module)) and ast.get_docstring(node) else None
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and isinstance(child.value, str): yield child.value, False, private
            if child is doc: yield child.value.value, True, private
            else: yield from walk(child, private)
    return walk(tree(path), False)

@cache
def names_in_code():
    "All names that stand in the package's code."
    found = {*dir(builtins), *keyword.kwlist, *(part for m in MODULES for part in room(m).split("."))}
    for node in (n for p in MODULES for n in ast.walk(tree(p))):
        found |= {getattr(node, f) for f in ("id", "attr", "arg", "name", "asname") if isinstance(getattr(node, f, 0), str)}
    return found

@cache
def words_in_code():
    "These, and all words of its strings: columns, options, words of registries."
    texts = (t for p in MODULES for t, doc, _ in strings(p) if not doc and "`" not in t)
    return names_in_code() | NOT_OURS | {w for t in texts for w in re.findall(r"[A-Za-z_]\w*", t)}

def spoken_of(text, doc, private):
    "The names in a text that are not there: in backticks, or called in a message; private ones, but where it is private, too."
    quoted = [re.sub(r"\"[^\"]*\"|'[^']*'", "", q) for q in re.findall(r"`([^`\n]+)`", text)]
    dotted = [n for q in quoted if not re.search(r" |\d", q) for n in re.findall(r"(?<![\w.@/-])[A-Za-z_][\w.]*\w(?![\w/-])", q)]
    called = [] if doc else re.findall(r"(?<![\w.])(?<!class )([A-Za-z_]\w+[^\W_])\(", text)
    lost = [n for n in dotted if not {*n.split(".")} <= words_in_code()]
    lost += [n for n in called if n not in names_in_code() and n not in NOT_OURS]
    hidden = [n for n in [*dotted, *called] if re.match("_(?!_)", n.rpartition(".")[2]) and n not in NOT_OURS | GIVEN]
    return lost + ([] if doc and private else hidden)

@rule(MODULES, "a name in backticks, or one that a message says to call, is there under this name, and public")
def words_speak_of_names_that_are_there(path):
    return [n for t, doc, private in strings(path) for n in spoken_of(t, doc, private)]

def test_a_name_that_is_not_there_or_private_is_seen():
    assert spoken_of("As `at_all`, and `subject`.", True, False) == []
    assert spoken_of("As `instruments.Instrument` has it.", True, False) == ["instruments.Instrument"]
    assert spoken_of("As `_one_call`.", True, False) == ["_one_call"] and spoken_of("As `_one_call`.", True, True) == []
    assert spoken_of("; in Python write_claim_rows(", False, True) == ["write_claim_rows"]

# --------------------------------------------------------------------------------------- how files are written and read

WRITES = {"files.py replace_file": "the one way: a temporary file, fsync, rename",
          "files.py lock": "says in the lock's own file whose it is, which another file in its place would not lock",
          "check.py _forge": "into a copy that is thrown away, whose sums must not follow",
          "frame.py main": "into _proc/, which every build makes anew, and settings.ini of a build that is thrown away",
          "after.py llms": "into the rendered site, which every build makes anew", "after.py finds": "the same",
          "after.py main": "the same",
          "new.py _lay_down": "into a folder beside the place, which is renamed when it is whole",
          "ticks.py drawn": "adds a line to the file that TICKS names while a page runs"}
READS = {"table_files.py _manifest": "`manifest` has looked", "recorded_claims.py _former": "`of_clone` has looked",
         "recorded_claims.py _ledger": "the same",
         "registrations.py from_git": "what git holds",
         "selection.py _runs": "`recorded_runs` has looked",
         "printed.py read": "callers of `checked_table` have: `of_clone`, `check_sum`, `study_tables`",
         "printed.py study_lines": "`study_tables` has looked",
         "coverage.py _by_line": "a map over files that `of_clone` has seen", "same_results.py frames": "of two commits",
         "versions.py _rows_then": "a version in git", "versions.py _held": "the same",
         "some_answers.py _contrasts": "a text that was made from `as_committed`",
         "registrations.py _cells": "versions in git, or `as_committed`"}
ONE_WRITER = {"files.py csv_lines": "twelve digits", "properties.py _rows_text": "a text that is compared"}
LIBRARIES = {"torch", "np", "numpy", "plt", "pickle"}

def found_in_code(is_one):
    "`file function` of every node of the package and of tools for which `is_one` holds."
    def walk(node, where):
        if isinstance(node, ast.FunctionDef): where = f"{where.partition(' ')[0]} {node.name}"
        if is_one(node): yield where
        for child in ast.iter_child_nodes(node): yield from walk(child, where)
    return {where for p in CODE for where in walk(tree(p), p.name)}

def writes(node):
    "Does a call write a file by itself? To write into memory (`data := BytesIO()`, or no place at all) is none."
    if not isinstance(node, ast.Call): return False
    name, args = getattr(node.func, "attr", getattr(node.func, "id", "")), node.args
    if name in ("write_text", "write_bytes", "save_file", "to_pickle"): return True
    if name in ("to_csv", "to_parquet", "savefig", "to_json"):
        return bool(args) and not isinstance(args[0], ast.NamedExpr)
    if name in ("save", "savez", "dump"): return getattr(getattr(node.func, "value", 0), "id", "") in LIBRARIES
    modes = [a.value for a in [*args[:2], *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
    return name == "open" and any(re.fullmatch("[rwxabt+]+", str(m)) and set(m) & set("wxa+") for m in modes)

@rule(SITE, "use write_whole")
def nothing_in_the_package_or_in_tools_writes_a_file_in_another_way(_): return found_in_code(writes) ^ {*WRITES}

@rule(SITE, "use csv_lines")
def every_table_has_the_digits_of_one_writer(_):
    return found_in_code(lambda node: getattr(node, "attr", "") == "to_csv") ^ {*ONE_WRITER}

@rule(SITE, "use as_committed")
def every_table_is_read_as_it_was_committed(_):
    asked = lambda call: getattr(call.func, "id", "") in ("as_committed", "of_clone", "sealed")
    seen = []
    def reads(node):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Call) and asked(node.args[0]):
            seen.append(node.func)
        return (getattr(node, "attr", "") in ("read_csv", "read_parquet", "read_table")
                and getattr(node.value, "id", "") == "pd" and not any(node is s for s in seen))
    return found_in_code(reads) ^ {*READS}

SEEN = {refused_by_hand: {'raise OSError(f"store {x}: expected a folder, got {y}; fix: make one")': True,
                          'raise ValueError("seeds: expected some; "\n    f"got {b}; fix: [42]")': True,
                          'refuse("seeds", "some", b)': False, 'raise KeyError("no such task")': False},
        writes: {"f.to_csv('a.csv')": True, "f.to_csv(index=False)": False, "p.write_text(t)": True,
                 "torch.save(x, p)": True, "figure.savefig(data := io.BytesIO())": False, "figure.savefig(p)": True,
                 "open(p, 'a', newline='')": True, "p.open('w')": True, "open(p, mode='xb')": True,
                 "open(p, 'rb')": False, "open(p)": False, "store.save(run)": False, "json.dumps(x)": False,
                 "os.open(os.devnull, os.O_WRONLY)": False}}

@pytest.mark.parametrize("finds", SEEN, ids=lambda f: f.__name__)
def test_what_a_rule_looks_for_is_seen_and_nothing_else(finds):
    node = {code: ast.parse(code).body[0] for code in SEEN[finds]}
    assert {code: finds(getattr(n, "value", n)) for code, n in node.items()} == SEEN[finds]

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
    for part in (NBS, LIB): shutil.copytree(part, tmp_path / part.name, ignore=hidden)
    return tmp_path

def test_modules_are_what_the_notebooks_export(copy):
    for module in (copy / LIB.name).rglob("*.py"):
        if module.name not in ("__init__.py", "__main__.py"): module.unlink()   # these two no notebook can export
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

def test_readme_is_what_the_front_page_says(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    with pytest.raises(SystemExit) as said: readme.main()
    assert not said.value.code, said.value

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

@rule(SITE, "a notebook in nbs/02_models/ exports models.something, and every module has a notebook")
def a_folder_of_notebooks_is_a_subpackage(_):
    apart = {m: page for m, page in exported().items()
             if Path(page).parent.as_posix().partition("_")[2] != m.rpartition(".")[0].replace(".", "/")}
    return [*apart.items(), *({*map(room, MODULES)} ^ {m for m in exported() if not m.endswith("__init__")})]

def imports(path):
    "The rooms that a module imports, as in `tasks.data`."
    here = path.relative_to(LIB).with_suffix("").parts
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from [a.name.partition(".")[2] for a in node.names if a.name.startswith(f"{LIB.name}.")]
        if isinstance(node, ast.ImportFrom):
            of = [p for p in (node.module or "").split(".") if p]
            if node.level: of = [*here[:len(here) - node.level], *of]
            elif of[:1] == [LIB.name]: of = of[1:]
            else: continue
            yield from [".".join(of)] if ".".join(of) in exported() else [".".join([*of, a.name]) for a in node.names]

@rule(MODULES)
def nothing_flows_backwards(path):
    "A room imports rooms of earlier parts and earlier ones of its own: folders and numbers of notebooks are the order."
    order = {m: i for i, m in enumerate(exported())}
    return [other for other in imports(path) if other in order and order[other] >= order[room(path)]]

@rule([m for m in MODULES if m.relative_to(LIB).parts[0] != "studies"])
def a_room_outside_the_studies_imports_none(path):
    "What a study has is asked of the registry that its folder is."
    return {other for other in imports(path) if other.split(".")[0] == "studies"}

# ----------------------------------------------------------------------------------------------------- all rules, once

@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    among, wrong, fix = RULES[name]
    assert not (bad := offenders(among, wrong)), f"{len(bad)}: {fix}: {bad}"
