"""The image side of a model of transformers: what its tokens are, measured, and how they become one feature."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xdm_ft.runtime.errors import UserError
from xdm_ft.weights.pooling import Pooling, no_class_token, pool
from xdm_ft.weights.source import NOT_TAKEN, size_not_taken

TRAINABLE = ("vision_model.", "visual_projection.")  # what trains of a model with a text side
_LISTS = ("layer", "layers", "blocks", "stages")  # names of the list of a model's blocks
_CLASS_TOKENS = ("cls_token", "class_embedding", "class_token")


@dataclass(frozen=True)
class Layout:
    """What the image side returns for an image."""

    arguments: dict[str, bool]  # adapts position embeddings if images have another size than in training
    is_map: bool  # [B,K,h,w]; else tokens [B,N,K]
    pools: bool  # it has a pooled feature of its own
    has_class_token: bool  # the first token
    prefix: int  # number of tokens before the patches: class token, registers, distillation token
    norm_is_left: bool  # the final norm was applied to the pooled feature only (CLIP), not to the tokens (SigLIP)


def has_text(model: Any) -> bool:
    return all(hasattr(model, name) for name in ("get_text_features", "vision_model", "logit_scale"))


@torch.no_grad()
def measured(vision: Any, config: Any, size: int, model: str) -> Layout:
    """The layout, from two passes of an image. Raises `UserError` if they differ, or the model takes no such image."""
    if vision.main_input_name != "pixel_values":
        raise UserError(f'encoder.model: "{model}" ({config.model_type}) takes no images; choose a vision model')
    config = getattr(config, "vision_config", config)
    adapts = "interpolate_pos_encoding" in inspect.signature(type(vision).forward).parameters
    other = getattr(config, "image_size", size) not in (size, [size, size], (size, size))
    arguments = {"interpolate_pos_encoding": True} if adapts and other else {}
    image = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    try:
        first, second = (vision(pixel_values=image, **arguments) for _ in range(2))
    except NOT_TAKEN as error:
        raise size_not_taken(model, size, error) from error
    tokens, own = first.last_hidden_state, getattr(first, "pooler_output", None)
    if not torch.equal(tokens, second.last_hidden_state):
        raise UserError(f'encoder.model: "{model}" draws random numbers for each image; choose another model')
    norm = getattr(vision, "post_layernorm", None)
    patch = getattr(config, "patch_size", None)
    patches = (size // patch) ** 2 if isinstance(patch, int) else tokens.shape[1]
    names = [name.split(".")[-1] for name, _ in vision.named_parameters()]
    return Layout(
        arguments,
        is_map=tokens.ndim == 4,
        pools=own is not None,
        has_class_token=any(name in _CLASS_TOKENS for name in names),
        prefix=max(0, tokens.shape[1] - patches),
        norm_is_left=norm is not None and own is not None and torch.equal(own, norm(tokens[:, 0])),
    )


def reason(layout: Layout, pooling: Pooling | None, with_text: bool) -> str:
    """Returns why there is no such pooling, and what is possible; "" if there is."""
    if pooling == "projected":
        return "" if with_text else "has no projection; leave it out, or use cls, mean or cls_mean"
    if pooling is None:
        pools = with_text or layout.pools or layout.has_class_token
        return "" if pools else "has no pooled feature of its own; use mean"
    return no_class_token(layout.has_class_token and not layout.is_map, pooling)


def pooled(vision: Any, images: Tensor, layout: Layout, pooling: Pooling | None) -> Tensor:
    """Images [B,3,H,W] → [B,K] or [B,2K]; `pooling` None: the model's own, and without one its class token."""
    out = vision(pixel_values=images, **layout.arguments)
    if pooling is None and layout.pools:
        own: Tensor = out.pooler_output
        return own.flatten(1)  # [B,K], of CNNs [B,K,1,1]
    tokens: Tensor = out.last_hidden_state
    if layout.is_map:
        return tokens.mean((2, 3))
    return pool(vision.post_layernorm(tokens) if layout.norm_is_left else tokens, layout.prefix, pooling or "cls")


def stages(vision: nn.Module) -> list[str]:
    """Names of the blocks of a ViT or the stages of a CNN, in their order; none if there is not one list of them."""
    lists = _lists(vision)
    outer = [name for name in lists if not _around(name, lists)]
    return lists[outer[0]] if len(outer) == 1 else []


def block_candidates(vision: nn.Module) -> list[list[str]]:
    """The blocks inside of all stages, and the stages."""
    lists = _lists(vision)
    inside = [block for name, blocks in lists.items() if len(_around(name, lists)) == 1 for block in blocks]
    return [inside, stages(vision)]


def _lists(vision: nn.Module) -> dict[str, list[str]]:
    """{name of a list of blocks: names of its blocks}."""
    return {
        name: [f"{name}.{child}" for child, _ in module.named_children()]
        for name, module in vision.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and name.split(".")[-1] in _LISTS
    }


def _around(name: str, lists: dict[str, list[str]]) -> list[str]:
    return [other for other in lists if name.startswith(f"{other}.")]
