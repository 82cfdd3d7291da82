"""What a page shows is what its code gives today: `make audit` runs every page and compares."""
import base64
import io
import json
import sys

import pytest
from PIL import Image, ImageDraw

from moe_redistribution.evidence.table_files import ROOT

sys.path.append(str(ROOT / "tools"))
import outputs  # noqa: E402  a script, and so no module of the package

def cell(source="x", *outs): return dict(cell_type="code", id="a", metadata={}, execution_count=None, source=[source],
                                         outputs=list(outs))

def text(said):
    return dict(output_type="execute_result", data={"text/plain": [said]}, metadata={}, execution_count=None)

def picture(width=400, bar=100):
    image = Image.new("RGB", (width, 300), "white")
    ImageDraw.Draw(image).rectangle((50, 280 - bar, 90, 280), fill="navy")
    image.save(out := io.BytesIO(), "PNG")
    return dict(output_type="display_data", data={"image/png": base64.b64encode(out.getvalue()).decode()}, metadata={})

def stale(was, now, source="x"):
    return [*outputs.differences(*({"cells": [cell(source, *x)]} for x in (was, now)))]

@pytest.mark.parametrize("was, now, same", [
    ("{'a': 0.6401}", "{'a': 0.6402}", True), ("{'a': 0.64}", "{'a': 0.65}", False),    # rounding, and another number
    ("n = 1000", "n = 1001", False), ("[-0.5]", "[0.5]", False), ("3e-16", "-4e-16", True),
    ("<f at 0x7f3a>", "<f at 0x7e00>", True), ("took 3.1 s", "took 12 min", True), ("took it", "gave it", False),
    ("/tmp/tmpab12/x.csv", "/tmp/tmpcd34/x.csv", True), ("results/a.csv", "data/a.csv", False),
    ("a  1.0\nbb 2.0", "a   1.0\nbb  2.0", True), ("", "1", False)])
def test_an_output_is_stale_if_it_says_something_else_and_not_if_it_is_laid_out_or_rounded_otherwise(was, now, same):
    assert (not stale([text(was)], [text(now)])) == same

def test_an_output_that_is_new_or_gone_is_stale_and_what_is_told_in_passing_is_not():
    assert "stored 'nothing'" in stale([], [text("1")])[0] and "today 'nothing'" in stale([text("1")], [])[0]
    assert not stale([], [dict(output_type="stream", name="stderr", text="Warning: late")])
    assert stale([], [dict(output_type="stream", name="stdout", text="late")])

@pytest.mark.parametrize("now, same", [(picture(), True), (picture(bar=101), True), (picture(bar=140), False),
                                       (picture(600), False), (text("a picture"), False)])
def test_a_picture_is_stale_if_a_bar_or_its_size_is_another(now, same):
    assert (not stale([picture()], [now])) == same

def test_a_cell_about_this_machine_need_only_show_something():
    mark = "#| of_this_machine\nmachine()"
    assert stale([text("x86")], [text("arm")]) and not stale([text("x86")], [text("arm")], mark)
    assert stale([text("x86")], [], mark)

def page(tmp_path, *cells):
    path = tmp_path / "page.ipynb"
    path.write_text(json.dumps(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5)), encoding="utf-8")
    return path

@pytest.mark.audit
def test_a_page_is_run_and_its_stale_cells_named_and_nothing_is_changed(tmp_path, capfd):
    before = (path := page(tmp_path, cell("1 + 1", text("2")), cell("2 + 2", text("5")))).read_bytes()
    assert outputs.main(["--check", path]) == 1
    assert "cell 1, 2 + 2: stored '5', today '4'" in (said := capfd.readouterr().out) and "cell 0" not in said
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["page.ipynb"]
    assert outputs.main([path]) is None and outputs.main(["--check", path]) == 0
    path = page(tmp_path, cell("1 / 0"))
    assert outputs.main(["--check", path]) == 1 and "it does not run" in capfd.readouterr().out

@pytest.mark.audit
def test_a_page_that_asks_for_what_is_out_of_reach_is_not_compared_and_keeps_what_it_shows(tmp_path, capfd):
    path = page(tmp_path, cell("raise ConnectionError('no network')"), cell("1 + 1", text("2")))
    before = path.read_text(encoding="utf-8")
    assert outputs.main(["--check", path]) == 0
    assert "not compared, ConnectionError: no network" in capfd.readouterr().out
    assert outputs.main([path]) == 1 and path.read_text(encoding="utf-8") == before

@pytest.mark.audit
def test_a_page_that_somebody_changes_while_it_runs_stays_as_they_left_it(tmp_path, capfd):
    path = page(tmp_path, cell("from pathlib import Path\nPath('page.ipynb').write_text('theirs')"))
    assert outputs.main([path]) == 1 and path.read_text() == "theirs"
    assert "changed while it ran" in capfd.readouterr().err
