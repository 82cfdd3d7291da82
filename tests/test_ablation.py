"""Taking a part out by an edit is the same as a model that never had it; and every share is a plain count."""
import numpy as np
import pytest
import torch

from moe_redistribution.instruments.ablation import (ablate, ablate_each, ablation_rows, decode, _share_rows,
                                                     derangement, combine_edits, units, _partner, _side_by_side)
from moe_redistribution.models.population import forward, predict
from moe_redistribution.tasks.task import get_task, slices, spans, strata
from moe_redistribution.instruments.subject import Population
from moe_redistribution.instruments.trace import trace
from toys import untrained

T = get_task("add7")
MOE, DENSE, TWO = "add7/moe-e4k2-h16-silu", "add7/ffn-h8-silu", "add7/moe-e2k1-h8-silu+L2"

def right(params, name): return predict(params, name) == T.targets

@pytest.mark.parametrize("kind, name, writes", [
    *(("H", name, {"W_O"}) for name in (MOE, DENSE, "add7/moe_glu-e4k1-h8-gelu+norm")),
    *(("E", name, {"W_down", "b_down"}) for name in (MOE, "add7/moe_glu-e4k1-h8-gelu"))])
def test_a_head_or_an_expert_at_zero_is_a_model_in_which_it_writes_nothing(kind, name, writes):
    params = untrained(name)
    for i in range(4):
        without = {n: v.clone() for n, v in params.items()}
        for n in writes & set(params): without[n][:, 0, i] = 0
        assert torch.equal(ablate(params, name, {f"{kind}{i}": "zero"}), right(without, name))

def test_an_expert_s_mean_is_taken_over_the_tokens_that_go_to_it():
    params = untrained(MOE, [0])
    tr = trace(params, T.tokens, MOE)
    out, g = tr["expert_out"][0].double(), tr["gates"][0].double()
    made, seen = combine_edits(MOE, {"E1": "mean"}), {}
    forward(params, T.tokens, MOE, made, seen)
    for at in (3, 5):
        mine = [n for n in range(1000) if g[n, at, 1] > 0]
        mean = sum(out[n, at, 1] * g[n, at, 1] for n in mine) / sum(g[n, at, 1] for n in mine)
        assert torch.allclose(seen["expert_out"][0, :, at, 1].double(), mean.expand(1000, -1), atol=1e-5)
        assert torch.equal(seen["expert_out"][0, :, at, 0], tr["expert_out"][0, :, at, 0])

def test_an_expert_s_examples_are_exchanged_among_the_tokens_that_go_to_it():
    params = untrained(MOE)
    tr = trace(params, T.tokens, MOE)
    forward(params, T.tokens, MOE, combine_edits(MOE, {"E1": "resample"}), seen := {})
    said = lambda x: sorted(map(tuple, x.tolist()))
    for s, at in [(0, 5), (1, 3)]:
        mine = tr["gates"][s, :, at, 1] > 0
        own, new = (x["expert_out"][s, mine, at, 1] for x in (tr, seen))
        assert 0 < mine.sum() < 1000 and said(own) == said(new)
    everybody = torch.ones(1, 1000, 1, dtype=bool)
    assert (torch.equal(_partner(everybody)[0, :, 0], derangement(1000))
            and (_partner(~everybody)[0, :, 0] == torch.arange(1000)).all())

@pytest.mark.parametrize("edits",
                         [{"E0": "mean", "gates": "reversed"}, {"E0": "resample", "gates": "reversed", "H1": "mean"},
                          {"H0": "mean", "z": "reversed"}, {"E2": "zero", "expert_out": "mean"}])
def test_several_edits_have_no_order(edits):
    params, edits = untrained(MOE), {u: (lambda x: x.flip(3)) if how == "reversed" else how for u, how in edits.items()}
    there, back = (forward(params, T.tokens, MOE, combine_edits(MOE, dict(e)))
                   for e in (edits.items(), reversed(edits.items())))
    assert torch.equal(there, back)

def test_all_experts_at_zero_are_the_ffn_at_zero_and_all_heads_leave_only_the_bias():
    params = untrained(MOE)
    assert torch.equal(ablate(params, MOE, {f"E{e}": "zero" for e in range(4)}),
                       ablate(params, MOE, {"ffn_out": "zero"}))
    assert torch.equal(ablate(params, MOE, {f"H{h}": "zero" for h in range(4)}),
                       ablate(params, MOE, {"attn_out": params["b_O"][:, 0, None, None]}))

def test_the_edit_axis_is_one_edit_after_the_other_on_cpu_and_side_by_side():
    params, each = untrained(MOE), [{"H0": "mean"}, {"E2": "mean", "H1": "zero"}, {"ffn_out": "resample"}, {}]
    alone = torch.stack([ablate(params, MOE, e) for e in each])
    with pytest.raises(ValueError, match="one set of edits or more"): ablate_each(params, MOE, [])
    assert torch.equal(ablate_each(params, MOE, each), alone)
    beside = _side_by_side(Population(params, MOE), [combine_edits(MOE, e) for e in each])
    assert (beside == alone).double().mean() > .9999            # sums over another batch may round otherwise

