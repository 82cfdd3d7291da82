"""Jobs of a study: found when they are asked for again, safe to interrupt, and never another's."""
import json
import linecache
import os
import subprocess
import sys
import time
import types
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_redistribution.instruments.rows import rows
from moe_redistribution.models.routers import ROUTERS, Router
from moe_redistribution.record.cli import main
from moe_redistribution.evidence.table_files import Clone
from moe_redistribution.record.recording import _record_study
from moe_redistribution.studies.granularity.study import STUDY
from moe_redistribution.basics.kinds import _FOLDERS
from moe_redistribution.tasks.task import TASKS, made_tasks, get_task
from moe_redistribution.training.groups import Training, _train_group
from moe_redistribution.training.jobs import begin_again, run_job, missing_jobs
from moe_redistribution.training.sources import _TOLD
from moe_redistribution.training.store import Store, _register_hash, seal, unseal
from moe_redistribution.training.study import (Desk, Preset, Study, TrainingStudy, find_rows, _fixed_arms,
                                               known_studies, run_study, study_jobs, study_rows)

TINY = study_jobs(STUDY, "tiny")[0]

@pytest.fixture
def store(tmp_path): return Store(tmp_path)

def test_a_second_call_finds_everything_and_workers_say_what_this_process_says(tmp_path):
    here = run_study(STUDY, "tiny", root=tmp_path / "here", executor="here", quiet=True)
    there = run_study(STUDY, "tiny", root=tmp_path / "there", executor="local:1", quiet=True)
    assert len(here) and here.equals(there)
    said = []
    assert run_study(STUDY, "tiny", root=tmp_path / "here", say=said.append).equals(here)
    assert said == ["Nothing is missing."]

def test_a_job_whose_time_is_over_keeps_its_state_and_goes_on_to_the_bit(store):
    straight = STUDY.run(TINY.arm, list(TINY.seeds), TINY.settings, Desk(TINY, Store(store.root / "else")))
    assert run_job(TINY, store.root, time.time() - 1) is False                        # no time at all: nothing begun
    desk = Desk(TINY, store, deadline=time.time() + 1e-3)
    assert STUDY.run(TINY.arm, list(TINY.seeds), TINY.settings, desk) is None and desk.path.exists()
    assert unseal(desk.path)[1]["step"] == TINY.settings["steps"] // TINY.settings["looks"]
    assert run_job(TINY, store.root) and find_rows(TINY, store).equals(straight) and not desk.path.exists()

def test_a_state_of_another_job_is_not_gone_on_with(store):
    desk = Desk(TINY, store)
    seal(desk.path, {"p/W_up": torch.zeros(1)}, dict(step=50, key="another"))
    with pytest.warns(UserWarning, match="got another. Moved aside"): assert desk.left() is None
    assert not desk.path.exists() and run_job(TINY, store.root)

@pytest.mark.parametrize("spoil", [lambda b: b[:-7], lambda b: b.replace(b"final", b"finaL", 1), lambda b: b""],
                         ids=["cut short", "altered", "empty"])
def test_rows_that_are_not_what_was_written_are_made_again(store, spoil):
    assert run_job(TINY, store.root)
    path, good = TINY.path(store), find_rows(TINY, store)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.warns(UserWarning, match="Moved aside as"): assert missing_jobs([TINY], store.root) == [TINY]
    assert run_job(TINY, store.root) and find_rows(TINY, store).equals(good)

def test_rows_of_another_job_in_a_job_s_place_are_not_believed(store):
    other = study_jobs(STUDY, "small")[0]
    assert run_job(TINY, store.root)
    os.replace(TINY.path(store), other.path(store))
    with pytest.warns(UserWarning, match="expected the job"): assert find_rows(other, store) is None

def test_a_key_follows_what_an_arm_depends_on_and_not_the_rest_of_its_preset():
    old = study_jobs(STUDY, "night", "grid/8e4a")[0]
    p = STUDY.presets["night"]
    changed = lambda **s: study_jobs(replace(STUDY, presets={"night": replace(p, settings=p.settings | s)}), "night",
                                     "grid/8e4a")[0].key
    assert changed(times=[1, 2]) == changed(thin_active=70) == old.key                  # what only other arms read
    assert len({old.key, changed(steps=4_000), changed(lr=.02), changed(students=["8e4a"])}) == 4

