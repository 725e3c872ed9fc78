"""`xdm-ft label`: which images it chooses, and that `evaluate` reads its table without edits but the labels."""

import csv
import dataclasses
import errno
import json
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import small_models
from PIL import Image

from xdm_ft.cli.label import COLUMNS, lines
from xdm_ft.cli.parser import main
from xdm_ft.evaluation.few_labels import choose_images
from xdm_ft.export.directory import CHECKSUMS, digest_of, write_directory
from xdm_ft.export.sources import read_site
from xdm_ft.features.hashes import ListedImages, hash_files
from xdm_ft.new_site import label as driver
from xdm_ft.new_site.label import Labelling
from xdm_ft.new_site.stored import Bought
from xdm_ft.storage.tensors import tensors_of

DOCS = Path(__file__).parents[2] / "docs"


def picture(path, number):
    """An image with content of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (20, 20, 3), np.uint8)).save(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`images/` of 12 patients with 4 images each, and `model`, which one of these images has trained."""
    folder = tmp_path_factory.mktemp("label")
    for number in range(48):
        picture(folder / f"images/p{number // 4:02}/{number}.png", number)
    parts = small_models.parts(*small_models.timm("test_resnet"), "linear", normalize=True)
    trained = hash_files(ListedImages([str(folder / "images/p00/0.png")]), None, show=False).digests
    config = parts.config.model_copy(update={"training_images_xxh3": digest_of(tensors_of({CHECKSUMS: trained}))})
    parts = dataclasses.replace(parts, config=config, training_images=trained)
    write_directory(parts, folder / "model", with_encoder=True)
    return folder


