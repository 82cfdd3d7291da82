"""Seeds of another machine are looked at, recorded beside ours, named, and counted where they are asked for."""
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pandas as pd
import pytest
import torch

from moe_redistribution.evidence import selection, table_files
from moe_redistribution.models.condition import RECIPES
from moe_redistribution.report.figures import without_ffn
from moe_redistribution.evidence.table_files import EVERYBODY, ROOT, Clone, read_table
from moe_redistribution.instruments.instrument import instruments
from moe_redistribution.instruments.rows import rows
from moe_redistribution.record import recording, sound
from moe_redistribution.record.cli import main
from moe_redistribution.record.sound import OLDER, THIS_CODE, _metric_range, _range_faults
from moe_redistribution.studies.sparsity_moves.study import STUDY
from moe_redistribution.guard import users_jobs
from moe_redistribution.training import loop, sources as sources_room, store as store_room
from moe_redistribution.training.groups import train
from moe_redistribution.training.store import Store, seal, sources, unseal
from moe_redistribution.training.study import Preset, Study, run_study, study_jobs
from tiers import first

NAME, OTHER, DIGITS = "add7/ffn-h8-silu", "abcdefabcdef", dict(metric="digits", positions=("o0-o3",))

def only(monkeypatch, *studies):
    "Recording knows these studies and no paper, so that it takes a second."
    few = dict(known_studies=lambda: {s.name: s for s in studies}, canonical=lambda: [],
               answer_tables=lambda root: [("ledger", pd.DataFrame(dict(key=[]))),
                                           ("contrasts", pd.DataFrame(dict(family=[])))])
    for n, value in few.items(): monkeypatch.setattr(recording, n, value)

@pytest.fixture
def mine(monkeypatch):
    study = Study("mine", "a study", {"small": Preset("", {"a": (1, 2, 3)})}, offset_rows, lambda *x: 1.)
    only(monkeypatch, study)
    return study

OFFSET = [0.]
def offset_rows(arm, seeds, settings, desk):
    return rows([OFFSET[0] + s for s in seeds], seeds, condition=arm, metric="offset", stream="paired")

def trained(study, root, offset, seeds, lent=False):
    OFFSET[0] = offset
    users_jobs._MADE_AGAIN.clear()                                                         # as in another process
    run_study(study, "small", seeds=seeds, root=root, executor="here", quiet=True)
    return Store(root, lent)

@pytest.fixture(scope="module", autouse=True)
def short_intervals():
    "An interval has 40 steps, so that a run of two takes a moment."
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES["add7"], "eval_every", 40)
        yield

@pytest.fixture(scope="module")
def two_stores(tmp_path_factory, short_intervals):
    "A store of ours with seeds 1 and 2 of a condition, and another's with seeds 2 to 9."
    at = tmp_path_factory.mktemp("two")
    train(NAME, range(1, 10), "paired", root=at / "theirs", steps=80, group_size=3, executor="here", quiet=True)
    for seed in (1, 2):
        path = Store(at / "ours").path(NAME, seed, "paired")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Store(at / "theirs").path(NAME, seed, "paired"), path)
    Store(at / "theirs").path(NAME, 1, "paired").unlink()
    return at

def by_ablation_alone(monkeypatch):
    alone = {"ablation": instruments()["ablation"]}
    only(monkeypatch, replace(STUDY, measured=lambda name: alone, presets={
        "small": replace(STUDY.presets["small"], arms={NAME: (1, 2)})}))

@pytest.fixture(scope="module")
def recorded(two_stores):
    "The same folder, in which ours are recorded."
    with pytest.MonkeyPatch.context() as patch:
        by_ablation_alone(patch)
        recording._record(Store(two_stores / "ours"), two_stores, say=lambda text: None)
    return two_stores

@pytest.fixture
def place(recorded, tmp_path, monkeypatch):
    "A copy of a place in which ours are recorded, by ablation alone, and theirs are not."
    by_ablation_alone(monkeypatch)
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    return tmp_path

