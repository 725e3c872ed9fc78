"""Which images train, which select, which test: splits of the protocol, splits made of others, and notes on them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, PrivateAttr, field_validator
from torch import Tensor

from xdm_ft.core import DomainSet
from xdm_ft.images import ImageDataset
from xdm_ft.images.decode import NAMED_AT_MOST
from xdm_ft.protocol.folds import balanced_folds
from xdm_ft.protocol.site_class import images_per_class
from xdm_ft.runtime.errors import UserError, did_you_mean, join_names
from xdm_ft.runtime.randomness import validation_part
from xdm_ft.runtime.settings import Block, Name, OneOrMany, Problem

Rule = Literal["train_val", "val_domain", "cross_domain", "oracle"]
SELECTION_SPLIT: dict[str, str] = {"train_val": "train_val", "val_domain": "val_domain", "oracle": "test_val"}
"""Selection rule → the evaluation split on which it selects. `oracle` uses a part of the test domain: cheating.
`cross_domain` is not here, as it uses the splits of additional models (`without`)."""
LEFT_OUT = ("left_out_0", "left_out_1")
"""Names of the evaluation splits of a `cross_domain` model: its two held-out domains, or sets of them."""

MAX_SEEDS = 10_000  # a slip such as 1000000000 would fill the memory with seeds
SEEDS, ENCODER_SEEDS = 10, 5  # by default; the second if a method trains some of the encoder
Metric = Literal["accuracy", "balanced_accuracy", "macro_f1", "auroc", "worst_domain_accuracy", "nll", "ece"]


class Protocol(Block):
    """How performance on an unseen domain is estimated."""

    name: Annotated[
        Literal["leave_one_domain_out", "official"],
        Field(description="leave_one_domain_out: each test domain is held out in turn; official: the data's own split"),
    ] = "leave_one_domain_out"
    test_domains: Annotated[
        Annotated[tuple[Name, ...], OneOrMany, Field(min_length=1)] | None,
        Field(description="domains held out in turn; null: all (leave_one_domain_out only)"),
    ] = None
    together: Annotated[
        tuple[tuple[Name, ...], ...],
        Field(
            description="sets of domains to hold out as one because they show the same objects or patients, e.g. "
            "[[dslr, webcam]]. In test_domains, one of them means the set (leave_one_domain_out only)",
        ),
    ] = ()
    folds: Annotated[
        int | None,
        Field(
            ge=2,
            description="number k of sets of whole domains that are held out together, for many small sites: k "
            "trainings instead of one per site, and each site is measured alone (leave_one_domain_out only)",
        ),
    ] = None
    split_rule: Annotated[
        Literal["stratified", "domainbed"],
        Field(
            description="how to draw validation images. stratified: by class, groups undivided; domainbed: exactly as "
            "DomainBed, whose trial seed is the seed (leave_one_domain_out only)"
        ),
    ] = "stratified"
    val_fraction: Annotated[
        float, Field(gt=0, lt=1, description="fraction of each training domain kept for validation")
    ] = 0.2
    selection: Annotated[
        Rule,
        Field(
            description="images that select the step. train_val: parts of the training domains; val_domain: the "
            "official validation domain; cross_domain: training domains, each left out once; oracle: test "
            "images (cheating)"
        ),
    ] = "train_val"
    metric: Annotated[Metric, Field(description="metric that selects the step, and the headline of the tables")] = (
        "accuracy"
    )
    seeds: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...],
        Field(
            min_length=1,
            description=f"a number n (seeds 0…n−1), or a list. Default: {SEEDS}, or {ENCODER_SEEDS} if a method trains "
            "some of the encoder",
        ),
    ] = tuple(range(ENCODER_SEEDS))
    final_fit: Annotated[
        Literal[False, True, "all_seeds"],
        Field(
            description="true: at the end, train the method that held-out domains prefer on all labelled images, up to "
            "the median selected step: the model to ship. all_seeds: one such model per seed, for an ensemble"
        ),
    ] = False

    _fold_sets: tuple[tuple[str, ...], ...] = PrivateAttr(())  # once the data are known (`with_folds`)

    @field_validator("seeds", mode="before")
    @classmethod
    def _count_to_list(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise ValueError(f"{value} seeds; at least 1 is needed")
            if value > MAX_SEEDS:
                raise ValueError(f"{value} seeds; at most {MAX_SEEDS} are allowed")
            return tuple(range(value))
        if not isinstance(value, list | tuple):
            raise ValueError("must be a number of seeds, such as 20, or a list of them; a run grows when you raise it")
        return value

    @field_validator("together", mode="before")
    @classmethod
    def _sets(cls, value: Any) -> Any:
        sets = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(names, list | tuple) for names in sets):
            raise ValueError("must be a list of sets of domains, such as [[dslr, webcam]]")
        if any(len(names) < 2 for names in sets):
            raise ValueError("a set needs at least two domains; add domains, or remove the set")
        every = list(chain(*sets))
        if twice := [name for i, name in enumerate(every) if name in every[:i]]:
            raise ValueError(f"{twice[0]} is named twice; keep it in one set")
        return value

    def held_out_with(self, name: str, domains: Sequence[str]) -> tuple[str, ...]:
        """Returns those of `domains` that are held out together with the domain `name`, which is one of them."""
        names = next((names for names in (*self.together, *self._fold_sets) if name in names), (name,))
        return tuple(other for other in domains if other in names)

    def with_folds(self, dataset: ImageDataset) -> Protocol:
        """Returns the protocol whose `sets_of` knows the folds of the data, if it has any. Raises `UserError`."""
        if self.folds is None or self._fold_sets:
            return self
        held_out = [name not in dataset.never_held_out for name in dataset.domain_names]
        sites = [name for name, of in zip(dataset.domain_names, held_out, strict=True) if of]
        if self.folds > len(sites):
            problem = f"{self.folds} folds need as many domains, and there are {len(sites)}; lower it"
            raise UserError(f"protocol.folds: {problem}")
        fold_of = balanced_folds(images_per_class(dataset)[held_out], self.folds)
        folded = self.model_copy()
        folded._fold_sets = tuple(
            tuple(name for name, of in zip(sites, fold_of, strict=True) if of == fold) for fold in range(self.folds)
        )
        return folded

    def fold_of(self, domains: Sequence[str]) -> int | None:
        """Returns the number of the fold, from 1 on, that a model of these test domains holds out; None without."""
        return self._fold_sets.index(tuple(domains)) + 1 if tuple(domains) in self._fold_sets else None

    def words_of(self, domains: Sequence[str]) -> str:
        """Returns what a set of held-out domains is called in a sentence."""
        fold = self.fold_of(domains)
        return ", ".join(domains) if fold is None else f"fold {fold}"

    def sets_of(self, domains: Sequence[str]) -> list[tuple[str, ...]]:
        """Returns `domains` as the sets that are held out as one; most domains are alone in theirs."""
        return list(dict.fromkeys(self.held_out_with(name, domains) for name in domains))

    def problems(self) -> Iterator[Problem]:
        """Yields the settings that do not go together."""
        official = self.name == "official"
        for key, value in (
            ("test_domains", self.test_domains), ("together", self.together or None), ("folds", self.folds),
        ):  # fmt: skip
            if official and value is not None:
                problem = "is only for leave_one_domain_out; leave it out"
                yield Problem(f"protocol.{key}", problem, ("protocol.name",))
            elif self.folds is not None and value is not None and key != "folds":
                problem = "does not go together with protocol.folds, which hold out every domain; leave one out"
                yield Problem(f"protocol.{key}", problem, ("protocol.folds",))
        if official and self.split_rule != "stratified":
            problem = "the official split defines the validation images; leave it out"
            yield Problem("protocol.split_rule", problem, ("protocol.name",))
        if self.final_fit and self.selection == "oracle":
            problem = "needs an unbiased estimate, which selection: oracle cannot give; use train_val"
            yield Problem("protocol.final_fit", problem, ("protocol.selection",))


@dataclass(frozen=True)
class Split:
    """The rows on which one model is trained and evaluated. Rows are those of the data set."""

    test_domains: tuple[str, ...]
    train_domains: tuple[str, ...]  # names; index d is domain d of `Batch.domain`
    train: tuple[Tensor, ...]  # int64 rows, one tensor per training domain
    evaluation: dict[str, Tensor]  # split name (train_val | val_domain | test | test_val) → int64 rows
    domain_of: Tensor  # int64 [number of domains of the data set] → 0…D−1 of `train_domains`, −1 for the others
    notes: tuple[str, ...] = field(default=())  # notes on this split for the protocol line
    fold: int | None = None  # its number, from 1 on, if each of the test domains is measured alone

    def sites(self, dataset: ImageDataset) -> dict[DomainSet, Tensor]:
        """Returns {held-out set: its test rows}: each domain of a fold, else all test domains as one."""
        rows = self.evaluation["test"]
        if self.fold is None:
            return {self.test_domains: rows}
        numbers = {name: dataset.domain_names.index(name) for name in self.test_domains}
        domains = torch.as_tensor(dataset.domains)[rows]
        return {(name,): rows[domains == number] for name, number in numbers.items()}

    @property
    def tested_on(self) -> str:
        """What follows "tested on" in the notes. An official split may train and test on the same domain."""
        seen = [name for name in self.test_domains if name in self.train_domains]
        if not seen:
            return "domains never trained on"
        if len(seen) == len(self.test_domains):
            return "domains that are also trained on, none of them unseen"
        return f"domains of which {', '.join(seen)} {'is' if len(seen) == 1 else 'are'} also trained on"


def splits(dataset: ImageDataset, protocol: Protocol, seed: int, unreadable: Collection[int] = ()) -> list[Split]:
    """Returns one split per test domain, in the order of `protocol.test_domains` or of the data set; if official, one.

    Domains that `protocol.together` holds out as one have one split. `unreadable` rows are in no part. Raises
    `UserError` if the data do not allow the protocol.
    """
    if protocol.name == "official":
        return [official(dataset, protocol, seed, unreadable)]
    protocol = protocol.with_folds(dataset)
    held_out = protocol.test_domains or [name for name in dataset.domain_names if name not in dataset.never_held_out]
    if len(set(held_out)) < len(held_out):
        raise UserError(f"protocol.test_domains: {', '.join(held_out)}: a domain appears twice; remove one of the two")
    drawn = None
    if dataset.groups is None and protocol.split_rule == "stratified" and _validation_of_data(dataset) is None:
        # drawn once for all: a domain's part does not depend on which one is held out, unless groups span domains
        readable = np.delete(np.arange(len(dataset)), list(unreadable))
        drawn = stratified_part(dataset, readable, protocol.val_fraction, seed)
    planned = list[Split]()
    for name in held_out:
        if not any(name in split.test_domains for split in planned):
            planned.append(leave_one_domain_out(dataset, protocol, name, seed, unreadable, drawn))
    return planned


def rules_of(protocol: Protocol, planned: Iterable[Split]) -> tuple[str, ...]:
    """Returns the recipe's selection rule, then the other rules for which every split has images."""
    parts = set.intersection(*(set(split.evaluation) for split in planned))
    # they cost no training: all of them pick steps of the same models
    others = [rule for rule, name in SELECTION_SPLIT.items() if name in parts]
    return tuple(dict.fromkeys([protocol.selection, *others]))


