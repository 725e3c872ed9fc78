"""How well `assess`, `adapt` and thresholds for a risk do at sites with known labels: each domain once as the site.

    python benchmarks/new_site.py PACS --weights FILE      a folder <domain>/<class>/<image>, and an encoder's file
    python benchmarks/new_site.py PACS --weights FILE --per-class 0    all images
    python benchmarks/new_site.py PACS --weights FILE --left-out dog --aliens MITOSIS    30% images of no class

The models are ERM on frozen features (MobileNetV2, 224 px, squash), trained on the other domains, under each of the
seeds. Of each domain × class up to `--per-class` images are drawn with seed 0. All that is random is drawn with
stated seeds. Numbers are means over domains and seeds, in points of accuracy. The last line is JSON.
benchmarks/results.md, "A new site", has measured numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter

import xdm_ft
from xdm_ft.evaluation.expected_site import BELOW, NEARLY, ExpectedAccuracy, card_mean
from xdm_ft.evaluation.few_labels import choose_images, paired_interval, threshold_for
from xdm_ft.evaluation.metrics import confidences, expected_calibration_error
from xdm_ft.export.choose import Choice, read_parts
from xdm_ft.export.predictor import Model
from xdm_ft.heads.linear import Linear
from xdm_ft.new_site.adapt import doubts
from xdm_ft.new_site.reference import site_of
from xdm_ft.new_site.stored import Stored
from xdm_ft.results.run import read_run
from xdm_ft.training.adaptation import adapt_head, correct, do_no_harm

DRAWS, ADAPTATIONS = 20, 10
SIDE = 224


@dataclass(frozen=True)
class Site:
    """A domain, for a model that never saw it. Features [n,K], as the model's head reads them."""

    name: str
    stored: Stored
    model: Model
    z: torch.Tensor
    corrupted: dict[str, torch.Tensor]
    labels: np.ndarray

    @property
    def card(self) -> float:
        return card_mean(self.stored.past_values)

    def logits(self, z: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.model.module.logits(z)

    def expected(self, z: torch.Tensor, rows: np.ndarray) -> tuple[ExpectedAccuracy | None, float]:
        """Returns what to expect of the model on some of the images, and its accuracy there."""
        parts = self.stored.parts(self.stored.seen(z[rows]), self.stored.shares)
        expected = None if parts is None else self.stored.expect(parts, float(len(rows)), len(rows))
        return expected, float((self.logits(z[rows]).argmax(1).numpy() == self.labels[rows]).mean())


def subset(source: Path, target: Path, per_class: int, left_out: str | None = None) -> None:
    """Links up to `per_class` images of every domain × class but one; 0: all."""
    draw = np.random.default_rng(0)
    for folder in sorted(path for path in source.glob("*/*") if path.is_dir() and path.name != left_out):
        files = sorted(folder.iterdir())
        chosen = files if per_class == 0 else [files[i] for i in sorted(draw.permutation(len(files))[:per_class])]
        (target / folder.relative_to(source)).mkdir(parents=True)
        for file in chosen:
            os.symlink(file.resolve(), target / folder.relative_to(source) / file.name)


def corruptions() -> dict[str, Callable[[Image.Image], Image.Image]]:
    draw = np.random.default_rng(1)

    def noisy(image: Image.Image) -> Image.Image:
        pixels = np.asarray(image, np.float64) + draw.normal(0, 38, (SIDE, SIDE, 3))
        return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))

    return {"blur": lambda image: image.filter(ImageFilter.GaussianBlur(3)), "noise": noisy}


