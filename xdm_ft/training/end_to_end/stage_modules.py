"""Modules of an algorithm inside the encoder, in end-to-end training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from xdm_ft.encoders import Encoder
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.tensors import Batch


class StageModules(nn.Module):
    """Each replaces the output of one named module of the encoder, in training mode and inside `during` only."""

    def __init__(self, encoder: Encoder, by_name: Mapping[str, nn.Module]) -> None:
        super().__init__()
        assert not any(list(module.buffers()) for module in by_name.values()), "modules behind stages have no buffers"
        self.list = nn.ModuleList(by_name.values())
        self.names = tuple(by_name)
        self.now: tuple[Batch, int] | None = None  # the batch that is being encoded, and the step
        self.reached: set[str] = set()  # the modules that this forward pass has called
        for name, module in by_name.items():
            encoder.get_submodule(name).register_forward_hook(partial(self._replace, name, module))

    @contextmanager
    def during(self, batch: Batch, step: int) -> Iterator[None]:
        """Context of the encoding of `batch`. Raises `UserError` if the encoder did not call one of the modules."""
        self.now, self.reached = (batch, step) if self.training else None, set()
        try:
            yield
        finally:
            active, self.now = self.now, None
        if active is not None and (missed := [name for name in self.names if name not in self.reached]):
            raise UserError(
                f"encoder.model: its module {missed[0]} is never called, so no module can be placed after it; "
                "use another model"
            )

    def _replace(self, name: str, module: nn.Module, _: nn.Module, inputs: Any, output: Any) -> Tensor | None:
        if self.now is None:
            return None
        self.reached.add(name)
        # images are square, and so are maps [B,C,h,w]: this detects channels-last maps and tokens
        if not isinstance(output, Tensor) or output.ndim != 4 or output.shape[2] != output.shape[3]:
            shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise UserError(
                f"encoder.model: its module {name} returns {shape}, and this method needs feature maps [B,C,h,w]; "
                "use a CNN"
            )
        replaced: Tensor = module(output, *self.now)
        return replaced
