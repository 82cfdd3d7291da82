"""What is stored is read back bit for bit or not at all, and a failing disk costs nothing that was there before."""
import errno
import os
import resource
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import filelock
import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st

from moe_redistribution.evidence import table_files, checkpoints, selection
from moe_redistribution.instruments.rows import ROW_COLUMNS
from moe_redistribution.basics import files
from moe_redistribution.training import groups
from moe_redistribution.models import condition as conditions
from moe_redistribution.models.condition import RECIPES, condition
from moe_redistribution.record.runs import stored_runs, write_frame
from moe_redistribution.training.bench import keep
from moe_redistribution.training.groups import _group_path, pack, train, _train_group
from moe_redistribution.basics.files import Damaged, as_committed, write_picture
from moe_redistribution.training.store import Store, seal, set_aside, unseal
from moe_redistribution.training.loop import init_members
from tiers import first

TINY = "add7/ffn-h8-silu+d16"

@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "A store with one short run and, as after a kill, the state of a group. Copy it before doing harm."
    store = Store(tmp_path_factory.mktemp("trained"))
    _train_group(TINY, [1], root=store.root, steps=200)
    seal(_group_path(store, condition(TINY), [1, 2], "authors"), *pack(init_members(condition(TINY), [1, 2], "authors")))
    return store

@pytest.fixture
def store(trained, tmp_path):
    shutil.copytree(trained.root, tmp_path / "store")
    return Store(tmp_path / "store")

def same(a, b):
    "Are two runs the same to the last bit?"
    return (a.manifest == b.manifest and a.history.equals(b.history) and a.weights.keys() == b.weights.keys()
            and all(torch.equal(v, b.weights[r][n]) for r, p in a.weights.items() for n, v in p.items()))

def parts_left(root): return [p for p in Path(root).rglob("*") if ".part" in p.name]

# ------------------------------------------------------------------------------------------------------ sealed files

TENSORS = st.dictionaries(st.text("abW_/0", min_size=1, max_size=8), st.tuples(
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]),
    st.lists(st.integers(0, 3), max_size=3), st.integers(0, 2**31)), max_size=4)
INFO = st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
                       | st.lists(st.floats(allow_nan=False), max_size=3), max_size=4)

@given(TENSORS, INFO)
def test_a_sealed_file_reads_back_as_it_was(tmp_path_factory, tensors, info):
    "Any shape (no elements, no axes), any type, any JSON."
    draw = lambda kind, shape, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(kind)
    tensors, path = {n: draw(*args) for n, args in tensors.items()}, tmp_path_factory.mktemp("seal") / "a.safetensors"
    seal(path, tensors, info)
    got, said = unseal(path)
    assert said == info and got.keys() == tensors.keys()
    assert all(torch.equal(v, got[n]) and v.dtype == got[n].dtype for n, v in tensors.items())

FILES = {"run": "v1/**/*.safetensors", "resume": "v1/**/*.resume", "group": "groups/*/*.state"}

@pytest.mark.parametrize("kind", FILES)
@settings(max_examples=150)
@given(data=st.data())
def test_one_flipped_bit_is_refused(trained, tmp_path_factory, kind, data):
    original = next(trained.root.glob(FILES[kind])).read_bytes()
    header = 8 + int.from_bytes(original[:8], "little")                             # half of the flips go there
    byte = data.draw(st.integers(0, header - 1) | st.integers(0, len(original) - 1), label="byte")
    altered = bytearray(original)
    altered[byte] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    path = tmp_path_factory.mktemp("flip") / "altered.safetensors"
    path.write_bytes(altered)
    with pytest.raises(Damaged, match="altered.safetensors: expected .*; got .*; fix: "): unseal(path)

@pytest.mark.parametrize("kind", FILES)
@settings(max_examples=50)
@given(data=st.data())
def test_a_file_with_bytes_missing_or_added_is_refused(trained, tmp_path_factory, kind, data):
    original = next(trained.root.glob(FILES[kind])).read_bytes()
    left = data.draw(st.integers(0, len(original) - 1), label="bytes left")
    for altered in (original[:left], original + bytes(1), original + original):
        path = tmp_path_factory.mktemp("cut") / "altered.safetensors"
        path.write_bytes(altered)
        with pytest.raises(Damaged, match="altered.safetensors: expected .*; got .*; fix: "): unseal(path)

