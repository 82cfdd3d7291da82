"""What a user's instrument, question, study or file gives is what was asked for, and comes again from the same key."""
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from moe_redistribution.evidence.questions import Question
from moe_redistribution.instruments.instrument import _say_if_unknown, checked_rows, instrument, instruments_for
from moe_redistribution.instruments.rows import rows, tidy
from moe_redistribution.models.condition import condition
from moe_redistribution.models.population import forward, init
from moe_redistribution.models.routers import Router
from moe_redistribution.tasks import kinds
from moe_redistribution.tasks.kinds import import_file
from moe_redistribution.tasks.own_code import HERE, Unchecked, is_users
from moe_redistribution.training import store
from moe_redistribution.training.groups import Training, train
from moe_redistribution.training.store import Store
from moe_redistribution.training.study import Preset, Study, run_study, study_jobs, study_of
from toys import untrained

NAME, SEEDS = "add7/ffn-h8-silu", [1, 2, 3]
def some(name): return untrained(name, SEEDS)
PARAMS = some(NAME)
SMALL = "add7/ffn-h8-silu+d16"

# --------------------------------------------------------------------------------------------------------- instruments

def norms(p): return p["W_E"].flatten(1).norm(dim=1)
def table(values, seeds, c, **how): return rows(values, seeds, **dict(condition=str(c), metric="mine") | how)

def changes(p, c, seeds, **how):
    p["W_E"].mul_(2)
    return table(norms(p), seeds, c, **how)

def changes_in_numpy(p, c, seeds, **how):
    p["W_E"].numpy()[0] = 0
    return table(norms(p), seeds, c, **how)

def renames(p, c, seeds, **how):
    p["W_U"] = p["W_E"]
    return table(norms(p), seeds, c, **how)

def patches(p, c, seeds, **how):
    Router.logits = lambda self, held, x, c: 0
    return table(norms(p), seeds, c, **how)

def wider(p, c, seeds, **how):
    torch.set_default_dtype(torch.float64)
    return table(norms(p), seeds, c, **how)

WRONG = {                                                   # an instrument → what its refusal says
    "other seeds": (lambda p, c, s, **how: table(norms(p), [x + 1 for x in s], c, **how), "rows of seed 1, 2, 3"),
    "a seed left out": (lambda p, c, s, **how: table(norms(p)[1:], s[1:], c, **how), "rows of seed 1, 2, 3"),
    "two in the middle": (lambda p, c, s, **how: table(norms(p)[[0, 2, 1] if len(s) == 3 else [0, 1]], s, c, **how),
                          "made twice"),
    "averaged": (lambda p, c, s, **how: table(norms(p).mean().expand(len(s)), s, c, **how), "made twice"),
    "centred": (lambda p, c, s, **how: table(norms(p) - norms(p).mean(), s, c, **how), "made twice"),
    "by chance": (lambda p, c, s, **how: table(torch.rand(len(s)), s, c, **how), "made twice"),
    "in order of seeds": (lambda p, c, s, **how: table(norms(p), sorted(s), c, **how), "made twice"),
    "another condition": (lambda p, c, s, **how: table(norms(p), s, "add7/no_ffn", **how), "of condition add7/ffn"),
    "another stream": (lambda p, c, s, **how: table(norms(p), s, c, **how | dict(stream="authors")), "stream paired"),
    "no number": (lambda p, c, s, **how: table(norms(p) * torch.nan, s, c, **how), "finite numbers"),
    "no end": (lambda p, c, s, **how: table(norms(p) * torch.inf, s, c, **how), "finite numbers"),
    "a metric of the library": (lambda p, c, s, **how: table(norms(p), s, c, **how | dict(metric="digits")),
                                "my_digits"),
    "values alone": (lambda p, c, s, **how: norms(p), "expected a frame of rows; got Tensor"),
    "no rows": (lambda p, c, s, **how: table(norms(p), s, c, **how)[:0], "rows of condition"),
    "too many values": (lambda p, c, s, **how: table(p["W_E"], s, c, **how), r"expected one a seed, \(3,\)"),
    "no condition": (lambda p, c, s, **how: rows(norms(p), s, metric="mine", **how), "labels condition"),
    "an error": (lambda p, c, s, **how: p["W_e"], "KeyError: 'W_e'; fix: see line .* of test_own_code.py"),
    "weights": (changes, "weights and examples as they were"), "in NumPy": (changes_in_numpy, "weights and examples"),
    "names of weights": (renames, "weights and examples as they were"),
    "the library": (patches, "routers.Router.logits replaced; it is put back"), "default": (wider, "default dtype")}

@pytest.mark.parametrize("f, says", WRONG.values(), ids=WRONG)
def test_an_instrument_that_is_wrong_is_refused_by_name_at_its_first_use(f, says):
    params = {n: v.clone() for n, v in PARAMS.items()}
    with pytest.raises(ValueError, match=says) as e:
        checked_rows(f, "mine")(params, NAME, SEEDS, stream="paired", rule="final")
    assert str(e.value).count("; fix: ") == 1 and torch.get_default_dtype() == torch.float32

