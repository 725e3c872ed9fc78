"""Images in, class names and probabilities out: the model that `xdm_ft.load` returns, and streams of many images."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast, get_args, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from PIL import Image
from torch import Tensor

from xdm_ft.evaluation.neighbours import Reference
from xdm_ft.export import Classifier, ModelConfig, ModelParts, ModelPrecision, probabilities
from xdm_ft.export.card import HUB, WORDS, interval, shown
from xdm_ft.export.choose import Choice, read_parts
from xdm_ft.export.directory import CONFIG, read_directory
from xdm_ft.export.hub import download
from xdm_ft.export.rows import features_of, given_items
from xdm_ft.export.sources import Item
from xdm_ft.features import FeatureSettings, fast_batch_size
from xdm_ft.features.cache import Contents, Lookup, Store, cache_folder, cache_of_run
from xdm_ft.features.key import key_of, key_parts_of
from xdm_ft.heads.cosine import Cosine
from xdm_ft.heads.linear import Linear
from xdm_ft.images.decode import (
    OF_THE_MACHINE,
    UnreadableImage,
    decode,
    decoder_of,
    memory_of,
    refuse_misread,
    to_8_bits,
    to_rgb,
    wide_colour_modes,
)
from xdm_ft.images.loader import DTYPES, PixelBatch, decoding_workers, pixel_batches
from xdm_ft.images.transforms import evaluation_transform, normalize, resizing_transform
from xdm_ft.results.run import is_run, read_run
from xdm_ft.runtime.errors import UserError, plural, printable
from xdm_ft.runtime.machine import retain_freed_memory
from xdm_ft.storage.atomic import is_writable
from xdm_ft.storage.names import expand_user

logger = logging.getLogger("xdm_ft")
T = TypeVar("T")


@runtime_checkable
class SupportsRead(Protocol):
    """A file that is open for reading bytes."""

    def read(self) -> bytes: ...


OneImage = str | os.PathLike[str] | bytes | bytearray | memoryview | SupportsRead | Image.Image | np.ndarray
ONE_IMAGE = (str, os.PathLike, bytes, bytearray, memoryview, SupportsRead, Image.Image, np.ndarray)
Images = OneImage | Iterable[OneImage]
WIDE = ("uint16", "int16", "int32", "float32", "float64")  # types of arrays that `ModelConfig.intensity` is about
MAX_WORKERS = 4  # by default
MAX_READ = 1 << 30  # bytes of a file that are read at once; a larger one is decoded from the disk
SMALLER = "give a smaller --batch-size (now {})"
NOT_FINITE = "the model returns values that are not finite"


class ClassEmbeddings(NamedTuple):
    """logits [B,C] = scale · ẑ @ embeddingsᵀ + bias, for L2-normalised features ẑ [B,K]."""

    embeddings: Tensor  # float32 [C,K]; rows have length 1 on average, and exactly 1 for a cosine head
    scale: float
    bias: Tensor  # float32 [C]; 0 for a cosine head


class Model:
    """A trained model. An image is a path, the bytes of an image file, a file that is open for reading bytes, a PIL
    image, or an array [H,W] or [H,W,3]: uint8, or wider (uint16, int16, int32, float32, float64), which `config`'s
    intensity scales as in the run. A model that reads features takes arrays of them, [n,K] or [K], and paths of files.

    `class_names`: in the order of the columns of probabilities. `module`: a plain torch module, preprocessed pixels
    float32 [B,3,H,W] → logits float32 [B,C]. `transform`: RGB PIL image → pixels [3,H,W]. `config`: how it was made.
    """

    def __init__(
        self, parts: ModelParts, device: torch.device | str | None = None, precision: ModelPrecision | None = None
    ):
        """`device` None: a GPU if torch finds one. `precision` None: that of the run. Raises `UserError`."""
        self.config = parts.config
        self.folder = Path()  # where it was loaded from
        self.class_names = parts.config.class_names
        name = device or (
            "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        )
        try:
            self.device = torch.device(name)
            # `torch.device` accepts devices that this machine does not have
            torch.zeros(1, device=self.device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # AssertionError: no CUDA in this torch
            reason = str(error).splitlines()[0]
            raise UserError(f"device: {name} cannot be used ({reason}); use cpu, cuda or mps") from error
        self.module = Classifier(parts, precision, self.device)
        self.reference = parts.reference
        self.training_images = parts.training_images
        self.checksum = parts.checksum
        self.transform = evaluation_transform(parts.config.preprocessing)
        self._resize = resizing_transform(parts.config.preprocessing)

    def __repr__(self) -> str:
        encoder, method = self.config.encoder, self.config.method["label"]
        return f"Model({method}, {len(self.class_names)} classes, {encoder.settings['model']}, {self.device})"

    def _repr_html_(self) -> str:
        """What the model is, and what to expect of it at a new site, as a notebook shows it."""
        from html import escape

        encoder, method, expected = self.config.encoder, self.config.method, self.config.expected
        facts = [
            ("method", str(method["label"])),
            ("encoder", str(encoder.settings["model"])),
            ("classes", ", ".join(self.class_names)),
            ("trained on", ", ".join(method["train_domains"])),
        ]
        if expected is not None:
            site = expected.at_new_site
            facts.append((WORDS[expected.metric], f"{shown(expected.metric, expected.mean)} on held-out domains"))
            ends = None if site is None else site.between(expected.metric)
            facts.append(("at a new site (95%)", interval(expected.metric, ends)))
        rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts)
        return f"<p><strong>{escape(repr(self))}</strong></p><table>{rows}</table>"

    def predict(self, images: Images) -> list[str]:
        """Returns the most probable class of every image. Raises `UserError` for one that does not decode.

        >>> black, white = np.zeros((32, 32, 3), np.uint8), np.full((32, 32, 3), 255, np.uint8)
        >>> names = model.predict([black, white])
        >>> len(names), set(names) <= set(model.class_names)
        (2, True)
        """
        return [self.class_names[number] for number in self.predict_proba(images).argmax(1)]

    def predict_proba(self, images: Images) -> np.ndarray:
        """Returns probabilities float32 [n,C].

        >>> probabilities = model.predict_proba([black, white])
        >>> probabilities.shape, probabilities.sum(axis=1).round(3).tolist()
        ((2, 10), [1.0, 1.0])
        """
        width = len(self.class_names)
        return self._map(lambda z: probabilities(self.module.logits(self.module.head_input(z))), images, width)

    def encode(self, images: Images) -> np.ndarray:
        """Returns features float32 [n,K], as the head reads them.

        >>> model.encode([black, white]).shape
        (2, 64)
        """
        return self._map(self.module.head_input, images, self.config.encoder.width)

    def distance(self, images: Images) -> np.ndarray:
        """Returns how far the encoder's features are from those of the training images: float32 [n], at least 0.

        It is the Mahalanobis distance to the nearest class (`evaluation/neighbours.py`). `distance_percentile` says
        what is far. Raises `UserError` if the model has no reference.

        >>> distances = model.distance([black, white])
        >>> distances.shape, bool((distances >= 0).all())
        ((2,), True)
        """
        reference = self.reference_for("distance")
        return self._map(lambda z: torch.from_numpy(reference.distance(z.cpu().numpy())), images)

    def distance_percentile(self, distances: np.ndarray) -> np.ndarray:
        """Returns, for each distance, the percentage of unseen images of training domains that are nearer: float32 [n].

        Raises `UserError` if the model has no reference.

        >>> model.distance_percentile(np.array([0.0, 1e6], np.float32))
        array([  0., 100.], dtype=float32)
        """
        return self.reference_for("distance_percentile").percentile(distances)

    def reference_for(self, purpose: str) -> Reference:
        """Returns the reference. Raises `UserError`, which begins with `purpose`, if the model has none.

        >>> model.reference_for("distance") is model.reference
        True
        """
        if self.reference is not None:
            return self.reference
        start = f"{purpose}: unknown for this model, because its run kept nothing of the training features"
        if self.config.encoder.trained:
            raise UserError(f"{start}: the model is a mean of others; leave it out")
        raise UserError(
            f"{start}: the file was damaged; run its recipe again (nothing trains again), and export the model again"
        )

    def class_embeddings(self) -> ClassEmbeddings:
        """Returns the head, or the mean of an ensemble's heads, as class embeddings, as programs for CLIP read them.

        The temperature is in `scale` and `bias`. Raises `UserError` if the logits are not linear in L2-normalised
        features.

        >>> embeddings, scale, bias = model.class_embeddings()
        >>> embeddings.shape, bias.shape
        (torch.Size([10, 64]), torch.Size([10]))
        """
        maps = list[tuple[Tensor, Tensor]]()  # of each head W float64 [C,K] and b [C]: logits = W ẑ + b
        for head in [*self.module.members] if self.module.head is None else [self.module.head]:
            if isinstance(head, Cosine):
                weight = (
                    head.log_scale.cpu().double().exp() * F.normalize(head.weight.cpu().double(), dim=-1)
                ).detach()
                maps.append((weight, weight.new_zeros(len(weight))))
            elif not isinstance(head, Linear):
                name = type(head).__name__.lower()
                raise UserError(
                    f"class embeddings: the head is {name}, which has none; train with head: linear or cosine"
                )
            elif not self.module.normalize:
                raise UserError(
                    "class embeddings: the linear head reads features that are not L2-normalised; train with "
                    "encoder.normalize: true, or with head: cosine"
                )
            else:
                maps.append((head.weight.cpu().double().detach(), head.bias.cpu().double().detach()))
        weight, bias = (torch.stack(tensors).mean(0) / self.module.temperature for tensors in zip(*maps, strict=True))
        scale = weight.norm(dim=1).mean().item()
        return ClassEmbeddings((weight / (scale or 1.0)).float(), scale, bias.float())

    @torch.no_grad()
    def _map(self, values: Callable[[Tensor], Tensor], images: Images, *shape: int) -> np.ndarray:
        """Returns `values` float32 [n,*shape] of the encoder's features [B,K], which are computed batch by batch."""
        retain_freed_memory()
        listed = given_items(images, self.config.encoder) if self.config.encoder.reads_features else None
        batches = _batched(_list_images(images) if listed is None else listed, fast_batch_size(self.device.type))
        first, side = next(batches, []), self.config.preprocessing.size
        # a shorter last batch rounds differently, and is filled up; a few images alone are not worth it
        size = (len(first), side, side, 3)
        blocks = [torch.zeros(0, *shape)]
        for batch in pixel_batches(
            chain([first] if first else [], batches), self._pixels, size, self.device, 0, "predict", ""
        ):
            blocks.append(values(encoded(self, batch)[: len(batch.items)]).cpu())
        return torch.cat(blocks).numpy()

    def _pixels(self, image: object) -> Image.Image | Tensor:
        """Returns the resized image, or features. Raises `UserError` if it is none, or does not decode."""
        if isinstance(image, Item):
            try:
                return features_of(image, self.config.encoder)
            except UnreadableImage as error:
                raise UserError(f"{error.name}: {error.reason}") from error
        name = os.fsdecode(image) if isinstance(image, str | os.PathLike) else "an image"
        try:
            with memory_of(name):
                resized: Image.Image = self._resize(self._rgb(image, name))
                return resized
        except UnreadableImage as error:
            raise UserError(f"{error.name or name}: does not decode: {error.reason}") from error

    def _rgb(self, image: object, name: str) -> Image.Image:
        least_side, intensity = self.config.preprocessing.least_side, self.config.intensity
        if isinstance(image, str | os.PathLike):
            return decode(expand_user(name, "image"), name, least_side, intensity)
        if isinstance(image, Image.Image):
            if intensity is not None and wide_colour_modes(image) is not None:
                raise UnreadableImage(name, "an opened image has half of its 16-bit colours: give its path or bytes")
            try:
                refuse_misread(image)
                return to_rgb(image, intensity)
            except (UnreadableImage, MemoryError):
                raise
            except Exception as error:  # it was opened, and is decoded only now: Pillow raises nearly any type
                raise UnreadableImage(name, str(error) or type(error).__name__) from error
        if isinstance(image, np.ndarray):
            is_image = image.size and (image.ndim == 2 or image.shape[2:] == (3,))
            if not is_image or str(image.dtype) not in ("uint8", *WIDE):
                kinds = f"uint8 (or {', '.join(WIDE)}) [H,W] or [H,W,3]"
                raise UserError(f"an image array must be {kinds}, not {image.dtype} {list(image.shape)}")
            return to_rgb(Image.fromarray(image if image.dtype == np.uint8 else to_8_bits(image, intensity)))
        if isinstance(image, SupportsRead):
            try:
                image = image.read()
            except (OSError, ValueError) as error:  # ValueError: it is closed, or was opened as text
                raise UserError(f"an image: the file cannot be read: {error}; open it in mode rb") from error
        if not isinstance(image, bytes | bytearray | memoryview):
            problem = f"not {type(image).__name__}"
            raise UserError(f"an image must be a path, bytes, an open file, a PIL image or an array, {problem}")
        return decode(bytes(image), name, least_side, intensity)


