"""What a user registers in a file trains, resumes and is measured as the library's own things are."""
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from moe_redistribution.instruments.instrument import instruments_for, misfits
from moe_redistribution.models.condition import condition
from moe_redistribution.models.population import init, loss
from moe_redistribution.basics import kinds
from moe_redistribution.tasks.data import batches, generators, split
from moe_redistribution.basics.kinds import KIND_TABLES, _own_digest, import_file, table_of
from moe_redistribution.tasks.task import get_task
from moe_redistribution.training.engine import fast_loss, long_way
from moe_redistribution.training.executors import JobPool, local_executor
from moe_redistribution.training.groups import Training, train
from moe_redistribution.training.loop import learning_names
from moe_redistribution.training.jobs import _carry_with
from moe_redistribution.training.store import Store
from moe_redistribution.training.study import run_study, study_of
from fresh import python
from same import assert_same_runs
from tiers import first

PAGE = (Path(__file__).parent.parent / "nbs" / "own.py").read_text(encoding="utf-8")     # has the routers
MINE = '''
import pandas as pd, torch
from moe_redistribution.instruments.rows import rows
from moe_redistribution.opened.families import Family
from moe_redistribution.models.condition import RECIPES
from moe_redistribution.models.events import Event
from moe_redistribution.models.population import forward
from moe_redistribution.models.routers import Router
from moe_redistribution.models.variants import Gated
from moe_redistribution.basics.kinds import register
from moe_redistribution.tasks.task import Task
from moe_redistribution.training.study import Preset, Study

SMALL = dict(RECIPES["add7"], d_model=16, d_head=8, batch=16, steps=100, eval_every=50)

@register("task", "bits", recipe=SMALL, rules=("first1000",))
def bits():
    "Are there two or more ones among four bits?"
    bits = torch.arange(16)[:, None] >> torch.arange(4) & 1
    tokens = torch.cat([bits, torch.full((16, 1), 2)], 1)
    return Task("bits", d_vocab=3, d_vocab_out=2, causal=True, tied=False, read=(4,), scored=(0,),
                positions=("answer",), vocab=("0", "1", "?"), tokens=tokens, targets=(bits.sum(1) > 1).long()[:, None],
                strata=pd.DataFrame({"ones": bits.sum(1)}), by=("ones",))

ROUTERS

@register("variant", "tanh_glu")
class TanhGlu(Gated):
    "A gated FFN whose other product goes through a tangent."
    def hidden(self, product, act, at):
        gate = act(at("gate", product("W_gate")))
        return at("hidden", gate * at("up", product("W_up")).tanh())

@register("event", "halve")
class Halve(Event):
    "What the FFN adds is half as much, once."
    def apply(self, c, now, began, moments): now["W_down"].mul_(.5)

@register("instrument", "norms", needs=("an FFN",))
def norm_rows(params, c, seeds, **labels):
    "The norm of W_down."
    return rows(params["W_down"].flatten(1).norm(dim=1), seeds, condition=str(c), metric="norm_W_down", **labels)

LENGTH = 3.
def run(arm, seeds, settings, desk): return rows([LENGTH] * len(seeds), seeds, condition=arm, metric="letters")
register("study", "words", Study("words", "How long?", {"small": Preset("", {"a": [1, 2]})}, run, lambda *a: 1.))
register("family", "halved", Family(scale=.5))
'''.replace("ROUTERS", PAGE[PAGE.index('@register("router"'):PAGE.index('@register("variant"')].strip())
OWN = ["bits/moe-e2k1-h8-silu", "bits/moe-e4k2-h16-silu+cosine", "bits/moe-e2k1-h8-silu+relu",
       "bits/tanh_glu-h8-silu", "add7/tanh_glu-h8-silu+d16", "bits/ffn-h8-silu@50:halve"]
TRAIN = dict(stream="paired", until="full", quiet=True)

@pytest.fixture
def mine(own_file):
    own_file.write_text(MINE)
    return own_file

def same_runs(a, b, name, seeds): assert_same_runs(a, b, name, seeds, "paired")

# -------------------------------------------------------------------------------------------------- registered, listed

