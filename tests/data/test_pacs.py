"""The real PACS images, if they are in a folder beside the repository."""

from pathlib import Path

import numpy as np
import pytest

from xdm_ft.data.folder import Folder
from xdm_ft.protocol.splits import Protocol, splits

PACS = Path(__file__).resolve().parents[2] / ".." / "shared" / "assets" / "pacs"
pytestmark = pytest.mark.skipif(not PACS.is_dir(), reason="no PACS images in ../shared/assets/pacs")


@pytest.fixture(scope="module")
def pacs() -> Folder:
    return Folder(root=PACS)


def test_counts(pacs: Folder) -> None:
    assert len(pacs.class_names) == 7
    assert dict(zip(pacs.domain_names, np.bincount(pacs.domains).tolist(), strict=True)) == {
        "art_painting": 2048,
        "cartoon": 2344,
        "photo": 1670,
        "sketch": 3929,
    }


def test_images_decode(pacs: Folder) -> None:
    for row in range(0, len(pacs), 333):
        image = pacs.image(row)
        assert (image.mode, image.size) == ("RGB", (227, 227))
        assert np.asarray(image).std() > 1


def test_leave_one_domain_out(pacs: Folder) -> None:
    found = splits(pacs, Protocol(), seed=0)
    assert [len(split.evaluation["test"]) for split in found] == [2048, 2344, 1670, 3929]
    for split in found:
        train, val = sum(len(part) for part in split.train), len(split.evaluation["train_val"])
        assert train + val + len(split.evaluation["test"]) == 9991
        assert abs(val / (train + val) - 0.2) < 0.001
