"""What is committed under results/ and checkpoints/ is what the code makes of the runs, and what the pages say of
it."""
import os
import random
import re
import shutil
import signal
import time
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as parquet
import pytest
import torch

from moe_redistribution.record.elsewhere import recorded_elsewhere
from moe_redistribution.record import cli, ledger, models, recording
from moe_redistribution.record.coverage import _by_id
from moe_redistribution.evidence import (claims as claims_room, credit, table_files, checkpoints, selection, design,
                                         printed, registrations)
from moe_redistribution.report import recorded_claims as findings
from moe_redistribution.opened import streaming
from moe_redistribution.instruments.ablation import ablate, whole_answer
from moe_redistribution.instruments.instrument import instruments
from moe_redistribution.instruments.measuring import rules_for
from moe_redistribution.opened.families import tiny_model
from moe_redistribution.record.cli import main
from moe_redistribution.studies.sparsity_moves.arms import ARMS, LABELS, TABLE1
from moe_redistribution.models.condition import RECIPES
from moe_redistribution.tasks.data import SEEDS
from moe_redistribution.evidence.contrasts import COMPARE_COLUMNS, comparison
from moe_redistribution.report.pages import Page, page_hash, _stale_pages, _stored_pages
from moe_redistribution.studies.sparsity_moves.reading import _recorded_checkpoints
from moe_redistribution.studies.sparsity_moves.study import STUDY
from moe_redistribution.report.figures import pick
from moe_redistribution.training.groups import train
from moe_redistribution.basics.files import Damaged, _listed_hashes, of_clone
from moe_redistribution.training.store import Store
from moe_redistribution.studies.sparsity_moves.experiments import conditions_for
from moe_redistribution.training.bench import keep
from moe_redistribution.tasks.task import digits, get_task
from tiers import first

PAGES = {Path(p).stem: page for p, (page, _) in _stored_pages().items() if p.startswith("10_studies/")}
PAGE = "42_partitioning"
SCORED = [(TABLE1["FFN"], "first256"), (TABLE1["MoE"], "first256")]           # all of them by `make audit`

@pytest.fixture(scope="module")
def rows():
    return PAGES[PAGE].rows

def no_ffn(rows, name, edit="zero"):
    return pick(rows, condition=name, rule="first256", site="ffn_out", edit=edit)["value"]

def test_no_page_is_stale_and_each_prints_the_hash_of_what_it_stands_on():
    "Every page of results stores what it read; what is stored is what would be read now."
    assert not (stale := _stale_pages()), f"make pages: {stale}"
    there = {p.stem for p in (table_files.ROOT / "nbs/10_studies/sparsity_moves").glob("[1-9]*.ipynb")}
    assert there <= set(PAGES), f"no `Opening(page)` on {sorted(there - set(PAGES))}"
    for path, (_, was) in _stored_pages().items():
        text = (table_files.ROOT / "nbs" / path).read_text(encoding="utf-8")
        if path.startswith("10_studies/"): assert set(re.findall(r"with hash `([0-9a-f]{12})`", text)) <= {was}, path

@pytest.mark.audit
def test_the_manifest_says_what_the_tables_hold():
    pd.testing.assert_frame_equal(table_files.manifest(), table_files.manifest_of(), check_dtype=False,
                                  obj="results/manifest.csv")

def test_everything_that_is_recorded_shown_or_served_is_covered_by_its_hash():
    said = (table_files.ROOT / "SHA256SUMS").read_text(encoding="utf-8")
    assert said == table_files._sums(), "make sums, if the change was meant; git checkout, if not"

@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    "What is committed under data/ and results/, with its hashes, as the repository of a package of its own."
    root = tmp_path_factory.mktemp("copied")
    for part in ("data", "results"): shutil.copytree(table_files.ROOT / part, root / part)
    shutil.copy(table_files.ROOT / "SHA256SUMS", root)
    with pytest.MonkeyPatch.context() as patch:
        for room in (printed, claims_room, registrations, findings): patch.setattr(room, "DATA", root / "data")
        yield root

