"""What a router is told in a word: who works on a token changes as the word says, and weights stay the router's own."""
import pandas as pd
import pytest
import torch

from moe_redistribution.instruments.ablation import ablate, combine_edits, edits_for
from moe_redistribution.instruments.rows import rows, tidy
from moe_redistribution.instruments.subject import Population
from moe_redistribution.instruments.trace import trace
from moe_redistribution.opened.families import MIXTURES, tiny_model
from moe_redistribution.opened.opened import open_model
from moe_redistribution.opened.streaming import (byte_tokens, in_groups, text_ablation, text_loss, text_windows,
                                                   units_of)
from moe_redistribution.opened.routing_edits import At, replay, steer
from moe_redistribution.record.cli import main
from tiers import first
from toys import eager_model, untrained

MIXED = ("olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "minimax_m2",
         "ernie4_5_moe", "hunyuan_v1_moe", "lfm2_moe", "granitemoe", "jamba")
W = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(0))
some_families = pytest.mark.parametrize("family", first(["deepseek_v3", "gpt_oss", "olmoe"], MIXED))

def opened(family="olmoe", tokens=W, **more): return open_model(eager_model(family), tokens, **more)

def gates(s, how=None, site="L1.gates"):
    edits = how if isinstance(how, dict) else how and {"L1.routes": how}
    return trace(s, s.task.tokens, keep=[site], edits=edits)[site]

def same(a, b): torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)                  # some routers work in single

@some_families
def test_never_is_what_the_router_chooses_when_the_expert_is_barred(family):
    s = opened(family)
    around, moved = s.run(W, {"L1.E2": "route_around"}), [*s.moved.values()]
    assert s.run(W, {"L1.routes": "never:E2"}).equal(around) and [*s.moved.values()] == moved and moved[0] > 0
    both = gates(s, "never:E0,E2")
    assert not both[..., [0, 2]].any() and ((both != 0).sum(-1) == 2).all()

@some_families
def test_several_words_for_one_router_are_taken_one_after_another_each_at_its_own_tokens(family):
    s = opened(family)
    both, never, one = (gates(s, how) for how in (["never:E2@4:", "k=1@:6"], "never:E2", "k=1"))
    active = (both != 0).sum(-1)
    assert (active[..., :6] == 1).all() and (active[..., 6:] == 2).all() and not both[..., 4:, 2].any()
    same(both[..., 6:, :], never[..., 6:, :]), same(both[..., :4, :], one[..., :4, :])

@some_families
def test_only_one_expert_has_the_whole_weight_of_every_token(family):
    s = opened(family)
    plain, alone = gates(s), gates(s, "only:E2")
    assert (alone != 0).sum() == alone.shape[1] * alone.shape[2]
    same(alone[..., 2], plain.sum(-1))
    assert trace(s, s.task.tokens, edits={"L1.routes": "only:E2"})["L1.E2"].shape[1] == s.task.tokens.numel()

@some_families
def test_only_all_experts_and_the_own_k_change_nothing(family):
    s = opened(family)
    every = "only:" + ",".join(f"E{e}" for e in range(s.layers[1].experts.num_experts))
    for how in (every, "k=2", trace(s, W)["L1.routes"], lambda r: r):
        told = s.run(W, {"L1.routes": how})
        assert s.moved == {"L1.routes": 0}
        same(told, s.run(W))

@some_families
def test_k_counts_experts_in_the_router_s_own_order(family):
    s = opened(family)
    g = {k: gates(s, f"k={k}") for k in (1, 2, 3)}
    for k, x in g.items(): assert ((x != 0).sum(-1) == k).all()
    assert ((g[2] != 0) >= (g[1] != 0)).all() and ((g[3] != 0) >= (g[2] != 0)).all()

def test_a_k_beyond_the_experts_is_refused():
    with pytest.raises(ValueError, match="k from 1 to 4, its experts; got k=5"): opened().run(W, {"L1.routes": "k=5"})

