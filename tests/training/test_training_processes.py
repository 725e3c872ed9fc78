"""Two real processes train, predict and record what one process does; all trainings in one start of processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator, debug_launcher
from accelerate.state import AcceleratorState
from loop_models import (
    DOMAINBED,
    SmallCNN,
    WithDomainHead,
    blocks,
    cached,
    digits,
    final_state,
    lora,
    make_job,
    predict,
    split,
    train,
    vit,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.heads.cosine import Cosine
from xdm_ft.heads.mlp import MLP
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Training
from xdm_ft.training.end_to_end.model import EncoderPart
from xdm_ft.training.end_to_end.train import shut_down

pytestmark = pytest.mark.slow
MIXING = partial(XDomainMix, warmup_steps=1, quantile_steps=1)
# 5 and 15 images do not divide by 2 processes × 2 micro-batches; not Adam above a cut or for an MLP: the bias of
# attention's keys has no effect, hidden units nearly none, and Adam would make their rounding as large as any gradient
BASE = {"batch_size": 5, "encoder_lr": 0.003, "clip_norm": 0.5}
SGD = BASE | {"optimizer": "sgd", "encoder_lr": 0.03}


class Case(NamedTuple):
    job: Job
    training: dict[str, Any] = BASE
    accumulation: tuple[int, int] = (1, 1)  # of one process, of two
    arguments: dict[str, Any] = {"batch_norm": "frozen"}
    part: Any = True
    reads_cache: bool = False


SHARP = SAM(rho=0.1)
job_of = partial(make_job, steps=3)
CASES = {
    "sam, parts": Case(job_of(WithDomainHead, sharpness=SHARP), accumulation=(1, 2)),
    "batch norm": Case(
        job_of(WithDomainHead, sharpness=SHARP), BASE | {"batch_size": 4}, (2, 1), {"batch_norm": "train"}
    ),
    "augmented, class balanced": Case(
        job_of(head=Cosine), BASE | {"sampler": "class_balanced"}, (1, 1),
        {"batch_norm": "frozen", "augmentations": DOMAINBED},
    ),
    "partners": Case(job_of(MIXING, sharpness=SHARP, head=MLP), SGD),
    "local partners": Case(job_of(partial(MIXING, partners="local"))),
    "blocks, cache, parts": Case(
        job_of(WithDomainHead, sharpness=SHARP, width=64), SGD, (1, 2), part=blocks(2), reads_cache=True
    ),
    "lora, images": Case(job_of(MIXING, width=64, sharpness=SHARP), SGD, (1, 2), part=lora(blocks=2)),
}  # fmt: skip


def train_all(folder: Path) -> None:
    """Trains, and predicts an odd number of images with the result; each process saves what it has."""
    torch.set_num_threads(1)  # a forked child must not touch the parent's thread pool
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    for name, case in CASES.items():
        encoder, recorded = SmallCNN() if case.part is True else vit(), []
        if name == "batch norm":
            del encoder.unreached  # SyncBatchNorm's stand-in needs every gradient
        part = EncoderPart(case.part)
        if case.reads_cache:
            part = cached(encoder, case.part, folder / "cache")
        training = Training(**case.training, accumulation=case.accumulation[accelerator.num_processes - 1])
        record = lambda step, models, recorded=recorded: recorded.append(models[0][1]["loss"])  # noqa: E731
        trained = train(case.job, encoder, training, accelerator, part=part, record=record, **case.arguments)
        state, rows = final_state(trained), split().evaluation["test"][:21]
        logits = predict(case.job, encoder, state, digits(), rows, accelerator, batch_size=4, part=part)
        state = state | {"logits": logits, "recorded": torch.tensor(recorded)}
        file = f"{name}, {accelerator.process_index} of {accelerator.num_processes}.safetensors"
        save_file(state, folder / file)
    shut_down(accelerator)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # as launchers do
        patch.setattr("xdm_ft.training.end_to_end.inputs.worker_count", lambda accelerator: 0)
        train_all(folder)
        debug_launcher(train_all, (folder,), num_processes=2)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one(name: str, folder: Path) -> None:
    one, first, second = (load_file(folder / f"{name}, {who}.safetensors") for who in ("0 of 1", "0 of 2", "1 of 2"))
    differ = [key for key in one.keys() - {"recorded"} if not close(first[key], one[key])]
    assert bool(differ) == (name == "local partners"), differ  # those are each process's own
    assert all(torch.equal(first[key], second[key]) for key in one.keys() - {"recorded"})
    assert name == "local partners" or close(first["recorded"], one["recorded"])
    assert len(one["recorded"]) == 1 and len(second["recorded"]) == 0, "the main process records"


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=0, atol=3e-5)  # other partners are 2e-4 to 4e-2 away
