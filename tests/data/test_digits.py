"""The digits: every scan appears once, in one style, and its pixels never change."""

import hashlib

import numpy as np
from sklearn.datasets import load_digits

from xdm_ft.data.digits import Digits

PINNED = "b1a30ef89e573046c12e465bbb7dd259"
DIGITS, SCANS = Digits(), load_digits()


def test_rows_are_the_scans_and_pixels_never_change() -> None:
    found = hashlib.sha256(DIGITS.pixels.tobytes() + "".join(DIGITS.splits).encode()).hexdigest()
    assert found.startswith(PINNED), f"the digits changed, and with them every number measured on them: {found}"
    assert np.array_equal(DIGITS.labels, SCANS.target) and len(DIGITS) == 1797
    assert DIGITS.class_names[3] == "three" and len(DIGITS.class_names) == 10
    image = DIGITS.image(5)
    assert (image.mode, image.size) == ("RGB", (32, 32)) and "scan 5" in DIGITS.name(5)
    assert DIGITS.content(5) == np.asarray(image).tobytes()
    assert len({DIGITS.content(row) for row in range(len(DIGITS))}) == len(DIGITS), "no two images are the same"


def test_every_class_is_dealt_evenly_to_the_styles_and_split_80_to_20() -> None:
    stratum = DIGITS.domains * 10 + DIGITS.labels
    count = np.bincount(stratum, minlength=40).reshape(4, 10)
    assert np.abs(count - np.bincount(DIGITS.labels) / 4).max() <= 1 and np.ptp(count.sum(1)) <= 1
    assert set(DIGITS.splits) == {"train", "val"}
    for s in range(40):
        part = DIGITS.splits[stratum == s] == "val"
        assert part.sum() == round(0.2 * len(part))


def test_styles_look_different_and_digits_stay_visible() -> None:
    grey = DIGITS.pixels.astype(float).mean(3)  # [N,32,32]
    ink, chalk, blurred, _ = (grey[DIGITS.domains == d].mean() for d in range(4))
    assert ink > 180 > blurred > chalk  # dark on paper, grey, light on a dark board
    roughness = [np.abs(np.diff(grey[DIGITS.domains == d], axis=2)).mean() for d in range(4)]
    assert roughness[2] == min(roughness)  # out of focus
    # the scan's strokes stand out from the rim of the image in every style
    ground = np.concatenate([grey[:, :3].reshape(len(grey), -1), grey[:, -3:].reshape(len(grey), -1)], axis=1)
    strokes = SCANS.images.repeat(4, 1).repeat(4, 2) >= 12
    contrast = np.abs((grey * strokes).sum((1, 2)) / strokes.sum((1, 2)) - np.median(ground, axis=1))
    assert all(np.median(contrast[DIGITS.domains == d]) > 20 for d in range(4))
