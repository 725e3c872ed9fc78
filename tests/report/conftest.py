"""Three runs that all tests of reports share: none changes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from canned_runs import ALPHAS, label_curve, run_in_memory, write_run
from example_runs import comparison, run_of, set_recipe, whole, with_comparisons

from xdm_ft.report.written import write_page
from xdm_ft.results.run import Run
from xdm_ft.results.table import PValue

EXAMPLE = Path(__file__).parent / "results_example.json"


@pytest.fixture
def results() -> dict[str, Any]:
    """results.json: two rules, failed and skipped models, and a name with signs."""
    return whole(json.loads(EXAMPLE.read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def example() -> Run:
    rows = [
        comparison("xdomainmix", "erm", 0.07, "better", "better", p_here=PValue(0.0041, 0.0082)),
        comparison("zero_shot", "erm", 0.0, p_here=PValue(0.00003, 1.0), p_elsewhere=None, equal_within=0.01),
        comparison("zero_shot", "xdomainmix", -0.07, "no verdict", error=None),
    ]
    return run_of(with_comparisons(json.loads(EXAMPLE.read_text(encoding="utf-8")), *rows))


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A directory with predictions and its page."""
    run = write_run(tmp_path_factory.mktemp("runs") / "made_up", label_curve=label_curve())
    set_recipe(run, report={"seeds_averaged": True})
    write_page(run)
    return run


@pytest.fixture
def searched() -> Run:
    """A run in memory with a search, curves, WiSE-FT and an analysis."""
    return run_in_memory(("erm", "xdomainmix", "wise_ft"), trials=8, alphas=ALPHAS)
