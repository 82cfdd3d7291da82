"""What a user brings, held to eight properties: for each kind of thing files that break one, and odd ones that are right."""
import linecache
import random
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

from moe_redistribution.evidence.questions import Question
from moe_redistribution.guard.users_instruments import checked_rows
from moe_redistribution.guard.properties import Unchecked
from moe_redistribution.guard.rehearsal import rehearse, _try_out
from moe_redistribution.instruments.instrument import guarded, instrument
from moe_redistribution.instruments.rows import rows, tidy
from moe_redistribution.models.condition import condition
from moe_redistribution.models.population import forward, init
from moe_redistribution.models.routers import ROUTERS, Router
from moe_redistribution.record.cli import main
from moe_redistribution.basics import kinds
from moe_redistribution.basics.kinds import import_file
from moe_redistribution.basics.own_code import reads
from moe_redistribution.training.store import Store
from moe_redistribution.training.study import Preset, Study, run_study, study_jobs
from tiers import first
from toys import untrained

# ------------------------------------------------------------------------------ tasks, routers, FFNs, events: a rehearsal

HEAD = """import numpy as np, pandas as pd, torch, random, time
from dataclasses import dataclass, replace
from moe_redistribution.models.condition import RECIPES
from moe_redistribution.models.events import Event
from moe_redistribution.models.routers import Inputs, Router, Tokens
from moe_redistribution.models.variants import Gated, Variant
from moe_redistribution.basics.kinds import register
from moe_redistribution.tasks.task import Task, get_task
own = np.random.default_rng(0)
times, seen, table = 0, [], {"n": 0}
"""
MIXED, DENSE, EVENT = "add7/moe-e4k1-h16-silu+mine+d16", "add7/mine-h16-silu+d16", "add7/ffn-h16-silu+d16@200:mine"

def router(body, base="Router", more=""): return f'{more}\n@register("router", "mine")\nclass Mine({base}):\n    {body}', MIXED
def variant(body, name=DENSE): return f'@register("variant", "mine")\nclass Mine(Variant):\n    {body}', name
def event(body, name=EVENT): return f'@register("event", "mine")\nclass Mine(Event):\n    {body}', name

def task(change, hold=""):
    "Add-7 with something else about it."
    made = f"t = get_task('add7'); n = t.strata['n'].to_numpy()\n    return replace(t, name='mine', {change})"
    return (f"@register('task', 'mine', recipe=RECIPES['add7'], rules=('first1000',))\ndef mine():\n    {made}",
            f"mine/ffn-h16-silu{hold}")

LOGITS = "def logits(self, held, x, c): return"
OUT = f"{LOGITS} super().logits(held, x, c)"
HIDDEN = "def hidden(self, product, act, at): return at('hidden', act(product('W_up'))"
AFTER = "def after(self, params, look, c): "
APPLY = "def apply(self, c, now, began, moments): "
BEGIN = "def begin(self, p, c, t, g): return "
BEGIN_FFN = "def begin(self, c, linear): return {n: "
ALONE, AGAIN = "of a seed in any company", "of a seed whenever it comes"
PLACE, NOTHING = "reaches no weight", "nothing happens"
SCALED, FIELD = "add7/ffn-h16-silu+d16@200:scale5", ("pattern, example = r'scale(\\d+)', 'scale3'\n    "
                 "word = property(lambda self: f'scale{self.by}')\n    ")
CHOOSE = ("def gates(self, probs, held, c):\n        n = max(1, probs.shape[1] * c.top_k // c.n_experts)\n"
          "        return probs * torch.zeros_like(probs).scatter(1, probs.topk(n, 1).indices, 1)\n"
          "    def balance(self, probs, g, c): return probs.new_zeros(len(probs))")