def leave_one_domain_out(
    dataset: ImageDataset,
    protocol: Protocol,
    test_domain: str,
    seed: int,
    unreadable: Collection[int] = (),
    drawn: np.ndarray | None = None,
) -> Split:
    """Returns the split in which all of `test_domain`, and of the domains that are held out together with it, tests.

    The other domains train, except validation parts. All labelled images are used, also those that the official split
    tests on or ignores. Images of other domains whose group is also in a test domain are removed. `drawn`: the rows of
    the validation parts, if they are drawn already.
    """
    for key, names in (("test_domains", [test_domain]), ("together", chain(*protocol.together))):
        for name in names:
            if name not in dataset.domain_names:
                hint = did_you_mean(name, list(dataset.domain_names))
                raise UserError(f'protocol.{key}: "{name}" is not a domain of the data{hint}')
    test_domains = protocol.held_out_with(test_domain, dataset.domain_names)
    train_domains = tuple(name for name in dataset.domain_names if name not in test_domains)
    if not train_domains:
        problem, remedy = f'data: "{test_domain}" is the only domain', ""
        if len(test_domains) > 1:
            problem = f"protocol.together: {', '.join(test_domains)} are all domains of the data"
        elif dataset.folder_order:
            remedy = f"; if {', '.join(dataset.class_names[:3])} are domains, add /{test_domain} to data.root"
        raise UserError(f"{problem}; leave_one_domain_out needs another domain to train on{remedy}")
    held_out = in_domains(dataset, test_domains)
    readable = np.ones(len(dataset), dtype=bool)
    readable[list(unreadable)] = False
    is_test, is_source = readable & held_out, readable & ~held_out
    check_classes(dataset, np.flatnonzero(readable), range(len(dataset.domain_names)))

    notes = []
    if dataset.groups is not None:
        # a patient whose images train and test would make the estimate too good
        shared = is_source & np.isin(dataset.groups, dataset.groups[is_test])
        if shared.any():
            is_source &= ~shared
            where = protocol.words_of(test_domains)
            notes.append(f"{shared.sum()} training images left out whose group is also in {where}")
    is_val, how = _draw_validation(dataset, protocol, is_source, is_test, seed, drawn)
    evaluation = {
        "train_val": np.flatnonzero(is_val & is_source),
        "test": np.flatnonzero(is_test),
        "test_val": np.flatnonzero(is_val & is_test),
    }
    train = np.flatnonzero(~is_val & is_source)
    return _split(dataset, protocol, test_domains, train_domains, train, evaluation, notes + how)


