"""The domain head of a model: its own, or one that is fitted for the measures."""

from __future__ import annotations

import torch
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.heads.linear import Linear
from xdm_ft.runtime.progress import pulse
from xdm_ft.runtime.tensors import Batch, Task

STRENGTHS = (1.0, 0.1, 0.01, 1e-3)  # penalties of the logistic regression, of which validation images pick one


def fitted(
    train_domains: tuple[str, ...], training: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor]
) -> Linear | None:
    """Returns a linear head that predicts the domain of features; None for a single domain.

    It is the linear probe of the training features that predicts most validation images right, the more penalised one
    of several. All domains weigh the same. `training` and `validation` are features float32 [n,K] and domains int64
    [n], 0…D−1.
    """
    (z, domain), (z_held, domain_held) = training, validation
    if len(domain.unique()) < 2:
        return None
    names = tuple(train_domains)
    solver = LinearProbe(Setup(Task(names, names), z.shape[1], steps=0, seed=0), strengths=STRENGTHS)
    rows = torch.arange(len(z))
    found, most = None, -1
    for candidate in solver.solve(z, Batch(z, domain, domain, rows, rows)):
        logits = z_held @ candidate.head["weight"].T + candidate.head["bias"]
        right = int((logits.argmax(1) == domain_held).sum())
        if right > most:
            found, most = candidate, right
        pulse.beat()
    assert found is not None
    head = Linear(z.shape[1], len(names), 0, 0)
    head.load_state_dict(found.head)
    return head.eval()
