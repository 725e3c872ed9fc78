"""Processes, threads, device and precision of a run."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, get_args

from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.machine import on_cpu_by_request, own_cores
from xdm_ft.training import Precision

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
LOOPBACK = "127.0.0.1"


def as_launched(recipe: Recipe) -> Recipe:
    """Returns the recipe with the precision that it trains in: its own, else the launcher's, else float32.

    The precision changes numbers, so the recipe in the run directory must contain it. `accelerate launch` sets its
    variable to `no` if the user gave no precision, so `no` never contradicts the recipe. Raises `UserError` if the
    launcher's precision differs from the recipe's, or does not work with the recipe.
    """
    wanted, launched = recipe.training.mixed_precision, os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    asked = f"accelerate launch --mixed_precision {launched} (or ACCELERATE_MIXED_PRECISION)"
    if launched != "no" and wanted is not None and wanted != launched:
        raise UserError(f"{recipe.name}: training.mixed_precision: {wanted}, but {asked}; leave one of them out")
    if launched not in get_args(Precision):
        raise UserError(f"{recipe.name}: {asked} is not supported; use bf16, fp16 or no")
    sharp = [item.label for item in recipe.methods if item.sharpness is not None and item.trainable is not False]
    if launched == "fp16" and sharp:
        problem = f"fp16 scales the loss, which makes the second pass of {sharp[0]} wrong"
        raise UserError(f"{recipe.name}: {asked}: {problem}; use bf16 or no")
    if not recipe.trains_encoders and launched != "no":
        logger.warning("%s has no effect, because the encoder is frozen; set features.precision instead", asked)
        launched = "no"
    precision = launched if wanted is None else wanted
    return dataclasses.replace(recipe, training=recipe.training.model_copy(update={"mixed_precision": precision}))


@contextmanager
def launched(recipe: Recipe, trackers: Sequence[str] = ()) -> Iterator[Accelerator]:
    """Yields the accelerator of a run, and frees it at the end, so that this process can start another run.

    `trackers`: names that the accelerator can log to.
    """
    from accelerate.state import AcceleratorState, is_initialized

    from xdm_ft.training.end_to_end.train import shut_down

    of_the_caller = is_initialized()
    with on_loopback():
        accelerator = start(recipe, trackers)
        try:
            yield accelerator
            shut_down(accelerator)  # not after an error: it waits for all processes
        finally:
            if accelerator.num_processes == 1 and not of_the_caller:
                # Accelerate keeps its state for the process, and refuses another precision
                AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def on_loopback() -> Iterator[None]:
    """Context in which this process listens on the loopback address alone, if all launched ones are on this machine.

    Else gloo and NCCL listen on the address of the machine's name, and rank 0 serves the store of the process group on
    all addresses, unless the launcher serves it (torchrun, accelerate launch). Nothing of it asks who connects. Raises
    `UserError` if the port of the store is in use.
    """
    from torch.distributed import TCPStore, is_initialized

    processes = os.environ.get("WORLD_SIZE")
    if processes is None or os.environ.get("LOCAL_WORLD_SIZE") != processes or is_initialized():
        yield
        return
    interface = "lo0" if sys.platform == "darwin" else "lo"
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    port, store = int(os.environ.get("MASTER_PORT", "0")), None
    if port and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        os.environ["MASTER_ADDR"] = LOOPBACK
        if os.environ.get("RANK") == "0":
            try:
                bound = socket.create_server((LOOPBACK, port)).detach()
            except OSError as error:
                raise UserError(
                    f"MASTER_PORT: {port} can not be used ({os.strerror(error.errno or 0)}); set another port"
                ) from error
            # torch's own store of this port then uses the same server (multi_tenant)
            store = TCPStore(
                LOOPBACK, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=bound
            )
    yield
    del store


def start(recipe: Recipe, trackers: Sequence[str] = ()) -> Accelerator:
    """Returns the accelerator of this process, and sets its number of threads to cores // processes of this machine.

    `accelerate launch` alone would leave it at one thread. Raises `UserError` if the launcher asks for GPUs and torch
    finds none, or if the caller has an accelerator of another precision.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, is_initialized
    from accelerate.utils import InitProcessGroupKwargs

    # without this check, Accelerate trains on the CPU without a message, and each of several processes runs as if it
    # were the only one
    if not on_cpu_by_request() and not torch.accelerator.is_available():
        visible, processes = os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.environ.get("WORLD_SIZE", "1")
        what = None
        if visible not in ("", "-1", "NoDevFiles"):  # these hide all GPUs on purpose; schedulers set the last one
            what = f"GPU {visible} is selected (accelerate launch --gpu_ids, or CUDA_VISIBLE_DEVICES)"
            remedy = "leave it out"
        elif processes != "1":
            what, remedy = f"{processes} processes are launched for GPUs", "launch one process"
        if what is not None:
            raise UserError(
                f"accelerate: {what}, but torch {torch.__version__} finds none; {remedy}, or set ACCELERATE_USE_CPU=1 "
                "to train on the CPU"
            )
    precision = recipe.training.mixed_precision or "no"
    if is_initialized() and AcceleratorState().mixed_precision != precision:
        raise UserError(
            f"{recipe.name}: training.mixed_precision: {precision}, but this Python process has an Accelerator with "
            f"{AcceleratorState().mixed_precision}; run the recipe in another process"
        )
    accelerator = Accelerator(
        mixed_precision=precision,
        log_with=[*trackers] or None,
        # ranks wait at barriers for as long as another one trains heads; `heartbeat` finds a rank that hangs
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=30))],
    )
    torch.set_num_threads(own_cores())
    # by torch's default convolutions multiply float32 numbers in TF32, and nothing else; not `fp32_precision` of each
    # operator: where it is set, torch refuses to read these, as its exporter does
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = recipe.training.tf32
    # images of one training all have one size: the fastest convolutions are found once
    torch.backends.cudnn.benchmark = recipe.trains_encoders
    return accelerator
