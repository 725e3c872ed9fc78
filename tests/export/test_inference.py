"""Streams of images: the model's own probabilities, features from the cache, and images that do not decode."""

import json
import os
import shutil
from pathlib import Path

import miniature
import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import recipe

import xdm_ft
import xdm_ft.images.decode as decode_module
from xdm_ft.experiment import run
from xdm_ft.export.parts import probabilities
from xdm_ft.export.predictor import NOT_FINITE, cached_features, stream
from xdm_ft.export.sources import Item, Sources
from xdm_ft.images.decode import decode
from xdm_ft.training.end_to_end import inputs


@pytest.fixture(scope="module")
def model(small_model):
    return xdm_ft.load(small_model.model)


def whole(batches):
    """(items, logits, features, number of images that were computed) of all batches."""
    batches = list(batches)
    items = [item for batch in batches for item in batch.items]
    logits = torch.cat([batch.logits for batch in batches])
    return (
        items,
        logits,
        torch.cat([batch.encoded for batch in batches]),
        sum(batch.computed for batch in batches),
    )


def changed_copies(folder, images):
    """Images of other bytes than those in the cache."""
    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        Image.open(image).rotate(90).save(folder / f"{number:03}.png")
    return folder


@pytest.mark.parametrize("workers", [0, 2])
def test_probabilities_are_those_of_the_model(small_model, model, tmp_path, workers):
    images = [item.path for item in Sources([str(small_model.data)])][:19]
    changed_copies(tmp_path / "new", images)
    sources = Sources([str(tmp_path / "new")])
    items, logits, z, computed = whole(stream(model, sources, batch_size=8, cache=small_model.cache, workers=workers))
    assert [item.path for item in items] == [item.path for item in sources] and computed == 19
    expected = model.predict_proba([item.path for item in items])
    np.testing.assert_allclose(probabilities(logits).numpy(), expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        model.module.as_read(z).numpy(), model.encode([item.path for item in items]), rtol=1e-4, atol=1e-6
    )


def test_cached_features_are_used_and_are_the_same_bits(small_model, model, tmp_path):
    for loaded in (model, xdm_ft.load(small_model.run, held_out="sketch")):
        sources = Sources([str(small_model.data)])
        items, logits, z, computed = whole(stream(loaded, sources, batch_size=8, cache=small_model.cache))
        assert len(items) > 20 and computed == 0
        again = whole(stream(loaded, sources, batch_size=8))
        assert again[3] == len(items)
        assert torch.equal(z, again[2]) and torch.equal(logits, again[1])
    assert len(cached_features(model, small_model.cache)) == len({Path(item.path).read_bytes() for item in items})


@pytest.mark.parametrize("trainable", [False, True])
def test_drafts_are_those_of_the_run(tmp_path, monkeypatch, trainable):
    """Training, extraction and the model that comes of it decode large JPEGs alike, at a fraction of their size."""
    monkeypatch.chdir(tmp_path)
    for path in miniature.domainbed(tmp_path / "data", "pacs", suffix=".jpg").rglob("*.jpg"):
        Image.open(path).resize((400, 300), Image.Resampling.BICUBIC).save(path)
    encoder = {"name": "timm", "model": "test_resnet", "trainable": trainable}
    encoder["preprocessing"] = {"size": 32, "crop": 1.0, "draft": True}
    made = recipe(
        f"encoder={json.dumps(encoder)}", "methods=[erm]", "protocol.test_domains=sketch", "training.steps=2",
        "features.batch_size=8",
    )  # fmt: skip
    sizes = set()
    with monkeypatch.context() as patch:
        to_rgb = decode_module.to_rgb
        patch.setattr(inputs, "worker_count", lambda accelerator: 0)  # what other processes decode is not seen
        patch.setattr(decode_module, "to_rgb", lambda image: sizes.add(image.size) or to_rgb(image))
        assert not run(made).failed
    assert sizes == ({(400, 300), (100, 75)} if trainable else {(100, 75)})  # all are decoded whole once, as a check
    model, sources = xdm_ft.load(Path(made.output.dir) / made.name, held_out="sketch"), Sources(["data"])
    images = [item.path for item in sources]
    _, logits, z, computed = whole(stream(model, sources, batch_size=8, cache=tmp_path / "cache"))
    assert computed == (len(images) if trainable else 0)
    assert torch.equal(logits, whole(stream(model, sources, batch_size=8))[1])
    np.testing.assert_allclose(model.module.as_read(z).numpy(), model.encode(images), rtol=1e-4, atol=1e-5)
    whole_images = [decode(Path(image), image) for image in images]
    assert 0 < np.abs(z.numpy() - model.encode(whole_images)).mean() < 0.1 * z.abs().mean()


