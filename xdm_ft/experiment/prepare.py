"""The inputs of training that take long to compute: cached features and activations, class embeddings."""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xdm_ft.algorithms import Setup, text_confidence
from xdm_ft.augmentations import Augmentations
from xdm_ft.core import Task
from xdm_ft.cut import LastBlocks, LowRank, Trainable
from xdm_ft.cut.cut import Below, Cut, require_blocks
from xdm_ft.data.features import FeatureTable
from xdm_ft.encoders import Encoder, TextEncoder
from xdm_ft.experiment.cluster import device_of, extraction_on
from xdm_ft.experiment.plan import Plan, PlannedModel, index_folder
from xdm_ft.features.cache import Features, cache_path
from xdm_ft.features.extract import cached_images, cached_views, extract, refuse_unreadable
from xdm_ft.features.given import GivenFeatures, GivenText, given_features
from xdm_ft.features.hashes import FileHashes, find_undecodable, hash_files
from xdm_ft.features.key import weights_digest
from xdm_ft.images import ImageDataset
from xdm_ft.images.loader import DTYPES
from xdm_ft.model_sources.source import first_few
from xdm_ft.recipe.check import check_algorithm
from xdm_ft.recipe.components import Component
from xdm_ft.recipe.method import MethodItem
from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError, join_names
from xdm_ft.runtime.machine import own_cores
from xdm_ft.runtime.watchdog import from_main, wait_for_everyone
from xdm_ft.storage import digest
from xdm_ft.storage.atomic import is_writable
from xdm_ft.training import Job, balanced_class_weight
from xdm_ft.training.end_to_end.batch_norm import lone_values
from xdm_ft.training.end_to_end.model import check_trainable, check_updates, cut_of

if TYPE_CHECKING:
    from accelerate import Accelerator


logger = logging.getLogger("xdm_ft")
ROWS = 1 << 14  # images whose zero-shot probabilities are computed together
MAX_SHARE = 0.5  # of the free disk that `features.cut: auto` takes, for all cuts of an encoder together


@dataclass(frozen=True)
class PreparedEncoder:
    """An encoder as it is before training, and what is computed once from it."""

    encoder: Encoder
    weights: str  # hash of its weights; empty of given features
    features: Features | None  # None: no method reads them
    text_weights: dict[tuple[str, ...] | None, Tensor]
    """{prompts of a method: class embeddings × logit scale, float32 [C,K]}; the key None: the encoder's prompts."""
    activations: dict[Trainable, Features | None]
    """{what trains above a cut: cached activations below it}; None: they are computed at every step."""
    own_probability: dict[tuple[str, ...] | None, Tensor] = field(default_factory=dict)
    """{prompts: zero-shot probability of every image's own class, float32 [N]}, of methods with `anchor: clap`."""
    views: dict[Trainable, tuple[Augmentations, ...]] = field(default_factory=dict)
    """{what trains: augmentations whose views are behind the plain features or activations, equally many of each}"""

    def features_of(self, job: Job) -> Features:
        """Returns the features as a model on cached features reads them, with the views of its augmentation."""
        assert self.features is not None, "`prepare` extracts features for every method that reads them"
        features = self._views_of(job, self.features, False)
        # twice would be other bits
        return features.normalized() if job.normalized and not self.encoder.normalize else features

    def activations_of(self, job: Job, trainable: Trainable) -> Features | None:
        """Returns the activations that a model reads, with the views of its augmentation; None: it reads images."""
        cached = self.activations[trainable]
        kinds = self.views.get(trainable, ())
        if cached is None or (job.augmentations and job.augmentations not in kinds):
            return None
        return self._views_of(job, cached, trainable)

    def _views_of(self, job: Job, features: Features, trainable: Trainable) -> Features:
        kinds = self.views.get(trainable, ())
        if not kinds:
            return features
        each = features.views // len(kinds)
        number = kinds.index(job.augmentations) if job.augmentations else 0
        return features.of_views_alone(number * each, each if job.augmentations else 0)


