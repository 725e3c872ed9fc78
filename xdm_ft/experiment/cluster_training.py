"""A task that trains one piece on some node of a cluster: a model end to end, or a chunk of heads.

It has a folder of its own instead of the run directory, for as long as it runs.
"""

from __future__ import annotations

import dataclasses
import mmap
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xdm_ft.encoders import Encoder
from xdm_ft.experiment.cluster_task import Post
from xdm_ft.experiment.pieces import Engines, Model, Piece
from xdm_ft.experiment.plan import Plan
from xdm_ft.experiment.prepare import Prepared, build_encoder
from xdm_ft.experiment.results import Outcome
from xdm_ft.experiment.work import SLOT, Overall
from xdm_ft.features.key import weights_digest
from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.checkpoint import Checkpoint, State
from xdm_ft.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from accelerate import Accelerator


class Scalars(NamedTuple):
    """The arguments of `RunDirectory.write_scalars`."""

    sub_run: str
    step: int
    values: dict[str, float]


class File(NamedTuple):
    """A file of the task's folder, for the run directory."""

    relative: str
    content: bytes


class PieceToTrain(NamedTuple):
    """What one task is to do."""

    number: int  # in `Training.pieces`
    checkpoint: bytes | None  # the file to resume from


class Training(NamedTuple):
    """The `Work` of tasks that train."""

    plan: Plan
    prepared: Prepared
    pieces: Sequence[Piece]
    measure: Callable[[Engines, Model], Outcome]

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe

    @property
    def encoders(self) -> Iterator[Encoder]:
        return (own.encoder for own in self.prepared.encoders.values())

    def on(self, device: torch.device) -> Training:
        return self._replace(prepared=_on_device(self.prepared, device))

    def do(self, part: PieceToTrain, post: Post, accelerator: Accelerator) -> None:
        with tempfile.TemporaryDirectory(prefix="xdm-ft-task-") as scratch:
            piece, directory = self.pieces[part.number], _TaskDirectory(Path(scratch), post)
            if part.checkpoint is not None:
                directory.write_bytes(directory.checkpoint_file(piece.name), part.checkpoint)
            engines = Engines(self.plan, self.prepared, directory, accelerator)
            _require_inputs(engines, piece)
            overall = Overall(piece.note, piece.cost, 0, mmap.mmap(-1, SLOT.itemsize), 0, None)
            with post.beating(lambda: [overall.counts]):
                for models in engines.train_piece(piece, overall):
                    post.send([_alone(self.measure(engines, model)) for model in models])
            for trace in directory.path.glob("profiles/*"):
                post.send(File(str(trace.relative_to(directory.path)), trace.read_bytes()))
            post.send(overall.counts)


def _on_device(prepared: Prepared, device: torch.device) -> Prepared:
    found = {}
    for label, own in prepared.encoders.items():
        activations = {cut: None if cached is None else cached.to(device) for cut, cached in own.activations.items()}
        features = None if own.features is None else own.features.to(device)
        found[label] = dataclasses.replace(own, features=features, activations=activations)
    return dataclasses.replace(prepared, encoders=found)


_seen: set[tuple[str, str | None]] = set()  # (key of data, label of encoder) that this process has checked


def _require_inputs(engines: Engines, piece: Piece) -> None:
    """Raises `UserError` if this node does not see the images and weights that a training end to end reads."""
    plan, item = engines.plan, piece.request.item
    known = (engines.prepared.content, item.encoder_label)
    if not plan.recipe.trains_on_images(item) or known in _seen:
        return
    dataset = plan.dataset
    for domain, name in enumerate(dataset.domain_names):
        rows = [row for row in (dataset.domains == domain).nonzero()[0] if row not in engines.prepared.unreadable]
        try:
            if rows:
                dataset.image(int(rows[0]))
        except (UserError, OSError) as error:
            raise UserError(f"data: an image of {name} is unreadable ({error}); all nodes must see the data") from error
    if not item.is_cut:
        encoder = build_encoder(item.encoder, plan.recipe.protocol.seeds[0])
        if weights_digest(encoder) != engines.prepared.of(item).weights:
            raise UserError("encoder: its weights here are not those of the run; put the same file on all nodes")
    _seen.add(known)


def _alone(outcome: Outcome) -> Outcome:
    """Returns the outcome with tensors of their own: those of a head may be a part of all heads' memory."""
    weights = {
        file: ({name: tensor.clone() for name, tensor in state.items()}, metadata)
        for file, (state, metadata) in outcome.weights.items()
    }
    return dataclasses.replace(outcome, weights=weights)


class _TaskDirectory(RunDirectory):
    """A folder that stands for the run directory: what is written there goes to the driver, too."""

    def __init__(self, path: Path, post: Post) -> None:
        super().__init__(path)
        self._post = post

    def checkpoint(self, name: str, about: Mapping[str, Any], writes: bool = True) -> Checkpoint:
        file = self.checkpoint_file(name)
        return _SentCheckpoint(self._post, file, self.path / file, about, self._pace, writes)

    def write_scalars(self, sub_run: str, step: int, values: Mapping[str, float]) -> None:
        self._post.add(Scalars(sub_run, step, dict(values)))


class _SentCheckpoint(Checkpoint):
    def __init__(self, post: Post, relative: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._post, self._relative = post, relative

    def save(self, state: Callable[[], State]) -> None:
        started = time.monotonic()
        super().save(state)
        self._post.send(File(self._relative, self.path.read_bytes()))
        self.pace.saved(time.monotonic() - started)
