"""Studies of made-up features: what an audit measures, without images."""

from types import SimpleNamespace

import numpy as np
import torch

from tests.data.made_up import MadeUp
from xdm_ft.audit.heads import Study, recipe_of_heads
from xdm_ft.experiment.plan import Plan, make_plan
from xdm_ft.experiment.prepare import Prepared, PreparedEncoder
from xdm_ft.features.cache import Features
from xdm_ft.recipe.check import check
from xdm_ft.recipe.text import parse
from xdm_ft.runtime.errors import UserError

RECIPE = """\
name: audited
data: {name: pacs, root: data, counts: any}
protocol: {name: leave_one_domain_out, selection: train_val, seeds: 3, val_fraction: 0.2}
encoder: {name: timm, model: test_vit}
methods: [erm]
training: {steps: 40, batch_size: 32, sampler: pooled, lr: 0.02}
"""


def study(z, labels, domains, groups=None, seeds=3, text=RECIPE):
    """A study of features float [N,K]."""
    dataset = MadeUp(labels, domains, groups)
    recipe = recipe_of_heads(check(parse(text, "audited.yaml"))).with_seeds(seeds)
    encoder = SimpleNamespace(width=z.shape[1])
    features = Features([torch.as_tensor(z, dtype=torch.float32)])
    prepared = Prepared({None: PreparedEncoder(encoder, "", features, {}, {})}, {}, "")
    try:
        plan = make_plan(recipe, dataset)
    except UserError:
        plan = Plan(recipe, dataset, (), (), (), ())
    return Study(plan, prepared)


def clusters(images=40, domains=4, classes=3, width=12, spread=1.0, seed=0):
    """Returns features float64 [N,K], labels and domains of `images` per domain and class.

    A class has the same centre in all domains; each domain has its own offset.
    """
    rng = np.random.default_rng(seed)
    labels = np.tile(np.repeat(np.arange(classes), images), domains)
    domain = np.repeat(np.arange(domains), images * classes)
    centres, offsets = rng.normal(size=(classes, width)) * 2, rng.normal(size=(domains, width)) * 2
    z = centres[labels] + offsets[domain] + spread * rng.normal(size=(len(labels), width))
    return z, labels, domain
