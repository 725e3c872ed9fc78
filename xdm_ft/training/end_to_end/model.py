"""The model that trains: an encoder, or what lies above its cut, and an algorithm with its head; and its optimizer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from xdm_ft.algorithms import Algorithm
from xdm_ft.core import Batch
from xdm_ft.cut import LastBlocks, LowRank, Trainable, blocks_above
from xdm_ft.cut.cut import Cut, depth_from_top
from xdm_ft.cut.lora import add_lora, merge_updates, touched_names
from xdm_ft.encoders import Encoder
from xdm_ft.features.cache import Features
from xdm_ft.runtime.errors import UserError
from xdm_ft.training import Training, compile_function
from xdm_ft.training.end_to_end.batch_norm import batch_norm_layers

BatchNorm = Literal["train", "frozen"]
logger = logging.getLogger("xdm_ft")


@dataclass(frozen=True)
class EncoderPart:
    """The part of the encoder that trains, and what is cached below it."""

    trainable: Trainable = True
    activations: Features | None = None  # of the cut, flattened; None: they are computed, or there is no cut


FULL_ENCODER = EncoderPart()


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
        changed: Tensor = module(output, *self.now)
        return changed


class EndToEnd(nn.Module):
    """Encoder and algorithm as one module, so that Accelerate wraps all weights at once. The forward pass encodes.

    With a cut, only what lies above it trains, and `Batch.x` are the activations there; what lies below stays in eval
    mode. `batch_norm: frozen` keeps batch-norm layers in eval mode while training: they normalise by their running
    statistics, which do not change; their weights and biases are trained (as in DomainBed). With low-rank updates
    batch norm is always frozen.
    """

    def __init__(
        self,
        encoder: Encoder,
        algorithm: Algorithm,
        batch_norm: BatchNorm,
        trainable: Trainable = True,
        *,
        seed: int = 0,
        merged: bool = False,
        normalized: bool = False,
    ) -> None:
        """`encoder` is changed. `seed`: of low-rank updates. `merged`: they are in the plain weights; nothing trains.
        `normalized`: the head reads L2-normalised features, whatever the encoder's are.

        Raises `UserError` if the encoder cannot be cut there, or the algorithm works below the cut.
        """
        super().__init__()
        self.encoder, self.algorithm, self.batch_norm = encoder, algorithm, batch_norm
        self.normalized = normalized and not encoder.normalize
        self.cut = cut_of(encoder, trainable) if isinstance(trainable, LastBlocks | LowRank) else None
        self.low_rank = isinstance(trainable, LowRank) and not merged
        if self.cut is not None:
            self.cut.freeze()
        if isinstance(trainable, LowRank) and not merged:
            add_lora(encoder, updated_blocks(encoder, trainable), trainable.lora, seed)
        trained = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
        self._low_rank_names = set(trained)
        if not merged:
            # freeze what has no effect on features (CLIP's text side): processes would wait for its gradients
            side, device = encoder.preprocessing.size, next(encoder.parameters()).device
            z = encoder(torch.zeros(2, 3, side, side, device=device))
            gradients = torch.autograd.grad(z.sum(), [*trained.values()], allow_unused=True)
            for parameter, gradient in zip(trained.values(), gradients, strict=True):
                parameter.requires_grad_(gradient is not None)
        modules = algorithm.stage_modules(encoder)
        if self.cut is not None:
            _refuse_below(self.cut, modules)
        self.stages = StageModules(encoder, modules)
        self.trainable = [p for p in (*encoder.parameters(), *self.stages.parameters()) if p.requires_grad]
        self.encoder_frozen = False
        self.channels_last = False
        self._encode: Callable[[Tensor], Tensor] = self.encode

    def placed(self, device: torch.device) -> EndToEnd:
        """Moves the model to a device, and returns it. A CNN gets the memory layout of its fast kernels."""
        self.channels_last = is_cnn(self.encoder)
        self.to(device)
        if self.channels_last:
            self.to(memory_format=torch.channels_last)
        return self

    def compile_encoding(self) -> None:
        """Compiles the encoder's passes in training. Evaluations stay as they are, as their batches are of any size.

        An encoder with modules of the method inside stays as it is too: they read the step's number.
        """
        if self.stages.names:
            logger.warning(
                "training.compile: has no effect on this method, which changes feature maps inside the encoder"
            )
        else:
            self._encode = compile_function(self.encode)

    def encode(self, x: Tensor) -> Tensor:
        """Returns features z [B,K] of images, or of activations if there is a cut."""
        if self.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        z: Tensor = self.encoder(x) if self.cut is None else self.cut.above(x)
        return F.normalize(z, dim=-1) if self.normalized else z

    def forward(self, batch: Batch, step: int) -> Tensor:
        """Returns features z [B,K] of a part of the step's batch, in float32 or float64."""
        with self.stages.during(batch, step):
            z = self._encode(batch.x)
        # float64 stays: masks are discontinuous, so it is the precision in which processes can be compared
        return z if z.dtype == torch.float64 else z.float()

    def train(self, mode: bool = True) -> EndToEnd:
        super().train(mode)
        if self.cut is not None:
            self.cut.train_above(mode)
        if self.batch_norm == "frozen" or self.low_rank:
            for layer in batch_norm_layers(self.encoder):
                layer.eval()
        if self.encoder_frozen:
            self.encoder.eval()
        return self

    def freeze_encoder(self, frozen: bool) -> None:
        """Freezes or unfreezes the encoder and the modules in it: frozen, it is in eval mode and has no gradient."""
        self.encoder_frozen = frozen
        for parameter in self.trainable:
            parameter.requires_grad_(not frozen)
        self.train(self.training)

    def roles(self) -> Roles:
        """Returns the trainable parameters. An encoder may have others too, such as fixed position embeddings."""
        encoder = {f"encoder.{name}": p for name, p in self.encoder.named_parameters() if p.requires_grad}
        algorithm = {name: p for name, p in self.algorithm.named_parameters() if p.requires_grad}
        auxiliary = {name: p for name, p in algorithm.items() if name.split(".")[0] in self.algorithm.auxiliary}
        head = {name: p for name, p in algorithm.items() if name not in auxiliary}
        head |= {f"stages.{name}": p for name, p in self.stages.named_parameters() if p.requires_grad}
        return Roles(encoder, head, auxiliary)

    def named_weights(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers that may change: `encoder.…`, `stages.…` (modules in it), and the
        algorithm's own names. A checkpoint holds them."""
        encoder = self.encoder.state_dict()
        if self.low_rank:
            encoder = {name: tensor for name, tensor in encoder.items() if name in self._low_rank_names}
        elif self.cut is not None:
            encoder = {name: tensor for name, tensor in encoder.items() if self.cut.is_above(name)}
        state = {f"encoder.{name}": tensor for name, tensor in encoder.items()}
        state |= {f"stages.{name}": tensor for name, tensor in self.stages.state_dict().items()}
        return state | self.algorithm.state_dict()

    @torch.no_grad()
    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Copies `state`, with the names of `named_weights`, into the parameters and buffers.

        The encoder's may be a part of them: what low-rank updates do not touch is not in the weights that they gave.
        """
        weights = self.named_weights()
        missing = [name for name in weights.keys() - state.keys() if not name.startswith("encoder.")]
        assert state.keys() <= weights.keys() and not missing, sorted(weights.keys() ^ state.keys())
        for name, value in state.items():
            weights[name].copy_(value)

    def weights(self) -> dict[str, Tensor]:
        """Returns a contiguous copy on the CPU of all that training has changed, under the encoder's plain names.

        Low-rank updates are merged into the weights of their layers.
        """
        state = self.named_weights()
        if self.low_rank:
            merged = merge_updates(self.encoder)
            others = {name: tensor for name, tensor in state.items() if not name.startswith("encoder.")}
            state = {f"encoder.{name}": merged[name] for name in touched_names(self.encoder)} | others
        layout = torch.contiguous_format  # safetensors saves no other
        return {name: tensor.detach().to("cpu", copy=True, memory_format=layout) for name, tensor in state.items()}


def is_cnn(encoder: nn.Module) -> bool:
    """Returns whether an encoder has convolutions besides the one that makes patches of a vision transformer."""
    return sum(isinstance(module, nn.Conv2d) for module in encoder.modules()) > 1


def cut_of(encoder: Encoder, trainable: LastBlocks | LowRank) -> Cut:
    """Returns the cut below the blocks that train. Raises `UserError` if the encoder cannot be cut there."""
    above = blocks_above(trainable)
    return Cut(encoder, max(1, len(encoder.block_names)) if above is None else above)


def check_trainable(encoder: Encoder, algorithm: Algorithm, trainable: Trainable) -> None:
    """Raises `UserError` if the method cannot train this part of the encoder, as `EndToEnd` would do much later."""
    modules = algorithm.stage_modules(encoder)
    if isinstance(trainable, LastBlocks | LowRank):
        _refuse_below(cut_of(encoder, trainable), modules)


def check_updates(encoder: Encoder, trainable: LowRank) -> None:
    """Raises `UserError` if the encoder cannot have these low-rank updates. Adds them to a copy, and runs it once."""
    add_lora(copy.deepcopy(encoder), updated_blocks(encoder, trainable), trainable.lora, seed=0)


def updated_blocks(encoder: Encoder, trainable: LowRank) -> tuple[str, ...]:
    """Returns the names of the blocks that have low-rank updates."""
    return encoder.block_names[-(trainable.lora.blocks or 0) :]  # [-0:] is all


def _refuse_below(cut: Cut, modules: Iterable[str]) -> None:
    """Raises `UserError` if an algorithm places a module after one of these modules below the cut."""
    for name in modules:
        if not cut.lies_above(name):
            in_stem = cut.encoder.chain.calls.get(name, (0, 0))[1] == 0  # below any cut
            raise UserError(
                f"trainable: this method changes feature maps after {name}, which lies below the cut; "
                f"{'set' if in_stem else 'train more blocks, or set'} trainable: true"
            )


class Roles(NamedTuple):
    """The trainable parameters by their role in a step."""

    encoder: dict[str, nn.Parameter]
    head: dict[str, nn.Parameter]  # all others that `Losses.total` trains: class head, modules in the encoder, …
    auxiliary: dict[str, nn.Parameter]  # trained by `Losses.auxiliary`, without clipping and sharpness

    @property
    def main(self) -> dict[str, nn.Parameter]:
        return self.encoder | self.head


def optimizer_of(inner: EndToEnd, training: Training) -> Optimizer:
    """Returns the optimizer: class head and auxiliary modules have the learning rate `lr`, the encoder `encoder_lr`.

    With `layer_decay` γ, what lies d blocks from the end of the encoder has `encoder_lr` γ^d (ELECTRA, Clark et al.
    2020, appendix B); d is 0 for a final norm and projection, and 1 for the last block. `weight_decay` acts on the
    parameters that `Training.decays` names.
    """
    encoder, head, auxiliary = inner.roles()
    by_rate: dict[float, list[nn.Parameter]] = {}
    for name, parameter in encoder.items():
        depth = 0 if training.layer_decay == 1 else depth_from_top(inner.encoder, name.removeprefix("encoder."))
        # few groups: the optimizer launches its kernels once per group
        by_rate.setdefault(training.encoder_lr * training.layer_decay**depth, []).append(parameter)
    rates = [*by_rate.items(), (training.lr, [*head.values()]), (training.lr, [*auxiliary.values()])]
    # `initial_lr` is what a step multiplies by the factor of the schedule
    groups = [
        {"params": members, "lr": lr, "initial_lr": lr, "weight_decay": training.weight_decay if decays else 0.0}
        for lr, parameters in rates
        for decays in (True, False)
        if (members := [parameter for parameter in parameters if training.decays(parameter.ndim) == decays])
    ]
    if training.optimizer == "sgd":
        return SGD(groups, momentum=training.momentum)
    return {"adam": Adam, "adamw": AdamW}[training.optimizer](
        groups, betas=(training.beta1, training.beta2), amsgrad=training.amsgrad
    )
