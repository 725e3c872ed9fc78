"""Low-rank updates of an encoder's linear layers (Hu et al. 2022, LoRA), by peft: W + (alpha / rank) B A.

The layers of nn.MultiheadAttention need a detour: its forward pass reads both weights without calling a layer. peft's
own class for it ignores the dropout, and adds and subtracts the update at every pass, so that rounding changes the
frozen weights. `SplitAttention` computes the same attention from two ordinary linear layers instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xdm_ft.cut import Lora
from xdm_ft.encoders import Encoder
from xdm_ft.runtime.errors import UserError

ADAPTER = "default"  # peft's name of the only set of updates


def add_lora(encoder: Encoder, block_names: Sequence[str], settings: Lora, seed: int) -> None:
    """Adds updates to the linear layers of these blocks, and freezes all other parameters of the encoder.

    A is drawn from `seed`, as nn.Linear draws its weight; B is 0, so the features stay the same up to rounding. torch's
    generators are left as they were. The encoder must be in eval mode.

    Raises `UserError` if peft is missing, if there is no block or no linear layer, if `settings.targets` names none, or
    if the model uses the weight of a layer without calling the layer.
    """
    if find_spec("peft") is None:
        raise UserError('trainable.lora: needs peft, which is not installed; pip install "xdm_ft[lora]"')
    if not block_names:
        raise UserError(f"trainable.lora: {encoder.blocks_reason}")
    assert not encoder.training, "the check below runs the encoder"
    from peft import LoraConfig, inject_adapter_in_model

    for block in block_names:
        _call_layers(encoder.get_submodule(block))
    layers = {  # name in the encoder → name in its block
        f"{block}.{name}": name
        for block in block_names
        for name, module in encoder.get_submodule(block).named_modules()
        if isinstance(module, nn.Linear)
    }
    if not layers:
        raise UserError(
            "trainable.lora: the blocks of this encoder have no linear layers; train whole blocks instead, with "
            "trainable: {blocks: 1}"
        )
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.scale * settings.rank,  # type: ignore[arg-type]  # peft divides it, an int or not
        lora_dropout=settings.dropout,
        target_modules="|".join(map(re.escape, _targets(layers, settings.targets))),  # matched with whole names
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the generators of GPUs
        inject_adapter_in_model(config, encoder, ADAPTER)
    encoder.eval()  # peft adds its layers in training mode
    _check_effect(encoder, layers)


def touched_names(encoder: Encoder) -> set[str]:
    """Returns the plain names of the weights that have an update: those that differ after training."""
    plain = _plain_names(encoder)
    return {plain[f"{layer}.base_layer.weight"] for layer in _adapted_layers(encoder)}


@torch.no_grad()
def merge_updates(encoder: Encoder) -> dict[str, Tensor]:
    """Returns the encoder's state dict with the names and shapes that it had before `add_lora`, updates merged.

    The encoder does not change. Tensors without an update are the encoder's own, not copies.
    """
    state, plain = encoder.state_dict(), _plain_names(encoder)
    merged = {plain[name]: tensor for name, tensor in state.items() if name in plain}
    for name, layer in _adapted_layers(encoder).items():
        weight = state[f"{name}.base_layer.weight"]
        # not by peft's own merge, which would change the encoder
        merged[plain[f"{name}.base_layer.weight"]] = weight + layer.get_delta_weight(ADAPTER).to(weight.dtype)
    return merged


class SplitAttention(nn.Module):
    """nn.MultiheadAttention of one sequence with itself, with its own weights, as two linear layers that are called."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        width, bias = attention.embed_dim, attention.in_proj_bias is not None
        self.heads, self.dropout = attention.num_heads, attention.dropout
        self.in_proj = nn.Linear(width, 3 * width, bias, device="meta")  # without initial weights: they are replaced
        self.out_proj = nn.Linear(width, width, bias, device="meta")
        assert attention.in_proj_weight is not None
        self.in_proj.weight, self.in_proj.bias = attention.in_proj_weight, attention.in_proj_bias
        self.out_proj.weight, self.out_proj.bias = attention.out_proj.weight, attention.out_proj.bias

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Returns [B,T,W], and None in place of the attention's weights."""
        assert query is key and key is value and not need_weights and attn_mask is None, "attention inside an image"
        qkv = self.in_proj(query).unflatten(-1, (3, self.heads, -1))  # [B,T,3,heads,W/heads]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B,heads,T,W/heads] each
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.out_proj(mixed.transpose(1, 2).flatten(2)), None


