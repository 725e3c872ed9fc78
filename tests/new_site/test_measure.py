"""What a few labels show: a threshold for a risk, stored and used, and the accuracy with the help of other images."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import beta, t

from xdm_ft.cli.parser import main
from xdm_ft.evaluation.few_labels import clopper_pearson, shorter
from xdm_ft.export.directory import CONFIG, THRESHOLD, checksum_of
from xdm_ft.export.predict import open_unfinished
from xdm_ft.export.predictor import load
from xdm_ft.export.sources import Item, Site, Sources
from xdm_ft.new_site import measure
from xdm_ft.new_site.measure import AtRisk, Labelled, at_risk, with_images
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage import json_digest
from xdm_ft.training.adaptation import do_no_harm

PHOTO = "data/PACS/photo"


def answer(capsys, *argv):
    status = main([*map(str, argv)])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def labelled(p, right, groups=None, trained=None):
    """Images of two classes in turn, of which the model says the right or the wrong one with probability p [n]."""
    labels = np.arange(len(p)) % 2
    site = Site([Item(str(i), str(i)) for i in range(len(p))], labels, ("a",), np.zeros(len(p)), groups)
    says_second = (labels == 1) == right
    of_second = np.where(says_second, p, 1 - p)
    logits = torch.from_numpy(np.stack([np.log1p(-of_second), np.log(of_second)], 1)).float()
    return Labelled(site, logits, trained)


def test_a_threshold_by_hand():
    """40 of 60 answers are sure and right, the others wrong: one wrong answer more is allowed, four are not."""
    p = np.concatenate([np.linspace(0.9, 0.99, 40), np.linspace(0.55, 0.7, 20)])
    found = at_risk(labelled(p, np.arange(60) < 40), 0.1)
    assert (found.answered, found.wrong, found.labels, found.refused) == (41, 1, 60, None)
    assert beta.ppf(0.9, 2, 40) <= 0.1 < beta.ppf(0.9, 5, 40) and found.answered == (p >= found.threshold).sum()


def test_the_threshold_on_the_screen_is_short_and_answers_the_same_images():
    drawn = np.random.default_rng(0).random(200) * 0.1 + 0.8
    for threshold in (0.837928802631579, *drawn):
        value = shorter(threshold, drawn)
        assert ((drawn >= value) == (drawn >= threshold)).all() and threshold - 1e-3 < value <= threshold
        assert len(str(value)) <= 9, "at most seven decimals tell 200 images apart"
    assert shorter(0.837928802631579, np.array([0.5, 0.84])) == 0.837 and shorter(0.5, np.array([0.5])) == 0.5
    assert shorter(0.0004, np.array([0.0004])) == 0.0004, "0 is no threshold"
    p = np.concatenate([np.linspace(0.9, 0.99, 40), np.linspace(0.55, 0.7, 20)])
    found = at_risk(labelled(p, np.arange(60) < 40), 0.1)
    assert found.shown is not None and len(str(found.shown)) < len(str(found.threshold))


def test_why_there_is_no_threshold():
    few = at_risk(labelled(np.linspace(0.6, 0.9, 21), np.ones(21, bool)), 0.1)
    assert (
        few.threshold is None and "too few labels: 21 labels; 22 or more can show it (label --budget 88)" in few.refused
    )
    wrong = at_risk(labelled(np.linspace(0.6, 0.9, 60), np.zeros(60, bool)), 0.1)
    assert wrong.threshold is None and "with 22 of the 22 most certain answers wrong" in wrong.refused
    alike = at_risk(labelled(np.full(60, 0.9), np.arange(60) < 22), 0.1)
    assert "with 38 of the 60 most certain answers wrong" in alike.refused, "no order among equal ones"
    one = labelled(np.linspace(0.6, 0.9, 60), np.ones(60, bool))
    one.site.labels[:] = 0
    assert at_risk(one, 0.1).refused == "all labels are of one class and say nothing about the others"
    trained = at_risk(labelled(np.linspace(0.6, 0.9, 60), np.ones(60, bool), trained=np.arange(60) < 3), 0.1)
    assert trained.threshold is None and trained.refused == "3 of these images trained the model"
    grouped = at_risk(labelled(np.linspace(0.6, 0.9, 60), np.ones(60, bool), np.arange(60) // 6), 0.1)
    assert grouped.threshold is None and "too few labels: 60 labels in 10 groups" in grouped.refused
    assert (
        at_risk(labelled(np.linspace(0.6, 0.9, 60), np.ones(60, bool), np.arange(60) // 2), 0.1).threshold is not None
    )


def test_the_help_of_other_images_by_hand(inside):
    model = load("model")
    files = sorted(str(file) for file in inside.site.glob("*/*"))
    p = model.predict_proba(files)
    n = 100
    right = np.arange(n) % 3 > 0
    images = labelled(np.linspace(0.51, 0.99, n), right)
    scale = model.config.temperature / model.config.fitted_temperature
    found = with_images(model, "model", Sources([PHOTO]), images, None)
    of_all = (torch.from_numpy(np.log(p)).double() * scale).softmax(1).max(1).values.numpy()
    c = (images.logits.double() * scale).softmax(1).max(1).values.numpy()
    value = of_all.mean() + (right - c).mean()
    error = (of_all.var(ddof=1) / len(of_all) + (right - c).var(ddof=1) / n) ** 0.5
    half = t.ppf(0.975, n - 1) * error
    assert found.value == pytest.approx(value, abs=1e-5) and found.images == 56
    assert found.interval == pytest.approx((value - half, min(1, value + half)), abs=1e-5)
    few = with_images(model, "model", Sources([PHOTO]), labelled(np.full(49, 0.8), np.ones(49, bool)), None)
    assert few.value is None and few.refused == "too few labels: 49; 50 are needed (label --budget 200)"


def test_few_labels_have_an_exact_interval(inside, capsys):
    found = json.loads(answer(capsys, "evaluate", "model", PHOTO, "--json")[1])["whole"]
    right = round(found["metrics"]["accuracy"]["value"] * 56)
    assert found["metrics"]["accuracy"]["interval"] == pytest.approx(clopper_pearson(right, 56))


def test_what_stays_accuracy_is_said(inside, by_metric, capsys, monkeypatch):
    """The domains, and which is the worst, are by the metric of the run."""
    model = by_metric("balanced_accuracy")
    monkeypatch.setattr(measure, "fewest_answered", lambda risk: 5)
    monkeypatch.setattr("xdm_ft.cli.evaluate.at_risk", lambda images, risk: AtRisk(0.1, 0.5, 28, 0, 56, None))
    out = answer(capsys, "evaluate", model, PHOTO, "--risk", "10%", "--images", PHOTO)[1]
    assert "A risk is a share of all answers, not balanced accuracy: in a rare class more of them may be wrong" in out
    assert "--images helps accuracy alone, not balanced accuracy: without labels no image's class is known" in out
    assert "A risk is a share" not in answer(capsys, "evaluate", inside.model, PHOTO, "--risk", "10%")[1]
    out = answer(capsys, "evaluate", by_metric("ece"), "data/PACS")[1]
    assert re.search(r"domain +images +expected calibration error \(ECE\) +95%", out)
    found = json.loads(answer(capsys, "evaluate", model, "data/PACS", "--json")[1])
    assert found["metric"] == "ece"


@pytest.fixture
def stored(inside, model, capsys, monkeypatch, tmp_path):
    """A copy of the model with a threshold, its file, and the smallest probability of a photo that is above it."""
    monkeypatch.setattr(measure, "fewest_answered", lambda risk: 5)
    p = np.sort(load(model).predict_proba(sorted(inside.site.glob("*/*"))).max(1))
    found = AtRisk(0.1, float(p[28]), 28, 0, 56, None)
    monkeypatch.setattr("xdm_ft.cli.evaluate.at_risk", lambda images, risk: found)
    status, out, _ = answer(capsys, "evaluate", model, PHOTO, "--risk", "10%", "--save")
    assert status == 0 and f"wrote {model / THRESHOLD}" in out
    return model


def predicted(path):
    with Path(path).open() as file:
        return list(csv.DictReader(file))


def test_a_model_that_is_exported_again_meanwhile_gets_nothing_of_the_earlier_one(
    inside, model, capsys, monkeypatch, tmp_path
):
    """Another model takes the directory's place while images are read."""

    def exported_again(*arguments):
        document = json.loads((model / CONFIG).read_text())
        del document["checksum"]
        document["chosen"] += ", again"
        (model / CONFIG).write_text(json.dumps({**document, "checksum": json_digest(document)}))
        return AtRisk(0.1, 0.5, 28, 0, 56, None)

    begun = checksum_of(model)
    monkeypatch.setattr("xdm_ft.cli.evaluate.at_risk", exported_again)
    status, _, err = answer(capsys, "evaluate", model, PHOTO, "--risk", "10%", "--save")
    line = f"{model}: holds another model than when this command began; run the command again"
    assert status == 2 and line in err and not (model / THRESHOLD).exists() and checksum_of(model) != begun

    def no_harm(*arguments):
        shown = do_no_harm(*arguments)
        exported_again()
        return shown._replace(p=0.0)

    monkeypatch.setattr("xdm_ft.new_site.adapt.do_no_harm", no_harm)
    status, _, err = answer(capsys, "adapt", model, PHOTO, "--out", tmp_path / "new")
    assert status == 2 and line in err and not (tmp_path / "new").exists()


