"""analysis.json: its content, and the entries that an earlier analysis has finished."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xdm_ft.evaluation.records import Identity
from xdm_ft.experiment.analysing.images import FROZEN, TRAINED, SplitImages
from xdm_ft.experiment.plan import Plan
from xdm_ft.report.finished import Run
from xdm_ft.runtime.errors import plural
from xdm_ft.storage.checksummed import Damaged
from xdm_ft.storage.run_directory import RunDirectory

logger = logging.getLogger("xdm_ft")
KIND = "analysis"  # of the lines that hold entries
DIGITS = 6  # significant digits of a number: rounding errors of other machines are beyond them
Json = dict[str, Any]


def finished_entries(directory: RunDirectory, wanted: Mapping[Identity, str]) -> dict[Identity, Json]:
    """Returns the entries of analysis.json and of an interrupted analysis, of which nothing has changed.

    `wanted`: {model: digest of all that its entry depends on}.
    """
    try:
        before = directory.analysis() or {}
    except Damaged as error:
        logger.warning("%s: is damaged (%s); it is written again", directory.path / "analysis.json", error)
        before = {}
    found = {}
    for one in (*before.get("models", ()), *directory.lines(KIND)):
        key = one["method"], tuple(one["test_domains"]), one["seed"], one["trial"]
        if wanted.get(key) == one.get("inputs"):
            found[key] = one
    return found


def document(
    run: Run,
    plan: Plan,
    entries: Sequence[Json],
    images: Mapping[tuple[tuple[str, ...], int, bool], SplitImages],
    notes: Sequence[str],
) -> Json:
    """Returns the content of analysis.json, without its checksum."""
    counts: dict[str, dict[str, int]] = {}  # of the first seed
    # if the recipe trains the encoder, those of models that do: solvers read cached features, of more images
    for group, of_split in sorted(images.items(), key=lambda item: item[0][2] == plan.recipe.trains_encoders):
        counts.setdefault(",".join(group[0]), of_split.counts())
    return {
        "schema": 1,
        "selection": run.own_rule,
        "seed": plan.recipe.protocol.seeds[0],
        "images": counts,
        "notes": [*_notes(plan, entries, images), *notes],
        "models": list(entries),
    }


def _notes(
    plan: Plan, entries: Sequence[Json], images: Mapping[tuple[tuple[str, ...], int, bool], SplitImages]
) -> Iterator[str]:
    held = "validation images of the training domains"
    if any(not of_split.own_validation for of_split in images.values()):
        held = "a part of the training images, as the split has no validation images of its training domains"
    yield f"invariances, importance and embeddings are measured on {held}"
    if on_features := [item for item in plan.recipe.methods if item.trainable is False]:
        which = " that leave it frozen" if plan.recipe.trains_encoders else ""
        under = " under one encoder" if len(plan.recipe.encoders) > 1 else ""
        alike = " and normalise them alike" if len({item.reads_normalized for item in on_features}) > 1 else ""
        yield (
            "frozen encoder: the features, and so the representation invariance, are the same for all methods"
            f"{which}{under}{alike}"
        )
    for used, limits, what in ((True, FROZEN, "on cached features"), (False, TRAINED, "that trains its encoder")):
        if any(frozen == used for *_, frozen in images):
            yield (
                f"images of a model {what}: at most {limits.training} for training, {limits.validation} for validation "
                f"and {limits.test} for testing, of more a sample with about as many of every domain"
            )
    if len(plan.recipe.protocol.seeds) > 1:
        yield "importance and embeddings: the first seed of each method and held-out domain"
    if any(one["domain_head"] == "fitted" for one in entries):
        yield (
            "a method without a domain head gets a linear one, fitted on training features; validation images pick "
            "its penalty"
        )
    if divergences := [one["divergence"] for one in entries if one["divergence"]]:
        n = sorted({level["n"] for levels in divergences for level in levels})
        sizes = str(n[0]) if len(n) == 1 else f"{n[0]} to {n[-1]}"
        yield (
            "divergence: of training images, augmented by the trained model in batches of a training step; the "
            f"unbiased MMD² compares original features of one half with augmented ones of the other, {sizes} of each; "
            f"the published measure batches of {divergences[0][0]['batch_size']} with their own augmented features"
        )
    if plan.recipe.search.trials > 1:
        yield f"search: of {plural(plan.recipe.search.trials, 'trial')} the one that the rule picked"


def plain(value: Any) -> Any:
    """Returns a value as JSON has it: lists, texts and rounded numbers; what is not finite becomes None."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value
