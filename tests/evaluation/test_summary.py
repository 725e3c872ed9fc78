from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from xdm_ft.evaluation.conventions import DOMAINBED, WILDS
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction
from xdm_ft.evaluation.records import Pick, Record, Status
from xdm_ft.evaluation.summary import protocol_line, summarise
from xdm_ft.tensors import Score

ROWS = 50
BASE = {("erm", "a"): 30, ("erm", "b"): 20, ("sam", "a"): 40, ("sam", "b"): 32}  # right of 50 with seed 0


def score_of(accuracy: float, domains: tuple[str, ...], images: int) -> Score:
    """What the tests look at; the rest is made up."""
    per_domain = {domain: {"accuracy": accuracy, "n": images} for domain in domains}
    return Score(accuracy, 0.0, 0.0, None, 0.0, 1 - accuracy, 0.0, images, {}, per_domain)


def record(
    method: str, held: tuple[str, ...], seed: int, right: int, rules: tuple[str, ...] = ("train_val",)
) -> Record:
    selected = {rule: Pick(10, "", {"test": score_of(right / ROWS, held, ROWS)}) for rule in rules}
    return Record(method, held, seed, 0, {}, "ok", selected=selected, gradient_evaluations=300)


def trouble(method: str, held: tuple[str, ...], seed: int, status: Status, reason: str) -> Record:
    return Record(method, held, seed, 0, {}, status, reason)


def prediction(
    method: str, held: tuple[str, ...], seed: int, right: int, groups: np.ndarray | None = None, rule: str = "train_val"
) -> Prediction:
    labels = np.zeros(ROWS, dtype=np.int64)
    predicted = (np.arange(ROWS) >= right).astype(np.int64)
    return Prediction(method, held, seed, rule, HeldOutImages(np.arange(ROWS), labels, labels, groups), predicted)


def right_of(method: str, domain: str, seed: int) -> int:
    return BASE[method, domain] + (2 * seed if method == "sam" else seed)


def grid(seeds: int = 3) -> list[tuple[str, tuple[str, ...], int, int]]:
    return [(m, (d,), s, right_of(m, d, s)) for m in ("erm", "sam") for d in ("a", "b") for s in range(seeds)]


def summary(runs: list[Record], predictions: Iterable[Prediction], **changes: Any) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {
        "methods": ["zero_shot", "erm", "sam"],
        "rules": ["train_val"],
        "metric": "accuracy",
        "protocol_line": lambda rule: f"line of {rule}",
    }
    settings |= changes
    settings.setdefault("references", dict.fromkeys(settings["methods"], "erm"))
    rows = [row.to_json() for row in summarise(runs, predictions, **settings).rows]
    assert rows == json.loads(json.dumps(rows, allow_nan=False))  # results.json holds it as it is
    return rows


def test_spread_by_hand() -> None:
    erm, sam = summary([record(*r) for r in grid()], [prediction(*r) for r in grid()])
    assert (erm["method"], erm["selection"], erm["metric"], erm["split"]) == ("erm", "train_val", "accuracy", "test")
    assert erm["protocol"] == "line of train_val"
    means = [(0.8 + 0.64) / 2, (0.84 + 0.68) / 2, (0.88 + 0.72) / 2]  # sam, one per seed
    assert sam["mean"] == pytest.approx(np.mean(means))
    assert sam["std"] == pytest.approx(np.std(means, ddof=1))
    assert sam["stderr"] == pytest.approx(np.std(means, ddof=1) / 3**0.5)
    assert sam["n"] == 3
    assert sam["per_test_domain"]["a"] == {"mean": pytest.approx(0.84), "std": pytest.approx(0.04)}
    assert erm["versus_erm"] is None
    assert not {"failed", "skipped", "reason"} & set(sam)


def test_spread_as_benchmarks_print_it_by_hand() -> None:
    """Seeds 0, 1, 2 of sam are at 0.72, 0.76, 0.80."""
    records = [record(*r) for r in grid()]
    for convention, value in ((DOMAINBED, (0.0032 / 3) ** 0.5 / 3**0.5), (WILDS, (0.0032 / 2) ** 0.5)):
        row = summary(records, [], convention=convention)[1]
        assert row["spread_as_published"] == {"kind": convention.kind, "value": pytest.approx(value)}
        assert row["stderr"] == pytest.approx((0.0032 / 2) ** 0.5 / 3**0.5)  # ours stays what it is
    one_seed = summary([record(*r) for r in grid(1)], [], convention=WILDS)[1]
    assert one_seed["spread_as_published"] == {"kind": WILDS.kind, "value": None}
    assert "spread_as_published" not in summary(records, [])[1]