READERS = {                        # paths under a root: what reads such a file; where nothing does, its check
    "results/paper/*": lambda root, p: (findings.numbers(p.stem), _by_id(root=root)),
    "results/rows/*": lambda root, p: table_files.read_table(p.parent.name, f"{p.stem}/x", root=root),
    "results/history/*": lambda root, p: table_files.read_table("history", f"{p.stem}/x", root=root),
    "results/runs/*": lambda root, p: selection.recorded_runs(root),
    "results/ledger.md": lambda root, p: of_clone(p),
    "results/ledger.csv": lambda root, p: findings.recorded_ledger(root),
    "results/registrations.csv": lambda root, p: registrations.registrations(p),
    "results/manifest.csv": lambda root, p: table_files.manifest(root),
    "results/bench.csv": lambda root, p: keep(dict(condition="x"), p),
    "results/smollm2.csv": lambda root, p: of_clone(p), "results/replaced.csv": lambda root, p: of_clone(p),
    "results/changed.csv": lambda root, p: findings.former_verdicts("4.2-05"),
    "results/contrasts.csv": lambda root, p: page_hash(Page(files=["results/contrasts.csv"], root=root)),
    "data/deviations.csv": lambda root, p: of_clone(p), "data/others.csv": lambda root, p: recorded_elsewhere(root),
    "data/credits.csv": lambda root, p: credit.credits(p), "data/controls.csv": lambda root, p: credit.controls(p),
    "data/block/before.csv": lambda root, p: of_clone(p),
    "data/*/trials.csv": lambda root, p: page_hash(Page(files=["data/*/trials.csv"], root=root)),
    "data/*/pilots.csv": lambda root, p: registrations._pilots(root / "data"),
    "data/*/statements.csv": lambda root, p: claims_room.statements(),
    "data/*/SHA256SUMS": lambda root, p: printed.paper_values(),
    "data/*": lambda root, p: claims_room.claims()}

def test_one_flipped_bit_in_any_committed_file_is_refused_by_what_reads_it(copied):
    luck, names = random.Random(0), [n for n in _listed_hashes(copied / "SHA256SUMS")
                                     if n.startswith(("data/", "results/"))]
    known, _ = claims_room.claims(), findings.claim("4.1-01")        # what is kept from before answers for nothing
    for name in names:
        read = next(r for part, r in READERS.items() if fnmatch(name, part))
        good = bytearray((path := copied / name).read_bytes())
        good[at := luck.randrange(len(good))] ^= (bit := 1 << luck.randrange(8))
        path.write_bytes(good)
        with pytest.raises(Damaged, match=f"^{re.escape(name)}: expected .*; fix: git checkout -- .*make sums"):
            read(copied, path)
        good[at] ^= bit
        path.write_bytes(good)
    assert len(names) > 130 and claims_room.claims().equals(known)

def test_definitions_that_changed_without_a_word_are_refused_where_they_are_counted_and_checked(copied):
    for name in ("claims", "statements"):
        good = (path := copied / f"data/parrots/{name}.csv").read_bytes()
        path.write_bytes(good.replace(b"mean", b"zero", 1))
        for read in (registrations._definitions, registrations.unregistered_lines, design.check_design):
            with pytest.raises(Damaged, match=f"data/parrots/{name}.csv: expected"): read()
        path.write_bytes(good)

def test_the_largest_page_reads_its_rows_in_about_a_second():
    began = time.process_time()
    assert len(Page(**PAGES["52_speed"].wish).rows) > 500_000 and time.process_time() - began < 3

@pytest.mark.parametrize("page", first([PAGE], [p for p, x in PAGES.items() if x.items]))
def test_comparisons_are_recomputed_from_the_rows_to_the_byte(page, tmp_path):
    rows = PAGES[page].rows
    for item in PAGES[page].items.split():
        recording.write_frame(comparison(rows, item), tmp_path / "again.csv")
        assert ((tmp_path / "again.csv").read_bytes()
                == (table_files.ROOT / f"results/paper/{item}.csv").read_bytes()), "make record"

