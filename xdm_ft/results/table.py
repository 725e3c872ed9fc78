"""A row of the table, a comparison of two rows, and a look at a growing run, typed until JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from xdm_ft.core import Interval
from xdm_ft.evaluation.estimates import Estimate
from xdm_ft.results.model import Point

BETTER = "better"
WORSE = "worse"
EQUAL = "no clear difference"
NO_VERDICT = "no verdict"  # here
UNKNOWN = "unknown"  # elsewhere
UNDECLARED = f"{NO_VERDICT}: report.compare does not declare it"


@dataclass(frozen=True)
class SummaryRow:
    """One method under one selection rule: an entry of `summary` in results.json.

    Held-out domains are averaged within a seed first.
    """

    # not written if None
    _OPTIONAL: ClassVar = {"spread_as_published", "failed", "skipped", "reason", "class_weights", "flags"}

    method: str
    selection: str
    metric: str
    split: str
    mean: float | None  # over complete seeds; None if there is none
    std: float | None  # over seeds, ddof 1
    stderr: float | None  # std / √n
    n: int  # number of complete seeds: those with a value for every held-out domain
    interval: Interval | None  # 95% over complete seeds and test images; None: not known
    spread_as_published: dict[str, Any] | None  # {"kind", "value"} as the data set's benchmark prints it
    per_test_domain: dict[str, Point]  # {name: {"mean", "std"}, and "low" and "high" of the interval if it is known}
    protocol: str  # one line: data, split, selection and metric behind the numbers
    budget: dict[str, Any]  # {"draws", "gradient_evaluations": {"low", "high"} | None}
    failed: int | None = None  # number of failed models
    skipped: int | None = None  # number of skipped models
    reason: str | None = None  # why models failed, were skipped or are missing
    flags: list[str] | None = None  # what to know of its picks, and reasons to doubt them
    class_weights: str | None = None  # of its class losses, if it has some
    augmentation: str = field(kw_only=True)  # of the images that its models train on
    encoder: str = field(kw_only=True)  # its label, else its model
    trainable: bool | dict[str, Any] = field(kw_only=True)  # how much of the encoder trains, as in a recipe

    def to_json(self) -> dict[str, Any]:
        first = {"method": self.method, "encoder": self.encoder, "trainable": self.trainable}
        values = first | vars(self) | {"interval": self.interval and self.interval._asdict()}
        return {name: value for name, value in values.items() if value is not None or name not in self._OPTIONAL}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> SummaryRow:
        interval = entry["interval"] and Interval(**entry["interval"])
        return cls(**{"spread_as_published": None} | dict(entry) | {"interval": interval})

    def flat(self) -> dict[str, Any]:
        """Returns the row as a flat dict; nested values get keys such as `mean:DOMAIN`."""
        row = {name: value for name, value in self.to_json().items() if not isinstance(value, dict | list)}
        row.pop("interval", None)
        row |= {f"mean_{end}": self.interval and getattr(self.interval, end) for end in Interval._fields}
        for domain, values in self.per_test_domain.items():
            row |= {f"{name}:{domain}": value for name, value in values.items()}
        return row | {"draws": self.budget["draws"], "flags": "; ".join(self.flags or ())}


class PValue(NamedTuple):
    plain: float  # of this comparison alone
    holm: float | None  # corrected for all comparisons of the family; None: it is not in the family


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How one row of the summary compares with another: an entry of `comparisons` in results.json.

    Errors and variances are None where they cannot be estimated. `judge` makes the verdicts.
    """

    selection: str  # selection rule
    first: str  # label of a row
    second: str  # label of the row that it is compared with
    sets: int  # D, held-out sets
    domains: int  # in these sets
    seeds: int | None = None  # the smaller number of complete seeds of the sides that vary; None: none does
    paired: bool  # by seed
    difference: float  # first − second
    error: float | None = None  # √V, V = V_S + V_I
    freedom: float | None = None  # of V; None if V is 0
    share_seeds: float | None = None  # V_S / V
    share_images: float | None = None  # V_I / V
    freedom_seeds: float | None = None  # of V_S; None: V_S is 0
    freedom_images: float | None = None  # of V_I; None: V_I is 0
    other_error: float | None = None  # √V in the other regime (paired or not); None unless there are 9 or 10 seeds
    other_freedom: float | None = None
    error_elsewhere: float | None = None  # s_D / √D, or that over folds; None: one set
    freedom_elsewhere: float | None = None  # its degrees of freedom; None: D − 1
    p_here: PValue | None = None  # None: no verdict, and `note` says why
    p_elsewhere: PValue | None = None  # `holm`: the larger of both Holm values
    note: str
    here: str = NO_VERDICT  # BETTER, WORSE, EQUAL or NO_VERDICT
    elsewhere: str = UNKNOWN  # BETTER, WORSE or UNKNOWN
    equal_within: float | None = None  # `report.margin`, if the difference is shown to be smaller
    look: int = 1  # number of the look that found the verdict, or of the last one

    @property
    def on_these(self) -> Estimate | None:
        """The difference with its error on these domains."""
        freedom = math.inf if self.freedom is None else self.freedom
        return None if self.error is None else Estimate(self.difference, self.error, freedom)

    @property
    def on_others(self) -> Estimate | None:
        """The difference with its error on new domains."""
        error, freedom = self.error_elsewhere, self.freedom_elsewhere
        return (
            None if error is None else Estimate(self.difference, error, self.sets - 1 if freedom is None else freedom)
        )

    @property
    def where(self) -> str:
        """What follows "better" and "worse", as nothing is said of other domains."""
        return "on this domain" if self.domains == 1 else "on these domains"

    @property
    def is_found(self) -> bool:
        return self.here in (BETTER, WORSE)

    def swapped(self) -> Comparison:
        """Returns the same comparison as second − first."""
        opposite = {BETTER: WORSE, WORSE: BETTER}
        return replace(
            self,
            first=self.second,
            second=self.first,
            difference=-self.difference,
            here=opposite.get(self.here, self.here),
            elsewhere=opposite.get(self.elsewhere, self.elsewhere),
        )

    def to_json(self) -> dict[str, Any]:
        p_values = {"p_here": self.p_here, "p_elsewhere": self.p_elsewhere}
        return asdict(self) | {name: p and p._asdict() for name, p in p_values.items()}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Comparison:
        p_values = {name: entry[name] and PValue(**entry[name]) for name in ("p_here", "p_elsewhere")}
        return cls(**entry | p_values)


@dataclass(frozen=True)
class InterimLook:
    """One look: what was complete, its α, and the verdicts that it found. An entry of `looks` in results.json."""

    seeds: list[int]  # complete for a method
    methods: list[str]  # with a complete seed
    missing: dict[str, list[int]]  # {method: seeds that it lacks}
    alpha: float
    compare: list[list[str]] = field(default_factory=list)  # `report.compare` at that time
    found: list[list[str]] = field(default_factory=list)  # [selection, first, second, here, elsewhere] of verdicts

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def with_found(self, rows: Iterable[Comparison], before: Sequence[InterimLook] = ()) -> InterimLook:
        """Returns the look with the verdicts of `rows` that none of the looks before it has found."""
        earlier = [verdict for look in before for verdict in look.found]
        verdicts = [[r.selection, r.first, r.second, r.here, r.elsewhere] for r in rows if r.is_found]
        return replace(self, found=[verdict for verdict in verdicts if verdict not in earlier])
