"""The CLIP that comes with the package: what it was trained on, its size, and the numbers of its model card."""

from __future__ import annotations

import ast
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
import open_clip
import printed
import pytest
import torch
import train as script
from safetensors import safe_open

from xdm_ft.encoders.open_clip import DEMO, OpenClip

WEIGHTS = DEMO / "demo_clip.safetensors"
HANDWRITING = ("sklearn", "sklearn.datasets", "xdm_ft.data.digits")


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    with safe_open(WEIGHTS, framework="pt") as file:
        return json.loads(file.metadata()["seen"])


def test_the_weights_are_small_and_those_of_the_script_as_it_is(seen: dict[str, Any]) -> None:
    assert list(DEMO.glob("*.safetensors")) == [WEIGHTS] and WEIGHTS.stat().st_size <= 3_000_000
    assert seen == script.seen(script.STEPS) and seen["images"] == "printed digits"


def test_neither_script_imports_a_data_set() -> None:
    files = [Path(module.__file__) for module in (printed, script)]
    imported = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    assert {"torch", "matplotlib", "PIL"} <= imported
    assert not {name for name in imported if name.startswith(("sklearn", "xdm_ft.data"))}


def test_training_fonts_and_held_out_fonts_share_no_digit() -> None:
    if not Path(matplotlib.get_data_path(), "fonts/ttf/cmti10.ttf").exists():
        pytest.skip("this matplotlib has no font cmti10, as the one with which the model was made")
    training, held_out = printed.Printer(printed.TRAINING_FONTS), printed.Printer(printed.HELD_OUT_FONTS)
    faces = [*(set(printed.TRAINING_FONTS)), *(set(printed.HELD_OUT_FONTS))]
    assert len(faces) == len(printed.TRAINING_FONTS) + len(printed.HELD_OUT_FONTS)
    of_digit = [printer.glyphs.flatten(2).transpose(0, 1) for printer in (training, held_out)]  # [10,F,64·64]
    assert torch.cdist(*of_digit).min() > 3, "a held-out font has the picture of a digit of a training font"
    ink = torch.cat(of_digit, dim=1).mean(2)
    assert ink.min() > 0.02 and ink.max() < 0.5, "a digit is blank, or fills its square"


def test_it_is_named_demo_and_downloads_nothing() -> None:
    encoder = OpenClip(model="demo", weights="demo")
    assert encoder.preprocessing.size == 32
    assert encoder.identity()["config"] is not None
    assert encoder.pretraining == "weights demo, pre-trained on printed digits alone, never on handwriting"
    assert encoder.exact_prompts(("three",)) == ["a photo of a three"]


@pytest.mark.slow
def test_the_card_states_the_measured_accuracies() -> None:
    accuracy = script.zero_shot_accuracy(DEMO)
    card = (DEMO / "README.md").read_text(encoding="utf-8")
    stated = {font: float(value) for font, value in re.findall(r"^\| (\w+) \| ([\d.]+) \|$", card, re.MULTILINE)}
    assert set(stated) == set(accuracy) == {font.name for font in printed.HELD_OUT_FONTS}
    for font, value in accuracy.items():
        assert stated[font] == pytest.approx(100 * value, abs=0.5)  # rounding differs between machines
        assert value > 0.75, font  # of ten digits
    assert "python tools/demo_clip/train.py" in card


@pytest.mark.soak
def test_the_script_runs_where_handwriting_can_not_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for module in HANDWRITING:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError):
        import xdm_ft.data.digits  # noqa: F401
    threads = torch.get_num_threads()
    monkeypatch.setattr("sys.argv", ["train", "--folder", str(tmp_path), "--steps", "2"])
    try:
        script.main()
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    assert {path.name for path in tmp_path.iterdir()} == {"demo_clip.json", "demo_clip.safetensors", "README.md"}
    assert (tmp_path / "demo_clip.json").read_text() == (DEMO / "demo_clip.json").read_text()
    assert "zero-shot, Aileron: " in capsys.readouterr().out


def test_a_process_that_has_not_built_it_knows_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a task of a cluster gets it. Its configuration is none of the library's own."""
    encoder = OpenClip(model="demo", weights="demo")
    before = encoder.identity()
    monkeypatch.setattr(open_clip, "get_model_config", lambda name: None)
    assert pickle.loads(pickle.dumps(encoder)).identity() == before
