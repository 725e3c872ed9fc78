"""Folders, pipes, links and files of absurd content where a run keeps its own: one line or a new training, at once."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from what_runs_leave import fill, numbers

from xdm_ft.cli.parser import main
from xdm_ft.storage import checkpoint
from xdm_ft.storage.checkpoint import Checkpoint, Pace
from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.tensors import read_checked

SOON = 60.0  # seconds, on a busy machine; what would hang does so for ever or for hours


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("finished"), False, final_fit="true")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("interrupted"), True)


def gone(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def folder(path: Path) -> None:
    gone(path)
    path.mkdir()


def pipe(path: Path) -> None:
    gone(path)
    os.mkfifo(path)


def link_to_nothing(path: Path) -> None:
    gone(path)
    path.symlink_to("nothing")


def link_to_itself(path: Path) -> None:
    gone(path)
    path.symlink_to(path.name)


def endless(path: Path) -> None:
    gone(path)
    path.symlink_to("/dev/zero")


def text(path: Path) -> None:
    gone(path)
    path.write_text("text")


def brackets(path: Path) -> None:
    gone(path)
    path.write_text("[" * 100_000 + "\n")


def nested(path: Path) -> None:
    """Less deep than what Python's reader refuses."""
    gone(path)
    path.write_text(
        '{"value": ' + "[" * 900 + "]" * 900 + ', "xxh3": "0", "runs": [], "environment": {}, "recipe": {}}\n'
    )


def header_of_brackets(path: Path) -> None:
    gone(path)
    path.write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000)


def empty_tensors(path: Path, size: int = 8_000_000, metadata: dict[str, str] | None = None) -> None:
    gone(path)
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = {"__metadata__": metadata or {}} | {f"{number:08}": entry for number in range(size // 64)}
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written)


FILES: dict[str, list[Callable[[Path], None]]] = {
    "results.json": [pipe, link_to_nothing, link_to_itself, endless, brackets, nested],
    "recipe.yaml": [folder, pipe, link_to_nothing, endless, brackets, nested],
    "results.md": [folder, link_to_nothing],
    "run.lock": [folder, pipe, link_to_nothing],
    "models": [text, link_to_nothing],
    "models/erm": [text],
    "models/erm/*/*/predictions.safetensors": [folder, pipe, link_to_itself, endless, empty_tensors],
    "models/erm/*/*/train_val.safetensors": [folder, pipe, link_to_nothing, header_of_brackets, empty_tensors],
    "models/final_fit/erm/model.safetensors": [folder, pipe, empty_tensors],
    "events": [text, link_to_nothing],
    "events/*": [folder],
    "state": [text, link_to_nothing],
    "state/records": [text],
    "state/records/0.jsonl": [folder, pipe, link_to_nothing, endless, brackets, nested],
}
CASES = [(file, damage) for file, damages in FILES.items() for damage in damages]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        pytest.param(f, d, id=f"{f.split('/')[-1]}-{d.__name__}", marks=pytest.mark.slow if number % 3 else ())
        for number, (f, d) in enumerate(CASES)
    ],
)
def test_each_file(
    file: str,
    damage: Callable[[Path], None],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    made: Path = request.getfixturevalue("interrupted" if file.startswith("state") else "finished")
    want = numbers(request.getfixturevalue("finished") / "out/small")["runs"]
    run = Path(shutil.copytree(made / "out" / "small", tmp_path / "out" / "small"))
    damage(sorted(run.glob(file))[0])
    outside = sorted(tmp_path.iterdir())
    capfd.readouterr()
    started = time.monotonic()
    status = main(["run", str(made / "small.yaml"), f"output.dir={run.parent}"])
    assert time.monotonic() - started < SOON
    told = capfd.readouterr().err
    assert "Traceback" not in told and "Error:" not in told, told
    lines = [line for line in told.splitlines() if line.startswith("xdm-ft: ")]
    if status == 2:
        assert len(lines) == 1 and str(run) in lines[0], told
    else:
        assert status == 0 and not lines, told
        assert numbers(run)["runs"] == want
    assert sorted(tmp_path.iterdir()) == outside


def test_a_folder_or_a_pipe_as_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(Exception, match="it is a folder"):
        Checkpoint(tmp_path / "a", {}, Pace()).load({})
    os.mkfifo(tmp_path / "b")
    own = Checkpoint(tmp_path / "b", {}, Pace())
    assert own.load({}) is None
    own.save(lambda: {"n": 1})
    assert Checkpoint(tmp_path / "b", {}, Pace()).load({}) == {"n": 1}


def test_a_file_of_another_kind_as_checkpoint(finished: Path, tmp_path: Path) -> None:
    shutil.copy(finished / "out/small/models/final_fit/erm/model.safetensors", tmp_path / "c")
    with pytest.raises(Damaged, match="it is no checkpoint"):
        checkpoint.read(tmp_path / "c")


@pytest.mark.slow
def test_a_million_empty_tensors_with_a_checksum(tmp_path: Path) -> None:
    (tmp_path / "w").touch()
    empty_tensors(tmp_path / "w", 4_000_000, {"xxh3": "0"})
    with pytest.raises(Damaged, match="its checksum differs"):
        read_checked(tmp_path / "w")


@pytest.mark.slow
def test_40_megabytes_of_empty_tensors(tmp_path: Path) -> None:
    (tmp_path / "w").touch()
    empty_tensors(tmp_path / "w", 40_000_000)
    started = time.process_time()
    with pytest.raises(Damaged, match="it has no checksum"):
        read_checked(tmp_path / "w")
    assert time.process_time() - started < 10  # where it is read tensor by tensor: more than a minute
