"""A method is added by one new file: recipes accept it, it is listed, searched and trained, contract tests cover it."""

import importlib
import json
import linecache
import os
import subprocess
import sys
from pathlib import Path

import miniature
import pytest

import xdm_ft
import xdm_ft.algorithms
from xdm_ft.cli.ls import listing
from xdm_ft.cli.parser import main
from xdm_ft.recipe.search import preset_ranges
from xdm_ft.runtime.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SEARCHED = '''
from typing import Annotated

import torch.nn.functional as F
from pydantic import Field

from xdm_ft.algorithms import Algorithm
from xdm_ft.core import Losses


class Smoothed(Algorithm):
    """Cross-entropy with label smoothing."""

    source = "Szegedy et al. 2016, label smoothing"
    search_ranges = {"smoothing": {"uniform": (0.2, 0.4)}}

    def __init__(self, setup, *, smoothing: Annotated[float, Field(lt=1, description="mass of other classes")] = 0.1):
        super().__init__(setup)
        self.smoothing = smoothing

    def loss(self, z, batch, step):
        per_sample = F.cross_entropy(self.logits(z), batch.y, reduction="none", label_smoothing=self.smoothing)
        return Losses(self.average(per_sample, batch), per_sample.new_zeros(()))
'''
WITH_A_PROJECTION = '''
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field

from xdm_ft.algorithms.erm import ERM
from xdm_ft.heads.linear import Linear
from xdm_ft.runtime.randomness import Stream


class Contrastive(ERM):
    """ERM + weight · the supervised contrastive loss of projected features, temperature 1."""

    source = "Khosla et al. 2020, Supervised Contrastive Learning, eq. (2)"
    loss_over = "batch"

    def __init__(self, setup, *, weight: Annotated[float, Field(ge=0, description="of the contrastive loss")] = 0.1):
        super().__init__(setup)
        self.weight = weight
        self.projection = Linear(setup.width, 8, setup.seed, Stream.DOMAIN_INIT)

    def loss(self, z, batch, step):
        of_class = super().loss(z, batch, step)
        projected = F.normalize(self.projection(z), dim=1)  # [B,8]
        itself = torch.eye(len(batch.y), dtype=torch.bool, device=z.device)
        log_share = (projected @ projected.mT).masked_fill(itself, -1e9).log_softmax(1)  # [B,B]
        same_class = ((batch.y[:, None] == batch.y) & ~itself).to(z.dtype)
        contrast = -(same_class * log_share).sum(1) / same_class.sum(1).clamp(min=1)  # [B]
        return of_class._replace(total=of_class.total + self.weight * contrast.mean())
'''
IN_THE_ENCODER = '''
from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from xdm_ft.algorithms.erm import ERM
from xdm_ft.runtime.randomness import Stream, uniform


class Jittered(ERM):
    """ERM, with every feature map after the first stage scaled by a learned gain and a draw from 1 ± width."""

    source = "made up for this test"
    frozen_reason = "it changes feature maps, and features are cached after them; set encoder.trainable: true"

    def __init__(self, setup, *, width: Annotated[float, Field(ge=0, lt=1, description="largest change")] = 0.5):
        super().__init__(setup)
        self.width = width

    def stage_modules(self, encoder):
        return {encoder.stage_names[0]: _Jitter(int(self.seed), self.width)}


class _Jitter(nn.Module):
    def __init__(self, seed, width):
        super().__init__()
        self.seed, self.width = seed, width
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x, batch, step):
        u = uniform(self.seed, step, Stream.STYLE_NOISE, batch.position)  # [B]
        return x * self.gain * (1 + self.width * (2 * u - 1))[:, None, None, None]
'''
METHODS = {"smoothed": SEARCHED, "contrastive": WITH_A_PROJECTION, "jittered": IN_THE_ENCODER}
RECIPE = """\
name: own
data: {name: pacs, root: data, counts: any}
protocol: {test_domains: [photo], seeds: 1, val_fraction: 0.4}
encoder: {name: timm, model: test_resnet, preprocessing: {size: 32}}
features: {dir: cache, workers: 0}
training: {steps: 4, batch_size: 4}
report: {page: false}
"""


def write_methods(folder: Path) -> None:
    folder.mkdir()
    for name, source in METHODS.items():
        (folder / f"{name}.py").write_text(source)


@pytest.fixture
def own_methods(tmp_path, monkeypatch):
    """The three files, as if they lay in xdm_ft/algorithms."""
    write_methods(tmp_path / "methods")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(xdm_ft.algorithms, "__path__", [*xdm_ft.algorithms.__path__, str(tmp_path / "methods")])
    preset_ranges.cache_clear()
    yield
    preset_ranges.cache_clear()
    for name in (*METHODS, "noisy"):
        if sys.modules.pop(f"xdm_ft.algorithms.{name}", None):
            delattr(xdm_ft.algorithms, name)


def trained(methods: str, *overrides: str) -> list[dict]:
    """Records of a run in which no model fails."""
    miniature.domainbed(Path("data"), "pacs", per_class=2)
    Path("own.yaml").write_text(f"{RECIPE}methods: {methods}\n")
    assert main(["run", "own.yaml", *overrides]) == 0
    records = json.loads(Path("output/own/results.json").read_text())["runs"]
    assert {record["status"] for record in records} == {"ok"}
    return records


