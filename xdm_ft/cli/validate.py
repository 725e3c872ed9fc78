"""`xdm-ft validate`: the resolved recipe with the meaning of every key, the exact prompts and the plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from xdm_ft.cli.answer import Answer
from xdm_ft.cut.cut import describe_chain
from xdm_ft.encoders import TextEncoder
from xdm_ft.experiment.cut_costs import CutCost, cut_costs
from xdm_ft.experiment.estimate import Estimate, estimate
from xdm_ft.experiment.faults import Finding, faults
from xdm_ft.experiment.machine import as_launched, launched
from xdm_ft.experiment.plan import Plan, costs, describe, make_plan, read_data
from xdm_ft.experiment.prepare import build_encoders, check_low_rank, log_encoder, with_text
from xdm_ft.experiment.resume import keeping_choices, refused_changes
from xdm_ft.experiment.tracking import installed_trackers
from xdm_ft.protocol.splits import LOOKS
from xdm_ft.recipe.settings import Recipe
from xdm_ft.recipe.text import Dumper
from xdm_ft.report.comparisons import forecast
from xdm_ft.report.finished import is_run, read_run
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.runtime.settings import Block
from xdm_ft.weights.prompts import warn_of_class_names

logger = logging.getLogger("xdm_ft")
MEANING_COLUMN = 44


@dataclass(frozen=True)
class Validated(Answer):
    recipe: Recipe
    plan: Plan
    prompts: list[str] | None  # exactly as the text encoder reads them; None: it has no text encoder
    method_prompts: dict[str, list[str]]
    """{method that sets its own: its prompts for the first class}: up to 80, those of one class stand for all"""
    findings: list[Finding]
    estimate: Estimate | None  # None: an encoder can not be built
    cuts: list[CutCost]
    blocks: dict[str | None, list[str]]  # of each encoder that is cut, by its label: a line per block
    problem: UserError | None = None  # why an encoder can not be built or trained
    power: Sequence[str] = ()  # the smallest difference that it will find, if an earlier run of the plan says so
    shown_with_error = True

    @property
    def error(self) -> UserError | None:
        return self.problem

    def text(self) -> str:
        time = "time: not measured, as an encoder can not be built"
        if self.estimate is not None:
            time = f"time: {self.estimate.text()} on this machine, {self.estimate.device}"
        parts = [("plan", [*describe(self.plan).splitlines(), time, *self.plan.notes])]
        if self.prompts is not None:
            own = [
                (f"prompts of {label}, shown for the first class", found)
                for label, found in self.method_prompts.items()
            ]
            parts = [("prompts, exactly as the text encoder reads them", self.prompts), *own, *parts]
        for label, lines in self.blocks.items():
            parts.append((f"blocks of the encoder{'' if label is None else f' {label}'}, in order", lines))
        if self.cuts:
            parts.append(("what trains above a cut", [line for cost in self.cuts for line in cost.text()]))
        if self.power:
            parts.append(("what it will find, by the variances of the run that is there", [*self.power]))
        if self.findings:
            parts.append(("findings", [finding.line for finding in self.findings]))
        lines = [line for heading, found in parts for line in (f"# {heading}", *(f"#   {printable(x)}" for x in found))]
        return "\n".join([resolved_with_meanings(self.recipe), *lines])

    def to_json(self) -> dict[str, Any]:
        return {
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
            "error": None if self.problem is None else str(self.problem),
        }


def validate(recipe: Recipe) -> Validated:
    """Raises `UserError` if data and recipe do not fit together; a fault of an encoder is in the answer."""
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
        return Validated(recipe, plan, None, {}, findings, None, [], {}, error)
    plan = plan if recipe is plan.recipe else make_plan(recipe, dataset)
    prompts, own = None, {}
    for label, encoder in encoders.items():
        log_encoder(encoder)
        if isinstance(encoder, TextEncoder) and not encoder.text_reason:
            prompts = prompts or list(encoder.exact_prompts(dataset.class_names))
            for item in recipe.methods:
                if item.block.prompts is not None and item.encoder_label == label:
                    own[item.label] = list(encoder.exact_prompts(dataset.class_names[:1], item.block.prompts))
    if prompts is not None:
        for warning in warn_of_class_names(dataset.class_names):
            logger.warning("warning: %s", warning)
    with launched(recipe) as accelerator:
        time = estimate(plan, encoders, accelerator)
        cuts = cut_costs(plan, encoders, accelerator)
    blocks = {label: describe_chain(encoders[label]) for label in dict.fromkeys(cost.encoder for cost in cuts)}
    findings = faults(plan, show=True)
    return Validated(recipe, plan, prompts, own, findings, time, cuts, blocks, power=_power(recipe))


def _power(recipe: Recipe) -> list[str]:
    """Returns what the run will find, if an earlier run of the same plan, or a smaller one, gives variances."""
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
    lines, values = [f"name: {_value(recipe.name)}"], recipe.written()
    for name, block in recipe.blocks.items():
        lines += [f"{name}:", *_commented(block, values[name], "  ")]
    lists: dict[str, list[Block]] = {"methods": [item.block for item in recipe.own_methods]}
    if recipe.several_encoders:
        lists = {"encoders": [encoder.block for encoder in recipe.encoders], **lists}
    for name, blocks in lists.items():
        lines.append(f"{name}:")
        for block, of_block in zip(blocks, values[name], strict=True):
            first, *rest = _commented(block, of_block, "    ")
            lines += [f"  - {first.lstrip()}", *rest]
    return "\n".join(lines)


def _commented(block: Block, values: Mapping[str, Any], indent: str) -> list[str]:
    """Returns lines of `key: value  # meaning`; nested blocks are in YAML's flow style."""
    lines = []
    for name, field in type(block).model_fields.items():
        line = f"{indent}{name}: {_value(values[name])}"
        lines.append(f"{line:<{MEANING_COLUMN}}  # {field.description}" if field.description else line)
    return lines


def _value(value: Any) -> str:
    def dumped(allow_unicode: bool) -> str:
        text: str = yaml.dump(
            value, Dumper=_OneLine, default_flow_style=True, allow_unicode=allow_unicode, width=float("inf"),
            sort_keys=False,
        )  # fmt: skip
        return text.removesuffix("\n").removesuffix("\n...")  # PyYAML writes a line "..." after a single scalar

    text = dumped(True)
    return text if text.isprintable() else dumped(False)


class _OneLine(Dumper):
    """Writes a text that is not printable in double quotes, where YAML has escapes for all characters."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_OneLine.add_representer(str, _OneLine.represent_str)
