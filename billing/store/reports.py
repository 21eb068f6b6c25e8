"""Reads for reports, audit and export, and their two writes. Returns plain rows."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, select, update

from billing.gate.entries import ACCOUNTS, Entry, Kind
from billing.gate.holds import StoredHold, decode_request
from billing.gate.rollups import SPLIT, Row, joined
from billing.gate.work import TenantAccount
from billing.names import bare_id
from billing.store.batch import find_corrections
from billing.store.rows import read_account, read_entry, read_hold
from billing.store.schema import (
    accounts,
    entries,
    export_cursors,
    holds,
    trail,
    usage_daily,
    usage_sessions,
)
from billing.store.store import LedgerStore

CHUNK = 10_000
_IN_ORDER = (entries.c.tenant, entries.c.seq)


def stream_entries(
    connection: Connection,
    tenant: str | None = None,
    *,
    after: int = 0,
    until: int = 2**63 - 1,
    since_ns: int = 0,
) -> Iterator[Entry]:
    """Entries with `after < number <= until`, by tenant and number, in bounded memory.

    Read it to the end, because PostgreSQL holds a cursor for it.
    """
    wanted = (entries.c.seq > after) & (entries.c.seq <= until)
    if tenant is not None:
        wanted &= entries.c.tenant == tenant
    if since_ns:
        wanted &= entries.c.at_ns >= since_ns
    yield from _stream(connection, wanted)


def _stream(connection: Connection, wanted: ColumnElement[bool]) -> Iterator[Entry]:
    columns = [column for column in entries.c if column.name != "corrects"]
    query = select(*columns).where(wanted).order_by(*_IN_ORDER)
    kinds = {kind.value: kind for kind in Kind}
    found = connection.execute(query, execution_options={"yield_per": CHUNK})
    for tenant_, seq, kind, *rest in found:
        yield Entry(tenant_, seq, kinds.get(kind, kind), *rest)


def charges_between(
    connection: Connection, tenant: str, from_ns: int, to_ns: int
) -> Iterator[Entry]:
    """A tenant's charges billed in `from_ns <= moment < to_ns`; reads no others."""
    charges = (entries.c.tenant == tenant) & (entries.c.kind == Kind.CHARGE.value)
    billed = (entries.c.billed_ns >= from_ns) & (entries.c.billed_ns < to_ns)
    yield from _stream(connection, charges & billed)
    dated = entries.c.billed_ns.is_(None) & (entries.c.at_ns < to_ns)
    first = first_seq(connection, tenant, from_ns)
    yield from _stream(connection, charges & dated & (entries.c.seq >= first))


def first_seq(connection: Connection, tenant: str, at_ns: int) -> int:
    """The number of a tenant's first entry at or after an instant.

    Found by bisection, because a chain's times never go back.
    """
    mine = entries.c.tenant == tenant
    low, high = 1, (connection.scalar(select(func.max(entries.c.seq)).where(mine)) or 0) + 1
    while low < high:
        middle = (low + high) // 2
        query = select(entries.c.at_ns).where(mine & (entries.c.seq >= middle))
        found = connection.scalar(query.order_by(entries.c.seq).limit(1))
        low, high = (low, middle) if found is None or found >= at_ns else (middle + 1, high)
    return low


def correction_rows(connection: Connection) -> dict[tuple[str, int], int]:
    """The indexed number of the corrected charge, by tenant and number of the correction."""
    query = select(entries.c.tenant, entries.c.seq, entries.c.corrects)
    found = connection.execute(query.where(entries.c.corrects.is_not(None)))
    return {(tenant, seq): corrects for tenant, seq, corrects in found}


def find_request(connection: Connection, tenant: str, request_id: str) -> Entry | None:
    """The charge of a request, by its id or its answer's id."""
    names = (request_id, bare_id(request_id))
    query = select(entries).where(
        (entries.c.tenant == tenant)
        & entries.c.request_id.in_(names)
        & (entries.c.kind == Kind.CHARGE.value)
    )
    found = {row["request_id"]: row for row in connection.execute(query).mappings()}
    row = found.get(names[0]) or found.get(names[1])
    return None if row is None else read_entry(row)


