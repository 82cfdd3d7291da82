"""Names say every choice and read back to the same condition; what cannot be built is refused in one message."""
import re
from dataclasses import fields, replace

import pytest
from hypothesis import assume, given, settings, strategies as st

from moe_redistribution.models.condition import (ACTIVATIONS, OPTIONS, RECIPES, ROUTED_ONLY, VARIANTS, Choices,
                                                 Condition, condition, defaults)
from moe_redistribution.studies.sparsity_moves.arms import LABELS
from moe_redistribution.training.groups import check_work
from moe_redistribution.tasks.task import get_task

FLOAT = st.floats(0, allow_infinity=False).map(abs)                                 # no -0.0
VALUES = {"router": st.sampled_from(["frozen", "tokens", "inputs", "shuffled", "redrawn"]), "gate": st.just("switch"),
          "norm": st.just(True), "freeze": st.sampled_from(["attn", "ffn"]), "n_layers": st.integers(1, 9),
          **dict.fromkeys(["balance", "ffn_lr", "attn_lr", "weight_decay", "clip"], FLOAT),
          "drop": st.floats(0, 1, exclude_max=True), "part": st.floats(0, 1, exclude_min=True),
          "then": FLOAT.filter(bool), "also": st.sampled_from(["attn", "embed"]), "forget": st.just(True)}


