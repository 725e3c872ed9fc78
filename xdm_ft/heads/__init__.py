"""One file per kind of class head: features z → logits.

The file's stem is the head's name in a recipe (`head: cosine` of a method). The class's constructor keywords are recipe
keys, with that name as prefix: `mlp.hidden_width`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from xdm_ft.runtime.randomness import uniform
from xdm_ft.runtime.settings import SearchRanges


class Head(nn.Module, ABC):
    """The class head c. Its constructor takes (width, outputs, seed, stream), and its own settings as keywords.

    `forward` is a pure function of z and the parameters, sample by sample. It runs under `torch.func.vmap` and
    `functional_call`, so it has no data-dependent Python branches, changes no buffers and uses no batch statistics.
    Parameters are float32; their initial values are a function of (seed, stream) only. Plain attributes (numbers,
    strings) are settings that all heads of a bank must share. A head has parameters and no buffers; one that is not
    `trained` has buffers and no parameters.
    """

    source: str = ""  # one line: paper, or library
    search_ranges: SearchRanges = {}  # constructor keyword → range, for the presets of a search
    trained: bool = True  # False: it has no parameters, and a solver computes its buffers; gradients cannot train it
    normalizes: bool = False  # whether it L2-normalises z itself, so that class embeddings fit any features
    training_features: str = ""  # the buffer that holds a feature of every training image; "": none does
    per_class: tuple[str, ...] = ()  # its parameters with a row per class, which `anchor` pulls back; weights first
    text_reason: str = ""  # one line: why it cannot start from class embeddings; "": it can
    values_per_image: int  # outputs of the largest layer: memory that one image needs while logits are computed

    @abstractmethod
    def forward(self, z: Tensor) -> Tensor:
        """Features z [B,K] → logits [B,C]."""

    def start_from_text(self, text_weight: Tensor) -> None:
        """Sets the parameters so that the head is the zero-shot classifier.

        `text_weight` float [C,K]: L2-normalised class embeddings × logit scale.
        """
        raise NotImplementedError(self.text_reason)

    def stacked_logits(self, z: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Returns logits [n,H,C] of H heads on the same features z [n,K]; `state`: parameter name → values [H,…]."""

        def of_one(of_head: dict[str, Tensor]) -> Tensor:
            logits: Tensor = functional_call(self, of_head, (z,))
            return logits

        return vmap(of_one, out_dims=1)(dict(state))


def draw_weights(parameters: list[Tensor], fan_in: int, seed: int, stream: int, first: int = 0) -> int:
    """Fills the parameters with U(−1/√fan_in, 1/√fan_in), torch's default for linear layers, from (seed, stream) only.

    `first` is the index of the first draw. Returns the index after the last draw.
    """
    sizes = [parameter.numel() for parameter in parameters]
    draws = (2 * uniform(seed, 0, stream, first + torch.arange(sum(sizes))) - 1) * fan_in**-0.5
    with torch.no_grad():
        for parameter, of_one in zip(parameters, draws.split(sizes), strict=True):
            parameter.copy_(of_one.view_as(parameter))
    return first + sum(sizes)
