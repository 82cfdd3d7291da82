"""Measures the committed checkpoints again with every instrument that was recorded of them, and compares value by value.

    python tools/comes_out.py                            every checkpoint, every instrument but the slowest (minutes)
    python tools/comes_out.py modadd/glu-h340-gelu ...   these conditions
    --only fourier,bilinear    these instruments    --out FILE.csv    the table as a file

One line a condition, rule, seed, instrument and metric: the largest difference, its tolerance, how many rows are compared
and how many of them lie outside. Exit status 1 if any does.
"""
import argparse
import sys
import time

import numpy as np
import pandas as pd
import torch
from moe_redistribution.conditions import condition
from moe_redistribution.recording import instruments_for, rules_for
from moe_redistribution.results import checkpoint, checkpoint_seeds, recorded, recorded_checkpoints
from moe_redistribution.trace import ROW_COLUMNS

KEYS = [c for c in ROW_COLUMNS if c not in ("step", "value", "n_examples")]  # the step is the run's, which the file does not hold
SHOWN = ["condition", "rule", "seed", "instrument", "metric"]


def fitting(name, rule):
    "Instruments that are recorded of a condition at a rule and need its weights only."
    return [i for i, x in instruments_for(name).items() if not x.live and rule in rules_for(name, "authors", i)]


def differences(name, rule, instrument, root=None):
    "Recorded rows of the file's seeds beside what its weights give: `was`, `value`, `off`; a row that only one has is off by infinity."
    params, seeds = checkpoint(name, rule, root), checkpoint_seeds(name, rule, root)
    found = instruments_for(name)[instrument].rows(params, name, seeds, stream="authors", rule=rule)
    was = recorded(name, instrument, root)
    was = was[(was["stream"] == "authors") & (was["rule"] == rule) & was["seed"].isin(seeds)]
    both = was.merge(found, "outer", KEYS, suffixes=("_was", ""), indicator="there")
    off = (both["value"] - both["value_was"]).abs().where(both["there"] == "both", np.inf)
    off = off.mask((both["there"] == "both") & both["value"].isna() & both["value_was"].isna(), 0.).fillna(np.inf)
    return both.assign(off=off, instrument=instrument)


def main(args):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("conditions", nargs="*")
    p.add_argument("--only")
    p.add_argument("--out")
    args = p.parse_args(args)
    torch.set_num_threads(1)
    names, whole = [str(condition(n)) for n in args.conditions], []
    for name, rule in recorded_checkpoints():
        if names and name not in names: continue
        for i in fitting(name, rule):
            if args.only and i not in args.only.split(","): continue
            start = time.time()
            try: whole.append(differences(name, rule, i))
            except Exception as e: print(f"{name} {rule} {i}: {type(e).__name__}: {e}"); continue
            d = whole[-1]
            print(f"{name} {rule} {i}: {len(d)} rows, {time.time() - start:.0f} s; {d['off'].map(np.isinf).sum()} in one only", flush=True)
            if args.out: pd.concat(whole).to_parquet(args.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
