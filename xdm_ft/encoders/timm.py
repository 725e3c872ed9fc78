"""Any timm model, CNN or ViT, as an encoder: pooled features, without its classification head."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from xdm_ft.blocks import PoolingChoice, timm_blocks, timm_pooled, timm_reason, timm_stage_names
from xdm_ft.encoders import OWN_PREPROCESSING, LibraryEncoder, Portable, PreprocessingChoice, square_preprocessing
from xdm_ft.image_files.remote import hub
from xdm_ft.model_sources.source import (
    check_hub_weights,
    check_sizes,
    corpora_in,
    download_failed,
    is_file_name,
    mismatch,
    network_error,
    read_weights,
    unknown_model,
    weights_inside,
    without_code,
    wrong_kwargs,
)
from xdm_ft.runtime.errors import UserError, did_you_mean
from xdm_ft.storage.lines import Damaged, json_object
from xdm_ft.storage.names import expand_user

logger = logging.getLogger("xdm_ft")


class Timm(LibraryEncoder):
    """Any model of timm. z is its pooled feature [B,K] before the classification head, which is removed.

    Random weights (`weights: null`) are drawn from torch's global generator, which a run seeds with the model's seed.
    Files are read by safetensors or with `weights_only=True`; float16 is cast to float32; a head in them is ignored.
    """

    libraries = ("timm",)
    reserved = (
        "num_classes", "in_chans", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path",
        "cache_dir", "features_only", "out_indices", "scriptable", "exportable", "no_jit",
    )  # fmt: skip

    def __init__(
        self,
        *,
        model: Annotated[
            str, Field(min_length=1, description="timm model, with or without a tag, or hf-hub:ORGANISATION/NAME")
        ],
        weights: Annotated[
            str | None,
            Field(
                min_length=1,
                description="null: random; pretrained: those of the model's tag (without a tag, timm's default); "
                "a tag; hf-hub:ORGANISATION/NAME; or a .safetensors or .pth file",
            ),
        ] = None,
        kwargs: Annotated[
            dict[str, Any], Field(description="the model's own arguments, as for timm.create_model")
        ] = {},  # noqa: B006 (read only)
        preprocessing: PreprocessingChoice = OWN_PREPROCESSING,
        normalize: Annotated[bool, Field(description="L2-normalise the features")] = False,
        pooling: PoolingChoice = None,
    ) -> None:
        from timm.data import resolve_model_data_config

        super().__init__(kwargs, normalize, pooling)
        model = _current_name(model, weights)
        name, file = _resolve(model, weights)
        if file is not None:
            self.model, self.pretraining = _from_file(name, file, kwargs), f"weights from the file {file.name}"
        else:
            self.model, seen = _from_library(name, model, weights is not None, kwargs), corpora_in(name)
            self.pretraining = f"weights {name}" + (f", pre-trained on {seen}" if seen else "")
            if weights is None:
                self.pretraining = "random weights, no pre-training"
        self.built_from = {"component": "timm", "model": name, "kwargs": kwargs}
        self.stem_names, self.stage_names, self.transition_names = timm_stage_names(self.model, "model")
        # a ViT that was built for another size takes images of that size only
        config = resolve_model_data_config(self.model, args={"img_size": kwargs.get("img_size")})
        published = square_preprocessing(
            "encoder.kwargs",
            config["input_size"][1:],
            config["mean"],
            config["std"],
            config["crop_mode"],
            crop=config["crop_pct"],
            # "random" draws a filter for each image, which is for training
            interpolation="bilinear" if config["interpolation"] == "random" else config["interpolation"],
        )
        self.prepare(model, published, preprocessing, timm_reason(self.model, pooling))

    def pooled(self, images: Tensor) -> Tensor:
        maps = self.model.forward_features(images)  # [B,K',h,w] or [B,tokens,K']
        if self.pooling is not None:
            return timm_pooled(self.model, maps, self.pooling)
        z: Tensor = self.model.forward_head(maps, pre_logits=True)
        return z

    def without_spelling(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder`. A repository stands for a model if its config was downloaded: nothing is downloaded here."""
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        rest, name, kwargs = super().without_spelling(identity), str(identity.get("model")), identity.get("kwargs")
        if not name.startswith("hf-hub:") or not isinstance(kwargs, dict):
            return rest
        repository, _, revision = name.removeprefix("hf-hub:").partition("@")
        try:
            file = try_to_load_from_cache(repository, "config.json", revision=revision or None)
            config = json_object(Path(file).read_bytes()) if isinstance(file, str) else {}
        except (HFValidationError, Damaged, OSError):
            return rest
        if not isinstance(config.get("architecture"), str):
            return rest
        return {**rest, "model": config["architecture"], "kwargs": (config.get("model_args") or {}) | kwargs}

    def portable(self) -> Portable:
        name, kwargs = str(self.built_from["model"]), dict(self.built_from["kwargs"])
        if name.startswith("hf-hub:"):
            from timm.models import load_model_config_from_hf

            with hub():  # its config was cached when the model was built
                _, name, of_hub = load_model_config_from_hf(name.removeprefix("hf-hub:"))
            kwargs = (of_hub or {}) | kwargs
        return Portable({"model": name, "kwargs": kwargs}, dict(self.model.state_dict()))

    def block_candidates(self) -> Sequence[Sequence[str]]:
        return timm_blocks(self.model, "model")