def instant_of(connection: Connection, tenant: str, seq: int) -> int:
    """The billing instant of an entry."""
    moment = func.coalesce(entries.c.billed_ns, entries.c.at_ns)
    query = select(moment).where((entries.c.tenant == tenant) & (entries.c.seq == seq))
    at_ns: int = connection.execute(query).scalar_one()
    return at_ns


def request_entries(connection: Connection, tenant: str, request_id: str) -> list[Entry]:
    """The charge of a request, then its corrections."""
    charged = find_request(connection, tenant, request_id)
    return [] if charged is None else [charged, *find_corrections(connection, charged)]


def last_entries(
    connection: Connection, tenant: str, limit: int, before: int | None = None
) -> list[Entry]:
    """A tenant's newest entries, newest first, optionally only those before number `before`."""
    query = select(entries).where(entries.c.tenant == tenant).order_by(entries.c.seq.desc())
    if before is not None:
        query = query.where(entries.c.seq < before)
    return [read_entry(row) for row in connection.execute(query.limit(limit)).mappings().all()]


def rare_entries(
    connection: Connection, tenant: str, from_ns: int = 0, to_ns: int = 2**63 - 1
) -> list[Entry]:
    """Grants, top-ups and corrections of a span of time, in order."""
    query = (
        select(entries)
        .where((entries.c.tenant == tenant) & (entries.c.kind != Kind.CHARGE.value))
        .where(entries.c.at_ns >= from_ns)  # never before its moment
        .order_by(entries.c.seq)
    )
    found = map(read_entry, connection.execute(query).mappings())
    return [entry for entry in found if from_ns <= entry.moment_ns < to_ns]


def all_accounts(connection: Connection, *, lock: bool = False) -> dict[str, TenantAccount]:
    query = select(accounts).order_by(accounts.c.tenant)
    if lock:
        query = query.with_for_update()
    return {row["tenant"]: read_account(row) for row in connection.execute(query).mappings().all()}


def held_by_tenant(connection: Connection) -> dict[str, int]:
    """The sum of each tenant's holds."""
    sums: dict[str, int] = {}
    for hold in hold_list(connection):
        sums[hold.tenant] = sums.get(hold.tenant, 0) + hold.amount
    return sums


def hold_list(connection: Connection, tenant: str | None = None) -> list[StoredHold]:
    query = select(holds).order_by(holds.c.tenant, holds.c.request_id)
    if tenant is not None:
        query = query.where(holds.c.tenant == tenant)
    return [read_hold(row) for row in connection.execute(query).mappings().all()]


def daily(
    connection: Connection, tenant: str | None, from_day: int = 0, to_day: int = 2**31 - 1
) -> list[Row]:
    """Rollups of the days `from_day <= day < to_day`, by tenant and day."""
    query = select(usage_daily).where(usage_daily.c.day >= from_day, usage_daily.c.day < to_day)
    if tenant is not None:
        query = query.where(usage_daily.c.tenant == tenant)
    order = (usage_daily.c.tenant, usage_daily.c.day, usage_daily.c.model, usage_daily.c.version)
    found = connection.execute(query.order_by(*order)).mappings().all()
    return [joined(dict(row)) for row in found]


def models_of(connection: Connection) -> list[str]:
    """The models that were ever charged for."""
    return list(connection.execute(select(usage_daily.c.model).distinct()).scalars())


def last_days(connection: Connection) -> dict[str, int]:
    """The last UTC day on which each key was charged, in days since 1970."""
    found = select(usage_daily.c.key_id, func.max(usage_daily.c.day).label("day")).group_by(
        usage_daily.c.key_id
    )
    return {row.key_id: row.day for row in connection.execute(found)}


