"""The protocol's splits: which images train, which select, which test."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import MadeUp

from xdm_ft.data.digits import Digits
from xdm_ft.protocol.splits import (
    Protocol,
    all_domains,
    leave_one_domain_out,
    official,
    seed_hash,
    splits,
    with_validation,
    without,
)
from xdm_ft.runtime.errors import UserError


def parts(split):
    evaluation = {name: rows.numpy() for name, rows in split.evaluation.items()}
    return {"train": torch.cat(split.train).numpy(), **evaluation}


@st.composite
def datasets(draw, with_groups):
    """Two to four domains of two to four classes, every domain with at least two classes of at least two images."""
    num_domains, num_classes = draw(st.integers(2, 4)), draw(st.integers(2, 4))
    cells = [(d, c) for d in range(num_domains) for c in range(num_classes)]
    sizes = [draw(st.integers(2 if c < 2 else 0, 9)) for _, c in cells]
    sizes[num_classes - 1] = max(sizes[num_classes - 1], 1)  # the last class exists
    table = np.array([cell for cell, size in zip(cells, sizes, strict=True) for _ in range(size)])
    table = table[draw(st.permutations(range(len(table))))]
    groups = None
    if with_groups:
        groups = np.array(draw(st.lists(st.integers(0, 60), min_size=len(table), max_size=len(table))))
        groups = groups * num_domains + table[:, 0]
    return MadeUp(table[:, 1], table[:, 0], groups)


@given(dataset=datasets(with_groups=False), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_leave_one_domain_out(dataset, seed):
    found = splits(dataset, Protocol(), seed)
    assert [split.test_domains for split in found] == [(name,) for name in dataset.domain_names]
    for held_out, split in enumerate(found):
        rows = parts(split)
        assert np.array_equal(rows["test"], np.flatnonzero(dataset.domains == held_out))
        assert np.isin(rows["test_val"], rows["test"]).all()
        together = np.concatenate([rows["train"], rows["train_val"], rows["test"]])
        assert np.array_equal(np.sort(together), np.arange(len(dataset)))  # no overlap, nothing lost
        assert split.train_domains == tuple(n for d, n in enumerate(dataset.domain_names) if d != held_out)
        for name, part in zip(split.train_domains, split.train, strict=True):
            d = dataset.domain_names.index(name)
            assert (dataset.domains[part] == d).all()
            assert split.domain_of[d] == split.train_domains.index(name)
            assert set(dataset.labels[part]) == set(dataset.labels[dataset.domains == d])  # every class is kept
            for c in range(len(dataset.class_names)):
                n = ((dataset.domains == d) & (dataset.labels == c)).sum()
                val = ((dataset.domains[rows["train_val"]] == d) & (dataset.labels[rows["train_val"]] == c)).sum()
                assert val == (0 if n < 2 else max(1, round(0.2 * n)))
        assert split.domain_of[held_out] == -1


@given(dataset=datasets(with_groups=True), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_no_split_divides_a_group(dataset, seed):
    assert dataset.groups is not None
    for name in dataset.domain_names:
        try:
            split = leave_one_domain_out(dataset, Protocol(selection="train_val"), name, seed)
        except UserError as error:  # all images of a stratum may be in one group
            assert "needs train_val images" in str(error)
            continue
        rows = parts(split)
        train, val = set(dataset.groups[rows["train"]]), set(dataset.groups[rows["train_val"]])
        assert not train & val
        assert "groups kept together" in split.notes
        for d, part in zip(split.train_domains, split.train, strict=True):
            of_domain = dataset.domains == dataset.domain_names.index(d)
            assert set(dataset.labels[part]) == set(dataset.labels[of_domain])


def two_domains(n=40):
    return MadeUp(np.arange(n) % 2, np.arange(n) // (n // 2))


def test_the_split_depends_on_the_seed_and_not_on_what_is_held_out():
    dataset = MadeUp(np.arange(90) % 3, np.arange(90) // 30)
    one, same, other = (parts(leave_one_domain_out(dataset, Protocol(), "d1", seed)) for seed in (3, 3, 4))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["train_val"], other["train_val"])
    first, second = (parts(split)["train_val"] for split in splits(dataset, Protocol(test_domains=("d0", "d1")), 0))
    assert np.array_equal(*(rows[dataset.domains[rows] == 2] for rows in (first, second)))


def test_unreadable_rows_are_in_no_part():
    dataset = two_domains()
    unreadable = {0, 7, 25, 39}
    for split in splits(dataset, Protocol(), 0, unreadable):
        assert not unreadable & set(np.concatenate(list(parts(split).values())).tolist())


def test_training_images_of_a_held_out_group_are_removed():
    dataset = two_domains()
    dataset.groups = np.arange(40)
    dataset.groups[[0, 1, 2]] = 30  # three images of d0 show a patient of d1
    split = leave_one_domain_out(dataset, Protocol(), "d1", 0)
    assert not {0, 1, 2} & set(np.concatenate([parts(split)["train"], parts(split)["train_val"]]).tolist())
    assert "3 training images left out whose group is also in d1" in split.notes


def test_domains_of_one_set_are_held_out_together():
    groups = np.arange(48)
    groups[[0, 1]] = 40, 17  # two images of d0 show a patient of d3, and of d1
    groups[26] = 0  # one of d2 shows one of d0
    dataset = MadeUp(np.arange(48) % 2, np.arange(48) // 12, groups=groups)
    protocol = Protocol(together=(("d3", "d1"),))
    planned = splits(dataset, protocol, 0)
    assert [split.test_domains for split in planned] == [("d0",), ("d1", "d3"), ("d2",)]
    split, rows = planned[1], parts(planned[1])
    assert split.train_domains == ("d0", "d2") and split.domain_of.tolist() == [0, -1, 1, -1]
    assert rows["test"].tolist() == [*range(12, 24), *range(36, 48)]
    assert sorted([*rows["train"], *rows["train_val"]]) == [*range(2, 12), *range(24, 36)]
    assert {*dataset.domains[rows["test_val"]]} == {1, 3}
    assert split.notes[:2] == ("tested on domains never trained on", "d1 and d3 held out together")
    assert "2 training images left out whose group is also in d1, d3" in split.notes
    assert not any("together" in note for note in planned[0].notes if note != "groups kept together")
    for names in (("d1",), ("d3",), ("d3", "d1")):  # one of a set means the set
        (alone,) = splits(dataset, protocol.model_copy(update={"test_domains": names}), 0)
        assert alone.test_domains == ("d1", "d3") and parts(alone)["train"].tolist() == rows["train"].tolist()
    crossed = without(dataset, planned[0], "d1", "d3")
    assert crossed.test_domains == ("d0", "d1", "d3") and crossed.domain_of.tolist() == [-1, -1, 0, -1]
    left_out = crossed.evaluation["left_out_0"].numpy()
    assert left_out.tolist() == torch.cat(planned[0].train[::2]).tolist() and {*dataset.domains[left_out]} == {1, 3}
    assert torch.cat(crossed.train).tolist() == planned[0].train[1].tolist()
    assert "d1 and d3 held out together" in splits(
        dataset, protocol.model_copy(update={"selection": "cross_domain", "test_domains": ("d0",)}), 0
    )[0].notes, "its extra models leave them out together"  # fmt: skip


@given(dataset=datasets(with_groups=False), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_each_validation_part_is_that_of_its_domain_alone(dataset, seed):
    if len(dataset.domain_names) < 3:
        return
    apart = {split.test_domains: parts(split) for split in splits(dataset, Protocol(), seed)}
    held, *others = splits(dataset, Protocol(together=(("d0", "d1"),)), seed)
    assert np.array_equal(parts(held)["test_val"], np.union1d(*(apart[(name,)]["test_val"] for name in ("d0", "d1"))))
    for split in others:
        found, expected = parts(split), apart[split.test_domains]
        assert found.keys() == expected.keys() and all(np.array_equal(found[key], expected[key]) for key in found)


def test_a_protocol_without_sets_holds_out_each_domain_alone():
    assert Protocol().model_dump(mode="json")["together"] == []
    assert Protocol(together=[["a", "b"]]).model_dump(mode="json")["together"] == [["a", "b"]]
    assert Protocol().sets_of(("b", "a")) == [("b",), ("a",)]


def test_the_splits_of_the_data_are_used():
    digits = Digits()
    assert digits.splits is not None
    for split in splits(digits, Protocol(val_fraction=0.5), seed=1):
        rows = parts(split)
        assert set(digits.splits[rows["train"]]) == {"train"}
        assert set(digits.splits[rows["train_val"]]) == {"val"}
        assert len(rows["test"]) in (449, 450)
        assert set(digits.splits[rows["test_val"]]) == {"val"}
        assert len(rows["train"]) + len(rows["train_val"]) + len(rows["test"]) == 1797
        assert "validation parts as they come with the data" in split.notes


def test_test_rows_of_training_domains_train():
    marks = ["train", "train", "val", "val", "test", "test"] * 2
    dataset = MadeUp([0, 1] * 6, [0] * 6 + [1] * 6, splits=marks)
    rows = parts(leave_one_domain_out(dataset, Protocol(), "d1", 0))
    assert {name: part.tolist() for name, part in rows.items()} == {
        "train": [0, 1, 4, 5],
        "train_val": [2, 3],
        "test": [6, 7, 8, 9, 10, 11],
        "test_val": [8, 9],
    }


@pytest.mark.parametrize("held_out", range(4))
def test_all_labelled_rows_are_used_if_the_official_split_does_not_divide_each_domain(held_out):
    dataset = wilds_like()
    assert dataset.splits is not None
    dataset.splits[[4, 44, 64]] = ""  # in no part of the official split
    dataset.groups = np.arange(80) // 2
    rows = parts(leave_one_domain_out(dataset, Protocol(), f"d{held_out}", 0))
    assert np.array_equal(rows["test"], np.flatnonzero(dataset.domains == held_out))
    together = np.concatenate([rows["train"], rows["train_val"], rows["test"]])
    assert np.array_equal(np.sort(together), np.arange(80))
    assert [(dataset.domains[rows["train_val"]] == d).sum() for d in range(4) if d != held_out] == [4, 4, 4]
    assert not set(dataset.groups[rows["train"]]) & set(dataset.groups[rows["train_val"]])
    notes = leave_one_domain_out(dataset, Protocol(), f"d{held_out}", 0).notes
    assert "the data's own split is not used, all labelled images take part" in notes


def wilds_like():
    """d0 and d1 train and validate, d2 validates, d3 tests; two classes, 10 images of each."""
    domains = np.repeat(np.arange(4), 20)
    marks = np.array(["train", "train", "val", "test"])[domains]
    marks[[0, 1, 20, 21]] = "val"
    return MadeUp(np.arange(80) % 2, domains, splits=marks.tolist())


def test_official():
    (split,) = splits(wilds_like(), Protocol(name="official", selection="val_domain"), seed=0)
    rows = parts(split)
    assert (split.test_domains, split.train_domains) == (("d3",), ("d0", "d1"))
    assert split.domain_of.tolist() == [0, 1, -1, -1]
    assert rows["train_val"].tolist() == [0, 1, 20, 21]
    assert rows["val_domain"].tolist() == list(range(40, 60))
    assert rows["test"].tolist() == list(range(60, 80))
    assert len(rows["test_val"]) == 4
    assert np.isin(rows["test_val"], rows["test"]).all()
    assert [len(part) for part in split.train] == [18, 18]


def test_official_counts_the_groups_that_also_train():
    dataset = wilds_like()
    dataset.groups = np.arange(80)
    dataset.groups[[0, 1]] = dataset.groups[2]  # all but two of the four validation images are groups of their own
    dataset.groups[[60, 61, 62]] = dataset.groups[[2, 2, 3]]
    split = official(dataset, Protocol(name="official"), 0)
    assert split.notes[1] == (
        "1 of 3 groups of train_val also train (2 of 4 images), 2 of 19 groups of test also train (3 of 20 images)"
    )
    dataset.groups = np.arange(80)
    assert official(dataset, Protocol(name="official"), 0).notes[1] == "groups kept together"


def test_whether_test_domains_are_unseen_is_reported():
    assert splits(two_domains(), Protocol(), 0)[0].tested_on == "domains never trained on"
    dataset = wilds_like()
    assert official(dataset, Protocol(name="official"), 0).notes[0] == "tested on domains never trained on"
    assert dataset.splits is not None
    dataset.splits[[4, 5]] = "test"  # of d0, which also trains
    some = official(dataset, Protocol(name="official"), 0)
    assert some.notes[0] == "tested on domains of which d0 is also trained on"
    everywhere = MadeUp(np.arange(40) % 2, np.arange(40) // 20, splits=["train"] * 4 * 2 + ["val"] * 6 + ["test"] * 6
                        + ["train"] * 8 + ["val"] * 6 + ["test"] * 6)  # fmt: skip
    seen = official(everywhere, Protocol(name="official"), 0)
    assert seen.notes[0] == "tested on domains that are also trained on, none of them unseen"
    alone = MadeUp([0, 1] * 6, [0] * 12, splits=["train"] * 4 + ["val"] * 4 + ["test"] * 4)
    assert official(alone, Protocol(name="official"), 0).notes[0] == seen.notes[0]


def test_gaps_are_noted():
    labels = np.array([0, 1, 2] * 5 + [0, 1] * 5 + [0, 1, 2] * 5)
    dataset = MadeUp(labels, np.repeat([0, 1, 2], [15, 10, 15]))
    split = leave_one_domain_out(dataset, Protocol(), "d0", 0)
    assert split.notes == (
        "tested on domains never trained on", "images assumed independent", "no training image of c2 in d1"
    )  # fmt: skip
    marks = ["train"] * 15 + ["train"] * 8 + ["val"] * 2 + ["train"] * 15
    marked = MadeUp(labels, dataset.domains, splits=marks)
    assert (
        "no validation image of d2, which train_val ignores" in leave_one_domain_out(marked, Protocol(), "d0", 0).notes
    )


def fault(dataset, protocol, unreadable=()):
    with pytest.raises(UserError) as caught:
        splits(dataset, protocol, 0, unreadable)
    assert "\n" not in str(caught.value)
    return str(caught.value)


GROUPED_ANEW = MadeUp(np.arange(40) % 2, np.arange(40) // 20, groups=np.arange(40) % 20)
FEW_GROUPS = MadeUp(np.arange(40) % 2, np.arange(40) // 20, groups=np.arange(40) // 10)
ONE_CLASS = MadeUp([0, 1, 0, 0], [0, 0, 1, 1])
THREE = MadeUp([0, 1, 0, 1, 0, 0, 1], [0, 0, 1, 1, 2, 2, 2])


@pytest.mark.parametrize(
    ("dataset", "changes", "unreadable", "message"),
    [
        (two_domains(), {"test_domains": ("d3",)}, (), '"d3" is not a domain of the data'),
        (two_domains(), {"test_domains": ("d0", "d0")}, (), "d0, d0: a domain appears twice"),
        (two_domains(), {"selection": "val_domain"}, (), "val_domain needs val_domain images"),
        (two_domains(), {"name": "official"}, (), "a split of its own"),
        (MadeUp([0, 1], [0, 0]), {}, (), "is the only domain"),
        (
            two_domains(),
            {"together": (("d0", "d01"),)},
            (),
            'protocol.together: "d01" is not a domain of the data; did',
        ),
        (two_domains(), {"together": (("d1", "d0"),)}, (), "protocol.together: d0, d1 are all domains of the data;"),
        (
            THREE,
            {"together": (("d1", "d0"),), "selection": "cross_domain", "test_domains": ("d2",)},
            (),
            "use train_val",
        ),
        (GROUPED_ANEW, {}, (), "no image left for training with d0 held out; if groups are numbered anew"),
        (FEW_GROUPS, {}, (), "a group may be too large for val_fraction 0.2"),
        (ONE_CLASS, {}, (), 'images of one class only ("c0") left for training with d0 held out'),
        (THREE, {}, (4, 5, 6), 'the domain "d2" has no image'),
    ],
)
def test_every_fault_is_one_clear_line(dataset, changes, unreadable, message):
    assert message in fault(dataset, Protocol(**changes), unreadable)


@pytest.mark.parametrize("part", ["train", "test"])
def test_official_needs_training_and_test_images(part):
    dataset = wilds_like()
    assert dataset.splits is not None
    dataset.splits[dataset.splits == part] = "val"
    message = f'official needs images whose split is "{part}"; the data has none'
    assert message in fault(dataset, Protocol(name="official"))


@given(dataset=datasets(with_groups=False), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_parts_drawn_once_for_all_domains_are_those_drawn_for_each(dataset, seed):
    together = splits(dataset, Protocol(), seed)
    for name, split in zip(dataset.domain_names, together, strict=True):
        alone, found = parts(leave_one_domain_out(dataset, Protocol(), name, seed)), parts(split)
        assert found.keys() == alone.keys() and all(np.array_equal(found[key], alone[key]) for key in alone)


def test_parts_of_groups_that_span_domains_are_drawn_for_each_held_out_domain():
    groups = np.arange(90)
    groups[30:36] = groups[:6]  # of d1, as images of d0
    dataset = MadeUp(np.arange(90) % 2, np.arange(90) // 30, groups=groups)
    for split in splits(dataset, Protocol(), 0):
        alone, together = parts(leave_one_domain_out(dataset, Protocol(), *split.test_domains, 0)), parts(split)
        assert all(np.array_equal(together[key], alone[key]) for key in alone)
        assert not {*groups[together["train"]]} & {*groups[together["train_val"]]}


# Validation images for splits that have none


def made(groups):
    rows = np.arange(240)
    return MadeUp(rows % 3, rows // 3 % 2, rows // 12 if groups else None)


@pytest.mark.parametrize("groups", [False, True])
def test_a_part_of_the_training_images_validates_where_none_does(groups):
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


def test_a_split_with_validation_images_stays_as_it_is():
    dataset = made(groups=False)
    for split in splits(dataset, Protocol(), 0):
        assert with_validation(dataset, split, 0.5, 0) is split


def test_without_enough_images_the_part_is_empty():
    dataset = MadeUp(np.array([0, 1]), np.array([0, 0]), None)
    split = with_validation(dataset, all_domains(dataset), 0.25, 0)
    assert len(split.evaluation["train_val"]) == 0 and len(torch.cat(split.train)) == 2


# DomainBed's split, against recorded output of its own code

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
