"""The rows of a summary, their comparisons and families of verdicts, also between encoders; the protocol line."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from xdm_ft.core import ModelKey, Score
from xdm_ft.evaluation.estimates import holm
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction
from xdm_ft.recipe.method import split_label
from xdm_ft.results.model import Pick, Record, Status
from xdm_ft.results.summary import (
    DOMAINBED,
    LINEAR,
    WILDS,
    Compared,
    Convention,
    Summary,
    encoder_pairs,
    erm_of_each,
    protocol_line,
    summarise,
)
from xdm_ft.results.table import InterimLook

VIT: dict[str, Any] = {"encoder": "vit", "trainable": False}  # of a record

Run = tuple[str, tuple[str, ...], int, int]  # method, held-out domains, seed, images that are right
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
    return Record(
        ModelKey(method, held, seed, 0),
        {},
        "ok",
        selected=selected,
        gradient_evaluations=300,
        encoder="vit",
        trainable=False,
    )


def trouble(method: str, held: tuple[str, ...], seed: int, status: Status, reason: str) -> Record:
    return Record(ModelKey(method, held, seed, 0), {}, status, reason, **VIT)


def prediction(
    method: str, held: tuple[str, ...], seed: int, right: int, groups: np.ndarray | None = None, rule: str = "train_val"
) -> Prediction:
    labels = np.zeros(ROWS, dtype=np.int64)
    predicted = (np.arange(ROWS) >= right).astype(np.int64)
    return Prediction(method, held, seed, rule, HeldOutImages(np.arange(ROWS), labels, labels, groups), predicted)


def right_of(method: str, domain: str, seed: int) -> int:
    return BASE[method, domain] + (2 * seed if method == "sam" else seed)


def grid(seeds: int = 3) -> list[Run]:
    return [(m, (d,), s, right_of(m, d, s)) for m in ("erm", "sam") for d in ("a", "b") for s in range(seeds)]


def found(runs: list[Record], predictions: Iterable[Prediction], **changes: Any) -> Summary:
    settings: dict[str, Any] = {
        "methods": ["zero_shot", "erm", "sam"], "rules": {"train_val": "a line"}, "metric": "accuracy",
    }  # fmt: skip
    settings |= changes
    settings.setdefault("references", {method: "erm" for method in settings["methods"] if method != "erm"})
    return summarise(runs, lambda _: predictions, **settings)


def summary(runs: list[Record], predictions: Iterable[Prediction], **changes: Any) -> list[dict[str, Any]]:
    rows = [row.to_json() for row in found(runs, predictions, **changes).rows]
    assert rows == json.loads(json.dumps(rows, allow_nan=False))  # results.json holds it as it is
    return rows


def both(runs: list[Run], **changes: Any) -> Summary:
    return found([record(*r) for r in runs], [prediction(*r) for r in runs], **changes)


def test_rows_by_hand() -> None:
    """Seeds 0, 1, 2 of sam are at 0.72, 0.76, 0.80."""
    records = [
        replace(one, gradient_evaluations={"erm": 300, "sam": 600 if one.test_domains == ("a",) else 640}[one.method])
        for one in (record(*r) for r in grid())
    ]
    skipped = trouble("zero_shot", ("a",), 0, "skipped", "why")
    zero_shot, erm, sam = summary([*records, skipped], [prediction(*r) for r in grid()])
    assert [erm[name] for name in ("method", "selection", "metric", "split", "protocol")] == [
        "erm", "train_val", "accuracy", "test", "a line"
    ]  # fmt: skip
    assert sam["n"] == 3 and sam["mean"] == pytest.approx(0.76) and sam["std"] == pytest.approx(0.04)
    assert sam["stderr"] == pytest.approx(0.04 / 3**0.5)
    point = sam["per_test_domain"]["a"]
    assert (point["mean"], point["std"]) == (pytest.approx(0.84), pytest.approx(0.04))
    assert point["low"] < 0.84 < point["high"] and sam["interval"]["low"] < 0.76 < sam["interval"]["high"]
    assert not {"failed", "skipped", "reason", "spread_as_published"} & set(sam)
    assert erm["budget"] == {"draws": 1, "gradient_evaluations": {"low": 300, "high": 300}}
    assert sam["budget"] == {"draws": 1, "gradient_evaluations": {"low": 600, "high": 640}}
    assert zero_shot["budget"] == {"draws": 1, "gradient_evaluations": None}


@pytest.mark.parametrize(
    ("convention", "value"), [(DOMAINBED, (0.0032 / 3) ** 0.5 / 3**0.5), (WILDS, (0.0032 / 2) ** 0.5)]
)
def test_spread_as_benchmarks_print_it(convention: Convention, value: float) -> None:
    row = summary([record(*r) for r in grid()], [], convention=convention)[1]
    assert row["spread_as_published"] == {"kind": convention.kind, "value": pytest.approx(value)}
    assert row["stderr"] == pytest.approx((0.0032 / 2) ** 0.5 / 3**0.5)  # ours stays what it is
    one_seed = summary([record(*r) for r in grid(1)], [], convention=convention)[1]
    assert one_seed["spread_as_published"] == {"kind": convention.kind, "value": None}


def test_a_comparison_by_hand() -> None:
    images = 0.0
    for domain in "ab":  # without a seed in common, each side has a mean of its own
        right = {m: np.mean([np.arange(ROWS) < right_of(m, domain, s) for s in range(3)], 0) for m in ("erm", "sam")}
        images += (right["sam"] - right["erm"]).var(ddof=1) / ROWS / 4
    x, y = 0.02**2 / 3, 0.04**2 / 3  # each seed gains 1 or 2 of 50 images, on both sets alike: Σ a = b/2
    b, f_a, f_b = x + y, 4 * (x + y) ** 2 / (x**2 + y**2), 2 * (x + y) ** 2 / (x**2 + y**2)
    f_seeds = 1 / (0.5 / f_a + 0.5 / f_b)
    [row] = both(grid()).comparisons
    assert (row.difference, row.error) == (pytest.approx(0.24), pytest.approx((images + b) ** 0.5))
    assert row.freedom_seeds == pytest.approx(f_seeds)
    assert row.freedom == pytest.approx(f_seeds), "with several domains it has no more"
    half, p = stats.t.ppf(0.975, row.freedom) * row.error, 2 * stats.t.sf(0.24 / row.error, row.freedom)
    two = stats.t.ppf(0.975, 1) * 0.02  # sam − erm is 0.22 and 0.26
    assert row.on_others is not None and row.on_others.interval() == pytest.approx((0.24 - two, 0.24 + two))
    assert row.on_these is not None and row.on_these.interval() == pytest.approx((0.24 - half, 0.24 + half))
    assert row.p_here == pytest.approx((p, p))
    assert (row.here, row.where, row.second) == ("better", "on these domains", "erm")
    assert row.note == "new domains: two held-out domains are too few; images assumed independent"


def test_one_domain_has_a_verdict_of_its_own() -> None:
    for held, where in ((("a",), "on this domain"), (("a", "b"), "on these domains")):
        runs = [(m, held, s, {"erm": 20, "sam": 40 + s}[m]) for m in ("erm", "sam") for s in range(3)]
        [row] = both(runs).comparisons
        assert (row.sets, row.domains, row.here, row.elsewhere) == (1, len(held), "better", "unknown")
        assert row.where == where
        assert row.error_elsewhere is None and row.p_elsewhere is None and row.note == "images assumed independent"


FOUR = [
    (m, ("a",), s, {"erm": 20, "sam": 34 + s, "irm": 23 + 3 * s, "one": 30}[m])
    for m in ("erm", "sam", "irm", "one")
    for s in range(1 if m == "one" else 3)
]
NAMES = ["erm", "sam", "irm", "one"]


def test_the_family_is_all_comparisons_that_have_a_p() -> None:
    rows = {row.first: row for row in both(FOUR, methods=NAMES).comparisons}
    sam, irm = rows["sam"].p_here, rows["irm"].p_here
    assert sam and irm and sam.plain < irm.plain == irm.holm and sam.holm == pytest.approx(2 * sam.plain)
    assert rows["one"].p_here is None and "it needs 3 seeds, and 1 is complete" in rows["one"].note
    assert rows["one"].error is None and rows["one"].difference == pytest.approx(0.2)


def test_declared_comparisons_alone_are_the_family() -> None:
    """The others keep difference and interval; the declared ones stand first."""
    every = both(FOUR, methods=NAMES).comparisons
    declared = [("irm", "erm"), ("sam", "irm")]
    made = both(FOUR, methods=NAMES, compare=declared)
    assert [(row.first, row.second) for row in made.comparisons] == [*declared, ("sam", "erm"), ("one", "erm")]
    irm, sam_irm, sam, one = made.comparisons
    assert irm.p_here and sam_irm.p_here and {irm.here, sam_irm.here} <= {"better", "no clear difference"}
    plain = [row.p_here.plain for row in (irm, sam_irm) if row.p_here]
    assert [irm.p_here.holm, sam_irm.p_here.holm] == pytest.approx(holm(plain))
    assert sam.p_here is not None and (sam.here, sam.elsewhere, sam.p_here.holm) == ("no verdict", "unknown", None)
    assert (sam.difference, sam.error) == (every[0].difference, every[0].error)
    assert sam.note == "no verdict: report.compare does not declare it; images assumed independent"
    assert "declare" not in one.note and "declare" not in irm.note
    assert sam.here == "no verdict"
    turned = both(FOUR, methods=NAMES, compare=[("erm", "sam")])
    assert [(row.first, row.second) for row in turned.comparisons] == [("erm", "sam"), ("irm", "erm"), ("one", "erm")]
    again = both(FOUR, methods=NAMES, compare=[("sam", "gone")]).comparisons
    assert {row.here for row in again} == {"no verdict"}, "what is declared has no row yet"


def test_the_oracle_has_no_verdicts() -> None:
    made = found(
        [record(*r, rules=("train_val", "oracle")) for r in FOUR], [prediction(*r, rule="oracle") for r in FOUR],
        methods=NAMES, rules={"oracle": "a line"},
    )  # fmt: skip
    assert [row.selection for row in made.rows] == ["oracle"] * 4 and len(made.comparisons) == 3
    for row in made.comparisons:
        assert (row.selection, row.here, row.p_here, row.p_elsewhere) == ("oracle", "no verdict", None, None)
        assert row.note.startswith("no verdict: oracle reads labels of the test domains")


def test_looks_and_margin_reach_the_verdicts() -> None:
    [row] = both(grid(), look=(3, 1e-9), margin=0.9).comparisons
    assert (row.look, row.here, row.equal_within) == (3, "no clear difference", None)
    assert [row.equal_within for row in both(grid(), margin=0.9).comparisons] == [0.9]
    equal = [(m, ("a",), s, 30 + s) for m in ("erm", "sam") for s in range(3)]
    before = [InterimLook([0, 1, 2], ["erm", "sam"], {}, 0.05, [], [["train_val", "sam", "erm", "better", "unknown"]])]
    [comparison] = both(equal, look=(2, 0.0125), before=before).comparisons
    assert (comparison.here, comparison.look) == ("better", 1), "what an earlier look has found stays"


def test_a_deterministic_method_has_no_variance_over_seeds() -> None:
    runs = [*(r for r in grid() if r[0] == "erm"), ("zero_shot", ("a",), 0, 35), ("zero_shot", ("b",), 0, 35)]
    made = both(runs, deterministic=["zero_shot"])
    zero_shot, erm = made.rows
    assert (zero_shot.n, zero_shot.std, zero_shot.stderr, erm.n) == (1, None, None, 3)
    [row] = made.comparisons
    assert (row.seeds, row.paired) == (3, False) and row.here != "no verdict"
    assert zero_shot.mean is not None and erm.mean is not None
    assert row.difference == pytest.approx(zero_shot.mean - erm.mean)
    [unknown] = both(runs).comparisons
    assert unknown.here == "no verdict", "one seed of a method that may vary"


def test_a_seed_with_a_failed_run_does_not_count() -> None:
    runs = [record(*r) for r in grid() if r[:3] != ("sam", ("b",), 1)]
    runs.append(trouble("sam", ("b",), 1, "failed", "the loss is nan at step 7"))
    made = found(runs, [prediction(*r) for r in grid()])
    erm, sam = (row.to_json() for row in made.rows)
    assert (sam["n"], sam["failed"]) == (2, 1)
    assert sam["reason"] == (
        "1 of 6 runs failed: the loss is nan at step 7; "
        "the mean counts the 2 of 3 seeds that have every held-out domain"
    )
    assert sam["mean"] == pytest.approx(np.mean([0.72, 0.8]))
    assert sam["per_test_domain"]["a"]["mean"] == pytest.approx(0.84)  # all three seeds have it
    assert erm["n"] == 3
    [versus] = made.comparisons
    assert versus.difference == pytest.approx(sam["mean"] - erm["mean"]), "all complete seeds of each"
    assert versus.note.startswith("no verdict: it needs 3 seeds, and 2 are complete")


def test_skipped_and_missing_runs() -> None:
    runs = [record(*r) for r in grid() if r[0] == "erm" and r[:3] != ("erm", ("b",), 2)]
    runs += [trouble("sam", (d,), s, "skipped", "needs 2 training domains") for d in ("a", "b") for s in range(3)]
    erm, sam = summary(runs, [])
    assert (sam["mean"], sam["std"], sam["n"], sam["skipped"], sam["per_test_domain"]) == (None, None, 0, 6, {})
    assert sam["reason"] == "6 of 6 runs skipped: needs 2 training domains"
    assert erm["n"] == 2 and erm["reason"].startswith("1 of 6 runs are missing; the mean counts the 2 of 3 seeds")


def test_each_row_names_its_reference() -> None:
    runs = [record(*r) for r in grid()]
    runs += [replace(one, key=one.key._replace(method="deep")) for one in runs if one.method == "sam"]
    for methods, references, expected in (
        (["sam"], {"sam": "erm"}, {}),
        (["erm", "sam"], {"erm": "sam"}, {"erm": "sam"}),
        (["erm", "sam", "deep"], {"sam": "deep", "deep": "erm"}, {"sam": "deep", "deep": "erm"}),
        (["erm", "sam", "deep"], {"sam": "erm", "deep": "erm"}, {"sam": "erm", "deep": "erm"}),
    ):
        made = found([one for one in runs if one.method in methods], [], methods=methods, references=references)
        assert {row.first: row.second for row in made.comparisons} == expected
        assert not any(row.reason for row in made.rows)


def test_a_lower_loss_is_better_and_a_metric_may_not_be_defined() -> None:
    runs = [r for r in FOUR if r[0] in ("erm", "sam")]
    predictions = [replace(one, per_image=(one.predicted != 0).astype(float)) for one in (prediction(*r) for r in runs)]
    [versus] = found([record(*r) for r in runs], predictions, metric="nll").comparisons
    assert versus.difference < 0 and versus.here == "better"
    rows, compared, *_ = found([record(*r) for r in grid()], [prediction(*r) for r in grid()], metric="auroc")
    assert [row.mean for row in rows] == [None, None] and not compared
    assert rows[1].reason == "auroc is not defined on the images of any held-out set"


def test_one_model_on_several_test_domains() -> None:
    runs = [("erm", ("a", "b"), 0, 30), ("sam", ("a", "b"), 0, 40)]
    (_, sam), [versus], *_ = both(runs)
    assert sam.per_test_domain == {d: {"mean": 0.8, "std": None} for d in ("a", "b")}
    assert versus.on_others is None
    nll = summary([record(*r) for r in runs], [], metric="nll")[1]
    assert list(nll["per_test_domain"]) == ["a + b"]


def test_the_order_of_records_changes_nothing() -> None:
    straight, mixed = both(grid()), both(grid()[::-1])
    assert [row.mean for row in mixed.rows] == pytest.approx([row.mean for row in straight.rows])
    assert mixed.comparisons[0].error == pytest.approx(straight.comparisons[0].error)


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
    line = protocol_line(**LINE | {"selection": "oracle", "data": "my\ndata", "augmentation": "domainbed", "draws": 20})
    assert "(oracle: picked on the test domain)" in line and line.startswith("my data; ")
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


def under_encoders(right: dict[str, int], **changes: Any) -> Summary:
    """ERM and SAM under both encoders; `right`: by how many more images of 50 an encoder is right."""
    made = [(f"{m} @ {one}", held, seed, n + right[one]) for one in ENCODERS for m, held, seed, n in grid()]
    return both(
        made,
        methods=list(dict.fromkeys(one[0] for one in made)),
        references={f"sam @ {one}": f"erm @ {one}" for one in ENCODERS},
        encoders=ENCODERS,
        **changes,
    )


PAIRS = [(f"{method} @ small", f"{method} @ large") for method in ("erm", "sam")]


def test_the_difference_is_first_less_second() -> None:
    made = under_encoders({"small": 0, "large": 5})
    *_, erm, sam = made.comparisons
    assert [(row.first, row.second) for row in (erm, sam)] == PAIRS
    assert [row.difference for row in (erm, sam)] == pytest.approx([-0.1, -0.1])


def test_one_family_for_erm_and_encoders() -> None:
    """Holm's p of all four comparisons together, worked out from their own p."""
    rows = under_encoders({"small": 0, "large": 3}).comparisons
    p_values = [row.p_here for row in rows if row.p_here]
    assert len(p_values) == 4
    assert [p.holm for p in p_values] == pytest.approx(holm([p.plain for p in p_values]))
    [alone] = both(grid()).comparisons
    assert alone.p_here is not None and p_values[0].plain == pytest.approx(alone.p_here.plain)
    declared = under_encoders({"small": 0, "large": 3}, compare=PAIRS[:1]).comparisons
    assert [(row.first, row.second) for row in declared if row.p_here and row.p_here.holm] == PAIRS[:1]
    assert len(declared) == 4


