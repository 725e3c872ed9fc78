"""SWAD and BMA in the head bank and in the loop: the mean of the very weights that plain training walks through."""

from __future__ import annotations

import copy
import dataclasses

import bank_problems
import loop_models
import pytest
import torch
from accelerate import Accelerator
from bank_problems import digits, head_logits, job_of, under
from loop_models import SmallCNN, batch_of, make_job
from scipy.stats import beta as beta_distribution
from torch import Tensor

from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.averaging import Segment
from xdm_ft.averaging.bma import BMA
from xdm_ft.averaging.swad import SWAD
from xdm_ft.evaluation.metrics import metric
from xdm_ft.training import Job, Training
from xdm_ft.training.bank.data import batches
from xdm_ft.training.bank.step import Bank, step
from xdm_ft.training.bank.train import chunks
from xdm_ft.training.selection import LOSS_SPLIT, Averages

ANY_VALLEY = SWAD(n_converge=1, tolerance_ratio=100.0)  # averages everything


def path(jobs: list[Job], training: Training) -> list[list[dict[str, Tensor]]]:
    """For each head of a bank its state after every step."""
    jobs = [under(training, job) for job in jobs]
    bank, states = Bank(jobs, torch.device("cpu")), []
    for number, batch in enumerate(batches(jobs, digits())):
        step(bank, batch, number)
        states.append([bank.state(head) for head in range(len(jobs))])
    return [list(of_head) for of_head in zip(*states, strict=True)]


def test_heads_of_a_bank_average_their_own_valleys() -> None:
    training = Training(batch_size=8, evaluate_every=5, optimizer="sgd", momentum=0.0)
    plain = [job_of(seed=seed, steps=40, lr=lr) for seed, lr in ((1, 0.003), (1, 1.0), (1, 3.0))]
    averaged = [
        dataclasses.replace(job, averaging=SWAD(n_converge=2, n_tolerance=2, tolerance_ratio=0.0)) for job in plain
    ]
    windows = set()
    together = bank_problems.train(averaged, training, ("train_val", "oracle"))
    for job, trained, states in zip(plain, together, path(plain, training), strict=True):
        rows = job.split.evaluation[LOSS_SPLIT]
        labels, domains = digits().annotations.labels[rows], digits().annotations.domains[rows]
        reference = SWAD(n_converge=2, n_tolerance=2, tolerance_ratio=0.0).begin()
        for first in range(0, 40, 5):
            names = states[0].keys() - {"seed"}
            mean = {name: torch.stack([s[name] for s in states[first : first + 5]]).mean(0) for name in names}
            logits = head_logits(digits().features, rows, states[first + 4])
            losses = [
                metric("nll", logits[own], labels[own], domains[own]) for own in (domains == d for d in (1, 2, 3))
            ]
            reference.add(Segment(first + 1, first + 5, mean, 5), sum(losses) / 3)
        expected = reference.result()
        selected = trained.selected["oracle"]
        assert selected is trained.selected["train_val"]
        assert (selected.hparams["averaged_from"], selected.step) == (expected.first, expected.last)
        for name, value in expected.mean.items():
            torch.testing.assert_close(selected.state[name], value, rtol=1e-5, atol=1e-5)
        windows.add((expected.first, expected.last))
    assert windows == {(36, 40), (16, 40), (16, 20)}


SETTINGS = [
    SWAD(n_converge=1, n_tolerance=1, tolerance_ratio=0.0),
    SWAD(n_converge=2, n_tolerance=2, tolerance_ratio=0.0),
    SWAD(n_converge=3, n_tolerance=1, tolerance_ratio=0.1),
    ANY_VALLEY,
]


def test_heads_of_a_bank_have_their_own_settings() -> None:
    """Otherwise all would have the first one's: as a search of `swad.n_converge` draws them."""
    training = Training(batch_size=8, evaluate_every=5, optimizer="sgd", momentum=0.0)
    jobs = [dataclasses.replace(job_of(seed=1, steps=40, lr=0.5), averaging=own) for own in SETTINGS]
    assert len(chunks(jobs, torch.device("cpu"))) == 1
    together, windows = bank_problems.train(jobs, training), set()
    for job, among in zip(jobs, together, strict=True):
        [alone] = bank_problems.train([job], training)
        one, other = alone.selected["train_val"], among.selected["train_val"]
        assert (one.step, one.hparams) == (other.step, other.hparams)
        torch.testing.assert_close(one.state, other.state, rtol=1e-3, atol=1e-3)
        windows.add((other.hparams["averaged_from"], other.step))
    assert len(windows) >= 3


def test_the_average_of_a_head_ends_with_its_patience() -> None:
    """While the others of its chunk train on."""
    training = Training(batch_size=8, evaluate_every=2, patience=1)
    jobs = [dataclasses.replace(job_of(steps=20, lr=lr), averaging=ANY_VALLEY) for lr in (1e-6, 3e-3)]
    together = bank_problems.train(jobs, training)
    for job, among in zip(jobs, together, strict=True):
        [alone] = bank_problems.train([job], training)
        one, other = alone.selected["train_val"], among.selected["train_val"]
        assert alone.stopped_at == among.stopped_at and (one.step, one.hparams) == (other.step, other.hparams)
        torch.testing.assert_close(one.state, other.state, rtol=1e-3, atol=1e-3)
    first, second = (trained.selected["train_val"].step for trained in together)
    assert first == together[0].stopped_at and first < second


