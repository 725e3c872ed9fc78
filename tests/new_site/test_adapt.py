"""`xdm-ft adapt`: a head for one site, kept only if it is better there."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from xdm_ft.cli.export import export_model
from xdm_ft.cli.parser import main
from xdm_ft.data.table import TableDataset
from xdm_ft.export.choose import Choice
from xdm_ft.export.directory import read_config
from xdm_ft.export.predictor import load
from xdm_ft.image_files.tables import TableColumns
from xdm_ft.new_site import adapt as driver
from xdm_ft.new_site.images import prevalence_of
from xdm_ft.new_site.stored import read_stored
from xdm_ft.runtime.errors import UserError
from xdm_ft.training.adaptation import adapt_head, compare_heads, do_no_harm

SITE = "data/PACS/photo"


def answer(capsys, *argv):
    status = main(["adapt", *map(str, argv)])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@pytest.fixture
def kept(monkeypatch):
    """Cross-validation that finds every head better: whether it does is another test's matter."""

    def better(*arguments):
        return do_no_harm(*arguments)._replace(p=0.0)

    monkeypatch.setattr(driver, "do_no_harm", better)


@pytest.mark.slow
def test_the_adapted_model_is_the_adapted_head(inside, capsys, tmp_path, kept):
    status, out, err = answer(capsys, "model", SITE, "--out", tmp_path / "new", "--json")
    found = json.loads(out)
    assert status == 0 and found["kept"] and found["labels"] == 56 and found["training_images"] == 0, err
    before, after = load("model"), load(tmp_path / "new")
    files = sorted(inside.site.glob("*/*"))
    z = torch.from_numpy(before.encode(files))
    labels = torch.tensor([before.class_names.index(file.parent.name) for file in files])
    stored, head = read_stored(inside.model, before.config), before.module.head
    weight, bias = adapt_head(head.weight, head.bias, z, labels, stored.heads.mean, stored.heads.deviation)
    assert np.allclose(after.predict_proba(files), (z @ weight.T + bias).softmax(1), atol=1e-5)
    config = after.config
    assert (config.temperature, config.fitted_temperature, config.expected, config.site_xxh3) == (1, None, None, None)
    checksum = json.loads(Path("model/config.json").read_text())["checksum"]
    assert config.adapted.labels == 56 and config.adapted.model.endswith(checksum)
    page = (tmp_path / "new/README.md").read_text()
    assert "for one site alone" in page and "56 labelled images" in page and config.adapted.model in page
    # the site is what was held out
    assert "It lacks" not in page and "trained without photo, held out" in page and "for one site alone" in page
    # what has adapted it has trained it
    assert len(after.training_images) == len(before.training_images) + 56
    assert main(["evaluate", str(tmp_path / "new"), SITE]) == 0
    assert "56 of 56 images trained the model" in capsys.readouterr().out
    assert main(["assess", str(tmp_path / "new"), SITE]) == 2
    assert "adapted to one site already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_temperature_is_folded_into_the_head(inside, capsys, tmp_path, kept):
    export_model("output/small", str(tmp_path / "warm"), Choice("erm", ("photo",)), temperature=True)
    capsys.readouterr()
    answer(capsys, tmp_path / "warm", SITE, "--out", tmp_path / "new")
    warm, after = load(tmp_path / "warm"), load(tmp_path / "new")
    assert warm.config.temperature != 1 == after.config.temperature
    stored, head = read_stored(tmp_path / "warm", warm.config), warm.module.head
    files = sorted(inside.site.glob("*/*"))
    z = torch.from_numpy(warm.encode(files))
    labels = torch.tensor([warm.class_names.index(file.parent.name) for file in files])
    scaled = head.weight / warm.config.temperature, head.bias / warm.config.temperature
    weight, bias = adapt_head(*scaled, z, labels, stored.heads.mean, stored.heads.deviation)
    assert np.allclose(after.predict_proba(files), (z @ weight.T + bias).softmax(1), atol=1e-5)


