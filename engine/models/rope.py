"""Fixes rotary tables that depend on a forward's longest position to one table per model.

transformers picks the frequencies of LongRoPE (Phi-3-128k, Phi-4-mini) and of dynamic RoPE from
`max(position_ids)` of the whole forward. But a step computes many sequences in one row, and a
longer prompt reuses KV computed for a shorter one. So a key would depend on its neighbours. For
every sequence, each such table is fixed to the one that transformers uses for a prompt as long as
the model's context, as vLLM does. Called at start-up by `engine.models.load`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


def fix_tables(model: nn.Module, max_context: int) -> bool:
    """Fix every such table to that of a sequence of `max_context` tokens. Returns whether there was
    one."""
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
    """The table's rows for `position_ids` [..., T], as if computed beside position `last`."""
    longest = torch.full_like(position_ids[..., :1], last)
    rows = forward(states, torch.cat([position_ids, longest], -1), *arguments, **named)
    if isinstance(rows, torch.Tensor):
        return rows[..., :-1, :]
    return tuple(each[..., :-1, :] for each in rows)
