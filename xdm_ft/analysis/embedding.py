"""Features in two dimensions, and how well they are separated there (section 4.4, figure 4; appendix D, figure 7)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xdm_ft.analysis.importance import Logits
from xdm_ft.heads import draw_weights
from xdm_ft.runtime.randomness import Stream, integers, permutation
from xdm_ft.xdomainmix import autograd_scores, decompose, specific_mask

IMAGES = 200  # shown, each as two points
QUANTILE = 0.5  # of τ_c and τ_d, as in the published program
STEPS, BATCH, LEARNING_RATE = 500, 96, 0.01  # of the learned map


class Scatter(NamedTuple):
    """Points in the plane of both kinds of features. Silhouettes are means over points, in [−1, 1]; None: undefined."""

    points: list[list[float]]  # rounded to three decimals
    kind: list[int]  # 0: specific, or original; 1: generic, or augmented
    label: list[int]  # class or domain of the point's image
    silhouette: float | None  # of the kinds: how far both kinds lie apart
    silhouette_of_labels: list[float | None]  # of the labels, among points of kind 0 and among those of kind 1


class Pair(NamedTuple):
    """Two kinds of features of the same images, in two planes."""

    map: Scatter  # of the paper's two linear layers
    pca: Scatter  # of the principal components of the points shown


def embedding(
    z: Tensor,
    y: Tensor,
    domain: Tensor,
    head: Logits,
    domain_head: Logits | None,
    augmented: Tensor | None,
    num_classes: int,
    num_domains: int,
    seed: int,
) -> dict[str, Pair]:
    """Returns the pairs `class_specific_vs_generic` (labels: classes), `domain_specific_vs_generic` (labels: domains;
    absent without a domain head) and `original_vs_augmented` (labels: classes; absent without augmented features).

    At most 200 of the images are shown, drawn by the seed and at most half of all; the learned maps are trained on the
    whole features of the others: in K dimensions, few points can always be separated that a map was trained on.

    Args:
        z: features, float [n,K], of images of training domains.
        y: classes, int64 [n].
        domain: domains, int64 [n].
        head: the class head.
        domain_head: the domain head, or None.
        augmented: augmented features of the same images, float [n,K], or None.
        num_classes: C.
        num_domains: D.
        seed: of the images shown, and of the learned maps.

    Raises:
        ValueError: fewer than four images.
    """
    if len(z) < 4:
        raise ValueError(f"{len(z)} images are too few for an embedding: it needs at least 4")
    order = permutation(seed, 0, Stream.SHOWN, len(z))
    shown, others = order[: min(IMAGES, len(z) // 2)], order[min(IMAGES, len(z) // 2) :]
    own = z[shown].float()
    of_class = linear_map(z[others], y[others], num_classes, seed)
    parts = specific_and_generic(own, autograd_scores(own, head, y[shown]))
    pairs = {"class_specific_vs_generic": pair(*parts, y[shown], of_class)}
    if domain_head is not None:
        of_domain = linear_map(z[others], domain[others], num_domains, seed)
        parts = specific_and_generic(own, autograd_scores(own, domain_head, domain[shown]))
        pairs["domain_specific_vs_generic"] = pair(*parts, domain[shown], of_domain)
    if augmented is not None:
        pairs["original_vs_augmented"] = pair(own, augmented[shown].float(), y[shown], of_class)
    return pairs


def specific_and_generic(z: Tensor, scores: Tensor, quantile: float = QUANTILE) -> tuple[Tensor, Tensor]:
    """Returns the specific and the generic part of features [n,K], whose sum is z, for class or domain scores [n,K].

    They are sums of two of the parts of (4): Z_c,d + Z_c,¬d and Z_¬c,d + Z_¬c,¬d for class scores.
    """
    mask = specific_mask(scores, quantile)
    parts = decompose(z, mask, torch.zeros_like(mask))
    return parts.csdg, parts.cgdg


def linear_map(z: Tensor, label: Tensor, labels: int, seed: int) -> nn.Linear:
    """Returns the first of two linear layers, K → 2 → labels, trained together with cross-entropy on features z [n,K].

    The published program does so by SGD on the model's whole features. Here it is Adam (500 steps of 96 samples drawn
    with replacement, learning rate 0.01, on features divided by their mean norm, so that their scale has no effect).
    Initial weights and draws are functions of the seed.
    """
    scale = z.float().norm(dim=1).mean().clamp_min(torch.finfo(torch.float32).tiny)
    z, width = z.float() / scale, z.shape[1]
    layers = [nn.utils.skip_init(nn.Linear, width, 2), nn.utils.skip_init(nn.Linear, 2, labels)]
    drawn = 0
    for layer in layers:
        drawn = draw_weights([layer.weight, layer.bias], layer.in_features, seed, Stream.MAP_INIT, first=drawn)
    optimizer = torch.optim.Adam([parameter for layer in layers for parameter in layer.parameters()], lr=LEARNING_RATE)
    with torch.enable_grad():
        for step in range(1, STEPS + 1):
            rows = integers(seed, step, Stream.MAP_BATCH, torch.arange(BATCH), len(z))
            loss = F.cross_entropy(layers[1](layers[0](z[rows])), label[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    first = layers[0].requires_grad_(False)
    first.weight /= scale
    return first


def pair(first: Tensor, second: Tensor, label: Tensor, learned: nn.Linear) -> Pair:
    """Returns both kinds of features [m,K] of the same images, whose labels are int64 [m], in both planes."""
    both = torch.cat([first, second])  # [2m,K]
    centred = (both - both.mean(0)).double()
    # of 2m points in K dimensions the smaller Gram matrix would do, but `svd` keeps the digits
    axes = torch.linalg.svd(centred, full_matrices=False).Vh[:2]  # [2,K]
    # the sign of an axis is arbitrary: its largest weight is positive
    axes = axes * axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    components = centred @ axes.T
    if components.shape[1] < 2:  # one feature, or one point
        components = F.pad(components, (0, 2 - components.shape[1]))
    return Pair(scatter(learned(both), label), scatter(components, label))


def scatter(points: Tensor, label: Tensor) -> Scatter:
    """Returns points [2m,2], the first half of kind 0, of images whose labels are int64 [m]."""
    m = len(label)
    kind = torch.arange(2).repeat_interleave(m)
    return Scatter(
        [[round(x, 3) for x in point] for point in points.tolist()],
        kind.tolist(),
        label.repeat(2).tolist(),
        silhouette(points, kind),
        [silhouette(points[:m], label), silhouette(points[m:], label)],
    )


def silhouette(points: Tensor, label: Tensor) -> float | None:
    """Returns the mean of (b − a) / max(a, b) over points, with a the mean distance of a point to the others of its
    label and b that to the points of the nearest other label (Rousseeuw 1987); None unless 1 < labels < points.
    """
    from sklearn.metrics import silhouette_score

    if not 1 < len(label.unique()) < len(label):
        return None
    return float(silhouette_score(points.double().numpy(), label.numpy()))
