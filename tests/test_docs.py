"""What the README and docs/ tell a reader to type exists, and their links lead somewhere."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from xdm_ft.algorithms import Solver
from xdm_ft.cli.parser import parser
from xdm_ft.recipe.check import load
from xdm_ft.recipe.components import find, names

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCS = sorted((ROOT / "docs").glob("*.md"))
TASKS = [page for page in DOCS if page.name not in ("README.md", "glossary.md")]
MADE = ("reference.md",)  # from the code: it is as long as what there is, and nobody reads it from end to end
READS_A_RECIPE = ("run", "validate", "doctor", "features")


def blocks(page):
    """Its code blocks, with continued lines joined."""
    found = re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [block.replace("\\\n", " ") for block in found]


def commands():
    lines = [line for page in PAGES for block in blocks(page) for line in block.splitlines()]
    return [line for line in lines if line.startswith("xdm-ft ")]


def slugs(page):
    """The anchors that GitHub gives its headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_commands_to_test():
    assert len(PAGES) >= 6 and len(commands()) >= 20


@pytest.mark.parametrize("command", commands())
def test_a_command_is_accepted(command):
    """The verb and its arguments exist; a recipe loads with its overrides, unless the line leaves some out (…)."""
    arguments = parser().parse_args(shlex.split(command.partition(" > ")[0], comments=True)[1:])
    if arguments.verb in READS_A_RECIPE and "…" not in command and arguments.recipe != "DIR":
        load(arguments.recipe, arguments.overrides)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_scripts_are_there(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in slugs(linked), target
    for script in re.findall(r"python (\S+\.py)", text):
        assert (ROOT / script).is_file(), script


def test_what_pages_import_is_there():
    imports = [re.findall(r"^from (xdm_ft[\w.]*) import (\w+)", page.read_text(), re.MULTILINE) for page in PAGES]
    assert any(imports)
    for module, name in (found for of_page in imports for found in of_page):
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_the_methods_that_are_said_to_have_one_seed_have_one():
    """Those whose head the prompts alone make, as `make_plan` plans them."""
    text = " ".join((ROOT / "docs" / "measure.md").read_text(encoding="utf-8").split())
    [named] = re.findall(r"method with one seed \(([^)]*)\)", text)
    known = {name: find("algorithms", name) for name in names("algorithms")}
    planned = {name for name, cls in known.items() if issubclass(cls, Solver) and cls.needs_text}
    assert set(re.findall(r"`(\w+)`", named)) == planned and len(known) > 10


def test_the_docs_are_short():
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in DOCS if page.name not in MADE}
    assert sum(words.values()) <= 10_000, words


def test_the_reference_is_that_of_the_code():
    command, environment = [sys.executable, "tools/reference.py"], os.environ | {"PYTHONPATH": str(ROOT)}
    page = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert page.stdout == (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), (
        "python tools/reference.py > docs/reference.md"
    )


@pytest.mark.parametrize("page", TASKS, ids=lambda page: page.name)
def test_a_page_begins_with_the_command_that_does_its_task(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    commands = [after for line, after in pairwise(lines[:9]) if line == "```"]
    assert commands and commands[0].startswith(("xdm-ft ", "torchrun ", "accelerate ", "python ")), lines[:9]


def test_the_table_of_contents_links_every_page():
    linked = re.findall(r"\]\(([\w.]+)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert {page.name for page in DOCS} - {"README.md"} <= set(linked)


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: page.name)
def test_pages_read_as_english(page):
    text = " ".join(page.read_text(encoding="utf-8").split())
    phrases = ("can not", "that of those of", "it is no ")
    assert not [phrase for phrase in phrases if phrase in text.lower()]


def test_contributing_names_files_that_there_are():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w./]+(?:\.py|/))`", text) if "NAME" not in name and name != "shared/"}
    assert len(named) > 40
    missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / "xdm_ft" / name).exists()]
    assert not missing, missing


def test_the_readme_is_one_page_with_one_test_command():
    """`.ci/run` looks for the mark, and runs the code block below it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    [block] = re.findall(r"<!-- test command.*-->\n```\n(.*?)\n```", text)
    assert block.startswith("python3 -m venv .venv && ") and block.endswith(".venv/bin/pytest")
    assert "<!-- test command" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
