"""Images → features. A file's stem is its name in a recipe; its class's constructor keywords are recipe keys.

Modules of this package import timm, open_clip and transformers inside functions: checking a recipe only reads the
signatures and has to be fast. `timm` and `transformers` in the modules of these names are the libraries: imports are
absolute, and `xdm_ft/run.py` keeps the package's folder off the import path.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xdm_ft.blocks import Chain, Pooling, find_chain
from xdm_ft.images.transforms import Preprocessing, PreprocessingOverrides
from xdm_ft.model_sources.prompts import expand_templates, fill, in_words
from xdm_ft.model_sources.source import NOT_TAKEN, check_sizes, refuse_not_finite, size_not_taken, versions
from xdm_ft.runtime.errors import UserError, printable

OWN_PREPROCESSING = PreprocessingOverrides()
PreprocessingChoice = Annotated[
    PreprocessingOverrides, Field(description="replaces parts of the model's own preprocessing")
]
NormalizeOfText = Annotated[bool, Field(description="L2-normalise the features (zero_shot always does)")]
_RESIZE = {
    **{"center": "native", "squash": "squash", "border": "pad"},  # timm's crop_mode → ours
    **{"shortest": "native", "longest": "pad"},  # open_clip's resize_mode → ours
}


class Portable(NamedTuple):
    """What builds an encoder again on another machine, from its weights in a file."""

    settings: dict[str, Any]  # constructor keywords, without `weights`, `preprocessing` and `normalize`
    state: dict[str, Tensor]  # for the weights file, under the names that the library gives them
    files: Mapping[str, dict[str, Any]] = {}  # JSON files: one that `settings["model"]` names, and those that it names


class Encoder(nn.Module, ABC):
    """f: images [B,3,H,W], preprocessed as `preprocessing` says, → features z [B,K]. In eval mode after construction.

    Constructors raise `UserError` if weights are missing, do not fit, or cannot be downloaded.
    """

    width: int  # K
    preprocessing: Preprocessing  # the encoder's own, with the recipe's overrides
    # names of modules inside, in the order in which they run; MixStyle and other style methods work after them
    stem_names: tuple[str, ...] = ()  # before the stages: the first convolution, and its pooling if there is one
    stage_names: tuple[str, ...]  # blocks of a ViT; stages of a CNN, from a quarter of the resolution down
    transition_names: tuple[str, ...] = ()  # modules between the stages, if they are not part of them (DenseNet)
    pretraining: str  # one line for the protocol: the weights and, if known, the corpus they were trained on
    normalize: bool  # z is L2-normalised

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """float32 features [B,K] (the encoder may compute in a lower precision)."""

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """All that determines the features, except the weights, JSON-serialisable: `component`, `model`, arguments,
        `normalize`, `versions` (of libraries). The feature cache hashes the weights from `state_dict()`."""

    def without_spelling(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an identity of this family without versions, and without what `portable` writes in other words.

        Two encoders whose identities are then equal have the same features, if their weights are equal.
        """
        return {key: value for key, value in identity.items() if key != "versions"}

    def differences(self, identity: Mapping[str, Any]) -> list[str]:
        """Returns the keys of an identity, of which anyone may have written the text, that are not of this encoder."""
        ours, theirs = (self.without_spelling(each) for each in (self.identity(), identity))
        # as JSON: in Python 1 == 1.0 == True, and tuples differ from lists
        texts = [{key: json.dumps(value, sort_keys=True) for key, value in each.items()} for each in (ours, theirs)]
        return sorted(key for key in {**ours, **theirs} if texts[0].get(key) != texts[1].get(key))

    @abstractmethod
    def portable(self) -> Portable:
        """Returns the encoder as it is, for a directory that another machine reads. No path of this one is in it."""

    def block_candidates(self) -> Sequence[Sequence[str]]:
        """Names of modules that may be the encoder's blocks: lists of which the first that is a chain is taken."""
        return ()

    @cached_property
    def chain(self) -> Chain:
        """The blocks, found by two forward passes at the first use; copies of the encoder share it."""
        return find_chain(self, self.preprocessing.size, self.block_candidates())

    @cached_property
    def verified_cuts(self) -> set[int]:
        """The numbers of blocks above a `Cut` of this encoder that was found to be exact."""
        return set()

    @property
    def block_names(self) -> tuple[str, ...]:
        """Modules in the order in which they run, each of which maps one activation to the next; a `Cut` is before one.

        A transformer layer, residual unit or inverted residual each; coarser where those are no chain (DenseNet).
        """
        return tuple(block.name for block in self.chain.blocks)

    @property
    def blocks_reason(self) -> str:
        """Empty if there are `block_names`; if not, why, and what to do."""
        if self.chain.blocks:
            return ""
        return f"the encoder cannot be cut ({self.chain.reason}); set trainable: true or false, or use another model"


