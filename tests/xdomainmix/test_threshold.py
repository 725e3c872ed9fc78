"""The cycle of τ_d, and where the published code departs from it."""

import json
from pathlib import Path

import pytest

from xdm_ft.xdomainmix import domain_quantile

RECORDED = json.loads((Path(__file__).resolve().parents[1] / "golden" / "threshold_schedule.json").read_text())


def test_five_stages_of_n_steps_then_again() -> None:
    cycle = [0.9, 0.9, 0.9, 0.8, 0.8, 0.8, 0.7, 0.7, 0.7, 0.6, 0.6, 0.6, 0.5, 0.5, 0.5]
    assert [domain_quantile(step, 3) for step in range(45)] == cycle * 3


def test_last_stage_is_stop_even_where_drop_does_not_divide() -> None:
    assert [domain_quantile(step, 1, drop=0.25) for step in range(4)] == [0.9, 0.65, 0.5, 0.9]
    assert [domain_quantile(step, 1, start=0.5, stop=0.5) for step in range(2)] == [0.5, 0.5]


def settings_of(key: str) -> tuple[float, float, float, int]:
    start, floor, change, every = (part.split("=")[1] for part in key.split())
    return float(start), float(floor), float(change), int(every)


def test_the_published_code_holds_a_half_twice() -> None:
    """It lowers a float and compares it with 0.5: after 0.5000000000000001 comes 0.5, a sixth stage. The paper has
    five, and so have we."""
    recorded = RECORDED["start=0.9 floor=0.5 change=0.1 every=3"]
    start, stop, drop, every = settings_of("start=0.9 floor=0.5 change=0.1 every=3")
    ours = [domain_quantile(step, every, start, stop, drop) for step in range(len(recorded))]
    assert ours[:15] == pytest.approx(recorded[:15], abs=1e-12)
    assert recorded[12:18] == [0.5000000000000001] * 3 + [0.5] * 3
    assert ours[15:18] == [0.9] * 3 != recorded[15:18]


def test_other_recorded_schedules_agree() -> None:
    others = [key for key in RECORDED if "change=0.1 " not in key]
    assert len(others) == 3
    for key in others:
        start, stop, drop, every = settings_of(key)
        ours = [domain_quantile(step, every, start, stop, drop) for step in range(len(RECORDED[key]))]
        assert ours == pytest.approx(RECORDED[key], abs=1e-12), key


@pytest.mark.parametrize(
    "arguments", [{"step": -1, "every": 1}, {"step": 0, "every": 0}, {"step": 0, "every": 1, "stop": 0.95}]
)
def test_refused(arguments: dict) -> None:
    with pytest.raises(ValueError):
        domain_quantile(**arguments)
