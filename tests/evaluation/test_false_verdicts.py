"""The test of it all: plain ERM against plain ERM of other seeds gets a verdict in at most 5% of tables."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from xdm_ft.evaluation.predictions import HeldOutImages, Prediction
from xdm_ft.evaluation.records import Pick, Record
from xdm_ft.evaluation.summary import summarise
from xdm_ft.tensors import Score

TABLES = 200
METHODS = ["erm", *(f"method {m}" for m in range(13))]
ENCODERS = ("one", "the same", "again")
IMAGES = 120
SEEDS = 3


def table(
    number: int, domains: tuple[str, ...], groups: np.ndarray | None, encoders: tuple[str, ...] = ()
) -> list[str]:
    """The verdicts of one table whose methods are all the same, each with seeds of its own.

    With `encoders`, two methods under each of them: the verdicts with ERM and between encoders.

    A model is right on an image by the model's skill, the image's ease and a luck of both. Of grouped images, a model
    has a luck with each group too.
    """
    generator = np.random.default_rng([number, len(domains), groups is not None])
    members = np.arange(IMAGES) if groups is None else groups
    runs, predictions = [], []
    methods = [f"{method} @ {encoder}" for encoder in encoders for method in METHODS[:2]] or METHODS
    for domain in domains:
        ease = 1 + generator.normal(size=members.max() + 1)[members]
        for method in methods:
            for seed in range(SEEDS):
                luck = 0 if groups is None else 0.3 * generator.normal(size=members.max() + 1)[members]
                score = ease + 0.3 * generator.normal() + luck + 0.5 * generator.normal(size=IMAGES)
                predicted, labels = (score < 0).astype(np.int64), np.zeros(IMAGES, dtype=np.int64)
                accuracy = float((predicted == 0).mean())
                per_domain = {domain: {"accuracy": accuracy, "n": IMAGES}}
                score_of = Score(accuracy, 0.0, 0.0, None, None, 0.0, 0.0, IMAGES, {}, per_domain)
                picks = {"train_val": Pick(1, "", {"test": score_of})}
                runs.append(Record(method, (domain,), seed, 0, {}, "ok", selected=picks))
                images = HeldOutImages(np.arange(IMAGES), labels, labels, groups)
                predictions.append(Prediction(method, (domain,), seed, "train_val", images, predicted))
    references = {f"{METHODS[1]} @ {encoder}": f"erm @ {encoder}" for encoder in encoders}
    rows, pairs = summarise(
        runs,
        predictions,
        methods=methods,
        rules=["train_val"],
        metric="accuracy",
        protocol_line=lambda rule: rule,
        references=references or dict.fromkeys(METHODS[1:], METHODS[0]),
        encoders=encoders,
    )
    with_erm = [row.versus_erm["verdict"] for row in rows if row.versus_erm is not None]
    assert len(with_erm) == (len(encoders) or len(METHODS) - 1) and len(pairs) == 2 * len(encoders)
    return with_erm + [pair["verdict"] for pair in pairs]


@pytest.mark.parametrize("encoders", [(), pytest.param(ENCODERS, marks=pytest.mark.slow)], ids=["erm", "encoders"])
@pytest.mark.parametrize("domains", [("a",), pytest.param(("a", "b", "c", "d"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("grouped", [False, True])
def test_the_same_method_gets_a_verdict_in_at_most_5_percent_of_tables(
    domains: tuple[str, ...], grouped: bool, encoders: tuple[str, ...]
) -> None:
    sizes = [40, 25, 15, 10, 8, 7, 5, 4, 3, 3]  # about 5 effective groups, like the slides of a hospital
    groups = np.repeat(np.arange(len(sizes)), sizes) if grouped else None
    found = [table(number, domains, groups, encoders) for number in range(TABLES)]
    assert {words for of_table in found for words in of_table} & {"not distinguishable"}  # and not "no verdict"
    false = sum(any(words != "not distinguishable" for words in of_table) for of_table in found)
    assert false <= stats.binom.ppf(0.99, TABLES, 0.05), f"{false} of {TABLES} tables have a verdict"
