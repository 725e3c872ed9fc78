"""Keys of algorithm, sharpness, averaging and head in one item of `methods`: none reaches another component."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from xdm_ft.algorithms import Algorithm
from xdm_ft.experiment.models import flags
from xdm_ft.experiment.plan import PlannedModel, hparams
from xdm_ft.experiment.results import references
from xdm_ft.recipe import components
from xdm_ft.recipe.check import check
from xdm_ft.recipe.components import Component
from xdm_ft.recipe.method import MethodCommon, MethodItem, draw_item
from xdm_ft.recipe.settings import Recipe
from xdm_ft.recipe.text import apply_override, parse
from xdm_ft.training import Selected

TRAINED = [n for n in components.names("algorithms") if issubclass(components.find("algorithms", n), Algorithm)]
ADDED = [f"{one}{two}" for one in ("", "+sam", "+sagm") for two in ("", "+swad", "+bma")]
ITEMS = [*TRAINED, *(f"{name}{added}" for name, added in zip([*TRAINED, *TRAINED], ADDED, strict=False) if added)]
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


def another(field: FieldInfo, number: int) -> Any:
    """A value that the setting takes and that is not its default: numbers differ with `number`, below 100."""
    arguments = getattr(field.annotation, "__args__", ())
    choices = [choice for one in arguments for choice in getattr(one, "__args__", (one,))]  # also of Literal | None
    for value in [0.21 + number / 256, 7 + number, True, False, (7 + number,), *choices]:
        try:
            taken = TypeAdapter(field.rebuild_annotation()).validate_python(value, strict=True)
        except ValidationError:
            continue
        if taken != field.default and type(taken) is type(value):
            return value
    raise AssertionError(f"no other value for {field}")


def parts_of(name: str) -> list[tuple[str, str, type]]:
    """Name, prefix and class of every component."""
    folders = components.method_parts()
    parts = [(part, folders[part]) for part in name.split("+")]
    return [(n, "" if f == "algorithms" else f"{n}.", components.find(f, n)) for n, f in parts]


def written_out(name: str) -> dict[str, Any]:
    """Every key of every component, each with a value of its own."""
    values: dict[str, Any] = {}
    for _, prefix, cls in parts_of(name):
        for key, field in components.settings_model(cls).model_fields.items():
            values[f"{prefix}{key}"] = another(field, len(values))
    return values


def component(item: MethodItem, name: str) -> Component:
    return next(part for part in item.parts if part.name == name)


def test_every_component_is_there() -> None:
    assert len(TRAINED) >= 13 and len(ITEMS) == len(TRAINED) + len(ADDED) - 1
    assert set("+".join(ADDED).split("+")) - {""} == {*components.names("sharpness"), *components.names("averaging")}
    numbers = [value for value in written_out("mixup+sagm+swad").values() if type(value) in (int, float)]
    assert len(numbers) == len({*numbers}) >= 6


@pytest.mark.parametrize("name", ITEMS)
def test_every_key_reaches_its_own_component(name: str) -> None:
    values = written_out(name)
    recipe = recipe_with({"name": name, **values})
    [item] = recipe.methods
    recorded = hparams(item, recipe.training)
    assert values.items() <= recorded.items()
    common = hparams(recipe_with("erm").methods[0], recipe.training)
    of_start = {"normalize"} & recorded.keys()  # of methods that start from class embeddings
    assert recorded.keys() == common.keys() | values.keys() | of_start and not common.keys() & values.keys()
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
    item = draw_item(recipe.methods[0], {key: values[written] for key, written in keys.items()})
    assert values.items() <= hparams(item, recipe.training).items()
    overrides = tuple(f"{key}={yaml.safe_dump(values[written]).split()[0]}" for key, written in keys.items())
    overridden = recipe_with(name, "groupdro", overrides=overrides)
    assert values.items() <= hparams(overridden.methods[0], overridden.training).items()
    assert overridden.methods[1].block.model_dump() == recipe.methods[1].block.model_dump()


def test_flags_look_at_their_own_component() -> None:
    both = "search.space={mixup.alpha: {uniform: [0, 1]}, sagm.alpha: {uniform: [0, 1]}}"
    recipe = recipe_with("mixup+sagm", overrides=("search.trials=2", both))
    plan: Any = SimpleNamespace(recipe=recipe, item=lambda label: recipe.methods[0])
    nothing: Any = None
    item = draw_item(recipe.methods[0], {"mixup.alpha": 0.5, "sagm.alpha": 0.99})
    model = PlannedModel(nothing, item, recipe.training, nothing, steps=1000)
    assert flags(plan, model, Selected(step=10, state={})) == ["sagm.alpha at the edge of its range"]


def test_a_head_and_its_keys() -> None:
    deep, cosine = {"name": "sam", "head": "mlp", "mlp.hidden_width": 64}, {"name": "irm", "head": "cosine"}
    recipe = recipe_with("erm", deep, cosine)
    assert [(item.head.name, item.head.settings()) for item in recipe.methods] == [
        ("linear", {}),
        ("mlp", {"mlp.hidden_width": 64, "mlp.activation": "gelu"}),
        ("cosine", {"cosine.scale": 1 / 0.07}),
    ]
    plain, with_head, _ = (hparams(item, recipe.training) for item in recipe.methods)
    assert "head" not in plain and with_head["head"] == "mlp" and with_head["mlp.hidden_width"] == 64
    space = "search={trials: 4, space: {mlp.hidden_width: {choice: [8, 16]}}}"
    searched = recipe_with("erm", deep | {"mlp.hidden_width": 512}, overrides=(space,))
    item = searched.methods[1]
    drawn = {draw_item(item, searched.search.drawn(t)).head.kwargs()["hidden_width"] for t in (1, 2, 3)}
    assert drawn <= {8, 16} and draw_item(searched.methods[0], searched.search.drawn(1)) is searched.methods[0]


def test_what_rows_are_compared_with() -> None:
    """Plain ERM with the same head; ERM on another head with ERM on the linear one."""
    cosine = {"head": "cosine"}
    items = ["erm", "irm", {"name": "erm", "label": "erm cosine", **cosine}]
    items += [{"name": name, "label": f"{name} cosine", **cosine} for name in ("irm", "sam")]
    items += [{"name": "irm", "label": "irm mlp", "head": "mlp"}]
    expected = {"irm": "erm", "erm cosine": "erm", "irm cosine": "erm cosine", "sam cosine": "erm cosine"}
    assert references(recipe_with(*items)) == expected
