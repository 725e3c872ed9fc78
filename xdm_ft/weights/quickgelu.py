"""Checks of the activation: weights trained with QuickGELU load into a model with GELU without any error.

The features are then wrong, and nothing else shows it.
"""

from __future__ import annotations

import logging
from pathlib import Path

from xdm_ft.runtime.errors import UserError

logger = logging.getLogger("xdm_ft")
SUFFIX = "-quickgelu"


def check_tag(model: str, tag: str, quick_gelu: bool) -> None:
    """Raises `UserError` if the weights of an open_clip tag were trained with QuickGELU and the model has GELU.

    The reverse is allowed: a model's config may be right where its tag is not (roberta-ViT-B-32).
    """
    import open_clip

    if open_clip.get_pretrained_cfg(model, tag).get("quick_gelu", False) and not quick_gelu:
        raise UserError(f'encoder.model: the weights "{tag}" were trained with {_remedy(model, True)}')


def check_file(model: str, path: Path, quick_gelu: bool, explicit: bool) -> None:
    """Raises `UserError` if the name of the file, its folder or its hub cache folder contains a tag whose weights were
    trained with the other activation than the model's.

    The tensors do not show the activation. If the names do not either, and the model exists with both, a warning is
    logged. Nothing is checked if the recipe sets the activation itself (`explicit`).
    """
    if explicit:
        return
    import open_clip

    tags = _quickgelu_by_tag(model)
    for part in (path.name, path.parent.name, *(p.name for p in path.parents if p.name.startswith("models--"))):
        found = [tag for tag in tags if tag in part.lower().replace("-", "_")]
        if found:
            tag = max(found, key=len)  # one tag may be part of another
            if tags[tag] != quick_gelu:
                raise UserError(
                    f'encoder.model: "{part}" looks like the weights "{tag}", which were trained with '
                    f"{_remedy(model, tags[tag])}, or encoder.kwargs={{quick_gelu: {str(quick_gelu).lower()}}} "
                    "if the name is misleading"
                )
            return
    family = model.removesuffix(SUFFIX)
    if {family, family + SUFFIX} <= set(open_clip.list_models()):
        logger.warning(
            "encoder: the activation that %s was trained with is not known; %s uses %s",
            path, model, "QuickGELU" if quick_gelu else f"GELU ({model}{SUFFIX}: QuickGELU, as OpenAI's weights need)",
        )  # fmt: skip


def _quickgelu_by_tag(model: str) -> dict[str, bool]:
    """{tag of the model or its QuickGELU twin: whether its weights were trained with QuickGELU}."""
    import open_clip

    family = model.removesuffix(SUFFIX)
    tags = {"openai": True}
    for tag in open_clip.list_pretrained_tags_by_model(family):
        tags[tag] = bool(open_clip.get_pretrained_cfg(family, tag).get("quick_gelu", False))
    return tags


def _remedy(model: str, wanted: bool) -> str:
    """The end of a message: the activation that the weights need, and how to get it."""
    import open_clip

    twin = model.removesuffix(SUFFIX) + (SUFFIX if wanted else "")
    activation = "QuickGELU" if wanted else "GELU"
    if twin != model and twin in open_clip.list_models():
        return f"{activation}, but {model} has the other one; write encoder.model: {twin}"
    return f"{activation}, but {model} has the other one; set encoder.kwargs={{quick_gelu: {str(wanted).lower()}}}"