COSINE = ("cosine", ("scale", 10.0))


def row(label: str, cut: object = False, encoder: str | None = None, head: tuple[object, ...] = LINEAR) -> Compared:
    return Compared(label, label.startswith("erm"), encoder, head, cut)  # type: ignore[arg-type]


def test_the_erm_of_each_row_by_hand() -> None:
    heads = [row("erm"), row("erm cosine", head=COSINE), row("mix"), row("mix cosine", head=COSINE)]
    assert erm_of_each(heads) == {"erm cosine": "erm", "mix": "erm", "mix cosine": "erm cosine"}
    assert erm_of_each([row("mix"), row("sam")]) == {}
    assert erm_of_each([row("mix cosine", head=COSINE), row("erm")]) == {}, "no ERM has this head"
    assert erm_of_each([row("mix"), row("erm 2"), row("erm 1")]) == {"mix": "erm 2", "erm 1": "erm 2"}, "the first"


def test_a_method_has_the_erm_at_its_cut_and_erm_the_first_one() -> None:
    rows = [row("zero_shot"), row("erm"), row("erm 2", 2), row("mix", False), row("mix 2", 2), row("mix 4", 4)]
    assert erm_of_each(rows) == {"zero_shot": "erm", "erm 2": "erm", "mix": "erm", "mix 2": "erm 2", "mix 4": "erm"}


