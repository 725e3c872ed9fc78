"""Requests → models that are trained, measured and kept, in all processes of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from xdm_ft.experiment.engines import Engines, Model, Request
from xdm_ft.experiment.heartbeat import wait_for_everyone
from xdm_ft.experiment.machine import cores, local_processes
from xdm_ft.experiment.parallel import share_out
from xdm_ft.experiment.results import Kept, ResultsFile


def train(
    engines: Engines, requests: Sequence[Request], measured: Callable[[Model], Kept], results: ResultsFile
) -> None:
    """Trains the wanted models of all requests; the process that trained one keeps what `measured` returns of it.

    What is trained on cached features comes first, in one queue, the longest piece first: the processes of the run take
    pieces from it, and on a CPU each of them forks to use all of its cores. Returns when every process is done.
    """
    accelerator, queue = engines.accelerator, engines.pieces(requests)

    def share(number: int) -> None:
        with engines.directory.in_fork(number) as directory:
            own = dataclasses.replace(engines, directory=directory)
            for model in own.train_pieces(queue, show=number == 0 and accelerator.is_main_process):
                results.keep(measured(model), directory)

    if queue:
        forks = 1 if accelerator.device.type != "cpu" else max(1, cores() // local_processes())
        share_out(share, min(forks, len(queue)))
    wait_for_everyone(accelerator)  # another one may still be at its last piece
    for model in engines.train_end_to_end(requests):
        kept = measured(model)
        if accelerator.is_main_process:
            results.keep(kept, engines.directory)
    wait_for_everyone(accelerator)
