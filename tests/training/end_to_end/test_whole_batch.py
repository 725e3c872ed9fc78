"""The loss of a step is that of the whole batch, however many processes and micro-batches have parts of it.

The gradient of one step of every method, from the same weights, is the same for 1 and 2 processes × accumulation 1 and
2, with and without SAM: in float64, since masks are discontinuous, with an encoder that has neither dropout nor batch
norm in training mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator, debug_launcher
from accelerate.state import AcceleratorState
from loop_models import SmallCNN, digit_annotations, digits, make_job, one_process, step_batch
from own_training import under
from safetensors.torch import load_file, save_file
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.lisa import LISA
from xdm_ft.algorithms.mixup import Mixup
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.heads import Head
from xdm_ft.heads.cosine import Cosine
from xdm_ft.heads.linear import Linear
from xdm_ft.heads.mlp import MLP
from xdm_ft.recipe.components import find, names
from xdm_ft.runtime.tensors import Batch
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Training
from xdm_ft.training.end_to_end.batches import TrainingBatches
from xdm_ft.training.end_to_end.gradients import StepGradients
from xdm_ft.training.end_to_end.inputs import Images
from xdm_ft.training.end_to_end.model import EndToEnd

FOUND = {name: find("algorithms", name) for name in names("algorithms")}
ALGORITHMS = {name: cls for name, cls in FOUND.items() if issubclass(cls, Algorithm)}
REFUSED = {"mixstyle", "dsu"}
STEP = 7  # of 10: after the warm-up of XDomainMix and the annealing of IRM
BATCH = {"per_domain": 7, "pooled": 22}  # neither divides by 4


def with_setup(
    cls: Callable[..., Algorithm],
    loss_average: Literal["domain", "sample"] = "domain",
    class_weights: bool = False,
    head: type[Head] = Linear,
) -> Callable[[Setup], Algorithm]:
    def make(setup: Setup) -> Algorithm:
        weight = torch.linspace(0.5, 2, setup.task.num_classes) if class_weights else None
        text = torch.randn(setup.task.num_classes, setup.width, generator=torch.Generator().manual_seed(1))
        common = (setup.task, setup.width, 10, setup.seed, loss_average)
        return cls(Setup(*common, text_weight=text, class_weight=weight, head=head))

    return make


def cases() -> dict[str, tuple[Callable[[Setup], Algorithm], str, SAM | None]]:
    """Every method on batches per domain, and on pooled ones with class weights or with the mean over samples."""
    found: dict[str, tuple[Callable[[Setup], Algorithm], str, SAM | None]] = {}
    for (name, cls), sharpness in product(ALGORITHMS.items(), (None, SAM(rho=0.1))):
        if name in REFUSED:
            continue
        behind = " sam" if sharpness else ""
        found[f"{name}{behind} per domain"] = with_setup(cls), "per_domain", sharpness
        if not cls.pooled_reason:
            found[f"{name}{behind} weighted"] = with_setup(cls, class_weights=True), "pooled", sharpness
            found[f"{name}{behind} by sample"] = with_setup(cls, "sample"), "pooled", sharpness
    for head, sharpness in ((MLP, SAM(rho=0.1)), (Cosine, None)):  # scores of both heads by autograd
        found[f"xdomainmix {head.__name__}"] = with_setup(XDomainMix, head=head), "per_domain", sharpness
    for cls in (LISA, Mixup):
        found[f"{cls.__name__} all"] = with_setup(partial(cls, partners="all")), "per_domain", None
    return found


class DoubleCNN(SmallCNN):
    """In float64, all of it trained."""

    def __init__(self) -> None:
        super().__init__()
        del self.unreached

    def forward(self, images: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(self.layers(images.to(self.layers[0].weight.dtype)), 4).flatten(1)


def gradients(accelerator: Accelerator, accumulation: int) -> dict[str, Tensor]:
    """Case/parameter → gradient of one step, and the case's loss."""
    found = {}
    torch.set_default_dtype(torch.float64)
    try:
        for case, (make, kind, sharpness) in cases().items():
            found |= {
                f"{case}/{name}": value for name, value in of_case(make, kind, sharpness, accelerator, accumulation)
            }
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def of_case(
    make: Callable[[Setup], Algorithm], kind: str, sharpness: SAM | None, accelerator: Accelerator, accumulation: int
) -> Iterator[tuple[str, Tensor]]:
    job = make_job(make, steps=10)
    training = Training(batch_size=BATCH[kind], sampler=kind, accumulation=accumulation)
    inner = EndToEnd(DoubleCNN().double(), job.make(job.setup).double(), "frozen").train()
    algorithm = inner.algorithm
    by_parts = algorithm.loss_over != "batch" and algorithm.parts_add_up(kind == "pooled")
    passes = StepGradients(accelerator.prepare(inner), inner, accelerator, sharpness, job.seed, by_parts)
    batch = step_batch(job, training, accelerator, STEP)
    batch.parts[:] = [double(part) for part in batch.parts]
    domain = 1 if type(algorithm).update is not Algorithm.update else None
    losses = passes.run(batch if domain is None else batch.block(domain, algorithm.task.num_domains), STEP)
    yield "loss", losses.total
    yield from ((f"log {name}", value) for name, value in losses.logs.items())
    yield from ((name, parameter.grad) for name, parameter in inner.named_parameters() if parameter.grad is not None)
    yield from ((name, buffer.clone()) for name, buffer in algorithm.named_buffers())