def _list_images(images: Images) -> Iterable[object]:
    """Returns the images, or a single one as a list. Raises `UserError` for what is neither."""
    if isinstance(images, ONE_IMAGE):
        return [images]
    try:
        if isinstance(images, Mapping):
            raise TypeError
        return iter(images)
    except TypeError:
        problem = f"not {type(images).__name__}"
        raise UserError(f"images must be an image (a path, bytes, …) or a list of them, {problem}") from None


def load(
    path: str | os.PathLike[str],
    *,
    device: str | None = None,
    precision: str | None = None,
    encoder_weights: str | None = None,
    choice: Choice | None = None,
) -> Model:
    """See `xdm_ft.load`."""
    from_hub = os.fspath(path).startswith(HUB)
    folder = download(os.fspath(path)) if from_hub else Path(path).expanduser()
    choice = choice or Choice()
    if precision not in (None, *get_args(ModelPrecision)):
        raise UserError(f"precision: {precision} is not known; use fp32, bf16 or fp16, or leave it out")
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder}: {problem}; name a model directory (xdm-ft export) or a run directory")
    if is_run(folder) and not from_hub:  # a run reads further files, which a hub repository could name
        parts = read_parts(read_run(folder), choice)
        logger.info("%s: %s", folder, parts.config.chosen)
    elif choice != Choice():
        raise UserError(
            f"{folder}: is not a run directory, so method, held-out domain, seed and trial cannot be chosen"
        )
    elif not (folder / CONFIG).exists():
        raise UserError(f"{folder}: holds neither a model (config.json) nor a run (results.json)")
    else:
        parts = read_directory(folder, encoder_weights)
    model = Model(parts, device, cast(ModelPrecision | None, precision))
    model.folder = folder
    return model


