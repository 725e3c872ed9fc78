"""Augmentation, class-balanced batches and class weights from the recipe to the results."""

import csv
import json

import miniature
import pytest
import torch
from safetensors.torch import load_file

from xdm_ft.cli.validate import resolved_with_meanings
from xdm_ft.experiment import run
from xdm_ft.experiment.plan import describe, make_plan, read_data
from xdm_ft.recipe import components
from xdm_ft.recipe.check import check
from xdm_ft.recipe.text import parse
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.run_directory import RunDirectory

RECIPE = """\
name: small
data: {name: pacs, root: data, counts: any}
protocol: {name: leave_one_domain_out, test_domains: [sketch], seeds: 1}
encoder:
  name: timm
  model: test_vit
  preprocessing: {size: 32}
  kwargs: {img_size: 32}
  trainable: true
features: {dir: cache, workers: 0}
methods: [erm]
training: {steps: 2, batch_size: 4}
report: {page: false}
"""
TABLE = "output/small/results.csv"
FIVE = {"pacs", "vlcs", "officehome", "terraincognita", "domainnet"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = miniature.domainbed(tmp_path / "data", "pacs")
    for image in sorted((root / "photo" / "dog").iterdir())[2:]:
        image.unlink()  # else all classes have as many images


def recipe(*changes):
    text = RECIPE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return check(parse(text, "small.yaml"))


def results(tmp_path, *changes):
    checked = recipe(*changes)
    assert not run(checked).failed
    found = json.loads((tmp_path / "output" / checked.name / "results.json").read_text())
    assert [record["status"] for record in found["runs"]] == ["ok"] * len(found["runs"])
    return found


def weights(tmp_path, found):
    [record] = found["runs"]
    return load_file(tmp_path / "output" / found["recipe"]["name"] / record["selected"]["train_val"]["weights"])


def test_every_data_set_has_the_augmentation_that_is_usual_with_it():
    own = {name: components.find("data", name).train_augmentation for name in components.names("data")}
    assert {name for name, augmentation in own.items() if augmentation == "domainbed"} == FIVE
    assert set(own.values()) == {"domainbed", "none"} and own["camelyon17"] == own["fmow"] == "none"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], "domainbed"),
        ([("counts: any", "counts: any, train_augmentation: none")], "none"),
        ([("trainable: true", "trainable: false")], "none"),
        ([("{name: pacs, root: data, counts: any}", "{name: camelyon17}"), ("[sketch]", "[hospital 2]")], "none"),
        ([("{name: pacs, root: data, counts: any}", "{name: digits, train_augmentation: domainbed}")], "domainbed"),
    ],
)
def test_null_is_resolved_and_shown(changes, expected):
    checked = recipe(*changes)
    [item] = checked.methods
    assert checked.augmentation_of(item) == expected
    assert checked.resolved()["data"]["train_augmentation"] == expected
    assert f"  train_augmentation: {expected} " in resolved_with_meanings(checked)


@pytest.mark.slow
def test_augmentation_reaches_the_training_and_the_protocol_line(tmp_path):
    none = ("counts: any", "counts: any, train_augmentation: none")
    augmented, plain = results(tmp_path), results(tmp_path, none, ("name: small", "name: plain"))
    assert "; augmentation domainbed; " in augmented["summary"][0]["protocol"]
    assert "; no augmentation; " in plain["summary"][0]["protocol"]
    one, other = (weights(tmp_path, found)["head.weight"] for found in (augmented, plain))
    assert not torch.equal(one, other)


MIXED = ("[erm]", "[linear_probe, {name: erm, label: head, trainable: false}, erm]")
CUT = ("[erm]", "[{name: erm, label: cut, trainable: {blocks: 1}}, erm]")
WHY = "; images of rows without one are encoded once, features.views caches augmented ones"
GIVEN = ("counts: any", "counts: any, train_augmentation: domainbed")


@pytest.mark.parametrize(
    ("changes", "expected", "line"),
    [
        ([MIXED], {"linear_probe": "none", "head": "none", "erm": "domainbed"},
         f"none of linear_probe / head and domainbed of erm{WHY}"),
        ([CUT], {"cut": "none", "erm": "domainbed"},
         f"none of cut and domainbed of erm{WHY}"),
        ([CUT, ("workers: 0", "workers: 0, cut: compute")], {"cut": "domainbed", "erm": "domainbed"}, "domainbed"),
        ([CUT, GIVEN], {"cut": "domainbed", "erm": "domainbed"}, "domainbed"),
        ([MIXED, GIVEN], {"linear_probe": "none", "head": "none", "erm": "domainbed"},
         f"none of linear_probe / head and domainbed of erm{WHY}"),
        ([MIXED, ("counts: any", "counts: any, train_augmentation: none")],
         {"linear_probe": "none", "head": "none", "erm": "none"}, "none"),
        ([MIXED, ("workers: 0", "workers: 0, views: 2")],
         {"linear_probe": "none", "head": "domainbed", "erm": "domainbed"},
         "none of linear_probe and domainbed, 2 cached views per image of head and domainbed of erm"),
        ([("[erm]", "[erm, linear_probe]")], {"erm": "domainbed", "linear_probe": "none"},
         "domainbed of what trains on images"),
    ],
)  # fmt: skip
def test_the_default_follows_each_row(changes, expected, line):
    checked = recipe(*changes)
    for one in (checked, check(parse(checked.as_yaml(), "written.yaml"))):
        assert {item.label: one.augmentation_of(item) for item in one.methods} == expected
        assert f"augmentation: {line}" in describe(make_plan(one, read_data(one))).splitlines()


