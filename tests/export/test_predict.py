"""`xdm-ft predict`: streams, rows, formats, groups and faults; what a kill leaves, and two commands at once."""

import csv
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import miniature
import numpy as np
import psutil
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from small_models import config_of, write_config
from small_runs import recipe
from warm_processes import begin

import xdm_ft as library
import xdm_ft.images.decode as decode_module
from xdm_ft.cli.library import run
from xdm_ft.cli.parser import main
from xdm_ft.export import predict as unfinished
from xdm_ft.export import predictor as inference
from xdm_ft.export import probabilities
from xdm_ft.export.predict import ExtraColumns, Predictions, open_unfinished
from xdm_ft.export.predictor import NOT_FINITE, ImageBatch, cache_of, cached_features, store_of, stream
from xdm_ft.export.sources import Item, Sources
from xdm_ft.images.decode import decode
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.atomic import disk_errors
from xdm_ft.training.end_to_end import inputs

WHY = "not an image in a format that Pillow reads"


@pytest.fixture(scope="module")
def model(small_model):
    return library.load(small_model.model)


@pytest.fixture
def images(small_model, in_folder):
    """Copies of images of two domains, in a folder `new`, with other bytes than those in the cache."""
    originals = sorted(small_model.data.rglob("*/photo/*/*"))[:6] + sorted(small_model.data.rglob("*/cartoon/*/*"))[:5]
    assert len(originals) == 11
    for number, path in enumerate(originals):
        target = Path("new", path.parts[-3], f"patient_{number % 3}-{number:02}.png")
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).rotate(90).save(target)
    return sorted(map(str, Path("new").rglob("*.png")))


@pytest.fixture
def predict(small_model, capsys):
    """`predict(*arguments, status=0)`: what the command prints, in this process."""

    def predict(*arguments, status=0, model=small_model.model):
        assert main(["predict", *map(str, [model, *arguments]), "--quiet"]) == status
        return capsys.readouterr()

    return predict


def rows(text):
    return list(csv.DictReader(text.splitlines()))


# streams of images


def joined(batches):
    """(logits, features, number of images that were computed) of all batches."""
    batches = list(batches)
    logits, z = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("logits", "encoded"))
    return logits, z, sum(batch.computed for batch in batches)


def test_a_stream_is_the_model_and_starts_again_with_the_same_bits(small_model, model, images):
    items = list(Sources(["new"]))
    logits, z, computed = joined(stream(model, items, batch_size=4, cache=small_model.cache, workers=2))
    assert [item.path for item in items] == images and computed == 11
    np.testing.assert_allclose(probabilities(logits).numpy(), model.predict_proba(images), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(model.module.head_input(z).numpy(), model.encode(images), rtol=1e-4, atol=1e-6)
    assert torch.equal(logits[8:], joined(stream(model, items[8:], batch_size=4))[0])


def test_cached_features_are_used_and_are_the_same_bits(small_model, model, images, tmp_path):
    cache = shutil.copytree(small_model.cache, tmp_path / "cache")

    def state():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in cache.rglob("*")}

    before, sources = state(), Sources([str(small_model.data)])
    for loaded in (model, library.load(small_model.run, held_out="sketch")):
        logits, z, computed = joined(stream(loaded, sources, batch_size=8, cache=cache))
        again = joined(stream(loaded, sources, batch_size=8, cache=tmp_path / "missing"))
        assert len(logits) > 20 and (computed, again[2]) == (0, sources.count())
        assert torch.equal(z, again[1]) and torch.equal(logits, again[0])
    known = [item.path for item in sources]
    mixed = [Item(path, path) for pair in zip(known, images, strict=False) for path in pair]
    logits, _, computed = joined(stream(model, mixed, batch_size=8, cache=cache))
    assert computed == 11 and torch.equal(logits, joined(stream(model, mixed, batch_size=8))[0])
    assert len(cached_features(model, cache)) == len({Path(path).read_bytes() for path in known})
    assert state() == before and not (tmp_path / "missing").exists(), "nothing is written"


def test_a_run_names_no_folder_but_a_cache(small_model, tmp_path, monkeypatch):
    """A run of somebody else would otherwise decide into which folder its features are written."""
    monkeypatch.setenv("XDM_FT_CACHE", str(tmp_path / "default"))
    monkeypatch.chdir(small_model.folder)
    assert cache_of(str(small_model.run)) == small_model.cache
    (tmp_path / "cache").mkdir()  # the name that the run has, of another folder
    monkeypatch.chdir(tmp_path)
    assert cache_of(str(small_model.run)) == tmp_path / "default"


