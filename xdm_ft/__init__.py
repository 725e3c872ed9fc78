"""xdm_ft: fine-tuning foundation models for domain generalization. `import xdm_ft` loads no heavy library.

Public are the names in `__all__`, `xdm_ft.open` and the functions of `xdm_ft.xdomainmix`. Everything else is internal
and may change in any release; so is what `Results.run`, `Model.config` and `Model.module` hold.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xdm_ft.runtime.errors import UserError
from xdm_ft.version import __version__

if TYPE_CHECKING:
    from xdm_ft.cli.library import Results
    from xdm_ft.export.predictor import Model

__all__ = ["Model", "Results", "UserError", "__version__", "load", "run"]  # not `open`, which is Python's own name


def __getattr__(name: str) -> Any:
    """Loads `Results` and `Model` on first use: they import torch."""
    if name == "Results":
        from xdm_ft.cli.library import Results

        return Results
    if name == "Model":
        from xdm_ft.export.predictor import Model

        return Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def run(recipe: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any) -> Results:
    """Trains and compares all methods of a recipe, as `xdm-ft run` does, and returns the results.

    `recipe` is a file, the name of a packaged recipe, or nested dicts. Overrides change it:
    `run("demo", training={"steps": 10})` merges a block key by key, and `run("demo", **{"training.steps": 10})`
    replaces the value of a dotted key; `**{"xdomainmix.warmup_steps": 300}` sets a key of methods, as on the command
    line. `run("demo").table()` returns a list of flat dicts for `pandas.DataFrame`, by the recipe's selection rule.
    Progress is logged to the logger "xdm_ft", or shown on standard error.

    The run directory is `<output.dir>/<name>/`, as on the command line. An interrupted run resumes there; a finished
    run trains nothing again. Raises `UserError` for faults that the caller can repair: recipe, data, weights, disk.

    >>> results = xdm_ft.run("demo", methods=["zero_shot", "linear_probe"])
    >>> results
    <Results of output/demo: 11 models of zero_shot, linear_probe; selection: train_val>
    """
    from xdm_ft.recipe.text import recipe_of, say_if_finished

    text = recipe_of(recipe, overrides)
    say_if_finished(text)
    from xdm_ft.cli.library import run as run_recipe  # this imports torch
    from xdm_ft.recipe.check import check

    return run_recipe(check(text))


def open(run_dir: str | os.PathLike[str]) -> Results:
    """Returns the results of a finished run, as `run` returned them. Needs no recipe, data or weights.

    `open("output/demo").table()` has the rows of the recipe's own selection rule, `table(selection="oracle")` those of
    another one. Raises `UserError` if the directory holds no run, a damaged one, or one that is not finished.

    >>> xdm_ft.open("output/demo")
    <Results of output/demo: 11 models of zero_shot, linear_probe; selection: train_val>
    """
    from xdm_ft.cli.library import read_results  # this imports torch
    from xdm_ft.storage.names import expand_user

    return read_results(expand_user(os.fspath(run_dir), "run_dir"))


def load(
    path: str | os.PathLike[str],
    *,
    method: str | None = None,
    held_out: str | None = None,
    seed: int | None = None,
    trial: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    encoder_weights: str | os.PathLike[str] | None = None,
) -> Model:
    """Loads a model directory (of `xdm-ft export`), one on the hub (hf-hub:ORG/NAME[@REVISION]), or a model of a run.

    The model has `predict(images)`, `predict_proba(images)`, `encode(images)`, `distance(images)`, `class_names`, and
    `module`, a torch module from preprocessed pixels to logits. Of a run directory it is the final fit of `method`
    (None: the one that held-out domains prefer), or with `held_out` (domains joined by commas) a model that was trained
    without these, of `seed` (None: the first) and `trial`; the logger "xdm_ft" says which. An official split without a
    final fit gives the method's first seed. From the hub, only data are read; no code there is run.

    `device`: as in torch; None: a GPU if there is one. `precision`: fp32, bf16 or fp16; None: that of the run.
    `encoder_weights`: a file, for a model directory without the encoder whose weights came from a file. Raises
    `UserError` for directories that are damaged or hold no model, and for other weights than the model was trained on.

    >>> model = xdm_ft.load("output/demo", method="linear_probe", held_out="blurred", device="cpu")
    >>> model
    Model(linear_probe, 10 classes, demo, cpu)
    """
    from xdm_ft.export.choose import Choice
    from xdm_ft.export.predictor import load as load_model

    domains = None if held_out is None else tuple(held_out.split(","))
    choice = Choice(method, domains, seed, trial)
    weights = None if encoder_weights is None else os.fspath(encoder_weights)
    return load_model(path, device=device, precision=precision, encoder_weights=weights, choice=choice)
