"""Companion 002: its constructions on every case, its set-up to the digit, what must hold of books, paths, streams."""
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from moe_redistribution.evidence.claims import claims, each_name, seed_list, statements
from moe_redistribution.evidence.contrasts import comparison
from moe_redistribution.evidence.printed import paper_values
from moe_redistribution.evidence.selection import item_rows, rows_of
from moe_redistribution.language.small import greedy_tokens, heldout_losses
from moe_redistribution.language.training import _LanguageRecipe, _LanguageTraining, train_language
from moe_redistribution.record.recording import unrecorded_jobs
from moe_redistribution.studies.parrots import facts, study
from moe_redistribution.studies.parrots.facts import (_gpu_days, PARROTS_PAPER, parrots_set_up, pretraining_cost,
                                                      _training_flops)
from moe_redistribution.studies.parrots.layer import _path_layer, _path_logits, path_pools, train_paths
from moe_redistribution.studies.parrots.study import (BOOK_MODELS, exponents, _graph_answers, _kind_of, loss_at,
                                                      _memorised_bits, _MixedStream, _parrot, parrot_of,
                                                      _parrot_parameters, _right_aligned, STUDY)
from moe_redistribution.studies.parrots.theory import (all_graphs, block_parameters, hat_output, memorise,
                                                       path_output, path_tokens, two_steps)
from moe_redistribution.language.recall import length2_path, PhoneBook, random_graphs
from moe_redistribution.language.text import generator_of
from moe_redistribution.training.jobs import run_job
from moe_redistribution.training.store import seal, Store
from moe_redistribution.training.study import Desk, find_rows, run_study, study_jobs

# --------------------------------------------------------------------------------------------------------------- theory

def gaussian(*shape, of):
    return torch.randn(*shape, generator=generator_of("test", "parrots", *of), dtype=torch.double)

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

@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 60), m=st.integers(3, 8), bits=st.integers(0, 2), seed=st.integers(0, 10 ** 6),
       share=st.sampled_from((0., .1, .5, 1.)))
def test_any_number_of_points_with_any_labels_is_memorised(n, m, bits, seed, share):
    X = gaussian(n, m, of=("any", n, m, seed))
    y = torch.where(torch.rand(n, generator=generator_of(seed)) < share, 1., -1.)
    assert (hat_output(memorise(X, y, 2 ** bits), X).sign() == y).all()

# --------------------------------------------------------------------------------------------------------------- set-up

NUMBERS = paper_values().query("item.str.startswith('002.')").set_index("id")
LINES = claims().query("item.str.startswith('002.')").set_index("id")
FACTS = LINES[LINES["instrument"] == "parrots_set_up"]
DIFFER = {"shortest_path.004", "phone_book.013", "phone_book.014", "optim_pretrain.009", "fig5.004"}

def ours():
    "Every fact as it would be printed, by id without 002."
    known = {n: parrots_set_up(n) for n in PARROTS_PAPER}
    return {i.removeprefix("002."): known[c.condition.partition("/")[2]][c.metric] * c.unit_factor
            for i, c in FACTS.iterrows()}

def leaves(x, path=()):
    "Paths to every number below `x`, a dictionary or a tuple of such."
    inside = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, tuple) else None
    if inside is None: return [path]
    return [p for k, v in inside for p in leaves(v, (*path, k))]

def changed(x, path):
    "`x` with one more, or a tenth more where that is a fraction, at the end of `path`."
    if not path: return x + 1 if x >= 1 else x * 1.1
    k, *rest = path
    if isinstance(x, dict): return x | {k: changed(x[k], rest)}
    return (*x[:k], changed(x[k], rest), *x[k + 1:])