def test_damaged_shards_and_those_of_another_encoder_are_not_used(small_model, model, tmp_path):
    shutil.copytree(small_model.cache, tmp_path / "cache")
    shards, sources = sorted((tmp_path / "cache").rglob("shard-*")), Sources([str(small_model.data)])
    assert shards
    for shard in shards:
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1  # of the last feature
        shard.write_bytes(content)
    assert joined(stream(model, sources, batch_size=8, cache=tmp_path / "cache"))[2] == sources.count()
    for shard in shards:
        shard.write_bytes(b"no shard")
    assert cached_features(model, tmp_path / "cache") is None
    other = library.load(small_model.model)
    encoder = other.config.encoder.model_copy(update={"xxh3": "0" * 32})
    other.config = other.config.model_copy(update={"encoder": encoder})
    assert cached_features(other, small_model.cache) is None
    assert cached_features(library.load(small_model.model, precision="bf16"), small_model.cache) is None


@pytest.mark.parametrize(
    ("place", "value", "key"),
    [
        ("settings", {"pooling": "mean"}, "pooling"),
        ("preprocessing", {"crop": 0.5}, "preprocessing"),
        ("identity", {"cut": "model.blocks.1"}, "cut"),
    ],
)
def test_a_foreign_text_names_no_cached_features(small_model, tmp_path, place, value, key):
    """What an encoder computes is stored under what it is, whatever its directory says of it."""
    folder = Path(shutil.copytree(small_model.model, tmp_path / "foreign"))
    document = config_of(folder)
    block = document if place == "preprocessing" else document["encoder"]
    block[place] = {**block[place], **value}
    write_config(folder, document)
    with pytest.raises(
        UserError, match=rf"config\.json: encoder\.identity: {key}: not that of the encoder that"
    ) as error:
        library.load(folder)
    assert len(error.value.args) == 1 and "\n" not in str(error.value)
    # texts of other versions are not compared; the key is that of the encoder as it was built
    document["encoder"]["identity"]["versions"]["torch"] = "1.0"
    write_config(folder, document)
    honest, foreign = library.load(small_model.model), library.load(folder)
    keys = [store_of(one, small_model.cache, np.zeros(1, "S16")).key for one in (honest, foreign)]
    assert (small_model.cache / keys[0]).is_dir() and (keys[0] == keys[1]) == (place == "identity")
    assert (cached_features(foreign, small_model.cache) is None) == (place != "identity")


