"""When features are computed and when they are read from the cache; both are the same numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cache_scenario import WIDTH, Pixels, Tiny, features_of
from torch import Tensor

from xdm_ft.data._transforms import evaluation_transform
from xdm_ft.errors import UserError
from xdm_ft.features import FeatureSettings, cache, cache_key, views
from xdm_ft.features.cache import Features
from xdm_ft.features.file_hashes import hash_files
from xdm_ft.features.shards import MAX_SHARDS, ShardLayout
from xdm_ft.features.store import cache_folder, read_manifest
from xdm_ft.features.views import View


def every_row(features: Features) -> Tensor:
    return features[torch.arange(len(features))]


def by_hand(dataset: Pixels, encoder: Tiny, dtype: torch.dtype = torch.float32) -> Tensor:
    transform = evaluation_transform(encoder.preprocessing)
    pixels = torch.stack([transform(dataset.image(row)) for row in range(len(dataset))])
    with torch.inference_mode():
        return encoder.to(dtype)(pixels.to(dtype))


def test_features_are_the_encoders(tmp_path: Path) -> None:
    dataset = Pixels(70)
    features = features_of(dataset, tmp_path / "cache")
    assert (len(features), features.width, features.extracted) == (70, WIDTH, 70)
    torch.testing.assert_close(every_row(features), by_hand(dataset, Tiny()))


def test_second_run_computes_nothing(tmp_path: Path) -> None:
    first = features_of(Pixels(70), tmp_path)
    encoder = Tiny()
    second = features_of(Pixels(70), tmp_path, encoder)
    assert (second.extracted, encoder.seen[0], second.key) == (0, 0, first.key)
    assert torch.equal(every_row(second), every_row(first))


class Reversed(Pixels):
    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.pixels.reverse()


class OtherReader(Pixels):
    """Its files hold the same bytes, but it may decode them to other pixels."""


def weight_changed() -> Tiny:
    encoder = Tiny()
    with torch.no_grad():
        encoder.linear.weight[0, 0] = torch.nextafter(encoder.linear.weight[0, 0], torch.tensor(9.0))
    return encoder


OTHER: dict[str, Callable[[Path], Features]] = {
    "weights": lambda path: features_of(Pixels(70), path, weight_changed()),
    "encoder argument": lambda path: features_of(Pixels(70), path, Tiny(argument="b")),
    "preprocessing": lambda path: features_of(Pixels(70), path, Tiny(size=9)),
    "precision": lambda path: features_of(Pixels(70), path, precision="bf16"),
    "content": lambda path: features_of(Pixels(70, first_seed=1), path),
    "order": lambda path: features_of(Reversed(70), path),
    "number of images": lambda path: features_of(Pixels(69), path),
    "reader": lambda path: features_of(OtherReader(70), path),
}


@pytest.mark.parametrize("changed", OTHER)
def test_a_change_of_any_key_part_changes_the_key(changed: str, tmp_path: Path) -> None:
    base = features_of(Pixels(70), tmp_path)
    other = OTHER[changed](tmp_path)
    assert other.key != base.key
    assert other.extracted == len(other)
    assert features_of(Pixels(70), tmp_path).extracted == 0  # the first entry still exists


@pytest.mark.parametrize("library", ["xdm_ft", "torch", "torchvision", "timm", "PIL"])
def test_versions_are_part_of_the_key(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = features_of(Pixels(3), tmp_path)
    if library == "xdm_ft":
        monkeypatch.setattr(cache_key, "__version__", "0.0")
    elif library in ("torchvision", "timm"):
        monkeypatch.setattr(cache_key, "version", lambda name: "0.0" if name == library else version(name))
    else:
        monkeypatch.setattr(cache_key, library, SimpleNamespace(**vars(getattr(cache_key, library))))
        monkeypatch.setattr(getattr(cache_key, library), "__version__", "0.0")
    assert features_of(Pixels(3), tmp_path).key != base.key


def test_keys_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded keys: another one would orphan every cache, whose features would all be computed again."""
    monkeypatch.setattr(cache_key, "__version__", "1.0")
    for library in ("torch", "PIL"):
        monkeypatch.setattr(cache_key, library, SimpleNamespace(**vars(getattr(cache_key, library))))
        monkeypatch.setattr(getattr(cache_key, library), "__version__", "1.0")
    monkeypatch.setattr(cache_key, "version", lambda name: "1.0")
    monkeypatch.setattr(views, "training_transform", lambda preprocessing, augmentation: "crop")
    encoder = Tiny()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.fill_(0.5)
    dataset = Pixels(3)
    plain = cache_key.key_parts(encoder, dataset, hash_files(dataset, None, show=False), "fp32", torch.device("cpu"))
    augmented = {**plain, **View(2, "domainbed").key_parts(encoder.preprocessing)}
    assert cache_key.key_of(plain) == "6b3b56cc42a0f402abb7e833702e184f"
    assert cache_key.key_of(augmented) == "b80f9493c2016744ad007112cb61a845"


