"""recipe → plan → work → report."""

from __future__ import annotations

import logging
import sys

from xdm_ft.recipe.read import Recipe

logger = logging.getLogger("xdm_ft")


def run(recipe: Recipe) -> int:
    """Trains and compares everything that the recipe lists. Returns the exit status: 0, or 1 where a model failed."""
    from xdm_ft.experiment.data_faults import faults
    from xdm_ft.experiment.final_fit import final_fit
    from xdm_ft.experiment.heartbeat import heartbeat
    from xdm_ft.experiment.machine import as_launched, start, stop
    from xdm_ft.experiment.plan import make_plan, read_data
    from xdm_ft.experiment.prepared import build_encoder, prepare
    from xdm_ft.experiment.records import train_models
    from xdm_ft.experiment.results import about
    from xdm_ft.experiment.run_directory import RunDirectory
    from xdm_ft.progress import pulse
    from xdm_ft.report.tables import print_table

    recipe = as_launched(recipe)
    accelerator = start(recipe)
    with heartbeat(accelerator):
        with pulse.waiting():  # what is downloaded takes as long as it takes
            dataset = read_data(recipe)
            plan = make_plan(recipe, dataset)  # faults of splits, methods and weights come before any long work
            encoder = build_encoder(recipe, recipe.protocol.seeds[0])
        with RunDirectory(recipe, accelerator) as directory:
            if accelerator.is_main_process:
                found = faults(plan, show=True)
                for finding in found:
                    logger.warning("finding: %s", finding.line)
                directory.about = about(plan, found)
            prepared = prepare(recipe, dataset, encoder, accelerator)
            directory.trains_on(dataset, prepared)
            plan = make_plan(recipe, dataset, prepared.unreadable)
            train_models(plan, prepared, directory, accelerator)
            results = directory.finish(plan, prepared)
            final = None
            if recipe.protocol.final_fit:
                final = final_fit(plan, prepared, directory, accelerator, results)
            results = directory.complete(final)
    status = 1 if any(record["status"] == "failed" for record in [*results["runs"], *([final] if final else [])]) else 0
    if accelerator.is_main_process:
        print_table(results)
        sys.stdout.flush()
        logger.info("results in %s", directory.path)
    stop(accelerator)
    return status


def fill_cache(recipe: Recipe) -> None:
    """Extracts the features that the recipe needs and stops."""
    from xdm_ft.errors import UserError
    from xdm_ft.experiment.heartbeat import heartbeat
    from xdm_ft.experiment.machine import start, stop
    from xdm_ft.experiment.plan import read_data
    from xdm_ft.experiment.prepared import build_encoder, prepare
    from xdm_ft.progress import pulse

    if not recipe.needs_features:
        raise UserError(f"{recipe.name}: trains its encoder end to end, no method of it uses cached features")
    accelerator = start(recipe)
    with heartbeat(accelerator):
        with pulse.waiting():
            encoder, dataset = build_encoder(recipe, recipe.protocol.seeds[0]), read_data(recipe)
        prepared = prepare(recipe, dataset, encoder, accelerator)
    features = prepared.features
    assert features is not None
    logger.info("%d features of width %d, %d of them extracted now", len(features), features.width, features.extracted)
    stop(accelerator)