def _draw_validation(
    dataset: ImageDataset,
    protocol: Protocol,
    is_source: np.ndarray,
    is_test: np.ndarray,
    seed: int,
    drawn: np.ndarray | None,
) -> tuple[np.ndarray, list[str]]:
    """Returns which rows are in validation parts, bool [N], and notes on that for the protocol line.

    Validation parts are stratified by domain and class, drawn with `seed`, and divide no group. Unless groups span
    domains, a domain's part does not depend on which domain is held out. If the data set has its own validation images
    of each domain (split "val"), these are used. Its split is not used if it does not divide each domain: WILDS' parts
    are whole hospitals, or years.
    """
    of_data = _validation_of_data(dataset)
    if protocol.split_rule == "domainbed":
        if dataset.splits is not None:
            raise UserError(
                "protocol.split_rule: domainbed would ignore the split that the data comes with; use stratified"
            )
        if dataset.groups is not None:
            raise UserError("protocol.split_rule: domainbed would divide groups; use stratified, or remove the groups")
        if not dataset.folder_order:
            raise UserError("protocol.split_rule: domainbed needs images in the order of folders; use stratified here")
        rows = [domainbed_validation(dataset.domains, protocol.val_fraction, seed)]
        notes = ["validation parts as DomainBed draws them", "tested on the whole held-out domain (DomainBed: on 80%)"]
    elif of_data is not None:
        return of_data, ["validation parts as they come with the data"]
    else:
        rows = [drawn] if drawn is not None else []
        for part in (is_source, is_test) if drawn is None else ():
            rows.append(stratified_part(dataset, np.flatnonzero(part), protocol.val_fraction, seed))
        notes = [] if dataset.splits is None else ["the data's own split is not used, all labelled images take part"]
    is_val = np.zeros(len(dataset), dtype=bool)
    is_val[np.concatenate(rows)] = True
    return is_val, notes


