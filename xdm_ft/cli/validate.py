"""`xdm-ft validate`: the plan, the exact prompts, and for a file or pipe the recipe with the meaning of every key."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xdm_ft.cli import CommandResult
from xdm_ft.cli.run import load_recipe
from xdm_ft.cut.cut import describe_chain
from xdm_ft.data.features import FeatureTable
from xdm_ft.encoders import Encoder, TextEncoder
from xdm_ft.experiment.data_checks import check_data, log_left_out
from xdm_ft.experiment.estimate import CutCost, cut_costs, estimate
from xdm_ft.experiment.plan import Plan, costs, describe, make_plan, read_data
from xdm_ft.experiment.prepare import (
    build_encoders,
    check_batch_norm,
    check_low_rank,
    check_prompts,
    log_encoder,
)
from xdm_ft.experiment.resume import inherit_choices, refused_changes
from xdm_ft.experiment.tracking import installed_trackers
from xdm_ft.experiment.work import as_launched, launched
from xdm_ft.features.given import zero_shot_accuracies
from xdm_ft.model_sources.prompts import warn_of_class_names
from xdm_ft.protocol.folds import recommend_folds
from xdm_ft.protocol.site_class import site_class_of
from xdm_ft.recipe.settings import Recipe
from xdm_ft.recipe.text import in_yaml
from xdm_ft.report.comparisons import forecast
from xdm_ft.results.run import is_run, read_run
from xdm_ft.runtime.errors import UserError, join_names
from xdm_ft.runtime.settings import Block

MEANING_COLUMN = 44
MAX_COLUMNS = 20  # of a table that are named
COLUMNS = 110  # of a line of class names
logger = logging.getLogger("xdm_ft")


def main(arguments: argparse.Namespace) -> CommandResult:
    return validate(load_recipe(arguments))


def validate(recipe: Recipe) -> CommandResult:
    """Returns the resolved recipe, prompts, plan, time, blocks, findings and what the run will find.

    Raises `UserError` if data and recipe do not fit together; a fault of an encoder is in the answer.
    """
    recipe = inherit_choices(recipe)
    installed_trackers(recipe)  # raises, as the run would
    dataset = read_data(recipe)
    log_left_out(dataset)
    plan = make_plan(recipe, dataset)
    fault, time, power, encoders = None, None, list[str](), dict[str | None, Encoder]()
    prompts: list[str] | None = None  # exactly as the text encoder reads them; None: it has no text encoder
    method_prompts: dict[str, list[str]] = {}  # of the first class, which stands for all: there are up to 80
    cuts: list[CutCost] = []
    blocks: dict[str | None, list[str]] = {}  # {label of an encoder that is cut: a line per block}
    try:
        recipe, encoders = build_encoders(recipe, dataset)
        check_low_rank(recipe, encoders)
        check_prompts(recipe, encoders, dataset.class_names)
        check_batch_norm(plan, encoders)
    except UserError as error:  # the weights may come later, the data can be mended now
        fault = error
        try:
            findings = check_data(plan, show=True)
        except UserError:  # of the cache's folder: it is the next fault, and the data are not read
            raise error from None
    else:
        plan = plan if recipe is plan.recipe else make_plan(recipe, dataset)
        for label, encoder in encoders.items():
            log_encoder(encoder)
            if isinstance(encoder, TextEncoder) and not encoder.text_reason:
                # the tokenizer is read only if a method needs it
                reads = any(item.reads_text for item in recipe.runnable_methods if item.encoder_label == label)
                prompts_of = encoder.read_prompts if reads else encoder.exact_prompts
                prompts = prompts or prompts_of(dataset.class_names)
                for item in recipe.methods:
                    if item.block.prompts is not None and item.encoder_label == label:
                        method_prompts[item.label] = prompts_of(dataset.class_names[:1], item.block.prompts)
        for warning in warn_of_class_names(dataset.class_names) if prompts is not None else ():
            logger.warning("warning: %s", warning)
        with launched(recipe) as accelerator:
            time = estimate(plan, encoders, accelerator)
            cuts = cut_costs(plan, encoders, accelerator)
        blocks = {
            label: describe_chain(encoders[label]) for label in dict.fromkeys(cost.document["encoder"] for cost in cuts)
        }
        findings = check_data(plan, show=True)
        power = _power(recipe)

    folds, folds_in_words = _folds(plan)
    document = {
        "recipe": recipe.resolved(),
        "classes": dataset.class_names,
        "prompts": prompts,
        "method_prompts": method_prompts,
        "plan": costs(plan),
        "estimate": None if time is None else time.to_json(),
        "cuts": [cost.document for cost in cuts],
        "blocks": [{"encoder": label, "lines": lines} for label, lines in blocks.items()],
        "notes": plan.notes,
        "folds": folds,
        "site_class": site_class_of(dataset).to_json(),
        "findings": findings,
        "power": power,
        "error": None if fault is None else str(fault),
    }
    time_line = "time: not measured, as an encoder cannot be built"
    if time is not None:
        time_line = f"time: {time.text()} on this machine, {time.device}"
    columns = list[str]()
    if dataset.columns is not None:
        read, others = (join_names(names, MAX_COLUMNS) for names in dataset.columns)
        columns = [f"columns of the table: {read} are read; {f'ignored: {others}' if others else 'no other'}"]
    parts: dict[str, Sequence[str]] = {"plan": [*columns, *describe(plan).splitlines(), time_line, *plan.notes]}
    parts["classes"] = _in_lines(dataset.class_names)
    parts["folds of domains that are held out together"] = folds_in_words
    text_scores = None
    if isinstance(dataset, FeatureTable) and dataset.class_embeddings is not None:
        text_scores = zero_shot_accuracies(dataset)
        parts["zero-shot accuracy by data.class_embeddings"] = [f"{name}: {of:.1%}" for name, of in text_scores.items()]
    document["zero_shot"] = text_scores
    runnable = () if fault else recipe.runnable_methods
    starts = [item.start_words(encoders[item.encoder_label].normalize) for item in runnable]
    parts["how heads start"] = document["starts"] = starts
    parts["prompts, exactly as the text encoder reads them"] = prompts or ()
    parts |= {f"prompts of {name}, shown for the first class": lines for name, lines in method_prompts.items()}
    parts["site × class"] = site_class_of(dataset).sentences
    for label, chain in blocks.items():
        parts[f"blocks of the encoder{'' if label is None else f' {label}'}, in order"] = chain
    parts["what trains above a cut"] = [line for cost in cuts for line in cost.lines]
    parts["differences it can find, by the variances of the existing run"] = power
    parts["findings"] = [finding.line for finding in findings]
    text = annotate(recipe).split("\n")
    if sys.stdout.isatty():  # nobody would see the plan below so many lines
        text = [f"# recipe: {len(text)} lines, every key with its meaning: xdm-ft validate RECIPE > FILE"]
    for heading, lines in parts.items():
        text += [f"# {heading}", *(f"#   {line}" for line in lines)] if lines else []
    return CommandResult(document, text, fault, text_despite_error=True)


def _folds(plan: Plan) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns domains and images per class of each fold, and lines with them and with a better number of folds."""
    protocol, names, folds, lines = plan.recipe.protocol, plan.dataset.class_names, list[dict[str, Any]](), list[str]()
    for split in plan.splits if protocol.folds is not None else ():
        counts = np.bincount(plan.dataset.labels[split.evaluation["test"].numpy()], minlength=len(names)).tolist()
        folds.append({"domains": list(split.test_domains), "images": dict(zip(names, counts, strict=True))})
        images = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
        lines.append(f"{split.fold}: {', '.join(split.test_domains)}; images: {images}")
    if protocol.name != "official" and protocol.test_domains is None and not protocol.together:
        lines += recommend_folds(len(plan.dataset.domain_names), protocol.folds)
    return folds, lines


