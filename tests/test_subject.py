"""What opens one model opens another, and an edit means the same however many members run at once."""
from functools import partial

import pytest
import torch

from moe_redistribution.instruments.ablation import (ablate, ablate_each, ablation_curve, ablation_rows, decode,
                                                     main_sites, edits_for, combine_edits)
from moe_redistribution.instruments.attribution import attribution
from moe_redistribution.instruments.copying import copying_rows
from moe_redistribution.instruments.patching import patching_rows
from moe_redistribution.instruments.patterns import pattern_rows, patterns
from moe_redistribution.instruments.rerouting import _rerouted_answers, routes_held
from moe_redistribution.instruments.routing import routes
from moe_redistribution.instruments.subject import Population, Subject, Wrapped, subject
from moe_redistribution.instruments.trace import parts, trace
from moe_redistribution.models.condition import condition
from moe_redistribution.models.edits import Edit, PerMember
from moe_redistribution.models.population import Transformer, forward, predict, sites, watcher
from moe_redistribution.tasks.task import get_task
from toys import untrained

T = get_task("add7")
MOE, DENSE, TWO, NORM = ("add7/moe-e4k2-h16-silu", "add7/ffn-h8-silu", "add7/moe-e2k1-h8-silu+L2",
                         "add7/glu-h8-silu+norm")
S = 3

def population(name, n=S):
    "Untrained, with embeddings so small that what is said is not the copy of the current token, whatever is put in."
    params = untrained(name, range(n))
    return params | {"W_E": .1 * params["W_E"], "W_pos": .1 * params["W_pos"]}

def answer(logits): return logits[:, :, list(T.read)].argmax(-1)

# --------------------------------------------------------------------------- one meaning, however many members at once

@pytest.mark.parametrize("name, site, kind",
                         [(MOE, "attn_out", "mean"), (MOE, "ffn_out", "asked"), (DENSE, "hidden", "whole"),
                          (TWO, "ffn_out", "mean"), (NORM, "pattern", "asked"), (NORM, "z", "mean")])
def test_a_tensor_that_is_brought_along_is_each_member_s_own_everywhere(name, site, kind):
    "The means of every seed, captured and put in: one pass of all, one by one, in sets of edits, on own prefixes."
    params, site = population(name), "L1." * (name == TWO) + site
    own = trace(params, T.tokens, name, [site])[site]
    own = own if kind == "whole" else own.mean(1, keepdim=True)
    edits = {site: (lambda x, own, v=own: x * .25 + .75 * own(v).expand_as(x)) if kind == "asked" else own}
    wanted = answer(forward(params, T.tokens, name, edits))
    assert torch.equal(predict(params, name, edits), wanted)
    assert torch.equal(ablate(params, name, edits), wanted == T.targets)
    assert torch.equal(ablate_each(params, name, [{}, edits])[1], wanted == T.targets)
    alone = [decode({n: v[i:i + 1] for n, v in params.items()}, name,
                    {site: Edit(edits[site], slice(i, i + 1), S)}) for i in range(S)]
    assert torch.equal(decode(params, name, edits), torch.cat(alone))
    first = [forward({n: v[i:i + 1] for n, v in params.items()}, T.tokens, name,
                     {site: Edit(edits[site], slice(i, i + 1), S)}) for i in range(S)]
    assert torch.equal(answer(torch.cat(first)), wanted)
    others = ({site: edits[site].roll(1, 0)} if kind != "asked"
              else {site: lambda x, own: edits[site](x, lambda v: own(v.roll(1, 0)))})
    # it does matter whose it is
    assert (answer(forward(params, T.tokens, name, others)) != wanted).double().mean() > .02
    if kind != "asked":                             # a first token is written from the true prefix in any case
        assert torch.equal(decode(params, name, edits)[..., 0], wanted[..., 0])

