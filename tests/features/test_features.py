"""Features and their views: computed once under a key of all that determines them, read back as the same numbers."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xxhash
from cache_scenario import SHARD, SIZE, WIDTH, Files, Pixels, Tiny, features_of, write_images
from safetensors.torch import load_file
from torch import Tensor
from torchvision.transforms import RandomResizedCrop

from xdm_ft.augmentations import Augmentations, TrainingTransform
from xdm_ft.augmentations.domainbed import DomainBed
from xdm_ft.data.folder import Folder
from xdm_ft.encoders.timm import Timm
from xdm_ft.features import FeatureSettings, cache
from xdm_ft.features import key as key_module
from xdm_ft.features.cache import Features, cache_folder, cache_path
from xdm_ft.features.key import View
from xdm_ft.image_files.tables import ImageTable
from xdm_ft.images.decode import decoder_of
from xdm_ft.images.loader import DTYPES
from xdm_ft.images.transforms import PreprocessingOverrides, evaluation_transform
from xdm_ft.runtime import machine
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.randomness import Stream, bits

DOMAINBED = Augmentations([DomainBed()])
N = 70  # images: three shards of each view
ROWS = torch.arange(N)
CPU = torch.device("cpu")


def every_row(features: Features) -> Tensor:
    return features[torch.arange(len(features))]


def view(features: Features, number: int) -> Tensor:
    return features.of_views(ROWS, torch.full_like(ROWS, number))


def with_views(path: Path, count: int, encoder: Tiny | None = None, **settings: object) -> Features:
    return features_of(Pixels(N), path, encoder, views=count, **settings)


def by_hand(dataset: Pixels, encoder: Tiny, dtype: torch.dtype = torch.float32) -> Tensor:
    transform = evaluation_transform(encoder.preprocessing)
    pixels = torch.stack([transform(dataset.image(row)) for row in range(len(dataset))])
    with torch.inference_mode():
        return encoder.to(dtype)(pixels.to(dtype))


def test_features_are_the_encoders_and_a_second_run_computes_nothing(tmp_path: Path) -> None:
    dataset, cached = Pixels(N), tmp_path / "new"
    first = features_of(dataset, cached)
    assert (len(first), first.width, first.extracted) == (N, WIDTH, N)
    torch.testing.assert_close(every_row(first), by_hand(dataset, Tiny()))
    encoder = Tiny()
    second = features_of(Pixels(N), cached, encoder)
    assert (second.extracted, encoder.seen[0], second.key) == (0, 0, first.key)
    assert torch.equal(every_row(second), every_row(first))
    folder = cached / first.key
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["encoder"] == {"component": "tiny", "argument": "a"}
    assert (manifest["width"], manifest["precision"], manifest["decoder"]) == (WIDTH, "fp32", Pixels(1).decoder)
    rows = [len(load_file(path)["features"]) for path in folder.glob("shard-*.safetensors")]
    assert sorted(rows) == [N - 2 * SHARD, SHARD, SHARD]
    assert len(list(folder.iterdir())) == 4 and not list(cached.glob("*.lock")), "nothing else is left"
    assert {path.stat().st_mode & 0o777 for path in (cached, folder)} == {0o700}


def test_another_process_reads_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is pickled is where the features are, not what they are. Deleted files stay readable for their process."""
    first = features_of(Pixels(N), tmp_path)
    there = pickle.loads(pickle.dumps(first))
    assert torch.equal(every_row(there), every_row(first)) and not there.in_memory and there.key == first.key
    placed = there.to(CPU)
    assert torch.equal(every_row(placed), every_row(first)) and placed.in_memory
    monkeypatch.setattr(cache, "MEMORY_FRACTION", 0.0)
    mapped, shard, written = there.to(CPU), next(tmp_path.rglob("shard-*")), pickle.dumps(placed)
    shard.unlink()
    assert not mapped.in_memory and torch.equal(every_row(mapped), every_row(first))
    with pytest.raises(UserError, match=f"features.dir: {re.escape(str(shard))} cannot be read"):
        pickle.loads(written)