def test_budgets() -> None:
    records = [
        replace(one, gradient_evaluations={"erm": 300, "sam": 600 if one.test_domains == ("a",) else 640}[one.method])
        for one in (record(*r) for r in grid())
    ]
    erm, sam = summary(records, [])
    assert erm["budget"] == {"draws": 1, "gradient_evaluations": {"low": 300, "high": 300}}
    assert sam["budget"] == {"draws": 1, "gradient_evaluations": {"low": 600, "high": 640}}
    skipped = summary([*records, trouble("zero_shot", ("a",), 0, "skipped", "why")], [])[0]
    assert skipped["budget"] == {"draws": 1, "gradient_evaluations": None}


def by_image(domain: str, seeds: int = 3) -> np.ndarray:
    """sam − erm of each image, averaged over seeds."""
    place = np.arange(ROWS)
    right = [(place < right_of("sam", domain, s)) * 1.0 - (place < right_of("erm", domain, s)) for s in range(seeds)]
    return np.mean(right, axis=0)


def test_versus_erm_by_hand() -> None:
    sam = summary([record(*r) for r in grid()], [prediction(*r) for r in grid()])[1]["versus_erm"]
    by_domain = [0.2 + 0.02, 0.24 + 0.02]  # sam − erm with seed 0, and on average over seeds 1/50 more
    by_seed = [0.22, 0.24, 0.26]
    assert sam["difference"] == pytest.approx(np.mean(by_domain))
    over_domains = stats.ttest_1samp(by_domain, 0)
    expected = over_domains.confidence_interval(0.95)
    assert sam["domains"] == {"low": pytest.approx(expected.low), "high": pytest.approx(expected.high)}
    images = sum(by_image(d).var(ddof=1) / ROWS for d in "ab") / 2**2
    error = (images + np.var(by_seed, ddof=1) / 3) ** 0.5
    half = stats.t.ppf(0.975, 3 - 1) * error
    assert sam["seeds_and_images"] == {"low": pytest.approx(0.24 - half), "high": pytest.approx(0.24 + half)}
    assert 2 * stats.t.sf(0.24 / error, 2) < over_domains.pvalue == pytest.approx(sam["p"])  # the larger one counts
    assert sam["p_holm"] == sam["p"]  # the only row
    assert sam["verdict"] == "not distinguishable"  # two domains say little
    assert sam["note"] == "images assumed independent"


def one_domain(seeds: int, held: tuple[str, ...] = ("a",)) -> dict[str, Any]:
    """sam versus erm with 20 to 20 + seeds more images right of 50."""
    runs = [(m, held, s, {"erm": 20, "sam": 40 + s}[m]) for m in ("erm", "sam") for s in range(seeds)]
    return summary([record(*r) for r in runs], [prediction(*r) for r in runs])[1]["versus_erm"]


def test_one_domain_has_a_verdict_of_its_own() -> None:
    versus = one_domain(3)
    assert versus["domains"] is None
    images = np.mean([(np.arange(ROWS) < 40 + s) * 1.0 - (np.arange(ROWS) < 20) for s in range(3)], axis=0)
    error = (images.var(ddof=1) / ROWS + 0.02**2 / 3) ** 0.5
    assert versus["p"] == pytest.approx(2 * stats.t.sf(0.42 / error, 2))
    assert versus["verdict"] == "better on this domain"
    assert versus["note"] == "variation between domains not estimated; images assumed independent"
    assert one_domain(3, ("a", "b"))["verdict"] == "better on these domains"  # one model tested on both: one set


