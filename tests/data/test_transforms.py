"""Preprocessing equals that of timm and of open_clip bit for bit."""

import numpy as np
import open_clip
import pytest
import timm.data
import torch
from PIL import Image
from pydantic import ValidationError
from torchvision import transforms

from xdm_ft.augmentations import TrainingTransform
from xdm_ft.images.transforms import (
    Preprocessing,
    PreprocessingOverrides,
    evaluation_transform,
    normalize,
    normalizing_transform,
)
from xdm_ft.recipe.method import augmentations_of

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = [(227, 227), (64, 48), (31, 200), (500, 333), (32, 32)]  # width, height
DRAWS = np.random.default_rng(0)
IMAGES = [Image.fromarray(DRAWS.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in SIZES]


def own(**settings: object) -> Preprocessing:
    return Preprocessing(**{"mean": MEAN, "std": STD, "size": 56, **settings})


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize(("resize", "crop_mode"), [("native", "center"), ("squash", "squash"), ("pad", "border")])
def test_equals_timm(resize: str, crop_mode: str, interpolation: str) -> None:
    for crop in (1.0, 0.95, 0.875):
        how = {"interpolation": interpolation, "crop_pct": crop, "crop_mode": crop_mode}
        theirs = timm.data.create_transform((3, 56, 56), mean=MEAN, std=STD, **how)
        ours = evaluation_transform(own(crop=crop, interpolation=interpolation, resize=resize))
        assert all(torch.equal(ours(image), theirs(image)) for image in IMAGES)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("resize", "mode"), [("native", "shortest"), ("squash", "squash")])
def test_equals_open_clip(resize: str, mode: str, interpolation: str) -> None:
    how = {"is_train": False, "resize_mode": mode, "interpolation": interpolation}
    theirs = open_clip.image_transform(56, mean=MEAN, std=STD, **how)
    ours = evaluation_transform(own(interpolation=interpolation, resize=resize))
    assert all(torch.equal(ours(image), theirs(image)) for image in IMAGES)


def test_overrides() -> None:
    changed = PreprocessingOverrides(size=96, resize="squash").applied_to(own(crop=0.875))
    assert changed == own(size=96, crop=0.875, resize="squash")
    assert PreprocessingOverrides().applied_to(own()) == own()
    for values in (
        {"std": [0, 1, 1]},
        {"std": [-1, 1, 1]},
        {"std": [1, 1, 1e-50]},
        {"crop": 1e-9},
        {"mean": [1e308] * 3},
    ):
        with pytest.raises(ValidationError):
            PreprocessingOverrides(**values)


def test_domainbeds_augmentation_in_the_encoders_own_numbers() -> None:
    """Against a copy of DomainBed's list of transforms, whose size, mean and std are this encoder's too."""
    domainbeds = transforms.Compose(
        [
            transforms.RandomResizedCrop(224, scale=(0.7, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.3, 0.3, 0.3, 0.3),
            transforms.RandomGrayscale(),
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )
    preprocessing = own(size=224, crop=0.875, interpolation="bilinear")
    ours = TrainingTransform(preprocessing, augmentations_of("domainbed")).tensor
    for seed, image in enumerate(IMAGES):
        torch.manual_seed(seed)
        expected = domainbeds(image)
        assert torch.equal(ours(image, seed), expected)
        assert not torch.equal(ours(image, seed + 1), expected)
        plain = TrainingTransform(preprocessing, augmentations_of("none")).tensor
        assert torch.equal(plain(image, seed), evaluation_transform(preprocessing)(image))

    other = preprocessing.model_copy(update={"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25), "size": 32})
    black = TrainingTransform(other, augmentations_of("domainbed")).tensor(Image.new("RGB", (50, 40)), 0)
    assert black.dtype == torch.float32 and torch.equal(black, torch.full((3, 32, 32), -2.0))


def test_batches_are_normalised_to_the_same_bits_as_single_images() -> None:
    """All 256 values in each channel, with the mean and deviation of ImageNet and of CLIP."""
    pixels = (
        np.random.default_rng(1)
        .permuted(np.arange(3 * 32 * 32 * 3).reshape(3, 32, 32, 3) % 256, axis=2)
        .astype(np.uint8)
    )
    for mean, std in ((MEAN, STD), ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))):
        preprocessing = own(mean=mean, std=std, size=32)
        each = torch.stack([normalizing_transform(preprocessing)(Image.fromarray(image)) for image in pixels])
        batch = normalize(torch.from_numpy(pixels), preprocessing)
        assert torch.equal(batch, each) and batch.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
def test_a_gpu_normalises_to_rounding() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(2, 16, 16, 3).contiguous()
    on_gpu = normalize(pixels.cuda(), own(size=16)).cpu()
    torch.testing.assert_close(on_gpu, normalize(pixels, own(size=16)), rtol=1e-6, atol=1e-6)
