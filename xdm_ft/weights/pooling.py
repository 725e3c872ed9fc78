"""`encoder.pooling`: how the tokens of a vision transformer become one feature."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

Pooling = Literal["cls", "mean", "cls_mean", "projected"]
PoolingChoice = Annotated[
    Pooling | None,
    Field(
        description="feature of a vision transformer; null: the model's own; cls: class token; mean: mean of the patch "
        "tokens; cls_mean: both, joined; these after the final norm; projected: CLIP's, which zero_shot needs"
    ),
]


def pool(tokens: Tensor, prefix: int, pooling: Pooling) -> Tensor:
    """Tokens [B,N,K], of which the first is the class token and the first `prefix` are no patches → [B,K] or [B,2K]."""
    parts = {"cls": lambda: tokens[:, 0], "mean": lambda: tokens[:, prefix:].mean(1)}
    return torch.cat([part() for name, part in parts.items() if name in pooling.split("_")], dim=-1)


def outside_text_space(pooling: Pooling | None) -> str:
    """Returns why such features can not be compared with class embeddings; "" if they can."""
    if pooling in (None, "projected"):
        return ""
    return f"encoder.pooling: {pooling} gives features outside the space of the texts; leave it out, or use projected"


def timm_reason(model: Any, pooling: Pooling | None) -> str:
    """Returns why this model of timm has no such pooling; "" if it has."""
    if pooling is None:
        return ""
    if pooling == "projected":
        return "has no projection; leave it out, or use cls, mean or cls_mean"
    if not hasattr(model, "num_prefix_tokens"):
        return "is no vision transformer and averages over space; leave it out"
    return no_class_token(getattr(model, "cls_token", None) is not None, pooling)


def no_class_token(has_class_token: bool, pooling: Pooling) -> str:
    return "" if has_class_token or pooling == "mean" else "has no class token; leave it out, or use mean"


def timm_pooled(model: Any, maps: Tensor, pooling: Pooling) -> Tensor:
    """`model.forward_features` [B,N,K] → [B,K] or [B,2K]. `fc_norm` is the final norm of models built to average."""
    norm = getattr(model, "fc_norm", None) or nn.Identity()
    parts = (pool(maps, model.num_prefix_tokens, part) for part in pooling.split("_"))  # type: ignore[arg-type]
    return torch.cat([norm(part) for part in parts], dim=-1)


def clip_reason(visual: Any, pooling: Pooling | None) -> str:
    """Returns why the image side of this open_clip model has no such pooling; "" if it has."""
    if pooling in (None, "projected"):
        return ""
    if hasattr(visual, "trunk"):
        return timm_reason(visual.trunk, pooling)
    if not hasattr(visual, "class_embedding") or visual.attn_pool is not None:
        return "pools by attention; leave it out"
    return ""


def clip_pooled(visual: Any, images: Tensor, pooling: Pooling) -> Tensor:
    """Images [B,3,H,W] → [B,K] or [B,2K], before the projection to the space of the texts. Not for `projected`."""
    if hasattr(visual, "trunk"):
        return timm_pooled(visual.trunk, visual.trunk.forward_features(images), pooling)
    tokens = visual.transformer(visual._embeds(images))  # [B,1+N,K], as the first lines of open_clip's own forward
    return pool(visual.ln_post(tokens), 1, pooling)