def test_they_are_listed_and_recipes_are_checked_against_them(own_methods, capsys):
    listed = listing("methods").text()
    assert "smoothing=0.1  mass of other classes" in listing("methods", "smoothed").text()
    assert "Khosla et al. 2020" in listed
    [jittered] = [line for line in listed.splitlines() if line.startswith("jittered ")]
    assert "end to end" in jittered and "cached" not in jittered
    Path("own.yaml").write_text(f"{RECIPE}methods: [jittered, {{name: contrastive, weights: 1}}, smothed]\n")
    assert main(["validate", "own.yaml"]) == 2
    complaint = capsys.readouterr().err
    assert 'did you mean "weight"' in complaint and 'did you mean "smoothed"' in complaint


NOISY = """
import torch

from xdm_ft.algorithms.erm import ERM
from xdm_ft.runtime.randomness import Stream, normal


class Noisy(ERM):
    \"\"\"ERM on features with noise.\"\"\"

    source = "made up for this test"

    def loss(self, z, batch, step):
        return super().loss(z + NOISE, batch, step)
"""


@pytest.mark.slow
def test_an_edited_file_keeps_its_numbers_with_a_warning_and_noise_has_a_stream(own_methods, caplog):
    path = Path("methods/noisy.py")
    path.write_text(NOISY.replace("NOISE", "torch.randn_like(z)"))
    miniature.domainbed(Path("data"), "pacs", per_class=2)
    Path("own.yaml").write_text(f"{RECIPE}methods: [noisy]\n")
    with pytest.raises(
        UserError, match=r"algorithms.noisy: draws torch's random numbers.* normal\(self.seed, step, Str"
    ):
        xdm_ft.run("own.yaml", **{"protocol.seeds": 2})

    def code() -> str:
        return json.loads(Path("output/own/results.json").read_text())["environment"]["code"]["noisy"]

    def again(source: str, **overrides) -> str:
        path.write_text(source)
        sys.modules.pop("xdm_ft.algorithms.noisy")
        importlib.invalidate_caches()
        linecache.clearcache()
        caplog.clear()
        xdm_ft.run("own.yaml", **({"protocol.seeds": 2} | overrides))
        return caplog.text

    first = code()
    with pytest.raises(UserError, match="draws torch's"):
        again(NOISY.replace("NOISE", "torch.rand_like(z)"))
    assert code() != first, "written before training, so that a kill in training does not leave the other code"
    documented = " ".join(Path(ROOT / "CONTRIBUTING.md").read_text().split())
    noise = "normal(self.seed, step, Stream.OWN, batch.position[:, None] * z.shape[1] + torch.arange(z.shape[1]))"
    assert noise in documented
    assert "has changed" not in again(NOISY.replace("NOISE", noise)), "no model was trained before"
    assert "has changed" not in again(NOISY.replace("NOISE", noise) + "# a comment\n")
    edited = NOISY.replace("NOISE", f"2 * {noise}")
    assert "has changed" not in again(NOISY.replace("NOISE", noise).replace("on features with", "with"))
    assert "the code of noisy has changed since its models trained, which keep their numbers" in again(edited)
    assert "noisy: its code has changed since its models trained" in Path("output/own/results.md").read_text()
    for grown in ({"protocol.seeds": 3}, {"protocol.final_fit": True}):  # new models of another method in one row
        with pytest.raises(UserError, match=r"the code of noisy has changed .* one row must not mix two methods"):
            again(edited, **grown)
    assert "has changed" in again(edited), "the refused recipes changed nothing"
    both = ["noisy", {"name": "noisy", "label": "noisy 2"}]
    assert "the code of noisy has changed" in again(edited, methods=both)
    for file in Path("output/own/models/noisy/photo/seed0-trial0").iterdir():
        file.write_bytes(b"")  # a damaged model would be trained again
    with pytest.raises(UserError, match="one row must not mix"):
        again(edited, methods=both)


@pytest.mark.slow
def test_they_train_and_are_searched_on_cached_features(own_methods):
    records = trained("[smoothed+sam, contrastive]", "search={trials: 3, preset: frozen}")
    assert [record["method"] for record in records] == ["smoothed+sam"] * 3 + ["contrastive"] * 3
    smoothed, contrastive = ([record["hparams"] for record in part] for part in (records[:3], records[3:]))
    smoothing = [values["smoothing"] for values in smoothed]
    assert smoothing[0] == 0.1 and len({*smoothing}) == 3 and all(0.2 <= drawn < 0.4 for drawn in smoothing[1:])
    assert {values["weight"] for values in contrastive} == {0.1}, "no range, so no draw"
    assert len({values["lr"] for values in contrastive}) == 3


@pytest.mark.slow
def test_they_train_end_to_end(own_methods):
    records = trained("[erm, jittered]", "encoder.trainable=true")
    assert [record["method"] for record in records] == ["erm", "jittered"]
    erm, jittered = (record["selected"]["train_val"]["metrics"]["test"]["nll"] for record in records)
    assert jittered != erm, "the module in the encoder was at work"


@pytest.mark.soak
def test_the_contract_tests_cover_them(tmp_path):
    write_methods(tmp_path / "methods")
    plugin = f"import xdm_ft.algorithms\nxdm_ft.algorithms.__path__.append({str(tmp_path / 'methods')!r})\n"
    (tmp_path / "own_plugin.py").write_text(plugin)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    options = ["-q", "-n", "0", "-p", "own_plugin", "-p", "no:cacheprovider", "tests/algorithms/test_contract.py", "-m"]
    command = [sys.executable, "-m", "pytest", *options, "not soak and not gpu", "-k", " or ".join(METHODS)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and "passed" in result.stdout, result.stdout
