"""Names say every choice and read back to the same condition; what cannot be built is refused in one message."""
import csv
import hashlib
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from moe_redistribution.evidence.registrations import definition_hash
from moe_redistribution.models import condition as conditions_room
from moe_redistribution.models.condition import (ACTIVATIONS, ALIKE, LIMITS, OPTIONS, RECIPES, ROUTED_ONLY, VARIANTS,
                                                 Condition, condition, _defaults, multipliers,
                                                 n_params, _plainest_name)
from moe_redistribution.models.events import (MODEL_PARTS, Exchange, Fresh, Only, Rate, Reset, Restart, in_old_names,
                                              in_new_names)
from moe_redistribution.models.population import init, shapes
from moe_redistribution.models.routers import ROUTERS
from moe_redistribution.studies.sparsity_moves.experiments import OWN
from moe_redistribution.training.groups import check_work
from moe_redistribution.training.loop import init_members, train_interval, unflatten
from moe_redistribution.training.store import Store
from moe_redistribution.tasks.task import get_task

FLOAT = st.floats(0, allow_infinity=False).map(abs)                                 # no -0.0
VALUES = {"router": st.sampled_from(["frozen", "tokens", "inputs", "shuffled", "redrawn"]), "gate": st.just("switch"),
          "norm": st.just(True), "freeze": st.sampled_from(["attn", "ffn"]), "n_layers": st.integers(1, 9),
          **dict.fromkeys(["balance", "ffn_lr", "attn_lr", "weight_decay", "clip"], FLOAT), "lr": FLOAT.filter(bool),
          "drop": st.floats(0, 1, exclude_max=True), "d_head": st.integers(1, 40), "d_model": st.integers(1, 7),
          "batch": st.integers(1, 1000), "steps": st.integers(1, 500)}

@st.composite
def happens(draw, c):
    "Events that may happen to a condition, in order."
    kinds = (st.integers(1, max(c.d_mlp, 1)).map(lambda n: (Reset, n / max(c.d_mlp, 1))), st.just((Fresh,)),
             st.sampled_from(["attn", "embed"]).map(lambda p: (Restart, p)), FLOAT.map(lambda x: (Rate, x)),
             st.integers(1, 999).map(lambda n: (Exchange, n)),
             st.sets(st.sampled_from(list(MODEL_PARTS)), min_size=1).map(
                 lambda some: (Only, tuple(p for p in MODEL_PARTS if p in some))))
    steps = draw(st.lists(st.integers(1, c.steps - 1), max_size=2, unique=True)) if c.steps > 1 else []
    found = [kind(step, *args) for step in steps for kind, *args in draw(st.lists(st.one_of(kinds), max_size=3))]
    found = sorted({(e.step, e.what): e for e in found}.values(), key=lambda e: (e.step, e.place))
    for e in found:
        if not e.refusal(c, multipliers(c, len(c.events))): c = replace(c, events=(*c.events, e))
    return c

