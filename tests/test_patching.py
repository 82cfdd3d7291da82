"""Patching against full forward passes with edits, one part at a time, and against arithmetic on the numbers."""
import pytest
import torch

from moe_redistribution.instruments import patching
from moe_redistribution.models.condition import condition
from moe_redistribution.models.population import forward
from moe_redistribution.instruments.patching import (_breaks, _copies, flip_rates, flips, _pair_strata, _right_alone,
                                                     label_ceiling, pairs, patch, _patch_sites, patching_rows)
from moe_redistribution.models.planted import carry_by_ffn
from moe_redistribution.tasks.task import get_task
from toys import untrained

TASK = get_task("add7")
NAMES = ["add7/ffn-h16-silu", "add7/glu-h12-gelu", "add7/moe-e4k1-h16-relu", "add7/moe-e4k2-h16-silu",
         "add7/moe-e4k2-h16-silu+switch", "add7/moe_glu-e4k1-h16-silu", "add7/moe_glu-e4k2-h16-silu+norm",
         "add7/ffn-h16-silu+norm", "add7/no_ffn", "modadd/ffn-h8-gelu"]

def loud(c, seeds=2):
    "Untrained weights in float64, attention and FFN so large that every part has a say in the prediction."
    params = untrained(c, range(seeds))
    scale = dict(W_E=.5, W_Q=3, W_K=3, W_O=8, W_up=3, W_down=25, W_router=5)
    return {n: v.double() * scale.get(n, 1) for n, v in params.items()}