def test_decoding_with_tensors_is_decoding_with_each_seed_s_own_constant():
    params = population(MOE)
    own = trace(params, T.tokens, MOE, ["ffn_out"])["ffn_out"].mean(1, keepdim=True)
    each = [decode({n: v[i:i + 1] for n, v in params.items()}, MOE, {"ffn_out": own[i:i + 1]}) for i in range(S)]
    assert torch.equal(decode(params, MOE, {"ffn_out": own}), torch.cat(each))
    assert torch.equal(decode(params, MOE, {"ffn_out": own}), decode(params, MOE, {"ffn_out": "mean"}))

@pytest.mark.parametrize("unit, site, at", [("H1", "z", 1), ("L0.E2", "expert_out", 2)])
def test_a_unit_takes_a_tensor_with_a_seed_axis_too(unit, site, at):
    params = population(MOE)
    own = trace(params, T.tokens, MOE, [site])[site].select(3, at).mean(1, keepdim=True)
    wanted = answer(forward(params, T.tokens, MOE, combine_edits(MOE, {unit: own})))
    assert torch.equal(ablate(params, MOE, {unit: own}), wanted == T.targets)
    assert torch.equal(ablate_each(params, MOE, [{unit: own}])[0], wanted == T.targets)
    assert torch.equal(ablate(params, MOE, {unit: lambda x, own, v=own: own(v).expand_as(x)}), wanted == T.targets)

CALLS = {"predict": lambda p, edits: predict(p, MOE, edits), "ablate": lambda p, edits: ablate(p, MOE, edits),
         "ablate_each": lambda p, edits: ablate_each(p, MOE, [edits]), "decode": lambda p, edits: decode(p, MOE, edits),
         "forward": lambda p, edits: forward(p, T.tokens, MOE, edits)}

@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_tensor_with_another_seed_axis_is_refused_with_both(call, n):
    other, params = torch.zeros(n, 1, 8, 64), population(MOE)
    for edit in (other, lambda x, own: own(other).expand_as(x)):
        says = rf"edit of 'ffn_out': expected a tensor with a seed axis of 3; got shape \({n}, 1, 8, 64\); fix: "
        with pytest.raises(ValueError, match=says): CALLS[call](params, {"ffn_out": edit})

# ------------------------------------------------------- what an edit makes of a member depends on nobody beside it

MEANS = torch.arange(float(S)).view(S, 1, 1, 1).expand(S, 1, 1, 64)
ONE_OTHER = torch.tensor([1., 1., 0.]).view(S, 1, 1, 1).expand(S, 1, 1, 64)               # the first two are the same
def everybody(x): return MEANS[:len(x)].expand_as(x)
def noisy(x): return x + torch.rand(x.shape)
def centred(x): return x - x.mean(0, keepdim=True)

class Holder:
    "What it brings along lies in an attribute, which no closure and no global name shows."
    def __init__(self, v): self.v = v
    def __call__(self, x): return self.v[:len(x)].expand_as(x)

def in_turn():
    "A function that gives each next call the next member's: right only if members come one by one, and once each."
    each = iter(MEANS.repeat(9, 1, 1, 1).split(1))
    return lambda x: next(each).expand_as(x)

WRONG = {"global": lambda: everybody, "default": lambda: lambda x, v=MEANS: v[:len(x)].expand_as(x),
         "partial": lambda: partial(lambda v, x: v[:len(x)].expand_as(x), MEANS),
         "dictionary":
             lambda: (lambda p: lambda x: p["b_O"][:len(x), None, None].expand_as(x))({"b_O": MEANS[:, 0, 0]}),
         "closure": lambda: (lambda v: lambda x: v[:len(x)].expand_as(x))(MEANS), "attribute": lambda: Holder(MEANS),
         "another's only": lambda: Holder(ONE_OTHER), "mixes members": lambda: centred, "in turn": in_turn,
         "beside its own": lambda: lambda x, own: x + own(MEANS) + MEANS[:len(x)], "draws": lambda: noisy,
         "takes one only": lambda: lambda x: x.reshape(1, 1000, *x.shape[2:])}

