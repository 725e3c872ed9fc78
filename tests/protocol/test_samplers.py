"""Batches are a pure function of seed and step."""

import pickle
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from xdm_ft.augmentations import Augmentations, TrainingTransform
from xdm_ft.augmentations.domainbed import DomainBed
from xdm_ft.data.folder import Folder
from xdm_ft.images.loader import DrawnRows, ImageRows
from xdm_ft.images.transforms import Preprocessing, evaluation_transform
from xdm_ft.protocol.samplers import (
    ClassBalancedSampler,
    PerDomainSampler,
    PooledSampler,
    SamplerName,
    sampler,
    steps_of,
)
from xdm_ft.runtime.errors import UserError

LABELS = torch.arange(1000) % 3
POOLS = [torch.tensor([3, 1, 4]), torch.tensor([10, 15, 19, 12, 16]), torch.tensor([26])]
pools = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(
    lambda sizes: [torch.arange(size) + 100 * d for d, size in enumerate(sizes)]
)


@pytest.mark.parametrize("name", get_args(SamplerName))
@given(pools=pools, batch_size=st.integers(1, 12), seed=st.integers(0, 2**31), first=st.integers(0, 40))
@settings(max_examples=15)
def test_a_block_of_steps_is_the_steps_one_by_one(name, pools, batch_size, seed, first):
    block = sampler(name, pools, batch_size, seed, LABELS).indices(first, first + 5)
    alone = sampler(name, pools, batch_size, seed, LABELS)
    assert block.dtype == torch.int64
    assert block.shape == (5, alone.batch)
    backwards = [alone.indices(step, step + 1) for step in reversed(range(first, first + 5))]
    assert torch.equal(block, torch.cat(backwards[::-1]))
    assert alone.indices(first, first).shape == (0, alone.batch)
    one, other = (sampler(name, POOLS, 8, seed, LABELS).indices(0, 4) for seed in (0, 1))
    assert not torch.equal(one, other)


def test_per_domain_batches_are_domain_after_domain():
    rows = PerDomainSampler(POOLS, 6, seed=3).indices(0, 50)  # [50,18]
    for d, pool in enumerate(POOLS):
        assert set(rows[:, 6 * d : 6 * d + 6].flatten().tolist()) == set(pool.tolist())


def test_per_domain_draws_are_uniform():
    rows = PerDomainSampler(POOLS, 8, seed=0).indices(0, 5000)[:, 8:16]  # 40,000 draws out of 5
    count = torch.stack([(rows == row).sum() for row in POOLS[1]]).double()
    chi2 = ((count - 8000) ** 2 / 8000).sum().item()
    assert chi2 < 18.5  # 4 degrees of freedom, p = 0.001
    first, second = rows[:, 0], rows[:, 1]  # two positions of a batch are independent
    both = ((first == POOLS[1][0]) & (second == POOLS[1][0])).double().mean()
    assert abs(both - 1 / 25) < 0.012


def test_class_balanced_batches_are_domain_after_domain_and_classes_alike():
    labels = torch.zeros(100, dtype=torch.int64)
    labels[10:18], labels[18:20] = 1, 2  # the first domain: 10, 8 and 2 images; the second: 30 of class 5, 1 of class 7
    labels[20:50], labels[50] = 5, 7
    pools = [torch.randperm(20, generator=torch.Generator().manual_seed(0)), torch.arange(20, 51)]
    rows = ClassBalancedSampler(pools, 6, seed=3, labels=labels).indices(0, 4000)  # [4000,12]
    first, second = rows[:, :6].flatten(), rows[:, 6:].flatten()
    assert set(first.tolist()) == set(range(20)) and set(second.tolist()) == set(range(20, 51))
    for own, classes in ((first, [0, 1, 2]), (second, [5, 7])):
        expected = len(own) / len(classes)
        count = torch.stack([(labels[own] == c).sum() for c in classes]).double()
        assert ((count - expected) ** 2 / expected).sum() < 13.8  # p = 0.001 with 2 degrees of freedom
    of_class = first[labels[first] == 1].bincount(minlength=18)[10:].double()
    assert ((of_class - of_class.mean()) ** 2 / of_class.mean()).sum() < 24.3  # 7 degrees of freedom
    # the drawn class is independent of the row within it and of the next position
    assert abs(float((rows[:, 0] == 18).double().mean()) - 1 / 6) < 0.025
    both = ((labels[rows[:, 0]] == 2) & (labels[rows[:, 1]] == 2)).double().mean()
    assert abs(float(both) - 1 / 9) < 0.02


