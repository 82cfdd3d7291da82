"""Long texts: what was stopped goes on to the same rows, another question never does, bad input is refused at once."""
from copy import deepcopy
import json
import time

import pandas as pd
import pytest
import torch
from transformers.utils import logging

from moe_redistribution.opened.families import tiny_model
from moe_redistribution.opened.opened import open_model
from moe_redistribution.opened.audit import audit
from moe_redistribution.opened.gates_study import gates_study, split_text
from moe_redistribution.opened.loads import compare_routes, text_loads
from moe_redistribution.opened.reading import read_saved
from moe_redistribution.opened.streaming import (byte_tokens, in_groups, kept_so_far, _sent_elsewhere, site_means,
                                                   text_ablation, text_scores, text_loss, text_windows,
                                                   tokenizer_of, units_of)
from moe_redistribution.record.cli import main
from moe_redistribution.language.text import read_text
from moe_redistribution.training.study import study_jobs
from tiers import first

logging.disable_progress_bar()

@pytest.fixture(scope="module")
def s(): return open_model(tiny_model("mixtral", vocab_size=256))

class Stop(Exception): pass

def after(n):
    "Something to tell that stops at the n-th word."
    said = []
    def say(text):
        said.append(text)
        if len(said) == n: raise Stop
    return say

def test_scores_that_were_stopped_go_on_to_the_same_rows(s, text, tmp_path, monkeypatch):
    monkeypatch.setattr("time.monotonic", iter(range(0, 10_000, 10)).__next__)                # keeps after every batch
    straight, part = text_scores(s, text, byte_tokens, context=16, batch=4), tmp_path / "a.part"
    with pytest.raises(Stop): text_scores(s, text, byte_tokens, context=16, batch=4, part=part, say=after(3))
    assert part.exists()
    seen = []
    again = text_scores(s, text, byte_tokens, context=16, batch=4, part=part, say=seen.append)
    assert again.equals(straight) and len(seen) == 26 - 3
    said = []                                                         # kept until the rows are written: nothing is lost
    assert text_scores(s, text, byte_tokens, context=16, batch=4, part=part, say=said.append).equals(straight)
    assert part.exists() and not said

def test_a_model_in_half_precision_takes_the_means_of_its_own_activations(text):
    half = open_model(tiny_model("olmoe", vocab_size=256, dtype=torch.bfloat16))
    rows = text_ablation(half, text, byte_tokens, context=16, tokens=64, units=("L0.ffn_out", "L1.E1", "L0.H1"),
                         edits=("mean",))
    assert rows["value"].notna().all() and (rows.query("site != 'none' and metric == 'moved'")["value"] > 0).all()

def test_an_ablation_that_was_stopped_asks_only_for_the_rest(s, text, tmp_path):
    ask = dict(context=16, tokens=128, units=("L1.E0", "L0.H1", "sites"), edits=("mean", "zero"))
    straight, part = text_ablation(s, text, byte_tokens, **ask), tmp_path / "a.part"
    with pytest.raises(Stop): text_ablation(s, text, byte_tokens, **ask, part=part, say=after(5))
    rest = []
    assert text_ablation(s, text, byte_tokens, **ask, part=part, say=rest.append).equals(straight)
    assert len(rest) == 1 + 6 * 2 - 5

def test_windows_are_the_text_once_and_in_order(text):
    windows = list(text_windows(text, byte_tokens, 16))
    joined = torch.cat([windows[0][:1], *[w[1:] for w in windows]]).tolist()
    assert bytes(joined) == text.read_bytes()[:len(joined)] and len(joined) > len(text.read_bytes()) - 17
    assert len(list(text_windows(text, byte_tokens, 16, tokens=50))) == 4

def test_the_commands_write_rows_and_a_picture_of_a_folder(s, text, tmp_path, capsys):
    s.model.save_pretrained(tmp_path / "toy")
    ask = f"--model {tmp_path / 'toy'} --text {text} --bytes --context 16 --tokens 200 --out".split()
    assert main(["scores", *ask, str(tmp_path / "s.parquet"), "--by", "head"]) == 0
    assert main(["ablate", *ask, str(tmp_path / "a.csv"), "--unit", "L1.E1", "--edit", "swap:E2"]) == 0
    assert (tmp_path / "s.png").exists() and (tmp_path / "a.png").exists()
    assert {"L0.H3", "embed", "whole"} <= set(pd.read_parquet(tmp_path / "s.parquet")["unit"])
    assert set(pd.read_csv(tmp_path / "a.csv")["site"]) == {"none", "L1.E1"}

