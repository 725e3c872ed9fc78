"""Probabilities → the rows of `xdm-ft predict`: which columns there are, and what is in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from xdm_ft.export.inference import Batch
from xdm_ft.export.model import Model
from xdm_ft.export.parts import probabilities
from xdm_ft.runtime.errors import UserError

Row = list[str | float | bool | int | None]
OF_CLASS = "p:"  # prefix of the columns of probabilities: a class may have the name of another column


@dataclass(frozen=True)
class Columns:
    """The columns besides path (or group), label and probability."""

    probabilities: bool = False  # one column per class
    entropy: bool = False  # of the probabilities, in nats
    spread: bool = False  # standard deviation, over an ensemble's heads, of the probability of the label
    top_k: int | None = None  # the K most probable classes
    distance: bool = False  # from the training images, and the percentage of unseen images that are nearer
    abstain_below: float | None = None  # no label if its probability is lower

    def refuse(self, model: Model, grouped: bool) -> None:
        """Raises `UserError` for columns that can not be computed."""
        classes = len(model.class_names)
        if self.top_k is not None and not 2 <= self.top_k <= classes:
            raise UserError(f"--top-k: {self.top_k} is not in 2…{classes}, the number of classes")
        if self.abstain_below is not None and not 0 < self.abstain_below <= 1:
            raise UserError(
                f"--abstain-below: {self.abstain_below} is not a probability above 0; give 0.5, for example"
            )
        if self.spread and not len(model.module.members):
            raise UserError(
                "--spread: the model has a single head; export several ones (xdm-ft export --ensemble), or leave it out"
            )
        if self.distance:
            model.reference_for("--distance")
        if self.spread and grouped:
            raise UserError("--spread: is of single images; leave out --spread or --group-by")

    def types(self, class_names: Sequence[str], grouped: bool) -> dict[str, type]:
        """Returns {column: type of its cells}, in order."""
        found: dict[str, type] = {"group" if grouped else "path": str, "label": str, "probability": float}
        for place in range(1, 1 + (self.top_k or 0)):
            found |= {f"label_{place}": str, f"probability_{place}": float}
        found |= {"entropy": float} if self.entropy else {}
        found |= {"spread": float} if self.spread else {}
        found |= {"distance": float, "distance_percentile": float} if self.distance else {}
        found |= {"abstained": bool} if self.abstain_below is not None else {}
        found |= {f"{OF_CLASS}{name}": float for name in class_names} if self.probabilities else {}
        return found | ({"images": int} if grouped else {}) | {"error": str}

    def rows(
        self,
        class_names: Sequence[str],
        names: Sequence[str],
        p: np.ndarray,
        spread: np.ndarray | None = None,
        distances: np.ndarray | None = None,
    ) -> Iterator[Row]:
        """Yields a row per name, without the number of images of a group, and without the error.

        `p`: float32 [n,C]; `spread`: [n]; `distances`: [n,2], with their percentiles.
        """
        top = np.argsort(-p, axis=1, kind="stable")[:, : self.top_k or 1]
        of_top, every = _decimals(np.take_along_axis(p, top, 1)), _decimals(p) if self.probabilities else None
        entropies, spreads = _decimals(entropy(p)), None if spread is None else _decimals(spread)
        far = None if distances is None else _decimals(distances)
        for i, name in enumerate(names):
            label, probability = class_names[top[i, 0]], of_top[i][0]
            # compared as it is printed
            abstained = self.abstain_below is not None and probability < self.abstain_below
            row: Row = [name, None if abstained else label, probability]
            if self.top_k:
                row += [cell for place, q in zip(top[i], of_top[i], strict=True) for cell in (class_names[place], q)]
            row += [entropies[i]] if self.entropy else []
            row += [] if spreads is None else [spreads[i]]
            row += [] if far is None else far[i]
            row += [abstained] if self.abstain_below is not None else []
            yield row if every is None else row + every[i]


def entropy(p: np.ndarray) -> np.ndarray:
    """Entropy −Σ p ln p of probabilities [n,C], float32 [n], in nats."""
    wide = p.astype(np.float64)
    return -(wide * np.log(np.where(wide > 0, wide, 1))).sum(1).astype(np.float32) + 0.0  # no −0


def spread_of(members: Tensor, p: Tensor, temperature: float) -> Tensor:
    """Standard deviation (S − 1) over the heads of the probability of the label: float32 [n].

    `members`: logits [S,n,C] of the heads. `p`: probabilities [n,C] of the ensemble.
    """
    own = (members.double() / temperature).softmax(-1)  # [S,n,C]
    of_label = own.gather(2, p.argmax(1)[None, :, None].expand(len(own), -1, 1))[..., 0]  # [S,n]
    return of_label.std(0).float()


class GroupMeans:
    """The means of the values of each group's images. Memory grows with the number of groups alone."""

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}  # float64 [C], or [C + 2] with the distance and its percentile
        self._images: dict[str, int] = {}  # that were predicted; in the order in which the groups came
        self._errors: dict[str, tuple[int, str]] = {}  # number of the others, the first of them and why

    def __len__(self) -> int:
        return len(self._images)

    def add_all(self, rows: Iterable[Row]) -> None:
        """Adds images, as `group_rows` yields them."""
        for path, group, *values, reason in rows:
            name = str(group)
            self._images.setdefault(name, 0)
            if reason is None:
                wide = np.asarray(values, np.float32).astype(np.float64)
                self._sums[name] = self._sums[name] + wide if name in self._sums else wide
                self._images[name] += 1
            else:
                count, first = self._errors.get(name, (0, f"{path}: {reason}"))
                self._errors[name] = count + 1, first

    def rows(self, columns: Columns, class_names: Sequence[str], at_once: int = 1024) -> Iterator[Row]:
        """Yields a row per group, in the order in which the groups came."""
        groups = iter(self._images)
        while some := list(islice(groups, at_once)):
            rows = self._predicted([group for group in some if self._images[group]], columns, class_names)
            for group in some:
                images, (errors, first) = self._images[group], self._errors.get(group, (0, ""))
                row = next(rows) if images else [group, *_empty(columns, class_names, grouped=True)]
                yield [*row, images, f"{errors} of {images + errors} images: {first}" if errors else None]

    def _predicted(self, groups: list[str], columns: Columns, class_names: Sequence[str]) -> Iterator[Row]:
        if groups:
            means = np.stack([self._sums[group] / self._images[group] for group in groups]).astype(np.float32)
            p, distances = np.split(means, [len(class_names)], axis=1)
            yield from columns.rows(class_names, groups, p, distances=distances if columns.distance else None)


