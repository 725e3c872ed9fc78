"""What a run directory keeps of the features of training images, for the distances of new images to them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import torch

from xdm_ft.evaluation.distance import fit
from xdm_ft.experiment.engines import Model
from xdm_ft.experiment.plan import Plan
from xdm_ft.experiment.prepared import Prepared
from xdm_ft.features.cache import Features
from xdm_ft.protocol.derived_splits import with_validation
from xdm_ft.protocol.splits import Split
from xdm_ft.runtime.progress import Progress, progress
from xdm_ft.runtime.randomness import Stream, permutation
from xdm_ft.storage.addresses import reference_beside, reference_file
from xdm_ft.storage.checksummed import Arrays
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training import Selected

logger = logging.getLogger("xdm_ft")
ROWS_AT_ONCE = 4096
MOST_TRAINING, MOST_VALIDATION = 5000, 1000  # images whose features one more pass of a trained encoder computes


def keep_references(plan: Plan, prepared: Prepared, splits: Iterable[Split], directory: RunDirectory) -> None:
    """Writes the reference of each split under each frozen encoder whose features the run has.

    All models on these features with the same test domains share it, whatever their method and seed: it is made of the
    first seed's split. Without validation images of training domains, a part of the training images takes their place.
    """
    protocol = plan.recipe.protocol
    for label, own in prepared.encoders.items():
        for split in splits if own.features is not None else ():
            file = reference_file(split.test_domains, label)
            if own.features is not None and not directory.is_intact(file, "it will be written again"):
                validated = with_validation(plan.dataset, split, protocol.val_fraction, protocol.seeds[0])
                _keep(plan, own.features, validated, file, directory)


def _keep(plan: Plan, features: Features, split: Split, file: str, directory: RunDirectory) -> None:
    training, validation = torch.cat(split.train).sort().values.numpy(), split.evaluation["train_val"].numpy()
    labels, class_names = plan.dataset.labels, plan.dataset.class_names
    with progress("training features", 2 * len(training) + len(validation), "images", directory.main) as bar:
        read = partial(_blocks, features, labels, bar)
        try:
            reference = fit(partial(read, training), partial(read, validation), len(class_names))
        except ValueError as error:
            logger.warning("%s: not written: %s with finite features", directory.path / file, error)
            return
    about = {"images": len(training), "validation_images": len(validation), "train_domains": split.train_domains}
    directory.write_arrays(file, reference.arrays(), {key: json.dumps(value) for key, value in about.items()})


def own_reference(plan: Plan, split: Split, model: Model, selected: Selected, weights: str) -> dict[str, Arrays]:
    """Returns {file: arrays} of the reference of a model that has trained its encoder; {} if it is frozen.

    It costs a forward pass of at most `MOST_TRAINING` training and `MOST_VALIDATION` validation images, which are drawn
    by their number alone. All processes compute the features together.
    """
    if model.features is None:
        return {}
    protocol, labels = plan.recipe.protocol, plan.dataset.labels
    split = with_validation(plan.dataset, split, protocol.val_fraction, protocol.seeds[0])
    parts = []
    for pool, most in ((torch.cat(split.train), MOST_TRAINING), (split.evaluation["train_val"], MOST_VALIDATION)):
        drawn = permutation(0, 0, Stream.TRAINING_FEATURES, len(pool))[:most]
        rows = pool.sort().values[drawn.sort().values]
        parts.append(_finite(model.features(selected, rows).numpy(), labels[rows.numpy()]))
    training, validation = parts
    try:
        reference = fit(lambda: [training], lambda: [validation], len(plan.dataset.class_names))
    except ValueError as error:
        logger.warning("%s: distances are not known: %s with finite features", weights, error)
        return {}
    return {reference_beside(weights): reference.arrays()}


def _blocks(
    features: Features, labels: np.ndarray, bar: Progress, rows: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the finite features of these rows, with their labels."""
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[first : first + ROWS_AT_ONCE]
        z = features[torch.from_numpy(some).to(features.device)].cpu().numpy()
        yield _finite(z, labels[some])
        bar.advance(len(some))


def _finite(z: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the features [n,K] that are finite, with their labels. Training reports the others."""
    finite = np.isfinite(z).all(1)
    return z[finite], labels[finite]
