"""`xdm-ft export`: writes a model of a run as a model directory."""

from __future__ import annotations

import argparse
import copy
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from xdm_ft.cli import CommandResult
from xdm_ft.cli.library import run as run_recipe
from xdm_ft.cli.predict import choice_of
from xdm_ft.core import ORACLE
from xdm_ft.experiment.final_fit import FitRequest
from xdm_ft.experiment.plan import read_data
from xdm_ft.experiment.resume import written_recipe
from xdm_ft.export import ModelConfig, ModelParts
from xdm_ft.export.card import held_words
from xdm_ft.export.choose import Choice, chosen_method, read_parts, with_training_images
from xdm_ft.export.directory import new_directory, refuse_taken, write_directory
from xdm_ft.export.hub import Pushed, check_name, push
from xdm_ft.export.onnx import OnnxFile, check_installed, write_onnx
from xdm_ft.images.decode import UnreadableImage
from xdm_ft.new_site.reference import with_site
from xdm_ft.recipe.check import check
from xdm_ft.recipe.text import RecipeText, apply_override
from xdm_ft.report.sections.audit import findings, headline
from xdm_ft.results.run import Run, read_run
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.run_directory import RESULTS

COMPARED_IMAGES = 8  # that ONNX Runtime and torch are compared on
logger = logging.getLogger("xdm_ft")


def main(arguments: argparse.Namespace) -> CommandResult:
    others = ("run_dir", "dir", "method", "held_out", "seed", "trial", "verb", "json", "quiet")
    options = {name: value for name, value in vars(arguments).items() if name not in others}
    return export_model(arguments.run_dir, arguments.dir, choice_of(arguments), **options)


def export_model(
    run_dir: str,
    target: str,
    choice: Choice,
    *,
    best: bool = False,
    with_encoder: bool | None = None,
    wise_ft: float | None = None,
    ensemble: bool = False,
    temperature: bool = False,
    onnx: bool = False,
    onnx_preprocessing: bool = False,
    push_to_hub: str | None = None,
    private: bool = False,
    allow_training_features: bool = False,
    with_training_hashes: bool = False,
    no_site: bool = False,
) -> CommandResult:
    """Writes the chosen model of the run into a new directory.

    Without `choice.held_out` it is the final fit of the method, trained now if the run has none; for an official split
    only if `best`, else without one the method's first seed. `no_site`: without what `assess` and `adapt` read, which
    takes the training of some heads. `push_to_hub`: a repository that the directory is uploaded
    to; a head with training features only if `allow_training_features`, the checksums of training images only if
    `with_training_hashes`.

    Raises `UserError` if there is no such model, if its files are damaged, or if the directory is taken.
    """

    def parts_of(choice: Choice) -> ModelParts:
        parts = read_parts(run, choice, wise_ft=wise_ft, ensemble=ensemble, temperature=temperature)
        if push_to_hub is not None and parts.training_features and not allow_training_features:
            problem = f"the head of {method} contains the features of all its training images"
            raise UserError(f"--push-to-hub: {problem}; --allow-training-features uploads them")
        return parts

    if best and choice.held_out is not None:
        raise UserError(
            "--best names the final fit, but --held-out a model that was trained without a domain; keep one"
        )
    if onnx or onnx_preprocessing:
        check_installed()
    if push_to_hub is not None:
        check_name(push_to_hub)
    run, folder = read_run(Path(run_dir).expanduser()), Path(target).expanduser()
    refuse_taken(folder)  # before a training of hours
    for option, value in (("--with-encoder", with_encoder), ("--onnx-preprocessing", onnx_preprocessing)):
        if value and not run.recipe.has_images:
            raise UserError(f"{option}: a model of features has no encoder, nor prepares images; leave it out")
    method, _ = chosen_method(run, choice)
    # an official split has no folds: its models are of use as they are
    needs_fit = best or run.recipe.protocol.name != "official" or method in run.final_fits
    if needs_fit and choice == Choice(choice.method):
        has_options = wise_ft is not None or temperature or push_to_hub is not None
        if ensemble or (has_options and method not in run.final_fits):
            # before a training of hours: options that do not fit a model of the run do not fit its final fit either
            # one with a temperature, if there is one: that of the final fit is the median of theirs
            like = max(
                (record for record in run.records if record.method == method),
                key=lambda record: any(pick.temperature is not None for pick in record.selected.values()),
            )
            parts_of(Choice(method, like.test_domains, None if ensemble else like.seed))
        run = _with_final_fit(run, method, ensemble)
    parts = with_audit(run, with_training_images(run, parts_of(choice)))
    if not no_site:
        parts = with_site(run, parts)
    onnx_file = None
    with new_directory(folder) as temporary:
        config = write_directory(parts, temporary, with_encoder)
        if onnx or onnx_preprocessing:
            onnx_file = write_onnx(parts, temporary, _images(run), onnx_preprocessing)
            onnx_file = replace(onnx_file, path=folder / onnx_file.path.name)
    pushed = None if push_to_hub is None else push(folder, push_to_hub, private, with_training_hashes)
    return _answer(folder, config, held_words(config, parts.training_features), onnx_file, pushed)


