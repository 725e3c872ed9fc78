"""Final fits: trains a method on all images, as the model to use.

All images train, so none is left to select on. The method, its hyper-parameters, the step and everything else that is
selected come from the runs behind the estimate. The fit takes all planned steps, so that the learning-rate schedule is
the same, and keeps the weights of the selected step. `protocol.final_fit` asks for the method that held-out domains
prefer, `xdm-ft export` for any. With `all_seeds` one model is trained under each seed of the recipe, otherwise one
under the first.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from xdm_ft.algorithms import Algorithm
from xdm_ft.averaging import FixedInterval
from xdm_ft.core import Criteria, ModelKey
from xdm_ft.experiment.estimate import training_time
from xdm_ft.experiment.models import keep_references, own_reference, restarts, weights_metadata
from xdm_ft.experiment.pieces import Piece, RunContext, do_pieces, pieces_of
from xdm_ft.experiment.plan import Plan, PlannedModel, drawn_value, find_searched, hparams
from xdm_ft.experiment.prepare import Prepared, make_job
from xdm_ft.experiment.results import Outcome, RunResults
from xdm_ft.experiment.resume import refuse_mixed_rows
from xdm_ft.protocol.splits import all_domains
from xdm_ft.recipe.method import MethodItem, draw_item, draw_training
from xdm_ft.recipe.search import Value
from xdm_ft.recipe.settings import Recipe
from xdm_ft.results.model import Record
from xdm_ft.results.table import SummaryRow
from xdm_ft.results.trials import MethodChoice, pick_trials
from xdm_ft.runtime.errors import plural
from xdm_ft.runtime.watchdog import from_main, wait_for_everyone
from xdm_ft.storage import digest
from xdm_ft.storage.names import file_name, reference_beside
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training import Job, Predictor, Trained
from xdm_ft.training.selection import FINAL_FIT

logger = logging.getLogger("xdm_ft")
FOLDER = "models/final_fit"
FitLine = dict[str, Any]
"""What is known after the fit of one seed: status, reason, weights, files, hyper-parameters that the fit varied,
restarts."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """The settings of a final fit, all known before it begins."""

    model: PlannedModel  # of the first seed
    step: int  # the weights after this step are kept; for a solver, the candidate's place on its path
    averaged_from: int | None  # weights are averaged from this step to `step`; None: not, or over the whole training
    varied: dict[str, float]  # what the method varies when it finishes, such as WiSE-FT's coefficient: name → value
    temperature: float | None  # of the runs, as this fit has no validation images; None: not known
    how: str  # a description for the reader of results

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that determines the weights of the fit, given the recipe, as plain JSON values."""
        model, split = self.model, self.model.split
        settings = {
            "method": model.item.label,
            "seed": model.key.seed,
            "hparams": hparams(model.item, model.training),
            "domains": list(split.train_domains),
            "images": {name: len(rows) for name, rows in zip(split.train_domains, split.train, strict=True)},
            "step": self.step,
            **self.varied,
            **({} if self.averaged_from is None else {"averaged_from": self.averaged_from}),
            **({} if self.temperature is None else {"temperature": self.temperature}),
        }
        as_read: dict[str, Any] = json.loads(json.dumps(settings))  # to compare with an earlier results.json
        return as_read

    @cached_property
    def identity(self) -> str:
        return digest(json.dumps(self.settings))

    def of_seed(self, seed: int) -> PlannedModel:
        return dataclasses.replace(self.model, key=self.model.key._replace(seed=seed))

    def job(self, plan: Plan, prepared: Prepared, seed: int) -> Job:
        job = make_job(plan, prepared, self.of_seed(seed), {FINAL_FIT: {self.step: 1.0}})
        if self.averaged_from is None:
            return job
        return dataclasses.replace(job, averaging=FixedInterval(self.averaged_from, self.step))

    def lines(self, directory: RunDirectory) -> dict[int, FitLine]:
        """Returns the lines of this fit by seed. Of several for a seed one without failure, which trained it again."""
        lines = dict[int, FitLine]()
        for line in directory.lines(FINAL_FIT):
            if line.get("of") == self.identity and (line["seed"] not in lines or line["status"] == "ok"):
                lines[line["seed"]] = {key: value for key, value in line.items() if key not in ("of", "seed")}
        return lines

    def outcome(self, context: RunContext, piece: Piece, trained: Trained, predictor: Predictor) -> Outcome:
        """Returns the status of the fit of one seed as a line, and its weights."""
        seed, failure = trained.job.seed, trained.failure
        line: FitLine = {"of": self.identity, "seed": seed}
        if failure is None:
            selected = trained.selected[FINAL_FIT]
            if self.varied:
                algorithm = trained.job.new_method()
                assert isinstance(algorithm, Algorithm), "solvers vary nothing"
                offered = algorithm.finish(predictor.starting_weights(), selected.state)
                state = next(weights.state for weights in offered if weights.varied == self.varied)
                selected = dataclasses.replace(selected, state=state, hparams={**selected.hparams, **self.varied})
            # no image is left to predict, which would show broken weights
            if not all(value.isfinite().all() for value in selected.state.values()):
                failure = f"the weights are not finite after step {selected.step}"
        if failure is not None:
            return Outcome(FINAL_FIT, line | {"status": "failed", "reason": failure})
        plan, rule, planned = context.plan, context.plan.recipe.protocol.selection, self.of_seed(seed)
        name = "model" if seed == self.model.key.seed else f"seed{seed}"
        file = f"{FOLDER}/{file_name(planned.item.label, safe='+ ')}/{name}.safetensors"
        measured = {"images": self.settings["images"], "how": self.how}
        metadata = weights_metadata(context, planned, rule, selected, measured, self.temperature)
        line |= {"status": "ok", **selected.hparams, "weights": file}
        if trained.restarts:
            line["restarted"] = restarts(trained)
        reference = own_reference(plan, planned.split, predictor, selected, file) if piece.is_end_to_end else {}
        return Outcome(FINAL_FIT, line, {file: (selected.state, metadata), **reference})