def test_no_setting_can_change_unnoticed(monkeypatch):
    "But two: the 159 million are compared below, and so is the width of the MoE with 256 experts."
    before, quiet = ours(), []
    for part, *rest in leaves(PARROTS_PAPER):
        with monkeypatch.context() as m:
            m.setitem(facts.PARROTS_PAPER, part, changed(PARROTS_PAPER[part], rest))
            try: quiet += [(part, *rest)] * (ours() == before)
            except ValueError: pass                             # a graph of a size without an edge probability
    assert quiet == [("pretraining", "more", 0, 0), ("gap", "beyond")]

def test_five_numbers_differ_from_the_print_and_these_are_they():
    found = {r.id.removeprefix("002."): r.verdict for item in NUMBERS["item"].unique()
             for r in comparison(item_rows(item), item).itertuples()}
    assert {i for i, v in found.items() if v == "differs"} == DIFFER
    assert sum(v == "agrees" for v in found.values()) == 81 - len(DIFFER)
    assert PARROTS_PAPER["gap"]["beyond"] == NUMBERS.loc["002.fig5.004", "mean"]

def test_the_cost_that_the_reasons_name_is_the_cost_that_is_computed():
    cost = pretraining_cost()
    notes = LINES.loc[LINES["note"].str.contains("FLOP"), "note"]
    assert len(notes) == 8
    assert notes.str.contains(f"{cost['flops']:.1e}".replace("+", "")).all()
    assert notes.str.contains(f"{cost['days']:.0f} days", regex=False).all()

def test_a_gpu_at_full_speed_takes_as_many_days_as_arithmetic_says():
    assert _training_flops(3, 5) == 90 and _gpu_days(86_400e12, peak=1e12, share=1) == 1
    assert _gpu_days(1e20) == pytest.approx(1e20 / .3 / 989e12 / 86_400)

# ---------------------------------------------------------------------------------------------------------------- study

BOOK = PhoneBook(60, 3, 3)

@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return run_study(STUDY, "tiny", root=tmp_path_factory.mktemp("parrots"), executor="here", quiet=True)

@pytest.mark.parametrize("source", ["claims", "statements"])
def test_every_line_asks_for_rows_that_the_study_makes(rows, source):
    lines = claims() if source == "claims" else statements()
    lines = lines[(lines["instrument"] == "parrots") & (lines["aggregate"] != "none")]
    made = set(zip(rows["metric"], rows["condition"].str.split("/").str[1], rows["split"], rows["rule"]))
    assert len(lines) > 15
    for c in lines.itertuples():
        for name in [n for n in each_name(f"{c.condition} {c.versus}") if "=" not in n]:
            preset, kind, model = name.split("/")
            p = STUDY.presets[preset.partition(".")[2]]
            arm = f"{kind}/{model}" if kind in study.PATHS else kind
            if kind == "equal": assert c.metric in ("knowledge_above", "unseen_above")    # after 3 steps all guess
            elif model != "exponents": assert (c.metric, kind, c.split, "final") in made, (c.Index, name)
            own_seeds = set(seed_list(c.seeds))                   # others were trained by `study NAME --seeds`, from 1 on
            assert own_seeds <= set(p.arms[arm]) or own_seeds == {*range(1, len(own_seeds) + 1)} > set(p.arms[arm]), name
            own = p.settings[_kind_of(arm)]
            if kind in study.PATHS: assert c.stratum in ("all", *(f"width={m}" for m in own["widths"]))
            else: assert model.removesuffix("-unmasked") in [*own["models"], *own.get("unmasked", []), "exponents"]
            if c.edit != "none": assert [model, c.edit.removeprefix("over ")] in own["pairs"]

def test_every_arm_makes_rows_and_none_twice(rows):
    labels = [c for c in rows if c not in ("value", "n_examples")]
    assert not rows.duplicated(labels).any() and rows["value"].notna().all()
    assert set(rows["condition"].str.split("/").str[1]) == {"book", "routers", "capacity", "path", "apart", "mixed",
                                                                  "equal", "fit", "graphs"}

