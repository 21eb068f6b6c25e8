"""The rows of the prefixes page as CSV for a spreadsheet: unrounded numbers, times in seconds,
amounts as decimals of the currency.
"""

import io

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admin.access import MayRead
from api.admin.pages.explorer import IDLE, labels_for
from api.admin.pages.filters import Filter
from api.admin.pages.prefix_rows import OUTLINE_TOKENS, TIERS, Costs, PrefixRow, ScopeRows, rows_of
from api.admin.parts import parts_of
from billing.money import format_units
from billing.reports.csv import safe_writer
from tiers.blocks.tree import TreeQuery

router = APIRouter(include_in_schema=False)

MAX_ROWS = 5_000
HEADER = (
    *("owner", "model", "level", "key", "last_key", "label", "blocks", "tokens", "bytes"),
    *(f"{tier}_blocks" for tier in TIERS),
    *(
        "hits",
        "idle_s",
        "age_s",
        "saved",
        "keeping_a_month",
        "currency",
        "cost_currency",
        "short_ends",
    ),
)


@router.get("/admin/explorer.csv")
async def table(
    request: Request, admin: MayRead, tenant: Filter = "", idle: Filter = "", sort: Filter = ""
) -> Response:
    """More rows than the page shows, with the same filters and order."""
    explorer = parts_of(request).explorer
    query = TreeQuery(
        depth=64, max_nodes=MAX_ROWS, max_children=MAX_ROWS, num_tokens=OUTLINE_TOKENS
    )
    grown = await explorer.tree(query, tenant)
    scopes = rows_of(
        grown,
        Costs.of(parts_of(request), explorer.block_bytes),
        min_idle_s=IDLE.get(idle, 0),
        sort=sort,
        decode=labels_for(request, admin),
        outline=parts_of(request).outline,
    )
    out = io.StringIO()
    write = safe_writer(out)
    write(HEADER)
    for scope in scopes:
        for row in scope.rows:
            write(_cells(scope, row))
    named = {"Content-Disposition": 'attachment; filename="prefixes.csv"'}
    return Response(out.getvalue(), media_type="text/csv", headers=named)


def _cells(scope: ScopeRows, row: PrefixRow) -> list[object]:
    owner = scope.owner
    return [
        owner.label if owner else "",
        owner.model if owner else "",
        row.level,
        row.key or "",
        row.last or "",
        row.label,
        row.num_blocks,
        row.num_tokens,
        row.nbytes,
        *(row.num_in.get(tier, 0) for tier in TIERS),
        row.hits,
        round(row.idle_s, 3),
        round(row.age_s, 3),
        "" if row.saved is None else format_units(row.saved),
        "" if row.keeping is None else format_units(row.keeping),
        scope.currency,
        "" if row.keeping is None else scope.cost_currency,
        row.num_folded,
    ]
