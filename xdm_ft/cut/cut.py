"""An encoder cut in two: below, images → activations; above, activations → z."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from xdm_ft.blocks import PROBE_ERRORS, preserve_modes, probe_images, zeros
from xdm_ft.encoders import Encoder, Portable
from xdm_ft.model_sources.source import reason_of
from xdm_ft.runtime.errors import UserError, plural

KEY = "trainable"  # {blocks: k}, or {lora: {blocks: k}}
ADVICE = "cut it elsewhere (blocks), or set trainable: true or false"
TOLERANCE = 0.02  # of the probe, relative to the largest feature, where arithmetic is not float32 on a CPU


class Cut:
    """The place in an encoder before its last `blocks` blocks. Changes nothing in the encoder by itself.

    Both parts run the encoder's own `forward`, so that all that the library computes beside the blocks (masks, rotary
    embeddings, final norm) stays as it wrote it. Below is stopped where the first block above begins. Above runs on one
    black image, on which the blocks below are skipped, and the first block above gets the activations in its place.

    Raises `UserError` if the encoder has fewer blocks, or if above(below(x)) is not z for two random images.
    """

    def __init__(self, encoder: Encoder, blocks: int) -> None:
        chain = encoder.chain
        if not chain.blocks:
            raise UserError(f"{KEY}: {encoder.blocks_reason}")
        if blocks > len(chain.blocks):
            raise UserError(
                f"{KEY}: blocks: {blocks} is more than the {plural(len(chain.blocks), 'block')} of the encoder; set at "
                f"most {len(chain.blocks)}, or trainable: true, which trains its stem too"
            )
        assert blocks >= 1, "a cut has blocks above it"
        self.encoder = encoder
        self.number = len(chain.blocks) - blocks  # of blocks below
        self._block = chain.blocks[self.number]
        self.name = self._block.name  # of the first module above the cut
        self.shape = self._block.shape  # of one image's activation
        # once per encoder, as it takes three forward passes
        if blocks not in encoder.verified_cuts:
            self._verify()
            encoder.verified_cuts.add(blocks)

    @torch.no_grad()
    def below(self, images: Tensor) -> Tensor:
        """Returns the activations [B,*shape] of images [B,3,H,W], contiguous, in the type the encoder computes in."""
        axis, caught = self._block.batch_axis, list[Tensor]()

        def stop(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            caught.append(inputs[0])
            raise _Reached

        handle = self.encoder.get_submodule(self.name).register_forward_pre_hook(stop, prepend=True)
        try:
            self.encoder(images)
        except _Reached:
            pass
        finally:
            handle.remove()
        return caught[0].movedim(axis, 0).contiguous()

    def above(self, activations: Tensor) -> Tensor:
        """Returns z [B,K] of activations [B,*shape]. Gradients flow to the activations and the parameters above."""
        size, layout = self.encoder.preprocessing.size, self._block.layout
        # in the memory order that they had inside the encoder, as convolutions round as it is
        inverse = [layout.index(axis) for axis in range(len(layout))]
        ordered = activations.movedim(0, self._block.batch_axis).permute(layout).contiguous().permute(inverse)

        def replace(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (ordered.to(inputs[0].dtype), *inputs[1:])

        with ExitStack() as changes:
            for below in self.encoder.chain.blocks[: self.number]:
                changes.enter_context(_skipping(self.encoder.get_submodule(below.name), below.output))
            entry = self.encoder.get_submodule(self.name)
            changes.callback(entry.register_forward_pre_hook(replace, prepend=True).remove)
            z: Tensor = self.encoder(torch.zeros(1, 3, size, size, device=activations.device))
        return z

    @torch.no_grad()
    def _verify(self) -> None:
        """Raises `UserError` if above(below(x)) differs from z, or if above changes its input."""
        images = probe_images(self.encoder, self.encoder.preprocessing.size, 2)
        refused = f"{KEY}: the encoder cannot be cut before {self.name}"
        with preserve_modes(self.encoder):
            z, activations = self.encoder(images), self.below(images)
            given = activations.clone()
            try:
                features = self.above(given)
            except PROBE_ERRORS as error:
                raise UserError(f"{refused} ({reason_of(error, 120)}); {ADVICE}") from error
        exact = z.device.type == "cpu" and activations.dtype == torch.float32
        tolerance = 0 if exact else TOLERANCE * z.abs().max()
        if features.shape != z.shape or not (features - z).abs().max() <= tolerance:  # NaN too
            raise UserError(f"{refused}: features also depend on other values from below; {ADVICE}")
        if not torch.equal(given, activations):
            raise UserError(f"{refused}: it overwrites its activation; {ADVICE}")

    def is_above(self, name: str) -> bool:
        """Whether a parameter or buffer of the encoder, named as in its `state_dict()`, belongs to the part above."""
        first_use = self.encoder.chain.places.get(name)
        if first_use is not None:  # what both parts use, as a position bias of all blocks, lies below
            # 2 · number + 1 is between the blocks of both parts, and lies below
            return first_use > 2 * self.number + 1
        return self.encoder.chain.began(name.rpartition(".")[0]) > self.number

    def lies_above(self, module: str) -> bool:
        """Whether the named module returns its output above the cut: a hook after it sees activations of images."""
        return self.encoder.chain.calls.get(module, (0, 0))[1] > self.number

    def freeze(self) -> None:
        """Sets `requires_grad` of all parameters that do not lie above to False."""
        for name, parameter in self.encoder.named_parameters():
            if not self.is_above(name):
                parameter.requires_grad_(False)

    def train_above(self, mode: bool = True) -> None:
        """Sets the part above to training or eval mode. The part below is always in eval mode.

        So batch norm below keeps its statistics, and dropout below draws nothing. A module that holds blocks of both
        parts gets the mode, for the dropout that libraries write into the `forward` of the whole model.
        """
        self.encoder.eval()
        for name, module in self.encoder.named_modules():
            holds_both = self.lies_above(name) and any(module.children())
            module.training = mode and (holds_both or self.encoder.chain.began(name) > self.number)


class Below(Encoder):
    """The part of an encoder below a cut, whose features are the activations at the cut, flattened: [B, prod(shape)].

    So the feature cache, its key and its checks serve activations as they serve features.
    """

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.encoder = cut.encoder
        self.cut = cut  # `copy.deepcopy` copies it along with the encoder
        self.width = math.prod(cut.shape)
        self.preprocessing = cut.encoder.preprocessing
        self.stage_names = ()
        self.pretraining = cut.encoder.pretraining
        self.normalize = False
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return self.cut.below(images).flatten(1).float()

    def identity(self) -> dict[str, object]:
        # activations at the cut do not depend on what happens to z
        parts = {key: value for key, value in self.encoder.identity().items() if key != "normalize"}
        return {**parts, "cut": self.cut.name}

    def portable(self) -> Portable:
        """Returns the whole encoder."""
        return self.encoder.portable()


def depth_from_top(encoder: Encoder, parameter: str) -> int:
    """Layer of a parameter for layer-wise learning-rate decay, lr · decay^depth (Bao et al. 2021, BEiT).

    0: after the last block (final norm, projection), as for the head; 1: in the last of the n blocks; n: in the first;
    n + 1: in the stem. What runs between two blocks belongs to the later one. A parameter that several layers use
    belongs to the lowest of them, and one that was added to the encoder later (a low-rank update) to the block around
    it. Raises `UserError` for an encoder whose blocks are not known.
    """
    require_blocks(encoder)
    chain = encoder.chain
    first_use = chain.places.get(parameter)
    block = chain.began(parameter.rpartition(".")[0]) if first_use is None else math.ceil(first_use / 2)
    return len(chain.blocks) + 1 - block


def require_blocks(encoder: Encoder) -> None:
    """Raises `UserError` for an encoder whose blocks are not known, which layer-wise decay needs."""
    if not encoder.chain.blocks:
        raise UserError(
            f"training.layer_decay: the blocks of the encoder are not known ({encoder.chain.reason}); set it to 1, or "
            "use another model"
        )


def describe_chain(encoder: Encoder) -> list[str]:
    """Returns a line per block: name, shape of the activation that it gets, number of parameters from there on.

    For an encoder whose blocks are not known, the one line says why.
    """
    if not encoder.chain.blocks:
        return [encoder.blocks_reason]
    sizes = {name: parameter.numel() for name, parameter in encoder.named_parameters()}
    lines = []
    for number, block in enumerate(encoder.chain.blocks):
        above = sum(sizes[name] for name, use in encoder.chain.places.items() if use > 2 * number + 1)
        shape = "×".join(map(str, block.shape))
        lines.append(f"{block.name}: activation {shape}, {above:,} parameters from here on")
    return lines


class _Reached(Exception):
    """The forward pass has reached the cut."""


@contextmanager
def _skipping(module: nn.Module, output: Any) -> Iterator[None]:
    """Context in which the module computes nothing and returns zeros."""
    forward = vars(module).get("forward")
    vars(module)["forward"] = lambda activation, *_, **__: zeros(output, activation)
    try:
        yield
    finally:
        del vars(module)["forward"]
        if forward is not None:
            vars(module)["forward"] = forward
