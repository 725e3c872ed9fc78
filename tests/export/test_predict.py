"""`xdm-ft predict`, in processes of its own: rows, formats, groups, faults; and what a kill leaves."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from warm_processes import begin, xdm_ft

import xdm_ft as library
from xdm_ft.export import predictor as inference
from xdm_ft.export.predict import Columns, Predictions
from xdm_ft.export.predictor import Batch
from xdm_ft.export.sources import Item

MANY = 60  # times the images
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def images(small_model, tmp_path):
    """Copies of images of two domains, in a folder `new`, with other bytes than those in the cache."""
    found = sorted(small_model.data.rglob("*/photo/*/*"))[:6] + sorted(small_model.data.rglob("*/cartoon/*/*"))[:5]
    assert len(found) == 11
    for number, path in enumerate(found):
        target = tmp_path / "new" / path.parts[-3] / f"patient_{number % 3}-{number:02}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).rotate(90).save(target)
    return sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "new").rglob("*.png"))


def predict(small_model, tmp_path, *arguments, status=0):
    done = xdm_ft("predict", small_model.model, *arguments, "--quiet", cwd=tmp_path)
    assert done.returncode == status, done.stderr
    return done


def read_the_list():
    listed = os.open("list.txt", os.O_RDONLY)
    os.dup2(listed, 0)
    sys.stdin = os.fdopen(0)  # multiprocessing has replaced it


def decode_slowly():
    decode = inference.decode
    inference.decode = lambda *given: (time.sleep(0.01), decode(*given))[1]


def decode_slowly_in_workers():
    decode_slowly()
    inference.decoding_workers = lambda device, most: 2


def rows(text):
    return list(csv.DictReader(text.splitlines()))


@pytest.fixture
def expected(small_model, images, tmp_path):
    """(class names, probabilities [n,C]) by `Model.predict_proba`."""
    model = library.load(small_model.model)
    return model.class_names, model.predict_proba([tmp_path / path for path in images])


@pytest.mark.slow
def test_labels_and_probabilities_are_the_models(small_model, images, expected, tmp_path):
    names, p = expected
    found = rows(predict(small_model, tmp_path, "new").stdout)
    assert [row["path"] for row in found] == images and list(found[0]) == [
        "path", "label", "probability", "error"
    ]  # fmt: skip
    assert [row["label"] for row in found] == [names[i] for i in p.argmax(1)]
    np.testing.assert_allclose([float(row["probability"]) for row in found], p.max(1), rtol=1e-5)
    of_run = xdm_ft(
        "predict", small_model.run, "new", "--method", "erm", "--held-out", "sketch", "--seed", "0", cwd=tmp_path
    )
    assert rows(of_run.stdout) == found and "without sketch (held out)" in of_run.stderr
    (tmp_path / "list.txt").write_text("\n".join(images))
    listed = xdm_ft("predict", small_model.model, "-", cwd=tmp_path, first=read_the_list)
    assert rows(listed.stdout) == found, listed.stderr


@pytest.mark.slow
def test_all_columns_in_all_formats(small_model, images, expected, tmp_path):
    names, p = expected
    options = ["new", "--probabilities", "--entropy", "--top-k", "2", "--abstain-below", "0.3"]
    for format_ in ("csv", "jsonl", "parquet"):
        done = predict(small_model, tmp_path, *options, "--out", f"out.{format_}")
        assert done.stdout == f"wrote out.{format_}: predictions of 11 images\n" and not done.stderr
    of_csv = rows((tmp_path / "out.csv").read_text())
    of_json = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    of_parquet = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert list(of_csv[0]) == list(of_json[0]) == list(of_parquet[0])
    assert list(of_csv[0])[-len(names) - 1 :] == [*(f"p:{name}" for name in names), "error"]
    for one, two, three in zip(of_csv, of_json, of_parquet, strict=True):
        assert one == {
            key: "" if v is None else str(v).lower() if isinstance(v, bool) else str(v) for key, v in two.items()
        }
        assert two == {key: float(str(np.float32(v))) if isinstance(v, float) else v for key, v in three.items()}
    found = np.array([[row[f"p:{name}"] for name in names] for row in of_json], np.float32)
    np.testing.assert_allclose(found, p, rtol=1e-5)
    order = np.argsort(-found, axis=1)
    assert [row["label_1"] for row in of_json] == [names[i] for i in order[:, 0]]
    assert [row["label_2"] for row in of_json] == [names[i] for i in order[:, 1]]
    np.testing.assert_allclose([row["entropy"] for row in of_json], -(p * np.log(p)).sum(1), rtol=1e-4)
    abstained = [row["abstained"] for row in of_json]
    assert abstained == [row["probability"] < 0.3 for row in of_json]
    assert [row["label"] is None for row in of_json] == abstained
    assert not list(tmp_path.glob("*unfinished*")) + list(tmp_path.glob(".out*"))


def test_groups_have_the_mean_of_their_images(small_model, images, expected, tmp_path):
    names, p = expected
    found = rows(predict(small_model, tmp_path, "new", "--group-by", r"patient_(\d)", "--probabilities").stdout)
    groups = [re.search(r"patient_(\d)", path)[1] for path in images]
    assert [row["group"] for row in found] == list(dict.fromkeys(groups))
    for row in found:
        own = p[[group == row["group"] for group in groups]]
        np.testing.assert_allclose([float(row[f"p:{name}"]) for name in names], own.mean(0), rtol=1e-5)
        assert row["label"] == names[own.mean(0).argmax()] and int(row["images"]) == len(own)
    (tmp_path / "t.csv").write_text("\n".join(["path,slide", *(f"{path},{path[-5]}" for path in images)]))
    predict(small_model, tmp_path, "t.csv", "--group-by", "slide", "--out", "groups.jsonl")
    of_slides = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert sum(row["images"] for row in of_slides) == 11 and of_slides[0]["group"] == images[0][-5]


def test_every_image_has_a_row_and_other_files_are_counted(small_model, images, tmp_path):
    broken = "new/<img src=x onerror=alert(1)>.png"
    (tmp_path / broken).write_text("<html></html>")
    odd = tmp_path / "new" / 'a\n"b", c\r\x1b[31m.png'
    shutil.copy(tmp_path / images[0], odd)
    shutil.copy(tmp_path / images[0], os.fsencode(tmp_path / "new") + b"/\xff.png")
    (tmp_path / "new" / "z.png").mkdir()
    for name in ("1.dcm", "2.DCM", "notes.txt", "1.2.840.5", "README", ".hidden"):
        (tmp_path / "new" / name).touch()
    done = predict(small_model, tmp_path, "new", "gone.png", "--out", "out.csv", "--probabilities", status=2)
    assert "gone.png: does not exist" in done.stderr, "a path is checked at once"
    (tmp_path / "list.csv").write_text(f"path\n{images[0]}\ngone.png\n")
    given = ["new", "list.csv", "--probabilities", "--abstain-below", "0.1", "--entropy"]
    done = predict(small_model, tmp_path, *given, "--out", "out.csv")
    of_images, of_files = done.stderr.splitlines()
    assert of_images.startswith("2 images can not be read: new/<img src=x on")
    assert of_files == "5 other files: 2 .dcm, 2 without an extension, 1 .txt"
    with open(tmp_path / "out.csv", encoding="utf-8", errors="surrogateescape", newline="") as file:
        found = list(csv.DictReader(file))
    paths = [row["path"] for row in found]
    in_folder = sorted([*images, broken, str(odd.relative_to(tmp_path)), "new/\udcff.png"])
    assert paths == [*in_folder, images[0], "gone.png"]
    reasons = {row["path"]: row["error"] for row in found if row["error"]}
    assert reasons == {
        broken: "not an image in a format that Pillow reads", "gone.png": "No such file or directory"
    }  # fmt: skip
    for row in found:
        cells = [cell for column, cell in row.items() if column not in ("path", "error")]
        assert not any(cells) if row["error"] else all(cells)
    predict(small_model, tmp_path, *given, "--out", "out.parquet")
    of_parquet = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert "new/\\xff.png" in [row["path"] for row in of_parquet]
    lines = predict(small_model, tmp_path, *given, "--format", "jsonl").stdout.splitlines()
    of_json = [json.loads(line) for line in lines]
    assert [row["path"] for row in of_json] == paths
    for rows in (of_json, of_parquet):
        assert [row["error"] for row in rows] == [row["error"] or None for row in found]
        assert [list(row.values())[1:-1].count(None) for row in rows] == [
            12 - 1 if row["error"] else 0 for row in found
        ]


def test_a_group_counts_its_images_without_a_prediction(small_model, images, tmp_path):
    for name in ("patient_1-zz.png", "patient_1-zy.png", "patient_9-00.png"):
        (tmp_path / "new" / name).write_text("no")
    (tmp_path / "new" / "patient_9-00.dcm").touch()
    done = predict(small_model, tmp_path, "new", "--group-by", r"patient_(\d)", "--out", "groups.csv")
    assert done.stdout == "wrote groups.csv: predictions of 11 images in 4 groups\n"
    assert done.stderr.splitlines()[-1] == "1 other file: 1 .dcm"
    found = {row["group"]: row for row in rows((tmp_path / "groups.csv").read_text())}
    why = "not an image in a format that Pillow reads"
    assert found["1"]["images"] == "4" and found["1"]["error"] == f"2 of 6 images: new/patient_1-zy.png: {why}"
    assert found["9"] == {
        "group": "9", "label": "", "probability": "", "images": "0",
        "error": f"1 of 1 images: new/patient_9-00.png: {why}",
    }  # fmt: skip
    assert not found["0"]["error"] and found["0"]["label"]


def test_without_any_prediction_the_rows_say_why(small_model, tmp_path):
    (tmp_path / "bad.png").write_text("no")
    done = predict(small_model, tmp_path, "bad.png", status=2)
    assert done.stderr.startswith("xdm-ft: no image was predicted: 1 image can not be read: bad.png (not an image in")
    assert done.stdout == "path,label,probability,error\nbad.png,,,not an image in a format that Pillow reads\n"
    predict(small_model, tmp_path, "bad.png", "--out", "out.csv", status=2)
    assert (tmp_path / "out.csv").read_text() == done.stdout
    (tmp_path / "list.txt").touch()
    nothing = xdm_ft("predict", small_model.model, "-", "--out", "none.csv", cwd=tmp_path, first=read_the_list)
    assert nothing.returncode == 2 and "no image was predicted: none is listed" in nothing.stderr
    assert not list(tmp_path.glob("none*"))


@pytest.mark.parametrize("extra", ["new/bad.png", "new/scan.dcm"])
def test_strict(small_model, images, tmp_path, extra):
    assert not predict(small_model, tmp_path, "new", "--strict").stderr
    (tmp_path / extra).write_text("no")
    predict(small_model, tmp_path, "new")
    done = predict(small_model, tmp_path, "new", "--strict", "--out", "out.csv", status=2)
    assert done.stdout == "wrote out.csv: predictions of 11 images\n"
    line = "1 other file: 1 .dcm" if "dcm" in extra else "1 image can not be read: new/bad.png"
    assert done.stderr.startswith(line) and done.stderr.count("\n") == 1
    found = json.loads(predict(small_model, tmp_path, "new", "--strict", "--out", "o.csv", "--json", status=2).stdout)
    assert found["unreadable"] + sum(found["other_files"].values()) == 1


def test_a_probability_does_not_depend_on_the_number_of_images(small_model, images, tmp_path):
    options = ["--probabilities", "--format", "jsonl"]
    of_all = predict(small_model, tmp_path, *images, *options).stdout.splitlines()
    for some in ([0], [3], [9, 2], range(1, 8)):
        found = predict(small_model, tmp_path, *(images[place] for place in some), *options).stdout.splitlines()
        assert found == [of_all[place] for place in some]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere"], "nowhere: does not exist"),
        (["empty"], "empty: contains no image"),
        (["dicom"], "dicom: contains no image (known by its extension); 1 other file: 1 .dcm"),
        (["new", "--json"], "--json: prints a summary, so that"),
        (["new", "--format", "parquet"], "--format parquet: needs a file; add --out FILE"),
        (["new", "--resume"], "--resume: needs a file; add --out FILE"),
        (["new", "--spread"], "--spread: the model has a single head"),
        (["new", "--top-k", "99"], "--top-k: 99 is not in 2…"),
        (["new", "--abstain-below", "1.5"], "--abstain-below: 1.5 is not a probability"),
        (["new", "--batch-size", "0"], "--batch-size: 0 is not positive"),
        (["new", "--out", "taken.csv"], "taken.csv: exists already"),
        (["new", "--out", "bad.png/x.csv"], "bad.png/x.csv"),
        (["new", "--device", "toaster"], "device: toaster can not be used"),
        (["new", "--seed", "0"], "is no run directory"),
    ],
)
def test_what_is_refused(small_model, images, tmp_path, arguments, line):
    (tmp_path / "empty").mkdir()
    (tmp_path / "dicom").mkdir()
    (tmp_path / "dicom" / "1.dcm").touch()
    (tmp_path / "bad.png").write_text("no")
    (tmp_path / "taken.csv").write_text("mine")
    before = sorted(tmp_path.iterdir())
    done = predict(small_model, tmp_path, *arguments, status=2)
    assert line in done.stderr and done.stderr.count("\n") == 1 and "path," not in done.stdout
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "taken.csv").read_text() == "mine"


def test_a_summary_as_json(small_model, images, tmp_path):
    shutil.copy(sorted(small_model.data.rglob("*/photo/*/*"))[0], tmp_path / "known.png")
    (tmp_path / "bad.png").write_text("no")
    (tmp_path / "new" / "notes.txt").touch()
    done = predict(small_model, tmp_path, "new", "known.png", "bad.png", "--out", "o.csv", "--json")
    found = json.loads(done.stdout)
    assert found.pop("unreadable_images") == {"bad.png": "not an image in a format that Pillow reads"}
    counts = {"predicted": 12, "unreadable": 1, "other_files": {".txt": 1}, "computed": 12, "resumed": 0}
    assert found == {"out": "o.csv", "groups": None, "strict": False, **counts}
    fold = ("predict", small_model.run, "known.png", "--held-out", "sketch", "--json", "--out")
    of_run = xdm_ft(*fold, "p.csv", cwd=small_model.folder)
    assert of_run.returncode == 2  # no such file there
    (small_model.folder / "known.png").write_bytes((tmp_path / "known.png").read_bytes())
    of_run = xdm_ft(*fold, tmp_path / "p.csv", cwd=small_model.folder)
    assert json.loads(of_run.stdout)["computed"] == 0, "the cache of the run's recipe is used"


@pytest.mark.slow
def test_a_reader_that_ends_early(small_model, images, tmp_path):
    command = [sys.executable, "-m", "xdm_ft", "predict", small_model.model, many(images, tmp_path, 1000), "--quiet"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **piped)
    assert process.stdout.readline() == b"path,label,probability,error\n"
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 141
    process.stderr.close()


def many(images, tmp_path, times=MANY):
    """A table that lists the images many times."""
    (tmp_path / "many.csv").write_text("\n".join(["path", *images * times]))
    return "many.csv"


def begun(small_model, tmp_path, images, *options, first=decode_slowly):
    """A process that has some predictions of many on the disk, and its children."""
    table = many(images, tmp_path)
    arguments = ["predict", str(small_model.model), table, "--batch-size", "4", "--out", "out.csv", *options]
    process = begin(arguments, tmp_path, tmp_path / "log", tmp_path / "log", first=first)
    until = time.monotonic() + 60
    while not (tmp_path / "out.csv.unfinished").exists() or len((tmp_path / "out.csv.unfinished").read_bytes()) < 2000:
        assert time.monotonic() < until and process.is_alive(), (tmp_path / "log").read_text()
        time.sleep(0.05)
    return process, psutil.Process(process.pid).children(recursive=True)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--format", "parquet", "--group-by", "new/(.*)"]])
def test_killed_and_resumed(small_model, images, tmp_path, options):
    options = ["--batch-size", "4", "--probabilities", *options]
    process, _ = begun(small_model, tmp_path, images, *options)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "out.csv").exists()
    with open(tmp_path / "out.csv.unfinished", "ab") as file:
        file.write(b'{"value": {"tal')  # as a kill may cut a line
    common = ["many.csv", "--out", "out.csv"]
    refused = predict(small_model, tmp_path, *common, *options, status=2)
    assert "out.csv.unfinished: unfinished predictions of an earlier command; add --resume" in refused.stderr
    other = predict(small_model, tmp_path, *common, *options, "--resume", "--entropy", status=2)
    assert "out.csv.unfinished: entropy was False and is True now" in other.stderr
    other = predict(small_model, tmp_path, images[1], *common, *options, "--resume", status=2)
    assert "out.csv.unfinished: is of other images" in other.stderr
    done = json.loads(predict(small_model, tmp_path, *common, *options, "--resume", "--json").stdout)
    assert 0 < done["resumed"] < 11 * MANY == done["predicted"] == done["computed"] + done["resumed"]
    predict(small_model, tmp_path, "many.csv", *options, "--out", "whole.csv")
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert not list(tmp_path.glob("*unfinished*"))


@pytest.mark.slow
@pytest.mark.parametrize("first", [decode_slowly, decode_slowly_in_workers])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals(small_model, images, tmp_path, number, status, first):
    process, workers = begun(small_model, tmp_path, images, "--quiet", first=first)
    os.killpg(process.pid, number)
    process.join()
    said = "xdm-ft: interrupted; finished work is kept; run the same command with --resume to resume\n"
    assert process.exitcode == status and (tmp_path / "log").read_text() == said
    assert len(workers) == (2 if first is decode_slowly_in_workers else 0)
    assert not psutil.wait_procs(workers, 5)[1]


def table_of(*names, members=0, temperature=1.0, grouped=False, **columns):
    """The predictions of a model with these classes, which is not asked."""
    module = SimpleNamespace(members=[None] * members)
    model = SimpleNamespace(class_names=names, module=module, config=SimpleNamespace(temperature=temperature))
    return Predictions(model, Columns(**columns), "csv", grouped)


def batch_of(paths, logits, members=None, groups=None):
    items = [Item(path, path, group) for path, group in zip(paths, groups or paths, strict=True)]
    return Batch(items, torch.zeros(len(items), 1), logits, members, {}, len(items))


def test_entropy_spread_and_columns():
    table = table_of("path", "p:x", "c", probabilities=True, entropy=True, spread=True, abstain_below=0.6,
                     members=4, temperature=2.0)  # fmt: skip
    assert list(table.types) == [
        "path", "label", "probability", "entropy", "spread", "abstained", "p:path", "p:p:x", "p:c", "error"
    ]  # fmt: skip
    members = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    logits = torch.tensor([[0.0, 0.0, -200.0], [-200.0, 200.0, -200.0]])
    first, second = table.rows_of(batch_of(["x", "y"], logits, members))
    of_label = (members / 2.0).softmax(-1)[:, [0, 1], [0, 1]].numpy().std(0, ddof=1)
    np.testing.assert_allclose([first[4], second[4]], of_label, rtol=1e-5)
    assert first[:3] + first[5:] == ["x", None, 0.5, True, 0.5, 0.5, 0.0, None]
    assert first[3] == float(str(np.float32(np.log(2))))
    assert second[:4] == ["y", "p:x", 1.0, 0.0] and not np.signbit(second[3])


def test_means_of_many_groups_are_those_of_numpy():
    generator = np.random.default_rng(0)
    p = generator.dirichlet(np.ones(3), 5000).astype(np.float32)
    groups = generator.integers(0, 2000, 5000)
    table = table_of("a", "b", "c", probabilities=True, grouped=True)
    names = [str(group) for group in groups]
    for first in range(0, 5000, 1000):
        part = slice(first, first + 1000)
        table.add_to_groups(table.rows_of(batch_of(names[part], torch.from_numpy(p[part]).log())))
    found = {row[0]: row for row in table.group_rows()}
    assert len(found) == table.groups == len(set(names)) and list(found) == list(dict.fromkeys(names))
    for group in set(groups.tolist()):
        own = p[groups == group].astype(np.float64)
        np.testing.assert_allclose(found[str(group)][3:6], own.mean(0), rtol=1e-5)
        assert found[str(group)][-2:] == [len(own), None]
