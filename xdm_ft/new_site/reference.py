"""The heads that measure a model at new sites: trained when it is exported, while its run and features are at hand.

For the domains of the model, and for the same without one and without two of them: what a head shows on a domain that
it never saw tells how far the estimates of `evaluation/expected_site.py` are off.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from xdm_ft.algorithms import Solver
from xdm_ft.core import Annotations, Criteria, ModelKey, set_name
from xdm_ft.evaluation.expected_site import (
    FEWEST_CLASSES,
    MIN_DOMAINS,
    Validated,
    agreement,
    confidence_threshold,
    energy,
    parts_at,
    unknown_of,
)
from xdm_ft.evaluation.few_labels import expected_half_width, threshold_for
from xdm_ft.evaluation.metrics import temperature
from xdm_ft.evaluation.neighbours import class_means, fit
from xdm_ft.experiment.estimate import heads_time
from xdm_ft.experiment.final_fit import Fit, fit_of_runs
from xdm_ft.experiment.plan import Plan, PlannedModel, domains_needed, make_plan, read_data
from xdm_ft.experiment.prepare import Prepared, build_encoders, make_job, prepare
from xdm_ft.experiment.resume import written_recipe
from xdm_ft.experiment.work import launched, one_thread
from xdm_ft.export import ModelConfig, ModelParts
from xdm_ft.export.directory import digest_of
from xdm_ft.features.cache import ROWS_AT_ONCE, Features, standard
from xdm_ft.heads.linear import Linear
from xdm_ft.images import ImageDataset
from xdm_ft.new_site.stored import About, AtDomain, Bought, Heads, RiskAt, SeenByHeads, Stored, without_site
from xdm_ft.protocol.splits import Split, check_classes, in_domains, split_of_rows, with_groups, with_validation
from xdm_ft.recipe.check import check
from xdm_ft.recipe.components import Component, find
from xdm_ft.recipe.method import MethodCommon, MethodItem
from xdm_ft.recipe.settings import Cluster
from xdm_ft.results.run import Run
from xdm_ft.results.trials import pick_trials
from xdm_ft.runtime.errors import UserError, plural, printable
from xdm_ft.runtime.machine import own_cores
from xdm_ft.runtime.progress import progress
from xdm_ft.training import Job, Training
from xdm_ft.training.adaptation import deciding_metric
from xdm_ft.training.bank.train import chunks, solve, train_chunk
from xdm_ft.training.selection import FINAL_FIT

logger = logging.getLogger("xdm_ft")
RISKS = (0.05, 0.1, 0.2)
RANDOM_IMAGES, DRAWS = (25, 50, 100, 200), 200  # of the table of budgets: of each held-out domain
STARTS, SNAPSHOTS = 4, (5, 20, 80, 300)  # of the bank: random initialisations, numbers of steps
BANK = Training(optimizer="adamw", lr=1e-3, batch_size=96, sampler="pooled", steps=300, evaluate_every=5)
ALL_PAIRS, MAX_PAIRS = 12, 66  # up to so many domains each pair of them is left out once; else so many pairs
MAX_LEFT_OUT = 64  # classes that are left out with a domain, in all
MAX_BYTES = 64_000_000  # of the stored heads
_Answers = tuple[np.ndarray, np.ndarray]
"""Of the reference head on some images: its confidence max p, float64 [n], and whether it is right, bool [n]."""


def with_site(run: Run, parts: ModelParts) -> ModelParts:
    """Returns a model of the run with what tells of new sites, if there is such; says why if it cannot be made."""
    if reason := without_site(parts.config):
        logger.info("no heads for new sites: %s", reason)
        return parts
    try:
        stored = site_of(run, parts.config)
        tensors = stored.tensors()
    except (UserError, OSError) as error:
        reason = printable(error)[:200]
        logger.warning("%s: `assess` and `adapt` will not work with this model: %s", run.path, reason)
        return parts
    config = parts.config.model_copy(update={"site_xxh3": digest_of(tensors), "unknown": stored.unknown})
    return replace(parts, config=config, site=tensors)


def site_of(run: Run, config: ModelConfig) -> Stored:
    """Trains the heads. Raises `UserError` if the data of the run cannot be read, or are not enough."""
    label, held_out = str(config.method["label"]), tuple(config.method["test_domains"])
    seed, records = int(config.method["seed"]), [record for record in run.records if record.method == label]
    picked = pick_trials(records, run.rule, run.metric)
    if held_out:
        key = ModelKey(label, held_out, seed, config.method.get("trial", 0))
        picked = [record for record in records if record.key == key]
    with prepare_run(run, label) as (plan, prepared):
        if run.results["environment"]["data"]["content"] != prepared.content:
            raise UserError("the images have changed since the run")
        fit = fit_of_runs(plan, picked, prepared.unreadable)
        split = plan.by_key[picked[0].key].split if held_out else fit.model.split
        split = with_validation(plan.dataset, split, plan.recipe.protocol.val_fraction, seed)
        curve = run.results.get("label_curve") or {"method": None, "points": []}
        gains = {of["labels"]: of["gain"] for of in curve["points"] if of["chosen"] == "label"}
        fits = curve["method"] == label and curve.get("metric", "accuracy") == deciding_metric(run.metric)
        return _Study(plan, prepared, fit, split, seed).stored(gains if fits else {})


@contextmanager
def prepare_run(
    run: Run, label: str, also: Callable[[ImageDataset], ImageDataset] | None = None
) -> Iterator[tuple[Plan, Prepared]]:
    """Yields the plan of a run and the features that a method reads, on one thread: products of heads are small.

    `also`: returns the run's data set with more images behind its own, which are prepared too. Raises `UserError` if
    the run's data cannot be read.
    """
    recipe = replace(check(written_recipe(run.path, run.results["recipe"])), cluster=Cluster())
    alone = replace(recipe, methods=tuple(item for item in recipe.methods if item.label == label))
    with launched(recipe) as accelerator:
        dataset = read_data(recipe)
        every = dataset if also is None else also(dataset)
        alone, encoders = build_encoders(alone, every)
        prepared = prepare(alone, every, encoders, accelerator, run.results["environment"])
        [item] = alone.methods
        recipe = replace(recipe, methods=tuple(item if of.label == label else of for of in recipe.methods))
        unreadable = [row for row in prepared.unreadable if row < len(dataset)]
        with one_thread():
            yield make_plan(recipe, dataset).without(unreadable), prepared.to(accelerator.device)


class _Trained(NamedTuple):
    """Heads that never saw some domains, and what they show on the validation images of the others."""

    heads: Heads
    temperature: float  # of the reference head
    known: Validated


@dataclass(frozen=True)
class _Study:
    """The images of a model, in `split`: those that train heads, and those of `train_val` that measure them."""

    plan: Plan
    prepared: Prepared
    fit: Fit
    split: Split
    seed: int

    @property
    def dataset(self) -> ImageDataset:
        return self.plan.dataset

    @property
    def item(self) -> MethodItem:
        return self.fit.model.item

    @cached_property
    def features(self) -> Features:
        """As the model's head reads them."""
        return self.prepared.for_method(self.item).features_of(self.fit.job(self.plan, self.prepared, self.seed))

    def stored(self, gains: Mapping[int, float]) -> Stored:
        # what is held out as one is one site: heads that saw its other half would know it; sites of a fold leave
        # training together and are measured one by one
        protocol = self.plan.recipe.protocol
        sets = {set_name(held): held for held in protocol.sets_of(self.split.train_domains)}
        sites = {name: [(of,) for of in held] if protocol.folds else [held] for name, held in sets.items()}
        names = list(sets)
        pairs = pairs_of(len(names), self.seed) if len(names) >= MIN_DOMAINS else []
        singles = range(len(names)) if pairs else range(0)
        if not len(self.split.evaluation["train_val"]):
            raise UserError("there are no validation images of its training domains")
        every = {**sets, **{set_name(site): site for of in sites.values() for site in of}}
        rows_of = {
            name: np.flatnonzero(self._of_model & in_domains(self.dataset, held)) for name, held in every.items()
        }
        left_out = self._drawn({name: rows_of[name] for name in names}) if pairs else {}
        unvalidated = replace(self.split, evaluation={})
        groups = [
            ([self._reference(unvalidated).model], 1 + len(singles) + len(pairs)),
            (self._bank_models(unvalidated), 1 + len(singles)),
            (self._bank_models(unvalidated)[:1], sum(map(len, left_out.values()))),
        ]
        encoder = self.prepared.for_method(self.item).encoder
        logger.info("heads for new sites: %s", heads_time(self.plan, encoder, self.features.device, groups))
        with progress("heads for new sites", 1 + len(singles) + len(pairs) + len(left_out), "sets of domains") as bar:
            of_all = self._heads(())
            bar.advance()
            # what measures at one domain is made of what the others show, by heads that saw neither
            by_others = {name: list[_Answers]() for name in names}
            for first, second in ((names[i], names[j]) for i, j in pairs):
                with self._skipped():
                    heads = self._heads((*sets[first], *sets[second]), bank=False)
                    by_others[first].append(self._answers(self._seen(heads, rows_of[second]), rows_of[second]))
                    by_others[second].append(self._answers(self._seen(heads, rows_of[first]), rows_of[first]))
                bar.advance()
            at, answers = dict[str, AtDomain](), dict[str, _Answers]()
            for name in (names[i] for i in singles):
                with self._skipped():
                    heads = self._heads(sets[name])
                    for site in (of for of in map(set_name, sites[name]) if len(rows_of[of])):
                        seen = self._seen(heads, rows_of[site])
                        at[site] = self._at(sets[name], heads, seen, by_others[name], rows_of[site])
                        answers[site] = self._answers(seen, rows_of[site])
                bar.advance()
            scores = dict[str, list[tuple[np.ndarray, np.ndarray]]]()
            for name, classes in left_out.items():
                with self._skipped():
                    scores[name] = self._scores(sets[name], classes, rows_of[name])
                bar.advance()
        for name, of in at.items():
            of.risks.update({f"{risk:g}": risk_at(risk, name, answers) for risk in RISKS})
        threshold = atc_threshold([*answers.values()])
        reads = torch.cat([*self.split.train]).sort().values
        means = class_means(lambda: self._blocks(self.features, reads), len(self.dataset.class_names))[1]
        about = About(
            heads=self._description(self._item(self.split)),
            temperature=of_all.temperature,
            offset=of_all.known.offset,
            threshold=threshold,
            images=of_all.known.images,
            domains=at,
            budgets=budgets_of([*answers.values()], gains, deciding_metric(self.plan.recipe.protocol.metric)),
        )
        shares = self._shares(self._of_model)
        return Stored(
            about,
            of_all.heads,
            torch.from_numpy(means).float(),
            shares,
            of_all.known.accuracies,
            of_all.known.agreements,
            unknown_of(scores) if len(scores) >= MIN_DOMAINS else None,
        )

    @contextmanager
    def _skipped(self) -> Iterator[None]:
        """Context of heads without some domains, which a user does without if too few images are left for them."""
        try:
            yield
        except UserError as error:
            logger.warning("heads for new sites: some are left out: %s", printable(error)[:200])

    @property
    def _of_model(self) -> np.ndarray:
        """Which rows are those of the model, bool [N]."""
        of_model = np.zeros(len(self.dataset), bool)
        of_model[torch.cat([*self.split.train, self.split.evaluation["train_val"]]).numpy()] = True
        return of_model

    def _drawn(self, rows_of: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
        """Returns the classes that are left out with each set of domains, where they have images beside others."""
        of = {name: np.unique(self.dataset.labels[rows]).tolist() for name, rows in rows_of.items()}
        if len({label for labels in of.values() for label in labels}) < FEWEST_CLASSES:
            return {}
        pairs = [(name, label) for name, labels in of.items() for label in labels if len(labels) > 1]
        drawn = sorted(np.random.default_rng(self.seed).permutation(len(pairs))[:MAX_LEFT_OUT].tolist())
        classes = dict[str, list[int]]()
        for name, label in (pairs[i] for i in drawn):
            classes.setdefault(name, []).append(label)
        return classes

    def _scores(
        self, held: Sequence[str], classes: Sequence[int], rows: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the scores of known and unknown images among `rows`, by a head without `held` and each class."""
        splits = [self._without(held, label) for label in classes]
        mean, deviation = standard(self.features, torch.cat([*self._without(held).train]).sort().values)
        models = [self._bank_models(split)[0] for split in splits]
        weights = self._linear_heads(models, self.features.standardized(mean, deviation), SNAPSHOTS[-1:])[:, 0]
        logits = self._logits(Heads(weights.half().float(), mean, deviation), rows).double().numpy()
        for of_head, split in zip(logits, splits, strict=True):  # of other classes a head has what it started from
            trained = self.dataset.labels[torch.cat([*split.train]).numpy()]
            of_head[:, np.setdiff1d(np.arange(logits.shape[-1]), trained)] = -np.inf
        scores = energy(logits)
        unknown = [self.dataset.labels[rows] == label for label in classes]
        return [(of[~out], of[out]) for of, out in zip(scores, unknown, strict=True)]

    def _shares(self, rows: np.ndarray) -> np.ndarray:
        counts = np.bincount(self.dataset.labels[rows], minlength=len(self.dataset.class_names))
        return counts / counts.sum()

    def _answers(self, seen: SeenByHeads, rows: np.ndarray) -> _Answers:
        return seen.p.max(1), seen.predicted[-1] == self.dataset.labels[rows]

    def _at(
        self, held: Sequence[str], trained: _Trained, seen: SeenByHeads, others: Sequence[_Answers], rows: np.ndarray
    ) -> AtDomain:
        """Returns what the heads without the domains `held` show on their images `rows`, but for the risks."""
        accuracy = float(self._answers(seen, rows)[1].mean())
        shares = self._shares(self._of_model & ~in_domains(self.dataset, held))
        threshold = atc_threshold(others)
        parts = parts_at(seen.p, seen.predicted, trained.known, shares, math.inf if threshold is None else threshold)
        encoded, split = self.prepared.for_method(self.item).features, self._without(held)
        assert encoded is not None
        training, validation = torch.cat([*split.train]).sort().values, split.evaluation["train_val"]
        reference = fit(
            lambda: self._blocks(encoded, training), lambda: self._blocks(encoded, validation),
            len(self.dataset.class_names),
        )  # fmt: skip
        distances = [reference.distance(z) for z, _ in self._blocks(encoded, torch.from_numpy(rows))]
        return AtDomain(
            accuracy=accuracy,
            images=len(rows),
            parts=parts,
            error=None if parts is None else parts.estimate - accuracy,
            distance=float(np.median(np.concatenate(distances))),
            risks={},
        )

    def _blocks(self, features: Features, rows: Tensor) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for some in rows.split(ROWS_AT_ONCE):
            yield features[some.to(features.device)].cpu().numpy(), self.dataset.labels[some.numpy()]

    def _without(self, names: Sequence[str], label: int | None = None) -> Split:
        """Returns the split without some of its domains and other images of their groups, and without a class."""
        dataset, split = self.dataset, self.split
        left_out = with_groups(dataset, in_domains(dataset, names)) | (dataset.labels == label)
        rows, validation = torch.cat([*split.train]).sort().values.numpy(), split.evaluation["train_val"].numpy()
        rows, validation = rows[~left_out[rows]], validation[~left_out[validation]]
        numbers = [dataset.domain_names.index(name) for name in split.train_domains if name not in names]
        without = ", ".join(names)
        check_classes(dataset, rows, numbers, f" left for training without {without}")
        if not len(validation):
            raise UserError(f"there are no validation images without {without}")
        return split_of_rows(dataset, (*split.test_domains, *names), numbers, rows, {"train_val": validation})

    def _item(self, split: Split) -> MethodItem:
        """Returns the method of a reference head: the model's own, or what takes its place."""
        item = self.item
        if item.is_solver:
            return item if item.algorithm.name in ("linear_probe", "zero_shot") else linear_erm(item)
        if item.head.name != "linear":
            return linear_erm(item)
        return _erm(item) if len(split.train_domains) < domains_needed(item) else item

    def _description(self, item: MethodItem) -> str:
        kind = "as the model" if item is self.item else f"linear ERM, in place of {self.item.label}"
        images = sum(map(len, self.split.train))
        return f"{kind}; trained on {plural(images, 'image')} of {plural(len(self.split.train_domains), 'domain')}"

    def _heads(self, names: Sequence[str], bank: bool = True) -> _Trained:
        """Trains the heads without some domains. `bank`: not the reference head alone."""
        split, features = self._without(names), self.features
        rows = torch.cat([*split.train]).sort().values
        mean, deviation = standard(features, rows)
        item = self._item(split)
        # class embeddings fit features as they are
        reads = features if item.reads_text else features.standardized(mean, deviation)
        annotations = self.plan.annotations
        state = train_head(self._reference(split).job(self.plan, self.prepared, self.seed), reads, annotations)
        weight, bias = state["head.weight"].float(), state["head.bias"].float()
        if item.reads_text:
            bias, weight = bias + weight @ mean, weight * deviation
        weights = torch.cat([weight, bias[:, None]], 1)[None]
        if bank:
            weights = torch.cat([self._bank(split, features.standardized(mean, deviation)), weights])
        # as the file keeps them, so that what is measured is what is stored
        heads = Heads(weights.detach().half().float(), mean, deviation)
        validation = split.evaluation["train_val"].numpy()
        logits, labels = self._logits(heads, validation), self.dataset.labels[validation]
        fitted = temperature(logits[-1], torch.from_numpy(labels)) or 1.0
        seen = SeenByHeads.of(logits, fitted)
        accuracies = (seen.predicted == labels).mean(1)
        offset = float(seen.p.max(1).mean() - accuracies[-1])
        return _Trained(heads, fitted, Validated(accuracies, agreement(seen.predicted), len(labels), offset))

    def _reference(self, split: Split) -> Fit:
        item = self._item(split)
        fit = replace(self.fit, model=replace(self.fit.model, item=item, split=split))
        if item.head.block is self.item.head.block:
            return fit
        # another kind of head: all steps of the recipe
        training = fit.model.training.model_copy(update={"evaluate_every": None, "patience": None})
        return replace(fit, model=replace(fit.model, training=training), step=fit.model.steps, averaged_from=None)

    def _bank_models(self, split: Split) -> list[PlannedModel]:
        item = linear_erm(self.item)
        keys = [ModelKey(item.label, split.test_domains, self.seed + start, 0) for start in range(STARTS)]
        return [PlannedModel(key, item, BANK, split, int(BANK.steps or 0)) for key in keys]

    def _bank(self, split: Split, features: Features) -> Tensor:
        """Returns linear ERM heads float32 [M,C,K+1]: several initialisations, each after several numbers of steps."""
        classes, snapshots = len(self.dataset.class_names), list(SNAPSHOTS)
        while snapshots and 2 * (1 + STARTS * len(snapshots)) * classes * (features.width + 1) > MAX_BYTES:
            snapshots = snapshots[1:]
        if not snapshots:
            raise UserError(f"heads of {classes} classes and {features.width} features are too large to be stored")
        return self._linear_heads(self._bank_models(split), features, snapshots).flatten(0, 1)

    def _linear_heads(self, models: Sequence[PlannedModel], features: Features, snapshots: Sequence[int]) -> Tensor:
        """Returns linear ERM heads float32 [H,S,C,K+1] of models, each after several numbers of steps."""
        rules, jobs = {f"step {step}": {step: 1.0} for step in snapshots}, list[Job]()
        for model in models:
            job = make_job(self.plan, self.prepared, model, rules)
            jobs.append(replace(job, setup=replace(job.setup, loss_average="sample", class_weight=None)))
        annotations, criteria = self.plan.annotations.to(features.device), Criteria(tuple(rules), "accuracy")
        heads = list[Tensor]()
        for chunk in chunks(jobs, features.device):
            for trained in train_chunk(chunk, features, annotations, criteria, record=_nothing):
                if trained.failure is not None:
                    raise UserError(f"a head of the bank has failed: {trained.failure}")
                states = [trained.selected[rule].state for rule in rules]
                heads.append(torch.stack([torch.cat([s["head.weight"], s["head.bias"][:, None]], 1) for s in states]))
        return torch.stack(heads)

    def _logits(self, heads: Heads, rows: np.ndarray) -> Tensor:
        """Returns the logits [M,n,C] of all heads on images of the data set."""
        parts = torch.from_numpy(rows).split(ROWS_AT_ONCE)
        features = self.features
        return torch.cat([heads.logits(features[some.to(features.device)].cpu()) for some in parts], 1)

    def _seen(self, trained: _Trained, rows: np.ndarray) -> SeenByHeads:
        return SeenByHeads.of(self._logits(trained.heads, rows), trained.temperature)


def train_head(job: Job, features: Features, annotations: Annotations) -> Mapping[str, Tensor]:
    """Trains the head of a final fit and returns its weights. Raises `UserError` if there are none."""
    criteria = Criteria((FINAL_FIT,), "accuracy")
    if isinstance(job.new_method(), Solver):
        trained = solve(job, features, annotations, criteria, threads=own_cores())
    else:
        [trained] = train_chunk([job], features, annotations.to(features.device), criteria, record=_nothing)
    if trained.failure is not None:
        raise UserError(f"{job.method}: the head has failed: {trained.failure}")
    return trained.selected[FINAL_FIT].state


def pairs_of(domains: int, seed: int) -> list[tuple[int, int]]:
    """Returns the pairs of domains that are left out together: all, or of many domains some, as many of each."""
    if domains <= ALL_PAIRS:
        return list(combinations(range(domains), 2))
    order = np.random.default_rng(seed).permutation(domains).tolist()
    ring = [(order[i], order[(i + step) % domains]) for step in range(1, (domains + 1) // 2) for i in range(domains)]
    return ring[: max(MAX_PAIRS, domains)]


def atc_threshold(seen: Sequence[_Answers]) -> float | None:
    """Returns ATC's threshold of held-out domains, each with confidence [n] and right [n]; None: above every one."""
    threshold = confidence_threshold([c for c, _ in seen], [right for _, right in seen]) if seen else math.inf
    return None if math.isinf(threshold) else threshold


def risk_at(risk: float, name: str, seen: Mapping[str, _Answers]) -> RiskAt:
    """Returns the threshold for a risk at a held-out domain, and how the others' largest one does there."""
    thresholds = {domain: threshold_for(risk, *values) for domain, values in seen.items()}
    here, others = thresholds[name], [threshold for domain, threshold in thresholds.items() if domain != name]
    tried = None if None in others else max(threshold.value for threshold in others if threshold is not None)
    confidence, right = seen[name]
    answered = confidence >= (math.inf if tried is None else tried)
    return RiskAt(
        threshold=None if here is None else here.value,
        tried=tried,
        risk=float((~right[answered]).mean()) if answered.any() else None,
        answered=float(answered.mean()),
    )


def budgets_of(seen: Sequence[_Answers], gains: Mapping[int, float], metric: str = "accuracy") -> tuple[Bought, ...]:
    """Returns what budgets of `label` buy at held-out domains. `gains` in the metric: {labels that adapt: gain}."""
    rng, bought = np.random.default_rng(0), list[Bought]()
    for n in RANDOM_IMAGES if seen else ():
        draws = [(*of, rng.integers(len(of[0]), size=n)) for of in seen for _ in range(DRAWS)]
        widths = [expected_half_width(float(right[rows].mean()), n) for _, right, rows in draws]
        found = [threshold_for(0.1, confidence[rows], right[rows]) is not None for confidence, right, rows in draws]
        gain = None
        if 3 * n <= max(gains, default=0):
            gain = float(np.interp(math.log(3 * n), np.log([*gains]), [*gains.values()]))
        of_draws = {"half_width": float(np.mean(widths)), "threshold": float(np.mean(found))}
        bought.append(Bought(budget=4 * n, images=n, gain=gain, metric=metric, **of_draws))
    return tuple(bought)


def _erm(item: MethodItem) -> MethodItem:
    """Returns plain ERM with the encoder and the head of a method."""
    erm = Component("erm", find("algorithms", "erm"), MethodCommon(name="erm"), ())
    block = item.block.model_copy(update={"anchor": 0.0})
    return replace(item, algorithm=erm, sharpness=None, averaging=None, block=block)


def linear_erm(item: MethodItem) -> MethodItem:
    """Returns plain ERM with a linear head and the encoder of a method."""
    linear = Component("linear", Linear, MethodCommon(name="erm"), ())
    return replace(_erm(item), head=linear, head_init="random")


def _nothing(step: int, values: object) -> None:
    """No curve is kept of these heads."""
