"""Data sets whose images are files: found in trees of folders, with groups that are read from their paths."""

from __future__ import annotations

import glob
import logging
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress, groupby
from pathlib import Path
from typing import Annotated, NamedTuple, overload

import numpy as np
from pydantic import AfterValidator, Field

from xdm_ft.images.decode import HEIC, HEIC_REMEDY, EncodedImages, extensions
from xdm_ft.runtime.errors import UserError, not_there, one_form, plural, printable

logger = logging.getLogger("xdm_ft")

MAX_NAMED = 8  # classes, domains or extensions in a message; it counts the others
DATA = re.compile(
    r"\.(heic|heif|hif|avif|jxl|jp2|exr|hdr|eps|svg|wmf|emf|xcf|psd|psb|raw|dng|cr2|cr3|nef|arw|orf|rw2|raf|dcm|dicom|ima|"
    r"nii|mha|mhd|nrrd|svs|ndpi|mrxs|scn|bif|vms|czi|nd2|lif|oib|oif|vsi|qptiff|npy|npz|mat|h5|hdf5|hdf|mp4|avi|mov|mkv|"
    r"webm|mpg|mpeg)(\.gz)?$"
)
"""The ends of the names of images, scans, arrays and films. Those that Pillow reads are images."""
NO_DATA = re.compile(r"\.(txt|csv|tsv|jsonl?|xml|ya?ml|md|html?|log|ini|db|py|cls)$")
BEGIN_BYTES = 132
STORED = (".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip", ".parquet", ".parq", ".pq", ".arrow", ".feather")
BEGINNINGS = (
    (0, b"\xff\xd8\xff"), (0, b"\x89PNG"), (0, b"GIF8"), (0, b"II*\0"), (0, b"MM\0*"), (0, b"II+\0"), (0, b"8BPS"),
    (8, b"WEBP"), (4, b"jP  "), (4, b"ftyp"), (0, b"\xff\x4f\xff\x51"), (128, b"DICM"), (0, b"\x93NUMPY"),
)  # fmt: skip
"""(byte, what is there) of files that are images or arrays, whatever they are called."""
OF_SYSTEMS = {"__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", "System Volume Information"}
TREE = "set data.root to a folder of <domain>/<class>/<image>"  # the end of a message about `data.root`
MOVE = (
    "move the class folders up, list the images in a table (data.name: table), or name the loader of a published set "
    "(data.name: vlcs, officehome, …), which reads its layouts"
)
SPLIT_NAMES = frozenset(
    ["train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing", "holdout", "full", "crossval"]
)


MAX_PATTERN = 1000  # characters
MATCH_SECONDS = 2.0  # of this process's computing time, for the pattern and up to `MATCHED` paths
MATCHED = 10_000


def expression_of(pattern: str | None) -> re.Pattern[str]:
    """Returns the compiled pattern; null matches all. Raises `ValueError`, also for one that is too long or deep."""
    if len(pattern or "") > MAX_PATTERN:
        raise ValueError(f"not a regular expression of at most {MAX_PATTERN} characters")
    try:
        return re.compile(one_form(pattern or ""))
    except (re.error, RecursionError, OverflowError) as error:
        why = "its brackets are nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"not a regular expression: {why}") from None


def _regular_expression(pattern: str | None) -> str | None:
    expression_of(pattern)
    return pattern


GroupPattern = Annotated[
    str | None,
    AfterValidator(_regular_expression),
    Field(
        description="regular expression for an image's path; the text that it matches, or that its parentheses "
        "capture, is the image's group: patient, slide or sequence. No split divides a group; null: images are "
        "independent"
    ),
]


Kinds = dict[str, tuple[int, str]]  # extension → number of files, and the first


class PathsBelow(Sequence[str]):
    """Paths below one folder, of which each keeps only the rest, as a million paths need much memory."""

    def __init__(self, folder: str | Path, rest: Sequence[str]) -> None:
        self.folder, self.rest = os.path.join(folder, ""), rest

    def __len__(self) -> int:
        return len(self.rest)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> PathsBelow: ...
    def __getitem__(self, index: int | slice) -> str | PathsBelow:
        if isinstance(index, slice):
            return PathsBelow(self.folder, self.rest[index])
        return self.folder + self.rest[index]


class ImageFiles(EncodedImages):
    """Row i is the file `paths[i]` (absolute); `shown[i]` is its path as the user wrote it, for messages."""

    paths: Sequence[str]
    shown: Sequence[str]
    base: str | Path
    """The folder at which `shown` starts. A table may also name files elsewhere, by absolute paths."""

    def name(self, row: int) -> str:
        return printable(self.shown[row])

    def name_in_data(self, row: int) -> str:
        return printable(self.shown[row].removeprefix(os.path.join(self.base, "")))

    def content(self, row: int) -> str:
        return self.paths[row]


