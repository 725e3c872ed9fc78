"""Runs on miniatures of the data sets of the paper, on images on a server, with encoders of transformers; traces."""

import json
import os
import platform
import re
import socket
from pathlib import Path

import miniature
import numpy as np
import pytest
import small_runs
import tiny_transformers
import torch
from encoded_images import write_parquet
from exported import choice_of, exported, held_out, recorded
from object_store import object_store
from range_server import served
from safetensors.numpy import load_file

from xdm_ft.cli.library import run
from xdm_ft.cli.parser import main
from xdm_ft.cli.validate import validate
from xdm_ft.data.fmow import Fmow
from xdm_ft.experiment.pieces import profile_training
from xdm_ft.export.onnx import PACKAGES
from xdm_ft.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("in_folder")
RUN = Path("output/small")
OFFICIAL = "protocol={name: official, selection: val_domain, seeds: 1"
PHOTO, ONLY_ERM = "protocol.test_domains=[photo]", "methods=[erm]"


def test_pacs_with_the_splits_of_domainbed():
    """tests/recipes runs all data sets of the paper."""
    miniature.domainbed(Path("data"), "pacs")
    content = small_runs.results("protocol={name: leave_one_domain_out, split_rule: domainbed, seeds: 1}", ONLY_ERM)
    assert [record["status"] for record in content["runs"]] == ["ok"] * 4
    assert len({tuple(record["test_domains"]) for record in content["runs"]}) == 4
    for record in content["runs"]:
        metrics = record["selected"]["train_val"]["metrics"]
        assert (metrics["test"]["n"], metrics["train_val"]["n"]) == (28, 3 * int(0.2 * 28))
    assert all("validation parts as DomainBed draws them" in row["protocol"] for row in content["summary"])


def test_camelyon17_as_wilds_splits_it_and_each_hospital_in_turn():
    miniature.camelyon17(Path("data"))
    data = "data={name: camelyon17, root: data}"
    content = small_runs.results(data, f"{OFFICIAL}}}", ONLY_ERM)
    [record] = content["runs"]
    assert record["status"] == "ok" and record["test_domains"] == ["hospital 2"]
    sizes = {split: score["n"] for split, score in record["selected"]["val_domain"]["metrics"].items()}
    assert sizes.items() >= {"train_val": 30, "val_domain": 20, "test": 20}.items()
    assert all("official split" in row["protocol"] for row in content["summary"])

    content = small_runs.results(data, "protocol={name: leave_one_domain_out, seeds: 1}", ONLY_ERM, "name=turns")
    assert list(content["summary"][0]["per_test_domain"]) == [f"hospital {number}" for number in range(5)]
    for record in content["runs"]:
        metrics = record["selected"]["train_val"]["metrics"]
        assert record["status"] == "ok" and (metrics["train_val"]["n"], metrics["test"]["n"]) == (16, 20)
    for words in ("tested on domains never trained on", "groups kept together", "all labelled images take part"):
        assert words in content["summary"][0]["protocol"]


@pytest.mark.slow
def test_the_worst_region_of_fmow_leaves_other_out():
    miniature.fmow(Path("data"))
    data = "data={name: fmow, root: data}"
    content = small_runs.results(data, f"{OFFICIAL}, metric: worst_domain_accuracy}}", ONLY_ERM)
    [record] = content["runs"]
    metrics = record["selected"]["val_domain"]["metrics"]
    assert [metrics[split]["n"] for split in ("train_val", "val_domain", "test")] == [18, 18, 36]
    held = ",".join(record["test_domains"])
    predictions = load_file(RUN / "models/erm" / held / "seed0-trial0/predictions.safetensors")
    rows = load_file(RUN / f"test_images/{held}.safetensors")["rows"]
    dataset = Fmow(root=Path("data"))
    right, region = predictions["val_domain.predicted"] == dataset.labels[rows], dataset.worst_of[rows]
    assert (region == -1).any(), "the miniature has images of 'Other'"
    worst = min(right[region == number].mean() for number in np.unique(region) if number >= 0)
    assert metrics["test"]["worst_domain_accuracy"] == pytest.approx(worst)


# images that lie on a server give what the same files of this machine give


def scores(content):
    assert content["runs"]
    return [(record["test_domains"], record["selected"]["train_val"]["metrics"]) for record in content["runs"]]


@pytest.fixture
def parquet(monkeypatch):
    monkeypatch.setenv("XDM_FT_CACHE", str(Path("indexes").absolute()))
    for number in range(3):
        write_parquet(Path("data", f"{number}.parquet"), range(24 * number, 24 * number + 24), 10)


@pytest.mark.slow
@pytest.mark.parametrize("trainable", ["false", pytest.param("true", marks=pytest.mark.soak)])
def test_a_run_on_remote_data(trainable, parquet):
    changes = f"encoder.trainable={trainable}", ONLY_ERM, "protocol.test_domains=photo"
    local = small_runs.results("data={name: parquet, file: data}", "output.dir=local", *changes)
    with served(Path("data")) as server:
        data = f"data={{name: parquet, file: '{server.address}', cache_mb: 1}}"
        assert scores(small_runs.results(data, "features.dir=cache2", *changes)) == scores(local)
        server.requests.clear()
        small_runs.results(data, "output.dir=again", "features.dir=cache2", *changes)
        if trainable == "false":
            assert {method for method, *_ in server.requests} == {"HEAD"}, "a warm start opens no file"
        server.status = 500
        assert main(["validate", "small.yaml", data]) == 2


