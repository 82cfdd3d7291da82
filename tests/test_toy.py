"""The models that a reader looks into are those that are committed and recorded: nbs/toy.js, run by node on every seventh
number, and on all 1,000 in `make audit`, says what torch says."""
import importlib.util
import json
import shutil
import subprocess
from functools import lru_cache

import numpy as np
import pytest
import torch

from moe_redistribution.evidence.table_files import ROOT
from moe_redistribution.evidence.checkpoints import checkpoint, checkpoint_seeds
from moe_redistribution.instruments.ablation import combine_edits
from moe_redistribution.instruments.copying import without_copy
from moe_redistribution.models.condition import condition
from moe_redistribution.models.population import forward
from moe_redistribution.tasks.task import get_task

spec = importlib.util.spec_from_file_location("toy", ROOT / "tools/toy.py")
toy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toy)

NODE, CHROMIUM, TASK = shutil.which("node"), shutil.which("chromium"), get_task("add7")
MODELS, EDITS, COPIES = list(toy.MODELS), list(toy.EDITS), ("allowed", "out")
DATA = json.loads(toy.FILE.read_text().split("globalThis.toyData = ")[1].rstrip(";\n"))
SHOWN = {m["key"]: m for m in DATA["models"]}
PARTS = {"patterns": (4, 8, 8), "experts": (8,), **{f"logits {e}": (8, 12) for e in EDITS},
         **{f"says {e} {c}": (4,) for e in EDITS for c in COPIES}, "asked": (4,), "wanted": (4,)}
DRIVER = """
require(process.argv[1] + "/toy_data.js");
const {forward, answer, weights} = require(process.argv[1] + "/toy.js"), fs = require("fs");
const out = [], eight = row => [...row, ...Array(8 - row.length).fill(0)];
for (const model of toyData.models) {
  const w = weights(model);
  for (let n = 0; n < 1000; n += Number(process.argv[3])) {
    const runs = ["on", "zero", "mean"].map(ffn => forward(w, n, ffn));
    out.push(runs[0].patterns.flatMap(rows => rows.flatMap(eight)), runs[0].experts, ...runs.map(r => r.logits.flat()),
      ...runs.flatMap(r => ["allowed", "out"].map(c => answer(r, c).map(a => a.says))),
      answer(runs[0], "out").map(a => Number(a.asked)), answer(runs[0]).map(a => a.wanted));
  }
}
fs.writeFileSync(process.argv[2], Buffer.from(Float64Array.from(out.flat()).buffer));
"""
computed = pytest.mark.skipif(not NODE, reason="no node to run nbs/toy.js")

def in_a_browser(folder, every):
    "Model → part → what toy.js says of 0, `every`, 2 × `every` and so on, below 1,000."
    path = folder / "said"
    subprocess.run([NODE, "-e", DRIVER, str(ROOT / "nbs"), str(path), str(every)], check=True)
    n, ends = len(range(0, 1000, every)), np.cumsum([np.prod(s) for s in PARTS.values()])[:-1]
    return {m: {name: torch.from_numpy(part.copy()).reshape(n, *shape) for (name, shape), part
                in zip(PARTS.items(), np.split(own, ends, axis=1))}
            for m, own in zip(MODELS, np.fromfile(path).reshape(len(MODELS), n, -1))}

@pytest.fixture(scope="module", params=[7, pytest.param(1, marks=pytest.mark.audit)], ids=["every seventh", "all"])
def browser(request, tmp_path_factory):
    "(what toy.js says, model → part; the numbers that it was asked)."
    return in_a_browser(tmp_path_factory.mktemp("toy"), request.param), slice(None, None, request.param)

@lru_cache(maxsize=None)
def committed(key):
    """The checkpoint's own parameters of the seed that the page shows, as a population of one; in double precision,
    since two experts may be nearer to each other than a processor's rounding."""
    name = toy.MODELS[key]
    i = checkpoint_seeds(name).index(SHOWN[key]["seed"])
    return {n: v[i:i + 1].double() for n, v in checkpoint(name).items()}

def sink(params, key, edit):
    "All activations of a committed seed on all numbers under an edit of the page."
    seen, edits = {}, {} if edit == "on" else {"ffn_out": edit}
    forward(params, TASK.tokens, condition(toy.MODELS[key]), combine_edits(toy.MODELS[key], edits), seen)
    return {n: v[0] for n, v in seen.items()}

