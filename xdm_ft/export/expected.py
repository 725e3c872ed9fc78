"""What to expect of a run's method at a new site, from the run's test results.

All numbers of the promise are of the trials that the selection rule picked by validation. Which method is quoted for a
held-out set is chosen by the other sets, so that no test value chooses its own. They are of models that were trained
and tested in the run, not of the final fit, an ensemble or interpolated weights. `evaluation.intervals` derives the
interval for a new site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from xdm_ft.core import DomainSet, set_name, sets_noun
from xdm_ft.evaluation.estimates import FEWEST_SETS
from xdm_ft.evaluation.metrics import (
    HIGHER_IS_BETTER,
)
from xdm_ft.export import AtHeldOut, ExpectedPerformance
from xdm_ft.images.decode import NAMED_AT_MOST
from xdm_ft.results import Runs, new_site_of, one_more_domain, seeds_by_set, values_by_set
from xdm_ft.results.measured import interval, means_of
from xdm_ft.results.model import held_out_of
from xdm_ft.results.run import Run
from xdm_ft.results.verdicts import OverImages
from xdm_ft.runtime.errors import join_names


def expected_performance(run: Run, runs: Runs, chosen_at: Mapping[DomainSet, str]) -> ExpectedPerformance | None:
    """Returns what to expect of a method at a new site; None if no model of it has a test result.

    Args:
        run: whose stored predictions give the intervals over images.
        runs: `Run.quoted`, or the models of a method that was named.
        chosen_at: {held-out set: the method that the other sets choose, of which its models are}.
    """
    metric, planned = runs.metric, held_out_of(run.every)
    tested = {held for held, _ in runs.values}
    if not tested:
        return None
    undefined = {*run.held_out_sets} - {*runs.held_out}
    runs = replace(runs, held_out=tuple(held for held in planned if held in tested))
    seeds, values, by_set = runs.complete_seeds, runs.values, values_by_set(runs)
    means = [float(np.mean([values[held, s] for held in runs.held_out])) for s in seeds]
    std = float(np.std(means, ddof=1)) if len(means) > 1 else None
    at_new_site = new_site_of(runs)
    quoted = {record.test_domains: record.method for record in runs.records}  # {held-out set: method}
    measured = run.measured_if_known
    over = {held: measured.over_images.get((runs.rule, quoted[held], held)) for held in by_set}
    counted = measured.pools if runs.rule == run.recipe_rule else {}
    pools = [counted[key].numbers if (key := (quoted[held], held)) in counted else {} for held in by_set]
    at = [_at_held_out(runs, held, by_set[held], over[held], chosen_at.get(held)) for held in by_set]
    if len(at) == 1 and len(at[0].domains) > 1:  # of several domains in one set only accuracies are known
        worst = min(at[0].accuracies.items(), key=lambda item: item[1])
    else:
        sign = 1 if HIGHER_IS_BETTER[metric] else -1
        worst = min(((", ".join(site.domains), site.value) for site in at), key=lambda item: sign * item[1])

    notes = list[str]()  # what limits the numbers
    if undefined:
        sites = join_names([set_name(held) for held in planned if held in undefined], NAMED_AT_MOST)
        notes.append(f"{metric} is not defined on images of one class: without {sites}")
    if lacking := [", ".join(held) for held in planned if held not in tested | undefined]:
        notes.append(f"no result with {'; '.join(lacking)} held out")
    if not all(over.values()):
        notes.append("stored predictions are missing, damaged or of another run, so that some intervals are unknown")
    if any(site.groups is None for site in at):
        notes.append("images assumed independent: patients, slides or sequences are unknown")
    if divided := run.results["data"].get("divided"):
        notes.append(f"the split divides groups (patients, slides or sequences): {', '.join(divided)}")
    if any(site.seeds == 1 for site in at):
        notes.append("one seed: intervals are over images alone")
    if len(at) == 1:
        notes.append("one held-out set: how much sites differ is unknown, so there is no interval for a new site")
    elif len(at) < FEWEST_SETS:
        notes.append(
            f"{len(at)} {sets_noun(runs.held_out)}: too few to know how much sites differ, so there is no interval"
        )

    return ExpectedPerformance(
        source="official test" if run.recipe.protocol.name == "official" else "leave one domain out",
        data=run.recipe.data.name,
        method=runs.method,
        selection=runs.rule,
        metric=metric,
        mean=float(np.mean([values.mean() for values in by_set.values()])),
        std=std,
        stderr=None if std is None else std / len(means) ** 0.5,
        seeds=len(means),
        held_out=tuple(at),
        worst=worst,
        others=_others(runs),
        numbers=means_of(pools),
        new_site=None if at_new_site is None else at_new_site.between(metric),
        one_more_domain=one_more_domain(runs, run.results["data"]["images"]),
        **({} if at_new_site is None else at_new_site._asdict()),
        notes=tuple(notes),
    )


def _at_held_out(
    runs: Runs, held: DomainSet, by_seed: np.ndarray, over: OverImages | None, method: str | None
) -> AtHeldOut:
    records = (record for record in runs.records if record.test_domains == held)
    scores = [score for record in records if (score := runs.score(record)) is not None]
    accuracies = {
        name: float(np.mean([score.per_domain[name]["accuracy"] for score in scores])) for name in scores[0].per_domain
    }
    return AtHeldOut(
        domains=held,
        method=method,
        value=float(by_seed.mean()),
        interval=interval(runs.metric, [by_seed], [over]),
        seeds=len(by_seed),
        images=scores[0].n,
        groups=over and over.groups,
        accuracies=accuracies,
    )


def _others(runs: Runs) -> dict[str, float]:
    """{other metric: mean over held-out sets of the means over seeds}; left out where it is not defined."""
    scores = {(record.test_domains, record.seed): runs.score(record) for record in runs.records}
    means = {}
    for name in HIGHER_IS_BETTER:
        if name == runs.metric or (name == "worst_domain_accuracy" and all(len(held) == 1 for held in runs.held_out)):
            continue
        by_set = [[getattr(scores[held, s], name) for s in seeds] for held, seeds in seeds_by_set(runs).items()]
        if all(value is not None for values in by_set for value in values):
            means[name] = float(np.mean([np.mean(values) for values in by_set]))
    return means
