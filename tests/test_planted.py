"""Planted models add seven in every condition that takes their weights, and refuse the others."""
import pytest

from moe_redistribution.models.population import predict
from moe_redistribution.models.planted import carry_by_attention, carry_by_experts, carry_by_ffn, copy_model
from moe_redistribution.tasks.task import exact, get_task

T = get_task("add7")

@pytest.mark.parametrize("make, rest", [
    (carry_by_ffn, "ffn-h21-relu"), (carry_by_ffn, "ffn-h32-silu+d48"), (carry_by_experts, "moe-e4k1-h40-relu"),
    (carry_by_experts, "moe-e8k2-h128-gelu+switch"), (carry_by_attention, "no_ffn+d96"),
    (carry_by_attention, "moe_glu-e4k2-h64-gelu+d128")])
def test_a_model_that_is_made_adds_seven(make, rest):
    assert exact(predict(make(f"add7/{rest}"), f"add7/{rest}") == T.targets).item() == 1

@pytest.mark.parametrize("make, name", [
    (carry_by_ffn, "add7/ffn-h16-relu"), (carry_by_ffn, "add7/glu-h32-relu"), (carry_by_ffn, "add7/no_ffn"),
    (carry_by_ffn, "add7/moe-e4k1-h128-relu"), (carry_by_ffn, "add7/ffn-h32-relu+d32"),
    (carry_by_experts, "add7/moe-e4k1-h64-relu+norm"), (carry_by_experts, "add7/moe-e2k1-h64-relu"),
    (carry_by_experts, "add7/moe-e8k1-h64-relu"), (carry_by_experts, "add7/moe_glu-e4k1-h64-relu"),
    (carry_by_experts, "add7/moe-e4k1-h64-relu+tokens"), (carry_by_attention, "add7/ffn-h32-relu"),
    (carry_by_attention, "add7/ffn-h32-relu+norm+d128"), (copy_model, "add7/ffn-h32-relu+d32"),
    (copy_model, "modadd/ffn-h32-relu"), (copy_model, "add7/ffn-h32-relu+norm")])
def test_a_condition_that_has_no_place_for_the_weights_is_refused(make, name):
    with pytest.raises(ValueError, match="planted: expected an add7 condition with .*; fix: use add7/"): make(name)
