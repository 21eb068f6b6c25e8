"""RMS norms as one call of torch, for a GPU, where eight short kernels take longer to start than to
run.

`engine.models.probe` puts them in place of transformers' modules and compares the model's logits
before and after.
"""

from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

_COMPARED_ROWS = 4
_ROUNDINGS = 2  # transformers rounds before it multiplies by the weight, torch does not


class FusedNorm(nn.Module):
    """`x / rms(x) * weight` over the last axis, summed in float32. Raises ValueError for a module
    that computes something else."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.weight = module.weight
        self.eps = float(getattr(module, "variance_epsilon", None) or module.eps)
        rows = _rows(self.weight)
        own, fused = module(rows), self(rows)
        unlike = (own - fused).abs().max() / own.abs().max().clamp_min(1e-6)
        if own.dtype != fused.dtype or not unlike <= _ROUNDINGS * torch.finfo(own.dtype).eps:
            raise ValueError(f"{type(module).__name__} is not a plain RMS norm")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rms_norm(rows, self.weight.shape, self.weight, self.eps)


def fuse_norms(model: nn.Module) -> int:
    """Put a `FusedNorm` in place of each plain RMS norm. Returns how many there are now."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _may_be_plain(child)
    ]
    fused = 0
    for parent, name, module in found:
        try:
            setattr(parent, name, FusedNorm(module))
        except ValueError:
            continue
        fused += 1
    return fused


def _may_be_plain(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(weight, torch.Tensor)
        and weight.dim() == 1
        and (hasattr(module, "variance_epsilon") or hasattr(module, "eps"))
        and len(signature(module.forward).parameters) == 1  # a gate would be one more
    )


def _rows(weight: torch.Tensor) -> torch.Tensor:
    """[4, C], of unlike sizes."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(_COMPARED_ROWS, len(weight), generator=generator)
    sizes = torch.logspace(-2, 2, _COMPARED_ROWS)[:, None]
    return (rows * sizes).to(weight.device, weight.dtype)
