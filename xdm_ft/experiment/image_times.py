"""Seconds that an image takes: to be decoded, and through an encoder, whole or cut; measured on a few images."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from xdm_ft.cut.cut import Below
from xdm_ft.encoders import Encoder
from xdm_ft.images.dataset import ImageDataset
from xdm_ft.images.decode import UnreadableImage
from xdm_ft.images.transforms import Preprocessing, evaluation_transform
from xdm_ft.runtime.machine import own_cores
from xdm_ft.training.bank.timing import seconds_of
from xdm_ft.training.end_to_end.model import is_cnn

if TYPE_CHECKING:
    from accelerate import Accelerator

FEW_IMAGES = 4  # that are decoded


class Passes(NamedTuple):
    """Seconds for one image in a batch, through a model on the run's device."""

    forward: float
    train: float = 0.0  # forward and backward


@dataclass(frozen=True)
class CutPasses:
    """Seconds for one image in a batch: to be decoded, and through the parts of an encoder below and above a cut.

    Of an encoder that trains whole, all lies above.
    """

    decode: float  # by one process
    below: float  # forward
    above: Passes

    @property
    def share_below(self) -> float:
        """Share of the encoder's forward pass that lies below the cut."""
        return self.below / (self.below + self.above.forward)

    def cached(self) -> CutPasses:
        """The same, when activations are read from the cache. The time of reading is not counted."""
        return CutPasses(0.0, 0.0, self.above)


@dataclass(frozen=True)
class ImageTimes:
    """Measures an encoder on images of the data. It changes neither."""

    dataset: ImageDataset
    accelerator: Accelerator
    seconds: float  # that the measurement of one model may take

    def decoded(self, preprocessing: Preprocessing) -> tuple[float, Tensor]:
        """Returns the seconds to decode and transform an image, and a few images, float32 [n,3,S,S]."""
        transform, found = evaluation_transform(preprocessing), list[Tensor]()

        def read(row: int) -> None:
            found.append(transform(self.dataset.draft(row, preprocessing.least_side)))

        quick = float("inf")
        for row in np.linspace(0, len(self.dataset) - 1, 4 * FEW_IMAGES).astype(int).tolist():
            if len(found) == FEW_IMAGES:
                break
            try:
                quick = min(quick, seconds_of(partial(read, row), 0.0))
            except UnreadableImage:  # extraction reports it
                continue
        if not found:
            raise ValueError("none of the images that were tried decodes")
        return quick, torch.stack(found)

    def beside(self, decode: float, encode: float) -> float:
        """Seconds per image if all cores decode: on a CPU, decoding and the encoder share them."""
        mine = own_cores()
        if self.accelerator.device.type == "cpu":
            return encode + decode / mine
        return max(encode, decode / mine)

    def step(self, one: CutPasses, gradients: int = 1) -> float:
        """Seconds of a training step per image; `gradients`: forward and backward passes of a step."""
        return self.beside(one.decode, one.below + gradients * one.above.train)

    def passes(self, model: Callable[[Tensor], Tensor], inputs: Tensor, batch_size: int, trains: bool) -> Passes:
        """Measures a model on `inputs` [n,…], repeated to a batch of at most `batch_size`."""

        def batch(n: int) -> Tensor:
            return inputs.repeat(-(-n // len(inputs)), *[1] * (inputs.ndim - 1))[:n].to(self.accelerator.device)

        def forward(n: int) -> float:
            x = batch(n)
            with torch.inference_mode(), self.accelerator.autocast():
                model(x)  # the first call of a size allocates
                return seconds_of(lambda: model(x), self.seconds / 8) / n

        def train(n: int) -> float:
            x = batch(n)

            def step() -> None:
                with self.accelerator.autocast():
                    z = model(x)
                z.float().square().mean().backward()

            step()
            return seconds_of(step, self.seconds / 8) / n

        few = forward(min(2, batch_size))
        n = max(min(2, batch_size), min(batch_size, int(self.seconds / 4 / few)))  # batch norm needs two
        one = forward(n)
        return Passes(one, train(max(2, min(n, int(self.seconds / 12 / one)))) if trains else 0.0)

    def whole(self, encoder: Encoder, batch_size: int, trains: bool) -> tuple[float, Passes]:
        """Returns the seconds to decode an image, and those through the encoder.

        Changes the encoder's memory layout, to that in which it trains, and its gradients.
        """
        decode, pixels = self.decoded(encoder.preprocessing)
        if is_cnn(encoder):
            encoder.to(memory_format=torch.channels_last)
        return decode, self.passes(encoder, pixels.to(stored_type(encoder)), batch_size, trains)

    def cut(self, below: Below, batch_size: int) -> CutPasses:
        """Measures a copy of the encoder, cut, as it trains."""
        decode, pixels = self.decoded(below.preprocessing)
        part = copy.deepcopy(below).to(self.accelerator.device).cut
        if is_cnn(part.encoder):
            part.encoder.to(memory_format=torch.channels_last)  # as it trains
        part.freeze()
        part.train_above()
        with torch.no_grad(), self.accelerator.autocast():
            activations = part.below(pixels.to(self.accelerator.device)).float()
        lower = self.passes(part.below, pixels, batch_size, trains=False)
        return CutPasses(decode, lower.forward, self.passes(part.above, activations, batch_size, trains=True))


def stored_type(model: nn.Module) -> torch.dtype:
    return next((parameter.dtype for parameter in model.parameters()), torch.float32)
