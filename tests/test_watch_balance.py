"What is said of a mixture's loads while somebody else's loop trains it."
import math
import warnings

import numpy as np
import pytest
import torch

from moe_redistribution.opened.families import tiny_model
from moe_redistribution.opened.loads import watch_balance
from moe_redistribution.opened.opened import open_model

def model_of(family="mixtral", seed=0):
    torch.manual_seed(seed)
    return tiny_model(family, vocab_size=64).train()

def batch(b=4, t=24, seed=1): return torch.randint(0, 60, (b, t), generator=torch.Generator().manual_seed(seed))

def counts_by_logits(model, tokens, keep=None):
    "Loads by layer from the logits that the family itself gives, with a plain loop."
    was, k = model.training, model.config.num_experts_per_tok
    with torch.no_grad(): logits = model.eval()(input_ids=tokens, output_router_logits=True).router_logits
    model.train(was)
    keep = torch.ones(tokens.numel()).bool() if keep is None else keep.flatten().bool()
    found = []
    for z in logits:
        counts = [0] * z.shape[-1]
        for token in z.reshape(-1, z.shape[-1])[keep].topk(k).indices.tolist():
            for e in token: counts[e] += 1
        found.append(np.array(counts))
    return found

def expected(counts, layers=None):
    found, layers = {}, layers or [*range(len(counts))]
    for l, c in zip(layers, counts):
        load = c / c.mean()
        found |= {f"L{l}.max_violation": load.max() - 1} | {f"L{l}.p{q}": np.percentile(load, q) for q in (10, 50, 90)}
    each = [c.max() / c.mean() - 1 for c in counts]
    pooled = sum(counts)
    found |= {"worst.max_violation": max(each), "worst.layer": layers[int(np.argmax(each))], "choices": counts[0].sum(),
              "pooled.max_violation": pooled.max() / pooled.mean() - 1}
    return {f"balance/{n}": pytest.approx(float(x)) for n, x in found.items()}

def train_pass(model, tokens, **more): model(input_ids=tokens, labels=tokens, **more).loss.backward()

@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen3_moe"])
def test_numbers_are_those_of_a_plain_count_of_the_routers_logits(family):
    model, tokens = model_of(family), batch()
    with watch_balance(model) as watch:
        train_pass(model, tokens)
        assert watch.step() == expected(counts_by_logits(model, tokens), [*watch.experts]) and watch.step() == {}
        assert watch.pads.startswith("counted")

def test_passes_of_one_step_are_summed_and_what_is_no_training_is_not_counted():
    model, parts = model_of(), [batch(seed=s) for s in (1, 2)]
    with watch_balance(model) as watch:
        for x in parts: train_pass(model, x)
        with torch.no_grad(): model(input_ids=batch(seed=3))
        model.eval()
        model(input_ids=batch(seed=3))
        counts = [sum(c) for c in zip(*(counts_by_logits(model, x) for x in parts))]
        assert watch.step() == expected(counts)

def test_pads_are_left_out_by_the_mask_and_one_of_another_shape_is_said():
    model, tokens = model_of(), batch()
    mask = torch.ones_like(tokens)
    mask[:2, 15:] = 0
    with watch_balance(model) as watch:
        train_pass(model, tokens, attention_mask=mask)
        assert watch.step()["balance/choices"] == mask.sum() * model.config.num_experts_per_tok and watch.pads == "left out"
        wide = torch.ones(4, 1, 24, 24).tril().bool()
        train_pass(model, tokens, attention_mask=wide)
        assert watch.step()["balance/choices"] == tokens.numel() * 2 and "there was no mask" in watch.pads

@pytest.mark.parametrize("reentrant", [True, False])
def test_what_gradient_checkpointing_computes_again_does_not_count_twice(reentrant):
    model, tokens, calls = model_of(), batch(), []
    with watch_balance(model) as watch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train_pass(model, tokens)
        plain = watch.step()
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        model.enable_input_require_grads()
        hook = watch.experts[0].register_forward_pre_hook(lambda *_: calls.append(1))
        train_pass(model, tokens)
        hook.remove()
        assert len(calls) == 2 and watch.step() == plain

