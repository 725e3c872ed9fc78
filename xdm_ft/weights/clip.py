"""Where an open_clip model comes from: its architecture, its weights with their activation, their preprocessing."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xdm_ft.runtime.errors import UserError, did_you_mean
from xdm_ft.storage.names import expand_user
from xdm_ft.weights.foreign import check_sizes
from xdm_ft.weights.source import (
    check_hub_cache,
    check_hub_weights,
    download_failed,
    is_file_name,
    network_error,
    pretraining_of,
    pretraining_of_file,
    unknown_model,
)

logger = logging.getLogger("xdm_ft")
QUICKGELU = "-quickgelu"
"""End of the names of models with this activation. Weights trained with it load into a model with GELU without any
error, and features are then wrong."""


def _check_activation_of_tag(model: str, tag: str, quick_gelu: bool) -> None:
    """Raises `UserError` if the weights of an open_clip tag were trained with QuickGELU and the model has GELU.

    The reverse is allowed: a model's config may be right where its tag is not (roberta-ViT-B-32).
    """
    import open_clip

    if open_clip.get_pretrained_cfg(model, tag).get("quick_gelu", False) and not quick_gelu:
        raise UserError(f'encoder.model: the weights "{tag}" were trained with {_remedy(model, True)}')


def _check_activation_of_file(model: str, path: Path, quick_gelu: bool, explicit: bool) -> None:
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
    family = model.removesuffix(QUICKGELU)
    if {family, family + QUICKGELU} <= set(open_clip.list_models()):
        logger.warning(
            "encoder: the activation that %s was trained with is not known; %s uses %s",
            path,
            model,
            "QuickGELU" if quick_gelu else f"GELU ({model}{QUICKGELU}: QuickGELU, as OpenAI's weights need)",
        )


def _quickgelu_by_tag(model: str) -> dict[str, bool]:
    """{tag of the model or its QuickGELU twin: whether its weights were trained with QuickGELU}."""
    import open_clip

    family = model.removesuffix(QUICKGELU)
    tags = {"openai": True}
    for tag in open_clip.list_pretrained_tags_by_model(family):
        tags[tag] = bool(open_clip.get_pretrained_cfg(family, tag).get("quick_gelu", False))
    return tags


def _remedy(model: str, wanted: bool) -> str:
    """The end of a message: the activation that the weights need, and how to get it."""
    import open_clip

    twin = model.removesuffix(QUICKGELU) + (QUICKGELU if wanted else "")
    activation = "QuickGELU" if wanted else "GELU"
    if twin != model and twin in open_clip.list_models():
        return f"{activation}, but {model} has the other one; write encoder.model: {twin}"
    return f"{activation}, but {model} has the other one; set encoder.kwargs={{quick_gelu: {str(wanted).lower()}}}"


DEMO = Path(__file__).resolve().parent / "demo"  # the tiny CLIP that comes with the package
_HUB = ("hf-hub:", "local-dir:")


@dataclass(frozen=True)
class ClipSource:
    """The arguments of open_clip.create_model, and what messages say of them."""

    name: str  # a registered name, hf-hub:… or local-dir:…
    pretrained: str | None  # a tag or a file; None if the name includes the weights
    file: Path | None
    preprocess: dict[str, Any]  # differences from open_clip's default preprocessing
    repository: str  # where the weights can be downloaded, for a message
    pretraining: str
    folder: Path | None = None  # of a config file


def resolve(model: str, weights: str, kwargs: dict[str, Any]) -> ClipSource:
    """Returns the source of `encoder.model` and `encoder.weights`.

    Raises `UserError` if a name, tag or file is not known, or if the activation is not that of the weights. Nothing is
    built or downloaded yet, except the config of a hub repository.
    """
    import open_clip

    check_sizes(kwargs, "encoder.kwargs")
    if "demo" in (model, weights):
        return _demo(model, weights)
    if model.startswith(_HUB):
        check_hub_weights(model, weights)
        check_sizes(_config_of(model), f'encoder.model: the config of "{model}"')
        return ClipSource(model, None, None, {}, model, pretraining_of(model))
    if model.endswith(".json"):
        return _from_config_file(expand_user(model, "encoder.model"), weights, kwargs)
    name = model.replace("/", "-")  # OpenAI writes ViT-B/16, open_clip ViT-B-16
    if name not in (known := open_clip.list_models()):
        raise unknown_model(open_clip, name, known)
    if weights.startswith("hf-hub:"):
        _check_architecture(name, weights)
        return ClipSource(weights, None, None, {}, weights, pretraining_of(weights))
    if is_file_name(weights):
        path = expand_user(weights, "encoder.weights")
        _check_activation_of_file(name, path, _quick_gelu(name, kwargs), explicit="quick_gelu" in kwargs)
        return ClipSource(name, str(path), path, _preprocessing_shared_by_tags(name), "", pretraining_of_file(path))
    return _from_tag(name, weights, kwargs)


def _demo(model: str, weights: str) -> ClipSource:
    if (model, weights) != ("demo", "demo"):
        raise UserError(
            f"encoder: model: {model}, weights: {weights}: the demo's CLIP needs both; write model: demo, weights: demo"
        )
    from safetensors import safe_open

    path = DEMO / "demo_clip.safetensors"
    with safe_open(path, framework="pt") as file:
        seen = json.loads(file.metadata()["seen"])
    pretraining = f"weights demo, pre-trained on {seen['images']} alone, never on handwriting"
    return ClipSource(_register(DEMO / "demo_clip.json"), str(path), path, {}, "", pretraining)


def _from_config_file(config: Path, weights: str, kwargs: dict[str, Any]) -> ClipSource:
    if not is_file_name(weights):
        raise UserError(f'encoder.weights: "{weights}" is no file; {config.name} needs a .safetensors or .pt file')
    path = expand_user(weights, "encoder.weights")
    name = _register(config)
    _check_activation_of_file(name, path, _quick_gelu(name, kwargs), explicit="quick_gelu" in kwargs)
    return ClipSource(name, str(path), path, {}, "", pretraining_of_file(path), config.parent)


def _register(config: Path) -> str:
    """Registers a config file with open_clip and returns the name, which is the file's stem. Raises `UserError`."""
    import open_clip

    if not config.is_file():
        raise UserError(f"encoder.model: the config file {config} does not exist")
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:  # JSON or UTF-8, or a million nested brackets
        raise UserError(f"encoder.model: {config} is not valid JSON ({error})") from error
    if isinstance(content, dict) and "model_cfg" in content:
        raise UserError(
            f"encoder.model: {config} is the config of a hub repository; "
            f"write model: local-dir:{config.parent}, weights: pretrained"
        )
    missing = {"embed_dim", "vision_cfg", "text_cfg"} - set(content if isinstance(content, dict) else ())
    if missing:
        raise UserError(f"encoder.model: {config} is not an open_clip config: it lacks {', '.join(sorted(missing))}")
    check_sizes(content, f"encoder.model: {config}")
    # add_model_config would replace a model of the library without a message
    if is_built_in(config.stem) and json.loads(_built_in(config.stem).read_text(encoding="utf-8")) != content:
        raise UserError(f'encoder.model: {config} would replace open_clip\'s own "{config.stem}"; rename the file')
    open_clip.add_model_config(config)
    return config.stem