def _validation_of_data(dataset: ImageDataset) -> np.ndarray | None:
    """Returns the data set's own validation rows, bool [N]; None if they cannot be used.

    Each domain must have other rows to train on. Each domain must also have validation rows, unless the data's own
    split has only the parts train and val.
    """
    if dataset.splits is None:
        return None
    is_val = dataset.splits == "val"
    every, validated, others = (set(dataset.domains[rows].tolist()) for rows in (slice(None), is_val, ~is_val))
    divides = validated == every or set(dataset.splits.tolist()) == {"train", "val"}
    return is_val if divides and others == every else None


def official(dataset: ImageDataset, protocol: Protocol, seed: int, unreadable: Collection[int] = ()) -> Split:
    """Returns the data's own split. Rows of "val" are `train_val` if their domain also trains, else `val_domain`.

    Rows of "train_val" and "val_domain" keep these names. `test_val`, on which only the rule `oracle` selects, is a
    stratified part of the test rows, drawn with `seed`. Raises `UserError` if the data has no split of its own, or
    `protocol` has keys that only leave_one_domain_out uses (a recipe is refused earlier).
    """
    if dataset.splits is None:
        raise UserError(
            "protocol.name: official needs data with a split of its own (a table: the column split); add one, "
            "or use leave_one_domain_out"
        )
    if protocol.test_domains is not None:
        raise UserError("protocol.test_domains: the official split decides what is tested; remove this key")
    if protocol.split_rule != "stratified":
        raise UserError("protocol.split_rule: the official split decides what validates; remove this key")
    readable = usable(dataset, unreadable)
    train, test = (np.flatnonzero(readable & (dataset.splits == part)) for part in ("train", "test"))
    for part, rows in (("train", train), ("test", test)):
        if len(rows) == 0:
            raise UserError(f'protocol.name: official needs images whose split is "{part}"; the data has none')
    trains = np.isin(np.arange(len(dataset.domain_names)), dataset.domains[train])  # bool [domains]
    is_val = readable & (dataset.splits == "val")
    evaluation = {
        "train_val": np.flatnonzero(readable & (dataset.splits == "train_val") | is_val & trains[dataset.domains]),
        "val_domain": np.flatnonzero(readable & (dataset.splits == "val_domain") | is_val & ~trains[dataset.domains]),
        "test": test,
        "test_val": stratified_part(dataset, test, protocol.val_fraction, seed),
    }
    names = np.array(dataset.domain_names)
    test_domains = tuple(names[np.unique(dataset.domains[test])].tolist())
    return _split(dataset, protocol, test_domains, tuple(names[trains].tolist()), train, evaluation, [])


