"""The encoder's preprocessing: PIL image → normalised float tensor."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from xdm_ft.images.decode import UnreadableImage
from xdm_ft.runtime.settings import Block

if TYPE_CHECKING:
    from torchvision.transforms import Compose

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Resize = Literal["native", "squash", "pad"]
Channel = Annotated[float, Field(ge=-1000, le=1000)]  # for pixels in 0…1; whatever a model has, and no infinity
PerChannel = tuple[Channel, Channel, Channel]
MAX_SIDE = 4096  # pixels of an image that an encoder reads
Deviation = Annotated[float, Field(ge=1e-6)]  # pixels are divided by it


class Preprocessing(Block):
    """The preprocessing of an encoder's images."""

    mean: PerChannel
    std: PerChannel
    size: int  # px, side of the square input
    crop: float = 1.0  # fraction of the resized side that the centre crop keeps
    interpolation: Interpolation = "bicubic"
    resize: Resize = "native"
    draft: Annotated[bool, Field(exclude_if=lambda draft: not draft)] = False  # absent where nothing is drafted

    @property
    def least_side(self) -> int | None:
        """For `ImageDataset.draft`: twice the side to which images are resized, so that this still averages pixels."""
        return 2 * resized_side(self) if self.draft else None


class PreprocessingOverrides(Block):
    """`encoder.preprocessing`: replaces single values of the encoder's preprocessing. null: the encoder's value."""

    mean: Annotated[PerChannel | None, Field(description="mean of each RGB channel, for pixels in 0…1")] = None
    std: Annotated[
        tuple[Deviation, Deviation, Deviation] | None, Field(description="standard deviation of each RGB channel")
    ] = None
    size: Annotated[int | None, Field(ge=1, le=MAX_SIDE, description="side of the square input, px")] = None
    crop: Annotated[
        float | None,
        Field(ge=0.01, le=1, description="fraction of the resized side that the centre crop keeps; 1.0: all"),
    ] = None
    interpolation: Annotated[Interpolation | None, Field(description="resampling filter")] = None
    resize: Annotated[
        Resize | None,
        Field(
            description="native: resize the shorter side; squash: resize both, which changes the aspect ratio; pad: "
            "resize the longer side and pad with the mean colour. A centre crop to the square follows"
        ),
    ] = None
    draft: Annotated[
        bool | None,
        Field(
            description="decode a large JPEG at 1/2, 1/4 or 1/8 of its size, at least twice the resized size; several "
            "times as fast, with slightly different pixels"
        ),
    ] = None

    def applied_to(self, preprocessing: Preprocessing) -> Preprocessing:
        return preprocessing.model_copy(update=self.model_dump(exclude_none=True))


LEAST_ASPECT_LIMIT = 16  # images whose sides differ by a smaller factor are always accepted


class NotAStrip:
    """A transform that returns the image as it is. Raises `UnreadableImage` for one that is too long and narrow.

    `native` resizes the shorter side, so that the image becomes as many times larger than a square as its sides differ:
    60,000 × 1 pixels become 13,440,000 × 224. No image may become larger than `decode` accepts. `pad` resizes the
    longer side and must keep one pixel of the shorter one. With `squash` the memory for the weights of the resampling
    filter grows with the longer side; the limit of `native` bounds it too.
    """

    def __init__(self, preprocessing: Preprocessing) -> None:
        side = resized_side(preprocessing)
        fits = math.inf if Image.MAX_IMAGE_PIXELS is None else Image.MAX_IMAGE_PIXELS // side**2
        self.limit = side if preprocessing.resize == "pad" else max(LEAST_ASPECT_LIMIT, fits)
        self.how = f"resize: {preprocessing.resize} to {side} pixels"

    def __call__(self, image: Image.Image) -> Image.Image:
        if max(image.size) > self.limit * min(image.size):
            size = f"{image.width} × {image.height} pixels"
            problem = f"too long and narrow for {self.how}: its sides may differ {self.limit}-fold"
            raise UnreadableImage("", f"{size}, {problem}")
        return image


def resized_side(preprocessing: Preprocessing) -> int:
    """Returns the side in pixels to which `evaluation_transform` resizes, before it crops."""
    return math.floor(preprocessing.size / preprocessing.crop)


def evaluation_transform(preprocessing: Preprocessing) -> Callable[[Image.Image], Tensor]:
    """Returns a transform, RGB image → float32 [3, size, size], bit for bit that of timm and of open_clip.

    It is `resizing_transform`, then `normalizing_transform`.
    """
    from torchvision import transforms

    return transforms.Compose([resizing_transform(preprocessing), normalizing_transform(preprocessing)])


def normalizing_transform(preprocessing: Preprocessing) -> Compose:
    """Returns a transform, RGB image of H × W pixels → float32 [3,H,W]: pixels in 0…1, minus mean, over std."""
    from torchvision import transforms

    return transforms.Compose([transforms.ToTensor(), transforms.Normalize(preprocessing.mean, preprocessing.std)])


def normalize(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """uint8 [B,S,S,3] → float32 [B,3,S,S] in the memory format channels last, on the same device.

    Equals `normalizing_transform` of every image, on a CPU bit for bit.
    """
    side, of_row = pixels.shape[1], (len(pixels), pixels.shape[1], -1)
    # [3·S], as a broadcast over the last dimension of 3 alone is slow
    mean, std = (
        torch.tensor(colour, device=pixels.device).repeat(side) for colour in (preprocessing.mean, preprocessing.std)
    )
    x = torch.empty(pixels.shape, device=pixels.device)
    # on a CPU image by image, which stays in the processor's cache through all four passes
    at_once = 1 if pixels.device.type == "cpu" else len(pixels)
    for source, target in zip(pixels.view(of_row).split(at_once), x.view(of_row).split(at_once), strict=True):
        target.copy_(source).div_(255).sub_(mean).div_(std)
    return x.permute(0, 3, 1, 2)


def resizing_transform(preprocessing: Preprocessing) -> Compose:
    """Returns a transform, RGB image → RGB image of size × size pixels.

    native is timm's crop mode "center" and open_clip's resize mode "shortest"; squash has that name in both; pad is
    timm's "border". The transform raises `UnreadableImage` for an image that `NotAStrip` refuses.
    """
    from timm.data.transforms import CenterCropOrPad, ResizeKeepRatio
    from torchvision import transforms

    size, name = preprocessing.size, preprocessing.interpolation
    side = resized_side(preprocessing)
    filter_ = transforms.InterpolationMode(name)
    red, green, blue = (round(255 * min(max(channel, 0.0), 1.0)) for channel in preprocessing.mean)
    geometry: dict[str, list[Any]] = {
        "native": [transforms.Resize(side, filter_), transforms.CenterCrop(size)],
        "squash": [transforms.Resize((side, side), filter_), transforms.CenterCrop(size)],
        "pad": [ResizeKeepRatio(side, longest=1.0, interpolation=name), CenterCropOrPad(size, fill=(red, green, blue))],
    }
    return transforms.Compose([NotAStrip(preprocessing), *geometry[preprocessing.resize]])


_DRAWING = threading.Lock()


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Context in which torch draws from `seed`. Its generator gets its earlier state back.

    One thread at a time is in it: all of them share the generator.
    """
    with _DRAWING, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the generators of GPUs
        yield
