"""What a user's file reads is part of the key of what it registers, and what it changes of the library is put back."""
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import save_file

from fresh import python
from moe_redistribution.models.condition import condition
from moe_redistribution.models.routers import Router
from moe_redistribution.basics import kinds
from moe_redistribution.basics.kinds import import_file
from moe_redistribution.basics.own_code import is_users, reads
from moe_redistribution.training import store
from moe_redistribution.training.groups import Training, train
from moe_redistribution.training.store import Store
from moe_redistribution.training.study import run_study, study_of

NAME = "add7/ffn-h8-silu"

ROUTER = '''
import os, sys, torch
from pathlib import Path
from moe_redistribution.models.routers import Router
from moe_redistribution.basics.kinds import register
{top}
@register("router", "scaled")
class Scaled(Router):
    def logits(self, held, x, c): return {scale} * super().logits(held, x, c)
'''
OWN = "add7/moe-e2k1-h8-silu+scaled"
HOW = dict(stream="paired", until="full", quiet=True, executor="here", steps=200)

def write_scales(folder, value):
    "The same number in three kinds of file."
    torch.save(torch.tensor(value), folder / "scale.pt")
    np.save(folder / "scale.npy", value)
    save_file({"x": torch.tensor(value)}, folder / "scale.safetensors")

@pytest.fixture
def mine(own_file):
    (there := own_file.parents[1] / "elsewhere").mkdir()
    (there / "far_helper.py").write_text("SCALE = 2.")
    write_scales(own_file.parent, 2.)
    return own_file

READS = {                                                   # what stands at the top → how it is changed
    "a tensor": ("SCALE = torch.load(Path(__file__).with_name('scale.pt'))", "scale.pt"),
    "an array": ("import numpy as np\nSCALE = float(np.load(Path(__file__).with_name('scale.npy')))", "scale.npy"),
    "a variable": ("SCALE = float(os.environ.get('MY_SCALE', '2'))", "$"),
    "safetensors": ("from safetensors.torch import load_file\n"
                    "SCALE = load_file(Path(__file__).with_name('scale.safetensors'))['x']", "scale.safetensors"),
    "a module elsewhere": ("sys.path.append(str(Path(__file__).parents[1] / 'elsewhere'))\n"
                           "from far_helper import SCALE", "../elsewhere/far_helper.py")}

@pytest.mark.parametrize("top, what", READS.values(), ids=READS)
def test_what_a_file_reads_is_in_the_key_of_what_it_registers(mine, monkeypatch, top, what):
    def key():
        import_file(mine)
        return condition(OWN).key
    plain = condition(NAME).key
    mine.write_text(ROUTER.format(top=top, scale="SCALE"))
    first, again = key(), key()
    if what == "$": monkeypatch.setenv("MY_SCALE", "3")
    elif what.endswith(".py"): (mine.parent / what).write_text("SCALE = 3.33")
    else: write_scales(mine.parent, 3.)
    assert first == again != key() and condition(NAME).key == plain
    assert Training(OWN, (1,)).files[str(mine)].startswith(kinds._own_digest(mine) + "+")

def test_a_file_that_reads_nothing_has_the_key_that_it_had(mine):
    mine.write_text(ROUTER.format(top="", scale="2"))
    import_file(mine)
    assert condition(OWN).files == {str(mine): kinds._own_digest(mine)}

def test_a_worker_that_would_read_something_else_refuses(mine):
    mine.write_text(ROUTER.format(top=READS["a tensor"][0], scale="SCALE"))
    import_file(mine)
    files = Training(OWN, (1,)).files
    kinds.need_files(files)
    with pytest.raises(ValueError, match="what mine.py reads: expected files and variables"):
        kinds.need_files({str(mine): files[str(mine)][:-1] + "x"})

def test_what_is_read_in_mid_training_is_refused_before_any_work(mine, tmp_path):
    mine.write_text(ROUTER.format(top="", scale="torch.load(Path(__file__).with_name('scale.pt'))"))
    import_file(mine)
    with pytest.raises(ValueError, match="scale.pt, opened in mid-work; fix: read it at the top"):
        train(OWN, [1], root=tmp_path / "s", **HOW)
    assert not (tmp_path / "s").exists()

def test_a_package_in_a_folder_of_its_own_is_no_user_s_file(mine, tmp_path):
    at = tmp_path / "elsewhere"
    (at / "own_pack_9f").mkdir(), (at / "own_pack_9f-1.0.dist-info").mkdir()
    (at / "own_pack_9f" / "__init__.py").write_text("")
    (at / "own_pack_9f" / "deep.py").write_text("TWO = 2.")
    (at / "own_pack_9f-1.0.dist-info" / "RECORD").write_text("own_pack_9f/__init__.py,,\nown_pack_9f/deep.py,,\n")
    mine.write_text(ROUTER.format(top=f"sys.path.append({str(at)!r})\nimport importlib",
                                  scale="importlib.import_module('own_pack_9f.deep').TWO"))
    import_file(mine)
    train(OWN, [1], root=tmp_path / "s", **HOW)
    assert not is_users(str(at / "own_pack_9f" / "deep.py")) and is_users(str(at / "far_helper.py"))

