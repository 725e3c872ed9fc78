"""Splits that are made of others: of the rule `cross_domain`, of `final_fit`, and with validation images for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from xdm_ft.images.dataset import ImageDataset
from xdm_ft.protocol.splits import Split, check_classes, stratified_part

LEFT_OUT = ("left_out_0", "left_out_1")
"""Names of the evaluation splits of a `cross_domain` model: its two held-out domains."""


def without(dataset: ImageDataset, split: Split, domain: str) -> Split:
    """Returns `split` with one more held-out domain, whose training images become `left_out_0`.

    Images whose group is also in that domain are removed. DomainBed's third selection rule leaves out one training
    domain at a time in this way (Gulrajani & Lopez-Paz 2021, section 3). Raises `UserError` if a remaining domain has
    fewer than two classes.
    """
    number = split.train_domains.index(domain)
    left_out = split.train[number]
    rest = [rows for other, rows in enumerate(split.train) if other != number]
    if dataset.groups is not None:
        groups = dataset.groups
        of_domain = np.unique(groups[dataset.domains == dataset.domain_names.index(domain)])
        rest = [rows[torch.from_numpy(~np.isin(groups[rows], of_domain))] for rows in rest]
    check_classes(
        dataset,
        torch.cat(rest).numpy(),
        [dataset.domain_names.index(name) for name in split.train_domains if name != domain],
        f" left for training with {', '.join((*split.test_domains, domain))} held out (protocol.selection: "
        "cross_domain)",
    )
    return Split(
        test_domains=(*split.test_domains, domain),
        train_domains=tuple(name for name in split.train_domains if name != domain),
        train=tuple(rest),
        evaluation={LEFT_OUT[0]: left_out},
        # −1 for the removed domain; the numbers above it move down by one
        domain_of=torch.where(split.domain_of == number, -1, split.domain_of - (split.domain_of > number).long()),
    )


def also_measuring(split: Split, rows: Tensor) -> Split:
    """Returns a split of `without` that also evaluates its other held-out domain, on `rows`: `left_out_1`."""
    return dataclasses.replace(split, evaluation={**split.evaluation, LEFT_OUT[1]: rows})


def all_domains(dataset: ImageDataset, unreadable: Collection[int] = ()) -> Split:
    """Returns the split in which all labelled images of all domains train, and none validates or tests.

    Raises `UserError` if a domain has images of one class only.
    """
    train = np.setdiff1d(np.arange(len(dataset)), list(unreadable))
    numbers = np.unique(dataset.domains[train])
    check_classes(dataset, train, numbers.tolist(), " for protocol.final_fit, which trains on all of them")
    domain_of = np.full(len(dataset.domain_names), -1, dtype=np.int64)
    domain_of[numbers] = np.arange(len(numbers))
    return Split(
        test_domains=(),
        train_domains=tuple(dataset.domain_names[number] for number in numbers),
        train=tuple(torch.from_numpy(train[dataset.domains[train] == number]) for number in numbers),
        evaluation={},
        domain_of=torch.from_numpy(domain_of),
    )


def with_validation(dataset: ImageDataset, split: Split, fraction: float, seed: int) -> Split:
    """Returns `split`, whose part `train_val` is drawn from its training images if it has none of its own.

    It is drawn as validation parts are: stratified by domain and class, without dividing a group; it may be empty.
    """
    if "train_val" in split.evaluation:
        return split
    part = torch.from_numpy(stratified_part(dataset, torch.cat(split.train).sort().values.numpy(), fraction, seed))
    train = tuple(rows[~torch.isin(rows, part)] for rows in split.train)
    return dataclasses.replace(split, train=train, evaluation={**split.evaluation, "train_val": part})


def mean_course(courses: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Returns {step: mean over the left-out domains} for the steps at which all of them were measured."""
    listed = list(courses)
    steps = [step for step in listed[0] if all(step in course for course in listed)]
    return {step: float(np.mean([course[step] for course in listed])) for step in steps}