@dataclass(frozen=True)
class Prepared:
    """What a run computes once, before training."""

    encoders: dict[str | None, PreparedEncoder]  # by the label in results; None: the recipe has one encoder
    unreadable: dict[int, str]  # row → why the image does not decode, for one of the encoders
    content: str  # hash of all images, in the order of the rows

    def to(self, device: torch.device) -> Prepared:
        """Returns the same with features on a device."""

        def moved(features: Features | None) -> Features | None:
            return None if features is None else features.to(device)

        encoders = dict[str | None, PreparedEncoder]()
        for label, encoder in self.encoders.items():
            activations = {trainable: moved(cached) for trainable, cached in encoder.activations.items()}
            encoders[label] = replace(encoder, features=moved(encoder.features), activations=activations)
        return replace(self, encoders=encoders)

    def for_method(self, item: MethodItem) -> PreparedEncoder:
        return self.encoders[item.encoder_label]


def build_encoder(component: Component, seed: int) -> Encoder:
    """Builds a new encoder. Random weights depend only on the seed. Sets torch's global seed."""
    from accelerate.utils import set_seed

    set_seed(seed)
    encoder: Encoder = component.build()
    return encoder


def build_encoders(recipe: Recipe, dataset: ImageDataset | None = None) -> tuple[Recipe, dict[str | None, Encoder]]:
    """Builds the encoders of a recipe, by their labels in results, with the weights of the first seed.

    Returns the recipe `with_text` too. `dataset`: needed if the recipe has no images; its features give what stands for
    an encoder. Raises `UserError` if all methods need class embeddings that their encoders lack, or if one cannot train
    the part of its encoder that the recipe says: before all else, not after hours.
    """
    if not recipe.has_images:
        assert isinstance(dataset, FeatureTable), "the data have the features"
        has_text = dataset.class_embeddings is not None
        given: dict[str | None, Encoder] = {None: (GivenText if has_text else GivenFeatures).of(dataset)}
        return with_text(recipe, given), given
    seed, encoders = recipe.protocol.seeds[0], dict[str | None, Encoder]()
    for position, (label, component) in enumerate(by_label(recipe).items()):
        try:
            encoders[label] = build_encoder(component, seed)
        except UserError as error:
            if label is None:
                raise
            # encoders name their keys as those of `encoder`, which a recipe with `encoders` does not have
            lines = (line if re.match(r"encoder\b", line) else f"encoder: {line}" for line in error.args)
            raise UserError(*(line.replace("encoder", f"encoders.{position}", 1) for line in lines)) from error
    recipe = with_text(recipe, encoders)
    for item in recipe.runnable_methods:
        if item.trainable is not False:
            encoder = encoders[item.encoder_label]
            if recipe.training.layer_decay != 1 or "layer_decay" in recipe.search.distributions:
                require_blocks(encoder)
            check_trainable(encoder, check_algorithm(item, recipe), item.trainable)
    return recipe, encoders


def with_text(recipe: Recipe, encoders: Mapping[str | None, Encoder]) -> Recipe:
    """Returns the recipe with those methods marked as skipped that need class embeddings which their encoder lacks.

    Methods that use them where there are any know it then. Only its weights show that of an encoder with a text side.
    Raises `UserError` if no method is left.
    """

    def marked(item: MethodItem) -> MethodItem:
        encoder = encoders[item.encoder_label]
        has_side = isinstance(encoder, TextEncoder)
        reason = encoder.text_reason if has_side else ""
        item = item.with_text(has_side and not reason)
        return (
            replace(item, skipped=f"class embeddings are needed, but {reason}") if reason and item.reads_text else item
        )

    methods = tuple(map(marked, recipe.methods))
    if all(item.skipped is not None for item in methods):
        raise UserError(f"methods: {methods[0].label}: {methods[0].skipped}")
    return recipe if methods == recipe.methods else replace(recipe, methods=methods)