@pytest.mark.slow
def test_a_row_trains_beside_others_as_it_does_alone(tmp_path, caplog):
    caplog.set_level("INFO", "xdm_ft")
    mixed = results(tmp_path, MIXED)
    said = [line for line in caplog.messages if line.startswith("augmentation: ")]
    assert said == [f"augmentation: none of linear_probe / head and domainbed of erm{WHY}"]
    rows = {row["method"]: row for row in mixed["summary"]}
    assert {name: row["augmentation"] for name, row in rows.items()} == {
        "linear_probe": "none", "head": "none", "erm": "domainbed",
    }  # fmt: skip
    assert all(
        "; augmentation none of linear_probe / head and domainbed of erm; " in r["protocol"] for r in rows.values()
    )
    listed = {row["method"]: row["augmentation"] for row in csv.DictReader((tmp_path / TABLE).read_text().splitlines())}
    assert listed == {"linear_probe": "none", "head": "none", "erm": "domainbed"}
    alone = results(tmp_path, ("name: small", "name: alone"))
    assert alone["recipe"]["data"]["train_augmentation"] == "domainbed"
    frozen = results(tmp_path, FROZEN, ("name: small", "name: frozen"), ("[erm]", "[{name: erm, label: head}]"))
    assert frozen["recipe"]["data"]["train_augmentation"] == "none"
    for found in (alone, frozen):
        [one] = found["runs"]
        [same] = [run for run in mixed["runs"] if run["method"] == one["method"]]
        assert [same["selected"][rule]["metrics"] for rule in one["selected"]] == [
            pick["metrics"] for pick in one["selected"].values()
        ]


@pytest.mark.slow
def test_a_run_of_a_version_without_augmentation_beside_cached_features_resumes_and_grows(tmp_path, caplog):
    """Its results.json says none for all rows, as that of a recipe that sets none does."""
    caplog.set_level("INFO", "xdm_ft")
    before = results(tmp_path, MIXED, ("counts: any", "counts: any, train_augmentation: none"))
    assert before["recipe"]["data"]["train_augmentation"] == "none"
    again = results(tmp_path, MIXED)
    assert again["runs"] == before["runs"] and again["summary"] == before["summary"]
    assert "data.train_augmentation: none for all methods, as when this run started" in caplog.messages
    grown = results(tmp_path, (MIXED[0], MIXED[1].replace("erm]", "erm, rsc]")))
    assert grown["runs"][:-1] == before["runs"] and grown["summary"][-1]["augmentation"] == "none"
    with pytest.raises(UserError, match=r"data\.train_augmentation"):
        run(recipe(MIXED, GIVEN))


@pytest.mark.slow
@pytest.mark.parametrize("first", ["[erm]", "[{name: erm, label: head, trainable: false}]"])
def test_a_run_grows_by_rows_that_have_another_default(first, tmp_path, monkeypatch):
    checkpoints, checkpoint = {}, RunDirectory.checkpoint

    def watched(directory, name, about, *rest):
        checkpoints.setdefault(name, []).append(about["recipe"])
        return checkpoint(directory, name, about, *rest)

    monkeypatch.setattr(RunDirectory, "checkpoint", watched)
    monkeypatch.setattr("xdm_ft.experiment.pieces.own_cores", lambda: 1)  # a fork's checkpoints would not be seen here
    before = results(tmp_path, ("[erm]", first))
    [trained] = (tmp_path / "output" / "small" / "models").rglob("train_val.safetensors")
    trained.unlink()  # it is trained again, and its checkpoint, if it had one, would be read
    grown = results(tmp_path, MIXED)
    assert grown["recipe"]["data"]["train_augmentation"] is None
    rows = {row["method"]: row["augmentation"] for row in grown["summary"]}
    assert rows == {"linear_probe": "none", "head": "none", "erm": "domainbed"}
    old = before["summary"][0]
    assert old["mean"] in [row["mean"] for row in grown["summary"] if row["method"] == old["method"]]
    twice = [recipes for recipes in checkpoints.values() if len(recipes) > 1]
    assert twice and all(one == other for one, other in twice)


@pytest.mark.slow
def test_methods_on_cached_features_are_not_said_to_be_augmented(tmp_path):
    mixed = results(tmp_path, ("[erm]", "[erm, linear_probe]"))
    lines = [row["protocol"] for row in mixed["summary"]]
    assert lines and all("; augmentation domainbed of what trains on images; " in line for line in lines)
    frozen = results(tmp_path, ("trainable: true", "trainable: false"), ("name: small", "name: frozen"))
    assert "; no augmentation; " in frozen["summary"][0]["protocol"]