def test_commands_refuse_before_any_work(s, text, tmp_path, capsys):
    s.model.save_pretrained(tmp_path / "toy")
    tiny_model("llama", vocab_size=256).save_pretrained(tmp_path / "dense")
    (tmp_path / "empty").mkdir()
    good = {"--model": str(tmp_path / "toy"), "--text": str(text), "--context": "16"}
    for changes, command, says in (({"--model": str(tmp_path / "empty")}, "scores", "expected config.json"),
                                   ({}, "scores", "--bytes"), ({"--text": "nothing.txt"}, "ablate", "expected a file"),
                                   ({"--context": "9000"}, "ablate", "--context"),
                                   ({"--model": str(tmp_path / "dense")}, "scores", "which is dense"),
                                   ({"--out": "rows.txt"}, "scores", "expected a .parquet or .csv")):
        words = [w for pair in (good | changes).items() for w in pair] + ["--bytes"] * (says != "--bytes")
        assert main([command, *words]) == 2 and says in capsys.readouterr().err, words

def test_units_are_named_in_groups_or_one_by_one(s):
    assert len(units_of(s, ("heads",))) == 8 and len(units_of(s, ("experts", "L0.E1"))) == 8

# ---------------------------------------------------------------------------------- an answer belongs to what was asked

def upper(text): return byte_tokens(text.upper())

@pytest.mark.parametrize("of", [text_scores, text_ablation])
@pytest.mark.parametrize("change", ["weight", "tokenizer", "text", "batch", "tokens"])
def test_what_was_stopped_is_not_finished_with_another_model_or_tokenizer_or_text(s, text, tmp_path, change, of,
                                                                                monkeypatch):
    monkeypatch.setattr("time.monotonic", iter(range(0, 10_000, 10)).__next__)
    part, ask = tmp_path / "a.part", dict(context=16, batch=4, tokens=200)
    with pytest.raises(Stop): of(s, text, byte_tokens, **ask, part=part, say=after(2))
    assert kept_so_far(part, "another") is None
    ask |= dict(batch=dict(batch=2), tokens=dict(tokens=128)).get(change, {})
    other, reads = open_model(deepcopy(s.model)), upper if change == "tokenizer" else byte_tokens
    with torch.no_grad(): other.layers[1].attn.q_proj.weight[0, 0] += .5 * (change == "weight")
    if change == "text":
        of_text, then = text.stat(), text.read_text()
        text.write_text(then.replace("light", "night"))
        __import__("os").utime(text, ns=(of_text.st_atime_ns, of_text.st_mtime_ns + 1))
    assert of(other, text, reads, **ask, part=part).equals(of(other, text, reads, **ask))

@pytest.mark.parametrize("change", ["weight", "tokens", "heldout"])
def test_gates_of_another_model_or_text_are_another_question(change):
    model = tiny_model("llama", vocab_size=256)
    held = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(1))
    def key(model, held, add=0):
        study = gates_study(model, "toy", held, lambda step: (held + step + add) % 256, "as before", [4], steps=3)
        return [j.key for j in study_jobs(study, "own")]
    before = key(model, held)
    assert key(deepcopy(model), held.clone()) == before
    other = deepcopy(model)
    with torch.no_grad(): other.model.layers[0].self_attn.v_proj.weight[2, 3] += 1e-3
    changed = dict(weight=(other, held), tokens=(model, held, 1), heldout=(model, held.flip(0)))[change]
    assert key(*changed) != before

def test_an_ablation_that_goes_on_does_not_ask_for_its_means_again(s, text, tmp_path, monkeypatch):
    ask, part = dict(context=16, tokens=128, edits=("mean",)), tmp_path / "a.part"
    with pytest.raises(Stop): text_ablation(s, text, byte_tokens, **ask, part=part, say=after(2))
    monkeypatch.setattr("moe_redistribution.opened.streaming.site_means", lambda *_: 1 / 0)
    text_ablation(s, text, byte_tokens, **ask, part=part)

def test_a_mean_pattern_is_each_head_s_own(s, text):
    groups = list(in_groups(text_windows(text, byte_tokens, 16, 200), 4))
    got = site_means(s, groups, ["L0.pattern"])["L0.pattern"]
    assert got.shape == (1, 1, 4, 16, 16) and torch.allclose(got.sum(-1), torch.ones(()), atol=1e-5)
    assert (got[:, :, 0] - got[:, :, 1]).abs().max() > .01

# ------------------------------------------------------------------------------------------------------------- windows

