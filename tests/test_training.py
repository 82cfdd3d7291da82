"""One seed is trained as if it were alone and as plain PyTorch would train it, whoever shares its tensors."""
import os
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given, strategies as st

import moe_redistribution
from moe_redistribution.training import engine
from moe_redistribution.models.condition import RECIPES, condition
from moe_redistribution.models.events import ATTENTION, EMBEDDINGS, EXPERTS
from moe_redistribution.models.population import forward, shapes
from moe_redistribution.tasks.data import draw, generators, training_pool
from moe_redistribution.training.groups import _merge_members, _train_group
from moe_redistribution.training.store import Store
from moe_redistribution.tasks.task import EOS, digits, exact, get_task
from moe_redistribution.training.loop import (evaluate, init_members, settled_members, train_interval, unflatten,
                                              update_rules,
                                              _without_subnormals)
from fresh import python
from plain import examples, load_member, optimiser, plain_train

ADD7 = get_task("add7")
DENSE, MOE = "add7/ffn-h64-silu", "add7/moe-e4k1-h64-silu"
PACKAGE = Path(moe_redistribution.__file__).parents[1]

def train(name, seeds, n, stream="authors"):
    members = init_members(condition(name), seeds, stream)
    train_interval(members, n)
    return members

# ------------------------------------------------------------------------------------------------- alone and together

ELSEWHERE = """
import sys, torch
from moe_redistribution.models.condition import RECIPES, condition
from moe_redistribution.models.events import ATTENTION, EXPERTS
from moe_redistribution.training.loop import init_members, train_interval
path, *work = sys.argv[1:]
rows = {}
for name, n in zip(work[::2], work[1::2]):
    members = init_members(condition(name), [9, 3], "authors")
    train_interval(members, int(n))
    rows[name, int(n)] = members.w[1]
torch.save(rows, path)
"""
CASES = {(DENSE, 1): 1e-6, (DENSE, 100): 1e-4, (MOE, 1): 1e-6}                      # tolerance

@pytest.fixture(scope="module")
def another_process(tmp_path_factory):
    "Weights of seed 3 from a process of its own, trained beside seed 9."
    path = tmp_path_factory.mktemp("elsewhere") / "rows.pt"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE), "MOE_REDISTRIBUTION_HOME": str(path.parent)}
    work = [str(x) for case in CASES for x in case]
    assert not (done := python("-c", ELSEWHERE, path, *work, env=env)).returncode, done.stderr
    return torch.load(path, weights_only=True)

@pytest.mark.parametrize("name, n", CASES)
def test_seed_in_population_is_seed_alone(name, n, another_process):
    "In another group, in another place of it, and in another process. Later a flipped route may part them."
    alone = train(name, [3], n).w[0]
    assert (alone - init_members(condition(name), [3], "authors").w[0]).abs().max() > 5e-4 # it has moved
    for w in (train(name, [3, 1], n).w[0], train(name, [2, 5, 7, 3], n).w[3], another_process[name, n]):
        torch.testing.assert_close(w, alone, rtol=0, atol=CASES[name, n])

def test_the_same_group_gives_the_same_bits():
    a, b = train(MOE, [1, 2], 20), train(MOE, [1, 2], 20)
    assert torch.equal(a.w, b.w) and torch.equal(a.m, b.m) and torch.equal(a.v, b.v)

RECIPES_TO_CHECK = ["add7/ffn-h64-silu", "add7/glu-h42-silu", "add7/moe-e4k1-h64-silu", "add7/moe_glu-e4k1-h44-silu",
                    "add7/moe-e4k2-h64-silu", "add7/moe-e4k1-h64-silu+frozen", "add7/moe_glu-e4k1-h44-silu+ffnlr4",
                    "add7/moe-e4k1-h64-silu+switch+lambda0.5", "add7/ffn-h64-silu+ffnlr0.25+attnlr4+wd0.5",
                    "add7/ffn-h64-silu+freeze_attn+clip0", "add7/glu-h42-silu+freeze_ffn",
                    "add7/moe-e4k1-h64-silu+freeze_ffn", "add7/ffn-h64-silu+norm+clip0.1+hold_ones3"]

