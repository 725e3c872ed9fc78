"""Facts that predict the class: planted at three strengths, and none where labels are shuffled."""

import numpy as np
import pytest
from scipy.stats import norm, t

from xdm_ft.audit import facts
from xdm_ft.audit.facts import balanced_accuracy, facts_findings
from xdm_ft.images.facts import FACTS, ImageFacts

NAMES = list(FACTS)


@pytest.fixture(autouse=True)
def few_trees(monkeypatch):
    monkeypatch.setattr(facts, "TREES", 10)


def made_up(labels, domains, seed=0, **planted):
    """Facts of images: noise in width and lightest red, the others equal, and the planted ones (`_` for a space)."""
    draws = np.random.default_rng(seed)
    values = np.zeros((len(labels), len(FACTS)))
    for name in ("width", "lightest red"):
        values[:, NAMES.index(name)] = draws.integers(0, 50, len(labels))
    for name, column in planted.items():
        values[:, NAMES.index(name.replace("_", " "))] = column
    return ImageFacts(np.arange(len(labels)), values)


def data(num_domains, num_classes, per_cell):
    cells = np.repeat(np.arange(num_domains * num_classes), per_cell)
    return cells % num_classes, cells // num_classes, [f"d{d}" for d in range(num_domains)]


def test_balanced_accuracy_by_hand():
    targets, predicted = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 0, 0, 1, 1, 1])
    value, interval, p = balanced_accuracy(targets, predicted, np.arange(6))
    assert value == pytest.approx((0.75 + 1) / 2)
    # w = 1/8 and 1/4, q = 1/2: the sum of w(s − q) is 3/8, its error the root of 4/256 + 2/64
    assert p == pytest.approx(t.sf(0.375 / (4 / 256 + 2 / 64) ** 0.5, 5))
    n, z = 1 / (4 / 64 + 2 / 16), norm.ppf(0.975)
    root = (value * (1 - value) / n + z * z / (4 * n * n)) ** 0.5
    assert interval.low == pytest.approx((value + z * z / (2 * n) - z * root) / (1 + z * z / n), abs=1e-4)
    grouped = balanced_accuracy(targets, predicted, np.array([0, 0, 1, 1, 2, 2]))
    assert grouped[0] == value and grouped[2] > p and grouped[1].low < interval.low
    assert balanced_accuracy(targets, np.zeros(6, int), np.arange(6))[::2] == (0.5, 1.0)


@pytest.mark.parametrize(("share", "named"), [(0.65, None), (0.8, True)])
def test_a_planted_format_is_named_where_it_is(share, named):
    labels, domains, names = data(2, 2, 100)
    agrees = np.arange(len(labels)) % 20 < round(20 * share)  # in each cell
    of_label = np.where(agrees, labels, 1 - labels)
    table = made_up(labels, domains, format=np.where(domains == 0, of_label, 0))
    rows = facts_findings(table, labels, domains, names)
    by_key = {(row.facts, row.predicts, row.domain): row for row in rows}
    row = by_key["format", "class", "d0"]
    assert row.accuracy == pytest.approx(share) and row.chance == 0.5
    assert row.interval.low <= share <= row.interval.high
    if named:
        assert row.found and by_key["size and format", "class", "d0"].found
        assert {r.domain for r in rows if r.found} == {"d0"}
    assert ("format", "class", "d1") not in by_key, "equal facts predict nothing"
    assert not any(r.found for r in rows if r.predicts == "domain" or r.facts == "all")
    assert by_key["format", "domain", None].accuracy > 0.6
    assert row.to_json()["interval"] == list(row.interval)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("num_draws", [2, pytest.param(60, marks=pytest.mark.soak)])
def test_few_false_findings_without_association(grouped, num_draws):
    """Over draws of 6 cells each; patients have one class and facts of their own."""
    labels, domains, names = data(2, 3, 30)
    false = raw = cells = 0
    for draw in range(num_draws):
        draws = np.random.default_rng(draw)
        if grouped:
            groups = np.arange(len(labels)) // 3
            table = made_up(labels, domains, draw, width=draws.random(groups.max() + 1)[groups])
        else:
            groups, table = None, made_up(labels, domains, draw)
        rows = [r for r in facts_findings(table, labels, domains, names, groups, draw) if r.predicts == "class"]
        false += any(row.found or row.p_holm < 0.05 for row in rows)
        raw, cells = raw + sum(row.p < 0.05 for row in rows), cells + len(rows)
    assert false <= max(1, 0.05 * num_draws) and raw / cells <= 0.15 and cells >= 4 * num_draws


def test_a_group_is_in_one_fold():
    """A fact that is the patient's number names the class of known patients alone."""
    labels, domains, names = data(1, 2, 120)
    groups = np.arange(240) // 6
    order = np.random.default_rng(0).permutation(40)
    table = made_up(labels, domains, width=order[groups] * 10.0, height=order[groups] ** 2.0)
    [row] = [
        r for r in facts_findings(table, labels, domains, names, groups) if r.facts == "size" and r.predicts == "class"
    ]
    assert not row.found and row.accuracy < 0.75
    alone = facts_findings(table, labels, domains, names)
    assert next(r for r in alone if r.facts == "size" and r.predicts == "class").accuracy > 0.9


@pytest.mark.parametrize(("num_domains", "num_classes"), [(1, 2), (2, 1), (50, 2)])
def test_numbers_of_domains_and_classes(num_domains, num_classes):
    labels, domains, names = data(num_domains, num_classes, 12)
    values = np.where(domains == num_domains - 1, labels, 0)
    rows = facts_findings(
        ImageFacts(np.arange(len(labels)), np.where([name == "camera" for name in NAMES], values[:, None], 0.0)),
        labels, domains, names,
    )  # fmt: skip
    assert {row.domain for row in rows if row.found} == ({names[-1]} if num_classes > 1 else set())
    assert any(row.predicts == "domain" for row in rows) == (num_domains == 50)


def test_a_class_with_few_images_is_left_out_and_empty_data_have_no_row():
    labels, domains = np.repeat([0, 1, 2], [40, 40, 3]), np.zeros(83, np.int64)
    rows = facts_findings(made_up(labels, domains), labels, domains, ["d0"])
    assert rows and {row.chance for row in rows} == {0.5}
    none = np.empty(0, np.int64)
    assert facts_findings(made_up(none, none), none, none, ["d0"]) == []
