"""Hashes of files: a later run opens no image, and every change is noticed. So it is with which images decode."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash
from cache_scenario import Files, features_of, write_images
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from xdm_ft.features import hashes as module
from xdm_ft.features.cache import ContentIndex, contents_of
from xdm_ft.features.hashes import FileHashes, file_states, find_undecodable, hash_files
from xdm_ft.image_files.files import ImageFiles, PathsBelow
from xdm_ft.images.transforms import Preprocessing
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage import facts


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images", 5)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were opened."""
    return spied(monkeypatch, module, "hash_file", lambda path: Path(path).name)


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of files that were looked up one by one."""
    return spied(monkeypatch, module, "_hash_each", lambda rows, *_: len(rows))


def spied(monkeypatch: pytest.MonkeyPatch, where: object, name: str, seen: Callable[..., object]) -> list:
    calls, original = [], getattr(where, name)

    def spy(*arguments: object) -> object:
        calls.append(seen(*arguments))
        return original(*arguments)

    monkeypatch.setattr(where, name, spy)
    return calls


def hashes_of(folder: Path) -> FileHashes:
    """The hashes of a folder's images, which are those of their bytes."""
    hashes = hash_files(Files(folder), folder.parent, show=False)
    digests = [xxhash.xxh3_128_digest(path.read_bytes()) for path in sorted(folder.iterdir())]
    assert hashes.unreadable or b"".join(digests) == hashes.digests.tobytes()
    return hashes


def test_only_what_was_touched_is_opened_again(tmp_path: Path, images: Path, hashed: list[str]) -> None:
    cache = tmp_path / "cache"
    first = features_of(Files(images), cache)
    assert len(hashed) == 5 and features_of(Files(images), cache).extracted == 0 and len(hashed) == 5
    os.utime(images / "00002.png", (1, 1))
    second = features_of(Files(images), cache)
    assert hashed[5:] == ["00002.png"] and (second.key, second.extracted) == (first.key, 0)
    shutil.copyfile(images / "00001.png", images / "00002.png")
    third = features_of(Files(images), cache)
    assert hashed[6:] == ["00002.png"] and third.extracted == 0, "it is a copy of another image"
    rows = torch.tensor([1, 2])
    assert torch.equal(third[rows[1:]], first[rows[:1]]) and not torch.equal(third[rows], first[rows])


