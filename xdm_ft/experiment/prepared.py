"""The inputs of training that take long to compute: cached features, class embeddings and the unreadable images."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from xdm_ft.cut.cut import require_blocks
from xdm_ft.cut.trainable import LowRank, Trainable
from xdm_ft.encoders import Encoder, TextEncoder
from xdm_ft.experiment.cluster_connection import device_of
from xdm_ft.experiment.cluster_extraction import extraction_on
from xdm_ft.experiment.cuts import counted, counted_unhashed, cuts_of, decided
from xdm_ft.features.cache import Features, extract
from xdm_ft.features.cache_key import weights_digest
from xdm_ft.features.decoding import undecodable
from xdm_ft.features.file_hashes import FileHashes, hash_files
from xdm_ft.features.forward import refuse_unreadable
from xdm_ft.features.store import cache_folder
from xdm_ft.images.dataset import ImageDataset
from xdm_ft.images.loader import own_cores
from xdm_ft.recipe.check import checked_algorithm
from xdm_ft.recipe.components import Component
from xdm_ft.recipe.method import MethodItem
from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.watchdog import from_main, wait_for_everyone
from xdm_ft.storage.digests import digest
from xdm_ft.training import Job
from xdm_ft.training.end_to_end.model import check_trainable, check_updates

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")


@dataclass(frozen=True)
class PreparedEncoder:
    """An encoder as it is before training, and what is computed once from it."""

    encoder: Encoder
    weights: str  # hash of its weights
    features: Features | None  # None: no method reads them
    text_weights: dict[tuple[str, ...] | None, Tensor]
    """{prompts of a method: class embeddings × logit scale, float32 [C,K]}; the key None: the encoder's prompts."""
    activations: dict[Trainable, Features | None]
    """{what trains above a cut: cached activations below it}; None: they are computed at every step."""

    @property
    def width(self) -> int:
        """K, the size of its features."""
        return self.encoder.width

    def features_of(self, job: Job) -> Features:
        """Returns the features as a model on cached features reads them."""
        assert self.features is not None, "`prepare` extracts features for every method that reads them"
        return self.features.normalized() if job.normalized else self.features


@dataclass(frozen=True)
class Prepared:
    encoders: dict[str | None, PreparedEncoder]  # by the label in results; None: the recipe has one encoder
    unreadable: dict[int, str]  # row → why the image does not decode, for one of the encoders
    content: str  # hash of all images, in the order of the rows

    def of(self, item: MethodItem) -> PreparedEncoder:
        return self.encoders[item.encoder_label]


def build_encoder(component: Component, seed: int) -> Encoder:
    """Builds a new encoder. Random weights depend only on the seed. Sets torch's global seed."""
    from accelerate.utils import set_seed

    set_seed(seed)
    encoder: Encoder = component.build()
    return encoder


def build_encoders(recipe: Recipe) -> dict[str | None, Encoder]:
    """Builds the encoders of a recipe, by their labels in results, with the weights of the first seed.

    Raises `UserError` if all methods need class embeddings that their encoders lack, or if one can not train the part
    of its encoder that the recipe says.
    """
    seed, encoders = recipe.protocol.seeds[0], dict[str | None, Encoder]()
    for place, (label, component) in enumerate(by_label(recipe).items()):
        try:
            encoders[label] = build_encoder(component, seed)
        except UserError as error:
            if label is None:
                raise
            lines = (line if re.match(r"encoder\b", line) else f"encoder: {line}" for line in error.args)
            raise UserError(*(line.replace("encoder", f"encoders.{place}", 1) for line in lines)) from error
    for item in with_text(recipe, encoders).served:
        if item.trainable is not False:
            _check_trained(recipe, item, encoders[item.encoder_label])
    return encoders


def with_text(recipe: Recipe, encoders: Mapping[str | None, Encoder]) -> Recipe:
    """Returns the recipe with those methods marked as skipped that need class embeddings which their encoder lacks.

    Only its weights show that of an encoder with a text side. Raises `UserError` if no method is left.
    """

    def marked(item: MethodItem) -> MethodItem:
        encoder = encoders[item.encoder_label]
        reason = encoder.text_reason if item.reads_text and isinstance(encoder, TextEncoder) else ""
        return replace(item, skipped=f"class embeddings are needed, but {reason}") if reason else item

    methods = tuple(map(marked, recipe.methods))
    if all(item.skipped is not None for item in methods):
        raise UserError(f"methods: {methods[0].label}: {methods[0].skipped}")
    return recipe if methods == recipe.methods else replace(recipe, methods=methods)


def check_low_rank(recipe: Recipe, encoders: Mapping[str | None, Encoder]) -> None:
    """Raises `UserError` if an encoder can not have the low-rank updates that methods train: before all else.

    It needs peft, which what only reads trained models does not.
    """
    for label, trainable in dict.fromkeys((item.encoder_label, item.trainable) for item in recipe.served):
        if isinstance(trainable, LowRank):
            check_updates(encoders[label], trainable)