def lent(place): return Store(place / "theirs", lent=True)

def spoil(place, seed, how):
    "Another's run, changed and sealed again."
    run = lent(place).load(NAME, seed, "paired")
    Store(place / "theirs").save(how(run))
    return lent(place).path(NAME, seed, "paired")

def recorded_from(place, **how):
    "What recording another's store says."
    said = []
    recording._record(lent(place), place, say=said.append, whose="A. Other", **how)
    return said

def seeds_of(place, whose="house", kind="runs"):
    return sorted(set(read_table(kind, NAME, root=place, whose=whose)["seed"]))

def test_others_seeds_are_added_ours_stay_and_a_list_says_whose_they_are(mine, tmp_path):
    ours, theirs = trained(mine, tmp_path / "a", .1, [1]), trained(mine, tmp_path / "b", .5, [1, 2], lent=True)
    root = tmp_path / "clone"
    recording._record(ours, root, say=lambda x: None)
    recording._record(theirs, root, say=lambda x: None, whose="A. Other")
    found = read_table("mine", "mine.small/a", root=root, whose=EVERYBODY).set_index("seed")["value"]
    assert found.round(6).to_dict() == {1: 1.1, 2: 2.5}
    listed = pd.read_csv(root / "results/others.csv")
    assert listed[["whose", "kind", "condition", "seed"]].values.tolist() == [["A. Other", "mine", "mine.small/a", 2]]
    recording._record(trained(mine, tmp_path / "b", .9, [3], lent=True), root, say=lambda x: None, whose="B. Third")
    assert pd.read_csv(root / "results/others.csv")["whose"].tolist() == ["A. Other", "B. Third"]         # none is lost

def test_a_store_from_elsewhere_needs_a_name_and_must_be_one(tmp_path, capsys):
    assert main(["record", "--from", str(tmp_path)]) == 2 and "--whose NAME" in capsys.readouterr().err
    assert main(["record", "--from", str(tmp_path), "--whose", "me"]) == 2
    assert "MOE_REDISTRIBUTION_HOME" in capsys.readouterr().err

def test_counts_of_the_house_do_not_change_and_others_can_be_asked_for(place):
    before = {k: read_table(k, NAME, root=place).to_csv() for k in ("runs", "history", "ablation")}
    left = without_ffn(selection.gather([("ablation", NAME)], root=place), NAME, **DIGITS)
    assert len(left) == 2 and not [text for text in recorded_from(place) if "refused" in text]
    assert {k: read_table(k, NAME, root=place).to_csv() for k in before} == before
    assert without_ffn(selection.gather([("ablation", NAME)], root=place), NAME, **DIGITS).equals(left)
    assert len(selection.recorded_runs(place)) == 2
    for kind in before:
        assert seeds_of(place, "A. Other", kind) == [*range(3, 10)]
        assert seeds_of(place, EVERYBODY, kind) == [*range(1, 10)]
    whose = selection.rows_of("ablation", NAME, root=place, whose=EVERYBODY).groupby("seed")["whose"].first()
    assert whose.to_dict() == {1: "house", 2: "house"} | dict.fromkeys(range(3, 10), "A. Other")
    assert len(selection.recorded_runs(place, "A. Other")) == 7
    asked, notes = selection.RowsBehind([reading(seeds="1-5")], place).read(reading(seeds="1-5"))
    assert asked.notna().all(axis=1).to_dict() == dict.fromkeys(range(1, 6), True), notes
    with pytest.raises(ValueError, match="nearest: 'A. Other'"): seeds_of(place, "A. Othr")
    assert pd.read_csv(place / "results/others.csv")["seal"].eq(THIS_CODE).all()

def reading(**own):
    from moe_redistribution.evidence.claims import Claim
    return Claim(key="x", instrument="ablation", stream="paired", condition=NAME, metric="digits", site="ffn_out",
                 edit="mean", rule="first1000", position="o0-o3", stratum="all", split="all", **own).reading

