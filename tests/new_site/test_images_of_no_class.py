"""Images of no class: what the export finds out, and what `assess`, `predict` and `label` do with it."""

import csv
import json

import numpy as np
import pytest
import torch
from small_models import config_of, write_config
from test_reference import DOMAINS, site

from xdm_ft.cli.parser import main
from xdm_ft.evaluation.expected_site import energy, unknown_of
from xdm_ft.evaluation.few_labels import choose_images
from xdm_ft.export.card import card
from xdm_ft.export.directory import read_config
from xdm_ft.export.predictor import load
from xdm_ft.new_site import reference
from xdm_ft.new_site.stored import read_stored

SITE = "data/PACS/photo"


def rates(f, t, auroc=0.9):
    return {name: {"auroc": auroc, "false_alarms": f, "detections": t} for name in "ab"}


@pytest.fixture
def given(inside, model, capsys):
    """`given(threshold, rates)`: the model with these in config.json; None: nothing is known."""

    def change(threshold=0.0, domains=None):
        unknown = {"threshold": threshold, "domains": domains} if domains else None
        write_config(model, config_of(model) | {"unknown": unknown})
        return model

    return change


@pytest.fixture
def energies(inside, model):
    """Of the site's images, by the last head of the bank, in the order of their paths."""
    stored = read_stored(model, read_config(model)[0])
    z = torch.from_numpy(load(model).encode(sorted(inside.site.glob("*/*"))))
    return energy(stored.heads.logits(z)[-2].double().numpy())


def cut_above(energies, images):
    """A threshold that so many images lie above, no one near it."""
    return float(np.sort(energies)[-images - 1 : len(energies) - images + 1].mean())


def run(capsys, *argv):
    status = main([*map(str, argv)])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@pytest.mark.slow
def test_no_head_saw_the_class_or_the_domain_that_it_is_measured_on(inside, monkeypatch):
    chunks, scores = list[list](), {}
    train = reference.train_chunk

    def train_chunk(jobs, *arguments, **options):
        chunks.append([job.split for job in jobs])
        return train(jobs, *arguments, **options)

    def recorded(of):
        scores.update(of)
        return unknown_of(of)

    monkeypatch.setattr(reference, "train_chunk", train_chunk)
    monkeypatch.setattr(reference, "unknown_of", recorded)
    monkeypatch.setattr(reference, "MAX_LEFT_OUT", 15)
    dataset = []
    read = reference.read_data
    monkeypatch.setattr(reference, "read_data", lambda recipe: dataset.append(read(recipe)) or dataset[-1])
    found = site("erm").unknown
    labels, of = dataset[0].labels, []
    for split in (split for splits in chunks[-3:] for split in splits):
        [missing] = {*range(7)} - {*labels[torch.cat(split.train).numpy()].tolist()}
        [held] = {*DOMAINS} - {*split.train_domains}
        of.append((held, missing))
    assert len({*of}) == len(of) == 15 and tuple(found.domains) == DOMAINS
    assert all(len(known) == 48 and len(out) == 8 for pairs in scores.values() for known, out in pairs)
    assert site_without_classes(monkeypatch) is None


def site_without_classes(monkeypatch):
    monkeypatch.setattr(reference, "FEWEST_CLASSES", 8)
    return site("erm").unknown


def test_the_export_stores_it_and_the_card_says_it(inside, given):
    config = read_config(inside.model)[0]
    assert tuple(config.unknown.domains) == DOMAINS and "`xdm-ft predict --unknown`" in card(config, {})
    of = read_config(given(0.0, rates(0.05, 0.6)))[0]
    assert "--unknown` marks them:" in card(of, {}) and "a 0.90 (5.0%), b 0.90 (5.0%)," in card(of, {})
    assert "--unknown` cannot:" in card(read_config(given(0.0, rates(0.05, 0.6, 0.69)))[0], {})
    assert "--unknown" not in card(read_config(given())[0], {})