@given(pools=pools, batch_size=st.integers(1, 30), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_pooled_covers_every_row_once_per_epoch(pools, batch_size, seed):
    rows = torch.cat(pools)
    n = len(rows)
    steps = -(-3 * n // batch_size)
    stream = PooledSampler(pools, batch_size, seed).indices(0, steps).flatten()
    for epoch in range(3):
        assert torch.equal(stream[epoch * n : epoch * n + n].sort().values, rows.sort().values)
    stream = PooledSampler([torch.arange(50)], 10, seed=seed).indices(0, 10).flatten()
    assert not torch.equal(stream[:50], stream[50:]), "epochs have different orders"


def test_an_empty_pool_is_refused():
    for name in get_args(SamplerName):
        with pytest.raises(ValueError, match="one row in each"):
            sampler(name, [torch.arange(3), torch.arange(0)], 2, 0, LABELS)


def test_steps_of():
    assert steps_of(7, None, 10, 3) == 7
    assert steps_of(None, 2, 10, 3) == 7
    assert steps_of(None, 2.2, 25, 5) == 11  # 2.2 · 25 is 55.00000000000001 in floating point
    assert steps_of(None, 1, 9, 3) == 3
    for steps, epochs in ((None, None), (3, 1.0)):
        with pytest.raises(UserError, match="either steps or epochs"):
            steps_of(steps, epochs, 10, 3)


def make_folder(root):
    for i in range(4):
        path = root / f"d{i % 2}" / f"c{i // 2}" / "x.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(np.full((9, 12, 3), 40 * i, dtype=np.uint8)).save(path)
    return Folder(root=root)


@pytest.mark.parametrize("workers", [0, 2])
def test_image_rows_in_a_loader(tmp_path, workers):
    dataset = make_folder(tmp_path)
    transform = evaluation_transform(Preprocessing(mean=(0.5, 0.4, 0.3), std=(1, 1, 1), size=8, resize="pad"))
    order, rows = [[2, 0, 2], [1, 3]], ImageRows(dataset, transform)
    rows = pickle.loads(pickle.dumps(rows))  # as a worker that is spawned receives it
    batches = list(DataLoader(rows, batch_sampler=order, num_workers=workers))
    assert [numbers.tolist() for _, numbers in batches] == order
    for images, numbers in batches:
        assert torch.equal(images, torch.stack([transform(dataset.image(row)) for row in numbers.tolist()]))
    Path(dataset.paths[1]).write_bytes(b"no image")
    with pytest.raises(UserError) as caught:
        list(DataLoader(rows, batch_size=2, num_workers=workers))
    message = str(caught.value)
    assert message.startswith("1 image does not decode") and "\n" not in message
    assert dataset.paths[1] in message and "data.on_bad_image" in message


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_drawn_rows_depend_on_their_key_alone_and_leave_the_generator(tmp_path, workers):
    preprocessing = Preprocessing(mean=(0, 0, 0), std=(1, 1, 1), size=8)
    transform = TrainingTransform(preprocessing, Augmentations([DomainBed()]))
    images = DrawnRows(make_folder(tmp_path), transform.tensor)
    assert len(images) == 4
    keys = [[(2, 5), (0, -5), (2, 7)], [(2, 5), (1, 1 << 62)]]
    state = torch.get_rng_state()
    loader = DataLoader(images, batch_sampler=keys, num_workers=workers, generator=torch.Generator())
    (first, rows), (second, _) = list(loader)
    assert rows.tolist() == [2, 0, 2]
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(first[0], second[0]) and torch.equal(images[(1, 1 << 62)][0], second[1])
    assert not torch.equal(first[0], first[2])
