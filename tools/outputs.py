"""Runs notebooks and keeps their outputs in them: `make outputs NB=...`.

    python tools/outputs.py NB...    one after another; the first that fails ends it, and stays as it was

A page with a figure whose ticks overlap or cannot be read on a phone (tools/ticks.py) fails, too.

A notebook is run without the outputs that it has: the runner leaves a cell that no longer shows anything as it was, and
a page would go on showing what its code does not say. It is a copy that runs, beside the page, and takes its place when
it is done."""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from moe_redistribution.training.store import write_whole

BIN = Path(sys.executable).parent
TOOLS = Path(__file__).resolve().parent


def without_outputs(text):
    "The text of a notebook, every code cell as if it had never run."
    nb = json.loads(text)
    for cell in nb["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return json.dumps(nb, indent=1, ensure_ascii=False) + "\n"


def run(copy):
    "Run a notebook in place; CalledProcessError where it fails, ValueError where a figure's ticks do."
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "ticks"
        path = os.pathsep.join(filter(None, (str(TOOLS), os.environ.get("PYTHONPATH"))))
        subprocess.run([BIN / "exec_nb", copy.name, "--dest", copy.name, "--exc_stop"], cwd=copy.parent, check=True,
                       env={**os.environ, "MATPLOTLIBRC": str(TOOLS), "PYTHONPATH": path, "TICKS": str(said)})
        if said.exists() and (found := sorted(set(said.read_text(encoding="utf-8").splitlines()))):
            raise ValueError("\n".join(found))


def main(paths):
    for path in map(Path, paths):
        print(path, flush=True)
        copy = path.with_name(f"_{path.name}")  # nbdev takes no page that begins so
        write_whole(copy, without_outputs(path.read_text(encoding="utf-8")).encode())
        try:
            run(copy)
            subprocess.run([BIN / "nbdev_clean", "--fname", copy], check=True)
            subprocess.run([sys.executable, TOOLS / "pictures.py", copy], check=True)
            write_whole(path, copy.read_bytes())
        except subprocess.CalledProcessError as failed:
            return failed.returncode
        except ValueError as wrong:
            print(wrong, file=sys.stderr)
            return 1
        finally:
            copy.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