@pytest.mark.parametrize("name", RECIPES_TO_CHECK)
def test_twenty_steps_are_twenty_steps_of_a_plain_module_and_adamw(name):
    """Clipping, decoupled decay, own learning rates, frozen parts and their balance loss, held-out inputs; in double
    precision."""
    c = condition(name)
    balance = 0 if c.freeze == "ffn" else c.balance                    # protocol: none where the FFN is frozen
    members = init_members(c, [1, 2], "authors")
    members.w, members.m, members.v = members.w.double(), members.m.double(), members.v.double()
    plain = [load_member(unflatten(members.w, c), i, c) for i in range(2)]
    train_interval(members, 20)
    for i, seed in enumerate([1, 2]):
        g = init_members(c, [seed], "authors").gens[0]["batches"]
        opt, params = optimiser(plain[i]), [p for p in plain[i].parameters() if p.requires_grad]
        for at in draw(training_pool(ADD7, c.hold), g, 20, c.batch):
            loss, aux = plain[i].loss(ADD7.tokens[at], ADD7.targets[at])
            opt.zero_grad()
            (loss + balance * aux).backward()
            if c.clip: torch.nn.utils.clip_grad_norm_(params, c.clip)
            opt.step()
        for n, v in plain[i].as_member().items():
            ours = unflatten(members.w, c)[n][i]
            torch.testing.assert_close(ours, v[0], rtol=0, atol=1e-5, msg=lambda m: f"{n}: {m}")

@pytest.mark.parametrize("name", ["modadd/ffn-h24-gelu", "modadd/moe-e4k1-h24-gelu+lambda1", "modadd/glu-h20-silu+wd0",
                                  "hist/moe_glu-e4k1-h24-gelu+lambda1",
                                  pytest.param("hist/ffn-h24-gelu", marks=pytest.mark.audit)])
def test_full_batch_epochs_are_those_of_a_plain_module_on_the_whole_set(name, monkeypatch):
    "In chunks here, at once there, in double precision; the third epoch shows what the second did to Adam's moments."
    monkeypatch.setitem(engine.CHUNK, "dense", 15_000), monkeypatch.setitem(engine.CHUNK, "routed", 15_000)
    c = condition(name + "+d32")
    members = init_members(c, [5], "authors")
    members.w, members.m, members.v = members.w.double(), members.m.double(), members.v.double()
    plain = load_member(unflatten(members.w, c), 0, c)
    losses, opt = [], optimiser(plain)
    ours = train_interval(members, 3)
    for tokens, targets in examples(c, 5, 3):
        loss, aux = plain.loss(tokens, targets)
        opt.zero_grad()
        (loss + c.balance * aux).backward()
        opt.step()
        losses.append(loss.item())
    assert ours.item() == pytest.approx(sum(losses) / 3, abs=1e-6)
    for n, v in plain.as_member().items(): torch.testing.assert_close(unflatten(members.w, c)[n], v, rtol=0, atol=1e-5)

@pytest.mark.parametrize("options, frozen", [
    ("+frozen", ["W_router"]), ("+freeze_attn", ATTENTION), ("+freeze_ffn", ["W_router", *EXPERTS]),
    ("+frozen+freeze_attn+norm", ["W_router", *ATTENTION])])
def test_what_is_frozen_keeps_every_bit_and_all_else_moves(options, frozen):
    c = condition(MOE + options)
    before, after = unflatten(init_members(c, [3], "authors").w, c), unflatten(train(c, [3], 3).w, c)
    assert [n for n in before if torch.equal(before[n], after[n])] == [n for n in before if n in frozen]

# -------------------------------------------------------------------------------------------------------------- streams