def test_audited_numbers_about_where_structure_is_leave_out_the_models_that_never_learned():
    rows, runs = (selection.item_rows("fig5_caption"),
                  selection.recorded_runs().set_index(["condition", "stream", "seed"]).sort_index()["first99_value"])
    audited = comparison(rows, "fig5_caption").query("protocol == 'audited'").set_index("id")
    for line in audited.dropna(subset="ours_n").itertuples():
        assert line.ours_n == (runs.loc[line.condition, "authors"].loc[list(SEEDS)] > .5).sum(), line.Index
    assert audited["ours_n"].min() < len(SEEDS) and audited["reason"].str.contains("never learned the task").any()

def test_a_rule_that_no_run_answers_has_no_rows_and_leaves_seeds_whole_numbers():
    early = selection.recorded_runs().query("condition == 'modadd/moe_glu-e4k1-h512-gelu' and step < 40_000 "
                                          "and not settled")
    got = selection.run_rows(early)
    assert len(early) and set(got["rule"]) == {"first99"} and pd.api.types.is_integer_dtype(got["seed"])

def test_all_eighteen_cells_of_table_1_and_all_bars_of_figure_1_are_answered():
    tab1, fig1 = (pd.read_csv(table_files.ROOT / f"results/paper/{i}.csv").query("protocol == 'paper'")
                  for i in ("tab1", "fig1"))
    assert list(tab1.columns) == COMPARE_COLUMNS and len(tab1) == 18
    bars = fig1[fig1["metric"] == "no_ffn_acc"]
    assert len(bars) == 6 and tab1["ours_n"].eq(5).all() and bars["ours_n"].eq(5).all()
    assert not set(tab1["verdict"]) & {"not attempted"}

@pytest.mark.parametrize("name, rule", first(SCORED, _recorded_checkpoints()))
def test_every_canonical_checkpoint_loads_and_scores_what_was_counted_when_it_was_written(name, rule):
    """Within two predictions of the count on the stored weights, half precision or not; and near the row of the run
    itself."""
    t, params, seeds = (get_task(name.split("/")[0]), checkpoints.checkpoint(name, rule),
                        checkpoints.checkpoint_seeds(name, rule))
    assert seeds == [s for s in SEEDS if s in seeds] and (seeds == list(SEEDS) or t.name != "add7")
    assert len(params["W_E"]) == len(seeds) and {v.dtype for v in params.values()} == {torch.float32}
    said = pd.read_csv(table_files.ROOT / "checkpoints/right.csv").query("condition == @name and rule == @rule")
    again = checkpoints.right_answers(params, name, seeds)
    assert again["seed"].tolist() == said["seed"].tolist() == seeds and again["of"].eq(said["of"].iloc[0]).all()
    assert (again["right"].to_numpy() - said["right"].to_numpy()).__abs__().max() <= 2
    for site, edit in [("none", "none"), ("ffn_out", "zero")][:1 if "no_ffn" in name else 2]:
        got = digits(ablate(params, name, {} if site == "none" else {site: edit}), t).double().numpy()
        rows = pick(selection.recorded_rows(name), condition=name, rule=rule, site=site, edit=edit,
                    position=whole_answer(t),
                    split="all")
        row = rows.set_index("seed")["value"].loc[seeds].to_numpy()
        assert np.abs(got - row).max() <= (2.1 / again["of"].iloc[0] if t.name == "add7"
                                           else .005), (site, "fp16 costs little")

def test_the_list_of_canonical_checkpoints_is_what_lies_there():
    there = {p.relative_to(table_files.ROOT / "checkpoints").as_posix()
             for p in (table_files.ROOT / "checkpoints").rglob("*.safetensors") if "zoo" not in p.parts}
    assert there == {f"{n}.{r}.safetensors" for n, r in _recorded_checkpoints()} and len(there) >= 10
    assert sum((table_files.ROOT / "checkpoints" / p).stat().st_size for p in there) <= 35e6

