"""Attention patterns against loops over the weights, and what a mean, a spread and a rank may and may not do."""
import math

import pytest
import torch

from moe_redistribution.models.condition import condition
from moe_redistribution.instruments.patterns import (by_rank, _query_mask, heads, attention_between, mean_pattern,
                                                     pattern_rows, patterns, relation, spread)
from moe_redistribution.models.planted import carry_by_attention, carry_by_ffn
from moe_redistribution.tasks.task import get_task
from moe_redistribution.instruments.trace import trace
from tiers import first
from toys import untrained

CONDITIONS = ["add7/ffn-h8-silu", "add7/moe-e2k1-h8-silu+norm", "modadd/glu-h8-gelu", "hist/moe_glu-e2k1-h8-gelu"]
each_condition = pytest.mark.parametrize("name", CONDITIONS)

def population(name, n_seeds=2, scale=3.0):
    "Weights in double precision, with queries and keys large enough for rows that are far from even."
    p = {n: v.double() for n, v in untrained(name, range(n_seeds)).items()}
    return p | {n: p[n] * scale for n in ("W_Q", "W_K")}

def plain_row(p, c, s, tokens, h, q):
    "One query's shares and what each key would bring back, for one input, number by number."
    x = [p["W_E"][s, tok] + p["W_pos"][s, i] for i, tok in enumerate(tokens.tolist())]
    if c.norm: x = [v / (v.square().mean() + torch.finfo(v.dtype).eps).sqrt() * p["w_ln1"][s, 0] for v in x]
    query = x[q] @ p["W_Q"][s, 0, h]
    seen = range(q + 1) if get_task(c.task).causal else range(len(x))
    score = {j: (query @ (x[j] @ p["W_K"][s, 0, h])).item() / math.sqrt(c.d_head) for j in seen}
    top = max(score.values())
    e = {j: math.exp(v - top) for j, v in score.items()}
    share = [e[j] / sum(e.values()) if j in e else 0.0 for j in range(len(x))]
    return share, [(v @ p["W_V"][s, 0, h] @ p["W_O"][s, 0, h]).norm().item() for v in x]

@each_condition
def test_patterns_are_what_a_loop_over_queries_and_keys_finds(name):
    p, c = population(name), condition(name)
    numbers = [3, 997, 41]
    got, weighted = patterns(p, c, numbers), patterns(p, c, numbers, weighted=True)
    for s in range(2):
        for i, n in enumerate(numbers):
            for h in range(c.n_heads):
                for q in range(get_task(c.task).n_ctx):
                    share, brought = plain_row(p, c, s, get_task(c.task).tokens[n], h, q)
                    assert got[s, i, h, q].tolist() == pytest.approx(share, abs=1e-9)
                    assert weighted[s, i, h, q].tolist() == pytest.approx([a * b for a, b in zip(share, brought)],
                                                                          abs=1e-9)

@pytest.mark.parametrize("name, stratum", [("add7/ffn-h8-silu", "operation=+1"), ("add7/ffn-h8-silu", "carry=2"),
                                           ("modadd/glu-h8-gelu", "wraps=True"), ("hist/ffn-h8-gelu", "count=3")])
def test_mean_and_spread_of_a_stratum_are_loops_over_its_predictions(name, stratum):
    t, p = get_task(condition(name).task), population(name, 1)
    numbers = range(0, len(t), 61)
    by, value = stratum.split("=")
    x = patterns(p, name, numbers)[0]
    mean, spreads = mean_pattern(p, name, numbers, stratum)[0], spread(p, name, numbers, stratum)
    for j, q in enumerate(t.read):
        column = by if by in t.strata else f"{by}_{t.positions[j]}"
        if column not in t.strata: continue
        rows = [x[i, :, q] for i, n in enumerate(numbers) if str(t.strata[column][n]) == value]
        if not rows:
            assert mean[:, q].isnan().all()
            continue
        for h in range(x.shape[1]):
            mine, keys = [r[h].tolist() for r in rows], q + 1 if t.causal else t.n_ctx
            average = [sum(r[k] for r in mine) / len(mine) for k in range(t.n_ctx)]
            assert mean[h, q].tolist() == pytest.approx(average, abs=1e-9)
            entropy = sum(-a * math.log(a) for r in mine for a in r if a > 0) / len(mine)
            assert spreads["entropy"][0, h, q].item() == pytest.approx(entropy, abs=1e-9)
            assert spreads["effective_keys"][0, h, q].item() == pytest.approx(math.exp(entropy))
            whole = sum((a - 1 / keys)**2 for r in mine for a in r[:keys])
            differ = sum((a - m)**2 for r in mine for a, m in zip(r[:keys], average))
            if keys > 1: assert spreads["input_share"][0, h, q].item() == pytest.approx(differ / whole, abs=1e-6)

