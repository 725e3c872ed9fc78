"""Adds partners to a batch, as the engines do for methods that mix inputs."""

from __future__ import annotations

import torch

from xdm_ft.algorithms import Algorithm
from xdm_ft.core import Batch, Samples


def partnered(algorithm: Algorithm, batch: Batch, step: int) -> Batch:
    """Returns the batch with partners from the batch itself, unchanged if the method mixes no inputs."""
    drawn = Samples(*(field[None] for field in (batch.row, batch.y, batch.domain)))
    partners = algorithm.input_partners(drawn, Samples(*(field[0] for field in drawn)), torch.tensor([step]))
    if partners is None:
        return batch
    place = partners.position[0]
    assert place.max() < len(place)
    soft_labels = None if batch.targets is None else batch.targets[place]
    batch = batch._replace(partner=batch.x[place], partner_y=batch.y[place], has_partner=partners.exists[0])
    return batch._replace(partner_targets=soft_labels)


def mixed(algorithm: Algorithm, batch: Batch, step: int) -> Batch:
    """Returns the whole batch after the method has mixed its inputs."""
    return algorithm.on_inputs(partnered(algorithm, batch, step), step)
