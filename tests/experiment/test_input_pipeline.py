"""Augmentation, views, class-balanced batches and class weights from the recipe to the results."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import small_runs
import torch
from safetensors.torch import load_file
from torch import Tensor

from xdm_ft.cli.validate import resolved_with_meanings
from xdm_ft.experiment import run
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
BOTH, PROBE = "methods=[erm, linear_probe]", "methods=[linear_probe]"
NONE, GIVEN = "data.train_augmentation=none", "data.train_augmentation=domainbed"
CAMELYON = ("data={name: camelyon17}", "protocol.test_domains=[hospital 2]")
WHY = "; images of rows without one are encoded once, features.views caches augmented ones"
FIVE = {"pacs", "vlcs", "officehome", "terraincognita", "domainnet"}


@pytest.fixture(autouse=True)
def here(small_pacs: None) -> None:
    for image in sorted(Path("data/PACS/photo/dog").iterdir())[2:]:
        image.unlink()  # else all classes have as many images


def recipe(*overrides: str) -> Any:
    return small_runs.recipe(*SHORT, TRAINED, *overrides)


def results(*overrides: str) -> dict[str, Any]:
    found: dict[str, Any] = small_runs.results(*SHORT, TRAINED, *overrides)
    assert {record["status"] for record in found["runs"]} == {"ok"}
    return found


def weights(found: dict[str, Any], method: str = "erm") -> dict[str, Tensor]:
    [record] = [one for one in found["runs"] if one["method"] == method]
    return load_file(f"output/{found['recipe']['name']}/{record['selected']['train_val']['weights']}")


def protocols(found: dict[str, Any]) -> set[str]:
    return {row["protocol"].split("augmentation")[1].split(";")[0].strip() for row in found["summary"]}


def test_every_data_set_has_the_augmentation_that_is_usual_with_it() -> None:
    own = {name: components.find("data", name).train_augmentation for name in components.names("data")}
    assert {name for name, augmentation in own.items() if augmentation == "domainbed"} == FIVE
    assert set(own.values()) == {"domainbed", "none"} and own["camelyon17"] == own["fmow"] == "none"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "domainbed"),
        ([NONE], "none"),
        ([FROZEN], "none"),
        (CAMELYON, "none"),
        (["data={name: digits, train_augmentation: domainbed}", "protocol.test_domains=[ink]"], "domainbed"),
        ([FROZEN, VIEWS], "domainbed"),
        ([FROZEN, VIEWS, GIVEN], "domainbed"),
    ],
)
def test_null_is_resolved_and_shown(overrides: list[str], expected: str) -> None:
    made = recipe(*overrides)
    assert [made.augmentation_of(item) for item in made.methods] == [expected]
    assert made.train_augmentation == made.resolved()["data"]["train_augmentation"] == expected
    assert f"  train_augmentation: {expected} " in resolved_with_meanings(made)


OF_MIXED = {"linear_probe": "none", "head": "none", "erm": "domainbed"}


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
def test_the_default_follows_each_row(overrides: list[str], expected: dict[str, str], line: str) -> None:
    made = recipe(*overrides)
    for one in (made, check(parse(made.as_yaml(), "written.yaml"))):
        assert {item.label: one.augmentation_of(item) for item in one.methods} == expected
        assert f"augmentation: {line}" in describe(make_plan(one, read_data(one))).splitlines()


def test_the_plan_counts_passes_of_views_and_the_images_of_a_class_balanced_step() -> None:
    def lines(*overrides: str) -> list[str]:
        made = recipe(*overrides)
        return describe(make_plan(made, read_data(made))).splitlines()

    images = f"over {len(read_data(recipe()))} images unless their features are cached"
    assert f"encoder: 3 passes (1 plain, 2 augmented) {images}" in lines(FROZEN, VIEWS)
    assert f"encoder: one pass {images}" in lines(FROZEN)
    balanced = "encoder: 24 images forward and backward, without evaluations"
    assert balanced in lines("training.sampler=class_balanced")


@pytest.mark.slow
def test_rows_train_beside_others_as_they_do_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Augmentation reaches the training, the protocol line, the log and the table."""
    caplog.set_level("INFO", "xdm_ft")
    mixed = results(MIXED)
    said = [line for line in caplog.messages if line.startswith("augmentation: ")]
    assert said == [f"augmentation: none of linear_probe / head and domainbed of erm{WHY}"]
    assert {row["method"]: row["augmentation"] for row in mixed["summary"]} == OF_MIXED
    assert protocols(mixed) == {"none of linear_probe / head and domainbed of erm"}
    with Path("output/small/results.csv").open(newline="") as file:
        assert {row["method"]: row["augmentation"] for row in csv.DictReader(file)} == OF_MIXED
    alone = results("name=alone")
    frozen = results("name=frozen", FROZEN, "methods=[{name: erm, label: head}]")
    plain = results("name=plain", NONE)
    assert [found["recipe"]["data"]["train_augmentation"] for found in (alone, frozen)] == ["domainbed", "none"]
    assert protocols(alone) == {"domainbed"} and protocols(frozen) == protocols(plain) == {""}
    assert "; no augmentation; " in plain["summary"][0]["protocol"]
    for found in (alone, frozen):
        [one] = found["runs"]
        [same] = [record for record in mixed["runs"] if record["method"] == one["method"]]
        metrics = [[pick["metrics"] for pick in record["selected"].values()] for record in (one, same)]
        assert metrics[0] == metrics[1]
    assert not torch.equal(weights(alone)["head.weight"], weights(plain)["head.weight"])