@pytest.mark.parametrize("arm", ["mixed", "capacity", "graphs"])
def test_a_job_that_is_stopped_in_the_middle_gives_the_same_rows(arm, tmp_path, rows, monkeypatch):
    job, = study_jobs(STUDY, "tiny", arm)
    with monkeypatch.context() as m:
        m.setattr(Desk, "next", lambda desk, state: seal(desk.path, *with_key(state(), desk.key)) and False)
        assert run_job(job, tmp_path) is False                                 # stopped at its first look
    assert list(tmp_path.rglob("*.state")) and run_job(job, tmp_path) and not list(tmp_path.rglob("*.state"))
    again = find_rows(job, Store(tmp_path))
    own = rows[rows["condition"].isin("parrots.tiny/" + again["condition"])].reset_index(drop=True)
    assert own["value"].tolist() == again["value"].tolist()                      # to the bit

def with_key(state, key): return state[0], state[1] | {"key": key}

@pytest.mark.parametrize("name", [*BOOK_MODELS, "d24-e8-frozen", "d24-e8-switch"])
def test_sizes_are_those_of_the_formula(name):
    d, E, how = parrot_of(name).values()
    found, k = _parrot_parameters(_parrot(name, 1, 39, 12)), 1 if how == "switch" else 2
    formula = block_parameters(d, E, k, 2)
    norms = 2 * 2 * d if how in ("olmoe", "switch") else 0                        # OLMoE norms queries and keys as well
    assert found == {n: x + norms for n, x in formula.items()}

def test_the_loss_is_on_labels_only():
    tokens, model = BOOK.entries(range(8)), _parrot("d16", 1, BOOK.d_vocab, BOOK.T)
    logits = model(input_ids=tokens[:, :-1]).logits
    digits = heldout_losses(model, tokens)[:, BOOK.labels()[1:]].mean()
    assert torch.allclose(loss_at(BOOK.labels())(logits, tokens), digits, atol=1e-5)
    assert BOOK.labels("all").sum() == BOOK.T - 1 and BOOK.labels().sum() == 3

def test_a_book_learnt_by_heart_has_all_its_bits_and_is_written_without_a_mistake():
    model = _parrot("d32", 1, BOOK.d_vocab, BOOK.T)
    train_language(model, BOOK.batches(60, 1), 200, 1e-2, loss_of=loss_at(BOOK.labels()))
    found = _memorised_bits(model, BOOK)
    assert found["exact"] == 1 and found["digits"] == 1 and found["share"] > .95

def test_frozen_routers_stay_to_the_bit_and_learning_ones_move(tmp_path):
    for name, moved in (("d16-e4-frozen", False), ("d16-e4", True)):
        learner = study._Learner(1, dict(steps=3, lr=1e-2), None)
        model = _parrot(name, 1, BOOK.d_vocab, BOOK.T)
        before = {n: p.clone() for n, p in model.named_parameters() if n.endswith("gate.weight")}
        class Desk:
            def once(self, part, work, share): return work(None)
        learner.desk = Desk()
        learner.train("x", name, model, BOOK.batches(20, 1), loss_at(BOOK.labels()), 1.)
        after = dict(model.named_parameters())
        assert before and all(torch.equal(after[n], p) != moved for n, p in before.items())

def test_a_law_of_memory_is_about_models_and_its_claims_count_models():
    own = statements().query("instrument == 'parrots' and key in ['002-M1', '002-M1d']")
    for s in own.itertuples():
        S = STUDY.presets[s.condition.partition("/")[0].partition(".")[2]].settings["fit"]
        assert s.over == "models" and s.n == len(S["models"]) and s.condition.endswith("/fit/exponents")
        assert set(BOOK_MODELS) >= set(S["models"]) >= {"d16-e16"}                       # the worst one is not left out

