"""Parquet files and tars at an address: the same images as on the disk, each row group read once, faults in a line."""

from __future__ import annotations

import inspect
import io
import os
import pickle
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from encoded_images import labels_of, png, same, write_parquet, write_tar
from fsspec.implementations import http
from fsspec.registry import _registry
from range_server import Served, served

from xdm_ft.data import webdataset
from xdm_ft.data.parquet import Parquet
from xdm_ft.data.webdataset import WebDataset, expand_braces
from xdm_ft.features.hashes import hash_files
from xdm_ft.image_files import RecentlyUsed, remote
from xdm_ft.image_files.tables import Columns, Keys
from xdm_ft.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "data").mkdir()
    with served(tmp_path / "data") as found:
        yield found


def test_a_remote_folder_is_read_as_the_local_one_each_row_group_once(server: Served, tmp_path: Path) -> None:
    for number in range(2):
        first = 50 * number
        write_parquet(tmp_path / "data" / f"{number}.parquet", range(first, first + 50), 20, struct=number == 1)
    columns = Columns(group="group")
    local = Parquet(file=tmp_path / "data", columns=columns)
    found = Parquet(file=server.address, columns=columns)
    server.requests.clear()
    same(found, local)
    assert len(server.bodies()) == 2 * (1 + 3), "a footer and three row groups of each file"
    same(Parquet(file=f"file://{tmp_path}/data", columns=columns), local)  # by fsspec, but not by HTTP
    assert found.name_in_data(70) == local.name_in_data(70) == "row 70 (70.png)"
    assert found.content(70) == png(70) and found.name(3) == f"{server.address}, row 3"


def hashed(data: Any, cache: Path | None = None, **more: Any) -> np.ndarray:
    return hash_files(data, cache, show=False, **more).digests


def test_a_warm_start_opens_no_file_and_a_changed_one_is_read_again(server: Served, tmp_path: Path) -> None:
    path, cache = write_parquet(tmp_path / "data" / "a.parquet", range(50), 20), tmp_path / "cache"
    data = Parquet(file=server.address)
    server.requests.clear()
    assert not hashed(data, cache, equal_sizes_only=True).any()
    assert server.requests == [], "checking a recipe reads no remote image"
    first = hashed(data, cache)
    assert first.any(1).all() and server.bodies()
    server.requests.clear()
    again = hash_files(Parquet(file=server.address), cache, show=False)
    assert np.array_equal(again.digests, first) and again.changed_file(range(50)) is None
    assert {method for method, *_ in server.requests} == {"HEAD"}, "its ETag"
    write_parquet(path, range(100, 150), 20)
    os.utime(path, ns=(1, 1))
    assert again.changed_file(range(50)) == f"{server.address}/a.parquet"
    changed = hashed(Parquet(file=server.address), cache)
    assert (changed != first).any(1).all() and np.array_equal(changed, hashed(Parquet(file=path)))
    for address in (server.address, path):
        data = Parquet(file=address)
        os.utime(path, ns=(5, path.stat().st_mtime_ns + 1))
        assert "a.parquet: another program is writing to this file" in line(
            lambda data=data: hashed(data, tmp_path / "new")
        )


def test_processes_divide_the_row_groups_and_a_killed_one_keeps_its_part(server: Served, tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "a.parquet", range(100), 20)
    whole = hashed(Parquet(file=server.address))
    parts = [hashed(Parquet(file=server.address), share=(number, 2)) for number in range(2)]
    assert [part.any(1).nonzero()[0].tolist() for part in parts] == [[*range(40)], [*range(40, 100)]]
    hashed(Parquet(file=server.address), tmp_path / "cache", share=(0, 2))
    server.requests.clear()
    assert np.array_equal(hashed(Parquet(file=server.address), tmp_path / "cache"), whole)
    assert len(set(server.bodies())) == 1 + 3, "a footer, and the row groups of the other process"


