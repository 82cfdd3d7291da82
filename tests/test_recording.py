"""Every instrument measures a seed as if it were alone, and the machinery of recording asks each one only for what is
new."""
import re
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from moe_redistribution.record import recording, runs
from moe_redistribution.models.condition import RECIPES, condition
from moe_redistribution.training.groups import train
from moe_redistribution.tasks.data import unseen_examples
from moe_redistribution.basics.errors import Faults
from moe_redistribution.models.population import predict
from moe_redistribution.instruments.instrument import _Instrument, at_all, at_first, instruments, instruments_for
from moe_redistribution.record.recording import _not_in, _record_one, _record_runs
from moe_redistribution.record.runs import stored_runs
from moe_redistribution.evidence.table_files import Clone, read_table, write_table
from moe_redistribution.training.store import Store, unseal
from moe_redistribution.training.study import Preset, Study, find_rows, run_study
from moe_redistribution.instruments.ablation import ablation_of
from moe_redistribution.instruments.measuring import has_weights, rules_for
from moe_redistribution.studies.sparsity_moves.study import STUDY
from moe_redistribution.tasks.task import get_task
from moe_redistribution.instruments.rows import ROW_COLUMNS, rows as rows_of_values, tidy
from tiers import first
from toys import untrained

INSTRUMENTS = instruments()
def with_only(some): return replace(STUDY, measured=lambda name: some)
FITS = ("add7/moe-e4k2-h16-silu", "add7/ffn-h256-silu", "add7/ffn-h16-gelu+hold_tens9", "modadd/glu-h16-gelu",
        "hist/moe-e2k1-h16-gelu")

def names_for(instrument): return [n for n in FITS if INSTRUMENTS[instrument].fits(n)]

def test_every_instrument_fits_something_and_no_room_is_forgotten():
    assert all(names_for(i) for i in INSTRUMENTS)

# Fits of a hundred classes, probes on ten thousand sequences and live training are left to `make audit`.
@pytest.mark.parametrize("instrument", first({"ablation", "attribution", "routing"}, INSTRUMENTS))
def test_a_seed_s_rows_do_not_depend_on_who_is_measured_with_it(instrument):
    name = names_for(instrument)[0]
    params = untrained(name, (1, 2, 3))
    alone = {n: v[1:2] for n, v in params.items()}
    rows = INSTRUMENTS[instrument].rows
    among = rows(params, name, [1, 2, 3], stream="authors", rule="final")
    by_itself = rows(alone, name, [2], stream="authors", rule="final")
    among = among[among["seed"] == 2].reset_index(drop=True)
    # some processors sum in another order
    pd.testing.assert_frame_equal(among, by_itself.reset_index(drop=True), rtol=1e-4, atol=1e-5)

@pytest.mark.parametrize("instrument",
                         first(INSTRUMENTS.keys() - {"ablation", "histogram", "probes", "speed"}, INSTRUMENTS))
def test_rows_have_the_house_s_columns_and_name_each_number_once(instrument):
    name = names_for(instrument)[-1]
    params = untrained(name, (1, 2))
    table = INSTRUMENTS[instrument].rows(params, name, [1, 2], stream="authors", rule="final")
    assert tuple(table) == ROW_COLUMNS and len(table) and set(table["seed"]) == {1, 2}
    assert not table.duplicated([c for c in table if c not in ("value", "n_examples")]).any()
    assert not np.isinf(table["value"]).any() and (table["condition"] == name).all()
    assert len(table) <= 2000, f"{len(table) // 2} rows a seed"

@pytest.mark.parametrize("name", first(["add7/moe-e4k1-h16-silu+tokens"], [
    "add7/moe-e4k1-h16-silu+tokens", "modadd/moe_glu-e2k1-h8-gelu+tokens+d32", "hist/moe-e2k1-h8-gelu+tokens"]))
def test_every_instrument_that_fits_routes_from_a_table_measures_them(name):
    "One that refused would end `record` in the middle of a condition."
    params = untrained(name, [1])
    # slow, and refuse no router
    fit = [i for i, x in instruments_for(name).items() if not x.live and i not in ("ablation", "attribution", "probes")]
    assert all(len(INSTRUMENTS[i].rows(params, name, [1], stream="authors", rule="final")) for i in fit)
    learned = set(instruments_for(name.replace("+tokens", "")))
    assert learned - set(instruments_for(name)) == {"scores"} | {"add7": {"patching", "fourier"}, "modadd": {"fourier"},
                                                    "hist": {"histogram"}}[name.split("/")[0]]

