"""Parquet files, imagefolders and hub repositories, read by `datasets`: bit for bit as from plain folders."""

import logging
import shutil
from pathlib import Path

import miniature
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from xdm_ft.data.folder import Folder
from xdm_ft.data.hub import Hub
from xdm_ft.data.imagefolder import ImageFolder
from xdm_ft.data.parquet import Parquet
from xdm_ft.encoders.timm import Timm
from xdm_ft.features import FeatureSettings
from xdm_ft.features.extract import extract
from xdm_ft.features.hashes import hash_files
from xdm_ft.image_files.tables import Columns
from xdm_ft.images.decode import UnreadableImage
from xdm_ft.images.transforms import PreprocessingOverrides
from xdm_ft.protocol.splits import Protocol, splits
from xdm_ft.runtime.errors import UserError


@pytest.fixture(autouse=True)
def cache_of_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def folder(tmp_path):
    miniature.domainbed(tmp_path / "data", "pacs", per_class=2, suffix=".jpg", beside=True)
    return Folder(root=tmp_path / "data" / "PACS")


def table_of(folder, **more):
    images = [Path(folder.content(row)).read_bytes() for row in range(len(folder))]
    labels = [folder.class_names[c] for c in folder.labels]
    domains = [folder.domain_names[d] for d in folder.domains]
    return {"image": images, "label": labels, "domain": domains, **more}


def write(path, table):
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    return path


def same(found, folder):
    assert found.class_names == folder.class_names and found.domain_names == folder.domain_names
    assert np.array_equal(found.labels, folder.labels) and np.array_equal(found.domains, folder.domains)
    for row in range(len(folder)):
        assert np.array_equal(np.asarray(found.image(row)), np.asarray(folder.image(row)))


def test_parquet_and_imagefolder_give_the_features_of_the_folder(folder, tmp_path):
    torch.manual_seed(0)
    encoder = Timm(model="test_vit", kwargs={"img_size": 32}, preprocessing=PreprocessingOverrides(size=32))
    parquet = Parquet(file=write(tmp_path / "images.parquet", table_of(folder)))
    imagefolder = ImageFolder(root=tmp_path / "data" / "PACS")
    settings = FeatureSettings(dir=tmp_path / "cache", workers=0)
    rows = torch.arange(len(folder))
    encoded, found = [], []
    for data in (folder, parquet, imagefolder):
        hashes = hash_files(data, None, show=False)
        features = extract(encoder, data, hashes, settings, on_bad_image="error", device="cpu", show=False)
        found.append(features[rows])
        encoded.append(features.extracted)
    assert encoded == [len(folder), 0, 0], "the same images through other readers"
    assert found[0].std() > 0
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    same(parquet, folder)
    same(imagefolder, folder)


@pytest.mark.parametrize("name", ["run[1]", "**", "{a,b}", "p%20#q"])
def test_names_of_folders_are_no_globs(tmp_path, name):
    root = tmp_path / name / "data"
    for number, folder in enumerate((f"{name}/cat", f"{name}/dog[2]", "a1xb/cat", "xy/dog[2]", "run1/cat")):
        miniature.save(root / folder / f"{name}{number}.png", number, 0, 0)
    (root / "run1" / "metadata.csv").write_text("file_name,age\ncat/0.png,7\n")
    data = ImageFolder(root=root)
    same(data, plain := Folder(root=root))
    assert np.bincount(plain.domains).tolist()[plain.domain_names.index(name)] == 2


def test_what_datasets_would_read_wrongly_is_refused(tmp_path):
    for case, path, told in (
        ("chained", "a/b::c/0.png", r"`datasets` cannot read a path with :: \(a/b::c/0.png\); rename it"),
        ("deep", "a/cat/patient/0.png", r"a/cat/patient/0.png \(1 of 2 images\) is not <domain>/<class>/<image>"),
        ("shallow", "b/0.png", r"b/0.png \(1 of 2 images\) is not <domain>/<class>/<image>"),
    ):
        for image in (path, "b/cat/0.png"):
            miniature.save(tmp_path / case / image, 0, 0, 0)
        with pytest.raises(UserError, match=f"{told}.*data.name: folder"):
            ImageFolder(root=tmp_path / case)
    for image in ("a/cat/0.png", "b/cat/0.png"):
        miniature.save(tmp_path / "packed" / image, 0, 0, 0)
    shutil.make_archive(str(tmp_path / "packed/a/cat/old"), "zip", tmp_path / "packed" / "b")
    with pytest.raises(UserError, match=r"`datasets` finds 2 of 1 images in a; set data.name: folder, which finds all"):
        ImageFolder(root=tmp_path / "packed")