@pytest.fixture
def site(made, tmp_path, monkeypatch):
    """A copy of the images, beside the model."""
    shutil.copytree(made / "images", tmp_path / "images")
    (tmp_path / "model").symlink_to(made / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def label(site, capsys):
    """`label(*arguments, status=0)`: what `xdm-ft label model` prints."""

    def label(*arguments, status=0):
        assert main(["label", "model", *map(str, arguments)]) == status
        return capsys.readouterr()

    return label


def rows_of(file):
    with open(file, encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def fill_in(file, name="cat"):
    """Writes a label into each row, and changes nothing else."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    assert all(line.endswith(",") for line in lines[1:])
    Path(file).write_text("\n".join([lines[0], *(f"{line}{name}" for line in lines[1:])]), encoding="utf-8")


def test_a_quarter_is_drawn_and_evaluate_reads_the_table(site, label):
    told = label("images", "--budget", 20, "--out", "to_label.csv").out
    assert told.startswith("wrote to_label.csv: 20 of 47 images to label\n5 drawn at random to evaluate the model, 15 ")
    assert "\nFrom 5 images the accuracy is then known to ±40 points or better; ±5 takes 388 images\n" in told
    assert "1 image left out, as they trained the model" in told
    rows = rows_of("to_label.csv")
    assert tuple(rows[0]) == COLUMNS and {row["label"] for row in rows} == {row["group"] for row in rows} == {""}
    assert [row["for"] for row in rows] == ["evaluate"] * 5 + ["adapt"] * 15
    assert len({row["path"] for row in rows}) == 20 and "images/p00/0.png" not in {row["path"] for row in rows}
    assert main(["predict", "model", "to_label.csv", "--out", "predictions.csv", "--batch-size", "16"]) == 0
    told = [(row["predicted"], row["probability"]) for row in rows]
    assert told == [(row["label"], row["probability"]) for row in rows_of("predictions.csv")]
    fill_in("to_label.csv")
    found = read_site("to_label.csv", small_models.CLASSES, {})
    assert [os.path.normpath(item.path) for item in found.items] == [
        row["path"] for row in rows[:5]
    ] and found.groups is None
    assert len(read_site("to_label.csv", small_models.CLASSES, {}, purpose="adapt").items) == 15
    assert main(["evaluate", "model", "to_label.csv"]) == 0


def test_a_budget_for_five_points_is_named_where_the_site_has_the_images():
    made = Labelling("m", [], 1552, 25, 75, 0, 0.2045, None, None, 0, 0, 0, {})
    line = "From 25 images the accuracy is then known to ±20 points or better; ±5 takes 388 images"
    assert f"{line} (--budget 1552)" in lines(made, Path("t.csv"), None, ["cat"], "accuracy")
    assert line in lines(dataclasses.replace(made, images=1551), Path("t.csv"), None, ["cat"], "accuracy")
    told = lines(made, Path("t.csv"), None, ["cat"], "balanced_accuracy")
    assert "How well balanced accuracy is known then depends on the labels: evaluate says it" in told
    bought = Bought(budget=100, images=25, half_width=0.16, threshold=0.62, gain=None)
    told = "\n".join(lines(dataclasses.replace(made, bought=bought), Path("t.csv"), None, ["cat"], "accuracy"))
    assert re.search(r"\n100 +25 +±16 points +62% of draws +–\n", told)


def test_the_same_images_are_chosen_again_and_a_document_says_how_many(site, label):
    label("images", "--budget", 30, "--out", "a.csv")
    shutil.copy("images/p03/12.png", "images/copy.png")
    Path("images/broken.png").write_bytes(b"no image")
    told = label("images", "--budget", 30, "--out", "b.csv", "--json").out
    found = json.loads(told)
    documented = (DOCS / "scripts.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in documented for key in found)
    counts = {"images": 47, "evaluate": 8, "adapt": 22, "copies": 1, "training_images": 1, "groups": None, "seed": 0}
    assert counts.items() <= found.items() and list(found["unreadable"]) == ["images/broken.png"]
    label("images", "--budget", 30, "--out", "c.csv")
    assert Path("b.csv").read_bytes() == Path("c.csv").read_bytes()
    label("images", "--budget", 100, "--out", "all.csv")
    assert len(rows_of("all.csv")) == 47, "all that there are"


@pytest.mark.parametrize("how", ["expression", "column", "named column"])
def test_a_group_has_one_purpose_and_each_part_several(site, label, how):
    given, options = "images", ["--group", r"p\d\d"]
    if how != "expression":
        name = "group" if how == "column" else "patient"
        lines = [f"images/p{number // 4:02}/{number}.png,=p{number // 4}" for number in range(48)]
        Path("site.csv").write_text("\n".join([f"path,{name}", *lines]))
        given, options = "site.csv", [] if how == "column" else ["--group", "patient"]
    told = label(given, "--budget", 23, "--out", "out.csv", *options).out
    rows = rows_of("out.csv")
    assert f"{len(rows)} of 47 images to label in {len({row['group'] for row in rows})} groups" in told
    assert 20 <= len(rows) <= 23 and re.search(r"known to ±\d+ points or better; ±5 takes 388 groups\n", told)
    by_group = {}
    for row in rows:
        by_group.setdefault((row["group"], row["for"]), []).append(row["path"])
    assert len(by_group) == len({group for group, _ in by_group}), "a group has one purpose"
    most = {"evaluate": 2, "adapt": 4}
    assert all(len(paths) <= most[purpose] for (_, purpose), paths in by_group.items())
    assert min(sum(purpose == part for _, purpose in by_group) for part in most) >= 5
    fill_in("out.csv")
    found = read_site("out.csv", small_models.CLASSES, {})
    assert found.groups is not None and len(set(found.groups)) >= 5


def test_a_group_too_large_for_the_random_part_is_named(site, label):
    """12 groups: at most a fifth of the random images are of one."""
    arguments = "images", "--budget", 20, "--group", r"p\d\d"
    assert "counts too little" not in label(*arguments, "--out", "a.csv").err
    for number in range(10):
        picture(Path(f"images/p03/more{number}.png"), 200 + number)
    told = label(*arguments, "--out", "b.csv").err
    assert "group p03 has 25% of the images, but at most 20% of those to evaluate: it counts too little there" in told


def test_of_few_groups_nothing_is_labelled_unless_it_is_wished(site, label, monkeypatch):
    for folder in sorted(Path("images").iterdir())[7:]:
        shutil.rmtree(folder)
    arguments = "images", "--budget", 12, "--out", "out.csv", "--group", r"p\d\d"
    with monkeypatch.context() as patch:
        patch.setattr(driver, "readable", None)  # before any image is read
        assert (
            "--group: 7 groups are too few to evaluate and adapt; add images of 8 or" in label(*arguments, status=2).err
        )
    label(*arguments, "--allow-few-groups")
    assert {row["for"] for row in rows_of("out.csv")} == {"evaluate", "adapt"}


def test_paths_lead_to_the_images_from_the_folder_of_the_table(site, label, monkeypatch):
    """As they were given if they do so, else absolute."""
    Path("-p").mkdir()
    for number, name in enumerate(("-p/=1.png", "-p/ü, 2.png", "=3.png", "+4.png", "@5.png", " 6.png")):
        picture(Path(name), 100 + number)
    given = ["./-p", "=3.png", "+4.png", "@5.png", " 6.png", site / "images/p01"]
    label(*given, "--budget", 99, "--out", "here.csv")
    names = {row["path"] for row in rows_of("here.csv")}
    assert {"././-p/=1.png", "././-p/ü, 2.png", "./=3.png", "./+4.png", "./@5.png", "./ 6.png"} <= names
    assert f"{site}/images/p01/4.png" in names
    label(*given, "--budget", 99, "--out", "sub/there.csv")
    assert {os.path.normpath(row["path"]) for row in rows_of("sub/there.csv")} == {str(site / name) for name in names}
    shutil.copytree("images/p02", "tables/images")
    Path("tables/site.csv").write_text("path\nimages/8.png\nimages/9.png\n")
    label("tables/site.csv", "--budget", 9, "--out", "tables/out.csv")
    assert {row["path"] for row in rows_of("tables/out.csv")} == {"images/8.png", "images/9.png"}
    label("tables/site.csv", "--budget", 9, "--out", "out.csv")
    assert {row["path"] for row in rows_of("out.csv")} == {f"{site}/tables/images/{n}.png" for n in (8, 9)}
    monkeypatch.chdir("/")
    for file, count in (("here.csv", 10), ("sub/there.csv", 10), ("tables/out.csv", 2), ("out.csv", 2)):
        fill_in(site / file)
        number = len(read_site(str(site / file), small_models.CLASSES, {}).items)
        assert number == math.ceil(count / 4), "each of them exists"


def test_a_sheet_shows_the_images_and_no_prediction(site, label):
    picture(Path("images/<b>.png"), 70)
    label("images", "--budget", 99, "--out", "out.csv", "--sheet", "sheet.html")
    page, rows = Path("sheet.html").read_text(encoding="utf-8"), rows_of("out.csv")
    shown = re.findall(r"<bdi>row (\d+)</bdi></span><span><bdi>([^<]*)</bdi>", page)
    assert shown == [(str(n), row["path"].replace("<b>", "&lt;b&gt;")) for n, row in enumerate(rows, start=2)]
    assert page.count("data:image/jpeg;base64,") == len(rows) == 48 and "http" not in page.replace("http-equiv", "")
    assert not any(name in page for name in small_models.CLASSES)


@pytest.fixture
def meanwhile(monkeypatch):
    """`meanwhile(act)`: `act()` happens once, when the images are chosen and nothing is written."""

    def meanwhile(act):
        def choose(*arguments, **options):
            monkeypatch.setattr(driver, "choose_images", choose_images)
            act()
            return choose_images(*arguments, **options)

        monkeypatch.setattr(driver, "choose_images", choose)

    return meanwhile


SHEET = ("--out", "out.csv", "--sheet", "sheet.html")


def refused(label, *arguments):
    [line] = [text for text in label(*arguments, status=2).err.splitlines() if text.startswith("xdm-ft:")]
    return line


def test_of_two_commands_at_once_one_writes(site, label, meanwhile):
    meanwhile(lambda: label("images", "--budget", 8, "--out", "out.csv"))
    line = refused(label, "images", "--budget", 20, *SHEET)
    assert line == "xdm-ft: out.csv: exists already; name another file, or delete it"
    assert len(rows_of("out.csv")) == 8 and not Path("sheet.html").exists() and not [*site.glob(".*")]
    Path("out.csv").unlink()
    meanwhile(lambda: Path("sheet.html").write_text("mine"))
    assert "sheet.html: exists already" in refused(label, "images", "--budget", 20, *SHEET)
    assert Path("sheet.html").read_text() == "mine" and not Path("out.csv").exists() and not [*site.glob(".*")]
    Path("out.csv").symlink_to("nowhere")
    assert "out.csv: exists already" in refused(label, "images", "--budget", 20, "--out", "out.csv")


def test_what_fails_at_the_sheet_leaves_no_table(site, label, meanwhile, monkeypatch):
    lost = Path("images/p05/20.png")
    content = lost.read_bytes()
    meanwhile(lost.unlink)
    line = refused(label, "images", "--budget", 47, *SHEET)
    assert line == "xdm-ft: images/p05/20.png: cannot be read any more (No such file or directory); run again"
    lost.write_bytes(content)
    write_bytes = Path.write_bytes

    def full(self, data):
        if "sheet" in self.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_bytes(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    assert "sheet.html: the disk is full; free some space" in refused(label, "images", "--budget", 47, *SHEET)
    assert not {"out.csv", "sheet.html"} & {path.name for path in site.iterdir()} and not [*site.glob(".*")]
    monkeypatch.undo()
    monkeypatch.chdir(site)
    label("images", "--budget", 47, *SHEET)
    assert len(rows_of("out.csv")) == 47 and Path("sheet.html").exists()


def test_files_that_are_no_images_are_counted(site, label):
    Path("images/p01/scan.dcm").write_bytes(b"x")
    assert "1 other file: 1 .dcm" in label("images", "--budget", 8, "--out", "out.csv").err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["images", "--budget", "0", "--out", "x.csv"], "--budget: 0 is not positive"),
        (["images", "--budget", "9", "--out", "x.parquet"], "--out: x.parquet is not the name of a CSV file"),
        (["images", "--budget", "9", "--out", "taken.csv"], "taken.csv: exists already"),
        (["images", "--budget", "9", "--out", "x.csv", "--sheet", "taken.csv"], "taken.csv: exists already"),
        (["images", "--budget", "9", "--out", "x.csv", "--sheet", "x.csv"], "--sheet: x.csv is the table"),
        (["empty", "--budget", "9", "--out", "x.csv"], "empty: contains no image"),
        (["missing", "--budget", "9", "--out", "x.csv"], "missing: does not exist"),
        (["images", "--budget", "9", "--out", "x.csv", "--group", "("], "--group: ( is not a regular expression"),
        (["images", "--budget", "9", "--out", "x.csv", "--group", "q"], "--group: q matches nothing in images/p00/0"),
        (["half.csv", "--budget", "9", "--out", "x.csv"], "--group: 1 of 2 images have no group, the first: images/p"),
        (["images/p00/0.png", "--budget", "9", "--out", "x.csv"], "images/p00/0.png: all 1 image trained the model"),
        (["broken.png", "--budget", "9", "--out", "x.csv"], "broken.png: no image can be read"),
        (["b\udcff.png", "--budget", "9", "--out", "x.csv"], r"b\udcff.png: the name is not UTF-8"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_writes_nothing(site, label, arguments, line):
    Path("empty").mkdir()
    for name in ("taken.csv", "broken.png", "b\udcff.png"):
        Path(name).write_bytes(b"")
    Path("half.csv").write_text("path,group\nimages/p01/4.png,a\nimages/p01/5.png,\n")
    before = {*site.rglob("*")}
    said = label(*arguments, status=2)
    (told,) = [text for text in said.err.splitlines() if text.startswith("xdm-ft:")]
    assert line in told and said.out == "" and {*site.rglob("*")} == before
