"""Stacked models of one method, and one training step of all of them under `torch.func.vmap`.

A bank of one calls the loss without `vmap`, which would double the time of its step. Products are then computed by
other routines, whose rounding differs.

The optimizers are torch.optim's SGD, Adam and AdamW on tensors [H,…], where every head has its own settings. They equal
torch.optim to float32 rounding. torch.optim itself does not serve: it has one learning rate per parameter group, and a
stacked parameter is one tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils._pytree import tree_map

from xdm_ft.algorithms import Algorithm, pull
from xdm_ft.core import Batch, Losses, Tensors
from xdm_ft.heads import Head
from xdm_ft.runtime.errors import UserError
from xdm_ft.sharpness import Sharpness
from xdm_ft.training import Job, compile_function


class Optimizer(ABC):
    """Updates stacked parameters in place. `lr` and `weight_decay` are float [H]; `weight_decay` is on the CPU.

    An update computes with tensors on the device of `lr` only, so that it can be compiled.
    """

    moments: dict[str, Tensors]  # all that steps change besides the parameters; 0 before the first step

    def __init__(self, lr: Tensor, weight_decay: Tensor) -> None:
        self.lr, self.weight_decay = lr.float(), weight_decay.float().to(lr.device)
        self.decays = bool((weight_decay != 0).any())  # on the CPU: a step reads nothing from the device

    @torch.no_grad()
    def step(self, parameters: Tensors, gradients: Tensors, factor: Tensor) -> None:
        """Takes one step with learning rates `lr` × `factor`; the schedule determines `factor`, float32 [1]."""
        for name, parameter in parameters.items():
            lr, weight_decay = _beside(self.lr * factor, parameter), _beside(self.weight_decay, parameter)
            self._update(name, parameter, gradients[name], lr, weight_decay)

    def reset(self) -> None:
        for moment in self.moments.values():
            for values in moment.values():
                values.zero_()

    def load_state(self, moments: Mapping[str, Any]) -> None:
        for name, moment in self.moments.items():
            for parameter, values in moment.items():
                values.copy_(moments[name][parameter])

    @abstractmethod
    def _update(self, name: str, parameter: Tensor, gradient: Tensor, lr: Tensor, weight_decay: Tensor) -> None: ...


class SGD(Optimizer):
    """v ← μ v + g + wd θ, θ ← θ − lr v (no dampening, no Nesterov). `momentum` μ: float [H]."""

    def __init__(self, parameters: Tensors, lr: Tensor, weight_decay: Tensor, momentum: Tensor) -> None:
        super().__init__(lr, weight_decay)
        self.momentum = momentum.float()
        self.moments = {"velocity": {name: torch.zeros_like(p) for name, p in parameters.items()}}

    def _update(self, name: str, parameter: Tensor, gradient: Tensor, lr: Tensor, weight_decay: Tensor) -> None:
        if self.decays:
            gradient = torch.addcmul(gradient, parameter, weight_decay)
        velocity = self.moments["velocity"][name].mul_(_beside(self.momentum, parameter)).add_(gradient)
        parameter.addcmul_(velocity, lr, value=-1)


class Adam(Optimizer):
    """Kingma & Ba 2015 with torch's ε of 1e-8, for at most `steps` steps; weight decay is an L2 penalty.

    `amsgrad` replaces the second moment by its largest value so far (Reddi et al. 2018). `decoupled` is AdamW
    (Loshchilov & Hutter 2019): weight decay subtracts lr × wd × θ from θ and does not enter the moments. It acts on
    weights alone (`Training.decays`), which have two axes or more besides that of the heads.
    """

    eps = 1e-8

    def __init__(
        self,
        parameters: Tensors,
        lr: Tensor,
        weight_decay: Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        amsgrad: bool = False,
        *,
        decoupled: bool,
        steps: int,
    ) -> None:
        super().__init__(lr, weight_decay)
        self.decoupled, (self.beta1, self.beta2) = decoupled, betas
        # 1 / √(1 − β2^t) and −1 / (1 − β1^t) after t steps, float32 [2, 1 + t]: in float64, as in torch.optim; up to
        # the first t from which on they are 1 and −1 in float32
        corrections = [(1.0, 1.0)]
        while len(corrections) <= steps and np.asarray(corrections[-1], np.float32).tolist() != [1.0, -1.0]:
            t = len(corrections)
            corrections.append(((1 - self.beta2**t) ** -0.5, -1 / (1 - self.beta1**t)))
        table = torch.tensor(corrections, dtype=torch.float64)
        self.corrections = table.float().T.contiguous().to(lr.device)
        self.taken = torch.zeros(1, dtype=torch.int64, device=lr.device)
        self.mean, self.square = ({name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(2))
        self.largest = {name: torch.zeros_like(p) for name, p in parameters.items()} if amsgrad else {}
        moments = {"mean": self.mean, "square": self.square, "largest": self.largest}
        # with the number of steps, so that a reset begins the bias correction again, as in torch.optim
        self.moments = {"taken": {"steps": self.taken}, **moments}

    def step(self, parameters: Tensors, gradients: Tensors, factor: Tensor) -> None:
        self.taken += 1
        known = self.taken.clamp(max=self.corrections.shape[1] - 1)
        self.scale, self.minus = self.corrections.index_select(1, known).unbind()  # float32 [1] each
        super().step(parameters, gradients, factor)

    def _update(self, name: str, parameter: Tensor, gradient: Tensor, lr: Tensor, weight_decay: Tensor) -> None:
        if self.decays and not self.decoupled:
            gradient = torch.addcmul(gradient, parameter, weight_decay)
        elif self.decays and parameter.ndim > 2:
            parameter.mul_(1 - lr * weight_decay)
        mean = self.mean[name].lerp_(gradient, 1 - self.beta1)
        square = self.square[name].mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        if self.largest:
            square = torch.maximum(self.largest[name], square, out=self.largest[name])
        # θ ← θ − lr · m̂ / (√v̂ + ε) with m̂ = m / (1 − β1^t) and v̂ = v / (1 − β2^t)
        ratio = mean / square.sqrt().mul_(self.scale).add_(self.eps)
        parameter.addcmul_(ratio.mul_(self.minus), lr)


def clip(gradients: Tensors, norm: float) -> Tensors:
    """Returns each head's gradients, scaled so that their joint norm is at most `norm` (as torch's clip_grad_norm_)."""
    per_tensor = [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients.values()]  # each [H]
    total = torch.linalg.vector_norm(torch.stack(per_tensor), dim=0)  # [H]
    scale = (norm / (total + 1e-6)).clamp(max=1)  # torch adds the same 1e-6
    return {name: g * _beside(scale, g) for name, g in gradients.items()}


def _beside(per_head: Tensor, stacked: Tensor) -> Tensor:
    """[H] → [H,1,…] with as many axes as `stacked`."""
    return per_head.view(-1, *(1 for _ in stacked.shape[1:]))


class Bank:
    """H newly initialised models of one method, one per job, stacked: every tensor is [H,…].

    `compiles`: whether its steps are compiled.
    """

    def __init__(self, jobs: Sequence[Job], device: torch.device, compiles: bool = False) -> None:
        training, setup, self.sharpness, self.compiles = jobs[0].training, jobs[0].setup, jobs[0].sharpness, compiles
        models = [job.new_algorithm().to(device) for job in jobs]
        self.template = template = models[0]  # used for its code and settings; its own parameters are never used
        assert all(settings_of(m) == settings_of(template) for m in models), "settings that differ must be buffers"
        assert all(settings_of(m.head) == settings_of(template.head) for m in models), "a bank has one kind of head"
        sharpness_settings = settings_of(self.sharpness)
        assert all(settings_of(j.sharpness) == sharpness_settings for j in jobs), "a bank has one kind of sharpness"
        self.mixing = InputMixing(template)

        stacked, buffers = stack_module_state(models)
        auxiliary = {name for name in stacked if name.split(".")[0] in template.auxiliary}
        self.main = {name: value for name, value in stacked.items() if name not in auxiliary}  # `Losses.total` trains
        self.auxiliary = {name: value for name, value in stacked.items() if name in auxiliary}
        saved = template.state_dict().keys()  # what weights files hold; steps change these buffers in place
        self.buffers = {name: value for name, value in buffers.items() if name in saved}
        self.fixed = {name: value for name, value in buffers.items() if name not in saved}  # follow from the settings
        numbers = self.sharpness.numbers if self.sharpness else ()
        self.sharpness_numbers = {
            name: torch.tensor([getattr(job.sharpness, name) for job in jobs], device=device) for name in numbers
        }

        factors = (training.schedule.factor(number, setup.steps) for number in range(setup.steps))
        # of the learning rates at every step, float32 [steps]; a list of a billion would fill the memory
        self.factors = torch.from_numpy(np.fromiter(factors, np.float32, setup.steps)).to(device)
        self.clip_norm = training.clip_norm
        lr = torch.tensor([job.training.lr for job in jobs], device=device)
        weight_decay = torch.tensor([job.training.weight_decay for job in jobs])
        self.optimizer: Optimizer
        if training.optimizer == "sgd":
            momentum = torch.tensor([job.training.momentum for job in jobs], device=device)
            self.optimizer = SGD(stacked, lr, weight_decay, momentum)
        else:
            betas, decoupled = (training.beta1, training.beta2), training.optimizer == "adamw"
            # the optimizer counts inner steps: an algorithm may take several in one step (Fish)
            steps = setup.steps * max(1, template.gradients_per_step(setup.task.num_domains))
            self.optimizer = Adam(stacked, lr, weight_decay, betas, training.amsgrad, decoupled=decoupled, steps=steps)

    @property
    def heads(self) -> int:
        return len(self.optimizer.lr)

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
    take, phase, taken = compile_step() if bank.compiles else inner_step, bank.template.phase(number), list[Tensors]()
    if bank.template.resets_optimizer(number):
        bank.optimizer.reset()
    for domain in bank.template.update(bank.parameters, bank.buffers | bank.fixed, number):
        part = batch if domain is None else batch.block(domain, bank.template.task.num_domains, axis=1)
        try:
            taken.append(take(bank, part, now, phase))
        except RuntimeError as error:
            if "random operation" not in str(error):
                raise
            raise UserError(
                f"{type(bank.template).__module__}: draws torch's random numbers, which heads in a bank cannot repeat; "
                "draw normal(self.seed, step, Stream.OWN, index) of xdm_ft.runtime.randomness"
            ) from error
    if len(taken) == 1:
        return taken[0]
    return {name: torch.stack([scalars[name] for scalars in taken]).mean(0) for name in taken[0]}


def inner_step(bank: Bank, batch: Batch, now: Tensor, phase: str) -> Tensors:
    """Takes one step of the optimizer on `batch`; returns the scalars before it.

    `now`: the number of the step, int64 [1] on the device. No Python number changes from step to step here, and no
    value is read from the device: steps of one phase launch the same operators on other tensors.
    """
    number = now[0]
    buffers = bank.buffers | bank.fixed
    if bank.mixing.changes_inputs:
        batch = bank.mixing.of_heads(buffers, batch, number)
    fields = batch.fields()

    def losses_of_head(state: Tensors, fields: Tensors, first_pass_draws: Tensors) -> Losses:
        arguments = (fields["x"], Batch(**fields), number, first_pass_draws or None, phase)
        losses: Losses = functional_call(bank.template, state, arguments)
        return losses

    losses_at = per_head(losses_of_head, bank.heads)  # scalars of the losses become [H]
    losses = losses_at({**bank.main, **bank.auxiliary, **buffers}, fields, {})
    # total and auxiliary depend on different parameters, so one backward pass computes both gradients
    auxiliary_gradients = _gradients(losses.total + losses.auxiliary, bank.parameters)
    gradients = {name: auxiliary_gradients.pop(name) for name in bank.main}
    pulled = pull(bank.main, bank.fixed, gradients)
    if (sharpness := bank.sharpness) is not None:
        centre = {name: parameter.detach() for name, parameter in bank.main.items()}
        offset_at = per_head(lambda theta, gradient, numbers: sharpness.offset(theta, gradient, **numbers), bank.heads)
        offset = offset_at(centre, gradients, bank.sharpness_numbers)
        # new leaves: the second gradient is taken at θ + offset, with the offset as a constant
        perturbed = {name: (centre[name] + offset[name]).requires_grad_() for name in centre}
        second = losses_at({**perturbed, **bank.auxiliary, **buffers}, fields, losses.first_pass_draws)
        of_second = _gradients(second.total, perturbed)
        pull(perturbed, bank.fixed, of_second)
        gradients = per_head(sharpness.combine, bank.heads)(gradients, of_second)
    if bank.clip_norm is not None:
        gradients = clip(gradients, bank.clip_norm)

    bank.optimizer.step(bank.parameters, gradients | auxiliary_gradients, bank.factors.index_select(0, now))
    for name, value in losses.buffers.items():  # those of the first pass: a step changes buffers once
        bank.buffers[name].copy_(value.detach())
    scalars = {**losses.logs, "loss": losses.total + pulled}
    if bank.auxiliary:
        scalars["auxiliary_loss"] = losses.auxiliary
    return {name: value.detach() for name, value in scalars.items()}


@cache
def compile_step() -> Callable[[Bank, Batch, Tensor, str], Tensors]:
    """Returns `inner_step` as torch.compile makes it: one graph for each method, phase and number of heads.

    Sizes are constants of a graph, so the bits of a chunk do not depend on the chunks before it.
    """
    return compile_function(inner_step, fullgraph=True, dynamic=False)


def per_head(function: Callable[..., Any], heads: int) -> Callable[..., Any]:
    """Returns a function of one head's tensors as a function of those of all heads, [H,…] each."""
    if heads > 1:
        return vmap(function)

    def of_single_head(*stacked: Tensors) -> Any:
        result = function(*tree_map(lambda tensor: tensor.squeeze(0), stacked))
        return tree_map(lambda tensor: tensor[None], result)

    return of_single_head


