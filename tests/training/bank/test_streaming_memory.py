"""Features larger than memory, through the benchmark that makes and reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def streamed(folder: Path, *arguments: str) -> dict[str, float]:
    command = [sys.executable, str(ROOT / "benchmarks/streaming.py"), "--folder", str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.soak
@pytest.mark.parametrize("sampler", ["per_domain", "pooled"])
def test_memory_does_not_grow_with_the_features(sampler: str, tmp_path: Path) -> None:
    """2 million rows are 6.1 GB as float32, their validation images alone 0.9 GB."""
    found = streamed(tmp_path, "--images", "2000000", "--steps", "20", "--evaluations", "1", "--sampler", sampler)
    assert found["gigabytes"] > 3
    assert found["anonymous_gigabytes"] < 4.0
