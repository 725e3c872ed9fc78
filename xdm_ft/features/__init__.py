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
            description="number format of the encoder and its features: fp32, or bf16 or fp16 (half the size; faster "
            "on a GPU, bf16 also on newer CPUs). Default: bf16 on a GPU that computes in it, else fp32"
        ),
    ] = Field(default_factory=default_precision)
    batch_size: Annotated[
        int,
        Field(
            ge=1,
            description="images per forward pass of the encoder (default: 16 on a CPU, 64 on a GPU). It changes "
            "features by rounding only, so the cache serves any batch size; a resumed run keeps its own",
        ),
    ] = Field(default_factory=lambda: fast_batch_size("cuda" if on_gpu() else "cpu"))
    views: Annotated[
        int,
        Field(
            ge=0,
            description="views of every image to cache for each augmentation. Each training draw of a row with one "
            "picks a view uniformly; other rows train on the plain features, as all do with 0",
        ),
    ] = 0
    cut: Annotated[
        CutUse,
        Field(
            description="activations below the trained blocks. cache: compute them once and read them from disk at "
            "every step; compute: compute them at every step; auto: cache if they fit on the disk"
        ),
    ] = "auto"
    workers: Annotated[
        int | None,
        Field(
            ge=0,
            description="processes that decode images. 0: threads on all cores decode between two passes of the "
            "encoder; null: 0 on a CPU and for images in memory, else one per core",
        ),
    ] = None
