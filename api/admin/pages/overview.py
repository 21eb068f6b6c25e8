"""The overview: running requests, latency, hits and revenue; with filters, what fits of the
requests that are remembered. And the cache: what each tier holds, serves, moves and evicts."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admin.access import MayRead
from api.admin.pages.base import render
from api.admin.pages.filters import Asked, choices_of
from api.admin.parts import parts_of
from api.journal.journal import RequestRecord
from api.shapes.usage import timings_ms
from billing.money import parse_units
from tiers.errors import FAULTS, MissReason

router = APIRouter(include_in_schema=False)

MEANINGS: Final = {
    MissReason.ABSENT: "no tier held the block",
    MissReason.ARITHMETIC: "held, but computed by another processor, device or torch",
    MissReason.TAIL: "the last, partly filled block, or the one token that is always computed",
    MissReason.UNECONOMIC: "computing was faster than loading",
    MissReason.OVERLOADED: "the queue of loads was full",
    MissReason.NO_ROOM: "no free memory to load into",
    MissReason.DISABLED: "the request or the server turned the cache off",
    MissReason.COLLISION: "the same key, another scope, parent or tokens",
    MissReason.CHECKSUM: "the payload was not what had been written",
    MissReason.TORN: "the record was shorter or longer than its header said",
    MissReason.VERSION: "written by another record format",
    MissReason.LAYOUT: "written for another block layout",
    MissReason.IO_ERROR: "the operating system refused the read",
    MissReason.DECODE: "the payload did not decompress",
    MissReason.COPY: "the device refused to copy it",
}


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


@router.get("/admin/cache")
async def cache(request: Request, found: MayRead) -> Response:
    return render(
        request,
        "cache.html",
        found,
        stats=parts_of(request).stats(),
        reasons=list(MEANINGS.items()),
        faults=FAULTS,
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
