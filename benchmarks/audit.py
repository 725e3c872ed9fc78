"""How much of what is planted in real images `xdm-ft audit` finds.

    python benchmarks/audit.py copies PACS --weights FILE  a folder <domain>/<class>/<image>, and an encoder's file

copies      Of `--planted` images a changed copy is added: mirrored, a 90% crop, half the size, tinted, or stored as JPEG
            of quality 15. Recall: how many of the copies are paired with their original among the first 2 · `--planted`
            pairs, ranked by the audit's score and by the plain formula 2 cos(i, j) − r(i) − r(j). The real images hold
            near copies too, which take up some of these pairs.

Of each domain × class up to `--per-class` images are drawn with seed 0; the encoder is MobileNetV2 at 224 px (squash).
All that is random is drawn with stated seeds. The last line is JSON. docs/results.md, "Audit", has measured numbers.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from new_site import subset
from PIL import Image

from xdm_ft.audit.copies import near_copies
from xdm_ft.data.folder import Folder
from xdm_ft.encoders.timm import Timm
from xdm_ft.evaluation.neighbours import directions, nearest
from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache import Features, cache_folder
from xdm_ft.features.extract import extract
from xdm_ft.features.hashes import hash_files
from xdm_ft.images import ImageDataset
from xdm_ft.images.transforms import PreprocessingOverrides


def mirrored(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def cropped(image: Image.Image) -> Image.Image:
    """Cuts off 10% of both sides at the upper left."""
    return image.crop((round(0.1 * image.width), round(0.1 * image.height), image.width, image.height))


def halved(image: Image.Image) -> Image.Image:
    return image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC)


def tinted(image: Image.Image) -> Image.Image:
    pixels = np.asarray(image, np.float64) * (1.15, 1.0, 0.8)
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


def compressed(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=15)
    return Image.open(file).convert("RGB")


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "mirrored": mirrored, "90% crop": cropped, "half size": halved, "tint": tinted, "JPEG 15": compressed,
}  # fmt: skip


def features_of(dataset: ImageDataset, weights: str, cache: Path) -> Features:
    overrides = PreprocessingOverrides(size=224, crop=1.0, resize="squash", mean=(0.5,) * 3, std=(0.5,) * 3)
    kwargs = {"bn_eps": 1e-3, "pad_type": "same"} if "keras" in weights else {}
    encoder = Timm(model="mobilenetv2_100", weights=weights, kwargs=kwargs, preprocessing=overrides)
    settings = FeatureSettings(dir=cache)
    hashes = hash_files(dataset, cache_folder(settings), show=True)
    return extract(encoder, dataset, hashes, settings, on_bad_image="error", device="cpu", show=True)


def recall(z: torch.Tensor, original: np.ndarray, ranking: str, most: int) -> tuple[int, int, int]:
    """Returns how many copies the first `most` pairs hold, how many pairs are called sure, and copies among those.

    `original` int64 [n]: the row that an image is a copy of; −1: of none.
    """
    unit = directions(lambda rows: z[rows], torch.arange(len(z)), str)
    pairs = near_copies(nearest(unit), ranking)
    copies = [original[pair.second] == pair.first or original[pair.first] == pair.second for pair in pairs]
    sure = [copy for copy, pair in zip(copies, pairs, strict=True) if pair.sure]
    return sum(copies[:most]), len(sure), sum(sure)


def copies(given: argparse.Namespace, folder: Path) -> dict[str, object]:
    subset(given.images, folder / "images", given.per_class)
    originals = Folder(root=folder / "images")
    rows = np.random.default_rng(1).permutation(len(originals))[: 2 * given.planted]
    for name, change in CHANGES.items():
        target = folder / "copies" / "copies" / name
        target.mkdir(parents=True)
        for number, row in enumerate(rows):
            change(Image.open(originals.paths[int(row)]).convert("RGB")).save(target / f"{number:06d}.png")
    changed, cache = Folder(root=folder / "copies"), given.cache or folder / "cache"
    plain = features_of(originals, given.weights, cache)[torch.arange(len(originals))]
    every = features_of(changed, given.weights, cache)[torch.arange(len(changed))]
    of_change = {name: every[changed.labels == changed.class_names.index(name)] for name in CHANGES}
    half = given.planted
    planted = {name: (z[:half], rows[:half]) for name, z in of_change.items()}
    both = torch.cat([of_change["mirrored"][:half], of_change["90% crop"][half:]])
    planted["mirrored and 90% crop, of other images"] = both, rows
    family = torch.cat([of_change["mirrored"][:half], of_change["half size"][:half], of_change["tint"][:half]])
    planted["three copies of each"] = family, np.tile(rows[:half], 3)
    results = dict[str, object]()
    for name, (z, of) in planted.items():
        original = np.concatenate([np.full(len(plain), -1), of])
        found = {}
        for ranking in ("ratio", "formula"):
            first, sure, right = recall(torch.cat([plain, z]), original, ranking, 2 * len(of) if len(of) < 3 * half else 6 * half)
            found[ranking] = {"planted": len(of), "recalled": first, "sure": sure, "planted_and_sure": right}
        results[name] = found
        print(name, found, flush=True)
    return results