@pytest.mark.slow
@pytest.mark.needs("moto", "s3fs")
@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.soak), "2"])
def test_a_run_on_an_object_store(workers, parquet):
    """The libraries behind `s3://` run threads and a loop of events: worker processes are forked all the same."""
    changes = ONLY_ERM, "protocol.test_domains=photo"
    local = small_runs.results("data={name: parquet, file: data}", "output.dir=local", *changes)
    with object_store() as bucket:
        bucket.upload(Path("data"))
        data = f"data={{name: parquet, file: '{bucket.address}'}}"
        remote = small_runs.results(data, f"features.workers={workers}", "features.dir=cache2", *changes)
        assert scores(remote) == scores(local)


# encoders of transformers, from features to an exported model


def encoder(kind, **keys):
    tiny_transformers.save(kind, Path(kind))
    written = ", ".join(f"{key}: {value}" for key, value in {"model": f"local-dir:{kind}", **keys}.items())
    return f"encoder={{name: transformers, {written}}}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "keys", "overrides", "files"),
    [
        ("dinov2", {"pooling": "cls_mean"}, [], ["encoder.safetensors", "dinov2_with_registers.json"]),
        (
            "clip",
            {"normalize": "true"},
            ["methods=[zero_shot, {name: erm, head_init: zero_shot, label: from text}]"],
            [],
        ),
        pytest.param(
            *("siglip", {}, ["encoder.trainable=true", "training.steps=2", ONLY_ERM], ["model.onnx"]),
            marks=[pytest.mark.needs(*PACKAGES), pytest.mark.soak],
        ),
    ],
)
def test_an_exported_model_predicts_what_its_run_has_recorded(kind, keys, overrides, files, small_pacs):
    """It is loaded without the folder of its encoder."""
    content = small_runs.results(PHOTO, encoder(kind, **keys), *overrides)
    for number, record in enumerate(content["runs"]):
        target = Path(f"model-{number}")
        model = exported(choice_of(record), str(target), **({"onnx": True} if kind == "siglip" else {}))
        np.testing.assert_allclose(model.predict_proba(held_out()), recorded(record), rtol=0, atol=1e-5)
        config = (target / "config.json").read_text()
        assert "local-dir" not in config and str(Path.cwd()) not in config
        assert all((target / file).exists() for file in files)


@pytest.mark.slow
def test_methods_that_need_text_are_skipped_if_the_model_has_none(small_pacs):
    """Only its weights show it; a recipe of such methods alone is one line before training."""
    why = r"class embeddings are needed, but .* has no text side"
    alone = small_runs.recipe(PHOTO, encoder("vit"), "methods=[zero_shot]")
    with pytest.raises(UserError, match=f"methods: zero_shot: {why}"):
        run(alone)
    assert validate(alone).exit_status == 2
    both = PHOTO, encoder("vit"), "methods=[erm, zero_shot]"
    checked = validate(small_runs.recipe(*both))
    assert re.search(f"(?m)^#   skipped: zero_shot: {why}", checked.text()) and checked.exit_status == 0
    content = small_runs.results(*both)
    assert [record["status"] for record in content["runs"]] == ["ok", "skipped"]
    assert re.match(why, content["runs"][1]["reason"])
    assert validate(small_runs.recipe(PHOTO, encoder("vit"), ONLY_ERM)).document["prompts"] is None


# the trace of a training, and nowhere the name of the machine

NAME = "name-of-this-machine"


def test_five_steps_are_traced_and_a_short_training_leaves_none():
    x = torch.ones(4, 4)
    for file, steps in ((Path("traces/erm.json"), 20), (Path("traces/short.json"), 3), (None, 3)):
        with profile_training(file) as after_step:
            for _ in range(steps):
                x @ x
                after_step()
    assert [file.name for file in Path("traces").iterdir()] == ["erm.json"]
    trace = json.loads(Path("traces/erm.json").read_text())
    assert [event["name"] for event in trace["traceEvents"]].count("aten::mm") == 5
    assert trace.get("host_name", "") == "", "torch writes the name of the machine here"
    assert socket.gethostname() not in [value for key, value in trace.items() if key != "traceEvents"]


@pytest.mark.slow
def test_no_file_names_the_machine(small_pacs, tmp_path, monkeypatch):
    uname = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((uname[0], NAME, *uname[2:])))
    monkeypatch.setattr(socket, "gethostname", lambda: NAME)
    monkeypatch.setattr(platform, "node", lambda: NAME)
    monkeypatch.setenv("HOSTNAME", NAME)
    small_runs.results("training.profile=true", "report.page=true", "protocol.test_domains=[sketch]", ONLY_ERM)
    assert main(["export", str(RUN), "model", "--held-out", "sketch", "--no-site"]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "data" not in path.parts]
    names = {path.relative_to(tmp_path).parts[0] for path in files}
    assert {"output", "cache", "model"} <= names and [*(RUN / "profiles").iterdir()] and [*(RUN / "events").iterdir()]
    assert not [path for path in files if NAME in str(path.relative_to(tmp_path)) or NAME.encode() in path.read_bytes()]
