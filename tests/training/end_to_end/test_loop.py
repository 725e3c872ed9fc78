"""What the loop does beside its numbers: records, failures, batch norm, precision, phases, batches."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from bank_problems import under
from loop_models import (
    SmallCNN,
    WithDomainHead,
    batch_of,
    digit_annotations,
    digits,
    final_state,
    make_job,
    one_process,
    predict,
    split,
    step_batch,
    train,
)
from loop_models import images_of as read
from torch import Tensor

from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.lisa import LISA
from xdm_ft.encoders.timm import Timm
from xdm_ft.images.decode import UnreadableImage
from xdm_ft.images.transforms import evaluation_transform, training_transform
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.randomness import Stream, bits
from xdm_ft.runtime.tensors import Batch, Losses
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Schedule, Trained, Training
from xdm_ft.training.end_to_end.batch_norm import synchronised
from xdm_ft.training.end_to_end.inputs import Images, StepBatch, TrainingBatches, split_batch
from xdm_ft.training.end_to_end.model import EndToEnd


def test_running_statistics_move_once_a_step_by_the_mean_of_the_micro_batches(accelerator: Accelerator) -> None:
    training = Training(batch_size=4, accumulation=2)
    job, encoder = make_job(steps=1), SmallCNN()
    got = final_state(train(job, encoder, training, accelerator))
    batch = batch_of(job, training, 0)
    moved = []
    for part in split_batch(torch.arange(12), batch.domain, 2, blocks=3):
        alone = copy.deepcopy(encoder).train()
        alone(batch.x[part])
        moved.append(alone.layers[1].running_mean)
    torch.testing.assert_close(got["encoder.layers.1.running_mean"], (moved[0] + moved[1]) / 2)
    assert got["encoder.layers.1.num_batches_tracked"] == 1


def test_learns_and_records(accelerator: Accelerator) -> None:
    recorded: dict[int, dict[str, float]] = {}
    job, training = make_job(WithDomainHead, steps=60), Training(batch_size=16, encoder_lr=0.01, evaluate_every=15)

    def record(step: int, models: list[tuple[Job, dict[str, float]]]) -> None:
        ((_, recorded[step]),) = models

    trained = train(job, SmallCNN(), training, accelerator, rules=("train_val", "oracle"), record=record)
    assert list(recorded) == [15, 30, 45, 60]
    assert recorded[60]["loss"] < 0.6 * recorded[15]["loss"]
    assert recorded[60]["auxiliary_loss"] < recorded[15]["auxiliary_loss"]
    assert recorded[60]["largest"] > recorded[60]["loss"]
    assert recorded[60]["lr"] == job.training.lr
    for rule in ("train_val", "oracle"):
        best = max(values[f"{rule}/accuracy"] for values in recorded.values())
        assert recorded[trained.selected[rule].step][f"{rule}/accuracy"] == best
    assert recorded[60]["train_val/accuracy"] > 0.3  # chance: 0.1

    selected = trained.selected["train_val"]
    rows = job.split.evaluation["train_val"]
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
        final_state(train(make_job(Watched, steps=2), WatchedCNN(), Training(batch_size=4), accelerator))
    assert seen == {torch.bfloat16, (torch.float32,) * 3}


def test_an_unreadable_image_is_named(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    job, training = make_job(), Training(batch_size=4)
    bad, image = int(batch_of(job, training, 1).row[0]), digits().image

    def image_or_fault(row: int) -> Any:
        if row == bad:
            raise UnreadableImage(digits().name(row), "truncated")
        return image(row)

    monkeypatch.setattr(digits(), "image", image_or_fault)
    with pytest.raises(UserError) as caught:
        train(job, SmallCNN(), training, accelerator)
    assert f"scan {bad} " in str(caught.value) and "truncated" in str(caught.value)
    assert "\n" not in str(caught.value)


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
        expected = algorithm.logits(encoder(read(rows)))
    got = predict(make_job(), SmallCNN(seed=6), state, digits(), rows, accelerator, batch_size=4)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    assert predict(make_job(), SmallCNN(), state, digits(), rows[:0], accelerator, batch_size=4).shape == (0, 10)


@pytest.mark.parametrize("kind", ["per_domain", "class_balanced", "pooled"])
def test_batches_start_anywhere(accelerator: Accelerator, kind: str) -> None:
    job, training = make_job(steps=7), Training(batch_size=6, sampler=kind, accumulation=2)
    images = Images(digits(), SmallCNN.preprocessing, "domainbed", accelerator)
    labels, domains = torch.from_numpy(digits().labels), torch.from_numpy(digits().domains)

    def batches(first: int) -> dict[int, StepBatch]:
        return dict(TrainingBatches(under(training, job), images, digit_annotations(), accelerator).begin(first))

    whole, rest = batches(0), batches(4)
    assert list(whole) == list(range(7)) and list(rest) == [4, 5, 6]
    for step, batch in rest.items():
        for one, other in zip(batch.parts, whole[step].parts, strict=True):
            assert torch.equal(one.row, other.row) and torch.equal(one.x, other.x)
            assert torch.equal(one.y, labels[one.row]) and torch.equal(one.domain, domains[one.row])
            assert torch.equal(batch.full_batch.row[one.position], one.row)
        rows = torch.cat([part.row for part in batch.parts])
        assert torch.equal(rows.sort().values, batch_of(job, training, step).row.sort().values)
        assert torch.equal(batch.full_batch.row, batch_of(job, training, step).row)
        assert batch.share(0) + batch.share(1) == pytest.approx(1)


def augmented_batches(accelerator: Accelerator, seed: int = 3) -> TrainingBatches:
    images = Images(digits(), SmallCNN.preprocessing, "domainbed", accelerator)
    return TrainingBatches(
        under(Training(batch_size=4), make_job(steps=3, seed=seed)), images, digit_annotations(), accelerator
    )


def images_of(batches: TrainingBatches) -> Tensor:
    return torch.stack([batch.parts[0].x for _, batch in batches.begin()])


def test_augmentation_is_a_function_of_seed_step_and_place(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for workers in (0, 2):
        monkeypatch.setattr("xdm_ft.training.end_to_end.inputs.worker_count", lambda accelerator, n=workers: n)
        batches = augmented_batches(accelerator)
        state = torch.get_rng_state()
        found += [images_of(batches), images_of(batches)]  # a second time, as for SWAD's statistics
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(5)
    assert all(torch.equal(images, found[0]) for images in found)
    assert not torch.equal(images_of(augmented_batches(accelerator, seed=4)), found[0])

    transform, row = training_transform(SmallCNN.preprocessing, "domainbed"), int(batches.rows(2)[5])
    torch.manual_seed(int(bits(3, 2, Stream.AUGMENTATION, 5)))
    assert torch.equal(found[0][2, 5], transform(digits().image(row)))
    assert not torch.equal(found[0][2, 5], evaluation_transform(SmallCNN.preprocessing)(digits().image(row)))


@pytest.mark.slow
def test_images_to_train_on_are_augmented_and_those_to_select_by_are_not(accelerator: Accelerator) -> None:
    seen: dict[bool, list[Tensor]] = {True: [], False: []}

    class Watched(SmallCNN):
        def forward(self, images: Tensor) -> Tensor:
            seen[self.training].append(images)
            return super().forward(images)

    job, training = make_job(steps=3), Training(batch_size=4)
    train(job, Watched(), training, accelerator, augmentation="domainbed")
    assert torch.equal(torch.stack(seen[True][-3:]), images_of(augmented_batches(accelerator)))
    assert torch.equal(torch.cat(seen[False][-10:]), read(split().evaluation["train_val"]))


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_every_micro_batch_has_its_share_of_every_domain(parts: int) -> None:
    rows, domain = torch.arange(21), torch.arange(3).repeat_interleave(7)
    pieces = split_batch(rows, domain, parts, blocks=3)
    assert torch.equal(torch.cat(pieces).sort().values, rows)
    for piece in pieces:
        assert len(set(domain[piece].bincount(minlength=3).tolist())) == 1

    mixed = torch.randperm(21, generator=torch.Generator().manual_seed(0))
    pieces = split_batch(rows, domain[mixed], parts, blocks=1)
    assert torch.equal(torch.cat(pieces).sort().values, rows)
    counts = torch.stack([domain[mixed][piece].bincount(minlength=3) for piece in pieces])  # [parts,3]
    assert (counts.amax(0) - counts.amin(0)).max() <= 1


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
    """Neither weights nor batch-norm statistics move; without a scaler, or where it can not help, the model fails."""
    training = Training(batch_size=8, optimizer="sgd", encoder_lr=0.003, clip_norm=0.5)

    def trained(at: tuple[int, ...], steps: int, scaled: bool, gradient_alone: bool = False) -> Trained:
        make = type("At", (Overflows,), {"at": at, "gradient_alone": gradient_alone})
        accelerator.scaler = torch.amp.GradScaler("cpu") if scaled else None
        return train(make_job(make, steps=steps), SmallCNN(), training, accelerator)

    assert "the loss is inf at step 3 of 4" in str(trained((2,), 4, scaled=False).failure)
    skipped, shorter = trained((3,), 4, scaled=True), trained((), 3, scaled=True)
    for name, value in final_state(shorter).items():
        assert torch.equal(final_state(skipped)[name], value), name
    assert trained((2,), 5, scaled=True).failure is None
    always = trained(tuple(range(60)), 60, scaled=True)
    assert "the loss is inf at step 33 of 60" in str(always.failure)
    assert trained((2,), 5, scaled=True, gradient_alone=True).failure is None
    always = trained(tuple(range(60)), 60, scaled=True, gradient_alone=True)
    assert "gradients are not finite at step 33 of 60" in str(always.failure)


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
    assert synchronised(inner, processes, accumulation, torch.device("cpu")) is inner
    assert [says in line for line in caplog.messages] == ([True] if says else [])
    assert all("batch_norm: frozen" in line and "\n" not in line for line in caplog.messages)


def test_synchronised_layers_keep_the_activation_inside_them() -> None:
    encoder = Timm(model="densenet121", kwargs={"growth_rate": 8, "block_config": [1, 1, 1, 1]})
    inner, x = EndToEnd(encoder, ERM(make_job(width=encoder.width).setup), "train").train(), torch.randn(2, 3, 64, 64)
    before = inner.eval().encoder(x).detach()
    inner = synchronised(inner.train(), 2, 1, torch.device("cuda"))
    assert sum(isinstance(layer, torch.nn.SyncBatchNorm) for layer in inner.modules()) > 5
    assert torch.equal(inner.eval().encoder(x), before)


TRAINING = Training(batch_size=4, encoder_lr=0.01, schedule=Schedule(name="cosine", warmup_steps=2))


@pytest.mark.slow
def test_steps_of_the_head_alone_are_not_selected(accelerator: Accelerator) -> None:
    class Worsens(ERM):
        """After the first step every further one takes the head away from what it learned."""

        def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
            losses = super().loss(z, batch, step)
            return losses if step < 20 else losses._replace(total=-losses.total)

    training, recorded = TRAINING.model_copy(update={"evaluate_every": 10}), {}
    trained = train(
        make_job(Worsens, steps=40), SmallCNN(), training, accelerator, unfreeze_at=20,
        record=lambda step, models: recorded.update({step: models[0][1]["train_val/accuracy"]}),
    )  # fmt: skip
    assert max(recorded, key=lambda step: recorded[step]) <= 20
    assert trained.selected["train_val"].step > 20


def test_a_row_that_is_twice_in_a_batch_gets_two_draws(accelerator: Accelerator) -> None:
    """λ of LISA: mixed with one and the same partner, two copies of a row differ."""
    job = make_job(LISA, steps=4)
    algorithm, twice = LISA(job.setup), 0
    for step in range(4):
        batch = step_batch(job, Training(batch_size=60), accelerator, step).parts[0]
        everyone = torch.ones_like(batch.y, dtype=torch.bool)
        same = batch._replace(partner=torch.zeros_like(batch.x), has_partner=everyone)
        mixed = algorithm.on_inputs(same, step).x
        order = batch.row.argsort()
        for one, other in zip(order[:-1].tolist(), order[1:].tolist(), strict=True):
            if batch.row[one] == batch.row[other]:
                assert torch.equal(batch.x[one], batch.x[other]) and not torch.equal(mixed[one], mixed[other])
                twice += 1
    assert twice > 10


def test_partners_from_all_images_are_read_and_augmented_like_any(accelerator: Accelerator) -> None:
    """End to end and in the bank: x_j is a training image of the same class and another domain."""
    make = partial(LISA, partners="all")
    job, training = make_job(make, steps=4), Training(batch_size=4, accumulation=2)
    labels, domains = torch.from_numpy(digits().labels), torch.from_numpy(digits().domains)
    images = Images(digits(), SmallCNN.preprocessing, "none", accelerator)
    images.workers = 0
    batches = TrainingBatches(under(training, job), images, digit_annotations(), accelerator)
    pool = torch.cat(job.split.train).tolist()
    outside = 0
    for step, batch in batches.begin():
        partners = batches.partners(step)
        assert partners is not None
        for part in batch.parts:
            assert part.partner is not None and part.has_partner is not None and part.has_partner.all()
            for number, place in enumerate(part.position.tolist()):
                row = int(partners.row[place])
                assert row in pool and labels[row] == part.y[number] and domains[row] != part.domain[number]
                assert torch.equal(part.partner[number], images.plain[row][0]) and part.partner_y[number] == labels[row]
                outside += row not in batch.full_batch.row.tolist()
    assert outside > 10
