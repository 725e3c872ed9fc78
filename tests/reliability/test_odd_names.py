"""Methods and domains whose names are no file names: the run keeps to its folder, and nothing is lost at its end."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import miniature
import pytest

from xdm_ft.cli.parser import main

RECIPE = """\
name: odd
data: {{name: table, file: {folder}/images.csv}}
protocol: {{name: leave_one_domain_out, seeds: 1}}
encoder: {{name: timm, model: test_vit, preprocessing: {{size: 32}}, kwargs: {{img_size: 32}}}}
features: {{dir: {folder}/cache, workers: 0}}
methods: [{{name: erm, label: ".."}}, {{name: linear_probe, label: "{long}"}}]
training: {{steps: 4, batch_size: 4, evaluate_every: 2}}
report: {{page: false}}
output: {{dir: {folder}/deep/out}}
"""
LONG = "語" * 60


@pytest.mark.slow
def test_a_run_with_odd_names(tmp_path: Path) -> None:
    domains = ["..", ".", LONG, LONG + "語", "a/../../b", "a,b", ".hidden.unfinished"]
    with (tmp_path / "images.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "domain"])
        for number, domain in enumerate(domains):
            for label in range(2):
                for i in range(3):
                    path = tmp_path / "images" / f"{number}-{label}-{i}.png"
                    miniature.save(path, label, number, i)
                    rows.writerow([path, f"class {label}", domain])
    (tmp_path / "odd.yaml").write_text(RECIPE.format(folder=tmp_path, long=LONG))
    before = {"images.csv", "images", "odd.yaml"}
    for _ in range(2):  # what is finished is found again
        assert main(["run", str(tmp_path / "odd.yaml")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == before | {"cache", "deep"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "deep/out").iterdir()] == ["odd"]
    run = tmp_path / "deep/out/odd"
    records = json.loads((run / "results.json").read_text())["runs"]
    assert len(records) == 2 * len(domains) and all(record["status"] == "ok" for record in records)
    files = [pick["weights"] for record in records for pick in record["selected"].values()]
    assert len({tuple(record["test_domains"]) for record in records}) == len(domains)
    assert all((run / file).resolve().is_relative_to(run / "models") for file in files)
    folders = {str(Path(file).parent) for file in files}
    assert len(folders) == len(records), "a folder for every model"


@pytest.mark.parametrize(
    ("name", "what"),
    [("n" * 300, "at most"), ("語" * 80, "at most"), ('"\\ud800"', "without slashes"), ('"a\\0b"', "without slashes")],
)
def test_a_name_that_can_not_be_a_folder_is_a_fault_of_the_recipe(
    name: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.yaml").write_text(RECIPE.format(folder=tmp_path, long="x").replace("name: odd", f"name: {name}"))
    assert main(["validate", str(tmp_path / "odd.yaml")]) == 2
    told = capsys.readouterr().err
    assert "odd.yaml:1: name: " in told and what in told and "Traceback" not in told
    assert len(told.splitlines()) == 1


def test_a_run_directory_too_deep_for_its_models_is_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    miniature.domainbed(tmp_path / "data", "pacs", per_class=2)
    deep = "/".join(["d" * 250] * 15)
    deep += "/" + "d" * (4040 - len(str(tmp_path)) - len(deep))  # the run directory fits into a path, its models do not
    text = RECIPE.format(folder=tmp_path, long="x").replace(
        f"name: table, file: {tmp_path}/images.csv", f"name: pacs, root: {tmp_path}/data, counts: any"
    )
    (tmp_path / "odd.yaml").write_text(text)

    def trained(*_: object) -> None:
        raise AssertionError("training has begun")

    monkeypatch.setattr("xdm_ft.experiment.pieces.do_piece", trained)
    assert main(["run", str(tmp_path / "odd.yaml"), f"output.dir={tmp_path}/{deep}"]) == 2
    told = capsys.readouterr().err
    assert "File name too long" in told and "Traceback" not in told
