"""`xdm-ft evaluate`: the metrics of a model on labelled images of a new site, beside what its card promises."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from xdm_ft.cli import Answer, columns
from xdm_ft.cli.predict import check_batch_size, load_model
from xdm_ft.evaluation.trials import ORACLE
from xdm_ft.export.card import WORDS, interval, ranks, shown
from xdm_ft.export.choose import training_images
from xdm_ft.export.expected import AtSite, Labelled, are_among, at_site, checksums, first_of_each
from xdm_ft.export.predictor import Model, cache_of, stream
from xdm_ft.export.sources import Site, read_site
from xdm_ft.report.finished import is_run, read_run
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.progress import progress


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

        table = [("", "value", f"95% over {'images' if whole.groups is None else 'groups'}")]
        for name, measured in whole.metrics.items():
            table.append((WORDS[name], shown(name, measured.value), interval(name, measured.interval)))
        yield from (*columns(table), "")
        if self.domains:
            rows = [("domain", "images", "accuracy", "95%")]
            for name, site in self.domains.items():
                accuracy = site.metrics["accuracy"]
                ends = interval("accuracy", accuracy.interval)
                rows.append((name, str(site.images), shown("accuracy", accuracy.value), ends))
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
            text = f"{at}{WORDS[metric]} {value}; the card's mean is {promised}"
            if versus.interval is not None:
                text += f", 95% for such a sample of a like site {interval(metric, versus.interval)}"
            domain, worst = versus.worst
            yield f"{text}, and of its worst held-out domain, {domain}, {shown(metric, worst)}: {versus.verdict}"
        if not promises:
            yield "The model's card promises nothing about these images."
        yield from self._reservations()

    def _reservations(self) -> Iterator[str]:
        """Yields which images do not count, or may not, as images of a new site."""
        if self.seen_domains:
            yield f"Domains of this name trained the model, so they are no new sites: {', '.join(self.seen_domains)}"
        if self.absent_classes:
            names = ", ".join(self.absent_classes)
            yield f"No image here of {plural(len(self.absent_classes), 'class')} of the model: {names}"
        if self.unreadable:
            name, reason = next(iter(self.unreadable.items()))
            yield f"{plural(len(self.unreadable), 'unreadable image')} left out, the first: {name}: {reason}"
        copies = "no copies"
        if self.copies:
            contrary = self.copies_with_another_label
            other = f", {contrary} of them with another label" if contrary else ""
            word = "copy" if self.copies == 1 else "copies"
            copies = f"{self.copies} {word} left out, as an image counts once{other}"
        if self.training_images is None:
            trained = "whether any image trained the model is unknown, as there are no checksums of its training images"
        elif not self.training_images:
            trained = "none of these images trained the model"
        else:
            share = f"{self.training_images} of {plural(self.whole.images, 'image')}"
            trained = f"{share} trained the model: what is measured on them does not hold for new ones"
        yield f"{copies}; {trained}"


def main(arguments: argparse.Namespace) -> Answer:
    """Measures a model on the labelled images of a folder or table, of all domains or of `--domain` alone.

    Of images with the same bytes, the first one counts. Images that trained the model count, are counted, and leave no
    verdict. Raises `UserError` for a site that can not be read or a label that the model lacks.
    """
    check_batch_size(arguments)
    model, path = load_model(arguments), arguments.site
    config, card = model.config, model.config.expected
    site = read_site(path, config.class_names, config.renamed, arguments.group)
    if arguments.domain is not None:
        site = site.only(arguments.domain)
    content = checksums(site.items)
    rows, first = first_of_each(content)
    of_training = model.training_images
    if of_training is None and is_run(run := Path(arguments.model).expanduser()):
        of_training = training_images(read_run(run), config)
    trained = None if of_training is None else are_among(content[rows], of_training)
    cache = cache_of(arguments.model)
    images, unreadable = _predict(model, site.rows(rows), trained, arguments.batch_size, cache)
    if not images.site.items:
        image, reason = next(iter(unreadable.items()))
        raise UserError(f"{path}: no image can be read, the first: {image}: {reason}")
    by_domain = {
        domain: images.of_domain(number)
        for number, domain in enumerate(site.domain_names)
        if (images.site.domains == number).any()
    }
    several = len(by_domain) > 1
    whole = at_site(images, config.class_names, None if several else card, config.temperature)
    evaluation = Evaluation(
        model=arguments.model,
        site=path,
        method=config.method["label"],
        temperature=config.temperature,
        unreadable=unreadable,
        absent_classes=tuple(name for name, of_class in whole.classes.items() if not of_class.images),
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
    return Answer(evaluation, list(evaluation.lines()))


def _predict(
    model: Model, site: Site, trained: np.ndarray | None, batch_size: int | None, cache: Path
) -> tuple[Labelled, dict[str, str]]:
    """Returns the images that can be read with the model's logits, and {image: reason} of the others."""
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
