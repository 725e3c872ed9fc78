"""The entries of results.json: one per trained model (`Record`), one per method and selection rule (`SummaryRow`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from xdm_ft.tensors import Score

Identity = tuple[str, tuple[str, ...], int, int]
"""Of a model in results: method, test domains, seed, trial."""
Status = Literal["ok", "failed", "skipped"]
Point = dict[str, float | None]


@dataclass(frozen=True)
class Pick:
    """The step that one selection rule picked, and what its weights are worth."""

    step: int  # number of steps taken; of a solver, the candidate's place on its path
    weights: str  # their file, relative to the run directory
    metrics: dict[str, Score]  # by split
    hparams: dict[str, float] = field(default_factory=dict)  # what a solver varied, how weights were averaged, …
    curve: list[Point] | None = None  # what was varied after training, and the metric by split (None: not defined)
    flags: list[str] | None = None  # what makes the pick doubtful
    value: float | None = None  # what the rule saw of it

    def to_json(self) -> dict[str, Any]:
        metrics = {split: dataclasses.asdict(score) for split, score in self.metrics.items()}
        start = {"step": self.step, **self.hparams, "weights": self.weights, "metrics": metrics}
        return start | _present(curve=self.curve, flags=self.flags, value=self.value)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Pick:
        own = {one.name for one in dataclasses.fields(cls)} - {"hparams"}
        hparams = {key: value for key, value in found.items() if key not in own}
        metrics = {split: Score(**values) for split, values in found["metrics"].items()}
        rest = {key: value for key, value in found.items() if key in own}
        return cls(**(rest | {"metrics": metrics, "hparams": hparams}))


@dataclass(frozen=True)
class Record:
    """One model: R of results.json."""

    method: str
    test_domains: tuple[str, ...]
    seed: int
    trial: int
    hparams: dict[str, Any]
    status: Status
    reason: str | None = None  # why it failed, or was skipped
    selected: dict[str, Pick] = field(default_factory=dict)  # by selection rule
    mixed_steps: int | None = None  # steps that used augmented features
    gradient_evaluations: int | None = None
    stopped_at: int | None = None  # steps after which patience ended
    train_seconds: float | None = None
    restarted: dict[str, Any] | None = None  # {"times", "reasons"}: a training that started again

    @property
    def key(self) -> Identity:
        return self.method, self.test_domains, self.seed, self.trial

    def to_json(self) -> dict[str, Any]:
        start = {name: getattr(self, name) for name in ("method", "seed", "trial", "hparams", "status")}
        start = {"method": self.method, "test_domains": list(self.test_domains)} | start
        reason, selected = _present(reason=self.reason), {rule: pick.to_json() for rule, pick in self.selected.items()}
        if self.status == "skipped":
            return start | reason | {"selected": selected}
        measured = ("mixed_steps", "gradient_evaluations", "stopped_at", "train_seconds", "restarted")
        return start | {"selected": selected} | _present(**{n: getattr(self, n) for n in measured}) | reason

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Record:
        selected = {rule: Pick.from_json(pick) for rule, pick in found["selected"].items()}
        return cls(**{**found, "test_domains": tuple(found["test_domains"]), "selected": selected})


@dataclass(frozen=True)
class SummaryRow:
    """One method under one selection rule: S of results.json. Held-out domains are averaged within a seed."""

    _OPTIONAL: ClassVar = {"spread_as_published", "failed", "skipped", "reason", "flags"}  # left out where None

    method: str
    selection: str
    metric: str
    split: str
    mean: float | None  # over seeds; None without a complete one
    std: float | None  # over seeds, ddof 1
    stderr: float | None  # std / √n
    n: int  # complete seeds
    spread_as_published: dict[str, Any] | None  # {"kind", "value"} as the data set's benchmark prints it
    per_test_domain: dict[str, Point]  # {name: {"mean", "std"}}
    versus_erm: dict[str, Any] | None
    protocol: str  # one line: what the numbers mean
    budget: dict[str, Any]  # {"draws", "gradient_evaluations": {"low", "high"} | None}
    failed: int | None = None  # records
    skipped: int | None = None
    reason: str | None = None  # what did not go as planned
    flags: list[str] | None = None  # what makes its picks doubtful

    def to_json(self) -> dict[str, Any]:
        row = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {name: value for name, value in row.items() if value is not None or name not in self._OPTIONAL}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> SummaryRow:
        return cls(**({"spread_as_published": None} | dict(found)))

    def flat(self) -> dict[str, Any]:
        """The row as one line of a table: `mean:DOMAIN` and `std:DOMAIN` by held-out domain, `versus_erm:…`."""
        row = {name: value for name, value in self.to_json().items() if not isinstance(value, dict | list)}
        for domain, values in self.per_test_domain.items():
            row |= {f"{name}:{domain}": value for name, value in values.items()}
        versus = self.versus_erm or {}
        row |= {f"versus_erm:{name}": versus.get(name) for name in ("difference", "p", "p_holm", "verdict")}
        return row | {"draws": self.budget["draws"], "flags": "; ".join(self.flags or ())}


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
