"""The data checks of `xdm-ft doctor`: image counts, broken images, and the faults that a run reports too."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from typing import TYPE_CHECKING

from xdm_ft.experiment.faults import Finding, data_faults, fault, images_of, plan_faults
from xdm_ft.experiment.plan import Plan, make_plan, read_data
from xdm_ft.features.cache import cache_folder
from xdm_ft.features.hashes import hash_files
from xdm_ft.images.dataset import ImageDataset
from xdm_ft.images.decode import scan
from xdm_ft.images.transforms import NotAStrip, Preprocessing
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.machine import cores

if TYPE_CHECKING:
    from xdm_ft.features.hashes import FileHashes
    from xdm_ft.recipe.settings import Recipe

Checked = Generator[Finding, None, tuple[ImageDataset, "FileHashes", Plan | None] | None]


def check_data(recipe: Recipe, preprocessing: Preprocessing | None) -> Checked:
    """Yields findings. Returns the data, a hash of every image, and the plan, if data and recipe fit.

    None: the data can not be read at all.

    `preprocessing` is the encoder's; None if the encoder can not be built.
    """
    dataset: ImageDataset | None
    try:
        dataset = read_data(recipe)
    except UserError as error:
        yield from fault("data", error)
        dataset = _with_any_counts(recipe)
    if dataset is None:
        return None
    count = plural(len(dataset), "image")
    yield Finding("data", f"{count}, {plural(len(dataset.domain_names), 'domain')}, images per class and domain:")
    yield from counts(dataset)
    unreadable = scan(dataset, cores(), None if preprocessing is None else NotAStrip(preprocessing))
    yield from broken(dataset, unreadable)
    plan = yield from planned(recipe, dataset)
    if plan is not None and unreadable:
        # a run with data.on_bad_image: skip leaves these images out, and what remains may be too little for a split
        yield from planned(recipe, dataset, unreadable)
    hashes = hash_files(dataset, cache_folder(recipe.features), show=True)
    found = list(data_faults(dataset, hashes, plan.splits_of_all_seeds if plan else ()))
    if plan is not None:
        found += plan_faults(plan)
    yield from found or [Finding("images and groups", "no image occurs twice, no group is in both training and test")]
    return dataset, hashes, plan


def _with_any_counts(recipe: Recipe) -> ImageDataset | None:
    """Returns a benchmark whose image counts are wrong, so that its other faults are found too; else None."""
    settings = recipe.data.kwargs()
    if settings.get("counts") != "published":
        return None
    try:
        dataset: ImageDataset = recipe.data.cls(**(settings | {"counts": "any"}))
    except UserError:  # the stricter check has reported this fault already
        return None
    return dataset


def counts(dataset: ImageDataset) -> Iterator[Finding]:
    """Yields the number of images of each domain, then those of each class by domain."""
    images = images_of(dataset)
    yield Finding("domains", ", ".join(f"{d} {n}" for d, n in zip(dataset.domain_names, images.sum(0), strict=True)))
    for name, row in zip(dataset.class_names, images, strict=True):
        yield Finding(f"class {name}", " ".join(map(str, row)))


def broken(dataset: ImageDataset, unreadable: dict[int, str]) -> Iterator[Finding]:
    if not unreadable:
        yield Finding("images", "all decode")
    for row, reason in unreadable.items():
        yield Finding(
            "image",
            f"{dataset.name(row)} does not decode: {reason}",
            "repair or remove it, or set data.on_bad_image: skip",
        )


def planned(
    recipe: Recipe, dataset: ImageDataset, unreadable: Collection[int] = ()
) -> Generator[Finding, None, Plan | None]:
    """Returns the plan. If data and recipe do not fit, yields the fault and returns None."""
    try:
        return make_plan(recipe, dataset, unreadable)
    except UserError as error:
        yield from fault("plan", error)
        return None
