"""The registry holds every run of the paper once, says which item needs it, and orders the decisive runs first."""
import dataclasses

import pytest
from hypothesis import given, strategies as st

from moe_redistribution.studies.sparsity_moves import experiments as R
from moe_redistribution.training import orders as O
from moe_redistribution.studies.sparsity_moves.arms import ARMS, FIGURE1, GELU, LABELS, PAPER_TASKS, TABLE1
from moe_redistribution.models.condition import RECIPES, condition
from moe_redistribution.tasks.data import SEEDS
from moe_redistribution.evidence.claims import claims
from moe_redistribution.studies.sparsity_moves.experiments import AUDIT, EXPERIMENTS, ITEMS, conditions_for, orders
from moe_redistribution.training.orders import expected_seconds, expected_steps

ALL = R.OWN

# The choices in which a sweep departs from the models that the paper trains everywhere, by the word in its key.
DEPARTS = dict(matched=["d_mlp"], narrow=["d_mlp"], half=["d_mlp"], peractive=["d_mlp"], random=["router"],
               top2=["top_k"], norm=["norm"], freeze=["freeze", "clip", "balance"], heldout=["hold"],
               regularised=["drop", "weight_decay"], experts=["n_experts"], width=["d_model", "d_mlp", "n_heads"])
DEPARTS["lambda"] = ["balance"]
MAIN = {"silu", "gelu", "main"}                                                    # words of the sweeps of those models

# -------------------------------------------------------------------------------------------------------- experiments

def test_a_sweep_departs_from_the_main_models_in_what_its_name_says_and_in_nothing_else():
    word = {n: e.key.split("-")[1] for e in EXPERIMENTS.values() if e.key != "modadd-seeds" for n in e.names}
    alike = lambda c: (c.task, c.ffn, c.activation)
    main = {alike(c): c for n, w in word.items() if w in MAIN for c in [condition(n)]}
    assert len(main) == 3 * 4 * 2                                                   # tasks, variants, activations
    for c, allowed in ((condition(n), set(DEPARTS[w])) for n, w in word.items() if w not in MAIN):
        departs = {f.name for f in dataclasses.fields(c) if getattr(c, f.name) != getattr(main[alike(c)], f.name)}
        assert departs and departs <= allowed, (c.name, departs)
    assert {condition(n)
            for n in EXPERIMENTS["modadd-seeds"].names} <= set(main.values()), "other seeds of the same models"

def test_names_are_written_as_the_grammar_writes_them_and_stand_once():
    for e in ALL.values():
        assert [str(condition(n)) for n in e.names] == list(e.names) and len(set(e.names)) == len(e.names), e.key
        assert {condition(n).task for n in e.names} == {e.task}, e.key
    assert all(e.task == key.split("-")[0] for key, e in EXPERIMENTS.items())

def test_seeds_are_the_papers_five_but_for_the_extra_ones_and_the_audits_128():
    assert EXPERIMENTS["modadd-seeds"].seeds == tuple(range(1, 16))
    assert {e.seeds for k, e in EXPERIMENTS.items() if k != "modadd-seeds"} == {SEEDS}
    audit = [e.seeds for e in AUDIT.values()]
    assert AUDIT["audit-table1"].seeds == tuple(range(1, 129)) and all(s == SEEDS or len(set(s)) >= 96 for s in audit)
    assert all(s == SEEDS or 1 <= min(s) <= max(s) <= 192 for s in audit), "a seed beyond is a cell of the replicates"

def test_gated_experts_have_the_width_that_parity_asks_for():
    wide = {k: {condition(n).d_expert for n in ALL[k].names if condition(n).ffn == "moe_glu"} for k in ALL}
    assert wide["add7-matched"] == {42} and wide["modadd-matched"] == wide["hist-matched"] == {85}
    assert wide["add7-peractive"] == {170} and wide["modadd-peractive"] == wide["hist-peractive"] == {340}

# -------------------------------------------------------------------------------------------------------------- items

TRAIN_NOTHING = {"tab2", "tab3", "appA", "repo:results_md"}

@pytest.mark.parametrize("item", sorted(TRAIN_NOTHING | {"tab1x9", "fig4_lefft", "add8-silu", "", "repo"}))
def test_an_item_without_runs_is_refused_with_the_nearest_in_one_message(item):
    for ask in (conditions_for, orders, R.registry, R.by_experiment):
        with pytest.raises(ValueError) as caught: ask(item)
        message = str(caught.value)
        assert "\n" not in message and message.count("fix: ") == 1 and ("nearest: " in message or "valid: " in message)

def test_no_item_names_a_variant_or_activation_that_its_experiment_lacks():
    for line in ITEMS.values():
        for token in line.split():
            head, _, words = token.partition(":")
            assert head in ITEMS and not words or head in EXPERIMENTS, token
            names = [condition(n) for n in EXPERIMENTS[head].names] if head in EXPERIMENTS else []
            have = {c.ffn for c in names} | {c.activation for c in names}
            assert set(filter(None, words.split(","))) <= have, token
            assert R._line_pairs(token), token