def test_the_authors_stream_lands_where_the_authors_code_lands():
    "Their code, seed 42, SiLU FFN: all 256 sampled strings right first at step 400; 7.2 % of digits without the FFN."
    members = init_members(condition("add7/ffn-h256-silu"), [42], "authors")
    for _ in range(2): update_rules(members, evaluate(members, train_interval(members, 200)))
    first = members.best["first256"]
    assert first["value"].item() == 1 and first["step"].item() == 400
    logits = forward(unflatten(first["w"], members.c), ADD7.tokens, members.c, {"ffn_out": torch.zeros_like})
    hits = logits[:, :, list(ADD7.read)].argmax(-1) == ADD7.targets
    assert digits(hits, ADD7).item() == pytest.approx(.072, abs=.01)

def test_a_seed_of_the_authors_stream_is_manual_seed_and_then_weights_and_batches():
    "A plain module made and trained after `torch.manual_seed(42)` sees the same weights and the same batches."
    model, _ = plain_train(DENSE, 42, steps=20)
    ours = unflatten(train(DENSE, [42], 20).w, condition(DENSE))
    for n, v in model.as_member().items(): torch.testing.assert_close(ours[n], v, rtol=0, atol=1e-3)

def test_in_the_paired_stream_arms_share_batches_and_all_weights_but_the_ffns():
    names = [DENSE, MOE, "add7/glu-h42-silu", "add7/moe_glu-e4k2-h44-silu", "add7/no_ffn", "add7/ffn-h256-silu+ffnlr4"]
    arms = [init_members(condition(n), [3], "paired") for n in names]
    shared = [unflatten(m.w, m.c) for m in arms]
    for p in shared[1:]:
        assert all(torch.equal(p[n], shared[0][n]) for n in ("W_E", "W_pos", *ATTENTION))
    three_batches = lambda m: draw(training_pool(ADD7), m.gens[0]["batches"], 3, 128)
    batches = [three_batches(m) for m in arms]
    assert all(torch.equal(b, batches[0]) for b in batches)
    mixed = [three_batches(init_members(condition(n), [3], "authors")) for n in names[:2]]
    assert not torch.equal(*mixed)                      # in the authors' stream the size of the FFN changes the batches

def test_no_two_streams_of_any_seed_start_alike():
    states = [g.get_state() for seed in range(20) for g in generators(seed, "paired").values()]
    states += [generators(seed, "authors")["weights"].get_state() for seed in range(20)]
    assert len({s.numpy().tobytes() for s in states}) == 80

@pytest.mark.parametrize("stream, independent", [("paired", True), ("authors", False)])
def test_weights_depend_on_how_often_one_looks_only_in_the_authors_stream(stream, independent):
    often, once = (init_members(condition(DENSE), [3], stream) for _ in range(2))
    for _ in range(4): evaluate(often, train_interval(often, 5))
    evaluate(once, train_interval(once, 20))
    assert torch.equal(often.w, once.w) == independent

# ----------------------------------------------------------------------------------------------------- rules and scores

METRIC = {"first256": "exact256", "first1000": "exact", "first99": "test"}

@given(st.lists(st.tuples(*[st.sampled_from([0., .5, .99, .995, 1.])] * 2), min_size=1, max_size=8))
def test_a_rule_keeps_the_first_strict_maximum_and_nothing_after_its_threshold(curve):
    members = init_members(condition("add7/ffn-h1-silu+d16"), [1], "authors")
    members.best["first99"] = {n: v.clone() for n, v in members.best["first256"].items()}      # another task's rule
    expected = dict.fromkeys(METRIC, (0., 0))
    enough = lambda rule, value: value > .99 if rule == "first99" else value == 1
    for step, values in enumerate(curve, 1):
        members.step[:], members.w[:], scores = (step, step,
                                                 dict(zip(("exact256", "exact", "test"), (*values, values[1]))))
        update_rules(members, {metric: torch.tensor([v]) for metric, v in scores.items()})
        for rule, (best, _) in expected.items():
            if scores[METRIC[rule]] > best and not enough(rule, best): expected[rule] = (scores[METRIC[rule]], step)
    for rule, (value, step) in expected.items():
        b = members.best[rule]
        assert (round(b["value"].item(), 6), b["step"].item()) == (value, step)
        assert step == 0 or (b["w"] == step).all()
    assert settled_members(members).item() == all(enough(rule, value) for rule, (value, _) in expected.items())

