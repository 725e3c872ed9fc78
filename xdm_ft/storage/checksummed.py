"""What a run writes for itself to read again: with a checksum, so that damage is found and no number is read wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from xdm_ft.storage.atomic import replace_file, replace_text
from xdm_ft.storage.checkpoint import Damaged

Arrays = dict[str, np.ndarray]
INPUTS = ("data", "features")  # keys of the environment in results.json that a resumed run must find again


def seal(value: Any) -> str:
    """xxh3 of a value as JSON has it."""
    as_read = json.loads(json.dumps(value))  # whose keys are all texts, which sort otherwise than whole numbers
    return str(xxhash.xxh3_64_hexdigest(json.dumps(as_read, sort_keys=True).encode()))


def seal_results(results: Mapping[str, Any]) -> str:
    """Of what is read again of results.json, but for the times, which differ from run to run."""
    runs = [{key: value for key, value in run.items() if key != "train_seconds"} for run in results["runs"]]
    return seal([runs, results.get("final_fit"), {key: results["environment"].get(key) for key in INPUTS}])


def write_value(path: Path, value: Any) -> None:
    text = json.dumps({"value": value, "xxh3": seal(value)}, ensure_ascii=False, allow_nan=False)
    replace_text(path, text)


def read_value(path: Path) -> Any:
    """Raises `Damaged`."""
    kept = _read_json(path)
    if "value" not in kept or kept.get("xxh3") != seal(kept["value"]):
        raise Damaged("its checksum differs")
    return kept["value"]


def read_results(path: Path) -> dict[str, Any]:
    """results.json. Raises `Damaged`."""
    results = _read_json(path)
    try:
        whole = results["checksum"] == seal_results(results)
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"it lacks {error}") from error
    if not whole:
        raise Damaged("its checksum differs")
    return results


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or f"it is no JSON: {error}"
        raise Damaged(" ".join(reason.split())) from error
    if not isinstance(found, dict):
        raise Damaged("it is no JSON object")
    return found


def write_arrays(path: Path, arrays: Arrays) -> None:
    replace_file(path, lambda temporary: save_file(arrays, temporary, {"xxh3": _digest(arrays)}))


def read_arrays(path: Path) -> Arrays:
    """Raises `Damaged`."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (SafetensorError, OSError, ValueError) as error:
        raise Damaged(" ".join(f"it is no whole safetensors file: {error}".split())) from error
    if metadata.get("xxh3") != _digest(arrays):
        raise Damaged("its checksum differs")
    return arrays


def _digest(arrays: Arrays) -> str:
    hasher = xxhash.xxh3_64()
    for name, array in sorted(arrays.items()):
        hasher.update(f"{name} {array.dtype} {list(array.shape)}\n".encode())
        hasher.update(np.ascontiguousarray(array).data)
    return str(hasher.hexdigest())


def check_tensors(path: Path) -> None:
    """That a safetensors file is as long as its header says, which no truncated or replaced one is. Raises `Damaged`.

    Weights are not read for it: no number of the results comes from their file.
    """
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise Damaged(" ".join(f"it is no whole safetensors file: {error}".split())) from error