class FitRequest(NamedTuple):
    """A final fit that is asked for."""

    method: str
    all_seeds: bool


def final_fits(context: RunContext, results: RunResults, named: Sequence[FitRequest] = ()) -> None:
    """Trains the final fits that the recipe asks for, and those `named`, and sets `final_fits` of the results.

    Those of an earlier run stay if they are still what their method's runs determine.
    """
    protocol, choice = context.plan.recipe.protocol, results.choice
    wanted = {fit.method: fit.all_seeds for fit in named}
    if protocol.final_fit and choice is None:
        rule = protocol.selection
        logger.warning("final_fit: no method has a %s in all of its runs, so no model is trained", rule)
    elif protocol.final_fit and choice is not None:
        wanted[choice.method] = protocol.final_fit == "all_seeds" or wanted.get(choice.method, False)
    before, results.final_fits = results.final_fits, {}
    for row in results.summary.rows:
        if choice is None or row.selection != protocol.selection or row.method not in choice.values:
            continue
        if row.method in wanted or row.method in before:
            entry = _final_fit(context, results, row, choice, before.get(row.method), wanted.get(row.method))
            if entry is not None:
                results.final_fits[row.method] = entry


def _final_fit(
    context: RunContext,
    results: RunResults,
    row: SummaryRow,
    choice: MethodChoice,
    before: Mapping[str, Any] | None,
    all_seeds: bool | None,
) -> dict[str, Any] | None:
    """Returns the entry of a method's final fit, which is trained if it is wanted and not `before`.

    `all_seeds` None: it is not wanted, but kept if it was trained. Returns None if there is none then.
    """
    plan, protocol, directory = context.plan, context.plan.recipe.protocol, context.directory
    of_method = [record for record in results.records.values() if record.method == row.method]
    picked = pick_trials(of_method, protocol.selection, protocol.metric)
    fit = fit_of_runs(plan, picked, context.prepared.unreadable)
    first, settings = fit.model.key.seed, fit.settings

    # what an earlier run trained that finished, and an interrupted one
    trained = dict[int, FitLine]()
    if before is not None and {key: before.get(key) for key in settings} == settings:
        of_seeds = before.get("seeds") or {str(first): before["weights"]}
        for seed, weights in of_seeds.items():
            own = weights, reference_beside(weights)
            files = {address: digest for address, digest in before["files"].items() if address in own}
            trained[int(seed)] = {"status": "ok", "weights": weights, "files": files}
        about_all = (*settings, "chosen_by", "estimate", "how", "seeds", "reason", "files")
        if first in trained:
            trained[first] |= {key: value for key, value in before.items() if key not in about_all} | {"status": "ok"}
    for seed, line in (trained | fit.lines(directory)).items():
        trained[seed] = line
        files = line.get("files", {})
        if not files or not all(directory.verify_or_warn(file, files) for file in (line["weights"], *files)):
            del trained[seed]
    if all_seeds is None:
        if first not in trained:
            return None
        seeds, all_seeds = (first, *trained), before is not None and "seeds" in before
    else:
        # a solver is deterministic: every seed would give the same model
        seeds = (first, *protocol.seeds) if all_seeds and not fit.model.item.is_solver else (first,)
    jobs = {seed: fit.job(context.plan, context.prepared, seed) for seed in dict.fromkeys(seeds)}
    wait_for_everyone(context.accelerator)  # all processes must have read before one of them writes
    common = keep_references(context, fit.model.split, results.known_files) if directory.main else {}
    common = from_main(context.accelerator, common)
    missing = {job.key for seed, job in jobs.items() if seed not in trained}
    if missing:
        refuse_mixed_rows(label for label in results.edited if label == row.method)
        models = [fit.of_seed(seed) for seed in jobs if seed not in trained]
        time = training_time(plan, context.prepared.for_method(models[0].item).encoder, context.accelerator, models)
        logger.info("final fit, %s: %s", time, fit.how)
        # the jobs of all seeds: together they determine the chunks of heads, also if some are trained already
        criteria = Criteria((FINAL_FIT,), protocol.metric)
        pieces = pieces_of(context, fit.model.item, [*jobs.values()], criteria, missing)
        do_pieces(context, pieces, fit.outcome, results, activity="final fit")
        # from the run directory, because another process may have trained the models
        trained = fit.lines(directory) | trained

    # what is known after the fit is that of the first seed; it has failed if one of the others has
    entry = dict(trained[first])
    failed = [seed for seed in jobs if trained[seed]["status"] == "failed"]
    if failed and failed != [first]:
        reasons = (f"seed {seed}: {trained[seed]['reason']}" for seed in failed)
        entry |= {"status": "failed", "reason": "; ".join(reasons)}
    whole = [seed for seed in jobs if trained[seed]["status"] == "ok"]
    if all_seeds:
        entry["seeds"] = {str(seed): trained[seed]["weights"] for seed in whole}
    if whole:
        entry["files"] = common.copy()
        for seed in whole:
            entry["files"] |= trained[seed]["files"]
    estimate = {key: getattr(row, key) for key in ("selection", "metric", "mean", "std", "stderr", "n", "protocol")}
    why = str(choice) if row.method == choice.method else f"{row.method} was named ({choice})"
    chosen = {"chosen_by": choice.to_json(), "estimate": estimate | {"of": protocol.name}, "how": f"{why}; {fit.how}"}
    return settings | chosen | entry


