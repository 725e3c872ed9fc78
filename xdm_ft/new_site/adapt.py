"""A model for one site: `training/adaptation.py` on its labelled images, written as a model directory if it pays."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from xdm_ft.data.features import FeatureTable
from xdm_ft.evaluation.few_labels import paired_interval
from xdm_ft.experiment.final_fit import Fit, fit_of_runs
from xdm_ft.experiment.plan import hparams
from xdm_ft.export import SINGLE, AdaptedConfig, AtRandom, HeadConfig, ModelParts, build_head, with_prefix
from xdm_ft.export.choose import Choice, chosen_method, read_parts, training_images
from xdm_ft.export.directory import (
    CHECKSUMS,
    digest_of,
    new_directory,
    write_changed,
    write_directory,
)
from xdm_ft.export.predictor import Model, cache_of
from xdm_ft.export.rows import labelled_site
from xdm_ft.export.sources import Site, Sources
from xdm_ft.heads.linear import Linear
from xdm_ft.images import ImageDataset
from xdm_ft.images.decode import decode, decoder_of
from xdm_ft.new_site.images import (
    Readable,
    contents_of_items,
    distinct,
    known_training_images,
    readable,
    unlabelled_images,
)
from xdm_ft.new_site.reference import prepare_run, train_head
from xdm_ft.new_site.stored import Stored, read_stored, without_site
from xdm_ft.protocol.splits import split_of_rows, usable
from xdm_ft.results.run import Run, read_run
from xdm_ft.results.trials import pick_trials
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.progress import progress
from xdm_ft.storage.tensors import tensors_of
from xdm_ft.training.adaptation import (
    FOLDS,
    NoHarm,
    adapt_head,
    compare_heads,
    correct,
    deciding_metric,
    do_no_harm,
    folds_of,
)
from xdm_ft.training.bank.data import CachedPredictor

FEWEST, ADVISED = 10, 20  # labelled images
SURE, CONTRARY, FEWEST_SURE = 0.9, 0.2, 10  # a probability, from which more than this share of so many labels differ


@dataclass(frozen=True)
class Adaptation:
    model: str
    site: str
    out: Path
    kept: bool  # whether the adapted model is written; else the shipped one stays
    labels: int  # labelled images that count
    groups: int | None  # of them; None: images assumed independent
    before: int  # images that the model classifies correctly
    after: int  # the same in cross-validation for the adapted head
    metric: str  # that decides, see `deciding_metric`
    metric_before: float  # its values, as of `before` and `after`
    metric_after: float
    p: float  # against no gain
    protocol_metric: str
    at_random: AtRandom | None  # what the adapted head does on other images of the site; None: none has a label
    recentred: bool
    absent_classes: tuple[str, ...]  # without a label
    warnings: tuple[str, ...]
    unlabelled: int  # rows without a label: left out
    copies: int  # of other images here: left out
    copies_with_another_label: int
    training_images: int | None  # images that trained the model: left out; None: unknown
    unreadable: dict[str, str]


@dataclass(frozen=True)
class _Labelled:
    """The labelled images of a site that count: each once, none that trained the model, all of them readable."""

    site: Site
    content: np.ndarray  # their checksums, uint8 [n,16]
    z: Tensor  # their features [n,K], as the model's head reads them
    about: dict[str, Any]  # fields of `Adaptation` on the others

    @property
    def labels(self) -> Tensor:
        return torch.from_numpy(self.site.labels)

    def config(self, model: str, shown: NoHarm, recentred: bool, at_random: AtRandom | None) -> AdaptedConfig:
        groups = None if self.site.groups is None else len(np.unique(self.site.groups))
        return AdaptedConfig(
            model=model, groups=groups, recentred=recentred, at_random=at_random, **shown._asdict()
        )  # fmt: skip

    def adaptation(
        self, name: str, path: str, out: Path, metric: str, shown: NoHarm, config: AdaptedConfig,
        warnings: Iterable[str] = (),
    ) -> Adaptation:  # fmt: skip
        return Adaptation(
            model=name, site=path, out=out, kept=shown.kept, groups=config.groups, at_random=config.at_random,
            recentred=config.recentred, protocol_metric=metric, warnings=tuple(warnings), **shown._asdict(),
            **self.about,
        )  # fmt: skip


def adapt(
    model: Model,
    name: str,
    path: str,
    out: Path,
    *,
    group: str | None = None,
    prevalence: np.ndarray | None = None,
    images: Sequence[str] | None = None,
    batch_size: int | None = None,
) -> Adaptation:
    """Adapts the head to the labelled images of `path`, see `read_site`, and writes the model unless it is no better.

    `images`: all images of the site, whose mean feature is moved to where those of the training classes would be, with
    the class shares `prevalence` [C], or those of the labels. Raises `UserError` if the model or the labels do not do.
    """
    stored, config, head = read_stored(model.folder, model.config), model.config, model.module.head
    if not isinstance(head, Linear):
        raise UserError(f"{name}: its head is {config.head.name}; only linear heads can be adapted")
    labelled = _read_labelled(model, name, path, group, known_training_images(model, name), batch_size)
    others = _at_random(model, name, path, group, labelled, batch_size)
    z, labels = labelled.z, labelled.labels
    # of logits that are divided by a temperature: what the model says now is where it starts
    weight, bias = (tensor.detach().cpu() / config.temperature for tensor in (head.weight, head.bias))
    shift = torch.zeros(len(stored.heads.mean))
    if images is not None:
        unreadable = labelled.about["unreadable"]
        shift = _shift(model, name, images, stored, labels, prevalence, unreadable, batch_size)
    about = weight, bias, z - shift, labels, stored.heads.mean, stored.heads.deviation
    decides = deciding_metric(config.metric)
    shown, (linear, moved) = do_no_harm(*about, labelled.site.groups, z, decides), adapt_head(*about)
    before, at_random = f"the model whose config.json has the checksum {model.checksum}", None
    if others is not None:
        was = correct(weight, bias, others.z, others.labels)
        at_random = gain(was, correct(linear, moved, others.z - shift, others.labels), others.site, decides)
    adapted = labelled.config(before, shown, images is not None, at_random)
    if shown.kept:
        parts = ModelParts(
            config, model.module.encoder, {}, model.reference, model.training_images, checksum=model.checksum
        )
        parts = _with_head(parts, {"weight": linear, "bias": moved - linear @ shift}, adapted, labelled.content)
        with new_directory(out) as temporary:
            write_changed(model.folder, parts, temporary)
    warnings = doubts(stored, z, labelled.site.labels)
    return labelled.adaptation(name, path, out, config.metric, shown, adapted, warnings)


def adapt_run(
    folder: str, method: str, path: str, out: Path, *, group: str | None = None, batch_size: int | None = None
) -> Adaptation:
    """Trains a method of a run again, with the labelled images of `path` as one more domain, and writes the model.

    It is not written if it is no better there than the same training without the site. Raises `UserError` if the method
    has no model on frozen features, if the run's images cannot be read, or if the labels do not do.
    """
    run = read_run(Path(folder).expanduser())
    chosen_method(run, Choice(method))
    selected = [record for record in run.records if record.method == method and run.rule in record.selected]
    if not selected:
        raise UserError(f"{folder}: no model of {method} was selected by {run.rule}; name another method")
    held_out = selected[0].test_domains
    parts = read_parts(run, Choice(method, held_out))
    if reason := without_site(parts.config):
        raise UserError(f"{folder}: {method} cannot be adapted: {reason}")
    domains = list(dict.fromkeys([*parts.config.method["train_domains"], *held_out]))
    of_all = {**parts.config.method, "train_domains": domains, "test_domains": []}
    parts = replace(parts, config=parts.config.model_copy(update={"method": of_all}))
    known, model = training_images(run, parts.config), Model(parts)
    if known is None:
        raise UserError(f"{folder}: --method needs the images of the run")
    labelled = _read_labelled(model, folder, path, group, known, batch_size)
    others = _at_random(model, folder, path, group, labelled, batch_size)
    name, random = "site" if "site" not in domains else "new site", None if others is None else others.site
    made = with_one_more_domain(run, parts, labelled.site, random, name)
    shown, state, fit, before = made.shown, made.state, made.fit, f"{method} of the run {run.path.resolve().name}"
    at_random = None if random is None else gain(*made.at_random, random, shown.metric)
    adapted = labelled.config(f"{before}, trained without them", shown, False, at_random)
    if shown.kept:
        model_of_fit, method_here = fit.model, {key: value for key, value in of_all.items() if key != "trial"}
        settings = hparams(model_of_fit.item, model_of_fit.training)
        method_here |= {"train_domains": [*domains, name], "steps": model_of_fit.steps, "hparams": settings}
        update = {
            "method": method_here | {"seed": run.recipe.protocol.seeds[0]},
            "head": HeadConfig(name=model_of_fit.item.head.name, settings=model_of_fit.item.head.kwargs()),
            "step": fit.step,
            "chosen": f"{method} trained again on all images of the run and of the site, with its settings there",
            "results": {},
            "few_images": {},
            "reference_xxh3": None,
        }
        parts = replace(parts, config=parts.config.model_copy(update=update), reference=None, training_images=known)
        parts = _with_head(parts, with_prefix(state, "head"), adapted, labelled.content)
        with new_directory(out) as temporary:
            write_directory(parts, temporary, None)
    return labelled.adaptation(folder, path, out, run.metric, shown, adapted)


def _read_labelled(
    model: Model, name: str, path: str, group: str | None, known: np.ndarray | None, batch_size: int | None
) -> _Labelled:
    """Reads the images that adapt. `known`: checksums of the images that trained the model. Raises `UserError`."""
    class_names = model.config.class_names
    site = labelled_site(path, model.config, group, "adapt")
    if len(site.domain_names) > 1:
        named = ", ".join(site.domain_names[:8])
        raise UserError(f"{path}: holds {len(site.domain_names)} domains ({named}); a model is adapted to one site")
    labelled = _that_count(model, name, path, site, known, batch_size)
    labels, trained = labelled.labels, labelled.about["training_images"]
    _refuse(path, labels, labelled.site.groups, trained, class_names)
    labelled.about["absent_classes"] = tuple(n for i, n in enumerate(class_names) if not (labels == i).any())
    return labelled


def _at_random(
    model: Model, name: str, path: str, group: str | None, adapting: _Labelled, batch_size: int | None
) -> _Labelled | None:
    """Reads the images that `label` drew at random, but those that train or adapt; None: no two groups have a label."""
    if not adapting.site.others:
        return None
    site = labelled_site(path, model.config, group)
    known = [known for known in (known_training_images(model, name), adapting.content) if known is not None]
    found = _that_count(model, name, path, site, np.concatenate(known), batch_size)
    adapting.about["unreadable"] |= found.about["unreadable"]
    units = found.labels if found.site.groups is None else np.unique(found.site.groups)
    return found if len(units) > 1 else None


def _that_count(
    model: Model, name: str, path: str, site: Site, known: np.ndarray | None, batch_size: int | None
) -> _Labelled:
    left, unreadable = distinct(site.items, known, cache_of(name)).untrained(), dict[str, str]()
    z, read = features_of(
        model, readable(model, name, path, left.items, unreadable, what="adapt", batch_size=batch_size)
    )
    about: dict[str, Any] = {
        "unlabelled": site.unlabelled,
        "copies": left.copies,
        "copies_with_another_label": int((site.labels != site.labels[left.first]).sum()),
        "training_images": left.training_images,
        "unreadable": unreadable,
    }
    content = contents_of_items([left.items[i] for i in read]).view(np.uint8).reshape(-1, 16)
    return _Labelled(site.rows(left.rows[read]), content, z, about)


def gain(before: Tensor, after: Tensor, site: Site, metric: str) -> AtRandom:
    """Returns what two heads do on random images of a site. before, after: which are classified correctly, bool [n]."""
    shown = compare_heads(before, after, torch.from_numpy(site.labels), site.groups, metric)
    classes = site.labels if metric == "balanced_accuracy" else None
    interval = paired_interval(after.numpy().astype(int) - before.numpy().astype(int), site.groups, classes)
    return AtRandom(
        images=len(before), metric=metric, before=shown.metric_before, after=shown.metric_after, interval=interval
    )


def doubts(stored: Stored, z: Tensor, labels: np.ndarray) -> Iterator[str]:
    """Yields a line if labels contradict the reference head where it is sure: they, or it, may be wrong."""
    p = stored.seen(z).p
    sure = p.max(1) >= SURE
    contrary = int((p.argmax(1) != labels)[sure].sum())
    if sure.sum() >= FEWEST_SURE and contrary > CONTRARY * sure.sum():
        yield (
            f"{contrary} of the {sure.sum()} images of which the reference head is sure (p of {SURE:g} or more) have "
            "another label: look at some of them, as labels may be wrong"
        )


def features_of(model: Model, images: Iterable[Readable]) -> tuple[Tensor, np.ndarray]:
    """Returns the features float32 [n,K] of images as the head reads them, and their rows among those asked for."""
    z, rows = [torch.zeros(0, model.config.encoder.width)], list[int]()
    for batch in images:
        z.append(model.module.head_input(batch.encoded))
        rows += batch.rows
    return torch.cat(z), np.array(rows, np.int64)


def _refuse(
    path: str, labels: Tensor, groups: np.ndarray | None, trained: int | None, class_names: Sequence[str]
) -> None:
    n, left_out = len(labels), f", without {trained} that trained the model" if trained else ""
    if n < FEWEST:
        raise UserError(f"{path}: too few to adapt: {plural(n, 'labelled image')}{left_out}; label {ADVISED} or more")
    if len(labels.unique()) == 1:
        only = class_names[int(labels[0])]
        raise UserError(f"{path}: all labels are {only}; label images of other classes too")
    if groups is not None and len(np.unique(groups)) < FOLDS:
        few = f"too few groups for cross-validation: {len(np.unique(groups))}"
        raise UserError(f"{path}: {few}; label images of {FOLDS} or more")


def _shift(
    model: Model,
    name: str,
    images: Sequence[str],
    stored: Stored,
    labels: Tensor,
    prevalence: np.ndarray | None,
    unreadable: dict[str, str],
    batch_size: int | None,
) -> Tensor:
    """Returns mean_U − Σ_y q_y μ_y, [K], of all images U of the site and the class means μ of training.

    `unreadable` gets those that cannot be read.
    """
    if prevalence is None and len(labels) < ADVISED:
        raise UserError(
            f"--recentre: with fewer than {ADVISED} labels it needs class shares; add --prevalence a=.3,b=.7"
        )
    shares = np.bincount(labels.numpy(), minlength=len(stored.shares)) / len(labels)
    q = torch.from_numpy(shares if prevalence is None else prevalence).float()
    listed = unlabelled_images(model, name, Sources(images))
    of_images = dict[str, str]()
    every = readable(model, name, images[0], listed.items, of_images, what="recentre", batch_size=batch_size)
    z, _ = features_of(model, every)
    unreadable |= of_images
    return z.mean(0) - q @ stored.class_means


def _with_head(parts: ModelParts, head: Mapping[str, Tensor], adapted: AdaptedConfig, images: np.ndarray) -> ModelParts:
    """Returns the model with another head. `images`: checksums of those that have adapted it."""
    new = build_head(parts.config.head, parts.config.encoder.width, len(parts.config.class_names), head)
    known = [] if parts.training_images is None else [parts.training_images]
    trained = np.unique(np.concatenate([*known, images[images.any(1)]]), axis=0) if known else None
    update = {
        "adapted": adapted,
        "temperature": 1.0,
        "fitted_temperature": None,
        "expected": None,
        "site_xxh3": None,
        "unknown": None,
        "training_images_xxh3": None if trained is None else digest_of(tensors_of({CHECKSUMS: trained})),
        "chosen": f"adapted to one site by {plural(adapted.labels, 'labelled image')}; {parts.config.chosen}",
    }
    config = parts.config.model_copy(update=update)
    return replace(parts, config=config, heads={SINGLE: new}, training_images=trained)


class WithSite(ImageDataset):
    """A data set of image files, and behind its rows those of a site, as the last domain."""

    def __init__(self, dataset: ImageDataset, site: Site, name: str) -> None:
        self.dataset, self.items, self.intensity = dataset, site.items, dataset.intensity
        self.class_names, self.domain_names = dataset.class_names, (*dataset.domain_names, name)
        self.labels = np.concatenate([dataset.labels, site.labels])
        self.domains = np.concatenate([dataset.domains, np.full(len(site.items), len(dataset.domain_names))])
        if dataset.soft_labels is not None:
            of_site = np.eye(len(dataset.class_names), dtype=np.float32)[site.labels]
            self.soft_labels = np.concatenate([dataset.soft_labels, of_site])

    @property
    def decoder(self) -> str:
        return self.dataset.decoder

    def image(self, row: int) -> Image.Image:
        return self.draft(row, None)

    def draft(self, row: int, least_side: int | None) -> Image.Image:
        if row < len(self.dataset):
            return self.dataset.draft(row, least_side)
        content = self.content(row)
        source = content if isinstance(content, bytes) else Path(content)
        return decode(source, self.name(row), least_side, intensity=self.dataset.intensity)

    def name(self, row: int) -> str:
        return self.dataset.name(row) if row < len(self.dataset) else self.items[row - len(self.dataset)].path

    def content(self, row: int) -> str | bytes:
        if row < len(self.dataset):
            return self.dataset.content(row)
        content = self.items[row - len(self.dataset)].content
        return content if isinstance(content, bytes) else os.fspath(content)


def with_rows(dataset: FeatureTable, site: Site, name: str) -> FeatureTable:
    """Returns features, and behind them those of a site, as the last domain."""
    both, number = copy.copy(dataset), len(dataset.domain_names)
    rows = np.stack([np.frombuffer(item.content, np.float32) for item in site.items if isinstance(item.content, bytes)])
    both.features, both.domain_names = np.concatenate([dataset.features, rows]), (*dataset.domain_names, name)
    both.labels = np.concatenate([dataset.labels, site.labels])
    both.domains = np.concatenate([dataset.domains, np.full(len(site.items), number)])
    both.groups = both.group_names = both.splits = both.ids = None
    return both


class WithOneMore(NamedTuple):
    """A head that was trained with a site."""

    shown: NoHarm  # in 4-fold cross-validation over the site's images, against training without any of them
    at_random: tuple[Tensor, Tensor]  # which random images are classified correctly, before and after, bool [m]
    state: dict[str, Tensor]  # weights of the head
    fit: Fit  # settings of the training


def with_one_more_domain(run: Run, parts: ModelParts, site: Site, random: Site | None, name: str) -> WithOneMore:
    """Trains the method of a model of the run with its settings on all images of the run and those of the site.

    `random`: images there that train nothing. `parts`: a model of the method, whose encoder is frozen. Raises
    `UserError`.
    """
    every = site
    if random is not None:
        every = Site([*site.items, *random.items], np.concatenate([site.labels, random.labels]), (), site.domains, None)
    label, seed = str(parts.config.method["label"]), run.recipe.protocol.seeds[0]

    def with_site(dataset: ImageDataset) -> ImageDataset:
        if isinstance(dataset, FeatureTable):
            return with_rows(dataset, every, name)
        if dataset.decoder != decoder_of(dataset.intensity):
            raise UserError(f"{run.path}: its images are not files, so a site cannot join their domains")
        return WithSite(dataset, every, name)

    with prepare_run(run, label, with_site) as (plan, prepared):
        dataset = plan.dataset
        unreadable = [row for row in prepared.unreadable if row < len(dataset)]
        picked = pick_trials([r for r in run.records if r.method == label], run.rule, run.metric)
        fit, both = fit_of_runs(plan, picked, unreadable), with_site(dataset)
        features = prepared.for_method(fit.model.item).features_of(fit.job(plan, prepared, seed))
        plan = replace(plan, dataset=both)
        of_run = np.flatnonzero(usable(dataset, unreadable))
        of_site, at_random = np.split(np.arange(len(dataset), len(both)), [len(site.items)])
        labels, fold = torch.from_numpy(every.labels), folds_of(of_site if site.groups is None else site.groups)

        def trained(rows: np.ndarray) -> tuple[CachedPredictor, dict[str, Tensor]]:
            rows = np.concatenate([of_run, rows])
            split = split_of_rows(both, (), np.unique(both.domains[rows]).tolist(), rows, {})
            job = replace(fit, model=replace(fit.model, split=split)).job(plan, prepared, seed)
            return CachedPredictor(job, features), dict(train_head(job, features, plan.annotations))

        def right(made: tuple[CachedPredictor, dict[str, Tensor]], rows: np.ndarray) -> Tensor:
            predicted = made[0].logits(made[1], torch.from_numpy(rows)).argmax(1)
            return predicted == labels[torch.from_numpy(rows - len(dataset))]

        with progress("training with the site", 2 + FOLDS, "heads") as bar:
            without = trained(of_site[:0])
            before, after = right(without, of_site), torch.zeros(len(of_site), dtype=torch.bool)
            bar.advance()
            for number in range(FOLDS):
                out = fold == number
                after[torch.from_numpy(out)] = right(trained(of_site[~out]), of_site[out])
                bar.advance()
            made = trained(of_site)
        both_right = right(without, at_random), right(made, at_random)
        decides = deciding_metric(run.metric)
        shown = compare_heads(before, after, labels[: len(of_site)], site.groups, decides)
        return WithOneMore(shown, both_right, made[1], fit)