@some_families
def test_replayed_routes_have_live_weights(family):
    "With the routes of other embeddings, weights are what the router makes of these scores: proportional to its own."
    s, push = opened(family), {"embed": steer(torch.linspace(-1, 1, 32), .5)}
    there = trace(s, W, edits=push)["L1.routes"]
    tr = trace(s, W, edits={"L1.routes": there})
    g, P, chosen = tr["L1.gates"], tr["L1.router_probs"], there.sort(-1)[0]
    assert tr["L1.routes"].sort(-1)[0].equal(chosen) and not chosen.equal(trace(s, W)["L1.routes"].sort(-1)[0])
    ratio = g.gather(-1, chosen) / P.gather(-1, chosen)
    same(ratio, ratio.mean(-1, keepdim=True).expand_as(ratio))
    renormed, a_share = g.sum(-1), ratio.mean(-1)
    assert min((x - x.mean()).abs().max() for x in (renormed, a_share)) < 1e-5        # some add 1e-6 to a sum

def test_routes_that_span_groups_are_replayed_by_a_router_with_groups():
    s = opened("deepseek_v3")
    across = torch.tensor([0, 7]).expand(*W.shape, 2)
    tr = trace(s, W, edits=replay({1: across}))
    assert tr["L1.routes"][0].sort(-1)[0].equal(across)
    P, g = tr["L1.router_probs"], tr["L1.gates"]
    same(g[..., 0] / g[..., 7], P[..., 0] / P[..., 7])

def grouped_v2(): return open_model(tiny_model("deepseek_v2", n_routed_experts=8, n_group=2, topk_group=1,
                                               topk_method="group_limited_greedy"), W)

def test_an_expert_outside_the_chosen_groups_has_the_weight_that_it_had_before_they_were_masked():
    tr = trace(grouped_v2(), W, edits=replay({1: torch.tensor([0, 7]).expand(*W.shape, 2)}))
    P, g = tr["L1.router_logits"].softmax(-1), tr["L1.gates"]
    assert (g[..., [0, 7]] > 0).all()
    torch.testing.assert_close(g[..., 0] / g[..., 7], P[..., 0] / P[..., 7], rtol=1e-4, atol=0)

@pytest.mark.parametrize("bad, says", [
    (lambda r: r[..., :1], r"\(2, 9, 2\): windows, tokens, k; got torch.int64 \(2, 9, 1\)"),
    (lambda r: r[:, :5], r"got torch.int64 \(2, 5, 2\)"),
    (lambda r: r[..., :1].expand(2, 9, 2), "rows of zeros|an expert twice in a token"),
    (lambda r: torch.where(r == 3, -1, r), "-1, a token without an expert"),
    (lambda r: r.double(), "torch.float64")])
def test_routes_that_no_router_can_have_made_are_refused(bad, says):
    s = opened()
    with pytest.raises(ValueError, match=says) as e: s.run(W, {"L1.routes": bad(trace(s, W)["L1.routes"][0])})
    assert "fix: " in str(e.value) and not any(m._forward_hooks for m in s.model.modules())

def test_padding_may_stand_for_no_route():
    s = opened(tokens=None, pad=0)
    ragged = W.clone()
    ragged[1, 6:] = 0
    routes = trace(s, ragged)["L1.routes"]
    assert (routes == -1).any()
    same(s.run(ragged, {"L1.routes": routes})[0, :, :6], s.run(ragged)[0, :, :6])
    s.run(ragged, {"L1.routes": "only:E2"})
    assert 0 < s.moved["L1.routes"] <= 15
    assert trace(s, ragged, edits={"L1.routes": "only:E2"})["L1.E2"].shape[1] == 15

@pytest.mark.parametrize("asks", [True, False])
def test_a_router_that_does_not_choose_by_a_top_k_says_so(asks):
    s = opened()
    gate, forward = s.layers[1].gate, s.layers[1].gate.forward
    def by_sort(x):
        if asks: forward(x)                                                 # a top-k that decides nothing
        logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), gate.weight)
        w, i = logits.softmax(-1).sort(-1, descending=True)
        return logits, w[:, :2], i[:, :2]
    gate.forward = by_sort
    with pytest.raises(ValueError, match="one top-k among its experts; got OlmoeTopKRouter"):
        s.run(W, {"L1.routes": "k=1"})

def test_routes_and_logits_of_one_router_are_not_told_both():
    with pytest.raises(ValueError, match="the routes of a router or its logits"):
        opened().run(W, {"L1.routes": "never:E2", "L1.router_logits": torch.zeros_like})