def usable(dataset: ImageDataset, unreadable: Collection[int]) -> np.ndarray:
    """Returns which rows decode and are in a part of the data set's own split (if it has one), bool [N]."""
    usable = np.ones(len(dataset), dtype=bool) if dataset.splits is None else dataset.splits != ""
    usable[list(unreadable)] = False
    return usable


def check_classes(dataset: ImageDataset, rows: np.ndarray, domains: Sequence[int], context: str = "") -> None:
    """Raises `UserError` if one of `domains` has no image among `rows`, or all of them together one class only."""
    count = images_per_class(dataset, rows)[[*domains]]
    for domain in (domain for domain, images in zip(domains, count.sum(1), strict=True) if not images):
        problem = f'the domain "{dataset.domain_names[domain]}" has no image{context}'
        raise UserError(f"data: {problem}; add images, or remove the domain")
    if len(present := np.flatnonzero(count.sum(0))) == 1:
        problem = f'there are images of one class only ("{dataset.class_names[present[0]]}"){context}'
        raise UserError(f"data: {problem}; add images of another class")


def _split(
    dataset: ImageDataset,
    protocol: Protocol,
    test_domains: tuple[str, ...],
    train_domains: tuple[str, ...],
    train: np.ndarray,
    evaluation: dict[str, np.ndarray],
    notes: list[str],
) -> Split:
    """Returns the split of these rows, with its notes. Raises `UserError` if the protocol cannot use it."""
    evaluation = {name: rows for name, rows in evaluation.items() if len(rows)}
    held_out = protocol.words_of(test_domains)
    grouped = dataset.groups is not None
    numbers = [dataset.domain_names.index(name) for name in train_domains]
    remedy = "put the domain into their names (data.group, or the column group)"
    hint = f"; if groups are numbered anew in each domain, {remedy}" if grouped else ""
    check_classes(dataset, train, numbers, f" left for training with {held_out} held out{hint}")
    crossed = protocol.selection == "cross_domain"
    if crossed and len(protocol.sets_of(train_domains)) < 2:
        only = f"{protocol.words_of(train_domains)}{', held out together' if len(train_domains) > 1 else ''}"
        raise UserError(
            f"protocol.selection: cross_domain needs two training domains; with {held_out} held out there is only "
            f"{only}; use train_val"
        )
    needed = SELECTION_SPLIT.get(protocol.selection)
    if needed is not None and needed not in evaluation:
        possible = [rule for rule, name in SELECTION_SPLIT.items() if name in evaluation]
        raise UserError(
            f"protocol.selection: {protocol.selection} needs {needed} images; there are none with {held_out} held out"
            + (f" (a group may be too large for val_fraction {protocol.val_fraction})" if grouped else "")
            + f"; possible here: {', '.join(possible) or 'none'}"
        )
    split = split_of_rows(dataset, test_domains, numbers, train, evaluation)
    sets = [names for names in protocol.sets_of(dataset.domain_names) if crossed or names == test_domains]
    together = [f"{' and '.join(names)} held out together" for names in sets if len(names) > 1]
    if protocol.folds is not None:
        together = [f"{protocol.folds} folds of whole domains held out together, each domain measured alone"]
        lacks = [dataset.class_names[c] for c in np.setdiff1d(dataset.labels, dataset.labels[evaluation["test"]])]
        together += [f"{held_out} has no image of {join_names(lacks, NAMED_AT_MOST)}"] if lacks else []
    notes = [f"tested on {split.tested_on}", *together, note_groups(dataset, train, evaluation), *notes]
    notes += note_gaps(dataset, train, evaluation, numbers)
    return replace(split, notes=tuple(notes), fold=protocol.fold_of(test_domains))


