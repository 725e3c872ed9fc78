"""The text of a recipe: finds packaged recipes, reads YAML with line numbers, applies overrides, collects faults."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from xdm_ft.recipe import components
from xdm_ft.runtime.errors import UserError, did_you_mean

logger = logging.getLogger("xdm_ft")
HUB_SECONDS = 5.0  # in which the hub must answer, where a folder names no recipe
MAX_DEPTH = 50  # nested brackets; PyYAML's time grows with the square of their number
Key = tuple[str | int, ...]  # ("methods", 2, "p_discard")
KEYS = (
    "name", "data", "encoder", "encoders", "protocol", "features", "methods", "training", "search", "report", "output",
    "cluster", "analyse", "label_curve",
)  # fmt: skip


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, except that `1e-3` is a number, as in YAML 1.2."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        if self.flow_level >= MAX_DEPTH:
            problem = f"more than {MAX_DEPTH} nested brackets"
            raise yaml.scanner.ScannerError(problem=problem, problem_mark=self.get_mark())
        super().fetch_flow_collection_start(TokenClass)


class Dumper(yaml.SafeDumper):
    """Writes YAML that `_Loader` reads back: the text `1e-3` in quotes."""


for _cls in (_Loader, Dumper):
    _cls.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


class _OneLineDumper(Dumper):
    """Writes a text that is not printable in double quotes, where YAML has escapes for all characters."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


_OneLineDumper.add_representer(str, _OneLineDumper.represent_str)


def in_yaml(value: Any) -> str:
    """Returns a value in YAML on one printable line."""

    def dumped(allow_unicode: bool) -> str:
        text: str = yaml.dump(
            value, Dumper=_OneLineDumper, default_flow_style=True, allow_unicode=allow_unicode, width=float("inf"),
            sort_keys=False,
        )  # fmt: skip
        return text.removesuffix("\n").removesuffix("\n...")  # PyYAML writes a line "..." after a single scalar

    text = dumped(True)
    return text if text.isprintable() else dumped(False)


def as_text(values: Mapping[str, Any]) -> str:
    """Returns plain values as the YAML text of a recipe."""
    return str(yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120))


def join_key(key: Key) -> str:
    return ".".join(map(str, key))


@dataclass
class RecipeText:
    """A recipe as plain dicts and lists, and the place where each key was written."""

    origin: str  # the file, for messages
    values: dict[str, Any]
    lines: dict[Key, int] = field(default_factory=dict)
    overridden: set[Key] = field(default_factory=set)
    override_origin: str = "command line"
    method_overrides: list[tuple[str, Any]] = field(default_factory=list)
    """(METHOD.KEY, value): which items of `methods` they change, `method.items_with_overrides` finds out"""
    written_as: dict[Key, str] = field(default_factory=dict)  # of a key that an override METHOD.KEY sets

    def where(self, key: Key) -> str:
        """Returns the place of a key, or of the nearest block around it: `file:line` or `command line`."""
        if key not in self.lines and self.is_overridden(key):
            return self.override_origin
        for end in range(len(key), 0, -1):
            if (*key[:end], "name") in self.overridden:  # another component, which needs other keys
                return self.override_origin
            if key[:end] in self.lines:
                return f"{self.origin}:{self.lines[key[:end]]}"
        return self.origin

    def name(self, key: Key) -> str:
        """Returns the dotted key, as the user wrote it: methods.4.sam.rho may be xdomainmix+sam.rho."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.written_as:
                return join_key((self.written_as[key[:end]], *key[end:]))
        return join_key(key)

    def is_overridden(self, key: Key) -> bool:
        """Returns whether an override sets the key, a block around it, or a key inside it."""
        return any(other[: len(key)] == key[: len(other)] for other in self.overridden)

    def mark_overridden(self, key: Key) -> None:
        """Notes that an override sets the key; the lines of its former value are removed."""
        self.overridden.add(key)
        self.lines = {other: line for other, line in self.lines.items() if other[: len(key)] != key}


class Faults:
    """Collects every fault with its place, so that all are reported together."""

    def __init__(self, text: RecipeText) -> None:
        self.text, self.lines = text, dict[str, None]()

    def add(self, key: Key | str, problem: str, *causes: Key | str) -> None:
        """Adds a fault of `key`. Its place is the command line if an override sets one of `causes`."""
        key, *causes_ = (tuple(name.split(".")) if isinstance(name, str) else name for name in (key, *causes))
        overridden = any(map(self.text.is_overridden, causes_))
        origin = self.text.override_origin if overridden else self.text.where(key)
        self.lines[f"{origin}: {self.text.name(key)}: {problem}"] = None

    def raise_if_any(self) -> None:
        if self.lines:
            raise UserError(*self.lines)


def recipe_folder() -> Path:
    """Returns the folder of the packaged recipes: inside the package if installed, beside it in a clone."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def find_recipe(name: str) -> Path:
    """Returns the path of a file, or of a packaged recipe by its name, with or without `.yaml`. Raises `UserError`."""
    if path := _file_of(name):
        return path
    if os.path.isdir(name):
        raise UserError(f"{name}: is a folder; name a file, or a recipe of `xdm-ft ls`")
    raise _no_such_recipe(name)


