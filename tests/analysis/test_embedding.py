"""Two-dimensional maps: what they separate, what they must not, silhouettes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from xdm_ft.analysis import Encoded
from xdm_ft.analysis.embedding import embedding, linear_map, pair, silhouette, specific_and_generic
from xdm_ft.heads.linear import Linear
from xdm_ft.runtime.randomness import Stream
from xdm_ft.storage import Json
from xdm_ft.xdomainmix import linear_scores

WIDTH = 12


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for what is planted here."""
    monkeypatch.setattr("xdm_ft.analysis.embedding.STEPS", 100)


def planted(n: int = 300, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Three classes in features 0 to 2, two domains in features 3 and 4, noise elsewhere."""
    source = torch.Generator().manual_seed(seed)
    y, domain = torch.randint(3, (n,), generator=source), torch.randint(2, (n,), generator=source)
    z = torch.rand(n, WIDTH, generator=source)
    z[:, :5] *= 0.1
    rows = torch.arange(n)
    z[rows, y] += 3
    z[rows, 3 + domain] += 3
    return z, y, domain


def heads() -> tuple[Linear, Linear]:
    head, domain_head = Linear(WIDTH, 3, 0, Stream.INIT), Linear(WIDTH, 2, 0, Stream.DOMAIN_INIT)
    with torch.no_grad():
        head.weight.copy_(torch.eye(WIDTH)[:3])
        domain_head.weight.copy_(torch.eye(WIDTH)[3:5])
    return head, domain_head


def of(z: Tensor, y: Tensor, domain: Tensor, *how: object) -> Json:
    return embedding(Encoded(z, y, domain, torch.arange(len(z))), *how)["pairs"]


@cache
def made(seed: int = 0, n: int = 300) -> Json:
    return anew(seed, None, n)


def anew(seed: int = 0, augmented: Tensor | None = None, n: int = 300) -> Json:
    z, y, domain = planted(n)
    head, domain_head = heads()
    return of(z, y, domain, head, domain_head, augmented, 3, 2, seed)


def test_two_points_of_each_image_separated_by_their_label_or_not() -> None:
    pairs = made()
    assert list(pairs) == ["class_specific_vs_generic", "domain_specific_vs_generic"]
    for found in pairs.values():
        for points in (found["map"], found["pca"]):
            specific, generic = points["silhouette_of_labels"]
            assert specific > 0.7 and generic < 0.1
    points = pairs["class_specific_vs_generic"]["map"]
    assert len(points["points"]) == len(points["label"]) == 300 and points["kind"] == [0] * 150 + [1] * 150
    assert points["label"][:150] == points["label"][150:] and set(points["label"]) == {0, 1, 2}
    assert all(round(x, 3) == x for point in points["points"] for x in point)
    assert len(made(n=900)["class_specific_vs_generic"]["map"]["points"]) == 400
    assert pairs == anew() and made(seed=1) != pairs
    z, y, domain = planted()
    assert list(of(z, y, domain, heads()[0], None, None, 3, 2, 0)) == ["class_specific_vs_generic"], "no domain head"


def test_augmented_features_that_are_the_originals_can_not_be_told_apart() -> None:
    z, _, _ = planted()
    same = anew(augmented=z)["original_vs_augmented"]
    far = anew(augmented=z + 100 * torch.eye(WIDTH)[11])["original_vs_augmented"]
    assert abs(same["map"]["silhouette"]) < 0.05 and abs(same["pca"]["silhouette"]) < 0.05
    first, second = same["map"]["silhouette_of_labels"]
    assert first == pytest.approx(second) and far["pca"]["silhouette"] > 0.9


def test_labels_that_mean_nothing_are_not_separated() -> None:
    """The map is trained on other images than those shown, else it would separate any labels: K is large."""
    source = torch.Generator().manual_seed(0)
    z, y = torch.randn(400, 600, generator=source), torch.randint(3, (400,), generator=source)
    found = of(z, y, y, lambda z: z[:, :3], None, z, 3, 3, 0)["original_vs_augmented"]["map"]
    assert max(found["silhouette_of_labels"]) < 0.02
    itself = linear_map(z, y, 3, 0)(z)
    assert silhouette(itself, y) > 0.4


def test_the_map_does_not_depend_on_the_scale_of_features_and_parts_sum_to_them() -> None:
    z, y, _ = planted()
    small, large = linear_map(z, y, 3, 0)(z), linear_map(1000 * z, y, 3, 0)(1000 * z)
    torch.testing.assert_close(small, large, rtol=1e-2, atol=1e-2)
    specific, generic = specific_and_generic(z, linear_scores(z, heads()[0].weight, y))
    assert torch.equal(specific + generic, z) and (specific != 0).sum(1).max() <= WIDTH // 2


def test_principal_components_are_those_of_scikit_learn() -> None:
    from sklearn.decomposition import PCA

    z, y, _ = planted(80)
    first, second = z[:40], z[40:]
    found = torch.tensor(pair(first, second, y[:40], linear_map(z, y, 3, 0))["pca"]["points"])
    theirs = torch.from_numpy(PCA(2).fit_transform(z.double().numpy())).float()
    torch.testing.assert_close(found.abs(), theirs.abs(), atol=2e-3, rtol=0)


def test_silhouettes_by_hand() -> None:
    line = torch.tensor([[0.0, 0], [1, 0], [4, 0], [6, 0]])
    # b − a over the larger: (5−1)/5, (4−1)/4, (3.5−2)/3.5, (5.5−2)/5.5
    assert silhouette(line, torch.tensor([0, 0, 1, 1])) == pytest.approx((0.8 + 0.75 + 1.5 / 3.5 + 3.5 / 5.5) / 4)
    assert silhouette(line, torch.zeros(4)) is None and silhouette(line, torch.arange(4)) is None


def test_few_or_equal_images() -> None:
    with pytest.raises(ValueError, match="3 images are too few"):
        made(n=3)
    assert len(made(n=4)["class_specific_vs_generic"]["map"]["points"]) == 4
    head = heads()[0]
    equal = of(torch.zeros(8, WIDTH), torch.zeros(8).long(), torch.zeros(8).long(), head, None, None, 3, 1, 0)
    found = equal["class_specific_vs_generic"]
    z, y = torch.arange(1.0, 9)[:, None], torch.arange(8) % 2
    points = of(z, y, y, lambda z: torch.cat([z, -z], 1), None, None, 2, 2, 0)["class_specific_vs_generic"]
    assert all(point[1] == 0 for point in points["pca"]["points"]), "one feature is a line"
    assert found["pca"]["points"] == [[0.0, 0.0]] * 8 and found["map"]["silhouette_of_labels"] == [None, None]
