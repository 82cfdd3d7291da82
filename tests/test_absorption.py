"""Companion 003: what must hold of gates, masks and distillation; every line of the bridge asks for rows that exist."""
from copy import deepcopy
import time

import pandas as pd
import pytest
import torch

from moe_redistribution.evidence.claims import claims, seed_list, statements
from moe_redistribution.opened.masks import _f1_of
from moe_redistribution.opened.opened import LanguageModel
from moe_redistribution.record.cli import main
from moe_redistribution.studies.absorption import study
from moe_redistribution.studies.absorption.study import ABSORPTION_ARMS, STUDY
from moe_redistribution.language.text import Planted, generator_of
from moe_redistribution.language.distilled import Student, distil
from moe_redistribution.language.gated import (GATE_FORMS, Gating, attach, gating_of, attention_layers,
                                               deployed, _detach, kept_entries, last_keys,
                                               listening_to_attention, new_gates, usual_keys)
from moe_redistribution.language.small import small_model
from moe_redistribution.language.training import _LanguageRecipe, _LanguageTraining, all_but, router_names
from moe_redistribution.training.store import Store
from moe_redistribution.training.jobs import run_job
from moe_redistribution.training.study import run_study, study_jobs

TEXT = Planted()
TOKENS = TEXT.write(2, 33, "absorption test").tokens
ASKED = claims().query("item.str.startswith('003.') or item.str.startswith('contrast_absorption')")

def tiny(seed=1, family="gpt2", layers=2):
    own = dict(tie_word_embeddings=False) if family == "gpt2" else {}
    return small_model(family, TEXT.d_vocab, seed, layers=layers, d=32, heads=4, T=40, **own)[0]

def said(model): return model(input_ids=TOKENS[:, :-1], use_cache=False).logits

def random_scores(t=20, seed=0):
    x = torch.randn(2, 3, t, t, generator=generator_of("scores", seed))
    return x.masked_fill(torch.ones(t, t).triu(1) > 0, -torch.inf)

@pytest.mark.parametrize("k", [1, 3, 7, 20, 50])
def test_a_hard_mask_keeps_k_causal_entries_or_all_there_are(k):
    kept = kept_entries(random_scores(), k)
    assert (kept.sum(-1) == torch.arange(1, 21).clamp(max=k)).all()
    assert not (kept & (torch.ones(20, 20).triu(1) > 0)).any()

def test_ties_keep_exactly_k(): assert (kept_entries(torch.zeros(1, 1, 9, 9), 4).sum(-1) == 4).all()

@pytest.mark.parametrize("k", [2, 5])
def test_gate_and_oracle_keep_equally_many_so_precision_is_recall_is_f1(k):
    gate, A = random_scores(seed=1), random_scores(seed=2)
    kept, wanted = (kept_entries(x, k)[..., k:, :] for x in (gate, A))
    hits = (kept & wanted).sum(-1)
    precision, recall = hits / kept.sum(-1), hits / wanted.sum(-1)
    assert torch.equal(precision, recall) and torch.allclose(_f1_of(gate, A, k), precision)

def test_the_oracle_of_logits_is_that_of_probabilities():
    A = random_scores()
    assert torch.equal(kept_entries(A, 4), kept_entries(A.softmax(-1).masked_fill(A == -torch.inf, -torch.inf), 4))

@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_keeping_everything_is_dense_attention_to_the_bit(family):
    model = tiny(family=family)
    with deployed(model): dense = said(model)
    for by in ("gate", "oracle", "random"):
        with deployed(model, new_gates(model, 8, 1), Gating("hard", 40, by)): assert torch.equal(said(model), dense)

@torch.no_grad()
@pytest.mark.parametrize("form", list(GATE_FORMS))
def test_the_future_is_hidden_under_every_form_and_in_every_family(form):
    other = TOKENS[:, :-1].clone()
    other[:, -1] = (other[:, -1] + 1) % TEXT.d_vocab
    for family in ("gpt2", "llama", "olmoe"):
        model = tiny(family=family)
        with deployed(model, new_gates(model, 8, 1), Gating(form, 5)):
            assert torch.equal(said(model)[:, :-1], model(input_ids=other, use_cache=False).logits[:, :-1])

def test_distillation_leaves_a_model_and_its_own_gates_as_they_were():
    model = tiny()
    attach(model, new_gates(model, 8, 1), Gating("post"))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    student = Student(new_gates(model, 8, 2), "bce", 4)
    distil(model, [student], TEXT.batches(32, 2, seed=1), 3, looks=1)
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())
    assert gating_of(model)[1] == Gating("post")

def test_detached_is_never_attached():
    model = tiny()
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    names, own, out = [n for n, _ in model.named_parameters()], model.config._attn_implementation, said(model)
    attach(model, new_gates(model, 8, 1), Gating("post"), torch.full((2, 4), .5))
    attach(model, new_gates(model, 8, 2), Gating("hard", 4))
    twin = _detach(deepcopy(model))
    _detach(model)
    for m in (model, twin):
        assert [n for n, _ in m.named_parameters()] == names and m.config._attn_implementation == own
        assert [len(x._forward_pre_hooks) for x in m.modules()] == hooks and torch.equal(said(m), out)

