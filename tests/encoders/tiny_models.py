"""Tiny models of all families of encoders on the disk, with their library's features."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import timm
import tiny_transformers
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from xdm_ft.encoders import LibraryEncoder
from xdm_ft.encoders.open_clip import OpenClip
from xdm_ft.encoders.timm import Timm
from xdm_ft.encoders.transformers import Transformers
from xdm_ft.images.transforms import PreprocessingOverrides

TEXT = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
TINY: dict[str, Any] = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": TEXT,
}


@dataclass(frozen=True)
class Family:
    """A tiny model on the disk, as its library has it and as an encoder."""

    component: str
    encoder: Callable[..., LibraryEncoder]  # keywords are added to those that name model and weights
    model: nn.Module
    library: Callable[[Tensor], Tensor]  # images [B,3,H,W] → the library's features [B,K]
    source: tuple[str, ...]  # encoder.model, and encoder.weights where it is a file
    has_text: bool = False

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        return self.library(x)

    @property
    def state(self) -> dict[str, Tensor]:
        return {name: value.clone().contiguous() for name, value in self.model.state_dict().items()}


def images(size: int = 32, count: int = 3) -> Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def tiny_clip(folder: Path, name: str = "tiny_clip", **changes: Any) -> Family:
    config, weights = folder / f"{name}.json", folder / f"{name}.safetensors"
    config.write_text(json.dumps({**TINY, **changes}))
    open_clip.add_model_config(config)
    torch.manual_seed(0)
    model = open_clip.create_model(name).eval()
    # open_clip leaves CoCa's unused text projection as it found the memory, which may hold NaN
    save_file({name: value.nan_to_num().contiguous() for name, value in model.state_dict().items()}, weights)
    encoder = partial(OpenClip, model=str(config), weights=str(weights))
    return Family("open_clip", encoder, model, model.encode_image, (str(config), str(weights)), has_text=True)


def tiny_resnet(folder: Path, classes: int = 7) -> Family:
    """With a head, and with batch-norm statistics that differ from the initial ones."""
    torch.manual_seed(1)
    model = timm.create_model("test_resnet", num_classes=classes)
    model.train()
    model(images(64, 8))
    model.eval()
    path = folder / "own.safetensors"
    save_file(model.state_dict(), path)
    encoder = partial(
        Timm, model="test_resnet", weights=str(path), preprocessing=PreprocessingOverrides(size=32, crop=1.0)
    )
    return Family("timm", encoder, model, lambda x: model.forward_features(x).mean((2, 3)), ("test_resnet", str(path)))


def tiny_of_transformers(kind: str, folder: Path) -> Family:
    model = tiny_transformers.save(kind, folder)
    has_text = kind in ("clip", "siglip")
    features = model.get_image_features if has_text else model
    name = f"local-dir:{folder}"
    encoder = partial(Transformers, model=name)

    def library_features(x: Tensor) -> Tensor:
        out = features(pixel_values=x)
        return getattr(out, "pooler_output", out)  # before transformers 5 a CLIP gives a tensor

    return Family("transformers", encoder, model, library_features, (name,), has_text)


NAMES = ("timm", "open_clip", "vit", "dinov2", "clip", "siglip")
