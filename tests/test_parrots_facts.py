"""What the set-up of companion 002 must not get wrong: each setting is the printed one, and what can be counted is."""
from math import prod

import pytest

from moe_redistribution.evidence.contrasts import comparison
from moe_redistribution.evidence.selection import item_rows
from moe_redistribution.evidence.printed import paper_values
from moe_redistribution.evidence.claims import claims
from moe_redistribution.studies.parrots import facts
from moe_redistribution.studies.parrots.facts import (PARROTS_PAPER, _gpu_days, _grid_parameters, _mean_distance,
                                                      parrots_set_up, pretraining_cost, _training_flops)

NUMBERS = paper_values().query("item.str.startswith('002.')").set_index("id")
LINES = claims().query("item.str.startswith('002.')").set_index("id")
FACTS = LINES[LINES["instrument"] == "parrots_set_up"]
DIFFER = {"shortest_path.004", "phone_book.013", "phone_book.014", "optim_pretrain.009", "fig5.004"}
NEAR = {"shortest_path.009", "optim_pretrain.003", "data_pretrain.001"}         # printed as round numbers

def ours():
    "Every fact as it would be printed, by id without 002."
    known = {n: parrots_set_up(n) for n in PARROTS_PAPER}
    return {i.removeprefix("002."): known[c.condition.partition("/")[2]][c.metric] * c.unit_factor
            for i, c in FACTS.iterrows()}

def leaves(x, path=()):
    "Paths to every number below `x`, a dictionary or a tuple of such."
    inside = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, tuple) else None
    if inside is None: return [path]
    return [p for k, v in inside for p in leaves(v, (*path, k))]

def changed(x, path):
    "`x` with one more, or a tenth more where that is a fraction, at the end of `path`."
    if not path: return x + 1 if x >= 1 else x * 1.1
    k, *rest = path
    if isinstance(x, dict): return x | {k: changed(x[k], rest)}
    return (*x[:k], changed(x[k], rest), *x[k + 1:])

def test_every_number_of_companion_002_has_one_line_that_answers_it_or_says_why_not():
    assert len(NUMBERS) == 114 and sorted(LINES.index) == sorted(NUMBERS.index)
    none = LINES[LINES["aggregate"] == "none"]
    assert len(none) == 33 and (none["note"].str.len() > 15).all() and len(FACTS) == 81
    assert set(zip(FACTS["stream"], FACTS["rule"], FACTS["seeds"], FACTS["n"])) == {("none", "none", "0", 1.0)}

def test_every_setting_is_the_printed_one_to_the_digit():
    wrong = {i: (v, NUMBERS.loc[f"002.{i}", "mean"]) for i, v in ours().items()
             if i not in DIFFER | NEAR and v != pytest.approx(NUMBERS.loc[f"002.{i}", "mean"], rel=1e-9)}
    assert not wrong

def test_no_setting_can_change_unnoticed(monkeypatch):
    "But two: the 159 million are compared below, and so is the width of the MoE with 256 experts."
    before, quiet = ours(), []
    for part, *rest in leaves(PARROTS_PAPER):
        with monkeypatch.context() as m:
            m.setitem(facts.PARROTS_PAPER, part, changed(PARROTS_PAPER[part], rest))
            try: quiet += [(part, *rest)] * (ours() == before)
            except ValueError: pass                             # a graph of a size without an edge probability
    assert quiet == [("pretraining", "more", 0, 0), ("gap", "beyond")]

def test_five_numbers_differ_from_the_print_and_these_are_they():
    found = {r.id.removeprefix("002."): r.verdict for item in NUMBERS["item"].unique()
             for r in comparison(item_rows(item), item).itertuples()}
    assert {i for i, v in found.items() if v == "differs"} == DIFFER
    assert sum(v == "agrees" for v in found.values()) == 81 - len(DIFFER)
    assert PARROTS_PAPER["gap"]["beyond"] == NUMBERS.loc["002.fig5.004", "mean"]

def test_tokens_are_steps_times_batch_times_length():
    printed = [NUMBERS.loc[f"002.optim_pretrain.{i:03}", "mean"] for i in (4, 5, 6)]
    assert parrots_set_up("pretraining")["tokens"] == prod(printed) == pretraining_cost()["tokens"] == 62_914_560_000

def block(d, E, f):
    "Attention, two norms, a router and E experts, or one FFN, by hand."
    return 4 * d * d + 2 * d + d * E + max(E, 1) * 3 * d * f

def test_the_largest_model_is_printed_only_if_an_ffn_is_half_as_wide_as_the_text_says():
    for share, largest, pair in ((1, 4.1e9, 1.7), (.5, 2.1e9, 1.1)):
        total = _grid_parameters("pretraining", share)["total"]
        assert total.max() == 20 * block(1024, 64, int(1024 * share)) == pytest.approx(largest, rel=.01)
        assert total[256, 256] / total[2048, 0] == pytest.approx(pair, abs=.05)

def test_no_moe_of_section_4_has_42_million_active_parameters_nor_a_dense_model_ten_times_as_many():
    sizes = _grid_parameters("models")
    moe, dense = sizes.query("E > 0")["active"], sizes.query("E == 0")["total"]
    assert len(moe) == 8 and len(dense) == 3
    assert moe.max() == 12 * (block(512, 2, 512) + 62 * 512) == parrots_set_up("models")["active"]
    assert moe.max() < .8 * 42e6 and dense.max() < 3 * moe.max()

def test_the_cost_that_the_reasons_name_is_the_cost_that_is_computed():
    cost = pretraining_cost()
    notes = LINES.loc[LINES["note"].str.contains("FLOP"), "note"]
    assert len(notes) == 8
    assert notes.str.contains(f"{cost['flops']:.1e}".replace("+", "")).all()
    assert notes.str.contains(f"{cost['days']:.0f} days", regex=False).all()

def test_a_gpu_at_full_speed_takes_as_many_days_as_arithmetic_says():
    assert _training_flops(3, 5) == 90 and _gpu_days(86_400e12, peak=1e12, share=1) == 1
    assert _gpu_days(1e20) == pytest.approx(1e20 / .3 / 989e12 / 86_400)

def test_shortest_paths_are_as_long_as_the_paper_sets_them_at_every_size():
    far = [_mean_distance(n) for n in PARROTS_PAPER["graphs"]["vertices"]]
    assert len(far) == 7 and all(abs(x - 3.5) < .2 for x in far) and min(far) > 1

def test_a_wrong_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="nearest: 'pretraining'"): parrots_set_up("pre-training")
    with pytest.raises(ValueError, match="nearest: 'models'"): _grid_parameters("model")