def test_strata_of_inputs_hold_everywhere_and_those_of_predictions_only_where_something_is_written():
    assert _query_mask(get_task("add7"), stratum="carry=3").sum(0).tolist() == [7] * 8
    assert _query_mask(get_task("add7"), stratum="operation=+7").sum(0).tolist() == [0, 0, 0, 1000, 0, 0, 0, 0]
    count = _query_mask(get_task("hist"), stratum="count=2").sum(0)
    assert count.tolist() == [(get_task("hist").strata[f"count_p{i}"] == 2).sum() for i in range(10)]

def test_the_papers_inputs_are_eight_numbers_or_the_first_fifty_of_a_carry_length():
    p, c = carry_by_ffn(), "add7/ffn-h32-relu"
    assert torch.equal(mean_pattern(p, c, protocol="paper"), mean_pattern(p, c, sorted(get_task("add7").shown)))
    lengths = get_task("add7").strata["carry"].tolist()
    first = [n for n in range(1000) if lengths[n] == 1][:50]
    assert torch.equal(mean_pattern(p, c, stratum="carry=1", protocol="paper"), mean_pattern(p, c, first))
    few = _query_mask(get_task("add7"), stratum="carry=3", protocol="paper").any(1).sum()
    assert few == 7                                                       # all there are

@each_condition
def test_a_seed_in_a_population_is_the_seed_alone(name):
    p = population(name, 3)
    alone = {n: v[1:2] for n, v in p.items()}
    few = range(0, 1000, 7)
    for f in (mean_pattern, lambda *a: spread(*a)["input_share"], lambda *a: mean_pattern(*a, weighted=True)):
        torch.testing.assert_close(f(p, name, few)[1:2], f(alone, name, few), rtol=0, atol=1e-12, equal_nan=True)

def test_renumbering_heads_changes_no_rank():
    name = "add7/ffn-h8-silu"
    p = population(name)
    other = p | {n: p[n].flip(2) for n in ("W_Q", "W_K", "W_V", "W_O")}
    ranked = []
    for weights in (p, other):
        m = mean_pattern(weights, name)
        ranked.append(by_rank(m, attention_between(m, name, "o1", "d2")))
    torch.testing.assert_close(ranked[0][0], ranked[1][0], rtol=0, atol=1e-12)
    assert torch.equal(ranked[0][1], 3 - ranked[1][1])
    assert (attention_between(ranked[0][0], name, "o1", "d2").diff(dim=1) <= 0).all()

def test_heads_of_all_layers_stand_in_one_axis():
    name = "add7/moe-e2k1-h8-silu+L2"
    p = population(name)
    got, tr = patterns(p, name, [5, 6]), trace(p, get_task("add7").tokens[[5, 6]], name)
    assert heads(name) == [f"L{l}.H{h}" for l in range(2) for h in range(4)] and got.shape == (2, 2, 8, 8, 8)
    torch.testing.assert_close(got, torch.cat([tr["L0.pattern"], tr["L1.pattern"]], 2), rtol=0, atol=1e-12)
    brought = torch.einsum("snjhk,shkd->snhjd", tr["L1.v"], p["W_O"][:, 1]).norm(dim=-1)
    torch.testing.assert_close(patterns(p, name, [5, 6], weighted=True)[:, :, 4:],
                               tr["L1.pattern"] * brought[:, :, :, None])

