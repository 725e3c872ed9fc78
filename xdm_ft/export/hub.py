"""Model directories on the Hugging Face hub.

Only the files of a model go there, and only data are read from there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xdm_ft.export import ModelConfig
from xdm_ft.export.card import HUB
from xdm_ft.export.directory import (
    CONFIG,
    ENCODER,
    PART,
    REFERENCE,
    SITE,
    THRESHOLD,
    TRAINING_IMAGES,
    WEIGHTS,
    encoder_files,
    read_config,
)
from xdm_ft.export.onnx import ONNX
from xdm_ft.image_files.remote import hub, known_answer
from xdm_ft.model_sources.source import TEXT_CONFIG, network_error, reason_of
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.version import __version__

NEEDED = (CONFIG, WEIGHTS)
FILES = (
    *NEEDED, REFERENCE, SITE, TRAINING_IMAGES, ENCODER, PART, TEXT_CONFIG, ONNX, THRESHOLD, "README.md", "example.py"
)  # fmt: skip
"""Files of a model directory, besides the architecture of an encoder that its library does not know."""
READ = (*NEEDED, REFERENCE, SITE, TRAINING_IMAGES, ENCODER, PART, "*.json")  # *.json: the architecture
_REPOSITORY = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>\S+))?", re.ASCII)
LOGIN = "run `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True)
class Pushed:
    """A model on the hub."""

    repository: str  # ORG/NAME
    url: str  # of the commit
    private: bool
    files: tuple[str, ...]


def check_name(repository: str) -> None:
    """Raises `UserError` unless the text is the name of a repository on the hub."""
    if _REPOSITORY.fullmatch(repository) is None or "@" in repository:
        raise UserError(f"{repository}: is not a name of a repository; write ORGANISATION/NAME")


def push(folder: Path, repository: str, private: bool, with_training_hashes: bool = False) -> Pushed:
    """Uploads a model directory in one commit, and creates the repository if there is none.

    `with_training_hashes`: the checksums of the training images too, by which anyone who has an image can find out
    whether it is one of them. A stored threshold, which is of one site, stays here. Files of an earlier model in the
    repository are removed. Raises `UserError`, before anything is uploaded, if the folder holds other files, or if
    `private` and the repository is public; and for errors of the hub.
    """
    check_name(repository)
    config, _ = read_config(folder)
    at_home = {THRESHOLD} if with_training_hashes else {THRESHOLD, TRAINING_IMAGES}
    files = tuple(name for name in check_files(folder, config) if name not in at_home)
    from huggingface_hub import HfApi

    api: Any = HfApi(library_name="xdm_ft", library_version=__version__)
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        # asked, as `create_repo` leaves a repository that exists as it is, whatever `private` says
        is_private = bool(api.model_info(repository).private)
        if private and not is_private:
            raise UserError(f"{repository}: exists on the hub and is public; make it private there, or name another")
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=list(files),
            delete_patterns=list(FILES),  # except those that are uploaded
            commit_message=f"{config.method['label']} model of xdm_ft {__version__}",
        )
    except UserError:
        raise
    except Exception as error:
        raise _hub_error(repository, error, writing=True) from error
    return Pushed(repository, str(commit.commit_url), is_private, files)


def check_files(folder: Path, config: ModelConfig) -> tuple[str, ...]:
    """Returns the names of the files. Raises `UserError` as `push` says."""
    of_encoder = encoder_files(folder, config)
    known = {*FILES} - {ENCODER, PART, TEXT_CONFIG} | {*of_encoder}
    files = sorted(folder.iterdir())
    # a link could lead to any file
    others = [path.name for path in files if path.name not in known or path.is_symlink() or not path.is_file()]
    if others:
        names = ", ".join(map(printable, others))
        raise UserError(f"{folder}: {names}: not a file of a model, so it is not uploaded; move it elsewhere")
    described = {REFERENCE: config.reference_xxh3, SITE: config.site_xxh3}
    needed = {*NEEDED, *of_encoder, *(name for name, xxh3 in described.items() if xxh3 is not None)}
    missing = sorted(needed - {path.name for path in files})
    if missing:
        raise UserError(f"{folder}: lacks {', '.join(missing)}; export the model again")
    return tuple(path.name for path in files)


def download(name: str) -> Path:
    """Returns the folder of the local cache with the model hf-hub:ORGANISATION/NAME[@REVISION].

    Files that are there already are not downloaded again. Raises `UserError` if the name is wrong, or the model is
    neither there nor reachable.
    """
    match = _REPOSITORY.fullmatch(name.removeprefix(HUB))
    if match is None:
        raise UserError(f"{name}: is not a name of a model on the hub; write hf-hub:ORGANISATION/NAME or …@REVISION")
    from huggingface_hub import snapshot_download

    repository, revision = match["repository"], match["revision"]
    try:
        with hub():
            snapshot = snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(READ),
                library_name="xdm_ft",
                library_version=__version__,
            )
    except UserError:
        raise
    except Exception as error:
        raise _hub_error(name, error, writing=False) from error
    folder = Path(snapshot)
    if not (folder / CONFIG).is_file():
        raise UserError(f"{name}: holds no model of xdm_ft ({CONFIG} is missing); check the name")
    return folder


def _hub_error(name: str, error: Exception, writing: bool) -> UserError:
    """Returns the error for the user. Raises `error` itself if it is not of the hub or the network."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    cause = network_error(error)
    repository = name.removeprefix(HUB).partition("@")[0]
    if isinstance(error, errors.HFValidationError):
        problem = "is not a name of a repository; write ORGANISATION/NAME"
    elif isinstance(error, errors.OfflineModeIsEnabled) and writing:
        problem = "HF_HUB_OFFLINE is set, so nothing is uploaded; unset it"
    elif isinstance(error, errors.RevisionNotFoundError):
        problem = "the hub has no such revision; check the name behind @"
    elif isinstance(error, errors.GatedRepoError):
        problem = f"access is restricted; ask for it on its page, then {LOGIN}"
    elif writing and (status in (401, 404) or isinstance(error, errors.LocalTokenNotFoundError)):
        problem = f"the hub needs a token with the right to write; {LOGIN}"
    elif writing and status == 403:
        problem = f"the token has no right to write there; use another name or token ({LOGIN})"
    elif isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        problem = f"is not on the hub, or is private; check the name, or {LOGIN}"
    elif writing and isinstance(error, ValueError) and "README.md" in str(error):
        problem = f"the hub refuses the metadata of README.md ({reason_of(error)}); correct its first lines"
    elif cause is None:
        raise error
    elif writing:
        problem = f"the upload failed ({type(cause).__name__}); check the network and try again"
    else:
        problem = (
            f"is not on this machine and did not download ({known_answer('') or type(cause).__name__}); run "
            f"`hf download {repository}` on a machine with a network, copy the folder that it prints to this machine, "
            "and name the copy"
        )
    return UserError(f"{name}: {problem}")
