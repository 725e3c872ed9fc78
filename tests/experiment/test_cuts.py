"""Rows that train a part of the encoder: which activations are cached, and with which learning rate they train."""

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from small_runs import RECIPE, recipe, results

from xdm_ft.cli import doctor
from xdm_ft.cli.validate import validate
from xdm_ft.experiment.final_fit import combine
from xdm_ft.experiment.plan import find_searched, hparams, make_plan, read_data
from xdm_ft.experiment.prepare import (
    build_encoders,
    cached_cuts,
    check_low_rank,
    cuts_of,
    prepare,
)
from xdm_ft.experiment.results import inputs, refuse_other_inputs
from xdm_ft.experiment.work import launched
from xdm_ft.recipe.check import load
from xdm_ft.runtime.errors import UserError
from xdm_ft.training.end_to_end import train

pytestmark = pytest.mark.usefixtures("small_pacs")
BLOCK = "{name: erm, trainable: {blocks: 1}}"
LORA = "{name: erm, label: lora, trainable: {lora: {rank: 2, blocks: 1}}}"
TWO = "{name: erm, label: two, trainable: {blocks: 2}}"
ONE_CUT = f"methods=[{BLOCK}, {LORA}]"
DRAWN = "data.train_augmentation=domainbed"
SHAPE, IMAGES = (5, 64), 112  # tokens × width of test_vit at 32 px
BYTES = IMAGES * 5 * 64 * 4


def cuts(*overrides, earlier=None):
    made = recipe(*overrides)
    encoder, cpu = build_encoders(made)[1][None], torch.device("cpu")
    return cuts_of(made, encoder, made.methods, read_data(made), cpu, None, earlier)


def free(monkeypatch, size):
    usage = shutil.disk_usage(".")._replace(free=size)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)


def test_methods_at_one_place_share_a_cut():
    one, two = cuts(f"methods=[{BLOCK}, {LORA}, {TWO}]")
    assert one.below.cut.shape == two.below.cut.shape == SHAPE
    assert len(one.serves) == 2 and len(two.serves) == 1
    assert one.bytes == one.missing_bytes == BYTES
    assert f"before model.blocks.5: activations 5×64, cached: {IMAGES} of them" in one.text()
    assert cuts("methods=[erm]") == []
    assert cuts(ONE_CUT, "features.precision=bf16")[0].bytes == BYTES / 2
    assert cuts(ONE_CUT, "features.views=2", DRAWN)[0].bytes == 3 * BYTES


def test_auto_takes_half_of_the_free_disk(monkeypatch):
    free(monkeypatch, 2 * BYTES)
    assert [cut.is_cached for cut in cuts(ONE_CUT)] == [True]
    # both cuts together do not fit, so the second one is computed
    assert [cut.is_cached for cut in cuts(f"methods=[{BLOCK}, {TWO}]")] == [True, False]
    free(monkeypatch, 2 * BYTES - 1)
    (cut,) = cuts(ONE_CUT)
    assert not cut.is_cached and "features.cut: auto, as 0.1 MB do not fit in half of the 0.3 MB" in cut.text()
    assert cuts(ONE_CUT, "features.cut=cache")[0].is_cached
    assert "features.cut: compute" in cuts(ONE_CUT, "features.cut=compute")[0].text()


def test_auto_computes_draws_that_no_view_caches_and_writes_only_where_it_may(monkeypatch):
    (cut,) = cuts(ONE_CUT, DRAWN)
    assert not cut.is_cached and "train_augmentation: domainbed draws anew" in cut.why_computed
    assert cuts(ONE_CUT, DRAWN, "features.views=1")[0].is_cached
    Path("cache").mkdir()
    monkeypatch.setattr("xdm_ft.experiment.prepare.is_writable", lambda folder: False)
    assert "cache cannot be written" in cuts(ONE_CUT)[0].why_computed


@pytest.mark.slow
def test_a_resumed_run_follows_its_decision(monkeypatch):
    def prepared(environment=None):
        made = recipe(ONE_CUT)
        with launched(made) as accelerator:
            dataset = read_data(made)
            done = prepare(made, dataset, build_encoders(made)[1], accelerator, environment)
            return done.encoders[None].activations.values(), inputs(dataset, done)

    with monkeypatch.context() as full:
        free(full, 1000)
        activations, computed = prepared()
        assert {*activations} == {None} and [*computed["features"]["cuts"].values()] == [None]
    assert prepared(computed)[1] == computed
    (block, lora), cached = prepared()
    assert block is not None and block is lora and not block.in_memory
    assert [*cached["features"]["cuts"].values()] == [block.key]
    with pytest.raises(UserError, match=r"run: .* have changed since this run started \(features\.cuts\."):
        refuse_other_inputs(Path("run"), computed, cached)
    free(monkeypatch, 1000)
    assert prepared(cached)[1] == cached
    # a method that joins the run at the same cut reads what the others read
    joined = cuts(ONE_CUT, earlier=dict.fromkeys(cached["features"]["cuts"], False))
    assert [cut.is_cached for cut in joined] == [False]