def sites(images: Path, weights: str, folder: Path, seeds: int, steps: int, corrupts: bool = True) -> Iterator[Site]:
    encoder = {
        "name": "timm", "model": "mobilenetv2_100", "weights": weights, "trainable": False, "batch_norm": "train",
        "kwargs": {"bn_eps": 1e-3, "pad_type": "same"} if "keras" in weights else {},
        "preprocessing": {"mean": [0.5] * 3, "std": [0.5] * 3, "size": SIDE, "crop": 1.0, "resize": "squash"},
    }  # fmt: skip
    xdm_ft.run({
        "name": "new_site", "data": {"name": "folder", "root": str(images)}, "encoder": encoder, "methods": ["erm"],
        "protocol": {"name": "leave_one_domain_out", "selection": "train_val", "seeds": seeds},
        "training": {"batch_size": 32, "sampler": "per_domain", "steps": steps, "optimizer": "adam", "lr": 1e-3},
        "output": {"dir": str(folder)},
    })  # fmt: skip
    run = read_run(folder / "new_site")
    corrupted = dict[str, dict[str, torch.Tensor]]()
    for record in run.picked:
        [name], choice = record.test_domains, Choice("erm", record.test_domains, record.seed)
        parts = read_parts(run, choice)
        model = Model(parts, "cpu")
        files = sorted(path for path in (images / name).glob("*/*"))
        labels = np.array([model.class_names.index(path.parent.name) for path in files])
        if name not in corrupted:
            opened = [Image.open(path).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC) for path in files]
            of_name = {"": torch.from_numpy(model.encode(files))}
            for what, change in corruptions().items() if corrupts else ():
                of_name[what] = torch.from_numpy(model.encode([change(image) for image in opened]))
            corrupted[name] = of_name
        z = corrupted[name]
        yield Site(name, site_of(run, parts.config), model, z[""], {k: v for k, v in z.items() if k}, labels)


@dataclass
class Statements:
    """What `assess` said at some sites, beside the truth."""

    expected: list[ExpectedAccuracy]
    truth: list[float]
    card: list[float]

    def add(self, site: Site, z: torch.Tensor, rows: np.ndarray) -> None:
        expected, truth = site.expected(z, rows)
        if expected is not None:
            self.expected.append(expected)
            self.truth.append(truth)
            self.card.append(site.card)

    def numbers(self, unwarned: bool) -> dict[str, float | int]:
        kept = [
            i for i, expected in enumerate(self.expected) if not (unwarned and (expected.refused or expected.warnings))
        ]
        estimate = np.array([self.expected[i].estimate for i in kept])
        low, high = (np.array([getattr(self.expected[i], end) for i in kept]) for end in ("low", "high"))
        truth, card = np.array(self.truth)[kept], np.array(self.card)[kept]
        verdicts = np.array([self.expected[i].verdict for i in kept])
        worse, bad = truth < card - NEARLY, truth < card - BELOW
        said_below, promised = verdicts == "below", verdicts == "as_promised"
        error, of_mean = np.abs(estimate - truth).mean(), np.abs(card - truth).mean()
        return {
            "sites": len(self.truth),
            "left_out": len(self.truth) - len(kept),
            "mean_absolute_error": 100 * error,
            "of_the_card_mean": 100 * of_mean,
            "skill": 1 - error / of_mean,
            "covered": 100 * float(((low <= truth) & (truth <= high)).mean()),
            "as_promised": int(promised.sum()),
            "as_promised_wrong": int((promised & worse).sum()),
            "bad": int(bad.sum()),
            "below_at_bad": 100 * float(said_below[bad].mean()) if bad.any() else float("nan"),
            "below_at_others": 100 * float(said_below[~bad].mean()) if (~bad).any() else float("nan"),
        }


def of_shares(labels: np.ndarray, draw: np.random.Generator, size: int = 300) -> np.ndarray:
    """Returns rows with replacement, whose class shares are drawn from Dirichlet(1)."""
    classes = np.unique(labels)
    wanted = draw.choice(classes, size, p=draw.dirichlet(np.ones(len(classes))))
    return np.array([draw.choice(np.flatnonzero(labels == label)) for label in wanted])