def damage(path):
    altered = bytearray(path.read_bytes())
    altered[-3] ^= 16
    path.unlink()                                                       # loaded weights may be views of the file
    path.write_bytes(altered)
    return bytes(altered)

# -------------------------------------------------------------------------------------------------------------- runs

@pytest.mark.parametrize("steps", [100, 300])
def test_a_run_that_is_stored_under_an_old_name_is_found_and_goes_on(tmp_path, steps, monkeypatch):
    """It is moved when it is first asked for, with the state from which it goes on; a file that is not what its folder
    says stays where it is, and is no run of the condition."""
    monkeypatch.setitem(conditions.RECIPES["add7"], "eval_every", 100)
    name, old = TINY.replace("+d16", "+d16@150:reset1,fresh"), TINY.replace("+d16", "+reset150+part1+forget+d16")
    _train_group(name, [1, 2], root=tmp_path, until="full", steps=200)
    store = Store(tmp_path)
    own, before = store.path(name, 1).parent, [store.load(name, s) for s in (1, 2)]
    assert ":" not in own.name and own.name != old.partition("/")[2]
    own.rename(there := store.root / "v1" / old)
    _train_group(TINY, [3], root=tmp_path, steps=100)
    shutil.copy(store.path(TINY, 3), there / "authors-3.safetensors")
    assert store.find(name, 3) is None and [r.seed for r in stored_runs(store, name)] == [1, 2]
    assert all(same(store.load(name, r.seed), r) for r in before)
    assert {p.name for p in there.iterdir() if p.suffix != ".lock"} == {"authors-3.safetensors"}
    _train_group(name, [1, 2], root=tmp_path, until="full", steps=steps)
    assert [store.load(name, s).step for s in (1, 2)] == [max(200, steps)] * 2
    if steps > 200:
        _train_group(name, [1, 2], root=tmp_path / "whole", until="full", steps=steps)
        for s in (1, 2): assert store.load(name, s).history.equals(Store(tmp_path / "whole").load(name, s).history)

def test_a_wait_for_a_lock_says_whose_it_is_once_and_ends_with_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "SAID_AFTER", .05), monkeypatch.setattr(files, "LONGEST_WAIT", .3)
    store, whose = Store(tmp_path), f"process {os.getpid()} on "
    with store.locked(TINY, [1, 2]):
        with pytest.raises(TimeoutError, match=f"authors-2.lock: expected .*; got one that {whose}.* has; fix: ") as e:
            with store.locked(TINY, [2]): pass
        assert not isinstance(e.value, filelock.Timeout) and "\n" not in str(e.value)      # which a budget would pass over
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"authors-2.lock: {whose}" in said
        with pytest.raises(filelock.Timeout):
            with store.locked(TINY, [2], deadline=time.time() + .1): pass
        with files.lock(tmp_path / "free.lock"): pass
    capsys.readouterr()
    with store.locked(TINY, [1, 2]): pass
    assert not capsys.readouterr().err                                                # nobody to wait for, nothing to say

def test_a_group_s_state_that_was_written_under_an_old_name_goes_on(tmp_path):
    c = condition(TINY + "@150:reset1")
    tensors, info = pack(init_members(c, [1, 2], "authors"))
    assert groups.unpack(tensors, info | dict(condition=TINY.replace("+d16", "+reset150+part1+d16"))).c == c

def test_a_damaged_run_is_moved_aside_with_a_warning_and_nothing_is_deleted(store):
    path, resume = store.path(TINY, 1), store.path(TINY, 1).with_suffix(".resume")
    bad, left = damage(path), resume.read_bytes()
    with pytest.raises(Damaged): store.load(TINY, 1)
    with pytest.warns(UserWarning, match="Moved aside as authors-1.safetensors.damaged"):
        assert store.find(TINY, 1) is None
    assert not path.exists() and not resume.exists()
    assert Path(f"{path}.damaged").read_bytes() == bad and Path(f"{resume}.damaged").read_bytes() == left