WRONG = {
    "experts that choose, and do not say so": (*router(CHOOSE), "by_batch = True, so that it is asked for all inputs together"),
    # members that see one another
    "the first member decides": (*router(f"{LOGITS} super().logits(held[:1].expand_as(held), x, c)"), ALONE),
    "a norm over members": (*variant(f"{HIDDEN} / product('W_up').norm(dim=0))"),
        "company|by itself|short and the plain"),
    "an event that counts members": (*event("def apply(self, c, now, began, moments):\n        seen.append(1)\n        "
                                            "now['W_down'].mul_(len(seen))"), AGAIN),
    # what comes later
    "an FFN that mixes positions": (*variant(
        "def hidden(self, product, act, at):\n        h = act(product('W_up'))\n        "
        "return at('hidden', h + h.mean(2, True) if h.dim() == 5 else h)"), "short and the plain|causal"),
    # chance, and what is kept
    "torch's numbers in logits": (*router(f"{OUT} + torch.randn(4)"), AGAIN),
    "chance in an event": (*event(APPLY + "now['W_down'].add_(torch.randn_like(now['W_down']))"), AGAIN),
    # in place
    "an event that puts a new name": (*event(APPLY + "now.update(W_dwon=now['W_down'] / 2)"), PLACE),
    "an after that puts another": (*router(AFTER + "params.update(W_router=params['W_router'] * .9)"), PLACE),
    # what a name says
    "two experts for all": (*router("def gates(self, probs, held, c): return probs * torch.zeros_like(probs).scatter("
                                    "-1, probs.topk(2).indices, 1)"), "got 2 for each one; nearest valid: -e4k2"),
    "no gates": (*router("def gates(self, probs, held, c): return probs * 0"), "got 0 for each"),
    "probabilities that sum to 4": (*router("def probs(self, l, held, c): return l.softmax(-1) * 4"), "sums up to 4"),
    "one draw for all seeds": (*router(
        BEGIN + "torch.randn(p['W_router'].shape, generator=torch.Generator().manual_seed(0))"),
                               "say shared = True"),
    "one table for all seeds": (*router(
        "redraws = True\n    def drawn(self, shape, seed, step): return torch.randn(shape, "
                                        "generator=torch.Generator().manual_seed(step))", "Tokens"),
                                            "routes of a step"),
    "an FFN of ones": (*variant(BEGIN_FFN + "torch.ones_like(x) for n, x in super().begin(c, linear).items()}"),
                       "draw by linear"),
    "a gate that takes no part": ("@register('variant', 'mine')\nclass Mine(Gated):\n    "
                                  "def hidden(self, product, act, at): return at('hidden', act(product('W_up')))",
                                      DENSE,
                                  "gradient of W_gate"),
    "gates without a gradient": (*router(
        "def gates(self, probs, held, c): return torch.zeros_like(probs).scatter(-1, probs.topk(1).indices, 1)\n    "
        "def balance(self, probs, g, c): return probs.new_zeros(len(probs))"), "or say learns = False"),
    "a number that no field keeps": (*event(
        f"{FIELD}@classmethod\n    def read(cls, step, found):\n        e = cls(step)\n"
        "        object.__setattr__(e, 'by', int(found[1]))\n        return e", SCALED), "keep the number in a field"),
    "edits that are dropped": (*variant(
        "def hidden(self, product, act, at):\n        h = act(product('W_up'))\n        at('hidden', h)\n        return h"),
        "a site whose edits come through"),
    # what raises
    "a router that raises": (*router("def logits(self, held, x, c): return x['W']"), "fix: mend mine.py, line 1[0-9]")}
RIGHT = {
    "experts that choose, and say so": router("by_batch = True\n    " + CHOOSE),
    "a table of ones own": router(BEGIN + "torch.randn(c.n_layers, *self.shape(c, t), generator=g)", "Tokens"),
    "a position's": router("shared = True\n    " + BEGIN + "torch.ones(c.n_layers, *self.shape(c, t)).cumsum(-1)",
        "Tokens"),
    "as many experts as it needs": router(
        "def probs(self, l, held, c): return l.relu()\n    def gates(self, probs, held, c): return probs\n    "
        "def balance(self, probs, g, c): return probs.mean((1, 2, 3))"),
    "a bias": router("def after(self, params, look, c):\n        params['W_router'].mul_(.99)"),
    "a map that shrinks where one expert has all": router(
        "def after(self, params, look, c):\n        for w, g in zip(params['W_router'], look()['gates']):\n            "
        "if g.mean((0, 1)).max() > .9: w.mul_(.99)"),
    "what it heard last": router(
        "heard = None\n    def logits(self, held, x, c):\n        type(self).heard = x.mean()\n        "
                                 "return super().logits(held, x, c)"),
    "a count that nobody asks for": router("def logits(self, held, x, c):\n        table['n'] += 1\n        "
                                           "return super().logits(held, x, c)"),
    "tables that it keeps at hand": router(
        "def logits(self, held, x, c):\n        table.setdefault(len(x), x.shape)\n        "
                                           "return super().logits(held, x, c)"),
    "a time limit": router("def logits(self, held, x, c):\n        assert time.time() - began < 3600\n        "
                           "return super().logits(held, x, c)", more="began = time.time()"),
    "a precision of its own": router(OUT, more="torch.set_float32_matmul_precision('high')"),
    "a bootstrap that is seeded": router(BEGIN + "np.random.seed(3) or p['W_router'] * float(np.random.rand())"),
    "noise by its door": router("def noisy(self, l, held, x, c, draw): return l + draw(torch.randn, *l.shape[1:])"),
    "an FFN with an output of zeros": variant(
        BEGIN_FFN + "x * (n[2] != 'd') for n, x in super().begin(c, linear).items()}"),
    "a number in a field": event(
        f"{FIELD}by: int = 3\n    @classmethod\n    def read(cls, step, found): return cls(step, int(found[1]))\n    "
        + APPLY + "now['W_down'].mul_(self.by)", SCALED),
    "a rate alone": event("def scales(self, own): return own | dict(W_E=.5)"),
    "units that are dead": event(APPLY + "(now['W_up'].norm() < 1e-3) and now['W_up'].copy_(began['W_up'])"),
    "a rule": task("rules={'odd': n % 2 == 1}", "+hold_odd"),
        "no doors": task("by=(), guesses={}, cycles={}, groups=()")}
