"""The table of seeds averaged: each method's models of all seeds as one model, whose logits are the mean of theirs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from xdm_ft.evaluation.metrics import metric
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.evaluation.records import Held, Record, set_name
from xdm_ft.report.finished import Run
from xdm_ft.report.table_rows import ResultTable, number, oracle_mark, scaled

ABOUT = (
    (
        "Seeds averaged",
        "the logits of a method's models of all seeds, averaged, as one model; of linear heads it is the head with the "
        "mean weights (`xdm-ft export --ensemble`). It costs as many trainings as there are seeds",
    ),
    (
        "No verdict",
        "there is one such model per held-out set, so that its spread over seeds is not known, and it is not "
        "independent of the models that it averages",
    ),
)


def averaged_log_probabilities(probabilities: Sequence[np.ndarray]) -> np.ndarray:
    """Returns logits float64 [n,C] whose softmax is that of the mean logits of S models, from their probabilities.

    log p_s = logits_s − a constant of the image, so that their mean differs from the mean logits by a constant of the
    image. A probability that float32 has rounded to 0 counts as the smallest normal number.
    """
    least = np.finfo(np.float32).tiny
    total = np.zeros(probabilities[0].shape)
    for one in probabilities:
        total += np.log(np.maximum(one, least), dtype=np.float64)
    return total / len(probabilities)


def averaged_table(run: Run) -> ResultTable | None:
    """Returns the table under the recipe's own rule; None if no method has two seeds with every held-out set.

    Reads the predictions of all picked models. Raises `UserError` if a file is damaged.
    """
    held_out = tuple(dict.fromkeys(record.test_domains for record in run.picked))
    rows, notes = [], []
    for method in (row.method for row in run.own_rows):
        models = {(record.test_domains, record.seed): record for record in run.picked if record.method == method}
        seeds = sorted({seed for _, seed in models})
        seeds = [seed for seed in seeds if all((held, seed) in models for held in held_out)]
        if len(seeds) < 2:
            continue
        values = [_averaged(run, [models[held, seed] for seed in seeds]) for held in held_out]
        if None in values:
            notes.append((method, "no row: probabilities of all classes were not kept, as they take too much space"))
            continue
        rows.append(_row(run, method, dict(zip(held_out, values, strict=True)), models, seeds))  # type: ignore[arg-type]
    if not rows and not notes:
        return None
    columns = *map(set_name, held_out), "mean", "mean of its seeds", "difference"
    header = (f"method{oracle_mark(run.own_rule)}", "seeds", *columns)
    return ResultTable("Seeds averaged", ABOUT, header, tuple(rows), tuple(notes), level=3)


def _averaged(run: Run, records: Sequence[Record]) -> float | None:
    """Returns the metric of the averaged models on one held-out set; nan: not defined; None: not known."""
    found: list[Prediction] = [run.prediction(record) for record in records]
    kept = [one.probabilities for one in found if one.probabilities is not None and one.probabilities.ndim == 2]
    if len(kept) < len(found):
        return None
    images = run.images(records[0])
    logits = torch.from_numpy(averaged_log_probabilities(kept))
    return metric(run.metric, logits, torch.from_numpy(images.labels), torch.from_numpy(images.worst_of))


def _row(
    run: Run, method: str, values: Mapping[Held, float], models: Mapping[tuple[Held, int], Record], seeds: Sequence[int]
) -> tuple[str, ...]:
    own = [
        getattr(models[held, seed].selected[run.own_rule].metrics["test"], run.metric)
        for held in values
        for seed in seeds
    ]
    mean = float(np.mean([*values.values()]))
    single = math.nan if None in own else float(np.mean(own))
    shown = [number(None if math.isnan(value) else value, run.metric) for value in (*values.values(), mean, single)]
    difference = mean - single
    last = number(None, run.metric) if math.isnan(difference) else scaled(difference, run.metric, signed=True)
    return f"{method}, seeds averaged", str(len(seeds)), *shown, last
