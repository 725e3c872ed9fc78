"""One row per image, for ever: what is encoded when images come and go, for other users, and what `prune` keeps."""

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
from xdm_ft.experiment import pieces
from xdm_ft.recipe.check import load
from xdm_ft.runtime.interrupt import Interrupted
from xdm_ft.storage.results_file import write_results

RECIPE = """\
name: {name}
data: {{{data}}}
protocol: {{name: leave_one_domain_out, test_domains: [sketch], seeds: 1}}
encoder: {{name: timm, model: test_vit, preprocessing: {{size: 16}}, kwargs: {{img_size: {size}}}{encoder}}}
features: {{dir: cache, workers: 0, batch_size: 8}}
methods: [erm]
training: {{steps: 2, batch_size: 2}}
report: {{page: false}}
output: {{dir: out}}
"""
PACS = 4 * 7 * 2  # images
DATA = "name: pacs, root: data, counts: any"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    miniature.domainbed(tmp_path / "data", "pacs", per_class=2)
    return tmp_path


def recipe(name: str = "small", data: str = DATA, size: int = 16, encoder: str = "") -> str:
    text = RECIPE.format(name=name, data=data, size=size, encoder=encoder)
    Path(f"{name}.yaml").write_text(text.replace("size: 16}", f"size: {size}}}", 1))
    return f"{name}.yaml"


def encoded(data: str = DATA) -> int:
    """The number of images that `xdm-ft features` encodes."""
    return fill_cache(load(recipe(data=data))).document["computed"]


def add_image(here: Path) -> None:
    Image.new("RGB", (20, 20), "teal").save(here / "data/PACS/photo/dog/added.png")


