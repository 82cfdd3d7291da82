"The matched zoo: folders that plain transformers opens, and the study's own numbers from them."
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from moe_redistribution.evidence.table_files import ROOT
from moe_redistribution.opened.opened import open_model
from moe_redistribution.opened.weights import model_name
from moe_redistribution.record.cli import main
from moe_redistribution.studies.language_models import zoo
from moe_redistribution.studies.language_models.study import STUDY

logging.disable_progress_bar()
ZOO = ROOT / "checkpoints/zoo"

@pytest.fixture
def short(monkeypatch):
    "The zoo's settings for a dozen steps."
    settings = STUDY.presets["parts"].settings | dict(steps=12, looks=[6, 12], heldout=8)
    monkeypatch.setattr(zoo, "_SETTINGS", settings)
    return settings

@pytest.mark.parametrize("arm", zoo.ZOO_ARMS)
def test_plain_transformers_opens_each_model_of_the_repository_and_it_has_learned(arm):
    model, x = AutoModelForCausalLM.from_pretrained(ZOO / arm / "1"), zoo.zoo_windows(32)
    with torch.no_grad(): loss = model(input_ids=x, labels=x).loss.item()
    assert loss < 2.4 < torch.tensor(model.config.vocab_size).log()           # uniform: 4.8
    assert (s := open_model(f"zoo:{arm}/1", x)).n_layers == 2 and s.name == f"zoo-{arm}-1"

@pytest.mark.parametrize("arm", ["slow", "mixture"])
def test_a_folder_gives_the_rows_that_the_study_has_of_that_training_to_the_last_bit(arm, short, tmp_path):
    zoo.make_zoo(tmp_path, [arm], [3], along=[6])
    job = STUDY.run(f"{arm}/L2", [3], short, zoo._Alone())
    own = zoo._zoo_rows(tmp_path / arm / "3", arm, 3)
    said = job[(job["rule"] == "final") & job["metric"].isin(own["metric"].unique()) & (job["condition"] == f"{arm}/L2")]
    keys = ["metric", "site", "edit", "unit", "stratum"]
    both = own.merge(said, on=keys, suffixes=("", " of the job"))
    assert len(both) == len(own) > 40 and (both["value"] == both["value of the job"]).all()
    early = zoo._zoo_rows(tmp_path / arm / "3/checkpoint-6", arm, 3)
    loss = lambda f: f.query("metric == 'loss' and site == 'none'")["value"].item()
    assert loss(early) > loss(own)

def test_what_is_no_ffn_begins_alike_in_every_arm_of_a_seed():
    start = {arm: dict(zoo._trial(arm, 2).model.named_parameters()) for arm in zoo.ZOO_ARMS}
    for arm, own in start.items():
        assert all(torch.equal(p, start["dense"][n]) for n, p in own.items() if ".mlp." not in n), arm
    assert not torch.equal(zoo._trial("dense", 3).model.lm_head.weight, start["dense"]["lm_head.weight"])