def test_a_file_that_cannot_be_read_at_the_moment_is_no_damaged_one(store, monkeypatch):
    path = store.path(TINY, 1)
    before = path.read_bytes()
    with monkeypatch.context() as m:
        m.setattr(Path, "read_bytes", lambda self: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
        with pytest.raises(PermissionError): store.find(TINY, 1)
    assert path.read_bytes() == before and not list(path.parent.glob("*.damaged"))

def test_what_is_stored_may_be_read_by_whom_the_umask_lets(tmp_path):
    before = os.umask(0o027)
    try: seal(tmp_path / "shared", {}, {})
    finally: os.umask(before)
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o640

@pytest.mark.parametrize("seed", ["1", 1.0, True, None])
def test_a_seed_that_is_no_whole_number_is_refused_and_no_good_run_is_moved_aside(store, seed):
    path = store.path(TINY, 1)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="seed: expected a whole number; got .*; fix: "): store.find(TINY, seed)
    assert path.read_bytes() == before and not list(path.parent.glob("*.damaged"))

def test_a_damaged_run_is_trained_again_to_the_same_bits(store):
    before = store.load(TINY, 1)
    damage(store.path(TINY, 1))
    with pytest.warns(UserWarning, match="Moved aside"): _train_group(TINY, [1], root=store.root, steps=200)
    after = store.load(TINY, 1)
    for n in ("cpu_seconds", "began", "ended"): after.manifest[n] = before.manifest[n]
    assert same(before, after)

def test_a_damaged_resume_file_is_never_continued_from(store):
    damage(store.path(TINY, 1).with_suffix(".resume"))
    with pytest.raises(Damaged): store.resume(TINY, 1)
    bad = store.path(TINY, 1).with_suffix(".resume").read_bytes()
    _train_group(TINY, [1], root=store.root, until="full", steps=400)
    assert store.load(TINY, 1).history["step"].tolist() == [200, 400]               # not from what is left
    assert store.path(TINY, 1).with_suffix(".resume.damaged").read_bytes() == bad

@pytest.mark.parametrize("name, seed, stream", first([(TINY, 2, "authors")], [
    ("add7/ffn-h8-gelu+d16", 1, "authors"), (TINY, 2, "authors"), (TINY, 1, "paired")]))
def test_no_run_is_continued_from_anothers_state(store, name, seed, stream, capsys):
    "A state copied to another run's place has the right shapes, and would be trained on under that name."
    _train_group(name, [seed], stream, root=store.root, steps=200)
    path = store.path(name, seed, stream).with_suffix(".resume")
    shutil.copy(store.path(TINY, 1).with_suffix(".resume"), path)
    bad = path.read_bytes()
    with pytest.raises(Damaged, match="expected the state of .*; got .*, another one; fix: "):
        store.resume(name, seed, stream)
    _train_group(name, [seed], stream, root=store.root, until="full", steps=400)
    _train_group(name, [seed], stream, root=store.root / "clean", until="full", steps=400)
    got, clean = (s.load(name, seed, stream) for s in (store, Store(store.root / "clean")))
    assert all(torch.equal(v, got.weights["final"][n]) for n, v in clean.weights["final"].items())
    assert (path.with_name(f"{path.name}.damaged").read_bytes() == bad
            and "starting this seed again" in capsys.readouterr().err)

@pytest.mark.parametrize("name, seed, stream", [("add7/ffn-h8-gelu+d16", 1, "authors"), (TINY, 2, "authors"),
                                                (TINY, 1, "paired")])
def test_a_run_that_lies_in_anothers_place_is_refused(store, name, seed, stream):
    path = store.path(name, seed, stream)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(store.path(TINY, 1), path)
    with pytest.raises(Damaged, match="expected .*; got .*; fix: "): store.load(name, seed, stream)

def others(store):
    "Sealed files that are no run: a state, a resume, a checkpoint, rows of a job, anything."
    seal(store.root / "rows", {}, dict(kind="rows", key=condition(TINY).key, rows={}, seed=1, stream="authors"))
    seal(store.root / "any", {"x": torch.zeros(3)}, {})
    yield from (store.root / "rows", store.root / "any", store.path(TINY, 1).with_suffix(".resume"))
    yield next(store.root.glob("groups/*/*.state"))
    yield checkpoints.checkpoint_path("add7/ffn-h256-silu", "first256")

