"""Weights, predictions and the model to use: whatever happens to their bytes is found when the run is started again."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from what_runs_leave import fill, numbers

from xdm_ft.cli.parser import main
from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.storage.tensors import read_checked, read_tensors


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("finished"), False, final_fit="true")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run directory."""
    return Path(shutil.copytree(finished / "out" / "small", tmp_path / "small"))


def again(finished: Path, run: Path) -> int:
    return main(["run", str(finished / "small.yaml"), f"output.dir={run.parent}"])


def tensor_files(run: Path) -> list[Path]:
    files = sorted((run / "models").rglob("*.safetensors"))
    assert {path.stem for path in files} == {"train_val", "oracle", "predictions", "model"}
    return files


def test_every_damage_of_every_file_is_found_or_harmless(run: Path) -> None:
    directory, draw = RunDirectory(run, main=False), random.Random(0)
    for path in tensor_files(run):
        relative = str(path.relative_to(run))
        whole = path.read_bytes()
        tensors, metadata = directory.tensors(relative)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        flipped = [*range(8), *(draw.randrange(len(whole)) for _ in range(60)), len(whole) - 1]
        damages = [whole[:p] + bytes([whole[p] ^ 1 << draw.randrange(8)]) + whole[p + 1 :] for p in flipped]
        damages += [whole[:p] + bytes(64) + whole[p + 64 :] for p in (draw.randrange(len(whole)) for _ in range(10))]
        damages += [whole[: draw.randrange(len(whole))], whole + b"x", b"", bytes(len(whole))]
        found = 0
        for damage in damages:
            path.write_bytes(damage)
            try:
                got, about = directory.tensors(relative)
            except Damaged:
                found += 1
                continue
            assert about == metadata and got.keys() == tensors.keys()
            assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
        assert found > len(damages) - 10, relative
        path.write_bytes(whole)


def flip_in_the_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-len(data) // 4] ^= 1  # in the tensors
    path.write_bytes(data)


def change_the_step(path: Path) -> None:
    data = path.read_bytes()
    place = data.index(b'"step":"') + 8
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


def as_before_checksums(path: Path) -> None:
    tensors, metadata = read_tensors(path)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, {"step": metadata["step"]})


def of_another_model(path: Path) -> None:
    other = next(one for one in path.parents[3].rglob(path.name) if one != path)
    shutil.copyfile(other, path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_in_the_middle, "its checksum differs"),
        (change_the_step, "its checksum differs"),
        (as_before_checksums, "it has no checksum; an earlier version may have written it"),
        (of_another_model, "it was written as models/erm/"),
    ],
)
def test_a_finished_run_trains_the_model_of_damaged_weights_again(
    damage: Callable[[Path], None],
    reason: str,
    finished: Path,
    run: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = sorted(run.glob("models/erm/*/*/train_val.safetensors"))[0]
    whole, want = path.read_bytes(), numbers(run)
    damage(path)
    assert path.read_bytes() != whole
    with caplog.at_level(logging.INFO, "xdm_ft"):
        assert again(finished, run) == 0
    [line] = [line for line in caplog.messages if "is damaged" in line]
    assert line.startswith(f"{path}: is damaged ({reason}") and line.endswith("; its model will be trained again")
    assert "(erm: 1 model)" in caplog.text
    assert path.read_bytes() == whole
    assert numbers(run)["runs"] == want["runs"]


def test_the_model_to_use_is_checked_too(finished: Path, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = run / "models/final_fit/erm/model.safetensors"
    whole = path.read_bytes()
    flip_in_the_middle(path)
    with caplog.at_level(logging.INFO, "xdm_ft"):
        assert again(finished, run) == 0
    assert f"{path}: is damaged (its checksum differs); its model will be trained again" in caplog.messages
    assert path.read_bytes() == whole


def test_nothing_is_trained_again_if_nothing_is_damaged(
    finished: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = {path: path.stat().st_mtime_ns for path in tensor_files(run)}
    with caplog.at_level(logging.INFO, "xdm_ft"):
        assert again(finished, run) == 0
    assert not [line for line in caplog.messages if "models" in line or "damaged" in line]
    assert {path: path.stat().st_mtime_ns for path in tensor_files(run)} == before


def test_weights_are_what_safetensors_reads(run: Path) -> None:
    for path in tensor_files(run):
        assert read_tensors(path)[0].keys() == read_checked(path)[0].keys()
