"""Routing and rerouting against scikit-learn, plain loops, whole forward passes and models permuted by hand."""
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import mutual_info_score, normalized_mutual_info_score
from sklearn.metrics.cluster import expected_mutual_information

from moe_redistribution.instruments import rerouting, routing
from moe_redistribution.instruments.ablation import edits_for, derangement
from moe_redistribution.models.condition import condition
from moe_redistribution.models.population import forward, predict
from moe_redistribution.models.planted import carry_by_experts, carry_by_ffn
from moe_redistribution.instruments.rerouting import (_rerouted_answers, _position_token_codes, drops, gradient_norms,
                                                      permuted_experts,
                                                      routes_held, swapped_gates, tabled_gates, uniform_gates)
from moe_redistribution.instruments.routing import (crosstab, explained_share, mutual_information, nmi, _redrawn_tables,
                                                    check_routed, routes,
                                                    saturation, tables)
from moe_redistribution.tasks.task import get_task, labels
from moe_redistribution.instruments.rows import ROW_COLUMNS
from moe_redistribution.instruments.trace import trace
from plain import load_member
from toys import untrained

ADD7 = get_task("add7")
VARIANTS = {"moe": "add7/moe-e4k1-h40-silu", "moe_glu": "add7/moe_glu-e4k1-h24-silu", "top-2": "add7/moe-e4k2-h40-gelu",
            "switch": "add7/moe-e4k1-h40-silu+switch", "norm": "add7/moe_glu-e4k2-h24-relu+norm"}
each_variant = pytest.mark.parametrize("name", VARIANTS.values(), ids=VARIANTS)
PLANTED, BY_EXPERTS = carry_by_experts(), "add7/moe-e4k1-h64-relu"
codes = lambda n: st.lists(st.integers(0, n - 1), min_size=2, max_size=60)

def population(name, n_seeds=2, loud=30.0):
    "Random weights with an FFN loud enough for its routes to matter to the predictions."
    params = untrained(name, range(n_seeds))
    return {n: v * (loud if n == "W_down" else 3 if n == "W_router" else 1) for n, v in params.items()}

def table_of(a, b): return crosstab(torch.tensor(a), torch.tensor(b)[None], max(a) + 1, max(b) + 1)

# ------------------------------------------------------------------------------------------------------- information

@settings(max_examples=25)
@given(codes(4), codes(3))
def test_nmi_is_scikit_learns(a, b):
    n = min(len(a), len(b))
    a, b = a[:n], b[:n]
    got = table_of(a, b)
    assert math.isclose(mutual_information(got).item(), mutual_info_score(a, b) / math.log(2), abs_tol=1e-12)
    for norm in routing.NORMS:
        want = normalized_mutual_info_score(a, b, average_method=norm)
        if len(set(a)) == 1 or len(set(b)) == 1: want = 0                    # scikit-learn has a convention of its own
        assert math.isclose(nmi(got, norm).item(), want, abs_tol=1e-9)

@settings(max_examples=20)
@given(codes(4), codes(3), st.permutations(range(4)), st.permutations(range(3)))
def test_names_of_experts_and_operations_do_not_matter(a, b, new_a, new_b):
    n = min(len(a), len(b))
    one, other = table_of(a[:n], b[:n]), table_of([new_a[x] for x in a[:n]], [new_b[x] for x in b[:n]])
    for norm in routing.NORMS: torch.testing.assert_close(nmi(one, norm), nmi(other, norm), rtol=0, atol=1e-12)

