"""The plain sentence: the number to expect, the interval of a new domain, and no claim beyond the verdicts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from example_runs import comparison
from example_runs import made_run as run
from scipy.stats import t

from xdm_ft.evaluation.verdicts import Comparison
from xdm_ft.report.headline import sentence

FOUR = {
    "erm": {"art": 0.6, "photo": 0.7, "real": 0.66, "sketch": 0.6},
    "mix": {"art": 0.62, "photo": 0.72, "real": 0.66, "sketch": 0.6},
    "sam": {"art": 0.7, "photo": 0.8, "real": 0.7, "sketch": 0.7},
}


def test_the_number_is_that_of_the_selected_method_not_of_the_best_test_value() -> None:
    text = sentence(run(FOUR, chosen_by={"erm": 0.8, "mix": 0.9, "sam": 0.7}))
    right = 10 * np.array([*FOUR["mix"].values()])  # of 10 images
    z = np.log((right + 0.5) / (10.5 - right))
    ends = {}
    for level in (80, 95):
        half = t.ppf(0.5 + level / 200, 3) * z.std(ddof=1) * math.sqrt(1 + 1 / 4)  # equal seeds: no variance of theirs
        ends[level] = " to ".join(f"{100 / (1 + math.exp(-z.mean() + side * half)):.0f}" for side in (1, -1))
    assert text == (
        "A new site like these lies below the worst of the 4 held-out ones (60.0%) with probability 1 in 5, between "
        "worst and best with 3 in 5; on average expect 65.0% accuracy with mix, chosen on validation images (one new "
        f"site alone: {ends[80]}% at 80%, {ends[95]}% at 95%); it is "
        "+1.0 over erm, no clear difference here, like the other method."
    )


def test_verdicts_stay_as_they_are() -> None:
    for verdict, words in (
        ("better", "better here, unknown elsewhere"),
        ("better, better", "better here and elsewhere"),
        ("worse, worse", "worse here and elsewhere"),
    ):
        text = sentence(run(FOUR, verdicts={"sam": verdict}))
        assert text.endswith(f"it is +8.5 over erm, {words}; mix is +1.0 over erm, no clear difference here.")
    too_few, none = "no verdict: it needs 3 seeds, and 2 are complete", dict.fromkeys(FOUR, "no verdict")
    text = sentence(run(FOUR, seeds=2, verdicts=none, note=too_few))
    assert text.endswith("over erm, no verdict (it needs 3 seeds, and 2 are complete).")


def test_erm_itself_may_be_the_choice() -> None:
    first = {"erm": 0.9, "mix": 0.8, "sam": 0.8}
    text = sentence(run(FOUR, chosen_by=first, verdicts={"sam": "better"}))
    assert "expect 64.0% accuracy with erm" in text
    assert text.endswith(
        "of 2 other methods compared with it: 1 with no clear difference, 1 better here and unknown elsewhere."
    )
    none = "; of 2 other methods compared with it: 2 with no clear difference."
    assert sentence(run(FOUR, chosen_by=first)).endswith(none)
    two = {name: FOUR[name] for name in ("erm", "mix")}
    assert sentence(run(two, chosen_by=first)).endswith("; mix is +1.0 over erm, no clear difference here.")
    made = run(FOUR, chosen_by={"erm": 0.99})  # a method at a cut is not counted against another erm
    made.results["comparisons"][1]["second"] = "erm 2"
    assert sentence(made).endswith("; mix is +1.0 over erm, no clear difference here.")


def test_one_held_out_set_says_nothing_of_others() -> None:
    one = {method: {"sketch": by_domain["sketch"]} for method, by_domain in FOUR.items()}
    text = sentence(run(one, verdicts={"sam": "better"}))
    ranks = "A new site like the held-out one lies below it (70.0%) with probability 1 in 2"
    expect = (
        "on sketch, never trained on, expect 70.0% accuracy with sam, chosen on validation images; it is +10.0 over"
    )
    assert text.startswith(f"{ranks}; {expect} erm, better on this domain; ")
    alone = sentence(run({"erm": one["erm"]}))
    assert alone == f"{ranks.replace('70', '60')}; on sketch, never trained on, expect 60.0% accuracy with erm."
    seen = sentence(run(FOUR, tested_on="domains that are also trained on, none of them unseen"))
    assert "new site" not in seen and "also trained on" in seen
    official = sentence(run(FOUR, sets=[("art", "photo")]))
    assert "A new set of sites like the held-out one lies below it" in official
    assert "; on art, photo, never trained on, expect" in official


def test_two_held_out_domains_give_no_interval_and_wide_ones_say_so() -> None:
    two = {method: {"art": v["art"], "photo": v["photo"]} for method, v in FOUR.items()}
    text = sentence(run(two))
    assert "one new site alone" not in text
    assert "(70.0%) with probability 1 in 3, between worst and best with 1 in 3; on average expect 75.0%" in text
    wide = {"erm": {"a": 0.1, "b": 0.9, "c": 0.5}}
    assert sentence(run(wide)).startswith("A new site like these lies below the worst of the 3 held-out ones (10.0%)")
    assert "(one new site alone: 2 to 98% at 80%, 0 to 100% at 95%)" in sentence(run(wide))


def test_what_one_more_domain_brings_where_models_left_out_two() -> None:
    chosen_by, images = {"erm": 0.5, "mix": 0.599, "sam": 0.4}, {name: [10] for name in FOUR["mix"]}
    crossed = run(FOUR, rule="cross_domain", chosen_by=chosen_by)
    assert "one more" not in sentence(crossed)
    crossed.results["data"] = {"images": images}
    assert "; one more training domain brought +5.1 points); it is +1.0 over erm" in sentence(crossed)
    crossed.results["data"] = {"images": images | {"never held out": [10]}}
    assert "one more" not in sentence(crossed)
    other = run(FOUR, chosen_by=chosen_by)
    other.results["data"] = {"images": images}
    assert "one more" not in sentence(other)


@pytest.mark.parametrize(
    ("metric", "number", "difference"),
    [
        ("nll", "expect 0.645 NLL", "-0.080 against erm (lower is better), better"),
        ("worst_domain_accuracy", "64.5% worst domain accuracy", "-8.0 against erm, worse"),
    ],
)
def test_other_metrics(metric: str, number: str, difference: str) -> None:
    values = {"erm": {"a": 0.7, "b": 0.75}, "mix": {"a": 0.62, "b": 0.67}}
    larger = run({"erm": values["mix"], "mix": values["erm"]}, metric="nll", chosen_by={"erm": 0.7, "mix": 0.6})
    assert "+0.080 against erm (lower is better)" in sentence(larger)
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


def test_the_oracle_promises_nothing_and_names_can_not_break_the_line() -> None:
    oracle = sentence(run(FOUR, rule="oracle"))
    assert "(oracle)" in oracle and "%" not in oracle and "better" not in oracle
    evil = {"erm": FOUR["erm"], "a\x1b[31m\nb\u202e": FOUR["sam"]}
    text = sentence(run(evil))
    assert text.isprintable() and "a\\x1b[31m\\nb\\u202e" in text


BOTH = ("small", "large")
UNDER_BOTH = {f"{name} @ {encoder}": FOUR[name] for encoder in BOTH for name in ("erm", "mix", "sam")}
MIX = comparison("mix @ small", "mix @ large", -0.031, "worse", "worse")
FEW = "no verdict: it needs 3 seeds, and 2 are complete"
LARGE = "; under mix, large is +3.1 over small, "


@pytest.mark.parametrize(
    ("chosen", "further", "end"),
    [
        ("mix @ large", MIX, f"{LARGE}better here and elsewhere."),
        ("mix @ small", MIX, "; under mix, small is -3.1 against large, worse here and elsewhere."),
        ("mix @ large", dataclasses.replace(MIX, here="no clear difference", elsewhere="unknown"),
         f"{LARGE}no clear difference here."),
        ("mix @ large", dataclasses.replace(MIX, here="no verdict", elsewhere="unknown", note=FEW),
         f"{LARGE}no verdict (it needs 3 seeds, and 2 are complete)."),
        ("mix @ large", comparison("sam @ small", "sam @ large", 0.5, "better"), "like the other method."),
        ("mix @ large", comparison("mix @ large", "sam @ small", 0.2, "better", "better"), "like the other method."),
        ("erm @ large", MIX, "; of 2 other methods compared with it: 2 with no clear difference."),
    ],
)  # fmt: skip
def test_no_claim_about_encoders_beyond_their_verdicts(chosen: str, further: Comparison, end: str) -> None:
    """Equal encoders, too few seeds, methods that only one encoder has, and other comparisons."""
    text = sentence(run(UNDER_BOTH, chosen_by={chosen: 0.99}, encoders=BOTH, further=[further]))
    assert f"with {chosen}, chosen on validation images" in text and text.endswith(end)
    if chosen == "mix @ large":
        assert "; it is +1.0 over erm @ large, no clear difference here, like the other method" in text


def test_many_encoders_are_counted() -> None:
    labels = [f"e{i}" for i in range(5)]
    values = {f"erm @ {encoder}": FOUR["erm"] for encoder in labels}
    words = ("better", "no clear difference", "no clear difference", "no verdict")
    pairs = [comparison("erm @ e0", f"erm @ {other}", 0.1, word) for other, word in zip(labels[1:], words, strict=True)]
    few = sentence(run(values, chosen_by={"erm @ e0": 0.9}, encoders=labels, further=pairs[:2]))
    assert "; under erm, e0 is +10.0 over e1, better here, unknown elsewhere, and +10.0 over e2, no clear" in few
    text = sentence(run(values, chosen_by={"erm @ e0": 0.9}, encoders=labels, further=pairs))
    assert text.endswith(
        "; under erm, e0 was compared with 4 other encoders: 1 better here and unknown elsewhere, 2 with no clear "
        "difference, 1 without a verdict."
    )
