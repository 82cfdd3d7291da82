"""What is done with an open model: text under edits is that of whole passes, gradients are those of small changes,
tokens and effects are those of the activations, and files give back what a pass gave."""
import json

import pandas as pd
import pytest
import torch
from transformers import GenerationConfig

from moe_redistribution.instruments.trace import trace
from moe_redistribution.opened.families import FAMILIES, MIXTURES, tiny_model
from moe_redistribution.opened.opened import open_model
from moe_redistribution.opened.reading import read_saved
from moe_redistribution.language.small import greedy_tokens
from moe_redistribution.opened.streaming import byte_tokens, in_groups, text_windows, tokenizer_of
from moe_redistribution.opened.routing_edits import At, steer
from tiers import first
from toys import eager_model

W = torch.randint(1, 50, (3, 7), generator=torch.Generator().manual_seed(0))
families = pytest.mark.parametrize("family", first(["deepseek_v3", "gpt_oss", "qwen2"],
                                                   ["deepseek_v3", "gpt_oss", "qwen2", "olmoe", "mixtral", "qwen3_moe",
                                                    "deepseek_v2", "granitemoe", "minimax_m2", "llama", "lfm2_moe"]))

def opened(family="olmoe", double=False, **more):
    return open_model(eager_model(family) if double else tiny_model(family), **more)

def by_whole_passes(s, tokens, new, edits=None):
    "The slow loop: the whole text again for every new token."
    for _ in range(new): tokens = torch.cat([tokens, s.run(tokens, edits)[0, :, -1:].argmax(-1)], 1)
    return tokens

def edits_of(s):
    dense = [{}, {"L0.ffn_out": "zero"}, {"L*.attn_out": At("zero", slice(4, 9))}, {"L1.attn_out": "zero@8:"},
             {"L0.resid_post": At(steer(torch.linspace(-1, 1, 32), 2.), slice(3, None))}, {"embed": lambda x: x * .9},
             {"logits": lambda x: x.index_fill(-1, torch.tensor([7]), -1e9)}]
    if not any(".E" in u for u in s.units): return dense + [{"L0.H1": "zero", "L1.H0+H2": "zero"}]
    return dense + [{"L1.E1": "zero"}, {"L1.E2": "route_around"}, {"L1.routes": "only:E2@5:"}, {"L1.E1+E3": "swap:E2"},
                    {"L1.routes": "k=1", "L1.E2": "zero"}, {"L1.gates": lambda g: g * .5}]

@families
def test_generated_text_is_that_of_whole_passes_under_the_same_edit(family):
    s = opened(family)
    texts = set()
    for edits in edits_of(s):
        said = s.generate(W, 6, edits)
        moved, whole = s.moved, by_whole_passes(s, W, 6, edits)
        assert said.equal(whole[:, 7:]), edits
        s.run(whole[:, :-1], edits)
        if "logits" not in edits: assert moved == s.moved, edits              # every token once, but for the last
        texts.add(str(said.tolist()))
    assert len(texts) > 3 and not any(m._forward_hooks or m._forward_pre_hooks for m in s.model.modules())

@pytest.mark.parametrize("family", first(["qwen4_exp_text", "kimi_linear"], MIXTURES))
def test_every_family_generates_what_whole_passes_say(family):
    s = opened(family)
    edits = {next(u for u in s.units if ".E1" in u): "zero"} | {n: "zero@8:" for n in s.sites if n == "L0.ffn_out"}
    for some in ({}, edits): assert s.generate(W, 4, some).equal(by_whole_passes(s, W, 4, some)[:, 7:])

@pytest.mark.parametrize("sizes, more", [(dict(layer_types=["linear_attention"] * 2), {}),
                                         ({}, dict(num_return_sequences=3))])
def test_what_transformers_cannot_generate_is_one_message(sizes, more):
    with pytest.raises(ValueError, match="generate: expected what transformers. own generate takes"):
        open_model(tiny_model("kimi_linear", **sizes)).generate(W, 2, **more)

