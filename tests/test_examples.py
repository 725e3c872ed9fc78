"""Each public function has an example in its docstring, and the examples are true."""

import doctest
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import xdm_ft
from xdm_ft import xdomainmix

ORDER = ("run", "open", "Results.table", "load")  # the order of examples that use what those before have made


def methods_of(cls: type[Any]) -> dict[str, Callable[..., Any]]:
    """Returns the public methods that a class defines itself; its properties are no functions."""
    return {
        f"{cls.__name__}.{name}": member
        for name, member in vars(cls).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


def public() -> dict[str, Any]:
    """Returns the functions, exceptions and methods that `import xdm_ft` gives, in the order of their examples."""
    named = {name: getattr(xdm_ft, name) for name in (*xdm_ft.__all__, "open") if not name.startswith("_")}
    found: dict[str, Any] = {}
    for name, thing in named.items():
        found |= methods_of(thing) if isinstance(thing, type) and methods_of(thing) else {name: thing}
    return {name: found[name] for name in (*ORDER, *(name for name in found if name not in ORDER))}


def examples_of(name: str, thing: Any) -> doctest.DocTest:
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", {}, name, None, 0)
    assert test.examples, f"{name}: no example in its docstring"
    return test


def check(examples: list[doctest.DocTest], names: dict[str, Any]) -> None:
    """Runs the examples in order, with the same names, which later ones share."""
    said = list[str]()
    for test in examples:
        test.globs = names
        failed = doctest.DocTestRunner(verbose=False).run(test, out=said.append, clear_globs=False).failed
        assert not failed, "".join(said)


def test_each_public_function_has_an_example():
    assert {"run", "open", "load", "Results.table", "Model.predict", "Model.encode", "UserError"} <= {*public()}
    for name, thing in public().items():
        examples_of(name, thing)


@pytest.mark.parametrize("name", xdomainmix.__all__)
def test_an_example_of_xdomainmix_is_true(name):
    check([examples_of(name, getattr(xdomainmix, name))], {"torch": torch, **vars(xdomainmix)})


@pytest.mark.slow
def test_the_examples_of_a_run_are_true(in_folder):
    check([examples_of(*item) for item in public().items()], {"xdm_ft": xdm_ft, "np": np, "torch": torch})
