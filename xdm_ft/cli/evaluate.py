"""`xdm-ft evaluate`: the metrics of a model on labelled images of a new site, beside what its card promises."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xdm_ft.cli.answer import Answer, columns
from xdm_ft.cli.arguments import add_model_options, load_model, refuse_batch_size
from xdm_ft.runtime.errors import UserError, plural

if TYPE_CHECKING:
    import numpy as np

    from xdm_ft.export.evaluate import AtSite, Labelled, Versus
    from xdm_ft.export.predictor import Model
    from xdm_ft.export.sources import Site

HELP = "measure a model on labelled images of a new site, beside what it promises"
EXAMPLES = ("xdm-ft evaluate my_model SITE", "xdm-ft evaluate my_model site.csv --json")


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("model", metavar="MODEL", help="a model directory or a run directory")
    site = "folder <class>/<image> or <domain>/<class>/<image>, or a CSV or Parquet table with columns path, label; "
    verb.add_argument("site", metavar="SITE", help=f"{site}optional: domain, group")
    verb.add_argument("--group", metavar="REGEX", help="for an image's path: what it matches is the image's group")
    verb.add_argument("--domain", metavar="NAME", nargs="+", help="evaluate these domains only")
    add_model_options(verb)


def main(arguments: argparse.Namespace) -> Answer:
    refuse_batch_size(arguments)
    model, name, size = load_model(arguments), arguments.model, arguments.batch_size
    found = evaluate(model, name, arguments.site, group=arguments.group, domains=arguments.domain, batch_size=size)
    return Answer(found, list(found.lines()))


@dataclass(frozen=True)
class Evaluation:
    model: str
    site: str
    method: str
    temperature: float  # by which the model's logits are divided
    unreadable: dict[str, str]  # {image: why it was left out}
    absent_classes: tuple[str, ...]  # classes of the model without images
    seen_domains: tuple[str, ...]  # those with the name of a domain that trained the model
    copies: int  # of other images here, byte for byte; each image counts once
    copies_with_another_label: int
    training_images: int | None  # images here that trained the model; None: unknown
    ranks: str | None  # where the card says that a new site ranks; None: it promises nothing
    whole: AtSite  # all images
    domains: dict[str, AtSite]  # each of several domains; empty for one

    def lines(self) -> Iterator[str]:
        whole = self.whole
        groups = "images assumed independent" if whole.groups is None else plural(whole.groups, "group")
        yield from (f"{self.method}, {plural(whole.images, 'image')}, {groups}", "")
        over = f"95% over {'images' if whole.groups is None else 'groups'}"
        yield from (*columns([("", "value", over), *_metric_rows(whole)]), "")
        if self.domains:
            yield from (*columns([("domain", "images", "accuracy", "95%"), *_domain_rows(self.domains)]), "")
        yield from (*columns([("class", "images", "recall"), *_class_rows(whole)]), "")
        if self.ranks is not None:
            yield f"The card: {self.ranks}"
        promises = {name: site.versus for name, site in (self.domains or {"": whole}).items() if site.versus}
        yield from (_promise(name, versus) for name, versus in promises.items())
        if not promises:
            yield "The model's card promises nothing about these images."
        yield from self._left_out()
        yield f"{self._copies()}; {self._trained()}"

    def _left_out(self) -> Iterator[str]:
        if self.seen_domains:
            yield f"Domains of this name trained the model, so they are no new sites: {', '.join(self.seen_domains)}"
        if self.absent_classes:
            names = ", ".join(self.absent_classes)
            yield f"No image here of {plural(len(self.absent_classes), 'class')} of the model: {names}"
        if self.unreadable:
            name, reason = next(iter(self.unreadable.items()))
            yield f"{plural(len(self.unreadable), 'unreadable image')} left out, the first: {name}: {reason}"

    def _copies(self) -> str:
        if not self.copies:
            return "no copies"
        contrary = self.copies_with_another_label
        other = f", {contrary} of them with another label" if contrary else ""
        return f"{self.copies} {'copy' if self.copies == 1 else 'copies'} left out, as an image counts once{other}"

    def _trained(self) -> str:
        if self.training_images is None:
            return "whether any image trained the model is unknown, as there are no checksums of its training images"
        if not self.training_images:
            return "none of these images trained the model"
        share = f"{self.training_images} of {plural(self.whole.images, 'image')}"
        return f"{share} trained the model: what is measured on them does not hold for new ones"


def _metric_rows(site: AtSite) -> Iterator[tuple[str, ...]]:
    from xdm_ft.export.card import WORDS, interval, shown

    for name, measured in site.metrics.items():
        yield WORDS[name], shown(name, measured.value), interval(name, measured.interval)


def _domain_rows(domains: dict[str, AtSite]) -> Iterator[tuple[str, ...]]:
    from xdm_ft.export.card import interval, shown

    for name, site in domains.items():
        accuracy = site.metrics["accuracy"]
        ends = interval("accuracy", accuracy.interval)
        yield name, str(site.images), shown("accuracy", accuracy.value), ends


def _class_rows(site: AtSite) -> Iterator[tuple[str, ...]]:
    from xdm_ft.export.card import shown

    for name, one in site.classes.items():
        yield name, str(one.images), "–" if one.recall is None else shown("accuracy", one.recall)


def _promise(name: str, versus: Versus) -> str:
    from xdm_ft.export.card import WORDS, interval, shown

    at, metric = f"{name}: " if name else "", versus.metric
    text = f"{at}{WORDS[metric]} {shown(metric, versus.value)}; the card's mean is {shown(metric, versus.promised)}"
    if versus.interval is not None:
        text += f", 95% for such a sample of a like site {interval(metric, versus.interval)}"
    domain, worst = versus.worst
    return f"{text}, and of its worst held-out domain, {domain}, {shown(metric, worst)}: {versus.verdict}"


def evaluate(
    model: Model, name: str, path: str, *, group: str | None, domains: Sequence[str] | None, batch_size: int | None
) -> Evaluation:
    """Returns the metrics of a model on the labelled images of a folder or table.

    `name` is the model's directory as the user wrote it. `group`: regular expression for the images' paths. `domains`:
    those to evaluate; None: all. Of images with the same bytes, the first one counts. Images that trained the model
    count, are counted, and leave no verdict. Raises `UserError` for a site that can not be read or a label that the
    model lacks.
    """
    from xdm_ft.evaluation.trials import ORACLE
    from xdm_ft.export.card import ranks
    from xdm_ft.export.choose import training_images
    from xdm_ft.export.evaluate import are_among, at_site, checksums, first_of_each
    from xdm_ft.export.predictor import cache_of
    from xdm_ft.export.sources import read_site
    from xdm_ft.report.finished import is_run, read_run

    config = model.config
    site = read_site(path, config.class_names, config.renamed, group)
    if domains is not None:
        site = site.only(domains)
    content = checksums(site.items)
    rows, first = first_of_each(content)
    known = model.training_images
    if known is None and is_run(run := Path(name).expanduser()):
        known = training_images(read_run(run), config)
    trained = None if known is None else are_among(content[rows], known)
    images, unreadable = _predict(model, site.rows(rows), trained, batch_size, cache_of(name))
    if not images.site.items:
        image, reason = next(iter(unreadable.items()))
        raise UserError(f"{path}: no image can be read, the first: {image}: {reason}")
    by_domain = {
        domain: images.of_domain(number)
        for number, domain in enumerate(site.domain_names)
        if (images.site.domains == number).any()
    }
    several = len(by_domain) > 1
    card = config.expected
    whole = at_site(images, config.class_names, None if several else card, config.temperature)
    return Evaluation(
        model=name,
        site=path,
        method=config.method["label"],
        temperature=config.temperature,
        unreadable=unreadable,
        absent_classes=tuple(name for name, one in whole.classes.items() if not one.images),
        seen_domains=tuple(name for name in by_domain if name in config.method["train_domains"]),
        copies=len(content) - len(rows),
        copies_with_another_label=int((site.labels != site.labels[first]).sum()),
        training_images=None if images.trained is None else int(images.trained.sum()),
        ranks=None if card is None or card.selection == ORACLE else ranks(card),
        whole=whole,
        domains={
            name: at_site(of_domain, config.class_names, card, config.temperature)
            for name, of_domain in (by_domain.items() if several else ())
        },
    )


def _predict(
    model: Model, site: Site, trained: np.ndarray | None, batch_size: int | None, cache: Path
) -> tuple[Labelled, dict[str, str]]:
    """Returns the images that can be read with the model's logits, and {image: reason} of the others."""
    import numpy as np
    import torch

    from xdm_ft.export.evaluate import Labelled
    from xdm_ft.export.predictor import stream
    from xdm_ft.runtime.progress import progress

    logits, readable, unreadable, start = [], [], dict[str, str](), 0
    with progress("evaluate", len(site.items), "images") as bar:
        for batch in stream(model, site.items, batch_size=batch_size, cache=cache):
            logits.append(batch.logits[batch.readable])
            readable += [start + position for position in batch.readable]
            unreadable |= {batch.items[i].path: reason for i, reason in batch.unreadable.items()}
            start += len(batch.items)
            bar.advance(len(batch.items))
    rest = site.rows(np.array(readable, np.int64))
    return Labelled(rest, torch.cat(logits), None if trained is None else trained[readable]), unreadable
