"""What companion 002's theory must not get wrong: its two constructions on every case, its lemmas, its sizes."""
from math import log2

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare

from moe_redistribution.studies.parrots.theory import (all_graphs, block_parameters, expert_loads, _hat_neurons,
                                                       _matched_widths, memorise, _memory_parameters, path_output,
                                                       path_tokens, _points_needed, hat_output, _sign_router, two_steps)
from moe_redistribution.tasks.text import generator_of

def gaussian(*shape, of):
    return torch.randn(*shape, generator=generator_of("test", "parrots", *of), dtype=torch.double)

def wrong(constant):
    "(graphs, wrong answers) of Theorem 3.3's layer over all graphs with 3, 4 and 5 vertices, twice."
    cases = failed = 0
    for v in (3, 4, 5):
        for middle in (0, 3):
            A = all_graphs(v)
            tokens = path_tokens(A, middle)
            said = path_output(tokens, v, constant(tokens.shape[1], v)) > 0
            cases, failed = cases + len(A), failed + (said != two_steps(A)).sum().item()
    return cases, failed

def test_theorem_3_3_is_right_on_all_2192_cases_with_a_threshold_of_three_halves_over_N():
    assert wrong(lambda N, V: 1.5 / N) == (2192, 0)

def test_theorem_3_3_as_printed_misses_every_path():
    paths = 2 * sum(two_steps(all_graphs(v)).sum().item() for v in (3, 4, 5))
    assert wrong(lambda N, V: 1 / V) == wrong(lambda N, V: 1.5 / V) == (2192, paths) and paths == 1244

def test_a_path_has_two_edges_and_a_vertex_between_that_is_neither_end():
    for v in (3, 4, 5):
        A = all_graphs(v)
        by_hand = torch.tensor([any(a[0][i] and a[i][-1] for i in range(1, v - 1)) for a in A.tolist()])
        assert (two_steps(A) == by_hand).all() and A.diagonal(dim1=1, dim2=2).sum() == 0

def test_disjoint_sets_are_graphs_without_a_path_of_two_edges():                              # Lemma D.2, both ways
    for r in range(1, 5):
        sets = torch.arange(2 ** r)[:, None] >> torch.arange(r) & 1
        A = torch.zeros(4 ** r, r + 2, r + 2, dtype=torch.long)
        alice, bob = sets.repeat_interleave(2 ** r, 0), sets.repeat(2 ** r, 1)
        A[:, 0, 1:-1] = A[:, 1:-1, 0] = alice
        A[:, -1, 1:-1] = A[:, 1:-1, -1] = bob
        said = path_output(path_tokens(A), r + 2, 1.5 / (2 * r + 4)) > 0
        assert (said == ((alice & bob).sum(1) > 0)).all()

@pytest.mark.parametrize("K", [4, 16, 64])
def test_lemma_d6_the_router_hits_every_expert_equally_often(K):
    loads = expert_loads(gaussian(100_000, 16, of=("even", K)), K)
    assert loads.sum() == 100_000 and chisquare(loads).pvalue > .001

@pytest.mark.parametrize("K", [4, 16, 64])
def test_lemma_d7_no_load_is_above_twice_the_mean_more_often_than_stated(K):
    n, seeds, delta = _points_needed(K, .05, K), 100, .05
    above = sum(expert_loads(gaussian(n, 8, of=(K, s)), K).max().item() > 2 * n / K for s in range(seeds))
    assert above <= delta * seeds

def test_4096_points_are_enough_for_lemma_d7_with_16_experts_and_not_with_64():
    assert _points_needed(16, .01, 16) < 4096 < _points_needed(64, .01)

@pytest.mark.parametrize("K, width, active, total", [(16, 18, 1052, 9152), (64, 6, 2216, 12800)])
def test_theorem_3_5_memorises_every_label_with_the_stated_width_and_parameters(K, width, active, total):
    for seed in range(3):
        X = gaussian(4096, 32, of=("memory", seed))
        y = gaussian(4096, of=("labels", seed)).sign()
        p = memorise(X, y, K)
        assert (hat_output(p, X) * y - .5).abs().max() < 1e-6
        assert _memory_parameters(32, K, p["W"].shape[1]) == dict(width=width, active=active, total=total)
        held = (p["W"] != 0).sum() + (p["u"] != 0).sum() + (p["b"] != 0).sum() + p["router"].numel()
        assert held <= total and (p["W"][..., :int(log2(K))] == 0).all()

def test_the_half_that_an_expert_takes_off_is_one_number_more():
    with_it, without = _memory_parameters(32, 16, 18, shift=True), _memory_parameters(32, 16, 18)
    assert (with_it["active"], with_it["total"]) == (without["active"] + 1, without["total"] + 16)

@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 60), m=st.integers(3, 8), bits=st.integers(0, 2), seed=st.integers(0, 10 ** 6),
       share=st.sampled_from((0., .1, .5, 1.)))
def test_any_number_of_points_with_any_labels_is_memorised(n, m, bits, seed, share):
    X = gaussian(n, m, of=("any", n, m, seed))
    y = torch.where(torch.rand(n, generator=generator_of(seed)) < share, 1., -1.)
    assert (hat_output(memorise(X, y, 2 ** bits), X).sign() == y).all()

def test_equal_points_with_different_labels_are_refused():
    X = gaussian(1, 4, of=("equal",)).expand(2, 4)
    with pytest.raises(ValueError, match="general position"):
        memorise(X, torch.tensor([1., -1]), 1)

@pytest.mark.parametrize("wrong, said", [
    (lambda: all_graphs(7), "3 to 6"), (lambda: _sign_router(32, 12), "nearest valid: 8"),
    (lambda: _sign_router(4, 16), "widen"), (lambda: _points_needed(16, 1.), "probability"),
    (lambda: memorise(torch.zeros(3, 4), torch.ones(3), 1), "float64"),
    (lambda: memorise(torch.zeros(3, 4).double(), torch.zeros(3), 1), "labels"),
    (lambda: _hat_neurons(torch.zeros(5, 4).double(), torch.zeros(1, 4).double()), "at most 4"),
    (lambda: _matched_widths(0, 4), "c > 0"), (lambda: block_parameters(256, 1), "raise E")])
def test_bad_input_is_refused_with_a_fix(wrong, said):
    with pytest.raises(ValueError, match=said) as e:
        wrong()
    assert all(word in str(e.value) for word in ("expected", "got", "fix"))

@given(V=st.integers(2, 10 ** 6), K=st.integers(1, 4096), c=st.floats(.1, 10))
def test_corollary_3_4_is_an_edge_at_the_square_of_a_logarithm(V, K, c):
    edge = (log2(2 * V) / c) ** 2
    sparse, least = _matched_widths(V, K, c=c)
    assert abs(K / edge - 1) < 1e-9 or (sparse < least) == (K > edge)

@pytest.mark.parametrize("d, E", [(d, E) for d in (256, 512, 1024) for E in (0, 8, 16, 32, 64)])
def test_sizes_by_formula_are_what_transformers_builds(d, E):
    pytest.importorskip("transformers")
    from moe_redistribution.language.small import small_model
    family, sizes = ("mixtral", dict(E=E, k=2)) if E else ("mistral", {})
    with torch.device("meta"):
        model, config = small_model(family, 39, 1, layers=12, d=d, h=d, heads=d // 64, **sizes)
    named = {n: p.numel() for n, p in model.named_parameters()}
    outside = {n for n in named if ".layers." not in n}
    assert outside == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert config.num_key_value_heads == config.num_attention_heads == d // 64
    formula = block_parameters(d, E)
    assert sum(v for n, v in named.items() if n not in outside) == formula["total"]
    idle = 12 * (E - 2) * 3 * d * d if E else 0
    assert formula["active"] == formula["total"] - idle

def test_no_size_of_the_paper_has_42_million_active_parameters():
    sizes = [block_parameters(d, E, layers=L)["active"] for d in (256, 512, 1024) for E in (0, 8, 16, 32, 64, 256)
             for L in (12, 20)]
    assert not any(38e6 < s < 46e6 for s in sizes)
