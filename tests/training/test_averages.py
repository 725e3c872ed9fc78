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
from torch import Tensor

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
PATIENT = Training(batch_size=8, evaluate_every=2, patience=1)
FAST = Training(batch_size=8, evaluate_every=5, optimizer="sgd", momentum=0.0)


@pytest.mark.parametrize("kind", ["settings", "patience"])
def test_heads_of_a_bank_average_as_alone(kind: str) -> None:
    """With settings of their own, as a search draws them, and until their own patience ends."""
    averaged, training = [(job_of(seed=1, steps=40, lr=0.5), own) for own in SETTINGS], FAST
    if kind == "patience":
        averaged, training = [(job_of(steps=20, lr=lr), ANY_VALLEY) for lr in (1e-6, 3e-3)], PATIENT
    jobs = [dataclasses.replace(job, averaging=averaging) for job, averaging in averaged]
    assert len(chunks(jobs, torch.device("cpu"))) == 1
    windows, together = set(), bank_problems.train(jobs, training)
    for job, among in zip(jobs, together, strict=True):
        [alone] = bank_problems.train([job], training)
        one, other = alone.selected["train_val"], among.selected["train_val"]
        assert alone.stopped_at == among.stopped_at and (one.step, one.hparams) == (other.step, other.hparams)
        torch.testing.assert_close(one.state, other.state, rtol=1e-3, atol=1e-3)
        windows.add((other.hparams["averaged_from"], other.step))
    if kind == "settings":
        assert len(windows) >= 3
    else:
        first, second = (trained.selected["train_val"].step for trained in together)
        assert first == together[0].stopped_at and first < second


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


def test_averaged_weights_get_their_own_batch_norm_statistics(accelerator: Accelerator) -> None:
    training, job = (
        Training(batch_size=4, encoder_lr=0.01),
        dataclasses.replace(make_job(steps=3), averaging=ANY_VALLEY),
    )
    state = loop_models.final_state(loop_models.train(job, SmallCNN(), training, accelerator))
    encoder = SmallCNN()
    encoder.load_state_dict({k.removeprefix("encoder."): v for k, v in state.items() if "encoder." in k})
    seen = [encoder.layers[0](batch_of(job, training, step).x) for step in range(3)]
    norm, means, variances = encoder.layers[1], [x.mean((0, 2, 3)) for x in seen], [x.var((0, 2, 3)) for x in seen]
    torch.testing.assert_close(norm.running_mean, torch.stack(means).mean(0), rtol=0, atol=1e-5)
    torch.testing.assert_close(norm.running_var, torch.stack(variances).mean(0), rtol=0, atol=1e-5)
