"""The modules of an encoder after which MixStyle and other style methods can work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

FIRST_STAGE = 4  # stages begin at 1/4 of the resolution; what timm lists before (a ResNet's first ReLU) is stem


class StageNames(NamedTuple):
    """Names of an encoder's modules, in the order in which they run; see `Encoder`."""

    stem: tuple[str, ...]
    stages: tuple[str, ...]
    transitions: tuple[str, ...]

    @classmethod
    def with_prefix(
        cls, root: str, stem: Iterable[str], stages: Iterable[str], transitions: Iterable[str]
    ) -> StageNames:
        """These names of a model's modules with `root`, the name of the model in the encoder, in front."""
        return cls(*(tuple(f"{root}.{name}" for name in names) for names in (stem, stages, transitions)))


def timm_stage_names(model: nn.Module, root: str) -> StageNames:
    """Stages are those of timm's feature extraction; none for a model that does not support it."""
    from timm.models.densenet import DenseTransition

    modules = dict(model.named_modules())
    listed = [info for info in getattr(model, "feature_info", None) or () if info["module"] in modules]
    stages = [info["module"] for info in listed if info["reduction"] >= FIRST_STAGE]
    transitions = [name for name, module in modules.items() if isinstance(module, DenseTransition)]
    return StageNames.with_prefix(root, _stem(modules, stages), stages, transitions)


def _stem(modules: dict[str, nn.Module], stages: list[str]) -> list[str]:
    """The first convolution and the first max-pool before the first stage."""
    names = list(modules)
    before = names[: names.index(stages[0])] if stages else names
    of_kind = ([name for name in before if isinstance(modules[name], kind)] for kind in (nn.Conv2d, nn.MaxPool2d))
    return [name for found in of_kind for name in found[:1]]
