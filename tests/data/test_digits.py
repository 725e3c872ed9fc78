"""The digits: every scan appears once, in one style, and its pixels never change."""

import hashlib

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from xdm_ft.data.digits import Digits

PINNED = "b1a30ef89e573046c12e465bbb7dd259"


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits()


def test_rows_are_the_scans(digits: Digits) -> None:
    assert len(digits) == 1797
    assert np.array_equal(digits.labels, load_digits().target)
    assert digits.class_names[3] == "three"
    assert len(digits.class_names) == 10
    image = digits.image(5)
    assert isinstance(image, Image.Image)
    assert (image.mode, image.size) == ("RGB", (32, 32))
    assert digits.content(5) == np.asarray(image).tobytes()
    assert "scan 5" in digits.name(5)


def test_every_class_is_dealt_evenly_to_the_styles(digits: Digits) -> None:
    count = np.bincount(digits.domains * 10 + digits.labels, minlength=40).reshape(4, 10)
    of_class = np.bincount(digits.labels)
    assert np.abs(count - of_class / 4).max() <= 1
    assert np.ptp(count.sum(1)) <= 1


def test_the_split_is_80_to_20_in_every_class_of_every_style(digits: Digits) -> None:
    stratum = digits.domains * 10 + digits.labels
    assert set(digits.splits) == {"train", "val"}
    for s in range(40):
        part = digits.splits[stratum == s] == "val"
        assert part.sum() == round(0.2 * len(part))


def test_the_pixels_never_change(digits: Digits) -> None:
    found = hashlib.sha256(digits.pixels.tobytes() + "".join(digits.splits).encode()).hexdigest()
    assert found.startswith(PINNED), f"the digits changed, and with them every number measured on them: {found}"


def test_styles_look_different_and_digits_stay_visible(digits: Digits) -> None:
    grey = digits.pixels.astype(float).mean(3)  # [N,32,32]
    brightness = [grey[digits.domains == d].mean() for d in range(4)]
    ink, chalk, blurred, _ = brightness
    assert ink > 180 > blurred > chalk  # dark on paper, grey, light on a dark board
    ground = np.concatenate([grey[:, :3].reshape(len(grey), -1), grey[:, -3:].reshape(len(grey), -1)], axis=1)
    roughness = [np.abs(np.diff(grey[digits.domains == d], axis=2)).mean() for d in range(4)]
    assert roughness[2] == min(roughness)  # out of focus
    # the scan's strokes stand out from the rim of the image in every style
    strokes = load_digits().images.repeat(4, 1).repeat(4, 2) >= 12
    contrast = np.abs((grey * strokes).sum((1, 2)) / strokes.sum((1, 2)) - np.median(ground, axis=1))
    assert [np.median(contrast[digits.domains == d]) > 20 for d in range(4)] == [True] * 4


def test_no_two_images_are_the_same(digits: Digits) -> None:
    assert len({digits.content(row) for row in range(len(digits))}) == len(digits)


def test_class_names_can_be_replaced(digits: Digits) -> None:
    other = Digits()
    other.class_names = tuple("abcdefghij")
    assert digits.class_names[0] == "zero"
