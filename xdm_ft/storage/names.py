"""Names and paths: those that users write, and those of the tensors of a run.

An address of tensors is a path relative to the run directory, or an entry of a shared file.
`models/erm/sketch/seed0-trial0/train_val.safetensors` is a file of its own. In a large run, heads that train together
share `models/erm/heads-<hash>.safetensors`, and `…#sketch/seed0-trial0/train_val` is an entry of that file: after the #
is what would follow in the path of a file of its own.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from xdm_ft.runtime.errors import UserError
from xdm_ft.storage import digest

MAX_BYTES = 120  # of a name; file systems allow 255, and callers add endings
EMPTY, CUT = "%-", "%~"  # no percent-encoded name contains them
FINAL_FIT_REFERENCE = "+final_fit"  # no domain has this file name, as + would be percent-encoded


def expand_user(path: str | Path, key: str) -> Path:
    """Returns the path with `~` replaced by the home folder. Raises `UserError`, which names `key`, without one."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        problem = "the home folder is unknown (no HOME, or no such user)"
        raise UserError(f"{key}: {path}: {problem}; write the whole path") from error


def file_name(*names: str, safe: str = "") -> str:
    """Returns the name of a file or folder for these names. Distinct names have distinct file names.

    A short name of letters, digits, `_.-~` and the characters in `safe` stays as it is. All other characters are
    percent-encoded, so that no name leaves its folder, is empty or is hidden. Several names are joined by commas. If
    the result is longer than `MAX_BYTES` bytes, its end is replaced by a checksum.
    """
    # surrogatepass: a name that is not UTF-8 holds lone surrogates, which `quote` alone refuses
    quoted = ",".join(quote(name, safe=safe, errors="surrogatepass") or EMPTY for name in names)
    if quoted.startswith("."):
        quoted = f"%2E{quoted[1:]}"
    if len(quoted) <= MAX_BYTES:
        return quoted
    end = f"{CUT}{digest(quoted, bits=128)}"
    return quoted[: MAX_BYTES - len(end)] + end


def parts_of(address: str) -> tuple[str, str | None]:
    """Returns the file of an address, and the entry in it; None: the file is not shared."""
    file, shared, entry = address.partition("#")  # in a name of a method or domain it is percent-encoded
    return file, entry if shared else None


def is_of_one_model(address: str) -> bool:
    """Returns whether no other models of the run read the tensors at an address."""
    return address.startswith("models/")


def method_folder(method: str) -> str:
    return f"models/{file_name(method, safe='+ ')}"


def model_folder(method: str, test_domains: tuple[str, ...], seed: int, trial: int, heads: str | None = None) -> str:
    """Returns the folder of a model that has files of its own.

    `heads` names the file that a head shares with others: then it is what stands for a folder in it.
    """
    shared = "" if heads is None else f"heads-{heads}.safetensors#"
    return f"{method_folder(method)}/{shared}{file_name(*test_domains, safe=' ')}/seed{seed}-trial{trial}"


def address_in(folder: str, name: str) -> str:
    """Returns the address of tensors of a model."""
    return f"{folder}/{name}" + (".safetensors" if parts_of(folder)[1] is None else "")


def predictions_in(folder: str) -> str:
    """Returns the address of a model's predictions on its test images."""
    return address_in(folder, "predictions")


def images_file(test_domains: tuple[str, ...]) -> str:
    """Returns the file of the test images that models with these test domains share."""
    return f"test_images/{file_name(*test_domains, safe=' ')}.safetensors"


def reference_file(test_domains: tuple[str, ...], encoder: str | None = None) -> str:
    """Returns the file for the distances of models with these test domains, () for the final fit.

    `encoder`: the label of theirs, if the run has several.
    """
    name = file_name(*test_domains, safe=" ") if test_domains else FINAL_FIT_REFERENCE
    folder = "training_features" if encoder is None else f"training_features/{file_name(encoder, safe=' ')}"
    return f"{folder}/{name}.safetensors"


def reference_beside(weights: str) -> str:
    """Returns the file for the distances of a model that has trained its encoder, given its weights file."""
    return weights.removesuffix(".safetensors") + ".reference.safetensors"