@pytest.mark.parametrize("instrument", first({"ablation", "attribution", "routing"},
                                             [i for i, x in INSTRUMENTS.items() if not x.live]))
def test_parameters_of_another_condition_and_seeds_that_are_not_its_members_are_refused(instrument):
    name = names_for(instrument)[0]
    params = untrained(name, (1, 2))
    measure = lambda p, seeds: INSTRUMENTS[instrument].rows(p, name, seeds, stream="authors", rule="final")
    narrow = {n: v[..., :2, :] if n == "W_down" else v[..., :2] if n in ("W_gate", "W_up", "b_up") else v
              for n, v in params.items()}
    for wrong, says in (
        (narrow, "expected W_"), (params | {"w_ln_final": torch.ones(2, 64)}, "expected w_ln_final None per seed"),
        ({n: v for n, v in params.items() if n != "b_O"}, "expected b_O .* got None; fix: give the condition")):
        with pytest.raises(ValueError, match=says): measure(wrong, [1, 2])
    with pytest.raises(ValueError, match="seeds: expected 2, one a member of the population; got 3"):
        measure(params, [1, 2, 3])

def test_an_instrument_that_trains_its_own_measures_runs_whose_weights_are_gone(tmp_path, monkeypatch):
    "A paired seed that git has and the store has not is measured once; a failed one never."
    name, asked = "add7/ffn-h64-silu", []
    runs = pd.DataFrame(dict(condition=name, stream=["paired", "paired", "authors"], seed=[3, 4, 42], step=400,
                             failed=pd.array([None, 100, None], dtype="Int64")))
    write_table(runs, "runs", "add7", tmp_path)
    def rows(params, c, seeds, stream, rule):
        asked.append((stream, seeds, params))
        return tidy([rows_of_values(torch.ones(len(seeds)), seeds, condition=name, stream=stream, rule="training",
                                    step=10, metric="own_distance")])
    only = {"speed": _Instrument(rows, rules=at_first, streams=("authors", "paired"), live=True)}
    stored = SimpleNamespace(stream="paired", seed=5, step=400, failed=None,
                             weights={"first256": {"W_E": torch.ones(2)}},
                             history=pd.DataFrame(dict(step=[400], loss=1.)), condition=condition(name),
                             manifest=dict(condition=name, stream="paired", seed=5, step=400, settled=True, failed=None,
                                           cpu_seconds=1., rules={}, machine={}))
    monkeypatch.setattr(recording, "stored_runs", lambda store, name, but: [stored])
    for _ in range(2): _record_runs(Store(tmp_path / "empty"), Clone(tmp_path), with_only(only), name)
    assert asked == [("paired", [5, 3], {}), ("authors", [42], {})]

@pytest.mark.parametrize("instrument, name, wanted", [
    ("probes", "add7/ffn-h256-silu", {"first256": ("audited", "spec", "code"), "final": ("audited",)}),
    ("histogram", "hist/moe-e2k1-h16-gelu", {"best": ("audited", "paper"), "final": ("audited",)})])
def test_the_authors_probe_fits_are_recorded_at_the_first_checkpoint_and_audited_ones_at_all(instrument, name, wanted,
    monkeypatch):
    asked = {}
    rows = {"probes": "_probe_rows", "histogram": "_histogram_rows"}[instrument]
    room = sys.modules[INSTRUMENTS[instrument].rows.__module__]
    monkeypatch.setattr(room, rows, lambda params, c, seeds, how, rule, **labels: asked.update({rule: how}))
    for rule in rules_for(name, "authors", instrument):
        INSTRUMENTS[instrument].rows({}, name, [1], stream="authors", rule=rule)
    assert asked == wanted

