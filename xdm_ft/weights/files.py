"""Weights files: read without running pickled code. Every fault is a `UserError` of one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from xdm_ft.runtime.errors import UserError, plural

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
MOST_TENSORS = 100_000  # in a file; the largest models have some thousands
_BYTES_PER_TENSOR = 200  # of the header of a safetensors file: more than a tensor takes
_SHOWN = 3  # tensor names listed in a message


def is_file_name(weights: str) -> bool:
    """Whether `encoder.weights` is a file and not a tag: it ends in one of `SUFFIXES` or has a slash (not hf-hub:)."""
    return not weights.startswith("hf-hub:") and (weights.endswith(SUFFIXES) or "/" in weights or "\\" in weights)


def read_weights(
    path: Path, read: Callable[[str], Mapping[str, object]], key: str = "encoder.weights"
) -> dict[str, Tensor]:
    """Returns the tensors of a weights file by name. `read` is the library's reader, which must not run pickled code.

    `key` is the recipe key or option that names the file; messages begin with it.

    Raises `UserError` if the file is missing or damaged, or holds code, NaN or no tensors.
    """
    _refuse_unreadable(path, key)
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{key}: {path} is no weights file; give one of {', '.join(SUFFIXES)}")
    _refuse_long_header(path, key)
    try:
        state = read(str(path))
    except Exception as error:  # on a damaged file, the readers raise almost any exception
        raise UserError(f"{key}: {path} {_read_failure(error)}") from error
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if len(tensors) > MOST_TENSORS:
        raise _too_many(path, key)
    if not tensors:
        raise UserError(f"{key}: {path} holds no tensors; give a file with a state dict")
    broken = [name for name, value in tensors.items() if value.is_floating_point() and value.isnan().any()]
    if broken:
        raise UserError(
            f"{key}: {path} holds NaN in {plural(len(broken), 'tensor')} ({_first_few(broken)}): "
            "its training has diverged or the file is damaged; give another one"
        )
    return tensors


def _refuse_unreadable(path: Path, key: str) -> None:
    try:
        if path.is_file():
            path.open("rb").close()
            return
        problem = "is a folder" if path.is_dir() else "does not exist"
    except OSError as error:
        problem = f"can not be read ({error.strerror})"
    raise UserError(f"{key}: {path} {problem}; give the path of a .safetensors or .pth file")


def _refuse_long_header(path: Path, key: str) -> None:
    """Raises `UserError` for a safetensors file with so many tensors that reading them takes minutes."""
    if path.name.endswith(".safetensors") and path.stat().st_size > MOST_TENSORS * _BYTES_PER_TENSOR:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")  # of the header
        if MOST_TENSORS * _BYTES_PER_TENSOR < length < path.stat().st_size:
            raise _too_many(path, key)


def _too_many(path: Path, key: str) -> UserError:
    return UserError(f"{key}: {path} holds more than {MOST_TENSORS:,} tensors; give the weights of a model")


def _read_failure(error: Exception) -> str:
    """Why a reader failed, in words that follow the path."""
    text = " ".join(str(error).split())
    if "TorchScript" in text:
        return "is a TorchScript archive, which is code; save its state dict as .safetensors and give that file"
    with_cause = f"{text} {error.__cause__ or error.__context__ or ''}"  # timm replaces torch's message by its own
    code = re.search(r"(?:Unsupported globals?: (?:GLOBAL )?|GLOBAL )([\w.]+)", with_cause)
    if code:
        return (
            f"holds pickled code ({code[1]}), which is never run; "
            "if you trust it, save its state dict as .safetensors and give that file"
        )
    return f"is damaged or has another format ({type(error).__name__}: {text[:120]}); copy or download it again"


def mismatch(path: Path | str, model: str, error: Exception) -> UserError:
    """The error that a file does not fit the model, in one line; `error` is that of torch's strict loading."""
    text = str(error)  # several lines: "Missing key(s) in state_dict: …", "Unexpected key(s) …", "size mismatch for …"
    found = []
    for title, wording in (
        ("Missing", "lacks {n} of the model's tensors"),
        ("Unexpected", "holds {n} that the model has not"),
    ):
        section = re.search(rf"{title} key\(s\) in state_dict: (.*?)\.\s*(?:\n|$)", text)
        names = re.findall(r'"([^"]+)"', section[1]) if section else []
        if names:
            found.append(f"{wording.format(n=len(names))} ({_first_few(names)})")
    shapes = re.findall(
        r"size mismatch for (\S+): .*? shape torch\.Size\((.*?)\) from checkpoint, .*? torch\.Size\((.*?)\)", text
    )
    if shapes:
        name, in_file, in_model = shapes[0]
        found.append(f"{len(shapes)} of another shape ({name}: {in_file} in the file, {in_model} in the model)")
    what = ", ".join(found) or f"does not load ({type(error).__name__}: {' '.join(text.split())[:160]})"
    return UserError(
        f'encoder.weights: {path} does not fit "{model}": {what}; '
        "check encoder.model and encoder.kwargs, or give the complete file"
    )


def _first_few(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
