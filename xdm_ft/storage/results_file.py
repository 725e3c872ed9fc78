"""results.json: each model in a line, the rest as indented JSON, so that it is written and read model by model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.atomic import Together
from xdm_ft.storage.digests import sorted_json
from xdm_ft.storage.lines import TOO_DEEP, Damaged, json_object, opened_file

COSTS = ("train_seconds", "peak_memory")  # of a model in results.json: they differ between runs that agree in all else
INPUTS = ("data", "encoder", "features")  # keys of the environment in results.json: what a resumed run must not change
_RUNS = "\0runs"  # stands for the models: no text of results.json has this character
# one space and a raw line break: a key of the whole, neither of a part nor inside a text
_EMPTY, _BEGIN, _END = b' "runs": []', b' "runs": [\n', b" ]"
Json = dict[str, Any]


class _Digest:
    """The checksum of results.json, without what differs between runs that agree.

    Those are the training's times and memory, the folder, the cluster, and the environment except for `INPUTS`. It is
    that of the whole as `json_digest` has it, without the text of all models in memory.
    """

    def __init__(self, results: Mapping[str, Any]) -> None:
        recipe = {key: value for key, value in results["recipe"].items() if key not in ("output", "cluster")}
        environment = {key: results["environment"].get(key) for key in INPUTS}
        rest = {key: value for key, value in results.items() if key != "checksum"}
        whole = sorted_json(rest | {"runs": _RUNS, "recipe": recipe, "environment": environment})
        before, _, self._after = whole.partition(json.dumps(_RUNS))
        self._hasher, self._between = xxhash.xxh3_64(f"{before}[".encode()), ""

    def add(self, run: Json) -> None:
        """Adds the next model, as it is read from JSON."""
        kept = {key: value for key, value in run.items() if key not in COSTS}
        self._hasher.update((self._between + sorted_json(kept, is_read=True)).encode())
        self._between = ", "

    def value(self) -> str:
        """Returns the checksum, once all models are added."""
        self._hasher.update(f"]{self._after}".encode())
        return str(self._hasher.hexdigest())


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Writes results.json with its checksum, model by model: `runs` may make its models when they are read.

    A file with this content stays as it is: then it is no younger than its reports.
    """
    rest = {key: value for key, value in results.items() if key != "checksum"}

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            _write(file, rest)

    with Together() as files:
        files.add(path, write)
        files.drop_unchanged()
        files.replace()


def _write(file: BinaryIO, results: Mapping[str, Any]) -> None:
    digest = _Digest(results)
    head, _, tail = _indented({**results, "runs": [], "checksum": ""}).partition(b"\n" + _EMPTY)
    file.write(head + b"\n" + _EMPTY[:-1])
    between = b"\n  "
    for run in results["runs"]:
        # Python's encoder of indented JSON takes ten times as long
        text = json.dumps(run, ensure_ascii=False, allow_nan=False)
        digest.add(json.loads(text))
        file.write(between + text.encode())
        between = b",\n  "
    file.write(b"\n ]")
    before, key, after = tail.rpartition(b'"checksum": "')
    file.write(before + key + digest.value().encode() + after)


def _indented(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_results(path: Path, entry: Callable[[Json], Any] = lambda run: run) -> Json:
    """Returns the content of results.json, with what `entry` makes of each model as `runs`. Raises `Damaged`.

    Not more than one model is in memory as JSON. A `UserError` of `entry` is raised if the file is not damaged.
    """
    with opened_file(path) as file:
        results = _rest(file)
        made, fault = list[Any](), None
        try:
            digest = _Digest(results)
            for run in _models(file, results):
                digest.add(run)
                try:
                    made.append(entry(run))
                except UserError as error:
                    fault = fault or error
            whole = results["checksum"] == digest.value()
        except (KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"it lacks {error}") from error
        except RecursionError as error:
            raise Damaged(TOO_DEEP) from error
    if not whole:
        raise Damaged("its checksum differs, or an earlier version wrote it")
    if fault is not None:
        raise fault
    return results | {"runs": made}


def unverified_facts(path: Path) -> Json:
    """Returns the content of results.json without its models, which are skipped. Raises `Damaged` if it is not JSON.

    Nothing is compared with the checksum. In a layout that we do not write, models may be in it.
    """
    with opened_file(path) as file:
        return _rest(file)


def _rest(file: BinaryIO) -> Json:
    """Returns the content without models that begin and end at lines of their own; in other layouts, with them."""
    rest, inside = list[bytes](), False
    file.seek(0)
    for line in file:
        if inside and line.startswith(_END):
            inside = False
            rest.append(line.removeprefix(_END))
        elif not inside:
            inside = line == _BEGIN
            rest.append(_EMPTY if inside else line)
    return json_object(b"".join(rest))


def _models(file: BinaryIO, results: Json) -> Iterator[Json]:
    """Yields the models of an open file, whose `_rest` is `results`."""
    if results["runs"]:
        yield from results["runs"]
        return
    file.seek(0)
    lines, comma = list[bytes](), None  # of one model; whether one follows the model before
    for line in _between(file):
        lines.append(line)
        if line.startswith((b"  {", b"  }")) and line.endswith((b"}\n", b"},\n")):
            if comma is False:
                raise Damaged("it is not JSON: no comma between two models")
            text, lines = b"".join(lines), []
            comma = text.endswith(b",\n")
            yield json_object(text.removesuffix(b",\n"))
    if lines or comma:
        raise Damaged("it is not JSON: its models do not end")


def _between(file: BinaryIO) -> Iterable[bytes]:
    """The lines of an open file between the one that begins the models and the one that ends them."""
    after = dropwhile(lambda line: line != _BEGIN, file)
    next(after, None)
    return takewhile(lambda line: not line.startswith(_END), after)
