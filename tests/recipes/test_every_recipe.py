"""Every recipe that comes with the package: found, complete, valid, and run end to end on miniature data."""

import csv
import json
import re
import shlex
import tomllib
from pathlib import Path

import miniature
import open_clip
import pytest
import torch
import yaml
from bag_files import slides
from safetensors.torch import save_file

from xdm_ft.algorithms import Setup
from xdm_ft.cli.library import run
from xdm_ft.cli.ls import OWN_IMAGES, listing
from xdm_ft.cli.validate import validate
from xdm_ft.core import Task
from xdm_ft.experiment.plan import read_data
from xdm_ft.recipe import components
from xdm_ft.recipe.check import load
from xdm_ft.recipe.text import recipe_folder

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {path.stem: path for path in sorted(recipe_folder().glob("*.yaml"))}
PAPER = ("camelyon17", "fmow", *sorted(miniature.CLASSES))
PUBLISHED = ROOT / "../shared/published_results.csv"
WILDS = ("camelyon17", "fmow")

STEPS = 4
TINY_CLIP = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 4, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
TINY_TIMM = {
    "resnet50": {"layers": [1, 1, 1, 1], "channels": [4, 8, 8, 8]},
    "mobilenetv3_large_100": {},
    "densenet121": {"growth_rate": 4, "block_config": [1, 1, 1, 1]},
    "vit_small_patch16_224": {"img_size": 32, "embed_dim": 24, "depth": 4, "num_heads": 2},
    "vit_base_patch14_dinov2": {"img_size": 28, "embed_dim": 24, "depth": 1, "num_heads": 2},
}


def test_all_recipes_are_found():
    assert sorted(path.name for path in (ROOT / "recipes").iterdir()) == [f"{name}.yaml" for name in RECIPES]
    assert {*PAPER, *(f"clip_{name}" for name in PAPER), "clip_camelyon_histology"} - {"clip_camelyon17"} <= {*RECIPES}
    own, others = listing("recipes"), listing("benchmarks")
    shown = [line.split("  ")[0] for line in own.text().splitlines()]
    assert shown[:11] == ["Your own images", *OWN_IMAGES] and shown[11] == ""
    named = [*OWN_IMAGES, *(line.split()[0] for line in others.text().splitlines())]
    assert sorted(named) == list(RECIPES) and named == [entry.name for entry in own.document]
    assert [entry.group for entry in own.document[9:11]] == ["own images", "benchmarks"]
    assert max(map(len, own.text().splitlines())) <= 80
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"recipes": "xdm_ft/recipes"}


@pytest.mark.parametrize("name", RECIPES)
def test_the_first_comment_is_complete(name):
    lines = RECIPES[name].read_text(encoding="utf-8").splitlines()
    comment = "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])
    assert re.match(r"# \S", comment)
    command = rf"xdm-ft run {name}( |$)|accelerate launch xdm_ft/run\.py recipes/{name}\.yaml"
    assert re.search(rf"^#   ({command})", comment, re.MULTILINE)
    for what in ("data", "takes", "scores"):
        assert len(re.findall(rf"^# {what:<7} \S", comment, re.MULTILINE)) == 1, what
    assert load(str(RECIPES[name])).name == name


@pytest.mark.parametrize("name", PAPER)
def test_the_published_scores_in_the_comment(name):
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


@pytest.mark.parametrize("name", RECIPES)
def test_the_commands_in_the_comment_are_valid(name):
    text = RECIPES[name].read_text(encoding="utf-8")
    commands = re.findall(r"^#   (?:xdm-ft run|accelerate launch xdm_ft/run\.py) (.+)", text, re.MULTILINE)
    assert commands
    for words in map(shlex.split, commands):
        assert Path(words[0]).stem == name
        load(str(RECIPES[name]), words[1:])


@pytest.mark.slow
def test_losses_are_averaged_as_in_the_published_code():
    recipes = [load(str(path)) for path in RECIPES.values()]
    averages = {
        data: {recipe.training.loss_average for recipe in recipes if recipe.data.name == data} for data in PAPER
    }
    assert averages == {data: {"sample" if data in WILDS else "domain"} for data in PAPER}
    pooled = [recipe for recipe in recipes if recipe.training.sampler == "pooled"]
    assert len(pooled) >= 6 and {recipe.data.name for recipe in pooled} == {*WILDS}


PUBLISHED_SETTINGS = {
    # examples/configs/datasets.py and algorithm.py of WILDS, `main.py` of LISA
    "wilds": {
        "coral": {"gamma": 0.1},
        "irm": {"penalty_weight": 1.0, "anneal_steps": 500},
        "groupdro": {"eta": 0.01},
        "rsc": {"feature_drop": 1 / 3, "batch_drop": 1 / 3},
        "mixstyle": {"p": 0.5, "alpha": 0.1},
        "dsu": {"p": 0.5},
        "lisa": {"p_sel": 1.0, "mix": "cutmix", "alpha": 2.0},
        "xdomainmix": {"warmup_steps": 4000, "quantile_steps": 500, "p_discard": 0.2},
    },
    # hparams_registry.py of DomainBed
    "domainbed": {
        "coral": {"gamma": 1.0},
        "irm": {"penalty_weight": 100.0, "anneal_steps": 500},
        "groupdro": {"eta": 0.01},
        "rsc": {"feature_drop": 1 / 3, "batch_drop": 1 / 3},
        "mixstyle": {"p": 0.5, "alpha": 0.1},
        "dsu": {"p": 0.5},
        "lisa": {"mix": "cutmix", "alpha": 2.0},
        "fish": {"meta_lr": 0.5},
        "xdomainmix": {"warmup_steps": 3000, "quantile_steps": 100, "p_discard": 0.2},
    },
}


def settings_of(recipe, method, steps):
    """The method's settings as the recipe has them, for a training of so many steps on which a default may depend."""
    (item,) = (item for item in recipe.methods if item.label == method)
    built = item.algorithm.build(Setup(Task(("a", "b"), ("a", "b")), width=2, steps=steps, seed=0))
    return {key: getattr(built, key) if value is None else value for key, value in item.algorithm.settings().items()}


@pytest.mark.parametrize("name", PAPER)
def test_methods_have_the_published_settings(name):
    recipe = load(str(RECIPES[name]))
    training = recipe.training
    steps = training.steps or {"camelyon17": 18_902, "fmow": 12_010}[name]  # epochs of 302,436 and 76,863 images
    for method, settings in PUBLISHED_SETTINGS["wilds" if name in WILDS else "domainbed"].items():
        own = settings_of(recipe, method, steps)
        assert {key: pytest.approx(own[key]) for key in settings} == settings, method
    published = {
        "camelyon17": ("sgd", False, 1e-4, 32, 2, None, 1.0, 2000),
        "fmow": ("adam", True, 1e-4, 32, 5, None, 1.0, 2000),
        "domainnet": ("adam", False, 5e-5, 24, None, 15_000, None, 1000),
    }
    assert (
        training.optimizer, training.amsgrad, training.lr, training.batch_size, training.epochs, training.steps,
        training.clip_norm, training.evaluate_every,
    ) == published.get(name, ("adam", False, 5e-5, 32, None, 5000, None, 300))  # fmt: skip
    assert training.encoder_lr == training.lr and training.weight_decay == 0 and training.momentum == 0.9
    size, filter_ = recipe.encoder.block.preprocessing.size, recipe.encoder.block.preprocessing.interpolation
    assert (size, filter_) == (224, "bilinear" if name == "camelyon17" else None)


