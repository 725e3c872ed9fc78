"""`training.compile`: torch.compile, and one line where this machine can not compile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from xdm_ft.runtime.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")
MAX_GRAPHS = 256  # of one function: kinds of heads, their numbers, phases


def compiled(function: Callable[P, R], **how: Any) -> Callable[P, R]:
    """Returns the function, compiled at its first call and for each new shape; `how`: arguments of torch.compile.

    A call raises `UserError` if this machine lacks a compiler.
    """
    import torch._dynamo.config as config
    from torch._dynamo.exc import BackendCompilerFailed

    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns of a GPU that is not asked for
    compiled_function = torch.compile(function, **how)

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            # a step takes gradients inside
            with config.patch(trace_autograd_ops=True, recompile_limit=MAX_GRAPHS):
                return compiled_function(*arguments, **named)
        except BackendCompilerFailed as error:
            reason = (str(error.inner_exception).strip().splitlines() or [type(error.inner_exception).__name__])[0]
            raise UserError(
                f"training.compile: torch.compile fails here ({reason}); install a C++ compiler (g++), or set "
                "training.compile=false"
            ) from error

    return call
