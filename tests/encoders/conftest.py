"""Tiny models of all families of encoders, real weights and images, and a hub cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from tiny_models import NAMES, Family, tiny_clip, tiny_of_transformers, tiny_resnet

SHARED = Path(__file__).resolve().parents[2] / "../shared/assets"


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    folders = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    of_transformers = {kind: tiny_of_transformers(kind, folders[kind]) for kind in NAMES[2:]}
    return {"timm": tiny_resnet(folders["timm"]), "open_clip": tiny_clip(folders["open_clip"]), **of_transformers}


@pytest.fixture(params=NAMES)
def family(request: pytest.FixtureRequest, families: dict[str, Family]) -> Family:
    return families[request.param]


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
    # transformers before 5 has a copy of it
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(cache), raising=False)

    def add(repository: str, files: dict[str, Any]) -> Path:
        folder = cache / f"models--{repository.replace('/', '--')}"
        snapshot = folder / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0" * 40)
        for name, content in files.items():
            if name.endswith(".safetensors"):
                save_file(content, snapshot / name)
            else:
                (snapshot / name).write_text(json.dumps(content))
        return snapshot

    return add
