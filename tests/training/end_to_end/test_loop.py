"""The loop: one model trained end to end, against loops written out by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from loop_models import (
    SmallCNN,
    WithDomainHead,
    digit_annotations,
    digits,
    final_state,
    make_job,
    one_process,
    rows_of,
    split,
    train,
)
from own_training import under
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.encoders.timm import Timm
from xdm_ft.images.decode import UnreadableImage
from xdm_ft.images.loader import ImageRows
from xdm_ft.images.transforms import evaluation_transform, training_transform
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.randomness import Stream, bits
from xdm_ft.runtime.tensors import Batch, Losses
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Schedule, Trained, Training
from xdm_ft.training.end_to_end.batch_norm import synchronised
from xdm_ft.training.end_to_end.batches import StepBatch, TrainingBatches, split_batch
from xdm_ft.training.end_to_end.inputs import Images
from xdm_ft.training.end_to_end.model import EndToEnd
from xdm_ft.training.end_to_end.prediction import EndToEndValidation
from xdm_ft.training.end_to_end.train import predict

COSINE = Schedule(name="cosine", warmup_steps=2)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with one_process() as accelerator:
        yield accelerator


def read(rows: Tensor) -> Tensor:
    """Images [n,3,32,32] in the small encoder's preprocessing."""
    images = ImageRows(digits(), evaluation_transform(SmallCNN.preprocessing))
    return torch.stack([images[int(row)][0] for row in rows])


def batch_of(job: Job, training: Training, step: int) -> Batch:
    rows = rows_of(job, training, step)
    domain = torch.from_numpy(digits().domains)[rows]
    return Batch(read(rows), torch.from_numpy(digits().labels)[rows], domain, rows, torch.arange(len(rows)))


def assert_equal_states(one: dict[str, Tensor], other: dict[str, Tensor], atol: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def trained_by_hand(job: Job, encoder: SmallCNN, training: Training, batch_norm: str) -> dict[str, Tensor]:
    """Plain ERM, Adam and clipping over whole batches."""
    encoder, algorithm = copy.deepcopy(encoder), job.make(job.setup)
    encoder.train()
    if batch_norm == "frozen":
        encoder.layers[1].eval()
        encoder.layers[4].eval()
    groups = [
        {"params": list(encoder.parameters()), "lr": training.encoder_lr},
        {"params": list(algorithm.head.parameters()), "lr": job.training.lr},
    ]
    optimizer = torch.optim.Adam(groups, weight_decay=job.training.weight_decay)
    for step in range(job.setup.steps):
        batch = batch_of(job, training, step)
        loss = F.cross_entropy(algorithm.head(encoder(batch.x)), batch.y)  # equal domains: the mean of means
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], training.clip_norm)
        factor = training.schedule.factor(step, job.setup.steps)
        optimizer.param_groups[0]["lr"] = training.encoder_lr * factor
        optimizer.param_groups[1]["lr"] = job.training.lr * factor
        optimizer.step()
    return {f"encoder.{name}": value for name, value in encoder.state_dict().items()} | algorithm.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("batch_norm", ["train", "frozen"])
def test_equals_a_loop_written_out(accelerator: Accelerator, batch_norm: str) -> None:
    training = Training(batch_size=8, schedule=COSINE, clip_norm=0.5, encoder_lr=0.003)
    job, encoder = make_job(steps=6), SmallCNN()
    before = copy.deepcopy(encoder.state_dict())
    got = final_state(train(job, encoder, training, accelerator, batch_norm=batch_norm))
    assert_equal_states(got, trained_by_hand(job, encoder, training, batch_norm), atol=1e-6)

    assert_equal_states(encoder.state_dict(), before, atol=0)  # it was copied
    moved = not torch.equal(got["encoder.layers.1.running_mean"], before["layers.1.running_mean"])
    assert moved == (batch_norm == "train")
    assert not torch.equal(got["encoder.layers.1.weight"], before["layers.1.weight"])  # affine parameters train


@pytest.mark.slow
@pytest.mark.parametrize("batch_size, accumulation", [(6, 3), (5, 2)])
@pytest.mark.parametrize("kind", ["per_domain", "pooled"])
def test_accumulation_gives_the_whole_batch_s_gradient(
    accelerator: Accelerator, batch_size: int, accumulation: int, kind: str
) -> None:
    training = Training(batch_size=batch_size, sampler=kind, optimizer="sgd", encoder_lr=0.01, loss_average="sample")
    job = make_job(lambda setup: ERM(Setup(setup.task, setup.width, setup.steps, setup.seed, "sample")))
    whole = train(job, SmallCNN(), training, accelerator, batch_norm="frozen")
    cut = training.model_copy(update={"accumulation": accumulation})
    assert_equal_states(
        final_state(train(job, SmallCNN(), cut, accelerator, batch_norm="frozen")), final_state(whole), atol=1e-6
    )


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


