"""Adapters, user hooks, packed, offloaded and unusual models: the numbers are its own, or there are none."""
import copy
import importlib
import tempfile

import pytest
import torch
from torch.nn.utils import parametrize
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.utils import logging

from moe_redistribution.instruments.ablation import combine_edits
from moe_redistribution.instruments.scores import routing_scores
from moe_redistribution.instruments.trace import trace
from moe_redistribution.opened.families import _tiny_config
from moe_redistribution.opened.opened import open_model, sum_of_parts
from moe_redistribution.opened.decomposition import answer_terms
from moe_redistribution.opened.watched import _experts_in_use, _own_eager
from test_scores import Adapted
from toys import eager_model

logging.disable_progress_bar()
TOKENS = torch.randint(50, (2, 10), generator=torch.Generator().manual_seed(3))
EDITS = {"L1.E1": "zero"}, {"L1.E1": "route_around"}, {"L1.routes": "never:E1"}, {"L1.E1": "swap:E2"}
READ = ("L1.router_logits", "L1.router_probs", "L1.gates", "L1.E1", "L1.resid_post", "logits")

def made(family="olmoe", **sizes): return eager_model(family, torch.float32, **sizes)

def own(model):
    with torch.no_grad(): return model(input_ids=TOKENS, use_cache=False).logits

def runs_like(s, model):
    "A subject and a plain model with the same weights: what is read, and what an edit gives."
    twin = open_model(model)
    for site in READ:
        torch.testing.assert_close(trace(s, TOKENS)[site], trace(twin, TOKENS)[site], rtol=1e-4, atol=1e-5)
    for edit in EDITS:
        ours, theirs = (x.run(TOKENS, combine_edits(x, edit)) for x in (s, twin))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

class AdaptedParameter(torch.nn.Module):
    "A module one of whose parameters gets a low-rank delta while it runs, as PEFT's `target_parameters` hang one."
    def __init__(self, base, name, delta): super().__init__(); self.base, self.name, self.delta = base, name, delta

    def forward(self, *args, **kwargs):
        class Plus(torch.nn.Module):
            forward = lambda own, W: W + self.delta
        inner = self.base
        while isinstance(inner, AdaptedParameter): inner = inner.base
        parametrize.register_parametrization(inner, self.name, Plus())
        try: return self.base(*args, **kwargs)
        finally: parametrize.remove_parametrizations(inner, self.name, leave_parametrized=False)

def test_an_adapter_of_the_router_or_of_experts_is_opened_as_it_runs():
    model, merged, g = made(), made(), torch.Generator().manual_seed(7)
    for layer, plain in zip(model.model.layers, merged.model.layers):
        for at, name in (("experts", "gate_up_proj"), ("experts", "down_proj"), ("gate", "weight")):
            W = getattr(getattr(plain.mlp, at), name)
            delta = .2 * torch.randn(W.shape, generator=g)
            setattr(layer.mlp, at, AdaptedParameter(getattr(layer.mlp, at), name, delta))
            W.data += delta
    s = open_model(model)
    assert torch.equal(trace(s, TOKENS)["logits"][0], own(model)) and "L1.router_logits" in s.sites
    runs_like(s, merged)
    answer_terms(s, TOKENS[:, :-1], TOKENS[:, 1:], "all")                      # its own check: they sum to the logits
    with pytest.raises(ValueError, match="routers do not, or are adapted.*merge adapters"): routing_scores(s, TOKENS)

def test_what_a_router_adds_to_its_map_is_not_left_out_of_its_scores():
    model = made("hunyuan_v1_moe")
    for layer in model.model.layers: layer.mlp.gate.wg = Adapted(layer.mlp.gate.wg, .4)
    s = open_model(model)
    assert s.layers[1].absent["router_logits"] == "more than its map makes its scores: merge adapters"
    assert "L1.router_logits" not in s.sites and torch.equal(trace(s, TOKENS)["logits"][0], own(model))
    with pytest.raises(ValueError, match="L1.router_logits"): s.run(TOKENS, combine_edits(s, {"L1.E1": "route_around"}))

def test_a_wrapper_that_puts_prompts_before_the_tokens_is_refused():
    class Prompted(torch.nn.Module):
        active_peft_config = type("Config", (), dict(is_prompt_learning=True))
        def get_base_model(self): return made()
    with pytest.raises(ValueError, match="got prompts before its tokens"): open_model(Prompted())

# peft is no dependency: `pip install peft`, then `make audit`
PLACES = {"attention": dict(target_modules=["q_proj", "o_proj"]), "embedding": dict(target_modules=["embed_tokens"]),
          "experts": dict(target_parameters=["experts.gate_up_proj", "experts.down_proj"], target_modules=[]),
          "router": dict(target_parameters=["gate.weight"], target_modules=[])}

