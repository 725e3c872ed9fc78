"""The command line as a user meets it: exit status, one clear line per fault, `--json`, `--quiet`, the Tab key."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import miniature
import pytest
from example_runs import whole
from warm_processes import xdm_ft

from xdm_ft.cli import as_json
from xdm_ft.cli.arguments import EXAMPLES, VERBS
from xdm_ft.cli.cache import find_references
from xdm_ft.cli.ls import Setting, listing
from xdm_ft.cli.parser import main, parser
from xdm_ft.cli.validate import validate
from xdm_ft.protocol.splits import Rule
from xdm_ft.recipe.check import known_keys, load
from xdm_ft.recipe.text import find_recipe
from xdm_ft.report.comparisons import ELSEWHERE, HERE
from xdm_ft.results.table import EQUAL, NO_VERDICT
from xdm_ft.runtime.progress import progress
from xdm_ft.runtime.terminal import glossary
from xdm_ft.storage.results_file import COSTS, write_results

PARSERS = next(action.choices for action in parser()._actions if action.dest == "verb")
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs/scripts.md"
RECIPE = """\
name: small
data: {name: folder, root: images}
protocol: {test_domains: [c], seeds: 1}
encoder: {name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}
methods: [erm, xdomainmix+sam]
training: {steps: 4, batch_size: 8}
report: {page: false}
features: {dir: cache}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose name is hard to print, with a recipe for 36 images."""
    folder = tmp_path / "a\nb\x1b[31m ü"
    for d, domain in enumerate("abc"):
        for c, name in enumerate(("cat", "dog")):
            for i in range(6):
                miniature.save(folder / "images" / domain / name / f"{i}.png", c, d, i)
    (folder / "small.yaml").write_text(RECIPE)
    return folder


def one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit status 2 and one line on standard error that holds the words; no traceback."""
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("xdm-ft:")]
    assert len(lines) == 1 and "Traceback" not in result.stderr, result.stderr
    assert all(word in lines[0] for word in words), result.stderr


def document(result: subprocess.CompletedProcess[str], status: int = 0) -> Any:
    """The one JSON document on standard output. Its names are explained in the documentation."""
    assert result.returncode == status, result.stderr
    assert result.stdout.endswith("\n") and result.stdout.isascii()
    found = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(name))
    names = {*found} if isinstance(found, dict) else {*found[0]}
    assert names - {"error", "status"} <= {*re.findall(r"`(\w+)`", DOCS.read_text(encoding="utf-8"))}
    return found


def test_help_is_immediate_and_loads_nothing_heavy() -> None:
    heavy = "{*sys.modules} & {'torch', 'numpy', 'yaml', 'pydantic'}"
    code = f"import sys; from xdm_ft.cli.parser import parser; parser().format_help(); print({heavy})"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # not the clock: other processes may want the cores too
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_the_examples_of_every_help_are_true() -> None:
    """The parser accepts each example, its recipe and changes are valid, and its method and test domain exist."""
    assert (
        len(VERBS) >= 14 and [line for verb in PARSERS.values() for line in verb.epilog.split("\n  ")[1:]] == EXAMPLES
    )
    for name, verb in PARSERS.items():
        shown = [line.strip() for line in verb.format_help().splitlines() if line.startswith("  xdm-ft ")]
        assert shown, name
        for example in shown:
            arguments = parser().parse_args(shlex.split(example)[1:])
            assert arguments.verb == name
            if getattr(arguments, "recipe", None):
                load(arguments.recipe, getattr(arguments, "overrides", []))


def test_without_arguments_it_shows_the_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    shown = capsys.readouterr().out
    steps = [line.split("  ")[1] for line in shown.partition("first steps:\n")[2].splitlines()]
    assert ended.value.code == 0 and steps[0] == "xdm-ft run demo" and all(verb in shown for verb in VERBS)
    for step in steps[:-1]:
        parser().parse_args(shlex.split(step)[1:])