@torch.no_grad()
def test_an_opened_model_shows_the_attention_that_its_gates_make():
    model = tiny(family="llama")
    with deployed(model, new_gates(model, 8, 1), Gating("hard", 4)):
        LanguageModel(model).run(TOKENS[:, :-1], sink=(sink := {}))
        own = said(model)
        assert torch.allclose(LanguageModel(model).run(TOKENS[:, :-1], sink={})[0], own, atol=1e-5)
    assert ((sink["L1.pattern"] > 0).sum(-1) <= 4).all()

@torch.no_grad()
def test_listeners_hear_every_layer_once_and_leave():
    model, heard = tiny(layers=3), []
    with deployed(model), listening_to_attention(lambda module, seen: heard.append(module)): said(model)
    assert heard == list(attention_layers(model))
    with deployed(model): said(model)
    assert len(heard) == 3

def test_a_state_keeps_what_moves_and_no_frozen_weights():
    model = tiny()
    attach(model, new_gates(model, 8, 1), Gating("post"))
    kept = _LanguageTraining(model, _LanguageRecipe(5, looks=1, frozen=all_but("attn_gate"))).state()[0]
    gates = {f"p/{n}" for n, _ in model.named_parameters() if "attn_gate" in n}
    assert {n for n in kept if n.startswith("p/")} == gates

def test_half_precision_models_take_gates():
    model = tiny(family="llama").to(torch.bfloat16)
    for form in GATE_FORMS:
        with deployed(model, new_gates(model, 8, 1), Gating(form, 5)), torch.no_grad():
            assert said(model).dtype == torch.bfloat16
    student = Student(new_gates(model, 8, 2), "kl")
    assert distil(model, [student], TEXT.batches(32, 2, seed=1), 2, looks=1)["loss"].notna().all()

@torch.no_grad()
def test_masks_that_read_nothing_are_the_same_for_every_text():
    model = tiny()
    other = TOKENS.roll(1, 0)
    for gates in (last_keys(model, 40), usual_keys(model, TOKENS[:, :-1])):
        kept = []
        def hear(module, seen): kept.append(kept_entries(seen.G, 3))
        with deployed(model, gates, Gating("hard", 3)), listening_to_attention(hear):
            for x in (TOKENS, other): model(input_ids=x[:, :-1], use_cache=False)
        assert torch.equal(kept[0], kept[2]) and torch.equal(kept[1], kept[3])

def test_a_fused_step_gets_contiguous_gradients_of_routers(monkeypatch):
    model = small_model("olmoe", TEXT.d_vocab, 1, d=32, T=40)[0]
    t = _LanguageTraining(model, _LanguageRecipe(10, aux_weight=1., task_gradient_to_router=False))
    real = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: [g.T.contiguous().T for g in real(*a, **k)])
    t.gradients(TOKENS)
    assert all(t.moving[n].grad.is_contiguous() for n in router_names(model))

@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return run_study(STUDY, "tiny", root=tmp_path_factory.mktemp("s"), executor="here", quiet=True)

AT_TINY = {"k=8": "k=4", "k=16": "k=8", "k=32": "k=16"}                     # its texts are half as long

@pytest.mark.audit
@pytest.mark.parametrize("source", ["claims", "statements"])
def test_every_line_asks_for_rows_that_the_study_makes(rows, source):
    lines = ASKED if source == "claims" else statements().query("key.str.startswith('003-A')")
    lines = lines[(lines["instrument"] == "absorption") & (lines["aggregate"] != "none")]
    made = rows[(rows["site"] == "none") & (rows["rule"] == "final")]
    made = set(map(tuple, made[["condition", "metric", "edit", "stratum", "unit"]].to_numpy()))
    assert len(lines) > 20
    for c in lines.itertuples():
        for name in [*c.condition.split(), *(v for v in c.versus.split() if "=" not in v)]:
            preset, _, arm = name.partition("/")
            arm = arm.replace("unfreeze4", "unfreeze2")                      # of two layers here
            for unit in c.unit.split() or [""]:
                asked = f"absorption.tiny/{arm}", c.metric, c.edit, AT_TINY.get(c.stratum, c.stratum), unit
                assert asked in made, (c.Index, asked)
            taken = study_jobs(STUDY, preset.partition(".")[2], "dense", seed_list(c.seeds))       # a preset's, or others
            assert {s for job in taken for s in job.seeds} == {*seed_list(c.seeds)}

@pytest.mark.audit
def test_every_arm_makes_rows_and_none_twice(rows):
    assert {f"absorption.tiny/{a}" for a in ABSORPTION_ARMS} <= set(rows["condition"])
    assert not rows.duplicated([c for c in rows if c not in ("value", "n_examples")]).any()

