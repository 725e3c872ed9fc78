"""A run directory whose recipe grows: only what is new is trained, and what it holds already keeps its bytes."""

import json
import logging
import shutil
from functools import partial
from pathlib import Path

import pytest
import small_runs
import yaml
from loop_models import make_job
from warm_processes import two_ranks

from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.knn import KNN
from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.algorithms.zero_shot import ZeroShot
from xdm_ft.cli.library import run
from xdm_ft.core import ModelKey
from xdm_ft.experiment import pieces, results
from xdm_ft.experiment.models import trained_parameters
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.results import RECORDS, RunResults, read_records
from xdm_ft.experiment.resume import Generation, grown_from, growth, inherit_choices, refused_changes
from xdm_ft.heads.mlp import MLP
from xdm_ft.heads.neighbours import NeighbourHead
from xdm_ft.recipe.check import load
from xdm_ft.recipe.text import parse
from xdm_ft.results.model import Record
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.results_file import COSTS
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training import Trained

VIT = {"encoder": "vit", "trainable": False}  # of a record

RUN = Path("output/small")
TWO, FIVE = (f"search={{trials: {trials}, preset: frozen}}" for trials in (2, 5))
FOLLOW = "protocol.seeds: new ones must follow those of the run"
ONLY_ERM, SKETCH = "methods=[erm]", "protocol.test_domains=[sketch]"
SHORT = ONLY_ERM, "protocol.test_domains=[photo, sketch]", "training.steps=4"
GROWN = (*SHORT, "methods=[groupdro, rsc, erm]", "protocol.seeds=2", "protocol.final_fit=true")
small_pacs = pytest.mark.usefixtures("small_pacs")


def resolved(*overrides):
    return load("demo", list(overrides)).resolved()


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ([], ["output.dir=elsewhere", "features.batch_size=7", "protocol.seeds=[0,1,2,3,4,9]"], []),
        (["protocol.seeds=2"], ["protocol.seeds=[0,1]", "protocol.final_fit=true"], []),
        (["methods=[erm,rsc]"], ["methods=[vrex,rsc,{name: erm, label: second},erm]"], []),
        ([TWO], [FIVE], []),
        (["methods=[erm,rsc]"], ["methods=[erm,{name: rsc, label: r}]"], ["methods: no rsc"]),
        (["methods=[erm,rsc]"], ["methods=[erm,rsc]", "rsc.batch_drop=0.5"], ["methods.rsc.batch_drop"]),
        (
            ["methods=[{name: erm, label: a}]"],
            ["methods=[{name: rsc, label: a}, erm]"],
            ["methods.a.name", "methods.a.feature_drop", "methods.a.batch_drop"],
        ),
        (["protocol.seeds=2"], ["protocol.seeds=[2,0,1]"], [f"{FOLLOW}, [0, 1]"]),
        ([FIVE], [TWO], ["search.trials: 2, was 5"]),
        ([TWO], [FIVE, "search.sampler=sobol"], ["search.sampler"]),
        (["protocol.final_fit=true"], [], ["protocol.final_fit"]),
        (["training.lr=0.1"], ["training.lr=0.2", "protocol.seeds=7"], ["training.lr"]),
    ],
)
def test_what_grows_a_recipe_and_what_does_not(before, now, expected):
    refused = refused_changes(resolved(*before), resolved(*now))
    assert [name for name in refused if name != "search.trials"] == expected


@pytest.mark.parametrize(
    "edit",
    [
        lambda recipe: recipe.update(methods=None),
        lambda recipe: recipe["protocol"].update(seeds=9),
        lambda recipe: recipe.update({"protocol.seeds": [0], "protocol": None}),
        lambda recipe: recipe["search"].pop("trials"),
    ],
)
def test_what_an_editor_leaves_in_a_recipe_never_grows_it(edit):
    recipe = resolved()
    edit(recipe)
    assert refused_changes(resolved(), recipe)


def test_a_model_belongs_to_the_first_recipe_that_planned_it():
    first, second = Generation(("erm",), (0, 1), 1), Generation(("erm", "rsc"), (0, 1), 2)
    keys = [("erm", 0, 0), ("erm", 1, 1), ("rsc", 0, 0), ("erm", 2, 0), ("vrex", 0, 0)]
    growing = RunResults(load("demo", []), RunDirectory(Path("nowhere")), [first, second])
    groups = [growing.chunk_group(ModelKey(method, ("a",), seed, trial)) for method, seed, trial in keys]
    assert groups == [("erm", 0), ("erm", 1), ("rsc", 1), ("erm", 2), ("vrex", 2)]
    seeds = "protocol.seeds=3"
    results, before = {"grown_from": [first.to_json()]}, load("demo", ["methods=[erm,rsc]", seeds])
    fitted = load("demo", ["methods=[rsc,erm]", seeds, "protocol.final_fit=true"])
    assert grown_from(results, before, fitted) == (first,)
    [*earlier, last] = grown_from(results, before, load("demo", ["methods=[rsc,erm,vrex]", seeds]))
    assert earlier == [first] and last == Generation(("erm", "rsc"), (0, 1, 2), 1)