def test_the_file_is_what_checkpoints_and_rows_make():
    assert toy.text().encode() == toy.FILE.read_bytes(), "run python tools/toy.py"

@computed
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("key", MODELS)
def test_logits_of_the_browser_are_those_of_torch(browser, key, edit):
    params, (said, asked) = committed(key), browser
    if edit == "on": params = {n: v.half().double() if n in toy.HALF else v for n, v in params.items()}
    off = (said[key][f"logits {edit}"] - sink(params, key, edit)["logits"][asked]).abs().max()
    assert off < 1e-5

@computed
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("key", MODELS)
def test_every_digit_of_the_browser_is_the_checkpoints(browser, key, edit):
    own, n = browser[0][key], browser[1]
    said = sink(committed(key), key, edit)["logits"].argmax(-1)[n, list(TASK.read)]
    ruled, asked = without_copy(committed(key), toy.MODELS[key], {} if edit == "on" else {"ffn_out": edit})
    ruled, asked = ruled[0, n, :4], asked[n, :4]
    assert torch.equal(own[f"says {edit} allowed"].long(), said[:, :4])
    assert torch.equal(own["asked"].bool(), asked) and torch.equal(own["wanted"].long(), TASK.targets[n, :4])
    assert torch.equal(own[f"says {edit} out"].long()[asked], ruled[asked])

@computed
@pytest.mark.parametrize("key", MODELS)
def test_heads_look_and_tokens_go_where_they_do_in_the_checkpoint(browser, key):
    seen, own, n = sink(committed(key), key, "on"), browser[0][key], browser[1]
    assert (own["patterns"] - seen["pattern"][n]).abs().max() < 1e-6
    went = seen["gates"].argmax(-1)[n] if "gates" in seen else torch.zeros(len(TASK.tokens[n]), 8, dtype=int)
    assert torch.equal(own["experts"].long(), went)
    assert len(went.unique()) == condition(toy.MODELS[key]).n_experts

@computed
@pytest.mark.audit
@pytest.mark.parametrize("browser", [1], ids=["all"], indirect=True)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("key", MODELS)
def test_scores_beside_the_digits_are_what_the_digits_score(browser, key, edit):
    own, shown = browser[0][key], SHOWN[key]["scores"][edit]
    for copies in COPIES:
        counts = own["asked"] if copies == "out" else torch.ones(1000, 4)
        share = ((own[f"says {edit} {copies}"] == own["wanted"]) * counts).sum(0) / counts.sum(0)
        assert (share - torch.tensor(shown[copies])).abs().max() < .002

@pytest.mark.parametrize("key", MODELS)
def test_the_seed_shown_is_the_most_typical_and_not_the_best(key):
    name = toy.MODELS[key]
    said, asked = without_copy(checkpoint(name), name, {"ffn_out": "mean"})
    right = said == TASK.targets
    left = sum(right[:, asked[:, j], j].double().mean(1) for j in (1, 2)) / 2
    off = dict(zip(checkpoint_seeds(name), (left - left.mean()).abs().tolist()))
    assert min(off, key=off.get) == SHOWN[key]["seed"] and len(off) == SHOWN[key]["seeds"]
    assert left.mean().item() == pytest.approx(SHOWN[key]["mean"], abs=1e-3)

@pytest.mark.parametrize("key", MODELS)
def test_why_passing_the_digit_on_wins_on_hundreds_is_what_the_committed_seeds_do(key):
    name, shown, wrong = toy.MODELS[key], SHOWN[key], {"allowed": [], "out": []}
    digit, right, read = TASK.tokens[:, 2], TASK.targets[:, 2], TASK.tokens[:, list(TASK.read)[2]]
    assert (digit != right).sum() == DATA["carries"] == 70
    behind = {copies: shown["scores"]["mean"][copies][2] < DATA["passed_on"][copies][2] for copies in COPIES}
    assert behind["allowed"] and behind["out"] == (key != "slow dense")        # where it is not behind, the box says nothing
    for i in range(len(checkpoint_seeds(name))):
        params = {n: v[i:i + 1].double() for n, v in checkpoint(name).items()}
        logits = sink(params, key, "mean")["logits"][:, list(TASK.read)[2]].clone()
        said = logits.argmax(-1)
        wrong["allowed"] += (said == read)[said != right].tolist()
        logits[torch.arange(1000), read] = -torch.inf
        said, asked = logits.argmax(-1), (read != right) & (digit == right)
        wrong["out"] += (said == (digit + 1) % 10)[asked & (said != right)].tolist()
    assert {k: round(np.mean(v), 4) for k, v in wrong.items()} == pytest.approx(shown["wrong_hundreds"], abs=1e-4)

