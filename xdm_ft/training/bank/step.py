"""Stacked models of one method, and one training step of all of them under `torch.func.vmap`.

A bank of one calls the loss without `vmap`, which would double the time of its step. Products are then computed by
other routines, whose rounding differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils._pytree import tree_map

from xdm_ft.algorithms import Algorithm
from xdm_ft.heads import Head
from xdm_ft.runtime.tensors import Batch, Losses
from xdm_ft.sharpness import Sharpness, Tensors
from xdm_ft.training import Job
from xdm_ft.training.bank.optimizers import Optimizer, clip, make_optimizer
from xdm_ft.training.compiling import compiled


@dataclass
class Bank:
    """H models of one method, stacked: every tensor is [H,…]."""

    template: Algorithm  # used for its code and settings; its own parameters are never used
    main: Tensors  # parameters that `Losses.total` trains
    auxiliary: Tensors  # parameters that `Losses.auxiliary` trains
    buffers: Tensors  # those that weights files hold; steps change them in place
    fixed: Tensors  # other buffers, which follow from the heads' settings
    factors: Tensor  # of the learning rates at every step, by the schedule: float32 [steps]
    optimizer: Optimizer
    sharpness: Sharpness | None
    sharpness_numbers: Tensors  # its settings, by the names of `Sharpness.numbers`: float [H] each
    clip_norm: float | None
    compiles: bool  # whether its steps are compiled

    def __post_init__(self) -> None:
        self.mixing = _InputMixing(self.template)

    @property
    def heads(self) -> int:
        return len(self.optimizer.lr)

    @property
    def steps(self) -> int:
        return len(self.factors)

    @property
    def parameters(self) -> Tensors:
        return self.main | self.auxiliary

    def stacked(self) -> Tensors:
        """Returns all parameters and buffers that weights files hold, [H,…]."""
        return {**self.main, **self.auxiliary, **self.buffers}

    def state(self, head: int) -> Tensors:
        """Returns a copy of one model's parameters and buffers, on the CPU."""
        return {name: values[head].detach().to("cpu", copy=True) for name, values in self.stacked().items()}


def step(bank: Bank, batch: Batch, number: int) -> Tensors:
    """Takes step `number` (from 0) of every head on its own batch [H,B,…]; changes parameters, buffers and optimizer.

    Returns the scalars before the step, each [H]: `loss`, `auxiliary_loss` if the method has one, and the algorithm's
    logs. If the algorithm takes several inner steps, they are means over these.
    """
    now = torch.full((1,), number, device=bank.factors.device)
    take, phase, taken = compiled_step() if bank.compiles else inner_step, bank.template.phase(number), list[Tensors]()
    if bank.template.resets_optimizer(number):
        bank.optimizer.reset()
    for domain in bank.template.update(bank.parameters, bank.buffers | bank.fixed, number):
        part = batch if domain is None else batch.block(domain, bank.template.task.num_domains, axis=1)
        taken.append(take(bank, part, now, phase))
    if len(taken) == 1:
        return taken[0]
    return {name: torch.stack([scalars[name] for scalars in taken]).mean(0) for name in taken[0]}


def inner_step(bank: Bank, batch: Batch, now: Tensor, phase: str) -> Tensors:
    """Takes one step of the optimizer on `batch`; returns the scalars before it.

    `now`: the number of the step, int64 [1] on the device. No Python number changes from step to step here, and no
    value is read from the device: steps of one phase launch the same operators on other tensors.
    """
    number = now[0]
    batch = bank.mixing.of_heads(bank.buffers | bank.fixed, batch, number)
    losses = _losses(bank, bank.main, batch, number, phase, first_pass_draws=None)
    # total and auxiliary depend on different parameters, so one backward pass computes both gradients
    auxiliary_gradients = _gradients(losses.total + losses.auxiliary, bank.parameters)
    gradients = {name: auxiliary_gradients.pop(name) for name in bank.main}
    if bank.sharpness is not None:
        centre = {name: parameter.detach() for name, parameter in bank.main.items()}
        offset_of = per_head(partial(_offset, bank.sharpness), bank.heads)
        offset = offset_of(centre, gradients, bank.sharpness_numbers)
        # new leaves: the second gradient is taken at θ + offset, with the offset as a constant
        perturbed = {name: (centre[name] + offset[name]).requires_grad_() for name in centre}
        second = _losses(bank, perturbed, batch, number, phase, losses.first_pass_draws)
        gradients = per_head(bank.sharpness.combine, bank.heads)(gradients, _gradients(second.total, perturbed))
    if bank.clip_norm is not None:
        gradients = clip(gradients, bank.clip_norm)
    bank.optimizer.step(bank.parameters, gradients | auxiliary_gradients, bank.factors.index_select(0, now))
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


