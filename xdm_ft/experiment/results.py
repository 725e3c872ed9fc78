"""What a run keeps: records with their files, the summary, and results.json."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from xdm_ft.core import DomainSet, ModelKey
from xdm_ft.cut import LastBlocks, LowRank, Trainable
from xdm_ft.evaluation.metrics import IN_PERCENT
from xdm_ft.experiment.data_checks import Finding, divided_groups
from xdm_ft.experiment.plan import Plan, annotations_digest, augmentation, augmentations
from xdm_ft.experiment.prepare import Prepared
from xdm_ft.experiment.resume import (
    GROWN_FROM,
    NEW_DIRECTORY,
    Generation,
    code_of_rows,
    comparable,
    edited_rows,
    grown_from,
    row_digest,
)
from xdm_ft.images import ImageDataset
from xdm_ft.protocol.site_class import images_per_class
from xdm_ft.recipe.settings import Recipe
from xdm_ft.results.measured import pick_by_rule, predictions_of
from xdm_ft.results.model import Entries, Record
from xdm_ft.results.run import Run, recipe_of
from xdm_ft.results.summary import (
    BENCHMARKS,
    Compared,
    Summary,
    benchmark_of,
    erm_of_each,
    images_tested,
    look_at,
    place_of,
    protocol_line,
    summarise,
)
from xdm_ft.results.table import InterimLook
from xdm_ft.results.trials import MethodChoice, choose_method
from xdm_ft.runtime.errors import UserError, join_names, plural
from xdm_ft.runtime.progress import progress
from xdm_ft.runtime.watchdog import wait_for_everyone
from xdm_ft.storage.checkpoint import differences
from xdm_ft.storage.lines import OtherVersion
from xdm_ft.storage.names import images_file, is_of_one_model, predictions_in
from xdm_ft.storage.results_file import INPUTS
from xdm_ft.storage.run_directory import RESULTS, RunDirectory
from xdm_ft.storage.tensors import TensorFiles
from xdm_ft.training.end_to_end.model import cut_of

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
KEEP_SECONDS = 5.0  # outcomes are made safe on the disk together, after this time at the latest
KEEP_SHARED_SECONDS = 30.0  # those in a shared file, which is written whole each time
MAX_WAITING = 128_000_000  # bytes of a shared file's entries in memory
LIBRARIES = ("xdm_ft", "torch", "torchvision", "timm", "open_clip_torch", "accelerate", "numpy", "pillow")
RECORDS = "records"  # kind of the lines that hold records of models
INPUT_WORDS = {
    "data.content": "images",
    "data.images": "the number of images",
    "data.annotations": "labels, soft labels, domains or splits of the data",
    "encoder": "the encoder's weights",
    "features": "weights, libraries or settings that determine features",
}


class RunResults:
    """The results of a run while it lasts. The main process writes results.json from them and never reads it again."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, generations: Sequence[Generation] = ()) -> None:
        """`generations`: of the recipes before the present one."""
        self.recipe, self.directory, self.generations = recipe, directory, generations
        self.records: dict[ModelKey, Record] = {}
        self.final_fits: dict[str, dict[str, Any]] = {}  # {method: final fit}
        self.label_curve: dict[str, Any] | None = None
        self.known_files = dict[str, str]()  # {address of a file that models share: checksum} of earlier runs here
        self.common: dict[DomainSet, dict[str, str]] = {}  # {test domains: files that models of all methods share}
        self.summary = Summary([], [], [])
        self.environment: dict[str, Any] = {}
        self.data: dict[str, Any] = {}  # `data_facts`
        self.edited: list[str] = []  # labels of rows whose code has changed since their models trained
        self.recipe_before: Recipe | None = None  # of results.json, as `environment_before`; None: not written
        self.environment_before: dict[str, Any] | None = None

    @classmethod
    def resume(cls, directory: RunDirectory, recipe: Recipe, accelerator: Accelerator) -> RunResults:
        """Reads what earlier runs in the directory finished, for a run of `recipe`. All processes call this.

        Models that failed or whose files are damaged are left out, so that they are trained again. Raises `UserError`
        if results.json is damaged, or another version wrote it.
        """
        before = directory.results(Record.from_json)
        written = None if before is None else recipe_of(directory.path / RESULTS, before)
        earlier = () if before is None or written is None else grown_from(before, written, recipe)
        results = cls(recipe, directory, earlier)
        if before is not None:
            results.recipe_before, results.environment_before = written, before["environment"]
            results.summary = Summary([], [], [InterimLook(**entry) for entry in before["looks"]])
            results.label_curve = before.get("label_curve")
            results.final_fits = {
                method: fit
                for method, fit in before.get("final_fits", {}).items()
                if "weights" in fit and directory.verify_or_warn(fit["weights"], fit["files"])
            }
            entries = (record.files for record in before["runs"])
            files = (*entries, *(fit.get("files", {}) for fit in before.get("final_fits", {}).values()))
            results.known_files = {
                address: digest for of in files for address, digest in of.items() if not is_of_one_model(address)
            }
        # lines are written for every model, results.json only now and then
        records = {record.key: record for record in (before or {"runs": []})["runs"]} | read_records(directory, recipe)
        intact = set[ModelKey]()
        with progress("checking", len(records), "models", bool(accelerator.is_main_process)) as bar:
            for record in sorted(records.values(), key=lambda record: record.folder):  # heads of one file in a row
                if _verify_or_warn(record, directory):
                    intact.add(record.key)
                bar.advance()
        results.records = {key: record for key, record in records.items() if key in intact}
        wait_for_everyone(accelerator)  # all processes must have read before the main one writes
        return results

    def begin(self, environment: dict[str, Any], data: dict[str, Any]) -> None:
        """Sets what this run computes on and with, and writes results.json unless it has this recipe and code.

        This comes before training: `cache prune --unreferenced` reads from results.json which features are in use, and
        a run that grows again reads which models this recipe has planned. Warns of rows whose code has changed.
        """
        before, known = self.recipe_before, {} if self.environment_before is None else self.environment_before["code"]
        code = code_of_rows(self.recipe, known, {key.method for key in self.records})
        self.environment, self.data, self.edited = environment | {"code": code}, data, edited_rows(self.recipe, code)
        if self.edited:
            logger.warning(
                "methods: the code of %s has changed since its models trained, which keep their numbers; to train "
                "again, add a row with another label",
                join_names(self.edited),
            )
        if before is None or known != code or comparable(before.resolved()) != comparable(self.recipe.resolved()):
            self.write()

    def chunk_group(self, key: ModelKey) -> tuple[str, int]:
        """Returns method and generation of a model. Only models with equal ones share chunks of heads."""
        planned = [number for number, generation in enumerate(self.generations) if generation.plans(key)]
        return key.method, planned[0] if planned else len(self.generations)

    def add(self, records: Iterable[Record]) -> None:
        """Adds records that are in the run directory, and rewrites results.json unless that would take too long."""
        new = {record.key: record for record in records}
        self.records |= new
        if new and self.directory.results_are_due:
            self.write()

    def read_all(self, plan: Plan) -> None:
        """Adds the records of all processes, in the order of the plan."""
        records = self.records | read_records(self.directory, self.recipe)
        self.records = {model.key: records[model.key] for model in plan.models if model.key in records}

    @property
    def choice(self) -> MethodChoice | None:
        """The method that held-out domains prefer; None if no method has a value, as long as models train."""
        protocol = self.recipe.protocol
        rows = [row for row in self.summary.rows if row.selection == protocol.selection]
        return choose_method([*self.records.values()], rows, protocol.selection, protocol.metric)

    def with_common(self, record: Record) -> Record:
        """Returns the record with the checksums of the files that its model shares with others, too."""
        if record.status != "ok" or record.test_domains not in self.common:
            return record
        common = self.common[record.test_domains]
        if record.trainable is not False:  # a model that has trained its encoder has a reference of its own
            common = {file: common[file] for file in common if file == images_file(record.test_domains)}
        return dataclasses.replace(record, files=record.files | common)

    def write(self) -> Run:
        """Returns the results; the main process writes them."""
        records, rows = [self.with_common(record) for record in self.records.values()], self.summary.rows
        choice = self.choice if self.final_fits else None
        final_fit = None if choice is None else self.final_fits.get(choice.method)
        document = {
            "schema": 1,
            "recipe": self.recipe.resolved(),
            "environment": self.environment,
            **self.data,
            **({GROWN_FROM: [generation.to_json() for generation in self.generations]} if self.generations else {}),
            "runs": Entries(records),
            "summary": [row.to_json() for row in rows],
            "comparisons": [comparison.to_json() for comparison in self.summary.comparisons],
            "looks": [look.to_json() for look in self.summary.looks],
            **({} if final_fit is None else {"final_fit": final_fit}),
            **({"final_fits": self.final_fits} if self.final_fits else {}),
            **({} if self.label_curve is None else {"label_curve": self.label_curve}),
        }
        if self.directory.main:
            self.directory.write_results(document)
        return Run(self.directory.path, self.recipe, document, records, rows)


