"""Adding a method is one new file: it is listed, recipes accept it, and the contract tests cover it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
METHOD = '''
"""A method of one's own."""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field

from xdm_ft.algorithms import Algorithm, Setup, linear
from xdm_ft.tensors import Losses


class Smoothed(Algorithm):
    """Cross-entropy with label smoothing."""

    source = "Szegedy et al. 2016, label smoothing"

    def __init__(
        self, setup: Setup, *, smoothing: Annotated[float, Field(ge=0, lt=1, description="mass of other classes")] = 0.1
    ) -> None:
        super().__init__(setup)
        self.smoothing = smoothing

    def loss(self, z, batch, step):
        per_sample = F.cross_entropy(
            linear(z, self.head), batch.y, reduction="none", label_smoothing=self.smoothing
        )
        return Losses(self.average(per_sample, batch), torch.zeros_like(per_sample).sum())
'''
PLUGIN = """
import xdm_ft.algorithms
xdm_ft.algorithms.__path__.append({folder!r})  # as if the file lay in xdm_ft/algorithms
"""
RECIPE = """\
name: own
data: {name: digits}
protocol: {test_domains: [ink], seeds: 1}
encoder: {name: timm, model: test_resnet, preprocessing: {size: 32}}
methods: [{name: smoothed+sam, smoothing: 0.2}]
training: {steps: 4, batch_size: 8}
"""


@pytest.mark.slow
def test_one_file_is_all_it_takes(tmp_path):
    folder = tmp_path / "methods"
    folder.mkdir()
    (folder / "smoothed.py").write_text(METHOD)
    (tmp_path / "own_plugin.py").write_text(PLUGIN.format(folder=str(folder)))
    recipe = tmp_path / "own.yaml"
    recipe.write_text(RECIPE + f"features: {{dir: '{tmp_path / 'cache'}'}}\noutput: {{dir: '{tmp_path}'}}\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def python(*arguments):
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    verb = "import own_plugin, sys; from xdm_ft.cli import main; sys.exit(main(sys.argv[1:]))"
    listed = python("-c", verb, "ls", "methods").stdout
    assert "smoothed" in listed and "smoothing=0.1 (mass of other classes)" in listed
    ran = python("-c", verb, "run", recipe)
    assert ran.returncode == 0 and "smoothed+sam" in ran.stdout, ran.stderr
    contract = python("-m", "pytest", "-p", "own_plugin", "-q", "-k", "smoothed", "tests/algorithms/test_contract.py")
    assert contract.returncode == 0 and "passed" in contract.stdout, contract.stdout
