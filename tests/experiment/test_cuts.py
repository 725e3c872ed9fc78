"""Which activations are cached: what the recipe and the disk decide, and what a run that goes on follows."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import recipe

from xdm_ft.cli import doctor
from xdm_ft.cli.validate import validate
from xdm_ft.experiment.machine import launched
from xdm_ft.experiment.plan import read_data
from xdm_ft.experiment.prepare import (
    Prepared,
    RecipeCut,
    build_encoders,
    cached_cuts,
    check_low_rank,
    cuts_of,
    prepare,
)
from xdm_ft.experiment.results import inputs, refuse_other_inputs
from xdm_ft.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("small_pacs")
CPU = torch.device("cpu")
BLOCK = "{name: erm, trainable: {blocks: 1}}"
LORA = "{name: erm, label: lora, trainable: {lora: {rank: 2, blocks: 1}}}"
TWO = "{name: erm, label: two, trainable: {blocks: 2}}"
ONE_CUT = f"methods=[{BLOCK}, {LORA}]"
SHAPE = (5, 64)  # tokens × width of test_vit at 32 px


def cuts(*overrides: str, earlier: dict[str, bool] | None = None) -> list[RecipeCut]:
    made = recipe(*overrides)
    return cuts_of(made, build_encoders(made)[None], made.methods, read_data(made), CPU, None, earlier)


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    usage = shutil.disk_usage(".")._replace(free=size)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)


def images() -> int:
    return len(read_data(recipe()))


def bytes_of(rows: int) -> int:
    return rows * SHAPE[0] * SHAPE[1] * 4


def test_methods_at_one_place_share_a_cut() -> None:
    one, two = cuts(f"methods=[{BLOCK}, {LORA}, {TWO}]")
    assert one.below.cut.shape == two.below.cut.shape == SHAPE
    assert len(one.serves) == 2 and len(two.serves) == 1
    assert one.bytes == one.missing_bytes == bytes_of(images())
    assert f"before model.blocks.5: activations 5×64, cached: {images()} of them" in one.text()
    assert cuts("methods=[erm]") == []
    halved, viewed = (
        cuts(ONE_CUT, "features.precision=bf16"),
        cuts(ONE_CUT, "features.views=2", "data.train_augmentation=domainbed"),
    )
    assert halved[0].bytes == one.bytes / 2 and viewed[0].bytes == 3 * one.bytes


def test_auto_takes_half_of_the_free_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = bytes_of(images())
    free(monkeypatch, 2 * needed)
    assert [cut.is_cached for cut in cuts(ONE_CUT)] == [True]
    # both cuts together do not fit, so the second one is computed
    first, second = cuts(f"methods=[{BLOCK}, {TWO}]")
    assert first.is_cached and not second.is_cached
    free(monkeypatch, 2 * needed - 1)
    (cut,) = cuts(ONE_CUT)
    assert not cut.is_cached and "features.cut: auto, as 0.1 MB do not fit in half of the 0.3 MB" in cut.text()
    assert cuts(ONE_CUT, "features.cut=cache")[0].is_cached
    assert "features.cut: compute" in cuts(ONE_CUT, "features.cut=compute")[0].text()


def test_auto_computes_draws_that_no_view_caches() -> None:
    drawn = "data.train_augmentation=domainbed"
    (cut,) = cuts(ONE_CUT, drawn)
    assert not cut.is_cached and "data.train_augmentation: domainbed draws anew" in cut.why_computed
    assert cuts(ONE_CUT, drawn, "features.views=1")[0].is_cached
    with pytest.raises(
        UserError, match=r"train_augmentation: .*no effect with cached activations.*features\.cut: comp"
    ):
        recipe(ONE_CUT, drawn, "features.cut=cache")


def test_auto_does_not_write_where_it_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("cache").mkdir()
    monkeypatch.setattr("xdm_ft.experiment.prepare.is_writable", lambda folder: False)
    assert "cache can not be written" in cuts(ONE_CUT)[0].why_computed


def prepared(overrides: Sequence[str], environment: dict[str, Any] | None = None) -> tuple[Prepared, dict[str, Any]]:
    made = recipe(*overrides)
    with launched(made) as accelerator:
        dataset = read_data(made)
        found = prepare(made, dataset, build_encoders(made), accelerator, environment)
        return found, inputs(dataset, found)


@pytest.mark.slow
def test_a_run_that_goes_on_follows_its_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("run")
    with monkeypatch.context() as full:
        free(full, 1000)
        first, computed = prepared([ONE_CUT])
        assert set(first.encoders[None].activations.values()) == {None}
        assert [*computed["features"]["cuts"].values()] == [None]
    assert prepared([ONE_CUT], computed)[1] == computed
    second, cached = prepared([ONE_CUT])
    block, lora = second.encoders[None].activations.values()
    assert block is not None and block is lora and not block.in_memory
    assert [*cached["features"]["cuts"].values()] == [block.key]
    with pytest.raises(UserError, match=r"run: .* have changed since this run started \(features\.cuts\."):
        refuse_other_inputs(path, computed, cached)
    free(monkeypatch, 1000)
    assert prepared([ONE_CUT], cached)[1] == cached
    # a method that joins the run at the same cut reads what the others read
    joined = cuts(f"methods=[{BLOCK}, {LORA}]", earlier=dict.fromkeys(cached["features"]["cuts"], False))
    assert [cut.is_cached for cut in joined] == [False]


def test_decisions_of_several_encoders() -> None:
    features = {"small": {"key": "a", "cuts": {"blocks.1": "b", "blocks.2": None}}, "large": {"key": "c"}}
    assert cached_cuts({"features": features}, "small") == {"blocks.1": True, "blocks.2": False}
    assert cached_cuts({"features": features}, "large") == cached_cuts({}, None) == cached_cuts(None, "small") == {}
    assert cached_cuts({"features": features["small"]}, None) == {"blocks.1": True, "blocks.2": False}


def test_an_encoder_that_can_not_be_cut_there_is_refused_before_all_else() -> None:
    made = recipe("methods=[{name: erm, trainable: {blocks: 7}}]")
    with pytest.raises(UserError, match=r"^trainable: blocks: 7 is more than the 6 blocks"):
        build_encoders(made)


@pytest.mark.parametrize(
    "item, expected",
    [
        ("{name: mixstyle, trainable: {blocks: 1}}", r"model\.blocks\.0, which lies below the cut"),
        ("{name: erm, trainable: {lora: {targets: nowhere}}}", r'^trainable\.lora\.targets: .*"nowhere"'),
    ],
)
def test_what_can_not_train_is_refused_before_all_else(item: str, expected: str) -> None:
    made = recipe(f"methods=[{item}]")
    with pytest.raises(UserError, match=expected):
        check_low_rank(made, build_encoders(made))


def test_layer_decay_without_known_blocks_is_refused_before_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xdm_ft.encoders.timm.Timm.block_candidates", lambda self: [])
    item = "{name: erm, trainable: true}"
    build_encoders(recipe(f"methods=[{item}]"))
    with pytest.raises(UserError, match=r"^training\.layer_decay: the blocks of the encoder are not known"):
        build_encoders(recipe(f"methods=[{item}]", "training.layer_decay=0.5"))


@pytest.mark.slow
def test_validate_says_what_cuts_take_and_save(monkeypatch: pytest.MonkeyPatch) -> None:
    found = validate(recipe(ONE_CUT))
    text, (cut,) = found.text(), found.document["cuts"]
    assert "#   last 1 block trained, LoRA of rank 2 in the last 1 block: cut before model.blocks.5" in text
    assert "% of the encoder's forward pass lies below; a step of 12 images: computed " in text
    assert "#   model.blocks.5: activation 5×64, " in text and text.count("#   model.blocks.") == 6
    assert (cut["before"], cut["shape"], cut["bytes"]) == ("model.blocks.5", SHAPE, bytes_of(images()))
    assert cut["missing_bytes"] == cut["bytes"] and cut["is_cached"] and cut["problem"] is None
    assert 0 < cut["share_below"] < 1 and 0 < cut["cached_step_seconds"] < cut["computed_step_seconds"]
    speed = cut["images_per_second"]
    assert speed["whole"] == pytest.approx((1 - cut["share_below"]) * (1 / (1 / speed["whole"] - 1 / speed["below"])))
    assert not list(Path("cache").glob("*/*")), "no store is made"
    plain = validate(recipe("methods=[erm]"))
    assert plain.document["cuts"] == plain.document["blocks"] == [] and "cut" not in plain.text().split("# plan")[1]


@pytest.mark.slow
def test_what_can_not_be_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("xdm_ft.experiment.estimate.image_seconds", broken)
    found = validate(recipe(ONE_CUT))
    assert "its saving could not be measured (RuntimeError: no such kernel)" in found.text()
    assert found.document["cuts"][0]["share_below"] is None


@pytest.mark.slow
def test_doctor_counts_the_disk_for_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("small.yaml").unlink(missing_ok=True)
    recipe()

    def findings(*overrides: str) -> list[str]:
        arguments = Namespace(recipe="small.yaml", overrides=[*overrides], json=True)
        checks = doctor.main(arguments).document["checks"]
        return [f"{'ok    ' if one['ok'] else 'FAULT '} {one['check']}: {one['found']}" for one in checks]

    both = f"methods=[{{name: erm, label: head}}, {BLOCK}]"
    lines = "\n".join(findings(both))
    assert f"ok     features: 0 of {images()} cached" in lines
    assert f"ok     activations, last 1 block trained: 0 of {images()} cached, 0.1 MB more are needed" in lines
    assert "computed at every step (features.cut: compute)" in "\n".join(findings(ONE_CUT, "features.cut=compute"))
    features = images() * 64 * 4
    free(monkeypatch, features + bytes_of(images()) - 1)
    lines = "\n".join(findings(both, "features.cut=cache"))
    assert "disk is full" in lines and "FAULT  cache: " in lines and f"features: 0 of {images()}" in lines
