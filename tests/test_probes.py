"""Linear probes against scikit-learn and plain loops: which rows are fitted on, what a table knows, what is refused."""
import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from moe_redistribution.models.population import init
from moe_redistribution.models.planted import carry_by_attention, carry_by_ffn
from moe_redistribution.instruments.probes import (SETTINGS, _answer_rows, _fit_converged, features, _lookup_accuracy,
                                                   group_split, probe,
                                                   _probe_rows, shuffle, _tokens_alone)
from moe_redistribution.tasks.task import get_task

def noisy(n=900, d=12, classes=3, population=2, seed=0):
    "Features (population, n, d) that tell of three classes with many mistakes, and the classes."
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    means = torch.randn(population, classes, d, generator=g) * .6
    return means[:, y] + torch.randn(population, n, d, generator=g) * torch.linspace(.5, 30, d), y

def by_sklearn(x, y, fit):
    mean, std = x[fit].mean(0), x[fit].std(0, correction=0)
    x = ((x - mean) / std).double().numpy()
    model = LogisticRegression(max_iter=5000, tol=1e-8).fit(x[fit], y[fit])
    return model.score(x[~fit], y[~fit]), model

@pytest.mark.parametrize("classes", [2, 3, 5])
def test_accuracies_are_those_of_scikit_learn_on_the_same_split(classes):
    x, y = noisy(classes=classes)
    found, fit = probe(x, y), group_split(torch.arange(len(y)))
    for i in range(len(x)): assert abs(found["accuracy"][i] - by_sklearn(x[i], y, fit)[0]) <= .01

def test_converged_weights_are_scikit_learns():
    x, y = (v[0] if v.ndim == 3 else v for v in noisy(400, 5, population=1))
    x = (x - x.mean(0)) / x.std(0)
    hot = torch.nn.functional.one_hot(y)[None].double()
    w = _fit_converged(torch.cat([x, torch.ones(len(x), 1)], 1)[None].double(), hot, steps=200, tol=1e-9)[0, :, 0]
    model = LogisticRegression(max_iter=5000, tol=1e-10).fit(x.numpy(), y)
    assert torch.allclose(w[:-1] - w[:-1].mean(1, keepdim=True), torch.from_numpy(model.coef_.T).double(), atol=2e-3)

def test_no_group_lies_in_both_parts_and_another_seed_is_another_split():
    groups = torch.arange(50).repeat_interleave(4)
    a, b = group_split(groups), group_split(groups, 1)
    assert a.view(50, 4).all(1).logical_or(~a.view(50, 4).any(1)).all() and a.sum() == 140 and (a != b).any()
    assert (group_split(groups) == a).all()

def test_test_accuracy_does_not_see_the_labels_of_the_test_part():
    x, y = noisy()
    fit = group_split(torch.arange(len(y)))
    spoilt = torch.where(fit, y, (y + 1) % 3)
    agree = probe(x, y)["accuracy"] + probe(x, spoilt)["accuracy"]
    assert (agree <= 1).all() and torch.equal(probe(x, y)["fitted"], probe(x, spoilt)["fitted"])

def test_a_seed_in_a_population_is_that_seed_alone():
    x, y = noisy(population=3)
    for setting in ("audited", "spec"):
        together = probe(x, y, setting=setting, steps=40)["accuracy"]
        assert probe(x[:1], y, setting=setting, steps=40)["accuracy"][0] == pytest.approx(together[0].item(), abs=.01)
    both = probe(x, torch.stack([y, y.flip(0)]))["accuracy"]
    assert both.shape == (3, 2) and torch.allclose(both[:, 0], probe(x, y)["accuracy"], atol=.01)

def test_shuffled_labels_stay_at_their_place_and_keep_their_counts():
    y, places = torch.randint(0, 4, (2, 600), generator=torch.Generator().manual_seed(0)), torch.arange(600) % 3
    out = shuffle(y, places)
    assert (out != y).any()
    for i in range(2):
        for p in range(3):
            a, b = (v[i, places == p].bincount(minlength=4) for v in (out, y))
            assert torch.equal(a, b)

