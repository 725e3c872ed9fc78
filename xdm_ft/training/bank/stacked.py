"""Stacked models of one method, and a training step of all of them: one call of the loss under `torch.func.vmap`.

A bank of one calls the loss without `vmap`, which would double the time of its step. Products are then computed by
other routines, whose rounding differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap
from torch.utils._pytree import tree_map

from xdm_ft.algorithms import Algorithm
from xdm_ft.heads import Head
from xdm_ft.runtime.tensors import Batch, Losses
from xdm_ft.sharpness import Sharpness, Tensors
from xdm_ft.training import Job, Schedule
from xdm_ft.training.bank.inputs import OnInputs
from xdm_ft.training.bank.optimizers import Optimizer, clip, make_optimizer
from xdm_ft.training.compiling import compiled
from xdm_ft.training.schedule import learning_rate_factor


@dataclass
class Bank:
    """H models of one method, stacked: every tensor is [H,…]."""

    template: Algorithm  # used for its code and settings; its own parameters are never used
    on_inputs: OnInputs  # of the template
    main: Tensors  # parameters that `Losses.total` trains
    auxiliary: Tensors  # parameters that `Losses.auxiliary` trains
    buffers: Tensors  # those that weights files hold; steps change them in place
    fixed: Tensors  # other buffers, which follow from the heads' settings
    lr: Tensor
    factors: Tensor  # of the learning rates at every step, by the schedule: float32 [steps]
    optimizer: Optimizer
    sharpness: Sharpness | None
    numbers: Tensors  # settings of `sharpness`, by the names of `Sharpness.numbers`: float [H] each
    clip_norm: float | None
    schedule: Schedule
    steps: int
    compiles: bool  # whether its steps are compiled

    def stacked(self) -> Tensors:
        """Returns all parameters and buffers of the models, [H,…]."""
        return {**self.main, **self.auxiliary, **self.buffers}

    def state(self, head: int) -> Tensors:
        """Returns a copy of one model's parameters and buffers, on the CPU."""
        return {name: values[head].detach().to("cpu", copy=True) for name, values in self.stacked().items()}


def step(bank: Bank, batch: Batch, number: int) -> Tensors:
    """Takes step `number` (from 0) of every head on its own batch [H,B,…]; changes parameters, buffers and optimizer.

    Returns the scalars before the step, each [H]: `loss`, `auxiliary_loss` if the method has one, and the algorithm's
    logs. If the algorithm takes several inner steps, they are means over these.
    """
    taken: list[Tensors] = []
    now = torch.full((1,), number, device=bank.lr.device)
    phase = bank.template.phase(number)
    take = compiled_step() if bank.compiles else inner_step

    def step_on(domain: int | None) -> None:
        part = batch if domain is None else batch.block(domain, bank.template.task.num_domains, axis=1)
        taken.append(take(bank, part, now, phase))

    if bank.template.resets_optimizer(number):
        bank.optimizer.reset()
    bank.template.update(bank.main | bank.auxiliary, bank.buffers | bank.fixed, step_on, number)
    if len(taken) == 1:
        return taken[0]
    return {name: torch.stack([scalars[name] for scalars in taken]).mean(0) for name in taken[0]}


def inner_step(bank: Bank, batch: Batch, now: Tensor, phase: str) -> Tensors:
    """Takes one step of the optimizer on `batch`; returns the scalars before it.

    `now`: the number of the step, int64 [1] on the device. No Python number changes from step to step here, and no
    value is read from the device: steps of one phase launch the same operators on other tensors.
    """
    step = now[0]
    batch = bank.on_inputs.of_heads(bank.buffers | bank.fixed, batch, step)
    losses = _losses(bank, bank.main, batch, step, phase, reuse=None)
    # total and auxiliary depend on different parameters, so one backward pass computes both gradients
    every_gradient = _gradients(losses.total + losses.auxiliary, bank.main | bank.auxiliary)
    gradients = {name: every_gradient.pop(name) for name in bank.main}
    if bank.sharpness is not None:
        centre = {name: parameter.detach() for name, parameter in bank.main.items()}
        offset = _each_head(bank, partial(_offset, bank.sharpness), centre, gradients, bank.numbers)
        # new leaves: the second gradient is taken at θ + offset, with the offset as a constant
        perturbed = {name: (centre[name] + offset[name]).requires_grad_() for name in centre}
        second = _losses(bank, perturbed, batch, step, phase, losses.reuse)
        gradients = _each_head(bank, bank.sharpness.combine, gradients, _gradients(second.total, perturbed))
    if bank.clip_norm is not None:
        gradients = clip(gradients, bank.clip_norm)
    bank.optimizer.step(bank.main | bank.auxiliary, gradients | every_gradient, bank.factors.index_select(0, now))
    for name, value in losses.buffers.items():  # those of the first pass: a step changes buffers once
        bank.buffers[name].copy_(value.detach())
    scalars = {**losses.logs, "loss": losses.total}
    if bank.auxiliary:
        scalars["auxiliary_loss"] = losses.auxiliary
    return {name: value.detach() for name, value in scalars.items()}


