"""Any open_clip model (CLIP, SigLIP, CoCa, …): projected image features, and text embeddings for zero-shot."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.encoders import Encoder, Portable, TextEncoder, measure_width
from xdm_ft.images.transforms import Preprocessing, PreprocessingOverrides
from xdm_ft.runtime.errors import UserError
from xdm_ft.weights.blocks import StageNames, clip_blocks, timm_stage_names
from xdm_ft.weights.clip import ClipSource, is_built_in, resolve
from xdm_ft.weights.foreign import TEXT_CONFIG, asks_for_code, no_remote_code
from xdm_ft.weights.pooling import PoolingChoice, clip_pooled, clip_reason, outside_text_space, pooling_part, refused
from xdm_ft.weights.prompts import DEFAULT_PROMPTS, EncoderPrompts, checked, expand_templates, fill, in_words
from xdm_ft.weights.source import (
    check_hub_cache,
    download_failed,
    mismatch,
    network_error,
    read_weights,
    refuse_reserved,
    versions,
    wrong_kwargs,
)
from xdm_ft.weights.transformers import architecture

logger = logging.getLogger("xdm_ft")

OWN_PREPROCESSING = PreprocessingOverrides()
RESERVED = (
    "pretrained", "load_weights", "precision", "device", "jit", "pretrained_image", "pretrained_text", "pretrained_hf",
    "pretrained_image_path", "pretrained_text_path", "force_preprocess_cfg", "cache_dir", "output_dict",
    "require_pretrained", "weights_only",
)  # fmt: skip
"""Arguments of open_clip.create_model that this class sets itself."""
_RESIZE = {"shortest": "native", "squash": "squash", "longest": "pad"}  # open_clip's resize_mode → ours


class OpenClip(Encoder, TextEncoder):
    """Any model of open_clip with its weights. z is the projected image feature [B,K], L2-normalised if `normalize`.

    Weights are always loaded, since CLIP without pre-training is of no use, by safetensors or with `weights_only=True`.
    The parameters of the text side never train.
    """

    def __init__(
        self,
        *,
        model: Annotated[
            str,
            Field(
                min_length=1,
                description="open_clip model, hf-hub:ORGANISATION/NAME, local-dir:FOLDER, a config file (.json), or "
                "demo (the tiny CLIP that comes with the package)",
            ),
        ],
        weights: Annotated[
            str,
            Field(
                min_length=1,
                description="tag; .safetensors or .pt file; hf-hub:ORGANISATION/NAME; pretrained if the model is a hub "
                "repository or a folder; demo",
            ),
        ],
        kwargs: Annotated[
            dict[str, Any], Field(description="the model's own arguments, as for open_clip.create_model")
        ] = {},  # noqa: B006 (read only)
        preprocessing: Annotated[
            PreprocessingOverrides, Field(description="replaces parts of the model's own preprocessing")
        ] = OWN_PREPROCESSING,
        normalize: Annotated[bool, Field(description="L2-normalise the features (zero_shot always does)")] = False,
        prompts: EncoderPrompts = DEFAULT_PROMPTS,
        pooling: PoolingChoice = None,
    ) -> None:
        import open_clip

        super().__init__()
        refuse_reserved(kwargs, RESERVED)
        self.prompts = checked(prompts)
        self.source = resolve(model, weights, kwargs)
        self.model: Any = _create(self.source, kwargs)
        # now, as a process that unpickles the encoder does not know a model of the recipe's own
        self._config = open_clip.get_model_config(self.source.name)
        self.eval()  # open_clip returns its models in training mode
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name.startswith("visual."))
        if pooling is not None and (reason := clip_reason(self.model.visual, pooling)):
            raise refused(model, pooling, reason)
        self.normalize, self.kwargs = normalize, kwargs
        self.pooling, self.text_reason = pooling, outside_text_space(pooling) or self._no_tokenizer(model)
        self.pretraining = self.source.pretraining
        self.preprocessing = preprocessing.applied_to(_own_preprocessing(self.model))
        self.stem_names, self.stage_names, self.transition_names = _stage_names_of(self.model.visual)
        self.logit_scale = self.model.logit_scale.exp().item()
        self.width = measure_width(self, model)

    def forward(self, images: Tensor) -> Tensor:
        # the weights may have been cast to bfloat16 (`features.precision`)
        images = images.to(next(self.model.visual.parameters()).dtype)
        if self.pooling in (None, "projected"):
            z = self.model.encode_image(images, normalize=False).float()  # [B,K]
        else:
            z = clip_pooled(self.model.visual, images, self.pooling).float()  # [B,K]
        return F.normalize(z, dim=-1) if self.normalize else z

    def identity(self) -> dict[str, object]:
        return {
            "component": "open_clip",
            "model": self.source.name,
            "config": self._config,
            "kwargs": self.kwargs,
            "normalize": self.normalize,
            **pooling_part(self.pooling),
            "preprocessing": self.preprocessing.model_dump(mode="json"),
            "versions": versions("open_clip_torch", "timm"),
        }

    def portable(self) -> Portable:
        name, config, kwargs = self.source.name, self._config, self.kwargs
        if "quick_gelu" not in kwargs and "force_quick_gelu" not in kwargs:
            kwargs = {**kwargs, "quick_gelu": bool(config.get("quick_gelu", False))}  # the name of a file may mislead
        settings, state = {"model": name, "kwargs": kwargs}, dict(self.model.state_dict())
        if is_built_in(name):
            return Portable(settings, state)
        model, text, files = f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)}.json", dict(config["text_cfg"]), {}
        if text.get("hf_model_name"):
            text["hf_model_name"], files[TEXT_CONFIG] = TEXT_CONFIG, architecture(self.model.text.config)
        if text.get("hf_tokenizer_name"):
            text["hf_tokenizer_name"] = ""  # of another repository, and only texts need it
        files[model] = {**config, "text_cfg": text}
        return Portable({**settings, "model": model}, state, files)

    def _no_tokenizer(self, model: str) -> str:
        """Why there is no tokenizer, if `portable` has left it out."""
        if self._config["text_cfg"].get("hf_tokenizer_name") != "":
            return ""
        return f'encoder.model: "{model}" is of a model directory, which has no tokenizer; give the model\'s own name'

    def block_candidates(self) -> Sequence[Sequence[str]]:
        return clip_blocks(self.model.visual, "model.visual")

    def _tokenizer(self) -> Callable[..., Tensor]:
        """Not kept: copies of the encoder would take its dictionary along, which takes longer than the weights."""
        import open_clip

        # of the config's arguments for transformers' tokenizer, this one is replaced
        own = {"trust_remote_code": False} if self._config["text_cfg"].get("hf_tokenizer_name") else {}
        try:
            with no_remote_code():
                return open_clip.get_tokenizer(self.source.name, **own)
        except ValueError as error:
            text = " ".join(str(error).split())[:160]
            raise UserError(f'encoder.model: the tokenizer of "{self.source.name}" can not be used ({text})') from error
        except ImportError as error:
            raise UserError(
                f'encoder.model: the tokenizer of "{self.source.name}" needs {error.name}; pip install {error.name}'
            ) from error
        except OSError as error:
            raise download_failed(f"the tokenizer of {self.source.name}", self.source.repository, error) from error

    def text_embeddings(self, class_names: tuple[str, ...], prompts: tuple[str, ...] | None = None) -> Tensor:
        """See `TextEncoder`. On the CPU. Prompts longer than the model's context are cut, with a warning."""
        import open_clip

        tokenizer = self._tokenizer()
        _warn_about_cut_prompts(tokenizer, self.exact_prompts(class_names, prompts))
        weight = open_clip.build_zero_shot_classifier(
            self.model,
            tokenizer,
            [in_words(name) for name in class_names],
            [partial(fill, template) for template in expand_templates(prompts or self.prompts)],
            device=next(self.model.parameters()).device,
        )  # [K,C]
        return weight.T.float().cpu()