def test_an_image_is_encoded_once_in_whatever_set_it_is(tmp_path: Path) -> None:
    """Images may be added, removed, reordered, renamed and repeated, and two data sets may share some."""
    dataset, encoder = Pixels(N), Tiny()
    first = features_of(dataset, tmp_path)
    order = [*torch.randperm(N, generator=torch.Generator().manual_seed(0)).tolist(), 5, 5]
    shuffled = Pixels(N + 2)
    shuffled.pixels = [dataset.pixels[row] for row in order]
    again = features_of(shuffled, tmp_path)
    assert (again.extracted, again.key) == (0, first.key)
    assert torch.equal(every_row(again), first[torch.tensor(order)])
    assert features_of(Pixels(30, first_seed=20), tmp_path).extracted == 0
    grown = features_of(Pixels(N + 1), tmp_path)
    assert grown.extracted == 1 and torch.equal(every_row(grown)[:N], every_row(first))
    dataset.pixels[20:40] = dataset.pixels[:20]
    copies = features_of(dataset, tmp_path / "copies", encoder, batch_size=50)
    assert copies.extracted == encoder.seen[0] == 50, "copies are encoded once"
    assert torch.equal(every_row(copies)[20:40], every_row(copies)[:20])
    images = write_images(tmp_path / "images", 40)
    files = features_of(Files(images), tmp_path)
    (images / "00000.png").rename(images / "zzz.png")
    moved = features_of(Files(images.rename(tmp_path / "elsewhere")), tmp_path)
    assert moved.extracted == 0 and torch.equal(every_row(moved), every_row(files).roll(-1, 0))


@pytest.mark.parametrize("model", ["tiny", "mobilenetv2_035", "densenet121", "test_vit"])
def test_a_feature_does_not_depend_on_the_other_images_of_its_pass(model: str, tmp_path: Path) -> None:
    """To the bit, as each pass has `features.batch_size` images: 5 images alone would round differently."""
    kwargs, preprocessing = {"img_size": 64} if model == "test_vit" else {}, PreprocessingOverrides(size=64)
    encoder = Tiny() if model == "tiny" else Timm(model=model, preprocessing=preprocessing, kwargs=kwargs)
    whole = every_row(features_of(Pixels(40), tmp_path / "whole", encoder))
    for first, count in ((33, 1), (17, 5)):
        few = features_of(Pixels(count, first_seed=first), tmp_path / str(count), encoder)
        assert few.extracted == count and torch.equal(every_row(few), whole[first : first + count])


@pytest.mark.parametrize("settings", [{"batch_size": 7}, {"workers": 2}], ids=str)
def test_speed_settings_are_not_part_of_the_key(settings: dict[str, int], tmp_path: Path) -> None:
    base = features_of(Pixels(N), tmp_path / "a")
    assert features_of(Pixels(N), tmp_path / "a", **settings).extracted == 0
    torch.testing.assert_close(every_row(features_of(Pixels(N), tmp_path / "b", **settings)), every_row(base))


# ---- Keys


class OtherDecoder(Pixels):
    """The same bytes, which may be decoded to other pixels."""

    def image(self, row: int) -> object:
        return super().image(row)


def changed_weight() -> Tiny:
    encoder = Tiny()
    with torch.no_grad():
        encoder.linear.weight[0, 0] = torch.nextafter(encoder.linear.weight[0, 0], torch.tensor(9.0))
    return encoder


def with_version(patch: pytest.MonkeyPatch, library: str, number: str) -> None:
    """Gives a library, as the key sees it, another version."""
    if library == "xdm_ft":
        patch.setattr(key_module, "__version__", number)
    elif library in ("torch", "PIL"):
        module = getattr(key_module, library)
        patch.setattr(key_module, library, SimpleNamespace(**vars(module) | {"__version__": number}))
    else:
        patch.setattr(key_module, "version", lambda name: number if name == library else version(name))