def decode(params, c):
    "Greedy answers to all 1,000 prompts, written until the first EOS or five tokens."
    answers = []
    for n in range(0, 1000, 250):                       # the prompt d0 d1 d2 EOS of 250 numbers at a time
        tokens = ADD7.tokens[n:n + 250, :4]
        for _ in range(5): tokens = torch.cat([tokens, forward(params, tokens, c)[0, :, -1:].argmax(-1)], 1)
        written = tokens[:, 4:].tolist()
        answers += [w[:w.index(EOS) + 1] if EOS in w else w for w in written]
    return answers

@pytest.mark.parametrize("name, n", [(DENSE, 0), (DENSE, 150), (DENSE, 300), (MOE, 300)])
def test_greedy_decoding_is_right_exactly_where_teacher_forcing_is(name, n):
    "Hence exact match never needs a loop: an answer that is right so far is the prompt that the teacher gives."
    members = init_members(condition(name), [3], "authors")
    if n: train_interval(members, n)
    params = unflatten(members.w, members.c)
    forced = forward(params, ADD7.tokens, members.c)[:, :, list(ADD7.read)].argmax(-1) == ADD7.targets
    answers = decode(params, members.c)
    right = [answer == [*target, EOS] for answer, target in zip(answers, ADD7.targets[:, :4].tolist())]
    assert forced.all(-1)[0].tolist() == right
    assert exact(forced).item() == pytest.approx(sum(right) / 1000, abs=1e-6)
    assert n < 300 or 0 < sum(right)                                                # else there was nothing to compare

# ------------------------------------------------------------------------------------------------------------------ NaN

def poisoned(name, sick, n):
    "Three seeds, five steps, then `n` more with the weights of one of them poisoned (or none, for `sick` None)."
    members = train(name, [1, 2, 3], 5)
    if sick is not None: members.w[sick, ::7] = torch.nan
    train_interval(members, n)
    return members

@pytest.mark.parametrize("sick", range(3))
@pytest.mark.parametrize("name",
                         [DENSE, "add7/glu-h42-silu", MOE, "add7/moe-e4k2-h64-silu", "add7/moe_glu-e4k1-h44-silu+norm"])
def test_nan_in_one_seed_leaves_the_others_alone(name, sick):
    "To the bit, in the same group: neither clipping nor the experts' common product lets it through."
    well = [i for i in range(3) if i != sick]
    members, clean = poisoned(name, sick, 5), poisoned(name, None, 5)
    assert torch.equal(members.w[well], clean.w[well]) and torch.equal(members.v[well], clean.v[well])
    assert members.failed.tolist() == [6 * (i == sick) for i in range(3)]           # the first step after the poison
    assert clean.failed.tolist() == [0, 0, 0]

# --------------------------------------------------------------------------------------------------------- subnormals

def subnormal(x): return ((x != 0) & (x.abs() < 1.2e-38)).any().item()

def test_training_with_numbers_too_small_to_matter_ends_with_the_weights_it_would_have_had(monkeypatch):
    """Half of a dense FFN has been idle so long that Adam's squares are subnormal: they become 0, the weights stay what
    they would be."""
    def aged():
        members = init_members(condition("add7/ffn-h16-silu"), [1], "authors")
        train_interval(members, 3)
        for name, scale in (("w", 1e-12), ("m", 1e-20), ("v", 1e-36)):
            unflatten(getattr(members, name), members.c)["W_up"][..., :8].mul_(scale)
        return members
    flushed, kept = aged(), aged()
    train_interval(flushed, 5)
    monkeypatch.setattr("torch.set_flush_denormal", lambda mode: True)
    train_interval(kept, 5)
    assert subnormal(aged().v) and torch.allclose(flushed.w, kept.w, rtol=1e-6, atol=0)