def _check_trained(recipe: Recipe, item: MethodItem, encoder: Encoder) -> None:
    """Raises `UserError` if a method can not train its part of the encoder: before all else, not after hours."""
    if recipe.training.layer_decay != 1 or "layer_decay" in recipe.search.distributions:
        require_blocks(encoder)
    check_trainable(encoder, checked_algorithm(item, recipe), item.trainable)


def by_label(recipe: Recipe) -> dict[str | None, Component]:
    """Returns the encoders of a recipe by their labels in results. The label of the only one is None."""
    return {item.encoder_label: item.encoder for item in recipe.methods}


def log_encoder(encoder: Encoder) -> None:
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

    `environment`: of the results.json of a run that goes on; activations that it cached are cached, others are not.
    `hashes`: of `image_hashes`, if they are known. Raises `UserError` if an image does not decode and
    `data.on_bad_image` is `error`.
    """
    on_bad_image, main = recipe.data_common.on_bad_image, bool(accelerator.is_main_process)
    index = index_folder(recipe)
    hashes = image_hashes(recipe, dataset, accelerator) if hashes is None else hashes
    found, unreadable = dict[str | None, PreparedEncoder](), dict[int, str]()
    recipe = with_text(recipe, encoders)
    with extraction_on(recipe) as elsewhere:
        extracted = partial(
            extract,
            dataset=dataset,
            hashes=hashes,
            settings=recipe.features,
            on_bad_image=on_bad_image,
            device=accelerator.device,
            show=main,
            augmentation=recipe.train_augmentation,
            elsewhere=elsewhere,
        )
        for label, component in by_label(recipe).items():
            encoder = encoders[label]
            if main:
                log_encoder(encoder)
            items = [item for item in recipe.served if item.encoder is component]
            features = extracted(encoder) if recipe.needs_features(component) else None
            activations = dict[Trainable, Features | None]()
            device = device_of(recipe.cluster, accelerator.device)
            count = counted(recipe, dataset, hashes, device) if index else counted_unhashed(recipe, dataset, device)
            cuts = cuts_of(recipe, encoder, items, count, decided(environment, label))
            # by the time that another process looks, the disk may be fuller
            for cut, is_cached in zip(cuts, from_main(accelerator, [cut.is_cached for cut in cuts]), strict=True):
                if main:
                    logger.info("%s", cut.text())
                cached = extracted(cut.below, streamed=True) if is_cached else None
                activations |= {trainable: cached for trainable in cut.serves}
            read = [one for one in (features, *activations.values()) if one is not None]
            # before training end to end, which would fail at a broken image after hours; extraction decodes all too
            if not read and any(item.trainable is not False for item in items):
                broken = undecodable(dataset, hashes, encoder.preprocessing, index, own_cores(), main)
                refuse_unreadable(broken, dataset, on_bad_image)
                unreadable |= broken
            for one in read:
                unreadable |= one.unreadable
            texts = text_weights(items, encoder, dataset.class_names)
            found[label] = PreparedEncoder(encoder, weights_digest(encoder), features, texts, activations)
    if unreadable:
        logger.warning("%d of %d images do not decode and are left out", len(unreadable), len(dataset))
    return Prepared(found, dict(sorted(unreadable.items())), digest(hashes.digests, bits=128))


def index_folder(recipe: Recipe) -> Path | None:
    """Returns the folder of the hashes, or None if it can not be used and no method reads what is cached there."""
    try:
        return cache_folder(recipe.features)
    except UserError:
        if not all(recipe.trains_on_images(item) for item in recipe.methods):
            raise
        return None


def image_hashes(recipe: Recipe, dataset: ImageDataset, accelerator: Accelerator) -> FileHashes:
    """Returns the hash of every image. Processes of a run divide the files of which no hash is known."""
    index, main, ranks = index_folder(recipe), bool(accelerator.is_main_process), accelerator.num_processes
    if index is not None and ranks > 1:
        found = hash_files(dataset, index, main, share=(accelerator.process_index, ranks))
        wait_for_everyone(accelerator)  # the others' hashes are in the index now, if it is the same one
        if found.digests.any(1).sum() + len(found.unreadable) == len(dataset):
            return found
    return hash_files(dataset, index, main)


def text_weights(
    items: Sequence[MethodItem], encoder: Encoder, class_names: tuple[str, ...]
) -> dict[tuple[str, ...] | None, Tensor]:
    """Returns `PreparedEncoder.text_weights` for all prompts that the methods use."""
    weights: dict[tuple[str, ...] | None, Tensor] = {}
    for prompts in dict.fromkeys(item.block.prompts for item in items if item.reads_text):
        assert isinstance(encoder, TextEncoder), "checked with the recipe"
        weights[prompts] = encoder.logit_scale * encoder.text_embeddings(class_names, prompts)
    return weights