@dataclass
class Intruders:
    """What `assess` says at sites where 30% of 300 images belong to no class."""

    before: list[float]  # errors of the estimate from all images
    after: list[float]  # the same of what is printed
    covered: list[bool]  # by the interval of the share; where there is one
    silent: int = 0

    def add(self, site: Site, unknown: torch.Tensor, draw: np.random.Generator) -> None:
        rows, others = draw.choice(len(site.z), 210), draw.choice(len(unknown), 90)
        z = torch.cat([site.z[rows], unknown[others]])
        seen, flagged = site.stored.seen(z), site.stored.is_unknown(z)
        share = site.stored.unknown_share(flagged, np.ones(len(z)))
        leaves_out = share is not None and share.low > 0
        truth = float((site.logits(site.z[rows]).argmax(1).numpy() == site.labels[rows]).mean())
        for kept, errors in ((flagged & False, self.before), (flagged & leaves_out, self.after)):
            parts = site.stored.parts(seen.only(~kept), site.stored.shares)
            errors += [] if parts is None else [abs(parts.estimate - truth)]
        self.silent += share is None
        self.covered += [] if share is None else [share.low <= 0.3 <= share.high]

    def numbers(self) -> dict[str, float]:
        covered = 100 * float(np.mean(self.covered)) if self.covered else float("nan")
        before, after = (100 * float(np.mean(errors)) for errors in (self.before, self.after))
        return {"error_before": before, "error_after": after, "silent": self.silent, "share_covered": covered}


def intruders(images: Path, site: Site, left_out: str, aliens: Path | None) -> dict[str, torch.Tensor]:
    """Returns the features of the site's images of the class left out, and of up to 200 images of another kind."""
    files = {left_out: sorted((images / site.name / left_out).iterdir())}
    if aliens is not None:
        found = sorted(path for path in aliens.rglob("*") if path.suffix in (".webp", ".png", ".jpg"))
        files["aliens"] = [found[i] for i in np.random.default_rng(0).permutation(len(found))[:200]]
    return {what: torch.from_numpy(site.model.encode(of)) for what, of in files.items()}


SITUATIONS: dict[str, dict[str, Any]] = {
    "clean": {}, "10% wrong labels": {"wrong": 0.1}, "30% wrong labels": {"wrong": 0.3},
    "a class without labels": {"missing": True}, "6 groups": {"groups": 6},
}  # fmt: skip


class Adapted(NamedTuple):
    """What an adapted head does on the other images of a site."""

    gain: float
    kept: float  # the gain, or 0 where do-no-harm refuses
    warned: bool  # of labels that the reference head contradicts
    missing: tuple[float, float]  # recall of the class without labels, before and after; nan: all have labels
    ece: tuple[float, float]


def adaptation(
    site: Site, draw: np.random.Generator, labels: int, wrong: float = 0.0, missing: bool = False, groups: int = 0
) -> Adapted:
    """Adapts by random images. `wrong`: share of the labels that are replaced. `missing`: a class has no label.

    `groups`: the images lie in so many of 22 groups, along the direction in which the site's features vary most.
    """
    everywhere = torch.from_numpy(site.labels)
    rows, number, absent = draw.permutation(len(everywhere)), None, draw.integers(len(site.model.class_names))
    if groups:
        centred = site.z - site.z.mean(0)
        along = (centred @ torch.linalg.svd(centred, full_matrices=False)[2][0]).argsort().argsort().numpy()
        number = along * 22 // len(along)
        rows = rows[np.isin(number[rows], draw.permutation(22)[:groups])]
    rows = (rows[site.labels[rows] != absent] if missing else rows)[:labels]
    rest, given = np.setdiff1d(np.arange(len(everywhere)), rows), site.labels[rows].copy()
    flipped = draw.random(len(given)) < wrong
    given[flipped] += draw.integers(1, len(site.model.class_names), flipped.sum())
    given %= len(site.model.class_names)
    head, statistics = site.model.module.head, (site.stored.heads.mean, site.stored.heads.deviation)
    assert isinstance(head, Linear)
    shipped = head.weight.detach(), head.bias.detach()
    about = *shipped, site.z[rows], torch.from_numpy(given), *statistics
    heads, kept = (shipped, adapt_head(*about)), do_no_harm(*about, None if number is None else number[rows]).kept
    right = [correct(*of, site.z[rest], everywhere[rest]).double() for of in heads]
    of_absent = [float(of[everywhere[rest] == absent].mean()) if missing else float("nan") for of in right]
    errors = [
        expected_calibration_error(confidences(site.z[rest] @ weight.T + bias), of.numpy() > 0)
        for (weight, bias), of in zip(heads, right, strict=True)
    ]
    before, after = (float(of.mean()) for of in right)
    warned = bool([*doubts(site.stored, site.z[rows], given)])
    return Adapted(after - before, kept * (after - before), warned, (*of_absent,), (*errors,))  # type: ignore[arg-type]