TOUCHES = {
    "a method": ("Router.logits = print", "routers.Router.logits replaced"),
    "a constant": ("from moe_redistribution.tasks import data\ndata.TRAIN_SHARE = .5", "TRAIN_SHARE replaced"),
    "torch": ("torch.softmax = lambda *of, **how: 0", "torch.softmax replaced"),
    "a device": ("torch.set_default_device('meta')", "default device")}

@pytest.mark.parametrize("top, says", TOUCHES.values(), ids=TOUCHES)
def test_a_file_that_changes_the_library_is_refused_and_the_library_put_back(mine, top, says):
    from moe_redistribution.tasks import data
    before = data.split, data.TRAIN_SHARE, Router.logits, torch.softmax, torch.get_default_dtype()
    mine.write_text(ROUTER.format(top=top, scale="2"))
    with pytest.raises(ValueError, match=says) as e: import_file(mine)
    assert str(e.value).count("; fix: ") == 1 and "import mine.py" in str(e.value)
    assert before == (data.split, data.TRAIN_SHARE, Router.logits, torch.softmax, torch.get_default_dtype())
    assert "scaled" not in kinds.table_of("router")

def test_a_default_that_was_set_before_a_training_is_refused(tmp_path):
    torch.set_default_dtype(torch.float64)
    with pytest.raises(ValueError, match="torch's default dtype: expected torch.float32"):
        train(NAME, [1], root=tmp_path, **HOW)
    assert torch.get_default_dtype() == torch.float32

STUDY = '''
from pathlib import Path
from moe_redistribution.instruments.rows import rows, tidy
from moe_redistribution.training.study import Preset, Study
def run(arm, seeds, settings, desk):
    lengths = [len(Path(__file__).with_name("data.txt").read_text()) + s for s in seeds]
    return rows(lengths, seeds, condition=arm, metric="length")
STUDY = Study("reader", "", {"small": Preset("", {"a": (1, 2)}, 2)}, run, lambda *a: 1.)
'''

def test_rows_of_a_study_whose_data_have_changed_since_are_refused(mine, tmp_path):
    mine.write_text(STUDY)
    (data := mine.with_name("data.txt")).write_text("1234")
    found = lambda: run_study(study_of(mine), root=tmp_path / "s", executor="here", quiet=True)["value"].tolist()
    assert found() == [5, 6]
    data.write_text("123456")
    with pytest.raises(ValueError, match="changed ones: .*data.txt; fix: --again"): found()
    data.write_text("1234")
    assert found() == [5, 6]

def test_an_error_in_mid_training_names_the_line_of_the_users_file(mine, tmp_path):
    mine.write_text(ROUTER.format(top="", scale="torch.ones(8 if x.shape[1] > 99 else 1, x.shape[1], 1, 1)"))
    import_file(mine)
    with pytest.raises(ValueError, match="expected what can be trained; .*fix: mend mine.py, line 9"):
        train(OWN, [1, 2], root=tmp_path / "s", **HOW)

def test_examples_that_differ_though_their_file_is_the_same_are_not_made_anew_for_ever(mine, tmp_path, monkeypatch):
    mine.write_text("from dataclasses import replace\nfrom moe_redistribution.models.condition import RECIPES\n"
                    "from moe_redistribution.basics.kinds import register\n"
                    "from moe_redistribution.tasks.task import add7_task\n"
                    "register('task', 'mine', lambda: replace(add7_task(), name='mine'), recipe=RECIPES['add7'],\n"
                    "         rules=('first1000',))\n")
    import_file(mine)
    train("mine/ffn-h8-silu+d16", [1], root=tmp_path / "s", **HOW)
    monkeypatch.setattr(store, "_task_hash", lambda t: "0" * 12)
    with pytest.warns(UserWarning, match="fix: sort what comes from a set and draw by a seed"):
        Store(tmp_path / "s").load("mine/ffn-h8-silu+d16", 1, "paired")

def test_what_torch_itself_replaces_at_first_use_is_no_users_doing():
    said = ("import torch; from moe_redistribution.guard.properties import untouched_library as it\nwith it('x'):\n"
            "    torch.optim.Adam([torch.zeros(2, requires_grad=True)]).step()\n    import torch._dynamo\n")
    assert python("-c", said).stderr == ""

def test_what_two_threads_read_at_once_is_told_apart_and_a_thread_that_a_users_code_starts_is_heard(tmp_path):
    "A worker of Dask has several. The one that ended first took the other's scope along, which then heard of nothing."
    files, reader = [tmp_path / f"{x}.txt" for x in "abc"], safetensors.safe_open
    for f in files: f.write_text(f.name)
    begun, ended = threading.Barrier(2), threading.Event()
    def first():
        with reads() as read:
            begun.wait(9), files[0].read_text()
        ended.set()
        return [*read]
    def last():
        with reads() as read:
            begun.wait(9), ended.wait(9), files[1].read_text()
            (own := threading.Thread(target=lambda: files[2].read_text())).start(), own.join()
            with pytest.raises(ValueError, match="opened in mid-work"), reads("a training"): (tmp_path / "a.txt").read_text()
        return [*read]
    with ThreadPoolExecutor(2) as pool: one, other = pool.submit(first), pool.submit(last)
    assert one.result() == [str(files[0])] and {*map(str, files[1:])} <= {*other.result()} and safetensors.safe_open is reader