def test_five_seeds_lie_where_eight_trial_seeds_lay(rows):
    """Trials with 8 other seeds, before this code existed: zero-ablated FFN and attention in percent, and the two
    arms."""
    trials = {TABLE1["FFN"]: (9.8, 32.1), TABLE1["Narrow FFN"]: (26.2, 23.2), TABLE1["MoE"]: (48.0, 17.3),
              TABLE1["MoE, frozen router"]: (43.8, 17.9)}
    checks = [(n, site, "zero", v) for n, pair in trials.items() for site, v in zip(("ffn_out", "attn_out"), pair)]
    for arm, zero, mean in (("FFN, lr × ¼", 49, 67), ("MoE, lr × 4", 21, 48)):
        checks += [(ARMS[arm], "ffn_out", "zero", zero), (ARMS[arm], "ffn_out", "mean", mean)]
    for name, site, edit, trial in checks:
        x = pick(rows, condition=name, rule="first256", site=site, edit=edit)["value"]
        tolerance = 2 * np.sqrt(x.var() / 5 + x.var() / 8)
        assert abs(x.mean() - trial / 100) <= max(tolerance, .005), (name, site, edit, x.mean(), trial)

@pytest.mark.audit
@pytest.mark.parametrize("whole", [False, True], ids=["two instruments", "everything"])
def test_recording_the_same_runs_gives_the_same_bytes_whichever_night_they_came_in(tmp_path, monkeypatch, whole):
    """All five at once in one place; the second two and then all in another.

    A second recording of the same store writes no run again."""
    name, paper = f"add7/ffn-h{64 if whole else 8}-silu", STUDY
    if not whole:
        two = {i: instruments()[i] for i in ("ablation", "copying")}
        paper = replace(paper, measured=lambda c: two)
        for table in ("ledger", "contrast_table"):
            monkeypatch.setattr(ledger, table, lambda root: pd.DataFrame(dict(key=[])))
    store, night = Store(tmp_path / "store"), Store(tmp_path / "night")
    paper = replace(paper, presets={"small": replace(STUDY.presets["small"], arms={name: SEEDS})})
    train(name, root=store.root, steps=400, executor="here", quiet=True)
    for seed in SEEDS[1:3]: night.save(store.load(name, seed))
    monkeypatch.setattr(recording, "canonical", lambda: [(name, "first256")])
    monkeypatch.setattr(recording, "known_studies", lambda: {paper.name: paper})
    monkeypatch.setattr(ledger, "paper_items", lambda: ["tab1"])
    go, both = lambda *a: recording._record(*a, say=lambda text: None), []
    go(night, tmp_path / "b")
    for place in (tmp_path / "a", tmp_path / "b"):
        go(store, place)
        both.append({p.relative_to(place).as_posix(): p.read_bytes()
                     for p in sorted(place.rglob("*")) if p.is_file() and not p.name.startswith(".")})
    measured = {p.split("/")[2] for p in both[0] if p.startswith("results/rows/")}
    assert both[0] == both[1] and measured == {*recording.recorded_with(paper, name)}
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*.safetensors")}
    assert not [p for p in go(store, tmp_path / "a") if p.suffix == ".parquet"]
    assert before == {p: p.stat().st_mtime_ns for p in before}

@pytest.mark.audit
def test_a_shorter_run_does_not_replace_a_recorded_longer_one(tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPES["add7"], "steps", 200)                 # a schedule that both complete
    two = {i: instruments()[i] for i in ("ablation", "copying")}
    paper = replace(STUDY, measured=lambda c: two)
    name, long, short = "add7/ffn-h8-silu", Store(tmp_path / "long"), Store(tmp_path / "short")
    train(name, seeds=[42], root=long.root, steps=600, until="full", executor="here", quiet=True)
    train(name, seeds=[42, 137], root=short.root, steps=200, until="full", executor="here", quiet=True)
    for store in (long, short): recording._record_runs(store, table_files.Clone(tmp_path), paper, name)
    runs = table_files.read_table("runs", name, root=tmp_path)
    assert runs[["seed", "step"]].values.tolist() == [[42, 600], [137, 200]]
    rows = selection.recorded_rows(name, root=tmp_path)
    assert rows[rows["rule"] == "final"].groupby("seed")["step"].unique().map(list).to_dict() == {42: [600], 137: [200]}

