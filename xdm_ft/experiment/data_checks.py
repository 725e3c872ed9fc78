"""Faults of the data that do not stop a run. `run`, `validate` and `doctor` report the same ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from xdm_ft.core import set_name
from xdm_ft.experiment.plan import Plan, index_folder
from xdm_ft.features.hashes import FileHashes, hash_files, pixels_of
from xdm_ft.image_files.tables import alike, whole_number
from xdm_ft.images import ImageDataset, Range
from xdm_ft.images.decode import NAMED_AT_MOST
from xdm_ft.images.facts import BRIGHT_SHARE, DARK, PixelCounts, PixelUse, range_of, sample_of_domains
from xdm_ft.protocol.site_class import images_per_class, imbalance, site_class_of
from xdm_ft.protocol.splits import Split
from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError, plural, printable
from xdm_ft.storage.lines import csv_line
from xdm_ft.storage.run_directory import COPIES, RunDirectory

logger = logging.getLogger("xdm_ft")


@dataclass(frozen=True)
class Finding:
    """One line of a report. A finding with a remedy is a fault; without one it is a note."""

    what: str
    found: str
    remedy: str | None = None

    def __str__(self) -> str:
        if self.remedy is None:
            return printable(f"ok     {self.what}: {self.found}")
        return "\n".join([printable(f"FAULT  {self.what}: {self.found}"), printable(f"       → {self.remedy}")])

    @property
    def line(self) -> str:
        return printable(f"{self.what}: {self.found}" + (f" → {self.remedy}" if self.remedy else ""))


def fault(subject: str, error: UserError) -> Iterator[Finding]:
    """Yields one fault per line of the error's text. The remedy is the text behind the last semicolon of a line."""
    for line in str(error).splitlines():
        problem, semicolon, remedy = line.rpartition("; ")
        yield Finding(subject, problem, remedy) if semicolon else Finding(subject, line, "repair this and run again")


SITE_CLASS = "site × class"
LEFT_OUT = "left out"  # the check that finds what yields no image; it is reported as soon as the data are read
COPIED = "images"  # the check that finds copies
INTENSITY = "intensity"
ROLES = ("training", "validation", "test")
GROUPS = "groups"
PARTS = [("training", part) for part in ("test", "val_domain", "train_val")]
PARTS += [(part, "test") for part in ("val_domain", "train_val")]
"""Two parts of a split that must share no group: what trains, what selects, what tests."""


def check_data(
    plan: Plan, show: bool, hashes: FileHashes | None = None, counts: PixelCounts | None = None
) -> list[Finding]:
    """Returns all faults and notes. Hashes only image files of equal size, unless all `hashes` are known; decodes a
    sample.

    `show`: whether to show progress. `counts`: of images that were decoded, which count beside the sample.
    """
    index = index_folder(plan.recipe)
    if hashes is None:  # files of different sizes cannot be copies of each other
        hashes = hash_files(plan.dataset, index, show, equal_sizes_only=True)
    of_data = data_faults(plan.dataset, hashes, plan.splits_of_all_seeds)
    return [*of_data, *intensity_faults(plan.recipe, plan.dataset, hashes, index, show, counts), *plan_faults(plan)]


