"""`METHOD.KEY=VALUE`, lists of one, and the place that faults of overrides are reported at."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

import xdm_ft
from xdm_ft.recipe.check import check, load
from xdm_ft.recipe.settings import Recipe
from xdm_ft.recipe.text import apply_override, parse, recipe_of
from xdm_ft.runtime.errors import UserError

RECIPE = """\
name: habits
data: {name: digits}
encoder: {name: timm, model: resnet10t}
training: {steps: 1000}
"""
ITEMS = [
    "erm",
    "xdomainmix",
    "xdomainmix+sam",
    {"name": "xdomainmix+sam", "label": "wide 0.5"},
    {"name": "mixup+sagm", "label": "mixed"},
]


def recipe_with(*overrides: str, items: Any = ITEMS, text: str = RECIPE) -> Recipe:
    written = parse(text + yaml.safe_dump({"methods": items}), "r.yaml")
    for override in overrides:
        apply_override(written, override)
    return check(written)


def faults(*overrides: str, items: Any = ITEMS, text: str = RECIPE) -> list[str]:
    with pytest.raises(UserError) as fault:
        recipe_with(*overrides, items=items, text=text)
    return list(fault.value.args)


def settings(recipe: Recipe, key: str) -> list[Any]:
    return [getattr(item.block, key, None) for item in recipe.methods]


def test_a_method_is_named_by_component_by_its_written_name_or_by_its_label() -> None:
    assert settings(recipe_with("xdomainmix.warmup_steps=300"), "warmup_steps") == [None, 300, 300, 300, None]
    for key in ("rho", "sam.rho"):
        assert settings(recipe_with(f"xdomainmix+sam.{key}=0.1"), "sam.rho") == [None, None, 0.1, 0.1, None]
        assert settings(recipe_with(f"wide 0.5.{key}=0.2"), "sam.rho") == [None, None, 0.05, 0.2, None]
    assert settings(recipe_with("erm.head=mlp", "erm.mlp.hidden_width=8"), "mlp.hidden_width")[0] == 8
    assert settings(recipe_with("mixed.sagm.alpha=0.002"), "sagm.alpha")[4] == 0.002
    assert settings(recipe_with("mixed.mixup.alpha=0.3"), "alpha")[4] == 0.3


@pytest.mark.parametrize("reverse", [False, True])
def test_the_narrower_name_wins_in_any_order(reverse: bool) -> None:
    overrides = ["sam.rho=0.1", "xdomainmix+sam.rho=0.2", "wide 0.5.rho=0.3"]
    recipe = recipe_with(*(overrides[::-1] if reverse else overrides))
    assert settings(recipe, "sam.rho") == [None, None, 0.2, 0.3, None]


def test_python_has_the_same_overrides() -> None:
    items = {"methods": ITEMS}
    by_text = recipe_with("xdomainmix.warmup_steps=300", "xdomainmix+sam.rho=0.1").as_yaml()
    plain = yaml.safe_load(RECIPE) | items
    for overrides in (
        {"xdomainmix.warmup_steps": 300, "xdomainmix+sam.rho": 0.1},
        {"xdomainmix": {"warmup_steps": 300}, "xdomainmix+sam": {"rho": 0.1}},
    ):
        assert check(recipe_of(plain, overrides)).as_yaml() == by_text
    with pytest.raises(UserError, match=r"^overrides: irm.penalty_weight: no item of methods uses irm; add it"):
        xdm_ft.run("demo", **{"irm.penalty_weight": 3})


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("irm.x=3", "irm.x: no item of methods uses irm; add it to one, or leave this out"),
        ("irm+sam.rho=3", "irm+sam.rho: no item of methods uses irm+sam; add it to one, or leave this out"),
        ("xdomainmx.warmup_steps=3", 'xdomainmx: unknown key; did you mean "xdomainmix"?'),
        ("xdomainmix+smag.rho=3", 'xdomainmix+smag: unknown key; did you mean "xdomainmix+sam"?'),
        ("smag.alpha=3", 'smag: unknown key; did you mean "sagm"?'),
        ("seeds=5", 'seeds: unknown key; did you mean "protocol.seeds"?'),
        ("seed=5", 'seed: unknown key; did you mean "protocol.seeds"?'),
        ("lr=0.01", 'lr: unknown key; did you mean "training.lr"?'),
        ("steps=3", 'steps: unknown key; did you mean "training.steps"?'),
        ("model=x", 'model: unknown key; did you mean "encoder.model"?'),
        ("dir=x", 'dir: unknown key; did you mean "features.dir" or "output.dir"?'),
        ("p_discard=0", 'p_discard: unknown key; did you mean "xdomainmix.p_discard"?'),
        ("methds=erm", 'methds: unknown key; did you mean "methods"?'),
        (
            "qqqq.x=1",
            "qqqq: unknown key; known: name, data, encoder, encoders, protocol, features, methods, training, search, "
            "report, output, cluster, analyse",
        ),
        ("trainin.steps=3", 'trainin: unknown key; did you mean "training"?'),
        ("xdomainmix+sam=3", "xdomainmix+sam: is a method, not a value; write xdomainmix+sam.KEY=VALUE"),
        ("mixed.alpha=0.3", "mixed.alpha: is a key of mixup and sagm; write mixed.mixup.alpha or mixed.sagm.alpha"),
        ("wide 0.5.sam.rhoo=1", 'wide 0.5.sam.rhoo: unknown key; did you mean "sam.rho"?'),
    ],
)
def test_what_names_no_setting_is_refused_and_blamed_on_the_command_line(override: str, expected: str) -> None:
    assert faults(override) == [f"command line: {expected}"]


def test_blocks_win_over_labels_and_other_clashes_are_refused() -> None:
    block = recipe_with("training.lr=0.5", items=[{"name": "erm", "label": "training"}])
    assert block.training.lr == 0.5
    clash = faults("sam.rho=0.1", items=["sam", {"name": "erm+sagm", "label": "sam"}])
    assert "command line: sam.rho: sam is the label of methods.1, and another item uses it" in clash[0]
    dotted = faults("erm.sam.rho=0.1", items=["erm", {"name": "xdomainmix+sam", "label": "erm.sam"}])
    assert dotted == ["command line: erm.sam.rho: may mean erm or erm.sam; choose a label without a dot"]


def test_a_scalar_stands_for_a_list_of_one() -> None:
    assert recipe_with("protocol.test_domains=ink").protocol.test_domains == ("ink",)
    assert [item.label for item in recipe_with("methods=erm").methods] == ["erm"]
    assert [item.label for item in recipe_with(items="xdomainmix+sam").methods] == ["xdomainmix+sam"]
    assert settings(recipe_with("methods=xdomainmix", "xdomainmix.warmup_steps=7"), "warmup_steps") == [7]
    assert recipe_with("protocol.seeds=2").protocol.seeds == (0, 1)
    one = recipe_with("search.trials=2", "search.space.lr.choice=0.1")
    assert one.search.space["lr"].choice == (0.1,)
    assert settings(recipe_with("methods=linear_probe", "linear_probe.strengths=0.1"), "strengths") == [(0.1,)]
    assert recipe_with("protocol.test_domains=null").protocol.test_domains is None
    [fault] = faults("protocol.test_domains=[]")
    assert fault.startswith("command line: protocol.test_domains: ")
    by_python = check(recipe_of("demo", {"protocol.test_domains": "ink", "methods": "erm"}))
    assert by_python.protocol.test_domains == ("ink",) and len(by_python.methods) == 1


@pytest.mark.parametrize("written", ["erm,xdomainmix", "erm, xdomainmix", "[erm, xdomainmix]", "erm,xdomainmix,"])
def test_methods_without_brackets_are_a_list(written: str) -> None:
    one = recipe_with(f"methods={written}", "xdomainmix.p_discard=0.5")
    assert [item.label for item in one.methods] == ["erm", "xdomainmix"]
    assert settings(one, "p_discard") == [None, 0.5]
    [fault] = faults("methods=erm,xdomainmx")
    assert fault.startswith('command line: methods.1.name: no "xdomainmx" in algorithms; did you mean "xdomainmix"?')
    [fault] = faults("methods=','")
    assert fault.startswith("command line: methods: must be a list of at least one method")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("erm+sma", "sam"), ("xdomainmix+smag", "sagm"), ("erm+sam+swda", "swad"), ("smag", "sagm"), ("swda", "swad")],
)
def test_the_nearest_add_on_is_named(name: str, nearest: str) -> None:
    [fault] = faults(f"methods=[{name}]")
    assert fault.startswith("command line: methods.0.name: no ") and fault.endswith(f'; did you mean "{nearest}"?')
    [in_file] = faults(items=[name])
    assert in_file.startswith("r.yaml:") and in_file.endswith(f'; did you mean "{nearest}"?')


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.steps=abc"], "training.steps: input should be a valid integer"),
        (["xdomainmix+sam.rho=oops"], "xdomainmix+sam.rho: input should be a valid number"),
        (["sam.rho=oops"], "sam.rho: input should be a valid number"),
        (["xdomainmix.p_discard=2"], "xdomainmix.p_discard: input should be less than or equal to 1"),
        (
            ["methods=[xdomainmix]", "xdomainmix.head_init=zero_shot"],
            "xdomainmix.head_init: xdomainmix with head_init: zero_shot needs an encoder with a text side",
        ),
        (["mixed.mixup.alpha=-1"], "mixed.mixup.alpha: input should be greater"),
        (["protocol.seeds=oops"], "protocol.seeds: must be a number of seeds, a list of them, or auto, given 'oops'"),
        (["methods=[erm, {name: irm, penalty: 1}]"], "methods.1.penalty: unknown key"),
        (["training={steps: 5, epochs: 3, sampler: pooled}"], "training.epochs: both steps and epochs"),
        (["encoder.name=open_clip", "encoder.weights=a"], "encoder.model: is needed"),
        (["data.name=folder"], "data.root: is needed"),
        (["xdomainmix.warmup_steps=7", "training.steps=5"], "methods.1: xdomainmix: warmup_steps 7 leaves no step"),
        (["training.schedule.warmup_steps=2000"], "training.schedule.warmup_steps: 2000 is not below"),
        (["protocol.name=official", "protocol.test_domains=ink"], "protocol.test_domains: is only for"),
        (["encoder.trainable=true", "training.sampler=pooled", "methods=fish"], "methods.0: fish: "),
        (["features.views=3"], "data.train_augmentation: none, the default of this data set"),
    ],
)
def test_faults_that_overrides_bring_are_blamed_on_the_command_line(overrides: list[str], expected: str) -> None:
    text = RECIPE.replace(", model: resnet10t", "" if "encoder.name=open_clip" in overrides else ", model: resnet10t")
    found = faults(*overrides, text=text)
    assert any(fault.startswith(f"command line: {expected}") for fault in found), found
    assert not any(fault.startswith("r.yaml") for fault in found), found


def test_the_last_of_two_overrides_of_a_key_is_named() -> None:
    [fault] = faults("sam.rho=0.1", "xdomainmix+sam.rho=oops", items=["xdomainmix+sam"])
    assert fault.startswith("command line: xdomainmix+sam.rho: ")
    by_python = RECIPE + yaml.safe_dump({"methods": ["erm+sam"]})
    with pytest.raises(UserError, match=r"^overrides: sam\.rho: "):
        check(recipe_of(yaml.safe_load(by_python), {"sam.rho": "oops"}))


def test_an_override_of_another_block_is_blamed_for_an_item_of_the_file() -> None:
    [fault] = faults("training.steps=5", items=[{"name": "xdomainmix", "warmup_steps": 7}])
    assert fault.startswith("command line: methods.0: xdomainmix: warmup_steps 7 leaves no step")


def test_faults_of_the_file_keep_their_line() -> None:
    broken = RECIPE.replace("steps: 1000", "steps: 1000, lr: fast")
    [fault] = faults("training.weight_decay=0.1", "xdomainmix.warmup_steps=3", text=broken)
    assert fault.startswith("r.yaml:4: training.lr: ")
    [early] = faults("xdomainmix.p_discard=0.3", "sam.rho=0.1", text=RECIPE.replace("steps: 1000", "epochs: 1"))
    assert early.startswith("r.yaml:4: training.epochs: an epoch needs sampler: pooled")


def test_the_packaged_recipe_of_the_documentation() -> None:
    recipe = load("demo", ["xdomainmix.warmup_steps=50", "xdomainmix+sam.rho=0.1", "protocol.test_domains=blurred"])
    assert [v for v in settings(recipe, "warmup_steps") if v is not None] == [50, 50]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["erm.trainable={blocks: 2}"], {"blocks": 2}),
        (["erm.trainable.blocks=2"], {"blocks": 2}),
        (
            ["erm.trainable={lora: {rank: 2, blocks: 1}}", "erm.trainable.lora.rank=4"],
            {"lora": {"rank": 4, "blocks": 1}},
        ),
        (["part.trainable.lora.rank=3"], {"lora": {"rank": 3, "blocks": 2}}),  # merged into the item's block
        (["part.trainable={lora: {rank: 3}}"], {"lora": {"rank": 3}}),  # replaces it
        (["part.trainable=true"], True),
    ],
)
def test_trainable_of_a_method_is_a_value_or_a_block_of_keys(overrides: list[str], expected: Any) -> None:
    items = ["erm", {"name": "lisa", "label": "part", "trainable": {"lora": {"rank": 8, "blocks": 2}}}]
    found = recipe_with(*overrides, items=items).methods[overrides[0].startswith("part")].block.trainable
    plain = found if isinstance(found, bool) else found.model_dump(exclude_defaults=True)
    assert plain == expected


def test_a_fault_inside_trainable_has_the_key_that_was_written() -> None:
    for override in ("erm.trainable.blocks=0", "erm.trainable={blocks: 0}"):
        [fault] = faults(override)
        assert fault == ("command line: erm.trainable.blocks: input should be greater than or equal to 1, given 0")
