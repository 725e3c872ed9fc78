"""The index of hashes: a later run opens no image, and every change is noticed."""

from __future__ import annotations

import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash
from cache_scenario import Files, Pixels, features_of, write_images

from xdm_ft.features import hashes as hashing
from xdm_ft.features.hashes import FileHashes, hash_files
from xdm_ft.runtime.errors import UserError


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were opened."""
    opened: list[str] = []
    original = hashing.hash_file

    def spy(path: str) -> object:
        opened.append(Path(path).name)
        return original(path)

    monkeypatch.setattr(hashing, "hash_file", spy)
    return opened


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images", 5)


def hashes_of(folder: Path) -> FileHashes:
    return hash_files(Files(folder), folder.parent, show=False)


def expected(folder: Path) -> np.ndarray:
    digests = [xxhash.xxh3_128_digest(path.read_bytes()) for path in sorted(folder.iterdir())]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)


def test_hashes_are_of_the_bytes(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "ROWS_PER_COMMIT", 2)
    monkeypatch.setattr(hashing, "READ_BYTES", 10)
    assert np.array_equal(hashes_of(images).digests, expected(images))
    pixels = Pixels(3)
    in_memory = hash_files(pixels, tmp_path, show=False)
    assert in_memory.digests[2].tobytes() == xxhash.xxh3_128_digest(pixels.content(2))


def test_a_later_run_opens_no_image(images: Path, hashed: list[str]) -> None:
    first = hashes_of(images)
    assert len(hashed) == 5
    second = hashes_of(images)
    assert len(hashed) == 5
    assert np.array_equal(first.digests, second.digests)


def test_touched_files_are_hashed_again_and_found_in_the_cache(tmp_path: Path, images: Path, hashed: list[str]) -> None:
    first = features_of(Files(images), tmp_path / "cache")
    os.utime(images / "00002.png", (1, 1))
    second = features_of(Files(images), tmp_path / "cache")
    assert hashed[5:] == ["00002.png"]
    assert (second.key, second.extracted) == (first.key, 0)


def test_changed_content_is_noticed(tmp_path: Path, images: Path, hashed: list[str]) -> None:
    first = features_of(Files(images), tmp_path / "cache")
    (images / "00002.png").write_bytes((images / "00001.png").read_bytes())
    second = features_of(Files(images), tmp_path / "cache")
    assert hashed[5:] == ["00002.png"]
    assert second.extracted == 0, "it is a copy of another image"
    rows = torch.tensor([1, 2])
    assert torch.equal(second[rows[1:]], first[rows[:1]]) and not torch.equal(second[rows], first[rows])


def test_content_changed_with_equal_size_and_mtime_is_noticed(images: Path) -> None:
    path = images / "00002.png"
    before, status = hashes_of(images).digests, path.stat()
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert np.array_equal(hashes_of(images).digests, expected(images))
    assert not np.array_equal(hashes_of(images).digests, before)


def test_a_moved_data_set_is_found_in_the_cache(tmp_path: Path, images: Path) -> None:
    first = features_of(Files(images), tmp_path / "cache")
    moved = images.rename(tmp_path / "moved")
    second = features_of(Files(moved), tmp_path / "cache")
    assert (second.key, second.extracted) == (first.key, 0)


def test_equal_relative_paths_in_two_folders_are_two_files(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_images(tmp_path / "other", 7)
    (other / "00000.png").write_bytes(b"different")
    for folder in (images, other):
        monkeypatch.chdir(folder)
        dataset = Files(Path())
        assert not os.path.isabs(dataset.content(0))
        assert np.array_equal(hash_files(dataset, tmp_path, show=False).digests, expected(folder))


def test_file_names_need_not_be_unicode(images: Path, hashed: list[str]) -> None:
    odd = os.fsdecode(os.fsencode(images) + b"/caf\xe9 \n'<b>.png")
    os.rename(images / "00000.png", odd)
    assert np.array_equal(hashes_of(images).digests, expected(images))
    assert len(hashed) == 5
    hashes_of(images)
    assert len(hashed) == 5


@pytest.mark.parametrize("damage", [b"", b"not a database at all" * 9, None], ids=["empty", "text", "middle"])
def test_a_damaged_index_is_replaced(damage: bytes | None, images: Path, hashed: list[str], caplog) -> None:
    hashes_of(images)
    path = images.parent / "index.sqlite"
    if damage is None:
        first, *pages = (path.read_bytes()[place : place + 4096] for place in range(0, path.stat().st_size, 4096))
        damage = first + b"".join(b"\xff" * 200 + page[200:] for page in pages)
    path.write_bytes(damage)
    assert np.array_equal(hashes_of(images).digests, expected(images))
    assert len(hashed) == 10
    assert bool(damage) == (f"{path} is damaged" in caplog.text)
    hashes_of(images)
    assert len(hashed) == 10


def test_a_full_disk_is_reported(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = hashing._insert_files

    def add_on_a_small_disk(index: sqlite3.Connection, entries: list[tuple[bytes, int, int, int, bytes]]) -> None:
        index.execute("PRAGMA max_page_count = 2")  # SQLite then raises the error of a full disk
        original(index, [(name * 100, *rest) for name, *rest in entries])

    monkeypatch.setattr(hashing, "_insert_files", add_on_a_small_disk)
    with pytest.raises(UserError, match=r"index\.sqlite: the disk is full; make room, or set features\.dir"):
        hashes_of(images)


def test_an_index_that_can_not_be_opened_is_reported(images: Path) -> None:
    (images.parent / "index.sqlite").mkdir()
    with pytest.raises(UserError, match=r"index\.sqlite: can not be written .*set features\.dir"):
        hashes_of(images)


def test_many_threads_write_at_once(images: Path) -> None:
    results: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: results.append(hashes_of(images).digests)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(np.array_equal(result, expected(images)) for result in results)
    with closing(sqlite3.connect(images.parent / "index.sqlite")) as index:
        assert index.execute("SELECT count(*) FROM files").fetchone() == (5,)


def test_index_is_private(images: Path) -> None:
    hashes_of(images)
    assert (images.parent / "index.sqlite").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_being_written_is_refused(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class WhileAnotherWrites:
        def update(self, data: bytes) -> None:
            if len(data) == 10:  # the first piece
                with open(images / "00003.png", "ab") as file:
                    file.write(b"more")

        def digest(self) -> bytes:
            return bytes(16)

    monkeypatch.setattr(hashing, "READ_BYTES", 10)
    monkeypatch.setattr(hashing, "xxhash", SimpleNamespace(**{**vars(xxhash), "xxh3_128": WhileAnotherWrites}))
    (images / "00003.png").write_bytes(b"eighteen bytes .." + b"!")
    with pytest.raises(UserError, match=r"00003\.png: another program is writing to this file"):
        hashes_of(images)


def test_an_index_of_other_tables_is_replaced(images: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(sqlite3.connect(images.parent / "index.sqlite")) as index:
        index.execute("CREATE TABLE files (path, thing)")
    assert np.array_equal(hashes_of(images).digests, expected(images))
    assert "index.sqlite is damaged" in caplog.text


def test_processes_may_begin_at_the_same_moment(images: Path) -> None:
    for _ in range(5):
        (images.parent / "index.sqlite").unlink(missing_ok=True)
        together = threading.Barrier(8)

        def begin(_: int, together: threading.Barrier = together) -> np.ndarray:
            together.wait()
            return hashes_of(images).digests

        with ThreadPoolExecutor(8) as pool:
            assert all(np.array_equal(found, expected(images)) for found in pool.map(begin, range(8)))


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of files that were looked up one by one."""
    counts: list[int] = []
    original = hashing._look_up

    def spy(index: sqlite3.Connection, hashes: FileHashes, rows: list[int]) -> dict[int, bytes]:
        counts.append(len(rows))
        return original(index, hashes, rows)

    monkeypatch.setattr(hashing, "_look_up", spy)
    return counts


