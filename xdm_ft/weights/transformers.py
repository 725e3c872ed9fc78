"""Where a model of transformers comes from: its config, weights, image processor and tokenizer; what its tokens are.

Code of a repository is never run: every call of the library has `trust_remote_code=False`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from xdm_ft.images.transforms import Interpolation, Preprocessing, Resize, evaluation_transform, resized_side
from xdm_ft.runtime.errors import UserError, did_you_mean
from xdm_ft.storage.names import expand_user
from xdm_ft.weights.foreign import asks_for_code, check_sizes, no_remote_code
from xdm_ft.weights.source import (
    check_hub_cache,
    check_hub_weights,
    download_failed,
    is_file_name,
    pretraining_of,
    pretraining_of_file,
    read_weights,
    refuse_reserved,
    wrong_kwargs,
)

TOLERANCE = (
    1.0  # mean difference from the processor's pixels, in levels of 255: what resizing in other libraries rounds
)
SIZES = ((300, 200), (150, 330))  # px, width and height of the images on which both are compared
_INTERPOLATION: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_WARP = 384  # px; from here on, processors with a `crop_pct` resize to the square
BY_HAND = "set mean, std, size, crop, interpolation and resize in encoder.preprocessing"


class _Geometry(NamedTuple):
    side: int  # px, to which images are resized
    size: int  # px, of the input
    resize: Resize


def from_processor(processor: Any, model: str) -> Preprocessing:
    """Returns the preprocessing of an image processor. Raises `UserError` if ours can not do the same.

    Crops may lie one pixel beside the processor's, which rounds half a pixel down.
    """
    geometry, interpolation = _geometry(processor), _INTERPOLATION.get(int(processor.resample or 0))
    if geometry is None or interpolation is None:
        raise _not_expressible(processor, model)
    # (factor · 255 · p − mean) / std, with pixels p in 0…1
    factor = 255.0 * (processor.rescale_factor if processor.do_rescale else 1.0)
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ([0.0] * 3, [1.0] * 3)
    if not len(mean) == len(std) == 3:
        raise _not_expressible(processor, model)
    found = Preprocessing(
        mean=(mean[0] / factor, mean[1] / factor, mean[2] / factor),
        std=(std[0] / factor, std[1] / factor, std[2] / factor),
        size=geometry.size,
        crop=_crop(geometry),
        interpolation=interpolation,
        resize=geometry.resize,
    )
    if not all(_agrees(processor, found, _noise(*size)) for size in SIZES):
        raise _not_expressible(processor, model)
    return found


def _not_expressible(processor: Any, model: str) -> UserError:
    return UserError(
        f'encoder.preprocessing: the images of "{model}" are prepared by {type(processor).__name__}, whose settings '
        f"have no equal here; {BY_HAND}"
    )


def _geometry(processor: Any) -> _Geometry | None:
    """None if the settings are not a resize, with or without a centre crop, to a square."""
    asked, crop = _given(processor.size), _given(getattr(processor, "crop_size", None))
    side, resize = asked.get("shortest_edge") or asked.get("height"), "native" if "shortest_edge" in asked else "squash"
    if not processor.do_resize or side is None or len(asked) > 2 or asked.get("width", side) != side:
        return None
    if (share := getattr(processor, "crop_pct", None)) is not None and resize == "native":  # ConvNeXT's
        return _Geometry(int(side / share), side, "native") if side < _WARP else _Geometry(side, side, "squash")
    if not getattr(processor, "do_center_crop", False):
        return _Geometry(side, side, "squash") if resize == "squash" else None
    size = crop.get("height")
    if size is None or size != crop.get("width") or size > side:
        return None
    return _Geometry(side, size, "native" if resize == "native" else "squash")


def _given(size: Mapping[str, int] | None) -> dict[str, int]:
    """{`height`, `width`, `shortest_edge` or another name: px} of what is set."""
    return {key: value for key, value in dict(size or {}).items() if value}


def _crop(geometry: _Geometry) -> float:
    """The fraction size / side. `resized_side` rounds down; a fraction one bit below gives the side itself."""
    crop = geometry.size / geometry.side
    found = math.floor(geometry.size / crop)
    return crop if found == geometry.side else math.nextafter(crop, 0.0)


def _noise(width: int, height: int) -> Image.Image:
    """An image of noise, on which every other filter, size or crop differs by many levels."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def _agrees(processor: Any, ours: Preprocessing, image: Image.Image) -> bool:
    assert resized_side(ours) >= ours.size
    theirs = torch.as_tensor(processor(images=image, return_tensors="pt")["pixel_values"][0])  # [3,H,W]
    own = evaluation_transform(ours)(image)  # [3,H,W]
    if theirs.shape != own.shape:
        return False
    levels = 255 * torch.tensor(ours.std).view(3, 1, 1)
    shifts = product((-1, 0, 1), repeat=2) if ours.crop < 1 or ours.resize == "native" else [(0, 0)]
    return min(_difference(theirs * levels, own * levels, *shift) for shift in shifts) <= TOLERANCE