def test_units_of_a_deeper_model_carry_their_layer():
    assert units(TWO)[:2] == ["L0.H0", "L0.H1"] and "L1.E1" in units(TWO)
    params = untrained(TWO)
    without = {n: v.clone() for n, v in params.items()}
    without["W_O"][:, 1, 2] = 0
    assert torch.equal(ablate(params, TWO, {"L1.H2": "zero"}), right(without, TWO))

@pytest.mark.parametrize("unit, name, says", [
    ("H9", DENSE, "nearest: 'H"), ("L0H0", TWO, "L0. to L1. or L.. before one of"),
    ("L1.H0", DENSE, "expected one of H0, H1, H2, H3"), ("gates", DENSE, "expected one of")])
def test_what_a_model_has_not_got_is_refused(unit, name, says):
    with pytest.raises(ValueError, match=says): ablate(untrained(name), name, {unit: "zero"})

def greedy(params, name, edits):
    "Token by token for every input, each with a forward pass of its own; edits are constants."
    out = torch.zeros(len(params["W_E"]), 1000, 5, dtype=torch.long)
    tokens = T.tokens.expand(len(out), -1, -1).clone()
    for j in range(5):
        for s in range(len(out)):
            one = {n: v[s:s + 1] for n, v in params.items()}
            logits = forward(one, tokens[s], name, {site: f(s) for site, f in edits.items()})
            out[s, :, j] = logits[0, :, 3 + j].argmax(-1)
        if j < 4: tokens[:, :, 4 + j] = out[:, :, j]
    return out

@pytest.mark.parametrize("name", [MOE, DENSE])
@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
def test_decoding_keeps_the_edit_s_teacher_forced_values(name, how):
    params = untrained(name)
    clean = trace(params, T.tokens, name, ["ffn_out"])["ffn_out"]
    value = {"zero": torch.zeros_like(clean), "mean": clean.mean(1, keepdim=True).expand_as(clean),
             "resample": clean[:, derangement(1000)]}[how]
    assert (decode(params, name, {"ffn_out": how})
            == greedy(params, name, {"ffn_out": lambda s: lambda x: value[s:s + 1]})).double().mean() > .999

def test_decoding_gives_a_function_what_the_model_s_own_prefix_makes():
    params, half = untrained(MOE), lambda x: .5 * x
    alike = decode(params, MOE, {"ffn_out": half}) == greedy(params, MOE, {"ffn_out": lambda s: half})
    assert alike.double().mean() > .999

def test_decoding_without_an_expert_is_decoding_a_model_whose_expert_writes_nothing():
    params = untrained(MOE)
    without = {n: v.clone() for n, v in params.items()}
    for n in ("W_down", "b_down"): without[n][:, 0, 2] = 0
    assert torch.equal(decode(params, MOE, {"E2": "zero", "H1": "mean"}), decode(without, MOE, {"H1": "mean"}))

@pytest.mark.parametrize("how", ["resample", torch.zeros_like])
def test_decoding_refuses_other_replacements_of_experts_and_says_why(how):
    with pytest.raises(ValueError, match="expected zero for E1; got .* only on the model's own prefix .* fix: zero"):
        decode(untrained(MOE), MOE, {"E1": how})

@pytest.mark.parametrize("edits",
                         [{}, {"ffn_out": "zero"}, {"attn_out": "mean"}, {"H1": "resample", "ffn_out": "mean"}])
def test_a_whole_answer_is_right_alone_exactly_if_it_is_right_teacher_forced(edits):
    from moe_redistribution.evidence.checkpoints import checkpoint
    name = "add7/moe-e4k1-h256-silu"
    params = {n: v[:2] for n, v in checkpoint(name).items()}
    alone, forced = decode(params, name, edits) == T.targets, ablate(params, name, edits)
    assert torch.equal(alone.all(-1), forced.all(-1)) and torch.equal(alone[..., 0], forced[..., 0])

def test_shares_are_plain_counts():
    hit = torch.rand(2, 1000, 5, generator=torch.Generator().manual_seed(0)) < .3
    got = _share_rows(hit, T, [1, 2], metric="digits", condition="x")
    for (where, stratum), f in got.groupby(["position", "stratum"]):
        mask, js = strata(T)[stratum].tolist(), spans(T)[where]
        n = sum(mask[i][j] for i in range(1000) for j in js)
        assert f["seed"].tolist() == [1, 2] and (f["n_examples"] == n).all()
        for s, value in enumerate(f["value"]):
            count = sum(bool(hit[s, i, j]) for i in range(1000) for j in js if mask[i][j])
            assert np.isclose(value, count / n)
    assert {*zip(got["position"], got["stratum"])} == {(where, stratum) for where, stratum, _ in slices(T)}

def test_histogram_rows_are_split_by_count_and_add7_rows_by_operation():
    hist = untrained("hist/ffn-h8-gelu", [0])
    got = ablation_rows(hist, "hist/ffn-h8-gelu", [0], ["zero"], fine=True, rule="init")
    counts = got.query("position == 'p0-p9' and metric == 'digits' and site == 'none' and stratum != 'all'")
    assert sorted(counts["stratum"]) == [f"count={k}" for k in range(1, 10)] and counts["n_examples"].sum() == 30_000
    whole = got.query("position == 'p0-p9' and metric == 'digits' and site == 'none' "
                      "and stratum == 'all'")["value"].iloc[0]
    assert np.isclose(np.average(counts["value"], weights=counts["n_examples"]), whole)