@pytest.mark.audit
def test_an_instrument_added_later_measures_what_is_recorded_already_and_nothing_twice(tmp_path, monkeypatch):
    name, store = "add7/ffn-h16-silu", Store(tmp_path / "store")
    train(name, seeds=[42, 137], root=store.root, steps=200, executor="here", quiet=True)
    asked = []
    def counted(i):
        def rows(params, c, seeds, **labels):
            asked.append((i, tuple(seeds), labels["rule"]))
            return INSTRUMENTS["heldout" if i == "x" else i].rows(params, c, seeds, **labels)
        return rows
    ablation = _Instrument(counted("ablation"), rules=at_all)
    _record_runs(store, Clone(tmp_path), with_only({"ablation": ablation}), name)
    first, asked[:] = list(asked), []
    attribution = _Instrument(counted("attribution"))
    both = with_only({"ablation": ablation, "attribution": attribution})
    written = _record_runs(store, Clone(tmp_path), both, name)
    assert {i for i, *_ in first} == {"ablation"} and {i for i, *_ in asked} == {"attribution"} and len(written) == 1
    assert not _record_runs(store, Clone(tmp_path), both, name) and all(seeds == (42, 137) for _, seeds, _ in asked)

@pytest.mark.audit
def test_another_run_of_a_recorded_seed_is_left_out_of_everything(tmp_path, monkeypatch):
    """A seed trained again where floats are added in another order can be another run: its weights must not fill the
    gaps of the first."""
    name, store, other = "add7/ffn-h8-silu", Store(tmp_path / "store"), Store(tmp_path / "other")
    two = {i: INSTRUMENTS[i] for i in ("ablation", "copying")}
    train(name, seeds=[42], root=store.root, steps=200, until="full", executor="here", quiet=True)
    _record_runs(store, Clone(tmp_path), with_only({"ablation": two["ablation"]}), name)
    run, heard = store.load(name, 42), []
    for seed in (42, 137):
        other.save(replace(run, seed=seed, manifest=run.manifest | {"seed": seed},
                           history=run.history.assign(loss=run.history["loss"] + 1e-3)))
    before = read_table("ablation", name, root=tmp_path).query("seed == 42")
    _record_runs(other, Clone(tmp_path), with_only(two), name, heard.append)
    rows = {i: read_table(i, name, root=tmp_path) for i in two}
    assert (set(rows["copying"]["seed"]) == {137}
            and before.reset_index(drop=True).equals(rows["ablation"].query("seed == 42").reset_index(drop=True)))
    assert "authors 42 passed over" in heard[0] and "137" not in heard[0]
    _record_runs(store, Clone(tmp_path), with_only(two), name)
    assert set(read_table("copying", name, root=tmp_path)["seed"]) == {42, 137}

def test_the_costs_of_instruments_are_held_against_their_limits(monkeypatch, capsys):
    from moe_redistribution.record import cli, costs as room
    spent = pd.DataFrame({"add7/ffn-h8-silu": [100., 30.], "modadd/ffn-h8-gelu": [90., 0.],
                          "hist/ffn-h8-gelu": [89., 0.]}, ["a", "b"])
    costs = lambda names: spent[[n for n in spent if n.split("/")[0] in {m.split("/")[0] for m in names}]]
    monkeypatch.setattr(room, "costs", lambda names: costs(names).assign(total=lambda f: f.sum(axis=1)))
    said = lambda task: cli.main(["bench", "--instruments", "--task", task]) or capsys.readouterr().out.splitlines()[3:]
    assert said("all") == ["All instruments on add7: 130 CPU s, OVER the limit of 120.",
                           "All instruments on modadd and hist: 179 CPU s, within the limit of 180."]
    assert said("hist") == ["All instruments on hist: 89 CPU s, within the limit of 180."]

def test_a_run_that_went_further_is_new_and_one_that_failed_is_not(tmp_path):
    name, store = "add7/ffn-h16-silu", Store(tmp_path)
    train(name, seeds=[1, 2, 3], stream="paired", root=store.root, steps=200, until="full", executor="here", quiet=True)
    runs = stored_runs(store, name)
    there = pd.DataFrame(dict(stream="paired", seed=[1, 2], step=[200, 100]))
    assert [r.seed for r in _not_in(there, runs)] == [2, 3] and [r.seed for r in _not_in(there, runs, ())] == [3]
    runs[1].manifest["failed"] = 90
    assert [r.seed for r in _not_in(there, runs)] == [3] and _not_in(there.iloc[:0], runs) == runs
    assert set(instruments_for(name)) == {i for i, x in INSTRUMENTS.items() if x.fits(name)}