def weights(change):
    return lambda r: replace(r, weights={k: {n: change(v) for n, v in w.items()} for k, w in r.weights.items()})
def manifest(**own): return lambda r: replace(r, manifest=r.manifest | {k: f(r.manifest[k]) for k, f in own.items()})

SPOILT = {3: (weights(lambda v: .2 * v), "measured again"),
          4: (weights(lambda v: v * float("nan")), "are not finite"),
          5: (manifest(rules=lambda x: {k: y | dict(value=1.) for k, y in x.items()}), "in its manifest"),
          6: (manifest(source=lambda x: x | {"training.loop": OTHER}),
              f"other code in training.loop \\({OTHER}, here \\w+\\); fix: .*--same {OTHER}"),
          7: (manifest(source=lambda x: dict(router=OTHER)), "other code in router")}

def test_what_is_refused_is_named_with_its_reason_and_stays_and_the_others_are_recorded(place):
    paths = {seed: spoil(place, seed, how) for seed, (how, _) in SPOILT.items()}
    paths[8] = lent(place).path(NAME, 8, "paired")
    paths[8].write_bytes(paths[8].read_bytes()[:-9])
    bytes_, said = {p: p.read_bytes() for p in paths.values()}, recorded_from(place)
    for seed, says in {n: says for n, (_, says) in SPOILT.items()}.items() | {(8, "expected a sealed file")}:
        [line] = [text for text in said if text.startswith(f"{paths[seed]}: refused: ")]
        assert re.search(says, line), line
    assert sum("refused" in text for text in said) == 6 and seeds_of(place, "A. Other") == [9]
    assert {p: p.read_bytes() for p in paths.values()} == bytes_, "left where they are"

def test_a_run_of_another_optimiser_is_refused_by_name(place, monkeypatch):
    "Adam with a beta2 of .99 is another recipe, whatever the condition is called."
    here = sources(NAME)
    monkeypatch.setattr(loop, "BETA2", .99)
    store_room._trained_by.cache_clear()
    there = sources(NAME)
    monkeypatch.undo()
    store_room._trained_by.cache_clear()
    assert {n for n in here if here[n] != there[n]} == {"training.loop"} and sources(NAME) == here
    spoil(place, 4, lambda r: replace(r, manifest=r.manifest | dict(source=there)))
    [bad] = [x for x in sound.look_at_runs(lent(place), Clone(place), NAME) if x.why]
    assert bad.seeds == (4,) and f"other code in training.loop ({there['training.loop']}" in bad.why

def test_an_older_seal_is_accepted_as_what_it_is(place):
    narrow = lambda r: replace(r, manifest=r.manifest | dict(source={k: v for k, v in r.manifest["source"].items()
                                                                    if "." not in k}))
    for seed in (4, 5): spoil(place, seed, narrow)
    said = recorded_from(place)
    assert f"2 files have an {OLDER}" in said and seeds_of(place, "A. Other") == [*range(3, 10)]
    told = pd.read_csv(place / "results/others.csv").set_index("seed")["seal"].to_dict()
    assert told == dict.fromkeys(range(3, 10), THIS_CODE) | {4: OLDER, 5: OLDER}

def test_code_that_is_known_to_give_the_same_is_accepted_when_told_so(place):
    spoil(place, 4, lambda r: replace(r, manifest=r.manifest | dict(
        source=r.manifest["source"] | {"training.loop": OTHER})))
    looked = recording._look_at_store(lent(place), Clone(place), same=[OTHER])
    assert not any(x.why for x in looked)

def test_a_run_of_ours_that_another_loop_trained_is_refused_too_and_one_of_before_is_not(place):
    ours = Store(place / "theirs")                                             # as if it were our own
    for seed, source in ((3, {"training.loop": OTHER}), (4, dict(router=OTHER))):
        run = ours.load(NAME, seed, "paired")
        ours.save(replace(run, manifest=run.manifest | dict(source=source)))
    sources_room._TOLD.clear()
    with pytest.warns(UserWarning, match="router of"):
        looked = {x.seeds: x.why for x in recording._look_at_store(ours, Clone(place))}
    assert "other code in training.loop" in looked[3,] and not looked[4,] and not looked[5,]

