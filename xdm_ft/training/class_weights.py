"""What classes weigh in the loss."""

from __future__ import annotations

import torch
from torch import Tensor


def balanced(labels: Tensor, num_classes: int) -> Tensor:
    """w_c = n / (C n_c) for the n_c of n training images that have class c, float32 [num_classes].

    C counts the classes that have any; the others weigh 0. As scikit-learn's class_weight="balanced": every class has
    the same sum of weights, and the weights' mean over the images is 1. `labels` int64 [n].
    """
    count = labels.bincount(minlength=num_classes)
    present = count > 0
    weight = len(labels) / (present.sum() * count.clamp(min=1).double())
    return torch.where(present, weight, 0.0).float()
