"""Heads on parts of the training images, what a part costs, twin domains and label errors."""

import numpy as np
import pytest
import torch

from tests.audit.studies import RECIPE, clusters, study
from xdm_ft.audit import measure
from xdm_ft.audit.costs import Change, cost_metric, costs
from xdm_ft.audit.heads import HeadRequest, Study
from xdm_ft.audit.labels import find_confusions, label_costs, label_scores
from xdm_ft.audit.twins import _cells, domain_pairs, units_of
from xdm_ft.protocol.splits import SELECTION_SPLIT
from xdm_ft.runtime.errors import UserError


def test_heads_do_not_see_the_images_that_are_left_out_and_are_those_of_a_run_without_them():
    z, labels, domains = clusters()
    whole = study(z, labels, domains)
    seed, split = whole.heads[0]
    rows = torch.cat([*split.train]).numpy()[::7]
    other = z.copy()
    other[rows] = 1e6  # a head that saw one of these would be another head
    changed = whole.without(split, rows)
    assert not np.isin(torch.cat([*changed.train]).numpy(), rows).any()
    assert sum(map(len, changed.train)) + len(rows) == sum(map(len, split.train))
    test = split.evaluation["test"]
    answers = [
        dict(of.answers([HeadRequest(changed, test, seed)], "a test"))[0]
        for of in (whole, study(other, labels, domains))
    ]
    torch.testing.assert_close(answers[0], answers[1])


def test_equal_heads_are_trained_once_and_answer_for_their_own_images():
    z, labels, domains = clusters(images=10)
    whole = study(z, labels, domains)
    (seed, first), (_, second) = whole.heads[0], whole.heads[3]
    both = [whole.without(first, np.flatnonzero(domains == 1)), whole.without(second, np.flatnonzero(domains == 0))]
    assert [split.test_domains for split in both] == [("d0",), ("d1",)]
    wanted = [
        HeadRequest(both[0], first.evaluation["test"], seed),
        HeadRequest(both[1], second.evaluation["test"], seed),
    ]
    answers = dict(whole.answers(wanted, "a test"))
    alone = dict(whole.answers(wanted[1:], "a test"))
    torch.testing.assert_close(answers[1], alone[0])
    assert len(answers[0]) == len(answers[1]) == 30


def test_the_time_of_an_audit_counts_the_heads_of_labels_pairs_and_changes(monkeypatch):
    counted, measured = [], study(*clusters(images=10), seeds=2)
    monkeypatch.setattr(measure, "heads_time", lambda plan, encoder, device, groups: counted.extend(groups))
    measure._time(measured, units=4)
    assert [(len(models), models[0].steps, times) for models, times in counted] == [(10, 100, 1), (2 * 4 * 13, 40, 1)]


def test_a_domain_that_loses_all_images_trains_no_more_and_one_class_is_too_few():
    z, labels, domains = clusters(images=10, classes=2)
    whole = study(z, labels, domains)
    split = whole.heads[0][1]
    assert whole.without(split, np.flatnonzero(domains == 1)).train_domains == ("d2", "d3")
    assert whole.without(split, np.flatnonzero(labels == 1)) is None


def test_a_head_that_fails_is_one_line():
    z, labels, domains = clusters(images=10)
    z[5] = np.nan
    broken = study(z, labels, domains)
    with pytest.raises(UserError, match="the head has failed"):
        broken.predictions(
            [HeadRequest(split, split.evaluation["test"], seed) for seed, split in broken.heads], "a test"
        )


def test_what_a_change_costs_is_the_difference_of_accuracies():
    """Left out: a domain whose labels are wrong. The others are better without it."""
    z, labels, domains = clusters(images=60, spread=2.0)
    labels = np.where(domains == 3, (labels + 1) % 3, labels)
    wrong = study(z, labels, domains, seeds=5)
    sets = {("d0",), ("d1",), ("d2",)}
    left_out = dict.fromkeys(sets, np.flatnonzero(domains == 3))
    better, nothing, missing = costs(
        wrong,
        [
            Change("left out of training", 180, left_out),
            Change("left out of training", 0, dict.fromkeys(sets, np.empty(0, np.int64))),
            Change("left out of training", 0, {}),
        ],
    )
    assert better.difference == pytest.approx(better.after - better.before)
    assert better.excess == pytest.approx(better.after - better.matched) and better.excess > 0.1
    assert better.verdict == "better on these domains"
    assert better.interval.low < better.excess < better.interval.high
    assert better.p < better.p_holm <= 1
    assert (nothing.difference, nothing.verdict) == (0, "no clear difference")
    assert (missing.difference, missing.verdict, missing.note) == (None, "no verdict", "nothing changes")


