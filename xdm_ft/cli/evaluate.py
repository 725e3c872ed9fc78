"""`xdm-ft evaluate`: the metrics of a model on labelled images of a new site, beside what its card promises."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from xdm_ft.cli import UNKNOWN_TRAINING, CommandResult, columns, copies_left_out, unreadable_left_out
from xdm_ft.cli.predict import check_batch_size, load_model
from xdm_ft.core import ORACLE
from xdm_ft.evaluation.expected_site import WITHIN, AtSite
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER, at_one_site
from xdm_ft.export.card import WORDS, interval, ranks, shown
from xdm_ft.export.directory import THRESHOLD
from xdm_ft.export.predictor import Model, cache_of
from xdm_ft.export.rows import labelled_site
from xdm_ft.export.sources import Site, Sources
from xdm_ft.new_site.images import Distinct, distinct, known_training_images, readable
from xdm_ft.new_site.measure import (
    AtRisk,
    Labelled,
    WithImages,
    at_risk,
    at_site,
    refuse_other_directories,
    store,
    with_images,
)
from xdm_ft.results.run import is_run
from xdm_ft.runtime.errors import UserError, plural


@dataclass(frozen=True)
class Evaluation:
    model: str
    site: str
    method: str
    metric: str  # of the run's protocol
    temperature: float  # by which the model's logits are divided
    unlabelled: int  # rows of the table without a label: left out
    unreadable: dict[str, str]  # {image: why it was left out}
    absent_classes: tuple[str, ...]  # classes of the model without images
    seen_domains: tuple[str, ...]  # those with the name of a domain that trained the model, or that its card counts
    copies: int  # of other images here, byte for byte; each image counts once
    copies_with_another_label: int
    training_images: int | None  # images here that trained the model; None: unknown
    ranks: str | None  # where the card says that a new site ranks; None: it promises nothing
    whole: AtSite  # all images
    domains: dict[str, AtSite]  # each of several domains; empty for one
    with_images: WithImages | None  # None: without --images
    at_risk: AtRisk | None  # None: without --risk
    saved: Path | None  # the file of the threshold

    def lines(self) -> Iterator[str]:
        whole = self.whole
        groups = "images assumed independent" if whole.groups is None else plural(whole.groups, "group")
        yield from (f"{self.method}, {plural(whole.images, 'image')}, {groups}", "")

        table = [("", "value", f"95% over {'images' if whole.groups is None else 'groups'}")]
        for name, measured in whole.metrics.items():
            table.append((WORDS[name], shown(name, measured.value), interval(name, measured.interval)))
        yield from (*columns(table), "")
        if self.domains:
            metric = at_one_site(self.metric)
            rows = [("domain", "images", WORDS[metric], "95%")]
            for name, site in self.domains.items():
                value, ends = "–", "–"
                if (of_domain := site.metrics.get(metric)) is not None:
                    value, ends = shown(metric, of_domain.value), interval(metric, of_domain.interval)
                rows.append((name, str(site.images), value, ends))
            yield from (*columns(rows), "")
        table = [("class", "images", "recall")]
        for name, of_class in whole.classes.items():
            recall = "–" if of_class.recall is None else shown("accuracy", of_class.recall)
            table.append((name, str(of_class.images), recall))
        yield from (*columns(table), "")

        if self.ranks is not None:
            yield f"The card: {self.ranks}"
        promises = {name: site.versus for name, site in (self.domains or {"": whole}).items() if site.versus}
        for name, versus in promises.items():
            at, metric = f"{name}: " if name else "", versus.metric
            value, promised = shown(metric, versus.value), shown(metric, versus.promised)
            if versus.verdict in (WITHIN, "below", "above"):
                position, ends = versus.verdict.removesuffix(WITHIN) or "within", interval(metric, versus.interval)
                yield f"{at}{WORDS[metric]} {value} is {position} what the card promises for such a sample: {ends}"
            else:
                known = f"{at}{WORDS[metric]} {value} is {versus.among}"
                yield f"{known}; whether as promised (mean {promised}) {versus.verdict}"
        if not promises:
            yield "The model's card promises nothing about these images."
        if self.with_images is not None:
            yield self._of_all_images(self.with_images)
        if self.at_risk is not None:
            yield from self._threshold(self.at_risk)
        yield from self._by_accuracy()
        yield from self._reservations()

    def _of_all_images(self, found: WithImages) -> str:
        if found.value is None:
            return f"--images gives no accuracy: {found.refused}"
        by = f"with the help of {plural(found.images or 0, 'image')} of --images"
        by += f" ({found.unreadable} more cannot be read)" if found.unreadable else ""
        return f"accuracy {shown('accuracy', found.value)} {by}, 95% {interval('accuracy', found.interval)}"

    def _threshold(self, found: AtRisk) -> Iterator[str]:
        wanted = f"at most {100 * found.risk:g}% wrong answers"
        if found.threshold is None:
            yield f"No threshold for {wanted}: {found.refused}"
            return
        answered = (
            f"the model answers {found.answered} of {plural(found.labels, 'labelled image')}, {found.wrong} wrongly"
        )
        yield f"For {wanted}: --abstain-below {found.shown or found.threshold}; {answered}"
        if self.saved is not None:
            yield f"wrote {self.saved}: xdm-ft predict --abstain-below stored uses it"

    def _by_accuracy(self) -> Iterator[str]:
        """Yields why a number is not of the run's metric."""
        if (metric := at_one_site(self.metric)) == "accuracy":
            return
        if self.with_images is not None and self.with_images.value is not None:
            yield f"--images helps accuracy alone, not {WORDS[metric]}: without labels no image's class is known"
        if self.at_risk is not None and self.at_risk.threshold is not None:
            yield f"A risk is a share of all answers, not {WORDS[metric]}: in a rare class more of them may be wrong"

    def _reservations(self) -> Iterator[str]:
        """Yields which images do not count, or may not, as images of a new site."""
        if self.seen_domains:
            names = ", ".join(self.seen_domains)
            yield f"Domains of this name trained the model or gave its card numbers, so they are not new sites: {names}"
        if self.absent_classes:
            names = ", ".join(self.absent_classes)
            yield f"These labels have no image of {plural(len(self.absent_classes), 'class')} of the model: {names}"
        if len(present := [name for name, of_class in self.whole.classes.items() if of_class.images]) == 1:
            yield f"All labels are {present[0]}: the accuracy is of this class alone"
        if self.unlabelled:
            yield f"{plural(self.unlabelled, 'row')} without a label left out"
        yield from unreadable_left_out(self.unreadable)
        copies = copies_left_out(self.copies, self.copies_with_another_label) if self.copies else "no copies"
        if self.training_images is None:
            trained = UNKNOWN_TRAINING
        elif not self.training_images:
            trained = "none is an exact copy of an image that trained the model"
        else:
            share = f"{self.training_images} of {plural(self.whole.images, 'image')}"
            trained = f"{share} trained the model: results on them do not hold for new images"
        yield f"{copies}; {trained}"


