"""Speed in function space against plain modules fed by hand, and what training, routes and masks must do to it."""
import pytest
import torch

from moe_redistribution.models.condition import RECIPES, condition
from moe_redistribution.training.groups import _train_group
from moe_redistribution.instruments.speed import _train_to, _components, speed, _speed_rows, speeds
from moe_redistribution.training.store import Store
from moe_redistribution.tasks.task import get_task
from moe_redistribution.training.loop import init_members, train_interval, unflatten
from plain import load_member
from toys import untrained

VARIANTS = {"ffn": "add7/ffn-h24-silu", "glu": "add7/glu-h24-silu", "moe": "add7/moe-e4k1-h24-silu",
            "top-2": "add7/moe-e4k2-h24-silu", "switch": "add7/moe_glu-e4k1-h24-silu+switch",
            "norm": "add7/moe-e4k1-h24-silu+norm", "no_ffn": "add7/no_ffn", "two layers": "add7/moe-e2k1-h24-silu+L2",
            "modadd": "modadd/ffn-h8-gelu", "hist": "hist/glu-h8-gelu"}
each_variant = pytest.mark.parametrize("name", VARIANTS.values(), ids=VARIANTS)

def pair(name, n_seeds=2):
    "Two populations in double precision, the second a little way from the first."
    before = {n: v.double() for n, v in untrained(name, range(n_seeds)).items()}
    g = torch.Generator().manual_seed(9)
    return before, {n: v + .03 * torch.randn(v.shape, generator=g).double() for n, v in before.items()}

def plain_stream(model, tokens):
    "What enters and leaves each component of a plain model: lists over layers of (input, attention, middle, FFN)."
    x = model.embed(tokens) + model.position(torch.arange(tokens.shape[1]))
    first, out = x, []
    for b in model.blocks:
        a = b.attention(b.norm1(x))
        mid, f = x + a, None
        if b.ffn is not None: f = plain_ffn(b, mid)
        out.append((x, a, mid, f))
        x = mid if f is None else mid + f
    return first, out

def plain_ffn(b, mid):
    out = b.ffn(b.norm2(mid))
    return out[0] if isinstance(out, tuple) else out

def rms(delta, read):
    "Loops over inputs and read-out positions."
    total = [sum(v * v for v in delta[n, q].tolist()) for n in range(len(delta)) for q in read]
    return (sum(total) / len(total)) ** .5

@each_variant
def test_own_and_total_are_what_plain_modules_give_when_fed_by_hand(name):
    before, after = pair(name)
    c, t = condition(name), get_task(condition(name).task)
    tokens = t.tokens[::67][:12]
    got = speed(before, after, c, tokens=tokens)
    for s in range(2):
        old, new = load_member(before, s, name), load_member(after, s, name)
        with torch.no_grad():
            (e0, was), (e1, now) = plain_stream(old, tokens), plain_stream(new, tokens)
            assert got["embed"]["own"][s].item() == pytest.approx(rms(e1 - e0, t.read))
            for l, ((x, a, mid, f), (_, a1, _, f1), block) in enumerate(zip(was, now, new.blocks)):
                prefix = "" if c.n_layers == 1 else f"L{l}."
                deltas = {"attn_out": (block.attention(block.norm1(x)) - a, a1 - a, a)}
                if f is not None: deltas["ffn_out"] = (plain_ffn(block, mid) - f, f1 - f, f)
                for site, (own, total, was_there) in deltas.items():
                    v = {form: x[s].item() for form, x in got[prefix + site].items()}
                    assert (v["own"] == pytest.approx(rms(own, t.read))
                            and v["total"] == pytest.approx(rms(total, t.read)))
                    assert v["size"] == pytest.approx(rms(was_there, t.read))
                    assert v["own_centred"] == pytest.approx(rms(own - own.mean(0), t.read))
                    assert v["total_centred"] == pytest.approx(rms(total - total.mean(0), t.read))

