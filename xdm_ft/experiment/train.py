"""Trains the requested models in all processes of the run, and saves each one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from xdm_ft.experiment.engines import Engines, Model, Request
from xdm_ft.experiment.heartbeat import wait_for_everyone
from xdm_ft.experiment.machine import cores, local_processes
from xdm_ft.experiment.parallel import run_forked
from xdm_ft.experiment.results import Outcome, ResultsFile


def train(
    engines: Engines, requests: Sequence[Request], measure: Callable[[Model], Outcome], results: ResultsFile
) -> None:
    """Trains the wanted models of all requests, and saves the outcome that `measure` returns for each.

    Models on cached features come first, in one queue of pieces, the longest first. All processes of the run take
    pieces from it; on a CPU each of them also forks, to use all of its cores. The process that trained a model saves
    it. Models trained end to end follow, each one in all processes. Returns when every process is done.
    """
    accelerator, queue = engines.accelerator, engines.pieces(requests)

    def work(number: int) -> None:
        with engines.directory.in_fork(number) as directory:
            own = dataclasses.replace(engines, directory=directory)
            for model in own.train_pieces(queue, show=number == 0 and accelerator.is_main_process):
                results.save(measure(model), directory)

    if queue:
        # a CUDA context can not be used in a forked process
        forks = 1 if accelerator.device.type != "cpu" else max(1, cores() // local_processes())
        run_forked(work, min(forks, len(queue)))
    wait_for_everyone(accelerator)  # other processes may still train their last piece
    for model in engines.train_end_to_end(requests):
        outcome = measure(model)  # in every process: all of them predict together
        if accelerator.is_main_process:
            results.save(outcome, engines.directory)
    wait_for_everyone(accelerator)