def test_a_stored_threshold_is_used(stored, capsys, tmp_path):
    record = json.loads((stored / THRESHOLD).read_text())
    assert (record["risk"], record["answered"], record["wrong"], record["labels"]) == (0.1, 28, 0, 56)
    out = tmp_path / "p.csv"
    assert answer(capsys, "predict", stored, PHOTO, "--abstain-below", "stored", "--out", out)[0] == 0
    rows = predicted(out)
    assert [row["abstained"] for row in rows] == [
        "true" if float(row["probability"]) < record["threshold"] else "false" for row in rows
    ]
    assert {row["abstained"] for row in rows} == {"true", "false"}
    assert load(stored).predict([str(next(Path(PHOTO).glob("*/*")))])  # the directory loads as before


def test_thresholds_that_can_not_be_used(stored, model, inside, capsys, tmp_path):
    file, command = stored / THRESHOLD, ("--abstain-below", "stored", "--out", tmp_path / "p.csv")
    whole = file.read_text()
    shutil.copy(file, tmp_path / "kept.json")
    for content, words in [
        ("{}", "is damaged"),
        (whole.replace('"wrong": 0', '"wrong": 1'), "is damaged"),
        (None, "has no stored threshold; store one: xdm-ft evaluate"),
    ]:
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
        status, _, err = answer(capsys, "predict", stored, PHOTO, *command)
        assert status == 2 and words in err and not (tmp_path / "p.csv").exists(), err
    other = Path(shutil.copytree(inside.model, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    shutil.copy(tmp_path / "kept.json", other / THRESHOLD)
    assert config["checksum"]
    status, _, _ = answer(capsys, "predict", other, PHOTO, *command)
    assert status == 0  # a copy of the same model
    shutil.copy(tmp_path / "kept.json", file)
    status, _, err = answer(capsys, "predict", stored, PHOTO, "--precision", "bf16", "--abstain-below", "stored")
    assert status == 2 and "add --precision fp32" in err


def test_what_can_not_be_stored(inside, model, capsys):
    for argv, words in [
        ((model, PHOTO, "--save"), "--save: needs a threshold to store; add --risk"),
        (("output/small", PHOTO, "--method", "erm", "--held-out", "photo", "--risk", "0.1", "--save"), "run directory"),
        ((model, "data/PACS", "--risk", "0.1"), "is for one site, but these are 4 domains"),
    ]:
        status, _, err = answer(capsys, "evaluate", *argv)
        assert status == 2 and words in err, err
    for share in ("0", "1", "x", "200%"):
        with pytest.raises(SystemExit):
            main(["evaluate", str(model), PHOTO, "--risk", share])
    capsys.readouterr()
    status, out, _ = answer(capsys, "evaluate", model, PHOTO, "--risk", "5%", "--save")
    assert status == 0 and "Nothing was stored" in out and not (model / THRESHOLD).exists()


def test_labels_to_adapt_give_no_threshold(inside, model, capsys, tmp_path):
    files = sorted(Path(PHOTO).resolve().glob("*/*"))
    rows = [(str(f), "adapt", f.parent.name) if i % 4 else (str(f), "evaluate", "") for i, f in enumerate(files)]
    with (tmp_path / "site.csv").open("w") as file:
        csv.writer(file).writerows([("path", "for", "label"), *rows])
    status, _, err = answer(capsys, "evaluate", model, tmp_path / "site.csv", "--risk", "10%", "--save")
    assert status == 2 and "no row marked evaluate has a label" in err and not (model / THRESHOLD).exists()


def test_a_threshold_of_another_model_or_of_earlier_predictions(stored, inside, capsys, tmp_path):
    config = stored / "config.json"
    document = json.loads(config.read_text())
    del document["checksum"]
    document["chosen"] = "another one"
    config.write_text(json.dumps({**document, "checksum": json_digest(document)}))
    command = ("--abstain-below", "stored", "--out", tmp_path / "p.csv")
    status, _, err = answer(capsys, "predict", stored, PHOTO, *command)
    assert status == 2 and f"{THRESHOLD} is of another model" in err
    # of unfinished predictions with another threshold
    unfinished = tmp_path / "q.csv.unfinished"
    with open_unfinished(tmp_path / "q.csv", {"abstain_below": 0.5}, resume=False) as rows:
        rows.add([["a.png", "dog", 0.9, None]])
        rows.flush()
    again = open_unfinished(tmp_path / "q.csv", {"abstain_below": 0.6}, resume=True)
    with pytest.raises(UserError, match=r"abstain_below was 0\.5 and is 0\.6 now"), again as rows:
        rows.skip_done(iter([Item("a.png", "a.png")]))
    assert unfinished.exists()


def test_features_of_a_site_are_computed_once(inside, capsys, tmp_path, monkeypatch):
    """The next command reads them; where nothing can be written, it computes them again and says the same."""
    monkeypatch.setenv("XDM_FT_CACHE", str(tmp_path / "cache"))
    shutil.copytree(inside.site, tmp_path / "site")

    def computed(target):
        out = tmp_path / target
        return json.loads(answer(capsys, "predict", "model", tmp_path / "site", "--out", out, "--json")[1])["computed"]

    assert computed("before.csv") == 56
    first = json.loads(answer(capsys, "assess", "model", tmp_path / "site", "--json")[1])
    assert computed("after.csv") == 0
    assert json.loads(answer(capsys, "assess", "model", tmp_path / "site", "--json")[1]) == first
    with monkeypatch.context() as patch:
        for place in ("features.hashes.hash_file", "export.predictor.decode"):
            patch.delattr(f"xdm_ft.{place}")  # no image is opened
        assert json.loads(answer(capsys, "assess", "model", tmp_path / "site", "--json")[1]) == first
    assert (tmp_path / "before.csv").read_text() == (tmp_path / "after.csv").read_text()
    # a damaged shard is computed again
    [shard] = (tmp_path / "cache").glob("*/shard-*")
    shard.write_bytes(shard.read_bytes()[:-9])
    assert json.loads(answer(capsys, "assess", "model", tmp_path / "site", "--json")[1]) == first
    assert computed("again.csv") == 0
    monkeypatch.setattr("xdm_ft.export.predictor.is_writable", lambda folder: False)
    shutil.rmtree(tmp_path / "cache")
    assert json.loads(answer(capsys, "assess", "model", tmp_path / "site", "--json")[1]) == first
    assert computed("without.csv") == 56
