"""`xdm-ft analyse`: measures the models of a finished run, and writes analysis.json."""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xdm_ft.analysis.reconstruction import OPTION, read_autoencoder
from xdm_ft.cli import CommandResult, columns
from xdm_ft.experiment.analyse import KIND, analyse, write_reconstructions
from xdm_ft.experiment.pieces import RunContext
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.prepare import build_encoders, prepare
from xdm_ft.experiment.results import inputs, refuse_other_inputs
from xdm_ft.experiment.resume import written_recipe
from xdm_ft.experiment.work import launched
from xdm_ft.features.given import NO_IMAGES
from xdm_ft.recipe.check import check
from xdm_ft.report.words import range_text
from xdm_ft.report.written import write_reports
from xdm_ft.results.run import read_run
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.watchdog import heartbeat, wait_for_everyone
from xdm_ft.storage.names import expand_user
from xdm_ft.storage.run_directory import ANALYSIS, FINISHED, PAGE, TAKEN, RunDirectory

REMEDY = "analyse it with the data and weights that it was trained on"
logger = logging.getLogger("xdm_ft")
_Model = dict[str, Any]  # an entry of analysis.json
_Spread = dict[str, float | None]  # mean, std


def _mean(values: list[float | None]) -> float | None:
    """Returns the mean of the values; None if there are none, or one of them is None."""
    return None if not values or None in values else statistics.fmean(values)  # type: ignore[arg-type]


def _test_mean(model: _Model, key: str) -> float | None:
    domains = model["calibration"]["domains"].values()
    return _mean([domain[key] for domain in domains if domain["role"] == "test"])


def _random_removal(model: _Model) -> float | None:
    importance = model["importance"]
    return None if importance is None else float(importance["area"]["class"]["random"])


COLUMNS: dict[str, tuple[str, Callable[[_Model], float | None]]] = {
    "covariances": ("covariance_distance", lambda model: model["representation_invariance"]["paper"]),
    "risk variance": ("risk_variance", lambda model: model["prediction_invariance"]["risk_variance"]),
    "ECE": ("test_ece", lambda model: _test_mean(model, "ece")),
    "scaled": ("test_ece_scaled", lambda model: _test_mean(model, "ece_scaled")),
    # over the levels of τ_d
    "MMD²": ("unbiased_mmd2", lambda model: _mean([level["unbiased_mmd2"] for level in model["divergence"] or ()])),
    # area under the class accuracy while features are removed at random: at most 0.9
    "removal": ("random_removal_area", _random_removal),
}
"""{title of a column: key of its measure in the JSON document, and its value for a model}"""


def main(arguments: argparse.Namespace) -> CommandResult:
    """Measures the models of a run, and writes analysis.json into its directory. Raises `UserError`.

    The recipe is that of the run directory; the directory may have been moved. Data and encoder must be those of the
    run.
    """
    folder = Path(arguments.run_dir)
    run, state = read_run(folder), folder / "state"
    unfinished = {path.name for path in state.iterdir()} if state.is_dir() else set()
    if unfinished - {KIND, FINISHED, TAKEN}:  # the analysis would remove the state from which the run resumes
        raise UserError(f"{folder}: the run has not finished; wait for it, or run its recipe again if it was stopped")
    weights = arguments.reconstruct
    autoencoder = None if weights is None else read_autoencoder(expand_user(weights, OPTION))
    recipe = check(written_recipe(folder, run.results["recipe"]))
    if autoencoder is not None and not recipe.has_images:
        raise UserError(f"{folder}: {OPTION}: {NO_IMAGES}; leave it out")
    images, notes = None, []
    with launched(recipe) as accelerator, heartbeat(accelerator):
        dataset = read_data(recipe)
        recipe, encoders = build_encoders(recipe, dataset)
        plan = make_plan(recipe, dataset)
        before = dict(run.results["environment"])
        prepared = prepare(recipe, dataset, encoders, accelerator, before)

        # features apart: those of other libraries are the same ones rounded otherwise, which is worth a note only
        now, features = inputs(dataset, prepared), before.pop("features", None)
        refuse_other_inputs(run.path, before, now, REMEDY)
        if features is not None and features != now.get("features", features):
            note = "the features were computed by other libraries, or on another device, than those of the run"
            logger.warning("%s; they differ by rounding", note)
            notes.append(note)

        if accelerator.is_main_process:
            with RunDirectory(folder, str(accelerator.process_index), True) as directory:
                directory.lock()
                directory.begin()
                plan = plan.without(prepared.unreadable)
                analyse(run, RunContext(plan, prepared, directory, accelerator), notes)
                if autoencoder is not None:
                    images = write_reconstructions(plan, prepared, autoencoder, folder, accelerator.device)
                if recipe.report.page:
                    write_reports(directory, read_run(folder))
                directory.complete()
        wait_for_everyone(accelerator)
        analysis = read_run(folder).analysis
    assert analysis is not None
    return _answer(folder / ANALYSIS, folder / PAGE if recipe.report.page else None, analysis, images)


