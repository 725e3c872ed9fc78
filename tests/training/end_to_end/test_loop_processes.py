"""Two real processes train the model that one process trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, debug_launcher
from accelerate.state import AcceleratorState
from loop_models import SmallCNN, WithDomainHead, digits, final_state, make_job, split, train
from safetensors.torch import load_file, save_file

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.heads import Head
from xdm_ft.heads.cosine import Cosine
from xdm_ft.heads.linear import Linear
from xdm_ft.heads.mlp import MLP
from xdm_ft.sharpness import Sharpness
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Training
from xdm_ft.training.end_to_end.train import predict, shut_down


@pytest.fixture(autouse=True)
def one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as launchers do


@dataclass(frozen=True)
class Case:
    training: Training
    sharpness: Sharpness | None = None
    batch_norm: str = "frozen"
    all_reached: bool = False  # no parameter of the encoder is without gradient
    method: Callable[[Setup], Algorithm] = WithDomainHead
    augmentation: str = "none"
    head: type[Head] = Linear


def work(folder: Path, case: Case) -> None:
    """Trains, and predicts an odd number of images with the result; each process saves what it has."""
    torch.set_num_threads(1)  # a forked child must not touch the parent's thread pool
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    encoder, recorded = SmallCNN(), []
    if case.all_reached:
        del encoder.unreached
    job = make_job(case.method, sharpness=case.sharpness, head=case.head)
    trained = train(
        job, encoder, case.training, accelerator, batch_norm=case.batch_norm, augmentation=case.augmentation,
        record=lambda step, models: recorded.append(models[0][1]["loss"]),
    )  # fmt: skip
    state = final_state(trained)
    state["logits"] = predict(job, encoder, state, digits(), split().evaluation["test"][:21], accelerator, batch_size=4)
    state["recorded"] = torch.tensor(recorded)
    save_file(state, folder / f"{accelerator.process_index}_of_{accelerator.num_processes}.safetensors")
    shut_down(accelerator)


def assert_two_processes_equal_one(folder: Path, alone: Case, both: Case) -> None:
    work(folder, alone)
    debug_launcher(work, (folder, both), num_processes=2)
    one, first, second = (load_file(folder / f"{name}.safetensors") for name in ("0_of_1", "0_of_2", "1_of_2"))
    for name in one.keys() - {"recorded"}:
        torch.testing.assert_close(first[name], one[name], rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
        assert torch.equal(first[name], second[name]), name
    torch.testing.assert_close(first["recorded"], one["recorded"])
    assert len(second["recorded"]) == 0  # the main process records


@pytest.mark.parametrize("sharpness", [pytest.param(None, marks=pytest.mark.slow), SAM(rho=0.1)], ids=["erm", "sam"])
def test_two_processes_equal_one(tmp_path: Path, sharpness: Sharpness | None) -> None:
    # 5 images per domain do not divide by 2 processes × 2 micro-batches
    whole = Training(batch_size=5, clip_norm=0.5, encoder_lr=0.003)
    cut = whole.model_copy(update={"accumulation": 2})
    assert_two_processes_equal_one(tmp_path, Case(whole, sharpness), Case(cut, sharpness))


@pytest.mark.slow
def test_two_processes_equal_two_micro_batches_with_batch_norm(tmp_path: Path) -> None:
    whole = Training(batch_size=4, encoder_lr=0.003)
    cut = whole.model_copy(update={"accumulation": 2})
    moving = {"sharpness": SAM(rho=0.1), "batch_norm": "train", "all_reached": True}
    assert_two_processes_equal_one(tmp_path, Case(cut, **moving), Case(whole, **moving))


@pytest.mark.slow
def test_two_processes_augment_as_one_and_train_another_head(tmp_path: Path) -> None:
    training = Training(batch_size=4, sampler="class_balanced", encoder_lr=0.003)
    case = Case(training, augmentation="domainbed", head=Cosine)  # two things in one start of processes
    assert_two_processes_equal_one(tmp_path, case, case)


MIXING = partial(XDomainMix, warmup_steps=1, quantile_steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "head"), [("per_domain", MLP), ("pooled", Linear)])
def test_global_partners_are_those_of_one_process(tmp_path: Path, kind: str, head: type[Head]) -> None:
    # 5 images per domain, and 15 in all, do not divide by 2 processes
    training = Training(batch_size=5 if kind == "per_domain" else 15, sampler=kind, clip_norm=0.5, encoder_lr=0.003)
    case = Case(training, SAM(rho=0.1), method=MIXING, head=head)
    assert_two_processes_equal_one(tmp_path, case, case)


@pytest.mark.slow
def test_local_partners_are_not(tmp_path: Path) -> None:
    case = Case(Training(batch_size=5, encoder_lr=0.003), method=partial(MIXING, partners="local"))
    with pytest.raises(AssertionError, match="not close"):
        assert_two_processes_equal_one(tmp_path, case, case)
