"""The texts that a user may read: plain words, and one line that can be read at once."""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "xdm_ft").rglob("*.py"))
TEXTS = list(runpy.run_path(str(ROOT / "tools" / "freeze.py"))["texts"](ROOT / "xdm_ft"))
CLUMSY = r"\bcan not\b|that of those|of its path|worth then|(?<!there )\bis no (file|name|key|column)\b"
MOST = 160  # characters of a warning or note, where values are {…}
LOGGED = re.compile(r"logger\.(?:warning|info|error)\(\s*((?:f?\"(?:[^\"\\]|\\.)*\"\s*)+)")


def test_no_text_is_clumsy():
    assert len(TEXTS) > 1000
    assert not [(where, text) for where, text in TEXTS if re.search(CLUMSY, text)]
    assert re.search(CLUMSY, "the file can not be read") and not re.search(CLUMSY, "the file cannot be read")


def test_a_warning_is_a_line():
    logged = [(path, match) for path in SOURCES for match in LOGGED.finditer(path.read_text(encoding="utf-8"))]
    assert len(logged) > 30
    for path, match in logged:
        text = "".join(re.findall(r"\"((?:[^\"\\]|\\.)*)\"", match[1]))
        assert len(re.sub(r"\{[^{}]*\}", "{…}", text)) <= MOST, f"{path}: {text}"


LIMITS = {"UserError": 300, "Problem": 300, "Field": 210, "add_argument": 210, "option": 210, "flag": 210}
"""Call → characters of a text in it at most, where values are {…}."""


def told(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """Yields (call, line, text) of errors, descriptions of settings and help; a name stands for what was assigned."""

    def text_of(node: ast.AST | None) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return "".join(
                text_of(part) or (text_of(getattr(part, "value", None)) if names(part) else "") or "{…}"
                for part in node.values
            )
        return assigned.get(node.id, "") if isinstance(node, ast.Name) else ""

    def names(part: ast.AST) -> bool:
        return isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name)

    assigned: dict[str, str] = {}
    for node in sorted((n for n in ast.walk(tree) if hasattr(n, "lineno")), key=lambda n: (n.lineno, n.col_offset)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned[node.targets[0].id] = text_of(node.value)
        if isinstance(node, ast.Call):
            call = getattr(node.func, "id", getattr(node.func, "attr", ""))
            keywords = [key.value for key in node.keywords if key.arg in ("description", "help")]
            for argument in keywords if LIMITS.get(call) == LIMITS["Field"] else node.args:
                if call in LIMITS and (text := text_of(argument)):
                    yield call, node.lineno, text


def test_errors_and_descriptions_are_short():
    calls = list[str]()
    for path in SOURCES:
        for call, line, text in told(ast.parse(path.read_text(encoding="utf-8"))):
            assert len(text) <= LIMITS[call], f"{path}:{line}: {len(text)} characters: {text}"
            calls.append(call)
    assert calls.count("UserError") > 200 and calls.count("Field") > 100 and calls.count("option") > 30


def test_a_long_description_would_be_found():
    long = "x" * 120
    source = f'text = "{long}"\noption("--a", help=f"{{text}} {long}")\nraise UserError(f"{{key}}: {long}")'
    assert [(call, len(text) > 210) for call, _, text in told(ast.parse(source))] == [
        ("option", True),
        ("UserError", False),
    ]
