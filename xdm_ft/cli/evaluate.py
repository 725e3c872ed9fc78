"""`xdm-ft evaluate`: the metrics of a model on labelled images of a new site, beside what its card promises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from xdm_ft.cli.answer import Answer
from xdm_ft.evaluation.trials import ORACLE
from xdm_ft.export.card import WORDS, interval, ranks, shown
from xdm_ft.export.choose import training_images
from xdm_ft.export.evaluate import AtSite, Labelled, Versus, are_among, at_site, checksums, first_of_each
from xdm_ft.export.predictor import Model, cache_of, stream
from xdm_ft.export.sources import Site, read_site
from xdm_ft.report.finished import is_run, read_run
from xdm_ft.runtime.errors import UserError, plural, printable
from xdm_ft.runtime.progress import progress


@dataclass(frozen=True)
class Evaluation(Answer):
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

    def text(self) -> str:
        known = "images assumed independent" if self.whole.groups is None else plural(self.whole.groups, "group")
        over = f"95% over {'images' if self.whole.groups is None else 'groups'}"
        lines = [f"{self.method}, {plural(self.whole.images, 'image')}, {known}", ""]
        lines += [
            *_columns(
                [
                    ("", "value", over),
                    *_metrics(self.whole),
                ]
            ),
            "",
        ]
        if self.domains:
            lines += [*_columns([("domain", "images", "accuracy", "95%"), *_domains(self.domains)]), ""]
        rows = [
            (printable(name), str(one.images), "–" if one.recall is None else shown("accuracy", one.recall))
            for name, one in self.whole.classes.items()
        ]
        lines += [*_columns([("class", "images", "recall"), *rows]), ""]
        lines += [f"The card: {self.ranks}"] * (self.ranks is not None)
        sites = self.domains or {"": self.whole}
        lines += [_promise(name, one.versus) for name, one in sites.items() if one.versus is not None]
        if all(one.versus is None for one in sites.values()):
            lines.append("The model's card promises nothing about these images.")
        return "\n".join([*lines, *_left_out(self), _not_new(self)])


def _metrics(at: AtSite) -> Iterator[tuple[str, ...]]:
    for name, one in at.metrics.items():
        yield WORDS[name], shown(name, one.value), interval(name, one.interval)


def _domains(domains: dict[str, AtSite]) -> Iterator[tuple[str, ...]]:
    for name, one in domains.items():
        accuracy = one.metrics["accuracy"]
        ends = interval("accuracy", accuracy.interval)
        yield printable(name), str(one.images), shown("accuracy", accuracy.value), ends


def _promise(name: str, versus: Versus) -> str:
    at, metric = f"{printable(name)}: " if name else "", versus.metric
    told = f"{at}{WORDS[metric]} {shown(metric, versus.value)}; the card's mean is {shown(metric, versus.promised)}"
    if versus.interval is not None:
        told += f", 95% for such a sample of a like site {interval(metric, versus.interval)}"
    domain, worst = versus.worst
    return f"{told}, and of its worst held-out domain, {printable(domain)}, {shown(metric, worst)}: {versus.verdict}"


def _left_out(found: Evaluation) -> Iterator[str]:
    if found.seen_domains:
        yield f"Domains of this name trained the model, so they are no new sites: {', '.join(found.seen_domains)}"
    if found.absent_classes:
        names = ", ".join(map(printable, found.absent_classes))
        yield f"No image here of {plural(len(found.absent_classes), 'class')} of the model: {names}"
    if found.unreadable:
        name, reason = next(iter(found.unreadable.items()))
        count = plural(len(found.unreadable), "unreadable image")
        yield f"{count} left out, the first: {printable(name)}: {reason}"


def _not_new(found: Evaluation) -> str:
    """The last line: copies, and images that trained the model."""
    copies = "no copies"
    if found.copies:
        contrary = found.copies_with_another_label
        other = f", {contrary} of them with another label" if contrary else ""
        copies = f"{found.copies} {'copy' if found.copies == 1 else 'copies'} left out, as an image counts once{other}"
    trained = "whether any image trained the model is unknown, as there are no checksums of its training images"
    if found.training_images == 0:
        trained = "none of these images trained the model"
    elif found.training_images is not None:
        share = f"{found.training_images} of {plural(found.whole.images, 'image')}"
        trained = f"{share} trained the model: what is measured on them does not hold for new ones"
    return f"{copies}; {trained}"


def _columns(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yields aligned lines: the first cell to the left, numbers to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([f"{first:<{widths[0]}}", *cells]).rstrip()


def evaluate(
    model: Model, name: str, path: str, *, group: str | None, domains: Sequence[str] | None, batch_size: int | None
) -> Evaluation:
    """Returns the metrics of a model on the labelled images of a folder or table.

    `name` is the model's directory as the user wrote it. `group`: regular expression for the images' paths. `domains`:
    those to evaluate; None: all. Of images with the same bytes, the first one counts. Images that trained the model
    count, are counted, and leave no verdict. Raises `UserError` for a site that can not be read or a label that the
    model lacks.
    """
    if batch_size is not None and batch_size < 1:
        raise UserError(f"--batch-size: {batch_size} is not positive")
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
    images, unreadable = _answered(model, site.rows(rows), trained, batch_size, cache_of(name))
    if not len(images.labels):
        image, reason = next(iter(unreadable.items()))
        raise UserError(f"{printable(path)}: no image can be read, the first: {printable(image)}: {reason}")
    found = {
        domain: images.of_domain(number)
        for number, domain in enumerate(site.domain_names)
        if (images.domains == number).any()
    }
    several = len(found) > 1
    measured = (config.class_names, site.domain_names)
    promised = (config.expected, config.temperature)
    whole = at_site(images, *measured, *(() if several else promised))
    return Evaluation(
        model=name,
        site=path,
        method=config.method["label"],
        temperature=config.temperature,
        unreadable=unreadable,
        absent_classes=tuple(name for name, one in whole.classes.items() if not one.images),
        seen_domains=tuple(name for name in found if name in config.method["train_domains"]),
        copies=len(content) - len(rows),
        copies_with_another_label=int((site.labels != site.labels[first]).sum()),
        training_images=None if images.trained is None else int(images.trained.sum()),
        ranks=None if (card := config.expected) is None or card.selection == ORACLE else ranks(card),
        whole=whole,
        domains={name: at_site(one, *measured, *promised) for name, one in found.items()} if several else {},
    )


def _answered(
    model: Model, site: Site, trained: np.ndarray | None, batch_size: int | None, cache: Path
) -> tuple[Labelled, dict[str, str]]:
    """Returns the images that can be read with the model's logits, and {image: reason} of the others."""
    logits, kept, unreadable, start = [], [], dict[str, str](), 0
    with progress("evaluate", len(site.items), "images") as done:
        for batch in stream(model, site.items, batch_size=batch_size, cache=cache):
            readable = [place for place in range(len(batch.items)) if place not in batch.unreadable]
            logits.append(batch.logits[readable])
            kept += [start + place for place in readable]
            unreadable |= {batch.items[place].path: reason for place, reason in batch.unreadable.items()}
            start += len(batch.items)
            done.advance(len(batch.items))
    rest, trained = site.rows(np.array(kept, np.int64)), None if trained is None else trained[kept]
    return Labelled(torch.cat(logits), rest.labels, rest.domains, rest.groups, trained), unreadable
