"""`trained_parameters` of a record, where no engine counts them: heads on cached features, and solvers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from loop_models import make_job

from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.knn import KNN
from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.algorithms.zero_shot import ZeroShot
from xdm_ft.experiment.models import trained_parameters
from xdm_ft.heads.mlp import MLP
from xdm_ft.heads.neighbours import Neighbours
from xdm_ft.training import Trained

HEAD = 10 * 8 + 10  # 10 classes, 8 features


@pytest.mark.parametrize(
    "method, head, expected",
    [
        (ERM, None, HEAD),
        (ERM, partial(MLP, hidden_width=4), 4 * 8 + 4 + 10 * 4 + 10),
        (XDomainMix, None, HEAD + 3 * 8 + 3),  # 3 training domains
        (LinearProbe, None, HEAD),
        (KNN, Neighbours, 0),
        (ZeroShot, None, 0),
    ],
)
def test_by_hand(method: Any, head: Any, expected: int) -> None:
    job = make_job(method, width=8, **({} if head is None else {"head": head}))
    trained = Trained(job, {}, None, 0.0)
    assert trained_parameters(trained) == expected
    assert trained.peak_memory is None, "of a bank, which trains several models at once"
