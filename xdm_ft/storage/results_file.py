"""results.json: each model in a line, the rest as indented JSON, so that it is written and read model by model.

A run may have a hundred thousand models; their text is several times as large as the records that are made of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from xdm_ft.storage import Json, sorted_json
from xdm_ft.storage.atomic import Together
from xdm_ft.storage.lines import TOO_DEEP, Damaged, OtherVersion, json_object, open_regular_file

COSTS = ("train_seconds", "peak_memory")  # of a model in results.json: they differ between runs that agree in all else
INPUTS = ("data", "encoder", "features")  # keys of the environment in results.json: what a resumed run must not change
_RUNS = "\0runs"  # stands for the models: no text of results.json has this character
# one space and a raw line break: a key of the whole, neither of a part nor inside a text
_EMPTY, _BEGIN, _END = b' "runs": []', b' "runs": [\n', b" ]"
SCHEMA: Json = json.loads(files("xdm_ft").joinpath("report/results.schema.json").read_text(encoding="utf-8"))
TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "number": int | float, "integer": int, "boolean": bool,
    "null": type(None),
}  # fmt: skip


class _Digest:
    """The checksum of results.json, without what differs between runs that agree.

    Those are the training's times and memory, the folder, the cluster, and the environment except for `INPUTS`. It is
    that of the whole as `json_digest` has it, without the text of all models in memory.
    """

    def __init__(self, results: Mapping[str, Any]) -> None:
        recipe = {key: value for key, value in results["recipe"].items() if key not in ("output", "cluster")}
        environment = {key: results["environment"].get(key) for key in INPUTS}
        rest = {key: value for key, value in results.items() if key != "checksum"}
        text = sorted_json(rest | {"runs": _RUNS, "recipe": recipe, "environment": environment})
        before, _, self._after = text.partition(json.dumps(_RUNS))
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
    rest = {key: value for key, value in results.items() if key != "checksum"} | {"runs": [], "checksum": ""}
    text = json.dumps(rest, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    head, _, tail = text.encode().partition(b"\n" + _EMPTY)
    before, key, after = tail.rpartition(b'"checksum": "')

    def write(temporary: Path) -> None:
        digest, between = _Digest(results), b"\n  "
        with temporary.open("wb") as file:
            file.write(head + b"\n" + _EMPTY[:-1])
            for run in results["runs"]:
                # Python's encoder of indented JSON takes ten times as long
                line = json.dumps(run, ensure_ascii=False, allow_nan=False)
                digest.add(json.loads(line))  # as a reader gets it: tuples as lists, keys as texts
                file.write(between + line.encode())
                between = b",\n  "
            file.write(b"\n ]" + before + key + digest.value().encode() + after)

    with Together() as files:
        files.add(path, write)
        files.drop_unchanged()
        files.replace()


def read_results(path: Path, entry: Callable[[Json], Any] = lambda run: run) -> Json:
    """Returns the content of results.json, with what `entry` makes of each model as `runs`.

    Not more than one model is in memory as JSON. Raises `Damaged`; `OtherVersion` if the file is whole, but not what
    the schema says.
    """
    made, fault = list[Any](), None
    with open_regular_file(path) as file:
        results = _rest(file)
        if results.get("schema") != 1:  # another one may have another checksum
            raise OtherVersion(f"it has the schema {json.dumps(results.get('schema'))[:40]}, not 1")
        try:
            digest = _Digest(results)
            # in another layout, as an editor saves it, `_rest` has read the models already
            for number, run in enumerate(results["runs"] or _models(file)):
                digest.add(run)
                try:
                    _refuse_other_types(_without_most(run), SCHEMA["$defs"]["run"], f"runs.{number}")
                    made.append(entry(run))
                except OtherVersion as error:
                    fault = fault or error
            is_complete = results["checksum"] == digest.value()
        except (KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"it lacks {error}") from error
        except RecursionError as error:
            raise Damaged(TOO_DEEP) from error
    if not is_complete:
        raise Damaged("its checksum differs")
    if fault is not None:
        raise fault
    _refuse_other_types(results | {"runs": []}, SCHEMA, "")
    return results | {"runs": made}


def _without_most(run: Json) -> Json:
    """Returns a model with the metrics of one class and one domain, as there may be thousands."""

    def kept(value: Any, depth: int) -> Any:
        if not isinstance(value, dict):
            return value
        items = value.items() if depth else islice(value.items(), 1)
        return {key: kept(inner, depth - 1) if depth else inner for key, inner in items}

    # of rules, picks, metrics and splits
    return {**run, "selected": kept(run["selected"], 4)} if "selected" in run else run


def _refuse_other_types(value: Any, schema: Json, path: str) -> None:
    """Raises `OtherVersion` if a value has another type than the schema says, or lacks a key."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(
        isinstance(value, TYPES[kind]) and (kind == "boolean") >= isinstance(value, bool) for kind in kinds
    ):
        raise OtherVersion(f"{path} must be {' or '.join(kinds)}, not {json.dumps(value)[:40]}")
    known = schema.get("enum", [schema["const"]] if "const" in schema else ())
    if known and not any(value == one and type(value) is type(one) for one in known):
        raise OtherVersion(f"{path} must be {' or '.join(map(json.dumps, known))}, not {json.dumps(value)[:40]}")
    if not value and (schema.get("minItems") or schema.get("minProperties")):
        raise OtherVersion(f"{path} is empty")
    if "if" in schema:  # all of them ask for a status
        _refuse_other_types(value, schema["then" if value.get("status") == "ok" else "else"], path)
    if "anyOf" in schema:
        _refuse_all_of(value, schema["anyOf"], path)
    if isinstance(value, dict):
        if lacking := [key for key in schema.get("required", ()) if key not in value]:
            raise OtherVersion(f"{path or 'it'} lacks {lacking[0]}")
        for key, inner in value.items():
            of_key = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if of_key is False:
                raise OtherVersion(f"{path} has the key {json.dumps(key)[:40]}")
            if isinstance(of_key, dict):
                _refuse_other_types(inner, of_key, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list) and "items" in schema:
        for number, inner in enumerate(value):
            _refuse_other_types(inner, schema["items"], f"{path}.{number}")


