"""Recent requests and why their prompts missed: pages under /admin/requests, and JSON."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from api.admin.access import MayChange, MayRead
from api.admin.login.sessions import Admin
from api.admin.pages.base import render
from api.admin.pages.filters import Asked, Filter, choices_of
from api.admin.parts import add_audit_entry, parts_of
from api.context import wire_of
from api.errors import RecordNotFound, Unsupported
from api.journal.documents import details, summary
from api.journal.journal import RequestRecord
from api.journal.why import MissFinding, ReasonKind, why
from api.served_model import find_model

router = APIRouter(tags=["admin: requests"])

PAGE = 50
MAX_SKIP = 1 << 31


@router.get("/admin/api/requests")
async def requests(
    request: Request,
    _: MayRead,
    chosen: Asked,
    state: Filter = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[dict[str, Any]]:
    """Recent requests in the journal, the latest arrival first. Times are UTC."""
    found = chosen.requests(parts_of(request).journal, state=state)
    return [summary(record) for record in found[:limit]]


@router.get("/admin/api/requests/{request_id}")
async def request_details(request: Request, request_id: str, _: MayRead) -> dict[str, Any]:
    """One request: timeline, hits by block, why it missed, the lines of its bill."""
    record = _found(request, request_id)
    return details(record, await _findings(request, record))


@router.get("/admin/requests", include_in_schema=False)
async def page(
    request: Request,
    admin: MayRead,
    chosen: Asked,
    q: Filter = "",
    state: Filter = "",
    skip: Annotated[int, Query(ge=0, le=MAX_SKIP)] = 0,
) -> Response:
    """The list. A search that matches one request shows it."""
    journal = parts_of(request).journal
    record = journal.find(q.strip()) if q.strip() else None
    if record is not None:
        return await _show(request, admin, record)
    found = chosen.requests(journal, state=state, text=q.strip())
    rows = found[skip : skip + PAGE + 1]
    return render(
        request,
        "rows.html" if request.headers.get("hx-target") == "rows" else "requests.html",
        admin,
        rows=[_row(record) for record in rows[:PAGE]],
        choices=choices_of(journal.newest()),
        chosen=chosen,
        num_records=journal.num_records,
        max_records=journal.settings.max_requests,
        q=q,
        state=state,
        skip=skip,
        page_size=PAGE,
        more=len(rows) > PAGE,
    )


@router.get("/admin/requests/{request_id}", include_in_schema=False)
async def request_page(request: Request, request_id: str, admin: MayRead) -> Response:
    return await _show(request, admin, _found(request, request_id))


@router.post("/admin/requests/{request_id}/prompt", include_in_schema=False)
async def prompt_page(request: Request, request_id: str, admin: MayChange) -> Response:
    """The prompt's text, if the operator keeps prompts. Leaves an audit entry."""
    record = _found(request, request_id)
    if not record.prompts:
        raise Unsupported("This server keeps no prompts; `journal.keep_prompts` would.")
    why = "read its prompt"
    await add_audit_entry(request, admin.name, "request.read", record.request_id, why=why)
    model = find_model(wire_of(request).inference.models, record.model)
    texts = [model.tokenizer.decode(tokens) for tokens in record.prompts]
    return await _show(request, admin, record, texts)


def _found(request: Request, request_id: str) -> RequestRecord:
    journal = parts_of(request).journal
    record = journal.find(request_id)
    if record is None:
        raise RecordNotFound(
            f"The journal has no request {request_id[:80]!r}. It keeps the latest "
            f"{journal.settings.max_requests:,}; the ledger has the bill of each."
        )
    return record


def _row(record: RequestRecord) -> dict[str, Any]:
    lookups = record.served.lookups if record.served is not None else ()
    kinds = [why(lookup, record.arrived_s).kind for lookup in lookups]
    missed = [kind for kind in kinds if kind is not ReasonKind.SERVED]
    return summary(record) | {"arrived_s": record.arrived_s, "why": missed[0] if missed else None}


async def _findings(request: Request, record: RequestRecord) -> dict[int, MissFinding]:
    """What a search of all tiers adds to the lookups' own reasons."""
    explorer = parts_of(request).explorer
    if record.served is None:
        return {}
    numbers = range(len(record.served.lookups))
    return {number: await explorer.finding(record, number) for number in numbers}


async def _show(
    request: Request, admin: Admin, record: RequestRecord, texts: list[str] | None = None
) -> Response:
    document = details(record, await _findings(request, record))
    return render(
        request,
        "request.html",
        admin,
        document=document,
        arrived_s=record.arrived_s,
        ended_s=record.ended_s,
        spans=_spans(document["timings_ms"]),
        has_prompts=bool(record.prompts),
        texts=texts,
    )


def _spans(timings: dict[str, float | None]) -> list[dict[str, Any]]:
    """The four consecutive spans, each with its position in thousandths of the whole."""
    names = ("queue", "load", "prefill", "decode")
    lengths = [timings.get(name) or 0.0 for name in names]
    total = sum(lengths)
    spans, place = [], 0.0
    for name, length in zip(names, lengths, strict=True):
        width = 1000 * length / total if total else 0.0
        spans.append({"name": name, "ms": timings.get(name), "x": place, "width": width})
        place += width
    return spans