@pytest.mark.parametrize("name", [VARIANTS[n] for n in ("moe", "top-2", "switch", "norm")])
def test_experts_and_kept_routes_are_loops_over_tokens(name):
    before, after = pair(name, 1)
    c, t = condition(name), get_task("add7")
    tokens = t.tokens[::83]
    got = speed(before, after, c, tokens=tokens)
    old, new = load_member(before, 0, name), load_member(after, 0, name)
    ffn, changed, kept, own = old.blocks[0].ffn, new.blocks[0], [], {e: [] for e in range(4)}
    with torch.no_grad():
        mid = plain_stream(old, tokens)[1][0][2]
        x, x1 = old.blocks[0].norm2(mid), changed.norm2(mid)               # the norm belongs to the component
        for n in range(len(tokens)):
            for q in t.read:
                top = (x[n, q] @ ffn.router.weight.T).softmax(-1).topk(c.top_k)
                weight = top.values if c.gate == "switch" else top.values / top.values.sum()
                delta = 0
                for g, e in zip(weight, top.indices.tolist()):
                    moved = changed.ffn.experts[e](x1[n, q]) - ffn.experts[e](x[n, q])
                    own[e].append(moved.square().sum().item())
                    delta = delta + g * moved
                kept.append(delta.square().sum().item())
    assert got["ffn_out"]["kept"].item() == pytest.approx((sum(kept) / len(kept)) ** .5)
    for e, squares in own.items():
        v = got[f"E{e}"]["own"].item()
        assert v == pytest.approx((sum(squares) / len(squares)) ** .5) if squares else v != v

@each_variant
def test_a_seed_in_a_population_is_the_seed_alone_and_nothing_moves_without_change(name):
    before, after = pair(name, 3)
    tokens = get_task(condition(name).task).tokens[:50]
    one = lambda p: {n: v[1:2] for n, v in p.items()}
    many, alone, still = (speed(*p, name, tokens=tokens)
                          for p in ((before, after), (one(before), one(after)), (before, before)))
    assert set(many) == set(_components(name))
    for n in many:
        for f, x in many[n].items():
            torch.testing.assert_close(x[1:2], alone[n][f], rtol=1e-9, atol=1e-12, equal_nan=True)
            assert f == "size" or (still[n][f].nan_to_num() == 0).all()

def test_total_is_the_same_both_ways_and_a_centred_length_is_never_longer():
    before, after = pair(VARIANTS["moe"])
    there, back = speed(before, after, VARIANTS["moe"]), speed(after, before, VARIANTS["moe"])
    for site in ("embed", "attn_out", "ffn_out"):
        for form in ("total", "total_centred"): torch.testing.assert_close(there[site][form], back[site][form])
        for form in ("own", "total"): assert (there[site][form + "_centred"] <= there[site][form] + 1e-12).all()

def test_order_of_inputs_does_not_matter():
    before, after = pair(VARIANTS["glu"])
    tokens = get_task("add7").tokens[:40]
    a, b = (speed(before, after, VARIANTS["glu"], ["ffn_out"], x)["ffn_out"] for x in (tokens, tokens.flip(0)))
    for f in a: torch.testing.assert_close(a[f], b[f])

def test_an_expert_without_tokens_has_no_speed():
    before, after = pair(VARIANTS["moe"])
    before["W_router"].zero_()                                             # all are tied, so one expert gets everything
    v = speed(before, after, VARIANTS["moe"])
    idle = [v[f"E{e}"]["own"].isnan() for e in range(4)]
    assert torch.stack(idle).sum(0).tolist() == [3, 3]

# ------------------------------------------------------------------------------------------------------ along training

@pytest.mark.parametrize("stream", ["authors", "paired"])
def test_the_runs_measured_are_the_runs_stored(stream, tmp_path, monkeypatch):
    "To the same weights, beyond an evaluation, which draws random numbers in the authors' stream."
    monkeypatch.setitem(RECIPES["add7"], "eval_every", 12)
    name, seeds = "add7/ffn-h8-silu", [42, 3]
    _train_group(name, seeds, stream, "full", tmp_path, steps=36)
    members = init_members(condition(name), seeds, stream)
    for k in (7, 12, 13): _train_to(members, k)
    got = _train_to(members, 36)
    for i, s in enumerate(seeds):
        stored = Store(tmp_path).load(name, s, stream).weights["final"]
        for n, v in stored.items():
            torch.testing.assert_close(got[n][i], v, rtol=0, atol=2e-5, msg=lambda m: f"{n}: {m}")

