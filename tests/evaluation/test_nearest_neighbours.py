"""Nearest neighbours against naive loops, and the robustness index against counts by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xdm_ft.evaluation import neighbours as module
from xdm_ft.evaluation.neighbours import Robustness, directions, neighbours, robustness, sampled_robustness
from xdm_ft.runtime.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def found(z: torch.Tensor, domains: np.ndarray, k: int = 10) -> module.Neighbours:
    rows = torch.arange(len(z))
    return neighbours(directions(z, rows, str), rows, domains, k)


def drawn(n: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=15)
@given(
    n=st.integers(1, 40), width=st.integers(1, 6), domains=st.sampled_from([1, 2, 50]), block=st.integers(1, 300),
    zeros=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_they_are_those_of_a_loop_over_all_pairs(n, width, domains, block, zeros, seed):
    z, domain = drawn(n, width, seed), np.random.default_rng(seed).integers(0, domains, n)
    if zeros:
        z[::3] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COSINES_AT_ONCE", block)
        patch.setattr(module, "ROWS_AT_ONCE", 7)
        got = found(z, domain, k=4)
    unit = z.double() / z.double().norm(dim=1, keepdim=True)  # NaN without a direction
    assert got.nearest.shape == got.cosines.shape == (n, min(4, n - 1))
    for i in range(n):
        cosines = {j: float(unit[i] @ unit[j]) for j in range(n) if j != i and not (unit[i] @ unit[j]).isnan()}
        nearest = sorted(cosines.values(), reverse=True)[:4]
        places = got.nearest[i][got.nearest[i] >= 0]
        assert len(places) == len({*places}) == len(nearest)
        np.testing.assert_allclose(got.cosines[i][: len(nearest)], nearest, atol=1e-5)
        np.testing.assert_allclose([cosines[j] for j in places], nearest, atol=1e-5)  # of equal ones any
        assert (got.nearest[i][len(nearest) :] == -1).all() and np.isnan(got.cosines[i][len(nearest) :]).all()
        foreign = [cosine for j, cosine in cosines.items() if domain[j] != domain[i]]
        if foreign:
            assert domain[got.foreign[i]] != domain[i]
            assert cosines[got.foreign[i]] == pytest.approx(max(foreign), abs=1e-5)
        else:
            assert got.foreign[i] == -1


def test_rows_are_those_of_the_data_set():
    z, rows = drawn(30, 8, 0), torch.tensor([3, 29, 7, 11])
    got = neighbours(directions(z, rows, str), rows, np.zeros(4, np.int64))
    assert got.rows.tolist() == rows.tolist() and got.nearest.shape == (4, 3) and got.nearest.max() == 3


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_features_of_any_size_have_the_same_directions(size):
    z = drawn(20, 5, 0)
    np.testing.assert_allclose(
        directions(z * size, torch.arange(20), str), torch.nn.functional.normalize(z, dim=1), atol=1e-6
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_features_that_are_not_finite_are_reported_with_the_first_image(value):
    z = drawn(20, 5, 0)
    z[[11, 8], 2] = value
    with pytest.raises(UserError, match=r"^image 11: its features hold NaN or infinite numbers; [^\n]+$"):
        directions(z, torch.tensor([4, 11, 8]), lambda row: f"image {row}")


def test_the_robustness_index_by_hand():
    labels, domains = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    # of image 0: same class in another domain, another class in the same domain, neither; one has no neighbour
    nearest = np.array([[1, 2, 3], [0, 2, -1], [0, -1, -1], [-1, -1, -1]])
    # so: 0→1, 1→0; os: 0→2, 2→0; both differ: 0→3, 1→2
    assert robustness(nearest, labels, domains) == Robustness(2 / 4, 2 / 6)


@pytest.mark.parametrize(
    ("labels", "domains", "index", "share"),
    [
        ([0, 0, 0], [0, 0, 0], None, 1.0),  # the same class and domain
        ([0, 1, 2], [0, 1, 2], None, 0.0),
        ([0, 0, 0], [0, 1, 2], 1.0, 0.0),  # one class
        ([0, 1, 2], [0, 0, 0], None, 1.0),  # one domain
        ([0], [0], None, None),
        ([], [], None, None),
    ],
)
def test_one_class_or_one_domain_has_an_index_only_if_a_neighbour_decides_it(labels, domains, index, share):
    labels, domains = np.array(labels, np.int64), np.array(domains, np.int64)
    got = found(drawn(len(labels), 4, 0), domains)
    assert robustness(got.nearest, labels, domains) == Robustness(index, share)


@pytest.mark.parametrize("domains", [2, 50])
def test_the_index_is_high_where_features_follow_the_class_and_low_where_they_follow_the_domain(domains):
    draw = np.random.default_rng(0)
    labels, domain = draw.integers(0, 5, 400), draw.integers(0, domains, 400)
    noise, rows = drawn(400, 64, 0), np.arange(400)
    by_class, by_domain = (drawn(50, 64, 1)[torch.from_numpy(of)] for of in (labels, domain))
    indices = [
        sampled_robustness(noise + weight * by_class + (2 - weight) * by_domain, rows, labels, domain).index
        for weight in (0.2, 1.0, 1.8)
    ]
    assert indices == sorted(indices) and indices[0] < 0.2 and indices[-1] > 0.9


MANY = """
import json, resource, time
import numpy as np, torch
from xdm_ft.audit.copies import near_copies
from xdm_ft.evaluation.neighbours import directions, neighbours
n = 100_000
z = torch.randn(n, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
z[n // 2] = z[7] + 0.1 * z[8]
rows = torch.arange(n)
started = time.perf_counter()
unit = directions(z, rows, str)
del z
domains = np.arange(n) % 50
pairs = near_copies(neighbours(unit, rows, domains), domains)
print(json.dumps({
    "seconds": time.perf_counter() - started, "bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    "first": [pairs[0].first, pairs[0].second, pairs[0].sure], "sure": sum(pair.sure for pair in pairs),
}))
"""


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_images_fit_in_two_gigabytes():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    print(measured)
    assert measured["bytes"] <= 2e9
    assert measured["first"] == [7, 50_000, True] and measured["sure"] == 1
