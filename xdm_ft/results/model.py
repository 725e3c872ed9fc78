"""One model of a run, typed from its measurement to results.json."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from xdm_ft.core import DomainSet, ModelKey, OfModel, Score, set_name
from xdm_ft.storage.names import parts_of

Status = Literal["ok", "failed", "skipped"]
TEST = "test"  # the split of the held-out images


Point = dict[str, float | None]


@dataclass(frozen=True)
class Pick:
    """The step that one selection rule picked, and the metrics of its weights."""

    step: int  # number of steps taken; for a solver, the index of the candidate
    weights: str  # address of the weights in the run directory (`storage.names`)
    metrics: dict[str, Score]  # {split: metrics}
    hparams: dict[str, float | None] = field(default_factory=dict)  # l2 of a solver, averaged steps, alpha, …
    curve: list[Point] | None = None  # points {varied value, metric by split (None: not defined)}
    flags: list[str] | None = None  # reasons to doubt the pick, e.g. "last step picked"
    value: float | None = None  # selection metric, as the rule compared it
    temperature: float | None = None  # of the weights that the recipe's own rule picked, if known
    validation_nll: float | None = None  # on the images of the temperature, of logits divided by it (None: by 1)

    def to_json(self) -> dict[str, Any]:
        metrics = {split: dict(vars(score)) for split, score in self.metrics.items()}
        optional = "curve", "flags", "value", "temperature", "validation_nll"
        return {
            "step": self.step,
            **self.hparams,
            "weights": self.weights,
            "metrics": metrics,
            **_present(self, optional),
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], metrics: dict[str, Score] | None = None) -> Pick:
        """`metrics`: those in `entry`, if an equal object exists already."""
        names = {field.name for field in dataclasses.fields(cls)} - {"hparams"}
        values = {name: value for name, value in entry.items() if name in names}
        values["hparams"] = {name: value for name, value in entry.items() if name not in names}
        values["metrics"] = metrics or {split: _score(score) for split, score in entry["metrics"].items()}
        return cls(**values)


@dataclass(frozen=True)
class Record(OfModel):
    """One model: an entry of `runs` in results.json."""

    key: ModelKey
    hparams: dict[str, Any]
    status: Status
    reason: str | None = None  # why it failed or was skipped
    selected: dict[str, Pick] = field(default_factory=dict, repr=False)  # {selection rule: pick}
    mixed_steps: int | None = None  # steps that used augmented features
    gradient_evaluations: int | None = None
    stopped_at: int | None = None  # number of steps after which `training.patience` stopped it
    train_seconds: float | None = None
    trained_parameters: int | None = None  # number of values that training changes
    tuned_settings: int | None = None  # settings that selection compared in this training; None: a single one
    training_features: int | None = None  # number of training images whose features the head holds; None: of none
    peak_memory: int | None = None  # bytes that its training took at most; None: not known, or models shared it
    restarted: dict[str, Any] | None = None  # {"times", "reasons"} of trainings that could not resume
    encoder: str = field(kw_only=True)  # its label, else its model
    trainable: bool | dict[str, Any] = field(kw_only=True)  # how much of the encoder trains, as in a recipe
    deterministic: bool | None = None  # True: the head is class embeddings alone, the same for all seeds
    files: dict[str, str] = field(default_factory=dict)  # {address of its tensors in the run directory: their checksum}
    fold: int | None = None  # number of its fold (`protocol.folds`), whose domains are measured one by one
    model: ModelKey | None = None  # of what `by_site` returns: the key of the model, whose fold has more domains

    @property
    def folder(self) -> str:
        """The folder of the model in the run directory, or what stands for it."""
        weights = [pick.weights for pick in self.selected.values()]
        shared = (address.rpartition("/")[0] for address in weights if parts_of(address)[1] is not None)
        return next(shared, (self.model or self.key).folder)

    @property
    def held_out(self) -> list[DomainSet]:
        """The held-out sets on which it is measured: each domain of a fold, else its test domains as one."""
        return [self.test_domains] if self.fold is None else [(name,) for name in self.test_domains]

    @property
    def held_out_name(self) -> str:
        """What its test domains are called in tables and figures of models."""
        return set_name(self.test_domains) if self.fold is None or self.model else f"fold {self.fold}"

    def at(self, held: DomainSet) -> Record:
        """Returns the record of one domain of its fold, with the metrics there."""
        picks = dict[str, Pick]()
        for rule, pick in self.selected.items():
            of_domain = pick.metrics[TEST].per_domain[held[0]]
            site = Score(**of_domain, per_domain={held[0]: of_domain})
            picks[rule] = dataclasses.replace(pick, metrics=pick.metrics | {TEST: site})
        key = self.key._replace(test_domains=held)
        return dataclasses.replace(self, key=key, model=self.key, selected=picks)

    def to_json(self) -> dict[str, Any]:
        entry = {
            "method": self.method,
            "encoder": self.encoder,
            "trainable": self.trainable,
            "test_domains": list(self.test_domains),
            "seed": self.seed,
            "trial": self.trial,
            "hparams": self.hparams,
            "status": self.status,
            **_present(self, ("fold",)),
        }
        selected: dict[str, Any] = {"selected": {rule: pick.to_json() for rule, pick in self.selected.items()}}
        selected |= {"files": self.files} if self.files else {}
        if self.status == "skipped":
            return entry | _present(self, ("deterministic", "reason")) | selected
        measured = (
            "mixed_steps", "deterministic", "gradient_evaluations", "stopped_at", "train_seconds",
            "trained_parameters", "tuned_settings", "training_features", "peak_memory", "restarted", "reason",
        )  # fmt: skip
        return entry | selected | _present(self, measured)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Record:
        selected = dict[str, Pick]()
        for rule, pick in entry["selected"].items():
            # rules often pick the same weights, and then share their metrics
            same = (
                selected[other].metrics for other in selected if entry["selected"][other]["metrics"] == pick["metrics"]
            )
            selected[rule] = Pick.from_json(pick, next(same, None))
        values = {name: value for name, value in entry.items() if name not in ModelKey._fields}
        key = ModelKey(entry["method"], tuple(entry["test_domains"]), entry["seed"], entry["trial"])
        return cls(key, **values | {"selected": selected})


def by_site(records: Iterable[Record]) -> list[Record]:
    """Returns a record for each held-out set on which a model is measured: several for a fold of whole domains."""
    return [record if record.fold is None else record.at(held) for record in records for held in record.held_out]


def held_out_of(records: Iterable[Record]) -> tuple[DomainSet, ...]:
    """Returns the held-out sets of a run, in its order; domains of folds by name."""
    fold_of = {held: record.fold for record in records for held in record.held_out}
    return tuple(sorted(fold_of) if any(fold is not None for fold in fold_of.values()) else fold_of)


class Entries(Sequence[dict[str, Any]]):
    """The `runs` of results.json: each is made from its record when it is read, as all of them take much memory."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        """Returns the entry of a record; of a slice, several."""
        records = self.records[index]
        return records.to_json() if isinstance(records, Record) else Entries(records)


def _score(values: Mapping[str, Any]) -> Score:
    """Names of classes and domains are kept in memory once for all models."""
    interned = {
        key: {sys.intern(name): value for name, value in values[key].items()}
        for key in ("per_class_recall", "per_domain")
    }
    return Score(**{**values, **interned})


def _present(entry: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(entry, name)) is not None}


_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


def group_by(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Returns {key: the items with it}; keys and items keep their order."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
