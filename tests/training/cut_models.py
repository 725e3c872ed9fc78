"""Tiny encoders that can be cut, their cached activations, and trainings above the cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from loop_models import digits, train
from torch import Tensor, nn

from xdm_ft.cut.cut import Below
from xdm_ft.cut.trainable import LastBlocks, Lora, LowRank, Trainable
from xdm_ft.encoders import Encoder, Portable
from xdm_ft.encoders.timm import Timm
from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache import Features, cache_folder
from xdm_ft.features.extract import extract
from xdm_ft.features.hashes import hash_files
from xdm_ft.images.transforms import Preprocessing, PreprocessingOverrides
from xdm_ft.training import Job, Trained, Training
from xdm_ft.training.end_to_end.model import EncoderPart, cut_of


def vit() -> Timm:
    """Three blocks on 5 tokens of width 64."""
    torch.manual_seed(0)
    size = PreprocessingOverrides(size=32)
    return Timm(model="test_vit", kwargs={"img_size": 32, "depth": 3}, preprocessing=size)


class MixedBlock(nn.Module):
    """A convolution with batch norm, then a linear layer over the channels beside a skip connection."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(before, after, 3, stride=1 if before == after else 2, padding=1, bias=False)
        self.norm, self.mix = nn.BatchNorm2d(after), nn.Linear(after, after)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.convolution(x)).relu()
        return x + self.mix(x.movedim(1, -1)).movedim(-1, 1)


class BlockCNN(Encoder):
    """A stem, two stages of two blocks, and a final norm; batch norm everywhere."""

    width, normalize, pretraining = 16, False, "random weights"
    stem_names, stage_names = ("stem.0",), ("stages.0", "stages.1")
    preprocessing = Preprocessing(mean=(0.5, 0.5, 0.5), std=(0.3, 0.3, 0.3), size=32, interpolation="bilinear")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.stages = nn.Sequential(
            nn.Sequential(MixedBlock(8, 8), MixedBlock(8, 8)), nn.Sequential(MixedBlock(8, 16), MixedBlock(16, 16))
        )
        self.norm = nn.BatchNorm2d(16)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.stages(self.stem(images))).mean((2, 3)).float()

    def identity(self) -> dict[str, object]:
        return {"component": "block_cnn"}

    def portable(self) -> Portable:
        return Portable({}, self.state_dict())

    def block_candidates(self) -> Sequence[Sequence[str]]:
        return [["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]]


def blocks(number: int) -> LastBlocks:
    return LastBlocks(blocks=number)


def lora(**settings: Any) -> LowRank:
    return LowRank(lora=Lora(**{"rank": 2, **settings}))


def cached(encoder: Encoder, trainable: LastBlocks | LowRank, folder: Path, **settings: Any) -> Features:
    """The activations of all digits below the cut, from the feature cache in the folder."""
    block = FeatureSettings(dir=folder, workers=0, **settings)
    hashes = hash_files(digits(), cache_folder(block), show=False)
    return extract(
        Below(cut_of(encoder, trainable)), digits(), hashes, block, on_bad_image="error", device="cpu", show=False,
        augmentation="domainbed" if block.views else "none", streamed=True,
    )  # fmt: skip


def train_part(
    job: Job,
    encoder: Encoder,
    training: Training,
    accelerator: Accelerator,
    trainable: Trainable,
    activations: Features | None = None,
    **changes: Any,
) -> Trained:
    """Trains on cached activations, or on those that are computed from the images."""
    return train(job, encoder, training, accelerator, part=EncoderPart(trainable, activations), **changes)
