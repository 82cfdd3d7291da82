"""The trainer of a browser tab (trainer/) takes the library's steps, reads a model as the library does, and keeps one
that the library loads.

    python tests/test_trainer.py        writes trainer/trace.json anew: what stands in for node where there is none"""
import base64
import hashlib
import json
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import ks_2samp

from moe_redistribution.instruments.copying import copying_rows
from moe_redistribution.models.condition import condition
from moe_redistribution.models.population import check_population, member, predict
from moe_redistribution.tasks.data import SEEDS, draw, training_pool
from moe_redistribution.tasks.task import digits, exact, get_task
from moe_redistribution.training.loop import init_members, train_interval, unflatten
from moe_redistribution.record.cli import main
from tiers import first

ROOT = Path(__file__).resolve().parent.parent
TRAINER = ROOT / "trainer"
ADD7 = get_task("add7")
ARMS = {"dense": ("add7/ffn-h256-silu", dict(arm="dense")),
        "slow": ("add7/ffn-h256-silu+ffnlr0.125", dict(arm="dense", rate=.125)),
        "mixture": ("add7/moe-e4k1-h256-silu", dict(arm="mixture", experts=4)),
        "frozen": ("add7/moe-e4k1-h256-silu+frozen", dict(arm="frozen", experts=4))}
OTHERS = {"narrow": ("add7/ffn-h64-silu", dict(arm="narrow")),
          "three experts": ("add7/moe-e3k1-h255-silu", dict(arm="mixture", experts=3)),
          "eight, frozen, fast": ("add7/moe-e8k1-h256-silu+frozen+ffnlr8", dict(arm="frozen", experts=8, rate=8)),
          "one expert": ("add7/moe-e1k1-h256-silu+ffnlr0.5", dict(arm="mixture", experts=1, rate=.5))}
STEPS = 10
NODE = shutil.which("node")
with_node = pytest.mark.skipif(NODE is None, reason="no node")

# ------------------------------------------------------------------------------------------- the library, and a tab

def packed(x:torch.Tensor): return base64.b64encode(np.ascontiguousarray(x.double().numpy(), "<f8").tobytes()).decode()
def unpacked(text:str, shape, dtype="<f8"): return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)

@cache
def library(name:str, seeds:tuple):
    "Ten steps of the library in float64: jobs for a tab, losses (steps, seeds), and final weights of every seed."
    members = init_members(condition(name), seeds, "authors")
    for what in "wmv": setattr(members, what, getattr(members, what).double())
    began, batches = {n: x.clone() for n, x in unflatten(members.w, members.c).items()}, []
    for g in members.gens:                                       # the same draws again, by generators of our own
        again = torch.Generator()
        again.set_state(g["batches"].get_state())
        batches.append(draw(training_pool(ADD7), again, STEPS, members.c.batch).tolist())
    losses = torch.stack([train_interval(members, 1) for _ in range(STEPS)])
    ends = unflatten(members.w, members.c)
    jobs = [dict(weights={n: packed(x[i]) for n, x in began.items()}, batches=batches[i]) for i in range(len(seeds))]
    return jobs, losses.numpy(), [{n: x[i].numpy() for n, x in ends.items()} for i in range(len(seeds))]

def node(*args, text:str=None):
    return subprocess.run([NODE, *map(str, args)], input=text, capture_output=True, text=True, check=True).stdout

def tab(jobs:list, kernel:str="kernel64.wasm"):
    "What a tab makes of these jobs, by kernel64.wasm in float64 or by kernel.wasm as it trains."
    return json.loads(node(TRAINER / "equal.mjs", TRAINER / kernel, text=json.dumps(jobs)))

def digest(values) -> float:
    "One number of a weight's many, in which any of them would be missed."
    flat = np.asarray(values, float).ravel()
    return float(flat @ np.cos(np.arange(len(flat))))

# ------------------------------------------------------------------------------------------------------------- steps

@with_node
@pytest.mark.parametrize("arm, seeds", first([*((a, SEEDS) for a in ARMS), ("three experts", SEEDS[:1])],
                                             [*((a, SEEDS) for a in ARMS), *((a, SEEDS[:1]) for a in OTHERS)]))
def test_ten_steps_in_the_browser_are_ten_steps_of_the_library(arm, seeds):
    "In float64, by the text of which the browser's kernel is made."
    name, spec = (ARMS | OTHERS)[arm]
    jobs, losses, ends = library(name, seeds)
    for i, got in enumerate(tab([job | spec for job in jobs])):
        assert got["condition"] == name
        np.testing.assert_allclose(got["losses"], losses[:, i], rtol=1e-6)         # the library adds them up in float32
        assert got["weights"].keys() == ends[i].keys()
        for n, x in ends[i].items():
            np.testing.assert_allclose(unpacked(got["weights"][n], x.shape), x, rtol=0, atol=1e-6, err_msg=n)