def test_an_item_s_claims_name_no_condition_that_the_item_does_not_train():
    bridge = claims().query("protocol == 'paper' and instrument not in ['facts', 'none']")
    # the note says where it comes from
    other = bridge["note"].str.contains("matched width, where Figure 19|for add-7, but the script")
    bridge = bridge[~other]
    for item in [i for i in bridge["item"].unique() if i in ITEMS]:
        named = {n for c in bridge[bridge["item"] == item].itertuples() for n in f"{c.condition} {c.versus}".split()}
        assert named <= set(conditions_for(item)), (item, named - set(conditions_for(item)))

def test_words_mean_what_they_meant_and_all_means_everything():
    audit, everything = conditions_for("audit"), conditions_for("all")
    assert audit[:10] == list((TABLE1 | FIGURE1 | ARMS).values()) and audit[-3:] == list(GELU.values())
    assert set(LABELS) <= set(audit) <= set(everything) and len(set(everything)) == len(everything)

@pytest.mark.parametrize("name, item", {"fig15a_caption": "fig15a", "fig4_left": "fig4", "fig23b": "fig23",
                                        "fig26c": "fig26c", "appH_controls": "appH", "fig11_bottom": "fig11"}.items())
def test_a_panel_or_caption_finds_its_figure(name, item): assert conditions_for(name) == conditions_for(item)

def test_an_item_of_another_name_that_ends_alike_is_another_item():
    assert conditions_for("fig1") != conditions_for("fig15") and "fig15" in R._items_of("modadd/moe-e8k1-h512-gelu")
    assert "fig1" not in R._items_of("add7/glu-h128-silu") and "fig10" in R._items_of("add7/glu-h128-silu")
    both = set(R._items_of("add7/ffn-h256-silu"))
    assert {"fig1", "fig10", "fig3"} <= both and "fig3a" not in both                   # the figure stands for its panel

# ------------------------------------------------------------------------------------------------------------- orders

def test_everything_registered_is_ordered():
    got = {(o.condition, o.stream, s) for o in orders() for s in o.seeds}
    # at the paper's seeds, too
    ours = (*(ARMS | GELU).values(), "add7/glu-h42-silu", "hist/ffn-h512-gelu+ffnlr0.25",
            "modadd/moe-e4k2-h512-gelu+frozen", *(f"{t}/no_ffn" for t in PAPER_TASKS))
    assert got == ({(n, "authors", s) for e in EXPERIMENTS.values() for n in e.names for s in e.seeds}
                   | {(n, "paired", s) for e in (*AUDIT.values(), R.ENDS, R.AFTER) for n in e.names
                      for s in e.seeds if len(e.seeds) > 5}
                   | {(n, "crossed", s) for e in (R.REPLICATES, R.TWINS) for n in e.names for s in e.seeds}
                   | {(n, "authors", s) for n in ours for s in SEEDS})

def test_tasks_take_their_turn():
    first = orders()
    tasks = {p: {condition(o.condition).task for o in first if o.priority == p} for p in range(1, 6)}
    assert tasks == {1: {"add7"}, 2: {"modadd"}, 3: {"hist"}, 4: {"modadd"}, 5: {"modadd", "hist"}}

def test_of_add7_32_whole_trajectories_come_first_then_the_five_seeds_then_the_128_and_last_the_ends_of_every_rate():
    kind = {("paired", "full"): 0, ("authors", "full"): 1, ("authors", "selected"): 1, ("paired", "selected"): 2,
            ("crossed", "selected"): 3}
    first, ends = ([o for o in orders() if (o.experiment in ("audit-ends", "audit-after")) is last]
                   for last in (False, True))
    assert ([o for o in orders() if o.priority == 1][-len(ends):] == ends
            and {o.seeds for o in ends} == {tuple(range(129, 161))})
    turns = [kind[o.stream, o.until] for o in first if o.priority == 1]
    assert turns == sorted(turns) and turns.count(0) == 7
    long = [o for o in first if (o.stream, o.until) == ("paired", "full")]
    assert {o.seeds for o in long} == {tuple(range(1, 33))} and long[0].condition == TABLE1["MoE"]
    assert {o.condition for o in long} == {
        *ARMS.values(), "add7/ffn-h256-silu", "add7/ffn-h64-silu", "add7/moe-e4k1-h256-silu",
        "add7/moe-e4k1-h256-silu+frozen", "add7/moe-e4k1-h256-silu+switch"}
    rest = {o.condition: o.seeds for o in first if (o.stream, o.until) == ("paired", "selected")}
    fixed = {n: rest.pop(n) for n in list(rest) if condition(n).router in ("tokens", "inputs", "shuffled", "redrawn")}
    # and where the arms beside them are held out
    assert {s for n, s in fixed.items() if condition(n).ffn_lr == 1} == {(*range(1, 65), *range(129, 193))}
    assert ({s for n, s in fixed.items() if condition(n).ffn_lr != 1} == {(*range(1, 65), *ends[0].seeds)}
            and len(fixed) == 16)
    assert all(s == tuple(range(33 if n in {o.condition for o in long} else 1, 129)) for n, s in rest.items())

