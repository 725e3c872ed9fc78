"""Small encoders, data and jobs for the tests of training end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from bank_problems import WithDomainHead, soften, under
from torch import Tensor, nn

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.augmentations import NO_AUGMENTATION, Augmentations
from xdm_ft.augmentations.domainbed import DomainBed
from xdm_ft.core import Annotations, Batch, Criteria, ModelKey, Task
from xdm_ft.cut import LastBlocks, Lora, LowRank
from xdm_ft.cut.cut import Below
from xdm_ft.data.digits import Digits
from xdm_ft.encoders import Encoder, Portable
from xdm_ft.encoders.timm import Timm
from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache import cache_folder
from xdm_ft.features.extract import extract
from xdm_ft.features.hashes import hash_files
from xdm_ft.heads import Head
from xdm_ft.heads.linear import Linear
from xdm_ft.images import ImageDataset
from xdm_ft.images.loader import ImageRows
from xdm_ft.images.transforms import Preprocessing, PreprocessingOverrides, evaluation_transform
from xdm_ft.protocol.splits import Split
from xdm_ft.sharpness import Sharpness
from xdm_ft.training import Job, Trained, Training
from xdm_ft.training.end_to_end.inputs import ImageInputs, StepBatch, TrainingBatches
from xdm_ft.training.end_to_end.model import FULL_ENCODER, EncoderPart, cut_of
from xdm_ft.training.end_to_end.prediction import EndToEndPredictor
from xdm_ft.training.end_to_end.train import train_model

__all__ = ["WithDomainHead"]
TRAIN_DOMAINS, TRAIN_ROWS, VAL_ROWS = 3, 60, 40  # per domain
PREPROCESSING = Preprocessing(mean=(0.5, 0.5, 0.5), std=(0.3, 0.3, 0.3), size=32, interpolation="bilinear")


class _Tiny(Encoder):
    normalize, pretraining, preprocessing = False, "random weights", PREPROCESSING

    def identity(self) -> dict[str, object]:
        return {"component": type(self).__name__}

    def portable(self) -> Portable:
        return Portable({}, self.state_dict())


class SmallCNN(_Tiny):
    """Two convolutions with batch norm, then dropout. It computes in the type of its weights."""

    width, stage_names = 256, ()

    def __init__(self, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # batch norm cancels a bias before it: its gradient is rounding alone, which Adam would make as large as any
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(dropout),
        )  # fmt: skip
        self.unreached = nn.Linear(2, 2)  # like the text side of CLIP
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        double = self.layers[0].weight.dtype == torch.float64
        z = F.adaptive_avg_pool2d(self.layers(images.double() if double else images), 4).flatten(1)
        return z if double else z.float()


class Staged(SmallCNN):
    """The small encoder with its stages named."""

    stem_names, stage_names = ("layers.0",), ("layers.2", "layers.5")


class MixedBlock(nn.Module):
    """A convolution with batch norm, then a linear layer over the channels beside a skip connection."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(before, after, 3, stride=1 if before == after else 2, padding=1, bias=False)
        self.norm, self.mix = nn.BatchNorm2d(after), nn.Linear(after, after)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.convolution(x)).relu()
        return x + self.mix(x.movedim(1, -1)).movedim(-1, 1)


