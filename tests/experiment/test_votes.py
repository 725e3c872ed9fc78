"""Runs on a table with soft labels: what trains on them, what reads the label, and what of a run depends on them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import document
from test_data_faults import RECIPE, make_images

from xdm_ft.audit import heads as audit_heads
from xdm_ft.cli.parser import main
from xdm_ft.experiment.plan import annotations_digest, annotations_of, make_plan, read_data
from xdm_ft.export.sources import Site, read_site
from xdm_ft.new_site.adapt import WithSite
from xdm_ft.recipe.check import load
from xdm_ft.results.run import read_run

METHODS = "methods=[erm, {name: xdomainmix, warmup_steps: 1}, mixup, domain_shift, groupdro, linear_probe]"
TABLES = "data={name: table, file: %s.csv}"


def write_table(name: str, p_of_label: float | None) -> None:
    """A table of all images; the label has this probability."""
    with Path(f"{name}.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["path", "label", "domain", *(("p:cat", "p:dog") if p_of_label else ())])
        for path in sorted(Path("images").absolute().rglob("*.png")):
            *_, domain, label, _ = path.parts
            p = [p_of_label if label == c else 1 - p_of_label for c in ("cat", "dog")] if p_of_label else []
            rows.writerow([path, label, domain, *p])


@pytest.fixture(autouse=True)
def tables(in_folder: Path, no_charts: None) -> None:
    Path("small.yaml").write_text(RECIPE)
    make_images(in_folder / "images")
    for name, p_of_label in {"plain": None, "sure": 1.0, "votes": 0.7}.items():
        write_table(name, p_of_label)


def metrics(name: str, *overrides: str) -> dict[str, Any]:
    """{method: the metrics of its models} of a run on a table."""
    assert main(["run", "small.yaml", f"name={name}", TABLES % name, METHODS, *overrides]) == 0
    runs = document(f"output/{name}")["runs"]
    assert all(entry["status"] == "ok" for entry in runs)
    return {m: [e["selected"] for e in runs if e["method"] == m] for m in {e["method"] for e in runs}}


@pytest.mark.parametrize("end_to_end", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_hot_votes_give_the_bits_of_labels_and_others_reach_what_reads_them(end_to_end: bool) -> None:
    more = ("encoder.trainable=true",) if end_to_end else ("training.class_weights=balanced",)
    plain, sure, votes = (metrics(name, *more) for name in ("plain", "sure", "votes"))
    assert plain == sure
    assert {method for method in plain if plain[method] != votes[method]} == {*plain} - {"groupdro", "linear_probe"}


def test_the_plan_says_who_reads_the_label_alone(capsys: pytest.CaptureFixture[str]) -> None:
    methods = METHODS.replace("linear_probe", "linear_probe, zero_shot")
    assert main(["validate", "small.yaml", TABLES % "votes", methods]) == 0
    printed = capsys.readouterr().out
    assert "label, domain, p:cat, p:dog are read; no other\n" in printed
    assert "#   soft labels (columns p:CLASS) are not one-hot for 24 of 24 images\n" in printed
    assert "#   reads the label alone, not p:CLASS: groupdro / linear_probe\n" in printed
    assert main(["validate", "small.yaml", TABLES % "votes", methods, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert "reads the label alone, not p:CLASS: groupdro / linear_probe" in notes
    assert main(["validate", "small.yaml", TABLES % "plain", methods]) == 0
    assert "(columns p:CLASS)" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_is_of_its_votes_and_reports_beside_one_without(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("plain", "votes"):
        assert main(["run", "small.yaml", f"name={name}", TABLES % name]) == 0
    assert "soft labels (columns p:CLASS)" in read_run(Path("output/votes")).recipe_rows[0].protocol
    assert main(["report", "output/plain", "output/votes"]) == 0
    capsys.readouterr()
    for p_of_label in (0.8, None):
        write_table("votes", p_of_label)
        assert main(["run", "small.yaml", "name=votes", TABLES % "votes"]) == 2
        assert "labels, domains or splits of the data have changed" in capsys.readouterr().err


def test_what_identifies_the_annotations() -> None:
    """Without soft labels it is what it was; other votes are other annotations; renamed classes keep theirs."""
    plain, sure, votes = (read_data(load("small.yaml", [TABLES % name])) for name in ("plain", "sure", "votes"))
    digests = [annotations_digest(dataset) for dataset in (plain, sure, votes)]
    assert len({*digests}) == 3
    assert all(annotations_digest(dataset, with_soft_labels=False) == digests[0] for dataset in (plain, sure, votes))
    renamed = read_data(load("small.yaml", [TABLES % "votes", "data.class_names={cat: a dog, dog: a cat}"]))
    assert votes.soft_labels is not None and np.array_equal(renamed.soft_labels, votes.soft_labels)
    annotations = annotations_of(votes).to(torch.device("cpu"))
    assert annotations.soft_labels is not None and annotations.soft_labels.dtype == torch.float32
    assert annotations_of(plain).to(torch.device("cpu")).soft_labels is None


def test_an_audit_and_a_site_ask_of_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit trains on labels, also those it permutes; the images of a site that joins have their label alone."""
    recipe = load("small.yaml", [TABLES % "votes"])
    plan, seen = make_plan(recipe, read_data(recipe)), []
    monkeypatch.setattr(
        audit_heads, "train_chunk", lambda chunk, z, annotations, *more, **named: seen.append(annotations) or []
    )
    monkeypatch.setattr(audit_heads, "CachedPredictor", lambda *of: None)
    made = SimpleNamespace(plan=plan, features=SimpleNamespace(device=torch.device("cpu")))
    for labels in (None, plan.annotations.labels.flip(0)):
        list(audit_heads.Study._trained(made, [None], "train_val", labels))  # type: ignore[arg-type, list-item]
        assert seen[-1].soft_labels is None and torch.equal(
            seen[-1].labels, plan.annotations.labels if labels is None else labels
        )
    site = read_site("votes.csv", ("cat", "dog"), {})
    assert isinstance(site, Site)
    monkeypatch.setattr(plan.dataset, "draft", lambda row, least_side: (row, least_side), raising=False)
    assert WithSite(plan.dataset, site, "site").draft(3, 8) == (3, 8)  # type: ignore[comparison-overlap]
    both = WithSite(plan.dataset, site, "site").soft_labels
    assert both is not None and np.array_equal(both[:24], plan.dataset.soft_labels)
    assert np.array_equal(both[24:], np.eye(2)[site.labels])