def index_names(values: Sequence[str], in_order: bool = False) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the distinct names, in one form and printable, and for every value its index among them (int64 [N]).

    They are sorted, or `in_order` of the values.
    """
    forms = {value: one_form(value) for value in dict.fromkeys(values)}
    names = dict.fromkeys(forms.values()) if in_order else sorted(set(forms.values()))
    number = {name: i for i, name in enumerate(names)}
    index = {value: number[form] for value, form in forms.items()}
    return tuple(printable(name) for name in names), np.fromiter(map(index.__getitem__, values), np.int64, len(values))


def groups_of(paths: list[str], pattern: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the names of groups and the number of every path's group (int64 [N]).

    Raises `UserError` if a path does not match.
    """
    expression = re.compile(one_form(pattern))
    groups = list[str | None]()
    with _in_time(expression, len(paths), lambda: paths[len(groups)]):
        for path in paths:
            groups.append(_group_of(path, expression))
    without = [path for path, group in zip(paths, groups, strict=True) if group is None]
    if without:
        raise UserError(
            f'data.group: "{pattern}" matches nothing in {len(without)} of {len(paths)} paths, the first: '
            f"{without[0]}; change it to match every path"
        )
    return index_names([group for group in groups if group is not None])


def group_of(path: str, expression: re.Pattern[str], key: str = "data.group") -> str | None:
    """Returns the text that identifies the group of a path, None if the expression matches nothing in it.

    `key`: where the user has written the expression, for messages.

    Raises `UserError` if matching takes too long, as that of (.*)*x doubles with each character.
    """
    with _in_time(expression, 1, lambda: path, key):
        return _group_of(path, expression)


def _group_of(path: str, expression: re.Pattern[str]) -> str | None:
    match = expression.search(one_form(path))
    if match is None:
        return None
    # \0 is in no path, so that ("a", "bc") and ("ab", "c") stay two groups
    return "\0".join(match.groups("")) if expression.groups else match[0]


@contextmanager
def _in_time(
    expression: re.Pattern[str], count: int, path_now: Callable[[], str], key: str = "data.group"
) -> Iterator[None]:
    """Context for matching that many paths. `path_now` returns the one that is matched now, for the message.

    Python interrupts matching for signals alone: outside the main thread it has no limit.
    """
    seconds = MATCH_SECONDS * max(1, count / MATCHED)

    def stop(*_: object) -> None:
        problem = f"takes more than {seconds:g} s at {path_now()}; write it without a repetition inside a repetition"
        raise UserError(f"{key}: {expression.pattern}: {problem}")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def refuse_missing_folder(root: Path, remedy: str) -> None:
    """Raises `UserError` if `data.root` is not a folder; `remedy` ends the message and says what to do."""
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else not_there(root)
        raise UserError(f"data.root: {root} {problem}; {remedy}")


def is_split(name: str) -> bool:
    return name.casefold() in SPLIT_NAMES


def refuse_splits(
    root: object, images: Sequence[str], domains: Collection[str], classes: Collection[str], remedy: str = MOVE
) -> None:
    """Raises `UserError` if folders that would be domains or classes are the parts of a split.

    They are if all names of a level are such parts, or if several of them hold folders of one name, or one of them a
    folder that is a class elsewhere. One such name among others is a class: DomainNet has "train". `images`: paths
    relative to `root`, `<domain>/<class>/…`. `remedy`: what to do, the end of the message.
    """
    for level, names in enumerate((domains, classes)):
        parts = sorted(filter(is_split, names))
        # of each image the folders from this level on, at most three
        inside = [path.split("/", level + 3)[level:-1] for path in images] if parts else []
        inside = [folders for folders in inside if folders and folders[0] in parts]
        holders: dict[str, set[str]] = {}  # folder in a part → the parts that hold one of this name
        for part, *deeper in inside:
            for folder in deeper[:1]:
                holders.setdefault(folder, {"classes"} if level and folder in classes else set()).add(part.casefold())
        if parts and (len(parts) == len(names) or any(len(of_folder) > 1 for of_folder in holders.values())):
            depth = max(map(len, inside), default=1) - 1
            below = ["<domain>", "<class>"][level:][-depth:] if depth else []
            found = "/".join([*["<domain>"] * level, f"<{'|'.join(parts)}>", *below, "<image>"])
            raise UserError(
                f"data.root: {root}: {', '.join(parts)} are parts of a split, not {'classes' if level else 'domains'}; "
                f"found {found}, expected <domain>/<class>/<image>; {remedy}"
            )


def first_pattern(parts: Sequence[str]) -> int:
    """Returns the index of the first part of a path that is a glob, or their number. A name that exists is none."""
    for number, part in enumerate(parts):
        if glob.has_magic(part) and not os.path.lexists("/".join(parts[: number + 1])):
            return number
    return len(parts)