TEXT = RIGHT["a number in a field"][0]
RIGHT["a number in a field"] = TEXT.replace("class Mine", "@dataclass(frozen=True)\nclass Mine"), SCALED

WORD = {                                               # what is let pass with a word: there may be a reason
    "an event in a variable of its own": (*event(APPLY + "now = {n: x / 2 for n, x in now.items()}"), NOTHING),
    "an event with other data": (*event(APPLY + "setattr(now['W_down'], 'data', now['W_down'] / 2)"), NOTHING),
    "one noise for all seeds": (*event(APPLY + "now['W_down'].add_(torch.ones_like(now['W_down']))"), "the same numbers added"),
    "gates left where they were sorted": (*router(
        "def gates(self, probs, held, c): return probs * torch.eye(4)[0] + probs * 0"), "gates that change places|probable")}

@pytest.fixture
def mine(own_file): return own_file

def asked(path, text, name):
    path.write_text(HEAD + text)
    import_file(path)
    rehearse(condition(name))

@pytest.mark.parametrize("text, name, says", WRONG.values(), ids=WRONG)
def test_what_would_give_a_wrong_number_is_refused_in_one_message(mine, text, name, says):
    chance = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    with pytest.raises(ValueError, match=says) as e: asked(mine, text, name)
    said = str(e.value)
    assert said.count("; fix: ") == 1 and "expected" in said and "\n" not in said
    assert chance[0].equal(torch.get_rng_state()) and chance[1:] == (str(np.random.get_state()), random.getstate())

SOME = ["experts that choose, and say so", "a table of ones own", "as many experts as it needs", "a bias", "what it heard last",
        "a bootstrap that is seeded", "noise by its door", "an FFN with an output of zeros", "a number in a field", "a rule"]

@pytest.mark.parametrize("text, name", first([RIGHT[n] for n in SOME], RIGHT.values()), ids=RIGHT)
def test_what_is_right_is_let_pass(mine, text, name): asked(mine, text, name)

@pytest.mark.parametrize("text, name, says", WORD.values(), ids=WORD)
def test_what_may_be_meant_is_let_pass_with_a_word(mine, text, name, says):
    with pytest.warns(UserWarning, match=says): asked(mine, text, name)

ROUTED = "add7/moe-e4k1-h16-silu+d16", "modadd/moe_glu-e4k2-h16-gelu", "add7/moe-e2k1-h8-silu+d16+L2"
WORDS = [w for w in ROUTERS if w != "none"]

@pytest.mark.parametrize("word, name", first([*zip(WORDS, ROUTED * len(WORDS))], [(w, n) for w in WORDS for n in ROUTED]))
def test_every_router_of_the_library_passes(word, name): _try_out(condition(name if word == "learned" else f"{name}+{word}"))

def test_every_variant_and_event_of_the_library_passes():
    for name in ("no_ffn", "glu-h8-silu", "ffn-h8-relu@200:reset0.5,attn,fresh@400:ffnlr2",
                 "moe-e4k2-h16-silu@200:router1@400:onlyexperts_router", "moe-e4k4-h16-silu",
                     "moe-e4k1-h16-silu+freeze_ffn"):
        _try_out(condition(f"add7/{name}"))