OTHER: dict[str, Callable[[], tuple[Pixels, Tiny, dict[str, str]]]] = {
    "weights": lambda: (Pixels(3), changed_weight(), {}),
    "encoder argument": lambda: (Pixels(3), Tiny(argument="b"), {}),
    "preprocessing": lambda: (Pixels(3), Tiny(size=9), {}),
    "precision": lambda: (Pixels(3), Tiny(), {"precision": "bf16"}),
    "decoder": lambda: (OtherDecoder(3), Tiny(), {}),
}


@pytest.mark.parametrize("part", [*OTHER, "xdm_ft", "torch", "torchvision", "timm", "PIL", "matmul"])
def test_a_change_of_any_part_changes_the_key(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = features_of(Pixels(3), tmp_path)
    with monkeypatch.context() as patch:
        if part == "matmul":
            patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
        elif part not in OTHER:
            with_version(patch, part, "0.0")
        dataset, encoder, settings = OTHER.get(part, lambda: (Pixels(3), Tiny(), {}))()
        other = features_of(dataset, tmp_path, encoder, **settings)
    assert other.key != base.key and other.extracted == 3
    assert features_of(Pixels(3), tmp_path).extracted == 0, "the first store still exists"


def test_weights_digest_depends_on_everything() -> None:
    zeros = torch.zeros(4)
    buffers = [("a", zeros), ("b", zeros), ("a", zeros.int()), ("a", zeros.view(2, 2)), ("a", -zeros)]
    digests = []
    for name, tensor in [*buffers, buffers[0]]:
        module = torch.nn.Module()
        module.register_buffer(name, tensor)
        digests.append(key_module.weights_digest(module))
    assert len(set(digests)) == len(buffers) and digests[0] == digests[-1]


RECORDED = {
    "tiny": "4986f340b0ed90e3d621c65c60d9d980",
    "tiny, view 2": "21e72af0ff614094bbba0af0b269a82b",
    "test_vit": "ca18a32d77ede71dfed504572c49b3ac",
    "test_vit2": "ca9f42c86dafafa42704587df6a46691",
    "test_resnet": "98f0cba875568a05bdee2c6a7b248855",
    "test_convnext": "980953cc75a47571f2a04863f84a8543",
    "test_efficientnet": "4a9cff9378137b8d63b1f261d3ae7c7c",
    "mobilenetv2_035": "4a69043293687e0041e9cd91ef98ba49",
    "mobilenetv3_small_050": "62eebdb06b184e6739fc890f2489890e",
    "resnet10t": "49d0b59bbf48b87fa37509d8291bc8ed",
    "regnetx_002": "613def20368b50ec53a4a671b37b9320",
    "densenet121": "4a7c7767911bade00737bc9ccb094bf6",
    "vit_tiny_patch16_224": "e795b47e7e2e666b8ff20e0e57f0da8d",
}


@pytest.mark.parametrize("name", RECORDED)
def test_keys_stay_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded keys: another one would orphan every cache, whose features would all be computed again.

    Weights are all ½, and the version of all libraries is 1.0.
    """
    model, _, number = name.partition(", view ")
    encoder = Tiny() if model == "tiny" else Timm(model=model)
    for library in ("xdm_ft", "torch", "PIL"):
        with_version(monkeypatch, library, "1.0")
    monkeypatch.setattr(key_module, "version", lambda name: "1.0")
    monkeypatch.setattr(TrainingTransform, "steps", lambda transform: "crop")
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.fill_(0.5)
    decoder = Pixels(3).decoder if model == "tiny" else decoder_of(None)
    parts = key_module.key_parts(encoder, decoder, "fp32", CPU)
    if "versions" in parts["encoder"]:
        parts["encoder"] = {**parts["encoder"], "versions": "1.0"}
    if number:
        parts |= View(int(number), DOMAINBED).key_parts(encoder.preprocessing)
    assert key_module.key_of(parts) == RECORDED[name]
    assert Folder.image is ImageTable.image, "folders and tables share features"


# ---- Reading


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_features_are_stored_as_computed_and_read_alike_wherever_they_fit(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As float32 in memory, as they are stored in memory, or in their files."""
    encoder = Tiny()
    table = with_views(tmp_path, 2, encoder, precision=precision)
    assert encoder.linear.weight.dtype == torch.float32, "the caller's encoder stays as it is"
    if precision != "fp16":
        expected = by_hand(Pixels(N), Tiny(), DTYPES[precision])
        torch.testing.assert_close(every_row(table), expected.float(), rtol=0.02, atol=0.02)
    assert torch.equal(every_row(table), every_row(table).to(DTYPES[precision]).float())
    size = max(path.stat().st_size for path in (tmp_path / table.key).glob("shard-*"))
    assert 0 <= size - SHARD * (WIDTH * DTYPES[precision].itemsize + 16) < 500
    halves = 2 * 3 * N * WIDTH / cache.MEMORY_FRACTION  # bytes: room for two of each number
    monkeypatch.setattr(cache, "_memory_for_features", lambda device: cache.MEMORY_FRACTION * halves)
    small = with_views(tmp_path, 2, precision=precision)
    assert small.in_memory == (precision != "fp32")
    assert small._table is None or small._table.dtype == DTYPES[precision]
    monkeypatch.setattr(cache, "_memory_for_features", lambda device: cache.MEMORY_FRACTION * (halves - 1))
    mapped = with_views(tmp_path, 2, precision=precision)
    assert not mapped.in_memory and table.normalized()._table is table._table, "it shares the memory"
    generator = torch.Generator().manual_seed(0)
    for shape in [(N,), (4, 3, 9), (1,), (), (0,), (2, 0)]:
        rows, numbers = (torch.randint(high, shape, generator=generator) for high in (N, 3))
        z = table.of_views(rows, numbers)
        each = zip(rows.flatten(), numbers.flatten(), strict=True)
        for position, (row, number) in enumerate(each):
            assert torch.equal(z.reshape(-1, WIDTH)[position], view(table, int(number))[row])
        for other in (small, mapped):
            assert other[rows].dtype == torch.float32 and other[rows].shape == (*shape, WIDTH)
            assert torch.equal(other[rows], table[rows]) and torch.equal(other.of_views(rows, numbers), z)
            assert torch.equal(other.normalized()[rows], F.normalize(table[rows], dim=-1))
            assert torch.equal(other.normalized().of_views(rows, numbers), F.normalize(z, dim=-1))
    for features in (table, small, mapped):  # the plain view ends where the first augmented one begins
        for row in (-1, N):
            with pytest.raises(IndexError):
                features[torch.tensor([0, row])]


def test_bf16_that_this_processor_emulates_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: False)
    machine.warn_of_slow_bf16.cache_clear()
    for name, precision, said in [("a", "fp32", 0), ("b", "bf16", 1), ("c", "bf16", 1)]:
        features_of(Pixels(3), tmp_path / name, precision=precision)
        assert caplog.text.count("precision: this processor emulates bf16") == said