def test_a_run_that_grows_says_what_the_next_look_costs():
    def said(looks, *changes):
        recipe = load("demo", ["methods=[erm,rsc]", "protocol.seeds=3", *changes])
        return growth(before, make_plan(recipe, read_data(recipe)), looks)

    before = load("demo", ["methods=[erm]", "protocol.seeds=3"])
    assert said(0) == "grows by rsc (3 models)", "the first look has the whole α"
    assert said(1) == "grows by rsc (3 models); the next look has α = 0.0125 (xdm-ft explain look)"
    assert "; the next look has α = 0.00625 (" in said(2, "methods=[erm]", "protocol.seeds=4")
    line = said(1, "methods=[erm]", "protocol.final_fit=true")
    assert line.startswith("grows by ") and "look" not in line


# records

OK = Record(ModelKey("erm", ("a",), 0, 0), {}, "ok", train_seconds=1.0, **VIT)
FAILED = Record(ModelKey("erm", ("a",), 0, 0), {}, "failed", "a nan", train_seconds=1.0, **VIT)


@pytest.mark.parametrize(("first", "second"), [("0", "0.1"), ("0.1", "0")])
def test_a_model_that_was_trained_again_counts_as_trained(first, second, tmp_path):
    """Another process than before may train it: neither the names of files nor their order say which line is newer."""
    RunDirectory(tmp_path, first).append(RECORDS, FAILED.to_json())
    RunDirectory(tmp_path, second).append(RECORDS, OK.to_json())
    assert read_records(RunDirectory(tmp_path)) == {OK.key: OK}


def test_records_are_in_the_order_of_the_plan(tmp_path):
    recipe = load("demo", [])
    plan, directory = make_plan(recipe, read_data(recipe)), RunDirectory(tmp_path)
    directory.append(RECORDS, *(Record(model.key, {}, "failed", "why", **VIT).to_json() for model in plan.models[::-1]))
    growing = RunResults(recipe, directory)
    growing.read_all(plan)
    assert [*growing.records] == [model.key for model in plan.models]


@pytest.mark.parametrize(
    ("method", "head", "expected"),
    [
        (ERM, None, 90),  # 10 classes, 8 features
        (ERM, partial(MLP, hidden_width=4), 4 * 8 + 4 + 10 * 4 + 10),
        (XDomainMix, None, 90 + 3 * 8 + 3),  # 3 training domains
        (LinearProbe, None, 90),
        (KNN, NeighbourHead, 0),
        (ZeroShot, None, 0),
    ],
)
def test_trained_parameters_where_no_engine_counts_them(method, head, expected):
    trained = Trained(make_job(method, width=8, **({} if head is None else {"head": head})), {}, None, 0.0)
    assert trained_parameters(trained, trained.job.new_method()) == expected
    assert trained.peak_memory is None, "of a bank, which trains several models at once"


@pytest.mark.slow
@small_pacs
def test_a_resumed_run_keeps_the_precision_and_the_batch_size_of_its_features(caplog):
    """On another machine the defaults of both may be others."""
    short = ONLY_ERM, SKETCH
    begun = small_runs.results(*short, "features.batch_size=7", "features.precision=bf16")["recipe"]["features"]
    assert (begun["batch_size"], begun["precision"]) == (7, "bf16")
    caplog.set_level(logging.INFO, "xdm_ft")
    assert small_runs.results(*short, "protocol.seeds=2")["recipe"]["features"] == begun
    assert "features.precision: bf16, as when this run started" in caplog.messages
    assert inherit_choices(small_runs.recipe(*short, "features.batch_size=5")).features.batch_size == 5


# whole runs


def kept_files():
    """The files of all models but the final fit: a file that is written again has another number."""
    paths = [path for path in RUN.glob("models/*/*/*/*") if path.is_file()]
    assert paths
    return {str(path): (path.stat().st_ino, path.read_bytes()) for path in paths}


def runs_by_key():
    records = small_runs.document(RUN)["runs"]
    return {(r["method"], *r["test_domains"], r["seed"], r["trial"]): json.dumps(r) for r in records}


def without_times(runs):
    return [{key: value for key, value in record.items() if key not in COSTS} for record in runs]


class Stopped(Exception):
    """The process ends here."""


def stop(*_, **__):
    raise Stopped


