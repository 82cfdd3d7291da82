"""Runs notebooks and keeps their outputs in them: `make outputs NB=...`.

    python tools/outputs.py NB...            one after another; the first that fails ends it, and stays as it was
    python tools/outputs.py --check NB...    change nothing; name every cell that shows something else than it did
    python tools/outputs.py --seal NB...     run nothing; seal what notebooks show, on the word of who knows that a run gave it

A page with a figure whose ticks overlap or cannot be read on a phone (tools/ticks.py) fails, too.

A notebook is run without the outputs that it has: the runner leaves a cell that no longer shows anything as it was, and
a page would go on showing what its code does not say. It is a copy that runs, beside the page, and takes its place when
it is done, unless somebody has changed the page meanwhile. Its metadata then hold the seal that `check` asks for.

What was stored and what a run shows today are compared in words, numbers and pictures (`differences`). A cell that
tells how fast this machine is, or what it is, says `#| of_this_machine`, and need only show something."""
import base64
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from frame import RESULTS, fold, options
from PIL import Image
from moe_redistribution.evidence.table_files import ROOT, write_sums
from moe_redistribution.record.outputs import RUN_SEAL, _seal_of_run
from moe_redistribution.basics.files import write_whole

BIN = Path(sys.executable).parent
TOOLS = Path(__file__).resolve().parent