def random_pairs(t, n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {where: torch.randint(len(t), (n, 2), generator=g) for where in t.positions[1:4] or t.positions}

def by_forward(params, c, site, at, target, source):
    "Predictions (s, m) from a whole forward pass of the targets in which one thing is replaced at position `at`."
    t, seen, other = get_task(c.task), {}, {}
    forward(params, t.tokens[target], c, sink=seen)
    forward(params, t.tokens[source], c, sink=other)

    def put(name, index=(), value=other):
        def edit(x):
            x = x.clone()
            x[(slice(None), slice(None), at, *index)] = value[name][(slice(None), slice(None), at, *index)]
            return x
        return edit

    def heads(x):
        for h in site.split("+"): x = put("z", (int(h[1:]),))(x)
        return x

    if site[0] == "H": edits = {"z": heads}
    elif site[0] == "E": edits = {n: put(n, (int(site[1:]),)) for n in ("gates", "expert_out")}
    elif site == "embed": edits = {"embed": put("embed"), "attn_out": lambda x: seen["attn_out"]}
    elif site == "attn_direct": edits = {"attn_out": put("attn_out"), "ffn_out": lambda x: seen["ffn_out"]}
    else: edits = {site: put(site)} if site != "none" else {}
    return forward(params, t.tokens[target], c, edits)[:, :, at].argmax(-1)

@pytest.mark.parametrize("name", NAMES)
def test_patch_is_a_forward_pass_with_one_thing_replaced(name):
    c = condition(name)
    t, params = get_task(c.task), loud(c, 2 if c.task == "add7" else 1)
    chosen = random_pairs(t, 60)
    sites = _patch_sites(c) + ["H0+H2"]
    said = patch(params, c, chosen, sites)
    moved = {site: 0 for site in sites}
    for where, pq in chosen.items():
        at = t.read[t.positions.index(where)]
        for site in ["none", *sites]:
            want = by_forward(params, c, site, at, *pq.unbind(1))
            assert torch.equal(said[where][site], want), (where, site)
            if site != "none": moved[site] += int((want != said[where]["none"]).sum())
    silent = {"embed"} if c.task == "modadd" else set()              # the current token is always =
    assert all(n > 0 for site, n in moved.items() if site not in silent), moved      # every part had a say

def test_a_seed_in_a_population_is_that_seed_alone_and_slices_do_not_show(monkeypatch):
    c = condition("add7/moe-e4k1-h16-relu")
    params, chosen = loud(c, 3), random_pairs(TASK, 150)
    whole = patch(params, c, chosen)
    monkeypatch.setattr(patching, "SLICE", 7)
    alone = patch({n: v[1:2] for n, v in params.items()}, c, chosen)
    assert all(torch.equal(x[1:2], alone[w][site]) for w, got in whole.items() for site, x in got.items())

def test_audited_pairs_are_all_pairs_that_arithmetic_allows():
    for i, (where, got) in enumerate(pairs(TASK).items(), 1):
        assert where == f"o{i}"
        carry = [n % 10**i + 7 >= 10**i for n in range(1000)]
        digit = [n // 10**i % 10 for n in range(1000)]
        want = {(a, b) for a in range(1000) for b in range(1000) if digit[a] == digit[b] and carry[a] != carry[b]}
        assert len(got) == len(want) and set(map(tuple, got.tolist())) == want
        control = {tuple(pair) for pair in pairs(TASK, "control")[where].tolist()}
        assert all((digit[a], carry[a]) == (digit[b], carry[b]) and a != b for a, b in control)
        assert len(control) == 5000 and len({a for a, b in control}) > 950
        masks = _pair_strata(TASK, {where: got})[where]
        assert [carry[a] for a in got[:, 0].tolist()] == masks["into=+1"].tolist() == (~masks["into=+0"]).tolist()

def test_the_authors_pairs_are_the_first_five_of_each_operation():
    got, first = pairs(TASK, "paper"), {"o1": [3, 4, 5, 6, 7], "o2": range(93, 98), "o3": range(993, 998)}
    plain = {"o1": [0, 1, 2, 10, 11], "o2": range(5), "o3": range(5)}
    for w in got:
        assert len(got[w]) == 25 and set(map(tuple, got[w].tolist())) == {(a, b) for a in first[w] for b in plain[w]}
    digit = lambda n, i: (n + 7) // 10**i % 10
    for i, w in enumerate(got, 1):
        assert label_ceiling(TASK, got)[w] == sum(digit(a, i) != digit(b, i) for a, b in got[w].tolist()) / 25

def test_flips_stays_and_breaks_are_counted_pair_by_pair():
    c = condition("add7/moe-e4k2-h16-silu")
    chosen = random_pairs(TASK, 400)
    said = patch(loud(c), c, chosen)
    flip, lost, copied, sure = (f(said, TASK, chosen) for f in (flips, _breaks, _copies, _right_alone))
    counts = torch.zeros(4)
    for w, pq in chosen.items():
        j = TASK.positions.index(w)
        for site in ("attn_out", "gates", "resid_post"):
            for s in range(2):
                for k, (a, b) in enumerate(pq.tolist()):
                    before, after, right = int(said[w]["none"][s, k]), int(said[w][site][s, k]), int(TASK.targets[b, j])
                    flipped = after == right and before != right
                    moved = after != before and not flipped
                    assert (bool(flip[w][site][s, k]), bool(lost[w][site][s, k])) == (flipped, moved)
                    both = before == TASK.targets[a, j] and int(said[w]["resid_post"][s, k]) == right
                    assert bool(sure[w][s, k]) == bool(both)
                    copy = moved and after == TASK.tokens[a, 3 + j]
                    assert bool(copied[w][site][s, k]) == bool(copy)
                    counts += torch.tensor([flipped, moved, both, copy])
    assert (counts > 0).all()

def test_rows_say_what_flip_rates_say():
    c = condition("add7/moe-e4k2-h16-silu")
    params = {n: v.float() for n, v in loud(c).items()}
    sites = ["embed", "attn_out", "ffn_out", "gates", "resid_post", "H2", "E1"]
    table = patching_rows(params, c, [5, 6], sites, rule="init")
    keys = [n for n in table if n not in ("value", "n_examples")]
    assert not table.duplicated(keys).any() and set(table["rule"]) == {"init"}
    assert table["value"].dropna().between(0, 1).all() and set(table["condition"]) == {c.name}
    for protocol, edit in (("audited", "patch"), ("paper", "patch25")):
        want, n = flip_rates(params, c, sites, protocol), 0
        caps = table[table["metric"].eq("label_ceiling") & table["edit"].eq(edit)].groupby("position")["n_examples"]
        assert caps.unique().map(list).to_dict() == {where: [len(p)] for where, p in pairs(TASK, protocol).items()}
        own = table[table["metric"].eq("flip") & table["edit"].eq(edit)]
        for (where, stratum, site, unit), got in own.groupby(["position", "stratum", "site", "unit"]):
            assert got["value"].mean() == pytest.approx(want.loc[unit or site, (where, stratum)], abs=1e-4)
            assert unit == "" or stratum == "all"
            assert set(got["n_examples"]) == {len(pairs(TASK, protocol)[where]) // (1 if stratum == "all" else 2)}
            n += 1
        assert n == (5 * 9 + 2 * 3 if edit == "patch" else 5 * 3)

def test_known_flips_are_shares_of_what_is_right_when_left_alone():
    c = condition("add7/ffn-h32-relu")
    params = carry_by_ffn()
    params["W_pos"][0, 5, 9] = 20                # at o2 it now says 9, whatever is asked
    table = patching_rows(params, c, [0], ["ffn_out"]).query("metric == 'flip_known' and site == 'ffn_out'")
    table = table.set_index("position")[["value", "n_examples"]]
    assert table.loc["o1"].tolist() == [1, 42_000] and table.loc["o3"].tolist() == [1, 13_902]
    assert table.loc["o2", "n_examples"] == 0 and table.loc["o2", "value"] != table.loc["o2", "value"]       # nan

def test_no_ffn_and_no_router_have_fewer_rows():
    table = patching_rows(loud("add7/no_ffn", 1), "add7/no_ffn", [0])
    assert set(table["site"]) == {"none", "embed", "attn_out", "resid_post", "head"}
    table = patching_rows(loud("add7/ffn-h16-silu", 1), "add7/ffn-h16-silu", [0], ["H1"])
    assert set(table["site"]) == {"none", "head", "resid_post"} and set(table["unit"]) == {"", "H1"}

C = "add7/ffn-h16-silu"
REFUSED = [(dict(sites=["attn"]), "nearest: 'attn_out'"), (dict(sites=["E0"]), "expected one of embed"),
           (dict(sites=["gates"]), "patch site"), (dict(sites=["H0+embed"]), "one of H0, H1, H2, H3; got 'embed'"),
           (dict(sites=["H1+H1"]), "name each once"),
           (dict(chosen={"tens": torch.zeros(3, 2).long()}), "position: expected"),
           (dict(chosen={"o1": torch.zeros(3, 3).long()}), r"int64 \(3, 3\)"),
           (dict(chosen={"o1": torch.zeros(3, 2)}), "float32"),
           (dict(chosen={"o1": torch.zeros(0, 2).long()}), r"\(0, 2\)"),
           (dict(chosen={"o1": torch.tensor([[1, -1]])}), "from 0 to 999"),
           (dict(c="add7/ffn-h16-silu+L2"), "patch site: expected one of embed, L0.attn_out|expected W_")]

@pytest.mark.parametrize("wrong, message", REFUSED)
def test_wrong_use_is_refused_before_any_work(wrong, message):
    with pytest.raises(ValueError, match=message):        # no weights are given: none are needed to refuse
        patch(**(dict(params={}, c=C, chosen=pairs(TASK, "paper")) | wrong))

def test_parameters_of_another_condition_and_answers_of_nobody_are_refused():
    chosen = random_pairs(TASK, 20)
    with pytest.raises(ValueError, match="expected W_router .* got None; fix: give the condition"):
        patch(loud(C, 1), "add7/moe-e4k1-h16-silu", chosen)
    with pytest.raises(ValueError, match="expected the site resid_post, .* got none, embed; fix: patch it too"):
        _right_alone(patch(loud(C, 1), C, chosen, ["embed"]), TASK, chosen)
