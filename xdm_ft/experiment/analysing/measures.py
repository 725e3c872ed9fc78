"""The measures of one model, as its entry in analysis.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from xdm_ft.algorithms import Algorithm
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.analysis.augmented import BATCH_SIZE, QUANTILES, halves, mixed_features, xdomainmix_features
from xdm_ft.analysis.divergence import published_mmd_of_batches, unbiased_mmd2
from xdm_ft.analysis.embedding import embedding
from xdm_ft.analysis.importance import removal_curves
from xdm_ft.analysis.invariance import risk_variance
from xdm_ft.evaluation.metrics import per_image_nll
from xdm_ft.experiment.analysing.calibration import calibration
from xdm_ft.experiment.analysing.images import Limits
from xdm_ft.experiment.analysing.model import TrainedModel
from xdm_ft.experiment.analysing.seen import Encoded, Seen
from xdm_ft.heads import Head
from xdm_ft.runtime.randomness import Stream, permutation

Json = dict[str, Any]
FEWEST = 8  # images that an embedding, a removal curve or a divergence needs


def entry(model: TrainedModel, seen: Seen, limits: Limits, domain_names: Sequence[str], first: bool, rule: str) -> Json:
    """Returns the measures of a model. Those that take long are null unless it is its method's `first` seed."""
    record = model.record
    of_model: Json = {
        "method": record.method,
        "test_domains": list(record.test_domains),
        "seed": record.seed,
        "trial": record.trial,
        "representation_invariance": seen.representation._asdict(),
        "prediction_invariance": prediction_invariance(model, seen),
        "calibration": calibration(model, seen, domain_names, record.selected[rule].temperature),
        "domain_head": None,
        "importance": None,
        "embedding": None,
        "divergence": divergence(model, seen, limits.augmented),
    }
    if first and len(seen.validation.z) >= FEWEST:
        head, origin = domain_head(model, seen)
        of_model |= {
            "domain_head": origin,
            "importance": importance(model, seen, head),
            "embedding": embeddings(model, seen, head),
        }
    return of_model


def domain_head(model: TrainedModel, seen: Seen) -> tuple[Head | None, str | None]:
    """Returns the model's own domain head, or a fitted one, and which of both it is."""
    if isinstance(model.method, XDomainMix):
        return model.method.domain_head, "own"
    head = seen.domain_head
    return head, None if head is None else "fitted"


def prediction_invariance(model: TrainedModel, seen: Seen) -> Json:
    """Returns the risks of the training domains, on validation images as in the authors' code, and their variance."""
    z, y, domain, _ = seen.validation
    losses = torch.from_numpy(per_image_nll(model.logits(z), y)) if len(z) else torch.zeros(0)
    found = risk_variance(losses, domain, seen.num_domains)
    return {"risk_variance": found.variance, "risk": dict(zip(seen.images.train_domains, found.risks, strict=True))}


def importance(model: TrainedModel, seen: Seen, domain_head: Head | None) -> Json:
    z, y, domain, _ = seen.validation
    found = removal_curves(z, y, domain, model.method.logits, domain_head)
    return {
        "shares": found.shares,
        "images": found.images,
        "class": found.of_class,
        "domain": found.of_domain,
        "area": {"class": found.area_of_class, "domain": found.area_of_domain},
    }


def embeddings(model: TrainedModel, seen: Seen, domain_head: Head | None) -> Json:
    every = seen.validation
    # augmentations take partners from a batch of consecutive images, which are sorted here
    mixed = Encoded(*(field[permutation(0, 0, Stream.ANALYSIS_ORDER, len(every.z))] for field in every))
    augmented = next(iter(augmentations(model, mixed, QUANTILES[-1:])), (None, None))[1]
    z, y, domain, _ = mixed
    pairs = embedding(
        z, y, domain, model.method.logits, domain_head, augmented, seen.num_classes, seen.num_domains, seed=0
    )
    planes = {name: {"map": pair.map._asdict(), "pca": pair.pca._asdict()} for name, pair in pairs.items()}
    return {"pairs": planes}


def divergence(model: TrainedModel, seen: Seen, most: int) -> list[Json] | None:
    """Returns how far augmented training features are from original ones, per level; None without augmentation.

    The unbiased MMD² compares one half of the images with augmented features of the other half; the published measure
    compares that half with itself, as the authors' code does.
    """
    if not augments(model):
        return None
    every = seen.training
    if len(every.z) < 2 * BATCH_SIZE:
        return None
    parts = (half[: most // 2] for half in halves(len(every.z), seed=0))
    original, other = (Encoded(*(field[part] for field in every)) for part in parts)
    found = []
    for quantile, augmented in augmentations(model, other, QUANTILES):
        unbiased = unbiased_mmd2(original.z, augmented)
        published = published_mmd_of_batches(other.z, augmented, BATCH_SIZE)
        found.append(
            {
                "quantile": quantile,
                "published_mmd": published,
                "batch_size": BATCH_SIZE,
                "unbiased_mmd2": unbiased.value,
                "stderr": unbiased.stderr,
                "n": unbiased.n,
                "bandwidths": unbiased.bandwidths,
            }
        )
    return found


def augments(model: TrainedModel) -> bool:
    """Returns whether the method trains on augmented features or inputs."""
    algorithm = model.algorithm
    if algorithm is None:
        return False
    own = type(algorithm)
    in_encoder = model.encoder is not None and own.stage_modules is not Algorithm.stage_modules
    return isinstance(algorithm, XDomainMix) or own.on_inputs is not Algorithm.on_inputs or in_encoder


def augmentations(
    model: TrainedModel, images: Encoded, quantiles: Sequence[float]
) -> Iterator[tuple[float | None, Tensor]]:
    """Yields the augmented features [n,K] of shuffled images: of XDomainMix per quantile of τ_d, of others once."""
    if not augments(model):
        return
    algorithm = model.algorithm
    assert algorithm is not None
    z, y, domain, rows = images
    if isinstance(algorithm, XDomainMix):
        for quantile in quantiles:
            yield quantile, xdomainmix_features(algorithm, z, y, domain, quantile, model.batch_size)
    elif model.encoder is None:
        yield None, mixed_features(algorithm, z, y, domain, model.batch_size)
    else:
        yield None, model.encoder.augmented(rows, y, domain, model.batch_size)