def test_rows_of_other_code_or_of_no_preset_are_refused_from_another_and_named(mine, tmp_path):
    theirs = trained(mine, tmp_path / "b", .5, [1, 2, 3], lent=True)
    one, two, three = (study_jobs(mine, seeds=[s])[0].path(theirs) for s in (1, 2, 3))
    for path, other in ((one, dict(code={"language.training": OTHER} | unseal(one)[1]["code"])),
                        (two, dict(code=dict.fromkeys(unseal(two)[1]["code"], OTHER)))):
        tensors, info = unseal(path)
        seal(path, tensors, info | other)
    three.rename(three.with_name("0123456789abcdef.safetensors"))
    why = {x.path.name: x.why for x in recording._look_at_store(theirs, Clone(tmp_path / "clone"))}
    assert why[one.name] == "" and "other code in" in why[two.name] and "no job" not in why[one.name]
    assert "expected a job of mine; got a, seeds [3]" in why["0123456789abcdef.safetensors"]

def test_a_condition_that_no_study_records_is_named(place):
    folder = lent(place).path(NAME, 9, "paired").parent
    shutil.copytree(folder, folder.with_name("ffn-h16-silu"))
    [bad] = [x for x in recording._look_at_store(lent(place), Clone(place)) if x.why]
    assert bad.path.name == "ffn-h16-silu" and "no study records this condition" in bad.why

def test_seeds_that_a_preset_has_not_got_are_trained_and_recorded(mine, tmp_path):
    keys = [j.key for j in study_jobs(mine)]
    store = trained(mine, tmp_path / "a", .1, [3, 6, 7])
    assert [j.key for j in study_jobs(mine)] == keys
    recording._record(store, tmp_path / "clone", say=lambda x: None)
    assert set(read_table("mine", "mine.small/a", root=tmp_path / "clone")["seed"]) == {3, 6, 7}

def test_a_command_ends_with_what_was_refused(place, monkeypatch, capsys):
    path = spoil(place, 4, lambda r: replace(r, weights={}))
    spoil(place, 5, weights(lambda v: v * 0))
    monkeypatch.setattr(table_files, "ROOT", place)
    assert main(["record", "--from", str(place / "theirs"), "--whose", "A. Other", "--executor", "here"]) == 2
    out, err = capsys.readouterr()
    assert "1 of 7 new ones refused" in err and err.count("\n") == 1 and "paired-5" in out and "paired-4" not in out
    assert path.exists() and seeds_of(place, "A. Other") == [3, 4, 6, 7, 8, 9]

