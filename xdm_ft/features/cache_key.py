"""What determines cached features, and the key made of it.

Not part of the key, since they change features by rounding only: batch size, thread and process count, the model of the
processor. A cache that another setting of these filled is used as it is.
"""

from __future__ import annotations

import json
from importlib.metadata import version

import PIL
import torch
from torch import Tensor, nn

import xdm_ft
from xdm_ft.data import ImageDataset
from xdm_ft.encoders import Encoder
from xdm_ft.features import Precision
from xdm_ft.features.file_hashes import Contents
from xdm_ft.storage.digests import digest

SCHEMA = 1  # of the files; raised also when a change of our own code changes features


def ingredients(
    encoder: Encoder, dataset: ImageDataset, contents: Contents, precision: Precision, device: torch.device
) -> dict[str, object]:
    """Everything that determines the features, JSON-serialisable."""
    reader = type(dataset)
    return {
        "schema": SCHEMA,
        "encoder": encoder.identity(),
        "weights": weights_digest(encoder),
        "preprocessing": encoder.preprocessing.model_dump(mode="json"),
        "precision": precision,
        "device": {"type": device.type, **_float32_arithmetic(device)},
        "data": {
            "images": len(dataset),
            "content": digest(contents.digests, bits=128),  # in data order
            "reader": f"{reader.__module__}.{reader.__qualname__}",  # two readers may see different pixels in a file
        },
        "versions": {  # the encoder's own library is in its identity
            "xdm_ft": xdm_ft.__version__,
            "torch": torch.__version__,
            "torchvision": version("torchvision"),
            "timm": version("timm"),  # the transforms use it
            "pillow": PIL.__version__,
        },
    }


def key_of(parts: dict[str, object]) -> str:
    """32 hexadecimal digits."""
    return digest(json.dumps(parts, sort_keys=True), bits=128)


def weights_digest(module: nn.Module) -> str:
    """xxh3_128 of names, types, shapes and bytes of all parameters and buffers."""
    parts: list[str | Tensor] = []
    for name, tensor in module.state_dict().items():
        parts += [json.dumps([name, str(tensor.dtype), list(tensor.shape)]), tensor]
    return digest(*parts, bits=128)


def _float32_arithmetic(device: torch.device) -> dict[str, object]:
    """What torch is set to make of "float32": it may round to TF32 or bfloat16 on the way."""
    matmul: dict[str, object] = {"matmul": torch.get_float32_matmul_precision()}
    return {**matmul, "cudnn_tf32": torch.backends.cudnn.allow_tf32} if device.type == "cuda" else matmul
