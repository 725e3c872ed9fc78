"""A finished run whose recipe.yaml or results.json somebody has edited: neither is believed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from what_runs_leave import fill

from xdm_ft.cli.parser import main
from xdm_ft.recipe.check import check
from xdm_ft.recipe.text import parse
from xdm_ft.storage.results_file import write_results

MODEL = ["erm", "sketch", "0"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("finished"), False)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run directory."""
    return Path(shutil.copytree(finished / "out" / "small", tmp_path / "small"))


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    told = capsys.readouterr().err
    assert "Traceback" not in told, told
    [line] = [line for line in told.splitlines() if line.startswith("xdm-ft: ")]
    return line


def edit_recipe(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    change(recipe)
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def edit_results(run: Path, change: Callable[[dict[str, Any]], object], checksum: bool) -> None:
    """`checksum`: the edit has a checksum that fits it."""
    results = json.loads((run / "results.json").read_text())
    change(results)
    if checksum:
        write_results(run / "results.json", results)
    else:
        (run / "results.json").write_text(json.dumps(results))


def remove(*keys: str | int) -> Callable[[Any], object]:
    def change(values: Any) -> object:
        for key in keys[:-1]:
            values = values[key]
        return values.pop(keys[-1])

    return change


def more_steps(recipe: dict[str, Any]) -> None:
    recipe["training"]["steps"] = 13


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (more_steps, "training.steps"),
        (remove("training", "lr"), "training.lr"),
        (remove("training"), "training"),
        (remove("name"), "name"),
        (remove("methods", 0, "name"), "methods"),
        (remove("data"), "data"),
    ],
)
@pytest.mark.parametrize("verb", ["retrain", "run", "run the edited file"])
def test_an_edited_recipe_is_refused(
    verb: str,
    change: Callable[[dict[str, Any]], object],
    named: str,
    finished: Path,
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    edit_recipe(run, change)
    recipe = run / "recipe.yaml" if verb == "run the edited file" else finished / "small.yaml"
    command = ["retrain", str(run), *MODEL] if verb == "retrain" else ["run", str(recipe), f"output.dir={run.parent}"]
    before = (run / "results.json").read_bytes()
    capsys.readouterr()
    assert main(command) == 2
    if verb == "run the edited file" and change is not more_steps:  # what is left is no recipe, or one with defaults
        assert "Traceback" not in capsys.readouterr().err
    else:
        line = one_line(capsys)
        assert f"{run / 'recipe.yaml'}: was edited or is damaged" in line and named in line
    assert (run / "results.json").read_bytes() == before


@pytest.mark.parametrize("key", ["runs", "recipe", "environment", "checksum"])
@pytest.mark.parametrize("verb", ["retrain", "run"])
def test_results_without_a_key(
    verb: str, key: str, finished: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_results(run, remove(key), checksum=False)
    capsys.readouterr()
    command = ["run", str(finished / "small.yaml"), f"output.dir={run.parent}"]
    assert main(["retrain", str(run), *MODEL] if verb == "retrain" else command) == 2
    assert f"it lacks '{key}'" in one_line(capsys)


@pytest.mark.parametrize("key", [("selected",), ("status",), ("selected", "train_val", "metrics"), ("hparams",)])
@pytest.mark.parametrize("verb", ["retrain", "run"])
def test_a_record_without_a_key(
    verb: str, key: tuple[str, ...], finished: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a checksum that fits, as another version would write it."""
    edit_results(run, remove("runs", 0, *key), checksum=True)
    capsys.readouterr()
    command = ["run", str(finished / "small.yaml"), f"output.dir={run.parent}"]
    assert main(["retrain", str(run), *MODEL] if verb == "retrain" else command) == 2
    assert f"{run / 'results.json'}: holds a record of another version" in one_line(capsys)


def change_the_recipe(results: dict[str, Any]) -> None:
    results["recipe"]["training"]["lr"] *= 2


def change_the_summary(results: dict[str, Any]) -> None:
    results["summary"][0]["mean"] = 0.99


@pytest.mark.parametrize("change", [change_the_recipe, change_the_summary])
def test_the_checksum_covers_recipe_and_summary(
    change: Callable[[dict[str, Any]], None], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_results(run, change, checksum=False)
    assert main(["retrain", str(run), *MODEL]) == 2
    assert "its checksum differs" in one_line(capsys)


def test_retrain_compares_with_whole_weights_only(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retrain", str(run), *MODEL]) == 0
    assert "the same bits" in capsys.readouterr().out
    [path] = run.glob("models/erm/sketch/*/train_val.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["retrain", str(run), *MODEL]) == 2
    assert f"{path}: is damaged (its checksum differs)" in one_line(capsys)


def test_a_written_recipe_reads_back_as_the_same(finished: Path) -> None:
    text = (finished / "small.yaml").read_text().replace("name: small", 'name: "1e-3"')
    text = text.replace("[erm]", "[{name: erm, label: '2e5'}, {name: vrex, label: 'no'}, {name: irm, label: '1_0'}]")
    recipe = check(parse(text, "recipe"))
    assert check(parse(recipe.as_yaml(), "written")).resolved() == recipe.resolved()
    assert parse(recipe.as_yaml(), "written").values == recipe.resolved()
