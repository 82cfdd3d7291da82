"""What a reader's browser makes of the site: each page is opened in Chromium at three widths, and what is cut, dead,
fetched from elsewhere or out of reach is counted by kind.

The site is the one that Quarto has rendered, in _docs/ (`make docs`) or where BROWSER_SITE points. What holds:

- From 1100 px on nothing is cut: no table, no figure, no column.
- On a phone (390 px) a wide table scrolls in its box, and a wide figure does. Keys reach the box (axe tells), the first
  column of a table stays. Its caption and its second column, in which a table of results decides, need no scrolling.
- On a phone a picture is shown at no less than `ticks.SHRUNK` of its size, or whole. Its labels are measured where it
  is drawn, in tools/ticks.py: in a PNG nobody can look for them.
- In the dark nothing is paler than it may be, and paper is white.
- Links lead somewhere, land below the bar and mark what they name. The console says no error, nothing is fetched from
  elsewhere, and axe finds nothing serious or critical, at any width."""
import contextlib
import functools
import http.server
import os
import re
import shutil
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))
from ticks import SHRUNK  # noqa: E402  a script, and so no module of the package

NBS = ROOT / "nbs"
WIDTHS = 1400, 1100, 390
PHONE = 390
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [*"""--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
         --disable-component-update --disable-sync""".split(),
         "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]    # who asks elsewhere is told at once
pytestmark = pytest.mark.audit

class Finding(NamedTuple):
    kind: str
    width: int
    what: str

ALLOWED = {("table cut", PHONE), ("figure scrolls", PHONE)}

# ------------------------------------------------------------------------------------------ what is looked at in a page

TABLES = """() => [...document.querySelectorAll('main table')].filter(t => t.offsetParent).flatMap(t => {
  let box = t;
  while (box !== document.body && !/auto|scroll|hidden/.test(getComputedStyle(box).overflowX)) box = box.parentElement;
  if (box === document.body || box.scrollWidth <= box.clientWidth + 1) return [];
  const heads = [...(t.querySelector('tr')?.cells ?? [])];
  const second = [...t.rows].reduce((a, b) => b.cells.length > a.cells.length ? b : a).cells[1];
  const edge = box.getBoundingClientRect().left + box.clientWidth;
  const hidden = second?.getBoundingClientRect().right > edge + 1 ? second.innerText.trim() || 'the second' : '';
  const over = box.scrollWidth - box.clientWidth, before = heads[0]?.getBoundingClientRect().left;
  const caption = t.caption?.getBoundingClientRect().right > edge + 1;
  box.scrollLeft = over;
  const lost = Math.abs(heads[0]?.getBoundingClientRect().left - before) > Math.min(over, 9);
  box.scrollLeft = 0;
  return [{heads: heads.map(h => h.innerText.trim()).join(' | ').slice(0, 90), over, hidden, lost, caption}];
})"""

FIGURES = """shrunk => [...document.querySelectorAll('main :is(img, svg, canvas)')].flatMap(i => {
  if (!i.getClientRects().length) return [];
  const r = i.getBoundingClientRect(), name = (i.alt || i.id || i.tagName).slice(0, 60), found = [];
  let right = document.documentElement.clientWidth, scrolls = false;
  for (let p = i.parentElement; p && p !== document.body; p = p.parentElement) {
    const flow = getComputedStyle(p).overflowX, edge = p.getBoundingClientRect().left + p.clientWidth;
    if (/auto|scroll|hidden|clip/.test(flow) && r.right > edge + 1 && edge <= right) {
      scrolls = /auto|scroll/.test(flow);
      if (scrolls) break;
      right = edge;
    }
  }
  if (scrolls) found.push(['figure scrolls', name]);
  else if (r.right > right + 1) found.push(['figure cut', name]);
  if (i.tagName === 'IMG' && i.complete && !i.naturalWidth) found.push(['figure cut', name + ' (no picture)']);
  const width = i.getAttribute('width');
  if (width && r.width < shrunk * width - 1) found.push(['figure too small', `${name} (${r.width} of ${width} px)`]);
  return found;
})"""

SIDEWAYS = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"

PRINTED = """() => {
  dispatchEvent(new Event('beforeprint'));
  const dark = document.body.classList.contains('quarto-dark');
  dispatchEvent(new Event('afterprint'));
  return dark;
}"""

# After a link is followed: what it names is on the screen, below the bar, and it or its row looks other than before.
# Two of each sort of element are followed, since Chromium lets a page move so many times and no more.
LANDINGS = """fragments => {
  const look = e => { const s = getComputedStyle(e);
    return [s.backgroundColor, s.outlineStyle, s.boxShadow, s.borderLeftColor].join() };
  const sorts = {}, land = fragment => {
    const named = document.getElementById(fragment);
    if (!named) return 'leads nowhere';
    const sort = [named.tagName, named.className, named.parentElement.tagName].join();
    if ((sorts[sort] = (sorts[sort] ?? 0) + 1) > 2) return '';
    const own = named.getBoundingClientRect().height;
    const shown = named.closest('tr') ?? (own ? named : named.nextElementSibling ?? named);
    const among = [...new Set([named, shown, named.closest('section, figure'), named.firstElementChild,
                               shown.firstElementChild, shown.querySelector('figure')].filter(Boolean))];
    const before = among.map(look);
    location.hash = '#' + encodeURIComponent(fragment);
    const box = shown.getBoundingClientRect(), bar = document.querySelector('#quarto-header');
    const edge = bar && !bar.classList.contains('headroom--unpinned') ? bar.getBoundingClientRect().bottom : 0;
    if (!box.height) return 'is hidden';
    if (box.top < edge - 1) return `lies under the bar (${Math.round(box.top)} < ${Math.round(edge)})`;
    const end = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
    if (box.top > innerHeight - 20 && !end) return 'lies below the screen';
    return among.some((e, i) => look(e) !== before[i]) ? '' : 'is not marked';
  };
  return fragments.map(f => [f, land(f)]).filter(([, wrong]) => wrong);
}"""

def links(html):
    "(href, ...) of a page's text, and the ids that a link can lead to."
    html = re.sub(r"<(script|style|template)\b.*?</\1>", "", html, flags=re.S)
    html = re.sub(r"<a\b[^>]*aria-hidden=[^>]*>", "", html)     # the lines of a listing: nobody is sent to them
    return (re.findall(r"<a\b[^>]*?\shref=[\"']([^\"']*#[^\"']+)[\"']", html),
            set(re.findall(r"\s(?:id|name)=[\"']([^\"']+)[\"']", html)))

class Site:
    "A folder of HTML pages, and which of them name which part of which other."
    def __init__(self, folder):
        self.folder = Path(folder)
        self.pages = sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*.html")
                            if "site_libs" not in p.parts)
        read = {p: links((self.folder / p).read_text(encoding="utf-8")) for p in self.pages}
        self.ids = {p: ids for p, (_, ids) in read.items()}
        self.named = {p: set() for p in self.pages}
        self.dead = {p: set() for p in self.pages}
        for page, (hrefs, _) in read.items():
            for href in map(unquote, hrefs):
                to = urlsplit(urljoin(f"http://site/{page}", href.replace("&amp;", "&")))
                target = to.path.lstrip("/") or "index.html"
                if to.netloc != "site" or to.scheme != "http": continue
                if target in self.ids and to.fragment in self.ids[target]: self.named[target].add(to.fragment)
                elif target in self.ids or target.endswith(".html"): self.dead[page].add(href)

    @contextlib.contextmanager
    def served(self):
        class Quiet(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *args): pass
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=self.folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()

