"""One run: recipe → plan → prepared data and features → engines → records → results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from xdm_ft.recipe.settings import Recipe

if TYPE_CHECKING:
    from xdm_ft.experiment.final_fit import FitRequest
    from xdm_ft.results.run import Run
    from xdm_ft.storage.run_directory import RunDirectory

logger = logging.getLogger("xdm_ft")


def run(recipe: Recipe, write_reports: Callable[[RunDirectory, Run], None], fits: Sequence[FitRequest] = ()) -> Run:
    """Trains and compares all methods of the recipe, and returns the results.

    Resumes an interrupted run of it, and grows a run of a recipe with fewer methods, seeds or trials. `write_reports`
    makes them, before the run counts as complete. `fits`: the final fits to train besides those of the recipe.

    If several processes were launched, each one calls this and returns the same results. Raises `UserError` for faults
    of recipe, data, weights or disk.
    """
    from xdm_ft.experiment.analyse import analyse
    from xdm_ft.experiment.cluster import check_cluster
    from xdm_ft.experiment.data_checks import check_data, log_findings, log_left_out, write_copies
    from xdm_ft.experiment.estimate import encoder_costs, first_lines
    from xdm_ft.experiment.final_fit import final_fits
    from xdm_ft.experiment.label_curve import label_curve
    from xdm_ft.experiment.models import keep_common_files, left_to_train, measure
    from xdm_ft.experiment.pieces import RunContext, do_pieces
    from xdm_ft.experiment.plan import make_plan, read_data
    from xdm_ft.experiment.prepare import (
        build_encoders,
        check_batch_norm,
        check_low_rank,
        check_prompts,
        image_hashes,
        prepare,
    )
    from xdm_ft.experiment.results import RunResults, data_facts, environment, inputs, refuse_other_inputs, summary_of
    from xdm_ft.experiment.resume import growth, inherit_choices, open_run_directory
    from xdm_ft.experiment.tracking import installed_trackers, log_results, write_sessions
    from xdm_ft.experiment.work import as_launched, launched
    from xdm_ft.images.facts import counting_pixels
    from xdm_ft.runtime.progress import pulse
    from xdm_ft.runtime.watchdog import from_main, heartbeat, wait_for_everyone
    from xdm_ft.storage.run_directory import COPIES

    recipe = inherit_choices(as_launched(recipe))
    with launched(recipe, installed_trackers(recipe)) as accelerator, heartbeat(accelerator):
        main = accelerator.is_main_process
        on_cluster = check_cluster(recipe)
        with pulse.waiting():  # a slow download must not count as a hung process
            dataset = read_data(recipe)
            if main:
                log_left_out(dataset)
            plan = make_plan(recipe, dataset)  # here, so that faults of splits and methods are raised before long work
            recipe, encoders = build_encoders(recipe, dataset)
            plan = plan if recipe is plan.recipe else make_plan(recipe, dataset)
            check_low_rank(recipe, encoders)
            check_prompts(recipe, encoders, dataset.class_names)
            check_batch_norm(plan, encoders, accelerator.num_processes)
        with open_run_directory(recipe, accelerator) as directory:
            results = RunResults.resume(directory, recipe, accelerator)
            before, recipe_before = results.environment_before, results.recipe_before
            if main:
                for line in first_lines(plan, encoders, accelerator, results.records.keys()):
                    logger.info("%s", line)
            if recipe_before is not None and (added := growth(recipe_before, plan, len(results.summary.looks))):
                logger.info("%s: %s", directory.path, added)
            hashes = image_hashes(recipe, dataset, accelerator)
            findings = check_data(plan, True, hashes) if main else []
            copies = f" (all: {directory.path / COPIES})" if main and write_copies(plan, hashes, directory) else ""
            log_findings(findings, copies)
            with counting_pixels(dataset) as counts:
                prepared = prepare(recipe, dataset, encoders, accelerator, before, hashes)
            if counts.add_others(accelerator) and main:
                sampled, findings = findings, check_data(plan, True, hashes, counts)
                log_findings([finding for finding in findings if finding not in sampled], "")
            plan = plan.without(prepared.unreadable)

            trained_on = inputs(dataset, prepared)
            refuse_other_inputs(directory.path, before, trained_on)
            costs = encoder_costs(prepared, recipe.features, dataset, accelerator, before or {})
            facts = environment(accelerator) | on_cluster | trained_on | costs
            results.begin(facts, data_facts(plan, findings))
            context = RunContext(plan, prepared, directory, accelerator)
            keep_common_files(context, results)
            pieces, done = left_to_train(context, results)
            do_pieces(context, pieces, measure, results, activity="training", done=done)

            results.read_all(plan)
            if main:
                results.summary = summary_of(plan, prepared, results)
            results.summary = from_main(accelerator, results.summary)
            results.write()
            if main:
                write_sessions(plan, results.records.values(), directory)
            final_fits(context, results, fits)
            results.label_curve = label_curve(context, results) if recipe.label_curve else None
            finished = results.write()
            if recipe.analyse:
                if main:
                    analyse(finished, context)
                wait_for_everyone(accelerator)
            if main:
                write_reports(directory, finished)
                directory.complete()
                # last, as a tracker may fail for want of a network: the run directory is complete then
                log_results(accelerator, recipe, finished)
    return finished