@pytest.mark.parametrize("call", [c for c in CALLS if c != "forward"])
@pytest.mark.parametrize("edit", WRONG)
def test_a_function_that_makes_of_a_member_what_others_beside_it_change_is_refused(call, edit):
    says = (r"edit of .*: expected a function that treats all members alike; got .* for 3 side by side; fix: "
            r"lambda x, own: .* PerMember")
    for site in ("attn_out", "L0.attn_out"):
        with pytest.raises(ValueError, match=says): CALLS[call](population(MOE), {site: WRONG[edit]()})
    if "own" in edit or call == "predict": return                                    # it knows sites and no units
    of_head = lambda f: lambda z: f(z[..., None].expand(*z.shape, 64))[..., 0]
    with pytest.raises(ValueError, match=says): CALLS[call](population(MOE), {"H1": of_head(WRONG[edit]())})

@pytest.mark.parametrize("edit", ["global", "mixes members"])
def test_it_is_refused_beside_an_edit_of_the_same_site_too_and_where_routes_are_held(edit):
    params, how = population(MOE), WRONG[edit]()
    for ask in (lambda: ablate(params, MOE, {"expert_out": how, "E1": "mean"}),
                lambda: _rerouted_answers(params, MOE, [{}, {"expert_out": how}]),
                lambda: routes_held(params, MOE, {"ffn_out": how}),
                lambda: [m.predict(e) for m, e in Population(params, MOE).each({"ffn_out": how})]):
        with pytest.raises(ValueError, match="treats all members alike"): ask()

ODD = torch.arange(1000) % 2
FINE = {"knows its examples": lambda x: x * ODD.view(-1, 1, 1),
        "a constant": lambda x: torch.ones(x.shape[1:]).expand_as(x),
        "writes into it": lambda x: x.mul_(.5), "a step": lambda x: x.where(x > 0, 0),
        "asks for its own, by example": lambda x, own: x + own(MEANS[:, :, :1].expand(S, 1000, 1, 64))}

@pytest.mark.parametrize("call", ["predict", "ablate", "ablate_each"])
@pytest.mark.parametrize("edit", FINE)
def test_a_plain_function_that_treats_all_alike_means_the_same_one_by_one(call, edit):
    params = population(MOE)
    wanted = answer(forward(params, T.tokens, MOE, {"attn_out": FINE[edit]}))
    wanted = wanted if call == "predict" else wanted == T.targets
    assert torch.equal(CALLS[call](params, {"attn_out": FINE[edit]}).view_as(wanted), wanted)

def test_who_promises_is_taken_at_its_word_and_called_once_a_pass():
    called = []
    def remembers(x):
        called.append(len(x))
        return x + torch.rand(x.shape)
    predict(population(MOE), MOE, {"ffn_out": PerMember(remembers)})
    assert called == [1] * S
    called.clear()
    with pytest.raises(ValueError, match="treats all members alike"):
        predict(population(MOE), MOE, {"ffn_out": remembers})

@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_function_is_tried_where_some_members_run_apart_and_not_where_all_run_at_once(at_once):
    "A GPU runs more of them at a time; what is tried is the same."
    x = torch.rand(S, 7, 2, 4, generator=torch.Generator().manual_seed(0))
    def run(how):
        return torch.cat([Edit(how, slice(i, i + at_once), S)(x[i:i + at_once]) for i in range(0, S, at_once)])
    for how in (centred, lambda x: x + MEANS[:len(x), :, :, :4]):
        if at_once == S: assert torch.equal(run(how), how(x))
        else:
            with pytest.raises(ValueError, match="treats all members alike"): run(how)
    mixing = lambda x: (x @ torch.rand(4, 4, generator=torch.Generator().manual_seed(1))).softmax(-1)
    assert torch.allclose(run(mixing), mixing(x))