# ---- Views


def test_a_view_is_the_encoder_on_the_seeded_transform_of_each_image(tmp_path: Path) -> None:
    features, dataset, encoder = with_views(tmp_path, 2), Pixels(N), Tiny()
    assert (features.views, len(features), features.extracted) == (2, N, 3 * N)
    transform = TrainingTransform(encoder.preprocessing, DOMAINBED)
    for number in (1, 2):
        expected = []
        for row in range(N):
            content = xxhash.xxh3_128_digest(dataset.content(row))
            index = int.from_bytes(content[:8], "little", signed=True)
            seed = int(bits(key_module.SEED, number, Stream.VIEW_IMAGE, index))
            expected.append(transform.tensor(dataset.image(row), seed))
        with torch.inference_mode():
            torch.testing.assert_close(view(features, number), encoder(torch.stack(expected)))
    plain = features_of(Pixels(N), tmp_path)
    assert plain.extracted == 0 and plain.key == features.key
    assert torch.equal(features[ROWS], plain[ROWS]) and torch.equal(view(features, 0), plain[ROWS])
    assert (view(features, 0) != view(features, 1)).any(1).float().mean() > 0.95
    assert (view(features, 1) != view(features, 2)).any(1).float().mean() > 0.95


def test_a_view_depends_neither_on_the_others_nor_on_how_it_is_computed(tmp_path: Path) -> None:
    two = with_views(tmp_path, 2)
    four = with_views(tmp_path, 4)
    assert four.extracted == 2 * N and with_views(tmp_path, 1).extracted == 0
    transform, state = View(1, DOMAINBED).transform(Tiny().preprocessing), torch.get_rng_state()
    first, second = (transform(Pixels(1).image(0), np.full(16, content, np.uint8)) for content in (0, 1))
    assert torch.equal(torch.get_rng_state(), state) and first.tobytes() != second.tobytes()
    torch.manual_seed(5)
    other = with_views(tmp_path / "b", 3, batch_size=7)
    for number in (0, 1, 2):
        assert torch.equal(view(four, number), view(two, number))
        torch.testing.assert_close(view(other, number), view(two, number))