def refuse_other_inputs(
    path: Path, before: Mapping[str, Any] | None, now: Mapping[str, Any], remedy: str = NEW_DIRECTORY
) -> None:
    """Raises `UserError` if models of the run directory `path` were trained on other inputs than `now` (`inputs`).

    `before`: the environment in its results.json. Parts that one of them lacks are not compared: a run that grows may
    read features or a cut for the first time.
    """

    def shared(value: Any, other: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(other, dict):
            return value
        return {key: shared(value[key], other[key]) for key in value if key in other}

    old = {key: before[key] for key in INPUTS if key in before} if before is not None else {}
    changed = differences(shared(old, now), shared(now, old))
    if changed:
        words = INPUT_WORDS | ({} if "encoder" in now else {"data.content": "the given features"})
        named = [noun for key, noun in words.items() if any(changed_key.startswith(key) for changed_key in changed)]
        if len(named) > 1 and any(changed_key.startswith("encoder") for changed_key in changed):
            named.remove(INPUT_WORDS["features"])  # they follow from the weights
        raise UserError(
            f"{path}: {' and '.join(named)} have changed since this run started ({', '.join(changed)}); {remedy}"
        )


def read_records(directory: RunDirectory, recipe: Recipe | None = None) -> dict[ModelKey, Record]:
    """Returns the records in the lines of all processes, including those of failed and skipped models.

    With a recipe: without those that another run has written. Raises `UserError` if another version wrote a line.
    """
    records: dict[ModelKey, Record] = {}
    for line in lines_of(directory, RECORDS, recipe, lambda line: str(line.get("method"))):
        try:
            record = Record.from_json(line)
        except (KeyError, TypeError, AttributeError) as error:
            path = directory.path / "state" / RECORDS
            fault = OtherVersion(f"it lacks {error}" if isinstance(error, KeyError) else str(error)).fault
            raise UserError(f"{path}: {fault}; delete it to train its models again") from error
        # the lines of one process are in order, those of two are not: a model that failed, or whose files were damaged,
        # may have been trained again; heads of a large run may then lie elsewhere, on another kind of device
        before = records.get(record.key)
        if before is not None and before.status == "ok":
            if record.status != "ok":
                continue
            again = "its model was trained again"
            if record.folder != before.folder and _verify_or_warn(before, directory, again):
                continue
        records[record.key] = record
    return records


def lines_of(
    directory: RunDirectory, kind: str, recipe: Recipe | None, method: Callable[[Any], str]
) -> Iterator[dict[str, Any]]:
    """Yields the lines of that kind whose `of` is the `row_digest` of their `method`, and warns of others."""
    expected = {} if recipe is None else {item.label: row_digest(recipe, item.label) for item in recipe.methods}
    others = 0
    for line in directory.lines(kind):
        if (of := line.pop("of", None)) in (None, expected.get(method(line), of)):
            yield line
        else:
            others += 1
    if others and directory.main:
        path = directory.path / "state" / kind
        logger.warning("%s: %s of another run; training takes their place", path, plural(others, "line"))


def _verify_or_warn(record: Record, directory: RunDirectory, remedy: str | None = None) -> bool:
    """Returns whether the model was trained without failure and all of its files are intact."""
    files = [predictions_in(record.folder), *(pick.weights for pick in record.selected.values()), *record.files]
    own = filter(is_of_one_model, dict.fromkeys(files))
    return (
        record.status == "ok"
        and bool(record.files)
        and all(directory.verify_or_warn(file, record.files, remedy) for file in own)
    )


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training: a line, which marks the model as done, and the files that the line refers to."""

    kind: str  # of the line, as in `RunDirectory.append`
    line: Record | dict[str, Any]
    files: Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, str]]] = field(default_factory=dict)
    """{address: (tensors, metadata)} of its weights, predictions, and reference for distances"""


def save(
    outcomes: Iterable[Outcome], directory: RunDirectory, writes: bool = True, of: str | None = None
) -> list[Record]:
    """Writes the files of outcomes, then their lines, so that a line never refers to a missing file.

    Outcomes that come within `KEEP_SECONDS`, or `KEEP_SHARED_SECONDS` if they share a file, are made safe on the disk
    together; a killed run loses those only. `writes` False: another process writes, and all compute the outcomes.
    `of`: what lines hold of the run that they belong to, see `row_digest`.

    Returns the records among the outcomes.
    """
    records, lines, began = list[Record](), dict[str, list[Any]](), time.monotonic()
    with TensorFiles() as files:

        def keep() -> None:
            files.replace()
            for kind, of_kind in lines.items():
                directory.append(kind, *of_kind)
            lines.clear()

        for outcome in outcomes:
            if not writes:
                continue
            line, digests = outcome.line, dict[str, str]()
            for address, (tensors, metadata) in outcome.files.items():
                digests[address] = directory.write_tensors(address, tensors, metadata, files)
            if isinstance(line, Record):
                line = dataclasses.replace(line, files=digests)
                records.append(line)
                line = line.to_json()
            elif digests:
                line = {**line, "files": digests}
            if of is not None:
                line = {"of": of, **line}  # a final fit has an identity of its own
            lines.setdefault(outcome.kind, []).append(line)
            waiting = files.waiting_bytes
            if time.monotonic() > began + (KEEP_SHARED_SECONDS if waiting else KEEP_SECONDS) or waiting > MAX_WAITING:
                keep()
                began = time.monotonic()
        keep()
    return records


def environment(accelerator: Accelerator) -> dict[str, Any]:
    """Returns the software and hardware of the run, for results.json."""
    import torch

    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": accelerator.device.type,
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "mixed_precision": accelerator.mixed_precision,
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def inputs(dataset: ImageDataset, prepared: Prepared) -> dict[str, Any]:
    """Returns the identity of all that models are trained on: annotations, images, weights, and the cached features."""
    data = {"images": len(dataset), "annotations": annotations_digest(dataset), "content": prepared.content}
    if dataset.soft_labels is not None:
        data["without_soft_labels"] = annotations_digest(dataset, with_soft_labels=False)
    if dataset.intensity is not None:
        data["intensity"] = dataset.intensity.model_dump(mode="json")
    identity: dict[str, Any] = {"data": data}
    for label, encoder in prepared.encoders.items():
        features = {} if encoder.features is None or not encoder.features.key else {"key": encoder.features.key}
        cuts = {
            cut_of(encoder.encoder, trainable).name: None if cached is None else cached.key
            for trainable, cached in encoder.activations.items()
            if isinstance(trainable, LastBlocks | LowRank)
        }
        for name, value in (
            ("encoder", {"weights": encoder.weights} if encoder.weights else {}),
            ("features", features | ({"cuts": cuts} if cuts else {})),
        ):
            if value and label is None:
                identity[name] = value
            elif value:
                identity.setdefault(name, {})[label] = value
    return identity


def data_facts(plan: Plan, findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the other facts on the data in results.json: its size, whether test domains are unseen, its faults."""
    dataset = plan.dataset
    counts = dict(zip(dataset.domain_names, images_per_class(dataset).tolist(), strict=True))
    groups: dict[str, Any] = {}
    if dataset.groups is not None:
        divided = divided_groups(dataset, plan.splits).items()
        groups = {"groups": len(np.unique(dataset.groups)), "divided": [f"{n} in {parts}" for parts, (n, _) in divided]}
    if dataset.small_domains:
        groups["small_domains"] = list(dataset.small_domains)
    return {
        "data": {"classes": list(dataset.class_names), "images": counts, **groups},
        "tested_on": plan.splits[0].tested_on,
        "findings": [finding.line for finding in findings if finding.remedy is not None],
    }


def summary_of(plan: Plan, prepared: Prepared, results: RunResults) -> Summary:
    """Returns the rows in the recipe's order, the comparisons between them, and the looks at this run with this one.

    Writes measured.safetensors, too.
    """
    records, looks = [*map(results.with_common, results.records.values())], results.summary.looks
    recipe, metric, methods = plan.recipe, plan.recipe.protocol.metric, plan.recipe.methods
    benchmark, margin = benchmark_of(recipe.data, images_tested(records)), recipe.report.margin
    labels, deterministic = [item.label for item in methods], [item.label for item in methods if item.is_text]
    [of_methods] = pick_by_rule(records, plan.rules[:1], metric, labels, deterministic).values()
    number, look = place_of(look_at(of_methods.values(), recipe.declared), looks)
    before = looks[: number - 1]
    found = summarise(
        records,
        partial(predictions_of, results.directory),
        methods=labels,
        rules={rule: protocol_of(plan, prepared, rule) for rule in plan.rules},
        metric=metric,
        references=references(recipe),
        compare=recipe.declared,
        encoders=list(dict.fromkeys(item.encoder_label for item in methods if item.encoder_label is not None)),
        deterministic=deterministic,
        augmentations={item.label: augmentation(recipe, item) for item in methods},
        class_weights={item.label: "balanced" for item in methods if recipe.class_weights_of(item) == "balanced"},
        convention=BENCHMARKS[benchmark][0] if benchmark else None,
        look=(number, look.alpha),
        before=before,
        margin=None if margin is None else margin / (100 if metric in IN_PERCENT else 1),
        average=recipe.report.seeds_averaged,
        edited=results.edited,
    )
    assert found.measured is not None
    found.measured.write(results.directory)
    judged = [row for row in found.comparisons if row.p_here is not None and row.p_here.holm is not None]
    return Summary(found.rows, found.comparisons, [*before, look.with_found(judged, before)] if judged else [*looks])


def references(recipe: Recipe) -> dict[str, str]:
    """Returns {label of a method: label of the ERM that it is compared with}, as `erm_of_each` has it."""
    compared = list[Compared]()
    for item in recipe.runnable_methods:
        # a solver is compared with ERM's linear head, whatever its own is
        head = ("linear",) if item.is_solver else (item.head.name, *item.head.settings().items())
        trained = item.trainable, str(recipe.augmentation_of(item)), recipe.class_weights_of(item), item.reads_text
        compared.append(Compared(item.label, item.is_plain_erm, item.encoder_label, head, *trained))
    return erm_of_each(compared)


def trained_words(trainable: Trainable) -> str:
    """Returns how much of an encoder trains, in words."""
    if isinstance(trainable, LastBlocks):
        return f"last {plural(trainable.blocks, 'block')} trained"
    if isinstance(trainable, LowRank):
        above = trainable.lora.blocks
        depth = "all blocks" if above is None else f"the last {plural(above, 'block')}"
        return f"LoRA of rank {trainable.lora.rank} in {depth}"
    return "trained end to end" if trainable else "frozen"


def protocol_of(plan: Plan, prepared: Prepared, rule: str) -> str:
    """Returns the line that says how models were trained, selected by `rule` and tested."""
    recipe, dataset, notes = plan.recipe, plan.dataset, [*plan.notes]
    for label, of_encoder in prepared.encoders.items():
        if not recipe.has_images:
            notes.append(of_encoder.encoder.pretraining)
            continue
        items = [item for item in recipe.runnable_methods if item.encoder_label == label and not item.is_solver]
        ways = dict.fromkeys(trained_words(item.trainable) for item in items) or {trained_words(False): None}
        name = "" if label is None else f"{label}: "
        notes.append(f"encoder {name}{of_encoder.encoder.pretraining}, {' / '.join(ways)}")
    notes.append(f"training loss averaged by {recipe.training.loss_average}")
    runnable = recipe.runnable_methods
    weighted = [item for item in runnable if recipe.class_weights_of(item) != "none"]
    if weighted:
        rows = "" if len(weighted) == len(runnable) else f" of {' / '.join(item.label for item in weighted)}"
        notes.append(f"class losses weighted by balanced class weights{rows}")
    if recipe.training.tf32:
        notes.append("float32 products in TF32 on GPUs")
    if prepared.unreadable:
        notes.append(f"{plural(len(prepared.unreadable), 'unreadable image')} left out")
    return protocol_line(
        data=f"{recipe.data.name}, {plural(len(dataset), 'image')}, {plural(len(dataset.class_names), 'class')}, "
        f"{plural(len(dataset.domain_names), 'domain')}",
        split="official split" if recipe.protocol.name == "official" else "leave one domain out",
        notes=notes,
        selection=rule,
        metric=recipe.protocol.metric,
        augmentation=augmentations(recipe),
        draws=recipe.search.trials,
    )
