"""Downloads that fail, and what to do about them."""

from __future__ import annotations

from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.names import expanded

_NETWORK_LIBRARIES = ("httpx", "httpcore", "huggingface_hub", "urllib", "requests")


def check_hub_cache() -> None:
    """Raises `UserError` if the home folder is unknown and the hub's cache is in it."""
    from huggingface_hub.constants import HF_HUB_CACHE

    expanded(HF_HUB_CACHE, "HF_HOME")


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