@pytest.mark.slow
def test_frozen_clip_is_trained_as_the_whole_network_is():
    frozen = [recipe for path in RECIPES.values() if not (recipe := load(str(path))).trains_encoders]
    for name in ("camelyon17", "fmow"):
        whole = load(str(RECIPES[name])).training
        found = [recipe.training for recipe in frozen if recipe.data.name == name]
        assert found
        assert all(one.model_copy(update={"encoder_lr": whole.encoder_lr}) == whole for one in found), name


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A tiny CLIP of random weights on disk, as `encoder` names it."""
    folder = tmp_path_factory.mktemp("clip")
    config, weights = folder / "recipe_clip.json", folder / "recipe_clip.safetensors"
    config.write_text(json.dumps(TINY_CLIP))
    open_clip.add_model_config(config)
    torch.manual_seed(0)
    state = open_clip.create_model("recipe_clip").state_dict()
    save_file({name: value.contiguous() for name, value in state.items()}, weights)
    return {"model": str(config), "weights": str(weights)}


def miniature_data(data, folder):
    """Puts the data set that the recipe names into `folder`, in its layout on disk, and tells the recipe so."""
    name = data["name"]
    if name == "digits":
        return
    if name == "features":
        data["file"] = str(miniature.features(folder / "features.npz"))
        return
    if name == "bags":
        data |= {"folder": str(folder), "table": str(slides(folder, per_class=16))}
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


def tiny_encoder(encoder, clip):
    """The same architecture, or another CLIP, with hardly any weights; none is downloaded."""
    model = encoder["model"].partition(".")[0]
    if encoder["name"] == "open_clip":
        encoder |= clip if model != "demo" else {}
    elif model in TINY_TIMM:
        own = encoder.get("preprocessing", {})
        encoder |= {
            "model": model,
            "weights": None,
            "kwargs": TINY_TIMM[model],
            "preprocessing": {**own, "size": TINY_TIMM[model].get("img_size", 32)},
        }


def one_domain(data):
    """A domain of the data set to hold out, where one is enough."""
    if data in miniature.CLASSES:
        return str(next(iter(components.find("data", data).domain_folders)))
    return {"digits": "chalk", "folder": "site0"}[data]


def shrink(values, folder, clip):
    """As few steps and seeds as show that it runs; every method stays, with its settings, in the same proportions."""
    (folder / "data").mkdir()
    miniature_data(values["data"], folder / "data")
    encoders = values.get("encoders") or [values.get("encoder", {})]
    for encoder in filter(None, encoders):
        tiny_encoder(encoder, clip)
    protocol, training = values["protocol"], values["training"]
    protocol["seeds"] = 1
    if encoders[0].get("trainable") and protocol["name"] == "leave_one_domain_out":
        protocol["test_domains"] = [one_domain(values["data"]["name"])]
    training.pop("epochs", None)
    training |= {"steps": STEPS, "batch_size": 6, "evaluate_every": STEPS // 2}
    for method in values["methods"]:
        if isinstance(method, dict) and "warmup_steps" in method:
            method |= {"warmup_steps": STEPS // 2, "quantile_steps": 1}
        if isinstance(method, dict) and "anneal_steps" in method:
            method["anneal_steps"] = 1
    if "search" in values:
        values["search"]["trials"] = 2
    views = {"views": 1} if values.get("features", {}).get("views") else {}
    workers = {"workers": 0} if values["data"]["name"] not in ("features", "bags") else {}
    values["features"] = {"dir": str(folder / "features"), **workers, **views}
    values["report"] = {"page": False}
    values["output"] = {"dir": str(folder / "output")}


# one of each kind of data, engine and selection, the others with methods or encoders that only they have
RUN = (
    "ablation", "adaptation", "all_methods", "bags", "camelyon17", "clip_camelyon_search", "clip_pacs", "demo",
    "encoders", "features",
)  # fmt: skip
assert {*RUN} <= {*RECIPES}


def small(name, clip, folder):
    """The recipe on miniature data, and what `xdm-ft validate` says of it."""
    values = yaml.safe_load(RECIPES[name].read_text(encoding="utf-8"))
    labels = [item.label for item in load(str(RECIPES[name])).methods]
    shrink(values, folder, clip)
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    recipe = load(str(file))
    assert [item.label for item in recipe.methods] == labels

    printed = validate(recipe).text()
    assert "gradient evaluations" in printed
    for item in recipe.methods:
        assert (f"# prompts of {item.label}," in printed) == (item.block.prompts is not None)
    return recipe


@pytest.mark.slow
@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in RUN])
def test_it_validates(name, clip, tmp_path):
    small(name, clip, tmp_path)


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in RUN else pytest.mark.soak) for name in RECIPES]
)
def test_it_runs(name, clip, tmp_path):
    recipe = small(name, clip, tmp_path)
    labels = [item.label for item in recipe.methods]
    assert not run(recipe).failed

    folder = tmp_path / "output" / name
    found = json.loads((folder / "results.json").read_text())
    held_out = {tuple(record["test_domains"]) for record in found["runs"]}
    in_turn = recipe.protocol.name == "leave_one_domain_out" and recipe.protocol.test_domains is None
    assert len(held_out) == (len(read_data(recipe).domain_names) if in_turn else 1)
    trained = dict.fromkeys((record["method"], *record["test_domains"]) for record in found["runs"])  # of all trials
    assert [method for method, *_ in trained] == [label for label in labels for _ in held_out]
    assert {record["status"] for record in found["runs"]} == {"ok"}, found["runs"]
    assert {row["method"] for row in found["summary"]} == set(labels)
    averaged = f"; training loss averaged by {recipe.training.loss_average}; "
    assert all(averaged in row["protocol"] for row in found["summary"])
    table = (folder / "results.md").read_text().replace("\\", "")  # signs of Markdown are escaped
    assert all(f"| {label} |" in table for label in labels)