class ImageBatch(NamedTuple):
    """Images [n] in the order in which they came. The rows of images that are `unreadable` are of no use."""

    items: list[Item]
    encoded: Tensor  # float32 [n,K], features of the encoder, on the CPU
    logits: Tensor  # float32 [n,C]
    members: Tensor | None  # float32 [S,n,C], the logits of an ensemble's heads
    unreadable: Mapping[int, str]  # position → why there is no prediction
    computed: int  # number of images that passed through the encoder; the others' features were cached

    @property
    def readable(self) -> list[int]:
        return [position for position in range(len(self.items)) if position not in self.unreadable]


def stream(
    model: Model,
    items: Iterable[Item],
    *,
    batch_size: int | None = None,
    cache: Path | None = None,
    workers: int | None = None,
) -> Iterator[ImageBatch]:
    """Yields the images in batches with the model's features and logits. Holds a few batches at once.

    Images that do not decode are reported, not raised. Each position of a batch is computed alike whatever the others
    hold, so that a stream that starts again after any batch yields the same bits. `batch_size` None: a fast one on the
    model's device. `cache`: folder of the feature cache, whose features are used if the encoder is frozen; it may be
    missing. `workers`: processes that decode; 0: threads decode a batch on all cores between two passes of the encoder;
    None: as `decoding_workers` says. Raises `UserError` if memory is full.
    """
    retain_freed_memory()
    lookup = None if cache is None else cached_features(model, cache)
    size = fast_batch_size(model.device.type) if batch_size is None else batch_size
    workers = decoding_workers(model.device, MAX_WORKERS) if workers is None else workers
    for batch in read_batches(model, _batched(items, size), size, workers, lookup):
        try:
            yield _computed(model, batch)
        except torch.OutOfMemoryError as error:
            needs = f"a batch of {plural(size, 'image')} needs more memory than {model.device} has"
            raise UserError(f"{needs}; {SMALLER.format(size)}") from error


