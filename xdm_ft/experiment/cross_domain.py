"""Selection by `cross_domain`: extra models, each with one more held-out domain, on which it is measured.

Only the measured values are kept, not the weights.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping

from xdm_ft.evaluation.records import Identity
from xdm_ft.experiment.engines import Engines, Model, Request
from xdm_ft.experiment.jobs import Known, make_job
from xdm_ft.experiment.plan import ExtraModel, extra_models
from xdm_ft.experiment.results import Outcome, ResultsFile
from xdm_ft.experiment.train import train
from xdm_ft.protocol.derived_splits import LEFT_OUT, mean_course
from xdm_ft.runtime.tensors import Criteria
from xdm_ft.runtime.watchdog import wait_for_everyone
from xdm_ft.training import Job

logger = logging.getLogger("xdm_ft")
MEASURED = "cross_domain"  # kind of the lines that hold the values of extra models
Measured = dict[str, dict[str, dict[int, float]]]


def cross_domain_values(engines: Engines, wanted: Collection[Identity], results: ResultsFile) -> dict[Identity, Known]:
    """Trains the missing extra models. Returns `Job.known` of each wanted model: the mean metric of its extra models.

    Returns an empty dict if the recipe selects by another rule.
    """
    extra = [model for model in engines.plan.extra if any(key in wanted for key in model.serves)]
    if not extra:
        return {}
    jobs = [make_job(engines.plan, engines.prepared, model, {}) for model in extra]
    before = _measured(engines)
    missing = {job.key for job in jobs if _name(job) not in before}
    wait_for_everyone(engines.accelerator)  # all processes must read the same lines before one of them appends
    alike: dict[tuple[tuple[str, int], tuple[str, ...]], list[tuple[ExtraModel, Job]]] = {}
    for model, job in zip(extra, jobs, strict=True):
        # the models that it serves are of one method, seed and trial, so of one group too
        group = results.chunk_group(model.serves[0])
        alike.setdefault((group, tuple(job.split.evaluation)), []).append((model, job))
    metric = engines.plan.recipe.protocol.metric
    requests = [
        Request(models[0][0].item, [job for _, job in models], Criteria(parts, metric), missing)
        for (_, parts), models in alike.items()
        if any(job.key in missing for _, job in models)
    ]
    if requests:
        logger.info("%s; %d are missing", extra_models(engines.plan), len(missing))
        train(engines, requests, _measure, results, what="extra models")
    measured, courses = _measured(engines), dict[Identity, list[Mapping[int, float]]]()
    for model, job in zip(extra, jobs, strict=True):
        for part, key in zip(LEFT_OUT, model.serves, strict=False):  # a model serves one planned model, or two
            courses.setdefault(key, []).append(measured[_name(job)][part])
    return {key: {"cross_domain": mean_course(of_model)} for key, of_model in courses.items()}


def _measure(engines: Engines, model: Model) -> Outcome:
    """Returns the line of an extra model, with its finite values of the metric: {evaluation split: {step: value}}."""
    trained, job = model.trained, model.trained.job
    if trained.failure is not None:
        logger.warning("%s without %s: %s", job.method, ", ".join(job.test_domains), trained.failure)
    course = {} if trained.failure else trained.course
    defined = {
        part: {step: value for step, value in course.get(part, {}).items() if math.isfinite(value)}
        for part in job.split.evaluation
    }
    return Outcome(MEASURED, {"model": _name(job), "values": defined})


def _measured(engines: Engines) -> Measured:
    """Returns {extra model: {evaluation split: {step: metric}}}, from the lines of all processes."""
    return {
        line["model"]: {
            part: {int(step): value for step, value in course.items()} for part, course in line["values"].items()
        }
        for line in engines.directory.lines(MEASURED)
    }


def _name(job: Job) -> str:
    return json.dumps([*job.key, job.setup.steps])  # unlike joined names, these are distinct for distinct models