def _refuse_all_of(value: Any, schemas: list[Json], path: str) -> None:
    """Raises `OtherVersion` if a value has none of these types."""
    faults = list[OtherVersion]()
    for schema in schemas:
        try:
            _refuse_other_types(value, schema, path)
        except OtherVersion as fault:
            faults.append(fault)
    if len(faults) == len(schemas):
        raise faults[0]


def unverified_facts(path: Path) -> Json:
    """Returns the content of results.json without its models, which are skipped. Raises `Damaged` if it is not JSON.

    Nothing is compared with the checksum. In a layout that we do not write, models may be in it.
    """
    with open_regular_file(path) as file:
        return _rest(file)


def _rest(file: BinaryIO) -> Json:
    """Returns the content without the models; if not each of them is a line, with them."""
    rest, inside = list[bytes](), False
    for line in file:
        if inside and line.startswith(b"  {") and line.endswith((b"}\n", b"},\n")):
            continue
        if inside and not line.startswith(_END):
            file.seek(0)
            return json_object(file.read())
        rest.append(line.removeprefix(_END) if inside else _EMPTY if line == _BEGIN else line)
        inside = line == _BEGIN
    return json_object(b"".join(rest))


def _models(file: BinaryIO) -> Iterator[Json]:
    """Yields the models of a file in which each of them is a line."""
    file.seek(0)
    inside, comma = False, None  # whether one follows the model before
    for line in file:
        if inside and line.startswith(_END):
            break
        if inside:
            if comma is False:
                raise Damaged("it is not JSON: no comma between two models")
            comma = line.endswith(b",\n")
            yield json_object(line.removesuffix(b",\n"))
        inside = inside or line == _BEGIN
    if comma:
        raise Damaged("it is not JSON: its models do not end")
