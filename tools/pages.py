"""Executes again the pages whose rows have changed since they were last run, then the front page and the README.

    python tools/pages.py            execute what is stale
    python tools/pages.py --check    change nothing; name what is stale, exit status 1
"""
import hashlib
import re
import subprocess
import sys
from pathlib import Path

import nbformat
from moe_redistribution.record.ledger import ledger_rows
from moe_redistribution.evidence.registrations import FILE
from moe_redistribution.studies.sparsity_moves.reading import PAGES, page_rows
from moe_redistribution.evidence.dataset import fingerprint

ROOT = Path(__file__).resolve().parent.parent
# they count what is recorded, and print no hash
ALWAYS = ("status.ipynb", "figures_tables.ipynb", "index.ipynb", "5_evidence/04_dataset.ipynb")


def printed(path):
    "The hash that a page's stored outputs print, or nothing."
    outputs = [o for cell in nbformat.read(path, as_version=4).cells for o in cell.get("outputs", [])]
    return re.findall(r"with hash `([0-9a-f]{12})`", str(outputs))


def stale():
    "Notebooks whose printed hash is not that of the rows they would read now."
    found = {next((ROOT / "nbs").rglob(f"{page}.ipynb")): page for page in PAGES}
    rows = {path: page_rows(page) for path, page in found.items()}
    old = [path for path, got in rows.items() if printed(path) != [fingerprint(got)] * bool(len(got))]
    method, claims = (ROOT / "nbs" / page
                      for page in ("7_record/02_ledger.ipynb", "6_studies/sparsity_moves/9z_ledger.ipynb"))
    # the first prints the hash, both show the table
    old += [method, claims] * (printed(method) != [fingerprint(ledger_rows())])
    register = ROOT / "nbs" / "2_instruments" / "182_registrations.ipynb"
    own = hashlib.sha256((ROOT / FILE).read_bytes()).hexdigest()[:12]
    return old + [register] * (printed(register) != [own])


def main(args):
    paths = stale()
    print("\n".join(str(p.relative_to(ROOT)) for p in paths) or "Every page shows the rows that are recorded.")
    if not paths or "--check" in args:
        return int(bool(paths))
    notebooks = " ".join(str(p.relative_to(ROOT)) for p in [*paths, *(ROOT / "nbs" / n for n in ALWAYS)])
    return subprocess.run(["make", "outputs", f"NB={notebooks}"], cwd=ROOT).returncode or subprocess.run(
        [sys.executable, ROOT / "tools" / "readme.py"]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
