"""A model directory: the files that hold a model's parts.

config.json is written last and has a checksum of itself and of the tensors of all other files: model.safetensors (the
head), reference.safetensors (for distances), training_images.safetensors (checksums of the training images) and, with
the encoder, encoder.safetensors, which the encoder's own library loads too, or encoder_part.safetensors with what was
trained of it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from xdm_ft.encoders import Encoder
from xdm_ft.evaluation.neighbours import LEVELS, Reference
from xdm_ft.export import (
    FORMAT,
    SINGLE,
    ModelConfig,
    ModelParts,
    build_encoder,
    build_head,
    check_encoder,
    check_identity,
    first_fault,
    load_trained,
    with_prefix,
)
from xdm_ft.export.card import card
from xdm_ft.model_sources.source import (
    TEXT_CONFIG,
    check_sizes,
    is_file_name,
    reason_of,
    refuse_not_finite,
    refuse_sources,
)
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.storage import json_digest, tensors_digest
from xdm_ft.storage.atomic import ON_WINDOWS, UNFINISHED, disk_errors, replace_text, sync, umask
from xdm_ft.storage.lines import Damaged, json_object, one_line
from xdm_ft.storage.tensors import Sizes, read_checked, refuse_other_sizes, tensors_of, write_checked, write_tensors

CONFIG, WEIGHTS, ENCODER, PART = "config.json", "model.safetensors", "encoder.safetensors", "encoder_part.safetensors"
REFERENCE, TRAINING_IMAGES, SITE = "reference.safetensors", "training_images.safetensors", "site.safetensors"
THRESHOLD = "threshold.json"  # for a wanted risk at one site; written by `xdm-ft evaluate --save`, not by the export
MAX_IMAGES = 1 << 32  # whose checksums a file may hold
CHECKSUMS = "xxh3_128"  # name of the array in TRAINING_IMAGES
LOCAL_FOLDER = "local-dir:"  # beginning of a model name that is a folder
PYTORCH = {"format": "pt"}
AGAIN = "export the model again"
EXAMPLE = '''\
"""Predicts the classes of images: python example.py IMAGE …"""

import sys
from pathlib import Path

import xdm_ft

model = xdm_ft.load(Path(__file__).parent)
for image, probabilities in zip(sys.argv[1:], model.predict_proba(sys.argv[1:]), strict=True):
    print(f"{image}: {model.class_names[probabilities.argmax()]} ({probabilities.max():.1%})")
'''

# of a model that reads features: a file may hold many rows
EXAMPLE_OF_FEATURES = '''\
"""Predicts the classes of features: python example.py FILE …"""

import sys
from pathlib import Path

import xdm_ft

model = xdm_ft.load(Path(__file__).parent)
for number, probabilities in enumerate(model.predict_proba(sys.argv[1:])):
    print(f"{number}: {model.class_names[probabilities.argmax()]} ({probabilities.max():.1%})")
'''


def reference_from(tensors: Mapping[str, Tensor], width: int) -> Reference:
    """Raises `Damaged` if the tensors are not a reference of features of this width."""
    try:
        reference = Reference.from_arrays({name: tensor.float().numpy() for name, tensor in tensors.items()})
    except (KeyError, ValueError) as error:
        raise Damaged(f"it lacks {error}" if isinstance(error, KeyError) else str(error)) from error
    if reference.means.shape[1] != width:
        raise Damaged(f"it is of features of size {reference.means.shape[1]}, not {width}")
    return reference


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Returns the checksum of a file's tensors in config.json."""
    return tensors_digest(dict(sorted(tensors.items())))


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `target`, which gets that name at the end, so that a kill leaves nothing there.

    Raises `UserError` if the target is taken or cannot be written.
    """
    refuse_taken(target)
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=UNFINISHED))
    try:
        yield folder
        refuse_taken(target)  # by another command meanwhile
        with disk_errors(target):
            folder.chmod(0o777 & ~umask())  # mkdtemp lets only the owner in
            if ON_WINDOWS and target.exists():
                target.rmdir()
            os.replace(folder, target)  # an empty directory may be replaced
            sync(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refuse_taken(target: Path) -> None:
    """Raises `UserError` if the target is a file, or a folder that is not empty."""
    with disk_errors(target):
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise UserError(f"{target}: exists already; name a new directory, or delete this one")


def write_directory(parts: ModelParts, folder: Path, with_encoder: bool | None) -> ModelConfig:
    """Writes the model's files, example.py and README.md into a folder. Returns the config as it is written.

    `with_encoder` None: the encoder too, if no name leads to its weights: all were trained, or they came from a file.
    Without it, what was trained of it is in a file of its own. No path and no name of a weights file of this machine is
    in any of them. Raises `UserError` if a file cannot be written.
    """
    config, encoder = parts.config, parts.encoder
    model, weights = str(config.encoder.settings["model"]), config.encoder.settings.get("weights", "")
    is_complete = config.encoder.trained is True
    is_public = not (is_complete or model.startswith(LOCAL_FOLDER) or (weights is not None and is_file_name(weights)))
    if config.encoder.reads_features:
        is_public, with_encoder = True, False
    with_encoder = is_complete or (not is_public if with_encoder is None else with_encoder)
    settings: dict[str, Any] = {**config.encoder.settings}
    portable = encoder.portable()
    if with_encoder or not is_public:
        settings = {**{key: value for key, value in settings.items() if key != "weights"}, **portable.settings}
        for name, content in portable.files.items():
            replace_text(folder / name, json.dumps(content, indent=1) + "\n")
    if with_encoder:
        write_tensors(folder / ENCODER, _copy_shared(portable.state), PYTORCH)
    part = None if with_encoder else config.encoder.part
    if part is not None:
        state = encoder.state_dict()
        write_checked(folder / PART, _copy_shared({name: state[name] for name in parts.trained_names}), PYTORCH)
    identity = config.encoder.identity
    if identity is not None and identity["model"].startswith(LOCAL_FOLDER):
        identity = None
    update = {"settings": settings, "file": ENCODER if with_encoder else None, "part": part, "identity": identity}
    written = config.model_copy(update={"encoder": config.encoder.model_copy(update=update)})

    # the texts that describe the pre-training name a weights file and a local folder
    file_name = Path(str(weights)).name if is_file_name(str(weights)) else ""
    words = "a file" if config.encoder.trained else f"a file (xxh3 {config.encoder.xxh3})"
    # the second text: descriptions are one line, in which several blanks of a name have become one
    replacements = {f"the file {text}": words for text in (file_name, " ".join(file_name.split())) if file_name}
    if model.startswith(LOCAL_FOLDER):
        replacements |= dict.fromkeys((model, " ".join(model.split())), "a local folder")

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [replaced(inner) for inner in value]
        for old, new in replacements.items() if isinstance(value, str) else ():
            value = value.replace(old, new)
        return value

    written = ModelConfig.model_validate(replaced(written.model_dump(mode="json")))
    _write_rest(parts, written, folder)
    return written


def write_changed(source: Path, parts: ModelParts, folder: Path) -> None:
    """Writes a model into a folder that has the encoder of the model directory `source`, and another head.

    Raises `UserError` if a file cannot be read or written, or if the directory holds another model than was read.
    """
    for name in encoder_files(source, parts.config):
        path, real, snapshots = source / name, (source / name).resolve(), source.resolve().parent
        in_hub_cache = snapshots.name == "snapshots" and real.parent == snapshots.parent / "blobs"
        if path.is_symlink() and not in_hub_cache:  # those of the cache lead to its own blobs
            raise UserError(f"{path}: is a link, which could lead to any file, and is not copied; put the file here")
        refuse_missing(path)
        with disk_errors(folder / name):
            shutil.copyfile(real, folder / name)
    refuse_changed(source, parts.checksum)
    _write_rest(parts, parts.config, folder)


def encoder_files(folder: Path, config: ModelConfig) -> list[str]:
    """Returns the names of the files of a model directory that its encoder is made of. Raises `UserError`."""
    encoder, model = config.encoder, str(config.encoder.settings["model"])
    names = [ENCODER] * (encoder.file is not None) + [PART] * (encoder.part is not None)
    if model.endswith(".json"):
        text = _architecture(folder / model).get("text_cfg")
        names_text = isinstance(text, dict) and text.get("hf_model_name") == TEXT_CONFIG
        names += [model] + [TEXT_CONFIG] * names_text
    return names


def refuse_missing(path: Path) -> None:
    """Raises `UserError` unless the path is a file: reading a pipe would take for ever."""
    if not path.is_file():
        raise UserError(f"{path}: {'is not a file' if path.exists() else 'does not exist'}; {AGAIN}")


def _architecture(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file that describes an encoder. Raises `UserError`."""
    refuse_missing(path)
    try:
        return json_object(path.read_bytes())
    except (Damaged, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {AGAIN}") from error


def refuse_changed(folder: Path, checksum: str) -> None:
    """Raises `UserError` unless config.json still has this checksum, with which the model was read."""
    if checksum_of(folder) != checksum:
        raise UserError(f"{folder}: holds another model than when this command began; run the command again")


def _write_rest(parts: ModelParts, config: ModelConfig, folder: Path) -> None:
    """Writes all but the encoder, with this config."""
    heads = {f"{name}.{key}": value for name, head in parts.heads.items() for key, value in head.state_dict().items()}
    write_checked(folder / WEIGHTS, heads, PYTORCH)
    if parts.reference is not None:
        write_checked(folder / REFERENCE, tensors_of(parts.reference.arrays()), PYTORCH)
    if parts.site is not None:
        write_checked(folder / SITE, parts.site, PYTORCH)
    if parts.training_images is not None:
        write_checked(folder / TRAINING_IMAGES, tensors_of({CHECKSUMS: parts.training_images}), PYTORCH)
    document = {**config.model_dump(mode="json"), "weights_xxh3": digest_of(heads)}
    document["checksum"] = json_digest(document)
    replace_text(folder / "example.py", EXAMPLE_OF_FEATURES if config.encoder.reads_features else EXAMPLE)
    replace_text(folder / "README.md", card(config, parts.config.encoder.settings, parts.training_features))
    replace_text(folder / CONFIG, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _copy_shared(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors: safetensors refuses tensors that share memory (tied weights)."""
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def checksum_of(folder: Path) -> str:
    """Returns the checksum of a model directory's config.json. Raises `UserError` for a damaged one."""
    return _read_config(folder)[2]


def read_config(folder: Path) -> tuple[ModelConfig, str]:
    """Returns the config of a model directory and the checksum of its head's tensors. Raises `UserError`."""
    return _read_config(folder)[:2]


def _read_config(folder: Path) -> tuple[ModelConfig, str, str]:
    """Returns what `read_config` returns, and the checksum of config.json."""
    path = folder / CONFIG
    try:
        if not path.is_file():
            raise Damaged("it is not a file" if path.exists() else "it does not exist")
        document = json_object(path.read_bytes())
        checksum = document.pop("checksum", None)
        if "format" not in document or "weights_xxh3" not in document:
            raise Damaged("it is not of xdm_ft")
        if document["format"] != FORMAT:
            raise Damaged(f"another version of xdm_ft made it: it has format {document['format']}, not {FORMAT}")
        if checksum != json_digest(document):
            raise Damaged("its checksum differs: it was edited or damaged")
        weights_xxh3 = str(document.pop("weights_xxh3"))
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()  # no NaN, no half of a surrogate pair
        return ModelConfig.model_validate(document), weights_xxh3, checksum
    except (Damaged, ValueError, RecursionError, OSError) as error:
        reason = first_fault(error) if isinstance(error, ValidationError) else one_line(error)
        raise UserError(f"{path}: cannot be read as a model's config ({reason[:200]}); {AGAIN}") from error


def read_directory(folder: Path, encoder_weights: str | None = None) -> ModelParts:
    """Reads a model directory. `encoder_weights`: a file with the encoder's weights, if they are not in the directory.

    Raises `UserError` if a file is missing, damaged or of another model, or if the encoder's weights are other ones.
    """
    config, weights_xxh3, checksum = _read_config(folder)
    state = read_described(folder / WEIGHTS, weights_xxh3)
    refuse_not_finite(state, str(folder / WEIGHTS))
    width, classes = config.encoder.width, len(config.class_names)
    # `head` of head.weight, `members.0` of members.0.weight
    prefixes = dict.fromkeys(".".join(name.split(".")[: 1 + name.startswith("members.")]) for name in state)
    members = {f"members.{seed}" for seed in config.members}
    if prefixes.keys() - {SINGLE} != members or not prefixes:
        raise UserError(f"{folder / WEIGHTS}: does not hold the heads of config.json; {AGAIN}")
    try:
        heads = {name: build_head(config.head, width, classes, with_prefix(state, name)) for name in prefixes}
    except ValueError as error:
        raise UserError(f"{folder / WEIGHTS}: does not fit config.json ({error}); {AGAIN}") from error
    reference = images = None
    if config.reference_xxh3 is not None:
        try:
            sizes = {"means": (range(1, classes + 1), width), "whitening": (width * (width + 1) // 2,)}
            wanted: Sizes = {**sizes, "quantiles": (len(LEVELS),)}
            reference = reference_from(read_described(folder / REFERENCE, config.reference_xxh3, wanted), width)
        except Damaged as error:
            raise UserError(f"{folder / REFERENCE}: is damaged ({error}); {AGAIN}") from error
    encoder = _read_encoder(folder, config, encoder_weights)
    if encoder.width != width:
        raise UserError(f"{folder / CONFIG}: encoder.width: {width} is not that of the encoder, {encoder.width}")
    path = folder / TRAINING_IMAGES
    if config.training_images_xxh3 is not None and path.exists():  # it stays at home when a model is uploaded
        wanted = {CHECKSUMS: (range(MAX_IMAGES), 16)}
        images = read_described(path, config.training_images_xxh3, wanted)[CHECKSUMS]
        if images.dtype != torch.uint8:
            raise UserError(f"{path}: holds no checksums of images; {AGAIN}")
    known = None if images is None else images.numpy()
    return ModelParts(config, encoder, heads, reference, known, checksum=checksum)


def read_described(path: Path, xxh3: str, wanted: Sizes | None = None) -> dict[str, Tensor]:
    """Returns the tensors of a file of a model directory.

    Raises `UserError` unless they are those of its config, finite, and, before any is read, of the `wanted` sizes.
    """
    try:
        if wanted is not None:
            refuse_other_sizes(path, wanted)
        tensors, _ = read_checked(path)
        if digest_of(tensors) != xxh3:
            raise Damaged("it is of another model than config.json")
        for name, tensor in tensors.items():
            values = tensor.float() if tensor.is_floating_point() else tensor  # float8 has no `isfinite`
            if not values.isfinite().all():
                raise Damaged(f"{printable(name)[:80]} holds values that are not finite")
        return tensors
    except (FileNotFoundError, Damaged) as error:
        problem = f"is damaged ({error})" if isinstance(error, Damaged) else "does not exist"
        raise UserError(f"{path}: {problem}; {AGAIN}") from error


def _read_encoder(folder: Path, config: ModelConfig, given: str | None) -> Encoder:
    """Builds the encoder. Raises `UserError` unless its weights are those that config.json names by their hash."""
    expected = config.encoder
    if expected.reads_features:
        if given is not None:
            raise UserError(f"{folder}: the model reads features, and has no encoder; leave --encoder-weights out")
        return build_encoder(expected.name, {**expected.settings, "width": expected.width}, config.preprocessing, None)
    settings: dict[str, Any] = {**expected.settings, **_sources(folder, config, given)}
    weights = settings["weights"]
    # nothing that describes the encoder may ask for code, name another source, or be larger than any model
    described: list[tuple[str, Any]] = [(f"{folder / CONFIG}: encoder.settings.kwargs", settings.get("kwargs", {}))]
    for name in encoder_files(folder, config):
        if name.endswith(".json"):
            described.append((str(folder / name), _architecture(folder / name)))
    for file, document in described:
        refuse_sources(document, file)
        check_sizes(document, file)
    try:
        encoder = build_encoder(expected.name, settings, config.preprocessing, expected.seed)
    except UserError as error:
        raise UserError(*(f"{folder}: {line}" for line in error.args)) from error
    except Exception as error:  # of the encoder's library, for settings that no model has
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise UserError(f"{folder}: its encoder cannot be built ({reason}); {AGAIN}") from error
    check_encoder(encoder, expected.named_xxh3, weights, folder)
    if expected.part is not None:
        try:
            load_trained(encoder, read_described(folder / PART, expected.part.xxh3))
        except ValueError as error:
            raise UserError(f"{folder / PART}: does not fit the encoder ({error}); {AGAIN}") from error
        check_encoder(encoder, expected.xxh3, PART, folder)
        refuse_not_finite(encoder.state_dict(), str(folder / PART))
    check_identity(encoder, expected.identity, str(folder / CONFIG))
    return encoder


def _sources(folder: Path, config: ModelConfig, given: str | None) -> dict[str, str | None]:
    """Returns the encoder's model and the place of its weights. Raises `UserError` if they lead elsewhere."""
    settings, key = config.encoder.settings, f"{folder / CONFIG}: encoder.settings"
    model, weights = settings["model"], settings.get("weights")
    if model.endswith(".json"):
        # a config from others could else name any file of this machine
        if Path(model).name != model:
            raise UserError(f"{key}.model: {model} is not a file of this directory")
        model = str(folder / model)
    if model.startswith(LOCAL_FOLDER):
        raise UserError(f"{key}.model: a folder outside of this directory; export again")
    if given is not None:
        # ./ makes it a file: without a slash or a known suffix it would mean a pretrained tag
        weights = given if is_file_name(given) else f"./{given}"
    elif config.encoder.file is not None:
        weights = str(folder / config.encoder.file)
    elif "weights" not in settings:
        raise UserError(
            f"{folder}: lacks the encoder's weights, which come from a file (xxh3 {config.encoder.named_xxh3}); "
            "give that file (encoder_weights, --encoder-weights), or export with --with-encoder"
        )
    elif isinstance(weights, str) and is_file_name(weights):
        raise UserError(f"{key}.weights: a file outside of this directory; export again")
    return {"model": model, "weights": weights}
