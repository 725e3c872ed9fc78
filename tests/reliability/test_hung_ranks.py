"""A rank that hangs in the middle of a training ends the run, with one line; the others do not wait for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import PATIENCE, ROOT, bank, end_to_end

pytestmark = pytest.mark.slow
HANGING = Path(__file__).with_name("hanging_rank.py")


@pytest.mark.parametrize("kind", ["bank", "end to end"])
def test_a_rank_hangs_in_a_step(kind: str, tmp_path: Path) -> None:
    recipe = bank(tmp_path) if kind == "bank" else end_to_end(tmp_path, "test_resnet")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, str(HANGING), "20", "run", str(recipe), f"output.dir={tmp_path}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "1"}
    process = subprocess.Popen(
        [sys.executable, *command], stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        _, text = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    lines = [line for line in text.splitlines() if line.startswith("xdm-ft:")]
    assert len(lines) == 1, text
    [line] = lines
    assert "made no progress for 0.333333 minutes; run the same command to resume" in line, text
    # end to end the others stand still in the same step
    assert f"{'rank 1 has' if kind == 'bank' else 'all ranks have'} made" in line