def check_low_rank(recipe: Recipe, encoders: Mapping[str | None, Encoder]) -> None:
    """Raises `UserError` if an encoder cannot have the low-rank updates that methods train: before all else.

    It needs peft, which what only reads trained models does not.
    """
    for label, trainable in dict.fromkeys((item.encoder_label, item.trainable) for item in recipe.runnable_methods):
        if isinstance(trainable, LowRank):
            check_updates(encoders[label], trainable)


def check_prompts(recipe: Recipe, encoders: Mapping[str | None, Encoder], class_names: tuple[str, ...]) -> None:
    """Raises `UserError` if two classes are one text to an encoder whose class embeddings a method reads."""
    readers = [item for item in recipe.runnable_methods if item.reads_text]
    for label, prompts in dict.fromkeys((item.encoder_label, item.block.prompts) for item in readers):
        encoder = encoders[label]
        assert isinstance(encoder, TextEncoder), "checked with the recipe"
        encoder.read_prompts(class_names, prompts)


def check_batch_norm(plan: Plan, encoders: Mapping[str | None, Encoder], processes: int = 1) -> None:
    """Raises `UserError` if batch norm would train on one value: before all else, and not in the first step."""
    for model in plan.models:
        item, training, domains = model.item, model.training, len(model.split.train)
        if item.trainable is False or isinstance(item.trainable, LowRank) or model.skipped is not None:
            continue
        images = training.images_per_step(domains) // max(1, item.algorithm.cls.gradients_per_step(domains))
        encoder, parts = encoders[item.encoder_label], processes * training.accumulation
        if images >= 2 * parts or item.encoder_common.batch_norm == "frozen":
            continue
        lone = lone_values(encoder)
        if isinstance(item.trainable, LastBlocks):
            below = len(encoder.chain.blocks) - item.trainable.blocks
            lone = [name for name in lone if encoder.chain.began(name) > below]
        if lone:
            raise UserError(
                f"training.batch_size: {training.batch_size} gives one image to a pass of {item.label}, and batch norm "
                f"({first_few(lone)}) needs two; raise it, or set encoder.batch_norm: frozen"
            )


def by_label(recipe: Recipe) -> dict[str | None, Component]:
    """Returns the encoders of a recipe by their labels in results. The label of the only one is None."""
    return {item.encoder_label: item.encoder for item in recipe.methods}


def log_encoder(encoder: Encoder) -> None:
    if isinstance(encoder, GivenFeatures):
        logger.info("%s, %d per row", encoder.pretraining, encoder.width)
        return
    identity = encoder.identity()
    named = " ".join(str(identity[key]) for key in ("component", "model") if key in identity)
    logger.info("encoder: %s, %s, %d features", named, encoder.pretraining, encoder.width)


