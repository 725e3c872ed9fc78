"""A trainer as simple as can be: one model, one batch a step, torch.optim. What both engines must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from partnered import mixed
from torch import Tensor, nn

from xdm_ft.core import Batch
from xdm_ft.training import Job, Training

State = dict[str, Tensor]
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def naive(
    job: Job,
    training: Training,
    batch_of: Callable[[int], Batch],
    encoder: nn.Module | None = None,
    *,
    above: tuple[str, ...] = ("",),
    batch_norm: str = "frozen",
    unfreeze_at: int = 0,
    first: int = 0,
    double: bool = False,
) -> list[State]:
    """The state before training and after every step from `first` on.

    `batch_of(step)` has x; `above`: prefixes of the encoder's parameters that train; what else it has stays in eval
    mode. `double`: in float64.
    """
    encoder, algorithm = copy.deepcopy(encoder or nn.Identity()), job.make(job.setup)
    if any(isinstance(module, nn.Conv2d) for module in encoder.modules()):
        encoder.to(memory_format=torch.channels_last)  # convolutions of another layout round differently
    if double:
        encoder, algorithm = encoder.double(), algorithm.double()
    of_encoder = {name: p for name, p in encoder.named_parameters() if name.startswith(above)}
    own = dict(algorithm.named_parameters())
    auxiliary = {name: p for name, p in own.items() if name.split(".")[0] in algorithm.auxiliary}
    main = {f"encoder.{name}": p for name, p in of_encoder.items()}
    main |= {name: p for name, p in own.items() if name not in auxiliary}
    lrs = {
        name: training.encoder_lr if name.startswith("encoder.") else job.training.lr for name in (*main, *auxiliary)
    }
    parameters = main | auxiliary
    spared = {name for name, p in parameters.items() if training.optimizer == "adamw" and p.ndim < 2}
    groups = [
        {"params": [p], "weight_decay": 0.0 if name in spared else job.training.weight_decay}
        for name, p in parameters.items()
    ]
    optimizer = OPTIMIZERS[training.optimizer](
        groups, **({"momentum": training.momentum} if training.optimizer == "sgd" else {"amsgrad": training.amsgrad})
    )

    def snapshot() -> State:
        state = {f"encoder.{n}": v for n, v in encoder.state_dict().items() if n.startswith(above)}
        return {name: value.detach().clone() for name, value in (state | algorithm.state_dict()).items()}

    def losses_at(part: Batch, step: int, first_pass_draws: Mapping[str, Tensor] | None = None):  # type: ignore[no-untyped-def]
        losses = algorithm(encoder(part.x), part, step, first_pass_draws)
        return losses if job.setup.anchor is None else losses._replace(total=losses.total + pull())

    start = {name: p.detach().clone() for name, p in own.items()}

    def pull() -> Tensor:
        """By autograd: the mean over classes of a (‖w − w⁰‖² + (b − b⁰)²) / ‖w⁰‖²."""
        square = start["head.weight"].square().sum(1)
        square = square.mean() if job.setup.head_init == "random" else square
        way = (own["head.weight"] - start["head.weight"]).square().sum(1)
        if "head.bias" in own:
            way = way + (own["head.bias"] - start["head.bias"]).square()
        return (job.setup.anchor * way / square).mean()

    def gradients(loss: Tensor, of: Mapping[str, nn.Parameter]) -> State:
        found = torch.autograd.grad(loss, list(of.values()), retain_graph=True, allow_unused=True)
        return {name: g for name, g in zip(of, found, strict=True) if g is not None}

    states = [snapshot()]
    for step in range(first, job.setup.steps):
        frozen = step < unfreeze_at
        for name, module in encoder.named_modules():
            is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            trains = not frozen and f"{name}.".startswith(above)
            module.training = trains and not (is_norm and batch_norm == "frozen")
        for parameter in of_encoder.values():
            parameter.requires_grad_(not frozen)
        trained = {name: p for name, p in main.items() if p.requires_grad}
        for group, name in zip(optimizer.param_groups, parameters, strict=True):
            group["lr"] = lrs[name] * training.schedule.factor(step, job.setup.steps)
        for domain in algorithm.update(parameters, dict(algorithm.named_buffers()), step):
            batch = batch_of(step)
            chosen = slice(None) if domain is None else batch.domain == domain
            part = Batch(**{name: value[chosen] for name, value in batch.fields().items()})
            part = mixed(algorithm, part, step)
            losses = losses_at(part, step)
            found = gradients(losses.total, trained)
            beside = gradients(losses.auxiliary, auxiliary) if auxiliary else {}
            if job.sharpness is not None:
                before = {name: trained[name].detach().clone() for name in found}
                offset = job.sharpness.offset(before, found, job.sharpness.rho)
                _set(trained, {name: before[name] + offset[name] for name in found})
                second = gradients(losses_at(part, step, losses.first_pass_draws).total, trained)
                _set(trained, before)
                found = job.sharpness.combine(found, second)
            for name, parameter in parameters.items():
                parameter.grad = (found | beside).get(name)
            if training.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(main.values(), training.clip_norm)
            if algorithm.resets_optimizer(step):
                optimizer.state.clear()
            optimizer.step()
            for name, value in losses.buffers.items():
                algorithm.get_buffer(name).copy_(value)
        states.append(snapshot())
    return states


@torch.no_grad()
def _set(parameters: Mapping[str, nn.Parameter], values: State) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)


def mean(states: list[State], job: Job, factors: list[float] | None = None) -> State:
    """The last state, with the mean of the parameters over all of them; buffers are not averaged."""
    weights, buffers = torch.tensor(factors or [1.0] * len(states)), dict(job.make(job.setup).named_buffers())
    averaged = {
        name: (torch.stack([state[name] for state in states]).movedim(0, -1) @ (weights / weights.sum()))
        for name, value in states[0].items()
        if value.is_floating_point() and name not in buffers
    }
    return states[-1] | averaged
