"""`label_curve: true`: what few labelled images of a new site bring, each held-out domain once as the site.

The models of the run that never saw a domain are adapted with labelled images of one half of it, and tested on the
other half by the metric that decides in `xdm-ft adapt`. It takes seconds, on cached features: an interrupted run
computes it again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xdm_ft.core import DomainSet, set_name
from xdm_ft.evaluation.estimates import FEWEST_SETS, over_sites
from xdm_ft.evaluation.few_labels import choose_images
from xdm_ft.evaluation.metrics import metric as metric_of
from xdm_ft.experiment.analyse import read_weights
from xdm_ft.experiment.pieces import RunContext
from xdm_ft.experiment.prepare import make_job
from xdm_ft.experiment.results import RunResults, inputs
from xdm_ft.experiment.work import one_thread
from xdm_ft.features.cache import standard
from xdm_ft.protocol.splits import stratified_part
from xdm_ft.results.model import Record
from xdm_ft.results.trials import choose_method, pick_trials
from xdm_ft.runtime.progress import progress
from xdm_ft.runtime.watchdog import from_main
from xdm_ft.storage import json_digest
from xdm_ft.training.adaptation import adapt_head, deciding_metric
from xdm_ft.version import __version__

logger = logging.getLogger("xdm_ft")
LABELS = 10, 20, 50, 100, 200  # images to adapt a model with
AS_LABEL, AT_RANDOM = "label", "random"
Adapted = tuple[str | None, int]
"""How images were chosen, and their number; (None, 0): the model as it was trained."""


def label_curve(context: RunContext, results: RunResults) -> dict[str, Any] | None:
    """Returns `label_curve` of results.json, of the method to use among those that can be adapted.

    That of an earlier run stays if nothing that it depends on has changed. The main process computes it. Returns None,
    and says why, if there is no such method, or if the domains have too few images.
    """
    plan, protocol = context.plan, context.plan.recipe.protocol
    adaptable = {item.label for item in plan.recipe.methods if item.adapts_to_sites}
    records = [record for record in results.records.values() if record.method in adaptable]
    rows = [row for row in results.summary.rows if row.selection == protocol.selection]
    choice = choose_method(records, rows, protocol.selection, protocol.metric)
    if choice is None:
        logger.warning("label_curve: no method with a linear head has a value in all of its runs; there is no curve")
        return None
    of_method = [record for record in records if record.method == choice.method]
    picked = pick_trials(of_method, protocol.selection, protocol.metric)
    models = [[record.key, record.selected[protocol.selection].to_json()] for record in picked]
    metric = deciding_metric(protocol.metric)
    identity = json_digest([__version__, inputs(plan.dataset, context.prepared), models, metric])
    before = results.label_curve
    if before is not None and before["of"] == identity:
        return before
    values: dict[DomainSet, list[Mapping[Adapted, float]]] = {}  # of each held-out set, by seed
    fold_of = dict[DomainSet, int | None]()
    if context.accelerator.is_main_process:
        with one_thread(), progress("label curve", len(picked), "models") as bar:  # its products are small
            for record in picked:
                for held, tested in plan.by_key[record.key].split.sites(plan.dataset).items():
                    values.setdefault(held, []).append(adapted_values(context, record, tested, metric))
                    fold_of[held] = record.fold
                bar.advance()
    points = from_main(context.accelerator, points_of(values, fold_of))
    if not points:
        fewest = 2 * LABELS[0]
        logger.warning(
            "label_curve: no domain splits into two parts with %d images and no group in common; there is no curve",
            fewest,
        )
        return None
    return {
        "of": identity,
        "method": choice.method,
        "selection": protocol.selection,
        "metric": metric,
        "points": points,
    }


def adapted_values(context: RunContext, record: Record, tested: Tensor, metric: str) -> dict[Adapted, float]:
    """Returns the metric of a model on one half of the held-out rows `tested`, after labels of the other half adapted
    it.

    Numbers of labels that this half cannot give are left out.
    """
    plan, planned, seed = context.plan, context.plan.by_key[record.key], record.seed
    features = context.prepared.for_method(planned.item).features_of(make_job(plan, context.prepared, planned, {}))
    state = read_weights(context, record)
    weight, bias = state["head.weight"].float(), state["head.bias"].float()  # [C,K], [C]
    mean, deviation = standard(features, torch.cat(planned.split.train).sort().values)
    rows = tested.sort().values.numpy()
    is_offered = np.isin(rows, stratified_part(plan.dataset, rows, 0.5, seed))
    z, labels = features[torch.from_numpy(rows).to(features.device)].cpu(), plan.annotations.labels[rows]
    offered, measured = np.flatnonzero(is_offered), torch.from_numpy(~is_offered)

    def value(weight: torch.Tensor, bias: torch.Tensor) -> float:
        y = labels[measured]
        return metric_of(metric, torch.addmm(bias, z[measured], weight.T), y, torch.zeros_like(y))

    temperature = record.selected[plan.recipe.protocol.selection].temperature or 1.0
    p = (torch.addmm(bias, z, weight.T).double() / temperature).softmax(1).numpy()
    of_offered, every = z[offered].numpy(), np.random.default_rng(seed).permutation(len(offered))
    groups = None
    if plan.dataset.groups is not None:
        groups = np.unique(plan.dataset.groups[rows][offered], return_inverse=True)[1]
    values: dict[Adapted, float] = {(None, 0): value(weight, bias)}
    for number in (number for number in LABELS if number <= len(offered)):
        # the other half measures
        as_label = choose_images(of_offered, p[offered], number, np.random.default_rng([seed, number]), groups, 0)
        for choice, chosen in ((AS_LABEL, offered[as_label.adapt]), (AT_RANDOM, offered[every[:number]])):
            adapted = adapt_head(weight, bias, z[chosen], labels[chosen], mean, deviation)
            values[choice, number] = value(*adapted)
    return values


def _is_usable(values: Mapping[Adapted, float]) -> bool:
    """Returns whether there is a point, and the metric is defined on the half that measures."""
    return len(values) > 1 and not any(map(math.isnan, values.values()))


def points_of(
    values: Mapping[DomainSet, Sequence[Mapping[Adapted, float]]], fold_of: Mapping[DomainSet, int | None] = {}
) -> list[dict[str, Any]]:
    """Returns the points of the curve: means over held-out sets of the means over seeds.

    Domains vary more than seeds do, so the interval of a gain is that over domains, for new ones: from three on. A
    point without enough images in some domain is of the others. `fold_of`: {held-out set: its fold, which shares
    models}.
    """
    points = []
    usable = {held: seeds for held, seeds in values.items() if all(_is_usable(of_seed) for of_seed in seeds)}
    for chosen in [(None, 0), *((choice, number) for choice in (AS_LABEL, AT_RANDOM) for number in LABELS)]:
        by_set, gains, folds = dict[str, float](), dict[str, float](), dict[int | None, list[int]]()
        for held, seeds in usable.items():
            if all(chosen in of_seed for of_seed in seeds):
                folds.setdefault(fold_of.get(held), []).append(len(by_set))
                by_set[set_name(held)] = float(np.mean([of_seed[chosen] for of_seed in seeds]))
                gains[set_name(held)] = float(np.mean([of_seed[chosen] - of_seed[None, 0] for of_seed in seeds]))
        if gains:
            shared, estimate = None if None in folds else [*folds.values()], None
            if len(gains) >= FEWEST_SETS and chosen[1]:
                estimate = over_sites(np.array([*gains.values()]), shared)
            points.append(
                {
                    "chosen": chosen[0],
                    "labels": chosen[1],
                    "value": float(np.mean([*by_set.values()])),
                    "gain": float(np.mean([*gains.values()])),
                    "interval": None if estimate is None else estimate.interval()._asdict(),
                    "values": by_set,
                    "past_gains": gains,
                }
            )
    return points
