"""What a real run writes into results.md and results.csv: budgets, published numbers, encoders, seeds averaged."""

import csv
from pathlib import Path

import miniature
import numpy as np
import pytest
import small_runs
from exported import exported, held_out, run
from small_runs import document

from xdm_ft.cli.run import run_recipe
from xdm_ft.export.choose import Choice
from xdm_ft.results.measured import log_probabilities
from xdm_ft.results.run import read_run
from xdm_ft.results.summary import DOMAINBED, WILDS
from xdm_ft.runtime.errors import signed

RUN = Path("output/small")
SHORT = ("methods=[linear_probe, erm, sam, {name: fish, label: peixe}]", "training={steps: 10, batch_size: 4}")
TABLE = "protocol.seeds=3", "report={page: false, seeds_averaged: true}"


def made(*overrides):
    """results.json and results.md of a run whose short table is printed."""
    ran = run_recipe(small_runs.recipe(*SHORT, *overrides))
    ran.show()
    assert ran.exit_status == 0
    return document(RUN), (RUN / "results.md").read_text()


@pytest.mark.slow
def test_pacs(small_pacs, capsys):
    results, text = made("protocol.seeds=2")
    evaluations = {row["method"]: row["budget"]["gradient_evaluations"] for row in results["summary"]}
    counts = {"linear_probe": 0, "erm": 10, "sam": 20, "peixe": 30}  # fish: a step for each of 3 training domains
    assert evaluations == {method: {"low": n, "high": n} for method, n in counts.items()}
    for row in results["summary"]:
        spread = {"kind": DOMAINBED.kind, "value": pytest.approx(row["stderr"] / 2**0.5)}  # ddof 0 of two seeds
        assert row["spread_as_published"] == spread
    assert "published: resnet50 (imagenet), fine-tuned" in text and "ours: test_vit, frozen" in text
    assert "accuracy over art_painting, cartoon, photo, sketch; ± is here" in " ".join(text.split())
    numbers = {"erm": "85.5 ± 0.2", "sam": "85.8 ± 0.2", "peixe (published: fish)": "85.5 ± 0.3"}
    for method, number in numbers.items():
        line = next(line for line in text.splitlines() if method in line and number in line)
        assert line.count("±") == 2
    assert "trained with different numbers of gradients" in text
    tables = text.split("## How to read")[0]
    assert tables.count("beside ours") == tables.count("the recipe's rule") == tables.count("CHEATING") == 1
    printed = capsys.readouterr().out
    assert (
        "too few, or too different, to say what a new one" in " ".join(printed.split())
        and "published" not in printed
        and "CHEATING" not in printed
    )


@pytest.mark.slow
def test_camelyon17(in_folder):
    miniature.camelyon17(in_folder / "data")
    official = "protocol={name: official, selection: val_domain, seeds: 2}"
    results, text = made("data={name: camelyon17, root: data}", official, "analyse=true")
    for row in results["summary"]:
        assert "; training loss averaged by domain; " in row["protocol"]
        assert row["spread_as_published"] == {"kind": WILDS.kind, "value": pytest.approx(row["std"])}
    assert "published: densenet121 (scratch), fine-tuned" in text and "published: clip vit-b/16, frozen" in text
    analysis = document(RUN, "analysis")
    roles = {domain["role"] for model in analysis["models"] for domain in model["calibration"]["domains"].values()}
    assert analysis["selection"] == "val_domain" and roles == {"validation", "test"}


