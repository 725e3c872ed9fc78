"""What a model promises: numbers computed by hand and by naive loops, and the coverage of its prediction interval."""

import dataclasses
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from scipy.stats import t

from xdm_ft.evaluation.intervals import (
    NewSite,
    gain_words,
    interval_of,
    new_site,
    one_more_domain,
    rank_words,
    smoothed,
)
from xdm_ft.evaluation.metrics import score
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction, arrays_of
from xdm_ft.evaluation.records import ModelKey, Pick, Record, Runs
from xdm_ft.export.choose import Choice, read_parts
from xdm_ft.export.config import Expected
from xdm_ft.export.expected import error_at
from xdm_ft.export.expected import expected_performance as promise
from xdm_ft.report.finished import read_run
from xdm_ft.storage.names import images_file
from xdm_ft.storage.run_directory import RunDirectory

CLASSES, DOMAINS, SEEDS, IMAGES = ("cat", "dog", "ox"), ("a", "b", "c", "d"), (0, 1, 2), 24
METHOD, RULE = "erm", "train_val"


def made_run(path, held_out, *, groups=True, metric="accuracy", protocol="leave_one_domain_out", temperature=2.0):
    """A run directory with predictions of random models: (results, records, {(held-out set, seed): logits}, images)."""
    drawn, directory = np.random.default_rng(1), RunDirectory(path)
    records, logits_of, images_of = [], {}, {}
    for held in held_out:
        domains = np.repeat([DOMAINS.index(name) for name in held], IMAGES)
        labels = drawn.integers(0, 3, len(domains))
        images = {"rows": np.arange(len(domains)), "labels": labels.astype(np.int32)}
        images |= {"worst_of": domains.astype(np.int32), "names": np.zeros(1, np.uint8)}
        if groups:
            images["groups"] = (np.arange(len(domains)) // 3).astype(np.int32)
        directory.write_arrays(images_file(held), images, {})
        images_of[held] = labels, domains
        for seed in SEEDS:
            logits = torch.from_numpy(drawn.normal(size=(len(labels), 3)) + 1.5 * np.eye(3)[labels]).float()
            logits_of[held, seed] = logits
            found = score(logits, torch.from_numpy(labels), torch.from_numpy(domains), CLASSES, DOMAINS)
            pick = Pick(1, "x", {"test": found}, value=0.5, temperature=temperature)
            record = Record(ModelKey(METHOD, held, seed, 0), {}, "ok", selected={RULE: pick})
            records.append(record)
            probabilities = logits.double().softmax(-1).float().numpy()
            tested = HeldOutImages(images["rows"], labels, domains)
            one = Prediction(METHOD, held, seed, RULE, tested, probabilities.argmax(1), None, probabilities)
            directory.write_predictions(record.folder, arrays_of([one]))
    recipe = {"protocol": {"name": protocol, "metric": metric}, "data": {"name": "folder"}}
    results = {"recipe": recipe, "runs": [{"test_domains": list(held)} for held in held_out]}
    return results, records, logits_of, images_of


@pytest.fixture
def four(tmp_path):
    held_out = [(name,) for name in DOMAINS]
    results, records, logits, images = made_run(tmp_path, held_out)
    expected = promise(tmp_path, results, records, RULE, METHOD)
    right = {key: (logits[key].argmax(1).numpy() == images[key[0]][0]) for key in logits}
    return SimpleNamespace(path=tmp_path, results=results, records=records, logits=logits, images=images,
                           expected=expected, right=right)  # fmt: skip


def test_means_are_over_seeds_after_the_domains_of_a_seed(four):
    by_seed = [np.mean([four.right[(name,), seed].mean() for name in DOMAINS]) for seed in SEEDS]
    expected = four.expected
    assert expected.mean == pytest.approx(np.mean(by_seed)) and expected.seeds == 3
    assert expected.std == pytest.approx(np.std(by_seed, ddof=1))
    assert expected.stderr == pytest.approx(np.std(by_seed, ddof=1) / 3**0.5)
    assert (expected.source, expected.data, expected.selection) == ("leave one domain out", "folder", RULE)
    means = [np.mean([four.right[(name,), seed].mean() for seed in SEEDS]) for name in DOMAINS]
    assert [one.value for one in expected.held_out] == pytest.approx(means)
    assert expected.worst == (DOMAINS[int(np.argmin(means))], pytest.approx(min(means)))
    nll = np.mean([one.selected[RULE].metrics["test"].nll for one in four.records])
    assert expected.others["nll"] == pytest.approx(nll)
    assert "accuracy" not in expected.others and "worst_domain_accuracy" not in expected.others
    assert not expected.notes


def test_the_interval_of_a_domain_adds_the_variances_over_groups_and_seeds(four):
    for one in four.expected.held_out:
        right = np.array([four.right[one.domains, seed] for seed in SEEDS])  # [S,n]
        groups, without = IMAGES // 3, []
        for group in range(groups):
            kept = [i for i in range(IMAGES) if i // 3 != group]
            without.append(right[:, kept].mean())
        of_groups = (groups - 1) / groups * np.square(np.array(without) - np.mean(without)).sum()
        of_seeds = right.mean(1).var(ddof=1) / 3
        freedom = (of_groups + of_seeds) ** 2 / (of_groups**2 / (groups - 1) + of_seeds**2 / 2)
        half = t.ppf(0.975, freedom) * (of_groups + of_seeds) ** 0.5
        ends = max(0, one.value - half), min(1, one.value + half)
        assert one.interval == pytest.approx(ends) and (one.images, one.groups) == (IMAGES, groups)


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("spread", [0.0, 0.02, 0.1])
def test_the_interval_of_a_domain_covers_in_nearly_95_percent(seeds, spread):
    """The truth is 0.8; a seed's models are better or worse by `spread`, and 40 images are drawn for all seeds."""
    rng, covered, tables = np.random.default_rng(seeds), 0, 400
    images = HeldOutImages(np.arange(40), np.ones(40, int), np.zeros(40, int))
    for _ in range(tables):
        difficulty = rng.random(40)
        right = [difficulty < 0.8 + shift for shift in rng.normal(0, spread, seeds)]
        predictions = [Prediction("m", (), seed, RULE, images, one.astype(int)) for seed, one in enumerate(right)]
        estimate = error_at("accuracy", np.mean(right, axis=1), predictions, 40)
        low, high = interval_of("accuracy", estimate, 40)
        covered += low <= 0.8 <= high
    assert covered / tables > 0.88  # 40 images: such intervals of a share cover somewhat less than 95%


def test_the_interval_of_a_new_site_by_hand(four):
    right = np.array([[four.right[(name,), seed].sum() for seed in SEEDS] for name in DOMAINS])  # [D,S]
    values = np.log((right + 0.5) / (IMAGES - right + 0.5))  # logit of (x + ½)/(n + 1)
    between, within = values.mean(1).var(ddof=1), values.var(1, ddof=1).mean()
    spread = math.sqrt(between * (1 + 1 / 4) + (1 - 1 / 3) * within)
    assert four.expected.spread == pytest.approx(spread) and four.expected.freedom == 3
    assert four.expected.center == pytest.approx(values.mean()) and four.expected.scale == "logit"
    for level, t_3 in ((0.8, 1.637744), (0.95, 3.182446)):  # t with 3 degrees of freedom
        ends = [1 / (1 + math.exp(-values.mean() + side * t_3 * spread)) for side in (1, -1)]
        assert four.expected.at_new_site.between("accuracy", level) == pytest.approx(ends, abs=1e-6)
    assert four.expected.new_site == pytest.approx(ends, abs=1e-6)


def test_other_metrics_stay_on_the_plain_scale(tmp_path):
    results, records, *_ = made_run(tmp_path, [(name,) for name in DOMAINS], metric="balanced_accuracy")
    expected = promise(tmp_path, results, records, RULE, METHOD)
    tests = [one.selected[RULE].metrics["test"] for one in records]
    values = np.array([one.balanced_accuracy for one in tests]).reshape(4, 3)  # [D,S]
    spread = math.sqrt(values.mean(1).var(ddof=1) * (1 + 1 / 4) + (1 - 1 / 3) * values.var(1, ddof=1).mean())
    assert (expected.scale, expected.center) == ("plain", pytest.approx(values.mean()))
    ends = max(0, values.mean() - 3.182446 * spread), min(1, values.mean() + 3.182446 * spread)
    assert expected.new_site == pytest.approx(ends)


def test_one_seed_gives_students_prediction_interval():
    site = new_site([np.array([value]) for value in (0.6, 0.7, 0.8, 0.9)])
    half = t.ppf(0.975, 3) * np.std([0.6, 0.7, 0.8, 0.9], ddof=1) * 1.25**0.5
    assert site.between("nll") == pytest.approx((0.75 - half, 0.75 + half))
    assert site.between("accuracy") == pytest.approx((0.75 - half, 1))
    assert new_site([np.array([0.6]), np.array([0.8])]) is None


def test_calibrated_values_divide_the_logits_by_the_fitted_temperature(four):
    nll, ece = [], []
    for (held, _), logits in four.logits.items():
        labels = torch.from_numpy(four.images[held][0])
        found = score(logits / 2.0, labels, torch.zeros_like(labels), CLASSES, ("a",))
        nll, ece = [*nll, found.nll], [*ece, found.ece]
    assert four.expected.calibrated == pytest.approx({"nll": np.mean(nll), "ece": np.mean(ece)}, abs=1e-5)


def test_an_official_split_is_one_held_out_set(tmp_path):
    held = ("a", "b", "c")
    results, records, *_ = made_run(tmp_path, [held], protocol="official", temperature=None)
    expected = promise(tmp_path, results, records, RULE, METHOD)
    assert expected.source == "official test" and expected.new_site is None and expected.spread is None
    assert expected.calibrated is None and any("one held-out set" in note for note in expected.notes)
    (one,) = expected.held_out
    assert one.interval is not None and set(one.accuracies) == set(held)
    assert expected.worst == min(one.accuracies.items(), key=lambda pair: pair[1])
    assert "worst_domain_accuracy" in expected.others


def test_two_domains_are_too_few(tmp_path):
    results, records, *_ = made_run(tmp_path, [("a",), ("b",)])
    expected = promise(tmp_path, results, records, RULE, METHOD)
    assert expected.new_site is None and any("too few" in note for note in expected.notes)


def test_unknown_groups_are_named(tmp_path):
    held_out = [(name,) for name in DOMAINS]
    results, records, *_ = made_run(tmp_path, held_out, groups=False)
    expected = promise(tmp_path, results, records, RULE, METHOD)
    assert all(one.groups is None and one.interval for one in expected.held_out)
    (note,) = expected.notes
    assert note.startswith("images assumed independent") and "earlier version" not in note


def test_missing_predictions_leave_the_estimate(four):
    shutil.rmtree(four.path / "models" / METHOD / "b")
    expected = promise(four.path, four.results, four.records, RULE, METHOD)
    assert [one.interval is None for one in expected.held_out] == [False, True, False, False]
    assert expected.new_site == four.expected.new_site and expected.calibrated is None
    assert any("missing or damaged" in note for note in expected.notes)


def test_a_domain_without_a_result_is_named(four):
    records = [one for one in four.records if one.test_domains != ("d",)]
    expected = promise(four.path, four.results, records, RULE, METHOD)
    assert expected.freedom == 2 and "no result with d held out" in expected.notes
    assert promise(four.path, four.results, records, RULE, "coral") is None


def test_it_is_part_of_a_models_config_and_of_results_of_earlier_versions(small_model, tmp_path):
    run = read_run(small_model.run)
    expected = read_parts(run, Choice(held_out=run.records[0].test_domains)).config.expected
    assert Expected.model_validate_json(expected.model_dump_json()) == expected
    (row,) = [row for row in run.rows if row.selection == run.rule]
    assert (expected.mean, expected.std) == (row.mean, row.std)
    copy = shutil.copytree(small_model.run, tmp_path / "run")
    (file,) = (copy / "test_images").glob("*.safetensors")
    images = load_file(file)
    assert "worst_of" in images and "groups" not in images
    del images["worst_of"]
    before = RunDirectory(copy)
    before.write_arrays(str(file.relative_to(copy)), images, {})
    earlier = read_parts(read_run(copy), Choice(held_out=run.records[0].test_domains)).config.expected
    assert any("earlier version" in note for note in earlier.notes) and earlier.held_out == expected.held_out


@pytest.mark.parametrize(("sites", "seeds", "most"), [(0.08, 0.01, 0.96), (0.02, 0.04, 0.99)])
def test_a_new_site_is_in_the_interval_in_95_of_100(sites, seeds, most):
    """Also, and then more often, where seeds vary more than sites. The new site is seen by one model."""
    drawn, inside, tries = np.random.default_rng(0), 0, 4000
    for _ in range(tries):
        domains = 0.7 + sites * drawn.normal(size=5)
        values = domains[:4, None] + seeds * drawn.normal(size=(4, 3))
        low, high = new_site(list(values)).between("nll")
        inside += low <= domains[4] + seeds * drawn.normal() <= high
    assert 0.94 <= inside / tries <= most


@settings(deadline=None)
@given(st.floats(-5, 5), st.floats(0, 3), st.integers(1, 100), st.sampled_from([1, 7, 1000]))
def test_an_interval_on_the_logit_scale_holds_what_the_scale_says(center, spread, freedom, images):
    """Of x right images of n, those whose logit is inside are inside: also 0 and n, which are finite."""
    site = NewSite(center, spread, freedom, "logit")
    low, high = site.between("accuracy", images=images)
    half = t.ppf(0.975, freedom) * spread
    for right in {0, images // 2, images}:
        z = math.log((right + 0.5) / (images - right + 0.5))
        if abs(abs(z - center) - half) > 1e-9:
            assert (low <= right / images <= high) == (abs(z - center) < half)
    shorter, longer = (site.between("accuracy", level) for level in (0.8, 0.95))
    assert 0 <= longer[0] <= shorter[0] <= shorter[1] <= longer[1] <= 1
    assert smoothed(right / images, images) == pytest.approx((right + 0.5) / (images + 1))


@pytest.mark.parametrize(
    ("metric", "values", "words"),
    [
        ("accuracy", [0.416, 0.949, 0.7, 0.6],
         "a new site like these lies below the worst of the 4 held-out ones (0.416) with probability 1 in 5, between "
         "worst and best with 3 in 5"),
        ("nll", [0.5, 0.9],
         "a new site like these lies above the worst of the 2 held-out ones (0.9) with probability 1 in 3, between "
         "worst and best with 1 in 3"),
        ("accuracy", [0.8], "a new site like the held-out one lies below it (0.8) with probability 1 in 2"),
        ("ece", [0.1], "a new site like the held-out one lies above it (0.1) with probability 1 in 2"),
    ],
)  # fmt: skip
def test_the_rank_of_a_new_site_in_words(metric, values, words):
    held_out = [(name,) for name in DOMAINS[: len(values)]]
    assert rank_words(metric, held_out, values, str) == words


def test_an_official_set_of_several_domains_is_one_set_of_sites():
    words = rank_words("accuracy", [("a", "b")], [0.8], str)
    assert words == "a new set of sites like the held-out one lies below it (0.8) with probability 1 in 2"


@pytest.mark.parametrize("sets", [1, 2, 4, 9])
def test_the_probabilities_of_ranks_are_exact_for_exchangeable_sites(sets):
    """Whatever the distribution: here with a heavy tail, and a part that all sites share."""
    drawn, tries = np.random.default_rng(0), 20_000
    sites = drawn.standard_cauchy((tries, sets + 1)) + 10 * drawn.normal(size=(tries, 1))
    new, held_out = sites[:, 0], sites[:, 1:]
    below, between = (new < held_out.min(1)), (new > held_out.min(1)) & (new < held_out.max(1))
    assert below.mean() == pytest.approx(1 / (sets + 1), abs=0.012)
    assert between.mean() == pytest.approx((sets - 1) / (sets + 1), abs=0.012)


def crossed(records, values):
    """The records, as `cross_domain` would have picked them with these selection values."""
    return [
        dataclasses.replace(one, selected={"cross_domain": dataclasses.replace(one.selected[RULE], value=value)})
        for one, value in zip(records, values, strict=True)
    ]


def test_what_one_more_domain_brings(four):
    values = np.linspace(0.3, 0.52, 12)
    records, results = (
        crossed(four.records, values),
        four.results | {"data": {"images": {key: [24] for key in DOMAINS}}},
    )
    by_hand = np.mean([right.mean() for right in four.right.values()]) - 0.41
    expected = promise(four.path, results, records, "cross_domain", METHOD)
    assert expected.one_more_domain == pytest.approx(by_hand)
    assert gain_words("accuracy", 0.051) == "one more training domain brought +5.1 points"
    assert gain_words("nll", -0.05) == "one more training domain brought -0.050 (lower is better)"


def test_without_comparable_images_one_more_domain_is_not_spoken_of(four):
    held_out, records = tuple((name,) for name in DOMAINS), crossed(four.records, [0.4] * 12)

    def gain(records, rule="cross_domain", held_out=held_out, domains=DOMAINS):
        return one_more_domain(Runs(METHOD, rule, "accuracy", held_out, tuple(records)), domains)

    assert gain(records) is not None
    assert four.expected.one_more_domain is None and gain(four.records, RULE) is None, "no models without two domains"
    assert gain(records, domains=(*DOMAINS, "e")) is None, "e was never held out"
    assert gain(records, domains=()) is None, "an earlier version did not write the domains"
    assert gain(records, held_out=(("a", "b"), ("c",), ("d",))) is None
    assert gain(crossed(four.records, [None] + [0.4] * 11)) is None
    without_a_seed = gain(records[1:])  # then that seed does not count
    assert without_a_seed == pytest.approx(
        np.mean([right.mean() for (_, seed), right in four.right.items() if seed]) - 0.4
    )