def prepare(
    recipe: Recipe,
    dataset: ImageDataset,
    encoders: Mapping[str | None, Encoder],
    accelerator: Accelerator,
    environment: Mapping[str, Any] | None = None,
    hashes: FileHashes | None = None,
) -> Prepared:
    """Reads features and activations from the cache, extracts the missing ones, and computes the class embeddings.

    Missing ones are computed by all processes of the run, or on the recipe's cluster.

    `recipe` and `encoders` are those of `build_encoders`.
    `environment`: of the results.json of a run that goes on; activations that it cached are cached, others are not.
    `hashes`: of `image_hashes`, if they are known. Raises `UserError` if an image does not decode and
    `data.on_bad_image` is `error`.
    """
    on_bad_image, main = recipe.data_common.on_bad_image, bool(accelerator.is_main_process)
    index, device = index_folder(recipe), device_of(recipe.cluster, accelerator.device)
    hashes = image_hashes(recipe, dataset, accelerator) if hashes is None else hashes
    prepared, unreadable = dict[str | None, PreparedEncoder](), dict[int, str]()
    extracted = partial(
        extract,
        dataset=dataset,
        hashes=hashes,
        settings=recipe.features,
        on_bad_image=on_bad_image,
        device=accelerator.device,
        show=main,
        elsewhere=extraction_on(recipe),
        accelerator=accelerator,
    )
    for label, component in by_label(recipe).items():
        encoder = encoders[label]
        if main:
            log_encoder(encoder)
        items = [item for item in recipe.runnable_methods if item.encoder is component]
        features, views = None, dict[Trainable, tuple[Augmentations, ...]]()
        if not recipe.has_images:
            features = given_features(dataset, accelerator.device)
        elif recipe.needs_features(component):
            views[False] = recipe.cached_augmentations(item for item in items if item.trainable is False)
            features = extracted(encoder, augmentations=views[False])
        counted = hashes if index else None
        cuts = cuts_of(recipe, encoder, items, dataset, device, counted, cached_cuts(environment, label))
        activations = dict[Trainable, Features | None]()
        # by the time that another process looks, the disk may be fuller
        for cut, is_cached in zip(cuts, from_main(accelerator, [cut.is_cached for cut in cuts]), strict=True):
            if main:
                logger.info("%s", cut.text())
            cached = extracted(cut.below, streamed=True, augmentations=cut.augmentations) if is_cached else None
            activations |= dict.fromkeys(cut.serves, cached)
            views |= dict.fromkeys(cut.serves, cut.augmentations)
        read = [features for features in (features, *activations.values()) if features is not None]
        # before training end to end, which would fail at a broken image after hours; extraction decodes all too
        if not read and any(item.trainable is not False for item in items):
            broken = find_undecodable(dataset, hashes, encoder.preprocessing, index, own_cores(), main, accelerator)
            refuse_unreadable(broken, dataset, on_bad_image)
            unreadable |= broken
        for of_images in read:
            unreadable |= of_images.unreadable
        texts = dict[tuple[str, ...] | None, Tensor]()
        for prompts in dict.fromkeys(item.block.prompts for item in items if item.reads_text):
            assert isinstance(encoder, TextEncoder), "checked with the recipe"
            texts[prompts] = encoder.logit_scale * encoder.text_embeddings(dataset.class_names, prompts)
        weights = weights_digest(encoder) if recipe.has_images or texts else ""
        confident = dict.fromkeys(item.block.prompts for item in items if recipe.reads_confidence(item))
        labels = torch.as_tensor(dataset.labels)
        likely = {prompts: own_probability(features, labels, texts[prompts], unreadable) for prompts in confident}
        prepared[label] = PreparedEncoder(encoder, weights, features, texts, activations, likely, views)
    if unreadable:
        logger.warning("%d of %d images do not decode and are left out", len(unreadable), len(dataset))
    return Prepared(prepared, dict(sorted(unreadable.items())), digest(hashes.digests, bits=128))


def own_probability(
    features: Features | None, labels: Tensor, text_weight: Tensor, unreadable: Collection[int]
) -> Tensor:
    """Returns the zero-shot probability of every image's own class, float32 [N]; 0 for an image that is not read."""
    assert features is not None, "`needs_features` counts methods with anchor: clap"
    unit, probability = features.normalized(), torch.zeros(len(labels))
    read = torch.tensor([row for row in range(len(labels)) if row not in unreadable])
    for rows in read.split(ROWS):
        of_classes = (unit[rows] @ text_weight.to(unit.device).T).softmax(1).cpu()
        probability[rows] = of_classes.gather(1, labels[rows, None].long())[:, 0]
    return probability


