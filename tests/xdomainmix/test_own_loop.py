"""The README's training loop: it runs, it learns, and its loss is the method's."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import xdm_ft.xdomainmix
from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.core import Batch, Task
from xdm_ft.runtime.randomness import Stream, uniform

README = Path(xdm_ft.xdomainmix.__file__).with_name("README.md")
WIDTH, CLASSES, DOMAINS, SIZE, WARMUP = 20, 4, 3, 48, 5


def code() -> tuple[str, str]:
    """The function, and the loop that calls it."""
    [block] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    function, loop, rest = block.partition("\nfor step, ")
    assert loop and rest
    return function, loop + rest


def drawn(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """z, y, domain of learnable made-up features."""
    generator = torch.Generator().manual_seed(step)
    y, domain = (torch.randint(0, high, (SIZE,), generator=generator) for high in (CLASSES, DOMAINS))
    centres = torch.randn(CLASSES + DOMAINS, WIDTH, generator=torch.Generator().manual_seed(99))
    noise = torch.randn(SIZE, WIDTH, generator=generator)
    return torch.relu(2 * centres[y] + centres[CLASSES + domain] + noise), y, domain


def test_the_function_imports_the_public_names_only() -> None:
    function, _ = code()
    [names] = re.findall(r"^from xdm_ft.* import (.*)$", function, flags=re.MULTILINE)
    assert re.findall(r"^(?:from|import) (\S+)", function, flags=re.MULTILINE)[-1] == "xdm_ft.xdomainmix"
    assert {*names.split(", ")} <= {*xdm_ft.xdomainmix.__all__}


@pytest.mark.parametrize("step", [0, WARMUP - 1, WARMUP, WARMUP + 7, WARMUP + 30])
def test_its_loss_is_that_of_the_method(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same draws: those of the method, in the order in which the function asks for them."""
    task = Task(tuple("abcd"), tuple("xyz"))
    setup = Setup(task, WIDTH, steps=100, seed=3, loss_average="sample")
    method = XDomainMix(setup, warmup_steps=WARMUP, quantile_steps=4)
    z, y, domain = drawn(step)
    place = torch.arange(SIZE)
    losses = method(z, Batch(z, y, domain, place, place), step)

    two = 2 * place[:, None] + torch.arange(2)
    streams = ((Stream.PARTNERS, two), (Stream.LAMBDA, two), (Stream.DISCARD, place))
    draws = iter([uniform(3, step, stream, key) for stream, key in streams])
    monkeypatch.setattr(torch, "rand", lambda *shape, device: next(draws).to(device).view(shape))
    names: dict = {}
    exec(code()[0], names)
    own = names["xdomainmix_loss"](z, y, domain, method.head, method.domain_head, step, WARMUP, n=4)
    torch.testing.assert_close(own, losses.total + losses.auxiliary)
    assert len([*draws]) == (0 if step >= WARMUP else 3)


def test_the_loop_learns() -> None:
    torch.manual_seed(0)
    encoder, head, domain_head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, DOMAINS)
    parameters = [*encoder.parameters(), *head.parameters(), *domain_head.parameters()]
    names = {
        "encoder": encoder, "head": head, "domain_head": domain_head,
        "optimizer": torch.optim.SGD(parameters, lr=0.1), "loader": [drawn(step) for step in range(60)],
    }  # fmt: skip
    function, loop = code()
    exec(function.replace("warmup_steps=3000", f"warmup_steps={WARMUP}"), names)
    z, y, domain = drawn(1000)
    loss = names["xdomainmix_loss"]

    def unseen() -> float:
        return float(loss(encoder(z), y, domain, head, domain_head, step=WARMUP).detach())

    before = unseen()
    exec(loop, names)
    assert unseen() < 0.7 * before
