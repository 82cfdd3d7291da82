"Clocks are right and are what they say; Fourier measures against plain loops, and against what cannot change them."
import cmath, math

import numpy as np
import pytest
import torch
from moe_redistribution.models.clocks import FREQS, bilinear_clock, clock, rotated_clock, waves
from moe_redistribution.instruments.fourier import (concentration, contribution, neurons_needed, _fourier_rows,
                                                    group_mean, _kept_accuracy, key_frequencies,
                                                    _live_mean,
                                                    neurons, _principal_components, random_neurons, spectrum,
                                                    _wave_share, weighted_mean)
from moe_redistribution.models.population import forward, init, predict
from moe_redistribution.tasks.task import P, get_task
from moe_redistribution.instruments.trace import trace

task = get_task("modadd")
SUM = task.targets[:, 0]

def right(p, c): return (predict(p, c)[..., 0] == SUM).float().mean().item()
def generators(*seeds): return [torch.Generator().manual_seed(s) for s in seeds]
def by_sum(h): return group_mean(h[:, :, 0], SUM)

# ---- clocks

def test_bilinear_clocks_agree_with_the_identity_in_float64():
    a, b = task.tokens[:, 0].double(), task.tokens[:, 1].double()
    w = torch.tensor(FREQS).double() * 2 * math.pi / P
    factor = 2 + 2 * ((a - b)[:, None] * w).cos()
    off = (a + b)[:, None] - torch.arange(P).double()
    oracle = 20 * (factor[:, None] * (off[..., None] * w).cos()).sum(-1)
    for p in (bilinear_clock(), rotated_clock()):
        got = forward(p, task.tokens, "modadd/glu-h64-linear", read_only=True)[0, :, 0, :P]
        assert (got - oracle).abs().max() < 5e-3 * oracle.abs().max()

@pytest.mark.parametrize("call, says", [
    (lambda: clock("modadd/ffn-h105-relu+norm"), "without norm"),
    (lambda: clock(freqs=(3, 3)), "different frequencies"), (lambda: clock(freqs=()), "different frequencies"),
    (lambda: clock(freqs=range(1, 20)), "1 to 15 different"), (lambda: clock("modadd/ffn-h44-relu"), "modadd/ffn-h45-relu"),
    (lambda: bilinear_clock("modadd/ffn-h64-linear"), "expected a GLU")])
def test_what_cannot_be_a_clock_is_refused(call, says):
    with pytest.raises(ValueError, match=says): call()

# ---- the measure against plain loops