@pytest.mark.parametrize(("seeds", "there"), [(1, "1 is"), (2, "2 are")])
def test_below_three_seeds_there_is_no_verdict(seeds: int, there: str) -> None:
    for versus in (one_domain(seeds), one_domain(seeds, ("a", "b"))):
        assert (versus["p"], versus["p_holm"], versus["verdict"]) == (None, None, "no verdict")
        assert f"no verdict: it needs 3 seeds, and {there} complete" in versus["note"]
        assert (versus["seeds_and_images"] is None) == (seeds == 1)
    rows = summary([record(*r) for r in grid(seeds)], [prediction(*r) for r in grid(seeds)])
    assert rows[1]["versus_erm"]["verdict"] == "no verdict"  # several held-out domains too


def test_a_steady_difference_on_several_domains_is_better() -> None:
    """In a table of 13 methods, all of which have a steady difference but one."""
    held, methods = [("a",), ("b",), ("c",), ("d",)], ["erm", *(f"m{m}" for m in range(13))]
    base = {"erm": 10, "m0": 10} | {m: 45 for m in methods[2:]}
    runs = [(m, h, s, base[m] + (s + place) % 2) for m in methods for place, h in enumerate(held) for s in range(5)]
    rows = summary([record(*r) for r in runs], [prediction(*r) for r in runs], methods=methods)
    found = [row["versus_erm"]["verdict"] for row in rows[1:]]
    assert found == ["not distinguishable", *["better"] * 12]


def test_holm_counts_the_rows_under_one_rule() -> None:
    runs = [
        (m, ("a",), s, {"erm": 20, "sam": 32 + s, "irm": 22 + 3 * s}[m])
        for m in ("erm", "sam", "irm")
        for s in range(3)
    ]
    runs += [("one", ("a",), 0, 30)]
    rules = ("train_val", "oracle")
    records = [record(*r, rules=rules) for r in runs] + [trouble("one", ("a",), s, "failed", "why") for s in (1, 2)]
    predictions = [prediction(*r, rule=rule) for r in runs for rule in rules]
    rows = summary(records, predictions, methods=["erm", "sam", "irm", "one"], rules=rules)
    for of_rule in (rows[:4], rows[4:]):
        sam, irm, one = (row["versus_erm"] for row in of_rule[1:])
        assert one["p"] is None  # no test, so two rows count
        assert sam["p"] < irm["p"] and irm["p_holm"] == irm["p"]
        assert sam["p_holm"] == pytest.approx(2 * sam["p"])


def test_groups() -> None:
    few, one = np.arange(ROWS) // 10, np.zeros(ROWS, dtype=np.int64)
    records = [record(*r) for r in grid()]
    versus = summary(records, [prediction(*r, few) for r in grid()])[1]["versus_erm"]
    assert versus["note"] == "only 5 groups in a test domain, effectively 5.0"
    plain = summary(records, [prediction(*r) for r in grid()])[1]["versus_erm"]
    ends = {name: v["seeds_and_images"] for name, v in (("few", versus), ("plain", plain))}
    width = {name: end["high"] - end["low"] for name, end in ends.items()}
    assert width["few"] > 1.5 * width["plain"]  # errors come in runs of neighbours
    versus = summary(records, [prediction(*r, one) for r in grid()])[1]["versus_erm"]
    assert (versus["seeds_and_images"], versus["p"], versus["verdict"]) == (None, None, "no verdict")
    assert "variation between images not estimated: too few groups" in versus["note"]


def test_unequal_groups_are_said_by_their_effective_number() -> None:
    sizes = [21, 10, *[2] * 8, 1, 1, 1]  # 13 groups: above the old limit of 10
    groups = np.repeat(np.arange(13), sizes)
    versus = summary([record(*r) for r in grid()], [prediction(*r, groups) for r in grid()])[1]["versus_erm"]
    effective = ROWS**2 / sum(n**2 for n in sizes)
    assert versus["note"] == f"only 13 groups in a test domain, effectively {effective:.1f}" and effective < 5


def test_a_deterministic_method_is_paired_by_domain() -> None:
    runs = [*(r for r in grid() if r[0] == "erm"), ("zero_shot", ("a",), 0, 35), ("zero_shot", ("b",), 0, 35)]
    zero_shot, erm = summary([record(*r) for r in runs], [prediction(*r) for r in runs])
    assert (zero_shot["n"], zero_shot["std"], zero_shot["stderr"]) == (1, None, None)
    assert erm["n"] == 3
    assert zero_shot["versus_erm"]["difference"] == pytest.approx(zero_shot["mean"] - erm["mean"])
    assert zero_shot["versus_erm"]["note"].endswith("one seed, compared with each of 3")