def line(read: Any) -> str:
    with pytest.raises(UserError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_faults_of_a_server(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "data" / "a.parquet", range(50), 20)
    address = f"{server.address}/a.parquet"
    data = Parquet(file=address)
    assert "gone.parquet: does not exist" in line(lambda: Parquet(file=f"{server.address}/gone.parquet"))
    assert "nowhere: does not exist" in line(lambda: Parquet(file=f"{server.address}/nowhere"))
    server.status = 403
    assert "a.parquet: the server denies access" in line(lambda: Parquet(file=address))
    server.status = 503
    assert "a.parquet: cannot be read in 3 attempts (ClientResponseError: 503" in line(lambda: Parquet(file=address))
    server.status, server.tags, server.times = 0, False, False
    assert "a.parquet: the server gives neither an ETag nor a time" in line(lambda: Parquet(file=address))
    server.times = True
    if "Last-Modified" in inspect.getsource(http):  # an older fsspec does not read it
        assert len(Parquet(file=address)) == 50, "size and time of modification are enough"
    server.ranges = False
    assert "a.parquet: the server cannot send a part of a file" in line(lambda: data.content(30))
    server.ranges, server.failing = True, 2
    assert data.content(7) == png(7), "connections that break are tried again"
    server.failing = 3
    assert "a.parquet: cannot be read in 3 attempts (Client" in line(lambda: data.content(49))
    assert data.content(49) == png(49)
    server.silent = 1.0
    monkeypatch.setattr(remote, "SECONDS_OF_SILENCE", 0.05)
    assert "(no answer for 0.05 s)" in line(lambda: Parquet(file=address))
    monkeypatch.setattr(remote, "SECONDS_OF_SILENCE", 60.0)
    server.silent = 0.0
    path.write_bytes(path.read_bytes()[:2000])
    damaged = line(lambda: pickle.loads(pickle.dumps(data)).content(49))
    assert "cannot be read" in damaged or "ends before" in damaged
    assert "this kind of address is unknown" in line(lambda: Parquet(file="nothing://a/b.parquet"))
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for protocol in ("s3", "s3a"):  # as other tests may have used it
        monkeypatch.delitem(_registry, protocol, raising=False)
    assert "pip install 'xdm_ft[remote]'" in line(lambda: Parquet(file="s3://bucket/b.parquet"))


def test_refusals_of_other_libraries_are_not_tried_again() -> None:
    """Those of the Hugging Face hub and of botocore, as they hold the status of the answer."""
    for status, problem in ((403, "the server denies access"), (404, "does not exist")):
        for answer in (SimpleNamespace(status_code=status), {"ResponseMetadata": {"HTTPStatusCode": status}}):
            read = Mock(side_effect=RuntimeError("refused"))
            read.side_effect.response = answer
            assert f"hf://datasets/a/b: {problem}" in line(lambda read=read: remote.attempt("hf://datasets/a/b", read))
            assert read.call_count == 1


def test_faults_of_parquet_files(tmp_path: Path) -> None:
    path, two = tmp_path / "a.parquet", tmp_path / "two"
    table = pyarrow.table({"image": [png(0)], **labels_of(range(1))})
    no_rows = "a.parquet: the file has no rows, so no images; remove it"
    pyarrow.parquet.write_table(table.schema.empty_table(), path)
    assert line(lambda: Parquet(file=path)).endswith(no_rows)
    pyarrow.parquet.ParquetWriter(path, table.schema).close()  # without any row group
    assert line(lambda: Parquet(file=path)).endswith(no_rows)
    pyarrow.parquet.write_table(table, path)
    problem = 'a.parquet has string in the column "label"; it must contain'
    assert problem in line(lambda: Parquet(file=path, columns=Columns(image="label")))
    assert "data.columns.group: " in line(lambda: Parquet(file=path, columns=Columns(group="patient")))
    images = [{"bytes": png(0), "path": None}, {"path": "x/a.png"}]
    pyarrow.parquet.write_table(pyarrow.table({"image": images, **labels_of(range(2))}), path)
    problem = "a.parquet, row group 0: it holds the path of an image (x/a.png)"
    assert problem in line(lambda: Parquet(file=path).content(0))
    two.mkdir()
    for name, labels in (("a", ["u", "v"]), ("b", [1, 2])):
        table = pyarrow.table({"image": [png(0)] * 2, "label": labels, "domain": ["d", "e"]})
        pyarrow.parquet.write_table(table, two / f"{name}.parquet")
    assert "column label has values of several types (int64, string)" in line(lambda: Parquet(file=two))
    content = write_parquet(path, range(60), 20).read_bytes()
    path.write_bytes(content[:4] + bytes(60) + content[64:])
    assert "a.parquet, row group 0: cannot be read" in line(lambda: Parquet(file=path).content(0))
    footer = 8 + pyarrow.parquet.read_metadata(path).serialized_size
    for size in (len(content) // 2, len(content) - footer, len(content) - 8, len(content) - 1, 4, 0):
        path.write_bytes(content[:size])
        assert "a.parquet: cannot be read (" in line(lambda: Parquet(file=path)), size


def test_memory_for_row_groups_is_bounded() -> None:
    loaded: list[int] = []

    def asked(kept: RecentlyUsed[bytes], *numbers: int) -> list[int]:
        loaded.clear()
        for number in numbers:
            kept.get(number, lambda number=number: loaded.append(number) or bytes(100))  # type: ignore[misc]
        return loaded

    kept = RecentlyUsed[bytes](350, len)
    assert asked(kept, 0, 1, 2, 0, 3, 0, 1) == [0, 1, 2, 3, 1], "1 was used least recently when 3 came"
    assert asked(RecentlyUsed[bytes](1, len), 5, 6, 5, 6) == [5, 6], "two stay whatever their size"
    with pytest.raises(ZeroDivisionError):
        kept.get(9, lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert 9 not in kept


def test_tars_give_the_images_of_parquet_files(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset, "PIECE_BYTES", 10_000)
    data = tmp_path / "data" / "tars"
    for number in range(2):
        write_tar(data / f"{number:03d}.tar", range(30 * number, 30 * number + 30), about=True)
    write_parquet(tmp_path / "all.parquet", range(60), 20)
    parquet = Parquet(file=tmp_path / "all.parquet", columns=Columns(group="group"))
    keys = Keys(domain="domain", group="group")
    for file in (data, data / "*.tar", f"file://{tmp_path}/data/tars/*.tar", f"{server.address}/tars/{{000..001}}.tar"):
        same(found := WebDataset(file=file, keys=keys), parquet)
    assert found.name_in_data(31) == "tars/001.tar, a/000031.png"
    first = hashed(found, tmp_path / "cache")
    assert np.array_equal(first, hashed(parquet))
    server.requests.clear()
    again = WebDataset(file=f"{server.address}/tars", keys=keys)
    assert np.array_equal(hashed(again, tmp_path / "cache"), first)
    assert {method for method, *_ in server.requests} == {"HEAD"}, "a warm start opens no tar"
    server.requests.clear()
    row = again.pieces.rows(1).start + 1
    assert again.content(row) == png(row)
    ((_, start, stop),) = server.bodies()
    assert stop - start == len(png(row)), "an image alone is one range"


def test_names_that_look_like_globs_are_names(tmp_path: Path) -> None:
    for site in ("run[1]", "run1", "{a,b}"):
        write_tar(tmp_path / site / f"{site}.tar", range(3), about=False)
        (tmp_path / site / "._0.tar").write_bytes(b"of macOS")
    for file in ("run[1]", "run[1]/*.tar", "run[1]/run[1].tar"):
        for address in (tmp_path / file, f"file://{tmp_path}/{file}") if file != "run[1]/*.tar" else (tmp_path / file,):
            assert WebDataset(file=address).domain_names == ("run[1]",)
    assert WebDataset(file=tmp_path / "{a,b}" / "{a,b}.tar").domain_names == ("{a,b}",)
    assert WebDataset(file=tmp_path / "run[0-9]" / "*.tar").domain_names == ("run1",)
    assert WebDataset(file=f"file://{tmp_path}").domain_names == ("run1", "run[1]", "{a,b}"), "without hidden files"


def test_folders_of_tars_that_are_parts_of_a_split_are_no_domains(tmp_path: Path) -> None:
    for name in ("one/train/0.tar", "two/train/0.tar", "two/val/0.tar"):
        write_tar(tmp_path / name, range(3), about=True)
    for root, parts in ((tmp_path, "train, val"), (tmp_path / "*" / "train" / "*.tar", "train")):
        assert f"the folders of the tars, {parts}, are parts of a split" in line(
            lambda root=root: WebDataset(file=root)
        )
        assert len(WebDataset(file=root, keys=Keys(domain="domain"))) > 3
    assert WebDataset(file=tmp_path / "one").domain_names == ("train",)


def test_another_process_gets_data_that_has_read_nothing_and_files_beside_are_named(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "tars" / "000.tar", range(30), about=True)
    table = write_parquet(tmp_path / "all.parquet", range(30), 20)
    for data in (Parquet(file=table), WebDataset(file=tar, keys=Keys(domain="domain"))):
        unread = len(pickle.dumps(data))
        assert data.content(3) == png(3) and len(pickle.dumps(data)) == unread
        same(pickle.loads(pickle.dumps(data)), data)
    write_parquet(tmp_path / "more/1.parquet", range(3), 3)
    (said, _) = Parquet(file=tmp_path).left_out
    assert said == "1 .parquet file not read, the first: more/1.parquet; unpack them, or name them in data.file"
    assert Parquet(file=table).left_out == ()


def test_images_that_follow_each_other_are_one_request(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webdataset, "PIECE_BYTES", 20_000)
    write_tar(tmp_path / "data" / "cats" / "0.tar", range(60), about=False)
    found = WebDataset(file=server.address)
    server.requests.clear()
    assert [found.content(row) for row in range(60)] == [png(row) for row in range(60)]
    assert len(server.bodies()) == len(found.pieces.ends) < 10
    assert found.domain_names == ("cats",) and found.class_names == ("cat", "dog")


def test_faults_of_tars(tmp_path: Path) -> None:
    path, one = write_tar(tmp_path / "0.tar", range(3), about=True), tmp_path / "1.tar"
    assert 'no key "site"' in line(lambda: WebDataset(file=path, keys=Keys(domain="site")))
    write_tar(one, range(3), about=False)
    problem = 'a/000000.json: it must exist and have the key "domain"'
    assert problem in line(lambda: WebDataset(file=one, keys=Keys(domain="domain")))
    for mode, names, problem in (
        ("w", ["a.txt"], "1.tar: the tar contains no images"),
        ("w", ["a.png", "a.jpg"], "a.png and a.jpg are two images of one key"),
        ("w", ["a.png", "a.json"], "1.tar: a.json: cannot be read"),
        ("w:gz", ["a.png"], "1.tar: byte 0: cannot be read as a tar"),
    ):
        with tarfile.open(one, mode) as file:
            for name in names:
                file.addfile(tarfile.TarInfo(name))
        assert problem in line(lambda: WebDataset(file=one))
    assert "does not exist; name a .tar file" in line(lambda: WebDataset(file=tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "contains no .tar files" in line(lambda: WebDataset(file=tmp_path / "empty"))
    assert list(expand_braces("a{08..11}.tar")) == ["a08.tar", "a09.tar", "a10.tar", "a11.tar"]
    assert list(expand_braces("{x,y}/{1..2}")) == ["x/1", "x/2", "y/1", "y/2"]
    assert list(expand_braces("plain")) == ["plain"]


def of_members(path: Path, **members: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def test_a_member_with_a_second_dot_is_an_image_and_others_are_named(tmp_path: Path) -> None:
    """WebDataset's writer writes such keys, which its reader cuts at the first dot."""
    photo = {"7_mag0.5.png": png(0), "7_mag0.5.cls": b"cat", "7_mag0.25.png": png(1), "7_mag0.25.cls": b"dog"}
    of_members(tmp_path / "photo/0.tar", **photo, **{"v1.x.png": png(2), "v1.cls": b"cat", "._a.png": b"\0"})
    masked = {
        "a.jpg": png(3),
        "a.mask.png": png(4),
        "a.npy": b"x",
        "a.json": b'{"label": "cat", "p:dog": 0.2}',
        "a.meta.json": b"?",
    }
    lost = {"b.dcm": b"x", "b.cls": b"dog", "c.cls": b"dog", "d.heic": b"x", "e": png(5), "f.txt": b"", "l.json": b"{}"}
    of_members(tmp_path / "scan/0.tar", **masked, **lost)
    of_members(tmp_path / "scan/1.tar", **{"g.0.png": png(6), "g.0.cls": b"dog", "h.dcm": b"x"})
    (tmp_path / "scan/2.tar.gz").write_bytes(b"x")
    for _ in range(2):  # the second time it is remembered
        data = WebDataset(file=tmp_path)
        assert [data.content(row) for row in range(len(data))] == [png(number) for number in (0, 1, 2, 3, 6)]
        assert [data.class_names[label] for label in data.labels] == ["cat", "dog", "cat", "cat", "dog"]
        assert data.domain_names == ("photo", "scan") and data.domains.tolist() == [0, 0, 0, 1, 1]
        assert data.name_in_data(0) == "photo/0.tar, 7_mag0.5.png"
        assert [line.rpartition("; ")[0] for line in data.left_out] == [
            "2 .dcm files not read, the first: b.dcm",
            "1 file without an extension not read, the first: e",
            "1 .cls file not read, the first: c.cls",
            "1 .heic file not read, the first: d.heic",
            "1 .png file not read, the first: a.mask.png",
            f"{tmp_path}: KEY.json: p:dog: not read as soft labels",
            "1 .tar.gz file not read, the first: scan/2.tar.gz",
        ]
    two = of_members(tmp_path / "2.tar", **{"x.left.png": png(0), "x.right.png": png(1), "x.cls": b"cat"})
    assert "x.left.png and x.right.png are two images of one key" in line(lambda: WebDataset(file=two))
    none = of_members(tmp_path / "3.tar", **{"x.dcm": b"x", "x.cls": b"cat"})
    assert "no images (known by their extensions): 1 other file: 1 .dcm; remove" in line(lambda: WebDataset(file=none))