def data_faults(dataset: ImageDataset, hashes: FileHashes, splits: Sequence[Split]) -> Iterator[Finding]:
    """Yields the faults of the data alone. `splits` show which repeated images affect the estimate.

    Names of classes or domains may differ only in case, spaces, or as 1 and 1.0: a held-out
    domain that is also a training domain under such a name would not be unseen. Classes may have no image in some
    domain, or so few domains that class and domain cannot be told apart, unless the data set is published so.
    """
    yield from find_left_out(dataset)
    site_class, reason = site_class_of(dataset), "differ only in case, spaces or the form of a number"
    images, remedy = site_class.counts, "give them one name in the data, or clearly different names"

    def named(domains: np.ndarray) -> str:
        return ", ".join(dataset.domain_names[d] for d in np.flatnonzero(domains))

    for numbers in alike(dataset.class_names):
        names = [f'"{dataset.class_names[c]}" (in {named(images[:, c] > 0)})' for c in numbers]
        yield Finding("classes", f"{' and '.join(names)} {reason}", remedy)
    for numbers in alike(dataset.domain_names):
        names = [f'"{dataset.domain_names[d]}" ({plural(images[d].sum(), "image")})' for d in numbers]
        yield Finding("domains", f"{' and '.join(names)} {reason}", remedy)
    for noun, all_names in (("classes", dataset.class_names), ("domains", dataset.domain_names)):
        if all(whole_number(name) != name for name in all_names):
            found = f"{', '.join(all_names[:NAMED_AT_MOST])} are whole numbers as pandas writes them beside empty cells"
            yield Finding(noun, found, "write them without .0 (pandas: astype('Int64'))")
    lacking = [] if dataset.as_published else np.flatnonzero((images == 0).any(0)).tolist()
    if names := [f'no image of "{dataset.class_names[c]}" in {named(images[:, c] == 0)}' for c in lacking]:
        yield Finding("classes", _list_lines(names), "add images, or remove the class from the other domains")
    if site_class.confounded and not dataset.as_published:
        remedy = "add images of other classes there or of these classes elsewhere, else a model may learn the site"
        yield Finding(SITE_CLASS, f"cannot be told apart: {_list_lines(site_class.confounded)}", remedy)
    yield from _find_repeated_images(dataset, hashes, splits)


def find_left_out(dataset: ImageDataset) -> Iterator[Finding]:
    """Yields what looks like data and yields no image: domains, classes, files."""
    if dataset.left_out:
        yield from fault(LEFT_OUT, UserError(*dataset.left_out))


def intensity_faults(
    recipe: Recipe,
    dataset: ImageDataset,
    hashes: FileHashes,
    index: Path | None,
    show: bool,
    counts: PixelCounts | None = None,
) -> Iterator[Finding]:
    """Yields the domains that are nearly black to an encoder: no image wider than 8 bits uses the upper half of what
    becomes 0…255, or nearly all grey values are low. It looks at a sample, and at the images in `counts`.

    `data.intensity: auto` has ranges of which the largest value may use little more than a quarter.
    """
    share = 0.25 if recipe.data_common.intensity == "auto" else 0.5
    if not dataset.has_images:
        return
    sample = pixels_of(dataset, hashes, index, sample_of_domains(dataset), show)
    if counts is None:
        counts = PixelCounts(len(dataset))
    else:
        images = hashes.images
        counts.add_copies(np.where(images.number_of < 0, -1, images.rows[images.number_of]))
    for row, pixels in sample.items():
        counts.add(row, pixels)
    every = counts.of(np.ones(len(dataset), bool))
    fits_auto = every is not None and len(every.extremes) == 1
    for domain, name in enumerate(dataset.domain_names):
        of_domain = dataset.domains == domain
        used = counts.of(of_domain)
        if used is not None and (problem := _darkness(used, dataset.intensity, share, fits_auto)):
            total = int(np.count_nonzero(of_domain))
            seen = f"in a sample of {used.images} of its {plural(total, 'image')}"
            seen = f"in its {plural(total, 'image')}" if used.images == total else seen
            yield Finding(INTENSITY, f"{name} is nearly black: {seen}, {problem[0]}", problem[1])


def _darkness(of: PixelUse, intensity: Range | None, share: float, fits_auto: bool) -> tuple[str, str] | None:
    """Returns what the pixels of a domain use, and what to do, if they are nearly black.

    `fits_auto`: whether `data.intensity: auto` has a range for the images of all domains.
    """
    remedy = "stretch their values in the files if they do not fill 0…255 (data.intensity leaves 8-bit images alone)"
    used = ""
    if of.extremes:
        widest = max(of.extremes, key=lambda extremes: extremes.largest)
        used = f"pixels wider than 8 bits reach {widest.largest:g} of {widest.top(intensity):g}"
        # `auto` has seen the largest value of all domains
        low, high = range_of(of.extremes)
        own = f"{{low: {min(0.0, low):g}, high: {high:g}}}"
        remedy = f"set data.intensity: {own}" + (", or auto" if fits_auto and not intensity else "")
        if intensity or of.wide < of.images:
            remedy += ", or give the images of all domains one scale"
        if not any(extremes.uses_more_than(share, intensity) for extremes in of.extremes):
            return used, remedy
    if of.bright < BRIGHT_SHARE:
        dark = f"{100 * (1 - BRIGHT_SHARE):g}% of the grey values are below {DARK} of 255"
        return f"{dark}{f'; {used}' if used else ''}", remedy
    return None