def test_one_call_serves_every_kind_and_each_is_listed_with_where_it_comes_from(mine):
    import_file(mine)
    listed = {(x["kind"], x["name"]): x for x in kinds.registered_things()}
    own = {k for k, x in listed.items() if x["origin"] == "mine.py"}
    assert own == {("task", "bits"), ("recipe", "bits"), ("rules", "bits"), ("router", "cosine"), ("event", "halve"),
                   ("router", "relu"), ("variant", "tanh_glu"), ("instrument", "norms"), ("study", "words"),
                   ("family", "halved")}
    assert {k for k, _ in listed} == set(KIND_TABLES) and all(x["about"] for x in listed.values())
    assert listed["task", "bits"]["about"] == "Are there two or more ones among four bits?"

TAKEN = [("task", "add7"), ("router", "frozen"), ("router", "norm"), ("variant", "moe"), ("event", "reset"),
         ("instrument", "ablation"), ("recipe", "hist"), ("study", "granularity"), ("family", "mixtral")]
ROOMS = """from moe_redistribution.models.condition import RECIPES
from moe_redistribution.models.events import *
from moe_redistribution.models.routers import *
from moe_redistribution.models.variants import *
from moe_redistribution.training.study import Preset, Study
from moe_redistribution.basics.kinds import register
SMALL = RECIPES["add7"]
"""

@pytest.mark.parametrize("kind, name", TAKEN, ids=map(" ".join, TAKEN))
def test_a_name_that_is_taken_is_refused_for_every_kind(kind, name):
    before = dict(table_of(kind))
    make = dict(task="lambda: 0", router="Router", variant="Gated", event="Event", instrument="print", recipe="SMALL",
                family="__import__('moe_redistribution.opened.families').language.families.Family()")
    with pytest.raises(ValueError, match="expected a new one|no study of ours|a new one.*which is a norm") as e:
        said = make.get(kind, "Study('granularity', '', {'small': Preset('', {'a': (1,)})}, print, print)")
        exec(f"{ROOMS}register({kind!r}, {name!r}, {said})", {"__name__": "__main__"})
    assert "fix: " in str(e.value) and dict(table_of(kind)) == before

LACKING = {
    "a recipe with a field that there is not":
        ('register("recipe", "t", dict(RECIPES["add7"], stepz=3))', "nearest: 'steps'"),
    "an unknown rule": ('register("rules", "t", ("first98",))', "nearest: 'first99'"),
    "a router that is none": ('register("router", "t", lambda x: x)', "a Router"),
    "a variant that is none": ('register("variant", "t", 3)', "a Variant"),
    "a variant with a number": ('register("variant", "glu2", Gated)', "small letters"),
    "an event that is none": ('register("event", "t", Router)', "a class of Event"),
    "an event with another's words":
        ('@register("event", "again")\nclass Again(Event): pattern, example = "fre.*", "fresher"', "words of its own"),
    "a task that makes none": ('register("task", "t", 3)', "a function that makes the Task")}

@pytest.mark.parametrize("text, says", LACKING.values(), ids=LACKING)
def test_what_a_registered_thing_lacks_is_said_at_once_and_nothing_of_its_file_stays(mine, text, says):
    mine.write_text(MINE + "\n" + text)
    with pytest.raises(ValueError, match=says) as e: import_file(mine)
    assert "import mine.py: " in str(e.value) and str(e.value).count("; fix: ") == 1
    assert not [x for x in kinds.registered_things() if x["origin"] == "mine.py"] and str(mine) not in kinds.FILES