@pytest.mark.slow
def test_only_new_images_are_encoded(here: Path) -> None:
    assert encoded() == PACS
    assert encoded() == 0
    manifest = json.loads(next(Path("cache").glob("*/manifest.json")).read_text())
    assert "photo" not in json.dumps(manifest) and manifest["schema"] == 2, "it names no image"
    add_image(here)
    assert encoded() == 1
    shutil.rmtree(here / "data/PACS/sketch")
    folder = f"name: folder, root: {here / 'data/PACS'}"
    text = RECIPE.replace("[sketch]", "[cartoon]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "RECIPE", text)
        assert encoded(folder) == 0, "a domain less, through another reader"
        (here / "data/PACS/photo").rename(here / "data/PACS/photograph")
        assert encoded(folder) == 0, "a domain renamed"
        images = [path for path in (here / "data").rglob("*") if path.is_file()]
        with Path("table.csv").open("w", newline="") as file:
            rows = [[path, path.parts[-2], path.parts[-3]] for path in reversed(images)]
            csv.writer(file).writerows([["path", "label", "domain"], *rows])
        assert encoded("name: table, file: table.csv") == 0, "in another order, through a table"


# ---- Other inputs than those of the run


def weights_file(path: Path, seed: int) -> None:
    import timm
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    save_file(timm.create_model("test_vit", img_size=16).state_dict(), path)


def stopping_after_one(save: Callable[..., None]) -> Callable[..., None]:
    def stopping(*arguments: object, **settings: object) -> None:
        save(*arguments, **settings)
        raise Interrupted

    return stopping


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["image", "weights"])
@pytest.mark.parametrize("ended", [False, True])
def test_other_inputs_are_refused_end_to_end(
    changed: str, ended: bool, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between two models of a run, or after it."""
    weights_file(here / "w.safetensors", seed=1)
    command = ["run", recipe(encoder=", trainable: true, weights: w.safetensors"), "protocol.seeds=2"]
    with monkeypatch.context() as patch:
        if not ended:
            patch.setattr(pieces, "save", stopping_after_one(pieces.save))
        assert main(command) == (0 if ended else 143)
    before = Path("out/small/results.json").read_bytes()
    if changed == "image":
        Image.new("RGB", (20, 20), "red").save(next((here / "data").rglob("*.png")))
    else:
        weights_file(here / "w.safetensors", seed=2)
    capsys.readouterr()
    assert main(command) == 2
    words = {"image": "images have changed", "weights": "the encoder's weights have changed"}[changed]
    error = capsys.readouterr().err
    assert f"small: {words} since this run started" in error and error.count("xdm-ft:") == 1
    assert Path("out/small/results.json").read_bytes() == before


@pytest.mark.slow
def test_other_weights_of_a_frozen_encoder_are_named_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights_file(here / "w.safetensors", seed=1)
    command = ["run", recipe(encoder=", weights: w.safetensors")]
    assert main(command) == 0
    weights_file(here / "w.safetensors", seed=2)
    capsys.readouterr()
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "small: the encoder's weights have changed since this run started (encoder.weights, features.key)" in error


# ---- Another user


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_features_of_another_user(mode: int, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def xdm_ft(*arguments: str) -> tuple[int, str]:
        with of_a_user():
            return main([*arguments]), "".join(capsys.readouterr())

    Path("cache").mkdir()
    Path("cache").chmod(mode)
    assert encoded() == PACS
    for path in (here / "cache", *(here / "cache").rglob("*")):
        os.chown(path, 65533, 65533)
    status, error = xdm_ft("features", "small.yaml")
    if mode == 0o700:
        assert status == 2 and "cache can not be read; set features.dir" in error and error.count("xdm-ft:") == 1
        return
    assert status == 0 and f"{PACS} images of width 64, 0 of them extracted now" in error, error
    add_image(here)
    status, error = xdm_ft("features", "small.yaml")
    if mode == 0o777:
        assert status == 0 and "1 of them extracted now" in error, error
        assert encoded() == 0, "what the folder's rights allow"
    else:
        assert status == 2 and "can not be written, and lacks features of 1 image; set features.dir" in error
    shards = set(Path("cache").rglob("shard-*"))
    for verb in (["ls"], ["verify"], ["prune", "--max-size", "0"]):
        status, error = xdm_ft("cache", *verb, "--dir", "cache")
        assert status == (2 if mode == 0o755 and verb[0] == "prune" else 0), error
    gone = shards - set(Path("cache").rglob("shard-*"))
    assert len(gone) == (1 if mode == 0o777 else 0), "one's own, and never another user's"


# ---- Pruning what no run was trained on


def cached() -> set[str]:
    return {path.name for path in Path("cache").iterdir() if path.is_dir()}


def key_of(name: str) -> str:
    return json.loads(Path(f"out/{name}/results.json").read_text())["environment"]["features"]["key"]


def prune(*arguments: str) -> int:
    return main(["cache", "prune", "--dir", "cache", *arguments])


def test_what_no_run_refers_to_goes_and_nothing_by_mistake(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, size in (("one", 16), ("two", 32)):
        assert main(["run", recipe(name, size=size)]) == 0
    one, two = key_of("one"), key_of("two")
    assert cached() == {one, two} and one != two
    capsys.readouterr()
    for folders, line in ((["cache"], "cache holds no run"), (["nowhere"], "nowhere holds no run")):
        assert prune("--unreferenced", *folders) == 2 and line in capsys.readouterr().err
    Path("out/one").chmod(0)
    with of_a_user():
        assert prune("--unreferenced", "out") == 2
    Path("out/one").chmod(0o700)
    assert "cache prune: out/one: can not be read (Permission denied)" in capsys.readouterr().err
    path = Path("out/one/results.json")
    whole = path.read_text()
    path.write_text(whole.replace(one, "0" * 32))
    assert prune("--unreferenced", "out") == 2
    assert f"{path}: is damaged (its checksum differs" in capsys.readouterr().err
    path.write_text(whole)
    for folders in (["out"], ["out/one", "out/two"]):
        assert prune("--unreferenced", *folders) == 0 and cached() == {one, two}
    results = json.loads(whole)
    del results["environment"]["features"]  # of a run that trained end to end
    write_results(path, results)
    capsys.readouterr()
    assert prune("--unreferenced", "out", "--max-size", "1") == 0 and cached() == {two}
    assert "1 file removed" in capsys.readouterr().out
    assert prune("--unreferenced", "out", "--max-size", "0") == 0 and cached() == set()
