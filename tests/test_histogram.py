"""Planted counters, count probes, selectivity and accuracy by count against loops; what the paper's protocol reads."""
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from moe_redistribution.instruments.ablation import ablate
from moe_redistribution.models.counters import count_by_attention, count_by_inventory
from moe_redistribution.instruments.histogram import (_by_count, count_probes, _histogram_rows, selectivity, _token_responses)
from moe_redistribution.models.population import forward
from moe_redistribution.tasks.task import counts, get_task
from toys import untrained

NAME = "hist/ffn-h40-relu"

@pytest.mark.parametrize("made", [count_by_attention, count_by_inventory])
def test_planted_counters_are_exact_on_sequences_of_any_kind(made):
    g = torch.Generator().manual_seed(0)
    few = torch.stack([torch.randint(0, n, (10,), generator=g) for n in (2, 3, 5, 32) for _ in range(200)])
    few = few[counts(few).amax(1) < 10]
    assert (forward(made(), few, NAME)[0].argmax(-1) == counts(few) - 1).all()

@pytest.mark.parametrize("c", ["hist/moe-e4k1-h160-relu", "hist/ffn-h40-relu+norm", "hist/glu-h40-relu",
                               "hist/ffn-h20-relu", "hist/ffn-h40-gelu", "hist/ffn-h40-relu+d256",
                               "hist/ffn-h40-relu+L2", "hist/no_ffn", "add7/ffn-h40-relu", "modadd/ffn-h40-relu"])
def test_layers_that_would_not_count_are_refused(c):
    for made in (count_by_attention, count_by_inventory):
        with pytest.raises(ValueError, match="dense one-layer hist condition .* fix: use hist/ffn-h40-relu"): made(c)

@pytest.mark.parametrize("made, width", [(count_by_attention, 33), (count_by_inventory, 32)])
def test_the_smallest_width_counts_and_one_less_is_refused(made, width):
    t, c = get_task("hist"), f"hist/ffn-h{width}-relu"
    assert (forward(made(c), t.tokens, c)[0].argmax(-1) == t.targets).all()
    with pytest.raises(ValueError, match=f"width {width} or more"): made(f"hist/ffn-h{width - 1}-relu")

@pytest.mark.parametrize("c", ["hist/ffn-h8-gelu", "hist/glu-h8-gelu", "hist/moe-e2k1-h8-gelu",
                               "hist/moe_glu-e2k1-h8-silu"])
