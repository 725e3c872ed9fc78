"""How much of what is planted in real images `xdm-ft audit` finds.

    python benchmarks/audit.py copies PACS --weights FILE  a folder <domain>/<class>/<image>, and an encoder's file
    python benchmarks/audit.py labels PACS --weights FILE      likewise: marks (without FILE), random, twins

copies      Of `--planted` images a changed copy is added: mirrored, a 90% crop, half the size, tinted, or saved as a
            JPEG of quality 15. Recall: how many of the copies are paired with their original among the first
            2 · `--planted` pairs, ranked by the audit's score and by the formula 2 cos(i, j) − r(i) − r(j); of families
            of copies, among twice as many pairs as they have. The real images hold near copies too.
labels      5% of the labels are replaced by another class, both drawn at random, under ten seeds. Precision: the share
            of them among as many images, ranked by doubt; and among the suspects.
marks       One class of one domain, in turn, gets a tint, a text or a rectangle, in all of its images or in half: how
            often it is found there, and what else is. Encoders are not used; mitoses (two classes) work too.
random      5% of the images, drawn at random, are left out of training, under 20 draws: how many cost something.
twins       The domains as they are, and one of them, in turn, divided in two at random, which makes true twins.

Of each domain × class up to `--per-class` images are drawn with seed 0; the encoder is MobileNetV2 at 224 px (squash).
All that is random is drawn with stated seeds. The last line is JSON. benchmarks/results.md, "Audit", has the numbers.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path

import numpy as np
import torch
from new_site import subset
from PIL import Image, ImageDraw

from xdm_ft.audit.copies import near_copies
from xdm_ft.audit.costs import Change, costs
from xdm_ft.audit.facts import LowLevel, low_level, marks
from xdm_ft.audit.labels import label_scores
from xdm_ft.audit.measure import audit, read_study
from xdm_ft.data.folder import Folder
from xdm_ft.encoders.timm import Timm
from xdm_ft.evaluation.neighbours import Neighbours, directions, neighbours
from xdm_ft.experiment.work import launched, one_thread
from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache import Features, cache_folder
from xdm_ft.features.extract import extract
from xdm_ft.features.hashes import hash_files
from xdm_ft.images import ImageDataset
from xdm_ft.images.transforms import PreprocessingOverrides
from xdm_ft.recipe.check import check
from xdm_ft.recipe.settings import Recipe
from xdm_ft.recipe.text import parse


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


def formula_pairs(found: Neighbours) -> list[tuple[int, int]]:
    """Returns mutual nearest neighbours, the highest 2 cos(i, j) − r(i) − r(j) first."""
    first, nearest = np.arange(len(found.rows)), found.nearest[:, 0]
    r = found.cosines.mean(1)
    score = 2 * found.cosines[:, 0] - r - r[nearest]
    mutual = np.flatnonzero((nearest[nearest] == first) & (first < nearest))
    mutual = mutual[np.argsort(-score[mutual], kind="stable")]
    return list(zip(mutual.tolist(), nearest[mutual].tolist(), strict=True))


def recalled(pairs: Iterable[tuple[int, int]], image: np.ndarray, planted: int) -> int:
    """Returns how many copies the pairs hold together with their original or another copy of it.

    `image` int64 [n]: the row of the original; the last `planted` are copies.
    """
    right = {end for pair in pairs if image[pair[0]] == image[pair[1]] for end in pair}
    return sum(end >= len(image) - planted for end in right)


def copies(given: argparse.Namespace, folder: Path) -> dict[str, object]:
    subset(given.images, folder / "images", given.per_class)
    originals, half = Folder(root=folder / "images"), given.planted
    rows = np.random.default_rng(1).permutation(len(originals))[: 2 * half]
    for name, change in CHANGES.items():
        target = folder / "copies" / "copies" / name
        target.mkdir(parents=True)
        for number, row in enumerate(rows):
            change(Image.open(originals.paths[int(row)]).convert("RGB")).save(target / f"{number:06d}.png")
    changed, cache = Folder(root=folder / "copies"), given.cache or folder / "cache"
    plain = features_of(originals, given.weights, cache)[torch.arange(len(originals))]
    every = features_of(changed, given.weights, cache)[torch.arange(len(changed))]
    of_change = {name: every[torch.from_numpy(changed.labels == changed.class_names.index(name))] for name in CHANGES}
    return {"images": len(plain), **recalls(plain, rows, of_change, half)}


def recalls(
    plain: torch.Tensor, rows: np.ndarray, of_change: Mapping[str, torch.Tensor], half: int
) -> dict[str, dict[str, int]]:
    """Returns what is found of each set of planted copies, by its name.

    `plain` [N,K]: features of the originals; `of_change`: of the changed copies of the images `rows`, [2 · half,K].
    """
    planted = {name: (z[:half], rows[:half]) for name, z in of_change.items()}
    planted["mirrored, and 90% crop of others"] = (
        torch.cat([of_change["mirrored"][:half], of_change["90% crop"][half:]]), rows,
    )  # fmt: skip
    planted["nothing"] = plain[:0], rows[:0]
    for name, changes in (("three copies of each", ("mirrored", "half size", "tint")), ("all five", (*CHANGES,))):
        planted[name] = torch.cat([of_change[change][:half] for change in changes]), np.tile(rows[:half], len(changes))
    results = dict[str, dict[str, int]]()
    for name, (z, of) in planted.items():
        every, image = torch.cat([plain, z]), np.concatenate([np.arange(len(plain)), of])
        order = torch.arange(len(every))
        found = neighbours(directions(every, order, str), order, np.zeros(len(every), np.int64))
        listed = near_copies(found, np.zeros(len(found.rows), np.int64))
        pairs, sure = (
            [(pair.first, pair.second) for pair in listed if pair.sure or not only] for only in (False, True)
        )
        size = 1 + len(of) // half  # of a family: all of its pairs could be listed
        most = 2 * half if len(of) <= 2 * half else half * size * (size - 1)
        results[name] = {
            "planted": len(of), "pairs": most, "score": recalled(pairs[:most], image, len(of)),
            "formula": recalled(formula_pairs(found)[:most], image, len(of)),
            "sure": len(sure), "sure_copies": recalled(sure, image, len(of)),
            "sure_of_planted": sum(int(image[i] == image[j]) for i, j in sure),
        }  # fmt: skip
        print(f"{name}:", ", ".join(f"{key} {value}" for key, value in results[name].items()), flush=True)
    return results


RECIPE = """\
name: labels
data: {name: features, file: FILE}
protocol: {name: leave_one_domain_out, seeds: 5}
methods: [erm]
training: {steps: 300}
"""
DRAWS = 10


def labels(given: argparse.Namespace, folder: Path) -> dict[str, object]:
    subset(given.images, folder / "images", given.per_class)
    images = Folder(root=folder / "images")
    z = features_of(images, given.weights, given.cache or folder / "cache")[torch.arange(len(images))].numpy()
    domains, file = np.array(images.domain_names)[images.domains], folder / "features.npz"
    recipe, results = parse(RECIPE.replace("FILE", str(file)), "labels.yaml"), list[list[float]]()
    for seed in range(DRAWS):
        rng, wrong_labels, count = np.random.default_rng(seed), images.labels.copy(), len(images) // 20
        wrong = rng.choice(len(images), count, replace=False)
        wrong_labels[wrong] += rng.integers(1, len(images.class_names), count)
        np.savez(file, features=z, label=wrong_labels % len(images.class_names), domain=domains)
        checked = check(recipe)
        with launched(checked) as accelerator, one_thread():
            scores = label_scores(read_study(checked, accelerator, None))
        assert scores is not None
        ranked, suspects = scores.rows[scores.doubtful[:count]], scores.rows[scores.suspects]
        results.append([float(np.isin(ranked, wrong).mean()), len(suspects), float(np.isin(suspects, wrong).mean())])
        print(f"seed {seed}: precision {results[-1][0]:.3f}, {len(suspects)} suspects {results[-1][2]:.3f}", flush=True)
    mean = np.mean(results, axis=0).round(3).tolist()
    return {
        "images": len(images),
        "planted": count,
        **dict(zip(("precision", "suspects", "theirs"), mean, strict=True)),
    }


def written(text: str, pixels: np.ndarray) -> np.ndarray:
    """Writes a white text of half opacity at the lower right, [H,W,3]."""
    layer = Image.new("L", (128, 128))
    ImageDraw.Draw(layer).text((66, 114), text, fill=255)
    opacity = np.asarray(layer.resize(pixels.shape[1::-1]))[..., None] / 510
    return (1 - opacity) * pixels + opacity * 255


def boxed(pixels: np.ndarray) -> np.ndarray:
    height, width = pixels.shape[:2]
    changed = pixels.copy()
    changed[-height // 8 : -height // 32, -width // 8 : -width // 32] = 153
    return changed


MARKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tint": lambda pixels: pixels * (1.15, 1.0, 0.8),
    "weak tint": lambda pixels: pixels * (1.07, 1.0, 0.93),
    "text": lambda pixels: written("(c) site 1", pixels),
    "rectangle": boxed,
}


class Marked(Folder):
    """Images of which some are changed as they are read."""

    mark: Callable[[np.ndarray], np.ndarray] | None = None

    def draft(self, row: int, least_side: int | None) -> Image.Image:
        image = self.image(row)
        if self.mark is None:
            return image
        return Image.fromarray(self.mark(np.asarray(image, float)).round().clip(0, 255).astype(np.uint8))


def marks_found(given: argparse.Namespace, folder: Path) -> dict[str, object]:
    subset(given.images, folder / "images", given.per_class)
    data = Marked(root=folder / "images")
    plain, domains, names = low_level(data, np.arange(len(data))), data.domains, (data.domain_names, data.class_names)
    clean = [mark for mark in marks(plain, data.labels, domains, *names) if mark.found]
    results: dict[str, object] = {"images": len(data), "nothing": len(clean)}
    for (name, change), share in product(MARKS.items(), (1.0, 0.5)):
        data.mark, right, other = change, 0, 0
        for domain, label in enumerate(np.arange(len(data.domain_names)) % len(data.class_names)):
            of_class = np.flatnonzero((domains == domain) & (data.labels == label))
            rows = np.random.default_rng(domain).permutation(of_class)[: round(share * len(of_class))]
            changed = low_level(data, rows)
            detail, colour = plain.detail.copy(), plain.colour.copy()
            detail[rows], colour[rows] = changed.detail, changed.colour
            found = marks(LowLevel(plain.rows, detail, colour), data.labels, domains, *names)
            there = {mark.domain == data.domain_names[domain] for mark in found if mark.found}
            right, other = right + (True in there), other + (False in there)
        results[f"{name}, {share:.0%}"] = [right, other]
        print(
            f"{name}, {share:.0%}: found in {right} of {len(data.domain_names)} domains, {other} elsewhere", flush=True
        )
    return results


def of_features(given: argparse.Namespace, folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, Recipe]:
    """Returns features, labels, names of domains, and a recipe that reads `folder`/features.npz."""
    subset(given.images, folder / "images", given.per_class)
    images = Folder(root=folder / "images")
    z = features_of(images, given.weights, given.cache or folder / "cache")[torch.arange(len(images))].numpy()
    recipe = parse(RECIPE.replace("FILE", str(folder / "features.npz")), "audit.yaml")
    return z, images.labels, np.array(images.domain_names)[images.domains], check(recipe)


def random_parts(given: argparse.Namespace, folder: Path) -> dict[str, object]:
    z, labels, domains, recipe = of_features(given, folder)
    np.savez(folder / "features.npz", features=z, label=labels, domain=domains)
    verdicts = Counter[str]()
    with launched(recipe) as accelerator, one_thread():
        study = read_study(recipe, accelerator, None)
        held_out = {split.test_domains for _, split in study.heads}
        for seed in range(2 * DRAWS):
            rows = np.random.default_rng(seed).choice(len(labels), len(labels) // 20, replace=False)
            [cost] = costs(study, [Change("random", len(rows), dict.fromkeys(held_out, rows))])
            verdicts[cost.verdict] += 1
    return {"images": len(labels), **verdicts}


def twin_domains(given: argparse.Namespace, folder: Path) -> dict[str, object]:
    z, labels, domains, recipe = of_features(given, folder)
    results: dict[str, object] = {"images": len(labels)}
    for divided in ("", *np.unique(domains).tolist()):
        half = np.random.default_rng(0).integers(1, 3, len(labels))
        names = np.where(domains == divided, np.char.add(np.char.add(domains, " "), half.astype(str)), domains)
        np.savez(folder / "features.npz", features=z, label=labels, domain=names)
        with launched(recipe) as accelerator, one_thread():
            document = audit(read_study(recipe, accelerator, None)).document
        results[divided or "as they are"] = document["twins"], document["domain_pairs"]["undecided"]
        print(divided or "as they are", *results[divided or "as they are"], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("yardstick", choices=YARDSTICKS)
    parser.add_argument("images", type=Path)
    parser.add_argument("--weights", help="a file with the weights of mobilenetv2_100")
    parser.add_argument("--per-class", type=int, default=100, help="images of each domain × class; 0: all")
    parser.add_argument("--planted", type=int, default=50)
    parser.add_argument("--cache", type=Path, help="folder in which the features stay; default: none")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({given.yardstick: YARDSTICKS[given.yardstick](given, Path(folder))}))


YARDSTICKS: dict[str, Callable[[argparse.Namespace, Path], dict[str, object]]] = {
    "copies": copies, "labels": labels, "marks": marks_found, "random": random_parts, "twins": twin_domains,
}  # fmt: skip


if __name__ == "__main__":
    main()
