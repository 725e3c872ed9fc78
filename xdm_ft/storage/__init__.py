"""Files that survive a killed process: atomic writes, checksums, checkpoints and the run directory.

Here: checksums, xxh3 of texts, of tensors and of JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor


def digest(*parts: str | np.ndarray | Tensor, bits: Literal[64, 128] = 64) -> str:
    """Returns the checksum of texts (as UTF-8) and of the bytes of arrays and tensors, one after the other.

    Types and shapes are not included; `tensors_digest` adds them as text. Keys of cached features depend on this
    function: if it changes, every user's features are computed again.
    """
    hasher = xxhash.xxh3_64() if bits == 64 else xxhash.xxh3_128()
    for part in parts:
        if isinstance(part, str):
            hasher.update(part.encode())
        else:
            tensor = torch.from_numpy(np.ascontiguousarray(part)) if isinstance(part, np.ndarray) else part
            # viewed as bytes, because numpy has no bfloat16
            hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return str(hasher.hexdigest())


Json = dict[str, Any]
TensorMap = Mapping[str, np.ndarray] | Mapping[str, Tensor] | Mapping[int, Tensor]


def tensors_digest(tensors: TensorMap, text: str = "") -> str:
    """Returns the checksum of a text and of the names (or numbers), types, shapes and bytes of tensors, in order."""
    parts: list[str | np.ndarray | Tensor] = [text]
    for name, tensor in tensors.items():
        parts += [f"{name} {tensor.dtype} {list(tensor.shape)}\n", tensor]
    return digest(*parts)


def json_digest(value: Any) -> str:
    """Returns the checksum of a JSON value. The order of keys does not matter."""
    return digest(sorted_json(value))


def sorted_json(value: Any, is_read: bool = False) -> str:
    """Returns the text whose checksum is that of a JSON value. `is_read`: the value comes from a JSON text."""
    # JSON makes number keys text, and text sorts in another order
    as_read = value if is_read else json.loads(json.dumps(value))
    return json.dumps(as_read, sort_keys=True)
