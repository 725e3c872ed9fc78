"""Prompts of zero-shot classification: templates and class names."""

from __future__ import annotations

import logging
from typing import Annotated

from pydantic import AfterValidator, Field

from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.settings import OneOrMany

logger = logging.getLogger("xdm_ft")

PLACEHOLDER = "{}"
DEFAULT_PROMPTS = ("a photo of a {}",)
OPENAI_IMAGENET = "openai_imagenet"
"""Stands in a list of templates for the 80 with which Radford et al. 2021 classify ImageNet, as in open_clip."""
_SHORTEST_NAME = 3  # letters


def check_templates(templates: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the templates. Raises `ValueError`, which pydantic collects, unless each has `{}` exactly once."""
    for template in templates:
        if template == OPENAI_IMAGENET:
            continue
        if template.count(PLACEHOLDER) != 1 or template.replace(PLACEHOLDER, "").count("{"):
            raise ValueError(f'"{template}" must hold {{}} once, in place of the class name: "a photo of a {{}}"')
    return templates


Prompts = Annotated[tuple[str, ...], OneOrMany, AfterValidator(check_templates), Field(min_length=1)]
EncoderPrompts = Annotated[
    Prompts,
    Field(
        description="prompt templates; {} is the class name; the embeddings of several are averaged; "
        "openai_imagenet: the 80 templates of CLIP's authors"
    ),
]
"""The setting `encoder.prompts`."""


def validate_prompts(prompts: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the prompts that an encoder is built with, from a recipe or not. Raises `UserError` if they are wrong."""
    try:
        return check_templates(prompts)
    except ValueError as error:
        raise UserError(f"encoder.prompts: {error}") from error


def expand_templates(prompts: tuple[str, ...]) -> list[str]:
    """The templates, with `openai_imagenet` replaced by its 80."""
    templates = []
    for prompt in prompts:
        if prompt == OPENAI_IMAGENET:
            from open_clip import OPENAI_IMAGENET_TEMPLATES

            # open_clip's templates are functions of the class name
            templates += [template(PLACEHOLDER) for template in OPENAI_IMAGENET_TEMPLATES]
        else:
            templates.append(prompt)
    return templates


def in_words(class_name: str) -> str:
    """The class name as it is written in a prompt: with spaces instead of underscores."""
    return " ".join(class_name.replace("_", " ").split())


def fill(template: str, words: str) -> str:
    # not str.format, which raises on a template with a single "}"
    return template.replace(PLACEHOLDER, words)


def warn_of_cut(prompts: list[str], longest: int) -> None:
    """Logs how many prompts have more than `longest` tokens, the model's context."""
    if prompts:
        logger.warning('%d prompts are longer than %d tokens and are cut, e.g. "%s"', len(prompts), longest, prompts[0])


def warn_of_class_names(class_names: tuple[str, ...]) -> list[str]:
    """One line for each kind of class name that says little to a text encoder: numbers, and very short names."""
    numeric = [name for name in class_names if not any(c.isalpha() for c in name)]
    short = [name for name in class_names if name not in numeric and len(in_words(name)) < _SHORTEST_NAME]
    remedy = "set words in data.class_names"
    unclear = ((numeric, "numbers, not words"), (short, f"shorter than {_SHORTEST_NAME} letters"))
    return [f"class names {', '.join(names)} are {fault}; {remedy}" for names, fault in unclear if names]