@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "qwen2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_unequal_length_say_what_each_says_alone(family, side):
    s, alone = opened(family, pad=0), opened(family)
    ragged = W.clone()
    ragged[1, 4:] = 0
    ragged[2, 6:] = 0
    if side == "left": ragged = torch.stack([row.roll(int((row == 0).sum())) for row in ragged])
    edits = {"L1.attn_out": "zero@3:"} | ({"L1.routes": "never:E1@5:", "L1.E2": "zero@2:"} if family != "qwen2" else {})
    said = s.generate(ragged, 5, edits)
    moved, each = s.moved, []
    for row in ragged:
        each.append(alone.generate(row[row != 0][None], 5, edits)[0])
        moved = {k: n - alone.moved.get(k, 0) for k, n in moved.items()}
    assert said.equal(torch.stack(each)) and not any(moved.values())

DEFAULTS = dict(do_sample=True, repetition_penalty=50., no_repeat_ngram_size=1, num_beams=4, max_time=1e-9,
                forced_eos_token_id=2, eos_token_id=3, suppress_tokens=[*range(40)], max_length=8, guidance_scale=3.,
                prefill_chunk_size=3)

@pytest.mark.parametrize("name", DEFAULTS)
def test_greedy_is_the_most_probable_token_whatever_a_models_generation_defaults_say(name):
    "Penalties, beams, bans and limits were heeded without a word, sampling was not."
    model = tiny_model("olmoe")
    s = open_model(model)
    own, small, before = s.generate(W, 6), greedy_tokens(model, W, 6), model.generation_config
    setattr(before, name, DEFAULTS[name])
    assert s.generate(W, 6).equal(own) and greedy_tokens(model, W, 6).equal(small) and own.equal(small)
    assert model.generation_config is before and getattr(before, name) == DEFAULTS[name]
    assert not s.generate(W, 6, suppress_tokens=own.unique().tolist()).equal(own)           # what is said is heeded

def test_a_text_ends_where_it_is_told_and_nowhere_else():
    s = opened(pad=0)
    s.model.generation_config.eos_token_id = 1
    free = s.generate(W, 8)
    assert free.equal(by_whole_passes(s, W, 8)[:, 7:])
    stop = int(free[0, 3])
    ended, at = s.generate(W, 8, {"L0.ffn_out": lambda x: x + 1e-9}, stop=stop), (free == stop).int().argmax(1)
    for row, own, n in zip(ended, free, at):
        if not (own == stop).any(): assert row.equal(own[:len(row)])
        else: assert row[:n + 1].equal(own[:n + 1]) and not row[n + 1:].any()
    assert s.generate(W, 3, do_sample=True, temperature=5.).shape == (3, 3)

def by_hand(tokens, model, stop, **more):
    "transformers' own generate, the whole text again for each token, of a model that was changed by hand."
    config = GenerationConfig(max_new_tokens=6, pad_token_id=0, eos_token_id=1 << 30 if stop is None else stop,
                              use_cache=False, **more)
    with torch.no_grad(): return model.generate(tokens, config, attention_mask=(tokens != 0).long())[:, 7:]

def without_expert(layer): layer.mlp.experts.down_proj.data[1] = 0

def zero_from_5(layer):
    layer.mlp.register_forward_hook(lambda m, args, out: torch.cat([out[:, :5], 0 * out[:, 5:]], 1))

def no_token_7(model):
    def bar(m, args, out): out.logits = out.logits.index_fill(-1, torch.tensor([7, 11]), -40.)
    model.register_forward_hook(bar)

@pytest.mark.parametrize("stop, more", [(None, dict(num_beams=3)), (11, dict(num_beams=3, num_return_sequences=2)),
                                        (11, dict(do_sample=True, num_return_sequences=3))])
@pytest.mark.parametrize("edits, change, padded", [
    ({"L1.E1": "zero"}, lambda m: without_expert(m.model.layers[1]), True),
    ({"L1.routes": "never:E1"}, None, True),
    ({"L0.ffn_out": "zero@5:"}, lambda m: zero_from_5(m.model.layers[0]), False),
    ({"logits": lambda x: x.index_fill(-1, torch.tensor([7, 11]), -40.)}, no_token_7, True)])
def test_beams_and_several_texts_of_a_prompt_are_those_of_a_model_changed_by_hand(edits, change, padded, more, stop):
    own, other = opened(double=True, pad=0), opened(double=True).model
    for model in (own.model, other): model.set_attn_implementation("sdpa")        # eager is nan for a double's padding
    tokens = W.clone()
    if padded: tokens[1, :3] = 0
    if change: change(other)
    torch.manual_seed(0)
    said = own.generate(tokens, 6, edits, stop=stop, **more)
    assert sum(own.moved.values()) > 0
    torch.manual_seed(0)
    if not change: assert len(said) == len(W) * more.get("num_return_sequences", 1)
    else: assert said.equal(by_hand(tokens, other, stop, **more))

