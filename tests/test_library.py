"""`import xdm_ft`: light, and a run from Python is the run of the command line."""

import json
import subprocess
import sys
from pathlib import Path

import miniature
import pytest
from canned_runs import write_run
from example_runs import results_of, two_sets

import xdm_ft
from xdm_ft.recipe.check import check, load
from xdm_ft.recipe.text import recipe_of
from xdm_ft.report.csv import COMPARED, csv_rows
from xdm_ft.report.sections.results import intervals
from xdm_ft.report.words import between
from xdm_ft.storage.run_directory import RunDirectory

QUICK = {"data": {"name": "digits"}, "encoder": {"name": "timm", "model": "test_vit", "kwargs": {"img_size": 32}}}
QUICK |= {"report": {"page": False}}


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, xdm_ft; xdm_ft.run, xdm_ft.open, xdm_ft.UserError; "
    code += "print({'torch', 'numpy', 'yaml'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_what_is_public_is_named_and_loaded_when_used():
    assert {*xdm_ft.__all__} == {"run", "load", "Results", "Model", "UserError", "__version__"}
    assert all(hasattr(xdm_ft, name) for name in xdm_ft.__all__) and not hasattr(xdm_ft, "Result")
    assert isinstance(xdm_ft.Results, type) and isinstance(xdm_ft.Model, type)


def test_overrides_are_those_of_the_command_line():
    by_text = load("demo", ["training.steps=10", "training.lr=0.5", "methods=[erm,wise_ft]", "encoder.normalize=true"])
    nested = {"training": {"steps": 10, "lr": 0.5}, "methods": ("erm", "wise_ft"), "encoder": {"normalize": True}}
    dotted = {"training.steps": 10, "training.lr": 0.5, "methods": ["erm", "wise_ft"], "encoder.normalize": True}
    for overrides in (nested, dotted):
        assert check(recipe_of("demo", overrides)).as_yaml() == by_text.as_yaml()
    spread = check(recipe_of("demo", {"wise_ft": {"alpha": 0.25}, "methods": ["wise_ft"], "encoder.normalize": True}))
    assert spread.methods[0].algorithm.settings()["alpha"] == 0.25


def test_a_dotted_key_replaces_a_block_and_a_plain_one_merges_into_it(tmp_path):
    space = {"search": {"trials": 2, "space": {"lr": {"choice": [0.1, 0.2]}}}}
    merged = recipe_of({**space}, {"search": {"space": {"weight_decay": {"choice": [0.0]}}}}).values
    assert list(merged["search"]["space"]) == ["lr", "weight_decay"] and merged["search"]["trials"] == 2
    replaced = recipe_of({**space}, {"search.space": {"weight_decay": {"choice": [0.0]}}}).values
    assert list(replaced["search"]["space"]) == ["weight_decay"]
    assert space["search"]["space"] == {"lr": {"choice": [0.1, 0.2]}}, "what was given is left as it is"
    assert recipe_of({}, {"output": {"dir": tmp_path}}).values == {"output": {"dir": str(tmp_path)}}


def test_a_block_may_stand_in_place_of_a_switch():
    """`trainable` is false in the recipe: nested dicts, a nested key and the dotted key set one value."""
    block = {"trainable": {"blocks": 1}}
    resolved = [check(recipe_of("demo", overrides)).as_yaml() for overrides in (
        {"encoder": block}, {"encoder.trainable": {"blocks": 1}}, {"encoder.trainable.blocks": 1},
        {"encoder": {"trainable": True}} | {"encoder.trainable": {"blocks": 1}},
    )]  # fmt: skip
    resolved.append(load("demo", ["encoder.trainable.blocks=1"]).as_yaml())
    assert len({*resolved}) == 1 and "blocks: 1" in resolved[0]
    assert recipe_of({"encoder": {"trainable": {"blocks": 2}}}, {"encoder": block}).values["encoder"] == block


