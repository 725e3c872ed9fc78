"""Temperature scaling: against a plain minimisation, and what must hold for any logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor

from xdm_ft.evaluation import metrics
from xdm_ft.evaluation.metrics import (
    HIGHEST,
    LOWEST,
    expected_calibration_error,
    per_image_nll,
    reliability,
    temperature,
    validation_nll,
)


def drawn(n: int, classes: int, true_temperature: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits [n,C] and labels [n] drawn from the probabilities at the true temperature."""
    source = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, classes, generator=source)
    return logits, torch.multinomial((logits / true_temperature).softmax(1), 1, generator=source)[:, 0]


def nll(logits: Tensor, labels: Tensor, at: float) -> float:
    return float(per_image_nll(logits.double() / at, labels).mean())


@pytest.mark.parametrize(("classes", "true"), [(2, 3.0), (7, 0.5)])
def test_it_is_the_minimum_that_a_plain_search_finds(classes: int, true: float) -> None:
    logits, labels = drawn(300, classes, true)
    plain = minimize_scalar(lambda t: nll(logits, labels, t), bounds=(0.02, 50), method="bounded")
    assert temperature(logits, labels) == pytest.approx(plain.x, rel=1e-3)


@pytest.mark.parametrize(("classes", "true"), [(2, 0.3), (7, 4.0)])
def test_a_known_temperature_is_recovered_and_calibrates(classes: int, true: float) -> None:
    logits, labels = drawn(8000, classes, true)
    t = temperature(logits, labels)
    assert t is not None and t == pytest.approx(true, rel=0.06)
    right = (logits.argmax(1) == labels).numpy()
    confidence = (logits / t).softmax(1).amax(1).double().numpy()
    assert expected_calibration_error(confidence, right) < 0.03
    bins = reliability(logits / t, labels.numpy())
    assert [b.images for b in bins] == [((confidence > b.low) & (confidence <= b.high)).sum() for b in bins]
    for b in bins:
        inside = (confidence > b.low) & (confidence <= b.high)
        expected = (confidence[inside].mean(), right[inside].mean()) if inside.any() else (None, None)
        assert (b.confidence, b.accuracy) == pytest.approx(expected, abs=1e-6)


@settings(max_examples=25)
@given(
    st.integers(2, 6).flatmap(
        lambda classes: st.lists(
            st.tuples(st.lists(st.floats(-60, 60, width=16), min_size=classes, max_size=classes), st.integers(0, 1)),
            min_size=1,
            max_size=12,
        )
    )
)
def test_it_never_raises_the_loss_and_changes_no_prediction(images: list[tuple[list[float], int]]) -> None:
    logits, labels = torch.tensor([one for one, _ in images]), torch.tensor([label for _, label in images])
    found = temperature(logits, labels)
    if found is None:
        assert (logits == logits[:, :1]).all() or nll_at_a_bound(logits, labels) <= least_nll(logits, labels) + 1e-12
        return
    assert LOWEST <= found <= HIGHEST
    assert nll(logits, labels, found) <= nll(logits, labels, 1.0) * (1 + 1e-9) + 1e-12
    assert torch.equal((logits.double() / found).argmax(1), logits.argmax(1))
    if LOWEST < 2 * found < HIGHEST:
        assert temperature(logits * 2, labels) == pytest.approx(2 * found)


def nll_at_a_bound(logits: Tensor, labels: Tensor) -> float:
    return min(nll(logits, labels, LOWEST), nll(logits, labels, HIGHEST))


def least_nll(logits: Tensor, labels: Tensor) -> float:
    """The smallest loss on a grid between the bounds, which may be flat to rounding over a stretch of T."""
    return min(nll(logits, labels, float(t)) for t in np.geomspace(LOWEST, HIGHEST, 100))


def test_logits_without_a_minimum_inside_get_none() -> None:
    labels = torch.arange(49) % 7
    perfect, same = 10 * torch.eye(7)[labels], torch.full((49,), 3)
    extreme = torch.tensor([[1e30, 0.0], [0.0, 1e30], [1e30, 0.0]])
    for logits, given_labels in (
        (perfect, labels), (-perfect, labels), (perfect[:1], labels[:1]), (perfect[:0], labels[:0]),
        (perfect, same), (perfect[same], same), (torch.randn(49, 1).expand(49, 7), labels),
        (extreme, torch.tensor([0, 1, 1])),
    ):  # fmt: skip
        assert temperature(logits, given_labels) is None


def test_classes_that_no_image_has_and_logits_that_look_like_probabilities() -> None:
    logits, labels = drawn(4000, 7, 2.0)
    two = (labels == 2) | (labels == 5)
    likely = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]), torch.tensor([0, 1, 1])
    for x, y in ((logits[two], labels[two]), likely):
        plain = minimize_scalar(lambda t, x=x, y=y: nll(x, y, t), bounds=(0.02, 50), method="bounded")
        assert temperature(x, y) == pytest.approx(plain.x, rel=1e-3)


def test_many_images_are_sampled_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = drawn(6000, 5, 2.0)
    whole = temperature(logits, labels)
    monkeypatch.setattr(metrics, "MAX_LOGITS", 5 * 3000)
    sampled = temperature(logits, labels)
    assert whole != sampled == pytest.approx(whole, rel=0.06) and sampled == temperature(logits, labels)
    assert temperature(logits[:3000], labels[:3000]) == pytest.approx(whole, rel=0.06), "as many as allowed: all"


def test_the_validation_nll_is_that_of_the_divided_logits_on_the_same_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = drawn(200, 3, 2.0)
    t = temperature(logits, labels)
    assert t is not None
    at = {divisor: nll(logits, labels, divisor) for divisor in (t, 1.0)}
    assert validation_nll(logits, labels, t) == pytest.approx(at[t]) and at[t] < at[1.0]
    assert validation_nll(logits, labels, None) == pytest.approx(at[1.0])
    by_hand = -torch.tensor([[2.0, 0.0], [0.0, 4.0]]).div(2).softmax(1)[[0, 1], [0, 0]].log().mean()
    assert validation_nll(torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.tensor([0, 0]), 2.0) == pytest.approx(by_hand)
    monkeypatch.setattr(metrics, "MAX_LOGITS", 60)
    assert validation_nll(logits, labels, 1.0) != pytest.approx(at[1.0])
    assert validation_nll(logits, labels, 1.0) == validation_nll(logits, labels, None)