def test_pseudo_values_of_a_fit_are_those_of_models_left_out():
    total, active = np.array([4., 8, 16, 16, 32, 33]) * 1e3, np.array([4., 8, 16, 6, 9, 21]) * 1e3
    bits = 2 * total * np.exp(np.random.default_rng(0).normal(0, .1, 6))
    of = lambda *x: np.array(exponents(*x))
    each = np.array([study._pseudo_value(of, i, total, active, bits) for i in range(6)])
    left = np.array([of(*(np.delete(x, i) for x in (total, active, bits))) for i in range(6)])
    assert np.allclose(each, 6 * of(total, active, bits) - 5 * left) and abs(each.mean(0)[0] - 1) < .3

def test_an_exponent_over_models_is_that_of_plain_least_squares():
    total, active = np.array([4., 8, 16, 16, 32, 33]) * 1e3, np.array([4., 8, 16, 6, 9, 21]) * 1e3
    bits = 2 * total * np.exp(np.random.default_rng(0).normal(0, .1, 6))
    x, half, p = study.over_models(total, active, bits)["difference"]
    a, b = exponents(total, active, bits)
    merged = np.stack([np.log(total), np.log(total * active), np.ones(6)], 1)          # its first weight is a - b
    fit, rest = np.linalg.lstsq(merged, np.log(bits), rcond=None)[:2]
    sd = (rest[0] / 3 * np.linalg.inv(merged.T @ merged)[0, 0]) ** .5
    assert np.allclose((x, half), (a - b, 3.182446 * sd), rtol=1e-5) and np.isclose(fit[0], a - b) and 0 < p < 1

def test_no_claim_at_equal_loss_is_averaged_over_losses_at_which_both_models_guess():
    own = statements().query("key in ['002-M7b', '002-M7c']")
    assert own["metric"].str.endswith("_above").all() and len(own) == 4
    at_ten = ([3., 2., 1.], [.1, .1, .1])
    assert study._above_a_guess(at_ten, at_ten, .1) == {} and study._above_a_guess(at_ten, at_ten, 0)["above"] == 0

def test_recorded_differences_above_a_guess_come_out_of_recorded_looks(tmp_path):
    job = study_jobs(STUDY, "night", "equal", [3])[0]
    assert run_job(job, tmp_path)
    again = find_rows(job, Store(tmp_path))
    there = rows_of("parrots", list("parrots.night/" + again["condition"].unique())).query("seed == 3")
    at = ["condition", "metric", "edit", "stratum"]
    there = there.assign(condition=there["condition"].str.removeprefix("parrots.night/")).set_index(at)["value"]
    again = again.set_index(at)["value"]
    assert len(there) == len(again) > 30 and np.allclose(there.sort_index(), again.sort_index())

def test_no_length2_graph_of_the_arms_apart_is_both_trained_on_and_tested():
    S = STUDY.presets["small"].settings["apart"]
    lines = {}
    for (tokens, answers), side in zip(path_pools(*(S[k] for k in ("vertices", "pool", "test", "apart"))), "ab"):
        r = S["vertices"] - 2
        alice, bob = tokens[:, :r] > 0, tokens[:, r:2 * r] > 0
        lines[side] = {tuple(x) for pair in ((alice, bob), (bob, alice)) for x in torch.cat(pair, 1).tolist()}
        assert answers.sum() * 2 == len(answers)
    assert len(lines["a"]) > 20_000 and not lines["a"] & lines["b"]

def test_no_shortest_path_graph_is_both_trained_on_and_tested():
    S = STUDY.presets["night"].settings["graphs"]
    near = np.r_[0:2000, S["graphs"]:S["graphs"] + S["test"]]
    edges = random_graphs(S["n"], near, 1, S["p"]).edges.flatten(1).numpy()
    assert len(np.unique(np.packbits(edges, axis=1), axis=0)) == len(near)