def _in_lines(names: Sequence[str]) -> list[str]:
    """Returns all names in lines of at most `COLUMNS` characters, unless one name is longer."""
    lines = [names[0]]
    for name in names[1:]:
        lines[-1] += ","
        if len(lines[-1]) + len(name) < COLUMNS:
            lines[-1] += f" {name}"
        else:
            lines.append(name)
    return lines


def _power(recipe: Recipe) -> list[str]:
    """Returns the smallest difference that the run will find, if an earlier run of its plan, or of less, tells."""
    path = Path(recipe.output.dir) / recipe.name
    if not is_run(path):
        return []
    run = read_run(path)
    # as launched: the run wrote its precision, which the recipe itself may leave out
    if refused_changes(run.recipe.resolved(), as_launched(recipe).resolved()):
        return []
    return forecast(run, len(recipe.protocol.seeds), len(recipe.declared))


def annotate(recipe: Recipe) -> str:
    """Returns the resolved recipe as YAML, with each key's meaning as a comment. It is a valid recipe."""
    lines, values = [f"name: {in_yaml(recipe.name)}"], recipe.resolved()
    for name, block in recipe.blocks.items():
        lines += [f"{name}:", *_comment_lines(block, values[name], "  ")]
    lists: dict[str, list[Block]] = {"methods": [item.block for item in recipe.own_methods]}
    if recipe.several_encoders:
        lists = {"encoders": [encoder.block for encoder in recipe.encoders], **lists}
    for name, blocks in lists.items():
        lines.append(f"{name}:")
        for block, block_values in zip(blocks, values[name], strict=True):
            first, *rest = _comment_lines(block, block_values, "    ")
            lines += [f"  - {first.lstrip()}", *rest]
    return "\n".join(lines)


def _comment_lines(block: Block, values: Mapping[str, Any], indent: str) -> list[str]:
    """Returns lines of `key: value  # meaning`; nested blocks are in YAML's flow style."""
    lines = []
    for name, setting in type(block).model_fields.items():
        value = values.get(name, setting.default)  # a default may be left out of what is written
        line = f"{indent}{name}: {in_yaml(value)}"
        lines.append(f"{line:<{MEANING_COLUMN}}  # {setting.description}" if setting.description else line)
    return lines