def _warn_about_cut_prompts(tokenizer: Callable[..., Tensor], prompts: list[str]) -> None:
    from open_clip import SimpleTokenizer

    if isinstance(tokenizer, SimpleTokenizer):  # tokenizers of transformers cut in other ways
        longest = tokenizer.context_length - 2  # without start and end token
        cut = [prompt for prompt in prompts if len(tokenizer.encode(prompt)) > longest]
        if cut:
            logger.warning('%d prompts are longer than %d tokens and are cut, e.g. "%s"', len(cut), longest, cut[0])


def _create(source: ClipSource, kwargs: dict[str, Any]) -> Any:
    import open_clip
    from open_clip.factory import load_state_dict

    if source.file is not None:  # create_model reads the file again; this finds its faults first
        read_weights(source.file, partial(load_state_dict, weights_only=True))
    else:
        check_hub_cache()
    own, text = dict[str, Any](), open_clip.get_model_config(source.name)["text_cfg"]
    if source.folder is not None and text.get("hf_model_name") == TEXT_CONFIG:
        text |= {"hf_model_name": str(source.folder / TEXT_CONFIG), "hf_model_pretrained": False}
        own = {"text_cfg": text}
    try:
        with _root_logger_silenced(), no_remote_code():
            return open_clip.create_model(
                source.name,
                pretrained=source.pretrained,
                require_pretrained=True,
                force_preprocess_cfg=source.preprocess,
                weights_only=True,
                **{**own, **kwargs},
            )
    except Exception as error:
        if asks_for_code(error):
            raise UserError(
                f'encoder.model: "{source.name}" needs code of a repository, which is never run; choose another model'
            ) from error
        if kwargs and isinstance(error, TypeError | ValueError):
            raise wrong_kwargs(source.name, kwargs, error) from error
        if source.file is not None:
            raise mismatch(source.file, source.name, error) from error
        fault = network_error(error)
        if fault is None and is_built_in(source.name):
            raise
        if fault is None:
            reason = " ".join(str(error).split())[:160]
            raise UserError(f'encoder.model: open_clip can not build "{source.name}" ({reason})') from error
        what = f"{source.name} {source.pretrained}" if source.pretrained else source.name
        raise download_failed(what, source.repository, fault) from error


