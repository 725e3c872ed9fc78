"""Names from data, files and arguments on a terminal, and outputs that are closed, full or not UTF-8."""

from __future__ import annotations

import ast
import copy
import io
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from example_runs import run_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

import xdm_ft
from xdm_ft.cli.parser import main
from xdm_ft.evaluation.records import Record, SummaryRow
from xdm_ft.experiment.faults import Finding
from xdm_ft.features.maintenance import stores
from xdm_ft.features.shards import write_manifest
from xdm_ft.recipe.text import in_yaml, parse
from xdm_ft.report.finished import Run
from xdm_ft.report.markup import markdown
from xdm_ft.report.sections import brief_sections
from xdm_ft.report.text import as_text, show_headline
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.terminal import opened, print_error, show, write

ROOT = Path(__file__).resolve().parents[2]
RESULTS = json.loads((ROOT / "tests/report/results_example.json").read_text())
FORGED = "xdm-ft: FORGED"
EVIL = ["\x1b[31m", "\x1b]0;title\x07", "\r", f"\n{FORGED}", "\u202e", "\x9b2J", "\x85", "\u2028", "\x08", "\t", "\x7f"]
names = st.lists(st.sampled_from([*EVIL, "\udcff", "ü", "大", "±", "a", "; ", '"', "%s", "{}"]) | st.text(max_size=8))
hostile = names.map("".join).filter(bool)
arguments = hostile.map(lambda name: f"a{name.replace(chr(0), '')}")
quick = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ALL_EVIL = "a" + "".join(EVIL) + "z"


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of both outputs, each without control characters, and none of them forged."""
    out, err = capsys.readouterr()
    lines = f"{out}\n{err}".split("\n")
    assert all(line.isprintable() for line in lines), [line for line in lines if not line.isprintable()]
    assert not any(line.startswith(FORGED) for line in lines)
    return [line for line in lines if line]


@quick
@given(hostile)
def test_every_way_to_print(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with opened(logging.INFO):
        logging.getLogger("xdm_ft").info("%s: 3 models", name)
        logging.getLogger("a_library").error(f"{name}: no such thing")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(name, UserWarning, stacklevel=1)
        print_error(f"xdm-ft: {UserError(name, 'second')}")
        show(Finding("class", name))
        show(Finding("class", name, name))
        try:
            raise ValueError(name.replace("\n", ""))
        except ValueError:
            logging.getLogger("xdm_ft").exception("a fault")
    out, err = capsys.readouterr()
    assert [len(line.split("\n")) for line in (out, err.split("a fault")[0])] == [4, 6]
    assert all(char.isprintable() or char == "\n" for char in out + err)
    shown(capsys)
    show(name)  # of several lines, if the text has several
    print_error(name)
    out, err = capsys.readouterr()
    assert out.count("\n") == err.count("\n") == name.count("\n") + 1
    assert all(char.isprintable() or char == "\n" for char in out + err)


def finished(results: dict[str, Any]) -> Run:
    recipe = results["recipe"] | {"protocol": {"selection": "train_val", "metric": "accuracy"}}
    records = [Record.from_json(one) for one in results["runs"] if one["status"] == "ok"]
    rows = [SummaryRow.from_json({"budget": {}, **row}) for row in results["summary"]]
    return Run(Path("output"), results | {"recipe": recipe}, records, rows)


@pytest.mark.slow
@quick
@given(hostile)
def test_tables(capsys: pytest.CaptureFixture[str], name: str) -> None:
    results = copy.deepcopy(RESULTS)
    results["recipe"]["name"] = name
    for row in results["summary"]:
        row["method"] += name
        row["protocol"] += name
        row["per_test_domain"] = {f"{key}{name}": value for key, value in row["per_test_domain"].items()}
    run = run_of(results)
    document = markdown(run, brief_sections(run))
    assert all(char.isprintable() or char == "\n" for char in document)
    assert f"\n{FORGED}" not in document
    write(as_text(brief_sections(run), sys.stdout))
    show_headline(finished(results))
    shown(capsys)


@pytest.mark.slow
@settings(quick, max_examples=1)
@given(arguments)
@example(ALL_EVIL)
def test_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    capsys.readouterr()
    for command in (
        ["run", name],
        ["run", "demo", name],
        ["run", "demo", f"name={json.dumps(name)}{{"],
        ["run", "demo", f"encoder.model={json.dumps(name)}", "encoder.weights=nowhere"],
        ["run", "demo", f"methods=[{{name: erm, label: {json.dumps(name)}, lr: 2}}]"],
        ["run", "demo", f"data={{name: folder, root: {json.dumps(name)}}}", "protocol={}"],
        ["validate", "demo", f"data.class_names={{{json.dumps(name)}: x}}"],
        ["cp", "demo", str(tmp_path / "no" / name)],
        ["retrain", str(tmp_path / name), name, name, "0"],
        ["cache", "prune", "--dir", str(tmp_path / "cache"), "--unreferenced", str(tmp_path / name)],
    ):
        assert main(command) == 2, command
        assert shown(capsys)
    for command in (["ls", name], [name], ["ls", "recipes", name]):
        with pytest.raises(SystemExit):
            main(command)
        assert shown(capsys)


@quick
@given(hostile | st.dictionaries(hostile, hostile))
def test_a_resolved_recipe_is_printable_and_means_the_same(value: object) -> None:
    assert in_yaml(value).isprintable() and yaml.safe_load(in_yaml(value)) == value


def test_a_resolved_recipe_keeps_a_text_that_looks_like_a_number() -> None:
    assert parse(f"name: {in_yaml('1e-3')}", "recipe").values == {"name": "1e-3"}


def images(root: Path) -> Path:
    noise = np.random.default_rng(0)
    for domain in ("a", f"b{ALL_EVIL}", "c"):
        for name in (f"cat{ALL_EVIL}", "dog"):
            folder = root / domain / name.replace("/", "")
            folder.mkdir(parents=True)
            for number in range(3):
                pixels = noise.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}{ALL_EVIL}.png")
    return root


@pytest.mark.slow
def test_names_in_data_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = images(tmp_path / f"data{ALL_EVIL}")
    recipe = [
        "demo", f"data={{name: folder, root: {json.dumps(str(root))}}}", "protocol={test_domains: [c], seeds: 1}",
        "encoder={name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}",
        f"features={{dir: {json.dumps(str(tmp_path / 'cache'))}, workers: 0}}", "training.steps=2", "methods=[erm]",
        f"output.dir={json.dumps(str(tmp_path / ALL_EVIL))}", "report.page=false",
    ]  # fmt: skip
    assert main(["validate", *recipe]) == 0
    assert any("domains: a, ba" in line for line in shown(capsys))
    assert main(["run", *recipe]) == 0
    shown(capsys)
    with monkeypatch.context() as patched, open("/dev/full", "w") as full:
        patched.setattr(sys, "stdout", full)
        assert main(["run", *recipe]) == 2  # trains nothing, and prints the table
    assert "xdm-ft: standard output: No space left on device; " in "\n".join(shown(capsys))
    [store] = stores(tmp_path / "cache")
    write_manifest(store.folder, store.manifest | {"encoder": {"component": ALL_EVIL, "model": ALL_EVIL}})
    assert main(["cache", "ls", "--dir", str(tmp_path / "cache")]) == 0
    shown(capsys)
    (root / "a/dog/broken.png").write_bytes(b"")
    assert main(["doctor", *recipe]) == 2
    shown(capsys)
    assert main(["run", *recipe]) == 2
    shown(capsys)


def test_names_of_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"{ALL_EVIL}.safetensors"
    safetensors.torch.save_file({ALL_EVIL: torch.zeros(2), "head.weight": torch.zeros(3)}, path)
    encoder = f"encoder={{name: timm, model: test_vit, weights: {json.dumps(str(path))}}}"
    assert main(["validate", "demo", encoder, "methods=[erm]"]) == 2
    [line] = [line for line in shown(capsys) if line.startswith("xdm-ft: ")]
    assert "does not fit" in line


def run(arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Runs `xdm-ft` with arguments and redirections. `cp` imports little, so that this is fast."""
    there = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = ["bash", "-c", f"{sys.executable} -m xdm_ft {arguments}"]
    return subprocess.run(command, capture_output=True, env=there, cwd=folder)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("cp demo new.yaml >/dev/full", 2, b"xdm-ft: standard output: No space left on device; "),
        ("cp demo new.yaml <&- >&- 2>&-", 0, b""),
        ("cp demo new.yaml | true; exit ${PIPESTATUS[0]}", 141, b""),
        ("cp nowhere new.yaml 2>/dev/full", 2, b""),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("--help >/dev/full", 2, b"xdm-ft: standard output: No space left on device; "),
                ("cp demo new.yaml >&-", 0, b""),
                ("cp demo new.yaml 2>/dev/full >&-", 0, b""),
                ("cp nowhere new.yaml 2>&-", 2, b""),
                ("cp demo 2>/dev/full", 2, b""),
            )
        ),
    ],
)
def test_outputs_that_can_not_be_written(arguments: str, status: int, message: bytes, tmp_path: Path) -> None:
    done = run(arguments, tmp_path)
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith(message) and done.stderr.count(b"\n") == bool(message)
    if arguments.startswith("cp demo new.yaml"):
        assert (tmp_path / "new.yaml").read_bytes() == (ROOT / "recipes/demo.yaml").read_bytes()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_terminals_that_are_not_utf_8(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert main(["ls", "methods"]) == 0 and main(["run", "大ü"]) == 2
    write(as_text(brief_sections(run_of(RESULTS)), sys.stdout))
    show_headline(finished(RESULTS))
    out, err = sys.stdout.buffer.getvalue().decode(encoding), sys.stderr.buffer.getvalue().decode(encoding)
    assert ("γ" if encoding == "utf-8" else r"\u03b3") in out
    assert ("58.0 \\xb1 1.0" if encoding == "ascii" else "58.0 ± 1.0") in out
    expected = {"ascii": r"\u5927\xfc", "latin-1": r"\u5927ü", "utf-8": "大ü"}[encoding]
    assert err.startswith(f"xdm-ft: {expected}: no such recipe; known: ") and err.count("\n") == 1


def test_the_c_locale(tmp_path: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = run("cp '大ü' new.yaml", tmp_path, **plain)
    assert done.returncode == 2 and done.stderr.startswith(b"xdm-ft: \\udce5") and done.stderr.count(b"\n") == 1
    assert run("cp demo '大ü.yaml'", tmp_path, **plain).returncode == 0
    assert (tmp_path / "大ü.yaml").is_file()


def print_calls(path: Path) -> list[str]:
    """The places that write to an output without `terminal`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if re.fullmatch(r"print|sys\.std(out|err)\.write|traceback\.print_\w+|logging\.basicConfig", name):
            found.append(f"{path.name}:{node.lineno}: {name}")
    return found


def test_one_module_prints() -> None:
    package = Path(xdm_ft.__file__).parent
    own = {package / "runtime/terminal.py"}
    paths = [path for path in package.rglob("*.py") if path not in own]
    assert len(paths) > 100 and len(print_calls(package / "runtime/terminal.py")) == 2
    assert [place for path in paths for place in print_calls(path)] == []
