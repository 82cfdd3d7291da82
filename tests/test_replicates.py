"""A seed taken apart: the variance split against planted parts and another derivation, and the rows its page stands
on."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from moe_redistribution.evidence import selection
from moe_redistribution.judge import statistics as ev
from moe_redistribution.instruments.rows import ROW_COLUMNS
from moe_redistribution.report.figures import pick
from moe_redistribution.report.pages import Page
from moe_redistribution.studies.sparsity_moves.experiments import REPLICATES, TWINS

CONDITIONS = ["add7/ffn-h256-silu", "add7/ffn-h256-silu+ffnlr0.25", "add7/moe-e4k1-h256-silu"]
SOURCES = list(ev.VARIANCE_SOURCES)
CELLS = [100 * i + j for i in range(1, 9) for j in range(1, 9)]
shapes = st.tuples(*[st.integers(2, 5)] * 3)

def planted(rng, sds, I, J, R):
    shapes = (I, 1, 1), (1, J, 1), (I, J, 1), (I, J, R)
    return sum(rng.normal(0, sd, shape) for sd, shape in zip(sds, shapes))

def raw(y): return ev.variance_split(y, n_resamples=2)["raw"][:4].to_numpy()

# ------------------------------------------------------------------------------------------------------------ the split

@pytest.mark.parametrize("k", range(4))
def test_what_is_planted_in_one_source_is_found_there_and_nowhere_else(k):
    y = planted(np.random.default_rng(k), np.eye(4)[k], 60, 60, 2)
    got = raw(y)
    if k < 2:
        assert (np.delete(got, k) == pytest.approx(0, abs=1e-12)
                and got[k] == pytest.approx(y[:, :, 0].mean(1 - k).var(ddof=1)))
    else: assert got == pytest.approx(np.eye(4)[k], abs=.1)

def by_regression(y):
    """Mean squares as differences between residual sums of squares of nested regressions, then their expectations
    solved."""
    I, J, R = y.shape
    i, j, _ = (x.ravel() for x in np.indices(y.shape))
    one, rows, columns, all_cells = np.ones((y.size, 1)), np.eye(I)[i], np.eye(J)[j], np.eye(I * J)[i * J + j]
    rss = lambda *parts: np.sum((y.ravel() - (X := np.hstack(parts)) @ np.linalg.lstsq(X, y.ravel(), rcond=None)[0])**2)
    both, full = rss(one, rows, columns), rss(all_cells)
    ms = [(rss(one, columns) - both) / (I - 1), (rss(one, rows) - both) / (J - 1), (both - full) / ((I - 1) * (J - 1)),
          full / (I * J * (R - 1))]
    return np.linalg.solve([[J * R, 0, R, 1], [0, I * R, R, 1], [0, 0, R, 1], [0, 0, 0, 1]], ms)

@given(shapes, st.integers(0, 99))
@settings(max_examples=25)
def test_the_split_is_what_nested_regressions_give(shape, seed):
    y = planted(np.random.default_rng(seed), [3, 1, 2, 1], *shape)
    assert raw(y) == pytest.approx(by_regression(y), abs=1e-9)

@given(shapes, st.integers(0, 99), st.floats(.1, 9), st.floats(-50, 50))
@settings(max_examples=25)
def test_order_and_origin_do_not_matter_the_unit_does_and_turning_the_design_turns_the_answer(shape, seed,
    scale, shift):
    rng = np.random.default_rng(seed)
    y = planted(rng, [3, 1, 2, 1], *shape)
    mixed = y[rng.permutation(shape[0])][:, rng.permutation(shape[1])][..., rng.permutation(shape[2])]
    assert raw(scale * mixed + shift) == pytest.approx(scale**2 * raw(y), rel=1e-6, abs=1e-6)
    assert raw(y.swapaxes(0, 1)) == pytest.approx(raw(y)[[1, 0, 2, 3]], abs=1e-9)

def test_below_zero_is_shown_as_zero_kept_as_raw_and_shares_add_up():
    y = planted(np.random.default_rng(3), [0, 0, 0, 5], 8, 8, 2)
    t = ev.variance_split(y)
    assert list(t.index) == [*SOURCES, "total"] and (t["raw"][:4] < 0).any()
    assert (t["variance"][:4].tolist() == pytest.approx(np.maximum(t["raw"][:4], 0))
            and t["share"][:4].sum() == pytest.approx(1))
    assert (t.loc["total", "raw"] == pytest.approx(t["raw"][:4].sum()) and (t["lo"] <= t["hi"]).all()
            and (t["lo"] >= 0).all())
    assert ev.variance_split(y).equals(t)

def test_drawn_designs_are_centred_on_the_estimate():
    y, rng, n = planted(np.random.default_rng(5), [6, 3, 4, 2], 8, 8, 2), np.random.default_rng(1), 40_000
    drawn = y[rng.integers(8, size=(n, 8, 1)), rng.integers(8, size=(n, 1, 8))]
    of = ev._variance_components
    assert of(drawn, drawn=True).mean(0) == pytest.approx(of(y), rel=.03, abs=.2)
    assert abs(of(drawn).mean(0) - of(y))[2] > 1

def test_a_constant_has_no_variance_and_no_share():
    t = ev.variance_split(np.full((3, 3, 2), .7))
    assert (t[["raw", "variance", "share"]].abs() < 1e-6).all(axis=None)

@pytest.mark.parametrize("y", [np.zeros((8, 8)), np.zeros((1, 8, 2)), np.full((2, 2, 2), np.nan)],
                         ids=["no repetitions", "one init", "nan"])
def test_what_cannot_be_split_is_refused(y):
    with pytest.raises(ValueError, match="expected finite .* got shape .* fix: "): ev.variance_split(y)

# ------------------------------------------------------------------------------------------------------------- the rows

@pytest.fixture(scope="module")
def rows():
    return Page(streams=["crossed"], ablation=REPLICATES.names,
                runs=TWINS.names).rows.query("condition.str.startswith('add7')")

def test_rows_are_whole_answers_of_the_crossed_stream_in_the_schema(rows):
    assert list(rows) == [*ROW_COLUMNS, "instrument"] and set(rows["condition"]) == set(CONDITIONS)
    assert set(rows["stream"]) == {"crossed"} and set(rows["rule"]) == {"first1000"} and set(rows["stratum"]) == {"all"}
    assert set(rows["position"]) == {"o0-o3", "all"} and not rows["value"].isna().any()
    assert not rows.drop(columns=["value", "n_examples", "step"]).duplicated().any()

@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize("edit", ["zero", "mean"])
def test_the_design_is_complete_and_selected_models_are_right_on_every_input(rows, name, edit):
    whole = pick(rows, condition=name, rule="first1000", site="none", metric="exact",
                 position="all").set_index("seed")["value"]
    got = pick(rows, condition=name, rule="first1000", site="ffn_out", edit=edit).set_index("seed")["value"]
    for r in (0, 2): assert {10_000 * r + c for c in CELLS} <= set(got.index) == set(whole.index)
    assert (whole == 1).all() and got.index.is_unique

def test_company_and_process_change_nothing_and_other_products_change_the_mixture_of_experts(rows):
    def repeated(name, r):
        values = pick(rows, condition=name, rule="first1000", site="ffn_out",
                      edit="mean").set_index("seed")[["value", "step"]]
        pairs = [(c, 10_000 * r + c) for c in CELLS if 10_000 * r + c in values.index]
        return sum((values.loc[a] == values.loc[b]).all() for a, b in pairs), len(pairs)
    regrouped = [repeated(n, 1) for n in CONDITIONS]
    assert all(same == n for same, n in regrouped) and sum(n for _, n in regrouped) >= 50
    assert repeated(CONDITIONS[2], 2)[0] < 32

@pytest.mark.parametrize("name, most", [(CONDITIONS[0], .01), (CONDITIONS[2], .06)])
def test_a_cell_of_equal_numbers_is_the_paired_seed_up_to_arithmetic(rows, name, most):
    paired = pick(selection.recorded_rows(name), stream="paired", rule="first1000", site="ffn_out",
                  edit="mean").set_index("seed")["value"]
    crossed = pick(rows, condition=name, site="ffn_out", edit="mean").set_index("seed")["value"]
    gap = lambda i, j: np.sqrt(np.mean([(crossed[100 * i(k) + j(k)] - paired[k])**2 for k in range(1, 9)]))
    assert gap(lambda k: k, lambda k: k) < most < gap(lambda k: k % 8 + 1, lambda k: k)

@pytest.mark.parametrize("name", TWINS.names)
def test_twins_of_modular_addition_differ_in_their_products_and_begin_alike(name):
    runs = selection.recorded_runs().query("condition == @name and stream == 'crossed'").set_index("seed")
    assert set(runs.index % 10_000) <= set(TWINS.seeds) and set(runs.index // 10_000) <= {0, 3}
    assert set(runs["kernels"][runs.index < 10_000]) <= {""} and set(runs["kernels"][runs.index >= 30_000]) <= {"AVX2"}
    loss = selection.recorded_history(name, "crossed").pivot(index="step", columns="seed", values="loss")
    twins = [(s, s + 30_000) for s in TWINS.seeds if {s, s + 30_000} <= set(loss)]
    assert twins and all(abs(loss[b] / loss[a] - 1).iloc[0] < 1e-3 and not loss[a].dropna().equals(loss[b].dropna())
                         for a, b in twins)