@contextmanager
def _root_logger_silenced() -> Iterator[None]:
    """open_clip logs its errors to the root logger before it raises them; without this they would be printed twice."""
    root, handler = logging.getLogger(), logging.NullHandler()

    def silence(record: logging.LogRecord) -> bool:
        return False

    root.addFilter(silence)
    root.addHandler(handler)  # without a handler, logging.error() configures the root logger permanently
    try:
        yield
    finally:
        root.removeFilter(silence)
        root.removeHandler(handler)


def _own_preprocessing(model: Any) -> Preprocessing:
    config = model.visual.preprocess_cfg
    size = config["size"]
    height, width = (size, size) if isinstance(size, int) else size
    if height != width:
        raise UserError(f"encoder.model: only square images are supported, this model takes {height}×{width} px")
    return Preprocessing(
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        size=height,
        interpolation=config["interpolation"],
        resize=_RESIZE[config["resize_mode"]],  # type: ignore[arg-type]
    )


def _stage_names_of(visual: Any) -> StageNames:
    """The blocks of a ViT; first convolution, pooling and layers of a ResNet; or the names of timm's image trunk."""
    modules = dict(visual.named_modules())
    if "trunk" in modules:
        return timm_stage_names(visual.trunk, "model.visual.trunk")
    if "transformer.resblocks" in modules:
        blocks = [f"transformer.resblocks.{name}" for name, _ in modules["transformer.resblocks"].named_children()]
        return StageNames.with_prefix("model.visual", [], blocks, [])
    # the stem of a CLIP ResNet, three convolutions, ends in `avgpool`
    return StageNames.with_prefix("model.visual", ["conv1", "avgpool"], ["layer1", "layer2", "layer3", "layer4"], [])
