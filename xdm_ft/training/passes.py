"""The gradient of one step: one pass over its micro-batches, or the two of a sharpness-aware step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from xdm_ft.algorithms import Algorithm
from xdm_ft.encoders import Encoder
from xdm_ft.interrupt import stop_requested
from xdm_ft.randomness import Stream, bits
from xdm_ft.sharpness import Sharpness
from xdm_ft.tensors import Batch, Losses
from xdm_ft.training.batch_norm import RunningStatistics, batch_norm_layers
from xdm_ft.training.batches import MicroBatch
from xdm_ft.training.stage_modules import StageModules
from xdm_ft.training.together import Together

if TYPE_CHECKING:
    from accelerate import Accelerator

BatchNorm = Literal["train", "frozen"]


class EndToEnd(nn.Module):
    """Encoder and algorithm as one module, so that a step encodes its images once and one wrapper holds all weights.

    `batch_norm: frozen` keeps batch-norm layers in eval mode while training: they normalise by their running
    statistics, which stay what they were, and their weights and biases train on (DomainBed's choice).
    """

    def __init__(self, encoder: Encoder, algorithm: Algorithm, batch_norm: BatchNorm) -> None:
        super().__init__()
        self.encoder, self.algorithm, self.batch_norm = encoder, algorithm, batch_norm
        _freeze_unreached(encoder)
        self.trainable = [p for p in encoder.parameters() if p.requires_grad]
        self.encoder_frozen = False
        self.stages = StageModules(encoder, algorithm.stage_modules(encoder))

    def forward(
        self, batch: Batch, step: int, held: Mapping[str, Tensor] | None = None, together: Together | None = None
    ) -> Losses:
        batch = self.algorithm.on_inputs(batch, step)
        with self.stages.during(batch, step):
            z = self.encoder(batch.x)  # [B,K]
        with torch.autocast(z.device.type, enabled=False):
            z = z.float()
            if together is not None:
                z, batch = together.gathered(z)
            losses: Losses = self.algorithm(z, batch, step, held)
        return losses

    def train(self, mode: bool = True) -> EndToEnd:
        super().train(mode)
        if self.batch_norm == "frozen":
            for layer in batch_norm_layers(self.encoder):
                layer.eval()
        if self.encoder_frozen:
            self.encoder.eval()
        return self

    def freeze_encoder(self, frozen: bool) -> None:
        """Whether the head trains alone: the encoder then stays in eval mode, without gradient."""
        self.encoder_frozen = frozen
        for parameter in self.trainable:
            parameter.requires_grad_(not frozen)
        self.train(self.training)

    def roles(self) -> Roles:
        """The parameters that train. An encoder may come with some that do not (fixed position embeddings)."""
        encoder = {f"encoder.{name}": p for name, p in self.encoder.named_parameters() if p.requires_grad}
        own = dict(self.algorithm.named_parameters())
        auxiliary = {name: p for name, p in own.items() if name.split(".")[0] in self.algorithm.auxiliary}
        head = {name: p for name, p in own.items() if name not in auxiliary}
        return Roles(encoder, head, auxiliary)

    def named_weights(self) -> dict[str, Tensor]:
        """Parameters and buffers: `encoder.…`, and the algorithm's own under its names."""
        state = {f"encoder.{name}": tensor for name, tensor in self.encoder.state_dict().items()}
        return state | self.algorithm.state_dict()

    def weights(self) -> dict[str, Tensor]:
        """A copy of them on the CPU."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.named_weights().items()}


def _freeze_unreached(encoder: Encoder) -> None:
    """Parameters that features do not depend on (CLIP's text side) get no gradient, which processes would wait for."""
    parameters = [p for p in encoder.parameters() if p.requires_grad]
    side = encoder.preprocessing.size
    z = encoder(torch.zeros(2, 3, side, side, device=next(encoder.parameters()).device))
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(z.sum(), parameters, allow_unused=True), strict=True
    ):
        parameter.requires_grad_(gradient is not None)


class Roles(NamedTuple):
    """The trainable parameters by what is done with them."""

    encoder: dict[str, nn.Parameter]
    head: dict[str, nn.Parameter]  # the class head and what else of the algorithm trains by `Losses.total`
    auxiliary: dict[str, nn.Parameter]  # trained by `Losses.auxiliary`: outside clipping and sharpness

    @property
    def main(self) -> dict[str, nn.Parameter]:
        return self.encoder | self.head


class StepLosses(NamedTuple):
    """Means over the whole batch, all processes together, and how many of them are asked to stop."""

    total: Tensor  # scalar
    second: Tensor  # scalar: `total` of the second pass; 0 without one
    auxiliary: Tensor  # scalar
    stop: Tensor  # scalar: every process reads the same, so they stop after the same step
    logs: dict[str, Tensor]

    @classmethod
    def mean(cls, of: list[StepLosses]) -> StepLosses:
        """Over several steps of the optimizer that log the same."""
        total, second, auxiliary, stop = (
            torch.stack(values).mean(0) for values in zip(*(one[:4] for one in of), strict=True)
        )
        logs = {name: torch.stack([one.logs[name] for one in of]).mean(0) for name in of[0].logs}
        return cls(total, second, auxiliary, stop, logs)


class Passes:
    """Leaves the gradient of a step in the parameters' `.grad` and moves, once a step, what else a step moves.

    That is the batch-norm statistics and the algorithm's buffers: all passes and micro-batches of a step see the
    buffers from before it; then they become the weighted mean of what the first pass's micro-batches returned.
    `Losses.total` and `Losses.auxiliary` reach different parameters, so one backward pass serves both.
    """

    def __init__(
        self, model: nn.Module, inner: EndToEnd, accelerator: Accelerator, sharpness: Sharpness | None, seed: int
    ) -> None:
        """`model` is `inner` as the accelerator prepared it, in training mode."""
        self.model, self.inner, self.accelerator = model, inner, accelerator
        self.sharpness, self.seed = sharpness, seed
        self.roles = inner.roles()
        self.statistics = RunningStatistics(inner)

    def run(self, micro_batches: list[MicroBatch], step: int) -> StepLosses:
        self.statistics.begin()
        first = self._backward_pass(micro_batches, step)
        second = torch.zeros_like(first[0].total)
        if self.sharpness is not None:
            second = self._pass_at_offset(self.sharpness, micro_batches, step, [losses.held for losses in first])
        return self._commit(first, second, [micro_batch.weight for micro_batch in micro_batches])

    def _backward_pass(
        self, micro_batches: list[MicroBatch], step: int, held: list[dict[str, Tensor]] | None = None
    ) -> list[Losses]:
        """Adds to `.grad`, averaged over processes at the last micro-batch. `held` makes it a second pass."""
        # dropout and its like inside encoders draw from torch's global generator: make it a function of the step,
        # which also gives the second pass the draws of the first
        torch.manual_seed(int(bits(self.seed, step, Stream.ENCODER, self.accelerator.process_index)))
        returned = []
        for place, (batch, weight, together) in enumerate(micro_batches):
            last = place == len(micro_batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                losses: Losses = self.model(batch, step, None if held is None else held[place], together)
                # processes' gradients are averaged, while the weights of all their micro-batches sum to 1
                scale = weight * self.accelerator.num_processes if together is None else together.weight
                self.accelerator.backward((losses.total + losses.auxiliary) * scale)
            if held is None:
                self.statistics.collect(weight)
            returned.append(_detached(losses))
        return returned

    def _pass_at_offset(
        self, sharpness: Sharpness, micro_batches: list[MicroBatch], step: int, held: list[dict[str, Tensor]]
    ) -> Tensor:
        """The second pass: its loss, weighted over this process's micro-batches. `.grad` becomes the step's gradient.

        The parameters are put back from copies: taking the offset off again would not restore every bit.
        """
        main = {name: p for name, p in self.roles.main.items() if p.grad is not None}
        first, auxiliary = _take_gradients(main), _take_gradients(self.roles.auxiliary)
        with torch.no_grad():
            values = {name: p.clone() for name, p in main.items()}
            offset = sharpness.offset(values, first, sharpness.rho)
            for name, parameter in main.items():
                parameter.add_(offset[name])
        returned = self._backward_pass(micro_batches, step, held)
        with torch.no_grad():
            for name, parameter in main.items():
                parameter.copy_(values[name])
            _set_gradients(main, sharpness.combine(first, _take_gradients(main)))
            _set_gradients(self.roles.auxiliary, auxiliary)
        return _weighted_sum(
            [losses.total for losses in returned], [micro_batch.weight for micro_batch in micro_batches]
        )

    @torch.no_grad()
    def _commit(self, first: list[Losses], second: Tensor, weights: list[float]) -> StepLosses:
        total = _weighted_sum([losses.total for losses in first], weights)
        auxiliary = _weighted_sum([losses.auxiliary for losses in first], weights)
        logs = {name: _weighted_sum([losses.logs[name] for losses in first], weights) for name in first[0].logs}
        buffers = {}
        for name, value in first[-1].buffers.items():
            # whole numbers (counters) are the same in every micro-batch
            is_mean = value.is_floating_point()
            buffers[name] = _weighted_sum([losses.buffers[name] for losses in first], weights) if is_mean else value
        means = [value for value in buffers.values() if value.is_floating_point()]
        stop = torch.full_like(total, float(stop_requested()))
        moved = [total, second, auxiliary, stop, *logs.values(), *means, *self.statistics.sums]
        _sum_over_processes(self.accelerator, moved)
        self.statistics.commit()
        for name, value in buffers.items():
            self.inner.algorithm.get_buffer(name).copy_(value)
        return StepLosses(total, second, auxiliary, stop, logs)


def _detached(losses: Losses) -> Losses:
    dicts = [{name: value.detach() for name, value in part.items()} for part in losses[2:]]
    return Losses(losses.total.detach(), losses.auxiliary.detach(), *dicts)


def _take_gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gradients there are; the parameters are left without."""
    taken = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            taken[name], parameter.grad = parameter.grad, None
    return taken


def _set_gradients(parameters: dict[str, nn.Parameter], gradients: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.grad = gradients.get(name)


def _weighted_sum(values: list[Tensor], weights: list[float]) -> Tensor:
    total = torch.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        total += weight * value
    return total


def _sum_over_processes(accelerator: Accelerator, tensors: list[Tensor]) -> None:
    """In place, in one message."""
    if accelerator.num_processes == 1:
        return
    flat = accelerator.reduce(torch.cat([tensor.flatten() for tensor in tensors]), "sum")
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))
