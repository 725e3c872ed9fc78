"""What Accelerate needs around an end-to-end training."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from xdm_ft.runtime.errors import UserError
from xdm_ft.training import Job
from xdm_ft.training.end_to_end.model import EndToEnd

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer


def refuse_unsupported(job: Job, accelerator: Accelerator) -> None:
    """Raises `UserError` for a launch configuration that can not train this model."""
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise UserError(f"accelerate: {kind} is not supported for training end to end; launch without it")
    if accelerator.gradient_accumulation_steps != 1:
        # Accelerate would divide the losses by it
        raise UserError("accelerate: gradient_accumulation_steps must be 1; set training.accumulation instead")
    if accelerator.mixed_precision == "fp16" and job.sharpness is not None:
        # the gradient scaler would leave the second pass scaled
        raise UserError(
            f"training.mixed_precision: fp16 does not support the two passes of {job.method}; use bf16 or no"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        # without a GPU Accelerate would silently compute in float32
        raise UserError("training.mixed_precision: fp16 needs a GPU, and this process runs on the CPU; use bf16 or no")


@contextmanager
def prepared(
    inner: EndToEnd, optimizer: Optimizer, accelerator: Accelerator
) -> Iterator[tuple[nn.Module, AcceleratedOptimizer]]:
    """Context that yields the model and its optimizer as Accelerate prepares them."""
    own = accelerator.prepare(inner, optimizer)
    try:
        yield own
    finally:
        # otherwise a second phase would wrap the forward pass in autocast twice
        accelerator.unwrap_model(own[0], keep_fp32_wrapper=False)
        accelerator.free_memory()


def shut_down(accelerator: Accelerator) -> None:
    """Frees Accelerate's resources; every process calls it at the end of a run."""
    # in another order a rank sometimes aborts at exit
    accelerator.free_memory()
    gc.collect()
    accelerator.wait_for_everyone()
    accelerator.end_training()
