"""The curves of a run and its table of hyper-parameters as TensorBoard reads them, and what other trackers receive."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import tracking as accelerate_tracking
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import LoggerType
from small_runs import RECIPE, document, results
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

from xdm_ft.cli.parser import main
from xdm_ft.core import ModelKey, Score
from xdm_ft.experiment import pieces, tracking
from xdm_ft.experiment import plan as plan_module
from xdm_ft.experiment.tracking import write_curves, write_sessions
from xdm_ft.results.model import Pick, Record
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.storage.tensorboard import read_scalars, sub_run

VIT = {"encoder": "vit", "trainable": False}  # of a record

SEARCH = (
    "search={trials: 2, preset: frozen}", "protocol.seeds=2", "protocol.test_domains=[sketch]",
    "methods=[{name: linear_probe, strengths: [1.0]}, erm, groupdro]", "protocol.final_fit=true",
)  # fmt: skip
OK, FAILED = api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE


def rows(folder):
    """{name: row} of TensorBoard's table of hyper-parameters."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    backend = backend_context.Context(TBContext(logdir=str(folder), multiplexer=multiplexer, data_provider=provider))
    request = api_pb2.ListSessionGroupsRequest(
        allowed_statuses=[OK, FAILED], slice_size=1000, aggregation_type=api_pb2.AGGREGATION_AVG
    )
    groups = list_session_groups.Handler(context.RequestContext(), backend, "", request).run()
    return {group.name: group for group in groups.session_groups}


def metrics(row):
    return {value.name.tag: value.value for value in row.metric_values}


def key(record):
    return record["method"], tuple(record["test_domains"]), record["seed"], record["trial"]


def mean(values):
    return pytest.approx(math.fsum(values) / len(values))


@pytest.mark.slow
def test_curves_and_rows_of_a_search_and_of_one_with_too_many_models(small_pacs, monkeypatch):
    content, events = results("name=single", *SEARCH), Path("output/single/events")
    models = {key(record): record for record in content["runs"]}
    assert len(models) == 2 + 4 + 4
    curves = read_scalars(events)
    final = sub_run(content["final_fit"]["method"], (), content["final_fit"]["seed"], 0)
    assert set(curves) - {final} == {sub_run(*key) for key in models}
    for model, record in models.items():
        scalars, pick, oracle = curves[sub_run(*model)], *(record["selected"][rule] for rule in ("train_val", "oracle"))
        assert scalars["test/accuracy"] == [(pick["step"], pytest.approx(pick["metrics"]["test"]["accuracy"]))]
        assert scalars["selection/accuracy"] == [(pick["step"], pytest.approx(pick["value"]))]
        if record["method"] == "linear_probe":
            assert "train/loss" not in scalars
            assert scalars["selection/l2"] == [(pick["step"], pytest.approx(pick["l2"]))]
            continue
        assert [step for step, _ in scalars["train/loss"]] == [2, 4, 6, 8, 10]
        assert dict(scalars["val/accuracy"])[pick["step"]] == pytest.approx(pick["value"])
        assert dict(scalars["oracle/accuracy"])[oracle["step"]] == pytest.approx(oracle["value"])
        assert ("train/largest_weight" in scalars) == (record["method"] == "groupdro")
        assert not any(tag.startswith(("val/train_val", "val/oracle", "val/test")) for tag in scalars)

    table = rows(events)
    assert len(table) == 1 + 2 + 2, "a row has both seeds"
    for (method, domains, _, trial), record in models.items():
        row = table[f"{method}/{domains[0]}/trial{trial}"]
        picks = [models[method, domains, seed, trial]["selected"]["train_val"] for seed in (0, 1)]
        for name in ("accuracy", "auroc", "nll"):
            assert metrics(row)[f"test/{name}"] == mean([pick["metrics"]["test"][name] for pick in picks])
        assert (row.hparams["method"].string_value, row.hparams["held_out"].string_value) == (method, *domains)
        if "lr" in record["hparams"]:
            assert row.hparams["lr"].number_value == record["hparams"]["lr"]
        assert [session.status for session in row.sessions] == [OK] * 2

    monkeypatch.setattr(plan_module, "MAX_MODELS", 9)
    monkeypatch.setattr(pieces, "own_cores", lambda: 2)
    results("name=summarised", *SEARCH)
    summarised = Path("output/summarised/events")
    heads = read_scalars(summarised)
    chunks = {
        sub_run(method, ("sketch",), 0, 0, heads=True): [
            curves[sub_run(*model)] for model in models if model[0] == method
        ]
        for method in ("erm", "groupdro")
    }
    assert set(heads) - {final} == {*chunks} and not rows(summarised)
    for name, single in chunks.items():
        assert {value for _, value in heads[name]["train/heads"]} == {float(len(single))}
        for tag in ("train/loss", "val/accuracy", "oracle/accuracy", "train/lr"):
            for number, (step, value) in enumerate(heads[name][tag]):
                values = [curve[tag][number][1] for curve in single]
                assert step == 2 * number + 2 and value == mean(values)
                assert heads[name][f"lowest/{tag}"][number] == (step, min(values))
                assert heads[name][f"highest/{tag}"][number] == (step, max(values))


