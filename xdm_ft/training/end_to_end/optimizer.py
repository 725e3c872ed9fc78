"""The optimizer of an end-to-end training, with a learning rate per part of the model."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from xdm_ft.cut.cut import depth_from_top
from xdm_ft.training import Training
from xdm_ft.training.end_to_end.model import EndToEnd


def optimizer_of(inner: EndToEnd, training: Training) -> Optimizer:
    """Returns the optimizer: class head and auxiliary modules have the learning rate `lr`, the encoder `encoder_lr`.

    With `layer_decay` γ, what lies d blocks from the end of the encoder has `encoder_lr` γ^d (ELECTRA, Clark et al.
    2020, appendix B); d is 0 for a final norm and projection, and 1 for the last block. `weight_decay` acts on the
    parameters that `Training.decays` names.
    """
    encoder, head, auxiliary = inner.roles()
    by_rate: dict[float, list[nn.Parameter]] = {}
    for name, parameter in encoder.items():
        depth = 0 if training.layer_decay == 1 else depth_from_top(inner.encoder, name.removeprefix("encoder."))
        by_rate.setdefault(training.encoder_lr * training.layer_decay**depth, []).append(parameter)
    rates = [*by_rate.items(), (training.lr, [*head.values()]), (training.lr, [*auxiliary.values()])]
    groups = [
        {"params": some, "lr": lr, "initial_lr": lr, "weight_decay": training.weight_decay if decays else 0.0}
        for lr, parameters in rates
        for decays in (True, False)
        if (some := [parameter for parameter in parameters if training.decays(parameter.ndim) == decays])
    ]
    if training.optimizer == "sgd":
        return SGD(groups, momentum=training.momentum)
    return {"adam": Adam, "adamw": AdamW}[training.optimizer](
        groups, betas=(training.beta1, training.beta2), amsgrad=training.amsgrad
    )