def test_as_many_random_images_of_training_and_validation_are_left_out():
    z, labels, domains = clusters()
    whole = study(z, labels, domains)
    seed, split = whole.heads[0]
    rows, validation = np.flatnonzero(domains == 1), SELECTION_SPLIT["train_val"]
    parts = [
        (torch.cat([*of.train]).numpy(), of.evaluation[validation].numpy())
        for of in (split, whole.without(split, rows), whole.matched(split, rows, [seed]))
    ]
    everything, without, matched = parts
    assert [*map(len, without)] == [*map(len, matched)] != [*map(len, everything)]
    assert all(np.isin(some, every).all() for some, every in zip(matched, everything, strict=True))
    assert (domains[matched[0]] == 1).any()


def test_long_training_is_cut_to_300_steps():
    z, labels, domains = clusters(images=4)
    for text, steps in (("steps: 40", 40), ("steps: 5000", 300), ("epochs: 90", 300)):
        shown = study(z, labels, domains, text=RECIPE.replace("steps: 40", text))
        assert shown.description.startswith(f"linear ERM, {steps} steps"), text


def test_images_of_a_group_of_the_domain_that_is_left_out_do_not_train_either():
    z, labels, domains = clusters(images=20, domains=4)
    groups = np.arange(len(labels))
    of_two, of_three = np.flatnonzero(domains == 2)[::2], np.flatnonzero(domains == 3)[::2]
    groups[of_two] = of_three  # every second image of domain 2 has its patient in domain 3
    patients = study(z, labels, domains, groups)
    seed, split = next((seed, split) for seed, split in patients.heads if split.test_domains == ("d0",))
    [cell] = _cells(patients, split, seed, 0, 3, ("d3",), split.evaluation["test"])
    _, without, matched = cell.heads
    assert without.split.train_domains == ("d1", "d2")
    assert not np.isin(torch.cat([*without.split.train]).numpy(), of_two).any()
    assert sum(map(len, matched.split.train)) == sum(map(len, without.split.train))


# Twin domains


def shares(pairs, units, foreign=0.8, of_all=0.3):
    """Nearest shares, foreign and of all, of which these pairs of units hold many of each other's."""
    nearest, everywhere = np.full((units, units), 0.1), np.full((units, units), 0.05)
    for i, j in pairs:
        nearest[i, j] = nearest[j, i] = foreign
        everywhere[i, j] = of_all
    return nearest, everywhere


def with_twins(strength, seed=0):
    """Domains 0 and 1 share directions of the classes that no other domain has, besides those of all domains."""
    rng = np.random.default_rng(seed)
    labels, domains = np.tile(np.repeat(np.arange(3), 60), 5), np.repeat(np.arange(5), 180)
    common, own = 0.4 * rng.normal(size=(3, 16)), strength * rng.normal(size=(5, 3, 16))
    own[1] = own[0]
    return common[labels] + own[domains, labels] + rng.normal(size=(900, 16)), labels, domains


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_twins_that_help_each_other_are_named(strength):
    twins = study(*with_twins(strength))
    pairs = domain_pairs(twins, units_of(twins), *shares([(0, 1), (2, 3)], 5))
    assert pairs.twins == [["d0", "d1"]]
    assert len(pairs.left_out) == 20  # every ordered pair
    cell = next(row for row in pairs.left_out if (row.domain, row.without) == ("d0", "d1"))
    assert cell.verdict == "worse"
    assert cell.excess == pytest.approx(cell.loss - cell.expected_loss)
    assert cell.interval.low < cell.excess < cell.interval.high
    assert {row.verdict for row in pairs.left_out if {row.domain, row.without} == {"d0", "d4"}} == {"no verdict"}


@pytest.mark.slow
def test_few_nearest_images_of_all_are_no_twins_and_many_without_a_cost_are_undecided():
    twins = study(*with_twins(1.0))
    pairs = domain_pairs(twins, units_of(twins), *shares([(0, 1)], 5, foreign=0.95, of_all=0.17))
    assert (pairs.twins, pairs.undecided) == ([], [])
    pairs = domain_pairs(twins, units_of(twins), *shares([(2, 3)], 5))
    assert (pairs.twins, pairs.undecided) == ([], [["d2", "d3"]]), "no cost shows"
    pairs = domain_pairs(twins, units_of(twins), *shares([(2, 3)], 5, foreign=0.95))
    assert (pairs.twins, pairs.undecided) == ([["d2", "d3"]], []), "by the shares alone"


# Label errors