def _difference(a: Tensor, b: Tensor, down: int, right: int) -> float:
    """Mean absolute difference inside the border, where b is shifted by whole pixels."""
    shifted = b.roll((down, right), (1, 2))
    return (a - shifted)[:, 1:-1, 1:-1].abs().mean().item()


HUB, LOCAL = "hf-hub:", "local-dir:"
RESERVED = ("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "quantization_config")
"""Keys of a model's config that this module sets itself, or that other files of the repository depend on."""
_NOT_ARCHITECTURE = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "architectures",
    "auto_map",
    "id2label",
    "label2id",
)
"""Keys of a config that say where it comes from or name the classes of a head; features do not depend on them."""
_SHOWN = 3  # tensor names in a message


@dataclass(frozen=True)
class Source:
    """What the library reads for `encoder.model` and `encoder.weights`."""

    name: str  # of the model, for messages and the protocol
    place: str | None  # hub repository or folder; None: a config file, without weights, processor and tokenizer
    config: Any  # of transformers, with the recipe's `kwargs`
    file: Path | None  # with the weights; None: they are in `place`
    pretraining: str


def library() -> Any:
    """Returns the module. Raises `UserError` if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            f"encoder.name: transformers needs {error.name}, not installed here; pip install 'xdm_ft[transformers]'"
        ) from error
    return transformers


def resolve(model: str, weights: str, kwargs: dict[str, Any]) -> Source:
    """Reads the model's config and nothing else.

    Raises `UserError` if a name, file or key is wrong, if the model needs code of its repository, or if it did not
    download.
    """
    library()
    refuse_reserved(kwargs, RESERVED)
    check_sizes(kwargs, "encoder.kwargs")
    file = expand_user(weights, "encoder.weights") if is_file_name(weights) else None
    if model.endswith(".json"):
        if file is None:
            raise UserError(f'encoder.weights: "{weights}" is no file; {Path(model).name} needs a .safetensors file')
        config = _from_file(expand_user(model, "encoder.model"))
        return Source(config.model_type, None, _changed(config, kwargs, model), file, pretraining_of_file(file))
    if file is None:
        check_hub_weights(model, weights)
    config = _changed(_from_place(_place(model), model), kwargs, model)
    about = pretraining_of(model.removeprefix(HUB)) if file is None else pretraining_of_file(file)
    if config.model_type.startswith("timm_"):
        raise UserError(f'encoder.model: "{model}" is a model of timm; use encoder.name: timm, model: hf-hub:…')
    return Source(model.removeprefix(HUB), _place(model), config, file, about)


def _place(model: str) -> str:
    if model.startswith(LOCAL):
        folder = expand_user(model.removeprefix(LOCAL), "encoder.model")
        if not (folder / "config.json").is_file():
            raise UserError(f"encoder.model: the folder {folder} has no config.json; give a folder of save_pretrained")
        return str(folder)
    name = model.removeprefix(HUB)
    if Path(name).is_dir():  # the library would read it instead of the hub
        raise UserError(f"encoder.model: {name} is a folder here; write {LOCAL}{name}, or start in another folder")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(f'encoder.model: "{name}" is no name of the hub; write ORGANISATION/NAME or {LOCAL}FOLDER')
    check_hub_cache()
    return name


def _from_place(place: str, model: str) -> Any:
    try:
        with quiet():
            content, _ = library().PreTrainedConfig.get_config_dict(place)
            check_sizes(content, f'encoder.model: the config of "{model}"')
            return library().AutoConfig.from_pretrained(place, trust_remote_code=False)
    except OSError as error:
        raise not_read(model, place, error) from error
    except UserError:
        raise
    except Exception as error:  # each config checks its values in its own way
        raise _unknown(model, error) from error


def _from_file(path: Path) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"encoder.model: {path} can not be read as a config ({type(error).__name__})") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise UserError(f"encoder.model: {path} is no config of transformers: it has no model_type")
    check_sizes(content, f"encoder.model: {path}")
    try:
        with quiet():
            return library().AutoConfig.for_model(**content)
    except Exception as error:  # each config checks its values in its own way
        raise _unknown(str(path), error) from error


def _unknown(model: str, error: Exception) -> UserError:
    text = " ".join(str(error).split())
    if asks_for_code(error):
        return UserError(
            f'encoder.model: "{model}" needs code from its repository, which is never run; choose a model that the '
            "library itself knows, or use encoder.name: timm or open_clip"
        )
    version = library().__version__
    return UserError(
        f'encoder.model: transformers {version} can not read the config of "{model}" ({text[:120]}); '
        "update transformers, or choose another model"
    )


def not_read(model: str, place: str, error: OSError) -> UserError:
    """The error for a file of the repository or folder `place` that the library did not get."""
    from huggingface_hub.errors import GatedRepoError

    cause = error.__cause__ or error.__context__ or error
    text = " ".join(str(error).split())
    if isinstance(cause, GatedRepoError):
        return UserError(
            f'encoder.model: access to "{place}" is restricted; ask for it on its page, then hf auth login'
        )
    if model.startswith(LOCAL) or "does not appear to have" in text:
        return UserError(
            f'encoder.model: "{model}" lacks a file ({text[:160]}); weights must be .safetensors there, '
            "or a file that encoder.weights names"
        )
    return download_failed(model, place, cause)


def _changed(config: Any, kwargs: Mapping[str, Any], model: str) -> Any:
    """The config with the recipe's values; a value that is a mapping changes keys of that part."""
    given = config.to_dict()
    merged = dict(given)
    for key, value in kwargs.items():
        inner = given.get(key)
        if key not in given:
            hint = did_you_mean(key, list(given))
            raise UserError(f'encoder.kwargs: "{key}" is no key of the config of "{model}"{hint}; leave it out')
        merged[key] = {**inner, **value} if isinstance(inner, dict) and isinstance(value, dict) else value
    if not kwargs:
        return config
    try:
        return type(config).from_dict(merged)
    except Exception as error:  # each config checks its values in its own way
        raise wrong_kwargs(model, dict(kwargs), error) from error


