"""The models of analysis.json as sections show them, and how methods look in figures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xdm_ft.evaluation.records import ModelKey, set_name
from xdm_ft.report.charts import Look, looks
from xdm_ft.report.finished import Run, items
from xdm_ft.runtime.errors import UserError, plural

SCHEMA = 1
Model = dict[str, Any]


def method_looks(run: Run) -> dict[str, Look]:
    """Returns the look of every method, the same in all figures; methods that only have results come last."""
    return looks([*items(run.results), *(record.method for record in run.records)])


def models(run: Run, part: str = "") -> list[Model]:
    """Returns the models of analysis.json (for which `part` was measured) in the recipe's order; [] without analysis.

    A model that the run's rule does not pick is left out: since the analysis, a search has grown and found a better
    one, or the file is that of another run. Raises `UserError` if another version wrote the file.
    """
    if run.analysis is None:
        return []
    if run.analysis.get("schema") != SCHEMA:
        raise UserError(
            f"{run.path / 'analysis.json'}: has schema {run.analysis.get('schema')!r}, and this version reads "
            f"{SCHEMA}; run `xdm-ft analyse` again"
        )
    order = {label: position for position, label in enumerate(items(run.results))}
    picked = {record.key for record in run.picked}
    shown = [model for model in run.analysis["models"] if _key(model) in picked and (not part or model.get(part))]
    return sorted(shown, key=lambda model: order[model["method"]])


def not_measured(run: Run) -> list[str]:
    """Returns a note that not all models of the run are in analysis.json, if so."""
    missing = {record.key for record in run.picked} - {_key(model) for model in models(run)}
    if not missing:
        return []
    return [
        f"{len(missing)} of {plural(len(run.picked), 'model')} are not measured yet: `xdm-ft analyse` measures them"
    ]


def _key(model: Model) -> ModelKey:
    return ModelKey(model["method"], tuple(model["test_domains"]), model["seed"], model["trial"])


def by_set(models: Iterable[Model]) -> dict[tuple[str, str], list[Model]]:
    """Returns {(method, held-out set): its models, one per seed}."""
    groups: dict[tuple[str, str], list[Model]] = {}
    for model in models:
        groups.setdefault((model["method"], set_name(model["test_domains"])), []).append(model)
    return groups
