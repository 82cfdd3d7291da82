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
from moe_redistribution.opened.families import tiny_model
from moe_redistribution.opened.opened import LanguageModel, open_model
from moe_redistribution.language.routers import put_router
from scipy.stats import binom

from moe_redistribution.instruments.routing import mutual_information
from moe_redistribution.opened.documents import _alike, _Seen
from moe_redistribution.opened.specialise import (_MARGIN, _beyond, _ceiling, _dealt, _detectable, _holm, _layer_rows,
                                                    _left, _left_share, _p, _renamed, load_matrix, placement_loads, specialise,
                                                    specialise_table, specialise_words)
from moe_redistribution.opened.upcycled import upcycled_model
from moe_redistribution.record.cli import main
from tiers import first

logging.disable_progress_bar()

WORDS = "tree river stone cloud court claim judge clause house road sea light name hand work day".split()

def language(likes, seed, n=24, words=40):
    "Documents of a made language; `likes`: how often a word is of the first half of its words."
    g, half = np.random.default_rng(seed), len(WORDS) // 2
    p = np.where(np.arange(2 * half) < half, likes, 1 - likes) / half
    return [" ".join(g.choice(WORDS, words, p=p)) for _ in range(n)]

@pytest.fixture(scope="module")
def s(): return open_model(tiny_model("olmoe", vocab_size=256))

# ----------------------------------------------------------------------------------------------------- planted counts