def architecture(config: Any) -> dict[str, Any]:
    """The config as JSON, from which another machine builds the model; no name of a file or folder is in it."""

    def without_origin(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_origin(inner) for key, inner in value.items() if key not in _NOT_ARCHITECTURE}
        return value

    found: dict[str, Any] = without_origin(json.loads(config.to_json_string(use_diff=False)))
    return found


def create(source: Source, kwargs: dict[str, Any]) -> Any:
    """Builds the model, float32, with all its weights; heads in the weights are ignored. Raises `UserError`.

    A pooler without weights (ViT for classification has none) is removed.
    """
    from timm.models import load_state_dict

    auto = library().AutoModel
    if type(source.config) not in auto._model_mapping:
        raise UserError(f'encoder.model: "{source.name}" ({source.config.model_type}) is no model with features')
    cls = auto._model_mapping[type(source.config)]
    cls = cls[0] if isinstance(cls, tuple | list) else cls
    state = None if source.file is None else read_weights(source.file, load_state_dict)
    try:
        with quiet():
            model, report = cls.from_pretrained(
                None if state is not None else source.place,
                config=source.config,
                state_dict=state,
                dtype=torch.float32,
                use_safetensors=True,
                output_loading_info=True,
            )
    except OSError as error:
        raise not_read(source.name, str(source.place), error) from error
    except Exception as error:  # a config may have any value
        if kwargs:
            raise wrong_kwargs(source.name, kwargs, error) from error
        text = " ".join(str(error).split())[:200]
        raise UserError(
            f'encoder.weights: {source.file or source.name} can not be loaded into "{source.name}" ({text}); '
            "check encoder.model, or give the complete file"
        ) from error
    _check_complete(source, model, report["missing_keys"])
    return model


def _check_complete(source: Source, model: Any, missing: set[str]) -> None:
    """Raises `UserError` if features would depend on weights that were drawn at random."""
    without_use = {name for name in missing if name.split(".")[-1] == "mask_token"}
    pooler = {name for name in missing if name.startswith("pooler.")}
    if pooler:
        model.pooler = None
    lacking = sorted(missing - without_use - pooler)
    if lacking:
        names = ", ".join(lacking[:_SHOWN]) + (", …" if len(lacking) > _SHOWN else "")
        raise UserError(
            f'encoder.weights: {source.file or source.name} does not fit "{source.name}": it lacks {len(lacking)} '
            f"of the model's tensors ({names}); check encoder.model and encoder.kwargs, or give the complete file"
        )


def image_processor(source: Source) -> Any:
    """Raises `UserError` if the model has none, or if it needs code of its repository."""
    try:
        if source.place is None:
            raise OSError("a config file has no image processor beside it")
        with quiet():
            return library().AutoImageProcessor.from_pretrained(source.place, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        text = " ".join(str(error).split())[:120]
        raise UserError(f'encoder.model: "{source.name}" has no image processor here ({text}); {BY_HAND}') from error


def tokenizer(source: Source) -> Any:
    """Raises `UserError` if the model has none here."""
    try:
        with quiet():
            return library().AutoTokenizer.from_pretrained(source.place, trust_remote_code=False)
    except OSError as error:
        raise not_read(f"the tokenizer of {source.name}", str(source.place), error) from error
    except (ValueError, ImportError, KeyError) as error:
        text = " ".join(str(error).split())[:160]
        raise UserError(f'encoder.model: the tokenizer of "{source.name}" can not be used ({text})') from error


@contextmanager
def quiet() -> Iterator[None]:
    """Context without the library's questions, progress bars and reports: what is wrong with a model is raised here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with no_remote_code():
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
