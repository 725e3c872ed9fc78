"""Weights with faults, images that come and go, other inputs than those of a run, and tables with missing values."""

import csv
import datetime
import io
import json
import os
import shutil
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import miniature
import numpy as np
import open_clip
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import timm
import torch
from made_up import MadeUp
from PIL import Image
from real_runs import TEST_VIT, on_images, one_line
from safetensors.torch import save_file
from test_damage import empty_tensors
from test_disk import mode, of_a_user

from xdm_ft.cli.features import fill_cache
from xdm_ft.cli.parser import main
from xdm_ft.data.folder import Folder
from xdm_ft.data.parquet import Parquet
from xdm_ft.data.table import TableDataset
from xdm_ft.experiment import pieces
from xdm_ft.experiment.data_checks import data_faults
from xdm_ft.image_files.tables import MISSING, Columns, alike, name_in
from xdm_ft.recipe.check import load
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import Interrupted
from xdm_ft.storage.results_file import write_results

TINY = """\
{"embed_dim": 16,
 "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
 "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 1, "layers": 1}}
"""


@pytest.fixture
def here(in_folder):
    """The current folder, with small.yaml and its data; its paths are relative."""
    recipe = on_images(in_folder, steps=2)
    recipe.write_text(recipe.read_text().replace(f"{in_folder}/", ""))
    return in_folder


# ---- Files of weights: one line, no code run, nothing written


class Code:
    """Unpickled, it would leave a folder behind."""

    def __reduce__(self):
        return os.mkdir, ("exploded",)


def cut(path, state, end):
    save_file(state, path)
    path.write_bytes(path.read_bytes()[:end])


def wrong_shapes(path, state):
    save_file({name: value.new_zeros([n + 1 for n in value.shape]) for name, value in state.items()}, path)


def nan_inside(path, state):
    name = next(name for name, value in state.items() if value.is_floating_point() and value.dim() > 1)
    save_file({**state, name: torch.where(torch.arange(state[name].shape[-1]) == 0, torch.nan, state[name])}, path)


FAULTS = {
    "truncated": (lambda path, state: cut(path, state, -100), "safetensors", "is damaged"),
    "header alone": (lambda path, state: cut(path, state, 40), "safetensors", "is damaged"),
    "wrong shapes": (wrong_shapes, "safetensors", "does not fit"),
    "nan": (nan_inside, "safetensors", "NaN"),
    "code": (lambda path, state: torch.save({**state, "code": Code()}, path), "pth", "holds pickled code"),
    "old code": (
        lambda path, state: torch.save({**state, "code": Code()}, path, _use_new_zipfile_serialization=False),
        "pt",
        "holds pickled code",
    ),
    "text": (lambda path, state: path.write_text("<html>404</html>"), "pth", "is damaged"),
    "text in safetensors": (lambda path, state: path.write_text("<html>404</html>"), "safetensors", "is damaged"),
    "brackets": (
        lambda path, state: path.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000),
        "safetensors",
        "is damaged",
    ),
    "empty tensors": (lambda path, state: empty_tensors(path, 26_000_000), "safetensors", "more than 100,000 tensors"),
    "folder": (lambda path, state: path.mkdir(), "safetensors", "is a folder"),
    "missing": (lambda path, state: None, "pth", "does not exist"),
    "dangling": (lambda path, state: path.symlink_to(path.name), "pth", "does not exist"),
}


