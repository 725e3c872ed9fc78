"""Images that AdaIN's decoder makes of augmented features: one PNG per held-out set, in the run directory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xdm_ft.analysis.reconstruction import MIXED_LEVELS, Autoencoder, mixed_maps
from xdm_ft.experiment.analyse import Images, Limits, fitted, split_images
from xdm_ft.experiment.plan import Plan
from xdm_ft.experiment.prepare import Prepared
from xdm_ft.images.loader import ImageRows
from xdm_ft.images.transforms import evaluation_transform
from xdm_ft.runtime.progress import Progress, progress, pulse
from xdm_ft.runtime.randomness import Stream, permutation
from xdm_ft.storage.atomic import replace_file
from xdm_ft.storage.names import file_name

FOLDER = "reconstruction"  # in the run directory
SIDE = 224  # pixels, of square images; a multiple of 8
SAMPLE = 240  # training images per held-out set, on whose features the heads are fitted
MIXED = 32  # of them, mixed with each other
SHOWN = 8  # of the mixed ones
AT_ONCE = 8  # images that the networks see
COLUMNS = ("original", "reconstructed", *(f"augmented, τ_d {quantile:g}" for quantile in MIXED_LEVELS))


def write_reconstructions(
    plan: Plan, prepared: Prepared, autoencoder: Autoencoder, run_directory: Path, device: torch.device
) -> dict[str, Any]:
    """Writes a file per held-out set, of the first seed's split, and returns what stands in the files.

    A file has a row per training image and a column per `COLUMNS`, and no text. A set with fewer than two training
    domains or classes, or without partners, has none. Raises `UserError` if a file can not be written.
    """
    autoencoder.encoder.to(device)
    autoencoder.decoder.to(device)
    own = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "size": SIDE}  # the networks read pixels in 0…1
    preprocessing = prepared.of(plan.recipe.methods[0]).encoder.preprocessing.model_copy(update=own)
    images = ImageRows(plan.dataset, evaluation_transform(preprocessing), preprocessing.least_side)
    seed = plan.recipe.protocol.seeds[0]
    planned = {model.split.test_domains: model for model in plan.models if model.key.seed == seed}
    splits = {held: split_images(plan, model, Limits(SAMPLE, 0, 0, 0)) for held, model in planned.items()}
    found = []
    with progress(FOLDER, sum(len(split.training.rows) for split in splits.values()), "images") as bar:
        for held, split in splits.items():
            path = run_directory / FOLDER / f"{file_name(*held)}.png"
            drawing = _Drawing(images, split.training, split.domain_of, autoencoder, device)
            rows = drawing.rows_of_images(plan.dataset.class_names, split.train_domains, bar)
            if len(rows):
                replace_file(path, partial(_write, rows))
            else:
                path.unlink(missing_ok=True)  # of an earlier version of the run
            file = str(path.relative_to(run_directory)) if len(rows) else None
            found.append({"test_domains": list(held), "images": len(rows), "file": file})
    return {"folder": run_directory / FOLDER, "columns": list(COLUMNS), "sets": found}


class _Drawing:
    """The images of one held-out set: its training images in an order that mixes the domains."""

    def __init__(
        self, images: ImageRows, training: Images, domain_of: Tensor, autoencoder: Autoencoder, device: torch.device
    ) -> None:
        order = permutation(0, 0, Stream.ANALYSIS_ORDER, len(training.rows))
        self.rows, self.y = training.rows[order], training.y[order]
        self.domain = domain_of[training.domain[order]]
        self.images, self.autoencoder, self.device = images, autoencoder, device

    def rows_of_images(self, classes: list[str] | tuple[str, ...], domains: tuple[str, ...], bar: Progress) -> Tensor:
        """Returns images float32 [n,4,3,SIDE,SIDE] of at most `SHOWN` samples with both partners, as in `COLUMNS`."""
        pooled, maps, original = self._encoded(bar)
        last = len(pooled) * 2 // 3  # the others pick the penalty
        heads = [
            fitted(tuple(names), (pooled[:last], of[:last]), (pooled[last:], of[last:]))
            for names, of in ((classes, self.y), (domains, self.domain))
        ]
        of_class, of_domain = heads
        nothing = original[:0, None]
        if of_class is None or of_domain is None:
            return nothing
        labels = self.y[: len(maps)], self.domain[: len(maps)]
        mixed = [mixed_maps(maps, *labels, of_class, of_domain, quantile) for quantile in MIXED_LEVELS]
        partners = mixed[0].partners  # the same at all levels
        shown = torch.where(partners.has_same & partners.has_other)[0][:SHOWN]
        if not len(shown):
            return nothing
        decoded = [self._decoded(of[shown]) for of in (maps, *(level.z for level in mixed))]
        return torch.stack([original[shown], *decoded], 1)

    def _encoded(self, bar: Progress) -> tuple[Tensor, Tensor, Tensor]:
        """Returns pooled features [n,512] of all images, and maps and pixels of the first `MIXED`."""
        pooled, maps, original = [], list[Tensor](), list[Tensor]()
        for start in range(0, len(self.rows), AT_ONCE):
            x = torch.stack([self.images[row][0] for row in self.rows[start : start + AT_ONCE].tolist()])
            of_batch = self.autoencoder.encode(x.to(self.device)).cpu()
            pooled.append(of_batch.mean((2, 3)))
            if start < MIXED:
                maps.append(of_batch)
                original.append(x)
            bar.advance(len(x))
            pulse.beat()
        return torch.cat(pooled), torch.cat(maps)[:MIXED], torch.cat(original)[:MIXED]

    def _decoded(self, maps: Tensor) -> Tensor:
        return torch.cat([self.autoencoder.decode(some.to(self.device)).cpu() for some in maps.split(AT_ONCE)])


def _write(rows: Tensor, file: Path) -> None:
    from PIL import Image

    n, columns, _, side, _ = rows.shape
    pixels = rows.permute(0, 3, 1, 4, 2).reshape(n * side, columns * side, 3)  # [n·H, 4·W, 3]
    Image.fromarray((255 * pixels).round().byte().numpy()).save(file, "PNG", optimize=True)