class LibraryEncoder(Encoder):
    """A model of a library as an encoder: what the families have in common.

    A family sets `model` and the attributes below, then calls `prepare`. It implements `pooled` and `portable`.
    """

    model: Any
    pooling: Pooling | None
    libraries: tuple[str, ...]  # those whose versions its features depend on, beside torch, torchvision and Pillow
    reserved: tuple[str, ...]  # keys of `kwargs` that the family sets itself
    built_from: dict[str, Any]  # the part of `identity` before `normalize`: component, model, arguments

    def __init__(self, kwargs: dict[str, Any], normalize: bool, pooling: Pooling | None) -> None:
        super().__init__()
        if taken := sorted(set(kwargs) & set(self.reserved)):
            raise UserError(f"encoder.kwargs: {', '.join(taken)} cannot be set here; leave it out")
        check_sizes(kwargs, "encoder.kwargs")
        self.normalize, self.pooling = normalize, pooling

    def prepare(self, model: str, published: Preprocessing, overrides: PreprocessingOverrides, no_pooling: str) -> None:
        """Sets the preprocessing, and K by one forward pass: a library's `num_features` differs for some models.

        `no_pooling` says why the model has no such pooling; it is empty if it has.

        Raises `UserError` if it has not, if a weight is not finite, if the model takes no images of this size, or does
        not pool its features.
        """
        if no_pooling:
            raise UserError(f'encoder.pooling: {self.pooling or "null"}: "{model}" {no_pooling}')
        refuse_not_finite(self.state_dict(), f'encoder.weights: "{model}"')
        self.eval()  # some libraries return models in training mode
        self.preprocessing = overrides.applied_to(published)
        size = self.preprocessing.size
        try:
            with torch.no_grad():
                features = self(torch.zeros(1, 3, size, size))
        except NOT_TAKEN as error:
            raise size_not_taken(model, size, error) from error
        if features.ndim != 2:
            raise UserError(
                f'encoder: "{model}" returns features of shape {tuple(features.shape)} instead of [batch, K]; '
                "leave global_pool out of encoder.kwargs"
            )
        self.width = features.shape[1]

    @abstractmethod
    def pooled(self, images: Tensor) -> Tensor:
        """Images [B,3,H,W], of the type of the weights → features [B,K], not normalised."""

    def forward(self, images: Tensor) -> Tensor:
        # the weights may have been cast to bfloat16 (`features.precision`)
        z = self.pooled(images.to(next(self.model.parameters()).dtype)).float()  # [B,K]
        return F.normalize(z, dim=-1) if self.normalize else z

    def identity(self) -> dict[str, object]:
        return {
            **self.built_from,
            "normalize": self.normalize,
            # without the model's own pooling: its features have the same key in the cache as ever
            **({} if self.pooling is None else {"pooling": self.pooling}),
            "preprocessing": self.preprocessing.model_dump(mode="json"),
            "versions": versions(*self.libraries),
        }


def square_preprocessing(
    key: str, side: Sequence[int], mean: Sequence[float], std: Sequence[float], resize: str, **others: Any
) -> Preprocessing:
    """Returns the preprocessing that a library describes, for images of `side`: [height, width], px.

    Raises `UserError`, about the recipe key `key`, if they are not square.
    """
    height, width = side
    if height != width:
        raise UserError(
            f"{key}: this model takes {height}×{width} px, but only square images are supported; choose another model"
        )
    return Preprocessing(mean=tuple(mean), std=tuple(std), size=height, resize=_RESIZE[resize], **others)  # type: ignore[arg-type]


class TextEncoder(ABC):
    """What an encoder with a text side (CLIP) offers in addition."""

    text_reason: str = ""  # why this model has no class embeddings, and what to do; "" if it has
    logit_scale: float  # exp of the learned parameter
    prompts: tuple[str, ...]  # its own templates

    @abstractmethod
    def text_embeddings(self, class_names: tuple[str, ...], prompts: tuple[str, ...] | None = None) -> Tensor:
        """L2-normalised class embeddings float32 [C,K], averaged over the prompt templates (Radford et al. 2021).

        `prompts` replace the encoder's own templates.
        """

    def exact_prompts(self, class_names: tuple[str, ...], prompts: tuple[str, ...] | None = None) -> list[str]:
        """Returns every prompt as it is given to the tokeniser, class by class."""
        templates = expand_templates(prompts or self.prompts)
        return [fill(template, in_words(name)) for name in class_names for template in templates]

    @abstractmethod
    def as_read(self, texts: list[str]) -> list[tuple[str, tuple[int, ...]]]:
        """Returns what the text encoder reads of each text, whose end may be cut, and its tokens."""

    def read_prompts(self, class_names: tuple[str, ...], prompts: tuple[str, ...] | None = None) -> list[str]:
        """Returns every prompt exactly as the text encoder reads it, class by class; `validate` prints them.

        Raises `UserError` if two classes have the same tokens: the second one would never be predicted.
        """
        exact = self.exact_prompts(class_names, prompts)
        read, count = self.as_read(exact), len(exact) // len(class_names)
        of_tokens: dict[tuple[tuple[int, ...], ...], str] = {}
        for number, name in enumerate(class_names):
            of_class = read[number * count : (number + 1) * count]
            if (other := of_tokens.setdefault(tuple(tokens for _, tokens in of_class), name)) != name:
                raise UserError(
                    f'data.class_names: "{printable(other)}" and "{printable(name)}" are one text to the encoder '
                    f'("{printable(of_class[0][0])[:80]}"), so the second would never be predicted; give them other '
                    "words, or shorter prompts"
                )
        return [
            text if text == given else f"{text} … (cut: longer than the context)"
            for given, (text, _) in zip(exact, read, strict=True)
        ]