def test_planted_heads_look_where_their_weights_say():
    c, task = "add7/ffn-h32-relu", get_task("add7")
    m, s = mean_pattern(carry_by_ffn(), c)[0], spread(carry_by_ffn(), c)["input_share"][0]
    goes = {0: {"EOS": "EOS", "o0": "d1", "o1": "d2", "o2": "EOS"},
            1: {"EOS": "EOS", "o0": "EOS", "o1": "d1", "o2": "d2"},
            2: {"EOS": "d0", "o0": "EOS", "o1": "EOS", "o2": "EOS"}}
    for h, to in goes.items():
        for query, key in to.items():
            assert m[h, task.places.index(query), task.places.index(key)] > .999
            assert s[h, task.places.index(query)] < 1e-3
    c = "add7/ffn-h32-relu+d128"
    m = mean_pattern(carry_by_attention(), c, stratum="operation=+1")[0]
    assert m[1, 4, 1] > .999 and m[0, 4, 1] < .001                      # with a carry head 1 fetches d1, not head 0
    x = patterns(carry_by_attention(), c)[0, :, :, 4, 1].round()
    assert (x[:, 0] + x[:, 1] == 1).all()

def test_what_is_even_has_no_share_and_all_entropy():
    p, c = population("hist/ffn-h8-gelu", 1, scale=0), "hist/ffn-h8-gelu"
    s = spread(p, c)
    assert s["input_share"].isnan().all() and s["effective_keys"].flatten().tolist() == pytest.approx([10] * 40)
    p = population("add7/ffn-h8-silu", 1, scale=0)
    assert spread(p, "add7/ffn-h8-silu")["effective_keys"][0, 2].tolist() == pytest.approx(list(range(1, 9)))

def test_relation_sorts_keys_by_what_they_hold():
    p, c, t = population("hist/ffn-h8-gelu", 1), "hist/ffn-h8-gelu", get_task("hist")
    got, x = relation(p, c), patterns(p, c)[0]
    assert sum(got.values()).flatten().tolist() == pytest.approx([1] * 40)
    for q in (7,):
        same = [sum(x[n, 1, q, k].item() for k in range(10) if k != q and t.tokens[n, k] == t.tokens[n, q])
                for n in range(len(t))]
        assert got["to_same"][0, 1, q].item() == pytest.approx(sum(same) / len(t))
        assert got["to_self"][0, 1, q].item() == pytest.approx(x[:, 1, q, q].mean().item())

@pytest.mark.parametrize("name", first(CONDITIONS[:2], CONDITIONS))
def test_rows_are_the_means_with_their_labels_and_few(name):
    p, t = {n: v.float() for n, v in population(name).items()}, get_task(condition(name).task)
    table = pattern_rows(p, name, [7, 8], stream="paired", rule="init")
    key = ["seed", "unit", "position", "metric"]
    assert not table.duplicated(key).any() and len(table) / 2 <= 160
    assert (set(table["stream"]) == {"paired"} and set(table["condition"]) == {name}
            and set(table["unit"]) == set(heads(name)))
    at = table.set_index(key)["value"]
    assert (at[8].filter(like="to_").groupby(["unit", "position"]).sum().tolist()
            == pytest.approx([1] * len(set(zip(table["unit"], table["position"]))), rel=1e-4))
    if name.startswith("add7"):
        m = mean_pattern(p, name)
        assert at[8, "H2", "o1", "to_d1"] == pytest.approx(m[1, 2, 4, 1].item(), rel=1e-4)
        assert set(table["position"]) == {"o0", "o1", "o2", "o3"} and ("to_o1" not in set(at[8, "H2", "o1"].index))
        assert at[7, "H0", "o2", "entropy"] == pytest.approx(spread(p, name)["entropy"][0, 0, 5].item())
    if t.name == "hist":
        assert at[7, "H3", "all", "to_self"] == pytest.approx(relation(p, name)["to_self"][0, 3].mean().item())

@pytest.mark.parametrize("call, says", [
    (lambda p, c: patterns(p, c, [-1]), "expected examples from 0 to 999"),
    (lambda p, c: patterns(p, c, []), "expected examples from 0 to 999"),
    (lambda p, c: mean_pattern(p, c, [0], "carry=3"), "expected some with carry=3; got none"),
    (lambda p, c: mean_pattern(p, c, protocol="papers"), "nearest: 'paper'")])
def test_wrong_questions_are_refused_in_one_message(call, says):
    with pytest.raises(ValueError, match=says): call(carry_by_ffn(), "add7/ffn-h32-relu")
