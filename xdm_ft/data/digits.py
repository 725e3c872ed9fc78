"""scikit-learn's handwritten digits in four visual styles: a domain generalization task without a download."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from xdm_ft.images import ImageDataset
from xdm_ft.runtime.randomness import Stream, bits, integers, validation_part

SIDE = 32  # px
STYLES = ("ink", "chalk", "blurred", "texture")
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VAL_FRACTION = 0.2
SEED = 0  # of every draw below, so that the images are the same on every machine

# Every kind of draw has a number of its own, used as the `step` of the random stream.
_STYLE_OF_SCAN, _ANGLE, _SHIFT_X, _SHIFT_Y, _SIZE, _BACK, _FRONT, _GRAIN, _COARSE, _LIGHT, _POLARITY = range(11)

# Pixels are computed with integers only: floating point could round differently on another machine.
_BOARDS = np.array([[38, 84, 62], [34, 50, 96], [98, 40, 52], [70, 50, 92], [52, 58, 60]])
_CHALKS = np.array([[244, 244, 238], [248, 226, 140], [246, 188, 196], [176, 222, 248]])
_INKS = np.array([[24, 28, 44], [20, 44, 124], [122, 26, 32], [18, 82, 54]])
_BINOMIAL = np.array([1, 6, 15, 20, 15, 6, 1])  # sums to 64: a Gaussian of standard deviation 1.2 px


class Digits(ImageDataset):
    """The 1,797 scans of 8 × 8 px (UCI Optical Recognition of Handwritten Digits, Alpaydin & Kaynak 1998) as RGB 32 px.

    Each scan appears in one style (its domain) only, so that no scan of a held-out style is seen in training. Row i is
    scan i. `splits` is fixed: 80% train and 20% val of every class in every style. Images are made in memory.
    """

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        scans = load_digits()
        self.class_names, self.domain_names = WORDS, STYLES
        self.labels = scans.target.astype(np.int64)
        rows = np.arange(len(self.labels))
        # each class is shuffled and dealt to the styles like cards
        draws = bits(SEED, _STYLE_OF_SCAN, Stream.STYLE, torch.from_numpy(rows)).numpy()
        self.domains = np.empty_like(rows)
        self.domains[np.lexsort((draws, self.labels))] = rows % len(STYLES)
        self.pixels = np.empty((len(rows), SIDE, SIDE, 3), np.uint8)
        for style, painter in enumerate((_ink, _chalk, _blurred, _texture)):
            of_style = np.flatnonzero(self.domains == style)
            self.pixels[of_style] = painter(scans.images[of_style].astype(np.int64), of_style).clip(0, 255)
        stratum = self.domains * len(WORDS) + self.labels
        self.splits = np.full(len(rows), "train", dtype="<U5")
        self.splits[validation_part(rows, stratum, None, VAL_FRACTION, SEED)] = "val"

    def image(self, row: int) -> Image.Image:
        return Image.fromarray(self.pixels[row])

    def name(self, row: int) -> str:
        return f"digits, scan {row} ({STYLES[self.domains[row]]})"

    def content(self, row: int) -> bytes:
        return self.pixels[row].tobytes()

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Writes the images as files `<style>/<class>/<scan>.png`."""
        for row, (style, label) in enumerate(zip(self.domains, self.labels, strict=True)):
            path = Path(folder, STYLES[style], WORDS[label], f"{row:04}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            self.image(row).save(path)


def _draw(stream: int, rows: np.ndarray, low: int, high: int, per_row: int = 1) -> np.ndarray:
    """Returns uniform integers in low…high−1, int64 [rows, per_row]."""
    index = torch.from_numpy(rows)[:, None] * per_row + torch.arange(per_row)
    return low + integers(SEED, stream, Stream.STYLE, index, high - low).numpy()


def _ink(scans: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """A pen on cream paper: sharp dark strokes, turned by at most 6 degrees."""
    stroke = _sharpen(_place(scans, rows, _draw(_ANGLE, rows, -6, 7)), 96, 176)
    paper = np.array([252, 248, 236]) - _draw(_BACK, rows, 0, 16)[:, :, None, None]
    paper = paper + _noise(_GRAIN, rows, -5, 6)
    return _blend(paper, _INKS[_draw(_FRONT, rows, 0, len(_INKS))[:, 0]], stroke)


def _chalk(scans: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Chalk on a coloured board: pale, rough strokes on a dark ground."""
    stroke = _sharpen(_place(scans, rows, _draw(_ANGLE, rows, -10, 11)), 56, 150)
    stroke = stroke * _noise(_GRAIN, rows, 110, 256)[..., 0] // 255
    board = _BOARDS[_draw(_BACK, rows, 0, len(_BOARDS))[:, 0]][:, None, None] + _cloud(rows, 8)[..., None] // 8
    return _blend(board, _CHALKS[_draw(_FRONT, rows, 0, len(_CHALKS))[:, 0]], stroke)


def _blurred(scans: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """A photograph out of focus, turned by 12 to 30 degrees either way, grey, with little contrast and uneven light."""
    turn = _draw(_ANGLE, rows, 12, 31) * (2 * _draw(_POLARITY, rows, 0, 2) - 1)
    stroke = _blur(_blur(_place(scans, rows, turn)))
    back = np.broadcast_to(_draw(_BACK, rows, 140, 190)[:, :, None, None], (len(rows), SIDE, SIDE, 3))
    front = _draw(_FRONT, rows, 40, 75).repeat(3, axis=1)
    slope = _draw(_LIGHT, rows, -24, 25)[:, :, None] * (np.arange(SIDE) - SIDE // 2) // (SIDE // 2)  # [n,1,32]
    return _blend(back, front, stroke) + slope[..., None]


def _texture(scans: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """A digit in one colour, lighter or darker than its noisy, coloured ground."""
    stroke = _sharpen(_place(scans, rows, _draw(_ANGLE, rows, -10, 11)), 70, 150)
    dark, light = _draw(_BACK, rows, 0, 110, 3), _draw(_FRONT, rows, 165, 256, 3)
    is_light = _draw(_POLARITY, rows, 0, 2)
    front, ground = np.where(is_light, light, dark), np.where(is_light, dark, light)

    cloud = _cloud(rows, 4)[..., None]  # −128…127
    swing = _draw(_LIGHT, rows, -90, 91, 3)[:, None, None]
    back = ground[:, None, None] + cloud * swing // 128 + _noise(_GRAIN, rows, -40, 41, 3)
    return _blend(back, front, stroke)


def _place(scans: np.ndarray, rows: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """Scans [n,8,8] in 0…16 → strokes [n,32,32] in 0…255: turned by `degrees` [n,1], resized, shifted; bilinear."""
    # fixed-point source coordinates, in 1/4096 of a scan pixel, relative to the centres of both grids
    radians = np.deg2rad(degrees)
    step = 4096 * 8 * 100 // (SIDE * _draw(_SIZE, rows, 86, 100))  # [n,1] scan px per image px; digits fill 86 to 99%
    cos = np.rint(4096 * np.cos(radians)).astype(np.int64) * step // 4096
    sin = np.rint(4096 * np.sin(radians)).astype(np.int64) * step // 4096
    y, x = np.divmod(np.arange(SIDE * SIDE), SIDE)
    x = 2 * x - (SIDE - 1) - 2 * _draw(_SHIFT_X, rows, -1, 2)  # [n,1024], in half pixels
    y = 2 * y - (SIDE - 1) - 2 * _draw(_SHIFT_Y, rows, -1, 2)
    u = (cos * x + sin * y) // 2 + 7 * 2048 + 4096  # 7/2: the centre of a scan; + 1 for the border below
    v = (cos * y - sin * x) // 2 + 7 * 2048 + 4096
    bordered = np.pad(scans, ((0, 0), (1, 2), (1, 2)))  # [n,11,11], blank around
    u, v = u.clip(0, 9 * 4096), v.clip(0, 9 * 4096)
    (i, dv), (j, du) = np.divmod(v, 4096), np.divmod(u, 4096)
    n = np.arange(len(rows))[:, None]
    top = bordered[n, i, j] * (4096 - du) + bordered[n, i, j + 1] * du
    bottom = bordered[n, i + 1, j] * (4096 - du) + bordered[n, i + 1, j + 1] * du
    grey = (top * (4096 - dv) + bottom * dv) * 255 // (16 * 4096 * 4096)
    return grey.reshape(-1, SIDE, SIDE)


def _sharpen(stroke: np.ndarray, low: int, high: int) -> np.ndarray:
    """Returns 0 up to `low`, 255 from `high`, and linear values between."""
    return ((stroke - low) * 255 // (high - low)).clip(0, 255)


def _blur(stroke: np.ndarray) -> np.ndarray:
    """[n,32,32] → the same, smoothed by a binomial filter along both axes; blank outside."""
    for axis in (1, 2):
        width = [(0, 0), (0, 0), (0, 0)]
        width[axis] = (3, 3)
        padded = np.pad(stroke, width)
        stroke = sum(w * padded.take(range(k, k + SIDE), axis) for k, w in enumerate(_BINOMIAL)) // 64
    return stroke


def _noise(stream: int, rows: np.ndarray, low: int, high: int, channels: int = 1) -> np.ndarray:
    """Returns one draw per pixel: int64 [n,32,32,channels] in low…high−1."""
    return _draw(stream, rows, low, high, SIDE * SIDE * channels).reshape(-1, SIDE, SIDE, channels)


def _cloud(rows: np.ndarray, cell: int) -> np.ndarray:
    """Returns smooth noise, int64 [n,32,32] in −128…127: a draw per `cell` × `cell` px, bilinear between."""
    points = SIDE // cell + 1
    grid = _draw(_COARSE, rows, -128, 128, points * points).reshape(-1, points, points)
    i, d = np.divmod(np.arange(SIDE), cell)
    lines = grid[:, i] * (cell - d)[:, None] + grid[:, i + 1] * d[:, None]  # [n,32,points]
    return (lines[:, :, i] * (cell - d) + lines[:, :, i + 1] * d) // cell**2


def _blend(back: np.ndarray, front: np.ndarray, stroke: np.ndarray) -> np.ndarray:
    """Returns the colour `front` [n,3] over `back` [n,32,32,1 or 3], with opacity `stroke` [n,32,32] in 0…255."""
    return back + (front[:, None, None] - back) * stroke[..., None] // 255