@st.composite
def conditions(draw):
    "Any condition that the grammar can say."
    task, ffn = draw(st.sampled_from(list(RECIPES))), draw(st.sampled_from(VARIANTS))
    recipe, routed = RECIPES[task], ffn in ("moe", "moe_glu")
    resets = st.integers(0, recipe["steps"] - 1)
    values = VALUES | {"reset": resets, "d_model": st.integers(1, 9).map(lambda n: n * recipe["d_head"]),
                       "hold": st.sampled_from(list(get_task(task).rules) or [""])}
    assert set(values) == set(OPTIONS)                                              # a new option needs a strategy here
    own = [o for o in OPTIONS if (routed or o not in ROUTED_ONLY)
           and (ffn != "no_ffn" or o not in ("reset", "part", "also", "then", "forget", "ffn_lr"))]
    chosen = {o: draw(values[o]) for o in draw(st.lists(st.sampled_from(own), unique=True))}
    if ffn == "no_ffn" and chosen.get("freeze") == "ffn": chosen["freeze"] = "attn"
    # it has no question before the answers
    if task == "hist" and chosen.get("router") in ("inputs", "shuffled", "redrawn"): chosen["router"] = "tokens"
    if {"part", "also", "then", "forget"} & set(chosen): chosen["reset"] = 1 + draw(st.integers(0, recipe["steps"] - 2))
    if chosen.get("ffn_lr", 1) in (0, chosen.get("then")): chosen.pop("then", 0)  # the same rate as before is no option
    E = draw(st.integers(1, 16)) if routed else 1
    width = E * draw(st.integers(1, 300)) if ffn != "no_ffn" else 0
    rest = defaults(task, ffn, chosen.get("freeze", "")) | chosen
    return Condition(task=task, ffn=ffn, n_experts=E, top_k=draw(st.integers(1, E)), d_mlp=width, **rest,
                     activation="none" if ffn == "no_ffn" else draw(st.sampled_from(ACTIVATIONS)),
                     n_heads=rest["d_model"] // recipe["d_head"], lr=recipe["lr"], batch=recipe["batch"])


@given(conditions())
def test_a_name_reads_back_to_its_condition(c):
    assert condition(str(c)) == c and condition(str(c)).key == c.key


@given(conditions(), st.randoms(use_true_random=False))
def test_options_may_come_in_any_order_and_the_name_is_one(c, random):
    head, *options = c.name.split("+")
    random.shuffle(options)
    assert condition("+".join([head, *options])).name == c.name


@settings(max_examples=200)
@given(conditions(), conditions(), st.sampled_from(list(OPTIONS)))
def test_two_conditions_share_name_and_key_only_if_every_choice_is_the_same(c, other, field):
    assume(field not in ROUTED_ONLY or c.routed == other.routed)                    # a dense model has none of these
    near = replace(c, **{field: getattr(other, field)})                             # differs in one choice or in none
    assert (near == c) == (near.name == c.name) == (near.key == c.key)


def test_no_choice_has_a_default_that_could_be_guessed_later():
    with pytest.raises(TypeError, match=f"missing {len(fields(Choices))} required"): Condition()


def test_the_papers_conditions_are_written_as_their_names_say():
    assert [condition(n).name for n in LABELS] == list(LABELS)


# ----------------------------------------------------------------------------------------------------------- refusals

def refusal(call, *args):
    "The message of the ValueError that `call` raises: one line with what was expected, what was got and one fix."
    with pytest.raises(ValueError) as caught: call(*args)
    message = str(caught.value)
    assert "\n" not in message and message.count("fix: ") == 1
    assert message.index("expected") < message.index("got") < message.index("fix: ")
    return message


MISSPELT = {"add8/ffn-h256-silu": "add7", "add7/fnn-h256-silu": "ffn", "add7/meo_glu-e4k1-h256-silu": "moe_glu",
            "add7/ffn-h256-sliu": "silu", "add7/moe-e4k1-h256-silu+frozn": "+frozen",
            "add7/ffn-h256-silu+hold_tens8": "tens9", "add7/ffn-h256-silu+freeze_atn": "+freeze_attn",
            "add7/ffn-h256-silu+ffnrl4": "+ffnlr0.25", "add7/moe-e4k1-h256-silu+shufled": "+shuffled",
            "add7/moe-e4k1-h256-silu+redrawn0.5": "+redrawn"}


@pytest.mark.parametrize("name, near", MISSPELT.items())
def test_a_misspelt_word_is_refused_with_the_nearest_one(name, near):
    assert f"nearest: {near!r}" in refusal(condition, name)


IMPOSSIBLE = {"add7/moe-e4k5-h256-silu": ["-e4k4"], "add7/moe-e4k0-h256-silu": ["-e4k1"],                   # 1 ≤ k ≤ E
              "add7/moe-e0k0-h256-silu": ["-e4k1"],
              "add7/moe-e4k1-h254-silu": ["-h252", "-h256"], "add7/moe_glu-e4k1-h170-silu": ["-h168", "-h172"],
              "add7/moe-e8k1-h4-silu": ["-h8"], "add7/moe-e3k1-h0-silu": ["-h192"], "add7/ffn-h0-silu": ["-h64"],
              "add7/ffn-h256-silu+d65": ["+d64", "+d80"], "add7/ffn-h256-silu+d24": ["+d16", "+d32"],
              "add7/ffn-h256-silu+d0": ["+d16"], "add7/ffn-h256-silu+L0": ["+L1"]}
PART = r"-e\d+k\d+|-h\d+|\+d\d+|\+L\d+"


@pytest.mark.parametrize("name, near", IMPOSSIBLE.items())
def test_an_impossible_number_is_refused_with_its_neighbours_and_they_are_accepted(name, near):
    fixes = re.findall(PART, refusal(condition, name).partition("fix: ")[2])
    assert fixes == near
    for fix in fixes: condition(re.sub(re.escape(fix[:2]) + r"\d+(k\d+)?", fix, name))


@pytest.mark.parametrize("name, says", {
    "ffn-h256-silu": "add7/", "add7": "add7/", "": "add7/", "add7/ffn-h256": "that shape", "add7/ffn": "that shape",
    "add7/moe-h256-silu": "moe-e4k1", "add7/ffn-e4k1-h256-silu": "drop -e4k1", "add7/no_ffn-h256": "that shape",
    "add7/ffn-h256-silu+wd0+wd1": "keep one", "add7/ffn-h256-silu+norm+norm": "keep one",
    "add7/ffn-h256-silu+frozen": "moe", "add7/glu-h256-silu+lambda0": "moe",
    "add7/no_ffn+freeze_ffn": "drop +freeze_ffn", "add7/no_ffn+reset2000": "drop +reset2000",
    "add7/no_ffn+part0.5": "drop +part0.5", "add7/no_ffn+ffnlr4": "drop +ffnlr4",
    "hist/ffn-h512-gelu+reset2000": "write +reset200", "add7/ffn-h8-silu+ffnlr1e400": "valid option",
    "add7/ffn-h8-silu+reset5+part0": "write +part1", "add7/ffn-h8-silu+reset5+part2": "write +part1",
    "add7/ffn-h8-silu+part1": "+reset2000, too",
    "add7/ffn-h8-silu+then0.5": "+reset2000, too", "add7/ffn-h8-silu+also_attn": "+reset2000, too",
    "add7/ffn-h8-silu+reset5+then0": "+then0.25", "add7/ffn-h8-silu+ffnlr0+reset5+then2": "no +ffnlr0",
    "add7/ffn-h8-silu+ffnlr2+reset5+then2": "drop it", "add7/no_ffn+reset5+then2": "drop +reset5",
    "add7/ffn-h256-silu+": "option", "add7/ffn-h256-silu+wd-1": "option"}.items())
def test_what_the_grammar_cannot_say_is_refused_with_one_fix(name, says):
    assert says in refusal(condition, name).partition("fix: ")[2]


@pytest.mark.parametrize("seeds, says", [([42, 137, 42], "[42]"), ([], "[]"), ([-1], "[-1]"), ([1.5], "[1.5]"),
                                         (["1"], "['1']")])
def test_seeds_that_cannot_be_trained_are_refused(seeds, says):
    assert f"got {says}" in refusal(check_work, "add7/ffn-h256-silu", seeds, "authors", "selected")


@pytest.mark.parametrize("stream, until, near", [("author", "selected", "authors"), ("paired", "fill", "full")])
def test_an_unknown_stream_or_end_is_refused_with_the_nearest_one(stream, until, near):
    assert f"nearest: {near!r}" in refusal(check_work, "add7/ffn-h256-silu", [1], stream, until)
