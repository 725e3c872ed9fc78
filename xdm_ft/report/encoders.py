"""The encoders of a run: what each is and costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xdm_ft.evaluation.records import split_label
from xdm_ft.report.costs import bytes_text, count_text
from xdm_ft.report.table_rows import EMPTY, Results, ResultTable, encoder_label, items, several_encoders

ENCODER_COLUMNS = ("encoder", "model", "pre-training", "width", "parameters", "ms per image", "features on disk")


def encoders_of(results: Results) -> Mapping[str, Mapping[str, Any]]:
    """Returns {label: what the encoder is and costs}; empty if an earlier version wrote the results."""
    found: Mapping[str, Mapping[str, Any]] = results.get("environment", {}).get("encoders", {})
    return found


def split_row(label: str, results: Results) -> tuple[str, str | None]:
    """Returns the method of a row, and the label of its encoder; None in a run of one encoder."""
    return split_label(label, several_encoders(results))


def item_of(label: str, results: Results) -> Mapping[str, Any]:
    """Returns the item of the recipe that made a row; {} if the recipe has none."""
    return items(results).get(label, {})


def encoder_block(label: str, results: Results) -> Mapping[str, Any]:
    """Returns the block of the recipe that describes the encoder of a row; {} if the recipe has none."""
    recipe, own = results["recipe"], split_row(label, results)[1]
    blocks: list[Mapping[str, Any]] = recipe.get("encoders") or []
    return next((block for block in blocks if encoder_label(block) == own), recipe.get("encoder") or {})


def trainable_of(label: str, results: Results) -> Any:
    """Returns how much of its encoder a row trains, as in a recipe: the method's own value, else the encoder's."""
    own = item_of(label, results).get("trainable")
    if any(run["method"] == label and run.get("gradient_evaluations") == 0 for run in results["runs"]):
        return False  # a solver, which reads the features of the frozen encoder
    return encoder_block(label, results).get("trainable", False) if own is None else own


def trained_words(trainable: Any) -> str:
    """Returns how much of an encoder trains, in words."""
    if not isinstance(trainable, Mapping):
        return "end to end" if trainable else "frozen"
    if "lora" not in trainable:
        return f"last {_blocks(trainable['blocks'])}"
    lora = trainable["lora"]
    where = f" in the last {_blocks(lora['blocks'])}" if lora.get("blocks") else ""
    return f"LoRA of rank {lora['rank']}{where}"


def _blocks(count: int) -> str:
    return "block" if count == 1 else f"{count} blocks"


def encoder_table(results: Results) -> ResultTable | None:
    """Returns what the encoders are and cost; None if it is not known."""
    found = encoders_of(results)
    if not found:
        return None
    rows = tuple((label, *encoder_cells(about)) for label, about in found.items())
    about = (("Costs", "milliseconds to encode one image on this machine; bytes of the cached features of all images"),)
    return ResultTable("Encoders", about, ENCODER_COLUMNS, rows, level=3, labels=3)


def encoder_cells(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a cell for each of `ENCODER_COLUMNS` but the first."""
    named = f"{about['component']} {about['model'] or ''}".rstrip()
    speed = EMPTY if about["ms_per_image"] is None else f"{about['ms_per_image']:.3g}"
    sizes = count_text(about["parameters"]), speed, bytes_text(about["feature_bytes"])
    return named, about["pretraining"], str(about["width"]), *sizes
