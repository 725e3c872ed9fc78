"""YAML with line numbers and overrides."""

import pytest

from xdm_ft.recipe.text import apply_override, copy_recipe, find_recipe, parse
from xdm_ft.runtime.errors import UserError

TEXT = """\
# a comment
name: one
training:
  steps: 10
  lr: 1e-3
methods:
  - erm
  - {name: xdomainmix,
     p_discard: 0.3}
"""


def test_values_and_lines():
    recipe = parse(TEXT, "r.yaml")
    assert recipe.values["training"]["steps"] == 10
    assert recipe.where(("training", "lr")) == "r.yaml:5"
    assert recipe.where(("methods", 1, "p_discard")) == "r.yaml:9"
    assert recipe.where(("training", "unknown")) == "r.yaml:3"
    assert recipe.where(("encoder",)) == "r.yaml"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2", 'r.yaml:2: not valid YAML: the key "a" is written twice'),
        ("a: [1, 2", "r.yaml:1: not valid YAML"),
        ("a: &x 1\nb: *x", "aliases"),
        ("a: !!python/object:os.system 1", "r.yaml:1: not valid YAML: could not determine a constructor"),
        ("- a", "a recipe is a mapping"),
        ("1: a", "the key 1 is not a text"),
        ("a: 2001-99-99", "not valid YAML: ValueError"),
        ("a: \0", "special characters are not allowed"),
        ("? [a]\n: b", "is not a text"),
        ("[" * 5000, "not valid YAML"),
    ],
)
def test_faults_are_one_line_with_the_place(text, words):
    with pytest.raises(UserError) as fault:
        parse(text, "r.yaml")
    assert words in str(fault.value)
    assert "\n" not in str(fault.value)


def test_an_empty_recipe_is_an_empty_mapping():
    assert parse("# nothing\n", "r.yaml").values == {}


def test_overrides_are_read_as_yaml():
    recipe = parse(TEXT, "r.yaml")
    apply_override(recipe, "methods=[erm,xdomainmix+sam]")
    apply_override(recipe, "encoder.kwargs={bn_eps: 0.001}")
    assert recipe.values["methods"] == ["erm", "xdomainmix+sam"]
    assert recipe.values["encoder"] == {"kwargs": {"bn_eps": 0.001}}
    assert recipe.where(("encoder", "kwargs")) == "command line"
    assert recipe.where(("training", "lr")) == "r.yaml:5"


def test_steps_and_epochs_clear_each_other():
    recipe = parse(TEXT, "r.yaml")
    apply_override(recipe, "training.epochs=2")
    assert recipe.values["training"] == {"lr": 0.001, "epochs": 2}
    apply_override(recipe, "training.steps=5")
    assert recipe.values["training"]["epochs"] == 2, "both from the command line stay, so that the check refuses them"


@pytest.mark.parametrize(
    "override", ["steps", "=3", "training..lr=3", "name.first=3", "training.lr=[1", "x=[&a 1, *a]"]
)
def test_wrong_overrides(override):
    with pytest.raises(UserError, match="command line"):
        apply_override(parse(TEXT, "r.yaml"), override)


def test_recipes_are_found_by_file_and_by_name(tmp_path, monkeypatch):
    assert find_recipe("demo").name == "demo.yaml"
    assert find_recipe("recipes/demo.yaml").name == "demo.yaml"
    own = tmp_path / "demo.yaml"
    own.write_text("name: own")
    monkeypatch.chdir(tmp_path)
    assert find_recipe("demo.yaml").read_text() == "name: own"
    with pytest.raises(UserError, match='no such recipe; did you mean "demo"'):
        find_recipe("demmo.yaml")


def test_copy_never_overwrites(tmp_path):
    target = tmp_path / "mine.yaml"
    assert copy_recipe("demo", str(target)) == target
    assert target.read_text() == find_recipe("demo").read_text()
    with pytest.raises(UserError, match="exists already"):
        copy_recipe("demo", str(target))
    assert copy_recipe("demo", str(tmp_path)) == tmp_path / "demo.yaml"
    with pytest.raises(UserError, match="can not be written"):
        copy_recipe("demo", str(tmp_path / "no" / "folder.yaml"))
