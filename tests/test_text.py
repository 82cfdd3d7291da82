"""Text: every probability of the planted language, its bindings, and windows that depend on seed and step only."""
import math
import sys
import types

import pytest
import torch

from moe_redistribution.language.text import (GET, LET, SAY, Planted, as_text, generator_of, hub, load_text, _windows_once, _windows)

TINY = Planted(n_keys=2, n_values=2, n_words=2, successors=2, window=4, p_let=.5, p_get=.2, run=2.)
FULL = Planted()

def plain_p(x, text):
    "The probability of a text by the definition, a clause at a time, in a loop over tokens; it shares the chain only."
    def key(i): return i - 3
    def word(i): return i - 3 - x.n_keys - x.n_values
    chain, bound, p, begin = x.chain(), {}, 1., 0
    for t, token in enumerate(text):
        clause, here = text[begin:t], None
        if clause and clause[0] == SAY and len(clause) > 1:
            if word(token) >= 0:
                here = (1 - 1 / x.run) * chain[1 + word(clause[-1]), word(token)].item()
            else:
                p, clause, begin = p / x.run, [], t
        if here is None and not clause:
            live = {k for k, (_, at) in bound.items() if at >= t - x.window}
            each = {LET: x.p_let, GET: x.p_get if live else 0, SAY: 1 - x.p_let - x.p_get}
            here = each.get(token, 0) / sum(each.values())
        elif here is None and clause[0] == SAY:
            here = chain[0, word(token)].item() if word(token) >= 0 else 0
        elif here is None and len(clause) == 1:
            pool = range(x.n_keys) if clause[0] == LET else live
            here = (key(token) in pool) / len(pool)
        elif here is None:
            is_value = 0 <= token - 3 - x.n_keys < x.n_values
            here = is_value / x.n_values if clause[0] == LET else float(token == bound[key(clause[1])][0])
            if clause[0] == LET: bound[key(clause[1])] = token, t
        if not (p := p * here): return 0.
        if len(text[begin:t + 1]) == 3 and text[begin] != SAY: begin = t + 1
    return p

def test_probabilities_of_all_continuations_sum_to_one_and_are_those_of_the_definition():
    every = torch.cartesian_prod(*[torch.arange(TINY.d_vocab)] * 5)
    p = TINY.judge(every).logp.sum(1).exp()
    assert abs(p.sum() - 1) < 1e-12
    some = torch.cat([p.nonzero()[:, 0], torch.randperm(len(p), generator=generator_of("some"))[:2000]])
    assert max(abs(plain_p(TINY, every[i].tolist()) - p[i].item()) for i in some.tolist()) < 1e-15

def test_a_window_closes_and_a_key_is_bound_anew_as_the_definition_says():
    long = TINY.write(3000, 14, "long")
    said = [plain_p(TINY, row) for row in long.tokens.tolist()]
    assert torch.allclose(torch.tensor(said).double().log(), long.logp.sum(1), atol=1e-5)
    rebound = [r for r in long.tokens.tolist() if r[:2] == [LET, 3] and r[3:5] == [LET, 3] and r[6:8] == [GET, 3]]
    assert rebound and all(r[8] == r[5] for r in rebound) and any(r[2] != r[5] for r in rebound)

def test_clauses_have_their_probabilities_once_a_key_is_bound():
    tokens = FULL.write(300, 128, 8).tokens[:, 64:].flatten()
    n = [(tokens == m).sum().item() for m in (LET, GET, SAY)]
    assert all(abs(x / sum(n) - p) < .02 for x, p in zip(n, (.3, .3, .4)))

def test_what_can_not_follow_has_no_probability_and_breaks_nothing():
    p = FULL.judge(torch.tensor([[GET, 3, 40], [LET, LET, LET], [255, 255, 255], [LET, 3, 40]])).logp
    assert (p[:3].sum(1) == -math.inf).all() and p[3].isfinite().all() and not p.isnan().any()
    with pytest.raises(ValueError, match="tokens below 256"): FULL.judge(torch.tensor([[256]]))

def test_no_window_of_the_training_part_reaches_what_is_kept_back():
    text = as_text("numbered", " ".join("abcdefghij"[i % 10] for i in range(400)), 11)
    assert len(text.training) == 360 and torch.equal(torch.cat([text.training, text.kept_back]), text.tokens)
    starts = {tuple(w.tolist()) for w in _windows(torch.arange(20), 18, 200, 0, 0)}
    assert starts == {tuple(range(19)), tuple(range(1, 20))}           # both places there are, and no other
    assert torch.equal(_windows_once(torch.arange(10), 3)[:, 1:].flatten(), torch.arange(1, 10))

def test_a_text_of_the_hub_asks_for_its_package_and_joins_its_rows(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="fix: pip install datasets"): load_text("hub")
    asked = []
    class Rows(list):
        def take(self, n): return self[:n]
    def load_dataset(*what, **how):
        asked.append((what, how))
        return Rows(dict(text=w) for w in ("a b", "b c", "c d"))
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert len(load_text("hub", "me/mine:raw", 3).tokens) == 6 and len(hub(None, 3, rows=2).tokens) == 4
    assert [a[0] for a in asked] == [("me/mine", "raw"), ("Salesforce/wikitext", "wikitext-103-raw-v1")]
    assert [a[1]["streaming"] for a in asked] == [False, True]

@pytest.mark.parametrize("sizes, said", [(dict(n_words=3), "1 to 3, the words; got 8"), (dict(run=.5), "at least 1"),
                                         (dict(p_let=.8), "sum below 1"), (dict(p_let=0), "p_let > 0")])
def test_a_language_that_cannot_be_is_refused(sizes, said):
    with pytest.raises(ValueError, match=said): Planted(**sizes)

def test_a_text_begins_with_nothing_bound_and_no_two_markers_stand_side_by_side():
    tokens = FULL.write(50, 64, 3).tokens
    marks = tokens < 3
    assert not (marks[:, 1:] & marks[:, :-1]).any() and set(tokens[:, 0].tolist()) == {LET, SAY}
