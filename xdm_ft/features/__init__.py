"""Features of a frozen encoder: extracted once, cached by all that determines them, shared by every later run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from xdm_ft.settings import Block

Precision = Literal["fp32", "bf16"]


class FeatureSettings(Block):
    """How features of a frozen encoder are computed and where they are kept."""

    dir: Annotated[
        Path | None,
        Field(description="folder of the feature cache; null: $XDM_FT_CACHE, else ~/.cache/xdm_ft/features"),
    ] = None
    precision: Annotated[
        Precision,
        Field(
            description="fp32: float32 arithmetic, stored as float32; bf16: weights and images cast to bfloat16, "
            "stored as bfloat16 (half the size, about twice as fast)"
        ),
    ] = "fp32"
    batch_size: Annotated[
        int,
        Field(
            ge=1,
            description="images that the encoder sees at once, at most a shard of the cache (256 or more); "
            "changes features by rounding only, so cached ones are used whatever it is",
        ),
    ] = 64
    views: Annotated[
        int,
        Field(
            ge=0,
            description="augmented passes over all images that are cached besides the plain one; each draw of a "
            "training image is one of them, uniformly, the plain one only evaluates; 0: the plain one trains too",
        ),
    ] = 0
    workers: Annotated[
        int | None,
        Field(
            ge=0,
            description="processes that decode images; null: as many as cores up to 4, none for images in memory",
        ),
    ] = None