def test_the_caller_s_own_subnormals_survive_training_and_its_failures():
    tiny = torch.full((4,), 1e-40)
    train(DENSE, [1], 1)
    assert (tiny * 1 > 0).all()
    with pytest.raises(ZeroDivisionError), _without_subnormals():
        assert (tiny * 1 == 0).all()
        raise ZeroDivisionError
    assert (tiny * 1 > 0).all()

@pytest.mark.parametrize("name, part, n", [("add7/ffn-h64-silu", 0.25, 16), ("add7/ffn-h64-silu", 1, 64),
                                           ("add7/moe-e4k1-h64-silu", 0.25, 16),
                                           ("add7/moe_glu-e8k2-h64-silu", 0.5, 32)])
def test_a_reset_gives_a_part_of_the_hidden_units_their_initial_weights_at_its_step_and_changes_nothing_else(name, part,
    n):
    """Up to that step it is the same run to the bit; the optimiser keeps its memory; members at other steps are left
    alone."""
    c = condition(f"{name}@3:reset{part}")
    plain, kicked = (init_members(m, [5, 6], "paired") for m in (condition(name), c))
    began = unflatten(kicked.w.clone(), c)
    for m in (plain, kicked): train_interval(m, 2)
    assert torch.equal(plain.w, kicked.w)
    for m in (plain, kicked): train_interval(m, 1)
    assert torch.equal(plain.m, kicked.m) and torch.equal(plain.v, kicked.v)
    before, after = unflatten(plain.w, c), unflatten(kicked.w, c)
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert changed == {"W_up", "W_down"} | ({"W_gate"} if c.gated else {"b_up"})
    for k in changed:
        unit = 3 if k in ("b_up", "W_down") else 4                     # (seed, layer, expert, …): the axis of the units
        old, new, first = (p[k].movedim(unit, -1).movedim(2, -2).flatten(-2) for p in (before, after, began))
        assert torch.equal(new[..., :n], first[..., :n]) and torch.equal(new[..., n:], old[..., n:])
        assert not torch.equal(new[..., :n], old[..., :n])
    train_interval(kicked, 1)
    assert not torch.equal(unflatten(kicked.w, c)["W_up"], began["W_up"])           # and it trains on

@pytest.mark.parametrize("name, also, back", [("add7/ffn-h8-silu", "attn", set(ATTENTION)),
                                              ("modadd/moe-e2k1-h8-gelu+d32", "embed", {"W_E", "W_pos", "W_U"})])
def test_with_a_reset_attention_or_the_embeddings_go_back_too(name, also, back):
    c = condition(f"{name}@2:reset0.25,{also}")
    only, both = (init_members(m, [5, 6], "paired") for m in (condition(f"{name}@2:reset0.25"), c))
    began = unflatten(both.w.clone(), c)
    for m in (only, both): train_interval(m, 2)
    without, now = unflatten(only.w, c), unflatten(both.w, c)
    assert {n for n in now if torch.equal(now[n], began[n]) and not torch.equal(without[n], began[n])} == back
    assert all(torch.equal(now[n], without[n]) for n in now if n not in back)

