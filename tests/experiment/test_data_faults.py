"""Faults of the data that training passes over: `run`, `validate`, `doctor` and results.json have the same ones."""

from __future__ import annotations

import csv
import json
import logging
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import jsonschema
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from xdm_ft.cli.parser import main
from xdm_ft.experiment.faults import faults, roles
from xdm_ft.experiment.plan import Plan, describe, make_plan, read_data
from xdm_ft.experiment.results import data_facts
from xdm_ft.features import hashes as hashing
from xdm_ft.recipe.check import load
from xdm_ft.runtime.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads(files("xdm_ft.report").joinpath("results.schema.json").read_text(encoding="utf-8"))
RECIPE = """\
name: small
data: {name: folder, root: images}
protocol: {seeds: 1}
encoder: {name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}
methods: [erm]
training: {steps: 2, batch_size: 4}
report: {page: false}
features: {dir: cache, workers: 0}
"""


def make_images(root: Path, domains: str = "abc", classes: tuple[str, ...] = ("cat", "dog"), count: int = 4) -> Path:
    """Images of noise, no two of them equal."""
    noise = np.random.default_rng([ord(letter) for letter in domains + classes[0]])
    for domain in domains:
        for name in classes:
            (root / domain / name).mkdir(parents=True)
            for i in range(count):
                pixels = noise.integers(0, 256, (32, 32, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(root / domain / name / f"{i}.png")
    return root


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(RECIPE)
    return make_images(tmp_path / "images")


@pytest.fixture
def told(capsys, caplog, tmp_path):
    """What the three verbs report of the data, which must be the same; → it, and the results of the run."""

    def by_all(*overrides: str) -> tuple[list[str], dict]:
        assert main(["validate", "small.yaml", *overrides]) == 0
        _, _, printed = capsys.readouterr().out.partition("# findings\n")
        validated = [line.removeprefix("#   ") for line in printed.splitlines()]
        status = main(["doctor", "small.yaml", *overrides])
        lines = capsys.readouterr().out.splitlines()
        pairs = [(line.removeprefix("FAULT  "), lines[i + 1]) for i, line in enumerate(lines) if line[:5] == "FAULT"]
        checked = [f"{found} {remedy.strip()}" for found, remedy in pairs]
        assert status == (2 if checked else 0)
        assert any("no group is in both training and test" in line for line in lines) == (not checked)
        caplog.clear()
        with caplog.at_level(logging.INFO, "xdm_ft"):
            assert main(["run", "small.yaml", *overrides]) == 0
        messages = [record.getMessage() for record in caplog.records]
        logged = [message.removeprefix("finding: ") for message in messages if message.startswith("finding: ")]
        logged = [line.removesuffix(" (all: output/small/copies.csv)") for line in logged]
        trains = next(i for i, message in enumerate(messages) if message.startswith("encoder: "))
        assert not any(message.startswith("finding: ") for message in messages[trains:])
        results = json.loads((tmp_path / "output" / "small" / "results.json").read_text())
        jsonschema.Draft202012Validator(SCHEMA).validate(results)
        assert validated == checked == logged == results["findings"]
        return logged, results

    return by_all


def found(*overrides: str) -> list[str]:
    """What each of them reports."""
    return [finding.line for finding in faults(planned(*overrides), show=False)]


def planned(*overrides: str) -> Plan:
    recipe = load("small.yaml", list(overrides))
    return make_plan(recipe, read_data(recipe))


def test_clean_data_have_none(images, told):
    findings, results = told()
    assert findings == [] and results["tested_on"] == "domains never trained on"
    assert "tested on domains never trained on" in results["summary"][0]["protocol"]


@pytest.mark.slow
def test_every_fault_is_reported_by_all(images, told):
    shutil.copy(images / "a" / "dog" / "2.png", images / "b" / "dog" / "twin.png")
    shutil.copy(images / "a" / "cat" / "0.png", images / "a" / "cat" / "again.png")
    (images / "b" / "cat").rename(images / "b" / "Cat ")
    shutil.rmtree(images / "c")
    findings, results = told("methods=[erm, xdomainmix, groupdro, sam]")
    assert [line.split(": ")[0] for line in findings] == ["classes"] * 2 + ["images"] + ["methods"] * 2
    skipped = [run for run in results["runs"] if run["status"] == "skipped"]
    assert {run["method"] for run in skipped} == {"xdomainmix", "groupdro"}


def test_class_names_equal_but_for_case_or_spaces(images):
    (images / "c" / "dog").rename(images / "c" / "Dog ")
    spelt, lacking = found()
    assert spelt.startswith(
        'classes: "Dog " (in c) and "dog" (in a, b) differ only in case, in spaces or in how a number is written →'
    )
    assert lacking.startswith('classes: no image of "Dog " in a, b; no image of "dog" in c →')


def test_the_same_image_in_two_domains(images):
    shutil.copy(images / "a" / "dog" / "2.png", images / "b" / "dog" / "twin.png")
    shutil.copy(images / "a" / "dog" / "3.png", images / "b" / "cat" / "twin.png")
    assert found("protocol.val_fraction=0.5") == [
        "images: copies of 2 images in 4 files, 2 of them in more than one domain, 1 of them in two classes, 2 of them "
        "in training and validation, 2 of them in training and test, 2 of them in validation and test; the first: "
        "images/a/dog/2.png and images/b/dog/twin.png → remove one of each pair, or both where their labels differ"
    ]


def test_the_same_image_twice_in_one_domain(images):
    table(images, lambda domain, i: ["train", "train", "val", "test"][i])
    shutil.copy(images / "a" / "dog" / "0.png", images / "a" / "dog" / "1.png")  # both train
    (line,) = found(*OFFICIAL)
    assert line.startswith(
        "images: copies of 1 image in 2 files, none of them in two of training, validation, test; the first: "
    )
    for i in range(2, 4):
        shutil.copy(images / "a" / "dog" / "0.png", images / "a" / "dog" / f"{i}.png")
    (line,) = found(*OFFICIAL)
    assert line.startswith(
        "images: copies of 1 image in 4 files, 1 of them in training and validation, 1 of them in training and test, "
        f"1 of them in validation and test; the first: {images}/a/dog/0.png and {images}/a/dog/1.png →"
    )


def test_copies_are_counted_over_the_splits_of_all_seeds(images):
    """A pair within one domain is in training and validation under some seeds only."""
    shutil.copy(images / "a" / "dog" / "0.png", images / "a" / "dog" / "1.png")
    split_by = {seed: found(f"protocol={{name: leave_one_domain_out, seeds: [{seed}], val_fraction: 0.5}}")
                for seed in range(8)}  # fmt: skip
    said = {seed: "1 of them in training and validation" in line for seed, (line,) in split_by.items()}
    together = next(seed for seed in said if not said[seed])
    apart = next(seed for seed in said if said[seed])
    (line,) = found(f"protocol={{name: leave_one_domain_out, seeds: [{together}, {apart}], val_fraction: 0.5}}")
    assert "1 of them in training and validation" in line


def copies() -> list[list[str]]:
    return list(csv.reader(Path("output/small/copies.csv").read_text().splitlines()))


@pytest.mark.slow
def test_all_copies_are_in_a_file_of_the_run_and_reported_once(images, caplog):
    def reported() -> list[str]:
        caplog.clear()
        assert main(["run", "small.yaml", "protocol.test_domains=[a, b]", "protocol.val_fraction=0.5"]) == 0
        return [line for line in caplog.messages if "copies" in line]

    caplog.set_level(logging.INFO, "xdm_ft")
    assert reported() == [] and not Path("output/small/copies.csv").exists()
    shutil.rmtree("output")
    for i in range(4):
        shutil.copy(images / "a" / "dog" / f"{i}.png", images / "b" / "cat" / f"=twin{i}.png")
    [line] = reported()
    assert line.startswith("finding: images: copies of 4 images in 8 files, 4 of them in more than one domain, 4 of")
    assert line.endswith(" (all: output/small/copies.csv)") and line.count("twin") == 1
    header, *rows = copies()
    assert header == ["copies", "path", "domain", "class", "a held out", "b held out"]
    assert [row[0] for row in rows] == [str(i // 2) for i in range(8)]
    assert [row[1:4] for row in rows[:2]] == [
        ["images/a/dog/0.png", "a", "dog"], ["images/b/cat/=twin0.png", "b", "cat"],
    ]  # fmt: skip
    plan = planned("protocol.test_domains=[a, b]", "protocol.val_fraction=0.5")
    names = [plan.dataset.name(row) for row in range(len(plan.dataset))]
    for split, role in zip(plan.splits, (4, 5), strict=True):
        of = {names[row]: name for name, rows in roles(split).items() for row in rows.tolist()}
        assert [row[role] for row in rows] == [of[row[1]] for row in rows] and {"training", "validation", "test"} == {
            *of.values()
        }
    written = Path("output/small/copies.csv").stat().st_mtime_ns
    assert reported() == [] and Path("output/small/copies.csv").stat().st_mtime_ns == written, "of the same run once"
    Path("output/small/copies.csv").write_text("")
    assert len(reported()) == 1 and len(copies()) == 9, "it is restored"


def test_empty_files_are_no_images(images):
    for domain in "ab":
        (images / domain / "dog" / "empty.png").write_bytes(b"")
    assert found() == []


def test_a_class_that_a_domain_lacks(images):
    make_images(images, "ab", classes=("eel",))
    (line,) = found()
    assert line.startswith('classes: no image of "eel" in c →')


NO_TEXT = "needs an encoder with a text side"


def test_methods_that_need_text_are_skipped_without_it(images):
    rows = "methods=[zero_shot, linear_probe, {name: erm, head_init: zero_shot}, {name: rsc, head_init: zero_shot}]"
    assert describe(planned(rows)).splitlines()[2:5] == [
        "models: 12 = methods × held-out domains × seeds, 9 of them skipped",
        f"skipped: zero_shot: {NO_TEXT}",
        f"skipped: erm, rsc: with head_init: zero_shot {NO_TEXT}",
    ]
    assert found(rows) == [
        f"methods: zero_shot is skipped ({NO_TEXT}) → remove these methods from the recipe, or use an encoder with a "
        "text side",
        f"methods: erm, rsc are skipped (with head_init: zero_shot {NO_TEXT}) → remove these methods from the recipe, "
        "or set head_init: random",
    ]


@pytest.mark.slow
def test_a_run_without_text_completes_with_the_other_methods(images, told):
    text, others = "zero_shot, {name: erm, head_init: zero_shot}", "{name: erm, label: plain}, linear_probe"
    findings, results = told(f"methods=[{text}, {others}]", "protocol.final_fit=true", "protocol.seeds=3")
    assert [line.split(" (")[0] for line in findings] == ["methods: zero_shot is skipped", "methods: erm is skipped"]
    rows = {row["method"]: row for row in results["summary"]}
    for name in ("zero_shot", "erm"):
        assert rows[name]["mean"] is None and rows[name]["versus_erm"] is None and NO_TEXT in rows[name]["reason"]
    assert rows["plain"]["versus_erm"] is None and rows["linear_probe"]["versus_erm"]["difference"] is not None
    assert results["final_fit"]["status"] == "ok"
    listed = csv.DictReader(Path("output/small/results.csv").read_text().splitlines())
    own = next(row for row in listed if row["method"] == "linear_probe")
    assert own["compared_with"] == "plain", "erm, which has no models, is no reference"


def test_methods_that_are_skipped(images):
    shutil.rmtree(images / "c")
    assert found("methods=[erm, xdomainmix, groupdro, sam]") == [
        f"methods: xdomainmix, groupdro are skipped (needs 2 training domains; with {held_out} held out there is 1)"
        " → remove these methods from the recipe, or add a domain"
        for held_out in "ab"
    ]
    other = "methods=[erm, {name: mixup, partner_domain: other}, {name: mixstyle, partners: other_domain}]"
    lines = found(other, "encoder.trainable=true")
    assert lines and all("mixup, mixstyle are skipped (needs 2 training domains" in line for line in lines)
    assert not found(other.replace("_domain: other}", "_domain: any}").replace("other_domain", "random"),
                     "encoder.trainable=true")  # fmt: skip


def table(images: Path, split_of) -> None:
    """table.csv of all images: `split_of(domain, number of the image)`."""
    rows = [["path", "label", "domain", "split"]]
    for path in sorted(images.rglob("*.png")):
        label, domain = path.parent.name, path.parent.parent.name
        rows.append([str(path), label, domain, split_of(domain, int(path.stem))])
    with open("table.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)


OFFICIAL = ("data={name: table, file: table.csv}", "protocol={name: official, seeds: 1}")


@pytest.mark.slow
@pytest.mark.parametrize("domains", ["abc", "a"])
def test_a_random_split_tests_on_seen_domains(domains, images, told):
    for other in set("abc") - set(domains):
        shutil.rmtree(images / other)
    table(images, lambda domain, i: ["train", "train", "val", "test"][i])
    findings, results = told(*OFFICIAL)
    assert findings == [] and results["tested_on"] == "domains that are also trained on, none of them unseen"
    assert all(f"tested on {results['tested_on']}" in row["protocol"] for row in results["summary"])
    text = Path("output/small/results.md").read_text()
    found = text.split("## How to read")[0]
    assert f"On its test images, which are of {results['tested_on']}, expect" in found
    assert "never trained on" not in found


def test_a_split_with_some_unseen_domains_names_the_others(images):
    table(images, lambda domain, i: "test" if domain == "c" else ["train", "train", "val", "test"][i])
    told = data_facts(planned(*OFFICIAL), [])["tested_on"]
    assert told == "domains of which a, b are also trained on" and f"tested on {told}" in planned(*OFFICIAL).notes


def test_an_official_split_that_shares_images_between_training_and_test(images):
    shutil.copy(images / "a" / "dog" / "0.png", images / "a" / "dog" / "3.png")  # 0 trains, 3 tests
    shutil.copy(images / "a" / "cat" / "0.png", images / "a" / "cat" / "1.png")  # both train
    table(images, lambda domain, i: ["train", "train", "val", "test"][i])
    (line,) = found(*OFFICIAL)
    assert line.startswith("images: copies of 2 images in 4 files, 1 of them in training and test; the first: ")


def test_images_in_a_parquet_file_are_compared_too(images):
    table = {"image": [], "label": [], "domain": []}
    for path in sorted(images.rglob("*.png")):
        table["image"].append(path.read_bytes())
        table["label"].append(path.parent.name)
        table["domain"].append(path.parent.parent.name)
    table["image"][-1] = table["image"][0]
    pyarrow.parquet.write_table(pyarrow.table(table), "images.parquet")
    (line,) = found("data={name: parquet, file: images.parquet}")
    assert line.startswith(
        "images: copies of 1 image in 2 files, 1 of them in more than one domain, 1 of them in two cl"
    )
    assert "images.parquet, row 0 and images.parquet, row 23" in line


def test_only_files_of_equal_size_are_opened(images, monkeypatch):
    for number, path in enumerate(sorted(images.rglob("*.png"))):
        path.write_bytes(path.read_bytes() + bytes(100 * number))  # decoders pass over what follows the image
    shutil.copy(images / "a" / "dog" / "2.png", images / "b" / "dog" / "twin.png")
    opened = []
    original = hashing.hash_file
    monkeypatch.setattr(hashing, "hash_file", lambda path: opened.append(Path(path).name) or original(path))
    assert len(found()) == 1 and sorted(opened) == ["2.png", "twin.png"]
    opened.clear()
    assert len(found()) == 1 and opened == [], "the index of hashes was not read"


def test_end_to_end_no_cache_is_needed(images):
    shutil.copy(images / "a" / "dog" / "2.png", images / "b" / "dog" / "twin.png")
    Path("blocked").write_text("a file is no folder")
    assert len(found("encoder.trainable=true", "features.dir=blocked/cache")) == 1
    with pytest.raises(UserError, match=r"features\.dir"):
        found("features.dir=blocked/cache")


@pytest.mark.slow
def test_of_several_processes_one_reports(images):
    shutil.copy(images / "a" / "dog" / "2.png", images / "b" / "dog" / "twin.png")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run([*launch, str(ROOT / "xdm_ft" / "run.py"), "small.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("finding: images: copies of 1 image in 2 files") == 1


def test_without_the_weights_validate_checks_the_data_and_prints_the_plan(images, capsys, monkeypatch, tmp_path):
    """Data with a fault, an encoder whose weights are not here, and no network."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    missing = tmp_path / "missing.safetensors"
    shutil.copy(images / "a" / "dog" / "2.png", images / "b" / "dog" / "twin.png")
    assert main(["validate", "small.yaml", f"encoder.weights={missing}"]) == 2
    printed = capsys.readouterr()
    assert "#   models: 3 = methods × held-out domains × seeds\n" in printed.out
    assert "#   time: not measured, as an encoder can not be built\n" in printed.out
    assert "# findings\n#   images: copies of 1 image in 2 files, 1 of them in more" in printed.out
    [line] = printed.err.splitlines()
    assert line.startswith("xdm-ft: encoder.weights: ") and str(missing) in line
    assert main(["validate", "small.yaml", "--json", f"encoder.weights={missing}"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["error"] == line.removeprefix("xdm-ft: ") and document["plan"]["models"] == 3
    assert document["estimate"] is None and len(document["findings"]) == 1
    assert main(["validate", "small.yaml", "--json"]) == 0 and json.loads(capsys.readouterr().out)["error"] is None
