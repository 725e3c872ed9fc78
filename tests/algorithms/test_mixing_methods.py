"""LISA and Mixup: who is mixed with whom, how, and the recorded numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from partnered import mixed as mixed_by
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.lisa import LISA, box, cut_mix
from xdm_ft.algorithms.mixup import Mixup, mix_up
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.tensors import Batch, Task

TASK = Task(tuple("abcd"), tuple("xyz"))
WIDTH, ROWS = 7, 60


@pytest.fixture
def golden() -> dict[str, Tensor]:
    with np.load(Path(__file__).resolve().parents[1] / "golden" / "lisa.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def setup(seed: int = 0, task: Task = TASK) -> Setup:
    return Setup(task, WIDTH, steps=100, seed=seed)


def batch(seed: int = 0, *shape: int) -> Batch:
    """The first feature of every sample says which one it is: mixed samples tell their partners."""
    generator = torch.Generator().manual_seed(seed)
    y, domain = (torch.randint(0, high, (ROWS,), generator=generator) for high in (4, 3))
    x = torch.randn(ROWS, *(shape or (WIDTH,)), generator=generator)
    return Batch(x, y, domain, torch.randperm(1000, generator=generator)[:ROWS], torch.arange(ROWS))


def mixed_with(given: Batch, partner: Tensor) -> Batch:
    found = torch.ones(len(partner), dtype=torch.bool)
    return given._replace(partner=given.x[partner], partner_y=given.y[partner], has_partner=found)


def decoded(given: Batch, mixed: Batch) -> tuple[Tensor, Tensor]:
    """Partner and λ of every sample, found by trying all of them."""
    one, other = given.x[:, None], given.x[None]  # [B,1,K], [1,B,K]
    difference = one - other
    lam = ((mixed.x[:, None] - other) * difference).sum(-1) / difference.square().sum(-1).clamp(min=1e-9)  # [B,B]
    wrong = (lam[..., None] * one + (1 - lam[..., None]) * other - mixed.x[:, None]).abs().amax(-1)
    wrong = wrong.masked_fill(torch.eye(ROWS, dtype=torch.bool), torch.inf)
    partner = wrong.argmin(1)
    is_itself = (mixed.x - given.x).abs().amax(1) < 1e-6
    partner = torch.where(is_itself, torch.arange(ROWS), partner)
    return partner, torch.where(is_itself, 1.0, lam[torch.arange(ROWS), partner])


def test_mix_up_is_the_recorded_one(golden: dict[str, Tensor]) -> None:
    x, labels = torch.cat([golden["x1"], golden["x2"]]), torch.cat([golden["y1"], golden["y2"]])
    both = Batch(x, labels.argmax(1), torch.zeros(10, dtype=torch.int64), torch.arange(10), torch.arange(10))
    both, lam = mixed_with(both, torch.arange(10).roll(-5)), golden["lam"][:, 0].float().repeat(2)
    mixed = mix_up(both, lam, 3)
    torch.testing.assert_close(mixed.x[:5], golden["mixed_x"], atol=1e-6, rtol=0)
    torch.testing.assert_close(mixed.targets[:5], golden["mixed_y"], atol=1e-6, rtol=0)


def test_boxes_are_the_recorded_ones(golden: dict[str, Tensor]) -> None:
    lam, centre, recorded = golden["bbox_lam_cx_cy_x1_y1_x2_y2"].split([1, 2, 4], dim=1)
    first, last = box(lam[:, 0], centre.long(), golden["bbox_WH"])
    assert len(recorded) and torch.equal(torch.cat([first, last], 1), recorded.long())


def test_cut_mix_pastes_the_box_and_labels_by_area() -> None:
    partner, lam = torch.arange(ROWS).roll(1), torch.linspace(0, 1, ROWS)
    given = mixed_with(batch(0, 3, 8, 8), partner)
    centre = torch.rand(ROWS, 2, generator=torch.Generator().manual_seed(1))
    mixed = cut_mix(given, lam, centre, 4)
    for i in range(ROWS):
        half = int(8 * float(1 - lam[i]) ** 0.5) // 2
        row, column = int(centre[i, 0] * 8), int(centre[i, 1] * 8)
        rows, columns = (slice(max(0, c - half), min(8, c + half)) for c in (row, column))
        expected = given.x[i].clone()
        expected[:, rows, columns] = given.x[partner[i], :, rows, columns]
        pasted = expected[0, rows, columns].numel() / 64
        labels = (1 - pasted) * F.one_hot(given.y[i], 4) + pasted * F.one_hot(given.y[partner[i]], 4)
        assert torch.equal(mixed.x[i], expected)
        torch.testing.assert_close(mixed.targets[i], labels)


@pytest.mark.parametrize("mix", ["mixup", "cutmix"])
@pytest.mark.parametrize("p_sel", [0.0, 0.5, 1.0])
def test_lisa_chooses_its_pairs(p_sel: float, mix: str) -> None:
    """Intra-label: one class, two domains, labels stay hard. Intra-domain: one domain, two classes."""
    algorithm, strategies = LISA(setup(), p_sel=p_sel, mix=mix), []
    for step in range(40):
        given = batch(step, 3, 6, 6) if mix == "cutmix" else batch(step)
        mixed = mixed_by(algorithm, given, step)
        labels = F.one_hot(given.y, 4).float()
        intra_label = torch.equal(mixed.targets, labels)
        strategies.append(intra_label)
        if mix == "cutmix":
            continue
        partner, lam = decoded(given, mixed)
        changed = partner != torch.arange(ROWS)
        assert changed.sum() > ROWS // 2
        of_partner = given.y[partner], given.domain[partner]
        assert ((of_partner[0] == given.y) == intra_label)[changed].all()
        assert ((of_partner[1] == given.domain) != intra_label)[changed].all()
        torch.testing.assert_close(
            mixed.targets, lam[:, None] * labels + (1 - lam[:, None]) * labels[partner], atol=1e-4, rtol=0
        )
    share = sum(strategies) / 40
    assert share == p_sel if p_sel != 0.5 else 0.2 < share < 0.8


def test_lisa_s_loss_is_the_soft_cross_entropy_of_the_mixed_batch() -> None:
    algorithm, given = LISA(setup(), p_sel=0.0), batch()
    mixed = mixed_by(algorithm, given, 3)
    assert (mixed.targets.max(1).values < 0.95).sum() > ROWS // 2
    per_sample = -(mixed.targets * algorithm.head(mixed.x).log_softmax(1)).sum(1)
    by_hand = torch.stack([per_sample[given.domain == d].mean() for d in range(3)]).mean()
    torch.testing.assert_close(algorithm(mixed.x, mixed, 3).total, by_hand)


@pytest.mark.parametrize("p_sel", [0.0, 1.0])
def test_a_sample_without_a_partner_stays_as_it_is(p_sel: float) -> None:
    given = batch()._replace(y=torch.zeros(ROWS, dtype=torch.int64), domain=torch.zeros(ROWS, dtype=torch.int64))
    mixed = mixed_by(LISA(setup(), p_sel=p_sel), given, 0)
    assert torch.equal(mixed.x, given.x) and torch.equal(mixed.targets, F.one_hot(given.y, 4).float())
    alone = mixed_by(Mixup(setup(), partner_domain="other"), given, 0)
    assert torch.equal(alone.x, given.x)


def without_partner(algorithm: ERM, given: Batch, step: int = 0) -> float:
    mixed = mixed_by(algorithm, given, step)
    return float(algorithm(mixed.x.flatten(1)[:, :WIDTH], mixed, step).logs["without_partner"])


@pytest.mark.parametrize("shape", [(WIDTH,), (3, 8, 8)])
@pytest.mark.parametrize("p_sel", [0.0, 1.0])
def test_the_share_of_samples_without_a_partner_is_logged(p_sel: float, shape: tuple[int, ...]) -> None:
    """Twenty classes of three samples each: many are without one of the same class in another domain."""
    y, domain = torch.arange(ROWS) % 20, torch.arange(ROWS) // 20 * (torch.arange(ROWS) % 5 > 1)
    given = batch(0, *shape)._replace(y=y, domain=domain)
    alone = 0
    for i in range(ROWS):
        alone += not any(
            (y[j] == y[i] and domain[j] != domain[i]) if p_sel else (y[j] != y[i] and domain[j] == domain[i])
            for j in range(ROWS)
        )
    assert alone > 10 if p_sel else alone == 0
    for mix in ["mixup"] if len(shape) == 1 else ["mixup", "cutmix"]:
        many = Task(tuple(map(str, range(20))), TASK.domain_names)
        found = without_partner(LISA(setup(task=many), p_sel=p_sel, mix=mix), given)
        assert found == pytest.approx(alone / ROWS, abs=1e-6)


def test_mixup_logs_it_too() -> None:
    given, algorithm = batch(), Mixup(setup(), alpha=2.0)
    own = torch.arange(ROWS)
    in_place = [int((decoded(given, mixed_by(algorithm, given, step))[0] == own).sum()) for step in range(9)]
    assert [round(ROWS * without_partner(algorithm, given, step)) for step in range(9)] == in_place and any(in_place)
    between = Mixup(setup(), partner_domain="other")
    assert without_partner(between, given) == 0
    assert without_partner(between, given._replace(domain=torch.zeros_like(given.domain))) == 1
    assert "without_partner" not in ERM(setup())(given.x, given, 0).logs


def test_cutmix_wants_images() -> None:
    assert "set mix: mixup" in LISA(setup(), mix="cutmix").frozen_reason and not LISA(setup()).frozen_reason
    with pytest.raises(UserError, match="cutmix needs images"):
        mixed_by(LISA(setup(), mix="cutmix"), batch(), 0)


def test_mixup_by_a_permutation_of_the_batch() -> None:
    given, seen = batch(), []
    for step in range(20):
        partner, lam = decoded(given, mixed_by(Mixup(setup(), alpha=2.0), given, step))
        others = partner[partner != torch.arange(ROWS)]
        assert len(others.unique()) == len(others) > ROWS // 2
        assert (given.domain[partner] == given.domain).any()
        seen.append(lam[partner != torch.arange(ROWS)])
    assert abs(float(torch.cat(seen).mean()) - 0.5) < 0.03


def test_mixup_between_domains() -> None:
    given = batch()
    mixed = mixed_by(Mixup(setup(), alpha=2.0, partner_domain="other"), given, 5)
    partner, lam = decoded(given, mixed)
    assert (given.domain[partner] != given.domain).all()
    labels = F.one_hot(given.y, 4).float()
    torch.testing.assert_close(
        mixed.targets, lam[:, None] * labels + (1 - lam[:, None]) * labels[partner], atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("method", [LISA, Mixup])
def test_draws_depend_on_seed_and_step_and_the_mixed_are_trained_by_erm(method: type[ERM]) -> None:
    given = batch()
    one = mixed_by(method(setup(seed=1)), given, 0)
    assert torch.equal(one.x, mixed_by(method(setup(seed=1)), given, 0).x)
    assert not torch.equal(one.x, mixed_by(method(setup(seed=2)), given, 0).x)
    assert not torch.equal(one.x, mixed_by(method(setup(seed=1)), given, 1).x)
    assert torch.equal(method(setup())(one.x, one, 0).total, ERM(setup())(one.x, one, 0).total)
