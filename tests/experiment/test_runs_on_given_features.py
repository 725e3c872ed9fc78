"""Runs on features that were computed elsewhere: the same numbers as on the images, and what such a run refuses."""

import subprocess
import sys
from pathlib import Path

import miniature
import numpy as np
import pytest
import small_runs
import torch
from bag_files import slides
from safetensors.torch import load_file

from xdm_ft.cli.library import run
from xdm_ft.cli.parser import main
from xdm_ft.cli.validate import validate
from xdm_ft.experiment.plan import read_data
from xdm_ft.experiment.prepare import build_encoders, prepare
from xdm_ft.experiment.work import launched
from xdm_ft.recipe.check import load
from xdm_ft.runtime.errors import UserError

KEYS = ("name", "data", "encoder", "features")
LINES = [line for line in small_runs.RECIPE.splitlines(True) if not line.startswith(KEYS)]
GIVEN = "".join(["name: given\n", "data: {name: features, file: f.npz}\n", *LINES])
OVERRIDES = (
    "protocol={name: leave_one_domain_out, test_domains: [sketch], seeds: 1, val_fraction: 0.4}",
    "methods=[erm, {name: erm, normalize: true, label: unit}, linear_probe]",
)


def given(*overrides):
    Path("given.yaml").write_text(GIVEN)
    return load("given.yaml", [*OVERRIDES, *overrides])


def write_features(recipe, file):
    """The cached features of a run on images, as a user has them."""
    with launched(recipe) as accelerator:
        data = read_data(recipe)
        features = prepare(recipe, data, build_encoders(recipe, data)[1], accelerator).encoders[None].features
        z = features[torch.arange(len(data))].numpy()
    columns = {
        "label": np.array(data.class_names)[data.labels],
        "domain": np.array(data.domain_names)[data.domains],
        "id": np.array([data.name_in_data(row) for row in range(len(data))]),
    }
    np.savez(file, features=z, **columns)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The folder of a run on images, and of the same run on a file of its features."""
    folder = tmp_path_factory.mktemp("given")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        miniature.domainbed(Path("data"), "pacs")
        made = small_runs.recipe(*OVERRIDES)
        small_runs.results_of(made)
        write_features(made, "f.npz")
        small_runs.results_of(given("report.page=true"))
    return folder


@pytest.fixture
def in_both(both, monkeypatch):
    monkeypatch.chdir(both)


@pytest.mark.usefixtures("in_both")
def test_it_gives_the_same_models_and_numbers_as_the_images():
    images, features = (small_runs.document(f"output/{name}") for name in ("small", "given"))
    assert len(images["runs"]) == len(features["runs"]) == 3
    for one, other in zip(images["runs"], features["runs"], strict=True):
        picks = [record["selected"]["train_val"] for record in (one, other)]
        assert picks[0]["metrics"] == picks[1]["metrics"] and picks[0]["step"] == picks[1]["step"]
        weights = [
            load_file(f"output/{name}/{p['weights']}") for name, p in zip(("small", "given"), picks, strict=True)
        ]
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert [row["mean"] for row in images["summary"]] == [row["mean"] for row in features["summary"]]


@pytest.mark.usefixtures("in_both")
def test_the_protocol_says_where_the_features_are_from():
    content = small_runs.document("output/given")
    for row in content["summary"]:
        assert "; features of f.npz, computed elsewhere (xxh3_128 " in row["protocol"]
        assert "encoder" not in row["protocol"] and "frozen" not in row["protocol"]
    assert "encoder" not in content["recipe"] and "encoder" not in content["environment"]
    page = Path("output/given/report.html").read_text()
    assert "computed elsewhere" in page and "xdm-ft predict my_model FEATURES" in page


@pytest.mark.usefixtures("in_both")
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("export output/given out --with-encoder", "--with-encoder: a model of features has no encoder"),
        ("predict output/given data --held-out sketch", "data: contains no .npz or .parquet (known by its extension)"),
        ("label output/given f.npz --budget 5 --out x.csv --sheet y.html --held-out sketch", "--sheet: the model"),
        ("assess output/given f.npz", "is a run directory; export a model of it first"),
        ("analyse output/given --reconstruct .", ""),
        ("features given.yaml", "nothing to compute"),
    ],
)
def test_what_needs_images_is_refused_with_one_line(command, words, capsys):
    assert main(command.split()) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.usefixtures("in_both")
@pytest.mark.slow
def test_verbs_that_need_no_images():
    printed = validate(given()).text()
    assert "112 images" in printed and "unless their features are cached" not in printed
    assert main(["doctor", "given.yaml"]) == 0
    assert main(["report", "output/given"]) == 0
    assert main(["analyse", "output/given"]) == 0


@pytest.mark.usefixtures("in_folder")
def test_another_file_does_not_resume_a_run():
    miniature.features(Path("f.npz"))
    short = ("protocol={name: leave_one_domain_out, test_domains: ['0'], seeds: 1}", "methods=[linear_probe]")
    small_runs.results_of(given(*short))
    with np.load("f.npz") as content:
        arrays = dict(content)
    arrays["features"][3, 1] += 1
    np.savez("f.npz", **arrays)
    with pytest.raises(UserError, match=r"the given features have changed since this run started \(data.content\)"):
        run(given(*short))


BAGS = ["bags", "data.folder=slides", "data.table=slides/slides.csv", "data.unit=group", "methods=[erm, zero_shot]"]
BAGS += ["data.class_embeddings=text.npz", "protocol.seeds=1", "training.steps=20", "report.page=false"]


def bags_and_text():
    slides(Path("slides"))
    np.savez("text.npz", features=np.eye(2, 5, dtype=np.float32), label=np.array(["normal", "tumor"]))


@pytest.mark.usefixtures("in_folder")
def test_a_run_on_bags_resumes_unless_a_bag_has_changed(capsys):
    bags_and_text()
    assert main(["run", *BAGS]) == 0
    content = small_runs.document("output/bags")
    assert {len(record["selected"]["train_val"]["metrics"]) > 0 for record in content["runs"]} == {True}
    assert (
        "; mean of the features of each group of slides.csv, computed elsewhere (xxh3"
        in content["summary"][0]["protocol"]
    )
    assert main(["run", *BAGS]) == 0 and main(["doctor", *BAGS]) == 0
    np.save("slides/slide.0.npy", np.ones((2, 5), np.float32))
    assert main(["run", *BAGS]) == 2
    assert "have changed since this run started (data.content)" in capsys.readouterr().err
    np.save("slides/slide.1.npy", np.full((2, 5), np.nan, np.float32))
    np.save("slides/slide.2.npy", np.ones((2, 4), np.float32))
    capsys.readouterr()
    assert main(["run", *BAGS, "--quiet"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert (
        len(lines) == 2 and "row 3, slide.1.npy: row 0 is not finite" in lines[0] and "slide.2.npy: has 4" in lines[1]
    )


@pytest.mark.usefixtures("in_folder")
@pytest.mark.slow
def test_two_processes_train_the_same_models_on_bags(monkeypatch):
    bags_and_text()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
        "xdm_ft",
        "run",
    ]
    subprocess.run([*launch, *BAGS, "name=two"], check=True)
    assert main(["run", *BAGS]) == 0
    one, two = (sorted(Path(f"output/{name}/models").rglob("train_val.safetensors")) for name in ("bags", "two"))
    assert len(one) == len(two) == 6
    for a, b in zip(map(load_file, one), map(load_file, two), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
