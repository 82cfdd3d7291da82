"""A page of a room is a lesson: what is defined on it is used where it is defined, and what comes of it can be seen."""
import ast
import re

import pytest

from test_site import PAGES, cells, offenders, options

MOST = 4                                # exported cells in a row


def code(page): return [c for c in cells(page, "code") if "nbdev_export" not in c["source"]]


def exports(cell): return bool({"export", "exports"} & options(cell).keys())


def shows(cell):
    "Does a reader see what came of this cell, or that something is asserted of it?"
    if exports(cell) or {"hide", "hide_output"} & options(cell).keys(): return False
    return bool(cell["outputs"] or re.search(r"^\s*assert\b|\btest_\w+\(", cell["source"], flags=re.M))


def rows_of_exports(cells):
    "How many exported cells stand in a row before each cell that shows something, and before the end."
    n, found = 0, []
    for cell in cells:
        if exports(cell): n += 1
        elif shows(cell): n, found = 0, [*found, n]
    return [*found, n]


def made(*said):
    "Cells of a page: d defines, x shows, a asserts, h asserts and is hidden, s is silent."
    sources = dict(d="#| exports\ndef f(): assert 0", x="f()", a="assert f()", h="#| hide\nassert f()", s="y = 1")
    return [dict(source=sources[k], outputs=[{}] * (k == "x")) for k in said]


@pytest.mark.parametrize("said, most", [("dddd", 4), ("ddxdd", 2), ("ddadd", 2), ("ddhdd", 4), ("ddsdd", 4), ("xdx", 1),
                                        ("ddddd", 5)])
def test_only_what_a_reader_sees_parts_a_row_of_definitions(said, most):
    assert max(rows_of_exports(made(*said))) == most


def long(page): return (n := max(rows_of_exports(code(page)))) > MOST and n


def silent(page): return any(map(exports, code(page))) and not any(c["outputs"] for c in code(page))


@pytest.mark.parametrize("wrong", [long, silent])
def test_between_definitions_something_is_shown_or_asserted_and_every_room_shows_something(wrong):
    bad = {page: said for page in PAGES if (said := wrong(page))}
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