@st.composite
def conditions(draw):
    "Any condition that the grammar can say, as the plainest of its names says it."
    task, ffn = draw(st.sampled_from(list(RECIPES))), draw(st.sampled_from(list(VARIANTS)))
    recipe, routed = RECIPES[task], ffn in ("moe", "moe_glu")
    values = VALUES | {"hold": st.sampled_from(list(get_task(task).rules) or [""])}
    assert set(values) == set(OPTIONS)                                              # a new option needs a strategy here
    own = [o for o in OPTIONS if (routed or o not in ROUTED_ONLY) and (ffn != "no_ffn" or o != "ffn_lr")
           and (o != "batch" or recipe["batch"])]
    chosen = {o: draw(values[o]) for o in draw(st.lists(st.sampled_from(own), unique=True))}
    if ffn == "no_ffn" and chosen.get("freeze") == "ffn": chosen["freeze"] = "attn"
    # it has no question before the answers
    if task == "hist" and chosen.get("router") in ("inputs", "shuffled", "redrawn"): chosen["router"] = "tokens"
    if "d_model" in chosen or "d_head" in chosen:
        chosen["d_model"] = chosen.get("d_model", 3) * chosen.get("d_head", recipe["d_head"])
    if "steps" in chosen: chosen["steps"] *= recipe["eval_every"]
    E = draw(st.integers(1, 16)) if routed else 1
    width = E * draw(st.integers(1, 300)) if ffn != "no_ffn" else 0
    rest = _defaults(task, ffn, chosen.get("freeze", "")) | chosen
    c = Condition(task=task, ffn=ffn, n_experts=E, top_k=draw(st.integers(1, E)), d_mlp=width, events=(),
                  activation="none" if ffn == "no_ffn" else draw(st.sampled_from(ACTIVATIONS)),
                  n_heads=rest["d_model"] // rest.pop("d_head"), **rest)
    return draw(happens(_plainest_name(c)[0]))

@given(conditions())
def test_a_name_reads_back_to_its_condition(c):
    assert condition(str(c)) == c and condition(str(c)).key == c.key

@given(conditions(), st.randoms(use_true_random=False))
def test_options_may_come_in_any_order_and_the_name_is_one(c, random):
    said, *events = c.name.split("@")
    head, *options = said.split("+")
    random.shuffle(options), random.shuffle(events)
    shuffled = [(step, words.split(",")) for step, _, words in (e.partition(":") for e in events)]
    for _, words in shuffled: random.shuffle(words)
    assert condition("+".join([head, *options]) + "".join(f"@{s}:{','.join(w)}" for s, w in shuffled)).name == c.name

@settings(max_examples=200)
@given(conditions(), conditions(), st.sampled_from([*OPTIONS, "events"]))
def test_two_conditions_share_name_and_key_only_if_every_choice_is_the_same(c, other, field):
    assume(field not in ROUTED_ONLY or c.routed == other.routed)                    # a dense model has none of these
    field = {"d_head": "n_heads"}.get(field, field)
    near = replace(c, **{field: getattr(other, field)})                             # differs in one choice or in none
    assert (near == c) == (near.name == c.name) == (near.key == c.key)

# ------------------------------------------------------------------------------------------------ read once, at the doo

def test_what_is_no_name_is_refused_at_the_door_as_it_was_behind_it():
    work = lambda c: check_work(c, [42], "authors", "full")
    for door in (lambda c: init(c, []), lambda c: Store().path(c, 42), work):
        with pytest.raises(ValueError, match=r"condition 'add7/fn-h8-silu'.*fix: |variant: expected one of .* fix: "):
            door("add7/fn-h8-silu")

# ----------------------------------------------------------------------------------------------------------- refusals

def refusal(call, *args):
    "The message of the ValueError that `call` raises: one line with what was expected, what was got and one fix."
    with pytest.raises(ValueError) as caught: call(*args)
    message = str(caught.value)
    assert "\n" not in message and message.count("fix: ") == 1
    assert message.index("expected") < message.index("got") < message.index("fix: ")
    return message

MISSPELT = {"add8/ffn-h256-silu": "add7", "add7/meo_glu-e4k1-h256-silu": "moe_glu", "add7/ffn-h256-sliu": "silu",
            "add7/moe-e4k1-h256-silu+frozn": "+frozen", "add7/ffn-h256-silu+hold_tens8": "tens9",
            "add7/ffn-h256-silu+freeze_atn": "+freeze_attn", "add7/ffn-h256-silu+ffnrl4": "+ffnlr0.25",
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
    "add7/ffn-h256-silu+norm+norm": "keep one", "add7/glu-h256-silu+lambda0": "moe",
    "add7/no_ffn+freeze_ffn": "drop +freeze_ffn", "add7/no_ffn+ffnlr4": "drop +ffnlr4",
    "add7/no_ffn@2000:reset1": "drop reset1", "add7/no_ffn@5:ffnlr2": "drop ffnlr2",
    "hist/ffn-h512-gelu@2000:reset1": "write @200:reset1", "add7/ffn-h8-silu@0:reset1": "write @2000:reset1",
    "add7/ffn-h8-silu+ffnlr1e400": "valid option", "add7/ffn-h8-silu@5:ffnlr1e400": "drop ffnlr",
    "add7/ffn-h8-silu@5:reset0": "write reset1", "add7/ffn-h8-silu@5:reset2": "write reset1",
    "add7/ffn-h8-silu@5:reset0.3": "write reset0.25", "add7/ffn-h8-silu@5:": "valid event",
    "add7/ffn-h8-silu@5:ffnlr0": "drop ffnlr0", "add7/ffn-h8-silu+ffnlr2@5:ffnlr2": "drop ffnlr2",
    "add7/ffn-h8-silu+freeze_ffn@5:ffnlr2": "drop ffnlr2", "add7/ffn-h8-silu+freeze_ffn@5:reset1": "drop reset1",
    "add7/ffn-h8-silu+freeze_attn@5:attn": "drop attn", "add7/ffn-h8-silu@5:fresh@5:fresh": "keep one",
    "add7/ffn-h8-silu@5:router1": "drop router1",
    "add7/moe-e2k1-h8-silu+tokens@5:router1": "drop router1", "add7/moe-e2k1-h8-silu@5:router0": "write router1",
    "add7/moe-e1k1-h8-silu@5:router1": "drop router1", "add7/moe-e2k1-h8-silu+lambda0@5:onlyrouter": "drop onlyrouter",
    "add7/moe-e2k2-h8-silu+redrawn@5:onlyrouter": "drop onlyrouter", "add7/no_ffn@5:onlyexperts": "drop onlyexperts",
    "add7/ffn-h8-silu+freeze_attn@5:onlyattn_embed": "drop onlyattn_embed",
    "add7/ffn-h8-silu@5:onlyexperts_attn_embed": "drop onlyexperts_attn_embed",
    "add7/ffn-h8-silu@5:onlyattn@6:ffnlr2": "drop ffnlr2",
    "add7/ffn-h8-silu@5:onlyattn@6:onlyexperts": "drop onlyexperts", "add7/ffn-h8-silu@5:reset1+norm": "valid event",
    "add7/ffn-h8-silu+lr0": "write +lr0.003", "add7/ffn-h8-silu+batch0": "write +batch256",
    "modadd/ffn-h8-gelu+batch256": "drop it", "add7/ffn-h8-silu+steps0": "write +steps200",
    "add7/ffn-h8-silu+steps250": "write +steps200", "add7/ffn-h8-silu+head0": "write +head8",
    "add7/ffn-h8-silu" + "+norm" * 99: "shorten it",
    "add7/ffn-h256-silu+": "option", "add7/ffn-h256-silu+wd-1": "option"}.items())
