"""Fixtures for the tests of the encoders: real weights and images, a hub cache, weights files with faults."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

SHARED = Path(__file__).resolve().parents[2] / "../shared/assets"


@pytest.fixture
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} does not exist; real weights and images are expected beside the repository")
    return SHARED


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`hub(repository, {file: content})` adds a repository to a temporary hub cache, as a download would."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    def add(repository: str, files: dict[str, object]) -> Path:
        folder = cache / f"models--{repository.replace('/', '--')}"
        snapshot = folder / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0" * 40)
        for name, content in files.items():
            if name.endswith(".safetensors"):
                save_file(content, snapshot / name)  # type: ignore[arg-type]
            else:
                (snapshot / name).write_text(json.dumps(content))
        return snapshot

    return add


class Bomb:
    """Creates a folder if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def faulty(tmp_path: Path) -> Callable[[str, dict[str, Tensor]], Path]:
    """`faulty(fault, state)` writes a weights file with that fault, made of a correct state dict."""

    def make(fault: str, state: dict[str, Tensor]) -> Path:
        path = tmp_path / f"{fault}.{'safetensors' if 'safetensors' in fault else 'pth'}"
        if fault == "missing":
            return path
        if fault == "folder":
            path.mkdir()
        elif fault == "truncated_safetensors":
            save_file(state, path)
            path.write_bytes(path.read_bytes()[:-100])
        elif fault == "truncated":
            torch.save(state, path)
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        elif fault in ("garbage", "garbage_safetensors"):
            path.write_bytes(b"<html>404 not found</html>" * 20)
        elif fault == "code":
            torch.save({**state, "bomb": Bomb(tmp_path / "exploded")}, path)
        elif fault == "torchscript":
            torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)).save(path)
        else:
            assert fault == "no_tensors"
            torch.save({"epoch": 3}, path)
        return path

    return make


FAULTS = {
    "missing": "does not exist",
    "folder": "is a folder",
    "truncated_safetensors": "is damaged",
    "truncated": "is damaged",
    "garbage": "is damaged",
    "garbage_safetensors": "is damaged",
    "code": "holds pickled code",
    "torchscript": "TorchScript",
    "no_tensors": "holds no tensors",
}


@pytest.fixture(params=FAULTS.items(), ids=FAULTS)
def fault(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The name of a fault, and a part of its message."""
    return request.param
