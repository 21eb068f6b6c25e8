"""The output of `cachesvc replay`: a table, JSON, a text chart and an SVG chart."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from html import escape
from typing import Any

import orjson
from rich import box
from rich.table import Table

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


def as_table(
    trace: Trace, results: Sequence[ReplayResult], prices: Prices, block_bytes: int
) -> Table:
    working_set = trace.working_set_blocks()
    table = Table(
        box=box.SIMPLE,
        title=f"{trace.name}: {len(trace.requests):,} requests, {trace.input_tokens:,} tokens, "
        f"{working_set:,} distinct blocks of {trace.block_tokens} tokens",
    )
    table.add_column("policy")
    for heading in ("blocks", "of all", "hit rate"):
        table.add_column(heading, justify="right")
    names = [tier.name for tier in results[0].tiers] if len(results[0].tiers) > 1 else []
    for heading in (*names, "moved GB", "disk GB", f"cost {prices.currency}", "saved"):
        table.add_column(heading, justify="right")
    for result in results:
        by_tier = (
            [f"{tier.hit_tokens / result.tokens:.4f}" for tier in result.tiers] if names else []
        )
        table.add_row(
            result.policy,
            f"{result.capacity_blocks:,}",
            f"{result.capacity_blocks / working_set:.1%}",
            f"{result.hit_rate:.4f}",
            *by_tier,
            f"{_moved_blocks(result) * block_bytes / 1e9:,.1f}",
            f"{_disk_writes(result) * block_bytes / 1e9:,.1f}",
            f"{prices.cost(result):,.2f}",
            f"{prices.saved(result):,.2f}",
        )
    return table


def _moved_blocks(result: ReplayResult) -> int:
    """Copies between tiers: blocks promoted from a lower tier, and blocks written to one."""
    return sum(tier.hit_blocks + tier.written_blocks for tier in result.tiers[1:])


def _disk_writes(result: ReplayResult) -> int:
    return sum(tier.written_blocks for tier in result.tiers[1:] if tier.name == "disk")


def _curves(results: Sequence[ReplayResult]) -> Mapping[str, list[tuple[int, float]]]:
    """Per policy: (capacity, hit rate), smallest capacity first."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        curves.setdefault(result.policy, []).append((result.capacity_blocks, result.hit_rate))
    return {policy: sorted(points) for policy, points in curves.items()}


def chart_text(results: Sequence[ReplayResult], width: int = 50) -> str:
    """Bars of the hit rate, grouped by capacity; the longest bar is the best result."""
    best = max((result.hit_rate for result in results), default=0.0) or 1.0
    longest = max(len(result.policy) for result in results)
    lines: list[str] = []
    for capacity in sorted({result.capacity_blocks for result in results}):
        lines.append(f"{capacity:,} blocks")
        for result in results:
            if result.capacity_blocks == capacity:
                bar = "█" * round(width * result.hit_rate / best)
                lines.append(f"  {result.policy:<{longest}} {bar} {result.hit_rate:.4f}")
    return "\n".join(lines)


_WIDTH, _HEIGHT, _MARGIN = 720, 420, 56
_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#97bbf5", "#9c6b4e", "#222222")


def chart_svg(title: str, results: Sequence[ReplayResult]) -> str:
    """Hit rate over capacity (logarithmic), one line a policy."""
    curves = _curves(results)
    capacities = sorted({capacity for points in curves.values() for capacity, _ in points})
    best = max((rate for points in curves.values() for _, rate in points), default=0.0) or 1.0
    low, high = math.log(capacities[0]), math.log(capacities[-1])

    def place(capacity: int, rate: float) -> tuple[float, float]:
        share = (math.log(capacity) - low) / (high - low) if high > low else 0.5
        x = _MARGIN + share * (_WIDTH - 3 * _MARGIN)
        return round(x, 1), round(_HEIGHT - _MARGIN - rate / best * (_HEIGHT - 2 * _MARGIN), 1)

    parts = [_text(_WIDTH / 2, 24, f"token hit rate by blocks of cache: {title}", "middle")]
    for step in range(5):
        rate = best * step / 4
        left, y = place(capacities[0], rate)
        parts.append(f'<path d="M{left} {y}H{_WIDTH - 2 * _MARGIN}" stroke="#ddd"/>')
        parts.append(_text(_MARGIN - 6, y + 4, f"{rate:.2f}", "end"))
    for capacity in capacities:
        x, _ = place(capacity, 0)
        parts.append(_text(x, _HEIGHT - _MARGIN + 18, f"{capacity:,}", "middle"))
    for number, (policy, points) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(_WIDTH - 2 * _MARGIN + 8, 60 + 18 * number, policy, "start", colour))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" '
        f'fill="white"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#222") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
