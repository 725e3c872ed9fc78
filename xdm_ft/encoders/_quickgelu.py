"""The activation trap: weights trained with QuickGELU load without a word into a GELU model."""

from __future__ import annotations

import logging
from pathlib import Path

from xdm_ft.errors import UserError

logger = logging.getLogger("xdm_ft")
SUFFIX = "-quickgelu"


def check_tag(model: str, tag: str, quick_gelu: bool) -> None:
    """Refuses a tag of open_clip whose weights were trained with QuickGELU where the model has GELU.

    The reverse is not refused: a model's own config may know better (roberta-ViT-B-32) than its tag.
    """
    import open_clip

    if open_clip.get_pretrained_cfg(model, tag).get("quick_gelu", False) and not quick_gelu:
        raise UserError(f'encoder.model: the weights "{tag}" were trained with {_remedy(model, True)}')


def check_file(model: str, path: Path, quick_gelu: bool, explicit: bool) -> None:
    """Refuses a file whose name, folder or hub cache folder names a tag that was trained with the other activation.

    The tensors themselves don't tell the activation. Where no name does either, and the model exists with both, that is
    said in the log. Where the recipe sets the activation itself (`explicit`), that is believed.
    """
    if explicit:
        return
    import open_clip

    tags = _quickgelu_by_tag(model)
    for part in (path.name, path.parent.name, *(p.name for p in path.parents if p.name.startswith("models--"))):
        found = [tag for tag in tags if tag in part.lower().replace("-", "_")]
        if found:
            tag = max(found, key=len)
            if tags[tag] != quick_gelu:
                raise UserError(
                    f'encoder.model: "{part}" looks like the weights "{tag}", which were trained with '
                    f"{_remedy(model, tags[tag])}, or encoder.kwargs={{quick_gelu: {str(quick_gelu).lower()}}} "
                    "where the name misleads"
                )
            return
    family = model.removesuffix(SUFFIX)
    if {family, family + SUFFIX} <= set(open_clip.list_models()):
        logger.warning(
            "encoder: %s does not tell which activation its weights were trained with; %s uses %s",
            path, model, "QuickGELU" if quick_gelu else f"GELU ({model}{SUFFIX}: QuickGELU, as OpenAI's weights need)",
        )  # fmt: skip


def _quickgelu_by_tag(model: str) -> dict[str, bool]:
    """The tags of a model and its QuickGELU twin → whether their weights were trained with QuickGELU."""
    import open_clip

    family = model.removesuffix(SUFFIX)
    tags = {"openai": True}
    for tag in open_clip.list_pretrained_tags_by_model(family):
        tags[tag] = bool(open_clip.get_pretrained_cfg(family, tag).get("quick_gelu", False))
    return tags


def _remedy(model: str, wanted: bool) -> str:
    import open_clip

    twin = model.removesuffix(SUFFIX) + (SUFFIX if wanted else "")
    activation = "QuickGELU" if wanted else "GELU"
    if twin != model and twin in open_clip.list_models():
        return f"{activation}, {model} has the other one; write encoder.model: {twin}"
    return f"{activation}, {model} has the other one; set encoder.kwargs={{quick_gelu: {str(wanted).lower()}}}"
