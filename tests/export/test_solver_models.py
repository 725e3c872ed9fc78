"""Heads that are no linear map: a run of kNN and prototypes, its files, and its models in use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from exported import RUN, choice_of, exported, held_out, recorded, run

from xdm_ft.cli.parser import main
from xdm_ft.export.choose import Choice
from xdm_ft.export.predictor import Model, load
from xdm_ft.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("small_pacs")
METHODS = "methods=[erm, {name: knn, neighbours: [1, 3]}, prototypes]"


def assert_same(model: Model, expected: np.ndarray) -> None:
    np.testing.assert_allclose(model.predict_proba(held_out()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_every_way_to_a_model_gives_the_recorded_probabilities() -> None:
    found = run(METHODS, "protocol.seeds=2", "protocol.final_fit=true")
    records = [record for record in found["runs"] if record["method"] in ("knn", "prototypes")]
    assert len(records) == 4 and {row["method"] for row in found["summary"]} >= {"knn", "prototypes"}
    for record in records:
        choice = choice_of(record)
        assert_same(load(RUN, choice=choice), recorded(record))
        assert_same(exported(choice, f"{record['method']}{record['seed']}"), recorded(record))
    assert records[0]["hparams"] == {"neighbours": [1, 3], "temperatures": [0.03, 0.07, 0.2]}
    assert records[0]["selected"]["train_val"]["k"] in (1, 3)
    versus = {row["method"]: row["versus_erm"] for row in found["summary"] if row["selection"] == "train_val"}
    assert versus["knn"] is not None and versus["prototypes"] is not None


@pytest.mark.slow
def test_an_ensemble_is_the_mean_of_its_logits_and_retraining_gives_the_same_bits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = run(METHODS, "protocol.seeds=2")
    of_knn = [record for record in found["runs"] if record["method"] == "knn"]
    together = exported(Choice("knn", ("photo",)), ensemble=True)
    logits = np.mean([np.log(recorded(record)) for record in of_knn], axis=0)
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert_same(together, expected)
    assert "ensemble of 2 heads" in Path("model/README.md").read_text()
    assert main(["retrain", str(RUN), "knn", "photo", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rules"]["train_val"]["same_bits"] is True


def test_the_head_of_a_solver_is_no_choice_and_no_head_of_other_methods() -> None:
    for methods, problem in (
        ("[{name: knn, head: linear}]", "methods.0.head: knn computes a neighbours head directly; leave head out"),
        ("[{name: prototypes, head: mlp}]", "prototypes computes a linear head directly; leave head out"),
        ("[{name: erm, head: neighbours}]", "neighbours is computed by a solver, no gradient trains it"),
        ("[knn+swad]", "knn takes no gradient steps, so +swad has no effect"),
    ):
        with pytest.raises(UserError) as fault:
            run(f"methods={methods}")
        assert problem in str(fault.value)


@pytest.mark.slow
def test_the_resolved_recipe_of_a_solver_is_read_again() -> None:
    run("methods=[{name: knn, neighbours: [3], temperatures: 0.1}]")
    resolved = json.loads((RUN / "results.json").read_text())["recipe"]
    assert resolved["methods"][0]["head"] == "neighbours"
    assert (
        run("methods=[{name: knn, neighbours: [3], temperatures: 0.1}, erm]")["recipe"]["methods"][0]["name"] == "knn"
    )
