"""Long texts: what was stopped goes on to the same rows, another question never does, bad input is refused at once."""
import pandas as pd
import pytest
import torch
from transformers.utils import logging

from moe_redistribution.instruments.opened import open_model, tiny_model
from moe_redistribution.instruments.streaming import (byte_tokens, kept_so_far, stream_ablation, stream_scores,
                                                      text_windows, units_of)
from moe_redistribution.record.cli import main

logging.disable_progress_bar()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("And God said, Let there be light: and there was light. " * 30)
    return path


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
    straight, part = stream_scores(s, text, byte_tokens, context=16, batch=4), tmp_path / "a.part"
    with pytest.raises(Stop): stream_scores(s, text, byte_tokens, context=16, batch=4, part=part, say=after(3))
    assert part.exists()
    seen = []
    again = stream_scores(s, text, byte_tokens, context=16, batch=4, part=part, say=seen.append)
    assert again.equals(straight) and len(seen) == 26 - 3 and not part.exists()


def test_what_is_kept_in_batches_of_one_size_is_not_gone_on_with_in_another(s, text, tmp_path, monkeypatch):
    monkeypatch.setattr("time.monotonic", iter(range(0, 10_000, 10)).__next__)
    straight, part = stream_scores(s, text, byte_tokens, context=16, batch=4), tmp_path / "a.part"
    with pytest.raises(Stop): stream_scores(s, text, byte_tokens, context=16, batch=2, part=part, say=after(5))
    again = stream_scores(s, text, byte_tokens, context=16, batch=4, part=part)
    assert again.equals(straight)


def test_a_model_in_half_precision_takes_the_means_of_its_own_activations(text):
    half = open_model(tiny_model("olmoe", vocab_size=256, dtype=torch.bfloat16))
    rows = stream_ablation(half, text, byte_tokens, context=16, tokens=64, units=("L0.ffn_out", "L1.E1", "L0.H1"),
                           edits=("mean",))
    assert rows["value"].notna().all() and (rows.query("site != 'none' and metric == 'moved'")["value"] > 0).all()


def test_what_is_kept_of_another_question_is_left_alone(s, text, tmp_path):
    part = tmp_path / "a.part"
    with pytest.raises(Stop):
        stream_ablation(s, text, byte_tokens, context=16, tokens=64, edits=("zero",), part=part, say=after(3))
    assert kept_so_far(part, "another") is None
    full = stream_ablation(s, text, byte_tokens, context=16, tokens=128, edits=("zero",), part=part)
    assert full.equals(stream_ablation(s, text, byte_tokens, context=16, tokens=128, edits=("zero",)))


def test_an_ablation_that_was_stopped_asks_only_for_the_rest(s, text, tmp_path):
    ask = dict(context=16, tokens=128, units=("L1.E0", "L0.H1", "sites"), edits=("mean", "zero"))
    straight, part = stream_ablation(s, text, byte_tokens, **ask), tmp_path / "a.part"
    with pytest.raises(Stop): stream_ablation(s, text, byte_tokens, **ask, part=part, say=after(5))
    rest = []
    assert stream_ablation(s, text, byte_tokens, **ask, part=part, say=rest.append).equals(straight)
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
    with pytest.raises(ValueError, match="nearest: 'L0.H"): units_of(s, ("L0.H7",))
