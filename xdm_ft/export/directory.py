"""A model directory: config.json, model.safetensors (the head), reference.safetensors (for distances),
training_images.safetensors (their checksums) and, with the encoder, encoder.safetensors, or encoder_part.safetensors
with what was trained of it.

encoder.safetensors has the names of the encoder's library, so that this library loads it too. config.json holds a
checksum of itself and of the tensors of all files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from xdm_ft.encoders import Encoder
from xdm_ft.export import reference, training_images
from xdm_ft.export.config import FORMAT, EncoderConfig, EncoderIdentity, ModelConfig, PartConfig
from xdm_ft.export.parts import Parts, build_encoder, build_head, first_fault, load_trained, part_of
from xdm_ft.features.key import weights_digest
from xdm_ft.heads import Head
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.atomic import replace_text
from xdm_ft.storage.checksummed import Damaged, json_object, write_checked, write_tensors
from xdm_ft.storage.digests import json_digest, tensors_digest
from xdm_ft.weights.files import is_file_name
from xdm_ft.weights.foreign import TEXT_CONFIG, check_sizes, refuse_sources

CONFIG, WEIGHTS, ENCODER, PART = "config.json", "model.safetensors", "encoder.safetensors", "encoder_part.safetensors"
LOCAL = ("local-dir:",)  # model names that are folders


def write_directory(parts: Parts, folder: Path, with_encoder: bool | None) -> ModelConfig:
    """Writes the model's files into a folder, config.json last, and returns the config as it is written.

    `with_encoder` None: the encoder too, if no name leads to its weights: all were trained, or they came from a file.
    Without it, what was trained of it is in a file of its own. No path and no name of a weights file of this machine is
    in any of them. Raises `UserError` if a file can not be written.
    """
    config, encoder = parts.config, parts.encoder
    portable = encoder.portable()
    named = config.encoder.settings.get("weights", "")
    is_file = named is not None and is_file_name(named)
    is_whole = config.encoder.trained is True
    is_public = not (is_file or is_whole or str(config.encoder.settings["model"]).startswith(LOCAL))
    settings: dict[str, Any] = {**config.encoder.settings}
    with_encoder = not is_public if with_encoder is None else with_encoder
    if with_encoder or not is_public:
        settings = {**{key: value for key, value in settings.items() if key != "weights"}, **portable.settings}
        for name, content in portable.files.items():
            replace_text(folder / name, json.dumps(content, indent=1) + "\n")
    if with_encoder:
        write_tensors(folder / ENCODER, _unshared(portable.state), {"format": "pt"})
    part = None if with_encoder else config.encoder.part
    if part is not None:
        whole = encoder.state_dict()
        write_checked(folder / PART, _unshared({name: whole[name] for name in parts.trained_names}), {"format": "pt"})
    state = {f"{name}.{key}": value for name, head in parts.heads.items() for key, value in head.state_dict().items()}
    write_checked(folder / WEIGHTS, state, {"format": "pt"})
    if parts.reference is not None:
        reference.write(parts.reference, folder)
    if parts.training_images is not None:
        training_images.write(parts.training_images, folder)
    of_encoder = {"settings": settings, "file": ENCODER if with_encoder else None, "part": part}
    identity = None if _is_local(config.encoder.identity) else config.encoder.identity
    own = config.encoder.model_copy(update={**of_encoder, "identity": identity})
    config = _without_places(
        config.model_copy(update={"encoder": own}), str(named), str(parts.config.encoder.settings["model"])
    )
    document = {**config.model_dump(mode="json"), "weights_xxh3": _digest(state)}
    document["checksum"] = json_digest(document)
    replace_text(folder / CONFIG, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return config


def read_config(folder: Path) -> tuple[ModelConfig, str]:
    """Returns the config of a model directory and the checksum of its head's tensors. Raises `UserError`."""
    path = folder / CONFIG
    try:
        if not path.is_file():
            raise Damaged("it is no file" if path.exists() else "it does not exist")
        document = json_object(path.read_bytes())
        checksum = document.pop("checksum", None)
        if "format" not in document or "weights_xxh3" not in document:
            raise Damaged("it is not of xdm_ft")
        if document["format"] != FORMAT:
            raise Damaged(f"it has format {document['format']}, and this version reads {FORMAT}; update xdm_ft")
        if checksum != json_digest(document):
            raise Damaged("its checksum differs: it was edited or damaged")
        weights_xxh3 = str(document.pop("weights_xxh3"))
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()  # no NaN, no half of a surrogate pair
        return ModelConfig.model_validate(document), weights_xxh3
    except (Damaged, ValueError, RecursionError, OSError) as error:
        told = first_fault(error) if isinstance(error, ValidationError) else getattr(error, "strerror", None) or error
        reason = " ".join(str(told).split())[:200]
        raise UserError(f"{path}: can not be read as a model's config ({reason}); export the model again") from error


def read_directory(folder: Path, encoder_weights: str | None = None) -> Parts:
    """Reads a model directory. `encoder_weights`: a file with the encoder's weights, if the directory has them not.

    Raises `UserError` if a file is missing, damaged or of another model, or if the encoder's weights are other ones.
    """
    config, weights_xxh3 = read_config(folder)
    state = reference.read_part(folder / WEIGHTS, weights_xxh3)
    width, classes = config.encoder.width, len(config.class_names)
    prefixes = list(dict.fromkeys(_prefix(name) for name in state))
    try:
        heads: dict[str, Head] = {
            prefix: build_head(config.head, width, classes, part_of(state, prefix)) for prefix in prefixes
        }
    except ValueError as error:
        raise UserError(f"{folder / WEIGHTS}: does not fit config.json ({error}); export the model again") from error
    known, encoder = reference.read(folder, config), _read_encoder(folder, config, encoder_weights)
    if encoder.width != width:
        raise UserError(f"{folder / CONFIG}: encoder.width: {width} is not that of the encoder, {encoder.width}")
    return Parts(config, encoder, heads, known, training_images.read(folder, config))


