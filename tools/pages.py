"""Executes again the pages that would read something else than when they were last run, then the front page and the
README.

    python tools/pages.py            execute what is stale
    python tools/pages.py --check    change nothing; name what is stale, exit status 1

What a page reads is stored with its output (`report.pages`); nothing is listed here."""
import subprocess
import sys
from pathlib import Path

from moe_redistribution.report.pages import _stale_pages

ROOT = Path(__file__).resolve().parent.parent


def main(args):
    stale = _stale_pages(ROOT)
    print("\n".join(stale) or "Every page shows the rows that are recorded.")
    if not stale or "--check" in args:
        return int(bool(stale))
    # the front page last
    notebooks = " ".join(f"nbs/{p}" for p in sorted(stale, key=lambda p: p.count("/"), reverse=True))
    return subprocess.run(["make", "outputs", f"NB={notebooks}"], cwd=ROOT).returncode or subprocess.run(
        [sys.executable, ROOT / "tools" / "readme.py"]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
