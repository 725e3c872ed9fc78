"""A run directory as its readers see it: results.json, predictions, learning curves, analysis.json and audit.json."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from xdm_ft.core import ALPHA, ORACLE, DomainSet, ModelKey, honest_rule, set_name
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction
from xdm_ft.recipe.check import read_written
from xdm_ft.recipe.settings import Recipe
from xdm_ft.recipe.text import RecipeText
from xdm_ft.results import Runs, defined_sets
from xdm_ft.results.measured import RunMeasures, measure, models_digest, pick_by_rule, predictions_of
from xdm_ft.results.model import Entries, Record, by_site, held_out_of
from xdm_ft.results.table import Comparison, InterimLook, SummaryRow
from xdm_ft.results.trials import MethodChoice, choose_method, pick_trials, selection_values
from xdm_ft.results.verdicts import judge
from xdm_ft.runtime.errors import UserError, plural, printable
from xdm_ft.storage import json_digest
from xdm_ft.storage.lines import Damaged, OtherVersion, read_object
from xdm_ft.storage.names import images_file
from xdm_ft.storage.results_file import read_results
from xdm_ft.storage.run_directory import ANALYSIS, AUDIT, MEASURED, WRITE_AGAIN, RunDirectory
from xdm_ft.storage.tensorboard import Scalars, read_scalars, sub_run

logger = logging.getLogger("xdm_ft")
MAX_SETS = 12  # held-out sets with figures of their own
ANALYSIS_SCHEMA = 1
AUDIT_VERSION = 2
RUN_AGAIN = "run the recipe again"


@dataclass(frozen=True)
class Run:
    """The results of a run directory."""

    path: Path
    recipe: Recipe = field(repr=False)
    results: dict[str, Any] = field(repr=False)  # all of results.json; its models are made when they are read
    every: list[Record] = field(repr=False)  # of all models: those of `results`
    rows: list[SummaryRow] = field(repr=False)

    @cached_property
    def records(self) -> list[Record]:
        """Of the models that were trained."""
        return [record for record in self.every if record.status == "ok"]

    def refuse_unfinished(self) -> None:
        """Raises `UserError` if the run has no table yet, or not the final fit that its recipe asks for."""
        fit_is_missing = self.recipe.protocol.final_fit and self.final_fit is None
        lacks = "no table" if not self.rows else "no final fit" if fit_is_missing else None
        if lacks is not None:
            raise UserError(f"{self.path}: has {lacks}, as its run is not finished; run the same command to finish it")

    @property
    def held_out_sets(self) -> list[DomainSet]:
        """The sets of domains that are measured as one, in the order of the run."""
        return [*held_out_of(self.records)]

    @property
    def recipe_rule(self) -> str:
        """The selection rule of the recipe."""
        return self.recipe.protocol.selection

    @property
    def rule(self) -> str:
        """The selection rule that may choose a model: the recipe's; if that reads test labels, the first other one."""
        honest = honest_rule(name for record in self.records for name in record.selected)
        return honest if self.recipe_rule == ORACLE and honest else self.recipe_rule

    @property
    def published_rules(self) -> set[str]:
        """The selection rules of its LaTeX and CSV tables: oracle only if it is the recipe's own."""
        return {row.selection for row in self.rows if row.selection != ORACLE or self.recipe_rule == ORACLE}

    @property
    def metric(self) -> str:
        return self.recipe.protocol.metric

    @cached_property
    def picked(self) -> list[Record]:
        """One record per method, held-out domains and seed: the trial that the recipe's own rule picked."""
        picked = pick_trials(self.records, self.recipe_rule, self.metric)
        return [record for record in picked if self.recipe_rule in record.selected]

    @cached_property
    def measured_records(self) -> list[Record]:
        """`picked`, one for each held-out set: the domains of a fold are measured one by one."""
        return by_site(self.picked)

    @cached_property
    def recipe_rows(self) -> list[SummaryRow]:
        """The summary under the recipe's own rule, in the recipe's order of methods."""
        return [row for row in self.rows if row.selection == self.recipe_rule]

    @property
    def rules(self) -> list[str]:
        """The selection rules of the summary; the recipe's own comes first."""
        own_first = sorted(self.rows, key=lambda row: row.selection != self.recipe_rule)
        return list(dict.fromkeys(row.selection for row in own_first))

    @cached_property
    def choice(self) -> MethodChoice | None:
        """The method to use under `rule`; None if no method has a value, and for oracle."""
        rows = [row for row in self.rows if row.selection == self.rule]
        return None if self.rule == ORACLE else choose_method(self.records, rows, self.rule, self.metric)

    @property
    def chosen(self) -> str | None:
        return None if self.choice is None else self.choice.method

    def runs_of(self, method: str, at: Mapping[DomainSet, str] | None = None) -> Runs:
        """Returns the models of a method that `rule` picked. `at`: {held-out set: another method there}."""
        of = dict.fromkeys(self.held_out_sets, method) | {**(at or {})}
        picked = by_site(pick_trials(self.records, self.rule, self.metric))
        records = tuple(record for record in picked if record.method == of[record.test_domains])
        return Runs(method, self.rule, self.metric, defined_sets(picked, self.rule, self.metric), records)

    @cached_property
    def quoted(self) -> Runs:
        """The models whose results are quoted for new data: on each held-out set those of the method that the other
        sets choose, so that no choice has seen the set; of one set those of the chosen method."""
        assert self.choice is not None, "nothing is quoted then"
        return self.runs_of(self.choice.method, self.choice.at)

    @property
    def final_fits(self) -> dict[str, dict[str, Any]]:
        """{method: its final fit}, failed ones too."""
        fits: dict[str, dict[str, Any]] = self.results.get("final_fits", {})
        return fits

    @property
    def final_fit(self) -> dict[str, Any] | None:
        """The method that held-out domains prefer, trained on all images."""
        return self.results.get("final_fit")

    @property
    def failed(self) -> bool:
        """Whether the training of a model failed."""
        return "failed" in [of.status for of in self.every] + [fit["status"] for fit in self.final_fits.values()]

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """The comparisons between rows under all selection rules."""
        return [Comparison.from_json(entry) for entry in self.results["comparisons"]]

    def comparisons_of(self, rule: str) -> list[Comparison]:
        """Returns the comparisons under a selection rule."""
        return [row for row in self.comparisons if row.selection == rule]

    def beside_rows(self, rule: str) -> dict[str, Comparison]:
        """Returns {label of a row: the comparison that is shown beside it}: its first one under its own encoder."""
        encoder_of = {item.label: item.encoder_label for item in self.recipe.methods}
        beside = dict[str, Comparison]()
        for row in self.comparisons_of(rule):
            if encoder_of.get(row.first) == encoder_of.get(row.second):
                beside.setdefault(row.first, row)
        return beside

    @property
    def looks(self) -> list[InterimLook]:
        """The looks at this run, as it grew."""
        return [InterimLook(**entry) for entry in self.results["looks"]]

    @cached_property
    def selection_values(self) -> dict[str, float]:
        """{method: its mean selection value under `rule`}, without methods that have none."""
        rows = [row for row in self.rows if row.selection == self.rule]
        return selection_values(self.records, rows, self.rule, self.metric)

    @cached_property
    def _measured_runs(self) -> list[Runs]:
        labels = [item.label for item in self.recipe.methods]
        by_rule = pick_by_rule(self.every, self.rules, self.metric, labels)
        return [of for by_method in by_rule.values() for of in by_method.values()]

    @cached_property
    def measured(self) -> RunMeasures:
        """What the predictions of the picked models come to. It is made again where its file is lost or of others.

        Raises `UserError` if that cannot be, because predictions are damaged.
        """
        directory, average = RunDirectory(self.path), self.recipe.report.seeds_averaged
        try:
            kept = RunMeasures.read(*directory.arrays(MEASURED))
            if kept.of == models_digest(self._measured_runs, average):
                return kept
        except (Damaged, FileNotFoundError, KeyError, TypeError, ValueError):  # of an edited file, too
            pass
        return measure(self.metric, self._measured_runs, predictions_of(directory, self._measured_runs), average)[0]

    @cached_property
    def measured_if_known(self) -> RunMeasures:
        """`measured`; nothing where it is lost and predictions cannot be read, as in a copy of results.json alone."""
        try:
            return self.measured
        except UserError:
            return RunMeasures("", {}, {})

    def from_zero_shot(self, rule: str) -> dict[tuple[str, DomainSet], Comparison]:
        """Returns {(method, held-out set): how it compares with zero-shot under its encoder there}, with verdicts.

        They are a family of their own, of all methods and held-out sets; those that `report.compare` does not declare
        have no verdict. With one held-out set, verdicts that results.json holds stand instead of theirs. Empty without
        a row of zero-shot, or without predictions.
        """
        if not any(record.deterministic for record in self.every):
            return {}
        kept = self.measured_if_known.from_zero_shot
        rows = {(method, held): row for (of, method, held), row in kept.items() if of == rule}
        stored = {(row.first, row.second): row for of in self.comparisons_of(rule) for row in (of, of.swapped())}
        declared = {frozenset(pair) for pair in self.recipe.declared}
        family = [not declared or {row.first, row.second} in declared for row in rows.values()]
        alpha = self.looks[-1].alpha if self.looks else ALPHA
        judged = judge(self.metric, [*rows.values()], family, alpha=alpha)
        if len(self.held_out_sets) == 1:
            judged = [stored.get((row.first, row.second), row) for row in judged]
        return dict(zip(rows, judged, strict=True))

    @property
    def shown_method(self) -> str | None:
        """The method with figures of its own: that which the rule chose; without one, the first of the recipe."""
        drawn = [row.method for row in self.recipe_rows if any(key[0] == row.method for key in self.measured.pools)]
        return self.chosen if self.chosen in drawn else next(iter(drawn), None)

    def shown_sets(self, method: str | None) -> list[DomainSet]:
        """The held-out sets that are drawn, in the run's order: all, or those where the method does worst."""
        counted = [held for held in self.held_out_sets if (method, held) in self.measured.pools]
        if len(counted) <= MAX_SETS:
            return counted
        sign = 1 if HIGHER_IS_BETTER[self.metric] else -1
        [means] = [row.per_test_domain for row in self.recipe_rows if row.method == method]
        values = {held: sign * float(of["mean"] or 0) for held in counted if (of := means.get(set_name(held)))}
        # ∞: sets where the metric is not defined come last, as nothing is known to be bad there
        worst = sorted(counted, key=lambda held: values.get(held, math.inf))[:MAX_SETS]
        return [held for held in counted if held in worst]

    @cached_property
    def class_names(self) -> list[str]:
        """In the order of the columns of probabilities; [] if no model was trained. Raises `UserError` if damaged."""
        if not self.records:
            return []
        first = self.records[0]
        _, metadata = RunDirectory(self.path).require_tensors(images_file(first.test_domains), first.files, WRITE_AGAIN)
        return list(json.loads(metadata["class_names"]))

    def prediction(self, record: Record) -> Prediction:
        """The predictions under the recipe's own rule, with probabilities. Raises `UserError` if damaged."""
        arrays, key = RunDirectory(self.path).predictions(record.folder, record.files), record.model or record.key
        images = self.images(record if record.model is None else replace(record, key=key, model=None))
        of_model = Prediction.from_arrays(arrays, images, key, self.recipe_rule)
        return of_model if record.model is None else of_model.at(record.test_domains, self.images(record))

    def images(self, record: Record) -> HeldOutImages:
        """The test images of a model, or of one domain of its fold."""
        if record.test_domains not in self._images:
            held = (record.model or record.key).test_domains
            self._images[held] = HeldOutImages.from_arrays(RunDirectory(self.path).test_images(held, record.files))
            if record.fold is not None:
                self._images.update(self._images[held].by_site(held))
        return self._images[record.test_domains]

    def image_names(self, record: Record) -> list[str]:
        """The names of these images in the data."""
        held, positions = (record.model or record.key).test_domains, self.images(record).positions
        names = RunDirectory(self.path).test_images(held, record.files)["names"].tobytes().decode().split("\n")
        return names if positions is None else [names[position] for position in positions]

    @cached_property
    def _images(self) -> dict[DomainSet, HeldOutImages]:
        """The test images that have been read: all models with these test domains share them."""
        return {}

    @cached_property
    def scalars(self) -> dict[str, Scalars]:
        """{sub-run of `events/`: its scalars}, as TensorBoard shows them; without those of another run.

        A sub-run that lacks the value by which the weights of its model were picked is of another run.
        """
        damaged = list[Path]()
        scalars = read_scalars(self.path / "events", damaged)
        self.lost_curves.update(dict.fromkeys(damaged, "is damaged: curves lack points"))
        for record in self.picked:
            name, pick = sub_run(*record.key), record.selected[self.recipe_rule]
            folder, points = self.path / "events" / name, dict(scalars.get(name, {}).get(self.selection_tag, ()))
            # of averaged weights no step has the value
            if not points or pick.value is None or pick.hparams or folder in {path.parent for path in damaged}:
                continue
            # in float32
            if not math.isclose(points.get(pick.step, math.nan), pick.value, rel_tol=1e-6, abs_tol=1e-30):
                logger.warning("%s: is of another run, so its curves are left out; take that of a copy", folder)
                self.lost_curves[folder] = "is of another run: its curves are left out"
                del scalars[name]
        return scalars

    @property
    def selection_tag(self) -> str:
        """The tag of the values by which the recipe's rule selects."""
        return f"{'oracle' if self.recipe_rule == ORACLE else 'val'}/{self.metric}"

    @cached_property
    def lost_curves(self) -> dict[Path, str]:
        """{file or folder of events: what is wrong with it}, once `scalars` are read."""
        return {}

    @cached_property
    def analysis(self) -> dict[str, Any] | None:
        """The content of analysis.json; None if the run has not been analysed. Raises `UserError` if it is damaged."""
        try:
            return RunDirectory(self.path).analysis()
        except Damaged as error:
            path = self.path / ANALYSIS
            raise UserError(f"{path}: is damaged ({error}); run `xdm-ft analyse` again") from error

    def analysed(self, part: str = "") -> list[dict[str, Any]]:
        """Returns the models of analysis.json (for which `part` was measured) in the order of figures; [] without it.

        A model that the run's rule does not pick is left out: since the analysis, a search has grown and found a better
        one. Raises `UserError` if another version wrote the file.
        """
        return [model for model in self._measured if not part or model.get(part)]

    @cached_property
    def _measured(self) -> list[dict[str, Any]]:
        if self.analysis is None:
            return []
        schema = self.analysis.get("schema")
        if schema != ANALYSIS_SCHEMA:
            raise UserError(
                f"{self.path / ANALYSIS}: has schema {schema!r}, and this version reads {ANALYSIS_SCHEMA}; run "
                "`xdm-ft analyse` again"
            )
        order = {label: position for position, label in enumerate(self.drawn_methods)}
        weights = {record.key: record.files.get(record.selected[self.recipe_rule].weights) for record in self.picked}
        models = [model for model in self.analysis["models"] if _key(model) in weights]
        own = [model for model in models if model["weights"] == weights[_key(model)]]
        if len(own) < len(models):
            problem = f"{plural(len(models) - len(own), 'model')} in it {'are' if len(models) - len(own) > 1 else 'is'}"
            logger.warning("%s: %s of another run; run `xdm-ft analyse` again", self.path / ANALYSIS, problem)
        return sorted(own, key=lambda model: order[model["method"]])

    @property
    def not_measured(self) -> list[str]:
        """A note that not all models of the run are in analysis.json, if so."""
        missing = {record.key for record in self.picked} - {_key(model) for model in self.analysed()}
        models = f"{len(missing)} of {plural(len(self.picked), 'model')}"
        return [f"{models} are not measured yet: `xdm-ft analyse` measures them"] if missing else []

    @cached_property
    def audit(self) -> dict[str, Any] | None:
        """The content of audit.json; None if these data have not been audited.

        One that is damaged, of another version, or of other images does not count, and a warning says so: the results
        of the run do not depend on it.
        """
        path = self.path / AUDIT
        if not path.exists():
            return None
        content, reason = dict[str, Any](), ""
        try:
            content = read_object(path)
        except Damaged as error:
            reason = f"is damaged ({error})"
        if not reason and content.get("version") != AUDIT_VERSION:
            reason = f"has version {content.get('version')!r}, and this version of xdm_ft reads {AUDIT_VERSION}"
        if not reason and content["content"] != self.results["environment"]["data"]["content"]:
            reason = "is of other images than the run"
        if not reason and content.get("of") not in (None, audited_part(self.recipe)):
            reason = "is of another run"
        if reason:
            logger.warning("%s: %s; run `xdm-ft audit` again", path, reason)
            return None
        return content

    @cached_property
    def drawn_methods(self) -> list[str]:
        """The methods in the order of figures: those that the recipe compares come first."""
        return [*dict.fromkeys([*chain(*self.recipe.declared), *(item.label for item in self.recipe.methods)])]

    @cached_property
    def drawn_rows(self) -> list[SummaryRow]:
        """`recipe_rows` in the order of figures."""
        return sorted(self.recipe_rows, key=lambda row: self.drawn_methods.index(row.method))


