"""Attention inside a recorded forward, without a return to Python in each layer.

A step whose sequences all have working copies knows before its first layer what every layer attends
with. So the graph of the forward calls `attention.dense` itself, and Python's lock stays free for
the server's event loop. Any other step goes back to Python. Engine thread only.
"""

from typing import NamedTuple

import torch
from torch import nn

from engine.attention.base import AttentionCall, AttentionOptions
from engine.attention.dense import KvPlace, StepPart, Tools, attend_part

_library = torch.library.Library("cachesvc", "DEF")
_library.define("attend(int layer, Tensor query, Tensor key, Tensor value) -> Tensor")


class InsideStep(NamedTuple):
    """A step all of whose KV is in working copies: its parts, and where each layer's KV is in a
    copy. `dtype` is the pool's."""

    parts: list[StepPart]
    places: dict[int, KvPlace]
    dtype: torch.dtype
    tools: Tools


class InsideAttention(nn.Module):
    """What a layer of the graph calls. It is compiled, and runs no Python unless there is no
    `InsideStep`: then `cachesvc::attend`, which `engine.execution.traced` implements."""

    step: InsideStep | None

    def __init__(self) -> None:
        super().__init__()
        self.step = None

    @torch.jit.export
    def begin(self, step: InsideStep | None) -> None:
        """The next calls are layers of this step, or go back to Python."""
        self.step = step

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
        step = self.step
        if step is None:
            attended: torch.Tensor = torch.ops.cachesvc.attend(layer, query, key, value)
            return attended
        options = AttentionOptions(scaling, window, softcap, sinks)
        rounded = key.to(step.dtype), value.to(step.dtype)
        call = AttentionCall(layer, query.float(), rounded[0], rounded[1], options)
        output = call.query.new_zeros([query.shape[0], query.shape[1], value.shape[2]])
        for part in step.parts:
            attend_part(call, part, step.places[layer], step.tools, output)
        return output.to(query.dtype)
