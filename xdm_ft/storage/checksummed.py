"""Files with a checksum, so that a run that resumes finds damage in its own files.

Values are in files of JSON lines, arrays and tensors in safetensors files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from xdm_ft.storage.atomic import disk_errors, order_metadata, replace_file, sync
from xdm_ft.storage.digests import json_digest, tensors_digest

Arrays = dict[str, np.ndarray]
INPUTS = (
    "data",
    "encoder",
    "features",
)  # keys of the environment in results.json that must not change when a run resumes


class Damaged(Exception):
    """A file does not hold what was written to it. The text says what is wrong."""


def results_digest(results: Mapping[str, Any]) -> str:
    """Returns the checksum of the parts of results.json that a resumed run reads, without the training times."""
    runs = [{key: value for key, value in run.items() if key != "train_seconds"} for run in results["runs"]]
    return json_digest([runs, results.get("final_fit"), {key: results["environment"].get(key) for key in INPUTS}])


def read_results(path: Path) -> dict[str, Any]:
    """Returns the content of results.json. Raises `Damaged`."""
    try:
        results = json_object(path.read_bytes())
        whole = results["checksum"] == results_digest(results)
    except OSError as error:
        raise Damaged(_reason(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"it lacks {error}") from error
    if not whole:
        raise Damaged("its checksum differs")
    return results


def append_line(path: Path, value: Any) -> None:
    """Appends a JSON value to a file of lines, and returns when it is on the disk.

    No other process may write the file. An incomplete last line, left by a killed process, is cut off first. Raises
    `UserError` if the file can not be written.
    """
    line = json.dumps({"value": value, "xxh3": json_digest(value)}, ensure_ascii=False, allow_nan=False) + "\n"
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        created = not path.exists()
        with path.open("ab+") as file:
            file.truncate(_end_of_last_line(path))
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        if created:
            sync(path.parent)  # or a crash could lose the name of the new file


def _end_of_last_line(path: Path) -> int:
    """Returns the number of bytes up to the last newline, inclusive."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - 4096)
            file.seek(begin)
            place = file.read(end - begin).rfind(b"\n")
            if place >= 0:
                return begin + place + 1
            end = begin
    return 0


def read_lines(path: Path) -> Iterator[Any]:
    """Yields the values of a file of lines, in order; an incomplete last line is ignored. Raises `Damaged`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Damaged(_reason(error)) from error
    *lines, _ = content.split(b"\n")  # behind the last newline is nothing, or a line that a kill cut short
    for number, line in enumerate(lines, start=1):
        try:
            kept = json_object(line)
        except Damaged as error:
            raise Damaged(f"line {number}: {error}") from error
        if "value" not in kept or kept.get("xxh3") != json_digest(kept["value"]):
            raise Damaged(f"line {number}: its checksum differs")
        yield kept["value"]


def json_object(text: bytes) -> dict[str, Any]:
    """Parses a JSON object. Raises `Damaged` for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is not JSON: {_reason(error)}") from error
    if not isinstance(found, dict):
        raise Damaged("it is not a JSON object")
    return found


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file atomically. Equal tensors and metadata give equal bytes."""
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def write(temporary: Path) -> None:
        save_file(kept, temporary, dict(metadata))
        order_metadata(temporary)

    replace_file(path, write)


def read_tensors(path: Path, framework: Literal["pt", "numpy"] = "pt") -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the memory-mapped tensors of a safetensors file by name, and its metadata. Verifies no checksum.

    Raises `Damaged`, or `FileNotFoundError` if there is no file.
    """
    try:
        with safe_open(path, framework=framework) as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}, dict(file.metadata() or {})
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise Damaged(f"it is not a complete safetensors file: {_reason(error)}") from error


def write_arrays(path: Path, arrays: Arrays) -> None:
    # torch.tensor copies, because safetensors refuses tensors that share memory
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    write_tensors(path, tensors, {"xxh3": tensors_digest(dict(sorted(arrays.items())))})


def read_arrays(path: Path) -> Arrays:
    """Returns the arrays that `write_arrays` wrote. Raises `Damaged`, or `FileNotFoundError` if there is no file."""
    arrays, metadata = read_tensors(path, "numpy")
    if metadata.get("xxh3") != tensors_digest(arrays):
        raise Damaged("its checksum differs")
    return arrays


def check_tensors(path: Path) -> None:
    """Raises `Damaged` unless the length of a safetensors file fits its header; a truncated file does not.

    The weights themselves are not read: no number of the results comes from them.
    """
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise Damaged(f"it is not a complete safetensors file: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Returns the text of an exception on one line."""
    # str() of an OSError repeats the path
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())