def test_no_recorded_condition_is_missing_from_the_registry():
    there = set(selection.recorded_runs()["condition"])
    assert there <= set(conditions_for("all"))
    lines = table_files.manifest()
    assert there == set(lines.loc[lines["kind"] == "history", "condition"])

# Recorded before these instruments were, and their weights are gone. Trained again under a later engine they became
# other runs, which are passed over.
LOST = {("modadd/moe_glu-e4k1-h340-gelu", "probes", 42), ("modadd/moe_glu-e4k1-h340-gelu", "routing", 42)}

def test_every_instrument_that_fits_has_measured_every_recorded_run_of_the_paper_s_seeds():
    runs, ended_at = dict(list(selection.recorded_runs().groupby("condition"))), {}
    for kind in set(table_files.kinds()) - {"runs", "history"}:    # each table once, and of it only where its rows are
        rows = parquet.read_table(table_files.table_path(kind, "").parent, columns=[*table_files.KEYS, "step"])
        last = rows.group_by(table_files.KEYS).aggregate([("step", "max")]).to_pandas()
        steps = last.set_index(table_files.KEYS)["step_max"]
        ended_at |= {(kind, name): own.droplevel("condition") for name, own in steps.groupby(level="condition")}
    for name, own in runs.items():
        for i, instrument in recording.recorded_with(STUDY, name).items():
            # stopped at first99, where only the authors' are opened
            streams = [x for x in instrument.streams if (x, name.split("/")[0]) != ("crossed", "modadd")]
            mine = own[own["stream"].isin(streams)].set_index(["stream", "seed"])
            lost = {("authors", seed) for n, lacks, seed in LOST if (n, lacks) == (name, i)}
            mine = mine[~mine.index.isin(lost)]
            if mine.empty: continue
            got = ended_at[i, name]
            assert set(got.index) == set(mine.index), (name, i)
            ended = mine[mine["step"] >= RECIPES[name.split("/")[0]]["steps"]]["step"]          # has weights at its end
            if "final" not in rules_for(name, "authors", i) or ended.empty: continue
            assert got[ended.index].equals(ended), (name, i)

