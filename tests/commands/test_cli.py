"""The command line as a user meets it: real processes, exit status, one clear line per fault."""

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from warm_processes import xdm_ft

from xdm_ft.cli.parser import main, parser
from xdm_ft.recipe.check import load
from xdm_ft.storage.results_file import COSTS, write_results

VERBS = next(action.choices for action in parser()._actions if action.dest == "verb")
ROOT = Path(__file__).resolve().parents[2]
RECIPE = """\
name: small
data: {name: digits}
protocol: {test_domains: [ink], seeds: 1}
encoder: {name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}
methods: [erm, xdomainmix+sam]
training: {steps: 20, batch_size: 8}
report: {page: false}
"""


def python(*arguments, cwd):
    """`python …`, with all that it imports."""
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE + f"features: {{dir: '{tmp_path / 'cache'}'}}\noutput: {{dir: '{tmp_path / 'out'}'}}\n")
    return path


def make_images(root, domains=("a", "b", "c"), classes=("cat", "dog"), count=6):
    for d, domain in enumerate(domains):
        for c, cls in enumerate(classes):
            folder = root / domain / cls
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (40, 36), (40 * d, 120 * c, 20 * i)).save(folder / f"{i}.png")
    return root


def one_line(result, *words):
    """Exit status 2 and one line on standard error that holds the words; no traceback."""
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("xdm-ft:")]
    assert len(lines) == 1 and "Traceback" not in result.stderr, result.stderr
    for word in words:
        assert word in lines[0], result.stderr


