"""Any timm model, CNN or ViT, as an encoder: pooled features, without its classification head.

In this module `timm` is the library: imports are absolute, and `xdm_ft/run.py` keeps the package's folder off the
import path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xdm_ft.encoders import Encoder, Portable, measure_width
from xdm_ft.images.transforms import Preprocessing, PreprocessingOverrides
from xdm_ft.runtime.errors import UserError, did_you_mean
from xdm_ft.storage.names import expand_user
from xdm_ft.weights.blocks import timm_blocks, timm_stage_names
from xdm_ft.weights.foreign import check_sizes
from xdm_ft.weights.pooling import PoolingChoice, pooling_part, refused, timm_pooled, timm_reason
from xdm_ft.weights.source import (
    check_hub_cache,
    check_hub_weights,
    corpora_in,
    download_failed,
    is_file_name,
    mismatch,
    network_error,
    read_weights,
    refuse_reserved,
    unknown_model,
    versions,
    wrong_kwargs,
)

OWN_PREPROCESSING = PreprocessingOverrides()
RESERVED = (
    "num_classes", "in_chans", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir",
    "features_only", "out_indices", "scriptable", "exportable", "no_jit",
)  # fmt: skip
"""Arguments of timm.create_model that this class sets itself."""
_RESIZE = {"center": "native", "squash": "squash", "border": "pad"}  # timm's crop_mode → ours


class Timm(Encoder):
    """Any model of timm. z is its pooled feature [B,K] before the classification head, which is removed.

    Random weights (`weights: null`) are drawn from torch's global generator, which a run seeds with the model's seed.
    Files are read by safetensors or with `weights_only=True`; float16 is cast to float32; a head in them is ignored.
    """

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
        preprocessing: Annotated[
            PreprocessingOverrides, Field(description="replaces parts of the model's own preprocessing")
        ] = OWN_PREPROCESSING,
        normalize: Annotated[bool, Field(description="L2-normalise the features")] = False,
        pooling: PoolingChoice = None,
    ) -> None:
        super().__init__()
        refuse_reserved(kwargs, RESERVED)
        check_sizes(kwargs, "encoder.kwargs")
        source = _resolve(model, weights)
        self.model: Any = _create(source, kwargs)
        self.eval()
        if pooling is not None and (reason := timm_reason(self.model, pooling)):
            raise refused(model, pooling, reason)
        self.normalize, self.pooling = normalize, pooling
        self.pretraining = source.pretraining
        self.preprocessing = preprocessing.applied_to(_own_preprocessing(self.model, kwargs))
        self.stem_names, self.stage_names, self.transition_names = timm_stage_names(self.model, "model")
        self.width = measure_width(self, model)
        self._identity: dict[str, Any] = {"model": source.name, "kwargs": kwargs}

    def forward(self, images: Tensor) -> Tensor:
        # the weights may have been cast to bfloat16 (`features.precision`)
        images = images.to(next(self.model.parameters()).dtype)
        maps = self.model.forward_features(images)  # [B,K',h,w] or [B,tokens,K']
        if self.pooling is None:
            z = self.model.forward_head(maps, pre_logits=True).float()  # [B,K]
        else:
            z = timm_pooled(self.model, maps, self.pooling).float()  # [B,K]
        return F.normalize(z, dim=-1) if self.normalize else z

    def identity(self) -> dict[str, object]:
        return {
            "component": "timm",
            **self._identity,
            "normalize": self.normalize,
            **pooling_part(self.pooling),
            "preprocessing": self.preprocessing.model_dump(mode="json"),
            "versions": versions("timm"),
        }

    def portable(self) -> Portable:
        name, kwargs = str(self._identity["model"]), dict(self._identity["kwargs"])
        if name.startswith("hf-hub:"):
            from timm.models import load_model_config_from_hf

            _, name, own = load_model_config_from_hf(name.removeprefix("hf-hub:"))  # cached when the model was built
            kwargs = (own or {}) | kwargs
        return Portable({"model": name, "kwargs": kwargs}, dict(self.model.state_dict()))

    def block_candidates(self) -> Sequence[Sequence[str]]:
        return timm_blocks(self.model, "model")


@dataclass(frozen=True)
class _Source:
    """What to pass to timm for `encoder.model` and `encoder.weights`, and what the protocol says of it."""

    name: str  # for timm.create_model: ARCHITECTURE[.TAG] or hf-hub:…
    architecture: str | None  # None if only the hub repository says it
    file: Path | None
    pretrained: bool
    pretraining: str


def _resolve(model: str, weights: str | None) -> _Source:
    """Raises `UserError` if a name or tag is not known, or if model and weights contradict each other."""
    import timm

    if model.startswith("hf-hub:"):
        check_hub_weights(model, weights)
        return _Source(model, None, None, True, _pretraining(model))
    architecture, _, tag = model.partition(".")
    if not timm.is_model(architecture):
        raise unknown_model(timm, architecture, timm.list_models())
    _check_tag(architecture, tag)
    if weights is None:
        if tag:
            raise UserError(
                f'encoder.weights: null means random weights, but "{model}" names the weights "{tag}"; '
                f"write weights: pretrained, or model: {architecture}"
            )
        return _Source(architecture, architecture, None, False, "random weights, no pre-training")
    if weights.startswith("hf-hub:"):
        return _Source(weights, architecture, None, True, _pretraining(weights))
    if is_file_name(weights):
        path = expand_user(weights, "encoder.weights")
        return _Source(model, architecture, path, True, f"weights from the file {path.name}")
    if weights != "pretrained":
        _check_tag(architecture, weights)
        if tag not in ("", weights):
            raise UserError(
                f'encoder.weights: "{weights}" differs from the tag of encoder.model: {model}; keep one of them'
            )
        tag = weights
    return _from_tag(architecture, tag)


def _check_tag(architecture: str, tag: str) -> None:
    from timm.models import get_arch_pretrained_cfgs

    known = [name.partition(".")[2] for name in get_arch_pretrained_cfgs(architecture)]
    if tag and tag not in known:
        hint = did_you_mean(tag, known)
        raise UserError(f'encoder: timm has no weights "{tag}" for "{architecture}"{hint}; give a file with its suffix')


def _from_tag(architecture: str, tag: str) -> _Source:
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg(f"{architecture}.{tag}" if tag else architecture)
    if config is None or not config.has_weights:
        raise UserError(
            f'encoder.weights: timm has no pretrained weights for "{architecture}"; '
            "give a file, or null for random weights"
        )
    name = f"{architecture}.{config.tag}" if config.tag else architecture
    return _Source(name, architecture, None, True, _pretraining(name))


def _pretraining(name: str) -> str:
    seen = corpora_in(name)
    return f"weights {name}" + (f", pre-trained on {seen}" if seen else "")


def _create(source: _Source, kwargs: dict[str, Any]) -> Any:
    if source.file is not None:
        return _create_from_file(source, source.file, kwargs)
    import timm
    from timm.models import load_model_config_from_hf

    if source.pretrained:
        check_hub_cache()
    try:
        if source.name.startswith("hf-hub:"):
            _, _, own = load_model_config_from_hf(source.name.removeprefix("hf-hub:"))
            check_sizes(own, f'encoder.model: the config of "{source.name}"')
        model: Any = timm.create_model(source.name, pretrained=source.pretrained, num_classes=0, **kwargs)
    except UserError:
        raise
    except Exception as error:
        fault = network_error(error) if source.pretrained else None
        if fault is not None:
            raise download_failed(source.name, _repository(source.name), fault) from error
        if not kwargs:
            raise
        raise wrong_kwargs(source.name, kwargs, error) from error
    found = model.pretrained_cfg["architecture"]
    if source.architecture not in (None, found):
        raise UserError(
            f"encoder.weights: {source.name} is a {found}, not a {source.architecture}; set encoder.model to {found}"
        )
    return model


def _repository(name: str) -> str:
    """The hub repository or the address of the weights of this name."""
    from timm.models import get_pretrained_cfg

    config = None if name.startswith("hf-hub:") else get_pretrained_cfg(name)
    return name if config is None else str(config.hf_hub_id or config.url)


def _create_from_file(source: _Source, path: Path, kwargs: dict[str, Any]) -> Any:
    """The model with the file's weights. Raises `UserError` if any tensor is missing, unexpected or of another shape.

    Without a head, timm only logs missing tensors. So the model is built with a head of as many classes as the file's,
    the head is checked with the rest, and then removed.
    """
    import timm
    from timm.models import get_pretrained_cfg, load_state_dict

    state = read_weights(path, load_state_dict)
    config = get_pretrained_cfg(source.name)
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
            model: Any = timm.create_model(
                source.name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=classes, **kwargs
            )
        except Exception as error:
            errors.append(error)
        else:
            model.reset_classifier(0)
            return model
    try:
        timm.create_model(source.name, num_classes=0, **kwargs)
    except Exception as error:
        raise wrong_kwargs(source.name, kwargs, error) from error
    raise mismatch(path, source.name, errors[0]) from errors[0]


def _own_preprocessing(model: nn.Module, kwargs: dict[str, Any]) -> Preprocessing:
    from timm.data import resolve_model_data_config

    config = resolve_model_data_config(model, args={"img_size": kwargs.get("img_size")})
    _, height, width = config["input_size"]
    if height != width:
        raise UserError(f"encoder.kwargs: only square images are supported, this model takes {height}×{width} px")
    interpolation = config["interpolation"]
    return Preprocessing(
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        size=height,
        crop=config["crop_pct"],
        interpolation="bilinear" if interpolation == "random" else interpolation,
        resize=_RESIZE[config["crop_mode"]],  # type: ignore[arg-type]
    )
