"""Fixes rotary tables that depend on a forward's longest position to one table per model.

transformers picks the frequencies of LongRoPE (Phi-3-128k, Phi-4-mini) and of dynamic RoPE from
`max(position_ids)` of the whole forward. But a step computes many sequences in one row, and a
longer prompt reuses KV computed for a shorter one. So a key would depend on its neighbours. For
every sequence, each such table is fixed to the one that transformers uses for a prompt as long as
the model's context, as vLLM does. Called at start-up by `engine.models.load`, which first has the
settings of a rope checked here: transformers drops what it does not know of them.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.errors import ModelError

_KINDS = ("rope_type", "type")
_OF_ANY = {*_KINDS, "rope_theta", "partial_rotary_factor"}
_BEFORE = "original_max_position_embeddings"
# What each kind reads, and what checkpoints have beside it without effect.
_YARN = "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate finetuned"
_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "proportional": {"factor"},
    "yarn": {"factor", _BEFORE, *_YARN.split()},
    "longrope": {"factor", "attention_factor", "long_factor", "short_factor", _BEFORE}
    | {"long_mscale", "short_mscale"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _BEFORE},
}
_HUNYUAN = {"alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}


def check_settings(folder: Path, given: Mapping[str, Any], config: Any) -> None:
    """Raise ModelError if a config.json, read as `config`, sets a rope in a way that is not served:
    twice and unlike, of a kind that transformers lacks, or by a key that the kind has not."""
    for section in (given, given.get("text_config") or {}):
        ways = [section[name] for name in ("rope_scaling", "rope_parameters") if section.get(name)]
        if any(_meaning(way) != _meaning(ways[0]) for way in ways):
            raise ModelError(f"{folder}: rope_scaling and rope_parameters contradict each other")
        for table in (table for way in ways for table in _tables(way)):
            kinds = {table[name] for name in _KINDS if name in table}
            if len(kinds) > 1:
                raise ModelError(
                    f"{folder}: its rope is of two types, {' and '.join(sorted(kinds))}"
                )
    text = config.get_text_config()
    more = set(getattr(text, "ignore_keys_at_rope_validation", None) or ())
    more |= _HUNYUAN if text.model_type.startswith("hunyuan") else set()
    for table in _tables(getattr(text, "rope_parameters", None) or {}):
        kind = table.get("rope_type", "default")
        if kind not in _KEYS and kind != getattr(text, "default_rope_type", None):
            raise ModelError(f"{folder}: transformers has no rope of type {kind}")
        if unknown := sorted(table.keys() - _OF_ANY - _KEYS.get(kind, set()) - more):
            raise ModelError(
                f"its rope of type {kind} has the key {unknown[0]}, which has no effect"
            )


def _tables(rope: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """One table, or those of several kinds of layers."""
    nested: list[Mapping[str, Any]] = [each for each in rope.values() if isinstance(each, dict)]
    yield from nested or [rope]


def _meaning(rope: Mapping[str, Any]) -> Any:
    """Equal for two ways to say the same, as far as both say it."""
    return [
        (
            {each: table[each] for each in table.keys() - _OF_ANY},
            table.get("rope_type", table.get("type")),
        )
        for table in _tables(rope)
    ]


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
