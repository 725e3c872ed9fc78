"""`xdm-ft validate`: the resolved recipe with the meaning of every key, the exact prompts and the plan."""

from __future__ import annotations

import logging
from typing import Any

import yaml

from xdm_ft.encoders import TextEncoder
from xdm_ft.encoders._prompts import warn_of_class_names
from xdm_ft.errors import printable
from xdm_ft.experiment.data_faults import faults
from xdm_ft.experiment.plan import describe, make_plan, read_data
from xdm_ft.experiment.prepared import build_encoder
from xdm_ft.recipe.blocks import MethodItem
from xdm_ft.recipe.read import Recipe
from xdm_ft.recipe.text import Dumper
from xdm_ft.settings import Block
from xdm_ft.terminal import show

logger = logging.getLogger("xdm_ft")
MEANING_COLUMN = 44


def validate(recipe: Recipe) -> None:
    """Prints to standard output. Raises `UserError` if data, weights and recipe do not fit together."""
    dataset = read_data(recipe)
    plan = make_plan(recipe, dataset)
    encoder = build_encoder(recipe, recipe.protocol.seeds[0])
    show(resolved_with_meanings(recipe))
    if isinstance(encoder, TextEncoder):
        show("# prompts, exactly as the text encoder reads them")
        show("\n".join(f"#   {printable(prompt)}" for prompt in encoder.exact_prompts(dataset.class_names)))
        for item in recipe.methods:
            _print_own_prompts(encoder, item, dataset.class_names)
        for warning in warn_of_class_names(dataset.class_names):
            logger.warning("warning: %s", warning)
    show("# plan")
    show("\n".join(f"#   {line}" for line in [*describe(plan).splitlines(), *plan.notes]))
    if found := faults(plan, show=True):
        show("# findings")
        show("\n".join(f"#   {finding.line}" for finding in found))


def _print_own_prompts(encoder: TextEncoder, item: MethodItem, class_names: tuple[str, ...]) -> None:
    """Prints the prompts of a method that sets its own. Up to 80 of them: those of the first class stand for all."""
    if item.block.prompts is None:
        return
    show(f"# prompts of {item.label}, shown for the first class")
    prompts = encoder.exact_prompts(class_names[:1], item.block.prompts)
    show("\n".join(f"#   {printable(prompt)}" for prompt in prompts))


def resolved_with_meanings(recipe: Recipe) -> str:
    """Returns the resolved recipe as YAML, with each key's meaning as a comment. It is a valid recipe."""
    lines = [f"name: {_value(recipe.name)}"]
    for name, block in recipe.blocks.items():
        lines += [f"{name}:", *_commented(block, "  ")]
    lines.append("methods:")
    for item in recipe.methods:
        first, *rest = _commented(item.block, "    ")
        lines += [f"  - {first.lstrip()}", *rest]
    return "\n".join(lines)


def _commented(block: Block, indent: str) -> list[str]:
    """Returns lines of `key: value  # meaning`; nested blocks are in YAML's flow style."""
    values = block.model_dump(mode="json")
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