def test_an_altered_checkpoint_is_refused(tmp_path):
    name = TABLE1["FFN"]
    path = checkpoints.checkpoint_path(name, "first256", tmp_path)
    path.parent.mkdir(parents=True)
    data = bytearray(checkpoints.checkpoint_path(name, "first256").read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(Damaged, match="altered"):
        checkpoints.checkpoint(name, "first256", tmp_path)

def test_every_recorded_run_says_how_it_ended():
    for name in LABELS:
        runs = table_files.read_table("runs", name)
        assert set(SEEDS) <= set(runs["seed"]) and runs["failed"].isna().all()
        ended = runs["step"] >= RECIPES["add7"]["steps"]                                   # a seed may never settle
        assert (runs["settled"] | ended).all()
        assert (runs["first256_step"] % 200 == 0).all() and (runs["first256_reached"] | ended).all()

@pytest.mark.parametrize("words, says", [
    (["train", "add7/glu-h17"], "expected task/variant"),
    (["train", "add7/ffn-h64-silu", "--seeds", "1-3,2"], "more than once"), (["train"], "got neither"),
    (["train", "--item", "tab2x"], "nearest"),
    (["train", "add7/ffn-h64-silu", "--seeds", "1-4294967296"], "up to 100,000 at once; got 4,294,967,296"),
    (["train", "add7/ffn-h64-silu", "--seeds", "9" * 5000], "expected numbers and ranges"),
    (["train", "add7/ffn-h64-silu", "--budget", "nan"], "--budget: expected a number above 0; got nan"),
    (["train", "--item", "tab1", "--item", "tab1"], "--item: expected each once"),
    (["train", "add7/ffn-h64-silu", "--device", "cuda"], "got none; nearest valid: cpu"),
    (["study", "granularity", "--device", "cuda"], "got none; nearest valid: cpu"),
    (["measure", "add7/ffn-h64-silu", "--out", "{file}/rows.csv"], "a folder that can be written to"),
    (["bench", "--record", "rows.txt"], "expected a .parquet or .csv file"),
    (["scores", "--model", "m", "--text", "{file}", "--dtype", "bogus"], "expected one of auto, float32"),
    (["ablate", "--model", "m", "--text", "{file}", "--edit", "zero", "--edit", "zero"], "--edit: expected each once"),
    (["ablate", "--model", "m", "--text", "{file}", "--tokens", "-5"], "--tokens: expected a whole number"),
    (["gates", "--model", "m", "--text", "{file}", "--k", "4,4"], "k: expected each once; got '4,4'; nearest valid: 4"),
    (["gates", "--model", "m", "--text", "{file}", "--lr", "inf"], "--lr: expected a number above 0; got inf")])
def test_a_bad_command_is_one_line_and_exit_status_2(words, says, capsys, home, tmp_path, monkeypatch):
    (file := tmp_path / "file").write_text("a few words")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([w.replace("{file}", str(file)) for w in words]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and not home.exists()

@pytest.mark.parametrize("raised, status, says", [
    (KeyError("x"), 70, "this is a bug of ours"), (TypeError("y"), 70, "please report the lines above"),
    (RuntimeError("two\nlines"), 2, "moe-redistribution: two lines\n"), (MemoryError(), 2, "MemoryError"),
    (signal.SIGTERM, 130, "the same command goes on"), (signal.SIGINT, 130, "the same command goes on")])
def test_whatever_goes_wrong_ends_in_one_message_and_a_bug_says_that_it_is_ours(raised, status, says, capsys,
                                                                                monkeypatch):
    def fail(args):
        if isinstance(raised, Exception): raise raised
        os.kill(os.getpid(), raised)
        time.sleep(1)
    monkeypatch.setattr(cli, "_run", fail)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["conditions"]) == status and signal.getsignal(signal.SIGTERM) is before
    err = capsys.readouterr().err
    assert says in err and ("Traceback" in err) == (status == 70)

def test_what_a_text_command_kept_goes_when_its_rows_are_there_and_not_before(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text("And there was light. " * 9)
    tiny_model("olmoe", vocab_size=256).save_pretrained(tmp_path / "toy")
    words = ["scores", "--model", str(tmp_path / "toy"), "--text", str(tmp_path / "text"), "--bytes", "--context", "16",
             "--out", str(tmp_path / "rows.csv")]
    with monkeypatch.context() as m:
        m.setattr(models, "write_frame", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(words) == 130 and (tmp_path / "rows.part").exists()
    monkeypatch.setattr(streaming, "tally", None)                  # all of it is kept: nothing is done again
    assert main(words) == 0 and (tmp_path / "rows.csv").exists() and not (tmp_path / "rows.part").exists()

def test_a_dry_run_says_what_is_missing_and_trains_nothing_and_a_run_says_what_is_left(capsys, home, monkeypatch):
    words = ["train", "add7/ffn-h8-silu+d16", "--seeds", "1,2", "--until", "full", "--group-size", "1",
             "--executor", "here"]
    assert main([*words, "--dry-run"]) == 0 and not list(home.rglob("*.safetensors"))
    assert "Missing: up to 2 runs in 2 groups" in capsys.readouterr().out
    monkeypatch.setitem(RECIPES["add7"], "steps", 200)
    assert main(words) == 0
    said = capsys.readouterr()
    assert "up to 2 runs" in said.err and said.out.strip() == "Now: Nothing is missing."
    assert len(list(home.rglob("*.safetensors"))) == 2

def test_an_item_brings_its_own_seeds_streams_and_order_unless_told_otherwise(capsys, home):
    for more, runs in [([], 20), (["--seeds", "1-3"], 12)]:                  # matched GLUs, two activations, five seeds
        assert main(["train", "--item", "add7-matched", *more, "--dry-run"]) == 0
        assert f"Missing: up to {runs} runs in 4 groups" in capsys.readouterr().out
