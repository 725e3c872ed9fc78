"""Images → features. The file's stem is its name in a recipe, its class's constructor keywords are recipe keys.

Modules of this package import timm and open_clip inside their functions: reading a signature must stay fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from xdm_ft.data._transforms import Preprocessing


class Encoder(nn.Module, ABC):
    """f: images [B,3,H,W], preprocessed by `preprocessing`, → features z [B,K]. In eval mode after construction.

    Constructors raise `UserError` with a remedy where weights are missing, wrong or can not be downloaded.
    """

    width: int  # K
    preprocessing: Preprocessing  # the encoder's own, with the recipe's overrides
    # names of modules inside, in the order in which they run (for MixStyle and its like)
    stem_names: tuple[str, ...] = ()  # before the stages: the first convolution, and the pooling after it if any
    stage_names: tuple[str, ...]  # its stages: blocks of a ViT, in a CNN those from a quarter of the resolution down
    transition_names: tuple[str, ...] = ()  # modules between the stages, where they are apart from them (DenseNet)
    pretraining: str  # one line for the protocol: weights and, where known, the corpus they saw
    normalize: bool  # z is L2-normalised

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """float32 features [B,K] (the encoder may compute in a lower precision)."""

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """JSON-serialisable description of everything but the weights that determines the features: component,
        model, arguments, `normalize`, library versions. Weights are hashed from `state_dict()` by the cache."""


class TextEncoder(ABC):
    """What an encoder with a text side (CLIP) offers besides."""

    logit_scale: float  # exp of the learned one

    @abstractmethod
    def text_embeddings(self, class_names: tuple[str, ...], prompts: tuple[str, ...] | None = None) -> Tensor:
        """L2-normalised class embeddings float32 [C,K], averaged over the prompt templates (Radford et al. 2021).

        `prompts` take the place of the encoder's own.
        """

    @abstractmethod
    def exact_prompts(self, class_names: tuple[str, ...], prompts: tuple[str, ...] | None = None) -> list[str]:
        """Every prompt exactly as tokenised, class by class, for `validate` to print."""
