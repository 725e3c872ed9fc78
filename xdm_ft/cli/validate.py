"""`xdm-ft validate`: the resolved recipe with the meaning of every key, the exact prompts and the plan."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdm_ft.cli.answer import Answer
from xdm_ft.cli.arguments import add_recipe, load_recipe
from xdm_ft.runtime.errors import UserError

if TYPE_CHECKING:
    from xdm_ft.encoders import Encoder
    from xdm_ft.experiment.estimate import CutCost, Estimate
    from xdm_ft.experiment.faults import Finding
    from xdm_ft.experiment.plan import Plan
    from xdm_ft.recipe.settings import Recipe
    from xdm_ft.runtime.settings import Block

HELP = "check a recipe against its data; print the resolved recipe, the prompts and the plan"
EXAMPLES = ("xdm-ft validate clip_folder data.root=DIR protocol.test_domains=sketch",)
MEANING_COLUMN = 44
logger = logging.getLogger("xdm_ft")
add_arguments = add_recipe


def main(arguments: argparse.Namespace) -> Answer:
    return validate(load_recipe(arguments))


@dataclass(frozen=True)
class Validated:
    recipe: Recipe
    plan: Plan
    findings: list[Finding]
    prompts: list[str] | None = None  # exactly as the text encoder reads them; None: it has no text encoder
    method_prompts: dict[str, list[str]] = field(default_factory=dict)
    """{method that sets its own: its prompts for the first class}: up to 80, those of one class stand for all"""
    estimate: Estimate | None = None  # None: an encoder can not be built
    cuts: list[CutCost] = field(default_factory=list)
    blocks: dict[str | None, list[str]] = field(default_factory=dict)
    """{label of an encoder that is cut: a line per block}"""
    power: Sequence[str] = ()  # the smallest difference that it will find, if an earlier run of the plan says so

    def answer(self, error: UserError | None = None) -> Answer:
        from xdm_ft.experiment.plan import costs

        document = {
            "recipe": self.recipe.resolved(),
            "prompts": self.prompts,
            "method_prompts": self.method_prompts,
            "plan": costs(self.plan),
            "estimate": None if self.estimate is None else self.estimate.to_json(),
            "cuts": [cost.to_json() for cost in self.cuts],
            "blocks": [{"encoder": label, "lines": lines} for label, lines in self.blocks.items()],
            "notes": self.plan.notes,
            "findings": self.findings,
            "power": self.power,
            "error": None if error is None else str(error),
        }
        return Answer(document, self._lines(), error, text_despite_error=True)

    def _lines(self) -> list[str]:
        from xdm_ft.experiment.plan import describe

        time = "time: not measured, as an encoder can not be built"
        if self.estimate is not None:
            time = f"time: {self.estimate.text()} on this machine, {self.estimate.device}"
        parts: dict[str, Sequence[str]] = {"prompts, exactly as the text encoder reads them": self.prompts or ()}
        parts |= {f"prompts of {name}, shown for the first class": own for name, own in self.method_prompts.items()}
        parts["plan"] = [*describe(self.plan).splitlines(), time, *self.plan.notes]
        for label, chain in self.blocks.items():
            parts[f"blocks of the encoder{'' if label is None else f' {label}'}, in order"] = chain
        parts["what trains above a cut"] = [line for cost in self.cuts for line in cost.text()]
        parts["what it will find, by the variances of the run that is there"] = self.power
        parts["findings"] = [finding.line for finding in self.findings]
        text = resolved_with_meanings(self.recipe).split("\n")
        for heading, lines in parts.items():
            text += [f"# {heading}", *(f"#   {line}" for line in lines)] if lines else []
        return text


def validate(recipe: Recipe) -> Answer:
    """Raises `UserError` if data and recipe do not fit together; a fault of an encoder is in the answer."""
    from xdm_ft.cut.cut import describe_chain
    from xdm_ft.experiment.estimate import cut_costs, estimate
    from xdm_ft.experiment.faults import faults
    from xdm_ft.experiment.machine import launched
    from xdm_ft.experiment.plan import make_plan, read_data
    from xdm_ft.experiment.prepare import build_encoders, check_low_rank, log_encoder, with_text
    from xdm_ft.experiment.resume import keeping_choices
    from xdm_ft.experiment.tracking import installed_trackers

    recipe = keeping_choices(recipe)
    installed_trackers(recipe)  # raises, as the run would
    dataset = read_data(recipe)
    plan = make_plan(recipe, dataset)
    try:
        encoders = build_encoders(recipe)
        recipe = with_text(recipe, encoders)
        check_low_rank(recipe, encoders)
    except UserError as error:  # the weights may come later, the data can be mended now
        try:
            findings = faults(plan, show=True)
        except UserError:  # of the cache's folder: it is the next fault, and the data are not read
            raise error from None
        return Validated(recipe, plan, findings).answer(error)
    plan = plan if recipe is plan.recipe else make_plan(recipe, dataset)
    for encoder in encoders.values():
        log_encoder(encoder)
    prompts, method_prompts = _prompts(recipe, encoders, dataset.class_names)
    with launched(recipe) as accelerator:
        time = estimate(plan, encoders, accelerator)
        cuts = cut_costs(plan, encoders, accelerator)
    blocks = {label: describe_chain(encoders[label]) for label in dict.fromkeys(cost.encoder for cost in cuts)}
    findings = faults(plan, show=True)
    power = _power(recipe)
    return Validated(recipe, plan, findings, prompts, method_prompts, time, cuts, blocks, power).answer()


def _prompts(
    recipe: Recipe, encoders: Mapping[str | None, Encoder], class_names: tuple[str, ...]
) -> tuple[list[str] | None, dict[str, list[str]]]:
    """Returns the prompts of all classes, and for methods that set their own those of the first class."""
    from xdm_ft.encoders import TextEncoder
    from xdm_ft.weights.prompts import warn_of_class_names

    prompts, of_methods = None, {}
    for label, encoder in encoders.items():
        if isinstance(encoder, TextEncoder) and not encoder.text_reason:
            prompts = prompts or list(encoder.exact_prompts(class_names))
            for item in recipe.methods:
                if item.block.prompts is not None and item.encoder_label == label:
                    of_methods[item.label] = list(encoder.exact_prompts(class_names[:1], item.block.prompts))
    for warning in warn_of_class_names(class_names) if prompts is not None else ():
        logger.warning("warning: %s", warning)
    return prompts, of_methods


def _power(recipe: Recipe) -> list[str]:
    """Returns what the run will find, if an earlier run of the same plan, or a smaller one, gives variances."""
    from xdm_ft.experiment.machine import as_launched
    from xdm_ft.experiment.resume import refused_changes
    from xdm_ft.protocol.splits import LOOKS
    from xdm_ft.report.comparisons import forecast
    from xdm_ft.report.finished import is_run, read_run

    path = Path(recipe.output.dir) / recipe.name
    if not is_run(path):
        return []
    results = read_run(path).results
    if refused_changes(results["recipe"], as_launched(recipe).resolved()):
        return []
    seeds = LOOKS[-1] if recipe.auto_seeds else len(recipe.protocol.seeds)
    return forecast(results, recipe.protocol.metric, seeds, len(recipe.declared))


def resolved_with_meanings(recipe: Recipe) -> str:
    """Returns the resolved recipe as YAML, with each key's meaning as a comment. It is a valid recipe."""
    from xdm_ft.recipe.text import in_yaml

    lines, values = [f"name: {in_yaml(recipe.name)}"], recipe.written()
    for name, block in recipe.blocks.items():
        lines += [f"{name}:", *_commented(block, values[name], "  ")]
    lists: dict[str, list[Block]] = {"methods": [item.block for item in recipe.own_methods]}
    if recipe.several_encoders:
        lists = {"encoders": [encoder.block for encoder in recipe.encoders], **lists}
    for name, blocks in lists.items():
        lines.append(f"{name}:")
        for block, block_values in zip(blocks, values[name], strict=True):
            first, *rest = _commented(block, block_values, "    ")
            lines += [f"  - {first.lstrip()}", *rest]
    return "\n".join(lines)


def _commented(block: Block, values: Mapping[str, Any], indent: str) -> list[str]:
    """Returns lines of `key: value  # meaning`; nested blocks are in YAML's flow style."""
    from xdm_ft.recipe.text import in_yaml

    lines = []
    for name, setting in type(block).model_fields.items():
        line = f"{indent}{name}: {in_yaml(values[name])}"
        lines.append(f"{line:<{MEANING_COLUMN}}  # {setting.description}" if setting.description else line)
    return lines