def test_float32_arithmetic_is_part_of_the_key(tmp_path: Path) -> None:
    base = features_of(Pixels(3), tmp_path)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert features_of(Pixels(3), tmp_path).key != base.key
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", ["type", "shape", "name", "bytes"])
def test_weights_digest_depends_on_everything(name: str) -> None:
    module = torch.nn.Module()
    module.register_buffer("a", torch.zeros(4))
    other = torch.nn.Module()
    changed = {"type": torch.zeros(4, dtype=torch.int32), "shape": torch.zeros(2, 2), "bytes": -torch.zeros(4)}
    other.register_buffer("b" if name == "name" else "a", changed.get(name, torch.zeros(4)))
    assert cache_key.weights_digest(module) == cache_key.weights_digest(module)
    assert cache_key.weights_digest(module) != cache_key.weights_digest(other)


@pytest.mark.parametrize("settings", [{"batch_size": 7}, {"workers": 2}], ids=str)
def test_speed_settings_are_not_part_of_the_key(settings: dict[str, int], tmp_path: Path) -> None:
    base = features_of(Pixels(70), tmp_path / "a")
    assert features_of(Pixels(70), tmp_path / "a", **settings).extracted == 0
    computed_again = features_of(Pixels(70), tmp_path / "b", **settings)
    assert computed_again.extracted == 70
    torch.testing.assert_close(every_row(computed_again), every_row(base))


