"""Metrics of predictions, intervals around differences, and the summary of a run's results.

Here: the entries of results.json, one per trained model (`Record`), one per method and selection rule (`SummaryRow`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from xdm_ft.runtime.tensors import Score
from xdm_ft.storage.names import model_folder, parts_of

Status = Literal["ok", "failed", "skipped"]
Point = dict[str, float | None]


class ModelKey(NamedTuple):
    """What identifies a model of a run: "erm, sketch held out, seed 0"."""

    method: str  # its label; under several encoders METHOD @ ENCODER (`with_encoder`)
    test_domains: tuple[str, ...]
    seed: int
    trial: int

    @property
    def folder(self) -> str:
        """The folder, relative to the run directory, of a model that has files of its own."""
        return model_folder(*self)

    def __str__(self) -> str:
        trial = f", trial {self.trial}" if self.trial else ""
        return f"{self.method}, {', '.join(self.test_domains)} held out, seed {self.seed}{trial}"


class OfModel:
    """What belongs to one model of a run, and has its key."""

    key: ModelKey

    @property
    def method(self) -> str:
        return self.key.method

    @property
    def test_domains(self) -> tuple[str, ...]:
        return self.key.test_domains

    @property
    def seed(self) -> int:
        return self.key.seed

    @property
    def trial(self) -> int:
        return self.key.trial


@dataclass(frozen=True)
class Pick:
    """The step that one selection rule picked, and the metrics of its weights."""

    step: int  # number of steps taken; for a solver, the index of the candidate
    weights: str  # address of the weights in the run directory (`storage.names`)
    metrics: dict[str, Score]  # {split: metrics}
    hparams: dict[str, float] = field(default_factory=dict)  # l2 of a solver, averaged steps, alpha, …
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

    @property
    def folder(self) -> str:
        """The folder of the model in the run directory, or what stands for it."""
        weights = [pick.weights for pick in self.selected.values()]
        shared = (address.rpartition("/")[0] for address in weights if parts_of(address)[1] is not None)
        return next(shared, self.key.folder)

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


@dataclass(frozen=True)
class SummaryRow:
    """One method under one selection rule: an entry of `summary` in results.json.

    Held-out domains are averaged within a seed first.
    """

    # not written if None
    _OPTIONAL: ClassVar = {"spread_as_published", "failed", "skipped", "reason", "flags"}

    method: str
    selection: str
    metric: str
    split: str
    mean: float | None  # over complete seeds; None if there is none
    std: float | None  # over seeds, ddof 1
    stderr: float | None  # std / √n
    n: int  # number of complete seeds: those with a value for every held-out domain
    spread_as_published: dict[str, Any] | None  # {"kind", "value"} as the data set's benchmark prints it
    per_test_domain: dict[str, Point]  # {name: {"mean", "std"}}
    versus_erm: dict[str, Any] | None  # difference to its reference; None for a reference
    protocol: str  # one line: data, split, selection and metric behind the numbers
    budget: dict[str, Any]  # {"draws", "gradient_evaluations": {"low", "high"} | None}
    failed: int | None = None  # number of failed models
    skipped: int | None = None  # number of skipped models
    reason: str | None = None  # why models failed, were skipped or are missing
    flags: list[str] | None = None  # reasons to doubt its picks
    augmentation: str = field(kw_only=True)  # of the images that its models train on
    encoder: str = field(kw_only=True)  # its label, else its model
    trainable: bool | dict[str, Any] = field(kw_only=True)  # how much of the encoder trains, as in a recipe

    def to_json(self) -> dict[str, Any]:
        first = {"method": self.method, "encoder": self.encoder, "trainable": self.trainable}
        return {name: v for name, v in (first | vars(self)).items() if v is not None or name not in self._OPTIONAL}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> SummaryRow:
        return cls(**{"spread_as_published": None} | dict(entry))

    def flat(self) -> dict[str, Any]:
        """Returns the row as a flat dict; nested values get keys such as `mean:DOMAIN` and `versus_erm:p`."""
        row = {name: value for name, value in self.to_json().items() if not isinstance(value, dict | list)}
        row.pop("versus_erm", None)  # null where ERM itself is the row; its values follow
        for domain, values in self.per_test_domain.items():
            row |= {f"{name}:{domain}": value for name, value in values.items()}
        versus, names = self.versus_erm or {}, ("reference", "difference", "p", "p_holm", "verdict")
        row |= {f"versus_erm:{name}": versus.get(name) for name in names}
        return row | {"draws": self.budget["draws"], "flags": "; ".join(self.flags or ())}


def _score(values: Mapping[str, Any]) -> Score:
    """Names of classes and domains are kept in memory once for all models."""
    interned = {
        key: {sys.intern(name): value for name, value in values[key].items()}
        for key in ("per_class_recall", "per_domain")
    }
    return Score(**{**values, **interned})


def _present(entry: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(entry, name)) is not None}


SPLIT = "test"

Held = tuple[str, ...]
"""Held-out domains of one model: one, or several (`protocol.together`, official split), whose images count as one."""


@dataclass(frozen=True)
class Runs:
    """The records of one method; values are those of one selection rule and metric."""

    method: str
    rule: str
    metric: str
    held_out: tuple[Held, ...]  # all held-out sets of the experiment, in order
    records: tuple[Record, ...]
    deterministic: bool = False  # whether all seeds would give the same model

    def value(self, record: Record) -> float | None:
        score = self.score(record)
        return None if score is None else getattr(score, self.metric)

    def score(self, record: Record) -> Score | None:
        """The picked weights' metrics on the test images; None if the rule picked none."""
        pick = record.selected.get(self.rule)
        return pick.metrics[SPLIT] if record.status == "ok" and pick is not None else None

    @property
    def planned_seeds(self) -> list[int]:
        return sorted({record.seed for record in self.records})

    @property
    def values(self) -> dict[tuple[Held, int], float]:
        """{(held-out domains, seed): metric} of the records that have a value."""
        return {(r.test_domains, r.seed): value for r in self.records if (value := self.value(r)) is not None}

    @property
    def complete_seeds(self) -> list[int]:
        """The seeds that have a value for every held-out set; only they enter means."""
        values = self.values
        # a mean over the sets that are there would gain from a model that failed on the hardest one
        return [seed for seed in self.planned_seeds if all((held, seed) in values for held in self.held_out)]