def test_a_thinned_history_of_a_full_batch_task_keeps_evaluations_that_were_measured():
    "Every fifth has measures; thinning by another stride would lose nearly all of them."
    steps = np.arange(100, 40_001, 100)
    history = pd.DataFrame(dict(step=steps, loss=.1, mean_ffn_out=np.where(steps % 500, np.nan, .5)))
    run = SimpleNamespace(history=history, condition=condition("modadd/ffn-h512-gelu"), stream="authors", seed=42)
    kept = recording.history_frame([run])
    assert len(kept) <= 60 and kept["step"].iloc[-1] == 40_000
    assert kept["mean_ffn_out"][20:-5].notna().all() and kept["step"].diff().max() <= 1500

def test_the_end_of_a_schedule_cut_short_is_not_recorded_as_the_end_and_a_stray_file_is_passed_over(tmp_path):
    name, store = "add7/ffn-h8-silu+d16", Store(tmp_path / "store")
    train(name, [1], root=store.root, steps=200, executor="here", quiet=True)
    (store.path(name, 1).parent / "backup.safetensors").write_bytes(b"not a run")
    [run] = stored_runs(store, name)
    assert (run.step == 200 and "final" in run.weights and not has_weights(run, "final")
            and any(has_weights(run, r) for r in run.weights))
    _record_runs(store, Clone(tmp_path), STUDY, name)
    rules = {r for f in (tmp_path / "results/rows").rglob("*.parquet") for r in pd.read_parquet(f)["rule"]}
    assert rules and "final" not in rules

# -------------------------------------------------------------------------------------------------------- replaced runs

NAME = "add7/ffn-h8-silu+d16"

def small(monkeypatch):
    "Two instruments, one condition and none of the site's tables, so that recording takes a second."
    for room in (recording, runs): monkeypatch.setattr(room, "canonical", lambda: [(NAME, "first256")])
    two = {i: INSTRUMENTS[i] for i in ("ablation", "copying")}
    alone = replace(with_only(two), presets={"small": replace(STUDY.presets["small"], arms={NAME: (42, 137)})})
    tables = [("ledger", pd.DataFrame(dict(key=[]))), ("contrasts", pd.DataFrame(dict(family=[])))]
    few = dict(known_studies=lambda: {alone.name: alone}, answer_tables=lambda root: tables,
               _look_at_store=lambda *where, **how: [])                     # these runs only pretend to have learned
    for n, value in few.items(): monkeypatch.setattr(recording, n, value)