def test_auxiliary_modules_are_not_clipped_and_buffers_are_committed_once(accelerator: Accelerator) -> None:
    training = Training(batch_size=4, accumulation=2, optimizer="sgd", momentum=0.0, encoder_lr=10.0, clip_norm=1e-3)
    job, encoder = make_job(WithDomainHead, steps=1, weight_decay=0.0), SmallCNN()
    got = final_state(train(job, encoder, training, accelerator, batch_norm="frozen"))

    algorithm, batch = job.make(job.setup), batch_of(job, training, 0)
    losses = algorithm(encoder(batch.x), batch, 0)
    auxiliary = torch.autograd.grad(losses.auxiliary, algorithm.domain_head.weight, retain_graph=True)[0]
    expected = algorithm.domain_head.weight - job.training.lr * auxiliary
    torch.testing.assert_close(got["domain_head.weight"], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(got["memory"], losses.buffers["memory"])  # equal parts: the mean of the micro-batches'
    assert got["taken"] == 1

    main = [p for p in encoder.layers.parameters()] + list(algorithm.head.parameters())
    gradients = torch.autograd.grad(losses.total, main)
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    assert norm > 1e-2  # else clipping would not show
    step = got["encoder.layers.0.weight"] - encoder.layers[0].weight
    torch.testing.assert_close(step, -training.encoder_lr * 1e-3 / norm * gradients[0], rtol=1e-3, atol=1e-8)


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


def test_oracle_follows_where_its_steps_are_tied(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = EndToEndValidation.evaluate

    def tied(self: EndToEndValidation, inner: EndToEnd) -> dict[str, float] | None:
        values = measured(self, inner)
        return values and values | {"oracle": 1.0}

    monkeypatch.setattr(EndToEndValidation, "evaluate", tied)
    training, rules = Training(batch_size=16, encoder_lr=0.01, evaluate_every=5), ("train_val", "oracle")
    trained = train(make_job(steps=15), SmallCNN(), training, accelerator, rules=rules, metric="nll")
    own, oracle = trained.selected["train_val"], trained.selected["oracle"]
    assert own.step > 5, "the loss falls"
    assert oracle.step == own.step and oracle.state is own.state


def test_same_seed_same_bits(accelerator: Accelerator) -> None:
    training = Training(batch_size=4)
    first = final_state(train(make_job(), SmallCNN(dropout=0.5), training, accelerator))
    torch.rand(7)
    again = final_state(train(make_job(), SmallCNN(dropout=0.5), training, accelerator))
    other = final_state(train(make_job(seed=4), SmallCNN(dropout=0.5), training, accelerator))
    assert_equal_states(first, again, atol=0)
    assert not torch.equal(first["encoder.layers.0.weight"], other["encoder.layers.0.weight"])


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


def test_a_loss_that_is_not_finite_stops_the_model(accelerator: Accelerator) -> None:
    class Breaks(ERM):
        def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
            losses = super().loss(z, batch, step)
            return losses._replace(total=losses.total * (float("nan") if step == 2 else 1))

    training, job = Training(batch_size=2, evaluate_every=1), make_job(Breaks)
    trained = train(job, SmallCNN(), training, accelerator)
    assert trained.selected == {}
    rows = ", ".join(map(str, batch_of(job, training, 2).index.tolist()))
    assert trained.failure == f"the loss is nan at step 3 of 4; images in its batch: rows {rows}"


def test_an_unreadable_image_is_named(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    job, training = make_job(), Training(batch_size=4)
    bad, image = int(batch_of(job, training, 1).index[0]), digits().image

    def image_or_fault(row: int) -> Any:
        if row == bad:
            raise UnreadableImage(digits().name(row), "truncated")
        return image(row)

    monkeypatch.setattr(digits(), "image", image_or_fault)
    with pytest.raises(UserError) as caught:
        train(job, SmallCNN(), training, accelerator)
    assert f"scan {bad} " in str(caught.value) and "truncated" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fp16_is_refused_with_sharpness_and_on_a_cpu() -> None:
    with one_process("fp16") as accelerator:
        with pytest.raises(UserError, match="two passes"):
            train(make_job(sharpness=SAM()), SmallCNN(), Training(batch_size=4), accelerator)
        with pytest.raises(UserError, match="needs a GPU"):
            train(make_job(), SmallCNN(), Training(batch_size=4), accelerator)


def test_accumulation_by_accelerate_is_refused(accelerator: Accelerator) -> None:
    accelerator.gradient_accumulation_steps = 2
    with pytest.raises(UserError, match=r"training\.accumulation"):
        train(make_job(), SmallCNN(), Training(batch_size=4), accelerator)


@pytest.mark.slow
def test_more_micro_batches_than_images_are_refused(accelerator: Accelerator) -> None:
    with pytest.raises(UserError, match=r"training\.batch_size: 2"):
        train(make_job(), SmallCNN(), Training(batch_size=2, accumulation=3), accelerator)


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
            assert torch.equal(one.index, other.index) and torch.equal(one.x, other.x)
            assert torch.equal(one.y, labels[one.index]) and torch.equal(one.domain, domains[one.index])
            assert torch.equal(batch.full_batch.index[one.place], one.index)
        rows = torch.cat([part.index for part in batch.parts])
        assert torch.equal(rows.sort().values, batch_of(job, training, step).index.sort().values)
        assert torch.equal(batch.full_batch.index, batch_of(job, training, step).index)
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


@pytest.mark.slow
def test_class_balanced_batches_train_end_to_end_as_by_hand(accelerator: Accelerator) -> None:
    training = Training(batch_size=8, sampler="class_balanced", clip_norm=0.5, encoder_lr=0.003)
    job, encoder = make_job(steps=3), SmallCNN()
    got = final_state(train(job, encoder, training, accelerator))
    assert_equal_states(got, trained_by_hand(job, encoder, training, "train"), atol=1e-6)


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


def test_batch_norm_is_synchronised_on_gpus() -> None:
    inner = EndToEnd(SmallCNN(), ERM(make_job().setup), "train").train()
    names = inner.state_dict().keys()
    inner = synchronised(inner, 2, 1, torch.device("cuda"))
    layers = [layer for layer in inner.modules() if isinstance(layer, torch.nn.SyncBatchNorm)]
    assert len(layers) == 2 and all(layer.training for layer in layers) and inner.state_dict().keys() == names
