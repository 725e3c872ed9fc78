"""Every recipe that comes with the package: found, complete, valid, and run end to end on miniature data."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import miniature
import open_clip
import pytest
import sklearn.datasets
import torch
import yaml
from safetensors.torch import save_file
from sklearn.utils import Bunch

from xdm_ft import components
from xdm_ft.experiment import run
from xdm_ft.experiment.listing import listing
from xdm_ft.experiment.plan import read_data
from xdm_ft.experiment.validation import validate
from xdm_ft.recipe import load
from xdm_ft.recipe_text import recipe_folder

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {path.stem: path for path in sorted(recipe_folder().glob("*.yaml"))}
PAPER = ("camelyon17", "fmow", *sorted(miniature.CLASSES))
PUBLISHED = ROOT / "../shared/published_results.csv"

STEPS = 4
TINY_CLIP = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
TINY_TIMM: dict[str, dict[str, Any]] = {
    "resnet50": {"layers": [1, 1, 1, 1], "channels": [4, 8, 8, 8]},
    "densenet121": {"growth_rate": 4, "block_config": [1, 1, 1, 1]},
}


def test_all_recipes_are_found() -> None:
    assert sorted(path.name for path in (ROOT / "recipes").iterdir()) == [f"{name}.yaml" for name in RECIPES]
    assert {*PAPER, *(f"clip_{name}" for name in PAPER), "clip_camelyon_histology"} - {"clip_camelyon17"} <= {*RECIPES}
    assert [line.split()[0] for line in listing("recipes").splitlines()] == list(RECIPES)
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"recipes": "xdm_ft/recipes"}


@pytest.mark.parametrize("name", RECIPES)
def test_the_first_comment_is_complete(name: str) -> None:
    lines = RECIPES[name].read_text(encoding="utf-8").splitlines()
    comment = "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])
    assert re.match(r"# \S", comment)
    command = rf"xdm-ft run {name}( |$)|accelerate launch xdm_ft/run\.py recipes/{name}\.yaml"
    assert re.search(rf"^#   ({command})", comment, re.MULTILINE)
    for what in ("data", "takes", "scores"):
        assert len(re.findall(rf"^# {what:<7} \S", comment, re.MULTILINE)) == 1, what
    assert load(str(RECIPES[name])).name == name


@pytest.mark.parametrize("name", PAPER)
def test_the_published_scores_in_the_comment(name: str) -> None:
    if not PUBLISHED.is_file():
        pytest.skip(f"no {PUBLISHED}: the published results lie beside the repository, where they are")
    with PUBLISHED.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["dataset"] == name and "accuracy" in row["metric"]]
    tables = ("additional domain generalization results", "sharpness-aware methods")
    published = {row["method"]: float(row["mean"]) for row in rows if row["table"] in tables}
    text = RECIPES[name].read_text(encoding="utf-8")
    scores = " ".join(text.partition("# scores")[2].partition("\n#\n")[0].replace("#", " ").split())
    found = {method: float(value) for method, value in re.findall(r"([a-z][a-z+]*) (\d+\.\d)", scores)}
    assert len(found) >= 10 and found == published
    run_here = {item.label for item in load(str(RECIPES[name])).methods}
    assert set(found) - run_here <= {"fish"} and run_here >= {"erm", "xdomainmix", "xdomainmix+sam"}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny CLIP of random weights on disk, as `encoder` names it."""
    folder = tmp_path_factory.mktemp("clip")
    config, weights = folder / "recipe_clip.json", folder / "recipe_clip.safetensors"
    config.write_text(json.dumps(TINY_CLIP))
    open_clip.add_model_config(config)
    torch.manual_seed(0)
    state = open_clip.create_model("recipe_clip").state_dict()
    save_file({name: value.contiguous() for name, value in state.items()}, weights)
    return {"model": str(config), "weights": str(weights)}


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digits of the package, fewer of them; and no workers, whose start takes longer than a few images."""
    every = sklearn.datasets.load_digits()
    few = Bunch(images=every.images[:320], target=every.target[:320])
    monkeypatch.setattr("sklearn.datasets.load_digits", lambda: few)
    for module in ("batches", "prediction"):
        monkeypatch.setattr(f"xdm_ft.training.{module}.worker_count", lambda accelerator: 0)


def miniature_data(data: dict[str, Any], folder: Path) -> None:
    """Puts the data set that the recipe names into `folder`, in its layout on disk, and tells the recipe so."""
    name = data["name"]
    if name == "digits":
        return
    data["root"] = str(folder)
    if name in miniature.CLASSES:
        miniature.domainbed(folder, name, per_class=5)
        data["counts"] = "any"
    elif name == "folder":
        for domain, c in ((domain, c) for domain in range(3) for c in range(2)):
            for i in range(6):
                miniature.save(folder / f"site{domain}" / f"thing {c}" / f"{i}.png", c, domain, i)
    else:
        getattr(miniature, name)(folder)


def tiny_encoder(encoder: dict[str, Any], clip: dict[str, str]) -> None:
    """The same architecture, or another CLIP, with hardly any weights; none is downloaded."""
    model = encoder["model"].partition(".")[0]
    if encoder["name"] == "open_clip":
        encoder |= clip if model != "demo" else {}
    elif model in TINY_TIMM:
        own = encoder.get("preprocessing", {})
        encoder |= {"model": model, "weights": None, "kwargs": TINY_TIMM[model], "preprocessing": {**own, "size": 32}}


def one_domain(data: str) -> str:
    """A domain of the data set to hold out, where one is enough."""
    if data in miniature.CLASSES:
        return str(next(iter(components.find("data", data).domain_folders)))
    return {"digits": "chalk", "folder": "site0"}[data]


def shrink(values: dict[str, Any], folder: Path, clip: dict[str, str]) -> None:
    """As few steps and seeds as show that it runs; every method stays, with its settings, in the same proportions."""
    (folder / "data").mkdir()
    miniature_data(values["data"], folder / "data")
    tiny_encoder(values["encoder"], clip)
    protocol, training = values["protocol"], values["training"]
    protocol["seeds"] = 1
    if values["encoder"].get("trainable") and protocol["name"] == "leave_one_domain_out":
        protocol["test_domains"] = [one_domain(values["data"]["name"])]
    training.pop("epochs", None)
    training |= {"steps": STEPS, "batch_size": 6, "evaluate_every": STEPS // 2}
    for method in values["methods"]:
        if isinstance(method, dict) and "warmup_steps" in method:
            method |= {"warmup_steps": STEPS // 2, "quantile_steps": 1}
    if "search" in values:
        values["search"]["trials"] = 2
    values["features"] = {"dir": str(folder / "features"), "workers": 0}
    values["output"] = {"dir": str(folder / "output")}


@pytest.mark.slow
@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("name", RECIPES)
def test_it_validates_and_runs(
    name: str, clip: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load(RECIPES[name].read_text(encoding="utf-8"))
    labels = [item.label for item in load(str(RECIPES[name])).methods]
    shrink(values, tmp_path, clip)
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    recipe = load(str(file))
    assert [item.label for item in recipe.methods] == labels

    validate(recipe)
    printed = capsys.readouterr().out
    assert "gradient evaluations" in printed
    for item in recipe.methods:
        assert (f"# prompts of {item.label}," in printed) == (item.block.prompts is not None)
    assert run(recipe) == 0

    folder = tmp_path / "output" / name
    found = json.loads((folder / "results.json").read_text())
    held_out = {tuple(record["test_domains"]) for record in found["runs"]}
    in_turn = recipe.protocol.name == "leave_one_domain_out" and recipe.protocol.test_domains is None
    assert len(held_out) == (len(read_data(recipe).domain_names) if in_turn else 1)
    trained = dict.fromkeys((record["method"], *record["test_domains"]) for record in found["runs"])  # of all trials
    assert [method for method, *_ in trained] == [label for label in labels for _ in held_out]
    assert {record["status"] for record in found["runs"]} == {"ok"}, found["runs"]
    assert {row["method"] for row in found["summary"]} == set(labels)
    table = (folder / "results.md").read_text().replace("\\", "")  # signs of Markdown are escaped
    assert all(f"| {label} |" in table for label in labels)
