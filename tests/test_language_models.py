"""A language model without its FFN: how the study's arms differ, and which seeds are its pilot's."""
import pytest
import torch

from moe_redistribution.evidence.claims import Claim, claims, seed_list, statements
from moe_redistribution.language.small import small_model
from moe_redistribution.language.training import _LanguageRecipe, _LanguageTraining
from moe_redistribution.evidence.design import strike
from moe_redistribution.report.pages import Page
from moe_redistribution.studies.language_models.study import (EVERY, LANGUAGE_ARMS, LM_PRESETS, PARTS_KINDS,
                                                              REFITS, SPEEDS, STUDY, _language_arm, _language_model, _rate_of,
                                                              _tempered_loss)
from moe_redistribution.language.text import Planted

SIZES = dict(d=16, heads=2, T=16)
TEXT = Planted(n_keys=4, n_values=6, n_words=12, window=16)

def trained(arm, steps=3):
    "(model before, model after a few steps of an arm)."
    before, after = (_language_model(f"{arm}/L2", TEXT.d_vocab, 1, SIZES) for _ in range(2))
    t = _LanguageTraining(after, _LanguageRecipe(steps, 1e-3, "constant", 0, 0, looks=1, **_language_arm(f"{arm}/L2")[1]))
    for i in range(steps): t.one_step(TEXT.batches(16, 4, 1)(i))
    return before, after

def moved(arm, part):
    "Mean change of the parameters whose name has `part` in it."
    before, after = trained(arm)
    return {n: (p - after.get_parameter(n)).abs().mean().item() for n, p in before.named_parameters() if part in n}

def test_a_frozen_router_does_not_move_and_a_router_of_the_balance_loss_does():
    assert {*moved("frozen", ".gate.weight").values()} == {0.}
    for arm in ("mixture", "top2", "switch"): assert min(moved(arm, ".gate.weight").values()) > 0, arm

def test_the_text_teaches_a_router_only_with_two_experts_or_switch_weights():
    def gradient(arm):
        t = _LanguageTraining(_language_model(f"{arm}/L2", TEXT.d_vocab, 1, SIZES), _LanguageRecipe(3, looks=1))
        t.gradients(TEXT.batches(16, 4, 1)(0))
        return max(float(p.grad.norm()) for n, p in t.moving.items() if n.endswith(".gate.weight"))
    assert gradient("mixture") < 1e-6 < 1e-4 < min(gradient("top2"), gradient("switch"))

@pytest.mark.parametrize("arm, base, part, factor", [("slow", "dense", ".mlp.", .25),
                                                     ("fast", "mixture", "experts", 4)])
def test_an_arm_at_another_rate_differs_in_the_first_step_of_its_ffn_alone(arm, base, part, factor):
    def first(a):
        before, after = trained(a, 1)
        return {n: (p - after.get_parameter(n)).abs().mean().item() for n, p in before.named_parameters()}
    own, plain = first(arm), first(base)
    for n in own:
        if ".gate.weight" in n and arm == "fast": continue
        assert own[n] == pytest.approx(plain[n] * (factor if part in n else 1), rel=.02), n

def test_switch_weights_multiply_and_renormalised_ones_do_not():
    for whole in (True, False):
        model = small_model("qwen3_moe", 20, 0, d=16, heads=2, E=4, k=1, h=8, norm_topk_prob=whole)[0]
        _, weights, _ = model.model.layers[0].mlp.gate(torch.randn(5, 16))
        assert bool((weights == 1).all()) == whole and (weights > .2).all()

def test_arms_at_another_rate_stand_for_points_of_the_sweep():
    "`speed` leaves out what `night` has under another name, which is right while the rates are the same."
    x = LM_PRESETS["night"].settings["lr"]
    assert x["slow"] == x["dense"] and x["fast"] != x["mixture"]
    assert "mixture_x4/L3" in LM_PRESETS["speed"].arms
    both = {(a, f) for a in ("dense", "mixture") for f in SPEEDS}
    names = [a.partition("/")[0].partition("_x") for a in LM_PRESETS["speed"].arms]
    own = {(a, float(f)) for a, _, f in names}
    assert both - own == {("dense", 1.), ("dense", .25), ("mixture", 1.)}

def test_a_word_that_cannot_follow_does_not_spoil_the_best_factor():
    p, truth = torch.tensor([.8, .2, 0., 0.]), torch.tensor([0, 0, 0, 0, 1])
    found, factor = _tempered_loss(p.log().expand(5, 4), truth)
    entropy = torch.distributions.Categorical(p[:2]).entropy().item()
    assert found == pytest.approx(entropy, abs=1e-3) and factor == pytest.approx(1, abs=.02)
    with pytest.raises(ValueError, match="got NaN"): _tempered_loss(torch.full((5, 4), torch.nan), truth)

def test_no_pilot_seed_is_in_another_preset():
    decide = [p for n, p in LM_PRESETS.items() if "pilot" not in n]
    assert all(set(own) <= set(range(1, 17)) for p in decide for own in p.arms.values())
    assert all(_rate_of(a, p.settings) for n, p in LM_PRESETS.items() for a in p.arms if a != "nulls")
    assert {a.partition("/")[0] for a in LM_PRESETS["night"].arms} == {*LANGUAGE_ARMS, "nulls"}

def test_every_line_asks_for_a_row_that_the_study_measures():
    BRIEFLY = ("none", *EVERY[:2])
    measured = {("L*.ffn_out", e) for e in (*EVERY, *REFITS)} | {("none", "none"), ("L*", "zero")}
    lines = [c for t in (claims(), statements()) for c in Claim.of(t[t["instrument"] == "language_models"])]
    assert len(lines) > 80
    for c in lines:
        for r in c.readings:
            for name in r.condition.replace("|", " ").split():
                _, _, preset = name.partition("/")[0].partition(".")
                arm = name.partition("/")[2].removesuffix("/equal")
                added = range(9, 17) if preset == "parts" else ()                         # study … --seeds 9-16
                assert set(seed_list(r.seeds)) <= {*STUDY.presets[preset].arms[arm], *added}, c
            assert (r.site, r.edit) in measured, c
            assert preset == "night" or r.edit in BRIEFLY, c
            assert (r.unit, r.position, r.split, r.rule) == ("", "all", "all", "final"), c
            assert r.stratum in dict(kjv=("all",), parts=PARTS_KINDS).get(preset, ("word", "value")), c

def test_an_endpoint_that_no_ffn_does_as_well_on_is_struck():
    "Loss on a word, the only endpoint that this study had: by the rule of the design check it would not have counted."
    def whole(arm, kind):
        own = Page("", streams=["paired"], language_models=[f"language_models.pilot/{arm}/L3@0.001"]).rows
        return own.query("metric == 'choice' and rule == 'final' and site == 'none' and stratum == @kind")["value"]
    margin = claims().query("id.str.startswith('contrast.language_models.depth3.')")["margin"].max()
    assert "within two margins" in strike(whole("dense", "word"), whole("none", "word"), margin)
    assert not strike(whole("dense", "word"), whole("none", "word") + 3 * margin, margin)

def test_embeddings_alone_hear_nothing_but_the_current_token():
    model, text = _language_model("embed/L1", TEXT.d_vocab, 1, SIZES), TEXT.heldout(16, 4)[:, :-1]
    assert torch.equal(model(input_ids=text).logits[:, -1:], model(input_ids=text[:, -1:]).logits)
    before, after = trained("embed")
    still = [n for n, p in before.named_parameters() if torch.equal(p, after.get_parameter(n))]
    assert all("layers" in n for n in still) and {*moved("embed", "embed_tokens").values()} != {0.}