def test_the_warm_up_of_xdomainmix_is_not_averaged() -> None:
    job = dataclasses.replace(job_of(XDomainMix, steps=40, warmup_steps=23), averaging=ANY_VALLEY)
    training = Training(batch_size=8, evaluate_every=10)
    [trained] = bank_problems.train([job], training)
    selected = trained.selected["train_val"]
    assert selected.hparams["averaged_from"] == 24 and selected.step == 40
    states = path([dataclasses.replace(job, averaging=None)], training)[0][23:]
    for name in ("head.weight", "domain_head.weight"):
        mean = torch.stack([state[name] for state in states]).mean(0)
        torch.testing.assert_close(selected.state[name], mean, rtol=1e-5, atol=1e-6)


def beta_mean(states: list[dict[str, Tensor]], name: str, beta: float) -> Tensor:
    """The mean of the weights after 0, 1, …, T steps, weighted by scipy's density."""
    places = [(step + 0.5) / len(states) for step in range(len(states))]
    factors = [float(beta_distribution.pdf(place, beta, beta)) for place in places]
    total: Tensor = sum(factor * state[name] for factor, state in zip(factors, states, strict=True)) / sum(factors)
    return total


def test_heads_of_a_bank_average_their_whole_training_by_their_own_beta() -> None:
    """From the initial weights on, through the warm-up of XDomainMix, whatever the evaluations and without a loss."""
    training = Training(batch_size=8, evaluate_every=7)
    plain = [job_of(XDomainMix, seed=seed, steps=20, lr=0.05, warmup_steps=9) for seed in (1, 1, 2)]
    betas = (0.5, 5.0, 0.5)
    jobs = [dataclasses.replace(job, averaging=BMA(beta=beta)) for job, beta in zip(plain, betas, strict=True)]
    assert len(chunks(jobs, torch.device("cpu"))) == 1
    together = bank_problems.train(jobs, training, ("train_val", "oracle"))
    for job, trained, states, beta in zip(plain, together, path(plain, training), betas, strict=True):
        selected, start = trained.selected["oracle"], job.make(job.setup).state_dict()
        assert selected is trained.selected["train_val"]
        assert (selected.hparams, selected.step) == ({"averaged_from": 0}, 20)
        for name in ("head.weight", "head.bias", "domain_head.weight"):
            expected = beta_mean([start, *states], name, beta)
            torch.testing.assert_close(selected.state[name], expected, rtol=1e-4, atol=1e-5)
    first, second = (trained.selected["oracle"].state["head.weight"] for trained in together[:2])
    assert not torch.allclose(first, second, atol=1e-3)


def test_a_training_that_stopped_before_its_first_step_counts_its_start_once() -> None:
    start, later = {"w": torch.zeros(1, 2)}, {"w": torch.ones(1, 2)}
    once, twice = (Averages([BMA(beta=0.5)], 1, 1) for _ in range(2))
    once.add(0, start)
    twice.load_state(copy.deepcopy(once.state()), torch.device("cpu"))
    twice.add(0, start)  # the resumed training
    for averages in (once, twice):
        averages.add(1, later)
        averages.evaluated(1, [0.0])
    first, second = (one.selected(0) for one in (once, twice))
    assert torch.equal(first.state["w"], second.state["w"]) and first.hparams == second.hparams == {"averaged_from": 0}
    torch.testing.assert_close(first.state["w"], torch.full((2,), 0.5))


def walked(job: Job, training: Training, accelerator: Accelerator, batch_norm: str) -> list[dict[str, Tensor]]:
    """The loop's weights after each number of steps: as many trainings, of which the learning rate knows nothing."""
    trainings = [dataclasses.replace(job.setup, steps=steps) for steps in range(1, job.setup.steps + 1)]
    return [
        loop_models.final_state(
            loop_models.train(
                dataclasses.replace(job, setup=setup), SmallCNN(), training, accelerator, batch_norm=batch_norm
            )
        )
        for setup in trainings
    ]


@pytest.mark.parametrize("batch_norm", ["train", pytest.param("frozen", marks=pytest.mark.slow)])
def test_the_loop_averages_encoder_and_head(accelerator: Accelerator, batch_norm: str) -> None:
    training, job = Training(batch_size=4, encoder_lr=0.01), make_job(steps=3)
    trained = loop_models.train(
        dataclasses.replace(job, averaging=ANY_VALLEY), SmallCNN(), training, accelerator, batch_norm=batch_norm
    )
    selected = trained.selected["train_val"]
    assert selected.step == 3 and selected.hparams == {"averaged_from": 1}
    states = walked(job, training, accelerator, batch_norm)
    assert not torch.equal(states[0]["encoder.layers.0.weight"], states[2]["encoder.layers.0.weight"])
    parameters = [f"encoder.{name}" for name, _ in SmallCNN().layers.named_parameters(prefix="layers")]
    for name in [*parameters, "head.weight", "head.bias"]:
        mean = torch.stack([state[name] for state in states]).mean(0)
        torch.testing.assert_close(selected.state[name], mean, rtol=0, atol=1e-6)

    encoder = SmallCNN()
    encoder.load_state_dict({k.removeprefix("encoder."): v for k, v in selected.state.items() if "encoder." in k})
    if batch_norm == "frozen":
        assert torch.equal(encoder.layers[1].running_mean, SmallCNN().layers[1].running_mean)
        return
    batches_seen = [batch_of(job, training, number).x for number in range(3)]
    first = [encoder.layers[0](x) for x in batches_seen]
    torch.testing.assert_close(
        encoder.layers[1].running_mean, torch.stack([x.mean((0, 2, 3)) for x in first]).mean(0), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        encoder.layers[1].running_var, torch.stack([x.var((0, 2, 3)) for x in first]).mean(0), rtol=0, atol=1e-5
    )
