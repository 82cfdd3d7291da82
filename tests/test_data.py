"""Splits, sampled sets and streams against counting by hand: what two seeds share, and what they must not."""
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from moe_redistribution.models.condition import RECIPES
from moe_redistribution.tasks.data import (N_TEST, N_TRAIN, REFRESH, batches, generators,
                                           held_back, _part_seed, histogram_sets, split, unseen_examples)
from moe_redistribution.tasks.task import ALPHABET, LENGTH, counts, get_task, nulls, partition, sample_sequences

ADD7, MODADD, HIST = (get_task(n) for n in ("add7", "modadd", "hist"))
SEEDS = st.integers(0, 5000)

# --- modular addition

def test_a_split_is_the_first_of_a_permutation_by_the_runs_own_seed_and_paired_seeds_do_not_share_it():
    order = torch.randperm(12_769, generator=torch.Generator().manual_seed(42)).tolist()
    assert split(MODADD, 42)[0].tolist() == order[:3830]
    overlap = len(set(split(MODADD, 42)[0].tolist()) & set(split(MODADD, 42, "paired")[0].tolist()))
    assert overlap / 3830 == pytest.approx(.3, abs=.03)

# --- histogram

def exact_shares():
    """Share of tokens with each count, from the sampler's definition in fractions: parts uniform on 1 … what is left −
    1."""
    def expected(n):                                   # expected number of parts of each size in a partition of n
        if n == 1: return Counter({1: Fraction(1)})
        total = Counter()
        for k in range(1, n):
            for size, often in (Counter({k: Fraction(1)}) + expected(n - k)).items(): total[size] += often / (n - 1)
        return total
    return {size: often * size / LENGTH for size, often in expected(LENGTH).items()}

def test_counts_come_as_often_as_the_recursion_says_and_ten_never():
    shares, n = exact_shares(), 6000
    assert sum(shares.values()) == 1 and LENGTH not in shares and float(shares[1]) == pytest.approx(.2, abs=1e-9)
    seen = (counts(sample_sequences(n, np.random.RandomState(5))).flatten().bincount(minlength=LENGTH + 1)[1:]
            / (n * LENGTH))
    for size, share in shares.items(): assert seen[size - 1].item() == pytest.approx(float(share), abs=.012)
    assert nulls(HIST)["most frequent"].mean().item() == pytest.approx(.2, abs=.01)

@given(st.integers(1, 30), SEEDS)
def test_a_partition_adds_up_and_ends_with_one(n, seed):
    parts = partition(n, np.random.RandomState(seed))
    assert sum(parts) == n and parts[-1] == 1 and min(parts) >= 1

def test_letters_are_used_evenly():
    letters = torch.stack([row.unique()[0]
                           for row in sample_sequences(4000, np.random.RandomState(0))]).bincount(minlength=ALPHABET)
    anywhere = sample_sequences(4000, np.random.RandomState(1)).flatten().bincount(minlength=ALPHABET) / 40_000
    assert len(letters) == ALPHABET and (anywhere - 1 / ALPHABET).abs().max() < .006

def test_a_set_is_made_anew_every_fifty_epochs_from_seed_plus_epoch_train_first():
    rs = np.random.RandomState(42 + REFRESH)
    train, test = histogram_sets(42, "authors", REFRESH)
    assert torch.equal(train, sample_sequences(N_TRAIN, rs)) and torch.equal(test, sample_sequences(N_TEST, rs))
    given = list(batches(HIST, [42], "authors", [None], [48], 3, 0))
    assert torch.equal(given[0][0], given[1][0]) and torch.equal(given[2][0][0], train)      # steps 49, 50 | 51

# --- streams

def test_no_two_paired_seeds_or_eras_are_made_from_the_same_number():
    made = [_part_seed(s, "paired", "batches", e) for s in range(1, 129) for e in range(0, 1000, REFRESH)]
    made += [_part_seed(s, "paired", p) for s in range(1, 129) for p in ("weights", "evaluation")]
    assert len(set(made)) == len(made) and len({m % 2**32 for m in made}) == len(made)

def test_batches_have_one_row_a_seed_and_do_not_depend_on_the_company():
    for task in (ADD7, MODADD, HIST):
        gens = lambda *seeds: [generators(s, "paired") for s in seeds]
        together = list(batches(task, [1, 2], "paired", gens(1, 2), [0, 0], 2, 16))
        alone = list(batches(task, [2], "paired", gens(2), [0], 2, 16))
        for (a, b), (c, d) in zip(together, alone): assert torch.equal(a[1], c[0]) and torch.equal(b[1], d[0])

@pytest.mark.parametrize("task", [MODADD, HIST], ids=["modadd", "hist"])
def test_what_is_held_back_was_not_in_the_batches(task):
    tokens, targets = held_back(task, 7, "paired", step=1)
    trained = {tuple(row) for row in next(batches(task, [7], "paired", [None], [0], 1, 0))[0][0].tolist()}
    again = sum(tuple(row) in trained for row in tokens.tolist()) / len(tokens)
    assert again == 0 if task is MODADD else again < .03           # a sequence of two letters may come twice
    assert held_back(ADD7, 7) is None and len(tokens) == len(targets)

# --- what was never trained on

@pytest.mark.audit
def test_an_unseen_sequence_of_the_clean_set_is_in_none_of_the_twenty_sets_and_every_other_in_one():
    trained = {tuple(row) for e in range(0, 1000, REFRESH) for row in histogram_sets(42, epoch=e)[0].tolist()}
    own = [tuple(row) not in trained for row in HIST.tokens.tolist()]
    assert unseen_examples(HIST, 42).tolist() == own and .8 < sum(own) / len(own) < 1
    assert unseen_examples(HIST, 42) is unseen_examples(HIST, 42), "drawn once a process"

def test_a_seed_that_was_trained_for_less_has_seen_less_and_the_default_is_the_whole_schedule():
    short, whole = unseen_examples(HIST, 7, "paired", 100), unseen_examples(HIST, 7, "paired", RECIPES["hist"]["steps"])
    assert (short | ~whole).all() and short.sum() > whole.sum() and torch.equal(whole, unseen_examples(HIST, 7,
                                                                                                       "paired", 1000))