@pytest.mark.slow
@pytest.mark.parametrize("trainable", ["true", "false"])
def test_class_balanced_and_class_weights_in_a_whole_run(trainable, tmp_path):
    found = results(
        tmp_path,
        ("trainable: true", f"trainable: {trainable}"),
        ("batch_size: 4", "batch_size: 4, sampler: class_balanced, class_weights: balanced"),
    )
    weight = weights(tmp_path, found)["class_weight"]
    # 7 classes of 4 images in three domains, a fifth of which validates; two dogs were taken away
    plan = make_plan(recipe(), read_data(recipe()))
    labels = plan.annotations.labels[torch.cat(plan.models[0].split.train)]
    count = labels.bincount()
    assert count[0] < count[1]
    torch.testing.assert_close(weight, (len(labels) / (7 * count)).float())


def test_the_plan_counts_the_images_of_a_class_balanced_step():
    checked = recipe(("batch_size: 4", "batch_size: 4, sampler: class_balanced"))
    assert "encoder: 24 images forward and backward" in describe(make_plan(checked, read_data(checked)))


FROZEN = ("trainable: true", "trainable: false")
VIEWS = ("{dir: cache, workers: 0}", "{dir: cache, workers: 0, views: 2}")


@pytest.mark.slow
def test_views_reach_the_training_and_the_protocol_line(tmp_path):
    viewed = results(tmp_path, FROZEN, VIEWS, ("[erm]", "[erm, linear_probe]"))
    plain = results(tmp_path, FROZEN, ("name: small", "name: plain"), ("[erm]", "[erm, linear_probe]"))
    lines = [row["protocol"] for row in viewed["summary"]]
    assert lines and all(
        "; augmentation domainbed, 2 cached views per image of what trains by gradient steps; " in line
        for line in lines
    )
    assert all("; no augmentation; " in row["protocol"] for row in plain["summary"])
    assert viewed["recipe"]["features"]["views"] == 2 and plain["recipe"]["features"]["views"] == 0
    weight = {
        (name, run["method"]): load_file(
            tmp_path / "output" / name / run["selected"]["train_val"]["weights"]
        )["head.weight"]
        for name, found in (("small", viewed), ("plain", plain))
        for run in found["runs"]
    }  # fmt: skip
    assert not torch.equal(weight["small", "erm"], weight["plain", "erm"])
    assert torch.equal(weight["small", "linear_probe"], weight["plain", "linear_probe"])
    alone = results(tmp_path, FROZEN, VIEWS, ("name: small", "name: alone"))
    assert "; augmentation domainbed, 2 cached views per image; " in alone["summary"][0]["protocol"]


def test_a_run_without_views_does_not_go_on_with_them(tmp_path):
    results(tmp_path, FROZEN)
    with pytest.raises(UserError, match=r"features\.views"):
        run(recipe(FROZEN, VIEWS))


def test_the_plan_counts_the_passes_of_views():
    checked = recipe(FROZEN, VIEWS)
    images = len(read_data(checked))
    expected = f"encoder: 3 passes (1 plain, 2 augmented) over {images} images unless their features are cached"
    assert expected in describe(make_plan(checked, read_data(checked))).splitlines()
    assert f"encoder: one pass over {images} images" in describe(make_plan(recipe(FROZEN), read_data(checked)))


@pytest.mark.parametrize(
    ("changes", "key", "problem"),
    [
        ([FROZEN, VIEWS, ("counts: any", "counts: any, train_augmentation: none")],
         "data.train_augmentation", "none gives no views to cache; set domainbed"),
        ([FROZEN, VIEWS, ("{name: pacs, root: data, counts: any}", "{name: camelyon17}"), ("[sketch]", "[hospital 2]")],
         "data.train_augmentation", "none, the default of this data set, gives no views"),
        ([VIEWS], "features.views", "no effect with encoder.trainable: true"),
        ([FROZEN, VIEWS, ("[erm]", "[linear_probe]")], "features.views", "no effect on methods without gradient"),
        ([FROZEN, ("counts: any", "counts: any, train_augmentation: domainbed")],
         "data.train_augmentation", "no effect with a frozen encoder"),
        ([FROZEN, (VIEWS[0], "{dir: cache, views: -1}")], "features.views", "greater than or equal to 0"),
    ],
)  # fmt: skip
def test_views_that_do_not_fit_the_recipe_are_refused(changes, key, problem):
    with pytest.raises(UserError) as refused:
        recipe(*changes)
    [line] = str(refused.value).splitlines()
    assert f": {key}: " in line and problem in line


@pytest.mark.parametrize("given", ["", ", train_augmentation: domainbed"])
def test_views_take_the_data_sets_augmentation_or_the_one_given(given):
    checked = recipe(FROZEN, VIEWS, ("counts: any", f"counts: any{given}"))
    assert checked.train_augmentation == checked.resolved()["data"]["train_augmentation"] == "domainbed"
