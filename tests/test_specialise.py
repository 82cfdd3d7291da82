"""Does an expert specialise: planted topics are found, chance is not, and texts that would fool it do not."""
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from transformers.utils import logging

from moe_redistribution.instruments.rows import rows, tidy
from moe_redistribution.instruments.trace import trace
from moe_redistribution.language.families import tiny_model
from moe_redistribution.language.opened import open_model
from moe_redistribution.language.routers import put_router
from moe_redistribution.language.specialise import (_dealt, _left, _p, _layer_rows, load_matrix, specialise,
                                                    specialise_table)
from moe_redistribution.record.cli import main

logging.disable_progress_bar()

WORDS = "tree river stone cloud court claim judge clause house road sea light name hand work day".split()

def language(likes, seed, n=24, words=40):
    "Documents of a made language; `likes`: how often a word is of the first half of its words."
    g, half = np.random.default_rng(seed), len(WORDS) // 2
    p = np.where(np.arange(2 * half) < half, likes, 1 - likes) / half
    return [" ".join(g.choice(WORDS, words, p=p)) for _ in range(n)]

@pytest.fixture(scope="module")
def s(): return open_model(tiny_model("olmoe", vocab_size=256))

def verdicts(model, texts, **how): return specialise_table(specialise(model, texts, context=64, **how))["verdict"]

# ----------------------------------------------------------------------------------------------------- planted counts

