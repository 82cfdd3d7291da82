"""Recall: books that repeat no name or number, paths that networkx agrees with, and sets whose sizes say nothing."""
from hashlib import sha256
import itertools
import tracemalloc
from math import comb

import networkx as nx
import numpy as np
import pytest
import torch
from scipy.stats import binom

from moe_redistribution.language import recall
from moe_redistribution.language.recall import (BOOK_SIGNS, EDGE_PROBABILITY, PhoneBook, _disjoint_sets, _edge_probability,
                                             exact_match, _graph_length, graph_vocab, _keyed_permutation, length2_path,
                                             random_graphs, _sets_to_path, valid_shortest)

BOS, SEP, EOS = 36, 37, 38

# --------------------------------------------------------------------------------------------------------- phone book

@pytest.mark.parametrize("N", [1, 2, 3, 4, 5, 10, 97, 1000, 26**3, 70_001])
def test_a_keyed_permutation_sends_every_number_to_another(N):
    out = _keyed_permutation(N, np.arange(N), "test", 0)
    assert np.array_equal(np.sort(out), np.arange(N))

def test_a_keyed_permutation_looks_shuffled():
    x, N = np.arange(20_000), 26**5
    out = _keyed_permutation(N, x, 0)
    assert abs(np.corrcoef(x, out)[0, 1]) < .03                         # no trend; the standard error is 0.007
    assert abs(np.corrcoef(out[1:], out[:-1])[0, 1]) < .03              # nor any from one to the next
    counts = np.bincount(out * 20 // N, minlength=20)
    assert ((counts - 1000)**2 / 1000).sum() < 50                       # chi-square, 19 degrees: p = 1e-4
    assert (out == _keyed_permutation(N, x, 1)).sum() < 5                # another key is another permutation

def test_a_slice_of_a_permutation_is_the_same_alone():
    whole = _keyed_permutation(10**8, np.arange(200_000), 3)
    assert np.array_equal(_keyed_permutation(10**8, np.arange(65_000, 66_000), 3), whole[65_000:66_000])

def test_an_entry_has_16_tokens_of_39_as_in_the_paper():
    book = PhoneBook(1000)
    tokens = book.entries(range(1000))
    assert tokens.shape == (1000, 16) and tokens.dtype == torch.int64 and book.d_vocab == len(BOOK_SIGNS) == 39
    assert (tokens[:, [0, 6, 15]] == torch.tensor([BOS, SEP, EOS])).all()
    assert (tokens[:, 1:6] < 26).all() and ((tokens[:, 7:15] >= 26) & (tokens[:, 7:15] < 36)).all()

def test_an_entry_does_not_depend_on_the_size_of_the_book():
    assert torch.equal(PhoneBook(10).entries([7]), PhoneBook(3_000_000).entries([7]))
    assert not torch.equal(PhoneBook(10).entries([7]), PhoneBook(10, seed=1).entries([7]))

def test_a_book_of_three_million_takes_no_memory_until_it_is_read():
    tracemalloc.start()
    book = PhoneBook(3_000_000)
    book.batches(256, 0)(10**9), book.queries(1000, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e6                                                   # bytes; a list of its names would take 24 MB

@pytest.mark.parametrize("n, batch", [(100, 40), (7, 20), (12, 12)])
def test_an_epoch_repeats_no_entry_and_epochs_and_seeds_differ(n, batch):
    book = PhoneBook(n)
    row = {tuple(t): i for i, t in enumerate(book.entries(range(n)).tolist())}
    at = book.batches(batch, seed=5)
    seen = [row[tuple(t)] for step in range(3 * n // batch + 1) for t in at(step).tolist()]
    epochs = [tuple(seen[i * n:(i + 1) * n]) for i in range(3)]
    assert all(sorted(e) == list(range(n)) for e in epochs) and len(set(epochs)) == 3
    assert not torch.equal(at(0), book.batches(batch, seed=6)(0))

def test_queries_are_different_entries_of_the_book():
    book = PhoneBook(5000)
    asked = {tuple(t) for t in book.queries(1000, 0).tolist()}
    assert len(asked) == 1000 and asked <= {tuple(t) for t in book.entries(range(5000)).tolist()}

def test_labels_cover_the_digits_or_all_that_has_something_before_it():
    book = PhoneBook(10)
    assert book.labels().nonzero()[:, 0].tolist() == list(range(7, 15))
    assert book.labels("all").nonzero()[:, 0].tolist() == list(range(1, 16))

def test_an_exact_match_needs_every_digit_and_the_end_if_it_is_given():
    asked = PhoneBook(100).queries(8, 0)
    for place in range(7, 16):
        said = asked.clone()
        said[3, place] = 26 + (said[3, place] + 1) % 10
        assert exact_match(said[:, 7:], asked).tolist() == [i != 3 for i in range(8)]
    assert exact_match(asked[:, 7:15], asked).all()

# ------------------------------------------------------------------------------------------------------------- graphs

def oracle(graphs, i):
    return nx.from_numpy_array(graphs.edges[i].numpy(), create_using=nx.DiGraph), *graphs.query[i].tolist()

@pytest.fixture(scope="module")
def graphs(): return random_graphs(25, range(200), seed=0)

def answers(graphs):
    n = graphs.edges.shape[1]
    sep = (graphs.tokens == n + 3).int().argmax(1)
    padded = torch.cat([graphs.tokens, torch.full((len(sep), n + 2), n + 5)], 1)
    return padded.gather(1, sep[:, None] + 1 + torch.arange(n + 1))

def paths(graphs):
    n = graphs.edges.shape[1]
    return [row[:row.index(n + 4)] for row in answers(graphs).tolist()]

def test_the_label_is_the_lexicographically_smallest_path_of_networkx(graphs):
    for i, path in enumerate(paths(graphs)):
        g, s, t = oracle(graphs, i)
        assert s != t and path == min(nx.all_shortest_paths(g, s, t)) and graphs.distance[i] == len(path) - 1

def test_every_shortest_path_of_networkx_counts_and_no_other_path(graphs):
    several = 0
    for i in range(60):
        g, s, t = oracle(graphs, i)
        best = list(nx.all_shortest_paths(g, s, t))
        several += len(best) > 1
        longer = list(itertools.islice(nx.all_simple_paths(g, s, t, cutoff=len(best[0])), 40))
        walks = best + [p for p in longer if p not in best] + [best[0][:-1], best[0][1:], best[0][::-1], [s], [t], []]
        one = random_graphs(25, [i] * len(walks), seed=0)
        said = torch.full((len(walks), 26), 29)
        for row, walk in zip(said, walks): row[:len(walk)] = torch.tensor(walk)
        assert valid_shortest(said, one).tolist() == [w in best for w in walks]
    assert several > 10

@pytest.mark.parametrize("sign", range(25, 31))
def test_a_path_through_a_sign_is_none(graphs, sign):
    said = answers(graphs)
    said[:, 1] = sign
    assert valid_shortest(answers(graphs), graphs).all() and not valid_shortest(said, graphs).any()

def test_the_sequence_lists_each_edge_once_then_the_query(graphs):
    n = 25
    bos, edge, slash, sep, eos, pad = range(n, n + 6)
    for i, row in enumerate(graphs.tokens.tolist()):
        at = row.index(slash)
        listed = [row[k:k + 2] for k in range(1, at, 3)]
        assert row[0] == bos and set(row[3:at:3]) == {edge} and sorted(listed) == graphs.edges[i].nonzero().tolist()
        assert row[at + 1:at + 3] == graphs.query[i].tolist() and row[at + 3] == sep
        end = row.index(eos)
        assert set(row[end + 1:]) <= {pad} and pad not in row[:end]
        assert graphs.labels[i].nonzero()[:, 0].tolist() == list(range(at + 4, end + 1))

def test_edges_are_shuffled(graphs):
    first = graphs.tokens[:, 1].float()                                 # a sorted list would begin with vertex 0 or 1
    assert 9 < first.mean() < 15

def test_a_vocabulary_of_n_plus_6_is_enough_at_every_size_of_the_paper():
    for n in EDGE_PROBABILITY:
        some = random_graphs(n, range(20), seed=1)
        assert some.tokens.min() >= 0 and some.tokens.max() == n + 5 and len(graph_vocab(n)) == n + 6
        assert some.tokens.shape == (20, _graph_length(n))

def test_an_example_depends_on_its_seed_and_index_only():
    a, b = random_graphs(25, range(5, 15), seed="train"), random_graphs(25, [12, 7], seed="train")
    assert torch.equal(a.tokens[[7, 2]], b.tokens) and torch.equal(a.labels[[7, 2]], b.labels)
    assert not torch.equal(random_graphs(25, [12], seed="test").edges, b.edges[:1])

@pytest.mark.parametrize("n", list(EDGE_PROBABILITY))
def test_the_mean_shortest_path_has_about_three_and_a_half_edges(n):
    far = random_graphs(n, range(1000), seed=0).distance.float()
    assert abs(far.mean() - 3.5) < .1 + 2 * far.std() / 1000**.5       # the table has three decimals of p

def test_a_graph_that_does_not_fit_is_drawn_again(monkeypatch, graphs):
    monkeypatch.setattr(recall, "_graph_length", lambda n, p: 150)       # about the mean, so many are too long
    short = random_graphs(25, range(200), seed=0)
    same = (short.edges == graphs.edges).all((1, 2))
    fits = (graphs.tokens != 30).sum(1) <= 150
    assert torch.equal(same, fits) and 50 < fits.sum() < 150
    assert (short.tokens == 29).sum(1).eq(1).all() and valid_shortest(answers(short), short).all()

def test_a_row_has_room_for_its_edges_and_a_path_of_fifteen():
    for n, p in EDGE_PROBABILITY.items():
        pairs = n * (n - 1)
        edges = int(pairs * p + 4 * (pairs * p * (1 - p))**.5) + 1
        assert _graph_length(n) == len(["<BOS>"] + ["u", "v", "<EDGE>"] * edges + ["/", "s", "t", "<SEP>"]
                                      + ["v"] * 16 + ["<EOS>"])
        assert binom.sf(edges, pairs, p) < 1e-4

# --------------------------------------------------------------------------------------------------------------- sets

@pytest.mark.parametrize("r", range(1, 7))
def test_sets_and_paths_of_two_edges_are_one_problem_on_all_subsets(r):
    sets = torch.tensor(list(itertools.product([False, True], repeat=r)))
    alice, bob = sets.repeat_interleave(len(sets), 0), sets.repeat(len(sets), 1)
    tokens = _sets_to_path(alice, bob)
    back = tokens[:, :r] > 0, tokens[:, r:2 * r] > 0
    assert torch.equal(back[0], alice) and torch.equal(back[1], bob) and len(torch.unique(tokens, dim=0)) == 4**r
    edge = torch.zeros(len(tokens), r + 2, r + 2)                   # the graph that the tokens name; s = 0, d = r + 1
    for k in range(r):
        edge[:, 0, k + 1] = (tokens == 1 + k).any(1).float()
        edge[:, k + 1, r + 1] = (tokens == 1 + r + k).any(1).float()
    assert torch.equal((edge @ edge)[:, 0, r + 1] > 0, (alice & bob).any(1))

def test_labels_of_length2_path_are_those_of_networkx():
    tokens, label = length2_path(7, 200, seed=0)
    for row, y in zip(tokens.tolist(), label.tolist()):
        g = nx.Graph([("s", t) for t in row[:5] if t] + [("d", t - 5) for t in row[5:10] if t])
        assert row[10] == 11 and y == (nx.shortest_path_length(g, "s", "d") == 2 if nx.has_path(g, "s", "d") else 0)

def test_no_single_token_tells_the_class():
    tokens, label = length2_path(12, 40_000, seed=0)
    there = (tokens[:, :20] > 0).double()
    apart = there[label == 1].mean(0) - there[label == 0].mean(0)
    assert apart.abs().max() < 4.5 * (2 * .25 / 20_000)**.5             # 20 tokens, standard errors of a difference

def test_given_the_sizes_every_pair_of_sets_of_a_class_is_equally_likely():
    alice, bob, meet = _disjoint_sets(4, 60_000, seed=0)
    code = (torch.cat([alice, bob], 1).long() * 2**torch.arange(8)).sum(1)
    for y, pairs in ((0, comb(4, 2)), (1, 36 - comb(4, 2))):            # a = b = 2: 6 of 36 pairs do not meet
        these = (alice.sum(1) == 2) & (bob.sum(1) == 2) & (meet == y)
        counts = torch.unique(code[these], return_counts=True)[1].double()
        assert len(counts) == pairs
        assert ((counts - counts.mean())**2 / counts.mean()).sum() < pairs + 5 * (2 * pairs)**.5

@pytest.mark.parametrize("r", [4, 8, 10])
def test_no_pair_of_sets_is_on_both_sides_nor_with_its_sets_exchanged(r):
    sides = {}
    for side in ("train", "test"):
        alice, bob, meet = _disjoint_sets(r, 600, "one seed", side)
        assert torch.equal((alice & bob).any(1).long(), meet) and meet.sum() == 300
        sizes = [sorted(zip(*(x.sum(1)[meet == c].tolist() for x in (alice, bob)))) for c in (0, 1)]
        assert sizes[0] == sizes[1]
        sides[side] = {tuple(x) for pair in ((alice, bob), (bob, alice)) for x in torch.cat(pair, 1).tolist()}
    assert not sides["train"] & sides["test"]

def test_without_sides_sets_are_those_that_they_always_were():
    tokens, labels = length2_path(12, 8192, "test")
    assert sha256(tokens.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()[:16] == "ce955ee6f30a4308"

# ---------------------------------------------------------------------------------------------------------- bad input

@pytest.mark.parametrize("wrong", [
    lambda: PhoneBook(0), lambda: PhoneBook(26**5 + 1), lambda: PhoneBook(5, name_letters=0),
    lambda: PhoneBook(5, digits=19), lambda: PhoneBook(5).entries([5]), lambda: _keyed_permutation(0, [], 0),
    lambda: PhoneBook(5).batches(0, 0), lambda: PhoneBook(5).batches(1, 0)(-1), lambda: PhoneBook(5).queries(6, 0),
    lambda: _edge_probability(1, .5), lambda: random_graphs(25, []),
    lambda: random_graphs(25, [0], p=2), lambda: random_graphs(3, [0], p=1e-12),
    lambda: valid_shortest(torch.zeros(3), random_graphs(25, [0])), lambda: _disjoint_sets(1, 2, 0),
    lambda: _disjoint_sets(4, 3, 0), lambda: _disjoint_sets(8, 4, 0, "tests"), lambda: length2_path(3, 2, 0),
    lambda: _sets_to_path(torch.ones(1, 2).bool(), torch.ones(1, 3).bool())])
def test_bad_input_is_told_what_was_expected_and_a_way_out(wrong):
    with pytest.raises(ValueError, match=r"expected .*; got .*fix: "): wrong()
