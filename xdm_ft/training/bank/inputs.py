"""The inputs of a bank's heads, changed by methods that mix inputs."""

from __future__ import annotations

from torch import Tensor, nn
from torch.func import functional_call, vmap

from xdm_ft.algorithms import Algorithm
from xdm_ft.runtime.tensors import Batch

Tensors = dict[str, Tensor]


class OnInputs(nn.Module):
    """`Algorithm.on_inputs` as a module's forward pass, which is the only function that `functional_call` calls."""

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.changes = type(algorithm).on_inputs is not Algorithm.on_inputs

    def forward(self, fields: Tensors, step: Tensor) -> Tensors:
        return self.algorithm.on_inputs(Batch(**fields), step).fields()

    def of_heads(self, buffers: Tensors, batch: Batch, step: Tensor) -> Batch:
        """Returns the inputs of every head; `buffers` and the fields of `batch` are [H,…]."""
        if not self.changes:
            return batch

        def of_one_head(own: Tensors, fields: Tensors) -> Tensors:
            changed: Tensors = functional_call(self, own, (fields, step))
            return changed

        own = {f"algorithm.{name}": value for name, value in buffers.items()}
        return Batch(**vmap(of_one_head)(own, batch.fields()))
