"""`protocol.seeds: auto`: a run grows by itself from look to look, until every row is settled."""

import json
import logging
from pathlib import Path

import pytest
import yaml

from xdm_ft import experiment
from xdm_ft.cli.parser import main
from xdm_ft.cli.validate import validate
from xdm_ft.experiment import run
from xdm_ft.experiment.results import read_results
from xdm_ft.experiment.resume import keep_choices_of_run
from xdm_ft.recipe.check import load
from xdm_ft.recipe.settings import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_folder")]
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


def recipe(*overrides):
    Path("tiny.yaml").write_text(RECIPE)
    return load("tiny.yaml", [*overrides])


def results():
    return json.loads((RUN / "results.json").read_text())


def check(written, seeds, looks=None, grown=None):
    """The seeds in recipe.yaml, those of the gradient methods, and how many seeds each look and generation had."""
    assert yaml.safe_load((RUN / "recipe.yaml").read_text())["protocol"]["seeds"] == written
    for method in ("erm", "xdomainmix"):
        assert [r["seed"] for r in results()["runs"] if r["method"] == method] == [*range(seeds)]
    assert results()["recipe"]["protocol"]["seeds"] == [*range(seeds)]
    assert looks is None or [len(look["seeds"]) for look in results()["looks"]] == looks
    assert grown is None or [len(earlier["seeds"]) for earlier in results()["grown_from"]] == grown


def killed(*_):
    raise KeyboardInterrupt


def test_a_wide_margin_settles_all_rows_at_the_first_look_also_of_a_run_with_a_few_seeds():
    run(recipe("protocol.seeds=3"))
    check([0, 1, 2], 3)
    run(recipe())
    check("auto", 5, looks=[3, 5])
    zero_shot, erm, *_ = results()["runs"]
    assert [*erm][:4] == ["method", "encoder", "trainable", "test_domains"]
    assert (erm["encoder"], erm["trainable"]) == ("demo", False) and "deterministic" not in erm
    assert (zero_shot["encoder"], zero_shot["deterministic"], zero_shot["seed"]) == ("demo", True, 0)
    run(recipe("protocol.seeds=6"))
    check([*range(6)], 6)


def test_rows_that_stay_unsettled_get_all_looks_also_after_kills(monkeypatch, caplog, capsys):
    caplog.set_level(logging.INFO, logger="xdm_ft")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Recipe, "next_seeds", killed)  # after the first look's results are written
        run(recipe(SMALL))
    check("auto", 5, looks=[5])
    first = results()["runs"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        summary_of, count = experiment.results.summary_of, iter(range(2))
        patch.setattr(
            experiment.results, "summary_of", lambda *args: summary_of(*args) if next(count) == 0 else killed()
        )
        run(recipe(SMALL))  # after the second look's models are trained
    assert results()["recipe"]["protocol"]["seeds"] == [*range(10)]
    models = [record | {"files": None} for record in results()["runs"]]  # those that models share come with the summary
    assert first[1] | {"files": None} in models
    kept = keep_choices_of_run(recipe(SMALL)).protocol.seeds
    assert len(kept) == 10 and [*kept] == validate(recipe(SMALL)).document["recipe"]["protocol"]["seeds"]

    caplog.clear()
    run(recipe(SMALL))
    assert "seeds: not every row is settled; goes on to 20 seeds" in caplog.messages
    check("auto", 20, looks=[5, 10, 20], grown=[5, 10])
    finished = (RUN / "results.json").read_bytes()
    for again in (recipe(SMALL), load(str(RUN / "recipe.yaml"), []), recipe(SMALL, "protocol.seeds=20")):
        assert run(again).records == read_results(RUN).records, "nothing is trained again"
        assert (RUN / "results.json").read_bytes() == finished
    capsys.readouterr()
    assert main(["analyse", str(RUN), "--json"]) == 0
    assert {m["seed"] for m in json.loads((RUN / "analysis.json").read_text())["models"]} == {*range(20)}
