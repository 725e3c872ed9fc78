"""Runs in processes of their own, that tests kill, and what has come out of them."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import miniature
from quick_saves import save_after_every_step
from warm_processes import PATIENCE, begin

ROOT = Path(__file__).resolve().parents[2]
QUICK = Path(__file__).with_name("quick_saves.py")

END_TO_END = """\
name: small
data: {{name: pacs, root: {data}, counts: any}}
protocol: {{name: leave_one_domain_out, test_domains: [sketch], seeds: 1}}
encoder: {{name: timm, model: {model}, preprocessing: {{size: 32}}, kwargs: {kwargs}, trainable: true}}
methods: {methods}
training: {{steps: {steps}, batch_size: 4, evaluate_every: 5}}
"""
BANK = """\
name: small
data: {{name: digits}}
protocol: {{name: leave_one_domain_out, test_domains: [ink, chalk], seeds: 1}}
encoder: {{name: timm, model: test_vit, preprocessing: {{size: 32}}, kwargs: {{img_size: 32}}}}
features: {{dir: {data}/cache, workers: 0}}
methods: [erm+swad, xdomainmix+sam]
training: {{steps: {steps}, batch_size: 8, evaluate_every: 8}}
"""


def end_to_end(folder: Path, model: str, methods: str = "[erm, xdomainmix+swad]", steps: int = 15) -> Path:
    """A recipe file, its data beside it."""
    miniature.domainbed(folder / "data", "pacs")
    kwargs = "{img_size: 32}" if model == "test_vit" else "{}"
    recipe = END_TO_END.format(data=folder / "data", model=model, kwargs=kwargs, methods=methods, steps=steps)
    (folder / "small.yaml").write_text(recipe)
    return folder / "small.yaml"


def bank(folder: Path, steps: int = 40) -> Path:
    (folder / "small.yaml").write_text(BANK.format(data=folder, steps=steps))
    return folder / "small.yaml"


class Run:
    """`xdm-ft run RECIPE`, its output in FOLDER/small. Saves after every step.

    More cores than one mean threads, which are slow where others want those cores too, and forked processes.
    """

    def __init__(self, recipe: Path, folder: Path, *overrides: str, processes: int = 1, cores: int = 1) -> None:
        self.output = folder / "small"
        arguments = ["run", str(recipe), f"output.dir={folder}", *overrides]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "1"}
        self.log = folder.parent / f"{folder.name}.log"
        self.process: BaseProcess | subprocess.Popen[bytes]
        if processes == 1:
            first = functools.partial(save_after_every_step, cores)
            self.process = begin(arguments, ROOT, self.log, self.log, environment, first)
            return
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, str(QUICK), str(cores), *arguments],
                stdout=log, stderr=log, env=os.environ | environment, start_new_session=True,
            )  # fmt: skip

    def changes(self, count: int, pattern: str = "**/*") -> bool:
        """Waits until files of the run directory have changed so many times; False where the run ends before."""
        seen, until = self._files(pattern), time.monotonic() + PATIENCE
        while count > 0:
            if self._status() is not None:
                return False
            assert time.monotonic() < until, f"nothing changes: {self.text()}"
            time.sleep(0.002)
            now = self._files(pattern)
            count -= len(now - seen)
            seen = now
        return True

    def _files(self, pattern: str) -> set[tuple[str, int]]:
        found = set()
        for path in self.output.glob(pattern):
            try:
                found.add((str(path), path.stat().st_mtime_ns))
            except FileNotFoundError:  # between the two looks
                continue
        return found

    def kill(self, number: int = signal.SIGKILL) -> None:
        """The run's own process alone; loader workers notice by themselves."""
        os.kill(self.process.pid, number)

    def end(self) -> int:
        if isinstance(self.process, BaseProcess):
            self.process.join(PATIENCE)
        else:
            self.process.wait(PATIENCE)
        status = self._status()
        assert status is not None, f"the run does not end: {self.text()}"
        return status

    def _status(self) -> int | None:
        return self.process.exitcode if isinstance(self.process, BaseProcess) else self.process.poll()

    def text(self) -> str:
        return self.log.read_text()


def outcome(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """results.json without times and what it was computed on, and a hash of every file of weights and predictions."""
    results = json.loads((folder / "small" / "results.json").read_text())
    results["recipe"].pop("output")
    results.pop("environment")
    for run in results["runs"]:
        run.pop("train_seconds")
    files = sorted((folder / "small" / "models").rglob("*.safetensors"))
    assert files
    return results, {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def leftovers(folder: Path) -> list[str]:
    """Files that no finished run leaves behind."""
    left = [path for path in (folder / "small").rglob(".*") if path.is_file()]
    return [str(path) for path in (*left, *(folder / "small" / "state").rglob("*"))]