def planted(effect, seed, documents=(8, 8), B=10, E=8, n=300, skew=.2, lengths=1.):
    """Counts (documents, tokens and a rest, experts) of two topics: experts like tokens, by `effect` a topic, and each
    document has a taste of its own; `lengths`: how much longer those of the second topic are."""
    g, table = np.random.default_rng(seed), []
    taste, side = g.normal(size=(B, E)), np.repeat([1, -1], E // 2)
    for sign, D, long in ((1, documents[0], 1), (-1, documents[1], lengths)):
        words = np.exp(sign * skew * (np.arange(B) - B / 2))
        for _ in range(D):
            p = np.exp(taste + .15 * g.normal(size=E) + sign * effect * side)
            often = g.multinomial(int(n * long), words / words.sum())
            table.append([g.multinomial(often[b], p[b] / p[b].sum()) for b in range(B)] + [np.zeros(E, int)])
    return torch.tensor(np.array(table)), torch.arange(2).repeat_interleave(torch.tensor(documents))

def shares_found(effect, draws=200, **how):
    "In which share of draws a topic is found: from all counts, and with the token held fixed."
    found = np.zeros(2)
    for seed in range(draws):
        table, topic = planted(effect, seed, **how)
        deals, x = _dealt(topic, 99), table.double()
        t = deals @ x.sum(1)
        of = lambda v: torch.special.xlogy(v, v).sum(-1)
        bits = of(t).sum(-1) - of(t.sum(-1))
        found += [_p(bits).item() <= .05, _p(_left(deals, x[:, :-1])).item() <= .05]
    return found / draws

def test_a_planted_topic_is_found_in_95_of_100_draws_and_its_tokens_alone_in_5_at_most():
    assert shares_found(.2)[1] >= .95
    by_tokens = shares_found(0)
    assert by_tokens[1] <= .05 and by_tokens[0] > .3                 # the words of a topic are not its experts' topic
    assert shares_found(0, skew=0)[0] <= .08                         # two standard errors above .05

def test_documents_of_unequal_length_and_number_find_no_topic_either():
    assert shares_found(0, draws=100, documents=(6, 14), lengths=4, skew=0).max() <= .1

def as_counts(table):
    E = table.shape[-1]
    return dict(tokens=table, positions=table[:, :8], n=torch.tensor([int(table.sum()), 0]),
                together=torch.stack([torch.diag(table.sum((0, 1))), torch.zeros(E, E)]).long())

def told(table, topic, **more):
    of = dict(condition="planted")
    found = _layer_rows(as_counts(table) | more, topic, ["a", "b"], 199, site="L0.routes", **of)
    documents = [rows([int((topic == z).sum())], [0], metric="documents", stratum=f"topic={n}", **of)
                 for z, n in enumerate("ab")]
    return tidy([*found, *documents])

def test_the_verdict_names_the_topic_the_token_chance_or_how_much_text_is_lacking():
    word = lambda *x: specialise_table(told(*x))["verdict"].item()
    assert word(*planted(.4, 0)) == "specialises by topic beyond its tokens"
    assert word(*planted(0, 0, n=900)) == "by token alone"
    few = word(*planted(.4, 0, documents=(2, 2)))
    assert few == "too little text: 5 documents a topic are needed, a has 2"
    assert word(*planted(0, 1, n=30)).startswith("too little text: about ")
    flat = torch.tensor(np.random.default_rng(0).multinomial(400, [1 / 8] * 8, size=(16, 11)))
    assert word(flat, torch.arange(2).repeat_interleave(8)) == "no more than chance"

def test_an_expert_that_nobody_needs_and_one_document_leave_no_nan_where_a_number_is_due():
    table, topic = planted(.4, 0)
    table[..., 3] = 0
    found = told(table, topic)
    assert "E3" not in set(found.query("metric in ('p', 'lift')")["unit"]) and load_matrix(found).loc["L0", "E3"] == 0
    numbers = found.query("metric != 'replication'")["value"]
    assert np.isfinite(numbers).all() and found.query("metric == 'p'")["value"].between(0, 1).all()
    one = told(*planted(.4, 0, documents=(1, 1)))
    assert specialise_table(one)["verdict"].item().startswith("too little text: 5 documents")

def test_pairs_that_seek_each_other_stand_beside_what_their_loads_give():
    g, E = np.random.default_rng(0), 6
    chosen = np.array([(0, 1) if g.random() < .3 else g.choice(E, 2, replace=False) for _ in range(4_000)])
    on = torch.nn.functional.one_hot(torch.tensor(chosen), E).sum(1)
    table, topic = planted(0, 0, E=E)
    together = torch.stack([x.T @ x for x in (on[::2], on[1::2])])
    found = told(table, topic, together=together, n=torch.tensor([2_000] * 2))
    pair = found.query("metric == 'together' and unit == 'E0+E1'").set_index(["stratum", "rule"])["value"]
    assert pair["all", "final"] == pytest.approx(.3 + .7 / 15, abs=.03)
    assert all(pair[h, "final"] > 1.5 * pair[h, "null"] for h in ("all", "half=A", "half=B"))

# ------------------------------------------------------------------------------------------------------ a real mixture

@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_counts_are_those_of_a_plain_loop_over_windows_of_one_document(family):
    s, texts = open_model(tiny_model(family, vocab_size=256)), {"a": language(.7, 0, 2), "b": language(.3, 1, 2)}
    found, l = specialise(s, texts, context=64, batch=3), s.n_layers - 1
    loads = 0
    for text in texts["a"] + texts["b"]:
        ids = list(text.encode())
        for i in range(0, len(ids), 64):
            tr = trace(s, torch.tensor([ids[i:i + 64]]), keep=[f"L{l}.routes"])
            loads = loads + tr[f"L{l}.routes"].flatten().bincount(minlength=load_matrix(found).shape[1])
    assert load_matrix(found).loc[f"L{l}"].tolist() == loads.tolist()

def test_a_router_that_looks_the_token_up_has_no_topic_beyond_its_tokens():
    found = specialise(put_router(tiny_model("olmoe", vocab_size=256), "hashed"),
                       {"land": language(.75, 0), "law": language(.25, 1)}, context=64)
    table = specialise_table(found)
    assert set(table["verdict"]) == {"by token alone"} and (table["p topic"] <= .05).all()
    assert (table["p shuffled"] > .05).all() and table["left"].max() < 1e-9

def test_texts_that_would_fool_it_have_too_little(s, tmp_path):
    land, law = language(.75, 0), language(.25, 1)
    one, again, near = tmp_path / "one.txt", tmp_path / "again.txt", [t.upper() + " " for t in law[:1] * 24]
    one.write_text(" ".join(law)), again.write_text("\n\n".join(law[:1] * 24))
    for text in (one, again, near, law[:1] * 24, ["law " * n for n in range(40, 64)], [" ".join(law)], law[:3],
                 ["short."] + law[:2]):
        found = specialise(s, {"land": land, "law": text}, context=64)
        assert specialise_table(found)["verdict"].str.startswith("too little text").all(), str(text)[:60]
    both = specialise(s, {"land": land, "same": land}, context=64)
    assert specialise_table(both)["verdict"].str.startswith("too little text").all()
    assert both.query("metric == 'left_out' and stratum == 'topic=same'")["value"].item() == 23

def test_one_language_under_two_names_is_no_topic(s):
    same = language(.5, 3, 48)
    table = specialise_table(specialise(s, {"odd": same[::2], "even": same[1::2]}, context=64))
    assert (table["p left"] > .05).all() and not table["verdict"].str.contains("specialises").any()

class Stop(Exception): pass

def test_a_pass_that_was_stopped_goes_on_to_the_same_rows_and_keeps_as_much_for_a_longer_text(s, tmp_path, monkeypatch):
    monkeypatch.setattr("time.monotonic", iter(range(0, 10**6, 30)).__next__)
    texts, sizes, ran, run = {"a": language(.7, 0, 45), "b": language(.3, 1, 45)}, [], [], type(s).run
    straight = specialise(s, texts, context=64, batch=64)
    def stops(*args, **more):
        ran.append(1)
        if len(ran) == 3: raise Stop
        return run(*args, **more)
    monkeypatch.setattr(type(s), "run", stops)
    with pytest.raises(Stop): specialise(s, texts, context=64, batch=64, part=tmp_path / "a")
    assert specialise(s, texts, context=64, batch=64, part=tmp_path / "a").equals(straight)
    monkeypatch.setattr(type(s), "run", run)
    for n in (45, 90):
        specialise(s, {"a": language(.7, 0, n), "b": language(.3, 1, n)}, context=64, batch=64, part=tmp_path / "b")
        sizes.append((tmp_path / "b").stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 64

def test_what_cannot_be_asked_is_refused_before_any_pass(s, tmp_path, monkeypatch):
    monkeypatch.setattr(type(s), "run", lambda *_, **__: 1 / 0)
    text, empty = tmp_path / "law.txt", tmp_path / "empty.txt"
    text.write_text("court"), empty.write_text(" \n\n")
    dense = open_model(tiny_model("llama", vocab_size=256))
    for model, texts, says in ((s, {"a": text}, "two topics or more"), (s, {"a": text, "A ": ["x"]}, "each name once"),
                               (s, {"a": text, "b": empty}, "text of b"), (s, {"a": text, "b": []}, "text of b"),
                               (s, {"a": text, "b": tmp_path / "low.txt"}, "nearest: 'law.txt'"),
                               (s, {"a": text, "b": text}, "one path for two"), (s, ["a", "b"], "topics by name"),
                               (dense, {"a": text, "b": ["x"]}, "which is dense")):
        with pytest.raises(ValueError, match=says): specialise(model, texts, context=16)
    with pytest.raises(ValueError, match="context: expected"): specialise(s, {"a": text, "b": ["x"]}, context=0)

def test_the_command_prints_a_verdict_a_layer_and_writes_rows_a_picture_and_the_loads(s, tmp_path, capsys):
    s.model.save_pretrained(tmp_path / "m")
    for name, likes in (("land", .75), ("law", .25)):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(language(likes, len(name))))
    ask = ["specialise", "--model", str(tmp_path / "m"), "--bytes", "--context", "64", "--text",
           f"land={tmp_path}/land.txt"]
    assert main([*ask, "--text", f"{tmp_path}/law.txt", "--out", str(tmp_path / "o.parquet"), "--json"]) == 0
    said = capsys.readouterr()
    assert [x["layer"] for x in json.loads(said.out)] == ["L0", "L1"] and "control, topics dealt" in said.err
    E = load_matrix(pd.read_parquet(tmp_path / "o.parquet")).shape[1]
    assert pd.read_csv(tmp_path / "o.loads.csv").shape == (2, 1 + E)
    assert (tmp_path / "o.png").exists() and not [*tmp_path.glob("*.part")]
    assert main(ask) == 2 and "two topics or more" in capsys.readouterr().err
    assert main([*ask, "--text", f"land={tmp_path}/law.txt"]) == 2 and "each topic once" in capsys.readouterr().err
    assert not math.isnan(json.loads(said.out)[0]["p topic"])