def test_assess_leaves_images_of_no_class_out(given, energies, capsys):
    cut = cut_above(energies, 20)
    model = given(cut, rates(0.05, 0.9))
    stored = read_stored(model, read_config(model)[0])
    # the run has too small a site for a number of the images that are left
    found = json.loads(run(capsys, "assess", model, SITE, "--json")[1])
    share = stored.unknown_share(energies > cut, np.ones(56))
    assert found["unknown_share"] == pytest.approx(share._asdict()) and share.low > 0
    assert found["estimate"] is None and "36 images are too few" in found["refused"] and found["images"] == 56
    cut = cut_above(energies, 4)
    found = json.loads(run(capsys, "assess", given(cut, rates(0.0, 0.9)), SITE, "--json")[1])
    assert found["unknown_share"]["low"] > 0 and found["estimate"] is not None
    assert found["estimate"] != found["estimate_all"]
    text = run(capsys, "assess", model, SITE)[1]
    assert "expected, without images of no class" in text and "expected, of all images" in text
    assert "about 8% (2 to 19) of these images belong to no class of the model" in text
    found = json.loads(run(capsys, "assess", given(cut, rates(0.05, 0.9)), SITE, "--json")[1])
    assert found["unknown_share"]["low"] == 0 and found["estimate"] == found["estimate_all"] is not None
    assert "all of them are flagged" in run(capsys, "assess", given(-1e9, rates(0, 0.9)), SITE)[1]


@pytest.mark.parametrize(
    "of, words",
    [(rates(0.05, 0.6, 0.69), "well enough (AUROC 0.69"), (rates(0.3, 0.3), "sites differ too much"), (None, None)],
)
def test_where_it_fails_assess_says_so_and_no_more(given, capsys, of, words):
    found = json.loads(run(capsys, "assess", given(-1e9, of), SITE, "--json")[1])
    assert found["unknown_share"] is None and found["estimate"] == found["estimate_all"] is not None
    assert any(words in warning for warning in found["warnings"]) if words else "no class" not in str(found["warnings"])


def test_predict_has_a_column(given, energies, capsys, tmp_path):
    model = given(float(np.median(energies)), rates(0.05, 0.6))
    out = tmp_path / "out.csv"
    assert run(capsys, "predict", model, SITE, "--unknown", "--out", out)[0] == 0
    with out.open(newline="") as file:
        shown = [row["unknown"] for row in csv.DictReader(file)]
    assert shown == ["true" if of > np.median(energies) else "false" for of in energies]
    for of, more, words in [
        (rates(0.05, 0.6), ("--group-by", "(photo)"), "is for single images"),
        (rates(0.05, 0.6, 0.69), (), "AUROC 0.69"),
        (None, (), "cannot tell images of no class"),
    ]:
        status, shown, err = run(capsys, "predict", given(0.0, of), SITE, "--unknown", *more)
        assert status == 2 and not shown and words in err and err.count("\n") == 1, err
    status, _, err = run(capsys, "predict", "output/small", SITE, "--held-out", "photo", "--unknown")
    assert status == 2 and "is a run directory" in err


def test_label_takes_few_of_them_and_the_random_part_stays(given, energies, capsys, tmp_path):
    def rows(of, name):
        status, text, err = run(capsys, "label", of, SITE, "--budget", 40, "--out", tmp_path / name)
        assert status == 0, err
        with (tmp_path / name).open(newline="") as file:
            return text, list(csv.DictReader(file))

    cut = cut_above(energies, 20)
    flagged = {path: of > cut for path, of in zip(paths(), energies, strict=True)}
    text, chosen = rows(given(cut, rates(0.05, 0.9)), "with.csv")
    _, plain = rows(given(), "without.csv")
    parts = [[row["path"] for row in of if row["for"] == "evaluate"] for of in (chosen, plain)]
    assert parts[0] == parts[1] and len(parts[0]) == 10
    adapt = [row["path"] for row in chosen if row["for"] == "adapt"]
    assert sum(flagged[path.split("photo/")[1]] for path in adapt) == 3
    assert "3 images to adapt it may belong to no class: leave their label empty if so" in text


def paths():
    return sorted(f"{name}/{number:03}.png" for name in NAMES for number in range(8))


NAMES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


@pytest.mark.parametrize("grouped", [False, True])
def test_a_tenth_of_those_to_adapt(grouped):
    rng = np.random.default_rng(0)
    z, p, unknown = rng.normal(size=(400, 8)), rng.dirichlet(np.ones(3), 400), np.arange(400) % 2 == 0
    groups = np.arange(400) // 4 if grouped else None
    evaluate, adapt = choose_images(z, p, 100, np.random.default_rng(1), groups, unknown=unknown)
    assert unknown[adapt].sum() == (100 - len(evaluate)) // 10 and len({*adapt}) == len(adapt) == 100 - len(evaluate)
    assert np.array_equal(evaluate, choose_images(z, p, 100, np.random.default_rng(1), groups).evaluate)
    assert not unknown[evaluate].all() and unknown[evaluate].any()
    assert not unknown[choose_images(z, p, 8, np.random.default_rng(1), groups, unknown=unknown).adapt].any()