def test_decisions_of_several_encoders():
    features = {"small": {"key": "a", "cuts": {"blocks.1": "b", "blocks.2": None}}, "large": {"key": "c"}}
    assert cached_cuts({"features": features}, "small") == {"blocks.1": True, "blocks.2": False}
    assert cached_cuts({"features": features}, "large") == cached_cuts({}, None) == cached_cuts(None, "small") == {}
    assert cached_cuts({"features": features["small"]}, None) == {"blocks.1": True, "blocks.2": False}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["methods=[{name: erm, trainable: {blocks: 7}}]"], r"^trainable: blocks: 7 is more than the 6 blocks"),
        (
            ["methods=[{name: mixstyle, trainable: {blocks: 1}}]"],
            r"model\.blocks\.0, which lies below the cut",
        ),
        (
            ["methods=[{name: erm, trainable: {lora: {targets: nowhere}}}]"],
            r'^trainable\.lora\.targets: .*"nowhere"',
        ),
        (
            [ONE_CUT, DRAWN, "features.cut=cache"],
            r"train_augmentation: .*no effect with cached activations.*features\.cut: comp",
        ),
        (["methods=[sam]", "sam.encoder_lr=1e-4"], "unknown key"),
    ],
)
def test_what_can_not_train_is_refused_in_one_line_before_all_else(overrides, expected):
    with pytest.raises(UserError, match=expected) as refused:
        made = recipe(*overrides)
        check_low_rank(*build_encoders(made))
    assert "\n" not in str(refused.value)


def test_layer_decay_without_known_blocks_is_refused_before_all_else(monkeypatch):
    monkeypatch.setattr("xdm_ft.encoders.timm.Timm.block_candidates", lambda self: [])
    item = "methods=[{name: erm, trainable: true}]"
    build_encoders(recipe(item))
    with pytest.raises(UserError, match=r"^training\.layer_decay: the blocks of the encoder are not known"):
        build_encoders(recipe(item, "training.layer_decay=0.5"))


@pytest.mark.slow
def test_validate_prints_what_cuts_take_and_save(monkeypatch):
    done = validate(recipe(ONE_CUT))
    text, (cut,) = done.text(), done.document["cuts"]
    assert "#   last 1 block trained, LoRA of rank 2 in the last 1 block: cut before model.blocks.5" in text
    assert "% of the encoder's forward pass lies below; a step of 12 images: computed " in text
    assert "#   model.blocks.5: activation 5×64, " in text and text.count("#   model.blocks.") == 6
    assert (cut["before"], cut["shape"], cut["bytes"]) == ("model.blocks.5", SHAPE, BYTES)
    assert cut["missing_bytes"] == cut["bytes"] and cut["is_cached"] and cut["problem"] is None
    assert 0 < cut["share_below"] < 1 and 0 < cut["cached_step_seconds"] < cut["computed_step_seconds"]
    speed = cut["images_per_second"]
    assert speed["whole"] == pytest.approx((1 - cut["share_below"]) * (1 / (1 / speed["whole"] - 1 / speed["below"])))
    assert not list(Path("cache").glob("*/*")), "no store is made"
    plain = validate(recipe("methods=[erm]"))
    assert plain.document["cuts"] == plain.document["blocks"] == [] and "cut" not in plain.text().split("# plan")[1]

    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("xdm_ft.experiment.estimate.image_seconds", broken)
    done = validate(recipe(ONE_CUT))
    assert "its saving could not be measured (RuntimeError: no such kernel)" in done.text()
    assert done.document["cuts"][0]["share_below"] is None


@pytest.mark.slow
def test_doctor_counts_the_disk_for_cuts(monkeypatch):
    recipe()

    def findings(*overrides):
        checks = doctor.main(Namespace(recipe="small.yaml", overrides=[*overrides], json=True)).document["checks"]
        return "\n".join(f"{'ok' if one['ok'] else 'FAULT'} {one['check']}: {one['found']}" for one in checks)

    both = f"methods=[{{name: erm, label: head}}, {BLOCK}]"
    lines = findings(both)
    assert f"ok features: 0 of {IMAGES} cached" in lines
    assert f"ok activations, last 1 block trained: 0 of {IMAGES} cached, 0.1 MB more are needed" in lines
    assert "computed at every step (features.cut: compute)" in findings(ONE_CUT, "features.cut=compute")
    free(monkeypatch, IMAGES * 64 * 4 + BYTES - 1)
    lines = findings(both, "features.cut=cache")
    assert "disk is full" in lines and "FAULT cache: " in lines and f"features: 0 of {IMAGES}" in lines


