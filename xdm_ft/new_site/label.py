"""Which images of a new site to label: `evaluation/few_labels.py` on the site's images, and a table to fill in."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F

from xdm_ft.evaluation.few_labels import choose_images, fewest_groups, widest_half_width
from xdm_ft.evaluation.predictions import effective_number
from xdm_ft.export import probabilities
from xdm_ft.export.predict import decimals
from xdm_ft.export.predictor import Model
from xdm_ft.export.sources import Item, Purpose, Sources
from xdm_ft.new_site.images import group_numbers, readable, unlabelled_images
from xdm_ft.new_site.stored import Bought, read_stored
from xdm_ft.runtime.errors import UserError, plural, printable

logger = logging.getLogger("xdm_ft")
SEED = 0  # of all draws: the same images, model and budget give the same table
FEW_GROUPS = 8  # that half of them are enough to adapt: 4 folds


@dataclass(frozen=True)
class ToLabel:
    """An image to label."""

    item: Item
    purpose: Purpose
    predicted: str
    probability: float  # of that class


@dataclass(frozen=True)
class Labelling:
    model: str
    rows: list[ToLabel]
    images: int  # that were chosen from
    evaluate: int  # chosen at random, to measure the model
    adapt: int  # chosen to adapt it
    unknown: int  # of these, that seem to belong to no class
    half_width: float  # of the 95% interval of an accuracy of 50%, the widest, that `evaluate` will give
    bought: Bought | None  # what the nearest budget buys at the held-out domains; None: no file tells
    groups: int | None  # that were chosen; None: images assumed independent
    seed: int
    copies: int  # of other images here: left out
    training_images: int | None  # images here that trained the model: left out; None: unknown
    unreadable: dict[str, str]


def label(
    model: Model,
    name: str,
    paths: Sequence[str],
    budget: int,
    group: str | None,
    batch_size: int | None,
    *,
    allow_few_groups: bool = False,
) -> Labelling:
    """Chooses at most `budget` of the images of `paths`, see `Sources`.

    Groups are the column `group` of a table, or what `group` says. Raises `UserError` for images that cannot be listed
    or have no group, and for few groups.
    """
    stored = None if model.config.site_xxh3 is None else read_stored(model.folder, model.config)
    budgets = () if stored is None else stored.about.budgets
    sources = Sources(paths, group, option="--group", column="group")
    listed = unlabelled_images(model, name, sources)
    _refuse_names(listed.items)
    if (groups := group_numbers(listed.items)) is not None and groups.max() + 1 < FEW_GROUPS and not allow_few_groups:
        few = f"{plural(int(groups.max()) + 1, 'group')} are too few to evaluate and adapt"
        raise UserError(f"--group: {few}; add images of {FEW_GROUPS} or more, or --allow-few-groups")
    # halves of unit features: 100,000 images of 1,024 take 0.2 GB
    z = np.empty((len(listed.items), model.config.encoder.width), np.float16)
    largest, classes = np.empty((len(z), 2), np.float32), np.empty(len(z), np.int64)
    items, unreadable, flagged = list[Item](), dict[str, str](), np.zeros(len(z), bool)
    for batch in readable(model, name, paths[0], listed.items, unreadable, what="label", batch_size=batch_size):
        rows, p = slice(len(items), len(items) + len(batch.items)), probabilities(batch.logits).numpy()
        # stable: of equal probabilities the first class is predicted, as by `predict`
        order = np.argsort(-p, axis=1, kind="stable")[:, :2]
        classes[rows], largest[rows] = order[:, 0], np.take_along_axis(p, order, 1)
        read = model.module.head_input(batch.encoded)
        z[rows] = F.normalize(read, dim=1).half().numpy()
        flagged[rows] = False if stored is None else stored.is_unknown(read)
        items += batch.items
    n, groups = len(items), group_numbers(items)
    sizes = np.ones(n, np.int64) if groups is None else np.bincount(groups)
    if groups is not None and fewest_groups(len(sizes)) * sizes.max() > n:
        large = printable(items[int((groups == sizes.argmax()).argmax())].group)
        has = f"{100 * sizes.max() / n:.0f}% of the images, but at most {100 / fewest_groups(len(sizes)):.0f}%"
        logger.warning("group %s has %s of those to evaluate: it counts too little there", large, has)
    share = None if stored is None else stored.unknown_share(flagged[:n], sizes)
    unknown = None if share is None or share.low <= 0 else flagged[:n]
    chosen = choose_images(z[:n], largest[:n], budget, np.random.default_rng(SEED), groups, unknown=unknown)
    purposes: dict[Purpose, np.ndarray] = {"evaluate": chosen.evaluate, "adapt": chosen.adapt}
    pairs = [(purpose, row) for purpose, rows_of in purposes.items() for row in rows_of]
    values = decimals(largest[[row for _, row in pairs], 0])
    rows_to_label = [
        ToLabel(items[row], purpose, model.class_names[classes[row]], value)
        for (purpose, row), value in zip(pairs, values, strict=True)
    ]
    drawn = (
        len(chosen.evaluate) if groups is None else effective_number(np.unique_counts(groups[chosen.evaluate]).counts)
    )
    return Labelling(
        model=name,
        rows=rows_to_label,
        images=n,
        evaluate=len(chosen.evaluate),
        adapt=len(chosen.adapt),
        unknown=0 if unknown is None else int(unknown[chosen.adapt].sum()),
        half_width=widest_half_width(drawn, groups is not None),
        bought=min(budgets, key=lambda of: abs(of.budget - budget), default=None),
        groups=None if groups is None else len(np.unique(groups[np.concatenate(chosen)])),
        seed=SEED,
        copies=listed.copies,
        training_images=listed.training_images,
        unreadable=unreadable,
    )


def _refuse_names(items: Sequence[Item]) -> None:
    """Raises `UserError` for a name that no table can hold: tables are UTF-8."""
    for item in items:
        if not item.path.isprintable() and any("\ud800" <= character <= "\udfff" for character in item.path):
            raise UserError(f"{printable(item.path)}: the name is not UTF-8, so a table cannot hold it; rename it")
