"""Processes, threads and devices of one run."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from xdm_ft.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def local_processes() -> int:
    """Processes of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def start(recipe: Recipe) -> Accelerator:
    """The accelerator of this process. Threads are cores // processes on this machine: `accelerate launch` sets one."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    accelerator = Accelerator(
        mixed_precision=recipe.training.mixed_precision,
        # other ranks wait at barriers while the main one trains heads; the default of 10 to 30 minutes is too short
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=30))],
    )
    torch.set_num_threads(max(1, cores() // local_processes()))
    return accelerator


def stop(accelerator: Accelerator) -> None:
    from xdm_ft.training.loop import shut_down

    shut_down(accelerator)
