"""Every file of a run directory, damaged or missing: one clear line, or the work once more with the same numbers."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import miniature
import pytest
from what_runs_leave import fill, numbers

from xdm_ft.cli.parser import main
from xdm_ft.storage.digests import json_digest


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
def expected(interrupted: Path) -> dict[str, Any]:
    """What the interrupted run ends with, undamaged."""
    before = interrupted / "before"
    shutil.copytree(interrupted / "out", before)
    assert main(["run", str(interrupted / "small.yaml")]) == 0
    found = numbers(interrupted / "out/small")
    shutil.rmtree(interrupted / "out")
    before.rename(interrupted / "out")
    return found


@pytest.fixture
def damaged(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Path]]:
    """Restores the output folder of a scenario after the test."""
    restored: list[Path] = []

    def scenario(name: str) -> Path:
        folder: Path = request.getfixturevalue(name)
        shutil.copytree(folder / "out", folder / "kept", copy_function=shutil.copy2)
        restored.append(folder)
        return folder

    yield scenario
    for folder in restored:
        shutil.rmtree(folder / "out")
        (folder / "kept").rename(folder / "out")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(255, 0, -1)) * 9)


def other_type(path: Path) -> None:
    """What reads well as YAML and JSON, and is something else."""
    path.write_text("[1, 2]")


def flip_a_digit(path: Path) -> None:
    """Still whole, and wrong: the last byte of numbers, or the first digit after a point."""
    data = bytearray(path.read_bytes())
    place = data.find(b"0.") + 2 if path.suffix in (".json", ".jsonl") and b"0." in data else len(data) - 1
    data[place] = ord("3") if data[place] != ord("3") else ord("4")
    path.write_bytes(data)


def drop_a_line(path: Path) -> None:
    """Cut between two lines: every line that is left is whole."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def remove(path: Path) -> None:
    path.unlink()


TEXTS = [truncate, empty, other_type, flip_a_digit, folder_instead, remove]
TENSORS = [truncate, garbage, flip_a_digit, remove]
FILES = {
    "finished": {
        "results.json": TEXTS,
        "recipe.yaml": TEXTS,
        "results.md": [folder_instead, remove],
        "run.lock": [garbage, folder_instead, remove],
        "models/erm/**/predictions.safetensors": [empty, *TENSORS],
        "models/erm/**/train_val.safetensors": [folder_instead, *TENSORS],
        "models/final_fit/erm/model.safetensors": [empty, *TENSORS],
        "test_images/*.safetensors": [folder_instead, empty, *TENSORS],
        "training_features/*.safetensors": [folder_instead, truncate, remove],
    },
    "interrupted": {
        "results.json": [garbage, flip_a_digit, remove],
        "recipe.yaml": [remove],
        "models/erm/**/predictions.safetensors": TENSORS,
        "models/erm/**/cross_domain.safetensors": [truncate, remove],
        "test_images/*.safetensors": [flip_a_digit, remove],
        "state/records/*.jsonl": [garbage, drop_a_line, *TEXTS],
        "state/cross_domain/*.jsonl": [garbage, drop_a_line, *TEXTS],
    },
}
CASES = [(where, file, damage) for where, files in FILES.items() for file, some in files.items() for damage in some]