@pytest.mark.parametrize("trainable", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_drafts_are_those_of_the_run(in_folder, monkeypatch, trainable):
    """Training, extraction and the model that comes of it decode large JPEGs alike, at a fraction of their size."""
    for path in miniature.domainbed(in_folder / "data", "pacs", suffix=".jpg").rglob("*.jpg"):
        Image.open(path).resize((400, 300), Image.Resampling.BICUBIC).save(path)
    encoder = {"name": "timm", "model": "test_resnet", "trainable": trainable}
    encoder["preprocessing"] = {"size": 32, "crop": 1.0, "draft": True}
    changes = [f"encoder={json.dumps(encoder)}", "methods=[erm]", "protocol.test_domains=sketch", "training.steps=2"]
    made, sizes = recipe(*changes, "features.batch_size=8"), set()
    with monkeypatch.context() as patch:
        to_rgb = decode_module.to_rgb
        patch.setattr(inputs, "worker_count", lambda accelerator: 0)  # what other processes decode is not seen
        patch.setattr(decode_module, "to_rgb", lambda image, *how: sizes.add(image.size) or to_rgb(image, *how))
        assert not run(made).failed
    assert sizes == ({(400, 300), (100, 75)} if trainable else {(100, 75)})  # all are decoded whole once, as a check
    model, sources = library.load(Path(made.output.dir) / made.name, held_out="sketch"), Sources(["data"])
    paths = [item.path for item in sources]
    logits, z, computed = joined(stream(model, sources, batch_size=8, cache=in_folder / "cache"))
    assert computed == (len(paths) if trainable else 0)
    assert torch.equal(logits, joined(stream(model, sources, batch_size=8))[0])
    np.testing.assert_allclose(model.module.head_input(z).numpy(), model.encode(paths), rtol=1e-4, atol=1e-5)
    full_images = [decode(Path(path), path) for path in paths]
    assert 0 < np.abs(z.numpy() - model.encode(full_images)).mean() < 0.1 * z.abs().mean()


def test_unreadable_images_are_reported_and_the_others_unchanged(model, images, small_model):
    folder = Path("new/photo")
    good = sorted(map(str, folder.iterdir()))
    expected, _, _ = joined(stream(model, Sources([str(folder)]), batch_size=8))
    image = Path(good[2]).read_bytes()
    os.mkfifo(folder / "a.png")
    (folder / "b.png").write_text("<html>")
    (folder / "c.png").symlink_to("nowhere.png")
    (folder / "q.png").write_bytes(image[: len(image) // 2])
    (folder / "r.png").mkdir()
    items = [*Sources([str(folder)]), Item("in memory", image), Item("a\0b", "a\0b")]
    batches = list(stream(model, items, batch_size=8))
    reasons = {os.path.basename(b.items[row].path): reason for b in batches for row, reason in b.unreadable.items()}
    assert list(reasons) == ["a.png", "b.png", "c.png", "q.png", "a\0b"]
    assert (reasons["a.png"], reasons["c.png"]) == ("not a regular file", "No such file or directory")
    assert "truncated" in reasons["q.png"] and "null byte" in reasons["a\0b"]
    readable = torch.cat([batch.logits[batch.readable] for batch in batches])
    torch.testing.assert_close(readable, torch.cat([expected, expected[2:3]]), rtol=1e-5, atol=1e-6)
    broken = library.load(small_model.model)
    broken.module.head.bias.data[0] = float("nan")
    [batch] = stream(broken, [Item(path, path) for path in good[:3]], batch_size=8)
    assert batch.unreadable == dict.fromkeys(range(3), NOT_FINITE)


def test_images_are_listed_as_they_are_needed(model, images):
    asked = []

    def endless():
        while True:
            asked.append(images[0])
            yield Item(images[0], images[0])

    batches = stream(model, endless(), batch_size=4, workers=1)
    next(batches)
    batches.close()
    assert len(asked) <= 4 * 6


# rows


def table_of(*names, members=0, temperature=1.0, grouped=False, **columns):
    """The predictions of a model with these classes, which is not asked."""
    module = SimpleNamespace(members=[None] * members)
    model = SimpleNamespace(class_names=names, module=module, config=SimpleNamespace(temperature=temperature))
    return Predictions(model, ExtraColumns(**columns), "csv", grouped)


def batch_of(names, logits, members=None):
    return ImageBatch([Item(name, name, name) for name in names], torch.zeros(len(names), 1), logits, members, {}, 0)


def test_entropy_spread_and_columns_by_hand():
    columns = {"probabilities": True, "entropy": True, "spread": True, "abstain_below": 0.6}
    table = table_of("path", "p:x", "c", members=4, temperature=2.0, **columns)
    names = ["path", "label", "probability", "entropy", "spread", "abstained", "p:path", "p:p:x", "p:c", "error"]
    assert list(table.types) == names
    members = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    logits = torch.tensor([[0.0, 0.0, -200.0], [-200.0, 200.0, -200.0]])
    first, second = table.rows_of(batch_of(["x", "y"], logits, members))
    of_label = (members / 2.0).softmax(-1)[:, [0, 1], [0, 1]].numpy().std(0, ddof=1)
    np.testing.assert_allclose([first[4], second[4]], of_label, rtol=1e-5)
    assert first[:3] + first[5:] == ["x", None, 0.5, True, 0.5, 0.5, 0.0, None]
    assert first[3] == float(str(np.float32(np.log(2))))
    assert second[:4] == ["y", "p:x", 1.0, 0.0] and not np.signbit(second[3])


def test_labels_and_probabilities_are_the_models(small_model, model, images, predict, monkeypatch):
    p = model.predict_proba(images)
    found = rows(predict("new").out)
    assert [row["path"] for row in found] == images and list(found[0]) == ["path", "label", "probability", "error"]
    assert [row["label"] for row in found] == [model.class_names[i] for i in p.argmax(1)]
    np.testing.assert_allclose([float(row["probability"]) for row in found], p.max(1), rtol=1e-5)
    fold = ("--method", "erm", "--held-out", "sketch", "--seed", "0")
    assert rows(predict("new", *fold, model=small_model.run).out) == found
    with open("list.txt", "w+") as listed:
        listed.write("\n".join(images))
        listed.seek(0)
        monkeypatch.setattr(sys, "stdin", listed)
        assert rows(predict("-").out) == found
    options = ["--probabilities", "--format", "jsonl"]  # nor does a row depend on the number of images
    of_all = predict(*images, *options).out.splitlines()
    for some in ([0], [9, 2], range(1, 8)):
        assert predict(*(images[i] for i in some), *options).out.splitlines() == [of_all[i] for i in some]


def test_all_columns_in_all_formats(model, images, predict):
    names, p = model.class_names, model.predict_proba(images)
    options = ["new", "--probabilities", "--entropy", "--distance", "--top-k", "2", "--abstain-below", "0.3"]
    for format_ in ("csv", "jsonl", "parquet"):
        done = predict(*options, "--out", f"out.{format_}")
        assert done.out == f"wrote out.{format_}: predictions of 11 images\n" and not done.err
    of_csv = rows(Path("out.csv").read_text())
    of_json = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    of_parquet = pyarrow.parquet.read_table("out.parquet").to_pylist()
    assert list(of_csv[0]) == list(of_json[0]) == list(of_parquet[0])
    assert list(of_csv[0])[-len(names) - 1 :] == [*(f"p:{name}" for name in names), "error"]
    for one, two, three in zip(of_csv, of_json, of_parquet, strict=True):
        assert one == {
            key: "" if v is None else str(v).lower() if isinstance(v, bool) else str(v) for key, v in two.items()
        }
        assert two == {key: float(str(np.float32(v))) if isinstance(v, float) else v for key, v in three.items()}
    found = np.array([[row[f"p:{name}"] for name in names] for row in of_json], np.float32)
    np.testing.assert_allclose(found, p, rtol=1e-5)
    for rank, column in enumerate(np.argsort(-found, axis=1).T[:2], start=1):
        assert [row[f"label_{rank}"] for row in of_json] == [names[i] for i in column]
    np.testing.assert_allclose([row["entropy"] for row in of_json], -(p * np.log(p)).sum(1), rtol=1e-4)
    np.testing.assert_allclose([row["distance"] for row in of_json], model.distance(images), rtol=1e-4)
    percentiles = model.distance_percentile(model.distance(images))
    np.testing.assert_allclose([row["distance_percentile"] for row in of_json], percentiles, atol=0.1)
    abstained = [row["abstained"] for row in of_json]
    assert abstained == [row["probability"] < 0.3 for row in of_json] == [row["label"] is None for row in of_json]
    assert not [path for path in Path().iterdir() if "unfinished" in path.name]


def test_groups_have_the_mean_of_their_images_and_count_the_others(model, images, predict):
    names, p = model.class_names, model.predict_proba(images)
    for name in ("patient_1-zz.png", "patient_1-zy.png", "patient_9-00.png"):
        Path("new", name).write_text("no")
    Path("new/patient_9-00.dcm").touch()
    done = predict("new", "--group-by", r"patient_(\d)", "--probabilities", "--out", "groups.csv")
    assert done.out == "wrote groups.csv: predictions of 11 images in 4 groups\n"
    assert done.err.splitlines()[-1] == "1 other file: 1 .dcm"
    found = {row["group"]: row for row in rows(Path("groups.csv").read_text())}
    groups = np.array([re.search(r"patient_(\d)", path)[1] for path in images])
    assert list(found) == [*dict.fromkeys(groups), "9"]
    for group in set(groups):
        mean, row = p[groups == group].mean(0), found[group]
        np.testing.assert_allclose([float(row[f"p:{name}"]) for name in names], mean, rtol=1e-5)
        assert row["label"] == names[mean.argmax()] and int(row["images"]) == (groups == group).sum()
    assert found["1"]["error"] == f"2 of 6 images: new/patient_1-zy.png: {WHY}" and not found["0"]["error"]
    assert found["9"]["error"] == f"1 of 1 images: new/patient_9-00.png: {WHY}" and found["9"]["label"] == ""
    Path("t.csv").write_text("\n".join(["path,slide", *(f"{path},{path[-5]}" for path in images)]))
    predict("t.csv", "--group-by", "slide", "--out", "groups.jsonl")
    of_slides = [json.loads(line) for line in Path("groups.jsonl").read_text().splitlines()]
    assert sum(row["images"] for row in of_slides) == 11 and of_slides[0]["group"] == images[0][-5]


def test_every_image_has_a_row_and_other_files_are_counted(images, predict, monkeypatch):
    broken, odd = "new/<img src=x onerror=alert(1)>.png", 'new/a\n"b", c\r\x1b[31m.png'
    Path(broken).write_text("<html></html>")
    shutil.copy(images[0], odd)
    shutil.copy(images[0], b"new/\xff.png")
    Path("new/z.png").mkdir()
    for name in ("1.dcm", "2.DCM", "notes.txt", "1.2.840.5", "README", ".hidden"):
        Path("new", name).touch()
    Path("list.csv").write_text(f"path\n{images[0]}\ngone.png\n")
    given = ["new", "list.csv", "--probabilities", "--distance", "--abstain-below", "0.1", "--entropy"]
    of_images, of_files = predict(*given, "--out", "out.csv").err.splitlines()
    assert of_images.startswith("2 images cannot be read: new/<img src=x on")
    assert of_files == "5 other files: 2 .dcm, 2 without an extension, 1 .txt"
    with open("out.csv", encoding="utf-8", errors="surrogateescape", newline="") as file:
        found = list(csv.DictReader(file))
    paths = [row["path"] for row in found]
    assert paths == [*sorted([*images, broken, odd, "new/\udcff.png"]), images[0], "gone.png"]
    reasons = {row["path"]: row["error"] for row in found if row["error"]}
    assert reasons == {broken: WHY, "gone.png": "No such file or directory"}
    predict(*given, "--out", "out.parquet")
    of_parquet = pyarrow.parquet.read_table("out.parquet").to_pylist()
    assert "new/\\xff.png" in [row["path"] for row in of_parquet]
    assert [row["error"] for row in of_parquet] == [row["error"] or None for row in found]
    cells = [list(row.values())[1:-1] for row in of_parquet]
    assert [values.count(None) for values in cells] == [len(cells[0]) if row["error"] else 0 for row in found]
    # without any prediction
    Path("bad.png").write_text("no")
    done = predict("bad.png", status=2)
    assert done.err.startswith("xdm-ft: no image was predicted: 1 image cannot be read: bad.png (not an image in")
    assert done.out == f"path,label,probability,error\nbad.png,,,{WHY}\n"
    predict("bad.png", "--out", "bad.csv", status=2)
    assert Path("bad.csv").read_text() == done.out
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert "no image was predicted: none is listed" in predict("-", "--out", "none.csv", status=2).err
    assert not list(Path().glob("none*"))


def test_strict(images, predict):
    assert not predict("new", "--strict").err
    for number, (extra, line) in enumerate(
        (("new/scan.dcm", "1 other file: 1 .dcm"), ("new/bad.png", "1 image cannot be read: new/bad.png"))
    ):
        Path(extra).write_text("no")
        done = predict("new", "--strict", "--out", f"{number}.csv", status=2)
        assert done.out == f"wrote {number}.csv: predictions of 11 images\n" and done.err.startswith(line)
        Path(extra).unlink()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere"], "nowhere: does not exist"),
        (["empty"], "empty: contains no image"),
        (["dicom"], "dicom: contains no image (known by its extension); 1 other file: 1 .dcm"),
        (["new", "--out", "x.csv.gz"], "--out x.csv.gz: the name asks for no known format; end it in .csv, .jsonl"),
        (["new", "--format", "parquet"], "--format parquet: needs a file; add --out FILE"),
        (["new", "--resume"], "--resume: needs a file; add --out FILE"),
        (["new", "--spread"], "--spread: the model has a single head"),
        (["new", "--top-k", "99"], "--top-k: 99 is not in 2…"),
        (["new", "--abstain-below", "1.5"], "--abstain-below: 1.5 is not a probability"),
        (["new", "--batch-size", "0"], "--batch-size: 0 is not positive"),
        (["new", "--out", "taken.csv"], "taken.csv: exists already"),
        (["new", "--device", "toaster"], "device: toaster cannot be used"),
    ],
)
def test_what_is_refused(images, predict, arguments, line):
    Path("empty").mkdir()
    Path("dicom").mkdir()
    Path("dicom/1.dcm").touch()
    Path("bad.png").write_text("no")
    Path("taken.csv").write_text("mine")
    before = sorted(Path().iterdir())
    done = predict(*arguments, status=2)
    assert line in done.err and done.err.count("\n") == 1 and "path," not in done.out
    assert sorted(Path().iterdir()) == before and Path("taken.csv").read_text() == "mine"


def test_a_summary_as_json(small_model, images, predict, tmp_path, monkeypatch):
    monkeypatch.setenv("XDM_FT_CACHE", str(tmp_path / "cache"))  # other tests cache features of the same images
    assert "--json: prints a summary, so" in predict("new", "--json", status=2).err
    shutil.copy(sorted(small_model.data.rglob("*/photo/*/*"))[0], "known.png")
    Path("bad.png").write_text("no")
    Path("new/notes.txt").touch()
    found = json.loads(predict("new", "known.png", "bad.png", "--out", "o.csv", "--json").out)
    assert found.pop("unreadable_images") == {"bad.png": WHY}
    counts = {"predicted": 12, "unreadable": 1, "other_files": {".txt": 1}, "computed": 12, "resumed": 0}
    assert found == {"out": "o.csv", "groups": None, "strict": False, **counts}
    known, out = Path("known.png").absolute(), Path("p.csv").absolute()
    monkeypatch.chdir(small_model.folder)  # where the run has its cache
    given = [known, "--held-out", "sketch", "--json", "--out", out]
    assert json.loads(predict(*given, model=small_model.run).out)["computed"] == 0


# the file of rows that are not complete

ABOUT = {"model": "m"}
ROWS = [["a.png", "cat", 0.5, None], ["b.png", None, None, "no"], ["c.png", "dog", 0.75, None]]


def opened(folder, resume=False):
    return open_unfinished(folder / "o.csv", ABOUT, resume)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("content", ["link", "pipe", b"mine\n"])
def test_a_file_of_another_program_stays(tmp_path, resume, content):
    target, file = tmp_path / "mine.txt", tmp_path / "o.csv.unfinished"
    target.write_text("mine")
    message = r"is damaged .*; delete it to begin anew"
    if content == "link":
        file.symlink_to(target)
        message = "is a symbolic link; delete it, or name another file"
    elif content == "pipe":
        os.mkfifo(file)
        message = r"is damaged \(it is not a file\)"
    else:
        file.write_bytes(content)
    with pytest.raises(UserError, match=rf"o\.csv\.unfinished: {message}"):
        opened(tmp_path, resume).__enter__()
    assert file.is_fifo() or (file.is_symlink() if content == "link" else file.read_bytes() == content)
    assert target.read_text() == "mine"


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 0, 1, 2, 3], r"is damaged \(line 2: it is not where it was written\)"),
        ([0, 1, 3], r"is damaged \(line 3: it is not where it was written\)"),
        ([0, 1, 2], "has 2 rows for 3 images, because another program changed it"),
    ],
)
def test_lines_that_are_missing_moved_or_there_twice(tmp_path, order, message):
    file = tmp_path / "o.csv.unfinished"
    with opened(tmp_path) as found:
        for row in ROWS:
            found.add([row])
            found.flush()
        assert list(found.rows()) == ROWS
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join(lines[number] for number in order))
        with pytest.raises(UserError, match=f"unfinished: {message}"):
            found.complete(lambda path: path.write_text(str(list(found.rows()))))
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    if "damaged" in message:
        items = iter([Item(row[0], row[0]) for row in ROWS])
        with pytest.raises(UserError, match=message), opened(tmp_path, resume=True) as again:
            again.skip_done(items)
        assert file.exists()


