"""The notebook of docs/ runs from its first cell to its last, and is small."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[1] / "docs" / "tutorial.ipynb"
CELLS = json.loads(PATH.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_it_has_at_most_20_cells_which_are_python_without_outputs():
    assert 8 < len(CELLS) <= 20 and len(CODE) >= 6
    assert not [cell for cell in CELLS if cell.get("outputs") or cell.get("execution_count")]
    for code in CODE:
        ast.parse(code)


@pytest.mark.slow
def test_it_runs_offline(tmp_path):
    shows = "display = lambda value: print(value._repr_html_() if hasattr(value, '_repr_html_') else value)\n"
    script = tmp_path / "tutorial.py"
    script.write_text(shows + "\n".join(CODE) + "\nprint('the last cell has run')\n", encoding="utf-8")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg", "PYTHONPATH": str(PATH.parents[1])}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "<table>" in done.stdout and done.stdout.endswith("the last cell has run\n")
