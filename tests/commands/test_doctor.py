"""`xdm-ft doctor`: every planted fault is found and comes with a remedy, and a healthy recipe has none."""

import re
import shutil
from types import SimpleNamespace

import miniature
import pytest

from xdm_ft.cli.parser import main
from xdm_ft.features.cache import Store

RECIPE = """\
name: small
data: {name: folder, root: images}
protocol: {seeds: 1}
encoder: {name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}
methods: [erm]
training: {steps: 20, batch_size: 8}
features: {dir: cache}
"""


@pytest.fixture
def images(in_folder):
    """Three domains of two classes of six different images, and a recipe for them."""
    (in_folder / "small.yaml").write_text(RECIPE)
    for d, domain in enumerate("abc"):
        for c, name in enumerate(("cat", "dog")):
            for i in range(6):
                miniature.save(in_folder / "images" / domain / name / f"{i}.png", c, d, i)
    return in_folder / "images"


@pytest.fixture
def doctor(capsys):
    """Runs it → (exit status, all lines, faults: each with its remedy)."""

    def run(*arguments):
        status = main(["doctor", *arguments])
        lines = capsys.readouterr().out.splitlines()
        faults = [(line, lines[i + 1]) for i, line in enumerate(lines) if line.startswith("FAULT")]
        assert all("→" in remedy for _, remedy in faults)
        assert status == (2 if faults else 0), lines
        return status, lines, faults

    return run


def test_healthy(images, doctor):
    status, lines, _ = doctor("small.yaml")
    text = "\n".join(lines)
    assert status == 0 and lines[-1] == "no faults"
    assert len([line for line in lines if re.match(r"ok     cluster: Ray (\S+ (runs at|does)|is) ", line)]) == 1
    for words in (
        "ok     python: 3.", "libraries: ", "torch 2", "processor: ", "float32, bf16 (", "weights: random weights",
        "xxh3_128 ", "data: 36 images, 3 domains", "domains: a 12, b 12, c 12", "class cat: 6 6 6",
        "ok     site × class: Cramér's V 0.00 (0.00 to ",
        "images: all decode", "images and groups: no image occurs twice", "features: 0 of 36 cached",
        "time: less than a minute on cpu (",
    ):  # fmt: skip
        assert words in text


def test_room_for_all_views(images, doctor, monkeypatch):
    monkeypatch.setattr(Store, "bytes_needed", property(lambda store: 10**6 * len(store.missing())))
    views = "features.views=2", "data.train_augmentation=domainbed"
    for overrides, needed in (((), "36 cached, 36.0 MB"), (views, "108 cached in 3 passes, 108.0 MB")):
        lines = doctor("small.yaml", *overrides)[1]
        assert any(f"features: 0 of {needed} more are needed" in line for line in lines), lines
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=107 * 10**6))
    [(fault, _)] = doctor("small.yaml", *views)[2]
    assert "the disk is full: features need 108.0 MB more" in fault


def test_without_a_recipe_and_with_a_cluster_that_is_not_there(images, doctor):
    status, lines, _ = doctor()
    assert status == 0 and any("libraries" in line for line in lines) and not any("data" in line[:12] for line in lines)
    status, _, [(fault, remedy)] = doctor("small.yaml", "cluster.name=ray", "cluster.address=127.0.0.1:1")
    assert status == 2 and "cluster" in fault and ("`ray start --head`" in remedy or "xdm_ft[ray]" in remedy)


def test_of_several_processes_one_prints(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main(["doctor"]) == 0 and capsys.readouterr().out == ""


def test_planted_faults_are_all_found_at_once(images, doctor):
    (images / "a" / "cat" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    shutil.rmtree(images / "c" / "dog")
    shutil.copy(images / "a" / "dog" / "2.png", images / "b" / "dog" / "twin.png")
    _, lines, faults = doctor("small.yaml")
    found = "\n".join(line for line, _ in faults)
    assert 'no image of "dog" in c' in found and "broken.png does not decode" in found
    assert "ok     class dog: 6 7 0" in lines
    assert any(line.startswith("ok     site × class: Cramér's V 0.") for line in lines)
    assert 'site × class: cannot be told apart: all images in c are of "cat"' in found
    assert "images: 1 image has copies (2 files), 1 of them in more than one domain" in found
    assert lines[-1].startswith(f"{len(faults)} faults")


def test_what_is_left_without_broken_images_is_checked_too(images, doctor):
    """As a run with data.on_bad_image: skip would find it."""
    broken = [*(images / "c").rglob("*.png")]
    for image in broken:
        image.write_text(f"no image, {image.parent.name} {image.name}")
    _, _, faults = doctor("small.yaml")
    plan = [line for line, _ in faults if line.startswith("FAULT  plan")]
    assert len(faults) == len(broken) + 1 == 12 + 1 and len(plan) == 1 and 'the domain "c" has no image' in plan[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.root=nowhere"], ["FAULT  data", "nowhere does not exist"]),
        (["data={name: camelyon17, root: nowhere}"], ["FAULT  data", "camelyon17_v1.0 does not exist"]),
        (["encoder.weights=missing.safetensors"], ["FAULT  weights", "missing.safetensors does not exist"]),
        (["trainning.steps=3"], ["FAULT  recipe", "trainning"]),
        (["training.mixed_precision=fp16", "encoder.trainable=true"], ["FAULT  precision", "fp16 needs a GPU"]),
        (["features.dir=small.yaml/cache"], ["FAULT  cache", "features.dir"]),
    ],
)
def test_each_fault(images, doctor, monkeypatch, overrides, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    _, _, faults = doctor("small.yaml", *overrides)
    assert all(word in faults[0][0] for word in words)


def test_a_full_disk(images, doctor, monkeypatch):
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    _, _, faults = doctor("small.yaml")
    assert [("disk is full" in line, "features.dir" in remedy) for line, remedy in faults] == [(True, True)]


def test_an_old_library(images, doctor, monkeypatch):
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["timm>=99", "no-such-library>=1"])
    _, _, faults = doctor()
    assert "timm is 1." in faults[0][0] and "pip install 'timm>=99'" in faults[0][1]
    assert "no-such-library is missing" in faults[1][0]


def test_a_benchmark_with_wrong_counts_is_checked_all_the_same(images, doctor, tmp_path):
    root = miniature.domainbed(tmp_path / "pacs", "pacs", per_class=2)
    shutil.rmtree(root / "sketch" / "house")
    [twin, cut] = sorted((root / "photo" / "dog").iterdir())
    shutil.copyfile(next((root / "art_painting" / "dog").iterdir()), twin)
    cut.write_bytes(cut.read_bytes()[:100])
    _, lines, faults = doctor("small.yaml", "data={name: pacs, root: pacs}")
    text = "\n".join(line for line, _ in faults)
    assert "photo: 14 of 1670 images" in text and "sketch: 12 of 3929 images, no house in sketch" in text
    assert f"{cut.name} does not decode" in text and 'no image of "house" in sketch' in text
    assert "1 of them in more than one domain, " in text and ", 1 in training and test, " in text
    assert any("sketch 12" in line for line in lines)
