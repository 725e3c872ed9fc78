"""`--json` and `--quiet`: of every verb, anywhere after it, in results and in faults."""

import json
import logging
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from warm_processes import xdm_ft

from xdm_ft.cli.answer import as_json
from xdm_ft.cli.parser import parser
from xdm_ft.runtime.progress import progress

VERBS = next(action.choices for action in parser()._actions if action.dest == "verb")
DOCS = Path(__file__).resolve().parents[2] / "docs/command_line.md"
RECIPE = """\
name: small
data: {name: folder, root: images}
protocol: {test_domains: [c], seeds: 1}
encoder: {name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}
methods: [erm]
training: {steps: 4, batch_size: 8}
report: {page: false}
features: {dir: cache}
"""


@pytest.fixture
def recipe(tmp_path):
    """A recipe for 36 images, in a folder whose name is hard to print."""
    folder = tmp_path / "a\nb\x1b[31m ü"
    noise = np.random.default_rng(0)
    for place in [folder / "images" / domain / name for domain in "abc" for name in ("cat", "dog")]:
        place.mkdir(parents=True)
        for i in range(6):
            Image.fromarray(noise.integers(0, 256, (32, 32, 3)).astype(np.uint8)).save(place / f"{i}.png")
    (folder / "small.yaml").write_text(RECIPE)
    return folder / "small.yaml"


def document(result, status=0):
    """The one JSON document on standard output."""
    assert result.returncode == status, result.stderr
    assert result.stdout.endswith("\n") and result.stdout.isascii()
    found = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(name))
    explained = {*found} if isinstance(found, dict) else {*found[0]}
    assert explained - {"error", "status"} <= {*re.findall(r"`(\w+)`", DOCS.read_text(encoding="utf-8"))}
    return found


def test_each_verb_has_both_flags_at_every_place():
    filled = {
        "run": ["demo", "training.steps=10", "name=x"],
        "retrain": ["DIR", "erm", "ink", "0", "2"],
        "cp": ["demo", "mine.yaml"],
        "ls": ["methods"],
        "cache": ["prune", "--unused-days", "3"],
    }
    assert len(VERBS) >= 8
    for verb in VERBS:
        words = filled.get(verb, [])
        if not words and any(a.nargs in (None, "+") and not a.option_strings for a in VERBS[verb]._actions):
            words = ["x"] * sum(a.nargs in (None, "+") and not a.option_strings for a in VERBS[verb]._actions)
        plain = vars(parser().parse_args([verb, *words]))
        assert plain["json"] is plain["quiet"] is False
        for place in range(len(words) + 1):
            if words[place - 1 : place] == ["--unused-days"]:
                continue
            for flags in (["--json"], ["--quiet"], ["--quiet", "--json"]):
                found = vars(parser().parse_args([verb, *words[:place], *flags, *words[place:]]))
                assert found == plain | {flag[2:]: True for flag in flags}, (verb, place)


@pytest.mark.parametrize("form", [["demo", "--json", "training.steps"], ["demo", "x=1", "--json", "no"], ["--json"]])
def test_faults_are_documents_too(form, tmp_path):
    found = xdm_ft("run", *form, cwd=tmp_path)
    fault = document(found, 2)
    assert fault["status"] == 2 and fault["error"] in found.stderr and fault["error"]


