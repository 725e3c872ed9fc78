"""A small run on miniature images, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import miniature
import pytest

from xdm_ft.cli.parser import main
from xdm_ft.experiment import summary

RECIPE = """\
name: small
data: {{name: pacs, root: {data}, counts: any}}
protocol: {{name: leave_one_domain_out, test_domains: [sketch, photo], seeds: 1{protocol}}}
encoder: {{name: timm, model: test_vit, preprocessing: {{size: 32}}, kwargs: {{img_size: 32}}}}
features: {{dir: {cache}, workers: 0}}
methods: [erm]
training: {{steps: 12, batch_size: 4, evaluate_every: 3}}
report: {{page: false}}
output: {{dir: {out}}}
"""


class Stopped(Exception):
    """The process ends here."""


def fill(folder: Path, stop_before_summary: bool, **protocol: str) -> Path:
    """A recipe, its data, and what a run of it leaves, which may end before the summary."""
    miniature.domainbed(folder / "data", "pacs", per_class=3)
    keys = "".join(f", {key}: {value}" for key, value in protocol.items())
    text = RECIPE.format(data=folder / "data", cache=folder / "cache", out=folder / "out", protocol=keys)
    (folder / "small.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        if stop_before_summary:

            def stop(*_: object) -> None:
                raise Stopped

            patch.setattr(summary, "summary_of", stop)
        assert main(["run", str(folder / "small.yaml")]) == (1 if stop_before_summary else 0)
    return folder


def numbers(run: Path) -> dict[str, Any]:
    results = json.loads((run / "results.json").read_text())
    for record in results["runs"]:
        record.pop("train_seconds")
        record.pop("peak_memory", None)
    return results