def test_faults_name_what_was_given():
    with pytest.raises(xdm_ft.UserError, match=r"overrides: training\.steps: .*given -1"):
        xdm_ft.run("demo", training={"steps": -1})
    with pytest.raises(xdm_ft.UserError, match=r'unknown key; did you mean "training"'):
        xdm_ft.run("demo", trainin={"steps": 1})
    with pytest.raises(xdm_ft.UserError, match="no such recipe"):
        xdm_ft.run("no such")
    with pytest.raises(xdm_ft.UserError, match="is a set; use texts, numbers, lists and dicts"):
        xdm_ft.run("demo", methods={"erm"})
    with pytest.raises(xdm_ft.UserError, match="methods is not a block of keys"):
        xdm_ft.run("demo", **{"methods.erm": 1})


def written(path, **changes):
    """A run directory of two methods under two rules."""
    results = results_of(two_sets())
    results["summary"] += [row | {"selection": "oracle", "mean": 0.99} for row in results["summary"]]
    RunDirectory(path).write_results(results | changes)
    return path


def test_a_finished_run_is_opened_without_its_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(written(tmp_path / "run").parent)
    for path in ("run", Path("run")):
        found = xdm_ft.open(path)
        assert found.path == Path("run") and not found.failed and found.final_fit is None
        assert [record.method for record in found.records] == ["erm"] * 4 + ["xdomainmix"] * 4
        own, oracle = found.table(), found.table(selection="oracle")
        assert found.table("train_val") == own and len(found.rows) == 4
        assert [(row["method"], row["selection"], row["mean"]) for row in own] == [
            ("erm", "train_val", pytest.approx(0.55)), ("xdomainmix", "train_val", pytest.approx(0.65))
        ]  # fmt: skip
        assert own[1]["mean_low"] is None, "results.json alone has no predictions"
        assert own[1]["compared_with"] == "erm" and own[0]["compared_with"] is None
        assert [(row["selection"], row["mean"]) for row in oracle] == [("oracle", 0.99)] * 2
        with pytest.raises(xdm_ft.UserError, match=r'^run: selection: .*"orcale"; did you mean "oracle"\?$'):
            found.table("orcale")
        with pytest.raises(xdm_ft.UserError, match=r'no rule "val_domain"; known: train_val, oracle$'):
            found.table("val_domain")
        assert repr(found) == "<Results of run: 8 models of erm, xdomainmix; selection: train_val>"
    many = written(tmp_path / "many", runs=[run for run in results_of(two_sets())["runs"] for _ in range(100)])
    for shown in (xdm_ft.open(many), xdm_ft.open(many).records[0], xdm_ft.open(many).run):
        assert len(repr(shown)) < 2000
    assert "open" not in xdm_ft.__all__, "`from xdm_ft import *` must leave Python's own"


def test_rows_have_the_intervals_and_verdicts_of_the_reports(tmp_path):
    made = write_run(tmp_path / "run")
    rows = {row["method"]: row for row in xdm_ft.open(made.path).table()}
    document = {row["method"]: row for row in csv_rows(made) if row["of"] == "mean" and row["selection"] == "train_val"}
    for name in ("difference", "here_low", "here_high", "here", "elsewhere_low", "elsewhere_high", "elsewhere"):
        assert rows["sam"][name] == document["sam"][name] is not None, name
        assert rows["zero_shot"][name] is None, "it is the reference"
    shown = {row[0].text: row[1].text for row in intervals(made).tables[0].rows}
    assert {name: between("accuracy", [row["mean_low"], row["mean_high"]]) for name, row in rows.items()} == shown
    assert rows["sam"]["mean_low"] < rows["sam"]["mean"] < rows["sam"]["mean_high"]
    assert {*COMPARED, "mean_low", "mean_high"} <= set.intersection(*map(set, rows.values())) and len(rows) == 4
    [other, *_] = xdm_ft.open(made.path).table("oracle")
    assert other["mean_low"] < other["mean"] < other["mean_high"]


