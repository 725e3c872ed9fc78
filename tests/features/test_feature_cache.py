"""When features are computed and when they are read from the cache; both are the same numbers."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from cache_scenario import SHARD, WIDTH, Files, Pixels, Tiny, features_of, write_images
from safetensors.torch import load_file
from torch import Tensor

from xdm_ft.containers.image_tables import ImageTable
from xdm_ft.data.folder import Folder
from xdm_ft.encoders.timm import Timm
from xdm_ft.features import FeatureSettings, cache, views
from xdm_ft.features import extract as extraction
from xdm_ft.features import key as cache_key
from xdm_ft.features.cache import Features, cache_folder
from xdm_ft.features.shards import read_manifest
from xdm_ft.features.views import View
from xdm_ft.images.decode import EncodedImages
from xdm_ft.images.loader import DTYPES
from xdm_ft.images.transforms import PreprocessingOverrides, evaluation_transform
from xdm_ft.runtime.errors import UserError


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


def test_another_process_reads_the_same_files(tmp_path: Path) -> None:
    """What is pickled is where the features are, not what they are."""
    first = features_of(Pixels(70), tmp_path)
    assert first.in_memory
    there = pickle.loads(pickle.dumps(first))
    assert torch.equal(every_row(there), every_row(first)) and not there.in_memory and there.key == first.key
    placed = there.to(torch.device("cpu"))
    assert torch.equal(every_row(placed), every_row(first)) and placed.in_memory
    shard = next(tmp_path.rglob("shard-*"))
    written = pickle.dumps(placed)
    shard.unlink()
    with pytest.raises(UserError, match=f"features.dir: {re.escape(str(shard))} can not be read"):
        pickle.loads(written)


def test_second_run_computes_nothing(tmp_path: Path) -> None:
    first = features_of(Pixels(70), tmp_path)
    encoder = Tiny()
    second = features_of(Pixels(70), tmp_path, encoder)
    assert (second.extracted, encoder.seen[0], second.key) == (0, 0, first.key)
    assert torch.equal(every_row(second), every_row(first))


class OtherDecoder(Pixels):
    """The same bytes, which may be decoded to other pixels."""

    def image(self, row: int) -> object:
        return super().image(row)


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
    "decoder": lambda path: features_of(OtherDecoder(70), path),
}


@pytest.mark.parametrize("changed", OTHER)
def test_a_change_of_any_key_part_changes_the_key(changed: str, tmp_path: Path) -> None:
    base = features_of(Pixels(70), tmp_path)
    other = OTHER[changed](tmp_path)
    assert other.key != base.key
    assert other.extracted == len(other)
    assert features_of(Pixels(70), tmp_path).extracted == 0  # the first store still exists


def test_an_image_is_encoded_once_in_whatever_set_it_is(tmp_path: Path) -> None:
    """Images may be added, removed, reordered and repeated, and two data sets may share some."""
    dataset, cache = Pixels(70), tmp_path / "cache"
    first = features_of(dataset, cache)
    order = [*torch.randperm(70, generator=torch.Generator().manual_seed(0)).tolist(), 5, 5]
    shuffled = Pixels(72)
    shuffled.pixels = [dataset.pixels[row] for row in order]
    again = features_of(shuffled, cache)
    assert (again.extracted, again.key) == (0, first.key)
    assert torch.equal(every_row(again), first[torch.tensor(order)])
    assert features_of(Pixels(30, first_seed=20), cache).extracted == 0
    grown = features_of(Pixels(71), cache)
    assert grown.extracted == 1 and torch.equal(every_row(grown)[:70], every_row(first))


def test_files_may_be_moved_and_renamed(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", 40)
    first = features_of(Files(images), tmp_path / "cache")
    (images / "00000.png").rename(images / "zzz.png")
    images = images.rename(tmp_path / "elsewhere")
    again = features_of(Files(images), tmp_path / "cache")
    assert again.extracted == 0
    assert torch.equal(every_row(again), every_row(first).roll(-1, 0))


def test_copies_of_an_image_are_encoded_once(tmp_path: Path) -> None:
    dataset = Pixels(40)
    dataset.pixels[20:] = dataset.pixels[:20]
    encoder = Tiny()
    features = features_of(dataset, tmp_path, encoder, batch_size=20)
    assert features.extracted == encoder.seen[0] == 20
    assert torch.equal(every_row(features)[20:], every_row(features)[:20])


@pytest.mark.parametrize("model", ["tiny", "mobilenetv2_035", "densenet121", "test_vit"])
def test_a_feature_does_not_depend_on_the_other_images_of_its_pass(model: str, tmp_path: Path) -> None:
    """To the bit, as each pass has `features.batch_size` images: 5 images alone would round differently."""
    kwargs = {"img_size": 64} if model == "test_vit" else {}
    encoder = (
        Tiny() if model == "tiny" else Timm(model=model, preprocessing=PreprocessingOverrides(size=64), kwargs=kwargs)
    )
    whole = every_row(features_of(Pixels(40), tmp_path / "whole", encoder))
    for first, count in ((33, 1), (17, 5)):
        few = features_of(Pixels(count, first_seed=first), tmp_path / str(count), encoder)
        assert few.extracted == count and torch.equal(every_row(few), whole[first : first + count])


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
    plain = cache_key.key_parts(encoder, Pixels(3).decoder, "fp32", torch.device("cpu"))
    augmented = {**plain, **View(2, "domainbed").key_parts(encoder.preprocessing)}
    assert cache_key.key_of(plain) == "4986f340b0ed90e3d621c65c60d9d980"
    assert EncodedImages.image.__qualname__ == "EncodedImages.image" and Folder.image is ImageTable.image
    assert cache_key.key_of(augmented) == "21e72af0ff614094bbba0af0b269a82b"


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
    sizes = [path.stat().st_size for path in (tmp_path / features.key).glob("shard-*")]
    assert max(sizes) < SHARD * (WIDTH * 2 + 16) + 500


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_mapped_equals_in_memory(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = features_of(Pixels(70), tmp_path, precision=precision)
    monkeypatch.setattr(cache, "MEMORY_FRACTION", 0.0)
    mapped = features_of(Pixels(70), tmp_path, precision=precision)
    assert table._table is not None and mapped._table is None
    assert table.normalized()._table is table._table, "it shares the memory"
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


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_features_that_fit_only_as_they_are_stored(
    precision: Literal["fp32", "bf16", "fp16"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = features_of(Pixels(70), tmp_path, precision=precision)
    halves = 2 * 70 * WIDTH / cache.MEMORY_FRACTION  # bytes: room for two of each number
    monkeypatch.setattr(cache, "_free_memory", lambda device: halves)
    found = features_of(Pixels(70), tmp_path, precision=precision)
    assert found.in_memory == (precision != "fp32")
    assert found._table is None or found._table.dtype == DTYPES[precision]
    rows = torch.tensor([[3, 69], [0, 3]])
    assert found[rows].dtype == torch.float32
    assert torch.equal(found[rows], whole[rows]) and torch.equal(every_row(found), every_row(whole))
    assert torch.equal(found.normalized()[rows], whole.normalized()[rows])
    monkeypatch.setattr(cache, "_free_memory", lambda device: halves - 1)
    assert not features_of(Pixels(70), tmp_path, precision=precision).in_memory


def test_normalized_leaves_the_original(tmp_path: Path) -> None:
    features = features_of(Pixels(3), tmp_path)
    before = every_row(features)
    assert torch.allclose(every_row(features.normalized()).norm(dim=-1), torch.ones(3))
    assert torch.equal(every_row(features), before)
    assert features.normalized().key == features.key


def test_the_store_describes_the_features(tmp_path: Path) -> None:
    features = features_of(Pixels(70), tmp_path)
    folder = tmp_path / features.key
    text = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert text["encoder"] == {"component": "tiny", "argument": "a"}
    assert (text["width"], text["precision"], text["decoder"]) == (WIDTH, "fp32", "cache_scenario.Pixels.image")
    rows = [len(load_file(path)["features"]) for path in folder.glob("shard-*.safetensors")]
    assert sorted(rows) == [70 - 2 * SHARD, SHARD, SHARD]
    assert len(list(folder.iterdir())) == 4, "no claim and no lock is left"


def test_large_sets_have_larger_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "MAX_SHARDS", 2)
    folder = tmp_path / features_of(Pixels(150), tmp_path, batch_size=16).key
    rows = [len(load_file(path)["features"]) for path in folder.glob("shard-*.safetensors")]
    assert sorted(rows) == [70, 80], "a multiple of the batch size that is at least half of the images"


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
        UserError, match=r"^features\.batch_size: a batch of 16 images needs more memory than cpu has; set a "
    ):
        features_of(Pixels(3), tmp_path)


class Killer(Pixels):
    """Kills the process that decodes row 5, as the system does when shared memory is full."""

    def image(self, row: int) -> object:
        if row == 5:
            os.kill(os.getpid(), 9)
        return super().image(row)


def test_death_of_a_worker_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^features\.workers: 1: a process that reads images died.*\(now 16\)$"):
        features_of(Killer(20), tmp_path, workers=1)


@pytest.mark.parametrize(
    ("gpu", "computes", "launcher", "precision"),
    [
        (False, False, "", "fp32"),
        (True, True, "", "bf16"),
        (True, False, "", "fp32"),
        (True, True, "true", "fp32"),
    ],
)
def test_the_default_precision_is_that_of_the_device(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, computes: bool, launcher: str, precision: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or computes)
    monkeypatch.setenv("ACCELERATE_USE_CPU", launcher)
    assert FeatureSettings().precision == precision
    assert FeatureSettings(precision="fp16").precision == "fp16"
