"""Names that attack what shows them, or are no file names; outputs that are closed, full or not UTF-8.

One run has names of both kinds. Whatever shows a run directory is checked here, with the fixture `hostile`.
"""

import ast
import csv
import io
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import miniature
import pytest
import safetensors.torch
import torch
import yaml
from example_runs import run_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from real_runs import ROOT, TEST_VIT
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams import metadata

import xdm_ft
from xdm_ft.cli.parser import main
from xdm_ft.experiment.data_checks import Finding
from xdm_ft.features.cache import write_manifest
from xdm_ft.features.maintenance import stores
from xdm_ft.recipe.text import in_yaml, parse
from xdm_ft.report.markup import as_text
from xdm_ft.report.sections import brief_sections
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.runtime.terminal import open_streams, print_error, show, write
from xdm_ft.storage.tensorboard import read_scalars, sub_run

FORGED = "xdm-ft: FORGED"
EVIL = ["\x1b[31m", "\x1b]0;title\x07", "\r", f"\n{FORGED}", "\u202e", "\x9b2J", "\x85", "\u2028", "\x08", "\t", "\x7f"]
ALL_EVIL = "a" + "".join(EVIL) + "z"
HTML, IMAGE = "<script>alert(1)<!--script>", "<img src=x onerror=alert(1)>"  # a folder's name has no slash
DOMAINS = (HTML, "a|b\n# heading\n| c |", "\u202etxt.exe", "\x1b]0;title\x07\x1b[2J[click](javascript:alert(1))")
CLASSES = (IMAGE, "c|d`\nxdm-ft: FORGED", "\u2067*bold*\u2069\x9b31m")
METHODS = ("</td><script>alert(1)</script>|", "${7*7}{{7*7}}**x**")
RECIPE = """\
name: {name}
data: {data}
protocol: {{name: leave_one_domain_out, seeds: 1, val_fraction: 0.4}}
encoder: {{{encoder}}}
features: {{dir: {cache}, workers: 0}}
methods: {methods}
training: {{steps: 10, batch_size: 4, evaluate_every: 5}}
report: {{page: {page}}}
output: {{dir: {out}}}
"""


def write_recipe(folder, **keys):
    values = {"encoder": TEST_VIT, "cache": json.dumps(str(folder / "cache")), "page": "true"}
    (folder / "small.yaml").write_text(RECIPE.format(**values | keys), encoding="utf-8")
    return folder / "small.yaml"


