"""Recipes that nobody would write: a recipe comes back, or one clear line per fault that names its place."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from xdm_ft.cli.parser import main
from xdm_ft.recipe.check import check, load
from xdm_ft.recipe.settings import Recipe
from xdm_ft.recipe.text import parse, recipe_folder
from xdm_ft.runtime.errors import UserError

NAMES = sorted(path.stem for path in recipe_folder().glob("*.yaml"))
PACKAGED = {name: yaml.safe_load((recipe_folder() / f"{name}.yaml").read_text()) for name in NAMES}
quick = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # shrinking would take longer than all the rest
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # 250 in all; `soak` below runs ten times as many
longer = settings(quick, max_examples=500)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 10**9, 2**63, 10**400, 1e308, -1e308, 5e-324]),
    st.floats(),
    st.sampled_from([math.inf, -math.inf, math.nan]),
    st.text(max_size=12),
    st.sampled_from(["", "\n", "\x00", "../..", "~", "nan", "1e9", "null", "{}", "erm+sam+sam", "+", "é" * 300, "<b>"]),
    st.binary(max_size=6),
    st.dates(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4),
    max_leaves=8,
)


def is_refused_or_loads(name: str | Path, overrides: list[str] | None = None) -> Recipe | None:
    """The recipe, resolving to itself; None where it is refused, by lines that each name a place."""
    try:
        recipe = load(str(name), overrides)
    except UserError as error:
        for line in str(error).split("\n"):
            assert re.match(r"(.*\.yaml(:\d+)?|command line.*?): \S", line), str(error)
            assert all(char.isprintable() for char in line), repr(line)
        return None
    assert check(parse(recipe.as_yaml(), "resolved.yaml")).resolved() == recipe.resolved()
    return recipe


def places(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys of a tree, of all depths."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in inner for place in [(*here, key), *places(value, (*here, key))]]


@st.composite
def mutations(draw: st.DrawFn) -> dict[str, Any]:
    """A packaged recipe, one to three of its keys removed, renamed, given another value or put elsewhere."""
    recipe = copy.deepcopy(PACKAGED[draw(st.sampled_from(NAMES))])
    for _ in range(draw(st.integers(1, 3))):
        known = places(recipe)
        if not known:
            break
        *way, last = draw(st.sampled_from(known))
        block = recipe
        for key in way:
            block = block[key]
        what = draw(st.sampled_from(["replace", "replace", "remove", "rename", "nest", "move", "add"]))
        value = block.pop(last) if what in ("remove", "rename", "move") else block[last]
        if what == "replace":
            block[last] = draw(VALUES)
        elif what == "nest":
            block[last] = draw(st.sampled_from([[value], {"name": value}, [value, value], str(value)]))
        elif what == "rename" and isinstance(block, dict):
            block[draw(st.text(max_size=5) | st.just(f"{last}s"))] = value
        elif what == "move":
            recipe[str(last)] = value
        elif what == "add" and isinstance(block, dict):
            block[draw(st.text(max_size=5))] = draw(VALUES)
    return recipe


def written(folder: Path, recipe: Any) -> Path:
    path = folder / "fuzzed.yaml"
    path.write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


@pytest.mark.slow
@quick
@given(recipe=mutations())
def test_mutations_of_packaged_recipes(folder: Path, recipe: dict[str, Any]) -> None:
    is_refused_or_loads(written(folder, recipe))


@quick
@given(value=VALUES)
def test_any_yaml(folder: Path, value: Any) -> None:
    assert is_refused_or_loads(written(folder, value)) is None


@quick
@given(data=st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_any_bytes(folder: Path, data: bytes) -> None:
    path = folder / "fuzzed.yaml"
    path.write_bytes(data)
    assert is_refused_or_loads(path) is None


@pytest.mark.slow
@quick
@given(name=st.sampled_from(NAMES), data=st.data())
def test_bytes_of_a_packaged_recipe_changed(folder: Path, name: str, data: st.DataObject) -> None:
    text = bytearray((recipe_folder() / f"{name}.yaml").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place : place + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=3) | st.just(b"{") | st.just(b"\n")
        )
    (folder / "fuzzed.yaml").write_bytes(text)
    is_refused_or_loads(folder / "fuzzed.yaml")


KEYS = sorted({".".join(map(str, place)) for name in NAMES for place in places(PACKAGED[name])})


@quick
@given(
    name=st.sampled_from(NAMES),
    overrides=st.lists(
        st.tuples(st.sampled_from(KEYS) | st.text(max_size=8), VALUES | st.just(...)).map(
            lambda pair: f"{pair[0]}={'' if pair[1] is ... else yaml.safe_dump(pair[1], default_flow_style=True)}"
        )
        | st.text(max_size=20),
        max_size=3,
    ),
)
def test_any_overrides(name: str, overrides: list[str]) -> None:
    is_refused_or_loads(name, overrides)


@pytest.mark.soak
@longer
@given(recipe=mutations())
def test_many_mutations(folder: Path, recipe: dict[str, Any]) -> None:
    is_refused_or_loads(written(folder, recipe))


GOOD = """\
name: fuzzed
data: {name: digits}
encoder: {name: timm, model: test_vit, trainable: true}
methods: [erm, {name: xdomainmix+sam+swad, label: all}, {name: mixstyle}, {name: groupdro}]
training: {steps: 10}
search: {trials: 2, space: {lr: {log_uniform: [1.0e-4, 1.0e-2]}}}
"""
FLOATS = [
    "training.lr", "training.encoder_lr", "training.weight_decay", "training.momentum", "training.clip_norm",
    "protocol.val_fraction", "methods.1.sam.rho", "methods.1.p_discard", "methods.1.swad.tolerance_ratio",
    "methods.2.alpha", "methods.2.eps", "methods.3.eta", "search.space.lr.log_uniform.0",
    "search.space.lr.log_uniform.1", "search.space.lr.choice.0", "search.space.lr.uniform.1",
]  # fmt: skip


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
@pytest.mark.parametrize("key", FLOATS)
def test_no_number_is_infinite_or_nan(key: str, value: str, tmp_path: Path) -> None:
    recipe = yaml.safe_load(GOOD)
    *way, last = key.replace("sam.", "sam:").replace("swad.", "swad:").split(".")
    last, block = last.replace(":", "."), recipe
    if way[-1] in ("choice", "uniform"):
        recipe["search"]["space"]["lr"] = {way[-1]: [0.1, 0.2]}
    for part in way:
        block = block[int(part)] if isinstance(block, list) else block.setdefault(part, {})
    block[int(last) if isinstance(block, list) else last] = yaml.safe_load(value)
    with pytest.raises(UserError) as refused:
        load(str(written(tmp_path, recipe)))
    assert f"{'.'.join(way[:2])}" in str(refused.value)


def test_what_is_large_and_right_loads(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text(GOOD)
    recipe = load(str(tmp_path / "large.yaml"), ["training.steps=1e9", "search.trials=1", "search.space={}"])
    assert recipe.training.steps == 10**9


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(12)
)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "wording"),
    [
        (BOMB, ":1: not valid YAML: aliases"),
        ("a: &a {b: *a}\n", "not valid YAML"),
        (f"a: {'[' * 5000}{']' * 5000}\n", "not valid YAML"),
        (f"a: {'{b: ' * 3000}1{'}' * 3000}\n", "not valid YAML"),
        ("name: a\nname: b\n", ':2: not valid YAML: the key "name" is written twice'),
        ("a: !!python/object/apply:os.system ['touch exploded']\n", "os.system is not supported in recipes"),
        ("a: !!python/name:os.system\n", "not valid YAML: could not determine a constructor"),
        ("a: 9999-99-99\n", "not valid YAML"),
        (f"training: {{steps: {'9' * 5000}}}\n", "not valid YAML"),
        ("? [a, b]\n: 1\n", "is not a text"),
        ("a: \x07\n", "not valid YAML"),
        ("<<: {name: x}\n", "name"),
        ("--- 1\n--- 2\n", "not valid YAML"),
    ],
)  # fmt: skip
def test_traps_of_yaml(text: str, wording: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trap.yaml"
    path.write_text(text)
    assert main(["run", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"xdm-ft: {path}") and wording in told and "Traceback" not in told
    assert not Path("exploded").exists()


@pytest.mark.timeout(60)
def test_trials_without_end_are_refused_or_loaded_in_bounded_time(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    assert is_refused_or_loads(tmp_path / "r.yaml", ["search.trials=1000000000", "search.sampler=sobol"]) is None
