"""Features of a frozen encoder: computed once, cached under a key of all that determines them, reused by later runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from xdm_ft.runtime.machine import on_gpu
from xdm_ft.runtime.settings import Block

Precision = Literal["fp32", "bf16", "fp16"]
CutUse = Literal["cache", "compute", "auto"]


def default_precision() -> Precision:
    """Returns bf16 where a GPU computes in it, else fp32."""
    import torch

    return "bf16" if on_gpu() and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


def fast_batch_size(device: str) -> int:
    """Returns a number of images per forward pass that is fast on a device of this kind ("cpu", "cuda").

    On a CPU activations should stay near its caches: of 2 to 64, 16 was the fastest or within 6% of it for MobileNetV2,
    ResNet-50, DenseNet-121, ViT-B/16 and ViT-B/32. On a GPU nothing was measured.
    """
    return 16 if device == "cpu" else 64


class FeatureSettings(Block):
    """How features of a frozen encoder are computed, and where they are cached."""

    dir: Annotated[
        Path | None,
        Field(description="folder of the feature cache; null: $XDM_FT_CACHE, else ~/.cache/xdm_ft/features"),
    ] = None
    precision: Annotated[
        Precision,
        Field(
            description="fp32: float32 arithmetic, stored as float32; bf16 and fp16: weights and images cast to "
            "bfloat16 or float16, and stored so (half the size; on a GPU, and in bf16 on newer CPUs, faster); by "
            "default bf16 on a GPU that computes in it, else fp32"
        ),
    ] = Field(default_factory=default_precision)
    batch_size: Annotated[
        int,
        Field(
            ge=1,
            description="images per forward pass of the encoder; the last pass is filled up with black images; changes "
            "features by rounding only, so cached features serve any batch size; by default 16 on a CPU and 64 on a "
            "GPU; a run that goes on elsewhere keeps its own",
        ),
    ] = Field(default_factory=lambda: fast_batch_size("cuda" if on_gpu() else "cpu"))
    views: Annotated[
        int,
        Field(
            ge=0,
            description="number of augmented passes over all images to cache besides the plain pass; each time a "
            "training image is drawn, one of them is picked uniformly, and the plain pass is for evaluation only; 0: "
            "the plain pass is for training too",
        ),
    ] = 0
    cut: Annotated[
        CutUse,
        Field(
            description="activations below a partly trained encoder: cache: computed once per image and read from "
            "disk at every step; compute: computed from the images at every step; auto: cache if they fit on the disk"
        ),
    ] = "auto"
    workers: Annotated[
        int | None,
        Field(
            ge=0,
            description="processes that decode images; 0: threads decode a batch on all cores between two passes of "
            "the encoder; null: 0 on a CPU and for images in memory, else one per core",
        ),
    ] = None
