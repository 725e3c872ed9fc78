"""A checked recipe, and the blocks of it that belong to no component."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from xdm_ft.augmentations import NO_AUGMENTATION, Augmentations
from xdm_ft.cut import LowRank
from xdm_ft.features import FeatureSettings
from xdm_ft.images import Intensity
from xdm_ft.protocol.splits import Protocol
from xdm_ft.recipe.components import Component
from xdm_ft.recipe.method import ListedEncoder, MethodItem, TrainAugmentation, augmentations_of, with_encoder
from xdm_ft.recipe.search import Search
from xdm_ft.recipe.text import as_text
from xdm_ft.runtime.settings import Block, Name, OneOrMany
from xdm_ft.training import ClassWeights, Training


class DataCommon(Block):
    """Keys of the block `data`; the data set adds its own."""

    name: str = Field(description="data set, see `xdm-ft ls data`")
    on_bad_image: Literal["error", "skip"] = Field(
        default="error", description="if an image does not decode: stop, or leave the image out and report it"
    )
    intensity: Intensity = Field(
        default="type",
        description="what becomes 0…255 of images wider than 8 bits: type (0…65535, floats 0…1), auto (the fewest of "
        "8, 10, 12, 14, 16 bits that hold all of them; floats: least to largest) or {low, high}",
    )
    domain_min: int | None = Field(
        default=None,
        ge=2,
        description="fewest images of a domain that is held out; it needs two classes, too. Smaller ones: see "
        "small_domains. null: all domains stay as they are",
    )
    small_domains: Literal["join", "drop"] = Field(
        default="join",
        description='what becomes of domains below domain_min. join: one domain "small sites", which trains only if it '
        "is still below; drop: they are left out",
    )
    class_names: dict[Name, Name] = Field(
        default={}, description="class folder or label → name of the class in prompts and reports"
    )
    train_augmentation: TrainAugmentation = Field(
        default=None,
        description="of training images: none, a name of `xdm-ft ls augmentations`, {name: settings}, or a list of "
        "them. null: domainbed for DomainBed's five data sets on images or cached views, else none",
    )


class Cluster(Block):
    """Keys of the block `cluster`: where features are extracted and models train. They change no number."""

    name: Literal["ray"] | None = Field(
        default=None,
        description="ray: extract and train on the nodes of a Ray cluster (pip install 'xdm_ft[ray]'); null: here",
    )
    address: str = Field(
        default="auto",
        min_length=1,
        description="HOST:PORT of the cluster's head node; auto: the cluster of this machine",
    )
    gpus_per_model: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="GPUs per task (a model trained end to end, a chunk of heads, or a part of the features); 0: the "
        "CPU, 0.25: four tasks share a GPU",
    )
    cpus_per_model: int = Field(
        default=1,
        ge=1,
        description="CPU cores per model trained end to end and per part of the features; a chunk of heads takes one",
    )


class ReportSettings(Block):
    """Keys of the block `report`."""

    page: Annotated[bool, Field(description="write report.html and plots/ at the end of the run")] = True
    images: Annotated[bool, Field(description="show the most confident mistakes as small images in report.html")] = (
        False
    )
    seeds_averaged: Annotated[
        bool,
        Field(
            description="results.md has a table of each method's models of all seeds as one model, with the mean of "
            "their logits; reads the predictions of all models"
        ),
    ] = False
    compare: Annotated[
        tuple[tuple[Name, Name], ...],
        Field(
            description="pairs of rows, such as [[xdomainmix, erm]]: the comparisons that you decided on before the "
            "run. With encoders, a pair of methods stands for one pair under each of them"
        ),
    ] = ()
    margin: Annotated[
        float | None,
        Field(
            gt=0,
            description="in points (nats for nll), e.g. 1.0: rows whose interval lies inside ±margin are equal within "
            "it; null: no such verdict",
        ),
    ] = None
    log_with: Annotated[
        tuple[Literal["wandb", "trackio", "mlflow", "comet_ml", "clearml", "dvclive", "swanlab"], ...],
        OneOrMany,
        Field(description="other trackers that the end of the run logs curves and test values to"),
    ] = ()

    @field_validator("compare", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        pairs = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError("must be a list of pairs of rows, such as [[xdomainmix, erm]]")
        return value


class Output(Block):
    """Keys of the block `output`."""

    # no path may hold a null byte: Python would raise a `ValueError` in the middle of the run
    dir: str = Field(default="output", min_length=1, pattern=r"^[^\x00]*$", description="parent of the run directory")


@dataclass(frozen=True)
class Recipe:
    """A checked recipe."""

    name: str
    data: Component
    protocol: Protocol
    encoders: tuple[Component, ...]
    features: FeatureSettings
    methods: tuple[MethodItem, ...]  # with several encoders, all methods under the first one, then under the next
    training: Training
    search: Search
    report: ReportSettings
    output: Output
    cluster: Cluster
    analyse: bool = False  # measure the models at the end of the run, as `xdm-ft analyse` does
    label_curve: bool = False  # measure what few labels of a new site bring, each held-out domain once as the site

    @property
    def encoder(self) -> Component:
        """The first of the encoders."""
        return self.encoders[0]

    @property
    def has_images(self) -> bool:
        """Whether the data are images; else they are features that were computed elsewhere, and no encoder is named."""
        return bool(self.data.cls.has_images)

    @property
    def trains_encoders(self) -> bool:
        """Whether a method trains an encoder, or a part of it."""
        return any(item.trainable is not False for item in self.methods)

    @property
    def data_common(self) -> DataCommon:
        assert isinstance(self.data.block, DataCommon)
        return self.data.block

    def trains_on_images(self, item: MethodItem) -> bool:
        """Whether a method reads images at every step: neither cached features nor the cached activations of a cut."""
        if not item.is_cut:
            return item.trainable is True
        augmented = bool(self.written_augmentation(item)) and not self.features.views
        return self.features.cut == "compute" or (self.features.cut == "auto" and augmented)

    def written_augmentation(self, item: MethodItem) -> Augmentations | None:
        """Returns the augmentation that the recipe sets for a method; None: it sets none."""
        of_item = item.block.train_augmentation
        return self.data_common.train_augmentation if of_item is None else of_item

    def augmentation_of(self, item: MethodItem) -> Augmentations:
        """Returns the augmentation that a method trains with: of the recipe, or the data set's own.

        What is cached has one in `features.views` alone.
        """
        if not self.trains_on_images(item) and (item.is_solver or not self.features.views):
            return NO_AUGMENTATION
        written = self.written_augmentation(item)
        default = augmentations_of(self.data.cls.train_augmentation)
        return written if written is not None else default or NO_AUGMENTATION

    def class_weights_of(self, item: MethodItem) -> ClassWeights:
        """Returns the weights of a method's class losses; none for a solver on which they have no effect."""
        if item.is_solver and not item.algorithm.cls.weighs_images:
            return "none"
        return item.block.class_weights or self.training.class_weights

    @property
    def weighs_classes(self) -> bool:
        """Whether every method that can weighs the classes."""
        able = [item for item in self.methods if not item.is_solver or item.algorithm.cls.weighs_images]
        return all(self.class_weights_of(item) == "balanced" for item in able)

    def cached_augmentations(self, items: Iterable[MethodItem]) -> tuple[Augmentations, ...]:
        """Returns the augmentations whose views of images are cached for these methods, each once."""
        kinds = dict.fromkeys(self.augmentation_of(item) for item in items if not self.trains_on_images(item))
        return tuple(kind for kind in kinds if kind)

    def with_augmentation(self, augmentation: Augmentations | None) -> Recipe:
        block = self.data.block.model_copy(update={"train_augmentation": augmentation})
        return replace(self, data=replace(self.data, block=block))

    def with_seeds(self, count: int) -> Recipe:
        return replace(self, protocol=self.protocol.model_copy(update={"seeds": tuple(range(count))}))

    def item(self, label: str) -> MethodItem:
        """Returns the method of a row of results."""
        return next(item for item in self.methods if item.label == label)

    @property
    def labels(self) -> list[str]:
        """What `report.compare` may name: the rows, and with `encoders` the methods that have one under each."""
        methods = [item.own_label for item in self.own_methods] if self.several_encoders else []
        return [*(item.label for item in self.methods), *methods]

    @property
    def declared(self) -> tuple[tuple[str, str], ...]:
        """The pairs of `report.compare`, as labels of rows: with `encoders`, a pair of methods under each of them."""
        rows = {item.label for item in self.methods}
        encoders = dict.fromkeys(item.encoder_label or "" for item in self.methods)
        return tuple(
            pair
            for first, second in self.report.compare
            for pair in (
                [(first, second)]
                if first in rows
                else [(with_encoder(first, encoder), with_encoder(second, encoder)) for encoder in encoders]
            )
        )

    def search_of(self, item: MethodItem) -> Search:
        """Returns the search of one method's settings."""
        return self.search.for_low_rank() if isinstance(item.trainable, LowRank) else self.search

    def needs_features(self, encoder: Component | None = None) -> bool:
        """Whether a method reads features of a frozen encoder (None: of any), in training or before it."""
        wanted = (item for item in self.runnable_methods if encoder is None or item.encoder is encoder)
        return any(map(self.reads_features, wanted))

    def reads_features(self, item: MethodItem) -> bool:
        """Whether a method reads cached features of the frozen encoder, to train on or for the strength of `clap`."""
        return item.trainable is False or self.reads_confidence(item)

    def reads_confidence(self, item: MethodItem) -> bool:
        """Whether a model of a method has `anchor: clap`, which needs zero-shot probabilities of training images."""
        drawn = self.search.distributions.get("anchor")
        may_draw = drawn is not None and "clap" in (drawn.choice or ())
        return item.takes_anchor and (item.block.anchor == "clap" or may_draw)

    @property
    def runnable_methods(self) -> tuple[MethodItem, ...]:
        """The methods that their encoders can serve."""
        return tuple(item for item in self.methods if item.skipped is None)

    @property
    def blocks(self) -> dict[str, Block]:
        """The blocks by their keys, in the order in which a recipe is printed; `methods` is not among them."""
        encoder = {} if self.several_encoders or not self.has_images else {"encoder": self.encoder.block}
        return {
            "data": self.data.block,
            "protocol": self.protocol,
            **encoder,
            "features": self.features,
            "training": self.training,
            "search": self.search,
            "report": self.report,
            "output": self.output,
            "cluster": self.cluster,
        }

    def resolved(self) -> dict[str, Any]:
        """Returns the recipe as plain values, including every default."""
        plain: dict[str, Any] = {name: block.model_dump(mode="json") for name, block in self.blocks.items()}
        if self.several_encoders:
            plain["encoders"] = [encoder.block.model_dump(mode="json") for encoder in self.encoders]
        methods = [item.block.model_dump(mode="json") for item in self.own_methods]
        for index, entry in enumerate(methods):  # what their encoders decide is null where they differ
            if "center" in entry and len({item.center for item in self.methods if item.index == index}) > 1:
                entry["center"] = None
        flags = {"analyse": self.analyse, "label_curve": self.label_curve}
        return {"name": self.name, **plain, **flags, "methods": methods}

    @property
    def several_encoders(self) -> bool:
        """Whether the recipe has `encoders`, which may be a list of one."""
        return isinstance(self.encoder.block, ListedEncoder)

    @property
    def own_methods(self) -> tuple[MethodItem, ...]:
        """The entries of `methods`, each once, under the first encoder."""
        return tuple(item for item in self.methods if item.encoder is self.encoder)

    def as_yaml(self) -> str:
        return as_text(self.resolved())