class Tree(NamedTuple):
    """What lies below a folder: paths relative to it, with slashes, in the order of their names."""

    images: list[str]
    files: list[str]  # all
    folders: list[str]  # with or without files in them, a slash at their ends


def images_below(root: Path, depth: int = 2) -> Tree:
    """Returns the images that are so many folders below `root` or deeper, and all files and folders there.

    Hidden ones are skipped. Links are followed, but not in circles.
    """
    images, files, folders = list[str](), list[str](), dict[str, None]()
    for below, names in _files(str(root), "", set()):
        paths = [below + name for name in names]
        files += paths
        folders[below] = None
        if below.count("/") >= depth:
            images += _images(paths)
    return Tree(images, files, list(folders))


def describe_left_out(
    root: Path, tree: Tree, levels: Sequence[str] = ("domain", "class"), only: Collection[str] | None = None
) -> tuple[str, ...]:
    """Returns the lines of `ImageDataset.left_out` for the domains, classes and files of a tree that yield no image.

    `levels`: what the folders are, from the root; `only`: the folders in it that count. The log counts the files that
    are no data.
    """
    files = tree.files if len(tree.images) < len(tree.files) else []  # the sets of a million paths need much memory
    of_any_depth, deep = set(_images(files)), set(tree.images if files else ())
    others = [path for path in files if path not in of_any_depth and (only is None or path.split("/")[0] in only)]
    is_data = [looks_like_data(path, partial(_begin, os.path.join(root, path))) for path in others]
    data, notes = [list(compress(others, map(flag.__eq__, is_data))) for flag in (True, False)]
    if notes:
        count = plural(len(notes), "file")
        logger.warning("%s: ignored %s without an image, the first: %s", root, count, notes[0])
    parts = [one_form(path).split("/")[:-1] for path in tree.folders]
    parts = [part for part in parts if only is None or {*part[:1]} <= {*map(one_form, only)}]
    lines = [line for level, noun in enumerate(levels) for line in _empty(tree, level, noun, parts, others, {*data})]
    if only is None and (higher := [path for path in files if path in of_any_depth and path not in deep]):
        outside = f"outside a {'/'.join(f'<{level}>' for level in levels)} folder"
        lines.append(
            f"{plural(len(higher), 'image')} {outside}, the first: {higher[0]}; move them into one, or remove them"
        )
    return (*lines, *not_read(kinds_of(data)))


def _empty(
    tree: Tree, level: int, noun: str, folders: list[list[str]], others: list[str], data: set[str]
) -> Iterator[str]:
    """Yields the line on the names at one level of the tree under which no image lies. A folder of notes is no domain.

    `folders`: the parts of their paths; `others`: the files that are no images, of which `data` look like it.
    """
    full = {one_form(folder).split("/")[level] for folder in {path[: path.rfind("/")] for path in tree.images}}
    holding = {part[level]: list[str]() for part in folders if len(part) > level and part[level] not in full}
    for path in others:
        if path.count("/") > level and (name := one_form(path).split("/")[level]) in holding:
            holding[name].append(path)
    have_folders = {part[level] for part in folders if len(part) > level + 1}
    names = [
        f'"{name}" (its folder {f"holds {count_files(Counter(map(kind_of, files)))}" if files else "is empty"})'
        for name, files in sorted(holding.items())
        if noun != "domain" or name in have_folders or not files or not data.isdisjoint(files)
    ]
    if names:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        remedy = "add images that can be read, or remove the folders"
        yield f"{plural(len(names), noun)} without any image: {', '.join(names[:MAX_NAMED])}{more}; {remedy}"


def _files(folder: str, below: str, visited: set[tuple[int, int]]) -> Iterator[tuple[str, list[str]]]:
    """Yields the path of a folder from the root and names of files in it; all of them in the order of their paths.

    `below` is the path of `folder` from the root, "" or with a slash at its end. Folders in `visited` (device, inode)
    are skipped.
    """
    status, names, folders = visible_entries(folder, "data.root")
    identity = (status.st_dev, status.st_ino)
    if identity in visited:
        return
    visited.add(identity)
    # Above a class folder `visited` has the parents only, to which a link may lead back: two domains may link to the
    # same images. Within a class it has every folder read, as folders that link to each other would repeat
    # exponentially.
    in_class = below.count("/") >= 2  # domain/class/
    if not names:
        yield below, []
    for are_folders, run in groupby(names, folders.__contains__):
        if are_folders:
            for name in run:
                yield from _files(os.path.join(folder, name), f"{below}{name}/", visited if in_class else set(visited))
        else:
            yield below, list(run)


