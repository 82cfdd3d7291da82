"""Measures the committed checkpoints again with every instrument that was recorded of them, and compares value by
value.

    python tools/comes_out.py                              every checkpoint and instrument: half an hour of a core
    python tools/comes_out.py modadd/glu-h340-gelu …       these conditions
    --only fourier,bilinear    these instruments           --out FILE.csv    every line, not only those outside
    --fill    adds rows that an instrument gives by now and the record lacks, where all others come out

One line a condition, rule, seed, instrument and metric: rows compared, the largest difference, and how many lie outside
the tolerance. `lost` are rows that the file no longer gives, `since` those that the instrument has learned to give
since the seed was recorded. Exit status 1 if a row lies outside or is lost. Left out are learning speed, which trains
its own seeds and says nothing of a file, and the paper's probes of the count, which take minutes a condition.
"""
import argparse
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from moe_redistribution.models.condition import condition
from moe_redistribution.instruments.histogram import _histogram_rows
from moe_redistribution.instruments.instrument import own_part
from moe_redistribution.instruments.measuring import rules_for
from moe_redistribution.studies.sparsity_moves.reading import measured_with
from moe_redistribution.evidence.table_files import ROOT, table_path, write_table
from moe_redistribution.evidence.checkpoints import checkpoint, checkpoint_path, checkpoint_seeds
from moe_redistribution.evidence.selection import recorded_rows
from moe_redistribution.studies.sparsity_moves.reading import _recorded_checkpoints
from moe_redistribution.record.runs import write_frame
from moe_redistribution.basics.files import as_committed
from moe_redistribution.training.store import unseal
from moe_redistribution.instruments.rows import ROW_COLUMNS

# the step is the run's, which the file does not hold
KEYS = [c for c in ROW_COLUMNS if c not in ("step", "value", "n_examples")]

# What rounding to half moves, by kind of metric, found with seeds whose units are all there: about twice the most that
# they show. Where nothing is rounded, a processor that sums in another order still moves sums by `SUMMED`, a prediction
# at a tie, and an iterated fit.
EXAMPLES = ("digits", "digits_alone", "exact", "copy_share", "load", "largest_load", "routing_fraction",
            "digits_no_copy", "copied", "flip", "flip_known", "broken", "drop", "count_accuracy", "count_right",
            "count_reread")  # shares of examples
# shares of units: one of 340 or of 512 may cross the threshold
UNITS = ("dead_share_paper", "live_share", "selective_5")
COUNTS = ("key_count", "neurons_for_99", "n_keys")  # the frequency or neuron at a threshold
# not between 0 and 1, so relative to the largest of that metric in that seed
SIZES = ("logit", "loss", "norm_", "gradient_")
# what a fit on activations says
FITS = ("answer_accuracy", "operation_", "carry_", "probe_", "attn_lift", "ffn_lift", "coactivation", "count_readout")
SUMMED = 1e-5


def tolerance(metric, largest, n_examples, rounded, edit="none"):
    """What rounding explains: of a metric over `n_examples`, the `largest` of which is so large; `rounded`: is any
    tensor in half?"""
    two = 2.1 / n_examples if n_examples else 0.
    # with a part replaced, many answers are near a tie
    if metric in EXAMPLES: return (.001 if edit == "none" else .006) * rounded + two
    # two neurons may swap ranks, so that another one is the last that is kept
    if metric == "kept_accuracy": return SUMMED + .01 * rounded
    if metric in UNITS: return .0045 * rounded
    if metric in COUNTS: return 1. * rounded
    if metric.endswith("_p"): return .0001 + .12 * rounded  # a rank among twenty or so shuffles: two of them
    if any(s in metric for s in SIZES): return (SUMMED + .001 * rounded) * max(1., largest) + .001 * rounded
    # stopped before they end, so they move like a sample: on another processor one of 360 examples moved by .072, which
    # is 1 / sqrt(n), and half as much again is let off
    if metric.startswith(FITS): return .005 + two + (.01 + 1.5 / max(1, n_examples)**.5) * rounded
    return SUMMED + .003 * rounded


def fitting(name, rule):
    "Instruments that are recorded of a condition at a rule and need its weights only."
    return [i for i, x in measured_with(name).items() if not x.live and rule in rules_for(name, "authors", i)]


