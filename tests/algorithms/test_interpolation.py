"""WiSE-FT: weights between two ends, and the pick among them."""

from __future__ import annotations

import math

import pytest
import torch

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.wise_ft import ALPHAS, WiseFT, interpolate
from xdm_ft.core import Criteria, Task
from xdm_ft.training import Selected
from xdm_ft.training.selection import best_finish

START = {"w": torch.tensor([0.0, 2.0]), "count": torch.tensor(3)}
END = {"w": torch.tensor([1.0, -2.0]), "count": torch.tensor(7)}


def test_by_hand_and_exact_at_both_ends() -> None:
    assert torch.equal(interpolate(START, END, 0.25)["w"], torch.tensor([0.25, 1.0]))
    assert torch.equal(interpolate(START, END, 0.0)["w"], START["w"])
    assert torch.equal(interpolate(START, END, 1.0)["w"], END["w"])
    assert interpolate(START, END, 0.25)["count"] == 7


def line(share: float | str, metric: str = "accuracy", rule: str = "train_val", **worth: float) -> Selected | None:
    """The split `train_val` is worth most at w[0] = 0.3 and 0.7; `test` grows with w[0]; `test_val` as `worth` says."""

    def evaluate(selected: Selected) -> dict[str, float]:
        alpha = float(selected.state["w"][0])
        peak = 1 - min(abs(alpha - 0.3), abs(alpha - 0.7))
        own = {"train_val": worth.get("train_val", round(peak, 6)), "test": worth.get("test", alpha)}
        return own | {"test_val": worth.get("test_val", alpha)}

    setup = Setup(Task(("a", "b"), ("c",)), width=2, steps=9, seed=0)
    criteria = Criteria(("train_val", "oracle"), metric)
    offered = WiseFT(setup, alpha=share).finish(START, END)  # type: ignore[arg-type]
    return best_finish(Selected(9, END, {"from": 1}), offered, rule, criteria, evaluate)


def test_the_best_on_the_split_that_the_rule_looks_at_and_the_whole_curve() -> None:
    picked = line("select")
    assert picked is not None and picked.step == 9 and picked.hparams == {"from": 1, "alpha": 0.3}
    assert torch.equal(picked.state["w"], interpolate(START, END, 0.3)["w"])
    assert [point["alpha"] for point in picked.curve] == list(ALPHAS) == [i / 10 for i in range(11)]
    assert picked.curve[7]["train_val"] == picked.curve[3]["train_val"] == 1.0
    assert picked.curve[10]["test"] == 1.0  # the best on the test domain is not picked
    worst = line("select", metric="nll")
    assert worst is not None and worst.hparams["alpha"] == 0.0
    assert worst.curve[0]["train_val"] == worst.curve[10]["train_val"]


def test_of_tied_shares_oracle_takes_the_one_that_the_other_rule_picks() -> None:
    tied, apart = line("select", rule="oracle", test_val=0.5), line("select", rule="oracle")
    assert tied is not None and tied.hparams["alpha"] == 0.3
    assert apart is not None and apart.hparams["alpha"] == 1.0, "its own images decide if they can"


@pytest.mark.parametrize("share", [0.0, 0.5, 0.25, 1.0])
def test_a_given_share(share: float) -> None:
    picked = line(share)
    assert picked is not None and picked.hparams["alpha"] == share
    assert torch.equal(picked.state["w"], interpolate(START, END, share)["w"])
    assert len(picked.curve) == len({*ALPHAS, share})


def test_what_is_not_defined_is_null_and_not_picked() -> None:
    assert line("select", train_val=math.nan) is None
    picked = line(0.5, test=math.inf)
    assert picked is not None and all(point["test"] is None for point in picked.curve)
