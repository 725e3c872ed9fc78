"""model.onnx: the model for ONNX Runtime and other programs without torch.

The graph is float32: pixels [batch,3,size,size] → logits, already divided by the temperature, and probabilities
[batch,C]; the input of a model that reads features is these, [batch,K]. With the preprocessing inside, its input is
uint8 RGB images [batch,size,size,3] that are resized and cropped already. Resizing is not inside: ONNX's Resize and
Pillow, which the model was trained with, differ.

In this module `onnx` is the library: imports are absolute.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from xdm_ft.export import Classifier, ModelParts, probabilities
from xdm_ft.images.transforms import Preprocessing, normalizing_transform, resizing_transform
from xdm_ft.model_sources.source import reason_of
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.storage.atomic import replace_file
from xdm_ft.version import __version__

ONNX = "model.onnx"
OPSET = 20  # the first with GELU
PIXELS, IMAGES, FEATURES, LOGITS, PROBABILITIES = "pixels", "images", "features", "logits", "probabilities"
BATCH_SIZES = (1, 3)  # of the comparison with torch: one, and another one than that of the exporter's example
TOLERANCE = 1e-4  # largest difference of a probability
MAX_BYTES = 2**31 - 2**20  # a protobuf message has less than 2 GiB; 1 MiB is for the graph
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class OnnxFile:
    """A model.onnx that agrees with torch."""

    path: Path
    opset: int
    bytes: int
    include_preprocessing: bool
    compared_on: str  # "8 images", "random pixels" or "random features"
    difference: float  # largest |Δ probability| between ONNX Runtime and torch, both float32 on the CPU


class _Graph(nn.Module):
    """A classifier as it is exported: → logits and probabilities, both float32 [B,C]."""

    mean: Tensor
    std: Tensor

    def __init__(self, classifier: Classifier, preprocessing: Preprocessing, include_preprocessing: bool) -> None:
        super().__init__()
        self.classifier, self.include_preprocessing = classifier, include_preprocessing
        self.register_buffer("mean", torch.tensor(preprocessing.mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(preprocessing.std).view(3, 1, 1))

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        if self.include_preprocessing:
            given = (given.permute(0, 3, 1, 2).float() / 255 - self.mean) / self.std  # [B,H,W,3] → [B,3,H,W]
        logits = self.classifier(given)
        return logits, logits.softmax(-1)


def check_installed() -> None:
    """Raises `UserError` if a package that exporting needs is not installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(f"ONNX needs {', '.join(missing)}, not installed here; pip install 'xdm_ft[onnx]'")


def write_onnx(parts: ModelParts, folder: Path, images: Sequence[Image.Image], include_preprocessing: bool) -> OnnxFile:
    """Writes model.onnx into a folder, if ONNX Runtime computes the same probabilities as torch.

    `images`: RGB images of any size that the model accepts, for the comparison; none: random pixels. Raises
    `UserError`, and leaves no file, if a package is missing, the encoder does not export, the file would be too large,
    or the probabilities differ.
    """
    check_installed()
    preprocessing, encoder = parts.config.preprocessing, parts.config.encoder
    if encoder.reads_features:
        given = pixels = torch.randn(max(BATCH_SIZES), encoder.width, generator=torch.Generator().manual_seed(0))
    else:
        resized = resize_for_comparison(images, preprocessing)  # uint8 [n,H,W,3]
        pixels = torch.stack([normalizing_transform(preprocessing)(Image.fromarray(image)) for image in resized])
        given = torch.from_numpy(resized) if include_preprocessing else pixels
    graph = _Graph(Classifier(parts, "fp32"), preprocessing, include_preprocessing).eval()
    content = export_bytes(graph, given, parts)
    path = folder / ONNX
    difference = 0.0

    def write(temporary: Path) -> None:
        nonlocal difference
        temporary.write_bytes(content)
        # while it has its temporary name: a file that differs must never be found as model.onnx
        difference = _difference(temporary, given.numpy(), pixels, graph.classifier)

    replace_file(path, write, len(content))
    compared_on = plural(len(images), "image") if images else f"random {_input_name(given)}"
    return OnnxFile(path, OPSET, len(content), include_preprocessing, compared_on, difference)


