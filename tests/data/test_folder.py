"""Images in folders: names from folders, stable order, one clear line for every fault."""

import io
import logging
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from xdm_ft.data.folder import Folder
from xdm_ft.data.imagefolder import ImageFolder
from xdm_ft.export.sources import Sources
from xdm_ft.image_files.files import group_of
from xdm_ft.images.decode import UnreadableImage, decode, extensions, formats
from xdm_ft.protocol.splits import Protocol, leave_one_domain_out
from xdm_ft.recipe.components import find, settings_model
from xdm_ft.runtime.errors import UserError


def put(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (5, 4), "teal").save(path, "PNG")


def relative(dataset: Folder, root: Path) -> list[str]:
    return [os.path.relpath(path, root) for path in dataset.paths]


def test_names_come_from_folders_and_rows_are_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["photo/cat/x y.tiff", "photo/dog/deep/er/c.webp", "photo/dog/z.bmp", "sketch/c\nc/a\nb.png"]
    names += ["sketch/dog/a.JPG", "sketch/dog/ü.png"]
    put(tmp_path / "in", *reversed(names))
    monkeypatch.chdir(tmp_path)
    dataset = Folder(root=Path("in"))
    monkeypatch.chdir("/")
    assert relative(dataset, tmp_path / "in") == names and len(dataset) == 6
    assert dataset.domain_names == ("photo", "sketch")
    assert dataset.class_names == (r"c\nc", "cat", "dog"), "the union over domains, escaped"
    assert (dataset.labels.tolist(), dataset.domains.tolist()) == ([1, 2, 2, 0, 2, 2], [0, 0, 0, 1, 1, 1])
    assert (dataset.groups, dataset.splits) == (None, None)
    assert dataset.image(3).size == (5, 4) and dataset.content(0) == str(tmp_path / "in/photo/cat/x y.tiff")
    assert dataset.name(0) == "in/photo/cat/x y.tiff", "as typed"
    assert dataset.name(3) == r"in/sketch/c\nc/a\nb.png"