def test_what_is_no_finished_run_is_one_clear_line(tmp_path):
    written(tmp_path / "unfinished", summary=[])
    recipe = results_of(two_sets())["recipe"]
    asked = recipe | {"protocol": recipe["protocol"] | {"final_fit": True}}
    written(tmp_path / "without_fit", recipe=asked)
    written(tmp_path / "damaged")
    (tmp_path / "damaged" / "results.json").write_text("{")
    for name, said in (
        ("none", "none: does not exist; name a run directory"),
        ("unfinished", "unfinished: has no table, as its run is not finished; run the same command to finish it"),
        ("without_fit", "without_fit: has no final fit, as its run is not finished; run the same command to finish it"),
        ("damaged", "damaged/results.json: cannot be read as the results of a run"),
    ):
        with pytest.raises(xdm_ft.UserError) as error:
            xdm_ft.open(tmp_path / name)
        assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_a_run(in_folder, capsys):
    recipe = QUICK | {"name": "quick", "features": {"dir": str(in_folder / "cache"), "workers": 0}}
    recipe |= {"methods": ["erm", "linear_probe"], "training": {"steps": 500, "batch_size": 4}}
    recipe |= {"protocol": {"test_domains": ["ink"], "seeds": 1}}
    results = xdm_ft.run(recipe, training={"steps": 6})
    assert not results.failed and results.path == Path("output/quick") and capsys.readouterr().out == ""
    assert [record.method for record in results.records] == ["erm", "linear_probe"]
    document = json.loads((results.path / "results.json").read_text())
    assert document["recipe"]["training"]["steps"] == 6
    assert document["summary"] == [row.to_json() for row in results.rows]
    assert json.loads(json.dumps(results.document)) | {"checksum": document["checksum"]} == document
    table = results.table()
    assert len(table) == len(results.table("oracle")) == 2 and len(results.rows) == 4
    assert table[0]["method"] == "erm" and table[0]["mean"] == results.rows[0].mean == table[0]["mean:ink"]

    opened = xdm_ft.open(results.path)
    assert opened.table() == table and opened.table("oracle") == results.table("oracle")
    assert json.dumps(opened.document) == json.dumps(results.document)
    again = xdm_ft.run(recipe, training={"steps": 6})
    assert again.records == results.records and again.rows == results.rows, "a finished run trains nothing again"


@pytest.mark.slow
def test_two_runs_of_one_process_may_differ_in_precision(tmp_path, monkeypatch):
    from accelerate import Accelerator

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("xdm_ft.training.end_to_end.inputs.worker_count", lambda accelerator: 0)
    recipe = QUICK | {"features": {"dir": str(tmp_path / "cache"), "workers": 0}, "methods": ["erm"]}
    recipe["encoder"] = recipe["encoder"] | {"trainable": True, "preprocessing": {"size": 32}}
    miniature.domainbed(tmp_path / "data", "pacs", per_class=2)  # few images
    recipe["data"] = {"name": "pacs", "root": str(tmp_path / "data"), "counts": "any"}
    recipe |= {"training": {"steps": 1, "batch_size": 2}, "protocol": {"test_domains": ["sketch"], "seeds": 1}}
    for precision in ("no", "bf16"):
        results = xdm_ft.run(recipe, name=precision, training={"mixed_precision": precision})
        assert not results.failed and results.document["environment"]["mixed_precision"] == precision

    own = Accelerator(mixed_precision="bf16")
    with pytest.raises(xdm_ft.UserError, match=r"training\.mixed_precision: no.* has an Accelerator with bf16"):
        xdm_ft.run(recipe, name="other")
    assert not xdm_ft.run(recipe, name="bf16", training={"mixed_precision": "bf16"}).failed
    assert own.mixed_precision == "bf16", "the caller's own stays as it was"
