"""How well images of no class are told: by several scores, and as the share that `assess` prints.

    python benchmarks/unknown.py scores RUN             a finished run of erm on a frozen encoder
    python benchmarks/unknown.py shares FEATURES.npz    features, label and domain of images, such as CLIP's

scores      AUROC of unknown images at domains that no head saw, whose classes are left out with them, over the models
            of the run: means over their held-out domains and classes.
shares      One domain is divided in three at random. Some classes, drawn with seed 0, are left out of training in turn:
            at one third of that domain, and at the other domain, sites of 300 images hold 0, 10 and 30% of the class.
            Means over 20 draws: share, whether its interval covers, whether it lies above 0, error of the estimate from
            all images and as it is printed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

import xdm_ft
from xdm_ft.evaluation.expected_site import energy
from xdm_ft.evaluation.metrics import wins
from xdm_ft.features.cache import standard
from xdm_ft.new_site import reference
from xdm_ft.new_site.stored import Heads, Stored
from xdm_ft.results.run import Run, read_run

NEAREST, RIDGE = 10, 0.1  # means; of the covariance, in mean variances
CLASSES, DRAWS, IMAGES = 5, 20, 300


def auroc(scores: np.ndarray, unknown: np.ndarray) -> float:
    return float(wins(scores, unknown).mean())


class Measured(reference._Study):
    """Keeps the AUROC of each score, {score: {held-out domain: [of classes]}}."""

    found: dict[str, dict[str, list[float]]] = {}

    def _scores(
        self, held: Sequence[str], classes: Sequence[int], rows: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        mean, deviation = standard(self.features, torch.cat([*self._without(held).train]).sort().values)
        here = (self.features[torch.from_numpy(rows)] - mean) / deviation
        splits = [self._without(held, label) for label in classes]
        models = [self._bank_models(split)[0] for split in splits]
        weights = self._linear_heads(models, self.features.standardized(mean, deviation), reference.SNAPSHOTS[-1:])
        logits = self._logits(Heads(weights[:, 0].half().float(), mean, deviation), rows).double().numpy()
        for of_head, label, split in zip(logits, classes, splits, strict=True):
            trained = torch.cat([*split.train]).sort().values
            known, domains = self.dataset.labels[trained.numpy()], self.dataset.domains[trained.numpy()]
            of_head[:, np.setdiff1d(np.arange(logits.shape[-1]), known)] = -np.inf
            scores = {"energy": energy(of_head), "max logit": -of_head.max(1)}
            scores |= distances((self.features[trained] - mean) / deviation, known, domains, here)
            for name, score in scores.items():
                of_domain = self.found.setdefault(name, {}).setdefault(", ".join(held), [])
                of_domain.append(auroc(score, self.dataset.labels[rows] == label))
        return super()._scores(held, classes, rows)


def distances(x: Tensor, labels: np.ndarray, domains: np.ndarray, here: Tensor) -> dict[str, np.ndarray]:
    """Returns the distances of features `here` to means of a class in a domain, of standardised features [n,K]."""
    x, here = x.double(), here.double()
    number = torch.from_numpy(np.unique(labels * (domains.max() + 1) + domains, return_inverse=True)[1])
    means = torch.stack([x[number == i].mean(0) for i in range(int(number.max()) + 1)])
    covariance = (x - means[number]).T.cov(correction=0)
    ridge = RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.float64)
    whitening = torch.linalg.cholesky(torch.linalg.inv(covariance + ridge))
    near = torch.cdist(here, means).topk(min(NEAREST, len(means)), largest=False).values.mean(1)
    return {
        f"distance to the {NEAREST} nearest means": near.numpy(),
        "Mahalanobis, nearest mean": torch.cdist(here @ whitening, means @ whitening).min(1).values.numpy(),
    }


def site(run: Run, held_out: tuple[str, ...]) -> Stored:
    method = {"label": "erm", "test_domains": held_out, "seed": run.picked[0].seed}
    return reference.site_of(run, cast(Any, SimpleNamespace(method=method)))


def scores(path: Path) -> None:
    run = read_run(path)
    reference._Study = Measured  # type: ignore[misc]
    for held_out in run.held_out_sets:
        site(run, held_out)
    for name, of in Measured.found.items():
        values = {domain: float(np.mean(of_classes)) for domain, of_classes in of.items()}
        at = ", ".join(f"{domain} {value:.3f}" for domain, value in values.items())
        print(f"{name}: {np.mean([*values.values()]):.3f} ({at})")


def shares(path: Path, folder: Path) -> None:
    given, draw = np.load(path), np.random.default_rng(0)
    z, label, domain = torch.from_numpy(given["features"]), given["label"], given["domain"].astype("<U40")
    largest, *others = sorted(np.unique(domain), key=lambda name: -(domain == name).sum())
    part = draw.integers(0, 3, len(label)).astype(str)
    domain = np.where(domain == largest, np.char.add(f"{largest} ", part), domain)
    for left_out in draw.permutation(np.unique(label))[:CLASSES]:
        known, file = label != left_out, folder / "features.npz"
        np.savez(file, features=z.numpy()[known], label=label[known], domain=domain[known])
        xdm_ft.run({
            "name": left_out, "data": {"name": "features", "file": str(file)}, "methods": ["erm"],
            "protocol": {"name": "leave_one_domain_out", "selection": "train_val", "seeds": 1},
            "training": {"batch_size": 32, "sampler": "per_domain", "steps": 300, "optimizer": "adam", "lr": 1e-3},
            "output": {"dir": str(folder)},
        })  # fmt: skip
        run, names = read_run(folder / left_out), np.unique(label[known])
        for name in (f"{largest} 0", *others):
            stored, rows = site(run, (name,)), domain == name
            own, truth = z[rows & known], np.searchsorted(names, label[rows & known])
            at_site(f"{left_out}, {name}", stored, own, truth, z[rows & ~known], draw)


def at_site(
    what: str, stored: Stored, own: Tensor, truth: np.ndarray, intruders: Tensor, draw: np.random.Generator
) -> None:
    """Prints what `assess` says at sites with some shares of intruders."""
    assert stored.unknown is not None
    right = stored.heads.logits(own)[-1].argmax(1).numpy() == truth
    print(f"{what}: AUROC at held-out domains {stored.unknown.auroc:.2f}")
    for share in (0.0, 0.1, 0.3) if stored.unknown.works else ():
        number, said = round(share * IMAGES), list[tuple[float, ...]]()
        for _ in range(DRAWS):
            rows = draw.choice(len(own), IMAGES - number)
            images = torch.cat([own[rows], intruders[draw.choice(len(intruders), number)]])
            flagged, seen = stored.is_unknown(images), stored.seen(images)
            told = stored.unknown_share(flagged, np.ones(IMAGES))
            left_out = flagged & (told is not None and told.low > 0)
            parts = [stored.parts(seen.only(~some), stored.shares) for some in (flagged & False, left_out)]
            errors = [np.nan if of is None else abs(of.estimate - right[rows].mean()) for of in parts]
            if told is not None:
                said.append((told.value, told.low <= share <= told.high, told.low > 0, *errors))
        value, covered, above, before, after = np.nanmean(said, axis=0) if said else [np.nan] * 5
        print(
            f"  {share:.0%}: said {value:.1%} in {len(said)} of {DRAWS} draws, covered {covered:.0%}, above 0 "
            f"{above:.0%}; error {100 * before:.1f} → {100 * after:.1f} points", flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("scores", "shares"))
    parser.add_argument("path", type=Path, metavar="RUN or FEATURES.npz")
    given = parser.parse_args()
    if given.what == "scores":
        scores(given.path)
        return
    with tempfile.TemporaryDirectory() as folder:
        shares(given.path, Path(folder))


if __name__ == "__main__":
    main()
