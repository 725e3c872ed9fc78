"""Preprocessing equals that of timm and of open_clip bit for bit."""

import numpy as np
import open_clip
import pytest
import timm.data
import torch
from PIL import Image
from pydantic import ValidationError

from xdm_ft.images.transforms import (
    Preprocessing,
    PreprocessingOverrides,
    augmenting_transform,
    evaluation_transform,
    normalized,
    normalizing_transform,
    training_transform,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = [(227, 227), (64, 48), (31, 200), (500, 333), (32, 32)]  # width, height


def images() -> list[Image.Image]:
    noise = np.random.default_rng(0)
    return [Image.fromarray(noise.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in SIZES]


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("crop", [1.0, 0.95, 0.875])
@pytest.mark.parametrize(("resize", "crop_mode"), [("native", "center"), ("squash", "squash"), ("pad", "border")])
def test_equals_timm(resize: str, crop_mode: str, crop: float, interpolation: str) -> None:
    own = timm.data.create_transform(
        (3, 56, 56), mean=MEAN, std=STD, interpolation=interpolation, crop_pct=crop, crop_mode=crop_mode
    )
    preprocessing = Preprocessing(mean=MEAN, std=STD, size=56, crop=crop, interpolation=interpolation, resize=resize)
    ours = evaluation_transform(preprocessing)
    for image in images():
        assert torch.equal(ours(image), own(image))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("resize", "mode"), [("native", "shortest"), ("squash", "squash")])
def test_equals_open_clip(resize: str, mode: str, interpolation: str) -> None:
    own = open_clip.image_transform(
        56, is_train=False, mean=MEAN, std=STD, resize_mode=mode, interpolation=interpolation
    )
    preprocessing = Preprocessing(mean=MEAN, std=STD, size=56, interpolation=interpolation, resize=resize)
    ours = evaluation_transform(preprocessing)
    for image in images():
        assert torch.equal(ours(image), own(image))


def test_shape_type_and_values() -> None:
    black = Image.new("RGB", (40, 20))
    preprocessing = Preprocessing(mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 1.0), size=16, resize="pad")
    tensor = evaluation_transform(preprocessing)(black)
    assert tensor.dtype == torch.float32
    assert tensor.shape == (3, 16, 16)
    assert tensor[:, 8, 8].tolist() == [-1.0, -1.0, 0.0]
    # the padding is the mean colour, rounded to 8 bits
    assert tensor[:, 0, 8].abs().max() < 0.01


def test_overrides_change_what_they_name() -> None:
    own = Preprocessing(mean=MEAN, std=STD, size=224, crop=0.875)
    changed = PreprocessingOverrides(size=96, resize="squash").applied_to(own)
    assert changed == Preprocessing(mean=MEAN, std=STD, size=96, crop=0.875, resize="squash")
    assert PreprocessingOverrides().applied_to(own) == own


def test_no_augmentation_is_the_evaluation_transform() -> None:
    preprocessing = Preprocessing(mean=MEAN, std=STD, size=56, resize="pad")
    for image in images():
        expected = evaluation_transform(preprocessing)(image)
        assert torch.equal(training_transform(preprocessing, "none")(image), expected)


def test_domainbeds_augmentation_in_the_encoders_own_numbers() -> None:
    """Against a copy of DomainBed's list of transforms, whose size, mean and std are this encoder's too."""
    from torchvision import transforms

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
    preprocessing = Preprocessing(mean=MEAN, std=STD, size=224, crop=0.875, interpolation="bilinear")
    ours = training_transform(preprocessing, "domainbed")
    for seed, image in enumerate(images()):
        torch.manual_seed(seed)
        expected = domainbeds(image)
        torch.manual_seed(seed)
        assert torch.equal(ours(image), expected)
        assert not torch.equal(ours(image), expected)  # other draws

    own = preprocessing.model_copy(update={"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25), "size": 32})
    black = training_transform(own, "domainbed")(Image.new("RGB", (50, 40)))
    assert black.shape == (3, 32, 32) and black.dtype == torch.float32
    assert torch.equal(black, torch.full_like(black, -2.0))


@pytest.mark.parametrize(
    "values", [{"std": [0, 1, 1]}, {"std": [-1, 1, 1]}, {"std": [1, 1, 1e-50]}, {"crop": 1e-9}, {"mean": [0, 1e308, 0]}]
)
def test_values_that_can_not_be_computed_with_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        PreprocessingOverrides(**values)


def test_batches_are_normalised_to_the_same_bits_as_single_images() -> None:
    """All 256 values in each channel, with the mean and deviation of ImageNet and of CLIP."""
    noise = np.random.default_rng(0)
    pixels = noise.permuted(np.arange(3 * 32 * 32 * 3).reshape(3, 32, 32, 3) % 256, axis=2).astype(np.uint8)
    for mean, std in ((MEAN, STD), ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))):
        preprocessing = Preprocessing(mean=mean, std=std, size=32)
        one_by_one = torch.stack([normalizing_transform(preprocessing)(Image.fromarray(image)) for image in pixels])
        batch = normalized(torch.from_numpy(pixels), preprocessing)
        assert torch.equal(batch, one_by_one)
        assert batch.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
def test_a_gpu_normalises_to_rounding() -> None:
    pixels, preprocessing = (
        torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1),
        Preprocessing(mean=MEAN, std=STD, size=16),
    )
    pixels = pixels.expand(2, 16, 16, 3).contiguous()
    on_gpu = normalized(pixels.cuda(), preprocessing).cpu()
    torch.testing.assert_close(on_gpu, normalized(pixels, preprocessing), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("augmentation", ["none", "domainbed"])
def test_the_image_of_an_augmentation_is_that_of_the_training_transform(augmentation: str) -> None:
    preprocessing, (image, *_) = Preprocessing(mean=MEAN, std=STD, size=24), images()
    torch.manual_seed(3)
    expected = training_transform(preprocessing, augmentation)(image)
    torch.manual_seed(3)
    pixels = augmenting_transform(preprocessing, augmentation)(image)
    assert torch.equal(normalizing_transform(preprocessing)(pixels), expected)
