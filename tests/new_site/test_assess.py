"""What `xdm-ft assess` says, and refuses to say."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_models import config_of, write_config

from xdm_ft.cli.assess import lines
from xdm_ft.cli.parser import main
from xdm_ft.export import directory
from xdm_ft.export.directory import SITE, digest_of, read_config
from xdm_ft.export.predictor import load
from xdm_ft.new_site.assess import Assessment, WorstThreshold, assess, worst_thresholds
from xdm_ft.new_site.stored import AtDomain, Bought, RiskAt, read_stored
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.tensors import write_checked


def answer(capsys, *argv):
    status = main(["assess", *map(str, argv)])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_numbers_are_those_of_the_stored_heads(inside, capsys):
    status, out, err = answer(capsys, "model", "data/PACS/photo", "--json")
    found = json.loads(out)
    assert status == 0, err
    assert found["images"] == 56 and found["groups"] is None
    stored = read_stored(inside.model, read_config(inside.model)[0])
    model = load("model")
    z = torch.from_numpy(model.encode(sorted(inside.site.glob("*/*"))))
    heads = stored.heads.weights
    standard = (z - stored.heads.mean) / stored.heads.deviation
    logits = standard @ heads[:, :, :-1].transpose(1, 2) + heads[:, None, :, -1]
    confidence = (logits[-1] / stored.about.temperature).softmax(1).max(1).values
    assert found["parts"]["atc"] == pytest.approx((confidence >= stored.about.threshold).double().mean())
    assert found["past_errors"] == {name: of.error for name, of in stored.about.domains.items()}
    if found["refused"] is None:
        assert found["estimate"] == sorted(found["parts"].values())[1]
        assert found["low"] <= found["estimate"] <= found["high"]
    else:
        assert found["estimate"] is found["low"] is found["high"] is None and found["verdict"] == "unknown"


def test_budgets_are_those_of_the_file_and_a_file_of_another_version_is_refused(inside, model, capsys):
    stored = read_stored(model, read_config(model)[0]).about.budgets
    assert [of.budget for of in stored] == [100, 200, 400, 800]
    assert json.loads(answer(capsys, model, "data/PACS/photo", "--json")[1])["budgets"] == [
        of.model_dump() for of in stored
    ]
    tensors = {name: tensor.clone() for name, tensor in load_file(model / SITE).items()}
    about = json.loads(tensors["about"].numpy().tobytes())
    del about["budgets"]
    tensors["about"] = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
    write_checked(model / SITE, tensors, {})
    write_config(model, config_of(model) | {"site_xxh3": digest_of(tensors)})
    status, out, err = answer(capsys, model, "data/PACS/photo")
    assert status == 2 and not out and "made by another version of xdm_ft (budgets: Field required)" in err


def test_shares_of_classes_change_the_estimate(inside):
    model, one_class = load("model"), np.eye(7)[3]
    first, second = (assess(model, "model", ["data/PACS/photo"], q, None, None) for q in (None, one_class))
    assert first.parts["cot"] != second.parts["cot"] and first.prevalence is None
    assert first.parts["atc"] == second.parts["atc"] and second.prevalence["guitar"] == 1


def test_images_that_trained_and_copies_do_not_count(inside, capsys, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(inside.site, site)
    shutil.copy(site / "dog/000.png", site / "dog/copy.png")
    shutil.copy(inside.folder / "data/PACS/sketch/dog/000.png", site / "dog/trained.png")
    (site / "dog/broken.png").write_bytes(b"no image")
    found = json.loads(answer(capsys, "model", site, "--json")[1])
    assert (found["images"], found["copies"], found["training_images"]) == (56, 1, 1)
    assert [*found["unreadable"]] == [str(site / "dog/broken.png")]
    text = answer(capsys, "model", site)[1]
    assert "1 copy left out" in text and "1 image left out, as they trained the model" in text
    status, _, err = answer(capsys, "model", "data/PACS/sketch")
    assert status == 2 and "all 56 images trained the model" in err


def test_groups_are_less_than_images(inside, capsys):
    one = json.loads(answer(capsys, "model", "data/PACS/photo", "--group", "(dog|horse|[a-z]+)/", "--json")[1])
    assert one["groups"] == 1 and one["images"] == 56
    status, _, err = answer(capsys, "model", "data/PACS/photo", "--group", "nothing-like-this")
    assert status == 2 and "matches nothing" in err


def test_few_images_get_no_number(inside, capsys):
    found = json.loads(answer(capsys, "model", "data/PACS/photo/dog", "--json")[1])
    assert found["estimate"] is None and "50 are needed" in found["refused"] and found["verdict"] == "unknown"
    assert "No expected accuracy: 8 images are too few" in answer(capsys, "model", "data/PACS/photo/dog")[1]


def test_bad_input_is_one_line(inside, model, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    for argv, words in [
        (("output/small", "data/PACS/photo", "--method", "erm", "--held-out", "photo"), "is a run directory; export"),
        ((model, tmp_path / "empty"), "contains no image"),
        ((model, tmp_path / "nowhere"), "does not exist"),
    ]:
        status, out, err = answer(capsys, *argv)
        assert status == 2 and not out and words in err and err.count("\n") == 1, err
    whole = (model / SITE).read_bytes()
    for damage in (b"", whole[:-5], whole[:-1] + bytes([whole[-1] ^ 1])):
        (model / SITE).write_bytes(damage)
        status, _, err = answer(capsys, model, "data/PACS/photo")
        assert status == 2 and "is damaged" in err and "export the model again" in err
    (model / SITE).unlink()
    status, _, err = answer(capsys, model, "data/PACS/photo")
    assert status == 2 and "does not exist" in err and "again" in err


def with_risks(tensors, change):
    """Changes the numbers of the file's held-out domains."""
    about = json.loads(tensors["about"].numpy().tobytes())
    change([of["risks"] for of in about["domains"].values()])
    tensors["about"] = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)


