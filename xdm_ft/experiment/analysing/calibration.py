"""Whether a model's probabilities fit, per domain, before and after its temperature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from xdm_ft.evaluation.calibration import reliability, temperature
from xdm_ft.evaluation.metrics import confidences, expected_calibration_error, per_image_nll
from xdm_ft.experiment.analysing.model import TrainedModel
from xdm_ft.experiment.analysing.seen import Encoded, Seen

Json = dict[str, Any]


def calibration(model: TrainedModel, seen: Seen, domain_names: Sequence[str], of_run: float | None) -> Json:
    """Returns ECE, NLL and reliability of the validation images of each training domain, and of the test images.

    `of_run` is the temperature in results.json; None: it is fitted on the validation images here, as runs of earlier
    versions have none. Validation images that also trained the model do not count. A domain that both trains and tests
    appears twice, with its validation images under "NAME (validation)".
    """
    held, test = seen.validation, seen.test
    if not seen.images.own_validation:
        held = Encoded(*(field[:0] for field in held))
    logits = model.logits(held.z)
    value = temperature(logits, held.y) if of_run is None else of_run
    names, found = seen.images.train_domains, dict[str, Json]()
    of_test = dict(_by_domain(test, model.logits(test.z)))
    tested = {domain_names[number] for number in of_test}
    for number, part in _by_domain(held, logits):
        name = f"{names[number]} (validation)" if names[number] in tested else names[number]
        found[name] = _fit("validation", *part, value)
    for number, part in of_test.items():
        found[domain_names[number]] = _fit("test", *part, value)
    return {"temperature": value, "domains": found}


def _by_domain(images: Encoded, logits: Tensor) -> Iterator[tuple[int, tuple[Tensor, np.ndarray]]]:
    for number in images.domain.unique().tolist():
        own = images.domain == number
        yield number, (logits[own], images.y[own].numpy())


def _fit(role: str, logits: Tensor, labels: np.ndarray, value: float | None) -> Json:
    plain, scaled = _measured(logits, labels), None if value is None else _measured(logits / value, labels)
    names = ("ece", "nll", "reliability")
    after = {f"{name}_scaled": None if scaled is None else scaled[name] for name in names}
    return {"role": role, "n": len(labels), **plain, **after}


def _measured(logits: Tensor, labels: np.ndarray) -> Json:
    y = logits.new_tensor(labels).long()
    right = (logits.argmax(1) == y).numpy()
    bins = reliability(logits, labels)
    return {
        "ece": expected_calibration_error(confidences(logits), right),
        "nll": float(per_image_nll(logits, y).mean()),
        "reliability": [{"confidence": one.confidence, "accuracy": one.accuracy, "n": one.images} for one in bins],
    }
