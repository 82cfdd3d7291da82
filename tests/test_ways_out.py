"""Ways out: hooks and other tools find in our models what our sites are, and files that leave hold the same model."""
import copy
import pickle

import pytest
import torch

from moe_redistribution.evidence.checkpoints import checkpoint
from moe_redistribution.instruments.trace import trace
from moe_redistribution.models.authors import from_authors, to_authors
from moe_redistribution.models.population import Trained, Transformer, forward, init, member, place_of
from moe_redistribution.tasks.task import get_task

MOE, DEEP = "add7/moe-e4k1-h16-silu", "add7/moe_glu-e2k2-h16-silu+norm+L2"
NAMES = [MOE, DEEP, "add7/ffn-h16-silu", "modadd/glu-h20-gelu", "hist/no_ffn", "add7/moe-e2k1-h8-silu+tokens"]


def population(name, seeds=(1, 2)):
    return Trained(init(name, [torch.Generator().manual_seed(s) for s in seeds]), name, seeds)


def tokens_of(name, n=9): return get_task(name.split("/")[0]).tokens[:n]


# ------------------------------------------------------------------------------------------------------ as a module

@pytest.mark.parametrize("name", NAMES)
def test_what_a_hook_sees_at_a_site_s_module_is_the_site_to_the_bit(name):
    params, tokens, seen = population(name), tokens_of(name), {}
    module = Transformer(params, name, seed=2)
    for path, at in module.named_modules():
        at.register_forward_hook(lambda m, given, out, path=path: seen.__setitem__(path, out))
    logits, of = module(tokens), trace(member(params, 1), tokens, name).activations
    assert torch.equal(logits, of["logits"][0]) and torch.equal(seen.pop(""), logits)
    assert {*seen} == {*module.paths.values()} and {*of} == {*module.paths}
    assert all(torch.equal(seen[module.paths[site]], x[0]) for site, x in of.items())


@pytest.mark.parametrize("name, path, site", [
    (MOE, "blocks.0.ffn_out", "ffn_out"), (MOE, "blocks.0.router_probs", "L0.router_probs"), (MOE, "embed", "embed"),
    (DEEP, "blocks.1.z", "L1.z"), (DEEP, "blocks.0.expert_out", "L0.expert_out"), (DEEP, "logits", "logits")])
def test_a_hook_that_returns_another_value_is_the_edit_of_that_site(name, path, site):
    params, tokens = population(name, (3,)), tokens_of(name)
    module = Transformer(params, name)
    as_it_is = module(tokens)
    handle = module.get_submodule(path).register_forward_hook(lambda m, given, out: out.flip(-1))
    hooked = module(tokens)
    handle.remove()
    wanted = forward(params, tokens, name, {site: lambda x: x.flip(-1)})[0]
    assert torch.equal(hooked, wanted) and torch.equal(module(tokens, {site: lambda x: x.flip(-1)}), wanted)
    assert not torch.equal(hooked, as_it_is) and torch.equal(module(tokens), as_it_is)


def test_an_edit_comes_before_a_hook_and_a_hook_of_another_shape_is_refused():
    module = Transformer(population(MOE, (3,)), MOE)
    module.blocks[0].ffn_out.register_forward_hook(lambda m, given, out: out + 1)
    both = module(tokens_of(MOE), {"ffn_out": torch.zeros_like})
    assert torch.equal(both, Transformer(population(MOE, (3,)), MOE)(tokens_of(MOE), {"ffn_out": torch.ones_like}))
    module.blocks[0].ffn_out.register_forward_hook(lambda m, given, out: out[:1])
    with pytest.raises(ValueError, match="edit of 'ffn_out': expected shape"): module(tokens_of(MOE))


def test_gradients_reach_a_site_s_module_and_the_parameters():
    module, seen = Transformer(population(MOE, (3,)), MOE), []
    module.blocks[0].attn_out.register_full_backward_hook(lambda m, given, grad: seen.append(grad[0]))
    module(tokens_of(MOE))[:, -1].logsumexp(-1).sum().backward()
    assert seen[0].shape == (9, 8, 64) and seen[0].abs().max() > 0 and module.W_E.grad.abs().max() > 0


def test_a_module_s_state_is_a_member_and_copies_keep_their_sites():
    params = population(DEEP)
    module = Transformer(params, DEEP, member=1)
    assert {*module.state_dict()} == {*params}
    assert all(torch.equal(v, params[n][1]) for n, v in module.state_dict().items())
    other = Transformer(params, DEEP, seed=1)
    other.load_state_dict(module.state_dict())
    for again in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        again.blocks[1].ffn_out.register_forward_hook(lambda m, given, out: 0 * out)
        wanted = forward(member(params, 1), tokens_of(DEEP), DEEP, {"L1.ffn_out": torch.zeros_like})[0]
        assert torch.equal(again(tokens_of(DEEP)), wanted)


def test_a_module_prints_a_line_for_each_site_with_its_shape_in_the_order_of_the_pass():
    lines = [x.strip() for x in repr(Transformer(population(DEEP), DEEP, seed=1)).splitlines()]
    wanted = ["(embed): Site(b, 8, 64)", "(0-1): 2 x ModuleDict(", "(pattern): Site(b, 4, 8, 8)", "(gates): Site(b, 8, 2)",
              "(ffn_out): Site(b, 8, 64)", "(logits): Site(b, 8, 12)"]
    at = [lines.index(x) for x in wanted]
    assert at == sorted(at) and len([x for x in lines if "Site(" in x]) == 16 + 2


# ------------------------------------------------------------------------------------------------- seeds are seeds

def test_a_committed_checkpoint_is_written_in_the_authors_form_by_its_seeds():
    name = "add7/moe-e4k1-h256-silu"
    params = checkpoint(name)
    assert params.seeds == [42, 137, 256, 512, 1024]
    again, _ = from_authors(to_authors(params, name, 256), "silu")
    assert all(torch.equal(v, params[n][2:3]) for n, v in again.items())
    assert torch.equal(to_authors(params, name, member=2)["vocab.weight"], params["W_E"][2])


@pytest.mark.parametrize("how, says", [
    (dict(seed=0), r"expected one of the seeds \[1, 2\]; got 0"), (dict(seed=-1), r"the seeds \[1, 2\]; got -1"),
    (dict(), r"expected one of the seeds \[1, 2\], or a place from 0 to 1; got None"),
    (dict(member=2), "or a place from 0 to 1; got 2"), (dict(member=-1), "or a place from 0 to 1; got -1"),
    (dict(seed=1, member=0), "expected a seed or a place; got both")])
def test_a_seed_or_place_that_is_not_there_is_refused_with_those_that_are(how, says):
    params = population("add7/ffn-h8-silu")
    for out in (to_authors, Transformer):
        with pytest.raises(ValueError, match=says): out(params, "add7/ffn-h8-silu", **how)


def test_parameters_that_do_not_know_their_seeds_are_asked_by_place():
    with pytest.raises(ValueError, match="do not know their seeds; got 42"): place_of(dict(population(MOE)), 42)
    assert place_of(dict(population(MOE)), member=1) == 1 and place_of(dict(population(MOE, (7,)))) == 0
    with pytest.raises(ValueError, match=r"the seeds \[7, 7\]; got 7"): place_of(population(MOE, (7, 7)), 7)