def axe(tab, colours):
    """What axe calls serious or critical, as (rule, how often, first place). Colours do not change with the width, and
    those of code not with the block; to look at them is slow, so it is done once in the light and once in the dark."""
    rules = {"color-contrast": {"enabled": colours}}
    return tab.evaluate("""async rules => {
      const others = [...document.querySelectorAll('main pre > code')].slice(2);
      const found = await axe.run({exclude: others}, {rules, resultTypes: ['violations'], preload: false});
      return found.violations.filter(v => /serious|critical/.test(v.impact))
        .map(v => [v.id, v.nodes.length, v.nodes[0].target.join(' ').slice(0, 80)]);
    }""", rules)

def look(browser, site, base, page):
    "All findings on a page, at every width. The tabs of a browser share what they have loaded."
    from axe_playwright_python.base import AXE_SCRIPT
    found = [Finding("dead anchor", 0, href) for href in sorted(site.dead[page])]
    said = []
    tab = browser.new_page()
    tab.on("console", lambda m: m.type == "error" and said.append(("console error", m.text[:120])))
    tab.on("pageerror", lambda e: said.append(("console error", str(e)[:120])))
    tab.on("request", lambda r: r.url.startswith((base, "data:", "blob:"))
           or said.append(("external request", r.url[:120])))
    tab.goto(base + page, wait_until="load")
    tab.evaluate(AXE_SCRIPT)
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 900})
        for t in tab.evaluate(TABLES):
            found.append(Finding("table cut", width, f"{t['heads']} (by {t['over']} px)"))
            if t["hidden"]: found.append(Finding("deciding column hidden", width, t["hidden"]))
            if t["caption"]: found.append(Finding("caption cut", width, t["heads"]))
            if t["lost"]: found.append(Finding("first column scrolls away", width, t["heads"]))
        shrunk = SHRUNK if width == PHONE else 0
        found += [Finding(kind, width, what) for kind, what in tab.evaluate(FIGURES, shrunk)]
        if (over := tab.evaluate(SIDEWAYS)) > 1: found.append(Finding("page scrolls sideways", width, f"{over} px"))
        found += [Finding(f"axe {rule}", width, where) for rule, n, where in axe(tab, width == WIDTHS[0]) for _ in range(n)]
    tab.set_viewport_size({"width": WIDTHS[0], "height": 900})
    tab.emulate_media(color_scheme="dark")
    found += [Finding(f"axe {rule} in the dark", WIDTHS[0], where) for rule, n, where in axe(tab, True) for _ in range(n)]
    if tab.evaluate(PRINTED): found.append(Finding("printed in the dark", WIDTHS[0], page))
    tab.emulate_media(color_scheme="light")
    found += [Finding(f"anchor {wrong.split(' (')[0]}", WIDTHS[0], f"#{fragment} {wrong}")
              for fragment, wrong in tab.evaluate(LANDINGS, sorted(site.named[page]))]
    tab.close()
    return found + [Finding(kind, 0, text) for kind, text in dict.fromkeys(said)]