def test_what_the_grammar_cannot_say_is_refused_with_one_fix(name, says):
    assert says in refusal(condition, name).partition("fix: ")[2]

TOO_LARGE = {"add7/ffn-h2560000-silu": ("parameters", "330,"), "add7/ffn-h8-silu+d6400": ("parameters", "164,"),
             "add7/moe-e5000k1-h5000-silu": ("experts", "5,000"), "add7/ffn-h8-silu+L65": ("layers", "65"),
             "add7/ffn-h8-silu+batch1000000": ("batch", "1,000,000"),
             "add7/ffn-h8-silu+steps20000000": ("steps", "20,000,000")}

@pytest.mark.parametrize("name, says", TOO_LARGE.items())
def test_what_is_too_large_to_be_meant_is_refused_with_its_size(name, says):
    message = refusal(condition, name)
    assert f"expected at most {LIMITS[says[0]]:,} {says[0]}; got {says[1]}" in message

@given(conditions())
def test_a_size_is_known_without_a_shape(c):
    sizes = [torch.Size(s).numel() for s in shapes(c).values()]
    assert n_params(c) == sum(sizes)

# ------------------------------------------------------------------------------------------- one name for one training

AXES = ([("moe-e1k1", "moe-e2k1", "moe-e2k2")] + [("", *(f"+{w}" for w in words.split())) for words in (
    "frozen tokens inputs redrawn", "switch", "lambda0 lambda0.1", "ffnlr0 ffnlr4", "attnlr0 attnlr4", "wd0",
    "freeze_attn freeze_ffn")] + [("", "@1:reset0.5", "@1:attn", "@1:ffnlr2", "@1:fresh", "@1:reset1,fresh",
                                              "@1:router1", "@1:onlyexperts", "@1:onlyrouter")])

