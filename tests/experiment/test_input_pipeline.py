"""Augmentation, views, class-balanced batches and class weights from the recipe to the results."""

import csv
from pathlib import Path

import pytest
import small_runs
import torch
from safetensors.torch import load_file

from xdm_ft.cli.library import run
from xdm_ft.cli.validate import annotate, validate
from xdm_ft.experiment.plan import describe, make_plan, read_data
from xdm_ft.recipe import components
from xdm_ft.recipe.check import check
from xdm_ft.recipe.text import parse
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.run_directory import RunDirectory

SHORT = (
    "protocol={name: leave_one_domain_out, test_domains: [sketch], seeds: 1}",
    "methods=[erm]",
    "training={steps: 2, batch_size: 4}",
)
TRAINED, FROZEN, VIEWS = "encoder.trainable=true", "encoder.trainable=false", "features.views=2"
MIXED = "methods=[linear_probe, {name: erm, label: head, trainable: false}, erm]"
CUT = "methods=[{name: erm, label: cut, trainable: {blocks: 1}}, erm]"
BOTH = "methods=[erm, linear_probe]"
NONE, GIVEN = "data.train_augmentation=none", "data.train_augmentation=domainbed"
CAMELYON = ("data={name: camelyon17}", "protocol.test_domains=[hospital 2]")
WHY = "; images of rows without one are encoded once, features.views caches augmented ones"
FIVE = {"pacs", "vlcs", "officehome", "terraincognita", "domainnet"}
OF_MIXED = {"linear_probe": "none", "head": "none", "erm": "domainbed"}


@pytest.fixture(autouse=True)
def unequal_classes(small_pacs):
    for image in sorted(Path("data/PACS/photo/dog").iterdir())[2:]:
        image.unlink()  # else all classes have as many images


def recipe(*overrides):
    return small_runs.recipe(*SHORT, TRAINED, *overrides)


def results(*overrides):
    content = small_runs.results(*SHORT, TRAINED, *overrides)
    assert {record["status"] for record in content["runs"]} == {"ok"}
    return content


def weights(content, method="erm"):
    [record] = [record for record in content["runs"] if record["method"] == method]
    return load_file(f"output/{content['recipe']['name']}/{record['selected']['train_val']['weights']}")


def augmentations(content):
    """The part of the protocol lines between `augmentation` and the next semicolon."""
    return {row["protocol"].split("augmentation")[1].split(";")[0].strip() for row in content["summary"]}


def plan_lines(*overrides):
    made = recipe(*overrides)
    return describe(make_plan(made, read_data(made))).splitlines()


def test_every_data_set_has_the_augmentation_that_is_usual_with_it():
    usual = {name: components.find("data", name).train_augmentation for name in components.names("data")}
    assert {name for name, augmentation in usual.items() if augmentation == "domainbed"} == FIVE
    assert set(usual.values()) == {"domainbed", "none"} and usual["camelyon17"] == usual["fmow"] == "none"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "domainbed"),
        ([NONE], "none"),
        ([FROZEN], "none"),
        (CAMELYON, "none"),
        ([FROZEN, VIEWS, GIVEN], "domainbed"),
    ],
)
def test_null_is_resolved_and_shown(overrides, expected):
    made = recipe(*overrides)
    assert [str(made.augmentation_of(item)) for item in made.methods] == [expected]
    assert made.resolved()["data"]["train_augmentation"] == expected
    assert f"  train_augmentation: {expected} " in annotate(made)


