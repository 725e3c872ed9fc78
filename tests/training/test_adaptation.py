"""A head that a few labelled images adapt: against a naive loop, its invariances, and when it is kept."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from torch import nn

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.training import adaptation
from xdm_ft.training.adaptation import (
    adapt_head,
    compare_heads,
    correct,
    deciding_metric,
    do_no_harm,
    folds_of,
    ridge_strength,
    sign_flip_p,
)


def site(n=60, width=6, classes=3, shift=0.0, seed=0):
    """The shipped head and its features' statistics, and images of a site whose features are shifted."""
    draw = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(classes, width, generator=draw)
    labels = torch.arange(n) % classes
    z = 5 + centres[labels] + torch.randn(n, width, generator=draw) + shift * torch.tensor([1.0, -1.0, 1, -1, 1, -1])
    weight = centres.clone()
    bias = -0.5 * (centres**2).sum(1) - 5 * centres.sum(1)
    return weight, bias, z, labels, torch.full((width,), 5.0), torch.full((width,), 2.0)


def naive(weight, bias, z, labels, mean, deviation):
    """The same as one linear layer on standardised features, step by step."""
    layer = nn.Linear(len(mean), len(weight))
    with torch.no_grad():
        layer.weight.copy_(weight * deviation)
        layer.bias.copy_(bias + weight @ mean)
    start = [parameter.detach().clone() for parameter in layer.parameters()]
    optimizer, kept = torch.optim.Adam(layer.parameters(), lr=3e-3), []
    for _ in range(80):
        loss = nn.functional.cross_entropy(layer((z - mean) / deviation), labels)
        moved = sum(((now - before) ** 2).sum() for now, before in zip(layer.parameters(), start, strict=True))
        optimizer.zero_grad()
        (loss + ridge_strength(len(z)) / 2 * moved).backward()
        optimizer.step()
        kept.append([parameter.detach().clone() for parameter in layer.parameters()])
    w, b = (torch.stack(values).mean(0) for values in zip(*kept[40:], strict=True))
    return w / deviation, b - (w / deviation) @ mean


def test_it_is_what_a_naive_loop_finds():
    made = site(shift=1.0)
    for ours, theirs in zip(adapt_head(*made), naive(*made), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_strengths_of_the_penalty():
    assert [ridge_strength(n) for n in (1, 10, 50)] == [1, 1, 1]
    assert [ridge_strength(n) for n in (100, 1000)] == pytest.approx([0.1, 0.1])
    assert ridge_strength(71) == pytest.approx(10**-0.5, rel=0.02)  # √(50 · 100) = 70.7


@pytest.mark.parametrize("name, value", [("LR", 0.0), ("ridge_strength", lambda labels: 1e9)])
def test_a_head_that_can_not_move_is_the_shipped_one(monkeypatch, name, value):
    weight, bias, z, labels, mean, deviation = site(10, shift=1.0)
    monkeypatch.setattr(adaptation, name, value)
    a, b = adapt_head(weight, bias, z, labels, mean, deviation)
    assert torch.allclose(z @ a.T + b, z @ weight.T + bias, atol=0.02)  # Adam's first step is 3e-3 at any λ


def test_a_class_without_labels_keeps_its_images():
    """Images of all classes: those of the class without labels are the shipped head's, whatever the others learn."""
    weight, bias, z, labels, mean, deviation = site(90, shift=3.0)
    weight, bias, few = 0.05 * weight, 0.05 * bias, labels != 1
    adapted = adapt_head(weight, bias, z[few], labels[few], mean, deviation)
    assert torch.allclose(adapted[0][1], weight[1], atol=1e-5) and torch.allclose(adapted[1][1], bias[1], atol=1e-3)
    naively = naive(weight, bias, z[few], labels[few], mean, deviation)
    assert not torch.allclose(naively[0][1], weight[1], atol=1e-3)
    kept, lost = (correct(*head, z, labels)[~few].sum() for head in (adapted, naively))
    assert kept >= lost


@pytest.mark.parametrize(
    "before, after, groups, shown",
    [([0, 0, 0, 1], [1, 1, 1, 1], None, (0.125, True)), ([0, 0, 1], [1, 1, 0], None, (0.5, False)),
     ([1, 1], [1, 1], None, (1.0, False)), ([0, 0, 0, 1], [1, 1, 1, 1], [5, 5, 5, 7], (0.5, False)),
     ([0, 1, 0, 0], [1, 0, 1, 1], [0, 0, 1, 2], (0.25, True)),
     ([0, 0, 0, 1, 1], [1, 1, 1, 0, 1], [0, 0, 1, 2, 2], (0.375, False))],
)  # fmt: skip
def test_signs_of_images_and_groups(before, after, groups, shown):
    """By hand: images of 3 of 3 better is ⅛, 2 of 3 ½; groups of sums 3: ½; 0, 1, 1: ¼; 2, 1, −1: 3 of 8 are ≥ 2."""
    pair = (torch.tensor(right, dtype=torch.bool) for right in (before, after))
    of = compare_heads(*pair, torch.arange(len(before)) % 2, groups and np.array(groups))
    assert (of.p, of.kept) == (pytest.approx(shown[0]), shown[1]) and of.metric_after == np.mean(after)


def test_balanced_accuracy_weighs_an_image_by_its_class():
    """Of 8 and 2 images: 4 more of the frequent class are a gain in accuracy; 1 less of the rare one undoes it."""
    labels = torch.tensor([0] * 8 + [1] * 2)
    before, after = torch.tensor([0] * 4 + [1] * 6).bool(), torch.tensor([1] * 9 + [0]).bool()
    accuracy, balanced = (
        compare_heads(before, after, labels, None, metric) for metric in ("accuracy", "balanced_accuracy")
    )
    assert (accuracy.p, accuracy.kept) == (pytest.approx(6 / 32), True)  # 4 of 5 better
    assert (balanced.metric_before, balanced.metric_after) == (0.75, 0.75)
    # ±⅛ ±⅛ ±⅛ ±⅛ ±½: the sums of at least 0 are all with +½, and −½ with four +⅛
    assert (balanced.p, balanced.kept) == (pytest.approx(17 / 32), False)
    grouped = compare_heads(before, after, labels, np.array([0] * 4 + [1] * 6), "balanced_accuracy")
    assert grouped.p == pytest.approx(0.75), "sums ½ and −½: of four signs only −½ −½ is below 0"


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([1, 3, 7, 30])), max_size=9))
def test_the_sign_flip_test_counts_all_signs(of):
    changes = np.array([change / size for change, size in of])
    sums = [np.dot(signs, changes) for signs in product((-1, 1), repeat=len(of))]
    assert sign_flip_p(changes) == pytest.approx(np.mean(np.array(sums) >= changes.sum() - 1e-9))