def double(batch: Batch) -> Batch:
    partner = None if batch.partner is None else batch.partner.double()
    return batch._replace(x=batch.x.double(), partner=partner)


def work(folder: Path) -> None:
    torch.set_num_threads(1)  # a forked child must not touch the parent's thread pool
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    for accumulation in (1, 2):
        name = f"{accelerator.process_index}_of_{accelerator.num_processes}_by_{accumulation}.safetensors"
        save_file(gradients(accelerator, accumulation), folder / name)
    accelerator.wait_for_everyone()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("gradients")
    digits()
    work(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        debug_launcher(work, (folder,), num_processes=2)
    return {file.stem: load_file(file) for file in folder.iterdir()}


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with one_process() as accelerator:
        yield accelerator


def test_there_are_methods_to_test() -> None:
    assert len(cases()) > 5 * (len(ALGORITHMS) - len(REFUSED))


@pytest.mark.parametrize("case", cases())
def test_the_gradient_of_a_step_is_that_of_the_whole_batch(case: str, found: dict[str, dict[str, Tensor]]) -> None:
    one = {name: value for name, value in found["0_of_1_by_1"].items() if name.startswith(f"{case}/")}
    assert len(one) > 5 and any("encoder" in name for name in one)
    assert len(found) == 6
    for way, other in found.items():
        for name, value in one.items():
            torch.testing.assert_close(
                other[name], value, rtol=1e-6, atol=1e-9, msg=lambda text, n=name, w=way: f"{w} {n}: {text}"
            )


def test_methods_that_mix_inside_the_encoder_are_refused_in_parts() -> None:
    assert {name for name, cls in ALGORITHMS.items() if cls.parts_reason} == REFUSED
    for name in REFUSED:
        assert "\n" not in ALGORITHMS[name].parts_reason and "; " in ALGORITHMS[name].parts_reason


def test_features_are_encoded_once_more_only_where_samples_are_compared() -> None:
    """Under accumulation a loss over samples costs no further forward pass."""
    calls = []

    class Counted(SmallCNN):
        def forward(self, images: Tensor) -> Tensor:
            calls.append(len(images))
            return super().forward(images)

    with one_process() as accelerator:
        for make, passes_of_encoder in ((ERM, 1), (partial(XDomainMix, warmup_steps=0), 2)):
            job, training = make_job(make, steps=4), Training(batch_size=4, accumulation=2)
            inner = EndToEnd(Counted(), job.make(job.setup), "frozen").train()
            by_parts = inner.algorithm.loss_over != "batch"
            passes = StepGradients(accelerator.prepare(inner), inner, accelerator, None, job.seed, by_parts)
            calls.clear()
            passes.run(step_batch(job, training, accelerator, 0), 0)
            assert calls == [6, 6] * passes_of_encoder


def test_a_row_that_is_twice_in_a_batch_gets_two_draws(accelerator: Accelerator) -> None:
    """λ of LISA: mixed with one and the same partner, two copies of a row differ."""
    job = make_job(LISA, steps=4)
    algorithm, twice = LISA(job.setup), 0
    for step in range(4):
        batch = step_batch(job, Training(batch_size=60), accelerator, step).parts[0]
        everyone = torch.ones_like(batch.y, dtype=torch.bool)
        same = batch._replace(partner=torch.zeros_like(batch.x), has_partner=everyone)
        mixed = algorithm.on_inputs(same, step).x
        order = batch.index.argsort()
        for one, other in zip(order[:-1].tolist(), order[1:].tolist(), strict=True):
            if batch.index[one] == batch.index[other]:
                assert torch.equal(batch.x[one], batch.x[other]) and not torch.equal(mixed[one], mixed[other])
                twice += 1
    assert twice > 10


def test_partners_from_all_images_are_read_and_augmented_like_any(accelerator: Accelerator) -> None:
    """End to end and in the bank: x_j is a training image of the same class and another domain."""
    make = partial(LISA, partners="all")
    job, training = make_job(make, steps=4), Training(batch_size=4, accumulation=2)
    labels, domains = torch.from_numpy(digits().labels), torch.from_numpy(digits().domains)
    images = Images(digits(), SmallCNN.preprocessing, "none", accelerator)
    images.workers = 0
    batches = TrainingBatches(under(training, job), images, digit_annotations(), accelerator)
    pool = torch.cat(job.split.train).tolist()
    outside = 0
    for step, batch in batches.begin():
        partners = batches.partners(step)
        assert partners is not None
        for part in batch.parts:
            assert part.partner is not None and part.has_partner is not None and part.has_partner.all()
            for number, place in enumerate(part.place.tolist()):
                row = int(partners.row[place])
                assert row in pool and labels[row] == part.y[number] and domains[row] != part.domain[number]
                assert torch.equal(part.partner[number], images.plain[row][0]) and part.partner_y[number] == labels[row]
                outside += row not in batch.full_batch.index.tolist()
    assert outside > 10
