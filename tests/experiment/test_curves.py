"""The curves of a run, and its table of hyper-parameters, as TensorBoard itself reads them."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import results
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

from xdm_ft.evaluation.records import ModelKey, Pick, Record
from xdm_ft.experiment import pieces
from xdm_ft.experiment import plan as plan_module
from xdm_ft.experiment import tracking as curves_module
from xdm_ft.experiment.tracking import write_curves, write_sessions
from xdm_ft.runtime.tensors import Score
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.storage.tensorboard import Scalars, read_scalars, sub_run, trial_sub_run

pytestmark = pytest.mark.usefixtures("small_pacs")
SEARCH = ("search={trials: 2, preset: frozen}", "protocol.seeds=2", "protocol.test_domains=[sketch]")
METHODS = "methods=[{name: linear_probe, strengths: [1.0]}, erm, groupdro]"


def rows(folder: Path) -> dict[str, Any]:
    """{name: row} of TensorBoard's table of hyper-parameters."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    backend = backend_context.Context(TBContext(logdir=str(folder), multiplexer=multiplexer, data_provider=provider))
    request = api_pb2.ListSessionGroupsRequest(
        allowed_statuses=[api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE],
        slice_size=1000,
        aggregation_type=api_pb2.AGGREGATION_AVG,
    )
    found = list_session_groups.Handler(context.RequestContext(), backend, "", request).run()
    return {group.name: group for group in found.session_groups}


def metrics(group: Any) -> dict[str, float]:
    return {value.name.tag: value.value for value in group.metric_values}


def of_models(count: int, recipe: Any) -> plan_module.Plan:
    nothing: Any = None
    return plan_module.Plan(recipe, nothing, (nothing,) * count, (), ("train_val",), ())


def of_search(monkeypatch: pytest.MonkeyPatch, name: str, most: int, cores: int) -> tuple[dict[str, Any], Path]:
    """results.json and `events/` of a search, with at most so many models that have curves of their own."""
    monkeypatch.setattr(plan_module, "MOST_MODELS", most)
    monkeypatch.setattr(pieces, "own_cores", lambda: cores)
    found = results(f"name={name}", *SEARCH, METHODS, "protocol.final_fit=true")
    return found, Path("output", name, "events")


@pytest.mark.slow
def test_curves_and_rows_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    found, events = of_search(monkeypatch, "single", 1000, 1)
    models = {(r["method"], tuple(r["test_domains"]), r["seed"], r["trial"]): r for r in found["runs"]}
    assert len(models) == 2 + 4 + 4
    single = read_scalars(events)
    final = sub_run(found["final_fit"]["method"], (), found["final_fit"]["seed"], 0)
    assert set(single) - {final} == {sub_run(*key) for key in models}
    for key, record in models.items():
        scalars, (method, *_), pick = single[sub_run(*key)], key, record["selected"]["train_val"]
        assert scalars["test/accuracy"] == [(pick["step"], pytest.approx(pick["metrics"]["test"]["accuracy"]))]
        assert scalars["selection/accuracy"] == [(pick["step"], pytest.approx(pick["value"]))]
        if method == "linear_probe":
            assert "train/loss" not in scalars
            assert scalars["selection/l2"] == [(pick["step"], pytest.approx(pick["l2"]))]
            continue
        assert [step for step, _ in scalars["train/loss"]] == [2, 4, 6, 8, 10]
        assert dict(scalars["val/accuracy"])[pick["step"]] == pytest.approx(pick["value"])
        oracle = record["selected"]["oracle"]
        assert dict(scalars["oracle/accuracy"])[oracle["step"]] == pytest.approx(oracle["value"])
        assert ("train/largest_weight" in scalars) == (method == "groupdro")
        assert not any(tag.startswith(("val/train_val", "val/oracle", "val/test")) for tag in scalars)

    table = rows(events)
    assert len(table) == 1 + 2 + 2, "a row has both seeds"
    for (method, (domain,), _, trial), record in models.items():
        row = table[f"{method}/{domain}/trial{trial}"]
        of_row = [models[method, (domain,), seed, trial]["selected"]["train_val"] for seed in (0, 1)]
        for name in ("accuracy", "auroc", "nll"):
            mean = sum(pick["metrics"]["test"][name] for pick in of_row) / 2
            assert metrics(row)[f"test/{name}"] == pytest.approx(mean)
        assert row.hparams["method"].string_value == method and row.hparams["held_out"].string_value == domain
        if "lr" in record["hparams"]:
            assert row.hparams["lr"].number_value == record["hparams"]["lr"]
        assert [session.status for session in row.sessions] == [api_pb2.STATUS_SUCCESS] * 2

    # the same search, summarised, in two processes: means and ranges of the same curves, chunk by chunk
    again, summarised = of_search(monkeypatch, "many", 4, 2)
    assert {r["method"] for r in again["runs"]} == {r["method"] for r in found["runs"]}
    heads = read_scalars(summarised)
    trained = {key: single[sub_run(*key)] for key in models if key[0] != "linear_probe"}
    pieces: dict[str, list[Scalars]] = {}
    for method in ("erm", "groupdro"):
        alike = [key for key in trained if key[0] == method]
        pieces[sub_run(*alike[0], heads=True)] = [trained[key] for key in alike]
    assert set(heads) - {final} == {*pieces, *(trial_sub_run(m, t) for m, t in {(key[0], key[3]) for key in models})}
    for name, curves in pieces.items():
        assert {value for _, value in heads[name]["train/heads"]} == {float(len(curves))}
        for tag in ("train/loss", "val/accuracy", "oracle/accuracy", "train/lr"):
            for number, (step, mean) in enumerate(heads[name][tag]):
                values = [curve[tag][number][1] for curve in curves]
                assert step == 2 * number + 2 and mean == pytest.approx(math.fsum(values) / len(values))
                assert heads[name][f"lowest/{tag}"][number] == (step, min(values))
                assert heads[name][f"highest/{tag}"][number] == (step, max(values))
    table = rows(summarised)
    assert set(table) == {"linear_probe/trial0", *(f"{m}/trial{t}" for m in ("erm", "groupdro") for t in (0, 1))}
    picks = [r["selected"]["train_val"] for r in again["runs"] if (r["method"], r["trial"]) == ("erm", 1)]
    assert metrics(table["erm/trial1"])["test/accuracy"] == pytest.approx(
        sum(pick["metrics"]["test"]["accuracy"] for pick in picks) / 2
    )
    assert metrics(table["erm/trial1"])["test/models"] == 2


