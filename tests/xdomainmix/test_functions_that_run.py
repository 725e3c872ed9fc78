"""The functions that README.md and CONTRIBUTING.md name are what training runs: an edit of one changes it."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from bank_problems import job_of
from bank_problems import train as train_bank
from loop_models import SmallCNN, make_job, one_process
from loop_models import train as train_end_to_end

import xdm_ft.xdomainmix
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.heads.linear import Linear
from xdm_ft.heads.mlp import MLP
from xdm_ft.training import Training

README = Path(xdm_ft.xdomainmix.__file__).with_name("README.md").read_text(encoding="utf-8")
CONTRIBUTING = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
OF_METHOD = ("augment", "mixed_loss")
NOT_CALLED = ("specific_mask", "domain_quantile")
SETTINGS = {"warmup_steps": 1, "quantile_steps": 1}


def named() -> list[str]:
    """The functions in the last column of the README's first table, those with a kernel, and `augment`."""
    equations, kernels = re.findall(r"(?:^\|.*\n)+", README, flags=re.MULTILINE)
    found = [name for row in equations.splitlines()[2:] for name in re.findall(r"`(\w+)\(", row.split("|")[-2])]
    found += [name for row in kernels.splitlines()[2:] for name in re.findall(r"`([\w.]+)`", row.split("|")[1])]
    return list(dict.fromkeys([*[name for name in found if not name[0].isupper()], "augment"]))


@cache
def modules() -> dict[str, Any]:
    package = xdm_ft.xdomainmix
    names = [module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")]
    return {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}


def function(name: str) -> Any:
    """The function of this name; MODULE.NAME chooses among several."""
    if name in OF_METHOD:
        return getattr(XDomainMix, name)
    module, _, own = name.rpartition(".")
    if module:
        return getattr(modules()[module], own)
    [the_only] = {vars(of_module)[own] for of_module in modules().values() if own in vars(of_module)}
    return the_only


def planted(*_: object, **__: object) -> None:
    raise ArithmeticError("planted")


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces the body of a function, as an edit of its file does, whatever imported it before."""
    monkeypatch.setenv("XDM_FT_KERNELS", "0")

    def edit(name: str) -> None:
        found = function(name)
        plain = getattr(found, "__wrapped__", found)  # of a cached one, which forgets its results
        if found is not plain:
            found.cache_clear()
        monkeypatch.setattr(plain, "__code__", planted.__code__)

    return edit


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with one_process() as accelerator:
        yield accelerator


def bank(head: Any, accelerator: Accelerator) -> None:
    train_bank([job_of(XDomainMix, steps=2, setup={"head": head}, **SETTINGS)])


def end_to_end(head: Any, accelerator: Accelerator) -> None:
    job = make_job(partial(XDomainMix, **SETTINGS), steps=2, head=head)
    train_end_to_end(job, SmallCNN(), Training(batch_size=4), accelerator)


ENGINES = {"bank": bank, "end to end": end_to_end}


def test_the_tables_name_functions() -> None:
    assert {"linear_scores", "exceeds", "decompose", "draw_partners", "mix", "exceeds_by_sorting"} < {*named()}
    assert len(named()) == 12
    paragraph = CONTRIBUTING.partition("## A kernel behind one function")[2].partition("\n\n")[2].partition("\n\n")[0]
    called, rest = paragraph.split("calls", maxsplit=1)[1].split(";", maxsplit=1)
    assert {*re.findall(r"`(\w+)`", called)} == {
        name for name in named() if name not in (*OF_METHOD, "rank_of", "quantile_cycle", "exceeds_by_sorting")
    }
    assert {*re.findall(r"`(\w+)`", rest)} == {*NOT_CALLED}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", named())
def test_an_edit_of_a_named_function_changes_the_training(
    name: str, engine: str, edited: Callable[[str], None], accelerator: Accelerator
) -> None:
    edited(name)
    with pytest.raises(ArithmeticError, match="planted"):
        ENGINES[engine](MLP if name == "autograd_scores" else Linear, accelerator)


@pytest.mark.parametrize("engine", ENGINES)
def test_training_does_not_call_the_others(
    engine: str, edited: Callable[[str], None], accelerator: Accelerator
) -> None:
    for name in NOT_CALLED:
        edited(name)
        assert re.search(rf"`{name}\b", README)
    ENGINES[engine](Linear, accelerator)
