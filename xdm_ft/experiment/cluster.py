"""A Ray cluster: its connection, and the tasks that do parts of a run there.

All nodes see the run directory and the feature cache on shared disks, into which tasks write what they have done, so
nothing but its place in the queue is lost with a node: Ray does a part again whose worker or node died.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import pickle
import shutil
import signal
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
import torch

from xdm_ft.encoders import Encoder
from xdm_ft.experiment.work import start
from xdm_ft.features.extract import Extraction, RemoteExtraction, frozen_copy
from xdm_ft.recipe.settings import Cluster, Recipe
from xdm_ft.runtime.errors import UserError, plural, undocumented
from xdm_ft.runtime.interrupt import RESUME, STOPPING, Interrupted, deferred, request_stop, stop_requested
from xdm_ft.runtime.machine import cores
from xdm_ft.runtime.progress import Progress
from xdm_ft.runtime.terminal import print_error
from xdm_ft.version import __version__

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
CONNECT_SECONDS = 5.0
POLL_SECONDS = 0.2
STOP_SECONDS = 60.0  # for all tasks to save their state, after a signal
LOOK_SECONDS = 1.0  # between two looks at what tasks have written
HEAD_SECONDS = 20.0  # without an answer of the head; after 60 Ray ends this process without a word of ours
WATCH_SECONDS = 0.5  # between two looks of a task at whether it shall go on
GO_ON = "go-on"  # file in the folder of the tasks: they stop when it is removed, which needs no space on the disk
MAX_LOSSES = 10  # of the workers or nodes of one task: then the task itself may be the cause
START = "start one (`ray start --head`, on other nodes `ray start --address=HOST:PORT`), or set cluster.name=null"
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
"""Variables by which Accelerate would take a task for one of several processes: `srun ray start` may set them."""


def check_cluster(recipe: Recipe) -> dict[str, str]:
    """Logs what the recipe's cluster has, and returns what the environment in results.json says of it.

    Without a cluster it does nothing and returns {}. Raises `UserError` if the recipe's models cannot train there.
    """
    settings = recipe.cluster
    if settings.name is None:
        return {}
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"{recipe.name}: cluster.name: {settings.name} starts processes by itself; use `xdm-ft run`, not "
            "`accelerate launch`, or set cluster.name=null"
        )
    with ray_connection(settings) as ray:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cores, gpus = (int(sum(node.get(kind, 0) for node in nodes)) for kind in ("CPU", "GPU"))
        has = f"{plural(len(nodes), 'node')}, {plural(cores, 'core')}, {plural(gpus, 'GPU')}"
        logger.info("cluster: Ray %s at %s, %s", ray.__version__, ray.get_runtime_context().gcs_address, has)
        for key, kind in (("gpus_per_model", "GPU"), ("cpus_per_model", "CPU")):
            wanted, largest = getattr(settings, key), max((node.get(kind, 0) for node in nodes), default=0)
            if largest < wanted:
                raise UserError(
                    f"cluster.{key}: {wanted:g}, but no node of the cluster has more than {largest:g} ({has}); add "
                    f"nodes, or set a smaller cluster.{key}"
                )
    if gpus and not settings.gpus_per_model:
        logger.warning("cluster.gpus_per_model is 0: models train on the CPU, and the cluster's GPUs are idle")
    return {"device": device_of(settings, torch.device("cpu")).type, "cluster": f"Ray {ray.__version__}"}


def device_of(settings: Cluster, here: torch.device) -> torch.device:
    """Returns the kind of device that features are computed and models trained on: `here` without a cluster."""
    if settings.name is None:
        return here
    return torch.device("cuda" if settings.gpus_per_model else "cpu")


@contextmanager
def ray_connection(settings: Cluster) -> Iterator[Any]:
    """Context that yields the module `ray`, connected to the cluster. Raises `UserError` if that is not possible."""
    ray = import_ray()
    address = reachable(settings.address)
    with _keep_handlers():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"cluster.address: {address}: {_first_line(error)}; {START}") from error
    try:
        yield ray
    finally:
        with _keep_handlers():
            ray.shutdown()


@contextmanager
def _keep_handlers() -> Iterator[None]:
    """Context after which signals are handled as before: Ray takes SIGTERM."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def import_ray() -> Any:
    if importlib.util.find_spec("ray") is None:
        raise UserError("cluster.name: ray needs the package ray; run: pip install 'xdm_ft[ray]'")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # unset, Ray warns of what it will do one day
    import ray

    with undocumented("ray"):
        from ray._private import worker

    # reports of Ray's own state, 40 lines for a dead node, even with log_to_driver=False; `Tasks` names the node
    worker.print_to_stdstream = lambda data, ignore_prefix: logger.debug("Ray: %s", data["lines"])
    return ray


