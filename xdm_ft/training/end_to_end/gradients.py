"""The gradient of one step: one pass over its micro-batches, two in a sharpness-aware step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from xdm_ft.algorithms import pull
from xdm_ft.core import Losses, Tensors
from xdm_ft.runtime.interrupt import stop_requested
from xdm_ft.runtime.randomness import Stream, bits
from xdm_ft.sharpness import Sharpness
from xdm_ft.training.end_to_end.batch_norm import RunningStatistics
from xdm_ft.training.end_to_end.inputs import StepBatch
from xdm_ft.training.end_to_end.model import EndToEnd

if TYPE_CHECKING:
    from accelerate import Accelerator

WeightedLosses = list[tuple[Losses, float]]
"""Losses of the step's batch or of its parts, with their factors in the mean over all parts and processes."""


class StepLosses(NamedTuple):
    """The losses of the full batch of all processes, and how many processes have received a signal to stop."""

    total: Tensor  # scalar
    second: Tensor  # scalar: `total` of the second pass; 0 without one
    auxiliary: Tensor  # scalar
    stop: Tensor  # scalar: the same in every process, so that all stop after the same step
    logs: dict[str, Tensor]

    @property
    def scalars(self) -> dict[str, Tensor]:
        """The scalars of a step to record."""
        return {"loss": self.total, "auxiliary_loss": self.auxiliary, **self.logs}

    @property
    def loss(self) -> Tensor:
        """The sum of all losses, a scalar: finite only if each of them is."""
        return self.total + self.second + self.auxiliary

    @classmethod
    def mean(cls, inner_steps: list[StepLosses]) -> StepLosses:
        scalars = zip(*(losses[:4] for losses in inner_steps), strict=True)
        total, second, auxiliary, stop = (torch.stack(values).mean(0) for values in scalars)
        names = inner_steps[0].logs
        logs = {name: torch.stack([losses.logs[name] for losses in inner_steps]).mean(0) for name in names}
        return cls(total, second, auxiliary, stop, logs)