# `encoder_lr` of a row

LOW_RANK = "{lora: {rank: 2, blocks: 1}}"
ITEMS = (
    "erm, {name: erm, label: block, trainable: {blocks: 1}}, "
    f"{{name: erm, label: low rank, trainable: {LOW_RANK}, encoder_lr: 3.0e-4}}, "
    "{name: sam, label: all, trainable: true}"
)
ROWS, ONE = f"methods=[{ITEMS}]", "protocol.test_domains=[photo]"
SEARCH = "search={trials: 40, preset: domainbed, sampler: sobol}"


def rates(made):
    """{row: encoder_lr of its trials} of the plan; the values in results.json are the same."""
    by_row = {}
    for model in make_plan(made, read_data(made)).models:
        values = hparams(model.item, model.training)
        if model.item.trainable is not False:
            assert values["encoder_lr"] == model.training.encoder_lr
            by_row.setdefault(model.item.label, []).append(model.training.encoder_lr)
        else:
            assert "encoder_lr" not in values
    return by_row


def test_a_row_has_its_own_rate_and_the_others_the_recipes():
    assert rates(recipe(ROWS, ONE)) == {"block": [5e-5], "low rank": [3e-4], "all": [5e-5]}
    over = recipe(ROWS, ONE, "training.encoder_lr=1e-6", "all.encoder_lr=2e-5", "low rank.encoder_lr=1e-3")
    assert rates(over) == {"block": [1e-6], "low rank": [1e-3], "all": [2e-5]}


def test_several_encoders_of_which_one_trains():
    """The key is refused only where no row of the item trains an encoder."""
    one = "{name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}"
    lines = [line for line in RECIPE.splitlines() if not line.startswith("encoder:")]
    lines.append(f"encoders: [{one}, label: frozen}}, {one}, label: trained, trainable: true}}]")
    Path("two.yaml").write_text("\n".join(lines))
    assert rates(load("two.yaml", ["methods=[{name: erm, encoder_lr: 2.0e-4}]", ONE])) == {"erm @ trained": [2e-4]}


def test_a_search_draws_rates_of_low_rank_updates_from_their_own_range():
    made = recipe(f"methods=[{ITEMS}, {{name: erm, label: free, trainable: {LOW_RANK}}}]", ONE, SEARCH)
    drawn, items = rates(made), {item.label: item for item in made.methods}
    assert {*drawn["low rank"]} == {3e-4}, "a rate that an item has is not drawn"
    assert drawn["free"][0] == drawn["block"][0] == 5e-5, "the first trial has the recipe's own values"
    for row, low, high in (("free", 1e-4, 10**-2.5), ("block", 1e-5, 10**-3.5)):
        assert low <= min(drawn[row][1:]) < 1.3 * low and 0.79 * high < max(drawn[row][1:]) <= high
        assert dict(find_searched(made, items[row]))["encoder_lr"].log_uniform == (low, high)
    assert "encoder_lr" not in dict(find_searched(made, items["low rank"]))
    assert "encoder_lr" not in combine(made, items["low rank"], [{"encoder_lr": 3e-4}])
    own = recipe(ROWS.replace(", encoder_lr: 3.0e-4", ""), ONE, SEARCH, "search.space={encoder_lr: {choice: [0.5]}}")
    assert {*rates(own)["low rank"][1:]} == {0.5}, "a range of the recipe's own is kept"


@pytest.mark.slow
def test_a_run_and_its_final_fit_have_the_rate_of_the_row(monkeypatch):
    seen, optimizer_of = [], train.optimizer_of

    def noted(inner, training):
        optimizer = optimizer_of(inner, training)
        seen.append({group["initial_lr"] for group in optimizer.param_groups})
        return optimizer

    monkeypatch.setattr(train, "optimizer_of", noted)
    item = f"methods=[{{name: erm, trainable: {LOW_RANK}, encoder_lr: 3.0e-4}}]"
    content = results(item, "training.steps=2", ONE, "protocol.final_fit=true")
    assert seen == [{3e-4, 0.05}] * 2
    values = [*(record["hparams"] for record in content["runs"]), content["final_fit"]["hparams"]]
    values += content["recipe"]["methods"]
    assert [value["encoder_lr"] for value in values] == [3e-4] * 3
