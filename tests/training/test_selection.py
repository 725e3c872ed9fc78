"""Which step is kept."""

import dataclasses
import math

import pytest
import torch
from bank_problems import job_of

from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.tensors import Criteria
from xdm_ft.training.selection import Selector, evaluation_steps, external_values, rows_of_rules


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(step)}


def selected_step(values: list[float], metric: str = "accuracy", first_selectable_step: int = 1) -> int:
    selector = Selector(Criteria(("train_val",), metric), first_selectable_step)
    for step, value in enumerate(values, start=1):
        selector.offer(step, {"train_val": value}, lambda step=step: state_of(step))
    selected = selector.selected["train_val"]
    assert int(selected.state["step"]) == selected.step
    return selected.step


def test_the_best_step_is_selected_and_the_first_of_equals() -> None:
    assert selected_step([0.1, 0.5, 0.4, 0.5]) == 2


def test_lower_is_better_for_losses() -> None:
    assert selected_step([0.9, 0.2, 0.3, 0.2], metric="nll") == 2


def test_steps_of_the_warm_up_are_never_selected() -> None:
    assert selected_step([0.9, 0.9, 0.1, 0.2], first_selectable_step=3) == 4


def test_an_undefined_metric_is_never_selected() -> None:
    assert selected_step([math.nan, 0.2, math.nan], metric="auroc") == 2


def test_rules_select_apart_and_a_state_is_made_only_where_needed() -> None:
    made = []

    def state(step: int) -> dict[str, torch.Tensor]:
        made.append(step)
        return state_of(step)

    selector = Selector(Criteria(("train_val", "oracle"), "accuracy"))
    for step, (val, oracle) in enumerate([(0.5, 0.5), (0.4, 0.6), (0.3, 0.2)], start=1):
        selector.offer(step, {"train_val": val, "oracle": oracle}, lambda step=step: state(step), {"l2": step})
    assert {rule: picked.step for rule, picked in selector.selected.items()} == {"train_val": 1, "oracle": 2}
    assert selector.selected["oracle"].hparams == {"l2": 2}
    assert made == [1, 2]
    assert selector.nothing_selected() is None


def test_of_tied_steps_oracle_takes_the_one_that_the_other_rule_picks() -> None:
    values = [(0.5, 0.6), (0.4, 0.9), (0.7, 0.9), (0.6, 0.9), (0.8, 0.8), (0.7, 0.9)]

    def steps(rules: tuple[str, ...], upto: int, metric: str = "accuracy") -> dict[str, int]:
        sign = -1 if metric == "nll" else 1
        selector = Selector(Criteria(rules, metric))
        for step, (val, oracle) in enumerate(values[:upto], start=1):
            offered = {"train_val": sign * val, "oracle": sign * oracle}
            selector.offer(step, {rule: offered[rule] for rule in rules}, lambda step=step: state_of(step))
        assert all(int(picked.state["step"]) == picked.step for picked in selector.selected.values())
        return {rule: picked.step for rule, picked in selector.selected.items()}

    for rules in (("train_val", "oracle"), ("oracle", "train_val")):
        for metric in ("accuracy", "nll"):
            assert steps(rules, 4, metric) == {"train_val": 3, "oracle": 3}, "steps 2, 3 and 4 are equal for oracle"
        assert steps(rules, 6) == {"train_val": 5, "oracle": 3}, "step 5 is no tie: oracle stays"
    assert steps(("oracle",), 6) == {"oracle": 2}, "without another rule the first"


def test_a_tie_that_oracle_follows_resets_no_patience() -> None:
    selector = Selector(Criteria(("oracle", "train_val"), "accuracy"), patience=2)
    for step, val in ((1, 0.5), (2, 0.6), (3, 0.7)):
        selector.offer(step, {"oracle": 0.9, "train_val": val}, lambda step=step: state_of(step))
    assert selector.selected["oracle"].step == 3 and selector.stopped_at == 3


def test_a_resumed_oracle_follows_too() -> None:
    first, second = (Selector(Criteria(("train_val", "oracle"), "accuracy")) for _ in range(2))
    first.offer(1, {"train_val": 0.5, "oracle": 0.9}, lambda: state_of(1))
    second.load_state(first.state())
    second.offer(2, {"train_val": 0.6, "oracle": 0.9}, lambda: state_of(2))
    assert second.selected["oracle"].step == 2


def test_nothing_selected_says_which_rule_and_why() -> None:
    selector = Selector(Criteria(("train_val", "oracle"), "auroc"), first_selectable_step=5)
    selector.offer(5, {"train_val": math.nan, "oracle": 0.5}, lambda: state_of(5))
    reason = selector.nothing_selected()
    assert reason is not None and "train_val" in reason and "oracle" not in reason
    assert "auroc" in reason and "from step 5 on" in reason


def test_only_the_recipes_own_rule_must_select() -> None:
    selector = Selector(Criteria(("train_val", "oracle"), "auroc"))
    selector.offer(1, {"train_val": 0.5, "oracle": math.nan}, lambda: state_of(1))
    assert selector.nothing_selected() is None and set(selector.selected) == {"train_val"}


def test_the_course_holds_what_every_rule_saw_even_in_the_warm_up() -> None:
    selector = Selector(Criteria(("train_val",), "accuracy"), first_selectable_step=3)
    for step, value in ((2, 0.9), (4, 0.5)):
        selector.offer(step, {"train_val": value}, lambda: state_of(0))
    assert selector.course == {"train_val": {2: 0.9, 4: 0.5}}


def test_patience_ends_after_so_many_evaluations_without_a_better_value() -> None:
    selector = Selector(Criteria(("train_val", "oracle"), "accuracy"), first_selectable_step=2, patience=2)
    for step, value in ((1, 0.9), (2, 0.5), (3, 0.4), (4, 0.6), (5, 0.6)):
        selector.offer(step, {"train_val": value, "oracle": step / 10}, lambda step=step: state_of(step))
        assert selector.stopped_at is None
    selector.offer(6, {"train_val": math.nan, "oracle": 0.9}, lambda: state_of(6))
    assert selector.stopped_at == 6 and selector.selected["train_val"].step == 4


def test_values_known_beforehand_look_at_no_rows() -> None:
    job = dataclasses.replace(job_of(), external_values={"cross_domain": {1: 0.5, 3: 0.7}})
    assert set(rows_of_rules(job, ["cross_domain", "oracle"])) == {"oracle"}
    assert external_values(job, 3) == {"cross_domain": 0.7}
    assert math.isnan(external_values(job, 2)["cross_domain"])


@pytest.mark.parametrize(
    "steps, every, expected",
    [
        (10, 4, [4, 8, 10]),
        (8, 4, [4, 8]),
        (3, 100, [3]),
        (1, None, [1]),
        (100, None, [*range(5, 101, 5)]),
        (30, None, [*range(1, 31)]),
    ],
)
def test_evaluation_steps(steps: int, every: int | None, expected: list[int]) -> None:
    assert evaluation_steps(steps, every) == expected


def test_a_rule_without_images_is_refused() -> None:
    job = job_of()
    assert rows_of_rules(job, ["oracle"])["oracle"] is job.split.evaluation["test_val"]
    with pytest.raises(UserError, match=r"protocol\.selection: \"val_domain\" needs images.*d0 is held out"):
        rows_of_rules(job, ["train_val", "val_domain"])
