"""The bilinear tensor against its materialised form, plain loops over pairs and permuted weights."""
import math

import pytest
import torch

from moe_redistribution.instruments.bilinear import (FACTOR_NULLS, READERS, _bilinear_rows, _factors, _random_tables,
                                                     _readers, _redrawn_factors, _rotation, scores, _shares, _tensor,
                                                     _token_power, _top_singular)
from moe_redistribution.models.clocks import bilinear_clock
from moe_redistribution.tasks.task import P, get_task
from moe_redistribution.instruments.rows import ROW_COLUMNS
from moe_redistribution.instruments.trace import trace
from toys import untrained

SMALL = {"glu": "modadd/glu-h24-gelu+d32", "moe_glu": "modadd/moe_glu-e4k1-h48-silu+d32"}
each_variant = pytest.mark.parametrize("name", SMALL.values(), ids=SMALL)
LINEAR = "modadd/glu-h64-linear"
near = lambda a, b, eps=1e-9: torch.testing.assert_close(a, b, rtol=eps, atol=eps)

def tables(gate, mix, up): return torch.einsum("...jm,...mk,...lm->...kjl", gate, mix, up)

# ------------------------------------------------------------------------------------------------- tensor and its SVD

@each_variant
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_svd_through_w_by_w_products_is_the_svd_of_the_unfolded_tensor(name, symmetric):
    params = untrained(name)
    T = _tensor(params, name)
    if symmetric: T = (T + T.mT) / 2
    gate, up, down = _factors(params, name)
    strength, mix = _top_singular(gate, up, down, 6, symmetric)
    U, S, Vh = torch.linalg.svd(T.flatten(3), full_matrices=False)
    near(strength, S[..., :6], 1e-8)
    V = tables(gate, mix, up)
    if symmetric: V = (V + V.mT) / 2
    near((V.flatten(3) * Vh[:, :, :6]).sum(-1).abs(), torch.ones(2, T.shape[1], 6).double(), 1e-6)

def test_tables_that_do_not_exist_are_nan_and_not_noise():
    params = untrained("modadd/glu-h24-gelu+d32")
    gate, up, down = _factors(params, "modadd/glu-h24-gelu+d32")
    down[..., 3:, :] = 0                                                        # three units are left
    strength, mix = _top_singular(gate, up, down, 6)
    assert mix[..., :3].isfinite().all() and mix[..., 3:].isnan().all()

# ------------------------------------------------------------------------------------------------------ token tables

def by_loops(V, E_a, E_b):
    "Concentration as printed and share of the sum of one table, pair by pair, as App. B writes it."
    M = [[(E_a[a] @ V @ E_b[b] + E_b[b] @ V @ E_a[a]).item() for b in range(P)] for a in range(P)]
    signal = torch.tensor([sum(M[a][(s - a) % P] for a in range(P)) / P for s in range(P)], dtype=torch.double)
    S = torch.fft.fft(signal).abs().square()[1:]
    M = torch.tensor(M, dtype=torch.double)
    M = M - M.mean(0, keepdim=True) - M.mean(1, keepdim=True) + M.mean()
    waves = torch.fft.fft2(M).abs().square()
    on_sum = sum(waves[f, f] for f in range(1, P))                              # e^{2πif(a + b)/p}
    return (S.max() / S.sum()).item(), (on_sum / waves.sum()).item()

@pytest.mark.parametrize("through", READERS)
def test_shares_of_a_table_are_those_of_plain_loops_over_pairs(through):
    name = "modadd/glu-h24-gelu+d32"
    params = untrained(name, [0])
    own, (xa, xb) = _factors(params, name), _readers(params, name, through)
    mix = _top_singular(*own, 2)[1]
    one_wave, on_sum = _shares(*_token_power(*own[:2], mix, (xa, xb)))
    V = tables(own[0], mix, own[1])[0, 0, 1]
    want = by_loops(V, xa[0, 0], xb[0, 0])
    assert math.isclose(one_wave[0, 0, 1] / 2, want[0], rel_tol=1e-9)
    assert math.isclose(on_sum[0, 0, 1], want[1], rel_tol=1e-9)

