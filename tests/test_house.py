"""Rules that a machine can check over the whole package."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from xdm_ft.recipe import components

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "xdm_ft").rglob("*.py"))


def test_the_walk_finds_the_package():
    assert len(SOURCES) > 30


@pytest.mark.slow
def test_functions_are_short_as_a_rule():
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    lengths = sorted(
        (node.end_lineno or 0) - node.lineno + 1
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    )
    assert len(lengths) > 500
    assert lengths[len(lengths) // 2] <= 12, "the median"
    assert lengths[len(lengths) * 95 // 100] <= 45, "19 of 20"


def test_no_junk_drawers():
    assert not [p for p in SOURCES if p.stem in {"utils", "helpers", "common", "misc"}]


def test_one_function_prints_signs():
    """A difference that rounds to zero has no sign; a format of its own would write "+0.0"."""
    of_formats = re.compile(r"\{[^{}]*:[<>^=]?\+z?[.\ddefg{]|%\+")
    found = [(path.stem, line) for path in SOURCES for line in path.read_text().splitlines() if of_formats.search(line)]
    assert [name for name, _ in found] == ["errors"], found


def test_files_of_tests_have_names_of_their_own():
    """They are modules without a package: of two with one name, only the first would be collected."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert not [name for name, count in names.items() if count > 1]


def settings():
    """Every key of every block and component."""
    from xdm_ft.recipe import check as read

    keys = set()
    for model in (*read.BLOCKS.values(), *(common for _, common in read.COMPONENTS.values()), read.MethodCommon):
        keys |= set(model.model_fields)
    for folder in components.FOLDERS.values():
        for name in components.names(folder):
            keys |= set(components.settings_model(components.find(folder, name)).model_fields)
    return sorted(keys)


def test_something_reads_every_setting():
    """A key counts as read where its name stands outside its own declaration: as an attribute, argument or variable."""
    found = settings()
    assert len(found) > 40
    text = "\n".join(path.read_text() for path in SOURCES)
    reads = {
        name for use in (r"\.(\w+)\b(?!: )", r"\b(\w+)\b(?=\s*[,)\]])", r"\"(\w+)\"") for name in re.findall(use, text)
    }
    assert {*found} <= reads, f"nothing reads {[key for key in found if key not in reads]}"


def test_every_setting_says_what_it_means():
    for folder in components.FOLDERS.values():
        names = components.names(folder)
        assert names
        for name in names:
            for key, field in components.settings_model(components.find(folder, name)).model_fields.items():
                assert field.description, f"{folder}/{name}: {key}"


def test_names_say_what_a_thing_is():
    """`found`, `one`, `own` and `place` say nothing of it, nor do `what`, `how`, `where` and `about`."""
    bound = Counter[str]()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound[node.id] += 1
            elif isinstance(node, ast.arg):
                bound[node.arg] += 1
            elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name:
                bound[node.name] += 1
            elif isinstance(node, ast.alias) and node.asname:
                bound[node.asname] += 1
    assert bound["name"] > 100
    assert sum(bound[name] for name in ("found", "one", "own", "place")) < 60
    assert sum(bound[name] for name in ("what", "how", "where", "about")) < 90
