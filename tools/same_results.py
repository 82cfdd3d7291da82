"""Do two states of the repository record the same?

Rows, runs, histories, comparisons, claims and checkpoints, whatever file holds them.

    python tools/same_results.py 8f80c79             that commit against the files as they lie here
    python tools/same_results.py 8f80c79 HEAD        two commits
    python tools/same_results.py ../other-clone .    two folders

Frames are compared sorted, conditions by what they resolve to. Exit status 1 names each difference. A claim's page is
not compared."""
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pandas as pd
from safetensors.torch import load_file

from moe_redistribution.models.condition import condition
from moe_redistribution.models.events import in_new_names

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("results", "checkpoints", "data")
LINKS = ["page", "rows"]                      # columns of the ledger that say where to look, and not what came out


def folder(state, at):
    "The folder of a state: itself, or a commit's files under `at`."
    if Path(state).is_dir(): return Path(state)
    archive = subprocess.run(["git", "archive", state, *FOLDERS], cwd=ROOT, check=True, capture_output=True).stdout
    tarfile.open(fileobj=io.BytesIO(archive)).extractall(at, filter="data")
    return Path(at)


def names(column):
    "A condition's name as it is written today; what is none (a null of a task, an arm of a study) keeps its own."
    own = lambda n: "/" in n and "." not in n.partition("/")[0]
    return column.map({n: condition(in_new_names(n)).name if own(n) else n for n in column.unique()})


def frames(root):
    "What a state records, by kind: (rows, ablation), (runs,), (history,) and every CSV."
    found = {}
    for path in sorted((root / "results").rglob("*.parquet")):
        kind, *rest = path.relative_to(root / "results").parts
        found.setdefault((kind, *rest[:1]) if kind == "rows" else (kind,), []).append(path)
    for key, paths in found.items():
        whole = pd.concat([pd.read_parquet(p) for p in paths], ignore_index=True)
        texts = [c for c in whole if whole[c].dtype == "category"]
        yield key, whole.astype(dict.fromkeys(texts, str)).assign(condition=lambda f: names(f["condition"].astype(str)))
    for path in sorted((root / "results").rglob("*.csv")):
        if path.name == "manifest.csv": continue                     # hashes of the rows above, by the names of the day
        frame = pd.read_csv(path, dtype=str, keep_default_na=False).apply(lambda f: f.map(in_new_names))
        yield (path.relative_to(root).as_posix(),), frame.drop(columns=[c for c in LINKS
                                                                        if c in frame and "verdict" in frame])


def differences(a, b):
    "In words, how two frames differ; nothing if they hold the same rows in some order."
    if (left := set(a) ^ set(b)): return f"columns {sorted(left)}"
    if len(a) != len(b): return f"{len(a):,} rows and {len(b):,}"
    columns = sorted(a)
    a, b = (f[columns].astype({c: float for c in columns if f[c].dtype.kind in "fi" or str(f[c].dtype) == "Int64"})
            .sort_values(columns, kind="stable", ignore_index=True) for f in (a, b))
    try: pd.testing.assert_frame_equal(a, b, check_dtype=False, check_exact=True)
    except AssertionError as e: return str(e).splitlines()[0]


def tensors(root):
    return {p.relative_to(root).as_posix(): p for p in sorted((root / "checkpoints").rglob("*.safetensors"))}


def compared(before, after):
    "One line for each difference."
    old, new = dict(frames(before)), dict(frames(after))
    for key in sorted(set(old) | set(new)):
        if key in old and key in new: said = differences(old[key], new[key])
        else: said = "only before" if key in old else "only after"
        if said: yield f"{' '.join(key)}: {said}"
        else: print(f"  {' '.join(key)}: the same {len(new[key]):,} rows")
    old, new = tensors(before), tensors(after)
    for name in sorted(set(old) ^ set(new)): yield f"{name}: only {'before' if name in old else 'after'}"
    for name in sorted(set(old) & set(new)):
        a, b = load_file(old[name]), load_file(new[name])
        if set(a) != set(b) or any(a[n].dtype != b[n].dtype or not a[n].equal(b[n]) for n in a):
            yield f"{name}: other weights"


def main(before, after=str(ROOT)):
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        lines = list(compared(folder(before, one), folder(after, two)))
    print("\n".join(lines) or "No difference.")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
