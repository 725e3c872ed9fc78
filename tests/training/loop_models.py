"""Small models, data and jobs for the tests of the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from own_training import under
from torch import Tensor, nn

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.data.digits import Digits
from xdm_ft.encoders import Encoder, Portable
from xdm_ft.evaluation.records import ModelKey
from xdm_ft.heads import Head
from xdm_ft.heads.linear import Linear
from xdm_ft.images.transforms import Preprocessing
from xdm_ft.protocol.splits import Split
from xdm_ft.runtime.randomness import Stream
from xdm_ft.runtime.tensors import Annotations, Batch, Criteria, Losses, Task
from xdm_ft.sharpness import Sharpness
from xdm_ft.training import Job, Trained, Training
from xdm_ft.training.end_to_end.batches import StepBatch, TrainingBatches
from xdm_ft.training.end_to_end.inputs import Images
from xdm_ft.training.end_to_end.train import train_model

TRAIN_DOMAINS, TRAIN_ROWS, VAL_ROWS = 3, 60, 40  # per domain


class SmallCNN(Encoder):
    """Two convolutions with batch norm, then dropout."""

    width, normalize, pretraining, stage_names = 256, False, "random weights", ()
    preprocessing = Preprocessing(mean=(0.5, 0.5, 0.5), std=(0.3, 0.3, 0.3), size=32, interpolation="bilinear")

    def __init__(self, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # batch norm cancels a bias before it: its gradient is rounding alone, which Adam would make as large as any
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(dropout),
        )  # fmt: skip
        self.unreached = nn.Linear(2, 2)  # like the text side of CLIP
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(self.layers(images), 4).flatten(1).float()

    def identity(self) -> dict[str, object]:
        return {"component": "small_cnn"}

    def portable(self) -> Portable:
        return Portable({}, self.state_dict())


class WithDomainHead(Algorithm):
    """Cross-entropy of class and, on detached features, of domain; a buffer takes in every step's domain losses."""

    auxiliary = ("domain_head",)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.domain_head = Linear(setup.width, setup.task.num_domains, setup.seed, Stream.DOMAIN_INIT)
        self.memory: Tensor
        self.register_buffer("memory", torch.zeros(setup.task.num_domains))
        self.taken: Tensor
        self.register_buffer("taken", torch.zeros((), dtype=torch.int64))

    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        per_sample = F.cross_entropy(self.head(z), batch.y, reduction="none")
        by_domain = torch.stack([per_sample[batch.domain == d].mean() for d in range(self.task.num_domains)])
        return Losses(
            by_domain.mean(),
            F.cross_entropy(self.domain_head(z.detach()), batch.domain),
            buffers={"memory": 0.5 * self.memory + by_domain.detach(), "taken": self.taken + 1},
            logs={"largest": by_domain.max()},
        )


@contextmanager
def one_process(mixed_precision: str = "no") -> Iterator[Accelerator]:
    """Its accelerator, on one thread: the models are too small for more."""
    AcceleratorState._reset_state(reset_partial_state=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield Accelerator(cpu=True, mixed_precision=mixed_precision)
    finally:
        torch.set_num_threads(threads)


@cache
def digits() -> Digits:
    return Digits()


def digit_annotations() -> Annotations:
    labels, domains = torch.from_numpy(digits().labels), torch.from_numpy(digits().domains)
    return Annotations(labels, domains, domains)


def split() -> Split:
    domains = torch.from_numpy(digits().domains)
    pools = [(domains == d).nonzero()[:, 0] for d in range(4)]
    names = digits().domain_names
    val = torch.cat([pool[TRAIN_ROWS : TRAIN_ROWS + VAL_ROWS] for pool in pools[:TRAIN_DOMAINS]])
    return Split(
        test_domains=names[TRAIN_DOMAINS:],
        train_domains=names[:TRAIN_DOMAINS],
        train=tuple(pool[:TRAIN_ROWS] for pool in pools[:TRAIN_DOMAINS]),
        evaluation={"train_val": val, "test": pools[3], "test_val": pools[3][:VAL_ROWS]},
        domain_of=torch.tensor([0, 1, 2, -1]),
    )


def make_job(
    make: Callable[[Setup], Algorithm] = ERM,
    steps: int = 4,
    seed: int = 3,
    sharpness: Sharpness | None = None,
    width: int = SmallCNN.width,
    lr: float = 0.01,
    weight_decay: float = 0.001,
    head: Callable[[int, int, int, int], Head] = Linear,
) -> Job:
    task = Task(digits().class_names, split().train_domains)
    setup = Setup(task, width, steps, seed, head=head)
    training = Training().model_copy(update={"lr": lr, "weight_decay": weight_decay})
    return Job(ModelKey("method", split().test_domains, seed, 0), split(), setup, make, sharpness, training)


def rows_of(job: Job, training: Training, step: int) -> Tensor:
    """int64 [B]: the rows of the whole batch of `step`."""
    return under(training, job).sampler(digit_annotations().labels).indices(step, step + 1)[0]


def step_batch(job: Job, training: Training, accelerator: Accelerator, step: int) -> StepBatch:
    """The batch of `step`, cut as `training.accumulation` says, in the small encoder's preprocessing."""
    images = Images(digits(), SmallCNN.preprocessing, "none", accelerator)
    images.workers = 0
    batches = TrainingBatches(under(training, job), images, digit_annotations(), accelerator)
    return next(batches.begin(step))[1]


def ignore(step: int, models: list[tuple[Job, dict[str, float]]]) -> None:
    pass


def train(job: Job, encoder: Encoder, training: Training, accelerator: Accelerator, **changes: Any) -> Trained:
    """Trains with one rule; without `evaluate_every` the selected step is the last."""
    arguments = {"rules": ("train_val",), "metric": "accuracy", "batch_norm": "train", "record": ignore, **changes}
    criteria = Criteria(*(arguments.pop(name) for name in ("rules", "metric")))
    training = training.model_copy(update={"evaluate_every": training.evaluate_every or job.setup.steps})
    return train_model(under(training, job), encoder, digits(), digit_annotations(), criteria, accelerator, **arguments)


def final_state(trained: Trained) -> dict[str, Tensor]:
    assert trained.failure is None, trained.failure
    selected = trained.selected["train_val"]
    assert selected.step == trained.job.setup.steps
    return selected.state