@pytest.mark.parametrize(
    ("scenario", "file", "damage"),
    [
        pytest.param(s, f, d, id=f"{s}-{f.split('/')[-1]}-{d.__name__}", marks=pytest.mark.slow if number % 6 else ())
        for number, (s, f, d) in enumerate(CASES)
    ],
)
def test_each_file_damaged_and_missing(
    scenario: str,
    file: str,
    damage: Callable[[Path], None],
    damaged: Callable[[str], Path],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = request.getfixturevalue(scenario)
    want = numbers(folder / "out/small") if scenario == "finished" else request.getfixturevalue("expected")
    folder = damaged(scenario)
    path = sorted((folder / "out/small").glob(file))[0]
    damage(path)
    capsys.readouterr()
    status = main(["run", str(folder / "small.yaml")])
    told = capsys.readouterr().err
    assert "Traceback" not in told
    if status == 2:
        lines = [line for line in told.splitlines() if line.startswith("xdm-ft: ")]
        assert len(lines) == 1 and str(folder / "out/small") in lines[0], told
        assert any(word in lines[0] for word in ("damaged", "missing", "another recipe", "can not be")), told
    else:
        assert status == 0, told
        assert numbers(folder / "out/small") == want


def test_damaged_predictions_and_weights_are_told_and_trained_again(
    damaged: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = damaged("finished")
    run = folder / "out/small"
    want, weights = numbers(run), sorted(run.glob("models/erm/*/*/train_val.safetensors"))[0]
    predictions = weights.with_name("predictions.safetensors")
    whole = weights.read_bytes()
    flip_a_digit(predictions)
    with caplog.at_level(logging.INFO, "xdm_ft"):
        assert main(["run", str(folder / "small.yaml")]) == 0
    assert f"{predictions}: is damaged (its checksum differs); its model will be trained again" in caplog.text
    assert "erm: 1 model" in caplog.text
    assert weights.read_bytes() == whole and numbers(run) == want


def test_damaged_files_that_models_share_are_told_and_written_again(
    damaged: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = damaged("finished")
    run = folder / "out/small"
    images = sorted(run.glob("test_images/*.safetensors"))
    references = sorted(run.glob("training_features/*.safetensors"))
    want, whole = numbers(run), [path.read_bytes() for path in (*images, *references)]
    assert [path.stem for path in images] == ["photo", "sketch"]
    assert [path.stem for path in references] == ["+final_fit", "photo", "sketch"]
    for damaged_one, missing, *_ in (images, references):
        flip_a_digit(damaged_one)
        missing.unlink()
    with caplog.at_level(logging.INFO, "xdm_ft"):
        assert main(["run", str(folder / "small.yaml")]) == 0
    for path in (images[0], references[0]):
        assert f"{path}: is damaged (its checksum differs); it will be written again" in caplog.text
    assert "models" not in [record.getMessage().split()[-1] for record in caplog.records], "nothing trains again"
    assert [path.read_bytes() for path in (*images, *references)] == whole and numbers(run) == want


def test_damaged_reports_are_restored(damaged: Callable[[str], Path]) -> None:
    folder = damaged("finished")
    run = folder / "out/small"
    reports = [run / "results.md", run / "results.csv", *run.glob("events/**/*.hparams")]
    assert len(reports) == 4
    whole = [path.read_bytes() for path in reports[:2]]
    sizes = [path.stat().st_size for path in reports]
    for path, damage in zip(reports, (flip_a_digit, truncate, truncate, empty), strict=True):
        damage(path)
    assert main(["run", str(folder / "small.yaml")]) == 0
    assert [path.read_bytes() for path in reports[:2]] == whole
    assert [path.stat().st_size for path in reports] == sizes


@pytest.mark.parametrize(
    "name", ["models", "test_images", "training_features", "state", "events", "results.json", "run.lock"]
)
def test_a_file_or_folder_in_the_place_of_the_other(
    name: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "small" / name
    place.parent.mkdir()
    if name in ("results.json", "run.lock"):
        place.mkdir()
    else:
        place.write_text("")
    assert main(["run", str(finished / "small.yaml"), f"output.dir={tmp_path}"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("xdm-ft: ")]
    assert str(tmp_path) in line


def test_data_that_have_changed_are_refused(damaged: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Its predictions are of other images; going on would score them against the labels of now."""
    folder = damaged("interrupted")
    new = next((folder / "data").glob("**/sketch/dog")) / "more.png"
    miniature.save(new, 0, 3, 99)
    capsys.readouterr()
    try:
        assert main(["run", str(folder / "small.yaml")]) == 2
    finally:
        new.unlink()
    told = capsys.readouterr().err
    assert "have changed since this run started (data.images" in told and "Traceback" not in told


def test_results_of_an_earlier_version_are_refused(
    damaged: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Their checksum covers less."""
    folder = damaged("finished")
    path = folder / "out/small/results.json"
    results = json.loads(path.read_text())
    parts = [results["runs"], results.get("final_fit"), {key: results["environment"][key] for key in ("data",)}]
    path.write_text(json.dumps(results | {"checksum": json_digest(parts)}))
    assert main(["run", str(folder / "small.yaml")]) == 2
    told = capsys.readouterr().err
    assert "an earlier version wrote it" in told and "Traceback" not in told


def test_the_state_of_an_earlier_format_is_left_alone(
    damaged: Callable[[str], Path], expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Versions before lines kept a file per model: their models are trained again."""
    folder = damaged("interrupted")
    records = folder / "out/small/state/records"
    shutil.rmtree(records)
    (folder / "out/small/results.json").unlink(missing_ok=True)  # written now and then: by the clock, not by the models
    old = records / "models/erm/sketch/seed0-trial0.json"
    old.parent.mkdir(parents=True)
    old.write_text('{"value": {"method": "erm"}, "xxh3": "0"}')
    with caplog.at_level(logging.INFO, "xdm_ft"):
        assert main(["run", str(folder / "small.yaml")]) == 0
    assert " 2 models to train" in caplog.text and numbers(folder / "out/small") == expected
    assert not (folder / "out/small/state").exists()


def test_what_the_run_was_trained_on_is_in_its_results(finished: Path) -> None:
    environment = json.loads((finished / "out/small/results.json").read_text())["environment"]
    assert environment["features"]["key"] in {path.name for path in (finished / "cache").iterdir()}
    assert environment["data"]["images"] == len(list((finished / "data").glob("**/*.png")))