def test_an_optimiser_that_forgets_takes_its_next_step_as_its_first():
    """The first step of Adam is as long as the learning rate, wherever there is a gradient, and so it is here after the
    reset; one that is not fresh does not."""
    name = "add7/ffn-h8-silu+wd0+clip0@30:reset0.25"
    c = condition(name + ",fresh")
    remembers, forgets = (init_members(m, [5, 6], "paired") for m in (condition(name), c))
    for m in (remembers, forgets): train_interval(m, 30)
    assert (torch.equal(remembers.w, forgets.w) and not forgets.m.any() and not forgets.v.any() and remembers.v.any()
            and forgets.step.tolist() == [30, 30])
    start = forgets.w.clone()
    for m in (remembers, forgets): train_interval(m, 1)
    long = (forgets.w - start).abs()
    assert ((long[long > 0] / c.lr - 1).abs().median() < 1e-3
            < ((remembers.w - start).abs()[long > 0] / c.lr - 1).abs().median())
    train_interval(forgets, 1)
    assert forgets.step.tolist() == [32, 32]

def test_the_ffn_has_another_rate_from_a_reset_on_and_each_member_at_its_own_step():
    """Up to the reset it is the run without; the first step after it moves the FFN's weights by the new rate's
    multiple, and no others."""
    name = "add7/ffn-h8-silu+ffnlr2@3:reset0.25"
    c = condition(name + ",ffnlr0.5")
    as_before, later = (init_members(m, [5, 6], "paired") for m in (condition(name), c))
    for m in (as_before, later): train_interval(m, 3)
    assert torch.equal(as_before.w, later.w)
    start = later.w.clone()
    for m in (as_before, later): train_interval(m, 1)
    fast, slow = (unflatten(m.w - start, c) for m in (as_before, later))
    for n, moved in fast.items():
        ratio = .25 if n in EXPERTS else 1                                          # decay is a share of the rate, too
        torch.testing.assert_close(slow[n], ratio * moved, rtol=1e-3, atol=1e-7)
    apart, together = ([train(c, [5], 2, "paired"), train(c, [6, 7], 4, "paired")] for _ in range(2))
    train_interval(mixed := _merge_members(together), 3)
    for m in apart: train_interval(m, 3)
    torch.testing.assert_close(mixed.w, torch.cat([m.w for m in apart]), rtol=1e-3, atol=1e-5)

def test_events_happen_one_after_the_other_each_at_its_own_step():
    "Weights, rates and the optimiser's count are those of the last event, as if the run had been stopped and changed."
    members = train("add7/ffn-h8-silu+wd0+clip0@2:fresh@3:ffnlr4@5:attn,ffnlr0.5", [5, 6], 3, "paired")
    c, other = members.c, train("add7/ffn-h8-silu+wd0+clip0@2:fresh", [5, 6], 3, "paired")
    assert torch.equal(members.w, other.w)                                          # the rate is another from here on
    for m in (members, other): train_interval(m, 1)
    assert not torch.equal(members.w, other.w) and torch.equal(members.v, other.v)
    train_interval(members, 1)
    began = unflatten(init_members(c, [5, 6], "paired").w, c)
    assert {n for n, v in unflatten(members.w, c).items() if torch.equal(v, began[n])} == set(ATTENTION)
    assert [e.step for e in c.events] == [2, 3, 5, 5] and c.last_event == 5

LEARNT = {"experts": {*EXPERTS}, "attn": {*ATTENTION}, "embed": {*EMBEDDINGS}, "router": {"W_router"},
          "experts_router": {*EXPERTS, "W_router"}}

@pytest.mark.parametrize("base", ["moe-e2k2-h8-silu", "moe-e2k2-h8-silu+frozen", "moe-e2k1-h8-silu+freeze_ffn+lambda1",
                                  "moe-e2k2-h8-silu+norm+clip0.01"])