def without_outputs(text, exports=True):
    "The text of a notebook, every code cell as if it had never run; without those that export if `exports` is False."
    nb = json.loads(text)
    for cell in nb["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
            if not exports and "nbdev_export(" in "".join(cell["source"]): cell["source"] = []
    return json.dumps(nb, indent=1, ensure_ascii=False) + "\n"


def run(copy):
    """Run a notebook in place; CalledProcessError where it fails, ValueError where a figure's ticks do, ConnectionError
    for one that ends in one, since it asks for what is out of reach here."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "ticks"
        path = os.pathsep.join(filter(None, (str(TOOLS), os.environ.get("PYTHONPATH"))))
        done = subprocess.run([BIN / "exec_nb", copy.name, "--dest", copy.name, "--exc_stop"], cwd=copy.parent,
                              env={**os.environ, "MATPLOTLIBRC": str(TOOLS), "PYTHONPATH": path, "TICKS": str(said)},
                              stderr=subprocess.PIPE, text=True)
        print(done.stderr, end="", file=sys.stderr)
        last = done.stderr.strip().rpartition("\n")[2]
        if done.returncode and last.startswith("ConnectionError: "): raise ConnectionError(last)
        done.check_returncode()
        if said.exists() and (found := sorted(set(said.read_text(encoding="utf-8").splitlines()))):
            raise ValueError("\n".join(found))


def folded(text, page):
    """The text of a notebook, a page of results so that JupyterLab hides the code that the site folds; `page`: its path
    under nbs/."""
    nb = json.loads(text)
    for cell in nb["cells"] if re.match(RESULTS, page) or "/" not in page else []:
        if cell["cell_type"] != "code": continue
        source = "".join(cell["source"])
        given = options(source)
        hidden = "hide" in given or given.get("echo") == "false" or fold({**cell, "source": source}, page) is not None
        cell["metadata"].pop("jupyter", None)
        if hidden and "hide_input" not in given: cell["metadata"]["jupyter"] = {"source_hidden": True}
    return json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def sealed(text):
    "The bytes of a notebook of this text with the seal of a run in its metadata."
    nb = json.loads(text)
    nb["metadata"][RUN_SEAL] = _seal_of_run(text.encode())
    return (json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True) + "\n").encode()


def executed(path, text, exports=True):
    "The bytes of a notebook of this text after a run beside `path`, as they would be stored. Errors as `run`."
    copy = path.with_name(f"_{path.name}" if exports else f"_now_{path.name}")  # nbdev takes no page that begins so
    write_whole(copy, without_outputs(text, exports).encode())
    try:
        run(copy)
        subprocess.run([BIN / "nbdev_clean", "--fname", copy], check=True)
        subprocess.run([sys.executable, TOOLS / "pictures.py", copy], check=True)
        page = path.resolve().relative_to(ROOT / "nbs").as_posix() if (ROOT / "nbs") in path.resolve().parents else path.name
        return sealed(folded(copy.read_text(encoding="utf-8"), page))
    finally:
        copy.unlink(missing_ok=True)


# ------------------------------------------------------------------------------- what is stored, and what a run shows

# what is another at every run: places in memory, folders, times
PASSING = [(r"0x[0-9a-f]+", "0x"), (r"(?<![\w.:/])/(?:[\w.-]+/)+", "/"),
           (r"\b\d+(\.\d+)?\s*(µs|ms|s|min|h|seconds?|minutes?|hours?)\b", "a while")]
NUMBER = re.compile(r"(?:(?<![\w.)-])-)?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
TINY, NEAR = 1e-5, 1e-3         # what is smaller is rounding, and a broken number may be off by this part of it
FINE, FAR = 48, 40              # a picture is compared as so many greys a side, each of which may be off by so much


def words(text):
    "The words of an output, without what is another at every run and without layout, and its numbers."
    for pattern, word in PASSING: text = re.sub(pattern, word, text)
    text = re.sub(r"\s+|-{2,}|─+", " ", text)
    return NUMBER.sub("#", text), NUMBER.findall(text)


def near(was, now):
    "Are two numbers, as they are printed, one but for rounding? Whole ones are one or another."
    if was == now or not re.search(r"[.e]", was + now): return was == now
    was, now = (float(x.replace(",", "")) for x in (was, now))
    return abs(was - now) <= max(NEAR * abs(was), TINY)


def alike(was, now):
    "Does one output (of `shown`) say what another does?"
    if isinstance(was, str) != isinstance(now, str): return False
    if isinstance(was, str):
        (said, numbers), (says, today) = words(was), words(now)
        return said == says and all(map(near, numbers, today))
    (a, greys), (b, today) = was, now
    return all(abs(x - y) <= .03 * x for x, y in zip(a, b)) and np.abs(greys - today).max() <= FAR


def shown(cell):
    "What a cell shows: its texts as one, the size and the greys of each picture; not what is told in passing."
    texts, pictures = [], []
    for out in cell.get("outputs", []):
        if out.get("name") == "stderr": continue
        data = out.get("data", {"text/plain": out.get("text", "")})
        texts += ["".join(v) for form, v in sorted(data.items()) if form.startswith("text/")]
        if png := data.get("image/png"):
            picture = Image.open(io.BytesIO(base64.b64decode("".join(png)))).convert("L")
            pictures.append((picture.size, np.asarray(picture.resize((FINE, FINE), Image.BOX), dtype=int)))
    return ["\n".join(texts)] * bool(texts) + pictures


def differences(stored, now):
    "A line for each cell of a notebook (its dict) that shows something else `now`."
    for i, (was, new) in enumerate(zip(stored["cells"], now["cells"])):
        if was["cell_type"] != "code": continue
        a, b = shown(was), shown(new)
        measured = re.search(r"^#\|\s*of_this_machine", "".join(was["source"]), flags=re.M)
        if len(a) == len(b) and (measured or all(map(alike, a, b))): continue
        first = next((x for x in "".join(was["source"]).splitlines() if not x.startswith("#|")), "")
        said = [" | ".join(x if isinstance(x, str) else "a picture" for x in found) or "nothing" for found in (a, b)]
        yield f"cell {i}, {first[:60]}: stored {short(*said)}, today {short(*said[::-1])}"


def short(text, other, n=60):
    "The part of a text that begins where it leaves another."
    at = next((i for i, (x, y) in enumerate(zip(text, other)) if x != y), 0)
    return repr(text[max(0, at - 20):at + n])


def faults(path):
    "What is wrong with a page: cells whose stored outputs are not what a run shows, or why it does not run."
    text = path.read_text(encoding="utf-8")
    try: return [*differences(json.loads(text), json.loads(executed(path, text, exports=False)))]
    except subprocess.CalledProcessError: return ["it does not run"]
    except ConnectionError as away:
        print(f"{path}: not compared, {away}", flush=True)
        return []
    except ValueError as wrong: return str(wrong).splitlines()


def check(paths):
    "Names what is stale, pages side by side on all cores; exit status 1 if anything is."
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        found = {}
        for path, said in zip(paths, pool.map(faults, paths)):
            print(path, *said, sep="\n    ", flush=True)
            if said: found[path] = said
    print(f"{len(paths)} pages, {len(found)} of them stale" + ": make outputs NB=…" * bool(found))
    return int(bool(found))


def main(args):
    paths = [p for p in map(Path, args) if p.name[0] not in "_-"]           # no page that is being run, and no option
    if "--check" in args: return check(paths)
    for path in paths:
        print(path, flush=True)
        text = path.read_text(encoding="utf-8")
        try: made = sealed(text) if "--seal" in args else executed(path, text)
        except subprocess.CalledProcessError as failed:
            return failed.returncode
        except (ValueError, ConnectionError) as wrong:
            print(wrong, file=sys.stderr)
            return 1
        if path.read_text(encoding="utf-8") != text:
            print(f"{path} was changed while it ran, and stays as it is: run it again", file=sys.stderr)
            return 1
        write_whole(path, made)
    write_sums(ROOT)                                              # pages that show rows have sums, too


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
