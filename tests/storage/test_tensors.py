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
from xdm_ft.storage.tensors import METADATA, TensorFiles, read_entry, read_tensors, unchecked_entry, write_tensors

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


def assert_read(folder: Path, *numbers: int) -> None:
    for number in numbers:
        tensors, metadata = read_entry(folder / FILE, f"ink/seed{number}-trial0/val")
        expected, about = head(number)
        assert metadata == about and tensors.keys() == expected.keys()
        assert all(tensors[name].equal(expected[name]) for name in expected)


def test_heads_that_share_memory_share_a_file(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2, 3)
    assert_read(tmp_path, 0, 1, 2, 3)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["heads-1a2b.safetensors"]
    with safe_open(tmp_path / FILE, "pt") as file:  # as docs/results.md says
        assert file.get_tensor("ink/seed2-trial0/val/head.weight").equal(STACKED[2])
        about = bytes(file.get_tensor("ink/seed2-trial0/val/metadata").tolist())
        assert json.loads(about)["step"] == "2"


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


def test_every_damaged_byte_of_an_entry_is_found_and_the_others_stay_whole(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    path, whole = tmp_path / FILE, (tmp_path / FILE).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    damaged: dict[int, int] = {0: 0, 1: 0}
    for place in range(8 + length, len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.unlink()
        path.write_bytes(changed)
        broken = []
        for number in damaged:
            try:
                assert_read(tmp_path, number)
            except Damaged as error:
                assert f" of ink/seed{number}-trial0/val" in str(error)
                broken.append(number)
        assert len(broken) == 1, place
        damaged[broken[0]] += 1
    assert all(count > 4 * 8 for count in damaged.values()), "of the weights and of the metadata"
    write(tmp_path, *damaged)
    assert path.read_bytes() == whole


def test_every_damaged_byte_of_the_header(tmp_path: Path) -> None:
    """It is found, or hurts no head; and another head is written to the file."""
    write(tmp_path, 0, 1)
    path, whole = tmp_path / FILE, (tmp_path / FILE).read_bytes()
    faults = 0
    for place in range(8 + int.from_bytes(whole[:8], "little")):
        changed = bytearray(whole)
        changed[place] ^= (1, 32)[place % 2]
        path.unlink()
        path.write_bytes(changed)
        faults += sum(_is_broken(tmp_path, number) for number in (0, 1))
        write(tmp_path, 2)
        assert_read(tmp_path, 2)
    assert faults > len(whole) / 2


def _is_broken(folder: Path, number: int) -> bool:
    try:
        assert_read(folder, number)
    except Damaged:
        return True
    return False


def test_a_damaged_entry_stays_damaged_until_it_is_written_again(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    changed = bytearray((tmp_path / FILE).read_bytes())
    changed[8 + int.from_bytes(changed[:8], "little")] ^= 1  # of a weight
    (tmp_path / FILE).write_bytes(changed)
    [broken] = [number for number in (0, 1) if _is_broken(tmp_path, number)]
    write(tmp_path, 2)
    assert _is_broken(tmp_path, broken), "what is copied keeps its checksum"
    write(tmp_path, broken)
    assert_read(tmp_path, 0, 1, 2)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"not tensors", b"\xff" * 8])
def test_a_file_that_is_no_file_of_tensors_is_replaced(content: bytes, tmp_path: Path) -> None:
    write(tmp_path, 0)
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(Damaged):
        read_entry(tmp_path / FILE, "ink/seed0-trial0/val")
    write(tmp_path, 0, 1)
    assert_read(tmp_path, 0, 1)


@pytest.mark.parametrize(
    "about",
    [
        None, *(torch.tensor([*text], dtype=torch.uint8) for text in (b"", b"[1]", b"{}", b'{"step": "0"}', b"\xff{}")),
        torch.full((100_000,), ord("["), dtype=torch.uint8), torch.zeros(3), torch.tensor(1.0),
        torch.zeros(2).bfloat16(),
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
        unchecked_entry(tmp_path / "none.safetensors", "ink/seed0-trial0/val")
    assert not RunDirectory(tmp_path).verify_or_warn(address)
    (tmp_path / "models").touch()
    assert not RunDirectory(tmp_path).verify_or_warn(address), "a file in the place of its folder"
    (tmp_path / "models").unlink()
    (tmp_path / "models/erm").mkdir(parents=True)
    (tmp_path / FILE).symlink_to(tmp_path / FILE)
    with pytest.raises(Damaged):
        read_entry(tmp_path / FILE, "ink/seed0-trial0/val")
    write(tmp_path, 0)
    assert_read(tmp_path, 0)


def test_heads_with_much_metadata(tmp_path: Path) -> None:
    """A header of safetensors has 100 MB at most: recalls of a thousand classes, three rules, 256 heads are more."""
    about = {"results": "x" * 3_000_000}
    with TensorFiles() as files:
        for number in range(40):
            files.put(tmp_path, f"{FILE}#ink/seed{number}-trial0/val", {"head.bias": torch.zeros(3)}, about)
        files.replace()
    assert read_entry(tmp_path / FILE, "ink/seed7-trial0/val")[1] == about
    with (tmp_path / FILE).open("rb") as file:
        assert int.from_bytes(file.read(8), "little") < 10_000, "opening the file reads the metadata of no head"


def test_damage_of_a_shared_file_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 0, 1)
    (tmp_path / FILE).write_bytes(b"")
    directory = RunDirectory(tmp_path)
    assert not any(directory.verify_or_warn(f"{FILE}#ink/seed{number}-trial0/val") for number in (0, 1))
    [told] = caplog.messages
    assert told.startswith(f"{tmp_path / FILE}: is damaged (") and told.endswith("; its models will be trained again")
    write(tmp_path, 0)
    assert not directory.verify_or_warn(f"{FILE}#ink/seed1-trial0/val")
    assert caplog.messages[1].endswith(": is damaged (it lacks ink/seed1-trial0/val); its model will be trained again")
