"""Files with a checksum: what a run writes for itself to read again, so that damage is found and nothing read wrong.

Values lie in JSON lines, arrays and tensors in safetensors files.
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

from xdm_ft.storage.atomic import order_metadata, refusals, replace_file, sync
from xdm_ft.storage.digests import json_digest, tensors_digest

Arrays = dict[str, np.ndarray]
INPUTS = ("data", "features")  # keys of the environment in results.json that a resumed run must find again


class Damaged(Exception):
    """A file that is not what was written. Its text says what was found."""


def results_digest(results: Mapping[str, Any]) -> str:
    """The checksum of what is read again of results.json, without the times, which differ from run to run."""
    runs = [{key: value for key, value in run.items() if key != "train_seconds"} for run in results["runs"]]
    return json_digest([runs, results.get("final_fit"), {key: results["environment"].get(key) for key in INPUTS}])


def read_results(path: Path) -> dict[str, Any]:
    """results.json. Raises `Damaged`."""
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
    """Adds a JSON value to a file of lines that this process alone writes, and waits until the disk has it.

    What a killed process left of its last line is cut off. Raises `UserError` where the file can not be written.
    """
    line = json.dumps({"value": value, "xxh3": json_digest(value)}, ensure_ascii=False, allow_nan=False) + "\n"
    with refusals(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        created = not path.exists()
        with path.open("ab+") as file:
            file.truncate(_end_of_last_line(path))
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        if created:
            sync(path.parent)


def _end_of_last_line(path: Path) -> int:
    """The number of bytes up to the last newline."""
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
    """The values of a file of lines, in order, without a last line that a kill has cut short. Raises `Damaged`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Damaged(_reason(error)) from error
    *lines, _ = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            kept = json_object(line)
        except Damaged as error:
            raise Damaged(f"line {number}: {error}") from error
        if "value" not in kept or kept.get("xxh3") != json_digest(kept["value"]):
            raise Damaged(f"line {number}: its checksum differs")
        yield kept["value"]


def json_object(text: bytes) -> dict[str, Any]:
    """Raises `Damaged` for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is no JSON: {_reason(error)}") from error
    if not isinstance(found, dict):
        raise Damaged("it is no JSON object")
    return found


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file whose bytes are a function of its content."""
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def write(temporary: Path) -> None:
        save_file(kept, temporary, dict(metadata))
        order_metadata(temporary)

    replace_file(path, write)


def read_tensors(path: Path, framework: Literal["pt", "numpy"] = "pt") -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of a safetensors file by name, memory-mapped, and its metadata. No checksum is compared.

    Raises `Damaged`, and `FileNotFoundError` where there is no file.
    """
    try:
        with safe_open(path, framework=framework) as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}, dict(file.metadata() or {})
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise Damaged(f"it is no whole safetensors file: {_reason(error)}") from error


def write_arrays(path: Path, arrays: Arrays) -> None:
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}  # copies: two may share their memory
    write_tensors(path, tensors, {"xxh3": tensors_digest(dict(sorted(arrays.items())))})


def read_arrays(path: Path) -> Arrays:
    """Raises `Damaged`, and `FileNotFoundError` where there is no file."""
    arrays, metadata = read_tensors(path, "numpy")
    if metadata.get("xxh3") != tensors_digest(arrays):
        raise Damaged("its checksum differs")
    return arrays


def check_tensors(path: Path) -> None:
    """That a safetensors file is as long as its header says, which no truncated or replaced one is. Raises `Damaged`.

    Weights are not read for it: no number of the results comes from their file.
    """
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise Damaged(f"it is no whole safetensors file: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What the error says, on one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())
