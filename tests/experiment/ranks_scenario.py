"""A rank of a launcher. With a word for what the second of two ranks does while the first waits for it or goes on with
its work; otherwise `xdm-ft run ARGUMENTS`, which notes in files on which addresses each process that trains listens."""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path


def hang(mode):
    import torch
    from accelerate import Accelerator

    from xdm_ft.runtime import interrupt, watchdog
    from xdm_ft.runtime.progress import pulse
    from xdm_ft.training.end_to_end.train import shut_down

    watchdog.EVERY_SECONDS, watchdog.SILENCE_SECONDS = 0.2, 4.0
    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    interrupt.handle(resumable=True)
    with watchdog.heartbeat(accelerator):
        print("begins", flush=True)
        if accelerator.process_index == 1:
            if mode == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            if mode != "works":
                time.sleep(600)
            for _ in range(35):
                time.sleep(0.2)
                pulse.beat()
        elif mode == "hangs beside work":
            watchdog.AGAIN = 1000  # the second rank reports
            while True:  # until the launcher's signal, which only Python code notices
                time.sleep(0.1)
                pulse.beat()
        if mode == "hangs in a step":
            accelerator.reduce(torch.ones(1))
        watchdog.wait_for_everyone(accelerator)
    print("done", flush=True)
    shut_down(accelerator)


def train(arguments):
    import psutil

    from xdm_ft.cli.parser import main
    from xdm_ft.experiment import pieces
    from xdm_ft.storage.run_directory import RunDirectory

    do_pieces, in_fork, rank = pieces.do_pieces, RunDirectory.in_fork, os.environ.get("RANK", "")

    def note(kind):
        sockets = psutil.Process().net_connections("inet")
        addresses = [(*socket.laddr,) for socket in sockets if socket.status == psutil.CONN_LISTEN]
        Path(f"{kind}-{os.getpid()}.json").write_text(json.dumps(addresses))

    def noting(*given, **settings):
        note(f"rank{rank}")
        do_pieces(*given, **settings)
        note(f"trained{rank}")

    @contextmanager
    def in_noting_fork(self, number):
        with in_fork(self, number) as directory:
            if number:
                note("fork")
            yield directory

    pieces.do_pieces, RunDirectory.in_fork = noting, in_noting_fork
    sys.exit(main(["run", *arguments]))


if __name__ == "__main__":
    hang(sys.argv[1]) if len(sys.argv) == 2 else train(sys.argv[1:])