def test_what_the_replacements_bring_of_an_earlier_pass_is_no_tensor_of_the_members():
    params = population(MOE)
    made = combine_edits(MOE, {"E1": "mean", "H0": "resample", "gates": lambda g: g.flip(3)})
    assert torch.equal(answer(forward(params, T.tokens, MOE, made)), predict(params, MOE, made))
    assert torch.equal(answer(forward(params, T.tokens, MOE, made)), predict(params, MOE, made))

def test_routes_and_answers_give_each_seed_its_own_too():
    params = population(MOE)
    own = trace(params, T.tokens, MOE, ["expert_out"])["expert_out"].mean(1, keepdim=True)
    wanted = predict(params, MOE, {"expert_out": own})
    assert torch.equal(_rerouted_answers(params, MOE, [{}, {"L0.expert_out": own}])[1], wanted)
    assert torch.equal(routes_held(params, MOE, {"expert_out": own}), wanted)
    with pytest.raises(ValueError, match="seed axis of 3"): _rerouted_answers(params, MOE, [{"expert_out": own[:1]}])

# ------------------------------------------------------------------------------------------------------------- names

@pytest.mark.parametrize("site", sites(condition(MOE))[1:-1])
def test_one_layer_takes_its_sites_with_the_prefix_and_without(site):
    params = population(MOE, 1)
    asked = [trace(params, T.tokens[:9], MOE, [name], {name: torch.zeros_like}) for name in (site, f"L0.{site}")]
    assert all(torch.equal(tr[name], asked[0].activations[site]) for tr in asked for name in (site, f"L0.{site}"))
    assert [list(tr.activations) for tr in asked] == [[site]] * 2

def test_one_layer_takes_its_units_with_the_prefix_and_without_and_each_once():
    params = population(MOE)
    for unit in ("H2", "E1"):
        for prefix in ("L0.", "L*."):
            assert torch.equal(ablate(params, MOE, {unit: "mean"}), ablate(params, MOE, {prefix + unit: "mean"}))
    deep = population(TWO)
    both = ablate(deep, TWO, {"L0.E1": "mean", "L1.E1": "mean"})
    assert torch.equal(ablate(deep, TWO, {"L*.E1": "mean"}), both)
    for edits in ({"H1": "zero", "L0.H1": "mean"}, {"ffn_out": "zero", "L*.ffn_out": "mean"}):
        with pytest.raises(ValueError, match="expected each site and unit once"): ablate(params, MOE, edits)

# ------------------------------------------------------------------------------------------------------ several layers

@pytest.mark.audit
def test_every_layer_is_ablated_together_and_alone_and_no_selection_is_empty():
    params = population(TWO, 2)
    got = ablation_rows(params, TWO, [1, 2], ("zero", "mean"), fine=True, rule="init")
    assert main_sites(TWO) == ["L*.attn_out", "L*.ffn_out", "L0.attn_out", "L1.attn_out", "L0.ffn_out", "L1.ffn_out"]
    for metric in ("exact", "digits_alone"):
        assert {*got.query("metric == @metric")["site"]} == {"none", *main_sites(TWO)}
    assert {*zip(*got.query("unit != ''")[["site", "unit"]].to_numpy().T)} == {
        (f"L{l}.{s}", f"L{l}.{u}") for l in (0, 1) for s, n in (("z", 4), ("expert_out", 2))
        for u in [f"{'H' if s == 'z' else 'E'}{i}" for i in range(n)]}
    whole = got.query("metric == 'digits' and position == 'o0-o3' and stratum == 'all' and unit == ''")
    value = whole.set_index(["site", "edit", "seed"])["value"]
    without = {n: v.clone() for n, v in params.items()}
    for n in ("W_O", "b_O"): without[n][:] = 0
    digits = (predict(without, TWO) == T.targets)[..., :4].double().mean((1, 2))
    assert [value["L*.attn_out", "zero", s] for s in (1, 2)] == pytest.approx(digits.tolist())
    assert ablation_curve(params, TWO)["zero_attn_out"].tolist() == pytest.approx(digits.tolist())
    for none in ((), []):
        with pytest.raises(ValueError, match=r"sites: expected one or more of embed, .*; got none; fix: at_sites="):
            ablation_rows(params, TWO, [1, 2], at_sites=none)
    assert {*copying_rows(params, TWO, [1, 2], ("zero",))["site"]} == {"none", *main_sites(TWO)}