@settings(max_examples=25)
@given(codes(5), codes(4), st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_what_a_table_explains_is_a_share_and_all_of_what_it_decides(a, b, table):
    n = min(len(a), len(b))
    share = explained_share(table_of(a[:n], b[:n])).item()
    assert math.isnan(share) if len(set(b[:n])) == 1 else 0 <= share <= 1
    decided = [table[x] for x in a]
    if len(set(decided)) > 1: assert explained_share(table_of(a, decided)).item() == 1

def test_information_given_a_third_is_the_mean_over_its_cells():
    g, a, b = torch.randint(0, 4, (3, 500), generator=torch.Generator().manual_seed(0))
    three = crosstab(g * 4 + a, b[None], 16, 4).unflatten(1, (4, 4))
    want = sum((g == v).double().mean() * mutual_info_score(a[g == v], b[g == v]) / math.log(2) for v in range(4))
    assert math.isclose(routing.conditional_information(three).item(), want, abs_tol=1e-12)

def test_the_floor_is_the_expected_information_of_shuffled_labels():
    "scikit-learn knows the mean of this null in closed form; margins stay, and the same call gives the same tables."
    a, b = torch.randint(0, 4, (2, 300), generator=torch.Generator().manual_seed(1))
    table = crosstab(a, b[None], 4, 4)
    drawn = _redrawn_tables(table, 2000)
    assert torch.equal(drawn.sum(-1)[7], table.sum(-1)) and torch.equal(drawn.sum(-2)[7], table.sum(-2))
    assert torch.equal(drawn, _redrawn_tables(table, 2000))
    values = mutual_information(drawn)[:, 0]
    want = expected_mutual_information(table[0].numpy().astype(np.int64), 300) / math.log(2)
    assert abs(values.mean() - want) < 4 * values.std() / 2000**.5
    shuffles = [mutual_information(crosstab(a[torch.randperm(300)], b[None], 4, 4)).item() for _ in range(300)]
    assert abs(values.mean() - np.mean(shuffles)) < 5 * np.std(shuffles) / 300**.5

def test_tables_count_the_first_choice_where_there_is_a_label():
    name = VARIANTS["top-2"]
    chosen, what = routes(population(name), name)[0], labels(ADD7, "operation").tolist()
    got, seen = tables(chosen, ADD7, 4), chosen[..., 0].tolist()
    want = np.zeros((2, 3, 4))
    for s, n, j in itertools.product(range(2), range(1000), range(4)):
        want[s, ["+0", "+1", "+7"].index(what[n][j]), seen[s][n][j]] += 1
    assert (got["operation"].numpy() == want).all()
    assert torch.equal(got["within"].sum(1), got["operation"])
    assert torch.equal(got["within"].sum(2), got["position_token"])

@pytest.mark.parametrize("name", ["add7", "modadd", "hist"])
def test_known_is_what_one_would_write_down_token_by_token(name):
    t = get_task(name)
    facts, what = routing.label_codes(t), labels(t, t.by[-1])
    some = [(n, j) for n, j in itertools.product(range(0, len(t), 37), range(len(t.read))) if what[n, j]]
    seen = [(j, int(t.tokens[n, t.read[j]]), what[n, j]) for n, j in some]
    at = {(n, j): i for i, (n, j) in enumerate(facts["at"].nonzero().tolist())}
    index = [at[x] for x in some]
    for key, take in {"position": lambda p, k, w: p, "token": lambda p, k, w: k, t.by[-1]: lambda p, k, w: w,
                      "position_token": lambda p, k, w: (p, k), f"position_token_{t.by[-1]}": lambda *x: x}.items():
        pairs = {(take(*x), int(facts[key][i])) for x, i in zip(seen, index)}
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}), key          # one code a value

# ------------------------------------------------------------------------------------------------------------ routes

@each_variant
@pytest.mark.parametrize("everywhere", [False, True])
def test_routes_are_those_of_the_whole_forward_pass(name, everywhere):
    "The experts have no neurons there, which no router can notice."
    params, c = population(name), condition(name)
    tr = trace(params, ADD7.tokens, c)
    at = slice(None) if everywhere else list(ADD7.read)
    chosen, probs = routes(params, c, everywhere)
    torch.testing.assert_close(probs, tr["router_probs"][:, :, at], rtol=1e-5, atol=1e-6)
    on = torch.zeros_like(probs).scatter(-1, chosen, 1)
    assert torch.equal(on > 0, tr["gates"][:, :, at] > 0) and chosen.shape[-1] == c.top_k
    assert (probs.gather(-1, chosen).diff(dim=-1) <= 0).all()

def test_loads_and_pairs_are_counts():
    name = VARIANTS["top-2"]
    chosen, _ = routes(population(name), name)
    load, (both, chance) = routing.loads(chosen, 4), routing.coactivation(chosen, 4)
    for s in range(2):
        places = [set(x) for x in chosen[s].flatten(0, 1).tolist()]
        for i, j in itertools.product(range(4), range(4)):
            assert math.isclose(both[s, i, j].item(), np.mean([i in x and j in x for x in places]), abs_tol=1e-12)
            want = np.mean([i in x for x in places]) * np.mean([j in x for x in places])
            assert math.isclose(chance[s, i, j].item(), want, abs_tol=1e-12)
        assert np.allclose(load[s], [np.mean([e in x for x in places]) / 2 for e in range(4)])
    assert torch.allclose(routing.effective_experts(chosen, 4), torch.exp(-(load * load.log()).sum(1)))