@pytest.mark.slow
@small_pacs
def test_growing_trains_what_is_new_alone(caplog):
    small_runs.results(*SHORT)
    files_before, runs_before = kept_files(), runs_by_key()
    caplog.set_level(logging.INFO, logger="xdm_ft")
    content = small_runs.results(*GROWN)
    [line] = [line for line in caplog.messages if "grows by" in line]
    assert line == (
        "output/small: grows by groupdro (4 models), rsc (4 models), seed 1 (2 models of the other methods), "
        "the final fit"
    )
    runs_after = runs_by_key()
    assert files_before.items() <= kept_files().items() and runs_before.items() <= runs_after.items()
    assert len(runs_before) == 2 and len(runs_after) == 12
    methods = ["groupdro", "rsc", "erm"]
    assert list(dict.fromkeys(r["method"] for r in content["runs"])) == methods
    rows = [row for row in content["summary"] if row["selection"] == "train_val"]
    assert [(row["method"], row["n"]) for row in rows] == [(method, 2) for method in methods]
    assert content["final_fit"]["status"] == "ok"
    assert content["grown_from"] == [{"methods": ["erm"], "seeds": [0], "trials": 1}]
    assert parse((RUN / "recipe.yaml").read_text(), "written").values == content["recipe"]
    assert not (RUN / "state").exists()

    complete = (RUN / "results.json").read_bytes()
    caplog.clear()
    small_runs.results(*GROWN)
    assert not [line for line in caplog.messages if "grows" in line or "models" in line]
    assert (RUN / "results.json").read_bytes() == complete
    for change, reason in (("protocol.seeds=1", "protocol.seeds: new"), (ONLY_ERM, "methods: no groupdro")):
        with pytest.raises(UserError) as refused:
            run(small_runs.recipe(*GROWN, change, "training.lr=0.01"))
        first, *reasons = str(refused.value).splitlines()
        assert first.startswith("output/small: holds the run of another recipe; set name or output.dir, or delete")
        assert any(line.startswith(f"  {reason}") for line in reasons) and "  training.lr" in reasons, "one per line"
    assert (RUN / "results.json").read_bytes() == complete
    compared = small_runs.results(*GROWN, "report.compare=[[groupdro, erm]]")["recipe"]
    assert parse((RUN / "recipe.yaml").read_text(), "written").values == compared, "of which `export` makes reports"


@pytest.mark.slow
@small_pacs
def test_a_start_that_ends_before_the_first_new_record(monkeypatch):
    """It resumes with the grown recipe, or with the earlier one, as long as results.json is that one's."""
    short = *SHORT, "protocol.test_domains=[photo]"
    grown = *short, "methods=[erm, rsc]"
    small_runs.results(*short)
    before = runs_by_key()
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(RunResults, "write", stop)
        run(small_runs.recipe(*grown))
    recipe = yaml.safe_load((RUN / "recipe.yaml").read_text())
    assert [item["name"] for item in recipe["methods"]] == ["erm", "rsc"], "recipe.yaml is replaced first"
    small_runs.results(*short)
    assert runs_by_key() == before and "grown_from" not in small_runs.document(RUN)
    content = small_runs.results(*grown)
    assert before.items() < runs_by_key().items() and content["grown_from"]
    with pytest.raises(UserError, match="methods: no rsc"):
        run(small_runs.recipe(*short))


@pytest.mark.soak
@small_pacs
@pytest.mark.parametrize("selection", ["train_val", "cross_domain"])
def test_models_share_chunks_with_those_of_their_generation(selection, monkeypatch):
    """Also the models of an interrupted run that grows, and a model of a grown run whose file is damaged."""
    short = *SHORT, f"protocol.selection={selection}"
    grown = *short, "protocol.seeds=3", "methods=[erm, rsc]"
    asked, chunks = [], pieces.chunks  # method, number of test domains, seeds

    def watched(jobs, device):
        asked.append((jobs[0].method, len(jobs[0].test_domains), [job.seed for job in jobs]))
        return chunks(jobs, device)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(results, "summary_of", stop)
        run(small_runs.recipe(*short))
    [lost] = RUN.glob(f"models/erm/sketch/seed0-trial0/{selection}.safetensors")
    first, extra = ("erm", 1, [0, 0]), ("erm", 2, [0] * 5)  # of 3 × 2 extra models one serves both
    monkeypatch.setattr(pieces, "chunks", watched)
    lost.unlink()
    run(small_runs.recipe(*grown))
    assert first in asked and ("erm", 1, [1, 2, 1, 2]) in asked and ("rsc", 1, [0, 1, 2] * 2) in asked
    assert not [seeds for method, _, seeds in asked if method == "erm" and len({seed == 0 for seed in seeds}) == 2]
    assert extra not in asked, "their values are in the state of the interrupted run"
    assert any(domains == 2 for _, domains, _ in asked) == (selection == "cross_domain")
    asked.clear()
    lost.unlink()
    run(small_runs.recipe(*grown))
    assert first in asked and all(method == "erm" and {*seeds} == {0} for method, _, seeds in asked)
    assert (sum(len(seeds) for _, domains, seeds in asked if domains == 2) >= 5) == (selection == "cross_domain")
    records = small_runs.document(RUN)["runs"]
    assert len(records) == 12 and {r["status"] for r in records} == {"ok"}