def test_an_unchanged_data_set_is_found_without_a_look_up_per_file(images: Path, looked_up: list[int]) -> None:
    first = hashes_of(images)
    assert looked_up == [5]
    again = hashes_of(images)
    assert looked_up == [5] and np.array_equal(again.digests, first.digests) and again.changed_file(range(5)) is None
    (images / "00003.png").write_bytes(b"other")
    assert np.array_equal(hashes_of(images).digests, expected(images)) and looked_up == [5, 5]
    hashes_of(images)
    (images / "00003.png").rename(images / "zzz.png")
    assert np.array_equal(hashes_of(images).digests, expected(images)) and looked_up == [5, 5, 5]
    assert hash_files(Files(images), images.parent, show=False, equal_sizes_only=True).duplicates() == []
    assert looked_up == [5, 5, 5], "the list of all files serves those of equal size too"


def test_a_data_set_with_an_unreadable_file_is_looked_up_each_time(images: Path, looked_up: list[int]) -> None:
    def fails(path: str) -> object:
        raise PermissionError(13, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "hash_file", fails)
        assert len(hashes_of(images).unreadable) == 5
    assert hashes_of(images).unreadable == {} and looked_up == [5, 5]


@pytest.mark.parametrize("damage", ["digests", "checksum"])
def test_a_damaged_list_is_not_used(damage: str, images: Path, looked_up: list[int]) -> None:
    hashes_of(images)
    with closing(sqlite3.connect(images.parent / "index.sqlite")) as index, index:
        column = {"digests": "xxh3_128 = zeroblob(80)", "checksum": "checksum = 'a'"}[damage]
        index.execute(f"UPDATE lists SET {column}")
    assert np.array_equal(hashes_of(images).digests, expected(images)) and looked_up == [5, 5]


def test_lists_that_were_not_used_for_longest_are_removed(
    images: Path, looked_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "KEPT_LISTS", 2)
    others = [write_images(images.parent / name, rows) for name, rows in (("a", 2), ("b", 3))]
    for folder in (images, others[0], images, others[1]):
        hashes_of(folder)
    assert looked_up == [5, 2, 3]
    hashes_of(images)
    hashes_of(others[0])
    assert looked_up == [5, 2, 3, 2]


def test_processes_divide_the_files_of_which_no_hash_is_known(images: Path, hashed: list[str]) -> None:
    parts = [hash_files(Files(images), images.parent, show=False, share=(rank, 2)) for rank in range(2)]
    assert hashed == [f"{number:05d}.png" for number in (0, 2, 4, 1, 3)]
    assert [part.digests.any(1).tolist() for part in parts] == [
        [row % 2 == rank for row in range(5)] for rank in range(2)
    ]
    whole = hashes_of(images)
    assert len(hashed) == 5 and np.array_equal(whole.digests, expected(images))
    known = hash_files(Files(images), images.parent, show=False, share=(1, 2))
    assert np.array_equal(known.digests, whole.digests), "all of an unchanged data set are found at once"