@cache
def compiled_step() -> Callable[[Bank, Batch, Tensor, str], Tensors]:
    """Returns `inner_step` as torch.compile makes it: one graph for each method, phase and number of heads.

    Sizes are constants of a graph, so the bits of a chunk do not depend on the chunks before it.
    """
    return compiled(inner_step, fullgraph=True, dynamic=False)


def _losses(bank: Bank, main: Tensors, batch: Batch, step: Tensor, phase: str, reuse: Tensors | None) -> Losses:
    """Returns the losses of every head with the parameters `main`; scalars become [H]."""

    def of_one_head(state: Tensors, fields: Tensors, reuse: Tensors) -> Losses:
        return functional_call(bank.template, state, (fields["x"], Batch(**fields), step, reuse or None, phase))

    state = {**main, **bank.auxiliary, **bank.buffers, **bank.fixed}
    losses: Losses = _each_head(bank, of_one_head, state, batch.fields(), reuse or {})
    return losses


def _each_head(bank: Bank, function: Callable[..., Any], *given: Tensors) -> Any:
    """Calls a function of one head's tensors for every head; tensors [H,…] → the function's results, [H,…] each."""
    if len(bank.lr) > 1:
        return vmap(function)(*given)
    return tree_map(lambda tensor: tensor[None], function(*tree_map(lambda tensor: tensor.squeeze(0), given)))


def _offset(sharpness: Sharpness, parameters: Tensors, gradients: Tensors, numbers: Tensors) -> Tensors:
    return sharpness.offset(parameters, gradients, **numbers)


def _gradients(losses: Tensor, parameters: Tensors) -> Tensors:
    """Returns every head's gradient of its own loss, from losses [H]: heads are independent, so their sum has it."""
    gradients = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


def stack(jobs: Sequence[Job], device: torch.device, compiles: bool = False) -> Bank:
    """Returns a bank of newly initialised models, one per job. `compiles`: whether its steps are compiled."""
    training = jobs[0].training
    models = [algorithm_of(job).to(device) for job in jobs]
    template, sharpness = models[0], jobs[0].sharpness
    assert all(settings_of(model) == settings_of(template) for model in models), "settings that differ must be buffers"
    assert all(settings_of(model.head) == settings_of(template.head) for model in models), "a bank has one kind of head"
    assert all(settings_of(job.sharpness) == settings_of(sharpness) for job in jobs), "a bank has one kind of sharpness"
    stacked, buffers = stack_module_state(models)
    saved = template.state_dict().keys()
    is_auxiliary = {name: name.split(".")[0] in template.auxiliary for name in stacked}
    lr = torch.tensor([job.training.lr for job in jobs], device=device)
    weight_decay = torch.tensor([job.training.weight_decay for job in jobs])
    momentum = torch.tensor([job.training.momentum for job in jobs], device=device)
    numbers = {
        name: torch.tensor([getattr(job.sharpness, name) for job in jobs], device=device)
        for name in (sharpness.numbers if sharpness else ())
    }
    steps, domains = jobs[0].setup.steps, jobs[0].setup.task.num_domains
    factors = [learning_rate_factor(number, steps, training.schedule) for number in range(steps)]
    return Bank(
        template=template,
        on_inputs=OnInputs(template),
        main={name: value for name, value in stacked.items() if not is_auxiliary[name]},
        auxiliary={name: value for name, value in stacked.items() if is_auxiliary[name]},
        buffers={name: value for name, value in buffers.items() if name in saved},
        fixed={name: value for name, value in buffers.items() if name not in saved},
        lr=lr,
        factors=torch.tensor(factors, device=device),
        optimizer=make_optimizer(
            training.optimizer,
            stacked,
            lr,
            weight_decay,
            momentum,
            (training.beta1, training.beta2),
            training.amsgrad,
            steps=steps * max(1, template.gradients_per_step(domains)),
        ),
        sharpness=sharpness,
        numbers=numbers,
        clip_norm=training.clip_norm,
        schedule=training.schedule,
        steps=steps,
        compiles=compiles,
    )


def algorithm_of(job: Job) -> Algorithm:
    model = job.make(job.setup)
    assert isinstance(model, Algorithm)
    return model


def settings_of(model: Algorithm | Head | Sharpness | None) -> dict[str, object]:
    """Returns the settings that all heads of a bank must share: the class and its plain attributes.

    Tensors are stacked and may differ, and so may the `numbers` of a sharpness-aware step.
    """
    own = {} if model is None else vars(model)
    plain = {name: value for name, value in own.items() if isinstance(value, bool | int | float | str | tuple)}
    stacked = model.numbers if isinstance(model, Sharpness) else ()
    return {**{name: value for name, value in plain.items() if name not in stacked}, "class": type(model)}