def encoded(model: Model, batch: PixelBatch[Any]) -> Tensor:
    """Returns the encoder's features of a batch, float32 [B,K]: cached or given ones, or those of the pixels."""
    # all cached, or none readable: a pass of the encoder over black images would cost as much as a full one
    if len(batch.instead) == len(batch.items):
        z = torch.zeros(len(batch.pixels), model.config.encoder.width, device=model.device)
    else:
        pixels = batch.pixels.to(model.device, non_blocking=True)
        z = model.module.encoded(normalize(pixels, model.config.preprocessing))
    for position, value in batch.instead.items():
        if isinstance(value, Tensor):
            z[position] = value.to(model.device, torch.float32)
    return z


@torch.inference_mode()
def _computed(model: Model, batch: PixelBatch[Item]) -> ImageBatch:
    n, module, z_encoder = len(batch.items), model.module, encoded(model, batch)
    z = module.head_input(z_encoder)
    logits = module.logits(z)
    members = module.member_logits(z)[:, :n].cpu() if len(module.members) else None
    broken = ~(z.isfinite().all(1) & logits.isfinite().all(1))[:n]
    unreadable = dict.fromkeys(broken.nonzero()[:, 0].tolist(), NOT_FINITE)
    unreadable |= {position: value for position, value in batch.instead.items() if isinstance(value, str)}
    return ImageBatch(batch.items, z_encoder[:n].cpu(), logits[:n].cpu(), members, unreadable, n - len(batch.instead))


