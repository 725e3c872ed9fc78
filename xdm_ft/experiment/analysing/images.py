"""The images on which the models of one split are measured: all of them, or a sample of stated size."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from xdm_ft.experiment.plan import Plan, PlannedModel
from xdm_ft.protocol.derived_splits import with_validation
from xdm_ft.runtime.randomness import Stream, permutation
from xdm_ft.runtime.tensors import Annotations


class Limits(NamedTuple):
    """The most images of each part of a split that are measured."""

    training: int
    validation: int
    test: int
    augmented: int  # training images, half of them with original features, half with augmented ones


FROZEN = Limits(20_000, 20_000, 20_000, 2000)
TRAINED = Limits(1536, 768, 768, 1024)  # every model encodes its own images


@dataclasses.dataclass(frozen=True)
class Images:
    """Images of one part of a split."""

    rows: Tensor  # int64 [n], in the data set
    y: Tensor  # int64 [n]
    domain: Tensor  # int64 [n], numbered as in the data set
    n: int  # images of the part, of which these are a sample

    def where(self, kept: Tensor) -> Images:
        """Returns the images at which bool [n] is true."""
        return dataclasses.replace(self, rows=self.rows[kept], y=self.y[kept], domain=self.domain[kept])


@dataclasses.dataclass(frozen=True)
class SplitImages:
    """The images to measure of one split."""

    training: Images
    validation: Images
    test: Images
    domain_of: Tensor  # number of a domain in the data set → 0…D−1 of the training domains, −1 for others
    train_domains: tuple[str, ...]
    own_validation: bool  # False: the validation images are training images, as the split has none of its own

    def counts(self) -> dict[str, int]:
        """Returns the numbers of images for analysis.json."""
        return {
            "training": self.training.n,
            "used": len(self.training.rows),
            "validation": self.validation.n,
            "validation_used": len(self.validation.rows),
            "test": self.test.n,
            "test_used": len(self.test.rows),
        }


def split_images(plan: Plan, model: PlannedModel, limits: Limits) -> SplitImages:
    """Returns the images to measure of a model's split, which depend on the split alone."""
    annotations, split = plan.annotations, model.split
    validated = with_validation(plan.dataset, split, plan.recipe.protocol.val_fraction, model.seed)
    return SplitImages(
        training=_sample(torch.cat(split.train), annotations, limits.training),
        validation=_sample(validated.evaluation["train_val"], annotations, limits.validation),
        test=_sample(split.evaluation["test"], annotations, limits.test),
        domain_of=split.domain_of,
        train_domains=split.train_domains,
        own_validation="train_val" in split.evaluation,
    )


def _sample(rows: Tensor, annotations: Annotations, most: int) -> Images:
    """Returns the images, or of more than `most` about as many of every domain, drawn by their number alone."""
    rows, n = rows.sort().values, len(rows)
    domains = annotations.domains[rows].unique()
    if n > most:
        per_domain = max(2, most // len(domains))
        of_domains = [rows[annotations.domains[rows] == domain] for domain in domains]
        drawn = [own[permutation(0, 0, Stream.ANALYSIS, len(own))[:per_domain]] for own in of_domains]
        rows = torch.cat(drawn).sort().values
    return Images(rows, annotations.labels[rows], annotations.domains[rows], n)
