"""A router's noise is its seed's and its step's: twice the same weights, after a kill, and in any company."""
import pytest
import torch

from moe_redistribution.models.condition import RECIPES, condition
from moe_redistribution.models.population import forward
from moe_redistribution.models.routers import Router
from moe_redistribution.basics.registry import all_or_nothing, register
from moe_redistribution.training.groups import pack, _train_group, unpack
from moe_redistribution.training.loop import activations_of, draws_of, init_members, train_interval, unflatten
from moe_redistribution.training.store import Store

NAME = "add7/moe-e4k1-h16-silu+noisy"

class NoisyTopK(Router):
    heard = None                                                       # what the last step added
    def shape(self, c, t): return c.d_model, 2 * c.n_experts
    def begin(self, p, c, t, g): return torch.cat([p["W_router"], torch.zeros_like(p["W_router"])], -1)
    def logits(self, held, x, c): return super().logits(held[..., :c.n_experts], x, c)
    def noisy(self, logits, held, x, c, draw):
        loud = super().logits(held[..., c.n_experts:], x, c)
        type(self).heard = draw(torch.randn, *logits.shape[1:])
        return logits + self.heard * torch.nn.functional.softplus(loud)

@pytest.fixture(autouse=True)
def noisy():
    with pytest.raises(InterruptedError), all_or_nothing():            # taken back after each test
        register("router", "noisy", NoisyTopK)
        yield condition(NAME)
        raise InterruptedError

def trained(seeds, steps):
    members = init_members(condition(NAME), seeds, "paired")
    for n in steps:
        torch.randn(n)                                                 # whatever else draws in this process
        train_interval(members, n)
    return members

def test_the_same_seed_twice_is_the_same_weights_and_noise_changes_them():
    a, b = trained([1], [4]), trained([1], [4])
    assert torch.equal(a.w, b.w)
    plain = init_members(condition(NAME.replace("+noisy", "")), [1], "paired")
    train_interval(plain, 4)
    one, other = unflatten(a.w, a.c)["W_O"], unflatten(plain.w, plain.c)["W_O"]
    assert not torch.equal(one, other)

def test_a_run_that_was_stopped_goes_on_to_the_same_bits():
    whole, first = trained([1, 2], [3, 3]), trained([1, 2], [3])
    rest = unpack(*pack(first))
    train_interval(rest, 3)
    assert torch.equal(whole.w, rest.w)

def test_a_member_has_its_noise_alone_and_in_company(noisy):
    def drawn(*at):
        members = init_members(noisy, [seed for seed, _ in at], "paired")
        return draws_of(members, [step for _, step in at])(torch.randn, 4, 2)
    together = drawn((1, 5), (2, 5), (3, 7))
    for i, at in enumerate([(1, 5), (2, 5), (3, 7)]): assert torch.equal(drawn(at)[0], together[i])
    assert not torch.equal(together[0], together[1])
    company, alone = trained([1, 2], [3]), trained([2], [3])
    torch.testing.assert_close(company.w[1], alone.w[0], rtol=1e-4, atol=1e-6)

def test_arms_with_and_without_noise_see_the_same_batches_and_whoever_looks_sees_no_noise(noisy):
    noise, plain = trained([1], [3]), init_members(condition("add7/moe-e4k1-h16-silu"), [1], "paired")
    train_interval(plain, 3)
    for name, g in noise.gens[0].items(): assert torch.equal(g.get_state(), plain.gens[0][name].get_state())
    params, tokens = unflatten(noise.w, noisy), noisy.get_task().tokens[:5]
    NoisyTopK.heard = None
    assert torch.equal(forward(params, tokens, noisy), forward(params, tokens, noisy)) and NoisyTopK.heard is None

def test_what_looks_after_a_step_sees_the_noise_of_that_step(noisy):
    members = init_members(noisy, [1, 2], "paired")
    train_interval(members, 1)
    params, heard = unflatten(members.w, noisy), NoisyTopK.heard
    tokens = noisy.get_task().tokens[:heard.shape[1]]
    seen = activations_of(params, tokens, noisy, draws_of(members, [0, 0]))
    assert torch.equal(NoisyTopK.heard, heard) and seen["gates"].shape == (2, *heard.shape[1:])

def test_the_store_has_the_same_weights_after_an_interruption(tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPES["add7"], "eval_every", 20)
    stored = {}
    for folder, ends in (("whole", [40]), ("parts", [20, 40])):
        for steps in ends: _train_group(NAME, [1], "paired", "full", tmp_path / folder, steps=steps)
        stored[folder] = Store(tmp_path / folder).load(NAME, 1, "paired").weights
    for rule, params in stored["whole"].items():
        for n, v in params.items(): assert torch.equal(v, stored["parts"][rule][n]), n