def _file_of(name: str) -> Path | None:
    path = Path(name)
    if os.path.isfile(path):  # Path.is_file raises an error if a name is too long
        return path
    packaged = recipe_folder() / f"{path.name.removesuffix('.yaml')}.yaml"
    is_name = path.parent in (Path("."), Path("recipes")) and not name.startswith(("./", ".\\"))
    if is_name and os.path.isfile(packaged):
        return packaged
    return None


def _no_such_recipe(name: str) -> UserError:
    path = Path(name)
    stem = path.name.removesuffix(".yaml").removesuffix(".yml")
    beside = [file for suffix in (".yaml", ".yml") if os.path.isfile(file := path.with_name(f"{stem}{suffix}"))]
    packaged_names = sorted(path.stem for path in recipe_folder().glob("*.yaml"))
    hint = f'; did you mean "{beside[0]}"?' if beside else did_you_mean(stem, packaged_names, "xdm-ft ls")
    return UserError(f"{name}: no such recipe{hint}")


def _in_folder(folder: Path, encoder_overrides: Mapping[str, Any]) -> tuple[Path, dict[str, str]]:
    """Returns the recipe that a folder stands for, and what the folder says of its keys.

    A run directory stands for its own recipe, wherever it lies now. Another folder has images: of the recipes on a
    frozen CLIP and on a CNN the one of the encoder that overrides name, or the first one whose weights can be had.
    Raises `UserError` if neither's can.
    """
    if os.path.isfile(folder / "recipe.yaml"):
        if not any(os.path.exists(folder / name) for name in ("results.json", "state")):
            raise UserError(f"{folder}: is a folder with a recipe, and no run; write {folder / 'recipe.yaml'}")
        return folder / "recipe.yaml", {"name": folder.resolve().name, "output.dir": str(folder.resolve().parent)}
    if {"name", "model", "weights"} & encoder_overrides.keys():
        name = "timm_folder" if _is_timm(**encoder_overrides) else "clip_folder"
        logger.info("%s: a folder of images; the recipe is %s, with the encoder given", folder, name)
        return recipe_folder() / f"{name}.yaml", {"data.root": str(folder)}
    for name, may_download in (("clip_folder", True), ("timm_folder", False)):
        path = recipe_folder() / f"{name}.yaml"
        encoder = yaml.safe_load(path.read_text(encoding="utf-8"))["encoder"]
        if source := _source_of_weights(**encoder, may_download=may_download):
            logger.info("%s: a folder of images; the recipe is %s, whose weights %s", folder, name, source)
            return path, {"data.root": str(folder)}
    components.find("data", "folder")(root=folder)  # raises an error if there are no images in <domain>/<class>/
    raise UserError(
        f"{folder}: is a folder; the weights of clip_folder and timm_folder are not on this machine, and no hub "
        f"answers; add encoder.model=NAME encoder.weights=FILE"
    )


def _is_timm(name: str | None = None, model: str = "", **_: Any) -> bool:
    """Returns whether overrides name an encoder of timm."""
    from timm import list_models

    return name == "timm" if name else str(model).partition(".")[0] in list_models()


