"""A run directory as its readers see it: results.json, predictions, learning curves and analysis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from xdm_ft.evaluation.predictions import HeldOutImages, Prediction
from xdm_ft.evaluation.records import Entries, Record, SummaryRow, record_in
from xdm_ft.evaluation.trials import ORACLE, MethodChoice, choose_method, honest_rule, picked_trials, selection_values
from xdm_ft.report.pooled import Pools, pooled
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.names import images_file
from xdm_ft.storage.results_file import read_results
from xdm_ft.storage.run_directory import ANALYSIS, RunDirectory
from xdm_ft.storage.tensorboard import Scalars, read_scalars


@dataclass(frozen=True)
class Run:
    """The results of a run directory."""

    path: Path
    results: dict[str, Any]
    every: list[Record]  # of all models: those of `results`
    rows: list[SummaryRow]

    @cached_property
    def records(self) -> list[Record]:
        """Of the models that were trained."""
        return [record for record in self.every if record.status == "ok"]

    def refuse_unfinished(self) -> None:
        """Raises `UserError` if the run has no table yet, or not the final fit that its recipe asks for."""
        fit_is_missing = self.results["recipe"]["protocol"].get("final_fit") and "final_fit" not in self.results
        lacks = "no table" if not self.rows else "no final fit" if fit_is_missing else None
        if lacks is not None:
            raise UserError(f"{self.path}: has {lacks}, as its run is not finished; run the same command to finish it")

    @property
    def own_rule(self) -> str:
        """The selection rule of the recipe."""
        return str(self.results["recipe"]["protocol"]["selection"])

    @property
    def rule(self) -> str:
        """The selection rule that may choose a model: the recipe's; if that reads test labels, the first other one."""
        honest = honest_rule(name for record in self.records for name in record.selected)
        return honest if self.own_rule == ORACLE and honest else self.own_rule

    @property
    def published_rules(self) -> set[str]:
        """The selection rules of its LaTeX and CSV tables: oracle only if it is the recipe's own."""
        return {row.selection for row in self.rows if row.selection != ORACLE or self.own_rule == ORACLE}

    @property
    def metric(self) -> str:
        return str(self.results["recipe"]["protocol"]["metric"])

    @cached_property
    def picked(self) -> list[Record]:
        """One record per method, held-out domains and seed: the trial that the recipe's own rule picked."""
        found = picked_trials(self.records, self.own_rule, self.metric)
        return [record for record in found if self.own_rule in record.selected]

    @cached_property
    def own_rows(self) -> list[SummaryRow]:
        """The summary under the recipe's own rule, in the recipe's order of methods."""
        return [row for row in self.rows if row.selection == self.own_rule]

    @cached_property
    def choice(self) -> MethodChoice | None:
        """The method that validation prefers under `rule`; None if no method has a value, and for oracle."""
        rows = [row for row in self.rows if row.selection == self.rule]
        return None if self.rule == ORACLE else choose_method(self.records, rows, self.rule, self.metric)

    @property
    def chosen(self) -> str | None:
        return None if self.choice is None else self.choice.method

    @property
    def final_fits(self) -> dict[str, dict[str, Any]]:
        """{method: its final fit}, failed ones too."""
        return final_fits_of(self.results)

    @cached_property
    def selection_values(self) -> dict[str, float]:
        """{method: its mean selection value under `rule`}, without methods that have none."""
        rows = [row for row in self.rows if row.selection == self.rule]
        return selection_values(self.records, rows, self.rule, self.metric)

    @cached_property
    def pools(self) -> Pools:
        """What the page counts in the predictions of the picked models. Raises `UserError` if one is damaged."""
        directory = RunDirectory(self.path)
        sizes = {record.key: directory.predictions_size(record.folder) for record in self.picked}
        return pooled(self.picked, sizes, self.prediction, len(self.class_names), self.own_rule, self.metric)

    @cached_property
    def class_names(self) -> list[str]:
        """In the order of the columns of probabilities; [] if no model was trained. Raises `UserError` if damaged."""
        if not self.records:
            return []
        directory = RunDirectory(self.path)
        file = images_file(self.records[0].test_domains)
        try:
            _, about = directory.tensors(file)
        except (Damaged, FileNotFoundError) as error:
            remedy = "run the same command to write it again"
            raise UserError(f"{self.path / file}: is damaged ({error}); {remedy}") from error
        return list(json.loads(about["class_names"]))

    def prediction(self, record: Record) -> Prediction:
        """A model's predictions under the recipe's own rule, with probabilities. Raises `UserError` if damaged."""
        directory = RunDirectory(self.path)
        arrays, images = directory.predictions(record.folder), self.images(record)
        return Prediction.from_arrays(arrays, images, record.key, self.own_rule)

    def images(self, record: Record) -> HeldOutImages:
        """A model's test images."""
        if record.test_domains not in self._images:
            arrays = RunDirectory(self.path).test_images(record.test_domains)
            self._images[record.test_domains] = HeldOutImages.from_arrays(arrays)
        return self._images[record.test_domains]

    def image_names(self, record: Record) -> list[str]:
        """The names of a model's test images in the data."""
        names = RunDirectory(self.path).test_images(record.test_domains)["names"]
        return names.tobytes().decode().split("\n")

    @cached_property
    def _images(self) -> dict[tuple[str, ...], HeldOutImages]:
        """The test images that have been read: all models with these test domains share them."""
        return {}

    @cached_property
    def scalars(self) -> dict[str, Scalars]:
        """{sub-run of `events/`: its scalars}, as TensorBoard shows them."""
        return read_scalars(self.path / "events")

    @cached_property
    def analysis(self) -> dict[str, Any] | None:
        """The content of analysis.json; None if the run has not been analysed. Raises `UserError` if it is damaged."""
        try:
            return RunDirectory(self.path).analysis()
        except Damaged as error:
            path = self.path / ANALYSIS
            raise UserError(f"{path}: is damaged ({error}); run `xdm-ft analyse` again") from error


def final_fits_of(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns {method: its final fit} of results.json; earlier versions have the one of the chosen method alone."""
    first = results.get("final_fit")
    found: dict[str, dict[str, Any]] = results.get("final_fits", {} if first is None else {first["method"]: first})
    return found


def is_run(path: Path) -> bool:
    return (path / "results.json").exists()


def read_run(path: Path) -> Run:
    """Reads the results of a run. Raises `UserError` if the folder holds none, or damaged ones."""
    file = path / "results.json"
    if not path.exists():
        raise UserError(f"{path}: does not exist; name a run directory")
    try:
        results = read_results(file, record_in(file))
    except Damaged as error:
        raise UserError(f"{file}: can not be read as the results of a run ({error}); name a run directory") from error
    rows = [SummaryRow.from_json(row) for row in results["summary"]]
    return Run(path, results | {"runs": Entries(results["runs"])}, results["runs"], rows)
