"""Add-7 against schoolbook addition on strings: sequences, strata, held-out rules, the sampler and the scores."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from moe_redistribution.tasks.data import draw, training_pool
from moe_redistribution.tasks.task import EOS, digits, exact, get_task

ADD7 = get_task("add7")
NUMBERS = [f"{n:03d}" for n in range(1000)]
PROMPTS = st.text("0123456789", min_size=3, max_size=3)

def add_seven(prompt):
    "Schoolbook addition: the four digits of the answer and what was done to each digit, both ones first."
    answer, operations, carry = "", [], 0
    for place, digit in enumerate(prompt[::-1] + "0"):
        operations.append(add := 7 if place == 0 else carry)
        total = int(digit) + add
        answer, carry = answer + str(total)[-1], int(total > 9)
    return answer, [f"+{a}" for a in operations]

@given(PROMPTS)
def test_sequence_is_the_sum_written_ones_first(prompt):
    answer, _ = add_seven(prompt)
    sequence = [*map(int, prompt[::-1]), EOS, *map(int, answer), EOS]
    assert ADD7.tokens[int(prompt)].tolist() == sequence[:-1]                       # the last token is only predicted
    assert ADD7.targets[int(prompt)].tolist() == sequence[4:]

@given(PROMPTS)
def test_every_target_is_the_token_after_the_position_that_is_read(prompt):
    sequence = ADD7.tokens[int(prompt)].tolist() + [EOS]
    assert ADD7.targets[int(prompt)].tolist() == [sequence[position + 1] for position in ADD7.read]
    assert [ADD7.positions[i] for i in ADD7.scored] == ["o0", "o1", "o2", "o3"]    # EOS is read, not scored

@given(PROMPTS)
def test_strata_say_what_addition_did_to_each_digit(prompt):
    row, (_, operations) = ADD7.strata.iloc[int(prompt)], add_seven(prompt)
    assert row["n"] == int(prompt)
    assert [row[f"operation_o{i}"] for i in range(4)] == operations
    assert row["carry"] == operations.count("+1")

RULES = {"carry2": lambda n: add_seven(n)[1].count("+1") >= 2, "ones3": lambda n: n[2] >= "3",
         "tens9": lambda n: n[1] == "9"}

@pytest.mark.parametrize("rule, n_held, n_without_carry", [("carry2", 70, 0), ("ones3", 700, 0), ("tens9", 100, 30)])
def test_a_held_out_rule_holds_out_exactly_what_it_says(rule, n_held, n_without_carry):
    held = {int(n) for n in NUMBERS if RULES[rule](n)}
    assert len(held) == n_held and set(training_pool(ADD7, rule).tolist()) == set(range(1000)) - held
    assert sum("+1" not in add_seven(f"{n:03d}")[1] for n in held) == n_without_carry

@given(rule=st.sampled_from(["", *RULES]), seed=st.integers(0, 2**32), n=st.integers(1, 5), size=st.integers(1, 300))
def test_draw_never_draws_a_held_out_example(rule, seed, n, size):
    drawn = draw(training_pool(ADD7, rule), torch.Generator().manual_seed(seed), n, size)
    assert drawn.shape == (n, size)
    assert not any(rule and RULES[rule](f"{i:03d}") for i in drawn.flatten().tolist())

@pytest.mark.parametrize("rule", ["", *RULES])
def test_draw_reaches_every_example_of_the_pool_equally_often(rule):
    pool = training_pool(ADD7, rule)
    often = draw(pool, torch.Generator().manual_seed(0), 100, 10 * len(pool)).flatten().bincount(minlength=1000)[pool]
    assert (often - 1000).abs().max() < 5 * 1000**.5                                # Poisson: five standard deviations

@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_batches_drawn_together_are_the_batches_drawn_in_turn(seed, sizes):
    "An interval's batches are drawn at once, yet they must be those that the authors' loop would have drawn."
    pool, g, h = training_pool(ADD7), torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    together = draw(pool, g, sum(sizes), 128)
    assert torch.equal(together, torch.cat([draw(pool, h, n, 128) for n in sizes]))
    assert torch.equal(g.get_state(), h.get_state())

@settings(max_examples=50)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=20))
def test_digits_and_exact_are_the_shares_one_counts(hits):
    correct = torch.tensor([hits])                                                  # one seed
    assert digits(correct, ADD7).item() == pytest.approx(sum(sum(h[:4]) for h in hits) / (4 * len(hits)), abs=1e-6)
    assert exact(correct).item() == pytest.approx(sum(all(h) for h in hits) / len(hits), abs=1e-6)

def test_an_unknown_rule_is_refused_with_the_nearest_valid_one():
    with pytest.raises(ValueError, match="expected one of .*; got .*; nearest: 'tens9'; fix: "): training_pool(ADD7, "tens8")
