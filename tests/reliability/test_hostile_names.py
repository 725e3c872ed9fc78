"""Classes, domains and methods whose names attack what shows them: one real run, and a test for each of its outputs.

What shows a run directory in another way gets a test of its own here, with the fixture `hostile`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import miniature
import pytest
from markdown_it import MarkdownIt
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams import metadata

from xdm_ft.cli.parser import main
from xdm_ft.runtime.errors import printable
from xdm_ft.storage.tensorboard import read_scalars, sub_run

HTML, IMAGE = "<script>alert(1)<!--script>", "<img src=x onerror=alert(1)>"  # a folder's name has no slash
DOMAINS = (HTML, "a|b\n# heading\n| c |", "\u202etxt.exe", "\x1b]0;title\x07\x1b[2J[click](javascript:alert(1))")
CLASSES = (IMAGE, "c|d`\nxdm-ft: FORGED", "\u2067*bold*\u2069\x9b31m")
METHODS = ("</td><script>alert(1)</script>|", "${7*7}{{7*7}}**x**")
EVIL = ("\x1b", "\x07", "\x9b", "\u202e", "\u2067", "\u2069", "\nxdm-ft: FORGED", "\n# heading")
RECIPE = """\
name: hostile
data: {{name: folder, root: {folder}/data}}
protocol: {{name: leave_one_domain_out, seeds: 1, val_fraction: 0.4}}
encoder: {{name: timm, model: test_vit, preprocessing: {{size: 32}}, kwargs: {{img_size: 32}}}}
features: {{dir: {folder}/cache, workers: 0}}
methods: {methods}
training: {{steps: 10, batch_size: 4, evaluate_every: 5}}
output: {{dir: {folder}/out}}
"""


@dataclass(frozen=True)
class Hostile:
    run: Path
    out: str
    err: str


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Hostile:
    """A run directory, and what the run printed."""
    folder = tmp_path_factory.mktemp("hostile")
    for domain, domain_name in enumerate(DOMAINS):
        for label, class_name in enumerate(CLASSES):
            for number in range(4):
                path = folder / "data" / domain_name / class_name / f"{number}.png"
                miniature.save(path, label, domain, number)
    methods = json.dumps([{"name": "erm", "label": METHODS[0]}, {"name": "groupdro", "label": METHODS[1]}])
    (folder / "hostile.yaml").write_text(RECIPE.format(folder=folder, methods=methods))
    with pytest.MonkeyPatch.context() as patch:
        printed = {name: (folder / name).open("w+", encoding="utf-8") for name in ("stdout", "stderr")}
        for name, stream in printed.items():
            patch.setattr(f"sys.{name}", stream)
        status = main(["run", str(folder / "hostile.yaml")])
    for stream in printed.values():
        stream.close()
    out, err = ((folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    assert status == 0, err
    return Hostile(folder / "out" / "hostile", out, err)


def harmless(text: str) -> bool:
    return not any(evil in text for evil in EVIL) and all(line.isprintable() for line in text.split("\n"))


def test_the_terminal(hostile: Hostile) -> None:
    assert all(method in hostile.out for method in METHODS)
    assert harmless(hostile.out) and harmless(hostile.err)
    assert "\\u202etxt.exe" in hostile.out and "\\x1b]0;title" in hostile.out, "names are shown, as escapes"


def test_results_md(hostile: Hostile) -> None:
    """As a Markdown reader that allows HTML understands it."""
    text = (hostile.run / "results.md").read_text(encoding="utf-8")
    assert harmless(text)
    reader = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = reader.parse(text)
    every = tokens + [child for token in tokens for child in token.children or ()]
    kinds = {token.type for token in every}
    assert not kinds & {"html_block", "html_inline", "link_open", "image", "code_inline"}
    assert "table_open" in kinds
    html = reader.render(text)
    lengths = []
    for table in html.split("<table>")[1:]:
        rows = [row.split("</tr>")[0] for row in table.split("</table>")[0].split("<tr>")[1:]]
        assert len({row.count("<td") + row.count("<th") for row in rows}) == 1
        lengths.append(len(rows))
    assert lengths.count(1 + len(METHODS)) >= 2, "accuracy and its measures"
    shown = "".join(child.content for token in every if token.type == "inline" for child in token.children or ())
    for name in (*METHODS, *map(printable, DOMAINS)):
        assert name in shown, "the text is that of the name"


def test_results_json(hostile: Hostile) -> None:
    results = json.loads((hostile.run / "results.json").read_text(encoding="utf-8"))
    assert {record["method"] for record in results["runs"]} == set(METHODS)
    assert {name for record in results["runs"] for name in record["test_domains"]} == set(map(printable, DOMAINS))
    recalls = results["runs"][0]["selected"]["train_val"]["metrics"]["test"]["per_class_recall"]
    assert set(recalls) == set(map(printable, CLASSES))


def test_tensorboard(hostile: Hostile) -> None:
    events = hostile.run / "events"
    found = read_scalars(events)
    assert found.keys() == {sub_run(method, (printable(domain),), 0, 0) for method in METHODS for domain in DOMAINS}
    assert all(name.isascii() and name.isprintable() and not set("<>|\"'&") & set(name) for name in found)
    tags = {tag for scalars in found.values() for tag in scalars}
    assert {tag.partition("/")[0] for tag in tags} == {"train", "val", "oracle", "test", "selection"}
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(events))
    multiplexer.Reload()
    assert multiplexer.Runs().keys() == found.keys()
    held_out = set()
    for name in found:
        content = multiplexer.SummaryMetadata(name, metadata.SESSION_START_INFO_TAG).plugin_data.content
        start = metadata.parse_session_start_info_plugin_data(content)
        assert harmless(start.group_name) and "\n" not in start.group_name
        held_out.add(start.hparams["held_out"].string_value)
    assert held_out == set(map(printable, DOMAINS))