def fit_of_runs(plan: Plan, picked: Sequence[Record], unreadable: Iterable[int] = ()) -> Fit:
    """Combines the picked runs of one method (one per set of held-out domains and seed) into the settings of a fit."""
    recipe, rule = plan.recipe, plan.recipe.protocol.selection
    planned, selected = [plan.by_key[record.key] for record in picked], [record.selected[rule] for record in picked]
    item = plan.item(planned[0].item.label)
    step, drawn = median(pick.step for pick in selected), combine(recipe, item, [record.hparams for record in picked])
    averaged_from = None
    if item.averaging is not None and item.averaging.cls.reads_loss:  # the fit has no images to measure a loss on
        averaged_from = median(pick.hparams["averaged_from"] for pick in selected)
    varied = {name: median(pick.hparams[name] for pick in selected) for name in item.varied_by_finish}
    training = draw_training(recipe.training, item, drawn)
    if not item.is_solver:
        # engines keep and average weights only at evaluations, so these must include the steps chosen above
        # − 1: the first segment that is averaged begins with the step after an evaluation
        every = step if averaged_from is None else math.gcd(averaged_from - 1, step)
        training = training.model_copy(update={"patience": None, "evaluate_every": every})
    split, steps = all_domains(plan.dataset, tuple(unreadable)), median(model.steps for model in planned)
    # trial 0 stands for all: the settings are medians over trials, and no trial has drawn them
    key = ModelKey(item.label, split.test_domains, planned[0].key.seed, 0)
    model = PlannedModel(key, draw_item(item, drawn), training, split, steps)
    temperatures = [pick.temperature for pick in selected if pick.temperature is not None]
    fit = Fit(model, step, averaged_from, varied, median(temperatures) if temperatures else None, "")
    differs = [key for key in drawn if len({drawn_value(record.hparams, key) for record in picked}) > 1]
    return dataclasses.replace(fit, how=_how(recipe, fit, len(picked), differs))