@pytest.mark.slow
def test_a_run_of_a_version_without_augmentation_beside_cached_features_resumes_and_grows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its results.json says none for all rows, as that of a recipe that sets none does."""
    caplog.set_level("INFO", "xdm_ft")
    before = results(MIXED, NONE)
    assert before["recipe"]["data"]["train_augmentation"] == "none"
    again = results(MIXED)
    assert again["runs"] == before["runs"] and again["summary"] == before["summary"]
    assert "data.train_augmentation: none for all methods, as when this run started" in caplog.messages
    grown = results(MIXED.replace("erm]", "erm, rsc]"))
    assert grown["runs"][:-1] == before["runs"] and grown["summary"][-1]["augmentation"] == "none"
    with pytest.raises(UserError, match=r"data\.train_augmentation"):
        run(recipe(MIXED, GIVEN))


@pytest.mark.slow
@pytest.mark.parametrize("first", ["[erm]", "[{name: erm, label: head, trainable: false}]"])
def test_a_run_grows_by_rows_that_have_another_default(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, checkpoint = dict[str, list[Any]](), RunDirectory.checkpoint

    def watched(directory: RunDirectory, name: str, settings: Any, *rest: Any) -> Any:
        checkpoints.setdefault(name, []).append(settings["recipe"])
        return checkpoint(directory, name, settings, *rest)

    monkeypatch.setattr(RunDirectory, "checkpoint", watched)
    monkeypatch.setattr("xdm_ft.experiment.pieces.own_cores", lambda: 1)  # a fork's checkpoints would not be seen here
    before = results(f"methods={first}")
    [trained] = Path("output/small/models").rglob("train_val.safetensors")
    trained.unlink()  # it is trained again, and its checkpoint, if it had one, would be read
    grown = results(MIXED)
    assert grown["recipe"]["data"]["train_augmentation"] is None
    assert {row["method"]: row["augmentation"] for row in grown["summary"]} == OF_MIXED
    old = before["summary"][0]
    assert old["mean"] in [row["mean"] for row in grown["summary"] if row["method"] == old["method"]]
    twice = [recipes for recipes in checkpoints.values() if len(recipes) > 1]
    assert twice and all(one == other for one, other in twice)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [TRAINED, FROZEN])
def test_class_balanced_and_class_weights_in_a_whole_run(encoder: str) -> None:
    found = results(encoder, "training.sampler=class_balanced", "training.class_weights=balanced")
    # 7 classes of 4 images in three domains, of which some validate; two dogs were taken away
    plan = make_plan(recipe(), read_data(recipe()))
    labels = plan.annotations.labels[torch.cat(plan.models[0].split.train)]
    count = labels.bincount()
    assert count[0] < count[1]
    torch.testing.assert_close(weights(found)["class_weight"], (len(labels) / (7 * count)).float())


@pytest.mark.slow
def test_views_reach_the_training_and_the_protocol_line() -> None:
    viewed, plain = results(FROZEN, VIEWS, BOTH), results(FROZEN, BOTH, "name=plain")
    assert protocols(viewed) == {"domainbed, 2 cached views per image of what trains by gradient steps"}
    assert viewed["recipe"]["features"]["views"] == 2 and plain["recipe"]["features"]["views"] == 0
    for method, same in (("erm", False), ("linear_probe", True)):
        one, other = (weights(found, method)["head.weight"] for found in (viewed, plain))
        assert torch.equal(one, other) == same
    assert protocols(results(FROZEN, VIEWS, "name=alone")) == {"domainbed, 2 cached views per image"}
    assert protocols(results(BOTH, "name=images")) == {"domainbed of what trains on images"}
    with pytest.raises(UserError, match=r"features\.views"):
        run(recipe(FROZEN, BOTH, VIEWS, "name=plain"))  # a run without views does not go on with them


@pytest.mark.parametrize(
    ("overrides", "key", "problem"),
    [
        ([FROZEN, VIEWS, NONE], "data.train_augmentation", "none gives no views to cache; set domainbed"),
        (
            [FROZEN, VIEWS, *CAMELYON],
            "data.train_augmentation",
            "none, the default of this data set, gives no views",
        ),
        ([VIEWS], "features.views", "no effect with encoder.trainable: true"),
        ([FROZEN, VIEWS, PROBE], "features.views", "no effect on methods without gradient"),
        ([FROZEN, GIVEN], "data.train_augmentation", "no effect with a frozen encoder"),
        ([FROZEN, "features.views=-1"], "features.views", "greater than or equal to 0"),
    ],
)
def test_views_that_do_not_fit_the_recipe_are_refused(overrides: list[str], key: str, problem: str) -> None:
    with pytest.raises(UserError) as refused:
        recipe(*overrides)
    [line] = str(refused.value).splitlines()
    assert f": {key}: " in line and problem in line