@pytest.mark.audit
def test_a_killed_job_goes_on_to_the_same_rows(tmp_path):
    "Killed twice in the middle: the third process ends with the bits of one that was left alone."
    code = ("import sys; from moe_redistribution.training.study import study_jobs; "
            "from moe_redistribution.training.jobs import run_job; "
            "from moe_redistribution.studies.granularity.study import STUDY; import torch; torch.set_num_threads(1); "
            "run_job(study_jobs(STUDY, 'small', 'built/8e4a')[0], sys.argv[1], save_every=0)")
    job = study_jobs(STUDY, "small", "built/8e4a")[0]
    state = job.path(Store(tmp_path)).with_suffix(".state")
    for _ in range(2):
        before, p = (state.stat().st_mtime_ns if state.exists() else 0,
                     subprocess.Popen([sys.executable, "-c", code, tmp_path]))
        while not state.exists() or state.stat().st_mtime_ns == before:
            assert p.poll() is None                                             # else it would be waited for without end
            time.sleep(.01)
        p.kill(), p.wait()
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
    assert run_job(job, tmp_path / "alone")
    assert find_rows(job, Store(tmp_path)).equals(find_rows(job, Store(tmp_path / "alone")))

def test_what_cannot_be_asked_for_is_refused_in_one_line(capsys, tmp_path):
    for words, says in ((["granularty"], "nearest: 'granularity'"), ([], "study --list"),
                        (["granularity", "--arm", "grid/4e4a"], "nearest: 'grid/"),
                        (["parrots", "--preset", "long", "--arm", "fit", "--seeds", "77"],
                         "is the number of the model that is left out"),
                        (["granularity", "--seeds", f"{2**32}"], "from 0 to 4294967295")):
        assert main(["study", *words]) == 2 and says in capsys.readouterr().err, words

OWN = """from moe_redistribution.instruments.rows import rows
from moe_redistribution.training.study import Preset, Study
from beside_it import LETTERS
def run(arm, seeds, settings, desk): return rows([LETTERS] * len(seeds), seeds, condition=arm, metric='letters')
def seconds(arm, seeds, settings): return 1
STUDY = Study('words', 'How long is an arm?', {'small': Preset('two', {'a': [1, 2], 'bb': [1]})}, run, seconds)
"""

def test_a_study_of_one_s_own_runs_from_a_file_whatever_its_neighbours_are_called(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in _FOLDERS])               # of other tests' files
    before = os.environ.get("PYTHONPATH")
    (tmp_path / "my_own_study.py").write_text(OWN)
    (tmp_path / "beside_it.py").write_text("LETTERS = 3")
    for name in ("types", "json", "torch"): (tmp_path / f"{name}.py").write_text("raise SystemExit('in the way')")
    out = tmp_path / "rows.csv"
    assert main(["study", "--import", str(tmp_path / "my_own_study.py"), "--executor", "local:1", "--out",
                 str(out)]) == 0
    assert "3 rows" in capsys.readouterr().out and out.read_text().count("words.small/") == 3
    assert os.environ.get("PYTHONPATH") == before and sys.path.index(str(tmp_path)) == len(sys.path) - 1

@pytest.mark.parametrize("text, says", [
    (OWN.replace("'words'", "'granularity'"), "my_granularity"),
    (OWN.replace("'small'", "'a/b'"), "nearest valid: a_b"), ("x = ", "SyntaxError"), ("", "a Study called STUDY")],
    ids=["one of ours", "a preset", "no Python", "no study"])
