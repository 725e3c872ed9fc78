"""Writes a model directory: tensors and config, example.py, and README.md."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from xdm_ft.export.card import card
from xdm_ft.export.directory import write_directory
from xdm_ft.export.onnx import OnnxFile, write_onnx
from xdm_ft.export.parts import Parts
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.atomic import UNFINISHED, disk_errors, replace_text, sync, umask

EXAMPLE = '''\
"""Predicts the classes of images: python example.py IMAGE …"""

import sys
from pathlib import Path

import xdm_ft

model = xdm_ft.load(Path(__file__).parent)
for image, probabilities in zip(sys.argv[1:], model.predict_proba(sys.argv[1:]), strict=True):
    print(f"{image}: {model.class_names[probabilities.argmax()]} ({probabilities.max():.1%})")
'''


@dataclass(frozen=True)
class AsOnnx:
    """model.onnx is wanted too."""

    images: Sequence[Image.Image]  # to compare ONNX Runtime with torch on; (): random pixels
    include_preprocessing: bool


def export(parts: Parts, target: Path, with_encoder: bool | None, as_onnx: AsOnnx | None = None) -> OnnxFile | None:
    """Writes the model into a new directory. Returns what is known of its model.onnx, if there is one.

    `with_encoder` None: as `write_directory` says. What was trained is always included.
    A killed export leaves nothing under the directory's name. Raises `UserError` if it exists and is not empty, if it
    can not be written, and as `write_onnx` does.
    """
    with new_directory(target) as folder:
        config = write_directory(parts, folder, True if parts.config.encoder.trained is True else with_encoder)
        replace_text(folder / "example.py", EXAMPLE)
        replace_text(folder / "README.md", card(config, parts.config.encoder.settings, parts.training_features))
        return None if as_onnx is None else write_onnx(parts, folder, as_onnx.images, as_onnx.include_preprocessing)


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `target`, which gets that name at the end."""
    refuse_taken(target)
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=UNFINISHED))
    try:
        yield folder
        with disk_errors(target):
            folder.chmod(0o777 & ~umask())  # mkdtemp lets only the owner in
            os.replace(folder, target)  # an empty directory may be replaced
            sync(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refuse_taken(target: Path) -> None:
    """Raises `UserError` if the target is a file, or a folder that is not empty."""
    with disk_errors(target):
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise UserError(f"{target}: exists already; name a new directory, or delete this one")
