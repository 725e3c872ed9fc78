"""100,000 images in memory that does not grow. With `pytest -m soak -s` it prints memory and speed."""

import csv
import json
import time

import psutil
import pytest
from PIL import Image
from warm_processes import begin

IMAGES = 100_000
PER_FOLDER = 1_000
MEGABYTE = 1e6


def write_images(folder):
    """Images that differ in one pixel, so that no two have the same content."""
    image = Image.effect_noise((32, 32), 60).convert("RGB")
    for number in range(IMAGES):
        path = folder / f"{number // PER_FOLDER:03}" / f"{number:06}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.putpixel((0, 0), (number >> 16, number >> 8 & 255, number & 255))
        image.save(path, compress_level=1)


def memory(process):
    """Bytes of the process and of its decoding processes, each in whole."""
    found = psutil.Process(process.pid)
    return found.memory_info().rss, sum(child.memory_info().rss for child in found.children())


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_memory_is_flat(small_model, tmp_path):
    write_images(tmp_path / "images")
    started, unfinished = time.monotonic(), tmp_path / "out.csv.unfinished"
    arguments = ["predict", str(small_model.model), "images", "--out", "out.csv"]
    process = begin(arguments, tmp_path, tmp_path / "log", tmp_path / "log")
    reached: dict[int, tuple[int, int]] = {}
    read, done, first = 0, 0, (0, 0.0)
    while process.is_alive():
        time.sleep(0.5)
        if not unfinished.exists():
            continue
        with unfinished.open("rb") as file:
            file.seek(read)
            for line in file:
                if line.endswith(b"\n"):
                    read += len(line)
                    done = json.loads(line)["value"].get("count", 0)
        first = first if first[0] else (done, time.monotonic())
        for share in (10, 50, 99):
            if share not in reached and done >= IMAGES * share / 100:
                reached[share] = memory(process)
                speed = (done - first[0]) / (time.monotonic() - first[1])
                own, workers = (round(size / MEGABYTE) for size in reached[share])
                print(f"{share}%: {own} MB, workers {workers} MB, {speed:.0f} images/s", flush=True)
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    print(f"{IMAGES / (time.monotonic() - started):.0f} images/s with start and end")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert sum(1 for _ in csv.DictReader(file)) == IMAGES
    assert reached.keys() == {10, 50, 99}
    assert reached[99][0] - reached[10][0] < 30 * MEGABYTE and reached[99][1] - reached[10][1] < 30 * MEGABYTE
