"""Any vision model of Hugging Face's transformers: its pooled or projected features, and text embeddings if it has any.

Code of a repository is never run: every call of the library has `trust_remote_code=False`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import Field
from torch import Tensor, nn

from xdm_ft.blocks import PoolingChoice, no_class_token, outside_text_space, pool, with_root
from xdm_ft.encoders import (
    OWN_PREPROCESSING,
    LibraryEncoder,
    NormalizeOfText,
    Portable,
    PreprocessingChoice,
    TextEncoder,
)
from xdm_ft.image_files.remote import hub
from xdm_ft.images.transforms import (
    Interpolation,
    Preprocessing,
    Resize,
    evaluation_transform,
    resized_side,
)
from xdm_ft.model_sources.prompts import DEFAULT_PROMPTS, EncoderPrompts, validate_prompts, warn_of_cut
from xdm_ft.model_sources.source import (
    NOT_TAKEN,
    architecture,
    asks_for_code,
    check_hub_weights,
    check_sizes,
    does_not_fit,
    file_of_weights,
    first_few,
    mismatch,
    not_read,
    pretraining_of,
    pretraining_of_file,
    quiet,
    read_config,
    read_weights,
    reason_of,
    size_not_taken,
    tokenizer_errors,
    weights_inside,
    wrong_kwargs,
)
from xdm_ft.runtime.errors import UserError, did_you_mean
from xdm_ft.storage.names import expand_user

HUB, LOCAL = "hf-hub:", "local-dir:"
TOGETHER = 64  # prompts in one forward pass
TRAINABLE = ("vision_model.", "visual_projection.")  # what trains of a model with a text side
_LISTS = ("layer", "layers", "blocks", "stages")  # names of the list of a model's blocks
_CLASS_TOKENS = ("cls_token", "class_embedding", "class_token")


class Transformers(LibraryEncoder, TextEncoder):
    """Any vision model that transformers' `AutoModel` builds, with its weights; code of repositories is never run.

    z [B,K] is the projected image feature of a model with a text side (CLIP, SigLIP), and of others the model's own
    pooled feature or, without one, the class token; `pooling` selects another. The text side never trains.
    """

    libraries = ("transformers",)
    # keys of a model's config that this module sets itself, or that other files of the repository depend on
    reserved = ("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "quantization_config")

    def __init__(
        self,
        *,
        model: Annotated[
            str,
            Field(
                min_length=1,
                description="ORGANISATION/NAME on the hub, local-dir:FOLDER, or a config file (.json) of transformers",
            ),
        ],
        weights: Annotated[
            str,
            Field(min_length=1, description="pretrained: those of the model; or a .safetensors or .pth file"),
        ] = "pretrained",
        kwargs: Annotated[
            dict[str, Any], Field(description="replaces values of the model's config, as in its config.json")
        ] = {},  # noqa: B006 (read only)
        preprocessing: PreprocessingChoice = OWN_PREPROCESSING,
        normalize: NormalizeOfText = False,
        prompts: EncoderPrompts = DEFAULT_PROMPTS,
        pooling: PoolingChoice = None,
    ) -> None:
        super().__init__(kwargs, normalize, pooling)
        self.prompts = validate_prompts(prompts)
        self.source = _resolve(model, weights, kwargs)
        self.pretraining = self.source.pretraining
        self.model = _create(self.source, kwargs).eval()
        config = architecture(self.source.config)
        self.built_from = {"component": "transformers", "model": self.source.name, "config": config}
        given = preprocessing.model_dump(exclude_none=True)
        if given.keys() | {"draft"} == Preprocessing.model_fields.keys():
            published = Preprocessing(**given)  # the image processor is not read
        else:
            published = from_processor(_image_processor(self.source), self.source.name)

        self.has_text = all(hasattr(self.model, name) for name in ("get_text_features", "vision_model", "logit_scale"))
        self._root = "model.vision_model" if self.has_text else "model"
        self.text_reason = outside_text_space(pooling)
        if not self.has_text:
            self.text_reason = f'encoder.model: "{model}" has no text side; use a CLIP or SigLIP model'
        else:
            self.logit_scale = self.model.logit_scale.exp().item()
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name.startswith(TRAINABLE))
            if self.source.folder is None:
                self.text_reason = (
                    f'encoder.model: "{model}" is a config file without tokenizer; give the model\'s name or folder'
                )
        self.stage_names = with_root(self._root, _block_names(self._vision)[1])
        self.output = _measure_output(self._vision, self.source.config, preprocessing.applied_to(published).size, model)
        self.prepare(model, published, preprocessing, self._no_pooling())

    @property
    def _vision(self) -> nn.Module:
        return self.get_submodule(self._root)

    def _no_pooling(self) -> str:
        """Returns why the model has no such pooling, and what is possible; "" if it has."""
        output = self.output
        if self.pooling == "projected":
            return "" if self.has_text else "has no projection; leave it out, or use cls, mean or cls_mean"
        if self.pooling is None:
            pools = self.has_text or output.pools or output.has_class_token
            return "" if pools else "has no pooled feature of its own; use mean"
        return no_class_token(output.has_class_token and not output.is_map, self.pooling)

    def pooled(self, images: Tensor) -> Tensor:
        output, arguments = self.output, self.output.arguments
        z: Tensor
        if self.has_text and self.pooling in (None, "projected"):
            return _projected(self.model.get_image_features(pixel_values=images, **arguments))
        out = self._vision(pixel_values=images, **arguments)
        if self.pooling is None and output.pools:
            z = out.pooler_output.flatten(1)  # [B,K], of CNNs [B,K,1,1]
            return z
        tokens: Tensor = out.last_hidden_state
        if output.is_map:
            return tokens.mean((2, 3))
        if output.norm_is_left:
            tokens = self._vision.post_layernorm(tokens)  # type: ignore[operator]
        return pool(tokens, output.prefix, self.pooling or "cls")

    def without_spelling(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder`. All that the name of a model stands for is in its config."""
        rest = super().without_spelling(identity)
        return rest if "config" not in rest else {key: value for key, value in rest.items() if key != "model"}

    def portable(self) -> Portable:
        name = f"{re.sub(r'[^A-Za-z0-9_-]', '_', str(self.source.config.model_type))}.json"
        return Portable({"model": name, "kwargs": {}}, self.model.state_dict(), {name: self.built_from["config"]})

    def block_candidates(self) -> Sequence[Sequence[str]]:
        """The blocks inside of all stages, and the stages."""
        return [with_root(self._root, names) for names in _block_names(self._vision)]

    @torch.no_grad()
    def text_embeddings(self, class_names: tuple[str, ...], prompts: tuple[str, ...] | None = None) -> Tensor:
        """See `TextEncoder`. On the CPU. Prompts longer than the model's context are cut, with a warning."""
        tokenizer = self._tokenizer()
        longest = self.source.config.text_config.max_position_embeddings
        # SigLIP was trained on texts padded to the whole context, and attends to the padding
        attends_to_padding = self.source.config.model_type.startswith("siglip")
        names = ["input_ids"] if attends_to_padding else ["input_ids", "attention_mask"]
        padding = "max_length" if attends_to_padding else True
        exact, parts = self.exact_prompts(class_names, prompts), list[Tensor]()
        for start in range(0, len(exact), TOGETHER):
            texts = exact[start : start + TOGETHER]
            lengths = map(len, tokenizer(texts)["input_ids"])
            warn_of_cut([text for text, length in zip(texts, lengths, strict=True) if length > longest], longest)
            tokens = tokenizer(texts, padding=padding, truncation=True, max_length=longest, return_tensors="pt")
            inputs = {name: tokens[name].to(self.model.device) for name in names}
            parts.append(_projected(self.model.get_text_features(**inputs)))  # [n,K]
        each = F.normalize(torch.cat(parts).float(), dim=-1)  # [C·P,K], class by class
        return F.normalize(each.view(len(class_names), -1, each.shape[-1]).mean(1), dim=-1).cpu()

    def as_read(self, texts: list[str]) -> list[tuple[str, tuple[int, ...]]]:
        """See `TextEncoder`."""
        tokenizer, longest = self._tokenizer(), self.source.config.text_config.max_position_embeddings
        tokens = tokenizer(texts, truncation=True, max_length=longest)["input_ids"]
        return [
            (text if len(whole) <= longest else str(tokenizer.decode(row, skip_special_tokens=True)), tuple(row))
            for text, row, whole in zip(texts, tokens, tokenizer(texts)["input_ids"], strict=True)
        ]

    def _tokenizer(self) -> Any:
        """Not kept: copies of the encoder would take its dictionary along. Raises `UserError` without a text side."""
        from transformers import AutoTokenizer

        if self.text_reason:
            raise UserError(self.text_reason)
        folder = self.source.folder
        with tokenizer_errors(self.source.name, str(folder)), hub(folder), quiet():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


