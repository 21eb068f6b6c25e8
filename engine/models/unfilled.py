"""Builds a model's modules without symbols.

transformers builds a model on torch's meta device, whose tensors have no numbers, before it reads
weights. There torch computes some functions by formulas in Python, which import sympy: half a
second of a start and 40 MB, to fill tensors that have nothing to fill.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Functions of `torch.nn.init` and methods of tensors. Each returns its first argument.
_FILLS = frozenset(
    {
        *("constant_", "ones_", "zeros_"),
        *("normal_", "trunc_normal_", "uniform_"),
        *("kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_"),
    }
)


class Unfilled(TorchFunctionMode):
    """Inside, and on this thread, nothing fills a meta tensor, and numbers in sequence are made on
    the CPU. Of these, positions rotate by frequencies that a loaded model computes anew."""

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[type],
        given: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        named = named or {}
        if getattr(function, "__name__", None) in _FILLS:
            tensor = given[0] if given else named.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        device = named.get("device")
        if function is torch.arange and device is not None and torch.device(device).type == "meta":
            named = {**named, "device": "cpu"}
        return function(*given, **named)
