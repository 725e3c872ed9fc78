"""Names of the modules that may be the blocks of an encoder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def timm_blocks(model: Any, root: str) -> list[list[str]]:
    """Candidates for a model of timm: its own layers for layer-wise decay, coarser ones, its stages.

    A MobileNetV3's final convolution, which timm counts as a layer, is none.
    """
    from timm.models._efficientnet_blocks import ConvBnAct

    modules = dict(model.named_modules())
    candidates = []
    for coarse in (False, True):
        matcher = model.group_matcher(coarse=coarse) if hasattr(model, "group_matcher") else None
        if isinstance(matcher, Mapping):
            candidates.append(_matched(model, _patterns(matcher)))
    candidates.append([info["module"] for info in getattr(model, "feature_info", None) or ()])
    found = []
    for names in candidates:
        # a block is a composed module or a convolution (VGG); not a norm or an activation by itself
        blocks = [name for name in names if name in modules and _is_block(modules[name])]
        if blocks and isinstance(modules[blocks[-1]], ConvBnAct):
            del blocks[-1]
        found.append([f"{root}.{name}" for name in blocks])
    return found


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) or any(module.children())


def _patterns(matcher: Mapping[str, Any]) -> list[tuple[re.Pattern[str], bool]]:
    """Pattern of a parameter's name, and whether what it matches is the name of a block.

    A pattern of timm that has a suffix is that of modules between blocks, which it counts to the next or last block.
    """
    patterns = []
    for entry in matcher.values():
        for pattern, suffix in [(entry, None)] if isinstance(entry, str) else entry or ():
            compiled = re.compile(pattern)
            patterns.append((compiled, suffix is None and compiled.groups > 0))
    return patterns


def _matched(model: nn.Module, patterns: Sequence[tuple[re.Pattern[str], bool]]) -> list[str]:
    names: dict[str, None] = {}
    for parameter, _ in model.named_parameters():
        for pattern, is_block in patterns:
            match = pattern.match(parameter)
            if match is not None:
                if is_block:
                    names[match.group()] = None
                break
    return list(names)


def clip_blocks(visual: Any, root: str) -> list[list[str]]:
    """Candidates for the image side of a CLIP: layers of its transformer or ResNet, or timm's image trunk."""
    if hasattr(visual, "trunk"):
        return timm_blocks(visual.trunk, f"{root}.trunk")
    layers = r"transformer\.resblocks\.\d+|layer\d+\.\d+"
    return [[f"{root}.{name}" for name, _ in visual.named_modules() if re.fullmatch(layers, name)]]
