"""Images in folders: names from folders, stable order, one clear line for every fault."""

import logging
import os
import re
from pathlib import Path

import pytest
from PIL import Image

from xdm_ft.containers.files import group_of
from xdm_ft.data.folder import Folder
from xdm_ft.images.decode import UnreadableImage
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


def test_ignored_files_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, "d/c/a.png", "d/c/.hidden.png", "d/.cache/b.png", ".git/c/x.png", "d/loose.png")
    for name in ("README.txt", "d/c/Thumbs.db", "d/c/notes"):
        (tmp_path / name).write_text("x")
    (tmp_path / "empty" / "c").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        dataset = Folder(root=tmp_path)
    assert relative(dataset, tmp_path) == ["d/c/a.png"] and dataset.domain_names == ("d",)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: ignored 3 files without an image, the first: README.txt",
        f"{tmp_path}: ignored 1 image outside a <domain>/<class> folder, the first: d/loose.png",
    ]


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


def test_recipe_keys() -> None:
    settings, given = settings_model(find("data", "folder")), {"root": "x", "group": r"p(\d)"}
    assert set(settings.model_fields) == {"root", "group"}
    assert settings.model_validate(given).model_dump(mode="json") == given
    with pytest.raises(ValueError, match="not a regular expression: missing \\), unterminated subpattern"):
        settings.model_validate({"root": "x", "group": "p("})


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
    assert fault(tmp_path / "text").endswith("folders; it contains 1 other file")
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


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser can read every folder")
def test_an_unreadable_folder_is_named(tmp_path: Path) -> None:
    put(tmp_path, "d/c/a.png")
    (tmp_path / "d/c").chmod(0)
    try:
        assert f"{tmp_path}/d/c cannot be read: Permission denied" in fault(tmp_path)
    finally:
        (tmp_path / "d/c").chmod(0o755)