def test_a_limit_counts_the_tokens_of_a_padded_prompt_under_beams_too():
    s, tokens = opened(double=True, pad=0), W.clone()
    tokens[1, :3] = 0
    with pytest.raises(ValueError, match="expected numbers for logits; got nan"): s.generate(tokens, 6)
    s.model.set_attn_implementation("sdpa")
    said = s.generate(tokens, 6, {"L0.ffn_out": "zero@5:"}, num_beams=3)
    alone = s.generate(tokens[1:2, 3:], 6, {"L0.ffn_out": "zero@5:"}, num_beams=3)
    assert said[1:2].equal(alone) and not alone.equal(s.generate(tokens[1:2, 3:], 6, num_beams=3))

@pytest.mark.parametrize("more", [dict(prompt_lookup_num_tokens=3), dict(assistant_model=None), dict(guidance_scale=2.),
                                  dict(return_dict_in_generate=True), dict(prefill_chunk_size=3), dict(temperatur=3.),
                                  dict(use_cache=False), dict(eos_token_id=3), dict(cache_implementation="static")])
def test_other_ways_to_generate_are_refused_before_the_first_token(more, monkeypatch):
    s = opened()
    monkeypatch.setattr(s.model, "forward", None)
    with pytest.raises(ValueError, match=f"setting of generate: expected one of do_sample, .*'{[*more][0]}'; nearest"):
        s.generate(W, 3, {"L0.ffn_out": "zero@5:"}, **more)

@pytest.mark.parametrize("edits, says", [
    ({"L1.E1": "resample"}, "over examples"), ({"L1.attn_out": At("mean", 3)}, "over examples"),
    ({"L1.attn_out": torch.zeros(1, 3, 7, 32)}, "axis of one"),
    ({"L1.routes": torch.zeros(3, 7, 2, dtype=torch.int64)}, "new tokens are not known yet")])
def test_edits_that_mean_something_else_step_by_step_are_refused(edits, says):
    with pytest.raises(ValueError, match=says): opened().generate(W, 2, edits)

def test_a_text_longer_than_the_positions_and_a_prompt_without_tokens_are_refused():
    with pytest.raises(ValueError, match="up to 64 tokens"): opened().generate(W, 58)
    with pytest.raises(ValueError, match="prompts with a token"): opened(pad=0).generate(torch.zeros_like(W), 2)
    with pytest.raises(ValueError, match="prompts with a token"): opened().generate(W, 0)

# -------------------------------------------------------------------------------------------------------- gradients

def loss(logits): return torch.nn.functional.cross_entropy(logits[0, :, :-1].flatten(0, 1), W[:, 1:].flatten())

@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_gradient_of_gates_is_the_difference_that_small_changes_make(family, frozen):
    s = opened(family, double=True)
    if frozen: s.model.requires_grad_(False)
    tr = trace(s, W, keep=["L1.gates", "L1.E2", "L0.resid_post", "logits"], grad=True)
    by = dict(zip(tr.activations, torch.autograd.grad(loss(tr["logits"]), [*tr.activations.values()])))
    g = torch.Generator().manual_seed(0)
    for site in ("L1.gates", "L1.E2", "L0.resid_post"):
        x = tr[site].detach()
        way = torch.randn(x.shape, generator=g).to(x) * (x != 0)
        a, b, c, d = (loss(s.run(W, {site: x + h * way})).item() for h in (-.02, -.01, .01, .02))
        exact = (by[site] * way).sum().item()                     # norms and routers work in single: no smaller steps
        assert abs((8 * (c - b) - (d - a)) / .12 - exact) < 1e-3 * abs(exact) + 1e-5, site
    assert (by["L1.gates"] != 0).any() and not (by["L1.gates"] != 0)[tr["L1.gates"] == 0].any()

def test_all_sites_of_a_graph_give_the_plain_logits_and_without_grad_there_is_none():
    s = opened("deepseek_v3", double=True)
    torch.testing.assert_close(trace(s, W, grad=True)["logits"], s.run(W))
    assert not s.run(W).requires_grad and not trace(s, W)["L1.gates"].requires_grad
    told = trace(s, W, edits={"L1.routes": "only:E2"}, grad=True)
    assert told["L1.E2"].shape[1] == W.numel() and told["L1.gates"].requires_grad

