"""What a run logs to another tracker, through Accelerate's own interface of trackers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from accelerate import tracking as accelerate_tracking
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import LoggerType
from small_runs import RECIPE

from xdm_ft.cli.parser import main
from xdm_ft.experiment import tracking
from xdm_ft.storage.tensorboard import read_scalars

pytestmark = pytest.mark.usefixtures("small_pacs")


class Kept(GeneralTracker):
    """Keeps what it receives; `fails`: raises as one without a login does."""

    name, requires_logging_directory, fails = "wandb", False, False
    log_of: ClassVar[list[tuple[str, Any]]] = []

    def __init__(self, project: str, **_: object) -> None:
        super().__init__()
        if Kept.fails:
            raise RuntimeError("no login\nsecond line \x1b[31m")
        Kept.log_of.append(("start", project))

    @property
    def tracker(self) -> None:
        return None

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        Kept.log_of.append(("config", values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None, **_: object) -> None:
        Kept.log_of.append(("log", (step, values)))

    @on_main_process
    def finish(self) -> None:
        Kept.log_of.append(("finish", None))


@pytest.mark.slow
def test_a_tracker_receives_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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
    kinds = [kind for kind, _ in Kept.log_of]
    assert kinds == ["start", "config", *["log"] * 5, "finish"] and Kept.log_of[0][1] == "small"
    config = Kept.log_of[1][1]
    assert config["training.lr"] == 0.05 and config["methods.erm__.head"] == "cosine"
    assert all(isinstance(value, bool | int | float | str) for value in config.values())
    logged = dict(value for kind, value in Kept.log_of if kind == "log")
    assert list(logged) == [2, 4, 6, 8, 10]

    results, events = json.loads(Path("output/small/results.json").read_text()), Path("output/small/events")
    scalars = read_scalars(events)
    for label, name in (("erm", "erm"), ("erm+%C3%A9", "erm__C3_A9")):
        for number, (step, values) in enumerate(logged.items()):
            seeds = [scalars[f"{label}/sketch/seed{seed}"]["train/loss"][number] for seed in (0, 1)]
            assert [one for one, _ in seeds] == [step, step]
            assert values[f"{name}/sketch/train/loss"] == pytest.approx(sum(value for _, value in seeds) / 2)
    own = {row["method"]: row for row in results["summary"] if row["selection"] == "train_val"}
    assert logged[10]["erm/test/accuracy"] == own["erm"]["mean"]
    assert logged[10]["erm/test/accuracy_stderr"] == own["erm"]["stderr"]
    assert logged[10]["erm__C3_A9/sketch/test/accuracy"] == own["erm+é"]["per_test_domain"]["sketch"]["mean"]


@pytest.mark.parametrize("verb", ["run", "validate"])
def test_a_tracker_that_is_not_installed_is_found_before_any_data_is_read(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accelerate_tracking, "_available_trackers", [LoggerType.TENSORBOARD, LoggerType.WANDB])
    Path("small.yaml").write_text(RECIPE.replace("root: data", "root: nowhere"))
    assert main([verb, "small.yaml", "report.log_with=[wandb, mlflow]"]) == 2
    assert capsys.readouterr().err == (
        "xdm-ft: small: report.log_with: the library of mlflow is not installed; install it, or leave it out\n"
    )
    assert main([verb, "small.yaml", "report.log_with=wand"]) == 2
    assert "report.log_with" in capsys.readouterr().err
    assert not Path("output").exists()


def test_means_of_summarised_heads_weigh_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    scalars = {
        "erm/sketch/a": {"train/heads": [(2, 3.0)], "val/loss": [(2, 1.0)]},
        "erm/sketch/b": {"val/loss": [(2, 5.0)]},
    }
    monkeypatch.setattr(tracking, "read_scalars", lambda path: scalars)
    run: Any = SimpleNamespace(path=Path())
    assert tracking.curves(run) == {2: {"erm/sketch/val/loss": 2.0}}


def test_names_stay_distinct() -> None:
    names = tracking._AcceptedNames()
    given = ["a+b", "a_b", "a%b", "a+b/train", "語", "犬"]
    found = [names[name] for name in given]
    assert found == [names[name] for name in given] and len(set(found)) == len(given)
    assert all(name.isascii() and "+" not in name for name in found)