def set_name(held: Held) -> str:
    """The name of a set of held-out domains, as the summary's columns have it."""
    return " + ".join(held)


def sets_noun(held_out: Collection[Held]) -> str:
    """Returns what several held-out sets are called after their number."""
    return "held-out domains" if all(len(held) == 1 for held in held_out) else "held-out sets of domains"


def runs_by_method(
    records: Sequence[Record], methods: Sequence[str], rule: str, metric: str, deterministic: Collection[str] = ()
) -> dict[str, Runs]:
    """Returns {method: its records}, in the order of `methods`; methods without a record are left out."""
    held_out = tuple(dict.fromkeys(record.test_domains for record in records))
    by_method = {method: tuple(record for record in records if record.method == method) for method in methods}
    return {m: Runs(m, rule, metric, held_out, of_m, m in deterministic) for m, of_m in by_method.items() if of_m}


SEPARATOR = " @ "


def split_label(label: str, encoders: Collection[str]) -> tuple[str, str | None]:
    """Returns (METHOD, ENCODER) of the label of a row; the encoder is None if none of `encoders` stands in it.

    A method's own label may hold the separator, and so may an encoder's: the longest encoder that fits is returned.
    """
    fitting = [name for name in encoders if label.endswith(f"{SEPARATOR}{name}")]
    if not fitting:
        return label, None
    encoder = max(fitting, key=len)
    return label.removesuffix(f"{SEPARATOR}{encoder}"), encoder


def with_encoder(label: str, encoder: str) -> str:
    """Returns the label in results of a method under one of several encoders."""
    return f"{label}{SEPARATOR}{encoder}"