@pytest.mark.slow
@pytest.mark.parametrize("library", ["timm", pytest.param("open_clip", marks=pytest.mark.soak)])
def test_weights_with_faults(library, here, capsys):
    torch.manual_seed(0)
    if library == "timm":
        keys, state = TEST_VIT, timm.create_model("test_vit", num_classes=0, img_size=32).state_dict()
    else:
        Path("tiny_of_tests.json").write_text(TINY)
        open_clip.add_model_config(here / "tiny_of_tests.json")
        keys = "name: open_clip, model: tiny_of_tests.json"
        state = open_clip.create_model("tiny_of_tests").state_dict()
    state = {name: value.contiguous() for name, value in state.items()}
    for name, (make, suffix, wording) in FAULTS.items():
        path = here / f"bad {name}.{suffix}"
        make(path, state)
        capsys.readouterr()
        assert main(["run", "small.yaml", f"encoder={{{keys}, weights: '{path}'}}"]) == 2, name
        line = one_line(capsys.readouterr().err)
        assert str(path) in line and wording in line, name
        assert not Path("exploded").exists() and not Path("out").exists()

    if library == "timm":
        norm = next(name for name in state if name.endswith("norm.weight"))
        save_file({**state, norm: torch.full_like(state[norm], torch.inf)}, "inf.safetensors")
        assert main(["run", "small.yaml", f"encoder={{{keys}, weights: inf.safetensors}}"]) == 2
        assert "inf.safetensors holds NaN or infinity in 1 tensor (norm.weight)" in one_line(capsys.readouterr().err)
    else:
        Path("deep.json").write_text("[" * 100_000)
        assert main(["run", "small.yaml", "encoder={name: open_clip, model: deep.json, weights: w.safetensors}"]) == 2
        assert "encoder.model: deep.json is not valid JSON" in one_line(capsys.readouterr().err)


# ---- Images that come and go: one cached row per image, for ever


@pytest.mark.slow
def test_only_new_images_are_encoded(here):
    def computed(*overrides):
        return fill_cache(load("small.yaml", [*overrides])).document["computed"]

    images = len([*here.glob("data/**/*.png")])
    assert computed() == images and computed() == 0
    manifest = json.loads(next(Path("cache").glob("*/manifest.json")).read_text())
    assert "photo" not in json.dumps(manifest) and manifest["schema"] == 2, "it names no image"
    miniature.save(here / "data/PACS/photo/dog/added.png", 9, 9, 9)
    assert computed() == 1
    shutil.rmtree(here / "data/PACS/sketch")
    folder = ["data={name: folder, root: data/PACS}", "protocol.test_domains=cartoon"]
    assert computed(*folder) == 0, "a domain less, through another reader"
    (here / "data/PACS/photo").rename(here / "data/PACS/photograph")
    assert computed(*folder) == 0, "a domain renamed"
    paths = [path for path in (here / "data").rglob("*.png")]
    with Path("table.csv").open("w", newline="") as file:
        rows = [[path, path.parts[-2], path.parts[-3]] for path in reversed(paths)]
        csv.writer(file).writerows([["path", "label", "domain"], *rows])
    assert computed("data={name: table, file: table.csv}", folder[1]) == 0, "in another order, through a table"


# ---- Other inputs than those of the run


def write_weights(seed):
    torch.manual_seed(seed)
    save_file(timm.create_model("test_vit", img_size=32).state_dict(), "w.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "ended", "trainable"),
    [
        ("image", False, "true"),
        ("weights", True, "false"),
        pytest.param("more images", False, "false", marks=pytest.mark.soak),
        pytest.param("weights", True, "true", marks=pytest.mark.soak),
    ],
)
def test_other_inputs_are_refused(changed, ended, trainable, here, monkeypatch, capsys):
    """Between two models of a run, or after it."""
    write_weights(seed=1)
    command = ["run", "small.yaml", f"encoder.trainable={trainable}", "encoder.weights=w.safetensors"]
    save = pieces.save

    def save_and_stop(*arguments, **settings):
        save(*arguments, **settings)
        raise Interrupted

    with monkeypatch.context() as patch:
        if not ended:
            patch.setattr(pieces, "save", save_and_stop)
        assert main([*command, "protocol.seeds=2"]) == (0 if ended else 143)
    before = Path("out/small/results.json").read_bytes()
    if changed == "image":
        Image.new("RGB", (20, 20), "red").save(next((here / "data").rglob("*.png")))
    elif changed == "more images":
        miniature.save(here / "data/PACS/sketch/dog/more.png", 0, 3, 99)
    else:
        write_weights(seed=2)
    capsys.readouterr()
    assert main([*command, "protocol.seeds=2"]) == 2
    words = {
        "image": "images have",
        "more images": "images and the number of",
        "weights": "the encoder's weights have",
    }[changed]
    line = one_line(capsys.readouterr().err)
    assert f"small: {words}" in line and "have changed since this run started (" in line
    assert (
        trainable == "true"
        or {"more images": "(data.images", "weights": "(encoder.weights, features.key)"}[changed] in line
    )
    assert Path("out/small/results.json").read_bytes() == before


