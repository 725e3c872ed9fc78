"""What the predictions of the test images show: confusions, reliability, risk and coverage, confident mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xdm_ft.core import DomainSet, set_name
from xdm_ft.evaluation.metrics import recalls
from xdm_ft.report import Cell, Section, Table, Thumbnail, cells, make_section, metric_cell
from xdm_ft.report.charts import FULL_WIDTH, MUTED, WIDTH, Line, SeriesStyle, curves, heat_maps, looks
from xdm_ft.report.words import path_in_command, short
from xdm_ft.results.measured import ECE, MISTAKES, Mistake, Picked, Pool
from xdm_ft.results.run import Run
from xdm_ft.runtime.errors import UserError, plural

# ----------------------------------------------------------------------------------------------------------- confusions

MAX_PAIRS = 15  # most frequent confusions in the table
MAX_SMALL = 40  # classes of the small matrices of the other methods
MAX_METHODS = 16  # other methods


def confusion(run: Run) -> Section | None:
    """A matrix per held-out set of one method, and its most frequent confusions."""
    method = run.shown_method
    sets = run.shown_sets(method)
    if method is None or not sets:
        return None
    figures = []
    for i, held in enumerate(sets, 1):
        counts, title = _counts(run, method, held), f"{set_name(held)} held out"
        recall = np.nan_to_num(recalls(counts), nan=2.0)  # above any recall: never the lowest
        alt = (
            f"Confusion matrix of {method}, {title}: {100 * np.trace(counts) / counts.sum():.1f}% right; the lowest "
            f"recall is that of {run.class_names[int(recall.argmin())]}, {100 * recall.min():.1f}%."
        )
        figures.append(heat_maps(f"confusion-{i}", alt, {title: _shares(counts)}, run.class_names, small=len(sets) > 2))

    pairs = []
    for held in (held for held in run.held_out_sets if (method, held) in run.measured.pools):
        counts = _counts(run, method, held)
        shares = _shares(counts)
        np.fill_diagonal(shares, 0)
        for number in np.argsort(-shares, axis=None)[:MAX_PAIRS]:
            i, j = divmod(int(number), len(shares))
            share, models = float(shares[i, j]), run.measured.pools[method, held].models  # each counted the images
            images, of = (f"{count / models:.1f}".removesuffix(".0") for count in (counts[i, j], counts[i].sum()))
            sized = Cell(f"{100 * share:.1f}", share), Cell(f"{images} of {of}", counts[i, j] / models)
            held_out = [set_name(held)] if len(run.held_out_sets) > 1 else []
            pairs.append((share, cells(run.class_names[i], run.class_names[j], *held_out, *sized)))
    rows = [row for share, row in sorted(pairs, key=lambda pair: -pair[0])[:MAX_PAIRS] if share > 0]
    several = len(run.held_out_sets) > 1
    header = ["true class", "predicted as", *(["held-out domain"] if several else ()), "share of the class in %"]
    caption = f"The most frequent confusions of {method}, the mean over seeds."
    chosen = ", which the selection rule chose" if method == run.chosen else ""
    table = Table(caption, [*header, "images"], rows, labels=2 + several, folded=len(sets) > 1)
    return make_section(
        "confusion",
        figures,
        [table] if rows else [],
        method=method,
        chosen=chosen,
        not_drawn=_rest(run, sets),
    )


def other_confusions(run: Run) -> Section | None:
    """The matrices of the other methods, small."""
    methods = [row.method for row in run.drawn_rows if row.method != run.shown_method and run.shown_sets(row.method)]
    if not methods or len(run.class_names) > MAX_SMALL:
        return None
    figures = []
    for i, method in enumerate(methods[:MAX_METHODS], 1):
        counts = {set_name(held): _counts(run, method, held) for held in run.shown_sets(method)}
        right = [f"{title} {100 * np.trace(of) / of.sum():.1f}%" for title, of in counts.items() if of.sum()]
        alt, shares = f"Confusion matrices of {method}; right were: {', '.join(right)}.", map(_shares, counts.values())
        figures.append(heat_maps(f"confusion-others-{i}", alt, dict(zip(counts, shares, strict=True)), (), method))
    more = f" {len(methods) - MAX_METHODS} more methods are not drawn." if len(methods) > MAX_METHODS else ""
    return make_section("confusion-others", figures, more=more)


def _counts(run: Run, method: str, held: DomainSet) -> np.ndarray:
    return run.measured.pools[method, held].counts(len(run.class_names))


def _rest(run: Run, sets: Sequence[DomainSet]) -> str:
    """Returns a sentence if some sets are not drawn, else nothing."""
    count = len(run.held_out_sets)
    return f" Of {count} held-out sets, the {len(sets)} with the worst results are drawn." if len(sets) < count else ""


def _shares(counts: np.ndarray) -> np.ndarray:
    """Returns each row's counts as shares, 0 for classes without images."""
    return np.asarray(counts / np.maximum(counts.sum(1, keepdims=True), 1))


