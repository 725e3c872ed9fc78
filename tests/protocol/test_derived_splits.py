"""Validation images for splits that have none."""

import numpy as np
import pytest
import torch
from made_up import MadeUp

from xdm_ft.protocol.splits import Protocol, all_domains, splits, with_validation


def made(groups: bool) -> MadeUp:
    rows = np.arange(240)
    return MadeUp(rows % 3, rows // 3 % 2, rows // 12 if groups else None)


@pytest.mark.parametrize("groups", [False, True])
def test_a_part_of_the_training_images_validates_where_none_does(groups: bool) -> None:
    dataset = made(groups)
    whole = all_domains(dataset)
    split = with_validation(dataset, whole, 0.25, seed=0)
    training, part = torch.cat(split.train), split.evaluation["train_val"]
    assert sorted([*training.tolist(), *part.tolist()]) == list(range(240)) and len(part) == 60
    for number, rows in enumerate(split.train):
        assert set(dataset.domains[rows]) == {number} and set(dataset.labels[rows]) == {0, 1, 2}
    if groups:
        assert dataset.groups is not None
        assert not set(dataset.groups[training]) & set(dataset.groups[part])
    assert torch.equal(with_validation(dataset, whole, 0.25, seed=0).evaluation["train_val"], part)
    assert not torch.equal(with_validation(dataset, whole, 0.25, seed=1).evaluation["train_val"], part)


def test_a_split_with_validation_images_stays_as_it_is() -> None:
    dataset = made(groups=False)
    for split in splits(dataset, Protocol(), 0):
        assert with_validation(dataset, split, 0.5, 0) is split


def test_without_enough_images_the_part_is_empty() -> None:
    dataset = MadeUp(np.array([0, 1]), np.array([0, 0]), None)
    split = with_validation(dataset, all_domains(dataset), 0.25, 0)
    assert len(split.evaluation["train_val"]) == 0 and len(torch.cat(split.train)) == 2
