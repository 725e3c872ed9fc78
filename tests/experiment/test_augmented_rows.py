"""Rows with augmentations and class weights of their own: what trains, what is computed once, what the table says."""

import re
from pathlib import Path

import pytest
import small_runs
import torch
from safetensors.torch import load_file

from xdm_ft.experiment.plan import describe, make_plan, read_data
from xdm_ft.experiment.results import references
from xdm_ft.recipe.check import check
from xdm_ft.recipe.text import parse
from xdm_ft.runtime.errors import UserError

SHORT = (
    "protocol={name: leave_one_domain_out, test_domains: [sketch], seeds: 2, val_fraction: 0.4}",
    "training={steps: 4, batch_size: 4}",
    "features.views=2",
)
NONE = "{name: erm, train_augmentation: none}"
FLIP = "{name: erm, label: flip, train_augmentation: flip}"
STAIN = "{name: erm, label: stain, train_augmentation: [flip, {stain: {strength: 0.5}}]}"
MIX = "{name: xdomainmix, label: mix, warmup_steps: 2, train_augmentation: flip}"
BLOCK = "trainable: {blocks: 1}"


def recipe(*methods, overrides=()):
    return small_runs.recipe(*SHORT, f"methods=[{', '.join(methods)}]", *overrides)


def results(*methods, overrides=()):
    content = small_runs.results_of(recipe(*methods, overrides=overrides))
    assert {record["status"] for record in content["runs"]} == {"ok"}
    return content


def heads(content):
    """{(method, seed): weights of the picked head}."""
    folder = Path("output") / content["recipe"]["name"]
    return {
        (record["method"], record["seed"]): load_file(folder / record["selected"]["train_val"]["weights"])
        for record in content["runs"]
    }


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_each_row_trains_as_in_a_run_of_its_own_and_equal_augmentations_are_encoded_once(small_pacs):
    together = results(NONE, FLIP, STAIN, MIX, "linear_probe")
    images = {path.name for path in Path("cache").iterdir() if path.is_dir()}
    every = heads(together)
    assert {row["method"]: row["augmentation"] for row in together["summary"]} == {
        "erm": "none", "flip": "flip, 2 cached views per image", "mix": "flip, 2 cached views per image",
        "stain": "flip + stain (strength 0.5), 2 cached views per image", "linear_probe": "none",
    }  # fmt: skip
    assert not same(every["erm", 0], every["flip", 0]) and not same(every["flip", 0], every["stain", 0])
    plain = results("erm", overrides=["features.views=0", "data.train_augmentation=none", "name=plain"])
    assert same(heads(plain)["erm", 1], every["erm", 1])
    for number, method in enumerate((STAIN, FLIP, MIX)):  # in another order, among other views
        alone = heads(results(method, overrides=[f"name=alone{number}"]))
        assert all(same(weights, every[key]) for key, weights in alone.items())
    # plain, and two views of two augmentations: the runs after the first computed nothing
    assert {path.name for path in Path("cache").iterdir() if path.is_dir()} == images
    with pytest.raises(UserError, match=r"train_augmentation"):
        results(NONE, FLIP.replace("flip}", "colour}"), STAIN, MIX, "linear_probe")


@pytest.mark.slow
def test_rows_above_a_cut_read_cached_views_or_draw_anew(small_pacs):
    cut = [method.replace("}", f", {BLOCK}}}", 1) for method in (NONE, FLIP)]
    drawn = "{name: erm, label: drawn, train_augmentation: flip, trainable: true}"
    cached = heads(results(*cut, drawn))
    assert not same(cached["erm", 0], cached["flip", 0]) and not same(cached["flip", 0], cached["drawn", 0])
    anew = results(*cut, overrides=["features.views=0", "name=anew"])
    every = heads(anew)
    assert same(every["erm", 0], cached["erm", 0]), "the plain activations, cached too"
    assert not same(every["flip", 0], cached["flip", 0]), "an image is drawn anew at every step"
    assert {row["method"]: row["augmentation"] for row in anew["summary"]} == {"erm": "none", "flip": "flip"}


@pytest.mark.slow
def test_class_weights_of_a_row_are_those_of_a_run(small_pacs):
    for image in sorted(Path("data/PACS/photo/dog").iterdir())[2:]:
        image.unlink()  # else all classes have as many images
    off = ["features.views=0", "training.class_weights=none"]
    rows = ["erm", "{name: erm, label: weighted, class_weights: balanced}"]
    rows += ["linear_probe", "{name: linear_probe, label: probe, class_weights: balanced}"]
    content = results(*rows, overrides=off)
    every = heads(content)
    whole = heads(
        results("erm", "linear_probe", overrides=[off[0], "training.class_weights=balanced", "name=whole"])
    )  # fmt: skip
    for own, of_run in (("weighted", "erm"), ("probe", "linear_probe")):
        assert same(every[own, 1], whole[of_run, 1]) and not same(every[of_run, 1], whole[of_run, 1])
    weighted = {row["method"]: row.get("class_weights") for row in content["summary"]}
    assert weighted == {"erm": None, "weighted": "balanced", "linear_probe": None, "probe": "balanced"}
    assert (
        "; class losses weighted by balanced class weights of weighted / probe; " in content["summary"][0]["protocol"]
    )