# ---- Pruning what no run was trained on


def test_what_no_run_refers_to_is_pruned_and_nothing_by_mistake(here, capsys):
    def cached():
        return {path.name for path in Path("cache").iterdir() if path.is_dir()}

    def prune(*arguments):
        return main(["cache", "prune", "--dir", "cache", *arguments])

    keys = []
    for name, size in (("one", 16), ("two", 32)):
        encoder = f"encoder={{{TEST_VIT.replace('32', str(size))}}}"
        assert main(["run", "small.yaml", f"name={name}", encoder]) == 0
        environment = json.loads(Path(f"out/{name}/results.json").read_text())["environment"]
        keys.append(environment["features"]["key"])
    one, two = keys
    assert cached() == {one, two} and one != two
    capsys.readouterr()
    for folder in ("cache", "nowhere"):
        assert prune("--unreferenced", folder) == 2
        assert f"{folder} holds no run" in one_line(capsys.readouterr().err)
    with mode(here / "out/one", 0), of_a_user():
        assert prune("--unreferenced", "out") == 2
    assert "cache prune: out/one: cannot be read (Permission denied)" in one_line(capsys.readouterr().err)
    path = Path("out/one/results.json")
    text = path.read_text()
    path.write_text(text.replace(one, "0" * 32))
    assert prune("--unreferenced", "out") == 2
    assert f"{path}: is damaged (its checksum differs" in one_line(capsys.readouterr().err)
    path.write_text(text)
    for folders in (["out"], ["out/one", "out/two"]):
        assert prune("--unreferenced", *folders) == 0 and cached() == {one, two}
    results = json.loads(text)
    del results["environment"]["features"]  # of a run that trained end to end
    write_results(path, results)
    capsys.readouterr()
    assert prune("--unreferenced", "out", "--max-size", "1") == 0 and cached() == {two}
    assert "1 file removed" in capsys.readouterr().out
    assert prune("--unreferenced", "out", "--max-size", "0") == 0 and cached() == set()


# ---- Cells of tables that are no names

NAMES = ("a.png", "b.png", "c.png", "d.png")
COLUMNS = ("label", "domain", "group")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")
    for name in NAMES:
        Image.new("RGB", (5, 4), "teal").save(tmp_path / name)
    return tmp_path


def cells(**changed):
    good = {"path": NAMES, "label": "cdcd", "domain": "xxyy", "group": "ppqq"}
    return {name: list(changed.get(name, column)) for name, column in good.items()}


def as_csv(folder, columns):
    rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    (folder / "t.csv").write_text("\n".join(rows))
    return TableDataset(file=folder / "t.csv")


def as_parquet(folder, columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "t.parquet")
    return TableDataset(file=folder / "t.parquet")


def with_images(folder, columns):
    images = [(folder / name).read_bytes() for name in columns.pop("path")]
    pyarrow.parquet.write_table(pyarrow.table({"image": images, **columns}), folder / "images.parquet")
    return Parquet(file=folder / "images.parquet", columns=Columns(group="group"))


def refused(read, folder, columns):
    with pytest.raises(UserError) as caught:
        read(folder, columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("read", "column"), [(as_csv, "label"), (as_parquet, "domain"), (as_csv, "group")])
