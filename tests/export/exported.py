"""Small runs and their models, for the tests of exported models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import small_runs
from safetensors.torch import load_file

from xdm_ft.cli.export import export_model
from xdm_ft.export.choose import Choice
from xdm_ft.export.predictor import Model, load

RUN, DATA = Path("output/small"), Path("data/PACS")
CLIP = "encoder={name: open_clip, model: demo, weights: demo, normalize: true}"
LAST = "{name: erm, label: last, trainable: {blocks: 1}}"
END_TO_END = ("encoder.trainable=true", "training.steps=2")


def run(*overrides: str) -> dict[str, Any]:
    """results.json of a small run with photo held out."""
    return small_runs.results("protocol.test_domains=[photo]", *overrides)


def held_out() -> list[str]:
    """The paths of the test images, in the order of stored predictions."""
    images = load_file(RUN / "test_images/photo.safetensors")
    return [str(DATA / name) for name in bytes(images["names"].tolist()).decode().split("\n")]


def recorded(record: dict[str, Any]) -> np.ndarray:
    """The probabilities that the run has stored, float32 [n,C]."""
    weights = RUN / record["selected"]["train_val"]["weights"]
    return load_file(weights.with_name("predictions.safetensors"))["train_val.probabilities"].numpy()


def choice_of(record: dict[str, Any]) -> Choice:
    return Choice(record["method"], tuple(record["test_domains"]), record["seed"], record["trial"])


def exported(choice: Choice, target: str = "model", **how: Any) -> Model:
    """The model after an export and a load."""
    export_model(str(RUN), target, choice, **{"no_site": True, **how})
    return load(target)