def test_a_task_that_raises_is_no_bug_of_ours_on_the_command_line(mine, capsys):
    mine.write_text(HEAD + task("tokens=t.tokns")[0])
    assert main(["train", "--import", str(mine), "mine/ffn-h16-silu", "--seeds", "1"]) == 2
    assert "mend mine.py, line" in (err := capsys.readouterr().err) and "bug of ours" not in err

def test_an_error_in_a_users_own_command_names_its_line(mine, capsys, monkeypatch):
    from moe_redistribution.record import cli
    mine.write_text(HEAD + "register('family', 'mine', __import__('moe_redistribution.opened.families')"
                           ".opened.families.Family())\ndef act(args): return {}['x']")
    act = import_file(mine).act
    monkeypatch.setattr(cli, "_run", act)
    assert main(["conditions"]) == 2 and "KeyError: 'x'; fix: mend mine.py, line" in capsys.readouterr().err

BACKWARDS = '''
@register("task", "backwards", recipe=dict(RECIPES["add7"], d_model=16, d_head=8, batch=32), rules=("first99",))
def backwards():
    draw, n, most = np.random.RandomState(0), 1500, 6
    long = draw.randint(2, most + 1, n)
    asked, answer = np.full((n, most), 8), np.full((n, most), 8)
    for i, k in enumerate(long):
        word = draw.randint(0, 8, k)
        asked[i, most - k:], answer[i, :k] = word, word[::-1]
    whole = torch.from_numpy(np.concatenate([asked, np.full((n, 1), 9), answer], 1))
    return Task("backwards", d_vocab=10, d_vocab_out=9, causal=True, tied=False, read=tuple(range(6, 12)), scored=(0, 1),
                positions=tuple(f"o{i}" for i in range(6)), vocab=(*"abcdefgh", "_", "="), tokens=whole[:, :-1].contiguous(),
                targets=whole[:, 7:].contiguous(), strata=pd.DataFrame({"length": long}), by=("length",))
'''

def test_loads_that_are_even_by_chance_are_no_fault_of_the_task(mine):
    "With exactly even loads a balance loss has no gradient: the library's own router was refused in a user's name."
    text = "import pandas as pd\nfrom moe_redistribution.models.condition import RECIPES\n" + BACKWARDS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked(mine, text, "backwards/moe-e2k1-h32-silu")

def test_a_traceback_that_quotes_the_users_file_is_no_reading_of_it_and_an_import_in_mid_work_is_one(mine, monkeypatch):
    "`torch.manual_seed` formats a traceback: it was refused as a file read in mid-work. What is read there is in no key."
    (mine.parent / "late_helper.py").write_text("K = 3\n")
    monkeypatch.syspath_prepend(mine.parent)
    def begun(said):
        linecache.clearcache()
        text, name = variant(f"def begin(self, c, linear):\n        {said}\n        return super().begin(c, linear)")
        mine.write_text(HEAD + text)
        import_file(mine)
        with reads("rehearsal of mine"): rehearse(condition(name))
    begun("__import__('traceback').format_stack()")
    kinds._forget(str(mine))
    with pytest.raises(ValueError, match="late_helper.py, opened in mid-work"): begun("import late_helper")

DEEP = """
@register("variant", "mine")
class Mine(Variant):
    def hidden(self, product, act, at): return at("hidden", product("W_up").relu() ** 2)
"""

@pytest.mark.parametrize("layers", [1, 3, 6])
def test_own_code_of_many_layers_is_let_pass_without_a_norm(mine, layers):
    "Weights a little on made activations grow from layer to layer, until an edit of a site was too small to be seen."
    asked(mine, DEEP, f"add7/mine-h16-linear+d16+L{layers}")

def test_a_rule_that_chance_made_holds_out_other_examples_in_another_process_and_is_refused(mine):
    with pytest.raises(ValueError, match="rule odd of mine: .* others the second time"):
        asked(mine, *task("rules={'odd': np.random.rand(1000) < .5}", "+hold_odd"))

def test_a_gap_in_a_column_that_nothing_is_split_by_is_the_same_gap_the_second_time(mine):
    "A gap is not equal to itself: a right task was refused as one that chance makes."
    asked(mine, *task("strata=t.strata.assign(note=np.where(n < 9, np.nan, n))"))

OF_EACH = """
@register("router", "mine_a")
class A(Router): "As it is."
@register("event", "mine_a")
class B(Event):
    def apply(self, c, now, began, moments): now["W_down"].mul_(.5)
@register("instrument", "mine_a")
def norms(params, c, seeds, **labels): ...
register("task", "mine_a", lambda: replace(get_task("add7"), name="mine_a"), recipe=RECIPES["add7"], rules=("first99",))
from moe_redistribution.training.study import Preset, Study
register("study", "mine_a", Study("mine_a", "", {"small": Preset("", {"a": (1,)})}, lambda *x: None, lambda *x: 1.))
get_task("mine_a")
"""

