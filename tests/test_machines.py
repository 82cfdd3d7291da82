"""What machines read is what is recorded: every number once, problems without answers, intervals that hold ours, and the forms that others ask for.

Checkers of these forms (pyshacl, mlcroissant, paperbench, trackio, rocrate) are no dependencies: what their rules ask for is asked here by hand."""
import json
import os
import re
import subprocess

import pytest
import yaml

from moe_redistribution.evidence.claims import Claim
from moe_redistribution.evidence.printed import paper_values
from moe_redistribution.evidence.table_files import ROOT
from moe_redistribution.models.condition import condition
from moe_redistribution.record import machines as room
from moe_redistribution.record.cli import main

SPEC = re.compile(r"croissant:(Input|Output|Implementation|Execution|Evaluation)Spec")

@pytest.fixture(scope="module")
def made(): return room.formats()

@pytest.fixture(scope="module")
def asked(made): return json.loads(made["machines/croissant-tasks.json"])

@pytest.fixture(scope="module")
def answered(made): return json.loads(made["machines/croissant-solutions.json"])

def by_id(doc): return {x["@id"]: x for x in doc["@graph"]}
def of_type(doc, name): return [x for x in doc["@graph"] if x["@type"] == f"croissant:{name}"]
def several(x): return x if isinstance(x, list) else [x] if x else []
def result(s): return s["croissant:evaluation"]["croissant:evaluationResults"]

def test_the_files_in_git_are_what_the_command_makes_now(made, tmp_path, capsys):
    stale = [n for n, text in made.items() if not (ROOT / n).exists() or (ROOT / n).read_text(encoding="utf-8") != text]
    assert not stale, f"make machines, then commit: {stale}"
    own = {str(p.relative_to(ROOT)) for p in (ROOT / "machines").rglob("*") if p.is_file()} - {"machines/words.csv"}
    assert own == {n for n in made if n.startswith("machines/")}
    assert main(["ledger", "--formats", str(tmp_path)]) == 0
    assert {tmp_path / n for n in made} == {room.Path(p) for p in capsys.readouterr().out.splitlines()}
    assert os.access(tmp_path / "reproduce.sh", os.X_OK) and os.access(ROOT / "reproduce.sh", os.X_OK)
    assert main(["ledger", "--formats", str(tmp_path / "codemeta.json")]) == 2 and "a folder" in capsys.readouterr().err

def test_every_printed_number_of_the_main_paper_is_one_problem_and_every_answer_has_its_own(asked, answered):
    ids = [x["@id"] for x in asked["@graph"]]
    assert len(ids) == len({*ids})
    printed = paper_values()["id"]
    printed = {i for i in printed if not i.startswith("repo:") and not re.match(r"00[1-4]\.", i)}
    assert {i[1:] for i in ids if i[1:] in printed} == printed
    recorded = room._recorded_bridge().query("ours_n > 0")["id"]
    based = [s["schema:isBasedOn"] for s in of_type(answered, "TaskSolution")]
    assert len(based) == len({*based}) and {*based} <= {*ids} and {f"#{i}" for i in recorded} <= {*based}

def test_a_problem_does_not_give_its_answer_away_and_names_all_that_it_needs(asked):
    nodes, text = by_id(asked), json.dumps(asked)
    for word in ("minValue", "run:sd", "run:printed", "verdict"): assert word not in text
    for p in of_type(asked, "TaskProblem"):
        assert p["schema:name"] and p["croissant:output"] == "#output"
        kinds = {"croissant:input": "schema:Dataset", "croissant:implementation": "croissant:ImplementationSpec",
                 "croissant:execution": "croissant:ExecutionSpec", "croissant:evaluation": "croissant:EvaluationSpec"}
        for key, kind in kinds.items():
            for at in several(p.get(key)): assert nodes[at]["@type"] == kind and nodes[at]["schema:description"], at
        for at in re.findall(r"#(?:model|measure|data)/[\w.+/=-]*\w", p.get("schema:description", "")): assert at in nodes, at
    assert nodes["#output"]["@type"] == "croissant:OutputSpec"
    assert nodes["#output"]["croissant:schema"]["@type"] == "croissant:RecordSet"

