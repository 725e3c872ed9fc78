"""Evaluations of all heads of a bank at once against those of one head after the other."""

from __future__ import annotations

import pytest
import torch
from bank_problems import DOMAINS, digits, head_logits, job_of
from torch.overrides import TorchFunctionMode

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.protocol.samplers import PerDomainSampler
from xdm_ft.runtime.tensors import Criteria
from xdm_ft.training.bank import validation as validation_module
from xdm_ft.training.bank.data import batches
from xdm_ft.training.bank.step import Bank, stack
from xdm_ft.training.bank.validation import BankValidation
from xdm_ft.training.selection import rows_of_rules, rule_images, split_of

RULES = ("train_val", "oracle")
JOBS = [job_of(held_out=head % DOMAINS, seed=head // 5) for head in range(10)]


def trained() -> Bank:
    bank = stack(JOBS, torch.device("cpu"))
    with torch.no_grad():
        bank.main["head.weight"] += torch.randn(bank.main["head.weight"].shape, generator=torch.Generator())
        bank.main["head.weight"][3, 0, 0] = torch.inf
    return bank


@pytest.mark.parametrize("at_once", [None, 3], ids=["all heads", "three at a time"])
@pytest.mark.parametrize("metric", HIGHER_IS_BETTER)
def test_values_are_those_of_each_head_alone(metric: str, at_once: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    bank, data = trained(), digits()
    validation = BankValidation(JOBS, data, Criteria(RULES, metric))
    if at_once:
        monkeypatch.setattr(validation_module, "VALUES_AT_ONCE", at_once * len(validation.rows) * 10)
    found = validation.values(bank.template, bank.main)
    assert found[3] is None and sum(own is None for own in found) == 1
    for head, (job, own) in enumerate(zip(JOBS, found, strict=True)):
        for rule, rows in rows_of_rules(job, RULES).items():
            state = {name: values[head].detach() for name, values in bank.main.items()}
            images = rule_images(split_of(rule), rows, data.annotations, metric, 10)
            logits = head_logits(data.features, rows, state)
            if own is not None:
                assert own[rule] == pytest.approx(images.value(logits), abs=1e-5)


def test_heads_together_are_measured_bit_for_bit_as_alone() -> None:
    """Of the same logits: only the product before them may round differently with the number of heads."""
    generator = torch.Generator().manual_seed(0)
    job, data = JOBS[0], digits()
    rows = job.split.evaluation["train_val"]
    logits = 3 * torch.randn(len(rows), 7, 10, generator=generator)
    for metric in HIGHER_IS_BETTER:
        for split in (*RULES[:1], "test"):
            images = rule_images(split, rows, data.annotations, metric, 10)
            assert images.values(logits) == [images.value(logits[:, head]) for head in range(7)]


class Reads(TorchFunctionMode):
    """Lists the reads of tensors that wait for a GPU, with the tensors' numbers of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[tuple[str, int]]()

    def __torch_function__(self, function, types, given=(), named=None):  # type: ignore[no-untyped-def]
        name = getattr(function, "__name__", "")
        if name in {"cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__float__", "__int__"}:
            self.found.append((name, given[0].ndim))
        return function(*given, **(named or {}))


@pytest.mark.parametrize("metric", ["accuracy", "nll"])
def test_all_heads_are_read_from_the_device_once(metric: str) -> None:
    bank, validation = trained(), BankValidation(JOBS, digits(), Criteria(RULES, metric))
    with Reads() as reads:
        validation.values(bank.template, bank.main)
    # the counts of all images and heads; or the logits, from which the CPU computes the rest
    assert reads.found == [("tolist", 1)] if metric == "accuracy" else reads.found[0] == ("cpu", 3)


def test_rows_are_drawn_once_per_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials share them: 4 jobs of 2 seeds."""
    jobs = [job_of(held_out=0, seed=seed, split=JOBS[0].split, lr=lr) for lr in (0.1, 0.2) for seed in (0, 1)]
    drawn, indices = [], PerDomainSampler.indices
    monkeypatch.setattr(
        PerDomainSampler, "indices", lambda self, *steps: (drawn.append(self.seed), indices(self, *steps))[1]
    )
    first = next(iter(batches(jobs, digits())))
    assert drawn == [0, 1]
    assert torch.equal(first.index[0], first.index[2]) and torch.equal(first.index[1], first.index[3])
    assert not torch.equal(first.index[0], first.index[1])
