"""Seeds of another machine are recorded beside ours, and named."""
import pandas as pd
import pytest

from moe_redistribution.evidence.table_files import read_table
from moe_redistribution.instruments.rows import rows
from moe_redistribution.record import recording
from moe_redistribution.record.cli import main
from moe_redistribution.training.store import Store
from moe_redistribution.training.study import Preset, Study, run_study


@pytest.fixture
def mine(monkeypatch):
    study = Study("mine", "a study", {"small": Preset("", {"a": (1, 2, 3)})},
                  lambda arm, seeds, settings, desk: rows([OFFSET[0] + s for s in seeds], seeds, condition=arm,
                                                          metric="digits", stream="paired"), lambda *x: 1.)
    monkeypatch.setattr(recording, "known_studies", lambda: {"mine": study})
    return study


OFFSET = [0.]


def trained(study, root, offset, seeds):
    OFFSET[0] = offset
    run_study(study, "small", seeds=seeds, root=root, executor="here", quiet=True)
    return Store(root)


def test_others_seeds_are_added_ours_stay_and_a_list_says_whose_they_are(mine, tmp_path):
    ours, theirs = trained(mine, tmp_path / "a", .1, [1]), trained(mine, tmp_path / "b", .5, [1, 2])
    root = tmp_path / "clone"
    recording.record_rows(ours, root, mine, say=lambda x: None)
    before = recording.recorded_seeds(root)
    recording.record_rows(theirs, root, mine, say=lambda x: None, others=True)
    path = recording.note_others(root, "A. Other", before)
    found = read_table("mine", "mine.small/a", root=root).set_index("seed")["value"].round(6).to_dict()
    assert found == {1: 1.1, 2: 2.5}
    listed = pd.read_csv(path)
    assert listed[["whose", "kind", "condition", "seed"]].values.tolist() == [["A. Other", "mine", "mine.small/a", 2]]
    recording.record_rows(trained(mine, tmp_path / "b", .9, [3]), root, mine, say=lambda x: None, others=True)
    recording.note_others(root, "B. Third", recording.recorded_seeds(root) - {("mine", "mine.small/a", "paired", 3)})
    assert pd.read_csv(path)["whose"].tolist() == ["A. Other", "B. Third"]                           # none is lost


def test_a_store_from_elsewhere_needs_a_name_and_must_be_one(tmp_path, capsys):
    assert main(["record", "--from", str(tmp_path)]) == 2 and "--whose NAME" in capsys.readouterr().err
    assert main(["record", "--from", str(tmp_path), "--whose", "me"]) == 2
    assert "MOE_REDISTRIBUTION_HOME" in capsys.readouterr().err
