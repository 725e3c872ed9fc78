from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER, accuracy, auroc, auroc_contributions, metric, score


def sample(seed: int, n: int = 200, num_classes: int = 4, num_domains: int = 3, missing: tuple[int, ...] = ()):
    generator = torch.Generator().manual_seed(seed)
    present = torch.tensor([c for c in range(num_classes) if c not in missing])
    labels = present[torch.randint(len(present), (n,), generator=generator)]
    logits = torch.randn(n, num_classes, generator=generator) * 2
    logits[torch.arange(n), labels] += 1.5
    domains = torch.randint(num_domains, (n,), generator=generator)
    return logits, labels, domains


def full_score(logits, labels, domains, num_domains: int = 3):
    class_names = [f"class {c}" for c in range(logits.shape[1])]
    return score(logits, labels, domains, class_names, [f"domain {d}" for d in range(num_domains)])


def test_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 3.0]])
    labels, domains = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 2, 2])
    result = full_score(logits, labels, domains)
    assert result.n == 4
    assert result.accuracy == 0.75
    assert result.balanced_accuracy == pytest.approx((2 / 3 + 1) / 2)
    assert result.macro_f1 == pytest.approx((2 * 2 / (3 + 2) + 2 * 1 / (1 + 2)) / 2)
    assert result.worst_domain_accuracy == 0.5
    assert result.per_class_recall == {"class 0": pytest.approx(2 / 3), "class 1": 1.0}
    assert result.per_domain == {"domain 0": {"accuracy": 0.5, "n": 2}, "domain 2": {"accuracy": 1.0, "n": 2}}
    assert result.auroc == 1.0
    softplus = [math.log1p(math.exp(-2)), math.log1p(math.exp(1)), math.log1p(math.exp(-1)), math.log1p(math.exp(-3))]
    assert result.nll == pytest.approx(sum(softplus) / 4)
    confidence = [1 / (1 + math.exp(-m)) for m in (2, 1, 1, 3)]  # bins 13 (0.881), 10 (0.731 twice) and 14 (0.953)
    gaps = abs(1 - confidence[0]) + abs(1 - confidence[1] - confidence[2]) + abs(1 - confidence[3])
    assert result.ece == pytest.approx(gaps / 4)


@pytest.mark.parametrize("missing", [(), (1,), (0, 3)])
@pytest.mark.parametrize("num_classes", [2, 4, 7])
def test_against_scikit_learn(num_classes: int, missing: tuple[int, ...]) -> None:
    from sklearn.metrics import f1_score, log_loss, recall_score, roc_auc_score

    missing = tuple(c for c in missing if c < num_classes and num_classes > 2)
    logits, labels, domains = sample(num_classes, num_classes=num_classes, missing=missing)
    logits[:20] = logits[20:40]  # ties
    result = full_score(logits, labels, domains)
    truth, predicted = labels.numpy(), logits.argmax(1).numpy()
    probability = logits.double().softmax(1).numpy()
    present = np.unique(truth)
    assert result.accuracy == pytest.approx((truth == predicted).mean())
    recall = recall_score(truth, predicted, labels=present, average=None)
    assert result.balanced_accuracy == pytest.approx(recall.mean())
    assert result.per_class_recall == {
        f"class {c}": pytest.approx(recall[list(present).index(c)]) if c in present else None
        for c in range(num_classes)
    }
    assert result.macro_f1 == pytest.approx(f1_score(truth, predicted, labels=present, average="macro"))
    assert result.nll == pytest.approx(log_loss(truth, probability, labels=range(num_classes)))
    expected = np.mean([roc_auc_score(truth == c, probability[:, c]) for c in present])
    assert result.auroc == pytest.approx(expected, abs=1e-9)
    bins = np.ceil(probability.max(1) * 15)
    gaps = [((predicted == truth)[bins == b].mean() - probability.max(1)[bins == b].mean()) for b in np.unique(bins)]
    assert result.ece == pytest.approx(np.average(np.abs(gaps), weights=np.unique(bins, return_counts=True)[1]))
    for name in HIGHER_IS_BETTER:
        assert metric(name, logits, labels, domains) == getattr(result, name)


def test_certain_predictions() -> None:
    logits = torch.tensor([[1000.0, 0.0], [3.4, 0.0]])  # confidences 1 and 0.968: one bin, whose gaps cancel in part
    ece = metric("ece", logits, torch.tensor([1, 0]), torch.zeros(2, dtype=torch.int64))
    assert ece == pytest.approx(abs(0 - 1 + 1 - 1 / (1 + math.exp(-3.4))) / 2)
    saturated = torch.tensor([[0.0, 60.0], [0.0, 50.0]])  # both probabilities are 1 in float64
    assert auroc(saturated, torch.tensor([1, 0])) == 1.0


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("scale", [1, 40, 300])  # margins of some, of a hundred and of a thousand
def test_auroc_by_exact_odds(scale: int, num_classes: int) -> None:
    logits, labels, _ = sample(num_classes, n=30, num_classes=num_classes)
    logits *= scale
    logits[:5] = logits[5:10]  # ties
    assert (np.ptp(logits.numpy(), axis=1) > 900).any() == (scale == 300)
    areas = []
    with localcontext(prec=500, Emin=-9999, Emax=9999):
        exponentials = [[Decimal(value).exp() for value in row] for row in logits.tolist()]
        for c in range(num_classes):
            odds = [row[c] / sum(row[:c] + row[c + 1 :]) for row in exponentials]
            positives = [o for o, y in zip(odds, labels.tolist(), strict=True) if y == c]
            negatives = [o for o, y in zip(odds, labels.tolist(), strict=True) if y != c]
            won = sum((p > n) + (p == n) / 2 for p in positives for n in negatives)
            areas.append(won / len(positives) / len(negatives))
    assert auroc(logits, labels) == pytest.approx(np.mean(areas), abs=1e-12)
    assert auroc_contributions(logits, labels).mean() == pytest.approx(np.mean(areas), abs=1e-12)
    assert auroc(logits.double() + 1000, labels) == pytest.approx(np.mean(areas), abs=1e-12), "a constant of all"


def test_one_class_only() -> None:
    logits, _, domains = sample(0, n=10)
    result = full_score(logits, torch.full((10,), 2), domains)
    assert result.auroc is None
    assert math.isnan(metric("auroc", logits, torch.full((10,), 2), domains))
    assert result.balanced_accuracy is None, "the recall of one class is an accuracy"
    assert math.isnan(metric("balanced_accuracy", logits, torch.full((10,), 2), domains))
    assert [name for name, recall in result.per_class_recall.items() if recall is not None] == ["class 2"]


def test_accuracy_of_a_bank_is_that_of_each_head() -> None:
    heads = [sample(seed) for seed in range(5)]
    logits, labels = torch.stack([h[0] for h in heads]), torch.stack([h[1] for h in heads])
    assert accuracy(logits, labels).tolist() == [metric("accuracy", *head) for head in heads]
    assert accuracy(logits, labels[0]).tolist() == [metric("accuracy", h[0], labels[0], h[2]) for h in heads]


def test_what_can_not_be_scored() -> None:
    logits, labels, domains = sample(3, n=5)
    with pytest.raises(ValueError, match="without images"):
        full_score(logits[:0], labels[:0], domains[:0])
    logits[2, 1] = float("nan")
    with pytest.raises(FloatingPointError, match="1 of 5 images"):
        full_score(logits, labels, domains)
