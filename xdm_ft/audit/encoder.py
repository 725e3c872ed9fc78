"""What an encoder's features say of class and domain, and how well it knew the images beforehand."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xdm_ft.evaluation.neighbours import SAMPLED, Neighbours, robustness
from xdm_ft.runtime.randomness import folds, sample

FOLDS = 5
PENALTY = 0.01  # of the domain probe, on the squared weights, for each training image
NOTE = (
    "A description, no verdict: over 15 layers of encoders the domain's predictability had a rank correlation of −0.35 "
    "and +0.85 with held-out accuracy, plain validation accuracy 0.98 and 0.89."
)
HOW = (
    "halves by the cosine of each image to its class's prompt, split at the median of each class; a middle "
    "image is in neither half"
)


@dataclass(frozen=True)
class Aligned:
    """Accuracy on the images that the encoder's text side knows better, and on those that it knows worse."""

    accuracy_aligned: float
    accuracy_unaligned: float
    images_aligned: int
    images_unaligned: int
    how: str = HOW


@dataclass(frozen=True)
class EncoderFacts:
    """What an encoder's features say of class and domain. None: the data do not tell."""

    label: str  # of the encoder
    robustness_index: float | None
    same_domain_share: float | None  # of the neighbours of all images
    domain_accuracy: float | None  # of the linear probe for the domain
    domain_chance: float | None  # the share of the largest domain
    aligned: Aligned | None = None  # None: the encoder has no text side
    note: str = NOTE

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def encoder_facts(
    label: str,
    unit: Tensor,
    nearest: Neighbours,
    labels: np.ndarray,
    domains: np.ndarray,
    groups: np.ndarray | None = None,
    aligned: Aligned | None = None,
) -> EncoderFacts:
    """Returns what an encoder's features say of n images.

    Args:
        unit: float32 [n,K], as `evaluation.neighbours.directions` returns them.
        nearest: the neighbours of the same images, in the same order.
        labels, domains, groups: int64 [n].
    """
    of_neighbours = robustness(nearest.nearest, labels, domains)
    chosen = sample(np.arange(len(unit)), domains, SAMPLED)
    accuracy, chance = domain_probe(
        unit[torch.from_numpy(chosen).to(unit.device)].cpu(),
        domains[chosen],
        None if groups is None else groups[chosen],
    )
    return EncoderFacts(label, of_neighbours.index, of_neighbours.same_domain_share, accuracy, chance, aligned)


def domain_probe(z: Tensor, domains: np.ndarray, groups: np.ndarray | None) -> tuple[float | None, float | None]:
    """Returns how often a linear probe names the domain of images that it was not fitted to, and chance.

    The probe is a ridge regression of the one-hot domains on z, fitted to four of five folds; a group is in one fold.
    Chance is the share of the largest domain. Both are None for one domain, or for fewer groups than folds.

    Args:
        z: features, float [n,K].
        domains, groups: int64 [n]; without groups each image is one.
    """
    names, domain, images = np.unique(domains, return_inverse=True, return_counts=True)
    fold_of = folds(domain, groups, FOLDS)
    if len(names) < 2 or fold_of is None:
        return None, None
    targets, correct = torch.eye(len(names), dtype=torch.float64)[domain], 0
    z = z.double()
    for fold in range(FOLDS):
        train, test = np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold)
        mean, of_domains = z[train].mean(0), targets[train].mean(0)
        x = z[train] - mean  # [m,K]
        gram = x.T @ x / len(train)
        # the penalty in units of the features' mean variance; 1 where all features are equal
        scale = float(gram.diagonal().mean()) or 1.0
        gram.diagonal().add_(PENALTY * scale)
        weight = torch.linalg.solve(gram, x.T @ (targets[train] - of_domains) / len(train))  # [K,D]
        predicted = ((z[test] - mean) @ weight + of_domains).argmax(1).numpy()
        correct += int((predicted == domain[test]).sum())
    return correct / len(domain), float(images.max() / len(domain))


def prompt_cosines(unit: Tensor, text: Tensor, labels: np.ndarray) -> np.ndarray:
    """Returns the cosine of each image to the prompt of its class, float32 [n].

    `unit` float32 [n,K], as `directions` returns them; `text` float [C,K], the classes' embeddings; `labels` int64 [n].
    """
    text = torch.nn.functional.normalize(text.to(unit), dim=1)
    cosines = torch.empty(len(unit))
    for number in np.unique(labels):
        of_class = torch.from_numpy(np.flatnonzero(labels == number))
        cosines[of_class] = (unit[of_class.to(unit.device)] @ text[number]).cpu()
    return cosines.numpy()


def halve_by_alignment(cosines: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the half of each image, int64 [n]: 1 with the larger cosines of its class, 0 with the smaller ones.

    The middle image of an odd number is −1, in neither half, so that each class has the same share of both.
    """
    halves = np.full(len(labels), -1)
    for number in np.unique(labels):
        of_class = np.flatnonzero(labels == number)
        ordered, size = of_class[np.argsort(cosines[of_class], kind="stable")], len(of_class) // 2
        halves[ordered[:size]] = 0
        halves[ordered[len(ordered) - size :]] = 1
    return halves


def aligned_accuracy(halves: np.ndarray, rows: np.ndarray, correct: np.ndarray) -> Aligned | None:
    """Returns the accuracy in both halves; None if one of them was not tested.

    Args:
        halves: int64 [N], of all images of the data set, as `halve_by_alignment` returns them.
        rows: int64 [m], the tested images; one that several models were tested on occurs as often.
        correct: bool [m], whether the prediction of a model is right.
    """
    high, low = (halves[rows] == half for half in (1, 0))
    if not high.any() or not low.any():
        return None
    of_high, of_low = (len(np.unique(rows[half])) for half in (high, low))
    return Aligned(float(correct[high].mean()), float(correct[low].mean()), of_high, of_low)