def test_words_have_no_empty_place_and_say_what_the_conditions_say(asked):
    assert "{" not in "".join(x.get("schema:description", "") for x in asked["@graph"])
    for x in of_type(asked, "ImplementationSpec"):
        c = condition(x["schema:name"])
        assert (x["run:lr"], x["run:d_mlp"], x["run:steps"], x["run:hold"]) == (c.lr, c.d_mlp, c.steps, c.hold)
        assert ("The router: " in x["schema:description"]) == c.routed and x["schema:description"].count("  ") == 0
    for x in of_type(asked, "EvaluationSpec"): assert len(x["schema:description"]) > 3 and x["croissant:expectedMetric"]

def test_a_solution_keeps_the_rules_of_its_shapes(answered):
    nodes = by_id(answered)
    assert not SPEC.search(json.dumps(answered["@graph"]))
    assert {"@base", "croissant", "schema", "run"} <= {*answered["@context"]}
    for s in of_type(answered, "TaskSolution"):
        assert nodes[s["croissant:implementation"]]["@type"] == "schema:SoftwareSourceCode"
        assert nodes[s["croissant:output"]]["@type"] == "schema:Dataset" and (ROOT / s["croissant:output"][1:]).exists()
        e = s["croissant:evaluation"]
        assert e["@type"] == "croissant:EvaluationTask" and e["croissant:evaluatedSolution"] == s["@id"]
        assert result(s)["@type"] == "croissant:EvaluationResult" and result(s)["croissant:metric"]
        assert result(s)["croissant:value"]["@type"] == "schema:QuantitativeValue"

def test_an_interval_holds_our_mean_and_is_the_one_that_its_numbers_give(answered):
    wide = 0
    for s in of_type(answered, "TaskSolution"):
        r, v = result(s), result(s)["croissant:value"]
        assert v["schema:minValue"] <= v["schema:value"] <= v["schema:maxValue"], s["@id"]
        if r["run:interval"] == "margin" or "log" in s["@id"]: continue
        lo, hi = room._foreseen(v["schema:value"], r["run:sd"], r["run:n"], max(r["run:m"], 1), 0.)
        inside = v["schema:minValue"] - 1e-3 * abs(lo) <= lo + 1e-9 and hi - 1e-9 <= v["schema:maxValue"] + 1e-3 * abs(hi)
        wide += inside
    assert wide > .9 * len([s for s in of_type(answered, "TaskSolution") if result(s)["run:interval"] == "prediction"])

def test_our_own_value_with_all_its_digits_lies_within_what_both_files_ask_for(made, answered):
    nodes, seen = by_id(answered), []
    asked = dict(re.findall(r"\"requirements\": \"(#\S+): (\S+ to \S+)\"", made["machines/paperbench-rubric.json"]))
    for n in room._recorded_bridge().itertuples():
        if (own := nodes.get(f"#{n.id}/ours")) is None: continue
        v = result(own)["croissant:value"]
        for lo, hi in ((v["schema:minValue"], v["schema:maxValue"]), map(float, asked[f"#{n.id}"].split(" to "))):
            if not lo <= float(f"{n.ours_mean:.12g}") <= hi: seen.append((n.id, lo, n.ours_mean, hi))
    assert not seen and result(nodes["#tab2.010/ours"])["croissant:value"]["schema:value"] == 131_712

def test_by_hand_a_number_of_table_1(answered):
    "no_ffn_acc of the dense FFN: .1194 +- 2.776 * .03988 * sqrt(2/5)."
    v = result(by_id(answered)["#tab1.003/ours"])["croissant:value"]
    assert abs(v["schema:maxValue"] - v["schema:value"] - 2.776445 * .0398797 * .4**.5) < 1e-5