def _gradients(losses: Tensor, parameters: Tensors) -> Tensors:
    """Returns every head's gradient of its own loss, from losses [H]: heads are independent, so their sum has it."""
    gradients = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


class InputMixing(nn.Module):
    """`Algorithm.on_inputs` as a module's forward pass, which is the only function that `functional_call` calls."""

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.changes_inputs = type(algorithm).on_inputs is not Algorithm.on_inputs

    def forward(self, fields: Tensors, step: Tensor) -> Tensors:
        return self.algorithm.on_inputs(Batch(**fields), step).fields()

    def of_heads(self, buffers: Tensors, batch: Batch, step: Tensor) -> Batch:
        """Returns the inputs of every head; `buffers` and the fields of `batch` are [H,…]."""
        renamed = {f"algorithm.{name}": value for name, value in buffers.items()}
        mix = vmap(lambda state, fields: functional_call(self, state, (fields, step)))
        return Batch(**mix(renamed, batch.fields()))


def settings_of(model: Algorithm | Head | Sharpness | None) -> dict[str, object]:
    """Returns the settings that all heads of a bank must share: the class and its plain attributes.

    Tensors are stacked and may differ, and so may the `numbers` of a sharpness-aware step.
    """
    attributes = {} if model is None else vars(model)
    stacked = model.numbers if isinstance(model, Sharpness) else ()
    plain = (bool, int, float, str, tuple)
    shared = {name: value for name, value in attributes.items() if isinstance(value, plain) and name not in stacked}
    return {**shared, "class": type(model)}
