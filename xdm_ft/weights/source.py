"""What any weights need: names, tags, files, downloads, and one line for what is wrong with them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.storage.names import expand_user

POSSIBLY_SEEN = "unseen in fine-tuning, possibly seen in pre-training"
# part of a tag → name as in the model cards of timm and open_clip; longer parts first: "laion" is in "laion2b"
CORPORA = {
    "in12k": "ImageNet-12k",
    "in21k": "ImageNet-21k",
    "in22k": "ImageNet-22k",
    "in1k": "ImageNet-1k",
    "openai": "OpenAI WIT-400M",
    "laion2b": "LAION-2B",
    "laion5b": "LAION-5B",
    "laion400m": "LAION-400M",
    "laiona": "LAION-Aesthetics",
    "laion": "LAION",
    "datacomp": "DataComp",
    "commonpool": "CommonPool",
    "dfndr": "DFNDR",
    "dfn": "DFN",
    "metaclip": "MetaCLIP",
    "webli": "WebLI",
    "merged2b": "Merged-2B",
    "cc12m": "CC12M",
    "yfcc15m": "YFCC15M",
    "lvd142m": "LVD-142M",
    "lvd1689m": "LVD-1689M",
    "ig1b": "Instagram-1B",
    "fb_swsl": "Instagram, YFCC100M",
    "fb_ssl": "YFCC100M",
}


def corpora_in(tag: str) -> str | None:
    """The corpora named in a weights tag, e.g. "ImageNet-21k, ImageNet-1k"; None if it names none."""
    rest, found = tag.lower(), []
    for part, name in CORPORA.items():
        if part in rest:
            found.append(name)
            rest = rest.replace(part, "")
    return ", ".join(found) or None


def pretraining_of(name: str) -> str:
    """The protocol's line about the weights of this name, where the corpus may hold images like the test domains'."""
    return f"weights {name}, pre-trained on {corpora_in(name) or 'a corpus not named'}: {POSSIBLY_SEEN}"


def pretraining_of_file(path: Path) -> str:
    return f"weights from the file {path.name}: {POSSIBLY_SEEN}"


_version = cache(version)  # of torch: 30 ms each time, for its metadata are long


def versions(*libraries: str) -> dict[str, str]:
    """The versions of `libraries`, and of those that the features of every encoder depend on."""
    return {name: _version(name) for name in ("torch", "torchvision", "pillow", *libraries)}


def refuse_reserved(kwargs: dict[str, Any], reserved: tuple[str, ...]) -> None:
    """Raises `UserError` if `kwargs` has keys that the encoder class sets itself."""
    taken = sorted(set(kwargs) & set(reserved))
    if taken:
        raise UserError(f"encoder.kwargs: {', '.join(taken)} can not be set here; leave it out")


def unknown_model(library: ModuleType, name: str, known: Sequence[str]) -> UserError:
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"{library.__name__}.list_models() lists them"
    return UserError(f'encoder.model: {library.__name__} {library.__version__} has no model "{name}"; {hint}')


def check_hub_weights(model: str, weights: str | None) -> None:
    """Raises `UserError` unless `weights` are those of the hub repository or folder `model`."""
    if weights != "pretrained":
        raise UserError(
            f'encoder.weights: {weights or "null"}: the model "{model}" includes its weights; write weights: pretrained'
        )


def wrong_kwargs(model: str, kwargs: dict[str, Any], error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:160]
    return UserError(f'encoder.kwargs: {kwargs} do not fit "{model}" ({reason}); check their names and values')


_NETWORK_LIBRARIES = ("httpx", "httpcore", "huggingface_hub", "urllib", "requests")


def check_hub_cache() -> None:
    """Raises `UserError` if the home folder is unknown and the hub's cache is in it."""
    from huggingface_hub.constants import HF_HUB_CACHE

    expand_user(HF_HUB_CACHE, "HF_HOME")


