"""The output of `cachesvc replay`: a table or JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import orjson

from cachesvc.cli.render import print_table
from tiers.replay.replay import ReplayResult
from tiers.replay.trace import Trace

MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a million prompt tokens."""

    hit: Decimal
    miss: Decimal
    currency: str

    def cost(self, result: ReplayResult) -> Decimal:
        """The exact cost of the trace's prompts."""
        misses = result.tokens - result.hit_tokens
        return (self.hit * result.hit_tokens + self.miss * misses) / MILLION

    def saved(self, result: ReplayResult) -> Decimal:
        """The additional cost without a cache."""
        return (self.miss - self.hit) * result.hit_tokens / MILLION


def as_json(results: Sequence[ReplayResult], prices: Prices, block_bytes: int) -> str:
    """One JSON object per result; money as decimal strings."""
    records = [_record(result, prices, block_bytes) for result in results]
    return orjson.dumps(records, option=orjson.OPT_INDENT_2).decode()


def _record(result: ReplayResult, prices: Prices, block_bytes: int) -> dict[str, Any]:
    return {
        "policy": result.policy,
        "capacity_blocks": result.capacity_blocks,
        "hit_rate": result.hit_rate,
        "hit_tokens": result.hit_tokens,
        "tokens": result.tokens,
        "num_requests": result.num_requests,
        "num_accesses": result.num_accesses,
        "moved_bytes": _moved_blocks(result) * block_bytes,
        "disk_written_bytes": _disk_writes(result) * block_bytes,
        "cost": str(prices.cost(result)),
        "saved": str(prices.saved(result)),
        "currency": prices.currency,
        "tiers": [
            {
                "name": tier.name,
                "capacity_blocks": tier.capacity_blocks,
                "hit_rate": tier.hit_tokens / result.tokens if result.tokens else 0.0,
                "hit_tokens": tier.hit_tokens,
                "hit_blocks": tier.hit_blocks,
                "written_blocks": tier.written_blocks,
                "evicted_blocks": tier.evicted_blocks,
            }
            for tier in result.tiers
        ],
    }


def print_results(
    trace: Trace, results: Sequence[ReplayResult], prices: Prices, block_bytes: int
) -> None:
    """A row for each result. Figures are never cut; a narrow window gets fewer columns."""
    working_set = trace.working_set_blocks()
    names = [str(tier.name) for tier in results[0].tiers] if len(results[0].tiers) > 1 else []
    cost = f"cost {prices.currency}"
    figures = ["blocks", "of all", "hit rate", *names, "moved GB", "disk GB", cost, "saved"]
    print_table(
        ["policy", *figures],
        [_cells(result, names, working_set, prices, block_bytes) for result in results],
        title=f"{trace.name}: {len(trace.requests):,} requests, {trace.input_tokens:,} tokens, "
        f"{working_set:,} distinct blocks of {trace.block_tokens} tokens",
        right=figures,
        spare=("of all", "moved GB", "saved", "blocks"),
    )


def _cells(
    result: ReplayResult, names: Sequence[str], working_set: int, prices: Prices, block_bytes: int
) -> list[str]:
    tiers = result.tiers if names else ()
    return [
        result.policy,
        f"{result.capacity_blocks:,}",
        f"{result.capacity_blocks / working_set:.1%}",
        f"{result.hit_rate:.4f}",
        *(f"{tier.hit_tokens / result.tokens:.4f}" for tier in tiers),
        f"{_moved_blocks(result) * block_bytes / 1e9:,.1f}",
        f"{_disk_writes(result) * block_bytes / 1e9:,.1f}",
        f"{prices.cost(result):,.2f}",
        f"{prices.saved(result):,.2f}",
    ]


def _moved_blocks(result: ReplayResult) -> int:
    """Copies between tiers: blocks promoted from a lower tier, and blocks written to one."""
    return sum(tier.hit_blocks + tier.written_blocks for tier in result.tiers[1:])


def _disk_writes(result: ReplayResult) -> int:
    return sum(tier.written_blocks for tier in result.tiers[1:] if tier.name == "disk")