def test_an_edit_word_is_understood_wherever_edits_are_given(text):
    s, how = opened(), {"L*.routes": "only:E1,E2"}
    moved = s.run(W[:, :-1], how)
    assert {*s.moved} == {"L0.routes", "L1.routes"}
    same(s.run(W[:, :-1], combine_edits(s, how)), moved)
    assert trace(s, W, edits=how)["L0.E1"].shape[1] == W.numel()
    assert ablate(s, how).equal(moved.argmax(-1) == W[:, 1:])
    own = open_model(tiny_model("olmoe", vocab_size=256))
    rows = text_ablation(own, text, byte_tokens, 16, 4, units=("L1.routes", "L*.routes"), edits=("only:E2", "k=1"))
    assert {*rows["site"]} == {"none", "L1.routes", "L*.routes"}
    loss = rows[rows["metric"] == "loss"].set_index(["site", "edit"])["value"]
    assert loss.nunique() == 5

def test_the_ablate_command_takes_words_sets_and_all_layers(text, tmp_path, capsys):
    tiny_model("olmoe", vocab_size=256).save_pretrained(tmp_path / "model")
    out = tmp_path / "rows.csv"
    assert main(["ablate", "--model", str(tmp_path / "model"), "--text", str(text), "--bytes", "--context", "16",
                 "--unit", "L*.routes", "--edit", "only:E2@4:", "--edit", "k=1", "--out", str(out)]) == 0
    found = pd.read_csv(out).query("metric == 'moved'").set_index("edit")["value"]
    assert found["only:E2@4:"] > 0 and found["k=1"] == pytest.approx(2) and out.with_suffix(".png").exists()
    assert "a checkpoint without that expert" not in capsys.readouterr().err
    assert main(["ablate", "--model", str(tmp_path / "model"), "--text", str(text), "--bytes", "--context", "16",
                 "--unit", "L0.routes", "--edit", "never:E2", "--out", str(out)]) == 0
    assert "a checkpoint without that expert may raise them" in capsys.readouterr().err

@pytest.mark.parametrize("how, says", [("only:", "one of never"), ([], "one of never"),
                                       ("never:E0,E1,E2", "not barred; got 1"),
                                       ("never:E0,E1,E2,E3", "an expert that may work"), ("zero@", "behind the @")])
def test_a_word_that_means_nothing_is_refused_with_what_does(how, says):
    with pytest.raises(ValueError, match=says): opened().run(W, {"L1.routes": how})

# phimoe takes maxima, not a top-k; the layers of deepseek_v4 look experts up by the token
OWN_WAY = ("phimoe", "deepseek_v4")
# weighs shared experts with the chosen ones and cuts them apart by its own k
OWN_K = ("inkling_text",)

@pytest.mark.audit
@pytest.mark.parametrize("family", MIXTURES)
def test_every_family_s_router_does_as_it_is_told_or_says_why_not(family):
    s = open_model(tiny_model(family), W)
    site = next(n for n in reversed(s.sites) if n.endswith(".routes"))
    gates, e2 = site.replace("routes", "gates"), site.replace("routes", "E2")
    def of(how, keep=gates): return trace(s, W, keep=[keep], edits={site: how})[keep][0]
    if family in OWN_WAY:
        with pytest.raises(ValueError, match="one top-k among its experts; .* fix: route_around, or edit"):
            of("never:E2")
        return
    plain = trace(s, W, keep=[gates, site])
    assert not of("never:E2")[..., 2].any()
    assert (s.moved[site] > 0) == (plain[gates][..., 2] != 0).any()
    assert (of("never:E2@4:", site)[:, :4].sort(-1)[0] == plain[site][0, :, :4].sort(-1)[0]).all()
    if family in OWN_K:
        with pytest.raises(ValueError, match="2 experts, which .* counts on; got 1"): of("k=1")
        return
    assert trace(s, W, keep=[e2], edits={site: "only:E2"})[e2].shape[1] >= W.numel() - (plain[gates] == 0).all(-1).sum()
    assert ((of("k=1") != 0).sum(-1) <= 1).all()
    if (plain[site] >= 0).all(): torch.testing.assert_close(of(plain[site]), plain[gates][0], rtol=1e-4, atol=1e-5)

