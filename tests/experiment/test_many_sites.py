"""Many small sites: folds of them, sites of one class, and domains too small to be held out."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from small_runs import document

from xdm_ft.cli.library import run
from xdm_ft.cli.parser import main
from xdm_ft.cli.validate import validate
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.recipe.check import load
from xdm_ft.report.side_by_side import compare_runs
from xdm_ft.results.run import read_run
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.run_directory import MEASURED, RunDirectory

RECIPE = """\
name: sites
data: {name: features, file: sites.npz}
protocol: {folds: 4, metric: balanced_accuracy, seeds: 3}
methods: [erm, groupdro, linear_probe]
training: {steps: 12, batch_size: 8, evaluate_every: 4, sampler: pooled}
features: {dir: cache}
"""
SITES = 12
ONE_CLASS = ("site 00", "site 06")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Features of 12 sites of 12 to 34 images, two of them with one class, each patient with two images; and a run."""
    folder, rng = tmp_path_factory.mktemp("folds"), np.random.default_rng(0)
    features, label, domain, group = list[np.ndarray](), list[str](), list[str](), list[str]()
    for site in range(SITES):
        n = 12 + 2 * site
        y = rng.integers(0, 2, n) if site % 6 else np.zeros(n, int)
        y[:2] = (0, 1) if site % 6 else (0, 0)
        features.append(rng.normal(size=(n, 6)) + rng.normal(size=6) + y[:, None])
        label += ["ab"[of] for of in y]
        domain += [f"site {site:02}"] * n
        group += [f"{site}-{i // 2}" for i in range(n)]
    np.savez(folder / "sites.npz", features=np.concatenate(features), label=label, domain=domain, group=group)
    (folder / "sites.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(load("sites.yaml"))
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.fixture
def content():
    return document("output/sites")


def defined():
    return [f"site {site:02}" for site in range(SITES) if f"site {site:02}" not in ONE_CLASS]


def values_of(content, method):
    """{(site, seed): balanced accuracy}, from the stored predictions alone."""
    made, directory = {}, RunDirectory(Path("output/sites"))
    label, domain = (np.load("sites.npz")[name] for name in ("label", "domain"))
    for model in (model for model in content["runs"] if model["method"] == method):
        record = next(r for r in read_run(directory.path).records if list(r.test_domains) == model["test_domains"]
                      and (r.method, r.seed) == (method, model["seed"]))  # fmt: skip
        arrays = directory.predictions(record.folder, record.files)
        rows = directory.test_images(record.test_domains, record.files)["rows"]
        for site in {*record.test_domains} - {*ONE_CLASS}:
            at = domain[rows] == site
            made[site, record.seed] = balanced_accuracy_score(label[rows][at] == "b", arrays["train_val.predicted"][at])
    return made


def test_a_model_per_fold_and_a_value_per_site(content):
    folds = {tuple(model["test_domains"]): model["fold"] for model in content["runs"]}
    assert len(content["runs"]) == 3 * 4 * 3 and sorted(folds.values()) == [1, 2, 3, 4]
    assert sorted(name for fold in folds for name in fold) == [f"site {site:02}" for site in range(SITES)]
    for model in content["runs"]:
        score = model["selected"]["train_val"]["metrics"]["test"]
        assert score["per_domain"].keys() == {*model["test_domains"]}
        for name, of in score["per_domain"].items():
            assert (of["balanced_accuracy"] is None) == (of["auroc"] is None) == (name in ONE_CLASS)
        validation = model["selected"]["train_val"]["metrics"]["train_val"]["per_domain"]
        assert {frozenset(of) for of in validation.values()} == {frozenset(("accuracy", "balanced_accuracy", "n"))}


def test_means_verdicts_and_intervals_are_over_sites(content):
    rows = {row["method"]: row for row in content["summary"] if row["selection"] == "train_val"}
    values = {method: values_of(content, method) for method in rows}
    for method, row in rows.items():
        of_sites = {name: [values[method][name, seed] for seed in range(3)] for name in defined()}
        assert [*row["per_test_domain"]] == defined()
        for name, point in row["per_test_domain"].items():
            assert point["mean"] == pytest.approx(np.mean(of_sites[name]))
            assert point["low"] <= point["mean"] <= point["high"]
        seeds = np.mean([*of_sites.values()], 0)
        assert (row["mean"], row["n"]) == (pytest.approx(seeds.mean()), 3)
        assert "reason" not in row and row["interval"] is not None
        assert "not defined on 2 of 12 held-out sets (site 00, site 06)" in row["protocol"]
    [compared] = (
        row for row in content["comparisons"] if (row["first"], row["selection"]) == ("linear_probe", "train_val")
    )
    differences = np.array(
        [np.mean([values["linear_probe"][n, s] - values["erm"][n, s] for s in range(3)]) for n in defined()]
    )
    assert compared["difference"] == pytest.approx(differences.mean()) and compared["sets"] == 10
    fold_of = {name: model["fold"] for model in content["runs"] for name in model["test_domains"]}
    of_folds = [differences[[fold_of[n] == fold for n in defined()]].mean() for fold in (1, 2, 3, 4)]
    p = max(stats.ttest_1samp(differences, 0).pvalue, stats.ttest_1samp(of_folds, 0).pvalue)
    assert compared["p_elsewhere"]["plain"] == pytest.approx(p)
    assert compared["freedom_elsewhere"] in (9, 3)


def test_what_predictions_come_to_is_measured_by_site(content):
    made = read_run(Path("output/sites"))
    pool = made.measured.pools["erm", ("site 03",)]
    assert pool.counts(2).sum() == 3 * 18 and pool.models == 3
    assert made.measured.interval(made.quoted) is not None
    (RunDirectory(made.path).path / MEASURED).unlink()
    again = read_run(Path("output/sites"))
    assert again.measured.pools["erm", ("site 03",)].mistakes == pool.mistakes, "it is made again from predictions"
    again.measured.write(RunDirectory(made.path))
    expected = json.loads(Path("output/sites/results.json").read_text())["summary"][0]["interval"]
    runs = next(of for of in again._measured_runs if (of.method, of.rule) == ("erm", "train_val"))
    assert again.measured.interval(runs)._asdict() == pytest.approx(expected)


def test_the_choice_reads_sites_and_quotes_what_other_folds_choose():
    made = read_run(Path("output/sites"))
    assert made.choice is not None
    fold_of = {name: record.fold for record in made.records for name in record.test_domains}
    assert {held[0] for held in made.choice.at} == {*defined()}
    by_fold = {}
    for held, method in made.choice.at.items():
        assert by_fold.setdefault(fold_of[held[0]], method) == method, "the sites of a fold have one choice"
    assert len(made.quoted.held_out) == 10


@pytest.mark.slow
def test_as_many_folds_as_sites_are_leave_one_site_out():
    run(load("sites.yaml", ["name=each", "protocol.folds=12"]))
    run(load("sites.yaml", ["name=plain", "protocol.folds=null"]))
    each, plain = (document(f"output/{name}") for name in ("each", "plain"))
    kept = "method", "selection", "mean", "std", "interval", "per_test_domain"
    assert [[row[key] for key in kept] for row in each["summary"]] == [
        [row[key] for key in kept] for row in plain["summary"]
    ]
    same = [key for key in plain["comparisons"][0] if key != "freedom_elsewhere"]
    assert [[row[key] for key in same] for row in each["comparisons"]] == [
        [row[key] for key in same] for row in plain["comparisons"]
    ]


def test_an_auroc_is_that_of_each_site():
    run(load("sites.yaml", ["name=sites", "output.dir=areas", "protocol.metric=auroc", "methods=[erm, groupdro]"]))
    content = document("areas/sites")
    [row] = (row for row in content["summary"] if (row["method"], row["selection"]) == ("erm", "train_val"))
    made = read_run(Path("areas/sites"))
    label, domain = (np.load("sites.npz")[name] for name in ("label", "domain"))
    for record in made.measured_records:
        prediction = made.prediction(record)
        assert {domain[r] for r in prediction.images.rows} == {*record.test_domains}
        if record.test_domains[0] not in ONE_CLASS and record.method == "erm":
            area = roc_auc_score(label[prediction.images.rows] == "b", prediction.probabilities[:, 1])
            assert prediction.per_image.mean() == pytest.approx(area)
            assert record.selected["train_val"].metrics["test"].auroc == pytest.approx(area)
    assert row["interval"] is not None and "p_elsewhere" in content["comparisons"][0]


@pytest.mark.slow
def test_it_grows_and_refuses_other_folds():
    run(load("sites.yaml", ["name=grown", "protocol.seeds=2"]))
    before = document("output/grown")["runs"]
    run(load("sites.yaml", ["name=grown", "protocol.seeds=3", "methods=[erm, groupdro, linear_probe, prototypes]"]))
    after = document("output/grown")
    assert [model for model in after["runs"] if model["seed"] < 2 and model["method"] != "prototypes"] == before
    assert len(after["runs"]) == 4 * 4 * 3
    with pytest.raises(UserError, match="folds"):
        run(load("sites.yaml", ["name=grown", "protocol.folds=3"]))


@pytest.mark.slow
def test_what_reads_the_run_follows(capsys):
    made, copy = read_run(Path("output/sites")), read_run(Path(shutil.copytree("output/sites", "output/copy")))
    beside = compare_runs([made, copy], {made.path: "a", copy.path: "b"})
    assert [(row.sets, row.difference) for row in beside] == [(10, 0.0)] * 3, "the sites with a value, paired"
    for command in (["audit", "output/sites"], ["report", "output/sites"], ["analyse", "output/sites"]):
        assert main([*command, "--quiet"]) == 0, capsys.readouterr().err
    page = Path("output/sites/report.html").read_text()
    assert "fold 3" in page and "site 11" in page
    audit = json.loads(Path("output/sites/audit/audit.json").read_text())
    assert audit["folds"] == 4 and [*audit["domains"]] == [f"site {site:02}" for site in range(SITES)]
    assert audit["domain_pairs"]["names"] == [f"site {site:02}" for site in range(SITES)], "each site is a unit"


@pytest.mark.slow
def test_a_label_curve_has_a_point_per_site():
    run(load("sites.yaml", ["name=curve", "label_curve=true"]))
    curve = document("output/curve")["label_curve"]
    assert {*curve["points"][0]["values"]} <= {*defined()}
    assert len(curve["points"][0]["values"]) > 4, "sites, not folds"


@pytest.mark.slow
def test_a_domain_names_the_models_of_its_fold(capsys):
    """Also where its name has a comma, and a file name of all of the fold would be too long."""
    given = np.load("sites.npz")
    domain = np.array([f"{name}, ward/ü+#{'x' * 60}" for name in given["domain"]])
    np.savez("odd.npz", **{**given, "domain": domain})
    run(load("sites.yaml", ["name=odd", "data.file=odd.npz", "methods=[erm]", "protocol.seeds=1"]))
    assert main(["export", "output/odd", "odd_model", "--held-out", domain[-1], "--method", "erm", "--quiet"]) == 0
    held_out = json.loads(Path("odd_model/config.json").read_text())["method"]["test_domains"]
    assert domain[-1] in held_out and len(held_out) == 3
    assert main(["export", "output/odd", "none", "--held-out", "nowhere", "--method", "erm"]) == 2
    assert "no model nowhere" in capsys.readouterr().err


def test_validate_prints_the_folds():
    recipe = load("sites.yaml")
    answer = validate(recipe)
    assert [fold["domains"] for fold in answer.document["folds"]] == [
        list(split.test_domains) for split in make_plan(recipe, read_data(recipe)).splits
    ]
    heading = answer.lines.index("# folds of domains that are held out together")
    assert answer.lines[heading + 1].startswith("#   1: site 0") and "images: a " in answer.lines[heading + 1]
    assert not any("trains 10 models" in line for line in answer.lines), "12 sites are few enough"


# Domains that are too small


def plan_of(*overrides):
    recipe = load("sites.yaml", list(overrides))
    return make_plan(recipe, read_data(recipe))


def test_small_domains_become_one():
    plan = plan_of("data.domain_min=20", "protocol.folds=null")
    small = [f"site {site:02}" for site in range(4)] + ["site 06"]
    assert plan.dataset.small_domains == tuple(small)
    assert plan.dataset.domain_names == (*(f"site {s:02}" for s in (4, 5, 7, 8, 9, 10, 11)), "small sites")
    assert [split.test_domains for split in plan.splits][-1] == ("small sites",)
    sizes = np.bincount(plan.dataset.domains)
    assert sizes[-1] == 12 + 14 + 16 + 18 + 24 and sizes.sum() == sum(12 + 2 * s for s in range(SITES))
    assert '5 domains below data.domain_min became the domain "small sites"' in plan.notes


def test_what_stays_small_trains_and_is_not_held_out():
    plan = plan_of("data.domain_min=13", "protocol.folds=3")  # site 00, and site 06 of one class
    assert plan.dataset.never_held_out == ("small sites",)
    assert not any("small sites" in split.test_domains for split in plan.splits)
    assert all("small sites" in split.train_domains for split in plan.splits)
    assert any("trains only" in note for note in plan.notes)
    run(load("sites.yaml", ["name=small", "data.domain_min=13"]))
    content = document("output/small")
    assert content["data"]["small_domains"] == ["site 00", "site 06"]
    assert "site 00, site 06" in Path("output/small/report.html").read_text()


def test_small_domains_are_dropped():
    plan = plan_of("data.domain_min=20", "data.small_domains=drop", "protocol.folds=3")
    kept = np.isin(np.load("sites.npz")["domain"], [f"site {s:02}" for s in (4, 5, 7, 8, 9, 10, 11)])
    assert np.array_equal(plan.dataset.features, np.load("sites.npz")["features"][kept].astype(np.float32))
    assert len(plan.dataset.domain_names) == 7 and len(plan.dataset) == kept.sum()
    assert "5 domains below data.domain_min are left out" in plan.notes
    for how in ("drop", "join"):
        with pytest.raises(UserError, match="all 12 domains have fewer than 99 images"):
            plan_of("data.domain_min=99", f"data.small_domains={how}")


def test_what_is_kept_of_images_is_read_as_before(tmp_path):
    """Names, pixels and decoder of kept rows; `data.intensity: auto` reads the kept ones alone."""
    for site, (images, top) in {"a": (6, 999), "b": (6, 500), "tiny": (2, 60_000)}.items():
        for i in range(images):
            file = tmp_path / "data" / site / ("cat", "dog")[i % 2] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((4, 4), top - i, np.uint16)).save(file)
    Path("images.yaml").write_text(
        f"name: images\ndata: {{name: folder, root: {tmp_path}/data, intensity: auto, domain_min: 5, "
        f"small_domains: drop}}\nencoder: {{name: timm, model: test_vit}}\nmethods: [linear_probe]\n"
        f"training: {{steps: 1}}\nfeatures: {{dir: {tmp_path}/cache}}\n"
    )
    data = read_data(load("images.yaml"))
    assert str(data.intensity) == "0…1023" and data.decoder.endswith("0…1023") and len(data) == 12
    assert data.domain_names == ("a", "b") and data.small_domains == ("tiny",)
    first, last = data.image(0), data.image(11)
    assert np.asarray(first)[0, 0, 0] == round(999 * 255 / 1023) and np.asarray(last)[0, 0, 0] == round(
        495 * 255 / 1023
    )
    assert data.name_in_data(11).endswith("b/dog/5.png") and str(data.content(11)).endswith("5.png")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.small_domains=drop"], "has no effect without data.domain_min"),
        (["protocol.folds=1"], "protocol.folds"),
        (["protocol.folds=13"], "13 folds need as many domains, and there are 12"),
        (["protocol.together=[[site 01, site 02]]"], "does not go together with protocol.folds"),
    ],
)
def test_faults(overrides, message):
    with pytest.raises(UserError, match=message):
        plan_of(*overrides)


def test_a_metric_that_no_site_defines_is_refused_before_any_training():
    domain = np.arange(40) // 10
    np.savez("apart.npz", features=np.random.default_rng(0).normal(size=(40, 3)), label=domain % 2, domain=domain)
    with pytest.raises(UserError, match="balanced_accuracy is not defined where all test images are of one class"):
        plan_of("data.file=apart.npz", "protocol.folds=null")
