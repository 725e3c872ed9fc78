"""Rows → image tensors, for a DataLoader."""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from xdm_ft.images.dataset import ImageDataset
from xdm_ft.images.decode import FaultInLoader, UnreadableImage, memory_of, unreadable_message
from xdm_ft.images.transforms import drawing_from


class ImageRows(Dataset[tuple[Tensor, int]]):
    """Item `row` is (transformed image float [3,H,W], row). A sampler or a batch sampler supplies the rows.

    Raises `UserError` that names an image that does not decode, or for which memory is full, from DataLoader workers
    too.
    """

    def __init__(
        self, dataset: ImageDataset, transform: Callable[[Image.Image], Tensor], least_side: int | None = None
    ) -> None:
        """`least_side`: as for `ImageDataset.draft`."""
        self.dataset, self.transform, self.least_side = dataset, transform, least_side

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        row = int(row)
        try:
            with memory_of(self.dataset.name(row)):
                return self.transform(self.dataset.draft(row, self.least_side)), row
        except UnreadableImage as error:
            raise FaultInLoader(unreadable_message({row: error.reason}, self.dataset)) from error


class DrawnRows(Dataset[tuple[Tensor, int]]):
    """Item (row, seed) is item `row` of `images`, whose transform draws from torch's generator seeded with `seed`.

    An image thus depends on its key alone: neither on the worker that reads it nor on the images read before. torch's
    global generator keeps its state.
    """

    def __init__(self, images: ImageRows) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        row, seed = key
        with drawing_from(seed):
            return self.images[row]
