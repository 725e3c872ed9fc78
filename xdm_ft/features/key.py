"""The key of cached features: a hash of all that determines the feature of an image besides the image's content.

An image has a plain view, for evaluation, and augmented ones, drawn from a fixed seed, for training. Batch size, number
of threads and processes, and the model of the processor are not part of the key, since they change features by rounding
only: features computed with other values of these are reused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor, nn

from xdm_ft.augmentations import NO_AUGMENTATION, Augmentations, TrainingTransform
from xdm_ft.encoders import Encoder
from xdm_ft.features import Precision
from xdm_ft.images.transforms import Preprocessing
from xdm_ft.runtime.randomness import Stream, bits
from xdm_ft.storage import digest
from xdm_ft.version import __version__

SEED = 0  # of the augmentations; the same in every run, so that runs of all seeds share the cached views
SCHEMA = 2  # version of the files; raise it also when a change of our own code changes features


def key_parts(encoder: Encoder, decoder: str, precision: Precision, device: torch.device) -> dict[str, object]:
    """All that determines the features of the plain view, JSON-serialisable. Renaming a part changes every key.

    `decoder`: as `ImageDataset.decoder`.
    """
    return key_parts_of(encoder.identity(), weights_digest(encoder), encoder.preprocessing, decoder, precision, device)


def key_parts_of(
    identity: Mapping[str, object],
    weights: str,
    preprocessing: Preprocessing,
    decoder: str,
    precision: Precision,
    device: torch.device,
) -> dict[str, object]:
    """`key_parts` of an encoder with this `identity()` and this digest of its weights."""
    # torch's settings of float32 arithmetic: it may round products to TF32 or bfloat16
    arithmetic: dict[str, object] = {"matmul": torch.get_float32_matmul_precision()}
    if device.type == "cuda":
        arithmetic["cudnn_tf32"] = torch.backends.cudnn.allow_tf32
    return {
        "schema": SCHEMA,
        "encoder": dict(identity),
        "weights": weights,
        "preprocessing": preprocessing.model_dump(mode="json"),
        "precision": precision,
        "device": {"type": device.type, **arithmetic},
        "decoder": decoder,
        "versions": {  # the version of the encoder's own library is in its identity
            "xdm_ft": __version__,
            "torch": torch.__version__,
            "torchvision": version("torchvision"),
            "timm": version("timm"),  # the transforms use it
            "pillow": PIL.__version__,
        },
    }


def key_of(parts: Mapping[str, object]) -> str:
    """The key of these parts: xxh3_128, 32 hexadecimal digits."""
    return digest(json.dumps(parts, sort_keys=True), bits=128)


def weights_digest(module: nn.Module) -> str:
    """xxh3_128 of names, types, shapes and bytes of all parameters and buffers."""
    parts: list[str | Tensor] = []
    for name, tensor in module.state_dict().items():
        parts += [json.dumps([name, str(tensor.dtype), list(tensor.shape)]), tensor]
    return digest(*parts, bits=128)


@dataclass(frozen=True)
class View:
    """One pass over all images. View v does not depend on the number of views, so that views can be added later."""

    number: int = 0  # 0: the plain one; 1, 2, …: augmented
    augmentation: Augmentations = NO_AUGMENTATION

    def transform(self, preprocessing: Preprocessing) -> Callable[[Image.Image, np.ndarray], Image.Image]:
        """Returns a transform: RGB image, hash of its content (uint8 [16]) → RGB image of size × size.

        Its random draws depend on view and hash alone.
        """
        augment = TrainingTransform(preprocessing, self.augmentation)

        def transform(image: Image.Image, content: np.ndarray) -> Image.Image:
            # signed, as `bits` takes int64
            index = int.from_bytes(content[:8].tobytes(), "little", signed=True)
            return augment(image, int(bits(SEED, self.number, Stream.VIEW_IMAGE, index)))

        return transform

    def key_parts(self, preprocessing: Preprocessing) -> dict[str, object]:
        """The parts of the cache key that an augmented view adds to those of the plain view."""
        if self.number == 0:
            return {}
        steps = repr(TrainingTransform(preprocessing, self.augmentation).steps())  # every transform with its parameters
        return {
            "view": {"number": self.number, "augmentation": str(self.augmentation), "transform": steps, "seed": SEED}
        }


def all_views(augmentations: Sequence[Augmentations], count: int) -> list[View]:
    """The plain view, then `count` views of each augmentation."""
    return [View(), *(View(number, of) for of in augmentations for number in range(1, 1 + count))]
