"""A run on miniature PACS with photo held out, and an exported model of it, that the tests of this folder share."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import miniature
import pytest
import small_runs

from xdm_ft.cli.export import export_model
from xdm_ft.export.choose import Choice
from xdm_ft.export.directory import CONFIG
from xdm_ft.storage import json_digest

METHODS = (
    "methods=[erm, {name: xdomainmix, warmup_steps: 2}, {name: erm, head: cosine, label: cosine}, linear_probe, "
    "{name: knn, neighbours: [1, 3]}, {name: erm, normalize: true, label: unit}, erm+swad]"
)


def exported_run():
    miniature.domainbed(Path("data"), "pacs", per_class=8)
    small_runs.results("protocol.test_domains=[photo]", "training.steps=60", METHODS)
    export_model("output/small", "model", Choice("erm", ("photo",)))


@pytest.fixture(scope="session")
def made(made_once):
    """`folder` with PACS in `data`, the run, and in `model` ERM without photo; `site`: the images of photo."""
    folder = made_once("site", exported_run)
    site = folder / "data/PACS/photo"
    return SimpleNamespace(folder=folder, run=folder / "output/small", model=folder / "model", site=site)


@pytest.fixture
def inside(made, monkeypatch):
    """Changes into the folder, which stays as it is."""
    monkeypatch.chdir(made.folder)
    return made


@pytest.fixture
def model(made, tmp_path):
    """A copy of the model directory."""
    return Path(shutil.copytree(made.model, tmp_path / "model"))


@pytest.fixture
def by_metric(model):
    """Makes the copy a model of a run with another metric: `by_metric(name)` → its folder."""

    def changed(metric):
        document = json.loads((model / CONFIG).read_text())
        del document["checksum"]
        document["protocol"]["metric"] = metric
        (model / CONFIG).write_text(json.dumps({**document, "checksum": json_digest(document)}))
        return model

    return changed
