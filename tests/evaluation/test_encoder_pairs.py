"""Several encoders in one table: labels, pairs, and one family of verdicts with the differences to ERM."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from test_summary import grid, prediction, record, summary

from xdm_ft.evaluation.comparison import holm
from xdm_ft.evaluation.encoders import EncoderPair, encoder_pairs, split_label
from xdm_ft.evaluation.summary import Summary, summarise

ENCODERS = ("small", "large")


def test_a_label_is_split_at_its_encoder() -> None:
    assert split_label("erm @ small", ENCODERS) == ("erm", "small")
    assert split_label("erm", ENCODERS) == ("erm", None)
    assert split_label("erm @ small", ())[1] is None, "in a run of one encoder this is a label like others"
    assert split_label("a @ b @ large", ENCODERS) == ("a @ b", "large")
    assert split_label("erm @ x @ small", [*ENCODERS, "x @ small"]) == ("erm", "x @ small")


def test_pairs_are_of_one_method_in_the_order_of_the_recipe() -> None:
    labels = [f"{method} @ {one}" for one in ("a", "b", "c") for method in ("erm", "mix")] + ["zero_shot @ b"]
    found = encoder_pairs(labels, ["a", "b", "c"])
    assert [pair for pair in found if pair.method == "erm"] == [
        EncoderPair("erm", "a", "b"), EncoderPair("erm", "a", "c"), EncoderPair("erm", "b", "c")
    ]  # fmt: skip
    assert len(found) == 6 and found[0].rows == ("erm @ a", "erm @ b")
    assert encoder_pairs(["erm", "mix"], []) == []


def of_both(right: dict[str, int], seeds: int = 3, images: bool = True) -> Summary:
    """ERM and SAM under both encoders; `right`: by how many more images of 50 an encoder is right."""
    made = [(f"{m} @ {one}", held, seed, n + right[one]) for one in ENCODERS for m, held, seed, n in grid(seeds)]
    return summarise(
        [record(*one) for one in made],
        [prediction(*one) for one in made] if images else [],
        methods=list(dict.fromkeys(one[0] for one in made)),
        rules=["train_val"],
        metric="accuracy",
        protocol_line=str,
        references={f"sam @ {one}": f"erm @ {one}" for one in ENCODERS},
        encoders=ENCODERS,
    )


def test_the_difference_is_first_less_second() -> None:
    rows, pairs = of_both({"small": 0, "large": 5})
    assert [(pair["selection"], pair["method"], pair["first"], pair["second"]) for pair in pairs] == [
        ("train_val", "erm", "small", "large"), ("train_val", "sam", "small", "large")
    ]  # fmt: skip
    assert all(pair["difference"] == pytest.approx(-0.1) for pair in pairs)
    assert [row.versus_erm is None for row in rows] == [True, False, True, False]
    assert [row.versus_erm["reference"] for row in rows if row.versus_erm] == ["erm @ small", "erm @ large"]
    assert not [pair for pair in pairs if "reference" in pair]
    assert json.loads(json.dumps(pairs, allow_nan=False)) == pairs


def test_one_family_for_erm_and_encoders() -> None:
    """Holm's p of all four comparisons together, worked out from their own p."""
    rows, pairs = of_both({"small": 0, "large": 3})
    every: list[dict[str, Any]] = [row.versus_erm for row in rows if row.versus_erm] + pairs
    assert len(every) == 4
    assert [one["p_holm"] for one in every] == pytest.approx(holm([one["p"] for one in every]))
    alone = summary([record(*one) for one in grid()], [prediction(*one) for one in grid()])[1]["versus_erm"]
    assert every[0]["p"] == pytest.approx(alone["p"]), "the other comparisons change Holm's p alone"
    assert every[0]["p_holm"] > alone["p_holm"]


def test_equal_results_are_not_distinguishable_and_few_seeds_give_no_verdict() -> None:
    _, pairs = of_both({"small": 0, "large": 0})
    assert [(pair["difference"], pair["p"], pair["verdict"]) for pair in pairs] == [(0, 1, "not distinguishable")] * 2
    for seeds, images, why in ((2, True, "2 are complete"), (1, True, "1 is complete"), (3, False, "predictions")):
        _, pairs = of_both({"small": 0, "large": 9}, seeds, images)  # one seed: as of a solver
        assert [(pair["p_holm"], pair["verdict"]) for pair in pairs] == [(None, "no verdict")] * 2
        assert all(why in pair["note"] for pair in pairs)


def test_a_large_difference_is_found() -> None:
    generator = np.random.default_rng(0)
    records, predictions = [], []
    for domain in "abcd":
        for one, skill in zip(ENCODERS, (0.0, 1.0), strict=True):
            for seed in range(3):
                right = int((generator.normal(size=50) + skill > 0).sum())
                made = (f"erm @ {one}", (domain,), seed, right)
                records.append(record(*made))
                predictions.append(prediction(*made))
    _, [pair] = summarise(
        records, predictions, methods=["erm @ small", "erm @ large"], rules=["train_val"], metric="accuracy",
        protocol_line=str, references={}, encoders=ENCODERS,
    )  # fmt: skip
    assert pair["verdict"] == "worse" and pair["p_holm"] == pair["p"] < 0.05 and pair["difference"] < -0.2