class _Output(NamedTuple):
    """What the image side returns for an image."""

    arguments: dict[str, bool]  # adapts position embeddings if images have another size than in training
    is_map: bool  # [B,K,h,w]; else tokens [B,N,K]
    pools: bool  # it has a pooled feature of its own
    has_class_token: bool  # the first token
    prefix: int  # number of tokens before the patches: class token, registers, distillation token
    norm_is_left: bool  # the final norm was applied to the pooled feature only (CLIP), not to the tokens (SigLIP)


def _projected(out: Any) -> Tensor:
    features: Tensor = out if isinstance(out, Tensor) else out.pooler_output  # a tensor before transformers 5
    return features


@torch.no_grad()
def _measure_output(vision: Any, config: Any, size: int, model: str) -> _Output:
    """Runs the model twice. Raises `UserError` if the passes differ, or if it takes no images of this size."""
    if getattr(vision, "main_input_name", "pixel_values") != "pixel_values":
        raise UserError(f'encoder.model: "{model}" ({config.model_type}) takes no images; choose a vision model')
    config = getattr(config, "vision_config", config)
    adapts = "interpolate_pos_encoding" in inspect.signature(type(vision).forward).parameters
    other = getattr(config, "image_size", size) not in (size, [size, size], (size, size))
    arguments = {"interpolate_pos_encoding": True} if adapts and other else {}
    image = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    try:
        first, second = (vision(pixel_values=image, **arguments) for _ in range(2))
    except NOT_TAKEN as error:
        raise size_not_taken(model, size, error) from error
    tokens, pooled = first.last_hidden_state, getattr(first, "pooler_output", None)
    if not torch.equal(tokens, second.last_hidden_state):
        raise UserError(f'encoder.model: "{model}" draws random numbers for each image; choose another model')
    norm, patch = getattr(vision, "post_layernorm", None), getattr(config, "patch_size", None)
    patches = (size // patch) ** 2 if isinstance(patch, int) else tokens.shape[1]
    names = [name.split(".")[-1] for name, _ in vision.named_parameters()]
    return _Output(
        arguments,
        is_map=tokens.ndim == 4,
        pools=pooled is not None,
        has_class_token=any(name in _CLASS_TOKENS for name in names),
        prefix=max(0, tokens.shape[1] - patches),
        norm_is_left=norm is not None and pooled is not None and torch.equal(pooled, norm(tokens[:, 0])),
    )


def _block_names(vision: nn.Module) -> tuple[list[str], list[str]]:
    """Returns names of the blocks inside of all stages; and of the stages of a CNN or the blocks of a ViT, in order.

    The latter is empty if there is not one list of them.
    """
    lists = {  # name of a list → names of its blocks
        name: [f"{name}.{child}" for child, _ in module.named_children()]
        for name, module in vision.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and name.split(".")[-1] in _LISTS
    }
    depths = {name: sum(name.startswith(f"{other}.") for other in lists) for name in lists}
    inside = [block for name, blocks in lists.items() if depths[name] == 1 for block in blocks]
    outer = [name for name, depth in depths.items() if depth == 0]
    return inside, lists[outer[0]] if len(outer) == 1 else []


class _Source(NamedTuple):
    """What the library reads for `encoder.model` and `encoder.weights`."""

    name: str  # of the model, for messages and the protocol
    folder: str | None  # or hub repository; None: a config file, without weights, processor and tokenizer
    config: Any  # of transformers, with the recipe's `kwargs`
    file: Path | None  # with the weights; None: they are in `folder`
    pretraining: str


def _resolve(model: str, weights: str, kwargs: dict[str, Any]) -> _Source:
    """Reads the model's config and nothing else.

    Raises `UserError` if the library is not installed, if a name, file or key is wrong, if the model needs code of its
    repository, or if it did not download.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            f"encoder.name: transformers needs {error.name}, not installed here; pip install 'xdm_ft[transformers]'"
        ) from error
    file, folder = file_of_weights(model, weights), None
    if model.endswith(".json"):
        path, content = read_config(model)
        if not isinstance(content.get("model_type"), str):
            raise UserError(f"encoder.model: {path} is not a config of transformers: it has no model_type")
    else:
        if file is None:
            check_hub_weights(model, weights)
        folder = _folder_of(model)
    try:
        with hub(folder), quiet():
            if folder is not None:
                content, _ = transformers.PretrainedConfig.get_config_dict(folder)
            check_sizes(content, f'encoder.model: the config of "{model}"')
            if folder is not None:
                config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            else:
                config = transformers.AutoConfig.for_model(**content)
    except OSError as error:
        raise not_read(model, str(folder), error) from error
    except UserError:
        raise
    except Exception as error:  # each config checks its values in its own way
        if asks_for_code(error):
            raise UserError(
                f'encoder.model: "{model}" needs code from its repository, and that code is never run; choose '
                "a model that transformers itself has, or use encoder.name: timm or open_clip"
            ) from error
        raise UserError(
            f'encoder.model: transformers {transformers.__version__} cannot read the config of "{model}" '
            f"({reason_of(error, 120)}); update transformers, or choose another model"
        ) from error
    if config.model_type.startswith("timm_"):
        raise UserError(f'encoder.model: "{model}" is a model of timm; use encoder.name: timm, model: hf-hub:…')
    name = config.model_type if folder is None else model.removeprefix(HUB)
    pretraining = pretraining_of(name) if file is None else pretraining_of_file(file)
    return _Source(name, folder, _override(config, kwargs, model), file, pretraining)


def _folder_of(model: str) -> str:
    """Returns the folder or the hub repository of a model."""
    if model.startswith(LOCAL):
        folder = expand_user(model.removeprefix(LOCAL), "encoder.model")
        if not (folder / "config.json").is_file():
            raise UserError(f"encoder.model: the folder {folder} has no config.json; give a folder of save_pretrained")
        return str(folder)
    name = model.removeprefix(HUB)
    if Path(name).is_dir():  # the library would read it instead of the hub
        raise UserError(f"encoder.model: {name} is a folder here; write {LOCAL}{name}, or start in another folder")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(f'encoder.model: "{name}" is not a name of the hub; write ORGANISATION/NAME or {LOCAL}FOLDER')
    return name


def _override(config: Any, kwargs: Mapping[str, Any], model: str) -> Any:
    """The config with the recipe's values; a value that is a mapping changes keys of that part."""
    if not kwargs:
        return config
    given = config.to_dict()
    merged = dict(given)
    for key, value in kwargs.items():
        if key not in given:
            hint = did_you_mean(key, list(given))
            raise UserError(f'encoder.kwargs: "{key}" is not a key of the config of "{model}"{hint}; leave it out')
        both = isinstance(given[key], dict) and isinstance(value, dict)
        merged[key] = {**given[key], **value} if both else value
    try:
        return type(config).from_dict(merged)
    except Exception as error:  # each config checks its values in its own way
        raise wrong_kwargs(model, kwargs, error) from error


def _create(source: _Source, kwargs: dict[str, Any]) -> Any:
    """Builds the model, float32, with all its weights; heads in the weights are ignored. Raises `UserError`.

    A pooler without weights (ViT for classification has none) is removed.
    """
    from timm.models import load_state_dict
    from transformers import MODEL_MAPPING

    if type(source.config) not in MODEL_MAPPING:
        raise UserError(f'encoder.model: "{source.name}" ({source.config.model_type}) has no features')
    classes: Any = MODEL_MAPPING[type(source.config)]
    cls = classes[0] if isinstance(classes, tuple | list) else classes
    state = None if source.file is None else read_weights(source.file, partial(load_state_dict, weights_only=True))
    try:
        with hub(source.folder if state is None else None), quiet():
            model, report = cls.from_pretrained(
                None if state is not None else source.folder,
                config=source.config,
                state_dict=state,
                dtype=torch.float32,
                # other files of weights are pickles, which may run code
                use_safetensors=True,
                output_loading_info=True,
            )
    except OSError as error:
        raise not_read(source.name, str(source.folder), error) from error
    except Exception as error:  # a config may have any value
        if kwargs:
            raise wrong_kwargs(source.name, kwargs, error) from error
        raise UserError(
            f'encoder.weights: {source.file or source.name} cannot be loaded into "{source.name}" '
            f"({reason_of(error, 200)}); check encoder.model, or give the complete file"
        ) from error
    missing = set(report["missing_keys"])  # before transformers 5 a list
    if missing and source.file is not None:  # a part of the file may have all
        needed = {name for name in model.state_dict() if not name.startswith("pooler.") and "mask_token" not in name}
        if (inside := weights_inside(source.file, needed)) is not None:
            try:
                model.load_state_dict(inside, strict=False)
            except RuntimeError as error:
                raise mismatch(source.file, source.name, error) from error
            missing = set(model.state_dict()) - needed
    pooler = {name for name in missing if name.startswith("pooler.")}
    if pooler:
        model.pooler = None
    # only masked pre-training reads a mask token
    unused = {name for name in missing if name.split(".")[-1] == "mask_token"}
    if lacking := sorted(missing - unused - pooler):  # features would depend on random weights
        problem = f"it lacks {len(lacking)} of the model's tensors ({first_few(lacking)})"
        raise does_not_fit(source.file or source.name, source.name, problem)
    return model


def _image_processor(source: _Source) -> Any:
    """Raises `UserError` if the model has none, or if it needs code of its repository."""
    from transformers import AutoImageProcessor

    try:
        if source.folder is None:
            raise OSError("a config file has no image processor beside it")
        with hub(source.folder), quiet():
            return AutoImageProcessor.from_pretrained(source.folder, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UserError(
            f'encoder.model: "{source.name}" has no image processor here ({reason_of(error, 120)}); {BY_HAND}'
        ) from error


TOLERANCE = 1.0  # mean difference from a processor's pixels, in levels of 255: what resizing in other libraries rounds
SIZES = ((300, 200), (150, 330))  # px, width and height of the images on which both are compared
_INTERPOLATION: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_WARP = 384  # px; from here on, processors with a `crop_pct` resize to the square
BY_HAND = "set mean, std, size, crop, interpolation and resize in encoder.preprocessing"


def from_processor(processor: Any, model: str) -> Preprocessing:
    """Returns the preprocessing of an image processor. Raises `UserError` if ours cannot do the same.

    Crops may lie one pixel beside the processor's, which rounds half a pixel down.
    """
    geometry, interpolation = _geometry(processor), _INTERPOLATION.get(int(processor.resample or 0))
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ([0.0] * 3, [1.0] * 3)
    if geometry is not None and interpolation is not None and len(mean) == len(std) == 3:
        side, size, resize = geometry
        # (factor · 255 · p − mean) / std, with pixels p in 0…1
        factor = 255.0 * (processor.rescale_factor if processor.do_rescale else 1.0)
        crop = size / side
        if math.floor(size / crop) != side:  # `resized_side` rounds down; a fraction one bit below gives the side
            crop = math.nextafter(crop, 0.0)
        ours = Preprocessing(
            mean=(mean[0] / factor, mean[1] / factor, mean[2] / factor),
            std=(std[0] / factor, std[1] / factor, std[2] / factor),
            size=size,
            crop=crop,
            interpolation=interpolation,
            resize=resize,
        )
        if all(_agrees(processor, ours, *image_size) for image_size in SIZES):
            return ours
    raise UserError(
        f'encoder.preprocessing: {type(processor).__name__} prepares the images of "{model}", but its settings '
        f"have no equivalent here; {BY_HAND}"
    )


def _geometry(processor: Any) -> tuple[int, int, Resize] | None:
    """Returns the side to which images are resized and that of the input, px, and the way to resize.

    None if the settings are not a resize, with or without a centre crop, to a square.
    """
    # {`height`, `width`, `shortest_edge` or another name: px} of what is set
    asked, crop = (
        {key: value for key, value in dict(getattr(processor, name, None) or {}).items() if value}
        for name in ("size", "crop_size")
    )
    native = "shortest_edge" in asked
    side = asked.get("shortest_edge") or asked.get("height")
    if not processor.do_resize or side is None or len(asked) > 2 or asked.get("width", side) != side:
        return None
    if (share := getattr(processor, "crop_pct", None)) is not None and native:  # ConvNeXT's
        return (int(side / share), side, "native") if side < _WARP else (side, side, "squash")
    if not getattr(processor, "do_center_crop", False):
        return None if native else (side, side, "squash")
    size = crop.get("height")
    if size is None or size != crop.get("width") or size > side:
        return None
    return side, size, "native" if native else "squash"


def _agrees(processor: Any, ours: Preprocessing, width: int, height: int) -> bool:
    """Compares the pixels inside the border of an image of noise, where another filter, size or crop differs much."""
    assert resized_side(ours) >= ours.size
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))
    theirs = torch.as_tensor(processor(images=image, return_tensors="pt")["pixel_values"][0])  # [3,H,W]
    pixels = evaluation_transform(ours)(image)  # [3,H,W]
    if theirs.shape != pixels.shape:
        return False
    levels = 255 * torch.tensor(ours.std).view(3, 1, 1)
    shifts = product((-1, 0, 1), repeat=2) if ours.crop < 1 or ours.resize == "native" else [(0, 0)]
    differences = ((theirs * levels - (pixels * levels).roll(shift, (1, 2)))[:, 1:-1, 1:-1] for shift in shifts)
    return min(difference.abs().mean().item() for difference in differences) <= TOLERANCE
