"""Checksums of the images that trained a model, by which `evaluate` knows them again among those of a new site.

Each is the xxh3 (128 bits) of an image file's bytes, or of the bytes of an image in a table or archive: not of its
pixels, so that a copy in another format has another one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import xxhash

from xdm_ft.experiment.plan import read_data
from xdm_ft.experiment.prepare import index_folder
from xdm_ft.experiment.resume import written_recipe
from xdm_ft.export.config import ModelConfig
from xdm_ft.export.parts import Parts
from xdm_ft.export.reference import read_part
from xdm_ft.export.sources import Item
from xdm_ft.features.hashes import READER_THREADS, hash_file, hash_files, regular_file
from xdm_ft.protocol.derived_splits import all_domains
from xdm_ft.protocol.splits import SELECTION_SPLIT, splits
from xdm_ft.recipe.check import check
from xdm_ft.report.finished import Run
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.runtime.progress import progress
from xdm_ft.storage.checksummed import write_arrays
from xdm_ft.storage.digests import digest, tensors_digest

TRAINING_IMAGES = "training_images.safetensors"
NAME = "xxh3_128"  # of the array in the file
logger = logging.getLogger("xdm_ft")


def of_run(run: Run, config: ModelConfig) -> np.ndarray | None:
    """Returns the checksums of the images that trained or selected a model of the run: uint8 [n,16], each once, sorted.

    None, with a warning of one line, if the run's data can not be read any more, or are not those of the run.
    """
    try:
        recipe = check(written_recipe(run.path, run.results))
        dataset = read_data(recipe)
        held_out, seed = tuple(config.method["test_domains"]), config.method["seed"]
        found = splits(dataset, recipe.protocol, seed) if held_out else [all_domains(dataset)]  # (): a final fit
        split = next((one for one in found if one.test_domains == held_out), None)
        if split is None:
            raise UserError(f"the data have no domain {', '.join(held_out)} any more")
        selecting = {"train_val", "val_domain", SELECTION_SPLIT.get(recipe.protocol.selection)}
        parts = [*split.train, *(rows for name, rows in split.evaluation.items() if name in selecting)]
        digests = hash_files(dataset, index_folder(recipe), show=True).digests
        recorded = run.results["environment"].get("data", {}).get("content")
        if recorded not in (None, digest(digests, bits=128)):
            raise UserError("the images have changed since the run")
    except (UserError, OSError) as error:
        reason = printable(error)[:200]
        logger.warning("%s: no checksums of the training images, as they can not be read: %s", run.path, reason)
        return None
    own = digests[torch.cat(parts).numpy()]
    return np.unique(own[own.any(1)], axis=0)  # zeros: its bytes can not be read


def with_training_images(run: Run, parts: Parts) -> Parts:
    """Returns a model of the run with the checksums of its training images, if they are known."""
    images = of_run(run, parts.config)
    if images is None:
        return parts
    xxh3 = tensors_digest({NAME: torch.from_numpy(images)})  # as `read_part` compares it
    config = parts.config.model_copy(update={"training_images_xxh3": xxh3})
    return dataclasses.replace(parts, config=config, training_images=images)


def write(images: np.ndarray, folder: Path) -> None:
    write_arrays(folder / TRAINING_IMAGES, {NAME: images}, {"format": "pt"})


def read(folder: Path, config: ModelConfig) -> np.ndarray | None:
    """Returns the checksums in a model directory, uint8 [n,16]; None if it has none. Raises `UserError` for damage."""
    if config.training_images_xxh3 is None or not (folder / TRAINING_IMAGES).exists():
        return None
    images = read_part(folder / TRAINING_IMAGES, config.training_images_xxh3).get(NAME)
    if images is None or images.dtype != torch.uint8 or images.ndim != 2 or images.shape[1] != 16:
        raise UserError(f"{folder / TRAINING_IMAGES}: holds no checksums of images; export the model again")
    return images.numpy()


def checksums(items: Sequence[Item]) -> np.ndarray:
    """Returns the checksum of each image, uint8 [n,16]; zeros where its bytes can not be read."""
    found = np.zeros((len(items), 16), np.uint8)
    with ThreadPoolExecutor(READER_THREADS) as pool, progress("hashing", len(items), "images") as done:
        for place, content in enumerate(pool.map(_checksum, items)):
            found[place] = np.frombuffer(content, np.uint8)
            done.advance()
    return found


def _checksum(item: Item) -> bytes:
    if isinstance(item.content, bytes):
        return xxhash.xxh3_128_digest(item.content)
    try:
        regular_file(item.content)
        return hash_file(item.content)[1]
    except (OSError, ValueError):  # prediction says why
        return bytes(16)


def first_of_each(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first of the images with each checksum, int64 [m], and for each image its first one, int64 [n].

    Images without checksum are different ones.
    """
    keys = [bytes(row) if row.any() else number for number, row in enumerate(images)]
    first = dict[bytes | int, int]()
    firsts = np.array([first.setdefault(key, number) for number, key in enumerate(keys)], np.int64)
    return np.fromiter(first.values(), np.int64, len(first)), firsts


def are_among(images: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Returns whether each image is one of the known ones: bool [n]."""
    every = {bytes(row) for row in known}
    return np.array([bytes(row) in every for row in images], bool)
