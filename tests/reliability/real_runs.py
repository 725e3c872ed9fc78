"""Runs in processes of their own, that tests kill, and what has come out of them."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import miniature
from quick_saves import save_after_every_step
from warm_processes import PATIENCE, begin

ROOT = Path(__file__).resolve().parents[2]
QUICK = Path(__file__).with_name("quick_saves.py")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "1"}

END_TO_END = """\
name: small
data: {{name: pacs, root: {data}, counts: any}}
protocol: {{name: leave_one_domain_out, test_domains: [sketch], seeds: 1}}
encoder: {{name: timm, model: {model}, preprocessing: {{size: 32}}, kwargs: {kwargs}, trainable: true}}
methods: {methods}
training: {{steps: {steps}, batch_size: 4, evaluate_every: 5}}
report: {{page: false}}
"""
BANK = """\
name: small
data: {{name: digits}}
protocol: {{name: leave_one_domain_out, test_domains: [ink, chalk], seeds: 1}}
encoder: {{name: timm, model: test_vit, preprocessing: {{size: 32}}, kwargs: {{img_size: 32}}}}
features: {{dir: {data}/cache, workers: 0}}
methods: [erm+swad, xdomainmix+sam]
training: {{steps: {steps}, batch_size: 8, evaluate_every: 8}}
report: {{page: false}}
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

    More cores than one mean threads, which are slow where others want those cores too, and forked processes. `first` is
    called before the run, in the run's own process. `restarts`: so often the launcher of several processes starts them
    again after one has failed. `cold`: a new interpreter, which imports everything first and saves
    as users' runs do.
    """

    def __init__(
        self,
        recipe: Path,
        folder: Path,
        *overrides: str,
        processes: int = 1,
        restarts: int = 0,
        cores: int = 1,
        environment: Mapping[str, str] | None = None,
        first: Callable[[int], None] = save_after_every_step,
        cold: bool = False,
    ) -> None:
        self.output, self.cold, self.launched = folder / "small", cold, processes > 1
        arguments = ["run", str(recipe), f"output.dir={folder}", *overrides]
        environment = ENVIRONMENT | dict(environment or {})
        self.log, out = folder.parent / f"{folder.name}.log", folder.parent / f"{folder.name}.out"
        self.log.touch()  # the process may be killed before it would do this
        self.before = self.log.stat().st_size
        self.process: BaseProcess | subprocess.Popen[bytes]
        if processes == 1 and not cold:
            self.process = begin(arguments, ROOT, out, self.log, environment, functools.partial(first, cores))
            return
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        launcher += [f"--max_restarts={restarts}", str(QUICK), str(cores)]
        with self.log.open("a") as log, out.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *(["xdm_ft"] if cold else launcher), *arguments],
                stdout=output, stderr=log, env=os.environ | environment, start_new_session=True,
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
        found, paths = set(), self.output.glob(pattern)
        while True:
            try:
                path = next(paths, None)
                if path is None:
                    return found
                found.add((str(path), path.stat().st_mtime_ns))
            except FileNotFoundError:  # a file or a folder that was removed between the two looks
                continue

    def ends_within(self, seconds: float) -> bool:
        if isinstance(self.process, BaseProcess):
            self.process.join(seconds)
        else:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        return self._status() is not None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """The run's own process alone; loader workers notice by themselves."""
        os.kill(self.process.pid, number)

    def end(self) -> int:
        assert self.ends_within(PATIENCE), f"the run does not end: {self.text()}"
        status = self._status()
        assert status is not None
        return status

    def _status(self) -> int | None:
        return self.process.exitcode if isinstance(self.process, BaseProcess) else self.process.poll()

    def text(self) -> str:
        return self.log.read_text()

    def own_text(self) -> str:
        """What this run has added to the log."""
        return self.log.read_bytes()[self.before :].decode()


def ranks(recipe: Path, folder: Path, *overrides: str, count: int, first: Callable[[int], None]) -> list[Run]:
    """One run in several processes, as a launcher starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    every = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        Run(recipe, folder, *overrides, first=first, environment={k: str(v) for k, v in {**every, **own}.items()})
        for own in ({"RANK": rank, "LOCAL_RANK": rank} for rank in range(count))
    ]


def outcome(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """results.json without times and what it was computed on, and a hash of every file of weights and predictions."""
    results = json.loads((folder / "small" / "results.json").read_text())
    results["recipe"].pop("output")
    results["recipe"].get("features", {}).pop("dir", None)
    results.pop("environment")
    results.pop("checksum")  # of all this too
    for run in results["runs"]:
        run.pop("train_seconds")
        run.pop("peak_memory", None)
    files = sorted((folder / "small" / "models").rglob("*.safetensors"))
    assert files
    return results, {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def differing(
    found: tuple[dict[str, Any], dict[str, str]], expected: tuple[dict[str, Any], dict[str, str]]
) -> list[str]:
    """The keys of results.json and the files in which two outcomes differ."""
    files = [name for name in {**found[1], **expected[1]} if found[1].get(name) != expected[1].get(name)]
    return [*files, *_differing(found[0], expected[0])]


def _differing(found: Any, expected: Any, key: str = "") -> list[str]:
    if type(found) is type(expected) and isinstance(found, dict | list) and len(found) == len(expected):
        keys = found if isinstance(found, dict) else range(len(found))
        of_key = expected.get if isinstance(expected, dict) else expected.__getitem__
        return [d for k in keys for d in _differing(found[k], of_key(k), f"{key}.{k}")]
    return [] if found == expected else [f"{key} is {str(found)[:80]}, not {str(expected)[:80]}"]


def leftovers(folder: Path) -> list[str]:
    """Files that no finished run leaves behind."""
    left = [path for path in (folder / "small").rglob(".*") if path.is_file()]
    return [str(path) for path in (*left, *(folder / "small" / "state").rglob("*"))]


def kill_until_done(
    recipe: Path,
    folder: Path,
    *overrides: str,
    kills: int = 0,
    changes: int = 0,
    seed: int = 0,
    cores: int = 2,
    first: Callable[[int], None] = save_after_every_step,
) -> int:
    """Runs to the end, killed at most so often before, each time after some files have changed. → how often it was."""
    draw, killed = random.Random(seed), 0
    while killed < kills:
        run = Run(recipe, folder, *overrides, cores=cores, first=first)
        if not run.changes(draw.randint(1, changes)):
            break
        time.sleep(draw.random() * 0.02)
        run.kill()
        killed += run.end() == -signal.SIGKILL
    if killed == kills:
        run = Run(recipe, folder, *overrides, cores=cores, first=first)
    assert run.end() == 0, run.text()
    return killed