@pytest.mark.audit
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
@pytest.mark.parametrize("place", PLACES)
def test_a_model_with_lora_runs_as_with_the_adapters_merged(place, family):
    peft = pytest.importorskip("peft")
    def adapted():
        model = peft.get_peft_model(made(family), peft.LoraConfig(r=2, lora_alpha=4, **PLACES[place])).eval()
        g = torch.Generator().manual_seed(1)
        for n, w in model.named_parameters():
            if "lora_" in n: w.data = .3 * torch.randn(w.shape, generator=g)
        return model
    model = adapted()
    s = open_model(model)
    assert torch.equal(s.run(TOKENS)[0], own(model)) and "L1.router_logits" in s.sites
    runs_like(s, adapted().merge_and_unload())

@pytest.mark.audit
def test_prompt_tuning_is_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(made(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="got prompts before its tokens"): open_model(model)

@pytest.mark.parametrize("family, where, kind, more", [
    ("qwen3_moe", "finegrained_fp8", "FP8Experts", dict(block_size=(8, 8))),
    ("gpt_oss", "mxfp4", "Mxfp4GptOssExperts", {})])
@pytest.mark.parametrize("layers", [[1], [0, 1]])
def test_packed_experts_are_refused_by_name(family, where, kind, more, layers):
    model = made(family)
    packed = getattr(importlib.import_module(f"transformers.integrations.{where}"), kind)
    for l in layers: model.model.layers[l].mlp.experts = packed(model.config, **more)
    with pytest.raises(ValueError, match=f"got {kind}, which keeps them packed; fix: load it with dequantize=True"):
        open_model(model)

def on_cpu(accelerate, model): accelerate.cpu_offload(model, execution_device="cpu")

def on_disk(accelerate, model): accelerate.disk_offload(model, tempfile.mkdtemp(), execution_device="cpu")

def split(accelerate, model):
    parts = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    accelerate.dispatch_model(model, parts | {"model.layers.1": "disk"}, main_device="cpu", force_hooks=True,
                              offload_dir=tempfile.mkdtemp())

@pytest.mark.parametrize("spread", [on_cpu, on_disk, split])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "qwen2_moe"])
def test_a_model_that_is_offloaded_or_split_runs_as_a_whole_one(spread, family):
    model = made(family)
    spread(pytest.importorskip("accelerate"), model)
    assert any(p.is_meta for p in model.parameters())
    s = open_model(model)
    runs_like(s, made(family))
    with pytest.raises(ValueError, match="offloaded; fix: .*load it without offloading"):
        answer_terms(s, TOKENS[:, :-1], TOKENS[:, 1:], "all")

def test_weights_that_are_nowhere_are_named():
    model = made()
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(ValueError, match=r"got model.layers.1.mlp.\S+ on the device meta"): open_model(model)
    with torch.device("meta"): away = type(model)(_tiny_config("olmoe"))
    with pytest.raises(ValueError, match="got model.embed_tokens.weight on the device meta"): open_model(away)

@pytest.mark.parametrize("after", [False, True])
def test_hooks_that_read_see_what_they_saw_and_change_nothing(after):
    model, seen = made(), []
    s = open_model(model) if after else None
    for name in ("self_attn", "mlp", "mlp.gate", "mlp.experts"):
        model.model.layers[1].get_submodule(name).register_forward_hook(lambda *a: seen.append(a[0]))
    s = s or open_model(model)
    seen.clear()
    runs = trace(s, TOKENS)
    assert len(seen) == 4 and torch.equal(runs["logits"][0], own(model))
    runs_like(s, made())

def doubled(module, args, out): return (out[0], 2 * out[1], *out[2:]) if isinstance(out, tuple) else 2 * out

def test_a_hook_that_writes_before_opening_is_part_of_the_model_and_parts_that_do_not_sum_are_said():
    model = made()
    model.model.layers[1].mlp.experts.register_forward_hook(doubled)
    s = open_model(model)
    assert torch.equal(trace(s, TOKENS)["logits"][0], own(model))
    assert s.layers[1].absent == {"shared_out": "its block is no sum of its experts: their sum times 2"}
    assert not s.layers[0].absent
    with pytest.raises(ValueError, match="experts of L1: expected experts that enter the stream one by one"):
        answer_terms(s, TOKENS[:, :-1], TOKENS[:, 1:], "expert")
    model = made()
    model.model.layers[1].mlp.gate.register_forward_hook(doubled)
    s = open_model(model)
    assert torch.equal(trace(s, TOKENS)["logits"][0], own(model))
    assert "L1.gates" in s.sites and s.layers[1].absent["router_logits"] == "its own scores give another choice"