def test_responses_and_selectivity_are_loops_over_tokens_and_units(c):
    p = untrained(c)
    h, E, act = _token_responses(p, c), p["W_up"].shape[2], F.silu if "silu" in c else F.gelu
    for s in range(2):
        for e in range(E):
            for u in range(8 // E):
                each = []
                for tok in range(32):
                    x, up = p["W_E"][s, tok], p["W_up"][s, 0, e, :, u]
                    each.append(act(x @ p["W_gate"][s, 0, e, :, u]) * (x @ up) if "glu" in c
                                else act(x @ up + p["b_up"][s, 0, e, u]))
                each = torch.stack(each)
                assert torch.allclose(h["hidden"][s, e * (8 // E) + u], each, atol=1e-5)
                assert selectivity(each).item() == pytest.approx((each.abs().max() / each.abs().mean()).item())

def test_selectivity_of_silent_even_and_single_token_units():
    h = torch.zeros(3, 32)
    h[1], h[2, 7] = 1, -2
    assert selectivity(h).tolist() == [0, 1, 32]

@pytest.mark.parametrize("edits",
                         [{}, {"ffn_out": "zero"}, {"attn_out": "mean"}, {"H0": "zero", "H1": "zero", "E0": "mean"}])
def test_accuracy_by_count_is_a_loop_over_tokens(edits):
    p, t = untrained("hist/moe-e2k1-h8-gelu"), get_task("hist")
    got, hit = _by_count(p, "hist/moe-e2k1-h8-gelu", edits), ablate(p, "hist/moe-e2k1-h8-gelu", edits)
    count = np.array([[(row == v).sum() for v in row] for row in t.tokens.numpy()])
    for k in range(1, 10):
        own = count == k
        assert got[:, k - 1].tolist() == pytest.approx(hit[:, torch.from_numpy(own)].float().mean(1).tolist())

def test_rows_are_few_and_what_the_functions_say():
    p = count_by_inventory()
    table = _histogram_rows(p, NAME, [5], rule="best")
    assert len(table) <= 140 and set(table["rule"]) == {"best"} and not table["value"].isna().any()
    probed = table[table["metric"].isin(["probe_accuracy", "probe_control"]) & (table["stratum"] != "all")]
    assert (table["n_examples"] > 0).all() and len(probed) == 2 * 3 * 9
    for (site, metric), each in probed.groupby(["site", "metric"]):
        assert each["n_examples"].sum() == 4500
        whole = table.query("metric == @metric and stratum == 'all' and site == @site")["value"].item()
        assert np.average(each["value"], weights=each["n_examples"]) == pytest.approx(whole, abs=1e-5)
    right = table[(table["metric"] == "count_accuracy") & (table["edit"] == "none")]
    assert len(right) == 9 and (right["value"] == 1).all() and right["n_examples"].sum() == 30_000
    assert table.query("metric == 'selective_5'")["value"].item() == pytest.approx(.8)

@pytest.mark.parametrize("call, says", [
    (lambda f, c: f(untrained(c, [0]), "add7/ffn-h8-silu", [0]), "answers are counts"),
    (lambda f, c: f(untrained("hist/no_ffn", [0]), "hist/no_ffn", [0]), "with an FFN"),
    (lambda f, c: f(untrained(c + "+L2", [0]), c + "+L2", [0]), "one layer"),
    (lambda f, c: count_probes(count_by_inventory(), NAME, "papers"), "nearest: 'paper'")])
def test_other_models_and_an_unknown_protocol_are_refused(call, says):
    for f in (_histogram_rows, count_probes):
        with pytest.raises(ValueError, match=says): call(f, "hist/ffn-h8-gelu")

@pytest.mark.audit
def test_rows_of_a_seed_s_own_sequences_are_a_loop_over_them_and_the_others_stay_as_they_are():
    name, t = "hist/moe-e2k1-h8-gelu", get_task("hist")
    p, own = untrained(name), torch.arange(len(t)) % torch.tensor([[20], [30]]) == 0
    own[1] &= (counts(t.tokens) < 9).all(1)                                    # the second seed is asked of no nine
    plain, both = (_histogram_rows(p, name, [5, 6], (), splits=s) for s in (None, {"test": own}))
    rest = both[both["split"] == "all"].reset_index(drop=True)
    assert plain.equals(rest) and len(both) - len(rest) == 2 * 5 * (9 + 5)
    for edits, where in (({}, "site == 'none'"), ({"ffn_out": "mean"}, "site == 'ffn_out' and edit == 'mean'")):
        hit, of = ablate(p, name, edits), both.query(f"split == 'test' and {where}")
        for s, seed in enumerate((5, 6)):
            mine = of[of["seed"] == seed].set_index(["metric", "stratum"])
            for k in range(1, 10):
                asked = [bool(h) for i in own[s].nonzero()[:, 0]
                         for h, c in zip(hit[s, i], counts(t.tokens[i])) if c == k]
                row = mine.loc[("count_accuracy", f"count={k}")]
                assert row["n_examples"] == len(asked) and (row["value"] == pytest.approx(np.mean(asked)) if asked
                                                            else np.isnan(row["value"]))
            assert mine.loc[("count_right", "all"), "value"] == pytest.approx(hit[s, own[s]].double().mean().item())
            assert (mine.loc[("count_right", "all"), "n_examples"] == 10 * own[s].sum()
                    == 2 * mine.loc[("count_readout", "all"), "n_examples"])
