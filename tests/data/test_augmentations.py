"""Each augmentation by hand, and what all of them promise."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from xdm_ft.augmentations import Augmentations, Draw, TrainingTransform
from xdm_ft.augmentations.stain import STAINS, jitter_stains
from xdm_ft.images.transforms import Preprocessing, resizing_transform
from xdm_ft.recipe import components
from xdm_ft.recipe.method import augmentations_of

NAMES = components.names("augmentations")
PREPROCESSING = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=32)
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 40, 3), dtype=np.uint8))
SQUARE = NOISE.crop((0, 0, 32, 32))


def changed(value: Any, seed: int = 3, image: Image.Image = SQUARE) -> np.ndarray:
    made = augmentations_of(value)
    assert made is not None
    return np.asarray(TrainingTransform(PREPROCESSING, made)(image, seed))


def grey_levels(one: np.ndarray, other: np.ndarray) -> int:
    return int(np.abs(one.astype(int) - other.astype(int)).max())


# ---- All of them


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(40, 48), (7, 90), (1, 1), (300, 2)])
def test_an_image_of_any_size_becomes_what_the_encoder_reads_by_its_seed_alone(
    name: str, size: tuple[int, int]
) -> None:
    image, state = NOISE.resize(size), torch.get_rng_state()
    first = changed(name, image=image)
    assert first.shape == (32, 32, 3) and first.dtype == np.uint8
    torch.rand(3)
    assert np.array_equal(first, changed(name, image=image))
    torch.set_rng_state(state)
    changed(name, image=image)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_differ_and_what_is_pickled_is_the_same(name: str) -> None:
    many = {changed(name, seed).tobytes() for seed in (*range(30), -(1 << 63), (1 << 63) - 1)}
    assert len(many) > (1 if name == "grey" else 5)
    transform = TrainingTransform(PREPROCESSING, augmentations_of(name) or Augmentations())
    again = pickle.loads(pickle.dumps(transform))
    assert again == transform and np.array_equal(again(SQUARE, 1), transform(SQUARE, 1))


@pytest.mark.parametrize(
    "neutral",
    [
        {"colour": dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0)},
        {"grey": {"probability": 0}},
        {"stain": {"strength": 0}},
        {"blur": {"sigma": [0.01, 0.01]}},
        {"crop": {"scale": [1, 1]}},
    ],
)
def test_without_strength_the_image_stays(neutral: dict[str, Any]) -> None:
    # a crop of all of a square has sides that differ by nothing
    assert all(grey_levels(changed(neutral, seed), np.asarray(SQUARE)) <= 1 for seed in range(20))


def test_they_work_in_the_order_of_the_list_and_a_crop_in_place_of_the_resizing() -> None:
    def draw(position: int) -> Draw:
        return Draw(3, position)

    grey, blur, crop = (augmentations_of({name: keys})[0] for name, keys in (  # type: ignore[index]
        ("grey", {"probability": 1}), ("blur", {}), ("crop", {})
    ))  # fmt: skip
    resized = resizing_transform(PREPROCESSING)(NOISE)
    by_hand = blur.apply(grey.apply(resized, draw(0), PREPROCESSING), draw(1), PREPROCESSING)
    assert np.array_equal(changed([{"grey": {"probability": 1}}, "blur"], image=NOISE), by_hand)
    cropped = crop.apply(NOISE, draw(0), PREPROCESSING)
    assert np.array_equal(changed(["blur", "crop"], image=NOISE), blur.apply(cropped, draw(1), PREPROCESSING))
    assert augmentations_of(["blur", "crop"]) == augmentations_of(["crop", {"blur": None}])


# ---- Each


def test_a_flip_is_one_of_the_eight_symmetries_each_as_likely() -> None:
    image = np.asarray(SQUARE)
    eight = [np.rot90(side, k) for side in (image, image[:, ::-1]) for k in range(4)]
    drawn = [changed("flip", seed) for seed in range(800)]
    counts = [sum(np.array_equal(one, symmetry) for one in drawn) for symmetry in eight]
    assert sum(counts) == 800 and min(counts) > 60 and max(counts) < 140
    sides = [changed({"flip": {"vertical": False, "quarter_turns": False}}, seed) for seed in range(200)]
    counts = [sum(np.array_equal(one, side) for one in sides) for side in (image, image[:, ::-1])]
    assert sum(counts) == 200 and min(counts) > 60


def test_a_crop_has_a_share_of_the_area_and_an_aspect_within_bounds_and_lies_anywhere() -> None:
    """Read off an image whose pixels are their own coordinates."""
    width, height = 120, 90
    y, x = np.mgrid[:height, :width]
    coordinates = Image.fromarray(np.stack([x, y, 0 * x], -1).astype(np.uint8))
    shares, ratios, left = [], [], []
    for seed in range(300):
        pixels = changed({"crop": {"scale": [0.2, 0.6]}}, seed, coordinates).astype(float)
        # interpolation keeps a ramp: its slope is the crop's side over the output's
        w, h = ((pixels[..., i].max() - pixels[..., i].min()) * 32 / 31 for i in (0, 1))
        shares.append(w * h / width / height)
        ratios.append(w / h)
        left.append(pixels[..., 0].min())
    assert 0.17 < min(shares) < 0.25 and 0.5 < max(shares) < 0.66
    assert 0.65 < min(ratios) < 0.85 and 1.2 < max(ratios) < 1.5
    assert min(left) < 5 and max(left) > 60


def test_colour_stays_within_its_factors() -> None:
    grey = Image.new("RGB", (32, 32), (100, 100, 100))
    only = {"colour": {"brightness": 0.5, "contrast": 0, "saturation": 0, "hue": 0}}
    values = [int(changed(only, seed, grey)[0, 0, 0]) for seed in range(200)]
    assert 50 <= min(values) < 55 and 145 < max(values) <= 150
    assert len({changed("colour", seed).tobytes() for seed in range(50)}) == 50


def test_grey_has_its_share() -> None:
    grey = [np.ptp(changed({"grey": {"probability": 0.3}}, seed).astype(int), 2).max() == 0 for seed in range(400)]
    assert 85 < sum(grey) < 155


def test_a_blur_is_the_gaussian_of_its_sigma() -> None:
    from scipy.ndimage import gaussian_filter

    blurred = changed({"blur": {"sigma": [1.5, 1.5]}})
    by_hand = gaussian_filter(np.asarray(SQUARE).astype(float), (1.5, 1.5, 0), mode="mirror", truncate=10 / 3)
    assert grey_levels(blurred, np.rint(by_hand)) <= 1


def test_jpeg_is_that_of_its_quality() -> None:
    smooth = SQUARE.resize((8, 8)).resize((32, 32), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    smooth.save(file, "JPEG", quality=60)
    assert np.array_equal(changed({"jpeg": {"quality": [60, 60]}}, image=smooth), Image.open(file))


# ---- Stain


def authors(pixels: np.ndarray, alpha: Sequence[float], beta: Sequence[float]) -> np.ndarray:
    """Gao et al. (2023), with given draws: of pixels P in 0…1."""
    matrix = torch.tensor([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
    p = torch.from_numpy(pixels).float() / 255
    s = torch.matmul(-torch.log(255 * p + 1e-6), torch.linalg.inv(matrix))
    s = torch.tensor(alpha) * s + torch.tensor(beta)
    p = (torch.exp(-torch.matmul(s, matrix)) - 1e-6) / 255
    return (p.clip(0, 1) * 255).round().numpy()


DRAWN = st.lists(st.floats(-0.25, 0.25, width=32), min_size=3, max_size=3)


@given(arrays(np.uint8, (4, 5, 3)), DRAWN, DRAWN)
def test_stain_equals_the_authors_code_to_one_grey_level(
    pixels: np.ndarray, alpha: list[float], beta: list[float]
) -> None:
    alpha = [1 + of_stain for of_stain in alpha]
    assert grey_levels(jitter_stains(pixels, np.array(alpha), np.array(beta)), authors(pixels, alpha, beta)) <= 1


def test_strength_zero_is_the_identity_at_every_value_and_white_moves_otherwise() -> None:
    values = np.stack(np.meshgrid(*[np.arange(0, 256, 5)] * 3), -1).reshape(1, -1, 3).astype(np.uint8)
    assert grey_levels(jitter_stains(values, np.ones(3), np.zeros(3)), values) <= 1
    white = np.full((1, 1, 3), 255, np.uint8)
    assert grey_levels(jitter_stains(white, np.array([0.95, 1, 1]), np.zeros(3)), white) > 1


def test_the_stains_are_those_of_scikit_image() -> None:
    rgb_from_hed = [[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]]
    assert np.array_equal(STAINS, rgb_from_hed)


def test_stain_draws_uniformly_and_independently_within_its_strength(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def noted(pixels: np.ndarray, *factors: np.ndarray) -> np.ndarray:
        drawn.append(np.concatenate(factors))
        return pixels

    monkeypatch.setattr("xdm_ft.augmentations.stain.jitter_stains", noted)
    for seed in range(2000):
        changed({"stain": {"strength": 0.2}}, seed)
    values = np.array(drawn) - [1, 1, 1, 0, 0, 0]
    assert np.abs(values).max() <= 0.2 and np.abs(values.mean(0)).max() < 0.01
    np.testing.assert_allclose(values.std(0), 0.2 / 3**0.5, rtol=0.05)
    assert np.abs(np.corrcoef(values.T) - np.eye(6)).max() < 0.1


# ---- What a recipe says


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("none", "none"),
        (["none"], "none"),
        ("flip", "flip"),
        ({"stain": {"strength": 0.1}}, "stain (strength 0.1)"),
        (["flip", {"stain": {"strength": 0.05}}], "flip + stain"),
        ({"blur": None, "grey": {}}, "blur + grey"),
        (["stain", "domainbed"], "domainbed + stain"),
    ],
)
def test_a_value_in_words(value: Any, text: str) -> None:
    assert str(augmentations_of(value)) == text


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("stian", 'no "stian" in augmentations; did you mean "stain"?'),
        (["flip", {"flip": {}}], "names flip twice; keep one"),
        (["crop", "domainbed"], "crop and domainbed both replace the encoder's resizing; keep one"),
        (["none", "flip"], "none stands alone; leave it out of the list"),
        ({"stain": {"strenth": 0.1}}, 'stain: unknown key strenth; did you mean "strength"?'),
        ({"stain": {"strength": 2}}, "stain.strength: input should be less than or equal to 1"),
        ({"stain": {"strength": True}}, "stain.strength: must be a number, not true"),
        ({"stain": 0.1}, "stain: must be a mapping of settings (strength)"),
        ({"crop": {"scale": [1, 0.5]}}, "crop.scale: must be two numbers, the lower one first"),
        ({"crop": {"scale": [0, 1]}}, "crop.scale.0: input should be greater than 0"),
        ({"domainbed": {"scale": 1}}, "domainbed: unknown key scale; it has none"),
        ([], "must name an augmentation; write none for none"),
        ({}, "must name an augmentation; write none for none"),
        (3, "must be a name, a mapping {name: settings}, or a list of them"),
        ([["flip"]], "must be a name, a mapping {name: settings}, or a list of them"),
    ],
)
def test_a_value_that_cannot_be_is_one_line(value: Any, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        augmentations_of(value)
    assert str(caught.value) == problem