class BlockCNN(_Tiny):
    """A stem, two stages of two blocks, and a final norm; batch norm everywhere."""

    width, stem_names, stage_names = 16, ("stem.0",), ("stages.0", "stages.1")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.stages = nn.Sequential(
            nn.Sequential(MixedBlock(8, 8), MixedBlock(8, 8)), nn.Sequential(MixedBlock(8, 16), MixedBlock(16, 16))
        )
        self.norm = nn.BatchNorm2d(16)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.stages(self.stem(images))).mean((2, 3)).float()

    def block_candidates(self) -> Sequence[Sequence[str]]:
        return [["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]]


def vit() -> Timm:
    """Three blocks on 5 tokens of width 64."""
    torch.manual_seed(0)
    size = PreprocessingOverrides(size=32)
    return Timm(model="test_vit", kwargs={"img_size": 32, "depth": 3}, preprocessing=size)


def blocks(number: int) -> LastBlocks:
    return LastBlocks(blocks=number)


DOMAINBED = Augmentations([DomainBed()])


def lora(**settings: Any) -> LowRank:
    return LowRank(lora=Lora(**{"rank": 2, **settings}))


def cached(encoder: Encoder, trainable: LastBlocks | LowRank, folder: Path, **settings: Any) -> EncoderPart:
    """The part above the cut, with the activations of all digits from the feature cache in the folder."""
    block = FeatureSettings(dir=folder, workers=0, **settings)
    hashes = hash_files(digits(), cache_folder(block), show=False)
    activations = extract(
        Below(cut_of(encoder, trainable)), digits(), hashes, block, on_bad_image="error", device="cpu", show=False,
        augmentations=[DOMAINBED] if block.views else [], streamed=True,
    )  # fmt: skip
    return EncoderPart(trainable, activations)


@contextmanager
def one_process(mixed_precision: str = "no") -> Iterator[Accelerator]:
    """Its accelerator, on one thread: the models are too small for more."""
    AcceleratorState._reset_state(reset_partial_state=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield Accelerator(cpu=True, mixed_precision=mixed_precision)
    finally:
        torch.set_num_threads(threads)


@cache
def digits() -> Digits:
    return Digits()


def digit_annotations(soft: bool = False) -> Annotations:
    labels, domains = torch.from_numpy(digits().labels), torch.from_numpy(digits().domains)
    return Annotations(labels, domains, domains, soft_labels=soften(labels, 10) if soft else None)


def images_of(rows: Tensor, encoder: Encoder | None = None) -> Tensor:
    """Images [n,3,32,32] in an encoder's preprocessing."""
    images = ImageRows(digits(), evaluation_transform(encoder.preprocessing if encoder else PREPROCESSING))
    return torch.stack([images[int(row)][0] for row in rows])


def split() -> Split:
    domains = torch.from_numpy(digits().domains)
    pools = [(domains == d).nonzero()[:, 0] for d in range(4)]
    names = digits().domain_names
    val = torch.cat([pool[TRAIN_ROWS : TRAIN_ROWS + VAL_ROWS] for pool in pools[:TRAIN_DOMAINS]])
    return Split(
        test_domains=names[TRAIN_DOMAINS:],
        train_domains=names[:TRAIN_DOMAINS],
        train=tuple(pool[:TRAIN_ROWS] for pool in pools[:TRAIN_DOMAINS]),
        evaluation={"train_val": val, "test": pools[3], "test_val": pools[3][:VAL_ROWS]},
        domain_of=torch.tensor([0, 1, 2, -1]),
    )


def make_job(
    make: Callable[[Setup], Algorithm] = ERM,
    steps: int = 4,
    seed: int = 3,
    sharpness: Sharpness | None = None,
    width: int = SmallCNN.width,
    lr: float = 0.01,
    weight_decay: float = 0.001,
    head: Callable[[int, int, int, int], Head] = Linear,
    **setup: Any,
) -> Job:
    task = Task(digits().class_names, split().train_domains)
    training = Training().model_copy(update={"lr": lr, "weight_decay": weight_decay})
    key = ModelKey("method", split().test_domains, seed, 0)
    return Job(key, split(), Setup(task, width, steps, seed, head=head, **setup), make, sharpness, training)


def batch_of(job: Job, training: Training, step: int, encoder: Encoder | None = None, soft: bool = False) -> Batch:
    """The full batch of `step`, with images."""
    rows = under(training, job).sampler(digit_annotations().labels).indices(step, step + 1)[0]
    labels, domains = torch.from_numpy(digits().labels)[rows], torch.from_numpy(digits().domains)[rows]
    targets = digit_annotations(soft).soft_labels
    targets = None if targets is None else targets[rows]
    return Batch(images_of(rows, encoder), labels, domains, rows, torch.arange(len(rows)), targets)


def step_batch(job: Job, training: Training, accelerator: Accelerator, step: int, soft: bool = False) -> StepBatch:
    """The batch of `step`, cut as `training.accumulation` says, in the small encoder's preprocessing."""
    images = ImageInputs(digits(), PREPROCESSING, NO_AUGMENTATION, accelerator)
    images.workers = 0
    batches = TrainingBatches(under(training, job), images, digit_annotations(soft), accelerator)
    return next(batches.begin(step))[1]


def train(job: Job, encoder: Encoder, training: Training, accelerator: Accelerator, **changes: Any) -> Trained:
    """Trains with one rule; without `evaluate_every` the selected step is the last."""
    arguments = {"rules": ("train_val",), "metric": "accuracy", "batch_norm": "train", **changes}
    job = replace(job, augmentations=arguments.pop("augmentations", NO_AUGMENTATION))
    arguments.setdefault("record", lambda step, models: None)
    criteria = Criteria(*(arguments.pop(name) for name in ("rules", "metric")))
    training = training.model_copy(update={"evaluate_every": training.evaluate_every or job.setup.steps})
    return train_model(under(training, job), encoder, digits(), digit_annotations(), criteria, accelerator, **arguments)


def predict(
    job: Job, encoder: Encoder, state: dict[str, Tensor], dataset: ImageDataset, rows: Tensor, accelerator: Accelerator,
    batch_size: int = 8, part: EncoderPart = FULL_ENCODER,
) -> Tensor:  # fmt: skip
    return EndToEndPredictor(job, encoder, dataset, accelerator, batch_size, part).logits(state, rows)


def final_state(trained: Trained) -> dict[str, Tensor]:
    assert trained.failure is None, trained.failure
    selected = trained.selected["train_val"]
    assert selected.step == trained.job.setup.steps
    return selected.state


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6, rtol: float = 1e-6) -> None:
    """All that is expected is there, and close."""
    assert expected and expected.keys() <= got.keys(), sorted(expected.keys() - got.keys())
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