@pytest.mark.parametrize("at, edit", [("mlp.experts", {"L1.ffn_out": "zero"}), ("mlp", {"L1.ffn_out": "zero"}),
                                      ("mlp.gate", {"L1.E1": "route_around"}), ("mlp.gate", {"L1.routes": "k=1"})])
def test_a_hook_that_writes_after_opening_is_never_dropped_without_a_word(at, edit):
    model = made()
    s = open_model(model)
    model.model.layers[1].get_submodule(at).register_forward_hook(doubled)
    assert torch.equal(s.run(TOKENS)[0], own(model))
    with pytest.raises(RuntimeError, match="as when the model was opened"): s.run(TOKENS, combine_edits(s, edit))

@pytest.mark.parametrize("after", [False, True])
def test_a_compiled_forward_is_refused(after):
    model = made()
    s = open_model(model) if after else None
    block = model.model.layers[1].mlp
    block.forward = torch.compile(block.forward, backend="eager")
    with pytest.raises(ValueError, match="got a compiled model.layers.1.mlp"):
        s.run(TOKENS) if after else open_model(model)

def test_tied_embeddings_open_as_any():
    model = made(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    runs_like(open_model(model), model)

@pytest.mark.parametrize("family, sizes", [("olmoe", dict(attention_dropout=.5)),
                                           ("mixtral", dict(router_jitter_noise=.5))])
def test_a_model_in_training_is_opened_and_run_in_evaluation_and_left_in_training(family, sizes):
    model = made(family, **sizes)
    plain = own(model)
    s = open_model(model.train())
    assert not s.layers[1].absent and torch.equal(s.run(TOKENS)[0], plain) and model.training
    runs_like(s, made(family, **sizes))

def test_checkpointed_layers_have_the_same_gradients_under_an_edit():
    grads = []
    for checkpointed in (False, True):
        model = made()
        if checkpointed: model.gradient_checkpointing_enable(), model.train()
        open_model(model).run(TOKENS, {"L1.E1": lambda x: 0 * x}, grad=True).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    assert not model.model.layers[1].mlp.experts.down_proj.grad[1].any()

@pytest.mark.parametrize("around", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_inference_and_mixed_precision_around_a_pass(around):
    model = made()
    with around():
        s = open_model(model)
        assert torch.equal(trace(s, TOKENS)["logits"][0], own(model))
        silent = s.run(TOKENS, combine_edits(s, {"L1.E1": "zero"}))
        with torch.no_grad(): model.model.layers[1].mlp.experts.down_proj[1] = 0
        assert torch.equal(silent[0], own(model))

class Saved(torch.nn.Module):
    "A part and a trained copy of it that works in its place, as PEFT's `modules_to_save`: names are handed on."
    def __init__(self, base):
        super().__init__()
        self.base, self.copy = base, copy.deepcopy(base)
        for p in self.copy.parameters(): p.data *= .5

    def __getattr__(self, name):
        try: return super().__getattr__(name)
        except AttributeError: return getattr(self.copy, name)

    def forward(self, *args, **kwargs): return self.copy(*args, **kwargs)

@pytest.mark.parametrize("parts", [["mlp.experts"], ["mlp.gate"], ["self_attn"], ["mlp"]])
def test_a_trained_copy_of_a_part_works_in_its_place(parts):
    model, plain = made(), made()
    for layer, other in zip(model.model.layers, plain.model.layers):
        for name in parts:
            layer.set_submodule(name, Saved(layer.get_submodule(name)))
            for p in other.get_submodule(name).parameters(): p.data *= .5
    s = open_model(model)
    assert torch.equal(trace(s, TOKENS)["logits"][0], own(model)) and "L1.pattern" in s.sites
    runs_like(s, plain)

def put(at, make):
    "A change of a model: what stands at a name of layer 1 is put into `make` of it."
    def change(model): model.model.layers[1].set_submodule(at, make(model.model.layers[1].get_submodule(at)))
    return change

def dropped(model): model.model.layers = model.model.layers[:1]

def deleted(model): del model.model.layers[1]

def added(model): model.model.layers.append(copy.deepcopy(model.model.layers[1]))

AFTER = [put(at, make) for at in ("self_attn.o_proj", "mlp.gate", "mlp.experts", "mlp", "self_attn")
         for make in (torch.nn.Sequential, copy.deepcopy)] + [put("self_attn.o_proj", lambda o: Adapted(o, .5)),
                                                             dropped, deleted, added]

@pytest.mark.parametrize("change", AFTER)
def test_a_part_that_is_another_than_when_it_was_opened_is_named_at_the_next_pass(change):
    s = open_model(made())
    change(s.model)
    for edits in ({}, {"L1.H1": "zero"}, {"L1.routes": "k=1"}):
        with pytest.raises(RuntimeError, match="as it was when it was opened; got .*; fix: open it again"):
            s.run(TOKENS, edits)
    with pytest.raises(RuntimeError, match="when it was opened"): s.generate(TOKENS, 2)

@pytest.mark.parametrize("part", ["mlp.gate", "mlp.experts", "mlp", "self_attn", "self_attn.o_proj"])
def test_an_adapter_that_was_switched_off_is_read_right_or_named(part):
    model, on = made(), [True]
    class Switched(Saved):
        def forward(self, *args, **kwargs): return (self.copy if on[0] else self.base)(*args, **kwargs)
    for layer in model.model.layers: layer.set_submodule(part, Switched(layer.get_submodule(part)))
    s, said = open_model(model), 0
    plain = trace(s, TOKENS, keep=["L1.routes"])["L1.routes"][0]
    on[0] = False
    true = open_model(model)
    assert torch.equal(s.run(TOKENS), true.run(TOKENS))
    words = [{"L1.routes": w} for w in ("never:E1", "only:E2", "k=1", plain)]
    zeros = [{site: torch.zeros_like} for site in s.sites if not site.endswith(("probs", "routes"))]
    for edit in [*EDITS, *words, *zeros]:
        try: ours = s.run(TOKENS, combine_edits(s, edit))
        except (ValueError, RuntimeError) as e: said += "; got one that " in str(e)
        else: assert torch.equal(ours, true.run(TOKENS, combine_edits(true, edit))), edit
    assert said > (3 if part != "self_attn.o_proj" else -1)

def with_capacity(self, hidden, index, weights):
    "Experts as many registered ones are: tokens beyond an expert's capacity are dropped."
    for e in range(len(self.down_proj)): weights = weights.masked_fill((index == e) & ((index == e).cumsum(0) > 40), 0)
    return _experts_in_use(self, hidden, index, weights)

with_capacity.__module__ = "my_kernels"

def test_experts_by_a_function_that_somebody_registered_are_refused_and_so_is_the_pattern_of_such_an_attention():
    ExpertsInterface.register("capacity", with_capacity)
    model = made()
    s = open_model(model)
    model.set_experts_implementation("capacity")
    for f in (lambda: open_model(model), lambda: s.run(TOKENS), lambda: s.generate(TOKENS, 2)):
        with pytest.raises(ValueError, match="got 'capacity', which somebody registered; nearest valid: eager"): f()
    model.set_experts_implementation("eager")
    def attend(module, *args, **kwargs): return _own_eager(module)(module, *args, **kwargs)
    attend.__module__ = "my_kernels"
    AttentionInterface.register("windowed", attend), AttentionMaskInterface.register("windowed", eager_mask)
    model.set_attn_implementation("windowed")
    s = open_model(model)
    assert s.layers[1].absent["pattern"] == "its attention is by 'windowed', which somebody registered"
    assert "L1.z" in s.sites

class Scaled(OlmoeSparseMoeBlock):
    def forward(self, x): return 3 * super().forward(x)

class Normed(OlmoeSparseMoeBlock):
    def forward(self, x): return torch.nn.functional.normalize(super().forward(x), dim=-1)

@pytest.mark.parametrize("kind, says", [(Scaled, "their sum times 3"), (Normed, "more than their sum"),
                                        ("cohere2_moe", "their sum times 0.5"), ("beam", "their sum times 2.5"),
                                        ("axk1", "AXK1RMSNorm after their sum"),
                                        ("minimax_m3_vl_text", "their sum times 2")])
def test_a_block_that_is_no_sum_of_its_experts_is_said_in_the_headline(kind, says):
    model = made(kind if isinstance(kind, str) else "olmoe")
    if isinstance(kind, type): model.model.layers[1].mlp.__class__ = kind
    s = open_model(model)
    assert f" a block is no sum of its experts: {says}; " in s.report().headline
    keep = ["L1.gates", *(f"L1.{u}" for u in ("E0", "E1", "E2", "E3"))] + [n for n in s.sites if n == "L1.ffn_out"]
    with pytest.raises(ValueError, match="expected a block that is the sum of its experts"):
        sum_of_parts(s, trace(s, TOKENS, keep=keep), 1)
