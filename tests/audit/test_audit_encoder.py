"""What an encoder's features say of class and domain: the domain probe, and the halves by a text side."""

from __future__ import annotations

import json

import numpy as np
import torch

from xdm_ft.audit.encoder import (
    HOW,
    Aligned,
    aligned_accuracy,
    domain_probe,
    encoder_facts,
    halve_by_alignment,
    prompt_cosines,
)
from xdm_ft.evaluation.neighbours import directions, neighbours
from xdm_ft.runtime.randomness import folds


def drawn(n: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def test_the_probe_is_a_ridge_regression_of_sklearn():
    from sklearn.linear_model import Ridge

    domain, groups = np.random.default_rng(0).integers(0, 3, 120), np.arange(120) // 4
    z = drawn(120, 8, 0) + 0.5 * drawn(3, 8, 1)[torch.from_numpy(domain)]
    correct = 0
    fold_of = folds(domain, groups, 5)
    for train, test in ((fold_of != fold, fold_of == fold) for fold in range(5)):
        x = z.double().numpy()
        alpha = 0.01 * x[train].var(0).mean() * train.sum()
        predicted = Ridge(alpha=alpha).fit(x[train], np.eye(3)[domain[train]]).predict(x[test])
        correct += int((predicted.argmax(1) == domain[test]).sum())
    assert domain_probe(z, domain, groups)[0] == correct / 120


def test_images_of_a_group_do_not_tell_each_others_domain():
    """Each group has features of its own, which say nothing of the domains of others."""
    groups = np.repeat(np.arange(100), 10)
    domain = np.random.default_rng(0).integers(0, 2, 100)[groups]
    z = 5 * drawn(100, 64, 0)[torch.from_numpy(groups)] + drawn(1000, 64, 1)
    alone, together = (domain_probe(z, domain, given)[0] for given in (None, groups))
    assert alone is not None and together is not None and alone > 0.8 and together < 0.65


def test_nothing_to_probe():
    nothing = (None, None)
    assert domain_probe(drawn(20, 4, 0), np.zeros(20, np.int64), None) == nothing
    assert domain_probe(drawn(20, 4, 0), np.arange(20) % 2, np.zeros(20, np.int64)) == nothing
    assert domain_probe(drawn(1, 4, 0), np.zeros(1, np.int64), None) == nothing
    assert domain_probe(torch.ones(20, 4), np.arange(20) % 2, None)[1] == 0.5


def test_the_facts_are_json():
    z, rows, classes, domains = drawn(60, 8, 0), torch.arange(60), np.arange(60) % 3, np.arange(60) // 30
    unit = directions(z, rows, str)
    nearest = neighbours(unit, rows, domains)
    aligned = Aligned(0.85, 0.57, 30, 30)
    facts = encoder_facts("timm tiny", unit, nearest, classes, domains, None, aligned).to_json()
    assert json.loads(json.dumps(facts)) == facts
    assert [*facts] == [
        "label", "robustness_index", "same_domain_share", "domain_accuracy", "domain_chance", "aligned", "note",
    ]  # fmt: skip
    assert facts["aligned"]["how"] == HOW and "no verdict" in facts["note"] and facts["domain_chance"] == 0.5
    one_domain = neighbours(unit, rows, domains * 0)
    facts = encoder_facts("x", unit, one_domain, classes * 0, domains * 0).to_json()
    assert facts["robustness_index"] is facts["domain_accuracy"] is facts["aligned"] is None


def test_cosines_with_the_prompt_of_the_own_class():
    unit, text = directions(drawn(20, 8, 0), torch.arange(20), str), drawn(3, 8, 1)
    labels = np.arange(20) % 3
    expected = [torch.cosine_similarity(unit[i], text[labels[i]], dim=0) for i in range(20)]
    np.testing.assert_allclose(prompt_cosines(unit, text, labels), expected, atol=1e-6)


def test_halves_are_those_of_each_class():
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 2])
    cosines = np.array([0.1, 0.9, 0.2, 0.8, 0.3, 0.1, 0.2, 0.5])
    # the middle one of class 1, and the only one of class 2, are in neither half
    assert halve_by_alignment(cosines, labels).tolist() == [0, 1, 0, 1, 1, 0, -1, -1]
    assert halve_by_alignment(np.zeros(4), np.zeros(4, np.int64)).tolist() == [0, 0, 1, 1]


def test_accuracy_of_the_halves_by_hand():
    halves = np.array([1, 0, 1, -1, 0])
    rows = np.array([0, 1, 2, 3, 0, 1, 2, 3])  # two models; image 4 was not tested
    correct = np.array([1, 0, 1, 0, 1, 1, 0, 0], bool)
    assert aligned_accuracy(halves, rows, correct) == Aligned(3 / 4, 1 / 2, 2, 1)
    assert aligned_accuracy(halves, np.array([0, 2, 3]), np.ones(3, bool)) is None
    assert aligned_accuracy(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, bool)) is None
