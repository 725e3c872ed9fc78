"""Splits of models that are trained beside the planned ones: for `cross_domain`, and to ship."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from xdm_ft.data import ImageDataset
from xdm_ft.protocol.splits import Split, check_classes

LEFT_OUT = ("left_out_0", "left_out_1")
"""Splits of the domains that a model of `without` does not train on and is measured on."""


def without(dataset: ImageDataset, split: Split, domain: str) -> Split:
    """`split` without one of its training domains, whose training images become `left_out_0`.

    Images whose group is also in that domain are left out. Selection by leaving out one training domain at a time is
    DomainBed's third rule (Gulrajani & Lopez-Paz 2021, section 3).
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
        domain_of=_numbered(split.domain_of, number),
    )


def also_measuring(split: Split, rows: Tensor) -> Split:
    """A split of `without` that measures its other held-out domain too, on `rows`: `left_out_1`."""
    return dataclasses.replace(split, evaluation={**split.evaluation, LEFT_OUT[1]: rows})


def _numbered(domain_of: Tensor, removed: int) -> Tensor:
    """The numbers of training domains once one is removed: −1 for it, those above it one less."""
    lower = domain_of - (domain_of > removed).long()
    return torch.where(domain_of == removed, -1, lower)


def all_domains(dataset: ImageDataset, unreadable: Collection[int] = ()) -> Split:
    """Every labelled image of every domain trains, whatever part it was in; none is left to validate or to test.

    Raises `UserError` for a domain of one class only.
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


def mean_course(courses: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Steps → mean over the left-out domains, for the steps at which all were measured."""
    listed = list(courses)
    steps = [step for step in listed[0] if all(step in course for course in listed)]
    return {step: float(np.mean([course[step] for course in listed])) for step in steps}