def _answer(path: Path, page: Path | None, analysis: dict[str, Any], images: dict[str, Any] | None) -> CommandResult:
    models = analysis["models"]
    methods = dict.fromkeys(model["method"] for model in models)
    means = {method: _means([model for model in models if model["method"] == method]) for method in methods}
    common = {key: analysis[key] for key in ("selection", "images", "notes")}
    document = {"path": path, "page": page, "models": len(models), **common, "means": means}
    if not models:
        lines = [f"no trained model to measure; written to {path}"]
    else:
        over = "means over held-out domains"
        over += " ± standard deviation over seeds" if len({model["seed"] for model in models}) > 1 else ""
        rows = [(method, *map(_cell, values.values())) for method, values in means.items()]
        lines = [*columns([("", *COLUMNS), *rows]), "", f"{over}; what the columns mean: xdm-ft explain analysis"]
        chances = [_chance([model for model in models if model["method"] == method]) for method in methods]
        if known := [chance for chance in chances if chance is not None]:
            share = range_text(*(round(100 * end) for end in (min(known), max(known))))
            lines.append(f"covariances: {share}% of the distance is chance, which equal domains would show too")
        calibration = [(spreads["test_ece"], spreads["test_ece_scaled"]) for spreads in means.values()]
        lower = [scaled["mean"] < plain["mean"] for plain, scaled in calibration if plain and scaled]  # type: ignore[operator]
        if lower:
            of_methods = f"{sum(lower)} of {plural(len(lower), 'method')}"
            lines.append(f"temperature scaling lowers the ECE on held-out domains for {of_methods}")
        lines += [f"all measures: {path}", *([f"the page: {page}"] if page is not None else [])]
    if images is not None:
        document["reconstruction"] = images
        if count := sum(1 for group in images["sets"] if group["file"]):
            lines.append(f"reconstructed images: {plural(count, 'file')} in {images['folder']}")
            lines.append(f"  columns: {', '.join(images['columns'])}")
        for group in images["sets"]:
            if not group["file"]:
                held_out = ", ".join(group["test_domains"])
                lines.append(
                    f"no images for {held_out}: XDomainMix needs two training domains and classes, with partners"
                )
    return CommandResult(document, lines)


def _chance(models: list[_Model]) -> float | None:
    """Returns which share of the distance of covariances equal domains would have, too; None if it is not known."""
    parts = [model["representation_invariance"] for model in models]
    noise, value = (_mean([part.get(key) for part in parts]) for key in ("paper_noise", "paper"))
    return noise / value if noise is not None and value else None


def _means(models: list[_Model]) -> dict[str, _Spread | None]:
    """Returns {measure: mean and standard deviation over seeds}; None where no seed has a value of every model.

    Held-out domains are averaged within a seed first.
    """
    means: dict[str, _Spread | None] = {}
    seeds = dict.fromkeys(model["seed"] for model in models)
    for key, measure in COLUMNS.values():
        values = [_mean([measure(model) for model in models if model["seed"] == seed]) for seed in seeds]
        complete = [value for value in values if value is not None]
        std = statistics.stdev(complete) if len(complete) > 1 else None
        means[key] = {"mean": statistics.fmean(complete), "std": std} if complete else None
    return means


def _cell(value: _Spread | None) -> str:
    if value is None or value["mean"] is None:
        return "–"
    return f"{value['mean']:.3g}" + ("" if value["std"] is None else f" ± {value['std']:.2g}")