def test_a_name_of_one_layer_stands_in_rows_without_its_prefix():
    got = ablation_rows(population(MOE), MOE, range(S), ("zero",), ("L0.ffn_out", "L0.H1"))
    assert {*got["site"]} == {"none", "ffn_out", "H1"}

# ---------------------------------------------------------------------------------------------------- another subject

class Foreign(Subject):
    "A population that hides its parameters: what opens it has nothing but sites and a pass."
    def __init__(self, params, c):
        self.p, self.c = params, condition(c)
        self.name, self.task, self.sites, self.n_seeds = self.c.name, T, sites(self.c), len(params["W_E"])
        self.units = subject(None, c).units
    def run(self, tokens, edits=None, sink=None, read_only=False): return forward(self.p, tokens, self.c, edits, sink)
    def members(self): return [Foreign({n: v[i:i + 1] for n, v in self.p.items()}, self.c) for i in range(self.n_seeds)]

@pytest.mark.audit
def test_what_asks_for_nothing_but_sites_and_a_pass_says_of_any_subject_what_it_says_of_a_population():
    params = population(MOE)
    ours, theirs = Population(params, MOE), Foreign(params, MOE)
    assert torch.equal(trace(ours, T.tokens[:5])["L0.z"], trace(theirs, T.tokens[:5], keep=["z"])["z"])
    for edits in ({"H1": "mean"}, {"E1": "resample"}, {"ffn_out": "zero"}):
        assert (ablate(theirs, edits) == ablate(params, MOE, edits)).double().mean() > .9999
    rows = [ablation_rows(*s, range(S), ("mean",), fine=True) for s in ((params, MOE), (ours,), (theirs,))]
    assert rows[0].equals(rows[1]) and rows[0].drop(columns="value").equals(rows[2].drop(columns="value"))
    assert (rows[0]["value"] - rows[2]["value"]).abs().max() < 2e-3                     # a prediction or two at a tie
    assert pattern_rows(ours, range(S)).equals(pattern_rows(params, MOE, range(S)))
    assert torch.allclose(patterns(theirs, [1, 2]), patterns(params, MOE, [1, 2]), atol=1e-6)
    assert copying_rows(ours, range(S)).equals(copying_rows(params, MOE, range(S)))
    assert torch.equal(routes(ours)[0], routes(params, MOE)[0])
    assert torch.equal(attribution(ours, "head")["H1"], attribution(params, MOE, "head")["H1"])

@pytest.mark.parametrize("call", [lambda s: attribution(s), lambda s: patching_rows(s, [0]), lambda s: routes(s),
                                  lambda s: patterns(s, weighted=True), lambda s: parts(trace(s, T.tokens[:2]), {})])
def test_what_reads_weights_says_that_it_needs_a_population(call):
    with pytest.raises(ValueError, match=f"expected a population, whose .*; got {MOE}; fix: "):
        call(Foreign(population(MOE), MOE))