def _key(model: Mapping[str, Any]) -> ModelKey:
    return ModelKey(model["method"], tuple(model["test_domains"]), model["seed"], model["trial"])


def audited_part(recipe: Recipe) -> str:
    """Returns the checksum of what an audit depends on in a recipe, and what stays when a run grows."""
    resolved = recipe.resolved()
    protocol = {key: v for key, v in resolved["protocol"].items() if key not in ("seeds", "final_fit")}
    data = {key: v for key, v in resolved["data"].items() if key != "train_augmentation"}
    training = {key: v for key, v in resolved["training"].items() if key != "mixed_precision"}
    return json_digest([data, protocol, training, resolved.get("encoder"), resolved.get("encoders")])


def is_run(path: Path) -> bool:
    return (path / "results.json").exists()


def read_run(path: Path) -> Run:
    """Reads the results of a run. Raises `UserError` if the folder holds none, or damaged ones."""
    file = path / "results.json"
    if not path.exists():
        raise UserError(f"{path}: does not exist; name a run directory")
    try:
        results = read_results(file, Record.from_json)
    except OtherVersion as error:
        raise UserError(f"{file}: {error.fault}; {RUN_AGAIN} under another name") from error
    except Damaged as error:
        raise UserError(f"{file}: cannot be read as the results of a run ({error}); name a run directory") from error
    recipe = recipe_of(file, results)
    rows = [SummaryRow.from_json(row) for row in results["summary"]]
    run = Run(path, recipe, results | {"runs": Entries(results["runs"])}, results["runs"], rows)
    if others := {record.method for record in run.every} - {item.label for item in recipe.methods} if rows else set():
        raise UserError(f"{file}: was edited: its recipe has no method {min(others)}; {RUN_AGAIN}")
    compared = {side for entry in results["comparisons"] for side in (entry["first"], entry["second"])}
    if others := compared - {item.label for item in recipe.methods}:
        raise UserError(f"{file}: was edited: comparisons has a row {min(others)}, its recipe none; {RUN_AGAIN}")
    counts = {name: len(images) for name, images in results["data"]["images"].items()}
    if odd := [name for name, count in counts.items() if count != len(results["data"]["classes"])]:
        raise UserError(f"{file}: was edited: data.images.{printable(odd[0])} has not a number per class; {RUN_AGAIN}")
    if lacking := {row.method for row in rows} - {record.method for record in run.every}:
        raise UserError(f"{file}: was edited: runs has no model of {min(lacking)}; {RUN_AGAIN}")
    return run


def recipe_of(file: Path, results: Mapping[str, Any]) -> Recipe:
    """Returns the recipe of the content of results.json, a file. Raises `UserError` if this version cannot read it."""
    try:
        return read_written(RecipeText(str(file), results["recipe"]))
    except UserError as error:
        raise UserError(*error.args, f"{file}: needs what its recipe names; put it back, or {RUN_AGAIN}") from error


def encoders_of(results: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Returns {label: what the encoder is and costs}; empty for a run of one encoder."""
    encoders: Mapping[str, Mapping[str, Any]] = results["environment"].get("encoders", {})
    return encoders
