"""Whole audits of features in a file, and of a run: what is planted is named, and what is not there is not."""

import csv
import json
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from tests.audit.studies import clusters
from tests.audit.test_audit_heads import with_twins
from tests.experiment.small_runs import document
from tests.experiment.warm_processes import two_ranks
from xdm_ft.audit.labels import SUSPECT
from xdm_ft.cli.audit import main
from xdm_ft.cli.library import run
from xdm_ft.recipe.check import load
from xdm_ft.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("in_folder", "no_charts")
RECIPE = """\
name: audited
data: {name: features, file: features.npz}
protocol: {name: leave_one_domain_out, seeds: 3}
methods: [erm]
training: {steps: 20, batch_size: 32, sampler: pooled, lr: 0.02}
report: {page: false}
"""


def write(z, labels, domains, **more):
    names = np.array([f"d{number}" for number in domains])
    np.savez("features.npz", features=np.asarray(z, np.float32), label=labels, domain=names, **more)
    Path("audited.yaml").write_text(RECIPE)


def audited(z, labels, domains, *overrides, recipe="audited.yaml", **more):
    """audit.json of these features, as its schema says."""
    write(z, labels, domains, **more)
    answer = main(Namespace(recipe=recipe, overrides=[*overrides], images=False))
    assert answer.lines and answer.exit_status == 0
    return document("output/audited/audit", "audit")


def rows_of(name):
    with open(f"output/audited/audit/{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_an_audit_of_what_is_in_order_names_nothing():
    audit = audited(*clusters(images=30, domains=3, spread=0.8))
    assert audit["twins"] == []
    assert (audit["copies"]["sure"], audit["copies"]["costs"]) == (0, [])
    assert (audit["labels"]["suspects"], audit["labels"]["costs"]) == (0, [])
    assert audit["site_class"]["lacking"] == audit["site_class"]["confounded"] == audit["site_class"]["facts"] == []
    assert len(audit["domain_pairs"]["left_out"]) == 6
    assert audit["encoder"]["domain_accuracy"] > 0.9
    assert audit["notes"] == []
    assert {path.name for path in Path("output/audited/audit").iterdir()} == {
        "audit.json", "audit.md", "copies.csv", "labels.csv",
    }  # fmt: skip


def test_planted_copies_wrong_labels_and_twins_are_named_with_what_they_cost():
    rng = np.random.default_rng(0)
    z, labels, domains = clusters(images=40, domains=4, width=24, spread=1.2)
    other = np.flatnonzero((domains == 1) | (domains == 2))[:10]
    z[:10], labels[:10] = z[other] + 0.05 * rng.normal(size=(10, 24)), labels[other]  # copies in domain 0
    wrong = rng.choice(np.arange(20, len(labels)), 24, replace=False)
    labels[wrong] = (labels[wrong] + 1) % 3
    ids = np.array([f"image {row}" for row in range(len(labels))])
    audit = audited(z, labels, domains, id=ids)
    assert audit["copies"]["sure"] == audit["copies"]["straddling"] == audit["copies"]["across_domains"] == 10
    pairs = rows_of("copies")[:10]
    assert {(pair["first"], pair["second"]) for pair in pairs} == {
        (f"image {i}", f"image {j}") for i, j in zip(range(10), other, strict=True)
    }
    assert {(pair["sure"], pair["straddles"]) for pair in pairs} == {("true", "true")}
    [cost] = audit["copies"]["costs"]
    assert (cost["what"], cost["images"]) == ("left out of training", 20)
    assert cost["difference"] == pytest.approx(cost["after"] - cost["before"])
    found = rows_of("labels")
    assert [float(row["score"]) for row in found] == sorted(float(row["score"]) for row in found)
    assert [*found[0]] == ["path", "domain", "label", "suggested", "score", "suspect"]
    assert {row["path"]: row["domain"] for row in found}.items() <= {
        (name, f"d{domain}") for name, domain in zip(ids, domains, strict=True)
    }
    suspects = [row for row in found if row["suspect"] == "true"]
    assert suspects == found[: audit["labels"]["suspects"]] and 0 < len(suspects) < len(found)
    assert all(float(row["score"]) <= SUSPECT for row in suspects)
    first = {row["path"] for row in found[:24]}
    assert len(first & {f"image {row}" for row in wrong}) >= 20
    assert {cost["what"] for cost in audit["labels"]["costs"]} == {"left out of training", "relabelled in training"}
    assert "copies" in Path("output/audited/audit/audit.md").read_text()


@pytest.mark.slow
def test_domains_held_out_together_are_one_and_twins_are_then_gone():
    """Domains 0 and 1 are one site: the same directions of the classes, which the others lack."""
    z, labels, domains = with_twins(1.0)
    z = z + np.random.default_rng(1).normal(size=(5, 16))[np.where(domains == 1, 0, domains)]
    assert audited(z, labels, domains)["twins"] == [["d0", "d1"]]
    together = audited(z, labels, domains, "protocol.together=[[d0, d1]]")
    assert together["twins"] == []
    assert together["domain_pairs"]["names"] == ["d0 + d1", "d2", "d3", "d4"]
    assert "d0 + d1" in together["held_out"]


@pytest.mark.slow
def test_two_domains_one_domain_and_one_class():
    z, labels, domains = clusters(images=12, domains=2)
    two = audited(z, labels, domains)
    assert two["domain_pairs"]["left_out"] == []
    assert "3 domains" in two["domain_pairs"]["note"]
    alone = audited(*clusters(images=12, domains=1))
    assert "only domain" in alone["notes"][0]
    assert alone["labels"]["costs"] == [] and alone["encoder"]["robustness_index"] is None
    confounded = audited(z, domains, domains)
    assert "one class only" in confounded["notes"][0]
    assert confounded["site_class"]["cramers_v"] == pytest.approx(1)
    assert confounded["site_class"]["confounded"]
    same = audited(z, np.zeros_like(labels), domains)
    assert same["labels"] is None
    assert any("label errors" in note for note in same["notes"])


@pytest.mark.slow
def test_fifty_domains():
    many = audited(*clusters(images=4, domains=50, classes=2), "training.steps=10")
    assert len(many["domain_pairs"]["names"]) == 50
    assert "50 domains" in many["domain_pairs"]["note"]


def test_groups_count_in_every_part():
    z, labels, domains = clusters(images=30, domains=3)
    labels[:4] = (labels[:4] + 1) % 3
    z[domains == 1] = z[domains == 0] + 0.5 * np.random.default_rng(0).normal(size=(90, z.shape[1]))  # near each other
    audit = audited(z, labels, domains, group=np.array([f"{domain}-{row % 9}" for row, domain in enumerate(domains)]))
    rows = rows_of("labels")
    assert rows and all(row["group"].split("-")[0] == row["domain"].removeprefix("d") for row in rows), "by its name"
    assert audit["labels"] is not None and len(audit["domain_pairs"]["left_out"]) == 6
    notes = [row["note"] for row in audit["domain_pairs"]["left_out"]]
    assert "only 9 groups in a test domain, effectively 9.0" in notes
    few = audited(z, labels, domains, group=domains)  # three groups
    assert few["labels"] is None and few["encoder"]["domain_accuracy"] is None


def test_bad_input_is_one_line():
    z, labels, domains = clusters(images=10, domains=3)
    z[7, 0] = np.nan
    with pytest.raises(UserError) as error:
        audited(z, labels, domains)
    assert len(str(error.value).splitlines()) == 1 and "NaN" in str(error.value)
    with pytest.raises(UserError, match="nowhere"):
        audited(*clusters(images=10, domains=3), recipe="nowhere.yaml")
    Path("empty").mkdir()
    with pytest.raises(UserError):
        audited(*clusters(images=10, domains=3), recipe="empty")


def test_a_run_is_audited_before_and_after_it_and_shows_it_on_its_page(capsys):
    z, labels, domains = clusters(images=20, domains=3)
    before = audited(z, labels, domains)
    made = load("audited.yaml", ["report.page=true"])
    assert not run(made).failed  # into the folder that the audit began
    assert "Is the data what it says" in Path("output/audited/report.html").read_text()
    results = Path("output/audited/results.json").read_bytes()
    Path("moved").mkdir()
    Path("output/audited").rename("moved/run")
    main(Namespace(recipe="moved/run", overrides=[], images=True))
    again = document("moved/run/audit", "audit")
    assert {**again, "checksum": ""} == {**before, "checksum": ""}
    assert Path("moved/run/results.json").read_bytes() == results
    assert "Is the data what it says" in Path("moved/run/results.md").read_text()
    np.savez("features.npz", features=z + 1.0, label=labels, domain=domains)
    with pytest.raises(UserError, match="had other images"):
        main(Namespace(recipe="moved/run", overrides=[], images=False))


@pytest.mark.soak
def test_the_command_prints_what_it_writes_after_a_kill_too():
    write(*clusters(images=20, domains=3))
    command = [sys.executable, "-m", "xdm_ft", "audit", "audited.yaml", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as killed:
        time.sleep(4)
        killed.kill()
    printed = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=300).stdout)
    content = json.loads(Path("output/audited/audit/audit.json").read_text())
    assert {**content, "checksum": "", "folder": ""} == {**printed, "checksum": "", "folder": ""}


