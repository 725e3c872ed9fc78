"""The encoder's own preprocessing: PIL image → normalised float tensor. With random changes for training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from xdm_ft.data import Augmentation
from xdm_ft.settings import Block

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Resize = Literal["native", "squash", "pad"]
Colour = tuple[float, float, float]


class Preprocessing(Block):
    """What an encoder does to an image before it sees it."""

    mean: Colour
    std: Colour
    size: int  # px, side of the square input
    crop: float = 1.0  # fraction of the resized side that is kept
    interpolation: Interpolation = "bicubic"
    resize: Resize = "native"


class PreprocessingOverrides(Block):
    """`encoder.preprocessing`: what the recipe changes of the encoder's own preprocessing. null: the encoder's own."""

    mean: Annotated[Colour | None, Field(description="mean of each RGB channel, images in 0…1")] = None
    std: Annotated[Colour | None, Field(description="standard deviation of each RGB channel")] = None
    size: Annotated[int | None, Field(ge=1, description="side of the square input, px")] = None
    crop: Annotated[float | None, Field(gt=0, le=1, description="fraction of the resized side kept; 1.0: all")] = None
    interpolation: Annotated[Interpolation | None, Field(description="resampling filter")] = None
    resize: Annotated[
        Resize | None,
        Field(
            description="native: shorter side, then centre crop; squash: both sides, aspect ratio lost; "
            "pad: longer side, then padded with the mean colour (both keep the whole image)"
        ),
    ] = None

    def applied_to(self, own: Preprocessing) -> Preprocessing:
        return own.model_copy(update=self.model_dump(exclude_none=True))


def evaluation_transform(preprocessing: Preprocessing) -> Callable[[Image.Image], Tensor]:
    """RGB image of any size → float32 [3, size, size]. Bit for bit timm's and open_clip's own evaluation transforms.

    native is timm's crop mode "center" and open_clip's "shortest", squash is called so in both, pad is timm's "border".
    """
    from timm.data.transforms import CenterCropOrPad, ResizeKeepRatio
    from torchvision import transforms

    size, name = preprocessing.size, preprocessing.interpolation
    side = math.floor(size / preprocessing.crop)
    filter_ = transforms.InterpolationMode(name)
    red, green, blue = (round(255 * channel) for channel in preprocessing.mean)
    geometry: dict[str, list[Any]] = {
        "native": [transforms.Resize(side, filter_), transforms.CenterCrop(size)],
        "squash": [transforms.Resize((side, side), filter_), transforms.CenterCrop(size)],
        "pad": [ResizeKeepRatio(side, longest=1.0, interpolation=name), CenterCropOrPad(size, fill=(red, green, blue))],
    }
    normalize = transforms.Normalize(preprocessing.mean, preprocessing.std)
    return transforms.Compose([*geometry[preprocessing.resize], transforms.ToTensor(), normalize])


def training_transform(preprocessing: Preprocessing, augmentation: Augmentation) -> Callable[[Image.Image], Tensor]:
    """RGB image of any size → float32 [3, size, size], changed at random by draws from torch's global generator.

    none: `evaluation_transform`, which is also what WILDS' examples do to Camelyon17 and FMoW while training
    (`image_base` without `additional_train_transform`). domainbed: `augment_transform` of DomainBed's datasets.py
    (Gulrajani & Lopez-Paz 2021), which is a crop of 70% to 100% of the area, resized to the square; flipped left to
    right with probability 1/2; brightness, contrast, saturation and hue moved by up to 0.3; grey with probability 0.1.
    Size, interpolation, mean and std are the encoder's own (DomainBed's: 224, bilinear, ImageNet's); its `crop` and
    `resize` have no say.
    """
    from torchvision import transforms

    if augmentation == "none":
        return evaluation_transform(preprocessing)
    filter_ = transforms.InterpolationMode(preprocessing.interpolation)
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(preprocessing.size, scale=(0.7, 1.0), interpolation=filter_),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.3, 0.3, 0.3, 0.3),
            transforms.RandomGrayscale(),
            transforms.ToTensor(),
            transforms.Normalize(preprocessing.mean, preprocessing.std),
        ]
    )


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Within it a `training_transform` draws from torch's generator seeded with `seed`, then left as it was before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach those of GPUs too
        yield
