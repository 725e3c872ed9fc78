"""Images of printed digits with captions, made from fonts of matplotlib and Pillow. No handwriting is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 32  # px of an image
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

KINDS = ("serif", "sans-serif", "typewriter")


class Font(NamedTuple):
    """A file among matplotlib's fonts ("": the font in Pillow), and what captions say of it."""

    file: str
    kind: str
    bold: bool = False
    slanted: bool = False
    zero: int = ord("0")  # code point of the digit zero; those of the others follow

    @property
    def name(self) -> str:
        return self.file or "Aileron"


TRAINING_FONTS = (
    Font("DejaVuSans", "sans-serif"),
    Font("DejaVuSans-Bold", "sans-serif", bold=True),
    Font("DejaVuSans-Oblique", "sans-serif", slanted=True),
    Font("DejaVuSans-BoldOblique", "sans-serif", bold=True, slanted=True),
    Font("DejaVuSansMono", "typewriter"),
    Font("DejaVuSansMono-Bold", "typewriter", bold=True),
    Font("DejaVuSansMono-Oblique", "typewriter", slanted=True),
    Font("DejaVuSansMono-BoldOblique", "typewriter", bold=True, slanted=True),
    Font("DejaVuSerif", "serif"),
    Font("DejaVuSerif-Bold", "serif", bold=True),
    Font("DejaVuSerif-Italic", "serif", slanted=True),
    Font("DejaVuSerif-BoldItalic", "serif", bold=True, slanted=True),
    Font("STIXGeneral", "serif"),
    Font("STIXGeneralBol", "serif", bold=True),
    Font("STIXGeneralBolIta", "serif", bold=True, slanted=True),
    Font("STIXGeneral", "sans-serif", zero=0x1D7E2),  # a sans-serif alphabet of mathematics, in the same file
    Font("STIXGeneral", "sans-serif", bold=True, zero=0x1D7EC),
    Font("STIXGeneral", "typewriter", zero=0x1D7F6),
    Font("cmr10", "serif"),
    Font("cmb10", "serif", bold=True),
    Font("cmti10", "serif", slanted=True),
    Font("cmmi10", "serif"),  # numerals of unequal height
)
HELD_OUT_FONTS = (
    Font("", "sans-serif"),
    Font("cmss10", "sans-serif"),
    Font("cmtt10", "typewriter"),
    Font("STIXGeneralItalic", "serif", slanted=True),
)
"""Fonts that training never reads: they measure how well the model reads print."""

_GLYPH = 64  # px; digits are drawn large, then resized like a photograph
_EM = 60  # px
_SMALLEST, _LARGEST = 0.8, 1.4  # size of a digit relative to `_EM` pixels of `_GLYPH`
_ROTATION = math.radians(12)  # largest angle either way
_CONTRAST = 0.3  # smallest difference of grey between digit and ground

PLAIN = (
    "a {}", "a photo of a {}", "a photo of the digit {}", "the digit {}", "the number {}", "a printed {}",
    "a picture of the number {}",
)  # fmt: skip
STYLED = ("a {} {}", "a photo of a {} {}", "the digit {} {}")
ATTRIBUTES = (
    *(f"in a {kind} font" for kind in KINDS), "in bold", "in italics", "light on a dark ground",
    "dark on a light ground",
)  # fmt: skip
"""What else captions say; `Images.attributes` has a column for each."""


class Images(NamedTuple):
    pixels: Tensor  # float32 [B,3,32,32] in 0…1
    labels: Tensor  # int64 [B]
    attributes: Tensor  # bool [B,A]


class Captions(NamedTuple):
    """All T captions, and the class and attribute of the images that each describes."""

    texts: list[str]
    classes: Tensor  # int64 [T]
    attributes: Tensor  # int64 [T], −1: none is named

    def true_of(self, images: Images) -> Tensor:
        """Returns bool [B,T]: whether each caption is true of each image."""
        plain = self.attributes < 0
        return (self.classes == images.labels[:, None]) & (plain | images.attributes[:, self.attributes])


def captions() -> Captions:
    """Returns plain captions of every class, and captions of every class with every attribute."""
    texts, classes, attributes = [], [], []
    for label, word in enumerate(WORDS):
        sentences = [(template.format(word), -1) for template in PLAIN]
        for attribute, phrase in enumerate(ATTRIBUTES):
            sentences += [(template.format(word, phrase), attribute) for template in STYLED]
        texts += [text for text, _ in sentences]
        classes += [label] * len(sentences)
        attributes += [attribute for _, attribute in sentences]
    return Captions(texts, torch.tensor(classes), torch.tensor(attributes))