def _call_layers(block: nn.Module) -> None:
    """Makes the attention in a block call its layers, where it only reads their weights. The block computes the same.

    Replaces nn.MultiheadAttention over [B,T,W] with one packed weight; sets timm's switch in BEiT, EVA and Swin v2.
    """
    for name, module in list(block.named_modules()):
        if hasattr(module, "qkv_bias_separate"):
            module.qkv_bias_separate = True  # qkv(x) + bias instead of F.linear(x, qkv.weight, bias)
        elif (
            isinstance(module, nn.MultiheadAttention)
            and module.in_proj_weight is not None
            and module.batch_first
            and module.bias_k is None
            and not module.add_zero_attn
        ):
            block.set_submodule(name, SplitAttention(module))


def _targets(layers: Mapping[str, str], targets: tuple[str, ...] | None) -> list[str]:
    """Returns the layers that contain a target's name between dots: `attn`, `attn.qkv` and `qkv` name `attn.qkv`."""
    if targets is None:
        return list(layers)
    for target in targets:
        if not any(f".{target}." in f".{name}." for name in layers.values()):
            raise UserError(
                f'trainable.lora.targets: no linear layer of a block is named "{target}"; '
                f"known: {', '.join(dict.fromkeys(layers.values()))}"
            )
    return [layer for layer, name in layers.items() if any(f".{target}." in f".{name}." for target in targets)]


def _check_effect(encoder: Encoder, layers: Mapping[str, str]) -> None:
    """Raises `UserError` if features do not depend on some update, because a module reads a layer's weight itself."""
    adapted = _adapted_layers(encoder)
    updates = [layer.lora_B[ADAPTER].weight for layer in adapted.values()]
    side = encoder.preprocessing.size
    with torch.enable_grad():
        # with a gradient of its own, so that there is a graph even if no update is in it
        image = torch.zeros(1, 3, side, side, device=updates[0].device, requires_grad=True)
        z = encoder(image)
        gradients = torch.autograd.grad(z.sum(), updates, allow_unused=True)
    names: dict[bool, list[str]] = {True: [], False: []}  # in the blocks, by whether features depend on the update
    for name, gradient in zip(adapted, gradients, strict=True):
        names[gradient is not None].append(layers[name])
    if unreached := list(dict.fromkeys(names[False])):
        rest = [name for name in dict.fromkeys(names[True]) if name not in unreached]
        remedy = f"set targets: [{', '.join(rest)}]" if rest else "use trainable: {blocks: k}"
        raise UserError(
            f"trainable.lora.targets: this model reads the weights of {', '.join(unreached)} without calling "
            f"these layers, so updates would have no effect; {remedy}"
        )


def _adapted_layers(encoder: Encoder) -> dict[str, Any]:
    """Returns {name: peft's layer} of all layers with an update."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in encoder.named_modules() if isinstance(module, LoraLayer)}


def _plain_names(encoder: Encoder) -> dict[str, str]:
    """Returns {name in the state dict: name before `add_lora`} of all tensors but the updates' own."""
    adapted = _adapted_layers(encoder)
    split = {name for name, module in encoder.named_modules() if isinstance(module, SplitAttention)}
    updates = tuple(f"{layer}.lora_" for layer in adapted)
    plain = {}
    for name in encoder.state_dict():
        if name.startswith(updates):
            continue
        owner, _, leaf = name.rpartition(".")
        if owner.removesuffix(".base_layer") in adapted:
            owner = owner.removesuffix(".base_layer")
        attention, _, projection = owner.rpartition(".")
        packed = projection == "in_proj" and attention in split
        plain[name] = f"{attention}.in_proj_{leaf}" if packed else f"{owner}.{leaf}" if owner else leaf
    return plain
