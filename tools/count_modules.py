"""Prints the modules of xdm_ft that an image passes on its way from the disk to a cell of report.html.

    PYTHONPATH=. python tools/count_modules.py

Counts modules of which at least one function runs in `experiment.run`, of an extraction or an end-to-end training, the
evaluation and the reports; what runs at an import is not counted.
"""

import inspect
from types import FrameType

from count_frames import ENGINES, PACKAGE, RUN, run_miniature


def modules_of_run(trainable: bool) -> set[str]:
    """Returns the files, relative to the package, that a run with a page executes a function of."""
    files: set[str] = set()
    started = False

    def note_file(frame: FrameType, event: str, _: object) -> None:
        nonlocal started
        started = started or frame.f_code is RUN
        file = frame.f_code.co_filename
        if started and event == "call" and file.startswith(PACKAGE) and file not in files and not importing(frame):
            files.add(file)

    run_miniature(trainable, True, note_file)
    return {name.removeprefix(PACKAGE)[1:] for name in files}


def importing(frame: FrameType | None) -> bool:
    """Is this the body of a module or class, or called by one?"""
    while frame is not None and frame.f_code is not RUN:
        if frame.f_code.co_filename.startswith(PACKAGE) and not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    every: set[str] = set()
    for engine, trainable in ENGINES.items():
        files = modules_of_run(trainable)
        every |= files
        print(f"{engine}: {len(files)} modules", *sorted(files), sep="\n  ")
    print(f"both: {len(every)} modules")
