"""What the loop does beside its numbers: records, failures, batch norm, precision, phases, batches, stage modules."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from bank_problems import under
from loop_models import (
    DOMAINBED,
    SmallCNN,
    Staged,
    WithDomainHead,
    assert_close,
    batch_of,
    digit_annotations,
    digits,
    final_state,
    images_of,
    make_job,
    one_process,
    predict,
    split,
    step_batch,
    train,
)
from torch import Tensor, nn

from xdm_ft.algorithms.dsu import DSU
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.lisa import LISA
from xdm_ft.algorithms.mixstyle import MixStyle
from xdm_ft.augmentations import NO_AUGMENTATION, TrainingTransform
from xdm_ft.core import Batch, Losses
from xdm_ft.encoders import Encoder, Portable
from xdm_ft.encoders.timm import Timm
from xdm_ft.images.decode import UnreadableImage
from xdm_ft.images.transforms import evaluation_transform
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.randomness import Stream, bits
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Schedule, Trained, Training
from xdm_ft.training.end_to_end.batch_norm import synchronise
from xdm_ft.training.end_to_end.inputs import ImageInputs, TrainingBatches, split_batch
from xdm_ft.training.end_to_end.model import EndToEnd

SMALL = Training(batch_size=4)


def test_learns_and_records(accelerator: Accelerator) -> None:
    recorded: dict[int, dict[str, float]] = {}
    job, training = make_job(WithDomainHead, steps=60), Training(batch_size=16, encoder_lr=0.01, evaluate_every=15)

    def record(step: int, models: list[tuple[Job, dict[str, float]]]) -> None:
        ((_, recorded[step]),) = models

    trained = train(job, SmallCNN(), training, accelerator, rules=("train_val", "oracle"), record=record)
    assert list(recorded) == [15, 30, 45, 60]
    first, last = recorded[15], recorded[60]
    assert last["loss"] < 0.6 * first["loss"] and last["auxiliary_loss"] < first["auxiliary_loss"]
    assert last["largest"] > last["loss"] and last["lr"] == job.training.lr
    for rule in ("train_val", "oracle"):
        best = max(values[f"{rule}/accuracy"] for values in recorded.values())
        assert recorded[trained.selected[rule].step][f"{rule}/accuracy"] == best
    assert last["train_val/accuracy"] > 0.3  # chance: 0.1
    selected, rows = trained.selected["train_val"], job.split.evaluation["train_val"]
    logits = predict(job, SmallCNN(seed=9), selected.state, digits(), rows, accelerator, batch_size=32)
    accuracy = (logits.argmax(1) == torch.from_numpy(digits().labels)[rows]).float().mean().item()
    assert accuracy == pytest.approx(recorded[selected.step]["train_val/accuracy"])


def test_bf16_trains_in_autocast_with_the_loss_in_float32() -> None:
    seen = set[Any]()

    class Watched(ERM):
        def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
            losses = super().loss(z, batch, step)
            seen.add((z.dtype, self.head(z).dtype, losses.total.dtype))
            return losses

    class WatchedCNN(SmallCNN):
        def forward(self, images: Tensor) -> Tensor:
            if self.training:
                seen.add(self.layers[0](images).dtype)
            return super().forward(images)

    with one_process("bf16") as accelerator:
        final_state(train(make_job(Watched, steps=2), WatchedCNN(), SMALL, accelerator))
    assert seen == {torch.bfloat16, (torch.float32,) * 3}


def test_an_unreadable_image_is_named(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, image = int(batch_of(make_job(), SMALL, 1).row[0]), digits().image

    def image_or_fault(row: int) -> Any:
        if row == bad:
            raise UnreadableImage(digits().name(row), "truncated")
        return image(row)

    monkeypatch.setattr(digits(), "image", image_or_fault)
    with pytest.raises(UserError) as caught:
        train(make_job(), SmallCNN(), SMALL, accelerator)
    message = str(caught.value)
    assert f"scan {bad} " in message and "truncated" in message and "\n" not in message


@pytest.mark.parametrize(
    ("precision", "by_accelerate", "sharpness", "settings", "line"),
    [
        ("fp16", 1, SAM(), {}, "two passes"),
        ("fp16", 1, None, {}, "needs a GPU"),
        ("no", 2, None, {}, r"training\.accumulation"),
        ("no", 1, None, {"accumulation": 5}, r"training\.batch_size: 4 is less than"),
    ],
)
def test_a_launch_that_can_not_train_is_refused(
    precision: str, by_accelerate: int, sharpness: SAM | None, settings: dict[str, int], line: str
) -> None:
    with one_process(precision) as accelerator, pytest.raises(UserError, match=line):
        accelerator.gradient_accumulation_steps = by_accelerate
        train(make_job(sharpness=sharpness), SmallCNN(), Training(batch_size=4, **settings), accelerator)


def test_predict_is_in_order_and_equals_the_model_itself(accelerator: Accelerator) -> None:
    encoder, algorithm = SmallCNN(seed=5), ERM(make_job(seed=8).setup)
    state = {f"encoder.{name}": value for name, value in encoder.state_dict().items()} | algorithm.state_dict()
    rows = split().evaluation["test"].flip(0)[:21]
    with torch.no_grad():
        expected = algorithm.logits(encoder(images_of(rows)))
    logits = predict(make_job(), SmallCNN(seed=6), state, digits(), rows, accelerator, batch_size=4)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
    assert predict(make_job(), SmallCNN(), state, digits(), rows[:0], accelerator, batch_size=4).shape == (0, 10)


class Overflows(ERM):
    """A loss, or only its gradient, that is not finite at some steps, as in half precision."""

    at: tuple[int, ...] = ()
    gradient_alone = False

    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        losses = super().loss(z, batch, step)
        if step in self.at and self.gradient_alone:
            losses.total.register_hook(lambda gradient: gradient * float("inf"))
            return losses
        return losses._replace(total=losses.total * (float("inf") if step in self.at else 1.0))


@pytest.mark.slow
def test_a_step_that_overflows_is_the_gradient_scaler_s_to_skip(accelerator: Accelerator) -> None:
    """Neither weights nor batch-norm statistics move; without a scaler, or where it cannot help, the model fails."""
    training = Training(batch_size=4, optimizer="sgd", encoder_lr=0.003, clip_norm=0.5)

    def trained(at: tuple[int, ...], steps: int, scaled: bool = True, gradient_alone: bool = False) -> Trained:
        make = type("At", (Overflows,), {"at": at, "gradient_alone": gradient_alone})
        accelerator.scaler = torch.amp.GradScaler("cpu") if scaled else None
        return train(make_job(make, steps=steps), SmallCNN(), training, accelerator)

    assert "the loss is inf at step 3 of 4" in str(trained((2,), 4, scaled=False).failure)
    torch.testing.assert_close(final_state(trained((3,), 4)), final_state(trained((), 3)), rtol=0, atol=0)
    for alone, what in ((False, "the loss is inf"), (True, "gradients are not finite")):
        assert trained((2,), 5, gradient_alone=alone).failure is None
        always = trained(tuple(range(33)), 33, gradient_alone=alone)
        assert f"{what} at step 33 of 33" in str(always.failure)


@pytest.mark.slow
def test_steps_of_the_head_alone_are_not_selected(accelerator: Accelerator) -> None:
    class Worsens(ERM):
        """From step 20 on every step takes the head away from what it learned."""

        def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
            losses = super().loss(z, batch, step)
            return losses if step < 20 else losses._replace(total=-losses.total)

    schedule, course = Schedule(name="cosine", warmup_steps=2), dict[int, float]()
    training = Training(batch_size=4, encoder_lr=0.01, schedule=schedule, evaluate_every=10)
    trained = train(
        make_job(Worsens, steps=40), SmallCNN(), training, accelerator, unfreeze_at=20,
        record=lambda step, models: course.update({step: models[0][1]["train_val/accuracy"]}),
    )  # fmt: skip
    assert max(course, key=lambda step: course[step]) <= 20 < trained.selected["train_val"].step


# --- batch norm


def test_running_statistics_move_once_a_step_by_the_mean_of_the_micro_batches(accelerator: Accelerator) -> None:
    training = Training(batch_size=4, accumulation=2)
    job, encoder, moved = make_job(steps=1), SmallCNN(), list[Tensor]()
    state = final_state(train(job, encoder, training, accelerator))
    batch = batch_of(job, training, 0)
    for part in split_batch(torch.arange(12), batch.domain, 2, blocks=3):
        alone = copy.deepcopy(encoder).train()
        alone(batch.x[part])
        moved.append(alone.layers[1].running_mean)
    torch.testing.assert_close(state["encoder.layers.1.running_mean"], (moved[0] + moved[1]) / 2)
    assert state["encoder.layers.1.num_batches_tracked"] == 1


@pytest.mark.parametrize(
    "batch_norm, accumulation, processes, says",
    [
        ("train", 1, 1, None),
        ("frozen", 2, 2, None),
        ("train", 2, 1, "training.accumulation: 2"),
        ("train", 1, 2, "2 processes (torch has no SyncBatchNorm for cpu)"),
    ],
)
def test_batch_norm_of_parts_of_a_batch_is_said(
    batch_norm: str, accumulation: int, processes: int, says: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    inner = EndToEnd(SmallCNN(), ERM(make_job().setup), batch_norm).train()
    assert synchronise(inner, processes, accumulation, torch.device("cpu")) is inner
    assert [says in line for line in caplog.messages] == ([True] if says else [])
    assert all("batch_norm: frozen" in line and "\n" not in line for line in caplog.messages)


def test_synchronised_layers_keep_the_activation_inside_them() -> None:
    encoder = Timm(model="densenet121", kwargs={"growth_rate": 8, "block_config": [1, 1, 1, 1]})
    inner, x = EndToEnd(encoder, ERM(make_job(width=encoder.width).setup), "train").train(), torch.randn(2, 3, 64, 64)
    before = inner.eval().encoder(x).detach()
    inner = synchronise(inner.train(), 2, 1, torch.device("cuda"))
    assert sum(isinstance(layer, torch.nn.SyncBatchNorm) for layer in inner.modules()) > 5
    assert torch.equal(inner.eval().encoder(x), before)


# --- batches


def batches_of(job: Job, training: Training, accelerator: Accelerator, augmentations: Any = DOMAINBED) -> Any:
    images = ImageInputs(digits(), SmallCNN.preprocessing, augmentations, accelerator)
    return TrainingBatches(under(training, job), images, digit_annotations(), accelerator)


@pytest.mark.parametrize("kind", ["per_domain", "class_balanced", "pooled"])
def test_batches_start_anywhere(accelerator: Accelerator, kind: str) -> None:
    job, training = make_job(steps=7), Training(batch_size=6, sampler=kind, accumulation=2)
    labels, domains = torch.from_numpy(digits().labels), torch.from_numpy(digits().domains)
    whole, rest = (dict(batches_of(job, training, accelerator).begin(first)) for first in (0, 4))
    assert list(whole) == list(range(7)) and list(rest) == [4, 5, 6]
    for step, batch in rest.items():
        for part, same in zip(batch.parts, whole[step].parts, strict=True):
            assert torch.equal(part.row, same.row) and torch.equal(part.x, same.x)
            assert torch.equal(part.y, labels[part.row]) and torch.equal(part.domain, domains[part.row])
            assert torch.equal(batch.full_batch.row[part.position], part.row)
        rows, expected = torch.cat([part.row for part in batch.parts]), batch_of(job, training, step).row
        assert torch.equal(rows.sort().values, expected.sort().values)
        assert torch.equal(batch.full_batch.row, expected)
        assert batch.share(0) + batch.share(1) == pytest.approx(1)


def augmented(batches: TrainingBatches) -> Tensor:
    return torch.stack([batch.parts[0].x for _, batch in batches.begin()])


def test_augmentation_is_a_function_of_seed_step_and_position(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = []
    for workers in (0, 2):
        monkeypatch.setattr("xdm_ft.training.end_to_end.inputs.worker_count", lambda accelerator, n=workers: n)
        batches, state = batches_of(make_job(steps=3), SMALL, accelerator), torch.get_rng_state()
        images += [augmented(batches), augmented(batches)]  # a second time, as for SWAD's statistics
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(5)
    assert all(torch.equal(each, images[0]) for each in images)
    other_seed = batches_of(make_job(steps=3, seed=4), SMALL, accelerator)
    assert not torch.equal(augmented(other_seed), images[0])

    transform, image = TrainingTransform(SmallCNN.preprocessing, DOMAINBED), digits().image(int(batches.rows(2)[5]))
    assert torch.equal(images[0][2, 5], transform.tensor(image, int(bits(3, 2, Stream.AUGMENTATION, 5))))
    assert not torch.equal(images[0][2, 5], evaluation_transform(SmallCNN.preprocessing)(image))


@pytest.mark.slow
def test_images_to_train_on_are_augmented_and_those_to_select_by_are_not(accelerator: Accelerator) -> None:
    seen: dict[bool, list[Tensor]] = {True: [], False: []}

    class Watched(SmallCNN):
        def forward(self, images: Tensor) -> Tensor:
            seen[self.training].append(images)
            return super().forward(images)

    train(make_job(steps=3), Watched(), SMALL, accelerator, augmentations=DOMAINBED)
    assert torch.equal(torch.stack(seen[True][-3:]), augmented(batches_of(make_job(steps=3), SMALL, accelerator)))
    assert torch.equal(torch.cat(seen[False][-10:]), images_of(split().evaluation["train_val"]))


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_every_micro_batch_has_its_share_of_every_domain(parts: int) -> None:
    rows, domain = torch.arange(21), torch.arange(3).repeat_interleave(7)
    mixed = domain[torch.randperm(21, generator=torch.Generator().manual_seed(0))]
    for blocks, of_rows in ((3, domain), (1, mixed)):
        pieces = split_batch(rows, of_rows, parts, blocks)
        assert torch.equal(torch.cat(pieces).sort().values, rows)
        counts = torch.stack([of_rows[piece].bincount(minlength=3) for piece in pieces])  # [parts,3]
        if blocks == 3:
            assert (counts.amax(1) == counts.amin(1)).all()
        else:
            assert (counts.amax(0) - counts.amin(0)).max() <= 1


def test_a_row_that_is_twice_in_a_batch_gets_two_draws(accelerator: Accelerator) -> None:
    """λ of LISA: mixed with one and the same partner, two copies of a row differ."""
    job, twice = make_job(LISA, steps=4), 0
    for step in range(4):
        batch = step_batch(job, Training(batch_size=60), accelerator, step).parts[0]
        everyone = torch.ones_like(batch.y, dtype=torch.bool)
        same = batch._replace(partner=torch.zeros_like(batch.x), has_partner=everyone)
        mixed, order = LISA(job.setup).on_inputs(same, step).x, batch.row.argsort()
        for one, other in zip(order[:-1].tolist(), order[1:].tolist(), strict=True):
            if batch.row[one] == batch.row[other]:
                assert torch.equal(batch.x[one], batch.x[other]) and not torch.equal(mixed[one], mixed[other])
                twice += 1
    assert twice > 10


def test_partners_from_all_images_are_read_and_augmented_like_any(accelerator: Accelerator) -> None:
    """x_j is a training image of the same class and another domain."""
    job, training = make_job(partial(LISA, partners="all"), steps=4), Training(batch_size=4, accumulation=2)
    labels, domains = torch.from_numpy(digits().labels), torch.from_numpy(digits().domains)
    batches, outside = batches_of(job, training, accelerator, NO_AUGMENTATION), 0
    pool, images = torch.cat(job.split.train).tolist(), batches.inputs.plain
    for step, batch in batches.begin():
        for part in batch.parts:
            assert part.has_partner.all()
            for number, position in enumerate(part.position.tolist()):
                row = int(batches.partners(step).row[position])
                assert row in pool and labels[row] == part.y[number] and domains[row] != part.domain[number]
                assert torch.equal(part.partner[number], images[row][0]) and part.partner_y[number] == labels[row]
                outside += row not in batch.full_batch.row.tolist()
    assert outside > 10


# --- modules of a method behind stages of the encoder


def pooled(maps: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(maps, 4).flatten(1)


def test_modules_behind_stages_work_in_training_alone() -> None:
    job = make_job(lambda setup: MixStyle(setup, p=1.0))
    inner, batch = EndToEnd(Staged(), job.make(job.setup), "frozen").train(), batch_of(job, SMALL, 0)
    by_hand, stages = batch.x, job.make(job.setup).stage_modules(inner.encoder)
    for number, layer in enumerate(inner.encoder.layers):
        by_hand = layer(by_hand)
        if (name := f"layers.{number}") in stages:
            by_hand = stages[name](by_hand, batch, 7)
    torch.testing.assert_close(inner(batch, 7), pooled(by_hand))
    plain = Staged()(batch.x)
    assert (inner(batch, 7) - plain).abs().max() > 1e-4
    with torch.no_grad():
        assert torch.equal(inner.eval()(batch, 7), plain)
        assert torch.equal(inner.train().encoder(batch.x), Staged()(batch.x))  # outside a step


@pytest.mark.slow
@pytest.mark.parametrize("method", [MixStyle, DSU])
def test_a_loop_with_modules_behind_stages(accelerator: Accelerator, method: type[ERM]) -> None:
    """p = 0 is ERM; p = 1 is not; nothing is added to the weights; both passes of SAM see the same draws."""
    training, first = Training(batch_size=8, optimizer="sgd", momentum=0.0, encoder_lr=0.03), "encoder.layers.0.weight"

    def trained(make: Any, steps: int = 2, sharpness: SAM | None = None) -> dict[str, Tensor]:
        return final_state(train(make_job(make, steps, sharpness=sharpness), Staged(), training, accelerator))

    erm, never, always = trained(ERM), trained(partial(method, p=0.0)), trained(partial(method, p=1.0))
    torch.testing.assert_close(never, erm, rtol=0, atol=0)
    assert always.keys() == erm.keys() and (always[first] - erm[first]).abs().max() > 1e-4
    plain, flat, sharp = (trained(method, 4, used) for used in (None, SAM(rho=1e-9), SAM(rho=0.1)))
    assert_close(flat, plain, atol=1e-4)  # at the same weights the second pass gives the gradient of the first
    assert (sharp[first] - plain[first]).abs().max() > 1e-4


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor, batch: Batch, step: int) -> Tensor:
        return x * self.scale[:, None, None]


class Scaled(ERM):
    """ERM with a learned scale per channel behind the second stage, while training."""

    make: Any = Scale

    def stage_modules(self, encoder: Encoder) -> dict[str, nn.Module]:
        return {encoder.stage_names[-1]: type(self).make()}


def test_a_module_behind_a_stage_trains_with_the_heads_rate(accelerator: Accelerator) -> None:
    """As the same layers written out by hand; prediction goes without it."""
    training = Training(batch_size=8, optimizer="sgd", momentum=0.5, encoder_lr=0.03)
    job, encoder = make_job(Scaled, steps=5, weight_decay=0.0, lr=0.1), Staged()
    state = final_state(train(job, encoder, training, accelerator, batch_norm="frozen"))
    algorithm, scale, layers = job.make(job.setup), Scale(), copy.deepcopy(encoder).layers
    groups = [
        {"params": list(layers.parameters()), "lr": training.encoder_lr},
        {"params": [*algorithm.parameters(), *scale.parameters()], "lr": job.training.lr},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.5)
    for number in range(5):
        batch = batch_of(job, training, number)
        optimizer.zero_grad()
        F.cross_entropy(algorithm.logits(pooled(scale(layers(batch.x), batch, number))), batch.y).backward()
        optimizer.step()
    expected = {f"encoder.layers.{name}": value.detach() for name, value in layers.named_parameters()}
    expected |= {"stages.list.0.scale": scale.scale.detach(), **algorithm.state_dict()}
    assert (scale.scale - Scale().scale).abs().max() > 1e-3
    assert_close(state, expected, atol=1e-5)
    rows = split().evaluation["test"][:5]
    with torch.no_grad():
        plain = algorithm.logits(pooled(layers(images_of(rows))))
    logits = predict(job, encoder, state, digits(), rows, accelerator, batch_size=2)
    torch.testing.assert_close(logits, plain, atol=1e-4, rtol=1e-4)


def test_buffers_of_a_module_behind_a_stage_are_refused() -> None:
    normalising = type("Normalising", (Scaled,), {"make": partial(nn.BatchNorm2d, 16)})
    with pytest.raises(AssertionError, match="no buffers"):
        EndToEnd(Staged(), normalising(make_job().setup), "train")


class Tokens(Encoder):
    """A stage that gives tokens, one that gives maps with channels last, and one that is never called."""

    width, normalize, pretraining, preprocessing = 3, False, "none", SmallCNN.preprocessing

    def __init__(self, stage_names: tuple[str, ...]) -> None:
        super().__init__()
        self.stage_names = stage_names
        self.weight = nn.Parameter(torch.ones(3))
        self.tokens, self.last, self.never, self.maps = nn.Identity(), nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        self.tokens(images.flatten(2).mT)
        self.last(images.permute(0, 2, 3, 1))
        return self.maps(images).mean((2, 3)) * self.weight

    def identity(self) -> dict[str, object]:
        return {}

    def portable(self) -> Portable:
        return Portable({}, self.state_dict())


@pytest.mark.parametrize(
    "names, match",
    [
        (("tokens", "maps"), r"tokens returns \[12, 1024, 3\], and this method needs feature maps"),
        (("last", "maps"), r"last returns \[12, 32, 32, 3\], and this method needs feature maps"),
        (("maps", "never"), "never is never called"),
    ],
)
def test_stages_that_do_not_serve_are_refused(names: tuple[str, ...], match: str) -> None:
    job = make_job(lambda setup: MixStyle(setup, p=1.0), width=3)
    inner = EndToEnd(Tokens(names), job.make(job.setup), "train").train()
    with pytest.raises(UserError, match=match):
        inner(batch_of(job, SMALL, 0), 0)