@pytest.mark.parametrize("family", first(["mixtral", "nemotron_h"], FAMILIES))
def test_the_gradient_by_every_site_is_the_difference_that_small_changes_make(family):
    single = family.startswith("inkling2")                          # it makes masks of its own, in single precision
    s = opened(family, double=not single)
    tr = trace(s, W, grad=True)
    assert {*s.sites} - {*tr.activations} == {n for n in s.sites if n.endswith("router_probs")}
    sites = [n for n, x in tr.activations.items() if x.is_floating_point()]
    g = torch.Generator().manual_seed(0)
    for site, d in zip(sites, torch.autograd.grad(loss(tr["logits"]), [tr[n] for n in sites])):
        x = tr[site].detach()
        way = torch.randn(x.shape, generator=g).to(x) * (x != 0)                    # no expert that nobody chose
        exact, found = (d * way).sum().item(), []
        for step in (1e-3, 1e-4, 1e-5, 1e-6, 1e-2):                 # smaller ones where a route is near, until rounding
            a, b, c, e = (loss(s.run(W, {site: x + n * step * way})).item() for n in (-2, -1, 1, 2))
            found.append((8 * (c - b) - (e - a)) / (12 * step))
            if abs(found[-1] - exact) <= 1e-2 * abs(exact) + (5e-3 if single else 1e-3): break
        else: raise AssertionError(f"{site}: {exact}, and by differences {found}")

def test_a_gradient_by_what_is_only_read_is_refused():
    s, told = opened(), {"L1.routes": "never:E1"}
    for site, edits in (("L1.router_probs", None), ("L1.router_logits", told)):
        with pytest.raises(ValueError, match=f"on the way to the logits; got {site}; nearest valid: L1.gates"):
            trace(s, W, keep=[site, "logits"], edits=edits, grad=True)
    tr = trace(s, W, edits=told, grad=True)
    assert "L0.router_logits" in tr.activations and "L1.router_logits" not in tr.activations

def test_a_gradient_by_scores_under_a_bar_is_that_of_the_experts_left():
    s = opened(double=True)
    plain = trace(s, W, keep=["L1.router_logits", "L1.routes"])
    z, went = plain["L1.router_logits"].index_fill(-1, torch.tensor([1]), -torch.inf), (plain["L1.routes"] == 1).any(-1)
    leaf = z.clone().requires_grad_()
    by, = torch.autograd.grad(loss(s.run(W, {"L1.router_logits": leaf}, grad=True)), leaf)
    way = went[..., None] * torch.randn(z.shape, generator=torch.Generator().manual_seed(0)).to(z)
    a, b = (loss(s.run(W, {"L1.router_logits": z + n * 1e-3 * way})).item() for n in (-1, 1))
    assert abs((b - a) / 2e-3 - (exact := (by * way).sum().item())) < 5e-2 * abs(exact)
    assert not by[..., 1].any() and by[~went].any()             # a token that no bar concerns has its router's slope

def test_a_leaf_that_an_edit_puts_in_gets_its_gradient():
    s, v = opened(double=True), torch.zeros(1, 1, 1, 32, dtype=torch.float64, requires_grad=True)
    loss(s.run(W, {"L0.resid_post": lambda x: x + v}, grad=True)).backward()
    assert v.grad.abs().sum() > 0

# ----------------------------------------------------------------------------------------- whose tokens, what it writes

def test_tokens_of_an_expert_are_its_rows_with_their_text():
    s = open_model(tiny_model("olmoe", vocab_size=256), pad=0)
    lines = [b"the king was old and stricken in years", b"they covered him with clothes"]
    tokens = torch.tensor([[*x, *[0] * (40 - len(x))] for x in lines])
    got = s.tokens_of("L1.E3", tokens, byte_tokens, around=4)
    tr = trace(s, tokens, keep=["L1.gates", "L1.E3"])
    at = tr["L1.gates"][0, :, :, 3].nonzero()
    assert got[["window", "position"]].to_numpy().tolist() == at.tolist() and len(got) == tr["L1.E3"].shape[1]
    assert (got["token"] != 0).all()
    for row in got.itertuples():
        text = lines[row.window].decode()
        assert row.text == text[row.position] and row.before == text[max(0, row.position - 4):row.position]
        assert row.after.rstrip("\0") == text[row.position + 1:row.position + 5]
        assert row.gate == pytest.approx(tr["L1.gates"][0, row.window, row.position, 3].item())
    halves = s.tokens_of("L1.E3", [tokens[:1], tokens[1:]], byte_tokens, around=4)
    pd.testing.assert_frame_equal(halves, got, check_exact=False)
    assert s.tokens_of("L1.E3", tokens)["text"].iloc[0] == str(got["token"].iloc[0])