def test_a_router_with_a_place_for_no_expert_sends_every_token_to_the_only_one():
    s = open_model(tiny_model("zaya"), W)
    assert trace(s, W, edits={"L1.routes": "only:E2"})["L1.E2"].shape[1] == W.numel()
    with pytest.raises(ValueError, match="one top-k among its experts; got PhimoeTopKRouter"):
        open_model(tiny_model("phimoe"), W).run(W, {"L1.routes": "never:E2"})

# ------------------------------------------------------------------------------------------- sets, layers and positions

@pytest.mark.parametrize("family", ["inkling_text", "deepseek_v3", "mixtral"])
def test_no_expert_is_routed_around_where_each_token_needs_all(family):
    grouped = family == "deepseek_v3"
    sizes = dict(num_experts_per_tok=8, n_group=1, topk_group=1) if grouped else dict(num_experts_per_tok=4)
    s = open_model(tiny_model(family, **sizes))
    for edits in ({"L1.E1": "route_around"}, {"L1.routes": "never:E1"}):
        with pytest.raises(ValueError, match="experts.*that are not barred"): s.run(W, combine_edits(s, edits))

def test_a_set_of_experts_is_one_unit():
    s = opened()
    for how in ("zero", "mean", "route_around"):
        one, each = combine_edits(s, {"L1.E1+E3": how}), combine_edits(s, {"L1.E1": how, "L1.E3": how})
        assert s.run(W, one).equal(s.run(W, each)) and not s.run(W, one).equal(s.run(W, {"L1.E1": how}))
        assert s.run(W, edits_for(s, "L1.E1+E3", how)).equal(s.run(W, each))
    assert trace(s, W, edits={"L*.E1+E3": "route_around"})["L0.E3"].shape[1] == 0
    assert s.run(W, {"L0.H1+H2": "zero"}).equal(s.run(W, {"L0.H1": "zero", "L0.H2": "zero"}))
    with pytest.raises(ValueError, match="each site and unit once"):
        combine_edits(s, {"L1.E1+E3": "zero", "L1.E3": "mean"})
    with pytest.raises(ValueError, match="L1.E9"): combine_edits(s, {"L1.E1+E9": "zero"})

def test_sets_and_all_layers_are_units_of_an_ablation_over_a_text(text):
    s = open_model(tiny_model("olmoe", vocab_size=256))
    names = ("L1.E1+E3", "L*.ffn_out", "L*.H1", "L1.E1")
    assert units_of(s, names) == [*names]
    rows = text_ablation(s, text, byte_tokens, 16, 4, units=names, edits=("zero", "mean"))
    assert rows.equals(tidy([rows]))                                                          # layers in their order
    loss = rows[rows["metric"] == "loss"].set_index(["site", "edit"])["value"]
    assert len(loss) == 9 and loss.nunique() == 9
    groups = [*in_groups(text_windows(text, byte_tokens, 16), 4)]
    both = combine_edits(s, {"L1.E1": "zero", "L1.E3": "zero"})
    assert loss["L1.E1+E3", "zero"] == text_loss(s, groups, both)["loss"]

@pytest.mark.parametrize("site", ["L0.attn_out", "L0.pattern", "L1.H2", "L1.E1", "embed", "logits", "L1.router_logits"])
@pytest.mark.parametrize("where, positions", [(slice(4, None), range(4, 9)), (3, [3]), ([0, 5], [0, 5])])
def test_a_limited_edit_changes_these_tokens_and_no_other(site, where, positions):
    s, other = opened("mixtral"), [i for i in range(9) if i not in positions]
    prefix, _, unit = site.partition(".")
    seen = {"H2": f"{prefix}.z", "E1": f"{prefix}.ffn_out"}.get(unit, site)
    move = (lambda x: x.flip(-1)) if unit in ("router_logits", "pattern") else "zero"
    each = (None, {site: At(move, where)}, {site: move})
    plain, limited, whole = (trace(s, W, keep=[seen], edits=e)[seen] for e in each)
    if unit == "pattern": plain, limited, whole = (x.transpose(2, 3) for x in (plain, limited, whole))
    assert limited[:, :, other].equal(plain[:, :, other])
    assert limited[:, :, [*positions]].equal(whole[:, :, [*positions]])
    assert not limited.equal(plain)