# ---------------------------------------------------------------------------------------------------------- reliability

RELIABILITY_COLUMNS = 4  # held-out sets beside each other
FEWEST_IMAGES = 10  # per seed, that a bin needs for a point: fewer say nothing
OTHERS = SeriesStyle(MUTED, "", "-", width=0.7)


def reliability(run: Run) -> Section | None:
    """Whether a probability means what it says, per held-out domain."""
    method = run.shown_method
    sets = run.shown_sets(method)
    if method is None or not sets:
        return None

    def drawn(pool: Pool) -> np.ndarray:
        """Returns confidence, accuracy and share of the images, in %, of bins that have enough of them: [bins,3]."""
        n, confidence, right = pool.bins.T
        kept = n >= FEWEST_IMAGES * pool.models
        return 100 * np.stack([confidence[kept] / n[kept], right[kept] / n[kept], n[kept] / n.sum()], 1)

    panels, captions = {}, []
    for held in sets:
        others = [pool for (name, on_set), pool in run.measured.pools.items()
                  if on_set == held and name != method]  # fmt: skip
        points = drawn(run.measured.pools[method, held])
        lines = [Line("", OTHERS, drawn(pool)[:, :2].tolist()) for pool in others]
        lines.append(
            Line(
                method,
                SeriesStyle(looks(run.drawn_methods)[method].colour),
                points[:, :2].tolist(),
                bars=points[:, ::2].tolist(),
            )
        )
        panels[f"{short(set_name(held), 22)} held out"] = lines
        n, confidence, right = run.measured.pools[method, held].bins.sum(0)
        captions.append(f"{set_name(held)}: mean confidence {100 * confidence / n:.1f}%, right {100 * right / n:.1f}%")
    columns = min(len(panels), RELIABILITY_COLUMNS)
    figure = curves(
        "reliability",
        f"Reliability of {method}",
        f"{'; '.join(captions)}.",
        panels,
        ("confidence in %", "right (line), images (bars) in %"),
        per_row=columns,
        diagonal=True,
        limits={"xmin": 0, "xmax": 102, "ymin": -2, "ymax": 102},
        width=WIDTH if len(panels) == 1 else FULL_WIDTH,
        height=3.2 if len(panels) == 1 else 0.4 + -(-len(panels) // columns) * (0.5 + 0.85 * FULL_WIDTH / columns),
    )
    models, rows = Picked(run.every, run.recipe_rule, run.metric), []
    for row in run.recipe_rows:
        spreads = [models.on(row.method, held, ECE) for held in run.held_out_sets]
        spreads += [models.mean(row.method, ECE)] if len(spreads) > 1 else []
        rows.append(cells(row.method, *(metric_cell(spread.mean, "ece") for spread in spreads)))
    caption = "Expected calibration error (ECE, 15 bins) in percentage points, the mean over seeds. Lower is better."
    names = [*map(set_name, run.held_out_sets), *(["mean"] if len(run.held_out_sets) > 1 else ())]
    table = Table(caption, ["method", *names], rows, folded=True)
    grey = "; grey lines are the other methods" if any(len(lines) > 1 for lines in panels.values()) else ""
    rest = _rest(run, sets)
    return make_section("reliability", [figure], [table], method=method, others=grey, not_drawn=rest)


# ---------------------------------------------------------------------------------------------------- risk and coverage

TARGETS = (0.8, 0.9, 0.95, 0.99)  # accuracies of the table
MAX_LINES = 8  # methods that are drawn: the chosen one, those that the recipe compares, and the first others
SMALLEST_SHARE = 0.005  # of the images, from which on a curve is drawn


def risk_coverage(run: Run) -> Section | None:
    """What share of the images can be answered at what accuracy, if the least confident ones go to a human."""
    by_method: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # coverage and accuracy from the highest threshold on
    for row in run.drawn_rows:
        pools = [pool for held in run.held_out_sets if (pool := run.measured.pools.get((row.method, held)))]
        if pools:
            # every held-out set weighs the same, as in the mean of the first table
            shares = sum(pool.by_level / pool.levels[1].sum() for pool in pools) / len(pools)  # [LEVELS,2]
            answered, right = np.cumsum(np.asarray(shares)[::-1], axis=0).T
            first = np.searchsorted(answered, 1e-12, "right")  # the first threshold that some image exceeds
            by_method[row.method] = answered[first:], right[first:] / answered[first:]
    if not by_method:
        return None

    rows = []
    for name, (answered, accuracy) in by_method.items():
        # the largest share whose answers are at least that accurate
        shares_at = [float(answered[accuracy >= target].max(initial=0)) for target in TARGETS]
        at = [Cell(f"{100 * share:.0f}" if share else "none", share) for share in shares_at]
        rows.append(cells(name, *at, Cell(f"{100 * accuracy[-1]:.1f}", float(accuracy[-1]))))
    header = ["method", *(f"{100 * target:.0f}% right" for target in TARGETS), "accuracy if all are answered"]
    table = Table(
        "Share of the images in % that can be answered with so many right answers.", header, rows, folded=True
    )

    drawn = [name for name in dict.fromkeys([run.shown_method, *by_method]) if name in by_method][:MAX_LINES]
    lines = []
    for name in filter(None, drawn):
        answered, accuracy = by_method[name]
        steps = np.searchsorted(answered, np.linspace(SMALLEST_SHARE, answered[-1], 200) - 1e-12)
        kept = np.unique(np.minimum(steps, len(answered) - 1))
        curve = [*zip(100 * answered[kept], 100 * accuracy[kept], strict=True)]
        lines.append(Line(name, looks(run.drawn_methods)[name], curve, button=name))
    figure = curves(
        "risk-coverage",
        "Accuracy of the answers against the share of images that are answered",
        "At the right every image is answered: this is the accuracy over all images.",
        {"": lines},
        ("images that are answered in %", "right answers in %"),
        limits={"xmin": 0, "xmax": 100},
        width=FULL_WIDTH,
        height=2.2,
    )
    fewer = len(drawn) < len(by_method)
    more = f" Drawn are {len(drawn)} of {len(by_method)} methods; the table has all." if fewer else ""
    return make_section("risk-coverage", [figure], [table], more=more)


# --------------------------------------------------------------------------------------------------- confident mistakes


class Shown(NamedTuple):
    """A mistake as an image of the page."""

    held: DomainSet
    name: str  # in the data
    row: int  # of the data set, when the run was made
    of: Mistake


def mistakes(run: Run) -> Section | None:
    """The most confident mistakes on each held-out set as small images; None if none is known, or without images.

    Without `report.images` neither image nor file name stands in the page: the section says how to see them. Where the
    data cannot be opened, it says why and shows no image.
    """
    method = run.shown_method
    sets = run.shown_sets(method)
    worst = {} if method is None else {held: _worst_mistakes(run, method, held) for held in sets}
    if not any(worst.values()) or not run.recipe.has_images:
        return None
    if not run.recipe.report.images:
        command = f"xdm-ft report {path_in_command(run.path)} --images"
        return make_section("mistakes-off", code=command, method=method, most=MISTAKES)
    by_set, missing = _thumbnails(run, [mistake for of in worst.values() for mistake in of])
    opened = {f"{set_name(held)}: {plural(len(images), 'image')}": images for held, images in by_set.items()}
    return make_section("mistakes", notes=[missing] if missing else [], thumbnails=opened, method=method)


def _worst_mistakes(run: Run, method: str, held: DomainSet) -> list[Shown]:
    record = next(record for record in run.measured_records if record.key[:2] == (method, held))
    names, rows = run.image_names(record), run.images(record).rows
    return [
        Shown(held, names[mistake.position], int(rows[mistake.position]), mistake)
        for mistake in run.measured.pools[method, held].mistakes
    ]


def _thumbnails(run: Run, worst: Sequence[Shown]) -> tuple[dict[DomainSet, list[Thumbnail]], str]:
    """Returns the images that can be read by held-out set, and a sentence on the others; empty if there is none."""
    from xdm_ft.data import load_dataset, rows_by_name
    from xdm_ft.images import Range
    from xdm_ft.images.decode import UnreadableImage

    try:
        dataset = load_dataset(run.recipe.data.block.model_dump(mode="json"))
    except UserError as error:
        return {}, f"No image can be shown, because the data cannot be read now: {error}"
    if intensity := run.results["environment"]["data"].get("intensity"):
        dataset.intensity = Range.model_validate(intensity)
    rows = rows_by_name(dataset, {shown.name: shown.row for shown in worst})
    thumbnails = dict[DomainSet, list[Thumbnail]]()
    for held, name, _, mistake in (shown for shown in worst if shown.name in rows):
        try:
            image = dataset.image(rows[name])
        except UnreadableImage:
            continue  # counted below
        label = run.class_names[mistake.label]
        sure = f"{run.class_names[mistake.predicted]}, {100 * mistake.confidence:.0f}% sure"
        if mistake.wrong < mistake.models:
            sure += f" ({mistake.wrong} of {mistake.models} models)"
        lines = f"label: {label}", f"predicted: {sure}", name
        of_set = thumbnails.setdefault(held, [])
        of_set.append(Thumbnail.of(image, f"{set_name(held)}: {label}, taken for {sure}", lines))
    left = len(worst) - sum(map(len, thumbnails.values()))
    return thumbnails, f"{plural(left, 'image')} cannot be read now." if left else ""
