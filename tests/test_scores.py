"""What a router's score is made of: identities of companion 001, on seven families and on a population."""
import pytest
import torch
from transformers.utils import logging

from moe_redistribution.instruments.ablation import edits_for
from moe_redistribution.opened.opened import open_model
from moe_redistribution.instruments.scores import (MEASURES, SENDERS, Receiver, _chosen_ranks, measures, routing_scores,
                                                   score_rows_of, tally, total_aarv)
from moe_redistribution.opened.decomposition import answer_terms, head_sources
from moe_redistribution.instruments.subject import Population
from moe_redistribution.instruments.trace import trace
from moe_redistribution.tasks.task import get_task
from toys import Adapted, eager_model, untrained

logging.disable_progress_bar()
TOKENS = torch.randint(1, 50, (3, 10), generator=torch.Generator().manual_seed(5))
MOE = ("olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
every_family = pytest.mark.parametrize("family", MOE)

def opened(family, dtype=torch.float64): return open_model(eager_model(family, dtype))

def made(n=40, E=6, d=5, k=2, seed=0):
    "A receiver of random scores, and the scores."
    g = torch.Generator().manual_seed(seed)
    rows, u = torch.randn(1, E, d, generator=g).double(), torch.randn(1, 1, n, d, generator=g).double()
    scores = u @ rows[:, None].mT
    return Receiver("router_logits", rows, torch.ones(1, d), torch.ones(1, 1, n, 1), scores, scores.topk(k).indices, 1)

def by_name(r, part): return dict(zip(MEASURES, measures(r, part).mean((1, 2, 3))))

@every_family
def test_terms_sum_to_the_score_whichever_way_they_are_cut(family):
    s = opened(family)
    for by in SENDERS:
        for site, terms in routing_scores(s, TOKENS, by).items():
            assert terms["remainder"].abs().max() < 2e-6, (family, by, site)       # the library's norms are single

@every_family
def test_heads_sum_to_attention_and_experts_to_their_layer(family):
    s = opened(family)
    whole, fine = (routing_scores(s, TOKENS, by) for by in ("component", "all"))
    for site in whole:
        for sender, score in whole[site].items():
            prefix, _, kind = sender.rpartition(".")
            if kind not in ("attn_out", "ffn_out"): continue
            own = [v for n, v in fine[site].items() if n.startswith(prefix + ".") and (n.split(".")[-1][0] in "Hb")
                   == (kind == "attn_out")]
            torch.testing.assert_close(sum(own), score, rtol=1e-6, atol=1e-6)

@every_family
def test_keys_sum_to_their_head(family):
    s = opened(family)
    head = routing_scores(s, TOKENS, "head")["L1.router_logits"]["L0.H1"]
    by_key = head_sources(s, TOKENS, "L0.H1", "L1.router_logits")
    torch.testing.assert_close(by_key.sum(3), head, rtol=1e-6, atol=1e-6)
    assert not by_key.masked_select(torch.ones(10, 10).triu(1).bool()[None, None, :, :, None]).any()   # no future key

@pytest.mark.parametrize("family", ["olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_what_the_library_reports_is_the_logits_of_its_layers_with_routers(family):
    s = opened(family)
    with torch.no_grad(): told = getattr(s.model(input_ids=TOKENS, output_router_logits=True), "router_logits", None)
    tr, own = trace(s, TOKENS), [n for n in s.sites if n.endswith("router_logits")]
    if told is None: pytest.skip("this version reports none")
    assert len(told) == len(own)
    for reported, site in zip(told, own): torch.testing.assert_close(reported.view_as(tr[site][0]), tr[site][0])

def test_one_number_for_all_experts_moves_no_rank_and_no_variance_means_no_move():
    r = made()
    part = torch.randn_like(r.logits)
    assert torch.equal(measures(r, part + 3.)[4], measures(r, part)[4])
    same = by_name(r, torch.full_like(part, 2.))
    assert same["influence"] == 0 and same["aarv"] == 0

def test_variance_without_a_move_of_ranks():
    r = made()
    got = by_name(r, .9 * r.logits)
    assert got["influence"] > .5 and got["aarv"] == 0

def test_ranks_are_the_same_with_the_norm_held_and_with_the_norm_of_what_is_left():
    r = made()
    part = torch.randn_like(r.logits)
    new_norm = torch.rand(1, 1, 40, 1).double() + .5
    assert torch.equal(_chosen_ranks(r.logits - part, r.routes), _chosen_ranks((r.logits - part) / new_norm, r.routes))

def test_other_names_for_experts_change_no_measure():
    r, perm = made(), torch.tensor([3, 1, 5, 0, 2, 4])
    part = torch.randn_like(r.logits)
    twin = Receiver("router_logits", r.rows[:, perm], torch.ones(1, 5), r.norm, r.logits[..., perm],
                    perm.argsort()[r.routes], 1)
    torch.testing.assert_close(measures(twin, part[..., perm])[:5], measures(r, part)[:5])

def test_an_expert_that_nobody_chose_tells_a_router_nothing():
    s = opened("mixtral")
    with torch.no_grad(): s.layers[0].gate.weight[2] = 0                       # no score above those of all others
    edits = edits_for(s, "L0.E2", "route_around")
    tr = trace(s, TOKENS, edits=edits)
    assert tr["L0.E2"].shape[1] == 0
    terms = dict((n, u) for n, _, u in s.stream_terms(tr, "expert"))
    assert not terms["L0.E2"].any() and terms["L0.E1"].any()

def test_padding_is_no_token():
    s = opened("olmoe")
    padded = torch.cat([TOKENS, torch.zeros(3, 4, dtype=torch.long)], 1)
    plain = score_rows_of(s, [TOKENS])
    s.pad = 0
    torch.testing.assert_close(torch.tensor(score_rows_of(s, [padded])["value"].to_numpy()),
                               torch.tensor(plain["value"].to_numpy()), rtol=1e-6, atol=1e-8)

def test_half_precision_keeps_what_rounding_left_as_a_term():
    terms = routing_scores(opened("olmoe", torch.bfloat16), TOKENS)["L1.router_logits"]
    assert 1e-5 < terms["remainder"].abs().max() < .1 and terms["remainder"].dtype == torch.float32

@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_heads_and_experts_of_a_half_precision_model_are_not_rounded_once_more(family):
    s, by = opened(family, torch.bfloat16), ("head", "expert")
    tr = trace(s, TOKENS, keep=[n for one in by for n in s.score_sites(one)])
    said = {n: u for one in by for n, _, u in s.stream_terms(tr, one)}
    W = s.layers[1].attn.o_proj.weight.unflatten(1, (s.n_heads, -1)).double()
    head = tr["L1.z"][:, :, :, 2].double() @ W[:, 2].T
    gates = tr["L1.gates"][0].flatten(0, 1).double()
    mine, size = gates[:, 1] != 0, head.abs().max()
    expert = gates[mine, 1, None] * tr["L1.E1"][0].double()
    assert said["L1.H2"].dtype == said["L1.E1"].dtype == torch.float32
    assert (said["L1.H2"] - head).abs().max() < 1e-5 * size
    assert (said["L1.E1"][0].flatten(0, 1)[mine] - expert).abs().max() < 1e-5 * expert.abs().max()

def test_masks_part_the_tokens():
    s, first = opened("olmoe"), torch.zeros(3, 10, dtype=torch.bool)
    first[:, 0] = True
    asked = "unit == 'embed' & metric == 'influence'"
    got = tally(s, TOKENS, masks={"first": first, "rest": ~first}).rows([0], condition="x").query(asked)
    both = score_rows_of(s, [TOKENS]).query(asked)
    for site, own in got.groupby("site"):
        mean = (own["value"] * own["n_examples"]).sum() / own["n_examples"].sum()
        assert mean == pytest.approx(both[both["site"] == site]["value"].item())

def test_a_total_effect_reaches_later_routers_only():
    moved = total_aarv(opened("olmoe"), TOKENS, "L0.ffn_out")
    assert moved["L0.router_logits"] == 0 < moved["L1.router_logits"]

@pytest.mark.parametrize("name", ["add7/moe-e4k1-h40-silu", "add7/moe_glu-e4k1-h40-silu+norm"])
def test_a_population_s_router_is_taken_apart_by_token_position_and_head(name):
    seeds = [1, 2]
    s = Population({n: v.double() for n, v in untrained(name, seeds).items()}, name)
    tokens = get_task("add7").tokens[:50]
    terms = routing_scores(s, tokens, "all")["router_logits"]
    assert {"tok", "pos", "H0", "H3", "b_O"} <= set(terms) and terms["remainder"].abs().max() < 1e-12
    rows = score_rows_of(s, [tokens], seeds)
    assert set(rows["seed"]) == {1, 2} and set(rows["unit"]) == {"embed", "attn_out", "remainder", "whole"}

def test_a_final_norm_that_takes_a_mean_off_is_refused():
    with pytest.raises(ValueError, match="got OlmoLayerNorm"):
        answer_terms(opened("olmo"), TOKENS[:, :-1], TOKENS[:, 1:])

@pytest.mark.parametrize("family", [*MOE, "llama", "mistral", "gemma", "granitemoe"])
def test_terms_of_an_answer_sum_to_its_logit(family):
    s = opened(family)
    for by in ("component", "all"):
        assert answer_terms(s, TOKENS[:, :-1], TOKENS[:, 1:], by)["remainder"].abs().max() < 1e-5

def adapted(family, dtype):
    s = opened(family, dtype)
    for x in s.layers: x.attn.o_proj = Adapted(x.attn.o_proj, .4)
    return open_model(s.model)

SAYS = "expected terms that sum to the model's own; got a remainder of .* fix: merge adapters"

@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_hangs_beside_a_weight_is_not_left_out_without_a_word(dtype):
    s = adapted("olmoe", dtype)
    for ask in (lambda: routing_scores(s, TOKENS, "head"), lambda: tally(s, TOKENS, "head"),
                lambda: answer_terms(s, TOKENS[:, :-1], TOKENS[:, 1:], "all"),
                lambda: head_sources(s, TOKENS, "L0.H1", "L1.router_logits")):
        with pytest.raises(ValueError, match=SAYS): ask()
    assert len(routing_scores(s, TOKENS)) == 2                                # whole outputs need no weights of heads

def test_a_norm_that_keeps_its_weight_less_one_is_read_as_it_works():
    s = opened("gemma")
    assert answer_terms(s, TOKENS[:, :-1], TOKENS[:, 1:])["remainder"].abs().max() < 1e-5

@pytest.mark.parametrize("change", ["norm", "scale", "gate"])
def test_another_norm_or_scale_is_found_by_the_model_s_own_logits(change):
    s, ask = opened("olmoe"), lambda s: answer_terms(s, TOKENS[:, :-1], TOKENS[:, 1:])
    if change == "norm":
        own = s.model.model.norm
        own.forward = lambda x: type(own).forward(own, x) * (2 + own.weight) / own.weight             # as nobody's does
    if change == "scale": s.model.lm_head.register_forward_hook(lambda m, args, out: out * .25)
    if change == "gate":
        gate, ask = s.layers[1].gate, lambda s: routing_scores(s, TOKENS)
        gate.forward = lambda x: type(gate).forward(gate, x * 1.5)
    with pytest.raises(ValueError, match=f"{SAYS}|expected an RMSNorm"): ask(s)

def test_places_that_nobody_works_on_move_no_rank():
    s, edits = opened("olmoe"), edits_for(opened("olmoe"), "L0.E1", "swap:E2")
    routers = s.receivers(trace(s, TOKENS, edits=edits))
    assert (routers[0].routes == -1).any() and (routers[0].ranks[routers[0].routes == -1] == 0).all()
    assert measures(routers[0], torch.zeros_like(routers[0].logits))[4].max() == 0
