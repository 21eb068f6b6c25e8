"""Functions of tensors compiled by TorchScript: one call, without Python's lock.

TorchScript is deprecated in favour of `torch.compile`, which wants a C++ compiler on the machine
that serves. Every torch that is supported has it.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@cache
def script(function: Callable[..., torch.Tensor]) -> Any:
    """`function`, and what it calls, compiled once for the process."""
    with undeprecated():
        return torch.jit.script(function)


@contextmanager
def undeprecated() -> Iterator[list[warnings.WarningMessage]]:
    """Keep what TorchScript warns of, its own deprecation above all, from the log; gives it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield said


@contextmanager
def unoptimized() -> Iterator[None]:
    """Run graphs as they were recorded."""
    before: bool = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(before)