def _source_of_weights(name: str, model: str, weights: str, *, may_download: bool, **_: Any) -> str | None:
    """Returns where the weights of a packaged recipe's encoder are, in words; None if they cannot be had."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from xdm_ft.model_sources.source import network_error

    if name == "open_clip":
        from open_clip import get_pretrained_cfg

        repository = get_pretrained_cfg(model, weights)["hf_hub"].strip("/")
    else:
        from timm.models import get_pretrained_cfg

        repository = get_pretrained_cfg(model).hf_hub_id
    with suppress(LocalEntryNotFoundError):
        if any(Path(snapshot_download(repository, local_files_only=True)).glob("*.safetensors")):
            return "are on this machine"
    try:
        if may_download:
            HfApi().model_info(repository, timeout=HUB_SECONDS)
            return "are downloaded once"
    except Exception as error:
        if network_error(error) is None:
            raise
    return None


def read_recipe(name: str, overrides: list[str]) -> RecipeText:
    """Returns the text of a recipe with its overrides. `name`: of a file, a packaged recipe, or a folder.

    Raises `UserError` if it cannot be read or parsed.
    """
    pairs = (override.partition("=")[::2] for override in overrides)
    recipe = _read(name, {key: value for key, value in pairs})
    for override in overrides:
        apply_override(recipe, override)
    return recipe


def _read(name: str, overrides: Mapping[str, Any]) -> RecipeText:
    """Returns the text of a recipe without its overrides, which may choose it if `name` is a folder of images."""
    of_folder = dict[str, str]()
    if (path := _file_of(name)) is None:
        if not os.path.isdir(name):
            raise _no_such_recipe(name)
        encoder = {
            key.removeprefix("encoder."): value for key, value in overrides.items() if key.startswith("encoder.")
        }
        path, of_folder = _in_folder(Path(name), encoder)
    if path.suffix.lower() in (".csv", ".parquet"):
        raise UserError(f"{path}: is a table, not a recipe; write clip_folder 'data={{name: table, file: {path}}}'")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    recipe = parse(text, str(path))
    for key, value in of_folder.items():
        _override(recipe, key, value, str(path))
    return recipe


def recipe_of(recipe: str | os.PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any]) -> RecipeText:
    """Returns the text of a recipe with overrides that are Python values.

    `recipe` is a file, the name of a packaged recipe, or nested dicts. An override without dots names a block, into
    which a dict is merged key by key; the value of a dotted key replaces the former one. Raises `UserError`.
    """
    plain = {name: _as_yaml_values(value) for name, value in overrides.items()}
    given = [pair for item in plain.items() for pair in ([item] if "." in item[0] else leaves(*item))]
    if isinstance(recipe, Mapping):
        text = RecipeText("recipe", _as_yaml_values(recipe))
    else:
        text = _read(os.fspath(recipe), dict(given))
    text.override_origin = "overrides"
    for key, leaf in given:
        _override(text, key, leaf, f'overrides: "{key}={leaf!r}"')
    return text


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and value of every leaf of nested dicts. An augmentation is a leaf."""
    if isinstance(value, dict) and value and name.rpartition(".")[2] != "train_augmentation":
        for key, inner in value.items():
            yield from leaves(f"{name}.{key}", inner)
    else:
        yield name, value


def _as_yaml_values(value: Any) -> Any:
    """Returns the value as lists, dicts, texts, numbers, booleans and None. Raises `UserError` for other types."""

    def plain(other: Any) -> Any:
        if isinstance(other, os.PathLike):
            return os.fspath(other)
        raise UserError(f"recipe: {other!r} is a {type(other).__name__}; use texts, numbers, lists and dicts")

    # by way of JSON, which turns tuples into lists and refuses other types
    return json.loads(json.dumps(value if not isinstance(value, Mapping) else dict(value), default=plain))


def parse(text: str, origin: str) -> RecipeText:
    """Returns plain values with the line of every key. Raises `UserError` for aliases, duplicate keys and tags."""
    recipe = RecipeText(origin, {})
    values = _read_yaml(text, recipe)
    if not isinstance(values, dict | None):
        raise UserError(f"{origin}: a recipe is a mapping of keys to values, not a {type(values).__name__}")
    recipe.values = values or {}
    return recipe


