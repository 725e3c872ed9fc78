"""The states of image files, looked at by several processes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from xdm_ft.containers.files import ImageFiles, PathsBelow
from xdm_ft.features import hashes as module
from xdm_ft.features.hashes import FileHashes, FileStates, file_states, hash_files
from xdm_ft.features.shards import contents_of


class Some(ImageFiles):
    def __init__(self, folder: Path, names: list[str]) -> None:
        self.paths, self.shown, self.base = PathsBelow(folder, names), PathsBelow(folder, names), folder
        self.class_names, self.domain_names = ("all",), ("all",)
        self.labels = self.domains = np.zeros(len(names), np.int64)


@pytest.fixture
def images(tmp_path: Path) -> Some:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(7):
        (folder / f"{number}").write_bytes(b"x" * number)
    os.rename(folder / "6", os.fsencode(folder) + b"/\xe9")
    (folder / "linked").symlink_to("5")
    (folder / "lost").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    names = [*map(str, range(6)), os.fsdecode(b"\xe9"), "linked", "lost", "pipe", "", "gone", "a\0b"]
    return Some(folder, names)


def expected(images: Some) -> list[list[int]]:
    states = [os.stat(path) for path in images.paths[:8]]
    stamps = [[state.st_size, state.st_mtime_ns, state.st_ctime_ns] for state in states]
    return [*stamps, *[[-1] * 3] * 5]


UNREADABLE = {
    8: "No such file or directory",
    9: "not a regular file",
    10: "not a regular file",
    11: "No such file or directory",
    12: "embedded null byte",
}


@pytest.mark.parametrize("rows_at_once", [100, 2], ids=["here", "in processes"])
def test_states_are_those_of_the_files(rows_at_once: int, images: Some, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", rows_at_once)
    monkeypatch.setattr(module, "own_cores", lambda: 2)
    original = module._StatesOf.__getitem__

    def spy(self: module._StatesOf, rows: range) -> FileStates:
        found = original(self, rows)
        found.unreadable[1000 + rows.start] = str(os.getpid())  # the only way out of a process
        return found

    monkeypatch.setattr(module._StatesOf, "__getitem__", spy)
    found = file_states(images)
    processes = {int(text) for row, text in found.unreadable.items() if row >= 1000}
    assert (os.getpid() in processes, len(processes)) == ((True, 1) if rows_at_once == 100 else (False, 2))
    assert found.stamps.tolist() == expected(images)
    assert {row: text for row, text in found.unreadable.items() if row < 1000} == UNREADABLE and not found.digests


def test_paths_are_part_of_the_state(images: Some) -> None:
    swapped = Some(images.base, [images.paths.rest[0], "", *images.paths.rest[2:]])
    assert file_states(images).paths == file_states(images).paths != file_states(swapped).paths


def test_a_list_that_processes_looked_at_is_found_again(images: Some, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 3)
    first = hash_files(images, images.base.parent, show=False)
    monkeypatch.setattr("xdm_ft.features.hashes._look_up", lambda *_, **__: pytest.fail("looked up one by one"))
    again = hash_files(images, images.base.parent, show=False)
    assert np.array_equal(first.digests, again.digests) and first.files.tolist() == [*range(8)]
    assert first.unreadable == again.unreadable == UNREADABLE


def test_copies_are_listed_and_numbered(images: Some) -> None:
    (Path(images.base) / "3").write_bytes(b"x" * 4)
    (Path(images.base) / "1").write_bytes(b"")  # as 0: empty files are not compared
    hashes = hash_files(images, None, show=False)
    assert hashes.duplicates() == [[3, 4], [5, 7]]
    contents, rows, number_of = hashes.images
    assert rows.tolist() == [0, 2, 3, 5, 6] and len(contents) == 5
    assert number_of.tolist() == [0, 0, 1, 2, 2, 3, 4, 3, -1, -1, -1, -1, -1]


@pytest.mark.parametrize("rows", [0, 1, 3000])
def test_distinct_images_are_in_the_order_of_their_rows(rows: int) -> None:
    draw = np.random.default_rng(0)
    digests = draw.integers(0, 200, (rows, 16), dtype=np.uint8)
    digests[draw.permutation(rows)[: rows // 3]] = digests[draw.permutation(rows)[: rows // 3]]  # copies
    digests[draw.permutation(rows)[: rows // 5], :8] = 7  # hashes that share their first half
    digests[draw.permutation(rows)[: rows // 5], 8:] %= 2
    digests[draw.permutation(rows)[: rows // 9]] = 0  # not hashed
    number: dict[bytes, int] = {}
    wanted = [number.setdefault(one.tobytes(), len(number)) if one.any() else -1 for one in digests]
    contents, first, number_of = FileHashes(digests).images
    assert number_of.tolist() == wanted and first.tolist() == [wanted.index(n) for n in range(len(number))]
    assert [one.tobytes() for one in digests[first]] == list(number) and np.array_equal(
        contents, contents_of(digests[first])
    )
