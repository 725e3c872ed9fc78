"""A tar that is damaged or cut anywhere is one line that says where; it is never a tar with fewer images."""

from __future__ import annotations

import io
import random
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from encoded_images import png, write_tar
from range_server import served

from xdm_ft.data.webdataset import WebDataset
from xdm_ft.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("own_cache")
IMAGES = 20


def offsets(path: Path) -> list[int]:
    """The first byte of each header of a tar, and that of its end."""
    with tarfile.open(path) as file:
        return [member.offset for member in file] + [file.offset]


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


def zeroed(content: bytes, place: int) -> bytes:
    return content[:place] + bytes(512) + content[place + 512 :]


# what is done to (bytes, headers and end) → at which of them the message says it is
DAMAGES: dict[str, tuple[Callable[[bytes, list[int]], bytes], int, str]] = {
    "size in a header": (lambda all, at: flipped(all, at[30] + 130), 30, "neither a member"),
    "the first header": (lambda all, at: flipped(all, at[0] + 100), 0, "cannot be read as a tar"),
    "a header of zeros": (lambda all, at: zeroed(all, at[30]), 30, "more data follow|without the two blocks"),
    "cut at a member": (lambda all, at: all[: at[30]], 30, "without the two blocks"),
    "cut behind a header": (lambda all, at: all[: at[30] + 512], -3, "unexpected end of data"),
    "cut before the end": (lambda all, at: all[: at[-1]], -1, "without the two blocks"),
    "a byte behind the end": (lambda all, at: all + b"x", -1, "more data follow"),
    "two tars in one file": (lambda all, at: all + all, -1, "more data follow"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_tar_is_refused_and_not_remembered(name: str, tmp_path: Path) -> None:
    damage, number, problem = DAMAGES[name]
    path = write_tar(tmp_path / "tars" / "cats" / "0.tar", range(IMAGES), about=False)
    intact, at = path.read_bytes(), offsets(path)
    assert len(WebDataset(file=path)) == IMAGES
    path.write_bytes(damage(intact, at))
    with served(tmp_path / "tars") as server:
        for file in (path, f"{server.address}/cats/0.tar"):
            for _ in range(2):  # the second time, nothing is remembered
                with pytest.raises(UserError, match=problem) as caught:
                    WebDataset(file=file)
                said = str(caught.value)
                assert "\n" not in said and said.startswith(f"{file}: byte ")
                if problem != "unexpected end of data":  # there it is the end of the file
                    assert f": byte {at[number]}" in said
                if number:
                    assert re.search(r", after the member a/0000\d\d\.(png|txt|cls): ", said), said
    path.write_bytes(intact)
    assert len(WebDataset(file=path)) == IMAGES


def test_no_flip_in_a_header_loses_an_image(tmp_path: Path) -> None:
    """Bytes of the checksum's own padding may differ, as they mean nothing."""
    path = write_tar(tmp_path / "0.tar", range(3), about=False)
    intact, at, chosen = path.read_bytes(), offsets(path), random.Random(0)
    refused = 0
    for _ in range(80):
        place = chosen.choice(at[:-1]) + chosen.randrange(512)
        path.write_bytes(flipped(intact, place))
        try:
            assert len(WebDataset(file=path)) == 3, place
        except UserError as error:
            refused += ": byte " in str(error)
    assert refused > 75


def test_intact_tars_are_read(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    for format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        name = "a/é" + ("" if format == tarfile.USTAR_FORMAT else "x" * 120)
        with tarfile.open(path, "w", format=format) as file:
            for number in range(5):
                for extension, content in (("png", png(number)), ("cls", b"cat")):
                    member = tarfile.TarInfo(f"{name}{number}.{extension}")
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))
        for ending in (1024, 10240):  # two blocks, a record
            path.write_bytes(path.read_bytes()[: offsets(path)[-1]] + bytes(ending))
            data = WebDataset(file=path)
            assert [data.content(row) for row in range(len(data))] == [png(number) for number in range(5)]
    (tmp_path / "a").mkdir()
    for number in range(5):
        (tmp_path / "a" / f"{number}.png").write_bytes(png(number))
        (tmp_path / "a" / f"{number}.cls").write_text("cat")
    for option in ("-b255", "--format=v7") if shutil.which("tar") else ():
        subprocess.run(["tar", option, "--sort=name", "-cf", "0.tar", "a"], cwd=tmp_path, check=True)
        assert len(WebDataset(file=path)) == 5


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_an_image_that_is_a_link_is_not_left_out_in_silence(kind: bytes, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "0.tar", range(3), about=False)
    with tarfile.open(path, "a") as file:
        member = tarfile.TarInfo("a/000003.png")
        member.type, member.linkname = kind, "a/000002.png"
        file.addfile(member)
    with pytest.raises(UserError, match=r"0\.tar: a/000003\.png is a link or sparse; write each image in full"):
        WebDataset(file=path)
