"""Weight files with faults, through the command line: one line, no code run, nothing written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import miniature
import open_clip
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

from xdm_ft.cli.parser import main

RECIPE = """\
name: small
data: {{name: pacs, root: {data}, counts: any}}
protocol: {{test_domains: [sketch], seeds: 1}}
encoder: {encoder}
features: {{dir: {data}/../cache, workers: 0}}
methods: [erm]
training: {{steps: 2, batch_size: 2}}
report: {{page: false}}
output: {{dir: {data}/../out}}
"""
TINY = """\
{"embed_dim": 16,
 "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
 "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 1, "layers": 1}}
"""
State = dict[str, Tensor]


class Code:
    """Unpickled, it would leave a folder behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def truncated(path: Path, state: State) -> None:
    save_file(state, path)
    path.write_bytes(path.read_bytes()[:-100])


def header_alone(path: Path, state: State) -> None:
    save_file(state, path)
    path.write_bytes(path.read_bytes()[:40])


def wrong_shapes(path: Path, state: State) -> None:
    save_file({name: value.new_zeros([n + 1 for n in value.shape]) for name, value in state.items()}, path)


def nan_inside(path: Path, state: State) -> None:
    name = next(name for name, value in state.items() if value.is_floating_point() and value.dim() > 1)
    save_file({**state, name: torch.where(torch.arange(state[name].shape[-1]) == 0, torch.nan, state[name])}, path)


def code(path: Path, state: State) -> None:
    torch.save({**state, "code": Code(path.parent / "exploded")}, path)


def old_code(path: Path, state: State) -> None:
    torch.save({**state, "code": Code(path.parent / "exploded")}, path, _use_new_zipfile_serialization=False)


def empty_tensors(path: Path, state: State) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"{number:08}": entry for number in range(400_000)}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def brackets_as_header(path: Path, state: State) -> None:
    path.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)


def text(path: Path, state: State) -> None:
    path.write_text("<html>404</html>")


def folder(path: Path, state: State) -> None:
    path.mkdir()


def missing(path: Path, state: State) -> None:
    pass


def dangling(path: Path, state: State) -> None:
    path.symlink_to(path.name)


FAULTS: list[tuple[Callable[[Path, State], None], str, str]] = [
    (truncated, "safetensors", "is damaged"),
    (header_alone, "safetensors", "is damaged"),
    (wrong_shapes, "safetensors", "does not fit"),
    (nan_inside, "safetensors", "NaN"),
    (code, "pth", "holds pickled code"),
    (old_code, "pt", "holds pickled code"),
    (text, "pth", "is damaged"),
    (text, "safetensors", "is damaged"),
    (brackets_as_header, "safetensors", "is damaged"),
    (empty_tensors, "safetensors", "holds more than 100,000 tensors"),
    (folder, "safetensors", "is a folder"),
    (missing, "pth", "does not exist"),
    (dangling, "pth", "does not exist"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    miniature.domainbed(tmp_path_factory.mktemp("weights") / "data", "pacs", per_class=2)
    return next(tmp_path_factory.getbasetemp().glob("weights*/data"))


def encoder_of(library: str, folder: Path) -> tuple[str, State]:
    """The recipe's block but for its weights, and a good state dict."""
    torch.manual_seed(0)
    if library == "timm":
        model = timm.create_model("test_vit", num_classes=0, img_size=32)
        return "name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}", model.state_dict()
    (folder / "tiny_of_tests.json").write_text(TINY)
    open_clip.add_model_config(folder / "tiny_of_tests.json")
    state = open_clip.create_model("tiny_of_tests").state_dict()
    return f"name: open_clip, model: {folder / 'tiny_of_tests.json'}", state


@pytest.mark.slow
@pytest.mark.parametrize("library", ["timm", "open_clip"])
@pytest.mark.parametrize(("fault", "suffix", "wording"), FAULTS, ids=[f"{f.__name__}-{s}" for f, s, _ in FAULTS])
def test_each_fault(
    library: str,
    fault: Callable[[Path, State], None],
    suffix: str,
    wording: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys, state = encoder_of(library, tmp_path)
    path = tmp_path / f"bad weights.{suffix}"
    fault(path, {name: value.contiguous() for name, value in state.items()})
    (tmp_path / "small.yaml").write_text(RECIPE.format(data=data, encoder=f"{{{keys}, weights: '{path}'}}"))
    capsys.readouterr()
    assert main(["run", str(tmp_path / "small.yaml")]) == 2
    told = capsys.readouterr().err
    [line] = [line for line in told.splitlines() if line.startswith("xdm-ft: ")]
    assert str(path) in line and wording in line and "Traceback" not in told
    assert not (tmp_path / "exploded").exists() and not (data.parent / "out").exists()


def test_a_config_of_nested_brackets(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "deep.json"
    config.write_text("[" * 100_000)
    encoder = f"{{name: open_clip, model: {config}, weights: {tmp_path / 'w.safetensors'}}}"
    (tmp_path / "small.yaml").write_text(RECIPE.format(data=data, encoder=encoder))
    assert main(["run", str(tmp_path / "small.yaml")]) == 2
    told = capsys.readouterr().err
    assert f"encoder.model: {config} is not valid JSON" in told and "Traceback" not in told


def test_infinite_features_are_refused(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, state = encoder_of("timm", tmp_path)
    name = next(name for name in state if name.endswith("norm.weight"))
    save_file({**state, name: torch.full_like(state[name], torch.inf)}, tmp_path / "inf.safetensors")
    encoder = f"{{{keys}, weights: {tmp_path / 'inf.safetensors'}}}"
    (tmp_path / "small.yaml").write_text(RECIPE.format(data=data, encoder=encoder))
    assert main(["run", str(tmp_path / "small.yaml")]) == 2
    assert "features that are not finite; check encoder.weights" in capsys.readouterr().err
