"""The front page's picture and trainer, opened in Chromium as the notebook has stored them, at three widths, light and dark."""
import json
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = shutil.which("chromium")
CELLS = ["".join(o["data"]["text/html"]) for c in json.loads((ROOT / "nbs/index.ipynb").read_text())["cells"]
         for o in c.get("outputs", []) if "text/html" in o.get("data", {}) and "front-data" in "".join(o["data"]["text/html"])]
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>front</title><meta name="viewport"
content="width=device-width, initial-scale=1"><base href="{0}/"><link rel="stylesheet" href="styles.css"><link rel="stylesheet"
href="front.css"></head><body class="{1}"><main><h1>x</h1><a id="fig-front" class="figure-anchor"></a>
<div><figure><p><a href="#"><img alt="still"></a></p></figure></div>
{2}</main></body></html>"""

def test_what_the_front_page_loads_asks_no_other_site_and_is_small():
    page, = CELLS
    code = {f: (ROOT / "nbs" / f).read_text() for f in ("front.js", "front.css", "trainer.js")}
    assert not any(word in code[f] for f in code for word in ("https:", "fetch(", "import(", "XMLHttpRequest", "url("))
    assert len(page) + sum(map(len, code.values())) < 80_000                 # of which the recorded models are a fifth
    assert page.index('src="trainer.js"') < page.index('src="front.js"') and page.count("<noscript>") == 1

def test_every_dot_of_the_picture_is_a_model_and_every_mean_is_theirs():
    data = json.loads(re.search(r'<script id="front-data"[^>]*>(.*?)</script>', CELLS[0], re.S)[1])
    assert [a["key"] for a in data["arms"]] == ["narrow", "dense", "mixture"]
    for p in (p for a in data["arms"] for p in a["points"]):
        assert len(p["models"]) in (64, 128, 160) and p["unseen"] == (len(p["models"]) < 160)
        assert abs(sum(p["models"]) / len(p["models"]) - 100 * p["mean"]) < .6 and p["lo"] < p["mean"] < p["hi"]

@pytest.fixture(params=[1400, 768, 390])
def tab(request, tmp_path):
    "The page in a tab of some width; what goes wrong is in `tab.errors`."
    api = pytest.importorskip("playwright.sync_api", reason="no playwright")
    if not CHROMIUM: pytest.skip("no Chromium")
    path = tmp_path / "index.html"
    path.write_text(PAGE.format((ROOT / "nbs").as_uri(), "quarto-dark" if request.param == 768 else "", CELLS[0]))
    with api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page(viewport={"width": request.param, "height": 800})
        page.errors = []
        page.on("console", lambda m: page.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: page.errors.append(str(e)))
        page.goto(path.as_uri())
        page.wait_for_selector("#front-picture svg")
        yield page
        assert page.errors == [] and page.evaluate("document.documentElement.scrollWidth") <= request.param
        chromium.close()

def small_text(tab):
    "The smallest text on the page, in px as it is shown."
    return tab.evaluate("""() => Math.min(...[...document.querySelectorAll('main *')].filter(e => e.childNodes.length &&
        [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && e.getClientRects().length).map(e => {
          const s = e.ownerSVGElement, by = s ? s.getBoundingClientRect().width / s.viewBox.baseVal.width : 1;
          return parseFloat(getComputedStyle(e).fontSize) * by; }))""")

@pytest.mark.audit
def test_a_reader_trains_three_models_by_keyboard_and_they_land_in_the_picture(tab):
    assert small_text(tab) >= 11 and not tab.query_selector("img") and tab.query_selector("figure #front-picture svg")
    tab.select_option("select[aria-label='kind, model 1']", "narrow")
    tab.select_option("select[aria-label='kind, model 3']", "frozen")
    for i in (1, 2, 3): tab.select_option(f"select[aria-label='rate of the FFN, model {i}']", "2")
    assert tab.is_disabled("select[aria-label='number of experts, model 3'] option[value='1']")
    tab.focus("#front-trainer input")
    for key in ("Control+A", "1", "2", "3", "4", "5", "6"): tab.keyboard.press(key)
    tab.focus("#front-trainer button.go"), tab.keyboard.press("Enter")
    assert "0 to 99999" in tab.inner_text(".said")
    tab.fill("#front-trainer input", "7")
    tab.focus("#front-trainer button.go"), tab.keyboard.press("Enter")
    tab.wait_for_function("document.querySelector('#front-trainer').innerText.includes('Three models in')", timeout=300_000)
    said = tab.inner_text(".said")
    assert re.fullmatch(r"Right without the FFN: fast narrow at 2 \d+%; fast mixture at 2 \d+%; fast frozen router at 2 \d+%\.", said)
    assert small_text(tab) >= 11
    landed = tab.locator("#front-picture path.yours").count()
    assert landed + tab.inner_text("#front-trainer").count("is not in the picture") == 3 and landed >= 2
    with tab.expect_download() as kept: tab.click("#front-trainer button:has-text('Keep')")
    assert json.loads(Path(kept.value.path()).read_text())["seed"] == 7
    tab.select_option("select[aria-label='kind, model 2']", "dense")                # what was trained before goes from the panel
    assert tab.locator("#front-trainer output").nth(1).inner_text() == "" == tab.inner_text(".said")
    assert tab.locator("#front-trainer .arm b").nth(1).inner_text() == "fast dense at 2" and tab.locator("path.yours").count() == landed
    tab.fill("#front-trainer input", "8"), tab.keyboard.press("Tab")                        # another seed is another training
    assert not any(tab.locator("#front-trainer output").all_inner_texts()) and "Three models in" not in tab.inner_text("#front-trainer")
    assert not tab.locator("#front-trainer button:has-text('Keep')").is_visible()

@pytest.mark.audit
def test_a_hidden_tab_pauses_and_a_stop_leaves_the_picture(tab):
    tab.click("#front-trainer button.go")
    tab.wait_for_function("document.querySelector('#front-trainer .state').textContent.includes('step')", timeout=60_000)
    def steps(): return [int(s.split()[1].rstrip(":")) for s in tab.locator(".state").all_inner_texts() if s.startswith("step")]
    tab.evaluate("""() => { Object.defineProperty(document, 'hidden', {value: true, configurable: true});
                          document.dispatchEvent(new Event('visibilitychange')); }""")
    tab.wait_for_timeout(800)
    then = steps()
    tab.wait_for_timeout(2500)
    assert steps() == then
    tab.evaluate("""() => { Object.defineProperty(document, 'hidden', {value: false});
                          document.dispatchEvent(new Event('visibilitychange')); }""")
    tab.wait_for_function("then => [...document.querySelectorAll('.state')].some((s, i) => parseInt(s.textContent.split(' ')[1]) > then[i])",
                          arg=then, timeout=60_000)
    tab.click("#front-trainer button:has-text('Stop')")
    assert "Stopped" in tab.inner_text("#front-trainer") and tab.is_enabled("#front-trainer button.go")
