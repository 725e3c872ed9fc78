"""The connection to a Ray cluster: what it has, and whether the recipe's models can train there."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from xdm_ft.recipe.settings import Cluster, Recipe
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.interrupt import STOPPING

logger = logging.getLogger("xdm_ft")
CONNECT_SECONDS = 5.0
START = "start one (`ray start --head`, on other nodes `ray start --address=HOST:PORT`), or set cluster.name=null"


def check_cluster(recipe: Recipe) -> None:
    """Logs what the cluster has. Raises `UserError` if the recipe's models can not train there."""
    settings = recipe.cluster
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"{recipe.name}: cluster.name: {settings.name} starts processes by itself; use `xdm-ft run`, not "
            "`accelerate launch`, or set cluster.name=null"
        )
    with connected(settings) as ray:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cores, gpus = (int(sum(node.get(kind, 0) for node in nodes)) for kind in ("CPU", "GPU"))
        has = f"{plural(len(nodes), 'node')}, {plural(cores, 'core')}, {plural(gpus, 'GPU')}"
        logger.info("cluster: Ray %s at %s, %s", ray.__version__, ray.get_runtime_context().gcs_address, has)
        for key, kind, wanted in (
            ("gpus_per_model", "GPU", settings.gpus_per_model),
            ("cpus_per_model", "CPU", settings.cpus_per_model),
        ):
            most = max((node.get(kind, 0) for node in nodes), default=0)
            if most < wanted:
                raise UserError(
                    f"cluster.{key}: {wanted:g}, but no node of the cluster has more than {most:g} ({has}); add nodes, "
                    f"or set a smaller cluster.{key}"
                )
        if gpus and not settings.gpus_per_model:
            logger.warning("cluster.gpus_per_model is 0: models train on the CPU, and the cluster's GPUs are idle")


def environment_of(settings: Cluster, here: torch.device) -> dict[str, str]:
    """Returns what the environment in results.json says of a cluster; nothing for this machine."""
    if settings.name is None:
        return {}
    return {"device": device_of(settings, here).type, "cluster": f"Ray {imported_ray().__version__}"}


def device_of(settings: Cluster, here: torch.device) -> torch.device:
    """Returns the kind of device that features are computed and models trained on: `here` without a cluster."""
    if settings.name is None:
        return here
    return torch.device("cuda" if settings.gpus_per_model else "cpu")


@contextmanager
def connected(settings: Cluster) -> Iterator[Any]:
    """Context that yields the module `ray`, connected to the cluster. Raises `UserError` if that is not possible."""
    ray = imported_ray()
    address = reachable(settings.address)
    with _handlers_kept():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"cluster.address: {address}: {first_line(error)}; {START}") from error
    try:
        yield ray
    finally:
        with _handlers_kept():
            ray.shutdown()


def imported_ray() -> Any:
    if importlib.util.find_spec("ray") is None:
        raise UserError("cluster.name: ray needs the package ray; run: pip install 'xdm_ft[ray]'")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # unset, Ray warns of what it will do one day
    import ray

    return ray


def address_of(asked: str) -> str:
    """Returns HOST:PORT of the cluster that `cluster.address` means. Raises `UserError` if there is none."""
    if asked != "auto":
        return asked
    from ray._private.services import get_ray_address_from_environment  # `ray.init` alone waits for minutes

    try:
        found = get_ray_address_from_environment(asked, None)
    except ConnectionError:
        found = None
    if found is None:
        raise UserError(f"cluster.address: {asked}: no Ray runs on this machine; {START}")
    return str(found)


def reachable(asked: str) -> str:
    """Returns the address of `address_of`. Raises `UserError` if nothing answers there."""
    address = address_of(asked)
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdigit():
        raise UserError(
            f"cluster.address: {asked}: must be HOST:PORT or auto; a run is a process of a node of the cluster, for "
            "ray:// submit it (`ray job submit`)"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(f"cluster.address: {address} can not be reached ({error}); {START}") from error
    return address


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Context after which signals are handled as before: Ray takes SIGTERM."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
