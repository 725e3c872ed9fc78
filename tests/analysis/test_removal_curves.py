"""Accuracy after removal, for models whose important features are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from xdm_ft.analysis.importance import area, removal_curves
from xdm_ft.heads.cosine import Cosine
from xdm_ft.heads.linear import Linear
from xdm_ft.heads.mlp import MLP
from xdm_ft.runtime.randomness import Stream

WIDTH, CLASSES, DOMAINS = 20, 4, 2


def planted(n: int = 64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Feature c is 1 for class c, feature 4 + d is 1 for domain d; the others are noise that no head reads."""
    source = torch.Generator().manual_seed(seed)
    y, domain = torch.arange(n) % CLASSES, torch.arange(n) // CLASSES % DOMAINS
    z = 0.5 * torch.rand(n, WIDTH, generator=source)
    z[:, : CLASSES + DOMAINS] = 0
    z[torch.arange(n), y] = 1
    z[torch.arange(n), CLASSES + domain] = 1
    return z, y, domain


def reading(first: int, outputs: int, bias: Tensor | None = None) -> nn.Linear:
    """A head whose logit c is feature first + c."""
    head = nn.Linear(WIDTH, outputs)
    with torch.no_grad():
        head.weight.copy_(torch.eye(WIDTH)[first : first + outputs])
        head.bias.copy_(torch.zeros(outputs) if bias is None else bias)
    return head.requires_grad_(False)


def test_the_one_feature_of_the_class_is_removed_first_by_score_and_last_of_all_at_random() -> None:
    z, y, domain = planted()
    # without any feature the model says class 3, domain 1
    head = reading(0, CLASSES, torch.tensor([0, 0, 0, 0.1]))
    domain_head = reading(CLASSES, DOMAINS, torch.tensor([0, 0.1]))
    curves = removal_curves(z, y, domain, head, domain_head, shares=(0.0, 0.04, 0.05, 0.5, 1.0))
    assert curves["images"] == 64 and curves["shares"] == [0.0, 0.04, 0.05, 0.5, 1.0]
    assert curves["class"]["score"] == [1.0, 1.0, 0.25, 0.25, 0.25]  # 0.04 · 20 is no whole feature
    assert curves["class"]["gradient_norm"] == curves["class"]["score"]  # |W| is 1 at this feature, 0 elsewhere
    assert curves["domain"] is not None and curves["domain"]["score"] == [1.0, 1.0, 0.5, 0.5, 0.5]
    of_class, of_domain = curves["class"]["random"], curves["domain"]["random"]
    assert of_class[0] == 1 and 0.9 <= of_class[2] < 1 and 0.4 < of_class[3] < 0.8 and of_class[-1] == 0.25
    assert of_domain[0] == 1 and of_domain[-1] == 0.5
    assert set(curves["area"]["class"]) == set(curves["class"]) == {"score", "gradient_norm", "random"}
    assert curves["area"]["class"]["score"] < curves["area"]["class"]["random"]
    assert curves["area"]["domain"] is not None


def test_score_and_gradient_norm_differ() -> None:
    z, y, domain = planted()
    head = reading(0, CLASSES, torch.tensor([0, 0, 0, 0.1]))
    head.weight[:, 10:12] = 5.0  # the same for all classes: large gradients that change no prediction
    before = z.clone()
    curves = removal_curves(z, y, domain, head, None, shares=(0.0, 0.1, 0.2))
    assert torch.equal(z, before)
    assert curves["class"]["gradient_norm"] == [1.0, 1.0, 0.25]  # the two, then the class's own and another
    assert curves["domain"] is None and curves["area"]["domain"] is None
    expected = {order: area((0.0, 0.1, 0.2), curve) for order, curve in curves["class"].items()}
    assert curves["area"]["class"] == pytest.approx(expected)
    assert area([0.0, 0.1, 0.4], [1.0, 0.5, 0.1]) == pytest.approx(0.1 * 0.75 + 0.3 * 0.3)
    negative = reading(0, CLASSES, torch.tensor([0, 0, 0, 0.1]))
    negative.weight[:, 10] = -2.0
    curves = removal_curves(z, y, domain, negative, None, shares=(0.0, 0.05, 0.1))
    assert curves["class"]["gradient_norm"] == [1.0, 1.0, 0.25], "negative gradients count by their size"
    assert curves["class"]["score"] == [1.0, 0.25, 0.25]  # z · gradient is negative there


@pytest.mark.parametrize("make", [Cosine, MLP])
def test_heads_that_are_not_linear(make: type) -> None:
    z, y, domain = planted()
    head = make(WIDTH, CLASSES, 0, Stream.INIT)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(z), y).backward()
        optimizer.step()
    curves = removal_curves(z, y, domain, head, None, shares=(0.0, 0.3))
    assert curves["class"]["score"][0] == 1.0 > curves["class"]["random"][1] > curves["class"]["score"][1]


def test_draws_depend_on_the_seed_and_on_the_image() -> None:
    z, y, domain = planted(n=512)  # a whole batch
    shares = (0.4, 0.5, 0.6)
    head = reading(0, CLASSES)
    curves = [removal_curves(z, y, domain, head, None, shares, seed)["class"]["random"] for seed in (0, 0, 1)]
    assert curves[0] == curves[1] != curves[2]
    twice = removal_curves(z.repeat(2, 1), y.repeat(2), domain.repeat(2), head, None, shares, 0)
    assert twice["class"]["random"] != curves[0]


def test_the_score_of_a_head_that_has_learned_nothing_falls_too() -> None:
    """The order knows the true label, which docs/diagnostics.md warns of."""
    z, y, domain = planted(n=400)
    curves = removal_curves(z, y, domain, Linear(WIDTH, CLASSES, 0, Stream.INIT), None, shares=(0.0, 0.2))
    (before, after), (_, at_random) = curves["class"]["score"], curves["class"]["random"]
    assert before < 0.5 and after < 0.1 < at_random