@pytest.mark.parametrize(
    ("overrides", "expected", "line"),
    [
        ([MIXED], OF_MIXED, f"none of linear_probe / head and domainbed of erm{WHY}"),
        ([MIXED, GIVEN], OF_MIXED, f"none of linear_probe / head and domainbed of erm{WHY}"),
        ([MIXED, NONE], dict.fromkeys(OF_MIXED, "none"), "none"),
        (
            [MIXED, VIEWS],
            OF_MIXED | {"head": "domainbed"},
            "none of linear_probe and domainbed, 2 cached views per image of head and domainbed of erm",
        ),
        ([CUT], {"cut": "none", "erm": "domainbed"}, f"none of cut and domainbed of erm{WHY}"),
        ([CUT, "features.cut=compute"], {"cut": "domainbed", "erm": "domainbed"}, "domainbed"),
        ([CUT, GIVEN], {"cut": "domainbed", "erm": "domainbed"}, "domainbed"),
        ([BOTH], {"erm": "domainbed", "linear_probe": "none"}, "domainbed of what trains on images"),
    ],
)
def test_the_default_follows_each_row(overrides, expected, line):
    made = recipe(*overrides)
    for one in (made, check(parse(made.as_yaml(), "written.yaml"))):
        assert {item.label: str(one.augmentation_of(item)) for item in one.methods} == expected
        assert f"augmentation: {line}" in describe(make_plan(one, read_data(one))).splitlines()


def test_the_plan_counts_passes_of_views_and_the_images_of_a_class_balanced_step():
    images = "over 110 images unless their features are cached"
    assert f"encoder: 3 passes (1 plain, 2 augmented) {images}" in plan_lines(FROZEN, VIEWS)
    assert f"encoder: one pass {images}" in plan_lines(FROZEN)
    balanced = "encoder: 24 images forward and backward, without evaluations"
    assert balanced in plan_lines("training.sampler=class_balanced")


@pytest.mark.slow
def test_rows_train_beside_others_as_they_do_alone(caplog):
    """Augmentation reaches the training, the protocol line, the log and the table."""
    caplog.set_level("INFO", "xdm_ft")
    mixed = results(MIXED)
    logged = [line for line in caplog.messages if line.startswith("augmentation: ")]
    assert logged == [f"augmentation: none of linear_probe / head and domainbed of erm{WHY}"]
    assert {row["method"]: row["augmentation"] for row in mixed["summary"]} == OF_MIXED
    assert augmentations(mixed) == {"none of linear_probe / head and domainbed of erm"}
    with Path("output/small/results.csv").open(newline="") as file:
        assert {row["method"]: row["augmentation"] for row in csv.DictReader(file)} == OF_MIXED

    alone, frozen = results("name=alone"), results("name=frozen", FROZEN, "methods=[{name: erm, label: head}]")
    assert [content["recipe"]["data"]["train_augmentation"] for content in (alone, frozen)] == ["domainbed", "none"]
    assert augmentations(alone) == {"domainbed"} and augmentations(frozen) == {""}
    assert "; no augmentation; " in frozen["summary"][0]["protocol"]
    of_mixed = {record["method"]: record for record in mixed["runs"]}
    for content in (alone, frozen):
        [record] = content["runs"]
        for rule, pick in of_mixed[record["method"]]["selected"].items():
            assert record["selected"][rule]["metrics"] == pick["metrics"]


@pytest.mark.slow
def test_a_run_of_a_version_without_augmentation_beside_cached_features_resumes_and_grows(caplog):
    """Its results.json says none for all rows, as that of a recipe that sets none does."""
    caplog.set_level("INFO", "xdm_ft")
    before = results(MIXED, NONE)
    drawn = results(MIXED, "name=drawn")
    assert not torch.equal(weights(before)["head.weight"], weights(drawn)["head.weight"]), "augmentation trains"
    assert before["recipe"]["data"]["train_augmentation"] == "none"
    again = results(MIXED)
    assert again["runs"] == before["runs"] and again["summary"] == before["summary"]
    assert "data.train_augmentation: none for all methods, as when this run started" in caplog.messages
    grown = results(MIXED.replace("erm]", "erm, rsc]"))
    assert grown["runs"][:-1] == before["runs"] and grown["summary"][-1]["augmentation"] == "none"
    with pytest.raises(UserError, match=r"data\.train_augmentation"):
        run(recipe(MIXED, GIVEN))