def test_a_module_is_opened_by_trace_and_ablation_with_its_own_sites_and_a_seed_axis_of_one():
    "Our own transformer as an ordinary module behind a function that calls `at`."
    one = population(MOE, 1)
    module = Transformer(one, MOE)
    called = []
    def run(tokens, at):
        called.append(1)
        own = {"thought": lambda x: at("thought", x[0])[None]}
        return module(tokens, {"resid_mid": own["thought"]})
    toy = Wrapped("toy", T, ["thought"], run)
    assert torch.equal(trace(toy, T.tokens[:7])["L0.thought"], trace(one, T.tokens[:7], MOE)["resid_mid"]) and called
    for how in ("zero", "mean", torch.zeros(1, 1, 1, 64)):
        wanted = answer(forward(one, T.tokens, MOE, combine_edits(MOE, {"resid_mid": how}))) == T.targets
        assert torch.equal(ablate(toy, {"thought": how}), wanted)
    got = ablation_rows(toy, [7], ("zero", "resample"), ["thought"], fine=True)
    assert {*got["condition"]} == {"toy"} and {*got["site"]} == {"none", "thought"} and {*got["seed"]} == {7}
    with pytest.raises(ValueError, match="seeds: expected 1, one a member of toy; got 2"):
        ablation_rows(toy, [7, 8], ("zero",), ["thought"])

def test_watching_a_population_counts_its_members():
    at = watcher(condition(MOE), {"ffn_out": torch.ones(2, 1, 1, 64)}, of=2)
    assert (at("ffn_out", torch.zeros(2, 3, 8, 64)) == 1).all()
    assert edits_for(MOE, "L0.H0", "zero").keys() == {"z"}

# ------------------------------------------------------------------------------------------- no number without a word

@pytest.mark.parametrize("name, weight, site",
                         [(MOE, "W_V", "v"), (NORM, "W_down", "ffn_out"), (TWO, "b_O", "L0.attn_out")])
def test_a_nan_is_no_answer_but_named_by_member_and_first_site(name, weight, site):
    "The argmax of nan is an answer: `digits(ablate(…))` said .323 for every seed."
    params = population(name)
    params[weight][2, 0, ..., 0] = torch.nan
    with pytest.raises(ValueError, match=rf"{name.split('+')[0]}.*, member 2: "): ablate(params, name, {})
    for ask in (lambda: ablate(params, name, {}), lambda: ablation_rows(params, name, range(S), ("zero",)),
                lambda: decode(params, name, {}), lambda: Population(params, name).predict()):
        with pytest.raises(ValueError, match=rf"member [02]: expected finite .* first at {site}"): ask()
    with pytest.raises(ValueError, match="first at (L0.)?attn_out"):
        ablate(population(name), name, {"L*.attn_out": lambda x: x * torch.inf})
    assert ablation_curve(params, name)["zero_ffn_out"].shape == (S,)  # training knows which seeds have failed

def test_tensors_that_disagree_in_seeds_are_no_population():
    params = population(MOE)
    for odd in (1, 2):
        broken = params | {"W_O": params["W_O"][:odd]}
        for ask in (lambda: ablate(broken, MOE, {}), lambda: trace(broken, T.tokens[:2], MOE)):
            with pytest.raises(ValueError, match=rf"expected 3 members in each, as in W_E; got {odd} in W_O"): ask()

class Deaf(Subject):
    "Names two sites and comes by one of them."
    name, task, sites = "deaf", T, ["said", "thought"]
    def run(self, tokens, edits=None, sink=None, read_only=False):
        x = torch.nn.functional.one_hot(tokens, T.d_vocab).float()[None]
        return self.watch(edits, sink)("said", x)

def test_an_edit_or_a_wish_at_a_site_that_no_pass_reaches_is_an_error():
    for ask in (lambda: ablate(Deaf(), {"thought": "zero"}), lambda: trace(Deaf(), T.tokens[:2]),
                lambda: trace(Deaf(), T.tokens[:2], keep=["thought"])):
        with pytest.raises(ValueError, match="deaf: expected a pass through thought; got one that reached 1"): ask()
    assert ablate(Deaf(), {"said": "zero"}).shape[0] == len(trace(Deaf(), T.tokens[:2], keep=["said"])["said"]) == 1

def test_one_example_has_no_mean_and_no_sample():
    params = population(MOE)
    for how in ("mean", "resample"):
        with pytest.raises(ValueError, match="two examples or more"):
            forward(params, T.tokens[:1], MOE, combine_edits(MOE, {"ffn_out": how}))