@pytest.fixture(scope="module")
def recorded_once(tmp_path_factory):
    "A place where two runs, 42 and 137, are stored and recorded."
    at = tmp_path_factory.mktemp("replaced")
    store = Store(at / "store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES["add7"], "eval_every", 20)
        train(NAME, seeds=[42, 137], root=store.root, steps=40, executor="here", quiet=True)
        for s in (42, 137): store.save(reached(store.load(NAME, s)))
        small(patch)
        recording._record(store, at / "root", say=lambda text: None)
    return at

@pytest.fixture
def study(recorded_once, tmp_path, monkeypatch):
    "A copy of it, and a way to put another run of a seed into another store."
    small(monkeypatch)
    for part in ("store", "root"): shutil.copytree(recorded_once / part, tmp_path / part)
    store, other = Store(tmp_path / "store"), Store(tmp_path / "other")
    def another(seed, **manifest):
        run = store.load(NAME, seed)
        weights = {rule: {n: v + .01 for n, v in w.items()} for rule, w in run.weights.items()}
        history = run.history.assign(loss=run.history["loss"] + 1e-3)
        other.save(replace(run, weights=weights, history=history, manifest=run.manifest | manifest))
    return SimpleNamespace(store=store, other=other, root=tmp_path / "root", another=another)

def reached(run):
    "The run as if it had learned: at its first rules after 20 steps, and settled."
    at = {rule: dict(step=20, value=1., reached=True) for rule in run.manifest["rules"]}
    some = next(iter(run.weights.values()))
    weights = {rule: run.weights.get(rule) or {n: v.clone() for n, v in some.items()} for rule in at}
    return replace(run, weights=weights, manifest=run.manifest | dict(rules=at, settled=True))

def everything(root, seed):
    "All that is recorded of a seed: rows of every file, and its weights."
    own = lambda f: f[f["seed"] == seed].reset_index(drop=True)
    frames = {p.relative_to(root).as_posix(): own(pd.read_parquet(p)) for p in sorted(root.rglob("*.parquet"))}
    tensors, info = unseal(root / f"checkpoints/{NAME}.first256.safetensors")
    return {n: f.to_csv() for n, f in frames.items()} | {n: v[info["seeds"].index(seed)].tolist()
                                                         for n, v in tensors.items()}

@pytest.mark.audit
def test_another_run_takes_a_seed_s_place_whole_when_asked_and_not_before(study):
    before = {s: everything(study.root, s) for s in (42, 137)}
    study.another(42)
    heard = []
    recording._record(study.other, study.root, heard.append)
    assert ({s: everything(study.root, s) for s in (42, 137)} == before and "fix: keep the recorded one, "
            f"or moe-redistribution record --replace {NAME}" in heard[0])
    written = recording._record(study.other, study.root, heard.append, replace=[NAME], reason="a test")
    now = {s: everything(study.root, s) for s in (42, 137)}
    assert now[137] == before[137] and study.root / "results/replaced.csv" in written
    same = {n for n in now[42] if now[42][n] == before[42][n]}
    assert same <= {"results/runs/add7.parquet"}, "no row, no loss and no weight of the first run is left"
    fresh = study.root.parent / "fresh"
    recording._record(study.other, fresh, lambda text: None)
    assert everything(fresh, 42) == now[42], "what is recorded is what a bare place would have recorded"
    [line] = pd.read_csv(study.root / "results/replaced.csv").to_dict("records")
    assert line == dict(condition=NAME, stream="authors", seed=42, old_first=20, new_first=20, old_step=40,
                        new_step=40, date=line["date"], reason="a test")
    assert not [p for p in recording._record(study.other, study.root, heard.append, replace=[NAME])
                if p.suffix == ".parquet"] and "no other run" in heard[-1]

@pytest.mark.parametrize("manifest, lacks", [(dict(settled=False), "all its rules settled"),
                                             (dict(failed=300), "a finite loss: it failed at step 300")])
def test_a_run_that_did_not_get_as_far_is_refused_and_nothing_changes(study, manifest, lacks):
    study.another(42, **manifest)
    study.another(137)
    before, heard = everything(study.root, 42), []
    recording._record(study.other, study.root, heard.append, replace=[NAME])
    assert any("authors 42 not replaced: expected a run that went as far" in h and lacks in h
               and "fix: moe-redistribution train" in h for h in heard)
    assert everything(study.root, 42) == before, "and the other seed's replacement leaves it alone"
    assert pd.read_csv(study.root / "results/replaced.csv")["seed"].tolist() == [137]

def test_what_cannot_be_replaced_is_said_before_any_work(study):
    before = {p: p.read_bytes() for p in study.root.rglob("*") if p.is_file()}
    go = lambda names: recording._record(study.other, study.root, say=lambda text: None, replace=names)
    for names, says in ((["add7/ffn-h9-silu"], f"condition to replace: expected one of {re.escape(NAME)}; "
                         f"got 'add7/ffn-h9-silu'; nearest: '{re.escape(NAME)}'; fix:"),
                        (["add7/fnn-h8-silu"], "nearest: 'ffn'"),
                        ([NAME], f"expected stored runs of {re.escape(NAME)} .* got none; fix: moe-redistribution train")):
        with pytest.raises(ValueError, match=says): go(names)
    assert {p: p.read_bytes() for p in study.root.rglob("*") if p.is_file()} == before

def test_an_interrupted_replacement_is_asked_for_again(study, monkeypatch):
    "Killed between the rows and the history: the rest is still known to be of another run."
    study.another(42)
    write, count = runs.write_table, []
    def dies(frame, kind, *where):
        count.append(kind)
        if kind == "history": raise KeyboardInterrupt
        write(frame, kind, *where)
    monkeypatch.setattr(runs, "write_table", dies)
    with pytest.raises(KeyboardInterrupt): recording._record(study.other, study.root, lambda text: None, replace=[NAME])
    assert count[-2:] == ["runs", "history"]
    monkeypatch.setattr(runs, "write_table", write)
    recording._record(study.other, study.root, lambda text: None, replace=[NAME])
    fresh = study.root.parent / "fresh"
    recording._record(study.other, fresh, lambda text: None)
    assert everything(study.root, 42) == everything(fresh, 42)

def test_seeds_are_withdrawn_from_a_checkpoint_and_its_counts_and_the_last_takes_the_file(study):
    path, counts = study.root / f"checkpoints/{NAME}.first256.safetensors", study.root / "checkpoints/right.csv"
    kept = unseal(path)[0]["W_E"][1:]
    assert runs._withdraw(NAME, "first256", [42], Clone(study.root)) == [137]
    assert torch.equal(unseal(path)[0]["W_E"], kept)
    assert pd.read_csv(counts)["seed"].tolist() == [137] and unseal(path)[1]["seeds"] == [137]
    assert runs._withdraw(NAME, "first256", [137], Clone(study.root)) == [] and not path.exists()

# ------------------------------------------------------------------------------------------------------ unseen examples

@pytest.mark.parametrize("name, there", first(BUT_HIST := [("add7/ffn-h16-silu", False), ("modadd/glu-h16-gelu", True)],
                                              [*BUT_HIST, ("hist/moe-e2k1-h16-gelu", True)]))
def test_whole_answers_are_also_scored_on_what_a_seed_never_trained_on(name, there):
    params = untrained(name, [1])
    rows = ablation_of(params, name, [1], "authors", ("zero",), rule="best")
    own = rows[rows["split"] == "test"]
    t = get_task(name.split("/")[0])
    assert len(own) == (3 if there else 0) and (own["n_examples"]
                                                == (int(unseen_examples(t, 1).sum()) if there else 0)).all()
    if there:
        hit = (predict(params, name) == t.targets)[0, unseen_examples(t, 1)].double().mean().item()
        assert own.query("site == 'none'")["value"].item() == pytest.approx(hit)

def test_what_answers_know_of_the_count_is_recorded_of_unseen_sequences(monkeypatch):
    name = "hist/ffn-h16-gelu"
    params = untrained(name, [1])
    monkeypatch.setattr(sys.modules[INSTRUMENTS["histogram"].rows.__module__], "PROTOCOLS", ())
    rows = INSTRUMENTS["histogram"].rows(params, name, [1], stream="authors", rule="best")
    kinds = lambda split: set(zip(*(rows.loc[(rows["split"] == split) & (rows["metric"] != "selective_5"), c]
                                    for c in ("metric", "site", "edit", "stratum"))))
    assert kinds("all") == kinds("test") and len(kinds("test")) == 5 * (9 + 5)
    nines = rows.query("split == 'test' and stratum == 'count=9' and site == 'none'")["n_examples"].item()
    assert (0 < nines
            < .4 * rows.query("split == 'all' and stratum == 'count=9' and site == 'none'")["n_examples"].item())

def drawn_rows(arm, seeds, settings, desk):
    return rows_of_values([s / 10 for s in seeds], seeds, condition=arm, stream="paired", metric="drawn")

def test_of_a_study_that_is_recorded_alone_every_broken_rule_is_a_sentence_and_nothing_is_written_before(tmp_path,
    monkeypatch):
    study = Study("alone", "", {"small": Preset("", {"a": (1, 2), "b": (1, 2)}, 2)}, drawn_rows, lambda *_: 1.)
    store, root = Store(tmp_path / "store"), tmp_path / "clone"
    (root / "results").mkdir(parents=True)
    with pytest.raises(Faults, match="got none in .*fix: moe-redistribution study alone"): _record_one(study, store, root)
    run_study(study, root=store.root, executor="here", quiet=True)
    def spoilt(job, store):
        found = find_rows(job, store)
        return pd.concat([found, found]).assign(condition="c", value=np.inf, seed=9)
    with monkeypatch.context() as patch:
        patch.setattr(recording, "find_rows", spoilt)
        with pytest.raises(Faults) as e: _record_one(study, store, root)
    said = str(e.value).splitlines()
    assert len(said) == 8 and all("; fix: " in line for line in said) and not [*(root / "results").glob("**/*.*")]
    written = _record_one(study, store, root, say=lambda text: None)
    assert [p.name for p in written] == ["alone.small.parquet", "manifest.csv"]
    assert not _record_one(study, store, root)                                                 # nothing is new