def test_the_shipped_model_stays_if_nothing_is_gained(inside, capsys, tmp_path):
    """Labels at random: no head is better."""
    files = sorted(str(file) for file in inside.site.glob("*/*"))
    names = load("model").class_names
    draw = np.random.default_rng(0)
    table = tmp_path / "noise.csv"
    with table.open("w") as file:
        csv.writer(file).writerows([("path", "label"), *((path, names[draw.integers(7)]) for path in files)])
    status, out, _ = answer(capsys, "model", table, "--out", tmp_path / "new", "--json")
    assert status == 0 and json.loads(out)["kept"] is False and not (tmp_path / "new").exists()
    assert "keep the shipped model" in answer(capsys, "model", table, "--out", tmp_path / "new")[1]


def test_unreadable_images_of_the_site_are_said(inside, capsys, tmp_path, kept):
    for number, file in enumerate(sorted(inside.site.glob("*/*"))):
        shutil.copy(file, tmp_path / f"{number}.png")
        (tmp_path / f"broken{number}.png").write_bytes(b"%d" % number)
    options = ("--recentre", "--images", tmp_path)
    status, out, _ = answer(capsys, "model", SITE, "--out", tmp_path / "new", *options)
    assert status == 0 and "56 unreadable images left out, the first: " in out and "broken0.png: " in out


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_predictions_are_no_labels(inside, capsys, tmp_path, kept, suffix):
    made = tmp_path / f"predictions.{suffix}"
    assert main(["predict", "model", str(inside.site), "--out", str(made), "--top-k", "2"]) == 0
    remedy = "rename label to predicted, and write the true classes into a new column label"
    capsys.readouterr()
    for argv in (["evaluate", "model", str(made)], ["adapt", "model", str(made), "--out", str(tmp_path / "new")]):
        assert main(argv) == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("xdm-ft:")]
        assert str(made) in line and line.endswith(remedy) and not (tmp_path / "new").exists()
    with pytest.raises(UserError, match=remedy):
        TableDataset(file=made)
    frame = pandas.read_csv(made) if suffix == "csv" else pandas.read_parquet(made)
    shouted = made.with_name(f"shouted.{suffix}")
    getattr(frame.rename(columns={"probability": " Probability"}), f"to_{suffix}")(shouted, index=False)
    with pytest.raises(UserError, match=remedy):
        TableDataset(file=shouted)
    with pytest.raises(UserError, match="column probability_1 shows that label_1 holds predictions"):
        TableDataset(file=made, columns=TableColumns(label="label_1"))
    frame = frame.rename(columns={"label": "predicted"})
    getattr(frame, f"to_{suffix}")(shouted, index=False)
    with pytest.raises(UserError, match="column probability_1 shows that label_1 holds predictions"):
        TableDataset(file=shouted, columns=TableColumns(label="label_1"))
    frame = frame.assign(label=frame["path"].map(lambda path: Path(path).parent.name), domain="photo")
    frame["path"] = [str(inside.folder / path) for path in frame["path"]]
    frame.to_csv(made, index=False) if suffix == "csv" else frame.to_parquet(made)
    assert main(["evaluate", "model", str(made)]) == 0 and len(TableDataset(file=made)) == 56


def test_rows_for_evaluation_and_rows_without_labels_adapt_nothing(inside, capsys, tmp_path, kept):
    files = sorted(inside.site.glob("*/*"))
    rows = [
        (file, "evaluate" if i % 4 == 0 else "adapt", file.parent.name if i % 3 else "") for i, file in enumerate(files)
    ]
    rows.append((inside.folder / "data/PACS/sketch/dog/000.png", "adapt", "dog"))
    shutil.copy(files[1], tmp_path / "copy.png")
    rows.append((tmp_path / "copy.png", "adapt", "horse"))
    rows.append((tmp_path / "copy.png", "evaluate", files[1].parent.name))  # it adapts, so it judges nothing
    (tmp_path / "bad.png").write_bytes(b"no image")
    rows.append((tmp_path / "bad.png", "evaluate", "dog"))
    with (tmp_path / "site.csv").open("w") as file:
        csv.writer(file).writerows([("path", "for", "label"), *rows])
    found = json.loads(answer(capsys, "model", tmp_path / "site.csv", "--out", tmp_path / "new", "--json")[1])
    wanted = [row for row in rows[:56] if row[1] == "adapt" and row[2]]
    assert found["labels"] == len(wanted) and found["training_images"] == 1
    assert found["unlabelled"] == sum(row[1] == "adapt" and not row[2] for row in rows)
    assert (found["copies"], found["copies_with_another_label"]) == (1, 1)
    assert [*found["unreadable"]] == [str(tmp_path / "bad.png")], "of the images that judge, too"
    random, after = [(row[0], row[2]) for row in rows[:56] if row[1] == "evaluate" and row[2]], load(tmp_path / "new")
    for model, accuracy in ((load("model"), "before"), (after, "after")):
        right = model.predict([file for file, _ in random]) == np.array([label for _, label in random])
        assert found["at_random"][accuracy] == pytest.approx(right.mean())
    gain = found["at_random"]["after"] - found["at_random"]["before"]
    low, high = found["at_random"]["interval"]
    assert found["at_random"]["images"] == len(random) and low <= gain <= high
    text = after.config.adapted.at_random.to_text()
    assert f"points ({100 * low:+z.1f} to " in text and f"on {len(random)} images chosen at random" in text
    assert text in (tmp_path / "new/README.md").read_text().replace("\n", " ")


@pytest.mark.parametrize(
    ("metric", "decides", "why"),
    [("accuracy", "accuracy", ""), ("balanced_accuracy", "balanced_accuracy", ""),
     ("macro_f1", "balanced_accuracy", "macro F1, the run's metric, is no share of correct images"),
     ("auroc", "accuracy", "AUROC, the run's metric, is no share of correct images"),
     ("worst_domain_accuracy", "accuracy", "worst-domain accuracy, the run's metric, is the same at one site")],
)  # fmt: skip
def test_the_metric_of_the_run_decides(inside, by_metric, capsys, tmp_path, kept, metric, decides, why):
    """Of one class two images, of the others eight; without random images the card has cross-validation alone."""
    model = by_metric(metric)
    rare = [file for file in sorted(inside.site.glob("*/*")) if file.parent.name != "dog" or file.stem < "002"]
    for name in ("adapt", "both"):
        random = [(file, "evaluate", file.parent.name) for file in rare[::4] if name == "both"]
        rows = [
            *((file, "adapt", file.parent.name) for file in rare if (file, "evaluate", file.parent.name) not in random)
        ]
        with (tmp_path / f"{name}.csv").open("w") as file:
            csv.writer(file).writerows([("path", "for", "label"), *rows, *random])
    status, out, _ = answer(capsys, model, tmp_path / "adapt.csv", "--out", tmp_path / "new")
    found = json.loads(answer(capsys, model, tmp_path / "both.csv", "--out", tmp_path / "both", "--json")[1])
    assert (found["metric"], found["protocol_metric"], found["at_random"]["metric"]) == (decides, metric, decides)
    share = found["before"] / found["labels"]
    assert (found["metric_before"] == pytest.approx(share)) == (decides == "accuracy")
    page = " ".join((tmp_path / "new/README.md").read_text().split())
    named = decides.replace("_", " ")
    assert status == 0 and ("in cross-validation balanced accuracy " in page) == (decides != "accuracy")
    assert "(p 0 against no gain)" in page and ((f"{named} decides: {why}" in out) if why else "decides" not in out)
    assert re.search(
        rf"decision alone: {'' if decides == 'accuracy' else named} ?[\d.]+(%| of 50 correct), [\d.]+%? by", out
    )
    told = load(tmp_path / "both").config.adapted
    assert ("points of balanced accuracy (" in told.at_random.to_text()) == (decides != "accuracy")
    assert (told.metric, told.metric_after, told.p) == (decides, found["metric_after"], 0)