def test_the_plan_names_augmentations_and_what_they_cost(small_pacs):
    made = recipe(NONE, FLIP, STAIN, MIX)
    for one in (made, check(parse(made.as_yaml(), "written.yaml"))):
        lines = describe(make_plan(one, read_data(one))).splitlines()
        assert "encoder: 5 passes (1 plain, 4 augmented) over 112 images unless their features are cached" in lines
        [line] = [line for line in lines if line.startswith("augmentation: ")]
        assert line.startswith("augmentation: none of erm and flip, 2 cached views per image of flip / mix and flip + ")
    assert made.resolved()["methods"][1]["train_augmentation"] == [{"flip": {"vertical": True, "quarter_turns": True}}]
    single = "{name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}"
    both = f"encoders: [{single}, {single.replace('}}', '}, label: b}')}]"
    text = small_runs.RECIPE.replace(f"encoder: {single}", both).replace("workers: 0", "views: 2")
    several = check(parse(re.sub("methods: .*", f"methods: [{NONE}, {FLIP}]", text), "several.yaml"))
    passes = "encoder: 6 passes (2 plain, 4 augmented) of 2 encoders over 112 images"
    assert any(line.startswith(passes) for line in describe(make_plan(several, read_data(several))).splitlines())


def test_a_row_is_compared_with_the_erm_of_its_augmentation_then_of_its_class_weights(small_pacs):
    weighted = "{name: erm, label: weighted, class_weights: balanced, train_augmentation: none}"
    of_mixes = {"flip": "flip", "none": "none", "weighted": "none, class_weights: balanced", "stain": "stain"}
    mixes = [
        f"{{name: xdomainmix, label: mix {name}, warmup_steps: 2, train_augmentation: {value}}}"
        for name, value in of_mixes.items()
    ]
    made = recipe(FLIP, weighted, NONE, *mixes)
    assert references(made) == {
        "flip": "erm", "weighted": "erm", "mix flip": "flip", "mix none": "erm", "mix weighted": "weighted",
        "mix stain": "flip",
    }  # fmt: skip


FROZEN = r"has no effect with a frozen encoder: each image is computed only once; leave it out, or set features\.views"


@pytest.mark.parametrize(
    ("methods", "overrides", "problem"),
    [
        ([FLIP], ["features.views=0"], rf"methods\.0\.train_augmentation: {FROZEN}"),
        ([NONE], [], r"features\.views: no row on cached features has an augmentation"),
        (["{name: linear_probe, train_augmentation: flip}"], ["features.views=0"],
         r"methods\.0\.train_augmentation: linear_probe computes its head from the plain images"),
        ([NONE, NONE.replace("erm", "xdomainmix")], [],
         r"features\.views: no row on cached features has an augmentation; set one"),
        ([FLIP.replace("flip}", "{name: stain}}")], [], r"\.train_augmentation: must have the form \{stain: "),
        ([FLIP.replace("flip}", "stian}")], [], r"methods\.0\.train_augmentation: no \"stian\" .*mean \"stain\""),
        (["{name: knn, class_weights: balanced}", FLIP], [], r"methods\.0\.class_weights: knn weighs no images"),
        (["{name: erm, class_weights: equal}"], [], r"methods\.0\.class_weights: "),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(small_pacs, methods, overrides, problem):
    folder = "data={name: folder, root: data/PACS}"  # its default is none
    with pytest.raises(UserError, match=problem) as caught:
        recipe(*methods, overrides=[folder, *overrides])
    assert len(caught.value.args) == 1


def test_given_features_have_no_augmentation(tmp_path):
    text = f"name: f\ndata: {{name: features, file: {tmp_path / 'f.npz'}}}\nmethods: [{FLIP}]\n"
    with pytest.raises(UserError, match=r"methods\.0\.train_augmentation: data has no images"):
        check(parse(text, "f.yaml"))


@pytest.mark.parametrize(
    "override", ["erm.train_augmentation={stain: {strength: 0.2}}", "erm.train_augmentation=stain"]
)
def test_an_override_sets_the_augmentation_of_a_method(small_pacs, override):
    made = recipe("erm", overrides=[override])
    [augmentation] = made.augmentation_of(made.methods[0])
    assert augmentation.strength == (0.2 if "0.2" in override else 0.05)


@pytest.mark.slow
def test_rows_of_an_edited_augmentation_are_computed_and_trained_anew(small_pacs, monkeypatch):
    """The code of an augmentation is part of the keys of its views, and of its rows."""
    rows = [NONE, FLIP]
    first = heads(results(*rows))
    monkeypatch.setattr("xdm_ft.augmentations.flip.Flip.apply", lambda self, image, draw, preprocessing: image)
    monkeypatch.setattr("xdm_ft.augmentations.code_of", lambda component: "edited")
    monkeypatch.setattr("xdm_ft.experiment.resume.code_of", lambda component: "edited")
    edited = heads(results(*rows, overrides=["name=edited"]))
    assert same(first["erm", 0], edited["erm", 0]) and not same(first["flip", 0], edited["flip", 0])
    with pytest.raises(UserError, match="the code of flip has changed"):
        results(*rows, overrides=["protocol.seeds=3"])
