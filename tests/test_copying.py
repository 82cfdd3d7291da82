"""Ruling out the current token: against a loop over inputs, and on models whose answer is known."""
import pytest

from moe_redistribution.tasks.data import SEEDS
from moe_redistribution.studies.sparsity_moves.arms import TABLE1
from moe_redistribution.instruments.copying import copying_nulls, copying_rows, without_copy
from moe_redistribution.models.population import forward
from moe_redistribution.tasks.task import get_task
from toys import untrained

T = get_task("add7")

@pytest.mark.parametrize("name", ["add7/ffn-h16-silu", "add7/moe-e4k1-h16-silu", "add7/moe_glu-e2k1-h8-gelu"])
@pytest.mark.parametrize("how", [None, "zero", "mean"])
def test_it_is_the_best_of_the_other_tokens_on_the_inputs_where_the_current_one_is_wrong(name, how):
    params = untrained(name)
    said, asked = without_copy(params, name, {} if how is None else {"ffn_out": how})
    edits = {} if how is None else {"ffn_out": (lambda x: x * 0) if how == "zero"
                                    else (lambda x: x.mean(1, keepdim=True).expand_as(x))}
    logits = forward(params, T.tokens, name, edits)
    for s, n, j in [(0, 0, 0), (1, 193, 1), (0, 593, 2), (1, 999, 3), (0, 42, 1), (1, 7, 2)]:
        row = logits[s, n, T.read[j]].clone()
        current = int(T.tokens[n, T.read[j]])
        best = max((v.item(), -k) for k, v in enumerate(row) if k != current)
        assert said[s, n, j] == -best[1] and bool(asked[n, j]) == (current != int(T.targets[n, j]))

def test_rows_name_each_number_once_and_do_not_depend_on_company():
    name = "add7/moe-e4k1-h16-silu"
    params = untrained(name, range(3))
    whole = copying_rows(params, name, [1, 2, 3], rule="final")
    alone = copying_rows({n: v[1:2] for n, v in params.items()}, name, [2], rule="final")
    assert (not whole.duplicated(["seed", "site", "edit", "position"]).any()
            and set(whole["metric"]) == {"digits_no_copy"})
    assert whole.query("seed == 2")["value"].tolist() == alone["value"].tolist()
    counted = {f"o{j}": int((T.tokens[:, 3 + j] != T.targets[:, j]).sum()) for j in range(4)}
    assert whole.groupby("position")["n_examples"].first().to_dict() == counted

def test_a_mean_silences_the_copy_at_the_ones_and_not_at_the_tens():
    from moe_redistribution.instruments.ablation import combine_edits
    from moe_redistribution.models.population import predict
    from moe_redistribution.evidence.checkpoints import checkpoint
    said = predict(checkpoint(TABLE1["FFN"]), TABLE1["FFN"], combine_edits(TABLE1["FFN"], {"ffn_out": "mean"}))
    copies = (said == T.tokens[:, list(T.read)]).float().mean(1)
    assert len(copies) == len(SEEDS) and (copies[:, 0] < .05).all() and (copies[:, 1:3] > .9).all()

def test_tasks_whose_answers_are_not_input_tokens_are_refused():
    name = "hist/ffn-h8-gelu"
    for ask in (lambda: without_copy(untrained(name, [0]), name), lambda: copying_nulls(get_task("hist"))):
        with pytest.raises(ValueError, match="votes for itself.* fix: use ablation"): ask()
