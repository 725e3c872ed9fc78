"""`xdm-ft export`: writes a model of a run as a model directory."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from PIL import Image

from xdm_ft.cli.answer import Answer
from xdm_ft.experiment import run as run_recipe
from xdm_ft.experiment.final_fit import Wanted
from xdm_ft.experiment.plan import read_data
from xdm_ft.experiment.resume import written_recipe
from xdm_ft.export.card import held_words
from xdm_ft.export.choose import Choice, chosen_method, read_parts, with_training_images
from xdm_ft.export.config import Expected
from xdm_ft.export.directory import new_directory, refuse_taken, write_directory
from xdm_ft.export.hub import Pushed, check_name, push
from xdm_ft.export.onnx import OnnxFile, check_installed, write_onnx
from xdm_ft.export.parts import Parts
from xdm_ft.images.decode import UnreadableImage
from xdm_ft.recipe.check import check
from xdm_ft.recipe.text import apply_override
from xdm_ft.report.costs import seconds_text
from xdm_ft.report.finished import ORACLE, Run, read_run
from xdm_ft.runtime.errors import UserError, printable

IMAGES = 8  # that ONNX Runtime and torch are compared on
logger = logging.getLogger("xdm_ft")


@dataclass(frozen=True)
class Exported(Answer):
    directory: Path
    model: str  # one line: which model, and how it was chosen
    files: dict[str, int]  # {name: bytes}
    temperature: float  # by which the logits are divided
    fitted_temperature: float | None
    nll: tuple[float, float] | None  # of the run's models on held-out domains, without and with their temperatures
    holds: str  # what of the training images is in the model, for a reader; "": weights, and means of many images
    needs_encoder_weights: bool  # neither the directory nor a public name gives the encoder's weights
    onnx: OnnxFile | None
    pushed: Pushed | None  # to the Hugging Face hub

    def _effect(self) -> str:
        """What temperatures do to the negative log-likelihood on the held-out domains."""
        if self.nll is None:
            return ""
        plain, scaled = self.nll
        direction = "worse" if scaled > plain else "better"
        return f"; on the held-out domains, temperatures made the nll {direction}: {plain:.3f} → {scaled:.3f}"

    def text(self) -> str:
        sizes = ", ".join(f"{name} ({size / 1e6:,.2f} MB)" for name, size in self.files.items())
        lines = [f"model: {self.model}", f"wrote {self.directory}: {sizes}"]
        if self.fitted_temperature is not None and self.temperature == 1.0:
            fitted = f"a temperature of {self.fitted_temperature:.3g} was fitted (--temperature uses it)"
            lines.append(fitted + self._effect())
        if self.holds:
            lines.append(f"{self.holds}; share the model only as you may share these images")
        if self.needs_encoder_weights:
            lines.append(
                "the encoder's weights come from a file that is not in the directory: loading needs it "
                "(--encoder-weights FILE)"
            )
        if self.onnx is not None:
            agrees = f"agrees with torch on {self.onnx.compared_on}: probabilities differ by {self.onnx.difference:.1e}"
            lines.append(f"{self.onnx.path.name}: opset {self.onnx.opset}; {agrees}")
        if self.pushed is not None:
            lines.append(f"on the hub: {self.pushed.url}{' (private)' if self.pushed.private else ''}")
        return "\n".join(map(printable, lines))


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
) -> Exported:
    """Writes the chosen model of the run into a new directory.

    Without `choice.held_out` it is the final fit of the method, trained now if the run has none; for an official split
    only if `best`, else without one the method's first seed. `push_to_hub`: a repository that the directory is uploaded
    to; a head with training features only if `allow_training_features`, the checksums of training images only if
    `with_training_hashes`.

    Raises `UserError` if there is no such model, if its files are damaged, or if the directory is taken.
    """
    if best and choice.held_out is not None:
        raise UserError("--best names the final fit, and --held-out a model that was trained without a domain")
    if onnx or onnx_preprocessing:
        check_installed()
    if push_to_hub is not None:
        check_name(push_to_hub)
    run, folder = read_run(Path(run_dir).expanduser()), Path(target).expanduser()
    refuse_taken(folder)  # before a training of hours
    method, _ = chosen_method(run, choice)
    # an official split has no folds: its models are of use as they are
    is_official = run.results["recipe"]["protocol"]["name"] == "official"
    if (
        choice.held_out is None
        and choice == Choice(choice.method)
        and (best or not is_official or method in run.final_fits)
    ):
        has_options = wise_ft is not None or temperature or push_to_hub is not None
        if ensemble or (has_options and method not in run.final_fits):
            # before a training of hours: options that do not fit a model of the run do not fit its final fit either
            fold = next(record.test_domains for record in run.records if record.method == method)
            alike = read_parts(run, Choice(method, fold), wise_ft=wise_ft, ensemble=ensemble, temperature=temperature)
            _refuse_upload(alike, method, push_to_hub, allow_training_features)
        run = _with_final_fit(run, method, ensemble)
    parts = read_parts(run, choice, wise_ft=wise_ft, ensemble=ensemble, temperature=temperature)
    _refuse_upload(parts, method, push_to_hub, allow_training_features)
    parts = with_training_images(run, parts)
    onnx_file = None
    with new_directory(folder) as temporary:
        config = write_directory(parts, temporary, with_encoder)
        if onnx or onnx_preprocessing:
            onnx_file = write_onnx(parts, temporary, _images(run), onnx_preprocessing)
            onnx_file = replace(onnx_file, path=folder / onnx_file.path.name)
    return Exported(
        folder,
        config.chosen,
        {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
        config.temperature,
        config.fitted_temperature,
        _nll(config.expected),
        held_words(config, parts.training_features),
        config.encoder.file is None and "weights" not in config.encoder.settings,
        onnx_file,
        None if push_to_hub is None else push(folder, push_to_hub, private, with_training_hashes),
    )


def _refuse_upload(parts: Parts, method: str, push_to_hub: str | None, allow_training_features: bool) -> None:
    if push_to_hub is not None and parts.training_features and not allow_training_features:
        held = f"the head of {method} contains the features of all its training images"
        raise UserError(f"--push-to-hub: {held}; --allow-training-features uploads them")


def _nll(expected: Expected | None) -> tuple[float, float] | None:
    if expected is None or expected.calibrated is None:
        return None
    plain = expected.mean if expected.metric == "nll" else expected.others.get("nll")
    return None if plain is None else (plain, expected.calibrated["nll"])


def _images(run: Run) -> list[Image.Image]:
    """Returns some images of the run's data set; none if it can not be read here."""
    try:
        dataset = read_data(check(written_recipe(run.path, run.results)))
        rows = dict.fromkeys(place * (len(dataset) - 1) // (IMAGES - 1) for place in range(IMAGES))
        return [dataset.image(row) for row in rows]
    except (UserError, UnreadableImage) as error:
        logger.warning("the run's images can not be read (%s); ONNX is compared on random pixels", error)
        return []


def _with_final_fit(run: Run, method: str, ensemble: bool) -> Run:
    """Returns the run with a final fit of the method, of all seeds for an ensemble, which is trained now if need be."""
    final, recipe = run.final_fits.get(method), run.results["recipe"]
    if final is not None and final["status"] == "ok" and (not ensemble or "seeds" in final):
        return run
    if recipe["protocol"]["selection"] == ORACLE:
        raise UserError(
            f"{run.path}: a final fit needs an unbiased estimate; selection: oracle has none; "
            "export a model of the estimate by --held-out DOMAIN"
        )
    if not run.rows:  # it is written without a summary as long as models train
        raise UserError(f"{run.path}: the run is not finished; run its recipe again, or name a model by --held-out")
    text = written_recipe(run.path, run.results)
    name = str(text.values["name"])
    if name != run.path.resolve().name:
        raise UserError(
            f"{run.path}: the final fit is trained in a directory with the run's name, {name}; rename it, "
            "or export a model of the estimate by --held-out DOMAIN"
        )
    # as the user named it: the run's page repeats it, and is given to others
    parent = run.path.parent if run.path.name == name else run.path.resolve().parent
    apply_override(text, f"output.dir={json.dumps(str(parent))}")
    made = check(text)
    seeds = len(made.protocol.seeds) if ensemble else 1
    if ensemble and next(item for item in made.methods if item.label == method).is_solver:
        raise UserError(
            f"{run.path}: --ensemble: on all images, {method} has the same head under every seed; leave it out"
        )
    logger.info(
        "%s: trains the final fit of %s on all labelled images%s: about %s, as one model of the run took %s, after the "
        "features are read or computed",
        run.path, method, f" under {seeds} seeds" if seeds > 1 else "", *_times(run, method, seeds),
    )  # fmt: skip
    run_recipe(made, [Wanted(method, ensemble)])
    run = read_run(run.path)
    final = run.final_fits.get(method)
    if final is None or final["status"] != "ok":
        reason = f"no value of {run.rule} in all of its runs" if final is None else final["reason"]
        raise UserError(f"{run.path}: the final fit of {method} has failed: {reason}")
    return run


def _times(run: Run, method: str, models: int) -> tuple[str, str]:
    """Returns how long so many trainings of the method take, and how long one of the run took."""
    seconds = median(one.train_seconds or 0.0 for one in run.records if one.method == method)
    return f"{seconds_text(models * seconds)} s", f"{seconds_text(seconds)} s"
