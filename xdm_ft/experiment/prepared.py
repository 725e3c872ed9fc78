"""The inputs of training that take long to compute: cached features, class embeddings and the unreadable images."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from xdm_ft.data import ImageDataset
from xdm_ft.data._images import scan, unreadable_message
from xdm_ft.data._transforms import NotAStrip, Preprocessing
from xdm_ft.encoders import Encoder, TextEncoder
from xdm_ft.errors import UserError
from xdm_ft.experiment.machine import cores
from xdm_ft.features.cache import Features, extract
from xdm_ft.features.cache_key import weights_digest
from xdm_ft.features.file_hashes import hash_files
from xdm_ft.features.store import cache_folder
from xdm_ft.recipe.read import Recipe
from xdm_ft.storage.digests import digest

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")


@dataclass(frozen=True)
class Prepared:
    pretraining: str  # of the encoder, for the protocol line
    normalize: bool  # its features are L2-normalised
    preprocessing: Preprocessing  # of its images
    width: int  # K, the size of its features
    features: Features | None
    text_weights: dict[tuple[str, ...] | None, Tensor]
    """{prompts of a method: class embeddings × logit scale, float32 [C,K]}; the key None: the encoder's prompts."""
    unreadable: dict[int, str]  # row → why the image does not decode
    content: str  # hash of all images, in the order of the rows
    weights: str  # hash of the encoder's weights before training
    identity: dict[str, object]  # of the encoder, as `Encoder.identity`


def build_encoder(recipe: Recipe, seed: int) -> Encoder:
    """Builds a new encoder. Random weights depend only on the seed. Sets torch's global seed.

    Raises `UserError` if a method needs class embeddings and this model has none.
    """
    from accelerate.utils import set_seed

    set_seed(seed)
    encoder: Encoder = recipe.encoder.build()
    reading = [item.label for item in recipe.methods if item.reads_text]
    if reading and isinstance(encoder, TextEncoder) and encoder.text_reason:
        raise UserError(f"methods: {', '.join(reading)}: class embeddings are needed, but {encoder.text_reason}")
    return encoder


def log_encoder(encoder: Encoder) -> None:
    identity = encoder.identity()
    named = " ".join(str(identity[key]) for key in ("component", "model") if key in identity)
    logger.info("encoder: %s, %s, %d features", named, encoder.pretraining, encoder.width)


def prepare(recipe: Recipe, dataset: ImageDataset, encoder: Encoder, accelerator: Accelerator) -> Prepared:
    """Reads features from the cache, extracts the missing ones, and computes the class embeddings.

    Raises `UserError` if an image does not decode and `data.on_bad_image` is `error`.
    """
    features = None
    on_bad_image = recipe.data_common.on_bad_image
    if accelerator.is_main_process:
        log_encoder(encoder)
    hashes = hash_files(dataset, index_folder(recipe), accelerator.is_main_process)
    if recipe.needs_features:
        features = extract(
            encoder,
            dataset,
            hashes,
            recipe.features,
            on_bad_image=on_bad_image,
            device=accelerator.device,
            show=accelerator.is_main_process,
            augmentation=recipe.train_augmentation,
        )
        unreadable = features.unreadable
    else:
        unreadable = _scanned(encoder, dataset, on_bad_image)
    if unreadable:
        logger.warning("%d of %d images do not decode and are left out", len(unreadable), len(dataset))
    return Prepared(
        encoder.pretraining,
        encoder.normalize,
        encoder.preprocessing,
        encoder.width,
        features,
        text_weights(recipe, encoder, dataset.class_names),
        unreadable,
        digest(hashes.digests, bits=128),
        weights_digest(encoder),
        encoder.identity(),
    )


def index_folder(recipe: Recipe) -> Path | None:
    """Returns the folder of the hashes, or None if it can not be written and the recipe needs no cached features."""
    try:
        return cache_folder(recipe.features)
    except UserError:
        if recipe.needs_features:
            raise
        return None


def text_weights(
    recipe: Recipe, encoder: Encoder, class_names: tuple[str, ...]
) -> dict[tuple[str, ...] | None, Tensor]:
    """Returns `Prepared.text_weights` for all prompts that methods of the recipe use."""
    weights: dict[tuple[str, ...] | None, Tensor] = {}
    for prompts in dict.fromkeys(item.block.prompts for item in recipe.methods if item.reads_text):
        assert isinstance(encoder, TextEncoder), "checked with the recipe"
        weights[prompts] = encoder.logit_scale * encoder.text_embeddings(class_names, prompts)
    return weights


def _scanned(encoder: Encoder, dataset: ImageDataset, on_bad_image: str) -> dict[int, str]:
    """Decodes every image before training end to end, which would otherwise fail at a broken image after hours.

    Returns {row: reason} of the unreadable images. Raises `UserError` if `on_bad_image` is `error`.
    """
    unreadable = scan(dataset, cores(), NotAStrip(encoder.preprocessing))
    if unreadable and on_bad_image == "error":
        raise UserError(unreadable_message(unreadable, dataset))
    return unreadable
