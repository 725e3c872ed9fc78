"""Planted marks and tints are found where they are; clean images, and what all sites share, have none."""

import numpy as np
import pytest
from PIL import Image

from tests.data.made_up import MadeUp
from xdm_ft.audit.facts import SIDE, low_level, marks, pick_out

NAMES = (["d0", "d1"], ["c0", "c1", "c2"])


class Scenes(MadeUp):
    """Images of soft random blobs, 40 per domain and class, as `change` of (pixels, row) changes them."""

    def __init__(self, change=lambda pixels, row: pixels):
        cells = np.repeat(np.arange(6), 40)
        super().__init__(cells % 3, cells // 3)
        self.change = change

    def image(self, row):
        rng = np.random.default_rng(row)
        coarse = np.clip(128 + 40 * rng.normal(size=(16, 16, 1)) + 10 * rng.normal(size=(16, 16, 3)), 0, 255)
        soft = Image.fromarray(coarse.astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        pixels = np.asarray(soft, float) + 4 * rng.normal(size=(SIDE, SIDE, 1))
        return Image.fromarray(np.clip(self.change(pixels, row), 0, 255).astype(np.uint8))


def found(change=lambda pixels, row: pixels, groups=None):
    data = Scenes(change)
    features = low_level(data, np.arange(len(data)))
    return marks(features, data.labels, data.domains, *NAMES, groups)


def text(pixels, at=(100, 20)):
    drawn = np.random.default_rng(7).random((8, 40, 1)) < 0.5
    pixels = pixels.copy()
    pixels[at[0] : at[0] + 8, at[1] : at[1] + 40] += 40 * drawn
    return pixels


def tint(pixels):
    return pixels * (1.15, 1.0, 0.85)


def test_clean_images_have_no_mark():
    assert found() == []
    assert found(lambda pixels, row: pixels.mean(2, keepdims=True).repeat(3, 2)) == [], "grey"


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("kind", "change"), [("local mark", text), ("tint", tint)])
def test_a_mark_of_a_class_at_one_site_is_found_there(kind, change, every):
    [mark] = found(lambda pixels, row: change(pixels) if row < 40 and row % 4 < 4 // every else pixels)
    assert (mark.kind, mark.domain, mark.label, mark.found) == (kind, "d0", "c0", True)
    assert mark.share == pytest.approx(1 / every, abs=0.1) and mark.low < mark.share
    assert mark.elsewhere < 0.2
    assert mark.to_json()["class"] == "c0"


def test_what_the_class_shows_at_every_site_is_no_mark():
    rows = found(lambda pixels, row: text(pixels) if row % 120 < 40 else pixels)
    assert {row.domain for row in rows} == {"d0", "d1"} and not any(row.found for row in rows)


def test_a_broad_shape_is_no_local_mark():
    def shape(pixels, row):  # a line across half of the image
        pixels = pixels.copy()
        pixels[60:62, 20:90] += 25 * (row < 40)
        return pixels

    rows = [row for row in found(shape) if row.kind == "local mark"]
    assert rows and not any(row.found for row in rows)


def test_images_of_few_groups_prove_little():
    marked = found(lambda pixels, row: text(pixels) if row < 40 and row % 2 else pixels, groups=np.arange(240) // 8)
    assert marked == []


def test_picked_out_by_hand():
    score, of_class = np.array([*range(200), 500, 199.5, 100, 198.5]), np.arange(204) >= 200
    assert pick_out(score, of_class) == 3 / 4  # above all but two of 200 others