@pytest.mark.parametrize(
    ("name", "own_rule", "tag"),
    [
        ("loss", "train_val", "train/loss"),
        ("train_val/nll", "train_val", "val/nll"),
        ("val_domain/nll", "train_val", "val/val_domain/nll"),
        ("oracle/nll", "train_val", "oracle/nll"),
        ("oracle/nll", "oracle", "oracle/nll"),
        ("train_val/nll", "oracle", "val/train_val/nll"),
    ],
)
def test_an_oracle_is_no_validation(name: str, own_rule: str, tag: str) -> None:
    assert curves_module._tag(name, own_rule) == tag


@pytest.mark.parametrize(
    ("models", "trainable", "known", "names"),
    [
        (200, False, {}, {"erm/a/seed0", "erm/a/seed1-trial2", "erm/b/seed0"}),
        (201, False, {}, {"erm/a/heads-from-seed0", "erm/b/heads-from-seed0"}),
        (201, True, {}, {"erm/a/seed0", "erm/a/seed1-trial2", "erm/b/seed0"}),
        (201, False, {"final_fit": {3: 1.0}}, {"erm/a/seed0", "erm/a/seed1-trial2", "erm/b/seed0"}),
    ],
)
def test_what_shares_a_curve(
    models: int, trainable: bool, known: dict[str, Any], names: set[str], tmp_path: Path
) -> None:
    """Two heads of one held-out domain and one of another: a head that is alone is summarised like the others."""
    jobs: list[Any] = [
        SimpleNamespace(key=key, test_domains=key[1], external_values=known)
        for key in (("erm", ("a",), 0, 0), ("erm", ("a",), 1, 2), ("erm", ("b",), 0, 0))
    ]
    plan = of_models(models, SimpleNamespace(trains_encoders=trainable))
    directory = RunDirectory(tmp_path)
    for step, evaluated in ((5, jobs), (10, jobs[1:])):  # the first head has stopped before the second evaluation
        write_curves(plan, jobs, step, [(job, {"loss": float(step), "lr": math.nan}) for job in evaluated], directory)
    found = read_scalars(tmp_path / "events")
    assert found.keys() == names
    assert not any("train/lr" in scalars for scalars in found.values()), "what is undefined has no point"
    if "erm/a/heads-from-seed0" in names:
        assert found["erm/a/heads-from-seed0"]["train/heads"] == [(5, 2.0), (10, 1.0)]


def test_a_failed_model_is_a_failed_row_and_a_skipped_one_is_none(tmp_path: Path) -> None:
    """In the table of a run that is summarised, too: there its row has the means of the others."""
    hparams = {"lr": 0.1, "prompts": ["a {}"], "patience": None}
    made = [partial(Record, ModelKey("erm", ("a",), seed, 0), hparams) for seed in range(3)]
    score = Score(0.5, 0.5, 0.5, None, None, 1.0, 0.1, 4, {}, {})
    whole = made[0](status="ok", selected={"train_val": Pick(10, "w", {"test": score}, value=0.75)})
    records = [
        whole,
        made[1](status="failed", reason="nan"),
        made[2](status="skipped", reason="one domain"),
    ]
    protocol = SimpleNamespace(metric="accuracy")
    for models in (3, plan_module.MOST_MODELS + 1):
        write_sessions(
            of_models(models, SimpleNamespace(protocol=protocol)), records, RunDirectory(tmp_path / str(models))
        )
    [row] = rows(tmp_path / "3" / "events").values()
    assert [one.status for one in row.sessions] == [api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE]
    assert [one.name for one in row.sessions] == ["erm/a/seed0", "erm/a/seed1"]
    assert metrics(row)["test/accuracy"] == 0.5 and metrics(row)["selection/accuracy"] == 0.75
    assert "test/auroc" not in metrics(row) and set(row.hparams) == {
        "method", "held_out", "trial", "selection", "lr", "prompts",
    }  # fmt: skip
    [row] = rows(tmp_path / str(models) / "events").values()
    assert [one.status for one in row.sessions] == [api_pb2.STATUS_FAILURE]
    assert metrics(row)["test/accuracy"] == 0.5 and metrics(row)["test/models"] == 1
