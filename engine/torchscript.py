"""Compiles functions of tensors by TorchScript, so that each is one call without Python's lock.

TorchScript is deprecated in favour of `torch.compile`, which needs a C++ compiler on the serving
machine. Every supported torch version still has TorchScript.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@cache
def script(function: Callable[..., torch.Tensor]) -> Any:
    """Compile `function` and the functions it calls, once per process."""
    with undeprecated():
        return torch.jit.script(function)


@contextmanager
def undeprecated() -> Iterator[list[warnings.WarningMessage]]:
    """Keep TorchScript's warnings, mainly of its own deprecation, from the log. Yields them."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield said


@contextmanager
def unoptimized() -> Iterator[None]:
    """Run graphs as they were recorded, without optimization."""
    before: bool = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(before)