def test_a_file_that_registers_one_of_each_kind_is_imported_by_a_process_that_has_nothing_yet(tmp_path):
    "What the library keeps for itself meanwhile was taken for a change of it: a study's file was refused."
    (tmp_path / "mine.py").write_text(HEAD + OF_EACH)
    said = f"from moe_redistribution.basics.kinds import import_file; import_file({str(tmp_path / 'mine.py')!r})"
    assert subprocess.run([sys.executable, "-W", "error", "-c", said], capture_output=True, text=True).stderr == ""

# --------------------------------------------------------------------------------------------------------- instruments, questions, studies

NAME, SEEDS = "add7/ffn-h8-silu", [1, 2, 3]
def some(name): return untrained(name, SEEDS)
PARAMS = some(NAME)
SMALL = "add7/ffn-h8-silu+d16"

# --------------------------------------------------------------------------------------------------------- instruments

def norms(p): return p["W_E"].flatten(1).norm(dim=1)
def table(values, seeds, c, **how): return rows(values, seeds, **dict(condition=str(c), metric="mine") | how)

def changes_in_numpy(p, c, seeds, **how):
    p["W_E"].numpy()[0] = 0
    return table(norms(p), seeds, c, **how)

def renames(p, c, seeds, **how):
    p["W_U"] = p["W_E"]
    return table(norms(p), seeds, c, **how)

def patches(p, c, seeds, **how):
    Router.logits = lambda self, held, x, c: 0
    return table(norms(p), seeds, c, **how)

BAD = {                                                   # an instrument → what its refusal says
    "other seeds": (lambda p, c, s, **how: table(norms(p), [x + 1 for x in s], c, **how), "rows of seed 1, 2, 3"),
    "two in the middle": (lambda p, c, s, **how: table(norms(p)[[0, 2, 1] if len(s) == 3 else [0, 1]], s, c, **how),
                          "made twice"),
    "averaged": (lambda p, c, s, **how: table(norms(p).mean().expand(len(s)), s, c, **how), "made twice"),
    "by chance": (lambda p, c, s, **how: table(torch.rand(len(s)), s, c, **how), "made twice"),
    "another condition": (lambda p, c, s, **how: table(norms(p), s, "add7/no_ffn", **how), "of condition add7/ffn"),
    "no rows": (lambda p, c, s, **how: table(norms(p), s, c, **how)[:0], "expected a frame of rows; got none"),
    "an error": (lambda p, c, s, **how: p["W_e"], "KeyError: 'W_e'; fix: mend test_guard.py, line"),
    "in NumPy": (changes_in_numpy, "weights and examples"),
    "names of weights": (renames, "weights and examples as they were"),
    "the library": (patches, "routers.Router.logits replaced; it is put back")}

@pytest.mark.parametrize("f, says", BAD.values(), ids=BAD)
def test_an_instrument_that_is_wrong_is_refused_by_name_at_its_first_use(f, says):
    params = {n: v.clone() for n, v in PARAMS.items()}
    with pytest.raises(ValueError, match=says) as e:
        checked_rows(f, "mine")(params, NAME, SEEDS, stream="paired", rule="final")
    assert str(e.value).count("; fix: ") == 1

@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("word", ["averaged", "by chance"])
def test_one_seed_or_two_are_enough_to_see_it(word, n):
    if (n, word) == (1, "averaged"): pytest.skip("one seed's mean is its own")
    with pytest.raises(ValueError, match="made twice"):
        checked_rows(BAD[word][0])({k: v[:n] for k, v in PARAMS.items()}, NAME, SEEDS[:n], stream="paired")

def test_a_right_instrument_is_carried_out_and_those_of_the_library_are_as_they_are():
    right = checked_rows(lambda p, c, s, **how: table(norms(p), s, c, **how))
    for seeds in (SEEDS, SEEDS[:1], SEEDS[::-1]):
        assert len(right({k: v[:len(seeds)] for k, v in PARAMS.items()}, NAME, seeds, stream="paired")) == len(seeds)
    assert guarded(init) is init

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
           "an error": (lambda arm, seeds, s: s["N"], 2, "KeyError: 'N'; fix: mend test_guard.py, line"),
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

