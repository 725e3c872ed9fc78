"""Trains the requested models in all processes of the run, and saves each one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from xdm_ft.experiment.cluster import train_on_cluster
from xdm_ft.experiment.cluster_connection import device_of
from xdm_ft.experiment.pieces import Engines, Model, Request
from xdm_ft.experiment.results import Outcome, ResultsFile
from xdm_ft.experiment.work import overall, run_forked
from xdm_ft.runtime.machine import libraries_left_out, own_cores
from xdm_ft.runtime.watchdog import wait_for_everyone


class DoneModels(NamedTuple):
    """Models of the same work that need no training now, and the cost that they had."""

    models: int = 0
    cost: int = 0


NOTHING = DoneModels()


def train(
    engines: Engines,
    requests: Sequence[Request],
    measure: Callable[[Engines, Model], Outcome],
    results: ResultsFile,
    *,
    what: str,
    done: DoneModels = NOTHING,
) -> None:
    """Trains the wanted models of all requests, and saves the outcome that `measure` returns for each.

    `what` names the work on the bar; models that are `done` count too.

    Models on cached features come first, in one queue of pieces, the longest first. All processes of the run take
    pieces from it; on a CPU each of them also forks, to use all of its cores. The process that trained a model saves
    it. Models trained end to end follow, each one in all processes. Returns when every process is done.

    On a cluster each of both is a task, and this process saves what they return.
    """
    accelerator, cluster = engines.accelerator, engines.plan.recipe.cluster
    queue = engines.pieces(requests, device_of(cluster, accelerator.device))
    together = engines.pieces_end_to_end(requests)
    wanted = sum(job.key in request.wanted for request in requests for job in request.jobs)
    total = done.cost + sum(piece.cost for piece in (*queue, *together))
    with overall(what, total, done.models + wanted, accelerator, engines.directory) as bar:
        if accelerator.is_main_process:
            bar.add(spared=done.cost, models=done.models)
        if cluster.name is not None:
            both = sorted((*queue, *together), key=lambda piece: -piece.cost)
            if both:
                train_on_cluster(engines, both, measure, results, bar)
            return

        def measured(model: Model) -> Outcome:
            outcome = measure(engines, model)
            bar.add(models=1)
            return outcome

        def work(number: int) -> None:
            bar.in_process(number)
            with engines.directory.in_fork(number) as directory:
                own = dataclasses.replace(engines, directory=directory)
                for models in own.train_pieces(queue, bar):
                    results.save(map(measured, models), directory)
            bar.add(note="other processes")  # if there are any

        if queue:
            # a CUDA context can not be used in a forked process
            forks = 1 if accelerator.device.type != "cpu" else own_cores()
            run_forked(work, min(forks, len(queue)), bar.watched)
        with bar.watched():
            wait_for_everyone(accelerator)  # other processes may still train their last piece
        with libraries_left_out() if together else nullcontext():
            for piece in together:
                for [model] in engines.train_piece(piece, bar):
                    outcome = measure(engines, model)  # in every process: all of them predict together
                    if accelerator.is_main_process:
                        results.save([outcome], engines.directory)
                        bar.add(models=1)
        wait_for_everyone(accelerator)