def test_a_task_goes_as_far_and_in_such_groups_as_its_figures_and_its_batch_ask_for():
    for o in orders():
        task = condition(o.condition).task
        if o.experiment == "replicates-modadd": assert (o.until, o.group_size) == ("first", 1)
        elif task != "add7": assert (o.until, o.group_size) == ({"modadd": "selected", "hist": "full"}[task], 1)
        else: assert o.group_size in {"authors": (5,), "paired": (8,), "crossed": (8, 5)}[o.stream]

def test_replicates_are_eight_weights_by_eight_streams_each_twice_in_other_company():
    mine = orders("replicates")
    assert len(mine) == 6 and {o.stream for o in mine} == {"crossed"} and all(len(o.seeds) == 64 for o in mine)
    by = {r: [o for o in mine if o.seeds[0] // 10_000 == r] for r in (0, 1)}
    assert {o.group_size for o in by[0]} == {8} and {o.group_size for o in by[1]} == {5}
    assert [s + 10_000 for s in by[0][0].seeds] == list(by[1][0].seeds)

def test_an_item_orders_the_papers_runs_and_the_audits_of_the_same_conditions():
    mine = orders("tab1")
    assert {o.condition for o in mine} == set(TABLE1.values())
    assert {o.experiment for o in mine} == {"add7-silu", "add7-narrow", "add7-random", "audit-table1"}
    assert {s for o in orders("fig15b") for s in o.seeds} == set(SEEDS)                  # not the fifteen others
    assert mine == [o for o in orders() if o in mine]

# -------------------------------------------------------------------------------------------------------------- costs

@pytest.mark.parametrize("task", RECIPES)
@given(st.sampled_from(["ffn-h{}", "glu-h{}", "moe-e4k1-h{}", "moe_glu-e4k1-h{}"]), st.integers(1, 300),
       st.integers(1, 300), st.integers(1, 10**5))
def test_a_wider_model_and_a_longer_training_cost_more(task, shape, width, more, steps):
    narrow, wide = (f"{task}/{shape.format(4 * w)}-gelu" for w in (width, width + more))
    assert 0 < expected_seconds(narrow, steps) < expected_seconds(wide, steps)
    assert expected_seconds(narrow, 2 * steps) == pytest.approx(2 * expected_seconds(narrow, steps))

@pytest.mark.parametrize("key", O.STEP_SECONDS)
def test_a_reference_condition_costs_what_was_measured(key):
    reference, seconds, fixed = O.STEP_SECONDS[key]
    c = condition(reference)
    assert (c.task, c.routed) == key and 0 <= fixed < 1
    assert expected_seconds(reference, 100) == pytest.approx(100 * seconds)

def test_a_full_batch_step_is_priced_by_all_its_examples():
    for task, n in {"modadd": 3830, "hist": 10_000}.items():
        name = f"{task}/ffn-h512-gelu"
        assert condition(name).batch == 0 and O._step_flops(name) == O.flops(name, batch=n)
    assert expected_seconds("modadd/ffn-h1024-gelu+d256", 1) > 2 * expected_seconds("modadd/ffn-h512-gelu", 1)

def test_expected_steps_follow_schedule_and_learning_rate():
    name = "add7/ffn-h256-silu"
    steps = [expected_steps(f"{name}+ffnlr{m}" if m != 1 else name, "selected") for m in (.01, .125, .25, 1, 4)]
    assert steps[0] == RECIPES["add7"]["steps"] and steps == sorted(steps, reverse=True) and steps[-1] == steps[-2]
    assert [expected_steps(f"{t}/ffn-h64-gelu", "full") for t in RECIPES] == [r["steps"] for r in RECIPES.values()]
    with pytest.raises(ValueError, match="nearest: 'selected'"): expected_steps(name, "selectd")

# -------------------------------------------------------------------------------------------------------- the registry

def test_the_registry_lists_an_items_conditions_with_their_runs():
    for item in (*ITEMS, *ALL, "arms", "gelu", "audit"):
        frame = R.registry(item)
        runs = frame[["authors", "paired", "crossed"]].sum(axis=1)
        assert frame["condition"].tolist() == conditions_for(item) and (runs > 0).all(), item
        assert (frame["cpu_hours"] > 0).all() and set(frame["task"]) <= set(RECIPES), item
