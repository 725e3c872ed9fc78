"""Prints the frames of xdm_ft between `experiment.run` and ERM's loss, in a bank of heads and end to end.

    PYTHONPATH=. python tools/count_frames.py

Trains for a few steps on generated images with a tiny encoder, in a temporary folder, in this process alone.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import yaml
from PIL import Image
from torch.utils.data import DataLoader

import xdm_ft
from xdm_ft import experiment
from xdm_ft.algorithms.erm import ERM

PACKAGE = str(Path(xdm_ft.__file__).parent)
ENGINES = {"bank": False, "end to end": True}  # is the encoder trained?
RECIPE = """
name: miniature
data: {name: folder, root: data}
protocol: {name: leave_one_domain_out, test_domains: [site0], seeds: 1}
encoder: {name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}
features: {dir: cache, workers: 0}
methods: [erm]
training: {steps: 4, batch_size: 4, evaluate_every: 2}
report: {}
"""
RUN: CodeType = getattr(experiment.run, "run", experiment.run).__code__  # a function, or a module that has it


def write_images(folder: Path) -> None:
    """Three domains of two classes, six images each, in the layout of `data: folder`."""
    for number in range(36):
        domain, label = divmod(number // 6, 2)
        path = folder / f"site{domain}" / f"class{label}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 80, (40, 40, 3)) + 120 * label + 25 * domain
        Image.fromarray(pixels.astype(np.uint8)).save(path)


def run_miniature(trainable: bool, page: bool, on_event: Callable[[FrameType, str, object], None]) -> None:
    """Runs a recipe in a temporary folder, in one process on one core (on two, banks fork), profiled."""
    recipe, cores, make_loader = yaml.safe_load(RECIPE), os.sched_getaffinity(0), DataLoader.__init__
    recipe["encoder"]["trainable"], recipe["report"]["page"] = trainable, page
    alone = dict(num_workers=0, persistent_workers=False, prefetch_factor=None, multiprocessing_context=None)
    in_this_process = patch.object(DataLoader, "__init__", lambda *args, **keys: make_loader(*args, **(keys | alone)))
    with tempfile.TemporaryDirectory() as folder, chdir(folder), in_this_process:
        write_images(Path("data"))
        os.sched_setaffinity(0, {min(cores)})
        threading.setprofile(on_event)
        sys.setprofile(on_event)
        try:
            assert not xdm_ft.run(recipe).failed
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            os.sched_setaffinity(0, cores)


def frames_to_loss(trainable: bool) -> list[str]:
    """Returns "file:function" of the package's frames from `experiment.run` to `ERM.loss`, both included."""
    codes: list[CodeType] = []

    def keep_stack(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is ERM.loss.__code__ and not codes:
            codes.extend(outer.f_code for outer, _ in walk_stack(frame))

    run_miniature(trainable, False, keep_stack)
    codes = [code for code in codes[codes.index(RUN) :: -1] if code.co_filename.startswith(PACKAGE)]
    return [f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}" for code in codes]


if __name__ == "__main__":
    for engine, trainable in ENGINES.items():
        frames = frames_to_loss(trainable)
        print(f"{engine}: {len(frames)} frames", *frames, sep="\n  ")
