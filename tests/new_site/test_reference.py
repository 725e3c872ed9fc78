"""The heads that an export trains to measure a model at new sites."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xdm_ft.cli.export import export_model
from xdm_ft.evaluation.expected_site import agreement
from xdm_ft.evaluation.few_labels import fewest_answered
from xdm_ft.experiment.plan import read_data
from xdm_ft.export.choose import Choice, read_parts
from xdm_ft.export.directory import SITE, read_config
from xdm_ft.export.predictor import load
from xdm_ft.features.cache import Features, standard
from xdm_ft.new_site import reference
from xdm_ft.new_site.reference import atc_threshold, budgets_of, pairs_of, risk_at, site_of
from xdm_ft.new_site.stored import Heads, read_stored, without_site
from xdm_ft.protocol.splits import splits
from xdm_ft.recipe.check import load as load_recipe
from xdm_ft.results.run import read_run
from xdm_ft.runtime.errors import UserError
from xdm_ft.training.bank.train import train_chunk

DOMAINS = ("art_painting", "cartoon", "sketch")


@pytest.fixture(scope="module")
def stored(made):
    return read_stored(made.model, read_config(made.model)[0])


def site(method):
    run = read_run(Path("output/small"))
    return site_of(run, read_parts(run, Choice(method, ("photo",))).config)


def test_numbers_of_the_validation_part_follow_from_the_stored_heads(inside, stored):
    recipe = load_recipe("small.yaml", [])
    dataset = read_data(recipe)
    split = next(s for s in splits(dataset, recipe.protocol, 0) if s.test_domains == ("photo",))
    rows = split.evaluation["train_val"].numpy()
    labels = dataset.labels[rows]
    model = load("model")
    z = torch.from_numpy(model.encode([dataset.image(row) for row in rows]))
    p, predicted = stored.seen(z)
    assert stored.about.images == len(rows) and tuple(stored.about.domains) == DOMAINS
    assert (predicted == labels).mean(1) == pytest.approx(stored.accuracies)
    assert agreement(predicted) == pytest.approx(stored.agreements)
    assert p.max(1).mean() - stored.accuracies[-1] == pytest.approx(stored.about.offset, abs=1e-4)
    training = torch.cat(split.train).numpy()
    z = model.encode([dataset.image(row) for row in training])
    assert stored.heads.mean.numpy() == pytest.approx(z.mean(0), abs=1e-4)
    assert stored.heads.deviation.numpy() == pytest.approx(z.std(0), rel=1e-3)
    of_class = z[dataset.labels[training] == 2].mean(0)
    assert stored.class_means[2].numpy() == pytest.approx(of_class, abs=1e-4)
    every = np.concatenate([training, rows])
    assert stored.shares == pytest.approx(np.bincount(dataset.labels[every]) / len(every))
    for of in stored.about.domains.values():
        assert of.error == pytest.approx(sorted(of.parts)[1] - of.accuracy) and of.images == 56


@pytest.mark.slow
def test_the_time_counts_what_is_trained(inside, monkeypatch):
    """Three domains: a reference head for all, each one and each pair less, a bank but for pairs; each class less."""
    counted, trained = [], Counter()

    def heads_time(plan, encoder, device, groups):
        counted.extend((len(models), times) for models, times in groups)
        return "about 40 s"

    def train(jobs, *rest, **options):
        trained[len(jobs)] += 1
        return train_chunk(jobs, *rest, **options)

    monkeypatch.setattr(reference, "heads_time", heads_time)
    monkeypatch.setattr(reference, "train_chunk", train)
    site("erm")
    assert counted == [(1, 7), (4, 4), (1, 21)] and trained == {1: 7, 4: 4, 7: 3}, "21 heads in 3 chunks"


@pytest.mark.slow
def test_labels_of_a_domain_do_not_change_what_is_estimated_there(inside, monkeypatch, stored):
    def with_other_labels(recipe):
        dataset = read_data(recipe)
        of_domain = dataset.domains == dataset.domain_names.index("cartoon")
        dataset.labels[of_domain] = (dataset.labels[of_domain] + 1) % 7
        return dataset

    before = site("erm")
    monkeypatch.setattr(reference, "read_data", with_other_labels)
    after = site("erm")
    first, second = before.about.domains["cartoon"], after.about.domains["cartoon"]
    assert first.parts == second.parts and first.distance == second.distance
    assert first.accuracy != second.accuracy
    assert before.about.domains["sketch"].parts != after.about.domains["sketch"].parts
    assert torch.equal(before.heads.weights, stored.heads.weights)  # it depends on no earlier one


@pytest.mark.parametrize(
    "method, own",
    [
        ("xdomainmix", True),
        ("knn", False),
        pytest.param("cosine", False, marks=pytest.mark.soak),
        pytest.param("unit", True, marks=pytest.mark.soak),
    ],
)
@pytest.mark.slow
def test_what_takes_the_place_of_other_heads(inside, method, own):
    found = site(method)
    assert ("as the model" in found.about.heads) == own
    assert found.accuracies[-1] > 0.2 and len(found.past_errors) == 3  # the classes have other brightness
    width = len(found.heads.mean)
    assert found.heads.weights.shape == (17, 7, width + 1)
    if method == "unit":
        assert float(((found.heads.mean**2) + found.heads.deviation**2).sum()) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_a_domain_without_which_too_few_images_are_left_has_no_past_error(inside, monkeypatch, caplog):
    without = reference._Study._without

    def refusing(study, names, *label):
        if "cartoon" in names:
            raise UserError("too few images")
        return without(study, names, *label)

    monkeypatch.setattr(reference._Study, "_without", refusing)
    found = site("erm")
    assert tuple(found.past_errors) == ("art_painting", "sketch") and "some are left out: too few" in caplog.text
    assert found.heads.weights.isfinite().all()


@pytest.mark.slow
def test_a_file_that_would_be_large_holds_fewer_snapshots(inside, monkeypatch):
    width = 7 * (load("model").config.encoder.width + 1) * 2
    monkeypatch.setattr(reference, "MAX_BYTES", width * 9)
    found = site("erm")
    assert len(found.heads.weights) == 9 and len(found.agreements) == 9 * 8 // 2
    monkeypatch.setattr(reference, "MAX_BYTES", width * 4)
    with pytest.raises(UserError, match="too large to be stored"):
        site("erm")


def test_export_says_why_there_is_no_file(inside, tmp_path, caplog, monkeypatch):
    export_model("output/small", str(tmp_path / "plain"), Choice("erm", ("photo",)), no_site=True)
    assert not (tmp_path / "plain" / SITE).exists() and "assess" not in caplog.text
    shutil.copytree("output", tmp_path / "output")
    monkeypatch.chdir(tmp_path)  # without the data: other tests read them meanwhile
    export_model("output/small", str(tmp_path / "model"), Choice("erm", ("photo",)))
    assert not (tmp_path / "model" / SITE).exists()
    assert any("`assess` and `adapt` will not work with this model" in message for message in caplog.messages)
    assert json.loads((tmp_path / "model/config.json").read_text())["site_xxh3"] is None


# the parts


@given(st.integers(3, 90), st.integers(0, 5))
def test_every_domain_is_left_out_in_about_as_many_pairs(domains, seed):
    pairs = pairs_of(domains, seed)
    counts = Counter(number for pair in pairs for number in pair)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) and all(a != b for a, b in pairs)
    assert set(counts) == set(range(domains)) and max(counts.values()) - min(counts.values()) <= 2
    assert len(pairs) == (domains * (domains - 1) // 2 if domains <= 12 else max(66, domains))


def test_standard_values_are_those_of_numpy():
    z = torch.randn(300, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2, 3, 0, 1]) + 1000
    mean, deviation = standard(Features([z.float()]), torch.arange(100, 300))
    part = z[100:].double().numpy()
    assert mean.numpy() == pytest.approx(part.mean(0), rel=1e-6)
    assert deviation[:3].numpy() == pytest.approx(part.std(0)[:3], rel=1e-4) and deviation[3] == 1


def test_standardized_features_share_what_is_cached():
    z = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    mean, deviation = torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 2, 4])
    features = Features([z])
    rows = torch.tensor([[3, 4], [3, 0]])
    assert torch.allclose(features.standardized(mean, deviation)[rows], (z[rows] - mean) / deviation)
    assert torch.equal(features[rows], z[rows])
    unit = features.normalized().standardized(mean, deviation)[rows]
    assert torch.allclose(unit, (torch.nn.functional.normalize(z[rows], dim=-1) - mean) / deviation, atol=1e-6)


def test_logits_of_heads():
    weights, z, mean, deviation = torch.randn(3, 4, 6), torch.randn(7, 5), torch.randn(5), torch.rand(5) + 0.5
    by_hand = torch.stack([(z - mean) / deviation @ head[:, :5].T + head[:, 5] for head in weights])
    assert torch.allclose(Heads(weights, mean, deviation).logits(z), by_hand, atol=1e-5)


def test_the_worst_threshold_of_the_others():
    n = fewest_answered(0.2) + 10
    sure = np.linspace(0.9, 1, n), np.ones(n, bool)
    unsure = np.concatenate([np.linspace(0.1, 0.49, n), np.linspace(0.5, 1, n)]), np.arange(2 * n) >= n
    hopeless = np.linspace(0, 1, n), np.zeros(n, bool)
    at = risk_at(0.2, "sure", {"sure": sure, "unsure": unsure})
    assert at.threshold == pytest.approx(0.9) and 0.3 < at.tried <= 0.5
    assert (at.risk, at.answered) == (0, 1)
    at = risk_at(0.2, "unsure", {"sure": sure, "unsure": unsure})
    assert at.tried == pytest.approx(0.9) and at.risk == 0 and at.answered == pytest.approx(np.mean(unsure[0] >= 0.9))
    at = risk_at(0.2, "sure", {"sure": sure, "hopeless": hopeless})
    assert (at.tried, at.risk, at.answered) == (None, None, 0) and at.threshold is not None
    assert risk_at(0.2, "hopeless", {"sure": sure, "hopeless": hopeless}).threshold is None


def test_no_threshold_without_held_out_images():
    assert atc_threshold([]) is None
    assert atc_threshold([(np.array([0.2, 0.9]), np.array([False, True]))]) == 0.9
    assert atc_threshold([(np.array([0.2, 0.9]), np.array([False, False]))]) is None
    assert math.isclose(atc_threshold([(np.array([0.2, 0.9]), np.array([True, True]))]), 0.2)


def test_a_budget_buys_what_draws_of_the_held_out_domains_show():
    """At one domain all answers are right and sure, at the other half of them."""
    confidence = np.linspace(0.5, 1, 400)
    seen = [(confidence, np.ones(400, bool)), (confidence, np.arange(400) % 2 == 0)]
    rows = budgets_of(seen, {50: 0.02, 100: 0.04, 200: 0.06})
    assert [(of.budget, of.images) for of in rows] == [(100, 25), (200, 50), (400, 100), (800, 200)]
    assert all(of.threshold == 0.5 for of in rows), "25 sure answers show it"
    assert [of.gain for of in rows[2:]] == [None, None], "of 300 labels the curve says nothing"
    assert rows[0].gain == pytest.approx(0.02 + 0.02 * math.log2(1.5)) and rows[1].gain == pytest.approx(
        0.04 + 0.02 * math.log2(1.5)
    )
    # Clopper and Pearson's of 25 right answers of 25 is 1 − 0.025^(1/25) wide, of 12 of 25 about 41 points
    assert rows[0].half_width == pytest.approx((0.0686 + 0.204) / 2, abs=0.005)
    assert {of.metric for of in budgets_of(seen, {50: 0.02}, "balanced_accuracy")} == {"balanced_accuracy"}
    assert budgets_of([], {}) == () and budgets_of(seen, {})[0].gain is None


@pytest.mark.parametrize("interpolated", [False, True])
def test_a_mean_of_weights_has_no_site_file_and_mixup_is_none(interpolated):
    """Both have an `alpha`."""
    parts = {"adapted": None, "members": [], "wise_ft": None, "prompts": ["a {}"], "interpolated": interpolated}
    config = SimpleNamespace(encoder=SimpleNamespace(trained=False), method={"hparams": {"alpha": 0.2}}, **parts)
    assert bool(without_site(config)) == interpolated
