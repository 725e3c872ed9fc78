"""The key of cached features: a hash of all that determines the feature of an image besides the image's content.

Batch size, number of threads and processes, and the model of the processor are not part of the key, since they change
features by rounding only: features computed with other values of these are reused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version

import PIL
import torch
from torch import Tensor, nn

from xdm_ft.encoders import Encoder
from xdm_ft.features import Precision
from xdm_ft.images.transforms import Preprocessing
from xdm_ft.storage.digests import digest
from xdm_ft.version import __version__

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