def test_the_page_asks_no_other_site_for_anything():
    code = "".join((ROOT / f"nbs/toy.{x}").read_text() for x in ("js", "css"))
    assert not any(word in code for word in ("http:", "https:", "fetch(", "import(", "XMLHttpRequest", "url("))

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>toy</title><meta name="viewport"
content="width=device-width, initial-scale=1"><link rel="stylesheet" href="{0}/toy.css"></head><body><main>
<div class="toy" id="toy-inside" data-from="{0}/toy_data.js"></div></main><script src="{0}/toy.js"></script></body></html>"""

@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    "The box opened from a file, on a phone; what goes wrong on the way is in `tab.errors`."
    api = pytest.importorskip("playwright.sync_api", reason="no playwright")
    if not CHROMIUM: pytest.skip("no Chromium")
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(PAGE.format((ROOT / "nbs").as_uri()))
    with api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page(viewport={"width": 390, "height": 800})
        page.errors = []
        page.on("console", lambda m: page.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: page.errors.append(str(e)))
        page.goto(path.as_uri())
        yield page
        chromium.close()

def by_keyboard(tab, start, *keys):
    "What the box says after these keys, from the element `start`."
    tab.focus(start)
    for key in keys: tab.keyboard.press(key)
    return tab.inner_text(".toy-said")

@pytest.mark.audit
def test_the_box_is_worked_by_keyboard_from_a_file(tab):
    tab.wait_for_selector(".toy-digits")
    tab.check("[name=toy-ffn][value=on]"), tab.check("[name=toy-model][value=dense]")
    first = by_keyboard(tab, "input[type=number]", "Control+A", "9", "9", "5")
    assert "995 + 7 = 1002" in first and "1 0 0 2: 4 of 4 digits right" in first
    second = by_keyboard(tab, "[name=toy-ffn]", "ArrowDown", "ArrowDown")
    assert "at its mean" in second and second != first
    third = by_keyboard(tab, "[name=toy-model]", "ArrowDown", "ArrowDown")
    assert "the mixture" in third and tab.locator(".toy-expert").count() == 8
    fourth = by_keyboard(tab, "[name=toy-copies]", "ArrowDown")
    assert "–" in fourth and "not asked" in tab.inner_text(".toy-digits")

@pytest.mark.audit
def test_the_box_fits_a_phone_and_pictures_have_words(tab):
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    labels = tab.eval_on_selector_all(".toy svg", "all => all.map(s => s.getAttribute('aria-label'))")
    assert len(labels) == 4 and all(len(x) > 40 for x in labels)
    named = tab.eval_on_selector_all(".toy input", "all => all.map(i => i.labels.length)")
    assert len(named) == 10 and set(named) == {1}

@pytest.mark.audit
def test_a_number_that_is_none_leaves_nothing_of_the_last_one(tab):
    said = by_keyboard(tab, "input[type=number]", "Control+A", "1", "2", "0", "0")
    assert "0 to 999" in said and not tab.query_selector(".toy-digits") and not tab.query_selector(".toy svg")
    assert tab.inner_text(".toy-note") == "" and tab.errors == []

def test_the_page_on_patterns_loads_the_box_and_says_what_it_shows_without_javascript():
    cells = json.loads((ROOT / "nbs/10_studies/sparsity_moves/9c5_patterns.ipynb").read_text())["cells"]
    cell, = ("".join(c["source"]) for c in cells if 'toy.js"' in "".join(c["source"]))
    assert cell.index('toy.css"') < cell.index('toy_data.js"') < cell.index('src="../../toy.js"')
    assert 'src="../../toy_data.js"' not in cell                               # three quarters of a megabyte, when they are seen
    assert 'id="toy-inside"' in cell and cell.count("<noscript>") == 1
