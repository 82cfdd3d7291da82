"""What is known before any training, counted a second time: on strings, by formula, and by brute force over pairs."""
import numpy as np
import pytest

from moe_redistribution.evidence import printed as paper
from moe_redistribution.models.condition import RECIPES, condition
from moe_redistribution.tasks.data import SEEDS, generators
from moe_redistribution.studies.sparsity_moves.facts import _fact_rows
from moe_redistribution.models.population import init

TABLE2 = {"add7": ("ffn-h256-silu", "glu-h170-silu", "moe-e4k1-h256-silu", "moe_glu-e4k1-h168-silu"),
          "modadd": ("ffn-h512-gelu", "glu-h340-gelu", "moe-e4k1-h512-gelu", "moe_glu-e4k1-h340-gelu")}
TABLE2["hist"] = TABLE2["modadd"]
ALL = [f"{task}/{body}" for task, bodies in TABLE2.items() for body in bodies]

def fact(name, metric, unit=""):
    rows = _fact_rows(name)
    rows = rows[(rows["metric"] == metric) & (rows["unit"] == unit) & (rows["position"] == "all")]
    assert len(rows) == 1, metric
    return rows["value"].iloc[0]

def add7_by_strings():
    "Operation at each answer digit: what must be added to the digit of the question, read off the written numbers."
    found = []
    for n in range(1000):
        a, b = f"{n:04d}"[::-1], f"{n + 7:04d}"[::-1]
        found.append([f"+{(int(y) - int(x)) % 10}" for x, y in zip(a, b)])
    return np.array(found)

def test_splits_and_sets_have_the_sizes_that_arithmetic_gives():
    m, h = "modadd/ffn-h512-gelu", "hist/ffn-h512-gelu"
    assert (fact(m, "p"), fact(m, "vocab_size")) == (113, 114)
    assert (fact(m, "train_size"), fact(m, "test_size")) == (int(.3 * 113**2), 113**2 - int(.3 * 113**2))
    assert (fact(m, "train_pct") == pytest.approx(100 * fact(m, "train_size") / 113**2)
            and 29.99 < fact(m, "train_pct") < 30)
    assert [fact(h, n)
            for n in ("L", "T", "refresh_every_epochs", "train_size", "test_size")] == [10, 32, 50, 10_000, 3_000]
    assert fact("add7/ffn-h256-silu", "test_size") == 1000

def by_formula(task, body):
    "Biases on dense and MoE layers and none on gated ones; a router maps the residual stream to the experts."
    d = {"add7": 64, "modadd": 128, "hist": 128}[task]
    variant, width = body.split("-")[0], int(body.split("-h")[1].split("-")[0])
    E = 4 if variant.startswith("moe") else 1
    h = width // E
    one = 3 * d * h if "glu" in variant else d * h + h + h * d + d
    return h, E * one + (d * E if E > 1 else 0)

@pytest.mark.parametrize("name", ALL)
def test_widths_and_parameters_follow_the_formula_the_tensors_that_train_and_table_2(name):
    width, params = by_formula(*name.split("/"))
    task, body = name.split("/")
    printed = paper.paper_values().query("item == 'tab2' and task == @task").set_index(["variant", "metric"])["mean"]
    said = [printed[body.split("-")[0], metric] for metric in ("hidden_width", "ffn_params")]
    assert [fact(name, "hidden_width"), fact(name, "ffn_params")] == [width, params] == said
    drawn = init(name, [generators(0)["weights"]])
    whole = sum(v[0].numel() for v in drawn.values())
    rest = sum(v[0].numel()
               for n, v in drawn.items() if n in ("W_E", "W_pos", "W_U", "W_Q", "W_K", "W_V", "W_O", "b_O"))
    assert whole - rest == params
    dense = by_formula(name.split("/")[0], TABLE2[name.split("/")[0]][0])[1]
    assert fact(name, "param_tolerance") == pytest.approx(abs(params - dense) / dense)

@pytest.mark.parametrize("name, recipe", [
    ("add7/moe-e4k1-h256-silu", (64, 4, 4, .01, .001, .01, 128, 10_000)),
    ("modadd/moe-e4k1-h512-gelu", (128, 4, 4, .01, .001, 1, 3830, 40_000)),
    ("hist/ffn-h512-gelu", (128, 4, 1, 0, .001, 0, 10_000, 1_000)),
    ("add7/ffn-h256-silu+wd0", (64, 4, 1, 0, .001, 0, 128, 10_000)),
    ("modadd/ffn-h512-gelu+d64", (64, 2, 1, 0, .001, 1, 3830, 40_000))])
def test_the_recipe_is_the_one_that_the_authors_code_ran(name, recipe):
    "Typed from the audit of their scripts, decay of add-7 and histogram included, where the paper prints others."
    names = "d_model n_heads n_experts lambda_aux learning_rate weight_decay batch_size duration".split()
    assert tuple(fact(name, n) for n in names) == pytest.approx(recipe)
    assert fact(name, "uniform_head_share") == 1 / fact(name, "n_heads")

def test_the_five_seeds_stand_in_the_printed_order():
    said = paper.paper_values().query("item == 'tab3' and metric == 'seed'").sort_values("id")["mean"]
    assert [fact("add7/ffn-h256-silu", "seed", f"S{i}") for i in range(5)] == list(said) == list(SEEDS)

def test_pairs_for_patching_are_those_that_a_double_loop_finds():
    """Same copied digit, different operation, either direction; o3 copies nothing.

    The figure's script takes five by five."""
    ops, found = add7_by_strings(), _fact_rows("add7/ffn-h256-silu").query("metric == 'n_pairs'")
    digit = np.array([[int(x) for x in f"{n:04d}"[::-1]] for n in range(1000)])
    assert set(found["position"]) == {"o1", "o2", "o3"} and set(found["unit"]) == {"patch", "patch25"}
    for j in (1, 2, 3):
        same = (digit[:, None, j] == digit[None, :, j])
        n = int((same & (ops[:, None, j] != ops[None, :, j])).sum())
        mine = found[found["position"] == f"o{j}"].set_index("unit")["value"]
        assert mine.to_dict() == {"patch": n, "patch25": 25}

def test_a_fact_has_no_seed_no_stream_and_no_checkpoint():
    for name in ("add7/ffn-h256-silu", "modadd/glu-h340-gelu", "hist/moe-e4k1-h512-gelu+frozen"):
        rows = _fact_rows(name)
        assert (set(zip(rows["stream"], rows["rule"], rows["seed"])) == {("none", "none", 0)}
                and set(rows["condition"]) == {name})
        assert not rows.duplicated(["metric", "unit", "position"]).any() and np.isfinite(rows["value"]).all()
        assert rows.equals(_fact_rows(condition(name)))
    assert {t.partition("x")[0] for t in RECIPES} == {"add7", "modadd", "hist"}                 # a study makes add7x50d0
