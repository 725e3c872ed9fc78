"""models.parquet: a row per trained model and selection rule, of runs with so many that their JSON is slow to read."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from xdm_ft.evaluation.records import Record
from xdm_ft.runtime.tensors import Score

if TYPE_CHECKING:
    import pyarrow

LARGE = 1000  # models
OF_MODEL = ("method", "seed", "trial", "train_seconds", "trained_parameters", "gradient_evaluations", "peak_memory")


def parquet_of(records: Iterable[Record]) -> bytes:
    """Returns the file. Columns: those of `OF_MODEL`, test_domains (joined by ", "), hparams.KEY, selection, step,
    value (by which the rule picked), weights (address), and SPLIT.METRIC as fractions."""
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(_table([*_rows(records)]), file)
    return file.getvalue()


def _rows(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    for record in records:
        start = {name: getattr(record, name) for name in OF_MODEL} | {"test_domains": ", ".join(record.test_domains)}
        start |= {f"hparams.{key}": value for key, value in record.hparams.items()}
        for rule, pick in record.selected.items():
            metrics = {f"{split}.{name}": n for split, score in pick.metrics.items() for name, n in _numbers(score)}
            yield start | {"selection": rule, "step": pick.step, "value": pick.value, "weights": pick.weights} | metrics


def _numbers(score: Score) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in vars(score).items() if isinstance(value, int | float))


def _table(rows: list[dict[str, Any]]) -> pyarrow.Table:
    import pyarrow

    names = dict.fromkeys(name for row in rows for name in row)
    return pyarrow.table({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[Any]) -> list[Any]:
    """Numbers, texts or booleans as they are; of several kinds, as settings of several methods may be, as JSON."""
    kinds = {float if type(value) is int else type(value) for value in values if value is not None}
    if kinds <= {float} or kinds <= {str} or kinds <= {bool}:
        whole = all(type(value) is int or value is None for value in values)
        return values if whole or kinds != {float} else [None if value is None else float(value) for value in values]
    return [None if value is None else json.dumps(value) for value in values]