@with_node
@pytest.mark.parametrize("arm", first(["dense", "mixture"], ARMS))
def test_in_single_precision_a_tab_is_as_near_to_double_as_the_library_is(arm):
    "Of all weights together: where rounding decides a gradient, AdamW makes a step of it, in either."
    name, spec = ARMS[arm]
    jobs, losses, ends = library(name, SEEDS)
    got, = tab([jobs[0] | spec], "kernel.wasm")
    members = init_members(condition(name), SEEDS[:1], "authors")
    train_interval(members, STEPS)
    single = unflatten(members.w, members.c)
    np.testing.assert_allclose(got["losses"], losses[:, 0], rtol=1e-5)
    def far(weights): return np.abs(np.concatenate([(weights(n, x.shape) - x).ravel() for n, x in ends[0].items()]))
    tab_, library_ = far(lambda n, s: unpacked(got["weights"][n], s)), far(lambda n, s: single[n][0].numpy())
    assert np.sqrt((tab_**2).mean()) < 2 * np.sqrt((library_**2).mean())
    assert np.quantile(tab_, .99) < 2 * np.quantile(library_, .99)

@pytest.mark.parametrize("arm", ARMS)
def test_ten_steps_of_the_library_are_those_that_a_tab_has_recorded(arm):
    "Without node: losses, and a digest of every weight."
    _, losses, ends = library(ARMS[arm][0], SEEDS)
    for i, seed in enumerate(SEEDS):
        then = json.loads((TRAINER / "trace.json").read_text())[arm][str(seed)]
        np.testing.assert_allclose(then["losses"], losses[:, i], rtol=1e-6)
        assert then["weights"].keys() == ends[i].keys()
        for n, x in ends[i].items(): assert abs(then["weights"][n] - digest(x)) < 1e-6, n

def record():
    out = {}
    for arm, (name, spec) in ARMS.items():
        got = tab([job | spec for job in library(name, SEEDS)[0]])
        out[arm] = {seed: dict(losses=[round(x, 8) for x in g["losses"]],
                               weights={n: round(digest(unpacked(x, -1)), 10) for n, x in g["weights"].items()})
                    for seed, g in zip(SEEDS, got)}
    (TRAINER / "trace.json").write_text("{" + ",\n".join(f'"{a}": {{' + ",\n  ".join(
        f'"{s}": {json.dumps(x)}' for s, x in each.items()) + "}" for a, each in out.items()) + "}\n")

@with_node
@pytest.mark.parametrize("arm", first(["three experts"], ["dense", "narrow", "mixture", "three experts"]))
def test_a_tab_begins_where_the_library_begins(arm):
    "Other numbers of the same distributions, weight by weight (Kolmogorov and Smirnov)."
    name, spec = (ARMS | OTHERS)[arm]
    drawn, = tab([spec | dict(seed=1, batches=[])])
    members = init_members(condition(name), [1], "paired")
    for n, x in unflatten(members.w, members.c).items():
        got = unpacked(drawn["weights"][n], -1)
        assert len(got) == x.numel() and ks_2samp(got, x.flatten().numpy()).pvalue > 1e-3, n

# ----------------------------------------------------------------------------------------------------------- readings

def readings(params, name):
    "Digits, exact sums and what is left without the FFN, as the library reads them."
    right = predict(params, name) == ADD7.targets
    r = copying_rows(params, name, [1], edits=["mean"])
    left = r[(r["site"] == "ffn_out") & r["position"].isin(["o1", "o2"])]["value"]
    return digits(right, ADD7).item(), exact(right).item(), left.mean()

@with_node
def test_a_tab_reads_shipped_models_as_the_library_does():
    jobs, wanted = [], []
    for name, spec in ARMS.values():
        params = member(load_file(ROOT / "checkpoints" / f"{name}.first256.safetensors"), 0)
        jobs.append(spec | dict(weights={n: packed(x[0]) for n, x in params.items()}, batches=[], read=True))
        wanted.append(readings(params, name))
    for got, want in zip(tab(jobs, "kernel.wasm"), wanted):
        np.testing.assert_allclose([got["digits"], got["exact"] / 1000, got["left"]], want, rtol=0, atol=1e-6)

# ----------------------------------------------------------------------------------------- the file that a page loads

def test_the_kernel_is_the_one_whose_sum_is_written_down():
    for line in (TRAINER / "kernel.wasm.sha256").read_text().splitlines():
        digest, file = line.split()
        assert hashlib.sha256((TRAINER / file).read_bytes()).hexdigest() == digest, file

def test_the_page_holds_this_kernel_and_is_small():
    text, kernel = (ROOT / "nbs/trainer.js").read_text(), (TRAINER / "kernel.wasm").read_bytes()
    assert base64.b64encode(kernel).decode() in text
    assert len(text.encode()) <= 30_000

@with_node
def test_the_page_is_made_of_the_text_beside_it(tmp_path):
    node(TRAINER / "build.mjs", "--page", "--to", tmp_path)
    assert (tmp_path / "trainer.js").read_text() == (ROOT / "nbs/trainer.js").read_text()