def test_balanced_and_each_class_have_their_controls():
    x, y = noisy(classes=3, population=1)
    y = torch.where(y == 2, y,
                    torch.minimum(y, torch.randint(0, 9, y.shape, generator=torch.Generator().manual_seed(1))))
    found, fit = probe(x, y, by_class=True), group_split(torch.arange(len(y)))
    for name, labels in (("", y), ("_control", shuffle(y[None], torch.zeros(len(y)))[0])):
        model = by_sklearn(x[0], labels, fit)[1]
        said = torch.from_numpy(model.predict(
            ((x[0] - x[0][fit].mean(0)) / x[0][fit].std(0, correction=0)).double().numpy()))
        each = [(said == labels)[~fit & (labels == v)].double().mean().item() for v in range(3)]
        assert found[f"by_class{name}"][0].tolist() == pytest.approx(each, abs=.03)
        assert found[f"balanced{name}"].item() == pytest.approx(np.mean(each), abs=.02)

def test_lookup_is_a_dictionary():
    g = torch.Generator().manual_seed(2)
    keys, y = torch.randint(0, 30, (300,), generator=g), torch.randint(0, 3, (1, 300), generator=g)
    fit = torch.arange(300) < 120
    seen = {}
    for k, v in zip(keys[fit].tolist(), y[0, fit].tolist()): seen.setdefault(k, []).append(v)
    usual = np.bincount(y[0, fit]).argmax()
    said = [np.bincount(seen[k]).argmax() if k in seen else usual for k in keys[~fit].tolist()]
    assert _lookup_accuracy(keys, y, fit, ~fit).item() == pytest.approx(np.mean(np.array(said) == y[0, ~fit].numpy()))

def test_a_constant_or_scaled_feature_changes_nothing():
    x, y = noisy(population=1)
    scaled = torch.cat([x * 1000 + 7, torch.full_like(x[..., :3], 2.)], -1)
    assert probe(scaled, y)["accuracy"].item() == pytest.approx(probe(x, y)["accuracy"].item(), abs=.01)

def test_planted_rows_say_what_the_construction_says():
    table = _probe_rows(carry_by_ffn(), "add7/ffn-h32-relu", [7])
    at = table.set_index(["site", "position", "metric"])["value"]
    assert at["embed", "o1", "operation_accuracy"] == at["none", "o1", "operation_tokens_alone"] == 1
    assert abs(at["attn_out", "o1", "operation_accuracy"] - at["none", "o1", "operation_majority"]) < .03
    assert at["ffn_out", "o2", "operation_balanced"] == 1 and at["embed", "o2", "operation_accuracy"] < .99
    assert set(table["seed"]) == {7} and set(table["split"]) == {"test"} and len(table) <= 160
    assert at["ffn_out", "o2", "operation_balanced_control"] < .6                        # of two classes
    silent = _probe_rows(carry_by_attention(), "add7/ffn-h32-relu+d128", [0], at_sites=("ffn_out",))
    at = silent.set_index(["site", "position", "metric"])["value"]
    assert at["ffn_out", "o1", "operation_accuracy"] == pytest.approx(at["none", "o1", "operation_majority"])

def test_features_of_experts_stand_side_by_side():
    c = "add7/moe_glu-e2k1-h8-silu"
    x = features(init(c, [torch.Generator().manual_seed(0)]), c, ["gate", "up", "hidden"])
    assert x["hidden"].shape == (1, 1000, 4, 8) and torch.allclose(x["gate"] * x["up"], x["hidden"], atol=1e-6)

def test_tokens_alone_counts_by_hand():
    t, fit = get_task("add7"), torch.ones(1000, dtype=torch.bool)
    y = torch.tensor((t.strata["operation_o2"] == "+1").tolist()).long()
    assert _tokens_alone("add7/ffn-h8-silu", y[None], fit, fit, [2]).item() == pytest.approx(.97)

def test_settings_are_the_paper_s():
    assert not SETTINGS["code"].split and SETTINGS["spec"].lr == 1e-3 and SETTINGS["spec"].batch == 128

def rows_of(measure, name, **how): return measure(init(name, [torch.Generator()]), name, [0], **how)

@pytest.mark.parametrize("call, says", [
    (lambda: probe(torch.full((4, 2), torch.nan), torch.arange(4)), "finite features"),
    *((lambda how=how, m=measure, n=name: rows_of(m, n, at_sites=how), says)
      for measure, name in ((_probe_rows, "add7/ffn-h8-silu"), (_answer_rows, "modadd/ffn-h8-gelu+d32"))
      for how, says in ((("mlp_out",), "site: expected one of .*; got 'mlp_out'"), (("ffn_out", "gate"), "got 'gate'"),
                        ((), "one or more; got none")))])
def test_what_cannot_be_probed_is_refused(call, says):
    with pytest.raises(ValueError, match=says): call()