def _answer(
    folder: Path, config: ModelConfig, holds: str, onnx: OnnxFile | None, pushed: Pushed | None
) -> CommandResult:
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    needs_weights = config.encoder.needs_weights
    expected, nll = config.expected, None
    if expected is not None and (calibrated := expected.numbers.get("nll_with_temperature")) is not None:
        plain = expected.mean if expected.metric == "nll" else expected.others.get("nll")
        nll = None if plain is None else (plain, calibrated)
    document: dict[str, Any] = {
        "directory": folder,
        "model": config.chosen,  # one line: which model, and how it was chosen
        "files": files,
        "temperature": config.temperature,  # by which the logits are divided
        "fitted_temperature": config.fitted_temperature,
        "nll": nll,  # of the run's models on held-out domains, without and with their temperatures
        "holds": holds,  # what of the training images is in the model; "": weights, and means of many images
        "needs_encoder_weights": needs_weights,  # neither the directory nor a public name gives the encoder's weights
        "onnx": onnx,
        "pushed": pushed,
    }
    sizes = ", ".join(f"{name} ({size / 1e6:,.2f} MB)" for name, size in files.items())
    first, *further = config.chosen.split("; ")  # many clauses: a line each
    lines = [f"model: {first}", *(f"  {clause}" for clause in further), f"wrote {folder}: {sizes}"]
    if config.fitted_temperature is not None and config.temperature == 1.0:
        fitted = f"a temperature of {config.fitted_temperature:.3g} was fitted (--temperature uses it)"
        if nll is not None:
            direction = "worse" if nll[1] > nll[0] else "better"
            fitted += f"; on the held-out domains, temperatures made the nll {direction}: {nll[0]:.3f} → {nll[1]:.3f}"
        lines.append(fitted)
    if holds:
        lines.append(f"{holds}; share the model only as you may share these images")
    if needs_weights:
        weights = "the encoder's weights come from a file that is not in the directory"
        lines.append(f"{weights}: loading needs it (--encoder-weights FILE)")
    if onnx is not None:
        agrees = f"agrees with torch on {onnx.compared_on}: probabilities differ by {onnx.difference:.1e}"
        lines.append(f"{onnx.path.name}: opset {onnx.opset}; {agrees}")
    if pushed is not None:
        lines.append(f"on the hub: {pushed.url}{' (private)' if pushed.private else ''}")
    return CommandResult(document, lines)


def with_audit(run: Run, parts: ModelParts) -> ModelParts:
    """Returns the parts with what an audit of the run's data found, for the card."""
    if run.audit is None:
        return parts
    return replace(parts, config=parts.config.model_copy(update={"audit": headline(findings(run.audit))}))


def _images(run: Run) -> list[Image.Image]:
    """Returns some images of the run's data set; none if it has none, or cannot be read here."""
    if not run.recipe.has_images:
        return []
    try:
        dataset = read_data(check(written_recipe(run.path, run.results["recipe"])))
        rows = dict.fromkeys(i * (len(dataset) - 1) // (COMPARED_IMAGES - 1) for i in range(COMPARED_IMAGES))
        return [dataset.image(row) for row in rows]
    except (UserError, UnreadableImage) as error:
        logger.warning("the run's images cannot be read (%s); ONNX is compared on random pixels", error)
        return []


def _with_final_fit(run: Run, method: str, ensemble: bool) -> Run:
    """Returns the run with a final fit of the method, of all seeds for an ensemble, which is trained now if need be."""
    final = run.final_fits.get(method)
    wanted = {*map(str, run.recipe.protocol.seeds)} if ensemble else set()
    if final is not None and final["status"] == "ok" and wanted <= {*final.get("seeds", ())}:
        return run
    by_held_out = "export a model of the estimate by --held-out DOMAIN"
    if run.recipe.protocol.selection == ORACLE:
        problem = "a final fit needs an unbiased estimate; selection: oracle has none"
        raise UserError(f"{run.path}: {problem}; {by_held_out}")
    if not run.rows:  # it is written without a summary as long as models train
        raise UserError(f"{run.path}: the run is not finished; run its recipe again, or name a model by --held-out")
    written_recipe(run.path, run.results["recipe"])  # raises if it is missing or was edited
    # not recipe.yaml itself, which has the growth of a run that was refused or killed
    text = RecipeText(str(run.path / RESULTS), copy.deepcopy(run.results["recipe"]))
    name = run.path.resolve().name  # the directory may have been renamed
    # as the user named it: the run's page repeats it, and is given to others
    parent = run.path.parent if run.path.name == name else run.path.resolve().parent
    for key, value in (("name", name), ("output.dir", str(parent))):
        apply_override(text, f"{key}={json.dumps(value)}")
    recipe = check(text)
    seeds = len(recipe.protocol.seeds) if ensemble else 1
    if ensemble and next(item for item in recipe.methods if item.label == method).is_solver:
        problem = f"on all images, {method} has the same head under every seed; leave it out"
        raise UserError(f"{run.path}: --ensemble: {problem}")
    of_seeds = f" under {seeds} seeds" if seeds > 1 else ""
    logger.info("%s: trains the final fit of %s on all labelled images%s", run.path, method, of_seeds)
    run_recipe(recipe, [FitRequest(method, ensemble)])
    run = read_run(run.path)
    final = run.final_fits.get(method)
    if final is None or final["status"] != "ok":
        reason = f"no value of {run.rule} in all of its runs" if final is None else final["reason"]
        raise UserError(f"{run.path}: the final fit of {method} has failed: {reason}")
    return run
