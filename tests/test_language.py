"""Small language models: a start by seed, a resumed run that is the straight one, parts that do not move, and routers
that learn from the balance loss alone."""
import sys
import time

import pandas as pd
import pytest
import torch

from moe_redistribution.language.text import Planted, as_text
from moe_redistribution.language.small import (SIZE_NAMES, heldout_losses, next_token_loss, perplexity, small_model,
                                               _token_losses)
from moe_redistribution.language.training import (_LanguageRecipe, _LanguageTraining, _parameters_named, router_names,
                                                  train_language)
from moe_redistribution.training.store import Store
from moe_redistribution.training.jobs import run_job
from moe_redistribution.training.study import Desk, Preset, Study, find_rows, study_jobs

pytest.importorskip("transformers")
LANGUAGE = Planted(n_keys=4, n_values=6, n_words=12, window=16)
V, T = LANGUAGE.d_vocab, 16

def model_of(family="olmoe", seed=1, **sizes): return small_model(family, V, seed, **dict(d=16, T=T) | sizes)[0]

def trained(family="olmoe", desk=None, steps=8, batches=None, **choices):
    model = model_of(family)
    return model, train_language(model, batches or LANGUAGE.batches(T, 4, 1), steps, looks=4, desk=desk, **choices)

def same_bits(a, b): return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))

def desk_of(root, deadline=None):
    study = Study("toy", "A toy", {"tiny": Preset("one", {"arm": [0]})}, run=None, seconds=lambda *_: 1)
    return Desk(study_jobs(study, "tiny")[0], Store(root), deadline)

@pytest.mark.parametrize("family", SIZE_NAMES)
def test_the_same_seed_gives_the_same_weights_whatever_else_was_drawn(family):
    torch.manual_seed(3)
    first, number = model_of(family), torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), number)                                   # and it moved no other stream
    assert same_bits(first, model_of(family)) and not same_bits(first, model_of(family, seed=2))
    assert all(p.abs().sum(-1).gt(0).all() for n, p in first.named_parameters() if "embed" in n or "wte" in n)

@pytest.mark.parametrize("family, choices", [("olmoe", dict(aux_weight=.01)), ("gpt2", dict(schedule="cosine")),
                                             ("mixtral", dict(aux_weight=.01, task_gradient_to_router=False)),
                                             ("mistral", dict(frozen="embed_tokens"))])
def test_a_killed_and_resumed_training_is_the_straight_one_to_the_bit(tmp_path, family, choices):
    straight, seen = trained(family, **choices)
    for _ in range(3): assert trained(family, desk_of(tmp_path, time.time()), **choices)[1] is None
    resumed, again = trained(family, desk_of(tmp_path), **choices)
    assert same_bits(straight, resumed) and seen.equals(again) and seen["step"].tolist() == [2, 4, 6, 8]

def test_dropout_is_drawn_anew_at_every_step_and_again_after_a_kill(tmp_path):
    def dropping(desk=None):
        model = model_of("gpt2", resid_pdrop=.3)
        return model, train_language(model, LANGUAGE.batches(T, 4, 1), 4, looks=2, desk=desk)
    straight = dropping()[0]
    assert dropping(desk_of(tmp_path, time.time()))[1] is None
    torch.manual_seed(99)
    assert same_bits(straight, dropping(desk_of(tmp_path))[0]) and not same_bits(straight, trained("gpt2", steps=4)[0])

def rows_seen(arm, seed, seen):
    return pd.DataFrame(dict(condition=arm, seed=seed, metric="loss", step=range(len(seen)), value=seen["loss"]))

def study_of_two():
    def run(arm, seeds, settings, desk):
        seen = trained(desk=desk, **settings)[1]
        return None if seen is None else rows_seen(arm, seeds[0], seen)
    return Study("words", "Toy", {"tiny": Preset("one", {"a": [0]}, settings=dict(steps=8))}, run, lambda *_: 1)

def test_a_job_of_a_study_without_time_keeps_its_state_and_ends_with_the_same_rows(tmp_path):
    job, = study_jobs(study_of_two(), "tiny")
    assert run_job(job, tmp_path / "a") and run_job(job, tmp_path / "b", time.time() + .01) is False
    assert run_job(job, tmp_path / "b")
    assert find_rows(job, Store(tmp_path / "a")).equals(find_rows(job, Store(tmp_path / "b")))

def test_frozen_parameters_are_bit_identical_after_training_and_all_others_move():
    start, (model, _) = model_of(), trained(frozen=(r"mlp\.gate", "layers.0.self_attn"), weight_decay=.5)
    still = set(_parameters_named(start, (r"mlp\.gate", "layers.0.self_attn")))
    same = {n for (n, p), q in zip(start.named_parameters(), model.parameters()) if torch.equal(p, q)}
    assert same == still and all(p.requires_grad and p.grad is None for p in model.parameters())