@pytest.mark.slow
@small_pacs
@pytest.mark.parametrize(
    ("short", "grown"),
    [
        pytest.param(
            ["methods=[erm, {name: xdomainmix, warmup_steps: 2}]"],
            ["methods=[{name: xdomainmix, warmup_steps: 2}, erm+swad, erm]"],
            marks=pytest.mark.soak,
        ),
        pytest.param(
            ["protocol.selection=cross_domain", "protocol.seeds=1"],
            ["protocol.seeds=[0, 4]", "protocol.final_fit=true"],
            marks=pytest.mark.soak,
        ),
        (["methods=[erm, rsc]", TWO, "search.sampler=sobol", "protocol.final_fit=true"],
         ["search.trials=4", "methods=[groupdro, erm, rsc]"]),
    ],
    ids=["methods", "cross_domain", "trials"],
)  # fmt: skip
def test_a_grown_run_agrees_with_a_fresh_one(short, grown):
    short = "protocol.test_domains=[photo, sketch]", *short
    small_runs.results(*short)
    content = small_runs.results(*short, *grown)
    fresh = small_runs.results(*short, *grown, "output.dir=fresh")
    keys = ("method", "test_domains", "seed", "trial", "hparams")
    assert [[r[key] for key in keys] for r in content["runs"]] == [[r[key] for key in keys] for r in fresh["runs"]]
    for one, other in zip(content["summary"], fresh["summary"], strict=True):
        assert one["method"] == other["method"] and one["budget"] == other["budget"]
        assert abs(one["mean"] - other["mean"]) <= 0.002, "0.2 points: heads in other chunks round differently"
    assert content.get("final_fit", {}).get("method") == fresh.get("final_fit", {}).get("method")


@pytest.mark.slow
@small_pacs
def test_models_end_to_end_grow_too_and_solvers_read_features_for_the_first_time():
    short = "encoder.trainable=true", ONLY_ERM, SKETCH, "training={steps: 2, batch_size: 2, evaluate_every: 2}"
    grown = *short, "methods=[linear_probe, erm]", "protocol.seeds=2"
    assert "features" not in small_runs.results(*short)["environment"]
    files_before, runs_before = kept_files(), runs_by_key()
    content = small_runs.results(*grown)
    assert "features" in content["environment"]
    assert files_before.items() <= kept_files().items() and runs_before.items() <= runs_by_key().items()
    fresh = small_runs.results(*short, "protocol.seeds=[1]", "output.dir=fresh")
    [second] = [record for record in content["runs"] if (record["method"], record["seed"]) == ("erm", 1)]
    for record in (second, *fresh["runs"]):
        del record["files"][second["selected"]["train_val"]["weights"]]  # its metadata name the seeds of the recipe
    assert without_times([second]) == without_times(fresh["runs"]), "models alone depend on no other model"
    with pytest.raises(UserError, match=r"differs in\n  methods: no linear_probe$"):
        run(small_runs.recipe(*short, "protocol.seeds=2"))


@pytest.mark.slow
@small_pacs
def test_processes_grow_a_run_as_one_does():
    """Also a search with extra models: the processes share all heads and give the very same files."""
    short = "protocol.selection=cross_domain", ONLY_ERM, "protocol.test_domains=[photo, sketch]", TWO
    grown = *short, "methods=[rsc, erm]", "protocol.seeds=2", "protocol.final_fit=true"
    small_runs.results(*short)
    shutil.copytree("output", "two")
    one = small_runs.results(*grown)
    logs = two_ranks("run", "small.yaml", *grown, "output.dir=two", cwd=Path.cwd())
    assert "".join(logs).count("grows by rsc (8 models), seed 1 (4 models of the other methods), the final fit") == 1
    two = small_runs.document("two/small")
    assert two["environment"]["processes"] == 2
    assert without_times(one["runs"]) == without_times(two["runs"])
    keys = ("summary", "final_fit", "grown_from")
    assert [one[key] for key in keys] == [two[key] for key in keys]
    paths = [*RUN.glob("models/**/*.safetensors")]
    assert len(paths) > 12
    for path in paths:
        assert path.read_bytes() == Path("two", *path.parts[1:]).read_bytes()
