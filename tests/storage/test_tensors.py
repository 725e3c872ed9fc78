"""Files that heads share: each entry is found, checked and replaced alone, however the file has come about."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.storage.tensors import METADATA, TensorFiles, read_entry, read_tensors, read_unchecked, write_tensors

FILE = "models/erm/heads-1a2b.safetensors"
COMMON = torch.ones(2)
STACKED = torch.arange(24.0).view(4, 2, 3)  # the weights of four heads, in one memory as a bank has them


def head(number: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    return {"head.weight": STACKED[number], "head.bias": STACKED[number, :, 0], "prior": COMMON}, {"step": str(number)}


def write(folder: Path, *numbers: int) -> None:
    with TensorFiles() as files:
        for number in numbers:
            files.put(folder, f"{FILE}#ink/seed{number}-trial0/val", *head(number))
        files.replace()


def is_read(folder: Path, number: int) -> bool:
    """Whether a head is read back as it was written; False if it is damaged, which names it or the file."""
    try:
        tensors, metadata = read_entry(folder / FILE, f"ink/seed{number}-trial0/val")
    except Damaged as error:
        assert "\n" not in str(error)
        return False
    expected, expected_metadata = head(number)
    assert metadata == expected_metadata and tensors.keys() == expected.keys()
    return all(tensors[name].equal(expected[name]) for name in expected)


def flipped(content: bytes, place: int, bits: int = 1) -> bytes:
    return content[:place] + bytes([content[place] ^ bits]) + content[place + 1 :]


def test_heads_that_share_memory_share_a_file(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2, 3)
    assert all(is_read(tmp_path, number) for number in range(4))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["heads-1a2b.safetensors"]
    with safe_open(tmp_path / FILE, "pt") as file:  # as xdm_ft/storage/README.md says
        assert file.get_tensor("ink/seed2-trial0/val/head.weight").equal(STACKED[2])
        assert json.loads(bytes(file.get_tensor("ink/seed2-trial0/val/metadata").tolist()))["step"] == "2"


@settings(max_examples=20, deadline=None)
@given(
    parts=st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=4).filter(
        lambda a: len(set().union(*a)) == 4
    )
)
def test_however_heads_arrive_the_bytes_of_the_file_are_the_same(
    parts: list[set[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    at_once, one_by_one = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("several")
    write(at_once, 3, 1, 0, 2)
    for some in parts:
        write(one_by_one, *some)
    assert (one_by_one / FILE).read_bytes() == (at_once / FILE).read_bytes()


def test_every_damaged_byte_is_found_and_the_other_heads_stay_whole(tmp_path: Path) -> None:
    """One of the header is found, or hurts no head, and another head is written to the file."""
    write(tmp_path, 0, 1)
    path, whole = tmp_path / FILE, (tmp_path / FILE).read_bytes()
    header, broken_by_header, broken = 8 + int.from_bytes(whole[:8], "little"), 0, {0: 0, 1: 0}
    for place in range(0, len(whole), 3):
        path.unlink()  # a new inode, as the open file is shared
        path.write_bytes(flipped(whole, place, (1, 32)[place % 2]))
        damaged = [number for number in broken if not is_read(tmp_path, number)]
        if place >= header:
            [number] = damaged
            broken[number] += 1
            continue
        broken_by_header += len(damaged)
        write(tmp_path, 2)
        assert is_read(tmp_path, 2)
    assert broken_by_header > len(whole) / 6
    assert all(count > 8 for count in broken.values()), "of the weights and of the metadata"
    write(tmp_path, *broken)
    assert path.read_bytes() == whole

    path.write_bytes(flipped(whole, header))
    [number] = [number for number in (0, 1) if not is_read(tmp_path, number)]
    write(tmp_path, 2)
    assert not is_read(tmp_path, number), "what is copied keeps its checksum"
    write(tmp_path, number)
    assert all(is_read(tmp_path, number) for number in range(3))


@pytest.mark.parametrize("content", [b"", b"not tensors"])
def test_a_file_that_is_no_file_of_tensors_is_replaced(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its damage is reported once."""
    write(tmp_path, 0)
    (tmp_path / FILE).write_bytes(content)
    directory = RunDirectory(tmp_path)
    assert not any(directory.verify_or_warn(f"{FILE}#ink/seed{number}-trial0/val") for number in (0, 1))
    [warning] = caplog.messages
    assert warning.startswith(f"{tmp_path / FILE}: is damaged (it is not a complete safetensors file: ")
    assert warning.endswith("; its models will be trained again") and "\n" not in warning
    write(tmp_path, 0)
    assert not directory.verify_or_warn(f"{FILE}#ink/seed1-trial0/val")
    assert caplog.messages[1].endswith(": is damaged (it lacks ink/seed1-trial0/val); its model will be trained again")
    write(tmp_path, 1)
    assert is_read(tmp_path, 0) and is_read(tmp_path, 1)


