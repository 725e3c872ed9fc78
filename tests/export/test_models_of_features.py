"""Models of runs on features and on bags: one predictor, and all verbs of a new site."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from bag_files import clam, clam_pt, slides, torchmil, trident
from safetensors.torch import load_file

from xdm_ft.cli.parser import main
from xdm_ft.export import predictor
from xdm_ft.export.choose import Choice
from xdm_ft.runtime.errors import UserError

SMALL = ["methods=[erm]", "protocol.seeds=1", "training.steps=60", "report.page=false"]
OF_BAGS = ["data.folder=slides", "data.table=slides/slides.csv"]


def rows(count, seed, name=None, **columns):
    """`count` features of each class at each of three sites, and a file of them."""
    label, site = np.divmod(np.repeat(np.arange(6), count), 3)
    random = np.random.default_rng(seed)
    z = (random.normal(size=(len(label), 5)) + label[:, None] * 1.5 + site[:, None] / 4).astype(np.float32)
    if name:
        texts = {"label": np.array(["cat", "dog"])[label], "domain": np.array(["a", "b", "c"])[site]}
        np.savez(name, features=z, **texts | columns)
    return z, label


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with runs, and model directories: `rows`, `bags` of slides, and `groups` of slides as bags."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        rows(20, 0, "f.npz", id=np.array([f"i{i}" for i in range(120)]), group=np.arange(120) // 2)
        rows(20, 1, "new.npz", domain=np.full(120, "new"), group=np.arange(120) // 2)
        slides(Path("slides"), per_class=16)
        slides(Path("new"), per_class=16, seed=1)
        for name, recipe in {
            "rows": ["features", "data.file=f.npz"],
            "bags": ["bags", *OF_BAGS],
            "groups": ["bags", *OF_BAGS, "data.unit=group", "data.pool=mean_max"],
        }.items():
            assert main(["run", *recipe, *SMALL, f"name={name}", "--quiet"]) == 0
            assert main(["export", f"output/{name}", name, "--quiet"]) == 0
    return folder


@pytest.fixture
def in_models(models, monkeypatch):
    monkeypatch.chdir(models)


def table_of(capsys, *command):
    """The rows that a command prints."""
    capsys.readouterr()
    assert main([*command]) == 0
    return [*csv.DictReader(capsys.readouterr().out.splitlines())]


def probabilities(table):
    return [float(row["probability"]) for row in table]


def by_hand(name, z):
    state = load_file(f"{name}/model.safetensors")
    return (torch.from_numpy(z) @ state["head.weight"].T + state["head.bias"]).double().softmax(1).float().numpy()


@pytest.mark.usefixtures("in_models")
def test_rows_of_each_kind_of_file(capsys, tmp_path):
    z, _ = rows(20, 1)
    p = by_hand("rows", z).max(1)
    table = table_of(capsys, "predict", "rows", "new.npz")
    np.testing.assert_allclose(probabilities(table), p, rtol=1e-5)
    assert [row["path"] for row in table[:2]] == ["new.npz#0", "new.npz#1"] and not any(row["error"] for row in table)
    kind = pyarrow.list_(pyarrow.float32())
    content = {"features": pyarrow.array([*map(list, z)], kind), "id": [f"n{i}" for i in range(len(z))]}
    pyarrow.parquet.write_table(pyarrow.table(content), tmp_path / "new.parquet")
    (tmp_path / "t.csv").write_text("path\nnew.parquet#n7\nnew.parquet#n0\n")
    assert probabilities(table_of(capsys, "predict", "rows", str(tmp_path / "new.parquet"))) == probabilities(table)
    two = table_of(capsys, "predict", "rows", str(tmp_path / "t.csv"))
    assert [row["path"] for row in two] == ["new.parquet#n7", "new.parquet#n0"]
    np.testing.assert_allclose(probabilities(two), p[[7, 0]], rtol=1e-5)
    groups = table_of(capsys, "predict", "rows", "new.npz", "--group-by", "group")
    assert len(groups) == 60 and groups[0]["images"] == "2"
    rows(20, 1, tmp_path / "gaps.npz", group=np.array(["", "p", *range(118)], dtype=str))
    assert probabilities(table_of(capsys, "predict", "rows", str(tmp_path / "gaps.npz"))) == probabilities(table)
    assert main(["predict", "rows", str(tmp_path / "gaps.npz"), "--group-by", "group"]) == 2
    assert "--group-by: group matches nothing in" in capsys.readouterr().err


@pytest.mark.usefixtures("in_models")
def test_an_interrupted_prediction_resumes(tmp_path, monkeypatch, capsys):
    command = ["predict", "rows", "new.npz", "--batch-size", "7", "--out"]
    assert main([*command, str(tmp_path / "whole.csv")]) == 0
    read, seen = predictor.features_of, []

    def fails(item, encoder):
        seen.append(item)
        assert len(seen) < 50
        return read(item, encoder)

    monkeypatch.setattr(predictor, "features_of", fails)
    assert main([*command, str(tmp_path / "out.csv")]) == 1
    monkeypatch.setattr(predictor, "features_of", read)
    assert main([*command, str(tmp_path / "out.csv"), "--resume"]) == 0
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


@pytest.mark.usefixtures("in_models")
@pytest.mark.parametrize(
    ("write", "suffix"),
    [
        (torchmil, ".npy"),
        (clam_pt, ".pt"),
        pytest.param(trident, ".h5", marks=pytest.mark.needs("h5py")),
        pytest.param(clam, ".h5", marks=pytest.mark.needs("h5py")),
    ],
)
def test_bags_of_each_kind_of_file(write, suffix, tmp_path, capsys):
    bags = [np.load(f"new/slide.{i}.npy") for i in range(4)]
    for number, z in enumerate(bags):
        write(tmp_path / f"s.{number}{suffix}", z)
    table = table_of(capsys, "predict", "bags", str(tmp_path))
    p = by_hand("bags", np.stack([z.astype(np.float64).mean(0).astype(np.float32) for z in bags]))
    np.testing.assert_allclose(probabilities(table), p.max(1), rtol=1e-5)
    (tmp_path / "t.csv").write_text("slide,group\n" + "".join(f"s.{i},p{i // 3}\n" for i in range(4)))
    assert probabilities(table_of(capsys, "predict", "bags", str(tmp_path / "t.csv"))) == probabilities(table)
    table = table_of(capsys, "predict", "groups", str(tmp_path / "t.csv"))
    z = [np.concatenate(bags[:3]), bags[3]]
    p = by_hand("groups", np.stack([np.concatenate([x.mean(0), x.max(0)]) for x in z]))
    assert [row["path"] for row in table] == ["p0", "p1"]
    np.testing.assert_allclose(probabilities(table), p.max(1), rtol=1e-5)
    assert main(["predict", "groups", str(tmp_path)]) == 0
    assert "no slide has a group, so each is a bag of its own" in capsys.readouterr().err


@pytest.mark.usefixtures("in_models")
def test_bags_that_cannot_be_read_are_rows_with_the_reason(tmp_path, capsys):
    torchmil(tmp_path / "good.npy", np.ones((3, 5), np.float32))
    torchmil(tmp_path / "nan.npy", np.full((3, 5), np.nan))
    torchmil(tmp_path / "wide.npy", np.ones((3, 4)))
    (tmp_path / "t.csv").write_text("file,group\ngood.npy,p\nnan.npy,p\nwide.npy,q\ngone.npy,r\n")
    table = table_of(capsys, "predict", "bags", str(tmp_path / "t.csv"))
    errors = {row["path"]: row["error"] for row in table}
    assert errors == {
        "good.npy": "",
        "nan.npy": "row 0 is not finite (NaN, ±∞ or beyond float32)",
        "wide.npy": "has 4 features, and the model reads 5",
        "gone.npy": "No such file or directory",
    }
    assert main(["predict", "groups", str(tmp_path / "t.csv"), "--quiet"]) == 2
    printed = capsys.readouterr()
    assert f'p,,,"{tmp_path}/nan.npy: row 0 is not finite (NaN' in printed.out
    assert "no image was predicted" in printed.err


def fill_in(file, labels):
    """Fills in the column label of a table that `label` wrote; `labels`: {path: class}."""
    with open(file, newline="") as stream:
        cells = [*csv.DictReader(stream)]
    with open(file, "w", newline="") as stream:
        writer = csv.DictWriter(stream, cells[0])
        writer.writeheader()
        writer.writerows(row | {"label": labels[Path(row["path"]).name]} for row in cells)
    return cells


def answer(capsys, *command):
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


SITES = {
    "rows": ("new.npz", {f"new.npz#{i}": ["cat", "dog"][i // 60] for i in range(120)}),
    "bags": ("new", {f"slide.{i}.npy": ["normal", "tumor"][i // 48] for i in range(96)}),
    "groups": ("new/slides.csv", {f"slide.{i}.npy": ["normal", "tumor"][i // 48] for i in range(96)}),
}


@pytest.mark.usefixtures("in_models")
@pytest.mark.parametrize("name", SITES)
def test_the_verbs_of_a_new_site(name, capsys, tmp_path):
    path, labels = SITES[name]
    assessed = answer(capsys, "assess", name, path)
    assert assessed["images"] == {"rows": 120, "bags": 96, "groups": 48}[name] and assessed["training_images"] == 0
    out = str(tmp_path / "to_label.csv")
    made = answer(capsys, "label", name, path, "--budget", "40", "--out", out)
    chosen = fill_in(out, labels)
    assert len(chosen) == (made["evaluate"] + made["adapt"]) * (2 if name == "groups" else 1)
    measured = answer(capsys, "evaluate", name, out)
    assert measured["whole"]["images"] == made["evaluate"] and measured["training_images"] == 0
    adapted = answer(capsys, "adapt", name, out, "--out", str(tmp_path / "adapted"))
    assert adapted["labels"] == made["adapt"] and not adapted["unreadable"]
    site = {"rows": "new.npz", "bags": "new/slides.csv", "groups": "new/slides.csv"}[name]
    found = answer(capsys, "evaluate", name, site, *([] if name == "rows" else ["--domain", "site1"]))
    assert found["whole"]["images"] == {"rows": 120, "bags": 32, "groups": 16}[name]


@pytest.mark.usefixtures("in_models")
def test_rows_that_trained_the_model_are_known(capsys):
    assert answer(capsys, "evaluate", "rows", "f.npz", "--domain", "a")["training_images"] == 40
    assert answer(capsys, "evaluate", "groups", "slides/slides.csv", "--domain", "site0")["training_images"] == 16


@pytest.mark.usefixtures("in_models")
def test_a_site_whose_labels_all_help_adapts_the_model(capsys, tmp_path):
    z, label = rows(20, 2)
    np.savez(tmp_path / "site.npz", features=z - [3, 0, 0, 0, 0], label=np.array(["cat", "dog"])[label])
    found = answer(capsys, "adapt", "rows", str(tmp_path / "site.npz"), "--out", str(tmp_path / "a"))
    assert found["kept"] and found["labels"] == 120
    right = predictor.load(tmp_path / "a").predict(str(tmp_path / "site.npz")) == np.array(["cat", "dog"])[label]
    assert right.mean() > 0.8
    again = answer(
        capsys, "adapt", "output/rows", str(tmp_path / "site.npz"), "--method", "erm", "--out", str(tmp_path / "b")
    )
    assert again["labels"] == 120 and (tmp_path / "b").exists() == again["kept"]


@pytest.mark.usefixtures("in_models")
def test_the_library_takes_arrays_and_files():
    model, z = predictor.load("rows"), rows(20, 1)[0]
    p = model.predict_proba("new.npz")
    assert p.shape == (120, 2) and np.array_equal(model.predict_proba(z), p) and len(model.predict(z[0])) == 1
    assert model.predict_proba(["new.npz", Path("f.npz")]).shape == (240, 2) and model.distance(z).shape == (120,)
    np.testing.assert_array_equal(model.encode(z), z)
    held_out = predictor.load("output/rows", choice=Choice("erm", ("a",)))
    assert held_out.config.method["test_domains"] == ["a"] and held_out.predict_proba(z).shape == (120, 2)
    bags = predictor.load("groups")
    assert bags.encode(["new/slide.0.npy", "new/slide.1.npy"]).shape == (2, 10)
    faults = [(z[:, :4], "row 0: has 4 features, and the model reads 5"), ([1], "not list"), ({}, "not dict")]
    for given, words in faults:
        with pytest.raises(UserError, match=words):
            model.predict(given)


@pytest.mark.usefixtures("in_models")
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "predict rows slides/slide.0.npy",
            "slide.0.npy: the model reads features, in files that end in .npz",
        ),
        ("predict bags f.npz --quiet", "f.npz (is no bag; its name must end in .h5, .pt, .npy)"),
        ("predict rows slides", "slides: contains no .npz or .parquet (known by its extension); 97 other files"),
        ("predict rows wide.npz", "wide.npz: has 4 features per row, and the model reads 5"),
        ("predict rows missing.csv", "f.npz: has no row 7; name it FILE#ID"),
        (
            "evaluate rows slides",
            "slides: the model reads features; name a table with path and label, or",
        ),
        ("evaluate rows whole.csv", "whole.csv: names whole files, but a label is of one row; name FILE#ROW"),
        ("evaluate groups two.csv", "another slide of its group has the label tumor, and not normal; give them one"),
        ("evaluate groups half.csv", "row 3, column label: another slide of its group has a label; fill it in"),
        ("predict rows new.npz --encoder-weights x", "reads features, and has no encoder; leave --encoder"),
        (
            "export output/rows a --onnx-preprocessing",
            "--onnx-preprocessing: a model of features has no encoder",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(command, words, capsys):
    np.savez("wide.npz", features=np.ones((3, 4)))
    Path("missing.csv").write_text("path\nf.npz#i3\nf.npz#7\n")
    Path("whole.csv").write_text("path,label\nf.npz,cat\n")
    slide = "slides/slide.{}.npy,{},p\n"
    Path("two.csv").write_text("path,label,group\n" + slide.format(0, "normal") + slide.format(1, "tumor"))
    Path("half.csv").write_text("path,label,group\n" + slide.format(0, "normal") + slide.format(1, ""))
    if "--onnx" in command:
        pytest.importorskip("onnx")
    assert main(command.split()) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.usefixtures("in_models")
def test_the_card_and_the_example_are_of_features(monkeypatch, capsys):
    card = Path("groups/README.md").read_text()
    assert "it reads 10 features, by the same encoder as in training: the mean and maximum over the patches of" in card
    assert "* Features: mean\\_max of the features of each group of slides.csv" in card
    monkeypatch.setattr("sys.argv", ["example.py", "new/slide.0.npy", "new/slide.1.npy"])
    exec(compile(Path("bags/example.py").read_text(), "bags/example.py", "exec"), {"__file__": "bags/example.py"})
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.usefixtures("in_models")
@pytest.mark.needs("onnx", "onnxruntime", "onnxscript")
def test_onnx_reads_features(capsys):
    import onnxruntime

    assert main(["export", "output/rows", "onnx", "--onnx", "--no-site"]) == 0
    session, z = onnxruntime.InferenceSession("onnx/model.onnx"), rows(20, 1)[0]
    np.testing.assert_allclose(session.run(["probabilities"], {"features": z})[0], by_hand("rows", z), atol=1e-6)
