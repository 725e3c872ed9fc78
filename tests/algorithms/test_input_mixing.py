"""LISA and Mixup: who is mixed with whom, against loops; how, against the recorded numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from partnered import mixed as mixed_by
from recorded import golden
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.lisa import LISA, box, cut_mix
from xdm_ft.algorithms.mixup import Mixup, draw_partners, mix_up, pick_other
from xdm_ft.core import Batch, Samples, Task
from xdm_ft.runtime.errors import UserError

STEPS, BATCH, TRAINING = 50, 12, 40
TASK = Task(tuple("abcd"), tuple("xyz"))
WIDTH, ROWS = 7, 60
ITSELF = torch.arange(ROWS)


def setup(seed: int = 0, task: Task = TASK) -> Setup:
    return Setup(task, WIDTH, steps=100, seed=seed)


def samples(*shape: int, seed: int = 0, classes: int = 5) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randperm(1000, generator=generator)[: shape[-1]].expand(shape)
    y, domain = (torch.randint(high, shape, generator=generator) for high in (classes, 3))
    return Samples(row, y, domain)


def batch(seed: int = 0, *shape: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    y, domain = (torch.randint(0, high, (ROWS,), generator=generator) for high in (4, 3))
    x = torch.randn(ROWS, *(shape or (WIDTH,)), generator=generator)
    return Batch(x, y, domain, torch.randperm(1000, generator=generator)[:ROWS], ITSELF)


def mixed_with(given: Batch, partner: Tensor) -> Batch:
    everyone = torch.ones(len(partner), dtype=torch.bool)
    return given._replace(partner=given.x[partner], partner_y=given.y[partner], has_partner=everyone)


def decoded(given: Batch, mixed: Batch) -> tuple[Tensor, Tensor]:
    """Partner and λ of every sample, found by trying all of them."""
    one, other = given.x[:, None], given.x[None]  # [B,1,K], [1,B,K]
    difference = one - other
    lam = ((mixed.x[:, None] - other) * difference).sum(-1) / difference.square().sum(-1).clamp(min=1e-9)  # [B,B]
    wrong = (lam[..., None] * one + (1 - lam[..., None]) * other - mixed.x[:, None]).abs().amax(-1)
    partner = wrong.masked_fill(torch.eye(ROWS, dtype=torch.bool), torch.inf).argmin(1)
    is_itself = (mixed.x - given.x).abs().amax(1) < 1e-6
    partner = torch.where(is_itself, ITSELF, partner)
    return partner, torch.where(is_itself, 1.0, lam[ITSELF, partner])


def check_labels(given: Batch, mixed: Batch, partner: Tensor, lam: Tensor) -> None:
    labels = F.one_hot(given.y, 4).float()
    expected = lam[:, None] * labels + (1 - lam[:, None]) * labels[partner]
    torch.testing.assert_close(mixed.targets, expected, atol=1e-4, rtol=0)


def valid(y: int, domain: int, pool: Samples, same: str | None, other: str | None) -> list[int]:
    """Positions in the pool, by a loop."""
    own, positions = {"y": y, "domain": domain}, []
    for position, theirs in enumerate(zip(pool.y.tolist(), pool.domain.tolist(), strict=True)):
        of = dict(zip(("y", "domain"), theirs, strict=True))
        if (same is None or of[same] == own[same]) and (other is None or of[other] != own[other]):
            positions.append(position)
    return positions


@pytest.mark.parametrize("source", ["batch", "all"])
@pytest.mark.parametrize("same, other", [("y", "domain"), ("domain", "y"), (None, "domain"), (None, None)])
def test_partners_are_uniform_over_the_valid_samples(source: Any, same: Any, other: Any) -> None:
    drawn, training = samples(STEPS, BATCH), samples(TRAINING, seed=1, classes=4)  # class 4 has no partner among all
    fractions = torch.linspace(0, 0.999, 60)
    chosen = [draw_partners(drawn, training, torch.full((STEPS, BATCH), u), source, same, other) for u in fractions]
    alone = 0
    for step in (0, 25):
        pool = Samples(*(field[step] for field in drawn)) if source == "batch" else training
        for i in range(BATCH):
            allowed = valid(int(drawn.y[step, i]), int(drawn.domain[step, i]), pool, same, other)
            alone += not allowed
            for partners in chosen:
                assert bool(partners.exists[step, i]) == bool(allowed)
                row, place = int(partners.row[step, i]), int(partners.position[step, i])
                if not allowed:
                    assert (row, place) == (int(drawn.row[step, i]), i)
                elif source == "batch":
                    assert place in allowed and row == int(drawn.row[step, place])
                else:
                    assert place == BATCH + i and row in [int(training.row[j]) for j in allowed]
            if allowed:  # every one of them, each as often as the others but for rounding
                rows = torch.stack([partners.row[step, i] for partners in chosen])
                counts = rows.unique(return_counts=True)[1]
                assert len(counts) == len(allowed) and counts.max() - counts.min() <= 2
    expected = (source, same) == ("all", "y") or (source, same, other) == ("batch", "y", "domain")
    assert (alone > 0) == expected


def test_the_largest_draw_does_not_leave_the_pool() -> None:
    y, domain = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 0, 1]])
    position, exists = pick_other(y, domain, y, domain, torch.full((1, 4), 1 - 2**-24))
    assert position.tolist() == [[1, 0, 3, 2]] and exists.all()


@pytest.mark.parametrize("method", [LISA, Mixup])
def test_partners_of_a_step_do_not_depend_on_which_steps_are_asked_for(method: type[Algorithm]) -> None:
    algorithm, whole = method(setup()), samples(STEPS, BATCH)
    training, steps = samples(TRAINING, seed=1), torch.arange(STEPS)
    together = algorithm.input_partners(whole, training, steps)
    late = algorithm.input_partners(Samples(*(field[30:] for field in whole)), training, steps[30:])
    assert together is not None and late is not None
    assert all(torch.equal(one[30:], other) for one, other in zip(together, late, strict=True))
    if method is Mixup:  # a permutation of the batch
        assert torch.equal(together.position.sort().values, torch.arange(BATCH).expand(STEPS, -1))
        assert torch.equal(together.exists, together.position != torch.arange(BATCH))


def test_mix_up_and_boxes_are_the_recorded_ones() -> None:
    recorded = golden("lisa.npz")
    x, labels = torch.cat([recorded["x1"], recorded["x2"]]), torch.cat([recorded["y1"], recorded["y2"]])
    both = Batch(x, labels.argmax(1), torch.zeros(10, dtype=torch.int64), torch.arange(10), torch.arange(10))
    both, lam = mixed_with(both, torch.arange(10).roll(-5)), recorded["lam"][:, 0].float().repeat(2)
    mixed = mix_up(both, lam, 3)
    torch.testing.assert_close(mixed.x[:5], recorded["mixed_x"], atol=1e-6, rtol=0)
    torch.testing.assert_close(mixed.targets[:5], recorded["mixed_y"], atol=1e-6, rtol=0)
    lam, centre, corners = recorded["bbox_lam_cx_cy_x1_y1_x2_y2"].split([1, 2, 4], dim=1)
    first, last = box(lam[:, 0], centre.long(), recorded["bbox_WH"])
    assert len(corners) and torch.equal(torch.cat([first, last], 1), corners.long())


def test_cut_mix_pastes_the_box_and_labels_by_area() -> None:
    partner, lam = ITSELF.roll(1), torch.linspace(0, 1, ROWS)
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


@pytest.mark.parametrize("p_sel", [0.0, 0.5, 1.0])
def test_lisa_chooses_its_pairs_for_a_whole_batch(p_sel: float) -> None:
    """Intra-label: one class, two domains, labels stay hard. Intra-domain: one domain, two classes."""
    algorithm, cutmix, strategies = LISA(setup(), p_sel=p_sel), LISA(setup(), p_sel=p_sel, mix="cutmix"), []
    for step in range(20):
        given, images = batch(step), batch(step, 3, 6, 6)
        mixed, hard = mixed_by(algorithm, given, step), F.one_hot(given.y, 4).float()
        intra_label = torch.equal(mixed.targets, hard)
        assert torch.equal(mixed_by(cutmix, images, step).targets, F.one_hot(images.y, 4).float()) == intra_label
        strategies.append(intra_label)
        partner, lam = decoded(given, mixed)
        changed = partner != ITSELF
        assert changed.sum() > ROWS // 2
        assert ((given.y[partner] == given.y) == intra_label)[changed].all()
        assert ((given.domain[partner] == given.domain) != intra_label)[changed].all()
        check_labels(given, mixed, partner, lam)
    share = sum(strategies) / 20
    assert share == p_sel if p_sel != 0.5 else 0.2 < share < 0.8


def test_a_sample_without_a_partner_stays_as_it_is() -> None:
    given = batch()._replace(y=torch.zeros(ROWS, dtype=torch.int64), domain=torch.zeros(ROWS, dtype=torch.int64))
    for algorithm in (LISA(setup(), p_sel=0.0), LISA(setup(), p_sel=1.0), Mixup(setup(), partner_domain="other")):
        mixed = mixed_by(algorithm, given, 0)
        assert torch.equal(mixed.x, given.x) and torch.equal(mixed.targets, F.one_hot(given.y, 4).float())


def without_partner(algorithm: ERM, given: Batch, step: int = 0) -> float:
    mixed = mixed_by(algorithm, given, step)
    return float(algorithm(mixed.x.flatten(1)[:, :WIDTH], mixed, step).logs["without_partner"])


@pytest.mark.parametrize("p_sel", [0.0, 1.0])
def test_the_share_of_samples_without_a_partner_is_logged(p_sel: float) -> None:
    """Twenty classes of three samples each: many are without one of the same class in another domain."""
    y, domain = ITSELF % 20, ITSELF // 20 * (ITSELF % 5 > 1)
    pool, conditions = Samples(ITSELF, y, domain), ("y", "domain") if p_sel else ("domain", "y")
    alone = sum(not valid(int(y[i]), int(domain[i]), pool, *conditions) for i in range(ROWS))
    assert alone > 10 if p_sel else alone == 0
    for shape, mix in (((), "mixup"), ((3, 8, 8), "mixup"), ((3, 8, 8), "cutmix")):
        algorithm = LISA(setup(task=Task(tuple(map(str, range(20))), TASK.domain_names)), p_sel=p_sel, mix=mix)
        found = without_partner(algorithm, batch(0, *shape)._replace(y=y, domain=domain))
        assert found == pytest.approx(alone / ROWS, abs=1e-6)


def test_mixup_logs_it_too_and_cutmix_needs_images() -> None:
    given, algorithm = batch(), Mixup(setup(), alpha=2.0)
    in_place = [int((decoded(given, mixed_by(algorithm, given, step))[0] == ITSELF).sum()) for step in range(9)]
    assert [round(ROWS * without_partner(algorithm, given, step)) for step in range(9)] == in_place and any(in_place)
    between = Mixup(setup(), partner_domain="other")
    assert without_partner(between, given) == 0
    assert without_partner(between, given._replace(domain=torch.zeros_like(given.domain))) == 1
    assert "without_partner" not in ERM(setup())(given.x, given, 0).logs
    cutmix = LISA(setup(), mix="cutmix")
    assert "set mix: mixup" in cutmix.frozen_reason and not LISA(setup()).frozen_reason
    with pytest.raises(UserError, match="cutmix needs images"):
        mixed_by(cutmix, given, 0)


def test_mixup_by_a_permutation_of_the_batch_and_between_domains() -> None:
    given, lams = batch(), []
    for step in range(20):
        mixed = mixed_by(Mixup(setup(), alpha=2.0), given, step)
        partner, lam = decoded(given, mixed)
        others = partner[partner != ITSELF]
        assert len(others.unique()) == len(others) > ROWS // 2
        assert (given.domain[partner] == given.domain).any()
        lams.append(lam[partner != ITSELF])
    assert abs(float(torch.cat(lams).mean()) - 0.5) < 0.03
    mixed = mixed_by(Mixup(setup(), alpha=2.0, partner_domain="other"), given, 5)
    partner, lam = decoded(given, mixed)
    assert (given.domain[partner] != given.domain).all()
    check_labels(given, mixed, partner, lam)


@pytest.mark.parametrize("method", [LISA, Mixup])
def test_draws_depend_on_seed_and_step_and_the_mixed_are_trained_by_erm(method: type[ERM]) -> None:
    given = batch()
    one = mixed_by(method(setup(seed=1)), given, 0)
    assert not torch.equal(one.x, mixed_by(method(setup(seed=2)), given, 0).x)
    assert not torch.equal(one.x, mixed_by(method(setup(seed=1)), given, 1).x)
    assert torch.equal(method(setup())(one.x, one, 0).total, ERM(setup())(one.x, one, 0).total)
