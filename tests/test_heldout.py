"""Held-out inputs: what a rule leaves out, counted independently of the masks that training uses."""
import numpy as np
import pytest
import torch

from moe_redistribution.instruments.ablation import ablate
from moe_redistribution.tasks.data import training_pool
from moe_redistribution.instruments.heldout import generalisation, heldout_rows, parts_of, seen_before
from moe_redistribution.models.population import init, predict
from moe_redistribution.models.planted import carry_by_experts
from moe_redistribution.tasks.task import get_task

T = get_task("add7")
BY_HAND = {"carry2": [n for n in range(1000) if n % 100 >= 93], "ones3": [n for n in range(1000) if n % 10 >= 3],
           "tens9": [n for n in range(1000) if n // 10 % 10 == 9]}

@pytest.mark.parametrize("rule", BY_HAND)
def test_parts_are_those_counted_by_hand_and_the_rest_is_what_training_draws_from(rule):
    masks = {name: set(m.nonzero()[:, 0].tolist()) for name, m in parts_of(T, rule).items()}
    assert masks["held"] == set(BY_HAND[rule]) and masks["trained"] == set(training_pool(T, rule).tolist())
    assert masks["trained"] | masks["held"] == set(range(1000)) and not masks["trained"] & masks["held"]
    plain = {n for n in BY_HAND[rule] if n % 10 < 3}
    assert masks.get("held, no carry", set()) == plain and masks["held, carry"] == set(BY_HAND[rule]) - plain

@pytest.mark.parametrize("rule", BY_HAND)
def test_an_example_has_been_seen_if_each_of_its_tokens_has_at_its_place(rule):
    pool, seen = training_pool(T, rule).tolist(), seen_before(T, rule)
    assert seen[pool].all()
    for n in BY_HAND[rule][::7]:
        tokens = T.tokens[n].tolist()
        assert bool(seen[n]) == all(any(T.tokens[m][i] == tok for m in pool) for i, tok in enumerate(tokens))

def test_scores_are_means_over_exactly_the_examples_of_a_part():
    name = "add7/ffn-h8-silu+hold_tens9"
    params = init(name, [torch.Generator().manual_seed(s) for s in range(2)])
    params["W_pos"][:, 3:] = 0
    right = (predict(params, name) == T.targets).numpy()
    table = heldout_rows(params, name, [1, 2], rule="init")
    for row in table.query("split == 'held' and metric == 'digits' and position == 'o1'").itertuples():
        assert np.isclose(row.value, np.mean([right[row.seed - 1, n, 1] for n in BY_HAND["tens9"]]))
    assert set(table["split"]) == {"trained", "held", "held, carry", "held, no carry"}
    held = table.query("metric == 'digits' and position == 'o0-o3'").set_index(["split", "seed"])
    for seed in (1, 2):
        parts = [held.loc[(s, seed)] for s in ("held, carry", "held, no carry")]
        whole = held.loc[("held", seed)]
        assert np.isclose(whole["value"],
                          np.average([p["value"] for p in parts], weights=[p["n_examples"] for p in parts]))

@pytest.mark.parametrize("edits", [{"ffn_out": "zero"}, {"E1": "zero", "H2": "mean"}])
def test_parts_are_taken_out_by_the_names_that_ablation_gives_them(edits):
    name, params = "add7/moe-e4k1-h64-relu+hold_tens9", carry_by_experts()
    right, got = ablate(params, name, edits), generalisation(params, name, edits)
    held = right[0, BY_HAND["tens9"]].all(-1).double().mean()
    assert got["held"][0] == pytest.approx(held.item()) and (got != generalisation(params, name)).any(axis=None)

