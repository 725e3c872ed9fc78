"""Augmented views in the cache: their features, their keys, and recovery from damage and kills."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from cache_scenario import SHARD, WIDTH, Files, Pixels, Tiny, features_of, write_images
from torch import Tensor

from xdm_ft.cli.cache import list_cache, verify_cache
from xdm_ft.features import cache, views
from xdm_ft.features.cache import Features
from xdm_ft.features.maintenance import prune, stores, verify
from xdm_ft.images.dataset import Augmentation
from xdm_ft.images.transforms import training_transform
from xdm_ft.runtime.randomness import Stream, bits

N = 70  # three shards of each view
ROWS = torch.arange(N)


def with_views(path: Path, count: int, encoder: Tiny | None = None, **settings: object) -> Features:
    return features_of(Pixels(N), path, encoder, views=count, augmentation="domainbed", **settings)


def view(features: Features, number: int) -> Tensor:
    return features.of_views(ROWS, torch.full_like(ROWS, number))


def keys(path: Path) -> dict[int, str]:
    """View → key of its entry."""
    return {store.manifest.get("view", {"number": 0})["number"]: store.key for store in stores(path)}


def test_a_view_is_the_encoder_on_the_seeded_transform_of_each_image(tmp_path: Path) -> None:
    features, dataset, encoder = with_views(tmp_path, 2), Pixels(N), Tiny()
    assert (features.views, len(features), features.extracted) == (2, N, 3 * N)
    transform = training_transform(encoder.preprocessing, "domainbed")
    for number in (1, 2):
        expected = []
        for row in range(N):
            content = xxhash.xxh3_128_digest(dataset.content(row))
            index = int.from_bytes(content[:8], "little", signed=True)
            torch.manual_seed(int(bits(views.SEED, number, Stream.VIEW_IMAGE, index)))
            expected.append(transform(dataset.image(row)))
        with torch.inference_mode():
            torch.testing.assert_close(view(features, number), encoder(torch.stack(expected)))
    plain = features_of(Pixels(N), tmp_path)
    assert plain.extracted == 0 and plain.key == features.key
    assert torch.equal(features[ROWS], plain[ROWS]) and torch.equal(view(features, 0), plain[ROWS])
    every = [plain[ROWS], view(features, 1), view(features, 2)]
    differ = [(a != b).any(1).float().mean() for a, b in ((every[0], every[1]), (every[1], every[2]))]
    assert min(differ) > 0.95


def test_a_view_does_not_depend_on_how_it_is_computed(tmp_path: Path) -> None:
    """Nor on the state of torch's generator, nor on how many other views are cached."""
    expected = with_views(tmp_path / "a", 2)
    torch.manual_seed(5)
    other = with_views(tmp_path / "b", 3, batch_size=7, workers=2)
    for number in (0, 1, 2):
        torch.testing.assert_close(view(other, number), view(expected, number))


def test_drawing_a_view_leaves_torchs_generator_unchanged() -> None:
    transform = views.View(1, "domainbed").transform(Tiny().preprocessing)
    state = torch.get_rng_state()
    first, second = (transform(Pixels(1).image(0), np.full(16, content, np.uint8)) for content in (0, 1))
    assert torch.equal(torch.get_rng_state(), state) and not np.array_equal(first, second)


def test_more_views_reuse_the_cached_ones(tmp_path: Path) -> None:
    two = with_views(tmp_path, 2)
    four = with_views(tmp_path, 4)
    assert four.extracted == 2 * N
    assert all(torch.equal(view(four, number), view(two, number)) for number in (0, 1, 2))
    assert with_views(tmp_path, 1).extracted == with_views(tmp_path, 4).extracted == 0
    assert len(stores(tmp_path)) == 5


def test_the_key_of_a_view_depends_on_all_that_determines_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_views(tmp_path, 1)
    before = keys(tmp_path)
    assert len(set(before.values())) == 2

    original = views.training_transform

    def weaker(preprocessing: object, augmentation: Augmentation) -> object:
        transform = original(preprocessing, augmentation)  # type: ignore[arg-type]
        transform.transforms[0].scale = (0.9, 1.0)  # type: ignore[attr-defined]
        return transform

    with monkeypatch.context() as patch:
        patch.setattr(views, "training_transform", weaker)
        assert with_views(tmp_path, 1).extracted == N  # of the view; the plain one stays
    with monkeypatch.context() as patch:
        patch.setattr(views, "SEED", 1)
        assert with_views(tmp_path, 1).extracted == N
    assert with_views(tmp_path, 1, precision="bf16").extracted == 2 * N
    assert features_of(Pixels(N, 1), tmp_path, views=1, augmentation="domainbed").extracted == 2, "one image is new"
    assert with_views(tmp_path, 1).extracted == 0


