"""Seeds averaged: each method's models of all seeds as one model, whose logits are the mean of theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from xdm_ft.evaluation.metrics import metric
from xdm_ft.evaluation.records import Record, set_name
from xdm_ft.report.finished import Run
from xdm_ft.report.section import Cell, Section, Table, count_cell, metric_cell
from xdm_ft.report.words import EMPTY, oracle_mark, scaled


def averaged_log_probabilities(probabilities: Sequence[np.ndarray]) -> np.ndarray:
    """Returns logits float64 [n,C] whose softmax is that of the mean logits of S models, from their probabilities.

    log p_s = logits_s − a constant of the image, so that their mean differs from the mean logits by a constant of the
    image. A probability that float32 has rounded to 0 counts as the smallest normal number.
    """
    least = np.finfo(np.float32).tiny
    total = np.zeros(probabilities[0].shape)
    for of_seed in probabilities:
        total += np.log(np.maximum(of_seed, least), dtype=np.float64)
    return total / len(probabilities)


def section(run: Run) -> Section | None:
    """Under the recipe's own rule; None if the recipe does not ask for it, or no method has two complete seeds.

    Reads the predictions of all picked models. Raises `UserError` if a file is damaged.
    """
    if not run.results["recipe"].get("report", {}).get("seeds_averaged"):
        return None
    held_out = tuple(dict.fromkeys(record.test_domains for record in run.picked))
    rows, notes = [], []
    for method in (row.method for row in run.own_rows):
        models = {(record.test_domains, record.seed): record for record in run.picked if record.method == method}
        seeds = sorted({seed for _, seed in models})
        seeds = [seed for seed in seeds if all((held, seed) in models for held in held_out)]
        if len(seeds) < 2:
            continue
        by_set = [[models[held, seed] for seed in seeds] for held in held_out]
        values = [_averaged(run, records) for records in by_set]
        if None in values:
            notes.append(f"{method}: no row: probabilities of all classes were not kept, as they take too much space")
        else:
            defined = [math.nan if value is None else value for value in values]
            rows.append([Cell(f"{method}, seeds averaged"), count_cell(len(seeds)), *_cells(run, defined, by_set)])
    if not rows and not notes:
        return None
    columns = *map(set_name, held_out), "mean", "mean of its seeds", "difference"
    return Section(
        id="averaged",
        title="Seeds averaged",
        about="The logits of a method's models of all seeds, averaged, as one model; of linear heads it is the head "
        "with the mean weights (`xdm-ft export --ensemble`). It costs as many trainings as there are seeds. No "
        "verdict: there is one such model per held-out set, so that its spread over seeds is not known, and it is not "
        "independent of the models that it averages.",
        tables=[Table("Seeds averaged.", [f"method{oracle_mark(run.own_rule)}", "seeds", *columns], rows)],
        notes=notes,
    )


def _averaged(run: Run, records: Sequence[Record]) -> float | None:
    """Returns the metric of the averaged models on one held-out set; nan: not defined; None: not known."""
    kept = [run.prediction(record).probabilities for record in records]
    every_class = [probabilities for probabilities in kept if probabilities is not None and probabilities.ndim == 2]
    if len(every_class) < len(records):
        return None
    images = run.images(records[0])
    logits = torch.from_numpy(averaged_log_probabilities(every_class))
    return metric(run.metric, logits, torch.from_numpy(images.labels), torch.from_numpy(images.worst_of))


def _cells(run: Run, values: Sequence[float], by_set: Sequence[Sequence[Record]]) -> list[Cell]:
    """Returns the value of each held-out set, their mean, the mean of the single models, and the difference."""
    single = [
        getattr(record.selected[run.own_rule].metrics["test"], run.metric) for records in by_set for record in records
    ]
    mean = float(np.mean(values))
    of_seeds = math.nan if None in single else float(np.mean(single))
    shown = [metric_cell(None if math.isnan(value) else value, run.metric) for value in (*values, mean, of_seeds)]
    difference = mean - of_seeds
    text = EMPTY if math.isnan(difference) else scaled(difference, run.metric, signed=True)
    return [*shown, Cell(text)]
