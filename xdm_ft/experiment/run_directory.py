"""The run directory: what it holds, and that only one recipe's run ever writes it."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor

from xdm_ft.data import ImageDataset
from xdm_ft.errors import UserError
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.experiment.heartbeat import wait_for_everyone
from xdm_ft.experiment.results import environment, inputs, summary_of
from xdm_ft.experiment.run_state import RunState
from xdm_ft.experiment.same_recipe import refuse_other_recipe
from xdm_ft.progress import pulse
from xdm_ft.recipe.read import Recipe
from xdm_ft.storage.atomic import order_metadata, replace_file, replace_text, sweep
from xdm_ft.storage.checkpoint import differences
from xdm_ft.storage.checksummed import (
    INPUTS,
    Damaged,
    check_tensors,
    read_arrays,
    read_results,
    seal_results,
    write_arrays,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

    from xdm_ft.experiment.plan import Plan
    from xdm_ft.experiment.prepared import Prepared
    from xdm_ft.training import Identity

Record = dict[str, Any]
logger = logging.getLogger("xdm_ft")
PREDICTIONS = "predictions.safetensors"  # of a model, on its test images
RECORDS = "records"  # folder of the state that holds the records of the models trained so far
WRITING_SHARE = 0.01  # of the time, that writing results.json may take


def identity(record: Mapping[str, Any]) -> Identity:
    return record["method"], tuple(record["test_domains"]), record["seed"], record["trial"]


class RunDirectory(RunState):
    """`<output.dir>/<name>/`. Only the main process writes; every process knows which models are done."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator) -> None:
        super().__init__(Path(recipe.output.dir) / recipe.name, recipe)
        self.accelerator = accelerator
        self.runs: list[Record] = []
        self.summary: list[Record] = []
        self._own: dict[Identity, Record] = {}  # of the models that this process trained
        self._next_write = 0.0  # of results.json, in time.monotonic()
        self.final: Record | None = None  # of the model to ship
        self.inputs: Record = {}  # what the models are trained on, for results.json
        self.about: Record = {}  # what else it says of the data
        self._before: Record = {}  # the environment of an earlier part of this run
        self.lock = FileLock(self.path / "run.lock")
        self.writes = bool(accelerator.is_main_process)  # results.json and what else there is once
        self._process = str(accelerator.process_index)
        self._writer: Any = None

    def __enter__(self) -> RunDirectory:
        if self.writes:
            self._lock()
            self.forget_taken()
        wait_for_everyone(self.accelerator)
        self.runs = self._finished_runs()
        wait_for_everyone(self.accelerator)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
        self.lock.release()

    def _lock(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock.acquire(blocking=False)
        except Timeout as error:
            raise UserError(f"{self.path}: another run is writing here; wait for it, or set output.dir") from error
        except OSError as error:
            raise UserError(f"{self.path}: can not be used as a run directory: {error.strerror}") from error
        written = self.path / "recipe.yaml"
        sweep(self.path)
        if any((self.path / kept).exists() for kept in ("results.json", "state")):
            refuse_other_recipe(written, self.recipe)
        else:
            replace_text(written, self.recipe.as_yaml())

    def _finished_runs(self) -> list[Record]:
        """The records of an earlier, interrupted run of the same recipe; failed ones are tried again."""
        path, runs = self.path / "results.json", list[Record]()
        if path.exists():
            try:
                results = read_results(path)
            except Damaged as error:
                raise UserError(f"{path}: is damaged ({error}); delete it to train its models again") from error
            if "findings" not in results:
                raise UserError(
                    f"{path}: was written by an earlier version, which selected by other values (train_val pooled "
                    "images); set another name or output.dir"
                )
            runs, final, self._before = results["runs"], results.get("final_fit"), results["environment"]
            if final is not None and "weights" in final and self._is_sound(self.path / final["weights"]):
                self.final = final
        known = {identity(run): run for run in runs} | self.remembered_runs()
        return [run for run in known.values() if self._is_whole(run)]

    def remembered_runs(self) -> dict[Identity, Record]:
        """The records that every process has kept of its models, failed and skipped ones too."""
        records = (
            self._read_state(path, "to train its model again")
            for path in sorted((self.path / "state" / RECORDS).rglob("*.json"))
        )
        return {identity(run): run for run in records}

    def trains_on(self, dataset: ImageDataset, prepared: Prepared) -> None:
        """Notes what the models are trained on, at once, so that a run tells which cached features it needs.

        Raises `UserError` where it is not what an earlier part of this run was trained on.
        """
        self.inputs = inputs(dataset, prepared)
        changed = differences({key: self._before[key] for key in INPUTS if key in self._before}, self.inputs)
        if self._before and changed:
            what = {"data": "labels, domains or splits of the data", "features": "images, weights or libraries"}
            named = " and ".join(dict.fromkeys(what[key.partition(".")[0]] for key in changed))
            raise UserError(
                f"{self.path}: {named} have changed since this run was begun ({', '.join(changed)}); "
                "set name or output.dir, or delete the directory"
            )
        if self.writes and not self._before:
            self._write_results()

    def _is_whole(self, run: Record) -> bool:
        """Whether it is the record of a trained model, and all of its files are there and sound."""
        files = [self._predictions_path(identity(run))]
        files += [self.path / selected["weights"] for selected in run["selected"].values()]
        return run["status"] == "ok" and all(self._is_sound(file) for file in dict.fromkeys(files))

    def _is_sound(self, file: Path) -> bool:
        pulse.beat()
        if not file.is_file():
            return False
        try:
            read_arrays(file) if file.name == PREDICTIONS else check_tensors(file)
        except Damaged as error:
            if self.writes:
                logger.warning("%s: is damaged (%s); its model is trained again", file, error)
            return False
        return True

    def begin(self, number: int) -> None:
        """Before the work of one of the processes that this one forks into; 0 is this one itself."""
        if number:
            self._writer, self.writes = None, False
            self._process = f"{self._process}.{number}"

    @property
    def done(self) -> set[Identity]:
        return {identity(run) for run in self.runs}

    def model_folder(self, key: Identity) -> Path:
        method, test_domains, seed, trial = key
        names = [quote(method, safe="+ "), quote(",".join(test_domains), safe=", "), f"seed{seed}-trial{trial}"]
        return Path("models", *names)

    def _predictions_path(self, key: Identity) -> Path:
        return self.path / self.model_folder(key) / PREDICTIONS

    def save_weights(self, key: Identity, rule: str, state: dict[str, Tensor], metadata: dict[str, str]) -> str:
        """Writes the weights that `rule` selected; returns their path relative to the run directory."""
        return self._save(self.model_folder(key) / f"{rule}.safetensors", state, metadata)

    def _save(self, relative: Path, state: dict[str, Tensor], metadata: dict[str, str]) -> str:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

        def write(temporary: Path) -> None:
            save_file(tensors, temporary, metadata)
            order_metadata(temporary)

        replace_file(self.path / relative, write)
        return relative.as_posix()

    def save_final(self, state: dict[str, Tensor], metadata: dict[str, str]) -> str:
        """Writes the weights of the model to ship; returns their path relative to the run directory."""
        return self._save(Path("models", "final_fit", "model.safetensors"), state, metadata)

    def record_scalars(self, tag: str, step: int, values: dict[str, float]) -> None:
        """TensorBoard scalars `<tag>/<name>`, tag being method/held-out domain/seed."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # each process has a file of its own
            events = self.path / "events"
            try:
                self._writer = SummaryWriter(str(events), filename_suffix=f".{self._process}")
            except OSError as error:
                raise UserError(f"{events}: can not be written: {error.strerror}") from error
        for name, value in values.items():
            self._writer.add_scalar(f"{tag}/{name}", value, step)

    def add(self, record: Record, predictions: list[Prediction]) -> None:
        """Makes one more model permanent: first its predictions on the test images, then its record.

        Called by the process that owns the model. The main one writes results.json, unless that took more than a
        fraction of the time lately: with thousands of models it is long.
        """
        key = identity(record)
        if predictions:
            arrays = {f"{p.rule}.{name}": array for p in predictions for name, array in _arrays(p).items()}
            write_arrays(self._predictions_path(key), arrays)
        self.remember(f"{RECORDS}/{self.model_folder(key)}", record)
        if not self.writes:
            return
        self._own[key] = record
        if time.monotonic() >= self._next_write:
            self.runs = [*({identity(run): run for run in self.runs} | self._own).values()]
            started = time.monotonic()
            self._write_results()
            ended = time.monotonic()
            self._next_write = ended + (ended - started) / WRITING_SHARE

    def finish(self, plan: Plan, prepared: Prepared) -> dict[str, Any]:
        """Writes results.json with its summary, in the recipe's order. Returns the results, in every process."""
        wait_for_everyone(self.accelerator)
        if self.writes:
            order = {model.key: place for place, model in enumerate(plan.models)}
            trained = {identity(run): run for run in self.runs} | self.remembered_runs()
            self.runs = sorted(
                (run for key, run in trained.items() if key in order), key=lambda run: order[identity(run)]
            )
            self.summary = summary_of(plan, prepared, self.runs, partial(self._prediction, plan.dataset))
            self._write_results()
        wait_for_everyone(self.accelerator)
        results: dict[str, Any] = json.loads((self.path / "results.json").read_text(encoding="utf-8"))
        return results

    def complete(self, final: Record | None) -> dict[str, Any]:
        """Ends the run: results.json with what there is to say of the model to ship, results.md, nothing to resume."""
        from xdm_ft.report.tables import markdown

        if not self.writes:
            return {"runs": self.runs, "final_fit": final}
        self.final = final
        results = self._write_results()
        replace_text(self.path / "results.md", markdown(results))
        shutil.rmtree(self.path / "state", ignore_errors=True)
        return results

    def _prediction(self, dataset: ImageDataset, record: Mapping[str, Any], rule: str) -> Prediction:
        pulse.beat()
        key = identity(record)
        path = self._predictions_path(key)
        try:
            arrays = read_arrays(path)
        except Damaged as error:
            raise UserError(f"{path}: is damaged ({error}); the same command trains its model again") from error
        rows, predicted = arrays[f"{rule}.rows"], arrays[f"{rule}.predicted"]
        return make_prediction(key, dataset, rule, rows, predicted, arrays.get(f"{rule}.per_image"))

    def _write_results(self) -> dict[str, Any]:
        results = {
            "schema": 1,
            "recipe": self.recipe.resolved(),
            "environment": environment(self.accelerator) | self.inputs,
            **self.about,
            "runs": self.runs,
            "summary": self.summary,
            **({} if self.final is None else {"final_fit": self.final}),
        }
        results["checksum"] = seal_results(results)
        text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        replace_text(self.path / "results.json", text)
        return results


def make_prediction(
    key: Identity,
    dataset: ImageDataset,
    rule: str,
    rows: np.ndarray,
    predicted: np.ndarray,
    per_image: np.ndarray | None,
) -> Prediction:
    """The predictions of one model on its test `rows`, with what the data set knows of those images."""
    return Prediction(
        method=key[0],
        test_domains=key[1],
        seed=key[2],
        rule=rule,
        rows=rows,
        labels=dataset.labels[rows],
        predicted=predicted,
        worst_of=(dataset.domains if dataset.worst_of is None else dataset.worst_of)[rows],
        groups=None if dataset.groups is None else dataset.groups[rows],
        per_image=per_image,
    )


def _arrays(prediction: Prediction) -> dict[str, np.ndarray]:
    arrays = {"rows": prediction.rows, "predicted": prediction.predicted, "per_image": prediction.per_image}
    return {name: array for name, array in arrays.items() if array is not None}
