"""The overview: running requests, latency, hits and revenue; with filters, what fits of the
requests that are remembered."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admin.access import MayRead
from api.admin.pages.base import render
from api.admin.pages.filters import Asked, choices_of
from api.admin.parts import parts_of
from api.journal.journal import RequestRecord
from api.shapes.usage import timings_ms
from billing.money import parse_units

router = APIRouter(include_in_schema=False)


@router.get("/admin")
@router.get("/admin/")
async def overview(request: Request, found: MayRead, chosen: Asked) -> Response:
    parts = parts_of(request)
    stats = parts.stats()
    return render(
        request,
        "overview.html",
        found,
        stats=stats,
        alerts=await parts.alerts(),
        currencies=parts.currencies(),
        chosen=chosen,
        choices=choices_of(parts.journal.newest()),
        figures=figures(chosen.requests(parts.journal)) if chosen else (),
        max_records=parts.journal.settings.max_requests,
        base_url=str(request.base_url).rstrip("/"),
    )


@dataclass(slots=True)
class Figures:
    """Sums over the requests of one tenant for one model; of all, where both are empty."""

    tenant: str = ""
    model: str = ""
    requests: int = 0
    refused: int = 0
    prompt: int = 0
    hit: int = 0
    output: int = 0
    charged: Counter[str] = field(default_factory=Counter)  # units, by currency
    saved: Counter[str] = field(default_factory=Counter)
    first_token_ms: list[float] = field(default_factory=list)

    def add(self, record: RequestRecord) -> None:
        self.requests += 1
        self.refused += record.served is None
        if record.served is not None:
            usage = record.served.usage
            ttft_ms = timings_ms(record.served.timeline, usage.output)["ttft"]
            self.prompt += usage.prompt
            self.hit += usage.hit
            self.output += usage.output
            self.first_token_ms += [] if ttft_ms is None else [ttft_ms]
        if record.bill is not None and record.bill.currency and record.bill.cost:
            self.charged[record.bill.currency] += parse_units(record.bill.cost)
            self.saved[record.bill.currency] += parse_units(record.bill.saved or "0")

    def first_token(self, share: float) -> float | None:
        """The percentile, in milliseconds."""
        times = sorted(self.first_token_ms)
        return times[math.ceil(share * len(times)) - 1] if times else None


def figures(records: Iterable[RequestRecord]) -> list[Figures]:
    """All of them, then each tenant's by model."""
    sums: dict[tuple[str, str], Figures] = {("", ""): Figures()}
    for record in records:
        pair = record.tenant, record.model
        for each in (sums["", ""], sums.setdefault(pair, Figures(*pair))):
            each.add(record)
    return [sums[pair] for pair in sorted(sums)]
