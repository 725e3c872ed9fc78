"""Batches of given domains; golden files; trainings recorded from the published code.

The recorded trainings are of a linear featurizer 6 → 8 and a class head, 3 domains × 5 samples, Adam. All samples
are in every batch, domain after domain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.core import Batch, Losses, Task

DOMAINS, PER_DOMAIN, CLASSES, WIDTH = 3, 5, 3, 8
SETUP = Setup(Task(tuple("abc"), tuple("xyz")), WIDTH, steps=100, seed=0)
PARAMETERS = ("featW", "featb", "W", "b")


def golden(file: str) -> dict[str, Tensor]:
    with np.load(Path(__file__).resolve().parents[1] / "golden" / file) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def batch_of(z: Tensor, y: Tensor | Sequence[int], domain: Tensor | Sequence[int], **more: Any) -> Batch:
    rows = torch.arange(len(z))
    return Batch(z, torch.as_tensor(y), torch.as_tensor(domain), rows, rows, **more)


def random_batch(domain: Sequence[int], width: int = WIDTH) -> Batch:
    """Random features and classes of samples of these domains."""
    generator = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(len(domain), width, generator=generator)
    return batch_of(z, torch.randint(0, CLASSES, (len(domain),), generator=generator), domain)


class Recorded:
    """One of the files. `after` follows the names of the parameters in it, as recorded after every step."""

    def __init__(self, file: str, after: str = "") -> None:
        self.arrays, self.after = golden(file), after
        domain = torch.arange(DOMAINS).repeat_interleave(PER_DOMAIN)
        self.batch = batch_of(self["X"].flatten(0, 1), self["y"].flatten(), domain)

    def __getitem__(self, name: str) -> Tensor:
        return self.arrays[name]

    def steps(self, algorithm: Algorithm) -> Iterator[tuple[int, Tensor, Losses]]:
        """Trains; at every step its number, the features and the losses, before the parameters are compared."""
        featurizer = nn.Linear(6, WIDTH)
        parameters = dict(zip(PARAMETERS, [*featurizer.parameters(), *algorithm.head.parameters()], strict=True))
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self[f"{name}_init"])
        optimizer = torch.optim.Adam(parameters.values(), lr=float(self.arrays["lr"]))
        for step in range(len(self[f"W{self.after}"])):
            z = featurizer(self.batch.x)
            losses = algorithm(z, self.batch, step)
            optimizer.zero_grad()
            losses.total.backward()
            yield step, z, losses
            optimizer.step()
            for name, value in losses.buffers.items():
                algorithm.get_buffer(name).copy_(value)
            for name, parameter in parameters.items():
                recorded = self[f"{name}{self.after}"][step]
                close(parameter.detach(), recorded, f"{name} after step {step}")


def close(value: Tensor, recorded: Tensor, name: str) -> None:
    torch.testing.assert_close(value.double(), recorded.double(), atol=1e-5, rtol=0, msg=lambda text: f"{name}: {text}")


def same_gradients(one: Tensor, other: Tensor, parameters: Sequence[Tensor], atol: float = 1e-5) -> None:
    """Of two losses."""
    gradients = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (one, other))
    torch.testing.assert_close(*gradients, atol=atol, rtol=1e-5)