@pytest.mark.parametrize(
    "about",
    [
        None, *(torch.tensor([*text], dtype=torch.uint8) for text in (b"", b'{"step": "0"}', b"\xff{}")),
        torch.full((100_000,), ord("["), dtype=torch.uint8), torch.zeros(3),
    ],
)  # fmt: skip
def test_an_entry_whose_metadata_are_none(about: Tensor | None, tmp_path: Path) -> None:
    write(tmp_path, 0)
    tensors, _ = read_tensors(tmp_path / FILE)
    del tensors[f"ink/seed0-trial0/val/{METADATA}"]
    write_tensors(tmp_path / FILE, tensors | ({} if about is None else {f"ink/seed0-trial0/val/{METADATA}": about}), {})
    with pytest.raises(Damaged, match=r"of ink/seed0-trial0/val(: it|: its| differs)"):
        read_entry(tmp_path / FILE, "ink/seed0-trial0/val")
    with pytest.raises(Damaged, match=r"^it lacks ink/seed1-trial0/val$"):
        read_entry(tmp_path / FILE, "ink/seed1-trial0/val")


def test_a_file_in_its_first_place_only(tmp_path: Path) -> None:
    """A model that is copied to another's name in a run directory is not that other model."""
    directory = RunDirectory(tmp_path)
    directory.write_tensors(f"{FILE}#ink/seed0-trial0/val", *head(0))
    other = tmp_path / FILE.replace("1a2b", "3c4d")
    shutil.copy(tmp_path / FILE, other)
    assert directory.tensors(f"{FILE}#ink/seed0-trial0/val")[1]["step"] == "0"
    with pytest.raises(Damaged, match=rf"^it was written as {FILE}#ink/seed0-trial0/val$"):
        directory.tensors(f"{FILE.replace('1a2b', '3c4d')}#ink/seed0-trial0/val")


def test_no_file_and_a_link_to_itself(tmp_path: Path) -> None:
    address = f"{FILE}#ink/seed0-trial0/val"
    with pytest.raises(FileNotFoundError):
        read_unchecked(tmp_path / "none.safetensors", "ink/seed0-trial0/val")
    assert not RunDirectory(tmp_path).verify_or_warn(address)
    (tmp_path / "models").touch()
    assert not RunDirectory(tmp_path).verify_or_warn(address), "a file in the place of its folder"
    (tmp_path / "models").unlink()
    (tmp_path / "models/erm").mkdir(parents=True)
    (tmp_path / FILE).symlink_to(tmp_path / FILE)
    with pytest.raises(Damaged):
        read_entry(tmp_path / FILE, "ink/seed0-trial0/val")
    write(tmp_path, 0)
    assert is_read(tmp_path, 0)


def test_heads_with_much_metadata(tmp_path: Path) -> None:
    """A header of safetensors has 100 MB at most: recalls of a thousand classes, three rules, 256 heads are more."""
    about = {"results": "x" * 100_000}
    with TensorFiles() as files:
        for number in range(8):
            files.put(tmp_path, f"{FILE}#ink/seed{number}-trial0/val", {"head.bias": torch.zeros(3)}, about)
        files.replace()
    assert read_entry(tmp_path / FILE, "ink/seed7-trial0/val")[1] == about
    with (tmp_path / FILE).open("rb") as file:
        assert int.from_bytes(file.read(8), "little") < 10_000, "opening the file reads the metadata of no head"
