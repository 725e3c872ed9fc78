"""Performs an audit: findings of every kind with what they cost, written as audit.json, audit.md and tables."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xdm_ft.audit.copies import NearCopies, near_copies, straddling
from xdm_ft.audit.costs import Change, costs
from xdm_ft.audit.encoder import Aligned, aligned_accuracy, encoder_facts, halve_by_alignment, prompt_cosines
from xdm_ft.audit.facts import FactRow, ImageMark, facts_findings, low_level, marks
from xdm_ft.audit.heads import HeadRequest, Study, recipe_of_heads
from xdm_ft.audit.labels import FOLDS, MAX_SEEDS, Labels, find_confusions, label_costs, label_scores, training_of
from xdm_ft.audit.twins import domain_pairs, units_of
from xdm_ft.core import DomainSet, set_name
from xdm_ft.data.features import FeatureTable
from xdm_ft.encoders import TextEncoder
from xdm_ft.evaluation.neighbours import directions, neighbours
from xdm_ft.experiment.data_checks import roles
from xdm_ft.experiment.estimate import heads_time
from xdm_ft.experiment.plan import Plan, make_plan, read_data
from xdm_ft.experiment.prepare import build_encoders, image_hashes, prepare
from xdm_ft.images import ImageDataset
from xdm_ft.images.facts import image_facts
from xdm_ft.protocol.site_class import site_class_of
from xdm_ft.protocol.splits import Split, split_of_rows
from xdm_ft.recipe.method import encoder_label
from xdm_ft.recipe.settings import Recipe
from xdm_ft.results.run import AUDIT_VERSION, Run
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.randomness import sample
from xdm_ft.storage import Json

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
LISTED = 20  # pairs and images in audit.json; the tables have all
FACTS_OF, MARKS_OF = 20_000, 4000  # images at most whose files are read again; whose pixels are
MAX_COSTS = 12  # domains, and marked classes, that are left out of training, one at a time
COPIES = ("first", "second", "score", "cosine", "sure", "straddles", "domains", "classes")
LABELS = ("path", "domain", "group", "label", "suggested", "score", "suspect")


def read_study(recipe: Recipe, accelerator: Accelerator, run: Run | None = None) -> Study:
    """Reads the data of a recipe and prepares their features. `run`: the run in whose directory the audit is written.

    Data that the protocol can't split, as they have one domain, or one class in a domain, have no held-out domains:
    what needs none is still measured. Raises `UserError` if the data can't be read or are not those of the run, or if
    the protocol does not fit them.
    """
    recipe = recipe_of_heads(recipe)
    dataset = read_data(recipe)
    recipe, encoders = build_encoders(recipe, dataset)
    hashes = image_hashes(recipe, dataset, accelerator)
    prepared = prepare(recipe, dataset, encoders, accelerator, hashes=hashes)
    if run is not None and run.results["environment"]["data"]["content"] != prepared.content:
        raise UserError(f"{run.path}: this run had other images; audit the recipe under another name (name=NAME)")
    try:
        plan, problem = make_plan(recipe, dataset).without(prepared.unreadable), ""
    except UserError as error:
        # of the recipe, not of the data
        if str(error).startswith(("protocol.test_domains", "protocol.together", "protocol.folds")):
            raise
        plan, problem = Plan(recipe, dataset, (), (), (), ()), str(error)
    return Study(plan, prepared.to(accelerator.device), hashes.duplicates(), problem)


class Audit(NamedTuple):
    """What was found, as the files of an audit hold it."""

    document: Json  # the content of audit.json
    copies: list[list[object]]  # rows of copies.csv, of the columns `COPIES`
    labels: list[Json]  # rows of labels.csv
    shown: list[tuple[Json, int, int]]  # the listed pairs of copies, with the rows of their images


def audit(study: Study, notes: Sequence[str] = (), of: str | None = None) -> Audit:
    """Measures what an audit says. `notes`: for its readers. `of`: the `audited_part` of the recipe.

    Raises `UserError` if features hold NaN or ∞, or if a head fails.
    """
    dataset, rows = study.dataset, study.readable
    if not len(rows):
        raise UserError("data: no image decodes; there is nothing to audit")
    labels, domains, of_images = dataset.labels[rows], dataset.domains[rows], torch.from_numpy(rows)
    unit, units = directions(study.features, of_images, dataset.name), units_of(study)
    numbers = {name: number for number, names in enumerate(units) for name in names}
    unit_of = np.array([numbers.get(name, -1) for name in dataset.domain_names])
    near = neighbours(unit, of_images, unit_of[domains])
    same = np.full(len(dataset), -1)
    for number, repeated in enumerate(study.copies):
        same[repeated] = number
    pairs, splits = near_copies(near, domains, same[rows]), {split.test_domains: split for _, split in study.heads}
    straddles = straddling(pairs, map(roles, splits.values()), len(dataset))
    # those that affect an estimate first
    order = sorted(range(len(pairs)), key=lambda i: not (pairs[i].sure and straddles[i]))
    pairs, straddles = [pairs[i] for i in order], [straddles[i] for i in order]
    logger.info("audit: %s to train heads", _time(study, len(units)))
    scores = label_scores(study)
    doubtful = [] if scores is None else _doubtful(study, scores)
    first = near.nearest[:, 0] if near.nearest.shape[1] else near.foreign
    shares = (nearest_shares(nearest, unit_of[domains], len(units)) for nearest in (near.foreign, first))
    twins = domain_pairs(study, units, *shares)
    facts, found_marks = list[FactRow](), list[ImageMark]()
    if not isinstance(dataset, FeatureTable):
        stratum = domains * len(dataset.class_names) + labels
        table = image_facts(dataset, sample(rows, stratum, FACTS_OF))
        of_groups = None if dataset.groups is None else dataset.groups[table.rows]
        of_table = dataset.labels[table.rows], dataset.domains[table.rows]
        facts = facts_findings(table, *of_table, dataset.domain_names, of_groups)
        found_marks = _marks(dataset, sample(rows, stratum, MARKS_OF))
    groups = None if dataset.groups is None else dataset.groups[rows]
    label = encoder_label(study.item.encoder)
    notes = [*([f"there are no held-out domains: {study.problem}"] if study.problem else []), *notes]
    if (near.nearest < 0).all() and len(rows) > 1:
        notes.append("no search for copies and twin domains: all features are zero")
    document: Json = {
        "version": AUDIT_VERSION,
        "name": study.plan.recipe.name,
        "images": len(rows),
        "unreadable": len(study.prepared.unreadable),
        "classes": list(dataset.class_names),
        "domains": dict(zip(dataset.domain_names, np.bincount(domains, minlength=len(unit_of)).tolist(), strict=True)),
        "content": study.prepared.content,
        "heads": study.description,
        "held_out": [set_name(held) for held in splits],
        "copies": _copies(study, pairs, straddles, splits),
        "twins": twins.twins,
        "domain_pairs": {key: value for key, value in asdict(twins).items() if key != "twins"},
        "labels": None,
        "site_class": site_class_of(dataset, rows).to_json()
        | {
            "facts": [fact.to_json() for fact in facts],
            "marks": [mark.to_json() for mark in found_marks],
            "costs": _site_costs(study, facts, found_marks, splits),
        },
        "encoder": encoder_facts(label, unit, near, labels, domains, groups, _measure_alignment(study, unit)).to_json(),
        "notes": notes,
        **({} if of is None else {"of": of}),
        **({} if (folds := study.plan.recipe.protocol.folds) is None else {"folds": folds}),
    }
    if scores is None:
        notes.append("no search for label errors: it needs two classes, and five images or groups")
    else:
        document["labels"] = {
            "suspects": len(scores.suspects),
            "images": doubtful[:LISTED],
            "confused": [
                {"label": of, "suggested": other, "images": count}
                for of, other, count in find_confusions(study, scores)
            ],
            "costs": [asdict(cost) for cost in label_costs(study, scores)],
        }
    copies = [_as_row(study, *pair) for pair in zip(pairs, straddles, strict=True)]
    labels_table = [] if scores is None else _label_rows(study, scores, doubtful)
    shown = [(entry, pair.first, pair.second) for entry, pair in zip(document["copies"]["pairs"], pairs, strict=False)]
    return Audit(document, copies, labels_table, shown)


def _time(study: Study, units: int) -> str:
    """Returns the time to train the heads: of labels, of pairs of domains, of three changes and of random ones."""
    rows, of_labels = study.readable, study.with_heads(training_of(study))
    every = split_of_rows(study.dataset, ("fold",), np.unique(study.dataset.domains[rows]).tolist(), rows, {})
    folds = [of_labels.model(every, seed) for seed in study.seeds[:MAX_SEEDS]] * FOLDS
    held_out = [study.model(split, seed) for seed, split in study.heads] * (1 + 2 * (units - 1) + 6)
    groups = [(models, 1) for models in (folds, held_out) if models]
    return heads_time(study.plan, study.prepared.for_method(study.item).encoder, study.features.device, groups)


def nearest_shares(nearest: np.ndarray, units: np.ndarray, number: int) -> np.ndarray:
    """Returns in which unit the nearest image lies for each unit's images: shares float64 [U,U].

    `nearest`, `units`: int64 [n]; a nearest image of −1 does not exist.
    """
    exists = nearest >= 0
    counts = np.zeros((number, number))
    np.add.at(counts, (units[exists], units[nearest[exists]]), 1)
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def _copies(study: Study, pairs: list[NearCopies], straddles: list[bool], splits: dict[DomainSet, Split]) -> Json:
    domains, sure = study.dataset.domains, [pair for pair in pairs if pair.sure]
    images, left_out = len(study.dataset), dict[DomainSet, np.ndarray]()
    first, second = (np.array([getattr(pair, end) for pair in sure], np.int64) for end in ("first", "second"))
    for held, split in splits.items():
        tested = np.zeros(images, bool)
        tested[split.evaluation["test"].numpy()] = True
        # those of a tested image, and of two others the second one
        rows = [second[~tested[second]], first[tested[second] & ~tested[first]]]
        if len(copied := np.unique(np.concatenate(rows))):
            left_out[held] = copied
    number = len(np.unique(np.concatenate([np.empty(0, np.int64), *left_out.values()])))
    candidates = [domains[[pair.first, pair.second]] for pair in pairs if not pair.sure]
    change = Change("left out of training", number, left_out)
    return {
        "listed": len(pairs),
        "sure": len(sure),
        "across_domains": int((domains[first] != domains[second]).sum()),
        "candidates_across_domains": sum(int(one != other) for one, other in candidates),
        "straddling": sum(pair.sure and both for pair, both in zip(pairs, straddles, strict=True)),
        "pairs": [_as_json(study, *pair) for pair in list(zip(pairs, straddles, strict=True))[:LISTED]],
        "costs": [asdict(cost) for cost in costs(study, [change])] if left_out else [],
    }


def _doubtful(study: Study, scores: Labels) -> list[Json]:
    """Returns the images whose label is less likely than another class, the worst first, as in audit.json."""
    dataset, entries = study.dataset, list[Json]()
    for i in scores.doubtful.tolist():
        row = int(scores.rows[i])
        entries.append(
            {
                "path": dataset.name_in_data(row),
                "domain": dataset.domain_names[dataset.domains[row]],
                "label": dataset.class_names[dataset.labels[row]],
                "suggested": dataset.class_names[scores.suggested[i]],
                "score": round(float(scores.score[i]), 4),
            }
        )
    return entries


def _label_rows(study: Study, scores: Labels, doubtful: list[Json]) -> list[Json]:
    """Returns the rows of labels.csv: the doubtful images with their groups, and whether the label is likely wrong."""
    dataset, made = study.dataset, list[Json]()
    for number, (row, entry) in enumerate(zip(scores.rows[scores.doubtful], doubtful, strict=True)):
        group = {} if dataset.groups is None else {"group": dataset.groups[row]}
        if group and dataset.group_names is not None:
            group = {"group": dataset.group_names[group["group"]]}
        made.append({**entry, **group, "suspect": number < len(scores.suspects)})  # suspects are the worst ones
    return made


def _as_json(study: Study, pair: NearCopies, straddles: bool) -> Json:
    entry: Json = {
        "score": round(pair.score, 4), "cosine": round(pair.cosine, 6), "sure": pair.sure, "straddles": straddles,
    }  # fmt: skip
    dataset = study.dataset
    for end in ("first", "second"):
        row = getattr(pair, end)
        entry[end] = dataset.name_in_data(row)
        entry[f"{end}_domain"] = dataset.domain_names[dataset.domains[row]]
        entry[f"{end}_class"] = dataset.class_names[dataset.labels[row]]
    return entry


def _as_row(study: Study, pair: NearCopies, straddles: bool) -> list[object]:
    entry = _as_json(study, pair, straddles)
    both = (
        " | ".join(dict.fromkeys(entry[f"{end}_{of}"] for end in ("first", "second"))) for of in ("domain", "class")
    )
    return [*(entry[column] for column in COPIES[:-2]), *both]


def _marks(dataset: ImageDataset, rows: np.ndarray) -> list[ImageMark]:
    features = low_level(dataset, rows)
    groups = None if dataset.groups is None else dataset.groups[features.rows]
    of_rows = dataset.labels[features.rows], dataset.domains[features.rows]
    return marks(features, *of_rows, dataset.domain_names, dataset.class_names, groups)


def _site_costs(
    study: Study, facts: list[FactRow], found: list[ImageMark], splits: dict[DomainSet, Split]
) -> list[Json]:
    """Leaves out of training each marked class of a domain, and each domain in which facts of the files tell it."""
    dataset, changes = study.dataset, list[Change]()
    cells = [(mark.domain, mark.label) for mark in found if mark.found]
    cells += [(fact.domain, "") for fact in facts if fact.found and fact.domain is not None]
    for domain, label in dict.fromkeys(cells):
        rows = study.readable[dataset.domains[study.readable] == dataset.domain_names.index(domain)]
        if label:
            rows = rows[dataset.labels[rows] == dataset.class_names.index(label)]
        trains = [held for held, split in splits.items() if domain in split.train_domains]
        title = f"{f'{label} in ' if label else ''}{domain} left out of training"
        changes.append(Change(title, len(rows), dict.fromkeys(trains, rows)))
    return [asdict(cost) for cost in costs(study, changes[:MAX_COSTS])] if splits else []


def _measure_alignment(study: Study, unit: Tensor) -> Aligned | None:
    """Accuracy on images that the text side knows well and badly, by the recipe's heads; None without a text side."""
    encoder = study.prepared.for_method(study.item).encoder
    if not isinstance(encoder, TextEncoder) or encoder.text_reason or not study.heads:
        return None
    rows, labels = study.readable, study.dataset.labels
    text = encoder.text_embeddings(study.dataset.class_names, None)
    halves = np.full(len(study.dataset), -1)
    halves[rows] = halve_by_alignment(prompt_cosines(unit, text, labels[rows]), labels[rows])
    wanted = [HeadRequest(split, split.evaluation["test"], seed) for seed, split in study.heads]
    tested = np.concatenate([head.rows.numpy() for head in wanted])
    predicted = np.concatenate(study.predictions(wanted, "aligned halves"))
    return aligned_accuracy(halves, tested, predicted == labels[tested])