# ------------------------------------------------------------------------------------------------------------ the site

@functools.cache
def the_site():
    "The rendered site, or nothing."
    folder = Path(os.environ.get("BROWSER_SITE", ROOT / "_docs"))
    return Site(folder) if (folder / "index.html").is_file() else None

@contextlib.contextmanager
def chromium():
    from playwright.sync_api import sync_playwright
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser.new_context(reduced_motion="reduce")
        browser.close()

# ----------------------------------------------------------------------------------------------------------- the claims

ADDRESSES = sorted(re.sub(r"(^|/)\d+[a-zA-Z0-9]*_([^/]+)\.ipynb$", r"\1\2.html", p.relative_to(NBS).as_posix())
                   .replace(".ipynb", ".html") for p in NBS.rglob("*.ipynb") if not re.search(r"(^|/)[._]", str(p)))

@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
    pytest.importorskip("axe_playwright_python", reason="needs axe: pip install -e '.[browser]'")
    if not CHROMIUM: pytest.skip("needs Chromium on the path (Debian: apt-get install chromium)")
    with chromium() as found: yield found

FAULTY = """<!doctype html><html lang=en><head><title>t</title><style>td, th {white-space: nowrap}</style></head>
<body><main><div style="overflow-x: auto; width: 200px"><table>
<caption>said</caption><tr><th>a long head of a table, indeed<th>Verdict
<tr><td>1<td>2
</table></div><div style="width: 90px; overflow: hidden"><svg width=300 height=9 id=cut></svg></div>
<div style="width: 90px; overflow: auto"><svg width=300 height=9 id=scrolls></svg></div>
<img alt=small width=300 height=9 style="width: 90px" src="data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA=">
<div style="width: 3000px; height: 2000px; color: #ccc; background: #fff">pale</div><a href="#no">dead</a>
<p id="un">here</p><a href="#un">alive</a><script src="https://example.org/x.js"></script>
<script>throw Error("x")</script></main></body></html>"""

def test_every_kind_of_fault_is_found_where_it_was_planted(browser, tmp_path):
    (tmp_path / "faulty.html").write_text(FAULTY, encoding="utf-8")
    site = Site(tmp_path)
    with site.served() as base: kinds = {f.kind for f in look(browser, site, base, "faulty.html")}
    planted = {"table cut", "deciding column hidden", "first column scrolls away", "caption cut", "figure cut",
               "figure scrolls", "figure too small", "page scrolls sideways", "dead anchor", "console error",
               "external request", "axe color-contrast", "axe color-contrast in the dark", "anchor is not marked"}
    assert not planted - kinds, f"not seen: {planted - kinds}"

@pytest.mark.parametrize("page", ADDRESSES)
def test_a_page_is_whole_in_a_browser_at_three_widths(browser, page):
    if not (site := the_site()): pytest.skip("needs the rendered site: `make docs`, with Quarto")
    assert page in site.pages, f"not among the pages in {site.folder}"
    with site.served() as base: found = look(browser, site, base, page)
    found = Counter(f for f in found if (f.kind, f.width) not in ALLOWED)
    print(f"{page}:", dict(Counter(f.kind for f in found.elements())) or "nothing")
    assert not found, "\n".join(f"{n} {f.kind} at {f.width or 'any'}: {f.what}" for f, n in sorted(found.items()))