def resize_for_comparison(images: Sequence[Image.Image], preprocessing: Preprocessing) -> np.ndarray:
    """Returns at least `max(BATCH_SIZES)` resized and cropped images, uint8 [n,H,W,3]; without images, random ones."""
    least, side, resize = max(BATCH_SIZES), preprocessing.size, resizing_transform(preprocessing)
    if not images:
        return np.random.default_rng(0).integers(0, 256, (least, side, side, 3), dtype=np.uint8)
    return np.stack([np.asarray(resize(image)) for image in images] * -(-least // len(images)))


def export_bytes(graph: _Graph, example: Tensor, parts: ModelParts) -> bytes:
    """Returns the file's content."""
    name = _input_name(example)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter, about itself
            program: Any = torch.onnx.export(
                graph,
                (example[:2],),  # an axis of one sample would become a constant
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=[name],
                output_names=[LOGITS, PROBABILITIES],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )
    except Exception as error:  # of the exporter, of torch.export, or of the model's own code under it
        raise UserError(
            f"encoder.model: {parts.config.encoder.settings['model']} does not export to ONNX with torch "
            f"{torch.__version__} ({type(error).__name__}: {reason_of(error)}); leave --onnx out"
        ) from error
    size = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
    if size > MAX_BYTES:
        raise UserError(f"{ONNX}: its weights take {size / 1e9:.1f} GB, and an ONNX file holds 2 GB; leave --onnx out")
    model, config = program.model_proto, parts.config
    _strip(model)
    metadata = {
        "class_names": config.class_names,
        "opset": OPSET,
        "preprocessing": config.preprocessing.model_dump(mode="json"),
        **({} if config.intensity is None else {"intensity": config.intensity.model_dump(mode="json")}),
        "temperature": config.temperature,  # the logits are divided by it already
        "xdm_ft": __version__,
    }
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value if isinstance(value, str) else json.dumps(value))
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def _input_name(given: Tensor) -> str:
    if given.ndim == 2:
        return FEATURES
    return PIXELS if given.dtype == torch.float32 else IMAGES


def _strip(message: Any) -> None:
    """Clears all metadata and documentation of a protobuf message: the exporter writes stack traces with paths."""
    for field, value in message.ListFields():
        if field.name in ("metadata_props", "doc_string"):
            message.ClearField(field.name)
        elif field.message_type is not None:
            for inner in value if isinstance(value, Sequence) else [value]:
                _strip(inner)


def _difference(path: Path, given: np.ndarray, pixels: Tensor, classifier: Classifier) -> float:
    """Returns the largest |Δ probability| between the file in ONNX Runtime and torch. Raises `UserError` above 1e-4."""
    import onnxruntime

    batches = [slice(first, first + size) for size in BATCH_SIZES for first in range(0, len(given), size)]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; its warnings are about its own optimisations
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        computed = [session.run([PROBABILITIES], {name: given[rows]})[0] for rows in batches]
    except Exception as error:  # its exceptions have no common base
        raise UserError(f"{ONNX}: ONNX Runtime does not run it ({reason_of(error)}); leave --onnx out") from error
    with torch.no_grad():
        expected = [probabilities(classifier(pixels[rows])).numpy() for rows in batches]
    difference = float(np.abs(np.concatenate(computed) - np.concatenate(expected)).max())
    if not difference <= TOLERANCE:  # nor NaN
        raise UserError(
            f"{ONNX}: probabilities of ONNX Runtime and torch differ by up to {difference:.1e}, more than "
            f"{TOLERANCE:.0e}; it is not kept; leave --onnx out"
        )
    return difference
