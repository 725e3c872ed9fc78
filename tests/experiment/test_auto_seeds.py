"""`protocol.seeds: auto`: a run grows by itself from look to look, until every row is settled."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from xdm_ft.cli.parser import main
from xdm_ft.cli.validate import validate
from xdm_ft.experiment import run, summary
from xdm_ft.experiment.results import keep_choices_of_run, read_results
from xdm_ft.recipe.check import load
from xdm_ft.recipe.settings import Recipe

pytestmark = pytest.mark.slow
RUN = Path("output/tiny")
RECIPE = """\
name: tiny
data: {name: digits}
protocol: {name: leave_one_domain_out, test_domains: [blurred], seeds: auto}
encoder: {name: open_clip, model: demo, weights: demo}
features: {workers: 0}
methods: [zero_shot, erm, {name: xdomainmix, warmup_steps: 2}]
training: {steps: 4, batch_size: 4, evaluate_every: 2, lr: 0.01}
report: {page: false, margin: 100}
"""
SMALL = "report.margin=1.0e-6"  # so that only a verdict could settle a row


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe(*overrides: str) -> Recipe:
    Path("tiny.yaml").write_text(RECIPE)
    return load("tiny.yaml", [*overrides])


def results() -> Any:
    return json.loads((RUN / "results.json").read_text())


def seeds_of(method: str) -> list[int]:
    return [record["seed"] for record in results()["runs"] if record["method"] == method]


def written() -> Any:
    return yaml.safe_load((RUN / "recipe.yaml").read_text())["protocol"]["seeds"]


def killed(*args: Any) -> Any:
    raise KeyboardInterrupt


def test_a_wide_margin_settles_all_rows_at_the_first_look() -> None:
    run(recipe())
    assert written() == "auto" and results()["recipe"]["protocol"]["seeds"] == [*range(5)]
    assert seeds_of("erm") == seeds_of("xdomainmix") == [*range(5)] and seeds_of("zero_shot") == [0]
    assert [look["seeds"] for look in results()["looks"]] == [[*range(5)]]
    zero_shot, erm, *_ = results()["runs"]
    assert [*erm][:4] == ["method", "encoder", "trainable", "test_domains"]
    assert (erm["encoder"], erm["trainable"]) == ("demo", False) and "deterministic" not in erm
    assert (zero_shot["encoder"], zero_shot["deterministic"]) == ("demo", True)


def test_rows_that_stay_unsettled_get_all_looks_also_after_kills(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, logger="xdm_ft")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Recipe, "next_seeds", killed)  # after the first look's results are written
        run(recipe(SMALL))
    assert written() == "auto" and seeds_of("erm") == [*range(5)] and results()["looks"]
    first = (RUN / "results.json").read_bytes()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        summary_of = summary.summary_of
        count = iter(range(2))
        patch.setattr(summary, "summary_of", lambda *args: summary_of(*args) if next(count) == 0 else killed())
        run(recipe(SMALL))  # after the second look's models are trained
    assert written() == "auto" and results()["recipe"]["protocol"]["seeds"] == [*range(10)]
    assert json.loads(first)["runs"][1] in results()["runs"]
    assert [*keep_choices_of_run(recipe(SMALL)).protocol.seeds] == validate(recipe(SMALL)).document["recipe"][
        "protocol"
    ]["seeds"]
    assert len(keep_choices_of_run(recipe(SMALL)).protocol.seeds) == 10

    caplog.clear()
    run(recipe(SMALL))
    assert "seeds: not every row is settled; goes on to 20 seeds" in caplog.messages
    assert written() == "auto" and results()["recipe"]["protocol"]["seeds"] == [*range(20)]
    assert seeds_of("erm") == seeds_of("xdomainmix") == [*range(20)]
    assert [len(look["seeds"]) for look in results()["looks"]] == [5, 10, 20]
    assert [len(earlier["seeds"]) for earlier in results()["grown_from"]] == [5, 10]

    finished = (RUN / "results.json").read_bytes()
    for again in (recipe(SMALL), load(str(RUN / "recipe.yaml"), []), recipe(SMALL, "protocol.seeds=20")):
        assert run(again).records == read_results(RUN).records, "nothing is trained again"
        assert (RUN / "results.json").read_bytes() == finished
    capsys.readouterr()
    assert main(["retrain", str(RUN), "xdomainmix", "blurred", "17", "0"]) == 0
    assert "weights the same bits" in capsys.readouterr().out
    assert main(["analyse", str(RUN), "--json"]) == 0
    assert json.loads((RUN / "analysis.json").read_text())["models"]
    assert {model["seed"] for model in json.loads((RUN / "analysis.json").read_text())["models"]} == {*range(20)}


def test_a_run_with_a_few_seeds_goes_on_with_looks_and_back() -> None:
    run(recipe("protocol.seeds=3"))
    assert written() == [0, 1, 2]
    run(recipe())
    assert written() == "auto" and seeds_of("erm") == [*range(5)]
    run(recipe("protocol.seeds=6"))
    assert written() == [*range(6)] and seeds_of("erm") == [*range(6)]
