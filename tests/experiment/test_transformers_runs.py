"""Recipes with an encoder of transformers, from features to an exported model."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import small_runs
import tiny_transformers
from exported import choice_of, exported, held_out, recorded

from xdm_ft.cli.validate import validate
from xdm_ft.experiment import run
from xdm_ft.export.onnx import PACKAGES
from xdm_ft.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("small_pacs")


def encoder(kind: str, **keys: object) -> str:
    tiny_transformers.save(kind, Path(kind))
    written = ", ".join(f"{key}: {value}" for key, value in {"model": f"local-dir:{kind}", **keys}.items())
    return f"encoder={{name: transformers, {written}}}"


def check(results: dict, **how: object) -> None:
    """The exported model, loaded without the folder of its encoder, predicts what the run has recorded."""
    paths = held_out()
    for number, record in enumerate(results["runs"]):
        model = exported(choice_of(record), f"model-{number}", **how)
        np.testing.assert_allclose(model.predict_proba(paths), recorded(record), rtol=0, atol=1e-5)
        config = Path(f"model-{number}/config.json").read_text()
        assert "local-dir" not in config and str(Path.cwd()) not in config


@pytest.mark.slow
def test_frozen_dinov2_and_its_model() -> None:
    results = small_runs.results("protocol.test_domains=[photo]", encoder("dinov2", pooling="cls_mean"))
    assert {record["status"] for record in results["runs"]} == {"ok"}
    check(results)
    assert Path("model-0/encoder.safetensors").exists() and Path("model-0/dinov2_with_registers.json").exists()


@pytest.mark.slow
def test_zero_shot_and_heads_from_text_with_clip() -> None:
    methods = "methods=[zero_shot, {name: erm, head_init: zero_shot, label: from text}]"
    check(small_runs.results("protocol.test_domains=[photo]", encoder("clip", normalize="true"), methods))


@pytest.mark.slow
@pytest.mark.needs(*PACKAGES)
def test_siglip_end_to_end_to_onnx() -> None:
    keys = ("encoder.trainable=true", "training.steps=2", "methods=[erm]")
    results = small_runs.results("protocol.test_domains=[photo]", encoder("siglip"), *keys)
    check(results, onnx=True)
    assert Path("model-0/model.onnx").exists()


@pytest.mark.slow
def test_methods_that_need_text_are_skipped_if_the_model_has_none() -> None:
    """Only its weights show it; a recipe of such methods alone is one line before training."""
    why = r"class embeddings are needed, but .* has no text side"
    alone = small_runs.recipe("protocol.test_domains=[photo]", encoder("vit"), "methods=[zero_shot]")
    with pytest.raises(UserError, match=f"methods: zero_shot: {why}"):
        run(alone)
    assert validate(alone).exit_status == 2
    both = "protocol.test_domains=[photo]", encoder("vit"), "methods=[erm, zero_shot]"
    plan = validate(small_runs.recipe(*both)).text()
    assert re.search(f"(?m)^#   skipped: zero_shot: {why}", plan)
    results = small_runs.results(*both)
    assert [record["status"] for record in results["runs"]] == ["ok", "skipped"]
    assert re.match(why, results["runs"][1]["reason"])
    found = validate(small_runs.recipe("protocol.test_domains=[photo]", encoder("vit"), "methods=[erm]"))
    assert found.document["prompts"] is None