@dataclass(frozen=True)
class _Reader:
    """Reads an image, as a worker does: the image resized, its features, or why there is no prediction."""

    config: ModelConfig
    resize: Callable[[Image.Image], Image.Image]
    lookup: Lookup | None

    def __call__(self, item: Item) -> Image.Image | Tensor | str:
        if self.config.encoder.reads_features:
            return features_of(item, self.config.encoder)
        name = printable(item.path)
        content: bytes | Path = item.content if isinstance(item.content, bytes) else Path(item.content)
        with memory_of(name):
            if isinstance(content, Path):
                try:
                    status = content.stat()
                    if not stat.S_ISREG(status.st_mode):  # opening a pipe would block for ever
                        raise UnreadableImage(item.path, "not a regular file")
                    if self.lookup is not None and not item.hashed and status.st_size <= MAX_READ:
                        content = content.read_bytes()
                except ValueError as error:  # a null byte in the path
                    raise UnreadableImage(item.path, str(error)) from error
                except OSError as error:
                    if error.errno in OF_THE_MACHINE:
                        raise
                    raise UnreadableImage(item.path, error.strerror or str(error)) from error
            hashed = item.hashed
            if self.lookup is not None and isinstance(content, bytes) and not hashed:
                hashed = xxhash.xxh3_128_digest(content)
            cached = self.lookup.find(hashed) if self.lookup is not None and hashed else None
            if cached is not None:
                return cached
            side = self.config.preprocessing.least_side
            resized: Image.Image = self.resize(decode(content, name, side, self.config.intensity))
            return resized


def read_batches(
    model: Model, batches: Iterable[list[Item]], batch_size: int, workers: int, lookup: Lookup | None = None
) -> Iterator[PixelBatch[Item]]:
    """Yields the images decoded and resized; instead of pixels the features [K] of those that the `lookup` has."""
    preprocessing = model.config.preprocessing
    read = _Reader(model.config, resizing_transform(preprocessing), lookup)
    shape = (batch_size, preprocessing.size, preprocessing.size, 3)
    return pixel_batches(batches, read, shape, model.device, workers, "predict", SMALLER.format(batch_size))


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    return iter(lambda: list(islice(rest, size)), [])


def cache_of(folder: str) -> Path:
    """Returns the feature cache of a run, or the default one."""
    path = Path(folder).expanduser()
    return cache_of_run(read_run(path).recipe.features if is_run(path) else FeatureSettings())


def cached_features(model: Model, cache: Path) -> Lookup | None:
    """Returns the cached features of the model's encoder; None if there are none, or if it was trained."""
    parts = _key_parts(model)
    if parts is None:
        return None
    key = key_of(parts)
    lookup = Lookup(cache / key, key, model.config.encoder.width, DTYPES[model.module.precision])
    return lookup if len(lookup) else None


def store_of(model: Model, cache: Path, contents: Contents) -> Store | None:
    """Returns the store in which the features of these images are cached; None if the encoder was trained, or if
    nothing can be written there."""
    parts = _key_parts(model)
    try:
        folder = cache_folder(FeatureSettings(dir=cache))
    except UserError:
        return None
    if parts is None or not is_writable(folder):
        return None
    return Store(folder, parts, contents, model.config.encoder.width, DTYPES[model.module.precision])


def _key_parts(model: Model) -> dict[str, object] | None:
    """Returns what determines the cached features of the model's encoder; None: they are not cached."""
    encoder = model.config.encoder
    if encoder.trained or encoder.identity is None:
        return None
    # the words of the run, whose features are cached under them, where they mean the encoder that was built
    built = model.module.encoder
    identity = built.identity()
    if not built.differences(encoder.identity):
        identity = {**encoder.identity, "versions": identity["versions"]}
    precision, preprocessing = model.module.precision, model.config.preprocessing
    decoder = decoder_of(model.config.intensity)
    return key_parts_of(identity, encoder.xxh3, preprocessing, decoder, precision, model.device)