def test_no_p_is_above_one():
    assert max(sign_flip_p(-np.ones(count)) for count in range(1, 60)) == 1


def test_many_sums_are_drawn_and_changes_of_one_size_are_the_sign_test(monkeypatch):
    assert sign_flip_p(np.repeat([0.1, -0.1], [40, 30])) == pytest.approx(binom.sf(39, 70, 0.5), rel=1e-12)
    changes = np.random.default_rng(0).normal(0.2, 1, 12)
    exact = sign_flip_p(changes)
    monkeypatch.setattr(adaptation, "MAX_SUMS", 100)
    drawn = sign_flip_p(changes)
    assert drawn == pytest.approx(exact, abs=0.02) and drawn != exact and drawn == sign_flip_p(changes)


def test_labels_at_random_keep_the_shipped_head_whatever_they_teach_of_the_classes():
    """A tenth of the labels are of the rare class: accuracy grows by never answering it, balanced accuracy does not."""
    kept = {"accuracy": 0, "balanced_accuracy": 0}
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        z, weight = torch.randn(40, 4, generator=draw), 0.3 * torch.randn(2, 4, generator=draw)
        labels = (torch.rand(40, generator=draw) < 0.15).long()
        labels[0] = 1
        for metric in kept:
            about = weight, torch.zeros(2), z, labels, torch.zeros(4), torch.ones(4)
            kept[metric] += do_no_harm(*about, metric=metric).kept
    assert kept["balanced_accuracy"] <= 15 < kept["accuracy"]


def test_metrics_that_decide():
    decides = {name: deciding_metric(name) for name in HIGHER_IS_BETTER}
    by_class = {name for name, metric in decides.items() if metric == "balanced_accuracy"}
    assert by_class == {"balanced_accuracy", "macro_f1"} and {*decides.values()} == {"accuracy", "balanced_accuracy"}


def test_a_class_without_labels_and_a_feature_that_never_varied():
    weight, bias, z, labels, mean, deviation = site(shift=1.0)
    deviation[2] = 0
    few = labels != 1
    adapted = adapt_head(weight, bias, z[few], labels[few], mean, deviation)
    assert all(value.isfinite().all() for value in adapted)
    assert correct(*adapted, z[few], labels[few]).sum() >= correct(weight, bias, z[few], labels[few]).sum()


def test_a_shifted_site_is_learned_and_noise_is_not():
    weight, bias, z, labels, mean, deviation = site(90, shift=3.0)
    weight, bias = 0.3 * weight, 0.3 * bias
    shown = do_no_harm(weight, bias, z, labels, mean, deviation)
    assert shown.kept and shown.labels == 90 and shown.after > shown.before + 4 and shown.p < 0.01
    noise = torch.from_numpy(np.random.default_rng(0).permutation(labels.numpy()))
    assert not do_no_harm(*site(90)[:3], noise, mean, deviation).kept
    fits = do_no_harm(*site(90))  # nothing is left to gain
    assert not fits.kept and fits.before > 80


@settings(max_examples=25)
@given(st.lists(st.integers(0, 12), min_size=4, max_size=60))
def test_folds_hold_whole_groups(groups):
    groups = np.array(groups)
    if len(np.unique(groups)) < 4:
        with pytest.raises(ValueError, match="too few"):
            folds_of(groups)
        return
    fold = folds_of(groups)
    assert all(len(np.unique(fold[groups == group])) == 1 for group in groups)
    sizes = np.bincount(fold, minlength=4)
    assert sizes.min() > 0 and sizes.max() - sizes.min() <= np.bincount(groups).max()
    assert (folds_of(groups) == fold).all()
