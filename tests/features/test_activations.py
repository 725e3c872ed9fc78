"""Activations at a cut in the cache: the same promises as for features, and none of them as a table in memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_scenario import SIZE, WIDTH, Pixels, features_of
from safetensors.torch import load_file
from torch import Tensor, nn

from xdm_ft.cli.cache import list_cache, verify_cache
from xdm_ft.cut.cut import Below, Cut
from xdm_ft.encoders import Encoder, Portable
from xdm_ft.features import extract as extraction
from xdm_ft.features.cache import Features, Store, contents_of, read_manifest, write_shard
from xdm_ft.features.maintenance import stores
from xdm_ft.images.transforms import Preprocessing
from xdm_ft.runtime.errors import UserError
from xdm_ft.training.end_to_end.inputs import CachedActivations

IMAGES = 70
VIEWS = {"views": 2}


class Deep(Encoder):
    """A stem, three blocks and a linear layer."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(3))
        self.linear = nn.Linear(4, WIDTH)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        with torch.no_grad():
            self.stem.weight *= factor
        self.width = WIDTH
        self.preprocessing = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=SIZE)
        self.stage_names, self.pretraining, self.normalize = (), "none", False
        self.eval()

    def block_candidates(self) -> list[list[str]]:
        return [[f"blocks.{number}" for number in range(3)]]

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images.to(self.linear.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return self.linear(x.mean((2, 3))).float()

    def identity(self) -> dict[str, object]:
        return {"component": "deep", "model": "m"}

    def portable(self) -> Portable:
        return Portable({}, self.state_dict())


def activations_of(folder: Path, blocks: int = 2, factor: float = 1.0, **settings: object) -> Features:
    return features_of(Pixels(IMAGES), folder, Below(Cut(Deep(factor), blocks)), **settings)


def every_row(features: Features) -> Tensor:
    return features[torch.arange(len(features))]


def test_what_is_cached_is_what_trains_above(tmp_path: Path) -> None:
    found, whole, cut = activations_of(tmp_path), features_of(Pixels(IMAGES), tmp_path, Deep()), Cut(Deep(), 2)
    assert found.width == 4 * SIZE * SIZE and found.key != whole.key
    with torch.no_grad():
        z = cut.above(every_row(found).view(IMAGES, *cut.shape))
    torch.testing.assert_close(z, every_row(whole))
    again = activations_of(tmp_path)
    assert (again.extracted, again.key) == (0, found.key) and torch.equal(every_row(again), every_row(found))
    read = CachedActivations(found, cut.shape).of_rows(range(10), 4)
    for _ in range(2):
        assert torch.equal(torch.cat([*read()]).flatten(1), every_row(found)[:10])


def test_a_change_of_what_determines_activations_changes_the_key(tmp_path: Path) -> None:
    ways = {"": {}, "cut": {"blocks": 1}, "weights": {"factor": 2.0}, "bf16": {"precision": "bf16"}}
    keys = {name: activations_of(tmp_path, **way).key for name, way in ways.items()}
    assert len(set(keys.values())) == len(ways)
    viewed = activations_of(tmp_path, **VIEWS)
    assert viewed.key == keys[""] and viewed.extracted == 2 * IMAGES
    assert len(stores(tmp_path)) == len(ways) + 2


def test_activations_beyond_float16_are_refused(tmp_path: Path) -> None:
    large = 1e4  # of weights up to 34,000; the first block makes 400,000 of them
    assert every_row(activations_of(tmp_path, factor=large)).abs().max() > torch.finfo(torch.float16).max
    activations_of(tmp_path, factor=large, precision="bf16")
    with pytest.raises(UserError, match=r"^pixels 0: .* not finite; .* or set features\.precision: fp32$"):
        activations_of(tmp_path, factor=large, precision="fp16")
    with pytest.raises(UserError, match=r"fp16: weights are too large for it .*; use bf16 or fp32"):
        activations_of(tmp_path, factor=1e7, precision="fp16")


def test_the_list_names_the_cut(tmp_path: Path) -> None:
    activations_of(tmp_path, precision="bf16")
    listed = list_cache(str(tmp_path))
    assert f"deep m, activations before blocks.1, {IMAGES} images, bf16" in listed.text()
    text = verify_cache(str(tmp_path)).text()
    assert "1 set of features and activations (1 of activations), none damaged" in text
    assert listed.document["entries"][0].encoder["cut"] == "blocks.1"
    assert read_manifest(listed.document["entries"][0].path)["width"] == 4 * SIZE * SIZE


def test_a_cache_that_can_not_be_written_or_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 3 * IMAGES * 4 * SIZE * SIZE * 4
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(UserError, match=r"full: activations before blocks\.1 need 0\.2 MB more, .*cut: compute"):
        activations_of(tmp_path, **VIEWS)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=needed))
    assert activations_of(tmp_path, **VIEWS).extracted == 3 * IMAGES
    monkeypatch.setattr(extraction, "is_writable", lambda folder: False)
    assert activations_of(tmp_path).extracted == 0
    with pytest.raises(UserError, match=r"activations before blocks\.2 of 70 images; .*features\.cut: comp"):
        activations_of(tmp_path, blocks=1)


def test_shards_of_activations_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each = 4 * SIZE * SIZE * 4
    monkeypatch.setattr(extraction, "SHARD_BYTES", 17 * each)
    found = activations_of(tmp_path, batch_size=8)
    sizes = sorted(path.stat().st_size // each for path in (tmp_path / found.key).glob("shard-*"))
    assert sizes == [6, 16, 16, 16, 16]
    monkeypatch.setattr(extraction, "MAX_SHARDS", 2)
    larger = tmp_path / features_of(Pixels(150), tmp_path).key
    rows = sorted(len(load_file(path)["features"]) for path in larger.glob("shard-*"))
    assert rows == [70, 80], "a multiple of the batch size that is at least half of the images"
    monkeypatch.setattr(extraction, "SHARD_BYTES", 1)
    assert activations_of(tmp_path / "one", batch_size=8).extracted == IMAGES, "a batch at least"


def anonymous() -> int:
    """Bytes of this process's memory that are not backed by a file."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()  # status counts with an error on many cores
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux only")
@pytest.mark.slow
def test_reading_takes_the_memory_of_a_few_steps(tmp_path: Path) -> None:
    """Activations of 192 MB, of which a batch takes 4 MB as float32, and as much while it is gathered."""
    rows, width, of_shard, batch = 768, 2**17, 64, 8
    contents = contents_of(np.arange(2 * rows).reshape(rows, 2).view(np.uint8))
    made = Store(tmp_path, {}, contents, width, torch.float16)
    made.folder.mkdir()
    for first in range(0, rows, of_shard):
        values = (torch.arange(first, first + of_shard)[:, None] + torch.zeros(width)).half()
        write_shard(made.folder, made.key, contents[first : first + of_shard], values, {})
    del values
    before = anonymous()
    store = Store(tmp_path, {}, contents, width, torch.float16)
    assert not len(store.missing())
    ends = np.cumsum([0, *(len(shard.contents) for shard in store.shards)])
    places = torch.from_numpy(ends[store.shard_of] + store.row_of)[None]
    features = Features([shard.features for shard in store.shards], places, streamed=True)
    assert not features.in_memory
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).tolist()
    read = CachedActivations(features, (width,)).of_rows(order, batch)()
    largest, seen = 0, list[float]()
    for x in read:
        seen += x[:, -1].tolist()
        largest = max(largest, anonymous() - before)
    assert seen == [float(row) for row in order]
    assert largest < 64 * 2**20
