"""Label errors: images whose label heads doubt that were trained on other images, those of the same domain too."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from xdm_ft.audit.costs import Change, Cost, costs
from xdm_ft.audit.heads import HeadRequest, Study
from xdm_ft.protocol.splits import split_of_rows
from xdm_ft.runtime.randomness import folds
from xdm_ft.training import Training

FOLDS = 5
STEPS, EPOCHS, BATCH = 100, 6, 128  # of a head: more steps learn wrong labels too
LEAK = "the heads that suggest labels have seen images of the held-out domain too"
RATE, HIGHEST_RATE = 1.28, 0.05  # of Adam, times the width: a step changes logits as much at every width
MAX_SEEDS = 5  # whose probabilities are averaged
SUSPECT = -0.7  # score of an image whose label is likely wrong
CONFUSED = 10


@dataclass(frozen=True)
class Labels:
    """What heads say of the labels of n images."""

    rows: np.ndarray  # int64 [n], of the data set
    score: np.ndarray  # float64 [n]: p(label) − the largest p of another class
    suggested: np.ndarray  # int64 [n], that other class
    from_worst: np.ndarray  # float64 [n]: score + 1, a sum of small probabilities, which is not rounded to 0

    @property
    def doubtful(self) -> np.ndarray:
        """Positions of the images for which another class is more likely than their label, the worst first."""
        order = np.argsort(self.from_worst, kind="stable")
        return order[self.score[order] < 0]

    @property
    def suspects(self) -> np.ndarray:
        """Positions of the images whose label is likely wrong, the worst first."""
        return self.doubtful[self.score[self.doubtful] <= SUSPECT]


def label_scores(study: Study) -> Labels | None:
    """Scores every image by heads of a cross-validation over mixed domains that did not see it, or its group.

    Heads that have not seen the domain are wrong at a hard domain where the label is right: they find half as much.
    These heads are trained shortly, on features of length √K. Probabilities are means over seeds. The score is 0 where
    no other fold has an image of the class. Returns None for one class, or with fewer images, or groups, than folds.
    """
    dataset, rows = study.dataset, study.readable
    labels, domains = dataset.labels[rows], dataset.domains[rows]
    stratum = domains * len(dataset.class_names) + labels
    fold_of = folds(stratum, None if dataset.groups is None else dataset.groups[rows], FOLDS)
    if fold_of is None or len(np.unique(labels)) < 2:
        return None
    seeds, wanted, study = study.seeds[:MAX_SEEDS], list[HeadRequest](), study.with_heads(training_of(study))
    p, unseen = np.zeros((len(rows), len(dataset.class_names)), np.float32), np.zeros(len(rows), bool)
    for fold in range(FOLDS):
        train, tested = rows[fold_of != fold], torch.from_numpy(rows[fold_of == fold])
        unseen |= (fold_of == fold) & ~np.isin(labels, dataset.labels[train])
        split = split_of_rows(dataset, (f"fold {fold}",), np.unique(dataset.domains[train]).tolist(), train, {})
        wanted += [HeadRequest(split, tested, seed) for seed in seeds]
    for number, logits in study.answers(wanted, "label errors"):
        p[fold_of == number // len(seeds)] += logits.softmax(1).numpy() / len(seeds)
    every = np.arange(len(rows))
    of_label = p[every, labels].astype(np.float64)
    p[every, labels] = -1
    suggested = p.argmax(1)
    score = np.where(unseen, 0.0, of_label - p[every, suggested])
    p[every, labels], p[every, suggested] = of_label, 0
    return Labels(rows, score, suggested, np.where(unseen, 1.0, of_label + p.sum(1, dtype=np.float64)))


def training_of(study: Study) -> Training:
    steps = max(STEPS, EPOCHS * len(study.readable) // BATCH)
    lr, weights = min(HIGHEST_RATE, RATE / study.features.width), study.plan.recipe.training.class_weights
    return Training(sampler="pooled", batch_size=BATCH, steps=steps, lr=lr, class_weights=weights)


def find_confusions(study: Study, labels: Labels) -> list[tuple[str, str, int]]:
    """Returns pairs (label, suggested class, images) of the suspects, the most frequent first."""
    names, suspects = study.dataset.class_names, labels.suspects
    of_label = study.dataset.labels[labels.rows[suspects]].tolist()
    pairs = Counter(zip(of_label, labels.suggested[suspects].tolist(), strict=True))
    return [(names[label], names[other], images) for (label, other), images in pairs.most_common(CONFUSED)]


def label_costs(study: Study, labels: Labels) -> list[Cost]:
    """Returns what leaving out the suspects, and relabelling them, does; they are not tested on."""
    rows = labels.rows[labels.suspects]
    if not len(rows) or not study.heads:
        return []
    relabelled = torch.from_numpy(study.dataset.labels.copy())
    relabelled[torch.from_numpy(rows)] = torch.from_numpy(labels.suggested[labels.suspects])
    held_out, none = [split.test_domains for _, split in study.heads], np.empty(0, np.int64)
    changes = [
        Change("left out of training", len(rows), dict.fromkeys(held_out, rows)),
        Change("relabelled in training", len(rows), dict.fromkeys(held_out, none), relabelled, LEAK),
    ]
    return costs(study, changes, untested=rows.tolist())
