from collections.abc import Iterator

import pytest
from accelerate import Accelerator
from loop_models import one_process


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """Of one process; images are read in it, as starting workers would take most of the time."""
    monkeypatch.setattr("xdm_ft.training.end_to_end.inputs.worker_count", lambda accelerator: 0)
    with one_process() as accelerator:
        yield accelerator