def split_of_rows(
    dataset: ImageDataset,
    test_domains: tuple[str, ...],
    numbers: list[int],
    train: np.ndarray,
    evaluation: dict[str, np.ndarray],
) -> Split:
    """Returns the split of these rows. `numbers` are those of the training domains in the data set."""
    domain_of = np.full(len(dataset.domain_names), -1, dtype=np.int64)
    domain_of[numbers] = np.arange(len(numbers))
    return Split(
        test_domains=test_domains,
        train_domains=tuple(dataset.domain_names[number] for number in numbers),
        train=tuple(torch.from_numpy(train[dataset.domains[train] == number]) for number in numbers),
        evaluation={name: torch.from_numpy(rows) for name, rows in evaluation.items()},
        domain_of=torch.from_numpy(domain_of),
    )


def in_domains(dataset: ImageDataset, names: Iterable[str]) -> np.ndarray:
    """Returns which images are of these domains, bool [N]."""
    return np.isin(dataset.domains, [dataset.domain_names.index(name) for name in names])


def with_groups(dataset: ImageDataset, chosen: np.ndarray) -> np.ndarray:
    """Returns which images are chosen (bool [N]), or have a group with one that is: bool [N]."""
    if dataset.groups is None:
        return chosen
    return chosen | np.isin(dataset.groups, np.unique(dataset.groups[chosen]))