def _losses(
    bank: Bank, main: Tensors, batch: Batch, step: Tensor, phase: str, first_pass_draws: Tensors | None
) -> Losses:
    """Returns the losses of every head with the parameters `main`; scalars become [H]."""

    def losses_of_head(state: Tensors, fields: Tensors, first_pass_draws: Tensors) -> Losses:
        return functional_call(
            bank.template, state, (fields["x"], Batch(**fields), step, first_pass_draws or None, phase)
        )

    state = {**main, **bank.auxiliary, **bank.buffers, **bank.fixed}
    losses: Losses = per_head(losses_of_head, bank.heads)(state, batch.fields(), first_pass_draws or {})
    return losses


def per_head(function: Callable[..., Any], heads: int) -> Callable[..., Any]:
    """Returns a function of one head's tensors as a function of those of all heads, [H,…] each."""
    if heads > 1:
        return vmap(function)

    def of_single_head(*stacked: Tensors) -> Any:
        result = function(*tree_map(lambda tensor: tensor.squeeze(0), stacked))
        return tree_map(lambda tensor: tensor[None], result)

    return of_single_head


def _offset(sharpness: Sharpness, parameters: Tensors, gradients: Tensors, numbers: Tensors) -> Tensors:
    return sharpness.offset(parameters, gradients, **numbers)


def _gradients(losses: Tensor, parameters: Tensors) -> Tensors:
    """Returns every head's gradient of its own loss, from losses [H]: heads are independent, so their sum has it."""
    gradients = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


class _InputMixing(nn.Module):
    """`Algorithm.on_inputs` as a module's forward pass, which is the only function that `functional_call` calls."""

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.changes_inputs = type(algorithm).on_inputs is not Algorithm.on_inputs

    def forward(self, fields: Tensors, step: Tensor) -> Tensors:
        return self.algorithm.on_inputs(Batch(**fields), step).fields()

    def of_heads(self, buffers: Tensors, batch: Batch, step: Tensor) -> Batch:
        """Returns the inputs of every head; `buffers` and the fields of `batch` are [H,…]."""
        if not self.changes_inputs:
            return batch

        def of_head(buffers_of_head: Tensors, fields: Tensors) -> Tensors:
            changed: Tensors = functional_call(self, buffers_of_head, (fields, step))
            return changed

        renamed = {f"algorithm.{name}": value for name, value in buffers.items()}
        return Batch(**vmap(of_head)(renamed, batch.fields()))


def stack(jobs: Sequence[Job], device: torch.device, compiles: bool = False) -> Bank:
    """Returns a bank of newly initialised models, one per job. `compiles`: whether its steps are compiled."""
    training, setup, sharpness = jobs[0].training, jobs[0].setup, jobs[0].sharpness
    models = [algorithm_of(job).to(device) for job in jobs]
    template = models[0]
    assert all(settings_of(model) == settings_of(template) for model in models), "settings that differ must be buffers"
    assert all(settings_of(model.head) == settings_of(template.head) for model in models), "a bank has one kind of head"
    assert all(settings_of(job.sharpness) == settings_of(sharpness) for job in jobs), "a bank has one kind of sharpness"
    stacked, buffers = stack_module_state(models)
    saved = template.state_dict().keys()
    auxiliary = {name for name in stacked if name.split(".")[0] in template.auxiliary}
    optimizer = make_optimizer(
        training.optimizer,
        stacked,
        lr=torch.tensor([job.training.lr for job in jobs], device=device),
        weight_decay=torch.tensor([job.training.weight_decay for job in jobs]),
        momentum=torch.tensor([job.training.momentum for job in jobs], device=device),
        betas=(training.beta1, training.beta2),
        amsgrad=training.amsgrad,
        steps=setup.steps * max(1, template.gradients_per_step(setup.task.num_domains)),
    )
    factors = [training.schedule.factor(number, setup.steps) for number in range(setup.steps)]
    return Bank(
        template=template,
        main={name: value for name, value in stacked.items() if name not in auxiliary},
        auxiliary={name: value for name, value in stacked.items() if name in auxiliary},
        buffers={name: value for name, value in buffers.items() if name in saved},
        fixed={name: value for name, value in buffers.items() if name not in saved},
        factors=torch.tensor(factors, device=device),
        optimizer=optimizer,
        sharpness=sharpness,
        sharpness_numbers={
            name: torch.tensor([getattr(job.sharpness, name) for job in jobs], device=device)
            for name in (sharpness.numbers if sharpness else ())
        },
        clip_norm=training.clip_norm,
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
    attributes = {} if model is None else vars(model)
    stacked = model.numbers if isinstance(model, Sharpness) else ()
    plain = (bool, int, float, str, tuple)
    shared = {name: value for name, value in attributes.items() if isinstance(value, plain) and name not in stacked}
    return {**shared, "class": type(model)}