def test_a_file_whose_study_has_no_name_of_its_own_is_refused(tmp_path, monkeypatch, capsys, text, says):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "it.py").write_text(text)
    (tmp_path / "beside_it.py").write_text("LETTERS = 3")
    assert main(["study", "--import", str(tmp_path / "it.py")]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and "fix: " in err

def test_recording_lays_a_study_s_rows_over_what_is_there_once(tmp_path, monkeypatch):
    run_study(STUDY, "tiny", root=tmp_path, executor="here", quiet=True)
    assert not _record_study(Store(tmp_path), Clone(tmp_path / "root"), STUDY, print)     # tiny says so
    kept = replace(STUDY, presets={"tiny": replace(STUDY.presets["tiny"], recorded=True)})
    said = []
    first, again = (_record_study(Store(tmp_path), Clone(tmp_path / "root"), kept, said.append) for _ in range(2))
    assert [p.name for p in first] == ["granularity.tiny.parquet"] and not again and len(said) == 1

def test_an_estimate_is_listed_and_not_carried_out():
    dear = replace(STUDY, presets=STUDY.presets | {"paper": Preset("dear", {"grid/8e4a": [1]}, note="a year")})
    with pytest.raises(ValueError, match="an estimate: a year; nearest valid: tiny"): study_jobs(dear, "paper")
    assert ({"granularity"} <= set(known_studies())
            and study_rows(STUDY, "small", root=Path(os.devnull).parent / "no").empty)

def one_arm(run): return Study("words", "", {"small": Preset("", {"a": (1, 2), "b": (1, 2)}, 2)}, run, lambda *x: 1.)

GOOD = rows([.1, .2], [1, 2], condition="a", metric="letters")

@pytest.mark.parametrize("given", [
    GOOD.assign(seed=[1, 3]), GOOD.to_dict("list"), GOOD[:0]], ids=["other seeds", "no frame", "none"])
def test_rows_that_are_not_the_job_s_are_refused_and_not_stored(store, given):
    job = study_jobs(one_arm(lambda *x: given))[0]
    with pytest.raises(ValueError, match="job words.small/a: expected .*; got .*; fix: "): run_job(job, store.root)
    assert not job.path(store).exists()
    assert run_job(study_jobs(one_arm(lambda arm, seeds, *x: GOOD[GOOD["seed"].isin(seeds)]))[0], store.root)

@pytest.mark.parametrize("seeds", [(1, 1), "12", [1, -9]])
def test_seeds_that_are_none_or_that_stand_twice_are_named(seeds):
    with pytest.raises(ValueError, match="seeds.*: expected .*got .*; fix: "): study_jobs(STUDY, "small", seeds=seeds)

def test_any_preset_takes_seeds_that_it_has_not_got_and_no_key_of_its_own_changes():
    for study in known_studies().values():
        for preset, p in study.presets.items():
            if p.note: continue
            # a training's key is of its content; to make all of them takes a while
            arms = list(p.arms)[:2] if isinstance(study, TrainingStudy) else list(p.arms)
            own, new = study_jobs(study, preset, arms), study_jobs(study, preset, arms, seeds=[7001, 7002])
            open_to = {a for a in arms if not _fixed_arms(study, [a])}
            assert {s for j in new for s in j.seeds} == {7001, 7002} and not {j.key for j in own} & {j.key for j in new}
            assert {getattr(j, "arm", j.condition) for j in new} == open_to and all(j.seconds >= 0 for j in new)

def test_jobs_of_other_seeds_need_jobs_of_these_seeds_and_are_carried_out(tmp_path):
    asked = []
    def run(arm, seeds, settings, desk):
        asked.append((arm, tuple(seeds)))
        return rows([float(len(desk.needed))] * len(seeds), seeds, condition=arm, metric="letters")
    study = Study("two", "", {"small": Preset("", {"a": (1, 2), "b": (1, 2), "c": (1,)}, 2)}, run, lambda *x: 1.,
                  needs=lambda arm, seeds, settings: ("a",) if arm == "b" else (), fixed={"c": "a label"})
    [job] = study_jobs(study, arms="b", seeds=[3, 4])
    assert [(n.arm, n.seeds) for n in job.needs] == [("a", (3, 4))]
    run_study(study, arms="b", seeds=[3, 4], root=tmp_path, executor="here", quiet=True)
    assert [x for x in asked if len(x[1]) > 1] == [("a", (3, 4)), ("b", (3, 4))] and job.set_aside(Store(tmp_path)) == 1
    assert study_jobs(study, arms=["a"], seeds=[3])[0].set_aside(Store(tmp_path)) == 0      # another cut, another job

def test_a_part_or_a_state_under_another_s_name_is_not_believed(store):
    "Two parts of one job hold tensors of the same shapes; a file says which it is."
    def run(arm, seeds, settings, desk):
        got = [desk.once(n, lambda part, x=x: ({"x": torch.tensor([x])}, {}))[0]["x"].item() for n, x in PARTS.items()]
        return rows(got, seeds, condition=arm, metric="letters") if stop.pop() else None
    PARTS, stop, job = {"draw": .1, "two": .2}, [True, False], study_jobs(one_arm(run))[0]
    assert run_job(job, store.root) is False
    draw, two = (job.path(store).with_suffix(f".{n}.part") for n in PARTS)
    draw.write_bytes(two.read_bytes())
    with pytest.warns(UserWarning, match="expected part draw, got part two. Moved aside"):
        assert run_job(job, store.root)
    assert find_rows(job, store)["value"].tolist() == pytest.approx([.1, .2])
    for kind, other in (("state", {"step": 1}), ("part", {"rows": {}})):
        seal(job.path(store), {}, other | dict(key=job.key, kind=kind))
        with pytest.warns(UserWarning, match="expected rows .*Moved aside"): assert find_rows(job, store) is None

def test_what_was_sealed_before_files_said_what_they_are_is_read(store):
    assert run_job(TINY, store.root)
    tensors, info = unseal(TINY.path(store))
    good = find_rows(TINY, store)
    seal(TINY.path(store), tensors, {k: v for k, v in info.items() if k not in ("kind", "source")})
    seal(Desk(TINY, store).path, {}, dict(key=TINY.key, step=3))
    assert find_rows(TINY, store).equals(good) and Desk(TINY, store).left()[1]["step"] == 3

def told(f, *args):
    "What a call warns of."
    _TOLD.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        f(*args)
    return " ".join(str(w.message) for w in said)

def test_stored_rows_of_changed_code_are_read_with_a_word_and_carried_out_again_when_asked(store):
    def made(text):
        module = types.ModuleType("own_words")
        (file := store.root / f"{len(text)}.py").write_text(text)
        linecache.clearcache()
        exec(compile(text, file, "exec"), module.__dict__)
        return one_arm(module.run)
    text = ("from moe_redistribution.instruments.rows import rows\nLETTERS = 3\ndef value(): return LETTERS\n"
            "def run(arm, seeds, settings, desk):\n    'Rows.'\n    return rows([value()] * len(seeds), seeds, "
            "condition=arm, metric='letters')\n")
    old = study_jobs(made(text))[0]
    assert run_job(old, store.root) and not told(find_rows, old, store)
    layout = made("# a comment\n" + text.replace("'Rows.'", "'Other words.'"))
    assert not told(find_rows, study_jobs(layout)[0], store)
    for changed in (text.replace("= 3", "= 44"), text.replace("return LETTERS", "return LETTERS + 1 + 1")):
        job = study_jobs(made(changed))[0]
        assert job.key == old.key and "code of words: expected what today's code gives" in told(find_rows, job, store)
    assert begin_again([job], store.root) == 1 and run_job(job, store.root)
    assert find_rows(job, store)["value"].eq(5).all() and not told(find_rows, job, store)

@pytest.mark.audit
def test_the_code_of_every_study_has_one_hash_in_every_process():
    "A table of functions says where they lie, which differs every time: answers of one study were called outdated."
    ask = ("from moe_redistribution.training.store import code_of; from moe_redistribution.training.study import "
           "known_studies; print({n: code_of(s.run) for n, s in known_studies().items()})")
    both = {subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout for _ in range(2)}
    assert len(both) == 1 and "parrots_rule" in both.pop()

def test_a_router_or_a_task_that_changed_under_its_word_is_told_of(tmp_path, monkeypatch):
    class Half(Router):
        def logits(self, held, x, c): return super().logits(held, x, c) / 2
    class Third(Router):
        def logits(self, held, x, c): return super().logits(held, x, c) / 3
    name = "add7/moe-e2k1-h8-silu+part+d16"
    monkeypatch.setitem(ROUTERS, "part", Half("part"))
    _train_group(name, [1], root=tmp_path, steps=200)
    assert not told(Store(tmp_path).load, name, 1)
    monkeypatch.setitem(ROUTERS, "part", Third("part"))
    assert f"router of {name}: expected what today's code gives" in told(Store(tmp_path).load, name, 1)
    begin_again([Training(name, (1,))], tmp_path)
    _train_group(name, [1], root=tmp_path, steps=200)
    assert not told(Store(tmp_path).load, name, 1)
    t = get_task("add7")
    monkeypatch.setitem(made_tasks, "add7", replace(t, scored=(0, 1, 2)))                # the same examples, read elsewhere
    assert f"reading of {name}: expected" in told(Store(tmp_path).load, name, 1)
    monkeypatch.setitem(made_tasks, "add7", replace(t, targets=t.targets.flip(0)))
    monkeypatch.setitem(TASKS, "add7", lambda: None)
    assert f"task of {name}: expected" in told(Store(tmp_path).load, name, 1)

def test_a_job_says_when_it_began_and_under_which_register_also_after_a_stop(tmp_path):
    def run(arm, seeds, settings, desk):
        if not (tmp_path / "again").exists(): return None
        return rows([1.], seeds, condition=arm, metric="digits")
    study = Study("told", "", {"small": Preset("", {"a": (1,)})}, run, lambda *x: 1.)
    job, store = study.job("small", "a", (1,)), Store(tmp_path)
    assert not job.run(store, deadline=time.time() + 60)
    began = json.loads(job.path(store).with_suffix(".began").read_text())
    (tmp_path / "again").touch()
    job.path(store).with_suffix(".began").write_text(json.dumps(began | dict(began="2020-01-01T00:00:00+00:00")))
    assert job.run(store)
    info = unseal(job.path(store))[1]
    assert info["began"].startswith("2020-01-01") and info["registered"] == _register_hash() != ""
    assert not job.path(store).with_suffix(".began").exists()