def test_a_deterministic_method_takes_the_seeds_of_the_other_side() -> None:
    """As if its one model were trained again with each seed: the same p, one row or three."""
    erm = [("erm", ("a",), s, 20 + s) for s in range(3)]
    once, thrice = [("zero_shot", ("a",), 0, 35)], [("zero_shot", ("a",), s, 35) for s in range(3)]
    rows = [summary([record(*r) for r in erm + own], [prediction(*r) for r in erm + own])[0] for own in (once, thrice)]
    first, second = (row["versus_erm"] for row in rows)
    assert first["p"] == pytest.approx(second["p"]) and first["verdict"] == second["verdict"] == "better on this domain"
    assert first["seeds_and_images"] == pytest.approx(second["seeds_and_images"])


def test_a_seed_with_a_failed_run_does_not_count() -> None:
    runs = [record(*r) for r in grid() if r[:3] != ("sam", ("b",), 1)]
    runs.append(trouble("sam", ("b",), 1, "failed", "the loss is nan at step 7"))
    erm, sam = summary(runs, [prediction(*r) for r in grid()])
    assert (sam["n"], sam["failed"]) == (2, 1)
    assert sam["reason"] == (
        "1 of 6 runs failed: the loss is nan at step 7; "
        "the mean counts the 2 of 3 seeds that have every held-out domain"
    )
    assert sam["mean"] == pytest.approx(np.mean([0.72, 0.8]))
    assert sam["per_test_domain"]["a"]["mean"] == pytest.approx(0.84)  # all three seeds have it
    assert erm["n"] == 3
    paired_erm = np.mean([0.5, 0.54])  # seeds 0 and 2
    assert sam["versus_erm"]["difference"] == pytest.approx(sam["mean"] - paired_erm)


def test_skipped_and_missing_runs() -> None:
    runs = [record(*r) for r in grid() if r[0] == "erm" and r[:3] != ("erm", ("b",), 2)]
    runs += [trouble("sam", (d,), s, "skipped", "needs 2 training domains") for d in ("a", "b") for s in range(3)]
    erm, sam = summary(runs, [])
    assert (sam["mean"], sam["std"], sam["n"], sam["skipped"], sam["per_test_domain"]) == (None, None, 0, 6, {})
    assert sam["reason"] == "6 of 6 runs skipped: needs 2 training domains"
    assert sam["versus_erm"] is None
    assert erm["n"] == 2
    assert erm["reason"].startswith("1 of 6 runs are missing; the mean counts the 2 of 3 seeds")


def test_without_predictions_there_is_no_verdict() -> None:
    versus = summary([record(*r) for r in grid()], [])[1]["versus_erm"]
    assert (versus["seeds_and_images"], versus["p"], versus["verdict"]) == (None, None, "no verdict")
    assert versus["note"] == "variation between images not estimated: predictions are missing"


def test_without_erm_nothing_is_compared() -> None:
    runs = [record(*r) for r in grid() if r[0] == "sam"]
    (sam,) = summary(runs, [])
    assert sam["versus_erm"] is None
    assert "reason" not in sam


def test_a_labelled_reference() -> None:
    runs = [record(*r) for r in grid()]
    erm, sam = summary(runs, [], references={"erm": "sam"})
    assert sam["versus_erm"] is None
    assert erm["versus_erm"]["difference"] < 0


def test_each_row_names_its_reference() -> None:
    runs = [record(*r) for r in grid()]
    runs += [replace(one, method="deep") for one in runs if one.method == "sam"]
    rows = summary(runs, [], methods=["erm", "sam", "deep"], references={"sam": "deep", "deep": "erm"})
    assert [row["versus_erm"] and row["versus_erm"]["reference"] for row in rows] == [None, "deep", "erm"]
    alone = summary(runs, [], methods=["erm", "sam", "deep"])
    assert [row["versus_erm"]["reference"] for row in alone[1:]] == ["erm", "erm"]