def charged_since(connection: Connection, day: int) -> dict[str, int]:
    """The sum of each tenant's charges since the beginning of a day."""
    parts = [func.sum(usage_daily.c[f"amount_{part}"]) for part in ("hi", "lo")]
    query = select(usage_daily.c.tenant, *parts).where(usage_daily.c.day >= day)
    found = connection.execute(query.group_by(usage_daily.c.tenant))
    return {tenant: int(hi) * SPLIT + int(lo) for tenant, hi, lo in found}


def sessions(
    connection: Connection,
    tenant: str | None = None,
    limit: int | None = None,
    from_ns: int = 0,
    to_ns: int = 2**63 - 1,
) -> list[Row]:
    """Rollups by session, latest first, whose last request is in a span of time."""
    last_ns = usage_sessions.c.last_ns
    query = select(usage_sessions).order_by(last_ns.desc()).limit(limit)
    query = query.where((last_ns >= from_ns) & (last_ns < to_ns))
    if tenant is not None:
        query = query.where(usage_sessions.c.tenant == tenant)
    return [joined(dict(row)) for row in connection.execute(query).mappings().all()]


def repeated(connection: Connection) -> list[tuple[str, str, str, int]]:
    """Tenant, kind, id and last number of entries that share tenant, kind and id. The database's
    index refuses them, unless somebody removed it."""
    key = (entries.c.tenant, entries.c.request_id, entries.c.kind)
    query = select(*key).group_by(*key).having(func.count() > 1)  # reads the index alone
    found = []
    for row in connection.execute(query.order_by(*key).limit(20)).all():
        same = [column == value for column, value in zip(key, row, strict=True)]
        seq = connection.scalar(select(func.max(entries.c.seq)).where(*same)) or 0
        found.append((row.tenant, row.kind, row.request_id, seq))
    return found


def newest_ns(connection: Connection) -> int:
    """The latest instant of any entry, running request or decision.

    A card is never dated before it, whatever the clock says. Otherwise a proof would expect the
    card in earlier requests.
    """
    made: int = connection.scalar(select(func.coalesce(func.max(accounts.c.at_ns), 0))) or 0
    decided: int = connection.scalar(select(func.coalesce(func.max(trail.c.at_ns), 0))) or 0
    running = (decode_request(hold.body)[1].admitted_ns for hold in hold_list(connection))
    return max(made, decided, *running)


def num_entries(connection: Connection) -> int:
    return connection.scalar(select(func.coalesce(func.sum(accounts.c.seq), 0))) or 0


def replace_projections(
    connection: Connection,
    projected: Iterable[TenantAccount],
    daily_rows: Sequence[Row],
    session_rows: Sequence[Row],
) -> None:
    """Replaces balances and rollups by those that `billing.proof.audit` derived from the
    entries."""
    for account in projected:
        values: dict[str, Any] = {name: account.balances[name] for name in ACCOUNTS}
        values |= {"held": account.held, "seq": account.seq, "head": account.head}
        values["at_ns"] = account.at_ns
        connection.execute(
            update(accounts).where(accounts.c.tenant == account.tenant).values(values)
        )
    for table, rows in ((usage_daily, daily_rows), (usage_sessions, session_rows)):
        connection.execute(delete(table))
        if rows:
            connection.execute(table.insert(), list(rows))


def cursors(connection: Connection, name: str) -> dict[str, int]:
    """An export's position in each tenant's chain."""
    query = select(export_cursors.c.tenant, export_cursors.c.seq).where(
        export_cursors.c.name == name
    )
    return {row.tenant: row.seq for row in connection.execute(query)}


def advance(store: LedgerStore, name: str, positions: dict[str, int]) -> None:
    """Stores an export's positions."""
    statement = store.insert(export_cursors)
    statement = statement.on_conflict_do_update(
        index_elements=["name", "tenant"], set_={"seq": statement.excluded.seq}
    )
    rows = [{"name": name, "tenant": t, "seq": seq} for t, seq in positions.items()]
    if rows:
        store.retrying(lambda connection: connection.execute(statement, rows))