def image_hashes(recipe: Recipe, dataset: ImageDataset, accelerator: Accelerator) -> FileHashes:
    """Returns the hash of every image. Processes of a run divide the files of which no hash is known."""
    index, main, ranks = index_folder(recipe), bool(accelerator.is_main_process), accelerator.num_processes
    if index is not None and ranks > 1:
        hashes = hash_files(dataset, index, main, share=(accelerator.process_index, ranks))
        wait_for_everyone(accelerator)  # the others' hashes are in the index now, if it is the same one
        # else the index is not shared, and each process hashes all files by itself
        if hashes.digests.any(1).sum() + len(hashes.unreadable) == len(dataset):
            return hashes
    return hash_files(dataset, index, main)


@dataclass(frozen=True)
class RecipeCut:
    """One cut of an encoder, which several methods may share."""

    below: Below
    serves: tuple[Trainable, ...]  # what trains above it
    augmentations: tuple[Augmentations, ...]  # whose views are cached too
    on_images: tuple[str, ...]  # labels of rows above it that compute activations at every step
    activations: int  # one per image and view
    missing: int  # activations that the cache lacks
    dtype: torch.dtype  # of cached activations
    why_computed: str = ""  # at every step; empty: they are cached

    @property
    def is_cached(self) -> bool:
        return not self.why_computed

    @property
    def bytes(self) -> int:
        """Bytes on the disk of all activations, cached or not."""
        return self.activations * math.prod(self.below.cut.shape) * self.dtype.itemsize

    @property
    def missing_bytes(self) -> int:
        return self.missing * math.prod(self.below.cut.shape) * self.dtype.itemsize

    def text(self) -> str:
        which = f"cut before {self.below.cut.name}: activations {'×'.join(map(str, self.below.cut.shape))}"
        if not self.is_cached:
            return f"{which}, computed at every step ({self.why_computed})"
        missing = f", {self.missing_bytes / 1e6:,.1f} MB of it to be computed" if self.missing else ""
        cached = f"{which}, cached: {self.activations} of them take {self.bytes / 1e6:,.1f} MB{missing}"
        return cached + (f"; {join_names(self.on_images)}: computed at every step" if self.on_images else "")


def cuts_of(
    recipe: Recipe,
    encoder: Encoder,
    items: Sequence[MethodItem],
    dataset: ImageDataset,
    device: torch.device,
    hashes: FileHashes | None = None,
    was_cached: Mapping[str, bool] | None = None,
) -> list[RecipeCut]:
    """Returns the cuts below the methods of one encoder. Raises `UserError` if the encoder cannot be cut there.

    `device`: computes the activations. `hashes`: copies of an image then count as one; without them all images count as
    different ones, and those that the cache has as theirs: no image is read, and nothing written. `was_cached`: as
    `cached_cuts` returns it, for a run that goes on.
    """
    above_cut = dict[str, tuple[Cut, list[Trainable]]]()
    for trainable in dict.fromkeys(item.trainable for item in items):
        if isinstance(trainable, LastBlocks | LowRank):
            cut = cut_of(encoder, trainable)
            above_cut.setdefault(cut.name, (cut, []))[1].append(trainable)
    settings, cuts, planned = recipe.features, list[RecipeCut](), 0
    for cut, serves in sorted(above_cut.values(), key=lambda pair: -pair[0].number):
        below, above = Below(cut), [item for item in items if item.trainable in serves]
        augmentations = recipe.cached_augmentations(above)
        if hashes is not None:
            views = cached_views(below, dataset, hashes.images, settings, augmentations, device)
            count, missing = len(views) * len(hashes.images.contents), sum(len(store.missing()) for _, store in views)
        else:
            cached = cached_images(below, dataset.decoder, settings, augmentations, device)
            count, missing = len(cached) * len(dataset), sum(max(0, len(dataset) - images) for images in cached)
        on_images = tuple(item.label for item in above if recipe.trains_on_images(item))
        about = augmentations, on_images, count, missing, DTYPES[settings.precision]
        of_recipe = RecipeCut(below, tuple(serves), *about)
        kinds = dict.fromkeys(str(recipe.augmentation_of(item)) for item in above)
        drawn = [*kinds] if len(on_images) == len(above) else []
        before = (was_cached or {}).get(cut.name)
        of_recipe = replace(of_recipe, why_computed=_why_computed(recipe, of_recipe, drawn, planned, before))
        cuts.append(of_recipe)
        planned += of_recipe.missing_bytes if of_recipe.is_cached else 0
    return cuts