def main(arguments: argparse.Namespace) -> CommandResult:
    """Measures a model on the labelled images of a folder or table, of all domains or of `--domain` alone.

    Of images with the same bytes, the first one counts. Images that trained the model count, are counted, and leave no
    verdict. Raises `UserError` for a site that cannot be read, a label that the model lacks, and `--save` without
    `--risk` or a model directory.
    """
    check_batch_size(arguments)
    folder = Path(arguments.model).expanduser()
    if arguments.save and arguments.risk is None:
        raise UserError("--save: needs a threshold to store; add --risk 0.1, for example")
    if arguments.save:
        refuse_other_directories(folder)
    sources = None if arguments.images is None else Sources(arguments.images)
    model, path = load_model(arguments), arguments.site
    config, card = model.config, model.config.expected
    site = labelled_site(path, config, arguments.group)
    if arguments.domain is not None:
        site = site.only(arguments.domain)
    known, unreadable = known_training_images(model, arguments.model), dict[str, str]()
    every = distinct(site.items, known, cache_of(arguments.model))
    images = _predict(model, arguments.model, path, site, every, unreadable, arguments.batch_size)
    by_domain = {
        domain: images.of_domain(number)
        for number, domain in enumerate(site.domain_names)
        if (images.site.domains == number).any()
    }
    several = len(by_domain) > 1
    for option, value in (("--risk", arguments.risk), ("--images", arguments.images)):
        if several and value is not None:
            raise UserError(
                f"{option}: is for one site, but these are {len(by_domain)} domains; name one with --domain"
            )
    risk = None if arguments.risk is None else at_risk(images, arguments.risk)
    helped = None
    if sources is not None:
        helped = with_images(model, arguments.model, sources, images, arguments.batch_size)
    whole = at_site(images, config.class_names, None if several else card, config.temperature)
    saved = None
    if arguments.save and risk is not None and risk.threshold is not None:
        saved = store(model, risk, whole.groups)
    seen = {*config.method["train_domains"], *(name for at in (card.held_out if card else ()) for name in at.domains)}
    evaluation = Evaluation(
        model=arguments.model,
        site=path,
        method=config.method["label"],
        metric=config.metric,
        temperature=config.temperature,
        unlabelled=site.unlabelled,
        unreadable=unreadable,
        absent_classes=tuple(name for name, of_class in whole.classes.items() if not of_class.images),
        seen_domains=tuple(name for name in by_domain if name in seen),
        copies=every.copies,
        copies_with_another_label=int((site.labels != site.labels[every.first]).sum()),
        training_images=None if images.trained is None else int(images.trained.sum()),
        ranks=None if card is None or card.selection == ORACLE else ranks(card),
        whole=whole,
        domains={
            name: at_site(of_domain, config.class_names, card, config.temperature)
            for name, of_domain in (by_domain.items() if several else ())
        },
        with_images=helped,
        at_risk=risk,
        saved=saved,
    )
    lines = list(evaluation.lines())
    if arguments.save and saved is None:
        earlier = folder / THRESHOLD
        lines.append(f"Nothing was stored{f'; {earlier} is of an earlier evaluation' if earlier.exists() else ''}")
    return CommandResult(evaluation, [*lines, f"next: {_next(evaluation, arguments, config.site_xxh3 is not None)}"])


