"""What any weights need: names, tags, files, downloads, and one line for what is wrong with them.

Also what others may not do by an architecture that they wrote: name other sources, bring code, or exceed all memory.
"""

from __future__ import annotations

import difflib
import importlib
import json
import logging
import math
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from xdm_ft.image_files.remote import known_answer
from xdm_ft.runtime.errors import UserError, not_there, plural, printable
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
    rest, named = tag.lower(), []
    for part, name in CORPORA.items():
        if part in rest:
            named.append(name)
            rest = rest.replace(part, "")
    return ", ".join(named) or None


def pretraining_of(name: str) -> str:
    """The protocol's line about the weights of this name, where the corpus may hold images like the test domains'."""
    return f"weights {name}, pre-trained on {corpora_in(name) or 'a corpus not named'}: {POSSIBLY_SEEN}"


def pretraining_of_file(path: Path) -> str:
    return f"weights from the file {path.name}: {POSSIBLY_SEEN}"


_version = cache(version)  # of torch: 30 ms each time, for its metadata are long


def versions(*libraries: str) -> dict[str, str]:
    """The versions of `libraries`, and of those that the features of every encoder depend on."""
    return {name: _version(name) for name in ("torch", "torchvision", "pillow", *libraries)}


def unknown_model(library: ModuleType, name: str, known: Sequence[str]) -> UserError:
    close = difflib.get_close_matches(name, known, n=3)
    other = {"timm": "open_clip", "open_clip": "timm"}[library.__name__]
    if name.partition(".")[0] in importlib.import_module(other).list_models():
        hint = f"{other} has it; write encoder.name={other}"
    else:
        hint = f"did you mean {' or '.join(close)}?" if close else f"{library.__name__}.list_models() lists them"
    return UserError(f'encoder.model: {library.__name__} {library.__version__} has no model "{name}"; {hint}')


def check_hub_weights(model: str, weights: str | None) -> None:
    """Raises `UserError` unless `weights` are those of the hub repository or folder `model`."""
    if weights != "pretrained":
        raise UserError(
            f'encoder.weights: {weights or "null"}: the model "{model}" includes its weights; write weights: pretrained'
        )