def _empty(columns: Columns, class_names: Sequence[str], grouped: bool) -> Row:
    """Returns the cells of `Columns.rows` behind the name, where nothing was predicted."""
    return [None] * (len(columns.types(class_names, grouped)) - (3 if grouped else 2))


def image_rows(columns: Columns, model: Model, batch: Batch) -> Iterator[Row]:
    """Yields the rows of images. Of an image without a prediction all cells but the path and the error are empty."""
    kept = [place for place in range(len(batch.items)) if place not in batch.unreadable]
    p, spread = probabilities(batch.logits[kept]), None
    if columns.spread and batch.members is not None:
        spread = spread_of(batch.members[:, kept], p, model.config.temperature).numpy()
    names, distances = [batch.items[place].path for place in kept], _distances(columns, model, batch.encoded[kept])
    rows = columns.rows(model.class_names, names, p.numpy(), spread, distances)
    empty = _empty(columns, model.class_names, grouped=False)
    for place, item in enumerate(batch.items):
        reason = batch.unreadable.get(place)
        yield [*next(rows), None] if reason is None else [item.path, *empty, reason]


def group_rows(columns: Columns, model: Model, batch: Batch) -> Iterator[Row]:
    """Yields what `GroupMeans.add_all` takes of each image: path, group, every probability, the distance and its
    percentile if they are wanted, and None; or path, group, and why it has no prediction."""
    kept = [place for place in range(len(batch.items)) if place not in batch.unreadable]
    values, distances = probabilities(batch.logits[kept]).numpy(), _distances(columns, model, batch.encoded[kept])
    rows = iter(_decimals(values if distances is None else np.concatenate([values, distances], 1)))
    for place, item in enumerate(batch.items):
        reason = batch.unreadable.get(place)
        yield [item.path, item.group, *(next(rows) if reason is None else []), reason]


def _distances(columns: Columns, model: Model, encoded: Tensor) -> np.ndarray | None:
    """Returns distances from the training images and their percentiles, float32 [n,2], if they are wanted."""
    if not columns.distance:
        return None
    reference = model.reference_for("--distance")
    distances = reference.distance(encoded.numpy())
    return np.stack([distances, reference.percentile(distances)], 1)


def _decimals(values: np.ndarray) -> list[Any]:
    """Returns float32 values as the shortest decimals that are read as the same float32: 0.1, not 0.10000000149."""
    return np.asarray(values, np.float32).astype("U").astype(np.float64).tolist()
