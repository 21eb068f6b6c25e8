"""The working set: how the hit rate depends on the size of the cache, and what that is worth.

The curve comes from sampled traffic (`tiers.telemetry.working_set`), so it covers sizes that the
cache never had. A tier's hits are the curve's between the capacity above the tier and the capacity
including it. Amounts are by the rate card, in units of 1e-12: a hit token is worth the price of a
miss minus that of a hit in the tier, which is what clients would pay less.
"""

import asyncio
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admin.access import MayRead
from api.admin.pages.base import render
from api.admin.parts import AdminParts, parts_of
from api.admin.routes.stats import json_answer
from billing.errors import NoPrice
from billing.money import format_units
from billing.prices.book import Rates, Terms
from billing.reports import usage as usage_report
from billing.reports.usage import Unit
from billing.usage import HIT_CLASSES
from tiers.telemetry.working_set import MissRatioCurve, TrafficReport
from tiers.tier import TierName

router = APIRouter(tags=["admin: cache"])

WINDOW_S = 86_400.0  # of traffic, scaled to a month; a day has busy and quiet hours
MIN_USES = 100  # blocks requested; a curve from fewer says little
Prices = dict[tuple[Rates, str], float]  # parts of all prompt tokens, by rates and currency
NO_RATES = Rates(**dict.fromkeys((*HIT_CLASSES, "miss", "output"), 0))
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


@router.get("/admin/working-set", include_in_schema=False)
async def working_set(request: Request, found: MayRead) -> Response:
    return render(
        request,
        "working_set.html",
        found,
        stats=parts_of(request).stats(),
        costs_known=bool(parts_of(request).gib_month),
        min_uses=MIN_USES,
    )


@router.get("/admin/api/cache/working-set")
async def report(request: Request, _: MayRead) -> Response:
    """The curve in bytes of KV, the tiers on it, and advice for one more GiB of each.

    Amounts are decimal strings, by currency: each tenant's tokens are valued by its own card. A
    month has thirty days.
    """
    parts = parts_of(request)
    found = await asyncio.wrap_future(parts.working_set())
    prices = await asyncio.to_thread(_prices, parts, parts.stats()["model"])
    return json_answer(request, _document(parts, found, prices))


def _document(parts: AdminParts, found: TrafficReport, prices: Prices) -> dict[str, Any]:
    stats = parts.stats()
    tokens_s, measured_s = _traffic(parts, stats["uptime_s"])
    levels = _levels(found, stats["cache"]["tiers"])
    advice = advise(found.curve, levels, NO_RATES, tokens_s * MONTH_S)
    worth: list[Counter[str]] = [Counter() for _ in advice]
    for (rates, currency), part in prices.items():
        month = advise(found.curve, levels, rates, part * tokens_s * MONTH_S)
        for sums, each in zip(worth, month, strict=True):
            sums[currency] += each.worth
    prefill_s = stats["cache"]["prefill_tokens_per_s"]
    return {
        "ready": found.num_uses >= MIN_USES,
        "num_uses": found.num_uses,
        "num_dropped": found.num_dropped,
        "sampled": found.sampled,
        "block_tokens": found.block_tokens,
        "block_bytes": found.block_bytes,
        "working_set_bytes": found.curve.working_set_blocks * found.block_bytes,
        "capacities": [blocks * found.block_bytes for blocks in found.curve.capacities],
        "hit_rates": list(found.curve.hit_rates),
        "tiers": [
            {
                "tier": point.tier,
                "capacity_bytes": point.capacity_blocks * found.block_bytes,
                "hit_rate": point.hit_rate,
            }
            for point in found.tiers
        ],
        "advice": [
            {
                "tier": each.tier,
                "hit_rate_gain": each.hit_rate_gain,
                "tokens": each.tokens,
                "worth": {code: format_units(units) for code, units in sums.items()},
                "cost": _cost(parts, each.tier),
                "compute_s": each.tokens / prefill_s if prefill_s else None,
            }
            for each, sums in zip(advice, worth, strict=True)
        ],
        "tokens_per_month": tokens_s * MONTH_S,
        "measured_s": measured_s,
    }


def _levels(found: TrafficReport, tiers: dict[str, Any]) -> list[CurveTier]:
    """Each tier by itself; in the report a tier includes all tiers above it."""
    levels, above = [], 0
    for point in found.tiers:
        held = tiers.get(point.tier, {})
        packed = point.tier is TierName.DISK and held.get("num_blocks")
        block_bytes = held["used_bytes"] / held["num_blocks"] if packed else found.block_bytes
        levels.append(CurveTier(point.tier, point.capacity_blocks - above, block_bytes))
        above = point.capacity_blocks
    return levels


def _cost(parts: AdminParts, tier: TierName) -> dict[str, str]:
    """The monthly cost of a GiB in the tier, if the operator set it (`costs.gib_month`)."""
    units = parts.gib_month.get(tier)
    return {} if units is None else {parts.cost_currency(): format_units(units)}


def _traffic(parts: AdminParts, uptime_s: float) -> tuple[float, float]:
    """Prompt tokens a second, and the seconds over which they were measured."""
    series = "rate:traffic.prompt_tokens.*"
    uses = parts.history.over([series], window_s=WINDOW_S)[series]
    return uses or 0.0, min(WINDOW_S, uptime_s)


def _prices(parts: AdminParts, model: str) -> Prices:
    """Reads the ledger: what the tenants of yesterday and today pay, each for its part of all
    prompt tokens."""
    books, now_ns = parts.books, time.time_ns()
    used = usage_report.report(books.store, usage_report.parse_query(since="yesterday"), Unit.ALL)
    whole, prices = sum(each.prompt for each in used), Prices()
    for each in used:
        with suppress(NoPrice):
            terms = Terms(tenant=each.tenant)
            pinned = books.accounts.book.at(model, now_ns, each.currency, terms)
            key = pinned.rates, each.currency
            prices[key] = prices.get(key, 0.0) + each.prompt / max(1, whole)
    return prices


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
