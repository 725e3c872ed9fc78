"""Batch norm while a model is trained end to end."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from xdm_ft.progress import pulse
from xdm_ft.training.end_to_end.batches import StepBatch

if TYPE_CHECKING:
    from accelerate import Accelerator


Module = TypeVar("Module", bound=nn.Module)
logger = logging.getLogger("xdm_ft")


def batch_norm_layers(module: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


class RunningStatistics:
    """The running statistics of the layers that are in training mode, moved once a step.

    Each of a step's parts moves them from where they were before the step; what is committed is the mean of those,
    weighted by the parts' sizes, over all processes. So they move as far in a step, whatever the number of parts and
    passes. (Normalisation itself uses the statistics of each part, with `synchronised` layers those of all processes.)
    """

    def __init__(self, module: nn.Module) -> None:
        layers = [layer for layer in batch_norm_layers(module) if layer.training and layer.running_mean is not None]
        self.values: list[Tensor] = []
        self.counts: list[Tensor] = []
        for layer in layers:
            assert layer.running_mean is not None and layer.running_var is not None
            assert layer.num_batches_tracked is not None
            self.values += [layer.running_mean, layer.running_var]
            self.counts.append(layer.num_batches_tracked)

    def begin(self) -> None:
        """Before the first forward pass of a step."""
        self.before = [value.clone() for value in self.values]
        self.counts_before = [count.clone() for count in self.counts]
        self.sums = [torch.zeros_like(value) for value in self.values]

    def collect(self, weight: float) -> None:
        """After a part. `weight`: of the step's images, or 0 in a pass that does not count."""
        for total, value in zip(self.sums, self.values, strict=True):
            total.add_(value, alpha=weight)
        for value, before in zip(self.values, self.before, strict=True):
            value.copy_(before)
        for count, before in zip(self.counts, self.counts_before, strict=True):
            count.copy_(before)

    def commit(self) -> None:
        """After the last pass of a step, which may have moved the statistics again; `sums` hold all processes'."""
        for value, total in zip(self.values, self.sums, strict=True):
            value.copy_(total)
        for count, before in zip(self.counts, self.counts_before, strict=True):
            count.copy_(before + 1)

    def put_back(self) -> None:
        """As before the step, which does not count."""
        for value, before in zip([*self.values, *self.counts], [*self.before, *self.counts_before], strict=True):
            value.copy_(before)


def synchronised(module: Module, processes: int, accumulation: int, device: torch.device) -> Module:
    """The module with batch norm over all processes where torch has it: on GPUs.

    Elsewhere, and under accumulation, a layer in training mode normalises by the statistics of its part of the batch: a
    warning says so.
    """
    layers = [layer for layer in batch_norm_layers(module) if layer.training]
    if not layers or processes * accumulation == 1:
        return module
    reasons = []
    if processes > 1 and device.type == "cuda":
        from timm.layers import convert_sync_batchnorm  # torch's drops the activation inside timm's BatchNormAct2d

        module = convert_sync_batchnorm(module)
    elif processes > 1:
        reasons.append(f"{processes} processes (torch has no SyncBatchNorm on {device.type})")
    if accumulation > 1:
        reasons.append(f"training.accumulation: {accumulation}")
    if reasons:
        logger.warning(
            "encoder.batch_norm: train normalises each part of a batch by itself with %s: not the training that one "
            "process without accumulation does; encoder.batch_norm: frozen makes them the same", " and ".join(reasons),
        )  # fmt: skip
    return module


@torch.no_grad()
def gather_statistics(module: nn.Module, steps: Iterable[StepBatch], accelerator: Accelerator) -> None:
    """The running statistics of the layers in training mode become the mean of those of the steps' batches.

    As torch.optim.swa_utils.update_bn, for weights that never saw a batch. `module` maps a batch's `x` alone. Nothing
    is read where there is no such layer.
    """
    layers = [layer for layer in batch_norm_layers(module) if layer.training and layer.running_mean is not None]
    if not layers:
        return
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 1.0  # running statistics = those of the batch
    statistics = RunningStatistics(module)
    statistics.begin()
    taken = 0
    for batch in steps:
        taken += 1
        for number, part in enumerate(batch.parts):
            with accelerator.autocast():
                module(part.x)
            statistics.collect(batch.weight(number))
            pulse.beat()
    for total in statistics.sums:
        total.copy_(accelerator.reduce(total, "sum") / taken)
    statistics.commit()
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
