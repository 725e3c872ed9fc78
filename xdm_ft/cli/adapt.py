"""`xdm-ft adapt`: a model for one site, if labelled images there show that it is better."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

from xdm_ft.cli import CommandResult, left_out_lines
from xdm_ft.cli.predict import check_batch_size, load_model
from xdm_ft.evaluation.metrics import at_one_site
from xdm_ft.export.card import WORDS, shown
from xdm_ft.export.directory import refuse_taken
from xdm_ft.new_site.adapt import ADVISED, Adaptation, adapt, adapt_run
from xdm_ft.new_site.images import prevalence_of
from xdm_ft.new_site.stored import refuse_run
from xdm_ft.results.run import is_run
from xdm_ft.runtime.errors import UserError, join_names, plural, signed
from xdm_ft.storage.names import expand_user
from xdm_ft.training.adaptation import DOUBT


def main(arguments: argparse.Namespace) -> CommandResult:
    """Writes the adapted model, or nothing if the shipped one stays. Raises `UserError`, see `adapt`."""
    check_batch_size(arguments)
    out = expand_user(arguments.out, "--out")
    if arguments.recentre != (arguments.images is not None):
        raise UserError("--recentre: needs all images of the site; give both --recentre and --images, or neither")
    if arguments.prevalence is not None and not arguments.recentre:
        raise UserError("--prevalence: only --recentre uses it; add --recentre and --images, or leave it out")
    refuse_taken(out)
    common = {"group": arguments.group, "batch_size": arguments.batch_size}
    if is_run(Path(arguments.model).expanduser()) and arguments.method is not None:
        if arguments.recentre or arguments.held_out is not None:
            option = "--recentre" if arguments.recentre else "--held-out"
            raise UserError(
                f"{option}: is for a model directory; a run directory trains on all its images; leave it out"
            )
        run = adapt_run(arguments.model, arguments.method, arguments.site, out, **common)
        return CommandResult(run, list(lines(run)))
    refuse_run(arguments.model, ", or name a method that is trained again with the site: --method")
    model = load_model(arguments)
    shares = None if arguments.prevalence is None else prevalence_of(arguments.prevalence, model.class_names)
    found = adapt(
        model, arguments.model, arguments.site, out, prevalence=shares, images=arguments.images, **common
    )  # fmt: skip
    return CommandResult(found, list(lines(found)))


def lines(found: Adaptation) -> Iterator[str]:
    """Yields the text of an adaptation."""
    groups = "images assumed independent" if found.groups is None else plural(found.groups, "group")
    yield f"{plural(found.labels, 'labelled image')}, {groups}"
    if found.at_random is not None:
        yield f"gain at this site, on images that adapted nothing: {found.at_random.to_text()}"
    gain = signed(found.after - found.before, 0)
    values = f"{found.after} of {found.labels} correct, {found.before} by the shipped model: {gain}"
    if found.metric != "accuracy":
        before, after = (shown(found.metric, value) for value in (found.metric_before, found.metric_after))
        gain = signed(100 * (found.metric_after - found.metric_before))
        values = f"{WORDS[found.metric]} {after}, {before} by the shipped model: {gain} points"
    yield f"cross-validation, for this decision alone: {values}, p {found.p:.2g} (at most {DOUBT:g})"
    if found.metric != found.protocol_metric:
        same = at_one_site(found.protocol_metric) == found.metric
        reason = "is the same at one site" if same else "is no share of correct images, which the test needs"
        yield f"{WORDS[found.metric]} decides: {WORDS[found.protocol_metric]}, the run's metric, {reason}"
    if found.kept:
        yield f"wrote {found.out}: a model for this site alone"
        if found.at_random is None:
            command = f"xdm-ft evaluate {shlex.quote(str(found.out))} SITE"
            yield f"To learn how good it is at this site, evaluate it on other labelled images: {command}"
    else:
        yield "keep the shipped model: the adapted one is not clearly better here, but could be with more labels"
    if found.labels < ADVISED:
        yield f"{ADVISED} labels or more are advised"
    if found.absent_classes:
        absent = plural(len(found.absent_classes), "class")
        yield f"No label of {absent} of the model, so nothing is learned of it: {join_names(found.absent_classes)}"
    for warning in found.warnings:
        yield f"Warning: {warning}."
    if found.unlabelled:
        yield f"{plural(found.unlabelled, 'row')} without a label left out"
    yield from left_out_lines(found.unreadable, found.copies, found.copies_with_another_label, found.training_images)