@each_variant
def test_routes_are_saturated_against_themselves(name):
    params, other = population(name), population(name, 4)
    other = {n: v[2:] for n, v in other.items()}
    assert saturation(params, params, name).tolist() == [1, 1]
    a, b, k = routes(params, name)[0], routes(other, name)[0], condition(name).top_k
    a, b = a.flatten(1, 2).tolist(), b.flatten(1, 2).tolist()
    want = [np.mean([len(set(x) & set(y)) / k for x, y in zip(a[s], b[s])]) for s in range(2)]
    assert np.allclose(saturation(params, other, name), want) and max(want) < 1

# ---------------------------------------------------------------------------------------------------------- rerouting

@each_variant
def test_edits_after_one_pass_are_edits_of_whole_passes(name):
    params = population(name)
    ways = [{}, permuted_experts([2, 0, 3, 1]), swapped_gates(derangement(1000)), uniform_gates(),
            tabled_gates(_position_token_codes(ADD7), condition(name).top_k)]
    ways += [edits_for(name, "E0", "zero"), edits_for(name, "E3", "mean")]
    got = _rerouted_answers(params, name, ways)
    for one, edits in zip(got, ways): assert torch.equal(one, predict(params, name, edits))
    assert all(not torch.equal(got[0], x) for x in got[1:5])                              # and each changes something

def test_drops_are_counted_example_by_example():
    right = torch.rand(3, 2, 1000, 5, generator=torch.Generator().manual_seed(0)) < .5
    got, what, right = drops(right, ADD7), labels(ADD7, "operation").tolist(), right.tolist()
    for op in ("+7", "+1", "+0"):
        at = [(n, j) for n in range(1000) for j in range(4) if what[n][j] == op]
        hits = [[np.mean([right[i][s][n][j] for n, j in at]) for s in (0, 1)] for i in range(3)]
        assert np.allclose(got[op], np.array(hits[:1]) - np.array(hits[1:]))

@each_variant
def test_rerouting_by_identity_changes_nothing(name):
    params = population(name)
    plain = forward(params, ADD7.tokens, name)
    for edits in (permuted_experts([0, 1, 2, 3]), swapped_gates(torch.arange(1000))):
        assert torch.equal(forward(params, ADD7.tokens, name, edits), plain)
    one_to_a_cell = tabled_gates(torch.arange(5000).view(1000, 5), condition(name).top_k)
    torch.testing.assert_close(forward(params, ADD7.tokens, name, one_to_a_cell, read_only=True),
                               forward(params, ADD7.tokens, name, read_only=True))

@each_variant
def test_exchanged_gates_are_exchanged_experts(name):
    params, perm = population(name), [2, 0, 3, 1]
    back = [perm[e] for e in range(4)]                                         # expert e now is what perm[e] was
    moved = {n: v[:, :, back] if n in ("W_gate", "W_up", "b_up", "W_down", "b_down") else v for n, v in params.items()}
    got, want = forward(params, ADD7.tokens[:50], name, permuted_experts(perm)), forward(moved, ADD7.tokens[:50], name)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

@each_variant
def test_held_routes_are_those_of_the_run_as_it_is_whatever_attention_says(name):
    """Gates of each seed written in by hand; without an edit nothing changes, and with one the free router would choose
    others."""
    params = {n: 3 * v if n == "W_router" else v for n, v in population(name).items()}
    blind = {"attn_out": lambda x: 8 * x.roll(1, 1)}
    for i in range(len(params["W_E"])):
        one = {n: v[i:i + 1] for n, v in params.items()}
        forward(one, ADD7.tokens, name, sink=(sink := {}), read_only=True)
        want = forward(one, ADD7.tokens, name, blind | {"gates": lambda g: sink["gates"]}, read_only=True).argmax(-1)
        assert torch.equal(routes_held(params, name, blind)[i], want[0])
    assert torch.equal(routes_held(params, name, {}), predict(params, name))
    assert not torch.equal(routes_held(params, name, blind), predict(params, name, blind))

