"""torch.optim's SGD, Adam and AdamW on stacked models: every tensor is [H,…], every head has its own settings.

They equal torch.optim to float32 rounding. torch.optim itself does not serve: it has one learning rate per parameter
group, and a stacked parameter is one tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]  # parameter name → values [H,…]


class Optimizer(ABC):
    """Updates stacked parameters in place. `lr` and `weight_decay` are float [H]; `weight_decay` is on the CPU.

    An update computes with tensors on the device of `lr` only, so that it can be compiled.
    """

    moments: dict[str, Tensors]  # all that steps change besides the parameters; 0 before the first step

    def __init__(self, lr: Tensor, weight_decay: Tensor) -> None:
        self.lr, self.weight_decay = lr.float(), weight_decay.float().to(lr.device)
        self.decays = bool((weight_decay != 0).any())

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
        # 1 / √(1 − β2^t) and −1 / (1 − β1^t) after t steps, float32 [2, 1 + steps]: in float64, as in torch.optim
        corrections = [((1 - self.beta2**t) ** -0.5, -1 / (1 - self.beta1**t)) for t in range(1, steps + 1)]
        table = torch.tensor([(1.0, 1.0), *corrections], dtype=torch.float64)
        self.corrections = table.float().T.contiguous().to(lr.device)
        self.taken = torch.zeros(1, dtype=torch.int64, device=lr.device)
        self.mean, self.square = ({name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(2))
        self.largest = {name: torch.zeros_like(p) for name, p in parameters.items()} if amsgrad else {}
        moments = {"mean": self.mean, "square": self.square, "largest": self.largest}
        self.moments = {"taken": {"steps": self.taken}, **moments}

    def step(self, parameters: Tensors, gradients: Tensors, factor: Tensor) -> None:
        self.taken += 1
        self.scale, self.minus = self.corrections.index_select(1, self.taken).unbind()  # float32 [1] each
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
