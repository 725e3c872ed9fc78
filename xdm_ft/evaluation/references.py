"""Which ERM each row of a table is compared with."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Compared(NamedTuple):
    """What decides which ERM a row is compared with."""

    label: str
    is_plain_erm: bool  # ERM without add-ons, with any class head
    encoder: str | None  # its label; None in a run of one encoder
    head: tuple[Hashable, ...]  # kind of class head, then its settings
    cut: object  # how much of the encoder trains: equal ones are the same cut; False: nothing
    augmentation: str = "none"  # of the images that it trains on


LINEAR = ("linear",)


def erm_of_each(rows: Sequence[Compared]) -> dict[str, str]:
    """Returns {label of a row: label of the ERM that it is compared with}, all under the same encoder.

    A method is compared with the plain ERM that has its class head at its cut; if there is none, with the first plain
    ERM of its class head, one of its augmentation before others. ERM itself is compared with the plain ERM that has a
    linear head on the frozen encoder, which says what more training gains; if there is none, with the first of a linear
    head. A row is left out if the recipe has no such ERM.
    """
    found = {}
    for row in rows:
        head = LINEAR if row.is_plain_erm else row.head
        erms = [one for one in rows if one.is_plain_erm and (one.encoder, one.head) == (row.encoder, head)]
        cut = False if row.is_plain_erm else row.cut
        alike = [one for one in erms if not row.is_plain_erm and one.augmentation == row.augmentation]
        reference = next(iter([*(one for one in erms if one.cut == cut), *alike, *erms]), row)
        if reference.label != row.label:
            found[row.label] = reference.label
    return found