def test_only_the_damaged_shard_of_a_view_is_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = with_views(tmp_path, 2)
    path = next(path for path in (tmp_path / keys(tmp_path)[2]).glob("shard-*") if path.stat().st_size > SHARD * 36)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    faults = [fault for store in stores(tmp_path) for fault in verify(store)]
    assert faults == [f"{path.name} is damaged (its checksum differs)"]
    again = with_views(tmp_path, 2)
    assert again.extracted == SHARD and f"{path} is damaged" in caplog.text
    assert all(torch.equal(view(again, number), view(good, number)) for number in (0, 1, 2))


class Stopped(Pixels):
    """Interrupts the extraction at the 138th image that is read: in the third shard of the second pass."""

    asked, decoder = 0, "cache_scenario.Pixels.image"

    def image(self, row: int) -> object:
        Stopped.asked += 1
        if Stopped.asked == 138:
            raise KeyboardInterrupt
        return super().image(row)


def test_an_interrupted_extraction_resumes_at_the_next_shard_of_a_view(tmp_path: Path) -> None:
    whole = with_views(tmp_path / "whole", 2)
    with pytest.raises(KeyboardInterrupt):
        features_of(Stopped(N), tmp_path / "cache", views=2, augmentation="domainbed")
    resumed = with_views(tmp_path / "cache", 2)
    assert resumed.extracted == 3 * N - (N + 2 * SHARD)
    assert all(torch.equal(view(resumed, number), view(whole, number)) for number in (0, 1, 2))


def test_list_verify_and_prune_count_views(tmp_path: Path) -> None:
    with_views(tmp_path, 2)
    lines = list_cache_of(tmp_path)
    assert len(lines) == 3
    assert sum("70 images, fp32, view 1 of domainbed" in line for line in lines) == 1
    assert sum(line.endswith("70 images, fp32") for line in lines) == 1
    assert "3 sets of features, none damaged" in verify_cache(str(tmp_path)).text()
    assert len({file.path.parent for file in prune(tmp_path, max_bytes=0)}) == 3


def list_cache_of(path: Path) -> list[str]:
    for one in stores(path):  # the listing shows the encoder's model, which a tiny encoder lacks
        manifest = {**one.manifest, "encoder": {**one.manifest["encoder"], "model": "m"}}
        cache.write_manifest(one.folder, manifest)
    return list_cache(str(path)).text().splitlines()


def test_disk_space_for_all_views_is_checked_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from xdm_ft.runtime.errors import UserError

    free = 2 * N * WIDTH * 4  # bytes of two of the three passes
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    encoder = Tiny()
    with pytest.raises(UserError, match="the disk is full"):
        with_views(tmp_path, 2, encoder)
    assert encoder.seen[0] == 0
    assert with_views(tmp_path, 1, encoder).extracted == 2 * N


def test_unreadable_images_are_zero_in_every_view(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", 40)
    (images / "00035.png").write_bytes(b"no image")
    features = features_of(Files(images), tmp_path / "cache", views=1, augmentation="domainbed", on_bad_image="skip")
    rows = torch.tensor([34, 35])
    z = features.of_views(rows, torch.ones_like(rows))
    assert list(features.unreadable) == [35]
    assert z[0].abs().sum() > 0 and z[1].abs().sum() == 0


@pytest.mark.parametrize("normalized", [False, True])
def test_memory_mapped_views_equal_those_in_memory(
    normalized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = with_views(tmp_path, 3)
    monkeypatch.setattr(cache, "MEMORY_FRACTION", 0.0)
    mapped = with_views(tmp_path, 3)
    assert table.in_memory and not mapped.in_memory
    if normalized:
        table, mapped = table.normalized(), mapped.normalized()
    generator = torch.Generator().manual_seed(0)
    for shape in [(50,), (4, 3, 9), (), (0,)]:
        rows, numbers = (torch.randint(high, shape, generator=generator) for high in (N, 4))
        z = table.of_views(rows, numbers)
        assert z.shape == (*shape, WIDTH)
        assert torch.equal(mapped.of_views(rows, numbers), z)
        for position in range(len(rows.flatten())):
            row, number = rows.flatten()[position], numbers.flatten()[position]
            assert torch.equal(z.reshape(-1, WIDTH)[position], view(table, int(number))[row])
    for features in (table, mapped):  # the plain view ends where the first augmented one begins
        for row in (-1, N):
            with pytest.raises(IndexError):
                features[torch.tensor([0, row])]