def address_of(asked: str) -> str:
    """Returns HOST:PORT of the cluster that `cluster.address` means. Raises `UserError` if there is none."""
    if asked != "auto":
        return asked
    with undocumented("ray"):  # `ray.init` alone waits for minutes
        from ray._private.services import get_ray_address_from_environment

    address = None
    with suppress(ConnectionError):
        address = get_ray_address_from_environment(asked, None)
    if address is None:
        raise UserError(f"cluster.address: {asked}: no Ray runs on this machine; {START}")
    return str(address)


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


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
        # asked first, as `ray.init` waits long for an address where nobody answers
        socket.create_connection(split_address(address), CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(f"cluster.address: {address} cannot be reached ({error}); {START}") from error
    return address


def fitting(settings: Cluster, threads: int) -> int:
    """Returns how many tasks of so many threads the cluster can do at a time."""
    with ray_connection(settings) as ray:
        has = ray.cluster_resources()
    fits = [has.get("CPU", 0) / threads]
    if settings.gpus_per_model:
        fits.append(has.get("GPU", 0) / settings.gpus_per_model)
    return int(min(fits))


class TaskPart(NamedTuple):
    """What one task does."""

    name: str
    what: Any  # for `ClusterWork.do`


class ClusterWork(Protocol):
    """What the tasks of one queue share. It is pickled."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def encoders(self) -> Iterable[Encoder]:
        """Those whose libraries its numbers depend on."""

    def on(self, device: torch.device) -> Self:
        """Returns the work as tasks with this device do it."""

    def do(self, part: TaskPart, accelerator: Accelerator) -> Any:
        """Does one part. Raises `UserError` for a fault of a user, and `Interrupted` if it was asked to stop."""


def versions_of(work: ClusterWork) -> dict[str, str]:
    """Returns all versions that must be the same on all nodes, as the numbers of this work depend on them."""
    versions = dict[str, str]()
    for encoder in work.encoders:
        libraries = encoder.identity().get("versions")
        versions |= libraries if isinstance(libraries, dict) else {}
    return versions | {"xdm_ft": __version__, "torch": torch.__version__}


class Order(NamedTuple):
    """What a node must know of the run, besides the work, to do its parts."""

    threads: int  # of torch
    on_gpu: bool
    relative_to: str  # the folder in which relative paths of the recipe are
    setting: str  # the setting that says where `messages` is
    messages: Path  # a folder of the driver, in which each task writes its log, and GO_ON is
    versions: Mapping[str, str]
    log_level: int


@dataclass
class Tasks:
    """The tasks that do the parts of a work on a cluster. Ray begins a task again whose worker or node is lost."""

    work: ClusterWork
    threads: int  # of a task
    shared: tuple[str, Path]  # a setting, and its folder, which all nodes see
    done: Callable[[Any], None]  # takes what `ClusterWork.do` returned
    look: Callable[[], object] = lambda: None  # is called now and then

    def do(self, parts: Sequence[TaskPart]) -> None:
        """Does all parts. Raises `UserError` or `RuntimeError` if a task does.

        After a signal it raises `Interrupted`, when the tasks have saved their state.
        """
        self.settings, self.folder = self.work.recipe.cluster, self.shared[1] / f"tasks-{uuid.uuid4().hex}"
        self.running: dict[Any, TaskPart] = {}  # by the reference of the task
        self.next_look = 0.0
        self.saved = 0  # trainings that were unfinished when their tasks were asked to stop
        self.logged: dict[Path, int] = {}  # lines of each log that have been read
        self.answered = time.monotonic()  # when the head did so last
        on_gpu, level = self.settings.gpus_per_model > 0, logger.getEffectiveLevel()
        setting, versions = self.shared[0], versions_of(self.work)
        self.order = Order(self.threads, on_gpu, os.getcwd(), setting, self.folder, versions, level)
        with ray_connection(self.settings) as self.ray, deferred():
            self.folder.mkdir(parents=True)
            (self.folder / GO_ON).touch()
            self.head = str(self.ray.get_runtime_context().gcs_address)
            self.dead = {node["NodeID"] for node in self.ray.nodes() if not node["Alive"]}
            try:
                self.pickled = self.ray.put(self.ray.cloudpickle.dumps(self.work))
                self.task = self.ray.remote(max_retries=MAX_LOSSES, scheduling_strategy="SPREAD")(_task())
                for part in parts:  # Ray does as many at a time as fit, and more when nodes come
                    self.submit(part)
                while self.running and not stop_requested():
                    self.poll()
                faults = self.stop() if stop_requested() else []
            except self.ray.exceptions.RayError as error:
                problem = f"the cluster's head has died or does not answer ({_first_line(error)})"
                resume = f"{RESUME}, on a new cluster or with cluster.name=null"
                raise UserError(f"cluster.address: {self.head}: {problem}; {resume}") from error
            except BaseException:
                with suppress(self.ray.exceptions.RayError):
                    self.stop()
                raise
            finally:
                shutil.rmtree(self.folder, ignore_errors=True)
            if faults:
                raise faults[0]
            if stop_requested():
                raise Interrupted(plural(self.saved, "unfinished training") if self.saved else "")

    def submit(self, part: TaskPart) -> None:
        gpus = self.settings.gpus_per_model
        # plain values, as a node may lack this package, and then says so
        # the reference stands in a list, where Ray leaves it: a process that has kept the work fetches nothing
        arguments = [self.pickled], tuple(part), self.order._asdict()
        task = self.task.options(num_cpus=self.threads, num_gpus=gpus, name=part.name).remote(*arguments)
        self.running[task] = part

    def poll(self) -> None:
        """Waits for a moment, logs what tasks say, and takes what has ended. Raises the fault of a task."""
        ended, _ = self.ray.wait([*self.running], num_returns=len(self.running), timeout=POLL_SECONDS)
        if ended or time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + LOOK_SECONDS
            self.look_at_nodes()
            for file in self.folder.glob("*.log"):
                # a task may be in the middle of its last line, which is read at the next look
                lines = [
                    line for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
                ]
                for line in lines[self.logged.get(file, 0) :]:
                    level, node, message = json.loads(line)
                    logger.log(level, "%s: %s", node, message)
                self.logged[file] = len(lines)
            self.look()
        for task in ended:
            part = self.running.pop(task)
            try:
                kind, node, value = self.ray.get(task)
            except self.ray.exceptions.RayError as error:
                if not self.head_answers():
                    raise
                why = f"{part.name}: its task was lost {MAX_LOSSES + 1} times ({type(error).__name__})"
                raise UserError(f"{why}; nodes may lack memory (see `ray status` and Ray's log); {RESUME}") from error
            if kind == "refused":
                raise UserError(*value)
            if kind == "failed":
                print_error(value)
                raise RuntimeError(f"a task on node {node} failed; its traceback is above")
            if kind == "done":
                self.done(value)
            self.saved += kind == "stopped" and value

    def head_answers(self) -> bool:
        with suppress(OSError):
            socket.create_connection(split_address(self.head), CONNECT_SECONDS).close()
            return True
        return False

    def look_at_nodes(self) -> None:
        """Logs which nodes have died. Raises `RayError` if the head has, before Ray ends this process."""
        if not self.head_answers():
            if time.monotonic() - self.answered > HEAD_SECONDS:
                raise self.ray.exceptions.RayError("no connection")
            return  # a question to it would block
        self.answered = time.monotonic()
        for node in self.ray.nodes():
            if not node["Alive"] and node["NodeID"] not in self.dead:
                self.dead.add(node["NodeID"])
                name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
                logger.warning("node %s was lost; what it did is done again", name)

    def stop(self) -> list[Exception]:
        """Lets the tasks that have begun save their state. Returns the faults of tasks that end by one meanwhile.

        The others have nothing to save, and end with the connection. Tasks are not cancelled: Ray 2.60 aborts this
        process if that meets a task that a node gets or ends just then ("Tried to complete task that was not pending").
        """
        begun = {task for task, part in self.running.items() if (self.folder / f"{part.name}.log").exists()}
        with suppress(OSError):  # the shared disk has failed: what began is lost
            (self.folder / GO_ON).unlink(missing_ok=True)
        faults, until = list[Exception](), time.monotonic() + STOP_SECONDS
        while begun & self.running.keys() and time.monotonic() < until:
            try:
                self.poll()
            except (UserError, RuntimeError) as error:  # the others still save
                faults.append(error)
        return faults


def _task() -> Callable[..., tuple[str, str, Any]]:
    """Returns the function that a node runs, which is sent as it stands here: a node may lack this package."""

    def do(work: list[Any], part: tuple[str, Any], order: dict[str, Any]) -> tuple[str, str, Any]:
        import ray

        node = f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"
        try:
            from xdm_ft.experiment import cluster
        except ImportError as error:
            why = f"node {node}: xdm_ft cannot be imported ({error}); install the version of the run on all nodes"
            return "refused", node, (why,)
        fetch = lambda: ray.get(work[0])  # noqa: E731
        kind, value = cluster.do_task(fetch, work[0].hex(), node, cluster.TaskPart(*part), cluster.Order(**order))
        return kind, node, value

    return do


def do_task(
    fetch_work: Callable[[], bytes], work_name: str, node: str, part: TaskPart, order: Order
) -> tuple[str, Any]:
    """Does a part in a process of a node. `work_name` stands for the pickled work that `fetch_work` returns.

    Returns how it ended, and what comes of it: `done` and the value of `ClusterWork.do`; `stopped` on request, and
    whether work was saved; `refused` for a fault of a user, and the lines; `failed`, and the traceback.
    """
    request_stop(False)  # an earlier task of this process was asked to stop
    handlers = list[logging.Handler]()
    try:
        if not order.messages.exists():
            raise UserError(
                f"{order.setting}: {order.messages.parent} is another folder here than in the run; put it on a disk "
                "that all nodes share"
            )
        handlers.append(logging.FileHandler(order.messages / f"{part.name}.log"))
        handlers[0].format = lambda record: json.dumps([record.levelno, node, record.getMessage()])  # type: ignore[method-assign]
        logger.addHandler(handlers[0])
        logger.setLevel(order.log_level)
        work, accelerator = _load_work(fetch_work, work_name, order)
        torch.set_num_threads(order.threads)
        with _stopping_without(order.messages / GO_ON):
            return "done", work.do(part, accelerator)
    except UserError as error:
        return "refused", tuple(f"node {node}: {line}" for line in error.args)
    except Interrupted as stop:
        return "stopped", bool(stop.saved)
    except Exception:
        return "failed", traceback.format_exc()
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


@contextmanager
def _stopping_without(file: Path) -> Iterator[None]:
    """Context whose work is asked to stop, as by a signal, when the file is removed."""
    ended = threading.Event()

    def watch() -> None:
        while True:
            try:
                # opened: whether a name exists, a shared disk may remember for a minute
                file.open("rb").close()
            except FileNotFoundError:
                return request_stop()
            except OSError:  # a disk that does not answer for a moment
                pass
            if ended.wait(WATCH_SECONDS):
                return

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()  # it must not stop the next task of this process


_kept: tuple[str, ClusterWork, Accelerator] | None = None  # of the last task of this process


def _load_work(fetch_work: Callable[[], bytes], name: str, order: Order) -> tuple[ClusterWork, Accelerator]:
    """Returns the work on this process's device. Raises `UserError` if this node cannot do it."""
    global _kept

    def require(versions: Mapping[str, str]) -> None:
        for program, version in versions.items():
            if version != order.versions[program]:
                raise UserError(
                    f"{program} is {version} here and {order.versions[program]} in the run; install the same everywhere"
                )

    require({"xdm_ft": __version__, "torch": torch.__version__})  # another version cannot unpickle the work
    try:
        os.chdir(order.relative_to)
    except OSError as error:
        raise UserError(
            f"{order.relative_to}: {error.strerror}; start the run in a folder that all nodes see, because the "
            "recipe's paths are relative to it"
        ) from error
    for variable in LAUNCHERS:
        os.environ.pop(variable, None)
    # a task on the CPU may see GPUs of its node, which belong to other tasks
    os.environ["ACCELERATE_USE_CPU"] = "false" if order.on_gpu else "true"
    # tasks share memory and cores as the processes of a launcher do
    os.environ["LOCAL_WORLD_SIZE"] = str(max(1, cores() // order.threads))
    if _kept is None or _kept[0] != name:
        _kept = None  # first, as both may not fit
        pickled = fetch_work()
        try:
            work: ClusterWork = pickle.loads(pickled)
        except OSError as error:  # data in files that are opened here
            raise UserError(f"data: {error}; all nodes must see the run's data under the same paths") from error
        require(versions_of(work))
        accelerator = start(work.recipe)
        _kept = name, work.on(accelerator.device), accelerator
    return _kept[1], _kept[2]


class Extracting(NamedTuple):
    """The `ClusterWork` of tasks that extract features. `TaskPart.what`: numbers of the store's images."""

    recipe: Recipe
    extraction: Extraction
    size: int  # of a shard

    @property
    def encoders(self) -> tuple[Encoder, ...]:
        return (self.extraction.encoder,)

    def on(self, device: torch.device) -> Extracting:
        encoder = frozen_copy(self.extraction.encoder, self.extraction.settings.precision, device)
        return self._replace(extraction=replace(self.extraction, encoder=encoder, device=device))

    def do(self, part: TaskPart, accelerator: Accelerator) -> list[str]:
        """Returns the name of the shard with these images."""
        shard = self.extraction.part(part.what)
        differs = shard.hashes.changed_file(shard.rows.tolist())
        if differs is not None:  # before it is opened, as a file that is not here would count as a broken image
            raise UserError(
                f"{differs}: this file is missing here, or changed after it was hashed; all nodes must see the "
                "same data under the same path"
            )
        shard.run(shard.store.missing(), self.size, _UntilStopped("", None, ""))
        return [written.path.name for written in shard.store.shards]


class _UntilStopped(Progress):
    """Raises `Interrupted` after a batch if this task is asked to stop."""

    def advance(self, n: int = 1, note: str = "") -> None:
        if stop_requested():
            raise Interrupted


def extraction_on(recipe: Recipe) -> RemoteExtraction | None:
    """Returns where the recipe's features are computed; None: in the process that needs them."""
    if recipe.cluster.name is None:
        return None

    def run(extraction: Extraction, images: np.ndarray, size: int, bar: Progress) -> int:
        """Computes these images in tasks, `size` in a shard. Returns how many they have computed."""
        threads, store, arrived = recipe.cluster.cpus_per_model, extraction.store, 0
        shards = [images[first : first + size] for first in range(0, len(images), size)]
        parts = [TaskPart(f"{store.what.split()[0]}-{number}", numbers) for number, numbers in enumerate(shards)]

        def look() -> int:
            nonlocal arrived
            store.missing()  # opens new shards
            before, arrived = arrived, int((store.shard_of[images] >= 0).sum())
            bar.advance(arrived - before)
            return arrived

        work, shared = Extracting(recipe, extraction, size), ("features.dir", store.cache)
        Tasks(work, threads, shared, done=store.open, look=look).do(parts)
        return look()

    return RemoteExtraction(device_of(recipe.cluster, torch.device("cpu")), run)