@with_node
@pytest.mark.skipif(not (TRAINER / "node_modules/assemblyscript").exists(), reason="no asc: npm install in trainer/")
def test_the_kernel_is_built_again_to_the_byte(tmp_path):
    node(TRAINER / "build.mjs", "--to", tmp_path)
    for file in ("kernel.wasm", "kernel64.wasm", "kernel.wasm.sha256", "trainer.js"):
        assert (tmp_path / file).read_bytes() == (TRAINER / file).read_bytes(), file

@with_node
@pytest.mark.audit
@pytest.mark.parametrize("arm", ["dense 1 .125 26", "dense 1 1 5", "mixture 4 1 1"])
def test_a_recorded_seed_trains_again_to_the_last_digit(arm):
    *spec, seed = arm.split()
    line = node(TRAINER / "record.mjs", *spec, seed, seed).strip().rpartition(",")[0]             # without the seconds
    assert f"\n{line}," in (TRAINER / "recorded.csv").read_text()

# ------------------------------------------------------------------------------------------------------- its messages

TALK = """const self = {postMessage: heard}, told = [];
function heard(m) {
  told.push(m); react(m);
  if (m.says === END) process.stdout.write(JSON.stringify(told), () => process.exit());
}
const tell = m => self.onmessage({data: m});
REACT
new Function("self", require("fs").readFileSync("FILE", "utf8") + ";trainerSource(TRAINER_KERNEL)")(self);"""

def talk(react:str, end:str, before:str=""):
    "Everything that the built worker says, until it says `end`, to a page that reacts to each message `m` so."
    text = before + TALK.replace("REACT", f"function react(m) {{ {react} }}").replace("END", json.dumps(end))
    return json.loads(node("-e", text.replace("FILE", (ROOT / "nbs/trainer.js").as_posix())))

TRAIN = "if (m.says === 'ready') tell({do: 'train', id: 7, arm: 'mixture', experts: 3, rate: .5, seed: 5, limit: 50});"

@with_node
def test_what_a_tab_keeps_the_library_loads_and_reads_alike():
    *_, curve, done, kept = talk(TRAIN + "if (m.says === 'done') tell({do: 'keep'});", "kept")
    text = json.loads(kept["text"])
    params = {n: torch.tensor(unpacked(w["float32"], (1, *w["shape"]), "<f4")) for n, w in text["weights"].items()}
    check_population(params, c := condition(text["condition"]))
    assert (c.name, c.ffn_lr, text["seed"], text["steps"]) == (done["condition"], .5, 5, 50)
    np.testing.assert_allclose([curve["digits"], curve["exact"], curve["left"]], readings(params, c), rtol=0, atol=1e-6)

@with_node
def test_what_a_tab_keeps_is_measured_by_a_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = talk("if (m.says === 'ready') tell({do: 'train', id: 1, arm: 'narrow', rate: 2, seed: 3, until: 'first256'});"
                "if (m.says === 'done') tell({do: 'keep'});", "kept")
    Path("mine.json").write_text(said[-1]["text"])
    assert main(["measure", "mine.json", "--instrument", "copying"]) == 0
    r = pd.read_parquet("out/rows.parquet")
    assert set(r["condition"]) == {"add7/ffn-h64-silu+ffnlr2"} and set(r["stream"]) == {"tab"} and set(r["rule"]) == {"first256"}
    r = r[(r["site"] == "ffn_out") & (r["edit"] == "mean") & (r["metric"] == "digits_no_copy") & r["position"].isin(["o1", "o2"])]
    assert abs(r["value"].mean() - said[-2]["left"]) < 1e-6
    form = json.loads(said[-1]["text"])
    for other in ({}, [], form | {"weights": None}, {n: x for n, x in form.items() if n != "weights"}, form | {"how": "never"}):
        Path("other.json").write_text(json.dumps(other))
        assert main(["measure", "other.json"]) == 2 and "Keep, beside Train" in capsys.readouterr().err

@with_node
def test_a_seed_that_never_gets_there_ends_with_a_word():
    said = talk(TRAIN, "done")
    assert [m["says"] for m in said] == ["ready", "curve", "done"]
    assert (said[-1]["how"], said[-1]["step"], said[-1]["first1000"]) == ("never", 50, None)

@with_node
def test_a_training_is_paused_resumed_and_stopped():
    said = talk(TRAIN.replace("50", "10000") + """
        if (m.says === 'curve') tell({do: m.step < 100 ? 'pause' : 'stop'});
        if (m.says === 'paused') setTimeout(() => tell({do: 'resume'}), 50);""", "done")
    assert [m["says"] for m in said] == ["ready", "curve", "paused", "resumed", "curve", "done"]
    assert said[-1]["how"] == "stopped" and said[-1]["step"] == 100

@with_node
def test_where_webassembly_has_no_vectors_a_tab_says_so_and_trains_nothing():
    assert talk("", "no simd", "WebAssembly.validate = () => false;") == [{"says": "no simd"}]

if __name__ == "__main__": record()