def with_heads(number):
    def change(tensors):
        tensors["heads"] = tensors["heads"][:1].expand(number, -1, -1).contiguous()
        tensors["accuracies"] = torch.full([number], 0.5, dtype=torch.float64)
        tensors["agreements"] = torch.full([number * (number - 1) // 2], 0.5, dtype=torch.float64)

    return change


FOREIGN = [
    (lambda tensors: tensors.update(more=torch.zeros(2)), "more is no tensor of such a file"),
    (lambda tensors: tensors.pop("mean"), "mean is missing"),
    (with_heads(1), r"heads has the shape [1, 7, "),
    (with_heads(1000), r"heads has the shape [1000, 7, "),
    (with_heads(4000), "not [3 to 64, 7, "),
    (lambda tensors: tensors.update(accuracies=tensors["accuracies"][1:]), "are not those of 17 heads"),
    (lambda tensors: tensors.update(mean=tensors["mean"] * torch.inf), "mean holds values that are not finite"),
    (lambda tensors: tensors.update(shares=tensors["shares"].int()), "a tensor has another type"),
    (lambda tensors: tensors.update(mean=tensors["mean"][None]), "mean has the shape"),
    (lambda tensors: tensors.update(agreements=-tensors["agreements"]), "accuracies, agreements: must be from 0 to 1"),
    (lambda tensors: with_risks(tensors, lambda risks: risks[1].clear()), "(domains: risks must be numbers"),
    (lambda tensors: with_risks(tensors, lambda risks: [of.update(x=of["0.1"]) for of in risks]), "risks must be numb"),
]


@pytest.mark.parametrize(("change", "words"), FOREIGN, ids=[words for _, words in FOREIGN])
def test_a_foreign_site_file_is_one_line(inside, model, change, words, capsys, monkeypatch):
    """With checksums as they should be. Sizes are refused before anything is read."""
    tensors = {name: tensor.clone() for name, tensor in load_file(model / SITE).items()}
    change(tensors)
    write_checked(model / SITE, tensors, {})
    document = config_of(model)
    write_config(model, document | {"site_xxh3": digest_of(tensors)})
    if "shape" in words:
        sizes = directory.refuse_other_sizes

        def refuse(path, wanted):
            monkeypatch.setattr(directory, "read_checked", None if path.name == SITE else directory.read_checked)
            sizes(path, wanted)

        monkeypatch.setattr(directory, "refuse_other_sizes", refuse)
    status, out, err = answer(capsys, model, "data/PACS/photo")
    assert status == 2 and not out and words in err and err.count("\n") == 1 and "export the model again" in err, err


def test_models_that_can_not_be_assessed(inside):
    config = read_config(inside.model)[0]
    encoder = config.encoder.model_copy(update={"trained": True})
    for update, words in [
        ({"encoder": encoder}, "its encoder was trained"),
        ({"members": (0, 1)}, "an ensemble"),
        ({"wise_ft": 0.5}, "WiSE-FT"),
        ({"site_xxh3": None}, "export it again"),
    ]:
        with pytest.raises(UserError, match=words):
            read_stored(inside.model, config.model_copy(update=update))


def test_a_model_picked_by_test_labels_gets_no_number(inside):
    model = load("model")
    assert model.config.expected is not None
    oracle = model.config.expected.model_copy(update={"selection": "oracle"})
    model.config = model.config.model_copy(update={"expected": oracle})
    found = assess(model, "model", ["data/PACS/photo"], None, None, None)
    assert found.estimate is None and "oracle" in found.refused


# the words


BOUGHT = Bought(budget=100, images=25, half_width=0.16, threshold=0.62, gain=0.031)


def found(metric="accuracy", **changes):
    at = AtDomain(accuracy=0.8, images=100, parts=(0.7, 0.8, 0.9), error=0.0, distance=3.0, risks={})
    plain = Assessment(
        model="m", estimate=0.7, low=0.6, high=0.8, estimate_all=0.7, unknown_share=None, verdict="unknown",
        heads="linear ERM", card=0.8, parts=None, past_errors={}, domains={"a": at}, refused=None, warnings=(),
        prevalence=None, images=60, groups=None, copies=0, training_images=0, unreadable={}, distance=2.0, is_far=False,
        budgets=(BOUGHT,), risks={},
    )  # fmt: skip
    return "\n".join(lines(replace(plain, **changes), metric))


def test_each_verdict_has_its_words():
    text = found()
    assert "unknown: label images to know" in text
    assert re.search(r"\n100 +25 +±16 points +62% of draws +\+3\.1 points\n", text)
    assert "of draws" not in found(verdict="as_promised") and "of draws" in found(verdict="below")
    assert "for the reference head: linear ERM" in text
    assert "for this site, without labels; the model card has other numbers, those of the run's own models on" in text
    assert "60.0% to 80.0%" in text and "Assumes class shares as in training" in text
    assert "below the card" in found(verdict="below") and "as promised" in found(verdict="as_promised")
    assert "Assumes" not in found(prevalence={"a": 0.5, "b": 0.5})
    assert "farther from the training images than any held-out domain" in found(is_far=True)
    assert "\nWarning: they differ.\n" in found(warnings=("they differ",))
    assert "not of AUROC: without labels no image's class is known" in found("auroc") and "not of" not in text
    assert "not of" not in found("worst_domain_accuracy"), "of one site it is the accuracy"
    in_recall = BOUGHT.model_copy(update={"metric": "balanced_accuracy"})
    assert "gain of adapt in balanced accuracy" in found(budgets=(in_recall,)) and "gain of adapt in accuracy" in text
    assert "No expected accuracy: because" in found(estimate=None, low=None, high=None, refused="because")


def test_the_worst_threshold_and_its_record(inside):
    stored = read_stored(inside.model, read_config(inside.model)[0])

    def at(threshold, risk):
        risks = {"0.1": RiskAt(threshold=threshold, tried=0.5, risk=risk, answered=0.5)}
        return AtDomain(accuracy=0.8, images=9, parts=None, error=None, distance=1.0, risks=risks)

    def worst(**domains):
        about = stored.about.model_copy(update={"domains": domains})
        return worst_thresholds(replace(stored, about=about))["0.1"]

    assert worst(a=at(0.4, 0.2), b=at(0.7, None), c=at(0.5, 0.1)) == WorstThreshold("b", 0.7, 1, 2)
    assert worst(a=at(0.4, 0.2), b=at(None, 0.3), c=at(0.5, 0.1)) == WorstThreshold("b", None, 2, 3)
    empty = stored.about.model_copy(update={"domains": {}})
    assert worst_thresholds(replace(stored, about=empty)) == {}