class Printer:
    """Prints random digits in some fonts."""

    def __init__(self, fonts: Sequence[Font]) -> None:
        self.fonts = fonts
        self.glyphs = torch.stack([_draw_digits(font) for font in fonts])  # [F,10,64,64]
        self.kinds = torch.tensor([[font.kind == kind for kind in KINDS] for font in fonts])  # bool [F,3]
        self.faces = torch.tensor([[font.bold, font.slanted] for font in fonts])  # bool [F,2]

    def images(self, n: int, generator: torch.Generator) -> Images:
        """Returns n images whose font, digit, size, place, angle, colours and ground are drawn uniformly."""
        font = torch.randint(len(self.fonts), (n,), generator=generator)
        label = torch.randint(len(WORDS), (n,), generator=generator)
        shape = _placed(self.glyphs[font, label], generator)  # [n,1,32,32]
        ink, ground = _colours(n, generator)  # [n,3,1,1] each
        light = (_grey(ink) > _grey(ground))[:, 0, 0]  # [n,1]
        background = _textured(ground, generator)  # [n,3,32,32]
        pixels = (background + (ink - background) * shape).clamp(0, 1)
        return Images(pixels, label, torch.cat([self.kinds[font], self.faces[font], light, ~light], dim=1))


def _draw_digits(font: Font) -> Tensor:
    """Returns the ten digits, centred by their outlines: float32 [10,64,64], 1 inside a digit and 0 around it."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    face: ImageFont.FreeTypeFont | ImageFont.ImageFont
    if font.file:
        face = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font.file}.ttf", _EM)
    else:
        face = ImageFont.load_default(_EM)
    digits = []
    for code in range(font.zero, font.zero + 10):
        canvas = Image.new("L", (_GLYPH, _GLYPH))
        left, top, right, bottom = face.getbbox(chr(code))
        corner = ((_GLYPH - left - right) / 2, (_GLYPH - top - bottom) / 2)
        ImageDraw.Draw(canvas).text(corner, chr(code), fill=255, font=face)
        digits.append(torch.from_numpy(np.array(canvas)).float() / 255)
    return torch.stack(digits)


def _uniform(low: float, high: float, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=generator)


def _placed(glyphs: Tensor, generator: torch.Generator) -> Tensor:
    """Digits [n,64,64] → [n,1,32,32], each resized, rotated and shifted; at most its edges leave the image."""
    n = len(glyphs)
    size = _uniform(_SMALLEST, _LARGEST, (n,), generator)
    angle = _uniform(-_ROTATION, _ROTATION, (n,), generator)
    room = (1.05 - 0.67 * size).clamp(min=0)[:, None]  # in half sides; a digit is 0.67 × 64 px high
    shift = room * _uniform(-1, 1, (n, 2), generator)
    cos, sin = angle.cos() / size, angle.sin() / size  # affine_grid maps places in the image to places in the glyph
    turned = torch.stack([cos, -sin, sin, cos], dim=1).view(n, 2, 2)
    affine = torch.cat([turned, -turned @ shift[:, :, None]], dim=2)
    grid = F.affine_grid(affine, [n, 1, _GLYPH, _GLYPH], align_corners=False)
    moved = F.grid_sample(glyphs[:, None], grid, align_corners=False)  # [n,1,64,64]
    return F.avg_pool2d(moved, _GLYPH // SIDE)


def _grey(colour: Tensor) -> Tensor:
    return colour.mean(dim=1, keepdim=True)


def _colours(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns ink and ground, [n,3,1,1] each; an ink too similar to its ground becomes black or white."""
    ink, ground = torch.rand(2, n, 3, 1, 1, generator=generator)
    far = (_grey(ground) < 0.5).float().expand_as(ink)
    similar = (_grey(ink) - _grey(ground)).abs() < _CONTRAST
    return torch.where(similar, far, ink), ground


def _textured(ground: Tensor, generator: torch.Generator) -> Tensor:
    """Colours [n,3,1,1] → backgrounds [n,3,32,32]: the colour with clouds and noise, of any strength from none."""
    n = len(ground)
    clouds = F.interpolate(_uniform(-0.5, 0.5, (n, 3, 5, 5), generator), SIDE, mode="bilinear", align_corners=True)
    noise = _uniform(-0.5, 0.5, (n, 3, SIDE, SIDE), generator)
    strength = torch.rand(2, n, 1, 1, 1, generator=generator).square()  # most grounds are nearly plain
    return (ground + 0.5 * strength[0] * clouds + 0.3 * strength[1] * noise).clamp(0, 1)