def slow_concentration(signal, paper):
    "One neuron's signal, a plain list: a discrete Fourier transform by its definition."
    G, bins = len(signal), []
    for f in range(1, G):
        bins.append(abs(sum(v * cmath.exp(-2j * math.pi * f * s / G) for s, v in enumerate(signal))) ** 2)
    if paper: return 0. if sum(bins) < 1e-12 else max(bins) / sum(bins)
    pairs = [bins[f - 1] + (bins[G - f - 1] if f != G - f else 0) for f in range(1, G // 2 + 1)]
    return max(pairs) / sum(pairs)

@pytest.mark.parametrize("G", [3, 10, 11])
def test_concentration_is_the_transform_by_definition(G):
    means = torch.randn(2, G, 3, generator=torch.Generator().manual_seed(G))
    for p in ("paper", "audited"):
        slow = [[slow_concentration(means[s, :, n].tolist(), p == "paper") for n in range(3)] for s in range(2)]
        assert np.allclose(concentration(means, p), slow, atol=1e-7)

def test_power_is_all_of_the_variance():
    for G in (10, 113):
        means = torch.randn(1, G, 4, generator=torch.Generator().manual_seed(1)).double()
        variance = (means - means.mean(1, keepdim=True)).square().sum(1) * G
        for folded in (True, False): assert torch.allclose(spectrum(means, folded).sum(1), variance)

def test_group_mean_is_a_loop_over_groups_with_and_without_weights():
    g = torch.Generator().manual_seed(2)
    h, groups = torch.randn(2, 60, 5, generator=g), torch.randint(0, 7, (60,), generator=g)
    w = torch.rand(2, 60, 5, generator=g).round()
    w[0, groups == 3] = 0
    for s in range(2):
        for k in range(7):
            assert torch.allclose(group_mean(h, groups)[s, k], h[s, groups == k].mean(0), atol=1e-6)
            for n in range(5):
                own = [h[s, i, n] for i in range(60) if groups[i] == k and w[s, i, n] > 0]
                own = own or [h[s, i, n] for i in range(60) if w[s, i, n] > 0]
                assert torch.allclose(group_mean(h, groups, w)[s, k, n], torch.stack(own).mean(), atol=1e-5)

def test_wave_share_is_a_two_dimensional_transform():
    h = torch.randn(1, P * P, 2, generator=torch.Generator().manual_seed(3))
    h[..., 1] += 3 * waves((8,))[task.tokens[:, 0], 0] * waves((8,))[task.tokens[:, 1], 1]
    share, variance = _wave_share(h)
    for n in range(2):
        F = np.abs(np.fft.fft2(h[0, :, n].double().numpy().reshape(P, P))) ** 2
        F[0, 0] = 0
        one = lambda f: sum(F[i % P, j % P] for i in (-f, 0, f) for j in (-f, 0, f))
        assert share[0, n].item() == pytest.approx(max(one(f) for f in range(1, 57)) / F.sum(), rel=1e-4)
        assert variance[0, n].item() == pytest.approx(F.sum() / P**4, rel=1e-4)

@pytest.mark.parametrize("value", [1., .3])
def test_a_constant_gate_has_no_wave_and_leaves_the_others_theirs(value):
    "Unit 15 of the clock: gate constant, up the cosine of unit 0, so that its product weighs as much as any."
    c = "modadd/glu-h25-linear"
    p = bilinear_clock(c, apart=True, freqs=(3, 14))
    p["W_gate"][0, 0, 0, -1, 15] = value                            # the position of the = sign, where it is read
    p["W_up"][0, 0, 0, :, 15], p["W_down"][0, 0, 0, 15, 100] = p["W_up"][0, 0, 0, :, 0], 1
    n = neurons(p, c)
    share, variance = _wave_share(n["gate"][:, :, 0])
    assert share[0, 15].isnan() and variance[0, 15] == 0
    assert concentration(group_mean(n["gate"][:, :, 0], task.tokens[:, 0]))[0, 15].isnan()
    at = _fourier_rows(p, c, [0]).query("site == 'gate' and edit == 'none'").set_index(["metric", "unit"])["value"]
    assert at["wave_share", ""] == pytest.approx(1, abs=1e-4)

def test_a_value_that_is_missing_is_in_neither_sum():
    values, weight = torch.tensor([[1., math.nan, 3, 9]]), torch.tensor([[1., 6, 1, 0]])
    assert weighted_mean(values, weight).tolist() == [2] and _live_mean(values, weight, .1)[0].tolist() == [2]
    assert _live_mean(values, weight, .1)[1].tolist() == [.75]
    assert weighted_mean(values[:, 1:2], weight[:, 1:2]).isnan().all()

def test_neurons_are_the_forward_pass_with_experts_side_by_side():
    c, add7 = "add7/moe_glu-e4k2-h32-silu", get_task("add7")
    p = init(c, generators(1, 2))
    n, tr = neurons(p, c), trace(p, add7.tokens, c)
    for e in range(4):
        for site in ("gate", "up", "hidden"):
            assert torch.allclose(n[site][..., 8 * e:8 * e + 8], tr[site][:, :, 3:, e], atol=1e-5)
        assert torch.allclose(n["gates"][..., 8 * e], tr["gates"][:, :, 3:, e], atol=1e-5)
    out = torch.einsum("sbtn,snd->sbtd", n["hidden"] * n["gates"], p["W_down"][:, 0].flatten(1, 2))
    assert torch.allclose(out, n["ffn_out"], atol=1e-5)
    assert torch.allclose(neurons(p, c, n["resid_mid"])["hidden"], n["hidden"], atol=1e-5)
    assert torch.allclose(n["reach"], p["W_down"][:, 0].flatten(1, 2).norm(dim=-1) ** 2)

def clock_in_every_expert():
    "Each of four experts is the whole clock, and all are mixed, by a router that was drawn."
    one, p = clock("modadd/ffn-h45-relu"), init("modadd/moe-e4k4-h180-relu", generators(7))
    experts = {n: one[n].repeat_interleave(4, 2) for n in ("W_up", "b_up", "W_down", "b_down")}
    return one | experts | {"W_router": p["W_router"]}

@pytest.mark.parametrize("c, make", [("modadd/ffn-h45-relu", lambda: clock("modadd/ffn-h45-relu")),
                                     ("modadd/moe-e4k4-h180-relu", clock_in_every_expert)])
def test_kept_accuracy_is_a_forward_pass_with_the_others_at_their_mean(c, make):
    "The oracle edits `ffn_out` in full forward passes. (With none kept all logits tie, and rounding decides.)"
    p = make()
    n, down = neurons(p, c), p["W_down"][0, 0].flatten(0, 1)
    weight = contribution(by_sum(n["hidden"]), n["reach"])
    real = (n["hidden"] * n.get("gates", torch.ones(1)))[0, :, 0]
    bias = n["ffn_out"][0, :, 0] - real @ down
    for m in (9, 21, 30, 45):
        keep = torch.zeros_like(weight[0], dtype=torch.bool)
        keep[weight[0].argsort(descending=True)[:m]] = True
        x = torch.where(keep, real, real.mean(0))
        said = predict(p, c, {"ffn_out": lambda out: (x @ down + bias)[None, :, None]})
        share = (said[0, :, 0] == SUM).double().mean().item()
        assert _kept_accuracy(p, c, n, weight, [m])[0, 0].item() == pytest.approx(share, abs=3e-4)
    assert weight.shape[1] == 45 or share < .99 <= _kept_accuracy(p, c, n, weight, [180])
    assert math.isnan(neurons_needed(p, c, n, weight, goal=1.1))

def test_enough_suffices_and_one_less_does_not_but_fewer_still_may():
    c = "modadd/ffn-h105-relu"
    n = neurons(clock(), c)
    weight = contribution(by_sum(n["hidden"]), n["reach"])
    found = int(neurons_needed(clock(), c, n, weight, .9))
    less, enough_, few = _kept_accuracy(clock(), c, n, weight, [found - 1, found, 24])[0]
    assert less < .9 <= enough_ and 24 < found and few >= .9 and "upper bound" in neurons_needed.__doc__

def test_principal_components_are_numpys():
    h = torch.randn(1, 500, 6, generator=torch.Generator().manual_seed(5)) * torch.arange(1, 7)
    groups = torch.arange(500) % 10
    means, share = _principal_components(h, groups, 3)
    u, s, vt = np.linalg.svd((h[0] - h[0].mean(0)).double().numpy(), full_matrices=False)
    assert np.allclose(share[0], s[:3] ** 2 / (s**2).sum(), atol=1e-5)
    for k in range(3):
        slow = [(u[groups == g, k] * s[k]).mean() for g in range(10)]
        assert np.allclose(means[0, :, k], slow, atol=1e-4) or np.allclose(-means[0, :, k], slow, atol=1e-4)

# ---- what may and may not move a number

def measures(p, c):
    n = neurons(p, c)
    means = by_sum(n["hidden"])
    share, weight = concentration(means), contribution(means, n["reach"])
    return {"paper": concentration(means, "paper").mean().item(), "weighted": weighted_mean(share, weight).item(),
            "live": _live_mean(share, weight, 1e-6)[0].item()}

def test_rescaling_a_neuron_does_not_change_what_it_contributes():
    p, c = init("modadd/glu-h16-gelu", generators(6)), "modadd/glu-h16-gelu"
    scale = torch.logspace(-2, 2, 16)
    q = p | {"W_up": p["W_up"] * scale, "W_down": p["W_down"] / scale[:, None]}
    assert measures(q, c)["weighted"] == pytest.approx(measures(p, c)["weighted"], abs=1e-4)

def test_random_neurons_keep_lengths_and_everything_else():
    p = init("add7/glu-h16-silu", generators(1, 2))
    q = random_neurons(p, [1, 2])
    for k in ("W_up", "W_gate"):
        assert torch.allclose(q[k].norm(dim=-2), p[k].norm(dim=-2), atol=1e-5) and (q[k] - p[k]).abs().max() > .01
        turned = q[k] / q[k].norm(dim=-2, keepdim=True)
        assert (turned[0] - turned[1]).abs().max() > .1
    assert ((q["W_up"] / q["W_up"].norm(dim=-2, keepdim=True)) - turned).abs().max() > .1        # `turned`: the gate
    assert all(q[k] is p[k] for k in p if k not in ("W_up", "W_gate"))
    # one draw for both is one null
    with pytest.raises(ValueError, match="expected 2 seeds, one a member of the population; got 1"):
        random_neurons(p, [1])

def test_key_frequencies_are_the_fewest_that_hold_the_share():
    share = torch.tensor([[.05, .5, .05, .4], [1., 0, 0, 0]])
    assert key_frequencies(share, .85) == [[2, 4], [1]] and key_frequencies(share, .4) == [[2], [1]]

def test_live_counts_a_threshold_of_each_seeds_own_largest():
    values, weight = torch.tensor([[1., 2, 3], [4, 5, 6]]), torch.tensor([[1., .1, .001], [100, 1, 0]])
    mean, share = _live_mean(values, weight, .01)
    assert mean.tolist() == [1.5, 4] and share.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert weighted_mean(torch.tensor([[1., math.nan]]), torch.tensor([[2., 0]])).tolist() == [1]

# ---- rows

@pytest.mark.parametrize("c", ["modadd/moe_glu-e4k1-h16-gelu", "add7/moe_glu-e4k1-h16-silu", "add7/ffn-h16-silu"])
def test_rows_are_unique_lean_and_the_same_for_a_seed_alone(c):
    p = init(c, generators(1, 2))
    both = _fourier_rows(p, c, [1, 2], rule="init", step=[100, 300])
    assert both.groupby("seed")["step"].unique().map(list).to_dict() == {1: [100], 2: [300]}
    key = ["edit", "site", "unit", "position", "metric"]
    assert not both.duplicated(["seed", *key]).any() and len(both) <= 2 * 210
    assert both[~both["metric"].isin(["neurons_for_99", "concentration_routed_paper"])]["value"].notna().all()
    alone = _fourier_rows({k: v[1:] for k, v in p.items()}, c, [2], rule="init")
    fixed = ~both["unit"].str.startswith("f")
    merged = both[fixed].query("seed == 2").merge(alone, on=key)
    assert len(merged) == (fixed & (both["seed"] == 2)).sum()
    assert np.allclose(merged["value_x"], merged["value_y"], atol=1e-3, equal_nan=True)

def test_rows_say_what_the_functions_say():
    p, c = bilinear_clock("modadd/glu-h20-linear", freqs=(3, 14), apart=True), "modadd/glu-h20-linear"
    table = _fourier_rows(p, c, [5]).query("edit == 'none' and (unit == '' or metric == 'frequency_share')")
    value = table.set_index(["site", "unit", "metric"])["value"]
    assert value["hidden", "", "concentration_paper"] == pytest.approx(.5 * 8 / 20, abs=1e-3)
    for site, metric, v in [("hidden", "dead_share_paper", 12 / 20), ("hidden", "concentration_weighted", 1),
                            ("hidden", "wave_share", 1), ("gate", "wave_share", 1), ("up", "wave_share", 1),
                            ("hidden", "neurons_for_99", 8), ("logits", "key_count", 2),
                            ("ffn_out", "pc_variance_10", 1)]:
        assert value[site, "", metric] == pytest.approx(v, abs=1e-3), (site, metric)
    assert value["logits", "f14", "frequency_share"] == pytest.approx(.5, abs=1e-3)

@pytest.mark.parametrize("c", ["modadd/ffn-h4-gelu+d32", "modadd/moe-e1k1-h4-gelu+d32", "modadd/glu-h4-gelu+norm+d32"])
def test_a_layer_of_fewer_than_six_neurons_has_as_many_components_as_neurons(c):
    table = _fourier_rows(init(c, generators(0)), c, [0]).query("metric == 'pc_concentration_paper' and edit == 'none'")
    assert table.groupby("site")["unit"].nunique().to_dict() == {"hidden": 4, "ffn_out": 6}

def test_what_needs_pairs_or_a_circle_is_refused_with_the_reason():
    c = "add7/ffn-h16-silu"
    p = init(c, generators(0))
    n = neurons(p, c)
    refused = [(lambda: _wave_share(n["hidden"][:, :, 0]), r"all p² pairs \(a, b\); got 1,000 inputs"),
               (lambda: _kept_accuracy(p, c, n, torch.ones(1, 16), [1]), "several answers; fix"),
               (lambda: neurons_needed(p, c, n, torch.ones(1, 16), .9), "several answers; fix"),
               (lambda: _fourier_rows({}, "modadd/no_ffn", [0]), "fourier: expected one layer with an FFN"),
               (lambda: _fourier_rows({}, "modadd/ffn-h16-gelu+L2", [0]), "fourier: expected one layer with an FFN")]
    for call, says in refused:
        with pytest.raises(ValueError, match=says): call()

def test_random_neurons_see_the_same_inputs_and_answer_with_what_they_write():
    c = "modadd/moe_glu-e4k1-h16-gelu"
    p = init(c, generators(4))
    q, resid = random_neurons(p, [4]), neurons(p, c)["resid_mid"]
    n = neurons(q, c, resid)
    whole = forward(q, task.tokens, c, edits={"resid_mid": lambda x: resid.expand_as(x)}, read_only=True)
    assert torch.allclose(n["logits"], whole, atol=1e-4)