def test_the_key_of_a_view_depends_on_all_that_determines_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_views(tmp_path, 1)
    original = TrainingTransform.steps

    def weaker(transform: TrainingTransform) -> object:
        steps = original(transform)
        steps.transforms[0] = RandomResizedCrop(SIZE, scale=(0.9, 1.0))
        return steps

    for changed, name, value in ((TrainingTransform, "steps", weaker), (key_module, "SEED", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(changed, name, value)
            assert with_views(tmp_path, 1).extracted == N, "of the view; the plain one stays"
    assert with_views(tmp_path, 1, precision="bf16").extracted == 2 * N
    assert features_of(Pixels(N, 1), tmp_path, views=1).extracted == 2, "one image is new"
    assert with_views(tmp_path, 1).extracted == 0


# ---- What is refused, and settings


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDM_FT_CACHE", raising=False)
    assert cache_folder(FeatureSettings()) == tmp_path / ".cache/xdm_ft/features"
    monkeypatch.setenv("XDM_FT_CACHE", str(tmp_path / "elsewhere"))
    assert cache_folder(FeatureSettings()) == tmp_path / "elsewhere"
    assert cache_folder(FeatureSettings(dir=Path("~/chosen"))) == tmp_path / "chosen"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"features\.dir: .*file/cache cannot be created \(File exists\)"):
        cache_folder(FeatureSettings(dir=tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"features.dir: s3:/+bucket/features is an address; the cache needs a file"):
        cache_path(FeatureSettings.model_validate({"dir": "s3://bucket/features"}))
    monkeypatch.setenv("XDM_FT_CACHE", "gs://bucket/features")
    with pytest.raises(UserError, match="XDM_FT_CACHE: gs://bucket/features is an address"):
        cache_path(FeatureSettings())


class Killer(Pixels):
    """Kills the process that decodes row 5, as the system does when shared memory is full."""

    def image(self, row: int) -> object:
        if row == 5:
            os.kill(os.getpid(), 9)
        return super().image(row)


@pytest.mark.slow
def test_faults_of_a_computation_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Tiny()
    with torch.no_grad():
        encoder.linear.bias[2] = float("nan")
    with pytest.raises(UserError, match=r"^pixels 0: .* returns features that are not finite.*encoder\.weights"):
        features_of(Pixels(3), tmp_path, encoder)
    with pytest.raises(UserError, match=r"^features\.workers: 1: a process that reads images died.*\(now 16\)$"):
        features_of(Killer(20), tmp_path, workers=1)

    def forward(self: Tiny, images: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Tiny, "forward", forward)
    line = r"^features\.batch_size: a batch of 16 images needs more memory than cpu has; set a "
    with pytest.raises(UserError, match=line):
        features_of(Pixels(3), tmp_path)


@pytest.mark.parametrize(
    ("gpu", "computes", "launcher", "precision"),
    [(False, False, "", "fp32"), (True, True, "", "bf16"), (True, False, "", "fp32"), (True, True, "true", "fp32")],
)
def test_the_default_precision_is_that_of_the_device(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, computes: bool, launcher: str, precision: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or computes)
    monkeypatch.setenv("ACCELERATE_USE_CPU", launcher)
    assert FeatureSettings().precision == precision and FeatureSettings(precision="fp16").precision == "fp16"
