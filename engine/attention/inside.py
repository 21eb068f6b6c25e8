"""Attention inside a recorded forward, without a return to Python in each layer.

A step whose sequences all have working copies knows before its first layer what every layer attends
with. So the graph of the forward calls `attention.dense` itself, and Python's lock stays free for
the server's event loop. Any other step goes back to Python. Engine thread only.
"""

from typing import NamedTuple

import torch
from torch import nn

from engine.attention.base import AttentionCall, AttentionOptions
from engine.attention.dense import Kernels, KvPlace, StepPart, attend_part

_library = torch.library.Library("cachesvc", "DEF")
_library.define("attend(int layer, Tensor query, Tensor key, Tensor value) -> Tensor")


class InsideStep(NamedTuple):
    """A step all of whose KV is in working copies: its parts, and where each layer's KV is in a
    copy. `triangle`, `scratch` and `kernels` are as `attend_part` takes them; `dtype` is the
    pool's.
    """

    parts: list[StepPart]
    places: dict[int, KvPlace]
    triangle: torch.Tensor
    scratch: torch.Tensor
    dtype: torch.dtype
    kernels: Kernels


class InsideAttention(nn.Module):
    """What a layer of the graph calls. It is compiled, and runs no Python unless there is no
    `InsideStep`: then `cachesvc::attend`, which `engine.execution.traced` implements."""

    inside: bool
    parts: list[StepPart]
    places: dict[int, KvPlace]
    triangle: torch.Tensor
    scratch: torch.Tensor
    dtype: torch.dtype
    kernels: Kernels

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.kernels = False, Kernels([], False)
        self.parts, self.places = [], {}
        self.triangle = self.scratch = torch.empty(0)
        self.dtype = torch.float32

    @torch.jit.export
    def begin(
        self,
        parts: list[StepPart],
        places: dict[int, KvPlace],
        triangle: torch.Tensor,
        scratch: torch.Tensor,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        """The next calls are layers of this `InsideStep`."""
        self.parts, self.places, self.dtype = parts, places, dtype
        self.triangle, self.scratch, self.kernels = triangle, scratch, kernels
        self.inside = True

    @torch.jit.export
    def leave(self) -> None:
        """The next calls go back to Python."""
        self.inside = False

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Arguments and result are those of `PagedAttention.attend`."""
        if not self.inside:
            attended: torch.Tensor = torch.ops.cachesvc.attend(layer, query, key, value)
            return attended
        options = AttentionOptions(scaling, window, softcap, sinks, False)
        rounded = key.to(self.dtype), value.to(self.dtype)
        call = AttentionCall(layer, query.float(), rounded[0], rounded[1], options)
        output = call.query.new_zeros([query.shape[0], query.shape[1], value.shape[2]])
        for part in self.parts:
            place = self.places[layer]
            attend_part(call, part, place, self.triangle, self.scratch, self.kernels, output)
        return output.to(query.dtype)