def visible_entries(folder: str, key: str) -> tuple[os.stat_result, list[str], set[str]]:
    """Returns the status of a folder, the sorted names in it that are not hidden, and those of them that are folders.

    Folders that systems make, such as the thumbnails of a disk station, count as hidden. Raises `UserError`, which
    names `key`, if the folder cannot be read.
    """
    try:
        status = os.stat(folder)
        with os.scandir(folder) as scan:
            entries = [entry for entry in scan if entry.name[0] != "." and entry.name not in OF_SYSTEMS]
        others = [entry for entry in entries if not entry.is_file(follow_symlinks=False)]
        # os.path.isdir: for a link that points to itself `entry.is_dir` raises
        folders = {entry.name for entry in others if entry.is_dir(follow_symlinks=False) or os.path.isdir(entry.path)}
    except OSError as error:
        raise UserError(f"{key}: {folder} cannot be read: {error.strerror}") from error
    return status, sorted([entry.name for entry in entries]), folders


def looks_like_data(name: str, begin: Callable[[], bytes]) -> bool:
    """Whether a file or member that is no image to us may be one elsewhere: by its extension, else by how it begins."""
    name = name.lower()
    if NO_DATA.search(name):
        return False
    return bool(DATA.search(name)) or any(begin()[at:].startswith(sign) for at, sign in BEGINNINGS)


def _begin(file: str) -> bytes:
    try:
        with open(file, "rb") as stream:
            return stream.read(BEGIN_BYTES)
    except OSError:  # a link to nothing
        return b""


def kind_of(name: str) -> str:
    """Returns the extension in lower case with the dot; "" without one."""
    stem, extension = os.path.splitext(name.lower())
    extension = os.path.splitext(stem)[1] + extension if extension == ".gz" else extension
    # DICOM's names may be numbers with dots
    return "" if extension[1:].isdigit() else extension


def kinds_of(names: Iterable[str]) -> Kinds:
    """Returns {extension: (number of names, the first)}, in lower case with the dot; "" for those without one."""
    kinds: Kinds = {}
    for name in names:
        number, first = kinds.get(kind_of(name), (0, name))
        kinds[kind_of(name)] = number + 1, first
    return kinds


def not_read(kinds: Kinds, otherwise: str = "convert them to PNG or TIFF, or remove them") -> tuple[str, ...]:
    """Returns a line of `ImageDataset.left_out` for each kind of files or members, the largest numbers first.

    `otherwise`: the remedy of a kind that has none of its own.
    """
    remedies = dict.fromkeys(HEIC, HEIC_REMEDY) | {
        "": "give them the extension of their format, or convert them (DICOM) to PNG or TIFF",
        ".cls": "add the image",
    }
    remedies |= dict.fromkeys(extensions(), "give each image a label of its own, or remove them")
    lines = list[str]()
    for kind, (number, first) in sorted(kinds.items(), key=lambda item: (-item[1][0], item[0]))[:MAX_NAMED]:
        count = plural(number, f"{kind} file") if kind else f"{plural(number, 'file')} without an extension"
        lines.append(f"{count} not read, the first: {first}; {remedies.get(kind, otherwise)}")
    return tuple(lines)


def beside(folder: str, files: Collection[str]) -> tuple[str, ...]:
    """Returns the lines of `ImageDataset.left_out` on tables and archives in a local folder that are not in `files`."""
    root, read = Path(folder).expanduser().absolute(), {*files}
    there = (path for path in sorted(root.rglob("*")) if path.suffix.lower() in STORED and path.is_file())
    others = (str(path.relative_to(root)) for path in there if str(path) not in read)
    return not_read(kinds_of(others), "unpack them, or name them in data.file")


def count_files(others: Mapping[str, int]) -> str:
    """Returns "12 other files: 10 .dcm, 2 .txt"."""
    ranked = sorted(others.items(), key=lambda item: (-item[1], not item[0], item[0]))
    named = [f"{number} {printable(extension) or 'without an extension'}" for extension, number in ranked[:MAX_NAMED]]
    more = sum(number for _, number in ranked[MAX_NAMED:])
    named += [f"{more} with other extensions"] if more else []
    hint = "" if others.keys().isdisjoint(HEIC) else f" ({HEIC_REMEDY})"
    return f"{plural(sum(others.values()), 'other file')}: {', '.join(named)}{hint}"


def is_image(path: str) -> bool:
    return bool(_images([path]))


def _images(paths: list[str]) -> list[str]:
    """Returns those with the extension of an image."""
    # of a name without a dot it is the last character, which is no extension
    endings = [path[path.rfind(".") :] for path in paths]
    distinct = set(endings)
    of_images = {ending for ending in distinct if ending.lower() in extensions()}
    if len(of_images) == len(distinct):
        return paths
    return [path for path, ending in zip(paths, endings, strict=True) if ending in of_images]