def test_content_changed_with_equal_size_and_mtime_is_noticed(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_PER_COMMIT", 2)
    monkeypatch.setattr(facts, "READ_BYTES", 10)
    path = images / "00002.png"
    before, status = hashes_of(images).digests, path.stat()
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert not np.array_equal(hashes_of(images).digests, before)


def test_names_of_files(tmp_path: Path, images: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They need not be UTF-8, and equal relative paths in two folders are two files."""
    os.rename(images / "00000.png", os.fsdecode(os.fsencode(images) + b"/caf\xe9 \n'<b>.png"))
    for _ in range(2):
        first = hashes_of(images)
        assert len(hashed) == 5
    other = write_images(tmp_path / "other", 7)
    (other / "00000.png").write_bytes(b"different")
    for folder in (images, other):
        monkeypatch.chdir(folder)
        relative = hash_files(Files(Path()), tmp_path, show=False).digests
        assert np.array_equal(relative, hashes_of(folder).digests)
    assert len(first.digests) == 5


def test_an_unchanged_data_set_is_found_without_a_look_up_per_file(images: Path, looked_up: list[int]) -> None:
    first = hashes_of(images)
    again = hashes_of(images)
    assert looked_up == [5] and np.array_equal(again.digests, first.digests) and again.changed_file(range(5)) is None
    (images / "00003.png").write_bytes(b"other")
    assert again.changed_file([2, 3]) == str(images / "00003.png")
    hashes_of(images)
    (images / "00003.png").rename(images / "zzz.png")
    hashes_of(images)
    assert looked_up == [5, 5, 5]
    assert hash_files(Files(images), images.parent, show=False, equal_sizes_only=True).duplicates() == []
    assert looked_up == [5, 5, 5], "the list of all files serves those of equal size too"


def test_an_unreadable_file_is_looked_at_each_time(images: Path, looked_up: list[int]) -> None:
    def fails(path: str) -> object:
        raise PermissionError(13, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "hash_file", fails)
        assert hashes_of(images).unreadable == dict.fromkeys(range(5), "Permission denied")
    assert hashes_of(images).unreadable == {} and looked_up == [5, 5]


def test_lists_that_were_not_used_for_longest_are_removed(
    images: Path, looked_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "KEPT_LISTS", 2)
    a, b = (write_images(images.parent / name, rows) for name, rows in (("a", 2), ("b", 3)))
    for folder in (images, a, images, b, images, a):
        hashes_of(folder)
    assert looked_up == [5, 2, 3, 2]


def test_processes_divide_the_files_of_which_no_hash_is_known(images: Path, hashed: list[str]) -> None:
    parts = [hash_files(Files(images), images.parent, show=False, share=(rank, 2)) for rank in range(2)]
    assert hashed == [f"{number:05d}.png" for number in (0, 2, 4, 1, 3)]
    assert [np.flatnonzero(part.digests.any(1)).tolist() for part in parts] == [[0, 2, 4], [1, 3]]
    assert hashes_of(images).digests.any(1).all() and len(hashed) == 5


def test_a_file_that_is_being_written_is_refused(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class WhileAnotherWrites:
        def update(self, data: bytes) -> None:
            if len(data) == 10:  # the first piece
                with open(images / "00003.png", "ab") as file:
                    file.write(b"more")

        def digest(self) -> bytes:
            return bytes(16)

    monkeypatch.setattr(facts, "READ_BYTES", 10)
    monkeypatch.setattr(facts, "xxhash", SimpleNamespace(**{**vars(xxhash), "xxh3_128": WhileAnotherWrites}))
    (images / "00003.png").write_bytes(b"eighteen bytes ..!")
    with pytest.raises(UserError, match=r"00003\.png: another program is writing to this file"):
        hashes_of(images)


# ---- The index


EARLIER = (  # another table of this name, and those of an earlier version
    "CREATE TABLE facts (path, thing)",
    "CREATE TABLE files (path BLOB PRIMARY KEY, size, mtime_ns, ctime_ns, xxh3_128 BLOB) WITHOUT ROWID",
)


@pytest.mark.parametrize("damage", ["empty", "text", "middle", "another table", "earlier", "a list", "all facts"])
def test_a_damaged_index_costs_a_look(damage: str, images: Path, hashed: list[str], caplog) -> None:
    hashes_of(images)
    path = images.parent / "index.sqlite"
    whole = path.read_bytes()
    if damage in ("a list", "all facts"):
        which = {"a list": "used NOT NULL", "all facts": "true"}[damage]
        with closing(sqlite3.connect(path)) as index, index:
            index.execute(f"UPDATE facts SET fact = zeroblob(24) WHERE {which}")
    elif damage in ("another table", "earlier"):
        path.unlink()
        with closing(sqlite3.connect(path)) as index:
            index.execute(EARLIER[damage == "earlier"])
    else:
        pages = [whole[place : place + 4096] for place in range(0, len(whole), 4096)]
        middle = pages[0] + b"".join(b"\xff" * 200 + page[200:] for page in pages[1:])
        path.write_bytes({"empty": b"", "text": b"not a database at all" * 9, "middle": middle}[damage])
    hashes_of(images)
    count = 5 if damage == "a list" else 10
    assert len(hashed) == count
    assert (f"{path} is damaged" in caplog.text) == (damage in ("text", "middle", "another table"))
    hashes_of(images)
    assert len(hashed) == count


def test_an_index_that_can_not_be_written(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(facts.Facts, "tables", ("PRAGMA max_page_count = 2", *facts.Facts.tables))  # a full disk
        with pytest.raises(UserError, match=r"index\.sqlite: the disk is full; make room, or set features\.dir"):
            hashes_of(images)
    path = images.parent / "index.sqlite"
    for code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_LOCK):  # as a quota ends

        def fails(*_: object, code: int = code) -> None:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = code
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(facts.Facts, "_transaction", fails)
            with pytest.raises(UserError, match=r"index\.sqlite: the disk fails \(disk I/O error\); make room, check"):
                hashes_of(images)
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"index\.sqlite: cannot be written .*set features\.dir"):
        hashes_of(images)


def test_many_may_begin_at_the_same_moment(images: Path) -> None:
    for _ in range(5):
        (images.parent / "index.sqlite").unlink(missing_ok=True)
        together = threading.Barrier(8)

        def begin(_: int, together: threading.Barrier = together) -> FileHashes:
            together.wait()
            return hashes_of(images)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(begin, range(8)))
    with closing(sqlite3.connect(images.parent / "index.sqlite")) as index:
        assert index.execute("SELECT count(*), count(used) FROM facts").fetchone() == (6, 1)


# ---- States of files


class Some(ImageFiles):
    def __init__(self, folder: Path, names: list[str]) -> None:
        self.paths, self.shown, self.base = PathsBelow(folder, names), PathsBelow(folder, names), folder
        self.class_names, self.domain_names = ("all",), ("all",)
        self.labels = self.domains = np.zeros(len(names), np.int64)


@pytest.fixture
def some(tmp_path: Path) -> Some:
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


GONE, IRREGULAR = "No such file or directory", "not a regular file"
UNREADABLE = {8: GONE, 9: IRREGULAR, 10: IRREGULAR, 11: GONE, 12: "embedded null byte"}


@pytest.mark.parametrize("rows_at_once", [100, 2], ids=["here", "in processes"])
def test_states_are_those_of_the_files(rows_at_once: int, some: Some, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", rows_at_once)
    monkeypatch.setattr(module, "own_cores", lambda: 2)
    original = module._StatesOf.__getitem__

    def spy(self: module._StatesOf, rows: range) -> FileHashes:
        states = original(self, rows)
        states.unreadable[1000 + rows.start] = str(os.getpid())  # the only way out of a process
        return states

    monkeypatch.setattr(module._StatesOf, "__getitem__", spy)
    states = file_states(some)
    processes = {int(text) for row, text in states.unreadable.items() if row >= 1000}
    assert (os.getpid() in processes, len(processes)) == ((True, 1) if rows_at_once == 100 else (False, 2))
    files = [os.stat(path) for path in some.paths[:8]]
    stamps = [[file.st_size, file.st_mtime_ns, file.st_ctime_ns] for file in files]
    assert states.stamps.tolist() == [*stamps, *[[-1] * 3] * 5] and not states.digests.any()
    assert {row: text for row, text in states.unreadable.items() if row < 1000} == UNREADABLE
    swapped = Some(some.base, [some.paths.rest[0], "", *some.paths.rest[2:]])
    assert file_states(swapped).paths != states.paths, "paths are part of the state"


def test_a_list_with_unreadable_files_is_found_again(some: Some, looked_up: list[int], monkeypatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 3)
    first, again = (hash_files(some, some.base.parent, show=False) for _ in range(2))
    assert looked_up == [8] and np.array_equal(first.digests, again.digests)
    assert first.files.tolist() == [*range(8)] and first.unreadable == again.unreadable == UNREADABLE


# ---- Distinct images


def test_copies_are_listed_and_numbered(some: Some) -> None:
    (Path(some.base) / "3").write_bytes(b"x" * 4)
    (Path(some.base) / "1").write_bytes(b"")  # as 0: empty files are not compared
    hashes = hash_files(some, None, show=False)
    assert hashes.duplicates() == [[3, 4], [5, 7]]
    assert hashes.images.rows.tolist() == [0, 2, 3, 5, 6] and len(hashes.images.contents) == 5
    assert hashes.images.number_of.tolist() == [0, 0, 1, 2, 2, 3, 4, 3, -1, -1, -1, -1, -1]
    assert hashes.unreadable_rows({1: "a", 2: "b"}) == {2: "a", 3: "b", 4: "b"} | UNREADABLE


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3000])
def test_distinct_images_are_in_the_order_of_their_rows(rows: int, shared: bool) -> None:
    draw = np.random.default_rng(0)
    digests = draw.integers(0, 200, (rows, 16), dtype=np.uint8)
    digests[draw.permutation(rows)[: rows // 3]] = digests[draw.permutation(rows)[: rows // 3]]  # copies
    if shared:
        digests[draw.permutation(rows)[: rows // 5], :8] = 7  # hashes that share their first half
        digests[draw.permutation(rows)[: rows // 5], 8:] %= 2
    digests[draw.permutation(rows)[: rows // 9]] = 0  # not hashed
    number: dict[bytes, int] = {}
    wanted = [number.setdefault(row.tobytes(), len(number)) if row.any() else -1 for row in digests]
    contents, first, number_of = FileHashes(digests).images
    assert number_of.tolist() == wanted and first.tolist() == [wanted.index(n) for n in range(len(number))]
    assert np.array_equal(contents, contents_of(digests[first]))
    assert [row.tobytes() for row in digests[first]] == list(number)


HALVES = [bytes([first]) * 8 + bytes([second]) * 8 for first in range(1, 4) for second in range(3)]  # some agree
MANY = [bytes(row) for row in np.random.default_rng(0).integers(0, 256, (500, 16), dtype=np.uint8)]


@given(wanted=st.lists(st.sampled_from(HALVES), unique=True), asked=st.lists(st.sampled_from(HALVES)))
@example(wanted=HALVES, asked=HALVES[4:8])
@example(wanted=[b"a" * 15 + b"\0", b"a" * 16], asked=[b"a" * 16, b"a" * 15 + b"\0"])
@example(wanted=[], asked=[b"a" * 16])
@example(wanted=MANY[300:] + MANY[:100], asked=MANY[:450])
def test_contents_are_found(wanted: list[bytes], asked: list[bytes]) -> None:
    number = {content: position for position, content in enumerate(wanted)}
    numbers = ContentIndex(np.array(wanted, "S16")).find(np.array(asked, "S16"))
    assert numbers.tolist() == [number.get(content, -1) for content in asked]


# ---- Which images decode

OWN = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=8, resize="pad")


class Counting(Files):
    """Counts the images that are decoded."""

    decoder = "test_hashes.Counting.image"

    def __init__(self, folder: Path, when_read: Callable[[int], object] = lambda row: None) -> None:
        super().__init__(folder)
        self.seen: list[int] = []
        self.when_read = when_read

    def image(self, row: int) -> Image.Image:
        self.seen.append(row)
        self.when_read(row)
        return super().image(row)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten images: 3 is none, and 7 is too long a strip."""
    monkeypatch.setattr(module, "DECODED_PER_COMMIT", 4)
    (tmp_path / "cache").mkdir()
    folder = write_images(tmp_path / "images", 10)
    (folder / "00003.png").write_bytes(b"no image")
    Image.new("RGB", (9000, 1)).save(folder / "00007.png")
    return folder


def decoded(
    data: Counting, cache: Path | None, preprocessing: Preprocessing = OWN, threads: int = 2
) -> tuple[dict[int, str], list[int]]:
    """The images that do not decode, and the rows that were decoded for that."""
    hashes = hash_files(data, cache, show=False)
    return find_undecodable(data, hashes, preprocessing, cache, threads, show=False), sorted(data.seen)


def test_images_are_decoded_once(broken: Path) -> None:
    cache = broken.parent / "cache"
    faults, seen = decoded(Counting(broken), cache)
    assert list(faults) == [3, 7] and seen == [*range(10)]
    assert faults[3] == "not an image in a format that Pillow reads" and "too long and narrow" in faults[7]
    assert decoded(Counting(broken), cache) == (faults, [])
    native = OWN.model_copy(update={"resize": "native"})  # which may refuse other strips
    assert [list(part) for part in decoded(Counting(broken), cache, native)] == [[3], [*range(10)]]
    assert decoded(Counting(broken), cache, native)[1] == []
    assert decoded(Counting(broken.rename(broken.parent / "moved")), cache) == (faults, [])
    assert decoded(Counting(broken.parent / "moved"), None) == (faults, [*range(10)]), "nothing is remembered"


def test_what_changes_is_decoded_again(broken: Path) -> None:
    cache = broken.parent / "cache"
    decoded(Counting(broken), cache)
    (broken / "00005.png").write_bytes(b"broken now")
    Image.fromarray(np.full((8, 8, 3), 9, np.uint8)).save(broken / "00003.png")
    (broken / "gone.png").symlink_to("nowhere")
    faults, seen = decoded(Counting(broken), cache)
    assert (list(faults), seen, faults[10]) == ([5, 7, 10], [3, 5], GONE)
    shutil.copy(broken / "00000.png", broken / "00005.png")
    assert decoded(Counting(broken), cache)[1] == [], "it is a copy of another image"
    (broken / "gone.png").unlink()

    def change(row: int) -> None:
        if row == 1:
            (broken / "00001.png").write_bytes(b"other")

    with pytest.raises(UserError, match=r"00001\.png: this file was changed while images were checked; run again"):
        decoded(Counting(broken, change), None)


def test_an_interrupted_check_goes_on(broken: Path) -> None:
    def stop(row: int) -> None:
        if row == 9:
            raise KeyboardInterrupt

    cache = broken.parent / "cache"
    with pytest.raises(KeyboardInterrupt):
        decoded(Counting(broken, stop), cache, threads=1)
    assert decoded(Counting(broken), cache) == (decoded(Counting(broken), None)[0], [8, 9])


@pytest.mark.parametrize("fact", ["substr(fact, 1, 8) || 'nulL'", "(SELECT max(fact) FROM facts)", "1e9", "NULL"])
def test_a_damaged_fact_is_found_again(fact: str, broken: Path) -> None:
    cache = broken.parent / "cache"
    faults, _ = decoded(Counting(broken), cache)
    with closing(sqlite3.connect(cache / "index.sqlite")) as index, index:
        index.execute("DELETE FROM facts WHERE used NOT NULL")
        decodes = "SELECT min(key) FROM facts WHERE length(fact) = 12"  # a checksum and `null`
        index.execute(f"UPDATE facts SET fact = {fact} WHERE key = ({decodes})")
    found, seen = decoded(Counting(broken), cache)
    assert found == faults and len(seen) == 1
    assert decoded(Counting(broken), cache) == (faults, [])


def test_processes_divide_the_images(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decodes its part, and what the others have not put into the index."""
    cache, data, seen = broken.parent / "cache", Counting(broken), []
    hashes = hash_files(data, cache, show=False)
    monkeypatch.setattr(module, "wait_for_everyone", lambda accelerator: seen.append(sorted(data.seen)))
    ranks = [SimpleNamespace(process_index=rank, num_processes=2) for rank in range(2)]
    faults = [find_undecodable(data, hashes, OWN, cache, 1, False, rank) for rank in ranks]
    assert seen == [[0, 1, 2, 3, 4], [*range(10)]] and sorted(data.seen) == [*range(10)]
    assert faults[0] == faults[1] == decoded(Counting(broken), None)[0]