def test_without_an_erm_at_its_cut_a_method_has_the_one_of_its_augmentation() -> None:
    crops = [one._replace(augmentation="crops") for one in (row("erm all", True), row("mix 4", 4))]
    rows = [crops[0], row("erm"), row("erm 2", 2), crops[1], row("mix 3", 3), row("probe")]
    assert erm_of_each(rows) == {
        "erm all": "erm", "erm 2": "erm", "mix 4": "erm all", "mix 3": "erm", "probe": "erm",
    }  # fmt: skip
    viewed = row("erm")._replace(augmentation="crops")
    assert erm_of_each([row("erm 2", 2), viewed, row("probe")]) == {"erm 2": "erm", "probe": "erm"}, "the cut is first"


def test_erm_is_compared_with_the_one_on_the_frozen_encoder_wherever_it_stands() -> None:
    rows = [row("erm all", True), row("erm 2", 2), row("erm"), row("mix 4", 4)]
    assert erm_of_each(rows) == {"erm all": "erm", "erm 2": "erm", "mix 4": "erm all"}
    assert erm_of_each(rows[:2]) == {"erm 2": "erm all"}, "without one, the first"


def test_no_reference_is_of_another_encoder() -> None:
    rows = [row(f"{name} @ {own}", encoder=own) for own in ("small", "large") for name in ("erm", "mix")]
    assert erm_of_each(rows) == {"mix @ small": "erm @ small", "mix @ large": "erm @ large"}
    assert erm_of_each([row("erm @ a", encoder="a"), row("mix @ b", encoder="b"), row("mix @ a", encoder="a")]) == {
        "mix @ a": "erm @ a"
    }