def _current_name(model: str, weights: str | None) -> str:
    """Returns the name that timm has given a model instead of this one; with its tag, unless `weights` is no default.

    Raises `UserError` for a model that timm has removed.
    """
    import timm
    from timm.models import get_arch_pretrained_cfgs, get_deprecated_models

    architecture, _, tag = model.partition(".")
    deprecated = get_deprecated_models()
    if architecture not in deprecated:
        return model
    if deprecated[architecture] is None:
        raise UserError(f'encoder.model: timm {timm.__version__} has removed "{architecture}"; choose another model')
    current, _, default = str(deprecated[architecture]).partition(".")
    # the table is older than some tags: sam is sam_in1k
    tags = [name.partition(".")[2] for name in get_arch_pretrained_cfgs(current)]
    default = next((name for name in tags if name == default or (default and name.startswith(f"{default}_"))), default)
    is_tag = not (weights in (None, "pretrained") or str(weights).startswith("hf-hub:") or is_file_name(str(weights)))
    tag = tag or ("" if weights is None or is_tag else default)
    named = f"{current}.{tag}" if tag else current
    logger.warning('encoder.model: timm now calls "%s" "%s"', model, named)
    return named


def _resolve(model: str, weights: str | None) -> tuple[str, Path | None]:
    """Returns the name for timm.create_model, ARCHITECTURE[.TAG] or hf-hub:…, and the file of the weights if it is one.

    Raises `UserError` if a name or tag is not known, or if model and weights contradict each other.
    """
    import timm
    from timm.models import get_arch_pretrained_cfgs, get_pretrained_cfg

    if model.startswith("hf-hub:"):
        check_hub_weights(model, weights)
        return model, None
    architecture, _, tag = model.partition(".")
    if not timm.is_model(architecture):
        raise unknown_model(timm, architecture, timm.list_models())
    other = weights is None or weights == "pretrained" or weights.startswith("hf-hub:") or is_file_name(weights)
    weights_tag = "" if other else str(weights)
    tags = [name.partition(".")[2] for name in get_arch_pretrained_cfgs(architecture)]
    for given in (tag, weights_tag):
        if given and given not in tags:
            raise UserError(
                f'encoder: timm has no weights "{given}" for "{architecture}"{did_you_mean(given, tags)}; '
                "give a file with its suffix"
            )
    if weights is None:
        if tag:
            raise UserError(
                f'encoder.weights: null means random weights, but "{model}" names the weights "{tag}"; '
                f"write weights: pretrained, or model: {architecture}"
            )
        return architecture, None
    if weights.startswith("hf-hub:"):
        return weights, None
    if is_file_name(weights):
        return model, expand_user(weights, "encoder.weights")
    if weights_tag and tag not in ("", weights_tag):
        raise UserError(
            f'encoder.weights: "{weights}" differs from the tag of encoder.model: {model}; keep one of them'
        )
    config = get_pretrained_cfg(".".join(filter(None, [architecture, weights_tag or tag])))
    if config is None or not config.has_weights:
        raise UserError(
            f'encoder.weights: timm has no pretrained weights for "{architecture}"; '
            "give a file, or null for random weights"
        )
    return f"{architecture}.{config.tag}" if config.tag else architecture, None


