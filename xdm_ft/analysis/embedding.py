"""Features in two dimensions, and how well they are separated there (section 4.4, figure 4; appendix D, figure 7)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xdm_ft.analysis import Encoded
from xdm_ft.analysis.importance import Logits
from xdm_ft.heads import draw_weights
from xdm_ft.runtime.randomness import Stream, integers, permutation
from xdm_ft.storage import Json
from xdm_ft.xdomainmix import autograd_scores, decompose, specific_mask

IMAGES = 200  # shown, each as two points
QUANTILE = 0.5  # of τ_c and τ_d, as in the published program
STEPS, BATCH, LEARNING_RATE = 500, 96, 0.01  # of the learned map


def embedding(
    images: Encoded,
    head: Logits,
    domain_head: Logits | None,
    augmented: Tensor | None,
    num_classes: int,
    num_domains: int,
    seed: int,
) -> Json:
    """Returns the pairs `class_specific_vs_generic` (labels: classes), `domain_specific_vs_generic` (labels: domains;
    absent without a domain head) and `original_vs_augmented` (labels: classes; absent without augmented features).

    At most 200 of the images are shown, drawn by the seed and at most half of all; the learned maps are trained on the
    whole features of the others: in K dimensions, few points can always be separated that a map was trained on.

    Args:
        images: of training domains. `augmented`: augmented features of the same images, float [n,K].
        head: the class head.
        seed: of the images shown, and of the learned maps.

    Raises:
        ValueError: fewer than four images.
    """
    n = len(images.z)
    if n < 4:
        raise ValueError(f"{n} images are too few for an embedding: it needs at least 4")
    order, count = permutation(seed, 0, Stream.SHOWN, n), min(IMAGES, n // 2)
    shown, others = images.at(order[:count]), images.at(order[count:])
    z = shown.z.float()
    of_class = linear_map(others.z, others.y, num_classes, seed)
    parts = specific_and_generic(z, autograd_scores(z, head, shown.y))
    pairs = {"class_specific_vs_generic": pair(*parts, shown.y, of_class)}
    if domain_head is not None:
        of_domain = linear_map(others.z, others.domain, num_domains, seed)
        parts = specific_and_generic(z, autograd_scores(z, domain_head, shown.domain))
        pairs["domain_specific_vs_generic"] = pair(*parts, shown.domain, of_domain)
    if augmented is not None:
        pairs["original_vs_augmented"] = pair(z, augmented[order[:count]].float(), shown.y, of_class)
    return {"pairs": pairs}


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
    # it was trained on features divided by `scale`, and maps them as they are
    first.weight /= scale
    return first


def pair(first: Tensor, second: Tensor, label: Tensor, learned: nn.Linear) -> Json:
    """Returns both kinds of features [m,K] of the same images, whose labels are int64 [m], in two planes: that of the
    learned `map`, and that of the principal components of the points shown (`pca`)."""
    both = torch.cat([first, second])  # [2m,K]
    centred = (both - both.mean(0)).double()
    # of 2m points in K dimensions the smaller Gram matrix would do, but `svd` keeps the digits
    axes = torch.linalg.svd(centred, full_matrices=False).Vh[:2]  # [2,K]
    # the sign of an axis is arbitrary: its largest weight is positive
    axes = axes * axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    components = centred @ axes.T
    if components.shape[1] < 2:  # one feature, or one point
        components = F.pad(components, (0, 2 - components.shape[1]))
    return {"map": scatter(learned(both), label), "pca": scatter(components, label)}


def scatter(points: Tensor, label: Tensor) -> Json:
    """Returns points [2m,2] of images whose labels are int64 [m]: first as original or specific ones (kind 0), then as
    augmented or generic ones (kind 1). Silhouettes are of the kinds, and of the labels among the points of each kind.
    """
    m = len(label)
    kind = torch.arange(2).repeat_interleave(m)
    return {
        # three decimals are enough for a plot, and analysis.json holds hundreds of points per model
        "points": [[round(x, 3) for x in point] for point in points.tolist()],
        "kind": kind.tolist(),
        "label": label.repeat(2).tolist(),
        "silhouette": silhouette(points, kind),
        "silhouette_of_labels": [silhouette(points[:m], label), silhouette(points[m:], label)],
    }


def silhouette(points: Tensor, label: Tensor) -> float | None:
    """Returns the mean of (b − a) / max(a, b) over points, with a the mean distance of a point to the others of its
    label and b that to the points of the nearest other label (Rousseeuw 1987); None unless 1 < labels < points.
    """
    from sklearn.metrics import silhouette_score

    if not 1 < len(label.unique()) < len(label):
        return None
    return float(silhouette_score(points.double().numpy(), label.numpy()))
