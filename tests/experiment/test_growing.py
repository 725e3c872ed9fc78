"""A run directory whose recipe grows: only what is new is trained, and what it holds already keeps its bytes."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import pytest
import small_runs
import yaml

from xdm_ft.evaluation.records import ModelKey, Record
from xdm_ft.experiment import pieces, run, summary
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.results import RECORDS, Generation, RunResults, grown_from, refused_changes
from xdm_ft.recipe.check import load
from xdm_ft.recipe.search import Search
from xdm_ft.recipe.text import parse
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.results_file import COSTS
from xdm_ft.storage.run_directory import RunDirectory

RUN = Path("output/small")
SEEDS = "protocol.seeds=3"
SEARCH = "search={trials: 2, preset: frozen}"
SHORT = "methods=[erm]", "protocol.test_domains=[photo, sketch]", "training.steps=4"
GROWN = (*SHORT, "methods=[groupdro, rsc, erm]", "protocol.seeds=2", "protocol.final_fit=true")


def resolved(*overrides: str) -> dict[str, Any]:
    return load("demo", list(overrides)).resolved()


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ([], [], []),
        ([], ["output.dir=elsewhere", "features.batch_size=7", "protocol.seeds=[0,1,2,3,4,9]"], []),
        (["protocol.seeds=2"], ["protocol.seeds=[0,1]", "protocol.final_fit=true"], []),
        (["methods=[erm,rsc]"], ["methods=[vrex,rsc,{name: erm, label: second},erm]"], []),
        (["methods=[erm,rsc]"], ["methods=[rsc,erm]"], []),
        ([SEARCH], [SEARCH.replace("2", "5")], []),
        (["methods=[erm,rsc]"], ["methods=[erm,vrex]"], ["methods: no rsc"]),
        (["methods=[erm,rsc]"], ["methods=[erm,{name: rsc, label: r}]"], ["methods: no rsc"]),
        (["methods=[erm,rsc]"], ["methods=[erm,rsc]", "rsc.batch_drop=0.5"], ["methods.rsc.batch_drop"]),
        (
            ["methods=[{name: erm, label: a}]"],
            ["methods=[{name: rsc, label: a}, erm]"],
            ["methods.a.name", "methods.a.feature_drop", "methods.a.batch_drop"],
        ),
        (["protocol.seeds=3"], ["protocol.seeds=2"], ["protocol.seeds: new ones must follow those of the run"]),
        (["protocol.seeds=2"], ["protocol.seeds=[2,0,1]"], ["protocol.seeds: new ones must follow those of the run"]),
        ([SEARCH.replace("2", "5")], [SEARCH], ["search.trials: 2, was 5"]),
        ([SEARCH], [SEARCH.replace("2", "5"), "search.sampler=sobol"], ["search.sampler"]),
        ([SEARCH], [SEARCH.replace("2", "5"), "search.space.lr={choice: [1, 2]}"], ["search.space.lr"]),
        ([], [SEARCH], ["search.preset"]),
        (["protocol.final_fit=true"], [], ["protocol.final_fit"]),
        (["training.lr=0.1"], ["training.lr=0.2", "protocol.seeds=7"], ["training.lr"]),
    ],
)
def test_what_grows_a_recipe_and_what_does_not(before: list[str], now: list[str], expected: list[str]) -> None:
    found = refused_changes(resolved(*before), resolved(*now))
    assert [name for name in found if name != "search.trials"] == expected


@pytest.mark.parametrize(
    ("before", "now", "grows"),
    [
        ("auto", [0, 1, 2, 3, 4], True),
        ("auto", [*range(7)], True),
        ("auto", [0, 1, 2], False),
        ("auto", [1, 0, 2, 3, 4], False),
        ([0, 1, 2], "auto", True),
        ([*range(10)], "auto", True),
        ([*range(21)], "auto", False),
        ([0, 2], "auto", False),
        ("auto", "auto", True),
    ],
)
def test_planned_looks_continue_seeds_and_are_continued(before: Any, now: Any, grows: bool) -> None:
    recipe = resolved()
    old, new = (recipe | {"protocol": recipe["protocol"] | {"seeds": seeds}} for seeds in (before, now))
    assert refused_changes(old, new) == ([] if grows else ["protocol.seeds: new ones must follow those of the run"])


@pytest.mark.parametrize(
    "edit",
    [
        lambda recipe: recipe.update(methods=["erm"]),
        lambda recipe: recipe.update(methods=None),
        lambda recipe: recipe["methods"].append(3),
        lambda recipe: recipe["protocol"].update(seeds=9),
        lambda recipe: recipe.update(protocol=[]),
        lambda recipe: recipe.update({"protocol.seeds": [0], "protocol": None}),
        lambda recipe: recipe["search"].pop("trials"),
        lambda recipe: recipe["protocol"].update(final_fit="yes"),
    ],
)
def test_what_an_editor_leaves_in_a_recipe_never_grows_it(edit: Callable[[dict[str, Any]], object]) -> None:
    recipe = resolved()
    edit(recipe)
    assert refused_changes(resolved(), recipe)


def test_the_draws_of_a_trial_do_not_depend_on_the_number_of_trials() -> None:
    samplers = get_args(Search.model_fields["sampler"].annotation)
    assert len(samplers) >= 2
    for sampler in samplers:
        few, many = (Search(trials=trials, preset="frozen", sampler=sampler) for trials in (4, 33))
        assert [few.drawn(trial) for trial in range(4)] == [many.drawn(trial) for trial in range(4)]
        assert len({many.drawn(trial)["lr"] for trial in range(1, 33)}) == 32


def test_a_model_belongs_to_the_first_recipe_that_planned_it() -> None:
    first, second = Generation(("erm",), (0, 1), 1), Generation(("erm", "rsc"), (0, 1), 2)
    keys = [("erm", 0, 0), ("erm", 1, 1), ("rsc", 0, 0), ("erm", 2, 0), ("vrex", 0, 0)]
    growing = RunResults(load("demo", []), RunDirectory(Path("nowhere")), [first, second])
    groups = [growing.chunk_group(ModelKey(method, ("a",), seed, trial)) for method, seed, trial in keys]
    assert groups == [("erm", 0), ("erm", 1), ("rsc", 1), ("erm", 2), ("vrex", 2)]
    results = {"recipe": resolved("methods=[erm,rsc]", SEEDS), "grown_from": [first.to_json()]}
    assert grown_from(results, resolved("methods=[rsc,erm]", SEEDS, "protocol.final_fit=true")) == (first,)
    [*earlier, last] = grown_from(results, resolved("methods=[rsc,erm,vrex]", SEEDS))
    assert earlier == [first] and last == Generation(("erm", "rsc"), (0, 1, 2), 1)


def test_records_of_earlier_versions_get_what_their_rows_say(tmp_path: Path) -> None:
    recipe = load("demo", [])
    plan = make_plan(recipe, read_data(recipe))
    directory = RunDirectory(tmp_path)
    directory.append(RECORDS, *(Record(model.key, {}, "failed", "why").to_json() for model in plan.models[::-1]))
    growing = RunResults(recipe, directory)
    growing.read_all(plan)
    records = growing.records.values()
    assert [record.key for record in records] == [model.key for model in plan.models]
    rows = {record.method: (record.encoder, record.trainable, record.deterministic) for record in records}
    assert rows["zero_shot"] == ("demo", False, True) and rows["erm"] == ("demo", False, None)
    assert rows["erm last block"] == ("demo", {"blocks": 1}, None)
    lora = rows["erm LoRA"][1]
    assert isinstance(lora, dict) and lora["lora"]["rank"] == 4
    for record in records:
        assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record
        assert [*record.to_json()][:4] == ["method", "encoder", "trainable", "test_domains"]


def kept_files() -> dict[str, tuple[int, bytes]]:
    """The files of all models but the final fit: a file that is written again has another number."""
    paths = [path for path in RUN.glob("models/*/*/*/*") if path.is_file()]
    assert paths
    return {str(path): (path.stat().st_ino, path.read_bytes()) for path in paths}


def runs_by_key() -> dict[tuple[Any, ...], str]:
    found = json.loads((RUN / "results.json").read_text())["runs"]
    return {(r["method"], *r["test_domains"], r["seed"], r["trial"]): json.dumps(r) for r in found}


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
def test_growing_trains_what_is_new_alone(caplog: pytest.LogCaptureFixture) -> None:
    small_runs.results(*SHORT)
    files_before, runs_before = kept_files(), runs_by_key()
    caplog.set_level(logging.INFO, logger="xdm_ft")
    found = small_runs.results(*GROWN)
    [said] = [line for line in caplog.messages if "grows by" in line]
    assert said == (
        "output/small: grows by groupdro (4 models), rsc (4 models), seed 1 (2 models of the other methods), "
        "the final fit"
    )
    files_after, runs_after = kept_files(), runs_by_key()
    assert files_before.items() <= files_after.items() and runs_before.items() <= runs_after.items()
    assert len(runs_before) == 2 and len(runs_after) == 12
    methods = ["groupdro", "rsc", "erm"]
    assert list(dict.fromkeys(r["method"] for r in found["runs"])) == methods
    rows = [row for row in found["summary"] if row["selection"] == "train_val"]
    assert [(row["method"], row["n"]) for row in rows] == [(method, 2) for method in methods]
    assert found["final_fit"]["status"] == "ok"
    assert found["grown_from"] == [{"methods": ["erm"], "seeds": [0], "trials": 1}]
    assert parse((RUN / "recipe.yaml").read_text(), "written").values == found["recipe"]
    assert not (RUN / "state").exists()

    whole = (RUN / "results.json").read_bytes()
    caplog.clear()
    small_runs.results(*GROWN)
    assert not [line for line in caplog.messages if "grows" in line or "models" in line]
    assert (RUN / "results.json").read_bytes() == whole
    for change, named in (("protocol.seeds=1", "protocol.seeds: new"), ("methods=[erm]", "methods: no groupdro")):
        with pytest.raises(UserError) as refused:
            run(small_runs.recipe(*GROWN, change, "training.lr=0.01"))
        first, *reasons = str(refused.value).splitlines()
        assert first.startswith("output/small: holds the run of another recipe; set name or output.dir, or delete")
        assert any(line.startswith(f"  {named}") for line in reasons) and "  training.lr" in reasons, "one per line"
    assert (RUN / "results.json").read_bytes() == whole


class Stopped(Exception):
    """The process ends here."""


@pytest.mark.usefixtures("small_pacs")
@pytest.mark.slow
@pytest.mark.parametrize("place", ["before results.json", "after results.json"])
def test_a_start_that_ends_before_the_first_new_record(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It resumes with the grown recipe, and with the earlier one only as long as results.json is that one's."""
    short = *SHORT, "protocol.test_domains=[photo]"
    grown = *short, "methods=[erm, rsc]"
    small_runs.results(*short)
    shutil.copytree("output", "undisturbed")
    before = runs_by_key()
    with monkeypatch.context() as patch:

        def stop(*_: object) -> None:
            raise Stopped

        if place == "before results.json":
            patch.setattr(RunResults, "write", stop)
        else:
            patch.setattr("xdm_ft.experiment.models.left_to_train", stop)
        with pytest.raises(Stopped):
            run(small_runs.recipe(*grown))
    recipe = yaml.safe_load((RUN / "recipe.yaml").read_text())
    assert [item["name"] for item in recipe["methods"]] == ["erm", "rsc"], "recipe.yaml is replaced first"
    if place == "before results.json":
        small_runs.results(*short)
        assert runs_by_key() == before and "grown_from" not in json.loads((RUN / "results.json").read_text())
    else:
        with pytest.raises(UserError, match="methods: no rsc"):
            run(small_runs.recipe(*short))
    found = small_runs.results(*grown)
    assert before.items() < runs_by_key().items()
    expected = small_runs.results(*grown, "output.dir=undisturbed")
    assert without_times(found["runs"]) == without_times(expected["runs"])
    assert found["grown_from"] == expected["grown_from"] != []


