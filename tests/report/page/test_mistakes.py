"""The most confident mistakes: images only where they are wanted, and nothing else of the files."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from made_up_runs import write_run
from PIL import Image, PngImagePlugin

from xdm_ft.data._reopened import reopened, rows_by_name
from xdm_ft.data.folder import Folder
from xdm_ft.report import page
from xdm_ft.report.finished import Run
from xdm_ft.report.page.mistakes import EACH, SIDE, panel
from xdm_ft.runtime.errors import UserError

SECRET = "name of a patient"


def write_images(root: Path) -> Folder:
    """Two domains, two classes, eight images each, with metadata that no page may show."""
    about = PngImagePlugin.PngInfo()
    about.add_text("comment", SECRET)
    generator = np.random.default_rng(0)
    for domain in ("art", "photo"):
        for label in ("cat", "<b>dog</b>".replace("/", "⁄")):
            folder = root / domain / label
            folder.mkdir(parents=True)
            for number in range(8):
                pixels = generator.integers(0, 255, (40, 200, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png", pnginfo=about)
    return Folder(root=str(root), group=None)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    data = write_images(tmp_path / "data")
    made = write_run(tmp_path / "run", data, ("erm", "sam"), seeds=2, findings=["images: art/cat/0.png is a copy"])
    made.results["recipe"]["data"]["root"] = str(tmp_path / "data")
    return made


def test_they_are_those_on_which_the_seeds_agree_most(run: Run) -> None:
    found = panel(run, images=True)
    assert found is not None and found.notes == [] and len(found.thumbnails) > 2
    for domain in ("art", "photo"):
        own = [one for one in run.picked if one.key[:2] == (run.chosen, (domain,))]
        read = [run.prediction(one) for one in own]
        wrong = [np.where(p.predicted != p.images.labels, p.probabilities.max(1), 0) for p in read]
        order = np.argsort(-sum(wrong), kind="stable")
        names = run.image_names(own[0])
        expected = [names[place] for place in order[:EACH] if sum(wrong)[place] > 0]
        assert [one.caption[-1] for one in found.thumbnails if one.caption[0] == domain] == expected
    for one in found.thumbnails:
        with Image.open(io.BytesIO(one.jpeg)) as image:
            assert image.format == "JPEG" and max(image.size) == SIDE and "comment" not in image.info
        assert SECRET.encode() not in one.jpeg and one.alt


def test_without_images_neither_pixels_nor_names_stand_in_the_page(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    every = page._panels
    monkeypatch.setattr(page, "_panels", lambda images: [one for one in every(images) if isinstance(one, partial)])
    assert panel(run, images=False) is None
    page.write_page(run)
    text = (run.path / "report.html").read_text(encoding="utf-8")
    assert "<img" not in text and ".png" not in text and "base64,/9j" not in text
    run.results["recipe"]["report"] = {"page": True, "images": True}
    page.write_page(run)
    text = (run.path / "report.html").read_text(encoding="utf-8")
    assert text.count("<img") > 2 and "art/cat/0.png is a copy" in text and SECRET not in text


def test_what_can_not_be_read_now_is_said(run: Run, tmp_path: Path) -> None:
    whole = panel(run, images=True)
    assert whole is not None
    gone, broken = (one.caption[-1] for one in whole.thumbnails[:2])
    (tmp_path / "data" / gone).unlink()
    (tmp_path / "data" / broken).write_bytes(b"no image")
    rest = panel(run, images=True)
    assert rest is not None and rest.notes == ["2 images can not be read now."]
    assert rest.thumbnails == whole.thumbnails[2:], "rows have moved, names have not"
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    none = panel(run, images=True)
    assert none is not None and not none.thumbnails
    assert none.notes[0].startswith("No image can be shown, because the data can not be read now: ")


def test_data_are_opened_again_as_the_recipe_names_them(tmp_path: Path) -> None:
    data = write_images(tmp_path)
    block = {"name": "folder", "root": str(tmp_path), "group": None, "on_bad_image": "error", "class_names": {}}
    again = reopened(block)
    assert [again.name(row) for row in range(len(again))] == [data.name(row) for row in range(len(data))]
    names = {data.name_in_data(row): row for row in (3, 20)}
    assert rows_by_name(again, names) == names
    assert rows_by_name(again, {data.name_in_data(20): 3, "gone": 4}) == {data.name_in_data(20): 20}
    with pytest.raises(UserError, match=r'data.name: this version has no data set "nosuch"'):
        reopened(block | {"name": "nosuch"})
