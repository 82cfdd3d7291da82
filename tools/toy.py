"""nbs/toy_data.js: four committed models that a reader looks into.

    python tools/toy.py            write nbs/toy_data.js
    python tools/toy.py --check    change nothing; exit status 1 if the file is not what checkpoints and rows make

nbs/toy.js computes with it, in the reader's browser. What is left of a model without its FFN hangs on attention, so its
weights are kept whole, and a browser gives every digit that the checkpoint gives; those of the FFN, two thirds of
all, are kept in half precision.
"""
import base64
import json
import sys
from pathlib import Path

import torch

from moe_redistribution.evidence.checkpoints import checkpoint, checkpoint_seeds
from moe_redistribution.evidence.selection import rows_of
from moe_redistribution.report.figures import SHORT, colour, pick, without_ffn
from moe_redistribution.report.shapes import MODELS as HUES
from moe_redistribution.instruments.copying import without_copy
from moe_redistribution.instruments.ablation import combine_edits
from moe_redistribution.models.condition import condition
from moe_redistribution.models.population import forward
from moe_redistribution.studies.sparsity_moves.arms import TABLE1
from moe_redistribution.tasks.task import get_task, nulls
from moe_redistribution.basics.files import write_whole

FILE = Path(__file__).resolve().parent.parent / "nbs" / "toy_data.js"
NOTE = "// Made from checkpoints/ and results/ by `python tools/toy.py`. Do not edit.\n"
MODELS = {"dense": TABLE1["FFN"], "slow dense": f"{TABLE1['FFN']}+ffnlr0.125", "mixture": TABLE1["MoE"],
          "frozen router": TABLE1["MoE, frozen router"]}
WHOLE = ("W_E", "W_pos", "W_Q", "W_K", "W_V", "W_O", "b_O", "W_router", "ffn_mean")
HALF = ("W_up", "b_up", "W_down", "b_down")
EDITS = {"on": ("none", "none"), "zero": ("ffn_out", "zero"), "mean": ("ffn_out", "mean")}
PLACES = get_task("add7").positions[:4]
OWN = dict(stream="authors", rule="first256")  # the committed checkpoints


def typical(name):
    """The committed seed that is closest to the mean of all of them in what the front page speaks of (tens and
    hundreds, FFN at its mean, current token ruled out), and that number of every seed."""
    left = without_ffn(rows_of("copying", [name]), name, **OWN)[checkpoint_seeds(name)]
    return int((left - left.mean()).abs().idxmin()), left


def one(name, seed):
    "Parameters of one committed seed, without the axes of seed and layer, and the FFN's mean as `ablate` takes it."
    c, i = condition(name), checkpoint_seeds(name).index(seed)
    params, seen = {n: v[i:i + 1] for n, v in checkpoint(name).items()}, {}
    forward({n: v.double() for n, v in params.items()}, get_task("add7").tokens, c, sink=seen)
    out = {n: v[0] if n in ("W_E", "W_pos") else v[0, 0] for n, v in params.items()}
    return out | {"ffn_mean": seen["ffn_out"][0].mean(0).float()}


def packed(params, names, kind):
    "Tensors one after the other, little-endian, as base64."
    flat = torch.cat([params[n].flatten() for n in names if n in params]).numpy().astype(kind)
    return base64.b64encode(flat.tobytes()).decode()


def scores(name, seed):
    "What is recorded of a seed: FFN → copies allowed or ruled out → share right at each digit, ones first."
    ablated, copied = (rows_of(i, [name]) for i in ("ablation", "copying"))
    asked = {"allowed": (ablated, "digits"), "out": (copied, "digits_no_copy")}
    def at(rows, **where): return round(pick(rows, condition=name, seed=seed, **OWN, **where)["value"].item(), 4)
    return {ffn: {copies: [at(rows, metric=metric, site=site, edit=edit, position=p) for p in PLACES]
                  for copies, (rows, metric) in asked.items()} for ffn, (site, edit) in EDITS.items()}


def wrong_hundreds(name):
    """Why passing the digit on beats a model on hundreds: of its wrong ones without the FFN (at its mean, all committed
    seeds), the share that repeat the token that is read; and with copies ruled out, where nothing carries, the share
    that say one more than the digit of the question."""
    t, c, at = get_task("add7"), condition(name), list(get_task("add7").read)[2]
    params, seen = {n: v.double() for n, v in checkpoint(name).items()}, {}
    forward(params, t.tokens, c, combine_edits(name, {"ffn_out": "mean"}), seen)
    digit, reads, says = t.tokens[:, 2], t.tokens[:, at], seen["logits"][:, :, at].argmax(-1)
    ruled, asked = without_copy(params, name, {"ffn_out": "mean"})
    still = asked[:, 2] & (t.targets[:, 2] == digit) & (ruled[:, :, 2] != t.targets[:, 2])
    return {"allowed": round((says == reads)[says != t.targets[:, 2]].double().mean().item(), 4),
            "out": round((ruled[:, :, 2] == (digit + 1) % 10)[still].double().mean().item(), 4)}


def model(key, name):
    "One model as the page gets it."
    seed, left = typical(name)
    params = one(name, seed)
    return dict(key=key, condition=name, seed=seed, seeds=len(left), left=round(left[seed], 4),
                mean=round(left.mean(), 4), hue=colour(name), scores=scores(name, seed),
                wrong_hundreds=wrong_hundreds(name),
                shapes={n: list(params[n].shape) for n in WHOLE + HALF if n in params},
                whole=packed(params, WHOLE, "<f4"), half=packed(params, HALF, "<f2"))


def passed_on():
    "Share right at each digit, as in `scores`, of who only passes the digit of the question on."
    t = get_task("add7")
    hit, asked = nulls(t)["pass-through"][:, :4].double(), (t.tokens[:, list(t.read)] != t.targets)[:, :4]
    return {"allowed": [round(v, 4) for v in hit.mean(0).tolist()],
            "out": [round(v, 4) for v in ((hit * asked).sum(0) / asked.sum(0)).tolist()]}


def data():
    "All that nbs/toy.js asks for."
    t = get_task("add7")
    return dict(carries=int((t.targets[:, 2] != t.tokens[:, 2]).sum()),
                hues=[HUES[word] for word in list(SHORT.values())[:4]], models=[model(*m) for m in MODELS.items()], passed_on=passed_on())


def text():
    "The file."
    return NOTE + f"globalThis.toyData = {json.dumps(data(), ensure_ascii=False, separators=(',', ':'))};\n"


def main():
    made = text().encode()
    if "--check" in sys.argv[1:]:
        sys.exit(None if FILE.exists() and FILE.read_bytes() == made else f"{FILE.name}: run python tools/toy.py")
    write_whole(FILE, made)
    print(f"wrote {FILE.name}, {len(made):,} bytes")


if __name__ == "__main__":
    main()
