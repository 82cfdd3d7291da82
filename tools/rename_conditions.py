"""Writes conditions with events as they are spelled today, in files that were recorded before.

    python tools/rename_conditions.py results data       every CSV and parquet file below these folders
    python tools/rename_conditions.py --check results    change nothing; name what would change, exit status 1

Only names change (`add7/ffn-h8-silu+reset5+part1` is `add7/ffn-h8-silu@5:reset1`), in cells and in names of files; the
order of rows stays. Files without such a name keep their bytes. `renamed_frame` does the same to one frame."""
import csv
import io
import sys
from pathlib import Path

import pandas as pd

from moe_redistribution.models.events import renamed
from moe_redistribution.record.runs import write_frame


def renamed_frame(frame):
    "The frame with every text column's old names in today's spelling; types and order stay."
    out = frame.copy()
    for name, column in frame.items():
        if isinstance(column.dtype, pd.CategoricalDtype):
            if all(isinstance(v, str) for v in column.cat.categories):
                out[name] = column.cat.rename_categories({v: renamed(v) for v in column.cat.categories})
        elif column.dtype == object or pd.api.types.is_string_dtype(column):
            known = {v: renamed(v) for v in column.unique() if isinstance(v, str)}
            if any(old != new for old, new in known.items()): out[name] = column.map(lambda v: known.get(v, v))
    return out


def renamed_csv(text):
    "The text of a CSV file with its old names in today's spelling; lines without one keep their bytes."
    def line(old):
        cells = next(csv.reader([old]), [])
        new = [renamed(c) for c in cells]
        if new == cells: return old
        csv.writer(out := io.StringIO(), lineterminator="\n").writerow(new)
        return out.getvalue()
    return "".join(line(old) for old in text.splitlines(keepends=True))


def changed(path):
    "Does a file need to be written anew? What it would hold, or None."
    if path.suffix == ".csv":
        old = path.read_text(encoding="utf-8")
        return new if (new := renamed_csv(old)) != old else None
    old = pd.read_parquet(path)
    return new if not (new := renamed_frame(old)).equals(old) else None


def destination(path, root):
    "Where a file belongs."
    return root / renamed(path.relative_to(root).as_posix())


def main(*args):
    check, found = "--check" in args, 0
    for root in (Path(a) for a in args if a != "--check"):
        for path in sorted(p for p in root.rglob("*") if p.suffix in (".csv", ".parquet")):
            new, at = changed(path), destination(path, root)
            if new is None and at == path: continue
            found += 1
            print(path if at == path else f"{path} -> {at.name}")
            if check: continue
            if path.suffix == ".csv" and new is not None: path.write_text(new, encoding="utf-8")
            elif new is not None: write_frame(new, path)
            if at != path: path.rename(at)
    print(f"{found} files {'to rename' if check else 'renamed'}")
    return int(check and found > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
