"""Two ranks, of which the second does what the argument says while the first waits for it, or goes on with its work."""

import os
import signal
import sys
import time

if __name__ == "__main__":
    import torch
    from accelerate import Accelerator

    from xdm_ft.runtime import interrupt, watchdog
    from xdm_ft.runtime.progress import pulse
    from xdm_ft.training.end_to_end.train import shut_down

    watchdog.EVERY_SECONDS, watchdog.SILENCE_SECONDS = 0.2, 4.0
    mode, accelerator = sys.argv[1], Accelerator()
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
