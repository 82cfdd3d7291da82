"""Other tools on the same model: one name, one number; a serving engine's routes are routes that can be replayed."""
import base64
import io
import re

import numpy as np
import pytest
import torch
from transformers.utils import logging

from moe_redistribution.instruments.ablation import combine_edits
from moe_redistribution.instruments.trace import trace
from moe_redistribution.opened.opened import open_model
from moe_redistribution.opened.other_tools import (LENS, NOT_IN_LENS, from_lens, read_routes, routes_from_engine,
                                                     routes_to_engine, to_lens)
from moe_redistribution.opened.routing_edits import replay
from toys import eager_model

logging.disable_progress_bar()
TOKENS = torch.randint(50, (2, 10), generator=torch.Generator().manual_seed(3))

def opened(family="olmoe"): return open_model(eager_model(family, torch.float32))

def test_every_site_has_a_hook_and_back_or_a_reason():
    named = {}
    for site in opened("deepseek_v3").sites:
        try: named[site] = to_lens(site)
        except ValueError as e: assert any(why in str(e) for why in NOT_IN_LENS.values()), site
    assert len({*named.values()}) == len(named) and {s.split(".")[-1] for s in named} == {*LENS, "embed", "logits"}
    assert all(from_lens(hook) == site for site, hook in named.items())
    assert to_lens("L3.attn_out") == "blocks.3.hook_attn_out"
    assert to_lens("L11.gates") == "blocks.11.mlp.hook_expert_weights"
    assert from_lens(to_lens("L1.router_logits", "router"), "router") == "L1.router_logits"
    assert from_lens("blocks.0.hook_resid_pre") == "embed" and from_lens("blocks.4.hook_in") == "L3.resid_post"

@pytest.mark.parametrize("call, bad", [
    *((to_lens, x) for x in ("L1.E3", "L1.shared_out", "L1.v", "L1.router_probs", "L1.nothing", "gates")),
    *((from_lens, x) for x in ("blocks.0.ln1.hook_scale", "blocks.x.hook_mlp_out", "hook_pos_embed"))])
def test_a_site_without_a_hook_and_a_hook_without_a_site_are_refused(call, bad):
    with pytest.raises(ValueError, match=re.escape(bad)): call(bad)

@pytest.mark.parametrize("form", [np.asarray, torch.from_numpy, lambda x: x.astype(np.uint8), lambda x: as_sent(x)])
@pytest.mark.parametrize("family, every", [("olmoe", False), ("deepseek_v3", False), ("deepseek_v3", True)])
def test_an_engine_s_routes_are_replayed(family, every, form):
    s = opened(family)
    tr = trace(s, TOKENS)
    layers = [l for l, x in enumerate(s.layers) if x.experts is not None]
    arrays = routes_to_engine({l: tr[f"L{l}.routes"] for l in layers})
    assert [a.shape for a in arrays] == [(10, len(layers), 2)] * 2 and arrays[0].dtype == np.int16
    if every: arrays = [np.concatenate([0 * a, a], 1) for a in arrays]               # its dense layer's places are zero
    routes = routes_from_engine([form(a) for a in arrays], s)
    assert {l: tuple(r.shape) for l, r in routes.items()} == dict.fromkeys(layers, (2, 10, 2))
    assert torch.equal(s.run(TOKENS, combine_edits(s, replay(routes))), tr["logits"])
    alone = routes_from_engine(form(arrays[1]), s)
    torch.testing.assert_close(s.run(TOKENS[1:], combine_edits(s, replay(alone))), tr["logits"][:, 1:])

def as_sent(x):
    "As an engine sends it over HTTP."
    np.save(to := io.BytesIO(), x)
    return base64.b64encode(to.getvalue()).decode()

def test_routes_of_another_model_are_refused():
    s = opened()
    good = routes_to_engine({l: trace(s, TOKENS)[f"L{l}.routes"] for l in range(2)})[0]
    for bad, says in ((good[:, :1], "expected 2 layers with experts, or all 2; got 1"),
                      (good + 3, "experts 0 to 3 in L0"),
                      (good - 9, "experts 0 to 3"), (good.astype(float), "got float64"),
                      (good[:, 0], r"got int16 \(10, 2\)")):
        with pytest.raises(ValueError, match=says): routes_from_engine(bad, s)
    with pytest.raises(ValueError, match="requests of one length"): routes_from_engine([good, good[1:]], s)
    with pytest.raises(ValueError, match="-1, a token without one"): routes_to_engine({0: torch.tensor([[[0, -1]]])})
    with pytest.raises(ValueError, match="one row or more"): read_routes(good[:0])
    with pytest.raises(ValueError, match="rows of zeros"):                            # tokens that were not recorded
        s.run(TOKENS[:1], combine_edits(s, replay(routes_from_engine(0 * good, s))))
    with pytest.raises(ValueError, match="windows, tokens, k"):               # the last token, which nothing read
        s.run(TOKENS[:1], combine_edits(s, replay(routes_from_engine(good[:-1], s))))

# -------------------------------- tools that are no dependency: `pip install transformer-lens nnsight`, `make audit`

# family → its router's name in TransformerLens, and the sites whose hooks its adapter has not got
ADAPTERS = {"olmoe": ("gate", {}), "mixtral": ("gate", {}), "qwen2_moe": ("gate", {}), "gpt_oss": ("router", {}),
            "deepseek_v3": ("gate", {"L1.gates", "L1.routes"})}

@pytest.mark.audit
@pytest.mark.parametrize("family", ADAPTERS)
def test_transformer_lens_has_the_same_numbers_under_its_names(family, tmp_path):
    bridge = pytest.importorskip("transformer_lens.model_bridge").TransformerBridge
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    (router, lacks), s = ADAPTERS[family], opened(family)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(50)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", bos_token="1", eos_token="2",
                            pad_token="3").save_pretrained(tmp_path)
    other = opened(family).model
    other.save_pretrained(tmp_path)
    lens = bridge.boot_transformers(str(tmp_path), hf_model=other, device="cpu", dtype=torch.float32)
    with torch.no_grad(): cache = lens.run_with_cache(TOKENS)[1]
    tr, missing = trace(s, TOKENS), set()
    for site in s.sites:
        if site.split(".")[-1] not in {*LENS, "embed", "logits"}: continue
        if (hook := to_lens(site, router)) not in cache: missing.add(site)
        else: assert torch.equal(tr[site].flatten(), cache[hook].flatten()), (site, hook)
    assert missing == {*lacks}

@pytest.mark.audit
def test_nnsight_has_the_same_numbers_and_the_same_edit():
    nnsight, s = pytest.importorskip("nnsight"), opened()
    model = nnsight.NNsight(opened().model)
    with torch.no_grad(), model.trace(TOKENS, use_cache=False):
        stream = model.model.layers[0].output.save()
        router = model.model.layers[1].mlp.gate.output.save()
        ffn = model.model.layers[1].mlp.output.save()
        said = model.output.save()
    tr = trace(s, TOKENS)
    assert torch.equal(stream, tr["L0.resid_post"][0]) and torch.equal(ffn, tr["L1.ffn_out"][0])
    assert torch.equal(router[2], tr["L1.routes"][0].flatten(0, 1)) and torch.equal(said.logits, tr["logits"][0])
    with torch.no_grad(), model.trace(TOKENS, use_cache=False):
        model.model.layers[1].mlp.output[:] = 0
        silent = model.output.save()
    assert torch.equal(silent.logits, s.run(TOKENS, combine_edits(s, {"L1.ffn_out": "zero"}))[0])
