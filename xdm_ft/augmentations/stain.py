"""A random change of the stains of histology."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from PIL import Image
from pydantic import Field

from xdm_ft.augmentations import Augmentation, Draw
from xdm_ft.images.transforms import Preprocessing

STAINS = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
"""M, rows haematoxylin, eosin, DAB: what each takes from red, green and blue (Ruifrok & Johnston 2001)."""
EPSILON = 1e-6


class Stain(Augmentation):
    """Jitters haematoxylin, eosin and DAB: what scanners and laboratories change.

    The stain colour jitter of Tellez et al. 2018 as Gao et al. (ICML 2023, "Out-of-domain robustness via targeted
    augmentations") have it for Camelyon17: each stain S of a pixel becomes αS + β, α ~ U(1−σ, 1+σ), β ~ U(−σ, σ).
    """

    strength: Annotated[float, Field(ge=0, le=1, description="σ of the change of each stain; 0: none")] = 0.05

    def apply(self, image: Image.Image, draw: Draw, preprocessing: Preprocessing) -> Image.Image:
        change = self.strength * (2 * np.array(draw.uniform(6)) - 1)
        return Image.fromarray(jitter_stains(np.asarray(image), 1 + change[:3], change[3:]))


def jitter_stains(pixels: np.ndarray, alpha: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Returns the image with stains αS + β, uint8 [H,W,3]. pixels: uint8 [H,W,3] RGB; alpha, beta: float [3].

    S = −log(p + ε)·M⁻¹ of values p in 0…255; the new values are exp(−(αS + β)·M) − ε, within 0…255. White moves too,
    as in the authors' code, since its S is that of 255.
    """
    optical = -np.log(np.arange(256) + EPSILON).astype(np.float32)  # of every value
    mixing = np.linalg.inv(STAINS) @ np.diag(alpha) @ STAINS  # −log(p + ε) → that of the new values, without β
    new = np.exp(-(optical[pixels] @ mixing.astype(np.float32) + (beta @ STAINS).astype(np.float32))) - EPSILON
    return np.rint(np.clip(new, 0, 255)).astype(np.uint8)