def test_a_run_and_its_features_cache_and_retraining(recipe, tmp_path):
    def call(*arguments, status=0):
        return document(xdm_ft(*arguments, "--json", cwd=recipe.parent), status)

    ran = call("run", "small.yaml")
    run = recipe.parent / "output" / "small"
    assert (recipe.parent / ran["path"]) == run and ran["failed"] is False and ran["final_fit"] is None
    assert ran["summary"] == json.loads((run / "results.json").read_text())["summary"]
    assert 0 <= ran["summary"][0]["mean"] <= 1

    absolute = str(recipe.parent / "cache")  # a raw name: no escape of a terminal's
    filled = call("features", "small.yaml", f"features.dir={json.dumps(absolute)}")
    assert (filled["folder"], filled["images"], filled["computed"], filled["unreadable"]) == (absolute, 36, 0, {})
    [features] = filled["sets"]
    assert (features["what"], features["width"], features["computed"]) == ("features", 64, 0)

    cached = call("cache", "--dir", "cache")
    [entry] = cached["entries"]
    assert entry["key"] == features["key"] and entry["state"] == "current" and entry["images"] == 36
    assert entry["bytes"] == sum(file.stat().st_size for file in Path(absolute, entry["key"]).glob("shard-*"))
    shard = next(Path(absolute).glob("*/shard-*"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    damaged = xdm_ft("cache", "verify", "--dir", "cache", "--json", cwd=recipe.parent)
    [entry] = document(damaged, 2)["entries"]
    assert entry["state"] == "damaged" and shard.name in entry["faults"][0] and shard.name in damaged.stderr
    shard.write_bytes(whole)

    again = call("retrain", "output/small", "erm", "c", "0")
    assert again["status"] == "ok" and again["rules"]["train_val"]["same_bits"] is True
    assert again["rules"]["train_val"]["accuracy"]["test"]["before"] == ran["summary"][0]["mean"]

    [removed] = call("cache", "prune", "--max-size", "0", "--dir", "cache")["removed"]
    assert removed["bytes"] == cached["entries"][0]["bytes"] and not list(Path(absolute).glob("*/shard-*"))


@pytest.mark.slow
def test_activations_of_a_cut(recipe):
    methods = "methods=[erm, {name: erm, label: block, trainable: {blocks: 1}}]"

    def call(verb):
        return document(xdm_ft(verb, "small.yaml", methods, "--json", cwd=recipe.parent))

    features, activations = call("features")["sets"]
    assert (features["what"], features["computed"]) == ("features", 36)
    assert activations["what"] == "activations, last 1 block trained"
    assert (activations["computed"], activations["width"]) == (36, 5 * 64)
    assert call("features")["computed"] == 0
    [cut] = call("validate")["cuts"]
    assert (cut["bytes"], cut["missing_bytes"]) == (36 * 5 * 64 * 4, 0)
    words = DOCS.read_text(encoding="utf-8")
    assert [name for name in {**cut, **features} if f"`{name}`" not in words] == []
    entries = document(xdm_ft("cache", "--dir", "cache", "--json", cwd=recipe.parent))["entries"]
    assert sorted(entry["encoder"].get("cut", "") for entry in entries) == ["", "model.blocks.5"]


@pytest.mark.slow
def test_validate_doctor_ls_and_cp(recipe):
    def call(*arguments, status=0):
        return document(xdm_ft(*arguments, "--json", cwd=recipe.parent), status)

    found = call("validate", "demo", "training.steps=10")
    assert found["recipe"]["training"]["steps"] == 10 and "a photo of a zero" in found["prompts"]
    assert found["plan"]["images"] == 1797 and found["plan"]["steps"] == 250
    checks = call("doctor", "nowhere", status=2)
    assert (checks["ok"], checks["faults"]) == (False, 1)
    assert [(one["check"], bool(one["remedy"])) for one in checks["checks"] if not one["ok"]] == [("recipe", True)]
    names = {one["name"]: one for one in call("ls", "methods")}
    defaults = {one["key"]: one["default"] for one in names["xdomainmix"]["settings"]}
    assert defaults["p_discard"] == 0.2 and defaults["warmup_steps"] is None
    name = os.fsdecode(b"\xff\n.yaml")
    assert call("cp", "demo", name) == {"file": name}
    assert (recipe.parent / name).is_file()


@dataclass(frozen=True)
class Odd:
    values: tuple[float, ...]
    path: Path


def test_numbers_that_json_lacks_are_null():
    text = as_json(Odd((math.nan, math.inf, 0.5), Path("x")))
    assert json.loads(text) == {"values": [None, None, 0.5], "path": "x"}


NOISY = """
import os, subprocess, sys
from xdm_ft.cli import parser
from xdm_ft.cli import cp
main = cp.main
def noisy(*arguments):
    print("python prints")
    os.write(1, b"a library in C prints")
    subprocess.run(["echo", "a child prints"])
    return main(*arguments)
cp.main = noisy
sys.exit(parser.main(sys.argv[1:]))
"""


def test_what_others_print_goes_to_standard_error(tmp_path):
    command = [sys.executable, "-c", NOISY, "cp", "demo", "mine.yaml", "--json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert document(result) == {"file": "mine.yaml"}
    assert all(f"{who} prints" in result.stderr for who in ("python", "a library in C", "a child"))


def test_quiet_prints_the_result_and_warnings_only(recipe):
    loud = xdm_ft("run", "small.yaml", cwd=recipe.parent)
    assert "encoder: timm" in loud.stderr and "results.md" in loud.stdout
    quiet = xdm_ft("run", "small.yaml", "--quiet", "output.dir=other", cwd=recipe.parent)
    assert quiet.returncode == 0 and quiet.stderr == "" and quiet.stdout.replace("other/", "output/") == loud.stdout
    fault = xdm_ft("run", "--quiet", "nowhere", cwd=recipe.parent)
    assert fault.returncode == 2 and fault.stderr.startswith("xdm-ft: nowhere: no such recipe")


@pytest.mark.parametrize("level", [logging.NOTSET, logging.INFO, logging.WARNING])
def test_quiet_shows_no_bar_on_a_terminal(level, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(logging.getLogger("xdm_ft"), "level", level)
    monkeypatch.setattr("xdm_ft.runtime.progress.BAR_AFTER_SECONDS", 0.0)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)  # --quiet of an earlier test in this process
    with progress("features", 2, "images") as bar:
        bar.advance(2)
    assert ("features: " in capsys.readouterr().err) == (level != logging.WARNING)
