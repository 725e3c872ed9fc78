"""Two real processes train above a cut what one process trains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, debug_launcher
from accelerate.state import AcceleratorState
from cut_models import BlockCNN, blocks, cached, lora, train_part, vit
from loop_models import WithDomainHead, digits, final_state, make_job, split
from safetensors.torch import load_file, save_file

from xdm_ft.algorithms.lisa import LISA
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.cut.trainable import LastBlocks, LowRank
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Training
from xdm_ft.training.end_to_end.model import EncoderPart
from xdm_ft.training.end_to_end.train import predict, shut_down

pytestmark = pytest.mark.slow
# not Adam: the bias of attention's keys has no effect, and Adam would make its rounding as large as any gradient
TRAINING = Training(batch_size=5, clip_norm=0.5, encoder_lr=0.03, optimizer="sgd")


@pytest.fixture(autouse=True)
def one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as launchers do


@dataclass(frozen=True)
class Case:
    encoder: str
    part: LastBlocks | LowRank
    job: Job
    reads_cache: bool = True
    accumulation: int = 1  # of two processes


MIXING = partial(XDomainMix, warmup_steps=1, quantile_steps=1)
CASES = {
    "blocks, sam": Case("vit", blocks(2), make_job(WithDomainHead, sharpness=SAM(rho=0.1), width=64), accumulation=2),
    "blocks, batch norm below": Case("cnn", blocks(2), make_job(LISA, width=16), reads_cache=False),
    "lora, xdomainmix": Case("vit", lora(blocks=2), make_job(MIXING, sharpness=SAM(rho=0.1), width=64)),
    "lora, images": Case("vit", lora(), make_job(width=64), reads_cache=False, accumulation=2),
}


def work(folder: Path, case: Case, accumulation: int) -> None:
    """Trains, and predicts an odd number of images with the result; each process saves what it has."""
    torch.set_num_threads(1)  # a forked child must not touch the parent's thread pool
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    encoder = vit() if case.encoder == "vit" else BlockCNN()
    activations = cached(encoder, case.part, folder / "cache") if case.reads_cache else None
    training = TRAINING.model_copy(update={"accumulation": accumulation})
    trained = train_part(case.job, encoder, training, accelerator, case.part, activations, batch_norm="frozen")
    state, rows = final_state(trained), split().evaluation["test"][:21]
    part = EncoderPart(case.part, activations)
    logits = predict(case.job, encoder, state, digits(), rows, accelerator, batch_size=4, part=part)
    file = f"{accelerator.process_index}_of_{accelerator.num_processes}.safetensors"
    save_file(state | {"logits": logits}, folder / file)
    shut_down(accelerator)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one(tmp_path: Path, name: str) -> None:
    # 5 images per domain do not divide by 2 processes × 2 micro-batches
    case = CASES[name]
    work(tmp_path, case, 1)
    debug_launcher(work, (tmp_path, case, case.accumulation), num_processes=2)
    one, first, second = (load_file(tmp_path / f"{file}.safetensors") for file in ("0_of_1", "0_of_2", "1_of_2"))
    for key, value in one.items():
        torch.testing.assert_close(first[key], value, rtol=0, atol=1e-5, msg=lambda text, n=key: f"{n}: {text}")
        assert torch.equal(first[key], second[key]), key