def test_texts_that_mean_a_missing_value(read, column, folder):
    texts = sorted(MISSING - {"NaT"})
    assert len(texts) > 15
    assert pandas.read_csv(io.StringIO("\n".join(["label", *texts])), skip_blank_lines=False)["label"].isna().all()
    for text in sorted(MISSING):
        message = refused(read, folder, cells(**{column: ["u", "v", text, f" {text}"]}))
        row = 4 if read is as_csv else 3
        assert f'row {row}, column {column}: "{text}" means a missing value; fill it in, or write another' in message
        assert message.endswith("(and 1 more row like it)")


NO_NAMES = {
    "null": (["u", None, "w", None], "the cell is empty; fill it in"),
    "blank": (["u", "  ", "w", ""], "the cell is empty; fill it in"),
    "float nan": ([0.0, np.nan, 1.0, 2.0], '"nan" means a missing value'),
    "list": ([["u"], ["v"], ["u"], ["v"]], "must be text or a number, not a list"),
    "date": ([datetime.date(2020, 1, 2)] * 4, "must be text or a number, not a date"),
}


@pytest.mark.parametrize("kind", NO_NAMES)
def test_cells_that_are_no_names(kind, folder):
    values, problem = NO_NAMES[kind]
    is_type = "text or a number" in problem
    for column in COLUMNS:
        message = refused(as_parquet, folder, cells(**{column: values}))
        assert f"t.parquet: row {1 if is_type else 2}, column {column}: " in message and problem in message
    message = refused(with_images, folder, cells(label=values))
    if is_type:  # of the whole column
        assert "images.parquet: column label: a name must be text or a number, not a " in message
    else:
        assert "images.parquet: row " in message and f", column label: {problem}" in message


def test_names_of_every_other_kind(folder):
    for values, names in (
        (["u", "v ", "u", "v"], ("u", "v")),
        ([1, 2, 1, 2], ("1", "2")),
        ([1.0, 2.5, 1.0, 2.5], ("1.0", "2.5")),
        ([Decimal("1"), Decimal("2")] * 2, ("1", "2")),
        (["none", "other", "none", "other"], ("none", "other")),
    ):
        assert as_parquet(folder, cells(label=values)).class_names == names
    assert with_images(folder, cells(label=["None ?", "v", "v", "v"])).class_names == ("None ?", "v")
    assert [name_in(cell) for cell in (" x ", 3, True, -0.5, 10**30)] == ["x", "3", "True", "-0.5", str(10**30)]
    for name in ("nan/None", "nan/tumour", "NA/None", "NA/tumour"):
        (folder / "names" / name).mkdir(parents=True)
        Image.new("RGB", (5, 4)).save(folder / "names" / name / "0.png")
    dataset = Folder(root=folder / "names")
    assert (dataset.class_names, dataset.domain_names) == (("None", "tumour"), ("NA", "nan"))


def faults_of(dataset):
    without_copies = SimpleNamespace(duplicates=list)
    return list(data_faults(dataset, without_copies, []))


def test_names_that_are_alike_are_reported(folder):
    dataset = as_csv(folder, cells(label=["1", "1.0", "01", "2"], domain=["Site", "site", "x", "x"]))
    classes, domains, *_ = faults_of(dataset)
    assert classes.found.startswith('"01" (in x) and "1" (in Site) and "1.0" (in site) differ only in case, spaces')
    assert domains.found.startswith('"Site" (1 image) and "site" (1 image) differ only in case, spaces or the form')
    assert classes.remedy and domains.remedy
    others = faults_of(MadeUp([0, 1, 2], [0, 1, 1]))
    assert not [finding for finding in others if "differ only" in finding.found]
    names = ["1", "1.0", "1e0", "cat", "Cat", "cat ", "é", "e\u0301", "a b", "ab", "nan", "1_0", "10", "inf", "²", "2"]
    assert alike(names) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9], [14, 15]]