def _read_encoder(folder: Path, config: ModelConfig, given: str | None) -> Encoder:
    """Builds the encoder. Raises `UserError` unless its weights are those that config.json names by their hash."""
    about, settings = config.encoder, dict(config.encoder.settings)
    model = str(settings.get("model", ""))
    if model.endswith(".json"):
        if Path(model).name != model:
            raise UserError(f"{folder / CONFIG}: encoder.settings.model: {model} is not a file of this directory")
        settings["model"] = str(folder / model)
    if model.startswith(LOCAL):
        raise UserError(f"{folder / CONFIG}: encoder.settings.model: a folder outside of this directory; export again")
    if given is not None:
        settings["weights"] = given if is_file_name(given) else f"./{given}"
    elif about.file is not None:
        settings["weights"] = str(folder / about.file)
    elif "weights" not in settings:
        raise UserError(
            f"{folder}: the encoder's weights are not in it, and come from a file (xxh3 {about.named_xxh3}); give it "
            "(encoder_weights, --encoder-weights), or export with --with-encoder"
        )
    elif isinstance(settings["weights"], str) and is_file_name(settings["weights"]):
        raise UserError(f"{folder / CONFIG}: encoder.settings.weights: a file outside of this directory; export again")
    weights = settings["weights"]
    file = Path(weights) if isinstance(weights, str) and is_file_name(weights) else None
    _check_architecture(folder, config, file if file is not None and file.is_file() else None)
    try:
        encoder = build_encoder(about.name, settings, config.preprocessing, about.seed)
    except UserError as error:
        raise UserError(*(f"{folder}: {line}" for line in error.args)) from error
    except Exception as error:  # of the encoder's library, for settings that no model has
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{folder}: its encoder can not be built ({reason}); export the model again") from error
    check_encoder(encoder, about.named_xxh3, settings.get("weights"), folder)
    if about.part is not None:
        _read_part(folder, about, about.part, encoder)
    return encoder


def _check_architecture(folder: Path, config: ModelConfig, weights: Path | None) -> None:
    """Raises `UserError` if the description of the encoder in this directory asks for code, names another source, or is
    far larger than the file `weights`.
    """
    settings = config.encoder.settings
    kwargs, where = settings.get("kwargs", {}), f"{folder / CONFIG}: encoder.settings.kwargs"
    refuse_sources(kwargs, where)
    check_sizes(kwargs, where, weights)
    for path in (folder / str(settings["model"]), folder / TEXT_CONFIG):
        if path.suffix == ".json" and path.is_file():
            try:
                document = json_object(path.read_bytes())
            except (Damaged, OSError) as error:
                raise UserError(f"{path}: can not be read ({error}); export the model again") from error
            refuse_sources(document, str(path))
            check_sizes(document, str(path), weights)


def _read_part(folder: Path, about: EncoderConfig, part: PartConfig, encoder: Encoder) -> None:
    """Loads what was trained of the encoder. Raises `UserError` if the file is damaged, missing or of another model."""
    try:
        load_trained(encoder, reference.read_part(folder / PART, part.xxh3))
    except ValueError as error:
        raise UserError(f"{folder / PART}: does not fit the encoder ({error}); export the model again") from error
    check_encoder(encoder, about.xxh3, PART, folder)


def check_encoder(encoder: Encoder, xxh3: str, weights: object, of: Path) -> None:
    """Raises `UserError` if the encoder's weights are not those that the head was trained on."""
    found = weights_digest(encoder)
    if found != xxh3:
        raise UserError(
            f"{of}: the encoder's weights ({weights}) are not those that the model was trained with (xxh3 {found}, "
            f"needed {xxh3}); its predictions would be wrong; give the same weights, or export with --with-encoder"
        )


def _digest(state: Mapping[str, Tensor]) -> str:
    return tensors_digest(dict(sorted(state.items())))


def _prefix(name: str) -> str:
    """`head` of `head.weight`, `members.0` of `members.0.weight`."""
    first, second, *_ = *name.split("."), ""
    return f"{first}.{second}" if first == "members" else first


def _is_local(identity: EncoderIdentity | None) -> bool:
    return identity is None or identity["model"].startswith(LOCAL)


def _without_places(config: ModelConfig, weights: str, model: str) -> ModelConfig:
    """Replaces the names of a weights file and of a local folder in the texts that describe the pre-training."""
    name = Path(weights).name if is_file_name(weights) else ""
    file = "a file" if config.encoder.trained else f"a file (xxh3 {config.encoder.xxh3})"
    places = {f"the file {name}": file, f"the file {' '.join(name.split())}": file} if name else {}
    if model.startswith(LOCAL):
        places |= {model: "a local folder", " ".join(model.split()): "a local folder"}

    def shown(value: Any) -> Any:
        if isinstance(value, str):
            for place, words in places.items():
                value = value.replace(place, words)
            return value
        if isinstance(value, dict):
            return {key: shown(inner) for key, inner in value.items()}
        return [shown(inner) for inner in value] if isinstance(value, list) else value

    return ModelConfig.model_validate(shown(config.model_dump(mode="json"))) if places else config


def _unshared(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors: safetensors refuses tensors that share memory (tied weights)."""
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