def _from_library(name: str, model: str, pretrained: bool, kwargs: dict[str, Any]) -> Any:
    """Builds the model with random weights, or those that timm or the hub has. `model` is that of the recipe."""
    import timm
    from timm.models import get_pretrained_cfg, load_model_config_from_hf

    on_hub = name.startswith("hf-hub:")
    config = None if on_hub else get_pretrained_cfg(name)
    source = name if config is None else str(config.hf_hub_id or config.url)
    try:
        with hub(source if pretrained and not _is_downloaded(source) else None):
            if on_hub:
                _, _, of_hub = load_model_config_from_hf(name.removeprefix("hf-hub:"))
                check_sizes(of_hub, f'encoder.model: the config of "{name}"')
            built: Any = timm.create_model(name, pretrained=pretrained, num_classes=0, **kwargs)
    except UserError:
        raise
    except Exception as error:
        fault = network_error(error) if pretrained else None
        if fault is not None:
            raise download_failed(name, source, fault) from error
        if not kwargs:
            raise
        raise wrong_kwargs(name, kwargs, error) from error
    built_as, wanted = built.pretrained_cfg["architecture"], model.partition(".")[0]
    if not model.startswith("hf-hub:") and built_as != wanted:
        raise UserError(f"encoder.weights: {name} is a {built_as}, not a {wanted}; set encoder.model to {built_as}")
    return built


def _is_downloaded(address: str) -> bool:
    """Whether torch's cache has the file of this address."""
    from torch.hub import get_dir

    return "://" in address and (Path(get_dir()) / "checkpoints" / address.rsplit("/", 1)[-1]).is_file()


def _from_file(name: str, path: Path, kwargs: dict[str, Any]) -> Any:
    """The model with the file's weights. Raises `UserError` if any tensor is missing, unexpected or of another shape.

    Without a head, timm only logs missing tensors. So the model is built with a head of as many classes as the file's,
    the head is checked with the rest, and then removed.
    """
    import timm
    from timm.models import get_pretrained_cfg, load_state_dict

    state = read_weights(path, partial(load_state_dict, weights_only=True))
    config = get_pretrained_cfg(name)
    assert config is not None, "_resolve knows the model"
    classifier = config.classifier if isinstance(config.classifier, str) else (config.classifier or ("",))[0]
    head = state.get(f"{classifier}.weight")
    # no head of this name: the file has none, or timm's own filter renames it; then its size is that of the tag's head
    counts = [0, config.num_classes] if head is None else [head.shape[0]]
    errors = []
    for classes in counts:
        # "file": timm loads this file and no other. It loads strictly only if both class counts are equal.
        overlay = {"file": str(path), "num_classes": classes, "label_offset": 0}
        try:
            with without_code():
                model: Any = timm.create_model(
                    name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=classes, **kwargs
                )
        except Exception as error:
            errors.append(error)
        else:
            model.reset_classifier(0)
            return model
    try:
        model = timm.create_model(name, num_classes=0, **kwargs)
    except Exception as error:
        raise wrong_kwargs(name, kwargs, error) from error
    if (inside := weights_inside(path, model.state_dict())) is not None:
        try:
            model.load_state_dict(inside)
            return model
        except RuntimeError as error:
            raise mismatch(path, name, error) from error
    raise mismatch(path, name, errors[0]) from errors[0]
