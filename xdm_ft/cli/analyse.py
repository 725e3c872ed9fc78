"""`xdm-ft analyse`: measures the models of a finished run, and writes analysis.json."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xdm_ft.analysis.reconstruction import OPTION, read_autoencoder
from xdm_ft.cli.answer import Answer
from xdm_ft.experiment.analyse import KIND, analyse
from xdm_ft.experiment.machine import launched
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.prepare import build_encoders, prepare
from xdm_ft.experiment.reconstruction import write_reconstructions
from xdm_ft.experiment.results import inputs
from xdm_ft.experiment.resume import Earlier, written_recipe
from xdm_ft.recipe.check import check
from xdm_ft.report.finished import Run, read_run
from xdm_ft.report.written import write_reports
from xdm_ft.runtime.errors import UserError, plural, printable
from xdm_ft.runtime.watchdog import heartbeat, wait_for_everyone
from xdm_ft.storage.names import expanded
from xdm_ft.storage.run_directory import ANALYSIS, PAGE, SHARED, TAKEN, RunDirectory

logger = logging.getLogger("xdm_ft")
REMEDY = "analyse it with the data and weights that it was trained on"


@dataclass(frozen=True)
class Analysis(Answer):
    path: Path  # analysis.json
    page: Path | None  # that shows it; None if the recipe wants none
    analysis: dict[str, Any]  # its content
    reconstruction: dict[str, Any] | None = None  # the images that were asked for

    def text(self) -> str:
        models = self.analysis["models"]
        if not models:
            return "\n".join([f"no trained model to measure; written to {printable(self.path)}", *self._images()])
        rows = [("", *(title for title, _, _ in COLUMNS)), *_rows(models)]
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        lines = []
        for method, *values in rows:
            cells = [f"{value:>{width}}" for value, width in zip(values, widths[1:], strict=True)]
            lines.append("  ".join([f"{method:<{widths[0]}}", *cells]))
        seeds = {model["seed"] for model in models}
        over = "means over held-out domains" + (" ± standard deviation over seeds" if len(seeds) > 1 else "")
        over += "; what the columns mean: xdm-ft explain analysis"
        shown = [] if self.page is None else [f"the page: {printable(self.page)}"]
        files = [f"all measures: {printable(self.path)}", *shown, *self._images()]
        return "\n".join([*lines, "", over, *_of_temperatures(models), *files])

    def _images(self) -> Iterator[str]:
        if self.reconstruction is None:
            return
        sets, columns = self.reconstruction["sets"], ", ".join(self.reconstruction["columns"])
        if count := sum(1 for one in sets if one["file"]):
            yield f"reconstructed images: {plural(count, 'file')} in {printable(self.reconstruction['folder'])}"
            yield f"  columns: {columns}"
        for one in sets:
            if not one["file"]:
                held = printable(", ".join(one["test_domains"]))
                yield f"no images for {held}: XDomainMix needs two training domains and classes, with partners"

    def to_json(self) -> dict[str, Any]:
        models = self.analysis["models"]
        rest = {key: self.analysis[key] for key in ("selection", "images", "notes")}
        images = {} if self.reconstruction is None else {"reconstruction": self.reconstruction}
        return {"path": self.path, "page": self.page, "models": len(models), **rest, "means": _means(models), **images}


def analyse_run(run_directory: str, reconstruct: str | None = None) -> Analysis:
    """Measures the models of a run, and writes analysis.json into its directory. Raises `UserError`.

    `reconstruct`: a folder with AdaIN's weights, with which images of augmented features are written too.

    The recipe is that of the run directory; the directory may have been moved. Data and encoder must be those of the
    run.
    """
    folder = Path(run_directory)
    run = read_run(folder)
    _refuse_unfinished(folder)
    autoencoder = None if reconstruct is None else read_autoencoder(expanded(reconstruct, OPTION))
    recipe = check(written_recipe(folder, run.results))
    images = None
    with launched(recipe) as accelerator, heartbeat(accelerator):
        main = bool(accelerator.is_main_process)
        dataset = read_data(recipe)
        plan = make_plan(recipe, dataset)
        prepared = prepare(recipe, dataset, build_encoders(recipe), accelerator, run.results["environment"])
        notes = _compared_inputs(run, inputs(dataset, prepared))
        if main:
            with RunDirectory(folder, str(accelerator.process_index), main) as directory:
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
        found = read_run(folder).analysis
    assert found is not None
    return Analysis(folder / ANALYSIS, folder / PAGE if recipe.report.page else None, found, images)


def _refuse_unfinished(folder: Path) -> None:
    """Raises `UserError` if the run was interrupted: its state would be lost."""
    state = folder / "state"
    left = {path.name for path in state.iterdir()} if state.is_dir() else set()
    if left - {KIND, SHARED, TAKEN}:
        raise UserError(f"{folder}: the run has not finished; run its recipe again to finish it, then analyse it")


def _compared_inputs(run: Run, now: dict[str, Any]) -> list[str]:
    """Returns a note if features are computed by other libraries or on another device than the run's.

    Raises `UserError` if data or weights are not those of the run.
    """
    before = dict(run.results["environment"])
    features = before.pop("features", None)
    Earlier(environment=before).refuse_other_inputs(run.path, now, REMEDY)
    if features is None or "features" not in now or features == now["features"]:
        return []
    note = "the features were computed by other libraries, or on another device, than those of the run"
    logger.warning("%s; they differ by rounding", note)
    return [note]


Value = Callable[[dict[str, Any]], float | None]


def _test_mean(name: str) -> Value:
    """Returns the function model → mean of a value of its calibration over the domains that test."""

    def value(model: dict[str, Any]) -> float | None:
        found = [one[name] for one in model["calibration"]["domains"].values() if one["role"] == "test"]
        return None if not found or None in found else statistics.fmean(found)

    return value


def _level_mean(name: str) -> Value:
    """Returns the function model → mean of a divergence over the levels of τ_d."""

    def value(model: dict[str, Any]) -> float | None:
        return statistics.fmean(level[name] for level in model["divergence"]) if model["divergence"] else None

    return value


def _left(model: dict[str, Any]) -> float | None:
    """Returns the area under the class accuracy while features are removed at random: at most 0.9."""
    return None if model["importance"] is None else float(model["importance"]["area"]["class"]["random"])


COLUMNS: tuple[tuple[str, str, Value], ...] = (
    ("covariances", "covariance_distance", lambda model: model["representation_invariance"]["paper"]),
    ("risk variance", "risk_variance", lambda model: model["prediction_invariance"]["risk_variance"]),
    ("ECE", "test_ece", _test_mean("ece")),
    ("scaled", "test_ece_scaled", _test_mean("ece_scaled")),
    ("MMD²", "unbiased_mmd2", _level_mean("unbiased_mmd2")),
    ("removal", "random_removal_area", _left),
)
"""Title of a column, its key in the JSON document, and the value of a model."""


def _means(models: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns {method: {measure: {mean, std over seeds}}}; None where it is not defined for every held-out domain."""
    found: dict[str, dict[str, Any]] = {}
    for method in dict.fromkeys(model["method"] for model in models):
        own = [model for model in models if model["method"] == method]
        found[method] = {key: _spread(own, value) for _, key, value in COLUMNS}
    return found