@pytest.mark.slow
def test_two_processes_write_what_one_does():
    one = audited(*clusters(images=20, domains=3))
    two_ranks("audit", "audited.yaml", cwd=Path.cwd())
    assert document("output/audited/audit", "audit") == one


@pytest.mark.slow
def test_one_seed_leaves_nearest_pairs_undecided_and_says_so():
    z, labels, domains = with_twins(0.7)
    write(z, labels, domains)
    answer = main(Namespace(recipe="audited.yaml", overrides=["protocol.seeds=1"], images=False))
    assert answer.document["twins"] == []
    assert answer.document["domain_pairs"]["undecided"] == [["d0", "d1"]]
    text = "\n".join(answer.lines)
    assert "no held-out accuracy shows whether they are twins" in text and "protocol.seeds=5" in text
    answer = main(Namespace(recipe="audited.yaml", overrides=["protocol.test_domains=[d3]"], images=False))
    assert "hold each of them out: 'protocol.test_domains=[d0, d1]'" in "\n".join(answer.lines)


def test_an_audit_of_other_data_is_not_that_of_the_run(caplog):
    z, labels, domains = clusters(images=20, domains=3)
    audited(z, labels, domains)
    write(z + 1.0, labels, domains)
    assert not run(load("audited.yaml", ["report.page=true"])).failed
    assert "Is the data what it says" not in Path("output/audited/report.html").read_text()
    assert "of other images than the run" in caplog.text
    write(z, labels, domains)
    with pytest.raises(UserError, match="had other images"):
        main(Namespace(recipe="audited.yaml", overrides=[], images=False))
