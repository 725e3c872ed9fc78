"""Small runs in processes of their own, which tests kill, and what comes out of them."""

import functools
import hashlib
import itertools
import json
import math
import os
import random
import signal
import time
from pathlib import Path

import miniature
from warm_processes import PATIENCE, begin, rank_environments

from xdm_ft.cli.parser import main
from xdm_ft.storage.results_file import COSTS
from xdm_ft.storage.tensorboard import read_scalars

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "1"}
CHECKPOINTS = "state/checkpoints/*.safetensors"
TEST_VIT = "name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}"
BANK = """\
name: small
data: {{name: digits}}
protocol: {{name: leave_one_domain_out, test_domains: [ink, chalk], seeds: 1}}
encoder: {{{encoder}}}
features: {{dir: {folder}/cache, workers: 0}}
methods: [erm+swad, xdomainmix+sam]
training: {{steps: {steps}, batch_size: 8, evaluate_every: 8}}
report: {{page: false}}
"""
IMAGES = """\
name: small
data: {{name: pacs, root: {folder}/data, counts: any}}
protocol: {{name: leave_one_domain_out, test_domains: [sketch], seeds: 1}}
encoder: {{{encoder}}}
features: {{dir: {folder}/cache, workers: 0}}
methods: [erm]
training: {{steps: {steps}, batch_size: 4, evaluate_every: 3}}
report: {{page: false}}
output: {{dir: {folder}/out}}
"""


def bank(folder, steps=24):
    """Returns the recipe file of heads on cached features."""
    (folder / "small.yaml").write_text(BANK.format(encoder=TEST_VIT, folder=folder, steps=steps))
    return folder / "small.yaml"


def on_images(folder, steps=12, encoder=TEST_VIT):
    """Returns the recipe file of a run on miniature PACS, which is written beside it."""
    miniature.domainbed(folder / "data", "pacs", per_class=3)
    (folder / "small.yaml").write_text(IMAGES.format(encoder=encoder, folder=folder, steps=steps))
    return folder / "small.yaml"


def end_to_end(folder, steps=12):
    """Returns the recipe file of a training of the encoder, which has batch norm."""
    return on_images(folder, steps, "name: timm, model: test_resnet, preprocessing: {size: 32}, trainable: true")


def save_after_every_step(cores):
    """Of the process's cores, `cores` remain: more than one mean threads and forked processes."""
    from xdm_ft.features import extract
    from xdm_ft.storage import checkpoint

    available = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, random.sample(available, min(cores, len(available))))
    checkpoint.EVERY_SECONDS = checkpoint.EVENT_SECONDS = 0.0
    checkpoint.SHARE = math.inf
    extract.IMAGES_PER_SHARD = 16


def share_files(cores):
    """Heads that train together share a file, as in a large run."""
    from xdm_ft.experiment import plan

    plan.MAX_MODELS = 0
    save_after_every_step(cores)


def kill_itself(cores, counts, at_sync=0, at_file="", number=1, prepare=save_after_every_step):
    """The process kills itself before its write of this number is safe, or before a file is in its place.

    That is the file of this name, or in the folder of this name, that comes as the one of this `number`. `counts` holds
    the number of writes.
    """
    prepare(cores)
    syncs, files, replace = itertools.count(1), itertools.count(1), os.replace

    def counted(handle):  # no sync: what is written outlives the process
        count = next(syncs)
        counts.write_text(str(count))
        if count == at_sync:
            os.kill(os.getpid(), signal.SIGKILL)

    def named(source, target):
        if at_file in (Path(target).name, Path(target).parent.name) and next(files) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.fsync, os.replace = counted, named


class Run:
    """`xdm-ft run RECIPE`, its output in FOLDER/small, in a process of its own, after a call of `first`."""

    def __init__(self, recipe, folder, *overrides, cores=1, environment=None, first=save_after_every_step):
        self.output = folder / "small"
        self.log = folder.parent / f"{folder.name}.log"
        self.log.touch()  # the process may be killed before it would do this
        self.before = self.log.stat().st_size
        arguments = ["run", str(recipe), f"output.dir={folder}", *overrides]
        environment, out = ENVIRONMENT | dict(environment or {}), folder.parent / f"{folder.name}.out"
        self.process = begin(arguments, ROOT, out, self.log, environment, functools.partial(first, cores))

    def changes(self, count, pattern):
        """Waits until files of the run directory have changed `count` times."""
        seen, until = self._files(pattern), time.monotonic() + PATIENCE
        while count > 0:
            assert self.process.exitcode is None and time.monotonic() < until, f"nothing changes: {self.text()}"
            time.sleep(0.002)
            now = self._files(pattern)
            count -= len(now - seen)
            seen = now

    def _files(self, pattern):
        files = set()
        for path in self.output.glob(pattern):
            try:
                files.add((str(path), path.stat().st_mtime_ns))
            except FileNotFoundError:  # removed between the two looks
                continue
        return files

    def send(self, number=signal.SIGKILL):
        """Sends a signal to the process alone; loader workers notice by themselves."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self):
        """Waits for the process, and returns its exit status."""
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, f"the run does not end: {self.text()}"
        return self.process.exitcode

    def text(self):
        """Returns what this run, not an earlier one, has added to the log."""
        return self.log.read_bytes()[self.before :].decode()


def ranks(recipe, folder, *overrides, first=save_after_every_step):
    """One run in two processes, as a launcher starts them."""
    return [Run(recipe, folder, *overrides, first=first, environment=rank) for rank in rank_environments()]


def outcome(folder):
    """Returns results.json without times and what it was computed on, curves, and a hash of every file of tensors."""
    run = folder / "small"
    results = json.loads((run / "results.json").read_text())
    results["recipe"].pop("output")
    results["recipe"].get("features", {}).pop("dir", None)
    for key in ("environment", "checksum"):  # the checksum is of all this too
        results.pop(key)
    for record in results["runs"]:
        for cost in COSTS:
            record.pop(cost, None)
    files = sorted(run.glob("models/**/*.safetensors"))
    assert files
    hashes = {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    analysis = run / "analysis.json"
    measures = analysis.read_bytes() if analysis.exists() else None
    return {"results": results, "files": hashes, "curves": read_scalars(run / "events"), "analysis": measures}


def leftovers(folder):
    """Returns the files that no finished run leaves behind."""
    hidden = [path for path in (folder / "small").rglob(".*") if path.is_file()]
    return [*hidden, *(folder / "small/state").rglob("*")]


def run_here(recipe, *overrides):
    """Runs a recipe in this process, and returns the exit status."""
    return main(["run", str(recipe), *overrides])


def one_line(errors):
    """Returns the one line that standard error has from us."""
    assert "Traceback" not in errors, errors
    [line] = [line for line in errors.splitlines() if line.startswith("xdm-ft: ")]
    assert line.isprintable()
    return line