def _spread(models: Sequence[dict[str, Any]], value: Value) -> dict[str, float | None] | None:
    """Held-out domains are averaged within a seed first; a seed in which one has no value does not count."""
    of_seeds = []
    for seed in dict.fromkeys(model["seed"] for model in models):
        values = [value(model) for model in models if model["seed"] == seed]
        known = [one for one in values if one is not None]
        if known and len(known) == len(values):
            of_seeds.append(statistics.fmean(known))
    if not of_seeds:
        return None
    return {"mean": statistics.fmean(of_seeds), "std": statistics.stdev(of_seeds) if len(of_seeds) > 1 else None}


def _rows(models: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for method, values in _means(models).items():
        yield (printable(method), *(_shown(value) for value in values.values()))


def _of_temperatures(models: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields what temperature scaling does to the calibration on held-out domains, if it is known."""
    known = [
        (values["test_ece"]["mean"], values["test_ece_scaled"]["mean"])
        for values in _means(models).values()
        if values["test_ece"] and values["test_ece_scaled"]
    ]
    if known:
        lower = sum(after < before for before, after in known)
        yield f"temperature scaling lowers the ECE on held-out domains for {lower} of {plural(len(known), 'method')}"


def _shown(value: dict[str, float | None] | None) -> str:
    if value is None or value["mean"] is None:
        return "–"
    spread = "" if value["std"] is None else f" ± {value['std']:.2g}"
    return f"{value['mean']:.3g}{spread}"