def test_every_rule_has_rows_of_its_own() -> None:
    rules = ("train_val", "oracle")
    runs = [record(*r, rules=rules) for r in grid()]
    predictions = [prediction(*r, rule=rule) for r in grid() for rule in rules]
    rows = summary(runs, predictions, rules=rules, methods=["sam", "erm"])
    assert [(r["selection"], r["method"]) for r in rows] == [(rule, m) for rule in rules for m in ("sam", "erm")]
    assert [r["protocol"] for r in rows[1:3]] == ["line of train_val", "line of oracle"]


def test_a_lower_loss_is_better() -> None:
    runs = [(m, ("a",), s, {"erm": 20, "sam": 40 + s}[m]) for m in ("erm", "sam") for s in range(3)]
    predictions = [prediction(*r) for r in runs]
    predictions = [Prediction(**{**vars(p), "per_image": (p.predicted != 0).astype(float)}) for p in predictions]
    versus = summary([record(*r) for r in runs], predictions, metric="nll")[1]["versus_erm"]
    assert versus["difference"] < 0
    assert versus["verdict"] == "better on this domain"


def test_a_metric_that_is_not_defined() -> None:
    rows = summary([record(*r) for r in grid()], [prediction(*r) for r in grid()], metric="auroc")
    assert [r["mean"] for r in rows] == [None, None]
    assert rows[1]["reason"] == "auroc is not defined on the test images of 6 of 6 runs"
    assert rows[1]["versus_erm"] is None


def test_one_model_on_several_test_domains() -> None:
    runs = [("erm", ("a", "b"), 0, 30), ("sam", ("a", "b"), 0, 40)]
    sam = summary([record(*r) for r in runs], [prediction(*r) for r in runs])[1]
    assert sam["per_test_domain"] == {d: {"mean": 0.8, "std": None} for d in ("a", "b")}
    assert sam["versus_erm"]["domains"] is None
    nll = summary([record(*r) for r in runs], [], metric="nll")[1]
    assert list(nll["per_test_domain"]) == ["a + b"]


def test_two_records_of_one_run_are_refused() -> None:
    with pytest.raises(ValueError, match="two records"):
        summary([record(*r) for r in [*grid(), grid()[0]]], [])


def test_the_order_of_records_changes_nothing() -> None:
    runs, predictions = [record(*r) for r in grid()], [prediction(*r) for r in grid()]
    straight = summary(runs, predictions)
    mixed = summary(runs[::-1], predictions[::-1])
    assert [r["mean"] for r in mixed] == pytest.approx([r["mean"] for r in straight])
    ends = [rows[1]["versus_erm"]["seeds_and_images"] for rows in (mixed, straight)]
    assert ends[0] == pytest.approx(ends[1])


LINE: dict[str, Any] = {
    "data": "pacs (9,991 images, 4 domains)",
    "split": "each domain held out in turn",
    "notes": ["images assumed independent", "images assumed independent"],
    "selection": "train_val",
    "metric": "balanced_accuracy",
    "augmentation": "none",
    "draws": 1,
}


def test_protocol_line() -> None:
    assert protocol_line(**LINE) == (
        "pacs (9,991 images, 4 domains); each domain held out in turn; images assumed independent; step picked by "
        "balanced accuracy on the validation images of the training domains, the mean over these; test balanced "
        "accuracy; no augmentation; 1 hyper-parameter draw; ± is the standard error over seeds (ddof 1), held-out "
        "domains averaged within a seed"
    )


def test_protocol_line_marks_the_oracle_and_stays_one_line() -> None:
    line = protocol_line(**LINE | {"selection": "oracle", "data": "my\ndata", "augmentation": "domainbed", "draws": 20})
    assert "(oracle: picked on the test domain)" in line
    assert line.startswith("my data; ")
    assert "; augmentation domainbed; 20 hyper-parameter draws; " in line


def test_predictions_are_read_one_at_a_time() -> None:
    alive: list[weakref.ref[Prediction]] = []

    def one_by_one() -> Iterator[Prediction]:
        for runs in grid():
            one = prediction(*runs)
            assert sum(known() is not None for known in alive) <= 3, "the first of each set, and the last one"
            alive.append(weakref.ref(one))
            yield one
            del one

    read = summary([record(*r) for r in grid()], one_by_one())
    assert len(alive) == 12 and read == summary([record(*r) for r in grid()], [prediction(*r) for r in grid()])