def test_cached_and_new_images_mix(small_model, model, tmp_path):
    known = [item.path for item in Sources([str(small_model.data)])][:10]
    new = [item.path for item in Sources([str(changed_copies(tmp_path / "new", known))])]
    mixed = [Item(path, path) for pair in zip(known, new, strict=True) for path in pair]
    _, logits, _, computed = whole(stream(model, mixed, batch_size=8, cache=small_model.cache))
    assert computed == 10
    assert torch.equal(logits, whole(stream(model, mixed, batch_size=8))[1])


def test_nothing_is_written_to_the_cache_and_none_is_needed(small_model, model, tmp_path):
    def state():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in small_model.cache.rglob("*")}

    before, sources = state(), Sources([str(small_model.data)])
    whole(stream(model, sources, batch_size=8, cache=small_model.cache))
    assert state() == before
    assert whole(stream(model, sources, batch_size=8, cache=tmp_path / "missing"))[3] == sources.count()
    assert not (tmp_path / "missing").exists()


def test_damaged_shards_are_not_used(small_model, model, tmp_path):
    shutil.copytree(small_model.cache, tmp_path / "cache")
    shards = sorted((tmp_path / "cache").rglob("shard-*"))
    assert shards
    for shard in shards:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1  # of the last feature
        shard.write_bytes(data)
    sources = Sources([str(small_model.data)])
    _, _, _, computed = whole(stream(model, sources, batch_size=8, cache=tmp_path / "cache"))
    assert computed == sources.count()
    for shard in shards:
        shard.write_bytes(b"no shard")
    assert cached_features(model, tmp_path / "cache") is None


def test_another_encoder_finds_nothing(small_model, model):
    other = xdm_ft.load(small_model.model)
    encoder = other.config.encoder.model_copy(update={"xxh3": "0" * 32})
    other.config = other.config.model_copy(update={"encoder": encoder})
    assert cached_features(other, small_model.cache) is None
    assert cached_features(xdm_ft.load(small_model.model, precision="bf16"), small_model.cache) is None


def test_unreadable_images_are_reported_and_the_others_unchanged(small_model, model, tmp_path):
    good = changed_copies(tmp_path / "new", [item.path for item in Sources([str(small_model.data)])][:4])
    _, expected, _, _ = whole(stream(model, Sources([str(good)]), batch_size=8))
    os.mkfifo(good / "000a.png")
    (good / "000b.png").write_text("<html>")
    (good / "001a.png").symlink_to("nowhere.png")
    image = (good / "002.png").read_bytes()
    (good / "003a.png").write_bytes(image[: len(image) // 2])
    (good / "004.png").mkdir()
    batches = list(stream(model, [*Sources([str(good)]), Item("in memory", image), Item("a\0b", "a\0b")], batch_size=8))
    reasons = {os.path.basename(b.items[place].path): reason for b in batches for place, reason in b.unreadable.items()}
    assert list(reasons) == ["000a.png", "000b.png", "001a.png", "003a.png", "a\0b"]
    assert reasons["000a.png"] == "not a regular file" and reasons["001a.png"] == "No such file or directory"
    assert "truncated" in reasons["003a.png"] and "null byte" in reasons["a\0b"]
    kept = [b.logits[place] for b in batches for place in range(len(b.items)) if place not in b.unreadable]
    torch.testing.assert_close(torch.stack(kept)[:4], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kept[4], expected[2], rtol=1e-5, atol=1e-6)


def test_a_stream_that_starts_again_yields_the_same_bits(small_model, model):
    items = list(Sources([str(small_model.data)]))
    _, logits, _, _ = whole(stream(model, items, batch_size=8))
    assert torch.equal(logits[16:], whole(stream(model, items[16:], batch_size=8))[1])


def test_values_that_are_not_finite_are_faults(small_model):
    broken = xdm_ft.load(small_model.model)
    broken.module.head.bias.data[0] = float("nan")
    [batch] = stream(broken, list(Sources([str(small_model.data)]))[:3], batch_size=8)
    assert batch.unreadable == dict.fromkeys(range(3), NOT_FINITE)


def test_images_are_listed_as_they_are_needed(model, small_model):
    asked = []

    def endless():
        path = next(iter(Sources([str(small_model.data)]))).path
        while True:
            asked.append(path)
            yield Item(path, path)

    batches = stream(model, endless(), batch_size=4, workers=1)
    for _ in range(3):
        next(batches)
    batches.close()
    assert len(asked) <= 4 * 8
