"""An analysis.json as `xdm-ft analyse` writes it, with made-up numbers that differ everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]
SHARES = [step / 10 for step in range(10)]


def analysis(
    methods: Sequence[str],
    held: Sequence[tuple[str, ...]],
    domains: Sequence[str],
    seeds: Sequence[int] = (0,),
    classes: int = 3,
) -> Json:
    """Every part of every model; `xdomainmix` methods have divergences at two levels and augmented points."""
    found = [
        _model(i + 10 * j + 100 * seed, method, where, [d for d in domains if d not in where], seed, classes)
        for i, method in enumerate(methods)
        for j, where in enumerate(held)
        for seed in seeds
    ]
    counts = {"training": 900, "used": 900, "validation": 300, "validation_used": 300, "test": 400, "test_used": 400}
    images = {",".join(where): counts for where in held}
    notes = ["frozen encoder: the features, and so the representation invariance, are the same for all methods"]
    head = {"schema": 1, "selection": "train_val", "seed": seeds[0], "images": images}
    return {**head, "notes": notes, "models": found}


def _model(k: int, method: str, where: tuple[str, ...], train: list[str], seed: int, classes: int) -> Json:
    mixing = "xdomainmix" in method
    domains = {d: _measured(k + i, "validation") for i, d in enumerate(train)}
    domains |= {d: _measured(k + 7 + i, "test") for i, d in enumerate(where)}
    first = seed == 0
    return {
        "method": method,
        "test_domains": list(where),
        "seed": seed,
        "trial": 0,
        "representation_invariance": {
            "paper": 1.234 + 0.01 * k,
            "published_code": 0.00234 + 0.0001 * k,
            "classes": classes,
            "domains": len(train),
            "paper_noise": 0.5 + 0.01 * k,
            "published_code_noise": 0.001 + 0.0001 * k,
        },
        "prediction_invariance": {
            "risk_variance": 0.0456 + 0.001 * k,
            "risk": {d: 0.3 + 0.1 * i + 0.001 * k for i, d in enumerate(train)},
        },
        "calibration": {"temperature": 1.2 + 0.01 * k, "domains": domains},
        "domain_head": ("own" if mixing else "fitted") if first else None,
        "importance": _importance(k, mixing) if first else None,
        "embedding": _embedding(k, classes, len(train), mixing) if first else None,
        "divergence": [_divergence(k, q) for q in (0.5, 0.9)] if mixing else None,
        "inputs": f"{k:016x}",
    }


def _measured(k: int, role: str) -> Json:
    before = 0.05 + 0.002 * k
    return {
        "role": role,
        "n": 330 + k,
        "ece": before,
        "ece_scaled": before / 2,
        "nll": 0.9 + 0.01 * k,
        "nll_scaled": 0.8 + 0.01 * k,
        "reliability": _bins(before),
        "reliability_scaled": _bins(before / 2),
    }


def _bins(off: float) -> list[Json]:
    """The first bins are empty, the next one has too few images to be drawn."""
    found: list[Json] = [{"confidence": None, "accuracy": None, "n": 0} for _ in range(4)]
    found.append({"confidence": 0.3, "accuracy": 0.99, "n": 3})
    for i in range(5, 15):
        centre = (i + 0.5) / 15
        found.append({"confidence": centre, "accuracy": max(centre - off, 0.0), "n": 10 + 20 * i})
    return found


def _importance(k: int, own_head: bool) -> Json:
    curves = {
        "score": [0.9 * (1 - share) ** 3 + 0.1 for share in SHARES],
        "gradient_norm": [0.9 * (1 - share) ** 1.5 + 0.1 - 0.001 * k / 10 for share in SHARES],
        "random": [0.95 - 0.4 * share**3 for share in SHARES],
    }
    area = {order: 0.4 + 0.1 * i + 0.0003 * k for i, order in enumerate(curves)}
    both = {order: [0.9 * value for value in values] for order, values in curves.items()} if own_head else None
    areas = {"class": area, "domain": {order: value / 2 for order, value in area.items()} if own_head else None}
    return {"shares": SHARES, "images": 1588, "class": curves, "domain": both, "area": areas}


def _embedding(k: int, classes: int, domains: int, augmented: bool) -> Json:
    pairs = {"class_specific_vs_generic": _pair(k, classes), "domain_specific_vs_generic": _pair(k + 3, domains)}
    return {"pairs": pairs | ({"original_vs_augmented": _pair(k + 5, classes)} if augmented else {})}


def _pair(k: int, labels: int) -> Json:
    return {"map": _plot(k, labels, 3.0), "pca": _plot(k + 1, labels, 1.0)}


def _plot(k: int, labels: int, apart: float) -> Json:
    """200 images, each as two points; labels lie apart among points of kind 0 only."""
    label = [i % labels for i in range(200)] * 2
    kind = [0] * 200 + [1] * 200
    points = []
    for i, (own, of) in enumerate(zip(label, kind, strict=True)):
        turn, radius = 2.4 * i + k, 0.05 * math.sqrt(i % 200)
        centre = apart * (1 - of)
        angle = 2 * math.pi * own / labels
        x, y = centre * math.cos(angle) + radius * math.cos(turn), centre * math.sin(angle) + radius * math.sin(turn)
        points.append([round(x, 3), round(y, 3)])
    found = {"points": points, "kind": kind, "label": label, "silhouette": 0.11 + 0.001 * k}
    return {**found, "silhouette_of_labels": [0.61 + 0.001 * k, 0.02 - 0.001 * k]}


def _divergence(k: int, quantile: float | None) -> Json:
    value = 0.4375 + 0.0001 * k
    error = {"unbiased_mmd2": 0.012 + 0.001 * k + 0.02 * (quantile or 0), "stderr": 0.0011, "n": 1000}
    return {"quantile": quantile, "published_mmd": value, "batch_size": 32, **error, "bandwidths": [8.1, 16.2, 32.4]}
