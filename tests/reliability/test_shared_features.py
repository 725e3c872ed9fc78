"""One row per image, for ever: what is encoded when images come, go and are read in other ways, or by other users."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import miniature
import pytest
from PIL import Image
from rights import of_a_user

from xdm_ft.cli.features import fill_cache
from xdm_ft.cli.parser import main
from xdm_ft.recipe.check import load
from xdm_ft.runtime.interrupt import Interrupted

RECIPE = """\
name: small
data: {{{data}}}
protocol: {{name: leave_one_domain_out, seeds: 1}}
encoder: {{name: timm, model: test_vit, preprocessing: {{size: 16}}, kwargs: {{img_size: 16}}}}
features: {{dir: cache, workers: 0, batch_size: 8}}
methods: [erm]
training: {{steps: 2, batch_size: 2}}
report: {{page: false}}
output: {{dir: out}}
"""
PACS = 4 * 7 * 2  # images


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    miniature.domainbed(tmp_path / "data", "pacs", per_class=2)
    return tmp_path


def encoded(caplog: pytest.LogCaptureFixture, data: str = "name: pacs, root: data, counts: any") -> int:
    """The number of images that `xdm-ft features` encodes."""
    Path("small.yaml").write_text(RECIPE.format(data=data))
    caplog.clear()
    with caplog.at_level("INFO", logger="xdm_ft"):
        return fill_cache(load("small.yaml")).document["computed"]


@pytest.mark.slow
def test_only_new_images_are_encoded(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert encoded(caplog) == PACS
    assert encoded(caplog) == 0
    domain = here / "data" / "PACS" / "photo"
    Image.new("RGB", (20, 20), "teal").save(domain / "dog" / "added.png")
    assert encoded(caplog) == 1
    shutil.rmtree(here / "data" / "PACS" / "sketch")
    folder = f"name: folder, root: {here / 'data' / 'PACS'}"
    assert encoded(caplog, folder) == 0, "a domain less, through another reader"
    domain.rename(domain.with_name("photograph"))
    assert encoded(caplog, folder) == 0, "a domain renamed"
    images = [path for path in (here / "data").rglob("*") if path.is_file()]
    with Path("table.csv").open("w", newline="") as file:
        rows = [[path, path.parts[-2], path.parts[-3]] for path in reversed(images)]
        csv.writer(file).writerows([["path", "label", "domain"], *rows])
    assert encoded(caplog, "name: table, file: table.csv") == 0, "in another order, through a table"


def end_to_end(weights: str, seeds: int = 2) -> None:
    text = RECIPE.format(data="name: pacs, root: data, counts: any").replace("seeds: 1", f"seeds: {seeds}")
    encoder = f"kwargs: {{img_size: 16}}, trainable: true, weights: {weights}"
    Path("small.yaml").write_text(text.replace("kwargs: {img_size: 16}", encoder))


def weights_file(path: Path, seed: int) -> None:
    import timm
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    save_file(timm.create_model("test_vit", img_size=16).state_dict(), path)


@pytest.mark.parametrize(
    ("changed", "ended"),
    [
        pytest.param("image", False, marks=pytest.mark.slow),
        pytest.param("weights", True, marks=pytest.mark.slow),
        pytest.param("image", True, marks=pytest.mark.slow),
        pytest.param("weights", False, marks=pytest.mark.slow),
    ],
)
def test_other_inputs_are_refused_end_to_end(
    changed: str, ended: bool, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between two models of a run, or after it."""
    from xdm_ft.experiment.results import ResultsFile

    weights_file(here / "w.safetensors", seed=1)
    end_to_end("w.safetensors")
    with monkeypatch.context() as patch:
        if not ended:
            patch.setattr(ResultsFile, "save", stopping_after_one(ResultsFile.save))
        assert main(["run", "small.yaml", "protocol.test_domains=[sketch]"]) == (0 if ended else 143)
    before = Path("out/small/results.json").read_bytes()
    if changed == "image":
        Image.new("RGB", (20, 20), "red").save(next((here / "data").rglob("*.png")))
    else:
        weights_file(here / "w.safetensors", seed=2)
    capsys.readouterr()
    assert main(["run", "small.yaml", "protocol.test_domains=[sketch]"]) == 2
    words = {"image": "images have changed", "weights": "the encoder's weights have changed"}[changed]
    error = capsys.readouterr().err
    assert f"small: {words} since this run started" in error and error.count("xdm-ft:") == 1
    assert Path("out/small/results.json").read_bytes() == before


@pytest.mark.slow
def test_other_weights_of_a_frozen_encoder_are_named_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights_file(here / "w.safetensors", seed=1)
    text = RECIPE.format(data="name: pacs, root: data, counts: any")
    Path("small.yaml").write_text(text.replace("kwargs: {img", "weights: w.safetensors, kwargs: {img"))
    assert main(["run", "small.yaml", "protocol.test_domains=[sketch]"]) == 0
    weights_file(here / "w.safetensors", seed=2)
    capsys.readouterr()
    assert main(["run", "small.yaml", "protocol.test_domains=[sketch]"]) == 2
    error = capsys.readouterr().err
    assert "small: the encoder's weights have changed since this run started (encoder.weights, features.key)" in error


def stopping_after_one(save: Callable[..., None]) -> Callable[..., None]:
    def stopping(*arguments: object) -> None:
        save(*arguments)
        raise Interrupted

    return stopping


def give_away(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65533, 65533)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_features_of_another_user(
    mode: int, here: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def xdm_ft(*arguments: str) -> tuple[int, str]:
        caplog.clear()
        with of_a_user():
            return main([*arguments]), "".join(capsys.readouterr())

    Path("cache").mkdir()
    Path("cache").chmod(mode)
    assert encoded(caplog) == PACS
    give_away(here / "cache")
    status, error = xdm_ft("features", "small.yaml")
    if mode == 0o700:
        assert status == 2 and "cache can not be read; set features.dir" in error and error.count("xdm-ft:") == 1
        return
    assert status == 0 and f"{PACS} images of width 64, 0 of them extracted now" in error, error
    Image.new("RGB", (20, 20), "teal").save(here / "data" / "PACS" / "photo" / "dog" / "added.png")
    status, error = xdm_ft("features", "small.yaml")
    if mode == 0o777:
        assert status == 0 and "1 of them extracted now" in error, error
        assert encoded(caplog) == 0, "what the folder's rights allow"
    else:
        assert status == 2 and "can not be written, and lacks features of 1 image; set features.dir" in error
    shards = set(Path("cache").rglob("shard-*"))
    for verb in (["ls"], ["verify"], ["prune", "--max-size", "0"]):
        status, error = xdm_ft("cache", *verb, "--dir", "cache")
        assert status == (2 if mode == 0o755 and verb[0] == "prune" else 0), error
    gone = shards - set(Path("cache").rglob("shard-*"))
    assert len(gone) == (1 if mode == 0o777 else 0), "one's own, and never another user's"


def test_the_manifest_names_no_image(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    encoded(caplog)
    manifest = json.loads(next(Path("cache").glob("*/manifest.json")).read_text())
    assert "photo" not in json.dumps(manifest) and manifest["schema"] == 2