def test_a_stopped_command_goes_on_and_leaves_what_is_whole(short, tmp_path, monkeypatch, capsys):
    ask = ["zoo", "--out", str(tmp_path), "--arm", "narrow", "--seeds", "1-2", "--along", "6"]
    save, saved = zoo._save, []
    def stops(model, folder):
        saved.append(folder)
        if len(saved) == 4: raise KeyboardInterrupt
        save(model, folder)
    monkeypatch.setattr(zoo, "_save", stops)
    assert main(ask) == 130 and not (tmp_path / "narrow/2").exists()
    was = (tmp_path / "narrow/1/model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(zoo, "_save", save)
    assert main(ask) == 0 and "2 models" in capsys.readouterr().out
    assert (tmp_path / "narrow/1/model.safetensors").stat().st_mtime_ns == was
    assert sorted(p.name for p in (tmp_path / "narrow").iterdir()) == ["1", "2", "README.md"]
    assert len((tmp_path / "SHA256SUMS").read_text().splitlines()) == 4

def test_another_arm_or_step_is_refused_before_any_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(zoo, "_trial", lambda *_: 1 / 0)
    assert main(["zoo", "--out", str(tmp_path), "--arm", "mixtur"]) == 2 and "nearest: 'mixture'" in capsys.readouterr().err
    assert main(["zoo", "--out", str(tmp_path), "--along", "1600"]) == 2 and "1 to 1599" in capsys.readouterr().err
    assert main(["zoo", "--out", str(tmp_path), "--along", "x"]) == 2
    assert "along" in (said := capsys.readouterr().err) and "seeds" not in said

@pytest.mark.parametrize("model, name", [
    ("zoo:mixture/1", "zoo-mixture-1"), ("zoo:mixture/1/checkpoint-200", "zoo-mixture-1-checkpoint-200"), ("org/gpt-2", "gpt-2"),
    ("a/run1/checkpoint-200", "run1-checkpoint-200"), ("/a/mixture/3", "mixture-3"), ("/7", "7"), ("a/gpt2", "gpt2"), ("a/..", None)])
def test_two_models_in_folders_of_one_name_have_names_of_their_own(model, name):
    assert model_name(model) == name if name else model_name(model) not in ("", "..")

@pytest.fixture
def two_roots(tmp_path, monkeypatch):
    "Home has a model of another training than the clone, with a checkpoint of its own."
    monkeypatch.setenv("MOE_REDISTRIBUTION_HOME", str(tmp_path))
    own = tmp_path / "zoo/mixture/1"
    shutil.copytree(ZOO / "frozen/1", own), shutil.copytree(ZOO / "frozen/1", own / "checkpoint-200")
    return tmp_path / "zoo"

def test_a_model_and_its_checkpoints_come_from_one_training(two_roots):
    weights = lambda name: open_model(name).model.state_dict()
    whole, early, clone = (weights(f"zoo:{n}") for n in ("mixture/1", "mixture/1/checkpoint-200", "frozen/1"))
    assert all(torch.equal(whole[n], early[n]) and torch.equal(whole[n], clone[n]) for n in whole)
    shutil.rmtree(two_roots / "mixture/1/checkpoint-200")
    with pytest.raises(ValueError, match="checkpoint-200"): open_model("zoo:mixture/1/checkpoint-200")

@pytest.mark.parametrize("name", ["zoo:../../x", "zoo:/etc", "zoo:mixture", "zoo:mixture/1/../../dense/1", "zoo:mixture/1.half", "zoo:"])
def test_a_name_of_the_zoo_leads_nowhere_else(two_roots, name):
    shutil.copytree(two_roots / "mixture/1", two_roots.parent / "x"), shutil.copytree(two_roots / "mixture/1", two_roots / "mixture/1.half")
    with pytest.raises(ValueError, match="a model of the zoo"): open_model(name)

def test_a_model_whose_bytes_are_other_than_its_sums_say_is_refused(two_roots):
    (two_roots / "SHA256SUMS").write_text(f"{'0' * 64}  mixture/1/model.safetensors\n")
    with pytest.raises(ValueError, match="SHA-256 000000000000"): open_model("zoo:mixture/1")

def test_what_is_there_without_what_is_asked_for_is_refused_before_any_training(short, tmp_path, monkeypatch):
    zoo.make_zoo(tmp_path, ["narrow", "narrow"], [1, 1])
    assert len((tmp_path / "SHA256SUMS").read_text().splitlines()) == 1
    monkeypatch.setattr(zoo, "_trial", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match="checkpoint-6"): zoo.make_zoo(tmp_path, ["dense", "narrow"], [1], along=iter([6]))
    (tmp_path / "narrow/1/model.safetensors").unlink()
    with pytest.raises(ValueError, match="a whole model"): zoo.make_zoo(tmp_path, ["narrow"], [1])

def test_the_sums_are_those_of_the_zoo_alone_and_no_other_list_is_written_over(short, tmp_path, monkeypatch):
    for half in ("narrow/2.half", "narrow/1.along/checkpoint-6", "mine"): shutil.copytree(ZOO / "narrow/1", tmp_path / half)
    zoo.make_zoo(tmp_path, ["narrow"], [1])
    assert (tmp_path / "SHA256SUMS").read_text().split()[1:] == ["narrow/1/model.safetensors"]
    monkeypatch.setattr(zoo, "_trial", lambda *_: 1 / 0)
    (other := tmp_path / "SHA256SUMS").write_text(said := f"{'0' * 64}  data/margins.csv\n")
    with pytest.raises(ValueError, match="data/margins.csv"): zoo.make_zoo(tmp_path, ["narrow"], [3])
    assert other.read_text() == said

def test_bytes_that_changed_get_no_new_sum_by_a_second_run(short, tmp_path, monkeypatch):
    for arm in ("narrow", "dense"): shutil.copytree(ZOO / arm / "1", tmp_path / arm / "1")
    zoo.make_zoo(tmp_path, ["narrow"], [1])
    said, file = (tmp_path / "SHA256SUMS").read_text(), tmp_path / "narrow/1/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    monkeypatch.setattr(zoo, "_trial", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match="narrow/1/model.safetensors: expected the bytes that SHA256SUMS says"):
        zoo.make_zoo(tmp_path, ["dense"], [1])
    assert (tmp_path / "SHA256SUMS").read_text() == said

def test_the_repository_has_eight_small_models():
    files = [*ZOO.rglob("*.safetensors")]
    assert sorted(f.parent.relative_to(ZOO).as_posix() for f in files) == sorted(f"{a}/1" for a in zoo.ZOO_ARMS)
    assert sum(f.stat().st_size for f in files) < 6e6

@pytest.mark.parametrize("command", ["loads", "removal", "compare"])
def test_a_model_of_the_zoo_brings_its_own_text_and_tokenizer(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    more = ["--with", "zoo:frozen/1"] if command == "compare" else []
    assert main([command, "--model", "zoo:mixture/1", "--tokens", "960", *more]) == 0
    assert (tmp_path / f"out/zoo-mixture-1.{command}.parquet").is_file()
    capsys.readouterr()
    (tmp_path / "mine.txt").write_text("LET k0 v1 the king\n" * 30)
    assert main([command, "--model", "zoo:mixture/1", "--text", "mine.txt", *more]) == 2
    assert "any text" in (said := capsys.readouterr().err) and "the king" not in said

def test_the_text_of_the_zoo_is_what_its_models_never_read_window_by_window():
    lines = [line.split() for line in (ZOO / "text.txt").read_text().splitlines()]
    text = zoo._trial("none", 1).text
    assert len(lines) == zoo._SETTINGS["heldout"] and {len(x) for x in lines} == {zoo._SETTINGS["sizes"]["T"]}
    assert [[text.vocab.index(w) for w in x] for x in lines[:20]] == text.heldout(zoo._SETTINGS["sizes"]["T"] - 1, len(lines)).tolist()[:20]