def test_another_router_reads_the_models_own_stream():
    name = VARIANTS["moe"]
    params, other = population(name), population(name, 4)
    other = {n: v[2:] for n, v in other.items()}
    stream = trace(params, ADD7.tokens, name)["resid_mid"]
    want = (stream[0] @ other["W_router"][0, 0]).argmax(-1)
    mixed = params | {"W_router": other["W_router"]}
    assert torch.equal(trace(mixed, ADD7.tokens, name)["gates"][0].argmax(-1), want)

# ---------------------------------------------------------------------------------------------------------- gradients

@pytest.mark.parametrize("e, k, gate", [(e, k, gate) for gate in ("", "+switch") for e in (1, 2, 4) for k in (1, 2)
                                        if k < e or k == e and not gate])         # another name of the same training
def test_the_task_trains_a_router_only_where_the_gate_is_not_constant(e, k, gate):
    name = f"add7/moe-e{e}k{k}-h32-silu{gate}"
    got = gradient_norms(population(name), name)
    assert (got["task_router"] == 0).all() if e == 1 or k == 1 and not gate else (got["task_router"] > 1e-3).all()
    if e == 1: assert (got["balance_router"] == 0).all()
    elif k == e: assert (got["balance_router"] < 1e-8).all()                  # every expert takes every token
    else: assert (got["balance_router"] > 1e-5).all()
    assert (got["task_experts"] > 1e-3).all()
    if k < e: assert (gradient_norms(population(name), name + "+lambda0")["balance_router"] == 0).all()

@pytest.mark.parametrize("name", [VARIANTS["top-2"], VARIANTS["switch"], VARIANTS["norm"]])
def test_gradient_norms_are_those_of_plain_modules(name):
    params, tokens, targets = population(name), ADD7.tokens[:40], ADD7.targets[:40]
    got, c = gradient_norms(params, name, tokens, targets), condition(name)
    for member in range(2):
        model = load_member(params, member, name)
        router = model.blocks[0].ffn.router.weight
        for which, key in ((0, "task_router"), (1, "balance_router")):
            grad = torch.autograd.grad(model.loss(tokens, targets)[which] * (c.balance if which else 1), router)[0]
            assert math.isclose(got[key][member].item(), grad.norm().item(), rel_tol=1e-3)
        own = list(model.blocks[0].ffn.experts.parameters())
        grads = torch.autograd.grad(model.loss(tokens, targets)[0], own, allow_unused=True)
        norm = math.sqrt(sum(g.square().sum() for g in grads if g is not None))
        assert math.isclose(got["task_experts"][member].item(), norm, rel_tol=1e-3)

def test_gradients_leave_the_parameters_alone():
    params = population(VARIANTS["moe"])
    gradient_norms(params, VARIANTS["moe"])
    assert all(v.grad is None and not v.requires_grad for v in params.values())

# --------------------------------------------------------------------------------------------------------------- rows

@pytest.mark.parametrize("name", ["add7/moe-e4k2-h40-gelu", "add7/moe-e1k1-h8-silu"])
def test_rows_are_lean_and_each_is_there_once(name):
    params = population(name, 2, 1)
    known = routing.routing_rows(params, name, [7, 9], rule="init")
    moved = rerouting.rerouting_rows(params, name, [7, 9], rule="init")
    for table in (known, moved):
        assert list(table.columns) == list(ROW_COLUMNS) and not table.drop(columns="value").duplicated().any()
        assert (table.groupby("seed").size() <= 75).all()
        assert set(table["condition"]) == {name} and set(table["rule"]) == {"init"}
        finite = ~table["metric"].str.startswith("explained")
        assert np.isfinite(table["value"][finite]).all()
    again = routing.routing_rows({n: v[1:] for n, v in params.items()}, name, [9], rule="init")
    of_nine = known.query("seed == 9 and edit != 'shuffled'")["value"]                           # floors: draws differ
    np.testing.assert_allclose(again.query("edit != 'shuffled'")["value"], of_nine, rtol=0, atol=1e-12)