def planted(share, seed=0, **settings):
    """Clusters of which this share of images has another label; also their rows."""
    z, labels, domains = clusters(images=50, spread=1.2, seed=seed, **settings)
    rng = np.random.default_rng(seed)
    wrong = rng.choice(len(labels), round(share * len(labels)), replace=False)
    labels = labels.copy()
    labels[wrong] = (labels[wrong] + 1) % 3
    return z, labels, domains, wrong


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_wrong_labels_are_ranked_first(share):
    z, labels, domains, wrong = planted(share)
    whole = study(z, labels, domains)
    scores = label_scores(whole)
    first = scores.rows[scores.doubtful[: len(wrong)]]
    assert len(np.intersect1d(first, wrong)) >= 0.8 * len(wrong)
    found = scores.rows[scores.suspects]
    assert len(np.intersect1d(found, wrong)) >= 0.8 * len(found) > 0
    right = np.intersect1d(found, wrong)  # the suggested class is the true one
    at = np.searchsorted(scores.rows, right)
    assert (scores.suggested[at] == (labels[right] - 1) % 3).mean() > 0.9
    label, other, images = find_confusions(whole, scores)[0]
    assert (int(other[1]) + 1) % 3 == int(label[1])
    assert 0 < images <= len(found)


def test_labels_whose_score_rounds_to_minus_one_are_ranked(monkeypatch):
    z, labels, domains = clusters(images=10)
    margins = np.random.default_rng(0).permutation(len(labels)) * 80 / len(labels)

    def answers(self, wanted, what):
        for number, one in enumerate(wanted):
            logits = torch.zeros(len(one.rows), 3)
            logits[torch.arange(len(one.rows)), (labels[one.rows] + 1) % 3] = torch.from_numpy(
                margins[one.rows]
            ).float()
            yield number, logits

    monkeypatch.setattr(Study, "answers", answers)
    found = label_scores(study(z, labels, domains))
    assert (found.score == -1).sum() > 20
    assert np.array_equal(found.rows[found.doubtful], np.argsort(-margins)[:-1]), "the last one has no margin"


def test_relabelling_and_dropping_wrong_labels_helps_and_none_costs_nothing():
    z, labels, domains, _ = planted(0.3)
    whole = study(z, labels, domains)
    dropped, relabelled = label_costs(whole, label_scores(whole))
    assert (dropped.what, relabelled.what) == ("left out of training", "relabelled in training")
    assert dropped.images == relabelled.images > 20
    assert dropped.difference == pytest.approx(dropped.after - dropped.before)
    assert relabelled.difference == pytest.approx(relabelled.after - relabelled.before)
    assert "have seen images of the held-out domain" in relabelled.note and "seen" not in dropped.note
    clean = study(*clusters(spread=0.1))
    scores = label_scores(clean)
    assert len(scores.suspects) == 0
    assert label_costs(clean, scores) == []
    assert find_confusions(clean, scores) == []


def test_a_rare_class_is_not_an_error():
    """Heads without weights doubt the rare class alone, and accuracy pays for it: with the run's weights and metric
    neither class is in doubt more than the other, and costs are balanced accuracies."""
    rng, of_class = np.random.default_rng(0), np.repeat([0, 1], [120, 30])
    labels, domains = np.tile(of_class, 4), np.repeat(np.arange(4), 150)
    z = rng.normal(size=(600, 24)) + 0.8 * labels[:, None] * np.eye(24)[0]
    rare = dict[str, float]()
    for weights in ("none", "balanced"):
        text = RECIPE.replace("seeds: 3", "seeds: 3, metric: balanced_accuracy").replace("steps: 40", "steps: 200")
        weighted = study(z, labels, domains, text=text.replace("lr: 0.02", f"lr: 0.02, class_weights: {weights}"))
        scores = label_scores(weighted)
        rare[weights] = float(labels[scores.rows[scores.suspects]].mean())
    assert rare["none"] > 0.9 and rare["balanced"] < 0.6
    dropped, relabelled = label_costs(weighted, scores)
    assert dropped.metric == relabelled.metric == "balanced_accuracy"
    assert {dropped.verdict, relabelled.verdict} == {"no clear difference"} and dropped.before < 0.75
    one_class = [torch.tensor([0, 1]), torch.tensor([0, 120])]
    assert [cost_metric(weighted, [rows]) for rows in one_class] == ["accuracy", "balanced_accuracy"]


def test_labels_of_one_class_or_of_few_groups_are_not_judged():
    z, labels, domains = clusters(images=20)
    assert label_scores(study(z, labels, domains, groups=np.arange(len(labels)) % 4)) is None
    assert label_scores(study(z, np.zeros_like(labels), domains)) is None


def test_a_class_of_one_image_is_not_doubted():
    z, labels, domains = clusters(images=20)
    labels[0] = 3
    scores = label_scores(study(z, labels, domains))
    assert scores.score[0] == 0
    assert 0 not in scores.doubtful
