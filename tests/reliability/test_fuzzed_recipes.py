"""Recipes that nobody would write: a recipe comes back, or one clear line per fault that names its place."""

import copy
import math
import re

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from xdm_ft.recipe.check import check, load
from xdm_ft.recipe.text import parse, recipe_folder
from xdm_ft.runtime.errors import UserError

NAMES = sorted(path.stem for path in recipe_folder().glob("*.yaml"))
PACKAGED = {name: yaml.safe_load((recipe_folder() / f"{name}.yaml").read_text()) for name in NAMES}
quick = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # shrinking would take longer than all the rest
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 10**9, 2**63, 10**400, 1e308, -1e308, 5e-324, math.inf, -math.inf, math.nan]),
    st.floats(),
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


def is_refused_or_loads(name, overrides=None):
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


def places(tree, here=()):
    """The keys of a tree, of all depths."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in inner for place in [(*here, key), *places(value, (*here, key))]]


KEYS = sorted({".".join(map(str, place)) for name in NAMES for place in places(PACKAGED[name])})
OVERRIDES = st.lists(
    st.tuples(st.sampled_from(KEYS) | st.text(max_size=8), VALUES | st.just(...)).map(
        lambda pair: f"{pair[0]}={'' if pair[1] is ... else yaml.safe_dump(pair[1], default_flow_style=True)}"
    )
    | st.text(max_size=20),
    max_size=2,
)


@st.composite
def mutations(draw):
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
    return yaml.safe_dump(recipe, allow_unicode=True).encode()


@st.composite
def damaged(draw):
    """A packaged recipe, some of its bytes replaced."""
    text = bytearray((recipe_folder() / f"{draw(st.sampled_from(NAMES))}.yaml").read_bytes())
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text) - 1))
        text[start : start + draw(st.integers(0, 3))] = draw(st.binary(max_size=3) | st.sampled_from([b"{", b"\n"]))
    return bytes(text)


any_yaml = VALUES.map(lambda value: yaml.safe_dump(value, allow_unicode=True).encode())
any_bytes = st.binary(max_size=80) | st.text(max_size=80).map(str.encode)


@quick
@given(data=mutations() | damaged() | any_yaml | any_bytes, overrides=st.just([]) | OVERRIDES)
def test_any_recipe(tmp_path_factory, data, overrides):
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(data)
    is_refused_or_loads(path, overrides)


GOOD = """\
name: fuzzed
data: {name: digits}
encoder: {name: timm, model: test_vit, trainable: true}
methods: [erm, {name: xdomainmix+sam+swad, label: all}, {name: mixstyle}, {name: groupdro}]
training: {steps: 10}
"""
FLOATS = [
    "training.lr",
    "protocol.val_fraction",
    "all.sam.rho",
    "all.p_discard",
    "all.swad.tolerance_ratio",
    "groupdro.eta",
]
RANGES = ("log_uniform: [{}, 1]", "log_uniform: [0.1, {}]", "uniform: [0, {}]", "choice: [{}]")


@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_no_number_is_infinite_or_nan(value, tmp_path):
    (tmp_path / "r.yaml").write_text(GOOD)
    ranges = [f"search={{trials: 2, space: {{lr: {{{range_.format(value)}}}}}}}" for range_ in RANGES]
    for override in [*(f"{key}={value}" for key in FLOATS), *ranges]:
        with pytest.raises(UserError, match=override.partition("=")[0]):
            load(str(tmp_path / "r.yaml"), [override])


@pytest.mark.timeout(60)
def test_trials_without_end_are_refused_in_bounded_time(tmp_path):
    (tmp_path / "r.yaml").write_text(GOOD)
    assert is_refused_or_loads(tmp_path / "r.yaml", ["search.trials=1000000000", "search.sampler=sobol"]) is None
