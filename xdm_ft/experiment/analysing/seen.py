"""What a measured model sees: the features of its images, and what follows from them alone."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from xdm_ft.analysis.invariance import Invariance, covariance_distance
from xdm_ft.experiment.analysing.domain_head import fitted
from xdm_ft.experiment.analysing.images import Images, SplitImages
from xdm_ft.experiment.analysing.model import Features
from xdm_ft.heads.linear import Linear


class Encoded(NamedTuple):
    """Images with their features. Images whose features are not finite are left out."""

    z: Tensor  # float32 [n,K]
    y: Tensor  # int64 [n]
    domain: Tensor  # int64 [n]: 0…D−1 of the training domains; of test images as in the data set
    rows: Tensor  # int64 [n]


class Seen:
    """The features of the images of a split. Models on a frozen encoder share it; it is computed when it is needed."""

    def __init__(self, images: SplitImages, features: Features, num_classes: int) -> None:
        self.images, self.features, self.num_classes = images, features, num_classes
        self.num_domains = len(images.train_domains)

    @cached_property
    def training(self) -> Encoded:
        return self._encoded(self.images.training, self.images.domain_of)

    @cached_property
    def validation(self) -> Encoded:
        return self._encoded(self.images.validation, self.images.domain_of)

    @cached_property
    def test(self) -> Encoded:
        return self._encoded(self.images.test, None)

    @cached_property
    def representation(self) -> Invariance:
        z, y, domain, _ = self.validation
        return covariance_distance(z, y, domain, self.num_classes, self.num_domains)

    @cached_property
    def domain_head(self) -> Linear | None:
        """A linear domain head for a model without one of its own; None with one training domain."""
        of_training, of_validation = ((part.z, part.domain) for part in (self.training, self.validation))
        return fitted(self.images.train_domains, of_training, of_validation)

    def _encoded(self, images: Images, domain_of: Tensor | None) -> Encoded:
        z = self.features(images.rows)
        kept = torch.isfinite(z).all(1)
        images = images.where(kept)
        domain = images.domain if domain_of is None else domain_of[images.domain]
        return Encoded(z[kept], images.y, domain, images.rows)