@pytest.mark.parametrize("family", ["olmoe", "mixtral"])
def test_a_router_of_the_aux_only_arm_gets_no_task_gradient_and_nothing_else_changes(family):
    batch = LANGUAGE.batches(T, 4, 1)(0)
    def gradients(loss_of=next_token_loss, **choices):
        t = _LanguageTraining(model_of(family), _LanguageRecipe(10, **choices), loss_of)
        t.gradients(batch)
        return {n: None if p.grad is None else p.grad.clone() for n, p in t.moving.items()}
    def nothing(logits, tokens): return 0 * next_token_loss(logits, tokens)
    both, apart = gradients(aux_weight=.5), gradients(aux_weight=.5, task_gradient_to_router=False)
    balance, none = gradients(nothing, aux_weight=.5), gradients(task_gradient_to_router=False)
    routers = router_names(model_of(family))
    assert len(routers) == 2 and all(none[n] is None for n in routers)
    assert all(torch.equal(apart[n], balance[n]) and not torch.equal(apart[n], both[n]) for n in routers)
    assert all(torch.equal(apart[n], both[n]) for n in both if n not in routers)

def test_a_router_with_neither_gradient_stays_where_it_was():
    start, (model, _) = model_of(), trained(task_gradient_to_router=False, weight_decay=.5)
    pairs = zip(start.named_parameters(), model.parameters())
    assert {n for (n, p), q in pairs if torch.equal(p, q)} == set(router_names(start))

def test_a_balance_loss_balances():
    def unevenness(weight):
        model, _ = trained(steps=40, aux_weight=weight, lr=1e-2)
        out = model(input_ids=LANGUAGE.heldout(T, 32)[:, :-1], output_router_logits=True)
        return out.aux_loss.item()
    assert 1.9 < unevenness(1.) < unevenness(0.) - .02                       # 2, the active experts, is even

def test_batches_depend_on_seed_and_step_only():
    asked = []
    def noted(step):
        asked.append(step)
        return LANGUAGE.batches(T, 4, 1)(step)
    once = trained(batches=noted)
    torch.manual_seed(5)
    assert same_bits(once[0], trained()[0]) and asked == list(range(8))
    assert not same_bits(once[0], trained(batches=LANGUAGE.batches(T, 4, 2))[0])

def test_a_hook_after_backward_sees_and_changes_gradients():
    seen = []
    def stop_embedding(model, step):
        seen.append(step)
        model.get_input_embeddings().weight.grad.zero_()
    start, (model, _) = model_of(), trained(after_backward=stop_embedding, weight_decay=0.)
    before, after = (m.get_input_embeddings().weight for m in (start, model))
    assert seen == list(range(8)) and torch.equal(before, after) and not same_bits(start, model)

def test_losses_are_nats_of_the_next_token_and_leave_the_mode_alone():
    model, tokens = model_of().train(), LANGUAGE.heldout(T, 10)
    losses, logp = heldout_losses(model, tokens, batch=3), model(input_ids=tokens[:, :-1]).logits.log_softmax(-1)
    assert torch.allclose(losses, -logp.gather(2, tokens[:, 1:, None])[..., 0], atol=1e-5) and model.training
    assert torch.allclose(_token_losses(logp, tokens).mean(), next_token_loss(logp, tokens))
    assert abs(perplexity(losses) - losses.mean().exp()) < 1e-3 and not losses.requires_grad

def test_a_loss_that_is_not_finite_ends_the_training_and_is_told():
    def broken(logits, tokens): return next_token_loss(logits, tokens) * float("nan")
    model, seen = trained(loss_of=broken)
    assert len(seen) == 1 and seen["loss"].isna().all()

@pytest.mark.parametrize("sizes", [dict(d=24, h=10, E=3, k=1, heads=3), dict(d=8, heads=1, E=1, k=1, h=7),
                                   dict(d=16, h=8, E=5, k=3)], ids=str)
def test_odd_sizes_train_and_all_ways_to_compute_experts_agree(sizes):
    found = [train_language(small_model("olmoe", V, 1, experts, T=T, **sizes)[0], LANGUAGE.batches(T, 4, 1), 4, looks=1)
             for experts in (None, "eager", "batched_mm")]
    assert max(f["loss"].iloc[0] for f in found) - min(f["loss"].iloc[0] for f in found) < 1e-4

def test_no_token_of_the_future_is_seen():
    for family in SIZE_NAMES:
        model, tokens = model_of(family), LANGUAGE.heldout(T, 4)
        other = tokens.clone()
        other[:, -2] = (other[:, -2] + 1) % V
        a, b = (model(input_ids=t[:, :-1]).logits for t in (tokens, other))
        assert torch.allclose(a[:, :-1], b[:, :-1], atol=1e-6) and not torch.allclose(a[:, -1], b[:, -1], atol=1e-6)

@pytest.mark.parametrize("make, said", [
    (lambda: small_model("olmoe", 9, 0, layer=2), "nearest: 'layers'"),
    (lambda: trained(frozen="."), "some parameter that moves")])
def test_what_cannot_be_is_refused_before_any_work(make, said):
    with pytest.raises(ValueError, match=said): make()

def test_a_text_that_is_too_poor_is_refused_before_a_model_is_made():
    with pytest.raises(ValueError, match="2 to 4, `<unk>` and the types; got 25"): as_text("short", "a b c " * 9, V)

def test_without_transformers_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="got none; fix: pip install 'moe_redistribution\\[hf\\]'"): model_of()