@pytest.mark.parametrize("parts", LEARNT)
def test_only_what_an_event_names_moves_from_its_step_on(base, parts):
    "Not even by decay; the rest is the run without the event up to its step, and each member has its own."
    if "freeze_ffn" in base and "experts" in parts: return
    members, before = (train(f"add7/{base}{event}", [5, 6], 2, "paired") for event in (f"@2:only{parts}", ""))
    assert torch.equal(members.w, before.w)
    for n in (1, 3): train_interval(members, n)
    moved = {n for (n, v), w in zip(unflatten(members.w, members.c).items(), unflatten(before.w, members.c).values())
             if not torch.equal(v, w)}
    assert moved == LEARNT[parts] & set(shapes(members.c))
    apart, company = ([train(members.c, [s], n, "paired") for s, n in ((5, 1), (6, 3))] for _ in range(2))
    mixed = _merge_members(company)
    for m in (mixed, *apart): train_interval(m, 2)
    torch.testing.assert_close(mixed.w, torch.cat([m.w for m in apart]), rtol=1e-3, atol=1e-5)

def test_the_clip_does_not_see_the_gradient_of_what_is_held():
    "A part that learns alone moves as under a clip at its own norm, not at that of the whole gradient."
    c = condition("add7/ffn-h8-silu+clip0.01+wd0@1:onlyembed,fresh")
    members = train(c, [5], 1, "paired")
    train_interval(members, 1)
    moments = unflatten(members.m, c)                               # after one step a tenth of the gradient
    norm = sum((10 * moments[n]).double().square().sum() for n in EMBEDDINGS if n in moments).sqrt().item()
    assert norm == pytest.approx(.01, rel=1e-3)
    assert not any(moments[n].any() for n in (*EXPERTS, *ATTENTION) if n in moments)

@pytest.mark.parametrize("stream", ["authors", "paired"])
def test_an_exchanged_router_is_the_initial_one_of_another_draw(stream):
    "Nothing else is touched, its moments are zero, and no two of runs and draws share a router."
    names = [f"add7/moe-e2k2-h8-silu@2:{word}" for word in ("router1", "router2", "fresh")]
    one, two, own = (unflatten(train(n, [5, 15], 2, stream).w, condition(n)) for n in names)
    assert all(torch.equal(one[n], own[n]) for n in own if n != "W_router")
    began = unflatten(init_members(condition(names[0]), [5, 15], stream).w, condition(names[0]))
    routers = torch.cat([x["W_router"] for x in (one, two, began)])
    assert not any(torch.equal(a, b) for i, a in enumerate(routers) for b in routers[:i])
    members = train(names[0], [5], 2, stream)
    assert not any(unflatten(x, members.c)["W_router"].any() for x in (members.m, members.v))
    assert unflatten(members.m, members.c)["W_up"].any()
    if stream == "authors":
        assert torch.equal(one["W_router"][:1],
                           unflatten(init_members(members.c, [6], stream).w, members.c)["W_router"])

@pytest.mark.parametrize("name", ["add7/ffn-h8-silu@40:reset0.25", "add7/ffn-h8-silu@40:reset0.25,ffnlr4,fresh",
                                  "add7/moe-e2k2-h8-silu+frozen@20:router1,onlyexperts@30:onlyrouter",
                                  "add7/ffn-h8-silu@20:ffnlr4@30:attn,fresh@50:reset1,ffnlr0.5,fresh",
                                  "add7/moe-e2k1-h8-silu+redrawn"])
def test_a_disturbed_run_that_is_interrupted_ends_with_the_same_bits(name, tmp_path, monkeypatch):
    """Whether the interruption comes before the reset or after it; routes drawn anew at every step are drawn as they
    would have been."""
    monkeypatch.setitem(RECIPES["add7"], "eval_every", 20)
    seeds = [1, 2]
    whole = (_train_group(name, seeds, "paired", "full", tmp_path / "a", steps=60)
             and Store(tmp_path / "a").load(name, 1, "paired"))
    for steps in (20, 40, 60): _train_group(name, seeds, "paired", "full", tmp_path / "b", steps=steps)
    parts = Store(tmp_path / "b").load(name, 1, "paired")
    assert all(torch.equal(whole.weights["final"][n], w) for n, w in parts.weights["final"].items())
    pd.testing.assert_frame_equal(whole.history, parts.history)