@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("word", ["averaged", "by chance"])
def test_one_seed_or_two_are_enough_to_see_it(word, n):
    if (n, word) == (1, "averaged"): pytest.skip("one seed's mean is its own")
    with pytest.raises(ValueError, match="made twice"):
        checked_rows(WRONG[word][0])({k: v[:n] for k, v in PARAMS.items()}, NAME, SEEDS[:n], stream="paired")

def test_a_right_instrument_is_carried_out_and_those_of_the_library_are_as_they_are():
    right = checked_rows(lambda p, c, s, **how: table(norms(p), s, c, **how))
    for seeds in (SEEDS, SEEDS[:1], SEEDS[::-1]):
        assert len(right({k: v[:len(seeds)] for k, v in PARAMS.items()}, NAME, seeds, stream="paired")) == len(seeds)
    assert checked_rows(init) is init

def sure(at=lambda t, j: t.read[j], step=1, batch=1000):
    "An instrument of how sure a model is: by position, by stratum, and on the whole."
    def f(p, c, seeds, **how):
        t = condition(c).get_task()
        q, kinds = forward(p, t.tokens, c).softmax(-1).amax(-1), t.strata["carry"].to_numpy()
        out = [table(q[:, :, at(t, j)].mean(1), seeds, c, position=t.positions[j], **how) for j in t.scored]
        each = [q[:, torch.from_numpy(kinds == v)].mean((1, 2)) for v in np.unique(kinds)[::step]]
        out += [table(x, seeds, c, stratum=f"carry={v}", **how) for x, v in zip(each, np.unique(kinds))]
        whole = torch.stack([x.mean((1, 2)) for x in q.split(batch, 1)]).mean(0)
        return pd.concat([*out, table(whole, seeds, c, **how)], ignore_index=True)
    return f

ELSEWHERE = {"read at j": (sure(at=lambda t, j: j), "rows of position o0 that go with what stands there"),
             "names in another order": (sure(step=-1), "rows of stratum carry=0 that go with what stands there"),
             "means of unequal batches": (sure(batch=300), "the same of 1000 examples in another order")}

@pytest.mark.parametrize("f, says", ELSEWHERE.values(), ids=ELSEWHERE)
def test_rows_that_are_not_about_what_their_labels_say_get_a_word(f, says):
    with pytest.warns(UserWarning, match=says):
        checked_rows(f, "mine")(some(SMALL), SMALL, SEEDS, stream="paired", rule="final")

def test_rows_that_are_about_what_their_labels_say_get_none(recwarn):
    checked_rows(sure(), "mine")(some(SMALL), SMALL, SEEDS, stream="paired", rule="final")
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]

@pytest.mark.parametrize("how, says", [(dict(rules="at_all"), "rules of instrument"), (dict(streams="pared"), "paired"),
                                       (dict(f="norms"), "a function that gives rows"),
                                       (dict(f=lambda params, c: None), "a function of .params, c, seeds")])
def test_a_word_for_a_function_is_refused_when_it_is_declared(how, says):
    f = how.pop("f", lambda p, c, seeds, **labels: None)
    with pytest.raises(ValueError, match=says): instrument("mine_for_a_test", **how)(f)

# ----------------------------------------------------------------------------------------------------------- questions

ASKED = Question({"width": ("wide", "plain")}, seeds=range(1, 9), margin=.05, guess=.1)
VALUES = pd.concat([rows(np.full(8, v) + .001 * np.arange(8), range(1, 9), condition=c, metric="digits")
                    for c, v in (("wide", .9), ("plain", .5))], ignore_index=True)

@pytest.mark.parametrize("column", ["stream", "rule", "split", "site", "edit", "unit", "position", "stratum", "metric"])
@pytest.mark.parametrize("which", ["an arm", "a seed"])
def test_a_question_is_not_answered_by_rows_that_differ_in_more_than_their_arms(column, which):
    assert ASKED.answers(VALUES)["outcome"].tolist() == ["different"]
    at = VALUES["condition"] == "wide" if which == "an arm" else VALUES["seed"] == 3
    with pytest.raises(ValueError, match=f"one {column} on both sides; got .*other of .*wide"):
        ASKED.answers(VALUES.assign(**{column: VALUES[column].mask(at, "other")}))

def test_a_question_wants_finite_numbers():
    with pytest.raises(ValueError, match="none of seeds"): ASKED.answers(VALUES.assign(value=np.inf))

# ------------------------------------------------------------------------------------------------------------- studies

def drawn(arm, seeds, *_): return [float(torch.rand(1, generator=torch.Generator().manual_seed(s))) for s in seeds]
def study(values, stack=2, content=None):
    def run(arm, seeds, settings, desk): return rows(values(arm, seeds, settings), seeds, condition=arm, metric="m")
    more = dict(content=content) if content else {}
    small = Preset("", {"a": (1, 2), "b": (1, 2)}, stack, dict(n=1))
    return Study("mine", "", {"small": small}, run, lambda *_: 1., **more)