def test_help_is_immediate_and_loads_nothing_heavy():
    code = (
        "import sys; from xdm_ft.cli.parser import parser; parser(); print({*sys.modules} & {'torch', 'numpy', 'yaml'})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_the_examples_of_every_help_are_true():
    """The parser accepts each example, its recipe and changes are valid, and its method and test domain exist."""
    assert len(VERBS) >= 8
    for name, verb in VERBS.items():
        shown = [line.strip() for line in verb.format_help().splitlines() if line.startswith("  xdm-ft ")]
        assert shown == list(importlib.import_module(f"xdm_ft.cli.{name}").EXAMPLES) != [], name
        for example in shown:
            arguments = parser().parse_args(shlex.split(example)[1:])
            assert arguments.verb == name
            if getattr(arguments, "recipe", None):
                load(arguments.recipe, getattr(arguments, "overrides", []))
            if name == "retrain":
                trained = load(Path(arguments.run_dir).name)
                assert arguments.method in [item.label for item in trained.methods]
                assert arguments.test_domain in trained.protocol.test_domains
                assert arguments.seed in trained.protocol.seeds


@pytest.mark.slow
def test_started_as_a_module_it_is_the_same_program(tmp_path):
    """`python -m xdm_ft` names the command as the installed script does."""
    helped = python("-m", "xdm_ft", "--help", cwd=tmp_path)
    assert helped.returncode == 0 and helped.stdout.startswith("usage: xdm-ft ")
    one_line(python("-m", "xdm_ft", "validate", "missing.yaml", cwd=tmp_path), "missing.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["validate"], "xdm-ft validate: error: the following arguments are required: RECIPE"),
        (["runn", "demo"], 'xdm-ft: error: argument VERB: no "runn"; did you mean "run"?'),
        (["run", "demo", "seeds=5"], 'xdm-ft: command line: seeds: unknown key; did you mean "protocol.seeds"?'),
        *(
            ([verb, "output/nothing", *rest], "xdm-ft: output/nothing: does not exist; name a ")
            for verb, rest in (
                ("report", []), ("analyse", []), ("export", ["out"]), ("retrain", ["erm", "ink", "0"]),
                ("predict", ["images"]), ("evaluate", ["images"]),
            )
        ),
    ],
)  # fmt: skip
def test_what_is_missing_or_misspelt_is_named(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").touch()
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    last = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and last.startswith(said) and (last == said or said.endswith(" a "))


def test_run_twice_continue_and_refuse(recipe, tmp_path):
    first = xdm_ft("run", recipe, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "xdomainmix+sam" in first.stdout
    results = tmp_path / "out" / "small" / "results.json"
    before = results.read_text()
    document = json.loads(before)
    assert {run["status"] for run in document["runs"]} == {"ok"}
    for run in document["runs"]:
        for selected in run["selected"].values():
            assert (results.parent / selected["weights"]).is_file()
    assert (results.parent / "results.md").read_text()
    assert list((results.parent / "events").iterdir())

    again = xdm_ft("run", recipe, cwd=tmp_path)  # complete: nothing is trained
    assert again.returncode == 0
    assert results.read_text() == before

    other = xdm_ft("run", recipe, "training.lr=0.5", cwd=tmp_path)
    one_line(other, "holds the run of another recipe", "It differs in")
    assert "\n  training.lr\n" in other.stderr
    assert results.read_text() == before

    fresh = python(ROOT / "xdm_ft" / "run.py", recipe, f"output.dir={tmp_path / 'out2'}", cwd=tmp_path)
    assert fresh.returncode == 0, fresh.stderr
    document["recipe"]["output"]["dir"] = str(tmp_path / "out2")
    assert without_times(json.loads((tmp_path / "out2/small/results.json").read_text())) == without_times(document)


def without_times(document):
    return document | {"runs": [{k: v for k, v in run.items() if k not in COSTS} for run in document["runs"]]}


@pytest.mark.slow
def test_an_interrupted_run_trains_only_what_is_missing(recipe, tmp_path):
    assert xdm_ft("run", recipe, cwd=tmp_path).returncode == 0
    path = tmp_path / "out" / "small" / "results.json"
    whole = json.loads(path.read_text())
    cut = whole | {"runs": whole["runs"][:1], "summary": []}
    write_results(path, cut)
    again = xdm_ft("run", recipe, cwd=tmp_path)
    assert "(erm: 1 model" not in again.stderr and "xdomainmix+sam: 1 model" in again.stderr
    assert without_times(json.loads(path.read_text())) == without_times(whole)


def test_verbs_that_list_and_copy(tmp_path):
    recipes = xdm_ft("ls", cwd=tmp_path)
    assert recipes.returncode == 0 and "demo" in recipes.stdout and "clip_camelyon" in recipes.stdout
    for what, word in [("methods", "xdomainmix"), ("data", "folder"), ("encoders", "open_clip")]:
        assert word in xdm_ft("ls", what, cwd=tmp_path).stdout
    assert xdm_ft("cp", "demo", "mine.yaml", cwd=tmp_path).returncode == 0
    assert (tmp_path / "mine.yaml").is_file()
    one_line(xdm_ft("cp", "demo", "mine.yaml", cwd=tmp_path), "exists already")


def test_validate_prints_a_recipe_that_resolves_to_itself(recipe, tmp_path):
    first = xdm_ft("validate", recipe, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "# learning rate of heads" in first.stdout and "gradient evaluations: 60" in first.stdout
    assert "#   data: 1797 images, 10 classes\n#   domains:" in first.stdout
    for text in (first.stdout, first.stderr):  # a reader of both as one finds whole lines
        assert text.endswith("\n") and not text.startswith("\n")
    assert [line for line in first.stderr.splitlines() if line.startswith("encoder: timm test_vit, ")]
    assert not (tmp_path / "out").exists()
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(first.stdout)
    assert xdm_ft("validate", resolved, cwd=tmp_path).stdout == first.stdout


@pytest.mark.slow
def test_validate_prints_the_exact_prompts_and_warns(tmp_path):
    make_images(tmp_path / "images", classes=("0", "golden_retriever"))
    result = xdm_ft(
        "validate", "demo", "data={name: folder, root: images}", "protocol.test_domains=null",
        "data.class_names={'0': tabby cat}", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "a photo of a tabby cat" in result.stdout and "a photo of a golden retriever" in result.stdout
    warned = xdm_ft("validate", "demo", "data={name: folder, root: images}", "protocol.test_domains=null", cwd=tmp_path)
    assert "warning: class names 0 are numbers" in warned.stderr


@pytest.mark.slow
def test_features_fills_the_cache_and_stops(recipe, tmp_path):
    first = xdm_ft("features", recipe, cwd=tmp_path)
    assert first.returncode == 0 and "1797 of them extracted now" in first.stdout, first.stderr
    assert "0 of them extracted now" in xdm_ft("features", recipe, cwd=tmp_path).stdout
    assert not (tmp_path / "out").exists()
    one_line(xdm_ft("features", recipe, "encoder.trainable=true", cwd=tmp_path), "no method of it uses cached features")


FOLDER = ["data={name: folder, root: images}", "protocol={}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainning.steps=3"], ["trainning", 'did you mean "training"']),
        (["training.steps=many"], ["training.steps", "valid integer", "many"]),
        (["data={name: folder, root: nowhere}"], ["nowhere"]),
        (["methods=[{name: xdomainmix, warmup_steps: 20}]"], ["warmup_steps", "20"]),
        (["training.steps=3", "training.epochs=1", "training.sampler=pooled"], ["both steps and epochs"]),
        (["encoder.weights=missing.safetensors"], ["missing.safetensors"]),
        (["encoder.weights=small.yaml"], ["small.yaml"]),
        (["encoder.trainable=true", "training.mixed_precision=fp16"], ["fp16", "xdomainmix+sam"]),
        (["protocol.test_domains=[inc]"], ["inc", 'did you mean "ink"']),
        (["data.class_names={zeroo: nought}"], ["zeroo", 'did you mean "zero"']),
        (["nothing"], ["nothing", "key.sub=value"]),
    ],
)
def test_each_fault_is_one_line_and_status_2(recipe, tmp_path, overrides, words):
    one_line(xdm_ft("run", recipe, *overrides, cwd=tmp_path), *words)
    assert not (tmp_path / "out").exists()


def test_a_domain_with_one_class_only(recipe, tmp_path):
    make_images(tmp_path / "images")
    for image in (tmp_path / "images" / "b" / "dog").iterdir():
        image.unlink()
    one_line(xdm_ft("run", recipe, *FOLDER, cwd=tmp_path), '"b"', "one class only", '"cat"')


@pytest.mark.slow
@pytest.mark.parametrize("trainable", ["false", "true"])
def test_an_image_that_does_not_decode(recipe, tmp_path, trainable):
    root = make_images(tmp_path / "images")
    (root / "a" / "cat" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    arguments = [
        recipe,
        *FOLDER,
        "protocol.seeds=1",
        f"encoder.trainable={trainable}",
        "methods=[erm]",
        "training.steps=2",
    ]
    one_line(xdm_ft("run", *arguments, cwd=tmp_path), "broken.png", "on_bad_image")
    skipped = xdm_ft("run", *arguments, "data.on_bad_image=skip", f"output.dir={tmp_path / 'skip'}", cwd=tmp_path)
    assert skipped.returncode == 0, skipped.stderr
    results = json.loads((tmp_path / "skip/small/results.json").read_text())
    assert "1 unreadable image left out" in results["summary"][0]["protocol"]
    assert "1 of 37 images do not decode" in skipped.stderr


@pytest.mark.slow
def test_one_training_domain_skips_xdomainmix_and_runs_the_others(recipe, tmp_path):
    make_images(tmp_path / "images", domains=("a", "b"))
    result = xdm_ft("run", recipe, *FOLDER, "protocol.seeds=1", "training.steps=4", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    runs = json.loads((tmp_path / "out/small/results.json").read_text())["runs"]
    assert [(r["method"], r["status"]) for r in runs] == [("erm", "ok")] * 2 + [("xdomainmix+sam", "skipped")] * 2
    assert "needs 2 training domains" in runs[2]["reason"]
    assert "needs 2 training domains" in (tmp_path / "out/small/results.md").read_text()


@pytest.mark.slow
def test_a_damaged_results_file_is_named(recipe, tmp_path):
    assert xdm_ft("run", recipe, cwd=tmp_path).returncode == 0
    path = tmp_path / "out" / "small" / "results.json"
    path.write_text(path.read_text()[:100])
    one_line(xdm_ft("run", recipe, cwd=tmp_path), "results.json", "damaged")


@pytest.mark.slow
def test_the_cache_is_listed_checked_and_cleared(recipe, tmp_path):
    def cache(*arguments):
        return xdm_ft("cache", *arguments, "--dir", tmp_path / "cache", cwd=tmp_path)

    assert "nothing is cached" in cache().stdout
    assert xdm_ft("features", recipe, cwd=tmp_path).returncode == 0
    assert "timm test_vit, 1797 images" in cache("ls").stdout
    assert "1 set of features, none damaged" in cache("verify").stdout
    shard = next((tmp_path / "cache").glob("*/shard-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    damaged = cache("verify")
    assert damaged.returncode == 2 and f"{shard.name} is damaged" in damaged.stderr
    one_line(cache("prune"), "--unused-days")
    assert "8 files removed" in cache("prune", "--max-size", "0").stdout
    assert "nothing is cached" in cache().stdout