def test_wrong_labels_are_warned_of(inside, capsys, tmp_path, monkeypatch):
    """Of the labels that the reference head is sure of, more than a fifth are others."""
    clean = answer(capsys, "model", SITE, "--out", tmp_path / "clean", "--json")[1]
    assert json.loads(clean)["warnings"] == []
    monkeypatch.setattr(driver, "SURE", 0.2)
    for file in sorted(inside.site.glob("dog/*")):
        target = tmp_path / "site" / "horse" / f"dog{file.name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    for file in sorted(inside.site.glob("horse/*")):
        shutil.copytree(file.parent, tmp_path / "site" / "dog", dirs_exist_ok=True)
    text = answer(capsys, "model", tmp_path / "site", "--out", tmp_path / "new")[1]
    assert "have another label: look at some of them" in text


def test_ten_labels_do_and_unreadable_images_do_not_count(inside, capsys, tmp_path, kept):
    files = sorted(inside.site.glob("*/*"))[::5][:11]
    (tmp_path / "bad.png").write_bytes(b"no image")
    for n, status in ((9, 2), (10, 0)):
        rows = [*((file, file.parent.name) for file in files[:n]), (tmp_path / "bad.png", "dog")]
        with (tmp_path / "site.csv").open("w") as file:
            csv.writer(file).writerows([("path", "label"), *rows])
        found, out, err = answer(capsys, "model", tmp_path / "site.csv", "--out", tmp_path / "new")
        assert found == status and (tmp_path / "new").exists() == (status == 0), err
    assert "10 labelled images" in out and "1 unreadable image" in out and "20 labels or more are advised" in out


def test_recentring_is_folded_into_the_bias(inside, capsys, tmp_path, kept):
    given_ = ("--recentre", "--images", SITE)
    assert answer(capsys, "model", SITE, "--out", tmp_path / "new", *given_)[0] == 0
    before, after, stored = load("model"), load(tmp_path / "new"), read_stored(Path("model"), load("model").config)
    files = sorted(inside.site.glob("*/*"))
    z = torch.from_numpy(before.encode(files))
    labels = torch.tensor([before.class_names.index(file.parent.name) for file in files])
    shift = z.mean(0) - torch.full((7,), 1 / 7) @ stored.class_means
    head = before.module.head
    weight, bias = adapt_head(head.weight, head.bias, z - shift, labels, stored.heads.mean, stored.heads.deviation)
    assert np.allclose(after.predict_proba(files), ((z - shift) @ weight.T + bias).softmax(1), atol=1e-4)
    assert after.config.adapted.recentred


def test_bad_input_is_one_line_and_writes_nothing(inside, capsys, tmp_path):
    few, one, other = tmp_path / "few", tmp_path / "one", tmp_path / "other"
    for name in ("dog", "horse"):
        (few / name).mkdir(parents=True)
        shutil.copy(inside.site / name / "000.png", few / name)
    shutil.copytree(
        inside.site, one, ignore=lambda folder, names: set(names) - {"dog"} if folder == str(inside.site) else ()
    )
    for i, source in enumerate(sorted(inside.folder.glob("data/PACS/photo/horse/*"))):
        shutil.copy(source, one / "dog" / f"horse{i}.png")
    shutil.copytree(inside.site, other)
    (other / "dog").rename(other / "wolf")
    out = tmp_path / "new"
    for argv, words in [
        ((few,), "too few to adapt: 2 labelled images; label 20 or more"),
        ((one,), "all labels are dog"),
        ((other,), 'no class "wolf"'),
        (("data/PACS/sketch",), "too few to adapt"),
        (("data/PACS",), "4 domains"),
        ((SITE, "--group", "(/)"), "too few groups for cross-validation: 1"),
        ((SITE, "--recentre"), "give both"),
        ((SITE, "--images", SITE), "give both"),
        ((SITE, "--prevalence", "dog=1"), "only --recentre uses it"),
        ((SITE, "--recentre", "--images", SITE, "--prevalence", "dog=1"), "name all classes"),
    ]:
        status, shown, err = answer(capsys, "model", *argv, "--out", out)
        assert status == 2 and not shown and words in err and not out.exists(), (argv, err)
    status, _, err = answer(capsys, "output/small", SITE, "--out", out)
    assert status == 2 and "is a run directory; export a model of it first" in err
    out.mkdir()
    (out / "mine").write_text("")
    status, _, err = answer(capsys, "model", SITE, "--out", out)
    assert status == 2 and "exists already" in err


