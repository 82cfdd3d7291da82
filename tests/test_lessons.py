"""A page of a room is a lesson: what is defined on it is used where it is defined, and what comes of it can be seen."""
import ast
import re

from test_site import PAGES, cells, offenders, options

def code(page): return [c for c in cells(page, "code") if "nbdev_export" not in c["source"]]

def exports(cell): return bool({"export", "exports"} & options(cell).keys())

def test_every_room_shows_what_it_defines():
    bad = [p for p in PAGES if any(map(exports, code(p))) and not any(c["outputs"] for c in code(p))]
    assert not bad, f"give a use of what is defined, its value and an assertion: {bad}"

# a call may give nothing, and so may a value by an if
VALUES = (ast.Name, ast.Tuple, ast.List, ast.Dict, ast.DictComp, ast.ListComp, ast.Subscript, ast.Attribute, ast.BinOp,
          ast.Compare, ast.JoinedStr)

def mute(page):
    "The last lines of cells that end in a value and show none: they were written after the page was run."
    def ends(source):
        body = ast.parse("\n".join(x for x in source.splitlines() if not x.lstrip().startswith(("%", "!")))).body
        return body and isinstance(body[-1], ast.Expr) and isinstance(body[-1].value, VALUES)
    return [c["source"].splitlines()[-1] for c in code(page)
            if not exports(c) and not c["outputs"] and not c["source"].endswith(";") and ends(c["source"])]

def test_a_cell_that_ends_in_a_value_shows_it():
    assert not (bad := offenders(PAGES, mute)), f"make outputs NB=…: {bad}"

def unchosen(page):
    "Names that `# try …` invites a reader to change, and that look something up before `choose` has refused a wrong one."
    def names(*nodes): return {n.id for x in nodes for n in ast.walk(x) if isinstance(n, ast.Name)}
    found = []
    for source in (c["source"] for c in code(page) if re.search(r" = .*#.*\btry ", c["source"])):
        lines, nodes = source.splitlines(), [*ast.walk(ast.parse(source))]
        free = names(*(t for n in nodes if isinstance(n, ast.Assign) and re.search(r"#.*\btry ", lines[n.lineno - 1])
                       for t in n.targets))
        chosen = names(*(a for n in nodes if isinstance(n, ast.Call) and names(n.func) == {"choose"} for a in n.args))
        found += sorted(free & names(*(n.slice for n in nodes if isinstance(n, ast.Subscript))) - chosen)
    return found

def test_what_a_reader_may_change_is_chosen_before_it_looks_something_up():
    assert not (bad := offenders(PAGES, unchosen)), f"choose(what, value, known) before the look-up: {bad}"