@pytest.mark.audit
def test_every_damage_stands_beside_no_attention_and_masks_that_read_nothing(rows):
    made = rows[rows["rule"] == "final"].set_index(["condition", "metric", "edit", "stratum"]).sort_index()["value"]
    for arm in ABSORPTION_ARMS:
        at = f"absorption.tiny/{arm}"
        assert {"attention off", "attention mean"} <= set(made.loc[at, "damage"].index.get_level_values("edit")), arm
        if arm.startswith("hard") or arm == "stochastic": continue
        assert {"last", "usual"} <= set(made.loc[at, "efficiency"].index.get_level_values("edit")), arm
        share = made[at, "damage_fitted", "bce", "k=4"] / made[at, "damage", "attention off", "all"]
        assert made[at, "lost_share", "bce", "k=4"].item() == pytest.approx(share.item())

def test_margins_of_damages_are_the_same_share_of_attention_in_every_text():
    said = statements().query("key in ['003-A1d', '003-A3', '003-A4', '003-A5h']")
    text = said["condition"].str.contains("kjv").map({True: "kjv", False: "planted"})
    lines = ASKED[ASKED["id"].str.fullmatch(r"contrast\.absorption\.\w+\.(penalty|damage.*)")]
    theirs = lines["id"].str.contains("kjv").map({True: "kjv", False: "planted"})
    by_text = pd.concat([said["margin"].groupby(text).unique(), lines["margin"].groupby(theirs).unique()])
    assert len(lines) == 11 and all(len(set(by_text[t].explode())) == 1 for t in ("kjv", "planted"))

@pytest.mark.audit
def test_a_dense_job_that_is_stopped_gives_the_same_rows(tmp_path, rows, monkeypatch):
    stops = []
    def stopped_once(*args, **more): return distil(*args, **more) if stops else stops.append(1)
    monkeypatch.setattr(study, "distil", stopped_once)
    job, = study_jobs(STUDY, "tiny", "dense")
    assert not run_job(job, tmp_path) and run_job(job, tmp_path)
    again = run_study(STUDY, "tiny", "dense", root=tmp_path, executor="here", quiet=True)
    assert again.equals(rows[rows["condition"].isin(set(again["condition"]))].reset_index(drop=True))
    assert {p.suffix for p in job.path(Store(tmp_path)).parent.iterdir()} <= {".safetensors", ".lock"}

def test_gates_of_a_model_of_ones_own_are_a_command_whose_second_call_finds_all(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MOE_REDISTRIBUTION_HOME", str(tmp_path / "store"))
    small_model("llama", 256, 1, layers=2, d=32, heads=4, kv_heads=2, T=32)[0].save_pretrained(tmp_path / "model")
    ask = ["gates", "--model", str(tmp_path / "model"), "--text", str(text), "--bytes", "--context",
           "16", "--batch", "2", "--tokens", "64", "--d-gate", "4", "--steps", "3", "--loss", "kl", "--loss", "bce"]
    file = tmp_path / "g.csv"
    more = ["--k", "2,4", "--unfreeze", "0,1", "--out", str(file)]
    assert main([*ask, *more]) == 0
    made = pd.read_csv(file)
    ways = made[made["condition"] == "model"].groupby("stratum")["edit"].agg(set)
    assert ways["k=2"] == ways["k=4"] == {"oracle", "random", "kl", "bce"} and ways["all"] == {"none"}
    assert {"model/unfreeze0", "model/unfreeze1"} < set(made["condition"]) and file.with_suffix(".png").exists()
    assert main([*ask, *more]) == 0 and "Nothing is missing" in capsys.readouterr().out
    assert pd.read_csv(file).equals(made)
    for wrong, says in ((["--k", "2,x"], "whole numbers"), (["--k", "16"], "from 1 to 15"), (["--loss", "mse"], "loss"),
                        (["--unfreeze", "3"], "0 to 2"), (["--tokens", "99999"], "a smaller --tokens")):
        whole = [*ask, *more]
        if wrong[0] != "--loss": del whole[(i := whole.index(wrong[0])):i + 2]              # for it may be given once
        assert main([*whole, *wrong]) == 2 and says in capsys.readouterr().err, wrong

@pytest.mark.audit
def test_a_gated_step_costs_at_most_twice_an_eager_one_at_512_keys():
    def step_of(how):
        model = small_model("gpt2", 1000, 1, layers=2, d=256, heads=4, T=512, tie_word_embeddings=False,
                            attention="eager")[0]
        if how: attach(model, new_gates(model, 32, 1), how)
        training, tokens = _LanguageTraining(model, _LanguageRecipe(100)), torch.randint(1000, (2, 513))
        def step():
            began = time.perf_counter()
            training.one_step(tokens)
            return time.perf_counter() - began
        return step
    gated = Gating("post"), Gating("logbias"), Gating("topk_tau", 64), Gating("hard", 64)
    steps = {how: step_of(how) for how in (None, *gated)}
    taken = {how: min(step() for _ in range(6)) for how, step in steps.items()}
    assert all(t < 2 * taken[None] for t in taken.values()), taken