def test_which_steps_are_measured_changes_none_of_them():
    name = "add7/moe-e2k1-h8-silu"
    few, many = speeds(name, [1, 2], at=[12]), speeds(name, [1, 2], at=[0, 3, 11, 12, 13])
    for n, forms in few[12].items():
        for f, x in forms.items(): torch.testing.assert_close(x, many[12][n][f], rtol=1e-3, atol=1e-5)

def test_gaps_and_starts_are_the_differences_they_say():
    c = condition("add7/glu-h8-silu")
    members, seen = init_members(c, [5], "paired"), {0: None}
    for k in range(9):
        seen[k] = {n: v.clone() for n, v in unflatten(members.w, c).items()}
        train_interval(members, 1)
    for gap, (a, b) in {1: (3, 4), 5: (3, 8), "start": (0, 3)}.items():
        got, want = speeds(c, [5], "paired", [3], gap)[3], speed(seen[a], seen[b], c)
        for n in want:
            for f in want[n]: torch.testing.assert_close(got[n][f], want[n][f], rtol=1e-3, atol=1e-5)

@pytest.mark.parametrize("name, site, factor",
                         [("add7/glu-h24-silu", "ffn_out", .25), ("add7/moe-e4k1-h24-silu", "ffn_out", .5),
                          ("add7/ffn-h24-silu", "attn_out", .25)])
def test_the_first_step_scales_with_the_learning_rate_of_the_component_alone(name, site, factor):
    slow = f"{name}+{site.removesuffix('_out')}lr{factor}"
    a, b = (speeds(n, [1, 2], "paired", [0])[0] for n in (name, slow))
    form = "kept" if "moe" in name else "own"
    ratio = b[site].get(form, b[site]["own"]) / a[site].get(form, a[site]["own"])
    assert ratio.tolist() == pytest.approx([factor] * 2, rel=.03)
    other = {"ffn_out": "attn_out", "attn_out": "ffn_out"}[site]
    torch.testing.assert_close(a[other]["own"], b[other]["own"], rtol=1e-5, atol=1e-6)

def test_a_frozen_router_keeps_its_routes():
    for v in speeds("add7/moe-e4k1-h16-silu+frozen", [1, 2], at=[0, 20]).values():
        torch.testing.assert_close(v["ffn_out"]["own"], v["ffn_out"]["kept"], rtol=1e-5, atol=1e-6)

def test_rows_name_step_form_and_unit():
    name = "add7/moe-e2k1-h8-silu"
    table, v = _speed_rows(name, [4, 5], "paired", (0, 2)), speeds(name, [4, 5], "paired", (0, 2))
    assert not table.duplicated(["seed", "step", "site", "unit", "metric"]).any()
    at = table.set_index(["step", "site", "unit", "metric", "seed"])["value"]
    assert at[2, "ffn_out", "", "kept_centred_step", 5] == pytest.approx(v[2]["ffn_out"]["kept_centred"][1].item(),
                                                                         rel=1e-3)
    assert at[0, "expert_out", "E1", "own_step", 4] == pytest.approx(v[0]["E1"]["own"][0].item(), rel=1e-3)
    assert set(table["stream"]) == {"paired"} and set(table["rule"]) == {"training"}
    metrics = set(_speed_rows("add7/ffn-h8-silu", [4], at=[3], gap="start")["metric"])
    assert metrics == {"own_distance", "own_centred_distance", "total_distance", "total_centred_distance", "size"}

@pytest.mark.parametrize("call, says", [
    (lambda a, b: speed(a, {n: v[:1] for n, v in b.items()}, "add7/ffn-h24-silu"), "expected 2 seeds as before; got 1"),
    (lambda a, b: speeds("add7/ffn-h24-silu", [1], at=[-1]), "steps from 0 on"),
    (lambda a, b: speeds("add7/ffn-h24-silu", [1], at=[]), "steps from 0 on"),
    (lambda a, b: speeds("add7/ffn-h24-silu", [1], gap="end"), "or 'start'"),
    (lambda a, b: speeds("add7/ffn-h24-silu", [1], only=["E0"]), "expected one of"),
    (lambda a, b: speeds("add7/ffn-h24-silu", [1], "author"), "nearest: 'authors'"),
    (lambda a, b: speeds("add7/ffn-h24-silu", []), "one or more whole numbers")])
def test_wrong_questions_are_refused_in_one_message(call, says):
    with pytest.raises(ValueError, match=says): call(*pair("add7/ffn-h24-silu"))
