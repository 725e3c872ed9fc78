"""Which function runs where, as the table in README.md says it, by what trainings call."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from bank_problems import job_of
from bank_problems import train as train_bank
from loop_models import SmallCNN, make_job, one_process
from loop_models import train as train_end_to_end
from torch import Tensor

import xdm_ft.xdomainmix
from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.core import Batch, Task
from xdm_ft.heads.linear import Linear
from xdm_ft.heads.mlp import MLP
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Training
from xdm_ft.xdomainmix import _numba  # compiled here, not while calls are counted
from xdm_ft.xdomainmix.masks import quantile_cycle, rank_of, runs_kernel

PACKAGE = Path(xdm_ft.xdomainmix.__file__).parent
EQUATIONS, WHERE = re.findall(r"(?:^\|.*\n)+", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
CONTRIBUTING = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = {_numba.__file__, *map(str, PACKAGE.glob("*.py")), sys.modules[XDomainMix.__module__].__file__}
ROWS = [[cell.strip() for cell in row.strip("|").split("|")] for row in WHERE.splitlines()]
NAMES = [re.findall(r"`([a-z_.]+)`", row[0]) for row in ROWS[2:]]
OF_HEAD = {"linear_scores": Linear, "autograd_scores": MLP, "target_gradient": MLP}
SETTINGS = {"warmup_steps": 1, "quantile_steps": 1}
GPU = """
def exceeds(rows, ranks):
    return rows > rows.sort(-1).values.gather(1, ranks.repeat_interleave(len(rows) // len(ranks))[:, None])
"""


def runs_in(column: str) -> dict[str, bool]:
    """{function: whether the table says that it runs}"""
    number = ROWS[0].index(column)
    cells = [row[number] for row in ROWS[2:]]
    assert {*cells} <= {"runs", "–"}
    return {name: cell == "runs" for names, cell in zip(NAMES, cells, strict=True) for name in names}


def called(train: Callable[[], object]) -> set[str]:
    """The functions of the method's files that a training calls; those of kernels with their module."""
    for of_making in (rank_of, quantile_cycle):
        of_making.cache_clear()
    names = set[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename in FILES:
            module = Path(frame.f_code.co_filename).stem
            names.add(f"{module}.{frame.f_code.co_name}" if module.startswith("_") else frame.f_code.co_name)

    sys.setprofile(note)
    try:
        train()
    finally:
        sys.setprofile(None)
    return names


def check(names: set[str], column: str, head: type) -> None:
    """Each function of the table is called if it runs in this column, and belongs to this head."""
    expected = runs_in(column)
    assert {name for name in expected if name in names} == {
        name for name, runs in expected.items() if runs and OF_HEAD.get(name, head) is head
    }


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with one_process() as accelerator:
        yield accelerator


def bank(head: Any, accelerator: Accelerator) -> None:
    train_bank([job_of(XDomainMix, steps=2, sharpness=SAM(), setup={"head": head}, **SETTINGS)])


def end_to_end(head: Any, accelerator: Accelerator) -> None:
    job = make_job(partial(XDomainMix, **SETTINGS), steps=2, head=head, sharpness=SAM())
    train_end_to_end(job, SmallCNN(), Training(batch_size=4), accelerator)


@pytest.fixture(params=["CPU", "GPU", "`XDM_FT_KERNELS=0`"])
def column(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "GPU":  # the choices that code makes there, and a function in place of Triton's
        triton = ModuleType("xdm_ft.xdomainmix._triton")
        exec(compile(GPU, str(PACKAGE / "_triton.py"), "exec"), vars(triton))
        monkeypatch.setattr(xdm_ft.xdomainmix, "_triton", triton, raising=False)
        monkeypatch.setattr(runs_kernel, "__code__", (lambda tensor, kind: kind == "cuda").__code__)
    elif request.param != "CPU":
        monkeypatch.setenv("XDM_FT_KERNELS", "0")
    return request.param


@pytest.mark.parametrize(
    ("train", "head"), [(bank, Linear), (bank, MLP), pytest.param(end_to_end, Linear, marks=pytest.mark.slow)]
)
def test_training_calls_what_the_table_says(train: Any, head: type, column: str, accelerator: Accelerator) -> None:
    check(called(lambda: train(head, accelerator)), column, head)


MAPS, FLOAT64 = torch.rand(8, 12, 3, 3), torch.rand(8, 12).double()


@pytest.mark.parametrize(("z", "head"), [(MAPS, Linear), (FLOAT64, Linear), (FLOAT64, MLP)])
def test_own_loops_call_what_the_table_says(z: Tensor, head: type) -> None:
    setup, place = Setup(Task(("a", "b"), ("x", "y")), 12, steps=2, seed=0, head=head), torch.arange(8)
    batch = Batch(z, place % 2, place // 2 % 2, place, place)

    def pooled(features: Tensor) -> Tensor:
        return features.flatten(2).mean(2) if features.ndim > 2 else features

    def train() -> None:
        method = XDomainMix(setup, **SETTINGS).to(z.dtype)
        augmented = method.augment(z, batch, 1)
        method.mixed_loss(pooled(z), batch, augmented._replace(z=pooled(augmented.z)))

    check(called(train), "CPU, maps or float64", head)


def test_the_tables_name_the_same_functions() -> None:
    every = [name for names in NAMES for name in names]
    assert len(every) == len({*every}) == 19
    of_equations = {
        name for row in EQUATIONS.splitlines()[2:] for name in re.findall(r"`([a-z_]+)\(", row.split("|")[-2])
    }
    assert {"linear_scores", "exceeds", "decompose", "draw_partners", "mix"} < of_equations < {*every}
    [sentence] = re.findall(r"the kernel replaces ([^.]*) together", " ".join(CONTRIBUTING.split()))
    replaced = {name for name, runs in runs_in("CPU").items() if not runs and runs_in("GPU")[name]}
    assert {*re.findall(r"`(\w+)`", sentence)} == replaced - {"autograd_scores", "_triton.exceeds"}
