"""The reads before and the writes after a batch of ledger commands.

Both run inside the one transaction of `LedgerStore.apply`. A batch locks and reads only what its
commands can change.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import orjson
from sqlalchemy import Connection, select

from billing.gate.commands import Command, Expire, Reserve, Settle, TopUp, fingerprint_of, keys_of
from billing.gate.entries import CORRECTABLE, Entry, Kind
from billing.gate.holds import request_body
from billing.gate.rollups import rollups
from billing.gate.work import Work
from billing.money import format_units
from billing.prices.book import PriceBook
from billing.store import expiring as store_expiring
from billing.store import undelivered as store_undelivered
from billing.store.prepared import HotStatements
from billing.store.rows import (
    account_row,
    entry_row,
    hold_row,
    read_account,
    read_entry,
    read_hold,
    read_limit,
    read_spending,
    spending_row,
)
from billing.store.schema import entries
from billing.store.trail import add_trail


def load_work(
    hot: HotStatements,
    connection: Connection,
    commands: Sequence[Command],
    book: PriceBook,
    clock_ns: Callable[[], int],
) -> Work:
    """Locks the accounts that the commands touch and reads what they need."""
    keys = sorted({key for command in commands for key in keys_of(command)})
    tenants = sorted({tenant for tenant, _ in keys})
    locked = map(read_account, hot.find_accounts(connection, tenants))
    work = Work(book, clock_ns(), {account.tenant: account for account in locked})
    held = map(read_hold, hot.find_holds.by_tenant(connection, keys))
    work.holds = {hold.key: hold for hold in held}
    unheld = [key for key in keys if key not in work.holds]  # a held request was not charged
    for entry in map(read_entry, hot.find_entries.by_tenant(connection, unheld)):
        work.entries.setdefault((entry.tenant, entry.request_id), []).append(entry)
    retried = {key for command in commands if (key := fingerprint_of(command))}
    for fingerprint in retried:
        lost = store_undelivered.charges(connection, fingerprint, work.now_ns)
        work.undelivered[fingerprint] = lost
        for hold in store_undelivered.running(connection, fingerprint):
            work.holds.setdefault(hold.key, hold)
    for tenant in {each.tenant for each in commands if isinstance(each, Expire)}:
        work.grants[tenant] = store_expiring.grants_of(connection, tenant)
    for found in chain(work.entries.values(), work.grants.values(), work.undelivered.values()):
        for entry in found:
            if entry.kind in CORRECTABLE:
                corrections = find_corrections(connection, entry)
                work.corrections[entry.tenant, entry.seq] = corrections
    if limited := [account.tenant for account in work.accounts.values() if account.limited]:
        _load_limits(hot, connection, commands, limited, work)
    return work


def _load_limits(
    hot: HotStatements,
    connection: Connection,
    commands: Sequence[Command],
    tenants: Sequence[str],
    work: Work,
) -> None:
    """Reads hard limits, and the spending of all owners that the commands name."""
    for limit in map(read_limit, hot.find_limits(connection, tenants)):
        work.limits.setdefault(limit.tenant, []).append(limit)
    wanted: dict[tuple[str, str], set[str]] = {}
    for tenant, details, at_ns in _counted(commands, work):
        for limit in work.limits.get(tenant, ()):
            if spender := limit.spender(details, at_ns):
                wanted.setdefault((spender.limit, spender.period), set()).add(spender.value)
    for (budget, period), values in wanted.items():
        fixed = {"of_budget": budget, "of_period": period}
        rows = hot.find_spending(connection, sorted(values), **fixed)
        work.spending.update(map(read_spending, rows))


def _counted(commands: Sequence[Command], work: Work) -> Iterator[tuple[str, dict[str, Any], int]]:
    """The tenant, body and moment of every request whose hold or charge may change."""
    for command in commands:
        if isinstance(command, Reserve | TopUp | Settle) and command.hold.tenant in work.limits:
            hold = command.hold
            body = request_body(hold.pinned.ref, hold.context)
            yield hold.tenant, body, hold.context.admitted_ns or work.now_ns
    for stored in work.holds.values():
        if stored.tenant in work.limits:
            body = orjson.loads(stored.body)
            yield stored.tenant, body, body.get("admitted_ns", work.now_ns)
    for found in (*work.entries.values(), *work.undelivered.values()):
        for entry in found:
            if entry.tenant in work.limits and entry.kind is Kind.CHARGE:
                yield entry.tenant, entry.details, entry.moment_ns


def write_work(hot: HotStatements, connection: Connection, work: Work) -> None:
    if work.new_entries:
        hot.add_entries.run(connection, map(entry_row, work.new_entries))
        store_expiring.note_grants(connection, work.new_entries)
        daily, sessions = rollups(work.new_entries).stored()
        if daily:
            hot.add_daily.run(connection, daily)
        if sessions:
            hot.add_sessions.run(connection, sessions)
    if work.put_holds:
        hot.put_holds.run(connection, map(hold_row, work.put_holds.values()))
    if work.dropped_holds:
        dropped = [{"tenant": key[0], "request_id": key[1]} for key in work.dropped_holds]
        hot.drop_holds.run(connection, dropped)
    if work.put_spending:
        counted = [(spender, work.spending[spender]) for spender in sorted(work.put_spending)]
        hot.put_spending.run(connection, [spending_row(*each) for each in counted if any(each[1])])
        ended = [spending_row(*each) for each in counted if not any(each[1])]
        hot.drop_spending.run(connection, ended)
    if work.touched:
        moved = [account_row(work.accounts[tenant]) for tenant in sorted(work.touched)]
        hot.move_accounts.run(connection, moved)
    for fingerprint in work.dropped_undelivered:
        store_undelivered.forget(connection, fingerprint)
    for fingerprint, request_id in work.put_undelivered:
        store_undelivered.note(connection, fingerprint, request_id, work.now_ns)
    for entry, before in work.decisions:
        _write_decision(connection, entry, before)


def find_corrections(connection: Connection, charged: Entry) -> list[Entry]:
    """The entries that correct a charge or a deposit."""
    query = select(entries).where(
        (entries.c.tenant == charged.tenant) & (entries.c.corrects == charged.seq)
    )
    return [read_entry(row) for row in connection.execute(query).mappings()]


def _write_decision(connection: Connection, entry: Entry, worth: int) -> None:
    """Adds the trail entry of a deposit, grant or correction that a person decided."""
    details = entry.details
    about: dict[str, object] = {"reference": entry.request_id}
    if "expires_ns" in details:
        about["expires_ns"] = details["expires_ns"]
    add_trail(
        connection,
        at_ns=entry.at_ns,
        actor=details["by"],
        action=f"balance.{entry.kind}",
        subject=f"{entry.tenant}/{entry.seq}",
        before={"balance": format_units(worth)},
        after={"balance": format_units(worth + entry.amount)} | about,
        reason=details.get("reason", ""),
    )