def plan_faults(plan: Plan) -> Iterator[Finding]:
    """Yields the faults that depend on data and recipe: groups that a split divides, which is a note if the data set is
    published so, and methods that cannot be trained, one finding per reason; and a note on a class that is rare.
    """
    counts, recipe, dataset = images_per_class(plan.dataset), plan.recipe, plan.dataset
    names = dataset.domain_names, dataset.class_names
    for text in imbalance(counts, *names, recipe.protocol.metric, recipe.weighs_classes):
        yield Finding("classes", text)
    for parts, (number, pairs) in divided_groups(plan.dataset, plan.splits).items():
        found = f"{number} {'is' if number == 1 else 'are'} in {parts}"
        if plan.dataset.as_published:
            yield Finding(GROUPS, f"{found}, as the data set is published")
        else:
            remedy = "change the split so that a group is on one side, or correct the groups"
            yield Finding(GROUPS, f"{found}: {_list_lines(pairs)}", remedy)
    for reason, items in plan.skipped.items():
        first, remedy = next(iter(items.values())), "add a domain"
        remedy = "leave pick out" if first.picks_across_domains else remedy
        if first.skipped is not None:
            leaves = "set center: zero" if first.start_key == "center" else f"leave {first.start_key} out"
            remedy = "use an encoder with a text side" if first.algorithm.cls.needs_text else leaves
        skipped = f"{', '.join(items)} {'is' if len(items) == 1 else 'are'} skipped ({reason})"
        yield Finding("methods", skipped, f"remove these methods from the recipe, or {remedy}")


def _find_repeated_images(dataset: ImageDataset, hashes: FileHashes, splits: Sequence[Split]) -> Iterator[Finding]:
    """Yields one finding if the files of some images occur more than once, byte for byte."""
    repeated = hashes.duplicates()
    if not repeated:
        return
    copy_of = np.full(len(dataset), -1)  # [N], the number of the set of copies that an image belongs to
    for number, rows in enumerate(repeated):
        copy_of[rows] = number
    counts = list[str]()
    for values, places in ((dataset.domains, "more than one domain"), (dataset.labels, "two classes")):
        if count := sum(len({*values[rows].tolist()}) > 1 for rows in repeated):
            counts.append(f"{count} in {places}")
    # −1 is no copy: two roles that both have images without copies share none
    sets = [
        {role: {*np.unique(copy_of[rows]).tolist()} - {-1} for role, rows in roles(split).items()} for split in splits
    ]
    none = f"none in two of {', '.join(ROLES)}" if splits else ""
    for role, other in combinations(ROLES, 2):
        if shared := len(set[int]().union(*(in_role[role] & in_role[other] for in_role in sets))):
            counts.append(f"{shared} in {role} and {other}")
            none = ""
    counts += [none] if none else []
    first = repeated[0]
    # a pair from two domains, if there is one: it makes a held-out domain partly seen
    other_domain = (row for row in first if dataset.domains[row] != dataset.domains[first[0]])
    pair = f"{dataset.name(first[0])} and {dataset.name(next(other_domain, first[1]))}"
    remedy = "remove one of each pair, or both where their labels differ"
    copies = f"{'1 image has' if len(repeated) == 1 else f'{len(repeated)} images have'} copies"
    places = f", {', '.join(counts)}".replace(" in ", " of them in ", 1) if counts else ""
    yield Finding(COPIED, f"{copies} ({sum(map(len, repeated))} files){places}; the first: {pair}", remedy)


