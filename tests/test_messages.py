"""The texts that a user may read: plain words, and one line that can be read at once."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXTS = list(runpy.run_path(str(ROOT / "tools" / "freeze.py"))["texts"](ROOT / "xdm_ft"))
CLUMSY = r"\bcan not\b|that of those|of its path|worth then|(?<!there )\bis no (file|name|key|column)\b"
MOST = 160  # characters of a warning or note, where values are {…}
LOGGED = re.compile(r"logger\.(?:warning|info|error)\(\s*((?:f?\"(?:[^\"\\]|\\.)*\"\s*)+)")


def test_no_text_is_clumsy():
    assert len(TEXTS) > 1000
    assert not [(where, text) for where, text in TEXTS if re.search(CLUMSY, text)]


def test_a_clumsy_text_would_be_found():
    assert re.search(CLUMSY, "the file can not be read") and not re.search(CLUMSY, "the file cannot be read")


@pytest.mark.parametrize("room", sorted({path.parent for path in (ROOT / "xdm_ft").rglob("*.py")}), ids=str)
def test_a_warning_is_a_line(room):
    for path in room.glob("*.py"):
        for match in LOGGED.finditer(path.read_text(encoding="utf-8")):
            text = "".join(re.findall(r"\"((?:[^\"\\]|\\.)*)\"", match[1]))
            assert len(re.sub(r"\{[^{}]*\}", "{…}", text)) <= MOST, f"{path}: {text}"


def test_some_warnings_are_looked_at():
    assert sum(len(LOGGED.findall(path.read_text(encoding="utf-8"))) for path in (ROOT / "xdm_ft").rglob("*.py")) > 30