@pytest.mark.slow
def test_a_run_grows_by_rows_that_have_another_default(monkeypatch, one_core):
    checkpoints, checkpoint = {}, RunDirectory.checkpoint

    def noted(directory, name, settings, *rest):
        checkpoints.setdefault(name, []).append(settings["recipe"])
        return checkpoint(directory, name, settings, *rest)

    monkeypatch.setattr(RunDirectory, "checkpoint", noted)
    [old] = {row["method"]: row for row in results("methods=[erm]")["summary"]}.values()
    [trained] = Path("output/small/models").rglob("train_val.safetensors")
    trained.unlink()  # it is trained again, and its checkpoint, if it had one, would be read
    grown = results(MIXED)
    assert grown["recipe"]["data"]["train_augmentation"] is None
    assert {row["method"]: row["augmentation"] for row in grown["summary"]} == OF_MIXED
    assert old["mean"] in [row["mean"] for row in grown["summary"] if row["method"] == old["method"]]
    twice = [recipes for recipes in checkpoints.values() if len(recipes) > 1]
    assert twice and all(one == other for one, other in twice)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [TRAINED, pytest.param(FROZEN, marks=pytest.mark.soak)])
def test_class_balanced_and_class_weights_in_a_whole_run(encoder):
    content = results(encoder, "training.sampler=class_balanced", "training.class_weights=balanced")
    # 7 classes of 4 images in three domains, of which some validate; two dogs were taken away
    plan = make_plan(recipe(), read_data(recipe()))
    labels = plan.annotations.labels[torch.cat(plan.models[0].split.train)]
    count = labels.bincount()
    assert count[0] < count[1]
    torch.testing.assert_close(weights(content)["class_weight"], (len(labels) / (7 * count)).float())


@pytest.mark.slow
def test_views_reach_the_training_and_the_protocol_line():
    viewed, plain = results(FROZEN, VIEWS, BOTH), results(FROZEN, BOTH, "name=plain")
    assert augmentations(viewed) == {"domainbed, 2 cached views per image of what trains by gradient steps"}
    assert viewed["recipe"]["features"]["views"] == 2 and plain["recipe"]["features"]["views"] == 0
    for method, same in (("erm", False), ("linear_probe", True)):
        one, other = (weights(content, method)["head.weight"] for content in (viewed, plain))
        assert torch.equal(one, other) == same
    with pytest.raises(UserError, match=r"features\.views"):
        run(recipe(FROZEN, BOTH, VIEWS, "name=plain"))  # a run without views does not go on with them


RESNET = "encoder={name: timm, model: test_resnet, preprocessing: {size: 32}}"
ONE = ("training={steps: 2, batch_size: 1, sampler: pooled}",)
ONE_OF_TWO = ("training={steps: 2, batch_size: 3, sampler: pooled, accumulation: 2}",)


@pytest.mark.parametrize(("trainable", "training"), [("true", ONE), ("{blocks: 1}", ONE_OF_TWO)])
def test_batch_norm_of_one_value_is_refused_before_all_else(trainable, training):
    made = small_runs.recipe(*SHORT, RESNET, f"methods=[{{name: erm, trainable: {trainable}}}]", *training)
    why = r"^training\.batch_size: \d gives one image to a pass of erm, and batch norm \(model\.layer.*\) needs two"
    with pytest.raises(UserError, match=why):
        run(made)
    assert not Path("output").exists() and "needs two" in str(validate(made).document["error"])


@pytest.mark.parametrize(
    "overrides",
    [
        (TRAINED, "training.batch_size=1"),  # of each domain
        pytest.param((TRAINED, "encoder.batch_norm=frozen", *ONE), marks=pytest.mark.slow),
        (TRAINED, "encoder.preprocessing.size=64", *ONE),  # maps of 2 × 2
    ],
)
def test_one_image_is_enough_elsewhere(overrides):
    made = small_runs.recipe(*SHORT, RESNET, *overrides)
    assert validate(made).exit_status == 0
    if "encoder.batch_norm=frozen" in overrides:
        assert not run(made).failed


def test_fish_passes_one_domain_at_a_time():
    made = small_runs.recipe(*SHORT, RESNET, TRAINED, "methods=[erm, fish]", "training.batch_size=1")
    with pytest.raises(UserError, match="gives one image to a pass of fish"):
        run(made)