def _next(found: Evaluation, arguments: argparse.Namespace, adaptable: bool) -> str:
    """Returns the command that a user wants next. `adaptable`: the model directory has what `adapt` reads."""
    model, site = shlex.quote(found.model), shlex.quote(found.site)
    if is_run(Path(found.model).expanduser()):
        return f"xdm-ft export {model} DIR"
    weights = f" --encoder-weights {shlex.quote(arguments.encoder_weights)}" if arguments.encoder_weights else ""
    one_class = len(found.absent_classes) == len(found.whole.classes) - 1
    if found.training_images or one_class:
        return f"xdm-ft label {model} IMAGES --budget 100 --out to_label.csv{weights}"  # new to it, of all classes
    if found.domains:
        metric = at_one_site(found.metric)
        values = {name: of.metrics[metric].value for name, of in found.domains.items() if metric in of.metrics}
        worst_of = min if HIGHER_IS_BETTER[metric] else max
        worst = worst_of(values, key=values.__getitem__, default=next(iter(found.domains)))
        return f"xdm-ft evaluate {model} {site} --domain {shlex.quote(worst)} --risk 10%{weights}"
    if adaptable and (found.whole.versus is None or found.whole.versus.verdict not in (WITHIN, "above")):
        group = f" --group {shlex.quote(arguments.group)}" if arguments.group else ""
        return f"xdm-ft adapt {model} {site}{group} --out site_model{weights}"
    stored = " --abstain-below stored" if found.saved else ""
    return f"xdm-ft predict {model} IMAGES{stored} --out predictions.csv{weights}"


def _predict(
    model: Model, name: str, path: str, site: Site, images: Distinct, unreadable: dict[str, str], batch_size: int | None
) -> Labelled:
    """Returns the images that can be read with the model's logits; `unreadable` gets the others."""
    logits, rows = list[Tensor](), list[int]()
    for batch in readable(model, name, path, images.items, unreadable, what="evaluate", batch_size=batch_size):
        logits.append(batch.logits)
        rows += batch.rows
    trained = None if images.trained is None else images.trained[rows]
    return Labelled(site.rows(images.rows[rows]), torch.cat(logits), trained)
