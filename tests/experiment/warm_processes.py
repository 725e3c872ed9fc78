"""`xdm-ft` in a process of its own that need not import torch and the others anew.

A server of multiprocessing has imported them and forks itself: what a test sees is a real process with its own exit
status, output and signals, in a hundredth of the time.
"""

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IMPORTED = [
    "accelerate", "matplotlib.backends.backend_svg", "matplotlib.figure", "open_clip", "peft", "rich.console",
    "rich.table", "sklearn.datasets", "tensorboard.plugins.hparams.summary_v2", "timm", "torch.utils.tensorboard",
    "xdm_ft.cli.parser", "xdm_ft.experiment.analyse", "xdm_ft.experiment.data_checks", "xdm_ft.experiment.pieces",
    "xdm_ft.experiment.final_fit", "xdm_ft.experiment.results", "xdm_ft.report.headline", "xdm_ft.report.written",
    "xdm_ft.training.bank.train", "xdm_ft.training.end_to_end.train", "xdm_ft.xdomainmix._numba",
]  # fmt: skip
PATIENCE = 180.0  # seconds, on a machine that does other things too
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(IMPORTED)


def begin(arguments, cwd, out, err, environment=None, first=None):
    """`xdm-ft ARGUMENTS` in the folder `cwd` and a session of its own, after a call of `first`.

    What it prints is added to the files `out` and `err`.
    """
    # the server has the cores of the moment when it began, maybe those of a test on one core
    cores = os.sched_getaffinity(0)
    process = server.Process(target=_main, args=(arguments, cwd, out, err, environment or {}, first, cores))
    process.start()
    return process


def rank_environments():
    """The environments of two processes of one run, as a launcher sets them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    both |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    return [both | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]


def two_ranks(*arguments, cwd, first=None):
    """Runs `xdm-ft ARGUMENTS` in two processes of one run, which must end well. Returns what each printed to `err`."""
    logs = [Path(cwd, f"rank{number}.log") for number in range(2)]
    environments = zip(logs, rank_environments(), strict=True)
    processes = [begin([*arguments], cwd, log, log, environment, first) for log, environment in environments]
    for process, log in zip(processes, logs, strict=True):
        process.join(PATIENCE)
        assert process.exitcode == 0, log.read_text()
    return [log.read_text() for log in logs]


def interrupted(process, err, when):
    """Sends SIGINT to a process that `begin` has started, as soon as `when` is true. Returns what it printed to `err`.

    The exit status must be that of an interrupted run.
    """
    until = time.monotonic() + PATIENCE
    while not when():
        assert process.exitcode is None and time.monotonic() < until, err.read_text()
        time.sleep(0.05)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(PATIENCE)
    assert process.exitcode == 130, err.read_text()
    return err.read_text()


def xdm_ft(*arguments, cwd, first=None):
    """What `xdm-ft …` does, after a call of `first`: its exit status and what it printed."""
    command = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = begin(command, cwd, out, err, first=first)
        process.join(PATIENCE)
        assert process.exitcode is not None, f"{command} does not end: {err.read_text()}"
        return subprocess.CompletedProcess(command, process.exitcode, out.read_text(), err.read_text())


def _main(arguments, cwd, out, err, environment, first, cores):
    from xdm_ft.cli.parser import main

    os.setsid()
    os.sched_setaffinity(0, cores)
    gc.freeze()  # what the server has imported; a collection of it would take longer than most runs
    multiprocessing.set_start_method(None, force=True)  # of loader workers: the usual one, not the server's
    os.chdir(cwd)
    os.environ.update(environment)
    for path, number in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    if first is not None:
        first()
    sys.exit(main(arguments))
