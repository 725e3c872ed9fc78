"""Keys of algorithm, sharpness and averaging in one item of `methods`: none reaches a component that is not its own."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from xdm_ft.algorithms import Algorithm
from xdm_ft.cli.ls import listing
from xdm_ft.experiment.models import flags
from xdm_ft.experiment.plan import PlannedModel, hparams
from xdm_ft.experiment.summary import references
from xdm_ft.recipe import components
from xdm_ft.recipe.check import check
from xdm_ft.recipe.components import Component
from xdm_ft.recipe.method import MethodCommon, MethodItem, drawn_item
from xdm_ft.recipe.settings import Recipe
from xdm_ft.recipe.text import apply_override, parse
from xdm_ft.runtime.errors import UserError
from xdm_ft.training import Selected

TRAINED = [n for n in components.names("algorithms") if issubclass(components.find("algorithms", n), Algorithm)]
ITEMS = [
    "+".join(filter(None, parts))
    for parts in product(TRAINED, ["", *components.names("sharpness")], ["", *components.names("averaging")])
]
RECIPE = """\
name: keys
data: {name: digits}
encoder: {name: open_clip, model: ViT-B-32, weights: openai, normalize: true, trainable: true}
training: {steps: 1000}
"""


def recipe_with(*items: Any, overrides: tuple[str, ...] = ()) -> Recipe:
    text = parse(RECIPE + yaml.safe_dump({"methods": list(items)}), "r.yaml")
    for override in overrides:
        apply_override(text, override)
    return check(text)


def fault_of(*items: Any, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(UserError) as fault:
        recipe_with(*items, overrides=overrides)
    return str(fault.value)


def another(field: FieldInfo, number: int) -> Any:
    """A value that the setting takes and that is not its default: numbers differ with `number`, below 100."""
    arguments = getattr(field.annotation, "__args__", ())
    choices = [choice for one in arguments for choice in getattr(one, "__args__", (one,))]  # also of Literal | None
    candidates = [0.21 + number / 256, 7 + number, True, False, (7 + number,), *choices]
    for value in candidates:
        try:
            taken = TypeAdapter(field.rebuild_annotation()).validate_python(value, strict=True)
        except ValidationError:
            continue
        if taken != field.default and type(taken) is type(value):
            return value
    raise AssertionError(f"no other value for {field}")


def parts_of(name: str) -> list[tuple[str, str, type]]:
    """Name, prefix and class of every component."""
    folder_of = components.method_parts()
    found = [(part, folder_of[part]) for part in name.split("+")]
    return [(n, "" if f == "algorithms" else f"{n}.", components.find(f, n)) for n, f in found]


def written_out(name: str) -> dict[str, Any]:
    """Every key of every component, each with a value of its own."""
    values: dict[str, Any] = {}
    for _, prefix, cls in parts_of(name):
        for key, field in components.settings_model(cls).model_fields.items():
            values[f"{prefix}{key}"] = another(field, len(values))
    return values


def component(item: MethodItem, name: str) -> Component:
    return next(part for part in item.parts if part.name == name)


def test_there_are_pairs_and_triples() -> None:
    assert len(TRAINED) >= 13 and len(ITEMS) == 3 * 3 * len(TRAINED)
    assert {"mixup+sagm", "wise_ft+sam+swad", "erm+swad", "clipood+bma"} <= {*ITEMS}
    numbers = [value for value in written_out("mixup+sagm+swad").values() if type(value) in (int, float)]
    assert len(numbers) == len({*numbers}) >= 6


@pytest.mark.parametrize("name", ITEMS)
def test_every_key_reaches_its_own_component(name: str) -> None:
    values = written_out(name)
    recipe = recipe_with({"name": name, **values})
    [item] = recipe.methods
    recorded = hparams(recipe, item, recipe.training)
    assert values.items() <= recorded.items()
    common = hparams(recipe, recipe_with("erm").methods[0], recipe.training)
    assert recorded.keys() == common.keys() | values.keys() and not common.keys() & values.keys()
    assert recorded.items() >= common.items() - {("head_init", "random")}
    for part, prefix, cls in parts_of(name):
        own = {key: values[f"{prefix}{key}"] for key in components.settings_model(cls).model_fields}
        assert component(item, part).kwargs() == own and not own.keys() & MethodCommon.model_fields.keys()
        if prefix:
            assert vars(component(item, part).build()) == own
    assert check(parse(recipe.as_yaml(), "resolved.yaml")).as_yaml() == recipe.as_yaml()


@pytest.mark.parametrize("name", ["mixup+sagm+swad", "xdomainmix+sam", "irm+swad"])
def test_every_draw_and_every_override_reaches_its_own_component(name: str) -> None:
    values = written_out(name)
    keys = {f"{part}.{key}": f"{prefix}{key}" for part, prefix, cls in parts_of(name)
            for key in components.settings_model(cls).model_fields}  # fmt: skip
    recipe = recipe_with(name, "groupdro")
    item = drawn_item(recipe.methods[0], {key: values[written] for key, written in keys.items()})
    assert values.items() <= hparams(recipe, item, recipe.training).items()
    overrides = tuple(f"{key}={yaml.safe_dump(values[written]).split()[0]}" for key, written in keys.items())
    overridden = recipe_with(name, "groupdro", overrides=overrides)
    assert values.items() <= hparams(overridden, overridden.methods[0], overridden.training).items()
    assert overridden.methods[1].block.model_dump() == recipe.methods[1].block.model_dump()


def test_alpha_of_mixup_and_of_sagm() -> None:
    [item] = recipe_with({"name": "mixup+sagm", "alpha": 0.3, "sagm.alpha": 0.002}).methods
    assert item.algorithm.kwargs()["alpha"] == 0.3 and item.sharpness is not None
    assert item.sharpness.build().alpha == 0.002


@pytest.mark.parametrize(
    ("name", "key", "right"),
    [
        ("xdomainmix+sam", "rho", "sam.rho"),
        ("sam", "rho", "sam.rho"),
        ("erm+sagm", "alpha", "sagm.alpha"),
        ("erm+sagm+swad", "n_converge", "swad.n_converge"),
    ],
)
def test_a_key_without_its_prefix_is_refused(name: str, key: str, right: str) -> None:
    fault = fault_of({"name": name, key: 1})
    assert fault.startswith("r.yaml:") and fault.endswith(f": methods.0.{key}: unknown key; write {right}")


def test_a_key_of_what_is_not_there_is_refused() -> None:
    assert "methods.0.sam.rho: unknown key" in fault_of({"name": "erm", "sam.rho": 0.1})
    assert "methods.0.sam.rho: input should be greater than 0" in fault_of({"name": "erm+sam", "sam.rho": 0})


def test_the_command_line_sets_a_component_wherever_it_is() -> None:
    own = {"name": "xdomainmix+sam", "sam.rho": 0.3, "label": "own"}
    recipe = recipe_with("erm", "sam", own, overrides=("sam.rho=0.1", "xdomainmix.p_discard=0.4"))
    assert [item.sharpness and item.sharpness.build().rho for item in recipe.methods] == [None, 0.1, 0.1]
    assert [item.label for item in recipe.methods] == ["erm", "sam", "own"]
    assert recipe.methods[2].algorithm.kwargs()["p_discard"] == 0.4


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("swad.n_converge=2", "command line: swad.n_converge: no item of methods uses swad; add it to one"),
        ("sam=0.1", "command line: sam: is a method, not a value; write sam.KEY=VALUE"),
        ("sam.rhoo=0.1", 'command line: sam.rhoo: unknown key; did you mean "sam.rho"?'),
        ("sam.rho=-1", "command line: sam.rho: input should be greater than 0, given -1"),
    ],
)
def test_faults_of_the_command_line(override: str, expected: str) -> None:
    assert expected in fault_of("erm", "sam", overrides=(override,))


def test_only_the_command_line_has_keys_of_components_beside_the_blocks() -> None:
    with pytest.raises(UserError, match=r"r.yaml:5: sam: unknown key"):
        check(parse(RECIPE + "sam: {rho: 0.1}\nmethods: [sam]\n", "r.yaml"))


def test_the_command_line_sets_one_range_of_the_space() -> None:
    overrides = "search.trials=3", "search.space.sam.rho={uniform: [0.1, 0.2]}", "search.space.lr.choice=[0.1, 0.2]"
    recipe = recipe_with("erm", "sam", overrides=overrides)
    assert recipe.search.space["sam.rho"].uniform == (0.1, 0.2) and recipe.search.space["lr"].choice == (0.1, 0.2)
    narrower = recipe_with("sam", overrides=(*overrides[:2], "search.space.sam.rho.uniform=[0.1, 0.15]"))
    assert narrower.search.space["sam.rho"].uniform == (0.1, 0.15)


def test_flags_look_at_their_own_component() -> None:
    both = "search.space={mixup.alpha: {uniform: [0, 1]}, sagm.alpha: {uniform: [0, 1]}}"
    recipe = recipe_with("mixup+sagm", overrides=("search.trials=2", both))
    plan: Any = SimpleNamespace(recipe=recipe)
    nothing: Any = None
    item = drawn_item(recipe.methods[0], {"mixup.alpha": 0.5, "sagm.alpha": 0.99})
    model = PlannedModel(nothing, item, recipe.training, nothing, steps=1000)
    found = flags(plan, model, Selected(step=10, state={}))
    assert found == ["sagm.alpha at the edge of its range"]


def test_a_head_and_its_keys() -> None:
    recipe = recipe_with(
        "erm", {"name": "sam", "head": "mlp", "mlp.hidden_width": 64}, {"name": "irm", "head": "cosine"}
    )
    heads = [(item.head.name, item.head.settings()) for item in recipe.methods]
    assert heads[0] == ("linear", {})
    assert heads[1] == ("mlp", {"mlp.hidden_width": 64, "mlp.activation": "gelu"})
    assert heads[2] == ("cosine", {"cosine.scale": 1 / 0.07})
    found = [hparams(recipe, item, recipe.training) for item in recipe.methods]
    assert "head" not in found[0] and found[1]["head"] == "mlp" and found[1]["mlp.hidden_width"] == 64
    again = check(parse(recipe.as_yaml(), "again.yaml"))
    assert again.resolved() == recipe.resolved()


def test_keys_of_a_head_on_the_command_line_and_in_a_search() -> None:
    items = "erm", {"name": "erm", "head": "mlp", "label": "deep"}
    recipe = recipe_with(*items, overrides=("mlp.hidden_width=32",))
    assert recipe.methods[1].head.kwargs() == {"hidden_width": 32, "activation": "gelu"}
    space = "search={trials: 4, space: {mlp.hidden_width: {choice: [8, 16]}}}"
    searched = recipe_with(*items, overrides=(space,))
    drawn = {drawn_item(searched.methods[1], searched.search.drawn(t)).head.kwargs()["hidden_width"] for t in (1, 2, 3)}
    assert drawn <= {8, 16} and drawn_item(searched.methods[0], searched.search.drawn(1)) is searched.methods[0]


@pytest.mark.parametrize(
    "item, complaint",
    [
        ({"name": "erm", "head": "cosin"}, 'methods.0.head: no "cosin" in heads; did you mean "cosine"?'),
        ({"name": "erm", "head": "cosine", "mlp.hidden_width": 3}, "methods.0.mlp.hidden_width: unknown key"),
        ({"name": "erm", "head": "mlp", "mlp.hidden_width": 0}, "methods.0.mlp.hidden_width: input should be greater"),
        ({"name": "zero_shot", "head": "cosine"}, "methods.0.head: zero_shot computes a linear head directly"),
        ({"name": "linear_probe", "head": "mlp"}, "methods.0.head: linear_probe computes a linear head directly"),
        (
            {"name": "erm", "head": "mlp", "head_init": "zero_shot"},
            "methods.0.head: mlp can not be combined with head_init: zero",
        ),
        ({"name": "wise_ft", "head": "mlp"}, "methods.0.head: mlp can not be combined with head_init: zero_shot"),
    ],
)
def test_heads_that_do_not_fit_are_refused_in_one_line(item: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as refused:
        recipe_with(item)
    (line,) = str(refused.value).splitlines()
    assert complaint in line


def test_a_cosine_head_starts_from_text_without_normalize() -> None:
    items = (
        {"name": name, "head": head, "head_init": "zero_shot"} for name in ("erm", "wise_ft") for head in ("cosine",)
    )
    recipe_with(*items, overrides=("encoder.normalize=false",))
    with pytest.raises(UserError, match="which need L2-normalised features"):
        recipe_with({"name": "erm", "head_init": "zero_shot"}, overrides=("encoder.normalize=false",))


def test_what_rows_are_compared_with() -> None:
    """Plain ERM with the same head; ERM on another head with ERM on the linear one."""
    cosine = {"head": "cosine"}
    items = ["erm", "irm", {"name": "erm", "label": "erm cosine", **cosine}]
    items += [{"name": name, "label": f"{name} cosine", **cosine} for name in ("irm", "sam")]
    items += [{"name": "irm", "label": "irm mlp", "head": "mlp"}]
    assert references(recipe_with(*items)) == {
        "irm": "erm",
        "erm cosine": "erm",
        "irm cosine": "erm cosine",
        "sam cosine": "erm cosine",
    }


def test_the_listing_writes_keys_as_recipes_do() -> None:
    assert " mlp.hidden_width=512 (" in listing("heads").text()
    lines = {line.split()[0]: line for line in listing("methods").text().splitlines()}
    assert " sam.rho=0.05 (" in lines["…+sam"] and "swad.n_converge=3 (" in lines["…+swad"]
    assert " alpha=0.2 (" in lines["mixup"]
