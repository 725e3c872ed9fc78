"""The CLIP that comes with the package: its training images, its size, and the numbers of its model card."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from xdm_ft.data.digits import Digits
from xdm_ft.encoders._clip_source import DEMO
from xdm_ft.encoders.demo import train as script
from xdm_ft.encoders.open_clip import OpenClip

WEIGHTS = DEMO / "demo_clip.safetensors"


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits()


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    with safe_open(WEIGHTS, framework="pt") as file:
        return json.loads(file.metadata()["seen"])


def test_size() -> None:
    weights = list(DEMO.glob("*.safetensors"))
    assert weights == [WEIGHTS]
    assert WEIGHTS.stat().st_size <= 3_000_000


def test_it_was_trained_on_the_training_parts_of_the_source_styles_only(digits: Digits, seen: dict[str, Any]) -> None:
    held_out = digits.domain_names.index(seen["held_out_style"])
    allowed = [row for row in range(len(digits)) if digits.domains[row] != held_out and digits.splits[row] == "train"]
    digest = hashlib.sha256(np.array(allowed, dtype="<i8").tobytes())
    for row in allowed:
        digest.update(digits.content(row))
    assert seen["training_images_sha256"] == digest.hexdigest()
    assert seen["training_images"] == len(allowed)
    assert len(allowed) < 0.61 * len(digits)


def test_no_scan_of_the_held_out_style_or_of_validation_is_a_training_row(digits: Digits) -> None:
    rows = script.training_rows(digits)
    assert {digits.domain_names[style] for style in digits.domains[rows]} == {"ink", "chalk", "texture"}
    assert set(digits.splits[rows]) == {"train"}
    assert len(set(rows.tolist())) == len(rows)


def test_it_is_named_demo_and_downloads_nothing(digits: Digits) -> None:
    encoder = OpenClip(model="demo", weights="demo")
    assert encoder.preprocessing.size == 32
    assert encoder.identity()["config"] is not None
    assert "styles chalk, ink, texture; blurred never seen" in encoder.pretraining
    assert encoder.exact_prompts(("three",)) == ["a photo of a three"]


def test_the_card_states_the_measured_accuracies(digits: Digits, seen: dict[str, Any]) -> None:
    accuracy = script.zero_shot_accuracy(digits, DEMO)
    card = (DEMO / "README.md").read_text(encoding="utf-8")
    rows = {
        row[0]: row[1:]
        for row in re.findall(r"^\| (\w+) \| [\w ]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", card, re.M)
    }
    assert set(rows) == set(digits.domain_names)
    for style, parts in accuracy.items():
        for stated, measured in zip(rows[style], parts.values(), strict=True):
            assert float(stated) == pytest.approx(100 * measured, abs=0.5)  # rounding differs between machines
    assert 0.5 <= accuracy[seen["held_out_style"]]["all"] <= 0.8
    assert all(parts["val"] > 0.9 for style, parts in accuracy.items() if style != seen["held_out_style"])
    assert "python -m xdm_ft.encoders.demo.train" in card and seen["held_out_style"] in card


def test_the_loss_counts_every_true_caption_as_a_positive() -> None:
    generator = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(5, 4, generator=generator) for _ in range(2))
    positive = torch.eye(5, dtype=torch.bool)
    positive[0, 3] = positive[3, 0] = True
    expected = 0.0
    for a, b, true in ((images, texts, positive), (texts, images, positive.T)):
        for i in range(5):
            log_p = (2.0 * a[i] @ b.T).log_softmax(0)
            expected -= float(log_p[true[i]].mean()) / 10
    found = script.contrastive_loss(images, texts, torch.tensor(2.0), positive)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_captions_are_true_of_their_images_and_never_name_the_held_out_style(digits: Digits) -> None:
    captions = script.captions(digits)
    assert "a photo of a three" in captions.texts
    true = captions.true_of(torch.tensor([3]), torch.tensor([digits.domain_names.index("chalk")]))[0]
    chosen = [text for text, is_true in zip(captions.texts, true.tolist(), strict=True) if is_true]
    assert "a three in chalk on a coloured board" in chosen
    assert all("three" in text and "ink" not in text for text in chosen)
    assert not any(script.STYLE_WORDS[script.HELD_OUT] in text for text in captions.texts)


def test_augmentation_keeps_range_and_repeats_with_its_generator(digits: Digits) -> None:
    images = torch.from_numpy(digits.pixels[:8].copy()).permute(0, 3, 1, 2).float() / 255
    once, again = (script.augment(images, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(once, again)
    assert once.min() >= 0 and once.max() <= 1
    assert 0 < (once - images).abs().mean() < 0.4


def test_the_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr("sys.argv", ["train", "--folder", str(tmp_path), "--steps", "2"])
    try:
        script.main()
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    assert {path.name for path in tmp_path.iterdir()} == {"demo_clip.json", "demo_clip.safetensors", "README.md"}
    assert (tmp_path / "demo_clip.json").read_text() == (DEMO / "demo_clip.json").read_text()
    printed = capsys.readouterr().out
    assert "1078 training images of 1797; held out: blurred" in printed
    assert "zero-shot, blurred: " in printed
