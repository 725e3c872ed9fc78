"""Whether a model's probabilities fit, per domain, before and after its temperature."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor

from xdm_ft.analysis import Encoded
from xdm_ft.evaluation.metrics import confidences, expected_calibration_error, per_image_nll, reliability, temperature
from xdm_ft.storage import Json


def calibration(
    logits_of: Callable[[Tensor], Tensor],
    validation: Encoded,
    test: Encoded,
    train_domains: Sequence[str],
    domain_names: Sequence[str],
    fitted: float | None,
) -> Json:
    """Returns ECE, NLL and reliability of the validation images of each training domain, and of the test images.

    `fitted` is the temperature in results.json; None: there is none, so it is fitted on the validation images here. A
    domain that both trains and tests appears twice, with its validation images under "NAME (validation)".
    """
    logits = logits_of(validation.z)
    value = temperature(logits, validation.y) if fitted is None else fitted
    of_test = {domain_names[number]: part for number, part in _by_domain(test, logits_of(test.z))}
    domains = dict[str, Json]()
    for number, part in _by_domain(validation, logits):
        name = train_domains[number]
        domains[f"{name} (validation)" if name in of_test else name] = _measure("validation", *part, value)
    domains |= {name: _measure("test", *part, value) for name, part in of_test.items()}
    return {"temperature": value, "domains": domains}


def _by_domain(images: Encoded, logits: Tensor) -> Iterator[tuple[int, tuple[Tensor, np.ndarray]]]:
    for number in images.domain.unique().tolist():
        of_domain = images.domain == number
        yield number, (logits[of_domain], images.y[of_domain].numpy())


def _measure(role: str, logits: Tensor, labels: np.ndarray, value: float | None) -> Json:
    plain = _fit(logits, labels)
    scaled = dict.fromkeys(plain) if value is None else _fit(logits / value, labels)
    after = {f"{name}_scaled": scaled[name] for name in plain}
    return {"role": role, "n": len(labels), **plain, **after}


def _fit(logits: Tensor, labels: np.ndarray) -> Json:
    y = logits.new_tensor(labels).long()
    bins = reliability(logits, labels)
    return {
        "ece": expected_calibration_error(confidences(logits), (logits.argmax(1) == y).numpy()),
        "nll": float(per_image_nll(logits, y).mean()),
        "reliability": [{"confidence": bin_.confidence, "accuracy": bin_.accuracy, "n": bin_.images} for bin_ in bins],
    }