def test_another_task_is_split_by_its_own_label():
    name = "modadd/moe-e2k1-h8-gelu"
    table = routing.routing_rows(population(name, 1), name, [1], draws=5)
    assert ({"all", "wraps=True", "wraps=False"} == set(table["stratum"])
            and {"sum", "context"} == set(table["position"]))
    n = table[table["position"] == "sum"].groupby("stratum")["n_examples"].unique().map(list).to_dict()
    # a + b ≥ 113 or not
    assert n == {"all": [113 * 113], "wraps=True": [113 * 112 // 2], "wraps=False": [113 * 114 // 2]}

def test_every_normalisation_has_its_floor():
    table = routing.routing_rows(population(VARIANTS["moe"], 1), VARIANTS["moe"], [1], draws=2)
    nmis = table[table["metric"].str.startswith("nmi_")].pivot(index="metric", columns="edit", values="value")
    assert set(nmis.index) == {f"nmi_{n}" for n in routing.NORMS} and not nmis.isna().any(axis=None)

def test_rows_say_over_how_many_places_they_count():
    name = VARIANTS["moe"]
    table = routing.routing_rows(population(name, 1), name, [1], draws=2)
    n = lambda asked: set(table.query(asked)["n_examples"])
    for metric in ("load", "largest_load", "effective_experts"):
        assert n(f"metric == '{metric}' and position == 'context'") == {8 * 1000}
        assert n(f"metric == '{metric}' and position == 'o0-o3'") == {4 * 1000}
    of = {op: n(f"metric == 'routing_fraction' and stratum == 'operation={op}'") for op in ("+7", "+1", "+0")}
    assert of == {"+7": {1000}, "+1": {700 + 70 + 7}, "+0": {300 + 930 + 993}}
    moved = (rerouting.rerouting_rows(population(name, 1), name, [1]).query("metric == 'drop'")
             .groupby("stratum")["n_examples"].unique().map(list))
    assert moved.to_dict() == {"all": [4000]} | {f"operation={op}": list(count) for op, count in of.items()}

def test_the_dominant_expert_is_the_one_with_most_of_seven():
    name = VARIANTS["moe"]
    params = population(name)
    table = rerouting.rerouting_rows(params, name, [0, 1])
    table = table.query("metric == 'drop' and edit == 'zero' and stratum == 'operation=+7'")
    chosen = routes(params, name)[0]
    for s in range(2):
        top = chosen[s, :, 0, 0].bincount().argmax().item()                                # +7 is asked for at o0 alone
        value = table.query("seed == @s").set_index("unit")["value"]
        assert value["dominant"] == value[f"E{top}"]

@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
def test_an_expert_can_be_taken_away_while_routes_are_held(how):
    "Its edit looks at the gates that each token has kept, whatever attention would have sent it to."
    name = VARIANTS["moe"]
    params, out = population(name, 1), edits_for(name, "E1", how)
    assert torch.equal(routes_held(params, name, {"E1": how}), predict(params, name, out))
    held = trace(params, ADD7.tokens, name)["gates"][:, :, list(ADD7.read)]
    look = out.get("gates", lambda g: g)                              # zero needs no look at the gates
    by_hand = {"attn_out": torch.zeros_like, "gates": lambda _: look(held), "expert_out": out["expert_out"]}
    assert torch.equal(routes_held(params, name, {"attn_out": "zero", "E1": how}), predict(params, name, by_hand))

# ----------------------------------------------------------------------------------------------------------- refusals

@pytest.mark.parametrize("call, says", [
    (lambda: gradient_norms(carry_by_ffn(), "add7/ffn-h32-relu"), "expected a model with a router"),
    (lambda: routing.routing_rows(carry_by_ffn(), "add7/ffn-h32-relu", [0]), "expected a model with a router"),
    (lambda: check_routed(PLANTED, BY_EXPERTS + "+L2"), "expected one layer; got 2"),
    (lambda: routes(PLANTED, "add7/moe-e2k1-h64-relu"), r"expected W_router \(1, 64, 2\).* got \(1, 64, 4\)"),
    (lambda: routes(carry_by_ffn(), BY_EXPERTS), "expected W_router .* got None"),
    (lambda: saturation(PLANTED, population(BY_EXPERTS), BY_EXPERTS), "same seeds twice; got 1 and 2"),
    (lambda: routing.routing_rows(PLANTED, BY_EXPERTS, [0], draws=0), "one draw or more for the floors; got 0"),
    (lambda: _rerouted_answers(PLANTED, BY_EXPERTS, []), "one set of edits or more; got none"),
    (lambda: forward(PLANTED, ADD7.tokens, BY_EXPERTS, tabled_gates(_position_token_codes(ADD7))),
     r"gates at \(1000, 5\).*got \(1000, 8\)")])
def test_wrong_use_is_refused_with_the_reason(call, says):
    with pytest.raises(ValueError, match=says): call()
