"""A method of a run trained again, with the labelled images of a site as one more domain."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from xdm_ft.evaluation.trials import picked_trials
from xdm_ft.experiment.final_fit import Fit, fit_of_runs
from xdm_ft.export import Parts
from xdm_ft.export.sources import Site
from xdm_ft.images import ImageDataset
from xdm_ft.images.decode import decode, decoder_of
from xdm_ft.new_site.reference import prepared_run, trained_head
from xdm_ft.protocol.splits import split_of_rows, usable
from xdm_ft.report.finished import Run
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import progress
from xdm_ft.training.adaptation import FOLDS, NoHarm, compared, folds_of
from xdm_ft.training.bank.data import CachedPredictor


class WithSite(ImageDataset):
    """A data set of image files, and behind its rows those of a site, as the last domain."""

    def __init__(self, dataset: ImageDataset, site: Site, name: str) -> None:
        self.dataset, self.items, self.intensity = dataset, site.items, dataset.intensity
        self.class_names, self.domain_names = dataset.class_names, (*dataset.domain_names, name)
        self.labels = np.concatenate([dataset.labels, site.labels])
        self.domains = np.concatenate([dataset.domains, np.full(len(site.items), len(dataset.domain_names))])

    @property
    def decoder(self) -> str:
        return self.dataset.decoder

    def image(self, row: int) -> Image.Image:
        if row < len(self.dataset):
            return self.dataset.image(row)
        content = self.content(row)
        source = content if isinstance(content, bytes) else Path(content)
        return decode(source, self.name(row), intensity=self.dataset.intensity)

    def name(self, row: int) -> str:
        return self.dataset.name(row) if row < len(self.dataset) else self.items[row - len(self.dataset)].path

    def content(self, row: int) -> str | bytes:
        if row < len(self.dataset):
            return self.dataset.content(row)
        content = self.items[row - len(self.dataset)].content
        return content if isinstance(content, bytes) else os.fspath(content)


class WithOneMore(NamedTuple):
    """A head that was trained with a site."""

    shown: NoHarm  # in 4-fold cross-validation over the site's images, against training without any of them
    at_random: tuple[Tensor, Tensor]  # which random images are classified correctly, before and after, bool [m]
    state: dict[str, Tensor]  # weights of the head
    fit: Fit  # settings of the training


def with_one_more_domain(run: Run, parts: Parts, site: Site, random: Site | None, name: str) -> WithOneMore:
    """Trains the method of a model of the run with its settings on all images of the run and those of the site.

    `random`: images there that train nothing. `parts`: a model of the method, whose encoder is frozen. Raises
    `UserError`.
    """
    every = site
    if random is not None:
        every = Site([*site.items, *random.items], np.concatenate([site.labels, random.labels]), (), site.domains, None)
    label, seed = str(parts.config.method["label"]), int(run.results["recipe"]["protocol"]["seeds"][0])

    def with_site(dataset: ImageDataset) -> ImageDataset:
        if dataset.decoder != decoder_of(dataset.intensity):
            raise UserError(f"{run.path}: its images are not files, so a site cannot join their domains")
        return WithSite(dataset, every, name)

    with prepared_run(run, label, with_site) as (plan, prepared):
        dataset = plan.dataset
        unreadable = [row for row in prepared.unreadable if row < len(dataset)]
        picked = picked_trials([r for r in run.records if r.method == label], run.rule, run.metric)
        fit, both = fit_of_runs(plan, picked, unreadable), with_site(dataset)
        plan, features = replace(plan, dataset=both), prepared.for_method(fit.model.item).features
        assert features is not None, "the encoder is frozen"
        if fit.model.item.reads_normalized:
            features = features.normalized()
        of_run = np.flatnonzero(usable(dataset, unreadable))
        of_site, at_random = np.split(np.arange(len(dataset), len(both)), [len(site.items)])
        labels, fold = torch.from_numpy(every.labels), folds_of(of_site if site.groups is None else site.groups)

        def trained(rows: np.ndarray) -> tuple[CachedPredictor, dict[str, Tensor]]:
            rows = np.concatenate([of_run, rows])
            split = split_of_rows(both, (), np.unique(both.domains[rows]).tolist(), rows, {})
            job = replace(fit, model=replace(fit.model, split=split)).job(plan, prepared, seed)
            return CachedPredictor(job, features), dict(trained_head(job, features, plan.annotations))

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
        return WithOneMore(compared(before, after, site.groups), both_right, made[1], fit)
