"""The run directory: what it holds, and that only one recipe's run ever writes it."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import yaml
from filelock import FileLock, Timeout
from safetensors.numpy import load_file
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import Tensor

from xdm_ft.atomic import replace_file, replace_text
from xdm_ft.data import ImageDataset
from xdm_ft.errors import UserError
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.experiment.results import environment, summary_of
from xdm_ft.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

    from xdm_ft.experiment.material import Material
    from xdm_ft.experiment.plan import Plan

Record = dict[str, Any]
Identity = tuple[str, tuple[str, ...], int, int]  # method, test domains, seed, trial


def identity(record: Record) -> Identity:
    return record["method"], tuple(record["test_domains"]), record["seed"], record["trial"]


class RunDirectory:
    """`<output.dir>/<name>/`. Only the main process writes; every process knows which models are done."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator) -> None:
        self.recipe, self.accelerator = recipe, accelerator
        self.path = Path(recipe.output.dir) / recipe.name
        self.runs: list[Record] = []
        self.lock = FileLock(self.path / "run.lock")
        self._writer: Any = None

    def __enter__(self) -> RunDirectory:
        if self.accelerator.is_main_process:
            self._claim()
        self.accelerator.wait_for_everyone()
        self.runs = self._finished_runs()
        self.accelerator.wait_for_everyone()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
        self.lock.release()

    def _claim(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock.acquire(blocking=False)
        except Timeout as error:
            raise UserError(f"{self.path}: another run is writing here; wait for it, or set output.dir") from error
        except OSError as error:
            raise UserError(f"{self.path}: can not be used as a run directory: {error.strerror}") from error
        written = self.path / "recipe.yaml"
        if written.exists() and (self.path / "results.json").exists():
            self._refuse_other_recipe(written)
        else:
            replace_text(written, self.recipe.as_yaml())

    def _refuse_other_recipe(self, written: Path) -> None:
        try:
            before = yaml.safe_load(written.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{written}: is damaged; delete the run directory, or set output.dir") from error
        now = yaml.safe_load(self.recipe.as_yaml())
        changed = _differences(_comparable(before), _comparable(now))
        if changed:
            raise UserError(
                f"{self.path}: holds the run of another recipe (differs in {', '.join(changed[:5])}); "
                "set name or output.dir, or delete the directory"
            )

    def _finished_runs(self) -> list[Record]:
        """The records of an earlier, interrupted run of the same recipe; failed ones are tried again."""
        path = self.path / "results.json"
        if not path.exists():
            return []
        try:
            runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
            finished = [
                run for run in runs if run["status"] == "ok" and self._predictions_path(identity(run)).is_file()
            ]
            _ = [identity(run) for run in finished]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: is damaged; delete it to train its models again") from error
        return list(finished)

    @property
    def done(self) -> set[Identity]:
        return {identity(run) for run in self.runs}

    def model_folder(self, key: Identity) -> Path:
        method, test_domains, seed, trial = key
        names = [quote(method, safe="+ "), quote(",".join(test_domains), safe=", "), f"seed{seed}-trial{trial}"]
        return Path("models", *names)

    def _predictions_path(self, key: Identity) -> Path:
        return self.path / self.model_folder(key) / "predictions.safetensors"

    def save_weights(self, key: Identity, rule: str, state: dict[str, Tensor], metadata: dict[str, str]) -> str:
        """Writes the weights that `rule` selected; returns their path relative to the run directory."""
        relative = self.model_folder(key) / f"{rule}.safetensors"
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        replace_file(self.path / relative, lambda temporary: save_file(tensors, temporary, metadata))
        return relative.as_posix()

    def record_scalars(self, tag: str, step: int, values: dict[str, float]) -> None:
        """TensorBoard scalars `<tag>/<name>`, tag being method/held-out domain/seed."""
        if not self.accelerator.is_main_process:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.path / "events"))
        for name, value in values.items():
            self._writer.add_scalar(f"{tag}/{name}", value, step)

    def add(self, record: Record, predictions: list[Prediction]) -> None:
        """Makes one more model permanent: first its predictions on the test images, then its record."""
        if not self.accelerator.is_main_process:
            return
        if predictions:
            arrays = {f"{p.rule}.{name}": array for p in predictions for name, array in _arrays(p).items()}
            replace_file(self._predictions_path(identity(record)), lambda temporary: save_arrays(arrays, temporary))
        self.runs = [run for run in self.runs if identity(run) != identity(record)] + [record]
        self._write_results([])

    def finish(self, plan: Plan, material: Material) -> dict[str, Any]:
        """Writes results.json with its summary, in the recipe's order, and results.md. Returns the results."""
        from xdm_ft.report.tables import markdown

        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return {"runs": self.runs}
        order = {model.key: place for place, model in enumerate(plan.models)}
        self.runs = sorted((run for run in self.runs if identity(run) in order), key=lambda run: order[identity(run)])
        predictions = [p for run in self.runs if run["status"] == "ok" for p in self._predictions(run, plan)]
        results = self._write_results(summary_of(plan, material, self.runs, predictions))
        replace_text(self.path / "results.md", markdown(results))
        return results

    def _predictions(self, run: Record, plan: Plan) -> list[Prediction]:
        arrays = load_file(self._predictions_path(identity(run)))
        return [
            make_prediction(
                identity(run),
                plan.dataset,
                rule,
                arrays[f"{rule}.rows"],
                arrays[f"{rule}.predicted"],
                arrays.get(f"{rule}.per_image"),
            )
            for rule in run["selected"]
        ]

    def _write_results(self, summary: list[Record]) -> dict[str, Any]:
        results = {
            "schema": 1,
            "recipe": self.recipe.resolved(),
            "environment": environment(self.accelerator),
            "runs": self.runs,
            "summary": summary,
        }
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
        domains=dataset.domains[rows],
        groups=None if dataset.groups is None else dataset.groups[rows],
        per_image=per_image,
    )


def _arrays(prediction: Prediction) -> dict[str, np.ndarray]:
    arrays = {"rows": prediction.rows, "predicted": prediction.predicted, "per_image": prediction.per_image}
    return {name: array for name, array in arrays.items() if array is not None}


def _comparable(recipe: Any) -> dict[str, Any]:
    """Where results and features are kept, and how fast features come, changes no number."""
    if not isinstance(recipe, dict):
        return {}
    kept = {key: value for key, value in recipe.items() if key != "output"}
    features = recipe.get("features")
    if isinstance(features, dict):
        kept["features"] = {"precision": features.get("precision")}
    return kept


def _differences(before: Any, now: Any, key: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        names = [*now, *(name for name in before if name not in now)]
        dot = f"{key}." if key else ""
        return [d for name in names for d in _differences(before.get(name), now.get(name), f"{dot}{name}")]
    return [] if before == now else [key]
