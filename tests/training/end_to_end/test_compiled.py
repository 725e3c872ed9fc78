"""`training.compile`, and the memory layout of CNNs: the same training, but for rounding."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from loop_models import SmallCNN, WithDomainHead, final_state, make_job, one_process, train
from torch import Tensor, nn
from torch._dynamo.utils import counters

from xdm_ft.algorithms.mixstyle import MixStyle
from xdm_ft.encoders.timm import Timm
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Trained, Training
from xdm_ft.training.end_to_end import model as model_module
from xdm_ft.training.end_to_end.model import EndToEnd, is_cnn

TRAINING = Training(batch_size=4, compile=True)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    monkeypatch.setattr("xdm_ft.training.end_to_end.inputs.worker_count", lambda accelerator: 0)
    with one_process() as accelerator:
        yield accelerator


def compiled(monkeypatch: pytest.MonkeyPatch, backend: str, accelerator: Accelerator) -> Trained:
    """A compiled training of 6 steps, of two passes each. A graph break or recompilation is an error."""
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        trained = train(make_job(WithDomainHead, steps=6, sharpness=SAM()), SmallCNN(), TRAINING, accelerator)
    assert counters["stats"]["unique_graphs"] == 1
    return trained


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=1e-4, rtol=1e-4, msg=lambda text, name=name: name + text)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_without_breaks_trains_the_same(
    backend: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TRAINING.model_copy(update={"compile": False})
    eager = train(make_job(WithDomainHead, steps=6, sharpness=SAM()), SmallCNN(), plain, accelerator)
    assert_close(final_state(compiled(monkeypatch, backend, accelerator)), final_state(eager))


def test_modules_inside_the_encoder_are_not_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", lambda encode: pytest.fail("compiled"))
    encoder = SmallCNN()
    encoder.stage_names = ("layers.2", "layers.5")
    inner = EndToEnd(encoder, MixStyle(make_job().setup), "train")
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        inner.compile_encoding()
    assert "training.compile: has no effect" in caplog.text


def test_channels_last_trains_the_same(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    job, training = make_job(WithDomainHead, steps=3), Training(batch_size=4)
    last = train(job, SmallCNN(), training, accelerator)
    placed = EndToEnd(SmallCNN(), WithDomainHead(job.setup), "train").placed(accelerator.device)
    weight = placed.encoder.layers[3].weight
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    monkeypatch.setattr(model_module, "is_cnn", lambda encoder: False)
    assert_close(final_state(train(job, SmallCNN(), training, accelerator)), final_state(last))


def test_a_vision_transformer_is_no_cnn() -> None:
    assert is_cnn(SmallCNN()) and not is_cnn(nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8)))


@pytest.mark.gpu
def test_a_cnn_on_a_gpu_trains_as_on_a_cpu() -> None:
    with one_process() as accelerator:
        job = make_job(WithDomainHead, steps=3)
        on_cpu = train(job, SmallCNN(), Training(batch_size=4), accelerator)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    on_gpu = train(job, SmallCNN(), Training(batch_size=4), Accelerator())
    for name, value in final_state(on_gpu).items():
        torch.testing.assert_close(value, final_state(on_cpu)[name], atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_encoders_of_timm_compile_whole() -> None:
    for model in ("resnet10t", "vit_tiny_patch16_224"):
        torch.compiler.reset()
        encoder = Timm(model=model, weights=None, kwargs={"img_size": 32} if "vit" in model else {})
        inner = EndToEnd(encoder, WithDomainHead(make_job(width=encoder.width).setup), "train").train()
        x = torch.randn(2, 3, 32, 32)
        found = torch.compile(inner.encode, backend="aot_eager", fullgraph=True)(x)
        assert found.shape == (2, encoder.width)
