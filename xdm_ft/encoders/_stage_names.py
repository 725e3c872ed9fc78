"""Where inside an encoder MixStyle and its like can work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

FIRST_STAGE = 4  # from this reduction of the resolution on; what timm names before (a ResNet's first ReLU) is stem


class StageNames(NamedTuple):
    """Names of modules, in the order in which they run; see `Encoder`."""

    stem: tuple[str, ...]
    stages: tuple[str, ...]
    transitions: tuple[str, ...]

    @classmethod
    def with_prefix(
        cls, root: str, stem: Iterable[str], stages: Iterable[str], transitions: Iterable[str]
    ) -> StageNames:
        """With the names from the encoder's root, where the model is called `root`."""
        return cls(*(tuple(f"{root}.{name}" for name in names) for names in (stem, stages, transitions)))


def timm_stage_names(model: nn.Module, root: str) -> StageNames:
    """Stages as timm's feature extraction names them; empty where timm names none."""
    from timm.models.densenet import DenseTransition

    modules = dict(model.named_modules())
    named = [info for info in getattr(model, "feature_info", None) or () if info["module"] in modules]
    stages = [info["module"] for info in named if info["reduction"] >= FIRST_STAGE]
    transitions = [name for name, module in modules.items() if isinstance(module, DenseTransition)]
    return StageNames.with_prefix(root, _stem(modules, stages), stages, transitions)


def _stem(modules: dict[str, nn.Module], stages: list[str]) -> list[str]:
    """The first convolution and the first max-pool before the first stage."""
    names = list(modules)
    before = names[: names.index(stages[0])] if stages else names
    of_kind = ([name for name in before if isinstance(modules[name], kind)] for kind in (nn.Conv2d, nn.MaxPool2d))
    return [name for found in of_kind for name in found[:1]]
