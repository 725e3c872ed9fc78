"""An analysis.json as `xdm-ft analyse` writes it, with made-up numbers that differ everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xdm_ft.evaluation.records import ModelKey

Json = dict[str, Any]
SHARES = [step / 10 for step in range(10)]
CLASSES = 3


def analysis(models: Sequence[ModelKey], domains: Sequence[str]) -> Json:
    """Every part of every model; `xdomainmix` methods have divergences at two levels and augmented points."""
    sizes = {"training": 900, "used": 900, "validation": 300, "validation_used": 300, "test": 400, "test_used": 400}
    notes = ["frozen encoder: the features, and so the representation invariance, are the same for all methods"]
    images = {",".join(key.test_domains): sizes for key in models}
    head = {"schema": 1, "selection": "train_val", "seed": 0, "images": images, "notes": notes}
    return {**head, "models": [_model(i + 100 * key.seed, key, domains) for i, key in enumerate(models)]}


def _model(k: int, key: ModelKey, domains: Sequence[str]) -> Json:
    mixing, first = "xdomainmix" in key.method, key.seed == 0
    train = [domain for domain in domains if domain not in key.test_domains]
    measured = {domain: _calibration(k + i, "validation") for i, domain in enumerate(train)}
    measured |= {domain: _calibration(k + 7 + i, "test") for i, domain in enumerate(key.test_domains)}
    pairs = {"class_specific_vs_generic": CLASSES, "domain_specific_vs_generic": len(train)}
    pairs |= {"original_vs_augmented": CLASSES} if mixing else {}
    plots = {name: {"map": _plot(k, n, 3.0), "pca": _plot(k + 1, n, 1.0)} for name, n in pairs.items()}
    divergence = {"published_mmd": 0.4375 + 0.0001 * k, "batch_size": 32, "stderr": 0.0011, "n": 1000,
                  "bandwidths": [8.1, 16.2, 32.4]}  # fmt: skip
    return {
        "method": key.method,
        "test_domains": list(key.test_domains),
        "seed": key.seed,
        "trial": key.trial,
        "representation_invariance": {
            "paper": 1.234 + 0.01 * k, "published_code": 0.00234 + 0.0001 * k, "classes": CLASSES,
            "domains": len(train), "paper_noise": 0.5 + 0.01 * k, "published_code_noise": 0.001 + 0.0001 * k,
        },
        "prediction_invariance": {
            "risk_variance": 0.0456 + 0.001 * k, "risk": {d: 0.3 + 0.1 * i + 0.001 * k for i, d in enumerate(train)},
        },
        "calibration": {"temperature": 1.2 + 0.01 * k, "domains": measured},
        "domain_head": ("own" if mixing else "fitted") if first else None,
        "importance": _importance(k, mixing) if first else None,
        "embedding": {"pairs": plots} if first else None,
        "divergence": [
            divergence | {"quantile": q, "unbiased_mmd2": 0.012 + 0.001 * k + 0.02 * q} for q in (0.5, 0.9)
        ] if mixing else None,
        "inputs": f"{k:016x}",
    }  # fmt: skip


def _calibration(k: int, role: str) -> Json:
    before = 0.05 + 0.002 * k
    losses = {"nll": 0.9 + 0.01 * k, "nll_scaled": 0.8 + 0.01 * k}
    bins = {"reliability": _bins(before), "reliability_scaled": _bins(before / 2)}
    return {"role": role, "n": 330 + k, "ece": before, "ece_scaled": before / 2, **losses, **bins}


def _bins(off: float) -> list[Json]:
    """The first bins are empty, the next one has too few images to be drawn."""
    bins: list[Json] = [{"confidence": None, "accuracy": None, "n": 0} for _ in range(4)]
    bins.append({"confidence": 0.3, "accuracy": 0.99, "n": 3})
    centres = [(i + 0.5) / 15 for i in range(5, 15)]
    return bins + [{"confidence": c, "accuracy": max(c - off, 0.0), "n": 110 + 20 * i} for i, c in enumerate(centres)]


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


def _plot(k: int, labels: int, apart: float) -> Json:
    """200 images, each as two points; labels lie apart among points of kind 0 only."""
    label, kind = [i % labels for i in range(200)] * 2, [0] * 200 + [1] * 200
    points = []
    for i, (number, part) in enumerate(zip(label, kind, strict=True)):
        turn, radius, centre = 2.4 * i + k, 0.05 * math.sqrt(i % 200), apart * (1 - part)
        angle = 2 * math.pi * number / labels
        x, y = centre * math.cos(angle) + radius * math.cos(turn), centre * math.sin(angle) + radius * math.sin(turn)
        points.append([round(x, 3), round(y, 3)])
    silhouettes = {"silhouette": 0.11 + 0.001 * k, "silhouette_of_labels": [0.61 + 0.001 * k, 0.02 - 0.001 * k]}
    return {"points": points, "kind": kind, "label": label, **silhouettes}