@pytest.mark.slow
def test_other_heads_are_refused(inside, capsys, tmp_path):
    export_model("output/small", str(tmp_path / "cosine"), Choice("cosine", ("photo",)))
    capsys.readouterr()
    status, _, err = answer(capsys, tmp_path / "cosine", SITE, "--out", tmp_path / "new")
    assert status == 2 and "its head is cosine; only linear heads can be adapted" in err
    assert read_config(tmp_path / "cosine")[0].site_xxh3 is not None  # it can be assessed


# class shares


@given(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any))
def test_shares_are_read_as_they_are_written(counts):
    names = ("a", "b=c,d", "d, e")
    q = np.array(counts) / sum(counts)
    text = ",".join(f"{name}={share:.6f}" for name, share in zip(names, q, strict=True))
    assert prevalence_of(text, names) == pytest.approx(q, abs=1e-5)


@pytest.mark.parametrize(
    "text, words",
    [("a=.5", "name all classes"), ("a=.5,b=.6", "their sum 1"), ("a=x,b=1", "a share is not a number"),
     ("a=-1,b=2", "0 or more"), ("a=nan,b=1", "0 or more"), ("c=1", "c=1 is no CLASS=SHARE"), ("", "is no CLASS=SHARE"),
     ("a", "a is no CLASS=SHARE"), ("a=.5,b=.5,c", "c is no CLASS=SHARE"),
     ("a=.5,a=.5", "twice")],
)  # fmt: skip
def test_shares_that_are_none(text, words):
    with pytest.raises(UserError, match=words):
        prevalence_of(text, ("a", "b"))


# the site as one more domain


@pytest.mark.slow
def test_a_method_is_trained_again_with_the_site(inside, capsys, tmp_path, monkeypatch):
    """The images of another camera: as those of the run, but darker."""
    for file in sorted(inside.site.glob("*/*")):
        target = tmp_path / "site" / file.parent.name / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(Image.open(file)) // 2).save(target)
    out, heads = tmp_path / "new", []
    argv = ("output/small", tmp_path / "site", "--method", "xdomainmix", "--out", out)
    trained = driver.train_head

    def recorded(job, features, annotations):
        heads.append((job, trained(job, features, annotations)))
        return heads[-1][1]

    monkeypatch.setattr(driver, "train_head", recorded)
    status, text, err = answer(capsys, *argv, "--json")
    found = json.loads(text)
    assert status == 0 and found["labels"] == 56, err
    assert 0 <= found["before"] <= 56
    sizes = [sum(map(len, job.split.train)) for job, _ in heads]
    assert sizes == [4 * 56, *[5 * 56 - 14] * 4, 5 * 56]  # the baseline, four folds, all
    assert heads[-1][0].split.train_domains == ("art_painting", "cartoon", "photo", "sketch", "site")
    assert found["kept"] == out.exists() == (found["p"] <= 0.3)
    monkeypatch.setattr(driver, "compare_heads", lambda *of: compare_heads(*of)._replace(p=0.0))
    if not out.exists():
        answer(capsys, *argv)
    model = load(out)
    assert torch.allclose(model.module.head.weight, heads[-1][1]["head.weight"], atol=1e-6)
    assert model.config.method["train_domains"][-1] == "site" and model.config.adapted.labels == 56
    page = (out / "README.md").read_text()
    assert "xdomainmix of the run small" in page and "It lacks" not in page
    assert "trained again on all images of the run and of the site" in page and "held out)" not in page
    assert model.training_images is not None and len(model.training_images) == 5 * 56


def test_what_a_run_can_not_do_with_a_site(inside, capsys, tmp_path):
    out = tmp_path / "new"
    for argv, words in [
        (("--method", "nothing"), "no model nothing"),
        (("--method", "erm", "--held-out", "photo"), "is for a model directory"),
        ((), "is a run directory; export a model of it first"),
        (("--method", "erm"), "0 labelled images, without 56 that trained the model"),
    ]:
        status, _, err = answer(capsys, "output/small", SITE, *argv, "--out", out)
        assert status == 2 and words in err and not out.exists(), err