def measured(name, rule, instrument, root=None):
    """Rows of a file's seeds as they would be recorded, but for the paper's probes of the count, 2,000 steps of descent
    at three sites, which take minutes."""
    params, seeds, how = (checkpoint(name, rule, root), checkpoint_seeds(name, rule, root),
                          dict(stream="authors", rule=rule))
    if instrument == "histogram":
        return _histogram_rows(params, name, seeds, splits=own_part(name, seeds, "authors"), **how)
    return measured_with(name)[instrument].rows(params, name, seeds, **how)


def differences(name, rule, instrument, root=None, found=None):
    """Recorded rows of the seeds in a file (`value_was`) beside what its weights give (`value`), with `off`, `allowed`
    and `there`: both, lost or since.

    `found`: rows that were measured already, of some of what is recorded; the rest is then not missed."""
    seeds, tensors = checkpoint_seeds(name, rule, root), unseal(checkpoint_path(name, rule, root))[0]
    was, partly = recorded_rows(name, instrument, root), found is not None
    if not partly: found = measured(name, rule, instrument, root)
    was = was[(was["stream"] == "authors") & (was["rule"] == rule) & was["seed"].isin(seeds)
              & ~((was["edit"] == "paper") & (instrument == "histogram"))]
    both = was.merge(found, "right" if partly else "outer", KEYS, suffixes=("_was", ""), indicator="there")
    both["there"] = both["there"].astype(str).replace({"left_only": "lost", "right_only": "since"})
    nothing = both["value"].isna() & both["value_was"].isna()
    both["off"] = ((both["value"] - both["value_was"]).abs().mask(nothing, 0.).fillna(np.inf)
                   .where(both["there"] == "both"))
    rounded = any(t.dtype == torch.float16 for t in tensors.values())
    largest = both["value_was"].abs().groupby([both["seed"], both["metric"]]).transform("max")
    both["allowed"] = [tolerance(*x[:3], rounded, x[3])
                       for x in zip(both["metric"], largest, both["n_examples_was"], both["edit"])]
    return both.assign(instrument=instrument)


def outside(d):
    "Rows that do not come out: off by more than is allowed, or lost."
    return d[(d["off"] > d["allowed"]) | (d["there"] == "lost")]


def summary(d):
    "One line a condition, rule, seed, instrument and metric."
    by = ["condition", "rule", "seed", "instrument", "metric"]
    d = d.assign(outside=d.index.isin(outside(d).index), lost=d["there"] == "lost", since=d["there"] == "since")
    return d.groupby(by, sort=False).agg(rows=("off", "size"), worst=("off", "max"), allowed=("allowed", "max"),
                                         outside=("outside", "sum"), lost=("lost", "sum"),
                                         since=("since", "sum")).reset_index()


def fill(d, name, rule, instrument, root):
    "Adds the rows of `d` that the record lacks, where recording would have put them; the others keep their values."
    task = name.partition("/")[0]
    table = pd.read_parquet(as_committed(table_path(instrument, task, root)))
    old = table[table["condition"] == name]
    steps = old.query("stream == 'authors' and rule == @rule").groupby("seed")["step"].first()
    new = d[d["there"] == "since"]
    new = new.assign(step=new["seed"].map(steps).astype(old["step"].dtype),
                     n_examples=new["n_examples"].astype(old["n_examples"].dtype))[list(ROW_COLUMNS)]
    write_table(pd.concat([table, new], ignore_index=True), instrument, task, root)
    return len(new)


def main(args):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("conditions", nargs="*")
    p.add_argument("--only")
    p.add_argument("--out")
    p.add_argument("--fill", action="store_true")
    args = p.parse_args(args)
    torch.set_num_threads(1)
    names, lines = [condition(n).name for n in args.conditions], []
    for name, rule in _recorded_checkpoints():
        for i in [i for i in fitting(name, rule)
                  if (not names or name in names) and (not args.only or i in args.only.split(","))]:
            start = time.time()
            d = differences(name, rule, i)
            lines.append(summary(d))
            bad, since = len(outside(d)), (d["there"] == "since").sum()
            print(f"{name} {rule} {i}: {len(d)} rows in {time.time() - start:.0f} s, {bad} outside, "
                  f"{since} since", flush=True)
            if bad: print(lines[-1].query("outside > 0").to_string(index=False))
            elif args.fill and since: print(f"  {fill(d, name, rule, i, ROOT)} rows added")
    whole = pd.concat(lines, ignore_index=True)
    if args.out: write_frame(whole.round(9), Path(args.out))
    print(f"{whole['rows'].sum():,} rows, {whole['outside'].sum()} outside, {whole['since'].sum()} since")
    return int(whole["outside"].sum() > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
