"""What selection picks among trials, methods and models; test results have no say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from xdm_ft.core import ModelKey, Score
from xdm_ft.results.model import Pick, Record, Status
from xdm_ft.results.table import SummaryRow
from xdm_ft.results.trials import MethodChoice, choose_method, pick_trials, selection_values

VIT: dict[str, Any] = {"encoder": "vit", "trainable": False}  # of a record


def record(
    method: str, seed: int, value: float | None, status: Status = "ok", held: str = "a", trial: int = 0
) -> Record:
    picked = {"train_val": Pick(step=1, weights="", metrics={}, value=value)} if status == "ok" else {}
    return Record(ModelKey(method, (held,), seed, trial), {}, status, selected=picked, **VIT)


def models(method: str, *values: float, nll: float | None = None, **about: Any) -> list[Record]:
    """One model per held-out set, of seed 0."""
    found = []
    for held, value in zip("abcdefgh", values, strict=False):
        made = record(method, 0, value, held=held)
        picked = {"train_val": replace(made.selected["train_val"], validation_nll=nll)}
        found.append(replace(made, selected=picked, **about))
    return found


def chosen_of(records: list[Record], metric: str = "accuracy") -> MethodChoice:
    found = choose_method(records, summary(**{one.method: 0.1 for one in records}), "train_val", metric)
    assert found is not None
    return found


def summary(**means: float | None) -> list[SummaryRow]:
    about: dict[str, Any] = {"selection": "train_val", "metric": "accuracy", "split": "test", "protocol": "", "n": 1}
    rest: dict[str, Any] = dict.fromkeys(("std", "stderr", "spread_as_published", "interval"))
    rest |= {"augmentation": "none", **VIT}
    return [SummaryRow(name, mean=mean, per_test_domain={}, budget={}, **about, **rest) for name, mean in means.items()]


def test_test_means_have_no_say() -> None:
    runs = [record("erm", 0, 0.9), record("erm", 1, 0.7), record("irm", 0, 0.75), record("irm", 1, 0.75)]
    values = selection_values(runs, summary(irm=0.99, erm=0.2), "train_val", "accuracy")
    assert values == {"irm": 0.75, "erm": pytest.approx(0.8)}
    chosen = {metric: chosen_of(runs, metric=metric) for metric in ("accuracy", "nll")}
    assert {metric: (one.best, one.values) for metric, one in chosen.items()} == {
        "accuracy": ("erm", values), "nll": ("irm", values)
    }  # fmt: skip


def test_only_methods_with_a_value_in_every_run_can_be_chosen() -> None:
    runs = [record("erm", 0, 0.5), record("irm", 0, 0.9), record("irm", 1, 0.9, "failed"), record("rsc", 0, None)]
    rows = summary(erm=0.1, irm=0.1, rsc=0.1)
    assert selection_values(runs, rows, "train_val", "accuracy") == {"erm": 0.5}
    runs = [record("erm", 0, 0.5, trial=1), record("erm", 0, 0.5, "failed", trial=0)]
    assert selection_values(runs, rows, "train_val", "accuracy") == {"erm": 0.5}
    assert selection_values(runs, summary(erm=None), "train_val", "accuracy") == {}
    troubled = [replace(row, reason="auroc is not defined") for row in summary(erm=0.5)]
    assert selection_values(runs, troubled, "train_val", "accuracy") == {}


def test_of_tied_trials_oracle_takes_the_one_that_the_other_rule_picks() -> None:
    def trial(number: int, val: float | None, oracle: float | None) -> Record:
        values = {"train_val": val, "oracle": oracle}
        picks = {rule: Pick(step=1, weights="", metrics={}, value=value) for rule, value in values.items()}
        return Record(ModelKey("erm", ("a",), 0, number), {}, "ok", selected=picks, **VIT)

    trials = [trial(0, 0.5, 0.9), trial(1, 0.7, 0.9), trial(2, 0.8, 0.6), trial(3, 0.6, None)]
    assert pick_trials(trials[:2], "oracle", "accuracy") == [trials[1]], "both are equal for oracle"
    assert pick_trials(trials, "oracle", "accuracy") == [trials[0]], "trial 2, which train_val picks, is no tie"
    assert pick_trials(trials, "train_val", "accuracy") == [trials[2]]
    alone = [replace(one, selected={"oracle": one.selected["oracle"]}) for one in trials]
    assert pick_trials(alone, "oracle", "accuracy") == [alone[0]], "without another rule the first"


def test_the_trial_of_the_best_value_or_the_first() -> None:
    trials = [record("erm", 0, None), record("erm", 0, 0.6, trial=1), record("erm", 0, 0.8, trial=2)]
    assert pick_trials(trials, "train_val", "accuracy") == [trials[2]]
    assert pick_trials(trials, "train_val", "nll") == [trials[1]]
    assert pick_trials(trials[:1], "train_val", "accuracy") == trials[:1]


# the differences to irm are 0.2, −0.1, 0.1, 0: mean 0.05, s = 0.12910, s / √4 = 0.06455
IRM, ERM = (0.9, 0.8, 0.8, 0.7), (0.7, 0.9, 0.7, 0.7)


def test_of_the_methods_within_one_standard_error_the_lowest_validation_nll() -> None:
    runs = models("irm", *IRM, nll=0.5) + models("erm", *ERM, nll=0.4)
    found = chosen_of(runs)
    assert (found.method, found.best, found.within_reach) == ("erm", "irm", ("irm", "erm"))
    assert str(found) == (
        "erm is chosen of 2 methods by the lowest validation NLL among the 2 within one standard error of the best "
        "accuracy of train_val (irm 80.0); erm has 75.0; no test result was read for this choice"
    )
    clear = chosen_of([*runs, *models("mixup", 0.1, 0.2, 0.1, 0.3, nll=0.3), *models("fish", 1.0, 1.0, 1.0, 0.9)])
    assert str(clear) == (
        "fish is chosen of 4 methods by the best accuracy of train_val (fish 97.5); no test result was read for this "
        "choice"
    )
    for lower, expected in ((0.0145, "erm"), (0.0146, "irm")):  # a difference of 0.0645, and of 0.0646
        lowered = models("erm", *(value - lower for value in ERM), nll=0.4)
        assert chosen_of(models("irm", *IRM, nll=0.5) + lowered).method == expected, lower
    assert chosen_of(models("irm", *IRM, nll=0.4) + models("erm", *ERM, nll=0.5)).method == "irm"
    lower = models("irm", *(1 - v for v in IRM), nll=0.5) + models("erm", *(1 - v for v in ERM), nll=0.4)
    assert (chosen_of(lower, "nll").best, chosen_of(lower, "nll").method) == ("irm", "erm"), "lower is better"
    close = chosen_of(models("irm", *IRM, nll=0.123456) + models("erm", *ERM, nll=0.123457))
    assert close.reason == "the lowest validation NLL (irm 0.123456, erm 0.123457)", "its digits show the difference"


def test_one_pair_gives_no_tolerance() -> None:
    assert chosen_of(models("irm", 0.9, nll=9.0) + models("erm", 0.89, nll=0.1)).within_reach == ("irm",)
    assert chosen_of(models("irm", 0.9, nll=9.0) + models("erm", 0.9, nll=0.1)).method == "erm", "equal values"
    assert choose_method([], [], "train_val", "accuracy") is None, "nothing there"
    alone = chosen_of(models("erm", 0.9))
    assert (alone.method, str(alone)) == ("erm", "erm is the only method with a value of train_val (erm 90.0)")


def test_without_validation_nll_the_fewest_settings_then_parameters_decide() -> None:
    tuned = models("irm", *IRM, nll=0.1, tuned_settings=21, trained_parameters=5)
    plain = models("erm", *ERM, trained_parameters=10)
    assert chosen_of(tuned + plain).method == "erm", "erm has no validation NLL"
    draws = [replace(one, key=one.key._replace(trial=trial), selected={}) for one in plain for trial in range(1, 22)]
    found = chosen_of([*tuned, *plain, *draws])
    assert (found.method, found.reason) == ("irm", "the fewest tuned settings (irm 21, erm 22)")
    assert chosen_of(models("irm", *IRM, trained_parameters=9) + plain).reason == (
        "the fewest trained parameters (irm 9, erm 10)"
    )
    assert chosen_of(models("irm", *IRM) + models("erm", *IRM)).reason == "the first place in the recipe"


def test_heads_of_training_features_are_chosen_only_if_nothing_else_is_there() -> None:
    neighbours = models("knn", *(0.99,) * 4, nll=0.01, training_features=2533)
    found = chosen_of(neighbours + models("erm", *ERM, nll=0.4))
    assert (found.method, found.within_reach, found.by_name_only) == ("erm", ("erm",), ("knn",))
    assert "knn 99.0" in str(found) and "chosen by name only" in str(found)
    assert chosen_of(neighbours).method == "knn"


def test_a_method_with_fewer_seeds_is_paired_where_both_have_a_model() -> None:
    """zero_shot has one seed, as its models would all be equal."""
    more = [replace(one, key=one.key._replace(seed=1)) for one in models("irm", *IRM, nll=0.5)]
    found = chosen_of([*models("irm", *IRM, nll=0.5), *more, *models("zero_shot", *ERM, nll=0.4)])
    assert found.method == "zero_shot" and found.within_reach == ("irm", "zero_shot")


def with_tests(method: str, *values: float, nll: float = 1.0, seeds: int = 1, **about: Any) -> list[Record]:
    """Models of each held-out set and seed with a test value; validation has the same value for all methods."""
    runs = []
    for held, value in zip("abcdefgh", values, strict=False):
        for seed in range(seeds):
            made = record(method, seed, 0.9, held=held)
            accuracy = value + (seed - (seeds - 1) / 2) * 0.1
            score = Score(accuracy, 0, 0, None, None, nll, 0, n=100, per_class_recall={}, per_domain={})
            pick = replace(made.selected["train_val"], metrics={"test": score})
            runs.append(replace(made, selected={"train_val": pick}, **about))
    return runs


def test_several_held_out_sets_choose_the_method() -> None:
    """By hand: a − b is 0.10, 0.02, −0.03, 0.03: mean 0.03, s = 0.05354, s/√4 = 0.02677."""
    a, b = with_tests("a", 0.60, 0.50, 0.40, 0.30, seeds=3), with_tests("b", 0.50, 0.48, 0.43, 0.27, nll=0.5, seeds=3)
    chosen = chosen_of(a + b)
    assert (chosen.method, chosen.within_reach) == ("a", ("a",))
    assert chosen.values == {"a": pytest.approx(0.45), "b": pytest.approx(0.42)}
    # without the first set: 0.02, −0.03, 0.03: mean 0.00667, s/√3 = 0.01856, so b's NLL decides
    assert chosen.at == {("a",): "b", ("b",): "b", ("c",): "a", ("d",): "b"}
    assert str(chosen) == (
        "a is chosen of 2 methods by the best accuracy of held-out results (a 45.0); the quoted value is from choices "
        "that did not see the domain"
    )
    assert chosen.to_json()["at"][2] == {"test_domains": ["c"], "method": "a"}
    near = chosen_of(a + with_tests("b", 0.53, 0.51, 0.46, 0.30, nll=0.5))  # the means are equal
    assert (near.method, near.reason) == ("b", "the lowest held-out NLL (a 1, b 0.5)")


def test_one_held_out_set_or_oracle_is_chosen_by_validation() -> None:
    runs = with_tests("a", 0.9) + with_tests("b", 0.1, nll=0.1)
    assert chosen_of(runs).at == {} and chosen_of(runs).method == "a", "the first place: validation has no NLL here"
    two = chosen_of(with_tests("a", 0.9, 0.2) + with_tests("b", 0.1, 0.8))
    assert two.at == {("a",): "b", ("b",): "a"}, "each by the other one"


def test_heads_with_training_features_are_chosen_by_name_only_in_every_set() -> None:
    held = with_tests("knn", 0.9, 0.9, 0.9, training_features=True)
    chosen = chosen_of(held + with_tests("erm", 0.5, 0.5, 0.5))
    assert (chosen.method, {*chosen.at.values()}, chosen.by_name_only) == ("erm", {"erm"}, ("knn",))
    incomplete = with_tests("mix", 0.9, 0.9)
    assert chosen_of(with_tests("erm", 0.5, 0.5, 0.5) + incomplete).method == "erm", "it lacks a set"