def without_times(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if key not in COSTS} for one in runs]


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
@pytest.mark.parametrize("selection", ["train_val", "cross_domain"])
def test_models_share_chunks_with_those_of_their_generation(selection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the models of an interrupted run that grows, and a model of a grown run whose file is damaged."""
    short = *SHORT, f"protocol.selection={selection}"
    grown = *short, "protocol.seeds=3", "methods=[erm, rsc]"
    asked: list[tuple[str, int, list[int]]] = []  # method, number of test domains, seeds
    chunks = pieces.chunks

    def watched(jobs: Any, device: Any) -> Any:
        asked.append((jobs[0].method, len(jobs[0].test_domains), [job.seed for job in jobs]))
        return chunks(jobs, device)

    def stop(*_: object) -> None:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(summary, "summary_of", stop)
        with pytest.raises(Stopped):
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
    found = json.loads((RUN / "results.json").read_text())
    assert len(found["runs"]) == 12 and {r["status"] for r in found["runs"]} == {"ok"}


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
@pytest.mark.parametrize(
    ("short", "grown"),
    [
        (["methods=[erm, xdomainmix]", "xdomainmix.warmup_steps=2"], ["methods=[xdomainmix, erm+swad, erm]"]),
        (["protocol.selection=cross_domain", "protocol.seeds=1"], ["protocol.seeds=[0, 4]", "protocol.final_fit=true"]),
        (["methods=[erm, rsc]", SEARCH, "protocol.final_fit=true"], ["search.trials=7"]),
        (["methods=[erm, rsc]", SEARCH, "search.sampler=sobol"], ["search.trials=7", "methods=[groupdro, erm, rsc]"]),
    ],
    ids=["methods", "cross_domain", "trials", "sobol"],
)
def test_a_grown_run_agrees_with_a_fresh_one(short: list[str], grown: list[str]) -> None:
    domains = "protocol.test_domains=[photo, sketch]"
    every = [domains, *short, *grown]
    if any("xdomainmix" in change for change in grown):
        every.append("xdomainmix.warmup_steps=2")
    small_runs.results(domains, *short)
    found = small_runs.results(*every)
    fresh = small_runs.results(*every, "output.dir=fresh")
    assert [(r["method"], r["test_domains"], r["seed"], r["trial"], r["hparams"]) for r in found["runs"]] == [
        (r["method"], r["test_domains"], r["seed"], r["trial"], r["hparams"]) for r in fresh["runs"]
    ]
    for one, other in zip(found["summary"], fresh["summary"], strict=True):
        assert one["method"] == other["method"] and one["budget"] == other["budget"]
        assert abs(one["mean"] - other["mean"]) <= 0.002, "0.2 points: heads in other chunks round differently"
    assert ("final_fit" in found) == ("final_fit" in fresh)
    if "final_fit" in found:
        assert found["final_fit"]["method"] == fresh["final_fit"]["method"]


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
def test_models_end_to_end_grow_too_and_solvers_read_features_for_the_first_time() -> None:
    short = (
        "encoder.trainable=true", "methods=[erm]", "protocol.test_domains=[photo]", "training.steps=2",
        "training.batch_size=2",
    )  # fmt: skip
    grown = *short, "methods=[linear_probe, erm]", "protocol.seeds=2"
    before = small_runs.results(*short)
    assert "features" not in before["environment"]
    files_before, runs_before = kept_files(), runs_by_key()
    found = small_runs.results(*grown)
    assert "features" in found["environment"]
    assert files_before.items() <= kept_files().items() and runs_before.items() <= runs_by_key().items()
    fresh = small_runs.results(*short, "protocol.seeds=[1]", "output.dir=fresh")
    [second] = [one for one in found["runs"] if (one["method"], one["seed"]) == ("erm", 1)]
    assert without_times([second]) == without_times(fresh["runs"]), "models alone depend on no other model"
    with pytest.raises(UserError, match=r"differs in\n  methods: no linear_probe$"):
        run(small_runs.recipe(*short, "protocol.seeds=2"))


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
def test_processes_grow_a_run_as_one_does() -> None:
    short = "protocol.selection=cross_domain", "methods=[erm]", "protocol.test_domains=[photo, sketch]"
    grown = *short, "methods=[rsc, erm]", "protocol.seeds=2", "protocol.final_fit=true"
    small_runs.results(*short)
    shutil.copytree("output", "two")
    one = small_runs.results(*grown)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(files("xdm_ft").joinpath("run.py")), "small.yaml", *grown, "output.dir=two"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("grows by rsc (4 models), seed 1 (2 models of the other methods), the final fit") == 1
    two = json.loads(Path("two/small/results.json").read_text())
    assert two["environment"]["processes"] == 2
    assert without_times(one["runs"]) == without_times(two["runs"])
    assert [one[key] for key in ("summary", "final_fit", "grown_from")] == [
        two[key] for key in ("summary", "final_fit", "grown_from")
    ]
    paths = [*RUN.glob("models/**/*.safetensors")]
    assert len(paths) > 12
    for path in paths:
        assert path.read_bytes() == Path("two", *path.parts[1:]).read_bytes()