def chances(taste, topic, effect, noise=0):
    "Of each token the chance of each expert, in a document of topic 1 or -1."
    p = np.exp(taste + noise + topic * effect * np.repeat([1, -1], taste.shape[1] // 2))
    return p / p.sum(-1, keepdims=True)

def frequencies(B, topic, skew):
    words = np.exp(topic * skew * (np.arange(B) - B / 2))
    return words / words.sum()

def planted(effect, seed, documents=(8, 8), B=10, E=8, n=300, skew=.2, lengths=1., tau=.15, alike=True):
    """Counts (documents, tokens and a rest, experts) of two topics: experts like tokens, by `effect` a topic, and each
    document has a taste of its own; `lengths`: how much longer the second topic's are; `alike`: cut as in use."""
    g, table = np.random.default_rng(seed), []
    taste, long = g.normal(size=(B, E)), [np.full(D, int(n * x)) for D, x in zip(documents, (1, lengths))]
    for topic, each in zip((1, -1), _alike(long) if alike else long):
        for length in each:
            p = chances(taste, topic, effect, tau * g.normal(size=E))
            often = g.multinomial(length, frequencies(B, topic, skew))
            table.append([g.multinomial(often[b], p[b]) for b in range(B)] + [np.zeros(E, int)])
    return torch.tensor(np.array(table)), torch.arange(2).repeat_interleave(torch.tensor(documents))

def found_in(table, topic):
    "p of topic, of what is left of it, and the least p of an expert by topic and beyond its tokens."
    x, deals = table.double()[:, :-1], _dealt(topic, 199)
    t = deals @ x.sum(1)
    each = torch.stack([t, t.sum(-1, keepdim=True) - t], -1).transpose(1, 2)
    return [_p(mutual_information(t)).item(), _p(_left(deals, x)).item(),
            _holm(_p(mutual_information(each))).min().item(), _holm(_p(_beyond(deals, x))).min().item()]

def shares_found(draws=200, **how):
    "In which share of draws without a topic beyond tokens `found_in` finds each."
    return np.mean([np.array(found_in(*planted(0, seed, **how))) <= .05 for seed in range(draws)], 0)

HIGHEST = binom.ppf(.99, 200, .05) / 200                # a true rate of .05 is above that in one of a hundred tests

@pytest.mark.parametrize("how", [dict(), dict(documents=(6, 14), lengths=4.), dict(documents=(14, 6), lengths=4.)],
                         ids=["equal", "few long", "few short"])
def test_chance_is_called_a_topic_in_5_of_100_draws_and_tokens_never_more(how):
    assert (shares_found(skew=0, **how) <= HIGHEST).all()
    by_tokens = shares_found(skew=.4, **how)
    assert by_tokens[0] > .9 and (by_tokens[[1, 3]] <= HIGHEST).all()          # words of a topic are not experts' topic

@pytest.mark.audit
@pytest.mark.parametrize("how", [dict(), dict(documents=(6, 14), lengths=4.),
                                 dict(documents=(10, 10), lengths=10., tau=0)],
                         ids=["equal", "few long", "many times as long"])
def test_two_thousand_draws_say_the_same(how):
    assert (shares_found(2_000, skew=0, **how) <= binom.ppf(.99, 2_000, .05) / 2_000).all()

def test_documents_that_are_not_cut_alike_would_find_topics_where_there_are_none():
    how = dict(documents=(10, 10), lengths=10., n=100, tau=0, skew=0)
    assert shares_found(alike=False, **how)[1] > HIGHEST >= shares_found(**how)[1]

def effect_of(margin, taste, tau=.15, skew=.2):
    "The effect at which topic given token has as much of what there is to know as the verdict asks for."
    noise, low, high = tau * np.random.default_rng(0).normal(size=(500, 1, taste.shape[1])), 0, 1
    for _ in range(20):
        effect = (low + high) / 2
        each = [chances(taste, t, effect, noise).mean(0) * frequencies(len(taste), t, skew)[:, None] for t in (1, -1)]
        low, high = (effect, high) if _left_share(torch.tensor(np.array(each))) < margin else (low, effect)
    return effect

def test_what_the_verdict_asks_for_is_found_in_95_of_100_texts_that_are_not_too_little():
    how, n, enough = dict(documents=(8, 8)), 150, 0
    def tried(effect, seed):
        x, topic = planted(effect, seed, n=n, **how)
        values, own = _left(_dealt(topic, 199), x[:, :-1].double()), torch.stack([x[topic == z].sum(0) for z in (0, 1)])
        return _p(values).item() <= .05, _detectable(values[1:], 1) / _ceiling(own.sum(1)) <= _MARGIN
    while enough < .95: n, enough = 2 * n, np.mean([tried(0, seed)[1] for seed in range(40)])
    effects = [effect_of(_MARGIN, np.random.default_rng(seed).normal(size=(10, 8))) for seed in range(200)]
    assert np.mean([tried(e, seed)[0] for seed, e in enumerate(effects)]) >= .95

def as_counts(table, topic):
    E = table.shape[-1]
    maps = _dealt(topic, 19)[1:].int() @ table[:, :-1].flatten(1).int()                # as chance has it
    return dict(tokens=table, positions=table[:, :8], maps=maps.view(19, -1, E), n=torch.tensor([int(table.sum()), 0]),
                together=torch.stack([torch.diag(table.sum((0, 1))), torch.zeros(E, E)]).long())

def told(table, topic, **more):
    of = dict(condition="planted")
    found = _layer_rows(as_counts(table, topic) | more, topic, ["a", "b"], 199, site="L0.routes", **of)
    documents = [rows([int((topic == z).sum())], [0], metric="documents", stratum=f"topic={n}", **of)
                 for z, n in enumerate("ab")]
    return tidy([*found, *documents])

def test_the_verdict_names_the_topic_the_token_chance_or_how_much_text_is_lacking():
    word = lambda *x: specialise_table(told(*x))["verdict"].item()
    assert word(*planted(.4, 0)) == "specialises by topic beyond its tokens"
    assert word(*planted(0, 0, n=900)) == "by token alone"
    bare = told(*planted(.4, 0), maps=None)
    assert specialise_table(bare)["verdict"].item().startswith("a topic beyond its tokens; without a map")
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

def test_a_word_that_stands_in_one_topic_alone_is_no_topic(s):
    plain, g = language(.5, 5, 48), np.random.default_rng(0)
    marked = [" ".join("zeal" if g.random() < .2 else w for w in text.split()) for text in plain[1::2]]
    table = specialise_table(specialise(s, {"plain": plain[::2], "marked": marked}, context=64))
    assert not table["verdict"].str.startswith("specialises").any()

def untrained(seed, family="olmoe"):
    torch.manual_seed(seed)
    model = tiny_model(family, vocab_size=256)
    for p in model.parameters():
        if p.ndim > 1: torch.nn.init.normal_(p, std=.1)
    return model

@pytest.mark.parametrize("seed", first([0], range(3)))
def test_a_router_that_nobody_trained_has_topics_and_no_more_than_maps_drawn_by_chance(seed):
    texts = {"land": language(.9, 2 * seed), "law": language(.1, 2 * seed + 1)}
    for model in (untrained(seed), upcycled_model(untrained(seed, "llama"), 4, 2, seed)):
        table = specialise_table(specialise(model, texts, context=64))
        assert not table["verdict"].str.startswith("specialises").any() and (table["left by maps"] > 0).all()
    assert table["verdict"].str.contains("no more than a map drawn by chance").any()

@torch.no_grad()
def reading_a_topic(texts):
    "A model whose routers read the direction between the means of two topics' streams."
    s = open_model(untrained(0))
    heard = [[] for _ in s.layers]
    hooks = [x.rows.register_forward_pre_hook(lambda m, args, at=at: at.append(args[0].flatten(0, -2).mean(0)))
             for x, at in zip(s.layers, heard)]
    for of in texts.values(): s.run(torch.tensor([list(t.encode())[:64] for t in of]))
    for h in hooks: h.remove()
    for x, (a, b) in zip(s.layers, heard):
        W, way = x.rows.weight, (a - b) / (a - b).norm()
        W.copy_(torch.tensor([1., -1] * (len(W) // 2))[:, None] * way * W.norm(dim=1).mean())
        W += .01 * torch.randn(W.shape, generator=torch.Generator().manual_seed(0))
    return s

def test_a_router_that_reads_a_topic_specialises():
    s = reading_a_topic({"land": language(.9, 10), "law": language(.1, 11)})
    table = specialise_table(specialise(s, {"land": language(.9, 0), "law": language(.1, 1)}, context=64))
    assert table["verdict"].str.startswith("specialises by topic").any()
    assert (table["left"] > table["left by chance"]).all()

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
    for n in (80, 160):
        specialise(s, {"a": language(.7, 0, n), "b": language(.3, 1, n)}, context=64, batch=64, part=tmp_path / "b")
        sizes.append((tmp_path / "b").stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 64

def test_padding_counts_for_nobody_and_one_expert_a_token_and_equal_scores_give_numbers():
    texts = {"a": language(.7, 0, 12), "b": language(.3, 1, 12)}
    plain = open_model(tiny_model("olmoe", vocab_size=256, num_experts_per_tok=1))
    found = specialise(plain, texts, context=64)
    letters = sum(len(t) for of in texts.values() for t in of)
    assert (load_matrix(found).sum(1) == letters).all() and "together" not in set(found["metric"])
    padded = open_model(plain.model, pad=ord(" "))
    assert (load_matrix(specialise(padded, texts, context=64)).sum(1) < letters).all()
    with torch.no_grad():
        for x in plain.layers: x.rows.weight.zero_()                                               # all scores are ties
    table = specialise_table(specialise(plain, texts, context=64))
    assert not table["verdict"].str.startswith("specialises").any()

def test_shared_experts_and_layers_without_experts_stand_apart_and_a_placement_has_a_line_for_each_layer():
    s = open_model(tiny_model("deepseek_v3", vocab_size=256))
    found = specialise(s, {"a": language(.7, 0, 8), "b": language(.3, 1, 8)}, context=64)
    own, made = load_matrix(found), placement_loads(found)
    assert "shared" in set(found["metric"]) and len(own) < s.n_layers
    assert any("shared experts" in w for w in specialise_words(found))
    counts = torch.tensor(json.loads(json.dumps(made))["logical_count"])                          # as EPLB is given it
    assert counts.shape == (s.n_layers, own.shape[1]) and counts[made["layers"]].tolist() == own.to_numpy().tolist()
    few = 10**6
    assert (specialise_table(found, few)[f"below {few} tokens"] == own.shape[1]).all()
    assert f"fewer than {few} tokens: {own.size} experts" in "\n".join(specialise_words(found, few))

def test_what_cannot_be_asked_is_refused_before_any_pass(s, tmp_path, monkeypatch):
    monkeypatch.setattr(type(s), "run", lambda *_, **__: 1 / 0)
    text, empty = tmp_path / "law.txt", tmp_path / "empty.txt"
    text.write_text("court"), empty.write_text(" \n\n")
    for texts, says in (({"a": text, "b": empty}, "text of b"), ({"a": text, "b": []}, "text of b"),
                        ({"a": text, "b": tmp_path / "low.txt"}, "nearest: 'law.txt'"),
                        ({"a": text, "b": text}, "one path for two"), (["a", "b"], "topics by name")):
        with pytest.raises(ValueError, match=says): specialise(s, texts, context=16)
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
    assert np.shape(json.loads((tmp_path / "o.loads.json").read_text())["logical_count"]) == (2, E)
    assert (tmp_path / "o.png").exists() and not [*tmp_path.glob("*.part")]
    assert main([*ask, "--text", f"{tmp_path}/law.txt", "--plot", str(tmp_path / "p.jpeg.x")]) == 2
    assert ".svg" in capsys.readouterr().err
    assert main([*ask, "--text", f"{tmp_path}/law.txt", "--out", str(tmp_path / "q.csv"), "--csv", "--few", "9",
                 "--plot", str(tmp_path / "p.svg")]) == 0
    assert "below 9 tokens" in capsys.readouterr().out.splitlines()[0] and (tmp_path / "p.svg").exists()
    assert main(ask) == 2 and "two topics or more" in capsys.readouterr().err
    assert main([*ask, "--text", f"land={tmp_path}/law.txt"]) == 2 and "each topic once" in capsys.readouterr().err
    assert not math.isnan(json.loads(said.out)[0]["p topic"])

def test_new_text_is_called_new_however_much_was_read_and_what_repeats_itself_is_no_repetition_of_others():
    g, seen = np.random.default_rng(0), _Seen(1 << 14)
    def new(n=200): return "".join(g.choice([*"abcdefgh"], n))
    said = [seen.news(new()) for _ in range(100)]
    assert seen.free < seen.size / 2 and np.mean(said[-20:]) == pytest.approx(1, abs=.1) and min(said) > .5
    assert seen.news(new(64) * 20) > .5
    assert seen.news(text := new()) > .5 > seen.news(text)
    assert seen.news(text * 20 + new()) < .5
    with pytest.raises(ValueError, match="--tokens"):
        for _ in range(1000): seen.news(new())

def test_chance_for_the_position_deals_only_the_places_that_a_document_has():
    g = torch.Generator().manual_seed(0)
    counts = torch.zeros(40, 8, 4, dtype=torch.double)
    counts[:, 0] = torch.rand(40, 4, generator=g)                                       # short: one eighth each
    assert _renamed(counts, 5).abs().max() < 1e-12                                     # nothing to deal, nothing told
    counts[:, :3] = torch.rand(40, 3, 4, generator=g)
    dealt = _renamed(counts, 99)
    assert dealt[1:].std() > 0 and (dealt[1:] >= dealt[0]).double().mean() > .01

def test_no_tokens_are_too_few_and_the_padding_and_the_family_belong_to_the_key(s, tmp_path):
    texts = dict(a=language(.9, 1), b=language(.1, 2))
    with pytest.raises(ValueError, match="tokens"): specialise(s, texts, context=64, tokens=0)
    part = tmp_path / "a.part"
    a = specialise(LanguageModel(s.model, pad=0, name="m"), texts, context=64, part=part)
    b = specialise(LanguageModel(s.model, pad=ord("e"), name="m"), texts, context=64, part=part)
    assert a.query("metric == 'load'")["n_examples"].sum() > b.query("metric == 'load'")["n_examples"].sum()