UNITS = 'return at("hidden", gate * at("up", product("W_up")).tanh())'
WRONG = {
    "a router of another shape": ("super().logits(held / held", "super().logits(held[:, :-1] / held", OWN[1],
                                  "mine.py"),
    "gates of another shape": ("return probs\n", "return probs[..., :1]\n", OWN[2], "gates of .* experts on their last axis"),
    "a variant of another width": (UNITS, 'return at("hidden", gate[..., :1])', OWN[3], "expected what can be trained; got"),
    "targets that are no classes": ("(bits.sum(1) > 1).long()", "bits.sum(1)", OWN[0], "targets of bits: expected a class"),
    "an event that fails": ('now["W_down"].mul_(.5)', 'now["W_dwon"].mul_(.5)', OWN[5], "KeyError"),
    "a task that is none": ("return Task(", "return dict(name=", OWN[0], "a function that gives a Task"),
    "no batch to draw": ("batch=16", "batch=0", OWN[0], "expected a batch for a task that is drawn; got batch=0"),
    "no rules": (', rules=("first1000",)', "", OWN[0], 'register."rules", "bits"'),
    "no recipe": ("recipe=SMALL, ", "", OWN[0], 'register."recipe", "bits"')}

@pytest.mark.parametrize("old, new, name, says", WRONG.values(), ids=WRONG)
def test_what_cannot_train_is_refused_before_any_work(mine, tmp_path, old, new, name, says):
    assert old in MINE
    mine.write_text(MINE.replace(old, new, 1))
    import_file(mine)
    with pytest.raises(ValueError, match=says) as e: train(name, [1], root=tmp_path / "store", executor="here", **TRAIN)
    assert "fix: " in str(e.value) and not (tmp_path / "store").exists()

# --------------------------------------------------------------------------------------------------- trained, measured

@pytest.mark.parametrize("name", first([OWN[1], OWN[5]], OWN))
def test_what_is_registered_trains_resumes_and_is_measured_by_what_the_doors_let_in(mine, tmp_path, name):
    import_file(mine)
    if name.startswith("add7"): return
    train(name, [1, 2], root=tmp_path / "whole", executor="here", **TRAIN)
    train(name, [1, 2], root=tmp_path / "parts", executor="here", steps=50, **TRAIN)
    train(name, [1, 2], root=tmp_path / "parts", executor="here", **TRAIN)
    same_runs(tmp_path / "whole", tmp_path / "parts", name, (1, 2))
    fitting = instruments_for(name)
    assert {"ablation", "attribution", "norms"} <= {*fitting}
    assert {*fitting} | {*misfits(name)} == {*table_of("instrument").every()}
    params = Store(tmp_path / "whole").population(name, [1, 2], "final", "paired")
    for i, x in fitting.items():
        if i in ("probes", "speed"): continue
        got = x.rows(dict(params), name, [1, 2], stream="paired", rule="final")
        assert len(got) and got["value"].notna().any(), i

def test_a_router_with_rules_of_its_own_is_measured_only_where_no_instrument_takes_the_rules_for_known(mine):
    import_file(mine)
    for name in OWN[1:3]:
        lacks = misfits(name)
        for i in ("routing", "scores", "rerouting"): assert "the usual routing rules" in lacks[i], name
        assert "own" in long_way(condition(name), condition(name).get_task())
    assert not long_way(condition(OWN[3]), condition(OWN[3]).get_task())         # another variant takes the short way

@pytest.mark.parametrize("name", [OWN[0], OWN[3], "bits/tanh_glu-h8-silu+L2"])
def test_the_short_way_is_the_plain_pass_for_what_is_registered_too(mine, name):
    import_file(mine)
    params = {n: v.double() for n, v in init(name, [torch.Generator().manual_seed(s) for s in (1, 2)]).items()}
    t = condition(name).get_task()
    at = torch.randint(0, len(t), (2, 9), generator=torch.Generator().manual_seed(3))
    for a, b in zip(*(f(params, t.tokens[at], t.targets[at], condition(name)) for f in (fast_loss, loss))):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

def test_a_table_of_ones_own_is_fixed_as_the_librarys_are_unless_its_class_says_that_it_learns(mine):
    mine.write_text(MINE.replace("import Router", "import Router, Tokens") + """
@register("router", "tabled")
class Hashed(Tokens): "Routes by a table."
@register("router", "taught")
class Taught(Tokens):
    "Routes by a table that learns."
    learns = True
""")
    import_file(mine)
    names = {w: condition(f"bits/moe-e2k1-h8-silu+{w}") for w in ("tabled", "taught")}
    assert [w for w, c in names.items() if "W_router" in learning_names(c, [0])] == ["taught"]