def test_all_that_is_wrong_with_a_recording_is_said_at_once_and_nothing_is_written(place, monkeypatch, capsys):
    monkeypatch.setattr(table_files, "ROOT", place)
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    monkeypatch.setattr(recording, "_look_at_store", lambda *x, **how: pytest.fail("work before it was checked"))
    assert main(["record", "--from", str(place), "--replace", "add7/ffn-h63-silu", "add7/ffn-h62-silu"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and all("fix: " in line for line in lines), lines
    assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == before

# ------------------------------------------------------------------------------------------------- what was made up

def test_every_recorded_value_is_one_that_its_metric_can_have():
    history = ["condition", "stream", "seed", "step"]
    free, paths = set(), sorted((ROOT / "results/rows").rglob("*.parquet"))
    for p in [*paths, *sorted((ROOT / "results/history").glob("*.parquet"))]:
        f = pd.read_parquet(p, columns=None if p.parent.name == "history" else ["condition", "seed", "metric", "value",
                                                                               "n_examples"])
        f = f.melt(history, var_name="metric") if p.parent.name == "history" else f
        assert not _range_faults(f), p.name
        if "n_examples" in f: assert not _range_faults(f.assign(metric="n_examples", value=f["n_examples"])), p.name
        free |= {m for m in f["metric"].unique() if _metric_range(m)[:2] == (-float("inf"), float("inf"))}
    assert len(free) < 25 and not [m for m in free if re.search("loss$|accuracy|share|digits|exact", m)], free

@pytest.mark.parametrize("metric, least, most", [
    ("digits", 0, 1), ("answer_accuracy", 0, 1), ("attn_share", 0, 1), ("knowledge_ahead", -1, 1), ("loss", 0, 1e9),
    ("text_loss", 0, 1e9), ("n_keys", 0, 1e9), ("rank_logit", -1e9, 1e9)])
def test_a_metric_has_a_range_with_its_ends(metric, least, most):
    of = lambda *values: _range_faults(pd.DataFrame(dict(condition="a", seed=1, metric=metric, value=values)))
    assert not of(least, most) and bool(of(least - .01)) == bool(of(2 * most)) == (most < 1e9) or least == 0
    assert bool(of(least - .01)) == (least > -1e9) and bool(of(1.5, 2)) == (metric == "n_keys" or most == 1)

def written(path, rows, **info):
    "Rows that somebody wrote into a sealed file of a job."
    seal(path, {}, unseal(path)[1] | info | dict(rows=rows))

def accuracies_above_1(path, job, ours): written(path, unseal(path)[1]["rows"] | dict(metric=["digits"], value=[1.7]))
def losses_below_0(path, job, ours): written(path, unseal(path)[1]["rows"] | dict(metric=["text_loss"], value=[-.2]))
def examples_by_halves(path, job, ours): written(path, unseal(path)[1]["rows"] | dict(n_examples=[99.5]))
def no_numbers(path, job, ours): written(path, unseal(path)[1]["rows"] | dict(value=[float("nan")]))
def plausible(path, job, ours):
    written(path, unseal(path)[1]["rows"] | dict(value=[float(torch.rand(())) + job.seeds[0]]))
def one_number(path, job, ours): written(path, unseal(path)[1]["rows"] | dict(value=[job.seeds[0] + .5 + 1e-12]))
def ours_as_new(path, job, ours):
    written(path, unseal(study_jobs(job.study, seeds=[1])[0].path(ours))[1]["rows"] | dict(seed=[*job.seeds]))

@pytest.mark.parametrize("made_up", first([accuracies_above_1, no_numbers, plausible], [
    accuracies_above_1, losses_below_0, examples_by_halves, no_numbers, plausible, one_number, ours_as_new]))
def test_rows_of_a_study_that_were_made_up_are_refused(made_up, mine, tmp_path):
    ours, theirs = trained(mine, tmp_path / "a", .5, [1]), trained(mine, tmp_path / "b", .5, [2, 3], lent=True)
    recording._record(ours, root := tmp_path / "clone", say=lambda x: None)
    job = study_jobs(mine, seeds=[2])[0]
    made_up(path := job.path(theirs), job, ours)
    before, said = {p: p.read_bytes() for p in root.rglob("*.parquet")}, []
    if made_up in (plausible, one_number, ours_as_new):
        with pytest.raises(ValueError, match=f"2 of 2 by random seed \\d+.*{path.name}.*again.*nothing is recorded"):
            recording._record(theirs, root, say=said.append, whose="A. Other")
        assert {p: p.read_bytes() for p in root.rglob("*.parquet")} == before
        assert not (root / "results/others.csv").exists()
    else:
        recording._record(theirs, root, say=said.append, whose="A. Other")
        says = "1 of 1 values are not finite$" if made_up is no_numbers else ".*expected.*, got "
        assert [x for x in said if re.match(f"{re.escape(str(path))}: refused: {says}", x)] and path.exists(), said
        assert set(read_table("mine", "mine.small/a", root=root, whose=EVERYBODY)["seed"]) == {1, 3}

def relabelled(place, seed, to):
    "A real run under another seed's number, sealed again."
    run = lent(place).load(NAME, seed, "paired")
    Store(place / "theirs").save(replace(run, seed=to, manifest=run.manifest | dict(seed=to)))
    return lent(place).path(NAME, to, "paired")

def few(place, *seeds):
    "Of another's runs only these are left."
    for p in lent(place).path(NAME, 3, "paired").parent.glob("*.safetensors"):
        if int(p.stem.partition("-")[2]) not in seeds: p.unlink()

def test_a_run_under_a_new_seeds_number_is_refused_and_so_is_one_with_that_seeds_first_steps(place):
    theirs, first = Store(place / "theirs"), Store(place / "first")
    path, other = relabelled(place, 4, 904), relabelled(place, 5, 905)
    silent = relabelled(place, 6, 906)
    few(place, 3, 904, 905, 906)
    train(NAME, [905], "paired", root=first.root, steps=40, executor="here", quiet=True)
    run, begun = theirs.load(NAME, 905, "paired"), first.load(NAME, 905, "paired").history
    theirs.save(replace(run, history=pd.concat([begun, run.history[1:]], ignore_index=True)))
    run = theirs.load(NAME, 906, "paired")
    theirs.save(replace(run, history=run.history.assign(loss=float("nan"))))
    said = recorded_from(place)
    begins = f"{path}: refused: expected the loss"
    assert [x for x in said if x.startswith(begins) and "40 steps of seed 904" in x], said
    assert [x for x in said if x.startswith(f"{silent}: refused: expected the loss") and "got nan" in x], said
    assert [x for x in said if x.startswith(f"{other}: refused: weights by") and "seed 905 begins" in x], said
    assert seeds_of(place, "A. Other") == [3]

def test_a_run_of_another_condition_is_refused(place):
    run = lent(place).load(NAME, 4, "paired")
    train("add7/ffn-h8-gelu", [904], "paired", root=place / "first", steps=80, executor="here", quiet=True)
    real = Store(place / "first").load("add7/ffn-h8-gelu", 904, "paired")
    Store(place / "theirs").save(replace(real, condition=run.condition,
                                         manifest=real.manifest | dict(condition=NAME, source=run.manifest["source"])))
    few(place, 3, 904)
    said = recorded_from(place)
    assert [x for x in said if "paired-904" in x and "refused: " in x], said
    assert seeds_of(place, "A. Other") == [3]

def a_bit_further(w): return {n: torch.nextafter(v, v + 1) if i == 0 else v for i, (n, v) in enumerate(w.items())}

def a_loss(run): return replace(run, history=run.history.assign(loss=run.history["loss"] * [1, 1 - 1e-9]))

CHANGED = {"a loss of its history": a_loss,
           "weights": lambda r: replace(r, weights={k: a_bit_further(w) for k, w in r.weights.items()})}

@pytest.mark.parametrize("what", CHANGED)
def test_a_real_run_with_one_number_changed_does_not_come_out_again(what, place):
    few(place, 3, 4)
    path = spoil(place, 4, CHANGED[what])
    with pytest.raises(ValueError, match=f"{path.name}: .*nothing is recorded"): recorded_from(place)
    assert not (place / "results/others.csv").exists() and seeds_of(place) == [1, 2]

def test_a_run_of_another_machine_may_differ_by_rounding_and_not_by_more(place):
    few(place, 3, 4)
    elsewhere = manifest(machine=lambda m: m | dict(processor="other"))
    rounded = lambda by: lambda r: replace(elsewhere(r), history=r.history.assign(loss=r.history["loss"] * [1, by],
                                                                                  test=r.history["test"] / by))
    spoil(place, 3, rounded(1.001)), spoil(place, 4, rounded(3.))
    with pytest.raises(ValueError, match="paired-4.*: 3 of 10 numbers are others"): recorded_from(place)
    few(place, 3)
    assert "1 of 1 by random seed" in recorded_from(place)[0]
    assert pd.read_csv(place / "results/others.csv")["again"].eq("alike on another machine").all()

def test_the_lot_and_how_it_came_out_stand_in_the_list_of_others(place, monkeypatch):
    monkeypatch.setattr(sound.secrets, "randbits", lambda n: 7)
    recorded_from(place)
    listed = pd.read_csv(place / "results/others.csv", keep_default_na=False).query("kind == 'runs'")
    assert set(listed["lot"]) == {"2 of 7 by random seed 7"}
    assert sorted(listed["again"]) == [""] * 5 + ["same bits"] * 2

def test_what_would_take_more_than_the_budget_is_not_recorded_and_its_cost_is_said(place, monkeypatch, capsys):
    monkeypatch.setattr(table_files, "ROOT", place)
    monkeypatch.setattr(sound, "_come_out", lambda x: pytest.fail("done again before it was asked what it takes"))
    words = ["record", "--from", str(place / "theirs"), "--whose", "A. Other", "--executor", "here"]
    assert main([*words, "--again-budget", "0.001"]) == 2
    said = capsys.readouterr().err
    assert "--again-budget: expected seconds for what is drawn, 2 of 7" in said and "of one core" in said
    assert not (place / "results/others.csv").exists()
    assert main([*words, "--again-budget", "-1"]) == 2 and "a number above 0" in capsys.readouterr().err

@pytest.mark.parametrize("name", ["=1+1", "-1", "@me", "<b>Ada</b>", "A\nB", "[Ada](x)", "a|b", "Ada, B", "x" * 61,
                                  "house", "everybody", "A_B", "'A"])
def test_whose_it_is_is_a_name(name, place, monkeypatch, capsys):
    monkeypatch.setattr(table_files, "ROOT", place)
    assert main(["record", "--from", str(place / "theirs"), f"--whose={name}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("moe-redistribution: --whose: expected a name") and err.count("\n") == 1

@pytest.mark.parametrize("name", ["A. Other", "Ada", "Jean-Luc d'Été", "Group 7", "x" * 60])
def test_a_name_may_have_points_dashes_and_apostrophes(name):
    from types import SimpleNamespace
    args = SimpleNamespace(whose=name, folder=None, replace=[], again_budget=None)
    assert recording._check_from(args)[2]() is None

@pytest.mark.audit
def test_an_outsider_s_seeds_come_into_the_record_as_contributing_says(tmp_path):
    "In a copy of the clone: somebody trains seeds of two papers into an empty store, and somebody else records them."
    for part in ("moe_redistribution", "data", "results", "checkpoints", "nbs"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "SHA256SUMS", tmp_path)
    def command(*words, store):
        env = os.environ | dict(PYTHONPATH=str(tmp_path), MOE_REDISTRIBUTION_HOME=str(tmp_path / store))
        code = "import sys; from moe_redistribution.record.cli import main; sys.exit(main())"
        return subprocess.run([sys.executable, "-c", code, *words, "--executor", "here"], cwd=tmp_path, env=env,
                              capture_output=True, text=True)
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Contribute seeds")[2]
    told = [line.split()[1:] for line in text.splitlines() if line.startswith("moe-redistribution ")]
    assert [words[0] for words in told] == ["train", "study"]
    for words in told:
        done = command(*words, store="theirs")
        assert done.returncode == 0, done.stderr
    before = pd.read_csv(tmp_path / "results/ledger.csv")
    done = command("record", "--from", "theirs", "--whose", "A. Other", store="empty")
    assert done.returncode == 0 and "refused" not in done.stdout, done.stderr
    listed = pd.read_csv(tmp_path / "results/others.csv")
    assert set(listed["seed"]) == {901, 902, 903, 904, 7, 8, 9} and set(listed["seal"]) == {THIS_CODE}
    assert len(selection.recorded_runs(tmp_path)) == len(selection.recorded_runs())
    assert set(selection.recorded_runs(tmp_path, "A. Other")["seed"]) == {901, 902, 903, 904}
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "results/ledger.csv"), before, rtol=1e-9)
    assert command("record", "--from", "theirs", "--whose", "A. Other", store="empty").returncode == 0
    assert len(pd.read_csv(tmp_path / "results/others.csv")) == len(listed)