REFUSED = {"by chance, one seed": (lambda arm, seeds, _: np.random.rand(len(seeds)), 1, "made twice"),
           "swapped": (lambda *x: drawn(*x)[::-1], 2, "made twice"),
           "an error": (lambda arm, seeds, s: s["N"], 2, "KeyError: 'N'; fix: see line .* of test_own_code.py"),
           "a default": (lambda arm, seeds, _: torch.set_default_dtype(torch.float64) or [1.], 1, "default dtype")}

@pytest.mark.parametrize("values, stack, says", REFUSED.values(), ids=REFUSED)
def test_a_study_s_rows_are_made_twice_before_they_are_stored(tmp_path, values, stack, says):
    mine = study(values, stack)
    with pytest.raises(ValueError, match=says): run_study(mine, root=tmp_path, executor="here", quiet=True)
    assert not any(j.is_done(Store(tmp_path)) for j in study_jobs(mine, arms="a"))

def test_rows_that_nobody_could_make_again_say_so_in_their_column_and_in_the_verdict(tmp_path, monkeypatch):
    monkeypatch.delattr("os.fork")                                                        # as on a system without one
    with pytest.warns(Unchecked, match="made again"):
        found = checked_rows(lambda p, c, s, **how: table(norms(p), s, c, **how))(PARAMS, NAME, SEEDS)
    study = Study("mine_unchecked", "…", {"small": Preset("…", {"a": range(1, 9), "b": range(1, 9)}, stack=8)},
                  lambda arm, seeds, settings, desk: rows([s + .1 * (arm == "a") for s in seeds], seeds, condition=arm, metric="m"),
                  lambda *_: 1)
    jobs = study_jobs(study, "small")
    run_study(study, "small", root=tmp_path, executor="here", quiet=True)
    with pytest.warns(Unchecked, match="2 of 2 jobs"): told = tidy([study.rows("small", jobs, tmp_path)])
    assert (found["unchecked"] != "").all() and (told["unchecked"] != "").all()
    asked = Question({"a": ("mine_unchecked.small/a", "mine_unchecked.small/b")}, range(1, 9), margin=.05, guess=-9., top=99.)
    assert asked.answers(told)["outcome"].item() == "different, unchecked"

def test_arms_of_one_content_do_not_take_each_others_rows(tmp_path):
    mine = study(drawn, content=lambda arm, settings: settings)
    with pytest.raises(ValueError, match="another for its arm b"):
        run_study(mine, root=tmp_path, executor="here", quiet=True)

def test_settings_that_a_function_changes_stay_those_of_the_key(tmp_path):
    mine = study(lambda arm, seeds, s: [s.update(n=s["n"] + 1) or s["n"] + x for x in drawn(arm, seeds)])
    with pytest.raises(ValueError, match="made twice"): run_study(mine, root=tmp_path, executor="here", quiet=True)
    assert mine.presets["small"].settings == {"n": 1}

# ---------------------------------------------------------------------------------------------------------------- keys

ROUTER = '''
import os, sys, torch
from pathlib import Path
from moe_redistribution.models.routers import Router
from moe_redistribution.tasks.kinds import register
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
                    "from moe_redistribution.tasks.kinds import register\n"
                    "from moe_redistribution.tasks.task import add7_task\n"
                    "register('task', 'mine', lambda: replace(add7_task(), name='mine'), recipe=RECIPES['add7'],\n"
                    "         rules=('first1000',))\n")
    import_file(mine)
    train("mine/ffn-h8-silu+d16", [1], root=tmp_path / "s", **HOW)
    monkeypatch.setattr(store, "_task_hash", lambda t: "0" * 12)
    with pytest.warns(UserWarning, match="fix: sort what comes from a set and draw by a seed"):
        Store(tmp_path / "s").load("mine/ffn-h8-silu+d16", 1, "paired")

# what the library's own instruments say of sites, positions and strata, where a user's are asked about theirs
LABELLED = ("ablation", "attribution", "copying", "patterns", "rerouting", "routing", "scores", "heldout")

@pytest.mark.parametrize("name", ["add7/moe-e2k1-h8-silu+d16", "add7/moe_glu-e4k2-h16-silu+d16+hold_tens9+L2"])
def test_labels_of_the_librarys_instruments_pass(name):
    params, fitting = untrained(name, [1]), instruments_for(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for n in LABELLED:
            if n in fitting: _say_if_unknown(n, fitting[n].rows(params, name, [1], stream="paired"), condition(name))

def test_what_torch_itself_replaces_at_first_use_is_no_users_doing():
    said = ("import torch; from moe_redistribution.tasks.own_code import untouched_library as it\nwith it('x'):\n"
            "    torch.optim.Adam([torch.zeros(2, requires_grad=True)]).step()\n    import torch._dynamo\n")
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True).stderr == ""

def test_the_library_is_where_it_says(): assert HERE.endswith("moe_redistribution/")

def test_a_page_that_defines_an_instrument_of_the_library_again_is_no_user_s_file():
    from moe_redistribution.instruments.instrument import checked_rows
    def rows(params, c, seeds, stream="authors", rule="final"): ...
    assert checked_rows(rows, "mine") is not rows and checked_rows(rows, "ablation") is rows is checked_rows(rows)
