"""The head bank: heads among others equal heads alone, by hand-written loops and by golden numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from bank_problems import DOMAINS, WIDTH, WithDomainHead, digits, head_logits, job_of, split_of, train
from own_training import under
from torch import Tensor

from xdm_ft.algorithms import Algorithm
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.mixup import Mixup
from xdm_ft.algorithms.rsc import RSC
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.averaging.swad import SWAD
from xdm_ft.evaluation.metrics import metric
from xdm_ft.heads import Head
from xdm_ft.heads.cosine import Cosine
from xdm_ft.heads.linear import Linear
from xdm_ft.heads.mlp import MLP
from xdm_ft.protocol.samplers import PerDomainSampler, PooledSampler
from xdm_ft.runtime.tensors import Batch, Losses
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Schedule, Training
from xdm_ft.training.bank.data import batches
from xdm_ft.training.bank.step import Bank, stack, step
from xdm_ft.training.bank.train import CHUNK_BYTES, CHUNK_HEADS, chunks

CPU = torch.device("cpu")
SGD = Training(batch_size=8, optimizer="sgd", momentum=0.9)


def jobs_of(method: type[Algorithm], count: int, sam: bool, steps: int, **settings: object) -> list[Job]:
    """Heads that differ in all that may differ between heads."""
    return [
        job_of(
            method,
            held_out=h % DOMAINS,
            seed=h // DOMAINS,
            steps=steps,
            lr=1e-3 * (1 + h),
            weight_decay=1e-3 * (h % 3),
            sharpness=SAM(rho=0.02 * (1 + h)) if sam else None,
            **settings,
        )
        for h in range(count)
    ]  # fmt: skip


def trajectory(jobs: list[Job], training: Training, steps: int) -> tuple[Bank, list[dict[str, Tensor]]]:
    """The bank after `steps` steps, and its parameters after each."""
    jobs = [under(training, job) for job in jobs]
    bank, after = stack(jobs, torch.device("cpu")), []
    for number, batch in zip(range(steps), batches(jobs, digits()), strict=False):
        step(bank, batch, number)
        after.append({name: value.detach().clone() for name, value in (bank.main | bank.auxiliary).items()})
    return bank, after


@pytest.mark.parametrize("sam", [False, True], ids=["", "sam"])
@pytest.mark.parametrize(
    ("method", "head"), [(ERM, Linear), (XDomainMix, Linear), (XDomainMix, Cosine), (XDomainMix, MLP)]
)
def test_a_head_among_24_equals_itself_alone_step_by_step(method: type[Algorithm], head: type[Head], sam: bool) -> None:
    settings = {"warmup_steps": 3, "quantile_steps": 2} if method is XDomainMix else {}
    settings["setup"] = {"head": head}
    training = Training(
        batch_size=8, optimizer="adamw", clip_norm=0.5, schedule=Schedule(name="cosine", warmup_steps=4)
    )  # fmt: skip
    jobs = jobs_of(method, 24, sam, steps=12, **settings)
    _, together = trajectory(jobs, training, 12)
    for h in (0, 7, 23):  # Adam divides by √v, which amplifies the rounding of small gradients
        _, alone = trajectory([jobs[h]], training, 12)
        for of_bank, of_one in zip(together, alone, strict=True):
            for name in of_one:
                torch.testing.assert_close(of_bank[name][h], of_one[name][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [ERM, XDomainMix])
def test_a_head_among_24_ends_where_it_ends_alone(method: type[Algorithm]) -> None:
    jobs = [job_of(method, h % DOMAINS, h // DOMAINS, steps=300, lr=3e-3) for h in range(24)]
    together = train(jobs)
    for h in (1, 22):
        (alone,) = train([jobs[h]])
        in_bank = together[h]
        assert in_bank.job is jobs[h]
        rows = torch.arange(len(digits().annotations.labels))
        a, b = (accuracy(trained.selected["train_val"].state, rows) for trained in (in_bank, alone))
        assert abs(a - b) <= 0.002  # 3 of 1797 images
        assert a > 0.8


def accuracy(state: dict[str, Tensor], rows: Tensor) -> float:
    data = digits()
    return metric(
        "accuracy",
        head_logits(data.features, rows, state),
        data.annotations.labels[rows],
        data.annotations.domains[rows],
    )


def test_sam_in_a_bank_is_the_hand_written_loop() -> None:
    jobs = [
        job_of(held_out=0, seed=0, lr=0.1, weight_decay=0.01, sharpness=SAM(rho=0.05)),
        job_of(held_out=2, seed=5, lr=0.3, sharpness=SAM(rho=0.5)),
    ]
    _, after = trajectory(jobs, SGD, 6)
    for h, job in enumerate(jobs):
        model = job.make(job.setup)
        assert isinstance(model, ERM)
        weight, bias = model.head.weight, model.head.bias
        optimizer = torch.optim.SGD(
            [weight, bias], lr=job.training.lr, momentum=0.9, weight_decay=job.training.weight_decay
        )
        assert job.sharpness is not None
        for number in range(6):
            z, y = batch_of(job, number)
            with torch.no_grad():
                centre = weight.clone(), bias.clone()
            gradients = torch.autograd.grad(F.cross_entropy(z @ weight.T + bias, y), [weight, bias])
            norm = sum(g.square().sum() for g in gradients).sqrt()
            with torch.no_grad():
                for parameter, gradient in zip((weight, bias), gradients, strict=True):
                    parameter += job.sharpness.rho * gradient / norm
            optimizer.zero_grad()
            F.cross_entropy(z @ weight.T + bias, y).backward()
            with torch.no_grad():
                weight.copy_(centre[0])
                bias.copy_(centre[1])
            optimizer.step()
            torch.testing.assert_close(after[number]["head.weight"][h], weight.detach(), rtol=1e-4, atol=5e-6)
            torch.testing.assert_close(after[number]["head.bias"][h], bias.detach(), rtol=1e-4, atol=5e-6)


def batch_of(job: Job, number: int) -> tuple[Tensor, Tensor]:
    """Features and labels of a step; domains are equally large, so that both loss averages agree."""
    rows = PerDomainSampler(job.split.train, 8, job.seed).indices(number, number + 1)[0]
    return digits().features[rows], digits().annotations.labels[rows]


def test_auxiliary_parameters_step_once_unclipped_and_outside_sam() -> None:
    """The domain head moves as under plain SGD on its own, whatever is done to the class head."""
    training = SGD.model_copy(update={"clip_norm": 1e-3})
    jobs = [job_of(WithDomainHead, held_out, lr=0.1, sharpness=SAM(rho=0.5)) for held_out in (0, 1)]
    bank, after = trajectory(jobs, training, 5)
    for h, job in enumerate(jobs):
        model = job.make(job.setup)
        assert isinstance(model, WithDomainHead)
        domain_head, moved = model.domain_head, []
        optimizer = torch.optim.SGD(domain_head.parameters(), lr=job.training.lr, momentum=0.9)
        rows = PerDomainSampler(job.split.train, 8, job.seed).indices(0, 5)
        for number in range(5):
            z, domain = digits().features[rows[number]], job.split.domain_of[digits().annotations.domains[rows[number]]]
            optimizer.zero_grad()
            F.cross_entropy(domain_head(z), domain).backward()
            optimizer.step()
            torch.testing.assert_close(after[number]["domain_head.weight"][h], domain_head.weight.detach())
        for before, now in pairwise([model.head.weight.detach(), *(own["head.weight"][h] for own in after)]):
            moved.append(float((now - before).norm()))
        # clipped to 1e-3 in all, with lr 0.1 and a velocity of at most 1/(1 − 0.9) times that
        assert 0 < max(moved) <= 0.1 * 1e-3 * 10
    assert bank.buffers["count"].tolist() == [5.0, 5.0]  # two passes, one commitment


def test_batches_are_the_samplers_and_domains_those_of_the_split() -> None:
    jobs = [job_of(held_out=3, seed=1, steps=5), job_of(held_out=1, seed=2, steps=5)]
    data, training = digits(), Training(batch_size=4, sampler="pooled")
    made: list[Batch] = list(batches([under(training, job) for job in jobs], data))
    assert len(made) == 5
    for h, job in enumerate(jobs):
        rows = PooledSampler(job.split.train, 4, job.seed).indices(0, 5)
        for batch, expected in zip(made, rows, strict=True):
            assert torch.equal(batch.index[h], expected)
            assert torch.equal(batch.x[h], data.features[expected])
            assert torch.equal(batch.y[h], data.annotations.labels[expected])
            names = [job.split.train_domains[d] for d in batch.domain[h].tolist()]
            assert names == [f"d{d}" for d in data.annotations.domains[expected].tolist()]


def test_chunks_hold_neighbours_of_one_shape() -> None:
    jobs = [job_of(steps=5, seed=s) for s in range(2 * CHUNK_HEADS + 1)] + [job_of(steps=6)]
    sizes = [len(chunk) for chunk in chunks(jobs, CPU)]
    assert sizes == [CHUNK_HEADS, CHUNK_HEADS, 1, 1]
    assert [job for chunk in chunks(jobs, CPU) for job in chunk] == jobs


def test_trials_with_the_same_batches_share_a_chunk_if_they_fill_half_of_it() -> None:
    many, few = CHUNK_HEADS // 2 + 1, CHUNK_HEADS // 2
    splits = [split_of(held_out, seed=0) for held_out in range(4)]
    jobs = [
        job_of(held_out=held_out, split=split)
        for held_out, (split, trials) in enumerate(zip(splits, (many, few, CHUNK_HEADS + few, many), strict=True))
        for _ in range(trials)
    ]
    found = [sorted({job.test_domains[0] for job in chunk}) for chunk in chunks(jobs, CPU)]
    assert found == [["d0"], ["d2"], ["d3"], ["d1", "d2"]]
    assert sorted(map(id, jobs)) == sorted(id(job) for chunk in chunks(jobs, CPU) for job in chunk)


@pytest.mark.parametrize("method", [ERM, XDomainMix, Mixup, RSC], ids=lambda method: method.__name__)
def test_heads_with_the_same_batches_train_as_among_others(method: type[Algorithm]) -> None:
    """Bit for bit: their batches are a view of one, those of the others are copies."""
    split = split_of(0, seed=0)
    jobs = [under(SGD, job_of(method, split=split, steps=20, lr=1e-2 * (1 + h))) for h in range(3)]
    shared, copied = (
        trajectory(some, SGD, 20)[0].stacked() for some in (jobs, [*jobs, job_of(method, held_out=1, steps=20)])
    )
    [x] = {batch.x.untyped_storage().nbytes() // batch.x[0].nbytes for batch in batches(jobs, digits())}
    assert x == 1
    for name, values in shared.items():
        assert torch.equal(values, copied[name][:3])


def test_chunks_part_settings_that_do_not_stack() -> None:
    jobs = [job_of(XDomainMix, seed=s, warmup_steps=3 + s % 2, p_discard=s / 10) for s in range(4)]
    jobs += [job_of(XDomainMix, warmup_steps=3, sharpness=SAM(rho=rho)) for rho in (0.1, 0.2)]
    place = {id(job): number for number, job in enumerate(jobs)}
    found = [[place[id(job)] for job in chunk] for chunk in chunks(jobs, CPU)]
    assert found == [[0, 2], [1, 3], [4, 5]]


def test_chunks_part_what_else_a_search_draws() -> None:
    drawn = {}, {"lr": 0.5, "momentum": 0.1}, {"beta1": 0.5}, {"batch_size": 3}
    jobs = [dataclasses.replace(job_of(seed=s), training=SGD.model_copy(update=own)) for s in range(2) for own in drawn]
    place = {id(job): number for number, job in enumerate(jobs)}
    assert [[place[id(job)] for job in chunk] for chunk in chunks(jobs, CPU)] == [[0, 1, 4, 5], [2, 6], [3, 7]]


def test_a_head_that_stops_keeps_what_it_picked_and_the_others_go_on() -> None:
    """Its patience ends as it would alone; the rest of its chunk is what it is without it."""
    training = SGD.model_copy(update={"patience": 1, "evaluate_every": 2})
    jobs = [job_of(steps=20, lr=lr) for lr in (10.0, 1e-3)]
    both = train(jobs, training)
    for job, together in zip(jobs, both, strict=True):
        (alone,) = train([job], training)
        assert alone.stopped_at == together.stopped_at
        assert alone.selected["train_val"].step == together.selected["train_val"].step
        states = alone.selected["train_val"].state, together.selected["train_val"].state
        torch.testing.assert_close(*states, atol=1e-5, rtol=1e-5)
    assert both[0].stopped_at is not None and both[0].stopped_at < 20
    assert max(both[0].course["train_val"]) == both[0].stopped_at


class BrokenLate(ERM):
    """Its loss is not finite from the tenth step on."""

    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        losses = super().loss(z, batch, step)
        return losses if step < 9 else losses._replace(total=losses.total * torch.nan)


def test_a_head_that_has_stopped_does_not_fail_with_the_others() -> None:
    training = SGD.model_copy(update={"patience": 2, "evaluate_every": 2})
    stopped, broken = train([job_of(BrokenLate, steps=20, lr=lr) for lr in (1e-6, 0.03)], training)
    assert stopped.stopped_at is not None and stopped.stopped_at < 9
    assert stopped.failure is None and stopped.selected
    assert broken.failure is not None and "step 10 of 20" in broken.failure


def test_chunks_part_what_averages_from_what_does_not() -> None:
    jobs = [job_of(seed=seed) for seed in range(4)]
    jobs = [dataclasses.replace(job, averaging=SWAD(n_converge=1 + job.seed) if job.seed % 2 else None) for job in jobs]
    assert [[job.seed for job in chunk] for chunk in chunks(jobs, CPU)] == [[0, 2], [1, 3]]


def test_a_chunk_holds_no_more_features_than_are_kept_in_memory() -> None:
    large = SGD.model_copy(update={"batch_size": CHUNK_BYTES // (4 * 3 * WIDTH) // 5})  # three domains
    assert [len(chunk) for chunk in chunks([under(large, job_of(steps=5, seed=s)) for s in range(7)], CPU)] == [5, 2]
    larger = SGD.model_copy(update={"batch_size": CHUNK_BYTES})
    assert [len(chunk) for chunk in chunks([under(larger, job_of(steps=5, seed=s)) for s in range(2)], CPU)] == [1, 1]


def test_settings_that_differ_but_do_not_stack_are_refused() -> None:
    jobs = [job_of(XDomainMix, warmup_steps=3), job_of(XDomainMix, warmup_steps=4)]
    with pytest.raises(AssertionError, match="must be buffers"):
        stack([under(SGD, job) for job in jobs], torch.device("cpu"))
    jobs = [job_of(sharpness=SAM(adaptive=True)), job_of(sharpness=SAM())]
    with pytest.raises(AssertionError, match="sharpness"):
        stack([under(SGD, job) for job in jobs], torch.device("cpu"))


def test_settings_that_stack_may_differ() -> None:
    jobs = [job_of(XDomainMix, p_discard=p) for p in (0.0, 1.0)]
    bank, _ = trajectory(jobs, SGD, 1)
    assert bank.buffers["p_discard"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("method", [ERM, XDomainMix])
def test_same_jobs_same_bits(method: Callable[..., Algorithm]) -> None:
    jobs = [job_of(method, h, seed=3, steps=30) for h in range(3)]
    first, second = train(jobs), train(jobs)
    for a, b in zip(first, second, strict=True):
        one, other = a.selected["train_val"], b.selected["train_val"]
        assert one.step == other.step
        assert one.state.keys() == other.state.keys()
        assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)


def test_features_in_shards_train_alike() -> None:
    """What a bank reads is `features[rows]`, wherever the features are."""
    data = digits()
    shards = list(data.features[torch.arange(len(data.annotations.labels))].split(500))
    sharded = dataclasses.replace(data, features=type(data.features)(shards))
    a, b = (train([job_of(steps=10)], data=of)[0].selected["train_val"] for of in (data, sharded))
    assert torch.equal(a.state["head.weight"], b.state["head.weight"])
