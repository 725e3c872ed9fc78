"""The plain sentence: the number to expect, the interval of a new domain, and no claim beyond the verdicts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from made_runs import run
from scipy.stats import t

from xdm_ft.report.sentence import sentence

FOUR = {
    "erm": {"art": 0.6, "photo": 0.7, "real": 0.66, "sketch": 0.6},
    "mix": {"art": 0.62, "photo": 0.72, "real": 0.66, "sketch": 0.6},
    "sam": {"art": 0.7, "photo": 0.8, "real": 0.7, "sketch": 0.7},
}


def test_the_number_is_that_of_the_selected_method_not_of_the_best_test_value() -> None:
    text = sentence(run(FOUR, chosen_by={"erm": 0.8, "mix": 0.9, "sam": 0.7}))
    values = np.array([*FOUR["mix"].values()])
    half = t.ppf(0.975, 3) * values.std(ddof=1) * math.sqrt(1 + 1 / 4)  # equal seeds: no variance of theirs
    low, high = (f"{100 * end:.0f}" for end in (values.mean() - half, values.mean() + half))
    assert text == (
        f"On a domain never seen, expect 65.0% accuracy with mix, chosen on validation images (one new domain alone: "
        f"{low} to {high}%, at 95%); it is +1.0 over erm, not distinguishable over 4 domains, like the other method."
    )


def test_verdicts_stay_as_they_are() -> None:
    better = sentence(run(FOUR, verdicts={"sam": "better"}))
    assert "it is +8.5 over erm, better over 4 domains; mix is not distinguishable." in better
    too_few, none = "no verdict: it needs 3 seeds, and 2 are complete", dict.fromkeys(FOUR, "no verdict")
    text = sentence(run(FOUR, seeds=2, verdicts=none, note=too_few))
    assert text.endswith("over erm, no verdict (it needs 3 seeds, and 2 are complete).")
    for text in (sentence(run(FOUR, verdicts={"mix": "better", "sam": "worse"})), better):
        assert text.count("better") == 1


def test_erm_itself_may_be_the_choice() -> None:
    first = {"erm": 0.9, "mix": 0.8, "sam": 0.8}
    text = sentence(run(FOUR, chosen_by=first, verdicts={"sam": "better"}))
    assert "expect 64.0% accuracy with erm" in text
    ending = "; of 2 other methods compared with it over 4 domains: 1 not distinguishable, 1 better."
    assert text.endswith(ending)
    none = "; none of the 2 other methods is distinguishable from it over 4 domains."
    assert sentence(run(FOUR, chosen_by=first)).endswith(none)
    two = {name: FOUR[name] for name in ("erm", "mix")}
    assert sentence(run(two, chosen_by=first)).endswith("; mix is +1.0 over erm, not distinguishable over 4 domains.")


def test_one_held_out_set_says_nothing_of_others() -> None:
    one = {method: {"sketch": by_domain["sketch"]} for method, by_domain in FOUR.items()}
    text = sentence(run(one, verdicts={"sam": "better on this domain"}))
    assert text.startswith("On sketch, never trained on, expect 70.0% accuracy with sam, chosen on validation images ")
    assert "(measured on it alone; others may differ); it is +10.0 over erm, better on this domain;" in text
    alone = sentence(run({"erm": one["erm"]}))
    assert (
        alone
        == "On sketch, never trained on, expect 60.0% accuracy with erm (measured on it alone; others may differ)."
    )
    seen = sentence(run(FOUR, tested_on="domains that are also trained on, none of them unseen"))
    assert "never seen" not in seen and "also trained on" in seen
    official = sentence(run(FOUR, sets=[("art", "photo")]))
    assert official.startswith("On art, photo, never trained on, expect") and "these alone" in official


def test_two_held_out_domains_give_no_interval_and_wide_ones_say_so() -> None:
    two = {method: {"art": v["art"], "photo": v["photo"]} for method, v in FOUR.items()}
    assert "one new domain alone" not in sentence(run(two))
    wide = {"erm": {"a": 0.1, "b": 0.9, "c": 0.5}}
    assert "(one new domain alone: anything from 0 to 100%)" in sentence(run(wide))


@pytest.mark.parametrize(
    ("metric", "number", "difference"),
    [
        ("nll", "expect 0.645 NLL", "-0.080 against erm (lower is better), better"),
        ("worst_domain_accuracy", "64.5% worst domain accuracy", "-8.0 against erm, worse"),
    ],
)
def test_other_metrics(metric: str, number: str, difference: str) -> None:
    values = {"erm": {"a": 0.7, "b": 0.75}, "mix": {"a": 0.62, "b": 0.67}}
    verdict, chosen_by = ("better", 0.6) if metric == "nll" else ("worse", 0.8)
    made = run(values, metric=metric, verdicts={"mix": verdict}, chosen_by={"erm": 0.7, "mix": chosen_by})
    assert number in sentence(made) and difference in sentence(made)


def test_failed_models_and_nothing_at_all() -> None:
    text = sentence(run(FOUR, failed=["sam"]))
    assert text.endswith("; not counted, for lack of results: sam.") and "with mix" in text
    nothing = run(FOUR, failed=list(FOUR))
    assert sentence(nothing).startswith("There is no number to expect on new data")
    failed = dataclasses.replace(nothing, every=[])
    failed.results["runs"] = [{"status": "failed"}] * 3 + [{"status": "skipped"}]
    assert sentence(failed) == "No model has been trained: 3 failed, 1 skipped."
    failed.results["runs"] = []
    assert sentence(failed) == "No model has been trained yet."


def test_the_oracle_promises_nothing() -> None:
    text = sentence(run(FOUR, rule="oracle"))
    assert "(oracle)" in text and "%" not in text and "better" not in text


def test_names_can_not_break_the_line() -> None:
    evil = {"erm": FOUR["erm"], "a\x1b[31m\nb\u202e": FOUR["sam"]}
    text = sentence(run(evil))
    assert text.isprintable() and "a\\x1b[31m\\nb\\u202e" in text


BOTH = ("small", "large")
UNDER_BOTH = {f"{name} @ {one}": FOUR[name] for one in BOTH for name in ("erm", "mix", "sam")}
PAIRS = [
    {"method": "mix", "first": "small", "second": "large", "difference": -0.031, "verdict": "worse"},
    {"method": "sam", "first": "small", "second": "large", "difference": 0.5, "verdict": "better"},
]


def test_which_encoder_under_the_chosen_method() -> None:
    made = run(UNDER_BOTH, chosen_by={"mix @ large": 0.99}, encoders=BOTH, pairs=PAIRS)
    text = sentence(made)
    assert "with mix @ large, chosen on validation images" in text
    assert "; it is +1.0 over erm @ large, not distinguishable over 4 domains, like the other method" in text
    assert text.endswith("; under mix, large is +3.1 over small, better over 4 domains.")
    other = sentence(run(UNDER_BOTH, chosen_by={"mix @ small": 0.99}, encoders=BOTH, pairs=PAIRS))
    assert other.endswith("; under mix, small is -3.1 against large, worse over 4 domains.")


def test_no_claim_about_encoders_beyond_their_verdicts() -> None:
    """Equal encoders, too few seeds, and methods that only one encoder has."""
    [mix, _] = PAIRS
    chosen = {"mix @ large": 0.99}
    equal = run(UNDER_BOTH, chosen_by=chosen, encoders=BOTH, pairs=[mix | {"verdict": "not distinguishable"}])
    assert sentence(equal).endswith("large is +3.1 over small, not distinguishable over 4 domains.")
    few = {"verdict": "no verdict", "note": "no verdict: it needs 3 seeds, and 2 are complete"}
    text = sentence(run(UNDER_BOTH, chosen_by=chosen, encoders=BOTH, pairs=[mix | few]))
    assert text.endswith("large is +3.1 over small, no verdict (it needs 3 seeds, and 2 are complete).")
    assert "under" not in sentence(run(UNDER_BOTH, chosen_by=chosen, encoders=BOTH))


def test_erm_of_one_encoder_is_compared_with_its_own_methods_alone() -> None:
    text = sentence(run(UNDER_BOTH, chosen_by={"erm @ large": 0.99}, encoders=BOTH))
    assert text.endswith("; none of the 2 other methods is distinguishable from it over 4 domains.")


def test_many_encoders_are_counted() -> None:
    labels = [f"e{i}" for i in range(5)]
    values = {f"erm @ {one}": FOUR["erm"] for one in labels}
    words = ("better", "not distinguishable", "not distinguishable", "no verdict")
    pairs = [
        {"method": "erm", "first": "e0", "second": other, "difference": 0.1, "verdict": verdict}
        for other, verdict in zip(labels[1:], words, strict=True)
    ]
    few = sentence(run(values, chosen_by={"erm @ e0": 0.9}, encoders=labels, pairs=pairs[:2]))
    assert "; under erm, e0 is +10.0 over e1, better over 4 domains, and +10.0 over e2, not distinguishable" in few
    text = sentence(run(values, chosen_by={"erm @ e0": 0.9}, encoders=labels, pairs=pairs))
    assert text.endswith(
        "; under erm, e0 was compared with 4 other encoders: 1 better, 2 not distinguishable, 1 without a verdict."
    )


def test_a_method_at_a_cut_is_not_counted_against_another_erm() -> None:
    """A chosen ERM is compared with those rows alone whose reference it is."""
    made = run({"erm": FOUR["erm"], "mix": FOUR["mix"], "sam": FOUR["sam"]}, chosen_by={"erm": 0.99})
    for row in made.rows[1:]:
        row.versus_erm["reference"] = "erm" if row.method == "mix" else "erm 2"  # type: ignore[index]
    assert sentence(made).endswith("; mix is +1.0 over erm, not distinguishable over 4 domains.")
