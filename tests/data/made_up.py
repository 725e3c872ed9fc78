"""A data set of given labels, domains, groups and splits, without images."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from xdm_ft.images import ImageDataset


class MadeUp(ImageDataset):
    folder_order = True

    def __init__(
        self,
        labels: Sequence[int] | np.ndarray,
        domains: Sequence[int] | np.ndarray,
        groups: Sequence[int] | np.ndarray | None = None,
        splits: Sequence[str] | None = None,
    ) -> None:
        self.labels, self.domains = np.asarray(labels, np.int64), np.asarray(domains, np.int64)
        self.class_names = tuple(f"c{c}" for c in range(self.labels.max() + 1))
        self.domain_names = tuple(f"d{d}" for d in range(self.domains.max() + 1))
        self.groups = None if groups is None else np.asarray(groups, np.int64)
        self.splits = None if splits is None else np.asarray(splits)

    def image(self, row: int) -> Image.Image:
        return Image.new("RGB", (1, 1))

    def name(self, row: int) -> str:
        return f"row {row}"

    def content(self, row: int) -> bytes:
        return bytes(3)