def combine(recipe: Recipe, item: MethodItem, hparams_of_runs: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
    """Returns a value for each searched key: of a range the median of the picked values, of a choice the most frequent.

    A key without a value is left out; the recipe's own value then applies.
    """
    chosen = {}
    for key, distribution in find_searched(recipe, item):
        values = [drawn_value(values, key) for values in hparams_of_runs]
        value = median(values) if distribution.choice is None and None not in values else mode(values)
        if value is not None:
            chosen[key] = value
    return chosen


def median(values: Iterable[Any]) -> Any:
    """Returns the median; of two middle values the lower one, so that the median is one of the values."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def mode(values: Iterable[Any]) -> Any:
    """Returns the most frequent value; the first one of several that are equally frequent."""
    return Counter(values).most_common(1)[0][0]


def _how(recipe: Recipe, fit: Fit, runs: int, differs: Sequence[str]) -> str:
    """Describes the fit in one line."""
    split, item = fit.model.split, fit.model.item
    official = "including the official split's validation and test images"
    held_out = "including the domains held out for the estimate"
    parts = [
        f"settings are those of its {plural(runs, 'run')}",
        f"trained on all {sum(map(len, split.train))} labelled images of {plural(len(split.train_domains), 'domain')} "
        f"({', '.join(split.train_domains)}), {official if recipe.protocol.name == 'official' else held_out}",
    ]
    if item.is_solver:
        parts.append("the median of the picked settings on its path")
    elif fit.averaged_from is not None:
        parts.append(f"weights averaged over steps {fit.averaged_from} to {fit.step}, the medians of those averaged")
    elif item.averaging is not None:
        parts.append(f"weights averaged over all {fit.model.steps} steps by +{item.averaging.name}")
    else:
        parts.append(f"weights after step {fit.step}, the median of the steps picked")
    parts += [f"{name} = {value}, the median" for name, value in fit.varied.items()]
    if fit.temperature is not None:
        parts.append(f"temperature {fit.temperature:.4g}, the median")
    keys = dict[str, list[str]]()
    for key in differs:
        is_choice = recipe.search.distributions[key].choice is not None
        keys.setdefault("the most frequent" if is_choice else "the median", []).append(key)
    for what in sorted(keys):
        parts.append(f"{', '.join(keys[what])}: {what} over the trials picked")
    return "; ".join([*parts, "this fit selects nothing, and no image is left to measure it on"])