@pytest.mark.parametrize("unit", ["L0.E1", "L1.routes"])
@pytest.mark.parametrize("where", ["@99", "@16:", "@3,16", "@4:4"])
def test_an_edit_that_no_token_can_get_is_no_row(unit, where, text, tmp_path):
    s = open_model(tiny_model("olmoe", vocab_size=256))
    word = ("never:E1" if unit.endswith("routes") else "zero") + where
    says = "positions from 0 to 15; got" if ":4" not in where else "expected a position from 0 on"
    with pytest.raises(ValueError, match=says):
        text_ablation(s, text, byte_tokens, 16, 4, units=(unit,), edits=(word,), part=tmp_path / "part")
    assert not (tmp_path / "part").exists()
    asked = (7, lambda s, e: ablate(s, e)), (12, lambda s, e: s.generate(W, 5, e))
    for last, f in (*asked, (8, lambda s, e: s.save(["embed"], tmp_path / "kept", W, edits=e))):
        with pytest.raises(ValueError, match=says.replace("15", str(last))): f(opened(), {unit: word})

def test_a_mask_says_which_tokens_of_which_window():
    s, mask = opened(), torch.zeros(2, 9, dtype=torch.bool)
    mask[1, 2] = mask[0, 7] = True
    s.run(W, {"L0.ffn_out": At("zero", mask)})
    assert s.moved == {"L0.ffn_out": 2}
    s.run(W, {"L1.routes": At("only:E2", mask)})
    assert s.moved["L1.routes"] <= 2

@some_families
def test_never_from_some_token_on_is_never_there_and_the_plain_choice_before(family):
    s = opened(family)
    plain, late = gates(s, site="L1.routes"), gates(s, "never:E2@4:", "L1.routes")
    plain, late = plain.sort(-1)[0], late.sort(-1)[0]
    assert plain[:, :, :4].equal(late[:, :, :4]) and not (late[:, :, 4:] == 2).any() and (plain[:, :, 4:] == 2).any()
    by_unit = s.run(W, {"L1.E2": "route_around@4:"})
    assert by_unit.equal(s.run(W, {"L1.routes": "never:E2@4:"}))
    two = gates(s, {"L1.routes": "never:E2@4:", "L1.E3": At("route_around", slice(0, 4))}, "L1.routes")
    assert not (two[:, :, 4:] == 2).any() and not (two[:, :, :4] == 3).any()

def test_steering_adds_a_vector_where_it_is_told():
    s, v = opened(), torch.linspace(-1, 1, 32)
    tr = trace(s, W, edits={"L0.resid_post": At(steer(v, 3.), slice(5, None))})
    moved = tr["L0.resid_post"] - trace(s, W)["L0.resid_post"]
    assert s.moved == {} and not moved[:, :, :5].any()
    torch.testing.assert_close(moved[:, :, 5:], (3. * v).double().expand_as(moved[:, :, 5:]))

# -------------------------------------------------------------------------------------------------------------- names

def test_rows_of_layers_stand_as_numbers_and_others_as_they_did():
    names = [f"L{l}.{n}" for l in (10, 2, 0, 11, 1) for n in ("ffn_out", "attn_out")] + ["none", "L*.ffn_out", "embed"]
    whole = tidy([rows([0.], [0], condition="c", metric="loss", site=n) for n in names])
    assert whole["site"].tolist() == ["L*.ffn_out"] + [f"L{l}.{n}" for l in (0, 1, 2, 10, 11) for n in (
        "attn_out", "ffn_out")] + ["embed", "none"]
    units = tidy([rows([0.], [0], condition="c", metric="x", unit=f"L{l}.H1") for l in (10, 9, 100)])["unit"].tolist()
    assert units == ["L9.H1", "L10.H1", "L100.H1"]
    few = [n for n in names if "L1" not in n] + ["L1.z"]
    assert tidy([rows([0.], [0], condition="c", metric="x", site=n) for n in few])["site"].tolist() == sorted(few)

def test_all_layers_are_named_at_once_in_every_subject():
    name = "add7/moe-e2k1-h8-silu+L2"
    pop = Population(untrained(name, [0]), name)
    tokens, zero = pop.task.tokens[:3], {"L*.attn_out": torch.zeros_like}
    each = dict.fromkeys(["L0.attn_out", "L1.attn_out"], torch.zeros_like)
    assert trace(pop, tokens, edits=zero)["logits"].equal(trace(pop, tokens, edits=each)["logits"])
