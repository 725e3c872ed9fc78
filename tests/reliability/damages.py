"""What may happen to a file of a run: each function damages one in place."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from xdm_ft.storage.tensors import read_tensors

Damage = Callable[[Path], object]


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def instead(make: Damage, name: str) -> Damage:
    """Something else in the place of the file."""

    def replaced(path: Path) -> None:
        remove(path)
        make(path)

    replaced.__name__ = name
    return replaced


folder = instead(Path.mkdir, "folder")
pipe = instead(os.mkfifo, "pipe")
text = instead(lambda path: path.write_text("text"), "text")
empty = instead(Path.touch, "empty")
garbage = instead(lambda path: path.write_bytes(bytes(range(255, 0, -1)) * 9), "garbage")
other_type = instead(lambda path: path.write_text("[1, 2]"), "other_type")  # reads well as YAML and JSON
link_to_nothing = instead(lambda path: path.symlink_to("nothing"), "link_to_nothing")
link_to_itself = instead(lambda path: path.symlink_to(path.name), "link_to_itself")
endless = instead(lambda path: path.symlink_to("/dev/zero"), "endless")
brackets = instead(lambda path: path.write_text("[" * 100_000 + "\n"), "brackets")
header_of_brackets = instead(
    lambda path: path.write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000), "header_of_brackets"
)
NESTED = '{"value": ' + "[" * 900 + "]" * 900 + ', "xxh3": "0", "runs": [], "environment": {}, "recipe": {}}\n'
nested = instead(lambda path: path.write_text(NESTED), "nested")  # less deep than what Python's reader refuses


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def drop_a_line(path: Path) -> None:
    """Cut between two lines: every line that is left is complete."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def flip_a_digit(path: Path) -> None:
    """Still complete, and wrong: the last byte of numbers, or the first digit after a point."""
    data = bytearray(path.read_bytes())
    place = data.find(b"0.") + 2 if path.suffix in (".json", ".jsonl") and b"0." in data else len(data) - 1
    data[place] = ord("3") if data[place] != ord("3") else ord("4")
    path.write_bytes(data)


def change_the_step(path: Path) -> None:
    """Of the metadata."""
    data = path.read_bytes()
    place = data.index(b'"step":"') + 8
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


def as_before_checksums(path: Path) -> None:
    tensors, metadata = read_tensors(path)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, {"step": metadata["step"]})


def of_another_model(path: Path) -> None:
    shutil.copyfile(next(other for other in path.parents[3].rglob(path.name) if other != path), path)


def empty_tensors(path: Path, size: int = 8_000_000, metadata: dict[str, str] | None = None) -> None:
    """A header of `size` bytes, of tensors without numbers."""
    path.unlink(missing_ok=True)
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = {"__metadata__": metadata or {}} | {f"{number:08}": entry for number in range(size // 64)}
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written)