@dataclass(frozen=True)
class Hostile:
    recipe: Path
    data: Path
    run: Path
    out: str
    err: str


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run directory, and what the run printed."""
    folder = tmp_path_factory.mktemp("hostile")
    data, out = folder / f"data{ALL_EVIL}", folder / f"out{ALL_EVIL}"
    for domain, domain_name in enumerate(DOMAINS):
        for label, class_name in enumerate(CLASSES):
            for number in range(4):
                path = data / domain_name / class_name / f"{number}{ALL_EVIL}.png"
                miniature.save(path, label, domain, number)
    methods = json.dumps([{"name": "erm", "label": METHODS[0]}, {"name": "groupdro", "label": METHODS[1]}])
    block = json.dumps({"name": "folder", "root": str(data)})
    recipe = write_recipe(folder, name="hostile", data=block, methods=methods, out=json.dumps(str(out)))
    with pytest.MonkeyPatch.context() as patch:
        printed = {name: (folder / name).open("w+", encoding="utf-8") for name in ("stdout", "stderr")}
        for name, stream in printed.items():
            patch.setattr(f"sys.{name}", stream)
        patch.setattr("xdm_ft.report.charts.Figure.svg", lambda _: "<svg></svg>")
        status = main(["run", str(recipe)])
    for stream in printed.values():
        stream.close()
    texts = [(folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
    assert status == 0, texts[1]
    return Hostile(recipe, data, out / "hostile", *texts)


def harmless(text):
    forged = any(evil in text for evil in (f"\n{FORGED}", "\n# heading"))
    return not forged and all(line.isprintable() for line in text.split("\n"))


def shown(capsys):
    """Returns both outputs, without control characters and forged lines."""
    out, err = capsys.readouterr()
    assert harmless(f"{out}\n{err}"), out + err
    return out + err


# ---- The sinks of one run


def test_the_terminal(hostile):
    assert all(method in hostile.out for method in METHODS)
    assert harmless(hostile.out) and harmless(hostile.err)
    assert "\\u202etxt.exe" in hostile.out and "\\x1b]0;title" in hostile.out, "names are shown, as escapes"


def test_results_md(hostile):
    """As a Markdown reader that allows HTML understands it."""
    text = (hostile.run / "results.md").read_text(encoding="utf-8")
    assert harmless(text)
    reader = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = reader.parse(text)
    every = tokens + [child for token in tokens for child in token.children or ()]
    kinds = {token.type for token in every}
    assert not kinds & {"html_block", "html_inline", "link_open", "image", "code_inline"}
    assert "table_open" in kinds
    lengths = []
    for table in reader.render(text).split("<table>")[1:]:
        rows = [row.split("</tr>")[0] for row in table.split("</table>")[0].split("<tr>")[1:]]
        assert len({row.count("<td") + row.count("<th") for row in rows}) == 1
        lengths.append(len(rows))
    assert lengths.count(1 + len(METHODS)) >= 2, "accuracy and its measures"
    content = "".join(child.content for token in every if token.type == "inline" for child in token.children or ())
    assert all(name in content for name in (*METHODS, *map(printable, DOMAINS))), "the text is that of the name"


def test_results_json(hostile):
    records = json.loads((hostile.run / "results.json").read_text(encoding="utf-8"))["runs"]
    assert {record["method"] for record in records} == set(METHODS)
    assert {name for record in records for name in record["test_domains"]} == set(map(printable, DOMAINS))
    recalls = records[0]["selected"]["train_val"]["metrics"]["test"]["per_class_recall"]
    assert set(recalls) == set(map(printable, CLASSES))


def test_tensorboard(hostile):
    events = hostile.run / "events"
    scalars = read_scalars(events)
    assert scalars.keys() == {sub_run(method, (printable(domain),), 0, 0) for method in METHODS for domain in DOMAINS}
    assert all(name.isascii() and name.isprintable() and not set("<>|\"'&") & set(name) for name in scalars)
    tags = {tag.partition("/")[0] for of_run in scalars.values() for tag in of_run}
    assert tags == {"train", "val", "oracle", "test", "selection"}
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(events))
    multiplexer.Reload()
    assert multiplexer.Runs().keys() == scalars.keys()
    held_out = set()
    for name in scalars:
        content = multiplexer.SummaryMetadata(name, metadata.SESSION_START_INFO_TAG).plugin_data.content
        start = metadata.parse_session_start_info_plugin_data(content)
        assert harmless(start.group_name) and "\n" not in start.group_name
        held_out.add(start.hparams["held_out"].string_value)
    assert held_out == set(map(printable, DOMAINS))


@pytest.mark.slow
def test_verbs(hostile, capsys, monkeypatch):
    recipe, cache = str(hostile.recipe), hostile.recipe.parent / "cache"
    assert main(["validate", recipe]) == 0
    assert "\\u202etxt.exe" in shown(capsys)
    assert main(["report", str(hostile.run)]) == 0
    shown(capsys)
    with monkeypatch.context() as patched, open("/dev/full", "w") as full:
        patched.setattr(sys, "stdout", full)
        assert main(["run", recipe]) == 2  # trains nothing, and prints the table
    assert "xdm-ft: standard output: No space left on device; " in shown(capsys)
    [store] = stores(cache)
    write_manifest(store.folder, store.manifest | {"encoder": {"component": ALL_EVIL, "model": ALL_EVIL}})
    assert main(["cache", "ls", "--dir", str(cache)]) == 0
    shown(capsys)
    write_manifest(store.folder, store.manifest)
    (hostile.data / DOMAINS[0] / CLASSES[0] / f"broken{ALL_EVIL}.png").write_bytes(b"")
    for verb in ("doctor", "run"):
        assert main([verb, recipe]) == 2
        assert "broken" in shown(capsys)


@pytest.mark.slow
def test_names_that_are_no_file_names(tmp_path):
    """The run keeps to its folder, and every model has a folder of its own."""
    long = "語" * 60
    domains = ["..", ".", long, long + "語", "a/../../b", "a,b", ".hidden.unfinished"]
    with (tmp_path / "images.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "domain"])
        for number, domain in enumerate(domains):
            for label in range(2):
                for i in range(3):
                    path = tmp_path / "images" / f"{number}-{label}-{i}.png"
                    miniature.save(path, label, number, i)
                    rows.writerow([path, f"class {label}", domain])
    methods = json.dumps([{"name": "erm", "label": ".."}, {"name": "linear_probe", "label": long}])
    data = f"{{name: table, file: {tmp_path}/images.csv}}"
    out = tmp_path / "deep/out"
    recipe = write_recipe(tmp_path, name="odd", data=data, methods=methods, out=out, page="false")
    for _ in range(2):  # what is finished is found again
        assert main(["run", str(recipe)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"images.csv", "images", "small.yaml", "cache", "deep"}
    assert [*(tmp_path / "deep").iterdir()] == [out] and [*out.iterdir()] == [out / "odd"]
    records = json.loads((out / "odd/results.json").read_text())["runs"]
    assert len(records) == 2 * len(domains) and all(record["status"] == "ok" for record in records)
    files = [pick["weights"] for record in records for pick in record["selected"].values()]
    assert len({tuple(record["test_domains"]) for record in records}) == len(domains)
    assert all((out / "odd" / file).resolve().is_relative_to(out / "odd/models") for file in files)
    assert len({Path(file).parent for file in files}) == len(records)


# ---- Names in arguments, messages and YAML

names = st.lists(st.sampled_from([*EVIL, "\udcff", "ü", "大", "±", "a", "; ", '"', "%s", "{}"]) | st.text(max_size=8))
any_name = names.map("".join).filter(bool)
quick = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@quick
@given(any_name)
def test_every_way_to_print(capsys, name):
    with open_streams(logging.INFO):
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
    show(name)  # of several lines, if the text has several
    print_error(name)
    out, err = capsys.readouterr()
    assert out.count("\n") == err.count("\n") == name.count("\n") + 1
    assert all(char.isprintable() or char == "\n" for char in out + err)


@quick
@given(any_name | st.dictionaries(any_name, any_name))
def test_a_resolved_recipe_is_printable_and_means_the_same(value):
    assert in_yaml(value).isprintable() and yaml.safe_load(in_yaml(value)) == value
    assert parse(f"name: {in_yaml('1e-3')}", "recipe").values == {"name": "1e-3"}


@pytest.mark.slow
def test_arguments(capsys, tmp_path):
    name, quoted = ALL_EVIL, json.dumps(ALL_EVIL)
    weights = tmp_path / f"{name}.safetensors"
    safetensors.torch.save_file({name: torch.zeros(2), "head.weight": torch.zeros(3)}, weights)
    for command in (
        ["run", name],
        ["run", "demo", name],
        ["run", "demo", f"name={quoted}{{"],
        ["run", "demo", f"encoder.model={quoted}", "encoder.weights=nowhere"],
        ["run", "demo", f"methods=[{{name: erm, label: {quoted}, lr: 2}}]"],
        ["run", "demo", f"data={{name: folder, root: {quoted}}}", "protocol={}"],
        ["validate", "demo", f"data.class_names={{{quoted}: x}}"],
        ["validate", "demo", "methods=[erm]",
         f"encoder={{name: timm, model: test_vit, weights: {json.dumps(str(weights))}}}"],
        ["ls", "recipes", name],
        ["cp", "demo", str(tmp_path / "no" / name)],
        ["analyse", str(tmp_path / name)],
        ["cache", "prune", "--dir", str(tmp_path / "cache"), "--unreferenced", str(tmp_path / name)],
    ):  # fmt: skip
        assert main(command) == 2, command
        text = shown(capsys)
        assert text and (command[0] != "validate" or "does not fit" in text or "class_names" in text)
    for command in (["ls", name], [name], ["ls", "recipes", "demo", name]):
        with pytest.raises(SystemExit):
            main(command)
        assert shown(capsys)


# ---- Outputs


def run(arguments, folder, **environment):
    """Runs `xdm-ft` with arguments and redirections. `cp` imports little, so that this is fast."""
    everything = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = ["bash", "-c", f"{sys.executable} -m xdm_ft {arguments}"]
    return subprocess.run(command, capture_output=True, env=everything, cwd=folder)


FULL = b"xdm-ft: standard output: No space left on device; "


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("cp demo new.yaml >/dev/full", 2, FULL),
        pytest.param("cp demo new.yaml <&- >&- 2>&-", 0, b"", marks=pytest.mark.slow),
        pytest.param("cp demo new.yaml | true; exit ${PIPESTATUS[0]}", 141, b"", marks=pytest.mark.slow),
        pytest.param("cp nowhere new.yaml 2>/dev/full", 2, b"", marks=pytest.mark.slow),
    ],
)
def test_outputs_that_can_not_be_written(arguments, status, message, tmp_path):
    done = run(arguments, tmp_path)
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith(message) and done.stderr.count(b"\n") == bool(message)
    if arguments.startswith("cp demo new.yaml"):
        assert (tmp_path / "new.yaml").read_bytes() == (ROOT / "recipes/demo.yaml").read_bytes()


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_terminals_that_are_not_utf_8(encoding, monkeypatch):
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert main(["ls", "methods", "coral"]) == 0 and main(["run", "大ü"]) == 2
    results = json.loads((ROOT / "tests/report/results_example.json").read_text())
    write(as_text(brief_sections(run_of(results)), sys.stdout))
    out, err = (stream.buffer.getvalue().decode(encoding) for stream in (sys.stdout, sys.stderr))
    assert ("γ" if encoding == "utf-8" else r"\u03b3") in out
    assert ("58.0 \\xb1 1.0" if encoding == "ascii" else "58.0 ± 1.0") in out
    expected = {"ascii": r"\u5927\xfc", "utf-8": "大ü"}[encoding]
    assert err.startswith(f"xdm-ft: {expected}: no such recipe; xdm-ft ls lists them") and err.count("\n") == 1


@pytest.mark.slow
def test_the_c_locale(tmp_path):
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = run("cp '大ü' new.yaml", tmp_path, **plain)
    assert done.returncode == 2 and done.stderr.startswith(b"xdm-ft: \\udce5") and done.stderr.count(b"\n") == 1
    assert run("cp demo '大ü.yaml'", tmp_path, **plain).returncode == 0
    assert (tmp_path / "大ü.yaml").is_file()


def test_one_module_prints():
    package = Path(xdm_ft.__file__).parent
    calls = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if re.fullmatch(r"print|sys\.std(out|err)\.write|traceback\.print_\w+|logging\.basicConfig", name):
                module = str(path.relative_to(package))
                calls[module] = calls.get(module, 0) + 1
    assert calls == {"runtime/terminal.py": 2}
