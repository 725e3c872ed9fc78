"""`xdm-ft` of which rank 1 hangs at its third step: `python hanging_rank.py SECONDS run RECIPE.yaml`.

A rank without progress for so many seconds counts as hung.
"""

import os
import sys
import time
from typing import Any

if __name__ == "__main__":
    from xdm_ft.cli.parser import main
    from xdm_ft.runtime import watchdog
    from xdm_ft.training.bank import train as bank
    from xdm_ft.training.end_to_end import train as loop

    watchdog.EVERY_SECONDS, watchdog.SILENCE_SECONDS = 0.5, float(sys.argv[1])
    steps = 0

    def hanging(step: Any) -> Any:
        def hangs(*arguments: Any) -> Any:
            global steps
            steps += 1
            if steps > 2:
                time.sleep(3600)
            return step(*arguments)

        return hangs

    if os.environ["RANK"] == "1":
        loop.take_step, bank.step = hanging(loop.take_step), hanging(bank.step)
    sys.exit(main(sys.argv[2:]))