def test_the_bias_of_a_router_follows_the_load(mine, tmp_path):
    import_file(mine)
    train(OWN[1], [1], root=tmp_path / "s", executor="here", **TRAIN)
    bias = Store(tmp_path / "s").load(OWN[1], 1, "paired").weights["final"]["W_router"][0, -1]
    assert bias.abs().max() > .02                                              # which no gradient reaches

# -------------------------------------------------------------------------------------------------------- keys, files

def test_a_split_task_with_a_batch_draws_it_from_the_seeds_own_part(mine):
    mine.write_text(MINE.replace('by=("ones",))', 'by=("ones",), source="split")'))
    import_file(mine)
    t, seeds = get_task("bits"), [1, 2]
    gens = [generators(s, "paired") for s in seeds]
    own = [{*map(tuple, t.tokens[split(t, s, "paired")[0]].tolist())} for s in seeds]
    steps = [tokens for tokens, _ in batches(t, seeds, "paired", gens, [0, 0], 3, 16)]
    assert all(tokens.shape == (2, 16, 5) for tokens in steps) and not torch.equal(*steps[:2])
    assert all({*map(tuple, x[i].tolist())} <= own[i] for x in steps for i in (0, 1))
    (whole, _), *_ = batches(t, seeds, "paired", gens, [0, 0], 3, 0)
    assert whole.shape == (2, 4, 5)                                  # three tenths of sixteen, as modular addition has

def test_an_edited_file_is_other_work_and_the_old_one_finds_its_own_again(mine, tmp_path):
    def trained():
        import_file(mine)
        train(OWN[3], [1], root=tmp_path / "s", executor="here", **TRAIN)
        return condition(OWN[3]).key, Store(tmp_path / "s").load(OWN[3], 1, "paired").weights["final"]["W_down"]
    (first, a), _ = trained(), mine.write_text(MINE.replace(".tanh()", ".sin()"))
    (second, b), _ = trained(), mine.write_text(MINE)
    third, c = trained()
    assert first == third != second and torch.equal(a, c) and not torch.equal(a, b)
    assert len(list((tmp_path / "s" / "v1").rglob("*.safetensors"))) == 2

def test_a_file_counts_with_its_neighbours_that_it_imports(mine):
    alone = _own_digest(mine)
    mine.write_text(MINE + "\nfrom beside_it import X")
    (other := mine.with_name("beside_it.py")).write_text("X = 1")
    first = _own_digest(mine)
    other.write_text("X = 2")
    mine.with_name("pandas.py").write_text("")
    assert len({alone, first, _own_digest(mine)}) == 3

def test_a_study_in_an_edited_file_is_other_work(mine, tmp_path):
    found = lambda: run_study(study_of(mine), root=tmp_path / "s", executor="here", quiet=True)["value"].tolist()
    first = found()
    mine.write_text(MINE.replace("LENGTH = 3.", "LENGTH = 4."))
    assert (first, found()) == ([3., 3.], [4., 4.])

@pytest.mark.parametrize("how", ["from helper import X", "from .helper import X", "from . import helper\nX = helper.X",
                                 "from shelf import X", "from .shelf.book import X"])
def test_an_edited_neighbour_is_read_again_in_the_same_process(mine, how):
    (shelf := mine.with_name("shelf")).mkdir()
    (shelf / "__init__.py").write_text("from .book import X")
    def imported(x):
        for path in (mine.with_name("helper.py"), shelf / "book.py"): path.write_text(f"X = {x}\nY = {x}")
        return import_file(mine)
    mine.write_text(how)
    one, two = imported(1), imported(22)
    assert (one.X, two.X) == (1, 22) and one.own_hash != two.own_hash and import_file(mine) is two

@pytest.mark.parametrize("file, how", [("helper.py", "import helper as h"), ("shelf/book.py", "import shelf.book as h"),
                                       ("shelf/__init__.py", "import shelf as h")])