def test_a_text_file_s_windows_are_read_batch_by_batch(text):
    s = open_model(tiny_model("olmoe", vocab_size=256))
    found = s.tokens_of("L0.E1", in_groups(text_windows(text, tokenizer_of(None, 256), 16), 4), tokenizer_of(None, 256))
    assert found["window"].nunique() > 8 and set("".join(found["text"])) <= set(text.read_text())

@pytest.mark.parametrize("unit", ["L1.E2", "L1.H1", "L0.E2"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "granitemoe"])
def test_what_a_unit_writes_is_what_the_logits_lose_without_it_the_norm_held(family, unit):
    if family == "deepseek_v3" and unit == "L0.E2": return                                  # its first layer is dense
    s = opened(family, double=True)
    tr = trace(s, W, keep=["L1.resid_post", "logits", unit.split(".")[0] + ".gates"])
    norm = s.model.model.norm
    with torch.no_grad():
        u, at, times = s.written_terms(unit, W)
        post = tr["L1.resid_post"][0][at[:, 0], at[:, 1]]
        scale = (post.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        without = post - u / norm.weight * scale                                               # the stream without it
        lost = times * ((post - without) / scale * norm.weight) @ s.model.lm_head.weight.T
        whole = times * (post / scale * norm.weight) @ s.model.lm_head.weight.T
    torch.testing.assert_close(whole, tr["logits"][0][at[:, 0], at[:, 1]], rtol=1e-5, atol=1e-5)
    after = unit[:3] + ("resid_mid" if "H" in unit else "resid_post")      # there the stream loses it, and no more
    gone = trace(s, W, keep=[after])[after] - trace(s, W, keep=[after], edits={unit: "zero"})[after]
    torch.testing.assert_close(post - without, gone[0][at[:, 0], at[:, 1]], rtol=1e-5, atol=1e-5)
    mean, each = lost.mean(0), s.writes(unit, W, top=3, each=True)
    best = (mean - mean.mean()).topk(5)
    got = s.writes(unit, [W[:2], W[2:]], top=5)
    assert got["token"].tolist() == best.indices.tolist()
    assert got["effect"].tolist() == pytest.approx(best.values.tolist(), rel=1e-4)
    assert len(each) == 3 * len(at) and each["rank"].max() == 3
    one = each[(each["window"] == int(at[-1, 0])) & (each["position"] == int(at[-1, 1]))]
    assert one["token"].tolist() == (lost[-1] - lost[-1].mean()).topk(3).indices.tolist()

def test_a_head_of_padded_prompts_writes_at_its_tokens_and_a_unit_without_tokens_is_refused():
    s = opened("mixtral", pad=0)
    ragged = W.clone()
    ragged[1, 4:] = 0
    assert len(s.writes("L1.H1", ragged, top=1, each=True)) == 18
    with pytest.raises(ValueError, match="tokens that go to it"):
        s.writes("L1.E1", (x for x in ()), top=1)
    with pytest.raises(ValueError, match="a head that enters the stream alone"): opened("gemma2").writes("L1.H1", W)

# ------------------------------------------------------------------------------------------------------------ files

MANY, SITES = W.repeat(4, 1), ("L*.resid_post", "L1.E3", "L1.pattern")

def kept(s, folder, sites=SITES, tokens=MANY, **more):
    return s.save(list(sites), folder, tokens, **dict(most=16_000) | more)

def test_files_give_back_what_a_pass_gave(tmp_path):
    s = opened("deepseek_v3", batch=3)
    index, tokens = kept(s, tmp_path / "a"), MANY
    tr = trace(s, tokens)
    assert len(index["shards"]) > 2 and index["done"] and index["windows"] == 12
    assert index["sites"]["L1.E3"]["shape"] == ["rows", 32]
    assert all(f.stat().st_size < 20_000 for f in (tmp_path / "a").glob("*.safetensors"))
    for site in ("L0.resid_post", "L1.resid_post", "L1.E3", "L1.pattern"):
        torch.testing.assert_close(read_saved(tmp_path / "a", site), tr[site][0])
    at = read_saved(tmp_path / "a", "L1.E3.at")
    assert at.equal((tr["L1.gates"][0, :, :, 3] != 0).nonzero()) and read_saved(tmp_path / "a", "tokens").equal(tokens)
    assert len(read_saved(tmp_path / "a", "tokens", shard=1)) == index["shards"][1]["windows"]
    half = kept(s, tmp_path / "b", ["L1.resid_post"], dtype=torch.float16, edits={"L1.E3": "zero"})
    assert half["sites"]["L1.resid_post"]["dtype"] == "torch.float16"
    edited = trace(s, tokens, edits={"L1.E3": "zero"})["L1.resid_post"][0]
    torch.testing.assert_close(read_saved(tmp_path / "b", "L1.resid_post"), edited.half(), rtol=2e-3, atol=2e-2)

def test_what_was_stopped_goes_on_with_what_is_left(tmp_path, monkeypatch):
    s, whole, ran = opened("olmoe", batch=3), tmp_path / "whole", []
    kept(s, whole)
    said = []
    def stop(text):
        said.append(text)
        if len(said) == 3: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): kept(s, tmp_path / "a", say=stop)
    done = json.loads((tmp_path / "a/index.json").read_text())
    assert 0 < done["windows"] < 12 and not done["done"]
    run = type(s).run
    def counted(self, tokens, *a, **k): return ran.append(len(tokens)) or run(self, tokens, *a, **k)
    monkeypatch.setattr(type(s), "run", counted)
    kept(s, tmp_path / "a")
    assert sum(ran) == 12 - done["windows"]
    for site in ("L0.resid_post", "L1.E3", "L1.E3.at", "tokens"):
        torch.testing.assert_close(read_saved(tmp_path / "a", site), read_saved(whole, site))
    ran.clear()
    kept(s, tmp_path / "a")
    assert not ran

