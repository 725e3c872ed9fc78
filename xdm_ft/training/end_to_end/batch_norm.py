"""Batch norm in end-to-end training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from xdm_ft.blocks import preserve_modes
from xdm_ft.encoders import Encoder
from xdm_ft.runtime.progress import pulse
from xdm_ft.training.end_to_end.inputs import StepBatch

if TYPE_CHECKING:
    from accelerate import Accelerator

Module = TypeVar("Module", bound=nn.Module)
logger = logging.getLogger("xdm_ft")


def batch_norm_layers(module: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


class RunningStatistics:
    """Updates the running statistics of layers in training mode once per step.

    Every part of a step's batch updates them from their values before the step. `commit` stores the mean of these
    updates over all parts and processes, weighted by the parts' sizes, so that the number of parts and passes does not
    change the size of an update. (Normalisation itself uses the statistics of each part; `synchronise` layers use
    those of all processes.)
    """

    def __init__(self, module: nn.Module) -> None:
        self.layers = [
            layer for layer in batch_norm_layers(module) if layer.training and layer.running_mean is not None
        ]
        named = [dict(layer.named_buffers(recurse=False)) for layer in self.layers]
        self.values = [buffers[name] for buffers in named for name in ("running_mean", "running_var")]
        self.counts = [buffers["num_batches_tracked"] for buffers in named]
        self.sums: list[Tensor] = []  # to be summed over processes before `commit`; empty if a step collects nothing
        self.collects = False

    def begin(self, collects: bool = True) -> None:
        """Stores the statistics before the first forward pass of a step.

        `collects` False: the step has one pass over one part, which updates them by itself; the rest does nothing.
        """
        self.collects = collects and bool(self.values)
        self.sums = []
        if self.collects:
            # copies, as × 1 is exact: an older torch has no _foreach_clone
            self.before, self.counts_before = torch._foreach_mul(self.values, 1), torch._foreach_mul(self.counts, 1)
            self.sums = [torch.zeros_like(value) for value in self.values]

    def collect(self, weight: float) -> None:
        """After a part: adds its statistics × `weight` to the sums, and restores those from before the step.

        `weight`: the part's share of the step's images; 0 in a second pass, whose statistics do not count.
        """
        if self.collects:
            # weights sum to 1 over the parts of all processes
            torch._foreach_add_(self.sums, self.values, alpha=weight)
            torch._foreach_copy_(self.values, self.before)
            torch._foreach_copy_(self.counts, self.counts_before)

    def commit(self, finite: Tensor | None = None) -> None:
        """After the last pass of a step: sets the statistics to `sums`, which must be summed over processes before.

        They stay as before the step if its loss is not `finite` (bool, a scalar; None: it is).
        """
        if not self.collects:
            return
        torch._foreach_copy_(self.values, self.sums)
        torch._foreach_add_(self.counts, 1)
        if finite is not None:
            for value, before in zip([*self.values, *self.counts], [*self.before, *self.counts_before], strict=True):
                value.copy_(torch.where(finite, value, before))


def synchronise(module: Module, processes: int, accumulation: int, device: torch.device) -> Module:
    """Returns the module with batch norm synchronised over processes, which torch has on GPUs only.

    On other devices, and under accumulation, a layer in training mode normalises each part of a batch by the part's own
    statistics; this logs a warning.
    """
    layers = [layer for layer in batch_norm_layers(module) if layer.training]
    if not layers or processes * accumulation == 1:
        return module
    reasons = []
    if processes > 1 and device.type == "cuda":
        from timm.layers import convert_sync_batchnorm  # torch's drops the activation inside timm's BatchNormAct2d

        module = convert_sync_batchnorm(module)
    elif processes > 1:
        reasons.append(f"{processes} processes (torch has no SyncBatchNorm for {device.type})")
    if accumulation > 1:
        reasons.append(f"training.accumulation: {accumulation}")
    if reasons:
        logger.warning(
            "encoder.batch_norm: train: %s normalise each part of a batch alone, which changes results; set "
            "encoder.batch_norm: frozen to avoid it",
            " and ".join(reasons),
        )  # fmt: skip
    return module


@torch.no_grad()
def gather_statistics(
    encoder: nn.Module, encode: Callable[[Tensor], Tensor], steps: Iterable[StepBatch], accelerator: Accelerator
) -> None:
    """Sets the running statistics of layers in training mode to the mean of the batch statistics of `steps`.

    As torch.optim.swa_utils.update_bn, for averaged weights, which no forward pass has used. `encode` is called with
    `x` of each part. Without such layers `steps` is not read.
    """
    statistics = RunningStatistics(encoder)
    if not statistics.layers:
        return
    momenta = [layer.momentum for layer in statistics.layers]
    for layer in statistics.layers:
        layer.momentum = 1.0  # the running statistics are then those of the last batch
    statistics.begin()
    taken = 0
    for taken, batch in enumerate(steps, start=1):  # noqa: B007
        for number, part in enumerate(batch.parts):
            with accelerator.autocast():
                encode(part.x)
            statistics.collect(batch.share(number))
            pulse.beat()
    for total in statistics.sums:
        total.copy_(accelerator.reduce(total, "sum") / taken)
    statistics.commit()
    for layer, momentum in zip(statistics.layers, momenta, strict=True):
        layer.momentum = momentum


@torch.no_grad()
def lone_values(encoder: Encoder) -> list[str]:
    """Returns the names of batch-norm layers that get one value per channel of an image.

    In training mode they need two images: one alone is its own mean.
    """
    names: dict[nn.Module, str] = {
        layer: name for name, layer in encoder.named_modules() if isinstance(layer, _BatchNorm)
    }
    lone = dict[str, None]()

    def look(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].numel() == inputs[0].shape[1]:
            lone[names[layer]] = None

    side, device = encoder.preprocessing.size, next(encoder.parameters()).device
    with ExitStack() as hooks, preserve_modes(encoder):
        for layer in names:
            hooks.callback(layer.register_forward_pre_hook(look).remove)
        encoder(torch.zeros(1, 3, side, side, device=device))
    return list(lone)
