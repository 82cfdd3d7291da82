"""Terms of a logit are arithmetic: what the page shows for planted models holds for any weights, checked with plain
loops."""
import numpy as np
import pytest
import torch

from moe_redistribution.instruments.attribution import (attention_share, attribution, attribution_rows, _coarse_terms,
                                                        rank1_share, ranked_heads)
from moe_redistribution.models.planted import carry_by_ffn
from moe_redistribution.tasks.task import get_task
from moe_redistribution.instruments.trace import SPLITS, trace
from tiers import first
from toys import untrained

NAMES = ("add7/ffn-h8-silu", "add7/glu-h8-gelu", "add7/moe-e4k1-h16-silu", "add7/moe-e4k2-h16-silu+switch",
         "add7/moe_glu-e2k1-h8-silu", "add7/no_ffn", "modadd/ffn-h8-gelu", "hist/moe-e2k1-h8-gelu")

def logits_of(params, name):
    t = get_task(name.split("/")[0])
    return trace(params, t.tokens, name, ["logits"])["logits"][:, :, list(t.read)]

@pytest.mark.parametrize("by, name",
                         first([(by, n) for by in SPLITS for n in NAMES if n.startswith("add7") or by == "head"],
                               [(by, n) for by in SPLITS for n in NAMES]))
def test_terms_sum_to_the_right_answers_logit_under_every_split(name, by):
    params, t = untrained(name), get_task(name.split("/")[0])
    logits = logits_of(params, name)
    right = logits.gather(-1, t.targets.expand(2, -1, -1)[..., None])[..., 0]
    assert torch.allclose(sum(attribution(params, name, by, centred=False).values()), right, atol=1e-4)
    assert torch.allclose(sum(attribution(params, name, by).values()), right - logits.mean(-1), atol=1e-4)

@pytest.mark.parametrize("name", ["add7/moe-e4k1-h16-silu", "add7/glu-h8-gelu"])
def test_a_head_s_term_is_what_its_absence_takes_from_the_logit_if_nothing_follows_it(name):
    "In a model whose FFN is zero, taking a head out changes the logit by exactly its term."
    params, t = untrained(name), get_task("add7")
    params["W_down"].zero_()
    if "b_down" in params: params["b_down"].zero_()
    whole, terms = logits_of(params, name), attribution(params, name, "head", centred=False)
    for h in range(4):
        without = {n: v.clone() for n, v in params.items()}
        without["W_O"][:, 0, h] = 0
        gone = (whole - logits_of(without, name)).gather(-1, t.targets.expand(2, -1, -1)[..., None])[..., 0]
        assert torch.allclose(terms[f"H{h}"], gone, atol=1e-4)

def test_terms_of_one_prediction_by_plain_loops():
    name, n, j = "add7/moe-e4k1-h16-silu", 593, 2
    params, t = untrained(name, [0]), get_task("add7")
    tr, E, at = trace(params, t.tokens[n:n + 1], name), params["W_E"][0].double(), 3 + j
    answer = int(t.targets[n, j])
    direction = (E[answer] - E.mean(0)).numpy()
    terms = attribution(params, name, "all")
    for h in range(4):
        written = sum(float(tr["z"][0, 0, at, h, k]) * params["W_O"][0, 0, h, k].double().numpy() for k in range(16))
        assert np.isclose(float(terms[f"H{h}"][0, n, j]), written @ direction, atol=1e-4)
    assert np.isclose(float(terms["tok"][0, n, j]), E[int(t.tokens[n, at])].numpy() @ direction, atol=1e-4)
    assert np.isclose(float(terms["pos"][0, n, j]), params["W_pos"][0, at].double().numpy() @ direction, atol=1e-4)
    used = int(tr["gates"][0, 0, at].argmax())
    assert all(abs(float(terms[f"E{e}"][0, n, j])) < 1e-7 for e in range(4) if e != used)

def test_a_seed_in_a_population_is_a_seed_alone():
    name = "add7/moe_glu-e2k1-h8-silu"
    params = untrained(name, range(3))
    alone = attribution({n: v[1:2] for n, v in params.items()}, name, "all")
    assert all(torch.equal(x[1:2], alone[n]) for n, x in attribution(params, name, "all").items())

def test_ranks_do_not_depend_on_the_order_of_heads():
    name, order = "add7/ffn-h8-silu", [2, 0, 3, 1]
    params, t = untrained(name), get_task("add7")
    moved = params | {n: params[n][:, :, order] for n in ("W_Q", "W_K", "W_V", "W_O")}
    a, b = (ranked_heads(attribution(p, name, "head"), t) for p in (params, moved))
    assert torch.allclose(a, b, atol=1e-5) and torch.allclose(rank1_share(a), rank1_share(b), atol=1e-5)
    totals = a.abs().sum(-1)
    assert (totals[:, :-1] >= totals[:, 1:]).all()

def test_a_model_without_ffn_has_all_of_the_share_in_attention():
    assert torch.allclose(attention_share(_coarse_terms(attribution(untrained("add7/no_ffn"), "add7/no_ffn", "all"))),
                          torch.ones(2, 1000, 5), atol=1e-6)

@pytest.mark.parametrize("call, says", [
    (lambda: attribution(carry_by_ffn(), "add7/ffn-h16-relu"),
     r"expected W_up \(1, 1, 64, 16\) per seed.* got \(1, 1, 64, 32\)"),
    (lambda: attribution_rows(untrained(NAMES[0]), NAMES[0] + "+norm", [0, 1]), "expected w_ln1 .* got None"),
    (lambda: attribution(untrained(NAMES[0]), NAMES[0], "heads"), "nearest: 'head'")])
def test_other_parameters_and_splits_are_refused(call, says):
    with pytest.raises(ValueError, match=says): call()

@pytest.mark.parametrize("make, splits", [(_coarse_terms, {"all"}), (attention_share, {"component"}),
                                          (lambda terms: ranked_heads(terms, get_task("add7")), {"head", "all"})])
def test_terms_of_a_split_that_does_not_tell_are_refused_not_added_up_under_a_wrong_name(make, splits):
    name = "add7/moe-e4k1-h16-silu"
    for by in SPLITS:
        terms = attribution(untrained(name, [0]), name, by)
        if by in splits: make(terms)
        else:
            with pytest.raises(ValueError, match="expected terms of the split .*; got .*; fix: attribution"):
                make(terms)

def test_rows_are_unique_finite_and_complete_for_every_seed():
    table = attribution_rows(untrained("add7/moe-e4k1-h16-silu", range(3)), "add7/moe-e4k1-h16-silu", [5, 6, 7], rule="init")
    keys = [n for n in table if n not in ("value", "n_examples")]
    assert not table.duplicated(keys).any() and np.isfinite(table["value"]).all()
    assert table.groupby("seed").size().nunique() == 1 and set(table["seed"]) == {5, 6, 7}
    shares = table[table["metric"].str.contains("share")]["value"]
    assert shares.between(0, 1).all()
    by_hand = {"o0": 1000, "o1": 1000, "o2": 1000, "o3": 1000, "o1-o2": 2000, "o1-o3": 3000}
    for (metric, where), got in table[table["metric"].str.startswith("rank")].groupby(["metric", "position"]):
        assert set(got["n_examples"]) == {by_hand[where]}, metric