def test_an_unchanged_table_is_not_read_again(folder, tmp_path, monkeypatch):
    cache, path = tmp_path / "cache", tmp_path / "images.parquet"
    cache.mkdir()
    first = hash_files(Parquet(file=write(path, table_of(folder))), cache, show=False)
    with monkeypatch.context() as patch:
        patch.setattr(Parquet, "content", None)
        again = hash_files(Parquet(file=path), cache, show=False)
    assert np.array_equal(again.digests, first.digests) and again.digests.any(1).all()
    assert np.array_equal(hash_files(folder, None, show=False).digests, first.digests)
    table = table_of(folder)
    table["image"].reverse()
    reverse = hash_files(Parquet(file=write(path, table)), cache, show=False)
    assert np.array_equal(reverse.digests, first.digests[::-1])
    data = ImageFolder(root=tmp_path / "data" / "PACS")  # whose files are looked at one by one
    assert np.array_equal(hash_files(data, cache, show=False).digests, first.digests)
    Path(data.content(3)).write_bytes(b"changed")
    changed = (hash_files(data, cache, show=False).digests != first.digests).any(1)
    assert changed.nonzero()[0].tolist() == [3]


def test_several_files_other_columns_groups_and_splits(folder, tmp_path):
    table = table_of(folder)
    n = len(folder)
    table = {
        "picture": table["image"],
        "class": folder.labels.tolist(),
        "site": table["domain"],
        "patient": [f"p{i % 7}" for i in range(n)],
        "part": (["train", "validation", "test", "train"] * n)[:n],
    }
    files = tmp_path / "files"
    files.mkdir()
    for number, rows in enumerate((slice(0, 20), slice(20, n))):
        write(files / f"{number}.parquet", {name: column[rows] for name, column in table.items()})
    columns = Columns(image="picture", label="class", domain="site", group="patient", split="part")
    found = Parquet(file=files, columns=columns)
    assert np.array_equal(found.labels, folder.labels) and found.class_names == tuple("0123456")
    assert found.groups.tolist() == [i % 7 for i in range(n)]
    assert found.splits[:4].tolist() == ["train", "val", "test", "train"] and found.left_out == ()
    write(files / "1.parquet", {name: column[20:] for name, column in (table | {"p:dog": [0.5] * n}).items()})
    [unread] = Parquet(file=files, columns=columns).left_out
    assert unread.startswith(f"{files}: p:dog: not read as soft labels; write the images as files, and list")


def test_the_order_of_classes_of_a_classlabel_column_is_kept(folder, tmp_path):
    from datasets import ClassLabel, Dataset, Features, Image, Value

    names = ["person", *folder.class_names[:-1]]
    table = table_of(folder)
    table["image"] = [{"bytes": data, "path": f"{i}.jpg"} for i, data in enumerate(table["image"])]
    spelled = Features({"image": Image(), "label": ClassLabel(names=names), "domain": Value("string")})
    Dataset.from_dict(table, features=spelled).to_parquet(tmp_path / "images.parquet")
    found = Parquet(file=tmp_path / "images.parquet")
    assert found.class_names == tuple(names)
    assert [found.class_names[c] for c in found.labels] == table["label"]
    assert found.name(3).endswith("images.parquet, row 3 (3.jpg)")
    assert np.array_equal(np.asarray(found.image(5)), np.asarray(folder.image(5)))


