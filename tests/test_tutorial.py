"""The notebook of docs/ runs from its first cell to its last, and is small."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[1] / "docs" / "tutorial.ipynb"
CELLS = json.loads(PATH.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_it_has_as_many_cells_as_the_readme_says():
    said = re.search(
        r"tutorial\.ipynb\).*? in (\d+) cells", (PATH.parents[1] / "README.md").read_text(encoding="utf-8")
    )
    assert said and 8 < len(CELLS) == int(said[1]) <= 20 and len(CODE) >= 6
    for code in CODE:
        ast.parse(code)


def test_its_outputs_are_small_and_name_no_machine():
    outputs = [output for cell in CELLS for output in cell.get("outputs", ())]
    assert len(outputs) >= 6 and PATH.stat().st_size < 200_000
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    shown = [output.get("data", {}) | {"text": output.get("text", "")} for output in outputs]
    text = json.dumps([{kind: data for kind, data in of.items() if kind != "image/png"} for of in shown])
    absolute_path, seconds = r"(?<![<\w])/\w+/\w", r"\d (s|min)\b"
    assert "<table" in text and not re.search(f"{absolute_path}|{seconds}", text)


@pytest.mark.slow
def test_it_runs_offline(tmp_path):
    shows = "display = lambda value: print(value._repr_html_() if hasattr(value, '_repr_html_') else value)\n"
    script = tmp_path / "tutorial.py"
    script.write_text(shows + "\n".join(CODE) + "\nprint('the last cell has run')\n", encoding="utf-8")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg", "PYTHONPATH": str(PATH.parents[1])}
    environment["TMPDIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "<table>" in done.stdout and "accuracy on the new site" in done.stdout
    assert done.stdout.endswith("the last cell has run\n")