@each_variant
def test_the_whole_share_is_that_of_ffn_outputs_and_logits_over_all_pairs(name):
    "What the layer would write for x_a + x_b, without its activation, less what one of them alone makes it write."
    params = untrained(name, [0])
    gate, up, down = _factors(params, name)
    xa, xb = _readers(params, name, "attention")
    unit = lambda x, w: x[0] @ w[0]                                                        # (e, p, w)
    pairs = (torch.einsum("eam,ebm->eabm", unit(xa, gate), unit(xb, up))
             + torch.einsum("eam,ebm->eabm", unit(xa, up), unit(xb, gate))) @ down[0][:, None]
    logits = pairs @ params["W_U"][0].double()
    got = scores(gate, up, down, {"attention": (xa, xb)}, params["W_U"])["attention"]
    for metric, M in (("sum_share", pairs), ("sum_share_logits", logits - logits.mean(-1, keepdim=True))):
        M = M - M.mean(1, keepdim=True) - M.mean(2, keepdim=True) + M.mean((1, 2), keepdim=True)
        a, s = torch.arange(P), torch.arange(P)[:, None]
        by_sum = M[:, a, (s - a) % P].mean(2)                                               # (e, p, d)
        want = (P * by_sum.square().sum((1, 2)) / M.square().sum((1, 2, 3))).mean()
        assert math.isclose(got[metric].item(), want.item(), rel_tol=1e-6), metric

@pytest.mark.parametrize("name", [SMALL["glu"], LINEAR], ids=["uniform", "one head each"])
def test_what_attention_brings_is_what_stands_in_the_residual_stream(name):
    "With queries of zero, or heads that look at a and at b whatever they hold, the mean pattern is that of each pair."
    params = bilinear_clock(apart=True) if name == LINEAR else untrained(name, [0])
    if name != LINEAR: params["W_Q"] = torch.zeros_like(params["W_Q"])
    xa, xb = _readers(params, name, "attention")
    seen = trace(params, get_task("modadd").tokens[[0, 5 * P, 7]], name)["resid_mid"][0, :, 2].double()  # 0+0, 5+0, 0+7
    near(seen[1] - seen[0], xa[0, 0, 5] - xa[0, 0, 0], 1e-5)
    near(seen[2] - seen[0], xb[0, 0, 7] - xb[0, 0, 0], 1e-5)

def test_relabelling_numbers_by_a_unit_of_the_circle_changes_nothing():
    "n → 5n sends waves to waves and sums to sums."
    params = untrained(SMALL["moe_glu"])
    gate, up, down = _factors(params, SMALL["moe_glu"])
    E = params["W_E"][:, None, :P].double()
    one = scores(gate, up, down, {"e": (E, E)}, params["W_U"])["e"]
    other = E[:, :, torch.arange(P) * 5 % P]
    two = scores(gate, up, down, {"e": (other, other)}, params["W_U"])["e"]
    for n in one: near(one[n], two[n])

# ------------------------------------------------------------------------------------------------------------- nulls

def test_a_random_table_through_random_tables_is_a_table_of_one_unit_per_dimension():
    read = [torch.randn(1, 1, P, 32, dtype=torch.double, generator=torch.Generator().manual_seed(s)) for s in (0, 1)]
    got = _random_tables(read, 3, torch.Generator().manual_seed(2))
    V = torch.randn(1, 1, 3, 32, 32, dtype=torch.double, generator=torch.Generator().manual_seed(2))[0, 0, 1]
    eye = torch.eye(32, dtype=torch.double)[None, None]
    want = _shares(*_token_power(eye, V.mT[None, None], torch.ones(1, 1, 32, 1).double(), read))
    near(got[0][0, 0, 1], want[0][0, 0, 0])
    near(got[1][0, 0, 1], want[1][0, 0, 0])