def plan_of(count, rule="train_val", **recipe):
    return plan_module.Plan(SimpleNamespace(**recipe), None, (None,) * count, (), (rule,), ())


@pytest.mark.parametrize(
    ("models", "trainable", "external", "names"),
    [
        (200, False, {}, {"erm/a/seed0", "erm/a/seed1-trial2", "erm/b/seed0"}),
        (201, False, {}, {"erm/a/heads-from-seed0", "erm/b/heads-from-seed0"}),
        (201, True, {}, {"erm/a/seed0", "erm/a/seed1-trial2", "erm/b/seed0"}),
        (201, False, {"final_fit": {3: 1.0}}, {"erm/a/seed0", "erm/a/seed1-trial2", "erm/b/seed0"}),
    ],
)
def test_what_shares_a_curve_and_how_its_points_are_named(models, trainable, external, names, tmp_path):
    """Two heads of one held-out domain and one of another: a head that is alone is summarised like the others."""
    jobs = [
        SimpleNamespace(key=key, test_domains=key[1], external_values=external)
        for key in (("erm", ("a",), 0, 0), ("erm", ("a",), 1, 2), ("erm", ("b",), 0, 0))
    ]
    plan, directory = plan_of(models, trains_encoders=trainable), RunDirectory(tmp_path)
    scalars = {"lr": math.nan, "train_val/nll": 1.0, "oracle/nll": 2.0, "val_domain/nll": 3.0}
    for step, evaluated in ((5, jobs), (10, jobs[1:])):  # the first head has stopped before the second evaluation
        write_curves(plan, jobs, step, [(job, {"loss": float(step), **scalars}) for job in evaluated], directory)
    curves = read_scalars(tmp_path / "events")
    assert curves.keys() == names
    for curve in curves.values():
        tags = {tag for tag in curve if not tag.startswith(("lowest/", "highest/", "train/heads"))}
        assert tags == {"train/loss", "val/nll", "oracle/nll", "val/val_domain/nll"}, "what is undefined has no point"
    if "erm/a/heads-from-seed0" in names:
        assert curves["erm/a/heads-from-seed0"]["train/heads"] == [(5, 2.0), (10, 1.0)]

    oracle = RunDirectory(tmp_path / "oracle")  # a curve of the held-out domain does not look like one of validation
    write_curves(plan_of(1, "oracle", trains_encoders=False), jobs[2:], 5, [(jobs[2], scalars)], oracle)
    [curve] = read_scalars(tmp_path / "oracle/events").values()
    assert set(curve) == {"val/train_val/nll", "oracle/nll", "val/val_domain/nll"}


def test_a_failed_model_is_a_failed_row_and_a_skipped_one_is_none(tmp_path):
    hparams = {"lr": 0.1, "prompts": ["a {}"], "patience": None}
    score = Score(0.5, 0.5, 0.5, None, None, 1.0, 0.1, 4, {}, {})
    outcomes = (
        {"status": "ok", "selected": {"train_val": Pick(10, "w", {"test": score}, value=0.75)}},
        {"status": "failed", "reason": "nan"},
        {"status": "skipped", "reason": "one domain"},
    )
    records = [
        Record(ModelKey("erm", ("a",), seed, 0), hparams, **outcome, **VIT) for seed, outcome in enumerate(outcomes)
    ]
    write_sessions(plan_of(3, protocol=SimpleNamespace(metric="accuracy")), records, RunDirectory(tmp_path))
    [row] = rows(tmp_path / "events").values()
    assert [session.status for session in row.sessions] == [OK, FAILED]
    assert [session.name for session in row.sessions] == ["erm/a/seed0", "erm/a/seed1"]
    assert metrics(row)["test/accuracy"] == 0.5 and metrics(row)["selection/accuracy"] == 0.75
    assert "test/auroc" not in metrics(row)
    assert set(row.hparams) == {"method", "held_out", "trial", "selection", "lr", "prompts"}


