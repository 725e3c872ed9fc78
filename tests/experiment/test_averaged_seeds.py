"""Seeds averaged, from stored probabilities: against mean logits, and against the exported ensemble."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exported import RUN, exported, held_out, run

from xdm_ft.export.choose import Choice
from xdm_ft.report.finished import read_run
from xdm_ft.report.sections.results import averaged_log_probabilities


def softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    found: np.ndarray = raised / raised.sum(-1, keepdims=True)
    return found


def test_the_mean_of_log_probabilities_is_the_mean_of_logits() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 50, 4), scale=5)  # seeds, images, classes
    found = averaged_log_probabilities([softmax(one).astype(np.float32) for one in logits])
    np.testing.assert_allclose(softmax(found), softmax(logits.mean(0)), rtol=1e-4, atol=1e-7)
    extreme = averaged_log_probabilities([softmax(np.array([[0.0, 500.0]])).astype(np.float32)] * 2)
    assert np.isfinite(extreme).all() and extreme.argmax() == 1


def rows_of_table() -> dict[str, list[str]]:
    """{method: cells} of the table in results.md."""
    text = (RUN / "results.md").read_text().partition("## Seeds averaged")[2].partition("\n#")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: line[1:] for line in lines[1:]}


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
def test_the_row_is_the_exported_ensemble() -> None:
    methods = "methods=[erm, knn, {name: erm, head: mlp, label: mlp}]"
    found = run(methods, "protocol.seeds=3", "report={page: false, seeds_averaged: true}")
    rows, labels = rows_of_table(), []
    assert rows.keys() == {f"{method}, seeds averaged" for method in ("erm", "knn", "mlp")}
    for method in ("erm", "knn", "mlp"):
        records = [record for record in found["runs"] if record["method"] == method]
        model = exported(Choice(method, tuple(records[0]["test_domains"])), method, ensemble=True)
        labels = [Path(path).parent.name for path in held_out()]
        right = np.mean([one == label for one, label in zip(model.predict(held_out()), labels, strict=True)])
        single = np.mean([record["selected"]["train_val"]["metrics"]["test"]["accuracy"] for record in records])
        shown = [f"{100 * right:.1f}", f"{100 * right:.1f}", f"{100 * single:.1f}", f"{100 * (right - single):+z.1f}"]
        assert rows[f"{method}, seeds averaged"] == ["3", *shown]


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
def test_only_on_request_and_with_two_seeds() -> None:
    run("methods=[erm]", "protocol.seeds=2")
    assert "Seeds averaged" not in (RUN / "results.md").read_text()
    run("methods=[erm]", "name=one", "protocol.seeds=1", "report={page: false, seeds_averaged: true}")
    assert "Seeds averaged" not in Path("output/one/results.md").read_text()


@pytest.mark.usefixtures("small_pacs")
def test_probabilities_that_were_not_kept_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xdm_ft.experiment.models.LARGEST", 1)
    run("methods=[erm]", "protocol.seeds=2", "report={page: false, seeds_averaged: true}")
    assert "no row: probabilities of all classes were not kept" in (RUN / "results.md").read_text()
    assert len(read_run(RUN).records) == 2
