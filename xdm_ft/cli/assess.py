"""`xdm-ft assess`: the expected accuracy of a model on unlabelled images of a new site, or why it cannot be said."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence

from xdm_ft.cli import CommandResult, columns, left_out_lines
from xdm_ft.cli.predict import check_batch_size, load_model
from xdm_ft.evaluation.expected_site import BELOW, NEARLY
from xdm_ft.evaluation.metrics import at_one_site
from xdm_ft.export.card import WORDS, shown
from xdm_ft.new_site.assess import Assessment, assess
from xdm_ft.new_site.images import prevalence_of
from xdm_ft.new_site.stored import Bought, refuse_run
from xdm_ft.runtime.errors import plural, signed

OF_CARD = (
    "The estimate is for this site, without labels; the model card has other numbers, those of the run's own models on "
    "held-out domains."
)
NAMES = {"cot": "COT", "aline": "ALine-D", "atc": "ATC"}


def main(arguments: argparse.Namespace) -> CommandResult:
    """Raises `UserError` for a model that cannot be assessed, and for images that cannot be listed."""
    check_batch_size(arguments)
    refuse_run(arguments.model)
    model = load_model(arguments)
    shares = None if arguments.prevalence is None else prevalence_of(arguments.prevalence, model.class_names)
    assessment = assess(model, arguments.model, arguments.images, shares, arguments.group, arguments.batch_size)
    return CommandResult(assessment, list(lines(assessment, model.config.metric)))


def lines(found: Assessment, metric: str) -> Iterator[str]:
    """Yields the text of an assessment. `metric`: of the run's protocol."""
    groups = "images assumed independent" if found.groups is None else plural(found.groups, "group")
    yield from (f"{plural(found.images, 'image')}, {groups}", "")
    if found.estimate is None:
        yield f"No expected accuracy: {found.refused}"
    else:
        ends = f"{_rate(found.low)} to {_rate(found.high)}"
        rows = [("", "accuracy", "95%"), ("expected at this site", _rate(found.estimate), ends)]
        if found.estimate_all != found.estimate:
            rows[1:] = [("expected, without images of no class", _rate(found.estimate), ends)]
            rows.append(("expected, of all images", _rate(found.estimate_all), ""))
        yield from columns([*rows, ("reference head, mean over held-out domains", _rate(found.card), "")])
    yield ""
    if found.parts is not None:
        yield from columns([("estimate by", ""), *((NAMES[n], _rate(v)) for n, v in found.parts.items())])
        yield ""
    if found.domains:
        table = [("held-out domain", "accuracy", "estimate", "error")]
        for name, of in found.domains.items():
            cells = ("–", "–")
            if of.parts is not None and of.error is not None:
                cells = (_rate(of.accuracy + of.error), signed(100 * of.error))
            table.append((name, _rate(of.accuracy), *cells))
        yield from (*columns(table), "")
    if found.unknown_share is not None:
        share, low, high = (f"{100 * end:.0f}" for end in found.unknown_share.values())
        yield f"about {share}% ({low} to {high}) of these images belong to no class of the model"
    yield judgement(found)
    if found.verdict != "as_promised":
        yield from budget_table(found.budgets)
    yield from (f"Warning: {warning}." for warning in found.warnings)
    if at_one_site(metric) != "accuracy":
        yield f"Estimate and verdict are of accuracy, not of {WORDS[metric]}: without labels no image's class is known."
    yield from _reservations(found)


def _rate(value: float | None) -> str:
    return "–" if value is None else shown("accuracy", value)


def judgement(found: Assessment) -> str:
    """Returns the verdict in words."""
    if found.verdict == "below":
        return f"below the card: more than {100 * BELOW:.0f} points under the mean over held-out domains"
    if found.verdict == "as_promised":
        return f"as promised: not more than {100 * NEARLY:.0f} points under the mean over held-out domains"
    command = f"xdm-ft label {shlex.quote(found.model)} IMAGES --budget 100 --out to_label.csv"
    return f"unknown: label images to know: {command}"


def budget_table(budgets: Sequence[Bought]) -> Iterator[str]:
    """Yields what budgets of `xdm-ft label` buy."""
    if budgets:
        yield "At the held-out domains, --budget of xdm-ft label bought (independent images):"
        unit = WORDS[budgets[0].metric]
        rows = [("--budget", "random images", "accuracy to", "threshold for 10% risk", f"gain of adapt in {unit}")]
        for of in budgets:
            gain = "–" if of.gain is None else f"{signed(100 * of.gain)} points"
            found = f"{100 * of.threshold:.0f}% of draws"
            rows.append((str(of.budget), str(of.images), f"±{100 * of.half_width:.0f} points", found, gain))
        yield from columns(rows)


def _reservations(found: Assessment) -> Iterator[str]:
    """Yields what limits the estimate, and which images do not count."""
    yield f"All numbers are for the reference head: {found.heads}."
    yield OF_CARD
    if found.prevalence is None:
        yield "Assumes class shares as in training; --prevalence gives others."
    if found.is_far:
        yield "These images lie farther from the training images than any held-out domain did: trust this less."
    never: dict[str, list[str]] = {worst.domain: [] for worst in found.risks.values() if worst.threshold is None}
    for risk, worst in found.risks.items():
        what = f"For at most {100 * float(risk):g}% wrong answers"
        if worst.threshold is None:
            never[worst.domain].append(f"{100 * float(risk):g}%")
        else:
            record = f"a threshold found so was broken at {worst.broken} of {plural(worst.sites, 'site')}"
            yield f"{what}, {worst.domain}, the worst held-out domain, needs {worst.threshold:.2f}; {record}."
    for domain, risks in never.items():
        yield f"No threshold was enough at the held-out domain {domain} for at most {', '.join(risks)} wrong answers."
    yield from left_out_lines(found.unreadable, found.copies, 0, found.training_images)
