"""Every file of a run directory, damaged, missing or another thing: one clear line, or the same numbers once more."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import damages as d
import miniature
import pytest
import torch
from what_runs_leave import fill
from what_runs_leave import numbers as numbers_of

from xdm_ft.cli.parser import main
from xdm_ft.storage import checkpoint
from xdm_ft.storage.checkpoint import Checkpoint, Pace
from xdm_ft.storage.digests import json_digest
from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.storage.tensors import read_checked, read_tensors

SOON = 60.0  # seconds, on a busy machine; what would hang does so for ever or for hours
WORDS = ("damaged", "missing", "another recipe", "can not be", "another run")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("finished"), False, final_fit="true")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models trained; what ends is the summary."""
    folder = fill(tmp_path_factory.mktemp("interrupted"), True, selection="cross_domain")
    assert (folder / "out/small/state/records").is_dir() and (folder / "out/small/state/cross_domain").is_dir()
    return folder


@pytest.fixture(scope="module")
def expected(finished: Path, interrupted: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each of the two ends with, undamaged."""
    copy = Path(shutil.copytree(interrupted / "out", tmp_path_factory.mktemp("undamaged") / "out"))
    assert again(interrupted, copy / "small") == 0
    return {"finished": numbers(finished / "out/small"), "interrupted": numbers(copy / "small")}


def copied(made: Path, folder: Path) -> Path:
    """A copy of its run directory."""
    return Path(shutil.copytree(made / "out/small", folder / "out/small", copy_function=shutil.copy2))


def numbers(run: Path) -> dict[str, Any]:
    """Its results, wherever it lies."""
    found = numbers_of(run)
    del found["recipe"]["output"]
    return found


def again(made: Path, run: Path) -> int:
    return main(["run", str(made / "small.yaml"), f"output.dir={run.parent}"])


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return copied(finished, tmp_path)


TEXTS = [d.truncate, d.empty, d.other_type, d.flip_a_digit, d.folder, d.remove, d.pipe, d.link_to_nothing, d.endless,
         d.brackets, d.nested]  # fmt: skip
TENSORS = [d.truncate, d.garbage, d.flip_a_digit, d.remove]
FILES: dict[str, dict[str, list[d.Damage]]] = {
    "finished": {
        "results.json": [*TEXTS, d.link_to_itself],
        "recipe.yaml": TEXTS,
        "results.md": [d.folder, d.remove, d.link_to_nothing],
        "run.lock": [d.garbage, d.folder, d.remove, d.pipe, d.link_to_nothing],
        "models": [d.text, d.link_to_nothing],
        "models/erm": [d.text],
        "models/erm/*/*/predictions.safetensors": [
            *TENSORS, d.empty, d.folder, d.pipe, d.link_to_itself, d.endless, d.empty_tensors
        ],
        "models/erm/*/*/train_val.safetensors": [
            *TENSORS, d.folder, d.pipe, d.link_to_nothing, d.header_of_brackets, d.empty_tensors
        ],
        "models/final_fit/erm/model.safetensors": [*TENSORS, d.empty, d.folder, d.pipe, d.empty_tensors],
        "test_images/*.safetensors": [*TENSORS, d.empty, d.folder],
        "training_features/*.safetensors": [d.truncate, d.remove, d.folder],
        "events": [d.text, d.link_to_nothing],
        "events/*": [d.folder],
    },
    "interrupted": {
        "results.json": [d.garbage, d.flip_a_digit, d.remove],
        "recipe.yaml": [d.remove],
        "models/erm/**/predictions.safetensors": TENSORS,
        "models/erm/**/cross_domain.safetensors": [d.truncate, d.remove],
        "test_images/*.safetensors": [d.flip_a_digit, d.remove],
        "state": [d.text, d.link_to_nothing],
        "state/records": [d.text],
        "state/records/0.jsonl": [*TEXTS, d.garbage, d.drop_a_line],
        "state/cross_domain/0.jsonl": [d.garbage, d.drop_a_line, d.truncate, d.flip_a_digit, d.folder, d.remove],
    },
}  # fmt: skip
CASES = [(made, file, damage) for made, files in FILES.items() for file, several in files.items() for damage in several]


@pytest.mark.parametrize(
    ("made", "file", "damage"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}-{case[2].__name__}", marks=pytest.mark.slow if n % 7 else ())
        for n, case in enumerate(CASES)
    ],
)
def test_each_file(
    made: str,
    file: str,
    damage: d.Damage,
    request: pytest.FixtureRequest,
    expected: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder: Path = request.getfixturevalue(made)
    run = copied(folder, tmp_path)
    damage(sorted(run.glob(file))[0])
    outside = sorted(tmp_path.iterdir())
    capfd.readouterr()
    started = time.monotonic()
    status = again(folder, run)
    assert time.monotonic() - started < SOON
    told = capfd.readouterr().err
    assert "Traceback" not in told and "Error:" not in told, told
    lines = [line for line in told.splitlines() if line.startswith("xdm-ft: ")]
    if status == 2:
        assert len(lines) == 1 and str(run) in lines[0] and any(word in lines[0] for word in WORDS), told
    else:
        assert status == 0 and not lines, told
        assert numbers(run) == expected[made]
    assert sorted(tmp_path.iterdir()) == outside


def tensor_files(run: Path) -> list[Path]:
    files = sorted((run / "models").rglob("*.safetensors"))
    assert {path.stem for path in files} == {"train_val", "oracle", "predictions", "model"}
    return files


def test_every_damage_of_every_file_of_tensors_is_found_or_harmless(run: Path) -> None:
    directory, draw = RunDirectory(run, main=False), random.Random(0)
    for path in tensor_files(run):
        relative, whole = str(path.relative_to(run)), path.read_bytes()
        assert read_tensors(path)[0].keys() == read_checked(path)[0].keys()
        tensors, metadata = directory.tensors(relative)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        flipped = [*range(8), *(draw.randrange(len(whole)) for _ in range(60)), len(whole) - 1]
        damaged = [whole[:p] + bytes([whole[p] ^ 1 << draw.randrange(8)]) + whole[p + 1 :] for p in flipped]
        damaged += [whole[:p] + bytes(64) + whole[p + 64 :] for p in (draw.randrange(len(whole)) for _ in range(10))]
        damaged += [whole[: draw.randrange(len(whole))], whole + b"x", b"", bytes(len(whole))]
        found = 0
        for content in damaged:
            path.write_bytes(content)
            try:
                got, about = directory.tensors(relative)
            except Damaged:
                found += 1
                continue
            assert about == metadata and got.keys() == tensors.keys()
            assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
        assert found > len(damaged) - 10, relative
        path.write_bytes(whole)


NO_CHECKSUM = "it has no checksum; an earlier version may have written it"
TOLD = [
    ("models/erm/*/*/train_val.safetensors", d.flip_a_digit, "its checksum differs"),
    ("models/erm/*/*/train_val.safetensors", d.change_the_step, "its checksum differs"),
    ("models/erm/*/*/train_val.safetensors", d.as_before_checksums, NO_CHECKSUM),
    ("models/erm/*/*/train_val.safetensors", d.of_another_model, "it was written as models/erm/"),
    ("models/erm/*/*/predictions.safetensors", d.flip_a_digit, "its checksum differs"),
    ("models/final_fit/erm/model.safetensors", d.flip_a_digit, "its checksum differs"),
    ("test_images/photo.safetensors", d.flip_a_digit, "its checksum differs"),
    ("training_features/+final_fit.safetensors", d.flip_a_digit, "its checksum differs"),
]


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [pytest.param(*case, marks=pytest.mark.slow if number in (1, 2) else ()) for number, case in enumerate(TOLD)],
)
def test_damage_is_told_and_mended(
    file: str, damage: d.Damage, reason: str, finished: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, want = sorted(run.glob(file))[0], numbers(run)
    others = {other: other.stat().st_mtime_ns for other in tensor_files(run) if other.parent != path.parent}
    whole = path.read_bytes()
    damage(path)
    assert path.read_bytes() != whole
    with caplog.at_level(logging.INFO, "xdm_ft"):
        assert again(finished, run) == 0
    [line] = [line for line in caplog.messages if "is damaged" in line]
    model = file.startswith("models")
    assert line.startswith(f"{path}: is damaged ({reason}")
    assert line.endswith("; its model will be trained again" if model else "; it will be written again")
    assert ("(erm: 1 model)" in caplog.text) == file.startswith("models/erm")
    assert path.read_bytes() == whole and numbers(run) == want
    assert {other: other.stat().st_mtime_ns for other in others} == others, "nothing else is trained again"


def test_nothing_is_trained_again_if_nothing_is_damaged(finished: Path, run: Path, caplog) -> None:
    before = {path: path.stat().st_mtime_ns for path in tensor_files(run)}
    with caplog.at_level(logging.INFO, "xdm_ft"):
        assert again(finished, run) == 0
    assert not [line for line in caplog.messages if "models" in line or "damaged" in line]
    assert {path: path.stat().st_mtime_ns for path in tensor_files(run)} == before


def test_damaged_reports_are_restored(finished: Path, run: Path) -> None:
    reports = [run / "results.md", run / "results.csv", *run.glob("events/**/*.hparams")]
    assert len(reports) == 4
    whole, sizes = [path.read_bytes() for path in reports[:2]], [path.stat().st_size for path in reports]
    for path, damage in zip(reports, (d.flip_a_digit, d.truncate, d.truncate, d.empty), strict=True):
        damage(path)
    assert again(finished, run) == 0
    assert [path.read_bytes() for path in reports[:2]] == whole
    assert [path.stat().st_size for path in reports] == sizes


@pytest.mark.parametrize(
    "name", ["models", "test_images", "training_features", "state", "events", "results.json", "run.lock"]
)
def test_a_file_or_folder_in_the_place_of_the_other(name: str, finished: Path, tmp_path: Path, capsys) -> None:
    place = tmp_path / "small" / name
    place.parent.mkdir()
    if name in ("results.json", "run.lock"):
        place.mkdir()
    else:
        place.write_text("")
    assert again(finished, tmp_path / "small") == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("xdm-ft: ")]
    assert str(tmp_path) in line


def test_data_that_have_changed_are_refused(interrupted: Path, tmp_path: Path, capsys) -> None:
    """Its predictions are of other images; going on would score them against the labels of now."""
    run, new = copied(interrupted, tmp_path), next((interrupted / "data").glob("**/sketch/dog")) / "more.png"
    miniature.save(new, 0, 3, 99)
    capsys.readouterr()
    try:
        assert again(interrupted, run) == 2
    finally:
        new.unlink()
    told = capsys.readouterr().err
    assert "have changed since this run started (data.images" in told and "Traceback" not in told


def test_results_of_an_earlier_version_are_refused(finished: Path, run: Path, capsys) -> None:
    """Their checksum covers less."""
    path = run / "results.json"
    results = json.loads(path.read_text())
    parts = [results["runs"], results.get("final_fit"), {key: results["environment"][key] for key in ("data",)}]
    path.write_text(json.dumps(results | {"checksum": json_digest(parts)}))
    assert again(finished, run) == 2
    told = capsys.readouterr().err
    assert "an earlier version wrote it" in told and "Traceback" not in told


def test_the_state_of_an_earlier_format_is_left_alone(
    interrupted: Path, expected: dict[str, Any], tmp_path: Path, caplog
) -> None:
    """Versions before lines kept a file per model: their models are trained again."""
    run = copied(interrupted, tmp_path)
    records = run / "state/records"
    shutil.rmtree(records)
    (run / "results.json").unlink(missing_ok=True)  # written now and then: by the clock, not by the models
    old = records / "models/erm/sketch/seed0-trial0.json"
    old.parent.mkdir(parents=True)
    old.write_text('{"value": {"method": "erm"}, "xxh3": "0"}')
    with caplog.at_level(logging.INFO, "xdm_ft"):
        assert again(interrupted, run) == 0
    assert " 2 models to train" in caplog.text and numbers(run) == expected["interrupted"]
    assert not (run / "state").exists()


def test_what_the_run_was_trained_on_is_in_its_results(finished: Path) -> None:
    environment = json.loads((finished / "out/small/results.json").read_text())["environment"]
    assert environment["features"]["key"] in {path.name for path in (finished / "cache").iterdir()}
    assert environment["data"]["images"] == len(list((finished / "data").glob("**/*.png")))


def test_other_things_as_checkpoint(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(Exception, match="it is a folder"):
        Checkpoint(tmp_path / "a", {}, Pace()).load({})
    os.mkfifo(tmp_path / "b")
    own = Checkpoint(tmp_path / "b", {}, Pace())
    assert own.load({}) is None
    own.save(lambda: {"n": 1})
    assert Checkpoint(tmp_path / "b", {}, Pace()).load({}) == {"n": 1}
    shutil.copy(finished / "out/small/models/final_fit/erm/model.safetensors", tmp_path / "c")
    with pytest.raises(Damaged, match="it is no checkpoint"):
        checkpoint.read(tmp_path / "c")


@pytest.mark.slow
def test_millions_of_empty_tensors_are_refused_soon(tmp_path: Path) -> None:
    d.empty_tensors(tmp_path / "w", 4_000_000, {"xxh3": "0"})
    with pytest.raises(Damaged, match="its checksum differs"):
        read_checked(tmp_path / "w")
    d.empty_tensors(tmp_path / "w", 40_000_000)
    started = time.process_time()
    with pytest.raises(Damaged, match="it has no checksum"):
        read_checked(tmp_path / "w")
    assert time.process_time() - started < 10  # where it is read tensor by tensor: more than a minute