def test_two_folders_may_have_a_neighbour_of_one_name(mine, file, how):
    (other := mine.parent / "other").mkdir()
    for folder, x in ((mine.parent, 1), (other, 2)):
        (folder / "shelf").mkdir()
        (folder / "shelf" / "__init__.py").write_text("")
        (folder / file).write_text(f"X = {x}")
        (folder / "mine.py").write_text(f"{how}\nX = h.X")
    assert [import_file(folder / "mine.py").X for folder in (mine.parent, other, mine.parent)] == [1, 2, 1]

def test_what_a_neighbour_registers_goes_when_the_neighbour_is_edited(mine):
    (other := mine.with_name("helper.py")).write_text(MINE)
    mine.write_text("import helper")
    import_file(mine)
    assert condition(OWN[0]).files
    other.write_text(MINE.replace('"bits"', '"pieces"'))
    import_file(mine)
    assert condition(OWN[0].replace("bits", "pieces")).files
    with pytest.raises(ValueError, match="task"): condition(OWN[0])

def test_the_librarys_own_conditions_have_no_file_in_their_key(mine):
    before = condition("add7/moe-e4k1-h256-silu").key
    import_file(mine)
    assert condition("add7/moe-e4k1-h256-silu").key == before == "58e3cee59d9e0ee9"
    assert condition("add7/ffn-h8-silu").files == {} and [*condition(OWN[0]).files] == [str(mine)]

# -------------------------------------------------------------------------------------------------------------- workers

def test_workers_in_other_processes_know_what_is_registered_and_give_the_same_bits(mine, tmp_path):
    import_file(mine)
    own = [OWN[1], OWN[3]]
    train(own, [1, 2], root=tmp_path / "here", executor="here", steps=50, **TRAIN)
    with local_executor(1) as pool:
        train(own, [1, 2], root=tmp_path / "there", executor=pool, steps=50, **TRAIN)
        found = run_study(study_of(mine), root=tmp_path / "s", executor=pool, quiet=True)
    for name in own: same_runs(tmp_path / "here", tmp_path / "there", name, (1, 2))
    assert found["value"].tolist() == [3., 3.]

SCRIPT = MINE + '''
if __name__ == "__main__":
    import sys
    from moe_redistribution.training.groups import train
    table = train("bits/moe-e4k2-h16-silu+cosine", [1, 2], root=sys.argv[1], executor=sys.argv[2], stream="paired",
                  until="full", quiet=True, group_size=1, steps=50)
    print(len(table))
'''

@pytest.mark.parametrize("executor", first(["here"], ["here", "local:2"]))
def test_a_script_that_registers_and_trains_shares_its_runs_with_whoever_imports_it(mine, tmp_path, executor):
    (script := mine.with_name("script.py")).write_text(SCRIPT)
    done = python(script, tmp_path / "s", executor)
    assert done.stdout.strip() == "2", done.stderr[-2000:]
    import_file(script)
    assert Training(OWN[1], (1, 2), "paired", "full", steps=50).is_done(Store(tmp_path / "s"))

def test_a_file_that_changes_while_a_job_waits_is_not_taken_for_the_one_that_was_meant(mine, tmp_path):
    import_file(mine)
    files = Training(OWN[0], (1,), "paired", "full").files
    mine.write_text(MINE + "\nmore = 1\n")
    kinds._forget(str(mine)), kinds.FILES.pop(str(mine))                               # as in a process that is new
    with pytest.raises(ValueError, match="expected the file as it was; got another, for it has changed since"):
        _carry_with(files, None, tmp_path / "s")

def test_a_comment_or_a_docstring_more_is_the_same_file(mine):
    import_file(mine)
    before = Training(OWN[0], (1,), "paired", "full").files
    mine.write_text(f'"""What it is for."""\n{MINE}  # and no more\n')
    import_file(mine)
    assert Training(OWN[0], (1,), "paired", "full").files == before

# -------------------------------------------------------------------------------------------------- notebook, session

def test_a_cell_that_is_run_again_takes_its_own_place_and_another_of_its_name_is_refused():
    cell = ("from moe_redistribution.models.routers import Router\n"
            "from moe_redistribution.basics.kinds import register\n@register('router', 'third')\n"
            "class Third(Router):\n    def logits(self, held, x, c):\n"
            "        return super().logits(held, x, c) / {}")
    session = {"__name__": "__main__"}
    try:
        for n in (3, 4): exec(cell.format(n), session)
        assert "this session" in {x["origin"] for x in kinds.registered_things("router")}
        assert condition("add7/moe-e2k1-h8-silu+third").files == {}
        with pytest.raises(ValueError, match="'third', which is taken"):
            exec(cell.replace("class Third", "class Fourth").format(4), session)
    finally: table_of("router").put("third", None, None)

