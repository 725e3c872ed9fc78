"""Features as a method augments them in training, for their divergence from original ones (section 4.3, table 3)."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Method
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.core import Batch, Samples
from xdm_ft.encoders import Encoder
from xdm_ft.runtime.randomness import Stream, permutation
from xdm_ft.training.end_to_end.model import StageModules
from xdm_ft.xdomainmix import domain_quantile

QUANTILES = tuple(domain_quantile(stage, every=1) for stage in range(5))
"""The levels of τ_d in the order of its cycle: 0.9, 0.8, 0.7, 0.6, 0.5."""
BATCH_SIZE = 32


def halves(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns two disjoint random halves of 0…n−1, int64 [n//2] each: of original and of augmented features."""
    order = permutation(seed, 0, Stream.HALVES, n)
    return order[: n // 2], order[n // 2 : n // 2 * 2]


def augments(method: Method, trains_encoder: bool) -> bool:
    """Returns whether the method trains on augmented features or inputs."""
    if not isinstance(method, Algorithm):  # a solver
        return False
    cls = type(method)
    in_encoder = trains_encoder and cls.stage_modules is not Algorithm.stage_modules
    return isinstance(method, XDomainMix) or cls.on_inputs is not Algorithm.on_inputs or in_encoder


@torch.no_grad()
def xdomainmix_features(
    algorithm: XDomainMix, z: Tensor, y: Tensor, domain: Tensor, quantile: float, batch_size: int = BATCH_SIZE
) -> Tensor:
    """Returns z̃ by equations (1) to (7), with the method's settings and trained heads and τ_d at one of `QUANTILES`.

    Batches are consecutive samples, so features z [n,K] should be shuffled: partners come from the batch. A sample
    without a partner keeps its own part. Returns float32 [n,K].
    """
    mixed, stage = [], QUANTILES.index(quantile)
    for number, batch in enumerate(_batches(z.float(), y, domain, batch_size)):
        # the method's own step with this τ_d; another cycle for every batch, so that all draws differ
        step = algorithm.warmup_steps + algorithm.quantile_steps * (stage + len(QUANTILES) * number)
        mixed.append(algorithm.augment(batch.x, batch, step).z)
    return torch.cat(mixed)


@torch.no_grad()
def mix_features(algorithm: Algorithm, z: Tensor, y: Tensor, domain: Tensor, batch_size: int = BATCH_SIZE) -> Tensor:
    """Returns features that LISA or Mixup has mixed, λz + (1−λ)z_j, as a bank trains on them with a frozen encoder.

    Arguments and result are as in `xdomainmix_features`. With `partners: all`, partners come from all n samples.
    """
    everything = Samples(torch.arange(len(z)), y, domain)
    batches = _batches(z.float(), y, domain, batch_size)
    return torch.cat(
        [_on_inputs(algorithm, batch, z.float(), everything, step).x for step, batch in enumerate(batches)]
    )


@torch.no_grad()
def augment_in_encoder(
    algorithm: Algorithm, encoder: Encoder, batches: Iterable[tuple[Tensor, Tensor, Tensor]]
) -> Tensor:
    """Returns features of images that are augmented as in training: on pixels (LISA, Mixup) or inside the encoder
    (MixStyle, DSU), each with the method's own probabilities.

    The encoder is in eval mode, on a copy: batch norm uses its running statistics, so that features differ from
    original ones by the augmentation only. `batches`: images [B,3,H,W], classes int64 [B] and domains int64 [B];
    shuffled. Returns float32 [n,K], on the CPU.
    """
    # on a copy, as the hooks of the stages stay on the encoder
    encoder = copy.deepcopy(encoder).eval()
    stages = StageModules(encoder, algorithm.stage_modules(encoder)).train()
    features = []
    for step, (images, y, domain) in enumerate(batches):
        rows = torch.arange(len(y), device=y.device)
        batch = Batch(images, y, domain, row=rows, position=rows)
        batch = _on_inputs(algorithm, batch, images, Samples(rows, y, domain), step)
        with stages.during(batch, step):
            features.append(encoder(batch.x).float().cpu())
    return torch.cat(features)


def _batches(z: Tensor, y: Tensor, domain: Tensor, batch_size: int) -> Iterable[Batch]:
    rows = torch.arange(len(z))
    for index in rows.split(batch_size):
        yield Batch(z[index], y[index], domain[index], row=index, position=index - index[0])


def _on_inputs(algorithm: Algorithm, batch: Batch, pool: Tensor, training: Samples, step: int) -> Batch:
    """Returns the batch as `on_inputs` makes it; `pool` holds the inputs of the rows of `training`."""
    drawn = Samples(batch.row[None], batch.y[None], batch.domain[None])  # fields [1,B]
    partners = algorithm.input_partners(drawn, training, torch.tensor([step], device=batch.y.device))
    if partners is not None:
        row = partners.row[0]
        batch = batch._replace(partner=pool[row], partner_y=training.y[row], has_partner=partners.exists[0])
    return algorithm.on_inputs(batch, step)
