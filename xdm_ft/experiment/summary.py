"""Records → the rows of the summary, one per selection rule and method."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from xdm_ft.cut.trainable import LastBlocks, LowRank, Trainable
from xdm_ft.evaluation.looks import Look, look_at, place_of
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction
from xdm_ft.evaluation.records import Record, SummaryRow, runs_by_method
from xdm_ft.evaluation.summary import Compared, Summary, erm_of_each, protocol_line, summarise
from xdm_ft.evaluation.trials import picked_trials
from xdm_ft.evaluation.verdicts import Comparison
from xdm_ft.experiment.plan import Plan, augmentation, augmentations
from xdm_ft.experiment.prepare import Prepared
from xdm_ft.recipe.settings import Recipe
from xdm_ft.report.published import BENCHMARKS, benchmark_of
from xdm_ft.report.words import IN_PERCENT
from xdm_ft.runtime.errors import plural
from xdm_ft.storage.run_directory import RunDirectory


def summary_of(
    plan: Plan, prepared: Prepared, records: Sequence[Record], directory: RunDirectory, looks: Sequence[Look] = ()
) -> Summary:
    """Returns the rows in the recipe's order, the comparisons between them, and the looks at this run with this one.

    Each rule picks one of several trials. Only the predictions of picked trials are read. `looks`: the earlier ones.
    """
    recipe, metric, methods = plan.recipe, plan.recipe.protocol.metric, plan.recipe.methods
    encoders = list(dict.fromkeys(item.encoder_label for item in methods if item.encoder_label is not None))
    picks = [pick for record in records for pick in record.selected.values()]
    tested = {(name, of["n"]) for pick in picks for name, of in pick.metrics["test"].per_domain.items()}
    benchmark = benchmark_of(recipe.data.block.model_dump(mode="json"), tested)
    images = {
        split.test_domains: HeldOutImages.of(plan.dataset, directory.test_images(split.test_domains)["rows"])
        for split in plan.splits
    }
    augmented = {item.label: augmentation(recipe, item) for item in methods}
    labels, deterministic = [item.label for item in methods], [item.label for item in methods if item.is_text]
    own = runs_by_method(picked_trials(records, plan.rules[0], metric), labels, plan.rules[0], metric, deterministic)
    number, look = place_of(look_at(own.values(), recipe.declared), looks, recipe.auto_seeds)
    before, margin = looks[: number - 1], recipe.report.margin
    rows, comparisons = list[SummaryRow](), list[Comparison]()
    for rule in plan.rules:
        picked = picked_trials(records, rule, metric)
        predictions = (  # one at a time: those of all models would fill the memory
            Prediction.from_arrays(directory.predictions(record.folder), images[record.test_domains], record.key, rule)
            for record in sorted(picked, key=lambda record: record.seed)
            if rule in record.selected
        )
        of_rule = summarise(
            picked,
            predictions,
            methods=labels,
            rule=rule,
            metric=metric,
            protocol=protocol_of(plan, prepared, rule),
            references=references(recipe),
            compare=recipe.declared,
            encoders=encoders,
            deterministic=deterministic,
            convention=BENCHMARKS[benchmark][0] if benchmark else None,
            look=(number, look.alpha),
            before=before,
            margin=None if margin is None else margin / (100 if metric in IN_PERCENT else 1),
        )
        comparisons += of_rule.comparisons
        for row in of_rule.rows:
            of_method = [record for record in records if record.method == row.method]
            picks = [one.selected[rule] for one in picked if one.method == row.method and rule in one.selected]
            counts = Counter(flag for pick in picks for flag in pick.flags or ())
            flags = [f"{flag} in {n} of {len(picks)} picks" for flag, n in counts.items()]
            trials = [record for record in of_method if record.trial > 0]
            if failed := [record.reason for record in trials if record.status == "failed"]:
                flags.append(f"{len(failed)} of {len(trials)} drawn trials failed, the first: {failed[0]}")
            budget = row.budget | {"draws": len({record.trial for record in of_method})}
            words = augmented[row.method]
            rows.append(dataclasses.replace(row, budget=budget, flags=flags or None, augmentation=words))
    judged = [one for one in comparisons if one.p_here is not None and one.p_here.holm is not None]
    return Summary(
        rows,
        comparisons,
        [*before, look.with_found(judged, before)] if judged else [*looks],
        all(one.is_found or one.equal_within for one in judged if one.selection == plan.rules[0]),
    )


def references(recipe: Recipe) -> dict[str, str]:
    """Returns {label of a method: label of the ERM that it is compared with}, as `erm_of_each` has it."""
    compared = list[Compared]()
    for item in recipe.served:
        # a solver is compared with ERM's linear head, whatever its own is
        head = ("linear",) if item.is_solver else (item.head.name, *item.head.settings().items())
        own = item.trainable, recipe.augmentation_of(item)
        compared.append(Compared(item.label, item.is_plain_erm, item.encoder_label, head, *own))
    return erm_of_each(compared)


def trained_words(trainable: Trainable) -> str:
    """Returns how much of an encoder trains, in words."""
    if isinstance(trainable, LastBlocks):
        return f"last {plural(trainable.blocks, 'block')} trained"
    if isinstance(trainable, LowRank):
        above = trainable.lora.blocks
        where = "all blocks" if above is None else f"the last {plural(above, 'block')}"
        return f"LoRA of rank {trainable.lora.rank} in {where}"
    return "trained end to end" if trainable else "frozen"


def protocol_of(plan: Plan, prepared: Prepared, rule: str) -> str:
    """Returns the line that says how models were trained, selected by `rule` and tested."""
    recipe, dataset, notes = plan.recipe, plan.dataset, [*plan.notes]
    for label, of_encoder in prepared.encoders.items():
        items = [item for item in recipe.served if item.encoder_label == label and not item.is_solver]
        how = dict.fromkeys(trained_words(item.trainable) for item in items) or {trained_words(False): None}
        name = "" if label is None else f"{label}: "
        notes.append(f"encoder {name}{of_encoder.encoder.pretraining}, {' / '.join(how)}")
    notes.append(f"training loss averaged by {recipe.training.loss_average}")
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
