"""DomainBed's split, against recorded output of its own code."""

import json
from pathlib import Path

import numpy as np
import pytest
from made_up import MadeUp

from xdm_ft.protocol.splits import Protocol, seed_hash, splits
from xdm_ft.runtime.errors import UserError

GOLDEN = json.loads((Path(__file__).resolve().parents[1] / "golden" / "seeds_splits_hparams.json").read_text())


def numbers(key):
    return tuple(int(part) for part in key.split(","))


def test_seeds():
    assert len(GOLDEN["seed_hash"]) == 18
    assert {key: seed_hash(*numbers(key)) for key in GOLDEN["seed_hash"]} == GOLDEN["seed_hash"]


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_are_those_of_domainbed(seed):
    """Three domains of 20 images: row 20·d + k is DomainBed's key k of environment d."""
    data = MadeUp([0, 1] * 30, np.repeat([0, 1, 2], 20))
    expected = {d: GOLDEN["split_n20_first4"][f"{seed},{d}"] for d in range(3)}
    found = splits(data, Protocol(split_rule="domainbed"), seed)
    assert len(found) == 3
    for held_out, split in enumerate(found):
        sources = [d for d in range(3) if d != held_out]
        for d, rows in zip(sources, split.train, strict=True):
            assert rows.tolist() == sorted(20 * d + k for k in expected[d][1])
        validation = sorted(20 * d + k for d in sources for k in expected[d][0])
        assert split.evaluation["train_val"].tolist() == validation
        assert split.evaluation["test_val"].tolist() == sorted(20 * held_out + k for k in expected[held_out][0])
        assert split.evaluation["test"].tolist() == list(range(20 * held_out, 20 * held_out + 20))
        assert any("DomainBed" in note for note in split.notes)


def test_unreadable_images_are_removed_without_moving_others():
    data = MadeUp([0, 1] * 30, np.repeat([0, 1, 2], 20))
    protocol = Protocol(split_rule="domainbed", test_domains=("d0",))
    (whole,), (without,) = splits(data, protocol, 0), splits(data, protocol, 0, [23, 24, 57])
    for d in range(2):
        assert set(without.train[d].tolist()) == set(whole.train[d].tolist()) - {23, 24, 57}
    assert set(without.evaluation["train_val"].tolist()) == set(whole.evaluation["train_val"].tolist()) - {23, 24, 57}


def test_it_refuses_groups_and_the_datas_own_split():
    rule = {"split_rule": "domainbed"}
    labels, domains = [0, 1] * 4, [0] * 4 + [1] * 4
    with pytest.raises(UserError, match="divide groups"):
        splits(MadeUp(labels, domains, groups=range(8)), Protocol(**rule), 0)
    with_splits = MadeUp(labels, domains, splits=["train", "train", "val", "val"] * 2)
    with pytest.raises(UserError, match="would ignore the split that the data comes with"):
        splits(with_splits, Protocol(**rule), 0)