def test_what_yields_no_image_is_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, "d/c/a.png", "d/c/.hidden.png", "d/.cache/b.png", ".git/c/x.png", "d/loose.png")
    for name in ("README.txt", "d/c/Thumbs.db", "d/c/notes"):
        (tmp_path / name).write_text("x")
    for name in ("empty/c", "d/mole/deep", "notes"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("notes/a.txt", "d/c/a.heic", "d/nevus/b.HEIC", "d/nevus/c.txt", "scans/c/1.2.840", "scans/c/x.nii.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(128) + b"DICM" if "840" in name else b"x")
    put(tmp_path, "d/c/photo", "d/c/photo.png_original")
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        dataset = Folder(root=tmp_path)
    assert relative(dataset, tmp_path) == ["d/c/a.png"] and dataset.domain_names == ("d",)
    assert caplog.messages == [f"{tmp_path}: ignored 5 files without an image, the first: README.txt"]
    folders = "add images that can be read, or remove the folders"
    assert dataset.left_out == (
        '2 domains without any image: "empty" (its folder is empty), "scans" (its folder holds 2 other files: '
        f"1 .nii.gz, 1 without an extension); {folders}",
        '2 classes without any image: "mole" (its folder is empty), "nevus" (its folder holds 2 other files: 1 .heic, '
        f"1 .txt (pip install pillow-heif, which reads HEIC)); {folders}",
        "1 image outside a <domain>/<class> folder, the first: d/loose.png; move them into one, or remove them",
        "2 files without an extension not read, the first: d/c/photo; give them the extension of their format, or "
        "convert them (DICOM) to PNG or TIFF",
        "2 .heic files not read, the first: d/c/a.heic; pip install pillow-heif, which reads HEIC",
        "1 .nii.gz file not read, the first: scans/c/x.nii.gz; convert them to PNG or TIFF, or remove them",
        "1 .png_original file not read, the first: d/c/photo.png_original; convert them to PNG or TIFF, or remove them",
    )


def test_heic_is_read_where_its_package_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package registers a format with Pillow; this one stands for it with the format that is there."""
    put(tmp_path, "d/c/a.png", "d/c/b.heic")
    (tmp_path / "d/c/b.heic").write_bytes(b"\0\0\0\x18ftypheic" + (tmp_path / "d/c/b.heic").read_bytes())

    def register_heif_opener() -> None:
        def opened(stream: io.BytesIO, name: str) -> Image.Image:
            with stream:
                return PngImageFile(io.BytesIO(stream.read()[12:]))

        Image.register_open("HEIF", opened, lambda prefix: prefix[4:8] == b"ftyp")
        Image.register_extension("HEIF", ".heic")

    for registry in ("ID", "OPEN", "EXTENSION"):
        monkeypatch.setattr(Image, registry, getattr(Image, registry).copy())
    with pytest.raises(UnreadableImage, match="pip install pillow-heif, which reads HEIC"):
        decode(tmp_path / "d/c/b.heic", "b.heic")
    monkeypatch.setitem(sys.modules, "pillow_heif", SimpleNamespace(register_heif_opener=register_heif_opener))
    for cached in (formats, extensions):
        cached.cache_clear()
    try:
        dataset = Folder(root=tmp_path)
        assert relative(dataset, tmp_path) == ["d/c/a.png", "d/c/b.heic"] and dataset.left_out == ()
        assert dataset.image(1).size == (5, 4)
    finally:
        for cached in (formats, extensions):
            cached.cache_clear()


def test_links_are_followed_but_never_in_circles(tmp_path: Path) -> None:
    put(tmp_path, "root/d/c/a.png", "root/d/c/sub/b.png", "else/where/e.png", "root/d/e/f.png", "two/d/c/a.png")
    root = tmp_path / "root"
    for name, target in {
        "d/c/up": "..",
        "d/c/top": str(root),
        "d/c/self": "self",
        "d/c/sub/back": "../sub",
        "d/c/sub/first": "../sub2",
        "d/c/sub2": "sub",
        "d/linked": str(tmp_path / "else" / "where"),
        "loop": ".",
        "d/c/gone.png": "nowhere.png",
        "../two/e": "d",
    }.items():
        (root / name).symlink_to(target)
    dataset = Folder(root=root)
    assert relative(dataset, root) == ["d/c/a.png", "d/c/gone.png", "d/c/sub/b.png", "d/e/f.png", "d/linked/e.png"]
    with pytest.raises(UnreadableImage, match="No such file"):
        dataset.image(1)
    two = tmp_path / "two"
    assert relative(Folder(root=two), two) == ["d/c/a.png", "e/c/a.png"], "two domains may link to the same images"


@pytest.mark.parametrize(
    ("pattern", "groups"),
    [
        (r"patient\d+", [0, 0, 1, 1]),
        (r"patient(\d)", [0, 0, 1, 1]),
        (r"^([^/]+)/.*(patient\d+)", [0, 0, 1, 2]),  # numbered anew in each domain
        (r"_(\d)_", [0, 1, 0, 0]),
    ],
)
def test_groups(tmp_path: Path, pattern: str, groups: list[int]) -> None:
    put(tmp_path, "a/c/patient1_1_.png", "a/c/patient1_2_.png", "a/d/patient2_1_.png", "b/c/patient2_1_.png")
    assert Folder(root=tmp_path, group=pattern).groups.tolist() == groups
    two = re.compile(r"(\d+)/(\d+)")
    assert group_of("1/12", two) != group_of("11/2", two), "what is captured is not run together"


def test_expressions_that_take_for_ever_or_are_too_deep_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xdm_ft.image_files.files.MATCH_SECONDS", 0.1)
    name, deep = f"a/c/{'p' * 60}.png", "(" * 2000 + ")" * 2000
    put(tmp_path, name, "b/c/1.png")
    with pytest.raises(UserError, match=r"data\.group: \(\.\*\)\*x: takes more than 0\.1 s at .*without a repetition"):
        print(Folder(root=tmp_path, group="(.*)*x").groups)
    with pytest.raises(UserError, match=r"--group: \(\.\*\)\*x: takes more than 0\.1 s at"):
        list(Sources([str(tmp_path / name)], "(.*)*x", "--group"))
    with pytest.raises(ValueError, match="not a regular expression"):
        settings_model(find("data", "folder")).model_validate({"root": "x", "group": deep})
    with pytest.raises(UserError, match=r"--group: \(+ is not a regular expression"):
        Sources([str(tmp_path / name)], deep, "--group")


def test_names_in_either_encoding_are_one(tmp_path: Path) -> None:
    """Folders of a Mac hold é as two characters; paths keep theirs."""
    one, two = "é", "e\u0301"
    for domain, name in (("a", one), ("b", two), (one, one), (two, two)):
        put(tmp_path, f"{domain}/{name}/{name}1.png", f"{domain}/x/2.png")
    (tmp_path / "c" / two).mkdir(parents=True)
    for read in (Folder, ImageFolder):
        dataset = read(root=tmp_path)
        assert {*dataset.domain_names} == {"a", "b", one} and {*dataset.class_names} == {"x", one}
        assert np.bincount(dataset.labels).tolist() == [4, 4] and sorted(np.bincount(dataset.domains)) == [2, 2, 4]
        assert len(dataset.left_out) == 1 and dataset.left_out[0].startswith("1 domain without any image")
    assert f"b/{two}/{two}1.png" in relative(Folder(root=tmp_path), tmp_path)
    assert Folder(root=tmp_path, group=f"{two}1|2").group_names == ("2", f"{one}1")


def fault(root: Path, group: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        Folder(root=root, group=group)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_faults_are_one_clear_line(tmp_path: Path) -> None:
    assert f"data.root: {tmp_path}/no does not exist" in fault(tmp_path / "no")
    (tmp_path / "file").write_text("x")
    assert "is not a folder; set data.root to a folder of <domain>/<class>/<image>" in fault(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert fault(tmp_path / "empty").endswith("contains no images in <domain>/<class>/ folders; it is empty")
    put(tmp_path, "flat/cat/a.png", "flat/cat/b.png", "good/d/c/p1.png", "good/d/c/q.png")
    higher = "it contains 2 images outside class folders, such as cat/a.png; move them into class folders"
    assert fault(tmp_path / "flat").endswith(f"folders; {higher}")
    (tmp_path / "text/d/c").mkdir(parents=True)
    (tmp_path / "text/d/c/a.txt").write_text("x")
    assert fault(tmp_path / "text").endswith("folders; it contains 1 other file: 1 .txt")
    problem = r'data.group: "p\d" matches nothing in 1 of 2 paths, the first: d/c/q.png'
    assert fault(tmp_path / "good", r"p\d").startswith(problem)


def test_a_root_that_is_one_domain_names_the_folder_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "images", "a/cat/0.png", "b/cat/0.png", "b/dog/0.png")
    monkeypatch.chdir(tmp_path / "images" / "a")
    whole = tmp_path / "images"
    for root, shown in ((whole / "a", whole), (Path("."), whole), (Path("../b"), Path(".."))):
        end = f"it looks like one domain of {shown}; set data.root={shown}"
        assert fault(root) == f"data.root: {root} contains no images in <domain>/<class>/ folders; {end}"
        assert len(Folder(root=shown)) == 3
    assert "move them into class folders" in fault(whole / "b" / "dog")
    with pytest.raises(UserError, match=r"if a, b are domains, add /images to data\.root"):
        leave_one_domain_out(Folder(root=tmp_path), Protocol(), "images", 0)


PARTS_ARE = {
    "a/full/cat/0.png a/test/cat/0.png b/full/dog/0.png": "full, test are parts of a split, not classes; "
    "found <domain>/<full|test>/<class>/<image>, expected <domain>/<class>/<image>; move the class folders up",
    "a/train/0.png b/test/0.png": "found <domain>/<test|train>/<image>, expected",
    "a/Full/cat/x/0.png a/CROSSVAL/cat/0.png": "found <domain>/<CROSSVAL|Full>/<class>/<image>, expected",
    "a/cat/0.png b/valid/cat/0.png": "valid are parts of a split, not classes",
    "train/cat/0.png validation/cat/0.png": "validation are parts of a split, not domains; "
    "found <train|validation>/<class>/<image>, expected",
    "train/a/cat/0.png test/a/cat/0.png test/b/dog/0.png": "found <test|train>/<domain>/<class>/<image>, expected",
    "train/cat/0.png val/cat/0.png c/cat/0.png": "train, val are parts of a split, not domains",
}


@pytest.mark.parametrize("paths", PARTS_ARE)
@pytest.mark.parametrize("reader", [Folder, ImageFolder])
def test_parts_of_a_split_are_neither_classes_nor_domains(tmp_path: Path, paths: str, reader: type[Folder]) -> None:
    put(tmp_path, *paths.split())
    with pytest.raises(UserError) as caught:
        reader(root=tmp_path)
    assert "\n" not in str(caught.value) and PARTS_ARE[paths] in str(caught.value)


def test_folders_that_systems_make_hold_no_images(tmp_path: Path) -> None:
    put(tmp_path, "a/cat/0.png", "b/cat/@eaDir/0.png/SYNOPHOTO_THUMB_M.jpg", "b/cat/0.png", "__MACOSX/a/cat/0.png")
    assert [*Folder(root=tmp_path).shown] == [str(tmp_path / name) for name in ("a/cat/0.png", "b/cat/0.png")]


def test_one_such_name_among_others_is_a_class_or_a_domain(tmp_path: Path) -> None:
    put(tmp_path, "a/train/0.png", "a/airplane/0.png", "b/train/p1/0.png", "b/train/p2/0.png", "test/airplane/0.png")
    dataset = Folder(root=tmp_path)
    assert dataset.class_names == ("airplane", "train") and dataset.domain_names == ("a", "b", "test")
    put(tmp_path, "a/cow/train/0.png", "b/cow/test/0.png")
    assert Folder(root=tmp_path).class_names == ("airplane", "cow", "train"), "folders below a class are of no matter"


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser can read every folder")
def test_an_unreadable_folder_is_named(tmp_path: Path) -> None:
    put(tmp_path, "d/c/a.png")
    (tmp_path / "d/c").chmod(0)
    try:
        assert f"{tmp_path}/d/c cannot be read: Permission denied" in fault(tmp_path)
    finally:
        (tmp_path / "d/c").chmod(0o755)