def grid(ways):
    "Names of tiny mixtures, dense FFNs and models without, which depart from the recipe in so many `ways` at most."
    for body, *options in itertools.product(*AXES):
        if sum(map(bool, options)) <= ways: yield f"add7/{body}-h4-silu+d16" + "".join(options)
    dense = [a for a in AXES[1:] if a[-1] not in ("+redrawn", "+switch", "+lambda0.1")]
    for body, *options in itertools.product(("ffn-h4-silu", "glu-h4-silu", "no_ffn"), *dense):
        if sum(map(bool, options)) <= ways: yield f"add7/{body}+d16" + "".join(options)

def accepted(name):
    try: return condition(name)
    except ValueError: return None

def trained(name, steps=3):
    "Weights of one seed after a few steps."
    members = init_members(condition(name), [1], "paired")
    train_interval(members, steps)
    return unflatten(members.w, members.c)

@pytest.mark.parametrize("ways", [2, pytest.param(3, marks=pytest.mark.audit)])
def test_no_two_valid_names_train_the_same_weights(ways):
    seen = {}
    for c in {c: 0 for n in grid(ways) if (c := accepted(n))}:
        bits = b"".join(n.encode() + v.numpy().tobytes() for n, v in sorted(trained(c, 2).items()))
        other = seen.setdefault(hashlib.sha256(bits).hexdigest(), c.name)
        assert other == c.name, f"{other} and {c.name} train the same weights: a rule of ALIKE is missing"
    assert len(seen) > 50 * ways

SAME = {"ffn-h4-silu+attnlr0": "+freeze_attn", "ffn-h4-silu+freeze_attn+attnlr4": "+freeze_attn",
        "moe-e2k1-h4-silu+ffnlr4+freeze_ffn": "+freeze_ffn", "ffn-h4-silu+ffnlr0": "+freeze_ffn",
        "ffn-h4-silu+ffnlr0+freeze_attn": "+attnlr0+freeze_ffn",
        "moe-e2k1-h4-silu+frozen+ffnlr0": "+lambda0.01+freeze_ffn", "moe-e2k1-h4-silu+frozen+freeze_ffn": "+freeze_ffn",
        "moe-e1k1-h4-silu+switch": "", "moe-e1k1-h4-silu+lambda0": "", "moe-e1k1-h4-silu+frozen": "",
        "moe-e2k2-h4-silu+switch": "", "moe-e2k2-h4-silu+lambda0": "", "moe-e2k1-h4-silu+tokens+lambda0": "+tokens",
        "moe-e2k1-h4-silu+inputs+lambda0.1": "+inputs", "moe-e2k1-h4-silu+tokens+straight": "+tokens",
        "moe-e2k1-h4-silu+lambda0+wd0": "+frozen+lambda0+wd0"}

@pytest.mark.parametrize("said, plain", SAME.items())
def test_a_name_is_refused_for_the_one_that_trains_the_same(said, plain, monkeypatch):
    """Trained all the same, it ends with the same weights: to the bit, but for a router that only decays, and for gates
    that are divided by a sum of 1."""
    name, same = f"add7/{said}", f"add7/{said.partition('+')[0]}{plain}"
    assert refusal(condition, name).endswith(f"fix: write {same}")
    there = trained(condition(same))
    monkeypatch.setattr(conditions_room, "ALIKE", ())
    own = trained(name)
    conditions_room._as_named.cache_clear()
    for n in own.keys() - {"W_router"} if "e1k1" in name else own:
        torch.testing.assert_close(own[n], there[n], rtol=0, atol=2e-3 if "k2" in name else 0)