class Printed(NamedTuple):
    """The gain that `adapt` prints, from the random images of a budget, beside that on all images without a label."""

    gain: float
    covered: bool  # by the interval
    true: float
    cross_validated: float


def printed(site: Site, draw: np.random.Generator, budget: int) -> Printed | None:
    """Labels and adapts as the commands do; None: do-no-harm refuses."""
    y, head = torch.from_numpy(site.labels), site.model.module.head
    assert isinstance(head, Linear)
    chosen = choose_images(site.z.numpy(), site.logits(site.z).softmax(1).numpy(), budget, draw)
    shipped, heads = (head.weight.detach(), head.bias.detach()), site.stored.heads
    about = *shipped, site.z[chosen.adapt], y[chosen.adapt], heads.mean, heads.deviation
    decided = do_no_harm(*about, None)
    if not decided.kept:
        return None
    adapted = adapt_head(*about)
    before, after = (correct(*of, site.z, y).numpy().astype(int) for of in (shipped, adapted))
    change, rest = after - before, np.setdiff1d(np.arange(len(y)), np.concatenate(chosen))
    interval, true = paired_interval(change[chosen.evaluate]), float(change[rest].mean())
    return Printed(
        float(change[chosen.evaluate].mean()), interval.low <= true <= interval.high, true,
        (decided.after - decided.before) / decided.labels,
    )  # fmt: skip


def at_risk(site: Site, draw: np.random.Generator, labels: int = 50, risk: float = 0.1) -> tuple[bool, float] | None:
    """Returns whether the threshold of some random labels breaks its risk on the other images, and what it answers;
    None: there is no threshold."""
    order = draw.permutation(len(site.labels))
    logits = site.logits(site.z)
    confidence, right = logits.double().softmax(1).max(1).values.numpy(), logits.argmax(1).numpy() == site.labels
    found = threshold_for(risk, confidence[order[:labels]], right[order[:labels]])
    if found is None:
        return None
    answered = confidence[order[labels:]] >= found.value
    wrong = ~right[order[labels:]][answered]
    return bool(answered.any() and wrong.mean() > risk), float(answered.mean())


