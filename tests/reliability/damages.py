"""What may happen to a file: each function damages one, and returns False where nothing has changed by it."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path, list[Path], random.Random], object]


def truncated(path: Path, others: list[Path], draw: random.Random) -> None:
    content = path.read_bytes()
    # half of the cuts are close to the end
    keep = draw.randrange(len(content)) if draw.random() < 0.5 else len(content) - draw.randint(1, 16)
    path.write_bytes(content[: max(0, keep)])


def flipped(path: Path, others: list[Path], draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for place in draw.sample(range(len(content)), min(len(content), draw.choice((1, 1, 1, 2, 8)))):
        content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def zeroed(path: Path, others: list[Path], draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    first = draw.randrange(len(content))
    block = content[first : first + draw.choice((1, 16, 512, 4096))]
    content[first : first + len(block)] = bytes(len(block))
    path.write_bytes(content)


def swapped(path: Path, others: list[Path], draw: random.Random) -> None:
    """Exchanged with another file of its kind."""
    other, kept = draw.choice(others), path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def emptied(path: Path, others: list[Path], draw: random.Random) -> None:
    path.write_bytes(b"")


def folder(path: Path, others: list[Path], draw: random.Random) -> None:
    path.unlink()
    path.mkdir()
    if draw.random() < 0.5:
        (path / "file").write_text("not empty")


def link(path: Path, others: list[Path], draw: random.Random) -> None:
    target = draw.choice(("nowhere", path.name, ".", "moved"))
    if target == "moved":
        path.rename(path.parents[1] / "moved")
        path.symlink_to(path.parents[1] / "moved")
        return
    path.unlink()
    path.symlink_to(target)


def deleted(path: Path, others: list[Path], draw: random.Random) -> None:
    path.unlink()


def longer(path: Path, others: list[Path], draw: random.Random) -> None:
    with path.open("ab") as file:
        file.write(draw.choice((b"\n", b"\0", draw.randbytes(draw.randint(1, 5000)))))


DAMAGES: list[Damage] = [
    flipped, flipped, flipped, truncated, zeroed, swapped, swapped, emptied, folder, link, deleted, longer,
]  # fmt: skip


def kind(path: Path) -> str:
    """The kind of a file, from its path in the tree: numbers and hashes are as good as any other."""
    parts = ["….unfinished" if part.endswith(".unfinished") else part for part in path.parts]
    parts = [re.sub("[0-9a-f]{6,}|[0-9]+", "#", part) for part in parts]
    if "models" in parts:
        parts[parts.index("models") + 1 : -1] = ["…"]
    if "checkpoints" in parts or "taken" in parts:
        parts[-1] = re.sub("^.*-#", "…-#", parts[-1])
    return "/".join(re.sub("^events.*", "events…", part) for part in parts)


def files(tree: Path) -> dict[str, list[Path]]:
    """{kind: all of its files below `tree`}, whatever is there."""
    found: dict[str, list[Path]] = {}
    for path in sorted(path for path in tree.rglob("*") if path.is_file()):
        found.setdefault(kind(path.relative_to(tree)), []).append(path)
    return found


def damage(tree: Path, spare: list[Path], draw: random.Random) -> tuple[str, str, Path]:
    """Damages one file of the tree. `spare`: trees of other runs. Returns its kind, the damage and its path."""
    found = files(tree)
    while True:
        which = draw.choice(sorted(found))
        path, how = draw.choice(found[which]), draw.choice(DAMAGES)
        content, others = path.read_bytes(), []
        if how is swapped:
            of_other_runs = [other for one in spare for other in files(one).get(which, ())]
            copies = [shutil.copy(one, tree.parent / f"spare{number}") for number, one in enumerate(of_other_runs)]
            others = [other for other in found[which] + copies if other.read_bytes() != content]
        if (how is swapped and not others) or (not content and how in (flipped, truncated, zeroed, emptied)):
            continue
        how(path, others, draw)
        if path.is_symlink() or not path.is_file() or path.read_bytes() != content:
            return which, how.__name__, path
