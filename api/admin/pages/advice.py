"""The value of more cache: from the measured curve, the measured traffic and the rate card.

A tier's hits are the curve's between the capacity above the tier and the capacity including it. A
hit token is worth the price of a miss minus that of a hit in the tier. Pure; amounts are 1e-12
currency units.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from billing.prices.book import Rates
from tiers.telemetry.working_set import MissRatioCurve
from tiers.tier import TierName

GIB = 1 << 30
MONTH_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class CurveTier:
    """A tier on the curve: how many blocks it holds, and the bytes of one."""

    tier: TierName
    blocks: float
    block_bytes: float  # on disk, after compression


@dataclass(frozen=True, slots=True)
class Advice:
    """What one more GiB of a tier would do in a month of traffic like the measured one."""

    tier: TierName
    hit_rate_gain: float  # of all prompt tokens, over all tiers
    tokens: float  # misses now that would be hits
    worth: int  # 1e-12 currency units


def hit_rate(curve: MissRatioCurve, blocks: float) -> float:
    """The curve at any capacity, interpolated linearly, starting at 0."""
    if not curve.capacities or blocks <= 0:
        return 0.0
    above = bisect_right(curve.capacities, blocks)
    if above == len(curve.capacities):
        return curve.hit_rates[-1]
    low = (0.0, 0.0) if above == 0 else (curve.capacities[above - 1], curve.hit_rates[above - 1])
    high = (curve.capacities[above], curve.hit_rates[above])
    return low[1] + (high[1] - low[1]) * (blocks - low[0]) / (high[0] - low[0])


def advise(
    curve: MissRatioCurve,
    levels: Sequence[CurveTier],
    rates: Rates,
    tokens_per_month: float,
    *,
    extra_bytes: int = GIB,
) -> list[Advice]:
    """One piece of advice for each tier, hottest first. `levels` are all tiers in the same
    order."""
    now_rate, now_worth = _month(curve, levels, rates, tokens_per_month)
    advice = []
    for number, level in enumerate(levels):
        larger = replace(level, blocks=level.blocks + extra_bytes / level.block_bytes)
        then = [*levels[:number], larger, *levels[number + 1 :]]
        rate, worth = _month(curve, then, rates, tokens_per_month)
        gain = max(0.0, rate - now_rate)
        advice.append(Advice(level.tier, gain, gain * tokens_per_month, max(0, worth - now_worth)))
    return advice


def _month(
    curve: MissRatioCurve, levels: Sequence[CurveTier], rates: Rates, tokens: float
) -> tuple[float, int]:
    """The hit rate over all tiers, and what a month's hits save against misses."""
    blocks, reached, worth = 0.0, 0.0, 0.0
    for level in levels:
        blocks += level.blocks
        rate = hit_rate(curve, blocks)
        worth += (rate - reached) * tokens * (rates.miss - rates.of(f"hit_{level.tier}"))
        reached = rate
    return reached, round(worth)
