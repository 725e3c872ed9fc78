"""A head of stored training features: the weighted vote of the nearest ones. `knn` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.heads import Head

VALUES_AT_ONCE = 1 << 24  # cosines in memory at once, 64 MiB in float32


def vote(z: Tensor, keys: Tensor, labels: Tensor, k: int, temperature: Tensor, num_classes: int) -> Tensor:
    """Returns log p [B,C], with p_c = (k v_c + 1/C) / (k + 1), v_c the share of class c in the votes of k neighbours.

    The neighbours of z are the k keys with the largest cosines; each has the vote exp(cos / T). One more vote is spread
    over all classes, so that no probability is 0; it changes no ranking of classes. z [B,K] and keys [n,K] are
    L2-normalised, `labels` int64 [n]. With fewer than k keys all of them vote.
    """
    k = min(k, len(keys))
    cosines, places = (z @ keys.T).topk(k, dim=1)  # [B,k]
    weights = (cosines / temperature).softmax(1)
    nothing = z.new_zeros(z.shape[0], num_classes)  # len(z) would fix the batch size of an exported graph
    shares = nothing.scatter_add(1, labels[places], weights)  # v, [B,C]
    return ((k * shares + 1 / num_classes) / (k + 1)).log()


class NeighbourHead(Head):
    """logits_c = log [(k v_c + 1/C) / (k + 1)], v_c the share of class c in the k nearest features' votes exp(cos / T).

    Neighbours are training features, by cosine (`vote`).

    Its buffers are the training features: 4 n K bytes in memory and in every weights file, for n images and features
    of K dimensions (100,000 images of 512 dimensions: 205 MB). The cosines of a block of images are in memory at once.
    """

    source = "Wu et al. 2018, Unsupervised Feature Learning via Non-Parametric Instance Discrimination, section 3.4"
    trained = False
    normalizes = True
    training_features = "keys"
    text_reason = "neighbours holds training features, not class embeddings; use head: linear or cosine"

    def __init__(self, width: int, outputs: int, seed: int, stream: int) -> None:
        super().__init__()
        self.outputs = self.values_per_image = outputs
        self.keys: Tensor
        self.labels: Tensor
        self.k: Tensor
        self.temperature: Tensor
        self.register_buffer("keys", torch.zeros(0, width))  # float32 [n,K], L2-normalised
        self.register_buffer("labels", torch.zeros(0, dtype=torch.int64))  # [n]
        self.register_buffer("k", torch.tensor(1))
        self.register_buffer("temperature", torch.tensor(1.0))
        self.nearest = 1  # k as a number: the shape of a result cannot depend on a tensor's value

    def forward(self, z: Tensor) -> Tensor:
        rows = max(1, VALUES_AT_ONCE // max(1, len(self.keys)))
        # an exported graph has no loop over a batch of unknown size; an older torch says "compiling" of both
        is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
        blocks = [z] if is_exporting() else z.split(rows)
        return torch.cat([self._of_block(block) for block in blocks])

    def _of_block(self, z: Tensor) -> Tensor:
        return vote(F.normalize(z, dim=-1), self.keys, self.labels, self.nearest, self.temperature, self.outputs)

    def stacked_logits(self, z: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        # one after the other: k determines shapes, and n · H keys rarely fit at once
        logits, unit = [], F.normalize(z, dim=-1)
        for keys, labels, k, temperature in zip(*(state[name] for name in self._buffers), strict=True):
            logits.append(vote(unit, keys, labels, int(k), temperature, self.outputs))
        return torch.stack(logits, dim=1)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        for name in ("keys", "labels"):  # how many images there are is known only from the weights
            buffer, given = getattr(self, name), state_dict.get(f"{prefix}{name}")
            if given is not None and given.shape[1:] == buffer.shape[1:]:
                setattr(self, name, buffer.new_empty(given.shape))
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self.nearest = int(self.k)