def stratified_part(dataset: ImageDataset, rows: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Returns about `fraction` of `rows`, stratified by domain and class, without dividing a group."""
    stratum = dataset.domains[rows] * len(dataset.class_names) + dataset.labels[rows]
    group = None if dataset.groups is None else dataset.groups[rows]
    return validation_part(rows, stratum, group, fraction, seed)


def without(dataset: ImageDataset, split: Split, *domains: str) -> Split:
    """Returns `split` with one more held-out domain, or set of them, whose training images become `left_out_0`.

    Images whose group is also in these domains are removed. DomainBed's third selection rule leaves out one training
    domain at a time in this way (Gulrajani & Lopez-Paz 2021, section 3). Raises `UserError` if a remaining domain has
    no image, or all of them have one class.
    """
    by_name = dict(zip(split.train_domains, split.train, strict=True))
    left_out = torch.cat([by_name.pop(name) for name in domains]).numpy()
    rest = torch.cat([*by_name.values()]).numpy()
    # groups of all images of the domains, as in `leave_one_domain_out`: a group may have validation images alone
    rest = rest[~with_groups(dataset, in_domains(dataset, domains))[rest]]
    held_out, numbers = (*split.test_domains, *domains), [dataset.domain_names.index(name) for name in by_name]
    context = f" left for training with {', '.join(held_out)} held out (protocol.selection: cross_domain)"
    check_classes(dataset, rest, numbers, context)
    return split_of_rows(dataset, held_out, numbers, rest, {LEFT_OUT[0]: left_out})


def also_measuring(split: Split, rows: Tensor) -> Split:
    """Returns a split of `without` that also evaluates its other held-out domain, on `rows`: `left_out_1`."""
    return replace(split, evaluation={**split.evaluation, LEFT_OUT[1]: rows})


def all_domains(dataset: ImageDataset, unreadable: Collection[int] = ()) -> Split:
    """Returns the split in which all labelled images of all domains train, and none validates or tests.

    Raises `UserError` if a domain has no image, or all of them have one class.
    """
    train = np.setdiff1d(np.arange(len(dataset)), list(unreadable))
    numbers = np.unique(dataset.domains[train]).tolist()
    check_classes(dataset, train, numbers, " for protocol.final_fit, which trains on all of them")
    return split_of_rows(dataset, (), numbers, train, {})


def with_validation(dataset: ImageDataset, split: Split, fraction: float, seed: int) -> Split:
    """Returns `split`, whose part `train_val` is drawn from its training images if it has none of its own.

    It is drawn as validation parts are: stratified by domain and class, without dividing a group; it may be empty.
    """
    if "train_val" in split.evaluation:
        return split
    part = torch.from_numpy(stratified_part(dataset, torch.cat(split.train).sort().values.numpy(), fraction, seed))
    train = tuple(rows[~torch.isin(rows, part)] for rows in split.train)
    return replace(split, train=train, evaluation={**split.evaluation, "train_val": part})


def mean_course(courses: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Returns {step: mean over the left-out domains} for the steps at which all of them were measured."""
    every = list(courses)
    steps = [step for step in (every[0] if every else ()) if all(step in course for course in every)]
    return {step: float(np.mean([course[step] for course in every])) for step in steps}


def note_groups(dataset: ImageDataset, train: np.ndarray, evaluation: dict[str, np.ndarray]) -> str:
    """Returns the note on groups: unknown, kept together, or how many groups and images of each part also train."""
    if dataset.groups is None:
        return "images assumed independent"
    overlaps = []
    for part, rows in evaluation.items():
        if part == "test_val":  # a part of the test images, which are counted already
            continue
        shared = rows[np.isin(dataset.groups[rows], dataset.groups[train])]
        if len(shared):
            groups, both = len(np.unique(dataset.groups[rows])), len(np.unique(dataset.groups[shared]))
            overlaps.append(f"{both} of {groups} groups of {part} also train ({len(shared)} of {len(rows)} images)")
    return ", ".join(overlaps) or "groups kept together"


def note_gaps(
    dataset: ImageDataset, train: np.ndarray, evaluation: dict[str, np.ndarray], numbers: list[int]
) -> list[str]:
    """Returns a note for every class and every validation part that a training domain (of `numbers`) lacks."""
    counts = images_per_class(dataset, train)[numbers]
    several = (counts > 0).sum(1, keepdims=True) > 1  # domains of one class have a note of their own
    lacking = [
        f"no training image of {dataset.class_names[c]} in {dataset.domain_names[numbers[d]]}"
        for d, c in np.argwhere((counts == 0) & several).tolist()
    ]
    notes = lacking[:NAMED_AT_MOST]
    if len(lacking) > NAMED_AT_MOST:
        notes.append(f"and {len(lacking) - NAMED_AT_MOST} more classes missing from a training domain")
    if "train_val" in evaluation:
        validated = set(dataset.domains[evaluation["train_val"]].tolist())
        without = [dataset.domain_names[d] for d in numbers if d not in validated]
        if without:
            notes.append(f"no validation image of {join_names(without, NAMED_AT_MOST)}, which train_val ignores")
    return notes


# DomainBed's own seeded split of a domain (Gulrajani & Lopez-Paz 2021, `lib/misc.py` and `scripts/train.py`)


def seed_hash(*numbers: int) -> int:
    """Returns DomainBed's seed for a trial seed and the number of a domain: md5 of the tuple's text, modulo 2³¹."""
    # machines in FIPS mode refuse md5, unless it is said that no secret depends on it
    return int(hashlib.md5(str(numbers).encode(), usedforsecurity=False).hexdigest(), 16) % 2**31


def domainbed_validation(domains: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Returns DomainBed's validation rows of all domains, sorted. `domains` int64 [N] are numbered in its order.

    A key is an index into the rows of a domain. For folders these are in torchvision's order, which DomainBed uses.
    """
    parts = []
    for number in range(int(domains.max()) + 1):
        rows = np.flatnonzero(domains == number)
        keys = list(range(len(rows)))  # a list, as DomainBed shuffles one
        np.random.RandomState(seed_hash(seed, number)).shuffle(keys)
        parts.append(rows[keys[: int(len(rows) * fraction)]])
    return np.sort(np.concatenate(parts))