def test_bf16_is_stored_as_computed(tmp_path: Path) -> None:
    dataset, encoder = Pixels(70), Tiny()
    features = features_of(dataset, tmp_path, encoder, precision="bf16")
    assert encoder.linear.weight.dtype == torch.float32  # the caller's encoder stays as it is
    assert every_row(features).dtype == torch.float32
    expected = by_hand(dataset, Tiny(), torch.bfloat16)
    assert torch.equal(expected, expected.bfloat16().float())
    torch.testing.assert_close(every_row(features), expected, rtol=0.02, atol=0.02)
    assert torch.equal(every_row(features), every_row(features).bfloat16().float())
    manifest = read_manifest(tmp_path / features.key)
    assert manifest["precision"] == "bf16"
    assert (tmp_path / features.key / "shard-00000.safetensors").stat().st_size < 32 * WIDTH * 2 + 400


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_mapped_equals_in_memory(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = features_of(Pixels(70), tmp_path, precision=precision)
    monkeypatch.setattr(cache, "MEMORY_FRACTION", 0.0)
    mapped = features_of(Pixels(70), tmp_path, precision=precision)
    assert table._table is not None and mapped._table is None
    generator = torch.Generator().manual_seed(0)
    for shape in [(70,), (4, 3, 9), (1,), (), (0,), (2, 0)]:
        rows = torch.randint(70, shape, generator=generator)
        assert table[rows].shape == (*shape, WIDTH)
        assert mapped[rows].dtype == torch.float32
        assert torch.equal(mapped[rows], table[rows])
        assert torch.equal(mapped.normalized()[rows], F.normalize(table[rows], dim=-1))
        assert torch.equal(table.normalized()[rows], F.normalize(table[rows], dim=-1))
    for features in (table, mapped):
        for row in (-1, 70):
            with pytest.raises(IndexError):
                features[torch.tensor([0, row])]


def test_normalized_leaves_the_original(tmp_path: Path) -> None:
    features = features_of(Pixels(3), tmp_path)
    before = every_row(features)
    assert torch.allclose(every_row(features.normalized()).norm(dim=-1), torch.ones(3))
    assert torch.equal(every_row(features), before)
    assert features.normalized().key == features.key


def test_every_row_is_in_one_shard() -> None:
    for rows in (1, 31, 32, 33, 70, 32 * MAX_SHARDS, 32 * MAX_SHARDS + 1, 500_000):
        layout = ShardLayout(rows)
        spans = [layout.span(number) for number in range(len(layout))]
        assert spans[0].start == 0 and spans[-1].stop == rows and len(spans) <= MAX_SHARDS
        assert all(a.stop == b.start for a, b in pairwise(spans))
        assert {len(span) for span in spans[:-1]} <= {layout.rows_per_shard}


def test_manifest_describes_the_features(tmp_path: Path) -> None:
    features = features_of(Pixels(70), tmp_path)
    text = json.loads((tmp_path / features.key / "manifest.json").read_text(encoding="utf-8"))
    assert text["complete"] is True
    assert text["encoder"] == {"component": "tiny", "argument": "a"}
    assert text["summary"] == {"domains": {"photo": 36, "sketch": 34}, "classes": ["cat", "dog"]}
    assert [shard["rows"] for shard in text["shards"]] == [32, 32, 6]
    assert sorted(path.name for path in (tmp_path / features.key).iterdir()) == [
        "manifest.json", "shard-00000.safetensors", "shard-00001.safetensors", "shard-00002.safetensors",
    ]  # fmt: skip


def test_cache_is_private(tmp_path: Path) -> None:
    features = features_of(Pixels(3), tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / features.key).stat().st_mode & 0o777 == 0o700


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDM_FT_CACHE", raising=False)
    assert cache_folder(FeatureSettings()) == tmp_path / ".cache/xdm_ft/features"
    monkeypatch.setenv("XDM_FT_CACHE", str(tmp_path / "elsewhere"))
    assert cache_folder(FeatureSettings()) == tmp_path / "elsewhere"
    assert cache_folder(FeatureSettings(dir=Path("~/chosen"))) == tmp_path / "chosen"


def test_cache_folder_that_can_not_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"features\.dir: .*file/cache can not be created \(File exists\)"):
        cache_folder(FeatureSettings(dir=tmp_path / "file" / "cache"))


def test_features_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    encoder = Tiny()
    with torch.no_grad():
        encoder.linear.bias[2] = float("nan")
    with pytest.raises(UserError, match=r"^pixels 0: .* returns features that are not finite.*encoder\.weights"):
        features_of(Pixels(3), tmp_path, encoder)


def test_full_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Tiny, images: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Tiny, "forward", forward)
    with pytest.raises(
        UserError, match=r"^features\.batch_size: 16 images do not fit the memory of cpu; set a smaller one$"
    ):
        features_of(Pixels(3), tmp_path)


class Killer(Pixels):
    """Kills the process that decodes row 5, as the system does when shared memory is full."""

    def image(self, row: int) -> object:
        if row == 5:
            os.kill(os.getpid(), 9)
        return super().image(row)


def test_death_of_a_worker_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^features\.workers: 1: a process that decodes images died.*\(now 16\)$"):
        features_of(Killer(20), tmp_path, workers=1)