def test_each_verb_has_both_flags_at_every_place() -> None:
    filled = {
        "run": ["demo", "training.steps=10", "name=x"], "cp": ["demo", "mine.yaml"],
        "ls": ["methods"], "cache": ["prune", "--unused-days", "3"],
        "label": ["DIR", "images", "--budget", "5", "--out", "x.csv"], "adapt": ["DIR", "x.csv", "--out", "new"],
    }  # fmt: skip
    for verb in VERBS:
        positional = [a for a in PARSERS[verb]._actions if a.nargs in (None, "+") and not a.option_strings]
        words = filled.get(verb, ["x"] * len(positional))
        plain = vars(parser().parse_args([verb, *words]))
        assert plain["json"] is plain["quiet"] is False
        for place in range(len(words) + 1):
            if place and words[place - 1].startswith("--"):
                continue
            for flags in (["--json"], ["--quiet"], ["--quiet", "--json"]):
                found = vars(parser().parse_args([verb, *words[:place], *flags, *words[place:]]))
                assert found == plain | {flag[2:]: True for flag in flags}, (verb, place)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["validate"], "xdm-ft validate: error: the following arguments are required: RECIPE"),
        (["runn", "demo"], 'xdm-ft: error: argument VERB: no "runn"; did you mean "run"?'),
        (["run", "demo", "seeds=5"], 'xdm-ft: command line: seeds: unknown key; did you mean "protocol.seeds"?'),
        (["run", "mine.yaml"], 'xdm-ft: mine.yaml: no such recipe; did you mean "mine.yml"?'),
        (["run", "folder"], "xdm-ft: data.root: folder contains no images in <domain>/<class>/ folders; it is"),
        (["cp", "folder", "x.yaml"], "xdm-ft: folder: is a folder; name a file, or a recipe of `xdm-ft ls`"),
        (["train", "demo"], 'xdm-ft: error: argument VERB: no "train"; did you mean "run"?'),
        (["retrain", "x"], 'xdm-ft: error: argument VERB: no "retrain"; to train again, run the recipe'),
        (["mine.yml"], 'xdm-ft: error: argument VERB: no "mine.yml"; did you mean "run mine.yml"?'),
        *(
            (words, "xdm-ft: error: no option --data.root: a key of a recipe has no dashes; write data.root=X")
            for words in (["--data.root", "X"], ["run", "demo", "--data.root", "X"], ["doctor", "--data.root=X"])
        ),
        (["run", "demo", "data.root", "X"], 'xdm-ft: command line: "data.root" is not an override; write data.root'),
        (["predict", "m", "x", "--top_k=3"], 'xdm-ft: error: unrecognized arguments: --top_k=3; did you mean "--top'),
        (["run", "demo", "--lr", "3"], "xdm-ft: error: unrecognized arguments: --lr 3; `xdm-ft run --help` lists"),
        (["run", "demo", "data={name: folder, root: nowhere}"], "xdm-ft: data.root: nowhere does not exist in /"),
        (["validate", "demo", "data.class_names={zeroo: nought}"], 'xdm-ft: demo: data.class_names: the data has no'),
        (["cache", "prune"], "xdm-ft: cache prune: no limit is given; give --unused-days N"),
        (["cp", "demo", "images"], "xdm-ft: images: exists already"),
        *(
            ([verb, "output/nothing", *rest], "xdm-ft: output/nothing: does not exist; name a ")
            for verb, rest in (
                ("report", []), ("analyse", []), ("export", ["out"]),
                ("predict", ["images", "--out", "x.csv"]), ("evaluate", ["images"]),
                ("assess", ["images"]), ("label", ["images", "--budget", "9", "--out", "x.csv"]),
                ("adapt", ["images", "--out", "new"]),
            )
        ),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_and_status_2(
    arguments: list[str], said: str, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also as a document: the same message."""
    (in_folder / "images").touch()
    (in_folder / "mine.yml").touch()
    (in_folder / "folder").mkdir()
    for flags in ([], ["--json"]):
        try:
            status = main([*arguments, *flags])
        except SystemExit as end:
            status = int(end.code or 0)
        out, err = capsys.readouterr()
        assert status == 2 and err.splitlines()[-1].startswith(said), err
        if flags:
            fault = json.loads(out)
            assert fault["status"] == 2 and fault["error"] in err and fault["error"]
        else:
            assert out == ""
    assert not (in_folder / "output").exists()


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    return found | {"runs": [{k: v for k, v in run.items() if k not in COSTS} for run in found["runs"]]}


@pytest.mark.slow
def test_a_run_and_its_cache(folder: Path) -> None:
    """Texts and documents of one run: it runs, is continued, refuses another recipe, and is damaged."""

    def call(*arguments: str, status: int = 0) -> Any:
        return document(xdm_ft(*arguments, "--json", cwd=folder), status)

    loud = xdm_ft("run", "small.yaml", cwd=folder)
    assert loud.returncode == 0 and "xdomainmix+sam" in loud.stdout and "results.md" in loud.stdout, loud.stderr
    assert "encoder: timm" in loud.stderr
    run, path = folder / "output/small", folder / "output/small/results.json"
    results = json.loads(path.read_text())
    assert {one["status"] for one in results["runs"]} == {"ok"} and (run / "results.md").read_text()
    assert all((run / pick["weights"]).is_file() for one in results["runs"] for pick in one["selected"].values())
    before = path.read_bytes()
    ran = call("run", "small.yaml")  # complete: nothing is trained
    assert path.read_bytes() == before and folder / ran["path"] == run
    assert (ran["failed"], ran["final_fit"], ran["summary"]) == (False, None, results["summary"])
    quiet = xdm_ft("run", "small.yaml", "--quiet", "output.dir=other", cwd=folder)
    assert quiet.returncode == 0 and quiet.stderr == "" and quiet.stdout.replace("other/", "output/") == loud.stdout
    other = xdm_ft("run", "small.yaml", "training.lr=0.5", cwd=folder)
    one_line(other, "holds the run of another recipe", "It differs in")
    assert "\n  training.lr\n" in other.stderr and path.read_bytes() == before

    absolute = str(folder / "cache")  # a raw name: no escape of a terminal's
    filled = call("features", "small.yaml", f"features.dir={json.dumps(absolute)}")
    assert (filled["folder"], filled["images"], filled["computed"], filled["unreadable"]) == (absolute, 36, 0, {})
    [features] = filled["sets"]
    assert (features["what"], features["width"], features["computed"]) == ("features", 64, 0)
    [entry] = call("cache", "--dir", "cache")["entries"]
    assert (entry["key"], entry["state"], entry["images"]) == (features["key"], "current", 36)
    shard = next(Path(absolute).glob("*/shard-*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    damaged = xdm_ft("cache", "verify", "--dir", "cache", "--json", cwd=folder)
    [entry] = document(damaged, 2)["entries"]
    assert entry["state"] == "damaged" and shard.name in entry["faults"][0] and shard.name in damaged.stderr
    shard.write_bytes(content)
    assert "1 set of features, none damaged" in xdm_ft("cache", "verify", "--dir", "cache", cwd=folder).stdout

    [removed] = call("cache", "prune", "--max-size", "0", "--dir", "cache")["removed"]
    assert removed["bytes"] == entry["bytes"] and not list(Path(absolute).glob("*/shard-*"))
    assert "nothing is cached" in xdm_ft("cache", "--dir", "cache", cwd=folder).stdout

    write_results(path, results | {"runs": results["runs"][:1], "summary": []})  # as an interrupted run left it
    said = xdm_ft("run", "small.yaml", cwd=folder).stderr
    assert "(erm: 1 model" not in said and "xdomainmix+sam: 1 model" in said
    assert without_times(json.loads(path.read_text())) == without_times(results)
    path.write_text(path.read_text()[:100])
    one_line(xdm_ft("run", "small.yaml", cwd=folder), "results.json", "damaged")


def test_started_as_a_script_it_is_the_same_program(folder: Path) -> None:
    command = [sys.executable, ROOT / "xdm_ft" / "run.py", "missing.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    one_line(done, "xdm-ft: missing.yaml: no such recipe")


def test_on_a_terminal_the_plan_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    first, second, *lines = validate(load("small.yaml", ["encoder.model=test_vit"])).text().splitlines()
    assert re.fullmatch(r"# recipe: \d{2,} lines, .*: xdm-ft validate RECIPE > FILE", first) and second == "# plan"
    assert not [line for line in lines if not line.startswith("# ")] and len(lines) < 40


@pytest.mark.slow
def test_validate_prints_a_recipe_that_resolves_to_itself(folder: Path) -> None:
    first = xdm_ft("validate", "small.yaml", "data.class_names={dog: golden_retriever}", cwd=folder)
    assert first.returncode == 0, first.stderr
    assert "# learning rate of heads" in first.stdout and "gradient evaluations: 12" in first.stdout
    assert "#   data: 36 images, 2 classes\n#   domains:" in first.stdout
    for text in (first.stdout, first.stderr):  # a reader of both as one finds whole lines
        assert text.endswith("\n") and not text.startswith("\n")
    assert [line for line in first.stderr.splitlines() if line.startswith("encoder: timm test_vit, ")]
    assert not (folder / "output").exists()
    (folder / "resolved.yaml").write_text(first.stdout)
    assert xdm_ft("validate", "resolved.yaml", cwd=folder).stdout == first.stdout
    clip = "encoder={name: open_clip, model: demo, weights: demo}"
    found = document(xdm_ft("validate", "small.yaml", clip, "data.class_names={cat: '0'}", "--json", cwd=folder))
    assert found["prompts"][:1] == ["a photo of a 0"] and found["plan"]["images"] == 36 and found["plan"]["steps"] == 8
    one_line(xdm_ft("features", "small.yaml", "encoder.trainable=true", cwd=folder), "no method of it uses cached")


def test_activations_of_a_cut(folder: Path) -> None:
    methods = "methods=[erm, {name: erm, label: block, trainable: {blocks: 1}}]"
    filled = document(xdm_ft("features", "small.yaml", methods, "--json", cwd=folder))
    features, activations = filled["sets"]
    assert (features["what"], features["computed"]) == ("features", 36)
    assert activations["what"] == "activations, last 1 block trained"
    assert (activations["computed"], activations["width"]) == (36, 5 * 64)
    assert [name for name in features if f"`{name}`" not in DOCS.read_text(encoding="utf-8")] == []
    entries = document(xdm_ft("cache", "--dir", "cache", "--json", cwd=folder))["entries"]
    assert sorted(entry["encoder"].get("cut", "") for entry in entries) == ["", "model.blocks.5"]


def test_lists_and_copies(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {
        "benchmarks": "clip_camelyon",
        "methods": "coral",
        "heads": "mlp",
        "data": "folder",
        "encoders": "open_clip",
    }
    lines = {what: listing(what).text().splitlines() for what in kinds}
    for what, word in kinds.items():
        assert any(line.startswith(f"{word} ") for line in lines[what])
        assert what == "benchmarks" or all(len(line) <= 100 for line in lines[what])
    rows = {cells[0]: cells for line in lines["methods"] for cells in [re.split(r"  +", line)]}
    assert rows["groupdro"][1] == rows["…+sagm"][1] == "cached / end to end" and rows["coral"][1] == "end to end"
    assert rows["groupdro"][2].startswith("Sagawa et al. 2020, Distributionally Robust Neural") and len(rows) >= 22
    asked = ("methods", "groupdro"), ("methods", "knn"), ("methods", "sam"), ("heads", "mlp"), ("recipes", "pacs")
    one = {pair: listing(*pair).text() for pair in asked}
    assert "L_d: mean" in one["methods", "groupdro"] and "algorithm 1\n  works on:" in one["methods", "groupdro"]
    assert "\n  eta=0.01  η, step size" in one["methods", "groupdro"] and "\n  sam.rho=0.05 " in one["methods", "sam"]
    assert "\n  its head holds the features of all training images\n" in one["methods", "knn"]
    assert "\n  mlp.hidden_width=512 " in one["heads", "mlp"] and one["recipes", "pacs"].startswith("pacs\n  ")
    assert main(["ls", "methods", "gropdro"]) == 2
    assert 'ls methods: no gropdro; did you mean "groupdro"?' in capsys.readouterr().err
    held = {entry.name: entry.holds for entry in listing("methods").document if entry.holds}
    assert held["prototypes"] == "its head holds the mean feature of each class" and {*held} == {
        "knn",
        "prototypes",
        "gda",
    }
    named = dict[str, dict[str, Any]]()
    for what in lines:
        assert main(["ls", what, "--json"]) == 0
        named[what] = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    methods = named["methods"]
    assert {one["key"]: one["default"] for one in methods["xdomainmix"]["settings"]}["p_discard"] == 0.2
    name = os.fsdecode(b"\xff\n.yaml")
    assert main(["cp", "demo", name, "--json"]) == 0 and json.loads(capsys.readouterr().out) == {"file": name}
    assert main(["cp", "demo", "."]) == 0 and capsys.readouterr().out == "wrote demo.yaml\n"
    assert (in_folder / name).read_text() == (in_folder / "demo.yaml").read_text() == find_recipe("demo").read_text()


def test_the_glossary_has_the_concepts_first_and_every_word_of_a_table() -> None:
    words = glossary()
    concepts = ["images in domains", "held-out domain", "encoder", "head", "method", "table with intervals", "verdict",
                "model to ship"]  # fmt: skip
    assert list(words["concepts"]) == concepts and next(iter(words)) == "concepts"
    columns = ["versus", *(column.removesuffix(" (unadjusted)") for column in HERE + ELSEWHERE)]
    rules = get_args(Rule)
    assert len(rules) == 4 and len(columns) == 7
    every = [word for entries in words.values() for word in entries]
    assert {*columns, *rules, EQUAL, NO_VERDICT, "draws × gradients", "mixed steps", "last step picked"} <= {*every}
    assert len(every) == len({*every})
    texts = [f"{word} {text}" for entries in words.values() for word, text in entries.items()]
    assert len(" ".join(texts).split()) <= 2000
    command, environment = [sys.executable, "tools/glossary.py"], os.environ | {"PYTHONPATH": str(ROOT)}
    page = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert page.stdout == (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), "python tools/glossary.py"


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    def explained(*words: str) -> str:
        assert main(["explain", *words]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80
        return out

    screen = explained()
    assert screen.startswith("images in domains: ") and len(screen.splitlines()) <= 45
    assert all(word in " ".join(screen.split()) for entries in glossary().values() for word in entries)
    assert explained("held-out", "domain") == explained("Held-Out Domain")
    assert explained("held-out", "domain").startswith("held-out domain: ")
    assert explained("ece").startswith("ECE: ") and explained("macro f1").startswith("balanced accuracy, macro F1: ")
    assert explained("verdicts").startswith("here: ") and "\nlook: " in explained("verdicts")
    assert explained("mean").startswith("mean ±: ") and explained("±").startswith("mean ±: ")
    assert main(["explain", "verdict", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"concepts": {"verdict": glossary()["concepts"]["verdict"]}}
    for word, remedy in {"temprature": "the nearest: temperature", "xyz": "xdm-ft explain lists all words"}.items():
        assert main(["explain", word]) == 2
        assert capsys.readouterr().err == f'xdm-ft: explain: no word "{word}"; {remedy}\n'


def test_explain_loads_nothing_heavy() -> None:
    heavy = "{*sys.modules} & {'torch', 'numpy', 'yaml', 'pydantic', 'xdm_ft.report'}"
    code = f"import sys; from xdm_ft.cli.parser import main; main(['explain', 'verdict']); print({heavy})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "set()"


def test_features_of_every_encoder_and_cut_of_a_run_are_referenced(tmp_path: Path) -> None:
    features = {"small": {"key": "k1", "cuts": {"one block": "k2"}}, "big": {"key": "k3", "cuts": {"one block": None}}}
    recipe, environment = {"name": "x", "methods": ["erm"]}, {"features": features}
    results = {"schema": 1, "recipe": recipe, "environment": environment, "runs": []}
    write_results(tmp_path / "results.json", whole(results | {"summary": []}))
    assert find_references([str(tmp_path)]) == {"k1", "k2", "k3"}


def test_numbers_that_json_lacks_are_null() -> None:
    setting = Setting("lr", "", False, math.nan)
    text = as_json({"path": Path("x"), "setting": setting, "values": (-math.inf, 0.5)})
    expected = {"key": "lr", "meaning": "", "required": False, "default": None}
    assert json.loads(text) == {"path": "x", "setting": expected, "values": [None, 0.5]}


NOISY = """
import os, subprocess, sys
from xdm_ft.cli import cp, parser
main = cp.main
def noisy(arguments):
    print("python prints")
    os.write(1, b"a library in C prints")
    subprocess.run(["echo", "a child prints"])
    return main(arguments)
cp.main = noisy
sys.exit(parser.main(sys.argv[1:]))
"""


def test_what_others_print_goes_to_standard_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NOISY, "cp", "demo", "mine.yaml", "--json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert document(result) == {"file": "mine.yaml"}
    assert all(f"{who} prints" in result.stderr for who in ("python", "a library in C", "a child"))


@pytest.mark.parametrize("level", [logging.NOTSET, logging.INFO, logging.WARNING])
def test_quiet_shows_no_bar_on_a_terminal(
    level: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(logging.getLogger("xdm_ft"), "level", level)
    monkeypatch.setattr("xdm_ft.runtime.progress.BAR_AFTER_SECONDS", 0.0)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)  # --quiet of an earlier test in this process
    with progress("features", 2, "images") as bar:
        bar.advance(2)
    assert ("features: " in capsys.readouterr().err) == (level != logging.WARNING)


PROGRAMS = Path(sys.executable).parent
COMPLETE = """
eval "$(register-python-argcomplete xdm-ft)"
complete -p xdm-ft >/dev/null || exit 9
COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9 COMP_KEY=9
read -ra COMP_WORDS <<<"$1"
[[ "$1" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_python_argcomplete xdm-ft "${COMP_WORDS[COMP_CWORD]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.slow
def test_the_tab_key_in_bash(tmp_path: Path) -> None:
    """Each answer takes less than a second of the processor."""
    if shutil.which("bash") is None or not (PROGRAMS / "register-python-argcomplete").exists():
        pytest.skip("needs bash, and argcomplete beside this Python")
    command = tmp_path / "bin" / "xdm-ft"  # as pip would install it, for this tree
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nimport sys; from xdm_ft.__main__ import main; sys.exit(main())\n")
    command.chmod(0o755)
    path = os.pathsep.join([str(command.parent), str(PROGRAMS), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "XDM_FT_CACHE": str(tmp_path / "cache")}

    def offered(line: str) -> list[str]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            ["bash", "-c", COMPLETE, "bash", line], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
        return sorted(done.stdout.split())

    (tmp_path / "mine.yaml").write_text("name: mine\n")
    (tmp_path / "notes.txt").write_text("")
    assert offered("xdm-ft va") == ["validate"] and {"ls", "verify", "prune"} <= {*offered("xdm-ft cache ")}
    assert offered("xdm-ft run mi") == ["mine.yaml"] and "notes.txt" not in offered("xdm-ft doctor ")
    assert {"clip_folder", "clip_pacs"} <= {*offered("xdm-ft run clip_")}
    assert offered("xdm-ft run demo training.steps=3 --qu") == ["--quiet"]
    assert offered("xdm-ft run demo training.lr") == [], "keys come with the first verb that reads a recipe"
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/keys.json").write_text(json.dumps(known_keys()))
    assert offered("xdm-ft run demo --json training.lo") == ["training.loss_average="]
    assert offered("xdm-ft run demo xdomainmix.w") == ["xdomainmix.warmup_steps="]


def test_a_verb_leaves_the_keys_for_the_tab_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDM_FT_CACHE", str(tmp_path / "cache"))
    assert main(["validate", "demo", "data.root=x"]) == 2 and not (tmp_path / "cache").exists()
    assert main(["features", "demo", "encoder.trainable=true", "methods=[erm]", f"features.dir={tmp_path}/own"]) == 2
    assert json.loads((tmp_path / "cache/keys.json").read_text()) == known_keys()
    monkeypatch.setenv("XDM_FT_CACHE", "/proc/nowhere")  # cannot be written: nothing is said
    assert main(["features", "demo", "encoder.trainable=true", "methods=[erm]", f"features.dir={tmp_path}/own"]) == 2