class StepGradients:
    """Computes the gradient of a step in the parameters' `.grad`.

    It updates batch-norm statistics and algorithm buffers once per step: all passes of a step use the buffers from
    before it, and then the values that the first pass returned are stored.

    The loss is that of the full batch, however many processes and micro-batches have parts of it. Features of all
    processes are gathered with their gradient. Under accumulation, features are computed first without a graph, then
    the gradient of the loss by the features, and then every part is encoded again to backpropagate its rows of that
    gradient (gradient caching, Gao et al. 2021). The result is exact and costs one more forward pass. A loss that
    compares no samples is the weighted mean of the losses of its parts and needs neither step. `Losses.total` and
    `Losses.auxiliary` depend on different parameters, so one backward pass computes both gradients.
    """

    def __init__(
        self, model: nn.Module, inner: EndToEnd, accelerator: Accelerator, sharpness: Sharpness | None, seed: int,
        by_parts: bool,
    ) -> None:  # fmt: skip
        """`model` is `inner` as the accelerator prepared it, in training mode.

        `by_parts`: the loss is the mean of the losses of the parts, weighted by their sizes.
        """
        self.model, self.inner, self.algorithm, self.accelerator = model, inner, inner.algorithm, accelerator
        self.sharpness, self.seed, self.by_parts = sharpness, seed, by_parts
        self.roles = inner.roles()
        self.statistics = RunningStatistics(inner)
        # fp16's scaler skips a step whose loss is not finite, and training goes on; else it ends there
        self.outlives_overflow = accelerator.scaler is not None
        one_pass = sharpness is None and accelerator.num_processes == 1
        self.needs_statistics = self.outlives_overflow or not one_pass

    def run(self, batch: StepBatch, step: int) -> StepLosses:
        """Sets `.grad`, updates statistics and buffers, and returns the losses. One call is one inner step."""
        batch = replace(batch, parts=[self.algorithm.on_inputs(part, step) for part in batch.parts])
        # a single pass over a single part leaves the statistics of the step by itself
        self.statistics.begin(self.needs_statistics or len(batch.parts) > 1)
        backward = self._at_once
        if self.by_parts:
            backward = self._by_parts
        elif len(batch.parts) > 1 and not self.inner.encoder_frozen:
            backward = self._cached
        first = backward(batch, step, [None for _ in batch.parts], 1.0)
        pulled = self._pull()
        second = torch.zeros_like(first[0][0].total)
        if self.sharpness is not None:
            with self._at_offset(self.sharpness):
                second_pass = backward(batch, step, [losses.first_pass_draws for losses, _ in first], 0.0)
                self._pull()
            second = _weighted_sum((losses.total, weight) for losses, weight in second_pass)
        losses = self._commit(first, second)
        return losses._replace(total=losses.total + pulled)

    # Each of the three adds the gradient of one pass to `.grad`, averaged over processes at the last part. `draws` are
    # the `first_pass_draws` of a second pass. The statistics of a pass count `counted` times: 1 in the first one, 0 in
    # the second one. They return losses and their weights, which sum to 1 over all processes.

    def _by_parts(self, batch: StepBatch, step: int, draws: Sequence[Tensors | None], counted: float) -> WeightedLosses:
        """The pass of a loss that is the weighted mean of the losses of its parts."""
        returned = []
        for number, part in enumerate(batch.parts):
            weight = batch.share(number)
            with self._synchronised(batch, number):
                losses: Losses = self.algorithm(self._encode(batch, number, step), part, step, draws[number])
                # gradients are averaged over processes, and the weights already sum to 1 over all of them
                scale = weight * self.accelerator.num_processes
                self.accelerator.backward((losses.total + losses.auxiliary) * scale)
            self.statistics.collect(counted * weight)
            returned.append((_detach(losses), weight))
        return returned

    def _at_once(self, batch: StepBatch, step: int, draws: Sequence[Tensors | None], counted: float) -> WeightedLosses:
        """The pass of a full-batch loss of one part, or of a frozen encoder."""
        full_batch = batch.gathered([self._encode(batch, part, step) for part in range(len(batch.parts))])
        losses: Losses = self.algorithm(full_batch.x, full_batch, step, draws[0])
        self.accelerator.backward(losses.total + losses.auxiliary)
        # there are several parts here only if the encoder is frozen, and then no statistics change
        self.statistics.collect(counted * batch.share(0))
        return [(_detach(losses), 1 / len(batch.positions))]  # every process has computed the same losses

    def _cached(self, batch: StepBatch, step: int, draws: Sequence[Tensors | None], counted: float) -> WeightedLosses:
        """The pass of a full-batch loss under accumulation, by gradient caching."""
        leaves = []
        for number in range(len(batch.parts)):
            with torch.no_grad():
                z = self._encode(batch, number, step)
            self.statistics.collect(0.0)  # the passes below, over the same images, count
            leaves.append(z.requires_grad_())
        full_batch = batch.gathered(leaves)
        losses: Losses = self.algorithm(full_batch.x, full_batch, step, draws[0])
        loss = losses.total + losses.auxiliary
        # the graph is kept for the last part, whose backward pass goes through `loss` to the heads
        gradients = torch.autograd.grad(loss, leaves, retain_graph=True)
        for number, gradient in enumerate(gradients):
            with self._synchronised(batch, number):
                z = self._encode(batch, number, step)
                part = (z * gradient).sum()  # its gradient is that of the loss by the encoder, through this part
                last = number == len(gradients) - 1
                self.accelerator.backward(part + loss if last else part)  # `loss` itself adds the heads' gradient
            # after the backward pass, which still needs the statistics of the forward pass
            self.statistics.collect(counted * batch.share(number))
        return [(_detach(losses), 1 / len(batch.positions))]

    def _pull(self) -> Tensor | float:
        """Adds the gradient of `pull`, which is the same in every process, to `.grad`; returns its value."""
        if not self.algorithm.is_anchored:
            return 0.0
        head = {name: p for name, p in self.roles.head.items() if p.grad is not None}
        gradients = {name: p.grad for name, p in head.items() if p.grad is not None}
        scaler = self.accelerator.scaler  # its scale is in all gradients until the optimizer steps
        scale = 1.0 if scaler is None else scaler.get_scale()
        return pull(head, dict(self.algorithm.named_buffers()), gradients, scale)

    def _encode(self, batch: StepBatch, number: int, step: int) -> Tensor:
        """Returns the features of one of this process's parts."""
        # dropout and similar layers of encoders draw from torch's global generator: seed it by step and part, so that
        # the second pass repeats the draws of the first
        part = batch.process * len(batch.parts) + number
        torch.manual_seed(int(bits(self.seed, step, Stream.ENCODER, part)))
        with self._synchronised(batch, number):
            z: Tensor = self.model(batch.parts[number], step)
        return z

    def _synchronised(self, batch: StepBatch, number: int) -> AbstractContextManager[None]:
        """Context of a part's passes: gradients are averaged over processes only in that of the last part."""
        last = number == len(batch.parts) - 1
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    @contextmanager
    def _at_offset(self, sharpness: Sharpness) -> Iterator[None]:
        """Context of the second pass, at θ + offset; then sets `.grad` to the step's gradient.

        The parameters are restored from copies: subtracting the offset would not restore every bit.
        """
        main = {name: p for name, p in self.roles.main.items() if p.grad is not None}
        first, auxiliary = _take_gradients(main), _take_gradients(self.roles.auxiliary)
        with torch.no_grad():
            values = {name: p.clone() for name, p in main.items()}
            offset = sharpness.offset(values, first, sharpness.rho)
            torch._foreach_add_([*main.values()], [offset[name] for name in main])
            del offset  # it is as large as the model
        yield
        with torch.no_grad():
            torch._foreach_copy_([*main.values()], [*values.values()])
            combined = sharpness.combine(first, _take_gradients(main))
        for name, parameter in (main | self.roles.auxiliary).items():
            parameter.grad = combined.get(name, auxiliary.get(name))

    @torch.no_grad()
    def _commit(self, first: WeightedLosses, second: Tensor) -> StepLosses:
        """Returns the losses over all processes; stores statistics and the buffers that the first pass returned."""
        total = _weighted_sum((losses.total, weight) for losses, weight in first)
        auxiliary = _weighted_sum((losses.auxiliary, weight) for losses, weight in first)
        names = first[0][0].logs
        logs = {name: _weighted_sum((losses.logs[name], weight) for losses, weight in first) for name in names}
        buffers = dict(first[-1][0].buffers)  # integers (counters) are the same in every part
        means = [name for name, value in buffers.items() if value.is_floating_point()]
        buffers |= {name: _weighted_sum((losses.buffers[name], weight) for losses, weight in first) for name in means}
        stop = torch.full_like(total, float(stop_requested()))
        if self.accelerator.num_processes > 1:
            # summed over processes in place, in one message
            summed = [total, second, auxiliary, stop, *logs.values(), *(buffers[name] for name in means)]
            summed += self.statistics.sums
            flat = self.accelerator.reduce(torch.cat([tensor.flatten() for tensor in summed]), "sum")
            for tensor, values in zip(summed, flat.split([tensor.numel() for tensor in summed]), strict=True):
                tensor.copy_(values.view_as(tensor))
        losses = StepLosses(total, second, auxiliary, stop, logs)
        finite = losses.loss.isfinite() if self.outlives_overflow else None  # a tensor: the host does not wait for it
        self.statistics.commit(finite)
        for name, value in buffers.items():
            buffer = self.algorithm.get_buffer(name)
            buffer.copy_(value if finite is None else torch.where(finite, value, buffer))
        return losses


def _detach(losses: Losses) -> Losses:
    dicts = [{name: value.detach() for name, value in part.items()} for part in losses[2:]]
    return Losses(losses.total.detach(), losses.auxiliary.detach(), *dicts)


def _take_gradients(parameters: Mapping[str, nn.Parameter]) -> Tensors:
    """Returns the gradients that exist and removes them from the parameters."""
    taken = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            taken[name], parameter.grad = parameter.grad, None
    return taken


def _weighted_sum(values: Iterable[tuple[Tensor, float]]) -> Tensor:
    terms = list(values)
    total = torch.zeros_like(terms[0][0])
    for value, weight in terms:
        total += weight * value
    return total