def test_faults(folder, tmp_path):
    table, path = table_of(folder), tmp_path / "images.parquet"
    with pytest.raises(UserError, match="order of folders"):
        splits(Parquet(file=write(path, table)), Protocol(split_rule="domainbed"), 0)
    table["image"][4], table["image"][5] = b"no image", None
    undecodable = Parquet(file=write(path, table))
    for row in (4, 5):
        with pytest.raises(UnreadableImage, match=rf"images.parquet, row {row}: not an image"):
            undecodable.image(row)
    without = {name: column for name, column in table.items() if name != "domain"}
    unlabelled = {**table, "label": [None, *table["label"][1:]]}
    for changed, message in (
        (without, r'data.columns.domain: .* has no column "domain"; known: image, label'),
        (unlabelled, "row 0, column label: the cell is empty; fill it in"),
    ):
        with pytest.raises(UserError, match=message):
            Parquet(file=write(path, changed))
    (tmp_path / "junk.parquet").write_bytes(b"junk")
    (tmp_path / "empty").mkdir()
    for read, name, message in (
        (lambda path: Parquet(file=path), "nothing.parquet", "does not exist"),
        (lambda path: Parquet(file=path), "empty", "contains no .parquet files"),
        (lambda path: Parquet(file=path), "junk.parquet", r"junk.parquet: cannot be read \(ArrowInvalid"),
        (lambda path: ImageFolder(root=path), "nowhere", r"data.root: .* does not exist; set data.root to a folder"),
        (lambda path: ImageFolder(root=path), "empty", r"data.root: .*empty contains no images in .* folders; set"),
    ):
        with pytest.raises(UserError, match=message):
            read(tmp_path / name)


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    """Replaces the hub by local files, read with the same function. Returns the list of requests."""
    import datasets

    real = datasets.load_dataset
    asked = []

    def load_dataset(name, configuration=None, *, revision=None, keep_in_memory, **files):
        if files:
            return real(name, **files)
        asked.append((name, configuration, revision))
        return real("parquet", data_files={part: str(path) for part, path in sorted(repository.items())})

    table = table_of(folder) | {"p:dog": [0.5] * len(folder)}
    order = np.random.default_rng(0).permutation(len(folder))
    repository = {}
    for part, rows in (("train", order[:40]), ("test", order[40:])):
        repository[part] = write(tmp_path / f"{part}.parquet", {k: [v[i] for i in rows] for k, v in table.items()})
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_hub(hub, folder):
    found = Hub(repository="someone/something", revision="v1", configuration="small")
    assert hub == [("someone/something", "small", "v1")]
    assert len(found) == len(folder) and found.splits is None
    assert found.name(0) == "someone/something on the hub, row 0"
    official = Hub(repository="someone/something", use_splits=True)
    assert official.left_out == (
        "someone/something on the hub: p:dog: not read as soft labels; write the images "
        "as files, and list them in a table (data.name: table)",
    )
    assert sorted(np.unique(official.splits, return_counts=True)[1].tolist()) == [16, 40]


def test_a_known_data_set_on_the_hub_has_domainbeds_order_and_counts(hub, monkeypatch, caplog):
    from xdm_ft.data.pacs import Pacs

    with pytest.raises(UserError, match=r"flwrlabs/pacs on the hub is not the published PACS.* photo: 14 of 1670"):
        Hub(repository="pacs")
    monkeypatch.setattr(Pacs, "published", {"the miniature": (14, 14, 14, 14)})
    with caplog.at_level(logging.INFO, "xdm_ft"):
        found = Hub(repository="pacs")
    assert "complete (the miniature)" in caplog.text and found.as_published
    monkeypatch.setattr(Pacs, "domain_folders", dict.fromkeys(["Sketch", "Photo", "Cartoon", "ART-painting"], ()))
    turned = Hub(repository="pacs")
    assert turned.domain_names == ("Sketch", "Photo", "Cartoon", "ART-painting")
    assert np.array_equal(turned.domains, 3 - found.domains)


def test_the_hub_without_a_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"flwrlabs/pacs on the hub: cannot be read .*hf download --repo-type dataset"):
        Hub(repository="pacs")
    with pytest.raises(UserError, match="vlcs has no repository on the hub"):
        Hub(repository="vlcs")
