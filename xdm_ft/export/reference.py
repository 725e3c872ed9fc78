"""The file of a model's `Reference`, in a run directory and in a model directory."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from xdm_ft.evaluation.distance import Reference
from xdm_ft.export.config import ModelConfig
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.storage.checksummed import Damaged, read_checked, write_arrays
from xdm_ft.storage.digests import tensors_digest
from xdm_ft.storage.run_directory import RunDirectory

REFERENCE = "reference.safetensors"
logger = logging.getLogger("xdm_ft")


def of_run(path: Path, file: str, width: int) -> Reference | None:
    """Returns the reference in a file of a run directory; None, with a warning if it is damaged, without."""
    directory = RunDirectory(path)
    try:
        return _reference(directory.tensors(file)[0], width)
    except FileNotFoundError:  # an earlier version wrote the run
        return None
    except Damaged as error:
        logger.warning("%s: is damaged (%s), so distances are not known", printable(path / file), error)
        return None


def digest_of(reference: Reference | None) -> str | None:
    """Returns the checksum of the tensors in a reference's file, as `read_part` compares it."""
    if reference is None:
        return None
    return tensors_digest({name: torch.from_numpy(array) for name, array in sorted(reference.arrays().items())})


def write(reference: Reference, folder: Path) -> None:
    write_arrays(folder / REFERENCE, reference.arrays(), {"format": "pt"})


def read(folder: Path, config: ModelConfig) -> Reference | None:
    """Returns the reference of a model directory, if it has one. Raises `UserError` if it is damaged."""
    if config.reference_xxh3 is None:
        return None
    tensors = read_part(folder / REFERENCE, config.reference_xxh3)
    try:
        return _reference(tensors, config.encoder.width)
    except Damaged as error:
        raise UserError(f"{folder / REFERENCE}: is damaged ({error}); export the model again") from error


def read_part(path: Path, xxh3: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file of a model directory. Raises `UserError` unless they are those of its config."""
    try:
        tensors, _ = read_checked(path)
        if tensors_digest(dict(sorted(tensors.items()))) != xxh3:
            raise Damaged("it is of another model than config.json")
        return tensors
    except FileNotFoundError as error:
        raise UserError(f"{path}: does not exist; export the model again") from error
    except Damaged as error:
        raise UserError(f"{path}: is damaged ({error}); export the model again") from error


def _reference(tensors: dict[str, torch.Tensor], width: int) -> Reference:
    """Raises `Damaged` if the tensors are not a reference of features of this width."""
    try:
        reference = Reference.from_arrays({name: tensor.numpy() for name, tensor in tensors.items()})
    except (KeyError, ValueError) as error:
        raise Damaged(f"it lacks {error}" if isinstance(error, KeyError) else str(error)) from error
    if reference.means.shape[1] != width:
        raise Damaged(f"it is of features of size {reference.means.shape[1]}, not {width}")
    return reference
