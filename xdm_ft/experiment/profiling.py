"""`training.profile`: a trace of some steps of a training by torch's profiler."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from xdm_ft.runtime.progress import Progress
from xdm_ft.storage.atomic import replace_file

if TYPE_CHECKING:
    from torch.profiler import profile

WAIT, WARM_UP, RECORDED = 3, 2, 5  # steps: the first ones also set up what later ones use again


@contextmanager
def profiled(bar: Progress, file: Path | None) -> Iterator[Progress]:
    """Context of a training that yields its progress bar; every advance of it is a step.

    Steps 6 to 10 are traced, and the trace is written to `file`, for chrome://tracing or ui.perfetto.dev. A training of
    fewer steps leaves none. The trace does not name the machine. `file` None: nothing is traced.
    """
    if file is None:
        yield bar
        return
    from torch.profiler import profile, schedule

    def export(traced: profile, path: Path) -> None:
        traced.export_chrome_trace(str(path))
        path.write_bytes(re.sub(rb'("host_name": )"[^"]*"', rb'\1""', path.read_bytes(), count=1))

    def write(traced: profile) -> None:
        replace_file(file, lambda path: export(traced, path))

    steps = schedule(wait=WAIT, warmup=WARM_UP, active=RECORDED, repeat=1)
    with profile(schedule=steps, on_trace_ready=write) as tracer:
        yield _Traced(bar, tracer)


class _Traced(Progress):
    """A bar whose advances are the profiler's steps too."""

    def __init__(self, bar: Progress, tracer: profile) -> None:
        super().__init__(bar.description, bar.total, "")
        self.bar, self.tracer = bar, tracer

    def skip(self, n: int) -> None:
        self.bar.skip(n)

    def advance(self, n: int = 1, note: str = "") -> None:
        self.bar.advance(n, note)
        self.tracer.step()