def _read_yaml(text: str, recipe: RecipeText) -> Any:
    """Returns the value of a YAML text, and adds the lines of its keys to `recipe`."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _plain(node, (), loader, recipe.lines, set())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        origin = f"{recipe.origin}:{mark.line + 1}" if mark else recipe.origin
        problem = getattr(error, "problem", None) or str(error)
        raise UserError(f"{origin}: not valid YAML: {' '.join(problem.split())}") from error
    except (ValueError, RecursionError, OverflowError) as error:  # dates out of range, very deep nesting
        raise UserError(f"{recipe.origin}: not valid YAML: {type(error).__name__}: {error}") from error


def _plain(node: yaml.Node, key: Key, loader: _Loader, lines: dict[Key, int], seen: set[int]) -> Any:
    if id(node) in seen:  # PyYAML represents an alias by the node that it refers to
        raise _yaml_fault(node, "aliases (*name) are not supported in recipes")
    seen.add(id(node))
    lines[key] = node.start_mark.line + 1
    tag = node.tag.removeprefix("tag:yaml.org,2002:")
    # pydantic cannot write bytes, which `!!binary` makes, into its messages
    if tag not in ("map", "seq") if isinstance(node, yaml.CollectionNode) else tag == "binary":
        raise _yaml_fault(node, f"the tag {node.tag} is not supported in recipes")
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*key, i), loader, lines, seen) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    mapping: dict[str, Any] = {}
    for name_node, value_node in node.value:
        name = loader.construct_object(name_node)
        if not isinstance(name, str):
            raise _yaml_fault(name_node, f"the key {name!r} is not a text; write it in quotes")
        if name in mapping:
            raise _yaml_fault(name_node, f'the key "{name}" is written twice')
        mapping[name] = _plain(value_node, (*key, name), loader, lines, seen)
        lines[(*key, name)] = name_node.start_mark.line + 1
    return mapping


def _yaml_fault(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def apply_override(recipe: RecipeText, override: str) -> None:
    """Applies `join_key.key=VALUE`, with VALUE read as YAML. training.steps=N removes epochs, and the reverse.

    In `search.space.METHOD.KEY=…`, METHOD.KEY is one key of the space. Raises `UserError`.
    """
    name, equals, text = override.partition("=")
    if not equals or not all(name.split(".")):
        key = name if all(name.split(".")) and ("." in name or name in KEYS) else "key.sub"
        raise UserError(f'command line: "{override}" is not an override; write {key}=value, without spaces')
    origin = f'command line: "{override}"'
    try:
        value = _read_yaml(text, RecipeText(origin, {}))
    except UserError as error:
        if text.startswith(("{", "[")) and not text.rstrip().endswith(("}", "]")):
            problem = "not valid YAML: it ends within brackets; put the whole override in quotes"
            raise UserError(f"{origin}: {problem}") from error
        raise
    _override(recipe, name, value, origin)


def _override(recipe: RecipeText, name: str, value: Any, origin: str) -> None:
    """Sets the dotted key `name`, in which encoders.0 is the first item; messages call the override `origin`."""
    parts = name.split(".")
    if parts[0] not in KEYS:
        # `trainable` may be a block of keys, which an override of it replaces as a whole
        recipe.method_overrides += [(name, value)] if parts[-1] == "trainable" else leaves(name, value)
        return
    if parts[:2] == ["search", "space"] and len(parts) > 3 and parts[2] in components.method_parts():
        parts[2:4] = [f"{parts[2]}.{parts[3]}"]
    key: Key = ()
    block: Any = recipe.values
    for part in parts[:-1]:
        index = int(part) if isinstance(block, list) and part.isdecimal() and int(part) < len(block) else None
        key = (*key, part if index is None else index)
        if isinstance(block, dict):
            if block.get(part) is None or isinstance(block[part], bool):  # such as `trainable: false`
                block[part] = {}
            inner = block[part]
        else:
            inner = None if index is None else block[index]
        if not isinstance(inner, dict) and not (isinstance(inner, list) and key == ("encoders",)):
            remedy = "; write METHOD.KEY=VALUE" if key == ("methods",) else ""
            raise UserError(f"{origin}: {join_key(key)} is not a block of keys{remedy}")
        block = inner
    if isinstance(block, list):
        raise UserError(f"{origin}: encoders is a list; write encoders.0.KEY=VALUE for its first item")
    block[parts[-1]] = value
    recipe.mark_overridden((*key, parts[-1]))
    other = {"training.steps": "epochs", "training.epochs": "steps"}.get(name)
    if other and ("training", other) not in recipe.overridden:
        block.pop(other, None)


def recipe_keys(values: Mapping[str, Any], keys: Mapping[str, list[str]]) -> Iterator[str]:
    """Yields the dotted keys that overrides of a recipe, given as unchecked values, can set. `keys`: `known_keys`."""
    yield from ("name", "methods", "encoders", "analyse", "label_curve")
    for block in KEYS:
        yield from (f"{block}.{key}" for key in keys.get(block, ()) if block != "methods")
    for block, folder in (("data", "data"), ("encoder", "encoders")):
        chosen = values.get(block)
        if isinstance(chosen, dict):
            yield from (f"{block}.{key}" for key in keys.get(f"{folder}.{chosen.get('name')}", ()))
    methods = values.get("methods")
    items = methods if isinstance(methods, list) else str(methods).split(",")
    blocks = [item if isinstance(item, dict) else {"name": item, "head": "linear"} for item in items]
    parts = [part.strip() for block in blocks for part in (*str(block.get("name")).split("+"), str(block.get("head")))]
    for part in dict.fromkeys(parts):
        for folder in ("algorithms", "sharpness", "averaging", "heads"):
            yield from (f"{part}.{key}" for key in keys.get(f"{folder}.{part}", ()))
        if f"algorithms.{part}" in keys:
            yield from (f"{part}.{key}" for key in keys["methods"] if key != "name")


def say_if_finished(text: RecipeText) -> None:
    """Logs a line, in the main process, if the run directory that the recipe names holds a finished run.

    It comes first, because loading torch and checking the files and the recipe of the run take much longer.
    """
    name, output = text.values.get("name"), text.values.get("output")
    folder = output.get("dir", "output") if isinstance(output, dict) else "output"
    if os.environ.get("RANK", "0") != "0" or not isinstance(name, str) or not isinstance(folder, str):
        return
    path = Path(folder) / name
    # `state` is removed when a run ends; os.path, because pathlib raises errors for names that are too long
    has_results = all(os.path.isfile(path / file) for file in ("results.json", "results.md"))
    if has_results and not os.path.exists(path / "state"):
        logger.info("%s: a finished run is here", path)