def test_a_sealed_file_of_another_kind_in_a_run_s_place_is_moved_aside_and_the_run_trained(store):
    path = store.path(TINY, 2)
    for i, other in enumerate(others(store)):
        shutil.copy(other, path)
        with pytest.raises(Damaged, match="another one; fix: "): store.load(TINY, 2)
        with pytest.warns(UserWarning, match="Moved aside"): assert store.find(TINY, 2) is None
        assert len(list(path.parent.glob("authors-2.safetensors.damaged*"))) == i + 1
    _train_group(TINY, [2], root=store.root, steps=200)
    assert store.load(TINY, 2).step == 200

def test_files_that_are_not_called_as_a_run_is_are_named_and_passed_over(store):
    path = store.path(TINY, 1)
    for name in ("authors-01", "authors-1 (1)", "._authors-1", "author-1", "authors--1", "authors-1.5"):
        shutil.copy(path, path.with_name(f"{name}.safetensors"))
    with pytest.warns(UserWarning, match=r"passed over .*authors-01.safetensors.*; fix: ") as said:
        assert [(r.stream, r.seed) for r in stored_runs(store, TINY)] == [("authors", 1)]
    assert len(said) == 1 and len(list(path.parent.glob("*.safetensors"))) == 7

@pytest.mark.parametrize("kind", ["pipe", "sparse", "folder"])
def test_a_pipe_or_two_gigabytes_of_nothing_are_refused_unread(store, kind, monkeypatch):
    path = store.path(TINY, 3)
    if kind == "pipe": os.mkfifo(path)
    if kind == "folder": path.mkdir()
    if kind == "sparse":
        path.write_bytes(store.path(TINY, 1).read_bytes())
        os.truncate(path, 2**31)
    monkeypatch.setattr(Path, "read_bytes", None)
    with pytest.raises(Damaged, match="expected a sealed file; got .*; fix: "): unseal(path)
    with pytest.warns(UserWarning, match="Moved aside"): assert store.find(TINY, 3) is None
    assert not path.exists()