def test_what_was_trained_says_of_which_code_a_registered_variant_or_event_is(mine, tmp_path):
    "A session has no file to hash: what it trained says of which code it is."
    import_file(mine)
    train(OWN[5], [1], root=tmp_path / "s", executor="here", **TRAIN)
    then = Store(tmp_path / "s").load(OWN[5], 1, "paired").manifest["source"]
    assert {"task", "reading", "router", "event halve", "training.loop"} <= {*then}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Store(tmp_path / "s").load(OWN[5], 1, "paired")

# --------------------------------------------------------------------------------------------- other machines' workers

def dask_pool(tmp_path):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None,
                                  host="127.0.0.1", silence_logs="CRITICAL") as cluster:
        yield f"dask://{cluster.scheduler_address.removeprefix('tcp://')}"

def batch_pool(tmp_path):
    jobs = pytest.importorskip("submitit").AutoExecutor(tmp_path / "logs", cluster="local")
    jobs.update_parameters(timeout_min=5)
    with JobPool(jobs, at_once=2) as pool: yield pool

@pytest.mark.audit
@pytest.mark.parametrize("made, name", [(dask_pool, OWN[1]), (batch_pool, OWN[3])])
def test_workers_on_other_machines_know_what_is_registered(made, name, mine, tmp_path):
    import_file(mine)
    train(name, [1, 2], root=tmp_path / "here", executor="here", group_size=1, **TRAIN)
    with contextmanager(made)(tmp_path) as pool:
        train(name, [1, 2], root=tmp_path / "far", executor=pool, group_size=1, **TRAIN)
    same_runs(tmp_path / "here", tmp_path / "far", name, (1, 2))

def test_a_job_carries_files_that_have_registered_something_and_no_others(mine):
    before = kinds.files_in_use()
    import_file(mine)
    assert kinds.files_in_use() == before | {str(mine): _own_digest(mine)}          # this file tried to, and was refused
    mine.write_text("x = 1")
    import_file(mine)
    assert kinds.files_in_use() == before

def test_an_instrument_of_the_library_is_taken_before_its_room_is_imported():
    "What is only found on request was free for whoever came first; then its own room could not be imported."
    ask = ("from moe_redistribution.basics.kinds import register\n"
           "for kind, name in (('instrument', 'ablation'), ('command', 'train')):\n"
           "    try: register(kind, name, print, **dict(about='', example='') if kind == 'command' else {})\n"
           "    except ValueError as e: print(e)\n"
           "from moe_redistribution.basics.kinds import table_of\n"
           "print(len(table_of('instrument')) > 10, len(table_of('command')) > 10)")
    done = python("-c", ask)
    assert "name of an instrument: expected a new one; got 'ablation', which is taken" in done.stdout
    assert "name of a command: expected a new one; got 'train', which is taken" in done.stdout
    assert "True True" in done.stdout                                # what was imported on the way is not taken back

BORN_AGAIN = MINE + """
from moe_redistribution.training.groups import train
with open("begun", "a") as f: f.write("x")
train("bits/ffn-h16-silu", [1, 2], root="store", executor="local:2", quiet=True, group_size=1, steps=50)
"""

def test_a_file_that_trains_with_workers_where_it_is_imported_is_refused_and_does_not_double_its_processes(tmp_path):
    "Each worker imported the file, and began two workers more."
    (tmp_path / "again.py").write_text(BORN_AGAIN)
    done = python("-m", "moe_redistribution", "kinds", "--import", "again.py", cwd=tmp_path)
    assert done.returncode == 2 and "import again.py: executor 'local:2': expected \"here\" in a worker" in done.stderr
    assert "__main__" in done.stderr and len((tmp_path / "begun").read_text()) <= 3, done.stderr