def read_config(model: str) -> tuple[Path, dict[str, Any]]:
    """Returns path and content of the JSON file `model`; {} if it is not an object. Raises `UserError`."""
    path = expand_user(model, "encoder.model")
    if not path.is_file():
        raise UserError(f"encoder.model: the config file {path} {not_there(path)}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:  # JSON or UTF-8, or a million nested brackets
        raise UserError(f"encoder.model: {path} is not valid JSON ({error})") from error
    return path, content if isinstance(content, dict) else {}


def reason_of(error: Exception, length: int = 160) -> str:
    """Returns the beginning of a library's message, on one line."""
    return " ".join(str(error).split())[:length]


def wrong_kwargs(model: str, kwargs: Mapping[str, Any], error: Exception) -> UserError:
    return UserError(
        f'encoder.kwargs: {dict(kwargs)} do not fit "{model}" ({reason_of(error)}); check their names and values'
    )


_NETWORK_LIBRARIES = ("httpx", "httpcore", "huggingface_hub", "urllib", "requests")


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


def download_failed(item: str, address: str, cause: BaseException) -> UserError:
    """The error for `item` (a model and its weights), to be found at `address` (a hub repository or an address)."""
    repository = address.removeprefix("hf-hub:")
    reason = known_answer(repository) or type(cause).__name__
    if "://" in repository:
        fetch = f"download {repository} on a machine with a network and set encoder.weights to the file"
    else:
        fetch = (
            f'on a machine with a network run "hf download {repository}", copy its cache folder (HF_HOME, '
            "~/.cache/huggingface) here and set HF_HUB_OFFLINE=1; or set encoder.weights to a file"
        )
    return UserError(f"encoder: {item} is not on this machine and did not download ({reason}); {fetch}")


SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
MAX_TENSORS = 100_000  # in a file; the largest models have some thousands
_MAX_HEADER = 200 * MAX_TENSORS  # bytes of the header of a safetensors file: a tensor takes less than 200


def is_file_name(weights: str) -> bool:
    """Whether `encoder.weights` is a file and not a tag: it ends in one of `SUFFIXES` or has a slash (not hf-hub:)."""
    return not weights.startswith("hf-hub:") and (weights.endswith(SUFFIXES) or "/" in weights or "\\" in weights)


def file_of_weights(model: str, weights: str) -> Path | None:
    """Returns the path of `encoder.weights`; None if it names no file, which a config file as `model` needs."""
    if is_file_name(weights):
        return expand_user(weights, "encoder.weights")
    if model.endswith(".json"):
        raise UserError(
            f'encoder.weights: "{weights}" is not a file; {Path(model).name} needs a .safetensors or .pt file'
        )
    return None


def read_weights(
    path: Path, read: Callable[[str], Mapping[str, object]], key: str = "encoder.weights"
) -> dict[str, Tensor]:
    """Returns the tensors of a weights file by name. `read` is the library's reader, which must not run pickled code.

    `key` is the recipe key or option that names the file; messages begin with it.

    Raises `UserError` if the file is missing or damaged, or holds code, no tensors, or some that are not finite.
    """
    try:
        problem = "" if path.is_file() else "is a folder" if path.is_dir() else not_there(path)
        if not problem:
            with path.open("rb") as file:
                header = int.from_bytes(file.read(8), "little")  # its length, of a safetensors file
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if problem:
        raise UserError(f"{key}: {path} {problem}; give the path of a .safetensors or .pth file")
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{key}: {path} is not a weights file; give one of {', '.join(SUFFIXES)}")
    too_many = UserError(f"{key}: {path} holds more than {MAX_TENSORS:,} tensors; give the weights of a model")
    if path.name.endswith(".safetensors") and _MAX_HEADER < header < path.stat().st_size:
        raise too_many  # reading them would take minutes
    try:
        with without_code():
            state = read(str(path))
    except Exception as error:  # on a damaged file, the readers raise almost any exception
        text = reason_of(error, 10_000)
        with_cause = f"{text} {error.__cause__ or error.__context__ or ''}"  # timm replaces torch's message by its own
        code = re.search(r"(?:Unsupported globals?: (?:GLOBAL )?|GLOBAL )([\w.]+)", with_cause)
        save = "save its state dict as .safetensors and give that file"
        if "TorchScript" in text:
            failure = f"is a TorchScript archive, which is code; {save}"
        elif code:
            failure = f"holds pickled code ({code[1]}), which is never run; if you trust it, {save}"
        else:
            kind = type(error).__name__
            failure = f"is damaged or has another format ({kind}: {text[:120]}); copy or download it again"
        raise UserError(f"{key}: {path} {failure}") from error
    tensors = _tensors_in(state)
    if len(tensors) > MAX_TENSORS:
        raise too_many
    if not tensors:
        raise UserError(f"{key}: {path} holds no tensors; give a file with a state dict")
    # a single number need not be a weight: a training's best loss is infinite at first
    refuse_not_finite({name: value for name, value in tensors.items() if value.ndim}, f"{key}: {path}")
    return tensors


def not_finite(state: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of tensors that hold NaN or ±∞, but for ∞ in a mask."""
    return [
        name
        for name, value in state.items()
        if value.is_floating_point()
        and not value.sum().isfinite()  # fast; a sum of finite numbers may be too large
        and (value.isnan() if name.endswith("mask") else ~value.isfinite()).any()
    ]


def refuse_not_finite(state: Mapping[str, Tensor], source: str) -> None:
    """Raises `UserError`, which begins with `source`, if weights are not finite."""
    if broken := not_finite(state):
        raise UserError(
            f"{source} holds NaN or infinity in {plural(len(broken), 'tensor')} ({first_few(broken)}): its training "
            "has diverged, a number was too large for float16, or the file is damaged; give another one"
        )


class _Inert:
    """Stands for what is no tensor in a pickle of weights: nothing of it is built."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


_NO_WEIGHTS = (
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype", "_codecs.encode", "argparse.Namespace",
)  # fmt: skip
"""What checkpoints of trainings hold beside tensors: an accuracy, a state of numpy's generator, the arguments."""


def without_code() -> AbstractContextManager[None]:
    """Context in which `torch.load` with `weights_only` passes over such values, instead of refusing the file."""
    from torch.serialization import safe_globals

    names: list[Any] = [(_Inert, name) for name in _NO_WEIGHTS]
    return safe_globals(names)


def _tensors_in(state: Mapping[Any, object], depth: int = 4) -> dict[str, Tensor]:
    """Returns the tensors of a file; those of mappings inside have the names of both, joined by a dot."""
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[str(name)] = value
        elif isinstance(value, Mapping) and depth and len(tensors) <= MAX_TENSORS:
            tensors |= {f"{name}.{inner}": tensor for inner, tensor in _tensors_in(value, depth - 1).items()}
    return tensors


def weights_inside(path: Path, names: Collection[str]) -> dict[str, Tensor] | None:
    """Returns the model of these tensors in a file where their names have a prefix; None: there is none.

    Other tensors may be beside it, like a head; not in its own modules, which would be those of a larger model. Raises
    `UserError` if the file holds several such models, like student and teacher.
    """
    import torch

    if path.name.endswith(".safetensors"):
        from safetensors.torch import load_file

        state: Mapping[str, Tensor] = load_file(path)
    else:
        with without_code():
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        state = _tensors_in(loaded if isinstance(loaded, Mapping) else {})
    first, modules = min(names), tuple({f"{name.partition('.')[0]}." for name in names if "." in name})
    prefixes = list[str]()
    for prefix in (name.removesuffix(first) for name in state if name.endswith(f".{first}")):
        inside = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
        if inside.issuperset(names) and not any(name.startswith(modules) for name in inside.difference(names)):
            prefixes.append(prefix)
    # MoCo's authors take the query encoder, of which the key encoder is a moving mean
    query = {prefix: prefix.replace("encoder_k.", "encoder_q.") for prefix in prefixes}
    prefixes = [prefix for prefix in prefixes if query[prefix] == prefix or query[prefix] not in query]
    if len(prefixes) > 1:
        choices = ", ".join(prefix.removesuffix(".") for prefix in sorted(prefixes))
        raise UserError(
            f"encoder.weights: {path} holds the model {len(prefixes)} times ({printable(choices)[:200]}); save the "
            "tensors of one of them as .safetensors and give that file"
        )
    return {name: state[f"{prefixes[0]}{name}"] for name in names} if prefixes else None


def mismatch(path: Path | str, model: str, error: Exception) -> UserError:
    """The error that a file does not fit the model, in one line; `error` is that of torch's strict loading."""
    text = str(error)  # several lines: "Missing key(s) in state_dict: …", "Unexpected key(s) …", "size mismatch for …"
    faults = []
    wordings = {"Missing": "lacks {} of the model's tensors", "Unexpected": "holds {} that the model has not"}
    for title, wording in wordings.items():
        section = re.search(rf"{title} key\(s\) in state_dict: (.*?)\.\s*(?:\n|$)", text)
        if section and (names := re.findall(r'"([^"]+)"', section[1])):
            faults.append(f"{wording.format(len(names))} ({first_few(names)})")
    shapes = re.findall(
        r"size mismatch for (\S+): .*? shape torch\.Size\((.*?)\) from checkpoint, .*? torch\.Size\((.*?)\)", text
    )
    if shapes:
        name, in_file, in_model = shapes[0]
        faults.append(f"{len(shapes)} of another shape ({name}: {in_file} in the file, {in_model} in the model)")
    problem = ", ".join(faults) or f"does not load ({type(error).__name__}: {reason_of(error)})"
    return does_not_fit(path, model, problem)


def does_not_fit(path: Path | str, model: str, problem: str) -> UserError:
    return UserError(
        f'encoder.weights: {path} does not fit "{model}": {problem}; '
        "check encoder.model and encoder.kwargs, or give the complete file"
    )


def first_few(names: Sequence[str]) -> str:
    """Returns the first names of tensors, for a message."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


NOT_TAKEN = (RuntimeError, AssertionError, ValueError, TypeError)
"""What libraries raise for images of a size that a model does not take."""


def size_not_taken(model: str, size: int, error: Exception) -> UserError:
    return UserError(
        f'encoder.preprocessing.size: "{model}" does not take images of {size} px '
        f"({reason_of(error, 120)}); leave size out or, for a ViT, set encoder.kwargs.img_size too"
    )


TEXT_CONFIG = "text_config.json"  # beside an architecture that names it: of a text side that transformers builds
_CODE = ("trust_remote_code", "auto_map")  # keys that ask for the code of a repository
_OWN_SOURCES = {"hf_model_name": ("", TEXT_CONFIG), "hf_tokenizer_name": ("",)}  # key → what it may be, if it is there
_LIMITS = (
    (r"(layers?|depths?|blocks?|stages?|experts?|repeats?)$", 1_000),  # public models have some hundred
    (r"(width|dims?|hidden_sizes?|d_model|channels?|planes)$", 65_536),
    (r"(sizes?|classes|labels|embeddings|tokens|queries|positions?)$", 1 << 20),
)
"""Part of a key, and the largest number it may have; of a list of layers, their sum. The first one that fits counts."""


def _values(document: Any) -> Iterator[tuple[str, Any]]:
    """Yields (path of keys, value) of every value that is not a dict; of a list, the list and then its items."""
    rest = [("", document)]
    while rest:  # a recursive function would end at a thousand brackets
        keys, value = rest.pop()
        if isinstance(value, dict):
            rest += [(f"{keys}.{name}".removeprefix("."), inner) for name, inner in value.items()]
        else:
            yield keys, value
            rest += [(keys, inner) for inner in value] if isinstance(value, list | tuple) else []


def refuse_sources(document: Any, source: str) -> None:
    """Raises `UserError` if an architecture asks for code, or names a repository, a folder or an address.

    It is called with decoded JSON, where an escaped letter is the letter. `source` names the file.
    """
    for keys, value in _values(document):
        if any(name in keys.split(".") for name in _CODE):
            raise UserError(f"{source}: {keys} asks for code of a repository, which is never run")
        allowed = _OWN_SOURCES.get(keys.rpartition(".")[2])
        if (allowed is not None and value is not None and value not in allowed) or (
            isinstance(value, str) and (re.search(r"[/\\:]", value) or value.startswith(("~", ".")))
        ):
            raise UserError(
                f'{source}: {keys}: "{printable(str(value))[:80]}" names another source, but a model directory '
                "must hold its whole architecture; do not use this model, or export it again if it is yours"
            )


def check_sizes(document: Any, source: str) -> None:
    """Raises `UserError` if an architecture has more layers, or a greater width or more classes, than any model has.

    Sizes are known by the ends of their keys, which timm, open_clip and transformers have in common. `source`
    begins the message.
    """
    for keys, value in _values(document):
        items = value if isinstance(value, list | tuple) else [value]
        sizes = [abs(item) for item in items if isinstance(item, int | float) and not isinstance(item, bool)]
        limit = next((limit for pattern, limit in _LIMITS if re.search(pattern, keys)), math.inf)
        if sizes and not (sum(sizes) if limit == _LIMITS[0][1] else max(sizes)) <= limit:  # NaN too
            raise UserError(
                f"{source}: {keys} is {str(value)[:60]}, more than any model has; it may be {limit:,} at most"
            )


_NOT_ARCHITECTURE = (
    "_name_or_path", "transformers_version", "dtype", "architectures", "auto_map", "id2label", "label2id",
)  # fmt: skip
"""Keys of a config that say where it comes from or name the classes of a head; features do not depend on them."""


def architecture(config: Any) -> dict[str, Any]:
    """A config of transformers as JSON, from which another machine builds the model. It names no file or folder."""

    def without_origin(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_origin(inner) for key, inner in value.items() if key not in _NOT_ARCHITECTURE}
        return value

    plain: dict[str, Any] = without_origin(json.loads(config.to_json_string(use_diff=False)))
    return plain


_LIBRARIES = threading.RLock()


@contextmanager
def quiet(progress_bars: bool = False) -> Iterator[None]:
    """Context in which transformers and open_clip log and ask nothing: their faults become one `UserError`.

    transformers does not ask on a terminal whether to run a repository's code, but raises `ValueError`: not all of its
    calls are ours, and open_clip builds its text tower without `trust_remote_code`. `progress_bars`: of downloads.
    """
    root, handler = logging.getLogger(), logging.NullHandler()

    def silence(record: logging.LogRecord) -> bool:
        return False

    with _LIBRARIES, ExitStack() as undo:  # of two threads, the first one to leave would undo it for the other
        root.addFilter(silence)  # open_clip logs its errors to the root logger before it raises them
        root.addHandler(handler)  # without a handler, logging.error() configures the root logger permanently
        undo.callback(root.removeFilter, silence)
        undo.callback(root.removeHandler, handler)
        try:
            from transformers import dynamic_module_utils as remote_code
            from transformers.utils import logging as messages
        except ImportError:  # nothing can ask
            yield
            return
        undo.callback(setattr, remote_code, "TIME_OUT_REMOTE_CODE", remote_code.TIME_OUT_REMOTE_CODE)
        remote_code.TIME_OUT_REMOTE_CODE = 0
        undo.callback(messages.set_verbosity, messages.get_verbosity())
        messages.set_verbosity(messages.CRITICAL)
        if messages.is_progress_bar_enabled() and not progress_bars:
            messages.disable_progress_bar()
            undo.callback(messages.enable_progress_bar)
        yield


@contextmanager
def tokenizer_errors(model: str, repository: str) -> Iterator[None]:
    """Context in which a library reads the tokenizer of a model from a hub repository or folder."""
    item = f'encoder.model: the tokenizer of "{model}"'
    try:
        yield
    except OSError as error:
        raise not_read(f"the tokenizer of {model}", repository, error) from error
    except ImportError as error:
        raise UserError(f"{item} needs {error.name}; pip install {error.name}") from error
    except (ValueError, KeyError) as error:
        raise UserError(f"{item} cannot be used ({reason_of(error)})") from error


def not_read(model: str, folder: str, error: OSError) -> UserError:
    """The error for a file of a repository or folder that transformers did not get."""
    from huggingface_hub.errors import GatedRepoError

    cause = error.__cause__ or error.__context__ or error
    if isinstance(cause, GatedRepoError):
        return UserError(
            f'encoder.model: access to "{folder}" is restricted; ask for it on its page, then hf auth login'
        )
    if model.startswith("local-dir:") or "does not appear to have" in " ".join(str(error).split()):
        return UserError(
            f'encoder.model: "{model}" lacks a file ({reason_of(error)}); weights must be .safetensors there, '
            "or a file that encoder.weights names"
        )
    return download_failed(model, folder, cause)


def asks_for_code(error: BaseException) -> bool:
    """Returns whether a library has refused to run a repository's code."""
    return "trust_remote_code" in str(error) or "custom code" in str(error)