def test_a_checkpoint_in_anothers_place_is_refused(tmp_path):
    "A dense model's file under the name of another activation, whose shapes are the same, and under another rule's."
    of, there = "add7/ffn-h256-silu", checkpoints.checkpoint_path("add7/ffn-h256-silu", "first256")
    for name, rule in ((of.replace("silu", "gelu"), "first256"), (of, "final")):
        path = checkpoints.checkpoint_path(name, rule, tmp_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(there, path)
        for read in (checkpoints.checkpoint, checkpoints.checkpoint_seeds):
            with pytest.raises(Damaged, match="expected the checkpoint .*; got .*, another one; fix: git checkout"):
                read(name, rule, tmp_path)

def test_weights_of_a_run_that_never_reached_a_rule_come_with_a_word(store):
    run = store.load(TINY, 1)
    rule = next(r for r in run.weights if r.startswith("first"))
    assert not run.manifest["rules"][rule]["reached"]
    with pytest.warns(UserWarning, match=f"runs that reached {rule}; got the best of those that never did, seed 1"):
        store.population(TINY, [1], rule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.population(TINY, [1], "final")

def test_a_population_is_the_runs_stacked(store):
    _train_group(TINY, [2], root=store.root, steps=200)
    stacked = store.population(TINY, [2, 1], "final")
    for i, seed in enumerate([2, 1]):
        assert all(torch.equal(v[i], store.load(TINY, seed).weights["final"][n]) for n, v in stacked.items())

# -------------------------------------------------------------------------------------------------- disks that say no

def full(*args, **kwargs): raise OSError(errno.ENOSPC, "No space left on device")

class Disk:
    "Fills up while files are written: a real limit on the size of a file, or a failure of a call after the write."
    def __init__(self, monkeypatch, call):
        self.monkeypatch, self.call, self.limits = monkeypatch, call, resource.getrlimit(FSIZE)
    def fill(self):
        if self.call == "write": resource.setrlimit(FSIZE, (4096, self.limits[1]))  # bytes; Python ignores the signal
        else: self.monkeypatch.setattr(os, self.call, full)
    def free(self):
        resource.setrlimit(FSIZE, self.limits)
        self.monkeypatch.undo()

FSIZE = resource.RLIMIT_FSIZE

@pytest.fixture(params=["write", "fsync", "replace"])
def disk(request, monkeypatch):
    yield (disk := Disk(monkeypatch, request.param))
    disk.free()

def picture(values):
    figure, ax = plt.subplots()
    ax.plot(values)
    return figure

def many_files(folder):
    folder.mkdir(exist_ok=True)
    return [(folder / f"{i}.csv").touch() for i in range(80)]

LONG, SHORT = (pd.DataFrame({c: [f"{c}{i}" for i in range(n)] for c in ROW_COLUMNS} | {"value": range(n)})
               for n in (3000, 3))
WRITERS = {                                   # a file under a root, and what writes it from a long or a short table
    "a run": ("a.safetensors", lambda p, f: seal(p, {"a": torch.arange(4. * len(f))}, {})),
    "rows.csv": ("out/rows.csv", lambda p, f: write_frame(f, p)),
    "rows.parquet": ("out/rows.parquet", lambda p, f: write_frame(f, p)),
    "a table": ("results/rows/speed/x.parquet", lambda p, f: table_files.write_table(f, "speed", "x", p.parents[3])),
    "SHA256SUMS": ("SHA256SUMS", lambda p, f: many_files(p.parent / "data") and table_files.write_sums(p.parent)),
    "a picture": ("out/a.png", lambda p, f: write_picture(picture(f["value"]), p)),
    "bench": ("bench.csv", lambda p, f: keep(dict(condition=TINY, said="x" * 9 * len(f)), p))}

@pytest.mark.parametrize("writer", WRITERS)
def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path, disk, writer):
    name, write = WRITERS[writer]
    write(path := tmp_path / name, SHORT)
    before, files = path.read_bytes(), sorted(tmp_path.rglob("*"))
    disk.fill()
    with pytest.raises(OSError, match="expected room for .* MB; got .*; fix: .*MOE_REDISTRIBUTION_HOME"):
        write(path, LONG)
    disk.free()
    assert path.read_bytes() == before and sorted(tmp_path.rglob("*")) == files

@pytest.fixture
def clone(tmp_path):
    "A few committed tables with their hashes."
    for name in ("results/runs/hist.parquet", "results/history/hist.parquet", "results/rows/heldout/add7.parquet",
                 "results/manifest.csv", "data/margins.csv", "checkpoints/right.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(table_files.ROOT / name, tmp_path / name)
    table_files.write_sums(tmp_path)
    return tmp_path

def test_a_table_that_nobody_listed_is_refused_and_one_that_people_edit_until_they_say_so(clone):
    shutil.copy(clone / "results/runs/hist.parquet", clone / "results/runs/hist (1).parquet")
    with pytest.raises(Damaged, match="expected a file that SHA256SUMS lists"): selection.recorded_runs(clone)
    (margins := clone / "data/margins.csv").write_bytes(margins.read_bytes().replace(b"0.0", b"0.1", 1))
    with pytest.raises(Damaged, match="data/margins.csv: expected .*make sums"): as_committed(margins)
    table_files.write_sums(clone)
    assert as_committed(margins) == margins

def test_a_file_is_hashed_once_for_each_state_of_it(clone, monkeypatch):
    path, real, hashed = clone / "results/manifest.csv", files.hashlib.sha256, []
    monkeypatch.setattr(files.hashlib, "sha256", lambda *a: hashed.append(1) or real(*a))
    for _ in range(5): as_committed(path)
    assert len(hashed) == 1
    os.utime(path)
    as_committed(path), as_committed(path)
    assert len(hashed) == 2

def test_a_path_may_be_a_text(tmp_path):
    "Their hints said so, and each asked the text for its folder."
    path = files.replace_file(str(tmp_path / "new" / "a.txt"), b"1")
    assert path.read_bytes() == b"1" and files.of_clone(str(path)) == path
    assert set_aside(str(path)).name == "a.txt.damaged" and not path.exists()
    with pytest.raises(FileNotFoundError, match="new/a.txt: expected beside the package"): files.of_clone(str(path))

def test_a_table_that_is_written_is_listed_before_it_is_there(clone, monkeypatch):
    "A kill before, between and after leaves a file that is read; afterwards the sums are those of `make sums`."
    path, real, kills = clone / "results/runs/hist.parquet", files.replace_file, [1, 2, 3]
    frame = pd.read_parquet(path)[:5]
    def replaced(*args):
        calls.append(args[0].name)
        if len(calls) == kill: raise KeyboardInterrupt
        return real(*args)
    monkeypatch.setattr(files, "replace_file", replaced)
    for kill in kills:
        calls = []
        with pytest.raises(KeyboardInterrupt): table_files.write_table(frame[:kill], "runs", "hist", clone)
        assert len(selection.recorded_runs(clone)) > 0
    calls, kill = [], 0
    table_files.write_table(frame, "runs", "hist", clone)
    assert (clone / "SHA256SUMS").read_text() == table_files._sums(clone) and len(selection.recorded_runs(clone)) == 5

def test_a_table_has_twelve_digits_and_all_of_a_whole_number(tmp_path):
    frame = pd.DataFrame({"x": [.1 + .2, 1 / 3 + 1e-16, 4e14 + 1, 2e-7 / 3, float("nan"), float("inf"), 2], "n": range(7)})
    write_frame(frame, tmp_path / "a.csv")
    cells = [line.split(",")[0] for line in (tmp_path / "a.csv").read_text().splitlines()[1:]]
    assert cells == ["0.3", "0.333333333333", "400000000000001.0", "6.66666666667e-08", "", "inf", "2.0"]

def test_a_disk_that_fills_up_during_training_costs_only_time(tmp_path, disk, monkeypatch):
    "The run fails with the disk's own words; with room again the same command gives what a good disk gives."
    def go(root, **kw):
        with pytest.MonkeyPatch.context() as often:
            often.setitem(RECIPES["add7"], "eval_every", 20)
            _train_group(TINY, [1, 2], root=root, until="full", steps=40, save_every=0, **kw)
    def seal_once(*args):
        seal(*args)
        disk.fill()
    monkeypatch.setattr(groups, "seal", seal_once)
    with pytest.raises(OSError, match="No space left|too large"): go(tmp_path / "bad")
    assert not parts_left(tmp_path) and not list(tmp_path.rglob("*.safetensors"))
    disk.free()
    intervals = []
    go(tmp_path / "bad", tell=lambda *_: intervals.append(1)), go(tmp_path / "good")
    assert len(intervals) == 1                                                      # 20 steps were safe
    for s in (1, 2):
        bad, good = Store(tmp_path / "bad").load(TINY, s), Store(tmp_path / "good").load(TINY, s)
        for n in ("cpu_seconds", "began", "ended"): bad.manifest[n] = good.manifest[n]
        assert same(bad, good)

def no_training(*args): raise AssertionError("work began")

def read_only(monkeypatch, root):
    def refuse(*args, **kwargs): raise OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)

def a_file_in_its_place(monkeypatch, root): root.write_text("")

def below_a_file(monkeypatch, root): root.parent.write_text("")

def nearly_full(monkeypatch, root):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**9, used=10**9, free=10**6))

@pytest.mark.parametrize("trouble, got", [(read_only, "Read-only file system"), (a_file_in_its_place, "File exists"),
                                          (below_a_file, "Not a directory"), (nearly_full, "1 MB")])
def test_a_store_that_cannot_take_the_runs_is_refused_before_any_work(tmp_path, monkeypatch, trouble, got):
    root = tmp_path / ("file/store" if trouble is below_a_file else "store")
    trouble(monkeypatch, root)
    monkeypatch.setattr(groups, "train_interval", no_training)
    with pytest.raises(OSError, match=f"expected .*; got {got}; fix: set MOE_REDISTRIBUTION_HOME"):
        train([TINY], seeds=[1], root=root, executor="here", quiet=True)
    assert not root.is_dir() or not list(root.iterdir())

@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "train_interval", no_training)
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="expected a writable folder; got Permission denied; fix: "):
        train([TINY], seeds=[1], root=tmp_path / "store", executor="here", quiet=True)