def roles(split: Split) -> dict[str, np.ndarray]:
    """Returns {role: rows, int64}; test images on which `oracle` selects are test images."""
    rows = {name: of.numpy() for name, of in split.evaluation.items()}
    test = [rows.pop(name) for name in ("test", "test_val") if name in rows]
    validation, train = list(rows.values()), [of.numpy() for of in split.train]
    # a split may lack a role, and `np.concatenate` refuses an empty list
    none = np.empty(0, np.int64)
    return {role: np.concatenate([none, *of]) for role, of in zip(ROLES, (train, validation, test), strict=True)}


def write_copies(plan: Plan, hashes: FileHashes, directory: RunDirectory) -> bool:
    """Writes copies.csv: a row per file of an image that occurs more than once. Returns whether it is new or differs.

    A column for each held-out set has the role of the file in the split of the first seed.
    """
    repeated, dataset, path = hashes.duplicates(), plan.dataset, directory.path / COPIES
    if not repeated:
        path.unlink(missing_ok=True)
        return False
    role_of = np.full((len(plan.splits), len(dataset)), "", object)
    for number, split in enumerate(plan.splits):
        for role, of_role in roles(split).items():
            role_of[number, of_role] = role
    held_out = (f"{set_name(split.test_domains)} held out" for split in plan.splits)
    columns = ["copies", "path", "domain", "class", *held_out]
    lines = [csv_line(columns, columns)]
    for number, rows in enumerate(repeated):
        for row in rows:
            domain, label = dataset.domain_names[dataset.domains[row]], dataset.class_names[dataset.labels[row]]
            lines.append(csv_line(columns, [number, dataset.name(row), domain, label, *role_of[:, row]]))
    content = "".join(lines).encode("utf-8", "surrogateescape")  # a path that is not UTF-8
    if path.is_file() and path.read_bytes() == content:
        return False
    directory.write_bytes(COPIES, content)
    return True


def _list_lines(parts: Sequence[str]) -> str:
    more = [f"and {len(parts) - NAMED_AT_MOST} more"] if len(parts) > NAMED_AT_MOST else []
    return "; ".join([*parts[:NAMED_AT_MOST], *more])


def divided_groups(dataset: ImageDataset, splits: Sequence[Split]) -> dict[str, tuple[int, list[str]]]:
    """Returns {two parts of a split: (number of groups that are in both, a pair of images per group)}.

    Only a split that comes with the data can have such groups; the other splits are made so that they have none.
    """
    divided = dict[str, tuple[int, list[str]]]()
    if dataset.groups is None:
        return divided
    for part, other in PARTS:
        pairs = dict[int, str]()
        for split in splits:
            rows = {"training": torch.cat(split.train), **split.evaluation}
            first, second = (rows[name].numpy() if name in rows else np.empty(0, np.int64) for name in (part, other))
            groups, i, j = np.intersect1d(dataset.groups[first], dataset.groups[second], return_indices=True)
            for group, a, b in zip(groups.tolist(), first[i].tolist(), second[j].tolist(), strict=True):
                if group >= 0:  # −1: in no group
                    pairs.setdefault(group, f"{dataset.name(a)} and {dataset.name(b)}")
        if pairs:
            divided[f"{part} and {other}"] = len(pairs), [*pairs.values()]
    return divided


def log_left_out(dataset: ImageDataset) -> None:
    """Warns of what yields no image: the first lines of a run."""
    for finding in find_left_out(dataset):
        logger.warning("finding: %s", finding.line)


def log_findings(findings: Sequence[Finding], copies: str) -> None:
    """Says what else is wrong with the data, and notes.

    `copies`: where all copies are listed; "": that was said at an earlier start.
    """
    for finding in findings:
        if finding.remedy is None:
            logger.info("note: %s", finding.line)
        elif finding.what not in (COPIED, LEFT_OUT):
            logger.warning("finding: %s", finding.line)
        elif finding.what == COPIED and copies:
            logger.warning("finding: %s%s", finding.line, copies)
