"""Class weights of the loss."""

from __future__ import annotations

import torch
from torch import Tensor


def balanced(labels: Tensor, num_classes: int) -> Tensor:
    """Returns w_c = n / (C n_c), float32 [num_classes], for `labels` int64 [n] of which n_c are class c.

    C is the number of classes that occur; the weight of any other class is 0. As scikit-learn's
    class_weight="balanced": every class has the same sum of weights, and their mean over the images is 1.
    """
    count = labels.bincount(minlength=num_classes)
    present = count > 0
    weight = len(labels) / (present.sum() * count.clamp(min=1).double())
    return torch.where(present, weight, 0.0).float()