def test_every_reason_for_refusing_a_name_has_its_example():
    said = [re.search(r"training \((.*?)\);", refusal(condition, f"add7/{name}"))[1] for name in SAME]
    whys = {why for text in said for why in text.split("; ")}
    assert whys == {why for why, *_ in ALIKE}

# ------------------------------------------------------------------------------------------------------ what is stored

KEYS = dict(list(csv.reader(open(Path(__file__).parent / "keys.csv")))[1:])
OLD_SPELLINGS = Path(conditions_room.__file__).with_name("old_spellings.csv")

def test_the_file_of_old_spellings_is_finished():
    "What was registered and stored is found through it: a changed line, a new one or another order is another name."
    said = OLD_SPELLINGS.read_bytes()
    assert hashlib.sha256(said).hexdigest()[:16] == "fbacce076c097bc9" and said.count(b"\n") == 7

@pytest.mark.parametrize("old, new", [("+forget+d16+then8+reset7", "+d16@7:reset0.25,ffnlr8,fresh"),
                                      ("+reset5+also_embed+freeze_attn", "+freeze_attn@5:reset0.25,embed")])
def test_an_old_name_is_read_by_the_file_and_no_other_event_has_one(old, new):
    assert in_new_names(f"add7/ffn-h8-silu{old}, x") == f"add7/ffn-h8-silu{new}, x"
    assert sorted(in_old_names(f"add7/ffn-h8-silu{new}")[16:].split("+")) == sorted(old.split("+"))
    for more in (",router1", ",onlyexperts", ",embed,attn", "@9000:fresh"):
        assert in_old_names(f"add7/ffn-h8-silu{new}{more}") == f"add7/ffn-h8-silu{new}{more}"

HASHED = {"seeds": "1-9", "metric": "digits"}

@pytest.mark.parametrize("name, key", KEYS.items())
def test_a_key_is_what_it_was_when_its_first_run_was_stored(name, key):
    "And old names of conditions with a reset are refused with today's, which lead back to them."
    today = in_new_names(name)
    assert condition(today).key == key and condition(today).name == today and in_old_names(today) == name
    if today != name: assert refusal(condition, name).endswith(f"fix: write {today}")
    assert definition_hash(HASHED | dict(condition=today)) == definition_hash(HASHED | dict(condition=name))

def test_every_condition_of_the_study_has_its_key_written_down():
    assert {n for e in OWN.values() for n in e.names} <= {in_new_names(n) for n in KEYS}
    assert len(set(KEYS.values())) == len(KEYS)

@given(conditions())
def test_an_old_spelling_leads_back_to_todays_name(c):
    old = in_old_names(c.name)
    assert in_new_names(old) == c.name and (old == c.name or "@" not in old)
    assert in_old_names(f"({c.name}), {c.name}.") == f"({old}), {old}."
    assert in_new_names(f"{old} {old}") == f"{c.name} {c.name}"

def test_another_router_is_a_line_in_its_room(monkeypatch):
    class Third(type(ROUTERS["tokens"])):
        "The third token's route, for all positions."
        def row(self, tokens, t): return tokens[..., 2:3].expand(tokens.shape)
    monkeypatch.setitem(ROUTERS, "third", Third("third", False))
    c = condition("add7/moe-e2k1-h8-silu+d16+third")
    assert c.name == "add7/moe-e2k1-h8-silu+third+d16" and condition(c.name) == c
    own = trained(c)
    assert torch.equal(own["W_router"], trained("add7/moe-e2k1-h8-silu+d16+tokens")["W_router"])
    conditions_room._as_named.cache_clear()
