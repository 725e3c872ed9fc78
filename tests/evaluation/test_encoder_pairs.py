"""Several encoders in one table: labels, pairs, and one family of verdicts with the differences to ERM."""

from __future__ import annotations

from typing import Any

import pytest
from test_summary import found, grid, prediction, record

from xdm_ft.evaluation.records import split_label
from xdm_ft.evaluation.summary import Summary, encoder_pairs
from xdm_ft.evaluation.verdicts import holm

ENCODERS = ("small", "large")


def test_a_label_is_split_at_its_encoder() -> None:
    assert split_label("erm @ small", ENCODERS) == ("erm", "small")
    assert split_label("erm", ENCODERS) == ("erm", None)
    assert split_label("erm @ small", ())[1] is None, "in a run of one encoder this is a label like others"
    assert split_label("a @ b @ large", ENCODERS) == ("a @ b", "large")
    assert split_label("erm @ x @ small", [*ENCODERS, "x @ small"]) == ("erm", "x @ small")


def test_pairs_are_of_one_method_in_the_order_of_the_recipe() -> None:
    labels = [f"{method} @ {one}" for one in ("a", "b", "c") for method in ("erm", "mix")] + ["zero_shot @ b"]
    pairs = encoder_pairs(labels, ["a", "b", "c"])
    assert pairs == [
        (f"{m} @ {first}", f"{m} @ {second}") for m in ("erm", "mix") for first, second in ("ab", "ac", "bc")
    ]
    assert encoder_pairs(["erm", "mix"], []) == []


def of_both(right: dict[str, int], seeds: int = 3, images: bool = True, **changes: Any) -> Summary:
    """ERM and SAM under both encoders; `right`: by how many more images of 50 an encoder is right."""
    made = [(f"{m} @ {one}", held, seed, n + right[one]) for one in ENCODERS for m, held, seed, n in grid(seeds)]
    return found(
        [record(*one) for one in made],
        [prediction(*one) for one in made] if images else [],
        methods=list(dict.fromkeys(one[0] for one in made)),
        references={f"sam @ {one}": f"erm @ {one}" for one in ENCODERS},
        encoders=ENCODERS,
        **changes,
    )


PAIRS = [(f"{method} @ small", f"{method} @ large") for method in ("erm", "sam")]


def test_the_difference_is_first_less_second() -> None:
    made = of_both({"small": 0, "large": 5})
    *_, erm, sam = made.comparisons
    assert [(row.first, row.second) for row in (erm, sam)] == PAIRS
    assert [row.difference for row in (erm, sam)] == pytest.approx([-0.1, -0.1])
    assert [row.versus_erm is None for row in made.rows] == [True, False, True, False]
    assert [row.versus_erm["reference"] for row in made.rows if row.versus_erm] == ["erm @ small", "erm @ large"]


def test_one_family_for_erm_and_encoders() -> None:
    """Holm's p of all four comparisons together, worked out from their own p."""
    rows = of_both({"small": 0, "large": 3}).comparisons
    p_values = [row.p_here for row in rows if row.p_here]
    assert len(p_values) == 4
    assert [p.holm for p in p_values] == pytest.approx(holm([p.plain for p in p_values]))
    [alone] = found([record(*one) for one in grid()], [prediction(*one) for one in grid()]).comparisons
    assert alone.p_here is not None and p_values[0].plain == pytest.approx(alone.p_here.plain)
    declared = of_both({"small": 0, "large": 3}, compare=PAIRS[:1]).comparisons
    assert [(row.first, row.second) for row in declared if row.p_here and row.p_here.holm] == PAIRS[:1]
    assert len(declared) == 4


@pytest.mark.parametrize(
    ("seeds", "images", "why"), [(2, True, "2 are complete"), (1, True, "1 is complete"), (3, False, "are missing")]
)
def test_few_seeds_and_missing_predictions_give_no_verdict(seeds: int, images: bool, why: str) -> None:
    for row in of_both({"small": 0, "large": 9}, seeds, images).comparisons[2:]:
        assert (row.p_here, row.here) == (None, "no verdict") and why in row.note


def test_a_large_difference_is_found_and_none_between_equal_ones() -> None:
    *_, erm, sam = of_both({"small": -15, "large": 0}).comparisons
    assert erm.here == sam.here == "worse" and erm.p_here is not None and erm.p_here.plain < 0.01
    assert {(row.difference, row.here) for row in of_both({"small": 0, "large": 0}).comparisons[2:]} == {
        (0, "no clear difference")
    }