def test_one_layer_that_collapses_is_seen_and_the_pooled_number_hides_it():
    model, tokens = tiny_model("mixtral", vocab_size=64, num_hidden_layers=4).train(), batch(16, 32)
    with watch_balance(model) as watch:
        train_pass(model, tokens)
        before = watch.step()
        with torch.no_grad():                                         # expert 3 of layer 2 is always among the two
            model.model.layers[2].mlp.gate.weight[3] = 0
            model.model.layers[2].mlp.gate.register_forward_pre_hook(lambda m, args: (args[0].abs(), *args[1:]))
            model.model.layers[2].mlp.gate.weight[:] = -1.
            model.model.layers[2].mlp.gate.weight[3] = 1.
        train_pass(model, tokens)
        after = watch.step()
    E, k = len(model.model.layers[2].mlp.gate.weight), model.config.num_experts_per_tok
    assert after["balance/worst.layer"] == 2 and after["balance/worst.max_violation"] == pytest.approx(E / k - 1)
    others = max(after[f"balance/L{l}.max_violation"] for l in (0, 1))
    assert before["balance/worst.max_violation"] < .8 and others < .8
    assert after["balance/pooled.max_violation"] < .75 * after["balance/worst.max_violation"]

def test_it_leaves_nothing_behind_and_an_error_in_a_pass_counts_nothing_after_it():
    model, tokens = model_of(), batch()
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    n, loss = hooks(), model(input_ids=tokens, labels=tokens).loss
    with watch_balance(model) as watch:
        assert hooks() > n and watch.step() == {} and model.training
        assert model(input_ids=tokens, labels=tokens).loss.equal(loss)
        watch.forget()
        with pytest.raises(IndexError): model(input_ids=tokens + 10**6)
        assert not watch.counting and watch.step() == {}
    assert hooks() == n

def test_an_opened_model_and_one_within_another_are_watched_and_a_dense_one_is_refused():
    model, tokens = model_of(), batch()
    with watch_balance(model) as watch:
        train_pass(model, tokens)
        plain = watch.step()
    s = open_model(model)
    class Wrapped(torch.nn.Module):
        def __init__(self): super().__init__(); self.module = model
    for of in (s, Wrapped()):
        with watch_balance(of) as watch:
            train_pass(model.train(), tokens)
            assert watch.step() == plain
    with pytest.raises(ValueError, match="expected one with routers; got llama, which is dense"): watch_balance(tiny_model("llama"))

@pytest.mark.parametrize("inner", [False, True])
def test_a_model_that_was_compiled_and_run_is_counted_as_any_other(inner):
    model, tokens = model_of("olmoe"), batch()
    counts = counts_by_logits(model, tokens)
    train_pass(compiled := torch.compile(model, backend="eager"), tokens)
    with watch_balance(model if inner else compiled) as watch:
        for _ in range(2):
            train_pass(compiled, tokens)
            assert watch.step() == expected(counts)
        with torch.no_grad(): compiled(input_ids=tokens)
        assert watch.step() == {}

def test_a_trainer_logs_the_numbers_of_its_steps(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model, tokens = model_of(), batch(32, 16)
    data = [dict(input_ids=x, labels=x, attention_mask=torch.ones_like(x)) for x in tokens]
    args = transformers.TrainingArguments(str(tmp_path), max_steps=4, logging_steps=2, per_device_train_batch_size=4, report_to=[],
                                          gradient_accumulation_steps=2, save_strategy="no", disable_tqdm=True, use_cpu=True)
    with watch_balance(model) as watch:
        transformers.Trainer(model, args, train_dataset=data, callbacks=[watch.callback()]).train()
        trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[watch.callback()])
        trainer.train()
    logged = [x for x in trainer.state.log_history if "balance/worst.max_violation" in x]
    assert [x["step"] for x in logged] == [2, 4] and all("loss" in x and math.isfinite(x["loss"]) for x in logged)
    assert all(x["balance/choices"] == 2 * 4 * 16 * 2 for x in logged)                       # of one step, both its passes

def test_a_trainer_that_logs_an_epoch_logs_the_numbers_of_its_last_step(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model, tokens = model_of(), batch(8, 16)
    data = [dict(input_ids=x, labels=x) for x in tokens]
    args = transformers.TrainingArguments(str(tmp_path), num_train_epochs=2, logging_strategy="epoch", per_device_train_batch_size=4,
                                          report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True)
    with watch_balance(model) as watch:
        trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[watch.callback()])
        trainer.train()
    logged = [x for x in trainer.state.log_history if "loss" in x]
    assert [x["step"] for x in logged] == [2, 4] and all(x["balance/choices"] == 4 * 16 * 2 for x in logged)
