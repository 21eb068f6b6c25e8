"""The working set: how the hit rate depends on the size of the cache, and what that is worth.

The curve comes from sampled traffic (`tiers.telemetry.working_set`), so it covers sizes that the
cache never had. Amounts are by the rate card: what clients would pay less, which is the price of
the computing saved.
"""

import asyncio
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admin.access import MayRead
from api.admin.pages.advice import MONTH_S, CurveTier, advise
from api.admin.pages.base import render
from api.admin.parts import AdminParts, parts_of
from api.admin.routes.stats import json_answer
from billing.errors import NoPrice
from billing.money import format_units
from billing.prices.book import Rates, Terms
from billing.reports import usage as usage_report
from billing.reports.usage import Unit
from billing.usage import HIT_CLASSES
from tiers.telemetry.working_set import TrafficReport
from tiers.tier import TierName

router = APIRouter(tags=["admin: cache"])

WINDOW_S = 86_400.0  # of traffic, scaled to a month; a day has busy and quiet hours
MIN_USES = 100  # blocks requested; a curve from fewer says little
Prices = dict[tuple[Rates, str], float]  # parts of all prompt tokens, by rates and currency
NO_RATES = Rates(**dict.fromkeys((*HIT_CLASSES, "miss", "output"), 0))


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
