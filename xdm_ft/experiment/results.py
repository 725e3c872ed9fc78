"""From trained models to the records of results.json."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import TYPE_CHECKING, Any

from xdm_ft.evaluation.summary import Prediction, protocol_line, summarise
from xdm_ft.experiment.material import Material
from xdm_ft.experiment.plan import Plan
from xdm_ft.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

LIBRARIES = ("xdm_ft", "torch", "torchvision", "timm", "open_clip_torch", "accelerate", "numpy", "pillow")


def environment(accelerator: Accelerator) -> dict[str, Any]:
    """What the numbers were made with."""
    import torch

    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": accelerator.device.type,
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }
