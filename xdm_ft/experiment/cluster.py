"""Training on a cluster: every piece is a task, and this process alone writes the run directory.

A piece whose worker or node died is done again, from the last checkpoint that arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from xdm_ft.experiment.cluster_connection import connected
from xdm_ft.experiment.cluster_queue import Attempt, Part, Queue
from xdm_ft.experiment.cluster_task import Begun
from xdm_ft.experiment.cluster_training import File, PieceToTrain, Scalars, Training
from xdm_ft.experiment.pieces import Engines, Model, Piece
from xdm_ft.experiment.results import Outcome, ResultsFile
from xdm_ft.experiment.work import Counts, Overall
from xdm_ft.recipe.settings import Cluster


def train_on_cluster(
    engines: Engines,
    pieces: Sequence[Piece],
    measure: Callable[[Engines, Model], Outcome],
    results: ResultsFile,
    bar: Overall,
) -> None:
    """Trains all pieces in tasks, and saves the outcomes that `measure` returns there for their wanted models.

    Raises `UserError` or `RuntimeError` if a task does, and `Interrupted`, when the others have saved their state.
    """
    with connected(engines.plan.recipe.cluster) as ray:
        queue = _Pieces(ray, engines, pieces, measure, results, bar)
        with bar.watched():
            queue.run()


class _Pieces(Queue):
    def __init__(
        self,
        ray: Any,
        engines: Engines,
        pieces: Sequence[Piece],
        measure: Callable[[Engines, Model], Outcome],
        results: ResultsFile,
        bar: Overall,
    ) -> None:
        work = Training(engines.plan, engines.prepared, pieces, measure)
        settings = engines.plan.recipe.cluster
        super().__init__(ray, settings, work, len(pieces), min(_threads(piece, settings) for piece in pieces))
        self.pieces, self.directory, self.results, self.bar = pieces, engines.directory, results, bar
        self.counts: dict[int, Counts] = defaultdict(Counts)  # of the running task of each piece
        self.complete: set[int] = set()  # pieces whose outcomes are in the run directory

    def part(self, number: int) -> Part:
        piece = self.pieces[number]
        checkpoint = self._checkpoint(piece)
        given = PieceToTrain(number, checkpoint.read_bytes() if checkpoint.exists() else None)
        return Part(piece.note, _threads(piece, self.settings), given)

    def take(self, attempt: Attempt, content: object) -> None:
        if isinstance(content, Begun):
            self.bar.add(note=f"{attempt.note} on {content.node}")
        elif isinstance(content, Counts):
            self._count(attempt, content)
        elif isinstance(content, Scalars):
            self.directory.write_scalars(*content)
        elif isinstance(content, File):
            self.directory.write_bytes(*content)
            self.losses[attempt.number] = 0
        else:
            assert isinstance(content, list), "outcomes"
            self.results.save(content, self.directory)
            self.bar.add(models=len(content))
            self.complete.add(attempt.number)

    def is_left(self, attempt: Attempt) -> bool:
        if attempt.number in self.complete:
            return False
        self._count(attempt, Counts())
        return True

    def done(self, attempt: Attempt) -> None:
        self._checkpoint(self.pieces[attempt.number]).unlink(missing_ok=True)

    @property
    def saved(self) -> str:
        saved = f"{self.stopped} unfinished trainings" if self.stopped != 1 else "1 unfinished training"
        return saved if self.stopped else ""

    def _checkpoint(self, piece: Piece) -> Path:
        return self.directory.path / self.directory.checkpoint_file(piece.name)

    def _count(self, attempt: Attempt, counts: Counts) -> None:
        before = self.counts[attempt.number]
        self.bar.add(done=counts.done - before.done, spared=counts.spared - before.spared)
        self.counts[attempt.number] = counts


def _threads(piece: Piece, settings: Cluster) -> int:
    return settings.cpus_per_model if piece.is_end_to_end else 1
