"""What the cuts of a recipe take on the disk, and what caching their activations saves at every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from xdm_ft.encoders import Encoder
from xdm_ft.experiment.cluster_connection import device_of
from xdm_ft.experiment.image_times import CutPasses, ImageTimes
from xdm_ft.experiment.plan import Plan
from xdm_ft.experiment.prepare import RecipeCut, counted_unhashed, cuts_of
from xdm_ft.experiment.summary import trained_words

if TYPE_CHECKING:
    from accelerate import Accelerator

MEASURING_SECONDS = 1.0  # for each cut


@dataclass(frozen=True)
class CutCost:
    """A cut, and the seconds of a step above it. Equal images are counted as different ones."""

    encoder: str | None  # label
    cut: RecipeCut
    images: int  # of a step
    one: CutPasses | None  # seconds for one image; None: it could not be measured
    computed: float = 0.0  # seconds of a step that computes the activations
    cached: float = 0.0  # seconds of a step on cached activations, without reading them
    problem: str | None = None  # why it could not be measured

    def text(self) -> list[str]:
        serves = ", ".join(map(trained_words, self.cut.serves))
        line = f"{'' if self.encoder is None else f'{self.encoder}, '}{serves}: {self.cut.text()}"
        if self.one is None:
            return [line, f"its saving could not be measured ({self.problem})"]
        share = f"{100 * self.one.share_below:.0f}% of the encoder's forward pass lies below"
        step = f"a step of {self.images} images: computed {self.computed:.3g} s, cached {self.cached:.3g} s"
        return [line, f"{share}; {step} (without reading)"]

    def to_json(self) -> dict[str, Any]:
        """Seconds and shares are null if they could not be measured."""
        cut, one = self.cut, self.one
        return {
            "encoder": self.encoder,
            "trainable": [trained_words(trainable) for trainable in cut.serves],
            "before": cut.below.cut.name,
            "shape": cut.below.cut.shape,
            "activations": cut.activations.all,
            "bytes": cut.bytes,
            "missing_bytes": cut.missing_bytes,
            "is_cached": cut.is_cached,
            "why_computed": cut.why_computed or None,
            "share_below": None if one is None else one.share_below,
            "images_per_second": None if one is None else images_per_second(one),
            "step_images": self.images,
            "computed_step_seconds": None if one is None else self.computed,
            "cached_step_seconds": None if one is None else self.cached,
            "problem": self.problem,
        }


def images_per_second(one: CutPasses) -> dict[str, float]:
    """Images per second through the whole encoder, below the cut, and above it forward and backward."""
    return {
        "whole": 1 / (one.below + one.above.forward),
        "below": 1 / one.below,
        "above_forward_backward": 1 / one.above.train,
    }


def cut_costs(plan: Plan, encoders: Mapping[str | None, Encoder], accelerator: Accelerator) -> list[CutCost]:
    """Returns the costs of all cuts of the plan's recipe, measured on a few of its images. Writes nothing."""
    recipe, found = plan.recipe, list[CutCost]()
    images = recipe.training.images_per_step(max(len(split.train) for split in plan.splits))
    count = counted_unhashed(recipe, plan.dataset, device_of(recipe.cluster, accelerator.device))
    times = ImageTimes(plan.dataset, accelerator, MEASURING_SECONDS)
    for label, encoder in encoders.items():
        items = [item for item in recipe.served if item.encoder_label == label]
        for cut in cuts_of(recipe, encoder, items, count):
            try:
                with torch.random.fork_rng():
                    one = times.cut(cut.below, recipe.training.batch_size)
            except Exception as error:  # the run itself reports what is wrong, if it is wrong there too
                found.append(CutCost(label, cut, images, None, problem=f"{type(error).__name__}: {error}"))
                continue
            computed, cached = (images * times.step(way) for way in (one, one.cached()))
            found.append(CutCost(label, cut, images, one, computed, cached))
    return found
