"""Small real data and jobs for the tests of the head bank and the solvers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup, Solver
from xdm_ft.algorithms.erm import ERM
from xdm_ft.core import Annotations, Batch, Criteria, Losses, ModelKey, Task
from xdm_ft.features.cache import Features
from xdm_ft.heads.linear import Linear
from xdm_ft.protocol.splits import Split
from xdm_ft.runtime.randomness import Stream
from xdm_ft.sharpness import Sharpness
from xdm_ft.storage.checkpoint import Checkpoint
from xdm_ft.training import Job, Trained, Training
from xdm_ft.training.bank.data import CachedData
from xdm_ft.training.bank.train import chunks, train_chunk

DOMAINS, CLASSES, WIDTH = 4, 10, 96


@cache
def digits() -> CachedData:
    """Handwritten digits, as rectified random projections of their pixels, partly a domain's own."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x, generator = torch.tensor(pixels, dtype=torch.float32) / 16, torch.Generator().manual_seed(0)
    domains = torch.arange(len(x)) % DOMAINS
    shared = torch.randn(64, WIDTH, generator=generator)
    own = torch.randn(DOMAINS, 64, WIDTH, generator=generator)
    z = torch.einsum("nk,nkw->nw", x, (shared + 0.5 * own)[domains]) / 2
    return CachedData(Features([z.relu()]), Annotations(torch.tensor(labels), domains, domains))


def soften(labels: Tensor, classes: int) -> Tensor:
    """Soft labels, float32 [N,C]: the label has 0.6 or more."""
    votes = torch.rand(len(labels), classes, generator=torch.Generator().manual_seed(5))
    return 0.6 * F.one_hot(labels, classes) + 0.4 * votes / votes.sum(1, keepdim=True)


def spoiled(row: int, value: float = float("nan")) -> CachedData:
    """Digits with one image whose features are not numbers."""
    z = digits().features[torch.arange(len(digits().annotations.labels))].clone()
    z[row] = value
    return CachedData(Features([z]), digits().annotations)


def split_of(held_out: int, seed: int) -> Split:
    """A fifth of every training domain validates."""
    annotations = digits().annotations
    train_domains = [d for d in range(DOMAINS) if d != held_out]
    is_val = torch.rand(len(annotations.labels), generator=torch.Generator().manual_seed(seed)) < 0.2
    domain_of = torch.full((DOMAINS,), -1)
    domain_of[train_domains] = torch.arange(DOMAINS - 1)
    held = annotations.domains == held_out
    return Split(
        test_domains=(f"d{held_out}",),
        train_domains=tuple(f"d{d}" for d in train_domains),
        train=tuple(((annotations.domains == d) & ~is_val).nonzero()[:, 0] for d in train_domains),
        evaluation={
            "train_val": (~held & is_val).nonzero()[:, 0],
            "test": held.nonzero()[:, 0],
            "test_val": (held & is_val).nonzero()[:, 0],
        },
        domain_of=domain_of,
    )


def job_of(
    method: Callable[..., Algorithm | Solver] = ERM,
    held_out: int = 0,
    seed: int = 0,
    *,
    steps: int = 60,
    lr: float = 1e-2,
    weight_decay: float = 0.0,
    sharpness: Sharpness | None = None,
    split: Split | None = None,
    setup: dict[str, Any] | None = None,
    **settings: Any,
) -> Job:
    split = split or split_of(held_out, seed)
    task = Task(tuple(str(c) for c in range(CLASSES)), split.train_domains)
    return Job(
        ModelKey(getattr(method, "__name__", "method"), split.test_domains, seed, 0),
        split=split,
        setup=Setup(task, width=WIDTH, steps=steps, seed=seed, **(setup or {})),
        make=lambda setup: method(setup, **settings),
        sharpness=sharpness,
        training=Training(batch_size=8).model_copy(update={"lr": lr, "weight_decay": weight_decay}),
    )


def under(training: Training, job: Job) -> Job:
    """The job under `training`, with its own learning rate and weight decay."""
    own = {"lr": job.training.lr, "weight_decay": job.training.weight_decay}
    return dataclasses.replace(job, training=training.model_copy(update=own))


def train(
    jobs: Sequence[Job],
    training: Training | None = None,
    rules: Sequence[str] = ("train_val",),
    metric: str = "accuracy",
    data: CachedData | None = None,
    record: Callable[[int, list[tuple[Job, dict[str, float]]]], None] = lambda step, heads: None,
    checkpoint: Callable[[Sequence[Job]], Checkpoint] | None = None,
) -> list[Trained]:
    """With `training` in place of the jobs' own, but for learning rate and weight decay."""
    data, jobs = data or digits(), jobs if training is None else [under(training, job) for job in jobs]
    about, trained = (data.features, data.annotations, Criteria(tuple(rules), metric)), list[Trained]()
    for chunk in chunks(jobs, data.features.device):
        kept = None if checkpoint is None else checkpoint(chunk)
        trained += train_chunk(chunk, *about, record=record, checkpoint=kept)
        if kept is not None:
            kept.remove()
    return trained


def head_logits(features: Features, rows: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Of a linear head, by hand."""
    return F.linear(features[rows], state["head.weight"], state["head.bias"])


class WithDomainHead(Algorithm):
    """Cross-entropy of class and, on detached features, of domain; buffers take in every step."""

    auxiliary = ("domain_head",)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.domain_head = Linear(setup.width, setup.task.num_domains, setup.seed, Stream.DOMAIN_INIT)
        self.memory: Tensor
        self.register_buffer("memory", torch.zeros(setup.task.num_domains))
        self.taken: Tensor
        self.register_buffer("taken", torch.zeros((), dtype=torch.int64))

    def loss(self, z: Tensor, batch: Batch, step: int | Tensor) -> Losses:
        per_sample = F.cross_entropy(self.head(z), batch.y, reduction="none")
        members = F.one_hot(batch.domain, self.task.num_domains).to(z.dtype)  # [B,D]
        by_domain = per_sample @ members / members.sum(0)
        return Losses(
            by_domain.mean(),
            F.cross_entropy(self.domain_head(z.detach()), batch.domain),
            buffers={"memory": 0.5 * self.memory + by_domain.detach(), "taken": self.taken + 1},
            logs={"largest": by_domain.amax()},
        )
