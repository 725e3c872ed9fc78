"""`xdm-ft analyse`: measures the models of a finished run, and writes analysis.json."""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdm_ft.cli.answer import Answer, columns
from xdm_ft.runtime.errors import UserError, plural

if TYPE_CHECKING:
    from xdm_ft.report.finished import Run

HELP = "measure the models of a finished run as the paper does: invariance, divergence, importance, calibration"
EXAMPLES = ("xdm-ft analyse output/demo", "xdm-ft analyse output/demo --json")
REMEDY = "analyse it with the data and weights that it was trained on"
logger = logging.getLogger("xdm_ft")


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("run_dir", metavar="RUN_DIR")
    images = "write images of augmented features too; FOLDER has AdaIN's vgg_normalised.pth and decoder.pth"
    verb.add_argument("--reconstruct", metavar="FOLDER", help=images)


def main(arguments: argparse.Namespace) -> Answer:
    """Measures the models of a run, and writes analysis.json into its directory. Raises `UserError`.

    The recipe is that of the run directory; the directory may have been moved. Data and encoder must be those of the
    run.
    """
    from xdm_ft.analysis.reconstruction import OPTION, read_autoencoder
    from xdm_ft.experiment.analyse import analyse, write_reconstructions
    from xdm_ft.experiment.machine import launched
    from xdm_ft.experiment.plan import make_plan, read_data
    from xdm_ft.experiment.prepare import build_encoders, prepare
    from xdm_ft.experiment.results import inputs
    from xdm_ft.experiment.resume import written_recipe
    from xdm_ft.recipe.check import check
    from xdm_ft.report.finished import read_run
    from xdm_ft.report.written import write_reports
    from xdm_ft.runtime.watchdog import heartbeat, wait_for_everyone
    from xdm_ft.storage.names import expand_user
    from xdm_ft.storage.run_directory import ANALYSIS, PAGE, RunDirectory

    folder = Path(arguments.run_dir)
    run = read_run(folder)
    _refuse_unfinished(folder)
    weights = arguments.reconstruct
    autoencoder = None if weights is None else read_autoencoder(expand_user(weights, OPTION))
    recipe = check(written_recipe(folder, run.results))
    images = None
    with launched(recipe) as accelerator, heartbeat(accelerator):
        dataset = read_data(recipe)
        plan = make_plan(recipe, dataset)
        prepared = prepare(recipe, dataset, build_encoders(recipe), accelerator, run.results["environment"])
        notes = _compare_inputs(run, inputs(dataset, prepared))
        if accelerator.is_main_process:
            with RunDirectory(folder, str(accelerator.process_index), True) as directory:
                directory.lock()
                directory.begin()
                plan = plan.without(prepared.unreadable)
                analyse(run, plan, prepared, directory, accelerator, notes)
                if autoencoder is not None:
                    images = write_reconstructions(plan, prepared, autoencoder, folder, accelerator.device)
                if recipe.report.page:
                    write_reports(directory, read_run(folder))
                directory.complete()
        wait_for_everyone(accelerator)
        analysis = read_run(folder).analysis
    assert analysis is not None
    return _answer(folder / ANALYSIS, folder / PAGE if recipe.report.page else None, analysis, images)


def _answer(path: Path, page: Path | None, analysis: dict[str, Any], images: dict[str, Any] | None) -> Answer:
    models = analysis["models"]
    means = {method: _means(group) for method, group in _by_method(models).items()}
    common = {key: analysis[key] for key in ("selection", "images", "notes")}
    document = {"path": path, "page": page, "models": len(models), **common, "means": means}
    if images is not None:
        document["reconstruction"] = images
    image_lines = [] if images is None else list(_image_lines(images))
    if not models:
        return Answer(document, [f"no trained model to measure; written to {path}", *image_lines])
    header = ("", *(title for title, _, _ in COLUMNS))
    rows = [(method, *map(_cell, values.values())) for method, values in means.items()]
    over = "means over held-out domains"
    over += " ± standard deviation over seeds" if len({model["seed"] for model in models}) > 1 else ""
    lines = [*columns([header, *rows]), "", f"{over}; what the columns mean: xdm-ft explain analysis"]
    lines += [*_effect_of_temperatures(list(means.values())), f"all measures: {path}"]
    lines += [f"the page: {page}"] if page is not None else []
    return Answer(document, [*lines, *image_lines])


def _image_lines(images: dict[str, Any]) -> Iterator[str]:
    if count := sum(1 for one in images["sets"] if one["file"]):
        yield f"reconstructed images: {plural(count, 'file')} in {images['folder']}"
        yield f"  columns: {', '.join(images['columns'])}"
    for one in images["sets"]:
        if not one["file"]:
            held_out = ", ".join(one["test_domains"])
            yield f"no images for {held_out}: XDomainMix needs two training domains and classes, with partners"