@pytest.mark.parametrize("content", [None, b"mine"])
def test_a_file_that_was_deleted_or_replaced_is_not_written(tmp_path, content):
    file = tmp_path / "o.csv.unfinished"
    with pytest.raises(UserError, match="deleted or replaced"), opened(tmp_path) as found:
        found.add(ROWS)
        found.flush()
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        found.complete(lambda path: path.touch())
    assert not file.exists() if content is None else file.read_bytes() == content, "what one does not hold stays"
    assert not (tmp_path / "o.csv").exists()


def test_a_table_that_another_command_completed_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    lock = unfinished._lock

    def complete_first(file):
        (tmp_path / "o.csv").write_text("theirs")
        return lock(file)

    monkeypatch.setattr(unfinished, "_lock", complete_first)
    with pytest.raises(UserError, match="exists already"), opened(tmp_path, resume=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["o.csv"]


def test_a_file_that_another_verb_made_meanwhile_is_not_replaced(tmp_path):
    with opened(tmp_path) as found:
        found.add(ROWS)
        found.flush()
        (tmp_path / "o.csv").write_text("theirs")
        with pytest.raises(UserError, match=r"o\.csv: exists already; name another file, or delete it"):
            found.complete(lambda path: path.write_text("ours"))
    assert (tmp_path / "o.csv").read_text() == "theirs"
    (tmp_path / "o.csv").unlink()
    with opened(tmp_path, resume=True) as found:
        found.skip_done(iter([Item(row[0], row[0]) for row in ROWS]))
        found.complete(lambda path: path.write_text("ours"))
    assert [path.name for path in tmp_path.iterdir()] == ["o.csv"]


def test_only_what_a_killed_command_left_is_removed(tmp_path):
    theirs = tmp_path / ".o.csv.csv.abcdefgh.unfinished"  # the temporary file of a table `o.csv.csv`
    theirs.touch()
    with opened(tmp_path) as found:
        found.add(ROWS)
        found.flush()
        found.complete(lambda path: path.write_text("done"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [theirs.name, "o.csv"]


# commands that are killed, run twice, interrupted or without space


@pytest.fixture
def table(images, tmp_path, monkeypatch):
    """A table of 16 rows, one of an image that does not decode: the arguments that predict it, in batches of 4."""
    Path("bad.png").write_text("no image")
    names = [*images[:9], "bad.png"]
    Path("table.csv").write_text("\n".join(["path", *(names[number % 10] for number in range(16))]))
    monkeypatch.setattr(unfinished, "SECONDS", 0)  # every batch is written
    return ["table.csv", "--batch-size", "4"]


@pytest.mark.parametrize(
    "options", [[], pytest.param(["--format", "parquet", "--group-by", "new/.*|bad"], marks=pytest.mark.slow)]
)
def test_a_kill_after_or_within_any_line_is_resumed(table, predict, monkeypatch, options):
    """What a kill would leave on the disk is kept at each moment, and each of these is resumed."""
    given, append, left = [*table, *options, "--probabilities", "--out", "out.csv"], unfinished.append_lines, []
    file = Path("out.csv.unfinished")

    def append_and_copy(path, values):
        before = path.read_bytes()
        append(path, values)
        line = path.read_bytes().removeprefix(before)
        left.extend([before + line[: len(line) // 2], before + line])

    with monkeypatch.context() as patch:
        patch.setattr(unfinished, "append_lines", append_and_copy)
        said = predict(*given).err
    assert said.startswith("1 image cannot be read: bad.png") and len(left) == 10 and not file.exists()
    complete = Path("out.csv").read_bytes()
    for number, content in enumerate(left[1:], start=1):
        Path("out.csv").unlink()
        file.write_bytes(content)
        Path(".out.csv.abcdefgh.unfinished").touch()  # it was killed while it wrote the table
        if number == 9:
            for others, line in (
                (given, "unfinished predictions of an earlier command; add --resume"),
                ([*given, "--resume", "--entropy"], "entropy was False and is True now"),
                (["new", *given[1:], "--resume"], "is of other images"),
            ):
                refused = predict(*others, status=2).err
                assert f"out.csv.unfinished: {line}" in refused and file.read_bytes() == content
        done = predict(*given, "--resume", "--json")
        found = json.loads(done.out)
        assert (found["resumed"], found["unreadable"]) == (4 * ((number - 1) // 2), 1)
        assert done.err == said, "errors of earlier commands are counted again"
        assert Path("out.csv").read_bytes() == complete
        assert not [path for path in Path().iterdir() if "unfinished" in path.name]


def test_a_second_command_is_refused_and_the_first_loses_nothing(table, predict, tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished, "LOCK_SECONDS", 0.1)
    with opened(tmp_path) as first:
        first.add(ROWS)
        first.flush()
        for options in ([], ["--resume"]):
            assert predict(*table, "--out", "o.csv", *options, status=2).err == (
                "xdm-ft: o.csv.unfinished: another command is writing to it; wait for it, or name another file\n"
            )
        assert list(first.rows()) == ROWS
        first.complete(lambda path: path.write_text("done"))
    for options in ([], ["--resume"]):
        assert "o.csv: exists already" in predict(*table, "--out", "o.csv", *options, status=2).err
    assert Path("o.csv").read_text() == "done" and not Path("o.csv.unfinished").exists()


def test_a_lock_that_ends_a_moment_after_a_killed_command_is_waited_for(tmp_path, monkeypatch):
    """The processes that decode its images hold it a little longer."""
    released = list[bool]()
    monkeypatch.setattr(unfinished, "LOCK_SECONDS", 60)
    with (tmp_path / "o.csv.unfinished").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        timer = threading.Timer(0.3, lambda: (released.append(True), fcntl.flock(held, fcntl.LOCK_UN)))
        timer.start()
        with opened(tmp_path) as found:
            found.add(ROWS)
            found.flush()
            assert released and list(found.rows()) == ROWS
        timer.join()


def wait_in_workers():
    """Lets two processes decode, and wait for a file `go` when some rows are written."""
    unfinished.SECONDS = 0
    decode = inference.decode

    def wait_and_decode(*given):
        while os.stat("out.csv.unfinished").st_size > 3000 and not os.path.exists("go"):
            time.sleep(0.01)
        return decode(*given)

    inference.decode = wait_and_decode
    inference.decoding_workers = lambda device, most: 2


@pytest.mark.slow
def test_a_signal_ends_workers_and_keeps_rows(small_model, table, tmp_path):
    log, file = tmp_path / "log", tmp_path / "out.csv.unfinished"
    header, *lines = Path("table.csv").read_text().splitlines()
    Path("table.csv").write_text("\n".join([header, *lines * 8]))  # more than the workers decode in advance
    command = ["predict", str(small_model.model), *table, "--quiet", "--out", "out.csv"]
    process = begin(command, tmp_path, log, log, first=wait_in_workers)
    until = time.monotonic() + 180
    while not file.exists() or file.stat().st_size <= 3000:
        assert process.is_alive() and time.monotonic() < until, log.read_text()
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children(recursive=True)
    (tmp_path / "go").touch()
    os.killpg(process.pid, signal.SIGTERM)
    process.join(120)
    assert process.exitcode == 143 and len(workers) == 2 and not psutil.wait_procs(workers, 60)[1]
    said = "xdm-ft: interrupted; finished work is kept; run the same command with --resume to resume\n"
    assert log.read_text() == said


def test_a_full_disk_is_resumed_with_resume(table, predict, monkeypatch):
    append, lines = unfinished.append_lines, []

    def append_if_there_is_space(path, values):
        lines.append(values)
        if len(lines) > 3:
            with disk_errors(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(path, values)

    given = [*table, "--out", "out.csv"]
    with monkeypatch.context() as patch:
        patch.setattr(unfinished, "append_lines", append_if_there_is_space)
        remedy = "free some space and run the same command with --resume to resume"
        assert predict(*given, status=2).err == f"xdm-ft: out.csv.unfinished: the disk is full; {remedy}\n"
    assert json.loads(predict(*given, "--resume", "--json").out)["resumed"] == 8


SOAK_IMAGES = 100_000


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_memory_is_flat(small_model, tmp_path):
    """100,000 images that differ in one pixel, in memory that does not grow: `pytest -m soak -s` prints it."""
    image = Image.effect_noise((32, 32), 60).convert("RGB")
    for number in range(SOAK_IMAGES):
        path = tmp_path / "images" / f"{number // 1000:03}" / f"{number:06}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.putpixel((0, 0), (number >> 16, number >> 8 & 255, number & 255))
        image.save(path, compress_level=1)
    arguments = ["predict", str(small_model.model), "images", "--out", "out.csv"]
    process = begin(arguments, tmp_path, tmp_path / "log", tmp_path / "log")
    reached, file = dict[int, int](), tmp_path / "out.csv.unfinished"
    while process.is_alive():
        time.sleep(0.2)  # 1% of the images takes half a second
        done = file.read_bytes().count(b".png") if file.exists() else 0
        for share in (10, 50, 99):
            if share not in reached and done >= SOAK_IMAGES * share / 100:
                found = psutil.Process(process.pid)
                reached[share] = sum(one.memory_info().rss for one in (found, *found.children()))
                print(f"{share}%: {reached[share]} bytes of the process and of its workers", flush=True)
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    assert len(rows((tmp_path / "out.csv").read_text())) == SOAK_IMAGES and reached.keys() == {10, 50, 99}
    assert reached[99] - reached[10] < 30e6