class Kept(GeneralTracker):
    """Keeps what it receives; `fails`: raises as one without a login does."""

    name, requires_logging_directory, fails = "wandb", False, False
    received = []

    def __init__(self, project, **_):
        super().__init__()
        if Kept.fails:
            raise RuntimeError("no login\nsecond line \x1b[31m")
        Kept.received.append(("start", project))

    @property
    def tracker(self):
        return None

    @on_main_process
    def log(self, values, step, **_):
        Kept.received.append(("log", (step, values)))

    @on_main_process
    def finish(self):
        Kept.received.append(("finish", None))


@pytest.mark.slow
def test_a_tracker_receives_the_run(small_pacs, monkeypatch, capsys):
    monkeypatch.setitem(accelerate_tracking.LOGGER_TYPE_TO_CLASS, "wandb", Kept)
    monkeypatch.setattr(accelerate_tracking, "_available_trackers", [LoggerType.WANDB])
    monkeypatch.setattr(Kept, "fails", True)
    Path("small.yaml").write_text(RECIPE)
    command = ["run", "small.yaml", "report.log_with=wandb", "protocol.seeds=2", "protocol.test_domains=[sketch]"]
    command += ["methods=[erm, {name: erm, label: erm+é, head: cosine}]"]
    assert main(command) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("xdm-ft: ")]
    assert "report.log_with: wandb: no login\\nsecond line \\x1b[31m; the run is complete" in line
    assert Path("output/small/results.md").exists()

    monkeypatch.setattr(Kept, "fails", False)
    assert main(command) == 0
    assert [kind for kind, _ in Kept.received] == ["start", *["log"] * 5, "finish"]
    assert Kept.received[0][1] == "small"
    logged = dict(value for kind, value in Kept.received if kind == "log")
    assert list(logged) == [2, 4, 6, 8, 10]

    scalars = read_scalars(Path("output/small/events"))
    for label, name in (("erm", "erm"), ("erm+%C3%A9", "erm__C3_A9")):
        for number, (step, values) in enumerate(logged.items()):
            seeds = [scalars[f"{label}/sketch/seed{seed}"]["train/loss"][number] for seed in (0, 1)]
            assert [number for number, _ in seeds] == [step, step]
            assert values[f"{name}/sketch/train/loss"] == mean([value for _, value in seeds])
    summary = {row["method"]: row for row in document("output/small")["summary"] if row["selection"] == "train_val"}
    assert logged[10]["erm/test/accuracy"] == summary["erm"]["mean"]
    assert logged[10]["erm/test/accuracy_stderr"] == summary["erm"]["stderr"]
    assert logged[10]["erm__C3_A9/sketch/test/accuracy"] == summary["erm+é"]["per_test_domain"]["sketch"]["mean"]


@pytest.mark.parametrize("verb", ["run", "validate"])
def test_a_tracker_that_is_not_installed_is_found_before_any_data_is_read(verb, in_folder, monkeypatch, capsys):
    monkeypatch.setattr(accelerate_tracking, "_available_trackers", [LoggerType.TENSORBOARD, LoggerType.WANDB])
    Path("small.yaml").write_text(RECIPE.replace("root: data", "root: nowhere"))
    assert main([verb, "small.yaml", "report.log_with=[wandb, mlflow]"]) == 2
    assert capsys.readouterr().err == (
        "xdm-ft: small: report.log_with: the library of mlflow is not installed; install it, or leave it out\n"
    )
    assert main([verb, "small.yaml", "report.log_with=wand"]) == 2
    assert "report.log_with" in capsys.readouterr().err
    assert not Path("output").exists()


def test_means_of_summarised_heads_weigh_by_their_number(monkeypatch):
    scalars = {
        "erm/sketch/a": {"train/heads": [(2, 3.0)], "val/loss": [(2, 1.0)]},
        "erm/sketch/b": {"val/loss": [(2, 5.0)]},
    }
    monkeypatch.setattr(tracking, "read_scalars", lambda path: scalars)
    assert tracking.curves(SimpleNamespace(path=Path())) == {2: {"erm/sketch/val/loss": 2.0}}