def _refuse_unfinished(folder: Path) -> None:
    """Raises `UserError` if the run was interrupted: its state would be lost."""
    from xdm_ft.experiment.analyse import KIND
    from xdm_ft.storage.run_directory import FINISHED, TAKEN

    state = folder / "state"
    left = {path.name for path in state.iterdir()} if state.is_dir() else set()
    if left - {KIND, FINISHED, TAKEN}:
        raise UserError(f"{folder}: the run has not finished; run its recipe again to finish it, then analyse it")


def _compare_inputs(run: Run, now: dict[str, Any]) -> list[str]:
    """Returns a note if features are computed by other libraries or on another device than the run's.

    Raises `UserError` if data or weights are not those of the run.
    """
    from xdm_ft.experiment.resume import Earlier

    before = dict(run.results["environment"])
    features = before.pop("features", None)
    Earlier(environment=before).refuse_other_inputs(run.path, now, REMEDY)
    if features is None or "features" not in now or features == now["features"]:
        return []
    note = "the features were computed by other libraries, or on another device, than those of the run"
    logger.warning("%s; they differ by rounding", note)
    return [note]


Model = dict[str, Any]  # an entry of analysis.json
Spread = dict[str, float | None]  # mean, std


def _test_calibration(name: str) -> Callable[[Model], float | None]:
    """Returns the function model → mean of a value of its calibration over the domains that test."""

    def value(model: Model) -> float | None:
        values = [one[name] for one in model["calibration"]["domains"].values() if one["role"] == "test"]
        return None if not values or None in values else statistics.fmean(values)

    return value


def _mmd(model: Model) -> float | None:
    """Returns the mean over the levels of τ_d."""
    levels = model["divergence"]
    return statistics.fmean(level["unbiased_mmd2"] for level in levels) if levels else None


def _random_removal(model: Model) -> float | None:
    """Returns the area under the class accuracy while features are removed at random: at most 0.9."""
    return None if model["importance"] is None else float(model["importance"]["area"]["class"]["random"])


COLUMNS: tuple[tuple[str, str, Callable[[Model], float | None]], ...] = (
    ("covariances", "covariance_distance", lambda model: model["representation_invariance"]["paper"]),
    ("risk variance", "risk_variance", lambda model: model["prediction_invariance"]["risk_variance"]),
    ("ECE", "test_ece", _test_calibration("ece")),
    ("scaled", "test_ece_scaled", _test_calibration("ece_scaled")),
    ("MMD²", "unbiased_mmd2", _mmd),
    ("removal", "random_removal_area", _random_removal),
)
"""Title of a column, its key in the JSON document, and the value of a model."""


def _by_method(models: Sequence[Model]) -> dict[str, list[Model]]:
    methods = dict.fromkeys(model["method"] for model in models)
    return {method: [model for model in models if model["method"] == method] for method in methods}


def _means(models: Sequence[Model]) -> dict[str, Spread | None]:
    """Returns {measure: mean and standard deviation over seeds}; None where no seed has a value of every model.

    Held-out domains are averaged within a seed first.
    """
    means: dict[str, Spread | None] = {}
    for _, key, value in COLUMNS:
        seeds = dict.fromkeys(model["seed"] for model in models)
        values = [[value(model) for model in models if model["seed"] == seed] for seed in seeds]
        known = [[one for one in of_seed if one is not None] for of_seed in values]
        complete = [statistics.fmean(one) for one, every in zip(known, values, strict=True) if len(one) == len(every)]
        std = statistics.stdev(complete) if len(complete) > 1 else None
        means[key] = {"mean": statistics.fmean(complete), "std": std} if complete else None
    return means


def _effect_of_temperatures(means: Sequence[dict[str, Spread | None]]) -> Iterator[str]:
    """Yields what temperature scaling does to the calibration on held-out domains, if it is known."""
    pairs = [(one["test_ece"], one["test_ece_scaled"]) for one in means]
    known = [(plain["mean"], scaled["mean"]) for plain, scaled in pairs if plain and scaled]
    if known:
        lower = sum(after < before for before, after in known)  # type: ignore[operator]
        yield f"temperature scaling lowers the ECE on held-out domains for {lower} of {plural(len(known), 'method')}"


def _cell(value: Spread | None) -> str:
    if value is None or value["mean"] is None:
        return "–"
    return f"{value['mean']:.3g}" + ("" if value["std"] is None else f" ± {value['std']:.2g}")