def _why_computed(recipe: Recipe, cut: RecipeCut, drawn: Sequence[str], planned: int, before: bool | None) -> str:
    """Returns why activations are computed at every step; empty if they are cached.

    `drawn`: the augmentations of the methods above, if none of them reads what is cached. `planned`: bytes that other
    cuts will take. `before`: whether they were cached when the run started.
    """
    settings = recipe.features
    if settings.cut == "compute":
        return "features.cut: compute"
    if drawn:
        return f"train_augmentation: {join_names(drawn)} draws anew each time; features.views caches draws"
    if before is False and settings.cut == "auto":
        return "features.cut: auto, as when this run started"
    if before or settings.cut == "cache" or not cut.missing:
        return ""
    folder = existing = cache_path(settings)
    if folder.exists() and not is_writable(folder):
        return f"features.cut: auto, as {folder} cannot be written"
    # the first run makes the folder, and a disk can be asked only through a folder that exists
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if cut.missing_bytes + planned > MAX_SHARE * free:
        needs = f"{cut.missing_bytes / 1e6:,.1f} MB do not fit in half of the {free / 1e6:,.1f} MB that are free"
        return f"features.cut: auto, as {needs}"
    return ""


def cached_cuts(environment: Mapping[str, Any] | None, label: str | None) -> dict[str, bool]:
    """Returns {module above a cut: whether the activations below it are cached} of an earlier run of this encoder.

    `environment`: of its results.json, None if there is none. A run that goes on follows it, whatever the disk looks
    like now, so that all its models are trained on the same numbers.
    """
    features = (environment or {}).get("features", {})
    of_encoder = features if label is None else features.get(label, {})
    return {name: key is not None for name, key in of_encoder.get("cuts", {}).items()}


ExternalValues = Mapping[str, Mapping[int, float]]
"""{selection rule: {step: value}}, for a rule whose values are measured on other models; as `Job.external_values`."""


def make_job(plan: Plan, prepared: Prepared, model: PlannedModel, external_values: ExternalValues) -> Job:
    recipe, item, split, inputs = plan.recipe, model.item, model.split, prepared.for_method(model.item)
    class_weight = None
    if recipe.class_weights_of(item) == "balanced":
        labels = plan.annotations.labels[torch.cat(split.train)]
        class_weight = balanced_class_weight(labels, len(plan.dataset.class_names))
    anchor, classes = None, len(plan.dataset.class_names)
    if item.block.anchor == "clap":
        rows = torch.cat(split.train)
        of_own = inputs.own_probability[item.block.prompts][rows]
        anchor = text_confidence(of_own, plan.annotations.labels[rows], classes)
    elif item.block.anchor:
        anchor = torch.full((classes,), float(item.block.anchor))
    setup = Setup(
        task=Task(plan.dataset.class_names, split.train_domains, recipe.protocol.metric),
        width=inputs.encoder.width,
        steps=model.steps,
        seed=model.key.seed,
        loss_average=recipe.training.loss_average,
        head=item.head.build,
        head_init=item.head_init,
        text_weight=inputs.text_weights[item.block.prompts] if item.reads_text else None,
        class_weight=class_weight,
        anchor=anchor,
    )
    return Job(
        key=model.key,
        split=split,
        setup=setup,
        make=item.algorithm.build,
        sharpness=item.sharpness.build() if item.sharpness else None,
        training=model.training,
        averaging=item.averaging.build() if item.averaging else None,
        normalized=item.reads_normalized,
        augmentations=recipe.augmentation_of(item),
        external_values=external_values,
    )