def measure_intruders(given: argparse.Namespace) -> None:
    said = dict[str, Intruders]()
    with tempfile.TemporaryDirectory() as folder:
        subset(given.images, Path(folder, "images"), given.per_class, given.left_out)
        output = Path(folder, "output")
        for number, site in enumerate(
            sites(Path(folder, "images"), given.weights, output, given.seeds, given.steps, corrupts=False)
        ):
            draw = np.random.default_rng(number)
            for what, z in intruders(given.images, site, given.left_out, given.aliens).items():
                for _ in range(DRAWS):
                    said.setdefault(what, Intruders([], [], [])).add(site, z, draw)
            print(f"{site.name}: {site.stored.unknown}", flush=True)
    for what, of in said.items():
        print(f"30% {what}:", ", ".join(f"{key} {value:.3g}" for key, value in of.numbers().items()))
    print(json.dumps({what: of.numbers() for what, of in said.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--weights", required=True, help="a file with the weights of mobilenetv2_100")
    parser.add_argument("--per-class", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000, help="of training the models")
    parser.add_argument("--left-out", metavar="CLASS", help="measure images of this class, which no model sees")
    parser.add_argument("--aliens", type=Path, metavar="FOLDER", help="with --left-out: images of another kind")
    given = parser.parse_args()
    if given.left_out is not None:
        measure_intruders(given)
        return
    whole, shifted, corrupted = (Statements([], [], []) for _ in range(3))
    gains, broken, coverage = dict[str, list[Adapted]](), list[bool](), list[float]()
    found_threshold, said = list[bool](), dict[int, list[Printed]]()
    with tempfile.TemporaryDirectory() as folder:
        subset(given.images, Path(folder, "images"), given.per_class)
        for number, site in enumerate(
            sites(Path(folder, "images"), given.weights, Path(folder, "output"), given.seeds, given.steps)
        ):
            draw, every = np.random.default_rng(number), np.arange(len(site.labels))
            whole.add(site, site.z, every)
            for _ in range(DRAWS):
                shifted.add(site, site.z, of_shares(site.labels, draw))
                of_labels = at_risk(site, draw)
                found_threshold.append(of_labels is not None)
                broken.append(of_labels is not None and of_labels[0])
                coverage.append(0.0 if of_labels is None else of_labels[1])
            for z in (site.z, *site.corrupted.values()):
                corrupted.add(site, z, every)
            for budget, _ in product((100, 200), range(ADAPTATIONS)):
                one = printed(site, draw, budget)
                said.setdefault(budget, []).extend([] if one is None else [one])
            for (what, how), labels in product(SITUATIONS.items(), (25, 50, 100)):
                for _ in range(ADAPTATIONS):
                    gains.setdefault(f"{what}, {labels} labels", []).append(adaptation(site, draw, labels, **how))
            found, truth = site.expected(site.z, every)
            print(f"{site.name}: accuracy {truth:.3f}, card mean {site.card:.3f}, {found}", flush=True)
    results = {
        name: {"all": of.numbers(False), "without_warnings": of.numbers(True)}
        for name, of in (("domains", whole), ("dirichlet", shifted), ("corrupted", corrupted))
    }
    for name, of_both in results.items():
        for how, numbers in of_both.items():
            print(f"{name}, {how}:", ", ".join(f"{key} {value:.3g}" for key, value in numbers.items()))
    adapted = {}
    for what, values in gains.items():
        gain, kept = (100 * np.array([getattr(value, name) for value in values]) for name in ("gain", "kept"))
        absent, ece = (100 * np.array([getattr(value, name) for value in values]) for name in ("missing", "ece"))
        adapted[what] = {
            "gain": gain.mean(), "kept": kept.mean(), "harm": 100 * (gain < -2).mean(),
            "kept_harm": 100 * (kept < -2).mean(), "warned": 100 * np.mean([value.warned for value in values]),
            "ece": [*ece.mean(0)], "missing_recall": [*absent.mean(0)],
        }  # fmt: skip
        print(f"adapt, {what}:", adapted[what])
    says = {}
    for budget, of in ((budget, of) for budget, of in said.items() if of):
        gain, covered, true, crossed = np.array(of, float).T
        says[budget] = {
            "adapted": len(of), "true_gain": 100 * true.mean(), "printed_off": 100 * (gain - true).mean(),
            "printed_error": 100 * np.abs(gain - true).mean(), "interval_covers": 100 * covered.mean(),
            "cross_validation_off": 100 * (crossed - true).mean(),
        }  # fmt: skip
        print(f"adapt, budget {budget}:", says[budget])
    risk = {
        "found": 100 * float(np.mean(found_threshold)),
        "broken": 100 * float(np.mean(broken)),
        "coverage": float(np.mean(coverage)),
        "coverage_where_found": float(np.sum(coverage) / max(1, np.sum(found_threshold))),
    }
    print("risk 10%, 50 labels:", ", ".join(f"{key} {value:.3g}" for key, value in risk.items()))
    print(json.dumps({**results, "adapt": adapted, "printed": says, "risk": risk}))


if __name__ == "__main__":
    main()
