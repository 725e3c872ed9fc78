"""Where nothing is planted, an audit names something in at most 5% of draws."""

import numpy as np
import pytest
import torch

from tests.audit.studies import clusters, study
from xdm_ft.audit.copies import near_copies
from xdm_ft.audit.costs import Change, costs
from xdm_ft.audit.measure import nearest_shares
from xdm_ft.audit.twins import domain_pairs, units_of
from xdm_ft.evaluation.neighbours import directions, neighbours

# one more than `most` would have a probability of 1% to 3%, if that of each draw were 5%
DRAWS = [pytest.param(4, 1, marks=pytest.mark.slow), pytest.param(100, 9, marks=pytest.mark.soak)]


@pytest.mark.parametrize(("draws", "most"), DRAWS)
def test_shuffled_domains_have_no_twins_no_copies_and_cost_nothing(draws, most):
    twins = copies = costly = 0
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        z, labels, domains = clusters(images=16, domains=3, width=16, spread=3.0, seed=seed)
        domains = rng.permutation(domains)
        shuffled = study(z, labels, domains)
        rows = torch.arange(len(labels))
        near = neighbours(directions(shuffled.features, rows, str), rows, domains)
        shares = (nearest_shares(nearest, domains, 3) for nearest in (near.foreign, near.nearest[:, 0]))
        twins += bool(domain_pairs(shuffled, units_of(shuffled), *shares).twins)
        copies += any(pair.sure for pair in near_copies(near, domains))
        random = rng.choice(len(labels), 20, replace=False)
        [cost] = costs(shuffled, [Change("left out", 20, {split.test_domains: random for _, split in shuffled.heads})])
        costly += cost.verdict != "no clear difference"
    assert twins <= most and copies <= most and costly <= most, (twins, copies, costly)
