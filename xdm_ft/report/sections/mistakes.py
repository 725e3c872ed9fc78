"""The most confident mistakes as small images. Only where the recipe or the user wants images in the page."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xdm_ft.evaluation.records import Held, set_name
from xdm_ft.report.finished import Run
from xdm_ft.report.pooled import confidences
from xdm_ft.report.section import Section, Thumbnail
from xdm_ft.runtime.errors import UserError, plural

if TYPE_CHECKING:
    from PIL import Image

    from xdm_ft.images.dataset import ImageDataset

EACH = 6  # images per held-out set
SIDE = 96  # pixels of the longer side, at most
SEEDS = 5  # models per held-out set whose mistakes are looked at, at most


@dataclass(frozen=True)
class Mistake:
    """A test image and the wrong class that the models were most sure of."""

    held: Held
    name: str  # in the data
    row: int  # of the data set, when the run was made
    label: int
    predicted: int
    confidence: float  # the mean over the models that were wrong
    wrong: int  # models that were wrong
    models: int


def section(run: Run) -> Section | None:
    """None if no mistake is known, or without `report.images`: then neither image nor file name stands in the page.

    Where the data can not be opened, the section says why and shows no image.
    """
    method = run.shown_method if run.shows_images else None
    mistakes = [one for held in run.shown_sets(method) for one in _worst(run, method or "", held)]
    if not mistakes:
        return None
    thumbnails, missing = _thumbnails(run, mistakes)
    return Section(
        id="mistakes",
        title="The most confident mistakes",
        about=f"Of {method}, per held-out domain: the images of which its models were wrong with the most confidence, "
        "summed over seeds. Look for wrong labels, for images that belong to no class, and for what misled the model.",
        thumbnails=thumbnails,
        notes=[missing] if missing else [],
    )


def _worst(run: Run, method: str, held: Held) -> list[Mistake]:
    records = [record for record in run.picked if record.key[:2] == (method, held)][:SEEDS]
    sure, predicted = [], []  # confidence in a wrong class, 0 where the model was right; both [models][n]
    for record in records:
        prediction = run.prediction(record)
        confidence = confidences(prediction)
        if confidence is None:
            return []
        sure.append(np.where(prediction.predicted != prediction.images.labels, confidence, 0.0))
        predicted.append(prediction.predicted)
    images, total = run.images(records[0]), np.sum(sure, axis=0)
    counts, most = np.count_nonzero(sure, axis=0), np.argmax(sure, axis=0)
    names = run.image_names(records[0])
    places = [int(place) for place in np.argsort(-total, kind="stable")[:EACH] if total[place] > 0]
    return [
        Mistake(
            held=held,
            name=names[place],
            row=int(images.rows[place]),
            label=int(images.labels[place]),
            predicted=int(predicted[most[place]][place]),
            confidence=float(total[place] / counts[place]),
            wrong=int(counts[place]),
            models=len(records),
        )
        for place in places
    ]


def _thumbnails(run: Run, found: list[Mistake]) -> tuple[list[Thumbnail], str]:
    """The images that can be read, and a sentence on the others; empty if there is none."""
    from xdm_ft.data import load_dataset, rows_by_name
    from xdm_ft.images.decode import UnreadableImage

    try:
        dataset = load_dataset(run.results["recipe"]["data"])
    except UserError as error:
        return [], f"No image can be shown, because the data can not be read now: {error}"
    rows = rows_by_name(dataset, {one.name: one.row for one in found})
    made = []
    for one in found:
        try:
            if one.name in rows:
                made.append(_thumbnail(run, dataset, one, rows[one.name]))
        except UnreadableImage:
            continue  # counted below
    left = len(found) - len(made)
    return made, f"{plural(left, 'image')} can not be read now." if left else ""


def _thumbnail(run: Run, dataset: ImageDataset, one: Mistake, row: int) -> Thumbnail:
    label, predicted = run.class_names[one.label], run.class_names[one.predicted]
    where = set_name(one.held)
    sure = f"{predicted}, {100 * one.confidence:.0f}% sure"
    if one.wrong < one.models:
        sure += f" ({one.wrong} of {one.models} models)"
    return Thumbnail(
        jpeg=_jpeg(dataset.image(row)),
        alt=f"{where}: {label}, taken for {sure}",
        caption=(where, f"label: {label}", f"predicted: {sure}", one.name),
    )


def _jpeg(image: Image.Image) -> bytes:
    from PIL import Image

    image.thumbnail((SIDE, SIDE))
    bare = Image.new("RGB", image.size)  # without comments and other metadata, which Pillow would write too
    bare.paste(image)
    out = io.BytesIO()
    bare.save(out, "JPEG", quality=80, optimize=True)
    return out.getvalue()
