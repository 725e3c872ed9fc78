"""WiSE-FT in a whole run: one end of its curve is zero-shot, the other ERM from the class embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import open_clip
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from xdm_ft.recipe.check import check
from xdm_ft.recipe.text import parse

TINY = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
RECIPE = """\
name: wise
data: {{name: digits}}
protocol: {{name: leave_one_domain_out, test_domains: [ink], seeds: 2}}
encoder: {{name: open_clip, model: {folder}/wise_clip.json, weights: {folder}/wise_clip.safetensors, normalize: true}}
features: {{dir: {folder}/features}}
methods:
  - zero_shot
  - {{name: erm, head_init: zero_shot}}
  - wise_ft
  - {{name: wise_ft, alpha: 0.5, label: half}}
training: {{batch_size: 16, steps: 30, lr: 5.0, encoder_lr: 1.0e-3}}
report: {{page: false}}
output: {{dir: {folder}/output}}
"""


def results(folder: Path, *changes: tuple[str, str]) -> dict[str, Any]:
    from xdm_ft.experiment import run

    (folder / "wise_clip.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(folder / "wise_clip.json")
    torch.manual_seed(0)
    model = open_clip.create_model("wise_clip")
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()}, folder / "wise_clip.safetensors"
    )
    text = RECIPE.format(folder=folder)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    assert not run(check(parse(text, "wise.yaml"))).failed
    found: dict[str, Any] = json.loads((folder / "output" / "wise" / "results.json").read_text())
    schema = json.loads((Path(__file__).parents[2] / "xdm_ft/report/results.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(found)
    return found


def selected(found: dict[str, Any], method: str, seed: int = 0) -> dict[str, Any]:
    [run] = [run for run in found["runs"] if run["method"] == method and run["seed"] == seed]
    assert run["status"] == "ok"
    picked: dict[str, Any] = run["selected"]["train_val"]
    return picked


def accuracies(picked: dict[str, Any]) -> dict[str, float]:
    """As α is chosen: on `train_val` the mean over the domains."""
    pooled = {split: score["accuracy"] for split, score in picked["metrics"].items()}
    return pooled | {"train_val": picked["value"]}


def check_curve(found: dict[str, Any], seed: int) -> dict[str, Any]:
    wise, half = selected(found, "wise_ft", seed), selected(found, "half", seed)
    assert [point["alpha"] for point in wise["curve"]] == [i / 10 for i in range(11)]
    assert wise["curve"] == half["curve"] and half["alpha"] == 0.5
    best = max(wise["curve"], key=lambda point: point["train_val"])
    assert wise["alpha"] == best["alpha"] and wise["value"] == best["train_val"]
    domains = wise["metrics"]["train_val"]["per_domain"].values()
    assert wise["value"] == pytest.approx(sum(domain["accuracy"] for domain in domains) / len(domains))
    for picked in (wise, half):
        [point] = [point for point in picked["curve"] if point["alpha"] == picked["alpha"]]
        assert {split: value for split, value in point.items() if split != "alpha"} == accuracies(picked)
    assert wise["curve"][0] == {"alpha": 0.0} | accuracies(selected(found, "zero_shot"))
    return wise


@pytest.mark.slow
def test_on_cached_features(tmp_path: Path) -> None:
    found = results(tmp_path)
    for seed in (0, 1):
        wise, erm = check_curve(found, seed), selected(found, "erm", seed)
        assert wise["curve"][10] == {"alpha": 1.0} | accuracies(erm)
        assert len({point["train_val"] for point in wise["curve"]}) > 2  # a curve, no point
    folder = tmp_path / "output" / "wise"
    zero, one, half = (
        load_file(folder / selected(found, method, 0)["weights"]) for method in ("zero_shot", "erm", "half")
    )
    for name in ("head.weight", "head.bias"):
        torch.testing.assert_close(half[name], (zero[name] + one[name]) / 2)


@pytest.mark.slow
def test_a_cosine_head_starts_where_zero_shot_is(tmp_path: Path) -> None:
    """Without a normalising encoder; rows with that head are compared with ERM on it."""
    found = results(
        tmp_path,
        (", normalize: true", ""),
        ("{name: erm, head_init: zero_shot}", "{name: erm, head: cosine}"),
        ("  - wise_ft\n", "  - {name: wise_ft, head: cosine}\n"),
        ("{name: wise_ft, alpha: 0.5, label: half}", "{name: wise_ft, alpha: 0.5, label: half, head: cosine}"),
        ("lr: 5.0", "lr: 0.05"),
    )
    for seed in (0, 1):
        assert len({point["train_val"] for point in check_curve(found, seed)["curve"]}) > 2
    weights = load_file(tmp_path / "output" / "wise" / selected(found, "half")["weights"])
    assert weights.keys() >= {"head.weight", "head.log_scale"}
    compared = {row["method"]: row["versus_erm"] for row in found["summary"]}
    assert compared["erm"] is None and compared["zero_shot"] is None and compared["wise_ft"]["difference"] is not None
    (run,) = [run for run in found["runs"] if run["method"] == "wise_ft" and run["seed"] == 0]
    assert run["hparams"]["head"] == "cosine" and run["hparams"]["cosine.scale"] == 1 / 0.07


@pytest.mark.slow
def test_the_shipped_model_has_the_median_alpha(tmp_path: Path) -> None:
    only_wise = (
        ("  - zero_shot\n  - {name: erm, head_init: zero_shot}\n", ""),
        ("  - {name: wise_ft, alpha: 0.5, label: half}\n", ""),
    )
    found = results(tmp_path, *only_wise, ("seeds: 2}", "seeds: 3, final_fit: true}"))
    final, picked = found["final_fit"], [selected(found, "wise_ft", seed) for seed in range(3)]
    assert final["alpha"] == sorted(one["alpha"] for one in picked)[1]
    assert final["step"] == sorted(one["step"] for one in picked)[1]
    assert f"alpha = {final['alpha']}, the median" in final["how"]
    weights = load_file(tmp_path / "output" / "wise" / final["weights"])
    assert weights["head.weight"].isfinite().all()


@pytest.mark.slow
def test_a_method_with_normalize_is_as_with_a_normalising_encoder(tmp_path: Path) -> None:
    (tmp_path / "encoder").mkdir()
    (tmp_path / "method").mkdir()
    by_encoder = results(tmp_path / "encoder", ("  - wise_ft\n", ""))
    by_method = results(
        tmp_path / "method",
        (", normalize: true}", "}"),
        ("head_init: zero_shot}", "head_init: zero_shot, normalize: true}\n  - {name: erm, label: as it comes}"),
        ("  - wise_ft\n", ""),
        ("alpha: 0.5", "alpha: 0.5, normalize: true"),
    )
    for method in ("zero_shot", "erm", "half"):
        picked = [selected(found, method) for found in (by_encoder, by_method)]
        assert accuracies(picked[0]) == pytest.approx(accuracies(picked[1]), abs=0.01), method
    weights = tmp_path / "method" / "output" / "wise"
    for method, normalized in (("erm", "true"), ("half", "true"), ("zero_shot", "true"), ("as it comes", "false")):
        with safe_open(weights / selected(by_method, method)["weights"], framework="pt") as file:
            assert file.metadata()["normalize"] == normalized
    own, other = selected(by_method, "erm"), selected(by_method, "as it comes")
    assert accuracies(own) != accuracies(other)


@pytest.mark.slow
def test_each_method_has_its_own_prompts(tmp_path: Path) -> None:
    """The rows of one recipe: the head is that of its own prompts, not of the encoder's or of another row."""
    rows = "  - zero_shot\n  - {name: zero_shot, prompts: ['{}, drawn'], label: drawn}\n"
    start = "{name: erm, head_init: zero_shot, prompts: ['{}, drawn']}"
    changes = ("  - zero_shot\n", rows), ("{name: erm, head_init: zero_shot}", start), ("lr: 5.0", "lr: 1.0e-12")
    found = results(tmp_path, *changes)
    heads = {
        method: load_file(tmp_path / "output" / "wise" / selected(found, method)["weights"])["head.weight"]
        for method in ("zero_shot", "drawn", "erm", "wise_ft")
    }
    torch.testing.assert_close(heads["erm"], heads["drawn"])  # it has not left where it started
    torch.testing.assert_close(heads["wise_ft"], heads["zero_shot"])
    assert (heads["drawn"] - heads["zero_shot"]).abs().max() > 0.01
    hparams = {run["method"]: run["hparams"] for run in found["runs"]}
    assert hparams["drawn"]["prompts"] == ["{}, drawn"] and "prompts" not in hparams["zero_shot"]


@pytest.mark.slow
def test_end_to_end_the_encoder_too(tmp_path: Path) -> None:
    frozen_only = ("encoder: {name: open_clip", "encoder: {name: open_clip, trainable: true")
    fewer = ("  - zero_shot\n", ""), ("  - wise_ft\n", ""), ("seeds: 2", "seeds: 1")
    found = results(tmp_path, frozen_only, *fewer, ("steps: 30, lr: 5.0", "steps: 10, lr: 0.01"))
    erm, curve = selected(found, "erm"), selected(found, "half")["curve"]
    assert curve[10] == {"alpha": 1.0} | accuracies(erm)
    folder = tmp_path / "output" / "wise"
    start = load_file(tmp_path / "wise_clip.safetensors")
    half, end = (load_file(folder / selected(found, method)["weights"]) for method in ("half", "erm"))
    name = "visual.proj"
    [own] = [key for key in end if key.startswith("encoder.") and key.endswith(name)]
    torch.testing.assert_close(half[own], (start[name] + end[own]) / 2)
    assert not torch.equal(end[own], start[name])