def test_what_only_new_seeds_answer_is_the_same_problem(asked, answered):
    assert "#abs-01/paper" in by_id(asked) and "#abs-01/confirmed" not in by_id(asked)
    own, = (s for s in of_type(answered, "TaskSolution") if s["schema:isBasedOn"] == "#abs-01/paper")
    assert own["@id"] == "#abs-01/confirmed/ours" and result(own)["run:n"] == 128 and result(own)["run:m"] == 5

def test_the_rubric_is_a_tree_that_paperbench_reads(made):
    seen, leaves = set(), []
    def walk(n):
        assert {"id", "requirements", "weight", "sub_tasks"} <= {*n} and n["id"] not in seen and n["weight"] > 0 and n["requirements"]
        seen.add(n["id"])
        assert bool(n["sub_tasks"]) != ("task_category" in n)
        if not n["sub_tasks"]: leaves.append(n["task_category"])
        for x in n["sub_tasks"]: walk(x)
    walk(json.loads(made["machines/paperbench-rubric.json"]))
    assert {*leaves} == {"Code Development", "Code Execution", "Result Analysis"}

def test_the_logbook_has_the_pages_that_its_index_names_and_cells_that_are_read(made):
    at = "machines/.trackio/logbook/pages/"
    index = made[at + "index.md"]
    slugs = re.findall(r"\(#/([\w.-]+)\)", index)
    assert slugs[0] == "executive-summary" and slugs[-1] == "conclusion" and index.startswith("# Reproduction: ")
    assert {f"{at}{s}/page.md" for s in slugs} | {at + "index.md"} == {n for n in made if n.startswith(at)}
    titles = []
    for s in slugs:
        heads = re.findall(r"\n---\n<!-- trackio-cell\n(.*)\n-->\n", made[f"{at}{s}/page.md"])
        assert heads
        titles += [json.loads(h)["title"] for h in heads]
    keys = set(room._main_ledger()["key"])
    assert keys == {t.partition(": ")[0] for t in titles if ": " in t}

def test_archives_read_what_the_citation_says(made):
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    meta, zenodo, crate = (json.loads(made[n]) for n in ("codemeta.json", ".zenodo.json", "ro-crate-metadata.json"))
    assert meta["version"] == zenodo["version"] == cited["version"] and zenodo["title"] == cited["title"]
    assert zenodo["keywords"] == meta["keywords"] == cited["keywords"] and zenodo["license"] == cited["license"]
    assert meta["description"] == cited["abstract"] and meta["author"][0]["name"] == cited["authors"][0]["name"]
    assert [r["url"] for r in meta["referencePublication"]] == [r["url"] for r in cited["references"]]
    nodes = {x["@id"]: x for x in crate["@graph"]}
    assert nodes["ro-crate-metadata.json"]["about"] == {"@id": "./"} and {"name", "description", "datePublished", "license"} <= {*nodes["./"]}
    for part in nodes["./"]["hasPart"]: assert (ROOT / part["@id"]).exists() and part["@id"] in nodes, part

def test_the_one_line_sets_up_and_reproduces():
    done = subprocess.run(["make", "-n", "ARGS=--seeds 42", "reproduce"], cwd=ROOT, capture_output=True, text=True)
    assert "reproduce" in done.stdout and "--seeds 42" in done.stdout, done.stderr
    assert "ARGS=" in room.REPRODUCE and room.REPRODUCE.startswith("#!/bin/sh\n")

def test_a_statement_that_is_read_nowhere_has_no_problem(asked):
    silent = {c.key for c in Claim.of(room.statements()) if c.aggregate in room.READS_NOTHING and c.protocol == "paper"}
    assert not {i for i in by_id(asked) if i.endswith("/paper") and i[1:].partition("/")[0] in silent}