def test_a_folder_of_something_else_is_left_alone(tmp_path):
    s, a = opened(), tmp_path / "a"
    kept(s, a)
    before = {f.name: f.read_bytes() for f in a.iterdir()}
    other = opened()
    with torch.no_grad(): other.model.lm_head.weight[0, 0] += 1
    for f, says in ((lambda: kept(other, a), "the same weights as now"),
                    (lambda: kept(s, a, tokens=W.repeat(4, 1).flip(0)), "those that are saved"),
                    (lambda: kept(s, a, tokens=W), "12 windows or more"),
                    (lambda: kept(s, a, edits={"L1.E3": "zero"}), "the same edits"),
                    (lambda: kept(s, a, dtype=torch.float16), "the same dtype")):
        with pytest.raises(ValueError, match=says): f()
    assert before == {f.name: f.read_bytes() for f in a.iterdir()}
    (b := tmp_path / "b").mkdir()
    (b / "index.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="a new folder, or one whose index.json"): kept(s, b)
    with pytest.raises(ValueError, match="saved activations"): read_saved(tmp_path / "none", "embed")
    with pytest.raises(ValueError, match="nearest: 'L0.resid_post'"): read_saved(a, "L0.resid_mid")
    with pytest.raises(ValueError, match="words, which an index can name"):
        kept(s, tmp_path / "c", edits={"embed": torch.zeros_like})
    with pytest.raises(ValueError, match="windows of up to 100 bytes"): kept(s, tmp_path / "c", most=100)

def test_what_is_written_is_not_read_off_a_weight_that_is_not_all():
    "The unembedding or a head's map with an adapter beside it used to be read as its own matrix, without a word."
    class Beside(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
        weight, bias = property(lambda self: self.base.weight), property(lambda self: self.base.bias)
        def forward(self, x): return self.base(x) * 1.5
    model = tiny_model("olmoe")
    model.model.layers[1].self_attn.o_proj = Beside(model.model.layers[1].self_attn.o_proj)
    s = open_model(model)
    with pytest.raises(ValueError, match="L1.H0: expected a linear layer that is its matrix alone"):
        s.writes("L1.H0", torch.arange(16).view(2, 8))
    assert len(s.writes("L0.H0", torch.arange(16).view(2, 8), top=3)) == 3
