"""Rotary tables that follow the longest position of a forward: fixed to one table a model.

transformers picks the frequencies of LongRoPE (Phi-3-128k, Phi-4-mini) and of dynamic RoPE from
`max(position_ids)` of the whole forward. A step computes many sequences in one row, and KV computed
for a short prompt is reused by a longer one. So a key would depend on its neighbours. Each such
table is made to be the one that transformers uses for a prompt as long as the model's context, for
every sequence, as vLLM does. Called at start-up, by `engine.models.load`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


def fix_tables(model: nn.Module, max_context: int) -> bool:
    """Make every such table that of a sequence of `max_context` tokens; whether there was one."""
    found = [module for module in model.modules() if _follows_length(module)]
    for module in found:
        module.forward = partial(_as_if_longest, module.forward, max_context - 1)
    return bool(found)


def _follows_length(module: Any) -> bool:
    kinds = getattr(module, "rope_type", None)
    named = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(
        isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in named
    )


def _as_if_longest(
    forward: Callable[..., Any],
    last: int,
    states: torch.Tensor,
    position_ids: torch.Tensor,
    *arguments: Any,
    **named: Any,
) -> Any:
    """The table's rows for `position_ids` [..., T], computed beside position `last`."""
    longest = torch.full_like(position_ids[..., :1], last)
    rows = forward(states, torch.cat([position_ids, longest], -1), *arguments, **named)
    if isinstance(rows, torch.Tensor):
        return rows[..., :-1, :]
    return tuple(each[..., :-1, :] for each in rows)