def is_built_in(name: str) -> bool:
    """Returns whether open_clip itself has a config of this name."""
    return ":" not in name and _built_in(name).is_file()


def _built_in(name: str) -> Path:
    import open_clip

    return Path(open_clip.__file__).parent / "model_configs" / f"{name}.json"


def _quick_gelu(name: str, kwargs: dict[str, Any]) -> bool:
    import open_clip

    in_config = open_clip.get_model_config(name).get("quick_gelu", False)
    return bool(kwargs.get("quick_gelu", kwargs.get("force_quick_gelu", False) or in_config))


def _from_tag(name: str, tag: str, kwargs: dict[str, Any]) -> ClipSource:
    import open_clip

    known = open_clip.list_pretrained_tags_by_model(name)
    if not known:
        raise UserError(f'encoder.weights: {tag}: open_clip has no weights for "{name}"; give a file')
    config = open_clip.get_pretrained_cfg(name, tag)
    if not config:
        twin = name.removesuffix(QUICKGELU)
        hint = f'; they are those of "{twin}"' if open_clip.get_pretrained_cfg(twin, tag) else did_you_mean(tag, known)
        raise UserError(
            f'encoder.weights: open_clip has no weights "{tag}" for "{name}"{hint}; give a file with its suffix'
        )
    _check_activation_of_tag(name, tag, _quick_gelu(name, kwargs))
    repository = "/".join(config["hf_hub"].split("/")[:2]) if config.get("hf_hub") else config["url"]
    return ClipSource(name, tag, None, {}, repository, pretraining_of(f"{name} {tag}"))


def _check_architecture(name: str, repository: str) -> None:
    """Raises `UserError` if the hub repository has another architecture than `encoder.model`."""
    import open_clip

    hub_config = _config_of(repository)
    config = open_clip.get_model_config(name)
    differing = [key for key in ("embed_dim", "vision_cfg", "text_cfg") if hub_config.get(key) != config[key]]
    if differing:
        raise UserError(
            f'encoder.weights: {repository} is not a "{name}" ({", ".join(differing)} differ); '
            f"write model: {repository}, weights: pretrained"
        )


def _config_of(model: str) -> dict[str, Any]:
    """Returns the config of a hub repository or folder. Raises `UserError` if it can not be read."""
    import open_clip

    try:
        check_hub_cache()
        config = open_clip.get_model_config(model)
    except (OSError, RuntimeError) as error:
        raise download_failed(model, model, network_error(error) or error) from error
    except (ValueError, RecursionError, AttributeError) as error:  # JSON or UTF-8; AttributeError: no object
        raise UserError(f"encoder.model: the config of {model} can not be read ({type(error).__name__})") from error
    missing = {"vision_cfg", "text_cfg"} - {key for key, value in config.items() if isinstance(value, dict)}
    if missing:
        raise UserError(f"encoder.model: {model} is no model of open_clip: it lacks {', '.join(sorted(missing))}")
    return dict(config)


def _preprocessing_shared_by_tags(name: str) -> dict[str, Any]:
    """The preprocessing for a weights file, which does not hold it: that of the model's tags, if they all agree
    (SigLIP, …). If not, empty: open_clip's default."""
    import open_clip

    keys = ("mean", "std", "interpolation", "resize_mode")
    configs = [open_clip.get_pretrained_cfg(name, tag) for tag in open_clip.list_pretrained_tags_by_model(name)]
    found = [{key: config[key] for key in keys if key in config} for config in configs]
    return found[0] if found and all(each == found[0] for each in found) else {}