def test_nulls_keep_what_they_should_and_nothing_more():
    params, g = untrained(SMALL["moe_glu"]), torch.Generator().manual_seed(0)
    gate, up, down = _factors(params, SMALL["moe_glu"])
    same_gate, paired, same_down = _redrawn_factors(gate, up, down, SMALL["moe_glu"], "shuffled", g)
    assert torch.equal(same_gate, gate) and torch.equal(same_down, down) and not torch.equal(paired, up)
    near(paired.norm(dim=2).sort(-1).values, up.norm(dim=2).sort(-1).values)
    turned = _redrawn_factors(gate, up, down, SMALL["moe_glu"], "rotated", g)
    near(_top_singular(*turned, 5)[0], _top_singular(gate, up, down, 5)[0], 1e-7)
    near(turned[0].mT @ turned[1], gate.mT @ up)                                           # both readings turn together
    assert not torch.allclose(turned[0], gate, atol=.1)
    Q = _rotation((2, 3, 8), g)
    near(Q @ Q.mT, torch.eye(8).double().expand(2, 3, 8, 8))
    fresh = _redrawn_factors(gate, up, down, SMALL["moe_glu"], "untrained", g)
    assert all(x.shape == y.shape for x, y in zip(fresh, (gate, up, down))) and fresh[0].abs().max() <= 32**-.5

# -------------------------------------------------------------------------------------------------------------- rows

@each_variant
def test_rows_of_a_seed_do_not_depend_on_its_company(name):
    params = untrained(name, range(3))
    whole = _bilinear_rows(params, name, [5, 6, 7], draws=2, rule="final")
    alone = _bilinear_rows({n: v[1:2] for n, v in params.items()}, name, [6], draws=2, rule="final")
    pick = lambda f: f[(f["seed"] == 6) & (f["edit"] == "none")].reset_index(drop=True)
    assert list(whole.columns) == list(ROW_COLUMNS) and len(whole) <= 3 * 200
    torch.testing.assert_close(torch.tensor(pick(whole)["value"]), torch.tensor(pick(alone)["value"]),
                               rtol=1e-6, atol=1e-9)

def test_nulls_of_two_seeds_are_two_draws_and_those_of_one_seed_are_the_same():
    one = untrained(SMALL["glu"], [0])
    twice = {n: torch.cat([v, v]) for n, v in one.items()}
    def null(seeds):
        frame = _bilinear_rows(twice, SMALL["glu"], seeds, draws=2).query("edit == 'rotated' and metric == 'sum_share'")
        return frame.pivot(index="site", columns="seed", values="value")
    a, b = null([5, 6]), null([6, 7])
    assert a.loc["attention", 5] != a.loc["attention", 6] == pytest.approx(b.loc["attention", 6], rel=1e-6)

def test_each_number_has_its_nulls_beside_it():
    frame = _bilinear_rows(untrained(SMALL["glu"]), SMALL["glu"], [0, 1], draws=3)
    for metric in frame.query("edit == 'none'")["metric"].unique():
        for suffix in ("", "_sd", "_p"):
            beside = frame[(frame["metric"] == metric + suffix) & (frame["edit"] != "none")]
            assert len(beside) == 2 * len(FACTOR_NULLS) * len(READERS)
    share = frame[frame["metric"].str.endswith("_p")]["value"]
    assert share.between(.25, 1).all()                                                   # of 1 + 3 draws
    assert frame["value"].notna().all()

@pytest.mark.parametrize("call, says", [
    (lambda p: _bilinear_rows(untrained("modadd/glu-h24-gelu+norm", [0]), "modadd/glu-h24-gelu+norm", [0]), "without norm"),
    (lambda p: _bilinear_rows(p, SMALL["glu"], [0], draws=0), "one draw or more of each null; got 0"),
    (lambda p: _readers(p, SMALL["glu"], "attn"), "nearest: 'attention'"),
    (lambda p: _redrawn_factors(*_factors(p, SMALL["glu"]), SMALL["glu"], "shuffle", torch.Generator()), "'shuffled'")])
def test_what_has_no_tensor_of_a_circle_and_unknown_words_are_refused(call, says):
    with pytest.raises(ValueError, match=says): call(untrained(SMALL["glu"], [0]))