def test_no_graph_is_in_both_halves_and_a_batch_has_each_kind_in_equal_parts():
    stream = _MixedStream(50, 100, 6, seed=3)
    both = {tuple(x) for x in stream.seen.tolist()} & {tuple(x) for x in stream.unseen.tolist()}
    lines = stream.batches(30, 1)(5)
    assert not both and torch.bincount(lines[:, 0]).tolist() == [10, 10, 10]
    assert torch.equal(lines, stream.batches(30, 1)(5)) and lines.max() < stream.d_vocab
    seen = {tuple(x) for x in stream.seen.tolist()}
    assert all(tuple(x) in seen for x in lines[lines[:, 0] == 1].tolist())

def test_prompts_of_different_length_are_answered_as_each_alone():
    g = random_graphs(6, range(6), seed=2, p=.3)
    model = _parrot("d16-e4", 1, 12, 80)
    together = greedy_tokens(model, _right_aligned(g.tokens, 6), 5, fill=11)
    for i in range(6):
        assert torch.equal(greedy_tokens(model, _right_aligned(g.tokens[i:i + 1], 6), 5, fill=11)[0], together[i])

def test_the_order_of_tokens_before_the_last_is_nothing_to_the_layer():
    p = _path_layer(3, 1, 8, 12, (1,))
    tokens, _ = length2_path(7, 32, "tokens")
    shuffled = torch.cat([tokens[:, torch.randperm(10)], tokens[:, -1:]], 1)
    assert torch.allclose(_path_logits(p, tokens[None])[0], _path_logits(p, shuffled[None])[0], atol=1e-4)
    assert train_paths(2, 1, (1,), vertices=5, steps=2, batch=4, pool=16, test=8)[0].shape == (1,)

def test_an_answer_is_exact_if_it_is_the_label_and_valid_if_it_is_any_shortest_path(monkeypatch):
    n, stop = 6, 10
    g = random_graphs(n, range(300), seed=3, p=.3)
    def label(model, prompts, new, **how):
        lines = [x[y].tolist() for x, y in zip(g.tokens, g.labels)]
        return torch.tensor([x + [-1] * (new - len(x)) for x in lines])
    def edge(model, prompts, new, **how):
        return torch.cat([g.query, torch.full((len(g.query), 1), stop), torch.full((len(g.query), new - 3), -1)], 1)
    monkeypatch.setattr(study, "greedy_tokens", label)
    assert all(right.all() for right in _graph_answers(None, g, n).values())
    monkeypatch.setattr(study, "greedy_tokens", edge)
    found, near = _graph_answers(None, g, n), g.distance == 1
    assert torch.equal(found["valid"], near) and torch.equal(found["exact"], near) and 0 < near.sum() < 300

@pytest.mark.parametrize("preset", ["small", "night", "long", "large"])
def test_a_recorded_job_is_known_as_recorded(preset):
    jobs = study_jobs(STUDY, preset)
    assert not unrecorded_jobs(jobs) and len(jobs) > 2

@pytest.mark.audit
def test_training_is_as_fast_as_a_plain_loop_over_the_same_class():
    book, steps = PhoneBook(2000, 4, 5), 60
    loss = loss_at(book.labels())
    def ours(model):
        training = _LanguageTraining(model, _LanguageRecipe(steps, aux_weight=.01), loss)
        for i in range(steps): training.one_step(book.batches(256, 1)(i))
    def plain(model):
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for i in range(steps):
            tokens = book.batches(256, 1)(i)
            out = model(input_ids=tokens[:, :-1], use_cache=False, output_router_logits=True)
            optimiser.zero_grad()
            (loss(out.logits, tokens) + .01 * out.aux_loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
            optimiser.step()
    def seconds(f):
        model, began = _parrot("d24-e8", 1, book.d_vocab, book.T), time.perf_counter()
        f(model)
        return time.perf_counter() - began
    taken = [(seconds(ours), seconds(plain)) for _ in range(3)]
    assert min(a / b for a, b in taken) < 1.05, taken
