"""Images whose integers do not fill their type: a stated rule for them, the same in every verb, and a finding."""

import io
import json
import logging
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from real_runs import TEST_VIT, one_line

import xdm_ft
from xdm_ft.cli.parser import main
from xdm_ft.experiment.data_checks import check_data
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.export.directory import CONFIG
from xdm_ft.features import hashes as hashing
from xdm_ft.images import Range
from xdm_ft.images.decode import UnreadableImage, decode, to_rgb
from xdm_ft.images.facts import sample_of_domains
from xdm_ft.recipe.check import load

RECIPE = f"""\
name: small
data: {{name: folder, root: data}}
protocol: {{seeds: 1}}
encoder: {{{TEST_VIT}}}
features: {{dir: cache, workers: 0}}
methods: [erm]
training: {{steps: 2, batch_size: 2}}
output: {{dir: out}}
"""
NOISE = np.random.default_rng(0)
AUTO = "data.intensity=auto"


def grey(bits=8):
    """Values that fill so many bits."""
    values = NOISE.integers(0, 2**bits, (24, 20))
    values[0, 0] = 2**bits - 1
    return values


def save(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)


@pytest.fixture
def root(in_folder, no_charts):
    """The current folder: small.yaml, and four images in 8 bits of each domain and class; those of c are written."""
    Path("small.yaml").write_text(RECIPE)
    for n, name in enumerate(f"{d}/{c}/{i}.png" for d in "abc" for c in ("cat", "dog") for i in range(4)):
        save(in_folder / "data" / name, (grey() // 2 + n).astype(np.uint8))
    return in_folder / "data"


def png16(values, kind=2):
    """A PNG of 16 bits per channel: 2 is RGB, 4 grey and alpha, 6 RGBA."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def tiff16(values, order):
    """A TIFF of 16 bits per channel of RGB, uncompressed, in this order of bytes."""
    height, width, _ = values.shape
    content = values.astype(f"{order}u2").tobytes()
    bits_at, pixels_at = 10 + 12 * 9 + 4, 10 + 12 * 9 + 4 + 6
    entries = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, 3, bits_at), (259, 3, 1, 1), (262, 3, 1, 2)]
    entries += [(273, 4, 1, pixels_at), (277, 3, 1, 3), (278, 3, 1, height), (279, 4, 1, len(content))]
    made = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HIH", 42, 8, len(entries))
    for tag, kind, count, value in entries:
        made += struct.pack(f"{order}HHI", tag, kind, count)
        made += struct.pack(f"{order}HH", value, 0) if kind == 3 and count == 1 else struct.pack(f"{order}I", value)
    return made + bytes(4) + struct.pack(f"{order}HHH", 16, 16, 16) + content


def tiff_of(values, photometric=1):
    """A grey TIFF of one row of two values."""
    kind, bits = {"u": 1, "i": 2}[values.dtype.kind], 8 * values.itemsize
    tags = {256: 2, 257: 1, 258: bits, 259: 1, 262: photometric, 273: 122, 277: 1, 279: values.nbytes, 339: kind}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + values.tobytes()


def wide(root, bits=12, kind=np.uint16, ending="png", scale=1):
    """The images of c, with so many bits in a wider type."""
    for path in sorted(root.glob("c/*/*.png")):
        path.unlink()
        save(path.with_suffix(f".{ending}"), (grey(bits) * scale).astype(kind))


def findings(*overrides):
    recipe = load("small.yaml", list(overrides))
    plan = make_plan(recipe, read_data(recipe))
    return [finding.line for finding in check_data(plan, show=False) if finding.what == "intensity"]


def test_every_verb_names_the_domain_its_pixels_and_the_key(root, capsys, caplog):
    assert main(["validate", "small.yaml"]) == 0
    assert "nearly black" not in capsys.readouterr().out, "8-bit images that fill their type"
    wide(root)
    line = "intensity: c is nearly black: in its 8 images, pixels wider than 8 bits reach 4095 of 65535 → set "
    assert main(["validate", "small.yaml"]) == 0
    printed = capsys.readouterr().out
    assert f"{line}data.intensity: {{low: 0, high: 4095}}, or auto" in printed
    assert main(["doctor", "small.yaml"]) == 2
    printed = capsys.readouterr().out
    assert (
        "FAULT  intensity: c is nearly black: in its 8 images, pixels" in printed and "→ set data.intensity:" in printed
    )
    with caplog.at_level(logging.INFO, "xdm_ft"):
        assert main(["run", "small.yaml"]) == 0
    assert [message for message in caplog.messages if message.startswith(f"finding: {line}")]
    document = json.loads(Path("out/small/results.json").read_text())
    assert [text for text in document["findings"] if text.startswith(line)]
    assert document["recipe"]["data"]["intensity"] == "type" and "intensity" not in document["environment"]["data"]
    page = Path("out/small/report.html").read_text()
    assert "c is nearly black: in its 8 images, pixels wider than 8 bits reach 4095 of 65535" in page
    caplog.clear()
    with caplog.at_level(logging.INFO, "xdm_ft"):  # all features are cached: nothing is decoded again
        assert main(["run", "small.yaml"]) == 0
    assert [message for message in caplog.messages if message.startswith(f"finding: {line}")]


@pytest.mark.parametrize(
    ("bits", "kind", "ending", "high"),
    [(12, np.uint16, "tif", 4095), (14, np.uint16, "png", 16383), (8, np.int32, "tif", 255)],
)
def test_auto_holds_the_largest_value(root, bits, kind, ending, high):
    wide(root, bits, kind, ending)
    assert len(findings()) == 1
    assert findings(AUTO) == []
    dataset = read_data(load("small.yaml", [AUTO]))
    assert (dataset.intensity.low, dataset.intensity.high) == (0, high)
    row = len(dataset) - 1
    stored = np.asarray(Image.open(dataset.paths[row])).astype(np.int64)
    assert np.array_equal(np.asarray(dataset.image(row))[..., 0], np.rint(stored * (255 / high)))
    eight = np.asarray(Image.open(dataset.paths[0]))
    assert np.array_equal(np.asarray(dataset.image(0))[..., 1], eight), "8-bit images are never rescaled"


def test_auto_of_floats_and_of_values_below_zero(root, caplog):
    wide(root, 12, np.float32, "tif")
    (root / "c/cat/0.tif").unlink()
    save(root / "c/cat/0.tif", np.array([[-1024.0, 0], [0, 3071]], np.float32))
    dataset = read_data(load("small.yaml", [AUTO]))
    assert str(dataset.intensity) == "-1024…4095"
    wide(root, 12, np.int32, "tif")
    for path in root.glob("c/*/*.tif"):
        save(path, grey(12).astype(np.int32) - 1000)
    assert read_data(load("small.yaml", [AUTO])).intensity.low < -990
    save(root / "c/cat/9.tif", np.array([[0.0, 1.0]], np.float32))
    with pytest.raises(xdm_ft.UserError, match="auto: some images hold integers and others floats"):
        read_data(load("small.yaml", [AUTO]))


def test_auto_without_wider_images_has_the_keys_of_type(root):
    plain, auto = (read_data(load("small.yaml", overrides)) for overrides in ([], [AUTO]))
    assert auto.intensity is None and auto.decoder == plain.decoder


def test_what_auto_finds_is_kept_with_the_hashes(root, monkeypatch):
    wide(root)
    read = []
    extremes = hashing.extremes
    monkeypatch.setattr(hashing, "extremes", lambda dataset, row: read.append(row) or extremes(dataset, row))
    first = read_data(load("small.yaml", [AUTO])).intensity
    assert len(read) == 24
    assert read_data(load("small.yaml", [AUTO])).intensity == first and len(read) == 24
    save(root / "c/dog/9.png", grey(14).astype(np.uint16))
    assert read_data(load("small.yaml", [AUTO])).intensity.high == 16383 and len(read) == 25


def test_a_rule_that_does_not_fit_is_found_too(root):
    wide(root, 10)
    [line] = findings("data.intensity={low: 0, high: 65535}")
    assert "reach 1023 of 65535" in line and "give the images of all domains one scale" in line
    for path in root.glob("b/*/*.png"):  # auto takes the range of the widest
        save(path, grey(14).astype(np.uint16))
    [line] = findings(AUTO)
    assert line.startswith("intensity: c is nearly black") and "reach 1023 of 16383" in line


def test_dark_images_of_eight_bits(root):
    for path in root.glob("b/*/*.png"):
        save(path, (grey(4)).astype(np.uint8))
    [line] = findings()
    assert "b is nearly black: in its 8 images, 99.9% of the grey values are below 26 of 255 → stretch" in line


def test_auto_is_advised_where_it_has_a_range(root):
    wide(root)
    assert findings()[0].endswith(", or auto")
    for path in sorted(root.glob("b/*/*.png")):
        path.unlink()
        save(path.with_suffix(".tif"), (grey() / 2000).astype(np.float32))
    assert [line.partition("set data.intensity: ")[2][:8] for line in findings()] == ["{low: 0,"] * 2
    assert not any("auto" in line for line in findings()), "it would refuse integers beside floats"


def test_a_large_domain_is_sampled(root, monkeypatch):
    wide(root)
    monkeypatch.setattr("xdm_ft.images.facts.SAMPLE", 5)
    [line] = findings()
    assert "in a sample of 5 of its 8 images" in line and findings() == [line]


@pytest.mark.parametrize("how", ["features.workers=2", pytest.param("encoder.trainable=true", marks=pytest.mark.slow)])
def test_a_run_counts_what_it_decodes(root, monkeypatch, caplog, how):
    wide(root)
    for path in root.glob("b/*/*.png"):
        save(path, grey(4).astype(np.uint8))
    monkeypatch.setattr("xdm_ft.images.facts.SAMPLE", 1)
    dataset = read_data(load("small.yaml"))
    sampled = {dataset.name(row) for row in sample_of_domains(dataset)}
    bright = next(path for path in sorted(root.glob("b/*/*.png")) if not any(path.match(name) for name in sampled))
    save(bright, grey().astype(np.uint8))
    shutil.copy(root / "c/cat/0.png", root / "c/cat/copy.png")
    assert [line[:30] for line in findings()] == ["intensity: b is nearly black: ", "intensity: c is nearly black: "]
    with caplog.at_level(logging.INFO, "xdm_ft"):
        assert main(["run", "small.yaml", how]) == 0
    [line] = [line for line in json.loads(Path("out/small/results.json").read_text())["findings"] if "black" in line]
    assert "c is nearly black: in its 9 images, pixels wider than 8 bits reach 4095" in line, "a copy counts"
    assert f"finding: {line}" in caplog.messages, "the sample's line was another"


@pytest.mark.parametrize(
    ("value", "problem"),
    [("{low: 9, high: 1}", "low below high"), ("bits", "must be type, auto"), ("{low: .nan, high: 1}", "must be fin"),
     ("{low: 0, high: 1, mid: 2}", "two numbers"), (f"{{low: 0, high: 1{'0' * 400}}}", "must be finite")],
)  # fmt: skip
def test_a_wrong_value_is_one_line(root, capsys, value, problem):
    assert main(["validate", "small.yaml", f"data.intensity={value}"]) == 2
    line = one_line(capsys.readouterr().err)
    assert "data.intensity" in line and problem in line


def test_data_that_decode_themselves_refuse_the_key(root, capsys):
    assert main(["validate", "small.yaml", "data={name: digits}", "data.intensity=auto"]) == 2
    assert "data.intensity: has no effect on digits" in one_line(capsys.readouterr().err)


def test_an_exported_model_reads_new_images_by_the_rule_of_its_run(root, tmp_path, capsys):
    wide(root)
    assert main(["run", "small.yaml", AUTO]) == 0
    document = json.loads(Path("out/small/results.json").read_text())
    assert document["recipe"]["data"]["intensity"] == "auto"
    assert document["environment"]["data"]["intensity"] == {"low": 0, "high": 4095}
    assert main(["export", "out/small", "model", "--held-out", "c", "--no-site"]) == 0
    assert json.loads(Path("model", CONFIG).read_text())["intensity"] == {"low": 0, "high": 4095}
    deep = grey(12)
    save(tmp_path / "deep.png", deep.astype(np.uint16))
    save(tmp_path / "eight.png", np.rint(deep * (255 / 4095)).astype(np.uint8))
    for source in ("model", "out/small"):
        model = xdm_ft.load(source, **({} if source == "model" else {"held_out": "c"}))
        expected = model.encode("eight.png")
        given = ["deep.png", Path("deep.png").read_bytes(), deep.astype(np.uint16), deep.astype(np.int32)]
        np.testing.assert_allclose(model.encode(given), np.repeat(expected, len(given), 0), rtol=1e-4, atol=1e-5)
        assert not np.allclose(model.encode("eight.png"), model.encode(Image.fromarray((deep // 257).astype(np.uint8))))
        with pytest.raises(xdm_ft.UserError, match="half of its 16-bit colours: give its path or bytes"):
            model.encode(Image.open(io.BytesIO(png16(NOISE.integers(0, 4096, (24, 20, 3))))))
        with pytest.raises(xdm_ft.UserError, match="signed 8-bit pixels"):
            model.encode(Image.open(io.BytesIO(tiff_of(np.array([[-128, 127]], np.int8)))))
    # the run's features of c are read by `predict`, as the key says the same
    assert main(["predict", "model", "data/c", "--out", "rows.csv"]) == 0
    capsys.readouterr()
    assert main(["run", "small.yaml"]) == 2
    assert "data.intensity" in capsys.readouterr().err


def test_wide_colour_follows_the_rule(tmp_path):
    """Pillow keeps the higher byte of 16-bit colour alone: 12 bits would become 16 levels."""
    colours = NOISE.integers(0, 4096, (7, 9, 3))
    range_ = Range(low=0, high=4095)
    expected = np.rint(colours * (255 / 4095))
    for content in (png16(colours), tiff16(colours, "<"), tiff16(colours, ">")):
        assert np.array_equal(np.asarray(decode(content, "x", intensity=range_)), expected)
        assert np.array_equal(np.asarray(decode(content, "x")), colours >> 8), "the default is as ever"
    transparent = np.dstack([colours, np.where(colours[..., 0] > 2000, 65535, 0)])
    seen = np.where(transparent[..., 3:] > 0, expected, 255)
    assert np.array_equal(np.asarray(decode(png16(transparent, 6), "x", intensity=range_)), seen)
    grey_and_alpha = np.asarray(decode(png16(transparent[..., [0, 3]], 4), "x", intensity=range_))
    assert np.array_equal(grey_and_alpha[..., 2], seen[..., 0])


@pytest.mark.parametrize("values", [[[0, np.nan]], [[0, np.inf]]])
def test_values_that_are_not_finite_are_refused(values, tmp_path):
    save(tmp_path / "x.tif", np.array(values, np.float32))
    with pytest.raises(UnreadableImage, match="NaN or infinite"):
        decode(tmp_path / "x.tif", "x", intensity=Range(low=0, high=1))
    with pytest.raises(UnreadableImage, match=r"so that their scale is unknown: set data\.intensity"):
        decode(tmp_path / "x.tif", "x")


@pytest.mark.parametrize(
    ("values", "photometric", "problem"),
    [
        (np.array([[-128, 127]], np.int8), 1, "signed 8-bit pixels"),
        (np.array([[0, 4095]], np.uint16), 0, "whose 0 is white"),
        (np.array([[0, 2**32 - 1]], np.uint32), 1, "unsigned 32-bit pixels above"),
    ],
)
@pytest.mark.parametrize("intensity", [None, Range(low=0, high=4095)])
def test_tiffs_whose_values_would_be_read_as_others_are_refused(values, photometric, problem, intensity):
    with pytest.raises(UnreadableImage, match=problem):
        decode(tiff_of(values, photometric), "x.tif", intensity=intensity)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_tiff_on_its_side_is_turned_upright_once(tmp_path, kind):
    values = grey().astype(kind) * (257 if kind is np.uint16 else 1)
    Image.fromarray(values).save(tmp_path / "x.tif", tiffinfo={274: 6})
    images = [decode(tmp_path / "x.tif", "x"), to_rgb(Image.open(io.BytesIO((tmp_path / "x.tif").read_bytes())))]
    for image in images:
        assert np.array_equal(np.asarray(image)[..., 0], np.rot90(values >> 8 if kind is np.uint16 else values, -1))