def network_error(error: BaseException) -> BaseException | None:
    """The first of `error` and its causes that is from the network or the hub's cache; None if none is.

    Causes, since a library may wrap the hub's exception in its own.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) or type(cause).__module__.startswith(_NETWORK_LIBRARIES):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def download_failed(what: str, where: str, cause: BaseException) -> UserError:
    """The error for `what` (a model and its weights), to be found at `where` (a hub repository or an address)."""
    repository = where.removeprefix("hf-hub:")
    if "://" in repository:
        fetch = f"download {repository} on a machine with a network and set encoder.weights to the file"
    else:
        fetch = (
            f'run "hf download {repository}" on a machine with a network and copy its cache folder (HF_HOME, '
            "~/.cache/huggingface) here, then set HF_HUB_OFFLINE=1; or set encoder.weights to a downloaded file"
        )
    return UserError(f"encoder: {what} is not on this machine and did not download ({type(cause).__name__}); {fetch}")


SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
MOST_TENSORS = 100_000  # in a file; the largest models have some thousands
_BYTES_PER_TENSOR = 200  # of the header of a safetensors file: more than a tensor takes
_SHOWN = 3  # tensor names listed in a message


def is_file_name(weights: str) -> bool:
    """Whether `encoder.weights` is a file and not a tag: it ends in one of `SUFFIXES` or has a slash (not hf-hub:)."""
    return not weights.startswith("hf-hub:") and (weights.endswith(SUFFIXES) or "/" in weights or "\\" in weights)


def read_weights(
    path: Path, read: Callable[[str], Mapping[str, object]], key: str = "encoder.weights"
) -> dict[str, Tensor]:
    """Returns the tensors of a weights file by name. `read` is the library's reader, which must not run pickled code.

    `key` is the recipe key or option that names the file; messages begin with it.

    Raises `UserError` if the file is missing or damaged, or holds code, NaN or no tensors.
    """
    _refuse_unreadable(path, key)
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{key}: {path} is no weights file; give one of {', '.join(SUFFIXES)}")
    _refuse_long_header(path, key)
    try:
        state = read(str(path))
    except Exception as error:  # on a damaged file, the readers raise almost any exception
        raise UserError(f"{key}: {path} {_read_failure(error)}") from error
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if len(tensors) > MOST_TENSORS:
        raise _too_many(path, key)
    if not tensors:
        raise UserError(f"{key}: {path} holds no tensors; give a file with a state dict")
    broken = [name for name, value in tensors.items() if value.is_floating_point() and value.isnan().any()]
    if broken:
        raise UserError(
            f"{key}: {path} holds NaN in {plural(len(broken), 'tensor')} ({_first_few(broken)}): "
            "its training has diverged or the file is damaged; give another one"
        )
    return tensors


def _refuse_unreadable(path: Path, key: str) -> None:
    try:
        if path.is_file():
            path.open("rb").close()
            return
        problem = "is a folder" if path.is_dir() else "does not exist"
    except OSError as error:
        problem = f"can not be read ({error.strerror})"
    raise UserError(f"{key}: {path} {problem}; give the path of a .safetensors or .pth file")


def _refuse_long_header(path: Path, key: str) -> None:
    """Raises `UserError` for a safetensors file with so many tensors that reading them takes minutes."""
    if path.name.endswith(".safetensors") and path.stat().st_size > MOST_TENSORS * _BYTES_PER_TENSOR:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")  # of the header
        if MOST_TENSORS * _BYTES_PER_TENSOR < length < path.stat().st_size:
            raise _too_many(path, key)


def _too_many(path: Path, key: str) -> UserError:
    return UserError(f"{key}: {path} holds more than {MOST_TENSORS:,} tensors; give the weights of a model")


def _read_failure(error: Exception) -> str:
    """Why a reader failed, in words that follow the path."""
    text = " ".join(str(error).split())
    if "TorchScript" in text:
        return "is a TorchScript archive, which is code; save its state dict as .safetensors and give that file"
    with_cause = f"{text} {error.__cause__ or error.__context__ or ''}"  # timm replaces torch's message by its own
    code = re.search(r"(?:Unsupported globals?: (?:GLOBAL )?|GLOBAL )([\w.]+)", with_cause)
    if code:
        return (
            f"holds pickled code ({code[1]}), which is never run; "
            "if you trust it, save its state dict as .safetensors and give that file"
        )
    return f"is damaged or has another format ({type(error).__name__}: {text[:120]}); copy or download it again"


def mismatch(path: Path | str, model: str, error: Exception) -> UserError:
    """The error that a file does not fit the model, in one line; `error` is that of torch's strict loading."""
    text = str(error)  # several lines: "Missing key(s) in state_dict: …", "Unexpected key(s) …", "size mismatch for …"
    found = []
    for title, wording in (
        ("Missing", "lacks {n} of the model's tensors"),
        ("Unexpected", "holds {n} that the model has not"),
    ):
        section = re.search(rf"{title} key\(s\) in state_dict: (.*?)\.\s*(?:\n|$)", text)
        names = re.findall(r'"([^"]+)"', section[1]) if section else []
        if names:
            found.append(f"{wording.format(n=len(names))} ({_first_few(names)})")
    shapes = re.findall(
        r"size mismatch for (\S+): .*? shape torch\.Size\((.*?)\) from checkpoint, .*? torch\.Size\((.*?)\)", text
    )
    if shapes:
        name, in_file, in_model = shapes[0]
        found.append(f"{len(shapes)} of another shape ({name}: {in_file} in the file, {in_model} in the model)")
    what = ", ".join(found) or f"does not load ({type(error).__name__}: {' '.join(text.split())[:160]})"
    return UserError(
        f'encoder.weights: {path} does not fit "{model}": {what}; '
        "check encoder.model and encoder.kwargs, or give the complete file"
    )


def _first_few(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


NOT_TAKEN = (RuntimeError, AssertionError, ValueError, TypeError)
"""What libraries raise for images of a size that a model does not take."""


def size_not_taken(model: str, size: int, error: Exception) -> UserError:
    return UserError(
        f'encoder.preprocessing.size: "{model}" does not take images of {size} px '
        f"({' '.join(str(error).split())[:120]}); leave size out or, for a ViT, set encoder.kwargs.img_size too"
    )