def test_every_window_begins_with_the_tokenizer_s_own_tokens_if_asked(text, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    own = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<s>", "?", "God", "light", "a"])}, unk_token="?"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", unk_token="?").save_pretrained(tmp_path / "t")
    plain, special = tokenizer_of(tmp_path / "t", 5), tokenizer_of(tmp_path / "t", 5, special=True)
    windows = [list(text_windows(text, t, 8)) for t in (plain, special)]
    assert all(w[0] == 0 for w in windows[1]) and not any((w == 0).any() for w in windows[0])
    said = torch.tensor(plain(text.read_text()))
    assert torch.equal(torch.cat([w[1:] for w in windows[1]]), said[:8 * len(windows[1])])     # each predicted once

def test_one_long_line_is_read_as_a_stream(tmp_path):
    line = tmp_path / "line.txt"
    line.write_text("word " * 400_000)
    began = time.monotonic()
    windows = list(text_windows(line, byte_tokens, 512))
    assert time.monotonic() - began < 10 and len(windows) == 3906                          # it took minutes
    assert bytes(torch.cat([w[1:] for w in windows]).tolist()) == (b"word " * 400_000)[1:512 * 3906 + 1]

def test_no_window_is_left_alone_in_a_batch():
    w = [torch.tensor([i]) for i in range(9)]
    assert [len(g) for g in in_groups(w, 4)] == [4, 5] and [len(g) for g in in_groups(w[:7], 4)] == [4, 3]
    assert [len(g) for g in in_groups(w[:3], 1)] == [1, 1, 1] and torch.equal(torch.cat(list(in_groups(w, 4))),
                                                                              torch.stack(w))

def test_rows_say_how_many_tokens_a_watched_pass_sends_elsewhere(s, text):
    half = open_model(tiny_model("mixtral", vocab_size=256, dtype=torch.bfloat16))
    many = torch.randint(256, (30, 40), generator=torch.Generator().manual_seed(2))
    assert _sent_elsewhere(s, many) == 0 and _sent_elsewhere(open_model(tiny_model("llama")), many % 50) == 0
    assert 0 <= _sent_elsewhere(half, many) < .2
    for rows in (text_scores(half, text, byte_tokens, 16), text_ablation(half, text, byte_tokens, 16, tokens=99)):
        got = rows[rows["metric"] == "elsewhere"]
        assert len(got) == 1 and 0 <= got["value"].item() < .2 and got["n_examples"].item() in (16 * 8, 16 * 7)

def test_bytes_of_another_kind_are_no_text(s, tmp_path):
    (tmp_path / "a.txt").write_bytes("And God said, Let there be light. ".encode("utf-16") * 20)
    file = tmp_path / "a.txt"
    for ask in (lambda: text_scores(s, file, byte_tokens, 16), lambda: read_text(file, 3)):
        with pytest.raises(ValueError, match="a.txt: expected a text in UTF-8; got bytes of another kind"): ask()

def test_gates_asked_for_twice_are_one_row_each():
    model, held = tiny_model("llama", vocab_size=256), torch.zeros(4, 17, dtype=torch.int64)
    one, two = (gates_study(model, "toy", held, lambda step: held, "", ks, losses=losses, unfreeze=last, steps=2)
                for ks, losses, last in (([4], ["kl"], [1]), ([4, 4], ["kl", "kl"], [1, 1])))
    assert [j.key for j in study_jobs(one, "own")] == [j.key for j in study_jobs(two, "own")]

def test_a_tokenizer_that_cannot_read_a_text_is_one_message(text, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    own = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"God": 0}, unk_token="?")))
    own.save_pretrained(tmp_path / "t")                                       # its `?` stands for no number
    with pytest.raises(ValueError, match="tokenizer: expected one that can read any text; got WordLevel error"):
        list(text_windows(text, tokenizer_of(tmp_path / "t", 5), 8))

# -------------------------------------------------------------------------------------------------------- refusals

HELD = torch.zeros(4, 17, dtype=torch.int64)

def gates(held=HELD, **more):
    return gates_study(tiny_model("llama", vocab_size=256), "toy", held, lambda step: held, "", [4], **more)

def shifted(text): return [n + 200 for n in byte_tokens(text)]

def ablated(s, text, units=("sites",), edits=("zero",), **more):
    return text_ablation(s, text, byte_tokens, context=16, units=units, edits=edits, **more)

