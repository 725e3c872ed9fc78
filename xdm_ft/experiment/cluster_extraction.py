"""Extraction on a cluster: every stretch of images is a task, which adds its features to the cache.

All nodes see the cache. This process holds the store's lock, so that no task waits for it, and no dead node holds it.
What a lost task has added stays, and the rest of its stretch is done again.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from xdm_ft.encoders import Encoder
from xdm_ft.experiment.cluster_connection import connected, device_of
from xdm_ft.experiment.cluster_queue import Attempt, Part, Queue, fitting
from xdm_ft.experiment.cluster_task import Post
from xdm_ft.features.extract import Elsewhere, Extraction, frozen_copy
from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.interrupt import Interrupted, stop_requested
from xdm_ft.runtime.progress import Progress

if TYPE_CHECKING:
    from accelerate import Accelerator

LEAST_STRETCHES = 64  # if there are so many shards, so that nodes that come meanwhile have work
STRETCHES_PER_TASK = 8  # for each task that fits, so that all of them end at about the same time
SECONDS_TO_END = 10.0  # for all tasks to write their last shards, after a signal
LOOK_SECONDS = 1.0  # between two looks for new shards


class Stretch(NamedTuple):
    """What one task is to do."""

    numbers: np.ndarray  # of the store's images
    size: int  # of a shard
    seen: Path  # a file of the driver beside the store's folder


class Written(NamedTuple):
    """The shards with the images of a stretch."""

    names: tuple[str, ...]


class Extracting(NamedTuple):
    """The `Work` of tasks that extract."""

    recipe: Recipe
    extraction: Extraction

    @property
    def encoders(self) -> tuple[Encoder, ...]:
        return (self.extraction.encoder,)

    def on(self, device: torch.device) -> Extracting:
        encoder = frozen_copy(self.extraction.encoder, self.extraction.settings.precision, device)
        return self._replace(extraction=replace(self.extraction, encoder=encoder, device=device))

    def do(self, part: Stretch, post: Post, accelerator: Accelerator) -> None:
        own = self.extraction.part(part.numbers)
        if not part.seen.exists():
            raise UserError(
                f"features.dir: {own.store.cache} is another folder here than in the run; put it on a disk that all "
                "nodes share"
            )
        differs = own.hashes.changed_file(own.rows.tolist())
        if differs is not None:  # before it is opened, as a file that is not here would count as a broken image
            raise UserError(
                f"{differs}: this file is not here, or has changed since it was hashed; all nodes must see the same "
                "data under the same path"
            )
        with post.beating():
            own.run(own.store.missing(), part.size, _UntilStopped("", None, ""))
        post.send(Written(tuple(shard.path.name for shard in own.store.shards)))


class _UntilStopped(Progress):
    """Raises `Interrupted` after a batch if this task is asked to stop."""

    def advance(self, n: int = 1, note: str = "") -> None:
        if stop_requested():
            raise Interrupted


@contextmanager
def extraction_on(recipe: Recipe) -> Iterator[Elsewhere | None]:
    """Context that yields where the recipe's features are computed; None: in the process that needs them.

    The cluster is connected when the first features are missing.
    """
    if recipe.cluster.name is None:
        yield None
        return
    with ExitStack() as stack:
        connection = functools.cache(lambda: stack.enter_context(connected(recipe.cluster)))
        device = device_of(recipe.cluster, torch.device("cpu"))
        yield Elsewhere(device, functools.partial(_extract, recipe, connection))


def _extract(
    recipe: Recipe, connection: Callable[[], Any], extraction: Extraction, images: np.ndarray, size: int, bar: Progress
) -> int:
    """Computes these images in tasks, `size` in a shard. Returns how many they have computed.

    Raises `UserError` or `RuntimeError` if a task does, and `Interrupted`.
    """
    if not len(images):
        return 0
    ray = connection()
    tasks = STRETCHES_PER_TASK * fitting(ray, recipe.cluster, recipe.cluster.cpus_per_model)
    length = size * max(1, math.ceil(len(images) / size) // max(LEAST_STRETCHES, tasks))
    parts = [images[first : first + length] for first in range(0, len(images), length)]
    stretches = [Stretch(numbers, size, extraction.store.lock_file) for numbers in parts]
    queue = _Stretches(ray, recipe, extraction, stretches, bar)
    queue.run()
    return queue.arrived


class _Stretches(Queue):
    seconds_to_end = SECONDS_TO_END

    def __init__(
        self, ray: Any, recipe: Recipe, extraction: Extraction, stretches: Sequence[Stretch], bar: Progress
    ) -> None:
        work, settings = Extracting(recipe, extraction), recipe.cluster
        super().__init__(ray, settings, work, len(stretches), settings.cpus_per_model)
        self.store, self.stretches, self.bar = extraction.store, [*stretches], bar
        self._claimed = np.concatenate([stretch.numbers for stretch in stretches])
        self.arrived, self._next = 0, 0.0

    def poll(self) -> None:
        super().poll()
        if time.monotonic() >= self._next or not self.running:
            self._look()

    def _look(self) -> np.ndarray:
        """Counts the images of tasks that have come to the cache, and returns the numbers of those that miss there."""
        missing = self.store.missing()
        before, self.arrived = self.arrived, int((self.store.shard_of[self._claimed] >= 0).sum())
        new = self.arrived - before
        if new:
            nodes = len({attempt.node for attempt in self.running.values() if attempt.node})
            self.bar.advance(new, f"on {plural(nodes, 'node')}" if nodes else "")
        self._next = time.monotonic() + LOOK_SECONDS
        return missing

    def part(self, number: int) -> Part:
        stretch = self.stretches[number]
        note = f"{self.store.what} of {plural(len(stretch.numbers), 'image')}"
        return Part(note, self.settings.cpus_per_model, stretch)

    def take(self, attempt: Attempt, content: object) -> None:
        """Features come through the cache."""
        if isinstance(content, Written):
            self.store.open(content.names)

    def is_left(self, attempt: Attempt) -> bool:
        stretch = self.stretches[attempt.number]
        left = np.intersect1d(stretch.numbers, self._look())
        if len(left) < len(stretch.numbers):
            self.losses[attempt.number] = 0
        self.stretches[attempt.number] = stretch._replace(numbers=left)
        return len(left) > 0

    def done(self, attempt: Attempt) -> None:
        """Nothing is left of it."""