@pytest.mark.slow
def test_two_encoders_at_two_cuts(small_pacs):
    recipe = small_runs.RECIPE.replace("encoder: {", "encoders:\n  - {label: vit, ").replace(
        "features:", "  - {name: timm, model: test_resnet, preprocessing: {size: 32}}\nfeatures:"
    )
    Path("two.yaml").write_text(recipe)
    rows = "methods=[erm, {name: erm, label: last, trainable: {blocks: 1}}, {name: sam, trainable: {blocks: 1}}]"
    overrides = [
        rows,
        "protocol.test_domains=[sketch]",
        "protocol.seeds=2",
        "training={steps: 2, batch_size: 2, evaluate_every: 2}",
    ]
    results = small_runs.results_of(small_runs.load("two.yaml", overrides))
    encoders = ("vit", "test_resnet")
    summary = [row for row in results["summary"] if row["selection"] == "train_val"]
    compared = [pair for pair in results["comparisons"] if pair["selection"] == "train_val"]
    assert [(pair["first"], pair["second"]) for pair in compared][:4] == [
        (f"{method} @ {encoder}", f"{erm} @ {encoder}")
        for encoder in encoders
        for method, erm in (("last", "erm"), ("sam", "last"))
    ]
    assert [(pair["first"], pair["second"]) for pair in compared if pair["second"].endswith(" @ test_resnet")][-3:] == [
        (f"{method} @ vit", f"{method} @ test_resnet") for method in ("erm", "last", "sam")
    ]
    means = {row["method"]: row["mean"] for row in summary}
    for pair in compared:
        assert pair["difference"] == pytest.approx(means[pair["first"]] - means[pair["second"]])
    cuts = {(row["encoder"], str(row["trainable"])) for row in summary}
    assert cuts == {(encoder, cut) for encoder in encoders for cut in ("False", "{'blocks': 1}")}
    trained = {record["method"]: record["trained_parameters"] for record in results["runs"]}
    assert trained["erm @ vit"] == 7 * (64 + 1) < trained["last @ vit"] == trained["sam @ vit"]

    with (RUN / "results.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["selection"] == "train_val"]
    last = {(row["encoder"], row["encoder_trained"]) for row in rows if row["method"] == "last @ test_resnet"}
    assert last == {("test_resnet", "last block")} and sum(row["of"] == "encoders" for row in rows) == 3
    text = (RUN / "results.md").read_text()
    assert "## Encoders compared" in text and "## Cost" in text


def softmax(logits):
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def test_the_mean_of_log_probabilities_is_the_mean_of_logits():
    logits = np.random.default_rng(0).normal(size=(3, 50, 4), scale=5)  # seeds, images, classes
    averaged = np.mean([log_probabilities(softmax(one).astype(np.float32)) for one in logits], axis=0)
    np.testing.assert_allclose(softmax(averaged), softmax(logits.mean(0)), rtol=1e-4, atol=1e-7)
    extreme = log_probabilities(softmax(np.array([[0.0, 500.0]])).astype(np.float32))
    assert np.isfinite(extreme).all() and extreme.argmax() == 1


@pytest.mark.slow
def test_the_row_of_averaged_seeds_is_the_exported_ensemble(small_pacs):
    results = run("methods=[erm, knn, {name: erm, head: mlp, label: mlp}]", *TABLE)
    table = (RUN / "results.md").read_text().partition("## Seeds averaged")[2].partition("\n#")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    rows = {name: cells for name, *cells in lines[1:]}
    assert rows.keys() == {f"{method}, seeds averaged" for method in ("erm", "knn", "mlp")}
    for method in ("erm", "knn", "mlp"):
        records = [record for record in results["runs"] if record["method"] == method]
        model = exported(Choice(method, tuple(records[0]["test_domains"])), method, ensemble=True)
        labels = [Path(path).parent.name for path in held_out()]
        right = np.mean([p == label for p, label in zip(model.predict(held_out()), labels, strict=True)])
        single = np.mean([record["selected"]["train_val"]["metrics"]["test"]["accuracy"] for record in records])
        shown = [f"{100 * right:.1f}", f"{100 * single:.1f}", signed(100 * (right - single))]
        assert rows[f"{method}, seeds averaged"] == ["3", *shown]


@pytest.mark.slow
def test_seeds_are_averaged_on_request_with_two_seeds_and_with_probabilities(small_pacs, monkeypatch):
    averaged = "report={page: false, seeds_averaged: true}"
    run("methods=[erm]", averaged)
    assert "Seeds averaged" not in (RUN / "results.md").read_text(), "one seed"
    run("methods=[erm]", "protocol.seeds=2")
    assert "Seeds averaged" not in (RUN / "results.md").read_text(), "not on request"
    monkeypatch.setattr("xdm_ft.experiment.models.LARGEST", 1)
    run("methods=[erm]", "protocol.seeds=2", "name=large", averaged)
    assert "no row: probabilities of all classes were not kept" in Path("output/large/results.md").read_text()
    assert len(read_run(Path("output/large")).records) == 2