ABOVE = "a number above 0"
REFUSED = [
    (lambda s, text: ablated(open_model(tiny_model("llama", vocab_size=256)), text, ("experts",)),
     "unit: expected one of sites"),
    (lambda s, text: ablated(s, text, ("L0.routes",), ("mean",)), "one of never:E3, only:E2,E5, k=3"),
    (lambda s, text: ablated(s, text, ("L1.router_probs",)), "edit the gates"),
    (lambda s, text: ablated(s, text, ("L0.H1",), ("route_around",)), "an expert to route_around"),
    (lambda s, text: ablated(s, text, edits=("resample",), batch=1), "two windows or more in a batch"),
    *((lambda s, text, of=of, how=how: of(s, text, how.pop("reads", byte_tokens), **how), says)
      for of in (text_scores, text_ablation) for how, says in (
          (dict(context=65, part="nothing/a.part"), "context: expected up to 64 .*; got 65; nearest valid: 64"),
          (dict(context=16, reads=shifted), "rows of the embedding"),
          (dict(context=0), ABOVE), (dict(batch=0), ABOVE), (dict(tokens=0), ABOVE))),
    (lambda s, text: text_loss(s, [torch.tensor([[1, 2, 300]])]), "rows of the embedding"),
    (lambda s, text: gates(torch.full((4, 17), 300)), "rows of the embedding"),
    (lambda s, text: gates(torch.zeros(4, 85, dtype=torch.int64)), "the model's positions"),
    (lambda s, text: gates(lr=float("inf")), "lr: expected a finite number"), (lambda s, text: gates(steps=0), ABOVE),
    (lambda s, text: gates(batch=0), ABOVE), (lambda s, text: gates(d_gate=0), ABOVE),
    *((lambda s, text, sizes=sizes: split_text(text, byte_tokens, 16, *sizes), ABOVE)
      for sizes in ((0, 4, 5), (50, 0, 5), (50, 4, 0)))]

@pytest.mark.parametrize("call, says", REFUSED)
def test_what_cannot_be_asked_is_refused_before_any_pass(s, text, call, says, monkeypatch):
    monkeypatch.setattr(s.model, "forward", None)
    with pytest.raises(ValueError, match=says): call(s, text)

# ---------------------------------------------------------- what is no weight and no setting of the config, but answers

class Branch(torch.nn.Module):
    "A linear map with a low-rank branch that is switched on and off, as an adapter's."
    def __init__(self, base):
        super().__init__()
        self.base, self.on, g = base, True, torch.Generator().manual_seed(0)
        self.register_buffer("delta", .3 * torch.randn(base.weight.shape, generator=g))
    def forward(self, x): return self.base(x) + self.on * (x @ self.delta.T)

def branched(vocab_size=256):
    model = tiny_model("mixtral", vocab_size=vocab_size)
    for layer in model.model.layers: layer.self_attn.o_proj = Branch(layer.self_attn.o_proj)
    return model

def switched_off(model):
    for layer in model.model.layers: layer.self_attn.o_proj.on = False

def another_k(model):
    for layer in model.model.layers: layer.mlp.gate.top_k = 1

def hooked(model): model.model.embed_tokens.register_forward_hook(lambda m, args, out: out * 1.5)

def compared(s, text, tokenize, **more):
    return compare_routes(s, open_model(tiny_model("mixtral", 1, vocab_size=256)), text, tokenize, **more)

def audited(s, text, tokenize, **more): return audit(s, text, tokenize, units=("L1.E1",), n_sets=1, **more)

@pytest.mark.parametrize("change", [switched_off, another_k, hooked])
@pytest.mark.parametrize("of", first([text_loads, text_ablation],
                                     [text_loads, text_ablation, text_scores, compared, audited]))
def test_rows_of_a_model_that_answers_otherwise_are_not_taken_for_this_one_s(of, change, text, tmp_path, monkeypatch):
    monkeypatch.setattr("time.monotonic", iter(range(0, 10_000, 10)).__next__)
    s, ask = open_model(branched()), dict(context=16, batch=4, tokens=200)
    first_rows = of(s, text, byte_tokens, **ask, part=tmp_path / "part")
    assert of(s, text, byte_tokens, **ask, part=tmp_path / "part").equals(first_rows)
    change(s.model)
    own = of(s, text, byte_tokens, **ask)
    assert of(s, text, byte_tokens, **ask, part=tmp_path / "part").equals(own) and not own.equals(first_rows)

@pytest.mark.parametrize("change", [switched_off, another_k, hooked])
def test_a_folder_does_not_go_on_with_a_model_that_answers_otherwise(change, tmp_path):
    s, tokens = open_model(branched(50)), torch.randint(50, (6, 9), generator=torch.Generator().manual_seed(0))
    s.save(["L1.gates"], tmp_path / "kept", tokens[:3])
    change(s.model)
    with pytest.raises(ValueError, match="the same answers as now; got others"):
        s.save(["L1.gates"], tmp_path / "kept", tokens)
    index = json.loads((tmp_path / "kept/index.json").read_text())
    del index["answers"]
    (tmp_path / "kept/index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="made before this was kept, which may be read; fix: another folder"):
        s.save(["L1.gates"], tmp_path / "kept", tokens)
    assert len(read_saved(tmp_path / "kept", "L1.gates")) == 3
